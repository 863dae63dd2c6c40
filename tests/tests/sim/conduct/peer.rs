//! A client of version 1 on a connection of iWARP, made of nothing but the wire formats: what it says is right, and its
//! [`Conduct`] says when.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rpcrdma::fabric::FabricAddress;
use rpcrdma::fabric::iwarp::memory::BareEnd;
use rpcrdma::fabric::iwarp::wire::{
    Enhanced, Kind, Opcode, Place, QUEUE_SEND, ReadRequest, Reader, Segment as Ddp, Setup, Step, fpdu_len,
};
use rpcrdma::wire::{Body, Chunks, Flags, Header, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList};
use rpcrdma_tests::{ECHO, LOAD, PROGRAM, Random, STORE, VERSION, call_bytes, pattern, patterned};

use super::grammar::Conduct;
use super::{CHUNK, PROGRESS};

/// Bytes of payload in a segment, as on a path with Ethernet's MTU.
const PART: usize = 1400;
/// Bytes of an RPC call header without credential (RFC 5531 §9).
const CALL_HEADER: u32 = 40;
/// Calls that one has under way.
const DEPTH: usize = 8;

/// RDMA Reads that it takes at a time.
const READS: u16 = 16;

/// A call that is under way.
#[derive(Debug)]
struct Call {
    procedure: u32,
    seed: u32,
    len: usize,
    began: Duration,
    /// What was written for it.
    written: Vec<u8>,
    /// What its RDMA Read is answered with.
    data: Vec<u8>,
}

/// What happens to one that the others may ask about.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fate {
    /// Calls that were answered.
    pub(super) answered: u64,
    /// The longest that one took.
    pub(super) slowest: Duration,
    /// Connections that the server has ended.
    pub(super) ended: u64,
    /// Connections that were made.
    pub(super) connections: u64,
}

/// See the page of this module.
pub(super) struct Peer {
    pub(super) conduct: Conduct,
    pub(super) fate: Fate,
    host: String,
    /// What its data begins with: no other's does.
    mark: u32,
    depth: usize,
    random: Random,
    next: u32,
    line: Option<Line>,
    /// When it connects again.
    again: Duration,
}

/// One connection.
struct Line {
    end: BareEnd,
    began: Duration,
    up: bool,
    reader: Reader,
    segment: Option<Ddp>,
    /// Payload of the segment that is coming.
    payload: Vec<u8>,
    /// Of the message that is coming.
    message: Vec<u8>,
    out: VecDeque<u8>,
    msn: u32,
    calls: BTreeMap<u32, Call>,
    /// Calls that it may have under way (RFC 8166 §3.3.1): one, until the server has said more.
    credits: usize,
    /// Bytes that may come and go.
    may: [f64; 2],
    /// When the last RDMA Write of no bytes went out.
    nudged: Duration,
    /// Since when it has owed the answer to an RDMA Read.
    owes: Option<Duration>,
    /// Nothing more goes out.
    mute: bool,
}

/// One FPDU, without a CRC.
fn fpdu(out: &mut VecDeque<u8>, segment: Ddp, payload: &[u8]) {
    let header = segment.encode(payload.len());
    out.extend(header.iter().chain(payload));
    let ulpdu = header.len() - 2 + payload.len();
    out.extend(std::iter::repeat_n(0, fpdu_len(ulpdu) - 2 - ulpdu));
}

impl Peer {
    pub(super) fn new(conduct: Conduct, mark: u32, host: usize, depth: Option<usize>, seed: u64) -> Self {
        let host = format!("192.0.2.{host}:{}", 1000 + mark);
        let random = Random::new(seed ^ u64::from(mark) << 32);
        let (fate, depth) = (Fate::default(), depth.unwrap_or(DEPTH));
        Self { conduct, fate, host, mark, depth, random, next: 1, line: None, again: Duration::ZERO }
    }

    /// Calls that are under way.
    pub(super) fn under_way(&self) -> usize {
        self.line.as_ref().map_or(0, |line| line.calls.len())
    }

    /// How long its oldest call has waited.
    pub(super) fn waits(&self, now: Duration) -> Duration {
        let calls = self.line.iter().flat_map(|line| line.calls.values());
        calls.map(|call| now - call.began).max().unwrap_or_default()
    }

    /// Leaves without a word.
    pub(super) fn leave(&mut self) {
        self.line = None;
    }

    /// What it does at this time, so long after the last; `busy`: it begins calls.
    pub(super) fn turn(&mut self, address: &FabricAddress, now: Duration, passed: Duration, busy: bool) {
        if self.line.is_none() && busy && now >= self.again {
            self.connect(address, now);
        }
        let Some(line) = &mut self.line else { return };
        if matches!(self.conduct, Conduct::ComesAndGoes(each) if now >= line.began + each) {
            self.again = now + Duration::from_millis(self.random.below(500) as u64);
            return self.leave();
        }
        // What does not move now may not move all the faster later.
        let more = self.conduct.bytes_in(passed);
        line.may = line.may.map(|may| (may + more).min(more.max(1.0) * 2.0));
        if !line.up {
            match line.end.reply() {
                Some(reply) if !reply.reject => line.up = true,
                Some(_) => return self.lost(now),
                None if line.end.is_over() => return self.lost(now),
                None => return,
            }
        }
        self.receive(now);
        if self.line.as_ref().is_some_and(|line| line.end.is_over()) {
            return self.lost(now);
        }
        self.begin_calls(now, busy);
        self.send(now);
        self.check_owed(now);
    }

    fn connect(&mut self, address: &FabricAddress, now: Duration) {
        let request = Setup {
            kind: Kind::Request,
            revision: 2,
            markers: false,
            crc: false,
            reject: false,
            enhanced: Some(Enhanced {
                ird: READS,
                ord: READS,
                peer_to_peer: false,
                rtr_send: false,
                rtr_write: false,
                rtr_read: false,
            }),
            private_data: Vec::new(),
        };
        let end = BareEnd::connect(address, &self.host, request).expect("the server listens");
        self.fate.connections += 1;
        self.line = Some(Line {
            end,
            began: now,
            up: false,
            reader: Reader::new(false),
            segment: None,
            payload: Vec::new(),
            message: Vec::new(),
            out: VecDeque::new(),
            msn: 1,
            calls: BTreeMap::new(),
            credits: 1,
            may: [0.0; 2],
            nudged: now,
            owes: None,
            mute: false,
        });
    }

    /// The server has ended the connection.
    fn lost(&mut self, now: Duration) {
        assert!(!self.conduct.is_honest(), "{}, {:?}, was ended", self.host, self.conduct);
        self.fate.ended += 1;
        self.again = now + Duration::from_millis(self.random.below(1500) as u64);
        self.line = None;
    }

    /// Takes what has come.
    fn receive(&mut self, now: Duration) {
        let Some(line) = &mut self.line else { return };
        let stopped = matches!(self.conduct, Conduct::Stops(at) if now >= line.began + at);
        let deaf = self.conduct == Conduct::TakesNothing && self.fate.answered > 3;
        if stopped || deaf {
            return;
        }
        let bytes = line.end.receive(line.may[0] as usize);
        line.may[0] -= bytes.len() as f64;
        let mut input = &bytes[..];
        loop {
            let Some(line) = &mut self.line else { return };
            match line.reader.step(&mut input).expect("the server keeps to the rules") {
                None => return,
                Some(Step::Segment { segment, .. }) => (line.segment, line.payload) = (Some(segment), Vec::new()),
                Some(Step::Payload(bytes)) => line.payload.extend_from_slice(bytes),
                Some(Step::End) => {
                    let segment = line.segment.take().expect("it has begun");
                    let payload = std::mem::take(&mut line.payload);
                    self.take_segment(segment, &payload, now);
                }
            }
        }
    }

    fn take_segment(&mut self, segment: Ddp, payload: &[u8], now: Duration) {
        let Some(line) = &mut self.line else { return };
        match (segment.opcode, segment.place) {
            (Opcode::Send { .. }, _) => {
                line.message.extend_from_slice(payload);
                if segment.last {
                    let message = std::mem::take(&mut line.message);
                    self.answered(&message, now);
                }
            }
            // The server asks whether it is there.
            (Opcode::Write, _) if payload.is_empty() => {}
            (Opcode::Write, Place::Tagged { stag, offset }) => {
                // Nothing of it may be another's, and it goes where a call has room for it.
                let call = line.calls.get_mut(&stag).expect("memory that was shown");
                assert_eq!(offset as usize, call.written.len(), "it is written in order");
                call.written.extend_from_slice(payload);
                assert!(call.written.len() <= call.len, "beyond the memory that was shown");
            }
            (Opcode::ReadRequest, _) => {
                let request = ReadRequest::decode(payload.try_into().expect("its length"));
                if matches!(self.conduct, Conduct::AnswersNoReads(_)) {
                    line.owes.get_or_insert(now);
                    return;
                }
                let data = &line.calls[&request.source_stag].data;
                let data = &data[request.source_offset as usize..][..request.len as usize];
                for (n, part) in data.chunks(PART).enumerate() {
                    let place =
                        Place::Tagged { stag: request.sink_stag, offset: request.sink_offset + (n * PART) as u64 };
                    let last = (n + 1) * PART >= data.len();
                    fpdu(&mut line.out, Ddp { opcode: Opcode::ReadResponse, last, place }, part);
                }
            }
            (Opcode::Terminate, _) => {
                assert!(!self.conduct.is_honest(), "{}, {:?}, is told of a fault", self.host, self.conduct);
            }
            (opcode, place) => panic!("{opcode:?} to {place:?}"),
        }
    }

    /// A reply has come: it must be that of a call, and have its own data.
    fn answered(&mut self, message: &[u8], now: Duration) {
        let Some(line) = &mut self.line else { return };
        let view = View::check(message, Revision::default()).expect("a message");
        line.credits = view.credit() as usize;
        let call = line.calls.remove(&view.xid()).expect("a call that was not answered");
        if matches!(view.body(), ViewBody::Error(_)) {
            // A host whose calls crowd the server is told so.
            return assert!(!self.conduct.is_honest(), "{}, {:?}, is refused: {view}", self.host, self.conduct);
        }
        // XID, REPLY, accepted, no verifier, success (RFC 5531 §9).
        let results = &view.payload()[24..];
        match call.procedure {
            ECHO => assert!(results.len() == call.len && patterned(call.seed, &results[4..]), "another's bytes"),
            STORE => assert_eq!(results, (call.len as u32).to_be_bytes(), "other bytes were read"),
            _ => assert!(call.written.len() == call.len && patterned(call.seed, &call.written), "another's bytes"),
        }
        self.fate.answered += 1;
        self.fate.slowest = self.fate.slowest.max(now - call.began);
    }

    fn begin_calls(&mut self, now: Duration, busy: bool) {
        let Some(line) = &mut self.line else { return };
        let stopped = matches!(self.conduct, Conduct::Stops(at) if now >= line.began + at);
        while busy && !stopped && line.calls.len() < self.depth.min(line.credits) {
            let xid = self.mark << 16 | self.next;
            self.next += 1;
            let procedure = match self.conduct {
                // It has more than one call under way when it has had one answer.
                _ if line.credits == 1 => ECHO,
                Conduct::AnswersNoReads(_) => STORE,
                _ => [ECHO, STORE, STORE, LOAD][self.random.below(4)],
            };
            let len = match procedure {
                // A message without private data has at most 1024 bytes (RFC 8797).
                ECHO => 8 + 4 * self.random.below(200),
                _ => 4 * (1 + self.random.below(CHUNK / 4)),
            };
            let mut call = Call { procedure, seed: xid, len, began: now, written: Vec::new(), data: Vec::new() };
            let target = Segment { handle: xid, length: len as u32, offset: 0 };
            let (mut reads, mut writes, mut args) = (Vec::new(), Vec::new(), xid.to_be_bytes().to_vec());
            match procedure {
                ECHO => {
                    args.resize(len, 0);
                    pattern(xid, &mut args[4..]);
                }
                STORE => {
                    call.data = vec![0; len];
                    pattern(xid, &mut call.data);
                    reads.push(ReadSegment { position: CALL_HEADER + 4, target });
                }
                _ => {
                    args.extend((len as u32).to_be_bytes());
                    writes.push(target);
                }
            }
            let rpc = call_bytes(xid, PROGRAM, VERSION, procedure, &args);
            let counts: &[u32] = if writes.is_empty() { &[] } else { &[1] };
            let writes = WriteList { counts, segments: &writes };
            let body = Body::Msg(Chunks { reads: &reads, writes, ..Chunks::NONE });
            let header = Header { xid, credit: 32, received: None, flags: Flags::NONE, body };
            let mut message = vec![0; header.encoded_len(Version::V1, Revision::default())];
            header.emit(&mut message, Version::V1, Revision::default()).expect("as long as it says");
            message.extend(rpc);
            let parts = message.chunks(PART).count();
            for (n, part) in message.chunks(PART).enumerate() {
                let place = Place::Untagged { queue: QUEUE_SEND, msn: line.msn, offset: (n * PART) as u32 };
                let opcode = Opcode::Send { invalidate: None, solicited: false };
                fpdu(&mut line.out, Ddp { opcode, last: n + 1 == parts, place }, part);
            }
            line.msn += 1;
            line.calls.insert(xid, call);
        }
    }

    fn send(&mut self, now: Duration) {
        let Some(line) = &mut self.line else { return };
        if let Conduct::AnswersNoReads(Some(each)) = self.conduct
            && now >= line.nudged + each
        {
            line.nudged = now;
            let place = Place::Tagged { stag: 0, offset: 0 };
            fpdu(&mut line.out, Ddp { opcode: Opcode::Write, last: true, place }, &[]);
        }
        let mut most = line.may[1] as usize;
        match self.conduct {
            Conduct::Stops(at) if now >= line.began + at => return,
            Conduct::Halves(at, bytes) if now >= line.began + at => {
                if std::mem::replace(&mut line.mute, true) {
                    return;
                }
                most = bytes;
            }
            _ => {}
        }
        let before = line.out.len();
        line.end.send(&mut line.out, most);
        line.may[1] -= (before - line.out.len()) as f64;
    }

    /// Whoever answers no Reads holds memory: for no longer than is said. What it says in place of that pays for little.
    fn check_owed(&self, now: Duration) {
        let since = self.line.as_ref().and_then(|line| line.owes).unwrap_or(now);
        assert!(now - since < 2 * PROGRESS, "{}, {:?}, holds memory for ever", self.host, self.conduct);
    }
}
