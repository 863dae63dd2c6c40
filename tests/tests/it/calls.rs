//! Calls without chunks: results, refusals, message lengths, cancellation.

use rpcrdma::client::Credential;
use rpcrdma::config::AcceptConfig;
use rpcrdma::server::LocalServer;
use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::wire::rpc::AuthSys;
use rpcrdma_tests::prelude::*;

use super::lifecycle::{GATED, Gate, gated};

/// Credit modes, and the bytes of their transport headers without chunks.
const HEADERS: [(CreditMode, usize); 3] =
    [(CreditMode::V2Windowed, 40), (CreditMode::V2Incremental, 36), (CreditMode::V1, 28)];
/// Bytes of an RPC call header and of a reply header, both with `AUTH_NONE`.
const CALL_HEADER: usize = 40;
const REPLY_HEADER: usize = 24;

fn refused(refusal: Refusal) -> Outcome {
    Err(CallError::Refused(refusal))
}

#[test]
fn arguments_of_every_length_come_back() {
    let (_world, mut client) = World::pair("lengths", small(), small());
    for len in (0..70).chain([127, 128, 400, 401, 511, 512, 513, 1000, 1024]) {
        echo(&mut client, &data_of(len as u32, len)).unwrap();
    }
}

#[test]
fn a_message_of_any_length_passes() {
    for_each(HEADERS, |(scheme, header)| {
        let (_world, mut client) = World::pair("longest", scheme, scheme);
        // In one message; then continued, or long.
        let longest = 4096 - header - CALL_HEADER;
        for len in [longest, longest + 1] {
            assert_eq!(client.run(REFUSE, &vec![0; len]), refused(Refusal::GarbageArguments), "{len}");
        }
        echo(&mut client, b"the connection lives on").unwrap();
        let longest = 4096 - header - REPLY_HEADER;
        assert_eq!(reply_of(&mut client, longest), Ok(longest));
        let longer = match scheme {
            // The call expected a shorter reply; version 1 has one error for all cases.
            CreditMode::V1 => Err(CallError::Transport(ErrorBody::BadXdr)),
            _ => Ok(longest + 1),
        };
        assert_eq!(reply_of(&mut client, longest + 1), longer);
        echo(&mut client, b"the connection lives on").unwrap();
    });
}

#[test]
fn a_reply_in_parts_that_no_buffer_holds_is_not_mistaken_for_its_last_part() {
    let long = |len| {
        let long = move |call: &mut ServerCall| call.reply_mut(len).map(|_| ()).map_err(Refusal::from);
        Procedure::new(long).max_reply(len)
    };
    let services = standard_and([(20, long(6000)), (21, long(10_000))]);
    // The first part fits a message buffer. The second, possibly the last, does not fit behind it.
    let config = small().with(|c| c.memory.long_buffers = vec![]);
    let (_world, mut client) = World::pair_with("no-room", small(), services, config);
    for procedure in [20, 21] {
        let error = client.run(procedure, b"").unwrap_err();
        assert!(matches!(error, CallError::NoReplyBuffer { .. }), "{error}");
        echo(&mut client, b"the connection lives on").unwrap();
    }
}

/// Requests a reply of `len` bytes and returns the received length.
fn reply_of(client: &mut LocalClient, len: usize) -> Result<usize, CallError> {
    let results = client.run(REPLY, &be(&[len as u32]))?;
    assert!(patterned(len as u32, &results));
    Ok(results.len())
}

#[test]
fn a_procedure_that_answers_more_than_it_declared_is_a_system_error() {
    let (_world, mut client) = World::pair("declared", small(), small());
    assert_eq!(reply_of(&mut client, 6000), Err(CallError::Refused(Refusal::SystemError)));
    echo(&mut client, b"on").unwrap();
}

#[test]
fn unknown_programs_versions_and_procedures_are_refused_by_rfc_5531() {
    let (world, address) = World::standard("refusals", small());
    for_each(
        [
            // Procedure 0 answers.
            (PROGRAM, VERSION, 0, Ok(Vec::new())),
            (PROGRAM, 5, 0, Ok(Vec::new())),
            (PROGRAM, VERSION, 999, refused(Refusal::ProcedureUnavailable)),
            (PROGRAM, VERSION, u32::MAX, refused(Refusal::ProcedureUnavailable)),
            (PROGRAM, 4, ECHO, refused(Refusal::ProgramMismatch { low: 3, high: 5 })),
            (PROGRAM + 1, VERSION, ECHO, refused(Refusal::ProgramUnavailable)),
        ],
        |(program, version, procedure, expected)| {
            let config = ClientConfig { shard: small(), ..ClientConfig::new(program, version) };
            assert_eq!(world.client(&address, config).run(procedure, b""), expected);
        },
    );
}

#[test]
fn a_refusal_invalidates_nothing_that_its_call_did_not_offer() {
    let (_world, mut client) = World::pair("refusal-invalidates", small(), small());
    for seed in 0..5 {
        // This call offers a handle. The next call reuses its record at the server and offers none.
        mirror(&mut client, seed, &[100]).unwrap();
        assert_eq!(client.run(999, b""), refused(Refusal::ProcedureUnavailable));
    }
}

#[test]
fn refusals_of_a_handler_reach_the_caller() {
    let (world, mut client) = World::pair("refuse", small(), small());
    let expected = [
        Refusal::GarbageArguments,
        Refusal::SystemError,
        Refusal::ProcedureUnavailable,
        Refusal::Authentication(5),
        Refusal::RpcMismatch { low: 2, high: 2 },
        Refusal::ProgramMismatch { low: 7, high: 9 },
    ];
    for (code, refusal) in (0..).zip(expected) {
        assert_eq!(client.run(REFUSE, &be(&[code])), refused(refusal));
    }
    assert_eq!(client.run(REFUSE, &[0; 3]), refused(Refusal::GarbageArguments), "too short");
    drop(client);
    assert_eq!(world.stats().calls_failed, 7);
}

#[test]
fn the_server_sees_the_credential() {
    let (world, address) = World::standard("credential", small());
    let of = |credential| {
        let mut client = world.client(&address, ClientConfig { credential, ..small_client(small()) });
        client.run(CREDENTIAL, b"").unwrap()
    };
    assert_eq!(of(Credential::none()), [0; 4]);
    let long = "m".repeat(255);
    for (machine, uid, gid, gids) in [("host-a", 1000, 100, &[4, 24, 27][..]), (&long, 7, 8, &[9; 16])] {
        let results = of(Credential::sys(machine, uid, gid, gids).unwrap());
        assert_eq!(results[..4], be(&[1]));
        let sys = AuthSys::parse(&results[4..]).unwrap();
        let found = (sys.machine, sys.uid, sys.gid, sys.gids().len());
        assert_eq!(found, (machine.as_bytes(), uid, gid, gids.len()));
    }
}

#[test]
fn many_calls_with_few_credits_all_end() {
    for_each(SCHEMES, |scheme| {
        let config = in_mode(scheme).with(|c| (c.limits.credits, c.limits.max_calls) = (4, 128));
        let (_world, mut client) = World::pair("credits", config.clone(), config);
        many_calls(&mut client, 5000, 128);
    });
}

#[test]
fn a_client_with_few_credits_gets_every_error_of_a_server_with_many() {
    let services = standard_and([(20, Procedure::new(|_| Ok(())).write_chunks(1, 1000))]);
    let server = small().with(|c| (c.limits.credits, c.memory.receives) = (120, 2048));
    let config = small().with(|c| {
        (c.limits.credits, c.limits.max_calls) = (4, 128);
        c.memory.bulk_buffers = vec![(1024, 40)];
    });
    let (_world, mut client) = World::pair_with("errors", server, services, config);
    for_each(0..5, |_| {
        for token in 0..128 {
            // Two Write chunks: no other form of the call is valid.
            let call = client.chunked(20, b"", &[], if token < 20 { &[1000; 2] } else { &[] });
            client.launch(call, token);
        }
        let errors: Vec<_> = client.ends(128).into_iter().filter_map(|(_, end)| end.err()).collect();
        assert_eq!(errors, vec![CallError::Transport(ErrorBody::WriteChunks { max: 1 }); 20]);
    });
}

#[test]
fn no_more_than_max_calls_are_under_way() {
    let (_world, mut client) = World::pair("too-many", small(), small().with(|c| c.limits.max_calls = 8));
    client.launch_each(0..10, |client, _| client.prepared(ECHO, &[0; 8]));
    let mut results = client.ends(10);
    results.sort_by_key(|&(token, _)| token);
    for (token, result) in results {
        let expected = if token < 8 { Ok(vec![0; 8]) } else { Err(CallError::TooManyCalls { limit: 8 }) };
        assert_eq!(result, expected, "{token}");
    }
}

#[test]
fn a_deadline_ends_a_call_once_and_its_reply_is_dropped() {
    let gate = Gate::default();
    let (_world, mut client) = World::pair_with("deadline", workers(), gated(&gate, true), small());
    let _opens = gate.opens();
    let start = |client: &mut LocalClient, deadline| {
        let call = client.prepared(GATED, b"").timeout(deadline);
        client.launch(call, 7);
    };
    start(&mut client, Duration::from_millis(1));
    assert_eq!(client.end(), (7, Err(CallError::TimedOut { sent: true })));
    gate.open();
    let polled = settles(|| {
        client.poll(|done| panic!("{done:?}"));
        client.stats().messages.rejected_late == 1
    });
    assert!(polled, "its reply never came");
    start(&mut client, Duration::from_secs(60));
    assert_eq!(client.end(), (7, Ok(Vec::new())), "in time");
    echo(&mut client, b"on").unwrap();
}

#[test]
fn a_cancelled_call_ends_once() {
    let (_world, mut client) =
        World::pair("cancel", server_with_workers(small().with(|c| c.limits.credits = 4)), small());
    let first = client.first();
    echo(&mut client, b"all credits are here").unwrap();
    let mut start = |token| client.begin(WORKER_ECHO, &be(&[20_000]), token).unwrap();
    // Without a poll no grant arrives, so the last calls wait.
    let calls: Vec<_> = (0..10).map(&mut start).collect();
    let (sent, queued) = (calls[0], calls[9]);
    client.flush();
    for call in [queued, sent, queued, sent] {
        client.cancel(first, call);
    }
    let ends = client.ends(10);
    client.quiet_until(|client| client.stats().messages.rejected_late == 1);
    let cancelled = |sent| Err(CallError::Cancelled { sent });
    assert_eq!(ends[..2], [(9, cancelled(false)), (0, cancelled(true))]);
    assert!(ends[2..].iter().all(|(_, end)| end.is_ok()), "{ends:?}");
    client.cancel(first, sent);
    client.poll(|_| panic!("it has ended"));
    echo(&mut client, b"on").unwrap();
}

#[test]
fn a_connection_of_another_client_is_closed_here() {
    let (world, address) = World::standard("foreign", small());
    let (mut one, mut other) = (world.client(&address, small()), world.client(&address, small()));
    let second = other.add_connection(&address).unwrap();
    let call = one.prepared(ECHO, b"");
    assert_eq!(one.call_on(second, call).map(drop).map_err(CallError::from), Err(CallError::Closed));
    assert!(!one.is_established(second) && other.is_established(second));
    assert_eq!(one.alloc(second, 8).map(drop), Err(CallError::Closed));
}

#[test]
fn an_empty_pool_is_an_error_and_recovers() {
    let config = small().with(|c| {
        (c.memory.small_buffers, c.memory.message_buffers, c.memory.receives) = (16, 8, 256);
    });
    let (_world, mut client) = World::pair("full-pool", small(), config);
    // Held replies exhaust the buffers for calls.
    let mut held = Vec::new();
    let error = loop {
        let mut call = match client.prepare(ECHO, 8) {
            Ok(call) => call,
            Err(error) => break error,
        };
        call.args_mut().fill(1);
        match client.call(call.timeout(Duration::from_millis(200))) {
            Ok(reply) => held.push(reply),
            Err(failed) => break failed.error,
        }
        assert!(held.len() < 1000, "there is no end");
    };
    assert!(matches!(error, CallError::NoMemory { .. } | CallError::TimedOut { .. }), "{error}");
    held.clear();
    (0..300).for_each(|_| echo(&mut client, b"all is well again").unwrap());
}

#[test]
fn a_server_recovers_from_a_shortage_of_memory() {
    // No other buffers can hold data that exceeds the bulk buffers.
    let poor = small().with(|c| {
        (c.memory.bulk_buffers, c.memory.long_buffers) = (vec![(64 << 10, 2)], vec![(32 << 10, 2)]);
    });
    let rich = small().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 30)]);
    let (_world, mut client) = World::pair("server-pool", poor, rich);
    for_each(0..20, |_| {
        client.launch_each(0..8, |client, _| client.chunked(LOAD, &[0; 20], &[], &[50_000; 3]));
        // Three results do not fit into two buffers.
        for (_, end) in client.ends(8) {
            assert_eq!(end, Err(CallError::Transport(ErrorBody::System)));
        }
        load(&mut client, 1, &[(50_000, 50_000), (10, 10)]).unwrap();
    });
}

/// The error of a server that does not start, as text.
fn unstarted(address: &Address, config: ServerConfig) -> String {
    Server::start(address, standard_services(), &config).expect_err("it cannot start").to_string()
}

#[test]
fn a_busy_address_and_wrong_addresses_are_explained() {
    let (world, address) = World::standard("addresses", small());
    let error = unstarted(&address, small_server());
    assert!(error.contains("in use"), "{error}");

    let nowhere = world.address();
    for error in [
        LocalClient::connect(&nowhere, small_client(small())).err().unwrap(),
        Client::connect(&nowhere, small_client(small())).err().unwrap(),
    ] {
        assert!(error.to_string().contains("nobody listens"), "{error}");
    }

    // A documentation address (RFC 5737), on no interface.
    let error = unstarted(&"iwarp:192.0.2.1:20049".parse().unwrap(), small_server());
    assert!(error.contains("192.0.2.1 is on no interface of this host (`ip addr` lists them"), "{error}");

    for name in ["soft:/nonexistent/directory/socket", &format!("soft:{}", "n".repeat(200))] {
        let address = name.parse().unwrap();
        assert!(LocalClient::connect(&address, small_client(small())).is_err(), "{name}");
        let error = unstarted(&address, small_server());
        assert!(error.contains("address"), "{error}");
    }
    echo(&mut world.client(&address, small()), b"unharmed").unwrap();
}

#[test]
fn configurations_that_cannot_work_are_explained() {
    let world = World::new("config");
    let address = world.address();
    for (config, knob) in [
        (small().with(|c| c.limits.credits = 3), "credits"),
        (small().with(|c| c.wire.receive_size = 1000), "receive_size"),
        (small().with(|c| c.wire.receive_size = 1026), "receive_size"),
        (small().with(|c| c.memory.receives = 10), "receives"),
        (small().with(|c| c.debug.signal_every = 0), "signal_every"),
        (small().with(|c| c.limits.max_calls = 0), "max_calls"),
        (small().with(|c| c.debug.sample_latency = 3), "sample_latency"),
        (small().with(|c| c.memory.bulk_buffers = vec![(0, 1)]), "bulk_buffers"),
    ] {
        let error = unstarted(&address, config.of_server());
        assert!(error.contains(knob), "{error}");
    }
    let workers = |count, cores| ServerConfig {
        workers: Some(WorkerConfig { count, cores, ..Default::default() }),
        ..small_server()
    };
    let cores = |shards, cores| ServerConfig { shards, cores: Some(cores), ..small_server() };
    for (config, start, part) in [
        (cores(2, vec![0]), "", ""),
        (cores(1, vec![0, 0]), "`ServerConfig::shards` is 1, `ServerConfig::cores` names 2 cores", ""),
        (workers(1, Some(vec![0, 0])), "`WorkerConfig::count` is 1, `WorkerConfig::cores` names 2 cores", ""),
        (workers(0, None), "", ""),
        (ServerConfig { shards: 0, ..small_server() }, "", ""),
        (cores(1, vec![100_000]), "", "100000"),
    ] {
        let error = unstarted(&address, config);
        assert!(error.starts_with(start) && error.contains(part), "{error}");
    }
    let accept = AcceptConfig { setup: Duration::from_secs(1 << 20), ..Default::default() };
    let long = ServerConfig { accept, ..small_server() };
    for error in [
        Server::start(&address, standard_services(), &long).err(),
        LocalServer::start(&address, standard_services(), &long).err(),
        LocalServer::start_with(&address, |_| standard_services().to_local(), &long).err(),
    ] {
        let error = error.expect("it cannot start").to_string();
        assert!(error.starts_with("accept.setup is "), "{error}");
    }
}

#[test]
fn pages_that_cannot_be_had_are_explained() {
    let world = World::new("pages");
    let pages = rpcrdma_mempool::PagePolicy::Require(rpcrdma_mempool::PageSize::Huge1G);
    let config = small().with(|c| c.memory.pages = pages).of_server();
    // Few machines have a free page of 1 GiB; where one is free, the server starts.
    if let Err(error) = Server::start(&world.address(), standard_services(), &config) {
        let text = super::errors::chain(&error);
        assert!(text.contains("1 GiB") && text.contains("hugepages"), "{text}");
    }
}

pub(crate) fn workers() -> ServerConfig {
    server_with_workers(small())
}

fn server_with_workers(shard: Config) -> ServerConfig {
    shard.of_server().with_workers(2)
}

/// Echoes `count` messages, `depth` of them outstanding, and checks each.
pub(crate) fn many_calls(client: &mut LocalClient, count: u64, depth: u64) {
    let (mut started, mut ended) = (0, 0);
    // The time-out bounds each completion, not their total.
    while ended < count {
        let before = ended;
        let goes_on = settles(|| {
            for _ in 0..1000 {
                while started < count && started - ended < depth {
                    client.begin(ECHO, &data_of(started as u32, 64), started);
                    started += 1;
                }
                client.poll(|done| {
                    let reply = done.result.unwrap();
                    assert!(patterned(done.token as u32, reply.results()) && reply.results().len() == 64);
                    ended += 1;
                });
                if ended == count {
                    break;
                }
            }
            ended > before
        });
        assert!(goes_on, "{ended} of {count} calls ended");
    }
}

#[test]
fn a_handler_that_panics_on_the_shard_costs_its_call() {
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let services = standard_and([
        (20, Procedure::new(|_| panic!("as the test wants"))),
        (21, Procedure::new(|_| Ok(())).cached(cache, |_| panic!("as the test wants"))),
    ]);
    let (world, address) = World::serving("panic-on-shard", small(), services);
    let (mut client, mut other) = (world.client(&address, small()), world.client(&address, small()));
    for procedure in [20, 21, 20, 21] {
        assert_eq!(client.run(procedure, b""), refused(Refusal::SystemError));
        echo(&mut client, b"on").unwrap();
        echo(&mut other, b"and the others").unwrap();
    }
}

#[test]
fn lengths_and_positions_that_no_message_has_are_refused() {
    let (_world, mut client) = World::pair("no-such-length", small(), small());
    for length in [usize::MAX, usize::MAX - 3, u32::MAX as usize] {
        let call = ClientCall::new(ECHO).args(*b"four").expect_reply(length);
        assert!(matches!(client.outcome(call), Err(CallError::TooLong { .. })), "{length}");
        assert!(matches!(client.prepare(ECHO, length), Err(CallError::TooLong { .. })), "{length}");
    }
    for position in [usize::MAX, 0xffff_fffc, 1 << 32] {
        for call in [ClientCall::new(STORE).args(vec![0; 8]), client.prepared(STORE, &[0; 8])] {
            let data = client.alloc(client.first(), 100).unwrap();
            let error = client.outcome(call.read_chunk(position, data)).expect_err("no such position").to_string();
            assert!(error.contains("Read chunk at byte"), "{position:#x}: {error}");
        }
    }
    echo(&mut client, b"on").unwrap();
}
