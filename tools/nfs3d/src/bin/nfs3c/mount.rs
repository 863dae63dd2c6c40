//! The handle of an export, from MOUNT version 3 (RFC 1813 §5) on TCP.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rpcrdma::Address;
use rpcrdma::typed::Signature;
use rpcrdma::xdr;
use rpcrdma_nfs3d::mount3::mount_v3::{Mnt, PROGRAM, VERSION};
use rpcrdma_nfs3d::mount3::{Dirpath, Mountres3};
use rpcrdma_nfs3d::nfs3::nfs_v3;
use rpcrdma_proto::wire::rpc::{AuthSys, MAX_AUTH_LEN, OpaqueAuth};
use rpcrdma_rpcbind::stream::{StreamClient, Timed};
use rpcrdma_rpcbind::{self as rpcbind, Transport};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use crate::calls::Handle;
use crate::escape::Escaped;

/// Default port of MOUNT.
const PORT: u16 = 20048;
/// Time limit of each call of rpcbind or MOUNT, including the connection set-up.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Reserved ports to try, because servers require one unless the export is `insecure`.
const RESERVED: std::ops::Range<u16> = 665..1024;

/// Addresses of NFS and MOUNT. With `ask_rpcbind`, both ports come from the server's rpcbind.
pub(crate) fn addresses(
    server: &Address,
    mount: Option<&str>,
    ask_rpcbind: bool,
) -> anyhow::Result<(Address, SocketAddr)> {
    let host = server.socket_address()?.map(|address| address.ip());
    if ask_rpcbind {
        let host = host.with_context(|| format!("--rpcbind: {server} has no IP address"))?;
        let nfs = rpcbind::locate(host, Transport::Rdma, nfs_v3::PROGRAM, nfs_v3::VERSION, TIME_LIMIT)?;
        let mount = rpcbind::locate(host, Transport::Tcp, PROGRAM, VERSION, TIME_LIMIT)?;
        return Ok((server.with_socket_address(nfs), mount));
    }
    let mount = match mount {
        Some(text) => {
            // The port is optional.
            let found = text.to_socket_addrs().or_else(|_| (text, PORT).to_socket_addrs());
            let found = found.with_context(|| format!("--mount {text}"))?.next();
            found.with_context(|| format!("--mount {text}: the name has no address"))?
        }
        None => SocketAddr::new(host.unwrap_or(Ipv4Addr::LOCALHOST.into()), PORT),
    };
    Ok((server.clone(), mount))
}

/// Gets the handle of an exported directory from MOUNT at an address, as the user of this process.
pub(crate) fn root_handle(at: SocketAddr, export: &[u8]) -> anyhow::Result<Handle> {
    let describe = || format!("MOUNT of \"{}\" at {at}", Escaped(export));
    let deadline = Instant::now() + TIME_LIMIT;
    let mut client = match connect_reserved(at, deadline).with_context(describe)? {
        Some(stream) => StreamClient::new(Timed::until(stream, deadline)),
        None => StreamClient::connect(at, TIME_LIMIT).with_context(describe)?,
    };
    let path = xdr::encode(&Dirpath(export)).with_context(describe)?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mut body = [0; MAX_AUTH_LEN];
    let len = AuthSys::new(0, b"nfs3c", uid, gid).emit(&[], &mut body).with_context(describe)?;
    let user = OpaqueAuth { flavor: AuthSys::FLAVOR, body: &body[..len] };
    let results = client.call_as(user, PROGRAM, VERSION, Mnt::NUMBER, &path).with_context(describe)?;
    let results = xdr::decode::<Mountres3<'_>>(&results).with_context(describe)?.into_result();
    results.map(|results| results.fhandle.0.into()).map_err(|status| anyhow!("{}: {}", describe(), status.name()))
}

/// Connects from a reserved port, if the user is allowed to use one.
///
/// # Errors
/// The server refuses the connection, or does not accept it before `deadline`.
fn connect_reserved(to: SocketAddr, deadline: Instant) -> io::Result<Option<TcpStream>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let (family, any): (_, std::net::IpAddr) = match to {
        SocketAddr::V4(_) => (AddressFamily::INET, Ipv4Addr::UNSPECIFIED.into()),
        SocketAddr::V6(_) => (AddressFamily::INET6, std::net::Ipv6Addr::UNSPECIFIED.into()),
    };
    for port in RESERVED.rev() {
        let socket = socket(family, SocketType::STREAM, None)?;
        if bind(&socket, &SocketAddr::new(any, port)).is_err() {
            continue;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        // The time-out of sends also limits the connection set-up.
        set_socket_timeout(&socket, Timeout::Send, Some(left))?;
        match connect(&socket, &to) {
            Ok(()) => return Ok(Some(TcpStream::from(socket))),
            // A port that was closed recently cannot be reused immediately.
            Err(Errno::ADDRNOTAVAIL | Errno::ADDRINUSE) => {}
            Err(Errno::INPROGRESS | Errno::AGAIN) => return Err(ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}
