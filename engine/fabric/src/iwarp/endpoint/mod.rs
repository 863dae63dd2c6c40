//! One connection's rules, without I/O: inbound bytes, outbound bytes and completions.
//!
//! | file | holds |
//! | --- | --- |
//! | `inbound` | inbound segments: check, placement, delivery |
//! | `outbound` | posted requests and answers to the peer's Reads, as FPDUs in order |
//! | `stream` | outbound bytes |
//! | `windows` | memory windows for the peer |
//!
//! A Send or Write completes when the transport has its last byte (RFC 5040 §5.5, rules 9 and 14). A Read completes
//! when its response has arrived. All complete in posting order (rule 15). The peer reports a refusal by its Terminate,
//! which ends the connection.

#![forbid(unsafe_code)]

mod inbound;
mod outbound;
mod stream;
#[cfg(test)]
mod tests;
mod windows;

use std::fmt;

use rpcrdma_mempool::ArenaId;

pub(super) use self::inbound::Taken;
use self::inbound::{Inbound, Targets};
use self::outbound::Outbound;
use self::windows::Windows;
use super::sys;
use super::wire::{Fault, Terminate};
use crate::receives::Receives;
use crate::{
    Access, Completion, Disconnect, FabricError, FabricStats, Flow, PostError, Posting, QpId, Status, WindowId,
};

/// Arenas for work requests, and their permitted rights.
#[derive(Debug, Default)]
pub(super) struct Regions(Vec<(ArenaId, Access)>);

impl Regions {
    pub(super) fn add(&mut self, arena: ArenaId, access: Access) -> Result<(), FabricError> {
        if self.contains(arena) {
            return Err(FabricError::misuse(format!("{arena:?} is registered already")));
        }
        self.0.push((arena, access));
        Ok(())
    }

    pub(super) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        let at = self.0.iter().position(|(known, _)| *known == arena);
        let at = at.ok_or_else(|| FabricError::misuse(format!("{arena:?} is not registered")))?;
        self.0.remove(at);
        Ok(())
    }

    /// Whether memory of this arena may be used in work requests. On the path of every message.
    #[inline]
    pub(super) fn contains(&self, arena: ArenaId) -> bool {
        self.0.iter().any(|(known, _)| *known == arena)
    }

    /// Whether peers may get this access to an arena.
    fn permits(&self, arena: ArenaId, access: Access) -> bool {
        self.0.iter().any(|(known, most)| *known == arena && most.permits(access))
    }
}

/// Shared state of a fabric's endpoints.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) regions: Regions,
    /// The shared receive queue.
    pub(super) receives: Receives,
    pub(super) stats: FabricStats,
}

impl Shared {
    /// No registrations, and room for `receives` posted Receives.
    pub(super) fn new(receives: usize) -> Self {
        Self { regions: Regions::default(), receives: Receives::new(receives), stats: FabricStats::default() }
    }
}

/// The negotiated terms of the connection, and each owner's parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// FPDUs carry a CRC.
    pub(super) crc: bool,
    /// Most bytes of a ULPDU that we send.
    pub(super) max_ulpdu: usize,
    /// Longest message that we take or send.
    pub(super) max_message: usize,
    /// Reads of ours that may be outstanding (ORD).
    pub(super) ord: u16,
    /// Reads of the peer that may be outstanding (IRD).
    pub(super) ird: u16,
    /// Whether this responder must wait for the first FPDU (RFC 5044 §7.1.2).
    pub(super) waits: bool,
}

/// Parameters of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) send_queue_depth: usize,
    pub(super) own_receive_queue: Option<usize>,
    pub(super) windows: u32,
    pub(super) rnr_retry: u8,
}

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) struct Failure {
    /// The Terminate message to send, if any: the fault and its segment.
    pub(super) terminate: Option<Vec<u8>>,
    /// The final status of our oldest unfinished request.
    pub(super) status: Status,
    pub(super) cause: Disconnect,
    /// For a log.
    pub(super) reason: String,
}

impl Failure {
    /// An end without a message to the peer.
    pub(super) fn new(status: Status, cause: Disconnect, reason: impl Into<String>) -> Self {
        Self { terminate: None, status, cause, reason: reason.into() }
    }

    /// The peer violates the protocol.
    fn violation(terminate: Vec<u8>, what: impl fmt::Display) -> Self {
        let reason = format!("the peer broke the rules of the fabric: {what}");
        Self { terminate: Some(terminate), ..Self::new(Status::Flushed, Disconnect::Violation, reason) }
    }

    /// We do not want the connection that the peer offers.
    pub(super) fn declined(fault: Fault, why: String) -> Self {
        let terminate = inbound::encoded(&Terminate::new(fault, None, None));
        Self { terminate: Some(terminate), ..Self::own(why) }
    }

    /// We are leaving.
    pub(super) fn own(why: impl Into<String>) -> Self {
        Self::new(Status::Flushed, Disconnect::Local, why)
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Endpoint {
    id: QpId,
    inbound: Inbound,
    outbound: Outbound,
    windows: Windows,
    /// Receives of this queue pair alone.
    pub(super) own_receives: Option<Receives>,
    limits: Limits,
}

impl Endpoint {
    /// State before the connection is established. `random` makes its STags hard to guess.
    pub(super) fn new(id: QpId, limits: Limits, random: u32) -> Self {
        Self {
            id,
            inbound: Inbound::default(),
            outbound: Outbound::new(limits.send_queue_depth, random),
            windows: Windows::new(limits.windows, random),
            own_receives: limits.own_receive_queue.map(Receives::new),
            limits,
        }
    }

    /// The connection is established.
    pub(super) fn begin(&mut self, terms: Terms) {
        self.inbound.begin(&terms);
        self.outbound.begin(&terms);
    }

    /// Fails the setup: only a Terminate message is sent, with or without CRC.
    pub(super) fn decline(&mut self, crc: bool) {
        self.outbound.crc = crc;
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn alloc_window(&mut self) -> Result<WindowId, FabricError> {
        let qp = self.id;
        let index = self.windows.add().ok_or_else(|| FabricError::all_windows(qp, self.limits.windows))?;
        Ok(WindowId { qp, index })
    }

    pub(super) fn next_rkey(&self, index: u32) -> Option<u32> {
        self.windows.keys.next(index)
    }

    /// Whether memory of this arena is exposed to the peer right now.
    pub(super) fn exposes(&self, arena: ArenaId) -> bool {
        self.windows.exposes(arena)
    }

    /// Posts from the front of `chain` up to the queue's room.
    pub(super) fn post(&mut self, shared: &mut Shared, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        self.outbound.post(&mut self.windows, shared, self.id, chain)
    }

    /// Encodes output into the stream, about as much as one write takes.
    #[inline]
    pub(super) fn produce(&mut self) -> Result<(), Failure> {
        self.outbound.produce(&mut self.windows, &mut self.inbound)
    }

    /// Whether there are bytes to send.
    #[inline]
    pub(super) fn has_bytes(&self) -> bool {
        !self.outbound.stream.is_empty()
    }

    /// The bytes to send next.
    #[inline]
    pub(super) fn slices<'a>(&'a self, to: &mut sys::Slices<'a>) {
        self.outbound.stream.slices(to);
    }

    /// The same as bytes, up to `most`, for tests without a socket.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn unsent(&self, most: usize) -> Vec<u8> {
        self.outbound.stream.bytes(most)
    }

    /// Counts `n` of them as sent.
    #[inline]
    pub(super) fn sent(&mut self, n: usize) {
        self.outbound.stream.advance(n);
    }

    /// Appends the completions of finished requests.
    #[inline]
    pub(super) fn reap(&mut self, done: &mut impl Extend<Completion>) {
        self.outbound.reap(self.id, self.inbound.placement.reads_done, done);
    }

    /// Whether something that was posted is not done.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.outbound.is_busy()
    }

    /// Bytes that were sent so far.
    #[inline]
    pub(super) fn position(&self) -> u64 {
        self.outbound.stream.sent()
    }

    /// A value that changes with the progress of waiting requests. `untaken`: bytes that were sent and that the peer
    /// has not taken.
    pub(super) fn progress(&self, untaken: u64) -> Progress {
        Progress {
            taken: self.outbound.stream.sent().saturating_sub(untaken),
            received: self.inbound.position,
            done: self.inbound.placement.reads_done,
        }
    }

    /// See [`Fabric::flow`](crate::Fabric::flow). Bytes that were sent have moved when the peer has taken them: all but
    /// `untaken`.
    pub(super) fn flow(&self, untaken: u64) -> Flow {
        Flow {
            moved: (self.outbound.stream.sent() + self.inbound.position).saturating_sub(untaken),
            queued: self.outbound.queued() + self.inbound.queued() + untaken,
        }
    }

    /// Whether the rest of a message, or an answer to a Read, is outstanding.
    pub(super) fn is_owed(&self) -> bool {
        !self.inbound.is_between() || self.inbound.has_reads()
    }

    /// Handles the peer's close, which loses nothing at the end of an FPDU.
    #[cold]
    pub(super) fn left(&self) -> Failure {
        let reason = if self.inbound.is_between() {
            "the peer closed the connection"
        } else {
            "the peer closed the connection amid a message"
        };
        Failure::new(Status::Flushed, Disconnect::Peer, reason)
    }

    /// Takes bytes of the peer.
    #[inline]
    pub(super) fn take(
        &mut self,
        shared: &mut Shared,
        input: &mut &[u8],
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<Taken, Failure> {
        let Self { id, inbound, outbound, windows, own_receives, limits } = self;
        let Shared { receives, stats, .. } = shared;
        let receives = own_receives.as_mut().unwrap_or(receives);
        let (rnr_retry, sent) = (limits.rnr_retry, outbound.stream.sent());
        let taken = inbound.take(&mut Targets { id: *id, windows, receives, stats, rnr_retry, sent, out, end }, input);
        if inbound.spoken {
            outbound.open = true;
        }
        taken
    }

    /// Whether a Receive is available for the waiting message.
    pub(super) fn can_go_on(&self, shared: &Shared) -> bool {
        match &self.own_receives {
            Some(own) => !own.is_empty(),
            None => !shared.receives.is_empty(),
        }
    }

    /// A message of the peer waits for a Receive.
    pub(super) fn waits_for_receive(&self) -> bool {
        self.inbound.waits_for_receive()
    }

    /// It has waited for longer than this.
    #[cold]
    pub(super) fn no_receive(&self, limit: impl fmt::Display) -> Failure {
        self.inbound.no_receive(limit)
    }

    /// The target of a direct read, if many of the next bytes belong to one place.
    #[inline]
    pub(super) fn direct(&mut self) -> Option<sys::ReceiveTarget<'_>> {
        self.inbound.direct(&self.windows)
    }

    /// Counts `n` bytes as read into [`direct`](Self::direct)'s target.
    #[inline]
    pub(super) fn arrived(&mut self, n: usize) {
        self.inbound.arrived(n);
    }

    /// Queues a Terminate behind pending messages. Nothing may follow.
    pub(super) fn terminate(&mut self, message: &[u8]) {
        self.outbound.terminate(message);
    }

    /// Sends a keep-alive, an empty Write (RFC 6581 §9.3), unless a message is under way.
    pub(super) fn send_empty_write(&mut self) {
        self.outbound.write_nothing();
    }

    /// Flushes requests posted to an ended connection.
    pub(super) fn refuse(&self, chain: &mut Vec<Posting>, done: &mut impl Extend<Completion>) {
        outbound::refuse(self.id, chain, done);
    }

    /// Ends the connection: completes all posted requests, the oldest unfinished one with `status`.
    pub(super) fn flush(&mut self, status: Status, done: &mut impl Extend<Completion>) {
        self.reap(done);
        self.outbound.flush(self.id, status, done);
        let (id, own) = (self.id, self.own_receives.as_mut());
        let bufs = self.inbound.end().into_iter().chain(own.into_iter().flat_map(Receives::drain));
        done.extend(bufs.map(|buf| Completion::failed_receive(id, Status::Flushed, buf)));
        self.windows.clear();
    }
}

/// The peer's progress: bytes taken (if awaited), bytes sent, and Reads answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Progress {
    taken: u64,
    received: u64,
    done: u64,
}

/// The status of our oldest unfinished request for a peer's Terminate.
fn status_of(fault: Option<Fault>) -> Status {
    use Fault::*;
    match fault {
        Some(
            InvalidStag
            | Bounds
            | AccessRights
            | NotAssociated
            | OffsetWrap
            | ProtectionUnspecified
            | TaggedInvalidStag
            | TaggedBounds
            | TaggedNotAssociated
            | TaggedOffsetWrap,
        ) => Status::RemoteAccess,
        Some(NoBuffer) => Status::RnrRetryExceeded,
        Some(
            TooLong
            | CannotInvalidate
            | OperationCannotInvalidate
            | UnexpectedOpcode
            | MsnRange
            | InvalidQueue
            | InvalidOffset,
        ) => Status::RemoteInvalidRequest,
        _ => Status::RemoteOperation,
    }
}
