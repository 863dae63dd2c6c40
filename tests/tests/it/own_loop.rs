//! The application on the shard's thread.
//! Services and a task of one shard, servers polled by their caller, and sleeps in the caller's loop.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rpcrdma::StartErrorKind;
use rpcrdma::server::LocalServer;
use rpcrdma::service::{Application, LocalServices, ShardTask};
use rpcrdma_tests::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd};

/// Answered by the task in a later turn.
const BY_TASK: u32 = 500;
/// Returns the number of calls that the shard has served.
const COUNT: u32 = 501;

type Queue = Rc<RefCell<VecDeque<DeferredCall>>>;

/// Services that share a queue and a counter with the rest of their shard, without a lock.
fn sharing(queue: &Queue) -> LocalServices {
    let mut services = standard_services().to_local();
    let queue = Rc::clone(queue);
    let by_task = Procedure::deferred(move |call| queue.borrow_mut().push_back(call));
    services.add(PROGRAM, VERSION, BY_TASK, by_task.read_chunks(1, 1 << 16).uncounted().write_chunks(1, 1 << 16));
    let served = Cell::new(0u32);
    let count = Procedure::new(move |call| {
        served.set(served.get() + 1);
        call.reply_writer().put(&served.get().to_be_bytes()).map_err(Refusal::from)
    });
    services.add(PROGRAM, VERSION, COUNT, count);
    services
}

fn answer(mut call: DeferredCall) {
    let args = call.args().to_vec();
    let outcome = call.reply_writer().put(&args).map_err(Refusal::from);
    call.answer(outcome);
}

/// Answers the calls that its shard's handlers deferred.
struct Answering(Queue);

impl ShardTask for Answering {
    fn poll(&mut self) -> bool {
        let calls: Vec<_> = self.0.borrow_mut().drain(..).collect();
        let any = !calls.is_empty();
        calls.into_iter().for_each(answer);
        any
    }
}

#[test]
fn handlers_and_the_task_of_a_shard_share_state() {
    for idle in [IdlePolicy::Poll, IdlePolicy::Event] {
        let world = World::new("shared");
        let address = world.address();
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let config = ServerConfig { shard: small().with(|c| c.poll.idle = idle), shards: 2, ..ServerConfig::default() };
        let server = Server::start_with(
            &address,
            move |setup| {
                assert!(setup.index < 2 && setup.arena.len() > 1 << 20);
                count.fetch_add(1, Ordering::Relaxed);
                let queue = Queue::default();
                Ok(Application { services: sharing(&queue), task: Some(Box::new(Answering(queue))) })
            },
            &config,
        );
        let _server = server.expect("a server");
        assert_eq!(made.load(Ordering::Relaxed), 2);
        let mut clients: Vec<_> = (0..4).map(|_| world.client(&address, small())).collect();
        for round in 0..20u32 {
            for client in &mut clients {
                assert_eq!(client.run(BY_TASK, &be(&[round])), Ok(be(&[round])));
                client.run(COUNT, b"").expect("a reply");
                echo(client, b"shared").expect("an echo");
            }
        }
        let counts = clients.iter_mut().map(|client| client.run(COUNT, b"").expect("a reply"));
        let counts: Vec<_> = counts.map(|count| u32::from_be_bytes(count.try_into().expect("a word"))).collect();
        assert!(counts.iter().all(|&count| (21..=84).contains(&count)), "{counts:?}: each shard counts for itself");
        drop(clients);
    }
}

/// The shard does not sleep while its task reports work, even work without effect.
#[test]
fn the_work_of_a_task_keeps_its_shard_awake() {
    const TURNS: usize = 1000;
    /// Reports work for `turns` turns, then the number of attempted sleeps meanwhile.
    struct Working {
        turns: usize,
        sleeps: Cell<usize>,
        before: usize,
        tell: Sender<usize>,
    }
    impl ShardTask for Working {
        fn poll(&mut self) -> bool {
            match self.turns {
                0 => self.before = self.sleeps.get(),
                TURNS => return false,
                _ => {}
            }
            self.turns += 1;
            if self.turns == TURNS {
                self.tell.send(self.sleeps.get() - self.before).expect("the test hears it");
            }
            true
        }

        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            // The shard asks for it before each sleep.
            self.sleeps.set(self.sleeps.get() + 1);
            None
        }
    }
    let world = World::new("working");
    let (tell, told) = channel();
    let config = small().with(|c| c.poll.idle = IdlePolicy::Event).of_server();
    let server = Server::start_with(
        &world.address(),
        move |_| {
            let task = Working { turns: 0, sleeps: Cell::new(0), before: 0, tell: tell.clone() };
            Ok(Application { services: standard_services().to_local(), task: Some(Box::new(task)) })
        },
        &config,
    );
    let server = server.expect("a server");
    assert_eq!(told.recv_timeout(Duration::from_secs(60)).expect("it is turned"), 0, "it was slept meanwhile");
    // The shard sleeps once the task has no work.
    assert!(settles(|| server.stats()[0].sleeps > 0));
    drop(server);
}

#[test]
fn a_task_that_panics_is_gone_with_its_calls_and_the_shard_goes_on() {
    struct Panicking(Queue);
    impl ShardTask for Panicking {
        fn poll(&mut self) -> bool {
            assert!(self.0.borrow().len() < 2, "as the test wants");
            false
        }
    }
    let world = World::new("task-panics");
    let address = world.address();
    let server = Server::start_with(
        &address,
        |_| {
            let queue = Queue::default();
            // Only the task owns the queue.
            let weak = Rc::downgrade(&queue);
            let take = move |call| {
                if let Some(queue) = weak.upgrade() {
                    queue.borrow_mut().push_back(call);
                }
            };
            let mut services = standard_services().to_local();
            services.add(PROGRAM, VERSION, BY_TASK, Procedure::deferred(take));
            Ok(Application { services, task: Some(Box::new(Panicking(queue))) })
        },
        &small_server(),
    );
    let _server = server.expect("a server");
    let mut client = world.client(&address, small());
    client.launch_each(0..2, |client, _| client.prepare(BY_TASK, 0).expect("memory"));
    client.each_end(2, |done| {
        assert_eq!(done.result.err().map(CallError::from), Some(CallError::Refused(Refusal::SystemError)));
    });
    echo(&mut client, b"goes on").expect("an echo");
}

#[test]
fn a_failed_start_is_an_error() {
    let world = World::new("unmade");
    let config = ServerConfig { workers: Some(WorkerConfig::default()), ..small_server() };
    let refused = Server::start_with(&world.address(), |_| Ok(Application::default()), &config).err();
    assert!(refused.is_some_and(|error| error.to_string().starts_with("`ServerConfig::workers` is set")));
    let refused = Server::start_with(&world.address(), |_| Err("no disk".into()), &small_server()).err();
    let refused = super::errors::chain(&refused.expect("it fails"));
    assert_eq!(refused, "application of shard 0 failed to start: no disk");
}

#[test]
fn a_polled_server_refuses_what_needs_threads() {
    type Change = fn(&mut ServerConfig);
    let world = World::new("no-threads");
    let cases: [(&str, Change); 6] = [
        ("shards", |c| c.shards = 2),
        ("cores", |c| c.cores = Some(vec![0])),
        ("serves", |c| c.serves = Some(vec![0])),
        ("more_addresses", |c| c.more_addresses = vec!["soft:more".parse().expect("an address")]),
        ("stats", |c| c.stats = Some("/nowhere".into())),
        ("shard.poll.core", |c| c.shard.poll.core = Some(0)),
    ];
    for (field, change) in cases {
        let config = small_server().with(change);
        let address = world.address();
        let refused = [
            LocalServer::start(&address, standard_services(), &config),
            LocalServer::start_with(&address, |_| standard_services().to_local(), &config),
        ];
        for error in refused.map(|refused| refused.expect_err(field)) {
            let text = format!("`ServerConfig::{field}` is set: a `LocalServer` is one shard on its caller's thread");
            assert_eq!((error.kind(), error.to_string()), (StartErrorKind::Config, text));
        }
    }
}

fn local_server(world: &World, idle: IdlePolicy, queue: &Queue) -> (LocalServer, Address) {
    let address = world.address();
    let config = small().with(|c| c.poll.idle = idle).of_server();
    (LocalServer::start_with(&address, |_| sharing(queue), &config).expect("a server"), address)
}

/// A client thread that echoes `rounds` times.
fn caller(address: &Address, rounds: u32) -> std::thread::JoinHandle<()> {
    let address = address.clone();
    std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, small_client(small())).expect("a connection");
        for round in 0..rounds {
            assert_eq!(client.run(BY_TASK, &be(&[round])), Ok(be(&[round])));
            echo(&mut client, b"polled").expect("an echo");
        }
    })
}

/// Serves two addresses, in a loop that never sleeps and in one that sleeps when idle.
#[test]
fn a_server_is_polled_in_a_loop_of_its_caller() {
    for idle in [IdlePolicy::Poll, IdlePolicy::Event] {
        let world = World::new("polled");
        let queue = Queue::default();
        let (mut server, address) = local_server(&world, idle, &queue);
        let second = world.address();
        let listens = server.listen(&second);
        // On an RDMA device a shard has one address.
        assert_eq!(listens.is_err(), second.scheme() == "verbs", "{listens:?}");
        let start = Instant::now();
        let mut callers = vec![caller(&address, 200)];
        callers.extend(listens.is_ok().then(|| caller(&second, 200)));
        let connections = callers.len() as u64;
        let mut slept = 0;
        while !callers.iter().all(|caller| caller.is_finished()) {
            let mut busy = server.poll();
            for call in queue.borrow_mut().drain(..) {
                answer(call);
                busy = true;
            }
            if !busy && idle == IdlePolicy::Event {
                server.wait(Duration::from_secs(1));
                slept += 1;
            }
            // Without wake-ups each call takes a second.
            assert!(start.elapsed() < Duration::from_secs(60), "{slept} sleeps, {:?}", server.stats());
        }
        callers.into_iter().for_each(|caller| caller.join().expect("it ends well"));
        let stats = server.stats();
        assert_eq!((stats.calls, stats.connections_made), (400 * connections, connections));
        assert_eq!(stats.sleeps > 0, idle == IdlePolicy::Event, "{slept} sleeps");
        server.begin_drain();
        assert!(settles(|| {
            server.poll();
            server.is_drained()
        }));
        drop(server);
    }
}

/// A server and a connected client in one loop.
fn pair_in_one_loop(world: &World, queue: &Queue) -> (LocalServer, LocalClient, Connection) {
    let (mut server, address) = local_server(world, IdlePolicy::Event, queue);
    let config = small_client(small());
    let mut client = LocalClient::open(address.open(&config.shard).expect("a device"), config).expect("memory");
    let connection = client.begin_connect(&address).expect("a way");
    client.poll_until(|client| {
        server.poll();
        client.is_established(connection)
    });
    (server, client, connection)
}

/// A client that leaves amid its calls has the right to, and its server says nothing of it above level info.
#[test]
fn a_client_dropped_during_calls_causes_no_warning() {
    let world = World::new("leaves-amid");
    for turns in 0..20 {
        let queue = Queue::default();
        let (mut server, mut client, connection) = pair_in_one_loop(&world, &queue);
        for token in 0..8 {
            let mut call = client.prepare(if token == 0 { BY_TASK } else { ECHO }, 4).expect("a buffer");
            if token == 0 {
                let lent = client.alloc(connection, 60_000).expect("a buffer");
                call = call.read_chunk(4, lent).write_chunk(60_000);
            }
            client.start(connection, call, token);
        }
        let lines = place::warnings_of(|| {
            client.flush();
            for _ in 0..turns {
                server.poll();
                client.poll(|_| {});
            }
            drop(client);
            let over = settles(|| {
                server.poll();
                // Its answer comes too late.
                queue.borrow_mut().drain(..).for_each(answer);
                server.stats().connections == 0
            });
            assert!(over);
            drop(server);
        });
        assert_eq!(lines, [""; 0], "{turns} turns");
    }
}

/// The last connection may close in the turn before a sleep, and nothing would end that sleep.
#[test]
fn a_drained_loop_does_not_sleep() {
    let world = World::new("drained-awake");
    let (mut server, mut client, _) = pair_in_one_loop(&world, &Queue::default());
    server.begin_drain();
    client.poll_until(|_| {
        let slept = server.arm(Duration::from_secs(3600));
        server.disarm();
        assert!(!server.is_drained() || slept.is_none(), "it would sleep for {slept:?}");
        server.is_drained()
    });
}

/// The client sent these calls before it could know of the drain. The error reports that they did not run.
#[test]
fn calls_in_flight_to_a_draining_server_get_an_error() {
    let world = World::new("drain-late-calls");
    let (mut server, mut client, _) = pair_in_one_loop(&world, &Queue::default());
    server.begin_drain();
    server.poll();
    let mut told = 0;
    for _ in 0..2 {
        // Before the first reply there is credit for one call only.
        let count = if told == 0 { 1 } else { 7 };
        client.launch_each(0..count, |client, _| client.prepared(ECHO, b""));
        client.flush();
        let all = told + count;
        assert!(settles(|| {
            server.poll();
            client.poll(|done| {
                let error = done.result.expect_err("it begins nothing").error;
                assert!(matches!(error, CallError::Transport(ErrorBody::System)), "{error}");
                told += 1;
            });
            told == all
        }));
    }
    client.poll_until(|_| {
        server.poll();
        server.is_drained()
    });
    assert_eq!((server.stats().calls, server.stats().calls_failed), (0, 8));
}

#[test]
fn a_client_that_goes_on_to_call_does_not_keep_a_server_from_draining() {
    let world = World::new("drain-caller");
    let (mut server, mut client, _) = pair_in_one_loop(&world, &Queue::default());
    server.begin_drain();
    let mut under_way = 0;
    assert!(settles(|| {
        while under_way < 4
            && let Ok(call) = client.prepare(ECHO, 0)
        {
            client.launch(call, 1);
            under_way += 1;
        }
        server.poll();
        client.poll(|_| under_way -= 1);
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
    let caller = caller(&address, 100);
    // A second server, with a client on the same thread.
    let (mut other, there) = local_server(&world, IdlePolicy::Event, &Queue::default());
    let config = small_client(small().with(|c| c.poll.idle = IdlePolicy::Event));
    let mut client = LocalClient::open(there.open(&config.shard).expect("a device"), config).expect("memory");
    let connection = client.begin_connect(&there).expect("a way");
    let (mut ended, mut started, mut slept) = (0, 0, 0);
    let start = Instant::now();
    while !caller.is_finished() || ended < 100 {
        assert!(start.elapsed() < Duration::from_secs(60), "{ended} of 100, {slept} sleeps");
        let mut busy = server.poll() | other.poll();
        for call in queue.borrow_mut().drain(..) {
            answer(call);
            busy = true;
        }
        busy |= client.poll(|done| {
            assert_eq!(done.result.expect("a reply").results(), b"one loop");
            ended += 1;
        });
        if client.is_established(connection) && started == ended && started < 100 {
            let call = client.prepared(ECHO, b"one loop");
            client.start(connection, call, 0);
            started += 1;
            busy = true;
        }
        if busy {
            continue;
        }
        // Each end is armed, and was polled before.
        let second = Duration::from_secs(1);
        let longest = [server.arm(second), other.arm(second), client.arm(second)];
        if let Some(longest) = longest.into_iter().collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().min())
            && queue.borrow().is_empty()
        {
            slept += 1;
            wait(&[server.as_fd(), other.as_fd(), client.as_fd()], longest);
        }
        server.disarm();
        other.disarm();
        client.disarm();
    }
    caller.join().expect("it ends well");
    assert!(slept > 0, "it never slept");
}
