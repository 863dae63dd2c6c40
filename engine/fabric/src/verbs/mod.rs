//! The fabric over libibverbs and librdmacm: InfiniBand, RoCE, soft-RoCE. Address `verbs:HOST:PORT`.
//!
//! # How it is built
//! - `sys` has the objects of the two libraries, and is the only part that calls them. `endpoint` and `receives` own
//!   the memory that the device has, and are the only other parts with `unsafe` code.
//! - A fabric has opened its device for itself: one context, one protection domain, one completion queue, one shared
//!   receive queue. Nothing of it is shared with other shards, so nothing is locked but what the libraries lock.
//! - Queue pairs are made and moved through their states here, not by the connection manager, which only carries the
//!   messages of `connect`. So a queue pair can take Receives before there is a connection, and lives until *we* have
//!   taken back what it holds.
//! - Memory is registered without remote rights. What a peer may reach is what a type-2 window is bound to (`window`),
//!   on its queue pair and nowhere else, until it is invalidated by either side.
//! - All work ends in one completion queue. A post never brings more than that can hold: `Book::room` counts.
//!
//! # Devices
//! Those of iWARP are refused ([`FabricError::Iwarp`]). They have no memory windows, so that each exposure would need a
//! registration of its own. And the memory that an RDMA Read of ours fills must be open to RDMA Writes of the peer
//! there (RFC 5040 §5): a region has its rights as a whole, so that a peer that is shown one such place could write to
//! all of the pool.
//!
//! `quirks` knows what devices do otherwise than the specification. Soft-RoCE does not check the bounds of
//! windows, so there a peer reaches all of an arena while a window of it is open: see
//! [`Capabilities::checks_window_bounds`].

mod complete;
mod config;
mod connect;
mod device;
mod drain;
mod endpoint;
mod explain;
mod listener;
mod map;
mod path;
mod probe;
mod qp;
mod quirks;
mod reaper;
mod receives;
mod region;
mod sleep;
mod sys;
mod window;
mod wr_id;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use self::complete::Book;
pub use self::config::{Switch, VerbsConfig};
use self::device::Choice;
use self::endpoint::Scratch;
pub use self::listener::VerbsListener;
use self::qp::State;
use self::quirks::Quirks;
use self::receives::SharedReceives;
use self::region::Regions;
use self::sleep::{Sleeper, Source};
use self::sys::{
    CmEvent, CompletionChannel, CompletionQueue, Context, EventChannel, ProtectionDomain, QpCapacity, QueuePair,
    SharedReceiveQueue,
};
use self::window::NoWindow;
use super::host;
use super::seats::Seat;
use super::sockets::shorter;
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Disconnect, Fabric, FabricAddress, FabricError,
    FabricStats, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
};

/// The addresses of this host's active RoCE ports: where a server of this fabric can listen. Empty on a host
/// without.
pub fn local_addresses() -> Vec<std::net::IpAddr> {
    device::addresses(&device::ports())
}

/// Longest sleep while a connection is being closed.
const TICK: Duration = Duration::from_millis(1);
/// Empty polls between two yields of the core to a device that is software.
const POLLS_PER_YIELD: u64 = 16;
/// Completions that are kept free: for what a queue pair that was destroyed in a hurry may still say.
const SPARE_COMPLETIONS: u32 = 32;

/// One shard's device of the verbs fabric; see the page of this module.
pub struct VerbsFabric {
    // In the order in which they must go: queue pairs before what they use.
    requests: Vec<connect::Request>,
    book: Book,
    regions: Regions,
    listener: Option<(VerbsListener, Seat<CmEvent>)>,
    channel: Arc<EventChannel>,
    sleeper: Sleeper,
    cq: Rc<CompletionQueue>,
    pd: Rc<ProtectionDomain>,
    context: Rc<Context>,
    scratch: Scratch,
    events: Vec<ControlEvent>,
    next_request: u64,
    choice: Choice,
    is_infiniband: bool,
    /// The device was removed, or is beyond use.
    is_lost: bool,
    capabilities: Capabilities,
    quirks: Quirks,
    config: Box<VerbsConfig>,
    /// The port's count of messages that met no Receive, when this fabric was opened.
    not_ready_before: u64,
}

impl VerbsFabric {
    /// The word before the colon of its addresses.
    pub const SCHEME: &'static str = "verbs";

    /// Opens the fabric for one shard.
    ///
    /// # Errors
    /// What failed, the limit that was met, and the remedy; for a device that cannot be found, what devices
    /// there are. [`FabricError::Iwarp`] for one of iWARP that was named, or where there is no other.
    pub fn new(config: VerbsConfig) -> Result<Self, FabricError> {
        config.check()?;
        let ports = device::ports();
        let choice = choose(&ports, &config)?;
        let context = Context::open(&choice.device)
            .map_err(|e| explain::opening(format!("ibv_open_device {}", choice.device), &e))?;
        let attributes = context.attributes().map_err(|e| explain::calling("ibv_query_device", &e))?;
        let port = context.port(choice.port).map_err(|e| explain::calling("ibv_query_port", &e))?;
        path::check_port(&config.path, &choice.device, choice.port, port.mtu)?;
        let mut quirks = Quirks::of(&choice.device, &attributes);
        if quirks.has_windows
            && let Some(found) = probe::findings(&context, &choice, &port, &quirks)
        {
            quirks.remote_invalidate &= found.remote_invalidate;
            quirks.checks_window_bounds &= found.checks_window_bounds;
        }
        let channel = EventChannel::new().map_err(|e| explain::opening("rdma_create_event_channel", &e))?;
        let pd = ProtectionDomain::new(&context).map_err(|e| explain::pinning("ibv_alloc_pd", &e))?;
        let completions =
            CompletionChannel::new(&context).map_err(|e| explain::pinning("ibv_create_comp_channel", &e))?;
        let receives = config.shared_receives;
        let entries = config.completions.saturating_add(receives).min(attributes.max_cqe);
        if receives > attributes.max_srq_wr || receives > entries / 2 {
            let most = attributes.max_srq_wr.min(attributes.max_cqe / 2);
            return Err(FabricError::System {
                call: format!("ibv_create_srq of {receives} Receives"),
                detail: format!("{} takes at most {most} of them: lower `receives`, or use more shards", choice.device),
            });
        }
        let cq = CompletionQueue::new(&context, &completions, entries)
            .map_err(|e| explain::pinning(format!("ibv_create_cq of {entries} entries"), &e))?;
        let srq = SharedReceiveQueue::new(&pd, receives)
            .map_err(|e| explain::pinning(format!("ibv_create_srq of {receives} Receives"), &e))?;
        let sleeper = Sleeper::new().and_then(|sleeper| {
            sleeper.add(Source::Completions, cq.channel().fd())?;
            sleeper.add(Source::Connections, channel.fd())?;
            sleeper.add(Source::Device, context.async_fd())?;
            Ok(sleeper)
        });
        let sleeper = sleeper.map_err(|e| explain::opening("epoll_create", &e))?;
        let max_inline_data = most_inline_data(&pd, &cq, &srq, config.max_inline_data)?;
        let switch = |auto| match config.remote_invalidate {
            Switch::Auto => auto,
            Switch::On => true,
            Switch::Off => false,
        };
        let capabilities = Capabilities {
            scheme: Self::SCHEME,
            device: describe(&choice, config.path.path_mtu.unwrap_or(port.mtu), &quirks),
            max_send_wr: attributes.max_qp_wr.saturating_sub(1).min(entries / 2),
            max_recv_wr: attributes.max_qp_wr.min(attributes.max_srq_wr).min(entries / 2),
            max_inline_data,
            max_message: port.max_message,
            max_connect_private_data: connect::CONNECT_DATA,
            max_accept_private_data: connect::REJECT_DATA,
            max_read_depth: connect::read_depth(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom),
            remote_invalidate: switch(quirks.remote_invalidate),
            exposure_needs_own_arena: !quirks.checks_window_bounds,
            checks_window_bounds: quirks.checks_window_bounds,
            ..Capabilities::default()
        };
        let room = cq.capacity().min(entries).saturating_sub(SPARE_COMPLETIONS) as usize;
        Ok(Self {
            requests: Vec::new(),
            book: Book::new(SharedReceives::new(srq, receives), room, &quirks),
            regions: Regions::new(&pd),
            listener: None,
            channel,
            sleeper,
            cq,
            pd,
            context,
            scratch: Scratch::default(),
            events: Vec::new(),
            next_request: 0,
            is_infiniband: ports
                .iter()
                .any(|p| (&p.device, p.number) == (&choice.device, choice.port) && p.link_layer == "InfiniBand"),
            is_lost: false,
            not_ready_before: device::receiver_not_ready(&choice.device, choice.port),
            choice,
            capabilities,
            quirks,
            config: Box::new(config),
        })
    }

    /// Takes up to `max` completions from the device; returns how many.
    #[inline]
    fn poll_device(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let book = &mut self.book;
        self.cq.poll(max, |done| book.complete(&done, out)).unwrap_or_else(|error| unpollable(&error, book))
    }
}

/// The completion queue is beyond use, and with it all that ends in it.
#[cold]
fn unpollable(error: &std::io::Error, book: &mut Book) -> usize {
    let attention = &mut book.attention;
    book.table.iter_mut().for_each(|qp| qp.fail(attention, Disconnect::Failure, || format!("ibv_poll_cq: {error}")));
    0
}

fn choose(ports: &[device::Port], config: &VerbsConfig) -> Result<Choice, FabricError> {
    let local = match &config.address {
        None => None,
        Some(address) => {
            let to = host::resolve(address)?;
            let found = host::local_address(to);
            let unreachable = |e| FabricError::Unreachable {
                address: address.0.clone(),
                detail: format!("the routing tables have no way there: {e}; see `ip route get {}`", to.ip()),
            };
            // A server may listen at all addresses: that names no device.
            (!to.ip().is_unspecified()).then(|| found.map_err(unreachable)).transpose()?
        }
    };
    device::choose(ports, config.device.as_deref(), local, config.gid_index)
}

/// The longest inline Send that the device gives, up to `wanted`. Finds out by the way whether queue pairs
/// can be made at all.
fn most_inline_data(
    pd: &Rc<ProtectionDomain>,
    cq: &Rc<CompletionQueue>,
    srq: &Rc<SharedReceiveQueue>,
    wanted: u32,
) -> Result<u32, FabricError> {
    let mut max_inline_data = wanted;
    loop {
        let mut capacity = QpCapacity { send: 16, receive: 0, max_inline_data };
        match QueuePair::new(pd, cq, Some(srq), &mut capacity, 0) {
            Ok(_) => return Ok(max_inline_data.min(capacity.max_inline_data)),
            // Some devices give less only if they are asked for less.
            Err(_) if max_inline_data > 0 => max_inline_data /= 2,
            Err(error) => return Err(explain::pinning("ibv_create_qp", &error)),
        }
    }
}

/// The device, in words.
fn describe(choice: &Choice, mtu: u32, quirks: &Quirks) -> String {
    let family = if quirks.family.is_empty() { String::new() } else { format!(" ({})", quirks.family) };
    let gid = choice.gid.as_ref().map_or_else(String::new, |gid| format!(", {gid}"));
    format!("{}{family} port {}{gid}, MTU {mtu}", choice.device, choice.port)
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        let ids: Vec<QpId> = self.book.table.iter().map(|qp| qp.id).collect();
        for id in ids {
            self.destroy(id);
        }
        self.book.ready.clear();
        self.requests.drain(..).for_each(connect::Request::dispose);
    }
}

impl VerbsFabric {
    /// How long it may sleep.
    fn sleep_limit(&self) -> Option<Duration> {
        if !self.book.ready.is_empty() || !self.events.is_empty() {
            Some(Duration::ZERO)
        } else if self.book.attention.is_empty() {
            None
        } else {
            Some(TICK)
        }
    }
}

impl Fabric for VerbsFabric {
    type Listener = VerbsListener;

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Counters. Messages that met no Receive are the device's count, of all that use its port.
    fn stats(&self) -> FabricStats {
        let now = device::receiver_not_ready(&self.choice.device, self.choice.port);
        FabricStats { receiver_not_ready: now.saturating_sub(self.not_ready_before), ..self.book.stats }
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        self.regions.add(arena, access)
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if self.book.table.iter().any(|qp| qp.endpoint.windows.exposes(arena)) {
            return Err(FabricError::still_bound(arena));
        }
        self.regions.remove(arena)
    }

    fn bind(address: &FabricAddress) -> Result<VerbsListener, FabricError> {
        VerbsListener::bind(address)
    }

    fn listen(&mut self, listener: &VerbsListener) -> Result<(), FabricError> {
        if self.listener.is_some() {
            return Err(FabricError::Misuse("this fabric listens already".to_owned()));
        }
        if let Some(from) = self.source()
            && !listener.address().is_unspecified()
            && listener.address() != from
        {
            return Err(FabricError::Misuse(format!(
                "listening at {} with the GID of {from}: choose another GID, or none",
                listener.address()
            )));
        }
        self.sleeper.add(Source::Listener, listener.channel().fd()).map_err(|e| explain::opening("epoll_ctl", &e))?;
        self.listener = Some((listener.clone(), listener.seat(self.waker())));
        Ok(())
    }

    fn unlisten(&mut self) {
        if let Some((listener, _)) = self.listener.take() {
            self.sleeper.remove(listener.channel().fd());
        }
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.start_connect(address, params)
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.accept_request(request, params)
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        self.reject_request(request, private_data);
    }

    fn disconnect(&mut self, qp: QpId) {
        self.start_disconnect(qp);
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.destroy(qp);
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.pump();
        events.append(&mut self.events);
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let unknown = || FabricError::Misuse(format!("{qp:?} is unknown"));
        if !self.quirks.has_windows {
            return Err(FabricError::Misuse(format!(
                "{} has no type-2 memory windows (`ibv_devinfo -v`), without which no memory is exposed to peers",
                self.capabilities.device
            )));
        }
        let windows = &mut self.book.table.get(qp).ok_or_else(unknown)?.endpoint.windows;
        windows.add().map(|index| WindowId { qp, index }).map_err(|why| match why {
            NoWindow::Limit(limit) => {
                FabricError::Misuse(format!("{qp:?} has all the {limit} windows of its ConnectParams"))
            }
            NoWindow::Device(error) => explain::pinning("ibv_alloc_mw", &error),
        })
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.book.table.peek(window.qp).and_then(|qp| qp.endpoint.windows.next_rkey(window.index)).unwrap_or(0)
    }

    #[inline]
    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        (mem.address() + offset) as u64
    }

    #[inline]
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let Book { table, shared, ready, stats, room, .. } = &mut self.book;
        let posted = match qp {
            None => shared.post(&self.regions, bufs, *room),
            Some(id) => {
                let Some(qp) = table.get(id) else { return 0 };
                if matches!(qp.state, State::Over | State::Failed) && !qp.endpoint.shares_receives() {
                    // Not every device flushes what is posted so late.
                    let n = bufs.iter().take_while(|buf| self.regions.get(buf.arena()).is_some()).count();
                    ready.extend(bufs.drain(..n).map(|buf| Completion::failed_receive(id, Status::Flushed, buf)));
                    return n;
                }
                qp.endpoint.post_recv(&self.regions, bufs, *room).unwrap_or(0)
            }
        };
        stats.recv_posts += posted as u64;
        *room -= posted;
        posted
    }

    #[inline]
    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let Book { table, stats, room, .. } = &mut self.book;
        let Some(qp) = table.get(qp).filter(|qp| qp.takes_requests()) else {
            return Err(PostError::NotConnected);
        };
        let before = chain.len();
        let result = qp.endpoint.post(&mut self.scratch, &self.regions, stats, chain, *room);
        *room -= before - chain.len();
        result
    }

    fn post_immediate(&mut self, qp: QpId, posting: Posting, immediate: u32) -> bool {
        let Book { table, room, .. } = &mut self.book;
        let Some(qp) = table.get(qp).filter(|qp| qp.takes_requests() && *room > 0) else { return false };
        let posted = qp.endpoint.post_immediate(&mut self.scratch, &self.regions, posting, immediate);
        *room -= usize::from(posted);
        posted
    }

    #[inline]
    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        if !self.book.ready.is_empty() {
            Completion::hand_out(&mut self.book.ready, out, start.saturating_add(max));
        }
        let room = max - (out.len() - start);
        if room > 0 {
            let taken = self.poll_device(out, room);
            if taken == 0 {
                self.book.empty_polls += 1;
                if self.quirks.works_on_our_cores && self.book.empty_polls.is_multiple_of(POLLS_PER_YIELD) {
                    std::thread::yield_now();
                }
            }
        }
        out.len() - start
    }

    fn arm(&mut self) {
        if let Err(error) = self.cq.arm() {
            log::error!("ibv_req_notify_cq: {error}");
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let limit = self.sleep_limit();
        let happened = self.sleeper.wait(shorter(timeout, limit));
        if happened[Source::Completions as usize] {
            self.cq.take_event();
        }
        if happened[Source::Waker as usize] {
            self.sleeper.awake();
        }
        let control = [Source::Connections, Source::Listener, Source::Device];
        let handed = self.listener.as_ref().is_some_and(|(_, seat)| seat.has_handed());
        limit.is_some() || handed || control.into_iter().any(|source| happened[source as usize])
    }

    fn waker(&self) -> Waker {
        self.sleeper.waker()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.sleeper.descriptor()
    }

    fn longest_wait(&self) -> Option<Duration> {
        self.sleep_limit()
    }
}
