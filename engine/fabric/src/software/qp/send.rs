//! The sending half of a queue pair. Requests run in posting order, mostly within the post.

use rpcrdma_mempool::{Buf, Lent, PeerMapping};
use rustix::io::Errno;

use super::retire::Retire;
use super::{Qp, State, VIOLATION};
use crate::checks;
use crate::keys::Revoked;
use crate::log_limit::ClockedLog;
use crate::software::common::Common;
use crate::software::message::Message;
use crate::software::region::Region;
use crate::software::ring::Header;
use crate::software::window::Exposure;
use crate::{
    Access, Completion, Disconnect, FabricErrorKind, Opcode, PostError, Posting, RemoteMemory, Source, Status,
    WorkRequest,
};

/// Bytes copied per queue pair and post or poll, for fairness.
const COPY_BUDGET: usize = 1 << 20;

/// Progress of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// It is carried out, or has failed for good.
    Done,
    /// It continues in a later poll.
    Wait,
}

impl Qp {
    /// Posts a chain; see [`Fabric::post_send`](crate::Fabric::post_send).
    #[inline]
    pub(crate) fn post(&mut self, common: &mut Common, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        // All of these are chores.
        if self.chores && (self.state != State::Up || !self.pending.is_empty() || self.halted) {
            return self.post_behind(common, chain, 0);
        }
        let before = self.tx.sent();
        // A Send with room is the common case of a conversation.
        if chain.len() == 1
            && let Some(sent) = chain.pop_if(|only| self.post_one(common, only))
        {
            sent.finish();
            self.ring(common);
            return Ok(());
        }
        self.post_many(common, chain, before)
    }

    /// The same for any chain.
    #[inline(never)]
    fn post_many(&mut self, common: &mut Common, chain: &mut Vec<Posting>, before: u64) -> Result<(), PostError> {
        let sent = self.post_sends(common, chain);
        if sent > 0 {
            chain.drain(..sent).for_each(Posting::finish);
        }
        if !chain.is_empty() {
            return self.post_all(common, chain, before);
        }
        self.ring_doorbell(common, before);
        Ok(())
    }

    /// Executes a request, if it is a Send and there is room.
    #[inline(always)]
    fn post_one(&mut self, common: &mut Common, posting: &Posting) -> bool {
        let WorkRequest::Send { buf, invalidate, .. } = &posting.wr else { return false };
        let refused = self.retire.len() >= self.depth || self.check_send(common, buf).is_err();
        if refused || !self.tx.has_room(buf.len() as u32) || !self.send(posting, buf, invalidate) {
            return false;
        }
        if posting.signalled {
            self.chores = true;
            common.stats.signalled += 1;
        }
        common.stats.posts += 1;
        self.later = true;
        true
    }

    /// The same for the first of a chain; returns how many.
    #[inline(always)]
    fn post_sends(&mut self, common: &mut Common, chain: &[Posting]) -> usize {
        let limit = self.tx.sent() + COPY_BUDGET as u64;
        chain.iter().take_while(|posting| self.tx.sent() < limit && self.post_one(common, posting)).count()
    }

    /// Posts a chain while nothing waits.
    #[inline(always)]
    fn post_all(&mut self, common: &mut Common, chain: &mut Vec<Posting>, before: u64) -> Result<(), PostError> {
        let mut budget = COPY_BUDGET;
        let mut result = Ok(());
        let (mut done, mut signalled) = (0, 0);
        for posting in chain.iter_mut() {
            if self.retire.len() >= self.depth {
                result = Err(PostError::QueueFull);
                break;
            }
            match self.step(common, posting, true, Some(&mut budget)) {
                Ok(Step::Done) => {}
                Ok(Step::Wait) => return self.post_waits(common, chain, done, before),
                Err(why) => {
                    result = Err(PostError::Invalid(why));
                    break;
                }
            }
            signalled += u64::from(posting.signalled);
            done += 1;
            if self.halted {
                break;
            }
        }
        common.stats.posts += done as u64;
        common.stats.signalled += signalled;
        self.chores |= signalled != 0 || self.halted;
        self.later = true;
        if done == chain.len() {
            // Sent buffers return to their pool here.
            chain.clear();
        } else {
            chain.drain(..done);
            if self.halted {
                result = self.post_behind(common, chain, 0);
            }
        }
        self.ring_doorbell(common, before);
        result
    }

    /// Ends a post whose element `done` cannot be executed yet.
    #[cold]
    #[inline(never)]
    fn post_waits(
        &mut self,
        common: &mut Common,
        chain: &mut Vec<Posting>,
        done: usize,
        before: u64,
    ) -> Result<(), PostError> {
        common.stats.posts += done as u64;
        common.stats.signalled += chain.drain(..done).filter(|p| p.signalled).count() as u64;
        let result = self.post_behind(common, chain, 1);
        self.ring_doorbell(common, before);
        result
    }

    /// Wakes the peer if it sleeps and something was published since `before`.
    #[inline]
    fn ring_doorbell(&self, common: &mut Common, before: u64) {
        if self.tx.sent() != before {
            self.ring(common);
        }
    }

    /// The same after published records.
    #[inline(always)]
    fn ring(&self, common: &mut Common) {
        common.stats.doorbells += 1;
        if self.peer_may_sleep && self.peer_bell.take(&self.ring) {
            self.wake_peer();
        }
    }

    /// Queues a chain behind waiting requests. The first `checked` of it were checked before.
    #[cold]
    #[inline(never)]
    fn post_behind(&mut self, common: &mut Common, chain: &mut Vec<Posting>, checked: usize) -> Result<(), PostError> {
        if self.state == State::Connecting {
            return Err(PostError::NotConnected);
        }
        let mut result = Ok(());
        let mut taken = 0;
        for posting in chain.iter_mut() {
            if taken >= checked {
                if self.retire.len() + self.pending.len() + taken >= self.depth && self.state != State::Error {
                    result = Err(PostError::QueueFull);
                    break;
                }
                if let Err(why) = self.step(common, posting, true, None) {
                    result = Err(PostError::Invalid(why));
                    break;
                }
            }
            common.stats.posts += 1;
            common.stats.signalled += u64::from(posting.signalled);
            taken += 1;
        }
        let taken = chain.drain(..taken);
        if self.state == State::Error {
            let flushed = taken.map(|p| Completion::ended(self.id, p.wr_id, p.wr.opcode(), Status::Flushed));
            common.ready.extend(flushed);
        } else {
            self.pending.extend(taken);
            self.watch_waiting(common);
        }
        self.chores = true;
        result
    }

    #[inline]
    fn check_send(&self, common: &Common, buf: &Buf) -> Result<(), &'static str> {
        if buf.len() > self.max_message as usize {
            return Err("a message longer than max_message of the two sides");
        }
        checks::known(common.regions.contains(buf.arena()))
    }

    /// Checks a `fresh` request as a NIC's driver does. Then executes it as far as room and budget allow; without a
    /// budget it is only checked.
    #[inline(always)]
    fn step(
        &mut self,
        common: &mut Common,
        posting: &mut Posting,
        fresh: bool,
        budget: Option<&mut usize>,
    ) -> Result<Step, &'static str> {
        let WorkRequest::Send { buf, invalidate, .. } = &posting.wr else {
            return self.step_memory(common, posting, fresh, budget);
        };
        if fresh {
            self.check_send(common, buf)?;
        }
        let Some(budget) = budget else { return Ok(Step::Wait) };
        let len = buf.len() as u32;
        // The first of a turn may be longer than the budget: else it would never go.
        let turn_over = *budget < buf.len() && *budget < COPY_BUDGET;
        if turn_over || !self.tx.has_room(len) && !self.make_room(len) {
            self.needs_room = !turn_over;
            return Ok(Step::Wait);
        }
        *budget = budget.saturating_sub(buf.len());
        if !self.send(posting, buf, invalidate) {
            self.not_sent(posting.wr_id, posting.signalled);
        }
        Ok(Step::Done)
    }

    /// Writes a message into the ring. False without room.
    #[inline(always)]
    fn send(&mut self, posting: &Posting, buf: &Buf, invalidate: &Option<u32>) -> bool {
        let ring = self.ring.tx();
        // The copy is a call: values for later are read after it.
        if !self.tx.write(&ring, buf) {
            return false;
        }
        let header = Header::message(buf.len() as u32, *invalidate, self.rx.report());
        self.tx.publish(&ring, header);
        let Posting { wr_id, signalled, .. } = *posting;
        let end = self.tx.sent();
        self.retire.push(Retire { wr_id, end, opcode: Opcode::Send, signalled, status: Status::Success });
        true
    }

    /// Ends the queue pair: a Send with room was not written.
    #[cold]
    #[inline(never)]
    fn not_sent(&mut self, wr_id: u64, signalled: bool) {
        self.halted = true;
        let (end, status) = (self.tx.sent(), Status::LocalQpOperation);
        self.retire.push(Retire { wr_id, end, opcode: Opcode::Send, signalled, status });
    }

    /// The same, for all but Sends.
    #[inline(never)]
    fn step_memory(
        &mut self,
        common: &mut Common,
        posting: &mut Posting,
        fresh: bool,
        budget: Option<&mut usize>,
    ) -> Result<Step, &'static str> {
        let (wr_id, signalled, opcode) = (posting.wr_id, posting.signalled, posting.wr.opcode());
        self.needs_room &= budget.is_none();
        let status = match &mut posting.wr {
            WorkRequest::Send { .. } => Status::Success,
            WorkRequest::Write { src, offset, len, remote } => {
                if fresh {
                    let (arena, all) = src.extent();
                    checks::known(common.regions.contains(arena))?;
                    checks::inside(*offset, *len, all)?;
                }
                let Some(budget) = budget else { return Ok(Step::Wait) };
                let slice = (*len).min(*budget);
                let status = self.copy(common, remote, *len, true, |there, at| match src {
                    Source::Lent(lent) => there.copy_from_lent(at, lent, *offset, slice),
                    Source::Frozen(frozen) => there.write(at, &frozen[*offset..*offset + slice]),
                });
                match advance(status, budget, slice, offset, len, remote) {
                    Some(status) => status,
                    None => return Ok(Step::Wait),
                }
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                if fresh {
                    checks::known(common.regions.contains(dst.arena()))?;
                    checks::inside(*offset, *len, dst.len())?;
                }
                let Some(budget) = budget else { return Ok(Step::Wait) };
                let slice = (*len).min(*budget);
                let to: &Lent = dst;
                let status =
                    self.copy(common, remote, *len, false, |there, at| there.copy_to_lent(at, to, *offset, slice));
                match advance(status, budget, slice, offset, len, remote) {
                    Some(status) => status,
                    None => return Ok(Step::Wait),
                }
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                let region = common.regions.get(mem.arena());
                if fresh {
                    if !region.is_some_and(|r| r.permits(*access) && r.exposable().is_some()) {
                        return Err("memory that is not registered with these rights");
                    }
                    checks::inside_some(*offset, *len, mem.len())?;
                    if *access == Access::LOCAL {
                        return Err("a window without rights");
                    }
                    if window.qp != self.id || !self.windows.keys.post_bind(window.index) {
                        return Err("a window that is not free, or of another queue pair");
                    }
                }
                if budget.is_none() {
                    return Ok(Step::Wait);
                }
                match self.expose(&mut common.control.log, region) {
                    Ok(region) => {
                        let address = (mem.offset() + *offset) as u64;
                        let what = Exposure { mem, region, address, len: *len as u64, access: *access };
                        if self.windows.bind(window.index, &what) { Status::Success } else { Status::WindowBind }
                    }
                    Err(status) => status,
                }
            }
            WorkRequest::LocalInvalidate { window } => {
                if fresh && (window.qp != self.id || !self.windows.keys.post_invalidate(window.index)) {
                    return Err("a window that is not bound, or of another queue pair");
                }
                if budget.is_none() {
                    return Ok(Step::Wait);
                }
                match self.windows.revoke(window.index) {
                    Revoked::Busy => return Ok(Step::Wait),
                    // The peer may have been faster.
                    Revoked::Done | Revoked::NotBound => Status::Success,
                }
            }
        };
        if signalled || !status.is_ok() {
            let end = self.tx.sent();
            self.retire.push(Retire { wr_id, end, opcode, signalled, status });
        }
        self.halted = !status.is_ok();
        Ok(Step::Done)
    }

    /// Copies one slice to or from the peer's memory, if its window allows the rest.
    fn copy(
        &mut self,
        common: &mut Common,
        remote: &RemoteMemory,
        left: usize,
        write: bool,
        act: impl FnOnce(&PeerMapping, usize) -> bool,
    ) -> Status {
        if left == 0 {
            return Status::Success;
        }
        let claim = self.peer_windows.as_ref().and_then(|w| w.claim(remote.rkey, remote.address, left as u64, write));
        let Some(claim) = claim else {
            // A peer that leaves shuts its socket down, and then revokes its windows: it has refused nothing.
            if matches!(self.read_socket(common), Ok(false)) {
                return Status::Flushed;
            }
            common.stats.access_refused += 1;
            return Status::RemoteAccess;
        };
        if self.exposed.get(claim.region).is_none() {
            // The descriptor was sent before the key: it waits at the socket. The end of the connection is noticed
            // elsewhere.
            if let Err(error) = self.read_socket(common) {
                let by_peer = error.kind() == FabricErrorKind::Peer;
                let why = if by_peer { format!("{VIOLATION}: {}", error.detail()) } else { error.to_string() };
                let line = format_args!("{:?}: {why}", self.id);
                common.control.log.warn("connections whose peer's memory is unknown", line);
            }
        }
        let copied = self.exposed.get(claim.region).is_some_and(|there| act(there, claim.offset));
        if let Some(windows) = &self.peer_windows {
            windows.release(claim);
        }
        if copied {
            return Status::Success;
        }
        // The peer's table points outside its memory.
        common.stats.peer_violations += 1;
        common.stats.access_refused += 1;
        Status::RemoteAccess
    }

    /// Sends the peer this memory's descriptor, once per connection, if still registered.
    fn expose(&mut self, log: &mut ClockedLog, region: Option<&Region>) -> Result<u32, Status> {
        let Some(region) = region else { return Err(Status::LocalProtection) };
        // Mostly it is the last.
        if self.announced.last() == Some(&region.id) || self.announced.contains(&region.id) {
            return Ok(region.id);
        }
        let (Some(socket), Some((fd, bytes))) = (self.socket(), region.exposable()) else {
            return Err(Status::LocalProtection);
        };
        let id = region.id;
        if let Err(error) = (Message::Region { id, bytes }).send(socket, &[fd]) {
            if matches!(error, Errno::PIPE | Errno::CONNRESET) {
                // It has closed the connection, which is the whole cause.
                return Err(Status::Flushed);
            }
            log.warn(
                "peers that do not take the descriptor of a region",
                format_args!("{:?}: the peer does not take the descriptor of a region: {error}", self.id),
            );
            return Err(Status::LocalQpOperation);
        }
        self.announced.push(id);
        Ok(id)
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
            && self.step(common, posting, false, Some(&mut budget)) == Ok(Step::Done)
        {
            pending.pop_front();
        }
        self.pending = pending;
        self.ring_doorbell(common, before);
    }

    /// Ends the queue pair for a request that failed here or at the peer.
    #[cold]
    #[inline(never)]
    fn fail_request(&mut self, common: &mut Common, failed: Option<Retire>) -> bool {
        let (cause, reason) = match failed {
            Some(r) if r.status == Status::Flushed => (Disconnect::Peer, "the peer closed the connection".to_owned()),
            Some(r) => (Disconnect::Failure, format!("{:?} {:#x} failed: {:?}", r.opcode, r.wr_id, r.status)),
            None => (Disconnect::Failure, "the peer refused a message".to_owned()),
        };
        self.fail(common, cause, reason);
        false
    }

    /// Whether unforgotten requests use half of the room.
    #[inline]
    pub(super) fn is_half_full(&self) -> bool {
        self.retire.len() > self.depth / 2
    }

    /// Forgets all requests, if taken and unsignalled; returns whether it did.
    #[inline]
    pub(super) fn forget_done(&mut self) -> bool {
        let done = self.tx.is_idle() && !self.retire.has_reported();
        if done {
            self.retire.clear();
        }
        done
    }

    /// Reports requests that the peer has taken. False if the queue pair ends by that.
    #[inline]
    pub(super) fn reap(&mut self, common: &mut Common, out: &mut Vec<Completion>, end: usize) -> bool {
        if !self.tx.is_idle() {
            if !self.settle_reported() {
                return self.violation(common, "it takes what was never sent");
            }
            if self.refusal().is_some() {
                return self.fail_request(common, None);
            }
        }
        while let Some(&r) = self.retire.first_reported()
            && self.tx.is_acked(r.end)
        {
            if !r.status.is_ok() {
                return self.fail_request(common, Some(r));
            }
            if out.len() >= end {
                return true;
            }
            out.push(Completion::ended(self.id, r.wr_id, r.opcode, Status::Success));
            self.retire.pop_reported();
        }
        // Unsignaled requests leave with a signaled one, while there is room for more.
        while self.is_half_full()
            && let Some(r) = self.retire.front()
            && self.tx.is_acked(r.end)
        {
            self.retire.pop();
        }
        true
    }
}

/// Records a slice; returns the status once no slice is left.
fn advance(
    status: Status,
    budget: &mut usize,
    slice: usize,
    offset: &mut usize,
    len: &mut usize,
    remote: &mut RemoteMemory,
) -> Option<Status> {
    if !status.is_ok() {
        return Some(status);
    }
    *budget -= slice;
    *offset += slice;
    *len -= slice;
    remote.address += slice as u64;
    (*len == 0).then_some(status)
}
