//! A failed call returns its buffers, unless its server can still reach them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rpcrdma::client::{Client, ClientCall, LocalClient};
use rpcrdma::proto::Defect;
use rpcrdma::service::{DeferredCall, MAX_CHUNKS};
use rpcrdma::{Buf, CallError, CallResult, CreditMode, FailedCall, Procedure, Refusal, Services};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

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
    let (mut services, keep) = (standard_services(), Arc::clone(&kept));
    let keep = Procedure::deferred(move |call| keep.lock().expect("no panic").push(call));
    services.add(PROGRAM, VERSION, KEEP, keep.read_chunks(1, LEN).uncounted().write_chunks(1, LEN));
    (services, kept)
}

fn start(client: &mut LocalClient, procedure: u32, token: u64, deadline: Option<Duration>) {
    let first = client.first();
    let mut data = client.alloc(first, LEN).expect("memory");
    pattern(token as u32, &mut data);
    let room = client.alloc(first, LEN).expect("memory");
    let mut call = client.prepare(procedure, 0).expect("memory");
    call = call.read_chunk(0, data);
    call = call.write_chunk_into(room);
    if let Some(time) = deadline {
        call = call.timeout(time);
    }
    client.start(first, call, token);
}

fn ended(client: &mut LocalClient) -> CallResult {
    let mut ended = None;
    assert!(settles(|| {
        client.poll(|done| ended = Some(done.result));
        ended.is_some()
    }));
    ended.expect("a call has ended")
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
    let mut world = World::new("returned");
    let (services, kept) = keeping();
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    start(&mut client, MISSING, 1, None);
    let (error, sent, room) = whole(ended(&mut client), 1);
    assert_eq!(error, CallError::Refused(Refusal::ProcedureUnavailable));
    // The buffers are reusable.
    let mut call = client.prepare(MIRROR, 4).expect("memory");
    call.args_mut();
    call = call.read_chunk(4, sent);
    call = call.write_chunk_into(room);
    assert!(patterned(1, client.call(call).expect("a reply").chunk(0).expect("a result")));
    // A reply holds the buffers of its call.
    start(&mut client, KEEP, 2, None);
    assert!(settles(|| {
        client.poll(|_| panic!("nobody answers yet"));
        kept.lock().expect("no panic").pop().map(|call| call.answer(Ok(()))).is_some()
    }));
    let mut reply = ended(&mut client).expect("a reply");
    assert!(patterned(2, &reply.take_sent().next().expect("what was sent")));
}

#[test]
fn a_lost_connection_and_a_closed_one_give_buffers_back() {
    let mut world = World::new("returned-lost");
    let (services, kept) = keeping();
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    start(&mut client, KEEP, 1, None);
    assert!(settles(|| {
        client.poll(|_| panic!("nobody answers"));
        !kept.lock().expect("no panic").is_empty()
    }));
    let first = client.first();
    let (mut late, room) = (client.alloc(first, LEN).expect("memory"), client.alloc(first, LEN).expect("memory"));
    pattern(2, &mut late);
    drop(world.take_server());
    assert_eq!(whole(ended(&mut client), 1).0, CallError::ConnectionLost { sent: true });
    let mut call = client.prepare(KEEP, 0).expect("memory");
    call = call.read_chunk(0, late);
    call = call.write_chunk_into(room);
    client.start(first, call, 2);
    assert_eq!(whole(ended(&mut client), 2).0, CallError::Closed);
    kept.lock().expect("no panic").clear();
}

#[test]
fn registered_memory_is_kept_and_unsent_buffers_are_returned() {
    let mut world = World::new("returned-late");
    let (services, kept) = keeping();
    let shard = small().with(|c| {
        c.limits.credits = 4;
        c.limits.max_credits = 4;
    });
    let address = world.serve_with(rpcrdma::server::ServerConfig { shard, ..small_server() }, services);
    // In version 1 an unanswered call holds a credit.
    let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    let away = || kept.lock().expect("no panic").len() as u64;
    // The first calls take all credits.
    (0..6).for_each(|token| start(&mut client, KEEP, token, Some(Duration::from_millis(20))));
    let mut ends = Vec::new();
    assert!(settles(|| {
        client.poll(|done| ends.push(done));
        ends.len() == 6
    }));
    let was_sent = |end: &&rpcrdma::client::Done| {
        matches!(end.result, Err(FailedCall { error: CallError::TimedOut { sent: true }, .. }))
    };
    let sent = ends.iter().filter(was_sent).count() as u64;
    assert!((1..6).contains(&sent), "{sent} of 6");
    assert!(settles(|| away() == sent), "{sent} were sent, {} have come", away());
    for done in ends {
        let seed = done.token as u32;
        match done.result {
            Err(FailedCall { error: CallError::TimedOut { sent: true }, .. }) => {
                nothing(done.result.expect_err("it has failed"));
            }
            result => {
                let error = whole(result, seed).0;
                let held = matches!(error, CallError::NoCredits { unanswered, .. } if unanswered as u64 == sent);
                assert!(held, "{error:?}: the server holds all credits");
            }
        }
    }
    assert_eq!(client.stats().exposed_buffers, 2 * sent, "those that the server has");
    kept.lock().expect("no panic").clear();
    assert!(settles(|| {
        client.poll(|_| panic!("all have ended"));
        client.stats().exposed_buffers == 0
    }));
}

#[test]
fn a_client_with_a_thread_gives_them_back_too() {
    let mut world = World::new("returned-thread");
    let (services, kept) = keeping();
    let address = world.serve_with(small_server(), services);
    let mut client = Client::connect(&address, small_client(small())).expect("a connection");
    let call = |client: &mut Client, procedure: u32| {
        let mut data = client.alloc(LEN).expect("memory");
        pattern(7, &mut data);
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
    let mut world = World::new("returned-waited");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let first = client.first();
    let mut data = client.alloc(first, LEN).expect("memory");
    pattern(3, &mut data);
    let mut call = client.prepare(MISSING, 0).expect("memory");
    call = call.read_chunk(0, data);
    call = call.write_chunk_into(client.alloc(first, LEN).expect("memory"));
    let refused = CallError::Refused(Refusal::ProcedureUnavailable);
    assert_eq!(whole(client.call(call), 3).0, refused);
    let mut client = Client::connect(&address, small_client(small())).expect("a connection");
    let mut data = client.alloc(LEN).expect("memory");
    pattern(4, &mut data);
    let call = ClientCall::new(MISSING).read_chunk(0, data).write_chunk(LEN as u32);
    assert_eq!(whole(client.call(call), 4).0, refused);
}

#[test]
fn a_call_that_is_not_started_gives_them_back() {
    let mut world = World::new("returned-unstarted");
    let (services, kept) = keeping();
    let address = world.serve_with(small_server(), services);
    let config = small_client(small().with(|c| c.limits.max_calls = 1));
    let mut client = Client::connect(&address, config).expect("a connection");
    let with = |client: &mut Client, chunks: u32| {
        (0..chunks).fold(ClientCall::new(KEEP).write_chunk(LEN as u32), |call, seed| {
            let mut data = client.alloc(LEN).expect("memory");
            pattern(seed, &mut data);
            call.read_chunk(seed as usize * LEN, data)
        })
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
    let mut world = World::new("returned-stopped");
    let (_forward, mut reverse) = both_ways(&mut world, small(), small());
    let mut data = reverse.alloc(LEN).expect("memory");
    pattern(5, &mut data);
    assert!(!reverse.is_closed());
    drop(world.take_server());
    let call = ClientCall::new(STORE).read_chunk(4, data);
    assert_eq!(sent(reverse.start(call).expect_err("nobody is there"), 5), CallError::Closed);
    assert!(reverse.is_closed() && reverse.close_reason().is_some());
}

#[test]
fn calls_deferred_to_reconnect_return_their_buffers_when_it_fails() {
    let mut world = World::new("returned-again");
    let (services, kept) = keeping();
    let address = world.serve_with(small_server(), services);
    let backoff = (Duration::from_millis(1), Duration::from_millis(10));
    let config = small_client(small()).with(|c| {
        c.connect.retransmit = true;
        c.connect.reconnect_attempts = 3;
        c.connect.reconnect_backoff = backoff;
    });
    let mut client = world.client(&address, config);
    (1..=3).for_each(|token| start(&mut client, KEEP, token, None));
    assert!(settles(|| {
        client.poll(|_| panic!("nobody answers"));
        kept.lock().expect("no panic").len() == 3
    }));
    drop(world.take_server());
    let mut ends = Vec::new();
    assert!(settles(|| {
        client.poll(|done| ends.push(done));
        ends.len() == 3
    }));
    for done in ends {
        let seed = done.token as u32;
        assert!(matches!(whole(done.result, seed).0, CallError::ConnectionLost { .. }));
    }
    kept.lock().expect("no panic").clear();
}
