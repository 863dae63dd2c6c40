//! Tests of two connections joined in one function, with a simulated clock.

mod ends;
mod unsolicited;
mod versions;

use std::collections::VecDeque;
use std::sync::Arc;

use super::*;
use crate::auth::{AuthHandshake, AuthPolicy, AuthStep, MAX_OPENING, Mechanism, Role};
use crate::wire::private_data::PrivateData;
use crate::wire::{Body, Chunks, ErrorBody, Flags, Header, HeaderType, ReadSegment, Revision, Version, View, ViewBody};

/// A client and a server, with the links between them.
struct Pair {
    client: Connection,
    server: Connection,
    to_server: VecDeque<Vec<u8>>,
    to_client: VecDeque<Vec<u8>>,
    /// Calls delivered to the server and not answered yet.
    served: VecDeque<InboundId>,
    /// Tokens of answered calls, in order.
    answered: Vec<u64>,
    failed: Vec<(u64, CallError)>,
    largest_flight: usize,
}

const CREDITS: u32 = 8;

/// The first result of a message. [`Connection::poll_event`] has further events.
#[derive(Debug, PartialEq, Eq)]
enum Handled {
    Call(InboundId),
    /// The reply to the call with this token.
    Reply(u64),
    Event(Event),
    Nothing,
}

/// Handles a message. Every other message is decoded by its layout, because both ways must agree.
fn handle(connection: &mut Connection, message: &[u8]) -> Result<Handled, PeerFault> {
    while connection.poll_event().is_some() {}
    connection.set_decode_by_layout(connection.counters().received.is_multiple_of(2));
    let header = connection.layouts().decode(message);
    Ok(match connection.handle_message(message, header.as_ref()) {
        ReceivedMessage::Call { id } => Handled::Call(id),
        ReceivedMessage::Reply { token, .. } => Handled::Reply(token),
        ReceivedMessage::Nothing => match connection.poll_event() {
            Some(Event::Fault(fault)) => return Err(fault),
            event => event.map_or(Handled::Nothing, Handled::Event),
        },
    })
}

pub(crate) fn config(credit_mode: CreditMode, server: bool) -> ConnConfig {
    ConnConfig {
        credit_mode,
        server,
        accepts_calls: server,
        credits: CREDITS,
        max_calls: if server { 0 } else { 32 },
        xid_seed: 0xFFFF_FFF0,
        ..ConnConfig::default()
    }
}

impl Pair {
    /// A joined pair after version negotiation.
    fn new(credit_mode: CreditMode) -> Self {
        let mut pair = Self::before_negotiation(config(credit_mode, false), config(credit_mode, true));
        if credit_mode != CreditMode::V1 {
            pair.round_trip();
            pair.largest_flight = 0;
        }
        assert_eq!(pair.client.session().phase(), Phase::Negotiated);
        pair
    }

    /// A joined pair before version negotiation.
    fn before_negotiation(client: ConnConfig, server: ConnConfig) -> Self {
        Self {
            client: Connection::new(client),
            server: Connection::new(server),
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            served: VecDeque::new(),
            answered: Vec::new(),
            failed: Vec::new(),
            largest_flight: 0,
        }
    }

    /// Sends all permitted messages. Returns the count without pure grants.
    fn transmit(from: &mut Connection, link: &mut VecDeque<Vec<u8>>) -> usize {
        let mut count = 0;
        while let Some(out) = from.poll_transmit() {
            let mut buf = vec![0; 512];
            // An RPC payload of two words: the XID, and the direction that version 1 reads.
            buf[256..264].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, u8::from(matches!(out, Outgoing::Reply(_)))]);
            let start = from.write_header(out, &Form::INLINE, &mut buf, 256).unwrap();
            let end = if matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) { 264 } else { 256 };
            link.push_back(buf[start..end].to_vec());
            count += usize::from(!matches!(out, Outgoing::Grant { .. }));
        }
        count
    }

    fn deliver_to_server(&mut self) {
        while let Some(message) = self.to_server.pop_front() {
            match handle(&mut self.server, &message).unwrap() {
                Handled::Call(id) => self.served.push_back(id),
                Handled::Nothing => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn deliver_to_client(&mut self) {
        while let Some(message) = self.to_client.pop_front() {
            match handle(&mut self.client, &message).unwrap() {
                Handled::Reply(token) => self.answered.push(token),
                Handled::Event(Event::Failed { token, error, .. }) => self.failed.push((token, error)),
                Handled::Event(Event::Retryable { call, token, error }) => {
                    self.client.remove_call(call);
                    self.failed.push((token, CallError::Transport(error)));
                }
                Handled::Nothing | Handled::Event(Event::Late { .. } | Event::Negotiated) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn answer(&mut self, count: usize) {
        for _ in 0..count {
            let Some(id) = self.served.pop_front() else { break };
            self.server.reply(id, false);
        }
    }

    /// One exchange in each direction.
    fn round_trip(&mut self) {
        let calls = Self::transmit(&mut self.client, &mut self.to_server);
        self.deliver_to_server();
        self.answer(usize::MAX);
        let replies = Self::transmit(&mut self.server, &mut self.to_client);
        self.largest_flight = self.largest_flight.max(calls).max(replies);
        self.deliver_to_client();
    }
}

const ALL: [CreditMode; 3] = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];

#[test]
fn many_calls_complete_within_the_credit_limit_in_every_credit_mode() {
    for credit_mode in ALL {
        let mut pair = Pair::new(credit_mode);
        for token in 0..32 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
        }
        let limit = pair.client.config().max_calls;
        assert_eq!(pair.client.start_call(99, u64::MAX, 0, false), Err(CallError::TooManyCalls { limit }));
        let turns = (0..20).take_while(|_| {
            pair.round_trip();
            pair.answered.len() < 32
        });
        assert!(turns.count() < 10, "{credit_mode:?}");
        assert_eq!(pair.answered, (0..32).collect::<Vec<_>>(), "{credit_mode:?}");
        assert_eq!(pair.largest_flight as u32, CREDITS, "{credit_mode:?}: the credits were used, and no more");
        assert!(pair.client.status().is_idle && pair.server.status().is_idle);
    }
}

#[test]
fn a_client_sends_one_message_before_the_first_answer() {
    for credit_mode in ALL {
        let mut pair = Pair::before_negotiation(config(credit_mode, false), config(credit_mode, true));
        for token in 0..4 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
        }
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        assert_eq!(pair.to_server.len(), 1, "{credit_mode:?}");
    }
}

/// Encodes a version 2 message to a client.
fn to_client(credit: u32, flags: Flags, body: Body<'_>) -> Vec<u8> {
    let header = Header { xid: 0x1234, credit, received: None, flags, body };
    let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
    header.emit(&mut bytes, Version::V2, Revision::Ietf00).unwrap();
    bytes
}

#[test]
fn an_error_grants_nothing() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::before_negotiation(config(credit_mode, false), config(credit_mode, true));
        for token in 0..4 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
        }
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        for error in [ErrorBody::BadXdr, ErrorBody::InvalHtype, ErrorBody::System] {
            let bytes = to_client(64, Flags::RESPONSE, Body::Error(error));
            handle(&mut pair.client, &bytes).unwrap();
            assert_eq!(pair.client.credits().available(), 0, "{credit_mode:?} {error:?}");
            assert!(!pair.client.session().is_open() && pair.client.poll_transmit().is_none(), "{credit_mode:?}");
        }
        // Any other message grants its credits.
        let bytes = to_client(3 << 16 | 3, Flags::NONE, Body::Nomsg(Chunks::NONE));
        assert!(matches!(
            handle(&mut pair.client, &bytes),
            Ok(Handled::Event(Event::Rejected(_) | Event::Negotiated) | Handled::Call(_))
        ));
        assert_eq!(pair.client.credits().available(), 3, "{credit_mode:?}");
    }
}

#[test]
fn the_credit_word_of_an_error_is_ignored() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::new(credit_mode);
        for (connection, credit) in [(&mut pair.client, 0), (&mut pair.server, 1000)] {
            let before = connection.credits().available();
            let windowed = connection.credits().credit_mode() == CreditMode::V2Windowed;
            let body = Body::Error(ErrorBody::System);
            let header = Header { xid: 7, credit, received: windowed.then_some(1), flags: Flags::RESPONSE, body };
            let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
            header.emit(&mut bytes, Version::V2, Revision::Ietf00).unwrap();
            assert!(matches!(handle(connection, &bytes), Ok(Handled::Event(Event::Rejected(_)))), "{credit_mode:?}");
            assert_eq!(connection.credits().available(), before, "{credit_mode:?}");
        }
    }
}

#[test]
fn replies_carry_grants_without_pure_grants() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::new(credit_mode);
        let before = pair.server.counters().grants_piggybacked;
        for token in 0..1000 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
            pair.round_trip();
        }
        assert_eq!(pair.answered.len(), 1000);
        assert_eq!(pair.server.counters().grants_pure, 0, "{credit_mode:?}");
        assert_eq!(pair.client.counters().grants_pure, 0, "{credit_mode:?}");
        assert_eq!(pair.server.counters().grants_piggybacked - before, 1000, "{credit_mode:?}");
    }
}

#[test]
fn a_server_that_does_not_reply_grants_the_remaining_receives() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::new(credit_mode);
        for token in 0..32 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
        }
        // The first reply grants credits. The server answers no call afterwards.
        pair.round_trip();
        for _ in 0..10 {
            Pair::transmit(&mut pair.client, &mut pair.to_server);
            pair.deliver_to_server();
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            pair.deliver_to_client();
        }
        assert_eq!(pair.served.len() as u32, CREDITS, "{credit_mode:?}: each call uses an announced Receive");
        for _ in 0..10 {
            pair.answer(3);
            pair.round_trip();
        }
        assert_eq!(pair.answered.len(), 32, "{credit_mode:?}");
    }
}

/// Errors carry no credits in version 2. A server that refuses every call must therefore send pure grants.
#[test]
fn a_server_that_refuses_every_call_sends_pure_grants() {
    for credit_mode in ALL {
        let mut pair = Pair::new(credit_mode);
        for token in 0..100 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
            Pair::transmit(&mut pair.client, &mut pair.to_server);
            let Some(call) = pair.to_server.pop_front() else { panic!("{credit_mode:?}: no credit for {token}") };
            let Ok(Handled::Call(id)) = handle(&mut pair.server, &call) else { panic!() };
            pair.server.reply_error(id, ErrorBody::System);
            // The server transmits only after a received message.
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            pair.deliver_to_client();
        }
        assert_eq!(pair.failed.len(), 100, "{credit_mode:?}");
    }
}

/// The peer grants nothing, and the caller retries without limit.
#[test]
fn the_queue_stays_bounded_when_waiting_calls_time_out() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    for now in 1..10_000 {
        while pair.client.start_call(now, now, 0, false).is_ok() {}
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        while pair.client.handle_timeout(now).is_some() {}
        assert!(pair.client.calls().queue_len() <= 2 * pair.client.calls().capacity(), "{now}");
    }
}

/// Host authentication with an opening of maximum length.
#[derive(Clone, Debug)]
struct LongestOpening;

impl Mechanism for LongestOpening {
    fn begin(&self, _: Role) -> Box<dyn AuthHandshake> {
        Box::new(self.clone())
    }
}

impl AuthHandshake for LongestOpening {
    fn step(&mut self, _: Option<&[u8]>) -> AuthStep {
        AuthStep::Continue(vec![0; MAX_OPENING])
    }
}

/// Version 2 §4.3.3.
#[test]
fn the_first_message_has_at_most_1024_bytes_with_the_longest_opening() {
    let auth = AuthPolicy::Optional(Arc::new(LongestOpening));
    let mut client = Connection::new(ConnConfig { auth, ..config(CreditMode::V2Windowed, false) });
    let out = client.poll_transmit().unwrap();
    let mut buf = vec![0; 8192];
    let start = client.write_header(out, &Form::INLINE, &mut buf, 8192).unwrap();
    let message = &buf[start..];
    assert!(message.len() <= FIRST_MESSAGE_LEN, "{} bytes", message.len());
    // The message contains the complete opening.
    let view = View::check(message, Revision::Ietf00).unwrap();
    assert!(message.len() > MAX_OPENING && !view.flags().contains(Flags::MORE));
}

#[test]
fn a_stale_answer_cannot_answer_a_newer_call() {
    let mut server = Connection::new(config(CreditMode::V1, true));
    let call = words(&[9, 1, 1, 0, 0, 0, 0]);
    let Ok(Handled::Call(first)) = handle(&mut server, &call) else { panic!() };
    server.forget(first);
    let Ok(Handled::Call(second)) = handle(&mut server, &call) else { panic!() };
    assert_eq!(first.index(), second.index());
    server.reply(first, false);
    let mut buf = [0; 64];
    let out = server.poll_transmit().unwrap();
    assert_eq!(server.write_header(out, &Form::INLINE, &mut buf, 64), None);
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// A client with version 2, incremental credits, and one outstanding call.
fn negotiated_client() -> (Connection, CallId) {
    let mut client = Connection::new(config(CreditMode::V2Incremental, false));
    let mut buf = [0; 512];
    let hello = client.poll_transmit().unwrap();
    client.write_header(hello, &Form::INLINE, &mut buf, 512).unwrap();
    handle(&mut client, &words(&[0, 2, 8 << 16 | 8, 1, 0, 0, 0, 0, 0])).unwrap();
    let call = client.start_call(1, u64::MAX, 0, false).unwrap().id;
    assert_eq!(client.poll_transmit(), Some(Outgoing::Call(call)));
    client.write_header(Outgoing::Call(call), &Form::INLINE, &mut buf, 512).unwrap();
    (client, call)
}

fn part(xid: u32, flags: Flags) -> Vec<u8> {
    let body = Body::Msg(Chunks::NONE);
    let header = Header { xid, credit: 0, received: None, flags: flags.with(Flags::RESPONSE), body };
    let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
    header.emit(&mut bytes, Version::V2, Revision::Ietf00).unwrap();
    bytes.extend([7; 16]);
    bytes
}

#[test]
fn a_reply_that_is_broken_off_ends_its_call() {
    // The reply is aborted by another reply, and by an unreadable message.
    let unreadable = words(&[3, 2, 0, 77, 1, 0, 0, 0, 0]);
    for other in [part(3, Flags::NONE), unreadable] {
        let (mut client, call) = negotiated_client();
        assert!(matches!(
            handle(&mut client, &part(call.xid(), Flags::MORE)),
            Ok(Handled::Event(Event::Part { first: true, payload: Some(36) }))
        ));
        assert!(matches!(handle(&mut client, &other), Ok(Handled::Event(Event::Rejected(_)))));
        assert!(matches!(client.poll_event(), Some(Event::Failed { token: 1, .. })));
        assert!(client.poll_event().is_none(), "the call ends once");
        assert_eq!(client.calls().used, 0);
    }
}

#[test]
fn a_reply_without_memory_for_its_parts_fails_with_that_error() {
    let (mut client, call) = negotiated_client();
    handle(&mut client, &part(call.xid(), Flags::MORE)).unwrap();
    client.drop_parts();
    let event = handle(&mut client, &part(call.xid(), Flags::NONE)).unwrap();
    assert!(
        matches!(
            event,
            Handled::Event(Event::Failed {
                token: 1,
                error: CallError::NoReplyBuffer { knob: Knob::LONG_BUFFERS, .. },
                ..
            })
        ),
        "{event:?}"
    );
}

#[test]
fn calls_sent_on_an_earlier_connection_count_as_sent() {
    let (mut client, call) = negotiated_client();
    assert_eq!(client.interrupt(), [(call, true)]);
    assert_eq!(client.cancel(call, 0), Some((1, CallError::Cancelled { sent: true })));
}

#[test]
fn a_message_stays_next_until_its_header_is_written() {
    let mut client = Connection::new(config(CreditMode::V2Windowed, false));
    let hello = client.poll_transmit();
    assert!(matches!(hello, Some(Outgoing::Control { .. })));
    assert_eq!(client.poll_transmit(), hello);

    let mut server = Connection::new(config(CreditMode::V2Windowed, true));
    handle(&mut server, &words(&[9, 2, 1, 77, 0])).unwrap();
    let error = server.poll_transmit().unwrap();
    assert_eq!((error, server.poll_transmit()), (Outgoing::Control { room: Outgoing::SHORT }, Some(error)));
    let mut buf = [0; Outgoing::SHORT];
    let start = server.write_header(error, &Form::INLINE, &mut buf, Outgoing::SHORT).unwrap();
    assert_eq!(View::check(&buf[start..], Revision::Ietf00).unwrap().xid(), 9);
    assert_ne!(server.poll_transmit(), Some(error));
}

/// Parts of a message are not mixed with other messages, even if there was no memory for the first part.
#[test]
fn a_message_in_parts_holds_back_others_until_its_last_part() {
    for no_memory in [false, true] {
        let (mut client, _) = negotiated_client();
        let StartedCall { id: call, may_send } = client.start_call(2, u64::MAX, 0, true).unwrap();
        assert!(may_send);
        let mut buf = [0; 512];
        if no_memory {
            assert_eq!(client.write_header(Outgoing::Call(call), &Form::PART, &mut [], 0), None);
        } else {
            client.write_header(Outgoing::Call(call), &Form::PART, &mut buf, 512).unwrap();
        }
        assert!(!client.start_call(3, u64::MAX, 0, true).unwrap().may_send);
        for form in [Form::PART, Form::INLINE] {
            assert_eq!(client.poll_transmit(), Some(Outgoing::Continue));
            client.write_header(Outgoing::Call(call), &form, &mut buf, 512).unwrap();
        }
        assert!(matches!(client.poll_transmit(), Some(Outgoing::Call(_))));
        assert_eq!(client.counters().continued_sent, if no_memory { 1 } else { 2 });
    }
}

#[test]
fn thresholds_of_version_1_come_from_private_data() {
    let private_data = PrivateData::parse(&connect_data(8192, true));
    let client = Connection::new(ConnConfig { receive_size: 1536, private_data, ..config(CreditMode::V1, false) });
    // The private data encodes multiples of 1024 bytes, so the server sends at most the rounded size.
    assert_eq!((client.terms().send_inline_threshold, client.terms().receive_inline_threshold), (1024, 1024));
}

#[test]
fn a_keep_alive_does_not_use_the_message_beyond_the_limit() {
    let (mut client, _) = negotiated_client();
    for token in 2..=8 {
        let call = client.start_call(token, u64::MAX, 0, false).unwrap().id;
        assert_eq!(client.poll_transmit(), Some(Outgoing::Call(call)));
        client.write_header(Outgoing::Call(call), &Form::INLINE, &mut [0; 512], 512).unwrap();
    }
    assert_eq!(client.credits().available(), 0);
    client.request_keep_alive();
    assert_eq!(client.poll_transmit(), None);
}

/// A version 1 client that abandons all its calls may send as many more before the first are answered. The server
/// answers each of them.
#[test]
fn version_1_calls_up_to_twice_the_credit_limit_are_served_and_more_are_a_fault() {
    let mut server = Connection::new(config(CreditMode::V1, true));
    let receives = server.status().reserve + server.credits().overcommit();
    assert!(receives > 2 * CREDITS, "Receives are kept for {receives} messages");
    let mut served = VecDeque::new();
    let call = |server: &mut Connection| match handle(server, &words(&[9, 1, 1, 0, 0, 0, 0])) {
        Ok(Handled::Call(id)) => Ok(id),
        Ok(event) => panic!("{event:?}"),
        Err(fault) => Err(fault),
    };
    for _ in 0..2 * CREDITS {
        served.push_back(call(&mut server).expect("a tolerated call"));
    }
    // Each answer frees a slot for one more call.
    for _ in 0..3 * CREDITS {
        let id = served.pop_front().expect("a call");
        server.reply(id, false);
        let mut link = VecDeque::new();
        Pair::transmit(&mut server, &mut link);
        let reply = link.pop_front().expect("a reply");
        assert_eq!(reply[8..12], CREDITS.to_be_bytes(), "the grant stays the same");
        served.push_back(call(&mut server).expect("a tolerated call"));
    }
    served.push_back(call(&mut server).expect("the one call that may exceed the limit"));
    assert_eq!(call(&mut server), Err(PeerFault::TooManyCalls { limit: 2 * CREDITS + 1 }));
}
