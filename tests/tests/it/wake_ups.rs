//! Wake-ups of sleeping shards: descriptors, wakers, answered calls, futures.
//! Without a wake-up a shard polls again after a second. Each test runs many rounds, most of them with a shard that is
//! known to be asleep, so a test with lost wake-ups exceeds its time limit.

use rpcrdma_tests::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use super::own_loop::wait;

const ROUNDS: usize = 200;
/// Limit for all rounds. Without wake-ups each round takes a second.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// A procedure whose calls are answered after a wake-up of their shard.
const WOKEN: u32 = 600;

/// True after the last poll of the shard before it sleeps.
type Asleep = Arc<AtomicBool>;

/// A task that reports when its shard sleeps.
struct SleepReporter {
    asleep: Asleep,
    work: Box<dyn FnMut() -> bool>,
    descriptor: Option<OwnedFd>,
}

impl ShardTask for SleepReporter {
    fn poll(&mut self) -> bool {
        self.asleep.store(false, Ordering::SeqCst);
        (self.work)()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        // The shard asks for the descriptor after its last poll before it sleeps.
        self.asleep.store(true, Ordering::SeqCst);
        self.descriptor.as_ref().map(AsFd::as_fd)
    }
}

impl SleepReporter {
    fn new(asleep: &Asleep, work: impl FnMut() -> bool + 'static) -> Self {
        Self { asleep: Arc::clone(asleep), work: Box::new(work), descriptor: None }
    }
}

/// Starts a server with one shard, which sleeps whenever it can.
fn start_sleeping_server(
    world: &World,
    make: impl Fn(&ShardSetup<'_>) -> (LocalServices, SleepReporter) + Send + Sync + 'static,
) -> (Address, Server) {
    world.serve_tasks(small_config().with(|c| c.poll.idle = IdlePolicy::Event), make)
}

/// Wakes the shard once for each of [`ROUNDS`] items.
fn wake_each<T>(asleep: &Asleep, items: &Receiver<T>, mut wake: impl FnMut(T)) {
    for (round, item) in items.iter().take(ROUNDS).enumerate() {
        // In three of four rounds the shard is known to be asleep. In the fourth it may be about to sleep.
        assert!(round % 4 == 0 || wait_until(|| asleep.load(Ordering::SeqCst)), "the shard sleeps");
        wake(item);
    }
}

/// Makes [`ROUNDS`] calls in sequence, within [`TIME_LIMIT`], while a thread wakes the shard for each item that its
/// services send.
fn assert_calls_are_woken<T: Send + 'static>(
    name: &'static str,
    make: impl Fn(&Asleep, &Sender<T>) -> (LocalServices, SleepReporter) + Send + Sync + 'static,
    wake: impl FnMut(T) + Send + 'static,
) {
    let (world, asleep, (sender, items)) = (World::new(name), Asleep::default(), channel());
    let shard_sleeps = Arc::clone(&asleep);
    let (address, _server) = start_sleeping_server(&world, move |_| make(&shard_sleeps, &sender));
    let mut client = world.client(&address, small_config());
    let waker_thread = std::thread::spawn(move || wake_each(&asleep, &items, wake));
    make_calls_in_time(&mut client);
    waker_thread.join().expect("no panic");
}

/// Makes [`ROUNDS`] calls in sequence, within [`TIME_LIMIT`].
fn make_calls_in_time(client: &mut LocalClient) {
    let start = Instant::now();
    for round in 0..ROUNDS {
        let call = client.prepare(WOKEN, 0).expect("memory").timeout(TIME_LIMIT);
        client.call(call).expect("a reply");
        assert!(start.elapsed() < TIME_LIMIT, "{round} of {ROUNDS} rounds in {:?}", start.elapsed());
    }
}

#[test]
fn a_shard_that_sleeps_wakes_for_its_task() {
    let (send_event, events) = channel();
    let make = move |asleep: &Asleep, sender: &Sender<()>| {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        send_event.send(event.try_clone().expect("a descriptor")).expect("the test waits");
        let (send_call, calls) = channel::<DeferredCall>();
        let (is_asleep, sender) = (Arc::clone(asleep), sender.clone());
        let take = move |call| {
            send_call.send(call).expect("the task receives calls");
            // The shard is awake now. The flag may date from its last sleep.
            is_asleep.store(false, Ordering::SeqCst);
            sender.send(()).expect("the test listens");
        };
        let task_event = event.try_clone().expect("a descriptor");
        let work = move || {
            let is_signaled = rustix::io::read(&task_event, &mut [0; 8]).is_ok();
            is_signaled && calls.try_iter().map(|call| call.answer(Ok(()))).count() > 0
        };
        let task = SleepReporter { descriptor: Some(event), ..SleepReporter::new(asleep, work) };
        (local_and(WOKEN, Procedure::deferred(take)), task)
    };
    let mut event: Option<OwnedFd> = None;
    assert_calls_are_woken("wakes", make, move |()| {
        let event = event.get_or_insert_with(|| events.recv().expect("an eventfd"));
        rustix::io::write(event, &1u64.to_ne_bytes()).expect("the eventfd is writable");
    });
}

#[test]
fn any_thread_wakes_a_shard_for_its_task() {
    let world = World::new("waker");
    let (asleep, (send_waker, wakers)) = (Asleep::default(), channel());
    let (has_work, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (task_has_work, task_runs, shard_sleeps) = (Arc::clone(&has_work), Arc::clone(&runs), Arc::clone(&asleep));
    let (_, server) = start_sleeping_server(&world, move |setup| {
        send_waker.send(setup.waker.clone()).expect("the test waits");
        let (has_work, runs) = (Arc::clone(&task_has_work), Arc::clone(&task_runs));
        let work = move || {
            let had_work = has_work.swap(false, Ordering::SeqCst);
            runs.fetch_add(usize::from(had_work), Ordering::SeqCst);
            had_work
        };
        (standard_services().to_local(), SleepReporter::new(&shard_sleeps, work))
    });
    let waker = wakers.recv().expect("a waker");
    let (send_round, rounds) = channel();
    (1..=ROUNDS).for_each(|n| send_round.send(n).expect("a receiver"));
    let start = Instant::now();
    wake_each(&asleep, &rounds, |n| {
        has_work.store(true, Ordering::SeqCst);
        waker.wake_by_ref();
        assert!(wait_until(|| runs.load(Ordering::SeqCst) == n), "round {n}");
        assert!(start.elapsed() < TIME_LIMIT, "{n} of {ROUNDS} rounds in {:?}", start.elapsed());
    });
    drop(server);
}

#[test]
fn an_answer_wakes_a_sleeping_shard() {
    let make = |asleep: &Asleep, sender: &Sender<DeferredCall>| {
        let (is_asleep, sender) = (Arc::clone(asleep), sender.clone());
        let take = move |call| {
            is_asleep.store(false, Ordering::SeqCst);
            sender.send(call).expect("a thread answers the call");
        };
        (local_and(WOKEN, Procedure::deferred(take)), SleepReporter::new(asleep, || false))
    };
    assert_calls_are_woken("answer-wakes", make, |call| call.answer(Ok(())));
}

#[test]
fn a_woken_future_wakes_its_shard() {
    let make = |asleep: &Asleep, sender: &Sender<(Arc<AtomicBool>, Waker)>| {
        let (is_asleep, sender) = (Arc::clone(asleep), sender.clone());
        let begin = move |call: DeferredCall| {
            let (is_asleep, sender, ready) = (Arc::clone(&is_asleep), sender.clone(), Arc::new(AtomicBool::new(false)));
            let mut is_sent = false;
            async move {
                poll_fn(move |context| {
                    if !std::mem::replace(&mut is_sent, true) {
                        is_asleep.store(false, Ordering::SeqCst);
                        sender.send((Arc::clone(&ready), context.waker().clone())).expect("a thread wakes the future");
                    }
                    if ready.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                call.answer(Ok(()));
            }
        };
        (local_and(WOKEN, Procedure::asynchronous(begin)), SleepReporter::new(asleep, || false))
    };
    assert_calls_are_woken("future-wakes", make, |(ready, waker)| {
        ready.store(true, Ordering::SeqCst);
        waker.wake();
    });
}

/// A worker that finishes a call makes the server's descriptor readable, which wakes the event loop that polls the
/// server. Each worker finishes only while this loop sleeps.
#[test]
fn a_worker_wakes_the_loop_of_its_server() {
    let world = World::new("worker-wakes");
    let (address, asleep) = (world.address(), Asleep::default());
    let loop_sleeps = Arc::clone(&asleep);
    let woken = Procedure::new(move |_| {
        while !loop_sleeps.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        Ok(())
    });
    let workers = WorkerConfig { count: 2, idle: IdlePolicy::Event, ..Default::default() };
    let config = small_config().with(|c| c.poll.idle = IdlePolicy::Event).into_server_config();
    let config = ServerConfig { workers: Some(workers), ..config };
    let services = standard_and([(WOKEN, woken.on_workers())]);
    let mut server = LocalServer::start(&address, services, &config).expect("a server");
    let caller = std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, small_client(small_config())).expect("a connection");
        make_calls_in_time(&mut client);
        echo(&mut client, b"not on workers").expect("an echo");
    });
    while !caller.is_finished() {
        if !server.poll()
            && let Some(longest) = server.arm(Duration::from_secs(1))
        {
            asleep.store(true, Ordering::SeqCst);
            wait(&[server.as_fd()], longest);
            asleep.store(false, Ordering::SeqCst);
        }
        server.disarm();
    }
    caller.join().expect("no panic");
    assert!(server.stats().calls > ROUNDS as u64);
}
