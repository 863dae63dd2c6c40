//! A fabric in another process, driven over a Unix socket.
//!
//! Each call sends a request and waits for the answer. Only the server side is supported: the remote fabric accepts
//! connections, but does not connect, and exposes no memory.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma_fabric::software::{SoftwareConfig, SoftwareFabric, SoftwareListener};
use rpcrdma_fabric::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Disconnect, Fabric, FabricAddress, FabricError,
    FabricStats, Opcode, PostError, Posting, QpId, ReceivedBuf, RemoteMemory, RequestId, Source, Status, Waker,
    WindowId, WorkRequest,
};
use rpcrdma_mempool::{Arena, ArenaConfig, ArenaId, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

/// Bytes of a Receive.
const RECEIVE_SIZE: usize = 4096;
/// Statuses, by their code in an answer.
const STATUSES: [Status; 8] = [
    Status::Success,
    Status::LocalLength,
    Status::LocalQpOperation,
    Status::Flushed,
    Status::RemoteInvalidRequest,
    Status::RemoteAccess,
    Status::RnrRetryExceeded,
    Status::RemoteOperation,
];
/// Opcodes, by their code in an answer.
const OPCODES: [Opcode; 4] = [Opcode::Send, Opcode::Write, Opcode::Read, Opcode::Recv];

/// A request or an answer as a sequence of words.
#[derive(Default)]
struct Words {
    bytes: Vec<u8>,
    at: usize,
}

impl Words {
    fn put(&mut self, n: u64) -> &mut Self {
        self.bytes.extend(n.to_le_bytes());
        self
    }

    fn put_bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.put(bytes.len() as u64);
        self.bytes.extend(bytes);
        self
    }

    fn put_qp(&mut self, qp: QpId) -> &mut Self {
        self.put(u64::from(qp.slot) << 32 | u64::from(qp.generation))
    }

    fn get(&mut self) -> u64 {
        let word = self.bytes[self.at..self.at + 8].try_into().expect("8 bytes");
        self.at += 8;
        u64::from_le_bytes(word)
    }

    fn get_bytes(&mut self) -> Vec<u8> {
        let len = self.get() as usize;
        self.at += len;
        self.bytes[self.at - len..self.at].to_vec()
    }

    fn get_qp(&mut self) -> QpId {
        let word = self.get();
        QpId { slot: (word >> 32) as u32, generation: word as u32 }
    }

    fn send(self, socket: &mut UnixStream) {
        let len = (self.bytes.len() as u64).to_le_bytes();
        socket.write_all(&[&len[..], &self.bytes].concat()).expect("the other process is running");
    }

    /// Returns `None` at the end of the stream.
    fn receive(socket: &mut UnixStream) -> Option<Self> {
        let mut len = [0; 8];
        socket.read_exact(&mut len).ok()?;
        let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
        socket.read_exact(&mut bytes).ok()?;
        Some(Self { bytes, at: 0 })
    }
}

/// Request codes.
mod request_code {
    pub(super) const STATS: u64 = 0;
    pub(super) const LISTEN: u64 = 1;
    pub(super) const UNLISTEN: u64 = 2;
    pub(super) const ACCEPT: u64 = 3;
    pub(super) const REJECT: u64 = 4;
    pub(super) const DISCONNECT: u64 = 5;
    pub(super) const DESTROY: u64 = 6;
    pub(super) const EVENTS: u64 = 7;
    pub(super) const RECEIVES: u64 = 8;
    pub(super) const POST: u64 = 9;
    pub(super) const COMPLETIONS: u64 = 10;
    pub(super) const ARM: u64 = 11;
    pub(super) const WAIT: u64 = 12;
}

/// Codes of the work requests in a [`request_code::POST`].
mod work_request_code {
    pub(super) const SEND: u64 = 0;
    pub(super) const WRITE: u64 = 1;
    pub(super) const READ: u64 = 2;
}

/// Serves requests until the socket closes.
pub(crate) fn serve(mut socket: UnixStream, config: SoftwareConfig) {
    let classes = vec![Class { size: RECEIVE_SIZE, count: 1024 }, Class { size: 4 << 20, count: 4 }];
    let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes, arena }).expect("a pool");
    let mut fabric = SoftwareFabric::new(config).expect("a fabric");
    fabric.register(pool.arena(), Access::LOCAL).expect("register");
    let mut listener: Option<SoftwareListener> = None;
    let mut reads: VecDeque<(QpId, Lent)> = VecDeque::new();
    while let Some(mut request) = Words::receive(&mut socket) {
        let mut answer = Words::default();
        match request.get() {
            request_code::STATS => {
                let stats = fabric.stats();
                answer.put(stats.receiver_not_ready).put(stats.access_refused).put(stats.peer_violations);
            }
            request_code::LISTEN => {
                let address = FabricAddress(String::from_utf8(request.get_bytes()).expect("the address is UTF-8"));
                let bound = SoftwareFabric::bind(&address).expect("bind");
                fabric.listen(&bound).expect("listen");
                listener = Some(bound);
            }
            request_code::UNLISTEN => fabric.unlisten(),
            request_code::ACCEPT => {
                let id = RequestId(request.get());
                let params = ConnectParams {
                    send_queue_depth: request.get() as u32,
                    own_receive_queue: Some(request.get() as u32).filter(|&n| n > 0),
                    windows: request.get() as u32,
                    rnr_retry: request.get() as u8,
                    private_data: request.get_bytes(),
                    ..ConnectParams::default()
                };
                answer.put_qp(fabric.accept(id, &params).expect("accept"));
            }
            request_code::REJECT => {
                let id = RequestId(request.get());
                fabric.reject(id, &request.get_bytes());
            }
            request_code::DISCONNECT => fabric.disconnect(request.get_qp()),
            request_code::DESTROY => fabric.destroy_qp(request.get_qp()),
            request_code::EVENTS => {
                let mut events = Vec::new();
                fabric.poll_control(&mut events);
                answer.put(events.len() as u64);
                for event in events {
                    match event {
                        ControlEvent::ConnectRequest { request: id, private_data, peer } => {
                            answer.put(0).put(id.0).put_bytes(&private_data).put_bytes(peer.as_bytes())
                        }
                        ControlEvent::Established { qp, .. } => answer.put(1).put_qp(qp),
                        ControlEvent::Disconnected { qp, reason, .. } => {
                            answer.put(2).put_qp(qp).put_bytes(reason.as_bytes())
                        }
                        other => panic!("an acceptor does not support {other:?}"),
                    };
                }
            }
            request_code::RECEIVES => {
                let qp = (request.get() == 1).then(|| request.get_qp());
                let mut bufs: Vec<Buf> = (0..request.get()).map_while(|_| pool.alloc(RECEIVE_SIZE)).collect();
                answer.put(fabric.post_recv(qp, &mut bufs) as u64);
            }
            request_code::POST => {
                let qp = request.get_qp();
                let mut chain = Vec::new();
                let mut lents = Vec::new();
                for _ in 0..request.get() {
                    let (code, wr_id, signaled) = (request.get(), request.get(), request.get() == 1);
                    let (key, address) = (request.get(), request.get());
                    let remote = RemoteMemory { rkey: key as u32, address };
                    let bytes = request.get_bytes();
                    let len = bytes.len();
                    let mut buf = pool.alloc(len).expect("memory");
                    buf.copy_from_slice(&bytes);
                    let wr = match code {
                        work_request_code::SEND => {
                            let invalidate = (key != u64::MAX).then_some(key as u32);
                            WorkRequest::Send { buf, invalidate, fence: false }
                        }
                        work_request_code::WRITE => {
                            WorkRequest::Write { src: Source::Frozen(buf.freeze()), offset: 0, len, remote }
                        }
                        _ => {
                            let dst = buf.lend().expect("lend");
                            lents.push((wr_id, dst.clone()));
                            WorkRequest::Read { dst, offset: 0, len, remote }
                        }
                    };
                    chain.push(Posting { wr_id, signaled, wr });
                }
                let all = chain.len();
                let result = fabric.post_send(qp, &mut chain);
                answer.put((all - chain.len()) as u64).put(match result {
                    Ok(()) => 0,
                    Err(PostError::QueueFull) => 1,
                    Err(PostError::NotConnected) => 2,
                    Err(_) => 3,
                });
                lents.retain(|(id, _)| !chain.iter().any(|p| p.wr_id == *id));
                reads.extend(lents.into_iter().map(|(_, lent)| (qp, lent)));
            }
            request_code::COMPLETIONS => {
                let mut done = Vec::new();
                fabric.poll_cq(&mut done, request.get() as usize);
                answer.put(done.len() as u64);
                for d in done {
                    let opcode = OPCODES.iter().position(|o| *o == d.opcode).expect("an opcode");
                    let status = STATUSES.iter().position(|s| *s == d.status).expect("a status");
                    answer.put(d.wr_id).put_qp(d.qp).put(opcode as u64).put(status as u64);
                    answer.put(d.invalidated.map_or(u64::MAX, u64::from)).put(u64::from(d.buf.is_some()));
                    let mut bytes = Vec::new();
                    if d.opcode == Opcode::Read {
                        let at = reads.iter().position(|r| r.0 == d.qp).expect("the Read was posted");
                        let (_, lent) = reads.remove(at).expect("the Read was posted");
                        bytes = vec![0; lent.len()];
                        assert!(lent.read_at(0, &mut bytes));
                    } else if let Some(buf) = d.buf.filter(|_| d.status.is_ok()) {
                        bytes = buf.to_vec();
                    }
                    answer.put_bytes(&bytes);
                }
            }
            request_code::ARM => fabric.arm(),
            request_code::WAIT => {
                fabric.wait(Some(Duration::from_millis(request.get())));
            }
            other => panic!("unknown request {other}"),
        }
        answer.send(&mut socket);
    }
    reads.clear();
    drop(fabric);
    drop(listener);
    pool.close().expect("all buffers of the other process are returned");
}

/// A fabric in this process or in another one.
pub(crate) enum LocalOrRemote {
    Local(Box<SoftwareFabric>),
    Remote(Box<RemoteFabric>),
}

/// The local proxy of a fabric in another process.
pub(crate) struct RemoteFabric {
    socket: UnixStream,
    stats: FabricStats,
    capabilities: Capabilities,
    registered: Vec<ArenaId>,
    /// Buffers for the messages of each receive queue. The other process has posted the same number of Receives.
    receives: HashMap<Option<QpId>, Vec<Buf>>,
    /// Queue pairs with a receive queue of their own.
    own_queues: Vec<QpId>,
    /// Posted Reads: queue pair, target and offset.
    reads: VecDeque<(QpId, Lent, usize)>,
}

impl RemoteFabric {
    pub(crate) fn new(socket: UnixStream, capabilities: Capabilities) -> Self {
        Self {
            socket,
            stats: FabricStats::default(),
            capabilities,
            registered: Vec::new(),
            receives: HashMap::new(),
            own_queues: Vec::new(),
            reads: VecDeque::new(),
        }
    }

    /// Sends a request and returns the answer.
    fn call(&mut self, fill: impl FnOnce(&mut Words)) -> Words {
        let mut words = Words::default();
        fill(&mut words);
        words.send(&mut self.socket);
        Words::receive(&mut self.socket).expect("the other process is running")
    }

    /// The receive queue of a queue pair; `None` is the shared queue.
    fn receive_queue(&self, qp: QpId) -> Option<QpId> {
        self.own_queues.contains(&qp).then_some(qp)
    }

    fn post(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let mut answer = self.call(|w| {
            w.put(request_code::POST).put_qp(qp).put(chain.len() as u64);
            for posting in chain.iter() {
                let mut put_request = |code: u64, key: u64, address: u64, bytes: &[u8]| {
                    w.put(code).put(posting.wr_id).put(u64::from(posting.signaled));
                    w.put(key).put(address).put_bytes(bytes);
                };
                match &posting.wr {
                    WorkRequest::Send { buf, invalidate, .. } => {
                        put_request(work_request_code::SEND, invalidate.map_or(u64::MAX, u64::from), 0, buf);
                    }
                    WorkRequest::Write { src, offset, len, remote } => {
                        let mut bytes = vec![0; *len];
                        match src {
                            Source::Lent(lent) => assert!(lent.read_at(*offset, &mut bytes)),
                            Source::Frozen(frozen) => bytes.copy_from_slice(&frozen[*offset..*offset + *len]),
                        }
                        put_request(work_request_code::WRITE, u64::from(remote.rkey), remote.address, &bytes);
                    }
                    WorkRequest::Read { len, remote, .. } => {
                        put_request(work_request_code::READ, u64::from(remote.rkey), remote.address, &vec![0; *len]);
                    }
                    other => panic!("an acceptor does not support {other:?}"),
                }
            }
        });
        let taken = answer.get() as usize;
        for posting in chain.drain(..taken) {
            if let WorkRequest::Read { dst, offset, .. } = posting.wr {
                self.reads.push_back((qp, dst, offset));
            }
        }
        match answer.get() {
            0 => Ok(()),
            1 => Err(PostError::QueueFull),
            2 => Err(PostError::NotConnected),
            _ => Err(PostError::Invalid("refused by the other process")),
        }
    }

    fn completions(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut answer = self.call(|w| {
            w.put(request_code::COMPLETIONS).put(max as u64);
        });
        let count = answer.get();
        if count == 0 {
            // Each poll costs both processes several system calls, so an idle caller sleeps between polls.
            std::thread::sleep(Duration::from_micros(50));
        }
        for _ in 0..count {
            let (wr_id, qp) = (answer.get(), answer.get_qp());
            let (opcode, status) = (OPCODES[answer.get() as usize], STATUSES[answer.get() as usize]);
            let invalidated = Some(answer.get()).filter(|&k| k != u64::MAX).map(|k| k as u32);
            let (has_buf, bytes) = (answer.get() == 1, answer.get_bytes());
            if opcode == Opcode::Read {
                let at = self.reads.iter().position(|r| r.0 == qp).expect("the Read was posted");
                let (_, lent, offset) = self.reads.remove(at).expect("the Read was posted");
                assert!(lent.write_at(offset, &bytes));
            }
            let buf = has_buf.then(|| {
                let queue = self.receive_queue(qp);
                let mut buf = self.receives.get_mut(&queue).and_then(Vec::pop).expect("a Receive");
                buf.set_window(0, bytes.len());
                buf.copy_from_slice(&bytes);
                ReceivedBuf::whole(buf)
            });
            out.push(Completion { wr_id, qp, opcode, status, buf, invalidated });
        }
        count as usize
    }

    fn events(&mut self, events: &mut Vec<ControlEvent>) {
        let mut answer = self.call(|w| {
            w.put(request_code::EVENTS);
        });
        for _ in 0..answer.get() {
            events.push(match answer.get() {
                0 => ControlEvent::ConnectRequest {
                    request: RequestId(answer.get()),
                    private_data: answer.get_bytes(),
                    peer: String::from_utf8(answer.get_bytes()).expect("the text is UTF-8"),
                },
                1 => ControlEvent::Established { qp: answer.get_qp(), private_data: Vec::new() },
                _ => ControlEvent::Disconnected {
                    qp: answer.get_qp(),
                    cause: Disconnect::Failure,
                    reason: String::from_utf8(answer.get_bytes()).expect("the text is UTF-8"),
                },
            });
        }
        let mut stats = self.call(|w| {
            w.put(request_code::STATS);
        });
        self.stats.receiver_not_ready = stats.get();
        self.stats.access_refused = stats.get();
        self.stats.peer_violations = stats.get();
    }
}

impl Fabric for LocalOrRemote {
    type Listener = FabricAddress;

    fn capabilities(&self) -> &Capabilities {
        match self {
            Self::Local(f) => f.capabilities(),
            Self::Remote(f) => &f.capabilities,
        }
    }

    fn stats(&self) -> FabricStats {
        match self {
            Self::Local(f) => f.stats(),
            Self::Remote(f) => f.stats,
        }
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        match self {
            Self::Local(f) => f.register(arena, access),
            Self::Remote(f) => {
                f.registered.push(arena.id());
                Ok(())
            }
        }
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        match self {
            Self::Local(f) => f.deregister(arena),
            Self::Remote(f) => {
                f.registered.retain(|id| *id != arena);
                Ok(())
            }
        }
    }

    /// Only checks the address. The other process binds it.
    fn bind(address: &FabricAddress) -> Result<FabricAddress, FabricError> {
        SoftwareFabric::bind(address).map(|_| address.clone())
    }

    fn listen(&mut self, listener: &FabricAddress) -> Result<(), FabricError> {
        match self {
            Self::Local(_) => panic!("only the remote fabric listens"),
            Self::Remote(f) => {
                f.call(|w| {
                    w.put(request_code::LISTEN).put_bytes(listener.0.as_bytes());
                });
                Ok(())
            }
        }
    }

    fn unlisten(&mut self) {
        match self {
            Self::Local(f) => f.unlisten(),
            Self::Remote(f) => {
                f.call(|w| {
                    w.put(request_code::UNLISTEN);
                });
            }
        }
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        match self {
            Self::Local(f) => f.connect(address, params),
            Self::Remote(_) => panic!("a remote fabric does not connect"),
        }
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        match self {
            Self::Local(f) => f.accept(request, params),
            Self::Remote(f) => {
                let mut answer = f.call(|w| {
                    w.put(request_code::ACCEPT).put(request.0).put(u64::from(params.send_queue_depth));
                    w.put(u64::from(params.own_receive_queue.unwrap_or(0))).put(u64::from(params.windows));
                    w.put(u64::from(params.rnr_retry)).put_bytes(&params.private_data);
                });
                let qp = answer.get_qp();
                if params.own_receive_queue.is_some() {
                    f.own_queues.push(qp);
                }
                Ok(qp)
            }
        }
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        match self {
            Self::Local(f) => f.reject(request, private_data),
            Self::Remote(f) => {
                f.call(|w| {
                    w.put(request_code::REJECT).put(request.0).put_bytes(private_data);
                });
            }
        }
    }

    fn disconnect(&mut self, qp: QpId) {
        match self {
            Self::Local(f) => f.disconnect(qp),
            Self::Remote(f) => {
                f.call(|w| {
                    w.put(request_code::DISCONNECT).put_qp(qp);
                });
            }
        }
    }

    fn destroy_qp(&mut self, qp: QpId) {
        match self {
            Self::Local(f) => f.destroy_qp(qp),
            Self::Remote(f) => {
                f.call(|w| {
                    w.put(request_code::DESTROY).put_qp(qp);
                });
            }
        }
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        match self {
            Self::Local(f) => f.poll_control(events),
            Self::Remote(f) => f.events(events),
        }
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        match self {
            Self::Local(f) => f.alloc_window(qp),
            Self::Remote(_) => panic!("a remote fabric exposes no memory"),
        }
    }

    fn next_rkey(&self, window: WindowId) -> u32 {
        match self {
            Self::Local(f) => f.next_rkey(window),
            Self::Remote(_) => panic!("a remote fabric exposes no memory"),
        }
    }

    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        match self {
            Self::Local(f) => f.remote_address(mem, offset),
            Self::Remote(_) => panic!("a remote fabric exposes no memory"),
        }
    }

    fn fence_receives(&mut self) {
        match self {
            Self::Local(f) => f.fence_receives(),
            Self::Remote(_) => panic!("a remote fabric has Receives of one size"),
        }
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        match self {
            Self::Local(f) => f.post_recv(qp, bufs),
            Self::Remote(f) => {
                let n = bufs.len() as u64;
                let mut answer = f.call(|w| {
                    w.put(request_code::RECEIVES).put(u64::from(qp.is_some()));
                    if let Some(qp) = qp {
                        w.put_qp(qp);
                    }
                    w.put(n);
                });
                let taken = answer.get() as usize;
                f.receives.entry(qp).or_default().extend(bufs.drain(..taken));
                taken
            }
        }
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        match self {
            Self::Local(f) => f.post_send(qp, chain),
            Self::Remote(f) => f.post(qp, chain),
        }
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        match self {
            Self::Local(f) => f.poll_cq(out, max),
            Self::Remote(f) => f.completions(out, max),
        }
    }

    fn arm(&mut self) {
        match self {
            Self::Local(f) => f.arm(),
            Self::Remote(f) => {
                f.call(|w| {
                    w.put(request_code::ARM);
                });
            }
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        match self {
            Self::Local(f) => f.wait(timeout),
            Self::Remote(f) => {
                let ms = timeout.map_or(1000, |t| t.as_millis() as u64);
                f.call(|w| {
                    w.put(request_code::WAIT).put(ms);
                });
                true
            }
        }
    }

    fn waker(&self) -> Waker {
        match self {
            Self::Local(f) => f.waker(),
            Self::Remote(_) => panic!("this process cannot wake a remote fabric"),
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Local(f) => f.descriptor(),
            Self::Remote(_) => panic!("a remote fabric has no descriptor in this process"),
        }
    }

    fn longest_wait(&self) -> Option<Duration> {
        match self {
            Self::Local(f) => f.longest_wait(),
            // The descriptor belongs to the other process, so this process cannot sleep on it.
            Self::Remote(_) => Some(Duration::ZERO),
        }
    }
}
