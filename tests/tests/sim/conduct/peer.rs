//! A client with correct messages, timed by its [`Conduct`].

use std::collections::BTreeMap;
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::wire::{ReadSegment, Revision, View, ViewBody};
use rpcrdma_tests::{ECHO, LOAD, PROGRAM, Random, STORE, VERSION, call_bytes, pattern, patterned};

use super::PROGRESS;
use super::grammar::Conduct;
use super::service::KEEP;
use super::wire::{Asked, News, Wire};
use crate::device::Kind;

/// Bytes of an RPC call header without credential (RFC 5531 §9).
const CALL_HEADER: u32 = 40;
/// Prefix of all marks. No pattern contains it.
const MARKS: u32 = 0xa500;
/// The highest number of a peer: that of the witness.
pub(super) const WITNESS: u32 = 100;
/// Most outstanding calls of one peer.
const DEPTH: usize = 8;

/// An outstanding call.
#[derive(Clone, Debug)]
struct Call {
    procedure: u32,
    seed: u32,
    len: usize,
    began: Duration,
    /// Bytes that the server wrote for it.
    written: Vec<u8>,
    /// Answer to its RDMA Read.
    data: Vec<u8>,
}

/// Counters of one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fate {
    /// Calls that were answered.
    pub(super) answered: u64,
    /// The longest duration of a call.
    pub(super) slowest: Duration,
    /// Connections that the server ended.
    pub(super) ended: u64,
    /// Connections that were made.
    pub(super) connections: u64,
    /// Calls with the XID of an earlier call of the same length, but with other bytes.
    pub(super) reused: u64,
    /// Calls that it retransmitted after a lost connection.
    pub(super) again: u64,
}

/// A simulated client.
pub(super) struct Peer {
    pub(super) conduct: Conduct,
    pub(super) fate: Fate,
    kind: Kind,
    /// Bytes of its longest chunk.
    chunk: usize,
    /// All its calls store a chunk of that length.
    stores: bool,
    host: String,
    /// Prefix of its XIDs and data, unique among all peers.
    mark: u32,
    depth: usize,
    random: Random,
    next: u32,
    line: Option<Line>,
    /// Time of its next connect.
    again: Duration,
    /// XID and length of the last answered call of [`KEEP`].
    kept: Option<(u32, usize)>,
    /// Calls of [`KEEP`] that were unanswered when their connection was lost.
    unanswered: Vec<(u32, Call)>,
}

/// One connection.
struct Line {
    wire: Wire,
    began: Duration,
    calls: BTreeMap<u32, Call>,
    /// Version 1: most outstanding calls (RFC 8166 §3.3.1). One, until the server grants more.
    credits: usize,
    answered: bool,
    /// Bytes that it may receive, and send.
    may: [f64; 2],
    /// Time of its last sign of life.
    nudged: Duration,
    /// Since when it has owed the answer to an RDMA Read.
    owes: Option<Duration>,
    /// It sends nothing more.
    mute: bool,
}

impl Peer {
    pub(super) fn new(
        (kind, chunk): (Kind, usize),
        conduct: Conduct,
        number: u32,
        host: usize,
        depth: Option<usize>,
        seed: u64,
    ) -> Self {
        let mut random = Random::new(seed ^ u64::from(number) << 32);
        let stores = depth.is_none() && random.once_in(4);
        Self {
            conduct,
            fate: Fate::default(),
            kind,
            chunk,
            stores,
            host: format!("192.0.2.{host}:{}", 1000 + number),
            mark: MARKS | number,
            depth: depth.unwrap_or(DEPTH),
            random,
            next: 1,
            line: None,
            again: Duration::ZERO,
            kept: None,
            unanswered: Vec::new(),
        }
    }

    /// Its host and conduct.
    pub(super) fn told(&self) -> String {
        format!("{}: {:?}", self.host, self.conduct)
    }

    /// Outstanding calls.
    pub(super) fn under_way(&self) -> usize {
        self.line.as_ref().map_or(0, |line| line.calls.len())
    }

    /// Age of its oldest call.
    pub(super) fn waits(&self, now: Duration) -> Duration {
        let calls = self.line.iter().flat_map(|line| line.calls.values());
        calls.map(|call| now - call.began).max().unwrap_or_default()
    }

    /// Leaves silently. Returns true if the server had not ended the connection; it still may before it notices.
    pub(super) fn leave(&mut self) -> bool {
        let Some(mut line) = self.line.take() else { return false };
        let over = line.wire.is_over();
        self.fate.ended += u64::from(over);
        let calls = line.calls.into_iter().filter(|(_, call)| call.procedure == KEEP);
        self.unanswered.extend(calls);
        !over
    }

    /// A turn at `now`, `passed` after the previous one. `busy`: it starts calls.
    pub(super) fn turn(&mut self, address: &Address, now: Duration, passed: Duration, busy: bool) {
        if self.line.is_none() && busy && now >= self.again {
            self.connect(address, now);
        }
        let Some(line) = &mut self.line else { return };
        if matches!(self.conduct, Conduct::ComesAndGoes(each) if now >= line.began + each) {
            self.again = now + Duration::from_millis(self.random.below(500) as u64);
            self.leave();
            return;
        }
        // Unused bytes must not accumulate into a faster rate later.
        let (more, unit) = (self.conduct.bytes_in(passed), line.wire.unit());
        line.may = line.may.map(|may| (may + more).min(more.max(unit) * 2.0));
        if line.wire.is_over() {
            return self.lost(now);
        }
        if !line.wire.is_up() {
            return;
        }
        self.receive(now);
        if self.line.as_mut().is_some_and(|line| line.wire.is_over()) {
            return self.lost(now);
        }
        self.begin_calls(now, busy);
        self.send(now);
        self.check_owed(now);
    }

    fn connect(&mut self, address: &Address, now: Duration) {
        self.fate.connections += 1;
        self.line = Some(Line {
            wire: Wire::connect((self.kind, self.chunk), self.conduct, address, &self.host, &mut self.random),
            began: now,
            calls: BTreeMap::new(),
            credits: 1,
            answered: false,
            may: [0.0; 2],
            nudged: now,
            owes: None,
            mute: false,
        });
    }

    /// The server has ended the connection.
    fn lost(&mut self, now: Duration) {
        assert!(!self.conduct.is_honest(), "{} was ended", self.told());
        self.again = now + Duration::from_millis(self.random.below(1500) as u64);
        self.leave();
    }

    fn has_stopped(&self, now: Duration) -> bool {
        let began = self.line.as_ref().map_or(now, |line| line.began);
        matches!(self.conduct, Conduct::Stops(at) if now >= began + at)
    }

    /// Receives messages and RDMA operations.
    fn receive(&mut self, now: Duration) {
        let deaf = self.conduct == Conduct::TakesNothing && self.fate.answered > 3;
        if self.has_stopped(now) || deaf {
            return;
        }
        let Some(line) = &mut self.line else { return };
        let mut news = Vec::new();
        line.may[0] -= line.wire.receive(line.may[0].max(0.0) as usize, &mut news) as f64;
        for news in news {
            match news {
                News::Message(message) => self.answered(&message, now),
                News::Written { handle, offset, bytes } => self.written(handle, offset, &bytes),
                News::Asked(asked) => self.asked(&asked, now),
                News::Fault => {
                    assert!(!self.conduct.is_honest(), "{} is told of a fault", self.told());
                }
            }
        }
    }

    /// Checks that written bytes belong to a call and fit its memory.
    fn written(&mut self, handle: u32, offset: u64, bytes: &[u8]) {
        let Some(line) = &mut self.line else { return };
        let call = line.calls.get_mut(&handle).expect("memory that was shown");
        assert_eq!(offset as usize, call.written.len(), "it is written in order");
        call.written.extend_from_slice(bytes);
        assert!(call.written.len() <= call.len, "beyond the memory that was shown");
    }

    fn asked(&mut self, asked: &Asked, now: Duration) {
        let Some(line) = &mut self.line else { return };
        if matches!(self.conduct, Conduct::AnswersNoReads(_)) {
            line.owes.get_or_insert(now);
            return;
        }
        let data = &line.calls[&asked.handle].data;
        line.wire.answer(asked, &data[asked.offset as usize..][..asked.len as usize]);
    }

    /// Checks that a reply belongs to a call and carries its data.
    fn answered(&mut self, message: &[u8], now: Duration) {
        let Some(line) = &mut self.line else { return };
        let view = View::check(message, Revision::default()).expect("a message");
        let Some(mut call) = line.calls.remove(&view.xid()) else {
            // A peer that announces a message may get an error for it. The error may name an old call of its own, or a
            // part of one; never another peer's call.
            let mark = view.xid() >> 16;
            let marked = (MARKS..=MARKS + WITNESS).contains(&mark);
            let own = mark == self.mark || !marked && matches!(view.body(), ViewBody::Error(_));
            return assert!(line.mute && own, "a reply to a call of another: {view}");
        };
        (line.credits, line.answered) = (view.credit() as usize, true);
        if let Some(written) = line.wire.hide(view.xid(), call.len) {
            call.written = written;
        }
        if matches!(view.body(), ViewBody::Error(_)) {
            // Only a host whose calls crowd the server may get an error.
            return assert!(!self.conduct.is_honest(), "{} is refused: {view}", self.told());
        }
        // XID, REPLY, accepted, no verifier, success (RFC 5531 §9).
        let results = &view.payload()[24..];
        match call.procedure {
            ECHO => assert!(results.len() == call.len && patterned(call.seed, &results[4..]), "another's bytes"),
            STORE => assert_eq!(results, (call.len as u32).to_be_bytes(), "other bytes were read"),
            LOAD => assert!(call.written.len() == call.len && patterned(call.seed, &call.written), "another's bytes"),
            _ => {
                assert_eq!(results, call.seed.to_be_bytes(), "the reply to another call");
                self.kept = Some((view.xid(), call.len));
            }
        }
        self.fate.answered += 1;
        self.fate.slowest = self.fate.slowest.max(now - call.began);
    }

    /// The next call, and its XID.
    fn draw_call(&mut self, now: Duration) -> (u32, Call) {
        if let Some((xid, call)) = self.unanswered.pop() {
            self.fate.again += 1;
            return (xid, Call { began: now, written: Vec::new(), ..call });
        }
        let seed = self.mark << 16 | self.next;
        self.next += 1;
        let procedure = match self.conduct {
            // Before the first reply it may have one outstanding call only.
            _ if self.line.as_ref().is_some_and(|line| !line.answered) => ECHO,
            Conduct::AnswersNoReads(_) => STORE,
            _ if self.stores => STORE,
            // An announced message is an old one of the ring, which by now refers to other data and so is another call.
            Conduct::Halves(..) if self.kind == Kind::Software => [ECHO, STORE, STORE, LOAD][self.random.below(4)],
            _ => [ECHO, STORE, STORE, LOAD, KEEP][self.random.below(5)],
        };
        let (xid, len) = match (procedure, self.kept) {
            // A message without private data has at most 1024 bytes (RFC 8797).
            (ECHO, _) => (seed, 8 + 4 * self.random.below(200)),
            (KEEP, Some((xid, len))) if self.random.once_in(2) => {
                (self.fate.reused, self.kept) = (self.fate.reused + 1, None);
                (xid, len)
            }
            _ if self.stores => (seed, self.chunk),
            _ => (seed, 4 * (1 + self.random.below(self.chunk / 4))),
        };
        let mut data = Vec::new();
        if procedure == KEEP {
            data.extend(seed.to_be_bytes());
        }
        if matches!(procedure, STORE | KEEP) {
            let head = data.len();
            data.resize(len, 0);
            pattern(seed, &mut data[head..]);
        }
        (xid, Call { procedure, seed, len, began: now, written: Vec::new(), data })
    }

    fn begin_calls(&mut self, now: Duration, busy: bool) {
        let stopped = self.has_stopped(now);
        loop {
            let Some(line) = &self.line else { return };
            let under_way = line.calls.len();
            if !busy || stopped || line.mute || under_way >= self.depth || line.wire.room(under_way, line.credits) == 0
            {
                return;
            }
            let (xid, call) = self.draw_call(now);
            let Some(line) = &mut self.line else { return };
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            let args = match call.procedure {
                ECHO => {
                    let mut args = vec![0; call.len];
                    args[..4].copy_from_slice(&call.seed.to_be_bytes());
                    pattern(call.seed, &mut args[4..]);
                    args
                }
                STORE | KEEP => {
                    let target = line.wire.show(xid, &call.data, call.len);
                    // Only the data distinguishes the calls of KEEP.
                    let head = if call.procedure == STORE { call.seed } else { self.mark };
                    reads.push(ReadSegment { position: CALL_HEADER + 4, target });
                    head.to_be_bytes().to_vec()
                }
                _ => {
                    writes.push(line.wire.show(xid, &[], call.len));
                    [call.seed, call.len as u32].map(u32::to_be_bytes).concat()
                }
            };
            let rpc = call_bytes(xid, PROGRAM, VERSION, call.procedure, &args);
            line.wire.call(xid, &reads, &writes, &rpc);
            line.calls.insert(xid, call);
        }
    }

    fn send(&mut self, now: Duration) {
        let stopped = self.has_stopped(now);
        let Some(line) = &mut self.line else { return };
        match self.conduct {
            Conduct::AnswersNoReads(Some(each)) if now >= line.nudged + each => {
                line.nudged = now;
                line.wire.nudge();
            }
            Conduct::GrantsNothing if line.answered => line.wire.grant_nothing(),
            Conduct::Halves(at, bytes) if now >= line.began + at && !line.mute => {
                line.mute = true;
                line.wire.halve(bytes);
            }
            _ => {}
        }
        if !stopped && !line.mute {
            line.may[1] -= line.wire.send(line.may[1].max(0.0) as usize) as f64;
        }
    }

    /// A peer that answers no Reads holds memory for a bounded time only. Its signs of life extend it little.
    fn check_owed(&self, now: Duration) {
        let since = self.line.as_ref().and_then(|line| line.owes).unwrap_or(now);
        assert!(now - since < 2 * PROGRESS, "{} holds memory for ever", self.told());
    }
}
