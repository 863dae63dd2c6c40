//! Hostile peers: a client and a server that break rules at random.
//!
//! The connections of a hostile peer may end in any way, but no other peer may be affected.

use rpcrdma::Address;
use rpcrdma::fabric::iwarp::IwarpFabricConfig;
use rpcrdma::fabric::{Access, RemoteMemory};
use rpcrdma::wire::properties::{Properties, ReverseSupport};
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, Header, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList,
};
use rpcrdma_mempool::Lent;
use rpcrdma_tests::{ECHO, LOAD, PROGRAM, REPLY, Random, STORE, VERSION, call_bytes, pattern, reply_bytes};

use crate::device::{FabricKind, HOUR, Medium, listener};
use crate::journal::Journal;
use crate::plan::{Plan, pick};

type RawPeer = rpcrdma_tests::RawPeer<Medium>;
type RawListener = rpcrdma_tests::RawListener<Medium>;

/// Maximum connections of a hostile peer, one after the other.
const MAX_CONNECTIONS: usize = 6;
/// Maximum buffers that a hostile peer exposes.
const MAX_EXPOSED: usize = 12;
/// Maximum messages that a hostile peer keeps for replay.
const MAX_RECORDED: usize = 16;

/// State and messages of a hostile client or server.
struct Behaviour {
    kind: FabricKind,
    /// Seed of the peer's devices.
    seed: u64,
    random: Random,
    journal: Journal,
    /// Version of the messages that the peer sends.
    version: Version,
    revision: Revision,
    inline_threshold: usize,
    /// Messages for replay.
    recorded: Vec<Vec<u8>>,
    exposed: Vec<Lent>,
    xid: u32,
    /// Whether the peer has offered windowed credits.
    offers_windowed: bool,
}

impl Behaviour {
    fn new(plan: &Plan, index: usize, journal: Journal) -> Self {
        Self {
            kind: plan.kind,
            seed: plan.seed << 16 | (index as u64) << 8,
            random: Random::new(plan.seed ^ (index as u64 + 100) << 40),
            journal,
            version: Version::V2,
            revision: plan.revision,
            inline_threshold: 4096,
            recorded: Vec::new(),
            exposed: Vec::new(),
            xid: 1,
            offers_windowed: false,
        }
    }

    /// Opens a device for one connection.
    fn device(&self, connections_left: usize) -> Medium {
        self.kind.open_without_chaos(HOUR, IwarpFabricConfig::default(), self.seed | connections_left as u64)
    }

    fn listen(&self, address: &Address, connections_left: usize) -> State {
        State::Listening(Box::new(RawListener::bind_on(self.device(connections_left), address, listener(address))))
    }

    /// Draws a number, often an extreme one.
    fn draw_number(&mut self) -> u32 {
        match self.random.below(6) {
            0 => 0,
            1 => u32::MAX,
            2 => 1 << 31,
            3 => self.random.draw() as u32,
            _ => self.random.below(300) as u32,
        }
    }

    /// Draws the fields of a segment.
    fn draw_segment(&mut self) -> Segment {
        Segment { handle: self.draw_number(), length: self.draw_number(), offset: u64::from(self.draw_number()) }
    }

    /// Encodes a message. Its credit fields are usually correct.
    fn message(&mut self, peer: &RawPeer, xid: u32, flags: Flags, body: Body<'_>, payload: &[u8]) -> Vec<u8> {
        let valid_credit = !self.random.once_in(8);
        let credit = match valid_credit {
            true if self.version == Version::V2 && !peer.windowed => peer.increment(matches!(body, Body::Error(_))),
            true => 20,
            false => self.draw_number(),
        };
        let received = if self.random.once_in(12) { self.draw_number() } else { peer.received };
        let received = (peer.windowed && self.version == Version::V2).then_some(received);
        let header = Header { xid, credit, received, flags, body };
        let mut bytes = vec![0; header.encoded_len(self.version, self.revision)];
        if header.emit(&mut bytes, self.version, self.revision).is_err() {
            bytes.clear();
        }
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Sends a CONNPROP, which may have invalid values or be corrupted.
    fn send_connprop(&mut self, peer: &mut RawPeer) {
        let invalid = self.random.once_in(4);
        let mut value = |valid: u32| if invalid && self.random.once_in(2) { self.draw_number() } else { valid };
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
        self.offers_windowed = properties.windowed_credits;
        let bytes = if self.random.once_in(10) { self.corrupt(bytes) } else { bytes };
        self.send(peer, "properties", &bytes);
        self.journal.count("hostile CONNPROP messages", 1);
    }

    /// Switches windowed credits on or off as the CONNPROPs of both ends agree, except in one of 20 cases. Ignores
    /// other messages.
    fn apply_properties(&mut self, peer: &mut RawPeer, message: &[u8]) {
        let Ok(view) = View::check(message, self.revision) else { return };
        if let ViewBody::Connprop(set) = view.body() {
            let offered = Properties::from_set(&set, self.revision).is_ok_and(|peer| peer.windowed_credits);
            peer.windowed = offered && self.offers_windowed && !self.random.once_in(20);
        }
    }

    /// Sends a message in two parts. In six of eight cases the second part is wrong or missing.
    fn send_parts(&mut self, peer: &mut RawPeer, xid: u32, response: bool, message: &[u8]) {
        let flags = if response { Flags::RESPONSE } else { Flags::NONE };
        let more = flags.with(Flags::MORE);
        let case = self.random.below(8);
        let (first, second) = message.split_at((message.len() / 2) & !3);
        let mut send_part = |behaviour: &mut Self, xid, flags, payload: &[u8]| {
            let bytes = behaviour.message(peer, xid, flags, Body::Msg(Chunks::NONE), payload);
            behaviour.send(peer, "a part", &bytes);
        };
        self.journal.count("hostile messages in parts", 1);
        send_part(self, xid, more, first);
        match case {
            // The correct second part.
            0 | 1 => send_part(self, xid, flags, second),
            // Another call instead.
            2 => {
                let other = call_bytes(xid + 1, PROGRAM, VERSION, ECHO, b"in between");
                send_part(self, xid + 1, Flags::NONE, &other);
            }
            // Another XID.
            3 => send_part(self, xid ^ 5, more, second),
            // Many parts, none of which is the last one.
            4 => (0..4 + self.random.below(20)).for_each(|_| send_part(self, xid, more, &[9; 4000])),
            // The opposite direction.
            5 => send_part(self, xid, Flags::NONE.with(if response { Flags::NONE } else { Flags::RESPONSE }), second),
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

    /// Encodes a call with a new XID.
    fn call(&mut self, peer: &RawPeer, chunks: Chunks<'_>, procedure: u32, args: &[u8]) -> Vec<u8> {
        self.xid += 1;
        let call = call_bytes(self.xid, PROGRAM, VERSION, procedure, args);
        self.message(peer, self.xid, Flags::NONE, Body::Msg(chunks), &call)
    }

    /// Truncates a message, extends it, or flips some bits of its headers.
    fn corrupt(&mut self, mut bytes: Vec<u8>) -> Vec<u8> {
        match self.random.below(4) {
            0 => {
                let len = self.random.below(bytes.len() + 1);
                bytes.truncate(len);
            }
            1 => bytes.extend((0..self.random.below(40)).map(|n| n as u8)),
            _ => {
                for _ in 0..1 + self.random.below(4) {
                    // Without chunks, the transport and RPC headers together are shorter than 100 bytes.
                    let len = bytes.len().min(100);
                    if let Some(byte) = bytes.get_mut(self.random.below(len.max(1))) {
                        *byte ^= 1 << self.random.below(8);
                    }
                }
            }
        }
        bytes
    }

    /// Draws random bytes.
    fn noise(&mut self) -> Vec<u8> {
        let len = self.random.below(self.inline_threshold);
        (0..len).map(|_| self.random.draw() as u8).collect()
    }

    /// Exposes a copy of these bytes, unless too many are exposed.
    fn expose(&mut self, peer: &mut RawPeer, bytes: &[u8], access: Access) -> Option<Segment> {
        if self.exposed.len() >= MAX_EXPOSED {
            return None;
        }
        let (segment, mem) = peer.expose(bytes, access);
        self.exposed.push(mem);
        Some(segment)
    }

    /// Sends a message, and records it for replay.
    fn send(&mut self, peer: &mut RawPeer, description: &'static str, bytes: &[u8]) {
        self.journal.note(format_args!("{description}: {} bytes", bytes.len()));
        self.journal.count("hostile messages", 1);
        if self.recorded.len() < MAX_RECORDED {
            self.recorded.push(bytes.to_vec());
        }
        peer.send(bytes);
    }

    /// Draws an error.
    fn draw_error(&mut self) -> ErrorBody {
        let n = self.draw_number();
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
    behaviour: Behaviour,
    address: Address,
    peer: Option<RawPeer>,
    sent_connprop: bool,
    connections_left: usize,
}

impl HostileClient {
    /// Creates a client that connects in a later turn, at random.
    pub(crate) fn new(plan: &Plan, index: usize, address: Address, journal: Journal) -> Self {
        Self {
            behaviour: Behaviour::new(plan, index, journal),
            address,
            peer: None,
            sent_connprop: false,
            connections_left: MAX_CONNECTIONS,
        }
    }

    pub(crate) fn turn(&mut self) {
        let Some(mut peer) = self.peer.take() else {
            if self.connections_left > 0 && self.behaviour.random.once_in(10) {
                self.connections_left -= 1;
                self.behaviour.exposed.clear();
                self.peer = RawPeer::begin_on(self.behaviour.device(self.connections_left), &self.address, b"").ok();
                self.sent_connprop = false;
                self.behaviour.version = if self.behaviour.random.once_in(4) { Version::V1 } else { Version::V2 };
                self.behaviour.journal.note(format_args!("connects: {}", self.peer.is_some()));
            }
            return;
        };
        // One of three turns polls nothing.
        if !self.behaviour.random.once_in(3) {
            peer.turn();
        }
        if peer.is_up() && !self.sent_connprop {
            self.sent_connprop = true;
            if self.behaviour.version == Version::V2 && !self.behaviour.random.once_in(4) {
                self.behaviour.send_connprop(&mut peer);
            }
        }
        while let Some(message) = peer.take_message() {
            self.behaviour.apply_properties(&mut peer, &message.bytes);
            if self.behaviour.recorded.len() < MAX_RECORDED {
                self.behaviour.recorded.push(message.bytes);
            }
        }
        if peer.is_over() && self.behaviour.random.once_in(3) {
            return;
        }
        if peer.is_up() && self.behaviour.random.once_in(3) && !self.act(&mut peer) {
            return;
        }
        self.peer = Some(peer);
    }

    /// Performs a random action. Returns false to end the connection.
    fn act(&mut self, peer: &mut RawPeer) -> bool {
        let behaviour = &mut self.behaviour;
        let action = behaviour.random.below(26);
        match action {
            20 | 21 => {
                behaviour.xid += 1;
                let mut args = vec![0; 12 + behaviour.random.below(6000)];
                pattern(3, &mut args);
                let call = call_bytes(behaviour.xid, PROGRAM, VERSION, ECHO, &args);
                behaviour.send_parts(peer, behaviour.xid, false, &call);
            }
            22 => behaviour.send_connprop(peer),
            23 => {
                behaviour.version = if behaviour.version == Version::V1 { Version::V2 } else { Version::V1 };
                let mut bytes = behaviour.call(peer, Chunks::NONE, ECHO, b"another version!");
                if behaviour.random.once_in(2) {
                    bytes[7] = behaviour.random.below(5) as u8;
                }
                behaviour.send(peer, "another version", &bytes);
            }
            24 => {
                let segments = [behaviour.draw_segment(), behaviour.draw_segment()];
                let count = behaviour.random.below(3);
                let chunks = Chunks { reply: Some(&segments[..count]), ..Chunks::NONE };
                let bytes = behaviour.call(peer, chunks, REPLY, &2000u32.to_be_bytes());
                behaviour.send(peer, "a call with a random Reply chunk", &bytes);
            }
            25 => {
                behaviour.xid += 1;
                let call = call_bytes(behaviour.xid, PROGRAM, VERSION, ECHO, b"a long call, or not");
                let target = behaviour.expose(peer, &call, Access::REMOTE_READ);
                let invalid = behaviour.random.once_in(3);
                let target = target.filter(|_| !invalid).unwrap_or_else(|| behaviour.draw_segment());
                let reads = [ReadSegment { position: 0, target }, ReadSegment { position: 44, target }];
                let count = behaviour.random.below(3);
                let body = Body::Nomsg(Chunks { reads: &reads[..count], ..Chunks::NONE });
                let bytes = behaviour.message(peer, behaviour.xid, Flags::NONE, body, &[]);
                behaviour.send(peer, "a long call", &bytes);
            }
            0..=4 => {
                let bytes = behaviour.call(peer, Chunks::NONE, ECHO, b"as it should be!");
                behaviour.send(peer, "a call", &bytes);
            }
            5 => {
                let bytes = behaviour.noise();
                behaviour.send(peer, "noise", &bytes);
            }
            6 | 7 => {
                let bytes = behaviour.call(peer, Chunks::NONE, ECHO, b"not as it should be!");
                let bytes = behaviour.corrupt(bytes);
                behaviour.send(peer, "a corrupted call", &bytes);
            }
            8 if !behaviour.recorded.is_empty() => {
                let bytes = behaviour.recorded[behaviour.random.below(behaviour.recorded.len())].clone();
                behaviour.send(peer, "an earlier message", &bytes);
            }
            9 => {
                let reads = [ReadSegment { position: 44, target: behaviour.draw_segment() }];
                let bytes = behaviour.call(peer, Chunks { reads: &reads, ..Chunks::NONE }, STORE, &1u32.to_be_bytes());
                behaviour.send(peer, "a call with a random Read chunk", &bytes);
            }
            10 => {
                let segments = [behaviour.draw_segment(), behaviour.draw_segment()];
                let writes = WriteList { counts: &[2], segments: &segments };
                let bytes = behaviour.call(peer, Chunks { writes, ..Chunks::NONE }, LOAD, &[0, 0, 0, 1, 0, 0, 2, 0]);
                behaviour.send(peer, "a call with a random Write chunk", &bytes);
            }
            11 | 12 => {
                let mut data = vec![0; 1 + behaviour.random.below(2000)];
                pattern(1, &mut data);
                // In one of three cases, the memory has the wrong access right.
                let access =
                    pick(&mut behaviour.random, &[Access::REMOTE_READ, Access::REMOTE_READ, Access::REMOTE_WRITE]);
                if let Some(target) = behaviour.expose(peer, &data, access) {
                    let reads = [ReadSegment { position: 44, target }];
                    let inv_handle = if behaviour.random.once_in(2) { target.handle } else { 0 };
                    let chunks = Chunks { inv_handle, reads: &reads, ..Chunks::NONE };
                    let bytes = behaviour.call(peer, chunks, STORE, &1u32.to_be_bytes());
                    behaviour.send(peer, "a call with a Read chunk", &bytes);
                }
            }
            13 => {
                for _ in 0..10 + behaviour.random.below(60) {
                    let bytes = behaviour.call(peer, Chunks::NONE, ECHO, b"again and again.");
                    peer.send(&bytes);
                }
                behaviour.journal.note(format_args!("sends calls beyond its credits"));
            }
            14 => {
                let (error, xid) = (behaviour.draw_error(), behaviour.draw_number());
                let bytes = behaviour.message(peer, xid, Flags::RESPONSE, Body::Error(error), &[]);
                behaviour.send(peer, "an error", &bytes);
            }
            15 => {
                let xid = behaviour.draw_number();
                let bytes =
                    behaviour.message(peer, xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(xid, b"what?"));
                behaviour.send(peer, "a reply", &bytes);
            }
            16 => {
                let (key, bytes) = (behaviour.draw_number(), behaviour.call(peer, Chunks::NONE, ECHO, b"invalidates."));
                behaviour.journal.note(format_args!("invalidates a random handle"));
                peer.send_invalidating(&bytes, Some(key));
            }
            17 => {
                let bytes = behaviour.message(peer, 0, Flags::NONE, Body::Nomsg(Chunks::NONE), &[]);
                behaviour.send(peer, "a grant", &bytes);
            }
            18 => {
                let remote =
                    RemoteMemory { rkey: behaviour.draw_number(), address: u64::from(behaviour.draw_number()) };
                behaviour.journal.note(format_args!("writes to a random address"));
                peer.write(b"anything", remote);
            }
            _ => {
                behaviour.journal.note(format_args!("may disconnect"));
                return !behaviour.random.once_in(2);
            }
        }
        true
    }
}

pub(crate) struct HostileServer {
    behaviour: Behaviour,
    address: Address,
    state: State,
    connections_left: usize,
    /// Client memory that calls on this connection have exposed at some time.
    known: Vec<Segment>,
}

enum State {
    Disconnected,
    Listening(Box<RawListener>),
    Up(Box<RawPeer>),
}

impl HostileServer {
    pub(crate) fn new(plan: &Plan, address: Address, journal: Journal) -> Self {
        let behaviour = Behaviour::new(plan, 50, journal);
        let state = behaviour.listen(&address, MAX_CONNECTIONS);
        Self { behaviour, address, state, connections_left: MAX_CONNECTIONS, known: Vec::new() }
    }

    pub(crate) fn turn(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Disconnected) {
            State::Disconnected if self.connections_left > 0 && self.behaviour.random.once_in(10) => {
                self.connections_left -= 1;
                self.behaviour.listen(&self.address, self.connections_left)
            }
            State::Disconnected => State::Disconnected,
            State::Listening(listener) => match listener.try_accept() {
                Ok(peer) => {
                    self.behaviour.journal.note(format_args!("accepts"));
                    (self.known, self.behaviour.exposed) = (Vec::new(), Vec::new());
                    self.behaviour.version = Version::V2;
                    State::Up(Box::new(peer))
                }
                Err(listener) => State::Listening(listener),
            },
            State::Up(mut peer) => {
                peer.turn();
                let mut is_connected = !peer.is_over();
                while let Some(message) = peer.take_message() {
                    is_connected = is_connected && self.answer(&mut peer, &message.bytes);
                }
                if is_connected && self.behaviour.random.once_in(8) {
                    self.write_known_memory(&mut peer);
                }
                if is_connected { State::Up(peer) } else { State::Disconnected }
            }
        }
    }

    /// Answers a message in a random way. Returns false to end the connection.
    fn answer(&mut self, peer: &mut RawPeer, call: &[u8]) -> bool {
        let behaviour = &mut self.behaviour;
        let Ok(view) = View::check(call, behaviour.revision) else { return true };
        let xid = view.xid();
        behaviour.apply_properties(peer, call);
        behaviour.version = view.version();
        if matches!(view.body(), ViewBody::Connprop(_)) {
            match behaviour.random.below(8) {
                0 => {}
                1 => {
                    let error = behaviour.draw_error();
                    let bytes = behaviour.message(peer, xid, Flags::RESPONSE, Body::Error(error), &[]);
                    behaviour.send(peer, "an error to properties", &bytes);
                }
                2 => {
                    let range = ErrorBody::Vers { low: behaviour.random.below(3) as u32, high: 1 };
                    let bytes = behaviour.message(peer, xid, Flags::NONE, Body::Error(range), &[]);
                    behaviour.send(peer, "versions", &bytes);
                }
                _ => behaviour.send_connprop(peer),
            }
            behaviour.apply_properties(peer, call);
            return true;
        }
        let writes: Vec<Segment> = view.writes().flat_map(|chunk| chunk.segments()).collect();
        let reads: Vec<Segment> = view.reads().map(|read| read.target).collect();
        self.known.extend(writes.iter().chain(&reads));
        let counts = vec![1; writes.len()];
        let chunks = Chunks { writes: WriteList { counts: &counts, segments: &writes }, ..Chunks::NONE };
        let results = reply_bytes(xid, b"whatever it is");
        let reply = behaviour.message(peer, xid, Flags::RESPONSE, Body::Msg(chunks), &results);
        match behaviour.random.below(25) {
            20 | 21 => {
                let mut results = vec![0; behaviour.random.below(9000)];
                pattern(5, &mut results);
                let reply = reply_bytes(xid, &results);
                behaviour.send_parts(peer, xid, true, &reply);
            }
            22 | 23 => {
                // A long reply in the offered Reply chunk, or with a Reply chunk that was not offered.
                let offered: Vec<Segment> =
                    view.reply_chunk().map_or_else(Vec::new, |chunk| chunk.segments().collect());
                for segment in &offered {
                    let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
                    peer.write(&results, remote);
                }
                let valid_length = behaviour.random.once_in(2);
                let length = if valid_length { results.len() as u32 } else { behaviour.draw_number() };
                let mut segments: Vec<_> = offered.iter().map(|s| Segment { length, ..*s }).collect();
                if segments.is_empty() {
                    segments.push(behaviour.draw_segment());
                }
                let chunks = Chunks { reply: Some(&segments), ..Chunks::NONE };
                let body = if behaviour.random.once_in(4) { Body::Msg(chunks) } else { Body::Nomsg(chunks) };
                let payload = if behaviour.random.once_in(4) { &results[..] } else { &[] };
                let bytes = behaviour.message(peer, xid, Flags::RESPONSE, body, payload);
                behaviour.journal.count("hostile long replies", 1);
                behaviour.send(peer, "a long reply", &bytes);
            }
            24 => behaviour.send_connprop(peer),
            // Correct replies.
            0..=3 if view.inv_handle() != 0 => {
                behaviour.journal.note(format_args!("a reply that invalidates the offered handle"));
                peer.send_invalidating(&reply, Some(view.inv_handle()));
            }
            0..=5 => behaviour.send(peer, "a reply", &reply),
            6 => {
                behaviour.send(peer, "a reply", &reply);
                behaviour.send(peer, "the same reply", &reply);
            }
            7 => behaviour.journal.note(format_args!("does not reply")),
            8 => {
                let error = behaviour.draw_error();
                let bytes = behaviour.message(peer, xid, Flags::RESPONSE, Body::Error(error), &[]);
                behaviour.send(peer, "an error", &bytes);
            }
            9 | 10 => {
                let bytes = behaviour.corrupt(reply);
                behaviour.send(peer, "a corrupted reply", &bytes);
            }
            11 => {
                let segments: Vec<_> = writes.iter().map(|s| Segment { length: s.length + 1, ..*s }).collect();
                let writes = WriteList { counts: &counts, segments: &segments };
                let body = Body::Msg(Chunks { writes, ..Chunks::NONE });
                let bytes = behaviour.message(peer, xid, Flags::RESPONSE, body, &results);
                behaviour.send(peer, "a reply that claims to have written beyond its chunks", &bytes);
            }
            12 => {
                let reads = [ReadSegment { position: 0, target: behaviour.draw_segment() }];
                let body = Body::Msg(Chunks { reads: &reads, ..Chunks::NONE });
                let bytes = behaviour.message(peer, xid, Flags::RESPONSE, body, &results);
                behaviour.send(peer, "a reply with a Read list", &bytes);
            }
            13 if !self.known.is_empty() => {
                // The key is valid, or belongs to an earlier call.
                let key = self.known[behaviour.random.below(self.known.len())].handle;
                behaviour.journal.note(format_args!("a reply that invalidates"));
                peer.send_invalidating(&reply, Some(key));
            }
            14..=16 => {
                for segment in &writes {
                    let bytes = vec![0x33; (segment.length as usize).min(3000)];
                    let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
                    peer.write(&bytes, remote);
                }
                behaviour.send(peer, "a reply with results", &reply);
            }
            17 => {
                for n in 0..10 + behaviour.random.below(30) as u32 {
                    let unknown_xid = behaviour.draw_number();
                    let bytes = reply_bytes(unknown_xid, b"nobody asked");
                    let flags = if n % 2 == 0 { Flags::RESPONSE } else { Flags::NONE };
                    let bytes = behaviour.message(peer, unknown_xid, flags, Body::Msg(Chunks::NONE), &bytes);
                    peer.send(&bytes);
                }
                behaviour.journal.note(format_args!("unsolicited replies"));
            }
            18 => {
                let bytes = behaviour.noise();
                behaviour.send(peer, "noise", &bytes);
            }
            _ => {
                behaviour.journal.note(format_args!("disconnects"));
                return false;
            }
        }
        true
    }

    /// Writes to client memory that a call has exposed, and perhaps no longer exposes.
    fn write_known_memory(&mut self, peer: &mut RawPeer) {
        if self.known.is_empty() {
            return;
        }
        // In half of the cases, one of the last four segments.
        let count = if self.behaviour.random.once_in(2) { 4 } else { self.known.len() };
        let at = self.known.len() - 1 - self.behaviour.random.below(count.min(self.known.len()));
        let segment = self.known[at];
        let remote = RemoteMemory { rkey: segment.handle, address: segment.offset };
        self.behaviour.journal.note(format_args!("writes to memory that a call has exposed"));
        self.behaviour.journal.count("hostile writes", 1);
        peer.write(&vec![0xBA; (segment.length as usize).min(100)], remote);
    }
}
