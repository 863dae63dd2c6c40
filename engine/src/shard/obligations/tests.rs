use super::*;

/// Bytes take a nanosecond each.
const RATE: u64 = 1_000_000_000;

fn sent(sends: u32, completed: u32) -> PeerObligations {
    PeerObligations { sends, completed, ..PeerObligations::default() }
}

/// A check on a device that reports no bytes. A receive has 3 bytes.
fn look(timers: &mut ObligationTimers, owed: PeerObligations, nanos: u64) -> (u64, ObligationKind) {
    timers.check(owed, &Interval { nanos, flow: None, unseen: 0, receive: 3, min_rate: RATE })
}

/// A check where `moved` bytes have moved, and `queued` bytes are left to move.
fn look_at(timers: &mut ObligationTimers, owed: PeerObligations, nanos: u64, moved: u64, queued: u64) -> u64 {
    let flow = Some(Flow { moved, queued });
    timers.check(owed, &Interval { nanos, flow, unseen: 0, receive: 0, min_rate: RATE }).0
}

#[test]
fn a_stuck_send_is_late_whatever_follows_it() {
    let mut timers = ObligationTimers::default();
    assert_eq!(look(&mut timers, sent(5, 0), 10).0, 0, "it is seen for the first time");
    assert_eq!(look(&mut timers, sent(9, 4), 10).0, 10, "the fifth has not left");
    assert_eq!(look(&mut timers, sent(9, 5), 10).0, 0, "now it has, and the ninth is awaited");
    assert_eq!(look(&mut timers, sent(90, 8), 10).0, 10, "one now and then is not enough");
    assert_eq!(look(&mut timers, sent(90, 90), 10).0, 0);
    assert!(!timers.is_any_owed());
    assert_eq!(look(&mut timers, sent(90, 90), 1000).0, 0, "nothing is owed");
}

#[test]
fn numbers_of_sends_may_wrap() {
    let mut timers = ObligationTimers::default();
    timers.sends.mark = u32::MAX;
    look(&mut timers, sent(u32::MAX, u32::MAX), 1);
    look(&mut timers, sent(3, u32::MAX), 1);
    assert_eq!(look(&mut timers, sent(4, 1), 7).0, 7);
    assert_eq!(look(&mut timers, sent(4, 3), 7).0, 0);
}

#[test]
fn grants_ends_of_messages_and_reads_are_owed_too() {
    let mut timers = ObligationTimers::default();
    let owed = PeerObligations { replies: 3, granted: 2, half_sent: Some(1), ..PeerObligations::default() };
    look(&mut timers, owed, 1);
    assert_eq!(look(&mut timers, owed, 5).0, 5);
    assert_eq!(look(&mut timers, PeerObligations { granted: 3, ..owed }, 5), (10, ObligationKind::Message));
    assert_eq!(
        look(&mut timers, PeerObligations { half_sent: Some(2), ..PeerObligations::default() }, 5).0,
        0,
        "another message"
    );
    let reads = |fetched| PeerObligations { fetches: 3, fetched, ..PeerObligations::default() };
    look(&mut timers, reads(0), 1);
    assert_eq!(look(&mut timers, reads(2), 5), (5, ObligationKind::Reads), "the third is awaited");
    assert_eq!(look(&mut timers, reads(3), 5).0, 0);
    assert!(!timers.is_any_owed());
}

#[test]
fn an_answer_to_an_abandoned_call_restarts_the_wait_and_bytes_do_not() {
    let mut timers = ObligationTimers::default();
    let owed = |late| PeerObligations { withheld: Some(late), ..PeerObligations::default() };
    look_at(&mut timers, owed(7), 1, 0, 1000);
    assert_eq!(look_at(&mut timers, owed(7), 5, 500, 1000), 5);
    assert_eq!(look(&mut timers, owed(7), 5), (10, ObligationKind::Answers));
    assert!(timers.is_any_owed());
    assert_eq!(look(&mut timers, owed(8), 5).0, 0, "one was answered");
    assert_eq!(look(&mut timers, PeerObligations::default(), 5).0, 0);
    assert!(!timers.is_any_owed());
}

#[test]
fn a_grant_now_and_then_is_not_enough() {
    let mut timers = ObligationTimers::default();
    let replies = |replies, granted| PeerObligations { replies, granted, ..PeerObligations::default() };
    look(&mut timers, replies(40, 0), 1);
    assert_eq!(look(&mut timers, replies(41, 1), 5), (2, ObligationKind::Grant), "another one waits");
    assert_eq!(look(&mut timers, replies(42, 2), 5), (4, ObligationKind::Grant), "it is slower than the least rate");
    assert_eq!(look(&mut timers, replies(42, 2), 5), (9, ObligationKind::Grant));
    assert_eq!(look(&mut timers, replies(50, 40), 5).0, 0, "all of those that were there have gone");
    assert_eq!(look(&mut timers, replies(50, 50), 5).0, 0);
    assert!(!timers.is_any_owed());
}

#[test]
fn a_peer_that_grants_at_the_least_rate_is_never_late() {
    let mut timers = ObligationTimers { granted: u32::MAX - 9, ..ObligationTimers::default() };
    let waits =
        |granted: u32| PeerObligations { replies: 30, granted: granted.wrapping_sub(10), ..PeerObligations::default() };
    look(&mut timers, waits(0), 1);
    // Two receives in the time of two; surplus pay is lost.
    let late: Vec<_> = (1..=15).map(|n| look(&mut timers, waits(2 * n), 6).0).collect();
    assert_eq!(late, [0; 15]);
    assert_eq!(look(&mut timers, waits(39), 6).0, 0, "nine at once");
    assert_eq!(look(&mut timers, waits(38), 6).0, 6, "the rest of one waits again");
}

#[test]
fn replies_that_stand_before_the_last_are_paid_for() {
    let owed = PeerObligations { replies: 40, waiting: 150, ..PeerObligations::default() };
    let mut timers = ObligationTimers::default();
    look_at(&mut timers, owed, 100, 0, 0);
    let waited = [100, 200, 300].map(|moved| look_at(&mut timers, owed, 100, moved, 0));
    assert_eq!(waited, [0, 50, 150]);
}

#[test]
fn of_sends_and_reads_that_wait_equally_neither_is_the_cause() {
    let mut timers = ObligationTimers::default();
    let owed = PeerObligations { sends: 1, fetches: 1, ..PeerObligations::default() };
    look(&mut timers, owed, 1);
    assert_eq!(look(&mut timers, owed, 5), (5, ObligationKind::SendsOrReads), "one of them stands behind the other");
    assert_eq!(
        look(&mut timers, PeerObligations { completed: 1, ..owed }, 5),
        (10, ObligationKind::Reads),
        "the Send has left"
    );
    assert_eq!(look(&mut timers, PeerObligations { fetched: 1, ..owed }, 5).1, ObligationKind::Sends);
}

#[test]
fn bytes_that_move_pay_for_the_time_that_they_take() {
    let (mut timers, owed) = (ObligationTimers::default(), sent(1, 0));
    look_at(&mut timers, owed, 1, 500, 800);
    assert_eq!(look_at(&mut timers, owed, 100, 600, 700), 0, "as fast as it must be");
    assert_eq!(look_at(&mut timers, owed, 100, 640, 660), 60, "too slow");
    assert_eq!(look_at(&mut timers, owed, 100, 900, 400), 0, "the bytes of the past are paid for, too");
    assert_eq!(look_at(&mut timers, owed, 100, 900, 400), 100, "none of those to come");
}

#[test]
fn timers_counts_only_earlier_bytes() {
    let (mut timers, owed) = (ObligationTimers::default(), sent(1, 0));
    look_at(&mut timers, owed, 1, 0, 80);
    assert_eq!(look_at(&mut timers, owed, 100, 1000, 80), 10, "80 bytes, and an eighth for headers");
    assert_eq!(look_at(&mut timers, owed, 100, 2000, 80), 110, "it sends anything but what it owes");
}

#[test]
fn bytes_that_nothing_was_to_be_paid_for_take_nothing_from_the_rest() {
    let (mut timers, owed) = (ObligationTimers::default(), sent(1, 0));
    look_at(&mut timers, owed, 1, 0, 800);
    // Both directions move twice as much as they must: 900 pays for 9 checks.
    let waited: Vec<_> = (1..=10).map(|look| look_at(&mut timers, owed, 100, 400 * look, 0)).collect();
    assert_eq!(waited, [[0; 9].as_slice(), &[100]].concat());
}

#[test]
fn without_reported_timers_the_time_is_granted_in_advance() {
    let (mut timers, owed) =
        (ObligationTimers::default(), PeerObligations { fetches: 1, ..PeerObligations::default() });
    timers.check(owed, &Interval { nanos: 1, flow: None, unseen: 300, receive: 0, min_rate: RATE });
    assert_eq!([250, 50, 20].map(|nanos| look(&mut timers, owed, nanos).0), [0, 0, 20]);
}

/// Interval of each part.
const EVERY: u64 = 10 * PARTS as u64;

#[test]
fn time_in_which_nobody_looked_is_held_against_nobody() {
    let mut checks = ObligationChecks::default();
    assert_eq!(checks.begin(10_000, EVERY), [Some(0); PARTS], "behind a pause all are due");
    assert_eq!(checks.begin(20_000, EVERY), [Some(2 * EVERY); PARTS], "it is away again");
    assert_eq!(checks.begin(checks.due, EVERY)[0], Some(10));
    assert_eq!(checks.begin(u64::MAX, EVERY), [Some(0); PARTS]);
}

#[test]
fn the_parts_take_turns() {
    let mut checks = ObligationChecks::default();
    checks.begin(10_000, EVERY);
    for part in 0..PARTS {
        let turn = checks.begin(checks.due, EVERY);
        let looked: Vec<_> = (0..PARTS).filter(|&other| turn[other].is_some()).collect();
        assert_eq!((looked, turn[part]), (vec![part], Some(10 + 10 * part as u64)));
    }
    let turn = checks.begin(checks.due + 20, EVERY);
    assert_eq!(turn.iter().filter(|part| part.is_some()).count(), 3, "it is late by two");
    assert_eq!(turn[..3], [Some(EVERY + 20), Some(EVERY + 10), Some(EVERY)]);
}

#[test]
fn a_wake_up_checks_all_unless_nothing_was_owed_or_done() {
    let mut checks = ObligationChecks::default();
    checks.begin(10_000, EVERY);
    assert_eq!(checks.next(0), u64::MAX, "nothing was found to be owed");
    assert_eq!(checks.next(1), 10_000 + EVERY, "what was done since may have left something");
    assert_eq!(checks.begin(checks.all_due, EVERY), [Some(EVERY); PARTS]);
    assert_eq!(checks.next(1), u64::MAX);
    // This part has a debt.
    checks.begin(checks.due, EVERY);
    checks.quiet = 0;
    assert_eq!(checks.next(1), checks.due + EVERY - 10);
}
