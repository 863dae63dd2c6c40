//! Retransmitted calls of procedures that run once.

use std::net::Ipv4Addr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use rpcrdma::fabric::testing::loopback_address;
use rpcrdma::service::duplicate_requests::{
    Client as Whose, DuplicateRequestCache, DuplicateRequestCacheConfig, by_credential, by_host,
};
use rpcrdma_tests::prelude::*;

/// Results: the number of earlier runs, then the arguments. On the shard, and on a worker.
const COUNT: u32 = 50;
const WORKER_COUNT: u32 = 51;
/// Reports its start and waits for a go-ahead; results as [`COUNT`]. On a worker.
const WAIT: u32 = 52;
/// Panics, on the shard and on a worker.
const SHARD_PANIC: u32 = 53;
const WORKER_PANIC: u32 = 54;
/// Refuses 1 with GARBAGE_ARGS, uses an undeclared Write chunk for 3, and refuses all else with SYSTEM_ERR.
const CHOOSY: u32 = 55;
/// A call without a reply.
const SILENT: u32 = 56;
/// Runs once for callers with a credential.
const PERSONAL: u32 = 57;

struct Scene {
    world: World,
    address: Address,
    cache: Arc<DuplicateRequestCache>,
    ran: Arc<AtomicU32>,
    started: Receiver<()>,
    go_on: Sender<()>,
}

fn scene(name: &'static str, entries: usize) -> Scene {
    scene_of(name, entries, small())
}

fn scene_of(name: &'static str, entries: usize, shard: Config) -> Scene {
    let world = World::new(name);
    let address = world.address();
    scene_at(world, address, entries, shard)
}

/// A handler that counts its runs before it goes on with the number of earlier ones.
fn counting(
    ran: &Arc<AtomicU32>,
    then: impl Fn(&mut ServerCall, u32) -> Result<(), Refusal> + Clone + Send + Sync + 'static,
) -> Procedure {
    let ran = Arc::clone(ran);
    // Relaxed: the test reads it while no call runs.
    Procedure::new(move |call| then(call, ran.fetch_add(1, Ordering::Relaxed)))
}

fn scene_at(mut world: World, address: Address, entries: usize, shard: Config) -> Scene {
    let config = DuplicateRequestCacheConfig { entries, bytes: 1 << 20, ..Default::default() };
    let cache = Arc::new(DuplicateRequestCache::new(config));
    let ran = Arc::new(AtomicU32::new(0));
    let ((start, started), (go_on, may_go_on)) = (channel(), channel::<()>());
    let gates = Arc::new((Mutex::new(start), Mutex::new(may_go_on)));
    let once = |procedure: Procedure| procedure.cached(Arc::clone(&cache), |_: &ServerCall| Some(Whose::number(7)));
    let counts = |call: &mut ServerCall, before: u32| -> Result<(), Refusal> {
        let results = [&before.to_be_bytes()[..], call.args()].concat();
        call.reply_mut(results.len())?.copy_from_slice(&results);
        Ok(())
    };
    let waits = {
        let ran = Arc::clone(&ran);
        Procedure::new(move |call: &mut ServerCall| {
            gates.0.lock().expect("whole").send(()).expect("the test waits");
            gates.1.lock().expect("whole").recv_timeout(Duration::from_secs(20)).expect("the test says so");
            counts(call, ran.fetch_add(1, Ordering::Relaxed))
        })
    };
    let panics = || counting(&ran, |_, _| panic!("as the test wants"));
    let choosy = counting(&ran, |call, _| match call.args() {
        [0, 0, 0, 1] => Err(Refusal::GarbageArguments),
        [0, 0, 0, 3] => Ok(call.result_writer(0).map(|_| ())?),
        _ => Err(Refusal::SystemError),
    });
    let services = standard_and([
        (COUNT, once(counting(&ran, counts).max_reply(20_000))),
        (WORKER_COUNT, once(counting(&ran, counts).on_workers())),
        (WAIT, once(waits.on_workers())),
        (SHARD_PANIC, once(panics())),
        (WORKER_PANIC, once(panics().on_workers())),
        (CHOOSY, once(choosy)),
        (SILENT, once(counting(&ran, |_, _| Ok(())).one_way())),
        (PERSONAL, counting(&ran, counts).cached(Arc::clone(&cache), by_credential)),
    ]);
    let workers = Some(WorkerConfig { count: 2, ..Default::default() });
    world.serve_at(&address, ServerConfig { shard, shards: 2, workers, ..small_server() }, services);
    Scene { world, address, cache, ran, started, go_on }
}

impl Scene {
    fn ran(&self) -> u32 {
        self.ran.load(Ordering::Relaxed)
    }
}

fn send(peer: &mut RawPeer, xid: u32, procedure: u32, args: &[u8]) {
    peer.call_as(xid, procedure, Chunks::NONE, args);
}

/// The next RPC reply, reassembled from its parts.
fn next_reply(peer: &mut RawPeer) -> Vec<u8> {
    let mut whole = Vec::new();
    loop {
        let view = peer.receive().expect("a message");
        match view.body() {
            ViewBody::Msg(()) => whole.extend_from_slice(view.payload()),
            ViewBody::Error(error) => panic!("{error:?}"),
            _ => continue,
        }
        if !view.more() {
            return whole;
        }
    }
}

fn call(peer: &mut RawPeer, xid: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
    send(peer, xid, procedure, args);
    next_reply(peer)
}

/// The reply of a call that ran after `n` others.
fn counted(xid: u32, n: u32, args: &[u8]) -> Vec<u8> {
    reply_bytes(xid, &[&n.to_be_bytes()[..], args].concat())
}

fn refused(xid: u32, stat: AcceptStat) -> Vec<u8> {
    let header = ReplyHeader { xid, body: ReplyBody::accepted(stat) };
    let mut bytes = vec![0; header.encoded_len()];
    header.emit(&mut bytes).expect("as long as it says");
    bytes
}

#[test]
fn a_call_that_comes_twice_runs_once_and_is_answered_twice() {
    let scene = scene("twice", 64);
    for version in [Version::V1, Version::V2] {
        // Two connections, possibly of two shards.
        let mut peers = [0; 2].map(|_| RawPeer::connect_as(&scene.address, version));
        for (n, procedure) in [COUNT, WORKER_COUNT].into_iter().enumerate() {
            let before = scene.ran();
            let xid = 100 + n as u32 + 10 * version.code();
            for round in 0..3 {
                for peer in &mut peers {
                    let reply = call(peer, xid, procedure, b"same");
                    assert_eq!(reply, counted(xid, before, b"same"), "{version}, round {round}");
                }
            }
            assert_eq!(scene.ran(), before + 1);
            // Other arguments or another XID make another call.
            let reply = call(&mut peers[0], xid, procedure, b"more");
            assert_eq!(reply, counted(xid, before + 1, b"more"));
            let reply = call(&mut peers[1], xid + 1000, procedure, b"same");
            assert_eq!(reply, counted(xid + 1000, before + 2, b"same"));
        }
    }
    let stats = scene.cache.stats();
    assert_eq!((stats.misses, stats.hits, stats.lost), (12, 20, 0));
}

/// Users of one client get no replies of each other, even to calls with the same XID and arguments.
#[test]
fn a_call_with_another_credential_is_another_call() {
    let scene = scene("users", 64);
    let mut peer = RawPeer::connect(&scene.address);
    let bodies = [[0; 40], [1; 40]];
    let users =
        [OpaqueAuth::NONE, OpaqueAuth { flavor: 1, body: &bodies[0] }, OpaqueAuth { flavor: 1, body: &bodies[1] }];
    for (xid, procedure) in [(1, COUNT), (2, WORKER_COUNT)] {
        let before = scene.ran();
        for round in 0..2 {
            for (n, user) in users.into_iter().enumerate() {
                let call = call_bytes_as(user, xid, PROGRAM, VERSION, procedure, b"same");
                peer.msg(xid, Chunks::NONE, &call);
                assert_eq!(next_reply(&mut peer), counted(xid, before + n as u32, b"same"), "round {round}");
            }
        }
    }
    let stats = scene.cache.stats();
    assert_eq!((stats.misses, stats.hits), (6, 6));
}

#[test]
fn cached_long_replies_are_resent_in_any_form() {
    let scene = scene("long", 64);
    let mut peer = RawPeer::connect(&scene.address);
    let args = vec![5; 3000];
    let first = call(&mut peer, 1, COUNT, &args);
    assert_eq!(first, counted(1, 0, &args));
    assert_eq!(call(&mut peer, 1, COUNT, &args), first);
    assert_eq!(scene.ran(), 1);
}

#[test]
fn a_call_retransmitted_with_more_reply_room_runs_once() {
    // This revision has no continued messages: a long reply needs a Reply chunk.
    let shard = small().with(|c| c.debug.revision = Revision::Cel09);
    let scene = scene_of("room", 64, shard.clone());
    let mut client = scene.world.client(&scene.address, shard);
    let call = client.prepared(COUNT, &[9; 10_000]);
    let reply = client.call(call).expect("a reply, at the second attempt");
    assert_eq!((reply.results().len(), reply.results().first_chunk()), (10_004, Some(&[0; 4])));
    assert_eq!(client.stats().calls_retransmitted, 1);
    assert_eq!((scene.ran(), scene.cache.stats().hits), (1, 1));
}

#[test]
fn a_call_retransmitted_while_it_runs_is_answered_once_per_connection() {
    for first_is_lost in [false, true] {
        let scene = scene("in-progress", 64);
        let mut peers = [0; 2].map(|_| RawPeer::connect(&scene.address));
        send(&mut peers[0], 1, WAIT, b"slow");
        scene.started.recv().expect("it runs");
        for peer in &mut peers {
            send(peer, 1, WAIT, b"slow");
            // Later calls are answered meanwhile.
            assert_eq!(call(peer, 2, COUNT, b"quick"), counted(2, 0, b"quick"));
        }
        assert_eq!(scene.cache.stats().early, 2);
        let mut peers = Vec::from(peers);
        if first_is_lost {
            peers.remove(0).vanish();
        }
        scene.go_on.send(()).expect("it waits");
        for peer in &mut peers {
            assert_eq!(next_reply(peer), counted(1, 1, b"slow"));
            assert_eq!(call(peer, 2, COUNT, b"quick"), counted(2, 0, b"quick"), "and no second time");
        }
        assert_eq!(scene.ran(), 2);
    }
}

#[test]
fn evicted_calls_run_again() {
    let scene = scene("evicted", 8);
    let mut peer = RawPeer::connect(&scene.address);
    for xid in 0..9 {
        assert_eq!(call(&mut peer, xid, COUNT, b""), counted(xid, xid, b""));
    }
    assert_eq!(call(&mut peer, 8, COUNT, b""), counted(8, 8, b""), "the last one is remembered");
    assert_eq!(call(&mut peer, 0, COUNT, b""), counted(0, 9, b""), "the first one is not");
    assert!(scene.cache.stats().evictions >= 2);
}

/// Hosts have shares of the cache, whatever their connections, and whatever clients their calls name.
#[test]
fn a_host_with_many_calls_evicts_no_reply_to_another_host() {
    let address: Address = format!("iwarp:{}", loopback_address().0).parse().expect("an address");
    let scene = scene_at(World::new("hosts"), address, 8, small());
    let mut victim = RawPeer::connect(&scene.address);
    let first = call(&mut victim, 1, COUNT, b"");
    assert_eq!(first, counted(1, 0, b""));
    for connection in 0..2 {
        let cable = Cable::new(&scene.address, Ipv4Addr::new(127, 0, 0, 2));
        let mut greedy = RawPeer::connect(cable.address());
        for n in 0..20 {
            let xid = 100 + 20 * connection + n;
            assert_eq!(call(&mut greedy, xid, COUNT, b""), counted(xid, xid - 99, b""));
        }
    }
    assert_eq!(scene.cache.stats().evictions, 33);
    assert_eq!(call(&mut RawPeer::connect(&scene.address), 1, COUNT, b""), first, "on another connection");
    assert_eq!(scene.ran(), 41);
}

#[test]
fn a_cache_full_of_running_calls_takes_no_more() {
    let scene = scene("full", 1);
    let mut peer = RawPeer::connect(&scene.address);
    send(&mut peer, 1, WAIT, b"");
    scene.started.recv().expect("it runs");
    send(&mut peer, 2, COUNT, b"");
    let refusal = peer.receive().expect("an answer");
    let refusal = refusal.view();
    assert!(matches!(refusal.body(), ViewBody::Error(ErrorBody::System)) && refusal.xid() == 2, "{refusal}");
    assert_eq!(scene.ran(), 0);
    scene.go_on.send(()).expect("it waits");
    assert_eq!(next_reply(&mut peer), counted(1, 0, b""));
    assert_eq!(call(&mut peer, 2, COUNT, b""), counted(2, 1, b""));
}

#[test]
fn a_call_whose_handler_panicked_runs_once() {
    let scene = scene("panic", 64);
    let mut peer = RawPeer::connect(&scene.address);
    for round in 0..3 {
        assert_eq!(call(&mut peer, 1, SHARD_PANIC, b""), refused(1, AcceptStat::SystemErr), "round {round}");
    }
    assert_eq!(scene.ran(), 1);
    for round in 0..3 {
        assert_eq!(call(&mut peer, 2, WORKER_PANIC, b""), refused(2, AcceptStat::SystemErr), "round {round}");
    }
    assert_eq!(scene.ran(), 2);
    assert_eq!(scene.cache.stats().lost, 4, "two of each were asked for again");
}

#[test]
fn a_refusal_is_remembered_only_if_something_may_have_been_done() {
    let scene = scene("refusals", 64);
    let mut peer = RawPeer::connect(&scene.address);
    for round in 1..3 {
        assert_eq!(call(&mut peer, 1, CHOOSY, &[0, 0, 0, 1]), refused(1, AcceptStat::GarbageArgs));
        assert_eq!(scene.ran(), round, "it has done nothing, and may try again");
    }
    for (args, runs) in [(2, 3), (3, 4)] {
        for _ in 0..3 {
            assert_eq!(call(&mut peer, args, CHOOSY, &args.to_be_bytes()), refused(args, AcceptStat::SystemErr));
            assert_eq!(scene.ran(), runs, "{args}");
        }
    }
}

#[test]
fn calls_without_a_reply_are_remembered_too() {
    let scene = scene("silent", 64);
    let mut peer = RawPeer::connect(&scene.address);
    for _ in 0..3 {
        send(&mut peer, 1, SILENT, b"");
    }
    assert_eq!(call(&mut peer, 2, COUNT, b""), counted(2, 1, b""), "nothing else is answered");
}

#[test]
fn calls_of_nobody_in_particular_run_each_time() {
    let scene = scene("nobody", 64);
    let mut peer = RawPeer::connect(&scene.address);
    for n in 0..3 {
        assert_eq!(call(&mut peer, 1, PERSONAL, b""), counted(1, n, b""), "AUTH_NONE is nobody");
    }
    let stats = scene.cache.stats();
    assert_eq!((stats.misses, stats.entries), (0, 0));
}

#[test]
fn results_in_write_chunks_and_running_once_exclude_each_other() {
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let chunks: Procedure = Procedure::new(|_| Ok(())).cached(cache, by_host).write_chunks(1, 4096);
    let declare = || _ = Services::new().add(PROGRAM, VERSION, 1, chunks);
    let declared = catch_unwind(AssertUnwindSafe(declare));
    let message = declared.expect_err("it is refused");
    let message = message.downcast_ref::<String>().expect("a message");
    assert!(message.contains("Write chunks are not kept"), "{message}");
}

/// A cache may identify clients by host, which stays the same when the port changes.
#[test]
fn a_callers_host_is_known_where_there_are_addresses() {
    let host = Procedure::new(|call| {
        let host = call.info().peer_host().map_or_else(String::new, |host| host.to_string());
        call.reply_mut(host.len())?.copy_from_slice(host.as_bytes());
        Ok(())
    });
    let services = standard_and([(70, host.clone()), (71, host.on_workers())]);
    let (world, address) = World::serving("host", small_server().with_workers(1), services);
    let mut clients = [world.client(&address, small()), world.client(&address, small())];
    let hosts = clients
        .each_mut()
        .map(|client| [70, 71].map(|procedure| String::from_utf8(client.run(procedure, b"").unwrap()).unwrap()));
    assert_eq!(hosts[0], hosts[1], "two connections of one host");
    assert_eq!(hosts[0][0], hosts[0][1]);
    match address.scheme() {
        "soft" => assert_eq!(hosts[0][0], ""),
        _ => assert!(hosts[0][0].parse::<std::net::IpAddr>().is_ok(), "{hosts:?}"),
    }
}

/// A WRITE with data in a Read chunk is another call if its data differs, even with the XID and lengths of an earlier
/// one.
#[test]
fn other_data_in_a_read_chunk_makes_another_call() {
    for_each(SCHEMES, |scheme| {
        let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
        let ran = AtomicU32::new(0);
        let counts = move |call: &mut ServerCall| {
            let before = ran.fetch_add(1, Ordering::Relaxed);
            call.reply_mut(4)?.copy_from_slice(&before.to_be_bytes());
            Ok(())
        };
        let store = Procedure::new(counts).read_chunks(1, 4096);
        let once = store.cached(cache, |_: &ServerCall| Some(Whose::number(7)));
        let services = standard_and([(70, once.clone()), (71, once.checksummed(0))]);
        let (_world, mut peer) = World::raw_with("data", scheme, services);
        let mut data = [7; 1000];
        let mut write = |procedure, data: &[u8]| {
            let (target, _exposed) = peer.expose(data, Access::REMOTE_READ);
            let view = peer.ask(procedure, &Lists::new().read(ARGS_AT + 4, [target]), &be(&[data.len() as u32]));
            let results = view.payload().last_chunk().expect("a word");
            u32::from_be_bytes(*results)
        };
        assert_eq!([write(70, &data), write(70, &data)], [0, 0], "it has come again");
        data[200] = 8;
        assert_eq!([write(70, &data), write(70, &data)], [1, 1], "other data");
        assert_eq!(write(70, &data[..999]), 2, "less of it");
        // A procedure may compare lengths only.
        assert_eq!([write(71, &data), write(71, &[9; 1000]), write(71, &data[..999])], [3, 3, 4]);
    });
}
