//! The sending side: posted requests in order, answers to the peer's Reads between them, as FPDUs.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use rpcrdma_mempool::Buf;

use super::placement::{OwnRead, Placement};
use super::send_buffer::{Payload, STAGE, SendBuffer};
use super::windows::Windows;
use super::{Arenas, Failure, SharedResources};
use crate::checks;
use crate::iwarp::setup::Negotiated;
use crate::iwarp::wire::{
    Fault, Opcode as Message, Place, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, ReadRequest, Segment,
    TAGGED_HEADER, Terminate, UNTAGGED_HEADER,
};
use crate::keys::Revoked;
use crate::{Access, Completion, Opcode, PostError, Posting, QpId, RemoteMemory, Source, Status, WorkRequest};

/// Bytes kept ready for the socket, about one write. More are encoded when it has taken some.
const AHEAD: usize = 256 << 10;

/// A request that is carried out, as far as this side can.
#[derive(Clone, Copy, Debug)]
struct Unfinished {
    wr_id: u64,
    opcode: Opcode,
    signalled: bool,
    /// It is finished when the stream is sent up to this position, and so many Reads are answered.
    sent: u64,
    reads_done: u64,
}

/// The sending state of a connection.
#[derive(Debug, Default)]
pub(in crate::iwarp) struct Outbound {
    pub(in crate::iwarp) buffer: SendBuffer,
    /// Posted requests that are not, or not wholly, in the stream.
    pending: VecDeque<Posting>,
    unfinished: VecDeque<Unfinished>,
    depth: usize,
    /// A part of the first pending request, a Write, is in the stream. Nothing may come between its segments.
    partial_write: bool,
    /// Bytes in the stream of a partial answer to the peer's oldest Read. Nothing may come between its segments.
    partial_answer: u32,
    /// The last message answered a Read, so a request is next.
    answered: bool,
    /// This side may send: the connection is established, the peer's first segment is not awaited, and no end of the
    /// stream was sent.
    pub(super) open: bool,
    /// FPDUs carry a CRC.
    pub(in crate::iwarp) crc: bool,
    /// Most bytes of payload in a tagged and in an untagged segment.
    tagged: usize,
    untagged: usize,
    max_message: usize,
    /// Most Reads of ours that may be outstanding.
    ord: usize,
    /// Numbers of the last messages on these queues. They wrap.
    pub(super) send_msn: u32,
    read_msn: u32,
    reads_sent: u64,
    /// The STag for the answer to the last Read.
    read_stag: u32,
}

impl Outbound {
    pub(super) fn new(depth: u32, random: u32) -> Self {
        Self {
            unfinished: VecDeque::with_capacity(depth.min(1024) as usize),
            depth: depth.max(1) as usize,
            read_stag: random.rotate_left(16),
            ..Self::default()
        }
    }

    pub(super) fn begin(&mut self, agreed: &Negotiated, waits: bool, max_ulpdu: usize, max_message: usize) {
        self.open = !waits;
        self.crc = agreed.crc;
        // Multiples of four, so that no pad is inside a message.
        self.tagged = (max_ulpdu - TAGGED_HEADER) & !3;
        self.untagged = (max_ulpdu - UNTAGGED_HEADER) & !3;
        self.max_message = max_message;
        self.ord = agreed.ord.into();
    }

    /// Unsent bytes of posted requests and answers.
    pub(super) fn queued(&self) -> u64 {
        let pending: usize = self.pending.iter().map(|posting| posting.wr.payload()).sum();
        (self.buffer.len() + pending) as u64
    }

    /// Whether a posted request is not finished, or bytes are not sent.
    #[inline]
    pub(in crate::iwarp) fn is_busy(&self) -> bool {
        !self.unfinished.is_empty() || !self.pending.is_empty() || self.buffer.len() > 0
    }

    /// Posts from the front of `chain` up to the queue's room.
    pub(super) fn post(
        &mut self,
        windows: &mut Windows,
        shared: &mut SharedResources,
        id: QpId,
        chain: &mut Vec<Posting>,
    ) -> Result<(), PostError> {
        let mut posted = 0;
        let result = chain.iter().try_for_each(|posting| {
            if self.unfinished.len() + self.pending.len() + posted >= self.depth {
                return Err(PostError::QueueFull);
            }
            self.check(windows, &shared.arenas, id, &posting.wr).map_err(PostError::Invalid)?;
            posted += 1;
            shared.stats.signalled += u64::from(posting.signalled);
            Ok(())
        });
        shared.stats.posts += posted as u64;
        self.pending.extend(chain.drain(..posted));
        result
    }

    /// Checks a request as the driver of an adapter does before it accepts one.
    #[inline]
    fn check(&self, windows: &mut Windows, arenas: &Arenas, id: QpId, wr: &WorkRequest) -> Result<(), &'static str> {
        let require = |ok: bool, wrong: &'static str| if ok { Ok(()) } else { Err(wrong) };
        match wr {
            WorkRequest::Send { buf, .. } => {
                require(buf.len() <= self.max_message, "a message longer than max_message")?;
                checks::known(arenas.contains(buf.arena()))
            }
            WorkRequest::Write { src, offset, len, .. } => {
                let (arena, all) = src.extent();
                checks::known(arenas.contains(arena))?;
                checks::inside(*offset, *len, all)
            }
            WorkRequest::Read { dst, offset, len, .. } => {
                require(self.ord > 0, "the peer takes no RDMA Reads")?;
                require(u32::try_from(*len).is_ok(), "a Read longer than 4 GiB - 1")?;
                checks::known(arenas.contains(dst.arena()))?;
                checks::inside(*offset, *len, dst.len())
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                require(arenas.permits(mem.arena(), *access), "memory that is not registered with these rights")?;
                checks::inside_some(*offset, *len, mem.len())?;
                require(*access != Access::LOCAL, "a window without rights")?;
                let is_free = window.qp == id && windows.keys.post_bind(window.index);
                require(is_free, "a window that is not free, or of another queue pair")
            }
            WorkRequest::LocalInvalidate { window } => {
                let is_bound = window.qp == id && windows.keys.post_invalidate(window.index);
                require(is_bound, "a window that is not bound, or of another queue pair")
            }
        }
    }

    /// Encodes output into the stream, about as much as one write takes. Answers and requests take turns.
    #[inline]
    pub(super) fn produce(&mut self, windows: &mut Windows, placement: &mut Placement) -> Result<(), Failure> {
        while self.open && self.buffer.len() < AHEAD {
            let may_answer = !self.partial_write && !placement.requests.is_empty();
            let has_turn = self.partial_answer > 0 || !self.answered;
            if may_answer && (has_turn || self.is_next_blocked(windows, placement)) {
                self.answer(windows, placement)?;
            } else if self.is_next_blocked(windows, placement) {
                break;
            } else if let Some(posting) = self.pending.pop_front() {
                self.execute(windows, placement, posting);
            }
        }
        Ok(())
    }

    /// Whether the first pending request has to wait for the peer, or there is none. An invalidation is carried out if
    /// it need not wait.
    #[inline]
    fn is_next_blocked(&self, windows: &mut Windows, placement: &Placement) -> bool {
        let reads = placement.reads.len();
        match self.pending.front().map(|posting| &posting.wr) {
            None => true,
            Some(WorkRequest::Send { fence, .. }) => *fence && reads > 0,
            Some(WorkRequest::Read { .. }) => reads >= self.ord,
            // The peer may have been faster: then the window is not bound.
            Some(WorkRequest::LocalInvalidate { window }) => {
                windows.revoke(window.index, self.buffer.sent()) == Revoked::Busy
            }
            Some(WorkRequest::Write { .. } | WorkRequest::Bind { .. }) => false,
        }
    }

    /// Appends one segment of the answer to the peer's oldest Read.
    fn answer(&mut self, windows: &mut Windows, placement: &mut Placement) -> Result<(), Failure> {
        let Some(&request) = placement.requests.front() else { return Ok(()) };
        let done = self.partial_answer;
        let len = (request.len - done).min(self.tagged as u32);
        let last = done + len == request.len;
        let place = Place::Tagged { stag: request.sink_stag, offset: request.sink_offset.wrapping_add(done.into()) };
        if len == 0 {
            self.push(Message::ReadResponse, last, place, Payload::Bytes(&[]));
        } else {
            // The window may have been revoked since the request was accepted.
            let found = windows.find(request.source_stag, request.source_offset + u64::from(done), len.into(), false);
            let (mem, offset) = found.map_err(|fault| {
                let terminate = Terminate::new(Fault::InvalidStag, None, Some(&request.encode()));
                Failure::violation(terminate, format_args!("the peer revoked memory that it reads from: {fault}"))
            })?;
            let source = Source::Lent(mem.clone());
            self.push(Message::ReadResponse, last, place, Payload::Memory(&source, offset, len as usize));
            windows.keep_until(request.source_stag, self.buffer.end());
        }
        self.partial_answer = if last { 0 } else { done + len };
        if last {
            self.answered = true;
            placement.requests.pop_front();
        }
        Ok(())
    }

    /// Carries out a request that need not wait. Of a Write only one segment: the rest is pending again.
    #[inline]
    fn execute(&mut self, windows: &mut Windows, placement: &mut Placement, posting: Posting) {
        let Posting { wr_id, signalled, wr } = posting;
        let opcode = wr.opcode();
        let mut reads_done = 0;
        self.answered = false;
        self.partial_write = false;
        match wr {
            WorkRequest::Send { buf, invalidate, .. } => self.send_message(buf, invalidate),
            WorkRequest::Write { src, offset, len, remote } => {
                let part = len.min(self.tagged);
                let place = Place::Tagged { stag: remote.rkey, offset: remote.address };
                self.push(Message::Write, part == len, place, Payload::Memory(&src, offset, part));
                if part < len {
                    let remote = RemoteMemory { address: remote.address.wrapping_add(part as u64), ..remote };
                    let wr = WorkRequest::Write { src, offset: offset + part, len: len - part, remote };
                    self.partial_write = true;
                    return self.pending.push_front(Posting { wr_id, signalled, wr });
                }
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                self.send_read_request(len as u32, remote);
                reads_done = self.reads_sent;
                placement.reads.push_back(OwnRead { stag: self.read_stag, dst, offset, len, received: 0 });
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                windows.bind(window.index, mem, offset, len, access);
            }
            // It has been carried out by `is_next_blocked`.
            WorkRequest::LocalInvalidate { .. } => {}
        }
        self.unfinished.push_back(Unfinished { wr_id, opcode, signalled, sent: self.buffer.end(), reads_done });
    }

    /// Appends one segment.
    #[inline]
    fn push(&mut self, opcode: Message, last: bool, place: Place, payload: Payload<'_>) {
        self.buffer.push_fpdu(Segment { opcode, last, place }, payload, self.crc);
    }

    /// Appends a whole message. A short one is copied, so that its buffer returns at once.
    #[inline]
    fn send_message(&mut self, buf: Buf, invalidate: Option<u32>) {
        let len = buf.len();
        if len <= STAGE {
            self.send_parts(len, invalidate, |at, part| Payload::Bytes(&buf[at..at + part]));
        } else {
            let source = Source::Frozen(buf.freeze());
            self.send_parts(len, invalidate, |at, part| Payload::Memory(&source, at, part));
        }
    }

    #[inline]
    fn send_parts<'a>(&mut self, len: usize, invalidate: Option<u32>, payload: impl Fn(usize, usize) -> Payload<'a>) {
        self.send_msn = self.send_msn.wrapping_add(1);
        let mut at = 0;
        loop {
            let part = (len - at).min(self.untagged);
            let last = at + part == len;
            let place = Place::Untagged { queue: QUEUE_SEND, msn: self.send_msn, offset: at as u32 };
            self.push(Message::Send { invalidate, solicited: false }, last, place, payload(at, part));
            if last {
                return;
            }
            at += part;
        }
    }

    /// Appends a Read Request. Its STag, `read_stag`, is valid for the answer alone: no Write may use it.
    fn send_read_request(&mut self, len: u32, RemoteMemory { rkey, address }: RemoteMemory) {
        self.read_stag = self.read_stag.wrapping_add(1 << 8);
        self.read_msn = self.read_msn.wrapping_add(1);
        self.reads_sent += 1;
        let sink_stag = self.read_stag;
        let request = ReadRequest { sink_stag, sink_offset: 0, len, source_stag: rkey, source_offset: address };
        let place = Place::Untagged { queue: QUEUE_READ_REQUEST, msn: self.read_msn, offset: 0 };
        self.push(Message::ReadRequest, true, place, Payload::Bytes(&request.encode()));
    }

    /// Appends the completions of finished requests.
    #[inline]
    pub(super) fn reap(&mut self, id: QpId, reads_done: u64, done: &mut impl Extend<Completion>) {
        let sent = self.buffer.sent();
        while let Some(first) = self.unfinished.front()
            && first.sent <= sent
            && first.reads_done <= reads_done
        {
            if first.signalled {
                done.extend([Completion::ended(id, first.wr_id, first.opcode, Status::Success)]);
            }
            self.unfinished.pop_front();
        }
    }

    /// Ends all posted requests: the oldest with `status`, the rest is flushed.
    pub(super) fn flush(&mut self, id: QpId, mut status: Status, done: &mut impl Extend<Completion>) {
        self.open = false;
        self.buffer.clear();
        let unfinished = self.unfinished.drain(..).map(|request| (request.wr_id, request.opcode));
        let pending = self.pending.drain(..).map(|posting| (posting.wr_id, posting.wr.opcode()));
        done.extend(unfinished.chain(pending).map(|(wr_id, opcode)| {
            let status = std::mem::replace(&mut status, Status::Flushed);
            Completion::ended(id, wr_id, opcode, status)
        }));
    }

    /// Queues a Terminate behind pending messages. Nothing may follow.
    pub(in crate::iwarp) fn terminate(&mut self, terminate: &Terminate) {
        let mut message = Vec::new();
        terminate.encode(&mut message);
        let place = Place::Untagged { queue: QUEUE_TERMINATE, msn: 1, offset: 0 };
        self.push(Message::Terminate, true, place, Payload::Bytes(&message));
        self.open = false;
    }

    /// Adds an empty Write to the stream, which keeps the connection alive (RFC 6581 §9.3). A message in progress
    /// serves as well: nothing may separate its segments.
    pub(in crate::iwarp) fn send_empty_write(&mut self) {
        if self.open && !self.partial_write && self.partial_answer == 0 {
            let place = Place::Tagged { stag: 0, offset: 0 };
            self.push(Message::Write, true, place, Payload::Bytes(&[]));
        }
    }
}
