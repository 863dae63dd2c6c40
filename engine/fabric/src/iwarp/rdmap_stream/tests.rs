//! Pairs of streams, and streams with a hostile peer, without a socket.

use std::ops::Range;

use proptest::prelude::*;
use rpcrdma_mempool::{ArenaConfig, Class, Lent, PagePolicy, Pool, PoolConfig};

use super::*;
use crate::iwarp::wire::{Opcode as Message, Place, ReadRequest, Segment, fpdu_len};
use crate::{Access, Opcode, Posting, RemoteMemory, Source, WindowId, WorkRequest};

const RECEIVE: usize = 4096;

/// One end of a connection, with its memory.
struct Side {
    stream: RdmapStream,
    shared: SharedResources,
    pool: Pool,
    done: Vec<Completion>,
    /// Reason of its end.
    failure: Option<Failure>,
}

/// Parameters of [`RdmapStream::begin`].
#[derive(Clone, Copy)]
struct Terms {
    crc: bool,
    waits: bool,
    max_ulpdu: usize,
}

fn terms() -> Terms {
    Terms { crc: false, waits: false, max_ulpdu: 1000 }
}

impl Side {
    fn new(terms: Terms, rnr_retry: u8) -> Self {
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let classes = vec![Class { size: RECEIVE, count: 128 }, Class { size: 64 << 10, count: 16 }];
        let pool = Pool::new(&PoolConfig { classes, arena }).expect("memory");
        let mut arenas = Arenas::default();
        arenas.add(pool.arena().id(), Access::REMOTE, || Ok(())).expect("it is new");
        let shared = SharedResources { arenas, receives: Receives::new(64), stats: FabricStats::default() };
        let params = ConnectParams { send_queue_depth: 64, windows: 8, rnr_retry, ..ConnectParams::default() };
        let id = QpId { slot: 3, generation: 1 };
        let mut stream = RdmapStream::new(id, &params, 0xabcd_ef01);
        let agreed = Negotiated { crc: terms.crc, ord: 2, ird: 2, rtr: false, is_ours: true };
        stream.begin(&agreed, terms.waits, terms.max_ulpdu, 64 << 10);
        Self { stream, shared, pool, done: Vec::new(), failure: None }
    }

    fn receives(&mut self, n: usize) {
        let bufs: Vec<_> = (0..n).map(|_| self.pool.alloc(RECEIVE).expect("a buffer")).collect();
        self.shared.receives.post(bufs.into_iter());
    }

    fn lent(&self, bytes: &[u8]) -> Lent {
        let mut buf = self.pool.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        buf.lend().expect("a buffer of this thread")
    }

    fn post(&mut self, wr_id: u64, wr: WorkRequest) {
        let mut chain = vec![Posting { wr_id, signalled: true, wr }];
        self.stream.post(&mut self.shared, &mut chain).expect("it is posted");
        assert!(chain.is_empty());
    }

    fn send(&mut self, wr_id: u64, bytes: &[u8], invalidate: Option<u32>, fence: bool) {
        let mut buf = self.pool.alloc(bytes.len()).expect("a buffer");
        buf.copy_from_slice(bytes);
        self.post(wr_id, WorkRequest::Send { buf, invalidate, fence });
    }

    /// Exposes memory; window and the peer's view.
    fn expose(&mut self, mem: &Lent, access: Access) -> (WindowId, RemoteMemory) {
        self.expose_part(mem, 0..mem.len(), access)
    }

    fn expose_part(&mut self, mem: &Lent, part: Range<usize>, access: Access) -> (WindowId, RemoteMemory) {
        let window = self.stream.windows.alloc(self.stream.id).expect("a window");
        let rkey = self.stream.windows.next(window.index).expect("a key");
        let (offset, len) = (part.start, part.len());
        let remote = RemoteMemory { rkey, address: (mem.offset() + offset) as u64 };
        self.post(0xb1d, WorkRequest::Bind { window, mem: mem.clone(), offset, len, access });
        self.say();
        (window, remote)
    }

    /// Its pending bytes, which count as sent.
    fn say(&mut self) -> Vec<u8> {
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

    /// Consumes bytes of the peer; returns the waiting rest.
    fn hear(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        if self.failure.is_none() {
            match self.stream.consume(&mut self.shared, &mut bytes, &mut self.done, usize::MAX) {
                Ok(_) => {}
                Err(failure) => self.failure = Some(failure),
            }
            self.stream.reap(&mut self.done);
        }
        bytes.to_vec()
    }

    /// The reason of the Terminate that it wants to send.
    fn fault(&self) -> Option<Fault> {
        self.failure.as_ref()?.terminate.as_ref()?.fault()
    }

    fn take(&mut self, opcode: Opcode) -> Option<Completion> {
        let at = self.done.iter().position(|c| c.opcode == opcode)?;
        Some(self.done.remove(at))
    }
}

fn contents(lent: &Lent) -> Vec<u8> {
    let mut to = vec![0; lent.len()];
    assert!(lent.read_at(0, &mut to));
    to
}

/// Exchanges bytes until neither side has more. Pieces have these lengths, repeated.
fn talk(a: &mut Side, b: &mut Side, cuts: &[usize]) {
    let mut cuts = cuts.iter().cycle().copied();
    loop {
        let (from_a, from_b) = (a.say(), b.say());
        if from_a.is_empty() && from_b.is_empty() {
            return;
        }
        for (bytes, to) in [(from_a, &mut *b), (from_b, &mut *a)] {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (piece, more) = rest.split_at(cuts.next().unwrap_or(1).clamp(1, rest.len()));
                assert!(to.hear(piece).is_empty() || to.failure.is_some());
                rest = more;
            }
        }
    }
}

/// One FPDU, without a CRC.
fn fpdu(opcode: Message, last: bool, place: Place, payload: &[u8]) -> Vec<u8> {
    let header = Segment { opcode, last, place }.encode(payload.len());
    let mut bytes = [&header[..], payload].concat();
    bytes.resize(fpdu_len(header.len() - 2 + payload.len()), 0);
    bytes
}

/// A Read Request for no bytes.
fn ask_at(place: Place, last: bool) -> Vec<u8> {
    fpdu(Message::ReadRequest, last, place, &[0; 28])
}

const SEND: Message = Message::Send { invalidate: None, solicited: false };

fn untagged(queue: u32, msn: u32, offset: u32) -> Place {
    Place::Untagged { queue, msn, offset }
}

fn tagged(stag: u32, offset: u64) -> Place {
    Place::Tagged { stag, offset }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Posted requests arrive whole and in order, and complete in order, for any cuts of the stream.
    #[test]
    fn everything_arrives_at_any_cut(
        sizes in prop::collection::vec(0usize..4000, 1..20),
        cuts in prop::collection::vec(1usize..3000, 1..6),
        crc in any::<bool>(),
        max_ulpdu in 200usize..5000,
    ) {
        let terms = Terms { crc, max_ulpdu, ..terms() };
        let (mut a, mut b) = (Side::new(terms, 0), Side::new(Terms { waits: true, ..terms }, 0));
        b.receives(sizes.len());
        a.stream.outbound.send_empty_write();
        talk(&mut a, &mut b, &cuts);
        let pattern = |n: usize, len: usize| (0..len).map(|i| (i * 7 + n) as u8).collect::<Vec<_>>();
        let place = b.lent(&vec![0; 60_000]);
        let (_, remote) = b.expose(&place, Access::REMOTE);
        let mut landed = Vec::new();
        let mut at = 0;
        for (n, &size) in sizes.iter().enumerate() {
            let bytes = pattern(n, size);
            match n % 3 {
                0 => a.send(n as u64, &bytes, None, n % 2 == 0),
                1 => {
                    let src = Source::Lent(a.lent(&bytes));
                    let remote = RemoteMemory { address: remote.address + at as u64, ..remote };
                    a.post(n as u64, WorkRequest::Write { src, offset: 0, len: size, remote });
                    landed.push((n, at, size));
                    at += size;
                }
                _ => {
                    // The bytes of the Write before it.
                    let (source, from, len) = landed[landed.len() - 1];
                    let dst = a.lent(&vec![0; len]);
                    let remote = RemoteMemory { address: remote.address + from as u64, ..remote };
                    a.post(n as u64, WorkRequest::Read { dst: dst.clone(), offset: 0, len, remote });
                    talk(&mut a, &mut b, &cuts);
                    prop_assert_eq!(contents(&dst), pattern(source, len));
                }
            }
        }
        talk(&mut a, &mut b, &cuts);
        prop_assert!(a.failure.is_none() && b.failure.is_none(), "{:?} {:?}", a.failure, b.failure);
        let done: Vec<_> = a.done.iter().map(|c| (c.wr_id, c.status)).collect();
        let wanted: Vec<_> = (0..sizes.len() as u64).map(|n| (n, Status::Success)).collect();
        prop_assert_eq!(done, wanted);
        for (n, &size) in sizes.iter().enumerate().filter(|(n, _)| n % 3 == 0) {
            let got = b.take(Opcode::Recv).expect("a message");
            prop_assert_eq!(got.buf.as_deref(), Some(&pattern(n, size)[..]));
        }
        let all = contents(&place);
        for (n, at, size) in landed {
            prop_assert_eq!(&all[at..at + size], &pattern(n, size)[..]);
        }
    }

    /// Any input of a peer with a valid key: only bytes in its window change, and of these only those that a valid
    /// Write names.
    #[test]
    fn any_bytes_change_nothing_else(
        payload in prop::collection::vec(any::<u8>(), 1..300),
        at in -400i64..1400,
        opcode in prop_oneof![Just(0u8), 0u8..16],
        spoilt in prop::option::of((any::<prop::sample::Index>(), 1u8..)),
        more in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        const SHOWN: Range<usize> = 1000..2000;
        let mut side = Side::new(terms(), 0);
        side.receives(2);
        let memory = side.lent(&[7; 4000]);
        let (_, remote) = side.expose_part(&memory, SHOWN, Access::REMOTE_WRITE);
        let mut bytes = match opcode {
            0 | 2 => fpdu(Message::Write, true, tagged(remote.rkey, remote.address.wrapping_add_signed(at)), &payload),
            1 => fpdu(SEND, true, untagged(1, 1, 0), &payload[..payload.len().min(28)]),
            _ => fpdu(SEND, true, untagged(0, 1, 0), &payload),
        };
        bytes[3] = bytes[3] & 0xF0 | opcode;
        if let Some((which, bits)) = &spoilt {
            let at = which.index(bytes.len());
            bytes[at] ^= bits;
        }
        bytes.extend(&more);
        side.hear(&bytes);
        let now = contents(&memory);
        prop_assert!(now[..SHOWN.start].iter().chain(&now[SHOWN.end..]).all(|&byte| byte == 7));
        if spoilt.is_none() {
            let inside = at >= 0 && at as usize + payload.len() <= SHOWN.len();
            let mut wanted = vec![7; SHOWN.len()];
            if inside && opcode == 0 {
                wanted[at as usize..][..payload.len()].copy_from_slice(&payload);
            }
            prop_assert_eq!(&now[SHOWN], &wanted);
        }
    }
}

/// Attempts of a peer, and the answers.
#[test]
fn violations_are_reported_by_name() {
    let request = |len, source_stag, source_offset| {
        ReadRequest { sink_stag: 1, sink_offset: 0, len, source_stag, source_offset }.encode()
    };
    type Attack = Box<dyn Fn(RemoteMemory, RemoteMemory) -> Vec<u8>>;
    let write = |by: fn(RemoteMemory) -> (u32, u64), len: usize| -> Attack {
        Box::new(move |readable_not, _| {
            let (stag, offset) = by(readable_not);
            fpdu(Message::Write, true, tagged(stag, offset), &vec![9; len])
        })
    };
    let attacks: Vec<(&str, Attack, Fault)> = vec![
        ("a Write past the end", write(|w| (w.rkey, w.address + 1), 1000), Fault::TaggedBounds),
        ("a Write before the start", write(|w| (w.rkey, w.address.wrapping_sub(1)), 4), Fault::TaggedBounds),
        ("a Write that wraps", write(|w| (w.rkey, u64::MAX - 3), 8), Fault::TaggedOffsetWrap),
        ("a Write to a key to come", write(|w| (w.rkey + 1, w.address), 4), Fault::TaggedInvalidStag),
        ("a Write to no key", write(|w| (w.rkey ^ 0x5000_0000, w.address), 4), Fault::TaggedInvalidStag),
        (
            "a Write without the right",
            Box::new(|_, readable| fpdu(Message::Write, true, tagged(readable.rkey, readable.address), &[9; 4])),
            Fault::AccessRights,
        ),
        (
            "a Read without the right",
            Box::new(move |writable, _| {
                let ask = request(4, writable.rkey, writable.address);
                fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &ask)
            }),
            Fault::AccessRights,
        ),
        (
            "a Read past the end",
            Box::new(move |_, readable| {
                let ask = request(1001, readable.rkey, readable.address);
                fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &ask)
            }),
            Fault::Bounds,
        ),
        (
            "a Read of no key",
            Box::new(move |_, readable| {
                let ask = request(1, readable.rkey + 1, readable.address);
                fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &ask)
            }),
            Fault::InvalidStag,
        ),
        (
            "three Reads where two are taken",
            Box::new(move |_, readable| {
                let ask = request(1, readable.rkey, readable.address);
                let all = (1..4).map(|msn| fpdu(Message::ReadRequest, true, untagged(1, msn, 0), &ask));
                all.collect::<Vec<_>>().concat()
            }),
            Fault::NoBuffer,
        ),
        (
            "a short Read Request",
            Box::new(|_, _| fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &[0; 27])),
            Fault::OperationUnspecified,
        ),
        (
            "a long Read Request",
            Box::new(|_, _| fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &[0; 29])),
            Fault::TooLong,
        ),
        ("a Read Request out of order", Box::new(|_, _| ask_at(untagged(1, 2, 0), true)), Fault::MsnRange),
        ("a Read Request among the Sends", Box::new(|_, _| ask_at(untagged(0, 1, 0), true)), Fault::InvalidQueue),
        ("a Read Request from its middle on", Box::new(|_, _| ask_at(untagged(1, 1, 4), true)), Fault::InvalidOffset),
        ("a Read Request in two segments", Box::new(|_, _| ask_at(untagged(1, 1, 0), false)), Fault::InvalidOffset),
        (
            "a Terminate longer than any",
            Box::new(|_, _| fpdu(Message::Terminate, true, untagged(2, 1, 0), &[0; 65])),
            Fault::TooLong,
        ),
        (
            "a second Terminate, without a first",
            Box::new(|_, _| fpdu(Message::Terminate, true, untagged(2, 2, 0), &[0; 4])),
            Fault::MsnRange,
        ),
        (
            "an answer that nobody asked for",
            Box::new(|w, _| fpdu(Message::ReadResponse, true, tagged(w.rkey, w.address), &[9; 4])),
            Fault::UnexpectedOpcode,
        ),
        ("a message out of order", Box::new(|_, _| fpdu(SEND, true, untagged(0, 2, 0), b"two")), Fault::MsnRange),
        ("a second half first", Box::new(|_, _| fpdu(SEND, true, untagged(0, 1, 4), b"half")), Fault::InvalidOffset),
        (
            "a gap within a message",
            Box::new(|_, _| {
                let first = fpdu(SEND, false, untagged(0, 1, 0), &[1; 8]);
                [first, fpdu(SEND, true, untagged(0, 1, 12), &[2; 8])].concat()
            }),
            Fault::InvalidOffset,
        ),
        (
            "a message that changes its kind",
            Box::new(|_, _| {
                let first = fpdu(SEND, false, untagged(0, 1, 0), &[1; 8]);
                let solicited = Message::Send { invalidate: None, solicited: true };
                [first, fpdu(solicited, true, untagged(0, 1, 8), &[2; 8])].concat()
            }),
            Fault::UnexpectedOpcode,
        ),
        ("a queue that is none", Box::new(|_, _| fpdu(SEND, true, untagged(3, 1, 0), b"?")), Fault::InvalidQueue),
        (
            "a message longer than its Receive",
            Box::new(|_, _| fpdu(SEND, true, untagged(0, 1, 0), &[1; RECEIVE + 64])),
            Fault::TooLong,
        ),
        (
            "an invalidation of no key",
            Box::new(|w, _| {
                let opcode = Message::Send { invalidate: Some(w.rkey + 1), solicited: false };
                fpdu(opcode, true, untagged(0, 1, 0), b"gone")
            }),
            Fault::CannotInvalidate,
        ),
    ];
    for (what, attack, wanted) in attacks {
        let mut side = Side::new(terms(), 0);
        side.receives(2);
        let (one, two) = (side.lent(&[1; 1000]), side.lent(&[2; 1000]));
        let (_, writable) = side.expose(&one, Access::REMOTE_WRITE);
        let (_, readable) = side.expose(&two, Access::REMOTE_READ);
        side.hear(&attack(writable, readable));
        assert_eq!(side.fault(), Some(wanted), "{what}: {:?}", side.failure);
        assert_eq!((contents(&one), contents(&two)), (vec![1; 1000], vec![2; 1000]), "{what}");
        let stats = side.shared.stats;
        assert_eq!(stats.peer_violations + stats.access_refused, 1, "{what}");
        // Its memory returns: two Receives, and the memory.
        let mut ended = Vec::new();
        side.stream.flush(Status::Flushed, &mut ended);
        drop((ended, side.done, side.stream, side.shared));
        assert!(one.reclaim().is_ok() && two.reclaim().is_ok(), "{what}");
        side.pool.close().expect(what);
    }
}

/// Reads `len` bytes; returns the memory with the request.
fn ask(side: &mut Side, len: usize) -> (Lent, ReadRequest) {
    let dst = side.lent(&[0; 100]);
    let remote = RemoteMemory { rkey: 5, address: 0 };
    side.post(1, WorkRequest::Read { dst: dst.clone(), offset: 10, len, remote });
    let bytes = side.say();
    let mut reader = SegmentReader::new(false);
    let (mut input, mut request) = (&bytes[..], None);
    while let Some(step) = reader.step(&mut input).expect("segments") {
        if let Step::Payload(payload) = step {
            request = Some(ReadRequest::decode(payload.try_into().expect("28 bytes")));
        }
    }
    (dst, request.expect("a request"))
}

fn respond(stag: u32, offset: u64, last: bool, len: usize) -> Vec<u8> {
    fpdu(Message::ReadResponse, last, tagged(stag, offset), &vec![7; len])
}

/// RFC 5041 §4.3: 0 follows the greatest number.
#[test]
fn message_numbers_wrap() {
    let (mut a, mut b) = (Side::new(terms(), 0), Side::new(terms(), 0));
    b.receives(3);
    a.stream.outbound.send_msn = u32::MAX - 1;
    b.stream.placement.send_msn = u32::MAX - 1;
    for n in 0..3 {
        a.send(n, &[n as u8], None, false);
    }
    talk(&mut a, &mut b, &[7]);
    for n in 0..3 {
        assert_eq!(b.take(Opcode::Recv).and_then(|got| got.buf).as_deref(), Some(&[n][..]), "{:?}", b.failure);
    }
    b.hear(&fpdu(SEND, true, untagged(0, 1, 0), b"again"));
    assert_eq!(b.fault(), Some(Fault::MsnRange), "1 has been there");
}

/// RFC 5040 §5.2.1: it is answered, for any key.
#[test]
fn a_request_for_nothing_names_no_memory() {
    let mut side = Side::new(terms(), 0);
    let ask = ReadRequest { sink_stag: 0x1234, sink_offset: 99, len: 0, source_stag: 0x5678, source_offset: u64::MAX };
    side.hear(&fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &ask.encode()));
    assert_eq!(side.say(), fpdu(Message::ReadResponse, true, tagged(0x1234, 99), b""));
    assert_eq!(side.fault(), None);
}

/// RFC 5041 §5.2: neither STag nor TO of an empty segment is looked at.
#[test]
fn an_empty_answer_need_not_name_memory() {
    let mut side = Side::new(terms(), 0);
    let (dst, request) = ask(&mut side, 0);
    assert_eq!(request.len, 0);
    side.hear(&respond(!request.sink_stag, 77, true, 0));
    assert_eq!(side.fault(), None, "{:?}", side.failure);
    assert_eq!(side.done.pop().map(|done| done.status), Some(Status::Success));
    assert_eq!(contents(&dst), vec![0; 100]);
    // As an answer to a Read of some bytes it is too short, for any key.
    let mut side = Side::new(terms(), 0);
    let (_dst, request) = ask(&mut side, 80);
    side.hear(&respond(!request.sink_stag, 77, true, 0));
    assert_eq!(side.fault(), Some(Fault::TaggedBounds));
}

#[test]
fn an_answer_has_to_fit() {
    for (what, stag, offset, last, len, wanted) in [
        ("another name", 1, 0, true, 80, Fault::TaggedInvalidStag),
        ("too long", 0, 0, true, 81, Fault::TaggedBounds),
        ("too short", 0, 0, true, 79, Fault::TaggedBounds),
        ("not the last", 0, 0, false, 80, Fault::TaggedBounds),
        ("a gap", 0, 8, false, 8, Fault::TaggedBounds),
    ] {
        let mut side = Side::new(terms(), 0);
        let (dst, request) = ask(&mut side, 80);
        assert_eq!((request.len, request.source_stag), (80, 5));
        side.hear(&respond(request.sink_stag + stag, request.sink_offset + offset, last, len));
        assert_eq!(side.fault(), Some(wanted), "{what}");
        assert_eq!(contents(&dst), vec![0; 100], "{what}");
    }
    // The same bytes twice, and memory without write access.
    let mut side = Side::new(terms(), 0);
    let (dst, request) = ask(&mut side, 80);
    side.hear(&respond(request.sink_stag, 0, false, 40));
    side.hear(&fpdu(Message::Write, true, tagged(request.sink_stag, 40), &[9; 40]));
    assert_eq!(side.fault(), Some(Fault::TaggedInvalidStag));
    let mut wanted = vec![0; 100];
    wanted[10..50].fill(7);
    assert_eq!(contents(&dst), wanted);
    let mut side = Side::new(terms(), 0);
    let (_dst, request) = ask(&mut side, 80);
    side.hear(&respond(request.sink_stag, 0, false, 40));
    side.hear(&respond(request.sink_stag, 0, false, 40));
    assert_eq!(side.fault(), Some(Fault::TaggedBounds));
}

#[test]
fn reads_wait_for_their_turn_and_sends_for_reads() {
    let (mut a, mut b) = (Side::new(terms(), 0), Side::new(terms(), 0));
    b.receives(1);
    let place = b.lent(&[3; 100]);
    let (_, remote) = b.expose(&place, Access::REMOTE_READ);
    let dst = a.lent(&[0; 100]);
    for n in 0..3 {
        a.post(n, WorkRequest::Read { dst: dst.clone(), offset: 0, len: 100, remote });
    }
    a.send(3, b"behind all of them", None, true);
    // Two may be outstanding.
    let two = fpdu_len(18 + 28) * 2;
    let said = a.say();
    assert_eq!(said.len(), two);
    b.hear(&said);
    assert!(b.take(Opcode::Recv).is_none());
    let answers = b.say();
    a.hear(&answers);
    assert_eq!(a.done.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1]);
    let said = a.say();
    b.hear(&said);
    assert!(b.take(Opcode::Recv).is_none(), "it overtakes the third Read");
    talk(&mut a, &mut b, &[100]);
    assert!(b.take(Opcode::Recv).is_some());
    assert_eq!(a.done.iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn a_responder_is_silent_until_it_is_spoken_to() {
    let (mut a, mut b) = (Side::new(terms(), 0), Side::new(Terms { waits: true, ..terms() }, 0));
    a.receives(1);
    b.send(1, b"may I?", None, false);
    assert!(b.say().is_empty());
    a.stream.outbound.send_empty_write();
    talk(&mut a, &mut b, &[3]);
    assert!(a.take(Opcode::Recv).is_some() && b.done.len() == 1);
}

#[test]
fn memory_that_is_read_comes_home_behind_its_last_byte() {
    let mut b = Side::new(terms(), 0);
    b.receives(1);
    let place = b.lent(&[3; 5000]);
    let (window, remote) = b.expose(&place, Access::REMOTE_READ);
    let ask = ReadRequest {
        sink_stag: 1,
        sink_offset: 0,
        len: 5000,
        source_stag: remote.rkey,
        source_offset: remote.address,
    };
    b.hear(&fpdu(Message::ReadRequest, true, untagged(1, 1, 0), &ask.encode()));
    b.stream.produce().expect("an answer");
    assert!(b.stream.outbound.buffer.len() > 0);
    b.post(9, WorkRequest::LocalInvalidate { window });
    b.stream.produce().expect("nothing new");
    b.stream.reap(&mut b.done);
    assert!(b.take(Opcode::LocalInvalidate).is_none(), "its bytes are not sent");
    b.say();
    assert!(b.take(Opcode::LocalInvalidate).is_some());
    assert!(place.reclaim().is_ok());
    // A peer that revokes memory during its own Read breaks a rule.
    let place = b.lent(&[3; 5000]);
    let (_, remote) = b.expose(&place, Access::REMOTE_READ);
    let ask = ReadRequest { source_stag: remote.rkey, source_offset: remote.address, ..ask };
    b.hear(&fpdu(Message::ReadRequest, true, untagged(1, 2, 0), &ask.encode()));
    b.stream.produce().expect("an answer");
    let opcode = Message::Send { invalidate: Some(remote.rkey), solicited: false };
    b.hear(&fpdu(opcode, true, untagged(0, 1, 0), b"gone"));
    assert_eq!(b.fault(), Some(Fault::CannotInvalidate));
}

#[test]
fn segments_of_a_message_are_contiguous() {
    let mut side = Side::new(terms(), 0);
    // More than is cut ahead of the socket.
    for wr_id in 0..8 {
        let buf = side.pool.alloc(64 << 10).expect("a buffer");
        let (src, remote) = (Source::Frozen(buf.freeze()), RemoteMemory { rkey: 7, address: 0 });
        side.post(wr_id, WorkRequest::Write { src, offset: 0, len: 64 << 10, remote });
    }
    side.stream.produce().expect("all is well");
    side.stream.outbound.send_empty_write();
    assert!(!of_nothing(&side.say()), "in the middle of a Write");
    side.stream.outbound.send_empty_write();
    assert!(of_nothing(&side.say()), "between messages");
    side.stream.outbound.terminate(&Terminate::new(Fault::LocalCatastrophic, None, None));
    side.say();
    side.stream.outbound.send_empty_write();
    assert!(side.say().is_empty(), "behind a Terminate");
}

/// Whether a Write of nothing is among these FPDUs.
fn of_nothing(mut bytes: &[u8]) -> bool {
    let mut reader = SegmentReader::new(false);
    let mut found = false;
    while let Some(step) = reader.step(&mut bytes).expect("FPDUs") {
        found |= matches!(step, Step::Segment { segment: Segment { place: Place::Tagged { stag: 0, .. }, .. }, .. });
    }
    found
}

#[test]
fn a_message_waits_for_a_receive_as_often_as_it_may() {
    let patient = |retries| {
        let mut side = Side::new(terms(), retries);
        let rest = side.hear(&[fpdu(SEND, true, untagged(0, 1, 0), b"one"), vec![0, 1]].concat());
        assert!(side.failure.is_none() && side.stream.waits_for_receive());
        (side, rest)
    };
    let (mut side, rest) = patient(7);
    (0..100_000).for_each(|_| drop(side.hear(&[])));
    side.receives(1);
    assert!(side.hear(&rest).is_empty());
    assert_eq!(side.take(Opcode::Recv).expect("a message").buf.as_deref(), Some(&b"one"[..]));
    assert_eq!(side.shared.stats.receiver_not_ready, 1);
    let (mut side, _) = patient(1);
    for _ in 0..5000 {
        side.hear(&[]);
    }
    assert_eq!(side.fault(), Some(Fault::NoBuffer));
}

#[test]
fn a_message_that_its_later_segments_make_too_long_ends_its_receive_so() {
    let (mut a, mut b) = (Side::new(terms(), 0), Side::new(terms(), 0));
    b.receives(2);
    a.send(1, &[7; RECEIVE + 1], None, false);
    let said = a.say();
    b.hear(&said);
    assert_eq!(b.fault(), Some(Fault::TooLong));
    let ended = b.take(Opcode::Recv).expect("the Receive that it has begun to fill");
    assert_eq!((ended.status, ended.buf.as_deref()), (Status::LocalLength, Some(&[][..])));
    b.stream.flush(Status::Flushed, &mut b.done);
    assert!(b.take(Opcode::Recv).is_none(), "no other Receive was taken");
}

#[test]
fn a_terminate_ends_requests_by_its_error() {
    for (control, status, cause) in [
        ([0x11, 0x00, 0, 0], Status::RemoteAccess, Disconnect::Refused),
        ([0x12, 0x02, 0, 0], Status::RnrRetryExceeded, Disconnect::Failure),
        ([0x20, 0x02, 0, 0], Status::RemoteOperation, Disconnect::Failure),
    ] {
        let mut side = Side::new(terms(), 0);
        let dst = side.lent(&[0; 8]);
        side.post(4, WorkRequest::Read { dst, offset: 0, len: 8, remote: RemoteMemory { rkey: 1, address: 0 } });
        side.say();
        side.hear(&fpdu(Message::Terminate, true, untagged(2, 1, 0), &control));
        let failure = side.failure.take().expect("the end");
        assert!(failure.terminate.is_none());
        assert_eq!((failure.status, failure.cause), (status, cause));
        side.stream.flush(failure.status, &mut side.done);
        assert_eq!(side.done.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(), [(4, status)]);
    }
}
