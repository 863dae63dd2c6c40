//! Checks and placement of inbound segments (RFC 5040 §5, RFC 5041 §5, RFC 5042).

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;

use rpcrdma_mempool::{Buf, Lent};

use super::windows::{ExposedRange, Windows};
use crate::iwarp::sys::ReceiveTarget;
use crate::iwarp::wire::{
    PayloadPlace, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, RdmapOpcode, ReadRequest, SegmentHeader,
    TerminateFault,
};
use crate::window_keys::Revoked;
use crate::{Arrival, Completion, QpId, ReceivedBuf, Status};

/// Longest accepted Terminate message. RFC 5040 §4.8 defines at most 52 bytes.
const MAX_TERMINATE: usize = 64;

/// The messages in progress, and the target of the current segment's payload.
#[derive(Debug, Default)]
pub(super) struct Placement {
    pub(super) max_message: usize,
    /// Maximum outstanding RDMA Reads of the peer.
    pub(super) ird: usize,
    /// Numbers of the last complete messages on the queues of Sends and Read Requests. They wrap.
    pub(super) send_msn: u32,
    read_msn: u32,
    /// A message that waits for a Receive: its opcode, and the payload length of its first segment.
    pub(super) waiting: Option<(RdmapOpcode, usize)>,
    pub(super) message: Option<PartialReceive>,
    /// Whether the current segment is the last of its message.
    last: bool,
    /// Whether the current segment has no payload.
    is_empty: bool,
    target: PayloadTarget,
    /// Outstanding Reads of this side, oldest first.
    pub(super) own_reads: VecDeque<OwnRead>,
    pub(super) own_reads_done: u64,
    /// Outstanding Reads of the peer, oldest first.
    pub(super) peer_reads: VecDeque<ReadRequest>,
}

/// A partly received message.
#[derive(Debug)]
pub(super) struct PartialReceive {
    pub(super) buf: Buf,
    len: usize,
    opcode: RdmapOpcode,
}

/// An outstanding RDMA Read of this side.
#[derive(Debug)]
pub(super) struct OwnRead {
    pub(super) stag: u32,
    pub(super) dst: Lent,
    /// Offset of the first byte in `dst`.
    pub(super) offset: usize,
    pub(super) len: usize,
    /// Received bytes, which are also the tagged offset of the next segment.
    pub(super) received: usize,
}

/// The target of the current segment's payload.
#[derive(Debug, Default)]
enum PayloadTarget {
    /// None, because the segment has no payload.
    #[default]
    Nothing,
    /// The Receive of the partly received message.
    Receive,
    /// Exposed memory, by the STag and tagged offset of the next byte.
    Window { stag: u32, address: u64 },
    /// The memory of this side's oldest Read.
    Read,
    /// A Read Request, with its bytes so far.
    ReadRequest(Vec<u8>),
    /// A Terminate, with its bytes so far.
    Terminate(Vec<u8>),
}

/// A protocol violation by the peer.
pub(super) struct Violation {
    pub(super) fault: TerminateFault,
    pub(super) what: String,
    /// The Read Request at fault.
    pub(super) read: Option<[u8; ReadRequest::LEN]>,
    /// The Receive that fails because of the violation.
    pub(super) receive: Option<(Buf, Status)>,
}

impl Violation {
    #[cold]
    fn new(fault: TerminateFault, what: impl fmt::Display) -> Self {
        Self { fault, what: what.to_string(), read: None, receive: None }
    }
}

/// Returns a violation unless the condition `holds`.
#[inline]
fn require(holds: bool, fault: TerminateFault, what: fmt::Arguments<'_>) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation::new(fault, what)) }
}

impl Placement {
    /// Outstanding bytes of Reads, of this side and of the peer.
    pub(super) fn queued(&self) -> u64 {
        let own: usize = self.own_reads.iter().map(|read| read.len - read.received).sum();
        own as u64 + self.peer_reads.iter().map(|request| u64::from(request.len)).sum::<u64>()
    }

    /// Whether the current segment carries nothing: neither payload nor the end of a message or Read.
    #[inline]
    pub(super) fn is_segment_superfluous(&self) -> bool {
        self.is_empty && !(self.last && matches!(self.target, PayloadTarget::Receive | PayloadTarget::Read))
    }

    /// Checks a segment and sets the target of its payload. The first segment of a Send waits for a Receive.
    #[inline]
    pub(super) fn begin_segment(
        &mut self,
        windows: &Windows,
        segment: SegmentHeader,
        len: usize,
    ) -> Result<(), Violation> {
        (self.last, self.is_empty) = (segment.last, len == 0);
        match (segment.opcode, segment.place) {
            (RdmapOpcode::Send { .. }, PayloadPlace::Untagged { queue: QUEUE_SEND, msn, offset }) => {
                self.begin_send(segment.opcode, msn, offset as usize, len)
            }
            // An empty Write names no memory (RFC 5040 §5.2.1).
            (RdmapOpcode::Write, PayloadPlace::Tagged { .. }) if len == 0 => Ok(()),
            (RdmapOpcode::Write, PayloadPlace::Tagged { stag, offset }) => {
                self.target = PayloadTarget::Window { stag, address: offset };
                self.receive_target(windows, len).map(drop)
            }
            (RdmapOpcode::ReadResponse, PayloadPlace::Tagged { stag, offset }) => {
                self.begin_response(stag, offset, len)
            }
            (opcode, place) => self.begin_control(opcode, place, len),
        }
    }

    #[inline]
    fn begin_send(&mut self, opcode: RdmapOpcode, msn: u32, offset: usize, len: usize) -> Result<(), Violation> {
        let due = self.send_msn.wrapping_add(1);
        require(msn == due, TerminateFault::MsnRange, format_args!("message {msn}, expected {due}"))?;
        let received = self.message.as_ref().map_or(0, |message| message.len);
        let what = format_args!("a segment at offset {offset} of a message with {received} bytes received");
        require(offset == received, TerminateFault::InvalidOffset, what)?;
        let Some(message) = &self.message else {
            self.waiting = Some((opcode, len));
            return Ok(());
        };
        let what = format_args!("segments of one message have different opcodes");
        require(opcode == message.opcode, TerminateFault::UnexpectedOpcode, what)?;
        self.continue_message(len)
    }

    /// Gives a Receive to the message that waits for one.
    #[inline]
    pub(super) fn begin_message(&mut self, opcode: RdmapOpcode, len: usize, buf: Buf) -> Result<(), Violation> {
        self.waiting = None;
        self.message = Some(PartialReceive { buf, len: 0, opcode });
        self.continue_message(len)
    }

    /// Directs the next `len` bytes to the Receive of the message in progress, if they fit.
    #[inline]
    fn continue_message(&mut self, len: usize) -> Result<(), Violation> {
        let limit = |message: &PartialReceive| message.buf.capacity().min(self.max_message);
        let Some(message) = self.message.take_if(|message| message.len + len > limit(message)) else {
            self.target = PayloadTarget::Receive;
            return Ok(());
        };
        let (needed, limit) = (message.len + len, limit(&message));
        let what = format_args!("a message of at least {needed} bytes exceeds its Receive of {limit}");
        let receive = Some((message.buf, Status::LocalLength));
        Err(Violation { receive, ..Violation::new(TerminateFault::TooLong, what) })
    }

    fn begin_response(&mut self, stag: u32, address: u64, len: usize) -> Result<(), Violation> {
        let Some(read) = self.own_reads.front() else {
            return Err(Violation::new(TerminateFault::UnexpectedOpcode, "a Read Response without a Read Request"));
        };
        // STag and offset of an empty segment are not checked (RFC 5041 §5.2).
        let is_named = len == 0 || stag == read.stag;
        require(
            is_named,
            TerminateFault::TaggedInvalidStag,
            format_args!("a Read Response to a Read that is not the oldest"),
        )?;
        let (total, received) = (read.len, read.received);
        let is_next = len == 0 || address == received as u64;
        let fits = len <= total - received && self.last == (len == total - received);
        let what =
            format_args!("a Read Response of {len} bytes at {address}, with {received} of {total} bytes received");
        require(is_next && fits, TerminateFault::TaggedBounds, what)?;
        self.target = PayloadTarget::Read;
        Ok(())
    }

    /// Checks a Read Request or a Terminate, which are messages of one segment.
    #[cold]
    fn begin_control(&mut self, opcode: RdmapOpcode, place: PayloadPlace, len: usize) -> Result<(), Violation> {
        let PayloadPlace::Untagged { queue, msn, offset } = place else {
            return Err(Violation::new(TerminateFault::UnexpectedOpcode, "an untagged message in a tagged segment"));
        };
        let bytes = Vec::with_capacity(MAX_TERMINATE);
        let (due_queue, due, lengths, target) = match opcode {
            RdmapOpcode::ReadRequest => {
                let due = self.read_msn.wrapping_add(1);
                (QUEUE_READ_REQUEST, due, ReadRequest::LEN..=ReadRequest::LEN, PayloadTarget::ReadRequest(bytes))
            }
            RdmapOpcode::Terminate => (QUEUE_TERMINATE, 1, 0..=MAX_TERMINATE, PayloadTarget::Terminate(bytes)),
            // A Send on another queue.
            _ => (QUEUE_SEND, msn, 0..=0, PayloadTarget::Nothing),
        };
        require(queue == due_queue, TerminateFault::InvalidQueue, format_args!("queue {queue}, expected {due_queue}"))?;
        require(msn == due, TerminateFault::MsnRange, format_args!("message {msn} of queue {queue}, expected {due}"))?;
        let what = format_args!("a message of queue {queue} in several segments");
        require(offset == 0 && self.last, TerminateFault::InvalidOffset, what)?;
        let what = format_args!("{len} bytes in a message of queue {queue}");
        require(len <= *lengths.end(), TerminateFault::TooLong, what)?;
        require(len >= *lengths.start(), TerminateFault::OperationUnspecified, what)?;
        self.target = target;
        Ok(())
    }

    /// The memory for the next `len` bytes of the current segment, if they go to memory.
    #[inline]
    pub(super) fn receive_target<'a>(
        &'a mut self,
        windows: &'a Windows,
        len: usize,
    ) -> Result<Option<ReceiveTarget<'a>>, Violation> {
        Ok(match &self.target {
            PayloadTarget::Receive => {
                let room = self.message.as_mut().and_then(|message| message.buf.full_mut().get_mut(message.len..));
                room.and_then(|room| room.get_mut(..len)).map(ReceiveTarget::Bytes)
            }
            PayloadTarget::Window { stag, address } => {
                // The window may have been revoked since the segment began.
                let found = ExposedRange::find(windows, *stag, *address, len as u64, true);
                let refused = |fault| Violation::new(fault, format_args!("a Write is refused: {fault}"));
                let (range, offset) = found.map_err(refused)?;
                Some(ReceiveTarget::Lent(&range.mem, offset, len))
            }
            PayloadTarget::Read => {
                self.own_reads.front().map(|read| ReceiveTarget::Lent(&read.dst, read.offset + read.received, len))
            }
            PayloadTarget::Nothing | PayloadTarget::ReadRequest(_) | PayloadTarget::Terminate(_) => None,
        })
    }

    /// Places bytes of the current segment.
    #[inline]
    pub(super) fn place(&mut self, windows: &Windows, bytes: &[u8]) -> Result<(), Violation> {
        if let PayloadTarget::ReadRequest(message) | PayloadTarget::Terminate(message) = &mut self.target {
            message.extend_from_slice(bytes);
        } else if let Some(target) = self.receive_target(windows, bytes.len())? {
            target.fill(bytes);
        }
        self.advance(bytes.len());
        Ok(())
    }

    /// Advances the target by `n` bytes.
    #[inline]
    pub(super) fn advance(&mut self, n: usize) {
        match &mut self.target {
            PayloadTarget::Receive => self.message.iter_mut().for_each(|message| message.len += n),
            PayloadTarget::Window { address, .. } => *address += n as u64,
            PayloadTarget::Read => self.own_reads.iter_mut().take(1).for_each(|read| read.received += n),
            PayloadTarget::Nothing | PayloadTarget::ReadRequest(_) | PayloadTarget::Terminate(_) => {}
        }
    }

    /// Handles the end of a complete and correct segment. Appends the completion of a Receive, or returns the peer's
    /// Terminate message. This side has sent all bytes of its stream before position `sent`.
    #[inline]
    pub(super) fn end_segment(
        &mut self,
        windows: &mut Windows,
        id: QpId,
        sent: u64,
        out: &mut Vec<Completion>,
    ) -> Result<Option<Vec<u8>>, Violation> {
        match std::mem::take(&mut self.target) {
            PayloadTarget::Receive if self.last => out.extend(self.deliver(windows, id, sent)?.map(Completion::from)),
            PayloadTarget::Read if self.last => {
                self.own_reads.pop_front();
                self.own_reads_done += 1;
            }
            PayloadTarget::ReadRequest(message) => self.accept_read(windows, &message)?,
            PayloadTarget::Terminate(message) => return Ok(Some(message)),
            _ => {}
        }
        Ok(None)
    }

    #[inline]
    fn deliver(&mut self, windows: &mut Windows, id: QpId, sent: u64) -> Result<Option<Arrival>, Violation> {
        let Some(PartialReceive { buf, len, opcode: RdmapOpcode::Send { invalidate, .. } }) = self.message.take()
        else {
            return Ok(None);
        };
        if let Some(stag) = invalidate
            && windows.revoke_key(stag, ExposedRange::unused_after(sent)) != Revoked::Done
        {
            let what = "a Send with Invalidate names an STag that is not bound or that an RDMA Read uses";
            let receive = Some((buf, Status::RemoteInvalidRequest));
            return Err(Violation { receive, ..Violation::new(TerminateFault::CannotInvalidate, what) });
        }
        self.send_msn = self.send_msn.wrapping_add(1);
        Ok(Some(Arrival { qp: id, buf: ReceivedBuf::new(buf, len), invalidated: invalidate }))
    }

    /// Queues a Read of the peer for its response.
    #[cold]
    fn accept_read(&mut self, windows: &Windows, bytes: &[u8]) -> Result<(), Violation> {
        let Ok(bytes) = <&[u8; ReadRequest::LEN]>::try_from(bytes) else { return Ok(()) };
        let request = ReadRequest::decode(bytes);
        self.read_msn = self.read_msn.wrapping_add(1);
        let what = format_args!("more than {} outstanding RDMA Reads", self.ird);
        require(self.peer_reads.len() < self.ird, TerminateFault::NoBuffer, what)?;
        let ReadRequest { source_stag, source_offset, len, .. } = request;
        if request.len != 0
            && let Err(fault) = ExposedRange::find(windows, source_stag, source_offset, len.into(), false)
        {
            let violation = Violation::new(fault, format_args!("a Read is refused: {fault}"));
            return Err(Violation { read: Some(*bytes), ..violation });
        }
        self.peer_reads.push_back(request);
        Ok(())
    }
}
