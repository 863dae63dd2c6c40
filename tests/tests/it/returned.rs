//! A call that fails gives its buffers back, unless its server can reach them yet.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rpcrdma::client::{Client, ClientCall, Done, LocalClient, Returned};
use rpcrdma::service::DeferredCall;
use rpcrdma::{Buf, CallError, Config, Procedure, Refusal, Scheme, Services};
use rpcrdma_tests::*;

use super::threads::block_on;

/// Takes its calls, and keeps them.
const KEEP: u32 = 50;
/// Nobody serves it.
const MISSING: u32 = 51;
const LEN: usize = 3000;

type Kept = Arc<Mutex<Vec<DeferredCall>>>;

/// The standard services, and one that keeps its calls.
fn keeping() -> (Services, Kept) {
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
    let mut call = client.prepare_with_chunks(procedure, 0).expect("memory");
    call.read_chunk(0, data).expect("its first");
    call.write_chunk(room).expect("its first");
    deadline.into_iter().for_each(|time| call.deadline(time));
    client.start(first, call, token);
}

fn ended(client: &mut LocalClient) -> Done {
    let mut ended = None;
    assert!(settles(|| {
        client.poll(|done| ended = Some(done));
        ended.is_some()
    }));
    ended.expect("a call has ended")
}

/// Both buffers are back, as they were given.
fn whole(returned: &mut Returned, seed: u32) -> (Buf, Buf) {
    let sent = returned.take_sent().next().expect("what was to be sent");
    let room = returned.take_chunks().next().expect("what was offered");
    assert!(patterned(seed, &sent) && sent.len() == LEN);
    assert_eq!(room.len(), LEN);
    assert!(nothing(returned));
    (sent, room)
}

fn nothing(returned: &mut Returned) -> bool {
    returned.take_sent().count() == 0 && returned.take_chunks().count() == 0
}

#[test]
fn a_call_that_is_refused_gives_its_buffers_back() {
    let mut world = World::new("returned");
    let (services, kept) = keeping();
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    start(&mut client, MISSING, 1, None);
    let Done { result, mut returned, .. } = ended(&mut client);
    assert!(matches!(result, Err(CallError::Refused(Refusal::ProcedureUnavailable))), "{result:?}");
    let (sent, room) = whole(&mut returned, 1);
    // They are as good as new.
    let mut call = client.prepare_with_chunks(MIRROR, 4).expect("memory");
    call.args_mut();
    call.read_chunk(4, sent).expect("its first");
    call.write_chunk(room).expect("its first");
    assert!(patterned(1, client.call(call).expect("a reply").chunk(0).expect("a result")));
    // A reply has them itself.
    start(&mut client, KEEP, 2, None);
    assert!(settles(|| {
        client.poll(|_| panic!("nobody answers yet"));
        kept.lock().expect("no panic").pop().map(|call| call.answer(Ok(()))).is_some()
    }));
    let Done { result, mut returned, .. } = ended(&mut client);
    assert!(nothing(&mut returned));
    let mut reply = result.expect("a reply");
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
    let (late, room) = (client.alloc(first, LEN).expect("memory"), client.alloc(first, LEN).expect("memory"));
    drop(world.take_server());
    let Done { result, mut returned, .. } = ended(&mut client);
    assert!(matches!(result, Err(CallError::ConnectionLost { sent: true })), "{result:?}");
    drop(whole(&mut returned, 1));
    let mut call = client.prepare_with_chunks(KEEP, 0).expect("memory");
    call.read_chunk(0, late).expect("its first");
    call.write_chunk(room).expect("its first");
    client.start(first, call, 2);
    let Done { result, mut returned, .. } = ended(&mut client);
    assert!(matches!(result, Err(CallError::Closed)), "{result:?}");
    let sent = returned.take_sent().count();
    assert_eq!((sent, returned.take_chunks().count()), (1, 1));
    kept.lock().expect("no panic").clear();
}

#[test]
fn what_a_server_can_reach_yet_is_kept_and_what_was_not_sent_is_not() {
    let mut world = World::new("returned-late");
    let (services, kept) = keeping();
    let shard = Config { credits: 4, max_credits: 4, ..small() };
    let address = world.serve_with(rpcrdma::server::ServerConfig { shard, ..small_server() }, services);
    // In version 1 a credit is a call that is not answered.
    let mut client = world.client(&address, Config { scheme: Scheme::V1, ..small() });
    let away = || kept.lock().expect("no panic").len() as u64;
    // The first of them take all credits.
    (0..6).for_each(|token| start(&mut client, KEEP, token, Some(Duration::from_millis(200))));
    let mut ends = Vec::new();
    assert!(settles(|| {
        client.poll(|done| ends.push(done));
        ends.len() == 6
    }));
    let sent = away();
    assert!((1..6).contains(&sent), "{sent} of 6");
    for Done { token, result, mut returned } in ends {
        match result {
            Err(CallError::DeadlinePassed { sent: true }) => assert!(nothing(&mut returned), "{token}"),
            Err(CallError::DeadlinePassed { sent: false }) => drop(whole(&mut returned, token as u32)),
            other => panic!("{token}: {other:?}"),
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
    let mut pending = call(&mut client, MISSING);
    assert!(matches!(pending.wait(), Err(CallError::Refused(_))));
    drop(whole(pending.returned(), 7));
    let mut pending = call(&mut client, MISSING);
    assert!(matches!(block_on(&mut pending), Err(CallError::Refused(_))));
    drop(whole(pending.returned(), 7));
    let mut pending = call(&mut client, KEEP);
    assert!(settles(|| !kept.lock().expect("no panic").is_empty()));
    assert!(nothing(pending.returned()));
    drop(world.take_server());
    assert!(matches!(pending.wait(), Err(CallError::ConnectionLost { sent: true })));
    drop(whole(pending.returned(), 7));
    kept.lock().expect("no panic").clear();
}
