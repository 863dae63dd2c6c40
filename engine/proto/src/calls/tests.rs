use super::*;

#[test]
fn a_late_reply_never_matches_another_call() {
    let mut table = CallTable::new(2, 0xFFFF_FFFF);
    let first = table.insert_as(State::Queued, 1, u64::MAX, 0).unwrap();
    assert!(table.mark_sent(first));
    assert_eq!(table.abandon(first, 0), Some((1, true)));
    assert_eq!(table.abandon(first, 0), None, "a call ends once");
    let second = table.insert_as(State::Queued, 2, u64::MAX, 0).unwrap();
    assert!(table.insert_as(State::Queued, 3, u64::MAX, 0).is_none(), "the slot of the given up call is not free");
    assert!(table.mark_sent(second));
    assert_eq!(table.answered(first.xid()), Match::Late(first));
    assert_eq!(table.answered(first.xid()), Match::Unknown, "one reply is owed, not two");
    assert_eq!(table.answered(second.xid()), Match::Call(second, 2));
    assert_ne!(table.insert_as(State::Queued, 3, u64::MAX, 0).unwrap().xid(), first.xid());
}

#[test]
fn a_reply_to_an_unsent_or_future_call_is_unknown() {
    let mut table = CallTable::new(4, 7);
    let call = table.insert_as(State::Queued, 1, u64::MAX, 0).unwrap();
    assert_eq!(table.answered(call.xid()), Match::Unknown);
    assert!(table.mark_sent(call));
    assert_eq!(table.answered(call.xid().wrapping_add(4)), Match::Unknown);
}

#[test]
fn the_slot_of_a_given_up_call_is_freed_by_its_own_reply_only() {
    let mut table = CallTable::new(2, 0);
    let call = table.insert_as(State::Queued, 1, u64::MAX, 0).unwrap();
    table.mark_sent(call);
    table.abandon(call, 0).unwrap();
    assert_eq!(table.answered(call.xid().wrapping_add(2)), Match::Unknown);
    assert_eq!(table.answered(call.xid()), Match::Late(call));
}

#[test]
fn a_refused_call_may_have_run_and_the_next_in_its_slot_has_not() {
    let mut table = CallTable::new(1, 0);
    let call = table.insert_as(State::Queued, 1, u64::MAX, 0).unwrap();
    table.mark_sent(call);
    assert_eq!(table.retryable(call.xid()), Some((call, 1)));
    assert_eq!(table.remove(call), Some((1, true)));
    let next = table.insert_as(State::Queued, 2, u64::MAX, 0).unwrap();
    assert_eq!(table.remove(next), Some((2, false)));
}

#[test]
fn calls_without_an_answer_grow_old_once_and_abandoned_ones_are_counted() {
    let mut table = CallTable::new(4, 0);
    let calls = [(1, 7), (2, 9)].map(|(token, name)| table.start(token, u64::MAX, name, true).unwrap());
    let queued = table.start(3, u64::MAX, 0, false).unwrap();
    assert_eq!(table.age(), []);
    assert_eq!(table.abandon(calls[1], 50), Some((2, true)));
    assert_eq!((table.abandoned, table.late, table.unanswered()), (1, 0, (2, Some(50))));
    assert_eq!((table.age(), table.age()), (vec![7, 9], vec![]), "each once; the queued call was not sent");
    assert_eq!(table.answered(calls[1].xid()), Match::Late(calls[1]));
    assert_eq!((table.abandoned, table.late, table.unanswered()), (0, 1, (1, None)));
    assert_eq!(table.abandon(queued, 60), Some((3, false)), "its slot is free");
    assert_eq!(table.abandoned, 0);
    // The next call of the slot is young.
    assert!(matches!(table.answered(calls[0].xid()), Match::Call(..)));
    table.start(4, u64::MAX, 0, true).unwrap();
    assert_eq!(table.age(), []);
}

#[test]
fn calls_that_were_given_up_end_with_their_connection() {
    let mut table = CallTable::new(1, 0);
    let call = table.insert_as(State::Queued, 1, u64::MAX, 0).unwrap();
    table.mark_sent(call);
    table.abandon(call, 0).unwrap();
    assert!(table.insert_as(State::Queued, 2, u64::MAX, 0).is_none());
    assert_eq!(table.interrupt(), []);
    assert!(table.insert_as(State::Queued, 2, u64::MAX, 0).is_some());
}

#[test]
fn deadlines_come_out_once_due_and_only_then() {
    let mut table = CallTable::new(8, 0);
    let a = table.insert_as(State::Queued, 1, 50, 0).unwrap();
    let b = table.insert_as(State::Queued, 2, 20, 0).unwrap();
    table.insert_as(State::Queued, 3, u64::MAX, 0).unwrap();
    assert_eq!(table.next_deadline(), 20);
    assert_eq!(table.expired(19), None);
    assert_eq!(table.expired(20), Some(b));
    table.remove(b).unwrap();
    assert_eq!(table.expired(20), None);
    assert_eq!(table.next_deadline(), 50);
    assert_eq!(table.expired(60), Some(a));
    table.remove(a).unwrap();
    assert_eq!(table.expired(60), None);
    assert_eq!(table.next_deadline(), u64::MAX);
    assert_eq!(table.used, 1);
}

/// A scan of all slots for each call would make four thousand million checks, twice.
#[test]
fn all_calls_at_once_end_with_one_look_at_each_slot() {
    let mut table = CallTable::new(1 << 16, 0);
    for token in 0..1 << 16 {
        table.insert_as(State::Queued, token, 10 + token % 2, 0).unwrap();
    }
    let mut ended = 0;
    while let Some(call) = table.expired(10) {
        assert!(table.looks.get() <= 1 << 16, "it goes on behind the last one");
        assert_eq!(table.next_deadline(), 0, "more may have to be ended now");
        table.remove(call).unwrap();
        ended += 1;
    }
    assert_eq!((ended, table.used, table.next_deadline()), (1 << 15, 1 << 15, 11));
    assert_eq!(table.looks.take(), 1 << 16);
    while let Some(call) = table.any() {
        // One at the slot of the last one, too.
        assert!(table.looks.get() <= 2 << 16, "it goes on behind the last one");
        table.remove(call).unwrap();
    }
    assert!(table.is_empty());
}

#[test]
fn a_call_that_is_made_amid_a_look_at_deadlines_has_its_own() {
    let mut table = CallTable::new(4, 0);
    let first = table.insert_as(State::Queued, 1, 10, 0).unwrap();
    table.insert_as(State::Queued, 2, 10, 0).unwrap();
    table.insert_as(State::Queued, 3, 50, 0).unwrap();
    assert_eq!(table.expired(10), Some(first));
    table.remove(first).unwrap();
    let again = table.insert_as(State::Queued, 4, 20, 0).unwrap();
    assert_eq!(table.slot(again), table.slot(first));
    let second = table.expired(10).unwrap();
    table.remove(second).unwrap();
    assert_eq!(table.expired(10), None);
    assert_eq!(table.next_deadline(), 20);
    assert_eq!(table.expired(20), Some(again));
}
