use super::*;

/// Sends a message, with room for the whole credit limit.
fn send(credits: &mut Credits) -> CreditWords {
    let room = credits.credit_limit();
    credits.on_send(true, Some(room))
}

#[test]
fn a_peer_that_ignores_its_limit_is_found_out_at_once() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut credits = Credits::new(scheme, true, 4, true);
        let received = (scheme == CreditMode::V2Windowed).then_some(0);
        let words = CreditWords { credit: 1, received };
        // One for the initial credit, one that a pure grant could have been.
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
fn increments_that_add_up_to_nonsense_are_a_fault() {
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
    assert_eq!(credits.available(), 8, "and no more than the Receives that there are for replies");
}

#[test]
fn calls_in_progress_keep_their_receives_when_the_limit_shrinks() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut credits = Credits::new(scheme, true, 16, true);
        send(&mut credits);
        let received = (scheme == CreditMode::V2Windowed).then_some(1);
        let taken = 12;
        (0..taken).for_each(|_| credits.on_receive(CreditWords { credit: 1, received }, true).unwrap());
        credits.set_credit_limit(4);
        let left = credits.left();
        assert_eq!(credits.reserve(taken), taken + left + 1, "{scheme:?}");
        assert_eq!(credits.spared(taken, 0), taken, "{scheme:?}: the messages that may still come need the others");
        assert_eq!((credits.reserve(0), credits.spared(0, 4)), (5, 0), "{scheme:?}: after the calls");
    }
}

#[test]
fn granted_credits_keep_their_receives_when_the_limit_shrinks() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut credits = Credits::new(scheme, false, 16, true);
        send(&mut credits);
        credits.set_credit_limit(4);
        assert_eq!((credits.credit_limit(), credits.reserve(0)), (4, 17), "{scheme:?}");
    }
    // Version 1 counts calls in progress: less than those cannot be announced.
    let mut credits = Credits::version_1(16, 0);
    credits.set_credit_limit(4);
    assert_eq!(credits.credit_limit(), 16);
    credits.set_credit_limit(32);
    assert_eq!(credits.credit_limit(), 32);
}

#[test]
fn a_grant_alone_makes_no_grant_due() {
    let mut credits = Credits::new(CreditMode::V2Windowed, false, 8, false);
    send(&mut credits);
    let words = CreditWords { credit: 8, received: Some(1) };
    credits.on_receive(words, false).unwrap();
    assert!(!credits.wants_report() && !credits.wants_grant(Some(8)));
    credits.on_receive(words, true).unwrap();
    assert!(credits.wants_report() && credits.wants_grant(Some(8)));
}

#[test]
fn only_a_client_has_an_initial_credit() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let (mut client, mut server) = (Credits::new(scheme, false, 8, true), Credits::new(scheme, true, 8, true));
        assert_eq!((client.available(), server.available()), (1, 0), "{scheme:?}");
        let words = send(&mut client);
        server.on_receive(words, true).unwrap();
        assert_eq!((client.available(), server.available()), (0, 8), "{scheme:?}");
    }
    // A client with few Receives keeps one for its server's first message, and announces it.
    let mut client = Credits::new(CreditMode::V2Incremental, false, 8, true);
    assert_eq!(client.on_send(true, None).credit, 8 << 16 | 1);
    assert_eq!(send(&mut client).credit, 8 << 16 | 7);
}

#[test]
fn the_high_half_binds_also_when_it_is_lowered() {
    let mut credits = Credits::new(CreditMode::V2Incremental, false, 8, true);
    let hear = |credits: &mut Credits, most: u32, newly: u32| {
        let words = CreditWords { credit: most << 16 | newly, received: None };
        credits.on_receive(words, true).unwrap();
        credits.available()
    };
    send(&mut credits);
    assert_eq!(hear(&mut credits, 16, 16), 16);
    assert_eq!(hear(&mut credits, 4, 0), 4);
    for _ in 0..4 {
        send(&mut credits);
    }
    assert!(!credits.may_send(true, true) && credits.may_grant());
    // Granted credits are not lost.
    assert_eq!(hear(&mut credits, 4, 0), 4);
    assert_eq!(hear(&mut credits, 16, 1), 13);
    // A peer with limit 0 would wait without end.
    assert_eq!(hear(&mut credits, 0, 1), 1);
}

#[test]
fn a_lower_credit_limit_is_announced_as_it_takes_effect() {
    let mut credits = Credits::new(CreditMode::V2Incremental, true, 8, true);
    let words = CreditWords { credit: 8 << 16 | 8, received: None };
    credits.on_receive(words, true).unwrap();
    assert_eq!(send(&mut credits).credit, 8 << 16 | 8);
    credits.set_credit_limit(4);
    let mut told = Vec::new();
    for _ in 0..6 {
        credits.on_receive(CreditWords { credit: 8 << 16 | 1, received: None }, true).unwrap();
        let credit = send(&mut credits).credit;
        told.push((credit >> 16, credit & 0xFFFF));
    }
    assert_eq!(told, [(7, 0), (6, 0), (5, 0), (4, 0), (4, 1), (4, 1)]);
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
