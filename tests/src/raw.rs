//! A peer without an engine, which can send any bytes and break any rule.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::time::{Duration, Instant};

use crate::data::data_of;
use crate::lists::Lists;
use crate::services::{ECHO, PROGRAM, VERSION};
use crate::test_fabric;
use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::fabric::software::SoftwareFabric;
use rpcrdma::fabric::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, Opcode, Posting, QpId, RemoteMemory, Source, Status,
    WorkRequest,
};
use rpcrdma::wire::optional::Operation;
use rpcrdma::wire::properties::{Builder, Properties, Property};
use rpcrdma::wire::rpc::{CallHeader, OpaqueAuth, ReplyBody, ReplyHeader};
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, Header, HeaderType, ReadSegment, Revision, Segment, Version, View, ViewBody,
    WriteChunk,
};
use rpcrdma::{Address, CreditMode};
use rpcrdma_mempool::{ArenaConfig, Class, Lent, PagePolicy, Pool, PoolConfig};

/// Maximum wait for an expected event. It bounds hangs, and is far longer than any event takes.
const TIME_LIMIT: Duration = Duration::from_secs(20);
/// Bytes of a receive.
const RECEIVE: usize = 8192;
/// Posted receives of a raw peer: few, because tests make hundreds of peers, and a device pins the memory of each.
const RECEIVES: usize = 128;
/// XID of the calls of raw clients, unless a test needs another.
pub const XID: u32 = 0x0102_0304;
/// Offset of the arguments in an RPC call with `AUTH_NONE`.
pub const ARGS_AT: u32 = 40;
/// Bytes of an RPC call header with `AUTH_NONE`.
pub const RPC_CALL: usize = ARGS_AT as usize;
/// Bytes of an RPC reply header with `AUTH_NONE`.
pub const RPC_REPLY: usize = 24;
/// Bytes of a buffer for exposed memory. Longer memory has a pool of its own.
const EXPOSED: usize = 1 << 16;

/// Initial content of memory that [`RawPeer::expose_writable`] exposes.
pub const UNTOUCHED: u8 = 0xEE;

/// A received message.
#[derive(Clone, Debug)]
pub struct Message {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Key that the message invalidated.
    pub invalidated: Option<u32>,
    revision: Revision,
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view().fmt(f)
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Message {
    /// The header.
    #[track_caller]
    pub fn view(&self) -> View<'_> {
        View::check(&self.bytes, self.revision).expect("a header")
    }

    /// XID of the header.
    pub fn xid(&self) -> u32 {
        self.view().xid()
    }

    /// Version of the header.
    pub fn version(&self) -> Version {
        self.view().version()
    }

    /// Credit word of the header.
    pub fn credit(&self) -> u32 {
        self.view().credit()
    }

    /// Type of the header.
    pub fn htype(&self) -> HeaderType {
        self.view().htype()
    }

    /// Flags of the header.
    pub fn flags(&self) -> Flags {
        self.view().flags()
    }

    /// Count of received messages, if the header has it.
    pub fn received(&self) -> Option<u32> {
        self.view().received()
    }

    /// The handle that the receiver may invalidate.
    pub fn inv_handle(&self) -> u32 {
        self.view().inv_handle()
    }

    /// Whether the header has chunks.
    pub fn has_chunks(&self) -> bool {
        self.view().has_chunks()
    }

    /// The body, by the type of the header.
    pub fn body(&self) -> ViewBody<'_> {
        self.view().body()
    }

    /// The RPC message, or a part of it.
    pub fn payload(&self) -> &[u8] {
        self.view().payload()
    }

    /// Whether other parts of the message follow.
    pub fn more(&self) -> bool {
        self.flags().contains(Flags::MORE)
    }

    /// The Read list.
    pub fn reads(&self) -> impl Iterator<Item = ReadSegment> + use<'_> {
        self.view().reads()
    }

    /// The Write list.
    pub fn writes(&self) -> impl Iterator<Item = WriteChunk<'_>> + use<'_> {
        self.view().writes()
    }

    /// Segments of each Write chunk.
    pub fn write_chunks(&self) -> Vec<Vec<Segment>> {
        self.writes().map(|chunk| chunk.segments().collect()).collect()
    }

    /// The Reply chunk.
    pub fn reply_chunk(&self) -> Option<WriteChunk<'_>> {
        self.view().reply_chunk()
    }

    /// Whether this is ERR_CHUNK with this XID, and grants a credit.
    pub fn is_err_chunk(&self, xid: u32) -> bool {
        // XID, version, credits, ERROR, ERR_CHUNK.
        let words = be(&[xid, 1, self.credit(), 4, 2]);
        self.bytes == words && self.credit() != 0
    }

    /// XID and error; panics for any other message.
    #[track_caller]
    pub fn error(&self) -> (u32, ErrorBody) {
        match self.view().body() {
            ViewBody::Error(error) => (self.xid(), error),
            _ => panic!("expected an error: {}", self.view()),
        }
    }

    /// Body of an RPC reply.
    #[track_caller]
    pub fn reply_body(&self) -> ReplyBody<'_> {
        ReplyHeader::parse(self.payload()).expect("an RPC reply").0.body
    }

    /// Properties of a CONNPROP.
    #[track_caller]
    pub fn properties(&self) -> Properties<'_> {
        let ViewBody::Connprop(set) = self.view().body() else { panic!("expected CONNPROP: {}", self.view()) };
        Properties::from_set(&set, self.revision).expect("properties")
    }
}

/// An end of a connection that the test drives.
pub struct RawPeer<F: Fabric = AnyFabric> {
    fabric: F,
    /// Memory for messages.
    messages: Pool,
    /// Memory for data and for exposed chunks.
    exposed: Pool,
    qp: QpId,
    inbox: VecDeque<Message>,
    /// Number of received messages, grants included, for windowed headers.
    pub received: u32,
    /// Failed completions.
    pub failures: Vec<(Opcode, Status)>,
    /// Number of completed signaled work requests.
    pub completed: usize,
    /// Number of posted signaled work requests.
    signaled: usize,
    /// Whether this end posts no receives.
    without_receives: bool,
    established: bool,
    /// Cause of the end, if the connection has ended.
    end_reason: Option<String>,
    /// Protocol version of its headers.
    pub version: Version,
    /// Number of messages that the other side may have outstanding.
    ///
    /// It is the credit word of version 1 and of windowed headers, and its high half with increments.
    pub credit: u32,
    /// Number of messages that increments have granted to the other side so far. A client's first message needs no
    /// grant.
    granted_total: u32,
    /// Whether headers are windowed, with the count of received messages.
    pub windowed: bool,
    /// Revision that determines the code points of its headers.
    pub revision: Revision,
    /// Properties of its CONNPROP.
    pub offers: Properties<'static>,
    /// Private data of the other side's connect message.
    pub private_data: Vec<u8>,
}

fn pool(size: usize, count: usize) -> Pool {
    let arena =
        ArenaConfig { bytes: 0, name: "raw-peer", pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
    Pool::new(&PoolConfig { classes: vec![Class { size, count }], arena }).expect("memory")
}

/// Registers memory with a device, for messages and for data that the other side accesses.
fn register_memory<F: Fabric>(mut fabric: F) -> (F, Pool, Pool) {
    let (messages, exposed) = (pool(RECEIVE, 4 * RECEIVES), pool(EXPOSED, 32));
    fabric.register(messages.arena(), Access::LOCAL).expect("registered memory");
    fabric.register(exposed.arena(), Access::REMOTE).expect("registered memory");
    (fabric, messages, exposed)
}

fn params(private_data: &[u8]) -> ConnectParams {
    ConnectParams {
        private_data: private_data.to_vec(),
        send_queue_depth: 4096,
        rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY,
        ..ConnectParams::default()
    }
}

fn post_receives(fabric: &mut impl Fabric, messages: &Pool, count: usize) {
    let mut bufs: Vec<_> = (0..count).map_while(|_| messages.alloc(RECEIVE)).collect();
    fabric.post_recv(None, &mut bufs);
}

impl RawPeer {
    /// Connects as a client that offers windowed credits; panics if the server refuses.
    pub fn connect(address: &Address) -> Self {
        let mut peer = Self::connect_silently(address);
        peer.exchange_properties();
        peer
    }

    /// Connects as a client of this version; panics if the server refuses.
    pub fn connect_as(address: &Address, version: Version) -> Self {
        let mut peer = Self::connect_silently(address);
        peer.version = version;
        if version == Version::V2 {
            peer.exchange_properties();
        }
        peer
    }

    /// Connects as a client with this credit mode; panics if the server refuses.
    pub fn connect_in(address: &Address, mode: CreditMode) -> Self {
        Self::connect_with(address, mode, Revision::Ietf00)
    }

    /// Connects as a client with this credit mode and these code points; panics if the server refuses.
    pub fn connect_with(address: &Address, mode: CreditMode, revision: Revision) -> Self {
        let mut peer = Self::connect_silently(address);
        peer.revision = revision;
        match mode {
            CreditMode::V1 => peer.version = Version::V1,
            _ => drop(peer.exchange_properties()),
        }
        assert_eq!(peer.windowed, mode == CreditMode::V2Windowed);
        peer
    }

    /// Connects as a client of version 2 that offers changed properties; panics if the server refuses.
    pub fn connect_offering(address: &Address, change: impl FnOnce(&mut Properties<'static>)) -> Self {
        let mut peer = Self::connect_silently(address);
        change(&mut peer.offers);
        peer.exchange_properties();
        peer
    }

    /// Connects as a client of version 1 with private data; panics if the server refuses.
    pub fn connect_with_private_data(address: &Address, private_data: &[u8]) -> Self {
        let mut peer = Self::try_connect(address, private_data).expect("a connection");
        peer.version = Version::V1;
        peer
    }

    /// Connects as a client without sending a message; panics if the server refuses.
    pub fn connect_silently(address: &Address) -> Self {
        Self::try_connect(address, b"").expect("a connection")
    }

    /// Connects as a client, with private data.
    ///
    /// # Errors
    /// Cause of the refusal.
    pub fn try_connect(address: &Address, private_data: &[u8]) -> Result<Self, String> {
        let mut peer = Self::begin(address, private_data)?;
        peer.establish()?;
        Ok(peer)
    }

    /// Starts to connect as a client, and returns immediately.
    ///
    /// The caller takes [turns](Self::turn) until the connection [is up](Self::is_up) or [over](Self::is_over).
    ///
    /// # Errors
    /// Cause of the failure.
    pub fn begin(address: &Address, private_data: &[u8]) -> Result<Self, String> {
        Self::begin_on(test_fabric::open(address), address, private_data)
    }

    /// Connects as a client that posts no receives; panics if the server refuses.
    ///
    /// The server then retries its Sends without limit.
    pub fn connect_without_receives(address: &Address) -> Self {
        let (mut fabric, messages, exposed) = register_memory(test_fabric::open(address));
        let qp = fabric.connect(address.fabric_address(), &params(b"")).expect("a connect request");
        let mut peer = Self { without_receives: true, ..Self::bare(fabric, messages, exposed, qp, 0) };
        peer.establish().expect("a connection");
        peer
    }
}

impl<F: Fabric> RawPeer<F> {
    /// Starts to connect as a client on an open device, and returns immediately.
    ///
    /// # Errors
    /// Cause of the failure.
    pub fn begin_on(fabric: F, address: &Address, private_data: &[u8]) -> Result<Self, String> {
        let (mut fabric, messages, exposed) = register_memory(fabric);
        post_receives(&mut fabric, &messages, RECEIVES);
        let qp = fabric.connect(address.fabric_address(), &params(private_data)).map_err(|e| e.to_string())?;
        Ok(Self::bare(fabric, messages, exposed, qp, 0))
    }

    /// A peer that has neither sent nor received a message.
    fn bare(fabric: F, messages: Pool, exposed: Pool, qp: QpId, granted_total: u32) -> Self {
        Self {
            fabric,
            messages,
            exposed,
            qp,
            inbox: VecDeque::new(),
            received: 0,
            failures: Vec::new(),
            completed: 0,
            signaled: 0,
            without_receives: false,
            established: false,
            end_reason: None,
            version: Version::V2,
            credit: 64,
            granted_total,
            windowed: false,
            revision: Revision::Ietf00,
            offers: Properties { receive_size: RECEIVE as u32, windowed_credits: true, ..Properties::default() },
            private_data: Vec::new(),
        }
    }

    /// Sends a CONNPROP, and applies the server's. Returns the server's.
    pub fn exchange_properties(&mut self) -> Message {
        self.send_properties();
        let answer = self.receive().expect("the server's properties");
        self.apply_properties(&answer.bytes);
        answer
    }

    /// Answers a client's CONNPROP, and applies it. Returns the client's.
    pub fn answer_properties(&mut self) -> Message {
        let connprop = self.receive().expect("the client's properties");
        self.send_properties();
        self.apply_properties(&connprop.bytes);
        connprop
    }

    /// Sends a CONNPROP with the properties that this side [offers](Self::offers).
    pub fn send_properties(&mut self) {
        let mut buffer = [0; 256];
        let set = self.offers.emit(&mut buffer, self.revision).expect("space");
        let message = self.message(7, Flags::NONE, Body::Connprop(set), &[]);
        self.send(&message);
    }

    /// Encodes a CONNPROP with these properties and with XID [`XID`].
    pub fn connprop(&self, flags: Flags, properties: &[(u32, &[u8])]) -> Vec<u8> {
        let mut buffer = [0; 1024];
        let mut set = Builder::new(&mut buffer);
        for &(which, data) in properties {
            set = set.property(Property { which, data }).expect("space");
        }
        self.message(XID, flags, Body::Connprop(set.finish()), b"")
    }

    /// The credit mode of the connection.
    pub fn credit_mode(&self) -> CreditMode {
        match (self.version, self.windowed) {
            (Version::V1, _) => CreditMode::V1,
            (Version::V2, false) => CreditMode::V2Incremental,
            (Version::V2, true) => CreditMode::V2Windowed,
        }
    }

    /// Applies the other side's CONNPROP.
    pub fn apply_properties(&mut self, message: &[u8]) {
        let view = View::check(message, self.revision).expect("a header");
        let ViewBody::Connprop(set) = view.body() else { panic!("expected CONNPROP: {view}") };
        let properties = Properties::from_set(&set, self.revision).expect("properties");
        self.windowed = properties.windowed_credits && self.offers.windowed_credits;
    }

    /// Posts receives, unless this end posts none.
    fn refill(&mut self, count: usize) {
        if !self.without_receives {
            post_receives(&mut self.fabric, &self.messages, count);
        }
    }

    /// Waits until the connection is established. Returns the cause if it ends before.
    fn establish(&mut self) -> Result<(), String> {
        let start = Instant::now();
        while !self.established {
            self.turn();
            if let Some(reason) = &self.end_reason {
                return Err(reason.clone());
            }
            if start.elapsed() > TIME_LIMIT {
                return Err("no answer within the time limit".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Processes completions and control events.
    pub fn turn(&mut self) {
        self.poll_completions(64);
        self.poll_control();
    }

    /// Processes up to `max` completions; returns their number.
    pub fn poll_completions(&mut self, max: usize) -> usize {
        let mut completions = Vec::new();
        let count = self.fabric.poll_cq(&mut completions, max);
        for completion in completions {
            self.complete(completion);
        }
        count
    }

    /// Processes control events.
    pub fn poll_control(&mut self) {
        let mut events = Vec::new();
        self.fabric.poll_control(&mut events);
        for event in events {
            let reason = match event {
                ControlEvent::Established { private_data, .. } => {
                    self.established = true;
                    if self.private_data.is_empty() {
                        self.private_data = private_data;
                    }
                    continue;
                }
                ControlEvent::ConnectRequest { .. } | ControlEvent::Device(_) => continue,
                ControlEvent::Rejected { private_data, .. } => String::from_utf8_lossy(&private_data).into_owned(),
                ControlEvent::ConnectFailed { error, .. } => error.to_string(),
                ControlEvent::Disconnected { reason, .. } => reason,
            };
            self.end_reason.get_or_insert(reason);
        }
    }

    /// Whether the connection has been established.
    pub fn is_up(&self) -> bool {
        self.established
    }

    /// The next received message, if there is one.
    pub fn take_message(&mut self) -> Option<Message> {
        self.inbox.pop_front()
    }

    fn complete(&mut self, completion: Completion) {
        let Completion { opcode, status, buf, invalidated, .. } = completion;
        if !status.is_ok() {
            self.failures.push((opcode, status));
            return;
        }
        match buf {
            Some(buf) => {
                self.received = self.received.wrapping_add(1);
                self.inbox.push_back(Message { bytes: buf.to_vec(), invalidated, revision: self.revision });
                drop(buf);
                self.refill(1);
            }
            None => self.completed += 1,
        }
    }

    /// Waits for the next message; `None` once the connection is closed.
    pub fn receive(&mut self) -> Option<Message> {
        let start = Instant::now();
        loop {
            if let Some(message) = self.inbox.pop_front() {
                return Some(message);
            }
            if self.end_reason.is_some() {
                return None;
            }
            assert!(start.elapsed() < TIME_LIMIT, "expected a message or the end of the connection");
            self.turn();
            std::thread::yield_now();
        }
    }

    /// Waits until the connection ends, and drops received messages. Returns the cause of the end.
    pub fn wait_until_over(&mut self) -> String {
        while self.receive().is_some() {}
        self.end_reason.clone().unwrap_or_default()
    }

    /// Waits until the connection ends or a work request fails.
    pub fn wait_until_over_or_failed(&mut self) {
        let start = Instant::now();
        while !self.is_over() && self.failures.is_empty() {
            assert!(start.elapsed() < TIME_LIMIT, "expected a failed work request or the end of the connection");
            self.turn();
        }
    }

    /// Whether the connection has ended.
    pub fn is_over(&self) -> bool {
        self.end_reason.is_some()
    }

    /// Sends one message.
    pub fn send(&mut self, bytes: &[u8]) {
        self.send_invalidating(bytes, None);
    }

    /// Sends one message, and invalidates a key if there is one.
    pub fn send_invalidating(&mut self, bytes: &[u8], invalidate: Option<u32>) {
        let mut buf = self.messages.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        if let (false, Some(increment)) = (self.windowed, granted_increment(bytes)) {
            self.granted_total = self.granted_total.wrapping_add(increment);
        }
        self.post(false, WorkRequest::Send { buf, invalidate, fence: false });
    }

    /// Writes bytes into the other side's memory.
    pub fn write(&mut self, bytes: &[u8], remote: RemoteMemory) {
        let mut buf = self.exposed.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        let src = Source::Lent(buf.lend().expect("a buffer of this thread"));
        self.post(true, WorkRequest::Write { src, offset: 0, len: bytes.len(), remote });
    }

    /// Sends bytes with immediate data; false if the fabric lacks the operation.
    pub fn send_immediate(&mut self, bytes: &[u8]) -> bool {
        let mut buf = self.messages.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        self.fabric.post_immediate(self.qp, Posting { wr_id: 0, signaled: true, wr }, 1)
    }

    /// Writes bytes into the other side's memory with immediate data; false if the fabric lacks the operation.
    ///
    /// A write of no bytes needs no valid key.
    pub fn write_immediate(&mut self, bytes: &[u8], remote: RemoteMemory) -> bool {
        let mut buf = self.exposed.alloc(bytes.len().max(1)).expect("a buffer");
        buf[..bytes.len()].copy_from_slice(bytes);
        let src = Source::Lent(buf.lend().expect("a buffer of this thread"));
        let wr = WorkRequest::Write { src, offset: 0, len: bytes.len(), remote };
        self.fabric.post_immediate(self.qp, Posting { wr_id: 0, signaled: true, wr }, 1)
    }

    /// Reads the other side's memory; `None` after a failure.
    pub fn read(&mut self, remote: RemoteMemory, len: usize) -> Option<Vec<u8>> {
        let dst = self.exposed.alloc(len)?.lend().ok()?;
        let start = Instant::now();
        self.post(true, WorkRequest::Read { dst: dst.clone(), offset: 0, len, remote });
        // The Read is the latest signaled request, so it has completed once all have.
        while self.completed < self.signaled && self.failures.is_empty() && !self.is_over() {
            assert!(start.elapsed() < TIME_LIMIT, "expected a completion or failure of the Read");
            self.turn();
        }
        let mut bytes = vec![0; len];
        (self.completed == self.signaled && dst.read_at(0, &mut bytes)).then_some(bytes)
    }

    /// Posts a work request.
    fn post(&mut self, signaled: bool, wr: WorkRequest) {
        self.signaled += usize::from(signaled);
        let mut chain = vec![Posting { wr_id: 0, signaled, wr }];
        // A closed connection rejects the request, which tests detect by the end of the connection.
        let _ = self.fabric.post_send(self.qp, &mut chain);
    }

    /// Exposes memory with this content. Returns its segment and the memory.
    pub fn expose(&mut self, bytes: &[u8], access: Access) -> (Segment, Lent) {
        let own_pool = (bytes.len() > EXPOSED).then(|| pool(bytes.len(), 1));
        if let Some(pool) = &own_pool {
            self.fabric.register(pool.arena(), Access::REMOTE).expect("registered memory");
        }
        let mut buf = own_pool.as_ref().unwrap_or(&self.exposed).alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        let mem = buf.lend().expect("a buffer of this thread");
        let window = self.fabric.alloc_window(self.qp).expect("a window");
        let (handle, offset) = (self.fabric.next_rkey(window), self.fabric.remote_address(&mem, 0));
        self.post(false, WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len: bytes.len(), access });
        (Segment { handle, length: bytes.len() as u32, offset }, mem)
    }

    /// Current credit word of a correct peer, in version 2 with increments.
    ///
    /// The low half is the increment, and the high half the limit of outstanding messages. An error grants nothing.
    pub fn increment(&self, error: bool) -> u32 {
        let unused = self.granted_total.wrapping_sub(self.received) as i32;
        let increment = if error { 0 } else { (self.credit as i32 - unused).clamp(0, 0xFFFF) };
        let limit = (unused + increment).max(self.credit as i32) as u32;
        limit << 16 | increment as u32
    }

    /// Encodes header and payload, with the current credits of a correct peer.
    pub fn message(&self, xid: u32, flags: Flags, body: Body<'_>, payload: &[u8]) -> Vec<u8> {
        let received = self.windowed.then_some(self.received);
        let credit = match (self.version, received) {
            (Version::V2, None) => self.increment(matches!(body, Body::Error(_))),
            _ => self.credit,
        };
        let header = Header { xid, credit, received, flags, body };
        let mut bytes = vec![0; header.encoded_len(self.version, self.revision)];
        header.emit(&mut bytes, self.version, self.revision).expect("space for the header");
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Sends a message with this body and the current credits.
    pub fn send_body(&mut self, xid: u32, flags: Flags, body: Body<'_>, payload: &[u8]) {
        let bytes = self.message(xid, flags, body, payload);
        self.send(&bytes);
    }

    /// Sends an RPC message in a MSG without flags.
    pub fn send_msg<'a>(&mut self, xid: u32, chunks: impl Into<Chunks<'a>>, payload: &[u8]) {
        self.send_body(xid, Flags::NONE, Body::Msg(chunks.into()), payload);
    }

    /// Sends a NOMSG with these chunks.
    pub fn send_nomsg<'a>(&mut self, xid: u32, chunks: impl Into<Chunks<'a>>) {
        self.send_body(xid, Flags::NONE, Body::Nomsg(chunks.into()), b"");
    }

    /// Sends an RPC message in a Position Zero Read chunk, with XID [`XID`]. Returns the memory of the chunk.
    #[must_use]
    pub fn send_long_message(&mut self, message: &[u8]) -> Lent {
        let (segment, memory) = self.expose(message, Access::REMOTE_READ);
        self.send_nomsg(XID, &Lists::new().read(0, [segment]));
        memory
    }

    /// Sends a part of an RPC message without chunks.
    pub fn send_part(&mut self, xid: u32, flags: Flags, payload: &[u8]) {
        self.send_body(xid, flags, Body::Msg(Chunks::NONE), payload);
    }

    /// Sends an operation on characteristics.
    pub fn operation(&mut self, xid: u32, operation: Operation<'_>) {
        let mut optinfo = vec![0; operation.encoded_len()];
        operation.emit(&mut optinfo).expect("space for the operation");
        let body = Body::Optional { opttype: operation.code().code(), optinfo: &optinfo };
        self.send_body(xid, Flags::NONE, body, b"");
    }

    /// Sends a pure grant.
    pub fn grant(&mut self) {
        self.send_body(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
    }

    /// Sends a call of the standard program, with XID [`XID`].
    pub fn call<'a>(&mut self, procedure: u32, chunks: impl Into<Chunks<'a>>, args: &[u8]) {
        self.call_as(XID, procedure, chunks, args);
    }

    /// Sends a call of the standard program.
    pub fn call_as<'a>(&mut self, xid: u32, procedure: u32, chunks: impl Into<Chunks<'a>>, args: &[u8]) {
        self.send_msg(xid, chunks, &call_bytes(xid, PROGRAM, VERSION, procedure, args));
    }

    /// Sends a call with XID [`XID`], and waits for its answer.
    pub fn call_and_receive<'a>(&mut self, procedure: u32, chunks: impl Into<Chunks<'a>>, args: &[u8]) -> Message {
        self.call(procedure, chunks, args);
        self.answer()
    }

    /// Waits for the next message other than a grant; `None` once the connection is closed.
    pub fn next_message(&mut self) -> Option<Message> {
        loop {
            let message = self.receive()?;
            if message.xid() != 0 {
                return Some(message);
            }
        }
    }

    /// Waits for the next message other than grants and properties.
    #[track_caller]
    pub fn answer(&mut self) -> Message {
        loop {
            let message = self.receive().expect("an answer before the end of the connection");
            let is_grant = message.htype() == HeaderType::Nomsg && message.xid() == 0;
            if !is_grant && message.htype() != HeaderType::Connprop {
                return message;
            }
        }
    }

    /// Waits for an answer in one part or several. Returns the RPC message, and the parts.
    ///
    /// Checks that no other message arrives between the parts, and that each part but the last has whole words and no
    /// chunks.
    #[track_caller]
    pub fn whole_answer(&mut self) -> (Vec<u8>, Vec<Message>) {
        let mut parts = vec![self.answer()];
        while parts[parts.len() - 1].more() {
            let part = self.answer();
            assert_eq!(
                (part.xid(), part.htype()),
                (parts[0].xid(), parts[0].htype()),
                "XID and type of all parts must be equal"
            );
            parts.push(part);
        }
        for part in &parts[..parts.len() - 1] {
            assert!(!part.has_chunks() && part.payload().len().is_multiple_of(4));
        }
        (parts.iter().flat_map(|part| part.payload().to_vec()).collect(), parts)
    }

    /// Waits for an error. Returns its XID and the error.
    #[track_caller]
    pub fn error(&mut self) -> (u32, ErrorBody) {
        self.answer().error()
    }

    /// Waits for BAD_XDR, or for ERR_CHUNK in version 1.
    #[track_caller]
    pub fn expect_bad_xdr(&mut self, what: &str) {
        self.expect_error(ErrorBody::BadXdr, what);
    }

    /// Waits for this error, or for ERR_CHUNK in version 1.
    #[track_caller]
    pub fn expect_error(&mut self, error: ErrorBody, what: &str) {
        match self.version {
            Version::V1 => self.expect_err_chunk(what),
            Version::V2 => assert_eq!(self.error(), (XID, error), "{what}"),
        }
    }

    /// Waits for ERR_CHUNK, the only error of version 1 to a call.
    #[track_caller]
    pub fn expect_err_chunk(&mut self, what: &str) {
        let answer = self.answer();
        assert!(answer.is_err_chunk(XID), "{what}: {answer}");
    }

    /// Checks that the connection is alive, by an echo.
    ///
    /// The next message must be the reply.
    #[track_caller]
    pub fn ping(&mut self) {
        self.call_as(7, ECHO, Chunks::NONE, b"ping");
        let answer = self.answer();
        assert_eq!((answer.xid(), answer.payload()), (7, &reply_bytes(7, b"ping")[..]));
    }

    /// As a server, negotiates with a client of this credit mode.
    pub fn answer_properties_in(&mut self, mode: CreditMode) {
        match mode {
            CreditMode::V1 => self.version = Version::V1,
            _ => drop(self.answer_properties()),
        }
    }

    /// Waits for the next call.
    #[track_caller]
    pub fn next_call(&mut self) -> Message {
        self.next_message().expect("a call")
    }

    /// Takes `count` messages other than pure grants, and checks that no more arrive.
    #[track_caller]
    pub fn expect_only(&mut self, count: usize) -> Vec<Message> {
        let messages: Vec<_> = (0..count).map(|_| self.next_call()).collect();
        let further = self.poll_for_messages();
        assert!(further.is_empty(), "expected {count} messages, but there is also {}", further[0]);
        messages
    }

    /// Answers a call with these results.
    pub fn reply(&mut self, xid: u32, results: &[u8]) {
        self.reply_with(xid, Chunks::NONE, &reply_bytes(xid, results), None);
    }

    /// Answers a call with any chunks and payload.
    ///
    /// Also invalidates a key if there is one.
    pub fn reply_with<'a>(&mut self, xid: u32, chunks: impl Into<Chunks<'a>>, payload: &[u8], invalidate: Option<u32>) {
        let bytes = self.message(xid, Flags::RESPONSE, Body::Msg(chunks.into()), payload);
        self.send_invalidating(&bytes, invalidate);
    }

    /// Answers a call with an error.
    pub fn refuse(&mut self, xid: u32, error: ErrorBody) {
        self.send_body(xid, Flags::RESPONSE, Body::Error(error), b"");
    }

    /// Answers each call with the results `fine` until the client disconnects.
    pub fn answer_all_calls(&mut self) {
        while let Some(call) = self.next_message() {
            self.reply(call.xid(), b"fine");
        }
    }

    /// Takes 300 turns. Returns the messages that have arrived, without grants.
    pub fn poll_for_messages(&mut self) -> Vec<Message> {
        for _ in 0..300 {
            self.turn();
            std::thread::yield_now();
        }
        self.inbox.drain(..).filter(|message| message.xid() != 0).collect()
    }

    /// Reads a whole segment of the other side; `None` after a failure.
    pub fn fetch(&mut self, segment: Segment) -> Option<Vec<u8>> {
        self.read(remote(segment), segment.length as usize)
    }

    /// Exposes memory with a pattern, which the other side may read.
    pub fn expose_readable(&mut self, seed: u32, len: usize) -> (Segment, Lent) {
        self.expose(&data_of(seed, len), Access::REMOTE_READ)
    }

    /// Exposes memory filled with [`UNTOUCHED`], which the other side may write.
    pub fn expose_writable(&mut self, len: usize) -> (Segment, Lent) {
        self.expose(&vec![UNTOUCHED; len], Access::REMOTE_WRITE)
    }

    /// Drops the connection without a disconnect, like a process that exits.
    pub fn vanish(self) {}

    /// Whether its device checks window bounds.
    pub fn checks_window_bounds(&self) -> bool {
        self.fabric.capabilities().checks_window_bounds
    }

    /// Disconnects.
    pub fn disconnect(mut self) {
        self.fabric.disconnect(self.qp);
    }
}

impl RawPeer<SoftwareFabric> {
    /// Announces a message of any length, but does not write its bytes.
    pub fn announce(&mut self, len: u32) {
        self.fabric.announce(self.qp, len);
    }
}

/// A listener that accepts connections as raw peers.
pub struct RawListener<F: Fabric = AnyFabric> {
    fabric: F,
    messages: Pool,
    exposed: Pool,
    address: Address,
    listener: F::Listener,
    /// Private data of its accept message.
    pub private_data: Vec<u8>,
    /// Code points of the headers of its peers.
    pub revision: Revision,
}

impl RawListener {
    /// Listens at `address`.
    pub fn bind(address: &Address) -> Self {
        Self::bind_on(test_fabric::open(address), address, address.bind().expect("a free address"))
    }

    /// Accepts the next connection, in this credit mode, and continues to listen.
    pub fn accept_in(&mut self, mode: CreditMode) -> RawPeer {
        let mut peer = self.accept_next();
        peer.answer_properties_in(mode);
        peer
    }

    /// Accepts the next connection, and continues to listen.
    pub fn accept_next(&mut self) -> RawPeer {
        let start = Instant::now();
        loop {
            if let Some((qp, private_data)) = self.take_request() {
                self.fabric.unlisten();
                // The peer keeps the device of its connection, so the listener continues with a new one.
                let (mut fabric, messages, exposed) = register_memory(test_fabric::open(&self.address));
                fabric.listen(&self.listener).expect("listening");
                let fabric = std::mem::replace(&mut self.fabric, fabric);
                let messages = std::mem::replace(&mut self.messages, messages);
                let exposed = std::mem::replace(&mut self.exposed, exposed);
                let mut peer = RawPeer::bare(fabric, messages, exposed, qp, 1);
                (peer.private_data, peer.revision) = (private_data, self.revision);
                peer.establish().expect("an established connection");
                return peer;
            }
            assert!(start.elapsed() < TIME_LIMIT, "no connect request arrived within the time limit");
            std::thread::yield_now();
        }
    }
}

impl<F: Fabric> RawListener<F> {
    /// Listens with an open device at a bound address.
    pub fn bind_on(fabric: F, address: &Address, listener: F::Listener) -> Self {
        let (mut fabric, messages, exposed) = register_memory(fabric);
        fabric.listen(&listener).expect("listening");
        let address = address.clone();
        Self { fabric, messages, exposed, address, listener, private_data: Vec::new(), revision: Revision::Ietf00 }
    }

    /// Accepts one connection, exchanges properties, and stops listening.
    pub fn accept(self) -> RawPeer<F> {
        let mut peer = self.accept_silently();
        peer.answer_properties();
        peer
    }

    /// Accepts one connection, and stops listening.
    pub fn accept_silently(self) -> RawPeer<F> {
        let start = Instant::now();
        let mut listener = Box::new(self);
        loop {
            match listener.try_accept() {
                Ok(mut peer) => {
                    peer.establish().expect("an established connection");
                    return peer;
                }
                Err(unchanged) => listener = unchanged,
            }
            assert!(start.elapsed() < TIME_LIMIT, "no connect request arrived within the time limit");
            std::thread::yield_now();
        }
    }

    /// Accepts the first pending connection, and returns before it is established.
    ///
    /// # Errors
    /// The listener, if no request is pending.
    pub fn try_accept(mut self: Box<Self>) -> Result<RawPeer<F>, Box<Self>> {
        match self.take_request() {
            Some((qp, private_data)) => {
                let mut peer = RawPeer::bare(self.fabric, self.messages, self.exposed, qp, 1);
                (peer.private_data, peer.revision) = (private_data, self.revision);
                Ok(peer)
            }
            None => Err(self),
        }
    }

    /// Accepts a pending request. Returns the queue pair, and the private data of the request.
    fn take_request(&mut self) -> Option<(QpId, Vec<u8>)> {
        let mut events = Vec::new();
        self.fabric.poll_control(&mut events);
        events.into_iter().find_map(|event| match event {
            ControlEvent::ConnectRequest { request, private_data, .. } => {
                // Posts receives first, because the client may send as soon as the request is accepted.
                post_receives(&mut self.fabric, &self.messages, RECEIVES);
                let qp = self.fabric.accept(request, &params(&self.private_data)).ok()?;
                Some((qp, private_data))
            }
            _ => None,
        })
    }
}

/// Number of messages that the header of `message` grants, if it has an increment.
fn granted_increment(message: &[u8]) -> Option<u32> {
    let word = |at: usize| message.get(at..at + 4).map(|word| u32::from_be_bytes(word.try_into().expect("a word")));
    let grants = word(4) == Some(Version::V2.code()) && word(12).is_some_and(|htype| htype != HeaderType::Error.code());
    word(8).filter(|_| grants).map(|credit| credit & 0xFFFF)
}

/// Encodes an RPC call.
pub fn call_bytes(xid: u32, program: u32, version: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
    call_bytes_as(OpaqueAuth::NONE, xid, program, version, procedure, args)
}

/// Encodes an RPC call with a credential.
pub fn call_bytes_as(
    credential: OpaqueAuth<'_>,
    xid: u32,
    program: u32,
    version: u32,
    procedure: u32,
    args: &[u8],
) -> Vec<u8> {
    let header = CallHeader { xid, program, version, procedure, credential, verifier: OpaqueAuth::NONE };
    let mut bytes = vec![0; header.encoded_len()];
    header.emit(&mut bytes).expect("space for the header");
    bytes.extend_from_slice(args);
    bytes
}

/// Encodes a successful RPC reply.
pub fn reply_bytes(xid: u32, results: &[u8]) -> Vec<u8> {
    let header = ReplyHeader { xid, body: ReplyBody::SUCCESS };
    let mut bytes = vec![0; header.encoded_len()];
    header.emit(&mut bytes).expect("space for the header");
    bytes.extend_from_slice(results);
    bytes
}

/// Encodes words in network byte order.
pub fn be(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Returns `bytes` with another word at an offset.
pub fn with_word(bytes: &[u8], at: usize, word: u32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
    bytes
}

/// The start of a segment.
pub fn remote(segment: Segment) -> RemoteMemory {
    RemoteMemory { rkey: segment.handle, address: segment.offset }
}

/// The first bytes of exposed memory.
pub fn contents(memory: &Lent, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert!(memory.read_at(0, &mut bytes), "the memory must have {len} bytes");
    bytes
}
