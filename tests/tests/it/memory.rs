//! Calls that wait for server memory, and version 1 peers beyond their grant.

use rpcrdma_tests::prelude::*;

/// Outstanding calls of a client.
const CALLS: u64 = 24;
/// Bytes of each call's chunk.
const LEN: usize = 50_000;

/// A server with memory for the chunks of two calls.
fn server_config(mode: CreditMode) -> Config {
    scarce_config(2, 2).with(|c| c.wire.credit_mode = mode)
}

fn client_config(mode: CreditMode) -> Config {
    in_mode(mode).with(|c| c.memory.bulk_buffers = vec![(64 << 10, 2 * CALLS as usize)])
}

/// Makes [`CALLS`] calls with a chunk each, all concurrently. Returns their tokens in the order of completion.
fn run_all_concurrently(client: &mut LocalClient, procedure: u32) -> Vec<u64> {
    client.launch_each(0..CALLS, |client, token| match procedure {
        STORE => prepare_store(client, token),
        _ => client.prepare_chunked_call(LOAD, &be(&[token as u32, LEN as u32]), &[], &[LEN]),
    });
    let mut ended = Vec::new();
    client.for_each_completion(CALLS as usize, |done| {
        let reply = done.result.expect("a reply once memory is free");
        assert!(procedure == STORE || has_pattern(done.token as u32, reply.chunk(0).expect("a chunk")));
        ended.push(done.token);
    });
    ended
}

#[test]
fn more_calls_than_buffers_are_all_served_in_order() {
    for_each(CREDIT_MODES, |mode| {
        let (world, mut client) = World::pair("waiting", server_config(mode), client_config(mode));
        for procedure in [STORE, LOAD] {
            let ended = run_all_concurrently(&mut client, procedure);
            assert!(ended.is_sorted(), "{ended:?}");
        }
        let stats = world.stats();
        assert!(stats.memory_waits >= CALLS, "{}", stats.memory_waits);
        assert_eq!((stats.calls_failed, stats.pool_empty), (0, 0));
    });
}

/// Waiting calls occupy Receives that are reserved for them, so any number of calls may wait.
#[test]
fn waiting_calls_of_many_connections_are_all_served() {
    for_each(CREDIT_MODES, |mode| {
        let shard = server_config(mode).with(|c| c.memory.message_buffers = 4);
        let (world, address) = World::standard("all-wait", shard);
        let mut clients = [0; 4].map(|_| world.client(&address, client_config(mode)));
        let mut ended = [0; 4];
        clients.iter_mut().for_each(|client| (0..CALLS).for_each(|token| store(client, token)));
        let all = wait_until(|| {
            for (client, ended) in clients.iter_mut().zip(&mut ended) {
                client.poll(|done| *ended += u64::from(done.result.is_ok()));
            }
            ended == [CALLS; 4]
        });
        assert!(all, "{ended:?} calls succeeded");
        let stats = world.stats();
        assert!(stats.memory_waits > 0 && stats.calls_failed == 0, "{stats:?}");
    });
}

fn prepare_store(client: &mut LocalClient, token: u64) -> ClientCall {
    let seed = token as u32;
    client.prepare_call(STORE, &be(&[seed])).read_chunk(4, client.pattern_buf(seed, LEN))
}

pub(super) fn store(client: &mut LocalClient, token: u64) {
    let call = prepare_store(client, token);
    client.launch(call, token);
}

#[test]
fn version_1_clients_may_have_twice_as_many_calls_as_credits() {
    const CREDITS: u32 = 8;
    let (shard, gate) = (few_credits(CreditMode::V1, CREDITS), Gate::default());
    let (world, address) = World::serving("twice-the-credits", shard.with_workers(1), gate.services(true));
    let _opens = gate.open_on_drop();
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    client.ping();
    for round in 0..3 {
        let xids = 100 * round..100 * round + 2 * CREDITS;
        xids.clone().for_each(|xid| client.call_as(xid, WORKER_ECHO, Chunks::NONE, &be(&[1000])));
        for xid in xids {
            let answer = client.answer();
            assert_eq!((answer.xid(), answer.credit()), (xid, CREDITS));
        }
    }
    assert_eq!(world.stats().peer_faults, 0);
    // The worker runs the first call until the gate opens, so no call is answered.
    (0..2 * CREDITS + 2).for_each(|xid| client.call_as(xid, GATED, Chunks::NONE, b""));
    drop(client.wait_until_over());
    assert!(wait_until(|| world.stats().peer_faults == 1));
}
