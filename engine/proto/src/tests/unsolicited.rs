//! Reactions to invalid and unsolicited messages.

use super::*;

/// Delivers one raw message to a new server. Returns the server's rejection and answers.
pub(super) fn deliver_to_new_server(credit_mode: CreditMode, message: &[u8]) -> (Option<RejectReason>, Vec<Vec<u8>>) {
    let mut server = Connection::new(config(credit_mode, true));
    let rejected = match handle(&mut server, message).unwrap() {
        Handled::Event(Event::Rejected(why)) => Some(why),
        _ => None,
    };
    let mut link = VecDeque::new();
    Pair::transmit(&mut server, &mut link);
    (rejected, link.into())
}

#[test]
fn a_server_answers_invalid_messages_with_the_protocols_error() {
    // Version 2: xid, vers, credit, htype, flags.
    let cases: [(&[u32], ErrorBody); 4] = [
        (&[9, 2, 1, 77, 0], ErrorBody::InvalHtype),
        (&[9, 2, 1, 0, 0x8000_0000], ErrorBody::InvalFlag),
        // This is the flag of windowed credits, which were not offered.
        (&[9, 2, 1, 0, 4, 0, 0, 0, 0, 0], ErrorBody::InvalFlag),
        (&[9, 2, 1, 0, 0, 0, 5], ErrorBody::BadXdr),
    ];
    for (message, error) in cases {
        let (rejected, answer) = deliver_to_new_server(CreditMode::V2Windowed, &words(message));
        assert_eq!(rejected, Some(RejectReason::Answered(error)), "{message:?}");
        let view = View::check(&answer[0], Revision::Ietf00).unwrap();
        assert_eq!((view.xid(), view.body()), (9, ViewBody::Error(error)), "{message:?}");
        // The error grants nothing and has used the only credit, so a pure grant follows.
        let view = View::check(&answer[1], Revision::Ietf00).unwrap();
        assert_eq!((view.xid(), view.htype(), answer.len()), (0, HeaderType::Nomsg, 2), "{message:?}");
    }
}

#[test]
fn a_client_sends_no_error_and_ends_the_call_that_the_message_names() {
    let mut pair = Pair::new(CreditMode::V1);
    let call = pair.client.start_call(5, u64::MAX, 0, false).unwrap().id;
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    // A reply with an invalid Write list.
    pair.to_client.push_back(words(&[call.xid(), 1, 1, 0, 0, 5, 0]));
    pair.deliver_to_client();
    assert!(matches!(pair.failed[..], [(5, CallError::MalformedReply(_))]));
    // This header is well-formed, but replies have no Read list.
    let call = pair.client.start_call(6, u64::MAX, 0, false).unwrap().id;
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
fn a_client_with_services_drops_msgp_and_done_silently() {
    let client = ConnConfig { accepts_calls: true, ..config(CreditMode::V1, false) };
    let mut pair = Pair::before_negotiation(client, config(CreditMode::V1, true));
    let call = pair.client.start_call(5, u64::MAX, 0, false).unwrap().id;
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    pair.to_server.clear();
    for xid in [call.xid(), 1234] {
        let msgp = words(&[xid, 1, 9, 2, 4, 1024, 0, 0, 0, xid, 1, 0, 0, 0, 0]);
        for message in [msgp, words(&[xid, 1, 9, 3, 0, 0, 0])] {
            assert!(matches!(
                handle(&mut pair.client, &message),
                Ok(Handled::Event(Event::Rejected(RejectReason::Unexpected)))
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
    assert!(matches!(
        handle(&mut pair.client, &message),
        Ok(Handled::Event(Event::Rejected(RejectReason::UnknownXid)))
    ));
    assert_eq!(pair.client.credits().available(), 1);
    assert_eq!(pair.client.counters().rejected_unknown_xid, 1);
}

#[test]
fn a_windowed_header_without_the_count_is_a_fault() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    pair.client.start_call(1, u64::MAX, 0, false).unwrap();
    pair.round_trip();
    let fault = handle(&mut pair.server, &words(&[9, 2, 1, 0, 0, 0, 0, 0, 0])).unwrap_err();
    assert_eq!(fault, PeerFault::CreditWordMissing);
    // A peer may use the layout without the count until its first windowed header.
    let mut pair = Pair::new(CreditMode::V2Windowed);
    assert!(handle(&mut pair.server, &words(&[9, 2, 1, 0, 0, 0, 0, 0, 0])).is_ok());
}

#[test]
fn answers_to_invalid_messages_are_bounded_while_the_peer_reads_none() {
    for credit_mode in ALL {
        let mut server = Connection::new(config(credit_mode, true));
        let accepted = (0..10_000).take_while(|_| handle(&mut server, &words(&[9, 7, 1, 0])).is_ok()).count();
        let limit = if credit_mode == CreditMode::V1 { 2 * CREDITS } else { CREDITS } + 1;
        assert!(accepted as u32 <= limit, "{credit_mode:?}: {accepted}");
        let mut link = VecDeque::new();
        Pair::transmit(&mut server, &mut link);
        assert!(link.len() as u32 <= limit, "{credit_mode:?}: {}", link.len());
    }
}

#[test]
fn unreadable_messages_grant_credits() {
    let (mut client, _) = negotiated_client();
    let before = client.credits().available();
    // An unknown type, an unknown flag, and a truncated list. The last message is an error, whose credit word is
    // ignored.
    for (message, newly) in [
        (words(&[9, 2, 16 << 16 | 1, 77, 0]), 1),
        (words(&[9, 2, 16 << 16 | 1, 0, 0x8000_0000, 0, 0, 0, 0]), 2),
        (words(&[9, 2, 16 << 16 | 1, 0, 0, 0, 5]), 3),
        (words(&[9, 2, 16 << 16 | 1, 4, 1]), 3),
    ] {
        assert!(matches!(handle(&mut client, &message), Ok(Handled::Event(Event::Rejected(_)))), "{message:?}");
        assert_eq!(client.credits().available(), before + newly, "{message:?}");
    }
}

#[test]
fn an_error_never_answers_an_error() {
    // The errors are of supported and unsupported versions: valid, with an unknown flag, with MORE, truncated, and with
    // an unknown code. They arrive first, or after the negotiation.
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
        for credit_mode in ALL {
            for negotiated in [false, true] {
                let mut server = Connection::new(config(credit_mode, true));
                if negotiated && credit_mode != CreditMode::V1 {
                    handle(&mut server, &words(&[8, 2, 8 << 16 | 8, 77, 0])).unwrap();
                    handle(&mut server, &words(&[8, 2, 8 << 16 | 8, 1, 0, 0, 0, 0, 0])).unwrap();
                }
                // The messages that the server sends without the error are discarded.
                let mut link = VecDeque::new();
                Pair::transmit(&mut server, &mut link);
                link.clear();
                match handle(&mut server, &words(message)) {
                    Ok(event) => {
                        assert!(
                            matches!(event, Handled::Event(Event::Rejected(_))),
                            "{credit_mode:?} {message:?}: {event:?}"
                        )
                    }
                    Err(fault) => {
                        assert!(matches!(fault, PeerFault::VersionChanged(_)), "{message:?}: {fault}")
                    }
                }
                // The messages after the error may be of any type except ERROR.
                Pair::transmit(&mut server, &mut link);
                let types: Vec<_> = link
                    .iter()
                    .filter_map(|message| View::check(message, Revision::Ietf00).ok())
                    .map(|view| view.htype())
                    .collect();
                assert!(!types.contains(&HeaderType::Error), "{credit_mode:?} {message:?}: {types:?}");
            }
        }
    }
    // An error between the parts of another message ends that message. Only that message is answered.
    let mut server = Connection::new(config(CreditMode::V2Incremental, true));
    let mut link = VecDeque::new();
    handle(&mut server, &words(&[8, 2, 8 << 16 | 8, 1, 0, 0, 0, 0, 0])).unwrap();
    Pair::transmit(&mut server, &mut link);
    link.clear();
    assert!(matches!(
        handle(&mut server, &words(&[7, 2, 0, 0, 2, 0, 0, 0, 0])),
        Ok(Handled::Event(Event::Part { .. }))
    ));
    handle(&mut server, &words(&[9, 2, 0, 4, 0, 2])).unwrap();
    Pair::transmit(&mut server, &mut link);
    let errors = link.iter().map(|message| View::check(message, Revision::Ietf00).unwrap());
    let answered: Vec<_> = errors.filter(|view| view.htype() == HeaderType::Error).map(|view| view.xid()).collect();
    assert_eq!(answered, [7]);
}
