//! The sending half of a queue pair. Requests run in posting order, mostly within the post.

use rpcrdma_mempool::{ArenaId, Buf, PeerMapping};
use rustix::io::Errno;

use super::retire::Retire;
use super::{FALSE_HEAD, PEER_CLOSED, SoftwareQp, State};
use crate::keys::Revoked;
use crate::log_limit::ClockedLog;
use crate::software::Common;
use crate::software::message::Message;
use crate::software::region::Regions;
use crate::software::ring::Header;
use crate::software::window::Exposure;
use crate::{Completion, Disconnect, Opcode, PostError, Posting, RemoteMemory, Source, Status, WorkRequest};

/// Bytes copied per queue pair and post or poll, for fairness.
const COPY_BUDGET: usize = 1 << 20;

impl SoftwareQp {
    /// Posts a chain; see [`Fabric::post_send`](crate::Fabric::post_send).
    #[inline]
    pub(crate) fn post(&mut self, common: &mut Common, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        if self.post_single(common, chain) { Ok(()) } else { self.post_chain(common, chain) }
    }

    /// Posts the chain if it is a single Send with room, the common case of a conversation. Otherwise changes nothing.
    #[inline(never)]
    fn post_single(&mut self, common: &mut Common, chain: &mut Vec<Posting>) -> bool {
        if chain.len() == 1
            && self.runs_at_once()
            && let Some(sent) = chain.pop_if(|only| self.send_now(common, only))
        {
            sent.finish();
            common.stats.posts += 1;
            self.ring_doorbell(common);
            return true;
        }
        false
    }

    /// Posts a chain of any requests: first the Sends that have room, then the others.
    #[inline(never)]
    fn post_chain(&mut self, common: &mut Common, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let before = self.tx.sent();
        let limit = before + COPY_BUDGET as u64;
        if self.runs_at_once() {
            let sends = chain.iter().take_while(|posting| self.tx.sent() < limit && self.send_now(common, posting));
            let sent = sends.count();
            common.stats.posts += sent as u64;
            if sent > 0 {
                chain.drain(..sent).for_each(Posting::finish);
            }
        }
        let result = if chain.is_empty() { Ok(()) } else { self.post_rest(common, chain, limit) };
        if self.tx.sent() != before {
            self.ring_doorbell(common);
        }
        result
    }

    /// Executes the requests of a chain up to the first that has to wait.
    fn post_rest(&mut self, common: &mut Common, chain: &mut Vec<Posting>, limit: u64) -> Result<(), PostError> {
        if self.state == State::Connecting {
            return Err(PostError::NotConnected);
        }
        let mut budget = COPY_BUDGET;
        let mut waits = !self.runs_at_once();
        let mut result = Ok(());
        let (mut taken, mut waiting) = (0, self.pending.len());
        for posting in chain.iter_mut() {
            let is_send = matches!(posting.wr, WorkRequest::Send { .. });
            if is_send && !waits && self.tx.sent() < limit && self.send_now(common, posting) {
                taken += 1;
                continue;
            }
            if self.retire.len() + waiting >= self.depth && self.state != State::Error {
                result = Err(PostError::QueueFull);
                break;
            }
            let permits = |arena, access| common.regions.permits(arena, access);
            let checked = posting.wr.check(self.id, &mut self.windows.keys, self.max_message as usize, permits);
            if let Err(why) = checked {
                result = Err(PostError::Invalid(why));
                break;
            }
            taken += 1;
            common.stats.signalled += u64::from(posting.signalled);
            self.chores |= posting.signalled;
            if waits || !self.execute(common, posting, &mut budget) {
                (waits, waiting) = (true, waiting + 1);
            } else {
                waits = self.halted;
            }
        }
        common.stats.posts += taken as u64;
        self.chores |= waits;
        let done = taken + self.pending.len() - waiting;
        // Executed requests return their memory here.
        if done == chain.len() {
            chain.clear();
            return result;
        }
        chain.drain(..done);
        let waiting = chain.drain(..taken - done);
        if self.state == State::Error {
            common.ready.extend(waiting.map(|posting| posting.flushed(self.id)));
        } else if taken > done {
            if self.pending.is_empty() {
                // Their wait for the peer is timed.
                common.control.attention.push(self.id.slot);
            }
            self.pending.extend(waiting);
        }
        result
    }

    /// Whether requests can run within their post: nothing waits or has failed, which would be a chore.
    #[inline]
    fn runs_at_once(&self) -> bool {
        !self.chores || self.state == State::Up && !self.halted && self.pending.is_empty()
    }

    /// Executes a request, if it is a Send and there is room. The caller counts it.
    #[inline(always)]
    fn send_now(&mut self, common: &mut Common, posting: &Posting) -> bool {
        let WorkRequest::Send { buf, invalidate, .. } = &posting.wr else { return false };
        let refused = self.retire.len() >= self.depth
            || buf.len() > self.max_message as usize
            || !common.regions.contains(buf.arena());
        if refused || !self.tx.has_room(buf.len() as u32) || !self.send(buf, invalidate) {
            return false;
        }
        let Posting { wr_id, signalled, .. } = *posting;
        let end = self.tx.sent();
        self.retire.push(Retire { wr_id, end, opcode: Opcode::Send, signalled, status: Status::Success });
        if signalled {
            self.chores = true;
            common.stats.signalled += 1;
        }
        true
    }

    /// Continues waiting requests.
    pub(super) fn resume(&mut self, common: &mut Common) {
        if self.halted || self.state == State::Draining {
            return;
        }
        let before = self.tx.sent();
        let mut budget = COPY_BUDGET;
        let mut pending = std::mem::take(&mut self.pending);
        while !self.halted
            && let Some(posting) = pending.front_mut()
            && self.execute(common, posting, &mut budget)
        {
            pending.pop_front();
        }
        self.pending = pending;
        if self.tx.sent() != before {
            self.ring_doorbell(common);
        }
    }

    /// Wakes the peer if it sleeps, behind published records.
    #[inline]
    fn ring_doorbell(&self, common: &mut Common) {
        common.stats.doorbells += 1;
        if self.peer_may_sleep && self.bell(self.lines.peer_bell).take() {
            self.wake_peer();
        }
    }

    /// Executes a request as far as room and budget allow. False if it continues in a later poll.
    fn execute(&mut self, common: &mut Common, posting: &mut Posting, budget: &mut usize) -> bool {
        let Some(status) = self.carry_out(common, &mut posting.wr, budget) else { return false };
        self.halted = !status.is_ok();
        if posting.signalled || self.halted || matches!(posting.wr, WorkRequest::Send { .. }) {
            let Posting { wr_id, signalled, .. } = *posting;
            let (end, opcode) = (self.tx.sent(), posting.wr.opcode());
            self.retire.push(Retire { wr_id, end, opcode, signalled, status });
        }
        true
    }

    /// Does a request's work; returns its status, or `None` if some of it is left.
    fn carry_out(&mut self, common: &mut Common, wr: &mut WorkRequest, budget: &mut usize) -> Option<Status> {
        match wr {
            WorkRequest::Send { buf, invalidate, .. } => {
                // The first of a turn may be longer than the budget: else it would never go.
                if *budget < buf.len() && *budget < COPY_BUDGET {
                    return None;
                }
                if !self.tx.has_room(buf.len() as u32) && !self.make_room(buf.len() as u32) {
                    return None;
                }
                *budget = budget.saturating_sub(buf.len());
                Some(if self.send(buf, invalidate) { Status::Success } else { Status::LocalQpOperation })
            }
            WorkRequest::Write { src, offset, len, remote } => {
                self.copy(common, (offset, len), remote, budget, true, |there, at, from, bytes| match src {
                    Source::Lent(lent) => there.copy_from_lent(at, lent, from, bytes),
                    Source::Frozen(frozen) => there.write(at, &frozen[from..from + bytes]),
                })
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                self.copy(common, (offset, len), remote, budget, false, |there, at, to, bytes| {
                    there.copy_to_lent(at, dst, to, bytes)
                })
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                let region = match self.announce(&mut common.control.log, &common.regions, mem.arena()) {
                    Ok(region) => region,
                    Err(status) => return Some(status),
                };
                let address = (mem.offset() + *offset) as u64;
                let exposure = Exposure { region, access: *access, address, len: *len as u64 };
                let is_bound = self.windows.bind(window.index, mem, exposure);
                Some(if is_bound { Status::Success } else { Status::WindowBind })
            }
            // A window that is no longer bound was invalidated by the peer.
            WorkRequest::LocalInvalidate { window } => {
                (self.windows.revoke(window.index) != Revoked::Busy).then_some(Status::Success)
            }
        }
    }

    /// Writes a message into the ring. False without room.
    #[inline(always)]
    fn send(&mut self, buf: &Buf, invalidate: &Option<u32>) -> bool {
        let Self { ring, tx, rx, .. } = self;
        // The copy is a call: values for later are read after it.
        tx.push(&ring.tx(), buf, || Header::message(buf.len() as u32, *invalidate, rx.report()))
    }

    /// Enlarges the sending ring for such a message. False at the maximum.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self, len: u32) -> bool {
        let Some(bytes) = self.tx.larger(len) else { return false };
        let laid = self.ring.lay_tx(self.layout.tx_ring(), bytes as usize);
        if laid {
            self.tx.grow(&self.ring.tx(), bytes);
        }
        laid
    }

    /// Copies a slice to or from the peer's memory, if its window grants all that is left. `None` if some is left then.
    fn copy(
        &mut self,
        common: &mut Common,
        (offset, len): (&mut usize, &mut usize),
        remote: &mut RemoteMemory,
        budget: &mut usize,
        write: bool,
        act: impl FnOnce(&PeerMapping, usize, usize, usize) -> bool,
    ) -> Option<Status> {
        if *len == 0 {
            return Some(Status::Success);
        }
        let claim = self.peer_windows.as_ref().and_then(|w| w.claim(remote.rkey, remote.address, *len as u64, write));
        let Some(claim) = claim else {
            // A peer that leaves shuts its socket down, and then revokes its windows: it has refused nothing.
            if matches!(self.read_socket(common), Ok(false)) {
                return Some(Status::Flushed);
            }
            common.stats.access_refused += 1;
            return Some(Status::RemoteAccess);
        };
        // The region's descriptor was sent before the key: it waits at the socket. The end of the connection is noticed
        // elsewhere.
        if self.exposed.get(claim.region).is_none()
            && let Err(error) = self.read_socket(common)
        {
            let line = format_args!("{:?}: {error}", self.id);
            common.control.log.warn("connections whose peer's memory is unknown", line);
        }
        let slice = (*len).min(*budget);
        let there = self.exposed.get(claim.region);
        let copied = there.is_some_and(|there| act(there, claim.offset, *offset, slice));
        if let Some(windows) = &self.peer_windows {
            windows.release(claim);
        }
        if !copied {
            // The peer's table points outside its memory.
            common.stats.peer_violations += 1;
            common.stats.access_refused += 1;
            return Some(Status::RemoteAccess);
        }
        *budget -= slice;
        *offset += slice;
        *len -= slice;
        remote.address += slice as u64;
        (*len == 0).then_some(Status::Success)
    }

    /// Sends the peer the descriptor of this memory, once per connection; returns the number of the region.
    fn announce(&mut self, log: &mut ClockedLog, regions: &Regions, arena: ArenaId) -> Result<u32, Status> {
        // Mostly it is the last.
        if let Some(&(_, id)) = self.announced.iter().rev().find(|(known, _)| *known == arena) {
            return Ok(id);
        }
        let region = regions.get(arena).and_then(|region| Some((region.id, region.exposable()?)));
        let (Some(socket), Some((id, (fd, bytes)))) = (self.socket(), region) else {
            return Err(Status::LocalProtection);
        };
        match (Message::Region { id, bytes }).send(socket, &[fd]) {
            Ok(()) => {
                self.announced.push((arena, id));
                Ok(id)
            }
            // The peer has closed the connection, which is the whole cause.
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Status::Flushed),
            Err(error) => {
                let line = format_args!("{:?}: the peer does not take the descriptor of a region: {error}", self.id);
                log.warn("peers that do not take the descriptor of a region", line);
                Err(Status::LocalQpOperation)
            }
        }
    }

    /// Whether unforgotten requests use half of the room.
    #[inline]
    pub(super) fn is_half_full(&self) -> bool {
        self.retire.len() > self.depth / 2
    }

    /// Reports requests that the peer has taken. False if the queue pair ends by that.
    #[inline]
    pub(super) fn reap(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize) -> bool {
        if !self.tx.is_idle() {
            if !self.acknowledge_reported() {
                self.violation(common, FALSE_HEAD);
                return false;
            }
            if self.refusal().is_some() {
                self.fail(common, Disconnect::Failure, "the peer refused a message".to_owned(), None);
                return false;
            }
        }
        while let Some(&r) = self.retire.first_reported()
            && r.end <= self.tx.acked()
        {
            if !r.status.is_ok() {
                let (cause, reason) = match r.status {
                    Status::Flushed => (Disconnect::Peer, PEER_CLOSED.to_owned()),
                    status => (Disconnect::Failure, format!("{:?} {:#x} failed: {status:?}", r.opcode, r.wr_id)),
                };
                self.fail(common, cause, reason, None);
                return false;
            }
            if out.len() >= end {
                return true;
            }
            out.push(Completion::ended(self.id, r.wr_id, r.opcode, Status::Success));
            self.retire.pop_reported();
        }
        // Unsignaled requests leave with a signaled one, while there is room for more.
        while self.is_half_full() && self.retire.pop(self.tx.acked()).is_some() {}
        true
    }
}
