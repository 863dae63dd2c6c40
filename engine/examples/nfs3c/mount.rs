//! The handle of an export, from MOUNT version 3 (RFC 1813 §5) on TCP.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, bail};
use nfs3_types::mount::{PROGRAM, VERSION, dirpath, mountres3};
use nfs3_types::nfs3::nfs_fh3;
use nfs3_types::xdr_codec::Opaque;
use rpcrdma::Address;
use rpcrdma::stream::StreamClient;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use crate::calls::{decode, encode};

/// Where MOUNT is if nobody says.
const PORT: u16 = 20048;
/// How long the server may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The procedure that gives the handle.
const MNT: u32 = 1;
/// Ports that only root has, as servers ask for unless their export is `insecure`.
const RESERVED: std::ops::Range<u16> = 665..1024;

/// The handle of the directory that a server exports. `at`, if given, is where its MOUNT is.
pub(crate) fn root(server: &Address, at: Option<&str>, export: &str) -> anyhow::Result<nfs_fh3> {
    let host = match server.socket_address()? {
        Some(address) => address.ip().to_string(),
        None => "127.0.0.1".to_owned(),
    };
    let text = at.map_or_else(|| format!("{}:{PORT}", bracketed(&host)), str::to_owned);
    let said = || format!("MOUNT of {export} at {text}");
    let address = text.to_socket_addrs().with_context(said)?.next().with_context(said)?;
    let mut client = match reserved(address) {
        Some(stream) => StreamClient::new(stream),
        None => StreamClient::connect(address, PATIENCE).with_context(said)?,
    };
    let path = encode(&dirpath(Opaque::borrowed(export.as_bytes())))?;
    let results = client.call(PROGRAM, VERSION, MNT, &path).with_context(said)?;
    match decode(&results).with_context(said)? {
        mountres3::Ok(results) => Ok(nfs_fh3 { data: Opaque::owned(results.fhandle.0.into_owned()) }),
        mountres3::Err(status) => bail!("{}: {status}", said()),
    }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// A connection from a reserved port, if this user may have one.
fn reserved(to: SocketAddr) -> Option<TcpStream> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let (family, any): (_, std::net::IpAddr) = match to {
        SocketAddr::V4(_) => (AddressFamily::INET, std::net::Ipv4Addr::UNSPECIFIED.into()),
        SocketAddr::V6(_) => (AddressFamily::INET6, std::net::Ipv6Addr::UNSPECIFIED.into()),
    };
    for port in RESERVED.rev() {
        let socket = socket(family, SocketType::STREAM, None).ok()?;
        if bind(&socket, &SocketAddr::new(any, port)).is_err() {
            continue;
        }
        // One that was closed a moment ago cannot be used again at once.
        if connect(&socket, &to).is_ok() {
            let stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(PATIENCE)).ok()?;
            return Some(stream);
        }
    }
    None
}
