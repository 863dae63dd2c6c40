//! One connection without a socket, with an arbitrary peer.
//!
//! It serves the fuzz target `endpoint` and its own test. The peer is sometimes honest, sometimes off by one, sometimes
//! only bytes. Our side sends, receives, exposes memory and accesses the peer's. Invariants: hidden memory is neither
//! changed nor sent, and readable memory is not changed. Each signaled request completes once. Every buffer returns.
//! Segments of our messages are not interleaved. The last message to the peer is a Terminate.

use std::cell::RefCell;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::rdmap_stream::{Arenas, RdmapStream, SharedResources};
use super::setup::Negotiated;
use super::wire::{
    MAX_ULPDU, Opcode as Message, Place, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, ReadRequest, Segment,
    SegmentReader, Step, crc32c, fpdu_len,
};
use crate::receives::Receives;
use crate::{
    Access, Completion, ConnectParams, FabricStats, Opcode, Posting, QpId, RemoteMemory, Source, WindowId, WorkRequest,
};

/// Length factors of the story: short, or long enough for direct reads.
const SCALES: [usize; 2] = [1, 36];
/// Bytes of a Receive, at scale 1.
const RECEIVE: usize = 512;
/// Bytes of exposed memory, and of the memory before and after it.
const SHOWN: usize = 256;
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

/// Plays the story in these bytes.
///
/// # Panics
/// If anything does not hold.
pub fn story(input: &[u8]) {
    play(input);
}

/// Plays it; returns the number of directly placed bytes.
fn play(input: &[u8]) -> usize {
    POOL.with_borrow_mut(|pool| {
        let pool = pool.get_or_insert_with(|| {
            let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
            let classes = SCALES.map(|scale| Class { size: scale * RECEIVE, count: BUFFERS });
            Pool::new(&PoolConfig { classes: classes.to_vec(), arena }).expect("memory")
        });
        let placed = Story::new(pool, input).run();
        assert!(pool.stats().classes.iter().all(|class| class.free == BUFFERS), "a buffer is not home");
        placed
    })
}

/// Memory that was exposed at least once.
struct Shown {
    /// The request that exposed it.
    id: u64,
    mem: Lent,
    window: u32,
    rkey: u32,
    /// Whether the peer may write it, or could before.
    writable: bool,
    /// Its contents at the revocation of its window.
    then: Option<Vec<u8>>,
}

impl Shown {
    fn now(&self, scale: usize) -> Vec<u8> {
        let mut now = vec![0; scale * RECEIVE];
        assert!(self.mem.read_at(0, &mut now));
        now
    }
}

struct Story<'p, 'd> {
    input: &'d [u8],
    /// One of [`SCALES`].
    scale: usize,
    /// Whether FPDUs have a CRC.
    crc: bool,
    /// Delivers the peer's bytes in two pieces; direct reads happen as from a socket.
    pieces: bool,
    /// Number of directly placed bytes.
    placed: usize,
    pool: &'p Pool,
    stream: RdmapStream,
    shared: SharedResources,
    windows: u32,
    shown: Vec<Shown>,
    /// Signaled requests that were not reported yet.
    posted: Vec<u64>,
    next: u64,
    /// Those that revoke a window.
    revoking: Vec<(u64, u32)>,
    done: Vec<Completion>,
    /// Unread peer bytes, which wait for a Receive.
    unread: Vec<u8>,
    /// Numbers of the peer's next messages, by queue.
    msn: [u32; 3],
    /// Offset of its next segment of a Send.
    offset: u32,
    /// Outstanding Reads of our side.
    asked: Vec<ReadRequest>,
    /// The received part of the next request.
    asking: Option<Vec<u8>>,
    heard: SegmentReader,
    /// The incomplete message of our side.
    amid: Option<Message>,
    over: bool,
}

impl<'p, 'd> Story<'p, 'd> {
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
        let (waits, crc, pieces) = (mode & 4 != 0, mode & 8 != 0, mode & 16 != 0);
        let (scale, max_ulpdu) = (SCALES[usize::from(mode >> 5 & 1)], if mode & 64 != 0 { MAX_ULPDU } else { 100 });
        let agreed = Negotiated { crc, ord: 2, ird: 2, rtr: false, is_ours: true };
        stream.begin(&agreed, waits, max_ulpdu, scale * RECEIVE);
        let mut arenas = Arenas::default();
        arenas.add(pool.arena().id(), Access::REMOTE, || Ok(())).expect("it is new");
        let shared = SharedResources { arenas, receives: Receives::new(4), stats: FabricStats::default() };
        Self {
            input,
            scale,
            crc,
            pieces,
            placed: 0,
            pool,
            stream,
            shared,
            windows: 0,
            shown: Vec::new(),
            posted: Vec::new(),
            next: 0,
            revoking: Vec::new(),
            done: Vec::new(),
            unread: Vec::new(),
            msn: [1; 3],
            offset: 0,
            asked: Vec::new(),
            asking: None,
            heard: SegmentReader::new(crc),
            amid: None,
            over: false,
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
        while !self.input.is_empty() && !self.over {
            let step = self.byte();
            self.step(step & 15, step >> 4);
        }
        let placed = self.placed;
        self.end();
        placed
    }

    fn step(&mut self, step: u8, with: u8) {
        match step {
            0 => {
                let (bytes, rest) = self.input.split_at(self.input.len().min(usize::from(with)));
                self.input = rest;
                self.hear(bytes);
            }
            1 | 2 => self.peer_sends(with),
            3 => self.peer_writes(with),
            4 => self.peer_reads(with),
            5 => self.peer_answers(with),
            6 => self.segment(Message::Terminate, true, self.untagged(QUEUE_TERMINATE), &[0x11, with, 0, 0]),
            7 => self.receive(with),
            8 => self.send(with),
            9 | 10 => self.reach(with),
            11 | 12 => self.show(with),
            13 => {
                let window = WindowId { qp: ID, index: u32::from(with) % WINDOWS };
                self.post(WorkRequest::LocalInvalidate { window }, with & 4 != 0);
                self.revoking.push((self.next, window.index));
            }
            14 if with == 0 => self.stream.outbound.send_empty_write(),
            _ => self.say(if step == 14 { 7 * usize::from(with) } else { usize::MAX }),
        }
    }

    fn untagged(&self, queue: u32) -> Place {
        Place::Untagged { queue, msn: self.msn[queue as usize], offset: 0 }
    }

    /// Sends a segment of the peer.
    fn segment(&mut self, opcode: Message, last: bool, place: Place, payload: &[u8]) {
        let header = Segment { opcode, last, place }.encode(payload.len());
        let mut bytes = [&header[..], payload].concat();
        let whole = fpdu_len(header.len() - 2 + payload.len());
        if self.crc {
            bytes.resize(whole - 4, 0);
            bytes.extend(crc32c(&bytes).to_le_bytes());
            let wrong = self.slip();
            bytes[whole - 1] ^= wrong as u8;
        }
        bytes.resize(whole, 0);
        self.hear(&bytes);
    }

    /// A length of the story.
    fn length(&mut self) -> usize {
        self.scale * usize::from(self.byte())
    }

    /// Three bits of the next byte: 0 most of the time.
    fn slip(&mut self) -> u32 {
        let byte = self.byte();
        if byte > 0xE0 { u32::from(byte & 7) } else { 0 }
    }

    fn peer_sends(&mut self, with: u8) {
        let (last, wrong) = (with & 1 != 0, self.slip());
        let invalidate = (with & 6 == 6).then(|| self.key()).flatten();
        let len = self.length();
        let place = Place::Untagged { queue: QUEUE_SEND, msn: self.msn[0], offset: self.offset.wrapping_add(wrong) };
        self.segment(Message::Send { invalidate, solicited: with & 8 != 0 }, last, place, &vec![with; len]);
        if last {
            (self.msn[0], self.offset) = (self.msn[0].wrapping_add(1), 0);
        } else {
            self.offset += len as u32;
        }
    }

    /// A key of ours, or a neighbor.
    fn key(&mut self) -> Option<u32> {
        let (which, wrong) = (usize::from(self.byte()), self.slip());
        let shown = self.shown.get(which.checked_rem(self.shown.len())?)?;
        Some(shown.rkey.wrapping_add(wrong))
    }

    /// Our memory by the peer's name, or near it: key, offset, and bytes from there.
    fn place(&mut self) -> Option<(u32, u64, usize)> {
        let stag = self.key()?;
        let (which, at, len, wrong) = (self.byte(), self.length(), self.length(), self.slip());
        let shown = &self.shown[usize::from(which) % self.shown.len()];
        let start = (shown.mem.offset() + self.scale * AROUND + at) as u64;
        let rest = (self.scale * SHOWN).saturating_sub(at);
        Some((stag, start.wrapping_sub(u64::from(wrong >> 2)), len.min(rest) + (wrong & 3) as usize))
    }

    fn peer_writes(&mut self, with: u8) {
        let Some((stag, offset, len)) = self.place() else { return };
        let place = Place::Tagged { stag, offset };
        self.segment(Message::Write, with & 1 != 0, place, &vec![0x33; len]);
    }

    fn peer_reads(&mut self, with: u8) {
        let Some((source_stag, source_offset, len)) = self.place() else { return };
        let request = ReadRequest {
            sink_stag: self.word(),
            sink_offset: u64::from(self.byte()),
            len: len as u32,
            source_stag,
            source_offset,
        };
        let place = self.untagged(QUEUE_READ_REQUEST);
        self.segment(Message::ReadRequest, with & 15 != 1, place, &request.encode());
        self.msn[1] = self.msn[1].wrapping_add(1);
    }

    /// Answers our oldest outstanding Read.
    fn peer_answers(&mut self, with: u8) {
        let wrong = self.slip();
        let some = self.scale as u32 * u32::from(with);
        let Some(asked) = self.asked.first_mut() else { return };
        let len = if with & 1 != 0 { asked.len } else { asked.len.min(some) };
        let place = Place::Tagged { stag: asked.sink_stag, offset: asked.sink_offset.wrapping_add(u64::from(wrong)) };
        asked.len -= len;
        asked.sink_offset = asked.sink_offset.wrapping_add(u64::from(len));
        let last = asked.len == 0;
        if last {
            self.asked.remove(0);
        }
        self.segment(Message::ReadResponse, last != (wrong == 7), place, &vec![0x44; len as usize]);
    }

    fn receive(&mut self, with: u8) {
        let room = |receives: &mut Receives| receives.room();
        let own = self.stream.own_receives.as_mut().map(room);
        let bufs: Vec<Buf> = (0..own.unwrap_or_else(|| self.shared.receives.room()).min(usize::from(with & 3) + 1))
            .map_while(|_| self.pool.alloc(self.scale * RECEIVE))
            .collect();
        self.stream.own_receives.as_mut().unwrap_or(&mut self.shared.receives).post(bufs.into_iter());
        self.hear(&[]);
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

    fn send(&mut self, with: u8) {
        let (len, invalidate) = (self.length(), (with & 2 != 0).then_some(9));
        let Some(buf) = self.buffer(len) else { return };
        self.post(WorkRequest::Send { buf, invalidate, fence: with & 4 != 0 }, with & 1 != 0);
    }

    /// Posts an RDMA Read or Write of ours.
    fn reach(&mut self, with: u8) {
        let (len, remote) = (self.length(), RemoteMemory { rkey: 0x77, address: 0x1000 });
        let Some(buf) = self.buffer(self.scale * RECEIVE) else { return };
        let wr = match (with >> 1 & 1, buf) {
            (0, buf) => match buf.lend() {
                Ok(dst) => WorkRequest::Read { dst, offset: 0, len, remote },
                Err(_) => return,
            },
            (_, buf) => WorkRequest::Write { src: Source::Frozen(buf.freeze()), offset: 0, len, remote },
        };
        self.post(wr, with & 1 != 0);
    }

    /// Exposes the middle of a buffer.
    fn show(&mut self, with: u8) {
        let writable = with & 4 != 0;
        let (around, shown) = (self.scale * AROUND, self.scale * SHOWN);
        let Some(mut buf) = self.pool.alloc(self.scale * RECEIVE) else { return };
        buf.as_chunks_mut().0.fill(SECRET);
        if !writable {
            buf[around..around + shown].fill(0x11);
        }
        let Ok(mem) = buf.lend() else { return };
        let window = u32::from(with & 3);
        while self.windows <= window {
            self.windows = self.stream.windows.alloc(ID).expect("a window").index + 1;
        }
        let Some(rkey) = self.stream.windows.next(window) else { return };
        let access = if writable { Access { remote_read: false, ..Access::REMOTE } } else { Access::REMOTE_READ };
        let name = WindowId { qp: ID, index: window };
        let before = self.next;
        self.post(WorkRequest::Bind { window: name, mem: mem.clone(), offset: around, len: shown, access }, true);
        if self.posted.last() == Some(&(before + 1)) {
            self.shown.push(Shown { id: self.next, mem, window, rkey, writable, then: None });
        }
    }

    /// Passes up to `most` bytes of our output to the peer.
    fn say(&mut self, most: usize) {
        self.over |= self.stream.produce().is_err();
        let bytes = self.stream.outbound.buffer.bytes(most);
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET), "a secret is said");
        self.stream.outbound.buffer.advance(bytes.len());
        let mut rest = &bytes[..];
        while let Some(step) = self.heard.step(&mut rest).expect("what we say is right") {
            match step {
                Step::Segment { segment, .. } => {
                    assert!(self.amid.is_none_or(|amid| amid == segment.opcode), "segments of two messages are mixed");
                    self.amid = (!segment.last).then_some(segment.opcode);
                    self.asking = (segment.opcode == Message::ReadRequest).then(Vec::new);
                }
                Step::Payload(part) => {
                    if let Some(asking) = &mut self.asking {
                        asking.extend_from_slice(part);
                    }
                }
                Step::End => {
                    let asked = self.asking.take().map(|bytes| bytes[..].try_into().expect("it has one length"));
                    self.asked.extend(asked.as_ref().map(ReadRequest::decode));
                }
            }
        }
        self.stream.reap(&mut self.done);
        self.take_done();
    }

    /// Receives bytes of the peer.
    fn hear(&mut self, mut bytes: &[u8]) {
        if self.pieces {
            let first = usize::from(self.byte()).min(bytes.len());
            self.take(&bytes[..first]);
            bytes = &bytes[first..];
            if self.unread.is_empty()
                && !self.over
                && let Some(place) = self.stream.direct_target()
            {
                let placed = place.len().min(bytes.len());
                place.fill(&bytes[..placed]);
                self.stream.advance_direct(placed);
                self.placed += placed;
                bytes = &bytes[placed..];
            }
        }
        self.take(bytes);
    }

    /// Consumes bytes of the peer, after the waiting ones.
    fn take(&mut self, bytes: &[u8]) {
        if self.over {
            return;
        }
        self.unread.extend_from_slice(bytes);
        let mut input = &self.unread[..];
        let taken = self.stream.consume(&mut self.shared, &mut input, &mut self.done, usize::MAX);
        let left = input.len();
        self.unread.drain(..self.unread.len() - left);
        self.stream.reap(&mut self.done);
        self.take_done();
        self.over |= taken.is_err();
        let part = self.scale * AROUND..self.scale * (AROUND + SHOWN);
        for shown in &self.shown {
            let now = shown.now(self.scale);
            let outside = now[..part.start].iter().chain(&now[part.end..]);
            assert!(
                outside.zip(SECRET.iter().cycle()).all(|(a, b)| a == b),
                "written outside of window {}",
                shown.window
            );
            assert!(
                shown.writable || now[part.clone()].iter().all(|&byte| byte == 0x11),
                "written without the right to, window {}",
                shown.window
            );
            assert!(shown.then.as_ref().is_none_or(|then| *then == now), "written when it was shown no more");
        }
    }

    fn take_done(&mut self) {
        for done in self.done.drain(..) {
            assert_eq!(done.qp, ID);
            if done.opcode == Opcode::Recv {
                assert!(done.buf.is_some_and(|buf| buf.len() <= self.scale * RECEIVE));
                continue;
            }
            let revoked = self.revoking.iter().find(|(id, _)| *id == done.wr_id && done.status.is_ok());
            if let Some(&(id, window)) = revoked {
                let those = |shown: &&mut Shown| shown.window == window && shown.id < id && shown.then.is_none();
                let those = self.shown.iter_mut().filter(those);
                those.for_each(|shown| shown.then = Some(shown.now(self.scale)));
            }
            match self.posted.iter().position(|&id| id == done.wr_id) {
                Some(at) => _ = self.posted.remove(at),
                // Failures are reported in any case.
                None => assert!(!done.status.is_ok(), "{done:?} was not asked for"),
            }
        }
    }

    fn end(mut self) {
        self.stream.flush(crate::Status::Flushed, &mut self.done);
        self.take_done();
        assert!(self.posted.is_empty(), "never reported: {:?}", self.posted);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Long messages in pieces, the header first: into a Receive, and into a window.
    #[test]
    fn stories_can_put_payloads_to_their_place_at_once() {
        assert_eq!(super::play(&[0x70, 0x07, 0, 0x12, 0, 255, 20]), 9180);
        assert_eq!(super::play(&[0x70, 0x4B, 0x0F, 0x13, 0, 0, 0, 0, 255, 0, 16]), 9180);
        assert_eq!(super::play(&[0x60, 0x07, 0x12, 0, 255]), 0, "not in pieces");
        assert_eq!(super::play(&[0x78, 0x07, 0, 0x12, 0, 255, 0, 20]), 0, "with a CRC, which comes first");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_story_ends_well(input in prop::collection::vec(any::<u8>(), 0..400)) {
            super::story(&input);
        }
    }
}
