//! A failed call returns its buffers, unless its server can still reach them.

use rpcrdma_tests::prelude::*;

use super::reverse::both_ways;
use super::threads::block_on;

/// Defers its calls and keeps them.
pub(super) const KEEP: u32 = 50;
/// No server has this procedure.
const MISSING: u32 = 51;
const LEN: usize = 3000;

pub(super) type Kept = Arc<Mutex<Vec<DeferredCall>>>;

/// The standard services, and a procedure that keeps its calls.
pub(super) fn keeping() -> (Services, Kept) {
    let kept = Kept::default();
    let keep = Arc::clone(&kept);
    let keep = Procedure::deferred(move |call| keep.lock().expect("no panic").push(call));
    (standard_and([(KEEP, keep.read_chunks(1, LEN).uncounted().write_chunks(1, LEN))]), kept)
}

/// A server that keeps calls, and its client.
fn keeping_pair(name: &'static str, client: impl OfClient) -> (World, LocalClient, Kept) {
    let (services, kept) = keeping();
    let (world, client) = World::pair_with(name, small(), services, client);
    (world, client, kept)
}

/// Waits until the server keeps so many calls.
fn keeps(client: &mut LocalClient, kept: &Kept, calls: usize) {
    client.quiet_until(|_| kept.lock().expect("no panic").len() == calls);
}

/// A call that sends and receives [`LEN`] bytes.
fn with_buffers(client: &mut LocalClient, procedure: u32, seed: u32) -> ClientCall {
    let data = client.pattern_buf(seed, LEN);
    client.chunked(procedure, b"", &[], &[LEN]).read_chunk(0, data)
}

fn start(client: &mut LocalClient, procedure: u32, token: u64) {
    let call = with_buffers(client, procedure, token as u32);
    client.launch(call, token);
}

fn ended(client: &mut LocalClient) -> CallResult {
    eventually(|| {
        let mut ended = None;
        client.poll(|done| ended = Some(done.result));
        ended
    })
}

/// The error of a failed call that has returned both buffers unchanged.
fn whole(result: CallResult, seed: u32) -> (CallError, Buf, Buf) {
    let mut failed = result.expect_err("it fails");
    let sent = failed.returned.take_sent().next().expect("what was to be sent");
    let room = failed.returned.take_chunks().next().expect("what was offered");
    assert!(patterned(seed, &sent) && sent.len() == LEN);
    assert_eq!(room.len(), LEN);
    (nothing(failed), sent, room)
}

/// The same for a call whose results have no buffer yet.
fn sent(mut failed: FailedCall, seed: u32) -> CallError {
    let sent = failed.returned.take_sent().next().expect("what was to be sent");
    assert!(patterned(seed, &sent) && sent.len() == LEN);
    nothing(failed)
}

/// The error of a failed call that has returned nothing, or nothing more.
fn nothing(mut failed: FailedCall) -> CallError {
    assert_eq!((failed.returned.take_sent().count(), failed.returned.take_chunks().count()), (0, 0));
    failed.error
}

#[test]
fn a_call_that_is_refused_gives_its_buffers_back() {
    let (_world, mut client, kept) = keeping_pair("returned", small());
    start(&mut client, MISSING, 1);
    let (error, sent, room) = whole(ended(&mut client), 1);
    assert_eq!(error, CallError::Refused(Refusal::ProcedureUnavailable));
    // The buffers are reusable.
    let call = client.prepared(MIRROR, &[0; 4]).read_chunk(4, sent).write_chunk_into(room);
    assert!(patterned(1, client.call(call).expect("a reply").chunk(0).expect("a result")));
    // A reply holds the buffers of its call.
    start(&mut client, KEEP, 2);
    keeps(&mut client, &kept, 1);
    kept.lock().expect("no panic").remove(0).answer(Ok(()));
    let mut reply = ended(&mut client).expect("a reply");
    assert!(patterned(2, &reply.take_sent().next().expect("what was sent")));
}

#[test]
fn a_lost_connection_and_a_closed_one_give_buffers_back() {
    let (mut world, mut client, kept) = keeping_pair("returned-lost", small());
    start(&mut client, KEEP, 1);
    keeps(&mut client, &kept, 1);
    let late = with_buffers(&mut client, KEEP, 2);
    drop(world.take_server());
    assert_eq!(whole(ended(&mut client), 1).0, CallError::ConnectionLost { sent: true });
    client.launch(late, 2);
    assert_eq!(whole(ended(&mut client), 2).0, CallError::Closed);
    kept.lock().expect("no panic").clear();
}

#[test]
fn registered_memory_is_kept_and_unsent_buffers_are_returned() {
    let (services, kept) = keeping();
    let config = small().with(|c| (c.limits.credits, c.limits.max_credits) = (4, 4));
    // In version 1 an unanswered call holds a credit.
    let (_world, mut client) = World::pair_with("returned-late", config, services, CreditMode::V1);
    let away = || kept.lock().expect("no panic").len();
    // The first calls take all credits.
    for token in 0..6 {
        let call = with_buffers(&mut client, KEEP, token as u32).timeout(Duration::from_millis(20));
        client.launch(call, token);
    }
    let mut ends = Vec::new();
    client.each_end(6, |done| ends.push((done.token as u32, done.result)));
    let timed_out = CallError::TimedOut { sent: true };
    let is_sent = |end: &CallResult| end.as_ref().is_err_and(|failed| failed.error == timed_out);
    let sent = ends.iter().filter(|(_, end)| is_sent(end)).count();
    assert!((1..6).contains(&sent), "{sent} of 6");
    assert!(settles(|| away() == sent), "{sent} were sent, {} have come", away());
    for (seed, end) in ends {
        if is_sent(&end) {
            nothing(end.expect_err("it has failed"));
        } else {
            let error = whole(end, seed).0;
            let held = matches!(error, CallError::NoCredits { unanswered, .. } if unanswered == sent);
            assert!(held, "{error:?}: the server holds all credits");
        }
    }
    assert_eq!(client.stats().exposed_buffers, 2 * sent as u64, "those that the server has");
    kept.lock().expect("no panic").clear();
    client.quiet_until(|client| client.stats().exposed_buffers == 0);
}

/// Memory of a client with a thread, with a pattern.
fn data(client: &mut Client, seed: u32) -> Buf {
    let mut data = client.alloc(LEN).expect("memory");
    pattern(seed, &mut data);
    data
}

#[test]
fn a_client_with_a_thread_gives_them_back_too() {
    let (services, kept) = keeping();
    let (mut world, address) = World::serving("returned-thread", small(), services);
    let mut client = Client::connect(&address, small_client(small())).expect("a connection");
    let call = |client: &mut Client, procedure: u32| {
        let data = data(client, 7);
        client.start(ClientCall::new(procedure).read_chunk(0, data).write_chunk(LEN as u32)).expect("a slot")
    };
    let refused = CallError::Refused(Refusal::ProcedureUnavailable);
    assert_eq!(whole(call(&mut client, MISSING).join(), 7).0, refused);
    assert_eq!(whole(block_on(call(&mut client, MISSING)), 7).0, refused);
    let mut pending = call(&mut client, KEEP);
    assert!(settles(|| !kept.lock().expect("no panic").is_empty()));
    assert!(!client.is_closed());
    drop(world.take_server());
    assert_eq!(whole(pending.join(), 7).0, CallError::ConnectionLost { sent: true });
    assert!(client.is_closed() && client.close_reason().is_some());
    kept.lock().expect("no panic").clear();
}

#[test]
fn a_call_that_is_waited_for_gives_them_back() {
    let (world, address) = World::standard("returned-waited", small());
    let mut client = world.client(&address, small());
    let call = with_buffers(&mut client, MISSING, 3);
    let refused = CallError::Refused(Refusal::ProcedureUnavailable);
    assert_eq!(whole(client.call(call), 3).0, refused);
    let mut client = Client::connect(&address, small_client(small())).expect("a connection");
    let call = ClientCall::new(MISSING).read_chunk(0, data(&mut client, 4)).write_chunk(LEN as u32);
    assert_eq!(whole(client.call(call), 4).0, refused);
}

#[test]
fn a_call_that_is_not_started_gives_them_back() {
    let (services, kept) = keeping();
    let (_world, address) = World::serving("returned-unstarted", small(), services);
    let config = small_client(small().with(|c| c.limits.max_calls = 1));
    let mut client = Client::connect(&address, config).expect("a connection");
    let with = |client: &mut Client, chunks: u32| {
        let add = |call: ClientCall, seed| call.read_chunk(seed as usize * LEN, data(client, seed));
        (0..chunks).fold(ClientCall::new(KEEP).write_chunk(LEN as u32), add)
    };
    let first = with(&mut client, 1);
    let pending = client.start(first).expect("its slot");
    let second = with(&mut client, 1);
    let failed = client.start(second).expect_err("it has one slot");
    assert_eq!(sent(failed, 0), CallError::TooManyCalls { limit: 1 });
    let many = with(&mut client, MAX_CHUNKS as u32 + 1);
    let mut failed = client.start(many).expect_err("a chunk too many");
    let back: Vec<_> = failed.returned.take_sent().collect();
    assert_eq!(back.len(), MAX_CHUNKS, "those that it has");
    assert!((0..).zip(&back).all(|(seed, data)| patterned(seed, data)));
    assert_eq!(nothing(failed), Defect::TooManyChunks { limit: MAX_CHUNKS }.into());
    // Otherwise its handler could keep the call beyond the end of this test.
    assert!(settles(|| kept.lock().expect("no panic").len() == 1), "the first call arrives");
    drop(pending);
    kept.lock().expect("no panic").clear();
}

#[test]
fn a_call_of_a_stopped_shard_returns_its_buffers() {
    let (mut world, _forward, mut reverse) = both_ways("returned-stopped", small(), small());
    let data = data(&mut reverse, 5);
    assert!(!reverse.is_closed());
    drop(world.take_server());
    let call = ClientCall::new(STORE).read_chunk(4, data);
    assert_eq!(sent(reverse.start(call).expect_err("nobody is there"), 5), CallError::Closed);
    assert!(reverse.is_closed() && reverse.close_reason().is_some());
}

#[test]
fn calls_deferred_to_reconnect_return_their_buffers_when_it_fails() {
    let config = small_client(small()).with(|c| {
        (c.connect.retransmit, c.connect.reconnect_attempts) = (true, 3);
        c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(10));
    });
    let (mut world, mut client, kept) = keeping_pair("returned-again", config);
    (1..=3).for_each(|token| start(&mut client, KEEP, token));
    keeps(&mut client, &kept, 3);
    drop(world.take_server());
    client.each_end(3, |done| {
        assert!(matches!(whole(done.result, done.token as u32).0, CallError::ConnectionLost { .. }));
    });
    kept.lock().expect("no panic").clear();
}
