//! Calls in the reverse direction (RFC 8167; version 2 §5.2.5).
//! A server calls its client, on the connection that the client made.

use rpcrdma::CloseReasonKind;
use rpcrdma::service::Caller;
use rpcrdma::shard::CloseCause;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma_tests::prelude::*;

use super::lifecycle::draining;

pub(super) const HELLO: u32 = 100;

/// The standard services, and a procedure that reports its caller.
pub(super) fn telling_services() -> (Services, Receiver<Caller>) {
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let hello = Procedure::new(move |call| {
        let told = tell.lock().map(|tell| tell.send(call.info().caller()));
        told.is_ok().then_some(()).ok_or(Refusal::SystemError)
    });
    (standard_and([(HELLO, hello)]), told)
}

pub(super) fn serving_client(shard: Config) -> ClientConfig {
    ClientConfig { services: Some(Arc::new(standard_services())), ..small_client(shard) }
}

/// The server's handle to call a client, which says hello.
pub(super) fn call_back(world: &World, forward: &mut Client, told: &Receiver<Caller>) -> Client {
    forward.call(ClientCall::new(HELLO)).expect("a reply");
    let caller = told.recv().expect("the caller");
    world.server().call_back(caller, small_client(small())).expect("of this server")
}

/// A world with a server, a client with services, and the server's handle to call it.
pub(super) fn both_ways(name: &'static str, server: Config, client: Config) -> (World, Client, Client) {
    let (services, told) = telling_services();
    let (world, address) = World::serving(name, server, services);
    let mut forward = Client::connect(&address, serving_client(client)).expect("a connection");
    let reverse = call_back(&world, &mut forward, &told);
    (world, forward, reverse)
}

fn echo(client: &mut Client, args: &[u8]) -> Outcome {
    client.call(ClientCall::new(ECHO).args(args)).map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

/// A call with a Write chunk.
fn load() -> ClientCall {
    ClientCall::new(LOAD).args(be(&[1, 5, 5, 0, 0])).write_chunk(5000)
}

/// A client of version 1 grants these credits to its server, so they must not be 0.
#[test]
fn a_client_with_services_has_reverse_credits() {
    let world = World::new("no-credits");
    let config = || serving_client(small().with(|c| c.debug.reverse_credits = 0));
    for refused in [
        Client::connect(&world.address(), config()).expect_err("refused"),
        LocalClient::connect(&world.address(), config()).expect_err("refused"),
    ] {
        assert!(refused.to_string().contains("reverse_credits is 0"), "{refused}");
    }
}

#[test]
fn both_directions_at_once_in_each_version() {
    for_each(SCHEMES, |scheme| {
        let (_world, mut forward, mut reverse) = both_ways("both-ways", in_mode(scheme), in_mode(scheme));
        let echoes = |client: &mut Client, numbers: &mut dyn Iterator<Item = u32>| {
            numbers.for_each(|n| assert_eq!(echo(client, &be(&[n])), Ok(be(&[n]))));
        };
        let other = std::thread::spawn(move || {
            echoes(&mut reverse, &mut (0..2000));
            reverse
        });
        echoes(&mut forward, &mut (0..2000).map(|n: u32| !n));
        drop(other.join().unwrap());
        let served = forward.stats().unwrap().calls;
        assert!(served >= 4001, "{served} calls made and served by the client");
    });
}

#[test]
fn reverse_calls_of_any_length_and_with_chunks() {
    for_each(SCHEMES_2, |scheme| {
        let (_world, _forward, mut reverse) = both_ways("reverse-forms", in_mode(scheme), in_mode(scheme));
        [0, 4, 3000].iter().for_each(|&len| assert_eq!(echo(&mut reverse, &vec![7; len]), Ok(vec![7; len])));
        assert!(reverse.call(load()).unwrap().chunk(0).is_some());
    });
}

#[test]
fn reverse_calls_keep_to_the_level_of_the_client() {
    for (level, inline, chunks) in [
        (ReverseSupport::None, Err(CallError::NoReverse), Err(CallError::NoReverse)),
        (ReverseSupport::Inline, Ok(()), Err(Defect::NoChunks.into())),
        (ReverseSupport::General, Ok(()), Ok(())),
    ] {
        let client = small().with(|c| c.debug.reverse = level);
        let (_world, _forward, mut reverse) = both_ways("reverse-levels", small(), client);
        assert_eq!(echo(&mut reverse, b"four").map(drop), inline, "{level:?}");
        assert_eq!(reverse.call(load()).map(drop).map_err(CallError::from), chunks, "{level:?}");
    }
}

#[test]
fn a_client_without_services_is_not_called() {
    let (services, told) = telling_services();
    let (world, address) = World::serving("reverse-none", small_server(), services);
    let mut forward = Client::connect(&address, small_client(small())).unwrap();
    let mut reverse = call_back(&world, &mut forward, &told);
    assert_eq!(echo(&mut reverse, b"four"), Err(CallError::NoReverse));
    assert_eq!(echo(&mut forward, b"four").unwrap(), b"four");
}

/// A handler that blocks for a reverse call would wait for its own shard.
#[test]
fn a_handler_does_not_block_its_own_shard() {
    const BACK: u32 = 101;
    let (mut services, told) = telling_services();
    let reverse: Arc<Mutex<Option<Client>>> = Arc::default();
    let held = Arc::clone(&reverse);
    let back = Procedure::new(move |call| {
        let mut reverse = held.lock().expect("no panic");
        let reverse = reverse.as_mut().expect("set before");
        let failed = reverse.call(ClientCall::new(ECHO).args(b"four".to_vec())).expect_err("it would not end").error;
        assert_eq!(failed, Defect::OwnShard.into());
        assert_eq!(reverse.alloc(4096).expect_err("it would not end"), Defect::OwnShard.into());
        // What does not block is possible.
        let started = reverse.start(ClientCall::new(ECHO).args(b"four".to_vec())).expect("a start");
        drop(started);
        call.reply_mut(4)?.copy_from_slice(b"done");
        Ok(())
    });
    let blocking = Arc::clone(&reverse);
    let join = Procedure::new(move |_| {
        let mut reverse = blocking.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let started = reverse.as_mut().expect("set before").start(ClientCall::new(ECHO).args(b"four".to_vec()));
        started.expect("a start").join().map(drop).map_err(|_| Refusal::GarbageArguments)
    });
    services.add(PROGRAM, VERSION, BACK, back).add(PROGRAM, VERSION, BACK + 1, join);
    let (world, address) = World::serving("reverse-own-shard", small_server(), services);
    let mut forward = Client::connect(&address, serving_client(small())).expect("a connection");
    *reverse.lock().expect("no panic") = Some(call_back(&world, &mut forward, &told));
    assert_eq!(forward.call(ClientCall::new(BACK)).expect("a reply").results(), b"done");
    // A join there is the handler's panic.
    let failed = forward.call(ClientCall::new(BACK + 1)).expect_err("it would not end").error;
    assert_eq!(failed, CallError::Refused(Refusal::SystemError));
    assert_eq!(echo(&mut forward, b"four").expect("the shard runs"), b"four");
    // Another thread may block for it.
    let mut reverse = reverse.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take().expect("set before");
    assert_eq!(echo(&mut reverse, b"four").expect("a reply"), b"four");
}

/// Otherwise a restart would fail the calls whose handlers call back.
#[test]
fn a_draining_server_calls_back_while_it_serves_calls() {
    const HOLD: u32 = 102;
    for_each(SCHEMES, |scheme| {
        let (mut services, told) = telling_services();
        let (hold, held) = channel();
        services.add(PROGRAM, VERSION, HOLD, Procedure::deferred(move |call| hold.send(call).expect("it is awaited")));
        let (mut world, address) = World::serving("reverse-drain", scheme, services);
        let mut forward = Client::connect(&address, serving_client(in_mode(scheme))).expect("a connection");
        let mut reverse = call_back(&world, &mut forward, &told);
        let mut pending = forward.start(ClientCall::new(HOLD)).expect("a start");
        let call = held.recv().expect("a call");
        let draining = draining(&mut world, Duration::from_secs(20));
        // A draining server refuses connections.
        assert!(settles(|| LocalClient::connect(&address, scheme.of_client()).is_err()));
        assert_eq!(echo(&mut reverse, b"four"), Ok(b"four".to_vec()));
        call.answer(Ok(()));
        pending.join().expect("a reply");
        draining.join().expect("it ends").expect("nothing is left");
        let refused = echo(&mut reverse, b"four");
        assert!(matches!(refused, Err(CallError::Closed | CallError::ConnectionLost { sent: false })), "{refused:?}");
    });
}

#[test]
fn reverse_calls_end_with_the_connection() {
    let (_world, forward, mut reverse) = both_ways("reverse-end", small(), small());
    assert_eq!(echo(&mut reverse, b"four").unwrap(), b"four");
    drop(forward);
    let error = eventually(|| echo(&mut reverse, b"four").err());
    assert!(matches!(error, CallError::Closed | CallError::ConnectionLost { .. }), "{error:?}");
    assert!(settles(|| reverse.close_reason().is_some()));
    let reason = reverse.close_reason();
    assert!(matches!(reason.map(CloseReason::cause), Some(CloseCause::Disconnected { .. })), "{reason:?}");
}

#[test]
fn a_late_callback_gets_an_error() {
    let (services, told) = telling_services();
    let (world, address) = World::serving("reverse-late", small_server(), services);
    let mut forward = Client::connect(&address, serving_client(small())).unwrap();
    forward.call(ClientCall::new(HELLO)).unwrap();
    drop(forward);
    assert!(settles(|| world.server().stats().iter().all(|stats| stats.connections == 0)));
    let mut reverse = world.server().call_back(told.recv().unwrap(), small_client(small())).unwrap();
    assert_eq!(echo(&mut reverse, b"four"), Err(CallError::Closed));
    assert_eq!(reverse.close_reason().map(CloseReason::kind), Some(CloseReasonKind::Unknown));
}
