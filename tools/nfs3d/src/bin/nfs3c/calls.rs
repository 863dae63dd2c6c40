//! A connection to an NFS server: one call after another.

use std::io;

use anyhow::{Context, anyhow, ensure};
use rpcrdma::LocalClient;
use rpcrdma::client::Connection;
use rpcrdma::typed::Response;
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Client, Readdirplus};
use rpcrdma_nfs3d::nfs3::*;

/// Limit of a READDIRPLUS in bytes: exceeds a message, so that the reply uses a Reply chunk.
pub(crate) const DIRECTORY: usize = 64 << 10;

/// A file handle.
pub(crate) type Handle = Vec<u8>;

/// A connection, and limits of the server.
pub(crate) struct Nfs {
    pub(crate) client: LocalClient,
    root: Handle,
    /// Outstanding calls.
    pub(crate) depth: usize,
    /// Longest inline data, in bytes.
    pub(crate) inline: u32,
    /// Limit of READ and WRITE, in bytes.
    pub(crate) read_size: u32,
    pub(crate) write_size: u32,
}

/// Error of a status: its name, with the text of system errors (RFC 1813 §2.6).
pub(crate) fn failed(status: Nfsstat3) -> anyhow::Error {
    match status as i32 {
        code if code < 10_000 => anyhow!("{}: {}", status.name(), io::Error::from_raw_os_error(code)),
        _ => anyhow!("{}", status.name()),
    }
}

/// A handle in arguments.
pub(crate) fn fh(data: &Handle) -> NfsFh3<'_> {
    NfsFh3 { data }
}

impl Nfs {
    /// Gets the limits of the server (FSINFO). `block` limits READ and WRITE.
    pub(crate) fn new(client: LocalClient, root: Handle, depth: usize, block: u32) -> anyhow::Result<Self> {
        let mut nfs = Self { client, root, depth, inline: 0, read_size: block, write_size: block };
        let Fsinfo3Resok { rtmax, wtmax, .. } = nfs.limits().context("FSINFO")?;
        ensure!(rtmax > 0 && wtmax > 0, "the server reads or writes 0 bytes at a time");
        nfs.read_size = block.min(rtmax);
        nfs.write_size = block.min(wtmax);
        Ok(nfs)
    }

    /// Calls on the connection.
    fn calls(&mut self) -> Client<(&mut LocalClient, Connection)> {
        let first = self.client.first();
        Client((&mut self.client, first))
    }

    fn limits(&mut self) -> anyhow::Result<Fsinfo3Resok> {
        let root = self.root.clone();
        let response = self.calls().fsinfo(&Fsinfo3Args { fsroot: fh(&root) })?;
        response.results()?.into_result().map_err(failed)
    }

    /// File at a path below the export, without following symbolic links.
    pub(crate) fn find(&mut self, path: &str) -> anyhow::Result<Handle> {
        let mut at = self.root.clone();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            at = self.lookup(&at, name.as_bytes()).with_context(|| format!("LOOKUP of {name:?} in {path}"))?;
        }
        Ok(at)
    }

    pub(crate) fn lookup(&mut self, dir: &Handle, name: &[u8]) -> anyhow::Result<Handle> {
        let response = self.calls().lookup(&Lookup3Args { what: Diropargs3 { dir: fh(dir), name } })?;
        Ok(response.results()?.into_result().map_err(failed)?.object.data.into())
    }

    fn attributes(&mut self, object: &Handle) -> anyhow::Result<Fattr3> {
        let response = self.calls().getattr(&Getattr3Args { object: fh(object) })?;
        Ok(response.results()?.into_result().map_err(failed)?.obj_attributes)
    }

    pub(crate) fn getattr(&mut self, object: &Handle, path: &str) -> anyhow::Result<Fattr3> {
        self.attributes(object).with_context(|| format!("GETATTR of {path}"))
    }

    /// Target of a symbolic link.
    pub(crate) fn readlink(&mut self, link: &Handle) -> anyhow::Result<Vec<u8>> {
        let response = self.calls().readlink(&Readlink3Args { symlink: fh(link) })?;
        Ok(response.results()?.into_result().map_err(failed)?.data.bytes().into())
    }

    /// Entries of a directory behind a cookie.
    pub(crate) fn readdirplus(
        &mut self,
        dir: &Handle,
        cookie: u64,
        cookieverf: Cookieverf3,
    ) -> anyhow::Result<Response<Readdirplus>> {
        let size = DIRECTORY as u32;
        let args = Readdirplus3Args { dir: fh(dir), cookie, cookieverf, dircount: size, maxcount: size };
        Ok(self.calls().readdirplus(&args)?)
    }

    /// Creates an empty file, or truncates it.
    pub(crate) fn create(&mut self, dir: &Handle, name: &[u8], mode: u32) -> anyhow::Result<Handle> {
        let how = Createhow3::Unchecked(Sattr3 { mode: Some(mode), size: Some(0), ..UNCHANGED });
        let response = self.calls().create(&Create3Args { r#where: Diropargs3 { dir: fh(dir), name }, how })?;
        match response.results()?.into_result().map_err(failed)?.obj {
            Some(handle) => Ok(handle.data.into()),
            None => self.lookup(dir, name),
        }
    }

    /// Commits writes. Returns the write verifier, which changes with a restart.
    pub(crate) fn commit(&mut self, file: &Handle) -> anyhow::Result<Writeverf3> {
        let response = self.calls().commit(&Commit3Args { file: fh(file), offset: 0, count: 0 })?;
        Ok(response.results()?.into_result().map_err(failed)?.verf)
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
