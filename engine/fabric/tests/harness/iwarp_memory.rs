//! Endpoints without sockets, for tests. Byte queues join pairs within one thread.
//!
//! All random choices follow from a seed, and there is no clock: the same calls produce the same events. A poll of a
//! connection moves a random number of bytes, so its streams are cut anywhere. TCP's time limits do not exist here: an
//! incomplete message, a peer that receives nothing, and a missing answer cause an unlimited wait.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use super::rdmap_stream::{Arenas, Failure, InputStatus, RdmapStream, SharedResources};
use super::setup::{self, Negotiated, RequestedParameters};
use super::wire::Setup;
use super::{IwarpConfig, capabilities};
use crate::accept_balancer::{AcceptBalancer, Accepted, BalancerMember, ConnectionCount};
use crate::error::failed;
use crate::receives::Receives;
use crate::table::Table;
use crate::testing::random::Xorshift;
use crate::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
};

/// Bytes that a queue holds; a full queue blocks the sender.
const HELD: usize = 64 << 10;
/// Polls for which a departed peer's messages wait for a Receive: a time limit over TCP.
const LINGER: u32 = 4096;
/// The assumed segment size of the path.
const SEGMENT: usize = 1460;

thread_local! {
    /// Bound addresses.
    static BOUND: RefCell<BTreeMap<String, Bound>> = const { RefCell::new(BTreeMap::new()) };
}

/// An address: its visitors and its listeners.
#[derive(Debug, Default)]
struct Bound {
    visitors: VecDeque<End>,
    balancer: Arc<AcceptBalancer<End>>,
}

/// A bound address, for fabrics of the thread that has bound it. The last clone's drop frees the address.
#[derive(Clone, Debug)]
pub struct MemoryListener(Arc<Name>);

#[derive(Debug)]
struct Name(String);

impl Drop for Name {
    fn drop(&mut self) {
        // At the thread's end, all of them have ended.
        let _ = BOUND.try_with(|bound| bound.borrow_mut().remove(&self.0));
    }
}

/// One direction: a frame of the setup, then bytes.
#[derive(Debug, Default)]
struct Way {
    frame: Option<Setup>,
    bytes: VecDeque<u8>,
    /// Whether the sender has left: nothing follows, and it reads nothing.
    over: bool,
}

/// One end of a connection, until it is dropped.
#[derive(Debug)]
struct End {
    outgoing: Rc<RefCell<Way>>,
    incoming: Rc<RefCell<Way>>,
    /// The name of the far end.
    peer: String,
}

impl End {
    /// Connects to an address, as a peer of this name.
    fn visit(address: &FabricAddress, peer: &str, request: Setup) -> Result<Self, FabricError> {
        let (there, back) = (Rc::<RefCell<Way>>::default(), Rc::<RefCell<Way>>::default());
        let far = Self { outgoing: Rc::clone(&back), incoming: Rc::clone(&there), peer: peer.to_owned() };
        let near = Self { outgoing: there, incoming: back, peer: address.0.clone() };
        near.say(request);
        let known = BOUND.with_borrow_mut(|bound| bound.get_mut(&address.0).map(|bound| bound.visitors.push_back(far)));
        let unreachable = || FabricError::unreachable(&address.0, "no fabric of this thread has bound it");
        known.ok_or_else(unreachable).map(|()| near)
    }

    fn say(&self, frame: Setup) {
        self.outgoing.borrow_mut().frame = Some(frame);
    }

    fn hear(&self) -> Option<Setup> {
        self.incoming.borrow_mut().frame.take()
    }

    fn is_left(&self) -> bool {
        self.incoming.borrow().over
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.outgoing.borrow_mut().over = true;
    }
}

/// A raw end of a connection, without any protocol.
#[derive(Debug)]
pub struct BareEnd(End);

impl BareEnd {
    /// Connects to an address of this thread with an MPA Request Frame. `peer` is the peer's name.
    ///
    /// # Errors
    /// Nobody has bound it.
    pub fn connect(address: &FabricAddress, peer: &str, request: Setup) -> Result<Self, FabricError> {
        End::visit(address, peer, request).map(Self)
    }

    /// The MPA Reply Frame, once it has arrived.
    pub fn reply(&self) -> Option<Setup> {
        self.0.hear()
    }

    /// Sends bytes from the front of `bytes`, up to the queue's room.
    pub fn send(&self, bytes: &mut VecDeque<u8>, most: usize) {
        let mut way = self.0.outgoing.borrow_mut();
        let count = most.min(HELD - way.bytes.len()).min(bytes.len());
        way.bytes.extend(bytes.drain(..count));
    }

    /// Takes up to `most` bytes.
    pub fn receive(&self, most: usize) -> Vec<u8> {
        let mut way = self.0.incoming.borrow_mut();
        let count = most.min(way.bytes.len());
        way.bytes.drain(..count).collect()
    }

    /// Whether the far end has ended the connection.
    pub fn is_over(&self) -> bool {
        self.0.is_left()
    }
}

/// A connect request that waits for an answer.
#[derive(Debug)]
struct Request {
    id: RequestId,
    frame: Setup,
    end: End,
    /// Counts it.
    count: ConnectionCount,
}

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
struct Common {
    config: IwarpConfig,
    shared: SharedResources,
    ready: VecDeque<Completion>,
    events: VecDeque<ControlEvent>,
    random: Xorshift,
}

impl Common {
    /// Bytes to move: few or many, and at times none.
    fn some(&mut self) -> usize {
        let most = 2 << self.random.below(17);
        self.random.below(most) as usize
    }
}

/// State of a queue pair.
#[derive(Debug)]
enum State {
    /// The peer has not answered yet.
    Connecting(RequestedParameters),
    Up,
    /// Closing locally: posted requests are still sent.
    Closing,
    /// Ended. Everything was flushed.
    Error,
}

#[derive(Debug)]
struct MemoryQp {
    id: QpId,
    rdmap: RdmapStream,
    state: State,
    /// Present until the connection ends.
    end: Option<End>,
    /// Polls in which a departed peer's message lacked a Receive.
    lingers: u32,
    /// Counts an accepted connection.
    count: Option<ConnectionCount>,
}

impl MemoryQp {
    fn is_live(&self) -> bool {
        matches!(self.state, State::Up | State::Closing)
    }

    /// Begins when the connection is established.
    fn begin(&mut self, common: &Common, agreed: &Negotiated, waits: bool) {
        let max_ulpdu = setup::max_ulpdu(common.config.fpdu_size, agreed.is_ours, SEGMENT);
        self.rdmap.begin(agreed, waits, max_ulpdu, common.config.max_message);
    }

    /// Polls the connection once.
    fn poll(&mut self, common: &mut Common, out: &mut Vec<Completion>, most: usize) {
        if !self.is_live() {
            return;
        }
        match self.read(common, out, most) {
            Ok(()) => self.flush(common),
            Err(failure) => self.fail(common, failure),
        }
    }

    fn read(&mut self, common: &mut Common, out: &mut Vec<Completion>, most: usize) -> Result<(), Failure> {
        let Some(end) = &self.end else { return Ok(()) };
        let mut way = end.incoming.borrow_mut();
        let mut count = common.some().min(way.bytes.len());
        // As over TCP, bytes of one place may be read directly, or like all others.
        if common.random.chance(500)
            && let Some(place) = self.rdmap.direct_target()
        {
            let placed = count.min(place.len());
            place.fill(&way.bytes.make_contiguous()[..placed]);
            way.bytes.drain(..placed);
            self.rdmap.advance_direct(placed);
            count -= placed;
        }
        let mut input = &way.bytes.make_contiguous()[..count];
        let taken = self.rdmap.consume(&mut common.shared, &mut input, out, most)?;
        count -= input.len();
        way.bytes.drain(..count);
        self.lingers += u32::from(taken == InputStatus::NoReceive && way.over);
        let all = taken == InputStatus::Consumed && way.over && way.bytes.is_empty();
        if all || self.lingers > LINGER { Err(self.rdmap.peer_closed()) } else { Ok(()) }
    }

    fn flush(&mut self, common: &mut Common) {
        if let Err(failure) = self.rdmap.produce() {
            return self.fail(common, failure);
        }
        self.write(common.some());
        self.rdmap.reap(&mut common.ready);
    }

    /// Sends up to `most` bytes, within the queue's room. Bytes sent by the peer before it left are still readable.
    fn write(&mut self, most: usize) {
        let Some(end) = self.end.as_ref().filter(|end| !end.is_left()) else { return };
        let mut way = end.outgoing.borrow_mut();
        let bytes = self.rdmap.outbound.buffer.bytes(most.min(HELD - way.bytes.len()));
        self.rdmap.outbound.buffer.advance(bytes.len());
        way.bytes.extend(bytes);
    }

    /// Ends the connection: posted requests are flushed.
    fn fail(&mut self, common: &mut Common, failure: Failure) {
        if matches!(self.state, State::Error) {
            return;
        }
        let told = self.is_live();
        let Failure { terminate, status, cause, reason } = failure;
        if let Some(message) = terminate {
            // After started segments, if there is room: nothing may interrupt an FPDU.
            self.write(usize::MAX);
            if self.rdmap.outbound.buffer.len() == 0 {
                self.rdmap.outbound.terminate(&message);
                self.write(usize::MAX);
            }
        }
        self.state = State::Error;
        self.end = None;
        self.rdmap.flush(status, &mut common.ready);
        if told {
            common.events.push_back(ControlEvent::Disconnected { qp: self.id, cause, reason });
        }
    }

    /// Ends a failed connect.
    fn give_up(&mut self, common: &mut Common, event: ControlEvent) {
        common.events.push_back(event);
        self.fail(common, Failure::local("never connected"));
    }

    /// Runs its connection management.
    fn tend(&mut self, common: &mut Common) {
        match self.state {
            State::Connecting(requested) => self.dial(common, requested),
            State::Closing => {
                self.flush(common);
                if !self.rdmap.outbound.is_busy() {
                    self.fail(common, Failure::local("disconnected"));
                }
            }
            State::Up | State::Error => {}
        }
    }

    /// Checks for the peer's answer.
    fn dial(&mut self, common: &mut Common, requested: RequestedParameters) {
        let qp = self.id;
        let Some(end) = &self.end else { return };
        let error = match end.hear() {
            None if !end.is_left() => return,
            None => FabricError::peer("it closed the connection before it answered"),
            Some(frame) => {
                let private_data = setup::private_data(&frame);
                if frame.reject {
                    return self.give_up(common, ControlEvent::Rejected { qp, private_data });
                }
                match requested.conclude(&frame) {
                    Ok(agreed) => {
                        self.state = State::Up;
                        self.begin(common, &agreed, false);
                        if agreed.rtr {
                            self.rdmap.outbound.send_empty_write();
                            self.flush(common);
                        }
                        return common.events.push_back(ControlEvent::Established { qp, private_data });
                    }
                    Err(unwanted) => FabricError::peer(unwanted.why),
                }
            }
        };
        self.give_up(common, ControlEvent::ConnectFailed { qp, error });
    }
}

/// One shard's device in memory.
#[derive(Debug)]
pub struct MemoryFabric {
    common: Common,
    table: Table<MemoryQp>,
    /// Existing queue pairs.
    qps: Vec<QpId>,
    listening: Vec<(MemoryListener, BalancerMember<End>)>,
    requests: Vec<Request>,
    next_request: u64,
    capabilities: Capabilities,
    bell: Arc<OwnedFd>,
}

impl MemoryFabric {
    /// Opens the fabric for one shard. The seed determines all random choices.
    pub fn new(config: IwarpConfig, seed: u64) -> Result<Self, FabricError> {
        config.check()?;
        // Always readable: the next turn is always due.
        let bell = rustix::event::eventfd(1, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Self {
            bell: Arc::new(bell.map_err(|e| failed("eventfd", e))?),
            capabilities: capabilities(&config),
            common: Common {
                shared: SharedResources {
                    arenas: Arenas::default(),
                    receives: Receives::new(config.shared_receives),
                    stats: FabricStats::default(),
                },
                ready: VecDeque::new(),
                events: VecDeque::new(),
                random: Xorshift::new(seed),
                config,
            },
            table: Table::default(),
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

    fn add(&mut self, params: &ConnectParams, state: State, end: End) -> &mut MemoryQp {
        let random = self.common.random.next() as u32;
        let id = self.table.insert(|id| {
            let rdmap = RdmapStream::new(id, params, random);
            MemoryQp { id, rdmap, state, end: Some(end), lingers: 0, count: None }
        });
        self.qps.push(id);
        self.table.get(id).expect("it was just inserted")
    }

    /// Accepts connections at its listening addresses.
    fn take_visitors(&mut self) {
        let most = self.common.config.max_handshakes;
        let mut accepted = Vec::new();
        for (listener, member) in &self.listening {
            let visitors = BOUND.with_borrow_mut(|bound| bound.get_mut(&listener.0.0).map(|b| b.visitors.split_off(0)));
            accepted.extend(visitors.into_iter().flatten().filter_map(|visitor| member.assign(visitor, most)));
            accepted.extend(member.take_handed_over());
        }
        for Accepted { request: end, count } in accepted {
            let Some(frame) = end.hear() else { continue };
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
            bound.insert(name.clone(), Bound::default());
            Ok(MemoryListener(Arc::new(Name(name))))
        })
    }

    fn listen(&mut self, listener: &MemoryListener) -> Result<(), FabricError> {
        let balancer = BOUND.with_borrow(|bound| bound.get(&listener.0.0).map(|bound| Arc::clone(&bound.balancer)));
        let balancer = balancer.ok_or_else(|| FabricError::misuse("it is bound by another thread"))?;
        self.listening.push((listener.clone(), BalancerMember::new(&balancer, self.waker())));
        Ok(())
    }

    fn unlisten(&mut self) {
        self.listening.clear();
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.capabilities.check_params(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let end = End::visit(address, "this thread", requested.request(&params.private_data))?;
        Ok(self.add(params, State::Connecting(requested), end).id)
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.capabilities.check_params(params)?;
        let requested = RequestedParameters::new(&self.common.config, params);
        let request = self.request(request).filter(|request| !request.end.is_left());
        let gone = || FabricError::peer("it has given up its connect request");
        let Request { frame, end, count, .. } = request.ok_or_else(gone)?;
        let (reply, agreed) = requested.answer(&frame, &params.private_data).map_err(|why| {
            end.say(requested.rejection(&frame, &[]));
            self.common.shared.stats.requests_refused += 1;
            FabricError::peer(why)
        })?;
        end.say(reply);
        let id = self.add(params, State::Up, end).id;
        let qp = self.table.find(id)?;
        qp.count = Some(count);
        qp.begin(&self.common, &agreed, true);
        self.common.events.push_back(ControlEvent::Established { qp: id, private_data: Vec::new() });
        Ok(id)
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        if let Some(request) = self.request(request) {
            let requested = RequestedParameters::new(&self.common.config, &ConnectParams::default());
            request.end.say(requested.rejection(&request.frame, private_data));
        }
    }

    fn holds_sends(&mut self, id: QpId) -> bool {
        self.table.get(id).is_some_and(|qp| qp.rdmap.outbound.is_busy())
    }

    fn flow(&mut self, id: QpId) -> Option<Flow> {
        self.table.get(id).map(|qp| {
            let unacknowledged = qp.end.as_ref().map_or(0, |end| end.outgoing.borrow().bytes.len());
            qp.rdmap.flow(unacknowledged as u64)
        })
    }

    fn disconnect(&mut self, id: QpId) {
        let Some(qp) = self.table.get(id) else { return };
        match qp.state {
            State::Up => qp.state = State::Closing,
            State::Connecting(_) => {
                let error = FabricError::peer("disconnected before it answered");
                qp.give_up(&mut self.common, ControlEvent::ConnectFailed { qp: id, error });
            }
            State::Closing | State::Error => {}
        }
    }

    fn destroy_qp(&mut self, id: QpId) {
        let Some(mut gone) = self.table.remove(id) else { return };
        self.qps.retain(|&qp| qp != id);
        gone.fail(&mut self.common, Failure::local("destroyed"));
        // The caller of destroy needs no event of its end.
        self.common.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.take_visitors();
        for &id in &self.qps {
            if let Some(qp) = self.table.get(id) {
                qp.tend(&mut self.common);
            }
        }
        events.extend(self.common.events.drain(..));
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let unknown = || FabricError::misuse(format!("{qp:?} is unknown"));
        self.table.get(qp).ok_or_else(unknown)?.rdmap.windows.alloc(qp)
    }

    fn next_rkey(&self, window: WindowId) -> u32 {
        self.table.peek(window.qp).and_then(|qp| qp.rdmap.windows.next(window.index)).unwrap_or(0)
    }

    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        (mem.offset() + offset) as u64
    }

    fn fence_receives(&mut self) {
        self.common.shared.receives.fence();
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let Common { shared: SharedResources { arenas, receives, stats }, ready, .. } = &mut self.common;
        let (queue, over) = match qp {
            None => (receives, None),
            Some(id) => {
                let Some(qp) = self.table.get(id) else { return 0 };
                let over = matches!(qp.state, State::Error).then_some(id);
                let Some(own) = qp.rdmap.own_receives.as_mut() else { return 0 };
                (own, over)
            }
        };
        let n = queue.post_known(bufs, |arena| arenas.contains(arena), over, ready);
        stats.recv_posts += n as u64;
        n
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let Some(qp) = self.table.get(qp) else { return Err(PostError::NotConnected) };
        match qp.state {
            State::Up | State::Closing => {}
            State::Connecting(_) => return Err(PostError::NotConnected),
            State::Error => {
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
        Completion::hand_out(&mut self.common.ready, out, end);
        let first = self.common.random.below(self.qps.len() as u64) as usize;
        for at in 0..self.qps.len() {
            let id = self.qps[(first + at) % self.qps.len()];
            if let Some(qp) = self.table.get(id) {
                qp.poll(&mut self.common, out, end);
            }
        }
        Completion::hand_out(&mut self.common.ready, out, end);
        out.len() - start
    }

    fn arm(&mut self) {}

    /// Returns at once: while this thread sleeps, nothing happens.
    fn wait(&mut self, _timeout: Option<Duration>) -> bool {
        true
    }

    fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.bell))
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn longest_wait(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }
}
