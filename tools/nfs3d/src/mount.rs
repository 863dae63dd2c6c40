//! MOUNT version 3 (RFC 1813 §5) on TCP: gives clients the root's handle.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use log::Level;
pub(crate) use nfs3_types::mount::{PROGRAM, VERSION};
use nfs3_types::mount::{
    dirpath, export_node, exports, fhandle3, mountbody, mountlist, mountres3, mountres3_ok, mountstat3, name,
};
use nfs3_types::nfs3::nfsstat3;
use nfs3_types::xdr_codec::{List, Opaque, Pack};
use rpcrdma_proto::wire::rpc::{AcceptStat, CallHeader, Flavor, ReplyBody, ReplyHeader};
use rpcrdma_rpcbind::stream::{self, Timed};

use crate::codec::Args;
use crate::connections::Connections;
use crate::export::Export;
use crate::lines;

/// Longest call, in bytes.
const CALL_MAX: usize = 16 << 10;
/// Time limit of a call after its first byte, with its reply.
const CALL_TIME: Duration = Duration::from_secs(5);
/// Idle time until a connection is closed.
const IDLE: Duration = Duration::from_secs(30);
/// Limit of connection threads, including those of evicted connections.
const THREADS: usize = 128;
/// Limit of remembered mounts, for DUMP.
const MOUNTS: usize = 1024;

type Mounts = Mutex<BTreeSet<(String, Vec<u8>)>>;

struct Mountd {
    export: Arc<Export>,
    mounts: Mounts,
    connections: Connections,
}

/// Serves on its own threads until the process ends. Returns the port.
pub(crate) fn serve(export: &Arc<Export>, port: u16) -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .with_context(|| format!("TCP port {port} for MOUNT (--mount-port names another)"))?;
    let port = listener.local_addr()?.port();
    let mountd =
        Arc::new(Mountd { export: Arc::clone(export), mounts: Mutex::default(), connections: Connections::default() });
    std::thread::Builder::new().name("mountd".into()).spawn(move || mountd.accept(&listener))?;
    Ok(port)
}

impl Mountd {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let Ok((stream, peer)) = listener.accept() else {
                // Mostly too many open files: some will be closed.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            // Threads of evicted connections end soon.
            while Arc::strong_count(self) > THREADS {
                std::thread::sleep(Duration::from_millis(1));
            }
            let stream = self.connections.admit(stream, peer.ip());
            let (this, own) = (Arc::clone(self), Arc::clone(&stream));
            let client = move || {
                if let Err(error) = this.client(&own, peer)
                    && matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::InvalidData)
                {
                    let line =
                        format_args!("{}: connection of MOUNT closed within a call: {error}", peer.ip().to_canonical());
                    lines::log(Level::Warn, "connections of MOUNT closed within a call", line);
                }
                this.connections.remove(&own);
            };
            if std::thread::Builder::new().name("mountd-client".into()).spawn(client).is_err() {
                self.connections.remove(&stream);
            }
        }
    }

    fn client(&self, stream: &Arc<TcpStream>, peer: SocketAddr) -> io::Result<()> {
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

    /// Reply to an RPC message, if it is a call.
    fn answer(&self, call: &[u8], peer: SocketAddr) -> Option<Vec<u8>> {
        let xid = u32::from_be_bytes(call.get(..4)?.try_into().ok()?);
        let (body, results) = match CallHeader::parse(call) {
            Err(error) => (error.answer()?, Vec::new()),
            Ok((header, at)) => match self.dispatch(&header, Args::new(&call[at..]), peer) {
                Ok(results) => (ReplyBody::SUCCESS, results),
                Err(refusal) => (ReplyBody::accepted(refusal), Vec::new()),
            },
        };
        let mut reply = vec![0; 64];
        let len = ReplyHeader { xid, body }.emit(&mut reply).ok()?;
        reply.truncate(len);
        reply.extend(results);
        Some(reply)
    }

    fn dispatch(&self, header: &CallHeader<'_>, mut args: Args<'_>, peer: SocketAddr) -> Result<Vec<u8>, AcceptStat> {
        if header.program != PROGRAM {
            return Err(AcceptStat::ProgUnavail);
        }
        if header.version != VERSION {
            return Err(AcceptStat::ProgMismatch { low: VERSION, high: VERSION });
        }
        let garbage = |_| AcceptStat::GarbageArgs;
        let path = match header.procedure {
            1 | 3 => args.opaque().map_err(garbage)?,
            _ => b"",
        };
        args.end().map_err(garbage)?;
        let host = peer.ip().to_canonical().to_string();
        match header.procedure {
            0 => Ok(Vec::new()),
            1 => encode(&self.mount(path, host)),
            2 => encode(&self.dump()),
            3 => {
                self.mounts().remove(&(host, path.to_vec()));
                Ok(Vec::new())
            }
            4 => {
                self.mounts().retain(|(mounted_by, _)| *mounted_by != host);
                Ok(Vec::new())
            }
            5 => encode(&self.exports()),
            _ => Err(AcceptStat::ProcUnavail),
        }
    }

    fn mounts(&self) -> std::sync::MutexGuard<'_, BTreeSet<(String, Vec<u8>)>> {
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// MNT: the export or a directory below.
    fn mount(&self, path: &[u8], host: String) -> mountres3<'static> {
        match self.find(path) {
            Ok(handle) => {
                let mounts = &mut *self.mounts();
                if mounts.len() < MOUNTS {
                    mounts.insert((host, path.to_vec()));
                }
                mountres3::Ok(mountres3_ok {
                    fhandle: fhandle3(Opaque::owned(handle)),
                    auth_flavors: vec![Flavor::Sys.code(), Flavor::None.code()],
                })
            }
            Err(status) => mountres3::Err(status),
        }
    }

    fn find(&self, path: &[u8]) -> Result<Vec<u8>, mountstat3> {
        if path.len() > nfs3_types::mount::MNTPATHLEN {
            return Err(mountstat3::MNT3ERR_NAMETOOLONG);
        }
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        let below = path.strip_prefix(&self.export.path).map_err(|_| mountstat3::MNT3ERR_NOENT)?;
        let who = self.export.own_identity();
        let mut node = Arc::clone(&self.export.root);
        for part in below.components() {
            let Component::Normal(part) = part else { return Err(mountstat3::MNT3ERR_INVAL) };
            let found = self.export.look_up(&node, part.as_bytes(), &who);
            node = found.map_err(mount_status)?.0;
        }
        node.check_dir().map_err(mount_status)?;
        Ok(node.handle().to_vec())
    }

    fn dump(&self) -> mountlist<'static, 'static> {
        let body = |(host, path): &(String, Vec<u8>)| mountbody {
            ml_hostname: name(Opaque::owned(host.clone().into_bytes())),
            ml_directory: dirpath(Opaque::owned(path.clone())),
        };
        List(self.mounts().iter().map(body).collect())
    }

    /// EXPORT: one directory, for all hosts.
    fn exports(&self) -> exports<'static, 'static> {
        let path = self.export.path.as_os_str().as_bytes().to_vec();
        List(vec![export_node { ex_dir: dirpath(Opaque::owned(path)), ex_groups: List::default() }])
    }
}

fn encode(results: &impl Pack) -> Result<Vec<u8>, AcceptStat> {
    let mut out = Vec::with_capacity(results.packed_size());
    results.pack(&mut out).map_err(|_| AcceptStat::SystemErr)?;
    Ok(out)
}

fn mount_status(status: nfsstat3) -> mountstat3 {
    match status {
        nfsstat3::NFS3ERR_PERM => mountstat3::MNT3ERR_PERM,
        nfsstat3::NFS3ERR_NOENT => mountstat3::MNT3ERR_NOENT,
        nfsstat3::NFS3ERR_ACCES => mountstat3::MNT3ERR_ACCES,
        nfsstat3::NFS3ERR_NOTDIR => mountstat3::MNT3ERR_NOTDIR,
        nfsstat3::NFS3ERR_INVAL => mountstat3::MNT3ERR_INVAL,
        nfsstat3::NFS3ERR_NAMETOOLONG => mountstat3::MNT3ERR_NAMETOOLONG,
        _ => mountstat3::MNT3ERR_IO,
    }
}
