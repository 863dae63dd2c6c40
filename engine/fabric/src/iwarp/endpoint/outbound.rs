//! Outbound stream: posted requests in order, answers to Reads between, as FPDUs.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use rpcrdma_mempool::Buf;

use super::inbound::{Inbound, OwnRead};
use super::stream::{Payload, STAGE, Stream};
use super::windows::Windows;
use super::{Failure, Shared, Terms};
use crate::checks;
use crate::iwarp::wire::{
    Fault, Opcode as Message, Place, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, ReadRequest, Segment,
    TAGGED_HEADER, Terminate, UNTAGGED_HEADER,
};
use crate::keys::Revoked;
use crate::{Access, Completion, Opcode, PostError, Posting, QpId, RemoteMemory, Source, Status, WorkRequest};

/// Bytes kept ready for the socket, about one write. More are cut when it has taken some.
const AHEAD: usize = 256 << 10;

/// Progress of a request.
#[derive(Debug)]
enum Step {
    /// All of it is in the stream, or done.
    Done,
    /// A part of it is in the stream; this is left.
    More(Posting),
    /// It waits for the peer.
    Wait(Posting),
}

/// When a request is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Until {
    /// The stream is sent up to here.
    Sent(u64),
    /// So many Reads are answered.
    Read(u64),
}

/// A request finished on this side.
#[derive(Clone, Copy, Debug)]
struct Retire {
    wr_id: u64,
    until: Until,
    opcode: Opcode,
    signalled: bool,
}

/// The message in the middle of the stream; its segments are not interleaved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum PartialMessage {
    #[default]
    Nothing,
    /// The first request that is posted.
    Request,
    /// An answer to the peer's oldest Read, with the bytes already in the stream.
    Answer(u32),
}

/// The outbound state of a connection.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    pub(super) stream: Stream,
    pending: VecDeque<Posting>,
    retire: VecDeque<Retire>,
    depth: usize,
    partial: PartialMessage,
    /// The last message answered a Read, so a request is next.
    answered: bool,
    /// We may speak.
    pub(super) open: bool,
    begun: bool,
    over: bool,
    pub(super) crc: bool,
    /// Most bytes of payload in a tagged and in an untagged segment.
    tagged: usize,
    untagged: usize,
    max_message: usize,
    ord: usize,
    pub(super) send_msn: u32,
    read_msn: u32,
    reads_sent: u64,
    read_stag: u32,
}

impl Outbound {
    pub(super) fn new(depth: usize, random: u32) -> Self {
        Self {
            retire: VecDeque::with_capacity(depth.min(1024)),
            depth: depth.max(1),
            send_msn: 1,
            read_msn: 1,
            read_stag: random.rotate_left(16),
            ..Self::default()
        }
    }

    pub(super) fn begin(&mut self, terms: &Terms) {
        self.begun = true;
        self.open = !terms.waits;
        self.crc = terms.crc;
        // Multiples of four, so that a message has no pad inside.
        self.tagged = (terms.max_ulpdu - TAGGED_HEADER) & !3;
        self.untagged = (terms.max_ulpdu - UNTAGGED_HEADER) & !3;
        self.max_message = terms.max_message;
        self.ord = terms.ord.into();
    }

    /// Unsent bytes of posted requests and answers.
    pub(super) fn queued(&self) -> u64 {
        let pending: usize = self.pending.iter().map(|posting| posting.wr.payload()).sum();
        (self.stream.len() + pending) as u64
    }

    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        !self.retire.is_empty() || !self.pending.is_empty()
    }

    /// Posts from the front of `chain` up to the queue's room.
    pub(super) fn post(
        &mut self,
        windows: &mut Windows,
        shared: &mut Shared,
        id: QpId,
        chain: &mut Vec<Posting>,
    ) -> Result<(), PostError> {
        if !self.begun || self.over {
            return Err(PostError::NotConnected);
        }
        let mut result = Ok(());
        let (mut taken, mut signalled) = (0, 0);
        for posting in chain.iter() {
            if self.retire.len() + self.pending.len() + taken >= self.depth {
                result = Err(PostError::QueueFull);
                break;
            }
            if let Err(why) = self.check(windows, shared, id, posting) {
                result = Err(PostError::Invalid(why));
                break;
            }
            taken += 1;
            signalled += u64::from(posting.signalled);
        }
        shared.stats.posts += taken as u64;
        shared.stats.signalled += signalled;
        self.pending.extend(chain.drain(..taken));
        result
    }

    /// Checks a request as a NIC's driver does before it accepts one.
    #[inline]
    fn check(&self, windows: &mut Windows, shared: &Shared, id: QpId, posting: &Posting) -> Result<(), &'static str> {
        let regions = &shared.regions;
        let within = |arena, offset: &usize, len: &usize, all| {
            checks::known(regions.contains(arena)).and_then(|()| checks::inside(*offset, *len, all))
        };
        match &posting.wr {
            WorkRequest::Send { buf, .. } => {
                if buf.len() > self.max_message {
                    return Err("a message longer than max_message");
                }
                checks::known(regions.contains(buf.arena()))
            }
            WorkRequest::Write { src, offset, len, .. } => {
                let (arena, all) = src.extent();
                within(arena, offset, len, all)
            }
            WorkRequest::Read { dst, offset, len, .. } => {
                if self.ord == 0 {
                    return Err("the peer takes no RDMA Reads");
                }
                if u32::try_from(*len).is_err() {
                    return Err("a Read longer than 4 GiB - 1");
                }
                within(dst.arena(), offset, len, dst.len())
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                if !regions.permits(mem.arena(), *access) {
                    return Err("memory that is not registered with these rights");
                }
                checks::inside_some(*offset, *len, mem.len())?;
                if *access == Access::LOCAL {
                    return Err("a window without rights");
                }
                if window.qp != id || !windows.keys.post_bind(window.index) {
                    return Err("a window that is not free, or of another queue pair");
                }
                Ok(())
            }
            WorkRequest::LocalInvalidate { window } => {
                if window.qp != id || !windows.keys.post_invalidate(window.index) {
                    return Err("a window that is not bound, or of another queue pair");
                }
                Ok(())
            }
        }
    }

    /// Encodes output into the stream.
    #[inline]
    pub(super) fn produce(&mut self, windows: &mut Windows, inbound: &mut Inbound) -> Result<(), Failure> {
        if !self.open || self.over {
            return Ok(());
        }
        while self.stream.len() < AHEAD {
            let asked = inbound.request().is_some();
            let answer = match self.partial {
                PartialMessage::Answer(_) => true,
                PartialMessage::Request => false,
                PartialMessage::Nothing => asked && (!self.answered || self.pending.is_empty()),
            };
            if answer {
                self.answer(windows, inbound)?;
                continue;
            }
            self.answered = false;
            let Some(posting) = self.pending.pop_front() else { break };
            match self.step(windows, inbound, posting) {
                Step::Done => self.partial = PartialMessage::Nothing,
                Step::More(rest) => {
                    self.partial = PartialMessage::Request;
                    self.pending.push_front(rest);
                }
                Step::Wait(same) => {
                    self.pending.push_front(same);
                    if !asked {
                        break;
                    }
                    self.answer(windows, inbound)?;
                }
            }
        }
        Ok(())
    }

    /// Appends one segment of the answer to the peer's oldest Read.
    fn answer(&mut self, windows: &mut Windows, inbound: &mut Inbound) -> Result<(), Failure> {
        let Some(&request) = inbound.request() else { return Ok(()) };
        let done = match self.partial {
            PartialMessage::Answer(done) => done,
            _ => 0,
        };
        let len = (request.len - done).min(self.tagged as u32);
        let last = done + len == request.len;
        let place = Place::Tagged { stag: request.sink_stag, offset: request.sink_offset.wrapping_add(done.into()) };
        let segment = Segment { opcode: Message::ReadResponse, last, place };
        if len == 0 {
            self.stream.fpdu(segment, Payload::Bytes(&[]), self.crc);
        } else {
            // The window may have been revoked since the request was accepted.
            let found = windows.find(request.source_stag, request.source_offset + u64::from(done), len.into(), false);
            let (mem, offset) = found.map_err(|refused| {
                let mut bytes = Vec::new();
                Terminate::new(Fault::InvalidStag, None, Some(&request.encode())).encode(&mut bytes);
                Failure::violation(
                    bytes,
                    format_args!("an STag that the peer reads from is valid no more: {refused:?}"),
                )
            })?;
            let source = Source::Lent(mem.clone());
            self.stream.fpdu(segment, Payload::Memory(&source, offset, len as usize), self.crc);
            windows.keep_until(request.source_stag, self.stream.end());
        }
        if last {
            self.partial = PartialMessage::Nothing;
            self.answered = true;
            inbound.placement.requests.pop_front();
        } else {
            self.partial = PartialMessage::Answer(done + len);
        }
        Ok(())
    }

    /// Adds a request to the stream, as far as possible.
    #[inline]
    fn step(&mut self, windows: &mut Windows, inbound: &mut Inbound, posting: Posting) -> Step {
        let Posting { wr_id, signalled, wr } = posting;
        let wait = |wr| Step::Wait(Posting { wr_id, signalled, wr });
        let (opcode, until) = match wr {
            WorkRequest::Send { fence: true, .. } if inbound.has_reads() => return wait(wr),
            WorkRequest::Send { buf, invalidate, .. } => {
                self.send(buf, invalidate);
                (Opcode::Send, Until::Sent(self.stream.end()))
            }
            WorkRequest::Write { src, offset, len, remote } => {
                let part = len.min(self.tagged);
                let place = Place::Tagged { stag: remote.rkey, offset: remote.address };
                let segment = Segment { opcode: Message::Write, last: part == len, place };
                self.stream.fpdu(segment, Payload::Memory(&src, offset, part), self.crc);
                if part < len {
                    let remote = RemoteMemory { address: remote.address.wrapping_add(part as u64), ..remote };
                    let wr = WorkRequest::Write { src, offset: offset + part, len: len - part, remote };
                    return Step::More(Posting { wr_id, signalled, wr });
                }
                (Opcode::Write, Until::Sent(self.stream.end()))
            }
            WorkRequest::Read { .. } if inbound.placement.reads.len() >= self.ord => return wait(wr),
            WorkRequest::Read { dst, offset, len, remote } => {
                let stag = self.request(len as u32, remote);
                inbound.placement.reads.push_back(OwnRead { stag, dst, offset, len, got: 0 });
                (Opcode::Read, Until::Read(self.reads_sent))
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                let address = (mem.offset() + offset) as u64;
                let bound = windows.bind(window.index, &mem, offset, len, address, access);
                debug_assert!(bound, "a bind was posted for a window that is bound");
                (Opcode::Bind, Until::Sent(self.stream.end()))
            }
            // The peer may have been faster.
            WorkRequest::LocalInvalidate { window } => match windows.revoke(window.index, self.stream.sent()) {
                Revoked::Busy => return wait(wr),
                Revoked::Done | Revoked::NotBound => (Opcode::LocalInvalidate, Until::Sent(self.stream.end())),
            },
        };
        self.retire.push_back(Retire { wr_id, until, opcode, signalled });
        Step::Done
    }

    /// Puts a whole message into the stream.
    #[inline]
    fn send(&mut self, buf: Buf, invalidate: Option<u32>) {
        let len = buf.len();
        if len <= STAGE {
            self.send_segments(len, invalidate, |at, part| Payload::Bytes(&buf[at..at + part]));
        } else {
            let source = Source::Frozen(buf.freeze());
            self.send_segments(len, invalidate, |at, part| Payload::Memory(&source, at, part));
        }
    }

    #[inline]
    fn send_segments<'a>(
        &mut self,
        len: usize,
        invalidate: Option<u32>,
        payload: impl Fn(usize, usize) -> Payload<'a>,
    ) {
        let opcode = Message::Send { invalidate, solicited: false };
        let msn = self.send_msn;
        self.send_msn = msn.wrapping_add(1);
        let mut at = 0;
        loop {
            let part = (len - at).min(self.untagged);
            let last = at + part == len;
            let place = Place::Untagged { queue: QUEUE_SEND, msn, offset: at as u32 };
            self.stream.fpdu(Segment { opcode, last, place }, payload(at, part), self.crc);
            at += part;
            if last {
                return;
            }
        }
    }

    /// Appends a Read Request; returns the STag for the peer's answer. The STag is valid for that answer alone: no
    /// Write may use it.
    fn request(&mut self, len: u32, remote: RemoteMemory) -> u32 {
        self.read_stag = self.read_stag.wrapping_add(1 << 8);
        let request = ReadRequest {
            sink_stag: self.read_stag,
            sink_offset: 0,
            len,
            source_stag: remote.rkey,
            source_offset: remote.address,
        };
        let place = Place::Untagged { queue: QUEUE_READ_REQUEST, msn: self.read_msn, offset: 0 };
        let segment = Segment { opcode: Message::ReadRequest, last: true, place };
        self.stream.fpdu(segment, Payload::Bytes(&request.encode()), self.crc);
        self.read_msn = self.read_msn.wrapping_add(1);
        self.reads_sent += 1;
        self.read_stag
    }

    /// Appends the completions of finished requests.
    #[inline]
    pub(super) fn reap(&mut self, id: QpId, reads_done: u64, done: &mut impl Extend<Completion>) {
        let sent = self.stream.sent();
        while let Some(front) = self.retire.front()
            && match front.until {
                Until::Sent(position) => position <= sent,
                Until::Read(number) => number <= reads_done,
            }
        {
            if front.signalled {
                done.extend([Completion::ended(id, front.wr_id, front.opcode, Status::Success)]);
            }
            self.retire.pop_front();
        }
    }

    /// Ends all posted requests: the oldest with `status`, the rest is flushed.
    pub(super) fn flush(&mut self, id: QpId, mut status: Status, done: &mut impl Extend<Completion>) {
        self.over = true;
        for retire in self.retire.drain(..) {
            let status = std::mem::replace(&mut status, Status::Flushed);
            done.extend([Completion::ended(id, retire.wr_id, retire.opcode, status)]);
        }
        for posting in self.pending.drain(..) {
            let status = std::mem::replace(&mut status, Status::Flushed);
            done.extend([Completion::ended(id, posting.wr_id, posting.wr.opcode(), status)]);
        }
        self.stream.clear();
    }

    /// Queues a Terminate behind pending messages; nothing follows.
    pub(super) fn terminate(&mut self, message: &[u8]) {
        let place = Place::Untagged { queue: QUEUE_TERMINATE, msn: 1, offset: 0 };
        let segment = Segment { opcode: Message::Terminate, last: true, place };
        self.stream.fpdu(segment, Payload::Bytes(message), self.crc);
        self.over = true;
    }

    /// Adds an empty Write to the stream. A message in progress serves as well: nothing may separate its segments, or
    /// follow a Terminate.
    pub(super) fn write_nothing(&mut self) {
        if self.over || self.partial != PartialMessage::Nothing {
            return;
        }
        let segment = Segment { opcode: Message::Write, last: true, place: Place::Tagged { stag: 0, offset: 0 } };
        self.stream.fpdu(segment, Payload::Bytes(&[]), self.crc);
    }
}

/// Flushes requests posted to an ended connection.
pub(super) fn refuse(id: QpId, chain: &mut Vec<Posting>, done: &mut impl Extend<Completion>) {
    let flushed = |p: Posting| Completion::ended(id, p.wr_id, p.wr.opcode(), Status::Flushed);
    done.extend(chain.drain(..).map(flushed));
}
