//! Tests of two connected streams, and of a stream with a hostile peer, without sockets.

use std::ops::Range;

use proptest::prelude::*;
use rpcrdma_mempool::{ArenaConfig, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::*;
use crate::iwarp::wire::{PayloadPlace, RdmapOpcode, ReadRequest, SegmentHeader, fpdu_len};
use crate::{Access, Opcode, Posting, RemoteMemory, Source, WindowId, WorkRequest};

const RECEIVE: usize = 4096;

/// One end of a connection, with its memory.
struct Endpoint {
    stream: RdmapStream,
    shared: SharedResources,
    pool: Pool,
    done: Vec<Completion>,
    /// The reason for the connection's end.
    failure: Option<StreamFailure>,
}

/// Parameters of [`RdmapStream::begin`].
#[derive(Clone, Copy)]
struct StreamParams {
    crc: bool,
    is_responder: bool,
    max_ulpdu: usize,
}

fn default_params() -> StreamParams {
    StreamParams { crc: false, is_responder: false, max_ulpdu: 1000 }
}

impl Endpoint {
    fn new(params: StreamParams, rnr_retry: u8) -> Self {
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let classes = vec![Class { size: RECEIVE, count: 128 }, Class { size: 64 << 10, count: 16 }];
        let pool = Pool::new(&PoolConfig { classes, arena }).expect("memory");
        let mut arenas = Arenas::default();
        arenas.add(pool.arena().id(), Access::REMOTE, || Ok(())).expect("a new arena");
        let shared = SharedResources { arenas, receives: ReceiveQueue::new(64), stats: FabricStats::default() };
        let connect = ConnectParams { send_queue_depth: 64, windows: 8, rnr_retry, ..ConnectParams::default() };
        let id = QpId { slot: 3, generation: 1 };
        let mut stream = RdmapStream::new(id, &connect, 0xabcd_ef01);
        let agreed = Negotiated { crc: params.crc, ord: 2, ird: 2, rtr: false, is_same_engine: true };
        stream.begin(&agreed, params.is_responder, params.max_ulpdu, 64 << 10);
        Self { stream, shared, pool, done: Vec::new(), failure: None }
    }

    fn post_receives(&mut self, n: usize) {
        let bufs: Vec<_> = (0..n).map(|_| self.pool.alloc(RECEIVE).expect("a buffer")).collect();
        self.shared.receives.post(bufs.into_iter());
    }

    fn lend_bytes(&self, bytes: &[u8]) -> Lent {
        let mut buf = self.pool.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        buf.lend().expect("a buffer of this thread")
    }

    fn post(&mut self, wr_id: u64, wr: WorkRequest) {
        let mut chain = vec![Posting { wr_id, signaled: true, wr }];
        self.stream.post(&mut self.shared, &mut chain).expect("posted");
        assert!(chain.is_empty());
    }

    fn send(&mut self, wr_id: u64, bytes: &[u8], invalidate: Option<u32>, fence: bool) {
        let mut buf = self.pool.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        self.post(wr_id, WorkRequest::Send { buf, invalidate, fence });
    }

    /// Exposes memory. Returns the window and the peer's view of it.
    fn expose(&mut self, mem: &Lent, access: Access) -> (WindowId, RemoteMemory) {
        self.expose_part(mem, 0..mem.len(), access)
    }

    fn expose_part(&mut self, mem: &Lent, part: Range<usize>, access: Access) -> (WindowId, RemoteMemory) {
        let window = self.stream.windows.alloc(self.stream.id).expect("a window");
        let rkey = self.stream.windows.next(window.index).expect("a key");
        let (offset, len) = (part.start, part.len());
        let remote = RemoteMemory { rkey, address: (mem.offset() + offset) as u64 };
        self.post(0xb1d, WorkRequest::Bind { window, mem: mem.clone(), offset, len, access });
        self.take_output();
        (window, remote)
    }

    /// Takes the pending output, which then counts as sent.
    fn take_output(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            if let Err(failure) = self.stream.produce() {
                self.failure = Some(failure);
            }
            let bytes = self.stream.outbound.buffer.bytes(usize::MAX);
            if bytes.is_empty() {
                break;
            }
            self.stream.outbound.buffer.advance(bytes.len());
            all.extend(bytes);
        }
        self.stream.reap(&mut self.done);
        all
    }

    /// Consumes bytes of the peer in one turn. Returns the unconsumed rest.
    fn consume(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        if self.failure.is_none() {
            self.stream.start_turn();
            match self.stream.consume(&mut self.shared, &mut bytes, &mut self.done, usize::MAX) {
                Ok(_) => {}
                Err(failure) => self.failure = Some(failure),
            }
            self.stream.reap(&mut self.done);
        }
        bytes.to_vec()
    }

    /// The fault of the Terminate to send.
    fn fault(&self) -> Option<TerminateFault> {
        self.failure.as_ref()?.terminate.as_ref()?.fault()
    }

    fn take_completion(&mut self, opcode: Opcode) -> Option<Completion> {
        let at = self.done.iter().position(|c| c.opcode == opcode)?;
        Some(self.done.remove(at))
    }
}

fn contents(lent: &Lent) -> Vec<u8> {
    let mut to = vec![0; lent.len()];
    assert!(lent.read_at(0, &mut to));
    to
}

/// Exchanges bytes until neither endpoint has more, in pieces of these lengths, which repeat.
fn exchange(a: &mut Endpoint, b: &mut Endpoint, piece_lengths: &[usize]) {
    let mut piece_lengths = piece_lengths.iter().cycle().copied();
    loop {
        let (from_a, from_b) = (a.take_output(), b.take_output());
        if from_a.is_empty() && from_b.is_empty() {
            return;
        }
        for (bytes, to) in [(from_a, &mut *b), (from_b, &mut *a)] {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (piece, more) = rest.split_at(piece_lengths.next().unwrap_or(1).clamp(1, rest.len()));
                assert!(to.consume(piece).is_empty() || to.failure.is_some());
                rest = more;
            }
        }
    }
}

/// Encodes one FPDU without a CRC.
fn fpdu(opcode: RdmapOpcode, last: bool, place: PayloadPlace, payload: &[u8]) -> Vec<u8> {
    let header = SegmentHeader { opcode, last, place }.encode(payload.len());
    let mut bytes = [&header[..], payload].concat();
    bytes.resize(fpdu_len(header.len() - 2 + payload.len()), 0);
    bytes
}

/// Encodes a Read Request for no bytes.
fn read_request_at(place: PayloadPlace, last: bool) -> Vec<u8> {
    fpdu(RdmapOpcode::ReadRequest, last, place, &[0; 28])
}

const SEND: RdmapOpcode = RdmapOpcode::Send { invalidate: None, solicited: false };

fn untagged(queue: u32, msn: u32, offset: u32) -> PayloadPlace {
    PayloadPlace::Untagged { queue, msn, offset }
}

fn tagged(stag: u32, offset: u64) -> PayloadPlace {
    PayloadPlace::Tagged { stag, offset }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Posted requests arrive whole and in order, and complete in order, however the stream is cut.
    #[test]
    fn requests_complete_in_order_however_the_stream_is_cut(
        sizes in prop::collection::vec(0usize..4000, 1..20),
        piece_lengths in prop::collection::vec(1usize..3000, 1..6),
        crc in any::<bool>(),
        max_ulpdu in 200usize..5000,
    ) {
        let params = StreamParams { crc, max_ulpdu, ..default_params() };
        let mut a = Endpoint::new(params, 0);
        let mut b = Endpoint::new(StreamParams { is_responder: true, ..params }, 0);
        b.post_receives(sizes.len());
        a.stream.outbound.send_empty_write();
        exchange(&mut a, &mut b, &piece_lengths);
        let pattern = |n: usize, len: usize| (0..len).map(|i| (i * 7 + n) as u8).collect::<Vec<_>>();
        let place = b.lend_bytes(&vec![0; 60_000]);
        let (_, remote) = b.expose(&place, Access::REMOTE);
        let mut writes = Vec::new();
        let mut at = 0;
        for (n, &size) in sizes.iter().enumerate() {
            let bytes = pattern(n, size);
            match n % 3 {
                0 => a.send(n as u64, &bytes, None, n % 2 == 0),
                1 => {
                    let src = Source::Lent(a.lend_bytes(&bytes));
                    let remote = RemoteMemory { address: remote.address + at as u64, ..remote };
                    a.post(n as u64, WorkRequest::Write { src, offset: 0, len: size, remote });
                    writes.push((n, at, size));
                    at += size;
                }
                _ => {
                    // Read the bytes of the previous Write.
                    let (source, from, len) = writes[writes.len() - 1];
                    let dst = a.lend_bytes(&vec![0; len]);
                    let remote = RemoteMemory { address: remote.address + from as u64, ..remote };
                    a.post(n as u64, WorkRequest::Read { dst: dst.clone(), offset: 0, len, remote });
                    exchange(&mut a, &mut b, &piece_lengths);
                    prop_assert_eq!(contents(&dst), pattern(source, len));
                }
            }
        }
        exchange(&mut a, &mut b, &piece_lengths);
        prop_assert!(a.failure.is_none() && b.failure.is_none(), "{:?} {:?}", a.failure, b.failure);
        let done: Vec<_> = a.done.iter().map(|c| (c.wr_id, c.status)).collect();
        let expected: Vec<_> = (0..sizes.len() as u64).map(|n| (n, Status::Success)).collect();
        prop_assert_eq!(done, expected);
        for (n, &size) in sizes.iter().enumerate().filter(|(n, _)| n % 3 == 0) {
            let got = b.take_completion(Opcode::Recv).expect("a message");
            prop_assert_eq!(got.buf.as_deref(), Some(&pattern(n, size)[..]));
        }
        let all = contents(&place);
        for (n, at, size) in writes {
            prop_assert_eq!(&all[at..at + size], &pattern(n, size)[..]);
        }
    }

    /// Whatever a peer with a valid key sends, it changes only bytes in the window of the key, and of these only
    /// those that a valid Write names.
    #[test]
    fn peer_bytes_change_only_memory_that_a_valid_write_names(
        payload in prop::collection::vec(any::<u8>(), 1..300),
        at in -400i64..1400,
        opcode in prop_oneof![Just(0u8), 0u8..16],
        flipped in prop::option::of((any::<prop::sample::Index>(), 1u8..)),
        more in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        const EXPOSED: Range<usize> = 1000..2000;
        let mut endpoint = Endpoint::new(default_params(), 0);
        endpoint.post_receives(2);
        let memory = endpoint.lend_bytes(&[7; 4000]);
        let (_, remote) = endpoint.expose_part(&memory, EXPOSED, Access::REMOTE_WRITE);
        let mut bytes = match opcode {
            0 | 2 => {
                let place = tagged(remote.rkey, remote.address.wrapping_add_signed(at));
                fpdu(RdmapOpcode::Write, true, place, &payload)
            }
            1 => fpdu(SEND, true, untagged(1, 1, 0), &payload[..payload.len().min(28)]),
            _ => fpdu(SEND, true, untagged(0, 1, 0), &payload),
        };
        bytes[3] = bytes[3] & 0xF0 | opcode;
        if let Some((which, bits)) = &flipped {
            let at = which.index(bytes.len());
            bytes[at] ^= bits;
        }
        bytes.extend(&more);
        endpoint.consume(&bytes);
        let now = contents(&memory);
        prop_assert!(now[..EXPOSED.start].iter().chain(&now[EXPOSED.end..]).all(|&byte| byte == 7));
        if flipped.is_none() {
            let inside = at >= 0 && at as usize + payload.len() <= EXPOSED.len();
            let mut expected = vec![7; EXPOSED.len()];
            if inside && opcode == 0 {
                expected[at as usize..][..payload.len()].copy_from_slice(&payload);
            }
            prop_assert_eq!(&now[EXPOSED], &expected);
        }
    }
}

/// Each attack is answered by a Terminate with the fault, and changes no memory.
#[test]
fn violations_are_reported_with_their_terminate_fault() {
    let request = |len, source_stag, source_offset| {
        ReadRequest { sink_stag: 1, sink_offset: 0, len, source_stag, source_offset }.encode()
    };
    type Attack = Box<dyn Fn(RemoteMemory, RemoteMemory) -> Vec<u8>>;
    let write = |by: fn(RemoteMemory) -> (u32, u64), len: usize| -> Attack {
        Box::new(move |writable, _| {
            let (stag, offset) = by(writable);
            fpdu(RdmapOpcode::Write, true, tagged(stag, offset), &vec![9; len])
        })
    };
    let attacks: Vec<(&str, Attack, TerminateFault)> = vec![
        ("a Write past the end", write(|w| (w.rkey, w.address + 1), 1000), TerminateFault::TaggedBounds),
        ("a Write before the start", write(|w| (w.rkey, w.address.wrapping_sub(1)), 4), TerminateFault::TaggedBounds),
        ("a Write that wraps", write(|w| (w.rkey, u64::MAX - 3), 8), TerminateFault::TaggedOffsetWrap),
        ("a Write to a future key", write(|w| (w.rkey + 1, w.address), 4), TerminateFault::TaggedInvalidStag),
        (
            "a Write to an unknown key",
            write(|w| (w.rkey ^ 0x5000_0000, w.address), 4),
            TerminateFault::TaggedInvalidStag,
        ),
        (
            "a Write without the right",
            Box::new(|_, readable| fpdu(RdmapOpcode::Write, true, tagged(readable.rkey, readable.address), &[9; 4])),
            TerminateFault::AccessRights,
        ),
        (
            "a Read without the right",
            Box::new(move |writable, _| {
                let body = request(4, writable.rkey, writable.address);
                fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &body)
            }),
            TerminateFault::AccessRights,
        ),
        (
            "a Read past the end",
            Box::new(move |_, readable| {
                let body = request(1001, readable.rkey, readable.address);
                fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &body)
            }),
            TerminateFault::Bounds,
        ),
        (
            "a Read of an unknown key",
            Box::new(move |_, readable| {
                let body = request(1, readable.rkey + 1, readable.address);
                fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &body)
            }),
            TerminateFault::InvalidStag,
        ),
        (
            "three Reads with a read depth of two",
            Box::new(move |_, readable| {
                let body = request(1, readable.rkey, readable.address);
                let all = (1..4).map(|msn| fpdu(RdmapOpcode::ReadRequest, true, untagged(1, msn, 0), &body));
                all.collect::<Vec<_>>().concat()
            }),
            TerminateFault::NoBuffer,
        ),
        (
            "a short Read Request",
            Box::new(|_, _| fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &[0; 27])),
            TerminateFault::OperationUnspecified,
        ),
        (
            "a long Read Request",
            Box::new(|_, _| fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &[0; 29])),
            TerminateFault::TooLong,
        ),
        (
            "a Read Request out of order",
            Box::new(|_, _| read_request_at(untagged(1, 2, 0), true)),
            TerminateFault::MsnRange,
        ),
        (
            "a Read Request on the queue of Sends",
            Box::new(|_, _| read_request_at(untagged(0, 1, 0), true)),
            TerminateFault::InvalidQueue,
        ),
        (
            "a Read Request at an offset",
            Box::new(|_, _| read_request_at(untagged(1, 1, 4), true)),
            TerminateFault::InvalidOffset,
        ),
        (
            "a Read Request in two segments",
            Box::new(|_, _| read_request_at(untagged(1, 1, 0), false)),
            TerminateFault::InvalidOffset,
        ),
        (
            "a Terminate above the maximum length",
            Box::new(|_, _| fpdu(RdmapOpcode::Terminate, true, untagged(2, 1, 0), &[0; 65])),
            TerminateFault::TooLong,
        ),
        (
            "a second Terminate, without a first",
            Box::new(|_, _| fpdu(RdmapOpcode::Terminate, true, untagged(2, 2, 0), &[0; 4])),
            TerminateFault::MsnRange,
        ),
        (
            "a Read Response without a Read Request",
            Box::new(|w, _| fpdu(RdmapOpcode::ReadResponse, true, tagged(w.rkey, w.address), &[9; 4])),
            TerminateFault::UnexpectedOpcode,
        ),
        (
            "a message out of order",
            Box::new(|_, _| fpdu(SEND, true, untagged(0, 2, 0), b"two")),
            TerminateFault::MsnRange,
        ),
        (
            "the second half of a message first",
            Box::new(|_, _| fpdu(SEND, true, untagged(0, 1, 4), b"half")),
            TerminateFault::InvalidOffset,
        ),
        (
            "a gap within a message",
            Box::new(|_, _| {
                let first = fpdu(SEND, false, untagged(0, 1, 0), &[1; 8]);
                [first, fpdu(SEND, true, untagged(0, 1, 12), &[2; 8])].concat()
            }),
            TerminateFault::InvalidOffset,
        ),
        (
            "a message whose segments have different opcodes",
            Box::new(|_, _| {
                let first = fpdu(SEND, false, untagged(0, 1, 0), &[1; 8]);
                let solicited = RdmapOpcode::Send { invalidate: None, solicited: true };
                [first, fpdu(solicited, true, untagged(0, 1, 8), &[2; 8])].concat()
            }),
            TerminateFault::UnexpectedOpcode,
        ),
        ("an invalid queue", Box::new(|_, _| fpdu(SEND, true, untagged(3, 1, 0), b"?")), TerminateFault::InvalidQueue),
        (
            "a message longer than its Receive",
            Box::new(|_, _| fpdu(SEND, true, untagged(0, 1, 0), &[1; RECEIVE + 64])),
            TerminateFault::TooLong,
        ),
        (
            "an invalidation of an unknown key",
            Box::new(|w, _| {
                let opcode = RdmapOpcode::Send { invalidate: Some(w.rkey + 1), solicited: false };
                fpdu(opcode, true, untagged(0, 1, 0), b"gone")
            }),
            TerminateFault::CannotInvalidate,
        ),
    ];
    for (what, attack, expected) in attacks {
        let mut endpoint = Endpoint::new(default_params(), 0);
        endpoint.post_receives(2);
        let (target, source) = (endpoint.lend_bytes(&[1; 1000]), endpoint.lend_bytes(&[2; 1000]));
        let (_, writable) = endpoint.expose(&target, Access::REMOTE_WRITE);
        let (_, readable) = endpoint.expose(&source, Access::REMOTE_READ);
        endpoint.consume(&attack(writable, readable));
        assert_eq!(endpoint.fault(), Some(expected), "{what}: {:?}", endpoint.failure);
        assert_eq!((contents(&target), contents(&source)), (vec![1; 1000], vec![2; 1000]), "{what}");
        let stats = endpoint.shared.stats;
        assert_eq!(stats.peer_violations + stats.access_refused, 1, "{what}");
        // All memory returns to the pool: two Receives, and the exposed buffers.
        let mut ended = Vec::new();
        endpoint.stream.flush(Status::Flushed, &mut ended);
        drop((ended, endpoint.done, endpoint.stream, endpoint.shared));
        assert!(target.reclaim().is_ok() && source.reclaim().is_ok(), "{what}");
        endpoint.pool.close().expect(what);
    }
}

/// Posts a Read of `len` bytes. Returns its memory and the Read Request.
fn post_read(endpoint: &mut Endpoint, len: usize) -> (Lent, ReadRequest) {
    let dst = endpoint.lend_bytes(&[0; 100]);
    let remote = RemoteMemory { rkey: 5, address: 0 };
    endpoint.post(1, WorkRequest::Read { dst: dst.clone(), offset: 10, len, remote });
    let bytes = endpoint.take_output();
    let mut reader = SegmentReader::new(false);
    let (mut input, mut request) = (&bytes[..], None);
    while let Some(step) = reader.step(&mut input).expect("segments") {
        if let ReaderStep::Payload(payload) = step {
            request = Some(ReadRequest::decode(payload.try_into().expect("28 bytes")));
        }
    }
    (dst, request.expect("a request"))
}

fn read_response(stag: u32, offset: u64, last: bool, len: usize) -> Vec<u8> {
    fpdu(RdmapOpcode::ReadResponse, last, tagged(stag, offset), &vec![7; len])
}

/// Number 0 follows the maximum (RFC 5041 §4.3).
#[test]
fn message_numbers_wrap() {
    let (mut a, mut b) = (Endpoint::new(default_params(), 0), Endpoint::new(default_params(), 0));
    b.post_receives(3);
    a.stream.outbound.send_msn = u32::MAX - 1;
    b.stream.placement.send_msn = u32::MAX - 1;
    for n in 0..3 {
        a.send(n, &[n as u8], None, false);
    }
    exchange(&mut a, &mut b, &[7]);
    for n in 0..3 {
        assert_eq!(
            b.take_completion(Opcode::Recv).and_then(|got| got.buf).as_deref(),
            Some(&[n][..]),
            "{:?}",
            b.failure
        );
    }
    b.consume(&fpdu(SEND, true, untagged(0, 1, 0), b"again"));
    assert_eq!(b.fault(), Some(TerminateFault::MsnRange), "number 1 was already used");
}

/// Otherwise one peer could keep the thread busy with segments that cost it almost no bytes.
#[test]
fn a_turn_consumes_a_bounded_number_of_segments() {
    let mut endpoint = Endpoint::new(default_params(), 0);
    let segment = fpdu(RdmapOpcode::Write, true, tagged(0, 0), b"");
    let sent = segment.repeat(2 * MAX_SEGMENTS);
    let rest = endpoint.consume(&sent);
    assert_eq!(rest.len(), sent.len() / 2);
    assert_eq!((endpoint.consume(&rest).len(), endpoint.fault()), (0, None));
}

/// Segments that end a message are not counted here, because messages have limits of their own.
#[test]
fn segments_that_carry_nothing_are_a_violation_beyond_a_limit_per_second() {
    let unfinished_send = fpdu(SEND, false, untagged(0, 1, 0), b"");
    let write = fpdu(RdmapOpcode::Write, true, tagged(7, 7), b"");
    for segment in [unfinished_send, write] {
        let mut endpoint = Endpoint::new(default_params(), 2);
        endpoint.post_receives(1);
        for _ in 0..MAX_EMPTY_SEGMENTS {
            endpoint.consume(&segment);
        }
        assert!(endpoint.failure.is_none());
        endpoint.consume(&segment);
        assert_eq!(endpoint.fault(), Some(TerminateFault::OperationUnspecified));
        let failure = endpoint.failure.expect("the limit is exceeded");
        assert!(failure.reason.ends_with("more than 1024 segments without payload in a second"), "{}", failure.reason);
        assert_eq!(endpoint.shared.stats.peer_violations, 1);
    }
    let mut endpoint = Endpoint::new(default_params(), 2);
    for msn in 1..=2 * MAX_EMPTY_SEGMENTS {
        endpoint.done.clear();
        endpoint.post_receives(1);
        endpoint.consume(&fpdu(SEND, true, untagged(0, msn, 0), b""));
    }
    assert!(endpoint.failure.is_none(), "these messages have no payload, but are complete");
}

#[test]
fn empty_segments_are_counted_for_each_second() {
    let (mut segments, mut now) = (EmptySegments::default(), Instant::now());
    for _ in 0..10 {
        assert!((0..MAX_EMPTY_SEGMENTS).all(|_| segments.count(|| now)));
        now += Duration::from_secs(1);
    }
    let mut later = EmptySegments::default();
    assert!((0..MAX_EMPTY_SEGMENTS).all(|_| later.count(|| now)));
    assert!(!later.count(|| now + Duration::from_millis(999)));
}

/// An empty Read Request gets a response for any STag (RFC 5040 §5.2.1).
#[test]
fn an_empty_read_request_may_have_any_stag() {
    let mut endpoint = Endpoint::new(default_params(), 0);
    let request =
        ReadRequest { sink_stag: 0x1234, sink_offset: 99, len: 0, source_stag: 0x5678, source_offset: u64::MAX };
    endpoint.consume(&fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &request.encode()));
    assert_eq!(endpoint.take_output(), fpdu(RdmapOpcode::ReadResponse, true, tagged(0x1234, 99), b""));
    assert_eq!(endpoint.fault(), None);
}

/// STag and tagged offset of an empty segment are not checked (RFC 5041 §5.2).
#[test]
fn an_empty_read_response_may_have_any_stag() {
    let mut endpoint = Endpoint::new(default_params(), 0);
    let (dst, request) = post_read(&mut endpoint, 0);
    assert_eq!(request.len, 0);
    endpoint.consume(&read_response(!request.sink_stag, 77, true, 0));
    assert_eq!(endpoint.fault(), None, "{:?}", endpoint.failure);
    assert_eq!(endpoint.done.pop().map(|done| done.status), Some(Status::Success));
    assert_eq!(contents(&dst), vec![0; 100]);
    // An empty response to a Read of 80 bytes is too short.
    let mut endpoint = Endpoint::new(default_params(), 0);
    let (_dst, request) = post_read(&mut endpoint, 80);
    endpoint.consume(&read_response(!request.sink_stag, 77, true, 0));
    assert_eq!(endpoint.fault(), Some(TerminateFault::TaggedBounds));
}

#[test]
fn a_read_response_must_match_its_request() {
    for (what, stag, offset, last, len, expected) in [
        ("another STag", 1, 0, true, 80, TerminateFault::TaggedInvalidStag),
        ("too long", 0, 0, true, 81, TerminateFault::TaggedBounds),
        ("too short", 0, 0, true, 79, TerminateFault::TaggedBounds),
        ("not the last", 0, 0, false, 80, TerminateFault::TaggedBounds),
        ("a gap", 0, 8, false, 8, TerminateFault::TaggedBounds),
    ] {
        let mut endpoint = Endpoint::new(default_params(), 0);
        let (dst, request) = post_read(&mut endpoint, 80);
        assert_eq!((request.len, request.source_stag), (80, 5));
        endpoint.consume(&read_response(request.sink_stag + stag, request.sink_offset + offset, last, len));
        assert_eq!(endpoint.fault(), Some(expected), "{what}");
        assert_eq!(contents(&dst), vec![0; 100], "{what}");
    }
    // A Write to the sink STag of a Read is refused, because the STag is valid only for the response.
    let mut endpoint = Endpoint::new(default_params(), 0);
    let (dst, request) = post_read(&mut endpoint, 80);
    endpoint.consume(&read_response(request.sink_stag, 0, false, 40));
    endpoint.consume(&fpdu(RdmapOpcode::Write, true, tagged(request.sink_stag, 40), &[9; 40]));
    assert_eq!(endpoint.fault(), Some(TerminateFault::TaggedInvalidStag));
    let mut expected = vec![0; 100];
    expected[10..50].fill(7);
    assert_eq!(contents(&dst), expected);
    let mut endpoint = Endpoint::new(default_params(), 0);
    let (_dst, request) = post_read(&mut endpoint, 80);
    endpoint.consume(&read_response(request.sink_stag, 0, false, 40));
    endpoint.consume(&read_response(request.sink_stag, 0, false, 40));
    assert_eq!(endpoint.fault(), Some(TerminateFault::TaggedBounds));
}

#[test]
fn reads_wait_for_the_read_depth_and_fenced_sends_for_reads() {
    let (mut a, mut b) = (Endpoint::new(default_params(), 0), Endpoint::new(default_params(), 0));
    b.post_receives(1);
    let place = b.lend_bytes(&[3; 100]);
    let (_, remote) = b.expose(&place, Access::REMOTE_READ);
    let dst = a.lend_bytes(&[0; 100]);
    for n in 0..3 {
        a.post(n, WorkRequest::Read { dst: dst.clone(), offset: 0, len: 100, remote });
    }
    a.send(3, b"behind all of them", None, true);
    // The read depth is two.
    let two = fpdu_len(18 + 28) * 2;
    let output = a.take_output();
    assert_eq!(output.len(), two);
    b.consume(&output);
    assert!(b.take_completion(Opcode::Recv).is_none());
    let responses = b.take_output();
    a.consume(&responses);
    assert_eq!(a.done.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1]);
    let output = a.take_output();
    b.consume(&output);
    assert!(b.take_completion(Opcode::Recv).is_none(), "the Send must not overtake the third Read");
    exchange(&mut a, &mut b, &[100]);
    assert!(b.take_completion(Opcode::Recv).is_some());
    assert_eq!(a.done.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn a_responder_sends_nothing_before_the_first_fpdu() {
    let (mut a, mut b) =
        (Endpoint::new(default_params(), 0), Endpoint::new(StreamParams { is_responder: true, ..default_params() }, 0));
    a.post_receives(1);
    b.send(1, b"early", None, false);
    assert!(b.take_output().is_empty());
    a.stream.outbound.send_empty_write();
    exchange(&mut a, &mut b, &[3]);
    assert!(a.take_completion(Opcode::Recv).is_some() && b.done.len() == 1);
}

#[test]
fn exposed_memory_is_revoked_only_after_its_read_response_is_sent() {
    let mut b = Endpoint::new(default_params(), 0);
    b.post_receives(1);
    let place = b.lend_bytes(&[3; 5000]);
    let (window, remote) = b.expose(&place, Access::REMOTE_READ);
    let request = ReadRequest {
        sink_stag: 1,
        sink_offset: 0,
        len: 5000,
        source_stag: remote.rkey,
        source_offset: remote.address,
    };
    b.consume(&fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 1, 0), &request.encode()));
    b.stream.produce().expect("an answer");
    assert!(b.stream.outbound.buffer.len() > 0);
    b.post(9, WorkRequest::LocalInvalidate { window });
    b.stream.produce().expect("nothing new");
    b.stream.reap(&mut b.done);
    assert!(b.take_completion(Opcode::LocalInvalidate).is_none(), "the response is not yet sent");
    b.take_output();
    assert!(b.take_completion(Opcode::LocalInvalidate).is_some());
    assert!(place.reclaim().is_ok());
    // A peer must not invalidate memory during its own Read.
    let place = b.lend_bytes(&[3; 5000]);
    let (_, remote) = b.expose(&place, Access::REMOTE_READ);
    let request = ReadRequest { source_stag: remote.rkey, source_offset: remote.address, ..request };
    b.consume(&fpdu(RdmapOpcode::ReadRequest, true, untagged(1, 2, 0), &request.encode()));
    b.stream.produce().expect("an answer");
    let opcode = RdmapOpcode::Send { invalidate: Some(remote.rkey), solicited: false };
    b.consume(&fpdu(opcode, true, untagged(0, 1, 0), b"gone"));
    assert_eq!(b.fault(), Some(TerminateFault::CannotInvalidate));
}

#[test]
fn segments_of_a_message_are_contiguous() {
    let mut endpoint = Endpoint::new(default_params(), 0);
    // The Writes have more bytes than are encoded in advance.
    for wr_id in 0..8 {
        let buf = endpoint.pool.alloc(64 << 10).expect("a buffer");
        let (src, remote) = (Source::Frozen(buf.freeze()), RemoteMemory { rkey: 7, address: 0 });
        endpoint.post(wr_id, WorkRequest::Write { src, offset: 0, len: 64 << 10, remote });
    }
    endpoint.stream.produce().expect("output");
    endpoint.stream.outbound.send_empty_write();
    assert!(!has_empty_write(&endpoint.take_output()), "no empty Write interrupts a Write");
    endpoint.stream.outbound.send_empty_write();
    assert!(has_empty_write(&endpoint.take_output()), "an empty Write follows a complete message");
    endpoint.stream.outbound.send_terminate(&Terminate::new(TerminateFault::LocalCatastrophic, None, None));
    endpoint.take_output();
    endpoint.stream.outbound.send_empty_write();
    assert!(endpoint.take_output().is_empty(), "nothing follows a Terminate");
}

/// Whether these FPDUs include an empty Write.
fn has_empty_write(mut bytes: &[u8]) -> bool {
    let mut reader = SegmentReader::new(false);
    let mut found = false;
    while let Some(step) = reader.step(&mut bytes).expect("FPDUs") {
        found |= matches!(
            step,
            ReaderStep::Segment { segment: SegmentHeader { place: PayloadPlace::Tagged { stag: 0, .. }, .. }, .. }
        );
    }
    found
}

#[test]
fn a_message_waits_for_a_receive_up_to_rnr_retry() {
    let waiting = |retries| {
        let mut endpoint = Endpoint::new(default_params(), retries);
        let rest = endpoint.consume(&[fpdu(SEND, true, untagged(0, 1, 0), b"one"), vec![0, 1]].concat());
        assert!(endpoint.failure.is_none() && endpoint.stream.waits_for_receive());
        (endpoint, rest)
    };
    let (mut endpoint, rest) = waiting(7);
    (0..100_000).for_each(|_| drop(endpoint.consume(&[])));
    endpoint.post_receives(1);
    assert!(endpoint.consume(&rest).is_empty());
    assert_eq!(endpoint.take_completion(Opcode::Recv).expect("a message").buf.as_deref(), Some(&b"one"[..]));
    assert_eq!(endpoint.shared.stats.receiver_not_ready, 1);
    let (mut endpoint, _) = waiting(1);
    for _ in 0..5000 {
        endpoint.consume(&[]);
    }
    assert_eq!(endpoint.fault(), Some(TerminateFault::NoBuffer));
}

#[test]
fn a_message_too_long_in_later_segments_fails_its_receive() {
    let (mut a, mut b) = (Endpoint::new(default_params(), 0), Endpoint::new(default_params(), 0));
    b.post_receives(2);
    a.send(1, &[7; RECEIVE + 1], None, false);
    let output = a.take_output();
    b.consume(&output);
    assert_eq!(b.fault(), Some(TerminateFault::TooLong));
    let ended = b.take_completion(Opcode::Recv).expect("the partly filled Receive");
    assert_eq!((ended.status, ended.buf.as_deref()), (Status::LocalLength, Some(&[][..])));
    b.stream.flush(Status::Flushed, &mut b.done);
    assert!(b.take_completion(Opcode::Recv).is_none(), "no other Receive was used");
}

#[test]
fn a_terminate_sets_the_status_of_the_oldest_request() {
    for (control, status, cause) in [
        ([0x11, 0x00, 0, 0], Status::RemoteAccess, Disconnect::Refused),
        ([0x12, 0x02, 0, 0], Status::RnrRetryExceeded, Disconnect::Failure),
        ([0x20, 0x02, 0, 0], Status::RemoteOperation, Disconnect::Failure),
    ] {
        let mut endpoint = Endpoint::new(default_params(), 0);
        let dst = endpoint.lend_bytes(&[0; 8]);
        endpoint.post(4, WorkRequest::Read { dst, offset: 0, len: 8, remote: RemoteMemory { rkey: 1, address: 0 } });
        endpoint.take_output();
        endpoint.consume(&fpdu(RdmapOpcode::Terminate, true, untagged(2, 1, 0), &control));
        let failure = endpoint.failure.take().expect("the end");
        assert!(failure.terminate.is_none());
        assert_eq!((failure.status, failure.cause), (status, cause));
        endpoint.stream.flush(failure.status, &mut endpoint.done);
        assert_eq!(endpoint.done.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(), [(4, status)]);
    }
}
