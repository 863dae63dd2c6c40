//! rpcbind (RFC 1833, version 4): ports of programs. Servers register ([`Registration`]), clients look up ([`locate`]).
//!
//! RPC over RDMA has the netids `rdma` and `rdma6`, with universal addresses like those of TCP (RFC 5665 §5.2.3.3 and
//! §5.2.3.4, RFC 8166 §9). Clients take them from the whole list (RPCBPROC_DUMP). RPCBPROC_GETADDR ignores the given
//! netid and answers for its own transport (RFC 1833 §2.2.1), which is never RDMA.
#![forbid(unsafe_code)]

#[expect(dead_code, unreachable_pub, reason = "generated for any user")]
mod protocol {
    include!(concat!(env!("OUT_DIR"), "/rpcbind.rs"));
}
pub mod stream;

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::protocol::{Rpcb, RpcblistPtr};
use crate::stream::{StreamClient, StreamError, Timed};
use rpcrdma_proto::wire::rpc::ProgramNumber;
use rpcrdma_xdr::BadXdr;

/// Program number of rpcbind.
pub const PROGRAM: u32 = 100_000;
/// Program version.
pub const VERSION: u32 = 4;
/// TCP port of rpcbind.
pub const PORT: u16 = 111;
/// Local socket of rpcbind, for registration.
pub const LOCAL_SOCKET: &str = "/run/rpcbind.sock";

const SET: u32 = 1;
const UNSET: u32 = 2;
const DUMP: u32 = 4;

/// Failure of rpcbind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RpcbindError {
    /// No connection to the socket or host `at`.
    #[expect(missing_docs, reason = "named in the message")]
    #[error("rpcbind at {at} cannot be reached (systemctl start rpcbind)")]
    Unreachable { at: String, source: io::Error },
    /// The call failed.
    #[error("call of rpcbind failed")]
    Call(#[from] StreamError),
    /// The answer is malformed.
    #[error("malformed answer of rpcbind")]
    Answer(#[from] BadXdr),
    /// rpcbind refuses the registration.
    #[expect(missing_docs, reason = "named in the message")]
    #[error("rpcbind refused to register {mapping}: {reason}")]
    NotRegistered { mapping: Box<Mapping>, reason: String },
    /// The program is not registered.
    #[expect(missing_docs, reason = "named in the message")]
    #[error(
        "rpcbind at {host} has no program {} version {version} over {netid} (`rpcinfo -p {host}`; start the server, or give \
         its port)", ProgramNumber(*.program)
    )]
    Unknown { host: IpAddr, program: u32, version: u32, netid: &'static str },
}

/// Transport of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// RPC over RDMA.
    Rdma,
    /// TCP.
    Tcp,
}

impl Transport {
    /// Netid for an address of this family.
    pub fn netid(self, address: IpAddr) -> &'static str {
        match (self, address) {
            (Self::Rdma, IpAddr::V4(_)) => "rdma",
            (Self::Rdma, IpAddr::V6(_)) => "rdma6",
            (Self::Tcp, IpAddr::V4(_)) => "tcp",
            (Self::Tcp, IpAddr::V6(_)) => "tcp6",
        }
    }
}

/// Universal address: `10.0.0.1.78.81` (RFC 5665 §5.2.3.3).
pub fn universal(address: SocketAddr) -> String {
    let port = address.port();
    format!("{}.{}.{}", address.ip(), port >> 8, port & 0xFF)
}

/// Parses a universal address.
pub fn parse_universal(text: &str) -> Option<SocketAddr> {
    let (rest, low) = text.rsplit_once('.')?;
    let (ip, high) = rest.rsplit_once('.')?;
    let (high, low): (u8, u8) = (high.parse().ok()?, low.parse().ok()?);
    Some(SocketAddr::new(ip.parse().ok()?, u16::from_be_bytes([high, low])))
}

/// An entry of rpcbind: address of a program version on one transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Program number.
    pub program: u32,
    /// Program version.
    pub version: u32,
    /// Netid: `tcp`, `rdma`.
    pub netid: String,
    /// Universal address.
    pub address: String,
    /// Owner; set by rpcbind.
    pub owner: String,
}

impl std::fmt::Display for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { program, version, netid, address, .. } = self;
        let program = ProgramNumber(*program);
        write!(f, "program {program} version {version} over {netid} at {address}")
    }
}

impl Mapping {
    /// A program at an address, which may be a wildcard.
    pub fn new(program: u32, version: u32, transport: Transport, address: SocketAddr) -> Self {
        let netid = transport.netid(address.ip()).to_owned();
        Self { program, version, netid, address: universal(address), owner: String::new() }
    }

    fn to_rpcb(&self) -> Rpcb<'_> {
        let [r_netid, r_addr, r_owner] = [&self.netid, &self.address, &self.owner].map(String::as_bytes);
        Rpcb { r_prog: self.program, r_vers: self.version, r_netid, r_addr, r_owner }
    }

    fn from_rpcb(Rpcb { r_prog: program, r_vers: version, r_netid, r_addr, r_owner }: Rpcb<'_>) -> Self {
        // Errors and listings print them.
        let texts = [r_netid, r_addr, r_owner].map(|bytes| bytes.escape_ascii().to_string());
        let [netid, address, owner] = texts;
        Self { program, version, netid, address, owner }
    }
}

/// Registers (SET) or withdraws (UNSET) a program, version and netid. False if refused: another user has registered it,
/// or it has another address, or is absent.
fn change(
    rpcbind: &mut StreamClient<impl Read + Write>,
    procedure: u32,
    mapping: &Mapping,
) -> Result<bool, RpcbindError> {
    let args = rpcrdma_xdr::encode(&mapping.to_rpcb()).map_err(|_| StreamError::Malformed("the call's arguments"))?;
    let results = rpcbind.call(PROGRAM, VERSION, procedure, &args)?;
    Ok(rpcrdma_xdr::decode(&results)?)
}

/// All entries.
fn dump(rpcbind: &mut StreamClient<impl Read + Write>) -> Result<Vec<Mapping>, RpcbindError> {
    let results = rpcbind.call(PROGRAM, VERSION, DUMP, &[])?;
    let list: RpcblistPtr<'_> = rpcrdma_xdr::decode(&results)?;
    Ok(list.iter().map(|entry| Mapping::from_rpcb(entry.rpcb_map)).collect())
}

/// Connects to a local socket, which identifies the registering user.
fn at_socket(path: &Path) -> Result<StreamClient<Timed<UnixStream>>, RpcbindError> {
    let unreachable = |source| RpcbindError::Unreachable { at: path.display().to_string(), source };
    StreamClient::connect_local(path, PATIENCE).map_err(unreachable)
}

/// Looks up a program at a host's rpcbind. A wildcard address stands for the host's.
///
/// # Errors
/// rpcbind is unreachable, or has no such entry.
pub fn locate(
    host: IpAddr,
    transport: Transport,
    program: u32,
    version: u32,
    timeout: Duration,
) -> Result<SocketAddr, RpcbindError> {
    let all = dump_at(SocketAddr::new(host, PORT), timeout)?;
    find(&all, host, transport.netid(host), program, version)
}

/// All entries of the rpcbind at this address. `timeout` limits connecting and the whole call together.
fn dump_at(at: SocketAddr, timeout: Duration) -> Result<Vec<Mapping>, RpcbindError> {
    let unreachable = |source| RpcbindError::Unreachable { at: at.ip().to_string(), source };
    dump(&mut StreamClient::connect(at, timeout).map_err(unreachable)?)
}

fn find(
    all: &[Mapping],
    host: IpAddr,
    netid: &'static str,
    program: u32,
    version: u32,
) -> Result<SocketAddr, RpcbindError> {
    let found = all.iter().filter(|line| (line.program, line.version) == (program, version));
    let found = found.filter(|line| line.netid == netid).find_map(|line| parse_universal(&line.address));
    let unknown = RpcbindError::Unknown { host, program, version, netid };
    found.map(|at| if at.ip().is_unspecified() { SocketAddr::new(host, at.port()) } else { at }).ok_or(unknown)
}

/// Entries of a server at the host's rpcbind; withdrawn on drop.
#[derive(Debug)]
pub struct Registration {
    mappings: Vec<Mapping>,
    socket: std::path::PathBuf,
}

/// Time limit of a registration or withdrawal.
const PATIENCE: Duration = Duration::from_secs(5);

impl Registration {
    /// Registers all. Takes over entries of a crashed server at the same address.
    ///
    /// # Errors
    /// Nothing is registered.
    pub fn new(mappings: Vec<Mapping>) -> Result<Self, RpcbindError> {
        Self::at_socket(Path::new(LOCAL_SOCKET), mappings)
    }

    fn at_socket(socket: &Path, mappings: Vec<Mapping>) -> Result<Self, RpcbindError> {
        let mut rpcbind = at_socket(socket)?;
        let mut done = Self { mappings: Vec::new(), socket: socket.to_owned() };
        for mapping in mappings {
            if !change(&mut rpcbind, SET, &mapping)? {
                let same = |line: &&Mapping| {
                    (line.program, line.version, &line.netid) == (mapping.program, mapping.version, &mapping.netid)
                };
                let reason = match dump(&mut rpcbind)?.iter().find(same) {
                    Some(Mapping { address, owner, .. }) => format!(
                        "{owner} has registered it at {address}; if nobody serves it there: rpcinfo -d {} {}",
                        mapping.program, mapping.version
                    ),
                    None => "this user may not".to_owned(),
                };
                return Err(RpcbindError::NotRegistered { mapping: Box::new(mapping), reason });
            }
            done.mappings.push(mapping);
        }
        Ok(done)
    }

    /// Withdraws the entries. Drop does so without reporting errors.
    ///
    /// # Errors
    /// Entries may remain.
    pub fn withdraw(mut self) -> Result<(), RpcbindError> {
        self.unset()
    }

    fn unset(&mut self) -> Result<(), RpcbindError> {
        if self.mappings.is_empty() {
            return Ok(());
        }
        let mut rpcbind = at_socket(&self.socket)?;
        for mapping in std::mem::take(&mut self.mappings) {
            // Another process may have withdrawn it.
            change(&mut rpcbind, UNSET, &mapping)?;
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Drop cannot report errors.
        let _ = self.unset();
    }
}

#[cfg(test)]
mod tests;
