//! Fuzzing of one connection without a socket, with an arbitrary peer.
//!
//! This module serves the fuzz target `endpoint` and its own test. The peer sends valid segments, segments with values
//! that are off by one, or arbitrary bytes. This side sends, receives, exposes memory and accesses the peer's memory.
//!
//! Invariants: hidden memory is neither changed nor sent, and readable memory is not changed. Each signalled request
//! completes once. Every buffer returns to the pool. Segments of this side's messages are not interleaved.

use std::cell::RefCell;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::rdmap_stream::{Arenas, RdmapStream, SharedResources};
use super::setup::Negotiated;
use super::wire::{
    MAX_ULPDU, PayloadPlace, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, RdmapOpcode, ReadRequest, ReaderStep,
    SegmentHeader, SegmentReader, crc32c, fpdu_len,
};
use crate::receives::Receives;
use crate::{
    Access, Completion, ConnectParams, FabricStats, Opcode, Posting, QpId, RemoteMemory, Source, WindowId, WorkRequest,
};

/// Factors of all lengths in a scenario: short, or long enough for direct reads.
const SCALES: [usize; 2] = [1, 36];
/// Bytes of a Receive, at scale 1.
const RECEIVE: usize = 512;
/// Bytes of exposed memory, at scale 1.
const EXPOSED: usize = 256;
/// Bytes of hidden memory before and after the exposed memory, at scale 1.
const AROUND: usize = 128;
/// Buffers of each kind.
const BUFFERS: usize = 24;
const WINDOWS: u32 = 4;
/// Contents of hidden memory.
const SECRET: [u8; 8] = *b"\xA7\x5Esecret";

const ID: QpId = QpId { slot: 2, generation: 7 };

thread_local! {
    static POOL: RefCell<Option<Pool>> = const { RefCell::new(None) };
}

/// Runs the scenario that these bytes encode.
///
/// # Panics
/// If an invariant does not hold.
pub fn run_scenario(input: &[u8]) {
    run_and_count_direct(input);
}

/// Runs the scenario, and returns the number of directly placed bytes.
fn run_and_count_direct(input: &[u8]) -> usize {
    POOL.with_borrow_mut(|pool| {
        let pool = pool.get_or_insert_with(|| {
            let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
            let classes = SCALES.map(|scale| Class { size: scale * RECEIVE, count: BUFFERS });
            Pool::new(&PoolConfig { classes: classes.to_vec(), arena }).expect("memory")
        });
        let placed = Scenario::new(pool, input).run();
        assert!(pool.stats().classes.iter().all(|class| class.free == BUFFERS), "a buffer did not return to the pool");
        placed
    })
}

/// A buffer that was exposed at least once.
struct ExposedBuffer {
    /// The identifier of the bind request.
    id: u64,
    mem: Lent,
    window: u32,
    rkey: u32,
    /// Whether the peer may write to the buffer, or could before the revocation.
    writable: bool,
    /// The contents at the revocation of the window.
    at_revocation: Option<Vec<u8>>,
}

impl ExposedBuffer {
    fn contents(&self, scale: usize) -> Vec<u8> {
        let mut now = vec![0; scale * RECEIVE];
        assert!(self.mem.read_at(0, &mut now));
        now
    }
}

struct Scenario<'p, 'd> {
    input: &'d [u8],
    /// One of [`SCALES`].
    scale: usize,
    /// Whether FPDUs have a CRC.
    crc: bool,
    /// Whether the peer's bytes arrive in two parts, with direct reads as from a socket.
    in_parts: bool,
    /// Number of directly placed bytes.
    placed: usize,
    pool: &'p Pool,
    stream: RdmapStream,
    shared: SharedResources,
    windows: u32,
    exposed: Vec<ExposedBuffer>,
    /// Signalled requests that are not yet reported.
    posted: Vec<u64>,
    next: u64,
    /// Requests that invalidate a window: identifier and window.
    revoking: Vec<(u64, u32)>,
    done: Vec<Completion>,
    /// Unconsumed bytes of the peer, which wait for a Receive.
    unread: Vec<u8>,
    /// Numbers of the peer's next messages by queue.
    msn: [u32; 3],
    /// Offset of the peer's next Send segment.
    offset: u32,
    /// Outstanding Reads of this side.
    own_reads: Vec<ReadRequest>,
    /// The part of the next Read Request that the peer has received.
    partial_request: Option<Vec<u8>>,
    peer_reader: SegmentReader,
    /// The opcode of this side's incomplete message.
    partial_message: Option<RdmapOpcode>,
    ended: bool,
}

impl<'p, 'd> Scenario<'p, 'd> {
    fn new(pool: &'p Pool, input: &'d [u8]) -> Self {
        let (&mode, input) = input.split_first().unwrap_or((&0, &[]));
        let params = ConnectParams {
            send_queue_depth: 8,
            own_receive_queue: (mode & 1 != 0).then_some(4),
            windows: WINDOWS,
            rnr_retry: if mode & 2 != 0 { 7 } else { 0 },
            ..ConnectParams::default()
        };
        let mut stream = RdmapStream::new(ID, &params, 0x1357_9bdf);
        let (waits, crc, in_parts) = (mode & 4 != 0, mode & 8 != 0, mode & 16 != 0);
        let (scale, max_ulpdu) = (SCALES[usize::from(mode >> 5 & 1)], if mode & 64 != 0 { MAX_ULPDU } else { 100 });
        let agreed = Negotiated { crc, ord: 2, ird: 2, rtr: false, is_same_engine: true };
        stream.begin(&agreed, waits, max_ulpdu, scale * RECEIVE);
        let mut arenas = Arenas::default();
        arenas.add(pool.arena().id(), Access::REMOTE, || Ok(())).expect("it is new");
        let shared = SharedResources { arenas, receives: Receives::new(4), stats: FabricStats::default() };
        Self {
            input,
            scale,
            crc,
            in_parts,
            placed: 0,
            pool,
            stream,
            shared,
            windows: 0,
            exposed: Vec::new(),
            posted: Vec::new(),
            next: 0,
            revoking: Vec::new(),
            done: Vec::new(),
            unread: Vec::new(),
            msn: [1; 3],
            offset: 0,
            own_reads: Vec::new(),
            partial_request: None,
            peer_reader: SegmentReader::new(crc),
            partial_message: None,
            ended: false,
        }
    }

    fn byte(&mut self) -> u8 {
        let (first, rest) = self.input.split_first().unwrap_or((&0, &[]));
        self.input = rest;
        *first
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn run(mut self) -> usize {
        while !self.input.is_empty() && !self.ended {
            let step = self.byte();
            self.step(step & 15, step >> 4);
        }
        let placed = self.placed;
        self.end();
        placed
    }

    fn step(&mut self, step: u8, argument: u8) {
        match step {
            0 => {
                let (bytes, rest) = self.input.split_at(self.input.len().min(usize::from(argument)));
                self.input = rest;
                self.receive_bytes(bytes);
            }
            1 | 2 => self.peer_sends(argument),
            3 => self.peer_writes(argument),
            4 => self.peer_reads(argument),
            5 => self.peer_responds(argument),
            6 => self.segment(RdmapOpcode::Terminate, true, self.untagged(QUEUE_TERMINATE), &[0x11, argument, 0, 0]),
            7 => self.receive(argument),
            8 => self.send(argument),
            9 | 10 => self.access_peer(argument),
            11 | 12 => self.expose(argument),
            13 => {
                let window = WindowId { qp: ID, index: u32::from(argument) % WINDOWS };
                self.post(WorkRequest::LocalInvalidate { window }, argument & 4 != 0);
                self.revoking.push((self.next, window.index));
            }
            14 if argument == 0 => self.stream.outbound.send_empty_write(),
            _ => self.send_output(if step == 14 { 7 * usize::from(argument) } else { usize::MAX }),
        }
    }

    fn untagged(&self, queue: u32) -> PayloadPlace {
        PayloadPlace::Untagged { queue, msn: self.msn[queue as usize], offset: 0 }
    }

    /// Sends a segment of the peer.
    fn segment(&mut self, opcode: RdmapOpcode, last: bool, place: PayloadPlace, payload: &[u8]) {
        let header = SegmentHeader { opcode, last, place }.encode(payload.len());
        let mut bytes = [&header[..], payload].concat();
        let whole = fpdu_len(header.len() - 2 + payload.len());
        if self.crc {
            bytes.resize(whole - 4, 0);
            bytes.extend(crc32c(&bytes).to_le_bytes());
            let deviation = self.deviation();
            bytes[whole - 1] ^= deviation as u8;
        }
        bytes.resize(whole, 0);
        self.receive_bytes(&bytes);
    }

    /// The next length of the scenario.
    fn length(&mut self) -> usize {
        self.scale * usize::from(self.byte())
    }

    /// The next deviation from a correct value, which is mostly 0.
    fn deviation(&mut self) -> u32 {
        let byte = self.byte();
        if byte > 0xE0 { u32::from(byte & 7) } else { 0 }
    }

    fn peer_sends(&mut self, argument: u8) {
        let (last, deviation) = (argument & 1 != 0, self.deviation());
        let invalidate = (argument & 6 == 6).then(|| self.key()).flatten();
        let len = self.length();
        let place =
            PayloadPlace::Untagged { queue: QUEUE_SEND, msn: self.msn[0], offset: self.offset.wrapping_add(deviation) };
        self.segment(RdmapOpcode::Send { invalidate, solicited: argument & 8 != 0 }, last, place, &vec![argument; len]);
        if last {
            (self.msn[0], self.offset) = (self.msn[0].wrapping_add(1), 0);
        } else {
            self.offset += len as u32;
        }
    }

    /// A key of this side, or one near it.
    fn key(&mut self) -> Option<u32> {
        let (which, deviation) = (usize::from(self.byte()), self.deviation());
        let buffer = self.exposed.get(which.checked_rem(self.exposed.len())?)?;
        Some(buffer.rkey.wrapping_add(deviation))
    }

    /// A range of exposed memory, or one near it: STag, tagged offset and length.
    fn place(&mut self) -> Option<(u32, u64, usize)> {
        let stag = self.key()?;
        let (which, at, len, deviation) = (self.byte(), self.length(), self.length(), self.deviation());
        let buffer = &self.exposed[usize::from(which) % self.exposed.len()];
        let start = (buffer.mem.offset() + self.scale * AROUND + at) as u64;
        let rest = (self.scale * EXPOSED).saturating_sub(at);
        Some((stag, start.wrapping_sub(u64::from(deviation >> 2)), len.min(rest) + (deviation & 3) as usize))
    }

    fn peer_writes(&mut self, argument: u8) {
        let Some((stag, offset, len)) = self.place() else { return };
        let place = PayloadPlace::Tagged { stag, offset };
        self.segment(RdmapOpcode::Write, argument & 1 != 0, place, &vec![0x33; len]);
    }

    fn peer_reads(&mut self, argument: u8) {
        let Some((source_stag, source_offset, len)) = self.place() else { return };
        let request = ReadRequest {
            sink_stag: self.word(),
            sink_offset: u64::from(self.byte()),
            len: len as u32,
            source_stag,
            source_offset,
        };
        let place = self.untagged(QUEUE_READ_REQUEST);
        self.segment(RdmapOpcode::ReadRequest, argument & 15 != 1, place, &request.encode());
        self.msn[1] = self.msn[1].wrapping_add(1);
    }

    /// Sends a Read Response to this side's oldest Read.
    fn peer_responds(&mut self, argument: u8) {
        let deviation = self.deviation();
        let part = self.scale as u32 * u32::from(argument);
        let Some(read) = self.own_reads.first_mut() else { return };
        let len = if argument & 1 != 0 { read.len } else { read.len.min(part) };
        let place =
            PayloadPlace::Tagged { stag: read.sink_stag, offset: read.sink_offset.wrapping_add(u64::from(deviation)) };
        read.len -= len;
        read.sink_offset = read.sink_offset.wrapping_add(u64::from(len));
        let last = read.len == 0;
        if last {
            self.own_reads.remove(0);
        }
        self.segment(RdmapOpcode::ReadResponse, last != (deviation == 7), place, &vec![0x44; len as usize]);
    }

    fn receive(&mut self, argument: u8) {
        let room = |receives: &mut Receives| receives.room();
        let own = self.stream.own_receives.as_mut().map(room);
        let bufs: Vec<Buf> = (0..own.unwrap_or_else(|| self.shared.receives.room()).min(usize::from(argument & 3) + 1))
            .map_while(|_| self.pool.alloc(self.scale * RECEIVE))
            .collect();
        self.stream.own_receives.as_mut().unwrap_or(&mut self.shared.receives).post(bufs.into_iter());
        self.receive_bytes(&[]);
    }

    fn buffer(&self, len: usize) -> Option<Buf> {
        let mut buf = self.pool.alloc(self.scale * RECEIVE)?;
        buf.fill(0x55);
        buf.set_window(0, len.min(self.scale * RECEIVE));
        Some(buf)
    }

    fn post(&mut self, wr: WorkRequest, signalled: bool) {
        self.next += 1;
        let mut chain = vec![Posting { wr_id: self.next, signalled, wr }];
        let posted = self.stream.post(&mut self.shared, &mut chain).is_ok() && chain.is_empty();
        if posted && signalled {
            self.posted.push(self.next);
        }
    }

    fn send(&mut self, argument: u8) {
        let (len, invalidate) = (self.length(), (argument & 2 != 0).then_some(9));
        let Some(buf) = self.buffer(len) else { return };
        self.post(WorkRequest::Send { buf, invalidate, fence: argument & 4 != 0 }, argument & 1 != 0);
    }

    /// Posts an RDMA Read or Write of this side.
    fn access_peer(&mut self, argument: u8) {
        let (len, remote) = (self.length(), RemoteMemory { rkey: 0x77, address: 0x1000 });
        let Some(buf) = self.buffer(self.scale * RECEIVE) else { return };
        let wr = match (argument >> 1 & 1, buf) {
            (0, buf) => match buf.lend() {
                Ok(dst) => WorkRequest::Read { dst, offset: 0, len, remote },
                Err(_) => return,
            },
            (_, buf) => WorkRequest::Write { src: Source::Frozen(buf.freeze()), offset: 0, len, remote },
        };
        self.post(wr, argument & 1 != 0);
    }

    /// Exposes the middle of a buffer.
    fn expose(&mut self, argument: u8) {
        let writable = argument & 4 != 0;
        let (around, len) = (self.scale * AROUND, self.scale * EXPOSED);
        let Some(mut buf) = self.pool.alloc(self.scale * RECEIVE) else { return };
        buf.as_chunks_mut().0.fill(SECRET);
        if !writable {
            buf[around..around + len].fill(0x11);
        }
        let Ok(mem) = buf.lend() else { return };
        let window = u32::from(argument & 3);
        while self.windows <= window {
            self.windows = self.stream.windows.alloc(ID).expect("a window").index + 1;
        }
        let Some(rkey) = self.stream.windows.next(window) else { return };
        let access = if writable { Access { remote_read: false, ..Access::REMOTE } } else { Access::REMOTE_READ };
        let window_id = WindowId { qp: ID, index: window };
        let before = self.next;
        self.post(WorkRequest::Bind { window: window_id, mem: mem.clone(), offset: around, len, access }, true);
        if self.posted.last() == Some(&(before + 1)) {
            self.exposed.push(ExposedBuffer { id: self.next, mem, window, rkey, writable, at_revocation: None });
        }
    }

    /// Passes up to `max` bytes of this side's output to the peer.
    fn send_output(&mut self, max: usize) {
        self.ended |= self.stream.produce().is_err();
        let bytes = self.stream.outbound.buffer.bytes(max);
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET), "hidden memory was sent");
        self.stream.outbound.buffer.advance(bytes.len());
        let mut rest = &bytes[..];
        while let Some(step) = self.peer_reader.step(&mut rest).expect("this side sends valid segments") {
            match step {
                ReaderStep::Segment { segment, .. } => {
                    assert!(
                        self.partial_message.is_none_or(|opcode| opcode == segment.opcode),
                        "segments of two messages are mixed"
                    );
                    self.partial_message = (!segment.last).then_some(segment.opcode);
                    self.partial_request = (segment.opcode == RdmapOpcode::ReadRequest).then(Vec::new);
                }
                ReaderStep::Payload(part) => {
                    if let Some(partial_request) = &mut self.partial_request {
                        partial_request.extend_from_slice(part);
                    }
                }
                ReaderStep::End => {
                    let request = self
                        .partial_request
                        .take()
                        .map(|bytes| bytes[..].try_into().expect("a Read Request has a fixed length"));
                    self.own_reads.extend(request.as_ref().map(ReadRequest::decode));
                }
            }
        }
        self.stream.reap(&mut self.done);
        self.check_completions();
    }

    /// Receives bytes of the peer.
    fn receive_bytes(&mut self, mut bytes: &[u8]) {
        if self.in_parts {
            let first = usize::from(self.byte()).min(bytes.len());
            self.consume(&bytes[..first]);
            bytes = &bytes[first..];
            if self.unread.is_empty()
                && !self.ended
                && let Some(place) = self.stream.direct_target()
            {
                let placed = place.len().min(bytes.len());
                place.fill(&bytes[..placed]);
                self.stream.advance_direct(placed);
                self.placed += placed;
                bytes = &bytes[placed..];
            }
        }
        self.consume(bytes);
    }

    /// Consumes the unconsumed bytes, then these bytes of the peer.
    fn consume(&mut self, bytes: &[u8]) {
        if self.ended {
            return;
        }
        self.unread.extend_from_slice(bytes);
        let mut input = &self.unread[..];
        let taken = self.stream.consume(&mut self.shared, &mut input, &mut self.done, usize::MAX);
        let left = input.len();
        self.unread.drain(..self.unread.len() - left);
        self.stream.reap(&mut self.done);
        self.check_completions();
        self.ended |= taken.is_err();
        let part = self.scale * AROUND..self.scale * (AROUND + EXPOSED);
        for buffer in &self.exposed {
            let now = buffer.contents(self.scale);
            let outside = now[..part.start].iter().chain(&now[part.end..]);
            assert!(
                outside.zip(SECRET.iter().cycle()).all(|(a, b)| a == b),
                "written outside of window {}",
                buffer.window
            );
            assert!(
                buffer.writable || now[part.clone()].iter().all(|&byte| byte == 0x11),
                "written without remote write access, window {}",
                buffer.window
            );
            assert!(
                buffer.at_revocation.as_ref().is_none_or(|contents| *contents == now),
                "written after the revocation"
            );
        }
    }

    fn check_completions(&mut self) {
        for done in self.done.drain(..) {
            assert_eq!(done.qp, ID);
            if done.opcode == Opcode::Recv {
                assert!(done.buf.is_some_and(|buf| buf.len() <= self.scale * RECEIVE));
                continue;
            }
            let revoked = self.revoking.iter().find(|(id, _)| *id == done.wr_id && done.status.is_ok());
            if let Some(&(id, window)) = revoked {
                let is_revoked = |buffer: &&mut ExposedBuffer| {
                    buffer.window == window && buffer.id < id && buffer.at_revocation.is_none()
                };
                let revoked = self.exposed.iter_mut().filter(is_revoked);
                revoked.for_each(|buffer| buffer.at_revocation = Some(buffer.contents(self.scale)));
            }
            match self.posted.iter().position(|&id| id == done.wr_id) {
                Some(at) => _ = self.posted.remove(at),
                // A failed request completes even if it is not signalled.
                None => assert!(!done.status.is_ok(), "{done:?} was not signalled"),
            }
        }
    }

    fn end(mut self) {
        self.stream.flush(crate::Status::Flushed, &mut self.done);
        self.check_completions();
        assert!(self.posted.is_empty(), "never reported: {:?}", self.posted);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Long messages whose header arrives first: into a Receive, and into a window.
    #[test]
    fn scenarios_can_place_payloads_directly() {
        assert_eq!(super::run_and_count_direct(&[0x70, 0x07, 0, 0x12, 0, 255, 20]), 9180);
        assert_eq!(super::run_and_count_direct(&[0x70, 0x4B, 0x0F, 0x13, 0, 0, 0, 0, 255, 0, 16]), 9180);
        assert_eq!(super::run_and_count_direct(&[0x60, 0x07, 0x12, 0, 255]), 0, "in one part");
        assert_eq!(
            super::run_and_count_direct(&[0x78, 0x07, 0, 0x12, 0, 255, 0, 20]),
            0,
            "with a CRC, which is checked first"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_scenario_keeps_the_invariants(input in prop::collection::vec(any::<u8>(), 0..400)) {
            super::run_scenario(&input);
        }
    }
}
