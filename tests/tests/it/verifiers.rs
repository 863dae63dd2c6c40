//! Verifiers of replies (RFC 5531 §8.2; version 2 §10.2.2.2; RFC 8166 §8.2.2.2).
//! Servers set verifiers, and clients reserve room for them.

use rpcrdma::service::duplicate_requests::DuplicateRequestCache;
use rpcrdma::wire::EncodeError;
use rpcrdma::wire::rpc::MAX_AUTH_LEN;
use rpcrdma_tests::prelude::*;

const FLAVOR: u32 = 77;
/// Arguments: bytes of the verifier and of the results. Results: that many bytes, and 100 in the first Write chunk.
const SIGN: u32 = 60;
const WORKER_SIGN: u32 = 61;
/// [`SIGN`] with a buffer for at most [`SHORT`] bytes of results.
const SHORT_SIGN: u32 = 62;
/// [`SIGN`] with a duplicate request cache.
const SIGN_ONCE: u32 = 63;
/// Sets the verifier like [`SIGN`], then refuses the call.
const SIGN_AND_REFUSE: u32 = 64;
const SHORT: usize = 400;
const LONGEST: usize = 20_000;

fn verifier_body(len: usize) -> Vec<u8> {
    data_of(3, len)
}

fn sign(call: &mut ServerCall) -> Result<(), Refusal> {
    let (words, _) = call.args().as_chunks::<4>();
    let &[verifier, results] = words else { return Err(Refusal::GarbageArguments) };
    let [verifier, results] = [verifier, results].map(|word| u32::from_be_bytes(word) as usize);
    let too_long = EncodeError::new(MAX_AUTH_LEN + 1, MAX_AUTH_LEN);
    assert_eq!(call.set_verifier(FLAVOR, &[1; MAX_AUTH_LEN + 1]), Err(too_long));
    assert!(call.set_verifier(0, &[1]).is_err(), "AUTH_NONE has no body");
    // Only the last verifier is sent.
    call.set_verifier(9, &[1; 300]).map_err(|_| Refusal::SystemError)?;
    call.set_verifier(FLAVOR, &verifier_body(verifier)).map_err(|_| Refusal::SystemError)?;
    if let Ok(mut chunk) = call.result_writer(0) {
        chunk.put(&[8; 100]).map_err(|_| Refusal::SystemError)?;
    }
    pattern(9, call.reply_mut(results)?);
    Ok(())
}

fn services(cache: &Arc<DuplicateRequestCache>) -> Services {
    let sign_up_to = |max| Procedure::new(sign).max_reply(max);
    let refuses = Procedure::new(|call| sign(call).and(Err(Refusal::GarbageArguments)));
    standard_and([
        (SIGN, sign_up_to(LONGEST).write_chunks(1, 100)),
        (WORKER_SIGN, sign_up_to(LONGEST).write_chunks(1, 100).on_workers()),
        (SHORT_SIGN, sign_up_to(SHORT).write_chunks(1, 100)),
        (SIGN_ONCE, run_once(sign_up_to(LONGEST), cache)),
        (SIGN_AND_REFUSE, refuses.max_reply(0)),
    ])
}

fn serving(name: &'static str, mode: CreditMode) -> (World, Address, Arc<DuplicateRequestCache>) {
    let cache = request_cache(64);
    let (world, address) = World::serving(name, mode.with_workers(1), services(&cache));
    (world, address, cache)
}

fn client_config(mode: CreditMode, credential: Credential) -> ClientConfig {
    ClientConfig { credential, ..small_client(in_mode(mode)) }
}

fn assert_signed(result: CallResult, verifier: usize, results: usize, what: &str) {
    let reply = result.unwrap_or_else(|error| panic!("{what}, {verifier} and {results} bytes: {error}"));
    assert_eq!(reply.verifier(), (FLAVOR, &verifier_body(verifier)[..]), "{what}");
    assert!(reply.results().len() == results && has_pattern(9, reply.results()), "{what}");
}

/// Makes a call that declares the length of its results, but not of its verifier.
fn call(client: &mut LocalClient, procedure: u32, verifier: usize, results: usize, chunk: bool) -> CallResult {
    let mut call = client.prepare_call(procedure, &be(&[verifier as u32, results as u32])).expect_reply(results);
    if chunk {
        call = call.write_chunk_into(client.alloc(client.first(), 100)?);
    }
    client.call(call)
}

#[test]
fn replies_of_every_form_have_room_for_a_verifier() {
    for mode in CREDIT_MODES {
        let (_world, address, _) = serving("verifiers", mode);
        let config = client_config(mode, Credential::opaque(FLAVOR, vec![1; 20]));
        let mut client = LocalClient::connect(&address, config.clone()).unwrap();
        // The lengths lie around the limit of one message, without and with the longest verifier. The last two need
        // several parts, or a Reply chunk.
        let around = (3600..4100).step_by(40);
        for results in [0, 8, SHORT].into_iter().chain(around).chain([8000, LONGEST]) {
            for (verifier, chunk) in [(0, false), (5, true), (400, false), (400, true)] {
                for procedure in [SIGN, WORKER_SIGN, SHORT_SIGN] {
                    if procedure == SHORT_SIGN && results > SHORT {
                        continue;
                    }
                    let what = format!("{mode:?}, procedure {procedure}");
                    let result = call(&mut client, procedure, verifier, results, chunk);
                    if chunk && let Ok(reply) = &result {
                        assert_eq!(reply.chunk(0), Some(&[8; 100][..]), "{what}");
                    }
                    assert_signed(result, verifier, results, &what);
                }
            }
        }
        let stats = client.stats();
        assert_eq!((stats.calls_retransmitted, stats.calls_failed), (0, 0), "{mode:?}: no call was retransmitted");
        drop(client);
        let mut client = Client::connect(&address, config).unwrap();
        for results in [8, 3900, LONGEST] {
            let args = be(&[400, results as u32]);
            let call = ClientCall::new(SIGN).args(args).expect_reply(results);
            assert_signed(client.call(call), 400, results, "a client with a thread");
        }
        assert_eq!(client.stats().map(|stats| stats.calls_retransmitted), Some(0));
        drop(client);
        // A client that reserves no room for verifiers gets those that fit.
        let mut client = LocalClient::connect(&address, client_config(mode, Credential::none())).unwrap();
        assert_signed(call(&mut client, SIGN, 37, 8, false), 37, 8, "AUTH_NONE");
        let echo = client.prepare_call(ECHO, b"");
        assert_eq!(client.call(echo).unwrap().verifier(), (0, &[][..]), "the next reply has no verifier");
    }
}

fn signed_reply(xid: u32, verifier: usize, stat: AcceptStat, results: usize) -> Vec<u8> {
    let body = verifier_body(verifier);
    let body = ReplyBody::Accepted { verifier: OpaqueAuth { flavor: FLAVOR, body: &body }, stat };
    let header = ReplyHeader { xid, body };
    let mut bytes = vec![0; header.encoded_len() + results];
    let len = header.emit(&mut bytes).unwrap();
    pattern(9, &mut bytes[len..]);
    bytes
}

#[test]
fn refusals_and_cached_replies_have_their_verifier() {
    let (_world, address, cache) = serving("kept-verifiers", CreditMode::V2Windowed);
    let mut peer = RawPeer::connect(&address);
    let mut ask = |xid, procedure, verifier: usize, results: usize| {
        let args = be(&[verifier as u32, results as u32]);
        peer.call_as(xid, procedure, Chunks::NONE, &args);
        peer.whole_answer().0
    };
    for (xid, (verifier, results)) in (1..).zip([(0, 0), (7, 100), (400, 3000), (400, 15_000)]) {
        for attempt in 0..2 {
            let expected = signed_reply(xid, verifier, AcceptStat::Success, results);
            assert!(ask(xid, SIGN_ONCE, verifier, results) == expected, "{verifier}, {results}, attempt {attempt}");
        }
    }
    assert_eq!(cache.stats().hits, 4);
    for (xid, verifier) in (100..).zip([0, 7, 400]) {
        assert_eq!(ask(xid, SIGN_AND_REFUSE, verifier, 0), signed_reply(xid, verifier, AcceptStat::GarbageArgs, 0));
    }
}
