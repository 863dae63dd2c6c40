//! Errors of misconfiguration and misuse: each names its cause, the knob and the limit.

use rpcrdma::{StartError, StartErrorKind};
use rpcrdma_tests::prelude::*;

/// Services whose only procedure, number 7, is this one.
fn single_service(procedure: Procedure) -> Services {
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, 7, procedure);
    services
}

fn empty_procedure() -> Procedure {
    Procedure::new(|_| Ok(()))
}

#[track_caller]
fn start_error(world: &World, services: Services, config: impl IntoServerConfig) -> StartError {
    Server::start(&world.address(), services, &config.into_server_config()).expect_err("an invalid configuration")
}

/// Errors of both kinds of clients that connect with this configuration.
fn connect_errors(address: &Address, config: &ClientConfig) -> [String; 2] {
    let local = LocalClient::connect(address, config.clone()).map(drop).expect_err("an invalid configuration");
    let threaded = Client::connect(address, config.clone()).map(drop).expect_err("an invalid configuration");
    [local.to_string(), threaded.to_string()]
}

#[test]
fn a_procedure_on_workers_needs_workers() {
    let mut world = World::new("no-workers");
    let error = start_error(&world, single_service(empty_procedure().on_workers()), small_config());
    assert_eq!(error.kind(), StartErrorKind::Config, "{error}");
    let text = error.to_string();
    assert!(text.starts_with("procedure 7 of program 0x20000001, version 3: "), "{text}");
    assert!(text.contains("`Procedure::on_workers`") && text.contains("`ServerConfig::workers`"), "{text}");
    drop(
        Server::start(
            &world.address(),
            single_service(empty_procedure().on_workers()),
            &small_config().with_workers(1),
        )
        .expect("workers"),
    );
    // A server whose services belong to one shard needs workers for such procedures, too.
    let local = || single_service(empty_procedure().on_workers()).to_local();
    let error =
        LocalServer::start_with(&world.address(), |_| local(), &small_server()).expect_err("a server without workers");
    assert_eq!(error.to_string(), text);
    let make = move |_: &ShardSetup<'_>| Ok(Application { services: local(), task: None });
    let error = Server::start_with(&world.address(), make, &small_server()).expect_err("a server without workers");
    assert_eq!(error.to_string(), text);
    // A client runs all procedures on its shard. This is documented, and lets a server share the handlers.
    let address = world.serve(small_config());
    let services = Some(Arc::new(single_service(empty_procedure().on_workers())));
    drop(LocalClient::connect(&address, ClientConfig { services, ..small_client(small_config()) }).expect("a client"));
}

#[test]
fn a_declaration_larger_than_any_buffer_is_refused() {
    let (mut world, address) = World::standard("declared", small_config());
    let memory = small_config().memory;
    let longest = memory.bulk_buffers.iter().chain(&memory.long_buffers).map(|class| class.0).max().unwrap();
    let add = format!("add buffers of {} bytes to `memory.long_buffers`", longest + 64 + 24);
    for (procedure, declared, knob, end) in [
        (empty_procedure().read_chunks(1, longest + 1), "read_chunks", "`memory.bulk_buffers`", ""),
        (empty_procedure().write_chunks(2, longest + 1), "write_chunks", "`memory.bulk_buffers`", ""),
        (empty_procedure().max_reply(longest), "max_reply", "`memory.long_buffers`", &add),
        (empty_procedure().max_reply(usize::MAX), "max_reply", "`memory.long_buffers`", ""),
    ] {
        let error = start_error(&world, single_service(procedure.clone()), small_config());
        let text = error.to_string();
        assert_eq!(error.kind(), StartErrorKind::Config, "{text}");
        for part in ["procedure 7 of program 0x20000001", declared, knob, &longest.to_string()] {
            assert!(text.contains(part) && text.ends_with(end), "{text}");
        }
        // The services of a client are checked, too.
        let config =
            ClientConfig { services: Some(Arc::new(single_service(procedure))), ..small_client(small_config()) };
        assert!(connect_errors(&address, &config)[0].contains(declared));
    }
    for procedure in [
        empty_procedure().read_chunks(4, longest).write_chunks(4, longest).max_reply(longest - 200),
        empty_procedure().write_chunks(1, 4 * longest).results_from_handler(),
    ] {
        world.serve_with(small_server(), single_service(procedure));
    }
}

/// The check precedes the allocation, because the kernel kills a process when memory runs out.
#[test]
fn more_memory_than_the_host_has_is_refused() {
    let (world, address) = World::standard("memory", small_config());
    let available = usize::try_from(rpcrdma_mempool::MemoryLimits::read().available).unwrap();
    let too_much = small_config().with(|c| c.memory.bulk_buffers = vec![(1 << 20, (available >> 20) + 1024)]);
    let error = start_error(&world, single_service(empty_procedure()), too_much.clone());
    let text = chain(&error);
    assert_eq!(error.kind(), StartErrorKind::Memory, "{text}");
    assert!(text.starts_with("buffers exceed") && text.contains("`memory.bulk_buffers`"), "{text}");
    assert!(text.contains(" bytes of memory that are available: ") && text.contains(" available: "), "{text}");
    // Clients allocate this memory for their first chunk, and still return the error immediately.
    for error in connect_errors(&address, &small_client(too_much)) {
        assert!(error.contains("`memory.bulk_buffers`"), "{error}");
    }
    // One shard could have this memory; eight cannot.
    let half = small_config().with(|c| c.memory.message_buffers = available / 4 / 3 / 4096);
    let text =
        start_error(&world, single_service(empty_procedure()), ServerConfig { shards: 8, ..half.into_server_config() })
            .to_string();
    assert!(text.starts_with("buffers of 8 shards") && text.contains("`memory.message_buffers`"), "{text}");
}

#[test]
fn errors_name_the_knob_that_was_set() {
    let (mut world, address) = World::standard("knobs", small_config());
    for receive_size in [0, 2 << 20] {
        let config = small_config().with(|c| c.wire.receive_size = receive_size);
        let server = start_error(&world, single_service(empty_procedure()), config.clone());
        assert_eq!(server.config().map(|error| error.knob), Some("wire.receive_size"));
        for text in connect_errors(&address, &small_client(config)).into_iter().chain([server.to_string()]) {
            assert!(text.starts_with(&format!("invalid wire.receive_size `{receive_size}`: expected ")), "{text}");
        }
    }
    // The fabric supports the maximum of the knob.
    let largest = small_config().with(|c| {
        (c.wire.receive_size, c.limits.credits) = (1 << 20, 4);
        (c.memory.receives, c.memory.message_buffers) = (257, 4);
    });
    let address = world.serve(largest.clone().with(|c| c.memory.long_buffers = vec![(2 << 20, 1)]));
    echo(&mut world.client(&address, largest), b"a short call").unwrap();
}

#[test]
fn a_message_without_a_free_buffer_differs_from_one_that_is_too_long() {
    let (world, address) = World::standard("too-long", small_config());
    let mut client = world.client(&address, small_config().with(|c| c.memory.bulk_buffers = vec![(4096, 2)]));
    let first = client.first();
    let error = client.alloc(first, 4097).map(drop).unwrap_err();
    assert_eq!(error, CallError::TooLong { needed: 4097, limit: 4096, knob: Knob::BULK_BUFFERS });
    assert_eq!(error.to_string(), format!("message or chunk of 4097 bytes exceeds 4096 ({})", Knob::BULK_BUFFERS));
    let buffers = [client.alloc(first, 4096).unwrap(), client.alloc(first, 1).unwrap()];
    assert_eq!(client.stats().exposed_buffers, 2);
    let error = client.alloc(first, 4000).map(drop).unwrap_err();
    assert_eq!(error, CallError::NoMemory { needed: 4000, knob: Knob::BULK_BUFFERS });
    assert!(error.to_string().starts_with("no buffer of 4000 bytes is free"), "{error}");
    drop(buffers);
    store(&mut client, 1, &[4000]).unwrap();
    assert_eq!(client.stats().exposed_buffers, 0);

    // An error of a message names the knob of the buffers for its length.
    let error = client.prepare(ECHO, 2 << 20).map(drop).unwrap_err();
    assert!(matches!(error, CallError::TooLong { limit: 0x10_0000, knob: Knob::LONG_BUFFERS, .. }), "{error}");
    for (len, knob) in [(8 << 10, Knob::LONG_BUFFERS), (2000, Knob::MESSAGE_BUFFERS), (8, Knob::SMALL_BUFFERS)] {
        let calls = std::iter::from_fn(|| Some(client.prepare(ECHO, len))).take(10_000);
        let error = calls.collect::<Result<Vec<_>, _>>().map(drop).unwrap_err();
        assert!(matches!(error, CallError::NoMemory { knob: named, .. } if named == knob), "{len}: {error}");
    }
    // A client that is configured without chunk memory cannot allocate a chunk.
    let mut client = world.client(&address, small_config().with(|c| c.memory.bulk_buffers = vec![]));
    let error = client.alloc(first, 1).map(drop).unwrap_err();
    assert_eq!(error, CallError::TooLong { needed: 1, limit: 0, knob: Knob::BULK_BUFFERS });
}

/// A caller that waits for a reply would otherwise wait forever.
#[test]
fn no_reply_from_a_two_way_procedure_is_a_system_error() {
    for_each([CreditMode::V2Windowed, CreditMode::V1], |mode| {
        let no_reply = || Procedure::new(|_| Err(Refusal::NoReply));
        let services = standard_and([(20, no_reply()), (21, no_reply().on_workers())]);
        let (_world, mut client) = World::pair_with("no-reply", small_config().with_workers(1), services, mode);
        for procedure in [20, 21] {
            let call = client.prepare(procedure, 0).unwrap().timeout(Duration::from_secs(20));
            assert_eq!(client.outcome(call).map(drop), Err(CallError::Refused(Refusal::SystemError)));
        }
        echo(&mut client, b"on").unwrap();
    });
}

#[test]
fn a_file_that_is_not_a_socket_is_not_reported_as_in_use() {
    if test_fabric::on_device() {
        return;
    }
    // This world excludes other tests until the directory is removed, because those tests count descriptors.
    let _world = World::new("plain-file");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("server");
    std::fs::write(&path, "a file of another program").unwrap();
    let address = format!("soft:{}", path.display()).parse().unwrap();
    let error = Server::start(&address, single_service(empty_procedure()), &small_server()).err().unwrap().to_string();
    let parts = ["there is a plain file of user", ", not a socket; choose another name, or remove it"];
    assert!(parts.iter().all(|part| error.contains(part)) && !error.contains("in use"), "{error}");
    let [error, _] = connect_errors(&address, &small_client(small_config()));
    assert!(error.contains("there is a plain file, not a socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file of another program");
}

#[test]
fn error_texts_do_not_contain_their_source() {
    let io = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let world = World::new("texts");
    let shard = small_config().with(|c| c.memory.bulk_buffers = vec![(1 << 20, 1 << 30)]);
    let workers = Some(WorkerConfig { count: 0, ..Default::default() });
    let make = |_: &ShardSetup<'_>| Err("of the application".into());
    let errors: Vec<Box<dyn std::error::Error>> = vec![
        Box::new(rpcrdma_rpcbind::stream::StreamError::from(io())),
        Box::new(CloseReason::from(rpcrdma::proto::PeerFault::NotAuthenticated(AuthError::WrongProof))),
        Box::new(CallError::from(rpcrdma::proto::binding::BindingError::ReductionOff)),
        Box::new(start_error(&world, single_service(empty_procedure()), shard)),
        Box::new(start_error(&world, single_service(empty_procedure()), ServerConfig { workers, ..small_server() })),
        Box::new(start_error(&world, single_service(empty_procedure().on_workers()), small_config())),
        Box::new(Server::start_with(&world.address(), make, &small_server()).expect_err("the application refuses")),
    ];
    for error in errors {
        let mut next = Some(&*error);
        while let Some(error) = next {
            let text = error.to_string();
            assert!(!text.contains('\n') && !text.ends_with(['.', ':', ' ']) && !text.contains("  "), "{text:?}");
            next = error.source();
            if let Some(source) = next {
                assert!(!text.contains(&source.to_string()), "{text:?} repeats its source {source}");
            }
        }
    }
}
