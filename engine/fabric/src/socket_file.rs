//! Socket files of mode 0600. A new file replaces that of a dead process, and is removed when its listener ends.

mod bind_lock;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::FabricError;
use crate::error::failed;
use bind_lock::BindLock;

/// A socket file of this process; its drop removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl SocketFile {
    /// Binds a Unix socket to a file of mode 0600 and listens. `backlog` is the kernel's queue of connections.
    ///
    /// During the call, a lock file `.NAME.rpcrdma-lock` exists beside the socket file, so that only one of several
    /// processes replaces the file of a dead process.
    ///
    /// # Errors
    /// Names the path and the owner if another process listens there, if the file is not a socket, or if the lock file
    /// is another user's and cannot be removed. Otherwise the error names the failed call.
    pub fn listen(socket: BorrowedFd<'_>, path: &Path, backlog: i32) -> Result<Self, FabricError> {
        let name = path.display().to_string();
        let too_long = |_| FabricError::address(&name, "too long: names of Unix sockets have at most 107 bytes");
        let socket_address = SocketAddrUnix::new(path).map_err(too_long)?;
        let _lock = BindLock::acquire(&name, path)?;
        // The file gets the mode of its socket. No path is used that another user could redirect.
        rustix::fs::fchmod(socket, Mode::RUSR | Mode::WUSR).map_err(|e| failed(&format!("fchmod 0600 {name}"), e))?;
        let mut bound = rustix::net::bind(socket, &socket_address);
        if bound == Err(Errno::ADDRINUSE) && is_stale(path, &socket_address)? {
            let owner = kind_and_owner(path).unwrap_or_default();
            std::fs::remove_file(path).map_err(|e| failed(&format!("unlink {name}, {owner}"), e))?;
            bound = rustix::net::bind(socket, &socket_address);
        }
        bound.map_err(|e| file_error(&name, path, e))?;
        let inode = std::fs::symlink_metadata(path).map_err(|e| failed(&format!("stat {name}"), e))?.ino();
        // Listen before the lock ends, because the next process would otherwise take this file for a stale one.
        rustix::net::listen(socket, backlog).map_err(|e| bind_error(&name, e))?;
        Ok(Self { path: path.into(), inode })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode) {
            // If another process has just removed the file, this fails, and nothing is left to do.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Error of an address that cannot be bound.
pub(crate) fn bind_error(name: &str, error: Errno) -> FabricError {
    match error {
        Errno::ADDRINUSE => FabricError::in_use(
            name,
            "a server listens there; stop it (`ss -xlp` shows its process) or choose another name",
        ),
        _ => FabricError::address(name, format!("bind: {error}")),
    }
}

/// Error of a socket file that cannot be bound, with the owner of the existing file.
fn file_error(name: &str, path: &Path, error: Errno) -> FabricError {
    let Some(found) = kind_and_owner(path).filter(|_| error == Errno::ADDRINUSE) else {
        return bind_error(name, error);
    };
    if other_kind(path).is_some() {
        return FabricError::address(
            name,
            format!("there is {found}, not a socket; choose another name, or remove it"),
        );
    }
    let remedy = "stop it, else remove the file; or choose another name";
    FabricError::in_use(name, format!("there is {found}; if its server is alive (ss -xlp shows it), {remedy}"))
}

/// The kind of file at a path; `None` for a socket or no file.
pub(crate) fn other_kind(path: &Path) -> Option<&'static str> {
    let kind = std::fs::symlink_metadata(path).ok()?.file_type();
    match kind {
        _ if kind.is_socket() => None,
        _ if kind.is_file() => Some("a plain file"),
        _ if kind.is_dir() => Some("a directory"),
        _ if kind.is_symlink() => Some("a symbolic link"),
        _ => Some("a device or a pipe"),
    }
}

/// Whether the file is a socket without a listener. The kernel checks for a listener before it compares the socket
/// types, so this holds for sockets of any type.
fn is_stale(path: &Path, socket_address: &SocketAddrUnix) -> Result<bool, FabricError> {
    if !std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
        return Ok(false);
    }
    Ok(rustix::net::connect(new_socket()?, socket_address) == Err(Errno::CONNREFUSED))
}

/// A non-blocking Unix socket of ordered datagrams (SOCK_SEQPACKET).
pub(crate) fn new_socket() -> Result<OwnedFd, FabricError> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| failed("socket(AF_UNIX, SOCK_SEQPACKET)", e))
}

/// The kind and owner of a file: `a plain file of user 65534`. `None` without a file.
fn kind_and_owner(path: &Path) -> Option<String> {
    let owner = std::fs::symlink_metadata(path).ok()?.uid();
    Some(format!("{} of user {owner}", other_kind(path).unwrap_or("a socket")))
}
