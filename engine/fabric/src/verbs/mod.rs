//! The fabric over libibverbs and librdmacm.
//!
//! The fabric supports InfiniBand, RoCE and soft-RoCE. The address `verbs:HOST:PORT` picks the device.
//! `verbs:DEVICE@HOST:PORT` and `verbs:DEVICE/GID@HOST:PORT` name the device.
//!
//! # Structure
//! - `sys` wraps the objects of the two libraries, and only `sys` calls them. `work_queues` and `receives` own the
//!   memory in use by the device. Apart from `sys`, only these two modules have `unsafe` code.
//! - A fabric opens its device for itself alone: one context, one protection domain, one completion queue, one shared
//!   receive queue. Shards share none of these, so no locks are needed besides those of the libraries.
//! - This module creates and modifies queue pairs, and the connection manager only carries the messages of `connect`.
//!   Receives can therefore be posted to a queue pair before its connection exists. The queue pair lives until the
//!   device has returned all memory.
//! - Memory is registered without remote rights. A peer reaches only the memory of type-2 windows (`window`) that are
//!   bound on its queue pair. Either side revokes a window by invalidation.
//! - A lost device is closed when its connections have ended, because a driver may wait for the close before it removes
//!   the device. After that, the fabric looks for the device once a second, by its configured address or name. When the
//!   device is present again, the fabric opens it, registers all memory with it, and binds the listening address again
//!   if the binding was lost. The shard posts the Receives that the old queue has returned.
//! - All work completes in one completion queue. A post never exceeds the capacity of this queue, whose free entries
//!   `CompletionState::room` counts.
//!
//! # Devices
//! iWARP devices are refused ([`Unsupported`](crate::FabricErrorKind::Unsupported)). They have no memory windows, so
//! each exposure would need a registration. With iWARP, the target of this side's RDMA Read must be open to the peer's
//! RDMA Writes (RFC 5040 §5), and rights apply to a whole region. A peer that learns the key of one target could
//! therefore write to the whole pool.
//!
//! `quirks` lists the devices' deviations from the specification. Soft-RoCE does not check window bounds, so its peers
//! reach a whole arena while one window of it is bound. See [`Capabilities::checks_window_bounds`].

mod completion;
mod config;
mod connect;
mod device;
mod drain;
mod errors;
mod listener;
mod number_map;
mod opened_device;
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

use self::completion::CompletionState;
pub use self::config::{FeatureMode, VerbsConfig};
use self::listener::Listening;
pub use self::listener::VerbsListener;
use self::opened_device::{OpenedDevice, SharedObjects};
use self::qp::{VerbsQp, VerbsQpState};
use self::region::MemoryRegions;
use self::sys::{CmEvent, CmId};
use self::work_queues::PostContext;
use super::accept_balancer::{Accepted, BalancerMember};
use super::epoll_set::{EpollSet, shorter};
use super::host;
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, DeviceEvent, Disconnect, Fabric, FabricAddress,
    FabricError, FabricStats, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
};

/// Addresses of this host's active RoCE ports, at which servers can listen. Empty on a host without such a port.
pub fn local_addresses() -> Vec<std::net::IpAddr> {
    device::addresses(&device::ports())
}

/// The NUMA node of this configuration's device. `None` if the kernel does not know the node, or if the device is
/// absent. Opening the fabric reports the absence.
pub fn numa_node(config: &VerbsConfig) -> Option<u32> {
    let config = config.clone().with_device_of_address().ok()?;
    opened_device::choose(&device::ports(), &config).ok().and_then(|choice| device::numa_node(&choice.device))
}

/// Tokens of the [`EpollSet`] for completions, connection events, connect requests, and asynchronous events.
const COMPLETIONS: u64 = 1;
const CONNECTIONS: u64 = 2;
const REQUESTS: u64 = 3;
const DEVICE_EVENTS: u64 = 4;
/// Number of tokens, including the waker's.
const TOKENS: usize = 5;

/// Longest sleep while a connection closes.
const TICK: Duration = Duration::from_millis(1);
/// Interval between checks for a lost device.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(1);
/// Empty polls after which the thread yields its core to a software device.
const POLLS_PER_YIELD: u64 = 16;

/// One shard's device of the verbs fabric; see the module documentation.
pub struct VerbsFabric {
    // The fields are in drop order: queue pairs before the objects that they use.
    /// Unanswered connect requests, by their numbers.
    requests: BTreeMap<u64, Accepted<CmEvent>>,
    completion: CompletionState,
    context: PostContext,
    listener: Option<Listening>,
    sleeper: EpollSet,
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
    /// Whether removal events of the device were watched. The reopened device must also be watched, because a device in
    /// removal can still be opened.
    was_watched: bool,
}

impl VerbsFabric {
    /// The scheme of its addresses, before the colon.
    pub const SCHEME: &'static str = "verbs";

    /// Opens the fabric for one shard.
    ///
    /// # Errors
    /// A call fails, the device is missing, or an address and a field name different devices. The text has the limit
    /// found and the remedy, or the existing devices. [`Unsupported`](crate::FabricErrorKind::Unsupported) if the named
    /// device is iWARP, or the host has only iWARP devices.
    pub fn new(config: VerbsConfig) -> Result<Self, FabricError> {
        config.check()?;
        let config = config.with_device_of_address()?;
        let (device, receives, room) = OpenedDevice::open(&config, None)?;
        let sleeper = EpollSet::new()?;
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

    /// Takes up to `max` completions from the device. Returns their number.
    #[inline]
    fn poll_device(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let (Some(objects), completion) = (&self.device.objects, &mut self.completion) else { return 0 };
        objects.cq.poll(max, |done| completion.complete(done, out)).unwrap_or_else(|error| {
            // The completions of all connections are lost.
            completion.fail_all(Disconnect::Failure, || format!("ibv_poll_cq: {error}"));
            0
        })
    }

    /// Handles the loss of the device, which ends all its connections. Only the first report counts, because each
    /// identifier and queue may report the loss.
    fn handle_device_loss(&mut self, event: DeviceEvent) {
        let (Some(objects), None) = (&self.device.objects, &self.lost) else { return };
        let was_watched = objects.watch.is_some();
        let name = &self.device.choice.device;
        self.completion.fail_all(Disconnect::Device, || format!("{name}: {event}"));
        self.completion.stats.device_failures += 1;
        self.events.push(ControlEvent::Device(event));
        if let Some(listening) = &mut self.listener {
            // Requests then go to the other fabrics of the address, which may use another device.
            listening.leave(&self.sleeper);
            if event == DeviceEvent::Removed {
                listening.handle_device_removal(name);
            }
        }
        // The count of the lost device is kept, because the reopened device counts anew.
        self.completion.stats.receiver_not_ready += self.device.receiver_not_ready();
        self.device.initial_receiver_not_ready = u64::MAX;
        self.lost = Some(DeviceLoss { event, next_check: Instant::now() + RECOVERY_INTERVAL, was_watched });
    }

    /// The objects of the device.
    ///
    /// # Errors
    /// The device is lost.
    fn objects(&self) -> Result<&SharedObjects, FabricError> {
        if let (Some(objects), None) = (&self.device.objects, &self.lost) {
            return Ok(objects);
        }
        let event = self.lost.as_ref().map_or(DeviceEvent::Failed, |lost| lost.event);
        let detail = format!("{event}, and has not returned (`rdma link`); checked once a second");
        Err(FabricError::system(format!("using {}", self.device.choice.device), detail))
    }

    /// Closes a lost device once its connections have ended. After that, looks for it and reopens it.
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
            log::info!("{}: device closed; checked once a second", self.device.choice.device);
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
                let line = format_args!("{}: reopening failed: {error}", self.device.choice.device);
                self.context.log.warn("failures of reopening devices", line);
            }
        }
    }

    /// Opens the device and restores this fabric's state on it.
    fn reopen(&mut self) -> Result<(), FabricError> {
        let mut config = (*self.config).clone();
        if config.address.is_none() {
            // Without a name, another device could be chosen.
            config.device.get_or_insert_with(|| self.device.choice.device.clone());
        }
        let (mut found, receives, room) = OpenedDevice::open(&config, Some(&self.device.channel))?;
        if let Err(error) = self.attach(&found) {
            drop(receives);
            self.context.regions.close();
            found.close(&self.sleeper, false);
            return Err(error);
        }
        // Counters and the table of queue pairs stay.
        let CompletionState { shared, room: free, is_port_down, invalidated_flags, .. } = &mut self.completion;
        (*shared, *free, *is_port_down, *invalidated_flags) = (receives, room, false, found.quirks.invalidated_flags);
        self.device = found;
        Ok(())
    }

    /// Registers memory and descriptors with a reopened device, and binds the address again.
    fn attach(&mut self, found: &OpenedDevice) -> Result<(), FabricError> {
        let Some(objects) = &found.objects else { return Ok(()) };
        let refused = |detail: &str| {
            let call = format!("reopening {}", found.choice.device);
            Err(FabricError::system(call, detail))
        };
        // Capabilities that peers know or that the layout of memory depends on.
        let guarantees = |device: &OpenedDevice| {
            let capabilities = &device.capabilities;
            (capabilities.remote_invalidate, capabilities.exposure_needs_own_arena, capabilities.checks_window_bounds)
        };
        if guarantees(&self.device) != guarantees(found) {
            return refused("its capabilities have changed: restart the program");
        }
        if self.lost.as_ref().is_some_and(|lost| lost.was_watched) && objects.watch.is_none() {
            return refused("the connection manager does not know the device yet");
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
        let (stats, FabricStats { posts, doorbells, signaled, .. }) = (&self.completion.stats, self.context.stats);
        let receiver_not_ready = stats.receiver_not_ready + self.device.receiver_not_ready();
        FabricStats { posts, doorbells, signaled, receiver_not_ready, ..*stats }
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
            return Err(FabricError::misuse("this fabric is already listening"));
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
        if reaper::is_backlogged() {
            let detail = "the kernel has not yet destroyed earlier connections (rdma_destroy_id): try again later";
            return Err(FabricError::system("rdma_create_id", detail));
        }
        self.objects()?;
        let from = self.device.source(&self.config);
        if let Some(from) = from.filter(|from| from.is_ipv4() != to.is_ipv4()) {
            let detail = format!("the address family differs from that of the chosen GID {from}");
            return Err(FabricError::address(&address.0, detail));
        }
        if let Some(mtu) = self.config.path.path_mtu.filter(|_| self.device.choice.is_infiniband) {
            let why = "on InfiniBand the subnet manager sets it for each partition, and only servers can bound it";
            return Err(FabricError::misuse(format!("path_mtu = {mtu}: {why}")));
        }
        let cm = CmId::new(&self.device.channel, reaper::NO_OWNER);
        let cm = cm.map_err(|e| errors::open_error("rdma_create_id", &e))?;
        let id = self.create_qp(params, connect::CONNECT_DATA, VerbsQpState::Connecting, cm)?;
        let timeout = connect::milliseconds(self.config.resolve_timeout);
        let result = self.completion.table.get_mut(id).map_or(Ok(()), |qp| {
            qp.enter_init(self.device.choice.port)?;
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
        let unknown = || FabricError::misuse(format!("{request:?} is unknown, or the peer has canceled it"));
        let (event, cm, count) = self.take_request(request.0).ok_or_else(unknown)?;
        let mut params = params.clone();
        params.responder_resources = params.responder_resources.min(event.responder_resources.into());
        params.initiator_depth = params.initiator_depth.min(event.initiator_depth.into());
        let checked = self.objects().and_then(|_| self.check_device(&cm)).and_then(|()| self.check_mtu(&cm));
        if let Err(error) = checked {
            reaper::dispose(cm);
            return Err(error);
        }
        let id = self.create_qp(&params, connect::ACCEPT_DATA, VerbsQpState::Accepting, cm)?;
        let result = self.completion.table.get_mut(id).map_or(Ok(()), |qp| {
            qp.count = Some(count);
            qp.enter_ready(&self.config, self.device.choice.is_infiniband)?;
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
        let Some(qp) = self.completion.table.get_mut(id) else { return };
        match qp.state {
            VerbsQpState::Up => {
                qp.state = VerbsQpState::Closing;
                qp.deadline = Some(Instant::now() + self.config.linger);
                self.completion.post_marker(id, &mut self.context);
                self.completion.attention.push(id.slot);
            }
            VerbsQpState::Connecting => self.fail_connect(id, FabricError::misuse("canceled by this side")),
            VerbsQpState::Accepting => self.end_connection(id, Disconnect::Local, "canceled by this side"),
            VerbsQpState::Closing | VerbsQpState::Ended | VerbsQpState::Failed => {}
        }
    }

    fn destroy_qp(&mut self, id: QpId) {
        let Some(qp) = self.completion.table.get_mut(id) else { return };
        if !matches!(qp.state, VerbsQpState::Connecting | VerbsQpState::Failed | VerbsQpState::Ended) {
            // An error means that both sides have already closed.
            let _ = qp.cm.disconnect();
        }
        qp.state = VerbsQpState::Ended;
        qp.enter_error();
        if qp.error_state.was_ready {
            self.drain_completions(id);
        }
        let Some(qp) = self.completion.remove(id) else { return };
        let VerbsQp { mut queues, cm, .. } = *qp;
        self.completion.room += queues.destroy(&mut self.completion.ready);
        reaper::dispose(cm);
        self.completion.attention.retain(|&slot| slot != id.slot);
        // The caller needs no `Disconnected` event.
        self.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.context.log.report_suppressed();
        let tokens = self.sleeper.wait::<TOKENS>(Some(Duration::ZERO));
        let has = |source| tokens.clone().into_iter().flatten().any(|token| token == source);
        if has(DEVICE_EVENTS) {
            self.process_device_events();
        }
        // Excess requests wait in the kernel, whose queue is also bounded.
        if !reaper::is_backlogged()
            && let Some((channel, accepted)) = self.listener.as_ref().and_then(Listening::take_handed_over)
        {
            accepted.into_iter().for_each(|request| self.add_request(request));
            if has(REQUESTS) {
                self.process_channel_events(&channel);
            }
        }
        if has(CONNECTIONS) {
            let channel = Arc::clone(&self.device.channel);
            self.process_channel_events(&channel);
        }
        self.process_attention();
        self.recover();
        events.append(&mut self.events);
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        if !self.device.quirks.has_windows {
            return Err(FabricError::misuse(format!(
                "{} has no type-2 memory windows (`ibv_devinfo -v`), which exposing memory to peers needs",
                self.device.capabilities.device
            )));
        }
        self.completion.table.require_mut(qp)?.queues.windows.add(qp)
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.completion.table.get(window.qp).and_then(|qp| qp.queues.windows.next_rkey(window.index)).unwrap_or(0)
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
                let Some(qp) = table.get_mut(id) else { return 0 };
                if matches!(qp.state, VerbsQpState::Ended | VerbsQpState::Failed) && !qp.queues.shares_receives() {
                    // Some devices do not flush requests that are posted in the error state.
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
        let Some(qp) = table.get_mut(qp).filter(|qp| qp.accepts_posts()) else {
            return Err(PostError::NotConnected);
        };
        let before = chain.len();
        let result = qp.queues.post(&mut self.context, chain, *room);
        *room -= before - chain.len();
        result
    }

    fn post_immediate(&mut self, qp: QpId, posting: Posting, immediate: u32) -> bool {
        let CompletionState { table, room, .. } = &mut self.completion;
        let Some(qp) = table.get_mut(qp).filter(|qp| qp.accepts_posts() && *room > 0) else { return false };
        let posted = qp.queues.post_immediate(&mut self.context, posting, immediate);
        *room -= usize::from(posted);
        posted
    }

    #[inline]
    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        if !self.completion.ready.is_empty() {
            Completion::drain_ready(&mut self.completion.ready, out, start.saturating_add(max));
        }
        let room = max - (out.len() - start);
        if room > 0 && self.poll_device(out, room) == 0 {
            let empty_polls = &mut self.completion.empty_polls;
            *empty_polls += 1;
            if self.device.quirks.is_software && empty_polls.is_multiple_of(POLLS_PER_YIELD) {
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
        // A signal ends the wait without tokens, which is harmless because the caller polls anyway.
        let tokens = self.sleeper.wait::<TOKENS>(shorter(timeout, limit));
        let has = |source| tokens.clone().into_iter().flatten().any(|token| token == source);
        if has(COMPLETIONS)
            && let Some(objects) = &self.device.objects
        {
            objects.cq.take_event();
        }
        if has(EpollSet::WAKER) {
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
