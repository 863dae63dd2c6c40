//! An NFS server for tests of `nfs3c`, whose listings and busy replies a test chooses.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rpcrdma::server::ServerConfig;
use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::typed::{CallInfo, ProgramCache, ReplySender, ReplySent, Signature};
use rpcrdma::wire::rpc::{CallHeader, ReplyBody, ReplyHeader};
use rpcrdma::xdr::{self, ListBuilder};
use rpcrdma::{Refusal, Services};
use rpcrdma_nfs3d::mount3::{Fhandle3, Mountres3, Mountres3Ok};
use rpcrdma_nfs3d::nfs3::nfs_v3::*;
use rpcrdma_nfs3d::nfs3::*;
use rpcrdma_rpcbind::stream;

use crate::client::pattern;

/// Handle of the root and of all directories.
const ROOT: [u8; 4] = *b"root";
/// Handle of all files.
const FILE: [u8; 4] = *b"file";
/// Bytes of a file.
pub(crate) const LEN: usize = 300_000;

/// An entry: its name, whether it is a directory, and its cookie.
pub(crate) type Listed = (Vec<u8>, bool, u64);

/// A server that replies as configured.
pub(crate) struct FakeServer {
    /// The entries after a cookie, and whether they are the last.
    pub(crate) list: fn(u64) -> (Vec<Listed>, bool),
    /// Calls that fail with NFS3ERR_JUKEBOX.
    pub(crate) busy: Busy,
    /// Procedures that were called.
    called: Mutex<BTreeSet<u32>>,
    /// Calls of READDIRPLUS.
    pub(crate) lists: AtomicU32,
    written: Mutex<Vec<u8>>,
}

/// Which calls fail with NFS3ERR_JUKEBOX.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Busy {
    Never,
    /// The first call of each procedure.
    Once,
    Always,
}

impl FakeServer {
    pub(crate) fn new(list: fn(u64) -> (Vec<Listed>, bool), busy: Busy) -> Arc<Self> {
        let (called, lists, written) = Default::default();
        Arc::new(Self { list, busy, called, lists, written })
    }

    /// Records a call of the procedure. Returns whether it must fail with NFS3ERR_JUKEBOX.
    fn record_and_check_busy(&self, procedure: u32) -> bool {
        let first = self.called.lock().unwrap().insert(procedure);
        self.busy == Busy::Always || self.busy == Busy::Once && first
    }

    /// The data that a client has written, in the order of offsets.
    pub(crate) fn written(&self) -> Vec<u8> {
        self.written.lock().unwrap().clone()
    }

    /// Serves while `nfs3c` runs. `arguments` follow those of the server and the export.
    pub(crate) fn run(self: &Arc<Self>, arguments: &[&str]) -> Output {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let address = format!("soft:nfs3c-fake-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
        let mut services = Services::new();
        add(&mut services, self, &ProgramCache::new(cache, |_| None));
        let mut config = ServerConfig::default();
        config.shard.memory.bulk_buffers = vec![(128 << 10, 64)];
        let server = rpcrdma::Server::start(&address.parse().unwrap(), services, &config).expect("it starts");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let mount = listener.local_addr().expect("an address").to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let call = stream::read_record(&mut stream, 4096).expect("a call").expect("a call");
            let (CallHeader { xid, .. }, _) = CallHeader::parse(&call).expect("a call");
            let mut reply = vec![0; 64];
            let len = ReplyHeader { xid, body: ReplyBody::SUCCESS }.emit(&mut reply).expect("room");
            reply.truncate(len);
            let results = Mountres3::Ok(Mountres3Ok { fhandle: Fhandle3(&ROOT), auth_flavors: [1][..].into() });
            reply.extend(xdr::encode(&results).expect("results"));
            stream::write_record(&mut stream, &reply).expect("written");
        });
        let output = Command::new(env!("CARGO_BIN_EXE_nfs3c"))
            .args([&address, "/", "--mount", &mount, "--block", "65536"])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        drop(server);
        output
    }
}

fn attributes(is_dir: bool) -> Fattr3 {
    let (none, time) = (Specdata3 { specdata1: 0, specdata2: 0 }, Nfstime3 { seconds: 0, nseconds: 0 });
    Fattr3 {
        r#type: if is_dir { Ftype3::Dir } else { Ftype3::Reg },
        mode: 0o644,
        nlink: 1,
        uid: 0,
        gid: 0,
        size: LEN as u64,
        used: 0,
        rdev: none,
        fsid: 1,
        fileid: 1,
        atime: time,
        mtime: time,
        ctime: time,
    }
}

const NO_WCC: WccData = WccData { before: None, after: None };
const BUSY: Nfsstat3 = Nfsstat3::ErrJukebox;

impl Server for FakeServer {
    fn fsinfo(
        &self,
        _: CallInfo<'_>,
        _: Fsinfo3Args<'_>,
        answer: ReplySender<'_, Fsinfo>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Fsinfo::NUMBER) {
            return answer.send(&Fsinfo3Res::Default(BUSY, Fsinfo3Resfail::default()));
        }
        answer.send(&Fsinfo3Res::Ok(Fsinfo3Resok {
            obj_attributes: None,
            rtmax: 1 << 16,
            rtpref: 1 << 16,
            rtmult: 1,
            wtmax: 1 << 16,
            wtpref: 1 << 16,
            wtmult: 1,
            dtpref: 1 << 16,
            maxfilesize: u64::MAX,
            time_delta: Nfstime3 { seconds: 0, nseconds: 1 },
            properties: 0,
        }))
    }

    fn lookup(
        &self,
        _: CallInfo<'_>,
        _: Lookup3Args<'_>,
        answer: ReplySender<'_, Lookup>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Lookup::NUMBER) {
            return answer.send(&Lookup3Res::Default(BUSY, Lookup3Resfail::default()));
        }
        let object = NfsFh3 { data: &FILE };
        answer.send(&Lookup3Res::Ok(Lookup3Resok { object, obj_attributes: None, dir_attributes: None }))
    }

    fn getattr(
        &self,
        _: CallInfo<'_>,
        _: Getattr3Args<'_>,
        answer: ReplySender<'_, Getattr>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Getattr::NUMBER) {
            return answer.send(&Getattr3Res::Default(BUSY));
        }
        answer.send(&Getattr3Res::Ok(Getattr3Resok { obj_attributes: attributes(false) }))
    }

    fn read(&self, _: CallInfo<'_>, args: Read3Args<'_>, answer: ReplySender<'_, Read>) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Read::NUMBER) {
            return answer.send(&Read3Res::Default(BUSY, Read3Resfail::default()));
        }
        let all = pattern(LEN);
        let data = &all[args.offset as usize..][..args.count as usize];
        let eof = args.offset as usize + data.len() == LEN;
        answer.send(&Read3Res::Ok(Read3Resok { file_attributes: None, count: args.count, eof, data: data.into() }))
    }

    fn create(
        &self,
        _: CallInfo<'_>,
        _: Create3Args<'_>,
        answer: ReplySender<'_, Create>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Create::NUMBER) {
            return answer.send(&Create3Res::Default(BUSY, Create3Resfail { dir_wcc: NO_WCC }));
        }
        let obj = Some(NfsFh3 { data: &FILE });
        answer.send(&Create3Res::Ok(Create3Resok { obj, obj_attributes: None, dir_wcc: NO_WCC }))
    }

    fn write(
        &self,
        _: CallInfo<'_>,
        args: Write3Args<'_>,
        answer: ReplySender<'_, Write>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Write::NUMBER) {
            return answer.send(&Write3Res::Default(BUSY, Write3Resfail { file_wcc: NO_WCC }));
        }
        let mut written = self.written.lock().unwrap();
        let end = args.offset as usize + args.data.len();
        let len = written.len().max(end);
        written.resize(len, 0);
        written[args.offset as usize..end].copy_from_slice(args.data.bytes());
        let (count, committed) = (args.count, args.stable);
        answer.send(&Write3Res::Ok(Write3Resok { file_wcc: NO_WCC, count, committed, verf: [0; 8] }))
    }

    fn setattr(
        &self,
        _: CallInfo<'_>,
        args: Setattr3Args<'_>,
        answer: ReplySender<'_, Setattr>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Setattr::NUMBER) {
            return answer.send(&Setattr3Res::Default(BUSY, Setattr3Resfail { obj_wcc: NO_WCC }));
        }
        let size = args.new_attributes.size.expect("a size");
        self.written.lock().unwrap().truncate(size as usize);
        answer.send(&Setattr3Res::Ok(Setattr3Resok { obj_wcc: NO_WCC }))
    }

    fn commit(
        &self,
        _: CallInfo<'_>,
        _: Commit3Args<'_>,
        answer: ReplySender<'_, Commit>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Commit::NUMBER) {
            return answer.send(&Commit3Res::Default(BUSY, Commit3Resfail { file_wcc: NO_WCC }));
        }
        answer.send(&Commit3Res::Ok(Commit3Resok { file_wcc: NO_WCC, verf: [0; 8] }))
    }

    fn readdirplus(
        &self,
        _: CallInfo<'_>,
        args: Readdirplus3Args<'_>,
        answer: ReplySender<'_, Readdirplus>,
    ) -> Result<ReplySent, Refusal> {
        if self.record_and_check_busy(Readdirplus::NUMBER) {
            return answer.send(&Readdirplus3Res::Default(BUSY, Readdirplus3Resfail::default()));
        }
        self.lists.fetch_add(1, Ordering::Relaxed);
        let (listed, eof) = (self.list)(args.cookie);
        let mut entries = ListBuilder::with_capacity(4096);
        for (name, is_dir, cookie) in &listed {
            let handle = if *is_dir { &ROOT } else { &FILE };
            let entry = Entryplus3 {
                fileid: 1,
                name: Filename3(name),
                cookie: *cookie,
                name_attributes: Some(attributes(*is_dir)),
                name_handle: Some(NfsFh3 { data: handle }),
            };
            entries.push(&entry).expect("an entry");
        }
        let reply = Dirlistplus3 { entries: entries.list(), eof };
        answer.send(&Readdirplus3Res::Ok(Readdirplus3Resok { dir_attributes: None, cookieverf: [0; 8], reply }))
    }
}
