//! The fabric over libibverbs and librdmacm.
//!
//! It supports InfiniBand, RoCE and soft-RoCE. The address `verbs:HOST:PORT` picks the device. `verbs:DEVICE@HOST:PORT`
//! and `verbs:DEVICE/GID@HOST:PORT` name it.
//!
//! # Structure
//! - `sys` wraps the objects of the two libraries, and only `sys` calls them. `endpoint` and `receives` own the memory
//!   in use by the device. Apart from `sys`, only these two have `unsafe` code.
//! - A fabric opens its device for itself alone: one context, one protection domain, one completion queue, one shared
//!   receive queue. Shards share none of these, so only the libraries lock.
//! - Queue pairs are created and changed here, not by the connection manager, which only carries the messages of
//!   `connect`. A queue pair can therefore take Receives before its connection exists. It lives until this side has its
//!   memory back.
//! - Memory is registered without remote rights. A peer reaches only the memory of type-2 windows (`window`) that are
//!   bound on its queue pair. Either side revokes a window by invalidation.
//! - A lost device is closed when its connections have ended. It is reopened when it is present again
//!   (`device_recovery`). Memory and address stay the same.
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
mod device_recovery;
mod drain;
mod endpoint;
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
mod sleep;
mod sys;
mod window;
mod wr_id;

use std::sync::Arc;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use self::complete::CompletionState;
pub use self::config::{FeatureMode, VerbsConfig};
use self::device::Choice;
use self::device_recovery::{Lost, RECOVERY_INTERVAL};
use self::endpoint::Scratch;
use self::listener::Listening;
pub use self::listener::VerbsListener;
use self::opened::{OpenedDevice, SharedObjects};
use self::qp::State;
use self::quirks::Quirks;
use self::receives::SharedReceives;
use self::region::Regions;
use self::sleep::Source;
use self::sys::EventChannel;
use super::sleeper::{Sleeper, shorter};
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Disconnect, Fabric, FabricAddress, FabricError,
    FabricStats, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
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

/// Longest sleep while a connection closes.
const TICK: Duration = Duration::from_millis(1);
/// Empty polls between two yields of the core to a software device.
const POLLS_PER_YIELD: u64 = 16;

/// One shard's device of the verbs fabric; see the module documentation.
pub struct VerbsFabric {
    // In drop order: queue pairs before the objects that they use.
    requests: Vec<connect::Request>,
    completion: CompletionState,
    regions: Regions,
    listener: Option<Listening>,
    channel: Arc<EventChannel>,
    sleeper: Sleeper,
    /// `None` while the device is absent.
    device: Option<SharedObjects>,
    scratch: Scratch,
    events: Vec<ControlEvent>,
    next_request: u64,
    choice: Choice,
    is_infiniband: bool,
    /// Set while the device is removed or failed, until it is reopened.
    lost: Option<Lost>,
    capabilities: Capabilities,
    quirks: Quirks,
    config: Box<VerbsConfig>,
    /// The port's initial count of messages without a Receive.
    not_ready_before: u64,
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
        let OpenedDevice { opened, channel, srq, choice, is_infiniband, quirks, capabilities, room, not_ready } =
            OpenedDevice::open(&config, None)?;
        let sleeper = Sleeper::new()?;
        Source::Connections.watch(&sleeper, channel.fd())?;
        opened.wake(&sleeper)?;
        Ok(Self {
            requests: Vec::new(),
            completion: CompletionState::new(SharedReceives::new(srq, config.shared_receives), room, &quirks),
            regions: Regions::new(&opened.pd),
            listener: None,
            channel,
            sleeper,
            device: Some(opened),
            scratch: Scratch::default(),
            events: Vec::new(),
            next_request: 0,
            is_infiniband,
            lost: None,
            not_ready_before: not_ready,
            choice,
            capabilities,
            quirks,
            config: Box::new(config),
        })
    }

    /// Takes up to `max` completions from the device. Returns the count.
    #[inline]
    fn poll_device(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let (Some(device), completion) = (&self.device, &mut self.completion) else { return 0 };
        device
            .cq
            .poll(max, |done| completion.complete(&done, out))
            .unwrap_or_else(|error| unpollable(&error, completion))
    }
}

/// Fails all connections of a failed completion queue, because their completions are lost.
#[cold]
fn unpollable(error: &std::io::Error, completion: &mut CompletionState) -> usize {
    let attention = &mut completion.attention;
    completion
        .table
        .iter_mut()
        .for_each(|qp| qp.fail(attention, Disconnect::Failure, || format!("ibv_poll_cq: {error}")));
    0
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        let ids: Vec<QpId> = self.completion.table.iter().map(|qp| qp.id).collect();
        for id in ids {
            self.destroy(id);
        }
        self.completion.ready.clear();
        self.requests.drain(..).for_each(connect::Request::dispose);
    }
}

impl VerbsFabric {
    /// Longest permitted sleep.
    fn sleep_limit(&self) -> Option<Duration> {
        if !self.completion.ready.is_empty() || !self.events.is_empty() {
            Some(Duration::ZERO)
        } else if !self.completion.attention.is_empty() {
            Some(TICK)
        } else {
            self.lost.as_ref().map(|_| if self.device.is_some() { TICK } else { RECOVERY_INTERVAL })
        }
    }
}

impl Fabric for VerbsFabric {
    type Listener = VerbsListener;

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Counters. `receiver_not_ready` is the port's counter, so it includes other users of the port.
    fn stats(&self) -> FabricStats {
        let now = device::receiver_not_ready(&self.choice.device, self.choice.port);
        let receiver_not_ready = self.completion.stats.receiver_not_ready + now.saturating_sub(self.not_ready_before);
        FabricStats { receiver_not_ready, ..self.completion.stats }
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        self.regions.add(arena, access)
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if self.completion.table.iter().any(|qp| qp.endpoint.windows.exposes(arena)) {
            return Err(FabricError::still_bound(arena));
        }
        self.regions.remove(arena)
    }

    fn bind(address: &FabricAddress) -> Result<VerbsListener, FabricError> {
        VerbsListener::bind(address)
    }

    fn listen(&mut self, listener: &VerbsListener) -> Result<(), FabricError> {
        if self.listener.is_some() {
            return Err(FabricError::misuse("this fabric listens already"));
        }
        listener.check_named(&self.config, &self.choice.device)?;
        if let Some(from) = self.source()
            && !listener.address().is_unspecified()
            && listener.address() != from
        {
            return Err(FabricError::misuse(format!(
                "listening at {} with the GID of {from}: choose another GID, or none",
                listener.address()
            )));
        }
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
        if !self.quirks.has_windows {
            return Err(FabricError::misuse(format!(
                "{} has no type-2 memory windows (`ibv_devinfo -v`), without which no memory is exposed to peers",
                self.capabilities.device
            )));
        }
        self.completion.table.find(qp)?.endpoint.windows.add(qp)
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.completion.table.peek(window.qp).and_then(|qp| qp.endpoint.windows.next_rkey(window.index)).unwrap_or(0)
    }

    #[inline]
    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        (mem.address() + offset) as u64
    }

    #[inline]
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let CompletionState { table, shared, ready, stats, room, .. } = &mut self.completion;
        let posted = match qp {
            None => shared.post(&self.regions, bufs, *room),
            Some(id) => {
                let Some(qp) = table.get(id) else { return 0 };
                if matches!(qp.state, State::Over | State::Failed) && !qp.endpoint.shares_receives() {
                    // Some devices do not flush requests posted this late.
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
        let CompletionState { table, stats, room, .. } = &mut self.completion;
        let Some(qp) = table.get(qp).filter(|qp| qp.takes_requests()) else {
            return Err(PostError::NotConnected);
        };
        let before = chain.len();
        let result = qp.endpoint.post(&mut self.scratch, &self.regions, stats, chain, *room);
        *room -= before - chain.len();
        result
    }

    fn post_immediate(&mut self, qp: QpId, posting: Posting, immediate: u32) -> bool {
        let CompletionState { table, room, .. } = &mut self.completion;
        let Some(qp) = table.get(qp).filter(|qp| qp.takes_requests() && *room > 0) else { return false };
        let posted = qp.endpoint.post_immediate(&mut self.scratch, &self.regions, posting, immediate);
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
        if room > 0 {
            let taken = self.poll_device(out, room);
            if taken == 0 {
                self.completion.empty_polls += 1;
                if self.quirks.works_on_our_cores && self.completion.empty_polls.is_multiple_of(POLLS_PER_YIELD) {
                    std::thread::yield_now();
                }
            }
        }
        out.len() - start
    }

    fn arm(&mut self) {
        if let Some(Err(error)) = self.device.as_ref().map(|device| device.cq.arm()) {
            log::error!("ibv_req_notify_cq: {error}");
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let limit = self.sleep_limit();
        let happened = sleep::wait(&self.sleeper, shorter(timeout, limit));
        if happened[Source::Completions as usize]
            && let Some(device) = &self.device
        {
            device.cq.take_event();
        }
        if happened[Source::Waker as usize] {
            self.sleeper.clear_waker();
        }
        let control = [Source::Connections, Source::Listener, Source::Device];
        let handed_over = self.listener.as_ref().is_some_and(Listening::has_handed_over);
        limit.is_some() || handed_over || control.into_iter().any(|source| happened[source as usize])
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
