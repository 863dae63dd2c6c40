//! iWARP in user space over plain TCP (RFC 5040, 5041, 5044, 6581). It needs no device, privilege or C library.
//!
//! Its peers are this fabric on another host, the Linux kernel's soft-iWARP, and iWARP adapters. A connection is an
//! ordinary TCP socket; the polling thread does an adapter's work. It places messages into posted Receives, and Writes
//! and Read answers into the named memory. First it checks key, bounds and rights.
//!
//! # Design
//! | file | holds |
//! | --- | --- |
//! | [`wire`] | the codec of frames, segments and errors |
//! | `endpoint` | the rules of one connection, without I/O: checks, placement, output |
//! | `setup` | negotiation before the first FPDU |
//! | `qp` | one socket with its endpoint: reading, writing, ending |
//! | `connect`, `listener` | connection setup |
//! | `sys` | vectored socket I/O on pool memory |
//! | `config` | the knobs |
//!
//! # System calls
//! The polling thread makes them: a socket has no other notification. A few recently active connections are read in
//! each turn, with one call each. While they are silent it finds nothing. With more of them, one `epoll_wait` per turn
//! lists those with input. One `epoll_wait` in every 16th turn covers all idle ones. A turn's output to one peer leaves
//! in one `sendmsg`. One `recvmsg` reads many messages.
//!
//! Payloads are sent in place. Long payloads are received straight into place: the rest of a segment whose header has
//! come. Shorter ones are copied from a buffer that all connections share.
//!
//! # Completions
//! TCP buffers bytes: a Send or Write completes when the socket has taken its last byte (RFC 5040 §5.5). A refusal by
//! the peer ends the connection. [`Capabilities::acknowledges`] is false. iWARP has no receiver-not-ready. A message
//! without a Receive stays in the socket for as long as `rnr_retry` allows, at most `retry_timeout`. TCP's flow control
//! holds the peer back. Then a Terminate ends the stream. So an overloaded shard that briefly has no Receive loses no
//! connection. A peer that sends beyond its credits does not wait without limit.
//!
//! # End of a connection
//! A closing side sends all posted requests, then a FIN. A peer's FIN ends the connection, since such a peer cannot
//! reply any more. That includes a half-close (`shutdown(SHUT_WR)`), which RFC 5041 §6.2.1 lets an upper layer see.
//! Data received before it is delivered. Only bytes already in the socket leave. The rest is flushed, as after a reset.
//! An initiator that closes its way once its last call is sent therefore does not get the reply.
//!
//! # Threat model
//! Windows have exact bounds and rights, checked for each segment. Their keys are valid for one connection and one
//! bind. No other memory is reachable: an RDMA Read of ours gives the peer a name valid for its answer alone.
//! [`IwarpConfig`] bounds the memory that a peer can hold. Half a message holds one Receive for `retry_timeout`;
//! unplaceable bytes are at most 64 KiB, for as long.
//!
//! **iWARP neither encrypts nor authenticates.** An attacker on the network path can read and change all traffic. Host
//! authentication of RPC-over-RDMA version 2 authenticates the peer. Secrecy needs a network that provides it (IPsec,
//! WireGuard, a separate VLAN).

mod config;
mod connect;
mod endpoint;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[path = "../../tests/harness/iwarp_fuzz.rs"]
pub mod fuzz;
mod listener;
#[cfg(any(test, feature = "testing"))]
#[path = "../../tests/harness/iwarp_memory.rs"]
pub mod memory;
mod qp;
mod setup;
mod sys;
pub mod wire;

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventFlags};
use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

pub use self::config::{Crc, FpduSize, IwarpConfig, MAX_READ_DEPTH};
use self::endpoint::Shared;
pub use self::listener::IwarpListener;
use self::qp::{Common, Polled, Qp, SCRATCH, State};
use super::connection_manager::{ConnectionManager, Control, Limits, ManagedFabric, Token};
use super::error::failed;
use super::forward::over_sockets;
use super::table::Table;
use super::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Waker, WindowId,
};

/// Connections read in each turn without asking epoll.
const DIRECT: usize = 4;
/// Turns between two polls of idle connections.
const LOOK: u64 = 16;
/// Turns without a byte after which a connection is idle.
const IDLE: u64 = 4096;
/// Most connections with news handled in one poll.
const EVENTS: usize = 64;

/// One shard's device of the iWARP fabric; see the module documentation.
#[derive(Debug)]
pub struct IwarpFabric {
    common: Common,
    table: Table<Qp>,
    /// Queue pairs that were active lately.
    hot: Vec<u32>,
    /// Start of the next turn in `hot`.
    turn: usize,
    /// Queue pairs with unread bytes, for lack of a Receive or of completion space.
    unread: VecDeque<u32>,
    /// Queue pairs that stand.
    standing: usize,
    polls: u64,
    /// The next poll covers all.
    look: bool,
    capabilities: Capabilities,
    connections: ConnectionManager<Common>,
}

impl IwarpFabric {
    /// The word before the colon of its addresses.
    pub const SCHEME: &'static str = "iwarp";

    /// Opens the fabric for one shard.
    pub fn new(config: IwarpConfig) -> Result<Self, FabricError> {
        config.check()?;
        let sockets = epoll::create(CreateFlags::CLOEXEC).map_err(|e| failed("epoll_create", e))?;
        let capabilities = capabilities(&config);
        let IwarpConfig { max_handshakes, handshake_timeout, linger, .. } = config;
        let connections = ConnectionManager::new(Limits { max_handshakes, handshake_timeout, linger })?;
        connections.sockets.sleeper.add(&sockets, Token::Qp(QpId::NONE), EventFlags::IN)?;
        Ok(Self {
            connections,
            common: Common {
                shared: Shared::new(config.shared_receives),
                ready: VecDeque::with_capacity(64),
                control: Control::default(),
                sockets,
                scratch: vec![0; SCRATCH].into(),
                config,
            },
            table: Table::default(),
            hot: Vec::new(),
            turn: 0,
            unread: VecDeque::new(),
            standing: 0,
            polls: 0,
            look: false,
            capabilities,
        })
    }

    /// Polls one queue pair and updates the lists accordingly.
    #[inline]
    fn poll_qp(&mut self, slot: u32, out: &mut Vec<Completion>, end: usize) -> Polled {
        let Some(qp) = self.table.at(slot) else { return Polled::Dead };
        let polled = qp.poll(&mut self.common, out, end);
        match polled {
            Polled::Quiet | Polled::Dead => {}
            Polled::Active => {
                qp.active = self.polls;
                if !qp.hot {
                    self.warm(slot);
                }
            }
            Polled::Stalled => self.note_unread(slot),
            Polled::Unread => {
                qp.active = self.polls;
                self.note_unread(slot);
            }
        }
        polled
    }

    #[inline]
    fn poll_hot(&mut self, out: &mut Vec<Completion>, end: usize) {
        for _ in 0..self.hot.len() {
            if self.turn >= self.hot.len() {
                self.turn = 0;
            }
            let Some(&slot) = self.hot.get(self.turn) else { return };
            match self.poll_qp(slot, out, end) {
                Polled::Dead | Polled::Stalled => self.cool(slot),
                Polled::Active | Polled::Unread => {
                    self.turn += 1;
                    if out.len() >= end {
                        return;
                    }
                }
                Polled::Quiet => {
                    self.turn += 1;
                    if self.table.peek_at(slot).is_none_or(|qp| self.polls - qp.active > IDLE) {
                        self.cool(slot);
                    }
                }
            }
        }
    }

    /// Polls connections that epoll reports, except those polled anyway.
    #[inline(never)]
    fn poll_ready(&mut self, out: &mut Vec<Completion>, end: usize, crowd: bool) {
        let mut space = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Interrupted: the next poll finds them.
        let Ok((ready, _)) = epoll::wait(&self.common.sockets, &mut space, Some(&now)) else { return };
        let stats = &mut self.common.shared.stats;
        *(if ready.is_empty() { &mut stats.empty_system_calls } else { &mut stats.system_calls }) += 1;
        for event in ready {
            if out.len() >= end {
                // The rest is reported again.
                return;
            }
            let slot = event.data.u64() as u32;
            match self.table.at(slot) {
                Some(qp) if qp.stalled => qp.peer_left_before_receives(&mut self.common, event.flags),
                Some(qp) if crowd || !qp.hot => {
                    self.poll_qp(slot, out, end);
                }
                _ => {}
            }
        }
    }

    /// Continues connections with untaken bytes: epoll does not report those.
    #[cold]
    fn poll_unread(&mut self, out: &mut Vec<Completion>, end: usize) {
        for _ in 0..self.unread.len() {
            let Some(slot) = self.unread.pop_front() else { return };
            let Some(qp) = self.table.at(slot) else { continue };
            qp.unread = false;
            // Connections that wait for a Receive are not polled without one.
            let in_vain = qp.stalled
                && qp.is_live()
                && qp.endpoint.limits().rnr_retry >= 7
                && !qp.endpoint.can_go_on(&self.common.shared);
            if in_vain || out.len() >= end {
                self.note_unread(slot);
            } else {
                self.poll_qp(slot, out, end);
            }
        }
    }

    /// Schedules this one for the next poll.
    #[cold]
    fn note_unread(&mut self, slot: u32) {
        if let Some(qp) = self.table.at(slot)
            && !qp.unread
        {
            qp.unread = true;
            self.unread.push_back(slot);
        }
    }

    /// Polls this queue pair in every turn from now on.
    fn warm(&mut self, slot: u32) {
        if let Some(qp) = self.table.at(slot)
            && !qp.hot
        {
            qp.hot = true;
            qp.active = self.polls;
            self.hot.push(slot);
        }
    }

    /// Moves it out of the hot list.
    fn cool(&mut self, slot: u32) {
        if let Some(qp) = self.table.at(slot) {
            qp.hot = false;
        }
        self.hot.retain(|&hot| hot != slot);
    }

    /// Finds out which of many are idle by now.
    #[cold]
    fn cool_idle(&mut self) {
        let (table, polls) = (&mut self.table, self.polls);
        self.hot.retain(|&slot| {
            let Some(qp) = table.at(slot) else { return false };
            qp.hot = polls - qp.active <= IDLE && qp.is_live();
            qp.hot
        });
    }
}

/// Capabilities of these connections, over any byte stream.
fn capabilities(config: &IwarpConfig) -> Capabilities {
    Capabilities {
        scheme: IwarpFabric::SCHEME,
        device: "iWARP over TCP (user space)".to_owned(),
        max_send_wr: setup::MAX_SEND_WR,
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
        self.common.shared.regions.add(arena.id(), access)
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if self.table.iter().any(|qp| qp.endpoint.exposes(arena)) {
            return Err(FabricError::still_bound(arena));
        }
        self.common.shared.regions.remove(arena)
    }

    /// Bytes not yet in the socket stay in the posted memory.
    fn holds_sends(&mut self, id: QpId) -> bool {
        self.table.get(id).is_some_and(|qp| qp.endpoint.is_busy() || qp.endpoint.has_bytes())
    }

    fn round_trip(&mut self, id: QpId) -> Option<Duration> {
        sys::round_trip(self.table.get(id)?.socket()?).ok()
    }

    fn disconnect(&mut self, id: QpId) {
        let Some(qp) = self.table.get(id) else { return };
        match qp.state {
            State::Up => {
                qp.state = State::Closing;
                qp.deadline = Some(Instant::now() + self.common.config.linger);
                self.common.control.attention.push(id.slot);
            }
            State::Connecting => self.abandon(id),
            State::Closing | State::Error => {}
        }
    }

    fn destroy_qp(&mut self, id: QpId) {
        let Some(mut gone) = self.table.remove(id) else { return };
        if gone.stood {
            self.standing -= 1;
        }
        self.hot.retain(|&slot| slot != id.slot);
        self.unread.retain(|&slot| slot != id.slot);
        let cut = gone.is_live() && gone.endpoint.has_bytes();
        if gone.state == State::Connecting {
            self.connections.forget_dial(id);
        }
        gone.leave(&mut self.common, "destroyed");
        self.common.control.forget(id);
        if let Some(socket) = gone.socket
            && !cut
        {
            self.connections.close(socket);
        }
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        self.poll_events(events);
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        self.table.find(qp)?.endpoint.alloc_window()
    }

    #[inline]
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.table.peek(window.qp).and_then(|qp| qp.endpoint.next_rkey(window.index)).unwrap_or(0)
    }

    fn fence_receives(&mut self) {
        self.common.shared.receives.fence();
    }

    // Out of line, as the two below: a call is nothing beside a system call, and other fabrics keep a smaller loop.
    #[inline(never)]
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let Common { shared: Shared { regions, receives, stats }, ready, .. } = &mut self.common;
        let (queue, over) = match qp {
            None => (receives, None),
            Some(id) => {
                let Some(qp) = self.table.get(id) else { return 0 };
                let over = (qp.state == State::Error).then_some(id);
                let Some(own) = qp.endpoint.own_receives.as_mut() else { return 0 };
                (own, over)
            }
        };
        let n = queue.post_known(bufs, |arena| regions.contains(arena), over, ready);
        stats.recv_posts += n as u64;
        n
    }

    #[inline(never)]
    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        match self.table.get(qp) {
            Some(qp) => qp.post(&mut self.common, chain),
            None => Err(PostError::NotConnected),
        }
    }

    #[inline(never)]
    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        let end = start.saturating_add(max);
        if !self.common.ready.is_empty() {
            Completion::hand_out(&mut self.common.ready, out, end);
        }
        self.polls += 1;
        if !self.unread.is_empty() {
            self.poll_unread(out, end);
        }
        let crowd = self.hot.len() > DIRECT;
        if crowd || self.look || self.standing > self.hot.len() && self.polls.is_multiple_of(LOOK) {
            self.look = false;
            self.poll_ready(out, end, crowd);
        }
        if !crowd && out.len() < end {
            self.poll_hot(out, end);
        } else if crowd && self.polls.is_multiple_of(IDLE) {
            self.cool_idle();
        }
        if !self.common.ready.is_empty() {
            Completion::hand_out(&mut self.common.ready, out, end);
        }
        out.len() - start
    }

    /// Sockets report news by themselves.
    fn arm(&mut self) {
        self.look = true;
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let is_due = self.sleep(timeout);
        self.look = true;
        is_due
    }
}
