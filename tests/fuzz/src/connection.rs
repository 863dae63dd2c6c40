//! A whole connection: honest, corrupted and invented messages, time, application.
//!
//! Two connections run side by side. One decodes messages by their layout where possible, as a shard does. The other
//! checks each message as a whole. Both must return and send the same.

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

/// Bytes of a header and the start of an RPC message.
const ROOM: usize = 512;
const PAYLOAD: usize = 8;

/// A mechanism without secrets: the client knocks, the server sends a long request, the client answers.
#[derive(Debug)]
struct Knock;

#[derive(Debug)]
struct Door(Role, u8);

impl Mechanism for Knock {
    fn begin(&self, role: Role) -> Box<dyn AuthHandshake> {
        Box::new(Door(role, 0))
    }
}

impl AuthHandshake for Door {
    fn step(&mut self, message: Option<&[u8]>) -> AuthStep {
        self.1 += 1;
        let peer = || "peer".to_owned();
        match (self.0, self.1, message) {
            (Role::Client, 1, None) => AuthStep::Continue(vec![1]),
            // Longer than the longest first message.
            (Role::Server, 1, Some([1])) => AuthStep::Continue(vec![2; 3000]),
            (Role::Client, 2, Some([2, ..])) => AuthStep::Done { peer: peer(), last: Some(vec![3]) },
            (Role::Server, 2, Some([3])) => AuthStep::Done { peer: peer(), last: None },
            _ => AuthStep::Failed(AuthError::Malformed),
        }
    }
}

fn config(input: &mut Input<'_>, server: bool, revision: Revision) -> ConnConfig {
    let (kind, more) = (input.byte(), input.byte());
    let both = more & 1 != 0;
    ConnConfig {
        credit_mode: [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1][usize::from(kind & 3).min(2)],
        version_1: kind & 4 != 0,
        revision,
        server,
        accepts_calls: server || both,
        credits: 4 + u32::from(kind >> 6),
        reverse_credits: if both { 1 + u32::from(more >> 6) } else { 0 },
        max_calls: if !server || both { 8 } else { 0 },
        reverse: ReverseSupport::from_code(u32::from(more >> 1 & 3)),
        coalesce_grants: kind & 8 != 0,
        xid_seed: 0x0100_0000,
        receive_size: 4096,
        longest_send: 4096,
        optional_operations: more & 8 != 0,
        receive_sizes: (more & 16 != 0).then_some((1024, 16384)),
        segment_size: 1 << 20,
        segment_count: 16,
        continue_up_to: 16384,
        reassemble_up_to: 256,
        unsolicited_per_second: 1000,
        remote_invalidation: more & 32 != 0,
        auth: match kind >> 4 & 3 {
            2 => AuthPolicy::Optional(Arc::new(Knock)),
            3 => AuthPolicy::Required(Arc::new(Knock)),
            _ => AuthPolicy::Off,
        },
        private_data: None,
        decode_by_layout: true,
    }
}

/// One end with its owner's state.
struct Twins {
    fast: Connection,
    slow: Connection,
    /// Open calls, and their tokens.
    calls: Vec<(CallId, u64)>,
    served: Vec<InboundId>,
    /// A continued message, except for its last part.
    continued: Option<Outgoing>,
    /// The peer broke a rule. The counters of the offending message are then not compared.
    faulty: bool,
    tokens: u64,
}

fn same<T: PartialEq + Debug>(fast: T, slow: T) -> T {
    assert_eq!(fast, slow, "the layout decoder and the complete decoder differ");
    slow
}

impl Twins {
    fn new(config: ConnConfig) -> Self {
        let slow = Connection::new(ConnConfig { decode_by_layout: false, ..config.clone() });
        let fast = Connection::new(config);
        Self { fast, slow, calls: Vec::new(), served: Vec::new(), continued: None, faulty: false, tokens: 0 }
    }

    fn both<T: PartialEq + Debug>(&mut self, act: impl Fn(&mut Connection) -> T) -> T {
        same(act(&mut self.fast), act(&mut self.slow))
    }

    fn revision(&self) -> Revision {
        self.slow.config().revision
    }

    /// Receives a message, decoded by its layout and checked as a whole. Returns false if the connection closes.
    fn take(&mut self, message: &[u8]) -> bool {
        let received = self.both(|end| {
            let header = end.layouts().decode(message);
            end.handle_message(message, header.as_ref())
        });
        same(self.fast.terms(), self.slow.terms());
        match received {
            ReceivedMessage::Call { id } => {
                self.served.push(id);
                assert!(self.served.len() <= self.slow.inbound().capacity());
            }
            ReceivedMessage::Reply { call, token } => self.ended(call, token),
            ReceivedMessage::Nothing => {}
        }
        while let Some(event) = self.both(Connection::poll_event) {
            self.happened(event);
        }
        !self.faulty
    }

    fn happened(&mut self, event: Event) {
        match event {
            Event::Failed { call, token, .. } => self.ended(call, token),
            Event::Retryable { call, token, .. } => assert!(self.calls.contains(&(call, token))),
            Event::Fault(fault) => {
                assert!(!fault.to_string().is_empty());
                self.faulty = true;
            }
            Event::Late { call } => assert!(self.calls.iter().all(|(other, _)| *other != call)),
            Event::Changed(exchange::CharacteristicEvent::Requested(wanted)) => assert!(!wanted.is_empty()),
            _ => {}
        }
    }

    /// Each call ends once.
    fn ended(&mut self, call: CallId, token: u64) {
        let at = self.calls.iter().position(|known| *known == (call, token)).expect("a call that had not ended");
        self.calls.swap_remove(at);
    }

    fn call(&mut self, deadline: u64, now: bool) -> Option<Vec<u8>> {
        self.tokens += 1;
        let token = self.tokens;
        let (call, sent) = self.both(|end| end.start_call(token, deadline, 0, now)).ok()?;
        self.calls.push((call, token));
        sent.then(|| self.emit(Outgoing::Call(call), &Form::INLINE))
    }

    /// Answers a call of the peer.
    fn answer(&mut self, which: u8) {
        if self.served.is_empty() {
            return;
        }
        let id = self.served.swap_remove(usize::from(which >> 3) % self.served.len());
        let _ = self.both(|end| end.inbound().is_duplicate(id));
        match which & 7 {
            0 => self.both(|end| end.reply_error(id, ErrorBody::System)),
            1 => self.both(|end| end.reply_error(id, ErrorBody::ReplyResource { length_needed: 9000 })),
            2 => self.both(|end| end.forget(id)),
            _ => _ = self.both(|end| end.reply(id, false)),
        }
    }

    /// Emits all pending output as messages.
    fn transmit(&mut self, receives_ready: bool, odd: u8, mut out: impl FnMut(Vec<u8>)) {
        let most = 4 * (self.slow.inbound().capacity() + self.slow.calls().capacity()) + 100;
        self.both(|end| end.set_receives_ready(receives_ready));
        for sent in 0.. {
            assert!(sent < most, "the output never ends");
            let has_output = self.both(|end| end.has_output());
            let Some(what) = self.both(Connection::poll_transmit) else { return };
            assert!(has_output, "{what:?}");
            match what {
                Outgoing::Call(_) | Outgoing::Reply(_) if odd & 1 != 0 && self.may_continue() => {
                    self.continued = Some(what);
                    if odd & 32 == 0 {
                        out(self.emit(what, &Form::PART));
                    } else {
                        // Simulates a lack of memory for its first part.
                        assert_eq!(self.both(|end| end.write_header(what, &Form::PART, &mut [], 0)), None);
                    }
                }
                Outgoing::Continue => {
                    let what = self.continued.take().expect("something is in parts");
                    out(self.emit(what, &Form::INLINE));
                }
                Outgoing::Call(_) | Outgoing::Reply(_) => {
                    let segment = Segment { handle: 7, length: 100, offset: 4096 };
                    let (reads, writes) = ([ReadSegment { position: 64, target: segment }], [segment]);
                    let is_call = matches!(what, Outgoing::Call(_));
                    let mut form = Form::INLINE;
                    if odd & 2 != 0 && is_call {
                        form.chunks.reads = &reads;
                    }
                    if odd & 4 != 0 {
                        form.chunks.writes = WriteList { counts: &[1], segments: &writes };
                        form.external = odd & 8 != 0;
                    }
                    out(self.emit(what, &form));
                }
                // Simulates a lack of memory.
                _ if odd & 16 != 0 => return,
                _ => out(self.emit(what, &Form::INLINE)),
            }
        }
    }

    fn may_continue(&self) -> bool {
        self.slow.terms().version == Version::V2 && self.revision() == Revision::Ietf00
    }

    /// Emits a message of an end, which is valid.
    fn emit(&mut self, out: Outgoing, form: &Form<'_>) -> Vec<u8> {
        let message = self.both(|end| {
            let room = match out {
                Outgoing::Control { room } => room,
                _ => ROOM,
            };
            let mut buf = vec![0; room + PAYLOAD];
            buf[room + PAYLOAD - 1] = u8::from(matches!(out, Outgoing::Reply(_)));
            let start = end.write_header(out, form, &mut buf, room);
            let start = start.unwrap_or_else(|| panic!("{out:?} has room for {room} bytes"));
            let has_payload = matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) && !form.external;
            buf[start..if has_payload { room + PAYLOAD } else { room }].to_vec()
        });
        assert!(message.len() <= self.slow.terms().send_inline_threshold.max(1024));
        self.is_good(&message);
        message
    }

    fn is_good(&self, message: &[u8]) {
        // The answer to an unsupported version repeats that version.
        if message.len() == ERR_VERS_LEN && message[12..20] == [0, 0, 0, 4, 0, 0, 0, 1] {
            return;
        }
        let view = View::check_continued(message, self.revision()).expect("what goes out can be read");
        assert_eq!(view.version(), self.slow.terms().version);
    }

    fn time(&mut self, now: u64) {
        if self.both(|end| end.calls().next_deadline()) > now {
            assert_eq!(self.both(|end| end.handle_timeout(now)), None);
            return;
        }
        while let Some((call, token, error)) = self.both(|end| end.handle_timeout(now)) {
            assert!(!error.to_string().is_empty());
            self.ended(call, token);
        }
        assert!(self.both(|end| end.calls().next_deadline()) > now);
    }

    /// Closes the connection: every call ends.
    fn lost(&mut self) {
        while let Some((call, token, _)) = self.both(Connection::fail_next_call) {
            self.ended(call, token);
        }
        assert!(self.calls.is_empty(), "calls that never ended: {:?}", self.calls);
        assert!(self.faulty || self.fast.counters() == self.slow.counters());
    }
}

/// The events of one input.
struct Scenario<'a> {
    input: Input<'a>,
    end: Twins,
    peer: Twins,
    to_end: VecDeque<Vec<u8>>,
    now: u64,
}

impl<'a> Scenario<'a> {
    fn new(mut input: Input<'a>) -> Self {
        let start = input.byte();
        let server = start & 1 != 0;
        let revision = Revision::ALL[usize::from(start >> 1 & 1)];
        let ours = config(&mut input, server, revision);
        let theirs = config(&mut input, !server, revision);
        let (end, peer) = (Twins::new(ours), Twins::new(theirs));
        Self { input, end, peer, to_end: VecDeque::new(), now: 1 }
    }

    fn run(mut self) {
        while let Some(step) = self.input.next() {
            if !self.step(step) {
                break;
            }
        }
        self.end.lost();
        self.peer.lost();
    }

    fn step(&mut self, step: u8) -> bool {
        let with = step >> 4;
        match step & 15 {
            0..=2 => self.to_end.pop_front().is_none_or(|message| self.end.take(&message)),
            3 => {
                let Some(mut message) = self.to_end.pop_front() else { return true };
                for _ in 0..=with & 3 {
                    let (at, byte) = (usize::from(self.input.byte()), self.input.byte());
                    let len = message.len();
                    match message.get_mut(at % (len + 1)) {
                        Some(place) => *place ^= byte,
                        None => message.truncate(usize::from(byte)),
                    }
                }
                self.end.take(&message)
            }
            4 => {
                let len = usize::from(self.input.byte());
                let message = self.input.bytes(len);
                self.end.take(message)
            }
            5 => {
                let message = self.invented();
                self.end.take(&message)
            }
            6 => {
                let deadline = if with & 1 == 0 { u64::MAX } else { self.now + u64::from(self.input.byte()) };
                if let Some(message) = self.end.call(deadline, with & 2 != 0) {
                    self.deliver(&message);
                }
                true
            }
            7 => {
                if let Some(message) = self.peer.call(u64::MAX, with & 2 != 0) {
                    self.to_end.push_back(message);
                }
                true
            }
            8 => {
                let which = self.input.byte();
                self.end.answer(which);
                true
            }
            9 => {
                let which = self.input.byte();
                self.peer.answer(which);
                true
            }
            10 | 11 => {
                let odd = self.input.byte();
                let mut sent = Vec::new();
                self.end.transmit(with & 1 == 0, odd, |message| sent.push(message));
                for message in sent {
                    self.deliver(&message);
                }
                true
            }
            12 => {
                let odd = self.input.byte();
                self.peer.transmit(with & 1 == 0, odd, |message| self.to_end.push_back(message));
                // Enforces the credit limit that a real end enforces.
                self.to_end.truncate(64);
                true
            }
            13 => {
                self.now += u64::from(self.input.byte());
                self.end.time(self.now);
                true
            }
            14 => {
                self.with_call(with);
                true
            }
            _ => self.other(with),
        }
    }

    /// Delivers to the peer. Its reaction to invalid messages does not matter.
    fn deliver(&mut self, message: &[u8]) {
        if !self.peer.take(message) {
            self.peer.lost();
            let config = self.peer.slow.config().clone();
            self.peer = Twins::new(config);
        }
    }

    /// An action of the application on a call.
    fn with_call(&mut self, with: u8) {
        if self.end.calls.is_empty() {
            return;
        }
        let at = usize::from(self.input.byte()) % self.end.calls.len();
        let (call, token) = self.end.calls[at];
        let _ =
            self.end.both(|end| (end.calls().is_waiting(call), end.calls().is_under_way(call), end.calls().slot(call)));
        match with & 3 {
            0 if self.end.both(|end| end.calls().is_waiting(call))
                && self.end.slow.calls().queued().contains(&call) =>
            {
                // A queued call is not queued twice.
            }
            0 => _ = self.end.both(|end| end.retransmit(call)),
            1 if self.end.both(|end| end.calls().is_waiting(call)) => {
                assert_eq!(self.end.both(|end| end.remove_call(call)), Some(token));
                self.end.ended(call, token);
            }
            _ => {
                let (said, _) = self.end.both(|end| end.cancel(call, 0)).expect("it had not ended");
                assert_eq!(said, token);
                self.end.ended(call, token);
            }
        }
    }

    fn other(&mut self, with: u8) -> bool {
        let end = &mut self.end;
        match with {
            0 | 1 => end.both(Connection::request_keep_alive),
            2 | 3 => {
                let credits = u32::from(self.input.byte() & 31);
                end.both(|end| end.set_credit_limit(credits));
            }
            4..=6 => {
                let (kind, bytes) = (self.input.byte(), 256 * u32::from(self.input.byte()));
                let wanted = [match kind & 3 {
                    0 => Characteristic::SendSize(bytes),
                    1 => Characteristic::RemoteInvalidation(bytes & 256 != 0),
                    _ => Characteristic::ReceiveSize(bytes),
                }];
                let who = if kind & 4 == 0 { end } else { &mut self.peer };
                let _ = who.both(|end| end.changes().request(&wanted));
            }
            7 => {
                let bytes = 256 * u32::from(self.input.byte());
                let now = Characteristic::ReceiveSize(bytes);
                let _ = end.both(|end| (end.changes().announce(now, false), end.changes().guaranteed_receive_size()));
            }
            8 => {
                let bytes = 256 * u32::from(self.input.byte());
                let _ = end.both(|end| end.changes().announce(Characteristic::ReceiveSize(bytes), true));
            }
            9 => {
                let yes = self.input.byte() & 1 != 0;
                let _ = end.both(|end| end.changes().announce(Characteristic::RemoteInvalidation(yes), false));
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
                self.peer.lost();
                self.peer = Twins::new(self.peer.slow.config().clone());
            }
            12 => return false,
            _ => _ = end.both(|end| (end.status(), end.has_output())),
        }
        true
    }

    /// An invented message whose words roughly match the state.
    fn invented(&mut self) -> Vec<u8> {
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
        let what = self.input.byte();
        let body = match what & 7 {
            0 | 1 => Body::Msg(chunks),
            2 => Body::Nomsg(chunks),
            3 => Body::Nomsg(Chunks::NONE),
            4 if version == Version::V1 => Body::Done,
            4 => Body::Optional { opttype: u32::from(what >> 4), optinfo: self.input.bytes(12) },
            5 if version == Version::V1 => Body::Msgp { align: 0, thresh: 0, chunks },
            _ => Body::Error(match what >> 3 {
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
        header.emit(&mut message, version, Revision::Ietf00).expect("space");
        if flags.contains(Flags::MORE) && version == Version::V2 {
            message[19] |= 2;
        }
        message.extend([0, 0, 0, 0, 0, 0, 0, what >> 7]);
        message
    }
}
