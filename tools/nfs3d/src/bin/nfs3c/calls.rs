//! A connection to an NFS server: one call after another.

use std::io;

use anyhow::{Context, bail, ensure};
use nfs3_types::nfs3::{
    COMMIT3args, COMMIT3res, CREATE3args, CREATE3res, FSINFO3args, FSINFO3res, GETATTR3args, GETATTR3res, LOOKUP3args,
    LOOKUP3res, NFS_PROGRAM, Nfs3Option, Nfs3Result, READDIRPLUS3args, READDIRPLUS3res, READLINK3args, READLINK3res,
    cookieverf3, createhow3, dirlistplus3, diropargs3, fattr3, filename3, nfs_fh3, nfsstat3, sattr3, writeverf3,
};
use nfs3_types::xdr_codec::{Pack, Unpack};
use rpcrdma::LocalClient;

/// Limit of a READDIRPLUS in bytes: exceeds a message, so that the reply uses a Reply chunk.
pub(crate) const DIRECTORY: usize = 64 << 10;
/// Longest symbolic link on Linux, in bytes.
const PATH_MAX: usize = 4096;
/// Longest other results, in bytes.
const SHORT: usize = 512;

/// A connection, and limits of the server.
pub(crate) struct Nfs {
    pub(crate) client: LocalClient,
    root: nfs_fh3,
    /// Outstanding calls.
    pub(crate) depth: usize,
    /// Longest inline data, in bytes.
    pub(crate) inline: u32,
    /// Limit of READ and WRITE, in bytes.
    pub(crate) read_size: u32,
    pub(crate) write_size: u32,
}

/// Decodes results without a rest.
pub(crate) fn decode<T: Unpack>(mut results: &[u8]) -> anyhow::Result<T> {
    let (value, _) = T::unpack(&mut results).map_err(|error| anyhow::anyhow!("bad results: {error}"))?;
    ensure!(results.is_empty(), "{} bytes behind the results", results.len());
    Ok(value)
}

/// Encodes arguments.
pub(crate) fn encode(arguments: &impl Pack) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(arguments.packed_size());
    arguments.pack(&mut bytes).map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(bytes)
}

/// Name of a status, with the text of system errors (RFC 1813 §2.6).
pub(crate) fn said(status: nfsstat3) -> String {
    match status as i32 {
        code if code < 10_000 => format!("{status:?}: {}", io::Error::from_raw_os_error(code)),
        _ => format!("{status:?}"),
    }
}

/// The results, or the server's error.
pub(crate) fn good<T, E>(result: Nfs3Result<T, E>) -> anyhow::Result<T> {
    match result {
        Nfs3Result::Ok(results) => Ok(results),
        Nfs3Result::Err((status, _)) => bail!("{}", said(status)),
    }
}

pub(crate) fn given<T: Pack + Unpack>(value: Nfs3Option<T>) -> Option<T> {
    match value {
        Nfs3Option::Some(value) => Some(value),
        Nfs3Option::None => None,
    }
}

impl Nfs {
    /// Gets the limits of the server (FSINFO). `block` limits READ and WRITE.
    pub(crate) fn new(client: LocalClient, root: nfs_fh3, depth: usize, block: u32) -> anyhow::Result<Self> {
        let mut nfs = Self { client, root, depth, inline: 0, read_size: block, write_size: block };
        let args = FSINFO3args { fsroot: nfs.root.clone() };
        let info = good(nfs.call::<FSINFO3res>(NFS_PROGRAM::NFSPROC3_FSINFO, &args, SHORT)?).context("FSINFO")?;
        ensure!(info.rtmax > 0 && info.wtmax > 0, "the server reads or writes 0 bytes at a time");
        nfs.read_size = block.min(info.rtmax);
        nfs.write_size = block.min(info.wtmax);
        Ok(nfs)
    }

    /// Makes a call whose results have at most `longest` bytes.
    fn call<T: Unpack>(&mut self, procedure: NFS_PROGRAM, arguments: &impl Pack, longest: usize) -> anyhow::Result<T> {
        let arguments = encode(arguments)?;
        let mut call = self.client.prepare(procedure as u32, arguments.len())?;
        call.args_mut().copy_from_slice(&arguments);
        let reply = self.client.call(call.expect_reply(longest))?;
        decode(reply.results())
    }

    /// File at a path below the export, without following symbolic links.
    pub(crate) fn find(&mut self, path: &str) -> anyhow::Result<nfs_fh3> {
        let mut at = self.root.clone();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            at = self.lookup(&at, name.as_bytes()).with_context(|| format!("LOOKUP of {name:?} in {path}"))?;
        }
        Ok(at)
    }

    pub(crate) fn lookup(&mut self, dir: &nfs_fh3, name: &[u8]) -> anyhow::Result<nfs_fh3> {
        let args = LOOKUP3args { what: diropargs3 { dir: dir.clone(), name: filename3::from(name) } };
        Ok(good(self.call::<LOOKUP3res>(NFS_PROGRAM::NFSPROC3_LOOKUP, &args, SHORT)?)?.object)
    }

    pub(crate) fn getattr(&mut self, object: &nfs_fh3, path: &str) -> anyhow::Result<fattr3> {
        let args = GETATTR3args { object: object.clone() };
        let results = self.call::<GETATTR3res>(NFS_PROGRAM::NFSPROC3_GETATTR, &args, SHORT).and_then(good);
        Ok(results.with_context(|| format!("GETATTR of {path}"))?.obj_attributes)
    }

    /// Target of a symbolic link.
    pub(crate) fn readlink(&mut self, link: &nfs_fh3) -> anyhow::Result<Vec<u8>> {
        let args = READLINK3args { symlink: link.clone() };
        let longest = SHORT + PATH_MAX;
        let results = good(self.call::<READLINK3res<'_>>(NFS_PROGRAM::NFSPROC3_READLINK, &args, longest)?)?;
        Ok(results.data.0.into_owned())
    }

    /// Entries of a directory behind a cookie, and their cookie verifier.
    pub(crate) fn readdirplus(
        &mut self,
        dir: &nfs_fh3,
        cookie: u64,
        cookieverf: cookieverf3,
    ) -> anyhow::Result<(dirlistplus3<'static>, cookieverf3)> {
        let size = DIRECTORY as u32;
        let args = READDIRPLUS3args { dir: dir.clone(), cookie, cookieverf, dircount: size, maxcount: size };
        let longest = SHORT + DIRECTORY;
        let results = self.call::<READDIRPLUS3res<'_>>(NFS_PROGRAM::NFSPROC3_READDIRPLUS, &args, longest)?;
        let results = good(results)?;
        Ok((results.reply, results.cookieverf))
    }

    /// Creates an empty file, or truncates it.
    pub(crate) fn create(&mut self, dir: &nfs_fh3, name: &[u8], mode: u32) -> anyhow::Result<nfs_fh3> {
        let attributes = sattr3 { mode: Nfs3Option::Some(mode), size: Nfs3Option::Some(0), ..sattr3::default() };
        let where_ = diropargs3 { dir: dir.clone(), name: filename3::from(name) };
        let args = CREATE3args { where_, how: createhow3::UNCHECKED(attributes) };
        let made = good(self.call::<CREATE3res>(NFS_PROGRAM::NFSPROC3_CREATE, &args, SHORT)?)?;
        match given(made.obj) {
            Some(handle) => Ok(handle),
            None => self.lookup(dir, name),
        }
    }

    /// Commits writes. Returns the write verifier, which changes with a restart.
    pub(crate) fn commit(&mut self, file: &nfs_fh3) -> anyhow::Result<writeverf3> {
        let args = COMMIT3args { file: file.clone(), offset: 0, count: 0 };
        Ok(good(self.call::<COMMIT3res>(NFS_PROGRAM::NFSPROC3_COMMIT, &args, SHORT)?)?.verf)
    }

    /// Statistics of the connection, as JSON.
    pub(crate) fn stats(&mut self) -> String {
        let stats = self.client.stats();
        let of = |name| stats.get(name).unwrap_or(0);
        let rejected =
            stats.metrics().filter(|one| one.name.starts_with("messages_rejected_")).map(|one| one.value).sum();
        let first = self.client.first();
        let terms = self.client.terms(first);
        let fields = [
            ("rdma_version", terms.map_or(0, |terms| terms.version().into())),
            ("credits", self.client.credits(first).unwrap_or(0).into()),
            ("connections", of("connections_made")),
            ("calls", of("calls")),
            ("failed", of("calls_failed")),
            ("again", of("calls_retransmitted")),
            ("calls_with_chunks", of("chunked_messages_sent")),
            ("calls_in_chunks", of("long_messages_sent")),
            ("replies_with_chunks", of("chunked_messages_received")),
            ("replies_in_chunks", of("long_messages_received")),
            ("invalidated_by_server", of("windows_revoked_by_peers")),
            ("invalidated_here", of("windows_revoked_here")),
            ("rejected", rejected),
        ];
        let fields: Vec<_> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    }
}
