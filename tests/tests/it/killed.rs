//! Peers killed with SIGKILL, at any instruction, while others continue.

use rpcrdma::fabric::Status;
use rpcrdma_tests::prelude::*;

pub(crate) fn child(role: &str, address: &Address) {
    match role {
        "client" => busy_client(address),
        "client-of-echo" => super::peers::begin_calls_and_wait(address),
        "server" => {
            let server = Server::start(address, standard_services(), &small_server()).expect("a server");
            println!("ready");
            // A child ends even if no test kills it.
            std::thread::sleep(Duration::from_secs(120));
            drop(server);
        }
        other => panic!("no role {other}"),
    }
}

/// A call that sends and receives `len` bytes in chunks, or has no chunks if there are no buffers for them.
fn prepare_mirror(client: &mut LocalClient, seed: u32, len: usize) -> ClientCall {
    let first = client.first();
    let call = client.prepare_call(MIRROR, &[0; 4]);
    let (Ok(mut data), Ok(room)) = (client.alloc(first, len), client.alloc(first, len)) else { return call };
    pattern(seed, &mut data);
    call.read_chunk(4, data).write_chunk_into(room)
}

/// Keeps 12 calls outstanding, half of them with chunks, until this process is killed.
fn busy_client(address: &Address) {
    let mut client = LocalClient::connect(address, small_client(small_config())).expect("a connection");
    let mut random = Random::new(u64::from(std::process::id()));
    let call = |client: &mut LocalClient, token| {
        if token == 12 {
            println!("ready");
        }
        Some(if random.once_in(2) { prepare_mirror(client, 0, 60_000) } else { client.prepare_call(MIRROR, &[0; 4]) })
    };
    client.keep_busy(12, u64::MAX, call, |done| {
        if done.result.is_err() {
            std::process::exit(1);
        }
    });
}

#[test]
fn clients_killed_at_random_affect_no_other_client() {
    // `tests/README.md` describes longer runs.
    let kills = std::env::var("KILLS").map_or(25, |n| n.parse().expect("a number"));
    // Memory for all outstanding calls of three clients, so that the server never refuses the witness.
    let (world, address) =
        World::standard("killed-clients", small_config().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 120)]));
    let mut witness = world.client(&address, small_config());
    let mut random = Random::new(50);
    let mut seed = 0;
    let mut verify = |witness: &mut LocalClient, rounds: usize| {
        for _ in 0..rounds {
            seed += 1;
            let args = data_of(seed, 100);
            echo(witness, &args).expect("an echo");
            mirror(witness, seed, &[1 + seed as usize * 37 % 9000]).expect("a mirror");
        }
    };
    // Two children run at a time, so that one starts while the other works.
    let mut children = vec![Child::start("client", &address.to_string())];
    for _ in 0..kills {
        children.push(Child::start("client", &address.to_string()));
        let mut child = children.remove(0);
        child.wait_for("ready");
        verify(&mut witness, random.below(30));
        child.kill();
        verify(&mut witness, 3);
    }
    drop(children);
    drop(witness);
    world.assert_server_clean();
    let stats = world.server().stats();
    // The last child may die before it connects.
    assert!(stats[0].connections_made > kills, "{}", stats[0].connections_made);
}

#[test]
fn calls_of_a_killed_server_end_once_with_a_cause() {
    let world = World::new("killed-servers");
    let mut random = Random::new(51);
    for _ in 0..10 {
        let address = world.address();
        let mut server = Child::start("server", &address.to_string());
        server.wait_for("ready");
        let mut client = world.client(&address, small_config());
        let first = client.first();
        let (mut ends, mut under_way) = (Vec::new(), 0);
        // The server is killed after this many turns of the client.
        let turns = random.below(3000);
        let mut server = Some(server);
        let over = wait_until(|| {
            for turn in 0..turns + 1000 {
                if turn == turns
                    && let Some(server) = server.take()
                {
                    server.kill();
                }
                while under_way < 20 && client.is_established(first) {
                    let token = ends.len() as u64;
                    let len = if token.is_multiple_of(2) { 5000 } else { 8 };
                    let call = prepare_mirror(&mut client, token as u32, len);
                    ends.push(0);
                    under_way += 1;
                    client.launch(call, token);
                }
                client.poll(|done| {
                    under_way -= 1;
                    ends[done.token as usize] += 1;
                    assert!(served_or_lost(&done.result), "{:?}", done.result);
                    let chunk =
                        |reply: &rpcrdma::Reply| has_pattern(done.token as u32, reply.chunk(0).unwrap_or_default());
                    assert!(done.result.as_ref().ok().is_none_or(chunk), "the reply has the data of its call");
                });
            }
            server.is_none() && !client.is_established(first) && under_way == 0
        });
        assert!(over, "{under_way} calls have not ended");
        assert!(ends.iter().all(|&ends| ends == 1));
        assert_eq!(shard_leak(&client.stats()), None);
        // A flushed completion does not tell the cause, but some devices report nothing else.
        let cause = client.close_reason(first).map(CloseReason::cause);
        let flushed = matches!(cause, Some(CloseCause::Device { status: Status::Flushed, .. }));
        assert!(cause.is_some() && (!flushed || test_fabric::on_device() && !test_fabric::over_tcp()), "{cause:?}");
    }
}
