//! A client with correct messages, timed by its [`Conduct`].

use std::collections::BTreeMap;
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::wire::{ReadSegment, Revision, View, ViewBody};
use rpcrdma_tests::{ECHO, LOAD, PROGRAM, Random, STORE, VERSION, call_bytes, has_pattern, pattern};

use super::PROGRESS;
use super::service::CACHED;
use super::timing::Conduct;
use super::wire::{PeerEvent, RequestedRead, Wire};
use crate::device::FabricKind;

/// Bytes of an RPC call header without credential (RFC 5531 §9).
const CALL_HEADER: u32 = 40;
/// Prefix of all marks. No pattern contains it.
const MARKS: u32 = 0xa500;
/// Number of the witness, the highest of all peers.
pub(super) const WITNESS: u32 = 100;
/// Maximum outstanding calls of a peer other than the witness.
const DEPTH: usize = 8;

/// An outstanding call.
#[derive(Clone, Debug)]
struct OutstandingCall {
    procedure: u32,
    seed: u32,
    len: usize,
    began: Duration,
    /// Bytes that the server has written to its Write chunk.
    written: Vec<u8>,
    /// Data of its Read chunk.
    data: Vec<u8>,
}

/// Counters of one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PeerCounters {
    /// Calls that were answered.
    pub(super) answered: u64,
    /// Duration of the slowest call.
    pub(super) slowest: Duration,
    /// Connections that the server ended.
    pub(super) ended: u64,
    /// Connections that were made.
    pub(super) connections: u64,
    /// Calls with the XID of an earlier call of the same length, but with other bytes.
    pub(super) reused: u64,
    /// Calls that the peer retransmitted after a lost connection.
    pub(super) retransmitted: u64,
}

/// A simulated client.
pub(super) struct Peer {
    pub(super) conduct: Conduct,
    pub(super) counters: PeerCounters,
    kind: FabricKind,
    /// Maximum length of the peer's chunks, in bytes.
    chunk: usize,
    /// Whether all calls have a Read chunk of the maximum length.
    stores: bool,
    host: String,
    /// Prefix of the peer's XIDs and data, unique among all peers.
    mark: u32,
    depth: usize,
    random: Random,
    next: u32,
    connection: Option<PeerConnection>,
    /// Earliest time of the next connect.
    next_connect: Duration,
    /// XID and length of the last answered call of [`CACHED`].
    last_cached: Option<(u32, usize)>,
    /// Calls of [`CACHED`] that were unanswered when their connection was lost.
    unanswered: Vec<(u32, OutstandingCall)>,
}

/// A connection of a peer.
struct PeerConnection {
    wire: Wire,
    began: Duration,
    calls: BTreeMap<u32, OutstandingCall>,
    /// Version 1: maximum outstanding calls (RFC 8166 §3.3.1). One, until the server grants more.
    credits: usize,
    /// Whether the peer has received a reply.
    answered: bool,
    /// Bytes that the peer may receive, and may send, under its conduct.
    allowance: [f64; 2],
    last_empty_write: Duration,
    /// Time of the first RDMA Read that the peer has not answered.
    read_pending_since: Option<Duration>,
    /// Whether the peer has sent a partial message, after which it sends nothing more.
    mute: bool,
}

impl Peer {
    pub(super) fn new(
        (kind, chunk): (FabricKind, usize),
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
            last_cached: None,
            unanswered: Vec::new(),
        }
    }

    /// Describes the peer by its host and conduct.
    pub(super) fn description(&self) -> String {
        format!("{}: {:?}", self.host, self.conduct)
    }

    /// Number of outstanding calls.
    pub(super) fn outstanding(&self) -> usize {
        self.connection.as_ref().map_or(0, |connection| connection.calls.len())
    }

    /// Age of the oldest outstanding call.
    pub(super) fn longest_wait(&self, now: Duration) -> Duration {
        let calls = self.connection.iter().flat_map(|connection| connection.calls.values());
        calls.map(|call| now - call.began).max().unwrap_or_default()
    }

    /// Drops the connection without notice. Returns true unless the server has ended it before.
    ///
    /// The server may still count a missed deadline of this connection before it notices that the peer has left.
    pub(super) fn leave(&mut self) -> bool {
        let Some(mut connection) = self.connection.take() else { return false };
        let ended = connection.wire.is_over();
        self.counters.ended += u64::from(ended);
        let calls = connection.calls.into_iter().filter(|(_, call)| call.procedure == CACHED);
        self.unanswered.extend(calls);
        !ended
    }

    /// Takes a turn at `now`, which is `passed` after the previous one. If `busy`, the peer starts calls.
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
        // The limit keeps an unused allowance from becoming a burst above the rate.
        let (more, unit) = (self.conduct.bytes_in(passed), connection.wire.unit());
        connection.allowance = connection.allowance.map(|bytes| (bytes + more).min(more.max(unit) * 2.0));
        if connection.wire.is_over() {
            return self.handle_end(now);
        }
        if !connection.wire.is_up() {
            return;
        }
        self.receive(now);
        if self.connection.as_mut().is_some_and(|connection| connection.wire.is_over()) {
            return self.handle_end(now);
        }
        self.begin_calls(now, busy);
        self.send(now);
        self.check_unanswered_reads(now);
    }

    fn connect(&mut self, address: &Address, now: Duration) {
        self.counters.connections += 1;
        self.connection = Some(PeerConnection {
            wire: Wire::connect((self.kind, self.chunk), self.conduct, address, &self.host, &mut self.random),
            began: now,
            calls: BTreeMap::new(),
            credits: 1,
            answered: false,
            allowance: [0.0; 2],
            last_empty_write: now,
            read_pending_since: None,
            mute: false,
        });
    }

    /// Handles the end of a connection that the server has ended. The server must not do this to an honest peer.
    fn handle_end(&mut self, now: Duration) {
        assert!(!self.conduct.is_honest(), "{}: the server must not disconnect an honest peer", self.description());
        self.next_connect = now + Duration::from_millis(self.random.below(1500) as u64);
        self.leave();
    }

    fn has_stopped(&self, now: Duration) -> bool {
        let began = self.connection.as_ref().map_or(now, |connection| connection.began);
        matches!(self.conduct, Conduct::Stops(at) if now >= began + at)
    }

    /// Receives messages and RDMA operations.
    fn receive(&mut self, now: Duration) {
        let stops_receiving = self.conduct == Conduct::TakesNothing && self.counters.answered > 3;
        if self.has_stopped(now) || stops_receiving {
            return;
        }
        let Some(connection) = &mut self.connection else { return };
        let mut events = Vec::new();
        connection.allowance[0] -=
            connection.wire.receive(connection.allowance[0].max(0.0) as usize, &mut events) as f64;
        for event in events {
            match event {
                PeerEvent::Message(message) => self.check_reply(&message, now),
                PeerEvent::Written { handle, offset, bytes } => self.record_write(handle, offset, &bytes),
                PeerEvent::ReadRequested(requested) => self.answer_read(&requested, now),
                PeerEvent::Fault => {
                    assert!(!self.conduct.is_honest(), "{}: an honest peer got an error report", self.description());
                }
            }
        }
    }

    /// Records written bytes. Checks that they belong to a call and fit its memory.
    fn record_write(&mut self, handle: u32, offset: u64, bytes: &[u8]) {
        let Some(connection) = &mut self.connection else { return };
        let call = connection.calls.get_mut(&handle).expect("memory of an outstanding call");
        assert_eq!(offset as usize, call.written.len(), "Writes must be in order");
        call.written.extend_from_slice(bytes);
        assert!(call.written.len() <= call.len, "Writes must not exceed the exposed memory");
    }

    /// Answers an RDMA Read, unless the conduct forbids it.
    fn answer_read(&mut self, requested: &RequestedRead, now: Duration) {
        let Some(connection) = &mut self.connection else { return };
        if matches!(self.conduct, Conduct::AnswersNoReads(_)) {
            connection.read_pending_since.get_or_insert(now);
            return;
        }
        let data = &connection.calls[&requested.handle].data;
        connection.wire.answer(requested, &data[requested.offset as usize..][..requested.len as usize]);
    }

    /// Checks that a reply belongs to a call and carries its data.
    fn check_reply(&mut self, message: &[u8], now: Duration) {
        let Some(connection) = &mut self.connection else { return };
        let view = View::check(message, Revision::default()).expect("a message");
        let Some(mut call) = connection.calls.remove(&view.xid()) else {
            // The server may answer the old bytes of a message that the peer announced but did not write: with a reply
            // to an old call of this peer, or with an error for bytes that are no header. It must not answer another
            // peer's call.
            let mark = view.xid() >> 16;
            let is_mark = (MARKS..=MARKS + WITNESS).contains(&mark);
            let own = mark == self.mark || !is_mark && matches!(view.body(), ViewBody::Error(_));
            return assert!(connection.mute && own, "{view} answers no call of {}", self.description());
        };
        (connection.credits, connection.answered) = (view.credit() as usize, true);
        if let Some(written) = connection.wire.unexpose(view.xid(), call.len) {
            call.written = written;
        }
        if matches!(view.body(), ViewBody::Error(_)) {
            // The server may reject calls of a host that holds too much memory. An honest peer has a host of its own.
            return assert!(!self.conduct.is_honest(), "{}: an honest peer got {view}", self.description());
        }
        // XID, REPLY, accepted, no verifier, success (RFC 5531 §9).
        let results = &view.payload()[24..];
        match call.procedure {
            ECHO => assert!(results.len() == call.len && has_pattern(call.seed, &results[4..]), "results must match"),
            STORE => assert_eq!(results, (call.len as u32).to_be_bytes(), "number of bytes that the server has read"),
            LOAD => {
                assert!(call.written.len() == call.len && has_pattern(call.seed, &call.written), "results must match")
            }
            _ => {
                assert_eq!(results, call.seed.to_be_bytes(), "number that the call has sent");
                self.last_cached = Some((view.xid(), call.len));
            }
        }
        self.counters.answered += 1;
        self.counters.slowest = self.counters.slowest.max(now - call.began);
    }

    /// Draws the next call and its XID.
    fn draw_call(&mut self, now: Duration) -> (u32, OutstandingCall) {
        if let Some((xid, call)) = self.unanswered.pop() {
            self.counters.retransmitted += 1;
            return (xid, OutstandingCall { began: now, written: Vec::new(), ..call });
        }
        let seed = self.mark << 16 | self.next;
        self.next += 1;
        let procedure = match self.conduct {
            // The first call on a connection is short, because it has the only credit until its reply arrives.
            _ if self.connection.as_ref().is_some_and(|connection| !connection.answered) => ECHO,
            Conduct::AnswersNoReads(_) => STORE,
            _ if self.stores => STORE,
            // An announced message repeats an old message of the ring. Its Read chunk by now has other data, so CACHED
            // would take it for another call.
            Conduct::SendsPartially(..) if self.kind == FabricKind::Software => {
                [ECHO, STORE, STORE, LOAD][self.random.below(4)]
            }
            _ => [ECHO, STORE, STORE, LOAD, CACHED][self.random.below(5)],
        };
        let (xid, len) = match (procedure, self.last_cached) {
            // A message without private data has at most 1024 bytes (RFC 8797).
            (ECHO, _) => (seed, 8 + 4 * self.random.below(200)),
            (CACHED, Some((xid, len))) if self.random.once_in(2) => {
                (self.counters.reused, self.last_cached) = (self.counters.reused + 1, None);
                (xid, len)
            }
            _ if self.stores => (seed, self.chunk),
            _ => (seed, 4 * (1 + self.random.below(self.chunk / 4))),
        };
        let mut data = Vec::new();
        if procedure == CACHED {
            data.extend(seed.to_be_bytes());
        }
        if matches!(procedure, STORE | CACHED) {
            let head = data.len();
            data.resize(len, 0);
            pattern(seed, &mut data[head..]);
        }
        (xid, OutstandingCall { procedure, seed, len, began: now, written: Vec::new(), data })
    }

    /// Queues calls while credits and the conduct allow more.
    fn begin_calls(&mut self, now: Duration, busy: bool) {
        let stopped = self.has_stopped(now);
        loop {
            let Some(connection) = &self.connection else { return };
            let outstanding = connection.calls.len();
            if !busy
                || stopped
                || connection.mute
                || outstanding >= self.depth
                || connection.wire.available_credits(outstanding, connection.credits) == 0
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
                STORE | CACHED => {
                    let target = connection.wire.expose(xid, &call.data, call.len);
                    // Calls of CACHED differ only in the data of their Read chunks.
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

    /// Sends as many bytes as the conduct allows, and the empty Writes and partial messages that it requires.
    fn send(&mut self, now: Duration) {
        let stopped = self.has_stopped(now);
        let Some(connection) = &mut self.connection else { return };
        match self.conduct {
            Conduct::AnswersNoReads(Some(interval)) if now >= connection.last_empty_write + interval => {
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
            connection.allowance[1] -= connection.wire.send(connection.allowance[1].max(0.0) as usize) as f64;
        }
    }

    /// Checks that the server soon disconnects a peer that answers no Reads, even if the peer sends empty Writes.
    fn check_unanswered_reads(&self, now: Duration) {
        let since = self.connection.as_ref().and_then(|connection| connection.read_pending_since).unwrap_or(now);
        assert!(now - since < 2 * PROGRESS, "{} must not hold memory for longer", self.description());
    }
}
