use super::*;

/// Sends a message while Receives for the whole credit limit are available.
fn send(credits: &mut Credits) -> CreditWords {
    let window = credits.credit_limit();
    credits.on_send(true, Some(window))
}

#[test]
fn exceeding_the_announced_limit_is_a_fault_immediately() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut credits = Credits::new(credit_mode, true, 4, true);
        let received = (credit_mode == CreditMode::V2Windowed).then_some(0);
        let words = CreditWords { credit: 1, received };
        // The first message uses the initial credit. The second one is accepted, because a Receive is kept for a pure
        // grant.
        assert!(credits.on_receive(words, true).is_ok());
        assert!(credits.on_receive(words, true).is_ok());
        let fault = credits.on_receive(words, true).unwrap_err();
        assert!(matches!(fault, PeerFault::CreditsExceeded { received: 3, limit: 1 }), "{fault}");
    }
}

#[test]
fn acknowledging_unsent_messages_is_a_fault() {
    let mut credits = Credits::new(CreditMode::V2Windowed, false, 4, true);
    send(&mut credits);
    let words = CreditWords { credit: 4, received: Some(2) };
    assert!(matches!(
        credits.on_receive(words, true),
        Err(PeerFault::AcknowledgedTooMuch { acknowledged: 2, sent: 1 })
    ));
}

#[test]
fn increments_beyond_the_valid_range_are_a_fault() {
    let mut credits = Credits::new(CreditMode::V2Incremental, false, MAX_CREDITS, true);
    let words = CreditWords { credit: 0xFFFF_FFFF, received: None };
    let fault = (0..4).find_map(|_| {
        send(&mut credits);
        credits.on_receive(words, true).err()
    });
    assert!(matches!(fault, Some(PeerFault::GrantedTooMuch { .. })), "{fault:?}");
}

#[test]
fn a_version_1_grant_of_zero_is_read_as_one() {
    let mut credits = Credits::new(CreditMode::V1, false, 8, true);
    send(&mut credits);
    assert!(!credits.may_send(true, true));
    credits.on_answered();
    credits.on_receive(CreditWords { credit: 0, received: None }, true).unwrap();
    assert_eq!(credits.available(), 1);
    send(&mut credits);
    credits.on_answered();
    credits.on_receive(CreditWords { credit: u32::MAX, received: None }, true).unwrap();
    assert_eq!(credits.available(), 8, "limited to the Receives for replies");
}

#[test]
fn calls_in_progress_keep_their_receives_when_the_limit_shrinks() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut credits = Credits::new(credit_mode, true, 16, true);
        send(&mut credits);
        let received = (credit_mode == CreditMode::V2Windowed).then_some(1);
        let taken = 12;
        (0..taken).for_each(|_| credits.on_receive(CreditWords { credit: 1, received }, true).unwrap());
        credits.set_credit_limit(4);
        let peer_credits = credits.peer_credits();
        assert_eq!(credits.reserve(taken), taken + peer_credits + 1, "{credit_mode:?}");
        assert_eq!(credits.spared(taken, 0), taken, "{credit_mode:?}: unused credits and the pure grant need the rest");
        assert_eq!((credits.reserve(0), credits.spared(0, 4)), (5, 0), "{credit_mode:?}: after the calls");
    }
}

#[test]
fn granted_credits_keep_their_receives_when_the_limit_shrinks() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut credits = Credits::new(credit_mode, false, 16, true);
        send(&mut credits);
        credits.set_credit_limit(4);
        assert_eq!((credits.credit_limit(), credits.reserve(0)), (4, 17), "{credit_mode:?}");
    }
    // Version 1 counts calls in progress, and cannot announce a limit below their number.
    let mut credits = Credits::version_1(16, 0);
    credits.set_credit_limit(4);
    assert_eq!(credits.credit_limit(), 16);
    credits.set_credit_limit(32);
    assert_eq!(credits.credit_limit(), 32);
}

#[test]
fn a_pure_grant_makes_no_grant_due() {
    let mut credits = Credits::new(CreditMode::V2Windowed, false, 8, false);
    send(&mut credits);
    let words = CreditWords { credit: 8, received: Some(1) };
    credits.on_receive(words, false).unwrap();
    assert!(!credits.has_unreported() && !credits.is_grant_due(Some(8)));
    credits.on_receive(words, true).unwrap();
    assert!(credits.has_unreported() && credits.is_grant_due(Some(8)));
}

#[test]
fn only_a_client_has_an_initial_credit() {
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let (mut client, mut server) =
            (Credits::new(credit_mode, false, 8, true), Credits::new(credit_mode, true, 8, true));
        assert_eq!((client.available(), server.available()), (1, 0), "{credit_mode:?}");
        let words = send(&mut client);
        server.on_receive(words, true).unwrap();
        assert_eq!((client.available(), server.available()), (0, 8), "{credit_mode:?}");
    }
    // A client without a window still announces its Receive for the server's first message.
    let mut client = Credits::new(CreditMode::V2Incremental, false, 8, true);
    assert_eq!(client.on_send(true, None).credit, 8 << 16 | 1);
    assert_eq!(send(&mut client).credit, 8 << 16 | 7);
}

#[test]
fn a_lowered_limit_of_outstanding_messages_takes_effect() {
    let mut credits = Credits::new(CreditMode::V2Incremental, false, 8, true);
    let receive_grant = |credits: &mut Credits, max_outstanding: u32, newly: u32| {
        let words = CreditWords { credit: max_outstanding << 16 | newly, received: None };
        credits.on_receive(words, true).unwrap();
        credits.available()
    };
    send(&mut credits);
    assert_eq!(receive_grant(&mut credits, 16, 16), 16);
    assert_eq!(receive_grant(&mut credits, 4, 0), 4);
    for _ in 0..4 {
        send(&mut credits);
    }
    assert!(!credits.may_send(true, true) && credits.may_grant());
    // Granted credits are not lost.
    assert_eq!(receive_grant(&mut credits, 4, 0), 4);
    assert_eq!(receive_grant(&mut credits, 16, 1), 13);
    // A limit of 0 counts as 1, because no message could be sent otherwise.
    assert_eq!(receive_grant(&mut credits, 0, 1), 1);
}

#[test]
fn a_lower_credit_limit_is_announced_as_it_takes_effect() {
    let mut credits = Credits::new(CreditMode::V2Incremental, true, 8, true);
    let words = CreditWords { credit: 8 << 16 | 8, received: None };
    credits.on_receive(words, true).unwrap();
    assert_eq!(send(&mut credits).credit, 8 << 16 | 8);
    credits.set_credit_limit(4);
    let mut announced = Vec::new();
    for _ in 0..6 {
        credits.on_receive(CreditWords { credit: 8 << 16 | 1, received: None }, true).unwrap();
        let credit = send(&mut credits).credit;
        announced.push((credit >> 16, credit & 0xFFFF));
    }
    assert_eq!(announced, [(7, 0), (6, 0), (5, 0), (4, 0), (4, 1), (4, 1)]);
}

#[test]
fn a_window_beyond_the_range_of_increments_is_a_fault() {
    let window = |credit| {
        let mut credits = Credits::new(CreditMode::V2Windowed, false, 8, true);
        credits.on_receive(CreditWords { credit, received: Some(0) }, true).map(|()| credits.available())
    };
    assert_eq!([window(8), window(MAX_CREDITS)], [Ok(8), Ok(MAX_CREDITS)]);
    assert_eq!([window(MAX_CREDITS + 1), window(2 * MAX_CREDITS)], [Ok(MAX_CREDITS); 2]);
    for newly in [2 * MAX_CREDITS + 1, 1 << 31, u32::MAX] {
        assert_eq!(window(newly), Err(PeerFault::GrantedTooMuch { available: 0, newly }));
    }
}
