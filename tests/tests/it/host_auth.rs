//! Host authentication in CONNPROP, and policies for unauthenticated peers.

use rpcrdma::CallProgress;
use rpcrdma::proto::auth::{AuthHandshake, AuthStep, Mechanism, Role};
use rpcrdma_tests::prelude::*;

/// Returns the authenticated name of the caller's host, or nothing. The next number is the same procedure on workers.
const CALLER_NAME: u32 = 40;

fn services() -> Services {
    let name_caller = Procedure::new(|call| {
        let name = call.info().peer_identity().unwrap_or_default().to_owned();
        call.reply_mut(name.len()).expect("a short name").copy_from_slice(name.as_bytes());
        Ok(())
    })
    .read_chunks(1, 64)
    .uncounted();
    standard_and([(CALLER_NAME, name_caller.clone()), (CALLER_NAME + 1, name_caller.on_workers())])
}

fn with_policy(host_auth: AuthPolicy) -> Config {
    small_config().with(|c| c.wire.host_auth = host_auth)
}

fn serve(world: &mut World, shard: Config) -> Address {
    world.serve_with(shard.with_workers(1), services())
}

fn serving(name: &'static str, policy: AuthPolicy) -> (World, Address) {
    let mut world = World::new(name);
    let address = serve(&mut world, with_policy(policy));
    (world, address)
}

fn required(name: &str) -> AuthPolicy {
    AuthPolicy::Required(key(name))
}

fn key(name: &str) -> Arc<PreSharedKey> {
    Arc::new(PreSharedKey::new(name, name.repeat(8).as_bytes()).expect("a key"))
}

/// Returns the client's name at the server, on the shard and on a worker. The name must not depend on chunks.
fn caller_names(client: &mut LocalClient) -> [String; 2] {
    [CALLER_NAME, CALLER_NAME + 1].map(|procedure| {
        let [inline, with_chunk] = [false, true].map(|has_chunk| {
            let call = client.prepare_chunked_call(procedure, b"", if has_chunk { &[64] } else { &[] }, &[]);
            String::from_utf8(client.outcome(call).expect("a reply")).expect("a name")
        });
        assert_eq!(inline, with_chunk);
        inline
    })
}

fn refusal(result: Result<LocalClient, ConnectError>) -> String {
    match result {
        Err(error @ ConnectError::NotAuthenticated { .. }) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the server accepted the client"),
    }
}

/// A mechanism in which each end sends one message per word. A message has `len` bytes, or 400 in the client's first
/// message, and then the word.
#[derive(Clone, Copy, Debug)]
struct Words {
    words: &'static [&'static str],
    len: usize,
}

#[derive(Debug)]
struct WordsHandshake {
    mechanism: Words,
    role: Role,
    /// Index of the next word.
    next: usize,
}

impl WordsHandshake {
    fn message(&self) -> Vec<u8> {
        let len = if self.next == 0 && self.role == Role::Client { 400 } else { self.mechanism.len };
        [&vec![b'.'; len], self.mechanism.words[self.next].as_bytes()].concat()
    }
}

impl Mechanism for Words {
    fn begin(&self, role: Role) -> Box<dyn AuthHandshake> {
        Box::new(WordsHandshake { mechanism: *self, role, next: 0 })
    }
}

impl AuthHandshake for WordsHandshake {
    fn step(&mut self, message: Option<&[u8]>) -> AuthStep {
        let words = self.mechanism.words;
        let mut last = None;
        if let Some(message) = message {
            if !message.ends_with(words[self.next].as_bytes()) {
                return AuthStep::Failed(AuthError::WrongProof);
            }
            last = (self.role == Role::Server).then(|| self.message());
            self.next += 1;
        }
        match (self.next == words.len(), self.role) {
            (true, Role::Server) => AuthStep::Done { peer: "a client of words".into(), last },
            (true, Role::Client) => AuthStep::Done { peer: "a server of words".into(), last: None },
            (false, _) => AuthStep::Continue(last.unwrap_or_else(|| self.message())),
        }
    }
}

#[test]
fn host_authentication_may_take_several_messages() {
    let mut world = World::new("several-messages");
    for (mode, len) in
        [(CreditMode::V2Windowed, 3), (CreditMode::V2Windowed, 15_000), (CreditMode::V2Incremental, 10_001)]
    {
        let policy = AuthPolicy::Required(Arc::new(Words { words: &["one", "two", "three", "four"], len }));
        let config = with_policy(policy).with(|c| c.wire.credit_mode = mode);
        let address = serve(&mut world, config.clone());
        let mut client = world.client(&address, config);
        assert_eq!(caller_names(&mut client), ["a client of words"; 2], "{mode:?}, {len} bytes");
        // The client sends four messages. The first fits one part; each of the others needs `len / 4096` parts, rounded
        // up.
        let parts = 1 + 3 * (len as u64).div_ceil(4096);
        let received = world.stats().messages.received;
        assert!(received >= parts + 2, "at least {parts} + 2 messages for {len} bytes, not {received}");
        for seed in 0..20 {
            mirror(&mut client, seed, &[5000]).expect("an authenticated client is served");
        }
    }
}

#[test]
fn a_shared_key_authenticates_the_client_by_its_name() {
    let keys = PreSharedKey::new("blue", "blue".repeat(8).as_bytes());
    let keys = keys.and_then(|keys| keys.and("red", "red".repeat(8).as_bytes())).expect("two keys");
    let (world, address) = serving("psk", AuthPolicy::Required(Arc::new(keys)));
    for name in ["red", "blue"] {
        let mut client = world.client(&address, with_policy(required(name)));
        assert_eq!(caller_names(&mut client), [name; 2]);
        drop(client);
        // The server reuses the allocations of served calls for later connections, so nothing may be left in them.
        world.assert_server_clean();
    }
    let stats = world.stats();
    assert_eq!(stats.peer_faults, 0);
    let stranger = LocalClient::connect(&address, small_client(with_policy(required("green"))));
    assert!(refusal(stranger).contains(&AuthError::KeyRefused.to_string()));
    assert!(wait_until(|| world.stats().peer_faults == 1), "the fault is counted");
}

#[test]
fn a_wrong_key_ends_the_connection_at_the_end_that_detects_it() {
    let impostor = Arc::new(PreSharedKey::new("blue", &[9; 32]).expect("a key"));
    let (_world, address) = serving("wrong-key", AuthPolicy::Optional(impostor));
    for policy in [required("blue"), AuthPolicy::Optional(key("blue"))] {
        let reason = refusal(LocalClient::connect(&address, small_client(with_policy(policy))));
        assert!(reason.contains(&AuthError::WrongProof.to_string()), "{reason}");
    }
}

#[test]
fn the_policies_of_both_ends_decide_about_unauthenticated_peers() {
    let mut world = World::new("policy");
    let (off, optional, required) = (AuthPolicy::Off, AuthPolicy::Optional(key("blue")), required("blue"));
    let missing = AuthError::Missing.to_string();
    // Policies of server and client, and the client's name at the server or the end that closes the connection.
    for (server, client, outcome) in [
        (&off, &off, Ok("")),
        (&off, &optional, Ok("")),
        (&optional, &off, Ok("")),
        (&optional, &optional, Ok("blue")),
        (&optional, &required, Ok("blue")),
        (&required, &optional, Ok("blue")),
        (&required, &off, Err("server")),
        (&off, &required, Err("client")),
    ] {
        let in_version_2 = |host_auth: &AuthPolicy| with_policy(host_auth.clone()).with(|c| c.wire.version_1 = false);
        let address = serve(&mut world, in_version_2(server));
        let result = LocalClient::connect(&address, small_client(in_version_2(client)));
        match outcome {
            Ok(name) => assert_eq!(caller_names(&mut result.expect("a connection")), [name; 2]),
            Err("client") => assert!(refusal(result).contains(&missing)),
            Err(_) => {
                assert!(refusal(result).contains(&AuthError::KeyRequired.to_string()));
                assert!(wait_until(|| world.stats().peer_faults == 1));
            }
        }
    }
    // Version 1 has no properties, so neither end can authenticate.
    let in_version_1 =
        |host_auth: &AuthPolicy| with_policy(host_auth.clone()).with(|c| c.wire.credit_mode = CreditMode::V1);
    let address = serve(&mut world, with_policy(optional.clone()));
    assert_eq!(caller_names(&mut world.client(&address, in_version_1(&off))), [""; 2]);
    let address = serve(&mut world, with_policy(required.clone()));
    let mut client = world.client(&address, in_version_1(&off));
    for _ in 0..5 {
        let error = echo(&mut client, b"refused").expect_err("version 1 cannot authenticate");
        assert_eq!(error, CallError::Transport(ErrorBody::Vers { low: 2, high: 2 }));
        assert_eq!(error.progress(), CallProgress::Answered);
    }
    drop(client);
    let address = serve(&mut world, in_version_1(&off));
    assert_eq!(caller_names(&mut world.client(&address, with_policy(optional))), [""; 2]);
    let reason = refusal(LocalClient::connect(&address, small_client(with_policy(required.clone()))));
    assert!(reason.contains(&missing), "{reason}");
    // Neither end starts with a configuration that admits no peer.
    let config = ServerConfig { shard: in_version_1(&required), ..small_server() };
    let started = Server::start(&world.address(), standard_services(), &config).map(drop);
    let connected = LocalClient::connect(&address, small_client(in_version_1(&required))).map(drop);
    for reason in
        [connected.expect_err("a contradiction").to_string(), started.expect_err("a contradiction").to_string()]
    {
        assert!(
            reason.contains("invalid wire.credit_mode `v1`") && reason.contains("wire.host_auth is required"),
            "{reason}"
        );
    }
}

/// A CONNPROP of a raw peer with an authentication message.
fn connprop(peer: &RawPeer, message: &[u8]) -> Vec<u8> {
    let mut buffer = [0; 1024];
    let properties = Properties { host_auth: Some(message), windowed_credits: true, ..Properties::default() };
    let set = properties.emit(&mut buffer, Revision::Ietf00).expect("space");
    peer.message(7, Flags::NONE, Body::Connprop(set), &[])
}

#[test]
fn calls_before_the_end_of_authentication_are_refused() {
    let (world, address) = serving("too-early", required("blue"));
    let mut peer = RawPeer::connect_silently(&address);
    let opening = [&[1, 1, 4][..], b"blue", &[5; 32]].concat();
    peer.send(&connprop(&peer, &opening));
    let challenge = peer.receive().expect("a CONNPROP");
    assert!(challenge.len() <= 1024, "the size of the client's Receives is not negotiated yet");
    let properties = challenge.properties();
    assert_eq!(properties.host_auth.map(<[u8]>::len), Some(65), "message 2");
    peer.windowed = properties.windowed_credits;

    peer.call_as(1, ECHO, Chunks::NONE, b"now!");
    assert_eq!(peer.receive().expect("an error").error(), (1, ErrorBody::System));
    assert_eq!(world.stats().peer_faults, 0, "the client may still authenticate");

    // The third authentication message is invalid.
    peer.send(&connprop(&peer, &[3; 33]));
    peer.wait_until_over();
    assert_eq!(world.stats().peer_faults, 1);
}

#[test]
fn a_client_without_the_key_is_refused_at_its_first_attempt() {
    let (world, address) = serving("no-key", required("blue"));
    let mut config = small_client(with_policy(AuthPolicy::Off));
    config.connect.reconnect_attempts = 10;
    assert_contains(refusal(LocalClient::connect(&address, config.clone())), &[&AuthError::KeyRequired.to_string()]);
    assert_eq!(world.stats().peer_faults, 1, "one attempt, without a fallback to version 1");
    let Err(error) = Client::connect(&address, config) else { panic!("the server accepted the client") };
    assert!(matches!(error, ConnectError::NotAuthenticated { .. }), "{error}");
    assert_eq!(world.stats().peer_faults, 2);
}

#[test]
fn calls_of_a_client_without_the_key_of_a_restarted_server_are_not_executed() {
    let (mut world, address) = World::standard("new-key", with_policy(AuthPolicy::Off));
    let mut config = small_client(with_policy(AuthPolicy::Off));
    config.connect.reconnect_attempts = 1000;
    let mut client = LocalClient::connect(&address, config).expect("no key is required");
    echo(&mut client, b"once").expect("a reply");
    drop(world.take_server());
    let first = client.first();
    client.poll_quietly_until(|client| !client.is_established(first));
    assert!(client.close_reason(first).is_none(), "the client reconnects");
    client.begin(ECHO, b"", 7);
    world.serve_at(&address, with_policy(required("blue")), standard_services());
    assert_eq!(client.end(), (7, Err(CallError::NotAuthenticated)));
    assert_eq!(client.close_reason(first).map(|reason| reason.kind()), Some(CloseReasonKind::NotAuthenticated));
    assert_eq!(world.stats().peer_faults, 1, "the client was refused once");
}
