//! Client of rpcbind (RFC 1833, version 4), which maps programs to ports.
//!
//! Servers register their programs ([`Registration`]), and clients look up a program ([`locate`]).
//!
//! RPC over RDMA has the netids `rdma` and `rdma6`, with universal addresses like those of TCP (RFC 5665 §5.2.3.3 and
//! §5.2.3.4, RFC 8166 §9). Clients read these addresses from the whole list (RPCBPROC_DUMP), because RPCBPROC_GETADDR
//! ignores the given netid and answers for the transport of the call (RFC 1833 §2.2.1), which is never RDMA.
#![forbid(unsafe_code)]

#[expect(dead_code, unreachable_pub, reason = "the generated code has items that this crate does not use")]
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
    /// The socket or host `at` does not accept a connection.
    #[expect(missing_docs, reason = "named in the message")]
    #[error("cannot connect to rpcbind at {at} (systemctl start rpcbind)")]
    Unreachable { at: String, source: io::Error },
    /// The call failed.
    #[error("call to rpcbind failed")]
    Call(#[from] StreamError),
    /// The reply is malformed.
    #[error("malformed reply of rpcbind")]
    Answer(#[from] BadXdr),
    /// rpcbind refused the registration.
    #[expect(missing_docs, reason = "named in the message")]
    #[error("rpcbind refused to register {mapping}: {reason}")]
    NotRegistered { mapping: Box<Mapping>, reason: String },
    /// The program is not registered.
    #[expect(missing_docs, reason = "named in the message")]
    #[error(
        "rpcbind at {host} has no program {} version {version} over {netid} (`rpcinfo {host}`; start the server, or give \
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
    /// Returns the netid for an address of this family.
    pub fn netid(self, address: IpAddr) -> &'static str {
        match (self, address) {
            (Self::Rdma, IpAddr::V4(_)) => "rdma",
            (Self::Rdma, IpAddr::V6(_)) => "rdma6",
            (Self::Tcp, IpAddr::V4(_)) => "tcp",
            (Self::Tcp, IpAddr::V6(_)) => "tcp6",
        }
    }
}

/// Returns the universal address `10.0.0.1.78.81` of `10.0.0.1:20049` (RFC 5665 §5.2.3.3).
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

/// An entry of rpcbind: the address of a program version on one transport.
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
    /// User that registered it; set by rpcbind.
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
    /// Creates the entry of a program at an address, which may be a wildcard.
    pub fn new(program: u32, version: u32, transport: Transport, address: SocketAddr) -> Self {
        let netid = transport.netid(address.ip()).to_owned();
        Self { program, version, netid, address: universal(address), owner: String::new() }
    }

    fn to_rpcb(&self) -> Rpcb<'_> {
        let [r_netid, r_addr, r_owner] = [&self.netid, &self.address, &self.owner].map(String::as_bytes);
        Rpcb { r_prog: self.program, r_vers: self.version, r_netid, r_addr, r_owner }
    }

    fn from_rpcb(Rpcb { r_prog: program, r_vers: version, r_netid, r_addr, r_owner }: Rpcb<'_>) -> Self {
        // Errors and listings print these texts, so control characters are escaped.
        let texts = [r_netid, r_addr, r_owner].map(|bytes| bytes.escape_ascii().to_string());
        let [netid, address, owner] = texts;
        Self { program, version, netid, address, owner }
    }
}

/// Registers (SET) or withdraws (UNSET) a program, version and netid. Returns false if rpcbind refuses, because another
/// user has registered it, it has another address, or it is not registered.
fn change(
    rpcbind: &mut StreamClient<impl Read + Write>,
    procedure: u32,
    mapping: &Mapping,
) -> Result<bool, RpcbindError> {
    let args = rpcrdma_xdr::encode(&mapping.to_rpcb()).map_err(|_| StreamError::Malformed("the call's arguments"))?;
    let results = rpcbind.call(PROGRAM, VERSION, procedure, &args)?;
    Ok(rpcrdma_xdr::decode(&results)?)
}

/// Reads all entries.
fn dump(rpcbind: &mut StreamClient<impl Read + Write>) -> Result<Vec<Mapping>, RpcbindError> {
    let results = rpcbind.call(PROGRAM, VERSION, DUMP, &[])?;
    let list: RpcblistPtr<'_> = rpcrdma_xdr::decode(&results)?;
    Ok(list.iter().map(|entry| Mapping::from_rpcb(entry.rpcb_map)).collect())
}

/// Connects to rpcbind's local socket, through which rpcbind identifies the registering user.
fn connect_to_socket(path: &Path) -> Result<StreamClient<Timed<UnixStream>>, RpcbindError> {
    let unreachable = |source| RpcbindError::Unreachable { at: path.display().to_string(), source };
    StreamClient::connect_local(path, TIMEOUT).map_err(unreachable)
}

/// Looks up the address of a program at a host's rpcbind.
///
/// A registered wildcard address is replaced by `host`. `timeout` limits the whole look-up.
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

/// Reads all entries of the rpcbind at this address. `timeout` limits the connect and the call together.
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
    let matching = all.iter().filter(|line| (line.program, line.version) == (program, version));
    let found = matching.filter(|line| line.netid == netid).find_map(|line| parse_universal(&line.address));
    let unknown = RpcbindError::Unknown { host, program, version, netid };
    found.map(|at| if at.ip().is_unspecified() { SocketAddr::new(host, at.port()) } else { at }).ok_or(unknown)
}

/// Registered entries of a server at the local rpcbind. Drop withdraws them.
#[derive(Debug)]
pub struct Registration {
    mappings: Vec<Mapping>,
    socket: std::path::PathBuf,
}

/// Time limit of a registration or withdrawal.
const TIMEOUT: Duration = Duration::from_secs(5);

impl Registration {
    /// Registers all mappings.
    ///
    /// Entries that a crashed server left for the same address are taken over.
    ///
    /// # Errors
    /// rpcbind is unreachable or refuses a mapping. No mapping is then registered.
    pub fn new(mappings: Vec<Mapping>) -> Result<Self, RpcbindError> {
        Self::register_at(Path::new(LOCAL_SOCKET), mappings)
    }

    fn register_at(socket: &Path, mappings: Vec<Mapping>) -> Result<Self, RpcbindError> {
        let mut rpcbind = connect_to_socket(socket)?;
        let mut registration = Self { mappings: Vec::new(), socket: socket.to_owned() };
        for mapping in mappings {
            if !change(&mut rpcbind, SET, &mapping)? {
                let is_same_entry = |line: &&Mapping| {
                    (line.program, line.version, &line.netid) == (mapping.program, mapping.version, &mapping.netid)
                };
                let reason = match dump(&mut rpcbind)?.iter().find(is_same_entry) {
                    Some(Mapping { address, owner, .. }) => format!(
                        "user {owner} registered it at {address}; if no server runs there: rpcinfo -d {} {}",
                        mapping.program, mapping.version
                    ),
                    None => "this user is not permitted".to_owned(),
                };
                return Err(RpcbindError::NotRegistered { mapping: Box::new(mapping), reason });
            }
            registration.mappings.push(mapping);
        }
        Ok(registration)
    }

    /// Withdraws the entries. Unlike drop, reports errors.
    ///
    /// # Errors
    /// The call of rpcbind failed, and entries may remain.
    pub fn withdraw(mut self) -> Result<(), RpcbindError> {
        self.withdraw_all()
    }

    fn withdraw_all(&mut self) -> Result<(), RpcbindError> {
        if self.mappings.is_empty() {
            return Ok(());
        }
        let mut rpcbind = connect_to_socket(&self.socket)?;
        for mapping in std::mem::take(&mut self.mappings) {
            // A refusal is ignored, because another process may have withdrawn the entry.
            change(&mut rpcbind, UNSET, &mapping)?;
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _ = self.withdraw_all();
    }
}

#[cfg(test)]
mod tests;
