//! Fuzzing of one connection without a socket, with an arbitrary peer.
//!
//! The fuzz target `endpoint` and the test below use this module. The peer sends valid segments, segments with slightly
//! wrong values, or arbitrary bytes. This side sends, receives, exposes memory and accesses the peer's memory.
//!
//! Invariants: hidden memory is neither changed nor sent, and readable memory is not changed. Each signaled request
//! completes once. Every buffer returns to the pool. Segments of this side's messages are not interleaved.

use std::cell::RefCell;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::rdmap_stream::{Arenas, RdmapStream, SharedResources};
use super::setup::Negotiated;
use super::wire::{
    MAX_ULPDU, PayloadPlace, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, RdmapOpcode, ReadRequest, ReaderStep,
    SegmentHeader, SegmentReader, crc32c, fpdu_len,
};
use crate::receives::ReceiveQueue;
use crate::{
    Access, Completion, ConnectParams, FabricStats, Opcode, Posting, QpId, RemoteMemory, Source, WindowId, WorkRequest,
};

/// Factors of all lengths in a scenario. The second makes payloads long enough for direct placement.
const SCALES: [usize; 2] = [1, 36];
/// Bytes of a Receive, at scale 1.
const RECEIVE_SIZE: usize = 512;
/// Bytes of exposed memory, at scale 1.
const EXPOSED: usize = 256;
/// Bytes of hidden memory on each side of the exposed memory, at scale 1.
const HIDDEN: usize = 128;
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
            let classes = SCALES.map(|scale| Class { size: scale * RECEIVE_SIZE, count: BUFFERS });
            Pool::new(&PoolConfig { classes: classes.to_vec(), arena }).expect("a pool")
        });
        let placed = Scenario::new(pool, input).run();
        assert!(pool.stats().classes.iter().all(|class| class.free == BUFFERS), "every buffer returns to the pool");
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
    /// True if the window permits writes.
    writable: bool,
    /// The contents at the revocation of the window.
    at_revocation: Option<Vec<u8>>,
}

impl ExposedBuffer {
    fn contents(&self, scale: usize) -> Vec<u8> {
        let mut contents = vec![0; scale * RECEIVE_SIZE];
        assert!(self.mem.read_at(0, &mut contents));
        contents
    }
}

struct Scenario<'p, 'd> {
    input: &'d [u8],
    /// One of [`SCALES`].
    scale: usize,
    /// True if FPDUs have a CRC.
    crc: bool,
    /// True if the peer's bytes arrive in two parts. The second part may be placed directly, as from a socket.
    in_parts: bool,
    /// Number of directly placed bytes.
    placed: usize,
    pool: &'p Pool,
    stream: RdmapStream,
    shared: SharedResources,
    /// Number of allocated windows.
    windows: u32,
    exposed: Vec<ExposedBuffer>,
    /// Signaled requests that are not yet reported.
    posted: Vec<u64>,
    /// Identifier of the last posted request.
    last_id: u64,
    /// Requests that invalidate a window: identifier and window.
    revoking: Vec<(u64, u32)>,
    done: Vec<Completion>,
    /// Unconsumed bytes of the peer, which wait for a Receive.
    unread: Vec<u8>,
    /// Message sequence numbers of the peer's next messages, by queue.
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
    /// True once the connection has ended.
    ended: bool,
}

impl<'p, 'd> Scenario<'p, 'd> {
    fn new(pool: &'p Pool, input: &'d [u8]) -> Self {
        let (&mode, input) = input.split_first().unwrap_or((&0, &[]));
        let params = ConnectParams {
            send_queue_depth: 8,
            own_receive_queue: (mode & 1 != 0).then_some(4),
            windows: WINDOWS,
            rnr_retry: if mode & 2 != 0 { ConnectParams::UNLIMITED_RNR_RETRY } else { 0 },
            ..ConnectParams::default()
        };
        let mut stream = RdmapStream::new(ID, &params, 0x1357_9bdf);
        let (is_responder, crc, in_parts) = (mode & 4 != 0, mode & 8 != 0, mode & 16 != 0);
        let (scale, max_ulpdu) = (SCALES[usize::from(mode >> 5 & 1)], if mode & 64 != 0 { MAX_ULPDU } else { 100 });
        let agreed = Negotiated { crc, ord: 2, ird: 2, rtr: false, is_same_engine: true };
        stream.begin(&agreed, is_responder, max_ulpdu, scale * RECEIVE_SIZE);
        let mut arenas = Arenas::default();
        arenas.add(pool.arena().id(), Access::REMOTE, || Ok(())).expect("the arena is new");
        let shared = SharedResources { arenas, receives: ReceiveQueue::new(4), stats: FabricStats::default() };
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
            last_id: 0,
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

    /// Performs an action of either side. `argument` varies it.
    fn step(&mut self, step: u8, argument: u8) {
        match step {
            0 => {
                let (bytes, rest) = self.input.split_at(self.input.len().min(usize::from(argument)));
                self.input = rest;
                self.receive_bytes(bytes);
            }
            1 | 2 => self.send_from_peer(argument),
            3 => self.write_from_peer(argument),
            4 => self.read_from_peer(argument),
            5 => self.respond_from_peer(argument),
            6 => {
                self.send_segment(RdmapOpcode::Terminate, true, self.untagged(QUEUE_TERMINATE), &[0x11, argument, 0, 0])
            }
            7 => self.post_receives(argument),
            8 => self.send(argument),
            9 | 10 => self.access_peer(argument),
            11 | 12 => self.expose(argument),
            13 => {
                let window = WindowId { qp: ID, index: u32::from(argument) % WINDOWS };
                self.post(WorkRequest::LocalInvalidate { window }, argument & 4 != 0);
                self.revoking.push((self.last_id, window.index));
            }
            14 if argument == 0 => self.stream.outbound.send_empty_write(),
            _ => self.send_output(if step == 14 { 7 * usize::from(argument) } else { usize::MAX }),
        }
    }

    fn untagged(&self, queue: u32) -> PayloadPlace {
        PayloadPlace::Untagged { queue, msn: self.msn[queue as usize], offset: 0 }
    }

    /// Sends a segment from the peer.
    fn send_segment(&mut self, opcode: RdmapOpcode, last: bool, place: PayloadPlace, payload: &[u8]) {
        let header = SegmentHeader { opcode, last, place }.encode(payload.len());
        let mut bytes = [&header[..], payload].concat();
        let whole = fpdu_len(header.len() - 2 + payload.len());
        if self.crc {
            bytes.resize(whole - 4, 0);
            bytes.extend(crc32c(&bytes).to_le_bytes());
            let deviation = self.next_deviation();
            bytes[whole - 1] ^= deviation as u8;
        }
        bytes.resize(whole, 0);
        self.receive_bytes(&bytes);
    }

    /// Takes a length from the input.
    fn next_length(&mut self) -> usize {
        self.scale * usize::from(self.byte())
    }

    /// Takes a deviation from a correct value, usually 0, from the input.
    fn next_deviation(&mut self) -> u32 {
        let byte = self.byte();
        if byte > 0xE0 { u32::from(byte & 7) } else { 0 }
    }

    fn send_from_peer(&mut self, argument: u8) {
        let (last, deviation) = (argument & 1 != 0, self.next_deviation());
        let invalidate = (argument & 6 == 6).then(|| self.choose_key()).flatten();
        let len = self.next_length();
        let place =
            PayloadPlace::Untagged { queue: QUEUE_SEND, msn: self.msn[0], offset: self.offset.wrapping_add(deviation) };
        self.send_segment(
            RdmapOpcode::Send { invalidate, solicited: argument & 8 != 0 },
            last,
            place,
            &vec![argument; len],
        );
        if last {
            (self.msn[0], self.offset) = (self.msn[0].wrapping_add(1), 0);
        } else {
            self.offset += len as u32;
        }
    }

    /// Chooses a key of this side, or a key near it.
    fn choose_key(&mut self) -> Option<u32> {
        let (which, deviation) = (usize::from(self.byte()), self.next_deviation());
        let buffer = self.exposed.get(which.checked_rem(self.exposed.len())?)?;
        Some(buffer.rkey.wrapping_add(deviation))
    }

    /// Chooses STag, tagged offset and length of a range in exposed memory or near it.
    fn choose_range(&mut self) -> Option<(u32, u64, usize)> {
        let stag = self.choose_key()?;
        let (which, at, len, deviation) = (self.byte(), self.next_length(), self.next_length(), self.next_deviation());
        let buffer = &self.exposed[usize::from(which) % self.exposed.len()];
        let start = (buffer.mem.offset() + self.scale * HIDDEN + at) as u64;
        let rest = (self.scale * EXPOSED).saturating_sub(at);
        Some((stag, start.wrapping_sub(u64::from(deviation >> 2)), len.min(rest) + (deviation & 3) as usize))
    }

    fn write_from_peer(&mut self, argument: u8) {
        let Some((stag, offset, len)) = self.choose_range() else { return };
        let place = PayloadPlace::Tagged { stag, offset };
        self.send_segment(RdmapOpcode::Write, argument & 1 != 0, place, &vec![0x33; len]);
    }

    fn read_from_peer(&mut self, argument: u8) {
        let Some((source_stag, source_offset, len)) = self.choose_range() else { return };
        let request = ReadRequest {
            sink_stag: self.word(),
            sink_offset: u64::from(self.byte()),
            len: len as u32,
            source_stag,
            source_offset,
        };
        let place = self.untagged(QUEUE_READ_REQUEST);
        self.send_segment(RdmapOpcode::ReadRequest, argument & 15 != 1, place, &request.encode());
        self.msn[1] = self.msn[1].wrapping_add(1);
    }

    /// Sends the next Read Response to this side's oldest Read.
    fn respond_from_peer(&mut self, argument: u8) {
        let deviation = self.next_deviation();
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
        self.send_segment(RdmapOpcode::ReadResponse, last != (deviation == 7), place, &vec![0x44; len as usize]);
    }

    fn post_receives(&mut self, argument: u8) {
        let own_room = self.stream.own_receives.as_mut().map(|receives| receives.room());
        let bufs: Vec<Buf> =
            (0..own_room.unwrap_or_else(|| self.shared.receives.room()).min(usize::from(argument & 3) + 1))
                .map_while(|_| self.pool.alloc(self.scale * RECEIVE_SIZE))
                .collect();
        self.stream.own_receives.as_mut().unwrap_or(&mut self.shared.receives).post(bufs.into_iter());
        self.receive_bytes(&[]);
    }

    fn alloc_buffer(&self, len: usize) -> Option<Buf> {
        let mut buf = self.pool.alloc(self.scale * RECEIVE_SIZE)?;
        buf.fill(0x55);
        buf.set_window(0, len.min(self.scale * RECEIVE_SIZE));
        Some(buf)
    }

    fn post(&mut self, wr: WorkRequest, signaled: bool) {
        self.last_id += 1;
        let mut chain = vec![Posting { wr_id: self.last_id, signaled, wr }];
        let posted = self.stream.post(&mut self.shared, &mut chain).is_ok() && chain.is_empty();
        if posted && signaled {
            self.posted.push(self.last_id);
        }
    }

    fn send(&mut self, argument: u8) {
        let (len, invalidate) = (self.next_length(), (argument & 2 != 0).then_some(9));
        let Some(buf) = self.alloc_buffer(len) else { return };
        self.post(WorkRequest::Send { buf, invalidate, fence: argument & 4 != 0 }, argument & 1 != 0);
    }

    /// Posts an RDMA Read or Write of this side.
    fn access_peer(&mut self, argument: u8) {
        let (len, remote) = (self.next_length(), RemoteMemory { rkey: 0x77, address: 0x1000 });
        let Some(buf) = self.alloc_buffer(self.scale * RECEIVE_SIZE) else { return };
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
        let (around, len) = (self.scale * HIDDEN, self.scale * EXPOSED);
        let Some(mut buf) = self.pool.alloc(self.scale * RECEIVE_SIZE) else { return };
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
        let before = self.last_id;
        self.post(WorkRequest::Bind { window: window_id, mem: mem.clone(), offset: around, len, access }, true);
        if self.posted.last() == Some(&(before + 1)) {
            self.exposed.push(ExposedBuffer { id: self.last_id, mem, window, rkey, writable, at_revocation: None });
        }
    }

    /// Passes up to `max` bytes of this side's output to the peer.
    fn send_output(&mut self, max: usize) {
        self.ended |= self.stream.produce().is_err();
        let bytes = self.stream.outbound.buffer.bytes(max);
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET), "hidden memory is never sent");
        self.stream.outbound.buffer.advance(bytes.len());
        let mut rest = &bytes[..];
        while let Some(step) = self.peer_reader.step(&mut rest).expect("this side sends valid segments") {
            match step {
                ReaderStep::Segment { segment, .. } => {
                    assert!(
                        self.partial_message.is_none_or(|opcode| opcode == segment.opcode),
                        "a message's segments are not interleaved with another's"
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

    /// Consumes earlier unread bytes, then these bytes of the peer.
    fn consume(&mut self, bytes: &[u8]) {
        if self.ended {
            return;
        }
        self.unread.extend_from_slice(bytes);
        let mut input = &self.unread[..];
        self.stream.start_turn();
        let taken = self.stream.consume(&mut self.shared, &mut input, &mut self.done, usize::MAX);
        let unread = input.len();
        self.unread.drain(..self.unread.len() - unread);
        self.stream.reap(&mut self.done);
        self.check_completions();
        self.ended |= taken.is_err();
        let exposed_range = self.scale * HIDDEN..self.scale * (HIDDEN + EXPOSED);
        for buffer in &self.exposed {
            let contents = buffer.contents(self.scale);
            let outside = contents[..exposed_range.start].iter().chain(&contents[exposed_range.end..]);
            assert!(
                outside.zip(SECRET.iter().cycle()).all(|(a, b)| a == b),
                "memory outside of window {} is not written",
                buffer.window
            );
            assert!(
                buffer.writable || contents[exposed_range.clone()].iter().all(|&byte| byte == 0x11),
                "memory of window {}, which permits no writes, is not written",
                buffer.window
            );
            assert!(
                buffer.at_revocation.as_ref().is_none_or(|revoked| *revoked == contents),
                "memory is not written after the revocation"
            );
        }
    }

    fn check_completions(&mut self) {
        for done in self.done.drain(..) {
            assert_eq!(done.qp, ID);
            if done.opcode == Opcode::Recv {
                assert!(done.buf.is_some_and(|buf| buf.len() <= self.scale * RECEIVE_SIZE));
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
                // A failed request completes even if it is not signaled.
                None => assert!(!done.status.is_ok(), "an unsignaled request completes only on failure: {done:?}"),
            }
        }
    }

    fn end(mut self) {
        self.stream.flush(crate::Status::Flushed, &mut self.done);
        self.check_completions();
        assert!(self.posted.is_empty(), "every signaled request completes, but these did not: {:?}", self.posted);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Payloads of long messages are placed directly, in a Receive and in a window, if their headers arrive first.
    #[test]
    fn scenarios_can_place_payloads_directly() {
        assert_eq!(super::run_and_count_direct(&[0x70, 0x07, 0, 0x12, 0, 255, 20]), 9180);
        assert_eq!(super::run_and_count_direct(&[0x70, 0x4B, 0x0F, 0x13, 0, 0, 0, 0, 255, 0, 16]), 9180);
        assert_eq!(
            super::run_and_count_direct(&[0x60, 0x07, 0x12, 0, 255]),
            0,
            "a message in one part is not placed directly"
        );
        assert_eq!(
            super::run_and_count_direct(&[0x78, 0x07, 0, 0x12, 0, 255, 0, 20]),
            0,
            "a message with a CRC is checked before it is placed"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn arbitrary_scenarios_keep_the_invariants(input in prop::collection::vec(any::<u8>(), 0..400)) {
            super::run_scenario(&input);
        }
    }
}
