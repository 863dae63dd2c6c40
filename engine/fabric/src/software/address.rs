//! Names, and the Unix sockets behind them.
//!
//! `soft:NAME` is an abstract socket, `rpcrdma/UID/NAME`; with a `/` in the name it is a socket file of mode
//! 0600. Both ends look at the other's credentials: only the same user, or root, is served, and only their
//! services are used.

use std::fmt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::seats::{Seat, Seats};
use crate::sockets::Listen;
use crate::{FabricAddress, FabricError, Waker};

/// Connect requests that the kernel keeps for a listener that is busy.
const BACKLOG: i32 = 256;

/// A bound address of the software fabric. The last clone to go frees the address.
#[derive(Clone, Debug)]
pub struct SoftwareListener(Arc<Bound>);

#[derive(Debug)]
struct Bound {
    /// Who is let in: [`check_peer`], but in tests.
    admit: Admit,
    socket: OwnedFd,
    file: Option<SocketFile>,
    seats: Arc<Seats<Visitor>>,
}

/// A socket file that is ours to remove.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl SoftwareListener {
    /// Binds and listens.
    pub(super) fn bind(address: &FabricAddress) -> Result<Self, FabricError> {
        Self::bind_for(address, check_peer)
    }

    /// The same for whoever is admitted.
    pub(super) fn bind_for(address: &FabricAddress, admit: Admit) -> Result<Self, FabricError> {
        let place = Place::parse(address)?;
        let socket = new_socket()?;
        let file = match &place.file {
            None => {
                rustix::net::bind(&socket, &place.socket).map_err(|e| bind_error(address, e))?;
                None
            }
            Some(path) => Some(bind_file(&socket, address, &place.socket, path)?),
        };
        rustix::net::listen(&socket, BACKLOG).map_err(|e| bind_error(address, e))?;
        Ok(Self(Arc::new(Bound { admit, socket, file, seats: Arc::default() })))
    }
}

impl Listen for SoftwareListener {
    type Visitor = Visitor;

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }

    fn seat(&self, waker: Waker) -> Seat<Visitor> {
        Seat::new(&self.0.seats, waker)
    }

    fn accept(&self) -> Result<Result<Visitor, String>, Errno> {
        let socket = rustix::net::accept_with(self.socket(), SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        Ok((self.0.admit)(socket.as_fd()).map(|peer| (socket, peer)))
    }
}

/// Who has connected, and by which socket.
pub(crate) type Visitor = (OwnedFd, Peer);

/// The process at the other end of a connection, as the kernel saw it when it connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    pub(super) pid: i32,
    pub(super) uid: u32,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} uid {}", self.pid, self.uid)
    }
}

/// Says who is at the other end, or why nothing is to be had with that process.
type Admit = fn(BorrowedFd<'_>) -> Result<Peer, String>;

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(file) = &self.file
            && std::fs::symlink_metadata(&file.path).is_ok_and(|m| m.ino() == file.inode)
        {
            // Another process may have removed it just now, which is as good.
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

/// Where a name leads.
struct Place {
    socket: SocketAddrUnix,
    file: Option<PathBuf>,
}

impl Place {
    fn parse(address: &FabricAddress) -> Result<Self, FabricError> {
        let name = address.0.as_str();
        let bad = |detail: &str| FabricError::Address { address: name.into(), detail: detail.into() };
        if name.is_empty() {
            return Err(bad("empty: give a name (soft:NAME) or the path of a socket file (soft:/run/…/NAME)"));
        }
        if name.bytes().any(|b| b == 0 || b.is_ascii_control()) {
            return Err(bad("control characters are not allowed in a name"));
        }
        if name.ends_with('/') {
            return Err(bad("a socket file needs a name behind the last '/'"));
        }
        let too_long = |_| bad("too long: Unix socket names end at 107 bytes, prefix and user id included");
        if name.contains('/') {
            let socket = SocketAddrUnix::new(name).map_err(too_long)?;
            return Ok(Self { socket, file: Some(PathBuf::from(name)) });
        }
        let full = format!("rpcrdma/{}/{name}", rustix::process::geteuid().as_raw());
        let socket = SocketAddrUnix::new_abstract_name(full.as_bytes()).map_err(too_long)?;
        Ok(Self { socket, file: None })
    }
}

/// Starts to connect. `Ok(None)`: the listener's queue is full, try again later.
pub(super) fn connect(address: &FabricAddress) -> Result<Option<OwnedFd>, FabricError> {
    let place = Place::parse(address)?;
    let socket = new_socket()?;
    match rustix::net::connect(&socket, &place.socket) {
        Ok(()) => {}
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(error) => {
            let detail = match (error, place.file.as_deref().and_then(no_socket)) {
                (Errno::CONNREFUSED, Some(what)) => format!("there is {what}, no socket; check the name"),
                (Errno::CONNREFUSED | Errno::NOENT, _) => {
                    format!("connect: {error}; start the server, or check its name and user")
                }
                (Errno::ACCESS, _) => format!("connect: {error}; the socket file belongs to another user"),
                _ => format!("connect: {error}"),
            };
            return Err(FabricError::Unreachable { address: address.0.clone(), detail });
        }
    }
    match check_peer(socket.as_fd()) {
        Ok(_) => Ok(Some(socket)),
        Err(detail) => Err(FabricError::Unreachable { address: address.0.clone(), detail }),
    }
}

fn new_socket() -> Result<OwnedFd, FabricError> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| system("socket(AF_UNIX, SOCK_SEQPACKET)", e))
}

/// Refuses whoever is neither our user nor root.
fn check_peer(socket: BorrowedFd<'_>) -> Result<Peer, String> {
    let peer = rustix::net::sockopt::socket_peercred(socket).map_err(|e| format!("SO_PEERCRED: {e}"))?;
    let ours = rustix::process::geteuid();
    if peer.uid != ours && !peer.uid.is_root() {
        return Err(format!(
            "user {} is neither ours ({}) nor root; run both sides as one user",
            peer.uid.as_raw(),
            ours.as_raw()
        ));
    }
    Ok(Peer { pid: peer.pid.as_raw_nonzero().get(), uid: peer.uid.as_raw() })
}

fn bind_error(address: &FabricAddress, error: Errno) -> FabricError {
    match error {
        Errno::ADDRINUSE => FabricError::AddressInUse {
            address: address.0.clone(),
            detail: "another server is alive there; stop it (ss -xlp shows it) or take another name".into(),
        },
        _ => FabricError::Address { address: address.0.clone(), detail: format!("bind: {error}") },
    }
}

/// Binds a socket file, in place of one that a dead process left behind.
fn bind_file(
    socket: &OwnedFd,
    address: &FabricAddress,
    place: &SocketAddrUnix,
    path: &Path,
) -> Result<SocketFile, FabricError> {
    let _turn = Turn::take(address, path)?;
    let mut bound = rustix::net::bind(socket, place);
    if bound == Err(Errno::ADDRINUSE) && is_stale(path, place)? {
        std::fs::remove_file(path).map_err(|e| system(&format!("unlink {}", path.display()), e))?;
        bound = rustix::net::bind(socket, place);
    }
    if bound == Err(Errno::ADDRINUSE)
        && let Some(what) = no_socket(path)
    {
        let detail = format!("there is {what}, no socket; remove it, or take another name");
        return Err(FabricError::Address { address: address.0.clone(), detail });
    }
    bound.map_err(|e| bind_error(address, e))?;
    // Nobody can connect before `listen`, so there is no moment in which a wider mode would matter.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|e| system(&format!("chmod 0600 {}", path.display()), e))?;
    let inode = std::fs::symlink_metadata(path).map_err(|e| system(&format!("stat {}", path.display()), e))?.ino();
    // Listening before the turn ends: else the next process would take this file for a stale one.
    rustix::net::listen(socket, BACKLOG).map_err(|e| bind_error(address, e))?;
    Ok(SocketFile { path: path.into(), inode })
}

/// What there is at a path instead of a socket; `None` for a socket, or for nothing.
fn no_socket(path: &Path) -> Option<&'static str> {
    use std::os::unix::fs::FileTypeExt;
    let kind = std::fs::symlink_metadata(path).ok()?.file_type();
    match kind {
        _ if kind.is_socket() => None,
        _ if kind.is_file() => Some("a plain file"),
        _ if kind.is_dir() => Some("a directory"),
        _ if kind.is_symlink() => Some("a symbolic link"),
        _ => Some("a device or a pipe"),
    }
}

/// Whether the file is a socket that nobody listens at.
fn is_stale(path: &Path, place: &SocketAddrUnix) -> Result<bool, FabricError> {
    use std::os::unix::fs::FileTypeExt;
    if !std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
        return Ok(false);
    }
    Ok(rustix::net::connect(new_socket()?, place) == Err(Errno::CONNREFUSED))
}

/// Keeps processes that bind in the same directory from removing each other's new socket file.
struct Turn(#[expect(dead_code, reason = "held for its lock")] std::fs::File);

impl Turn {
    fn take(address: &FabricAddress, path: &Path) -> Result<Self, FabricError> {
        let parent = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let bad = |detail| FabricError::Address { address: address.0.clone(), detail };
        let directory = std::fs::File::open(parent)
            .map_err(|e| bad(format!("directory {}: {e}; create it first", parent.display())))?;
        for _ in 0..100 {
            match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(directory)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(std::time::Duration::from_millis(10)),
                Err(error) => return Err(bad(format!("flock {}: {error}", parent.display()))),
            }
        }
        Err(bad(format!("another process keeps {} locked (flock) for more than 1 s", parent.display())))
    }
}

/// A failed call that has no better name.
pub(super) fn system(call: &str, error: impl fmt::Display) -> FabricError {
    FabricError::System { call: call.into(), detail: error.to_string() }
}
