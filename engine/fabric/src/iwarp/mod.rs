//! iWARP in user space over plain TCP (RFC 5040, 5041, 5044, 6581). It needs no device, privilege or C library.
//!
//! A peer is this fabric on another host, the Linux kernel's soft-iWARP, or an iWARP adapter. A connection is an
//! ordinary TCP socket, and the polling thread does the work of an adapter. It places messages into posted Receives,
//! and Writes and Read Responses into the memory that they name, after it has checked key, bounds and rights.
//!
//! # Design
//! | file | holds |
//! | --- | --- |
//! | [`wire`] | the codec of MPA frames, DDP segments and Terminates |
//! | `rdmap_stream` | the rules of one connection, without I/O: checks, placement, output |
//! | `setup` | negotiation before the first FPDU |
//! | `qp` | one queue pair: moves bytes between its RDMAP stream and its socket, and ends both |
//! | `connect`, `listener` | connection setup |
//! | `sys` | the byte stream below a connection, and system calls on its socket |
//! | `config` | the knobs |
//!
//! # System calls
//! The polling thread makes system calls, because a socket has no other notification. Up to four recently active
//! connections are read in each turn with one call each, even while they are silent. If more connections are active,
//! one `epoll_wait` per turn lists those with input. One `epoll_wait` in every 16th turn covers all idle connections.
//! A turn's output to one peer leaves in one `sendmsg`. One `recvmsg` reads many messages.
//!
//! Payloads are sent in place. Once the header of a long segment has arrived, the rest of its payload is received
//! directly into its destination. Shorter payloads are copied from a buffer that all connections share.
//!
//! # Completions
//! A Send or Write completes when the socket has taken its last byte, because TCP buffers bytes (RFC 5040 §5.5). A
//! refusal by the peer ends the connection, so [`Capabilities::acknowledges`] is false.
//!
//! iWARP has no receiver-not-ready. A message without a Receive stays in the socket for as long as `rnr_retry` allows,
//! at most `retry_timeout`, while TCP's flow control stops the peer. After that, a Terminate ends the stream. An
//! overloaded shard that briefly has no Receive therefore loses no connection, and a peer that sends beyond its credits
//! does not wait without limit.
//!
//! # End of a connection
//! A closing side sends all posted requests, then a FIN. A peer's FIN ends the connection, because such a peer cannot
//! reply any more. That includes a half-close (`shutdown(SHUT_WR)`), which RFC 5041 §6.2.1 lets an upper layer see.
//! Data received before the FIN is delivered. Output is still sent only if it is already in the socket. The remaining
//! requests are flushed, as after a reset. An initiator that half-closes after its last call therefore gets
//! no reply.
//!
//! # Threat model
//! Windows have exact bounds and rights, which are checked for each segment. Their keys are valid for one connection
//! and one bind. Peers can reach no other memory: an RDMA Read of this side gives the peer an STag that is valid only
//! for its Read Response. [`IwarpFabricConfig`] bounds the memory that a peer can hold. An incomplete message holds one
//! Receive for at most `retry_timeout`, and bytes without a destination are at most 64 KiB, for the same time.
//!
//! **iWARP neither encrypts nor authenticates.** An attacker on the network path can read and change all traffic. Host
//! authentication of RPC-over-RDMA version 2 authenticates the peer. Confidentiality needs a network that provides it
//! (IPsec, WireGuard, a separate VLAN).

mod config;
mod connect;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[path = "../../tests/harness/iwarp_fuzz.rs"]
pub mod fuzz;
mod listener;
#[cfg(any(test, feature = "testing"))]
#[path = "../../tests/harness/iwarp_memory.rs"]
pub mod memory;
mod qp;
mod rdmap_stream;
mod setup;
mod sys;
pub mod wire;

use std::collections::VecDeque;
use std::mem::{MaybeUninit, replace};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventFlags};
use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

pub use self::config::{Crc, FpduSize, IwarpFabricConfig, MAX_READ_DEPTH};
pub use self::listener::IwarpListener;
use self::qp::{FabricState, IDLE, IwarpQp, IwarpQpState, SCRATCH};
use self::rdmap_stream::{Arenas, SharedResources, StreamFailure};
use super::connection_manager::{ConnectionManager, Control, ManagedFabric, ManagerConfig, Token};
use super::error::failed;
use super::forward::over_sockets;
use super::qp_table::QpTable;
use super::receives::ReceiveQueue;
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Waker, WindowId,
};

/// Maximum number of hot connections that are read in each turn without `epoll_wait`.
const MAX_DIRECTLY_READ: usize = 4;
/// Polls of the fabric between two polls of idle connections.
const IDLE_POLL_INTERVAL: u64 = 16;
/// Maximum number of epoll events handled in one poll.
const EVENTS: usize = 64;

/// One shard's device of the iWARP fabric; see the module documentation.
#[derive(Debug)]
pub struct IwarpFabric {
    common: FabricState,
    table: QpTable<IwarpQp>,
    /// Recently active queue pairs, in the order of their next polls.
    hot: VecDeque<u32>,
    /// Queue pairs with unconsumed bytes, because a Receive or room for completions is missing. Epoll does not report
    /// them.
    unread: VecDeque<u32>,
    /// Index of the event with which the next poll of the epoll set begins. Epoll reports ready sockets in the same
    /// order each time, so the last ones would starve while the first ones fill the room for completions.
    first_event: usize,
    /// Whether the next poll covers all queue pairs.
    polls_all: bool,
    capabilities: Capabilities,
    connections: ConnectionManager<FabricState>,
}

impl IwarpFabric {
    /// The scheme of its addresses, before the colon.
    pub const SCHEME: &'static str = "iwarp";

    /// Opens the fabric for one shard.
    pub fn new(config: IwarpFabricConfig) -> Result<Self, FabricError> {
        config.check()?;
        let sockets = epoll::create(CreateFlags::CLOEXEC).map_err(|e| failed("epoll_create", e))?;
        let capabilities = capabilities(&config);
        let IwarpFabricConfig { max_handshakes, handshake_timeout, linger, max_closing, .. } = config;
        let connections =
            ConnectionManager::new(ManagerConfig { max_handshakes, handshake_timeout, linger, max_closing })?;
        connections.sockets.epoll_set.add(&sockets, Token::Qp(QpId::NONE), EventFlags::IN)?;
        Ok(Self {
            connections,
            common: FabricState {
                shared: SharedResources {
                    arenas: Arenas::default(),
                    receives: ReceiveQueue::new(config.shared_receives),
                    stats: FabricStats::default(),
                },
                ready: VecDeque::with_capacity(64),
                control: Control::default(),
                sockets,
                scratch: vec![0; SCRATCH].into(),
                polls: 0,
                config,
            },
            table: QpTable::default(),
            hot: VecDeque::new(),
            unread: VecDeque::new(),
            first_event: 0,
            polls_all: false,
            capabilities,
        })
    }

    /// Polls one queue pair and schedules its next polls.
    #[inline]
    fn poll_qp(&mut self, slot: u32, out: &mut Vec<Completion>, end: usize) {
        let Some(qp) = self.table.get_by_slot_mut(slot) else { return };
        if qp.poll(&mut self.common, out, end) {
            self.mark_unread(slot);
        } else if qp.last_active == self.common.polls && !qp.hot {
            self.make_hot(slot);
        }
    }

    /// Polls the hot connections until there is no room for completions. Those that have become idle stop being hot.
    #[inline]
    fn poll_hot(&mut self, out: &mut Vec<Completion>, end: usize) {
        for _ in 0..self.hot.len() {
            if out.len() >= end {
                return;
            }
            let Some(slot) = self.hot.pop_front() else { return };
            self.poll_qp(slot, out, end);
            if let Some(qp) = self.table.get_by_slot_mut(slot) {
                qp.hot = qp.is_active(&self.common);
                if qp.hot {
                    self.hot.push_back(slot);
                }
            }
        }
    }

    /// Polls the connections that epoll reports. Hot ones are skipped unless `includes_hot`.
    #[inline(never)]
    fn poll_ready(&mut self, out: &mut Vec<Completion>, end: usize, includes_hot: bool) {
        let mut space = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // If a signal interrupted the call, the next poll finds the events.
        let Ok((ready, _)) = epoll::wait(&self.common.sockets, &mut space, Some(&now)) else { return };
        let stats = &mut self.common.shared.stats;
        *(if ready.is_empty() { &mut stats.empty_system_calls } else { &mut stats.system_calls }) += 1;
        let first = self.first_event % ready.len().max(1);
        for (at, event) in (first..).zip(ready[first..].iter().chain(&ready[..first])) {
            if out.len() >= end {
                // Epoll reports the remaining events again.
                self.first_event = at;
                return;
            }
            let slot = event.data.u64() as u32;
            match self.table.get_by_slot_mut(slot) {
                Some(qp) if qp.stalled => qp.handle_hangup(&mut self.common, event.flags),
                Some(qp) if includes_hot || !qp.hot => self.poll_qp(slot, out, end),
                _ => {}
            }
        }
    }

    /// Polls connections with unconsumed bytes until there is no room for completions.
    #[cold]
    fn poll_unread(&mut self, out: &mut Vec<Completion>, end: usize) {
        for _ in 0..self.unread.len() {
            if out.len() >= end {
                return;
            }
            let Some(slot) = self.unread.pop_front() else { return };
            let Some(qp) = self.table.get_by_slot_mut(slot) else { continue };
            qp.unread = false;
            // Without a Receive a poll would only count a retry. An `rnr_retry` of 7 allows any number of them.
            let is_polled = !qp.is_live() || !qp.stalled || qp.rdmap.rnr_retry < ConnectParams::UNLIMITED_RNR_RETRY;
            if is_polled || qp.rdmap.has_receive(&self.common.shared) {
                self.poll_qp(slot, out, end);
            } else {
                self.mark_unread(slot);
            }
        }
    }

    /// Lets the next poll continue with this queue pair's unconsumed bytes.
    #[cold]
    fn mark_unread(&mut self, slot: u32) {
        if let Some(qp) = self.table.get_by_slot_mut(slot)
            && !replace(&mut qp.unread, true)
        {
            self.unread.push_back(slot);
        }
    }

    /// Polls this queue pair in every turn from now on.
    fn make_hot(&mut self, slot: u32) {
        if let Some(qp) = self.table.get_by_slot_mut(slot)
            && !replace(&mut qp.hot, true)
        {
            qp.last_active = self.common.polls;
            self.hot.push_back(slot);
        }
    }
}

/// Capabilities of iWARP connections, over any byte stream.
fn capabilities(config: &IwarpFabricConfig) -> Capabilities {
    Capabilities {
        scheme: IwarpFabric::SCHEME,
        device: "iWARP over TCP (user space)".to_owned(),
        max_send_wr: 1 << 16,
        max_recv_wr: config.shared_receives as u32,
        max_message: config.max_message as u32,
        max_connect_private_data: setup::PRIVATE_DATA,
        max_accept_private_data: setup::PRIVATE_DATA,
        max_read_depth: config.read_depth,
        acknowledges: false,
        ..Capabilities::default()
    }
}

impl Fabric for IwarpFabric {
    type Listener = IwarpListener;

    over_sockets!();

    fn stats(&self) -> FabricStats {
        FabricStats { requests_refused: self.common.control.requests_refused, ..self.common.shared.stats }
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

    /// Bytes that the socket has not yet taken stay in the posted memory.
    fn holds_sends(&mut self, id: QpId) -> bool {
        self.table.get_mut(id).is_some_and(|qp| qp.rdmap.outbound.is_busy())
    }

    fn round_trip(&mut self, id: QpId) -> Option<Duration> {
        sys::round_trip(self.table.get_mut(id)?.socket()?)
    }

    fn disconnect(&mut self, id: QpId) {
        let Some(qp) = self.table.get_mut(id) else { return };
        match qp.state {
            IwarpQpState::Up => {
                qp.state = IwarpQpState::Closing;
                qp.deadline = Some(Instant::now() + self.common.config.linger);
                self.common.control.attention.push(id.slot);
            }
            IwarpQpState::Connecting => self.abandon(id),
            IwarpQpState::Closing | IwarpQpState::Error => {}
        }
    }

    fn destroy_qp(&mut self, id: QpId) {
        let Some(mut qp) = self.table.remove(id) else { return };
        self.hot.retain(|&slot| slot != id.slot);
        self.unread.retain(|&slot| slot != id.slot);
        let has_unsent = qp.is_live() && qp.rdmap.outbound.buffer.len() > 0;
        if qp.state == IwarpQpState::Connecting {
            self.connections.forget_dial(id);
        }
        qp.fail(&mut self.common, StreamFailure::local("destroyed"));
        self.common.control.forget(id);
        if let Some(stream) = qp.stream
            && !has_unsent
        {
            self.connections.close(stream.socket);
        }
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.poll_events(events);
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        self.table.require_mut(qp)?.rdmap.windows.alloc(qp)
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.table.get(window.qp).and_then(|qp| qp.rdmap.windows.next(window.index)).unwrap_or(0)
    }

    fn fence_receives(&mut self) {
        self.common.shared.receives.fence();
    }

    // Posts and polls are not inlined: a function call costs little beside a system call, and the shard's loop over
    // other fabrics stays smaller.
    #[inline(never)]
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let FabricState { shared: SharedResources { arenas, receives, stats }, ready, .. } = &mut self.common;
        let (queue, ended) = match qp {
            None => (receives, None),
            Some(id) => {
                let Some(qp) = self.table.get_mut(id) else { return 0 };
                let Some(own) = qp.rdmap.own_receives.as_mut() else { return 0 };
                (own, (qp.state == IwarpQpState::Error).then_some(id))
            }
        };
        let n = queue.post_registered(bufs, |arena| arenas.contains(arena), ended, ready);
        stats.recv_posts += n as u64;
        n
    }

    #[inline(never)]
    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        self.table.get_mut(qp).ok_or(PostError::NotConnected)?.post(&mut self.common, chain)
    }

    #[inline(never)]
    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        let end = start.saturating_add(max);
        if !self.common.ready.is_empty() {
            Completion::drain_ready(&mut self.common.ready, out, end);
        }
        self.common.polls += 1;
        if !self.unread.is_empty() {
            // The rest of the room is left to the other connections.
            self.poll_unread(out, start.saturating_add(max.div_ceil(2)));
        }
        let has_many_hot = self.hot.len() > MAX_DIRECTLY_READ;
        let polls_idle = self.table.len() > self.hot.len() && self.common.polls.is_multiple_of(IDLE_POLL_INTERVAL);
        if replace(&mut self.polls_all, false) || has_many_hot || polls_idle {
            self.poll_ready(out, end, has_many_hot);
        }
        // If there are many hot connections, a rare poll of all of them removes the idle ones.
        if !has_many_hot || self.common.polls.is_multiple_of(IDLE) {
            self.poll_hot(out, end);
        }
        if !self.common.ready.is_empty() {
            Completion::drain_ready(&mut self.common.ready, out, end);
        }
        out.len() - start
    }

    /// Lets the next poll check all connections. Sockets need no arming.
    fn arm(&mut self) {
        self.polls_all = true;
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let is_due = self.sleep(timeout);
        self.polls_all = true;
        is_due
    }
}
