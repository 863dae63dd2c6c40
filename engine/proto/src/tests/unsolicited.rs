//! Reactions to invalid and unsolicited messages.

use super::*;

/// Returns a server's rejection of one raw message, and its answers.
pub(super) fn served(scheme: CreditMode, message: &[u8]) -> (Option<Rejected>, Vec<Vec<u8>>) {
    let mut server = Connection::new(config(scheme, true));
    let rejected = match take(&mut server, message).unwrap() {
        Outcome::Event(Event::Rejected(why)) => Some(why),
        _ => None,
    };
    let mut link = VecDeque::new();
    Pair::transmit(&mut server, &mut link);
    (rejected, link.into())
}

#[test]
fn nonsense_to_a_server_gets_the_protocols_own_error() {
    // Version 2: xid, vers, credit, htype, flags.
    let cases: [(&[u32], ErrorBody); 4] = [
        (&[9, 2, 1, 77, 0], ErrorBody::InvalHtype),
        (&[9, 2, 1, 0, 0x8000_0000], ErrorBody::InvalFlag),
        // The flag of windowed credits, without an offer of them.
        (&[9, 2, 1, 0, 4, 0, 0, 0, 0, 0], ErrorBody::InvalFlag),
        (&[9, 2, 1, 0, 0, 0, 5], ErrorBody::BadXdr),
    ];
    for (message, error) in cases {
        let (rejected, answer) = served(CreditMode::V2Windowed, &words(message));
        assert_eq!(rejected, Some(Rejected::Answered(error)), "{message:?}");
        let view = View::check(&answer[0], Revision::Ietf00).unwrap();
        assert_eq!((view.xid(), view.body()), (9, ViewBody::Error(error)), "{message:?}");
        // The error grants nothing and used the only credit.
        let view = View::check(&answer[1], Revision::Ietf00).unwrap();
        assert_eq!((view.xid(), view.htype(), answer.len()), (0, HeaderType::Nomsg, 2), "{message:?}");
    }
}

#[test]
fn a_client_gives_no_errors_and_ends_the_call_that_is_spoken_of() {
    let mut pair = Pair::new(CreditMode::V1);
    let call = pair.client.start_call(5, u64::MAX, 0, false).unwrap().0;
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    // A reply with an invalid Write list.
    pair.to_client.push_back(words(&[call.xid(), 1, 1, 0, 0, 5, 0]));
    pair.deliver_to_client();
    assert!(matches!(pair.failed[..], [(5, CallError::MalformedReply(_))]));
    // A well-formed header: replies have no Read list.
    let call = pair.client.start_call(6, u64::MAX, 0, false).unwrap().0;
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    let chunks = Chunks { reads: &[ReadSegment::default()], ..Chunks::NONE };
    let header = Header { xid: call.xid(), credit: 1, received: None, flags: Flags::NONE, body: Body::Msg(chunks) };
    let mut bytes = vec![0; 128];
    let len = header.emit(&mut bytes, Version::V1, Revision::Ietf00).unwrap();
    // XID and REPLY.
    pair.to_client.push_back([&bytes[..len], &words(&[call.xid(), 1])].concat());
    pair.deliver_to_client();
    assert!(matches!(pair.failed[1], (6, CallError::MalformedReply(_))));
    pair.to_server.clear();
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    assert!(pair.to_server.is_empty());
}

/// RFC 8166 §4.6: a client that takes calls also drops MSGP and DONE, although it answers invalid calls.
#[test]
fn a_client_with_services_drops_msgp_and_done_in_silence() {
    let client = ConnConfig { takes_calls: true, ..config(CreditMode::V1, false) };
    let mut pair = Pair::strangers(client, config(CreditMode::V1, true));
    let call = pair.client.start_call(5, u64::MAX, 0, false).unwrap().0;
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    pair.to_server.clear();
    for xid in [call.xid(), 1234] {
        let msgp = words(&[xid, 1, 9, 2, 4, 1024, 0, 0, 0, xid, 1, 0, 0, 0, 0]);
        for message in [msgp, words(&[xid, 1, 9, 3, 0, 0, 0])] {
            assert!(matches!(
                take(&mut pair.client, &message),
                Ok(Outcome::Event(Event::Rejected(Rejected::Unexpected)))
            ));
            Pair::transmit(&mut pair.client, &mut pair.to_server);
            assert!(pair.to_server.is_empty(), "{message:?}");
        }
    }
    assert!(pair.client.calls().is_under_way(call));
}

#[test]
fn replies_to_calls_never_made_are_counted_and_grant_nothing_in_version_1() {
    let mut pair = Pair::new(CreditMode::V1);
    let message = words(&[1234, 1, 500, 0, 0, 0, 0]);
    assert!(matches!(take(&mut pair.client, &message), Ok(Outcome::Event(Event::Rejected(Rejected::UnknownXid)))));
    assert_eq!(pair.client.credits().available(), 1);
    assert_eq!(pair.client.counters().rejected_unknown_xid, 1);
}

#[test]
fn a_windowed_header_without_the_count_is_a_fault() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    pair.client.start_call(1, u64::MAX, 0, false).unwrap();
    pair.turn();
    let fault = take(&mut pair.server, &words(&[9, 2, 1, 0, 0, 0, 0, 0, 0])).unwrap_err();
    assert_eq!(fault, PeerFault::CreditWordMissing);
    // A peer may use the layout without the count until its first windowed header.
    let mut pair = Pair::new(CreditMode::V2Windowed);
    assert!(take(&mut pair.server, &words(&[9, 2, 1, 0, 0, 0, 0, 0, 0])).is_ok());
}

#[test]
fn a_peer_that_sends_nonsense_and_reads_nothing_costs_a_bounded_amount() {
    for scheme in ALL {
        let mut server = Connection::new(config(scheme, true));
        let taken = (0..10_000).take_while(|_| take(&mut server, &words(&[9, 7, 1, 0])).is_ok()).count();
        let most = if scheme == CreditMode::V1 { 2 * CREDITS } else { CREDITS } + 1;
        assert!(taken as u32 <= most, "{scheme:?}: {taken}");
        let mut link = VecDeque::new();
        Pair::transmit(&mut server, &mut link);
        assert!(link.len() as u32 <= most, "{scheme:?}: {}", link.len());
    }
}

#[test]
fn unreadable_messages_grant_credits() {
    let (mut client, _) = settled_client();
    let before = client.credits().available();
    // An unknown type, an unknown flag, and a truncated list. The last message is an error, whose credit word is
    // ignored.
    for (message, newly) in [
        (words(&[9, 2, 16 << 16 | 1, 77, 0]), 1),
        (words(&[9, 2, 16 << 16 | 1, 0, 0x8000_0000, 0, 0, 0, 0]), 2),
        (words(&[9, 2, 16 << 16 | 1, 0, 0, 0, 5]), 3),
        (words(&[9, 2, 16 << 16 | 1, 4, 1]), 3),
    ] {
        assert!(matches!(take(&mut client, &message), Ok(Outcome::Event(Event::Rejected(_)))), "{message:?}");
        assert_eq!(client.credits().available(), before + newly, "{message:?}");
    }
}

#[test]
fn an_error_never_answers_an_error() {
    // As first messages, of supported and unsupported versions, with an unknown flag, with MORE, truncated, and with an
    // unknown code.
    let errors: [&[u32]; 7] = [
        &[9, 2, 1, 4, 1, 2],
        &[9, 2, 1, 4, 0x8000_0001, 2],
        &[9, 2, 1, 4, 3, 2],
        &[9, 2, 1, 4, 0],
        &[9, 2, 1, 4, 1, 77],
        &[9, 3, 1, 4, 2, 0, 0],
        &[9, 1, 1, 4, 77, 0, 0],
    ];
    for message in errors {
        for scheme in ALL {
            for settled in [false, true] {
                let mut server = Connection::new(config(scheme, true));
                if settled && scheme != CreditMode::V1 {
                    take(&mut server, &words(&[8, 2, 8 << 16 | 8, 77, 0])).unwrap();
                    take(&mut server, &words(&[8, 2, 8 << 16 | 8, 1, 0, 0, 0, 0, 0])).unwrap();
                }
                let mut link = VecDeque::new();
                Pair::transmit(&mut server, &mut link);
                link.clear();
                match take(&mut server, &words(message)) {
                    Ok(event) => {
                        assert!(
                            matches!(event, Outcome::Event(Event::Rejected(_))),
                            "{scheme:?} {message:?}: {event:?}"
                        )
                    }
                    Err(fault) => {
                        assert!(matches!(fault, PeerFault::VersionChanged(_)), "{message:?}: {fault}")
                    }
                }
                Pair::transmit(&mut server, &mut link);
                let said: Vec<_> = link
                    .iter()
                    .filter_map(|said| View::check(said, Revision::Ietf00).ok())
                    .map(|said| said.htype())
                    .collect();
                assert!(!said.contains(&HeaderType::Error), "{scheme:?} {message:?}: {said:?}");
            }
        }
    }
    // Between the parts of another message. That message is broken off and answered.
    let mut server = Connection::new(config(CreditMode::V2Incremental, true));
    let mut link = VecDeque::new();
    take(&mut server, &words(&[8, 2, 8 << 16 | 8, 1, 0, 0, 0, 0, 0])).unwrap();
    Pair::transmit(&mut server, &mut link);
    link.clear();
    assert!(matches!(take(&mut server, &words(&[7, 2, 0, 0, 2, 0, 0, 0, 0])), Ok(Outcome::Event(Event::Part { .. }))));
    take(&mut server, &words(&[9, 2, 0, 4, 0, 2])).unwrap();
    Pair::transmit(&mut server, &mut link);
    let errors = link.iter().map(|said| View::check(said, Revision::Ietf00).unwrap());
    let about: Vec<_> = errors.filter(|said| said.htype() == HeaderType::Error).map(|said| said.xid()).collect();
    assert_eq!(about, [7]);
}
