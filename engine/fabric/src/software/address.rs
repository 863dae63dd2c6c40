//! Addresses of the software fabric, and their Unix sockets.
//!
//! `soft:NAME` is an abstract socket, `rpcrdma/UID/NAME`; with a `/` in the name it is a socket file of mode
//! 0600. Each end checks the other's credentials, and refuses processes of other users, except root.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};

use super::message::MAX_DESCRIPTORS;
use crate::accept_balancer::{AcceptBalancer, BalancerMember};
use crate::connection_manager::{ConnectProgress, Listen};
use crate::socket_file::{SocketFile, bind_error, new_socket, other_kind};
use crate::{FabricAddress, FabricError, Waker};

/// Connect requests that the kernel queues for a busy listener.
const BACKLOG: i32 = 256;

/// A bound address of the software fabric. Dropping the last clone frees the address.
#[derive(Clone, Debug)]
pub struct SoftwareListener(Arc<Bound>);

#[derive(Debug)]
struct Bound {
    /// The admission check: [`check_peer`], except in tests.
    admit: Admit,
    // Dropped before the socket, so that a process listens as long as the file exists.
    #[expect(dead_code, reason = "its drop removes the file")]
    file: Option<SocketFile>,
    socket: OwnedFd,
    balancer: Arc<AcceptBalancer<(OwnedFd, PeerProcess)>>,
}

impl SoftwareListener {
    /// Binds and listens.
    pub(super) fn bind(address: &FabricAddress) -> Result<Self, FabricError> {
        Self::bind_for(address, check_peer)
    }

    /// Binds and listens with this admission check.
    pub(super) fn bind_for(address: &FabricAddress, admit: Admit) -> Result<Self, FabricError> {
        let (at, file) = parse(address)?;
        let socket = new_socket()?;
        let file = file.map(|path| SocketFile::listen(socket.as_fd(), &path, BACKLOG)).transpose()?;
        if file.is_none() {
            let bound = rustix::net::bind(&socket, &at);
            bound.and_then(|()| rustix::net::listen(&socket, BACKLOG)).map_err(|e| bind_error(&address.0, e))?;
        }
        Ok(Self(Arc::new(Bound { admit, socket, file, balancer: Arc::default() })))
    }
}

impl Listen for SoftwareListener {
    type Accepted = (OwnedFd, PeerProcess);

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }

    fn join(&self, waker: Waker) -> BalancerMember<Self::Accepted> {
        BalancerMember::new(&self.0.balancer, waker)
    }

    fn accept(&self) -> Result<Result<Self::Accepted, String>, Errno> {
        // The kernel drops the descriptors of the peer's opening message if this process has too few free ones. Until
        // enough are free, the connection therefore stays in the listener's queue, as it also does when there is no
        // free descriptor for its socket.
        let spare = [(); MAX_DESCRIPTORS].map(|()| self.socket().try_clone_to_owned());
        if let Some(error) = spare.iter().find_map(|duplicate| duplicate.as_ref().err()) {
            let is_waiting = is_readable(self.socket());
            return Err(if is_waiting { Errno::from_io_error(error).unwrap_or(Errno::MFILE) } else { Errno::AGAIN });
        }
        let socket = rustix::net::accept_with(self.socket(), SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        Ok((self.0.admit)(socket.as_fd()).map(|peer| (socket, peer)))
    }
}

/// The process at the other end, as the kernel saw it at connect. Processes of invisible PID namespaces have the number
/// 0, and count as one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PeerProcess {
    pub(super) pid: i32,
    pub(super) uid: u32,
}

impl fmt::Display for PeerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} uid {}", self.pid, self.uid)
    }
}

/// Identifies the other end, or refuses its process.
type Admit = fn(BorrowedFd<'_>) -> Result<PeerProcess, String>;

/// Parses an address into the socket's address and, if the address names a file, the path of that file.
fn parse(address: &FabricAddress) -> Result<(SocketAddrUnix, Option<PathBuf>), FabricError> {
    let name = address.0.as_str();
    let bad = |detail: &str| FabricError::address(name, detail);
    if name.is_empty() {
        return Err(bad("the name is empty: expected soft:NAME, or the path of a socket file (soft:/run/…/NAME)"));
    }
    if name.bytes().any(|b| b == 0 || b.is_ascii_control()) {
        return Err(bad("the name contains control characters"));
    }
    if name.ends_with('/') {
        return Err(bad("the socket file has no name behind the last '/'"));
    }
    let too_long = |_| bad("too long: names of Unix sockets have at most 107 bytes, prefix and user id included");
    if name.contains('/') {
        let socket = SocketAddrUnix::new(name).map_err(too_long)?;
        return Ok((socket, Some(PathBuf::from(name))));
    }
    let full = format!("rpcrdma/{}/{name}", rustix::process::geteuid().as_raw());
    let socket = SocketAddrUnix::new_abstract_name(full.as_bytes()).map_err(too_long)?;
    Ok((socket, None))
}

/// Connects, if the listener's queue has room.
pub(super) fn connect(address: &FabricAddress) -> Result<ConnectProgress, FabricError> {
    let (at, file) = parse(address)?;
    let socket = new_socket()?;
    let error = match rustix::net::connect(&socket, &at) {
        Ok(()) => match check_peer(socket.as_fd()) {
            Ok(_) => return Ok(ConnectProgress::Connected(socket)),
            Err(detail) => return Err(FabricError::unreachable(&address.0, detail)),
        },
        Err(Errno::AGAIN | Errno::INTR) => return Ok(ConnectProgress::QueueFull),
        Err(error) => error,
    };
    let detail = match (error, file.as_deref().and_then(other_kind)) {
        (Errno::CONNREFUSED, Some(what)) => format!("there is {what}, not a socket; check the name"),
        (Errno::CONNREFUSED | Errno::NOENT, _) => {
            format!("connect: {error}; start the server, or check its name and user")
        }
        (Errno::ACCESS, _) => format!("connect: {error}; the socket file belongs to another user"),
        _ => format!("connect: {error}"),
    };
    Err(FabricError::unreachable(&address.0, detail))
}

/// Whether a connection waits at a listener.
fn is_readable(socket: BorrowedFd<'_>) -> bool {
    let mut listener = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    rustix::event::poll(&mut listener, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Refuses peers that are neither our user nor root.
fn check_peer(socket: BorrowedFd<'_>) -> Result<PeerProcess, String> {
    // rustix cannot represent the 0 that the kernel returns for a process in another PID namespace.
    let peer = nix::sys::socket::getsockopt(&socket, PeerCredentials).map_err(|e| format!("SO_PEERCRED: {e}"))?;
    let (pid, uid) = (peer.pid(), peer.uid());
    let ours = rustix::process::geteuid().as_raw();
    if uid != ours && uid != 0 {
        return Err(format!("user {uid} is neither our user ({ours}) nor root; run both sides as one user"));
    }
    Ok(PeerProcess { pid, uid })
}
