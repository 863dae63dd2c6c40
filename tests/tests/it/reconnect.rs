//! Reconnection and retransmitted calls (RFC 5531 §4; RFC 8167 §5.4).

use rpcrdma_tests::prelude::*;

use super::returned::{KEEP, keeping};

fn persistent(scheme: CreditMode) -> ClientConfig {
    small_client(in_mode(scheme)).with(|c| {
        c.connect.reconnect_attempts = 1000;
        c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(10));
    })
}

/// Polls until `count` calls have ended.
#[test]
fn a_call_in_parts_is_kept_without_a_copy() {
    const SIZE: usize = 16 << 10;
    let (world, address) = World::serving("kept", small(), again_services());
    let config = small().with(|c| {
        c.memory.long_buffers = vec![(SIZE, 4)];
        c.memory.bulk_buffers = vec![(1 << 20, 5)];
    });
    let mut client = world.client(&address, small_client(config).with(|c| c.connect.retransmit = true));
    let call = client.prepared(ECHO, &[7; 8000]).expect_reply(8000);
    client.launch(call, 0);
    client.flush();
    let classes = client.stats().pool.classes;
    let class = classes.iter().find(|class| class.size == SIZE).expect("the class");
    assert_eq!(class.outstanding, 1, "the message, and no copy of it");
    assert!(client.ends(1) == [(0, Ok(vec![7; 8000]))]);
}

#[test]
fn calls_go_to_the_next_server_under_their_xids() {
    for scheme in SCHEMES {
        let (mut world, address) = World::standard("again", small_server());
        let mut client = world.client(&address, persistent(scheme).with(|c| c.connect.retransmit = true));
        for round in 0..3u64 {
            echo(&mut client, b"before").unwrap();
            drop(world.take_server());
            // Some calls start before the client detects the loss, some without a connection. They are short, long, and
            // with chunks.
            for token in 0..20 {
                let len = [4, 400, 6000][token as usize % 3];
                let call = client.prepared(ECHO, &vec![token as u8; len]).expect_reply(len);
                client.launch(call, token);
                client.poll(|done| panic!("{done:?} without a server"));
            }
            world.serve_at(&address, small_server(), again_services());
            let mut ended = client.ends(20);
            ended.sort_by_key(|&(token, _)| token);
            for (n, (token, result)) in ended.into_iter().enumerate() {
                let len = [4, 400, 6000][n % 3];
                assert_eq!((token, result), (n as u64, Ok(vec![n as u8; len])), "{scheme:?}, round {round}");
            }
            store(&mut client, 1, &[50_000, 3]).unwrap();
            load(&mut client, 1, &[(50_000, 50_000), (10, 10)]).unwrap();
        }
        assert!(client.stats().calls_retransmitted >= 60, "{scheme:?}");
    }
}

fn again_services() -> Services {
    with_longer_echo(standard_services())
}

fn with_longer_echo(mut services: Services) -> Services {
    let longer = Procedure::new(|call| {
        let args = call.args().to_vec();
        call.reply_mut(args.len())?.copy_from_slice(&args);
        Ok(())
    });
    services.add(PROGRAM, VERSION, ECHO, longer.max_reply(8000));
    services
}

/// A call that is under way keeps the server from closing the connection. Others are refused meanwhile.
#[test]
fn calls_refused_by_a_draining_server_go_to_the_next_one() {
    for scheme in SCHEMES_2 {
        let (services, kept) = keeping();
        let (mut world, address) = World::serving("drain-again", small_server(), with_longer_echo(services));
        let mut client = world.client(&address, persistent(scheme).with(|c| c.connect.retransmit = true));
        let first = client.first();
        client.begin(KEEP, b"", 0);
        let (mut started, mut ended) = (1, 0);
        let mut check = |token: u64, result: Result<Vec<u8>, CallError>| {
            let len = if token == 0 { 0 } else { lens(token) };
            assert_eq!(result, Ok(vec![token as u8; len]), "{scheme:?}, call {token}");
            ended += 1;
            ended
        };
        let mut poll = |client: &mut LocalClient| {
            let mut count = None;
            client.poll(|done| {
                let result = done.result.map(|reply| reply.results().to_vec()).map_err(CallError::from);
                count = Some(check(done.token, result));
            });
            count
        };
        assert!(settles(|| poll(&mut client).is_none() && kept.lock().expect("no panic").len() == 1));
        let server = world.take_server();
        let draining = std::thread::spawn(move || server.drain(Duration::from_secs(60)));
        // Refused calls are sent again on this connection, to be refused again.
        assert!(settles(|| {
            if started < 20 {
                let call = client.prepared(ECHO, &vec![started as u8; lens(started)]);
                client.start(first, call.expect_reply(lens(started)), started);
                started += 1;
            }
            poll(&mut client);
            started == 20 && client.stats().calls_retransmitted > 40
        }));
        kept.lock().expect("no panic").drain(..).for_each(|call| call.answer(Ok(())));
        assert!(settles(|| {
            poll(&mut client);
            draining.is_finished()
        }));
        draining.join().expect("no panic").expect("it has drained");
        world.serve_at(&address, small_server(), again_services());
        assert!(settles(|| poll(&mut client) == Some(started)), "{scheme:?}");
    }
}

/// Length of the arguments of a call: short, long, or in chunks.
fn lens(token: u64) -> usize {
    [4, 400, 6000][token as usize % 3]
}

#[test]
fn without_retransmission_an_error_states_if_the_call_may_have_run() {
    for scheme in SCHEMES {
        let (services, kept) = keeping();
        let (mut world, address) = World::serving("lost", small_server(), services);
        let mut client = world.client(&address, persistent(scheme));
        client.begin(KEEP, b"", 7);
        client.quiet_until(|_| kept.lock().expect("no panic").len() == 1);
        drop(world.take_server());
        kept.lock().expect("no panic").clear();
        assert_eq!(client.ends(1), [(7, Err(CallError::ConnectionLost { sent: true }))], "{scheme:?}");
        // The client reconnects by itself, and sends a call that was started meanwhile.
        client.begin(ECHO, b"four", 8);
        world.serve_at(&address, small_server(), standard_services());
        assert_eq!(client.ends(1), [(8, Ok(b"four".to_vec()))], "{scheme:?}");
    }
}

#[test]
fn attempts_end_and_deadlines_hold_while_there_is_no_connection() {
    let (mut world, address) = World::standard("in-vain", small_server());
    let config =
        persistent(CreditMode::V2Windowed).with(|c| (c.connect.reconnect_attempts, c.connect.retransmit) = (40, true));
    let mut client = LocalClient::connect(&address, config).unwrap();
    let first = client.first();
    drop(world.take_server());
    let call = client.prepared(ECHO, &[0; 4]).timeout(Duration::from_millis(20));
    client.launch(call, 1);
    client.begin(ECHO, &[0; 4], 2);
    let ended = client.ends(2);
    assert!(matches!(ended[0], (1, Err(CallError::TimedOut { .. }))), "{ended:?}");
    assert!(matches!(ended[1], (2, Err(CallError::ConnectionLost { .. }))), "{ended:?}");
    assert!(client.close_reason(first).is_some());
}
