use super::*;

#[test]
fn a_late_reply_never_matches_another_call() {
    let mut table = CallTable::new(2, 0xFFFF_FFFF);
    let first = table.insert(OutboundState::Queued, 1, u64::MAX, 0).unwrap();
    assert!(table.mark_sent(first));
    assert_eq!(table.abandon(first, 0), Some((1, true)));
    assert_eq!(table.abandon(first, 0), None, "a call ends once");
    let second = table.insert(OutboundState::Queued, 2, u64::MAX, 0).unwrap();
    assert!(table.insert(OutboundState::Queued, 3, u64::MAX, 0).is_none(), "the abandoned call keeps its slot");
    assert!(table.mark_sent(second));
    assert_eq!(table.match_reply(first.xid()), ReplyMatch::Late(first));
    assert_eq!(table.match_reply(first.xid()), ReplyMatch::Unknown, "only one reply is outstanding");
    assert_eq!(table.match_reply(second.xid()), ReplyMatch::Call(second, 2));
    assert_ne!(table.insert(OutboundState::Queued, 3, u64::MAX, 0).unwrap().xid(), first.xid());
}

#[test]
fn a_reply_to_an_unsent_or_future_call_is_unknown() {
    let mut table = CallTable::new(4, 7);
    let call = table.insert(OutboundState::Queued, 1, u64::MAX, 0).unwrap();
    assert_eq!(table.match_reply(call.xid()), ReplyMatch::Unknown);
    assert!(table.mark_sent(call));
    assert_eq!(table.match_reply(call.xid().wrapping_add(4)), ReplyMatch::Unknown);
}

#[test]
fn the_slot_of_an_abandoned_call_is_freed_only_by_its_own_reply() {
    let mut table = CallTable::new(2, 0);
    let call = table.insert(OutboundState::Queued, 1, u64::MAX, 0).unwrap();
    table.mark_sent(call);
    table.abandon(call, 0).unwrap();
    assert_eq!(table.match_reply(call.xid().wrapping_add(2)), ReplyMatch::Unknown);
    assert_eq!(table.match_reply(call.xid()), ReplyMatch::Late(call));
}

#[test]
fn a_retryable_call_counts_as_sent_and_the_next_call_in_its_slot_does_not() {
    let mut table = CallTable::new(1, 0);
    let call = table.insert(OutboundState::Queued, 1, u64::MAX, 0).unwrap();
    table.mark_sent(call);
    assert_eq!(table.mark_retryable(call.xid()), Some((call, 1)));
    assert_eq!(table.remove(call), Some((1, true)));
    let next = table.insert(OutboundState::Queued, 2, u64::MAX, 0).unwrap();
    assert_eq!(table.remove(next), Some((2, false)));
}

#[test]
fn each_unanswered_call_is_reported_once_and_abandoned_calls_are_counted() {
    let mut table = CallTable::new(4, 0);
    let calls = [(1, 7), (2, 9)].map(|(token, procedure)| table.start(token, u64::MAX, procedure, true).unwrap());
    let queued = table.start(3, u64::MAX, 0, false).unwrap();
    assert_eq!(table.report_overdue(), []);
    assert_eq!(table.abandon(calls[1], 50), Some((2, true)));
    assert_eq!((table.abandoned, table.late, table.unanswered()), (1, 0, (2, Some(50))));
    assert_eq!(
        (table.report_overdue(), table.report_overdue()),
        (vec![7, 9], vec![]),
        "each once; the queued call was not sent"
    );
    assert_eq!(table.match_reply(calls[1].xid()), ReplyMatch::Late(calls[1]));
    assert_eq!((table.abandoned, table.late, table.unanswered()), (0, 1, (1, None)));
    assert_eq!(table.abandon(queued, 60), Some((3, false)), "its slot is free");
    assert_eq!(table.abandoned, 0);
    // The next call of the slot is not overdue.
    assert!(matches!(table.match_reply(calls[0].xid()), ReplyMatch::Call(..)));
    table.start(4, u64::MAX, 0, true).unwrap();
    assert_eq!(table.report_overdue(), []);
}

#[test]
fn abandoned_calls_end_with_their_connection() {
    let mut table = CallTable::new(1, 0);
    let call = table.insert(OutboundState::Queued, 1, u64::MAX, 0).unwrap();
    table.mark_sent(call);
    table.abandon(call, 0).unwrap();
    assert!(table.insert(OutboundState::Queued, 2, u64::MAX, 0).is_none());
    assert_eq!(table.interrupt(), []);
    assert!(table.insert(OutboundState::Queued, 2, u64::MAX, 0).is_some());
}

#[test]
fn a_call_expires_at_its_deadline_and_not_before() {
    let mut table = CallTable::new(8, 0);
    let at_50 = table.insert(OutboundState::Queued, 1, 50, 0).unwrap();
    let at_20 = table.insert(OutboundState::Queued, 2, 20, 0).unwrap();
    table.insert(OutboundState::Queued, 3, u64::MAX, 0).unwrap();
    assert_eq!(table.next_deadline(), 20);
    assert_eq!(table.next_expired(19), None);
    assert_eq!(table.next_expired(20), Some(at_20));
    table.remove(at_20).unwrap();
    assert_eq!(table.next_expired(20), None);
    assert_eq!(table.next_deadline(), 50);
    assert_eq!(table.next_expired(60), Some(at_50));
    table.remove(at_50).unwrap();
    assert_eq!(table.next_expired(60), None);
    assert_eq!(table.next_deadline(), u64::MAX);
    assert_eq!(table.used, 1);
}

/// A scan of all slots for each call would check 4 billion slots, twice.
#[test]
fn ending_all_calls_scans_each_slot_once() {
    let mut table = CallTable::new(1 << 16, 0);
    for token in 0..1 << 16 {
        table.insert(OutboundState::Queued, token, 10 + token % 2, 0).unwrap();
    }
    let mut ended = 0;
    while let Some(call) = table.next_expired(10) {
        assert!(table.scanned.get() <= 1 << 16, "each scan continues behind the last call");
        assert_eq!(table.next_deadline(), 0, "the scan is incomplete, so more calls may have expired");
        table.remove(call).unwrap();
        ended += 1;
    }
    assert_eq!((ended, table.used, table.next_deadline()), (1 << 15, 1 << 15, 11));
    assert_eq!(table.scanned.take(), 1 << 16);
    while let Some(call) = table.any_call() {
        // Each call also checks the slot of the previous one again.
        assert!(table.scanned.get() <= 2 << 16, "each scan continues behind the last call");
        table.remove(call).unwrap();
    }
    assert!(table.is_empty());
}

#[test]
fn a_call_started_during_a_scan_keeps_its_own_deadline() {
    let mut table = CallTable::new(4, 0);
    let first = table.insert(OutboundState::Queued, 1, 10, 0).unwrap();
    table.insert(OutboundState::Queued, 2, 10, 0).unwrap();
    table.insert(OutboundState::Queued, 3, 50, 0).unwrap();
    assert_eq!(table.next_expired(10), Some(first));
    table.remove(first).unwrap();
    let later = table.insert(OutboundState::Queued, 4, 20, 0).unwrap();
    assert_eq!(table.slot(later), table.slot(first));
    let second = table.next_expired(10).unwrap();
    table.remove(second).unwrap();
    assert_eq!(table.next_expired(10), None);
    assert_eq!(table.next_deadline(), 20);
    assert_eq!(table.next_expired(20), Some(later));
}
