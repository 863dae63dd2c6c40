//! Hostile peers: a client and a server that break rules at random.
//!
//! Their own connections may end in any way. No other peer may be affected.

use rpcrdma::Address;
use rpcrdma::fabric::iwarp::IwarpConfig;
use rpcrdma::fabric::{Access, RemoteMemory};
use rpcrdma::wire::properties::{Properties, ReverseSupport};
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, Header, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
use rpcrdma_mempool::Lent;
use rpcrdma_tests::{ECHO, LOAD, PROGRAM, REPLY, Random, STORE, VERSION, call_bytes, pattern, reply_bytes};

use crate::device::{HOUR, Kind, Medium, listener};
use crate::journal::Journal;
use crate::plan::{Plan, pick};

type RawPeer = rpcrdma_tests::RawPeer<Medium>;
type RawListener = rpcrdma_tests::RawListener<Medium>;

/// Connections that one opens, one after the other.
const LIVES: usize = 6;
/// Most buffers that one exposes.
const EXPOSURES: usize = 12;
/// Most messages that are remembered for replay.
const MEMORY: usize = 16;

/// State of either kind.
struct Mind {
    kind: Kind,
    /// Seed of its devices.
    seed: u64,
    random: Random,
    journal: Journal,
    /// The version that it sends.
    version: Version,
    revision: Revision,
    inline_threshold: usize,
    remembered: Vec<Vec<u8>>,
    exposed: Vec<Lent>,
    xid: u32,
    /// It has offered windowed credits.
    offers: bool,
}

impl Mind {
    fn new(plan: &Plan, index: usize, journal: Journal) -> Self {
        Self {
            kind: plan.kind,
            seed: plan.seed << 16 | (index as u64) << 8,
            random: Random::new(plan.seed ^ (index as u64 + 100) << 40),
            journal,
            version: Version::V2,
            revision: plan.revision,
            inline_threshold: 4096,
            remembered: Vec::new(),
            exposed: Vec::new(),
            xid: 1,
            offers: false,
        }
    }

    /// A device for one life.
    fn device(&self, lives: usize) -> Medium {
        self.kind.bare(HOUR, IwarpConfig::default(), self.seed | lives as u64)
    }

    fn listen(&self, address: &Address, lives: usize) -> State {
        State::Listening(Box::new(RawListener::bind_on(self.device(lives), address, listener(address))))
    }

    /// An extreme or random number.
    fn odd(&mut self) -> u32 {
        match self.random.below(6) {
            0 => 0,
            1 => u32::MAX,
            2 => 1 << 31,
            3 => self.random.draw() as u32,
            _ => self.random.below(300) as u32,
        }
    }

    fn segment(&mut self) -> Segment {
        Segment { handle: self.odd(), length: self.odd(), offset: u64::from(self.odd()) }
    }

    /// A mostly correct message with the given fields.
    fn message(&mut self, peer: &RawPeer, xid: u32, flags: Flags, body: Body<'_>, payload: &[u8]) -> Vec<u8> {
        let honest = !self.random.once_in(8);
        let credit = match honest {
            true if self.version == Version::V2 && !peer.windowed => peer.increment(matches!(body, Body::Error(_))),
            true => 20,
            false => self.odd(),
        };
        let received = if self.random.once_in(12) { self.odd() } else { peer.received };
        let received = (peer.windowed && self.version == Version::V2).then_some(received);
        let header = Header { xid, credit, received, flags, body };
        let mut bytes = vec![0; header.encoded_len(self.version, self.revision)];
        if header.emit(&mut bytes, self.version, self.revision).is_err() {
            bytes.clear();
        }
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Sends a CONNPROP, correct or slightly wrong.
    fn introduce(&mut self, peer: &mut RawPeer) {
        let odd = self.random.once_in(4);
        let mut value = |usual: u32| if odd && self.random.once_in(2) { self.odd() } else { usual };
        let properties = Properties {
            send_size: value(8192),
            receive_size: value(8192),
            segment_size: value(1 << 20),
            segment_count: value(16),
            reverse_support: ReverseSupport::General,
            windowed_credits: self.random.once_in(2),
            ..Properties::default()
        };
        let mut buffer = [0; 256];
        let set = properties.emit(&mut buffer, self.revision).expect("space");
        self.version = Version::V2;
        let bytes = self.message(peer, 7, Flags::NONE, Body::Connprop(set), &[]);
        self.offers = properties.windowed_credits;
        let bytes = if self.random.once_in(10) { self.spoil(bytes) } else { bytes };
        self.send(peer, "properties", &bytes);
        self.journal.count("hostile introductions", 1);
    }

    /// Usually honours the peer's properties.
    fn heed(&mut self, peer: &mut RawPeer, message: &[u8]) {
        let Ok(view) = View::check(message, self.revision) else { return };
        if let ViewBody::Connprop(set) = view.body() {
            let peers = Properties::from_set(&set, self.revision).is_ok_and(|peer| peer.windowed_credits);
            peer.windowed = peers && self.offers && !self.random.once_in(20);
        }
    }

    /// Sends a message in parts, correct or not.
    fn parts(&mut self, peer: &mut RawPeer, xid: u32, response: bool, message: &[u8]) {
        let flags = if response { Flags::RESPONSE } else { Flags::NONE };
        let more = flags.with(Flags::MORE);
        let what = self.random.below(8);
        let (one, two) = message.split_at((message.len() / 2) & !3);
        let mut say = |mind: &mut Self, xid, flags, payload: &[u8]| {
            let bytes = mind.message(peer, xid, flags, Body::Msg(Chunks::NONE), payload);
            mind.send(peer, "a part", &bytes);
        };
        self.journal.count("hostile messages in parts", 1);
        say(self, xid, more, one);
        match what {
            // Correct.
            0 | 1 => say(self, xid, flags, two),
            // Another message in between.
            2 => {
                let other = call_bytes(xid + 1, PROGRAM, VERSION, ECHO, b"in between");
                say(self, xid + 1, Flags::NONE, &other);
            }
            3 => say(self, xid ^ 5, more, two),
            // Without an end.
            4 => (0..4 + self.random.below(20)).for_each(|_| say(self, xid, more, &[9; 4000])),
            // The other direction, noise, or another type.
            5 => say(self, xid, Flags::NONE.with(if response { Flags::NONE } else { Flags::RESPONSE }), two),
            6 => {
                let noise = self.noise();
                self.send(peer, "noise between parts", &noise);
            }
            _ => {
                let body = Body::Error(ErrorBody::System);
                let bytes = self.message(peer, xid, Flags::RESPONSE, body, &[]);
                self.send(peer, "an error between parts", &bytes);
            }
        }
    }

    fn call(&mut self, peer: &RawPeer, chunks: Chunks<'_>, procedure: u32, args: &[u8]) -> Vec<u8> {
        self.xid += 1;
        let call = call_bytes(self.xid, PROGRAM, VERSION, procedure, args);
        self.message(peer, self.xid, Flags::NONE, Body::Msg(chunks), &call)
    }

    /// Corrupts a message.
    fn spoil(&mut self, mut bytes: Vec<u8>) -> Vec<u8> {
        match self.random.below(4) {
            0 => {
                let len = self.random.below(bytes.len() + 1);
                bytes.truncate(len);
            }
            1 => bytes.extend((0..self.random.below(40)).map(|n| n as u8)),
            _ => {
                for _ in 0..1 + self.random.below(4) {
                    // Only headers matter.
                    let len = bytes.len().min(100);
                    if let Some(byte) = bytes.get_mut(self.random.below(len.max(1))) {
                        *byte ^= 1 << self.random.below(8);
                    }
                }
            }
        }
        bytes
    }

    fn noise(&mut self) -> Vec<u8> {
        let len = self.random.below(self.inline_threshold);
        (0..len).map(|_| self.random.draw() as u8).collect()
    }

    fn expose(&mut self, peer: &mut RawPeer, bytes: &[u8], access: Access) -> Option<Segment> {
        if self.exposed.len() >= EXPOSURES {
            return None;
        }
        let (segment, mem) = peer.expose(bytes, access);
        self.exposed.push(mem);
        Some(segment)
    }

    fn send(&mut self, peer: &mut RawPeer, what: &'static str, bytes: &[u8]) {
        self.journal.note(format_args!("{what}: {} bytes", bytes.len()));
        self.journal.count("hostile messages", 1);
        if self.remembered.len() < MEMORY {
            self.remembered.push(bytes.to_vec());
        }
        peer.send(bytes);
    }

    /// Draws any error.
    fn error(&mut self) -> ErrorBody {
        let n = self.odd();
        pick(
            &mut self.random,
            &[
                ErrorBody::Vers { low: 1, high: 2 },
                ErrorBody::BadXdr,
                ErrorBody::InvalHtype,
                ErrorBody::InvalFlag,
                ErrorBody::ReadChunks { max: n },
                ErrorBody::WriteChunks { max: n },
                ErrorBody::Segments { max: n },
                ErrorBody::ReplyResource { length_needed: n },
                ErrorBody::ReplyResource { length_needed: 2000 },
                ErrorBody::WriteResource { chunk_index: n % 6, length_needed: n },
                ErrorBody::WriteResource { chunk_index: 1, length_needed: 1000 },
                ErrorBody::System,
            ],
        )
    }
}

pub(crate) struct HostileClient {
    mind: Mind,
    address: Address,
    peer: Option<RawPeer>,
    introduced: bool,
    lives: usize,
}

impl HostileClient {
    /// It connects in its first turn.
    pub(crate) fn new(plan: &Plan, index: usize, address: Address, journal: Journal) -> Self {
        Self { mind: Mind::new(plan, index, journal), address, peer: None, introduced: false, lives: LIVES }
    }

    pub(crate) fn turn(&mut self) {
        let Some(mut peer) = self.peer.take() else {
            if self.lives > 0 && self.mind.random.once_in(10) {
                self.lives -= 1;
                self.mind.exposed.clear();
                self.peer = RawPeer::begin_on(self.mind.device(self.lives), &self.address, b"").ok();
                self.introduced = false;
                self.mind.version = if self.mind.random.once_in(4) { Version::V1 } else { Version::V2 };
                self.mind.journal.note(format_args!("connects: {}", self.peer.is_some()));
            }
            return;
        };
        // Occasionally it polls nothing.
        if !self.mind.random.once_in(3) {
            peer.turn();
        }
        if peer.is_up() && !self.introduced {
            self.introduced = true;
            if self.mind.version == Version::V2 && !self.mind.random.once_in(4) {
                self.mind.introduce(&mut peer);
            }
        }
        while let Some(message) = peer.take_message() {
            self.mind.heed(&mut peer, &message.bytes);
            if self.mind.remembered.len() < MEMORY {
                self.mind.remembered.push(message.bytes);
            }
        }
        if peer.is_over() && self.mind.random.once_in(3) {
            return;
        }
        if peer.is_up() && self.mind.random.once_in(3) && !self.act(&mut peer) {
            return;
        }
        self.peer = Some(peer);
    }

    /// Performs a random action. Returns false once the connection is gone.
    fn act(&mut self, peer: &mut RawPeer) -> bool {
        let mind = &mut self.mind;
        let what = mind.random.below(26);
        match what {
            20 | 21 => {
                mind.xid += 1;
                let mut args = vec![0; 12 + mind.random.below(6000)];
                pattern(3, &mut args);
                let call = call_bytes(mind.xid, PROGRAM, VERSION, ECHO, &args);
                mind.parts(peer, mind.xid, false, &call);
            }
            22 => mind.introduce(peer),
            23 => {
                mind.version = if mind.version == Version::V1 { Version::V2 } else { Version::V1 };
                let mut bytes = mind.call(peer, Chunks::NONE, ECHO, b"another version!");
                if mind.random.once_in(2) {
                    bytes[7] = mind.random.below(5) as u8;
                }
                mind.send(peer, "another version", &bytes);
            }
            24 => {
                let segments = [mind.segment(), mind.segment()];
                let count = mind.random.below(3);
                let chunks = Chunks { reply: Some(&segments[..count]), ..Chunks::NONE };
                let bytes = mind.call(peer, chunks, REPLY, &2000u32.to_be_bytes());
                mind.send(peer, "a call with a Reply chunk of anything", &bytes);
            }
            25 => {
                mind.xid += 1;
                let call = call_bytes(mind.xid, PROGRAM, VERSION, ECHO, b"a long call, or not");
                let target = mind.expose(peer, &call, Access::REMOTE_READ);
                let odd = mind.random.once_in(3);
                let target = target.filter(|_| !odd).unwrap_or_else(|| mind.segment());
                let reads = [ReadSegment { position: 0, target }, ReadSegment { position: 44, target }];
                let count = mind.random.below(3);
                let body = Body::Nomsg(Chunks { reads: &reads[..count], ..Chunks::NONE });
                let bytes = mind.message(peer, mind.xid, Flags::NONE, body, &[]);
                mind.send(peer, "a long call", &bytes);
            }
            0..=4 => {
                let bytes = mind.call(peer, Chunks::NONE, ECHO, b"as it should be!");
                mind.send(peer, "a call", &bytes);
            }
            5 => {
                let bytes = mind.noise();
                mind.send(peer, "noise", &bytes);
            }
            6 | 7 => {
                let bytes = mind.call(peer, Chunks::NONE, ECHO, b"not as it should be!");
                let bytes = mind.spoil(bytes);
                mind.send(peer, "a spoilt call", &bytes);
            }
            8 if !mind.remembered.is_empty() => {
                let bytes = mind.remembered[mind.random.below(mind.remembered.len())].clone();
                mind.send(peer, "once more", &bytes);
            }
            9 => {
                let reads = [ReadSegment { position: 44, target: mind.segment() }];
                let bytes = mind.call(peer, Chunks { reads: &reads, ..Chunks::NONE }, STORE, &1u32.to_be_bytes());
                mind.send(peer, "a call with a Read chunk of anything", &bytes);
            }
            10 => {
                let segments = [mind.segment(), mind.segment()];
                let writes = WriteList { counts: &[2], segments: &segments };
                let bytes = mind.call(peer, Chunks { writes, ..Chunks::NONE }, LOAD, &[0, 0, 0, 1, 0, 0, 2, 0]);
                mind.send(peer, "a call with a Write chunk of anything", &bytes);
            }
            11 | 12 => {
                let mut data = vec![0; 1 + mind.random.below(2000)];
                pattern(1, &mut data);
                // Sometimes with the wrong access right.
                let access = pick(&mut mind.random, &[Access::REMOTE_READ, Access::REMOTE_READ, Access::REMOTE_WRITE]);
                if let Some(target) = mind.expose(peer, &data, access) {
                    let reads = [ReadSegment { position: 44, target }];
                    let inv_handle = if mind.random.once_in(2) { target.handle } else { 0 };
                    let chunks = Chunks { inv_handle, reads: &reads, ..Chunks::NONE };
                    let bytes = mind.call(peer, chunks, STORE, &1u32.to_be_bytes());
                    mind.send(peer, "a call with a Read chunk", &bytes);
                }
            }
            13 => {
                for _ in 0..10 + mind.random.below(60) {
                    let bytes = mind.call(peer, Chunks::NONE, ECHO, b"again and again.");
                    peer.send(&bytes);
                }
                mind.journal.note(format_args!("calls beyond its credits"));
            }
            14 => {
                let (error, xid) = (mind.error(), mind.odd());
                let bytes = mind.message(peer, xid, Flags::RESPONSE, Body::Error(error), &[]);
                mind.send(peer, "an error", &bytes);
            }
            15 => {
                let xid = mind.odd();
                let bytes =
                    mind.message(peer, xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b"what?"));
                mind.send(peer, "a reply", &bytes);
            }
            16 => {
                let (key, bytes) = (mind.odd(), mind.call(peer, Chunks::NONE, ECHO, b"invalidates."));
                mind.journal.note(format_args!("invalidates what it does not know"));
                peer.send_invalidating(&bytes, Some(key));
            }
            17 => {
                let bytes = mind.message(peer, 0, Flags::NONE, Body::Nomsg(Chunks::NONE), &[]);
                mind.send(peer, "a grant", &bytes);
            }
            18 => {
                let remote = RemoteMemory { rkey: mind.odd(), address: u64::from(mind.odd()) };
                mind.journal.note(format_args!("writes anywhere"));
                peer.write(b"anything", remote);
            }
            _ => {
                mind.journal.note(format_args!("vanishes"));
                return !mind.random.once_in(2);
            }
        }
        true
    }
}

pub(crate) struct HostileServer {
    mind: Mind,
    address: Address,
    state: State,
    lives: usize,
    /// Client memory that it was once given.
    known: Vec<Segment>,
}

enum State {
    Away,
    Listening(Box<RawListener>),
    Up(Box<RawPeer>),
}

impl HostileServer {
    pub(crate) fn new(plan: &Plan, address: Address, journal: Journal) -> Self {
        let mind = Mind::new(plan, 50, journal);
        let state = mind.listen(&address, LIVES);
        Self { mind, address, state, lives: LIVES, known: Vec::new() }
    }

    pub(crate) fn turn(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Away) {
            State::Away if self.lives > 0 && self.mind.random.once_in(10) => {
                self.lives -= 1;
                self.mind.listen(&self.address, self.lives)
            }
            State::Away => State::Away,
            State::Listening(listener) => match listener.try_accept() {
                Ok(peer) => {
                    self.mind.journal.note(format_args!("accepts"));
                    (self.known, self.mind.exposed) = (Vec::new(), Vec::new());
                    self.mind.version = Version::V2;
                    State::Up(Box::new(peer))
                }
                Err(listener) => State::Listening(listener),
            },
            State::Up(mut peer) => {
                peer.turn();
                let mut there = !peer.is_over();
                while let Some(message) = peer.take_message() {
                    there = there && self.answer(&mut peer, &message.bytes);
                }
                if there && self.mind.random.once_in(8) {
                    self.meddle(&mut peer);
                }
                if there { State::Up(peer) } else { State::Away }
            }
        }
    }

    /// Answers a call in a random way. Returns false once the connection is gone.
    fn answer(&mut self, peer: &mut RawPeer, call: &[u8]) -> bool {
        let mind = &mut self.mind;
        let Ok(view) = View::check(call, mind.revision) else { return true };
        let xid = view.xid();
        mind.heed(peer, call);
        mind.version = view.version();
        if matches!(view.body(), ViewBody::Connprop(_)) {
            match mind.random.below(8) {
                0 => {}
                1 => {
                    let error = mind.error();
                    let bytes = mind.message(peer, xid, Flags::RESPONSE, Body::Error(error), &[]);
                    mind.send(peer, "an error to properties", &bytes);
                }
                2 => {
                    let range = ErrorBody::Vers { low: mind.random.below(3) as u32, high: 1 };
                    let bytes = mind.message(peer, xid, Flags::NONE, Body::Error(range), &[]);
                    mind.send(peer, "versions", &bytes);
                }
                _ => mind.introduce(peer),
            }
            mind.heed(peer, call);
            return true;
        }
        let writes: Vec<Segment> = view.writes().flat_map(|chunk| chunk.segments()).collect();
        let reads: Vec<Segment> = view.reads().map(|read| read.target).collect();
        self.known.extend(writes.iter().chain(&reads));
        let counts = vec![1; writes.len()];
        let list = Chunks { writes: WriteList { counts: &counts, segments: &writes }, ..Chunks::NONE };
        let results = reply_bytes(xid, b"whatever it is");
        let good = mind.message(peer, xid, Flags::RESPONSE, Body::Msg(list), &results);
        match mind.random.below(25) {
            20 | 21 => {
                let mut results = vec![0; mind.random.below(9000)];
                pattern(5, &mut results);
                let reply = reply_bytes(xid, &results);
                mind.parts(peer, xid, true, &reply);
            }
            22 | 23 => {
                // A long reply into the offered Reply chunk, or into none.
                let room: Vec<Segment> = view.reply_chunk().map_or_else(Vec::new, |chunk| chunk.segments().collect());
                for segment in &room {
                    let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
                    peer.write(&results, remote);
                }
                let honest = mind.random.once_in(2);
                let said = if honest { results.len() as u32 } else { mind.odd() };
                let mut room: Vec<_> = room.iter().map(|s| Segment { length: said, ..*s }).collect();
                if room.is_empty() {
                    room.push(mind.segment());
                }
                let chunks = Chunks { reply: Some(&room), ..Chunks::NONE };
                let nomsg = if mind.random.once_in(4) { Body::Msg(chunks) } else { Body::Nomsg(chunks) };
                let payload = if mind.random.once_in(4) { &results[..] } else { &[] };
                let bytes = mind.message(peer, xid, Flags::RESPONSE, nomsg, payload);
                mind.journal.count("hostile long replies", 1);
                mind.send(peer, "a long reply", &bytes);
            }
            24 => mind.introduce(peer),
            // Correct.
            0..=3 if view.inv_handle() != 0 => {
                mind.journal.note(format_args!("a reply that invalidates what was offered"));
                peer.send_invalidating(&good, Some(view.inv_handle()));
            }
            0..=5 => mind.send(peer, "a reply", &good),
            6 => {
                mind.send(peer, "a reply", &good);
                mind.send(peer, "the same reply", &good);
            }
            7 => mind.journal.note(format_args!("says nothing")),
            8 => {
                let error = mind.error();
                let bytes = mind.message(peer, xid, Flags::RESPONSE, Body::Error(error), &[]);
                mind.send(peer, "an error", &bytes);
            }
            9 | 10 => {
                let bytes = mind.spoil(good);
                mind.send(peer, "a spoilt reply", &bytes);
            }
            11 => {
                let segments: Vec<_> = writes.iter().map(|s| Segment { length: s.length + 1, ..*s }).collect();
                let writes = WriteList { counts: &counts, segments: &segments };
                let body = Body::Msg(Chunks { writes, ..Chunks::NONE });
                let bytes = mind.message(peer, xid, Flags::RESPONSE, body, &results);
                mind.send(peer, "a reply that has written too much", &bytes);
            }
            12 => {
                let reads = [ReadSegment { position: 0, target: mind.segment() }];
                let body = Body::Msg(Chunks { reads: &reads, ..Chunks::NONE });
                let bytes = mind.message(peer, xid, Flags::RESPONSE, body, &results);
                mind.send(peer, "a reply with a Read list", &bytes);
            }
            13 if !self.known.is_empty() => {
                // A current or an old key.
                let key = self.known[mind.random.below(self.known.len())].handle;
                mind.journal.note(format_args!("a reply that invalidates"));
                peer.send_invalidating(&good, Some(key));
            }
            14..=16 => {
                for segment in &writes {
                    let bytes = vec![0x33; (segment.length as usize).min(3000)];
                    let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
                    peer.write(&bytes, remote);
                }
                mind.send(peer, "a reply with results", &good);
            }
            17 => {
                for n in 0..10 + mind.random.below(30) as u32 {
                    let odd = mind.odd();
                    let bytes = reply_bytes(odd, b"nobody asked");
                    let flags = if n % 2 == 0 { Flags::RESPONSE } else { Flags::NONE };
                    let bytes = mind.message(peer, odd, flags, Body::Msg(Chunks::NONE), &bytes);
                    peer.send(&bytes);
                }
                mind.journal.note(format_args!("replies that nobody asked for"));
            }
            18 => {
                let bytes = mind.noise();
                mind.send(peer, "noise", &bytes);
            }
            _ => {
                mind.journal.note(format_args!("vanishes"));
                return false;
            }
        }
        true
    }

    /// Writes to client memory that it was once given.
    fn meddle(&mut self, peer: &mut RawPeer) {
        if self.known.is_empty() {
            return;
        }
        // Sometimes the most recent.
        let last = if self.mind.random.once_in(2) { 4 } else { self.known.len() };
        let at = self.known.len() - 1 - self.mind.random.below(last.min(self.known.len()));
        let segment = self.known[at];
        let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
        self.mind.journal.note(format_args!("writes to what it once was given"));
        self.mind.journal.count("hostile writes", 1);
        peer.write(&vec![0xBA; (segment.length as usize).min(100)], remote);
    }
}
