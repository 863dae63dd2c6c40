//! The software fabric: reliable connected queue pairs over shared memory.
//!
//! The fabric has the semantics and checks of a NIC: keys, bounds, rights, lengths, queue depths. It needs no
//! privileges, huge pages or device.
//!
//! # Design
//! - A connection is a Unix socket (`address`, `message`) and shared memory with one ring per direction (`memory`,
//!   `ring`). The connector creates this memory and passes its descriptor. It belongs to one queue pair, so no peer can
//!   harm the connection of another.
//! - A post copies the Send into the ring, and its buffer is free after that. A poll of the peer copies the message
//!   into a Receive.
//! - To expose memory, a side passes its descriptor to the peer, and writes an entry into a table of windows
//!   (`window`). The side that posts an RDMA Read or Write checks the entry and copies. Memory is exposed only if it is
//!   registered for remote access, and only once a window of the connection is bound to it.
//! - Polling threads make no system calls. The connection's socket wakes a sleeper (`doorbell`). A shared eventfd is
//!   not suitable, because any peer that has it could read it empty, and suppress the wake-ups of other peers.
//!
//! # Threat model
//! Peers run as the same user, or as root; others are refused. Still, each peer is treated as hostile. Each word of
//! shared memory is read once and then checked. Memory is mapped only if it cannot shrink. [`SoftwareConfig`] bounds
//! all resources of a peer. A violation ends the peer's own connection only.
//!
//! Windows are enforced by the side that copies. Once a window of an arena was exposed to a hostile peer, this peer can
//! therefore reach the *whole* arena at any time, even after revocation. Hence
//! [`Capabilities::exposure_needs_own_arena`] is set: exposed memory must come from an arena that only this peer ever
//! sees and that holds nothing else. The contents of exposed memory are never parsed in place.

#![forbid(unsafe_code)]

mod address;
mod config;
mod connect;
mod doorbell;
#[cfg(feature = "testing")]
#[doc(hidden)]
#[path = "../../tests/harness/software_fuzz.rs"]
pub mod fuzz;
#[cfg(all(test, loom))]
mod loom_tests;
mod memory;
mod message;
mod qp;
mod region;
mod ring;
#[cfg(test)]
mod tests;
mod window;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::Shutdown;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

pub use self::address::SoftwareListener;
pub use self::config::SoftwareConfig;
use self::message::SocketMessage;
use self::qp::{PollOutcome, SoftwareQp, SoftwareQpState};
use self::region::{PROCESS_BUDGET, PeerMemory, Region, Regions};
use self::window::OwnWindows;
use super::connection_manager::{ConnectionManager, Control, ManagedFabric, ManagerConfig, SocketInput};
use super::forward::over_sockets;
use super::qp_table::QpTable;
use super::receives::ReceiveQueue;
use super::{
    Access, Arrival, Capabilities, Completion, ConnectParams, ControlEvent, Disconnect, Fabric, FabricAddress,
    FabricError, FabricStats, Flow, Found, PostError, Posting, QpId, RequestId, Waker, WindowId,
};

/// Cold queue pairs checked per poll, and as many again after each one with work. One turn can therefore take a burst
/// from all of them. With a fixed number, a burst would take many turns, each longer than the last because active queue
/// pairs turn hot.
const COLD_POLLS: usize = 2;
/// Cold queue pairs checked in the poll after a full one, because an owner that is busy with messages polls rarely.
const COLD_POLLS_AFTER_FULL: usize = 16;

/// Prefetch distances: the queue pair, and later its next message, this many queue pairs ahead of the polled one.
const QP_PREFETCH_DISTANCE: usize = 8;
const MESSAGE_PREFETCH_DISTANCE: usize = 4;

/// State shared by all queue pairs of a fabric.
#[derive(Debug)]
pub(crate) struct SoftwareCommon {
    config: SoftwareConfig,
    /// The shared receive queue.
    receives: ReceiveQueue,
    /// Completions that are ready, such as flushed ones.
    ready: VecDeque<Completion>,
    control: Control,
    stats: FabricStats,
    regions: Regions,
    /// The number that peers will use for the next region.
    next_region: u32,
    peer_memory: PeerMemory,
    /// Whether a doorbell has rung since `arm`.
    doorbell_rang: bool,
    /// A descriptor that is closed before a message with the memory of a connected peer is received. If this process
    /// had no free descriptor, the kernel would drop that of the memory, and the connection would end.
    reserved_descriptor: Option<OwnedFd>,
}

impl SoftwareCommon {
    /// Reserves a descriptor, unless one is reserved or none is free.
    fn reserve_descriptor(&mut self) {
        if self.reserved_descriptor.is_none() {
            self.reserved_descriptor = eventfd(0, EventfdFlags::CLOEXEC).ok();
        }
    }
}

/// A destroyed queue pair whose peer is copying. Its memory is not reusable yet.
#[derive(Debug)]
struct ClosingQp {
    socket: Option<OwnedFd>,
    windows: OwnWindows,
    deadline: Instant,
}

impl ClosingQp {
    /// Whether the peer can no longer access the memory, or has timed out. Later accesses reach only the arena of this
    /// peer.
    fn is_released(&mut self, now: Instant) -> bool {
        let closed =
            self.socket.as_ref().is_none_or(|s| matches!(SocketMessage::receive(s.as_fd()), SocketInput::Closed));
        closed || self.deadline <= now || self.windows.revoke_all()
    }
}

/// One shard's device of the software fabric; see the module documentation.
#[derive(Debug)]
pub struct SoftwareFabric {
    common: SoftwareCommon,
    table: QpTable<SoftwareQp>,
    /// Queue pairs that every poll checks.
    hot: Vec<u32>,
    /// Start of the next poll in `hot`.
    turn: usize,
    /// Queue pairs that have been idle for long.
    cold: Vec<u32>,
    cold_turn: usize,
    /// Number of cold queue pairs that the next poll checks.
    cold_polls: usize,
    capabilities: Capabilities,
    connections: ConnectionManager<SoftwareCommon>,
    /// Destroyed queue pairs whose peers may still copy.
    closing: Vec<ClosingQp>,
}

impl SoftwareFabric {
    /// The word before the colon of its addresses.
    pub const SCHEME: &'static str = "soft";

    /// Opens the fabric for one shard.
    pub fn new(config: SoftwareConfig) -> Result<Self, FabricError> {
        config.check()?;
        let capabilities = Capabilities {
            scheme: Self::SCHEME,
            device: "software (shared memory)".to_owned(),
            max_send_wr: 1 << 16,
            max_recv_wr: config.shared_receives as u32,
            max_message: config.max_message as u32,
            max_connect_private_data: message::MAX_PRIVATE_DATA,
            max_accept_private_data: message::MAX_PRIVATE_DATA,
            max_read_depth: u16::MAX,
            exposure_needs_own_arena: true,
            ..Capabilities::default()
        };
        let SoftwareConfig { max_handshakes, handshake_timeout, linger, max_closing, .. } = config;
        Ok(Self {
            connections: ConnectionManager::new(ManagerConfig {
                max_handshakes,
                handshake_timeout,
                linger,
                max_closing,
            })?,
            closing: Vec::new(),
            common: SoftwareCommon {
                receives: ReceiveQueue::new(config.shared_receives),
                ready: VecDeque::with_capacity(64),
                control: Control::default(),
                stats: FabricStats::default(),
                regions: Regions::default(),
                next_region: 0,
                peer_memory: PeerMemory::new(&PROCESS_BUDGET),
                doorbell_rang: false,
                reserved_descriptor: None,
                config,
            },
            table: QpTable::default(),
            hot: Vec::new(),
            turn: 0,
            cold: Vec::new(),
            cold_turn: 0,
            cold_polls: COLD_POLLS,
            capabilities,
        })
    }

    #[inline(always)]
    fn poll_slot(&mut self, slot: u32, out: &mut Vec<Completion>, end: usize) -> Result<Arrival, PollOutcome> {
        match self.table.get_by_slot_mut(slot) {
            Some(qp) => qp.poll(&mut self.common, out, end),
            None => Err(PollOutcome::Dead),
        }
    }

    /// Polls the hot queue pairs. Returns a single message, if nothing was appended behind `start`.
    #[inline]
    fn poll_hot(&mut self, out: &mut Vec<Completion>, start: usize, end: usize) -> Option<Arrival> {
        let mut remaining = self.hot.len();
        let prefetches = remaining > QP_PREFETCH_DISTANCE;
        while remaining > 0 && out.len() < end {
            remaining -= 1;
            if self.turn >= self.hot.len() {
                self.turn = 0;
            }
            if prefetches {
                self.prefetch_next();
            }
            let Some(&slot) = self.hot.get(self.turn) else { break };
            match self.poll_slot(slot, out, end) {
                Ok(message) => {
                    self.turn += 1;
                    if remaining == 0 && out.len() == start {
                        return Some(message);
                    }
                    out.push(message.into());
                }
                Err(PollOutcome::Quiet | PollOutcome::Active) => self.turn += 1,
                Err(polled) => {
                    self.hot.swap_remove(self.turn);
                    if polled == PollOutcome::Idle {
                        self.cold.push(slot);
                    }
                }
            }
        }
        None
    }

    /// Prefetches the memory of the next polls, because that of a rarely polled queue pair is not cached.
    #[inline(never)]
    fn prefetch_next(&self) {
        let ahead = |by| self.hot.get(self.turn + by).and_then(|&slot| self.table.get_by_slot(slot));
        if let Some(qp) = ahead(QP_PREFETCH_DISTANCE) {
            qp.prefetch();
        }
        if let Some(qp) = ahead(MESSAGE_PREFETCH_DISTANCE) {
            qp.prefetch_message();
        }
    }

    /// Polls some of the cold queue pairs, in turn. A queue pair with work becomes hot.
    #[inline(never)]
    fn poll_cold(&mut self, out: &mut Vec<Completion>, end: usize) {
        let mut checks = self.cold.len().min(std::mem::replace(&mut self.cold_polls, COLD_POLLS));
        while checks > 0 && out.len() < end {
            checks -= 1;
            if self.cold_turn >= self.cold.len() {
                self.cold_turn = 0;
            }
            let Some(&slot) = self.cold.get(self.cold_turn) else { return };
            match self.poll_slot(slot, out, end) {
                Err(PollOutcome::Quiet | PollOutcome::Idle) => self.cold_turn += 1,
                Err(PollOutcome::Dead) => {
                    self.cold.swap_remove(self.cold_turn);
                }
                active => {
                    out.extend(active.ok().map(Completion::from));
                    self.cold.swap_remove(self.cold_turn);
                    self.start_polling(slot);
                    checks = checks.max(COLD_POLLS);
                }
            }
        }
    }

    fn for_each_hot(&mut self, mut act: impl FnMut(&mut SoftwareQp)) {
        for &slot in &self.hot {
            if let Some(qp) = self.table.get_by_slot_mut(slot) {
                act(qp);
            }
        }
    }
}

impl Fabric for SoftwareFabric {
    type Listener = SoftwareListener;

    over_sockets!();

    fn stats(&self) -> FabricStats {
        FabricStats { requests_refused: self.common.control.requests_refused, ..self.common.stats }
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        let SoftwareCommon { regions, next_region, .. } = &mut self.common;
        regions.add(arena.id(), access, || Region::new(arena, access, *next_region))?;
        *next_region = next_region.wrapping_add(1);
        Ok(())
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if self.table.iter().any(|qp| qp.windows.exposes(arena)) {
            return Err(FabricError::still_bound(arena));
        }
        self.table.iter_mut().for_each(|qp| qp.announced.retain(|(known, _)| *known != arena));
        self.common.regions.remove(arena)
    }

    /// Sends in the ring are copies, so only pending requests hold memory.
    fn holds_sends(&mut self, id: QpId) -> bool {
        self.table.get_mut(id).is_some_and(|qp| !qp.pending.is_empty())
    }

    fn disconnect(&mut self, id: QpId) {
        let Some(qp) = self.table.get_mut(id) else { return };
        match qp.state {
            SoftwareQpState::Up => {
                (qp.state, qp.has_work) = (SoftwareQpState::Closing, true);
                qp.deadline = Some(Instant::now() + self.common.config.linger);
                self.common.control.attention.push(qp.id.slot);
            }
            SoftwareQpState::Connecting => self.abandon(id),
            SoftwareQpState::Closing | SoftwareQpState::Draining | SoftwareQpState::Error => {}
        }
    }

    fn destroy_qp(&mut self, qp: QpId) {
        let Some(mut removed) = self.table.remove(qp) else { return };
        self.hot.retain(|&slot| slot != qp.slot);
        self.cold.retain(|&slot| slot != qp.slot);
        if removed.state == SoftwareQpState::Connecting {
            self.connections.forget_dial(qp);
        }
        removed.fail(&mut self.common, Disconnect::Local, "destroyed".to_owned(), None);
        self.common.control.forget(qp);
        let SoftwareQp { mut windows, socket, .. } = *removed;
        if let Some(socket) = &socket {
            self.connections.sockets.epoll_set.remove(socket);
            let _ = rustix::net::shutdown(socket, Shutdown::Write);
        }
        // The memory is free once the peer can no longer access it.
        if !windows.revoke_all() {
            let deadline = Instant::now() + self.common.config.linger;
            self.closing.push(ClosingQp { socket, windows, deadline });
        }
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.poll_events(events);
        let now = Instant::now();
        self.closing.retain_mut(|qp| !qp.is_released(now));
        // Progress is otherwise reported after several empty polls, which take long if the owner polls rarely.
        self.for_each_hot(|qp| {
            if qp.rx.unreported() != 0 {
                qp.report();
            }
        });
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        self.table.require_mut(qp)?.windows.keys.alloc(qp)
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.table.get(window.qp).and_then(|qp| qp.windows.keys.next(window.index)).unwrap_or(0)
    }

    fn fence_receives(&mut self) {
        self.common.receives.fence();
    }

    #[inline]
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let SoftwareCommon { receives, regions, ready, stats, .. } = &mut self.common;
        let (queue, ended) = match qp {
            None => (receives, None),
            Some(id) => {
                let Some(qp) = self.table.get_mut(id) else { return 0 };
                let ended = (qp.state == SoftwareQpState::Error).then_some(id);
                let Some(own) = qp.own_receives.as_deref_mut() else { return 0 };
                (own, ended)
            }
        };
        let n = queue.post_registered(bufs, |arena| regions.contains(arena), ended, ready);
        stats.recv_posts += n as u64;
        n
    }

    #[inline]
    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        match self.table.get_mut(qp) {
            Some(qp) => qp.post(&mut self.common, chain),
            None => Err(PostError::NotConnected),
        }
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        match self.poll_message(out, max) {
            Found::Message(message) => {
                out.push(message.into());
                1
            }
            Found::Completions(count) => count,
        }
    }

    #[inline]
    fn poll_message(&mut self, out: &mut Vec<Completion>, max: usize) -> Found {
        let start = out.len();
        let end = start.saturating_add(max);
        if !self.common.ready.is_empty() {
            Completion::drain_ready(&mut self.common.ready, out, end);
        }
        // Cold queue pairs are polled before the hot ones, which may fill every poll.
        if !self.cold.is_empty() {
            self.poll_cold(out, end);
        }
        if let Some(message) = self.poll_hot(out, start, end) {
            return Found::Message(message);
        }
        if out.len() >= end {
            self.cold_polls = COLD_POLLS_AFTER_FULL;
        }
        let count = out.len() - start;
        Found::of_last(out, count)
    }

    fn arm(&mut self) {
        // A cold queue pair keeps its doorbell set after its first check, so that it costs nothing in further sleeps.
        // A cold queue pair with work turns hot, and the poll before the sleep finds the work.
        let mut at = 0;
        while let Some(&slot) = self.cold.get(at) {
            if self.table.get_by_slot_mut(slot).is_some_and(SoftwareQp::arm_cold) {
                at += 1;
            } else {
                self.cold.swap_remove(at);
                self.start_polling(slot);
            }
        }
        self.for_each_hot(SoftwareQp::arm);
        self.common.doorbell_rang = false;
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        // Messages and control events use the same sockets, so that either makes `poll_control` due.
        let is_due = self.sleep(timeout);
        self.for_each_hot(SoftwareQp::disarm);
        is_due
    }
}
