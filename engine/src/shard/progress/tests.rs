use super::*;

/// Bytes take a nanosecond each.
const RATE: u64 = 1_000_000_000;

fn sent(sends: u32, left: u32) -> Owed {
    Owed { sends, left, ..Owed::default() }
}

/// A check on a device that reports no bytes. A receive has 3 bytes.
fn look(progress: &mut Progress, owed: Owed, nanos: u64) -> (u64, Stall) {
    let passed = progress.pass(nanos, None, (0, 0, 3), RATE);
    progress.look(owed, &passed)
}

/// As above, where `moved` bytes have moved, and `queued` bytes are left to move.
fn look_at(progress: &mut Progress, owed: Owed, nanos: u64, moved: u64, queued: u64) -> u64 {
    let passed = progress.pass(nanos, Some(Flow { moved, queued }), (0, 0, 0), RATE);
    progress.look(owed, &passed).0
}

#[test]
fn a_stuck_send_is_late_whatever_follows_it() {
    let mut progress = Progress::default();
    assert_eq!(look(&mut progress, sent(5, 0), 10).0, 0, "it is seen for the first time");
    assert_eq!(look(&mut progress, sent(9, 4), 10).0, 10, "the fifth has not left");
    assert_eq!(look(&mut progress, sent(9, 5), 10).0, 0, "now it has, and the ninth is awaited");
    assert_eq!(look(&mut progress, sent(90, 8), 10).0, 10, "one now and then is not enough");
    assert_eq!(look(&mut progress, sent(90, 90), 10).0, 0);
    assert!(!progress.is_owed());
    assert_eq!(look(&mut progress, sent(90, 90), 1000).0, 0, "nothing is owed");
}

#[test]
fn numbers_of_sends_may_wrap() {
    let mut progress = Progress::default();
    progress.sends.mark = u32::MAX;
    look(&mut progress, sent(u32::MAX, u32::MAX), 1);
    look(&mut progress, sent(3, u32::MAX), 1);
    assert_eq!(look(&mut progress, sent(4, 1), 7).0, 7);
    assert_eq!(look(&mut progress, sent(4, 3), 7).0, 0);
}

#[test]
fn grants_ends_of_messages_and_reads_are_owed_too() {
    let mut progress = Progress::default();
    let owed = Owed { replies: 3, granted: 2, half_sent: Some(1), ..Owed::default() };
    look(&mut progress, owed, 1);
    assert_eq!(look(&mut progress, owed, 5).0, 5);
    assert_eq!(look(&mut progress, Owed { granted: 3, ..owed }, 5), (10, Stall::Message));
    assert_eq!(look(&mut progress, Owed { half_sent: Some(2), ..Owed::default() }, 5).0, 0, "another message");
    let reads = |fetched| Owed { fetches: 3, fetched, ..Owed::default() };
    look(&mut progress, reads(0), 1);
    assert_eq!(look(&mut progress, reads(2), 5), (5, Stall::Reads), "the third is awaited");
    assert_eq!(look(&mut progress, reads(3), 5).0, 0);
    assert!(!progress.is_owed());
}

#[test]
fn an_answer_to_an_abandoned_call_restarts_the_wait_and_bytes_do_not() {
    let mut progress = Progress::default();
    let owed = |late| Owed { withheld: Some(late), ..Owed::default() };
    look_at(&mut progress, owed(7), 1, 0, 1000);
    assert_eq!(look_at(&mut progress, owed(7), 5, 500, 1000), 5);
    let passed = progress.pass(5, None, (0, 0, 3), RATE);
    assert_eq!(progress.look(owed(7), &passed), (10, Stall::Answers));
    assert!(progress.is_owed());
    assert_eq!(look(&mut progress, owed(8), 5).0, 0, "one was answered");
    assert_eq!(look(&mut progress, Owed::default(), 5).0, 0);
    assert!(!progress.is_owed());
}

#[test]
fn a_grant_now_and_then_is_not_enough() {
    let mut progress = Progress::default();
    let replies = |replies, granted| Owed { replies, granted, ..Owed::default() };
    look(&mut progress, replies(40, 0), 1);
    assert_eq!(look(&mut progress, replies(41, 1), 5), (2, Stall::Grant), "another one waits");
    assert_eq!(look(&mut progress, replies(42, 2), 5), (4, Stall::Grant), "it is slower than the least rate");
    assert_eq!(look(&mut progress, replies(42, 2), 5), (9, Stall::Grant));
    assert_eq!(look(&mut progress, replies(50, 40), 5).0, 0, "all of those that were there have gone");
    assert_eq!(look(&mut progress, replies(50, 50), 5).0, 0);
    assert!(!progress.is_owed());
}

#[test]
fn a_peer_that_grants_at_the_least_rate_is_never_late() {
    let mut progress = Progress { granted: u32::MAX - 9, ..Progress::default() };
    let waits = |granted: u32| Owed { replies: 30, granted: granted.wrapping_sub(10), ..Owed::default() };
    look(&mut progress, waits(0), 1);
    // Two receives in the time of two; surplus pay is lost.
    let late: Vec<_> = (1..=15).map(|n| look(&mut progress, waits(2 * n), 6).0).collect();
    assert_eq!(late, [0; 15]);
    assert_eq!(look(&mut progress, waits(39), 6).0, 0, "nine at once");
    assert_eq!(look(&mut progress, waits(38), 6).0, 6, "the rest of one waits again");
}

#[test]
fn replies_that_stand_before_the_last_are_paid_for() {
    let (mut progress, owed) = (Progress::default(), Owed { replies: 40, ..Owed::default() });
    let mut look_at = |owed, moved| {
        let passed = progress.pass(100, Some(Flow { moved, queued: 0 }), (0, 150, 0), RATE);
        progress.look(owed, &passed).0
    };
    look_at(owed, 0);
    assert_eq!([100, 200, 300].map(|moved| look_at(owed, moved)), [0, 50, 150]);
}

#[test]
fn of_sends_and_reads_that_wait_equally_neither_is_the_cause() {
    let mut progress = Progress::default();
    let owed = Owed { sends: 1, fetches: 1, ..Owed::default() };
    look(&mut progress, owed, 1);
    assert_eq!(look(&mut progress, owed, 5), (5, Stall::SendsOrReads), "one of them stands behind the other");
    assert_eq!(look(&mut progress, Owed { left: 1, ..owed }, 5), (10, Stall::Reads), "the Send has left");
    assert_eq!(look(&mut progress, Owed { fetched: 1, ..owed }, 5).1, Stall::Sends);
}

#[test]
fn bytes_that_move_pay_for_the_time_that_they_take() {
    let (mut progress, owed) = (Progress::default(), sent(1, 0));
    look_at(&mut progress, owed, 1, 500, 800);
    assert_eq!(look_at(&mut progress, owed, 100, 600, 700), 0, "as fast as it must be");
    assert_eq!(look_at(&mut progress, owed, 100, 640, 660), 60, "too slow");
    assert_eq!(look_at(&mut progress, owed, 100, 900, 400), 0, "the bytes of the past are paid for, too");
    assert_eq!(look_at(&mut progress, owed, 100, 900, 400), 100, "none of those to come");
}

#[test]
fn progress_counts_only_earlier_bytes() {
    let (mut progress, owed) = (Progress::default(), sent(1, 0));
    look_at(&mut progress, owed, 1, 0, 80);
    assert_eq!(look_at(&mut progress, owed, 100, 1000, 80), 10, "80 bytes, and an eighth for headers");
    assert_eq!(look_at(&mut progress, owed, 100, 2000, 80), 110, "it sends anything but what it owes");
}

#[test]
fn bytes_that_nothing_was_to_be_paid_for_take_nothing_from_the_rest() {
    let (mut progress, owed) = (Progress::default(), sent(1, 0));
    look_at(&mut progress, owed, 1, 0, 800);
    // Both directions move twice as much as they must: 900 pays for 9 checks.
    let waited: Vec<_> = (1..=10).map(|look| look_at(&mut progress, owed, 100, 400 * look, 0)).collect();
    assert_eq!(waited, [[0; 9].as_slice(), &[100]].concat());
}

#[test]
fn without_reported_progress_the_time_is_granted_in_advance() {
    let (mut progress, owed) = (Progress::default(), Owed { fetches: 1, ..Owed::default() });
    let passed = progress.pass(1, None, (300, 0, 0), RATE);
    progress.look(owed, &passed);
    assert_eq!([250, 50, 20].map(|nanos| look(&mut progress, owed, nanos).0), [0, 0, 20]);
}

/// Interval of each part.
const EVERY: u64 = 10 * PARTS as u64;

#[test]
fn time_in_which_nobody_looked_is_held_against_nobody() {
    let mut watch = Watch::default();
    assert_eq!(watch.begin(10_000, EVERY), [Some(0); PARTS], "behind a pause all are due");
    assert_eq!(watch.begin(20_000, EVERY), [Some(2 * EVERY); PARTS], "it is away again");
    assert_eq!(watch.begin(watch.due, EVERY)[0], Some(10));
    assert_eq!(watch.begin(u64::MAX, EVERY), [Some(0); PARTS]);
}

#[test]
fn the_parts_take_turns() {
    let mut watch = Watch::default();
    watch.begin(10_000, EVERY);
    for part in 0..PARTS {
        let turn = watch.begin(watch.due, EVERY);
        let looked: Vec<_> = (0..PARTS).filter(|&other| turn[other].is_some()).collect();
        assert_eq!((looked, turn[part]), (vec![part], Some(10 + 10 * part as u64)));
    }
    let turn = watch.begin(watch.due + 20, EVERY);
    assert_eq!(turn.iter().filter(|part| part.is_some()).count(), 3, "it is late by two");
    assert_eq!(turn[..3], [Some(EVERY + 20), Some(EVERY + 10), Some(EVERY)]);
}

#[test]
fn a_wake_up_checks_all_unless_nothing_was_owed_or_done() {
    let mut watch = Watch::default();
    watch.begin(10_000, EVERY);
    assert_eq!(watch.next(0), u64::MAX, "nothing was found to be owed");
    assert_eq!(watch.next(1), 10_000 + EVERY, "what was done since may have left something");
    assert_eq!(watch.begin(watch.all_due, EVERY), [Some(EVERY); PARTS]);
    assert_eq!(watch.next(1), u64::MAX);
    // This part has a debt.
    watch.begin(watch.due, EVERY);
    watch.quiet = 0;
    assert_eq!(watch.next(1), watch.due + EVERY - 10);
}
