//! A whole connection: valid, corrupted and fabricated messages, the time, and actions of the application.
//!
//! Each end consists of two connections with the same input. One decodes messages by their fixed layout where
//! possible, as a shard does. The other decodes each message item by item. Both must return and send the same.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;

use rpcrdma::proto::auth::{AuthError, AuthHandshake, AuthPolicy, AuthStep, Mechanism, Role};
use rpcrdma::proto::exchange::{self, Characteristic};
use rpcrdma::proto::{CallId, ConnConfig, Connection, CreditMode, Event, Form, InboundId, Outgoing, ReceivedMessage};
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma::wire::{
    Body, Chunks, ERR_VERS_LEN, ErrorBody, Flags, Header, ReadSegment, Revision, Segment, Version, View, WriteList,
};

pub fn run(data: &[u8]) {
    Scenario::new(Input(data)).run();
}

/// The bytes that select the events.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next byte; 0 after the end.
    fn byte(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        front
    }
}

/// Bytes for the transport header in front of an RPC message.
const HEADER_SPACE: usize = 512;
/// Bytes of an RPC message.
const PAYLOAD: usize = 8;

/// A mechanism without secrets: the client sends 1, the server 2 in a long message, then the client 3.
#[derive(Debug)]
struct TestMechanism;

/// A handshake of [`TestMechanism`]: the role, and the number of steps so far.
#[derive(Debug)]
struct TestHandshake(Role, u8);

impl Mechanism for TestMechanism {
    fn begin(&self, role: Role) -> Box<dyn AuthHandshake> {
        Box::new(TestHandshake(role, 0))
    }
}

impl AuthHandshake for TestHandshake {
    fn step(&mut self, message: Option<&[u8]>) -> AuthStep {
        self.1 += 1;
        let peer = || "peer".to_owned();
        match (self.0, self.1, message) {
            (Role::Client, 1, None) => AuthStep::Continue(vec![1]),
            // This message is longer than a first message may be.
            (Role::Server, 1, Some([1])) => AuthStep::Continue(vec![2; 3000]),
            (Role::Client, 2, Some([2, ..])) => AuthStep::Done { peer: peer(), last: Some(vec![3]) },
            (Role::Server, 2, Some([3])) => AuthStep::Done { peer: peer(), last: None },
            _ => AuthStep::Failed(AuthError::Malformed),
        }
    }
}

/// Chooses the configuration of an end by two bytes of the input.
fn choose_config(input: &mut Input<'_>, server: bool, revision: Revision) -> ConnConfig {
    let (mode, options) = (input.byte(), input.byte());
    let calls_both_ways = options & 1 != 0;
    ConnConfig {
        credit_mode: [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1][usize::from(mode & 3).min(2)],
        version_1: mode & 4 != 0,
        revision,
        server,
        accepts_calls: server || calls_both_ways,
        credits: 4 + u32::from(mode >> 6),
        reverse_credits: if calls_both_ways { 1 + u32::from(options >> 6) } else { 0 },
        max_calls: if !server || calls_both_ways { 8 } else { 0 },
        reverse: ReverseSupport::from_code(u32::from(options >> 1 & 3)),
        coalesce_grants: mode & 8 != 0,
        xid_seed: 0x0100_0000,
        receive_size: 4096,
        longest_send: 4096,
        optional_operations: options & 8 != 0,
        receive_sizes: (options & 16 != 0).then_some((1024, 16384)),
        segment_size: 1 << 20,
        segment_count: 16,
        continue_up_to: 16384,
        reassemble_up_to: 256,
        unsolicited_per_second: 1000,
        remote_invalidation: options & 32 != 0,
        auth: match mode >> 4 & 3 {
            2 => AuthPolicy::Optional(Arc::new(TestMechanism)),
            3 => AuthPolicy::Required(Arc::new(TestMechanism)),
            _ => AuthPolicy::Off,
        },
        private_data: None,
        decode_by_layout: true,
    }
}

/// One end: its two connections, and the state of the shard that owns them.
struct End {
    /// Decodes by fixed layouts where possible.
    fast: Connection,
    /// Decodes item by item.
    slow: Connection,
    /// Calls that have not ended, with their tokens.
    calls: Vec<(CallId, u64)>,
    /// Calls of the peer without an answer.
    served: Vec<InboundId>,
    /// The message whose first part is sent and whose last part is outstanding.
    continued: Option<Outgoing>,
    /// True once the peer has broken a rule. The counters of the two connections may then differ.
    faulty: bool,
    /// The last token given to a call.
    last_token: u64,
}

fn assert_same<T: PartialEq + Debug>(fast: T, slow: T) -> T {
    assert_eq!(fast, slow, "fast-path and complete decoding have equal results");
    slow
}

impl End {
    fn new(config: ConnConfig) -> Self {
        let slow = Connection::new(ConnConfig { decode_by_layout: false, ..config.clone() });
        let fast = Connection::new(config);
        Self { fast, slow, calls: Vec::new(), served: Vec::new(), continued: None, faulty: false, last_token: 0 }
    }

    /// Performs an action on both connections, which must have equal results.
    fn both<T: PartialEq + Debug>(&mut self, act: impl Fn(&mut Connection) -> T) -> T {
        assert_same(act(&mut self.fast), act(&mut self.slow))
    }

    fn revision(&self) -> Revision {
        self.slow.config().revision
    }

    /// Receives a message on both connections. Returns false if the connection closes.
    fn receive(&mut self, message: &[u8]) -> bool {
        let received = self.both(|end| {
            let header = end.layouts().decode(message);
            end.handle_message(message, header.as_ref())
        });
        assert_same(self.fast.terms(), self.slow.terms());
        match received {
            ReceivedMessage::Call { id } => {
                self.served.push(id);
                assert!(self.served.len() <= self.slow.inbound().capacity());
            }
            ReceivedMessage::Reply { call, token } => self.end_call(call, token),
            ReceivedMessage::Nothing => {}
        }
        while let Some(event) = self.both(Connection::poll_event) {
            self.handle_event(event);
        }
        !self.faulty
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::Failed { call, token, .. } => self.end_call(call, token),
            Event::Retryable { call, token, .. } => assert!(self.calls.contains(&(call, token))),
            Event::Fault(fault) => {
                assert!(!fault.to_string().is_empty());
                self.faulty = true;
            }
            Event::Late { call } => assert!(self.calls.iter().all(|(other, _)| *other != call)),
            Event::Changed(exchange::CharacteristicEvent::Requested(requested)) => assert!(!requested.is_empty()),
            _ => {}
        }
    }

    /// Records the end of a call. Each call ends once.
    fn end_call(&mut self, call: CallId, token: u64) {
        let at = self.calls.iter().position(|known| *known == (call, token)).expect("a call ends once");
        self.calls.swap_remove(at);
    }

    /// Starts a call. Returns its message if it is to be sent `now` and can be.
    fn start_call(&mut self, deadline: u64, now: bool) -> Option<Vec<u8>> {
        self.last_token += 1;
        let token = self.last_token;
        let started = self.both(|end| end.start_call(token, deadline, 0, now)).ok()?;
        self.calls.push((started.id, token));
        started.may_send.then(|| self.emit(Outgoing::Call(started.id), &Form::INLINE))
    }

    /// Answers a call of the peer: bits 0 to 2 of `choice` select the answer, the others the call.
    fn answer(&mut self, choice: u8) {
        if self.served.is_empty() {
            return;
        }
        let id = self.served.swap_remove(usize::from(choice >> 3) % self.served.len());
        let _ = self.both(|end| end.inbound().is_duplicate(id));
        match choice & 7 {
            0 => self.both(|end| end.reply_error(id, ErrorBody::System)),
            1 => self.both(|end| end.reply_error(id, ErrorBody::ReplyResource { length_needed: 9000 })),
            2 => self.both(|end| end.forget(id)),
            _ => _ = self.both(|end| end.reply(id, false)),
        }
    }

    /// Emits all pending output as messages. The bits of `variation` select their forms, and failures.
    fn transmit(&mut self, receives_ready: bool, variation: u8, mut out: impl FnMut(Vec<u8>)) {
        let limit = 4 * (self.slow.inbound().capacity() + self.slow.calls().capacity()) + 100;
        self.both(|end| end.set_receives_ready(receives_ready));
        for sent in 0.. {
            assert!(sent < limit, "the output ends within {limit} messages");
            let has_output = self.both(|end| end.has_output());
            let Some(outgoing) = self.both(Connection::poll_transmit) else { return };
            assert!(has_output, "has_output is true before {outgoing:?}");
            match outgoing {
                Outgoing::Call(_) | Outgoing::Reply(_) if variation & 1 != 0 && self.may_continue() => {
                    self.continued = Some(outgoing);
                    if variation & 32 == 0 {
                        out(self.emit(outgoing, &Form::PART));
                    } else {
                        // Simulates that no buffer is left for the first part.
                        assert_eq!(self.both(|end| end.write_header(outgoing, &Form::PART, &mut [], 0)), None);
                    }
                }
                Outgoing::Continue => {
                    let outgoing = self.continued.take().expect("a continued message is under way");
                    out(self.emit(outgoing, &Form::INLINE));
                }
                Outgoing::Call(_) | Outgoing::Reply(_) => {
                    let segment = Segment { handle: 7, length: 100, offset: 4096 };
                    let (reads, writes) = ([ReadSegment { position: 64, target: segment }], [segment]);
                    let is_call = matches!(outgoing, Outgoing::Call(_));
                    let mut form = Form::INLINE;
                    if variation & 2 != 0 && is_call {
                        form.chunks.reads = &reads;
                    }
                    if variation & 4 != 0 {
                        form.chunks.writes = WriteList { counts: &[1], segments: &writes };
                        form.external = variation & 8 != 0;
                    }
                    out(self.emit(outgoing, &form));
                }
                // Simulates that no buffer is left.
                _ if variation & 16 != 0 => return,
                _ => out(self.emit(outgoing, &Form::INLINE)),
            }
        }
    }

    fn may_continue(&self) -> bool {
        self.slow.terms().version == Version::V2 && self.revision() == Revision::Ietf00
    }

    /// Writes a message, and checks that it is valid.
    fn emit(&mut self, out: Outgoing, form: &Form<'_>) -> Vec<u8> {
        let message = self.both(|end| {
            let room = match out {
                Outgoing::Control { room } => room,
                _ => HEADER_SPACE,
            };
            let mut buf = vec![0; room + PAYLOAD];
            buf[room + PAYLOAD - 1] = u8::from(matches!(out, Outgoing::Reply(_)));
            let start = end.write_header(out, form, &mut buf, room);
            let start = start.unwrap_or_else(|| panic!("the header of {out:?} fits in {room} bytes"));
            let has_payload = matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) && !form.external;
            buf[start..if has_payload { room + PAYLOAD } else { room }].to_vec()
        });
        assert!(message.len() <= self.slow.terms().send_inline_threshold.max(1024));
        self.assert_valid(&message);
        message
    }

    fn assert_valid(&self, message: &[u8]) {
        // The answer to an unsupported version repeats that version.
        if message.len() == ERR_VERS_LEN && message[12..20] == [0, 0, 0, 4, 0, 0, 0, 1] {
            return;
        }
        let view = View::check_continued(message, self.revision()).expect("an emitted message is decodable");
        assert_eq!(view.version(), self.slow.terms().version);
    }

    /// Lets calls time out whose deadline is `now` or earlier.
    fn handle_timeouts(&mut self, now: u64) {
        if self.both(|end| end.calls().next_deadline()) > now {
            assert_eq!(self.both(|end| end.handle_timeout(now)), None);
            return;
        }
        while let Some((call, token, error)) = self.both(|end| end.handle_timeout(now)) {
            assert!(!error.to_string().is_empty());
            self.end_call(call, token);
        }
        assert!(self.both(|end| end.calls().next_deadline()) > now);
    }

    /// Closes the connection, which ends every call.
    fn close(&mut self) {
        while let Some((call, token, _)) = self.both(Connection::fail_next_call) {
            self.end_call(call, token);
        }
        assert!(self.calls.is_empty(), "every call ends, but these did not: {:?}", self.calls);
        assert!(self.faulty || self.fast.counters() == self.slow.counters());
    }
}

/// The events of one input.
struct Scenario<'a> {
    input: Input<'a>,
    /// The end under test, which also receives corrupted and fabricated messages.
    end: End,
    /// The other end, whose messages are valid.
    peer: End,
    /// Messages to `end` that it has not received.
    to_end: VecDeque<Vec<u8>>,
    now: u64,
}

impl<'a> Scenario<'a> {
    fn new(mut input: Input<'a>) -> Self {
        let start = input.byte();
        let server = start & 1 != 0;
        let revision = Revision::ALL[usize::from(start >> 1 & 1)];
        let ours = choose_config(&mut input, server, revision);
        let theirs = choose_config(&mut input, !server, revision);
        let (end, peer) = (End::new(ours), End::new(theirs));
        Self { input, end, peer, to_end: VecDeque::new(), now: 1 }
    }

    fn run(mut self) {
        while let Some(step) = self.input.next() {
            if !self.step(step) {
                break;
            }
        }
        self.end.close();
        self.peer.close();
    }

    /// Performs one event: bits 0 to 3 select it, the others vary it. Returns false if the connection closes.
    fn step(&mut self, step: u8) -> bool {
        let argument = step >> 4;
        match step & 15 {
            0..=2 => self.to_end.pop_front().is_none_or(|message| self.end.receive(&message)),
            3 => {
                let Some(mut message) = self.to_end.pop_front() else { return true };
                for _ in 0..=argument & 3 {
                    let (at, byte) = (usize::from(self.input.byte()), self.input.byte());
                    let len = message.len();
                    match message.get_mut(at % (len + 1)) {
                        Some(place) => *place ^= byte,
                        None => message.truncate(usize::from(byte)),
                    }
                }
                self.end.receive(&message)
            }
            4 => {
                let len = usize::from(self.input.byte());
                let message = self.input.bytes(len);
                self.end.receive(message)
            }
            5 => {
                let message = self.fabricate_message();
                self.end.receive(&message)
            }
            6 => {
                let deadline = if argument & 1 == 0 { u64::MAX } else { self.now + u64::from(self.input.byte()) };
                if let Some(message) = self.end.start_call(deadline, argument & 2 != 0) {
                    self.deliver(&message);
                }
                true
            }
            7 => {
                if let Some(message) = self.peer.start_call(u64::MAX, argument & 2 != 0) {
                    self.to_end.push_back(message);
                }
                true
            }
            8 => {
                let choice = self.input.byte();
                self.end.answer(choice);
                true
            }
            9 => {
                let choice = self.input.byte();
                self.peer.answer(choice);
                true
            }
            10 | 11 => {
                let variation = self.input.byte();
                let mut sent = Vec::new();
                self.end.transmit(argument & 1 == 0, variation, |message| sent.push(message));
                for message in sent {
                    self.deliver(&message);
                }
                true
            }
            12 => {
                let variation = self.input.byte();
                self.peer.transmit(argument & 1 == 0, variation, |message| self.to_end.push_back(message));
                // Bounds the queue, as the credit limit of a shard does.
                self.to_end.truncate(64);
                true
            }
            13 => {
                self.now += u64::from(self.input.byte());
                self.end.handle_timeouts(self.now);
                true
            }
            14 => {
                self.act_on_call(argument);
                true
            }
            _ => self.act_on_connection(argument),
        }
    }

    /// Delivers a message to the peer. If the peer closes the connection, a new peer replaces it.
    fn deliver(&mut self, message: &[u8]) {
        if !self.peer.receive(message) {
            self.peer.close();
            let config = self.peer.slow.config().clone();
            self.peer = End::new(config);
        }
    }

    /// Retransmits, removes or cancels a call, as the shard does for the application.
    fn act_on_call(&mut self, argument: u8) {
        if self.end.calls.is_empty() {
            return;
        }
        let at = usize::from(self.input.byte()) % self.end.calls.len();
        let (call, token) = self.end.calls[at];
        let _ =
            self.end.both(|end| (end.calls().is_waiting(call), end.calls().is_under_way(call), end.calls().slot(call)));
        match argument & 3 {
            0 if self.end.both(|end| end.calls().is_waiting(call))
                && self.end.slow.calls().queued().contains(&call) =>
            {
                // The call is queued already, so the shard would not retransmit it.
            }
            0 => _ = self.end.both(|end| end.retransmit(call)),
            1 if self.end.both(|end| end.calls().is_waiting(call)) => {
                assert_eq!(self.end.both(|end| end.remove_call(call)), Some(token));
                self.end.end_call(call, token);
            }
            _ => {
                let (returned, _) = self.end.both(|end| end.cancel(call, 0)).expect("the call has not ended");
                assert_eq!(returned, token);
                self.end.end_call(call, token);
            }
        }
    }

    /// Performs an action that concerns no single call. Returns false if it closes the connection.
    fn act_on_connection(&mut self, argument: u8) -> bool {
        let end = &mut self.end;
        match argument {
            0 | 1 => end.both(Connection::request_keep_alive),
            2 | 3 => {
                let credits = u32::from(self.input.byte() & 31);
                end.both(|end| end.set_credit_limit(credits));
            }
            4..=6 => {
                let (kind, bytes) = (self.input.byte(), 256 * u32::from(self.input.byte()));
                let requested = [match kind & 3 {
                    0 => Characteristic::SendSize(bytes),
                    1 => Characteristic::RemoteInvalidation(bytes & 256 != 0),
                    _ => Characteristic::ReceiveSize(bytes),
                }];
                let requester = if kind & 4 == 0 { end } else { &mut self.peer };
                let _ = requester.both(|end| end.changes().request(&requested));
            }
            7 => {
                let bytes = 256 * u32::from(self.input.byte());
                let size = Characteristic::ReceiveSize(bytes);
                let _ = end.both(|end| (end.changes().announce(size, false), end.changes().guaranteed_receive_size()));
            }
            8 => {
                let bytes = 256 * u32::from(self.input.byte());
                let _ = end.both(|end| end.changes().announce(Characteristic::ReceiveSize(bytes), true));
            }
            9 => {
                let enabled = self.input.byte() & 1 != 0;
                let _ = end.both(|end| end.changes().announce(Characteristic::RemoteInvalidation(enabled), false));
            }
            10 => end.both(Connection::drop_parts),
            11 => {
                // A new connection replaces the lost one.
                let calls = end.both(Connection::interrupt);
                assert_eq!(calls.len(), end.calls.len());
                let config = end.slow.config().clone();
                end.both(|end| end.restart(config.clone()));
                end.served.clear();
                end.continued = None;
                self.to_end.clear();
                self.peer.close();
                self.peer = End::new(self.peer.slow.config().clone());
            }
            12 => return false,
            _ => _ = end.both(|end| (end.status(), end.has_output())),
        }
        true
    }

    /// Fabricates a message whose fields are often, but not always, valid in the current state.
    fn fabricate_message(&mut self) -> Vec<u8> {
        let kind = self.input.byte();
        let version = if kind & 1 == 0 { self.end.slow.terms().version } else { Version::V2 };
        let xid = match self.input.byte() {
            0 => self.input.word(),
            at => {
                let calls = &self.end.calls;
                calls.get(usize::from(at) % (calls.len() + 1)).map_or(u32::from(at), |(call, _)| call.xid())
            }
        };
        let credit = self.input.word();
        let sent = self.end.slow.credits().sent();
        let received = (kind & 2 != 0).then(|| sent.wrapping_sub(u32::from(self.input.byte() >> 4)));
        let flags = Flags(u32::from(kind >> 2 & 3));
        let segment = Segment { handle: u32::from(kind), length: credit, offset: 0 };
        let reads = [ReadSegment { position: u32::from(self.input.byte() & 12), target: segment }; 2];
        let segments = [segment; 2];
        let chunks = Chunks {
            inv_handle: 0,
            reads: &reads[..usize::from(kind >> 4 & 1)],
            writes: WriteList { counts: &[1, 1][..usize::from(kind >> 5 & 1)], segments: &segments },
            reply: (kind & 64 != 0).then_some(&segments[..1]),
        };
        let choice = self.input.byte();
        let body = match choice & 7 {
            0 | 1 => Body::Msg(chunks),
            2 => Body::Nomsg(chunks),
            3 => Body::Nomsg(Chunks::NONE),
            4 if version == Version::V1 => Body::Done,
            4 => Body::Optional { opttype: u32::from(choice >> 4), optinfo: self.input.bytes(12) },
            5 if version == Version::V1 => Body::Msgp { align: 0, thresh: 0, chunks },
            _ => Body::Error(match choice >> 3 {
                0 => ErrorBody::Vers { low: 1, high: u32::from(kind >> 4) },
                1 => ErrorBody::ReadChunks { max: 0 },
                2 => ErrorBody::ReplyResource { length_needed: credit },
                3 => ErrorBody::InvalHtype,
                4 => ErrorBody::System,
                _ => ErrorBody::BadXdr,
            }),
        };
        // The codec emits no header of another version.
        let header = Header { xid, credit, received, flags: flags.without(Flags::MORE), body };
        let mut message = vec![0; header.encoded_len(version, Revision::Ietf00)];
        header.emit(&mut message, version, Revision::Ietf00).expect("the buffer has the header's length");
        if flags.contains(Flags::MORE) && version == Version::V2 {
            message[19] |= 2;
        }
        message.extend([0, 0, 0, 0, 0, 0, 0, choice >> 7]);
        message
    }
}
