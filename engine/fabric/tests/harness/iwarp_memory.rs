//! An iWARP fabric without sockets, for tests. Byte queues join two endpoints within one thread.
//!
//! All random choices follow from a seed, and there is no clock, so the same calls produce the same events. A poll of a
//! connection moves a random number of bytes, so its streams are cut anywhere. There are no time limits, so the fabric
//! waits forever for the rest of a message, for a peer that receives nothing, and for a missing answer.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use super::rdmap_stream::{Arenas, InputStatus, RdmapStream, SharedResources, StreamFailure};
use super::setup::{self, Negotiated, RequestedParameters};
use super::wire::MpaFrame;
use super::{IwarpFabricConfig, capabilities};
use crate::accept_balancer::{AcceptBalancer, Accepted, BalancerMember, ConnectionCount};
use crate::error::failed;
use crate::qp_table::QpTable;
use crate::receives::ReceiveQueue;
use crate::testing::random::Xorshift;
use crate::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
};

/// Capacity of a byte queue. A full queue blocks the sender.
const QUEUE_BYTES: usize = 64 << 10;
/// Polls for which messages of a closed peer wait for a Receive. Over TCP this is the time limit `linger`.
const LINGER: u32 = 4096;
/// The assumed TCP segment size.
const SEGMENT: usize = 1460;

thread_local! {
    /// Bound addresses of this thread.
    static BOUND: RefCell<BTreeMap<String, BoundAddress>> = const { RefCell::new(BTreeMap::new()) };
}

/// A bound address, with its connecting peers and its listeners.
#[derive(Debug, Default)]
struct BoundAddress {
    connecting: VecDeque<MemoryEndpoint>,
    balancer: Arc<AcceptBalancer<MemoryEndpoint>>,
}

/// A bound address, for fabrics of the thread that has bound it. The drop of the last clone frees the address.
#[derive(Clone, Debug)]
pub struct MemoryListener(Arc<BoundName>);

#[derive(Debug)]
struct BoundName(String);

impl Drop for BoundName {
    fn drop(&mut self) {
        // At the end of the thread, the addresses may already be dropped.
        let _ = BOUND.try_with(|bound| bound.borrow_mut().remove(&self.0));
    }
}

/// One direction of a connection: an MPA frame, then bytes.
#[derive(Debug, Default)]
struct ByteQueue {
    frame: Option<MpaFrame>,
    bytes: VecDeque<u8>,
    /// True once the sender has closed the connection, so that it neither sends nor reads anything more.
    closed: bool,
}

/// One end of a connection. Its drop closes the connection.
#[derive(Debug)]
struct MemoryEndpoint {
    outgoing: Rc<RefCell<ByteQueue>>,
    incoming: Rc<RefCell<ByteQueue>>,
    /// The name of the other end.
    peer: String,
}

impl MemoryEndpoint {
    /// Connects to an address as a peer of this name, with an MPA Request Frame.
    fn connect_queues(address: &FabricAddress, peer: &str, request: MpaFrame) -> Result<Self, FabricError> {
        let (to_peer, from_peer) = (Rc::<RefCell<ByteQueue>>::default(), Rc::<RefCell<ByteQueue>>::default());
        let other_end = Self { outgoing: Rc::clone(&from_peer), incoming: Rc::clone(&to_peer), peer: peer.to_owned() };
        let this_end = Self { outgoing: to_peer, incoming: from_peer, peer: address.0.clone() };
        this_end.send_frame(request);
        let queued =
            BOUND.with_borrow_mut(|bound| bound.get_mut(&address.0).map(|bound| bound.connecting.push_back(other_end)));
        let unreachable = || FabricError::unreachable(&address.0, "no fabric of this thread has bound it");
        queued.ok_or_else(unreachable).map(|()| this_end)
    }

    fn send_frame(&self, frame: MpaFrame) {
        self.outgoing.borrow_mut().frame = Some(frame);
    }

    fn take_frame(&self) -> Option<MpaFrame> {
        self.incoming.borrow_mut().frame.take()
    }

    fn is_peer_closed(&self) -> bool {
        self.incoming.borrow().closed
    }
}

impl Drop for MemoryEndpoint {
    fn drop(&mut self) {
        self.outgoing.borrow_mut().closed = true;
    }
}

/// One end of a connection without a protocol.
///
/// Tests use it to act as the peer.
#[derive(Debug)]
pub struct RawEndpoint(MemoryEndpoint);

impl RawEndpoint {
    /// Connects to an address of this thread with an MPA Request Frame. `peer` is the peer's name.
    ///
    /// # Errors
    /// No fabric of this thread has bound the address.
    pub fn connect(address: &FabricAddress, peer: &str, request: MpaFrame) -> Result<Self, FabricError> {
        MemoryEndpoint::connect_queues(address, peer, request).map(Self)
    }

    /// The MPA Reply Frame, once it has arrived.
    pub fn reply(&self) -> Option<MpaFrame> {
        self.0.take_frame()
    }

    /// Sends up to `max` bytes from the front of `bytes`.
    ///
    /// Bytes for which the queue has no room stay in `bytes`.
    pub fn send(&self, bytes: &mut VecDeque<u8>, max: usize) {
        let mut queue = self.0.outgoing.borrow_mut();
        let count = max.min(QUEUE_BYTES - queue.bytes.len()).min(bytes.len());
        queue.bytes.extend(bytes.drain(..count));
    }

    /// Receives up to `max` bytes.
    pub fn receive(&self, max: usize) -> Vec<u8> {
        let mut queue = self.0.incoming.borrow_mut();
        let count = max.min(queue.bytes.len());
        queue.bytes.drain(..count).collect()
    }

    /// True once the other end has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.0.is_peer_closed()
    }
}

/// A connect request that waits for an answer.
#[derive(Debug)]
struct Request {
    id: RequestId,
    frame: MpaFrame,
    end: MemoryEndpoint,
    /// Counts the connection at its listener.
    count: ConnectionCount,
}

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
struct MemoryState {
    config: IwarpFabricConfig,
    shared: SharedResources,
    ready: VecDeque<Completion>,
    events: VecDeque<ControlEvent>,
    random: Xorshift,
}

impl MemoryState {
    /// A random number of bytes to move: none, few or many.
    fn random_count(&mut self) -> usize {
        let limit = 2 << self.random.below(17);
        self.random.below(limit) as usize
    }
}

/// State of a queue pair.
#[derive(Debug)]
enum MemoryQpState {
    /// The peer has not answered yet.
    Connecting(RequestedParameters),
    Up,
    /// Closed by this side. Posted requests are still sent.
    Closing,
    /// Ended. All requests were flushed.
    Error,
}

#[derive(Debug)]
struct MemoryQp {
    id: QpId,
    rdmap: RdmapStream,
    state: MemoryQpState,
    /// The connection, until it ends.
    end: Option<MemoryEndpoint>,
    /// Number of polls in which a message of a closed peer found no Receive.
    polls_without_receive: u32,
    /// Counts an accepted connection at its listener.
    count: Option<ConnectionCount>,
}

impl MemoryQp {
    fn is_live(&self) -> bool {
        matches!(self.state, MemoryQpState::Up | MemoryQpState::Closing)
    }

    /// Starts the stream once the connection is established.
    fn begin(&mut self, common: &MemoryState, agreed: &Negotiated, is_responder: bool) {
        let max_ulpdu = setup::max_ulpdu(common.config.fpdu_size, agreed.is_same_engine, SEGMENT);
        self.rdmap.begin(agreed, is_responder, max_ulpdu, common.config.max_message);
    }

    /// Polls the connection once.
    fn poll(&mut self, common: &mut MemoryState, out: &mut Vec<Completion>, max: usize) {
        if !self.is_live() {
            return;
        }
        match self.read(common, out, max) {
            Ok(()) => self.flush(common),
            Err(failure) => self.fail(common, failure),
        }
    }

    fn read(&mut self, common: &mut MemoryState, out: &mut Vec<Completion>, max: usize) -> Result<(), StreamFailure> {
        let Some(end) = &self.end else { return Ok(()) };
        let mut queue = end.incoming.borrow_mut();
        let mut count = common.random_count().min(queue.bytes.len());
        // As over TCP, payload bytes may be read directly into their target.
        if common.random.chance(500)
            && let Some(target) = self.rdmap.direct_target()
        {
            let direct = count.min(target.len());
            target.fill(&queue.bytes.make_contiguous()[..direct]);
            queue.bytes.drain(..direct);
            self.rdmap.advance_direct(direct);
            count -= direct;
        }
        let mut input = &queue.bytes.make_contiguous()[..count];
        self.rdmap.start_turn();
        let status = self.rdmap.consume(&mut common.shared, &mut input, out, max)?;
        count -= input.len();
        queue.bytes.drain(..count);
        self.polls_without_receive += u32::from(status == InputStatus::NoReceive && queue.closed);
        let all_consumed = status == InputStatus::Consumed && queue.closed && queue.bytes.is_empty();
        if all_consumed || self.polls_without_receive > LINGER { Err(self.rdmap.peer_closed()) } else { Ok(()) }
    }

    fn flush(&mut self, common: &mut MemoryState) {
        if let Err(failure) = self.rdmap.produce() {
            return self.fail(common, failure);
        }
        self.write(common.random_count());
        self.rdmap.reap(&mut common.ready);
    }

    /// Sends up to `max` bytes, as many as the queue has room for. Sends nothing to a closed peer, whose earlier bytes
    /// are still readable.
    fn write(&mut self, max: usize) {
        let Some(end) = self.end.as_ref().filter(|end| !end.is_peer_closed()) else { return };
        let mut queue = end.outgoing.borrow_mut();
        let bytes = self.rdmap.outbound.buffer.bytes(max.min(QUEUE_BYTES - queue.bytes.len()));
        self.rdmap.outbound.buffer.advance(bytes.len());
        queue.bytes.extend(bytes);
    }

    /// Ends the connection and flushes posted requests.
    fn fail(&mut self, common: &mut MemoryState, failure: StreamFailure) {
        if matches!(self.state, MemoryQpState::Error) {
            return;
        }
        let was_live = self.is_live();
        let StreamFailure { terminate, status, cause, reason } = failure;
        if let Some(message) = terminate {
            // A Terminate can only follow complete FPDUs, so it is sent if the queue has room for all bytes before it.
            self.write(usize::MAX);
            if self.rdmap.outbound.buffer.len() == 0 {
                self.rdmap.outbound.send_terminate(&message);
                self.write(usize::MAX);
            }
        }
        self.state = MemoryQpState::Error;
        self.end = None;
        self.rdmap.flush(status, &mut common.ready);
        if was_live {
            common.events.push_back(ControlEvent::Disconnected { qp: self.id, cause, reason });
        }
    }

    /// Ends a failed connect.
    fn fail_connect(&mut self, common: &mut MemoryState, event: ControlEvent) {
        common.events.push_back(event);
        self.fail(common, StreamFailure::local("never connected"));
    }

    /// Continues the establishment or the close of the connection.
    fn manage_connection(&mut self, common: &mut MemoryState) {
        match self.state {
            MemoryQpState::Connecting(requested) => self.read_reply(common, requested),
            MemoryQpState::Closing => {
                self.flush(common);
                if !self.rdmap.outbound.is_busy() {
                    self.fail(common, StreamFailure::local("disconnected"));
                }
            }
            MemoryQpState::Up | MemoryQpState::Error => {}
        }
    }

    /// Handles the peer's reply, if it has arrived.
    fn read_reply(&mut self, common: &mut MemoryState, requested: RequestedParameters) {
        let qp = self.id;
        let Some(end) = &self.end else { return };
        let error = match end.take_frame() {
            None if !end.is_peer_closed() => return,
            None => FabricError::peer_violation("connection closed before an answer"),
            Some(frame) => {
                let private_data = setup::private_data(&frame);
                if frame.reject {
                    return self.fail_connect(common, ControlEvent::Rejected { qp, private_data });
                }
                match requested.accept_reply(&frame) {
                    Ok(agreed) => {
                        self.state = MemoryQpState::Up;
                        self.begin(common, &agreed, false);
                        if agreed.rtr {
                            self.rdmap.outbound.send_empty_write();
                            self.flush(common);
                        }
                        return common.events.push_back(ControlEvent::Established { qp, private_data });
                    }
                    Err(error) => FabricError::peer_violation(error.reason),
                }
            }
        };
        self.fail_connect(common, ControlEvent::ConnectFailed { qp, error });
    }
}

/// One shard's device without sockets.
#[derive(Debug)]
pub struct MemoryFabric {
    common: MemoryState,
    table: QpTable<MemoryQp>,
    /// Existing queue pairs.
    qps: Vec<QpId>,
    listening: Vec<(MemoryListener, BalancerMember<MemoryEndpoint>)>,
    requests: Vec<Request>,
    next_request: u64,
    capabilities: Capabilities,
    always_readable: Arc<OwnedFd>,
}

impl MemoryFabric {
    /// Opens the fabric for one shard. The seed determines all random choices.
    pub fn new(config: IwarpFabricConfig, seed: u64) -> Result<Self, FabricError> {
        config.check()?;
        // The descriptor is always readable, because the fabric must be polled without pause.
        let always_readable = rustix::event::eventfd(1, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Self {
            always_readable: Arc::new(always_readable.map_err(|e| failed("eventfd", e))?),
            capabilities: capabilities(&config),
            common: MemoryState {
                shared: SharedResources {
                    arenas: Arenas::default(),
                    receives: ReceiveQueue::new(config.shared_receives),
                    stats: FabricStats::default(),
                },
                ready: VecDeque::new(),
                events: VecDeque::new(),
                random: Xorshift::new(seed),
                config,
            },
            table: QpTable::default(),
            qps: Vec::new(),
            listening: Vec::new(),
            requests: Vec::new(),
            next_request: 0,
        })
    }

    /// Bytes of the smallest Receive in the shared queue.
    pub fn smallest_receive(&self) -> Option<usize> {
        self.common.shared.receives.iter().map(Buf::capacity).min()
    }

    fn add(&mut self, params: &ConnectParams, state: MemoryQpState, end: MemoryEndpoint) -> &mut MemoryQp {
        let random = self.common.random.next() as u32;
        let id = self.table.insert(|id| {
            let rdmap = RdmapStream::new(id, params, random);
            MemoryQp { id, rdmap, state, end: Some(end), polls_without_receive: 0, count: None }
        });
        self.qps.push(id);
        self.table.get_mut(id).expect("the queue pair was just inserted")
    }

    /// Accepts connections at the fabric's listening addresses.
    fn accept_connections(&mut self) {
        let max_handshakes = self.common.config.max_handshakes;
        let mut accepted = Vec::new();
        for (listener, member) in &self.listening {
            let connecting =
                BOUND.with_borrow_mut(|bound| bound.get_mut(&listener.0.0).map(|b| b.connecting.split_off(0)));
            accepted.extend(
                connecting.into_iter().flatten().filter_map(|endpoint| member.assign(endpoint, max_handshakes)),
            );
            accepted.extend(member.take_handed_over());
        }
        for Accepted { request: end, count } in accepted {
            let Some(frame) = end.take_frame() else { continue };
            let id = RequestId(self.next_request);
            self.next_request += 1;
            let (private_data, peer) = (setup::private_data(&frame), end.peer.clone());
            self.common.events.push_back(ControlEvent::ConnectRequest { request: id, private_data, peer });
            self.requests.push(Request { id, frame, end, count });
        }
    }

    fn request(&mut self, id: RequestId) -> Option<Request> {
        let at = self.requests.iter().position(|request| request.id == id)?;
        Some(self.requests.swap_remove(at))
    }
}

impl Fabric for MemoryFabric {
    type Listener = MemoryListener;

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn stats(&self) -> FabricStats {
        self.common.shared.stats
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        self.common.shared.arenas.add(arena.id(), access, || Ok(()))
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if self.table.iter().any(|qp| qp.rdmap.windows.bound().any(|range| range.mem.arena() == arena)) {
            return Err(FabricError::still_bound(arena));
        }
        self.common.shared.arenas.remove(arena)
    }

    fn bind(address: &FabricAddress) -> Result<MemoryListener, FabricError> {
        BOUND.with_borrow_mut(|bound| {
            let name = address.0.clone();
            if bound.contains_key(&name) {
                return Err(FabricError::in_use(&name, "by this thread"));
            }
            bound.insert(name.clone(), BoundAddress::default());
            Ok(MemoryListener(Arc::new(BoundName(name))))
        })
    }

    fn listen(&mut self, listener: &MemoryListener) -> Result<(), FabricError> {
        let balancer = BOUND.with_borrow(|bound| bound.get(&listener.0.0).map(|bound| Arc::clone(&bound.balancer)));
        let balancer = balancer.ok_or_else(|| FabricError::misuse("another thread has bound the address"))?;
        self.listening.push((listener.clone(), BalancerMember::new(&balancer, self.waker())));
        Ok(())
    }

    fn unlisten(&mut self) {
        self.listening.clear();
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.capabilities.check_params(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let end = MemoryEndpoint::connect_queues(address, "this thread", requested.request(&params.private_data))?;
        Ok(self.add(params, MemoryQpState::Connecting(requested), end).id)
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.capabilities.check_params(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let request = self.request(request).filter(|request| !request.end.is_peer_closed());
        let canceled = || FabricError::peer_violation("connect request withdrawn");
        let Request { frame, end, count, .. } = request.ok_or_else(canceled)?;
        let (reply, agreed) = requested.reply_to(&frame, &params.private_data).map_err(|why| {
            end.send_frame(requested.rejection(&frame, &[]));
            self.common.shared.stats.requests_refused += 1;
            FabricError::peer_violation(why)
        })?;
        end.send_frame(reply);
        let id = self.add(params, MemoryQpState::Up, end).id;
        let qp = self.table.require_mut(id)?;
        qp.count = Some(count);
        qp.begin(&self.common, &agreed, true);
        self.common.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        if let Some(request) = self.request(request) {
            let requested = RequestedParameters::new(&self.common.config, &ConnectParams::default());
            request.end.send_frame(requested.rejection(&request.frame, private_data));
        }
    }

    fn holds_sends(&mut self, id: QpId) -> bool {
        self.table.get_mut(id).is_some_and(|qp| qp.rdmap.outbound.is_busy())
    }

    fn flow(&mut self, id: QpId) -> Option<Flow> {
        self.table.get_mut(id).map(|qp| {
            let unacknowledged = qp.end.as_ref().map_or(0, |end| end.outgoing.borrow().bytes.len());
            qp.rdmap.flow(unacknowledged as u64)
        })
    }

    fn disconnect(&mut self, id: QpId) {
        let Some(qp) = self.table.get_mut(id) else { return };
        match qp.state {
            MemoryQpState::Up => qp.state = MemoryQpState::Closing,
            MemoryQpState::Connecting(_) => {
                let error = FabricError::peer_violation("no answer before this side disconnected");
                qp.fail_connect(&mut self.common, ControlEvent::ConnectFailed { qp: id, error });
            }
            MemoryQpState::Closing | MemoryQpState::Error => {}
        }
    }

    fn destroy_qp(&mut self, id: QpId) {
        let Some(mut qp) = self.table.remove(id) else { return };
        self.qps.retain(|&qp| qp != id);
        qp.fail(&mut self.common, StreamFailure::local("destroyed"));
        // The caller needs no `Disconnected` event.
        self.common.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.accept_connections();
        for &id in &self.qps {
            if let Some(qp) = self.table.get_mut(id) {
                qp.manage_connection(&mut self.common);
            }
        }
        events.extend(self.common.events.drain(..));
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let unknown = || FabricError::misuse(format!("{qp:?} is unknown"));
        self.table.get_mut(qp).ok_or_else(unknown)?.rdmap.windows.alloc(qp)
    }

    fn next_rkey(&self, window: WindowId) -> u32 {
        self.table.get(window.qp).and_then(|qp| qp.rdmap.windows.next(window.index)).unwrap_or(0)
    }

    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        (mem.offset() + offset) as u64
    }

    fn fence_receives(&mut self) {
        self.common.shared.receives.fence();
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let MemoryState { shared: SharedResources { arenas, receives, stats }, ready, .. } = &mut self.common;
        let (queue, ended) = match qp {
            None => (receives, None),
            Some(id) => {
                let Some(qp) = self.table.get_mut(id) else { return 0 };
                let ended = matches!(qp.state, MemoryQpState::Error).then_some(id);
                let Some(own) = qp.rdmap.own_receives.as_mut() else { return 0 };
                (own, ended)
            }
        };
        let n = queue.post_registered(bufs, |arena| arenas.contains(arena), ended, ready);
        stats.recv_posts += n as u64;
        n
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let Some(qp) = self.table.get_mut(qp) else { return Err(PostError::NotConnected) };
        match qp.state {
            MemoryQpState::Up | MemoryQpState::Closing => {}
            MemoryQpState::Connecting(_) => return Err(PostError::NotConnected),
            MemoryQpState::Error => {
                self.common.shared.stats.posts += chain.len() as u64;
                let flushed = |p: Posting| Completion::ended(qp.id, p.wr_id, p.wr.opcode(), Status::Flushed);
                self.common.ready.extend(chain.drain(..).map(flushed));
                return Ok(());
            }
        }
        let result = qp.rdmap.post(&mut self.common.shared, chain);
        qp.flush(&mut self.common);
        result
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        let end = start.saturating_add(max);
        Completion::drain_ready(&mut self.common.ready, out, end);
        let first = self.common.random.below(self.qps.len() as u64) as usize;
        for at in 0..self.qps.len() {
            let id = self.qps[(first + at) % self.qps.len()];
            if let Some(qp) = self.table.get_mut(id) {
                qp.poll(&mut self.common, out, end);
            }
        }
        Completion::drain_ready(&mut self.common.ready, out, end);
        out.len() - start
    }

    fn arm(&mut self) {}

    /// Returns immediately, because nothing happens while this thread sleeps.
    fn wait(&mut self, _timeout: Option<Duration>) -> bool {
        true
    }

    fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.always_readable))
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.always_readable.as_fd()
    }

    fn longest_wait(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }
}
