//! The sending side, which encodes posted requests in order, and Read Responses between them, as FPDUs.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use rpcrdma_mempool::Buf;

use super::placement::OwnRead;
use super::send_buffer::{Payload, STAGE, SendBuffer};
use super::windows::ExposedRange;
use super::{RdmapStream, SharedResources, StreamFailure};
use crate::iwarp::setup::Negotiated;
use crate::iwarp::wire::{
    PayloadPlace, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, RdmapOpcode, ReadRequest, SegmentHeader,
    TAGGED_HEADER, Terminate, TerminateFault, UNTAGGED_HEADER,
};
use crate::receives::ReceiveQueue;
use crate::window_keys::Revoked;
use crate::{Completion, Opcode, PostError, Posting, RemoteMemory, Source, Status, WorkRequest};

/// Bytes encoded in advance for the socket: about one write.
const AHEAD: usize = 256 << 10;

/// An executed request that waits for its bytes to be sent or for Read Responses.
#[derive(Clone, Copy, Debug)]
struct UnfinishedRequest {
    wr_id: u64,
    opcode: Opcode,
    signaled: bool,
    /// The request is finished when the stream is sent up to this position and this many Reads have completed.
    sent: u64,
    own_reads_done: u64,
}

/// The sending state of a connection.
#[derive(Debug, Default)]
pub(in crate::iwarp) struct Outbound {
    pub(in crate::iwarp) buffer: SendBuffer,
    /// Posted requests that are not completely encoded.
    pending: VecDeque<Posting>,
    unfinished: VecDeque<UnfinishedRequest>,
    depth: usize,
    /// Whether the first pending request is a Write that is partly encoded. Nothing may come between its segments.
    partial_write: bool,
    /// Encoded bytes of an incomplete response to the peer's oldest Read. Nothing may come between its segments.
    partial_response: u32,
    /// Whether the last message was a Read Response, so that a request is next.
    answered_last: bool,
    /// Whether this side may send: the connection is established, the peer's first segment is not awaited, and no
    /// Terminate was sent.
    pub(super) may_send: bool,
    /// Whether FPDUs carry a CRC.
    pub(in crate::iwarp) crc: bool,
    /// Maximum bytes of payload in a tagged and in an untagged segment.
    tagged: usize,
    untagged: usize,
    /// Maximum outstanding RDMA Reads of this side.
    ord: usize,
    /// Numbers of the last messages on the queues of Sends and Read Requests. They wrap.
    pub(super) send_msn: u32,
    read_msn: u32,
    reads_sent: u64,
    /// The sink STag of the last Read Request.
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

    pub(super) fn begin(&mut self, agreed: &Negotiated, is_responder: bool, max_ulpdu: usize) {
        self.may_send = !is_responder;
        self.crc = agreed.crc;
        // Multiples of four, so that only the last segment of a message has a pad.
        self.tagged = (max_ulpdu - TAGGED_HEADER) & !3;
        self.untagged = (max_ulpdu - UNTAGGED_HEADER) & !3;
        self.ord = agreed.ord.into();
    }

    /// Unsent bytes of posted requests and Read Responses.
    pub(super) fn queued(&self) -> u64 {
        let pending: usize = self.pending.iter().map(|posting| posting.wr.payload()).sum();
        (self.buffer.len() + pending) as u64
    }

    /// Whether a posted request is unfinished or bytes are unsent.
    #[inline]
    pub(in crate::iwarp) fn is_busy(&self) -> bool {
        !self.unfinished.is_empty() || !self.pending.is_empty() || self.buffer.len() > 0
    }

    /// Appends one segment.
    #[inline]
    fn push(&mut self, opcode: RdmapOpcode, last: bool, place: PayloadPlace, payload: Payload<'_>) {
        self.buffer.push_fpdu(SegmentHeader { opcode, last, place }, payload, self.crc);
    }

    /// Appends a whole Send message. A short message is copied, so that its buffer returns to its pool immediately.
    #[inline]
    fn send_message(&mut self, buf: Buf, invalidate: Option<u32>) {
        self.send_msn = self.send_msn.wrapping_add(1);
        let len = buf.len();
        let buf = if len <= STAGE { Ok(buf) } else { Err(Source::Frozen(buf.freeze())) };
        let mut at = 0;
        loop {
            let part = (len - at).min(self.untagged);
            let payload = match &buf {
                Ok(short) => Payload::Bytes(&short[at..at + part]),
                Err(long) => Payload::Memory(long, at, part),
            };
            let last = at + part == len;
            let place = PayloadPlace::Untagged { queue: QUEUE_SEND, msn: self.send_msn, offset: at as u32 };
            self.push(RdmapOpcode::Send { invalidate, solicited: false }, last, place, payload);
            if last {
                return;
            }
            at += part;
        }
    }

    /// Appends a Read Request. Its sink STag, `read_stag`, is valid only for the response: Writes cannot use it.
    fn send_read_request(&mut self, len: u32, RemoteMemory { rkey, address }: RemoteMemory) {
        self.read_stag = self.read_stag.wrapping_add(1 << 8);
        self.read_msn = self.read_msn.wrapping_add(1);
        self.reads_sent += 1;
        let sink_stag = self.read_stag;
        let request = ReadRequest { sink_stag, sink_offset: 0, len, source_stag: rkey, source_offset: address };
        let place = PayloadPlace::Untagged { queue: QUEUE_READ_REQUEST, msn: self.read_msn, offset: 0 };
        self.push(RdmapOpcode::ReadRequest, true, place, Payload::Bytes(&request.encode()));
    }

    /// Appends a Terminate. Nothing may follow it.
    pub(in crate::iwarp) fn send_terminate(&mut self, terminate: &Terminate) {
        let mut message = Vec::new();
        terminate.encode(&mut message);
        let place = PayloadPlace::Untagged { queue: QUEUE_TERMINATE, msn: 1, offset: 0 };
        self.push(RdmapOpcode::Terminate, true, place, Payload::Bytes(&message));
        self.may_send = false;
    }

    /// Appends an empty Write as a ready-to-receive message (RFC 6581 §9.3), unless a message is partly encoded. The
    /// rest of such a message has the same effect, and nothing may come between its segments.
    pub(in crate::iwarp) fn send_empty_write(&mut self) {
        if self.may_send && !self.partial_write && self.partial_response == 0 {
            let place = PayloadPlace::Tagged { stag: 0, offset: 0 };
            self.push(RdmapOpcode::Write, true, place, Payload::Bytes(&[]));
        }
    }
}

impl RdmapStream {
    /// Posts requests from the front of `chain`, as many as the queue has room for.
    pub(in crate::iwarp) fn post(
        &mut self,
        shared: &mut SharedResources,
        chain: &mut Vec<Posting>,
    ) -> Result<(), PostError> {
        let (outbound, keys, max_message) = (&mut self.outbound, &mut self.windows, self.placement.max_message);
        let mut posted = 0;
        let result = chain.iter().try_for_each(|posting| {
            if outbound.unfinished.len() + outbound.pending.len() + posted >= outbound.depth {
                return Err(PostError::QueueFull);
            }
            let checked = match &posting.wr {
                WorkRequest::Read { .. } if outbound.ord == 0 => Err("the peer accepts no RDMA Reads"),
                WorkRequest::Read { len, .. } if u32::try_from(*len).is_err() => {
                    Err("an RDMA Read exceeds 4294967295 bytes")
                }
                wr => wr.check(self.id, keys, max_message, |arena, access| shared.arenas.permits(arena, access)),
            };
            checked.map_err(PostError::Invalid)?;
            posted += 1;
            shared.stats.signaled += u64::from(posting.signaled);
            Ok(())
        });
        shared.stats.posts += posted as u64;
        outbound.pending.extend(chain.drain(..posted));
        result
    }

    /// Encodes pending output, about as much as one write takes. Read Responses and requests alternate.
    #[inline]
    pub(in crate::iwarp) fn produce(&mut self) -> Result<(), StreamFailure> {
        while self.outbound.may_send && self.outbound.buffer.len() < AHEAD {
            let may_answer = !self.outbound.partial_write && !self.placement.peer_reads.is_empty();
            let has_turn = self.outbound.partial_response > 0 || !self.outbound.answered_last;
            if may_answer && (has_turn || self.is_next_blocked()) {
                self.respond()?;
            } else if self.is_next_blocked() {
                break;
            } else if let Some(posting) = self.outbound.pending.pop_front() {
                self.execute(posting);
            }
        }
        Ok(())
    }

    /// Whether no request is pending or the first one must wait for the peer. Executes an invalidation that need not
    /// wait.
    #[inline]
    fn is_next_blocked(&mut self) -> bool {
        let reads = self.placement.own_reads.len();
        match self.outbound.pending.front().map(|posting| &posting.wr) {
            None => true,
            Some(WorkRequest::Send { fence, .. }) => *fence && reads > 0,
            Some(WorkRequest::Read { .. }) => reads >= self.outbound.ord,
            // A window that the peer has already invalidated is not bound, so the request need not wait.
            Some(WorkRequest::LocalInvalidate { window }) => {
                let sent = self.outbound.buffer.sent();
                self.windows.revoke(window.index, ExposedRange::unused_after(sent)) == Revoked::Busy
            }
            Some(WorkRequest::Write { .. } | WorkRequest::Bind { .. }) => false,
        }
    }

    /// Appends one segment of the response to the peer's oldest Read.
    fn respond(&mut self) -> Result<(), StreamFailure> {
        let (outbound, requests) = (&mut self.outbound, &mut self.placement.peer_reads);
        let Some(&request) = requests.front() else { return Ok(()) };
        let done = outbound.partial_response;
        let len = (request.len - done).min(outbound.tagged as u32);
        let last = done + len == request.len;
        let place =
            PayloadPlace::Tagged { stag: request.sink_stag, offset: request.sink_offset.wrapping_add(done.into()) };
        if len == 0 {
            outbound.push(RdmapOpcode::ReadResponse, last, place, Payload::Bytes(&[]));
        } else {
            // The window may have been revoked since the request was accepted.
            let address = request.source_offset + u64::from(done);
            let found = ExposedRange::find(&self.windows, request.source_stag, address, len.into(), false);
            let (range, offset) = found.map_err(|fault| {
                let terminate = Terminate::new(TerminateFault::InvalidStag, None, Some(&request.encode()));
                StreamFailure::violation(terminate, format_args!("the source of an RDMA Read was revoked: {fault}"))
            })?;
            let source = Source::Lent(range.mem.clone());
            outbound.push(RdmapOpcode::ReadResponse, last, place, Payload::Memory(&source, offset, len as usize));
            range.busy_until.set(outbound.buffer.end());
        }
        outbound.partial_response = if last { 0 } else { done + len };
        if last {
            outbound.answered_last = true;
            requests.pop_front();
        }
        Ok(())
    }

    /// Executes a request that need not wait. Encodes only one segment of a Write, and makes the rest pending again.
    #[inline]
    fn execute(&mut self, posting: Posting) {
        let outbound = &mut self.outbound;
        let Posting { wr_id, signaled, wr } = posting;
        let opcode = wr.opcode();
        let mut own_reads_done = 0;
        outbound.answered_last = false;
        outbound.partial_write = false;
        match wr {
            WorkRequest::Send { buf, invalidate, .. } => outbound.send_message(buf, invalidate),
            WorkRequest::Write { src, offset, len, remote } => {
                let part = len.min(outbound.tagged);
                let place = PayloadPlace::Tagged { stag: remote.rkey, offset: remote.address };
                outbound.push(RdmapOpcode::Write, part == len, place, Payload::Memory(&src, offset, part));
                if part < len {
                    let remote = RemoteMemory { address: remote.address.wrapping_add(part as u64), ..remote };
                    let wr = WorkRequest::Write { src, offset: offset + part, len: len - part, remote };
                    outbound.partial_write = true;
                    return outbound.pending.push_front(Posting { wr_id, signaled, wr });
                }
            }
            WorkRequest::Read { dst, offset, len, remote } => {
                outbound.send_read_request(len as u32, remote);
                own_reads_done = outbound.reads_sent;
                self.placement.own_reads.push_back(OwnRead { stag: outbound.read_stag, dst, offset, len, received: 0 });
            }
            WorkRequest::Bind { window, mem, offset, len, access } => {
                let bound = self.windows.bind(window.index, ExposedRange::new(mem, offset, len, access));
                debug_assert!(bound.is_some(), "the window is already bound");
            }
            // `is_next_blocked` has executed the invalidation.
            WorkRequest::LocalInvalidate { .. } => {}
        }
        let sent = outbound.buffer.end();
        outbound.unfinished.push_back(UnfinishedRequest { wr_id, opcode, signaled, sent, own_reads_done });
    }

    /// Appends the completions of finished requests.
    #[inline]
    pub(in crate::iwarp) fn reap(&mut self, done: &mut impl Extend<Completion>) {
        let (sent, own_reads_done) = (self.outbound.buffer.sent(), self.placement.own_reads_done);
        while let Some(first) = self.outbound.unfinished.front()
            && first.sent <= sent
            && first.own_reads_done <= own_reads_done
        {
            if first.signaled {
                done.extend([Completion::ended(self.id, first.wr_id, first.opcode, Status::Success)]);
            }
            self.outbound.unfinished.pop_front();
        }
    }

    /// Completes all posted requests at the end of the connection, the oldest unfinished one with `status`.
    pub(in crate::iwarp) fn flush(&mut self, mut status: Status, done: &mut impl Extend<Completion>) {
        self.reap(done);
        let Self { id, outbound, placement, windows, own_receives, .. } = self;
        outbound.may_send = false;
        outbound.buffer.clear();
        let unfinished = outbound.unfinished.drain(..).map(|request| (request.wr_id, request.opcode));
        let pending = outbound.pending.drain(..).map(|posting| (posting.wr_id, posting.wr.opcode()));
        done.extend(unfinished.chain(pending).map(|(wr_id, opcode)| {
            let status = std::mem::replace(&mut status, Status::Flushed);
            Completion::ended(*id, wr_id, opcode, status)
        }));
        let partial = std::mem::take(placement).message.map(|message| message.buf);
        let bufs = partial.into_iter().chain(own_receives.iter_mut().flat_map(ReceiveQueue::drain));
        done.extend(bufs.map(|buf| Completion::failed_receive(*id, Status::Flushed, buf)));
        windows.revoke_all(|_, _, _| true);
    }
}
