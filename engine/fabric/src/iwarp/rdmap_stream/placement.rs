//! Where the payloads of inbound segments go, checked before placement. RFC 5040 §5, RFC 5041 §5, RFC 5042.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;

use rpcrdma_mempool::{Buf, Lent};

use super::windows::{ExposedRange, Windows};
use crate::iwarp::sys::ReceiveTarget;
use crate::iwarp::wire::{
    Fault, Opcode as Message, Place, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, ReadRequest, Segment,
};
use crate::keys::Revoked;
use crate::{Arrival, Completion, QpId, ReceivedBuf, Status};

/// Longest Terminate message that is accepted (RFC 5040 §4.8 defines at most 52 bytes).
const TERMINATE: usize = 64;

/// The messages in progress, and the place of the current segment's payload.
#[derive(Debug, Default)]
pub(super) struct Placement {
    pub(super) max_message: usize,
    /// Most Reads of the peer that may be unanswered.
    pub(super) ird: usize,
    /// Numbers of the last whole messages on these queues. They wrap.
    pub(super) send_msn: u32,
    read_msn: u32,
    /// A message without a Receive: its opcode, and the bytes of its first segment.
    pub(super) waiting: Option<(Message, usize)>,
    pub(super) message: Option<PartialReceive>,
    /// Whether the current segment is the last of its message.
    last: bool,
    target: Target,
    /// Unanswered Reads of ours, oldest first.
    pub(super) reads: VecDeque<OwnRead>,
    pub(super) reads_done: u64,
    /// Unanswered Reads of the peer, oldest first.
    pub(super) requests: VecDeque<ReadRequest>,
}

/// A partly received message.
#[derive(Debug)]
pub(super) struct PartialReceive {
    pub(super) buf: Buf,
    len: usize,
    opcode: Message,
}

/// A Read that was sent.
#[derive(Debug)]
pub(super) struct OwnRead {
    pub(super) stag: u32,
    pub(super) dst: Lent,
    /// First byte in `dst`.
    pub(super) offset: usize,
    pub(super) len: usize,
    /// Received bytes, which is also the offset that the peer has to name next.
    pub(super) received: usize,
}

/// Where the current segment's payload goes.
#[derive(Debug, Default)]
enum Target {
    /// Nowhere: it has none.
    #[default]
    Nothing,
    /// The Receive of the partly received message.
    Receive,
    /// Exposed memory, by the peer's name of the next byte.
    Window { stag: u32, address: u64 },
    /// The memory of our oldest Read.
    Read,
    /// A Read Request: its bytes so far.
    ReadRequest(Vec<u8>),
    /// A Terminate: its bytes so far.
    Terminate(Vec<u8>),
}

/// A rule that the peer broke.
pub(super) struct Violation {
    pub(super) fault: Fault,
    pub(super) what: String,
    /// The Read Request at fault.
    pub(super) read: Option<[u8; ReadRequest::LEN]>,
    /// The Receive that fails by it.
    pub(super) receive: Option<(Buf, Status)>,
}

impl Violation {
    #[cold]
    fn new(fault: Fault, what: impl fmt::Display) -> Self {
        Self { fault, what: what.to_string(), read: None, receive: None }
    }
}

/// Requires what a rule says; otherwise the peer broke it.
#[inline]
fn require(holds: bool, fault: Fault, what: fmt::Arguments<'_>) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation::new(fault, what)) }
}

impl Placement {
    /// Bytes of unanswered Reads, ours and the peer's.
    pub(super) fn queued(&self) -> u64 {
        let own: usize = self.reads.iter().map(|read| read.len - read.received).sum();
        own as u64 + self.requests.iter().map(|request| u64::from(request.len)).sum::<u64>()
    }

    /// Checks a segment, and finds the place of its payload. A message that begins has to wait for a Receive.
    #[inline]
    pub(super) fn begin_segment(&mut self, windows: &Windows, segment: Segment, len: usize) -> Result<(), Violation> {
        self.last = segment.last;
        match (segment.opcode, segment.place) {
            (Message::Send { .. }, Place::Untagged { queue: QUEUE_SEND, msn, offset }) => {
                self.begin_send(segment.opcode, msn, offset as usize, len)
            }
            // An empty Write names no memory (RFC 5040 §5.2.1).
            (Message::Write, Place::Tagged { .. }) if len == 0 => Ok(()),
            (Message::Write, Place::Tagged { stag, offset }) => {
                self.target = Target::Window { stag, address: offset };
                self.receive_target(windows, len).map(drop)
            }
            (Message::ReadResponse, Place::Tagged { stag, offset }) => self.begin_response(stag, offset, len),
            (opcode, place) => self.begin_control(opcode, place, len),
        }
    }

    #[inline]
    fn begin_send(&mut self, opcode: Message, msn: u32, offset: usize, len: usize) -> Result<(), Violation> {
        let due = self.send_msn.wrapping_add(1);
        require(msn == due, Fault::MsnRange, format_args!("message {msn} where {due} is due"))?;
        let received = self.message.as_ref().map_or(0, |message| message.len);
        let what = format_args!("byte {offset} of a message of which {received} have come");
        require(offset == received, Fault::InvalidOffset, what)?;
        let Some(message) = &self.message else {
            self.waiting = Some((opcode, len));
            return Ok(());
        };
        let what = format_args!("a message that changes its opcode");
        require(opcode == message.opcode, Fault::UnexpectedOpcode, what)?;
        self.continue_message(len)
    }

    /// Gives a Receive to the message that waits for one.
    #[inline]
    pub(super) fn begin_message(&mut self, opcode: Message, len: usize, buf: Buf) -> Result<(), Violation> {
        self.waiting = None;
        self.message = Some(PartialReceive { buf, len: 0, opcode });
        self.continue_message(len)
    }

    /// Directs the next `len` bytes to the Receive of the message in progress, if they fit.
    #[inline]
    fn continue_message(&mut self, len: usize) -> Result<(), Violation> {
        let most = |message: &PartialReceive| message.buf.capacity().min(self.max_message);
        let Some(message) = self.message.take_if(|message| message.len + len > most(message)) else {
            self.target = Target::Receive;
            return Ok(());
        };
        let (least, most) = (message.len + len, most(&message));
        let what = format_args!("a message of {least} bytes or more met a Receive of {most}");
        let receive = Some((message.buf, Status::LocalLength));
        Err(Violation { receive, ..Violation::new(Fault::TooLong, what) })
    }

    fn begin_response(&mut self, stag: u32, address: u64, len: usize) -> Result<(), Violation> {
        let Some(read) = self.reads.front() else {
            return Err(Violation::new(Fault::UnexpectedOpcode, "an answer to a Read that was never sent"));
        };
        // An empty answer's name and place are not checked (RFC 5041 §5.2).
        let is_named = len == 0 || stag == read.stag;
        require(is_named, Fault::TaggedInvalidStag, format_args!("an answer to another Read than the oldest"))?;
        let (all, received) = (read.len, read.received);
        let is_next = len == 0 || address == received as u64;
        let fits = len <= all - received && self.last == (len == all - received);
        let what = format_args!("{len} bytes at {address} in answer to a Read of {all}, of which {received} have come");
        require(is_next && fits, Fault::TaggedBounds, what)?;
        self.target = Target::Read;
        Ok(())
    }

    /// Checks a Read Request or a Terminate, which are messages of one segment.
    #[cold]
    fn begin_control(&mut self, opcode: Message, place: Place, len: usize) -> Result<(), Violation> {
        let Place::Untagged { queue, msn, offset } = place else {
            return Err(Violation::new(Fault::UnexpectedOpcode, "an untagged message in a tagged segment"));
        };
        let bytes = Vec::with_capacity(TERMINATE);
        let (due_queue, due, lengths, target) = match opcode {
            Message::ReadRequest => {
                let due = self.read_msn.wrapping_add(1);
                (QUEUE_READ_REQUEST, due, ReadRequest::LEN..=ReadRequest::LEN, Target::ReadRequest(bytes))
            }
            Message::Terminate => (QUEUE_TERMINATE, 1, 0..=TERMINATE, Target::Terminate(bytes)),
            // A Send on another queue.
            _ => (QUEUE_SEND, msn, 0..=0, Target::Nothing),
        };
        require(queue == due_queue, Fault::InvalidQueue, format_args!("queue {queue} where {due_queue} belongs"))?;
        require(msn == due, Fault::MsnRange, format_args!("message {msn} of queue {queue} where {due} is due"))?;
        let what = format_args!("a message of queue {queue} in several segments");
        require(offset == 0 && self.last, Fault::InvalidOffset, what)?;
        let what = format_args!("{len} bytes in a message of queue {queue}");
        require(len <= *lengths.end(), Fault::TooLong, what)?;
        require(len >= *lengths.start(), Fault::OperationUnspecified, what)?;
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
            Target::Receive => {
                let room = self.message.as_mut().and_then(|message| message.buf.full_mut().get_mut(message.len..));
                room.and_then(|room| room.get_mut(..len)).map(ReceiveTarget::Bytes)
            }
            Target::Window { stag, address } => {
                // It may have been revoked since the segment began.
                let found = ExposedRange::find(windows, *stag, *address, len as u64, true);
                let refused = |fault| Violation::new(fault, format_args!("a Write is refused: {fault}"));
                let (range, offset) = found.map_err(refused)?;
                Some(ReceiveTarget::Lent(&range.mem, offset, len))
            }
            Target::Read => {
                self.reads.front().map(|read| ReceiveTarget::Lent(&read.dst, read.offset + read.received, len))
            }
            Target::Nothing | Target::ReadRequest(_) | Target::Terminate(_) => None,
        })
    }

    /// Puts bytes of the current segment where they belong.
    #[inline]
    pub(super) fn place(&mut self, windows: &Windows, bytes: &[u8]) -> Result<(), Violation> {
        if let Target::ReadRequest(message) | Target::Terminate(message) = &mut self.target {
            message.extend_from_slice(bytes);
        } else if let Some(target) = self.receive_target(windows, bytes.len())? {
            target.fill(bytes);
        }
        self.advance(bytes.len());
        Ok(())
    }

    /// Moves the place of the next byte.
    #[inline]
    pub(super) fn advance(&mut self, n: usize) {
        match &mut self.target {
            Target::Receive => self.message.iter_mut().for_each(|message| message.len += n),
            Target::Window { address, .. } => *address += n as u64,
            Target::Read => self.reads.iter_mut().take(1).for_each(|read| read.received += n),
            Target::Nothing | Target::ReadRequest(_) | Target::Terminate(_) => {}
        }
    }

    /// Handles the end of a segment, which is whole and correct. Appends the message that it completes, or returns the
    /// peer's Terminate. The stream has sent all before `sent`.
    #[inline]
    pub(super) fn end_segment(
        &mut self,
        windows: &mut Windows,
        id: QpId,
        sent: u64,
        out: &mut Vec<Completion>,
    ) -> Result<Option<Vec<u8>>, Violation> {
        match std::mem::take(&mut self.target) {
            Target::Receive if self.last => out.extend(self.deliver(windows, id, sent)?.map(Completion::from)),
            Target::Read if self.last => {
                self.reads.pop_front();
                self.reads_done += 1;
            }
            Target::ReadRequest(message) => self.accept_read(windows, &message)?,
            Target::Terminate(message) => return Ok(Some(message)),
            _ => {}
        }
        Ok(None)
    }

    #[inline]
    fn deliver(&mut self, windows: &mut Windows, id: QpId, sent: u64) -> Result<Option<Arrival>, Violation> {
        let Some(PartialReceive { buf, len, opcode: Message::Send { invalidate, .. } }) = self.message.take() else {
            return Ok(None);
        };
        if let Some(stag) = invalidate
            && windows.revoke_key(stag, ExposedRange::is_free(sent)) != Revoked::Done
        {
            let what = "the peer invalidates an STag that is not bound here, or that it reads from";
            let receive = Some((buf, Status::RemoteInvalidRequest));
            return Err(Violation { receive, ..Violation::new(Fault::CannotInvalidate, what) });
        }
        self.send_msn = self.send_msn.wrapping_add(1);
        Ok(Some(Arrival { qp: id, buf: ReceivedBuf::new(buf, len), invalidated: invalidate }))
    }

    /// Queues a Read of the peer for its answer.
    #[cold]
    fn accept_read(&mut self, windows: &Windows, bytes: &[u8]) -> Result<(), Violation> {
        let Ok(bytes) = <&[u8; ReadRequest::LEN]>::try_from(bytes) else { return Ok(()) };
        let request = ReadRequest::decode(bytes);
        self.read_msn = self.read_msn.wrapping_add(1);
        let what = format_args!("more than {} Reads at a time", self.ird);
        require(self.requests.len() < self.ird, Fault::NoBuffer, what)?;
        let ReadRequest { source_stag, source_offset, len, .. } = request;
        if request.len != 0
            && let Err(fault) = ExposedRange::find(windows, source_stag, source_offset, len.into(), false)
        {
            let violation = Violation::new(fault, format_args!("a Read is refused: {fault}"));
            return Err(Violation { read: Some(*bytes), ..violation });
        }
        self.requests.push_back(request);
        Ok(())
    }
}
