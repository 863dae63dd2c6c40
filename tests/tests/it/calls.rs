//! Calls without chunks: results, refusals, message lengths, cancellation.

use std::sync::Arc;
use std::time::Duration;

use rpcrdma::client::{ClientCall, ClientConfig, Credential, LocalClient};
use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::wire::ErrorBody;
use rpcrdma::wire::rpc::AuthSys;
use rpcrdma::{CallError, Config, CreditMode, FailedCall, Procedure, Refusal, Server, ServerCall};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::lifecycle::{GATED, Gate, gated};

const WINDOWED: Case = Case { scheme: CreditMode::V2Windowed, header: 40 };
const SCHEMES: [Case; 3] =
    [WINDOWED, Case { scheme: CreditMode::V2Incremental, header: 36 }, Case { scheme: CreditMode::V1, header: 28 }];
/// Bytes of an RPC call header and of a reply header, both with `AUTH_NONE`.
const CALL_HEADER: usize = 40;
const REPLY_HEADER: usize = 24;

/// A credit mode, and the bytes of its transport header without chunks.
#[derive(Clone, Copy)]
struct Case {
    scheme: CreditMode,
    header: usize,
}

fn with(scheme: CreditMode) -> Config {
    small().with(|c| c.wire.credit_mode = scheme)
}

fn server_with(shard: Config) -> rpcrdma::server::ServerConfig {
    rpcrdma::server::ServerConfig { shard, ..small_server() }
}

#[test]
fn arguments_of_every_length_come_back() {
    let mut world = World::new("lengths");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let mut bytes = [0; 1024];
    for len in (0..70).chain([127, 128, 400, 401, 511, 512, 513, 1000, 1024]) {
        pattern(len as u32, &mut bytes[..len]);
        echo(&mut client, &bytes[..len]).unwrap();
    }
}

#[test]
fn a_message_of_any_length_passes() {
    for Case { scheme, header } in SCHEMES {
        let mut world = World::new("longest");
        let address = world.serve(server_with(with(scheme)));
        let mut client = world.client(&address, with(scheme));
        let longest = 4096 - header - CALL_HEADER;
        let mut call = client.prepare(REFUSE, longest).unwrap();
        call.args_mut().fill(0);
        assert_eq!(client.call(call).unwrap_err().error, CallError::Refused(Refusal::GarbageArguments), "{scheme:?}");

        // Continued, or long.
        let mut call = client.prepare(REFUSE, longest + 1).unwrap();
        call.args_mut().fill(0);
        let refused = CallError::Refused(Refusal::GarbageArguments);
        assert_eq!(client.call(call).unwrap_err().error, refused, "{scheme:?}");
        echo(&mut client, b"the connection lives on").unwrap();

        let longest = 4096 - header - REPLY_HEADER;
        assert_eq!(reply_of(&mut client, longest), Ok(longest), "{scheme:?}");
        let longer = match scheme {
            // The call expected a shorter reply; version 1 has one error for all cases.
            CreditMode::V1 => Err(CallError::Transport(ErrorBody::BadXdr)),
            _ => Ok(longest + 1),
        };
        assert_eq!(reply_of(&mut client, longest + 1), longer, "{scheme:?}");
        echo(&mut client, b"the connection lives on").unwrap();
    }
}

#[test]
fn a_reply_in_parts_that_no_buffer_holds_is_not_mistaken_for_its_last_part() {
    let mut world = World::new("no-room");
    let mut services = standard_services();
    for (procedure, len) in [(20, 6000), (21, 10_000)] {
        let long = move |call: &mut ServerCall| call.reply_mut(len).map(|_| ()).map_err(Refusal::from);
        services.add(PROGRAM, VERSION, procedure, Procedure::new(long).max_reply(len));
    }
    let address = world.serve_with(small_server(), services);
    // The first part fits a message buffer. The second, possibly the last, does not fit behind it.
    let mut client = world.client(&address, small().with(|c| c.memory.long_buffers = vec![]));
    for procedure in [20, 21] {
        let call = client.prepare(procedure, 0).unwrap();
        let error = client.call(call).map(drop).unwrap_err();
        let of_parts = matches!(error, FailedCall { error: CallError::NoReplyBuffer { .. }, .. });
        assert!(of_parts, "{error}");
        echo(&mut client, b"the connection lives on").unwrap();
    }
}

/// Requests a reply of `len` bytes and returns the received length.
fn reply_of(client: &mut LocalClient, len: usize) -> Result<usize, CallError> {
    let mut call = client.prepare(REPLY, 4).unwrap();
    call.args_mut().copy_from_slice(&(len as u32).to_be_bytes());
    let reply = client.call(call)?;
    assert!(patterned(len as u32, reply.results()));
    Ok(reply.results().len())
}

#[test]
fn a_procedure_that_answers_more_than_it_declared_is_a_system_error() {
    let mut world = World::new("declared");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    assert_eq!(reply_of(&mut client, 6000), Err(CallError::Refused(Refusal::SystemError)));
    echo(&mut client, b"on").unwrap();
}

#[test]
fn unknown_programs_versions_and_procedures_are_refused_by_rfc_5531() {
    let mut world = World::new("refusals");
    let address = world.serve(small_server());
    let call = |program, version, procedure| {
        let config = ClientConfig { shard: small(), ..ClientConfig::new(program, version) };
        let mut client = LocalClient::connect(&address, config).unwrap();
        let call = client.prepare(procedure, 0).unwrap();
        client.call(call).map(|reply| reply.results().len())
    };
    let refused = |refusal| Err(CallError::Refused(refusal));
    assert_eq!(call(PROGRAM, VERSION, 0).map_err(CallError::from), Ok(0), "procedure 0 answers");
    assert_eq!(call(PROGRAM, 5, 0).map_err(CallError::from), Ok(0));
    assert_eq!(call(PROGRAM, VERSION, 999).map_err(CallError::from), refused(Refusal::ProcedureUnavailable));
    assert_eq!(call(PROGRAM, VERSION, u32::MAX).map_err(CallError::from), refused(Refusal::ProcedureUnavailable));
    assert_eq!(call(PROGRAM, 4, ECHO).map_err(CallError::from), refused(Refusal::ProgramMismatch { low: 3, high: 5 }));
    assert_eq!(call(PROGRAM + 1, VERSION, ECHO).map_err(CallError::from), refused(Refusal::ProgramUnavailable));
}

#[test]
fn a_refusal_invalidates_nothing_that_its_call_did_not_offer() {
    let mut world = World::new("refusal-invalidates");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    for seed in 0..5 {
        // This call offers a handle. The next call reuses its record at the server and offers none.
        mirror(&mut client, seed, &[100]).unwrap();
        let call = client.prepare(999, 0).unwrap();
        let expected = CallError::Refused(Refusal::ProcedureUnavailable);
        assert_eq!(client.call(call).unwrap_err().error, expected);
    }
}

#[test]
fn refusals_of_a_handler_reach_the_caller() {
    let mut world = World::new("refuse");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    let expected = [
        Refusal::GarbageArguments,
        Refusal::SystemError,
        Refusal::ProcedureUnavailable,
        Refusal::Authentication(5),
        Refusal::RpcMismatch { low: 2, high: 2 },
        Refusal::ProgramMismatch { low: 7, high: 9 },
    ];
    for (code, refusal) in expected.into_iter().enumerate() {
        let mut call = client.prepare(REFUSE, 4).unwrap();
        call.args_mut().copy_from_slice(&(code as u32).to_be_bytes());
        assert_eq!(client.call(call).unwrap_err().error, CallError::Refused(refusal));
    }
    let call = client.prepare(REFUSE, 3).unwrap();
    assert_eq!(client.call(call).unwrap_err().error, CallError::Refused(Refusal::GarbageArguments), "too short");
    drop(client);
    assert_eq!(world.server().stats()[0].calls_failed, 7);
}

#[test]
fn the_server_sees_the_credential() {
    let mut world = World::new("credential");
    let address = world.serve(small_server());
    for (credential, expected) in [
        (Credential::none(), None),
        (Credential::sys("host-a", 1000, 100, &[4, 24, 27]).unwrap(), Some((&b"host-a"[..], 1000, 100, 3))),
        (Credential::sys(&"m".repeat(255), 7, 8, &[9; 16]).unwrap(), Some((&[b'm'; 255][..], 7, 8, 16))),
    ] {
        let config = ClientConfig { credential, ..small_client(small()) };
        let mut client = LocalClient::connect(&address, config).unwrap();
        let call = client.prepare(CREDENTIAL, 0).unwrap();
        let reply = client.call(call).unwrap();
        let (flavor, body) = reply.results().split_at(4);
        match expected {
            None => assert_eq!((flavor, body), (&[0; 4][..], &[][..])),
            Some((machine, uid, gid, groups)) => {
                assert_eq!(flavor, 1u32.to_be_bytes());
                let sys = AuthSys::parse(body).unwrap();
                assert_eq!((sys.machine, sys.uid, sys.gid, sys.gids().len()), (machine, uid, gid, groups));
            }
        }
    }
}

#[test]
fn many_calls_with_few_credits_all_end() {
    for Case { scheme, .. } in SCHEMES {
        let mut world = World::new("credits");
        let config = with(scheme).with(|c| {
            c.limits.credits = 4;
            c.limits.max_calls = 128;
        });
        let address = world.serve(server_with(config.clone()));
        let mut client = world.client(&address, config);
        many_calls(&mut client, 5000, 128);
    }
}

#[test]
fn a_client_with_few_credits_gets_every_error_of_a_server_with_many() {
    let mut world = World::new("errors");
    let mut services = standard_services();
    services.add(PROGRAM, VERSION, 20, Procedure::new(|_| Ok(())).write_chunks(1, 1000));
    let address = world.serve_with(
        server_with(small().with(|c| {
            c.limits.credits = 120;
            c.memory.receives = 2048;
        })),
        services,
    );
    let config = small().with(|c| {
        c.limits.credits = 4;
        c.limits.max_calls = 128;
        c.memory.bulk_buffers = vec![(1024, 40)];
    });
    let mut client = world.client(&address, config);
    let first = client.first();
    for round in 0..5 {
        for token in 0..128 {
            let mut call = client.prepare(20, 0).unwrap();
            // Two Write chunks: no other form of the call is valid.
            for _ in 0..if token < 20 { 2 } else { 0 } {
                call = call.write_chunk_into(client.alloc(first, 1000).unwrap());
            }
            client.start(first, call, token);
        }
        let mut refused = 0;
        let mut ended = 0;
        assert!(
            settles(|| {
                for _ in 0..1000 {
                    client.poll(|done| {
                        ended += 1;
                        match done.result.map(drop) {
                            Ok(()) => {}
                            Err(failed) => {
                                assert_eq!(failed.error, CallError::Transport(ErrorBody::WriteChunks { max: 1 }));
                                refused += 1;
                            }
                        }
                    });
                }
                ended == 128
            }),
            "round {round}: {ended} of 128 calls ended"
        );
        assert_eq!(refused, 20);
    }
}

#[test]
fn no_more_than_max_calls_are_under_way() {
    let mut world = World::new("too-many");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small().with(|c| c.limits.max_calls = 8));
    let first = client.first();
    for token in 0..10 {
        let call = client.prepare(ECHO, 8).unwrap();
        client.start(first, call, token);
    }
    let mut results = Vec::new();
    assert!(settles(|| {
        client.poll(|done| results.push((done.token, done.result.map(drop))));
        results.len() == 10
    }));
    results.sort_by_key(|&(token, _)| token);
    for (token, result) in results {
        let expected = if token < 8 { Ok(()) } else { Err(CallError::TooManyCalls { limit: 8 }) };
        assert_eq!(result.map_err(CallError::from), expected, "{token}");
    }
}

#[test]
fn a_deadline_ends_a_call_once_and_its_reply_is_dropped() {
    let mut world = World::new("deadline");
    let gate = Gate::default();
    let _opens = gate.opens();
    let address = world.serve_with(workers(), gated(&gate, true));
    let mut client = world.client(&address, small());
    let first = client.first();
    let start = |client: &mut LocalClient, deadline| {
        let mut call = client.prepare(GATED, 0).unwrap();
        call = call.timeout(deadline);
        client.start(first, call, 7);
    };
    start(&mut client, Duration::from_millis(1));
    let mut ends = Vec::new();
    assert!(settles(|| {
        client.poll(|done| ends.push(done.result.map(drop).map_err(CallError::from)));
        !ends.is_empty()
    }));
    gate.open();
    let polled = settles(|| {
        client.poll(|done| ends.push(done.result.map(drop).map_err(CallError::from)));
        client.stats().messages.rejected_late == 1
    });
    assert!(polled, "its reply never came");
    assert_eq!(ends, [Err(CallError::TimedOut { sent: true })]);
    start(&mut client, Duration::from_secs(60));
    ends.clear();
    assert!(settles(|| {
        client.poll(|done| ends.push(done.result.map(drop).map_err(CallError::from)));
        !ends.is_empty()
    }));
    assert_eq!(ends, [Ok(())], "in time");
    echo(&mut client, b"on").unwrap();
}

#[test]
fn a_cancelled_call_ends_once() {
    let mut world = World::new("cancel");
    let address = world.serve(server_with_workers(small().with(|c| c.limits.credits = 4)));
    let mut client = world.client(&address, small());
    let first = client.first();
    echo(&mut client, b"all credits are here").unwrap();
    let mut start = |token| {
        let mut call = client.prepare(WORKER_ECHO, 4).unwrap();
        call.args_mut().copy_from_slice(&20_000u32.to_be_bytes());
        client.start(first, call, token).unwrap()
    };
    // Without a poll no grant arrives, so the last calls wait.
    let calls: Vec<_> = (0..10).map(&mut start).collect();
    let (sent, queued) = (calls[0], calls[9]);
    client.flush();
    let mut ends = Vec::new();
    for call in [queued, sent, queued, sent] {
        client.cancel(first, call);
    }
    assert!(settles(|| {
        client.poll(|done| ends.push((done.token, done.result.map(drop).map_err(CallError::from))));
        client.stats().messages.rejected_late == 1 && ends.len() == 10
    }));
    let cancelled = |sent| Err(CallError::Cancelled { sent });
    assert_eq!(ends[..2], [(9, cancelled(false)), (0, cancelled(true))]);
    assert!(ends[2..].iter().all(|(_, end)| end.is_ok()), "{ends:?}");
    client.cancel(first, sent);
    client.poll(|_| panic!("it has ended"));
    echo(&mut client, b"on").unwrap();
}

#[test]
fn a_connection_of_another_client_is_closed_here() {
    let mut world = World::new("foreign");
    let address = world.serve(small_server());
    let mut one = world.client(&address, small());
    let mut other = world.client(&address, small());
    let second = other.add_connection(&address).unwrap();
    let call = one.prepare(ECHO, 0).unwrap();
    assert_eq!(one.call_on(second, call).map(drop).map_err(CallError::from), Err(CallError::Closed));
    assert!(!one.is_established(second) && other.is_established(second));
    assert_eq!(one.alloc(second, 8).map(drop), Err(CallError::Closed));
}

#[test]
fn an_empty_pool_is_an_error_and_recovers() {
    let mut world = World::new("full-pool");
    let address = world.serve(small_server());
    for scheme in [CreditMode::V2Windowed] {
        let config = with(scheme).with(|c| {
            c.memory.small_buffers = 16;
            c.memory.message_buffers = 8;
            c.memory.receives = 256;
        });
        let mut client = world.client(&address, config);
        // Held replies exhaust the buffers for calls.
        let mut held = Vec::new();
        let error = loop {
            let mut call = match client.prepare(ECHO, 8) {
                Ok(call) => call,
                Err(error) => break error,
            };
            call.args_mut().fill(1);
            call = call.timeout(Duration::from_millis(200));
            match client.call(call) {
                Ok(reply) => held.push(reply),
                Err(failed) => break failed.error,
            }
            assert!(held.len() < 1000, "there is no end");
        };
        let stalled = matches!(error, CallError::NoMemory { .. } | CallError::TimedOut { .. });
        assert!(stalled, "{error}");
        held.clear();
        for _ in 0..300 {
            echo(&mut client, b"all is well again").unwrap();
        }
    }
}

#[test]
fn a_server_recovers_from_a_shortage_of_memory() {
    let mut world = World::new("server-pool");
    // No other buffers can hold data that exceeds the bulk buffers.
    let (bulk_buffers, long_buffers) = (vec![(64 << 10, 2)], vec![(32 << 10, 2)]);
    let address = world.serve(server_with(small().with(|c| {
        c.memory.bulk_buffers = bulk_buffers;
        c.memory.long_buffers = long_buffers;
    })));
    let mut client = world.client(&address, small().with(|c| c.memory.bulk_buffers = vec![(64 << 10, 30)]));
    let first = client.first();
    for round in 0..20 {
        for token in 0..8 {
            let mut call = client.prepare(LOAD, 20).unwrap();
            call.args_mut().fill(0);
            for _ in 0..3 {
                call = call.write_chunk_into(client.alloc(first, 50_000).unwrap());
            }
            client.start(first, call, token);
        }
        let (mut refused, mut ended) = (0, 0);
        assert!(settles(|| {
            client.poll(|done| {
                ended += 1;
                match done.result {
                    Err(FailedCall { error: CallError::Transport(ErrorBody::System), .. }) => refused += 1,
                    other => panic!("{other:?} with {round}"),
                }
            });
            ended == 8
        }));
        assert_eq!(refused, 8, "three results do not fit into two buffers");
        load(&mut client, 1, &[(50_000, 50_000), (10, 10)]).unwrap();
    }
}

#[test]
fn a_busy_address_and_wrong_addresses_are_explained() {
    let mut world = World::new("addresses");
    let address = world.serve(small_server());
    let error = Server::start(&address, standard_services(), &small_server()).err().unwrap().to_string();
    assert!(error.contains("in use"), "{error}");

    let nowhere = world.address();
    let error = LocalClient::connect(&nowhere, small_client(small())).err().unwrap().to_string();
    assert!(error.contains("nobody listens"), "{error}");
    let error = rpcrdma::Client::connect(&nowhere, small_client(small())).err().unwrap().to_string();
    assert!(error.contains("nobody listens"), "{error}");

    // A documentation address (RFC 5737), on no interface.
    let foreign: rpcrdma::Address = "iwarp:192.0.2.1:20049".parse().unwrap();
    let error = Server::start(&foreign, standard_services(), &small_server()).err().unwrap().to_string();
    assert!(error.contains("192.0.2.1 is on no interface of this host (`ip addr` lists them"), "{error}");

    for name in ["soft:/nonexistent/directory/socket", &format!("soft:{}", "n".repeat(200))] {
        let address = name.parse().unwrap();
        assert!(LocalClient::connect(&address, small_client(small())).is_err(), "{name}");
        let error = Server::start(&address, standard_services(), &small_server()).err().unwrap().to_string();
        assert!(error.contains("address"), "{error}");
    }
    let mut client = world.client(&address, small());
    echo(&mut client, b"unharmed").unwrap();
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
        (small().with(|c| c.poll.signal_every = 0), "signal_every"),
        (small().with(|c| c.limits.max_calls = 0), "max_calls"),
        (small().with(|c| c.poll.sample_latency = 3), "sample_latency"),
        (small().with(|c| c.memory.bulk_buffers = vec![(0, 1)]), "bulk_buffers"),
    ] {
        let error = Server::start(&address, standard_services(), &server_with(config)).err().unwrap().to_string();
        assert!(error.contains(knob), "{error}");
    }
    let two = rpcrdma::server::ServerConfig { shards: 2, cores: Some(vec![0]), ..small_server() };
    assert!(Server::start(&address, standard_services(), &two).is_err());
    let more = rpcrdma::server::ServerConfig { shards: 1, cores: Some(vec![0, 0]), ..small_server() };
    let error = Server::start(&address, standard_services(), &more).err().unwrap().to_string();
    let named = "`ServerConfig::shards` is 1, `ServerConfig::cores` names 2 cores";
    assert!(error.starts_with(named), "{error}");
    let workers = rpcrdma::server::WorkerConfig { count: 1, cores: Some(vec![0, 0]), ..Default::default() };
    let more = rpcrdma::server::ServerConfig { workers: Some(workers), ..small_server() };
    let error = Server::start(&address, standard_services(), &more).err().unwrap().to_string();
    assert!(error.starts_with("`WorkerConfig::count` is 1, `WorkerConfig::cores` names 2 cores"), "{error}");
    let accept = rpcrdma::config::AcceptConfig { setup: Duration::from_secs(1 << 20), ..Default::default() };
    let long = rpcrdma::server::ServerConfig { accept, ..small_server() };
    for error in [
        Server::start(&address, standard_services(), &long).err().map(|error| error.to_string()),
        rpcrdma::server::LocalServer::start(&address, standard_services(), &long).err().map(|error| error.to_string()),
        rpcrdma::server::LocalServer::start_with(&address, |_| standard_services().to_local(), &long)
            .err()
            .map(|error| error.to_string()),
    ] {
        assert!(error.as_deref().is_some_and(|text| text.starts_with("accept.setup is ")), "{error:?}");
    }
    let none = rpcrdma::server::ServerConfig { shards: 0, ..small_server() };
    assert!(Server::start(&address, standard_services(), &none).is_err());
    let core = rpcrdma::server::ServerConfig { cores: Some(vec![100_000]), ..small_server() };
    let error = Server::start(&address, standard_services(), &core).err().unwrap().to_string();
    assert!(error.contains("100000"), "{error}");
    let workers = rpcrdma::server::WorkerConfig { count: 0, ..Default::default() };
    let workers = rpcrdma::server::ServerConfig { workers: Some(workers), ..small_server() };
    assert!(Server::start(&address, standard_services(), &workers).is_err());
}

#[test]
fn pages_that_cannot_be_had_are_explained() {
    let world = World::new("pages");
    let address = world.address();
    let pages = rpcrdma_mempool::PagePolicy::Require(rpcrdma_mempool::PageSize::Huge1G);
    // Few machines have a free page of 1 GiB; where one is free, the server starts.
    if let Err(error) =
        Server::start(&address, standard_services(), &server_with(small().with(|c| c.memory.pages = pages)))
    {
        let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let text = chain.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        assert!(text.contains("1 GiB") && text.contains("hugepages"), "{text}");
    }
}

pub(crate) fn workers() -> rpcrdma::server::ServerConfig {
    server_with_workers(small())
}

fn server_with_workers(shard: Config) -> rpcrdma::server::ServerConfig {
    let workers = rpcrdma::server::WorkerConfig { count: 2, ..Default::default() };
    rpcrdma::server::ServerConfig { workers: Some(workers), ..server_with(shard) }
}

/// Echoes `count` messages, `depth` of them outstanding, and checks each.
pub(crate) fn many_calls(client: &mut LocalClient, count: u64, depth: u64) {
    let first = client.first();
    let (mut started, mut ended) = (0, 0);
    // The time-out bounds each completion, not their total.
    while ended < count {
        let before = ended;
        let goes_on = settles(|| {
            for _ in 0..1000 {
                while started < count && started - ended < depth {
                    let mut call = client.prepare(ECHO, 64).unwrap();
                    pattern(started as u32, call.args_mut());
                    client.start(first, call, started);
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
    let mut world = World::new("panic-on-shard");
    let mut services = standard_services();
    services.add(PROGRAM, VERSION, 20, Procedure::new(|_| panic!("as the test wants")));
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let identified = Procedure::new(|_| Ok(())).cached(cache, |_| panic!("as the test wants"));
    services.add(PROGRAM, VERSION, 21, identified);
    let address = world.serve_with(small_server(), services);
    let mut client = world.client(&address, small());
    let mut other = world.client(&address, small());
    for procedure in [20, 21, 20, 21] {
        let call = client.prepare(procedure, 0).unwrap();
        assert_eq!(client.call(call).map(drop).map_err(CallError::from), Err(CallError::Refused(Refusal::SystemError)));
        echo(&mut client, b"on").unwrap();
        echo(&mut other, b"and the others").unwrap();
    }
}

#[test]
fn lengths_and_positions_that_no_message_has_are_refused() {
    let mut world = World::new("no-such-length");
    let address = world.serve(small_server());
    let mut client = world.client(&address, small());
    for length in [usize::MAX, usize::MAX - 3, u32::MAX as usize] {
        let call = ClientCall::new(ECHO).args(*b"four").expect_reply(length);
        assert!(matches!(client.call(call).map_err(CallError::from), Err(CallError::TooLong { .. })), "{length}");
        assert!(matches!(client.prepare(ECHO, length), Err(CallError::TooLong { .. })), "{length}");
    }
    let first = client.first();
    for position in [usize::MAX, 0xffff_fffc, 1 << 32] {
        for prepared in [false, true] {
            let call = match prepared {
                false => ClientCall::new(STORE).args(vec![0; 8]),
                true => client.prepare(STORE, 8).unwrap(),
            };
            let data = client.alloc(first, 100).unwrap();
            let result = client.call(call.read_chunk(position, data)).map(drop).map_err(CallError::from);
            let error = result.expect_err("no such position").to_string();
            assert!(error.contains("Read chunk at byte"), "{position:#x}: {error}");
        }
    }
    echo(&mut client, b"on").unwrap();
}
