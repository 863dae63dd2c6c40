//! Wake-ups of sleeping shards: descriptors, wakers, answered calls, futures.
//! Without a wake-up a shard polls again after a second. Each test runs many rounds, each with the shard known to be
//! asleep, so lost wake-ups exceed its time limit.

use rpcrdma_tests::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use super::own_loop::wait;

const ROUNDS: usize = 200;
/// Limit for all rounds. Without wake-ups each round takes a second.
const IN_TIME: Duration = Duration::from_secs(60);
/// A procedure that is answered after a wake-up of its shard.
const WOKEN: u32 = 600;

/// True once the shard has polled for the last time, and sleeps.
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
        // The shard asks for it after its last poll.
        self.asleep.store(true, Ordering::SeqCst);
        self.descriptor.as_ref().map(AsFd::as_fd)
    }
}

impl SleepReporter {
    fn new(asleep: &Asleep, work: impl FnMut() -> bool + 'static) -> Self {
        Self { asleep: Arc::clone(asleep), work: Box::new(work), descriptor: None }
    }
}

/// A server with one shard, which sleeps whenever it can.
fn sleeper(
    world: &World,
    make: impl Fn(&ShardSetup<'_>) -> (LocalServices, SleepReporter) + Send + Sync + 'static,
) -> (Address, Server) {
    world.serve_tasks(small().with(|c| c.poll.idle = IdlePolicy::Event), make)
}

/// Wakes the shard once for each of [`ROUNDS`] items, mostly when it is known to be asleep.
fn wake_each<T>(asleep: &Asleep, items: &Receiver<T>, mut wake: impl FnMut(T)) {
    for (round, item) in items.iter().take(ROUNDS).enumerate() {
        // Otherwise the shard is asleep, or about to be.
        assert!(round % 4 == 0 || wait_until(|| asleep.load(Ordering::SeqCst)), "the shard does not sleep");
        wake(item);
    }
}

/// Makes [`ROUNDS`] calls in sequence, within [`IN_TIME`], while a thread wakes the shard for each item that its
/// services send.
fn calls_are_woken<T: Send + 'static>(
    name: &'static str,
    make: impl Fn(&Asleep, &Sender<T>) -> (LocalServices, SleepReporter) + Send + Sync + 'static,
    wake: impl FnMut(T) + Send + 'static,
) {
    let (world, asleep, (hold, held)) = (World::new(name), Asleep::default(), channel());
    let shard_sleeps = Arc::clone(&asleep);
    let (address, _server) = sleeper(&world, move |_| make(&shard_sleeps, &hold));
    let mut client = world.client(&address, small());
    let waking = std::thread::spawn(move || wake_each(&asleep, &held, wake));
    in_time(&mut client);
    waking.join().expect("it ends well");
}

/// Makes [`ROUNDS`] calls in sequence, within [`IN_TIME`].
fn in_time(client: &mut LocalClient) {
    let start = Instant::now();
    for round in 0..ROUNDS {
        let call = client.prepare(WOKEN, 0).expect("memory").timeout(IN_TIME);
        client.call(call).expect("a reply");
        assert!(start.elapsed() < IN_TIME, "{round} of {ROUNDS} rounds in {:?}", start.elapsed());
    }
}

#[test]
fn a_shard_that_sleeps_wakes_for_its_task() {
    let (tell, told) = channel();
    let make = move |asleep: &Asleep, hold: &Sender<()>| {
        let may = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        tell.send(may.try_clone().expect("one more")).expect("the test waits for it");
        let (taken, calls) = channel::<DeferredCall>();
        let (is_asleep, hold) = (Arc::clone(asleep), hold.clone());
        let take = move |call| {
            taken.send(call).expect("the task is there");
            // The shard is awake, whatever the flag was before.
            is_asleep.store(false, Ordering::SeqCst);
            hold.send(()).expect("the test listens");
        };
        let may_answer = may.try_clone().expect("one more");
        let work = move || {
            let may = rustix::io::read(&may_answer, &mut [0; 8]).is_ok();
            may && calls.try_iter().map(|call| call.answer(Ok(()))).count() > 0
        };
        let task = SleepReporter { descriptor: Some(may), ..SleepReporter::new(asleep, work) };
        (local_and(WOKEN, Procedure::deferred(take)), task)
    };
    let mut may: Option<OwnedFd> = None;
    calls_are_woken("wakes", make, move |()| {
        let may = may.get_or_insert_with(|| told.recv().expect("it is made"));
        rustix::io::write(may, &1u64.to_ne_bytes()).expect("the eventfd is writable");
    });
}

#[test]
fn any_thread_wakes_a_shard_for_its_task() {
    let world = World::new("waker");
    let (asleep, (tell, told)) = (Asleep::default(), channel());
    let (work, worked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (given, counted, shard_sleeps) = (Arc::clone(&work), Arc::clone(&worked), Arc::clone(&asleep));
    let (_, server) = sleeper(&world, move |setup| {
        tell.send(setup.waker.clone()).expect("the test waits for it");
        let (given, counted) = (Arc::clone(&given), Arc::clone(&counted));
        let work = move || {
            let any = given.swap(false, Ordering::SeqCst);
            counted.fetch_add(usize::from(any), Ordering::SeqCst);
            any
        };
        (standard_services().to_local(), SleepReporter::new(&shard_sleeps, work))
    });
    let waker = told.recv().expect("it is made");
    let (round, rounds) = channel();
    (1..=ROUNDS).for_each(|n| round.send(n).expect("there is room"));
    let start = Instant::now();
    wake_each(&asleep, &rounds, |n| {
        work.store(true, Ordering::SeqCst);
        waker.wake_by_ref();
        assert!(wait_until(|| worked.load(Ordering::SeqCst) == n), "round {n}");
        assert!(start.elapsed() < IN_TIME, "{n} of {ROUNDS} rounds in {:?}", start.elapsed());
    });
    drop(server);
}

#[test]
fn an_answer_wakes_a_sleeping_shard() {
    let make = |asleep: &Asleep, hold: &Sender<DeferredCall>| {
        let (is_asleep, hold) = (Arc::clone(asleep), hold.clone());
        let take = move |call| {
            is_asleep.store(false, Ordering::SeqCst);
            hold.send(call).expect("somebody answers it");
        };
        (local_and(WOKEN, Procedure::deferred(take)), SleepReporter::new(asleep, || false))
    };
    calls_are_woken("answer-wakes", make, |call| call.answer(Ok(())));
}

#[test]
fn a_woken_future_wakes_its_shard() {
    let make = |asleep: &Asleep, wait: &Sender<(Arc<AtomicBool>, Waker)>| {
        let (is_asleep, wait) = (Arc::clone(asleep), wait.clone());
        let begin = move |call: DeferredCall| {
            let (is_asleep, wait, ready) = (Arc::clone(&is_asleep), wait.clone(), Arc::new(AtomicBool::new(false)));
            let mut asked = false;
            async move {
                poll_fn(move |context| {
                    if !std::mem::replace(&mut asked, true) {
                        is_asleep.store(false, Ordering::SeqCst);
                        wait.send((Arc::clone(&ready), context.waker().clone())).expect("somebody wakes it");
                    }
                    if ready.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                call.answer(Ok(()));
            }
        };
        (local_and(WOKEN, Procedure::asynchronous(begin)), SleepReporter::new(asleep, || false))
    };
    calls_are_woken("future-wakes", make, |(ready, waker)| {
        ready.store(true, Ordering::SeqCst);
        waker.wake();
    });
}

/// A worker that finishes makes the server's descriptor readable, in its caller's loop. Each worker continues only
/// while the loop sleeps.
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
    let config = small().with(|c| c.poll.idle = IdlePolicy::Event).of_server();
    let config = ServerConfig { workers: Some(workers), ..config };
    let services = standard_and([(WOKEN, woken.on_workers())]);
    let mut server = LocalServer::start(&address, services, &config).expect("a server");
    let caller = std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, small_client(small())).expect("a connection");
        in_time(&mut client);
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
    caller.join().expect("it ends well");
    assert!(server.stats().calls > ROUNDS as u64);
}
