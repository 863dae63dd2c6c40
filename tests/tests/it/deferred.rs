//! Deferred calls: answered on the shard, by threads, in futures, or never.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rpcrdma::client::{Client, ClientCall, ClientConfig, LocalClient};
use rpcrdma::mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};
use rpcrdma::server::ServerConfig;
use rpcrdma::service::DeferredCall;
use rpcrdma::service::duplicate_requests::{Client as Whose, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::wire::{Body, Chunks, Flags, Revision, Version, View};
use rpcrdma::{Buf, CallError, Config, CreditMode, IdlePolicy, Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::reverse::{HELLO, telling_services};

const SCHEMES: [CreditMode; 3] = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];
/// A procedure whose calls the test holds.
const HELD: u32 = 400;

/// How a call is answered.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// In the handler.
    AtOnce,
    /// By a thread, in another order.
    Thread,
    /// In a future, after two awaits.
    Future,
}

/// A thread that runs calls in pairs, the later one first.
struct Desk {
    take: Option<mpsc::Sender<(DeferredCall, StandardHandler)>>,
    thread: Option<JoinHandle<()>>,
}

impl Desk {
    fn new() -> Self {
        let (take, calls) = mpsc::channel::<(DeferredCall, StandardHandler)>();
        let work = move || {
            while let Ok(first) = calls.recv() {
                let second = calls.recv_timeout(Duration::from_millis(1)).ok();
                for (call, handler) in second.into_iter().chain([first]) {
                    run(call, handler);
                }
            }
        };
        Self { take: Some(take), thread: Some(std::thread::spawn(work)) }
    }

    fn procedure(&self, handler: StandardHandler) -> Procedure {
        let desk = self.take.clone().expect("it is there");
        Procedure::deferred(move |call| desk.send((call, handler)).expect("the desk is open"))
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.take = None;
        self.thread.take().expect("it ends once").join().expect("it ends well");
    }
}

/// Runs a handler for a call and answers it; a panic drops the call.
fn run(mut call: DeferredCall, handler: StandardHandler) {
    let work = move || {
        let outcome = handler(&mut call);
        call.answer(outcome);
    };
    // The panic hook has printed the message.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
}

/// Pending once, then woken by another thread.
async fn elsewhere() {
    let mut asked = false;
    let woken = Arc::new(AtomicBool::new(false));
    poll_fn(|context| {
        if !std::mem::replace(&mut asked, true) {
            let (waker, woken) = (context.waker().clone(), Arc::clone(&woken));
            std::thread::spawn(move || {
                woken.store(true, Ordering::Release);
                waker.wake();
            });
        }
        if woken.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn services(way: Way, desk: &Desk) -> Services {
    let make = |handler: StandardHandler| match way {
        Way::AtOnce => Procedure::deferred(move |call| run(call, handler)),
        Way::Thread => desk.procedure(handler),
        Way::Future => Procedure::asynchronous(move |mut call| async move {
            elsewhere().await;
            let outcome = handler(&mut call);
            elsewhere().await;
            call.answer(outcome);
        }),
    };
    services_by(4096, 1 << 20, make, |procedure| procedure)
}

fn server(shard: Config) -> ServerConfig {
    ServerConfig { shard, ..small_server() }
}

/// A server that polls and one that sleeps.
fn policies() -> [IdlePolicy; 2] {
    [IdlePolicy::Poll, IdlePolicy::Event]
}

#[test]
fn whatever_a_procedure_takes_and_gives_it_may_answer_later() {
    for (way, idle) in [Way::AtOnce, Way::Thread, Way::Future].into_iter().flat_map(|way| policies().map(|i| (way, i)))
    {
        for scheme in SCHEMES {
            let desk = Desk::new();
            let mut world = World::new("later");
            let config = small().with(|c| {
                c.wire.credit_mode = scheme;
                c.poll.idle = idle;
            });
            let address = world.serve_with(server(config), services(way, &desk));
            let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
            let what = format!("{way:?}, {idle:?}, {scheme:?}");
            for len in [0, 4, 100, 3000] {
                echo(&mut client, &vec![7; len]).unwrap_or_else(|error| panic!("{what}, {len} bytes: {error}"));
            }
            store(&mut client, 5, &[1000, 70_000]).expect(&what);
            load(&mut client, 9, &[(5000, 5000), (70_000, 60_000)]).expect(&what);
            mirror(&mut client, 3, &[5000, 64_000]).expect(&what);
            // A long reply: in a Reply chunk, or continued.
            let mut call = client.prepare(REPLY, 4).expect("memory");
            call.args_mut().copy_from_slice(&4400u32.to_be_bytes());
            call = call.expect_reply(4400);
            let reply = client.call(call).expect(&what);
            assert!(patterned(4400, reply.results()), "{what}");
            // A long call.
            let mut call = client.prepare(ECHO, 6000).expect("memory");
            call.args_mut().fill(3);
            call = call.expect_reply(4096);
            assert_eq!(
                client.call(call).err().map(CallError::from),
                Some(CallError::Refused(Refusal::SystemError)),
                "{what}: no room for it"
            );
            let mut call = client.prepare(REFUSE, 4).expect("memory");
            call.args_mut().copy_from_slice(&0u32.to_be_bytes());
            assert_eq!(
                client.call(call).err().map(CallError::from),
                Some(CallError::Refused(Refusal::GarbageArguments)),
                "{what}"
            );
            drop(client);
        }
    }
}

#[test]
fn many_at_once_come_back_each_to_its_caller() {
    for (way, scheme) in [Way::AtOnce, Way::Thread, Way::Future].into_iter().flat_map(|way| SCHEMES.map(|s| (way, s))) {
        let desk = Desk::new();
        let mut world = World::new("many-later");
        // The limit is below the number of outstanding calls.
        let config = small().with(|c| {
            c.wire.credit_mode = scheme;
            c.limits.max_deferred = 3;
        });
        let address = world.serve_with(server(config), services(way, &desk));
        let mut clients: Vec<_> =
            (0..2).map(|_| world.client(&address, small().with(|c| c.wire.credit_mode = scheme))).collect();
        let mut wanted = [0u64; 2];
        for (n, client) in clients.iter_mut().enumerate() {
            for token in 0..16u64 {
                let mut call = client.prepare(ECHO, 8).expect("memory");
                call.args_mut().copy_from_slice(&(token << 8 | n as u64).to_be_bytes());
                client.start(client.first(), call, token);
                wanted[n] |= 1 << token;
            }
        }
        let start = Instant::now();
        while wanted != [0, 0] {
            assert!(start.elapsed() < Duration::from_secs(20), "{way:?}, {scheme:?}: {wanted:x?} have not come");
            for (n, client) in clients.iter_mut().enumerate() {
                client.poll(|done| {
                    let reply = done.result.expect("a reply");
                    assert_eq!(reply.results(), (done.token << 8 | n as u64).to_be_bytes());
                    assert!(wanted[n] & 1 << done.token != 0, "it comes once");
                    wanted[n] &= !(1 << done.token);
                });
            }
        }
        drop(clients);
    }
}

/// Answers race with each other for the queue to the shard, and with the shard that drains it. One call in five is
/// dropped.
#[test]
fn many_threads_answer_and_each_call_ends_once() {
    const THREADS: usize = 8;
    const CALLS: u64 = 1000;
    for idle in policies() {
        let mut world = World::new("many-threads");
        let (take, calls) = mpsc::channel::<DeferredCall>();
        let calls = Arc::new(Mutex::new(calls));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let calls = Arc::clone(&calls);
                std::thread::spawn(move || {
                    loop {
                        let call = calls.lock().expect("a desk").recv();
                        let Ok(mut call) = call else { return };
                        let token = call.args().to_vec();
                        if !token[7].is_multiple_of(5) {
                            results(&mut call, &token);
                            call.answer(Ok(()));
                        }
                    }
                })
            })
            .collect();
        let mut services = standard_services();
        let held = Procedure::deferred(move |call| take.send(call).expect("somebody answers it"));
        services.add(PROGRAM, VERSION, HELD, held);
        let address = world.serve_with(server(small().with(|c| c.poll.idle = idle)), services);
        let mut clients = [0; 2].map(|_| world.client(&address, small()));
        let mut ended = [0; 2].map(|_| vec![0u32; CALLS as usize]);
        let (mut started, mut answered) = ([0; 2], [0; 2]);
        assert!(settles(|| {
            for (n, client) in clients.iter_mut().enumerate() {
                while started[n] < CALLS && started[n] - answered[n] < 16 {
                    let mut call = client.prepare(HELD, 8).expect("memory");
                    call.put_args(&started[n].to_be_bytes()).expect("room");
                    client.start(client.first(), call, started[n]);
                    started[n] += 1;
                }
                client.poll(|done| {
                    let result = done.result.map(|reply| reply.results().to_vec()).map_err(CallError::from);
                    let dropped = (done.token as u8).is_multiple_of(5);
                    let wanted = done.token.to_be_bytes().to_vec();
                    let wanted = if dropped { Err(CallError::Refused(Refusal::SystemError)) } else { Ok(wanted) };
                    assert_eq!(result, wanted, "{idle:?}");
                    ended[n][done.token as usize] += 1;
                    answered[n] += 1;
                });
            }
            answered == [CALLS; 2]
        }));
        assert!(ended.iter().flatten().all(|&times| times == 1), "each ends once");
        let dropped = 2 * (0..CALLS).filter(|&token| (token as u8).is_multiple_of(5)).count() as u64;
        let stats = &world.server().stats()[0];
        assert_eq!((stats.calls_dropped, stats.calls), (dropped, 2 * CALLS), "{idle:?}");
        drop(clients);
        // The dropped server releases its sender, so the threads end.
        world.server_balances();
        drop(world.take_server());
        threads.into_iter().for_each(|thread| thread.join().expect("it ends well"));
    }
}

/// A server that passes the calls of [`HELD`] to the test.
fn holding(world: &mut World, config: Config) -> (rpcrdma::Address, mpsc::Receiver<DeferredCall>) {
    holding_with(world, config, standard_services(), |procedure| procedure)
}

fn holding_with(
    world: &mut World,
    config: Config,
    mut services: Services,
    shape: impl Fn(Procedure) -> Procedure,
) -> (rpcrdma::Address, mpsc::Receiver<DeferredCall>) {
    let (give, held) = mpsc::channel();
    services.add(PROGRAM, VERSION, HELD, shape(Procedure::deferred(move |call| give.send(call).expect("it is held"))));
    (world.serve_with(server(config), services), held)
}

/// A client with more than the single initial credit of version 1.
fn new_client(world: &World, address: &rpcrdma::Address, scheme: CreditMode) -> LocalClient {
    let mut client = world.client(address, small().with(|c| c.wire.credit_mode = scheme));
    echo(&mut client, b"hello").expect("an echo");
    client
}

fn start(client: &mut LocalClient, token: u64) {
    let call = client.prepare(HELD, 0).expect("memory");
    client.start(client.first(), call, token);
    client.flush();
}

fn next(held: &mpsc::Receiver<DeferredCall>) -> DeferredCall {
    held.recv_timeout(Duration::from_secs(20)).expect("a call")
}

fn results(call: &mut ServerCall, bytes: &[u8]) {
    call.reply_writer().put(bytes).expect("room");
}

fn end(client: &mut LocalClient) -> (u64, Result<Vec<u8>, CallError>) {
    let mut ended = None;
    let came = settles(|| {
        client.poll(|done| {
            ended = Some((done.token, done.result.map(|reply| reply.results().to_vec()).map_err(CallError::from)))
        });
        ended.is_some()
    });
    assert!(came, "no call has ended");
    ended.expect("one has ended")
}

/// A call that waited in a queue until its connection closed has not run: a retransmission runs.
#[test]
fn a_skipped_call_of_a_closed_connection_runs_when_it_is_retransmitted() {
    let mut world = World::new("skipped");
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let once = |procedure: Procedure| procedure.cached(Arc::clone(&cache), |_| Some(Whose::number(7)));
    let (address, held) = holding_with(&mut world, small(), standard_services(), once);
    let send = |peer: &mut RawPeer| {
        let call = call_bytes(1, PROGRAM, VERSION, HELD, b"");
        peer.send(&peer.message(1, Flags::NONE, Body::Msg(Chunks::NONE), &call));
        next(&held)
    };
    let mut peers = [0; 2].map(|_| RawPeer::connect(&address));
    let waiting = send(&mut peers[0]);
    let [gone, mut peer] = peers;
    let owner = Arc::clone(waiting.quota_owner());
    gone.vanish();
    assert!(settles(|| waiting.is_disconnected()), "the server knows that it has gone");
    assert!(waiting.skip_if_disconnected().is_none());
    assert!(settles(|| cache.stats().entries == 0), "nothing is left of it");
    let again = send(&mut peer);
    assert_eq!(*again.quota_owner(), owner, "another connection of the same host");
    let mut again = again.skip_if_disconnected().expect("its connection is open");
    results(&mut again, b"done");
    again.answer(Ok(()));
    let reply = peer.receive().expect("a reply").bytes;
    let reply = View::check(&reply, Revision::Ietf00).expect("a header");
    assert_eq!(reply.payload(), reply_bytes(1, b"done"));
    assert_eq!((cache.stats().misses, cache.stats().lost), (2, 0));
}

#[test]
fn a_dropped_call_is_refused_and_counted() {
    for scheme in SCHEMES {
        let mut world = World::new("dropped");
        let (address, held) = holding(&mut world, small().with(|c| c.wire.credit_mode = scheme));
        let mut client = new_client(&world, &address, scheme);
        for token in 0..3 {
            start(&mut client, token);
            let call = next(&held);
            assert!(!call.is_disconnected());
            drop(call);
            assert_eq!(end(&mut client), (token, Err(CallError::Refused(Refusal::SystemError))), "{scheme:?}");
        }
        assert_eq!(world.server().stats()[0].calls_dropped, 3);
        echo(&mut client, b"goes on").expect("an echo");
        drop(client);
    }
}

#[test]
fn an_answer_to_a_closed_connection_is_harmless() {
    for scheme in SCHEMES {
        let mut world = World::new("over");
        let (address, held) = holding(&mut world, small().with(|c| c.wire.credit_mode = scheme));
        let mut client = new_client(&world, &address, scheme);
        let mut other = new_client(&world, &address, scheme);
        for token in 0..4 {
            start(&mut client, token);
        }
        let mut calls: VecDeque<_> = (0..4).map(|_| next(&held)).collect();
        drop(client);
        let told = settles(|| {
            echo(&mut other, b"meanwhile").expect("an echo");
            calls.iter().all(DeferredCall::is_disconnected)
        });
        assert!(told, "{scheme:?}: the holder is not told");
        let mut late = calls.pop_front().expect("a call");
        results(&mut late, b"late");
        late.answer(Ok(()));
        drop(calls.pop_front());
        echo(&mut other, b"goes on").expect("an echo");
        // Two calls free their memory; the others keep theirs until they are dropped. The shard may answer the echo and
        // the stats request in a turn before it processes the two.
        let counted = || {
            let stats = world.server().stats();
            (stats[0].connections, stats[0].calls_dropped)
        };
        assert!(settles(|| counted() == (1, 1)), "{scheme:?}: {:?}", counted());
        drop(calls);
        drop(other);
    }
}

#[test]
fn no_more_are_taken_of_a_connection_than_may_be() {
    for scheme in SCHEMES {
        let mut world = World::new("bounded");
        let (address, held) = holding(
            &mut world,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.limits.max_deferred = 2;
            }),
        );
        let mut greedy = new_client(&world, &address, scheme);
        let mut other = new_client(&world, &address, scheme);
        for token in 0..6 {
            start(&mut greedy, token);
        }
        let mut calls = VecDeque::from([next(&held), next(&held)]);
        for _ in 0..50 {
            greedy.poll(|done| panic!("{done:?}"));
            echo(&mut other, b"others are served").expect("an echo");
        }
        assert!(held.try_recv().is_err(), "{scheme:?}: a third one was taken");
        start(&mut other, 0);
        let mut of_other = next(&held);
        results(&mut of_other, b"other");
        of_other.answer(Ok(()));
        assert_eq!(end(&mut other), (0, Ok(b"other".to_vec())));
        for token in 0..6 {
            let mut call = calls.pop_front().expect("it was taken");
            results(&mut call, &[token]);
            call.answer(Ok(()));
            // Each answer admits one waiting call.
            if token < 4 {
                calls.push_back(next(&held));
            }
            assert_eq!(end(&mut greedy), (u64::from(token), Ok(vec![token])), "{scheme:?}");
        }
        assert!(held.try_recv().is_err());
        // Calls that still wait when their connection closes reach no handler.
        (0..5).for_each(|token| start(&mut greedy, token));
        let calls = [next(&held), next(&held)];
        drop(greedy);
        assert!(settles(|| {
            echo(&mut other, b"meanwhile").expect("an echo");
            calls.iter().all(DeferredCall::is_disconnected)
        }));
        drop(calls);
        echo(&mut other, b"goes on").expect("an echo");
        assert!(held.try_recv().is_err(), "{scheme:?}: one was taken of a connection that is over");
        drop(other);
    }
}

#[test]
fn a_drain_waits_for_deferred_calls_up_to_its_time_out() {
    for scheme in SCHEMES {
        let mut world = World::new("drained");
        let (address, held) = holding(&mut world, small().with(|c| c.wire.credit_mode = scheme));
        let mut client = new_client(&world, &address, scheme);
        start(&mut client, 7);
        let mut call = next(&held);
        let server = world.take_server();
        let draining = std::thread::spawn(move || server.drain(Duration::from_secs(20)));
        // A draining server refuses new calls. Version 1 cannot announce a drain, so there the server refuses
        // connections.
        let refuses = |client: &mut _| match scheme {
            CreditMode::V1 => LocalClient::connect(&address, small_client(small())).is_err(),
            _ => echo(client, b"one more").is_err(),
        };
        assert!(settles(|| refuses(&mut client)), "{scheme:?}");
        assert!(!draining.is_finished(), "{scheme:?}");
        results(&mut call, b"last");
        call.answer(Ok(()));
        assert_eq!(end(&mut client), (7, Ok(b"last".to_vec())), "{scheme:?}");
        while !draining.is_finished() {
            client.poll(|done| panic!("{done:?}"));
        }
        assert!(draining.join().expect("it ends").is_ok(), "{scheme:?}");
        drop(client);

        // A drain does not wait forever for an answer. The call may be answered after the server has ended.
        let (address, held) = holding(&mut world, small().with(|c| c.wire.credit_mode = scheme));
        let mut client = new_client(&world, &address, scheme);
        start(&mut client, 8);
        let call = next(&held);
        let undrained = world.take_server().drain(Duration::from_millis(50)).expect_err("a call was left");
        assert!(undrained.to_string().contains("connections open on 1 shard"), "{scheme:?}: {undrained}");
        // A slow device may need longer than the drain's time-out.
        assert!(settles(|| call.is_disconnected()), "{scheme:?}");
        call.answer(Ok(()));
        assert!(matches!(end(&mut client), (8, Err(CallError::ConnectionLost { sent: true }))), "{scheme:?}");
        drop(client);
    }
}

#[test]
fn a_deferred_reply_is_cached_and_its_call_runs_once() {
    for (scheme, version) in [(CreditMode::V2Windowed, Version::V2), (CreditMode::V1, Version::V1)] {
        let mut world = World::new("once-later");
        let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig {
            entries: 16,
            bytes: 1 << 16,
            ..DuplicateRequestCacheConfig::default()
        }));
        let kept = Arc::clone(&cache);
        let somebody = |_: &ServerCall| Some(Whose::number(1));
        let shape = move |procedure: Procedure| procedure.cached(Arc::clone(&kept), somebody);
        let config = small().with(|c| c.wire.credit_mode = scheme);
        let (address, held) = holding_with(&mut world, config, standard_services(), shape);
        // The same call on two connections. The first closes before the answer.
        let call = call_bytes(99, PROGRAM, VERSION, HELD, b"");
        let send = |peer: &mut RawPeer| {
            let message = peer.message(99, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            peer.send(&message);
        };
        let connect = || RawPeer::connect_as(&address, version);
        let mut first = connect();
        send(&mut first);
        let mut taken = next(&held);
        first.vanish();
        let mut second = connect();
        send(&mut second);
        assert!(settles(|| taken.is_disconnected()));
        assert!(held.try_recv().is_err(), "{scheme:?}: it runs twice");
        results(&mut taken, b"once");
        taken.answer(Ok(()));
        let reply = second.receive().expect("a reply").bytes;
        let view = View::check(&reply, Revision::Ietf00).expect("a header");
        assert_eq!(view.payload(), reply_bytes(99, b"once"), "{scheme:?}");
        assert!(held.try_recv().is_err(), "{scheme:?}: it runs twice");
        // The progress of a dropped call is unknown, so it does not run again.
        let call = call_bytes(100, PROGRAM, VERSION, HELD, b"");
        for again in [false, true] {
            let message = second.message(100, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            second.send(&message);
            if !again {
                drop(next(&held));
            }
            let reply = second.receive().expect("a reply").bytes;
            let view = View::check(&reply, Revision::Ietf00).expect("a header");
            assert_eq!(view.payload()[20..24], 5u32.to_be_bytes(), "{scheme:?}: SYSTEM_ERR");
        }
        assert!(held.try_recv().is_err());
        drop(second);
    }
}

#[test]
fn a_client_may_answer_its_server_later() {
    for scheme in SCHEMES {
        let desk = Desk::new();
        let mut world = World::new("later-back");
        let (services, told) = telling_services();
        let address = world.serve_with(server(small().with(|c| c.wire.credit_mode = scheme)), services);
        let own = Arc::new(self::services(Way::Thread, &desk));
        let config =
            ClientConfig { services: Some(own), ..small_client(small().with(|c| c.wire.credit_mode = scheme)) };
        let mut forward = Client::connect(&address, config).expect("a connection");
        forward.call(ClientCall::new(HELLO)).expect("a reply");
        let caller = told.recv().expect("it was called");
        let mut reverse = world.server().call_back(caller, small_client(small())).expect("of this server");
        let pending: Vec<_> =
            (0..8u32).map(|n| reverse.start(ClientCall::new(ECHO).args(n.to_be_bytes())).expect("a slot")).collect();
        for (n, mut pending) in pending.into_iter().enumerate() {
            assert_eq!(pending.join().expect("a reply").results(), (n as u32).to_be_bytes(), "{scheme:?}");
        }
        drop((reverse, forward));
    }
}

#[test]
fn a_panic_costs_its_own_call_only() {
    for (way, scheme) in [Way::AtOnce, Way::Thread, Way::Future].into_iter().flat_map(|way| SCHEMES.map(|s| (way, s))) {
        let desk = Desk::new();
        let mut world = World::new("panics");
        let mut services = services(way, &desk);
        services.add(PROGRAM, VERSION, HELD, Procedure::deferred(|_| panic!("as the test wants")));
        let address = world.serve_with(server(small().with(|c| c.wire.credit_mode = scheme)), services);
        let mut client = new_client(&world, &address, scheme);
        for procedure in [PANIC, HELD] {
            let call = client.prepare(procedure, 0).expect("memory");
            let ended = client.call(call).err();
            assert_eq!(
                ended.map(CallError::from),
                Some(CallError::Refused(Refusal::SystemError)),
                "{way:?}, {scheme:?}"
            );
            echo(&mut client, b"goes on").expect("an echo");
        }
        assert_eq!(world.server().stats()[0].calls_dropped, 2, "{way:?}, {scheme:?}");
        drop(client);
    }
}

/// Sends a message when dropped.
struct Told(mpsc::Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_future_is_dropped_with_its_connection_and_may_go_on_behind_its_answer() {
    for scheme in SCHEMES {
        let mut world = World::new("futures");
        let (tell, told) = mpsc::channel();
        let wakers: Arc<Mutex<Vec<Waker>>> = Arc::default();
        let kept = Arc::clone(&wakers);
        let for_ever = move |call: DeferredCall| {
            let (told, wakers) = (Told(tell.clone()), Arc::clone(&kept));
            async move {
                let answered = !call.args().is_empty();
                let mut call = Some(call);
                if answered && let Some(call) = call.take() {
                    call.answer(Ok(()));
                }
                poll_fn(|context| {
                    wakers.lock().expect("a list").push(context.waker().clone());
                    Poll::<()>::Pending
                })
                .await;
                drop((call, told));
            }
        };
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, HELD, Procedure::asynchronous(for_ever));
        let address = world.serve_with(server(small().with(|c| c.wire.credit_mode = scheme)), services);
        let mut client = new_client(&world, &address, scheme);
        let mut other = new_client(&world, &address, scheme);
        let mut answered = client.prepare(HELD, 4).expect("memory");
        answered.put_args(b"four").expect("room");
        client.call(answered).expect("a reply, though the future goes on");
        start(&mut client, 1);
        start(&mut other, 2);
        let polled = || wakers.lock().expect("a list").len();
        assert!(settles(|| {
            client.poll(|done| panic!("{done:?}"));
            other.poll(|done| panic!("{done:?}"));
            polled() == 3
        }));
        assert!(told.try_recv().is_err(), "{scheme:?}");
        drop(client);
        for _ in 0..2 {
            told.recv_timeout(Duration::from_secs(20)).expect("a future that is dropped");
        }
        // The future of the other connection still exists. Wakers of dropped futures stay valid.
        wakers.lock().expect("a list").iter().for_each(Waker::wake_by_ref);
        echo(&mut other, b"goes on").expect("an echo");
        assert!(told.try_recv().is_err(), "{scheme:?}");
        drop(other);
        told.recv_timeout(Duration::from_secs(20)).expect("the last one");
    }
}

#[test]
fn a_call_that_is_not_answered_may_be_taken_and_dropped() {
    let mut world = World::new("taken-one-way");
    let (give, held) = mpsc::channel();
    let mut services = standard_services();
    let taken = Procedure::deferred(move |call| {
        give.send(call.args().to_vec()).expect("the test hears it");
    });
    services.add(PROGRAM, VERSION, HELD, taken.one_way());
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    for n in 0..20u32 {
        let mut call = client.prepare(HELD, 4).expect("memory");
        call.put_args(&n.to_be_bytes()).expect("room");
        call = call.one_way();
        client.call(call).expect("it was sent");
        assert_eq!(held.recv_timeout(Duration::from_secs(20)).expect("a call"), n.to_be_bytes());
    }
    echo(&mut client, b"goes on").expect("an echo");
    assert_eq!(world.server().stats()[0].calls_dropped, 0);
    drop(client);
}

#[test]
#[should_panic(expected = "is to run on workers")]
fn deferred_procedures_do_not_run_on_workers() {
    Services::new().add(1, 1, 1, Procedure::deferred(drop).on_workers());
}

/// Unanswered calls hold their memory. A call that waits for memory gets it once they are answered.
#[test]
fn a_waiting_call_gets_freed_buffers() {
    for scheme in SCHEMES {
        let world = World::new("memory-later");
        let ((give, held), mut services) = (mpsc::channel(), standard_services());
        let hold = Procedure::deferred(move |call| give.send(call).expect("it is held"));
        services.add(PROGRAM, VERSION, HELD, hold.write_chunks(1, 1 << 20));
        let address = world.address();
        let server = TimedServer::start(&address, small().with(|c| c.wire.credit_mode = scheme), services);
        let mut clients: Vec<_> = (0..8).map(|_| new_client(&world, &address, scheme)).collect();
        for (token, client) in clients.iter_mut().enumerate() {
            let mut call = client.prepare(HELD, 0).expect("memory");
            let room: Buf = client.alloc(client.first(), 1 << 20).expect("memory");
            call = call.write_chunk_into(room);
            client.start(client.first(), call, token as u64);
            client.flush();
        }
        // The buffers cover only some of the calls; the others run as these are answered.
        let mut out = VecDeque::from([next(&held)]);
        let all = settles(|| {
            out.extend(held.try_iter());
            out.len() as u64 + server.stats().memory_waits >= 8
        });
        assert!(all && (1..8).contains(&out.len()), "{scheme:?}: {} were taken", out.len());
        // Longer than the time-out of peers that owe progress.
        (0..12).for_each(|_| server.pass(Duration::from_millis(100)));
        let mut answered = 0;
        while let Some(mut call) = out.pop_front() {
            call.result_writer(0).expect("room").put(b"here").expect("room");
            call.answer(Ok(()));
            answered += 1;
            if answered + out.len() < 8 {
                out.push_back(next(&held));
            }
        }
        for (token, client) in clients.iter_mut().enumerate() {
            assert_eq!(end(client), (token as u64, Ok(Vec::new())), "{scheme:?}");
        }
        drop(clients);
    }
}

/// A device may know the address of a result buffer. The buffer stays reserved until the call is answered, even if the
/// handler finally sends other memory.
#[test]
fn memory_with_a_published_address_stays_with_its_call() {
    for told in [true, false] {
        let mut world = World::new("told");
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "own", ..ArenaConfig::default() };
        let pool = Pool::new(&PoolConfig { classes: vec![Class { size: 1 << 16, count: 1 }], arena }).unwrap();
        let own = Mutex::new(Some(pool.alloc(8).unwrap().freeze()));
        let (hold, held) = mpsc::channel();
        let procedure = Procedure::deferred(move |mut call: DeferredCall| {
            if told {
                assert!(!call.result_writer(0).expect("a Write chunk").as_mut_ptr().is_null());
            }
            let own = own.lock().unwrap().take().expect("one call");
            call.set_result(0, own).expect("there is room");
            hold.send(call).expect("the test waits");
        });
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, HELD, procedure.write_chunks(1, 1 << 16));
        // One call takes all bulk memory.
        let (bulk_buffers, long_buffers) = (vec![(1 << 20, 1)], vec![]);
        let shard = small().with(|c| {
            c.memory.arenas = vec![pool.arena().clone()];
            c.memory.bulk_buffers = bulk_buffers;
            c.memory.long_buffers = long_buffers;
        });
        let address = world.serve_with(ServerConfig { shard, ..small_server() }, services);
        let mut client = world.client(&address, small());
        let first = client.first();
        for (token, procedure) in [(0, HELD), (1, LOAD)] {
            let mut call = client.prepare(procedure, 8).unwrap();
            call.args_mut().copy_from_slice(&[8u32.to_be_bytes(), 8u32.to_be_bytes()].concat());
            call = call.write_chunk_into(client.alloc(first, 50_000).unwrap());
            client.start(first, call, token);
        }
        let mut ended = Vec::new();
        let mut poll = |ended: &mut Vec<u64>| {
            client.poll(|done| {
                done.result.expect("a reply");
                ended.push(done.token);
            })
        };
        let stats = || world.server().stats()[0].memory_waits;
        assert!(
            settles(|| {
                poll(&mut ended);
                if told { stats() == 1 } else { ended == [1] }
            }),
            "told: {told}: {ended:?}, {} waits",
            stats()
        );
        assert_eq!(ended.is_empty(), told);
        held.recv().expect("a call").answer(Ok(()));
        assert!(
            settles(|| {
                poll(&mut ended);
                ended.len() == 2
            }),
            "told: {told}: {ended:?}"
        );
    }
}
