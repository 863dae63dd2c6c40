//! A bound address, and the options of its sockets.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::config::IwarpFabricConfig;
use super::sys::BusyPoll;
use crate::accept_balancer::{AcceptBalancer, BalancerMember};
use crate::connection_manager::Listen;
use crate::error::failed;
use crate::{FabricAddress, FabricError, Waker, host};

/// Connections that the kernel queues until the listener accepts them.
const BACKLOG: i32 = 1024;
/// Shortest keep-alive time, because TCP counts whole seconds.
const MIN_KEEP_ALIVE: Duration = Duration::from_secs(1);

/// A bound address of the iWARP fabric. Dropping the last clone frees the address.
#[derive(Clone, Debug)]
pub struct IwarpListener {
    socket: Arc<OwnedFd>,
    balancer: Arc<AcceptBalancer<(OwnedFd, SocketAddr)>>,
}

impl IwarpListener {
    /// Binds the address and listens.
    pub(super) fn bind(address: &FabricAddress) -> Result<Self, FabricError> {
        let at = host::resolve(address)?;
        let socket = open_socket(at)?;
        let bind_failed = |call: &str, e: Errno| bind_error(address, at, call, e);
        // Connections of a server that has just ended may linger. This option still excludes a second listener.
        sockopt::set_socket_reuseaddr(&socket, true).map_err(|e| bind_failed("setsockopt(SO_REUSEADDR)", e))?;
        rustix::net::bind(&socket, &at).map_err(|e| bind_failed("bind", e))?;
        rustix::net::listen(&socket, BACKLOG).map_err(|e| bind_failed("listen", e))?;
        Ok(Self { socket: Arc::new(socket), balancer: Arc::default() })
    }
}

impl Listen for IwarpListener {
    type Accepted = (OwnedFd, SocketAddr);

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn join(&self, waker: Waker) -> BalancerMember<Self::Accepted> {
        BalancerMember::new(&self.balancer, waker)
    }

    fn accept(&self) -> Result<Result<Self::Accepted, String>, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (socket, peer) = rustix::net::acceptfrom_with(self.socket(), flags)?;
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        Ok(peer.map(|peer| (socket, peer)).ok_or_else(|| "the peer has no address".to_owned()))
    }
}

fn bind_error(address: &FabricAddress, at: SocketAddr, call: &str, error: Errno) -> FabricError {
    let (text, port) = (&address.0, at.port());
    match error {
        Errno::ADDRINUSE => {
            let remedy = format_args!("`ss -ltnp 'sport = :{port}'` names its process; choose another port");
            FabricError::in_use(text, format_args!("TCP port {port} is in use: {remedy}"))
        }
        Errno::ADDRNOTAVAIL => {
            let remedy = "`ip addr` lists the addresses; 0.0.0.0 and [::] mean all";
            FabricError::address(text, format_args!("{error}: no interface of this host has {} ({remedy})", at.ip()))
        }
        Errno::ACCESS | Errno::PERM => host::privileged_port(text, error),
        error => failed(&format!("{call} at {text}"), error),
    }
}

/// Opens a non-blocking socket of the address's family.
pub(super) fn open_socket(address: SocketAddr) -> Result<OwnedFd, FabricError> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(|e| failed("socket", e))
}

/// Sets TCP's time-out of unacknowledged data. 0 leaves only TCP's own retransmission limit.
pub(super) fn set_user_timeout(socket: BorrowedFd<'_>, timeout: Duration) -> Result<(), Errno> {
    sockopt::set_tcp_user_timeout(socket, u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX))
}

/// Sets required and configured socket options.
pub(super) fn set_socket_options(socket: BorrowedFd<'_>, config: &IwarpFabricConfig) -> Result<(), FabricError> {
    let set = |option: &str, result: Result<(), Errno>| result.map_err(|e| failed(&format!("setsockopt({option})"), e));
    set("TCP_NODELAY", sockopt::set_tcp_nodelay(socket, true))?;
    set("TCP_USER_TIMEOUT", set_user_timeout(socket, config.retry_timeout))?;
    let idle = config.keep_alive.max(MIN_KEEP_ALIVE);
    set("SO_KEEPALIVE", sockopt::set_socket_keepalive(socket, true))?;
    set("TCP_KEEPIDLE", sockopt::set_tcp_keepidle(socket, idle))?;
    set("TCP_KEEPINTVL", sockopt::set_tcp_keepintvl(socket, (idle / 3).max(MIN_KEEP_ALIVE)))?;
    set("TCP_KEEPCNT", sockopt::set_tcp_keepcnt(socket, 2))?;
    if let Some(bytes) = config.send_buffer {
        set("SO_SNDBUF", sockopt::set_socket_send_buffer_size(socket, bytes))?;
    }
    if let Some(bytes) = config.receive_buffer {
        set("SO_RCVBUF", sockopt::set_socket_recv_buffer_size(socket, bytes))?;
    }
    if let Some(tos) = config.tos {
        if rustix::net::getsockname(socket).is_ok_and(|own| own.address_family() == AddressFamily::INET6) {
            set("IPV6_TCLASS", sockopt::set_ipv6_tclass(socket, tos.into()))?;
        }
        // IPv6 sockets need this option too, because the peer may have an IPv4 address.
        set("IP_TOS", sockopt::set_ip_tos(socket, tos))?;
    }
    if let Some(time) = config.busy_poll {
        let micros = i32::try_from(time.as_micros()).unwrap_or(i32::MAX);
        let result = nix::sys::socket::setsockopt(&socket, BusyPoll, &micros);
        set("SO_BUSY_POLL", result.map_err(|e| Errno::from_raw_os_error(e as i32)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_reports_the_round_trip_time() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = std::net::TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        let round_trip = crate::iwarp::sys::round_trip(socket.as_fd());
        assert!(round_trip.is_some_and(|time| time > Duration::ZERO), "{round_trip:?}");
    }

    /// Loopback traffic does not show the effect of these options. Without them a dead peer goes unnoticed, or a
    /// message waits for the acknowledgement of an earlier one.
    #[test]
    fn every_socket_has_its_options() {
        let (retry_timeout, keep_alive) = (Duration::from_millis(7_500), Duration::from_secs(12));
        let config = IwarpFabricConfig {
            retry_timeout,
            keep_alive,
            send_buffer: Some(32 << 10),
            receive_buffer: Some(48 << 10),
            tos: Some(0x28),
            ..IwarpFabricConfig::default()
        };
        for (to, v6) in [("127.0.0.1:0", false), ("[::1]:0", true)] {
            let socket = match open_socket(to.parse().expect("an address")) {
                Ok(socket) => socket,
                Err(_) if v6 => {
                    println!("not run: no IPv6 on this host");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            set_socket_options(socket.as_fd(), &config).expect("all options");
            assert_eq!(sockopt::tcp_nodelay(&socket), Ok(true));
            assert_eq!(sockopt::tcp_user_timeout(&socket), Ok(7_500));
            assert_eq!(sockopt::socket_keepalive(&socket), Ok(true));
            assert_eq!(sockopt::tcp_keepidle(&socket), Ok(keep_alive));
            assert_eq!(sockopt::tcp_keepintvl(&socket), Ok(keep_alive / 3));
            assert_eq!(sockopt::tcp_keepcnt(&socket), Ok(2));
            assert_eq!(sockopt::ip_tos(&socket), Ok(0x28));
            assert!(!v6 || sockopt::ipv6_tclass(&socket) == Ok(0x28));
            // The kernel reports twice the requested size, which includes its own bookkeeping.
            assert_eq!(sockopt::socket_send_buffer_size(&socket), Ok(64 << 10));
            assert_eq!(sockopt::socket_recv_buffer_size(&socket), Ok(96 << 10));
        }
    }
}
