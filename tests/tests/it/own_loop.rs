//! Applications on the shard's thread: services and tasks of one shard, servers that their caller polls, and event
//! loops that sleep for several shards.

use std::pin::Pin;

use rpcrdma::StartErrorKind;
use rpcrdma_tests::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec};

/// Answered by the task in a later turn.
const BY_TASK: u32 = 500;
/// Returns the number of calls that the shard has served.
const COUNT: u32 = 501;

type Queue = Rc<RefCell<VecDeque<DeferredCall>>>;

/// Services that share a queue with the task of their shard, without a lock.
fn services_sharing(queue: &Queue) -> LocalServices {
    let queue = Rc::clone(queue);
    let by_task = Procedure::deferred(move |call| queue.borrow_mut().push_back(call));
    let by_task = by_task.read_chunks(1, 1 << 16).uncounted().write_chunks(1, 1 << 16);
    let served = Cell::new(0u32);
    let count = Procedure::new(move |call| {
        served.set(served.get() + 1);
        Ok(call.reply_writer().put(&served.get().to_be_bytes())?)
    });
    let mut services = local_and(BY_TASK, by_task);
    services.add(PROGRAM, VERSION, COUNT, count);
    services
}

/// Answers the queued calls with their arguments. Returns whether there were any.
fn answer_all(queue: &Queue) -> bool {
    let calls = std::mem::take(&mut *queue.borrow_mut());
    let has_calls = !calls.is_empty();
    for call in calls {
        let args = call.args().to_vec();
        answer(call, &args);
    }
    has_calls
}

/// Answers the queued calls in each turn.
struct AnsweringTask(Queue);

impl ShardTask for AnsweringTask {
    fn poll(&mut self) -> bool {
        answer_all(&self.0)
    }
}

#[test]
fn handlers_and_the_task_of_a_shard_share_state() {
    for_each([IdlePolicy::Poll, IdlePolicy::Event], |idle| {
        let world = World::new("shared");
        let shards_started = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&shards_started);
        let config =
            ServerConfig { shard: small_config().with(|c| c.poll.idle = idle), shards: 2, ..ServerConfig::default() };
        let (address, _server) = world.serve_tasks(config, move |setup| {
            assert!(setup.index < 2 && setup.arena.len() > 1 << 20);
            count.fetch_add(1, Ordering::Relaxed);
            let queue = Queue::default();
            (services_sharing(&queue), AnsweringTask(queue))
        });
        assert_eq!(shards_started.load(Ordering::Relaxed), 2);
        let mut clients = [0; 4].map(|_| world.client(&address, small_config()));
        let mut counts = [0; 4];
        for round in 0..21u32 {
            for (client, last) in clients.iter_mut().zip(&mut counts) {
                assert_eq!(client.run(BY_TASK, &be(&[round])), Ok(be(&[round])));
                let count = client.run(COUNT, b"").expect("a reply");
                *last = u32::from_be_bytes(count.try_into().expect("a word"));
                echo(client, b"shared").expect("an echo");
            }
        }
        assert!(counts.iter().all(|count| (21..=84).contains(count)), "{counts:?}: each shard counts for itself");
        drop(clients);
    });
}

/// The shard does not sleep while its task reports work, even work without effect.
#[test]
fn a_shard_does_not_sleep_while_its_task_has_work() {
    const TURNS: usize = 1000;
    /// Reports work in its first turns.
    #[derive(Clone, Default)]
    struct BusyTask {
        turns: Arc<AtomicUsize>,
        /// The shard's attempts to sleep while there was work.
        early_sleeps: Arc<AtomicUsize>,
    }
    impl ShardTask for BusyTask {
        fn poll(&mut self) -> bool {
            self.turns.fetch_add(1, Ordering::SeqCst) + 1 < TURNS
        }

        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            // The shard calls this before each sleep.
            let has_work = (1..TURNS).contains(&self.turns.load(Ordering::SeqCst));
            self.early_sleeps.fetch_add(usize::from(has_work), Ordering::SeqCst);
            None
        }
    }
    let (world, busy) = (World::new("working"), BusyTask::default());
    let task = busy.clone();
    let config = small_config().with(|c| c.poll.idle = IdlePolicy::Event);
    let (_, server) = world.serve_tasks(config, move |_| (standard_services().to_local(), task.clone()));
    // The shard sleeps once the task has no work.
    assert!(wait_until(|| busy.turns.load(Ordering::SeqCst) >= TURNS && server.stats()[0].sleeps > 0));
    assert_eq!(busy.early_sleeps.load(Ordering::SeqCst), 0, "the shard does not sleep while its task has work");
    drop(server);
}

#[test]
fn errors_of_start_with_name_the_cause() {
    let world = World::new("unmade");
    let config = ServerConfig { workers: Some(WorkerConfig::default()), ..small_server() };
    let refused = Server::start_with(&world.address(), |_| Ok(Application::default()), &config).err();
    assert!(refused.is_some_and(|error| error.to_string().starts_with("`ServerConfig::workers` is set")));
    let refused = Server::start_with(&world.address(), |_| Err("no disk".into()), &small_server()).err();
    assert_eq!(chain(&refused.expect("the start fails")), "application of shard 0 failed to start: no disk");
}

#[test]
fn a_polled_server_refuses_fields_that_need_threads() {
    let world = World::new("no-threads");
    type Change = fn(&mut ServerConfig);
    let cases: [(&str, Change); 6] = [
        ("shards", |c| c.shards = 2),
        ("cores", |c| c.cores = Some(vec![0])),
        ("serves", |c| c.serves = Some(vec![0])),
        ("more_addresses", |c| c.more_addresses = vec!["soft:more".parse().expect("an address")]),
        ("stats", |c| c.stats = Some("/nowhere".into())),
        ("shard.poll.core", |c| c.shard.poll.core = Some(0)),
    ];
    for_each(cases, |(field, change)| {
        let (config, address) = (small_server().with(change), world.address());
        for refused in [
            LocalServer::start(&address, standard_services(), &config),
            LocalServer::start_with(&address, |_| standard_services().to_local(), &config),
        ] {
            let error = refused.expect_err("the field needs threads");
            let text = format!("`ServerConfig::{field}` is set: a `LocalServer` is one shard on its caller's thread");
            assert_eq!((error.kind(), error.to_string()), (StartErrorKind::Config, text));
        }
    });
}

fn local_server(world: &World, idle: IdlePolicy, queue: &Queue) -> (LocalServer, Address) {
    let address = world.address();
    let config = small_config().with(|c| c.poll.idle = idle).into_server_config();
    (LocalServer::start_with(&address, |_| services_sharing(queue), &config).expect("a server"), address)
}

fn spawn_caller(address: &Address, rounds: u32) -> JoinHandle<()> {
    let address = address.clone();
    std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, small_client(small_config())).expect("a connection");
        for round in 0..rounds {
            assert_eq!(client.run(BY_TASK, &be(&[round])), Ok(be(&[round])));
            echo(&mut client, b"polled").expect("an echo");
        }
    })
}

/// The server has two addresses. The loop never sleeps in the first case, and sleeps when idle in the second.
#[test]
fn a_server_is_polled_in_a_loop_of_its_caller() {
    for_each([IdlePolicy::Poll, IdlePolicy::Event], |idle| {
        let (world, queue) = (World::new("polled"), Queue::default());
        let (mut server, address) = local_server(&world, idle, &queue);
        let second = world.address();
        let second_listen = server.listen(&second);
        // On an RDMA device a shard has one address.
        assert_eq!(second_listen.is_err(), second.scheme() == "verbs", "{second_listen:?}");
        let start = Instant::now();
        let mut callers = vec![spawn_caller(&address, 100)];
        callers.extend(second_listen.is_ok().then(|| spawn_caller(&second, 100)));
        let connections = callers.len() as u64;
        while !callers.iter().all(|caller| caller.is_finished()) {
            let busy = server.poll() | answer_all(&queue);
            if !busy && idle == IdlePolicy::Event {
                server.wait(Duration::from_secs(1));
            }
            // Without wake-ups each call would take a second.
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", server.stats());
        }
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        let stats = server.stats();
        assert_eq!((stats.calls, stats.connections_made), (200 * connections, connections));
        assert_eq!(stats.sleeps > 0, idle == IdlePolicy::Event);
        server.begin_drain();
        assert!(wait_until(|| {
            server.poll();
            server.is_drained()
        }));
        drop(server);
    });
}

/// A server and a connected client in one loop.
fn pair_in_one_loop(world: &World, queue: &Queue) -> (LocalServer, LocalClient) {
    let (mut server, address) = local_server(world, IdlePolicy::Event, queue);
    let mut client = polled_client(&address, small_config());
    connect_polling(&mut client, &address, || _ = server.poll());
    (server, client)
}

/// Clients may disconnect during their calls, so the server logs this at level info at most.
#[test]
fn a_client_dropped_during_calls_causes_no_warning() {
    let world = World::new("leaves-amid");
    for_each(0..20, |turns| {
        let queue = Queue::default();
        let (mut server, mut client) = pair_in_one_loop(&world, &queue);
        client.send_call(0, |client| client.prepare_chunked_call(BY_TASK, &[0; 4], &[60_000], &[60_000]));
        client.launch_each(1..8, |client, _| client.prepare_call(ECHO, &[0; 4]));
        let lines = test_fabric::warnings_of(|| {
            client.flush();
            for _ in 0..turns {
                server.poll();
                client.poll(|_| {});
            }
            drop(client);
            assert!(wait_until(|| {
                server.poll();
                // The deferred call is answered after the disconnect.
                answer_all(&queue);
                server.stats().connections == 0
            }));
            drop(server);
        });
        assert_eq!(lines, [""; 0]);
    });
}

/// The last connection may close in the turn before a sleep. No event would end that sleep.
#[test]
fn a_drained_loop_does_not_sleep() {
    let world = World::new("drained-awake");
    let (mut server, mut client) = pair_in_one_loop(&world, &Queue::default());
    server.begin_drain();
    client.poll_until(|_| {
        let timeout = server.arm(Duration::from_secs(3600));
        server.disarm();
        assert!(!server.is_drained() || timeout.is_none(), "a drained server must not sleep, even for {timeout:?}");
        server.is_drained()
    });
}

#[test]
fn a_client_that_keeps_calling_does_not_prevent_a_drain() {
    let world = World::new("drain-caller");
    let (mut server, mut client) = pair_in_one_loop(&world, &Queue::default());
    server.begin_drain();
    let mut outstanding = 0;
    assert!(wait_until(|| {
        while outstanding < 4
            && let Ok(call) = client.prepare(ECHO, 0)
        {
            client.launch(call, 1);
            outstanding += 1;
        }
        server.poll();
        client.poll(|_| outstanding -= 1);
        server.is_drained()
    }));
}

pub(super) fn wait(descriptors: &[BorrowedFd<'_>], longest: Duration) {
    let mut all: Vec<_> = descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
    let _ = rustix::event::poll(&mut all, Some(&timeout));
}

#[test]
fn a_server_and_a_client_sleep_in_one_loop_of_their_callers() {
    let world = World::new("own-epoll");
    let queue = Queue::default();
    let (mut server, address) = local_server(&world, IdlePolicy::Event, &queue);
    let caller = spawn_caller(&address, 100);
    // The loop also has a second server, and a client of it.
    let (mut other, other_address) = local_server(&world, IdlePolicy::Event, &Queue::default());
    let config = small_client(small_config().with(|c| c.poll.idle = IdlePolicy::Event));
    let mut client = LocalClient::open(other_address.open(&config.shard).expect("a device"), config).expect("memory");
    let connection = client.begin_connect(&other_address).expect("a connect request");
    let (mut ended, mut started, mut slept) = (0, 0, 0);
    let start = Instant::now();
    while !caller.is_finished() || ended < 100 {
        assert!(start.elapsed() < Duration::from_secs(60), "{ended} of 100, {slept} sleeps");
        let mut busy = server.poll() | other.poll() | answer_all(&queue);
        busy |= client.poll(|done| {
            assert_eq!(done.result.expect("a reply").results(), b"one loop");
            ended += 1;
        });
        if client.is_established(connection) && started == ended && started < 100 {
            client.begin(ECHO, b"one loop", 0);
            started += 1;
            busy = true;
        }
        if busy {
            continue;
        }
        // The loop arms all three, because the last poll of each found no work.
        let second = Duration::from_secs(1);
        let longest = [server.arm(second), other.arm(second), client.arm(second)];
        if let [Some(one), Some(two), Some(three)] = longest
            && queue.borrow().is_empty()
        {
            slept += 1;
            wait(&[server.as_fd(), other.as_fd(), client.as_fd()], one.min(two).min(three));
        }
        server.disarm();
        other.disarm();
        client.disarm();
    }
    caller.join().expect("no panic");
    assert!(slept > 0, "the loop never slept");
}

/// A procedure whose calls a task or a future keeps.
const KEPT_CALL: u32 = 700;
/// Actions of a future, selected by the first byte of the arguments.
const PANIC: u8 = 0;
const END: u8 = 1;
const WAIT: u8 = 2;

/// Panics when dropped, and counts its drops.
struct PanicOnDrop(Arc<AtomicUsize>);

impl Drop for PanicOnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("expected by the test, in drop");
    }
}

fn next_end(client: &mut LocalClient) -> Result<(), CallError> {
    client.end().1.map(drop)
}

const SYSTEM_ERR: Result<(), CallError> = Err(CallError::Refused(Refusal::SystemError));

/// Keeps calls, and panics in the selected functions once it has a call.
struct PanickingTask {
    calls: Rc<RefCell<Vec<DeferredCall>>>,
    in_poll: bool,
    in_descriptor: bool,
    _panic_on_drop: Option<PanicOnDrop>,
}

impl ShardTask for PanickingTask {
    fn poll(&mut self) -> bool {
        assert!(!self.in_poll || self.calls.borrow().is_empty(), "expected by the test");
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        assert!(!self.in_descriptor || self.calls.borrow().is_empty(), "expected by the test");
        None
    }
}

#[test]
fn a_task_that_panics_is_dropped_with_its_calls_and_the_shard_continues() {
    // Whether the task panics in `poll`, in `descriptor` and in `drop`.
    let cases = [(true, false, false), (true, false, true), (false, true, false), (false, true, true)];
    for_each(cases, |(in_poll, in_descriptor, in_drop)| {
        let (world, drops) = (World::new("task-bomb"), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&drops);
        let (address, server) =
            world.serve_tasks(small_config().with(|c| c.poll.idle = IdlePolicy::Event), move |_| {
                // Only the task owns the calls.
                let calls = Rc::<RefCell<Vec<DeferredCall>>>::default();
                let weak = Rc::downgrade(&calls);
                let keep = move |call| weak.upgrade().map_or((), |calls| calls.borrow_mut().push(call));
                let task = PanickingTask {
                    calls,
                    in_poll,
                    in_descriptor,
                    _panic_on_drop: in_drop.then(|| PanicOnDrop(Arc::clone(&count))),
                };
                (local_and(KEPT_CALL, Procedure::deferred(keep)), task)
            });
        let mut client = world.client(&address, small_config());
        for _ in 0..4 {
            // The first call is dropped with the task. Later calls are dropped because there is no task.
            client.send(KEPT_CALL, &[WAIT], 0);
            assert_eq!(next_end(&mut client), SYSTEM_ERR);
            assert_eq!(drops.load(Ordering::SeqCst), usize::from(in_drop));
            echo(&mut client, b"goes on").expect("an echo");
        }
        assert_eq!(server.stats()[0].calls_dropped, 4);
    });
}

/// A future of a call. The call's argument selects its action, and its drop panics.
struct PanickingFuture {
    call: Option<DeferredCall>,
    polled: Arc<AtomicUsize>,
    _panic_on_drop: PanicOnDrop,
}

impl Future for PanickingFuture {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        self.polled.fetch_add(1, Ordering::SeqCst);
        let Some(call) = &self.call else { return Poll::Pending };
        match call.args()[0] {
            PANIC => panic!("expected by the test"),
            END => {
                self.call.take().expect("the call is not answered yet").answer(Ok(()));
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    }
}

#[test]
fn futures_that_panic_when_dropped_affect_no_other_call() {
    let (drops, polled) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (count, polls) = (Arc::clone(&drops), Arc::clone(&polled));
    let begin = move |call| PanickingFuture {
        call: Some(call),
        polled: Arc::clone(&polls),
        _panic_on_drop: PanicOnDrop(Arc::clone(&count)),
    };
    let services = standard_and([(KEPT_CALL, Procedure::asynchronous(begin))]);
    let (mut world, address) = World::serving("future-bomb", small_server(), services);
    let mut client = world.client(&address, small_config());
    let mut other = world.client(&address, small_config());
    // One future panics, and one completes.
    client.send(KEPT_CALL, &[PANIC], 0);
    assert_eq!(next_end(&mut client), SYSTEM_ERR);
    client.send(KEPT_CALL, &[END], 0);
    assert_eq!(next_end(&mut client), Ok(()));
    echo(&mut client, b"goes on").expect("an echo");
    assert_eq!(drops.load(Ordering::SeqCst), 2);
    // The three futures of one connection are dropped when that connection ends. The two futures of the other
    // connection last until the shard ends.
    (0..3).for_each(|token| _ = client.send(KEPT_CALL, &[WAIT], token));
    (0..2).for_each(|token| _ = other.send(KEPT_CALL, &[WAIT], token));
    assert!(wait_until(|| polled.load(Ordering::SeqCst) == 7));
    drop(client);
    assert!(wait_until(|| drops.load(Ordering::SeqCst) == 5));
    echo(&mut other, b"goes on").expect("an echo");
    // The shard must catch each drop's panic on its own, because a panic during another would abort the process.
    drop(world.take_server());
    assert_eq!(drops.load(Ordering::SeqCst), 7);
}
