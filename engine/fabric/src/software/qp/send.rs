//! The sending half of a queue pair. Requests are executed in posting order, usually within the post.

use rpcrdma_mempool::{ArenaId, Buf, PeerMapping};
use rustix::io::Errno;

use super::retire::ExecutedRequest;
use super::{FALSE_HEAD, PEER_CLOSED, SoftwareQp, SoftwareQpState};
use crate::log_limit::ClockedLog;
use crate::software::SoftwareCommon;
use crate::software::message::SocketMessage;
use crate::software::region::Regions;
use crate::software::ring::RecordHeader;
use crate::software::window::WindowFields;
use crate::window_keys::Revoked;
use crate::{Completion, Disconnect, Opcode, PostError, Posting, RemoteMemory, Source, Status, WorkRequest};

/// Bytes copied per queue pair and post or poll, for fairness.
const COPY_BUDGET: usize = 1 << 20;

impl SoftwareQp {
    /// Posts a chain; see [`Fabric::post_send`](crate::Fabric::post_send).
    #[inline]
    pub(crate) fn post(&mut self, common: &mut SoftwareCommon, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        if self.post_single(common, chain) { Ok(()) } else { self.post_chain(common, chain) }
    }

    /// Posts the chain if it is a single Send with room, as in an exchange of calls and replies. Otherwise changes
    /// nothing.
    #[inline(never)]
    fn post_single(&mut self, common: &mut SoftwareCommon, chain: &mut Vec<Posting>) -> bool {
        if chain.len() == 1
            && self.can_execute_now()
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
    fn post_chain(&mut self, common: &mut SoftwareCommon, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let before = self.tx.sent();
        let limit = before + COPY_BUDGET as u64;
        if self.can_execute_now() {
            let sends = chain.iter().take_while(|posting| self.tx.sent() < limit && self.send_now(common, posting));
            let sent = sends.count();
            common.stats.posts += sent as u64;
            if sent > 0 {
                chain.drain(..sent).for_each(Posting::finish);
            }
        }
        let result = if chain.is_empty() { Ok(()) } else { self.post_remaining(common, chain, limit) };
        if self.tx.sent() != before {
            self.ring_doorbell(common);
        }
        result
    }

    /// Posts the remaining requests of a chain. Executes them up to the first that has to wait, and queues the others.
    fn post_remaining(
        &mut self,
        common: &mut SoftwareCommon,
        chain: &mut Vec<Posting>,
        limit: u64,
    ) -> Result<(), PostError> {
        if self.state == SoftwareQpState::Connecting {
            return Err(PostError::NotConnected);
        }
        let mut budget = COPY_BUDGET;
        let mut must_wait = !self.can_execute_now();
        let mut result = Ok(());
        let (mut taken, mut waiting) = (0, self.pending.len());
        for posting in chain.iter_mut() {
            let is_send = matches!(posting.wr, WorkRequest::Send { .. });
            if is_send && !must_wait && self.tx.sent() < limit && self.send_now(common, posting) {
                taken += 1;
                continue;
            }
            if self.retire.len() + waiting >= self.depth && self.state != SoftwareQpState::Error {
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
            common.stats.signaled += u64::from(posting.signaled);
            self.has_work |= posting.signaled;
            if must_wait || !self.execute(common, posting, &mut budget) {
                (must_wait, waiting) = (true, waiting + 1);
            } else {
                must_wait = self.halted;
            }
        }
        common.stats.posts += taken as u64;
        self.has_work |= must_wait;
        let executed = taken + self.pending.len() - waiting;
        // The drop of executed requests returns their memory.
        if executed == chain.len() {
            chain.clear();
            return result;
        }
        chain.drain(..executed);
        let waiting = chain.drain(..taken - executed);
        if self.state == SoftwareQpState::Error {
            common.ready.extend(waiting.map(|posting| posting.flushed(self.id)));
        } else if taken > executed {
            if self.pending.is_empty() {
                // `tend_qp` measures the wait for the peer.
                common.control.attention.push(self.id.slot);
            }
            self.pending.extend(waiting);
        }
        result
    }

    /// Whether requests can be executed within their post, because no earlier request waits or has failed.
    #[inline]
    fn can_execute_now(&self) -> bool {
        !self.has_work || self.state == SoftwareQpState::Up && !self.halted && self.pending.is_empty()
    }

    /// Executes a request, if it is a Send and there is room. The caller counts the post.
    #[inline(always)]
    fn send_now(&mut self, common: &mut SoftwareCommon, posting: &Posting) -> bool {
        let WorkRequest::Send { buf, invalidate, .. } = &posting.wr else { return false };
        let refused = self.retire.len() >= self.depth
            || buf.len() > self.max_message as usize
            || !common.regions.contains(buf.arena());
        if refused || !self.tx.has_room(buf.len() as u32) || !self.send(buf, invalidate) {
            return false;
        }
        let Posting { wr_id, signaled, .. } = *posting;
        let end = self.tx.sent();
        self.retire.push(ExecutedRequest { wr_id, end, opcode: Opcode::Send, signaled, status: Status::Success });
        if signaled {
            self.has_work = true;
            common.stats.signaled += 1;
        }
        true
    }

    /// Continues waiting requests.
    pub(super) fn resume(&mut self, common: &mut SoftwareCommon) {
        if self.halted || self.state == SoftwareQpState::Draining {
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

    /// Wakes the peer if it sleeps, after records were published.
    #[inline]
    fn ring_doorbell(&self, common: &mut SoftwareCommon) {
        common.stats.doorbells += 1;
        if self.peer_may_sleep && self.bell(self.lines.peer_bell).take() {
            self.wake_peer();
        }
    }

    /// Executes a request as far as room and budget allow. False if a later poll continues it.
    fn execute(&mut self, common: &mut SoftwareCommon, posting: &mut Posting, budget: &mut usize) -> bool {
        let Some(status) = self.execute_step(common, &mut posting.wr, budget) else { return false };
        self.halted = !status.is_ok();
        if posting.signaled || self.halted || matches!(posting.wr, WorkRequest::Send { .. }) {
            let Posting { wr_id, signaled, .. } = *posting;
            let (end, opcode) = (self.tx.sent(), posting.wr.opcode());
            self.retire.push(ExecutedRequest { wr_id, end, opcode, signaled, status });
        }
        true
    }

    /// Executes a part of a request. Returns its status, or `None` if some of the work is left.
    fn execute_step(
        &mut self,
        common: &mut SoftwareCommon,
        wr: &mut WorkRequest,
        budget: &mut usize,
    ) -> Option<Status> {
        match wr {
            WorkRequest::Send { buf, invalidate, .. } => {
                // The first message of a turn may exceed the budget, because it would otherwise never be sent.
                if *budget < buf.len() && *budget < COPY_BUDGET {
                    return None;
                }
                if !self.tx.has_room(buf.len() as u32) && !self.grow_ring(buf.len() as u32) {
                    return None;
                }
                *budget = budget.saturating_sub(buf.len());
                Some(if self.send(buf, invalidate) { Status::Success } else { Status::LocalQpOperation })
            }
            WorkRequest::Write { src, offset, len, remote } => {
                self.copy(common, (offset, len), remote, budget, true, |memory, at, from, bytes| match src {
                    Source::Lent(lent) => memory.copy_from_lent(at, lent, from, bytes),
                    Source::Frozen(frozen) => memory.write(at, &frozen[from..from + bytes]),
                })
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                self.copy(common, (offset, len), remote, budget, false, |memory, at, to, bytes| {
                    memory.copy_to_lent(at, dst, to, bytes)
                })
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                let region = match self.announce(&mut common.control.log, &common.regions, mem.arena()) {
                    Ok(region) => region,
                    Err(status) => return Some(status),
                };
                let address = (mem.offset() + *offset) as u64;
                let exposure = WindowFields { region, access: *access, address, len: *len as u64 };
                let is_bound = self.windows.bind(window.index, mem, exposure);
                Some(if is_bound { Status::Success } else { Status::WindowBind })
            }
            // If the window is no longer bound, the peer has invalidated it, and the request succeeds.
            WorkRequest::LocalInvalidate { window } => {
                (self.windows.revoke(window.index) != Revoked::Busy).then_some(Status::Success)
            }
        }
    }

    /// Writes a message into the ring. False without room.
    #[inline(always)]
    fn send(&mut self, buf: &Buf, invalidate: &Option<u32>) -> bool {
        let Self { ring, tx, rx, .. } = self;
        // The header is made after the copy, which is a call, so that no values have to be kept during the call.
        tx.push(&ring.tx(), buf, || RecordHeader::message(buf.len() as u32, *invalidate, rx.report()))
    }

    /// Enlarges the sending ring for a message of `len` bytes. False at the maximum.
    #[cold]
    #[inline(never)]
    fn grow_ring(&mut self, len: u32) -> bool {
        let Some(bytes) = self.tx.larger(len) else { return false };
        let moved = self.ring.move_tx(self.layout.tx_ring(), bytes as usize);
        if moved {
            self.tx.grow(&self.ring.tx(), bytes);
        }
        moved
    }

    /// Copies a slice to or from the peer's memory, if its window grants all remaining bytes. `None` if bytes remain.
    fn copy(
        &mut self,
        common: &mut SoftwareCommon,
        (offset, len): (&mut usize, &mut usize),
        remote: &mut RemoteMemory,
        budget: &mut usize,
        is_write: bool,
        act: impl FnOnce(&PeerMapping, usize, usize, usize) -> bool,
    ) -> Option<Status> {
        if *len == 0 {
            return Some(Status::Success);
        }
        let claim =
            self.peer_windows.as_ref().and_then(|w| w.claim(remote.rkey, remote.address, *len as u64, is_write));
        let Some(claim) = claim else {
            // A peer that closes the connection shuts its socket down before it revokes its windows, so the request was
            // not refused.
            if matches!(self.read_socket(common), Ok(false)) {
                return Some(Status::Flushed);
            }
            common.stats.access_refused += 1;
            return Some(Status::RemoteAccess);
        };
        // The peer sent the region's descriptor before the key, so the descriptor waits at the socket. The end of the
        // connection is handled by `read_connected`.
        if self.exposed.get(claim.region).is_none()
            && let Err(error) = self.read_socket(common)
        {
            let line = format_args!("{:?}: {error}", self.id);
            common.control.log.warn("peers whose exposed memory is not known", line);
        }
        let slice = (*len).min(*budget);
        let region = self.exposed.get(claim.region);
        let copied = region.is_some_and(|region| act(region, claim.offset, *offset, slice));
        if let Some(windows) = &self.peer_windows {
            windows.release(claim);
        }
        if !copied {
            // The peer's table names memory that the peer has not exposed.
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

    /// Sends the descriptor of an arena to the peer, once per connection. Returns the number of the region.
    fn announce(&mut self, log: &mut ClockedLog, regions: &Regions, arena: ArenaId) -> Result<u32, Status> {
        // Usually the arena was announced last.
        if let Some(&(_, id)) = self.announced.iter().rev().find(|(known, _)| *known == arena) {
            return Ok(id);
        }
        let region = regions.get(arena).and_then(|region| Some((region.id, region.exposable()?)));
        let (Some(socket), Some((id, (fd, bytes)))) = (self.socket(), region) else {
            return Err(Status::LocalProtection);
        };
        match (SocketMessage::Region { id, bytes }).send(socket, &[fd]) {
            Ok(()) => {
                self.announced.push((arena, id));
                Ok(id)
            }
            // The peer has closed the connection, so the request is flushed.
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Status::Flushed),
            Err(error) => {
                let line = format_args!("{:?}: the peer does not take the descriptor of a region: {error}", self.id);
                log.warn("peers that do not take the descriptor of a region", line);
                Err(Status::LocalQpOperation)
            }
        }
    }

    /// Whether executed requests fill more than half of the send queue.
    #[inline]
    pub(super) fn is_half_full(&self) -> bool {
        self.retire.len() > self.depth / 2
    }

    /// Completes requests that the peer has taken. False if the queue pair has ended.
    #[inline]
    pub(super) fn reap(&mut self, common: &mut SoftwareCommon, out: &mut Vec<Completion>, end: usize) -> bool {
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
        while let Some(&request) = self.retire.first_reported()
            && request.end <= self.tx.acked()
        {
            if !request.status.is_ok() {
                let (cause, reason) = match request.status {
                    Status::Flushed => (Disconnect::Peer, PEER_CLOSED.to_owned()),
                    status => {
                        (Disconnect::Failure, format!("{:?} {:#x} failed: {status}", request.opcode, request.wr_id))
                    }
                };
                self.fail(common, cause, reason, None);
                return false;
            }
            if out.len() >= end {
                return true;
            }
            out.push(Completion::ended(self.id, request.wr_id, request.opcode, Status::Success));
            self.retire.pop_reported();
        }
        // Completing a signaled request removes the unsignaled ones before it. Otherwise they are removed here.
        while self.is_half_full() && self.retire.pop(self.tx.acked()).is_some() {}
        true
    }
}
