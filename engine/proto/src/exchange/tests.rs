//! Tests of the exchange, one for each rule.

use super::operation::{encode_operation, subset};
use super::*;
use crate::wire::properties::{Builder, Property, ReverseSupport};
use Characteristic::{ReceiveSize, RemoteInvalidation, ReverseSupport as Reverse, SegmentCount, SendSize};

const REVISION: Revision = Revision::Ietf00;

fn end() -> Exchange {
    Exchange::new(REVISION, &Properties::default(), &[])
}

/// Delivers all operations of one end to the other.
fn deliver(from: &mut Exchange, to: &mut Exchange) {
    while let Some(out) = from.poll_transmit() {
        to.handle(out.xid, out.flags, out.code.code(), &out.optinfo).expect("an operation of another end is valid");
    }
}

fn events(exchange: &mut Exchange) -> Vec<CharacteristicEvent> {
    std::iter::from_fn(|| exchange.poll_event()).collect()
}

/// Two ends with exchanged characteristics.
fn pair() -> (Exchange, Exchange) {
    let (mut a, mut b) = (end(), end());
    deliver(&mut a, &mut b);
    deliver(&mut b, &mut a);
    assert_eq!((events(&mut a), events(&mut b)), (vec![], vec![]), "defaults cause no event");
    (a, b)
}

/// Delivers an operation that no [`Exchange`] would send.
fn deliver_raw(to: &mut Exchange, xid: u32, operation: Operation<'_>) -> Result<(), ExchangeError> {
    let out = encode_operation(xid, operation);
    to.handle(xid, out.flags, out.code.code(), &out.optinfo)
}

fn request(to: &mut Exchange, xid: u32, wanted: &[(u32, &[u8])]) -> Result<(), ExchangeError> {
    let mut bytes = vec![0; 16 * wanted.len()];
    let mut builder = Builder::new(&mut bytes);
    for (which, data) in wanted {
        builder = builder.property(Property { which: *which, data }).expect("room");
    }
    deliver_raw(to, xid, Operation::Request { want: builder.finish() })
}

/// The XID of the next operation to send, which is an answer, and its subsets: done, rejected, pending.
fn next_answer(exchange: &mut Exchange) -> (u32, [Vec<usize>; 3]) {
    let out = exchange.poll_transmit().expect("an answer");
    assert_eq!(out.flags, Flags::RESPONSE);
    match Operation::parse(out.code, &out.optinfo) {
        Ok(Operation::Respond { done, rejected, pending }) => {
            (out.xid, [done, rejected, pending].map(|subset| subset.iter().collect()))
        }
        other => panic!("not an answer: {other:?}"),
    }
}

fn respond(to: &mut Exchange, xid: u32, [done, rejected, pending]: [&[usize]; 3]) -> Result<(), ExchangeError> {
    let mut words = [[0; 8]; 3];
    let [done_words, rejected_words, pending_words] = &mut words;
    let operation = Operation::Respond {
        done: subset(done.iter().copied(), done_words),
        rejected: subset(rejected.iter().copied(), rejected_words),
        pending: subset(pending.iter().copied(), pending_words),
    };
    deliver_raw(to, xid, operation)
}

fn answer(wanted: Characteristic, outcome: ChangeOutcome) -> CharacteristicEvent {
    CharacteristicEvent::Answer { wanted, outcome }
}

#[test]
fn the_initial_statement_is_complete_and_fits_the_smallest_receive() {
    let local = Properties { receive_size: 65536, remote_invalidation: true, ..Properties::default() };
    let mut a = Exchange::new(REVISION, &local, &[PropertyId::RemoteInvalidation]);
    let out = a.poll_transmit().expect("INITXCH");
    assert_eq!((out.xid, out.flags, out.code), (0, Flags::NONE, OperationCode::Initial));
    assert!(out.optinfo.len() < 200);
    let mut b = end();
    b.handle(out.xid, out.flags, out.code.code(), &out.optinfo).expect("accepted");
    assert_eq!(
        events(&mut b),
        [CharacteristicEvent::Peer(ReceiveSize(65536)), CharacteristicEvent::Peer(RemoteInvalidation(true))],
        "each value that differs from its default"
    );
    assert_eq!(b.peer(), &local);
    assert_eq!(
        b.request(1, &[RemoteInvalidation(false)]),
        Err(ChangeError::Constant(PropertyId::RemoteInvalidation)),
        "the peer has declared it constant"
    );
    assert_eq!(a.poll_transmit(), None);
}

#[test]
fn the_older_revision_states_only_its_own_characteristics() {
    let mut a = Exchange::new(Revision::Cel09, &Properties::default(), &[]);
    let out = a.poll_transmit().expect("INITXCH");
    let Ok(Operation::Initial { start, .. }) = Operation::parse(out.code, &out.optinfo) else { panic!("not INITXCH") };
    let which: Vec<u32> = start.iter().map(|property| property.which).collect();
    assert_eq!(which, [1, 2, 0xFFFF_FF02]);
    assert_eq!(a.update(SegmentCount(4)), Err(ChangeError::NotInRevision(PropertyId::SegmentCount)));
    assert_eq!(a.update(ReceiveSize(8192)), Ok(()));
}

#[test]
fn characteristics_start_at_the_connprop_values() {
    let mut a = end();
    let mut buffer = [0; 64];
    let set = Builder::new(&mut buffer).uint32(PropertyId::ReceiveSize.code(), 16384).expect("room").finish();
    a.adopt_connprop(&set);
    assert_eq!((a.peer().receive_size, a.peer().send_size), (16384, 4096));
    assert_eq!(a.poll_event(), None);
    assert_eq!(a.request(1, &[ReceiveSize(32768)]), Ok(()));
    // Properties that were left out do not change (version 2 §6.4.4).
    let mut b = end();
    assert_eq!(b.request(1, &[SendSize(1)]), Err(ChangeError::Constant(PropertyId::SendSize)));
}

#[test]
fn unknown_properties_are_ignored_without_an_error() {
    let mut a = end();
    let mut buffer = [0; 64];
    let start = Builder::new(&mut buffer)
        .uint32(0x1234, 7)
        .and_then(|set| set.uint32(PropertyId::ReceiveSize.code(), 8192))
        .expect("room")
        .finish();
    assert_eq!(deliver_raw(&mut a, 0, Operation::Initial { start, constant: Subset::default() }), Ok(()));
    let now = Property { which: 0x1234, data: &[1, 2, 3] };
    assert_eq!(deliver_raw(&mut a, 0, Operation::Update { now, clears_pending: true }), Ok(()));
    assert_eq!(events(&mut a), [CharacteristicEvent::Peer(ReceiveSize(8192))]);
}

#[test]
fn each_requested_value_is_done_rejected_or_pending() {
    let (mut a, mut b) = pair();
    let wanted = [SegmentCount(8), ReceiveSize(8192), Reverse(ReverseSupport::General)];
    assert_eq!(a.request(77, &wanted), Ok(()));
    deliver(&mut a, &mut b);
    assert_eq!(events(&mut b), [CharacteristicEvent::Requested(wanted.iter().copied().collect())]);
    assert!(!b.has_output(), "the answer waits for the decision");
    assert!(b.answer(|value| match value {
        SegmentCount(_) => Verdict::Done,
        ReceiveSize(_) => Verdict::Pending,
        _ => Verdict::Rejected,
    }));
    assert!(!b.answer(|_| Verdict::Done), "a request is answered once");
    assert_eq!((b.local().segment_count, b.local().receive_size), (8, 4096));
    assert_eq!(next_answer(&mut b.clone()), (77, [vec![0], vec![2], vec![1]]));
    deliver(&mut b, &mut a);
    assert_eq!(
        events(&mut a),
        [
            CharacteristicEvent::Peer(SegmentCount(8)),
            answer(wanted[0], ChangeOutcome::Done),
            answer(wanted[1], ChangeOutcome::Pending),
            answer(wanted[2], ChangeOutcome::Rejected),
        ]
    );
    assert_eq!((a.peer().segment_count, a.peer().receive_size), (8, 4096));
}

#[test]
fn a_pending_request_ends_by_the_update_that_clears_it() {
    let ends = [
        (ReceiveSize(8192), ChangeOutcome::Done),
        (ReceiveSize(4096), ChangeOutcome::Rejected),
        (ReceiveSize(6000), ChangeOutcome::Partial(ReceiveSize(6000))),
    ];
    for (last, outcome) in ends {
        let (mut a, mut b) = pair();
        a.request(1, &[ReceiveSize(8192)]).expect("may be requested");
        deliver(&mut a, &mut b);
        assert!(b.answer(|_| Verdict::Pending));
        // An intermediate value takes effect, and leaves the request open.
        b.update(ReceiveSize(5000)).expect("may change");
        deliver(&mut b, &mut a);
        assert_eq!(
            events(&mut a),
            [answer(ReceiveSize(8192), ChangeOutcome::Pending), CharacteristicEvent::Peer(ReceiveSize(5000))]
        );
        assert_eq!(a.request(2, &[ReceiveSize(9000)]), Err(ChangeError::Pending(PropertyId::ReceiveSize)));
        b.resolve(last).expect("is pending");
        assert_eq!(b.resolve(last), Err(ChangeError::NotPending(PropertyId::ReceiveSize)), "it is resolved once");
        deliver(&mut b, &mut a);
        assert_eq!(events(&mut a), [CharacteristicEvent::Peer(last), answer(ReceiveSize(8192), outcome)]);
        assert_eq!(a.request(2, &[ReceiveSize(9000)]), Ok(()), "the earlier request has ended");
    }
}

#[test]
fn an_unsolicited_update_never_clears_pending() {
    let (mut a, mut b) = pair();
    b.update(ReceiveSize(8192)).expect("may change");
    let out = b.poll_transmit().expect("UPDXCH");
    assert_eq!((out.xid, out.flags), (0, Flags::NONE));
    assert!(matches!(
        Operation::parse(out.code, &out.optinfo),
        Ok(Operation::Update { clears_pending: false, now: Property { data: [0, 0, 32, 0], .. } })
    ));
    a.handle(out.xid, out.flags, out.code.code(), &out.optinfo).expect("accepted");
    assert_eq!(events(&mut a), [CharacteristicEvent::Peer(ReceiveSize(8192))]);
    b.update(ReceiveSize(8192)).expect("no change");
    assert!(!b.has_output(), "an equal value is not announced");
    // If a peer sends an unsolicited update with the flag nevertheless, its value takes effect.
    let now = Property { which: PropertyId::ReceiveSize.code(), data: &[0, 0, 48, 0] };
    assert_eq!(deliver_raw(&mut a, 0, Operation::Update { now, clears_pending: true }), Ok(()));
    assert_eq!(events(&mut a), [CharacteristicEvent::Peer(ReceiveSize(12288))]);
    assert_eq!(a.unexpected(), 1);
}

#[test]
fn only_one_request_may_be_outstanding() {
    let (mut a, mut b) = pair();
    assert_eq!(a.request(1, &[]), Err(ChangeError::Empty));
    assert_eq!(a.request(1, &[SendSize(1), SendSize(2)]), Err(ChangeError::Twice(PropertyId::SendSize)));
    assert_eq!(a.request(1, &[SendSize(8192)]), Ok(()));
    assert_eq!(a.request(2, &[SegmentCount(2)]), Err(ChangeError::Busy));
    deliver(&mut a, &mut b);
    assert_eq!(a.request(2, &[SegmentCount(2)]), Err(ChangeError::Busy), "until it is answered");
    assert!(b.answer(|_| Verdict::Rejected));
    deliver(&mut b, &mut a);
    assert_eq!(events(&mut a), [answer(SendSize(8192), ChangeOutcome::Rejected)]);
    assert_eq!(a.request(2, &[SegmentCount(2)]), Ok(()));
}

#[test]
fn a_second_request_of_the_peer_is_rejected_while_the_first_is_open() {
    let (_, mut b) = pair();
    let size: (u32, &[u8]) = (PropertyId::ReceiveSize.code(), &[0, 1, 0, 0]);
    assert_eq!(request(&mut b, 1, &[size]), Ok(()));
    assert_eq!(request(&mut b, 2, &[size]), Ok(()));
    assert_eq!(next_answer(&mut b), (2, [vec![], vec![0], vec![]]));
    assert!(b.answer(|_| Verdict::Pending));
    assert_eq!(next_answer(&mut b), (1, [vec![], vec![], vec![0]]));
    // A pending value is not requested again: an update could not name the request that it ends.
    assert_eq!(request(&mut b, 3, &[size]), Ok(()));
    assert_eq!(next_answer(&mut b), (3, [vec![], vec![0], vec![]]));
    assert_eq!(events(&mut b).len(), 1, "the owner was asked once");
}

#[test]
fn requests_for_constant_characteristics_are_rejected_without_the_owner() {
    let mut b = Exchange::new(REVISION, &Properties::default(), &[PropertyId::SegmentSize]);
    assert!(b.poll_transmit().is_some());
    let wanted: [(u32, &[u8]); 5] = [
        (0x1234, &[9]),
        (PropertyId::SegmentSize.code(), &[0, 0, 16, 0]),
        (PropertyId::SegmentCount.code(), &[0, 0, 0, 4]),
        (PropertyId::SegmentCount.code(), &[0, 0, 0, 5]),
        (PropertyId::HostAuth.code(), &[]),
    ];
    assert_eq!(request(&mut b, 9, &wanted), Ok(()));
    assert_eq!(events(&mut b), [CharacteristicEvent::Requested([SegmentCount(4)].into_iter().collect())]);
    assert!(b.answer(|_| Verdict::Done));
    assert_eq!(next_answer(&mut b), (9, [vec![2], vec![0, 1, 3, 4], vec![]]));
    assert_eq!(b.update(Characteristic::SegmentSize(1)), Err(ChangeError::Constant(PropertyId::SegmentSize)));
    // A property without data requests the default.
    assert_eq!(request(&mut b, 10, &[(PropertyId::SegmentCount.code(), &[])]), Ok(()));
    assert_eq!(events(&mut b), [CharacteristicEvent::Requested([SegmentCount(16)].into_iter().collect())]);
}

#[test]
fn a_request_of_the_maximum_length_is_answered_and_a_longer_one_is_an_error() {
    let (_, mut b) = pair();
    let unknown: Vec<(u32, &[u8])> = vec![(0x1234, &[]); MAX_REQUESTED];
    assert_eq!(request(&mut b, 1, &unknown), Ok(()));
    assert_eq!(next_answer(&mut b), (1, [vec![], (0..MAX_REQUESTED).collect(), vec![]]));
    let unknown: Vec<(u32, &[u8])> = vec![(0x1234, &[]); MAX_REQUESTED + 1];
    let error = request(&mut b, 2, &unknown).expect_err("too long");
    assert_eq!(error, ExchangeError::TooManyProperties(MAX_REQUESTED + 1));
    assert_eq!(error.answer(), Some(ErrorBody::System));
}

#[test]
fn queued_answers_are_bounded_while_the_peer_takes_none() {
    let (_, mut b) = pair();
    let size: (u32, &[u8]) = (PropertyId::ReceiveSize.code(), &[0, 1, 0, 0]);
    let refused = (0..100).filter(|xid| request(&mut b, *xid, &[size]).is_err()).count();
    assert_eq!(refused, 100 - MAX_ANSWERS);
    assert_eq!(request(&mut b, 1, &[size]), Err(ExchangeError::TooManyRequests));
    assert_eq!(b.queue.len() + usize::from(b.peer_request.is_some()), MAX_ANSWERS);
}

#[test]
fn an_answer_must_be_a_partition_of_the_request() {
    let bad: [[&[usize]; 3]; 4] = [
        [&[0], &[], &[]],      // not complete
        [&[0, 1], &[1], &[]],  // not disjoint
        [&[0], &[1], &[2]],    // beyond the end
        [&[0, 1], &[40], &[]], // far beyond the end
    ];
    for subsets in bad {
        let (mut a, _) = pair();
        a.request(5, &[ReceiveSize(8192), SendSize(8192)]).expect("may be requested");
        let error = respond(&mut a, 5, subsets).expect_err("no partition");
        assert_eq!((error, error.answer()), (ExchangeError::BadAnswer, None), "an answer is not answered");
        let rejected = [ReceiveSize(8192), SendSize(8192)].map(|value| answer(value, ChangeOutcome::Rejected));
        assert_eq!(events(&mut a), rejected, "the request has ended");
        assert_eq!(a.peer(), &Properties::default());
    }
}

#[test]
fn an_answer_carries_the_xid_of_its_request_and_the_response_flag() {
    let (mut a, _) = pair();
    assert_eq!(respond(&mut a, 5, [&[], &[0], &[]]), Err(ExchangeError::NotRequested(5)));
    a.request(5, &[SendSize(8192)]).expect("may be requested");
    assert_eq!(respond(&mut a, 6, [&[0], &[], &[]]), Err(ExchangeError::NotRequested(6)));
    assert_eq!(a.poll_event(), None, "the request is still open");
    let optinfo = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(a.clone().handle(5, Flags::NONE, 3, &optinfo), Err(ExchangeError::BadAnswer));
    assert_eq!(a.handle(5, Flags::RESPONSE, 3, &optinfo), Ok(()));
    assert_eq!(events(&mut a).last(), Some(&answer(SendSize(8192), ChangeOutcome::Done)));
    assert_eq!(
        a.handle(5, Flags::RESPONSE, 3, &optinfo),
        Err(ExchangeError::NotRequested(5)),
        "a request has one answer"
    );
}

#[test]
fn malformed_operations_get_the_error_of_the_specification() {
    let size = PropertyId::ReceiveSize.code() as u8;
    let (bad_xdr, none) = (Some(ErrorBody::BadXdr), Flags::NONE);
    let cases: [(u32, Flags, &[u8], Option<ErrorBody>); 10] = [
        (0, none, &[], Some(ErrorBody::InvalHtype)),
        (5, none, &[], Some(ErrorBody::InvalHtype)),
        (1, Flags::RESPONSE, &[0; 8], Some(ErrorBody::InvalFlag)),
        (2, Flags::RESPONSE, &[0; 4], Some(ErrorBody::InvalFlag)),
        (1, none, &[0; 4], bad_xdr),
        (2, none, &[0; 8], bad_xdr),
        // Data beyond the end of the message.
        (2, none, &[0, 0, 0, 1, 0, 0, 0, size, 0, 0, 0, 4], bad_xdr),
        // A known property with data of the wrong length.
        (4, none, &[0, 0, 0, size, 0, 0, 0, 2, 1, 1, 0, 0, 0, 0, 0, 0], bad_xdr),
        // A boolean that is neither 0 nor 1.
        (4, none, &[0, 0, 0, size, 0, 0, 0, 4, 0, 1, 0, 0, 0, 0, 0, 2], bad_xdr),
        // A constant that is not in the set.
        (1, none, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1], bad_xdr),
    ];
    for (code, flags, optinfo, expected) in cases {
        let (mut a, _) = pair();
        let error = a.handle(3, flags, code, optinfo).expect_err("malformed");
        assert_eq!(error.answer(), expected, "{code} {optinfo:?}: {error}");
        assert_eq!((*a.peer(), a.poll_event(), a.has_output()), (Properties::default(), None, false));
    }
}

#[test]
fn a_malformed_value_rejects_the_whole_operation() {
    let (mut a, _) = pair();
    let wanted: [(u32, &[u8]); 2] =
        [(PropertyId::ReceiveSize.code(), &[0, 1, 0, 0]), (PropertyId::SendSize.code(), &[1, 2])];
    assert!(request(&mut a, 1, &wanted).is_err());
    let mut bytes = [0; 64];
    let mut start = Builder::new(&mut bytes);
    for (which, data) in wanted {
        start = start.property(Property { which, data }).expect("room");
    }
    let statement = Operation::Initial { start: start.finish(), constant: Subset::default() };
    assert_eq!(deliver_raw(&mut a, 0, statement).map_err(|error| error.answer()), Err(Some(ErrorBody::BadXdr)));
    assert_eq!((*a.peer(), a.poll_event(), a.has_output()), (Properties::default(), None, false));
}

#[test]
fn a_peer_without_support_gets_no_more_operations() {
    let (mut a, _) = pair();
    a.request(5, &[SendSize(8192)]).expect("may be requested");
    a.poll_transmit().expect("REQXCH");
    a.update(ReceiveSize(8192)).expect("may change");
    assert!(!a.failed(4, &ErrorBody::BadXdr), "no request has this XID");
    assert!(a.failed(5, &ErrorBody::InvalHtype));
    assert_eq!(events(&mut a), [answer(SendSize(8192), ChangeOutcome::Rejected), CharacteristicEvent::Unsupported]);
    assert!(!a.has_output());
    assert_eq!(a.request(6, &[SendSize(1)]), Err(ChangeError::Unsupported));
    assert_eq!(a.update(ReceiveSize(1)), Err(ChangeError::Unsupported));

    let mut b = end();
    b.poll_transmit().expect("INITXCH");
    assert!(b.failed(0, &ErrorBody::InvalHtype), "the statement itself was refused");
    assert_eq!(events(&mut b), [CharacteristicEvent::Unsupported]);
}

#[test]
fn an_error_to_a_request_ends_only_that_request() {
    let (mut a, _) = pair();
    a.request(5, &[SendSize(8192)]).expect("may be requested");
    assert!(a.failed(5, &ErrorBody::System));
    assert_eq!(events(&mut a), [answer(SendSize(8192), ChangeOutcome::Rejected)]);
    assert_eq!(a.request(6, &[SendSize(8192)]), Ok(()));
}

#[test]
fn a_change_of_a_constant_characteristic_takes_effect_and_is_counted() {
    let mut a = end();
    let mut b = Exchange::new(REVISION, &Properties::default(), &[PropertyId::ReceiveSize]);
    deliver(&mut b, &mut a);
    let now = Property { which: PropertyId::ReceiveSize.code(), data: &[0, 0, 4, 0] };
    assert_eq!(deliver_raw(&mut a, 0, Operation::Update { now, clears_pending: false }), Ok(()));
    assert_eq!(events(&mut a), [CharacteristicEvent::Peer(ReceiveSize(1024))]);
    assert_eq!(a.unexpected(), 1);
}

#[test]
fn unsent_updates_of_one_value_are_merged() {
    let (mut a, mut b) = pair();
    for size in (8192..=65536).step_by(4096) {
        b.update(ReceiveSize(size)).expect("may change");
    }
    b.update(SendSize(8192)).expect("may change");
    assert_eq!(b.queue.len(), 2);
    deliver(&mut b, &mut a);
    assert_eq!(
        events(&mut a),
        [CharacteristicEvent::Peer(ReceiveSize(65536)), CharacteristicEvent::Peer(SendSize(8192))]
    );
    // An update before a queued answer is not replaced, because the answer may state another value.
    b.update(ReceiveSize(10)).expect("may change");
    request(&mut b, 7, &[(PropertyId::ReceiveSize.code(), &[0, 0, 0, 11])]).expect("accepted");
    assert!(b.answer(|_| Verdict::Done));
    b.update(ReceiveSize(12)).expect("may change");
    assert_eq!(b.queue.len(), 3);
}

#[test]
fn an_undefined_level_of_reverse_support_is_the_default_and_invalid_in_the_older_revision() {
    let update = |to: &mut Exchange, which, level: u32| {
        let now = Property { which, data: &level.to_be_bytes() };
        deliver_raw(to, 0, Operation::Update { now, clears_pending: false })
    };
    let (_, mut to) = pair();
    for level in [3, 7, u32::MAX] {
        update(&mut to, 5, 0).expect("an update");
        assert_eq!(events(&mut to), [CharacteristicEvent::Peer(Reverse(ReverseSupport::None))]);
        update(&mut to, 5, level).expect("an update");
        assert_eq!(events(&mut to), [CharacteristicEvent::Peer(Reverse(ReverseSupport::Inline))], "{level}");
        let mut older = Exchange::new(Revision::Cel09, &Properties::default(), &[]);
        assert!(matches!(update(&mut older, 2, level), Err(ExchangeError::BadXdr(_))));
    }
}

#[test]
fn a_repeated_property_is_an_error_in_a_statement_and_rejected_in_a_request() {
    let (mut a, mut b) = pair();
    let size = 8192_u32.to_be_bytes();
    let twice = [(1, &size[..]), (1, &size[..])];
    let mut bytes = [0; 32];
    let mut builder = Builder::new(&mut bytes);
    for (which, data) in twice {
        builder = builder.property(Property { which, data }).expect("room");
    }
    let stated = Operation::Initial { start: builder.finish(), constant: subset([], &mut []) };
    assert!(matches!(deliver_raw(&mut b, 0, stated), Err(ExchangeError::BadXdr(_))));
    assert_eq!(events(&mut b), [], "no value of the refused operation takes effect");
    request(&mut a, 9, &twice).expect("a request");
    a.answer(|_| Verdict::Done);
    assert_eq!(next_answer(&mut a), (9, [vec![0], vec![1], vec![]]));
}
