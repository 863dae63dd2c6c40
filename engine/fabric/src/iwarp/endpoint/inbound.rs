//! Inbound segments, checked before placement. RFC 5040 §5, RFC 5041 §5, RFC 5042.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;

use rpcrdma_mempool::{Buf, Lent};

use super::windows::Windows;
use super::{Failure, Terms, status_of};
use crate::iwarp::sys;
use crate::iwarp::wire::{
    Fault, Opcode as Message, Place, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, ReadRequest, Reader, Segment,
    Step, Terminate,
};
use crate::keys::Revoked;
use crate::receives::Receives;
use crate::{Arrival, Completion, Disconnect, FabricStats, QpId, ReceivedBuf, Status};

/// Minimum bytes for a direct read to one place. A system call costs as much as copying a few KiB.
const DIRECT: usize = 8 << 10;
/// Polls per retry of a message without a Receive.
const RNR_POLLS: u32 = 1024;
/// Kept bytes of a Terminate message (RFC 5040 §4.8 defines at most 52).
const TERMINATE: usize = 64;

/// The result of processing the peer's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Taken {
    /// All of them are taken.
    All,
    /// No room for completions is left.
    Full,
    /// A message waits for a Receive.
    NoReceive,
}

/// The targets and resources of inbound data.
pub(super) struct Targets<'a> {
    pub(super) id: QpId,
    pub(super) windows: &'a mut Windows,
    pub(super) receives: &'a mut Receives,
    pub(super) stats: &'a mut FabricStats,
    pub(super) rnr_retry: u8,
    /// The outgoing stream has sent all bytes before this one.
    pub(super) sent: u64,
    /// Completions, up to `end` of them.
    pub(super) out: &'a mut Vec<Completion>,
    pub(super) end: usize,
}

/// The inbound state of a connection.
#[derive(Debug)]
pub(super) struct Inbound {
    reader: Reader,
    pub(super) placement: Placement,
    /// First segment of a message without a Receive, and its bytes.
    waiting: Option<(Segment, usize)>,
    rnr_polls: u32,
    /// Bytes taken.
    pub(super) position: u64,
    /// The peer has begun a segment.
    pub(super) spoken: bool,
}

/// The destination of all bytes.
#[derive(Debug)]
pub(super) struct Placement {
    max_message: usize,
    ird: usize,
    /// Numbers of the next message on each queue.
    pub(super) send_msn: u32,
    read_msn: u32,
    /// The incoming message.
    message: Option<Incoming>,
    /// The incoming segment.
    current: Segment,
    target: Target,
    /// Reads of ours that are not answered yet, oldest first.
    pub(super) reads: VecDeque<OwnRead>,
    pub(super) reads_done: u64,
    /// Reads of the peer that are not answered yet, oldest first.
    pub(super) requests: VecDeque<ReadRequest>,
}

/// A partly received message.
#[derive(Debug)]
struct Incoming {
    buf: Buf,
    len: usize,
    kind: Message,
}

/// A Read that was sent.
#[derive(Debug)]
pub(super) struct OwnRead {
    pub(super) stag: u32,
    pub(super) dst: Lent,
    /// First byte in `dst`.
    pub(super) offset: usize,
    pub(super) len: usize,
    /// Received bytes; the peer names them by this.
    pub(super) got: usize,
}

/// The destination of the current segment's payload.
#[derive(Debug)]
enum Target {
    /// No target.
    Nothing,
    /// Into the incoming message.
    Receive,
    /// Exposed memory, by the peer's name for it.
    Window { stag: u32, address: u64 },
    /// Into the memory of our oldest Read.
    Read,
    /// A Read Request or Terminate: the bytes received so far.
    Control(Vec<u8>),
}

/// A rule that was broken.
struct Violation {
    fault: Fault,
    what: String,
    /// The Read Request that is at fault.
    read: Option<[u8; 28]>,
}

impl Violation {
    fn new(fault: Fault, what: impl fmt::Display) -> Self {
        Self { fault, what: what.to_string(), read: None }
    }
}

impl Default for Inbound {
    fn default() -> Self {
        Self {
            reader: Reader::new(false),
            placement: Placement {
                max_message: 0,
                ird: 0,
                send_msn: 1,
                read_msn: 1,
                message: None,
                current: Segment { opcode: Message::Write, last: true, place: Place::Tagged { stag: 0, offset: 0 } },
                target: Target::Nothing,
                reads: VecDeque::new(),
                reads_done: 0,
                requests: VecDeque::new(),
            },
            waiting: None,
            rnr_polls: 0,
            position: 0,
            spoken: false,
        }
    }
}

impl Inbound {
    pub(super) fn begin(&mut self, terms: &Terms) {
        self.reader = Reader::new(terms.crc);
        self.placement.max_message = terms.max_message;
        self.placement.ird = terms.ird.into();
    }

    pub(super) fn has_reads(&self) -> bool {
        !self.placement.reads.is_empty()
    }

    pub(super) fn waits_for_receive(&self) -> bool {
        self.waiting.is_some()
    }

    /// Whether no message and no segment is half here.
    pub(super) fn is_between(&self) -> bool {
        self.reader.is_between() && self.placement.message.is_none() && self.waiting.is_none()
    }

    /// Bytes that Reads are still to bring, ours and the peer's.
    pub(super) fn queued(&self) -> u64 {
        let Placement { reads, requests, .. } = &self.placement;
        let own: usize = reads.iter().map(|read| read.len - read.got).sum();
        own as u64 + requests.iter().map(|request| u64::from(request.len)).sum::<u64>()
    }

    /// The peer's oldest unanswered Read.
    #[inline]
    pub(super) fn request(&self) -> Option<&ReadRequest> {
        self.placement.requests.front()
    }

    /// Consumes as many of the peer's bytes as possible.
    #[inline]
    pub(super) fn take(&mut self, to: &mut Targets<'_>, input: &mut &[u8]) -> Result<Taken, Failure> {
        let before = input.len();
        let taken = loop {
            if to.out.len() >= to.end {
                break Taken::Full;
            }
            if let Some((segment, len)) = self.waiting {
                let Some(buf) = to.receives.pop() else {
                    self.not_ready(to)?;
                    break Taken::NoReceive;
                };
                self.waiting = None;
                self.rnr_polls = 0;
                let begun = self.placement.begin_message(to, segment, len, buf);
                begun.map_err(|wrong| self.wrong(to, wrong))?;
            }
            let Self { reader, placement, .. } = self;
            let step = match reader.step(input) {
                Ok(None) => break Taken::All,
                Ok(Some(step)) => step,
                Err(error) => {
                    to.stats.peer_violations += 1;
                    let terminate = Terminate::new(error.fault(), None, None);
                    return Err(Failure::violation(encoded(&terminate), error));
                }
            };
            let done = match step {
                Step::Segment { segment, len } => {
                    self.spoken = true;
                    match placement.begin_segment(to.windows, segment, len) {
                        Ok(true) => match to.receives.pop() {
                            Some(buf) => placement.begin_message(to, segment, len, buf),
                            None => {
                                self.waiting = Some((segment, len));
                                Ok(())
                            }
                        },
                        Ok(false) => Ok(()),
                        Err(wrong) => Err(wrong),
                    }
                }
                Step::Payload(bytes) => placement.place(to.windows, bytes),
                Step::End => match placement.end(to) {
                    Ok(None) => Ok(()),
                    Ok(Some(failure)) => return Err(failure),
                    Err(wrong) => Err(wrong),
                },
            };
            if let Err(wrong) = done {
                return Err(self.wrong(to, wrong));
            }
        };
        self.position += (before - input.len()) as u64;
        Ok(taken)
    }

    /// Leaves a message without a Receive in place, for the granted retries. TCP makes the peer wait; iWARP has no
    /// receiver-not-ready (RFC 5041 §7.1.1).
    #[cold]
    fn not_ready(&mut self, to: &mut Targets<'_>) -> Result<(), Failure> {
        if self.rnr_polls == 0 {
            to.stats.receiver_not_ready += 1;
        }
        self.rnr_polls = self.rnr_polls.saturating_add(1);
        if to.rnr_retry < 7 && self.rnr_polls > u32::from(to.rnr_retry) * RNR_POLLS {
            return Err(self.no_receive("rnr_retry allows"));
        }
        Ok(())
    }

    /// A message has waited for a Receive for longer than this.
    #[cold]
    pub(super) fn no_receive(&self, limit: impl fmt::Display) -> Failure {
        let terminate = Terminate::new(Fault::NoBuffer, Some(self.reader.header()), None);
        Failure::violation(encoded(&terminate), format_args!("a message met no Receive for longer than {limit}"))
    }

    #[cold]
    fn wrong(&mut self, to: &mut Targets<'_>, wrong: Violation) -> Failure {
        // Too long not by its first segment: it has a Receive already.
        if wrong.fault == Fault::TooLong
            && matches!(self.placement.current.opcode, Message::Send { .. })
            && let Some(Incoming { buf, .. }) = self.placement.message.take()
        {
            to.out.push(Completion::failed_receive(to.id, Status::LocalLength, buf));
        }
        if is_access(wrong.fault) {
            to.stats.access_refused += 1;
        } else {
            to.stats.peer_violations += 1;
        }
        let terminate = Terminate::new(wrong.fault, Some(self.reader.header()), wrong.read.as_ref());
        Failure::violation(encoded(&terminate), wrong.what)
    }

    /// The destination of the next bytes, if many of them have the same.
    #[inline]
    pub(super) fn direct<'a>(&'a mut self, windows: &'a Windows) -> Option<sys::ReceiveTarget<'a>> {
        let left = self.reader.payload_left();
        if left < DIRECT || self.waiting.is_some() {
            return None;
        }
        match &self.placement.target {
            Target::Receive => {
                let incoming = self.placement.message.as_mut()?;
                let place = incoming.buf.full_mut().get_mut(incoming.len..)?;
                Some(sys::ReceiveTarget::Bytes(place.get_mut(..left)?))
            }
            Target::Window { stag, address } => {
                // The next step reports a revoked window.
                let (mem, offset) = windows.find(*stag, *address, left as u64, true).ok()?;
                Some(sys::ReceiveTarget::Lent(mem, offset, left))
            }
            Target::Read => {
                let read = self.placement.reads.front()?;
                Some(sys::ReceiveTarget::Lent(&read.dst, read.offset + read.got, left))
            }
            Target::Nothing | Target::Control(_) => None,
        }
    }

    /// Counts `n` bytes as read there.
    #[inline]
    pub(super) fn arrived(&mut self, n: usize) {
        self.reader.take(n);
        self.position += n as u64;
        self.placement.advance(n);
    }

    /// Ends the stream; returns the Receive of a partial message.
    pub(super) fn end(&mut self) -> Option<Buf> {
        self.placement.reads.clear();
        self.placement.requests.clear();
        self.placement.target = Target::Nothing;
        self.waiting = None;
        self.placement.message.take().map(|incoming| incoming.buf)
    }
}

impl Placement {
    /// Checks a segment. True if it is the first of a message, which needs a Receive.
    #[inline]
    fn begin_segment(&mut self, windows: &Windows, segment: Segment, len: usize) -> Result<bool, Violation> {
        self.current = segment;
        match (segment.opcode, segment.place) {
            (Message::Send { .. }, Place::Untagged { queue: QUEUE_SEND, msn, offset }) => {
                self.begin_send(segment.opcode, msn, offset, len)
            }
            (Message::Write, Place::Tagged { stag, offset }) => self.begin_write(windows, stag, offset, len),
            (Message::ReadResponse, Place::Tagged { stag, offset }) => self.begin_response(stag, offset, len),
            (_, place) => self.begin_control(place, len),
        }
    }

    #[inline]
    fn begin_send(&mut self, kind: Message, msn: u32, offset: u32, len: usize) -> Result<bool, Violation> {
        if msn != self.send_msn {
            let what = format_args!("message {msn} where {} is due", self.send_msn).to_string();
            return Err(Violation::new(Fault::MsnRange, what));
        }
        let Some(incoming) = &self.message else {
            if offset != 0 {
                return Err(Violation::new(Fault::InvalidOffset, "a message that does not begin with its first byte"));
            }
            return Ok(true);
        };
        if offset as usize != incoming.len {
            let what = format!("byte {offset} of a message of which {} have come", incoming.len);
            return Err(Violation::new(Fault::InvalidOffset, what));
        }
        if kind != incoming.kind {
            return Err(Violation::new(Fault::UnexpectedOpcode, "a message that changes its kind"));
        }
        self.fits(incoming.len, len, incoming.buf.capacity())?;
        self.target = Target::Receive;
        Ok(false)
    }

    fn fits(&self, have: usize, more: usize, capacity: usize) -> Result<(), Violation> {
        let most = capacity.min(self.max_message);
        if have + more <= most {
            return Ok(());
        }
        let what = format!("a message of {} bytes or more met a Receive of {most}", have + more);
        Err(Violation::new(Fault::TooLong, what))
    }

    /// Stores the message that begins with this segment in this buffer.
    #[inline]
    fn begin_message(&mut self, to: &mut Targets<'_>, segment: Segment, len: usize, buf: Buf) -> Result<(), Violation> {
        if let Err(wrong) = self.fits(0, len, buf.capacity()) {
            to.out.push(Completion::failed_receive(to.id, Status::LocalLength, buf));
            return Err(wrong);
        }
        self.message = Some(Incoming { buf, len: 0, kind: segment.opcode });
        self.target = Target::Receive;
        Ok(())
    }

    fn begin_write(&mut self, windows: &Windows, stag: u32, address: u64, len: usize) -> Result<bool, Violation> {
        self.target = if len == 0 {
            // Such a Write names no memory (RFC 5040 §5.2.1).
            Target::Nothing
        } else {
            let found = windows.find(stag, address, len as u64, true);
            found.map_err(|refused| Violation::new(refused.fault(true), format!("a Write is refused: {refused:?}")))?;
            Target::Window { stag, address }
        };
        Ok(false)
    }

    fn begin_response(&mut self, stag: u32, address: u64, len: usize) -> Result<bool, Violation> {
        let Some(read) = self.reads.front() else {
            return Err(Violation::new(Fault::UnexpectedOpcode, "an answer to a Read that was never sent"));
        };
        // An empty answer's name and place are not checked (RFC 5041 §5.2).
        if len > 0 && stag != read.stag {
            return Err(Violation::new(Fault::TaggedInvalidStag, "an answer to another Read than the oldest"));
        }
        let left = read.len - read.got;
        let elsewhere = len > 0 && address != read.got as u64;
        if elsewhere || len > left || self.current.last != (len == left) {
            let what = format!(
                "{len} bytes at {address} in answer to a Read of {}, of which {} have come",
                read.len, read.got
            );
            return Err(Violation::new(Fault::TaggedBounds, what));
        }
        self.target = Target::Read;
        Ok(false)
    }

    #[cold]
    fn begin_control(&mut self, place: Place, len: usize) -> Result<bool, Violation> {
        let Place::Untagged { queue, msn, offset } = place else {
            return Err(Violation::new(Fault::UnexpectedOpcode, "an untagged message in a tagged segment"));
        };
        let (due, number, most) = match self.current.opcode {
            Message::ReadRequest => (QUEUE_READ_REQUEST, self.read_msn, 28),
            Message::Terminate => (QUEUE_TERMINATE, 1, TERMINATE),
            _ => (QUEUE_SEND, 0, 0),
        };
        if queue != due {
            return Err(Violation::new(Fault::InvalidQueue, format!("queue {queue} where {due} belongs")));
        }
        if msn != number {
            return Err(Violation::new(
                Fault::MsnRange,
                format!("message {msn} of queue {queue} where {number} is due"),
            ));
        }
        if offset != 0 || !self.current.last {
            return Err(Violation::new(
                Fault::InvalidOffset,
                format!("a message of queue {queue} in several segments"),
            ));
        }
        let what = || format!("{len} bytes in a message of queue {queue}");
        if len > most {
            return Err(Violation::new(Fault::TooLong, what()));
        }
        if due == QUEUE_READ_REQUEST && len < most {
            return Err(Violation::new(Fault::OperationUnspecified, what()));
        }
        self.target = Target::Control(Vec::with_capacity(len));
        Ok(false)
    }

    /// Puts bytes of the current segment where they belong.
    #[inline]
    fn place(&mut self, windows: &Windows, bytes: &[u8]) -> Result<(), Violation> {
        let placed = match &mut self.target {
            Target::Receive => match &mut self.message {
                Some(incoming) => {
                    let place = incoming.buf.full_mut().get_mut(incoming.len..).and_then(|p| p.get_mut(..bytes.len()));
                    place.map(|place| place.copy_from_slice(bytes)).is_some()
                }
                None => false,
            },
            Target::Window { stag, address } => {
                // It may have been revoked since the segment began.
                let found = windows.find(*stag, *address, bytes.len() as u64, true);
                let (mem, offset) = found.map_err(|refused| {
                    Violation::new(refused.fault(true), format!("a Write is refused: {refused:?}"))
                })?;
                mem.write_at(offset, bytes)
            }
            Target::Read => {
                let read = self.reads.front();
                read.is_some_and(|read| read.dst.write_at(read.offset + read.got, bytes))
            }
            Target::Control(have) => {
                have.extend_from_slice(bytes);
                true
            }
            Target::Nothing => true,
        };
        debug_assert!(placed, "a segment that was checked does not fit");
        self.advance(bytes.len());
        Ok(())
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        match &mut self.target {
            Target::Receive => {
                if let Some(incoming) = &mut self.message {
                    incoming.len += n;
                }
            }
            Target::Window { address, .. } => *address += n as u64,
            Target::Read => {
                if let Some(read) = self.reads.front_mut() {
                    read.got += n;
                }
            }
            Target::Nothing | Target::Control(_) => {}
        }
    }

    /// The segment is here, and whole. A failure is the peer's Terminate.
    #[inline]
    fn end(&mut self, to: &mut Targets<'_>) -> Result<Option<Failure>, Violation> {
        match std::mem::replace(&mut self.target, Target::Nothing) {
            Target::Receive if self.current.last => self.deliver(to)?,
            Target::Read if self.current.last => {
                self.reads.pop_front();
                self.reads_done += 1;
            }
            Target::Control(bytes) => return self.end_control(to.windows, &bytes),
            Target::Receive | Target::Read | Target::Window { .. } | Target::Nothing => {}
        }
        Ok(None)
    }

    #[inline]
    fn deliver(&mut self, to: &mut Targets<'_>) -> Result<(), Violation> {
        let Some(Incoming { buf, len, kind }) = self.message.take() else { return Ok(()) };
        let invalidated = match kind {
            Message::Send { invalidate, .. } => invalidate,
            _ => None,
        };
        if let Some(stag) = invalidated
            && to.windows.revoke_key(stag, to.sent) != Revoked::Done
        {
            to.out.push(Completion::failed_receive(to.id, Status::RemoteInvalidRequest, buf));
            let what = "the peer invalidates an STag that is not bound here, or that it reads from";
            return Err(Violation::new(Fault::CannotInvalidate, what));
        }
        self.send_msn = self.send_msn.wrapping_add(1);
        to.out.push(Arrival { qp: to.id, buf: ReceivedBuf::new(buf, len), invalidated }.into());
        Ok(())
    }

    #[cold]
    fn end_control(&mut self, windows: &Windows, bytes: &[u8]) -> Result<Option<Failure>, Violation> {
        if self.current.opcode == Message::Terminate {
            let (fault, words) = match Terminate::decode(bytes) {
                Ok(terminate) => (terminate.fault(), terminate.to_string()),
                Err(error) => (None, error.to_string()),
            };
            let status = status_of(fault);
            let cause = match status {
                Status::RemoteAccess | Status::RemoteInvalidRequest => Disconnect::Refused,
                _ => Disconnect::Failure,
            };
            return Ok(Some(Failure::new(status, cause, format!("the peer has ended the stream: {words}"))));
        }
        let Ok(bytes) = <&[u8; 28]>::try_from(bytes) else { return Ok(None) };
        let request = ReadRequest::decode(bytes);
        self.read_msn = self.read_msn.wrapping_add(1);
        if self.requests.len() >= self.ird {
            let what = format!("more than {} Reads at a time", self.ird);
            return Err(Violation::new(Fault::NoBuffer, what));
        }
        if request.len != 0
            && let Err(refused) = windows.find(request.source_stag, request.source_offset, request.len.into(), false)
        {
            let what = format!("a Read is refused: {refused:?}");
            return Err(Violation { fault: refused.fault(false), what, read: Some(*bytes) });
        }
        self.requests.push_back(request);
        Ok(None)
    }
}

pub(super) fn encoded(terminate: &Terminate) -> Vec<u8> {
    let mut bytes = Vec::new();
    terminate.encode(&mut bytes);
    bytes
}

/// Whether a fault is about a key, a bound or a right.
fn is_access(fault: Fault) -> bool {
    use Fault::*;
    matches!(
        fault,
        InvalidStag
            | Bounds
            | AccessRights
            | OffsetWrap
            | CannotInvalidate
            | TaggedInvalidStag
            | TaggedBounds
            | TaggedOffsetWrap
    )
}
