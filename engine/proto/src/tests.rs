//! Tests of two connections joined in one function, with a simulated clock.

mod ends;
mod useless;
mod versions;

use std::collections::VecDeque;
use std::sync::Arc;

use super::*;
use crate::auth::{AuthPolicy, Handshake, MAX_OPENING, Mechanism, Role, Step};
use crate::wire::{Body, Chunks, ErrorBody, Flags, Header, HeaderType, ReadSegment, Revision, View, ViewBody};

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

/// Uses the slow path for every other message, because both paths must agree.
fn take(connection: &mut Connection, message: &[u8]) -> Result<Event, PeerFault> {
    if connection.counters().received.is_multiple_of(2)
        && let Some(incoming) = connection.decode(message)
    {
        return connection.receive(&incoming);
    }
    connection.receive(&Incoming::checked(&View::check(message, Revision::Ietf00)))
}

pub(super) fn config(scheme: CreditMode, server: bool) -> ConnConfig {
    ConnConfig {
        scheme,
        server,
        takes_calls: server,
        credits: CREDITS,
        max_calls: if server { 0 } else { 32 },
        xid_seed: 0xFFFF_FFF0,
        ..ConnConfig::default()
    }
}

impl Pair {
    /// A joined pair after version negotiation.
    fn new(scheme: CreditMode) -> Self {
        let mut pair = Self::strangers(config(scheme, false), config(scheme, true));
        if scheme != CreditMode::V1 {
            pair.turn();
            pair.largest_flight = 0;
        }
        assert_eq!(pair.client.phase(), Phase::Settled);
        pair
    }

    /// A joined pair before version negotiation.
    fn strangers(client: ConnConfig, server: ConnConfig) -> Self {
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
        while let Some(out) = from.poll_transmit(true) {
            let mut buf = vec![0; 512];
            // An RPC payload of two words: the XID, and the direction that version 1 reads.
            buf[256..264].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, u8::from(matches!(out, Outgoing::Reply(_)))]);
            let start = from.emit_before(out, &Form::default(), true, &mut buf, 256).unwrap();
            let end = if matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) { 264 } else { 256 };
            link.push_back(buf[start..end].to_vec());
            count += usize::from(out != Outgoing::Grant);
        }
        count
    }

    fn deliver_to_server(&mut self) {
        while let Some(message) = self.to_server.pop_front() {
            match take(&mut self.server, &message).unwrap() {
                Event::Call { id } => self.served.push_back(id),
                Event::Grant => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn deliver_to_client(&mut self) {
        while let Some(message) = self.to_client.pop_front() {
            match take(&mut self.client, &message).unwrap() {
                Event::Reply { token, .. } => self.answered.push(token),
                Event::Failed { token, error, .. } => self.failed.push((token, error)),
                Event::Retryable { call, token, error } => {
                    self.client.give_up(call);
                    self.failed.push((token, CallError::Transport(error)));
                }
                Event::Grant | Event::Late { .. } | Event::Settled => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn answer(&mut self, count: usize) {
        for _ in 0..count {
            let Some(id) = self.served.pop_front() else { break };
            self.server.reply(id);
        }
    }

    /// One exchange in each direction.
    fn turn(&mut self) {
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
fn many_calls_get_through_in_every_scheme_within_the_credit_limit() {
    for scheme in ALL {
        let mut pair = Pair::new(scheme);
        for token in 0..32 {
            pair.client.start_call(token, u64::MAX, 0).unwrap();
        }
        let limit = pair.client.config().max_calls;
        assert_eq!(pair.client.start_call(99, u64::MAX, 0), Err(CallError::TooManyCalls { limit }));
        let turns = (0..20).take_while(|_| {
            pair.turn();
            pair.answered.len() < 32
        });
        assert!(turns.count() < 10, "{scheme:?}");
        assert_eq!(pair.answered, (0..32).collect::<Vec<_>>(), "{scheme:?}");
        assert_eq!(pair.largest_flight as u32, CREDITS, "{scheme:?}: the credits were used, and no more");
        assert!(pair.client.is_idle() && pair.server.is_idle());
    }
}

#[test]
fn the_first_message_goes_alone() {
    for scheme in ALL {
        let mut pair = Pair::strangers(config(scheme, false), config(scheme, true));
        for token in 0..4 {
            pair.client.start_call(token, u64::MAX, 0).unwrap();
        }
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        assert_eq!(pair.to_server.len(), 1, "{scheme:?}");
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
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::strangers(config(scheme, false), config(scheme, true));
        for token in 0..4 {
            pair.client.start_call(token, u64::MAX, 0).unwrap();
        }
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        for error in [ErrorBody::BadXdr, ErrorBody::InvalHtype, ErrorBody::System] {
            let bytes = to_client(64, Flags::RESPONSE, Body::Error(error));
            take(&mut pair.client, &bytes).unwrap();
            assert_eq!(pair.client.credits().available(), 0, "{scheme:?} {error:?}");
            assert!(!pair.client.is_open() && pair.client.poll_transmit(true).is_none(), "{scheme:?}");
        }
        // Any other message grants its credits.
        let bytes = to_client(3 << 16 | 3, Flags::NONE, Body::Nomsg(Chunks::NONE));
        assert!(matches!(take(&mut pair.client, &bytes), Ok(Event::Rejected(_) | Event::Settled | Event::Call { .. })));
        assert_eq!(pair.client.credits().available(), 3, "{scheme:?}");
    }
}

#[test]
fn the_credit_word_of_an_error_is_ignored() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::new(scheme);
        for (connection, credit) in [(&mut pair.client, 0), (&mut pair.server, 1000)] {
            let before = connection.credits().available();
            let windowed = connection.credits().scheme() == CreditMode::V2Windowed;
            let body = Body::Error(ErrorBody::System);
            let header = Header { xid: 7, credit, received: windowed.then_some(1), flags: Flags::RESPONSE, body };
            let mut bytes = vec![0; header.encoded_len(Version::V2, Revision::Ietf00)];
            header.emit(&mut bytes, Version::V2, Revision::Ietf00).unwrap();
            assert!(matches!(take(connection, &bytes), Ok(Event::Rejected(_))), "{scheme:?}");
            assert_eq!(connection.credits().available(), before, "{scheme:?}");
        }
    }
}

#[test]
fn grants_ride_on_replies_and_need_no_messages_of_their_own() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::new(scheme);
        let before = pair.server.counters().grants_piggybacked;
        for token in 0..1000 {
            pair.client.start_call(token, u64::MAX, 0).unwrap();
            pair.turn();
        }
        assert_eq!(pair.answered.len(), 1000);
        assert_eq!(pair.server.counters().grants_pure, 0, "{scheme:?}");
        assert_eq!(pair.client.counters().grants_pure, 0, "{scheme:?}");
        assert_eq!(pair.server.counters().grants_piggybacked - before, 1000, "{scheme:?}");
    }
}

#[test]
fn a_silent_server_grants_receives_left_by_calls_under_way() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut pair = Pair::new(scheme);
        for token in 0..32 {
            pair.client.start_call(token, u64::MAX, 0).unwrap();
        }
        // The first reply grants credits. The server answers nothing afterwards.
        pair.turn();
        for _ in 0..10 {
            Pair::transmit(&mut pair.client, &mut pair.to_server);
            pair.deliver_to_server();
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            pair.deliver_to_client();
        }
        assert_eq!(pair.served.len() as u32, CREDITS, "{scheme:?}: each has a Receive that it was promised");
        for _ in 0..10 {
            pair.answer(3);
            pair.turn();
        }
        assert_eq!(pair.answered.len(), 32, "{scheme:?}");
    }
}

/// Errors carry no credits in version 2. A server that refuses every call must therefore send pure grants.
#[test]
fn a_server_that_refuses_everything_keeps_granting() {
    for scheme in ALL {
        let mut pair = Pair::new(scheme);
        for token in 0..100 {
            pair.client.start_call(token, u64::MAX, 0).unwrap();
            Pair::transmit(&mut pair.client, &mut pair.to_server);
            let Some(call) = pair.to_server.pop_front() else { panic!("{scheme:?}: no credit for {token}") };
            let Ok(Event::Call { id }) = take(&mut pair.server, &call) else { panic!() };
            pair.server.reply_error(id, ErrorBody::System);
            // The server transmits only after a received message.
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            pair.deliver_to_client();
        }
        assert_eq!(pair.failed.len(), 100, "{scheme:?}");
    }
}

/// The peer grants nothing, and the caller retries without limit.
#[test]
fn calls_that_end_while_they_wait_for_a_credit_leave_nothing_behind() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    for now in 1..10_000 {
        while pair.client.start_call(now, now, 0).is_ok() {}
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        while pair.client.handle_timeout(now).is_some() {}
        assert!(pair.client.calls.waiting() <= 2 * pair.client.call_slots(), "{now}");
    }
}

/// Host authentication with an opening of maximum length.
#[derive(Clone, Debug)]
struct Longest;

impl Mechanism for Longest {
    fn begin(&self, _: Role) -> Box<dyn Handshake> {
        Box::new(self.clone())
    }
}

impl Handshake for Longest {
    fn step(&mut self, _: Option<&[u8]>) -> Step {
        Step::Continue(vec![0; MAX_OPENING])
    }
}

/// Version 2 §4.3.3.
#[test]
fn the_first_message_has_at_most_1024_bytes_with_the_longest_opening() {
    let auth = AuthPolicy::Optional(Arc::new(Longest));
    let mut client = Connection::new(ConnConfig { auth, ..config(CreditMode::V2Windowed, false) });
    assert_eq!(client.poll_transmit(true), Some(Outgoing::Connprop));
    let mut buf = vec![0; 8192];
    let start = client.emit_before(Outgoing::Connprop, &Form::default(), true, &mut buf, 8192).unwrap();
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
    let Ok(Event::Call { id: first, .. }) = take(&mut server, &call) else { panic!() };
    server.forget(first);
    let Ok(Event::Call { id: second, .. }) = take(&mut server, &call) else { panic!() };
    assert_eq!(first.index(), second.index());
    server.reply(first);
    let mut buf = [0; 64];
    let out = server.poll_transmit(true).unwrap();
    assert_eq!(server.emit_plain(out, true, &mut buf, 64), None);
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// A client with version 2, incremental credits, and one outstanding call.
fn settled_client() -> (Connection, CallId) {
    let mut client = Connection::new(config(CreditMode::V2Incremental, false));
    let mut buf = [0; 512];
    let hello = client.poll_transmit(true).unwrap();
    client.emit_before(hello, &Form::default(), true, &mut buf, 512).unwrap();
    take(&mut client, &words(&[0, 2, 8 << 16 | 8, 1, 0, 0, 0, 0, 0])).unwrap();
    let call = client.start_call(1, u64::MAX, 0).unwrap();
    assert_eq!(client.poll_transmit(true), Some(Outgoing::Call(call)));
    client.emit_plain(Outgoing::Call(call), true, &mut buf, 512).unwrap();
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
    // By another reply, and by an unreadable message.
    let unreadable = words(&[3, 2, 0, 77, 1, 0, 0, 0, 0]);
    for other in [part(3, Flags::NONE), unreadable] {
        let (mut client, call) = settled_client();
        assert!(matches!(
            take(&mut client, &part(call.xid(), Flags::MORE)),
            Ok(Event::Continued { first: true, kept: true })
        ));
        assert!(matches!(take(&mut client, &other), Ok(Event::Rejected(_))));
        assert!(matches!(client.broken_off(), Some(Event::Failed { token: 1, .. })));
        assert!(client.broken_off().is_none(), "it ends once");
        assert_eq!(client.calls.len(), 0);
    }
}

#[test]
fn a_reply_without_memory_for_its_parts_fails_with_that_error() {
    let (mut client, call) = settled_client();
    take(&mut client, &part(call.xid(), Flags::MORE)).unwrap();
    client.spoil_sequence();
    let event = take(&mut client, &part(call.xid(), Flags::NONE)).unwrap();
    assert!(
        matches!(
            event,
            Event::Failed { token: 1, error: CallError::NoReplyBuffer { knob: Knob::LONG_BUFFERS, .. }, .. }
        ),
        "{event:?}"
    );
}

#[test]
fn calls_sent_on_an_earlier_connection_count_as_sent() {
    let (mut client, call) = settled_client();
    assert_eq!(client.interrupt(), [(call, true)]);
    assert_eq!(client.cancel(call, 0), Some((1, CallError::Cancelled { sent: true })));
}

#[test]
fn a_header_that_cannot_be_sent_now_is_sent_first_later() {
    let mut client = Connection::new(config(CreditMode::V2Windowed, false));
    let hello = client.poll_transmit(true);
    assert_eq!(hello, Some(Outgoing::Connprop));
    client.take_back(Outgoing::Connprop);
    assert_eq!(client.poll_transmit(true), hello);

    let mut server = Connection::new(config(CreditMode::V2Windowed, true));
    take(&mut server, &words(&[9, 2, 1, 77, 0])).unwrap();
    let error = server.poll_transmit(true).unwrap();
    assert!(matches!(error, Outgoing::Error { xid: 9, .. }), "{error:?}");
    server.take_back(error);
    assert_eq!(server.poll_transmit(true), Some(error));
}

#[test]
fn thresholds_of_version_1_come_from_private_data() {
    let private_data = PrivateData::parse(&connect_data(8192, true));
    let client = Connection::new(ConnConfig { receive_size: 1536, private_data, ..config(CreditMode::V1, false) });
    // The private data encodes multiples of 1024 bytes, so the server sends at most the rounded size.
    assert_eq!((client.terms().send_inline_threshold, client.terms().receive_inline_threshold), (1024, 1024));
}

#[test]
fn a_keep_alive_leaves_the_message_beyond_the_limit_to_grants() {
    let (mut client, _) = settled_client();
    for token in 2..=8 {
        let call = client.start_call(token, u64::MAX, 0).unwrap();
        assert_eq!(client.poll_transmit(true), Some(Outgoing::Call(call)));
        client.emit_plain(Outgoing::Call(call), true, &mut [0; 512], 512).unwrap();
    }
    client.needs_transmit(true);
    assert_eq!(client.credits().available(), 0);
    client.keep_alive();
    assert_eq!(client.poll_transmit(true), None);
}

/// A version 1 client that abandons all its calls may send as many more before the first are answered. The server
/// answers each of them.
#[test]
fn version_1_calls_up_to_twice_the_credit_limit_are_served_and_more_are_a_fault() {
    let mut server = Connection::new(config(CreditMode::V1, true));
    let receives = server.reserve() + server.credits().overcommit();
    assert!(receives > 2 * CREDITS, "Receives are kept for {receives} messages");
    let mut served = VecDeque::new();
    let call = |server: &mut Connection| match take(server, &words(&[9, 1, 1, 0, 0, 0, 0])) {
        Ok(Event::Call { id }) => Ok(id),
        Ok(event) => panic!("{event:?}"),
        Err(fault) => Err(fault),
    };
    for _ in 0..2 * CREDITS {
        served.push_back(call(&mut server).expect("a call that is tolerated"));
    }
    // Each answer frees a slot for one more call.
    for _ in 0..3 * CREDITS {
        let id = served.pop_front().expect("a call");
        server.reply(id);
        let mut link = VecDeque::new();
        Pair::transmit(&mut server, &mut link);
        let reply = link.pop_front().expect("a reply");
        assert_eq!(reply[8..12], CREDITS.to_be_bytes(), "no more is granted than ever");
        served.push_back(call(&mut server).expect("a call that is tolerated"));
    }
    served.push_back(call(&mut server).expect("one more: a count is compared when it is exceeded"));
    assert_eq!(call(&mut server), Err(PeerFault::TooManyCalls { limit: 2 * CREDITS + 1 }));
}
