//! The duplicate request cache: retransmitted calls of procedures that run once.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, by_credential, by_host};
use rpcrdma_tests::prelude::*;

/// Procedures that return the number of earlier runs, then the arguments: on the shard, and on a worker.
const COUNT: u32 = 50;
const WORKER_COUNT: u32 = 51;
/// Waits at the gate, on a worker. Returns 0, then the arguments.
const WAIT: u32 = 52;
/// Panics, on the shard and on a worker.
const SHARD_PANIC: u32 = 53;
const WORKER_PANIC: u32 = 54;
/// Refuses the argument 1 with GARBAGE_ARGS, uses an undeclared Write chunk for 3, and refuses all others with
/// SYSTEM_ERR.
const REFUSES: u32 = 55;
/// A one-way procedure.
const SILENT: u32 = 56;
/// Runs once for callers with a credential.
const PERSONAL: u32 = 57;
/// Accept status (RFC 5531 §9).
const GARBAGE_ARGS: u32 = 4;
const SYSTEM_ERR: u32 = 5;

/// A server with these procedures, their cache and gate, and the number of runs of all handlers.
struct Fixture {
    world: World,
    address: Address,
    cache: Arc<DuplicateRequestCache>,
    runs: Arc<AtomicU32>,
    gate: Gate,
}

/// A procedure whose handler counts its runs and passes the number of earlier runs to `then`.
fn counting(
    runs: &Arc<AtomicU32>,
    then: impl Fn(&mut ServerCall, u32) -> Result<(), Refusal> + Clone + Send + Sync + 'static,
) -> Procedure {
    let runs = Arc::clone(runs);
    // Relaxed: the test reads the counter while no call runs.
    Procedure::new(move |call| then(call, runs.fetch_add(1, Ordering::Relaxed)))
}

/// Returns the number of earlier runs, then the arguments.
fn reply_with_count(call: &mut ServerCall, before: u32) -> Result<(), Refusal> {
    let results = [&before.to_be_bytes()[..], call.args()].concat();
    call.reply_mut(results.len())?.copy_from_slice(&results);
    Ok(())
}

/// Starts a server on the tested fabric, whose cache has this number of entries.
fn fixture(name: &'static str, entries: usize) -> Fixture {
    let world = World::new(name);
    let address = world.address();
    fixture_at(world, address, entries, small_config())
}

fn fixture_at(mut world: World, address: Address, entries: usize, shard: Config) -> Fixture {
    let (cache, runs) = (request_cache(entries), Arc::new(AtomicU32::new(0)));
    let gate = Gate::default();
    let waits_at = gate.clone();
    let once = |procedure: Procedure| run_once(procedure, &cache);
    let waits = counting(&runs, move |call, _| {
        waits_at.wait();
        reply_with_count(call, 0)
    });
    let panics = || counting(&runs, |_, _| panic!("as the test wants"));
    let refuses = counting(&runs, |call, _| match call.args() {
        [0, 0, 0, 1] => Err(Refusal::GarbageArguments),
        [0, 0, 0, 3] => Ok(call.result_writer(0).map(|_| ())?),
        _ => Err(Refusal::SystemError),
    });
    let services = standard_and([
        (COUNT, once(counting(&runs, reply_with_count).max_reply(20_000))),
        (WORKER_COUNT, once(counting(&runs, reply_with_count).max_reply(20_000).on_workers())),
        (WAIT, once(waits.on_workers())),
        (SHARD_PANIC, once(panics())),
        (WORKER_PANIC, once(panics().on_workers())),
        (REFUSES, once(refuses)),
        (SILENT, once(counting(&runs, |_, _| Ok(())).one_way())),
        (PERSONAL, counting(&runs, reply_with_count).cached(Arc::clone(&cache), by_credential)),
    ]);
    let config = ServerConfig { shards: 2, ..shard.with_workers(2) };
    world.serve_at(&address, config, services);
    Fixture { world, address, cache, runs, gate }
}

impl Fixture {
    fn runs(&self) -> u32 {
        self.runs.load(Ordering::Relaxed)
    }
}

fn send(peer: &mut RawPeer, xid: u32, procedure: u32, args: &[u8]) {
    peer.call_as(xid, procedure, Chunks::NONE, args);
}

/// The next RPC reply, reassembled from its parts.
fn next_reply(peer: &mut RawPeer) -> Vec<u8> {
    peer.whole_answer().0
}

fn call(peer: &mut RawPeer, xid: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
    send(peer, xid, procedure, args);
    next_reply(peer)
}

/// The accept status of a call's reply.
fn status(peer: &mut RawPeer, xid: u32, procedure: u32, args: &[u8]) -> u32 {
    let reply = call(peer, xid, procedure, args);
    assert_eq!((&reply[..20], reply.len()), (&be(&[xid, 1, 0, 0, 0])[..], 24));
    u32::from_be_bytes(reply[20..].try_into().expect("a word"))
}

/// The reply to a call that ran after `n` others.
fn counted_reply(xid: u32, n: u32, args: &[u8]) -> Vec<u8> {
    reply_bytes(xid, &[&n.to_be_bytes()[..], args].concat())
}

#[test]
fn a_retransmitted_call_runs_once_and_is_answered_each_time() {
    let fixture = fixture("twice", 64);
    for_each([Version::V1, Version::V2], |version| {
        // The two connections may belong to two shards.
        let mut peers = [0; 2].map(|_| RawPeer::connect_as(&fixture.address, version));
        for (n, procedure) in [COUNT, WORKER_COUNT].into_iter().enumerate() {
            // In version 2 the second reply has more than 3000 bytes.
            let args = if version == Version::V2 { vec![5; 4 + 3000 * n] } else { b"same".to_vec() };
            let before = fixture.runs();
            let xid = 100 + n as u32 + 10 * version.code();
            for round in 0..3 {
                for peer in &mut peers {
                    assert_eq!(call(peer, xid, procedure, &args), counted_reply(xid, before, &args), "round {round}");
                }
            }
            assert_eq!(fixture.runs(), before + 1);
            // Other arguments or another XID make another call.
            assert_eq!(call(&mut peers[0], xid, procedure, b"more"), counted_reply(xid, before + 1, b"more"));
            let other = xid + 1000;
            assert_eq!(call(&mut peers[1], other, procedure, &args), counted_reply(other, before + 2, &args));
        }
    });
    let stats = fixture.cache.stats();
    assert_eq!((stats.misses, stats.hits, stats.lost), (12, 20, 0));
}

/// Users of one client never get each other's replies, even to calls with the same XID and arguments.
#[test]
fn a_call_with_another_credential_is_another_call() {
    let fixture = fixture("users", 64);
    let mut peer = RawPeer::connect(&fixture.address);
    let user = |body| OpaqueAuth { flavor: 1, body };
    for (xid, procedure) in [(1, COUNT), (2, WORKER_COUNT)] {
        let before = fixture.runs();
        for round in 0..2 {
            for (n, user) in (0..).zip([OpaqueAuth::NONE, user(&[0; 40]), user(&[1; 40])]) {
                let call = call_bytes_as(user, xid, PROGRAM, VERSION, procedure, b"same");
                peer.send_msg(xid, Chunks::NONE, &call);
                assert_eq!(next_reply(&mut peer), counted_reply(xid, before + n, b"same"), "round {round}");
            }
        }
    }
    let stats = fixture.cache.stats();
    assert_eq!((stats.misses, stats.hits), (6, 6));
}

#[test]
fn a_call_retransmitted_with_more_reply_room_runs_once() {
    // This revision has no continued messages: a long reply needs a Reply chunk.
    let shard = small_config().with(|c| c.debug.revision = Revision::Cel09);
    let world = World::new("room");
    let address = world.address();
    let fixture = fixture_at(world, address, 64, shard.clone());
    let mut client = fixture.world.client(&fixture.address, shard);
    let expected = [&[0; 4][..], &[9; 10_000]].concat();
    assert_eq!(client.run(COUNT, &[9; 10_000]), Ok(expected), "the second attempt succeeds");
    assert_eq!(client.stats().calls_retransmitted, 1);
    assert_eq!((fixture.runs(), fixture.cache.stats().hits), (1, 1));
}

#[test]
fn a_call_retransmitted_while_it_runs_is_answered_once_per_connection() {
    for_each([false, true], |first_is_lost| {
        let fixture = fixture("in-progress", 64);
        let mut peers = vec![RawPeer::connect(&fixture.address), RawPeer::connect(&fixture.address)];
        send(&mut peers[0], 1, WAIT, b"slow");
        assert!(wait_until(|| fixture.gate.arrivals() == 1), "the call runs");
        for peer in &mut peers {
            send(peer, 1, WAIT, b"slow");
            // Later calls are answered while the slow call runs.
            assert_eq!(call(peer, 2, COUNT, b"quick"), counted_reply(2, 1, b"quick"));
        }
        assert_eq!(fixture.cache.stats().early, 2);
        if first_is_lost {
            peers.remove(0).vanish();
        }
        fixture.gate.open();
        for peer in &mut peers {
            assert_eq!(next_reply(peer), counted_reply(1, 0, b"slow"));
            assert_eq!(call(peer, 2, COUNT, b"quick"), counted_reply(2, 1, b"quick"), "the slow call is answered once");
        }
        assert_eq!(fixture.runs(), 2);
    });
}

/// Each host has a share of the cache, which depends neither on the number of its connections nor on the clients that
/// its calls name.
#[test]
fn a_host_with_many_calls_evicts_no_reply_to_another_host() {
    let fixture = fixture_at(World::new("hosts"), test_fabric::tcp_address(), 8, small_config());
    let mut victim = RawPeer::connect(&fixture.address);
    let first = call(&mut victim, 1, COUNT, b"");
    assert_eq!(first, counted_reply(1, 0, b""));
    for connection in 0..2 {
        let proxy = TcpProxy::new(&fixture.address, Ipv4Addr::new(127, 0, 0, 2));
        let mut greedy = RawPeer::connect(proxy.address());
        for n in 0..20 {
            let xid = 100 + 20 * connection + n;
            assert_eq!(call(&mut greedy, xid, COUNT, b""), counted_reply(xid, xid - 99, b""));
        }
    }
    assert_eq!(fixture.cache.stats().evictions, 33);
    assert_eq!(call(&mut RawPeer::connect(&fixture.address), 1, COUNT, b""), first, "on another connection");
    assert_eq!(fixture.runs(), 41);
}

#[test]
fn a_cache_full_of_running_calls_refuses_new_ones() {
    let fixture = fixture("full", 1);
    let mut peer = RawPeer::connect(&fixture.address);
    send(&mut peer, 1, WAIT, b"");
    assert!(wait_until(|| fixture.gate.arrivals() == 1), "the call runs");
    send(&mut peer, 2, COUNT, b"");
    assert_eq!(peer.receive().expect("an answer").error(), (2, ErrorBody::System));
    assert_eq!(fixture.runs(), 1);
    fixture.gate.open();
    assert_eq!(next_reply(&mut peer), counted_reply(1, 0, b""));
    assert_eq!(call(&mut peer, 2, COUNT, b""), counted_reply(2, 1, b""));
}

#[test]
fn a_call_whose_handler_panicked_runs_once() {
    let fixture = fixture("panic", 64);
    let mut peer = RawPeer::connect(&fixture.address);
    for (xid, procedure) in [(1, SHARD_PANIC), (2, WORKER_PANIC)] {
        assert_eq!([0; 3].map(|_| status(&mut peer, xid, procedure, b"")), [SYSTEM_ERR; 3]);
        assert_eq!(fixture.runs(), xid);
    }
    assert_eq!(fixture.cache.stats().lost, 4, "two retransmissions of each call");
}

#[test]
fn a_refusal_is_cached_only_if_the_call_may_have_had_effects() {
    let fixture = fixture("refusals", 64);
    let mut peer = RawPeer::connect(&fixture.address);
    // A handler that refuses garbage arguments has had no effect, so the call may run again.
    for (args, stat, runs) in [(1, GARBAGE_ARGS, [1, 2, 3]), (2, SYSTEM_ERR, [4; 3]), (3, SYSTEM_ERR, [5; 3])] {
        for runs in runs {
            assert_eq!(status(&mut peer, args, REFUSES, &be(&[args])), stat, "{args}");
            assert_eq!(fixture.runs(), runs, "{args}");
        }
    }
}

#[test]
fn one_way_calls_are_cached_and_calls_without_an_identity_are_not() {
    let fixture = fixture("silent", 64);
    let mut peer = RawPeer::connect(&fixture.address);
    (0..3).for_each(|_| send(&mut peer, 1, SILENT, b""));
    assert_eq!(call(&mut peer, 2, COUNT, b""), counted_reply(2, 1, b""), "one-way calls get no answer");
    // A caller with AUTH_NONE has no identity.
    let before = fixture.cache.stats().misses;
    (2..5).for_each(|n| assert_eq!(call(&mut peer, 1, PERSONAL, b""), counted_reply(1, n, b"")));
    assert_eq!(fixture.cache.stats().misses, before);
}

#[test]
fn a_cached_procedure_may_not_declare_write_chunks() {
    let chunks: Procedure = Procedure::new(|_| Ok(())).cached(request_cache(8), by_host).write_chunks(1, 4096);
    let declare = || _ = Services::new().add(PROGRAM, VERSION, 1, chunks);
    let message = catch_unwind(AssertUnwindSafe(declare)).expect_err("the declaration panics");
    assert_contains(message.downcast_ref::<String>().expect("a message"), &["Write chunks are not kept"]);
}

/// A cache may identify clients by host, which stays the same when the port changes.
#[test]
fn handlers_get_the_callers_host_on_fabrics_with_addresses() {
    let host = Procedure::new(|call| {
        let host = call.info().peer_host().map_or_else(String::new, |host| host.to_string());
        call.reply_mut(host.len())?.copy_from_slice(host.as_bytes());
        Ok(())
    });
    let services = standard_and([(70, host.clone()), (71, host.on_workers())]);
    let (world, address) = World::serving("host", small_server().with_workers(1), services);
    let mut clients = [world.client(&address, small_config()), world.client(&address, small_config())];
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
fn a_call_with_other_data_in_its_read_chunk_is_another_call() {
    for_each(CREDIT_MODES, |mode| {
        let store = counting(&Arc::default(), reply_with_count).read_chunks(1, 4096);
        let once = run_once(store, &request_cache(64));
        let services = standard_and([(70, once.clone()), (71, once.checksummed(0))]);
        let (_world, mut peer) = World::raw_with("data", mode, services);
        let mut data = [7; 1000];
        let mut write = |procedure, data: &[u8]| {
            let (target, _exposed) = peer.expose(data, Access::REMOTE_READ);
            let lists = Lists::new().read(ARGS_AT + 4, [target]);
            let answer = peer.call_and_receive(procedure, &lists, &be(&[data.len() as u32]));
            u32::from_be_bytes(answer.payload()[24..28].try_into().expect("a word"))
        };
        assert_eq!([write(70, &data), write(70, &data)], [0, 0], "the call is retransmitted");
        data[200] = 8;
        assert_eq!([write(70, &data), write(70, &data)], [1, 1], "other data");
        assert_eq!(write(70, &data[..999]), 2, "shorter data");
        // With a checksum of 0 bytes, the cache compares only lengths.
        assert_eq!([write(71, &data), write(71, &[9; 1000]), write(71, &data[..999])], [3, 3, 4]);
    });
}
