//! Connections of peers and their ends, as reported to the upper layer.

use rpcrdma::server::{PeerEvent, PeerHook};
use rpcrdma_tests::prelude::*;

/// A logged event of a peer.
#[derive(Clone, Copy, PartialEq, Debug)]
enum LoggedEvent {
    Established,
    CallBegan,
    CallEnded,
    ClosedByPeer,
    ClosedByServer,
}
use LoggedEvent::{CallBegan, CallEnded, ClosedByPeer, ClosedByServer, Established};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(LoggedEvent, Caller)>>>);

impl Log {
    fn add(&self, event: LoggedEvent, caller: Caller) {
        self.0.lock().expect("no panic").push((event, caller));
    }

    fn all(&self) -> Vec<(LoggedEvent, Caller)> {
        self.0.lock().expect("no panic").clone()
    }

    fn wait_for(&self, count: usize) -> Vec<(LoggedEvent, Caller)> {
        assert!(wait_until(|| self.all().len() >= count), "{:?}", self.all());
        self.all()
    }

    fn count(&self, wanted: (LoggedEvent, Caller)) -> usize {
        self.all().iter().filter(|&&event| event == wanted).count()
    }

    fn hook(&self) -> PeerHook {
        let log = self.clone();
        PeerHook::new(move |event| match event {
            PeerEvent::Established(peer) => log.add(Established, peer.caller()),
            PeerEvent::Ended(peer, reason) => match reason.kind() {
                CloseReasonKind::Peer => log.add(ClosedByPeer, peer.caller()),
                CloseReasonKind::Local => log.add(ClosedByServer, peer.caller()),
                _ => panic!("{reason:?}"),
            },
            other => panic!("{other:?}"),
        })
    }

    /// Starts a server that logs its events here. Each ECHO occupies a worker until the test sends a message.
    fn serve(&self, world: &mut World, config: ServerConfig) -> (Address, Sender<()>) {
        let (open, gate) = channel();
        let (gate, log) = (Mutex::new(gate), self.clone());
        let echo = Procedure::new(move |call| {
            log.add(CallBegan, call.info().caller());
            let opened = gate.lock().expect("no panic").recv_timeout(Duration::from_secs(20));
            log.add(CallEnded, call.info().caller());
            opened.map_err(|_| Refusal::SystemError)
        });
        let mut services = Services::new();
        services.add(PROGRAM, VERSION, ECHO, echo.on_workers());
        (world.serve_with(ServerConfig { peers: Some(self.hook()), ..config }, services), open)
    }
}

fn begin_call(client: &mut LocalClient) {
    client.begin(ECHO, b"", 0);
    client.poll(drop);
}

#[test]
fn the_peer_hook_gets_the_close_reason_of_a_client() {
    let (mut world, log) = (World::new("leaves"), Log::default());
    let (address, open) = log.serve(&mut world, small_config().with_workers(2));
    open.send(()).expect("the server runs");
    let mut client = world.client(&address, small_config());
    client.run(ECHO, b"").expect("a reply");
    let (_, first) = log.all()[0];
    let mut other = world.client(&address, small_config());
    client.close(Duration::from_secs(5));
    let (_, second) = log.wait_for(5)[3];
    other.poll(drop);
    drop(other);
    let expected = [Established, CallBegan, CallEnded].map(|event| (event, first)).into_iter();
    let expected = expected.chain([(Established, second), (ClosedByPeer, first), (ClosedByPeer, second)]);
    assert!(
        second != first && log.wait_for(6).into_iter().eq(expected),
        "each event once, in this order: {:?}",
        log.all()
    );
}

#[test]
fn the_peer_hook_runs_after_workers_finish_a_vanished_clients_calls() {
    let (mut world, log) = (World::new("vanishes"), Log::default());
    let (address, open) = log.serve(&mut world, small_config().with_workers(2));
    let mut child = Child::start("client-of-echo", &address.to_string());
    child.wait_for("ready");
    // The connection is established, each of two workers runs a call, and a third call waits.
    let (_, caller) = log.wait_for(1 + RUNNING)[0];
    child.kill();
    assert!(wait_until(|| world.stats().connections == 0));
    for _ in 0..RUNNING {
        assert_eq!(log.count((ClosedByPeer, caller)), 0, "the hook waits until the calls have ended");
        open.send(()).expect("the server runs");
    }
    let events = log.wait_for(2 + 2 * RUNNING);
    assert_eq!(
        (events.last(), log.count((CallEnded, caller))),
        (Some(&(ClosedByPeer, caller)), RUNNING),
        "only the running calls end"
    );
}

/// The shard has ended, so the worker that ends a connection's last call reports the end of the connection. The third
/// call is in a ring in the first case, and still with the shard in the second case. It runs in neither case.
#[test]
fn a_dropped_server_runs_the_peer_hook_once_per_connection() {
    for_each([256, 1], |ring_capacity| {
        let (mut world, log) = (World::new("stops"), Log::default());
        let workers = WorkerConfig { count: 2, ring_capacity, ..Default::default() };
        let (address, open) =
            log.serve(&mut world, ServerConfig { workers: Some(workers), ..small_config().with_workers(2) });
        let mut client = world.client(&address, small_config());
        open.send(()).expect("the server runs");
        // Before the first reply there is credit for one call only.
        client.run(ECHO, b"").expect("a reply");
        let (_, busy) = log.all()[0];
        (0..CALLS).for_each(|_| begin_call(&mut client));
        client.poll_until(|_| world.stats().worker_queue_depth == CALLS as u64);
        log.wait_for(5);
        let mut other = world.client(&address, small_config());
        let (_, idle) = log.wait_for(6)[5];
        let server = world.take_server();
        let dropping = std::thread::spawn(move || drop(server));
        // The shard has closed both connections, and is joined before the workers.
        assert_eq!(log.wait_for(7)[6], (ClosedByServer, idle));
        for client in [&mut client, &mut other] {
            client.poll_until(|client| !client.is_established(client.first()));
        }
        assert_eq!(log.count((ClosedByServer, busy)), 0, "its calls still run: {:?}", log.all());
        (0..RUNNING).for_each(|_| open.send(()).expect("the server runs"));
        dropping.join().expect("no panic");
        let counts = [(CallEnded, busy), (ClosedByServer, busy), (ClosedByServer, idle)].map(|event| log.count(event));
        assert_eq!(counts, [1 + RUNNING, 1, 1], "{:?}", log.all());
        assert_eq!(log.all().last(), Some(&(ClosedByServer, busy)));
    });
}

/// Calls that a client begins.
const CALLS: usize = 3;
/// Calls that the two workers run concurrently.
const RUNNING: usize = 2;

/// The child process: begins [`CALLS`] calls, and waits to be killed.
pub(crate) fn begin_calls_and_wait(address: &Address) {
    let mut client = LocalClient::connect(address, small_client(small_config())).expect("a connection");
    (0..CALLS).for_each(|_| begin_call(&mut client));
    // Polls until all calls are sent. They do not end before this process does.
    while client.stats().messages.sent < CALLS as u64 {
        client.poll(drop);
    }
    println!("ready");
    loop {
        client.poll(drop);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_local_server_runs_the_peer_hook() {
    let (world, log) = (World::new("peers-polled"), Log::default());
    let address = world.address();
    let config = ServerConfig { peers: Some(log.hook()), ..small_server() };
    let mut server = LocalServer::start(&address, standard_services(), &config).expect("a server");
    let client = std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, small_client(small_config())).expect("a connection");
        echo(&mut client, b"polled").expect("an echo");
    });
    assert!(wait_until(|| {
        while server.poll() {}
        log.all().len() == 2
    }));
    client.join().expect("the client was served");
    let all = log.all();
    assert!(matches!(all[..], [(Established, opened), (ClosedByPeer, closed)] if opened == closed), "{all:?}");
}
