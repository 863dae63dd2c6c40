//! A connection to an NFS server, and single calls on it.

use std::time::{Duration, Instant};
use std::{fmt, io};

use anyhow::{Context, ensure};
use rpcrdma::LocalClient;
use rpcrdma::client::Connection;
use rpcrdma::typed::Response;
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Client, Readdirplus};
use rpcrdma_nfs3d::nfs3::*;
use rustix::io::Errno;

use crate::busy::Retry;
use crate::escape::Escaped;

/// Limit of the results of a READDIRPLUS, in bytes. It exceeds a message, so that the reply uses a Reply chunk.
pub(crate) const DIRECTORY: usize = 64 << 10;

/// A file handle.
pub(crate) type Handle = Vec<u8>;

/// A connection to a server, and the limits of the server.
pub(crate) struct Nfs {
    pub(crate) client: LocalClient,
    root: Handle,
    /// Limit of outstanding calls.
    pub(crate) depth: usize,
    /// Longest inline data, in bytes.
    pub(crate) inline: u32,
    /// Limit of READ and WRITE, in bytes.
    pub(crate) read_size: u32,
    pub(crate) write_size: u32,
    /// Time limit for calls that the server is too busy to execute.
    pub(crate) busy_timeout: Duration,
}

/// A status other than success, as an error.
#[derive(Debug)]
pub(crate) struct StatusError(pub(crate) Nfsstat3);

/// Writes the name of the status, with the text of the corresponding system error (RFC 1813 §2.6).
impl fmt::Display for StatusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())?;
        match errno(self.0) {
            Some(code) => write!(f, ": {}", io::Error::from_raw_os_error(code)),
            None => Ok(()),
        }
    }
}

/// System error that a status stands for. Statuses up to 31 (NFS3ERR_MLINK) are Linux's error numbers.
fn errno(status: Nfsstat3) -> Option<i32> {
    let errno = match status {
        Nfsstat3::ErrNametoolong => Errno::NAMETOOLONG,
        Nfsstat3::ErrNotempty => Errno::NOTEMPTY,
        Nfsstat3::ErrDquot => Errno::DQUOT,
        Nfsstat3::ErrStale => Errno::STALE,
        Nfsstat3::ErrRemote => Errno::REMOTE,
        status => return Some(status as i32).filter(|&code| code <= Errno::MLINK.raw_os_error()),
    };
    Some(errno.raw_os_error())
}

impl std::error::Error for StatusError {}

/// A handle in arguments.
pub(crate) fn fh(data: &Handle) -> NfsFh3<'_> {
    NfsFh3 { data }
}

impl Nfs {
    /// Gets the limits of the server (FSINFO), and limits READ and WRITE to `block` bytes.
    pub(crate) fn new(
        client: LocalClient,
        root: Handle,
        depth: usize,
        block: u32,
        busy_timeout: Duration,
    ) -> anyhow::Result<Self> {
        let mut nfs = Self { client, root, depth, inline: 0, read_size: block, write_size: block, busy_timeout };
        let Fsinfo3Resok { rtmax, wtmax, .. } = nfs.retry(|nfs| nfs.limits().context("FSINFO"))?;
        ensure!(rtmax > 0 && wtmax > 0, "FSINFO: the server's limit of READ or WRITE is 0 bytes");
        nfs.read_size = block.min(rtmax);
        nfs.write_size = block.min(wtmax);
        Ok(nfs)
    }

    /// Typed calls on the connection.
    fn calls(&mut self) -> Client<(&mut LocalClient, Connection)> {
        let connection = self.client.first();
        Client((&mut self.client, connection))
    }

    /// Makes a call, and retries it while the server is busy.
    pub(crate) fn retry<T>(&mut self, mut call: impl FnMut(&mut Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut retry = Retry::new(self.busy_timeout);
        loop {
            match call(self) {
                Ok(done) => return Ok(done),
                Err(error) => self.pause(retry.next_delay(error)?),
            }
        }
    }

    /// Polls the connection for `time`. No call may be outstanding.
    fn pause(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.client.wait(left);
            self.client.poll(|_| {});
        }
    }

    fn limits(&mut self) -> anyhow::Result<Fsinfo3Resok> {
        let root = self.root.clone();
        let response = self.calls().fsinfo(&Fsinfo3Args { fsroot: fh(&root) })?;
        Ok(response.results()?.into_result().map_err(StatusError)?)
    }

    /// Finds the file at a path below the export, without following symbolic links.
    pub(crate) fn find(&mut self, path: &[u8]) -> anyhow::Result<Handle> {
        let mut at = self.root.clone();
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            at = self.lookup(&at, name, || format!("\"{}\" in \"{}\"", Escaped(name), Escaped(path)))?;
        }
        Ok(at)
    }

    /// Looks up the handle of a name. `describe` names the file in errors.
    pub(crate) fn lookup(
        &mut self,
        dir: &Handle,
        name: &[u8],
        describe: impl Fn() -> String,
    ) -> anyhow::Result<Handle> {
        let lookup = |nfs: &mut Self| -> anyhow::Result<Handle> {
            let response =
                nfs.calls().lookup(&Lookup3Args { what: Diropargs3 { dir: fh(dir), name: Filename3(name) } })?;
            Ok(response.results()?.into_result().map_err(StatusError)?.object.data.into())
        };
        self.retry(|nfs| lookup(nfs).with_context(|| format!("LOOKUP of {}", describe())))
    }

    fn attributes(&mut self, object: &Handle) -> anyhow::Result<Fattr3> {
        let response = self.calls().getattr(&Getattr3Args { object: fh(object) })?;
        Ok(response.results()?.into_result().map_err(StatusError)?.obj_attributes)
    }

    pub(crate) fn getattr(&mut self, object: &Handle, path: &[u8]) -> anyhow::Result<Fattr3> {
        self.retry(|nfs| nfs.attributes(object).with_context(|| format!("GETATTR of \"{}\"", Escaped(path))))
    }

    fn target(&mut self, link: &Handle) -> anyhow::Result<Vec<u8>> {
        let response = self.calls().readlink(&Readlink3Args { symlink: fh(link) })?;
        Ok(response.results()?.into_result().map_err(StatusError)?.data.0.bytes().into())
    }

    /// Target of a symbolic link.
    pub(crate) fn readlink(&mut self, link: &Handle, path: &[u8]) -> anyhow::Result<Vec<u8>> {
        self.retry(|nfs| nfs.target(link).with_context(|| format!("READLINK of \"{}\"", Escaped(path))))
    }

    /// Gets entries of a directory after a cookie. The status of the response is success.
    pub(crate) fn readdirplus(
        &mut self,
        dir: &Handle,
        cookie: u64,
        cookieverf: Cookieverf3,
        path: &[u8],
    ) -> anyhow::Result<Response<Readdirplus>> {
        let size = DIRECTORY as u32;
        let args = Readdirplus3Args { dir: fh(dir), cookie, cookieverf, dircount: size, maxcount: size };
        let readdirplus = |nfs: &mut Self| -> anyhow::Result<_> {
            let response = nfs.calls().readdirplus(&args)?;
            response.results()?.into_result().map_err(StatusError)?;
            Ok(response)
        };
        self.retry(|nfs| readdirplus(nfs).with_context(|| format!("READDIRPLUS of \"{}\"", Escaped(path))))
    }

    /// Creates a file, or finds the existing one, which keeps its data. [`truncate`](Self::truncate) sets its size.
    pub(crate) fn create(&mut self, dir: &Handle, name: &[u8], mode: u32, path: &[u8]) -> anyhow::Result<Handle> {
        let create = |nfs: &mut Self| -> anyhow::Result<Option<Handle>> {
            let how = Createhow3::Unchecked(Sattr3 { mode: Some(mode), ..UNCHANGED });
            let response = nfs
                .calls()
                .create(&Create3Args { r#where: Diropargs3 { dir: fh(dir), name: Filename3(name) }, how })?;
            Ok(response.results()?.into_result().map_err(StatusError)?.obj.map(|handle| handle.data.into()))
        };
        match self.retry(|nfs| create(nfs).with_context(|| format!("CREATE of \"{}\"", Escaped(path))))? {
            Some(handle) => Ok(handle),
            None => self.lookup(dir, name, || format!("\"{}\"", Escaped(path))),
        }
    }

    /// Sets the size of a file.
    pub(crate) fn truncate(&mut self, file: &Handle, size: u64, path: &[u8]) -> anyhow::Result<()> {
        let new_attributes = Sattr3 { size: Some(size), ..UNCHANGED };
        let args = Setattr3Args { object: fh(file), new_attributes, guard: None };
        let truncate = |nfs: &mut Self| -> anyhow::Result<()> {
            nfs.calls().setattr(&args)?.results()?.into_result().map_err(StatusError)?;
            Ok(())
        };
        self.retry(|nfs| truncate(nfs).with_context(|| format!("SETATTR of \"{}\"", Escaped(path))))
    }

    /// Commits writes. Returns the write verifier, which changes when the server may have lost data.
    pub(crate) fn commit(&mut self, file: &Handle, path: &[u8]) -> anyhow::Result<Writeverf3> {
        let commit = |nfs: &mut Self| -> anyhow::Result<Writeverf3> {
            let response = nfs.calls().commit(&Commit3Args { file: fh(file), offset: 0, count: 0 })?;
            Ok(response.results()?.into_result().map_err(StatusError)?.verf)
        };
        self.retry(|nfs| commit(nfs).with_context(|| format!("COMMIT of \"{}\"", Escaped(path))))
    }

    /// Statistics of the connection, as JSON.
    pub(crate) fn stats(&mut self) -> String {
        let stats = self.client.stats();
        let count = |name| stats.get(name).unwrap_or(0);
        let rejected = stats
            .metrics()
            .filter(|metric| metric.name.starts_with("messages_rejected_"))
            .map(|metric| metric.value)
            .sum();
        let connection = self.client.first();
        let terms = self.client.terms(connection);
        let fields = [
            ("rdma_version", terms.map_or(0, |terms| terms.version().into())),
            ("credits", self.client.credits(connection).unwrap_or(0).into()),
            ("connections", count("connections_made")),
            ("calls", count("calls")),
            ("failed", count("calls_failed")),
            ("retransmitted", count("calls_retransmitted")),
            ("calls_with_chunks", count("chunked_messages_sent")),
            ("calls_in_chunks", count("long_messages_sent")),
            ("replies_with_chunks", count("chunked_messages_received")),
            ("replies_in_chunks", count("long_messages_received")),
            ("invalidated_by_server", count("windows_revoked_by_peers")),
            ("invalidated_here", count("windows_revoked_here")),
            ("rejected", rejected),
        ];
        let fields: Vec<_> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    }
}
