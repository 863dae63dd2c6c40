//! The protocol rules of one connection without I/O: an RDMAP stream (RFC 5040) from its first FPDU on.
//!
//! The owner moves bytes between the stream and the socket, and takes the completions.
//!
//! | file | holds |
//! | --- | --- |
//! | `placement` | inbound segments: checks, placement, delivery |
//! | `outbound` | encodes posted requests and Read Responses as FPDUs, in order |
//! | `send_buffer` | FPDUs that are not yet sent |
//! | `windows` | memory windows for the peer |
//!
//! A Send or Write completes when the socket has taken its last byte (RFC 5040 §5.5, rules 9 and 14). A Read completes
//! when its response has arrived. All requests complete in posting order (rule 15). A peer that refuses a request sends
//! a Terminate, which ends the connection.

#![forbid(unsafe_code)]

mod outbound;
mod placement;
mod send_buffer;
#[cfg(test)]
mod tests;
mod windows;

use std::fmt;
use std::time::{Duration, Instant};

use self::outbound::Outbound;
use self::placement::{Placement, Violation};
use self::windows::Windows;
use super::setup::Negotiated;
use super::sys::ReceiveTarget;
use super::wire::{ReaderStep, SegmentReader, Terminate, TerminateFault};
use crate::receives::ReceiveQueue;
use crate::registrations::Registrations;
use crate::{Completion, ConnectParams, Disconnect, FabricStats, Flow, QpId, Status};

/// Minimum bytes of a direct read, because a system call costs as much as copying a few KiB.
const MIN_DIRECT_READ: usize = 8 << 10;
/// Polls that count as one retry of a message without a Receive.
const RNR_POLLS: u32 = 1024;
/// Maximum segments per turn and connection, for fairness: short ones cost much more time per byte than long ones.
const MAX_SEGMENTS: usize = 256;
/// Maximum segments per second that carry no payload and end neither a message nor a Read. No peer needs many: they are
/// sent to start a connection, and to wake the other end.
const MAX_EMPTY_SEGMENTS: u32 = 1024;

/// Registered arenas with their rights.
pub(super) type Arenas = Registrations<()>;

/// Resources that all streams of a fabric share.
#[derive(Debug)]
pub(super) struct SharedResources {
    pub(super) arenas: Arenas,
    /// The shared receive queue.
    pub(super) receives: ReceiveQueue,
    pub(super) stats: FabricStats,
}

/// The reason for the end of a connection.
#[derive(Debug)]
pub(super) struct StreamFailure {
    /// The Terminate message to send, if any.
    pub(super) terminate: Option<Terminate>,
    /// The status of this side's oldest unfinished request.
    pub(super) status: Status,
    pub(super) cause: Disconnect,
    /// Text for the log.
    pub(super) reason: String,
}

impl StreamFailure {
    /// A failure without a Terminate.
    pub(super) fn new(status: Status, cause: Disconnect, reason: impl Into<String>) -> Self {
        Self { terminate: None, status, cause, reason: reason.into() }
    }

    /// The end of a connection by this side.
    pub(super) fn local(reason: impl Into<String>) -> Self {
        Self::new(Status::Flushed, Disconnect::Local, reason)
    }

    /// A protocol violation by the peer.
    fn violation(terminate: Terminate, what: impl fmt::Display) -> Self {
        let reason = format!("the peer violated the iWARP protocol: {what}");
        Self { terminate: Some(terminate), ..Self::new(Status::Flushed, Disconnect::Violation, reason) }
    }
}

/// Why the consumption of the peer's bytes stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InputStatus {
    /// All bytes were consumed.
    Consumed,
    /// There was no room for more completions, or the turn's share of segments was used up.
    ShareUsed,
    /// The next message waits for a Receive.
    NoReceive,
}

/// One end of a connection, from its first FPDU on.
#[derive(Debug)]
pub(super) struct RdmapStream {
    pub(super) id: QpId,
    pub(super) outbound: Outbound,
    pub(super) windows: Windows,
    /// The queue pair's own receive queue, if it does not use the shared one.
    pub(super) own_receives: Option<ReceiveQueue>,
    pub(super) rnr_retry: u8,
    reader: SegmentReader,
    placement: Placement,
    /// Polls in which the waiting message has found no Receive.
    rnr_polls: u32,
    /// Segments that this turn may still end.
    segments_left: usize,
    empty_segments: EmptySegments,
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
            own_receives: params.own_receive_queue.map(|depth| ReceiveQueue::new(depth as usize)),
            rnr_retry: params.rnr_retry,
            reader: SegmentReader::default(),
            placement: Placement::default(),
            rnr_polls: 0,
            segments_left: 0,
            empty_segments: EmptySegments::default(),
            received: 0,
        }
    }

    /// Starts the stream once the connection is established. A responder sends nothing until the first FPDU arrives
    /// (RFC 5044 §7.1.2). `max_ulpdu` bounds sent ULPDUs, and `max_message` messages in either direction.
    pub(super) fn begin(&mut self, agreed: &Negotiated, is_responder: bool, max_ulpdu: usize, max_message: usize) {
        self.reader = SegmentReader::new(agreed.crc);
        self.placement.max_message = max_message;
        self.placement.ird = agreed.ird.into();
        self.outbound.begin(agreed, is_responder, max_ulpdu);
    }

    /// Counters that change when waiting requests make progress: bytes acknowledged, bytes received, and Reads
    /// completed. `unacknowledged` is the number of sent bytes that the peer has not acknowledged.
    pub(super) fn progress(&self, unacknowledged: u64) -> [u64; 3] {
        let acknowledged = self.outbound.buffer.sent().saturating_sub(unacknowledged);
        [acknowledged, self.received, self.placement.own_reads_done]
    }

    /// See [`Fabric::flow`](crate::Fabric::flow). Sent bytes count as moved once they are acknowledged.
    pub(super) fn flow(&self, unacknowledged: u64) -> Flow {
        Flow {
            moved: (self.outbound.buffer.sent() + self.received).saturating_sub(unacknowledged),
            queued: self.outbound.queued() + self.placement.queued() + unacknowledged,
        }
    }

    /// Whether no segment and no message is partly received.
    fn is_between_messages(&self) -> bool {
        self.reader.is_at_fpdu_boundary() && self.placement.waiting.is_none() && self.placement.message.is_none()
    }

    /// Whether the rest of a message or a Read Response is outstanding.
    pub(super) fn awaits_peer(&self) -> bool {
        !self.is_between_messages() || !self.placement.own_reads.is_empty()
    }

    /// Whether a message of the peer waits for a Receive.
    pub(super) fn waits_for_receive(&self) -> bool {
        self.placement.waiting.is_some()
    }

    /// Whether a Receive is available for the waiting message.
    pub(super) fn has_receive(&self, shared: &SharedResources) -> bool {
        !self.own_receives.as_ref().unwrap_or(&shared.receives).is_empty()
    }

    /// Starts a turn, with a new share of segments.
    #[inline]
    pub(super) fn start_turn(&mut self) {
        self.segments_left = MAX_SEGMENTS;
    }

    /// Consumes bytes of the peer, within the turn's share of segments. Appends completions to `out` up to a total
    /// length of `end`.
    #[inline]
    pub(super) fn consume(
        &mut self,
        shared: &mut SharedResources,
        input: &mut &[u8],
        out: &mut Vec<Completion>,
        end: usize,
    ) -> Result<InputStatus, StreamFailure> {
        let before = input.len();
        let status = loop {
            if out.len() >= end || self.segments_left == 0 {
                break InputStatus::ShareUsed;
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
                    Ok(Some(ReaderStep::Segment { segment, len })) => {
                        self.outbound.may_send = true;
                        self.placement.begin_segment(&self.windows, segment, len)
                    }
                    Ok(Some(ReaderStep::Payload(bytes))) => self.placement.place(&self.windows, bytes),
                    Ok(Some(ReaderStep::End)) => {
                        self.segments_left -= 1;
                        if self.placement.is_segment_superfluous() {
                            self.count_empty_segment(&mut shared.stats)?;
                        }
                        let sent = self.outbound.buffer.sent();
                        match self.placement.end_segment(&mut self.windows, self.id, sent, out) {
                            Ok(Some(terminate)) => return Err(terminate_failure(&terminate)),
                            ended => ended.map(drop),
                        }
                    }
                    Err(error) => {
                        shared.stats.peer_violations += 1;
                        return Err(StreamFailure::violation(Terminate::new(error.fault(), None, None), error));
                    }
                }
            };
            placed.map_err(|violation| self.record_violation(&mut shared.stats, out, violation))?;
        };
        self.received += (before - input.len()) as u64;
        Ok(status)
    }

    /// Counts a segment that carries nothing, and fails at the limit.
    #[cold]
    fn count_empty_segment(&mut self, stats: &mut FabricStats) -> Result<(), StreamFailure> {
        if self.empty_segments.count(Instant::now) {
            return Ok(());
        }
        stats.peer_violations += 1;
        let terminate = Terminate::new(TerminateFault::OperationUnspecified, Some(self.reader.header()), None);
        let what = format_args!("more than {MAX_EMPTY_SEGMENTS} segments without payload in a second");
        Err(StreamFailure::violation(terminate, what))
    }

    /// Counts a poll in which a message found no Receive, and fails when the retries of `rnr_retry` are used up. TCP
    /// makes the peer wait meanwhile, because iWARP has no receiver-not-ready (RFC 5041 §7.1.1).
    #[cold]
    fn count_poll_without_receive(&mut self, stats: &mut FabricStats) -> Result<(), StreamFailure> {
        if self.rnr_polls == 0 {
            stats.receiver_not_ready += 1;
        }
        self.rnr_polls = self.rnr_polls.saturating_add(1);
        if self.rnr_retry < ConnectParams::UNLIMITED_RNR_RETRY && self.rnr_polls > u32::from(self.rnr_retry) * RNR_POLLS
        {
            return Err(self.missing_receive(format_args!("rnr_retry ({})", self.rnr_retry)));
        }
        Ok(())
    }

    /// Returns the failure for a message that found no Receive within `limit`.
    #[cold]
    pub(super) fn missing_receive(&self, limit: impl fmt::Display) -> StreamFailure {
        let terminate = Terminate::new(TerminateFault::NoBuffer, Some(self.reader.header()), None);
        StreamFailure::violation(terminate, format_args!("no Receive was posted for a message within {limit}"))
    }

    /// Counts a violation. Returns its failure, with a Terminate that names the segment at fault.
    #[cold]
    fn record_violation(
        &self,
        stats: &mut FabricStats,
        out: &mut Vec<Completion>,
        violation: Violation,
    ) -> StreamFailure {
        let Violation { fault, what, read, receive } = violation;
        *(if fault.is_access() { &mut stats.access_refused } else { &mut stats.peer_violations }) += 1;
        out.extend(receive.map(|(buf, status)| Completion::failed_receive(self.id, status, buf)));
        StreamFailure::violation(Terminate::new(fault, Some(self.reader.header()), read.as_ref()), what)
    }

    /// The target of a direct read, if many of the next bytes have the same destination. The caller reports the bytes
    /// read there by [`advance_direct`](Self::advance_direct).
    #[inline]
    pub(super) fn direct_target(&mut self) -> Option<ReceiveTarget<'_>> {
        let rest = self.reader.payload_left();
        if rest < MIN_DIRECT_READ || self.waits_for_receive() {
            return None;
        }
        // `consume` reports a revoked window.
        self.placement.receive_target(&self.windows, rest).ok()?
    }

    /// Counts `n` bytes as read into the direct target. `n` is at least 1.
    #[inline]
    pub(super) fn advance_direct(&mut self, n: usize) {
        self.reader.skip_payload(n);
        self.received += n as u64;
        self.placement.advance(n);
    }

    /// Returns the failure for the peer's close, which loses data unless it is between messages.
    #[cold]
    pub(super) fn peer_closed(&self) -> StreamFailure {
        let partial = if self.is_between_messages() { "" } else { " in the middle of a message" };
        StreamFailure::new(Status::Flushed, Disconnect::Peer, format!("the peer closed the connection{partial}"))
    }
}

/// Counts segments without payload.
#[derive(Debug, Default)]
struct EmptySegments {
    count: u32,
    /// Time of the first counted segment.
    since: Option<Instant>,
}

impl EmptySegments {
    /// Counts a segment. Returns false if there were more than the limit within a second. Reads the clock only once for
    /// as many segments as the limit.
    fn count(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.count += 1;
        if self.count > 1 && self.count <= MAX_EMPTY_SEGMENTS {
            return true;
        }
        let now = now();
        let is_within = self.count == 1 || self.since.is_some_and(|since| now - since >= Duration::from_secs(1));
        (self.count, self.since) = (1, Some(now));
        is_within
    }
}

/// Returns the failure for the peer's Terminate.
#[cold]
fn terminate_failure(message: &[u8]) -> StreamFailure {
    let (fault, text) = match Terminate::decode(message) {
        Ok(terminate) => (terminate.fault(), terminate.to_string()),
        Err(error) => (None, error.to_string()),
    };
    let status = request_status(fault);
    let cause = match status {
        Status::RemoteAccess | Status::RemoteInvalidRequest => Disconnect::Refused,
        _ => Disconnect::Failure,
    };
    StreamFailure::new(status, cause, format!("the peer sent a Terminate: {text}"))
}

/// The status of this side's oldest unfinished request after a peer's Terminate with this fault.
fn request_status(fault: Option<TerminateFault>) -> Status {
    use TerminateFault::*;
    match fault {
        Some(NoBuffer) => Status::RnrRetryExceeded,
        Some(CannotInvalidate | OperationCannotInvalidate | UnexpectedOpcode) => Status::RemoteInvalidRequest,
        Some(TooLong | MsnRange | InvalidQueue | InvalidOffset) => Status::RemoteInvalidRequest,
        Some(fault) if fault.is_access() => Status::RemoteAccess,
        _ => Status::RemoteOperation,
    }
}
