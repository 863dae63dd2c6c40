//! The rules of one connection, without I/O: an RDMAP stream (RFC 5040) from its first FPDU on.
//!
//! The owner moves bytes between the stream and the socket, and takes completions.
//!
//! | file | holds |
//! | --- | --- |
//! | `placement` | inbound segments: check, placement, delivery |
//! | `outbound` | posted requests and answers to the peer's Reads, as FPDUs in order |
//! | `send_buffer` | bytes that are not sent yet |
//! | `windows` | memory windows for the peer |
//!
//! A Send or Write completes when the socket has its last byte (RFC 5040 §5.5, rules 9 and 14). A Read completes when
//! its response has arrived. All complete in posting order (rule 15). The peer reports a refusal by its Terminate,
//! which ends the connection.

#![forbid(unsafe_code)]

mod outbound;
mod placement;
mod send_buffer;
#[cfg(test)]
mod tests;
mod windows;

use std::fmt;

use self::outbound::Outbound;
use self::placement::{Placement, Violation};
use self::windows::Windows;
use super::setup::Negotiated;
use super::sys::ReceiveTarget;
use super::wire::{Fault, SegmentReader, Step, Terminate};
use crate::receives::Receives;
use crate::registrations::Registrations;
use crate::{Completion, ConnectParams, Disconnect, FabricStats, Flow, QpId, Status};

/// Least bytes for a direct read to one place. A system call costs as much as copying a few KiB.
const DIRECT: usize = 8 << 10;
/// Polls per retry of a message without a Receive.
const RNR_POLLS: u32 = 1024;

/// Registered arenas, of which only the rights matter.
pub(super) type Arenas = Registrations<()>;

/// What the streams of a fabric share.
#[derive(Debug)]
pub(super) struct SharedResources {
    pub(super) arenas: Arenas,
    /// The shared receive queue.
    pub(super) receives: Receives,
    pub(super) stats: FabricStats,
}

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) struct Failure {
    /// The Terminate message to send, if any.
    pub(super) terminate: Option<Terminate>,
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

    /// An end by this side.
    pub(super) fn local(reason: impl Into<String>) -> Self {
        Self::new(Status::Flushed, Disconnect::Local, reason)
    }

    /// The peer violates the protocol.
    fn violation(terminate: Terminate, what: impl fmt::Display) -> Self {
        let reason = format!("the peer broke the rules of the fabric: {what}");
        Self { terminate: Some(terminate), ..Self::new(Status::Flushed, Disconnect::Violation, reason) }
    }
}

/// How far the peer's bytes were consumed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InputStatus {
    /// All of them.
    Consumed,
    /// Until there was no room for more completions.
    CompletionsFull,
    /// Up to a message that waits for a Receive.
    NoReceive,
}

/// One end of a connection, from its first FPDU on.
#[derive(Debug)]
pub(super) struct RdmapStream {
    pub(super) id: QpId,
    pub(super) outbound: Outbound,
    pub(super) windows: Windows,
    /// Receives of this queue pair alone.
    pub(super) own_receives: Option<Receives>,
    pub(super) rnr_retry: u8,
    reader: SegmentReader,
    placement: Placement,
    /// Polls in which the waiting message has found no Receive.
    rnr_polls: u32,
    /// Bytes consumed so far.
    received: u64,
}

impl RdmapStream {
    /// The state before the connection is established. `random` makes its STags hard to guess.
    pub(super) fn new(id: QpId, params: &ConnectParams, random: u32) -> Self {
        Self {
            id,
            outbound: Outbound::new(params.send_queue_depth, random),
            windows: Windows::new(params.windows, random),
            own_receives: params.own_receive_queue.map(|depth| Receives::new(depth as usize)),
            rnr_retry: params.rnr_retry,
            reader: SegmentReader::default(),
            placement: Placement::default(),
            rnr_polls: 0,
            received: 0,
        }
    }

    /// Begins when the connection is established. A responder `waits`: it is silent until the first FPDU (RFC 5044
    /// §7.1.2). The limits are the longest ULPDU to send, and the longest message in either direction.
    pub(super) fn begin(&mut self, agreed: &Negotiated, waits: bool, max_ulpdu: usize, max_message: usize) {
        self.reader = SegmentReader::new(agreed.crc);
        self.placement.max_message = max_message;
        self.placement.ird = agreed.ird.into();
        self.outbound.begin(agreed, waits, max_ulpdu);
    }

    /// Numbers that change with the progress of waiting requests: bytes that the peer has taken, bytes received, and
    /// Reads answered. `unacknowledged`: bytes that were sent and that the peer has not taken.
    pub(super) fn progress(&self, unacknowledged: u64) -> [u64; 3] {
        let taken = self.outbound.buffer.sent().saturating_sub(unacknowledged);
        [taken, self.received, self.placement.reads_done]
    }

    /// See [`Fabric::flow`](crate::Fabric::flow). Sent bytes have moved when the peer has taken them, which it has but
    /// for `unacknowledged`.
    pub(super) fn flow(&self, unacknowledged: u64) -> Flow {
        Flow {
            moved: (self.outbound.buffer.sent() + self.received).saturating_sub(unacknowledged),
            queued: self.outbound.queued() + self.placement.queued() + unacknowledged,
        }
    }

    /// Whether no message and no segment is partly received.
    fn is_between(&self) -> bool {
        self.reader.is_between() && self.placement.waiting.is_none() && self.placement.message.is_none()
    }

    /// Whether the rest of a message, or an answer to a Read, is outstanding.
    pub(super) fn awaits_peer(&self) -> bool {
        !self.is_between() || !self.placement.reads.is_empty()
    }

    /// Whether a message of the peer waits for a Receive.
    pub(super) fn waits_for_receive(&self) -> bool {
        self.placement.waiting.is_some()
    }

    /// Whether a Receive is available for the waiting message.
    pub(super) fn has_receive(&self, shared: &SharedResources) -> bool {
        !self.own_receives.as_ref().unwrap_or(&shared.receives).is_empty()
    }

    /// Consumes bytes of the peer. Appends completions up to a total of `end`.
    #[inline]
    pub(super) fn consume(
        &mut self,
        shared: &mut SharedResources,
        input: &mut &[u8],
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<InputStatus, Failure> {
        let before = input.len();
        let status = loop {
            if out.len() >= end {
                break InputStatus::CompletionsFull;
            }
            let placed = if let Some((opcode, len)) = self.placement.waiting {
                let Some(buf) = self.own_receives.as_mut().unwrap_or(&mut shared.receives).pop() else {
                    self.count_poll_without_receive(&mut shared.stats)?;
                    break InputStatus::NoReceive;
                };
                self.rnr_polls = 0;
                self.placement.begin_message(opcode, len, buf)
            } else {
                match self.reader.step(input) {
                    Ok(None) => break InputStatus::Consumed,
                    Ok(Some(Step::Segment { segment, len })) => {
                        self.outbound.open = true;
                        self.placement.begin_segment(&self.windows, segment, len)
                    }
                    Ok(Some(Step::Payload(bytes))) => self.placement.place(&self.windows, bytes),
                    Ok(Some(Step::End)) => {
                        let sent = self.outbound.buffer.sent();
                        match self.placement.end_segment(&mut self.windows, self.id, sent, out) {
                            Ok(Some(terminate)) => return Err(terminate_failure(&terminate)),
                            ended => ended.map(drop),
                        }
                    }
                    Err(error) => {
                        shared.stats.peer_violations += 1;
                        return Err(Failure::violation(Terminate::new(error.fault(), None, None), error));
                    }
                }
            };
            placed.map_err(|violation| self.report(&mut shared.stats, out, violation))?;
        };
        self.received += (before - input.len()) as u64;
        Ok(status)
    }

    /// Leaves a message without a Receive in place for the granted retries. TCP makes the peer wait; iWARP has no
    /// receiver-not-ready (RFC 5041 §7.1.1).
    #[cold]
    fn count_poll_without_receive(&mut self, stats: &mut FabricStats) -> Result<(), Failure> {
        if self.rnr_polls == 0 {
            stats.receiver_not_ready += 1;
        }
        self.rnr_polls = self.rnr_polls.saturating_add(1);
        if self.rnr_retry < 7 && self.rnr_polls > u32::from(self.rnr_retry) * RNR_POLLS {
            return Err(self.no_receive("rnr_retry allows"));
        }
        Ok(())
    }

    /// The failure for a message that has waited for a Receive for longer than `limit`.
    #[cold]
    pub(super) fn no_receive(&self, limit: impl fmt::Display) -> Failure {
        let terminate = Terminate::new(Fault::NoBuffer, Some(self.reader.header()), None);
        Failure::violation(terminate, format_args!("a message met no Receive for longer than {limit}"))
    }

    /// Counts a violation, and names it to the peer with the segment at fault.
    #[cold]
    fn report(&self, stats: &mut FabricStats, out: &mut Vec<Completion>, violation: Violation) -> Failure {
        let Violation { fault, what, read, receive } = violation;
        *(if fault.is_access() { &mut stats.access_refused } else { &mut stats.peer_violations }) += 1;
        out.extend(receive.map(|(buf, status)| Completion::failed_receive(self.id, status, buf)));
        Failure::violation(Terminate::new(fault, Some(self.reader.header()), read.as_ref()), what)
    }

    /// The target of a direct read, if many of the next bytes belong to one place. Report the bytes read there by
    /// [`advance_direct`](Self::advance_direct).
    #[inline]
    pub(super) fn direct_target(&mut self) -> Option<ReceiveTarget<'_>> {
        let left = self.reader.payload_left();
        if left < DIRECT || self.waits_for_receive() {
            return None;
        }
        // The next step reports a revoked window.
        self.placement.receive_target(&self.windows, left).ok()?
    }

    /// Counts `n` bytes, at least one, as read into the direct target.
    #[inline]
    pub(super) fn advance_direct(&mut self, n: usize) {
        self.reader.take(n);
        self.received += n as u64;
        self.placement.advance(n);
    }

    /// The failure for the peer's close, which loses nothing at the end of an FPDU.
    #[cold]
    pub(super) fn peer_closed(&self) -> Failure {
        let partial = if self.is_between() { "" } else { " amid a message" };
        Failure::new(Status::Flushed, Disconnect::Peer, format!("the peer closed the connection{partial}"))
    }
}

/// The failure for the peer's Terminate.
#[cold]
fn terminate_failure(message: &[u8]) -> Failure {
    let (fault, words) = match Terminate::decode(message) {
        Ok(terminate) => (terminate.fault(), terminate.to_string()),
        Err(error) => (None, error.to_string()),
    };
    let status = status_of(fault);
    let cause = match status {
        Status::RemoteAccess | Status::RemoteInvalidRequest => Disconnect::Refused,
        _ => Disconnect::Failure,
    };
    Failure::new(status, cause, format!("the peer has ended the stream: {words}"))
}

/// The status of our oldest unfinished request for the fault of a peer's Terminate.
fn status_of(fault: Option<Fault>) -> Status {
    use Fault::*;
    match fault {
        Some(NoBuffer) => Status::RnrRetryExceeded,
        Some(CannotInvalidate | OperationCannotInvalidate | UnexpectedOpcode) => Status::RemoteInvalidRequest,
        Some(TooLong | MsnRange | InvalidQueue | InvalidOffset) => Status::RemoteInvalidRequest,
        Some(fault) if fault.is_access() => Status::RemoteAccess,
        _ => Status::RemoteOperation,
    }
}
