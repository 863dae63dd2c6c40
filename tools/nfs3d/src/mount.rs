//! MOUNT version 3 (RFC 1813 §5) on TCP, from which clients get the root's handle.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use log::Level;
use rpcrdma::typed::Signature;
use rpcrdma::xdr::{self, Decoder, Encode};
use rpcrdma_config::program;
use rpcrdma_fabric::log_limit::ClockedLog;
use rpcrdma_proto::wire::rpc::{AcceptStat, CallHeader, Flavor, RejectStat, ReplyBody, ReplyHeader};
use rpcrdma_rpcbind::stream::{self, Timed};

use crate::connections::Connections;
use crate::export::Export;
use crate::identity::Identity;
use crate::lines;
use crate::lock::lock;
use crate::mount3::mount_v3::{Dump, Export as Exported, Mnt, PROGRAM, Umnt, Umntall, VERSION};
use crate::mount3::{
    Dirpath, Exportnode, Exports, Fhandle3, Groups, MNTPATHLEN, Mountbody, Mountlist, Mountres3, Mountres3Ok,
    Mountstat3, Name,
};
use crate::nfs3::Nfsstat3;
use crate::node::Node;

/// Longest call, in bytes.
const CALL_MAX: usize = 16 << 10;
/// Time limit from the first byte of a call to the last byte of its reply.
const CALL_TIME: Duration = Duration::from_secs(5);
/// Idle time until a connection is closed.
const IDLE: Duration = Duration::from_secs(30);
/// Limit of connection threads, including those of evicted connections.
pub(crate) const THREADS: usize = 128;
/// Limit of remembered mounts, for DUMP.
const MOUNTS: usize = 1024;

/// The MOUNT server.
struct Mountd {
    export: Arc<Export>,
    /// Pairs of a host and a path that it has mounted.
    mounts: Mutex<BTreeSet<(String, Vec<u8>)>>,
    connections: Connections,
}

/// Serves MOUNT on its own threads until the process ends. Returns the port.
///
/// # Errors
/// The port is in use, or the system cannot start a thread.
pub fn serve(export: &Arc<Export>, port: u16) -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .with_context(|| format!("cannot listen on TCP port {port} for MOUNT (--mount-port)"))?;
    let port = listener.local_addr()?.port();
    let mountd =
        Arc::new(Mountd { export: Arc::clone(export), mounts: Mutex::default(), connections: Connections::default() });
    program::spawn("mountd", move || mountd.accept(&listener))?;
    Ok(port)
}

impl Mountd {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut log = ClockedLog::new(module_path!());
        loop {
            let (stream, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    log.accept_failed("MOUNT", error);
                    // The usual cause is too many open files, some of which will be closed.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            // The threads of evicted connections end soon, so this wait is short.
            while Arc::strong_count(self) > THREADS {
                std::thread::sleep(Duration::from_millis(1));
            }
            let stream = self.connections.admit(stream, peer.ip());
            let (this, served) = (Arc::clone(self), Arc::clone(&stream));
            let serve = move || {
                if let Err(error) = this.serve_connection(&served, peer)
                    && matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::InvalidData)
                {
                    let line =
                        format_args!("{}: MOUNT connection closed during a call: {error}", peer.ip().to_canonical());
                    lines::log(Level::Warn, "MOUNT connections closed during a call", line);
                }
                this.connections.remove(&served);
            };
            if let Err(error) = program::spawn("mountd-client", serve) {
                let line = format_args!(
                    "{}: MOUNT connection closed: cannot start a thread: {error}",
                    peer.ip().to_canonical()
                );
                lines::log(Level::Warn, "MOUNT connections closed for lack of a thread", line);
                self.connections.remove(&stream);
            }
        }
    }

    fn serve_connection(&self, stream: &Arc<TcpStream>, peer: SocketAddr) -> io::Result<()> {
        stream.set_nodelay(true)?;
        loop {
            stream.set_read_timeout(Some(IDLE))?;
            if !stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0) {
                return Ok(());
            }
            let mut timed = Timed::new(&**stream, CALL_TIME);
            let Some(call) = stream::read_record(&mut timed, CALL_MAX)? else { return Ok(()) };
            if let Some(reply) = self.answer(&call, peer) {
                stream::write_record(&mut timed, &reply)?;
            }
            self.connections.touch(stream);
        }
    }

    /// Returns the reply to an RPC message, if the message is a call.
    fn answer(&self, call: &[u8], peer: SocketAddr) -> Option<Vec<u8>> {
        let xid = u32::from_be_bytes(call.get(..4)?.try_into().ok()?);
        let (body, results) = match CallHeader::parse(call) {
            Err(error) => (error.answer()?, Vec::new()),
            Ok((header, at)) => match self.dispatch(&header, &call[at..], peer) {
                Ok(results) => (ReplyBody::SUCCESS, results),
                Err(refusal) => (refusal, Vec::new()),
            },
        };
        let mut reply = vec![0; 64];
        let len = ReplyHeader { xid, body }.emit(&mut reply).ok()?;
        reply.truncate(len);
        reply.extend(results);
        Some(reply)
    }

    /// Executes a call. The error is the reply that refuses it.
    fn dispatch(&self, header: &CallHeader<'_>, args: &[u8], peer: SocketAddr) -> Result<Vec<u8>, ReplyBody<'static>> {
        if header.program != PROGRAM {
            return Err(ReplyBody::accepted(AcceptStat::ProgUnavail));
        }
        if header.version != VERSION {
            return Err(ReplyBody::accepted(AcceptStat::ProgMismatch { low: VERSION, high: VERSION }));
        }
        let garbage = |_| ReplyBody::accepted(AcceptStat::GarbageArgs);
        // The length of the path is checked later, because MNT has a status for a path that is too long.
        let mut args = Decoder::new(args);
        let path = match header.procedure {
            Mnt::NUMBER | Umnt::NUMBER => args.opaque(CALL_MAX, "path").map_err(garbage)?,
            _ => b"",
        };
        args.end().map_err(garbage)?;
        let host = peer.ip().to_canonical().to_string();
        match header.procedure {
            0 => {}
            Mnt::NUMBER => {
                let policy = &self.export.options.policy;
                let user = policy.identify_credential(header.credential.flavor, header.credential.body);
                let user = user.map_err(|stat| ReplyBody::Denied(RejectStat::AuthError(stat.code())))?;
                return self.mount(path, host, &user);
            }
            Dump::NUMBER => return self.dump(),
            Umnt::NUMBER => drop(lock(&self.mounts).remove(&(host, path.to_vec()))),
            Umntall::NUMBER => lock(&self.mounts).retain(|(mounted_by, _)| *mounted_by != host),
            Exported::NUMBER => return self.exports(),
            _ => return Err(ReplyBody::accepted(AcceptStat::ProcUnavail)),
        }
        Ok(Vec::new())
    }

    /// Executes MNT of the export, or of a directory below it, as a user.
    fn mount(&self, path: &[u8], host: String, user: &Identity) -> Result<Vec<u8>, ReplyBody<'static>> {
        const FLAVORS: [i32; 2] = [Flavor::Sys.code() as i32, Flavor::None.code() as i32];
        let found = self.find(path, user);
        encode(&match &found {
            Ok(node) => {
                let mounts = &mut *lock(&self.mounts);
                if mounts.len() < MOUNTS {
                    mounts.insert((host, path.to_vec()));
                }
                Mountres3::Ok(Mountres3Ok { fhandle: Fhandle3(node.handle().data), auth_flavors: FLAVORS[..].into() })
            }
            Err(status) => Mountres3::Default(*status),
        })
    }

    /// Finds a directory. The user must be allowed to search each directory above it, up to the export.
    fn find(&self, path: &[u8], user: &Identity) -> Result<Arc<Node>, Mountstat3> {
        if path.len() > MNTPATHLEN as usize {
            return Err(Mountstat3::ErrNametoolong);
        }
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        let below = path.strip_prefix(&self.export.path).map_err(|_| Mountstat3::ErrNoent)?;
        let mut node = Arc::clone(&self.export.root);
        for part in below.components() {
            let Component::Normal(part) = part else { return Err(Mountstat3::ErrInval) };
            let found = self.export.look_up(&node, part.as_bytes(), user);
            node = found.map_err(mount_status)?.0;
        }
        node.check_dir().map_err(mount_status)?;
        Ok(node)
    }

    fn dump(&self) -> Result<Vec<u8>, ReplyBody<'static>> {
        let mounts = lock(&self.mounts);
        let bodies: Vec<_> = (mounts.iter())
            .map(|(host, path)| Mountbody { ml_hostname: Name(host.as_bytes()), ml_directory: Dirpath(path) })
            .collect();
        encode(&Mountlist::from(&bodies[..]))
    }

    /// EXPORT, which lists one directory for all hosts.
    fn exports(&self) -> Result<Vec<u8>, ReplyBody<'static>> {
        let ex_dir = Dirpath(self.export.path.as_os_str().as_bytes());
        encode(&Exports::from(&[Exportnode { ex_dir, ex_groups: Groups::default() }][..]))
    }
}

fn encode(results: &impl Encode) -> Result<Vec<u8>, ReplyBody<'static>> {
    xdr::encode(results).map_err(|_| ReplyBody::accepted(AcceptStat::SystemErr))
}

/// Converts an NFS status to the MOUNT status with the same number, or to MNT3ERR_IO if there is none.
fn mount_status(status: Nfsstat3) -> Mountstat3 {
    xdr::decode(&(status as i32).to_be_bytes()).unwrap_or(Mountstat3::ErrIo)
}

#[cfg(test)]
mod tests {
    use rpcrdma::config::DebugConfig;

    use super::*;
    use crate::connections::{MAX_CONNECTIONS, MAX_PER_HOST};

    #[test]
    fn the_help_text_states_the_limits_of_connections() {
        let help = crate::daemon::command_line().render_long_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for limit in [
            format!("MOUNT serves {MAX_CONNECTIONS} connections, at most {MAX_PER_HOST} per host"),
            format!("after {} s without a call, or when a call takes {} s", IDLE.as_secs(), CALL_TIME.as_secs()),
            format!("Paths have at most {MNTPATHLEN} bytes"),
            format!("The list of mounts has at most {MOUNTS} entries"),
            format!("debug.handshake_timeout instead ({} s)", DebugConfig::default().handshake_timeout.as_secs()),
        ] {
            assert!(help.contains(&limit), "{limit:?} is not in: {help}");
        }
    }
}
