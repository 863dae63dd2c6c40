//! A client with correct messages, timed by its [`Conduct`].

use std::collections::BTreeMap;
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::wire::{ReadSegment, Revision, View, ViewBody};
use rpcrdma_tests::{ECHO, LOAD, PROGRAM, Random, STORE, VERSION, call_bytes, pattern, patterned};

use super::PROGRESS;
use super::grammar::Conduct;
use super::service::KEEP;
use super::wire::{PeerEvent, RequestedRead, Wire};
use crate::device::Kind;

/// Bytes of an RPC call header without credential (RFC 5531 §9).
const CALL_HEADER: u32 = 40;
/// Prefix of all marks. No pattern contains it.
const MARKS: u32 = 0xa500;
/// The highest number of a peer: that of the witness.
pub(super) const WITNESS: u32 = 100;
/// Maximum outstanding calls of one peer.
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
pub(super) struct PeerCounters {
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
    pub(super) retransmitted: u64,
}

/// A simulated client.
pub(super) struct Peer {
    pub(super) conduct: Conduct,
    pub(super) counters: PeerCounters,
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
    connection: Option<PeerConnection>,
    /// Time of its next connect.
    next_connect: Duration,
    /// XID and length of the last answered call of [`KEEP`].
    kept: Option<(u32, usize)>,
    /// Calls of [`KEEP`] that were unanswered when their connection was lost.
    unanswered: Vec<(u32, Call)>,
}

/// One connection.
struct PeerConnection {
    wire: Wire,
    began: Duration,
    calls: BTreeMap<u32, Call>,
    /// Version 1: most outstanding calls (RFC 8166 §3.3.1). One, until the server grants more.
    credits: usize,
    answered: bool,
    /// Bytes that it may receive, and send.
    may: [f64; 2],
    /// Time of its last sign of life.
    last_empty_write: Duration,
    /// Since when an RDMA Read waits for its answer.
    owed_since: Option<Duration>,
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
            counters: PeerCounters::default(),
            kind,
            chunk,
            stores,
            host: format!("192.0.2.{host}:{}", 1000 + number),
            mark: MARKS | number,
            depth: depth.unwrap_or(DEPTH),
            random,
            next: 1,
            connection: None,
            next_connect: Duration::ZERO,
            kept: None,
            unanswered: Vec::new(),
        }
    }

    /// Its host and conduct.
    pub(super) fn description(&self) -> String {
        format!("{}: {:?}", self.host, self.conduct)
    }

    /// Outstanding calls.
    pub(super) fn under_way(&self) -> usize {
        self.connection.as_ref().map_or(0, |connection| connection.calls.len())
    }

    /// Age of its oldest call.
    pub(super) fn waits(&self, now: Duration) -> Duration {
        let calls = self.connection.iter().flat_map(|connection| connection.calls.values());
        calls.map(|call| now - call.began).max().unwrap_or_default()
    }

    /// Leaves silently. Returns true if the server had not ended the connection; it still may before it notices.
    pub(super) fn leave(&mut self) -> bool {
        let Some(mut connection) = self.connection.take() else { return false };
        let over = connection.wire.is_over();
        self.counters.ended += u64::from(over);
        let calls = connection.calls.into_iter().filter(|(_, call)| call.procedure == KEEP);
        self.unanswered.extend(calls);
        !over
    }

    /// A turn at `now`, `passed` after the previous one. `busy`: it starts calls.
    pub(super) fn turn(&mut self, address: &Address, now: Duration, passed: Duration, busy: bool) {
        if self.connection.is_none() && busy && now >= self.next_connect {
            self.connect(address, now);
        }
        let Some(connection) = &mut self.connection else { return };
        if matches!(self.conduct, Conduct::Reconnects(each) if now >= connection.began + each) {
            self.next_connect = now + Duration::from_millis(self.random.below(500) as u64);
            self.leave();
            return;
        }
        // Unused bytes must not accumulate into a faster rate later.
        let (more, unit) = (self.conduct.bytes_in(passed), connection.wire.unit());
        connection.may = connection.may.map(|may| (may + more).min(more.max(unit) * 2.0));
        if connection.wire.is_over() {
            return self.lost(now);
        }
        if !connection.wire.is_up() {
            return;
        }
        self.receive(now);
        if self.connection.as_mut().is_some_and(|connection| connection.wire.is_over()) {
            return self.lost(now);
        }
        self.begin_calls(now, busy);
        self.send(now);
        self.check_owed(now);
    }

    fn connect(&mut self, address: &Address, now: Duration) {
        self.counters.connections += 1;
        self.connection = Some(PeerConnection {
            wire: Wire::connect((self.kind, self.chunk), self.conduct, address, &self.host, &mut self.random),
            began: now,
            calls: BTreeMap::new(),
            credits: 1,
            answered: false,
            may: [0.0; 2],
            last_empty_write: now,
            owed_since: None,
            mute: false,
        });
    }

    /// The server has ended the connection.
    fn lost(&mut self, now: Duration) {
        assert!(!self.conduct.is_honest(), "{} was ended", self.description());
        self.next_connect = now + Duration::from_millis(self.random.below(1500) as u64);
        self.leave();
    }

    fn has_stopped(&self, now: Duration) -> bool {
        let began = self.connection.as_ref().map_or(now, |connection| connection.began);
        matches!(self.conduct, Conduct::Stops(at) if now >= began + at)
    }

    /// Receives messages and RDMA operations.
    fn receive(&mut self, now: Duration) {
        let takes_nothing = self.conduct == Conduct::TakesNothing && self.counters.answered > 3;
        if self.has_stopped(now) || takes_nothing {
            return;
        }
        let Some(connection) = &mut self.connection else { return };
        let mut events = Vec::new();
        connection.may[0] -= connection.wire.receive(connection.may[0].max(0.0) as usize, &mut events) as f64;
        for event in events {
            match event {
                PeerEvent::Message(message) => self.answered(&message, now),
                PeerEvent::Written { handle, offset, bytes } => self.written(handle, offset, &bytes),
                PeerEvent::ReadRequested(requested) => self.answer_read(&requested, now),
                PeerEvent::Fault => {
                    assert!(!self.conduct.is_honest(), "{} got a fault report", self.description());
                }
            }
        }
    }

    /// Checks that written bytes belong to a call and fit its memory.
    fn written(&mut self, handle: u32, offset: u64, bytes: &[u8]) {
        let Some(connection) = &mut self.connection else { return };
        let call = connection.calls.get_mut(&handle).expect("memory that was exposed");
        assert_eq!(offset as usize, call.written.len(), "it is written in order");
        call.written.extend_from_slice(bytes);
        assert!(call.written.len() <= call.len, "beyond the memory that was exposed");
    }

    fn answer_read(&mut self, requested: &RequestedRead, now: Duration) {
        let Some(connection) = &mut self.connection else { return };
        if matches!(self.conduct, Conduct::AnswersNoReads(_)) {
            connection.owed_since.get_or_insert(now);
            return;
        }
        let data = &connection.calls[&requested.handle].data;
        connection.wire.answer(requested, &data[requested.offset as usize..][..requested.len as usize]);
    }

    /// Checks that a reply belongs to a call and carries its data.
    fn answered(&mut self, message: &[u8], now: Duration) {
        let Some(connection) = &mut self.connection else { return };
        let view = View::check(message, Revision::default()).expect("a message");
        let Some(mut call) = connection.calls.remove(&view.xid()) else {
            // A peer that announces a message may get an error for it. The error may name an old call of its own, or a
            // part of one; never another peer's call.
            let mark = view.xid() >> 16;
            let marked = (MARKS..=MARKS + WITNESS).contains(&mark);
            let own = mark == self.mark || !marked && matches!(view.body(), ViewBody::Error(_));
            return assert!(connection.mute && own, "a reply to a call of another: {view}");
        };
        (connection.credits, connection.answered) = (view.credit() as usize, true);
        if let Some(written) = connection.wire.unexpose(view.xid(), call.len) {
            call.written = written;
        }
        if matches!(view.body(), ViewBody::Error(_)) {
            // Only a host whose calls crowd the server may get an error.
            return assert!(!self.conduct.is_honest(), "{} is refused: {view}", self.description());
        }
        // XID, REPLY, accepted, no verifier, success (RFC 5531 §9).
        let results = &view.payload()[24..];
        match call.procedure {
            ECHO => assert!(results.len() == call.len && patterned(call.seed, &results[4..]), "bytes of another call"),
            STORE => assert_eq!(results, (call.len as u32).to_be_bytes(), "other bytes were read"),
            LOAD => {
                assert!(call.written.len() == call.len && patterned(call.seed, &call.written), "bytes of another call")
            }
            _ => {
                assert_eq!(results, call.seed.to_be_bytes(), "the reply to another call");
                self.kept = Some((view.xid(), call.len));
            }
        }
        self.counters.answered += 1;
        self.counters.slowest = self.counters.slowest.max(now - call.began);
    }

    /// The next call, and its XID.
    fn draw_call(&mut self, now: Duration) -> (u32, Call) {
        if let Some((xid, call)) = self.unanswered.pop() {
            self.counters.retransmitted += 1;
            return (xid, Call { began: now, written: Vec::new(), ..call });
        }
        let seed = self.mark << 16 | self.next;
        self.next += 1;
        let procedure = match self.conduct {
            // Before the first reply it may have one outstanding call only.
            _ if self.connection.as_ref().is_some_and(|connection| !connection.answered) => ECHO,
            Conduct::AnswersNoReads(_) => STORE,
            _ if self.stores => STORE,
            // An announced message is an old one of the ring, which by now refers to other data and so is another call.
            Conduct::SendsPartially(..) if self.kind == Kind::Software => {
                [ECHO, STORE, STORE, LOAD][self.random.below(4)]
            }
            _ => [ECHO, STORE, STORE, LOAD, KEEP][self.random.below(5)],
        };
        let (xid, len) = match (procedure, self.kept) {
            // A message without private data has at most 1024 bytes (RFC 8797).
            (ECHO, _) => (seed, 8 + 4 * self.random.below(200)),
            (KEEP, Some((xid, len))) if self.random.once_in(2) => {
                (self.counters.reused, self.kept) = (self.counters.reused + 1, None);
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
            let Some(connection) = &self.connection else { return };
            let under_way = connection.calls.len();
            if !busy
                || stopped
                || connection.mute
                || under_way >= self.depth
                || connection.wire.room(under_way, connection.credits) == 0
            {
                return;
            }
            let (xid, call) = self.draw_call(now);
            let Some(connection) = &mut self.connection else { return };
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            let args = match call.procedure {
                ECHO => {
                    let mut args = vec![0; call.len];
                    args[..4].copy_from_slice(&call.seed.to_be_bytes());
                    pattern(call.seed, &mut args[4..]);
                    args
                }
                STORE | KEEP => {
                    let target = connection.wire.expose(xid, &call.data, call.len);
                    // Only the data distinguishes the calls of KEEP.
                    let head = if call.procedure == STORE { call.seed } else { self.mark };
                    reads.push(ReadSegment { position: CALL_HEADER + 4, target });
                    head.to_be_bytes().to_vec()
                }
                _ => {
                    writes.push(connection.wire.expose(xid, &[], call.len));
                    [call.seed, call.len as u32].map(u32::to_be_bytes).concat()
                }
            };
            let rpc = call_bytes(xid, PROGRAM, VERSION, call.procedure, &args);
            connection.wire.call(xid, &reads, &writes, &rpc);
            connection.calls.insert(xid, call);
        }
    }

    fn send(&mut self, now: Duration) {
        let stopped = self.has_stopped(now);
        let Some(connection) = &mut self.connection else { return };
        match self.conduct {
            Conduct::AnswersNoReads(Some(each)) if now >= connection.last_empty_write + each => {
                connection.last_empty_write = now;
                connection.wire.send_empty_write();
            }
            Conduct::GrantsNothing if connection.answered => connection.wire.grant_nothing(),
            Conduct::SendsPartially(at, bytes) if now >= connection.began + at && !connection.mute => {
                connection.mute = true;
                connection.wire.send_partially(bytes);
            }
            _ => {}
        }
        if !stopped && !connection.mute {
            connection.may[1] -= connection.wire.send(connection.may[1].max(0.0) as usize) as f64;
        }
    }

    /// A peer that answers no Reads holds memory for a bounded time only. Its signs of life extend it little.
    fn check_owed(&self, now: Duration) {
        let since = self.connection.as_ref().and_then(|connection| connection.owed_since).unwrap_or(now);
        assert!(now - since < 2 * PROGRESS, "{} holds memory beyond the bound", self.description());
    }
}
