//! Calls of closed connections that handlers and workers still have.
//! A host connects, calls, leaves and comes again. Others must not notice.

use std::net::Ipv4Addr;
use std::sync::Condvar;
use std::sync::atomic::{AtomicUsize, Ordering};

use rpcrdma::fabric::testing::loopback_address;
use rpcrdma::stats::ShardStats;
use rpcrdma_tests::prelude::*;

use super::parked::{Desk, HELD, ends};

/// Host that reconnects. The others are at 127.0.0.1.
const GREEDY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Calls of each of its connections.
const CALLS: u64 = 32;
/// Waits on a worker until the [gate](Gate) is open.
const GATED: u32 = 410;

/// Serves over TCP, whose hosts have addresses.
fn serve(world: &mut World, config: ServerConfig, services: Services) -> Address {
    let address = format!("iwarp:{}", loopback_address().0).parse().expect("an address");
    world.serve_at(&address, config, services);
    address
}

fn stats(world: &World) -> ShardStats {
    world.server().stats().swap_remove(0)
}

fn start(client: &mut LocalClient, procedure: u32, token: u64) {
    client.begin(procedure, b"", token);
    client.flush();
}

/// One more connection of the greedy host, with its calls under way.
fn greedy(address: &Address, procedure: u32) -> (Cable, LocalClient) {
    let cable = Cable::new(address, GREEDY);
    let mut client = LocalClient::connect(cable.address(), small_client(small())).expect("a connection");
    (0..CALLS).for_each(|n| start(&mut client, procedure, n));
    (cable, client)
}

#[test]
fn a_host_that_reconnects_leaves_half_of_the_receives_to_others() {
    let (mut world, desk, mut services) = (World::new("reconnects"), Desk::default(), standard_services());
    desk.add_to(&mut services);
    let address = serve(&mut world, small_server(), services);
    let mut victim = world.client(&address, small());
    echo(&mut victim, b"four").expect("it is served");
    let most = small().memory.receives / 2;
    while stats(&world).backpressure == 0 {
        let before = desk.len();
        let (_cable, mut client) = greedy(&address, HELD);
        let came = settles(|| {
            client.poll(|done| panic!("{:?}", done.result.map(drop)));
            desk.len() > before || stats(&world).backpressure > 0
        });
        assert!(came && desk.len() <= most, "{} calls are held", desk.len());
    }
    assert!(settles(|| stats(&world).connections == 1), "only the victim is left");
    let held = desk.len();
    echo(&mut victim, b"four").expect("it is served as before");
    let mut other = world.client(&address, small());
    for client in [&mut victim, &mut other] {
        start(client, HELD, 0);
        client.poll_until(|_| desk.len() > held);
        desk.take().expect("the last one").answer(Ok(()));
        assert_eq!(ends(client, 0), Some(Ok(())));
    }
    // The greedy host waits for its own calls.
    let waited = stats(&world).backpressure;
    let (_cable, mut client) = greedy(&address, HELD);
    client.poll_until(|_| stats(&world).backpressure >= waited + CALLS / 2);
    assert_eq!(desk.len(), held, "it has its share");
    let mut answered = 0;
    assert!(settles(|| {
        desk.answer_all();
        client.poll(|done| answered += u64::from(done.result.is_ok()));
        answered == CALLS
    }));
}

/// Lets calls pass once open, and counts those that have come.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
    came: AtomicUsize,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().expect("nobody panics with it") = true;
        self.opened.notify_all();
    }

    fn came(&self) -> usize {
        self.came.load(Ordering::Relaxed)
    }

    /// A server with one worker, and such a procedure.
    fn serve(self: &Arc<Self>, world: &mut World) -> Address {
        let gate = Arc::clone(self);
        let pass = move |_: &mut ServerCall| {
            gate.came.fetch_add(1, Ordering::Relaxed);
            let open = gate.open.lock().expect("nobody panics with it");
            drop(gate.opened.wait_while(open, |open| !*open).expect("nobody panics with it"));
            Ok(())
        };
        let services = standard_and([(GATED, Procedure::new(pass).on_workers().max_reply(0))]);
        serve(world, ServerConfig { workers: Some(WorkerConfig::default()), ..small_server() }, services)
    }
}

#[test]
fn workers_skip_the_calls_of_closed_connections() {
    let (mut world, gate) = (World::new("skipped"), Arc::new(Gate::default()));
    let address = gate.serve(&mut world);
    let mut victim = world.client(&address, small());
    for connection in 1..=3 {
        let (_cable, mut client) = greedy(&address, GATED);
        assert!(settles(|| {
            client.poll(drop);
            // The worker has one of the first connection's: it skips those that it finds closed.
            stats(&world).worker_queue_depth == connection * CALLS && gate.came() == 1
        }));
    }
    assert!(settles(|| stats(&world).connections == 1 && gate.came() == 1), "a worker runs one of them");
    start(&mut victim, GATED, 0);
    victim.poll_until(|_| stats(&world).worker_queue_depth == 3 * CALLS + 1);
    gate.open();
    assert_eq!(ends(&mut victim, 0), Some(Ok(())));
    assert_eq!(gate.came(), 2, "nobody awaits the others");
}

#[test]
fn the_end_of_a_server_does_not_wait_for_queued_calls() {
    let (mut world, gate) = (World::new("queued"), Arc::new(Gate::default()));
    let address = gate.serve(&mut world);
    let mut client = world.client(&address, small());
    (0..CALLS).for_each(|n| start(&mut client, GATED, n));
    client.poll_until(|_| stats(&world).worker_queue_depth == CALLS && gate.came() == 1);
    let server = world.take_server();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(server));
        let mut lost = 0;
        assert!(settles(|| {
            client.poll(|done| lost += u64::from(done.result.is_err()));
            lost == CALLS
        }));
        gate.open();
    });
    assert_eq!(gate.came(), 1, "the others were cut off");
}
