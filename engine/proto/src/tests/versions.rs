//! Unsupported versions: the server's answer and the client's reaction.

use super::unsolicited::deliver_to_new_server;
use super::*;

#[test]
fn another_version_is_answered_in_the_layout_of_all_versions() {
    for (vers, credit_mode, low, high) in [(3, CreditMode::V2Windowed, 1, 2), (2, CreditMode::V1, 1, 1)] {
        let (rejected, answer) = deliver_to_new_server(credit_mode, &words(&[9, vers, 1, 0, 0, 0, 0, 0, 0]));
        assert_eq!(rejected, Some(RejectReason::Answered(ErrorBody::Vers { low, high })));
        // xid, the peer's version, credits, RDMA_ERROR, ERR_VERS, low, high (RFC 8166 §7).
        let mut expected = words(&[9, vers, CREDITS, 4, 1, low, high]);
        expected[8..12].copy_from_slice(&answer[0][8..12]);
        assert_eq!(answer[0], expected);
    }
}

/// RFC 8166 §4.5: an error carries credits like any reply.
#[test]
fn each_call_of_an_unsupported_version_gets_err_vers_and_its_credit_back() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let server = ConnConfig { version_1: false, ..config(credit_mode, true) };
        let mut pair = Pair::before_negotiation(config(CreditMode::V1, false), server);
        for token in 0..5 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
        }
        for token in 0..5 {
            Pair::transmit(&mut pair.client, &mut pair.to_server);
            assert_eq!(pair.to_server.len(), 1, "{credit_mode:?}: a client without a grant has one credit");
            let call = pair.to_server.pop_front().unwrap();
            let rejected = handle(&mut pair.server, &call);
            let error = ErrorBody::Vers { low: 2, high: 2 };
            assert!(
                matches!(rejected, Ok(Handled::Event(Event::Rejected(RejectReason::Answered(e)))) if e == error),
                "{rejected:?}"
            );
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            assert_eq!(pair.to_client.len(), 1, "{credit_mode:?}: a call has one answer");
            assert_eq!(pair.to_client[0][8..12], 1u32.to_be_bytes(), "{credit_mode:?}: credits granted");
            pair.deliver_to_client();
            assert_eq!(pair.failed.last(), Some(&(token, CallError::Transport(error))), "{credit_mode:?}");
        }
        // A client of version 2 then finds this server with the counts of a new connection.
        let mut new = Pair::before_negotiation(config(credit_mode, false), pair.server.config().clone());
        new.server = pair.server;
        new.client.start_call(9, u64::MAX, 0, false).unwrap();
        for _ in 0..3 {
            new.round_trip();
        }
        assert_eq!(new.answered, [9], "{credit_mode:?}");
    }
}

#[test]
fn unreadable_messages_are_answered_in_their_version() {
    let malformed = words(&[9, 1, 1, 0, 0, 0, 5]);
    let (rejected, answer) = deliver_to_new_server(CreditMode::V2Windowed, &malformed);
    assert_eq!(rejected, Some(RejectReason::Answered(ErrorBody::BadXdr)));
    // RDMA_ERROR, ERR_CHUNK, and no words of version 2.
    assert_eq!(answer, [words(&[9, 1, CREDITS, 4, 2])]);
    let (rejected, _) = deliver_to_new_server(CreditMode::V1, &words(&[9, 2, 1, 0, 0, 0, 5]));
    assert_eq!(rejected, Some(RejectReason::Answered(ErrorBody::Vers { low: 1, high: 1 })));
    let mut pair = Pair::new(CreditMode::V2Windowed);
    assert_eq!(handle(&mut pair.server, &malformed).unwrap_err(), PeerFault::VersionChanged(1));
}

#[test]
fn messages_shorter_than_a_header_are_dropped_without_an_answer() {
    for credit_mode in ALL {
        // The last message has a version, but is shorter than any call of version 1.
        for message in [&[][..], &[0], &[0; 15], &words(&[9, 1, 1, 0, 0, 0])] {
            let (rejected, answer) = deliver_to_new_server(credit_mode, message);
            assert_eq!(rejected, Some(RejectReason::TooShort));
            // A grant returns its Receive, if the credit mode has pure grants. No other answer follows.
            let views: Vec<_> = answer.iter().map(|answer| View::check(answer, Revision::Ietf00).unwrap()).collect();
            assert!(views.len() <= 1 && views.iter().all(|view| view.htype() == HeaderType::Nomsg && view.xid() == 0));
        }
    }
}

#[test]
fn grants_due_in_version_2_are_not_sent_in_version_1() {
    let mut server = Connection::new(config(CreditMode::V2Windowed, true));
    handle(&mut server, &[0; 8]).unwrap();
    assert_eq!(server.poll_transmit(), Some(Outgoing::Grant { due: true }));
    // No buffer is available for the grant. Then the client selects version 1, which has no pure grants.
    assert!(matches!(handle(&mut server, &words(&[9, 1, 1, 0, 0, 0, 0, 9, 0])), Ok(Handled::Call(_))));
    assert_eq!(server.poll_transmit(), None);
}

#[test]
fn a_changed_version_ends_the_connection() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    pair.client.start_call(1, u64::MAX, 0, false).unwrap();
    pair.round_trip();
    let fault = handle(&mut pair.server, &words(&[9, 1, 1, 0, 0, 0, 0])).unwrap_err();
    assert_eq!(fault, PeerFault::VersionChanged(1));
    // An unsupported version also ends the connection.
    let fault = handle(&mut pair.server, &words(&[9, 7, 1, 0, 0, 0, 0])).unwrap_err();
    assert_eq!(fault, PeerFault::VersionChanged(7));
}

/// A client that has sent its first message.
fn client_in_negotiation() -> Connection {
    let mut client = Connection::new(config(CreditMode::V2Windowed, false));
    Pair::transmit(&mut client, &mut VecDeque::new());
    client
}

#[test]
fn a_client_ends_when_the_server_lists_no_common_version() {
    let mut client = client_in_negotiation();
    let fault = handle(&mut client, &words(&[9, 1, 1, 4, 1, 3, 4])).unwrap_err();
    assert_eq!(fault, PeerFault::NoCommonVersion { low: 3, high: 4 });
    let mut client = client_in_negotiation();
    assert!(matches!(handle(&mut client, &words(&[9, 2, 1, 4, 1, 1, 1])), Ok(Handled::Event(Event::Negotiated))));
    assert_eq!(client.terms().version, Version::V1);
}

#[test]
fn any_range_and_version_word_of_an_err_vers_is_read() {
    // The version word is the one that the client sent, or the server's own.
    for vers in [1, 2, 3, 0x100] {
        for (low, high) in [(3, 4), (4, 4), (5, 9), (8, 8), (10, 20), (u32::MAX, u32::MAX)] {
            let fault =
                handle(&mut client_in_negotiation(), &words(&[9, vers, 0x0020_0020, 4, 1, low, high])).unwrap_err();
            assert_eq!(fault, PeerFault::NoCommonVersion { low, high }, "{vers}");
        }
        let mut client = client_in_negotiation();
        assert!(
            matches!(handle(&mut client, &words(&[9, vers, 1, 4, 1, 1, 4])), Ok(Handled::Event(Event::Negotiated))),
            "{vers}"
        );
        assert_eq!(client.terms().version, Version::V1);
        // A client of version 1 has called immediately.
        let mut client = Connection::new(config(CreditMode::V1, false));
        let call = client.start_call(5, u64::MAX, 0, false).unwrap().id;
        Pair::transmit(&mut client, &mut VecDeque::new());
        let error = CallError::Transport(ErrorBody::Vers { low: 3, high: 4 });
        let event = handle(&mut client, &words(&[call.xid(), vers, 1, 4, 1, 3, 4]));
        assert!(
            matches!(event, Ok(Handled::Event(Event::Failed { token: 5, error: e, .. })) if e == error),
            "{vers} {event:?}"
        );
        client.start_call(6, u64::MAX, 0, false).unwrap();
        assert_eq!(client.credits().available(), 1, "the answer ended the call");
    }
}

#[test]
fn an_error_to_the_first_message_only_shows_the_servers_version() {
    for (message, error) in [
        (&[9, 2, 0, 4, 1, 2][..], ErrorBody::BadXdr),
        (&[9, 2, 0, 4, 1, 10], ErrorBody::System),
        (&[9, 2, 0, 4, 1, 9, 8], ErrorBody::ReplyResource { length_needed: 8 }),
    ] {
        let mut client = client_in_negotiation();
        assert!(!client.session().has_received_version_2());
        assert!(matches!(handle(&mut client, &words(message)), Ok(Handled::Event(Event::Rejected(_)))));
        assert_eq!((client.session().phase(), client.session().first_error()), (Phase::Hello, Some(error)));
        assert!(client.session().has_received_version_2() && !client.session().is_open());
        // A grant completes the negotiation.
        let event = handle(&mut client, &words(&[0, 2, 0x0008_0008, 1, 0, 0, 0, 0, 0]));
        assert!(matches!(event, Ok(Handled::Event(Event::Negotiated))), "{event:?}");
        assert_eq!((client.session().is_open(), client.session().first_error()), (true, None));
    }
    // An unreadable message of version 2 shows the version, too, unless it is an error: a server of version 1 repeats
    // the client's version in errors.
    for (htype, received) in [(77, true), (4, false)] {
        let mut client = client_in_negotiation();
        handle(&mut client, &words(&[9, 2, 0, htype, 0])).unwrap();
        assert_eq!(client.session().has_received_version_2(), received);
    }
}

#[test]
fn a_server_that_changes_the_version_ends_the_connection() {
    for vers in [1, 7] {
        let mut pair = Pair::new(CreditMode::V2Windowed);
        let fault = handle(&mut pair.client, &words(&[9, vers, 1, 0, 0, 0, 0, 9, 1])).unwrap_err();
        assert_eq!(fault, PeerFault::VersionChanged(vers));
        // An error does not end the connection, nor does another version before the negotiation.
        let mut pair = Pair::new(CreditMode::V2Windowed);
        assert!(matches!(
            handle(&mut pair.client, &words(&[9, vers, 1, 4, 2])),
            Ok(Handled::Event(Event::Rejected(_)))
        ));
        assert!(matches!(
            handle(&mut client_in_negotiation(), &words(&[9, vers, 1, 0, 0, 0, 0, 9, 1])),
            Ok(Handled::Event(Event::Rejected(_)))
        ));
        // RFC 8166 §4.5: a client of version 1 silently discards a message of another version.
        let mut pair = Pair::new(CreditMode::V1);
        let vers = if vers == 1 { 2 } else { vers };
        assert!(matches!(
            handle(&mut pair.client, &words(&[9, vers, 1, 0, 0, 0, 0, 9, 1])),
            Ok(Handled::Event(Event::Rejected(_)))
        ));
    }
}

#[test]
fn a_version_error_after_negotiation_changes_nothing() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    let call = pair.client.start_call(5, u64::MAX, 0, false).unwrap().id;
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    let event = handle(&mut pair.client, &words(&[call.xid(), 2, 1, 4, 1, 1, 1]));
    let error = CallError::Transport(ErrorBody::Vers { low: 1, high: 1 });
    assert!(matches!(event, Ok(Handled::Event(Event::Failed { token: 5, error: e, .. })) if e == error), "{event:?}");
    assert_eq!(pair.client.terms().version, Version::V2);
}

#[test]
fn a_malformed_reply_is_not_answered() {
    // Version 2: RESPONSE is set, and the Reply chunk's word is neither 0 nor 1.
    let (rejected, answer) = deliver_to_new_server(CreditMode::V2Windowed, &words(&[9, 2, 1, 0, 1, 0, 0, 0, 5]));
    assert!(matches!(rejected, Some(RejectReason::Dropped(_))), "{rejected:?}");
    assert!(
        answer.iter().all(|answer| {
            View::check(answer, Revision::Ietf00).is_ok_and(|view| view.htype() != HeaderType::Error)
        })
    );
}
