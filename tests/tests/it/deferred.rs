//! Deferred calls: answered on the shard, by threads, in futures, or never.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

use rpcrdma::service::duplicate_requests::{Client as Whose, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};
use rpcrdma_tests::prelude::*;

use super::lifecycle::draining;
use super::reverse::{call_back, telling_services};

/// A procedure whose calls the test holds.
const HELD: u32 = 400;
/// A server that polls and one that sleeps.
const POLICIES: [IdlePolicy; 2] = [IdlePolicy::Poll, IdlePolicy::Event];

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

const WAYS: [Way; 3] = [Way::AtOnce, Way::Thread, Way::Future];

/// A thread that runs calls in pairs, the later one first.
struct Desk {
    take: Option<Sender<(DeferredCall, StandardHandler)>>,
    thread: Option<JoinHandle<()>>,
}

impl Desk {
    fn new() -> Self {
        let (take, calls) = channel::<(DeferredCall, StandardHandler)>();
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

/// The error of a server that refuses a call because of its own state.
fn system_error() -> Outcome {
    Err(CallError::Refused(Refusal::SystemError))
}

#[test]
fn whatever_a_procedure_takes_and_gives_it_may_answer_later() {
    for_each(pairs(pairs(WAYS, POLICIES), SCHEMES), |((way, idle), scheme)| {
        let desk = Desk::new();
        let config = in_mode(scheme).with(|c| c.poll.idle = idle);
        let (_world, mut client) = World::pair_with("later", config, services(way, &desk), scheme);
        [0, 4, 100, 3000].iter().for_each(|&len| echo(&mut client, &vec![7; len]).expect("an echo"));
        store(&mut client, 5, &[1000, 70_000]).expect("a reply");
        load(&mut client, 9, &[(5000, 5000), (70_000, 60_000)]).expect("a reply");
        mirror(&mut client, 3, &[5000, 64_000]).expect("a reply");
        // A long reply: in a Reply chunk, or continued.
        let call = client.prepared(REPLY, &be(&[4400])).expect_reply(4400);
        assert_eq!(client.outcome(call), Ok(data_of(4400, 4400)));
        // A long call.
        let call = client.prepared(ECHO, &[3; 6000]).expect_reply(4096);
        assert_eq!(client.outcome(call), system_error(), "no room for it");
        assert_eq!(client.run(REFUSE, &[0; 4]), Err(CallError::Refused(Refusal::GarbageArguments)));
    });
}

#[test]
fn many_at_once_come_back_each_to_its_caller() {
    for_each(pairs(WAYS, SCHEMES), |(way, scheme)| {
        let desk = Desk::new();
        // The limit is below the number of outstanding calls.
        let config = in_mode(scheme).with(|c| c.limits.max_deferred = 3);
        let (world, address) = World::serving("many-later", config, services(way, &desk));
        let mut clients: Vec<_> = (0..2).map(|_| world.client(&address, scheme)).collect();
        let args = |n: usize, token: u64| (token << 8 | n as u64).to_be_bytes();
        for (n, client) in clients.iter_mut().enumerate() {
            client.launch_each(0..16u64, |client, token| client.prepared(ECHO, &args(n, token)));
        }
        let mut ended = [vec![], vec![]];
        let all = settles(|| {
            for (n, client) in clients.iter_mut().enumerate() {
                client.poll(|done| {
                    assert_eq!(done.result.expect("a reply").results(), args(n, done.token));
                    ended[n].push(done.token);
                });
            }
            ended.iter().all(|ended| ended.len() >= 16)
        });
        ended.iter_mut().for_each(|ended| ended.sort_unstable());
        assert!(all && ended.iter().all(|ended| ended.iter().copied().eq(0..16)), "{ended:?}");
    });
}

/// Answers race with each other for the queue to the shard, and with the shard that drains it. One call in five is
/// dropped.
#[test]
fn many_threads_answer_and_each_call_ends_once() {
    const THREADS: usize = 8;
    const CALLS: u64 = 1000;
    for_each(POLICIES, |idle| {
        let (take, calls) = channel::<DeferredCall>();
        let calls = Arc::new(Mutex::new(calls));
        let answering = || {
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
        };
        let threads: Vec<_> = (0..THREADS).map(|_| answering()).collect();
        let held = Procedure::deferred(move |call| take.send(call).expect("somebody answers it"));
        let config = small().with(|c| c.poll.idle = idle);
        let (mut world, address) = World::serving("many-threads", config, standard_and([(HELD, held)]));
        let mut clients = [0; 2].map(|_| world.client(&address, small()));
        let mut ended = [0; 2].map(|_| vec![0u32; CALLS as usize]);
        let (mut started, mut answered) = ([0; 2], [0; 2]);
        assert!(settles(|| {
            for (n, client) in clients.iter_mut().enumerate() {
                while started[n] < CALLS && started[n] - answered[n] < 16 {
                    let call = client.prepared(HELD, &started[n].to_be_bytes());
                    client.launch(call, started[n]);
                    started[n] += 1;
                }
                client.poll(|done| {
                    let result = done.result.map(|reply| reply.results().to_vec()).map_err(CallError::from);
                    let dropped = (done.token as u8).is_multiple_of(5);
                    assert_eq!(result, if dropped { system_error() } else { Ok(done.token.to_be_bytes().to_vec()) });
                    ended[n][done.token as usize] += 1;
                    answered[n] += 1;
                });
            }
            answered == [CALLS; 2]
        }));
        assert!(ended.iter().flatten().all(|&times| times == 1), "each ends once");
        let dropped = 2 * (0..CALLS).filter(|&token| (token as u8).is_multiple_of(5)).count() as u64;
        let stats = world.stats();
        assert_eq!((stats.calls_dropped, stats.calls), (dropped, 2 * CALLS));
        drop(clients);
        // The dropped server releases its sender, so the threads end.
        world.server_balances();
        drop(world.take_server());
        threads.into_iter().for_each(|thread| thread.join().expect("it ends well"));
    });
}

/// A world whose server passes the calls of [`HELD`] to the test.
fn holding(name: &'static str, config: Config) -> (World, Address, Receiver<DeferredCall>) {
    holding_as(name, config, |procedure| procedure)
}

fn holding_as(
    name: &'static str,
    config: Config,
    shape: impl Fn(Procedure) -> Procedure,
) -> (World, Address, Receiver<DeferredCall>) {
    let (give, held) = channel();
    let procedure = Procedure::deferred(move |call| give.send(call).expect("it is held"));
    let (world, address) = World::serving(name, config, standard_and([(HELD, shape(procedure))]));
    (world, address, held)
}

/// A client with more than the single initial credit of version 1.
fn new_client(world: &World, address: &Address, scheme: CreditMode) -> LocalClient {
    let mut client = world.client(address, scheme);
    echo(&mut client, b"hello").expect("an echo");
    client
}

fn start(client: &mut LocalClient, token: u64) {
    client.begin(HELD, b"", token);
    client.flush();
}

fn next(held: &Receiver<DeferredCall>) -> DeferredCall {
    held.recv_timeout(Duration::from_secs(20)).expect("a call")
}

fn results(call: &mut ServerCall, bytes: &[u8]) {
    call.reply_writer().put(bytes).expect("room");
}

fn answer(mut call: DeferredCall, bytes: &[u8]) {
    results(&mut call, bytes);
    call.answer(Ok(()));
}

/// A call that waited in a queue until its connection closed has not run: a retransmission runs.
#[test]
fn a_skipped_call_of_a_closed_connection_runs_when_it_is_retransmitted() {
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let once = |procedure: Procedure| procedure.cached(Arc::clone(&cache), |_| Some(Whose::number(7)));
    let (_world, address, held) = holding_as("skipped", small(), once);
    let send = |peer: &mut RawPeer| {
        peer.call_as(1, HELD, Chunks::NONE, b"");
        next(&held)
    };
    let [mut gone, mut peer] = [0; 2].map(|_| RawPeer::connect(&address));
    let waiting = send(&mut gone);
    let owner = Arc::clone(waiting.quota_owner());
    gone.vanish();
    assert!(settles(|| waiting.is_disconnected()), "the server knows that it has gone");
    assert!(waiting.skip_if_disconnected().is_none());
    assert!(settles(|| cache.stats().entries == 0), "nothing is left of it");
    let again = send(&mut peer);
    assert_eq!(*again.quota_owner(), owner, "another connection of the same host");
    answer(again.skip_if_disconnected().expect("its connection is open"), b"done");
    assert_eq!(peer.receive().expect("a reply").payload(), reply_bytes(1, b"done"));
    assert_eq!((cache.stats().misses, cache.stats().lost), (2, 0));
}

#[test]
fn a_dropped_call_is_refused_and_counted() {
    for_each(SCHEMES, |scheme| {
        let (world, address, held) = holding("dropped", in_mode(scheme));
        let mut client = new_client(&world, &address, scheme);
        for token in 0..3 {
            start(&mut client, token);
            let call = next(&held);
            assert!(!call.is_disconnected());
            drop(call);
            assert_eq!(client.end(), (token, system_error()));
        }
        assert_eq!(world.stats().calls_dropped, 3);
        echo(&mut client, b"goes on").expect("an echo");
    });
}

#[test]
fn an_answer_to_a_closed_connection_is_harmless() {
    for_each(SCHEMES, |scheme| {
        let (world, address, held) = holding("over", in_mode(scheme));
        let mut client = new_client(&world, &address, scheme);
        let mut other = new_client(&world, &address, scheme);
        (0..4).for_each(|token| start(&mut client, token));
        let mut calls: VecDeque<_> = (0..4).map(|_| next(&held)).collect();
        drop(client);
        let told = settles(|| {
            echo(&mut other, b"meanwhile").expect("an echo");
            calls.iter().all(DeferredCall::is_disconnected)
        });
        assert!(told, "the holder is not told");
        answer(calls.pop_front().expect("a call"), b"late");
        drop(calls.pop_front());
        echo(&mut other, b"goes on").expect("an echo");
        // Two calls free their memory; the others keep theirs until they are dropped. The shard may answer the echo and
        // the stats request in a turn before it processes the two.
        let counted = || {
            let stats = world.server().stats();
            (stats[0].connections, stats[0].calls_dropped)
        };
        assert!(settles(|| counted() == (1, 1)), "{:?}", counted());
    });
}

#[test]
fn no_more_are_taken_of_a_connection_than_may_be() {
    for_each(SCHEMES, |scheme| {
        let (world, address, held) = holding("bounded", in_mode(scheme).with(|c| c.limits.max_deferred = 2));
        let mut greedy = new_client(&world, &address, scheme);
        let mut other = new_client(&world, &address, scheme);
        (0..6).for_each(|token| start(&mut greedy, token));
        let mut calls = VecDeque::from([next(&held), next(&held)]);
        for _ in 0..50 {
            greedy.poll(|done| panic!("{done:?}"));
            echo(&mut other, b"others are served").expect("an echo");
        }
        assert!(held.try_recv().is_err(), "a third one was taken");
        start(&mut other, 0);
        answer(next(&held), b"other");
        assert_eq!(other.end(), (0, Ok(b"other".to_vec())));
        for token in 0..6 {
            answer(calls.pop_front().expect("it was taken"), &[token]);
            // Each answer admits one waiting call.
            if token < 4 {
                calls.push_back(next(&held));
            }
            assert_eq!(greedy.end(), (u64::from(token), Ok(vec![token])));
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
        assert!(held.try_recv().is_err(), "one was taken of a connection that is over");
    });
}

#[test]
fn a_drain_waits_for_deferred_calls_up_to_its_time_out() {
    for_each(SCHEMES, |scheme| {
        let (mut world, address, held) = holding("drained", in_mode(scheme));
        let mut client = new_client(&world, &address, scheme);
        start(&mut client, 7);
        let call = next(&held);
        let draining = draining(&mut world, Duration::from_secs(20));
        // A draining server refuses new calls. Version 1 cannot announce a drain, so there the server refuses
        // connections.
        let refuses = |client: &mut _| match scheme {
            CreditMode::V1 => LocalClient::connect(&address, small_client(small())).is_err(),
            _ => echo(client, b"one more").is_err(),
        };
        assert!(settles(|| refuses(&mut client)));
        assert!(!draining.is_finished());
        answer(call, b"last");
        assert_eq!(client.end(), (7, Ok(b"last".to_vec())));
        while !draining.is_finished() {
            client.poll(|done| panic!("{done:?}"));
        }
        assert!(draining.join().expect("it ends").is_ok());
        drop((client, world));

        // A drain does not wait forever for an answer. The call may be answered after the server has ended.
        let (mut world, address, held) = holding("undrained", in_mode(scheme));
        let mut client = new_client(&world, &address, scheme);
        start(&mut client, 8);
        let call = next(&held);
        let undrained = world.take_server().drain(Duration::from_millis(50)).expect_err("a call was left");
        assert!(undrained.to_string().contains("connections open on 1 shard"), "{undrained}");
        // A slow device may need longer than the drain's time-out.
        assert!(settles(|| call.is_disconnected()));
        call.answer(Ok(()));
        assert_eq!(client.end(), (8, Err(CallError::ConnectionLost { sent: true })));
    });
}

#[test]
fn a_deferred_reply_is_cached_and_its_call_runs_once() {
    for_each([CreditMode::V2Windowed, CreditMode::V1], |scheme| {
        let config = DuplicateRequestCacheConfig { entries: 16, bytes: 1 << 16, ..Default::default() };
        let cache = Arc::new(DuplicateRequestCache::new(config));
        let once = |procedure: Procedure| procedure.cached(Arc::clone(&cache), |_: &ServerCall| Some(Whose::number(1)));
        let (_world, address, held) = holding_as("once-later", in_mode(scheme), once);
        // The same call on two connections. The first closes before the answer.
        let connect = || {
            let mut peer = RawPeer::connect_in(&address, scheme);
            peer.call_as(99, HELD, Chunks::NONE, b"");
            peer
        };
        let first = connect();
        let taken = next(&held);
        first.vanish();
        let mut second = connect();
        assert!(settles(|| taken.is_disconnected()));
        assert!(held.try_recv().is_err(), "it runs twice");
        answer(taken, b"once");
        assert_eq!(second.receive().expect("a reply").payload(), reply_bytes(99, b"once"));
        assert!(held.try_recv().is_err(), "it runs twice");
        // The progress of a dropped call is unknown, so it does not run again.
        for again in [false, true] {
            second.call_as(100, HELD, Chunks::NONE, b"");
            if !again {
                drop(next(&held));
            }
            assert_eq!(second.receive().expect("a reply").payload()[20..24], be(&[5]), "SYSTEM_ERR");
        }
        assert!(held.try_recv().is_err());
    });
}

#[test]
fn a_client_may_answer_its_server_later() {
    for_each(SCHEMES, |scheme| {
        let desk = Desk::new();
        let (services, told) = telling_services();
        let (world, address) = World::serving("later-back", scheme, services);
        let own = Arc::new(self::services(Way::Thread, &desk));
        let config = ClientConfig { services: Some(own), ..scheme.of_client() };
        let mut forward = Client::connect(&address, config).expect("a connection");
        let mut reverse = call_back(&world, &mut forward, &told);
        let pending: Vec<_> =
            (0..8u32).map(|n| reverse.start(ClientCall::new(ECHO).args(n.to_be_bytes())).expect("a slot")).collect();
        for (n, mut pending) in (0u32..).zip(pending) {
            assert_eq!(pending.join().expect("a reply").results(), n.to_be_bytes());
        }
    });
}

#[test]
fn a_panic_costs_its_own_call_only() {
    for_each(pairs(WAYS, SCHEMES), |(way, scheme)| {
        let desk = Desk::new();
        let mut services = services(way, &desk);
        services.add(PROGRAM, VERSION, HELD, Procedure::deferred(|_| panic!("as the test wants")));
        let (world, address) = World::serving("panics", scheme, services);
        let mut client = new_client(&world, &address, scheme);
        for procedure in [PANIC, HELD] {
            assert_eq!(client.run(procedure, b""), system_error());
            echo(&mut client, b"goes on").expect("an echo");
        }
        assert_eq!(world.stats().calls_dropped, 2);
    });
}

/// Sends a message when dropped.
struct Told(Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_future_is_dropped_with_its_connection_and_may_go_on_behind_its_answer() {
    for_each(SCHEMES, |scheme| {
        let (tell, told) = channel();
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
        let services = standard_and([(HELD, Procedure::asynchronous(for_ever))]);
        let (world, address) = World::serving("futures", scheme, services);
        let mut client = new_client(&world, &address, scheme);
        let mut other = new_client(&world, &address, scheme);
        client.run(HELD, b"four").expect("a reply, though the future goes on");
        start(&mut client, 1);
        start(&mut other, 2);
        let polled = || wakers.lock().expect("a list").len();
        client.quiet_until(|_| {
            other.poll(|done| panic!("{done:?}"));
            polled() == 3
        });
        assert!(told.try_recv().is_err());
        drop(client);
        for _ in 0..2 {
            told.recv_timeout(Duration::from_secs(20)).expect("a future that is dropped");
        }
        // The future of the other connection still exists. Wakers of dropped futures stay valid.
        wakers.lock().expect("a list").iter().for_each(Waker::wake_by_ref);
        echo(&mut other, b"goes on").expect("an echo");
        assert!(told.try_recv().is_err());
        drop(other);
        told.recv_timeout(Duration::from_secs(20)).expect("the last one");
    });
}

#[test]
fn a_call_that_is_not_answered_may_be_taken_and_dropped() {
    let (give, held) = channel();
    let taken = Procedure::deferred(move |call| give.send(call.args().to_vec()).expect("the test hears it"));
    let services = standard_and([(HELD, taken.one_way())]);
    let (world, mut client) = World::pair_with("taken-one-way", small(), services, small());
    for n in 0..20u32 {
        let call = client.prepared(HELD, &n.to_be_bytes()).one_way();
        client.call(call).expect("it was sent");
        assert_eq!(held.recv_timeout(Duration::from_secs(20)).expect("a call"), n.to_be_bytes());
    }
    echo(&mut client, b"goes on").expect("an echo");
    assert_eq!(world.stats().calls_dropped, 0);
}

#[test]
#[should_panic(expected = "is to run on workers")]
fn deferred_procedures_do_not_run_on_workers() {
    Services::new().add(1, 1, 1, Procedure::deferred(drop).on_workers());
}

/// Unanswered calls hold their memory. A call that waits for memory gets it once they are answered.
#[test]
fn a_waiting_call_gets_freed_buffers() {
    for_each(SCHEMES, |scheme| {
        let world = World::new("memory-later");
        let (give, held) = channel();
        let hold = Procedure::deferred(move |call| give.send(call).expect("it is held"));
        let services = standard_and([(HELD, hold.write_chunks(1, 1 << 20))]);
        let address = world.address();
        let server = TimedServer::start(&address, scheme, services);
        let mut clients: Vec<_> = (0..8).map(|_| new_client(&world, &address, scheme)).collect();
        for (token, client) in (0..).zip(&mut clients) {
            let call = client.chunked(HELD, b"", &[], &[1 << 20]);
            client.launch(call, token);
            client.flush();
        }
        // The buffers cover only some of the calls; the others run as these are answered.
        let mut out = VecDeque::from([next(&held)]);
        let all = settles(|| {
            out.extend(held.try_iter());
            out.len() as u64 + server.stats().memory_waits >= 8
        });
        assert!(all && (1..8).contains(&out.len()), "{} were taken", out.len());
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
        for (token, client) in (0..).zip(&mut clients) {
            assert_eq!(client.end(), (token, Ok(Vec::new())));
        }
    });
}

/// A device may know the address of a result buffer. The buffer stays reserved until the call is answered, even if the
/// handler finally sends other memory.
#[test]
fn memory_with_a_published_address_stays_with_its_call() {
    for_each([true, false], |told| {
        let mut world = World::new("told");
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "own", ..ArenaConfig::default() };
        let pool = Pool::new(&PoolConfig { classes: vec![Class { size: 1 << 16, count: 1 }], arena }).unwrap();
        let own = Mutex::new(Some(pool.alloc(8).unwrap().freeze()));
        let (hold, held) = channel();
        let procedure = Procedure::deferred(move |mut call: DeferredCall| {
            if told {
                assert!(!call.result_writer(0).expect("a Write chunk").as_mut_ptr().is_null());
            }
            let own = own.lock().unwrap().take().expect("one call");
            call.set_result(0, own).expect("there is room");
            hold.send(call).expect("the test waits");
        });
        // One call takes all bulk memory.
        let config = small().with(|c| {
            c.memory.arenas = vec![pool.arena().clone()];
            (c.memory.bulk_buffers, c.memory.long_buffers) = (vec![(1 << 20, 1)], vec![]);
        });
        let address = world.serve_with(config, standard_and([(HELD, procedure.write_chunks(1, 1 << 16))]));
        let mut client = world.client(&address, small());
        for (token, procedure) in [(0, HELD), (1, LOAD)] {
            let call = client.chunked(procedure, &be(&[8, 8]), &[], &[50_000]);
            client.launch(call, token);
        }
        let mut ended = Vec::new();
        let mut poll = |ended: &mut Vec<u64>| {
            client.poll(|done| {
                done.result.expect("a reply");
                ended.push(done.token);
            })
        };
        let waits = || world.stats().memory_waits;
        let settled = settles(|| {
            poll(&mut ended);
            if told { waits() == 1 } else { ended == [1] }
        });
        assert!(settled && ended.is_empty() == told, "{ended:?}, {} waits", waits());
        held.recv().expect("a call").answer(Ok(()));
        let all = settles(|| {
            poll(&mut ended);
            ended.len() == 2
        });
        assert!(all, "{ended:?}");
    });
}
