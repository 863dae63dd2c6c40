//! Ends of calls: in time, late, cancelled, or with their connection.

use std::time::Duration;

use super::*;

#[test]
fn a_deadline_ends_a_call_once_and_its_late_reply_is_counted() {
    for credit_mode in ALL {
        let mut pair = Pair::new(credit_mode);
        let sent = pair.client.start_call(1, 100, 0, false).unwrap().id;
        Pair::transmit(&mut pair.client, &mut pair.to_server);
        let unsent = pair.client.start_call(2, 200, 0, false).unwrap().id;
        assert_eq!(pair.client.calls().next_deadline(), 100);
        assert_eq!(pair.client.handle_timeout(99), None);
        assert_eq!(pair.client.handle_timeout(100), Some((sent, 1, CallError::TimedOut { sent: true })));
        assert_eq!(pair.client.handle_timeout(100), None);
        assert_eq!(pair.client.handle_timeout(300), Some((unsent, 2, CallError::TimedOut { sent: false })));
        pair.round_trip();
        assert!(pair.answered.is_empty(), "{credit_mode:?}");
        assert_eq!(pair.client.counters().rejected_late, 1);
        assert!(pair.client.status().is_idle);
        // The time-out does not change the credit limit.
        for token in 10..20 {
            pair.client.start_call(token, u64::MAX, 0, false).unwrap();
        }
        pair.round_trip();
        pair.round_trip();
        assert_eq!(pair.answered.len(), 10, "{credit_mode:?}");
    }
}

#[test]
fn a_queued_call_is_reported_once_after_it_was_sent() {
    for credit_mode in ALL {
        let mut pair = Pair::new(credit_mode);
        pair.client.start_call(1, u64::MAX, 7, false).unwrap();
        assert_eq!(
            [pair.client.age_calls(), pair.client.age_calls()],
            [vec![], vec![]],
            "{credit_mode:?}: it was not sent"
        );
        assert_eq!(Pair::transmit(&mut pair.client, &mut pair.to_server), 1, "{credit_mode:?}");
        let reported = [(); 3].map(|()| pair.client.age_calls());
        assert_eq!(reported, [vec![], vec![7], vec![]], "{credit_mode:?}");
    }
}

#[test]
fn unanswered_calls_that_hold_all_credits_are_reported_and_abandoned_ones_are_bounded() {
    for credit_mode in ALL {
        let mut pair = Pair::new(credit_mode);
        // The first reply grants the credits of version 1.
        pair.client.start_call(50, u64::MAX, 0, false).unwrap();
        pair.round_trip();
        for token in 0..u64::from(CREDITS) {
            pair.client.start_call(token, if token < 3 { 100 } else { u64::MAX }, 0, false).unwrap();
        }
        assert_eq!(
            pair.client.calls().lack_of_credits(pair.client.credits(), 0),
            None,
            "{credit_mode:?}: none was sent"
        );
        while Pair::transmit(&mut pair.client, &mut pair.to_server) > 0 {
            pair.deliver_to_server();
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            pair.deliver_to_client();
        }
        assert_eq!(pair.client.credits().available(), 0, "{credit_mode:?}");
        let waiting_call = pair.client.start_call(99, 200, 0, false).unwrap().id;
        let lack = |oldest| Some(CallError::NoCredits { unanswered: CREDITS as usize, oldest });
        assert_eq!(
            pair.client.calls().lack_of_credits(pair.client.credits(), 50),
            lack(None),
            "{credit_mode:?}: no call is abandoned yet"
        );
        for abandoned in 1..=3 {
            assert!(pair.client.handle_timeout(100).is_some());
            let withheld = [abandoned, abandoned + 1]
                .map(|limit| pair.client.calls().withheld_answers(limit, pair.client.credits()));
            assert_eq!(withheld, [Some(0), None], "{credit_mode:?}: {abandoned} abandoned calls, no late answer");
        }
        assert_eq!(
            pair.client.calls().lack_of_credits(pair.client.credits(), 150),
            lack(Some(Duration::from_nanos(50))),
            "{credit_mode:?}"
        );
        assert!(pair.client.handle_timeout(200).is_some_and(|(call, ..)| call == waiting_call));
    }
}

/// A caller that makes one call at a time has no waiting call between two of them.
#[test]
fn abandoned_calls_that_hold_all_credits_count_also_while_no_call_waits() {
    for credit_mode in ALL {
        let mut pair = Pair::new(credit_mode);
        pair.client.start_call(50, u64::MAX, 0, false).unwrap();
        pair.round_trip();
        (0..u64::from(CREDITS)).for_each(|token| _ = pair.client.start_call(token, 100, 0, false).unwrap());
        while Pair::transmit(&mut pair.client, &mut pair.to_server) > 0 {
            pair.deliver_to_server();
            Pair::transmit(&mut pair.server, &mut pair.to_client);
            pair.deliver_to_client();
        }
        let withheld: Vec<_> = std::iter::from_fn(|| {
            pair.client
                .handle_timeout(100)
                .map(|_| pair.client.calls().withheld_answers(usize::MAX, pair.client.credits()))
        })
        .collect();
        let (last, others) = withheld.split_last().unwrap();
        assert_eq!((*last, others.len()), (Some(0), CREDITS as usize - 1), "{credit_mode:?}");
        assert!(others.iter().all(Option::is_none), "{credit_mode:?}: some calls are not abandoned");
    }
}

#[test]
fn a_cancelled_call_ends_once() {
    let mut pair = Pair::new(CreditMode::V2Windowed);
    let before = pair.server.counters().received;
    let call = pair.client.start_call(7, u64::MAX, 0, false).unwrap().id;
    assert_eq!(pair.client.cancel(call, 0), Some((7, CallError::Cancelled { sent: false })));
    assert_eq!(pair.client.cancel(call, 0), None);
    pair.round_trip();
    assert_eq!(pair.server.counters().received, before, "it was never sent");
}

#[test]
fn the_loss_of_a_connection_ends_every_call_with_its_sent_state() {
    let mut pair = Pair::new(CreditMode::V1);
    for token in 0..3 {
        pair.client.start_call(token, u64::MAX, 0, false).unwrap();
    }
    Pair::transmit(&mut pair.client, &mut pair.to_server);
    let mut ends: Vec<_> =
        std::iter::from_fn(|| pair.client.fail_next_call()).map(|(_, token, error)| (token, error)).collect();
    ends.sort_by_key(|&(token, _)| token);
    let lost = |sent| CallError::ConnectionLost { sent };
    assert_eq!(ends, [(0, lost(true)), (1, lost(false)), (2, lost(false))]);
    assert_eq!(pair.client.start_call(9, u64::MAX, 0, false), Err(CallError::Closed));
}
