//! Errors of users: one for each cause, with the knob and the limit.

use rpcrdma::server::LocalServer;
use rpcrdma::service::{Application, ShardSetup};
use rpcrdma::wire::rpc::ProgramNumber;
use rpcrdma::{StartError, StartErrorKind};
use rpcrdma_tests::prelude::*;

/// Services with procedure 7 only.
fn one(procedure: Procedure) -> Services {
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, 7, procedure);
    services
}

fn nothing() -> Procedure {
    Procedure::new(|_| Ok(()))
}

/// An error with all its sources, as programs print it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn refused(world: &World, services: Services, config: &ServerConfig) -> StartError {
    Server::start(&world.address(), services, config).expect_err("it contradicts itself")
}

#[test]
fn a_procedure_on_workers_needs_workers() {
    let world = World::new("no-workers");
    let error = refused(&world, one(nothing().on_workers()), &small_server());
    assert_eq!(error.kind(), StartErrorKind::Config, "{error}");
    let text = error.to_string();
    assert!(text.starts_with("procedure 7 of program 0x20000001, version 3: "), "{text}");
    assert!(text.contains("`Procedure::on_workers`") && text.contains("`ServerConfig::workers`"), "{text}");
    let config = small_server().with_workers(1);
    drop(Server::start(&world.address(), one(nothing().on_workers()), &config).expect("it has workers"));
    // Services of one shard need workers for such procedures, too.
    let local = || one(nothing().on_workers()).to_local();
    let error = LocalServer::start_with(&world.address(), |_| local(), &small_server()).expect_err("it has no workers");
    assert_eq!(error.to_string(), text);
    let make = move |_: &ShardSetup<'_>| Ok(Application { services: local(), task: None });
    let error = Server::start_with(&world.address(), make, &small_server()).expect_err("it has no workers");
    assert_eq!(error.to_string(), text);
    // A client runs all procedures on its shard. This is documented, and lets a server share the handlers.
    let mut world = world;
    let address = world.serve(small_server());
    let services = Some(Arc::new(one(nothing().on_workers())));
    drop(LocalClient::connect(&address, ClientConfig { services, ..small_client(small()) }).expect("a client"));
}

#[test]
fn a_declaration_larger_than_any_buffer_is_refused() {
    let mut world = World::new("declared");
    let longest =
        small().memory.bulk_buffers.iter().chain(&small().memory.long_buffers).map(|class| class.0).max().unwrap();
    for (procedure, declared, knob) in [
        (nothing().read_chunks(1, longest + 1), "read_chunks", "`memory.bulk_buffers`"),
        (nothing().write_chunks(2, longest + 1), "write_chunks", "`memory.bulk_buffers`"),
        (nothing().max_reply(longest), "max_reply", "`memory.long_buffers`"),
        (nothing().max_reply(usize::MAX), "max_reply", "`memory.long_buffers`"),
    ] {
        let error = refused(&world, one(procedure.clone()), &small_server());
        let text = error.to_string();
        assert_eq!(error.kind(), StartErrorKind::Config, "{text}");
        assert!(text.contains("procedure 7 of program 0x20000001") && text.contains(declared), "{text}");
        assert!(text.contains(knob) && text.contains(&longest.to_string()), "{text}");
        if declared == "max_reply" && !text.contains(&usize::MAX.to_string()) {
            let add = format!("add some of {} bytes to `memory.long_buffers`", longest + 64 + 24);
            assert!(text.ends_with(&add), "{text}");
        }
        // The services of a client are checked, too.
        let address = world.serve(small_server());
        let services = Some(Arc::new(one(procedure)));
        let config = ClientConfig { services, ..small_client(small()) };
        let error = LocalClient::connect(&address, config).expect_err("it contradicts itself").to_string();
        assert!(error.contains(declared), "{error}");
    }
    for procedure in [
        nothing().read_chunks(4, longest).write_chunks(4, longest).max_reply(longest - 200),
        nothing().write_chunks(1, 4 * longest).results_from_handler(),
    ] {
        world.serve_with(small_server(), one(procedure));
    }
}

/// The check precedes the allocation, as the kernel kills a process when memory runs out.
#[test]
fn more_memory_than_the_host_has_is_refused() {
    let mut world = World::new("memory");
    let available = usize::try_from(rpcrdma_mempool::MemoryLimits::read().available).unwrap();
    let most = small().with(|c| c.memory.bulk_buffers = vec![(1 << 20, (available >> 20) + 1024)]);
    let address = world.serve(small_server());
    let error = refused(&world, one(nothing()), &ServerConfig { shard: most.clone(), ..small_server() });
    let text = chain(&error);
    assert_eq!(error.kind(), StartErrorKind::Memory, "{text}");
    assert!(text.starts_with("buffers exceed") && text.contains("`memory.bulk_buffers`"), "{text}");
    assert!(text.contains(" bytes of memory that are available: "), "{text}");
    assert!(text.contains(" available: ") && text.contains('`'), "a limit, and a command: {text}");
    // Clients allocate this memory for their first chunk, and still return the error at once.
    for error in [
        LocalClient::connect(&address, small_client(most.clone())).err().map(|error| error.to_string()),
        Client::connect(&address, small_client(most)).err().map(|error| error.to_string()),
    ] {
        assert!(error.as_deref().is_some_and(|text| text.contains("`memory.bulk_buffers`")), "{error:?}");
    }
    // One shard could have this memory; eight cannot.
    let half = small().with(|c| c.memory.message_buffers = available / 4 / 3 / 4096);
    let config = ServerConfig { shard: half, shards: 8, ..small_server() };
    let text = refused(&world, one(nothing()), &config).to_string();
    assert!(text.starts_with("buffers of 8 shards") && text.contains("`memory.message_buffers`"), "{text}");
}

#[test]
fn credits_have_receives() {
    let world = World::new("unbacked");
    for (config, knob) in [
        (small().with(|c| (c.memory.receives, c.limits.credits) = (256, 128)), "limits.credits is 128: 4 to 127"),
        (
            small().with(|c| (c.memory.receives, c.limits.max_credits) = (512, 513)),
            "limits.max_credits is 513: 4 to 512",
        ),
    ] {
        let text = refused(&world, one(nothing()), &ServerConfig { shard: config, ..small_server() }).to_string();
        assert!(text.starts_with(knob) && text.contains("memory.receives"), "{text}");
    }
    small().with(|c| (c.memory.receives, c.limits.credits) = (256, 127)).validate().unwrap();
}

#[test]
fn the_knob_that_is_named_is_the_one_that_was_set() {
    let (mut world, address) = World::standard("knobs", small_server());
    for receive_size in [0, 2 << 20] {
        let config = small().with(|c| c.wire.receive_size = receive_size);
        let server = refused(&world, one(nothing()), &ServerConfig { shard: config.clone(), ..small_server() });
        assert_eq!(server.config().map(|error| error.knob), Some("wire.receive_size"));
        for text in [
            server.to_string(),
            LocalClient::connect(&address, small_client(config.clone())).err().unwrap().to_string(),
            Client::connect(&address, small_client(config)).err().unwrap().to_string(),
        ] {
            assert!(text.starts_with(&format!("wire.receive_size is {receive_size}: ")), "{text}");
        }
    }
    // The fabric supports the maximum of the knob.
    let most = small().with(|c| {
        c.wire.receive_size = 1 << 20;
        c.memory.receives = 257;
        c.memory.message_buffers = 4;
        c.limits.credits = 4;
    });
    let address = world.serve(most.clone().with(|c| c.memory.long_buffers = vec![(2 << 20, 1)]));
    let mut client = world.client(&address, most);
    echo(&mut client, b"as long as they get").unwrap();
}

#[test]
fn too_long_differs_from_no_free_buffer() {
    let (world, address) = World::standard("too-long", small_server());
    let mut client = world.client(&address, small().with(|c| c.memory.bulk_buffers = vec![(4096, 2)]));
    let first = client.first();
    let error = client.alloc(first, 4097).map(drop).unwrap_err();
    assert_eq!(error, CallError::TooLong { needed: 4097, limit: 4096, knob: Knob::BULK_BUFFERS });
    assert_eq!(error.to_string(), format!("message or chunk of 4097 bytes exceeds 4096 ({})", Knob::BULK_BUFFERS));
    let held = [client.alloc(first, 4096).unwrap(), client.alloc(first, 1).unwrap()];
    let error = client.alloc(first, 4000).map(drop).unwrap_err();
    assert_eq!(error, CallError::NoMemory { needed: 4000, knob: Knob::BULK_BUFFERS });
    assert!(error.to_string().starts_with("no buffer of 4000 bytes is free"), "{error}");
    drop(held);
    client.alloc(first, 4000).unwrap();

    // Messages, by the buffer class of their length.
    let error = client.prepare(ECHO, 2 << 20).map(drop).unwrap_err();
    assert!(matches!(error, CallError::TooLong { limit: 0x10_0000, knob: Knob::LONG_BUFFERS, .. }), "{error}");
    for (len, knob) in [(8 << 10, Knob::LONG_BUFFERS), (2000, Knob::MESSAGE_BUFFERS), (8, Knob::SMALL_BUFFERS)] {
        let mut held = Vec::new();
        let error = loop {
            match client.prepare(ECHO, len) {
                Ok(call) => held.push(call),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, CallError::NoMemory { knob: of, .. } if of == knob), "{len}: {error}");
    }
    // A client without chunk memory never gets any.
    let mut client = world.client(&address, small().with(|c| c.memory.bulk_buffers = vec![]));
    let error = client.alloc(first, 1).map(drop).unwrap_err();
    assert_eq!(error, CallError::TooLong { needed: 1, limit: 0, knob: Knob::BULK_BUFFERS });
}

#[test]
fn call_errors_name_the_knob() {
    let too_many = CallError::TooManyCalls { limit: 8 }.to_string();
    assert!(too_many.starts_with("8 calls") && too_many.contains("limits.max_calls"), "{too_many}");
    let closed = CallError::Closed.to_string();
    assert!(closed.starts_with("not connected") && closed.contains("`close_reason`"), "{closed}");
    let system = CallError::Transport(ErrorBody::System).to_string();
    assert!(system.contains("peer lacks memory") && system.contains("see its log"), "{system}");
    let other = CallError::Transport(ErrorBody::ReplyResource { length_needed: 77 }).to_string();
    assert!(other.contains("(reply needs 77 bytes)"), "{other}");
}

#[test]
fn a_fifth_chunk_is_an_error() {
    let (_world, address) = World::standard("fifth-chunk", small_server());
    let mut client = Client::connect(&address, small_client(small())).unwrap();
    let error = Err(Defect::TooManyChunks { limit: MAX_CHUNKS }.into());
    let many = (0..=MAX_CHUNKS).fold(ClientCall::new(LOAD), |call, _| call.write_chunk(4));
    assert_eq!(client.call(many).map(drop).map_err(CallError::from), error);
    let mut many = ClientCall::new(STORE).args([0; 4]);
    for n in 0..=MAX_CHUNKS {
        many = many.read_chunk(4 + 8 * n, client.alloc(8).unwrap());
    }
    assert_eq!(client.call(many).map(drop).map_err(CallError::from), error);
    client.call(ClientCall::new(ECHO)).expect("the connection lives on");
}

/// Otherwise its caller would wait forever.
#[test]
fn no_reply_of_an_ordinary_procedure_is_a_system_error() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V1] {
        let config = small_server().with_workers(1);
        let mut services = services_of(&config);
        let mute = || Procedure::new(|_| Err(Refusal::NoReply));
        services.add(PROGRAM, VERSION, 20, mute()).add(PROGRAM, VERSION, 21, mute().on_workers());
        let (_world, mut client) = World::pair_with("no-reply", config, services, scheme);
        for procedure in [20, 21] {
            let call = client.prepare(procedure, 0).unwrap().timeout(Duration::from_secs(20));
            assert_eq!(client.outcome(call).map(drop), Err(CallError::Refused(Refusal::SystemError)), "{scheme:?}");
        }
        echo(&mut client, b"on").unwrap();
    }
}

#[test]
fn a_file_that_is_no_socket_is_not_address_in_use() {
    if place::on_device() {
        return;
    }
    // Excludes other tests until the directory is gone, as they count descriptors.
    let _world = World::new("plain-file");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("server");
    std::fs::write(&path, "a file of somebody's").unwrap();
    let address = format!("soft:{}", path.display()).parse().unwrap();
    let error = Server::start(&address, one(nothing()), &small_server()).err().unwrap().to_string();
    assert!(
        error.contains("there is a plain file of user")
            && error.contains(", no socket; remove it")
            && !error.contains("in use"),
        "{error}"
    );
    let error = LocalClient::connect(&address, small_client(small())).err().unwrap().to_string();
    assert!(error.contains("there is a plain file, no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file of somebody's");
}

#[test]
fn programs_of_nobody_in_particular_are_hexadecimal() {
    let text = [100_003, 0x1FFF_FFFF, 0x2000_0000, 0x2000_0001].map(|number| ProgramNumber(number).to_string());
    assert_eq!(text, ["100003", "536870911", "0x20000000", "0x20000001"]);
}

/// All errors can move to any thread, and no text repeats its source.
#[test]
fn errors_are_send_and_repeat_no_cause() {
    fn any_thread<T: std::error::Error + Send + Sync + 'static>() {}
    any_thread::<CallError>();
    any_thread::<rpcrdma::InvalidCall>();
    any_thread::<Refusal>();
    any_thread::<rpcrdma::client::ConnectError>();
    any_thread::<StartError>();
    any_thread::<rpcrdma::server::Undrained>();
    any_thread::<CloseReason>();
    any_thread::<rpcrdma::ResizeError>();
    any_thread::<rpcrdma::MemError>();
    any_thread::<rpcrdma::FabricError>();
    any_thread::<rpcrdma::ConfigError>();
    any_thread::<rpcrdma::AddressError>();
    any_thread::<rpcrdma::service::NoResult>();
    any_thread::<rpcrdma::service::ResultTooLong>();
    any_thread::<rpcrdma_rpcbind::RpcbindError>();
    any_thread::<rpcrdma_rpcbind::stream::StreamError>();
    any_thread::<rpcrdma::proto::binding::BindingError>();
    any_thread::<rpcrdma::proto::auth::AuthError>();
    any_thread::<rpcrdma::auth::KeyError>();

    let io = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let world = World::new("texts");
    let shard = small().with(|c| c.memory.bulk_buffers = vec![(1 << 20, 1 << 30)]);
    let workers = Some(WorkerConfig { count: 0, ..Default::default() });
    let make = |_: &ShardSetup<'_>| Err("of the application".into());
    let errors: Vec<Box<dyn std::error::Error>> = vec![
        Box::new(rpcrdma_rpcbind::stream::StreamError::from(io())),
        Box::new(CloseReason::from(rpcrdma::proto::PeerFault::NotAuthenticated(
            rpcrdma::proto::auth::AuthError::WrongProof,
        ))),
        Box::new(CallError::from(rpcrdma::proto::binding::BindingError::ReductionOff)),
        Box::new(refused(&world, one(nothing()), &ServerConfig { shard, ..small_server() })),
        Box::new(refused(&world, one(nothing()), &ServerConfig { workers, ..small_server() })),
        Box::new(refused(&world, one(nothing().on_workers()), &small_server())),
        Box::new(Server::start_with(&world.address(), make, &small_server()).expect_err("it is refused")),
    ];
    for error in errors {
        let mut of = Some(&*error);
        while let Some(error) = of {
            let text = error.to_string();
            assert!(!text.contains('\n') && !text.ends_with(['.', ':', ' ']) && !text.contains("  "), "{text:?}");
            of = error.source();
            if let Some(source) = of {
                assert!(!text.contains(&source.to_string()), "{text:?} has its source {source}");
            }
        }
    }
}
