//! The fabric over libibverbs and librdmacm.
//!
//! It supports InfiniBand, RoCE and soft-RoCE. The address `verbs:HOST:PORT` picks the device. `verbs:DEVICE@HOST:PORT`
//! and `verbs:DEVICE/GID@HOST:PORT` name it.
//!
//! # Structure
//! - `sys` wraps the objects of the two libraries, and only `sys` calls them. `work_queues` and `receives` own the
//!   memory in use by the device. Apart from `sys`, only these two have `unsafe` code.
//! - A fabric opens its device for itself alone: one context, one protection domain, one completion queue, one shared
//!   receive queue. Shards share none of these, so only the libraries lock.
//! - Queue pairs are created and changed here, not by the connection manager, which only carries the messages of
//!   `connect`. A queue pair can therefore take Receives before its connection exists. It lives until this side has its
//!   memory back.
//! - Memory is registered without remote rights. A peer reaches only the memory of type-2 windows (`window`) that are
//!   bound on its queue pair. Either side revokes a window by invalidation.
//! - A lost device is closed when its connections have ended, because a driver may wait for that before it removes the
//!   device. After that, the fabric looks for the device once a second, by its configured address or name. It opens the
//!   device when it is present again, registers all memory with it, and binds its address again if that was lost. The
//!   shard posts the Receives that came back from the old queue.
//! - All work completes in one completion queue. A post never exceeds its capacity, which `CompletionState::room`
//!   tracks.
//!
//! # Devices
//! iWARP devices are refused ([`Unsupported`](crate::FabricErrorKind::Unsupported)). They have no memory windows, so
//! each exposure would need a registration. There, the target of our RDMA Read must be open to the peer's RDMA Writes
//! (RFC 5040 §5). Rights apply to a whole region. A peer that learns the key of one target could therefore write to all
//! of the pool.
//!
//! `quirks` lists the devices' deviations from the specification. Soft-RoCE does not check window bounds. A peer there
//! reaches all of an arena while one window of it is bound. See [`Capabilities::checks_window_bounds`].

mod complete;
mod config;
mod connect;
mod device;
mod drain;
mod explain;
mod listener;
mod map;
mod opened;
mod path;
mod probe;
mod qp;
mod quirks;
mod reaper;
mod receives;
mod region;
mod sys;
mod window;
mod work_queues;
mod wr_id;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use self::complete::CompletionState;
pub use self::config::{FeatureMode, VerbsConfig};
use self::listener::Listening;
pub use self::listener::VerbsListener;
use self::opened::{OpenedDevice, SharedObjects};
use self::qp::{QpState, VerbsQp};
use self::region::MemoryRegions;
use self::sys::{CmEvent, CmId};
use self::work_queues::PostContext;
use super::accept_balancer::{Accepted, BalancerMember};
use super::host;
use super::sleeper::{Sleeper, shorter};
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, DeviceEvent, Disconnect, Fabric, FabricAddress,
    FabricError, FabricStats, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
};

/// Addresses of this host's active RoCE ports, for servers of this fabric. Empty on a host without such a port.
pub fn local_addresses() -> Vec<std::net::IpAddr> {
    device::addresses(&device::ports())
}

/// The NUMA node of this configuration's device. `None` if the kernel does not know the node, or if the device is
/// absent. Opening the fabric reports the absence.
pub fn numa_node(config: &VerbsConfig) -> Option<u32> {
    let config = config.clone().with_device_of_address().ok()?;
    opened::choose(&device::ports(), &config).ok().and_then(|choice| device::numa_node(&choice.device))
}

/// Tokens of the [`Sleeper`] for completions, connection events, connect requests, and asynchronous events.
const COMPLETIONS: u64 = 1;
const CONNECTIONS: u64 = 2;
const REQUESTS: u64 = 3;
const DEVICE_EVENTS: u64 = 4;
/// Number of the tokens, with that of the waker.
const TOKENS: usize = 5;

/// Longest sleep while a connection closes.
const TICK: Duration = Duration::from_millis(1);
/// Interval between checks for a lost device.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(1);
/// Empty polls between two yields of the core to a software device.
const POLLS_PER_YIELD: u64 = 16;

/// One shard's device of the verbs fabric; see the module documentation.
pub struct VerbsFabric {
    // In drop order: queue pairs before the objects that they use.
    /// Unanswered connect requests, by their numbers.
    requests: BTreeMap<u64, Accepted<CmEvent>>,
    completion: CompletionState,
    context: PostContext,
    listener: Option<Listening>,
    sleeper: Sleeper,
    device: OpenedDevice,
    events: Vec<ControlEvent>,
    next_request: u64,
    /// Set while the device is removed or failed, until it is reopened.
    lost: Option<DeviceLoss>,
    config: Box<VerbsConfig>,
}

/// The loss of a device.
struct DeviceLoss {
    event: DeviceEvent,
    /// Time of the next check for the device.
    next_check: Instant,
    /// Whether the device was watched. The next must also be watched, because a device in removal can still be opened.
    was_watched: bool,
}

impl VerbsFabric {
    /// The scheme of its addresses, before the colon.
    pub const SCHEME: &'static str = "verbs";

    /// Opens the fabric for one shard.
    ///
    /// # Errors
    /// The failed call, the limit found, and the remedy. For a missing device, the existing devices. An address and a
    /// field that name different devices. [`Unsupported`](crate::FabricErrorKind::Unsupported) for a named iWARP
    /// device, or on a host without other devices.
    pub fn new(config: VerbsConfig) -> Result<Self, FabricError> {
        config.check()?;
        let config = config.with_device_of_address()?;
        let (device, receives, room) = OpenedDevice::open(&config, None)?;
        let sleeper = Sleeper::new()?;
        sleeper.add(device.channel.fd(), CONNECTIONS, EventFlags::IN)?;
        device.watch_events(&sleeper)?;
        Ok(Self {
            requests: BTreeMap::new(),
            completion: CompletionState::new(receives, room, &device.quirks),
            context: PostContext::new(MemoryRegions::new(device.objects.as_ref().map(|objects| &objects.pd))),
            listener: None,
            sleeper,
            device,
            events: Vec::new(),
            next_request: 0,
            lost: None,
            config: Box::new(config),
        })
    }

    /// Takes up to `max` completions from the device. Returns the count.
    #[inline]
    fn poll_device(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let (Some(objects), completion) = (&self.device.objects, &mut self.completion) else { return 0 };
        objects.cq.poll(max, |done| completion.complete(done, out)).unwrap_or_else(|error| {
            // The completions of all connections are lost.
            completion.fail_all(Disconnect::Failure, || format!("ibv_poll_cq: {error}"));
            0
        })
    }

    /// Reports the loss of the device once, and ends all its connections. Each identifier and queue may report a loss.
    fn device_lost(&mut self, event: DeviceEvent) {
        let (Some(objects), None) = (&self.device.objects, &self.lost) else { return };
        let was_watched = objects.watch.is_some();
        let name = &self.device.choice.device;
        self.completion.fail_all(Disconnect::Device, || format!("{name}: {event}"));
        self.completion.stats.device_failures += 1;
        self.events.push(ControlEvent::Device(event));
        if let Some(listening) = &mut self.listener {
            // Other fabrics may use another device.
            listening.leave(&self.sleeper);
            if event == DeviceEvent::Removed {
                listening.device_removed(name);
            }
        }
        // The next device has its own counter.
        self.completion.stats.receiver_not_ready += self.device.receiver_not_ready();
        self.device.not_ready_before = u64::MAX;
        self.lost = Some(DeviceLoss { event, next_check: Instant::now() + RECOVERY_INTERVAL, was_watched });
    }

    /// The objects of the device. Refuses new work while the device is absent.
    fn objects(&self) -> Result<&SharedObjects, FabricError> {
        if let (Some(objects), None) = (&self.device.objects, &self.lost) {
            return Ok(objects);
        }
        let event = self.lost.as_ref().map_or(DeviceEvent::Failed, |lost| lost.event);
        let detail = format!("{event}, and is not there again (`rdma link`); it is looked for once a second");
        Err(FabricError::system(format!("using {}", self.device.choice.device), detail))
    }

    /// Frees a lost device once its connections have ended, or looks for it.
    fn recover(&mut self) {
        let Some(lost) = &mut self.lost else { return };
        if self.device.objects.is_some() {
            if self.completion.table.iter().next().is_some() {
                return;
            }
            let requests = std::mem::take(&mut self.requests).into_values();
            requests.filter_map(|accepted| accepted.request.request).for_each(reaper::dispose);
            let flushed = |buf| Completion::failed_receive(QpId::NONE, Status::Flushed, buf);
            self.completion.ready.extend(self.completion.shared.close().into_iter().map(flushed));
            self.context.regions.close();
            self.device.close(&self.sleeper, lost.event == DeviceEvent::Removed);
            log::info!("{} is closed, and looked for once a second", self.device.choice.device);
        }
        let now = Instant::now();
        if lost.next_check > now {
            return;
        }
        lost.next_check = now + RECOVERY_INTERVAL;
        match self.reopen() {
            Ok(()) => {
                self.lost = None;
                self.events.push(ControlEvent::Device(DeviceEvent::Returned));
            }
            Err(error) => {
                let line = format_args!("{} is not served: {error}", self.device.choice.device);
                self.context.log.warn("devices that are not there again", line);
            }
        }
    }

    /// Opens the device and restores this fabric's state on it.
    fn reopen(&mut self) -> Result<(), FabricError> {
        let mut config = (*self.config).clone();
        if config.address.is_none() {
            // Without a name, another device could be the first present one.
            config.device.get_or_insert_with(|| self.device.choice.device.clone());
        }
        let (mut found, receives, room) = OpenedDevice::open(&config, Some(&self.device.channel))?;
        if let Err(error) = self.attach(&found) {
            drop(receives);
            self.context.regions.close();
            found.close(&self.sleeper, false);
            return Err(error);
        }
        // Counters and the names of queue pairs stay.
        let CompletionState { shared, room: free, is_port_down, invalidated_flags, .. } = &mut self.completion;
        (*shared, *free, *is_port_down, *invalidated_flags) = (receives, room, false, found.quirks.invalidated_flags);
        self.device = found;
        Ok(())
    }

    /// Registers memory and descriptors with a device that is opened again, and binds the address.
    fn attach(&mut self, found: &OpenedDevice) -> Result<(), FabricError> {
        let Some(objects) = &found.objects else { return Ok(()) };
        let refused = |detail: &str| {
            let call = format!("opening {} again", found.choice.device);
            Err(FabricError::system(call, detail))
        };
        // What peers were promised, and what the layout of memory depends on.
        let promises = |device: &OpenedDevice| {
            let can = &device.capabilities;
            (can.remote_invalidate, can.exposure_needs_own_arena, can.checks_window_bounds)
        };
        if promises(&self.device) != promises(found) {
            return refused("it can do other things than the one before: start the program again");
        }
        if self.lost.as_ref().is_some_and(|lost| lost.was_watched) && objects.watch.is_none() {
            return refused("the connection manager does not know it");
        }
        found.watch_events(&self.sleeper)?;
        self.context.regions.open(&objects.pd)?;
        if let Some(listening) = &mut self.listener {
            listening.bind_again()?;
            listening.join(&self.sleeper)?;
        }
        Ok(())
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        let ids: Vec<QpId> = self.completion.table.iter().map(|qp| qp.id).collect();
        for id in ids {
            self.destroy_qp(id);
        }
        self.completion.ready.clear();
        let requests = std::mem::take(&mut self.requests).into_values();
        requests.filter_map(|accepted| accepted.request.request).for_each(reaper::dispose);
    }
}

impl Fabric for VerbsFabric {
    type Listener = VerbsListener;

    fn capabilities(&self) -> &Capabilities {
        &self.device.capabilities
    }

    /// Counters. `receiver_not_ready` is the port's counter, so it includes other users of the port.
    fn stats(&self) -> FabricStats {
        let (stats, FabricStats { posts, doorbells, signalled, .. }) = (&self.completion.stats, self.context.stats);
        let receiver_not_ready = stats.receiver_not_ready + self.device.receiver_not_ready();
        FabricStats { posts, doorbells, signalled, receiver_not_ready, ..*stats }
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        self.context.regions.add(arena, access)
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if self.completion.table.iter().any(|qp| qp.queues.windows.exposes(arena)) {
            return Err(FabricError::still_bound(arena));
        }
        self.context.regions.remove(arena)
    }

    fn bind(address: &FabricAddress) -> Result<VerbsListener, FabricError> {
        VerbsListener::bind(address)
    }

    fn listen(&mut self, listener: &VerbsListener) -> Result<(), FabricError> {
        if self.listener.is_some() {
            return Err(FabricError::misuse("this fabric listens already"));
        }
        listener.check(&self.config, &self.device.choice.device, self.device.source(&self.config))?;
        let mut listening = Listening::new(listener);
        // With a lost device, the listener waits for the device's return.
        if self.lost.is_none() {
            listening.join(&self.sleeper)?;
        }
        self.listener = Some(listening);
        Ok(())
    }

    fn unlisten(&mut self) {
        if let Some(mut listening) = self.listener.take() {
            listening.leave(&self.sleeper);
        }
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let (named, rest) = host::split_device(address)?;
        self.config.check_named(address, named.as_ref(), &self.device.choice.device)?;
        let to = host::resolve(&rest)?;
        if reaper::is_behind() {
            let detail = "the kernel is behind with destroying earlier connections (rdma_destroy_id): try again later";
            return Err(FabricError::system("rdma_create_id", detail));
        }
        self.objects()?;
        let from = self.device.source(&self.config);
        if let Some(from) = from.filter(|from| from.is_ipv4() != to.is_ipv4()) {
            let detail = format!("the GID that was chosen is {from}, which is of another family");
            return Err(FabricError::address(&address.0, detail));
        }
        if let Some(mtu) = self.config.path.path_mtu.filter(|_| self.device.choice.is_infiniband) {
            let why = "on InfiniBand the subnet manager says it, for each partition; only servers bound it";
            return Err(FabricError::misuse(format!("path_mtu = {mtu}: {why}")));
        }
        let cm = CmId::new(&self.device.channel, reaper::NOBODY);
        let cm = cm.map_err(|e| explain::open_error("rdma_create_id", &e))?;
        let id = self.create_qp(params, connect::CONNECT_DATA, QpState::Connecting, cm)?;
        let timeout = connect::milliseconds(self.config.resolve_timeout);
        let result = self.completion.table.get(id).map_or(Ok(()), |qp| {
            qp.open(self.device.choice.port)?;
            self.config.path.tos.map_or(Ok(()), |tos| qp.cm.set_tos(tos))?;
            qp.cm.resolve_address(from, to, timeout)
        });
        if let Err(error) = result {
            self.destroy_qp(id);
            return Err(self.unreachable(&address.0, &format!("rdma_resolve_addr: {error}")));
        }
        Ok(id)
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let gone = || FabricError::misuse(format!("{request:?} is unknown, or the peer has given it up"));
        let (event, cm, count) = self.take_request(request.0).ok_or_else(gone)?;
        let mut params = params.clone();
        params.responder_resources = params.responder_resources.min(event.responder_resources.into());
        params.initiator_depth = params.initiator_depth.min(event.initiator_depth.into());
        let possible = self.objects().and_then(|_| self.check_device(&cm)).and_then(|()| self.check_mtu(&cm));
        if let Err(error) = possible {
            reaper::dispose(cm);
            return Err(error);
        }
        let id = self.create_qp(&params, connect::ACCEPT_DATA, QpState::Accepting, cm)?;
        let result = self.completion.table.get(id).map_or(Ok(()), |qp| {
            qp.count = Some(count);
            qp.start(&self.config, self.device.choice.is_infiniband)?;
            qp.cm.accept(&params.private_data, qp.parameters(&self.config))
        });
        if let Err(error) = result {
            self.destroy_qp(id);
            return Err(FabricError::system("rdma_accept", error));
        }
        Ok(id)
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        let Some((_, cm, _)) = self.take_request(request.0) else { return };
        connect::reject(&cm, &private_data[..private_data.len().min(connect::REJECT_DATA)]);
        reaper::dispose(cm);
    }

    fn disconnect(&mut self, id: QpId) {
        let Some(qp) = self.completion.table.get(id) else { return };
        match qp.state {
            QpState::Up => {
                qp.state = QpState::Closing;
                qp.deadline = Some(Instant::now() + self.config.linger);
                self.completion.post_marker(id, &mut self.context);
                self.completion.attention.push(id.slot);
            }
            QpState::Connecting => self.fail_connect(id, FabricError::misuse("given up by this side")),
            QpState::Accepting => self.end_connection(id, Disconnect::Local, "given up by this side"),
            QpState::Closing | QpState::Ended | QpState::Failed => {}
        }
    }

    fn destroy_qp(&mut self, id: QpId) {
        let Some(qp) = self.completion.table.get(id) else { return };
        if !matches!(qp.state, QpState::Connecting | QpState::Failed | QpState::Ended) {
            // An error means that both sides have closed already.
            let _ = qp.cm.disconnect();
        }
        qp.state = QpState::Ended;
        qp.stop();
        if qp.error_state.was_ready {
            self.drain_completions(id);
        }
        let Some(gone) = self.completion.remove(id) else { return };
        let VerbsQp { mut queues, cm, .. } = *gone;
        self.completion.room += queues.destroy(&mut self.completion.ready);
        reaper::dispose(cm);
        self.completion.attention.retain(|&slot| slot != id.slot);
        // The caller needs no `Disconnected` event.
        self.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.context.log.sum_up();
        let tokens = self.sleeper.wait::<TOKENS>(Some(Duration::ZERO));
        let has = |source| tokens.clone().into_iter().flatten().any(|token| token == source);
        if has(DEVICE_EVENTS) {
            self.device_events();
        }
        // Excess requests wait in the kernel, whose queue is also bounded.
        if !reaper::is_behind()
            && let Some((channel, accepted)) = self.listener.as_ref().and_then(Listening::take_handed_over)
        {
            accepted.into_iter().for_each(|request| self.add_request(request));
            if has(REQUESTS) {
                self.channel_events(&channel);
            }
        }
        if has(CONNECTIONS) {
            let channel = Arc::clone(&self.device.channel);
            self.channel_events(&channel);
        }
        self.process_attention();
        self.recover();
        events.append(&mut self.events);
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        if !self.device.quirks.has_windows {
            return Err(FabricError::misuse(format!(
                "{} has no type-2 memory windows (`ibv_devinfo -v`), without which no memory is exposed to peers",
                self.device.capabilities.device
            )));
        }
        self.completion.table.find(qp)?.queues.windows.add(qp)
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.completion.table.peek(window.qp).and_then(|qp| qp.queues.windows.next_rkey(window.index)).unwrap_or(0)
    }

    #[inline]
    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        (mem.address() + offset) as u64
    }

    #[inline]
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let CompletionState { table, shared, ready, stats, room, .. } = &mut self.completion;
        let posted = match qp {
            None => shared.post(&self.context.regions, bufs, *room),
            Some(id) => {
                let Some(qp) = table.get(id) else { return 0 };
                if matches!(qp.state, QpState::Ended | QpState::Failed) && !qp.queues.shares_receives() {
                    // Some devices do not flush requests posted this late.
                    let n = bufs.iter().take_while(|buf| self.context.regions.get(buf.arena()).is_some()).count();
                    ready.extend(bufs.drain(..n).map(|buf| Completion::failed_receive(id, Status::Flushed, buf)));
                    return n;
                }
                qp.queues.post_recv(&self.context.regions, bufs, *room)
            }
        };
        stats.recv_posts += posted as u64;
        *room -= posted;
        posted
    }

    #[inline]
    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let CompletionState { table, room, .. } = &mut self.completion;
        let Some(qp) = table.get(qp).filter(|qp| qp.takes_requests()) else {
            return Err(PostError::NotConnected);
        };
        let before = chain.len();
        let result = qp.queues.post(&mut self.context, chain, *room);
        *room -= before - chain.len();
        result
    }

    fn post_immediate(&mut self, qp: QpId, posting: Posting, immediate: u32) -> bool {
        let CompletionState { table, room, .. } = &mut self.completion;
        let Some(qp) = table.get(qp).filter(|qp| qp.takes_requests() && *room > 0) else { return false };
        let posted = qp.queues.post_immediate(&mut self.context, posting, immediate);
        *room -= usize::from(posted);
        posted
    }

    #[inline]
    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        if !self.completion.ready.is_empty() {
            Completion::hand_out(&mut self.completion.ready, out, start.saturating_add(max));
        }
        let room = max - (out.len() - start);
        if room > 0 && self.poll_device(out, room) == 0 {
            let empty_polls = &mut self.completion.empty_polls;
            *empty_polls += 1;
            if self.device.quirks.works_on_our_cores && empty_polls.is_multiple_of(POLLS_PER_YIELD) {
                std::thread::yield_now();
            }
        }
        out.len() - start
    }

    fn arm(&mut self) {
        if let Some(Err(error)) = self.device.objects.as_ref().map(|objects| objects.cq.arm()) {
            log::error!("ibv_req_notify_cq: {error}");
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let limit = self.longest_wait();
        // After a signal the caller polls, finds nothing, and returns.
        let tokens = self.sleeper.wait::<TOKENS>(shorter(timeout, limit));
        let has = |source| tokens.clone().into_iter().flatten().any(|token| token == source);
        if has(COMPLETIONS)
            && let Some(objects) = &self.device.objects
        {
            objects.cq.take_event();
        }
        if has(Sleeper::WAKER) {
            self.sleeper.clear_waker();
        }
        let member = self.listener.as_ref().and_then(|listening| listening.member.as_ref());
        let handed_over = member.is_some_and(BalancerMember::has_handed_over);
        limit.is_some() || handed_over || [CONNECTIONS, REQUESTS, DEVICE_EVENTS].into_iter().any(has)
    }

    fn waker(&self) -> Waker {
        self.sleeper.waker()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.sleeper.descriptor()
    }

    fn longest_wait(&self) -> Option<Duration> {
        if !self.completion.ready.is_empty() || !self.events.is_empty() {
            Some(Duration::ZERO)
        } else if !self.completion.attention.is_empty() {
            Some(TICK)
        } else {
            self.lost.as_ref().map(|_| if self.device.objects.is_some() { TICK } else { RECOVERY_INTERVAL })
        }
    }
}
