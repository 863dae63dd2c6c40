//! Host authentication between honest ends, with a wrong key, and under attack.

use super::*;

const KEY: &[u8] = &[0x5A; 32];

fn keys() -> PreSharedKey {
    PreSharedKey::new("host-a", KEY).expect("long enough")
}

fn required(keys: PreSharedKey) -> AuthPolicy {
    AuthPolicy::Required(Arc::new(keys))
}

fn client(keys: PreSharedKey) -> HostAuth {
    HostAuth::new(&required(keys), Role::Client)
}

fn server(keys: PreSharedKey) -> HostAuth {
    HostAuth::new(&required(keys), Role::Server)
}

fn open(client: &mut HostAuth) -> Vec<u8> {
    client.open().expect("random numbers").expect("an opening")
}

fn answer(end: &mut HostAuth, message: &[u8]) -> Vec<u8> {
    end.receive(Some(message)).expect("no failure").expect("an answer")
}

#[test]
fn both_ends_prove_that_they_have_the_key() {
    let (mut client, mut server) = (client(keys()), server(keys()));
    assert_eq!(server.open(), Ok(None), "the client sends first");
    let opening = open(&mut client);
    assert!(!server.permits_calls() && !client.permits_calls());
    let challenge = answer(&mut server, &opening);
    assert!(!server.permits_calls(), "the client has proved nothing yet");
    let proof = answer(&mut client, &challenge);
    assert_eq!((client.permits_calls(), client.peer()), (true, Some("host-a")));
    assert_eq!(server.receive(Some(&proof)), Ok(None));
    assert_eq!((server.permits_calls(), server.peer()), (true, Some("host-a")));
    assert!(!server.in_progress() && !client.in_progress());
    assert!([opening, challenge, proof].iter().all(|message| message.len() <= MAX_OPENING));
}

#[test]
fn other_properties_may_follow_authentication() {
    let (mut client, mut server) = (client(keys()), server(keys()));
    let challenge = answer(&mut server, &open(&mut client));
    let proof = answer(&mut client, &challenge);
    assert_eq!(server.receive(Some(&proof)), Ok(None));
    assert_eq!(server.receive(None), Ok(None), "CONNPROP without a message");
    assert!(server.permits_calls());
    assert_eq!(server.receive(Some(&proof)), Err(AuthError::Unexpected), "a second exchange is refused");
    assert!(!server.permits_calls());
}

#[test]
fn a_server_accepts_any_of_its_keys() {
    let two_keys = || keys().and("host-b", &[9; 16]).expect("long enough");
    let (mut client, mut server) =
        (client(PreSharedKey::new("host-b", &[9; 16]).expect("long enough")), server(two_keys()));
    let challenge = answer(&mut server, &open(&mut client));
    let proof = answer(&mut client, &challenge);
    assert_eq!(server.receive(Some(&proof)), Ok(None));
    assert_eq!(server.peer(), Some("host-b"));
}

#[test]
fn either_end_detects_a_wrong_key() {
    let wrong = || PreSharedKey::new("host-a", &[0x5B; 32]).expect("long enough");
    let (mut honest, mut impostor) = (client(keys()), server(wrong()));
    let challenge = answer(&mut impostor, &open(&mut honest));
    assert_eq!(honest.receive(Some(&challenge)), Err(AuthError::WrongProof));
    assert!(!honest.permits_calls());
    assert_eq!(honest.receive(None), Err(AuthError::WrongProof), "the failure is permanent");
    // The other end knows only that no proof has arrived for this name.
    assert_eq!(impostor.claimed(), Some("host-a"));

    let (mut honest, mut impostor) = (server(keys()), client(wrong()));
    answer(&mut honest, &open(&mut impostor));
    // The impostor cannot check the server's proof, but sends a proof of its own.
    let mut proof = vec![3];
    proof.extend_from_slice(&[0; 32]);
    assert_eq!(honest.receive(Some(&proof)), Err(AuthError::WrongProof));
    assert!(!honest.permits_calls());
}

#[test]
fn an_unknown_key_is_refused() {
    let (mut client, mut server) = (client(PreSharedKey::new("host-c", KEY).expect("long enough")), server(keys()));
    assert_eq!(server.receive(Some(&open(&mut client))), Err(AuthError::UnknownKey));
}

#[test]
fn messages_cannot_be_reflected() {
    // An attacker without the key answers the client with the client's own messages.
    let mut victim = client(keys());
    let opening = open(&mut victim);
    assert_eq!(victim.receive(Some(&opening)), Err(AuthError::Malformed));
    // The attacker sends the server's own proof back. A proof covers the role of its maker, so a client's differs.
    let mut victim = server(keys());
    let challenge = answer(&mut victim, &open(&mut client(keys())));
    let mut proof = vec![3];
    proof.extend_from_slice(&challenge[33..]);
    assert_eq!(victim.receive(Some(&proof)), Err(AuthError::WrongProof));
    // The attacker opens a second connection to the same server, with the nonce of the first as its own.
    let mut first = server(keys());
    let mut client = client(keys());
    let challenge = answer(&mut first, &open(&mut client));
    let mut opening = vec![1, 1, 6];
    opening.extend_from_slice(b"host-a");
    opening.extend_from_slice(&challenge[1..33]);
    let mut second = server(keys());
    let oracle = answer(&mut second, &opening);
    let mut proof = vec![3];
    proof.extend_from_slice(&oracle[33..]);
    assert_eq!(first.receive(Some(&proof)), Err(AuthError::WrongProof));
}

#[test]
fn replayed_messages_are_rejected() {
    let (mut initiator, mut acceptor) = (client(keys()), server(keys()));
    let opening = open(&mut initiator);
    let challenge = answer(&mut acceptor, &opening);
    let proof = answer(&mut initiator, &challenge);
    // The client's recorded messages are sent to another server.
    let mut repeated = server(keys());
    let fresh = answer(&mut repeated, &opening);
    assert_ne!(fresh, challenge, "nonces are fresh");
    assert_eq!(repeated.receive(Some(&proof)), Err(AuthError::WrongProof));
    // The server's recorded message is sent to another client.
    let mut repeated = client(keys());
    assert_ne!(open(&mut repeated), opening, "nonces are fresh");
    assert_eq!(repeated.receive(Some(&challenge)), Err(AuthError::WrongProof));
}

#[test]
fn truncated_and_changed_messages_are_rejected() {
    let (mut initiator, mut acceptor) = (client(keys()), server(keys()));
    let opening = open(&mut initiator);
    for len in 0..opening.len() {
        assert!(server(keys()).receive(Some(&opening[..len])).is_err(), "opening of {len} bytes");
    }
    let challenge = answer(&mut acceptor, &opening);
    for len in 0..challenge.len() {
        let mut end = client(keys());
        open(&mut end);
        // An empty message is the server's refusal.
        let error = if len == 0 { AuthError::KeyRefused } else { AuthError::Malformed };
        assert_eq!(end.receive(Some(&challenge[..len])), Err(error));
    }
    let proof = answer(&mut initiator, &challenge);
    for at in 0..proof.len() {
        let mut end = server(keys());
        answer(&mut end, &opening);
        assert_eq!(end.receive(Some(&proof[..at])), Err(AuthError::Malformed));
    }
    // In a complete exchange, one bit of the last message is changed.
    let mut changed = proof.clone();
    changed[20] ^= 1;
    assert_eq!(acceptor.receive(Some(&changed)), Err(AuthError::WrongProof));
    assert_eq!(acceptor.receive(Some(&proof)), Err(AuthError::WrongProof), "the failure is permanent");
    // Longer messages, and an empty one.
    let mut longer = opening.clone();
    longer.push(0);
    assert_eq!(server(keys()).receive(Some(&longer)), Err(AuthError::Malformed));
    assert_eq!(server(keys()).receive(Some(&[])), Err(AuthError::Malformed));
}

#[test]
fn the_policy_decides_whether_an_unauthenticated_peer_may_call() {
    // Version 1, or a CONNPROP without the property.
    let policies = |role| {
        let mechanism: Arc<dyn Mechanism> = Arc::new(keys());
        let all = [AuthPolicy::Off, AuthPolicy::Optional(Arc::clone(&mechanism)), AuthPolicy::Required(mechanism)];
        all.map(|policy| HostAuth::new(&policy, role))
    };
    for role in [Role::Client, Role::Server] {
        let [mut off, mut optional, mut required] = policies(role);
        assert_eq!((off.receive(None), off.permits_calls()), (Ok(None), true));
        assert_eq!((optional.receive(None), optional.permits_calls()), (Ok(None), true));
        assert_eq!((required.receive(None), required.permits_calls()), (Err(AuthError::Missing), false));
        assert_eq!(optional.peer(), None);
        // Calls before any property.
        let [off, optional, required] = policies(role);
        assert_eq!([off.permits_calls(), optional.permits_calls(), required.permits_calls()], [true, true, false]);
        assert_eq!([off.in_progress(), optional.in_progress()], [false, true]);
    }
    let [mut off, mut optional, _] = policies(Role::Server);
    assert_eq!(off.receive(Some(b"whatever")), Ok(None), "ignored, as an unknown property is");
    assert_eq!(
        optional.receive(Some(b"whatever")),
        Err(AuthError::Malformed),
        "a failed exchange is fatal, although optional"
    );
    assert!(!optional.permits_calls());
    let [mut off, ..] = policies(Role::Client);
    assert_eq!(off.open(), Ok(None));
}

#[test]
fn an_empty_message_of_the_server_refuses_a_client() {
    let mechanism: Arc<dyn Mechanism> = Arc::new(keys());
    let mut off = HostAuth::new(&AuthPolicy::Off, Role::Client);
    assert_eq!(off.receive(Some(&[])), Err(AuthError::KeyRequired));
    assert!(!off.permits_calls());
    for policy in [AuthPolicy::Optional(Arc::clone(&mechanism)), AuthPolicy::Required(mechanism)] {
        let mut client = HostAuth::new(&policy, Role::Client);
        open(&mut client);
        assert_eq!(client.receive(Some(&[])), Err(AuthError::KeyRefused));
        assert!(!client.permits_calls());
    }
    // A server whose policy is off ignores an empty message like any other.
    assert_eq!(HostAuth::new(&AuthPolicy::Off, Role::Server).receive(Some(&[])), Ok(None));
}

#[test]
fn a_peer_that_stops_before_its_proof_is_not_authenticated() {
    let mut end = server(keys());
    answer(&mut end, &open(&mut client(keys())));
    assert_eq!(end.receive(None), Err(AuthError::Missing));
    let mut end = HostAuth::new(&AuthPolicy::Optional(Arc::new(keys())), Role::Server);
    answer(&mut end, &open(&mut client(keys())));
    assert_eq!(end.receive(None), Ok(None));
    assert_eq!((end.permits_calls(), end.peer()), (true, None));
}

/// A mechanism that never completes, with messages of a given length.
#[derive(Clone, Debug)]
struct EndlessMechanism(usize);

impl Mechanism for EndlessMechanism {
    fn begin(&self, _: Role) -> Box<dyn AuthHandshake> {
        Box::new(self.clone())
    }
}

impl AuthHandshake for EndlessMechanism {
    fn step(&mut self, _: Option<&[u8]>) -> AuthStep {
        AuthStep::Continue(vec![0; self.0])
    }
}

#[test]
fn messages_and_steps_are_bounded() {
    let new_end = |len, role| HostAuth::new(&AuthPolicy::Required(Arc::new(EndlessMechanism(len))), role);
    let mut end = new_end(1, Role::Server);
    for _ in 0..MAX_STEPS {
        assert_eq!(end.receive(Some(&[1])), Ok(Some(vec![0])));
    }
    assert_eq!(end.receive(Some(&[1])), Err(AuthError::TooManySteps));
    let mut end = new_end(1, Role::Server);
    assert_eq!(end.receive(Some(&[0; MAX_MESSAGE])), Ok(Some(vec![0])));
    assert_eq!(end.receive(Some(&[0; MAX_MESSAGE + 1])), Err(AuthError::TooLong(MAX_MESSAGE + 1)));
    assert_eq!(new_end(MAX_OPENING, Role::Client).open(), Ok(Some(vec![0; MAX_OPENING])));
    let too_long = MAX_OPENING + 1;
    assert_eq!(new_end(too_long, Role::Client).open(), Err(AuthError::TooLong(too_long)));
}

#[test]
fn weak_keys_are_rejected_and_no_key_is_printed() {
    let text = |made: Result<PreSharedKey, KeyError>| made.expect_err("it is refused").to_string();
    assert!(text(PreSharedKey::new("a", &[0; 15])).starts_with("key of 15 bytes: expected at least 16"));
    for (len, refused) in [(0, PreSharedKey::new("", KEY)), (65, keys().and(&"n".repeat(65), KEY))] {
        assert_eq!(text(refused), format!("key name of {len} bytes: expected 1 to 64"));
    }
    assert_eq!(format!("{:?}", keys()), r#"PreSharedKey { keys: [Key("host-a")] }"#);
}

#[test]
fn the_proof_is_hmac_sha256_of_label_role_name_and_nonces() {
    // The server's proof for a recorded opening, computed apart from the mechanism.
    use hmac::{Hmac, KeyInit, Mac};
    let mut opening = vec![1, 1, 6];
    opening.extend_from_slice(b"host-a");
    opening.extend_from_slice(&[0x11; 32]);
    let challenge = answer(&mut server(keys()), &opening);
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(KEY).expect("any length");
    mac.update(b"rpcrdma host authentication psk 1\x02\x06host-a");
    mac.update(&[0x11; 32]);
    mac.update(&challenge[1..33]);
    assert_eq!(challenge[33..], mac.finalize().into_bytes()[..]);
}
