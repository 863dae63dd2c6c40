//! Calls without chunks: results, refusals, message lengths, cancellation.

use rpcrdma::config::AcceptConfig;
use rpcrdma::wire::rpc::AuthSys;
use rpcrdma_tests::prelude::*;

/// Credit modes, and the bytes of their transport headers without chunks.
const HEADERS: [(CreditMode, usize); 3] =
    [(CreditMode::V2Windowed, 40), (CreditMode::V2Incremental, 36), (CreditMode::V1, 28)];

fn refused(refusal: Refusal) -> Outcome {
    Err(CallError::Refused(refusal))
}

#[test]
fn messages_of_any_length_are_delivered() {
    for_each(HEADERS, |(mode, header)| {
        let (_world, mut client) = World::pair("longest", mode, mode);
        for len in (0..70).chain([127, 128, 400, 401, 511, 512, 513, 1000]) {
            echo(&mut client, &data_of(len as u32, len)).unwrap();
        }
        // A call of the first length fits one message. The longer call is continued, or a long call in version 1.
        let longest = 4096 - header - RPC_CALL;
        for len in [longest, longest + 1] {
            assert_eq!(client.run(REFUSE, &vec![0; len]), refused(Refusal::GarbageArguments), "{len}");
        }
        let longest = (4096 - header - RPC_REPLY) as u32;
        for (len, fits) in [(longest, true), (longest + 1, mode != CreditMode::V1)] {
            // The call declares a shorter reply. Version 1 has one error for all such cases.
            let too_long = Err(CallError::Transport(ErrorBody::BadXdr));
            let expected = if fits { Ok(data_of(len, len as usize)) } else { too_long };
            assert_eq!(client.run(REPLY, &be(&[len])), expected, "{len}");
            echo(&mut client, b"the connection lives on").unwrap();
        }
    });
}

#[test]
fn a_continued_reply_without_a_buffer_fails_only_its_call() {
    let long = |len| Procedure::new(move |call| Ok(call.reply_mut(len).map(drop)?)).max_reply(len);
    let services = standard_and([(20, long(6000)), (21, long(10_000))]);
    // The first part fits a message buffer, and the second does not fit behind it. If the second part is the last, the
    // client must not take it for the whole reply.
    let config = small_config().with(|c| c.memory.long_buffers = vec![]);
    let (_world, mut client) = World::pair_with("no-room", small_config(), services, config);
    for procedure in [20, 21] {
        assert_matches!(client.run(procedure, b"").unwrap_err(), CallError::NoReplyBuffer { .. });
        echo(&mut client, b"the connection lives on").unwrap();
    }
}

/// The refusals of RFC 5531 §9.
#[test]
fn refusals_of_rpc_reach_the_caller() {
    let (world, address) = World::standard("refusals", small_config());
    type Case<'a> = (u32, u32, u32, &'a [u32], Refusal);
    let cases: [Case<'_>; 12] = [
        (PROGRAM, VERSION, 999, &[], Refusal::ProcedureUnavailable),
        (PROGRAM, 5, u32::MAX, &[], Refusal::ProcedureUnavailable),
        (PROGRAM, 4, ECHO, &[], Refusal::ProgramMismatch { low: 3, high: 5 }),
        (PROGRAM + 1, VERSION, ECHO, &[], Refusal::ProgramUnavailable),
        (PROGRAM, VERSION, REFUSE, &[0], Refusal::GarbageArguments),
        (PROGRAM, VERSION, REFUSE, &[1], Refusal::SystemError),
        (PROGRAM, VERSION, REFUSE, &[2], Refusal::ProcedureUnavailable),
        (PROGRAM, VERSION, REFUSE, &[3], Refusal::Authentication(5)),
        (PROGRAM, VERSION, REFUSE, &[4], Refusal::RpcMismatch { low: 2, high: 2 }),
        (PROGRAM, VERSION, REFUSE, &[5], Refusal::ProgramMismatch { low: 7, high: 9 }),
        // The arguments are too short, then the results exceed the procedure's declaration.
        (PROGRAM, VERSION, REFUSE, &[], Refusal::GarbageArguments),
        (PROGRAM, VERSION, REPLY, &[6000], Refusal::SystemError),
    ];
    for_each(cases, |(program, version, procedure, args, refusal)| {
        let mut client =
            world.client(&address, ClientConfig { shard: small_config(), ..ClientConfig::new(program, version) });
        assert_eq!(client.run(procedure, &be(args)), refused(refusal));
        // Procedure 0 answers in each version of the program.
        assert_eq!(client.run(0, b"").is_ok(), program == PROGRAM && version != 4);
    });
    assert_eq!(world.stats().calls_failed, 12 + 2);
}

#[test]
fn handlers_get_the_credential_of_the_caller() {
    let (world, address) = World::standard("credential", small_config());
    let server_credential = |credential| {
        let mut client = world.client(&address, ClientConfig { credential, ..small_client(small_config()) });
        client.run(CREDENTIAL, b"").unwrap()
    };
    assert_eq!(server_credential(Credential::none()), [0; 4]);
    let long = "m".repeat(255);
    for (machine, uid, gid, gids) in [("host-a", 1000, 100, &[4, 24, 27][..]), (&long, 7, 8, &[9; 16])] {
        let results = server_credential(Credential::sys(machine, uid, gid, gids).unwrap());
        assert_eq!(results[..4], be(&[1]));
        let sys = AuthSys::parse(&results[4..]).unwrap();
        assert_eq!((sys.machine, sys.uid, sys.gid, sys.gids().len()), (machine.as_bytes(), uid, gid, gids.len()));
    }
}

/// Both revisions are tested, because they have different codes for this error.
#[test]
fn a_client_with_few_credits_gets_every_error_of_a_server_with_many() {
    for_each([Revision::Ietf00, Revision::Cel09], |revision| {
        let services = standard_and([(20, Procedure::new(|_| Ok(())).write_chunks(1, 1000))]);
        let shard = small_config().with(|c| c.debug.revision = revision);
        let server = shard.clone().with(|c| (c.limits.credits, c.memory.receives) = (120, 2048));
        let config = shard.with(|c| {
            (c.limits.credits, c.limits.max_calls) = (4, 128);
            c.memory.bulk_buffers = vec![(5000, 40)];
        });
        let (_world, mut client) = World::pair_with("errors", server, services, config);
        for _ in 0..5 {
            // A call with two Write chunks has no other valid form, so its error reaches the caller.
            client.launch_each(0..128, |client, token| {
                client.prepare_chunked_call(20, b"", &[], if token < 20 { &[1000; 2] } else { &[] })
            });
            let errors: Vec<_> = client.completions(128).into_iter().filter_map(|(_, end)| end.err()).collect();
            assert_eq!(errors, vec![CallError::Transport(ErrorBody::WriteChunks { max: 1 }); 20]);
        }
        let call = |client: &mut LocalClient, token| Some(client.prepare_call(ECHO, &data_of(token as u32, 64)));
        client.keep_busy(40, 300, call, |done| {
            assert_eq!(done.result.unwrap().results(), data_of(done.token as u32, 64));
        });
        mirror(&mut client, 1, &[5000]).unwrap();
    });
}

#[test]
fn a_connection_of_another_client_counts_as_closed() {
    let (world, address) = World::standard("foreign", small_config());
    let (mut client, mut other) = (world.client(&address, small_config()), world.client(&address, small_config()));
    let second = other.add_connection(&address).unwrap();
    let call = client.prepare_call(ECHO, b"");
    assert_eq!(client.call_on(second, call).map(drop).map_err(CallError::from), Err(CallError::Closed));
    assert!(!client.is_established(second) && other.is_established(second));
    assert_eq!(client.alloc(second, 8).map(drop), Err(CallError::Closed));
}

#[test]
fn a_server_recovers_from_a_shortage_of_memory() {
    // Three results need three bulk buffers. The server has two, and its other buffers are too short for a result.
    let rich = small_config().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 30)]);
    let (_world, mut client) = World::pair("server-pool", scarce_config(2, 2), rich);
    for _ in 0..5 {
        client.launch_each(0..8, |client, _| client.prepare_chunked_call(LOAD, &[0; 20], &[], &[50_000; 3]));
        let system = Err(CallError::Transport(ErrorBody::System));
        client.completions(8).into_iter().for_each(|(_, end)| assert_eq!(end, system));
        load(&mut client, 1, &[(50_000, 50_000), (10, 10)]).unwrap();
    }
}

fn start_error(address: &Address, config: ServerConfig) -> String {
    Server::start(address, standard_services(), &config).expect_err("the start fails").to_string()
}

#[test]
fn errors_of_busy_and_invalid_addresses_name_the_cause() {
    let (world, address) = World::standard("addresses", small_config());
    let unused_address = world.address();
    for error in [
        LocalClient::connect(&unused_address, small_client(small_config())).err().unwrap(),
        Client::connect(&unused_address, small_client(small_config())).err().unwrap(),
    ] {
        assert!(error.to_string().contains("no listener"), "{error}");
    }
    let long = format!("soft:{}", "n".repeat(200));
    let cases = [
        (&address.to_string()[..], "in use"),
        // A documentation address (RFC 5737), on no interface.
        ("iwarp:192.0.2.1:20049", "no interface of this host has 192.0.2.1 (`ip addr` lists the addresses"),
        ("soft:/nonexistent/directory/socket", "address"),
        (&long, "address"),
    ];
    for_each(cases, |(name, part)| {
        assert_contains(start_error(&name.parse().unwrap(), small_server()), &[part]);
        // Clients cannot connect to the last two addresses either.
        let connects =
            part != "address" || LocalClient::connect(&name.parse().unwrap(), small_client(small_config())).is_ok();
        assert_eq!(connects, part != "address");
    });
    echo(&mut world.client(&address, small_config()), b"unharmed").unwrap();
}

#[test]
fn errors_of_invalid_configurations_name_the_cause() {
    let world = World::new("config");
    let address = world.address();
    let workers = |count, cores| ServerConfig {
        workers: Some(WorkerConfig { count, cores, ..Default::default() }),
        ..small_server()
    };
    let cores = |shards, cores| ServerConfig { shards, cores: Some(cores), ..small_server() };
    for (config, start, part) in [
        (cores(2, vec![0]), "", ""),
        (cores(1, vec![0, 0]), "`ServerConfig::shards` is 1, `ServerConfig::cores` names 2 cores", ""),
        (
            workers(1, Some(vec![0, 0])),
            "invalid WorkerConfig::cores `2 cores`: expected 1, one for each worker (`WorkerConfig::count`)",
            "",
        ),
        (workers(0, None), "", ""),
        (ServerConfig { shards: 0, ..small_server() }, "", ""),
        (cores(1, vec![100_000]), "", "100000"),
    ] {
        let error = start_error(&address, config);
        assert!(error.starts_with(start) && error.contains(part), "{error}");
    }
    let accept = AcceptConfig { setup: Duration::from_secs(1 << 20), ..Default::default() };
    let long = ServerConfig { accept, ..small_server() };
    for error in [
        Server::start(&address, standard_services(), &long).err(),
        LocalServer::start(&address, standard_services(), &long).err(),
        LocalServer::start_with(&address, |_| standard_services().to_local(), &long).err(),
    ] {
        let error = error.expect("the start fails").to_string();
        assert!(error.starts_with("invalid accept.setup `"), "{error}");
    }
}

#[test]
fn a_panic_fails_only_its_own_call() {
    fn panics(_: &mut ServerCall) -> Result<(), Refusal> {
        panic!("as the test wants")
    }
    let services = standard_and([
        (20, Procedure::new(panics)),
        (21, Procedure::new(panics).on_workers()),
        (22, Procedure::deferred(|_| panic!("as the test wants"))),
        (23, Procedure::new(|_| Ok(())).cached(request_cache(64), |_| panic!("as the test wants"))),
    ]);
    let (world, address) = World::serving("panics", small_config().with_workers(2), services);
    let [mut client, mut other] = [0; 2].map(|_| world.client(&address, small_config()));
    for_each(pairs(0..2, 20..24), |(_, procedure)| {
        assert_eq!(client.run(procedure, b""), refused(Refusal::SystemError));
        echo(&mut client, b"on").unwrap();
        echo(&mut other, b"and the others").unwrap();
    });
    client.launch_each(0..30, |client, token| client.prepare_call(if token % 3 == 0 { 21 } else { ECHO }, &[0; 4]));
    for (token, end) in client.completions(30) {
        assert_eq!(end, if token % 3 == 0 { refused(Refusal::SystemError) } else { Ok(vec![0; 4]) });
    }
}

#[test]
fn impossible_lengths_and_positions_are_refused() {
    let (_world, mut client) = World::pair("no-such-length", small_config(), small_config());
    for length in [usize::MAX, usize::MAX - 3, u32::MAX as usize] {
        let call = ClientCall::new(ECHO).args(*b"four").expect_reply(length);
        assert!(matches!(client.outcome(call), Err(CallError::TooLong { .. })), "{length}");
        assert!(matches!(client.prepare(ECHO, length), Err(CallError::TooLong { .. })), "{length}");
    }
    for position in [usize::MAX, 0xffff_fffc, 1 << 32] {
        for call in [ClientCall::new(STORE).args(vec![0; 8]), client.prepare_call(STORE, &[0; 8])] {
            let data = client.alloc(client.first(), 100).unwrap();
            let error = client.outcome(call.read_chunk(position, data)).expect_err("no such position").to_string();
            assert!(error.contains("Read chunk at byte"), "{position:#x}: {error}");
        }
    }
    echo(&mut client, b"on").unwrap();
}
