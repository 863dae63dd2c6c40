//! Connections of peers and their ends, as reported to the upper layer.

use rpcrdma::server::{PeerEvent, PeerHook};
use rpcrdma_tests::prelude::*;

/// A logged event of a peer.
#[derive(Clone, Copy, PartialEq, Debug)]
enum LoggedEvent {
    Established,
    /// Start and end of a call.
    Begins,
    Ends,
    /// The peer closed its connection.
    Left,
    /// The server closed it.
    Stopped,
}
use LoggedEvent::{Begins, Ends, Established, Left, Stopped};

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

    fn count(&self, of: (LoggedEvent, Caller)) -> usize {
        self.all().iter().filter(|&&event| event == of).count()
    }

    fn hook(&self) -> PeerHook {
        let log = self.clone();
        PeerHook::new(move |event| match event {
            PeerEvent::Established(peer) => log.add(Established, peer.caller()),
            PeerEvent::Ended(peer, reason) => match reason.kind() {
                CloseReasonKind::Peer => log.add(Left, peer.caller()),
                CloseReasonKind::Local => log.add(Stopped, peer.caller()),
                _ => panic!("{reason:?}"),
            },
            other => panic!("{other:?}"),
        })
    }

    /// A server that logs here. Its ECHO runs on a worker until the test sends a message.
    fn serve(&self, world: &mut World, config: ServerConfig) -> (Address, Sender<()>) {
        let (open, gate) = channel();
        let (gate, log) = (Mutex::new(gate), self.clone());
        let echo = Procedure::new(move |call| {
            log.add(Begins, call.info().caller());
            let opened = gate.lock().expect("no panic").recv_timeout(Duration::from_secs(20));
            log.add(Ends, call.info().caller());
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
    let (address, open) = log.serve(&mut world, small().with_workers(2));
    open.send(()).expect("it is there");
    let mut client = world.client(&address, small());
    client.run(ECHO, b"").expect("it is served");
    let (_, first) = log.all()[0];
    let mut other = world.client(&address, small());
    client.close(Duration::from_secs(5));
    let (_, second) = log.wait_for(5)[3];
    other.poll(drop);
    drop(other);
    let expected = [Established, Begins, Ends].map(|event| (event, first)).into_iter();
    let expected = expected.chain([(Established, second), (Left, first), (Left, second)]);
    assert!(second != first && log.wait_for(6).into_iter().eq(expected), "each once: {:?}", log.all());
}

#[test]
fn the_peer_hook_runs_after_workers_finish_a_vanished_clients_calls() {
    let (mut world, log) = (World::new("vanishes"), Log::default());
    let (address, open) = log.serve(&mut world, small().with_workers(2));
    let mut child = Child::start("client-of-echo", &address.to_string());
    child.wait_for("ready");
    // The connection is established, each of two workers runs a call, and a third call waits.
    let (_, caller) = log.wait_for(1 + RUNNING)[0];
    child.kill();
    assert!(wait_until(|| world.stats().connections == 0));
    for _ in 0..RUNNING {
        assert_eq!(log.count((Left, caller)), 0, "the hook ran before its calls ended");
        open.send(()).expect("it is there");
    }
    let events = log.wait_for(2 + 2 * RUNNING);
    assert_eq!((events.last(), log.count((Ends, caller))), (Some(&(Left, caller)), RUNNING), "the waiting call ran");
}

/// No shard exists any more, so the worker that ends a connection's last call reports the connection's end. The third
/// call is in a ring in the first case, and still with the shard in the second case. It runs in neither.
#[test]
fn a_dropped_server_runs_the_peer_hook_once_per_connection() {
    for_each([256, 1], |ring_capacity| {
        let (mut world, log) = (World::new("stops"), Log::default());
        let pool = WorkerConfig { count: 2, ring_capacity, ..Default::default() };
        let (address, open) = log.serve(&mut world, ServerConfig { workers: Some(pool), ..small().with_workers(2) });
        let mut client = world.client(&address, small());
        open.send(()).expect("it is there");
        // Before the first reply there is credit for one call only.
        client.run(ECHO, b"").expect("it is served");
        let (_, busy) = log.all()[0];
        (0..CALLS).for_each(|_| begin_call(&mut client));
        client.poll_until(|_| world.stats().worker_queue_depth == CALLS as u64);
        log.wait_for(5);
        let mut other = world.client(&address, small());
        let (_, idle) = log.wait_for(6)[5];
        let server = world.take_server();
        let gone = std::thread::spawn(move || drop(server));
        // The shard has closed both connections, and is joined before the workers.
        assert_eq!(log.wait_for(7)[6], (Stopped, idle));
        for client in [&mut client, &mut other] {
            client.poll_until(|client| !client.is_established(client.first()));
        }
        assert_eq!(log.count((Stopped, busy)), 0, "calls of it run: {:?}", log.all());
        (0..RUNNING).for_each(|_| open.send(()).expect("it is there"));
        gone.join().expect("no panic");
        let counts = [(Ends, busy), (Stopped, busy), (Stopped, idle)].map(|event| log.count(event));
        assert_eq!(counts, [1 + RUNNING, 1, 1], "{:?}", log.all());
        assert_eq!(log.all().last(), Some(&(Stopped, busy)));
    });
}

/// Outstanding calls of the child.
const CALLS: usize = 3;
/// Calls of the child that the two workers run at once.
const RUNNING: usize = 2;

pub(crate) fn child(address: &Address) {
    let mut client = LocalClient::connect(address, small_client(small())).expect("a connection");
    (0..CALLS).for_each(|_| begin_call(&mut client));
    // The sent calls do not end before this process does.
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
        let mut client = LocalClient::connect(&address, small_client(small())).expect("a connection");
        echo(&mut client, b"polled").expect("an echo");
    });
    assert!(wait_until(|| {
        while server.poll() {}
        log.all().len() == 2
    }));
    client.join().expect("it was served");
    let all = log.all();
    assert!(matches!(all[..], [(Established, one), (Left, same)] if one == same), "{all:?}");
}
