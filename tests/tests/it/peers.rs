//! Connections of peers and their ends, as reported to the upper layer.

use rpcrdma::CloseReasonKind;
use rpcrdma::server::{LocalServer, PeerEvent, PeerHook};
use rpcrdma::service::Caller;
use rpcrdma_tests::prelude::*;

use super::calls::workers;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Told {
    Established(Caller),
    /// Start and end of a call.
    Begins(Caller),
    Ends(Caller),
    /// The peer closed its connection.
    Left(Caller),
    /// The server closed it.
    Stopped(Caller),
}

/// Events so far, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Told>>>);

impl Log {
    fn add(&self, told: Told) {
        self.0.lock().expect("no panic").push(told);
    }

    fn all(&self) -> Vec<Told> {
        self.0.lock().expect("no panic").clone()
    }

    /// Waits for `count` events.
    fn wait_for(&self, count: usize) -> Vec<Told> {
        assert!(settles(|| self.all().len() >= count), "{:?}", self.all());
        self.all()
    }

    /// A server that logs here. Its ECHO runs on a worker until the test sends a message.
    fn serve(&self, world: &mut World) -> (Address, Sender<()>) {
        self.serve_with(world, workers())
    }

    /// The same with this configuration.
    fn serve_with(&self, world: &mut World, config: ServerConfig) -> (Address, Sender<()>) {
        let (open, gate) = channel();
        let (gate, calls, ends) = (Mutex::new(gate), self.clone(), self.clone());
        let echo = Procedure::new(move |call| {
            calls.add(Told::Begins(call.info().caller()));
            let opened = gate.lock().expect("no panic").recv_timeout(Duration::from_secs(20));
            calls.add(Told::Ends(call.info().caller()));
            opened.map_err(|_| Refusal::SystemError)
        });
        let hook = PeerHook::new(move |event| match event {
            PeerEvent::Established(peer) => ends.add(Told::Established(peer.caller())),
            PeerEvent::Ended(peer, reason) => match reason.kind() {
                CloseReasonKind::Peer => ends.add(Told::Left(peer.caller())),
                CloseReasonKind::Local => ends.add(Told::Stopped(peer.caller())),
                _ => panic!("{reason:?}"),
            },
            other => panic!("{other:?}"),
        });
        let mut services = Services::new();
        services.add(PROGRAM, VERSION, ECHO, echo.on_workers());
        (world.serve_with(ServerConfig { peers: Some(hook), ..config }, services), open)
    }
}

fn begin_call(client: &mut LocalClient) {
    client.begin(ECHO, b"", 0);
    client.poll(drop);
}

#[test]
fn the_peer_hook_gets_the_close_reason_of_a_client() {
    let mut world = World::new("leaves");
    let log = Log::default();
    let (address, open) = log.serve(&mut world);
    open.send(()).expect("it is there");
    let mut client = world.client(&address, small());
    client.run(ECHO, b"").expect("it is served");
    let Told::Established(caller) = log.all()[0] else { panic!("{:?}", log.all()) };
    let mut other = world.client(&address, small());
    client.close(Duration::from_secs(5));
    let told = log.wait_for(5);
    assert_eq!(told[..3], [Told::Established(caller), Told::Begins(caller), Told::Ends(caller)]);
    let Told::Established(second) = told[3] else { panic!("{told:?}") };
    assert_eq!(told[4..], [Told::Left(caller)]);
    assert!(second != caller);
    other.poll(drop);
    drop(other);
    assert_eq!(log.wait_for(6)[5..], [Told::Left(second)], "each once");
}

#[test]
fn the_peer_hook_runs_after_workers_finish_a_vanished_clients_calls() {
    let mut world = World::new("vanishes");
    let log = Log::default();
    let (address, open) = log.serve(&mut world);
    let mut child = Child::start("client-of-echo", &address.to_string());
    child.wait_for("ready");
    // The connection is established, each of two workers runs a call, and a third call waits.
    let told = log.wait_for(1 + RUNNING);
    let Told::Established(caller) = told[0] else { panic!("{told:?}") };
    child.kill();
    assert!(settles(|| world.stats().connections == 0));
    for _ in 0..RUNNING {
        assert!(!log.all().contains(&Told::Left(caller)), "calls of it run");
        open.send(()).expect("it is there");
    }
    let told = log.wait_for(2 + 2 * RUNNING);
    assert_eq!(told.iter().filter(|told| **told == Told::Ends(caller)).count(), RUNNING, "the third did not run");
    assert_eq!(told.last(), Some(&Told::Left(caller)));
}

/// The last holder of a connection's calls reports its end, as no shard exists any more. Either the rings to the
/// workers have room for all calls, or the shard keeps one, which ends with it. Either way the third does not run.
#[test]
fn a_dropped_server_runs_the_peer_hook_once_per_connection() {
    for ring_capacity in [256, 1] {
        let mut world = World::new("stops");
        let log = Log::default();
        let pool = WorkerConfig { count: 2, ring_capacity, ..Default::default() };
        let (address, open) = log.serve_with(&mut world, ServerConfig { workers: Some(pool), ..workers() });
        let mut client = world.client(&address, small());
        open.send(()).expect("it is there");
        // Before the first reply there is credit for one call only.
        client.run(ECHO, b"").expect("it is served");
        let Told::Established(busy) = log.all()[0] else { panic!("{:?}", log.all()) };
        (0..CALLS).for_each(|_| begin_call(&mut client));
        client.poll_until(|_| world.stats().worker_queue_depth == CALLS as u64);
        log.wait_for(5);
        let mut other = world.client(&address, small());
        let Told::Established(idle) = log.wait_for(6)[5] else { panic!("{:?}", log.all()) };
        let server = world.take_server();
        let gone = std::thread::spawn(move || drop(server));
        // The shard has closed both connections, and is joined before the workers.
        assert_eq!(log.wait_for(7)[6], Told::Stopped(idle));
        for client in [&mut client, &mut other] {
            client.poll_until(|client| !client.is_established(client.first()));
        }
        assert!(!log.all().contains(&Told::Stopped(busy)), "calls of it run: {:?}", log.all());
        (0..RUNNING).for_each(|_| open.send(()).expect("it is there"));
        gone.join().expect("no panic");
        let told = log.all();
        assert_eq!(told.iter().filter(|told| **told == Told::Ends(busy)).count(), 1 + RUNNING, "{told:?}");
        assert_eq!(told.iter().filter(|told| matches!(told, Told::Stopped(_))).count(), 2, "{told:?}");
        assert_eq!(told.last(), Some(&Told::Stopped(busy)), "{told:?}");
    }
}

/// Outstanding calls of the child.
const CALLS: usize = 3;
/// Those that the two workers run.
const RUNNING: usize = 2;

/// Starts calls, and waits to be killed.
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
    let world = World::new("peers-polled");
    let address = world.address();
    let log = Log::default();
    let told = log.clone();
    let hook = PeerHook::new(move |event| match event {
        PeerEvent::Established(peer) => told.add(Told::Established(peer.caller())),
        PeerEvent::Ended(peer, _) => told.add(Told::Left(peer.caller())),
        other => panic!("{other:?}"),
    });
    let config = ServerConfig { shard: small(), peers: Some(hook), ..ServerConfig::default() };
    let mut server = LocalServer::start(&address, standard_services(), &config).expect("a server");
    let client = std::thread::spawn(move || {
        let mut client = LocalClient::connect(&address, small_client(small())).expect("a connection");
        echo(&mut client, b"polled").expect("an echo");
    });
    assert!(settles(|| {
        while server.poll() {}
        log.all().len() == 2
    }));
    client.join().expect("it was served");
    let all = log.all();
    assert!(matches!(all[..], [Told::Established(one), Told::Left(same)] if one == same), "{all:?}");
}
