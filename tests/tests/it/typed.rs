//! Typed services: handlers and callers see the same bulk item, inline or in a chunk.

use rpcrdma::binding::Binding;
use rpcrdma::service::MAX_PROCEDURE;
use rpcrdma::typed::{CallOptions, Deferred, Error, ProgramCache, Response, Signature, Transport, call, take};
use rpcrdma::xdr::{BadXdr, Bulk, Decode, Decoder, Encode, EncodeError, Encoder};
use rpcrdma_tests::prelude::*;
use rpcrdma_tests::typed::{
    Blob, Fetch, FetchAsync, FetchLater, Found, Names, PROGRAM, Pair, Store, VERSION, Wanted, call_names, services,
    serving, sum, typed_names, typed_v1, value,
};

/// Lengths of blobs: empty, with XDR padding, near the longest message, and longer than any message.
const LENS: [usize; 7] = [0, 1, 1021, 2999, 3001, 9001, 100_003];

/// A client of the program on the test's thread.
type Typed<'a> = typed_v1::Client<(&'a mut LocalClient, Connection)>;

/// Runs a test with a client of the program in each protocol version.
fn with_clients(name: &'static str, mut test: impl FnMut(&mut Typed<'_>)) {
    let (world, address, blobs) = serving(name);
    for_each(configs(), |config| {
        let mut client = world.client(&address, config);
        let connection = client.first();
        test(&mut typed_v1::Client((&mut client, connection)));
    });
    blobs.threads.lock().expect("no panic").drain(..).for_each(|thread| thread.join().expect("no panic"));
}

fn copy_to_buffer(client: &mut LocalClient, data: &[u8]) -> Buf {
    let mut buffer = client.alloc(client.first(), data.len()).expect("a buffer");
    buffer.copy_from_slice(data);
    buffer
}

fn blob<'a>(name: &'a [u8], data: &'a [u8]) -> Blob<'a> {
    Blob { name, data: data.into(), checksum: sum(data) }
}

/// Configurations of a client of the program in versions 1 and 2.
fn configs() -> [ClientConfig; 2] {
    [CreditMode::V1, CreditMode::V2Windowed].map(|mode| {
        let bindings = Some(Arc::new(typed_v1::bindings()));
        ClientConfig { shard: in_mode(mode), bindings, ..ClientConfig::new(PROGRAM, VERSION) }
    })
}

/// The place where a client receives a result.
#[derive(Clone, Copy, Debug)]
enum ResultPlace {
    /// In the message, or in a Reply chunk.
    Inline,
    /// In a Write chunk that the client allocates.
    Chunk,
    /// In a Write chunk in a buffer of the caller, which may be shorter than the data.
    Buf,
}

/// Fetches a blob into a place of this kind, and checks it.
fn assert_fetched<P>(client: &mut Typed<'_>, name: &[u8], data: &[u8], place: ResultPlace)
where
    P: for<'a> Signature<Args<'a> = Wanted<'a>, Results<'a> = Found<'a>>,
{
    let (options, max_bytes) = match place {
        ResultPlace::Inline => (CallOptions::<P>::new(), P::MAX_INLINE_RESULT),
        ResultPlace::Chunk => (CallOptions::new().write_chunk(1 << 20), usize::MAX),
        ResultPlace::Buf => {
            (CallOptions::new().write_chunk_into(client.0.0.alloc(client.0.1, 5000).expect("a buffer")), 5000)
        }
    };
    let _row = row((P::NAME, place));
    let wanted = Wanted { name, max_bytes: max_bytes.min(1 << 20) as u32 };
    let response = call(&mut client.0, options, &wanted).expect("a reply");
    let Found::Found(blob) = response.results().expect("results") else { panic!("the blob is there") };
    assert_eq!((blob.name, blob.checksum), (name, sum(blob.data.bytes())));
    assert!(blob.data.bytes() == &data[..data.len().min(max_bytes)]);
}

#[test]
fn bulk_items_are_equal_inline_and_in_chunks() {
    with_clients("typed", |client| {
        for_each(LENS.into_iter().enumerate(), |(n, len)| {
            let (name, data) = (vec![b'n'; n], data_of(n as u32, len));
            let blob = blob(&name, &data);
            // The data is inline, in a short or a long message.
            assert_eq!([value(client.store(&blob)), value(client.sum(&blob))], [sum(&data); 2]);
            // The data is in a Read chunk.
            let placed = Blob { data: Bulk::placed(len), ..blob };
            let options = CallOptions::new().lend(copy_to_buffer(client.0.0, &data));
            let stored = client.store_with(&placed, options).expect("a reply");
            assert_eq!(stored.results().expect("a checksum"), sum(&data));
            assert_eq!(stored.into_reply().take_sent().count(), usize::from(len > 0), "a nonempty buffer is returned");
            // The client requests no more bytes than the place holds, because a shorter Write chunk would be an error.
            for place in [ResultPlace::Inline, ResultPlace::Chunk, ResultPlace::Buf] {
                assert_fetched::<Fetch>(client, &name, &data, place);
                assert_fetched::<FetchLater>(client, &name, &data, place);
                assert_fetched::<FetchAsync>(client, &name, &data, place);
            }
        });
        for options in [CallOptions::new(), CallOptions::new().write_chunk(5000)] {
            let missing = client.fetch_later_with(&Wanted { name: b"nobody", max_bytes: 9 }, options).expect("a reply");
            assert_eq!(missing.results().expect("results"), Found::Missing(LENS.len() as u32));
        }
    });
}

#[test]
fn several_bulk_items_keep_their_order() {
    let (long, short) = (data_of(1, 70_001), data_of(2, 1003));
    with_clients("typed-pair", |client| {
        // Bits 0 and 1 of `lent` say whether the first and the second item are lent.
        for_each(pairs(pairs([(&long, &short), (&short, &long)], 0..4), 0..3), |(((first, second), lent), chunks)| {
            let mut options = CallOptions::new();
            let mut item = |is_lent: bool, data| {
                if !is_lent {
                    return Bulk::from(data);
                }
                options = std::mem::take(&mut options).lend(copy_to_buffer(client.0.0, data));
                Bulk::placed(data.len())
            };
            let pair = Pair { first: item(lent & 1 > 0, first), second: item(lent & 2 > 0, second) };
            let options = (0..chunks).fold(options, |options, _| options.write_chunk(70_001));
            let response = client.swap_with(&pair, options).expect("a reply");
            let swapped = response.results().expect("a pair");
            assert!(swapped.first.bytes() == &second[..] && swapped.second.bytes() == &first[..]);
        });
    });
}

#[test]
fn a_typed_result_whose_write_chunk_is_empty_is_sent_inline() {
    // The procedure swaps two items. The first Write chunk is empty, so `two` is returned inline. The second Write
    // chunk receives the data of `one` unless the chunk is empty, too.
    let [one, two] = [[be(&[100]), vec![1; 100]].concat(), [be(&[5]), vec![2; 5], vec![0; 3]].concat()];
    for_each(CREDIT_MODES, |mode| {
        let (_world, address) =
            World::serving("typed-empty-write", mode.into_server_config().with_workers(1), services().0);
        let mut client = RawPeer::connect_in(&address, mode);
        let (room, memory) = client.expose_writable(100);
        let call = call_bytes(XID, PROGRAM, VERSION, typed_v1::Swap::NUMBER, &[&one[..], &two].concat());
        for (counts, segments, second) in [([0, 1], &[room][..], be(&[100])), ([0, 0], &[], one.clone())] {
            client.send_msg(XID, &Lists::new().write([]).write(segments), &call);
            let answer = client.answer();
            assert!(answer.writes().map(|chunk| chunk.len()).eq(counts));
            assert_eq!(answer.payload(), reply_bytes(XID, &[&two[..], &second].concat()));
        }
        assert_eq!(contents(&memory, 100), [1; 100]);
    });
}

#[test]
fn engine_errors_rpc_refusals_and_decoding_errors_are_distinct() {
    with_clients("typed-errors", |client| {
        assert_eq!(value(client.add(&(i32::MAX, 1))), i32::MIN);
        let absent = client.absent().expect_err("no such procedure");
        assert!(matches!(absent, Error::Refused(Refusal::ProcedureUnavailable)));
        let untyped = client.0.call(ClientCall::new(typed_v1::Absent::NUMBER)).expect_err("no such procedure");
        assert_eq!(absent.to_string(), untyped.to_string(), "typed and untyped errors have the same text");
        let wrong = Blob { checksum: 0, ..blob(b"n", b"data") };
        assert!(matches!(client.store(&wrong), Err(Error::Refused(Refusal::GarbageArguments))));
        // A typed client refuses a connection to another program.
        let refused = typed_names::Client((&mut *client.0.0, client.0.1))
            .send(&1)
            .expect_err("the connection has another version");
        assert!(matches!(refused, Error::Call(failed) if failed.error == Defect::OtherProgram.into()));
        // These calls are not sent: the name exceeds its bound, or no argument uses the buffer.
        assert!(matches!(client.store(&blob(&[0; 65], b"data")), Err(Error::Encode(_))));
        let options = CallOptions::new().lend(copy_to_buffer(client.0.0, &[0; 64]));
        assert!(matches!(client.store_with(&blob(b"n", b"data"), options), Err(Error::Encode(_))));
        // Undecodable arguments do not reach the handler: too few, too many, or a name that is too long.
        let name = [be(&[65]), vec![0; 68 + 8]].concat();
        let (store, add) = ((Store::NUMBER, vec![0; 8]), (typed_v1::Add::NUMBER, vec![0; 12]));
        for (procedure, args) in [store, add, (FetchLater::NUMBER, name.clone()), (FetchAsync::NUMBER, name)] {
            assert_eq!(
                client.0.0.run(procedure, &args),
                Err(CallError::Refused(Refusal::GarbageArguments)),
                "{procedure}"
            );
        }
        // No item is at the position of the chunk.
        let misplaced =
            ClientCall::new(Store::NUMBER).args(be(&[0, 64, 0])).read_chunk(0, copy_to_buffer(client.0.0, &[0; 64]));
        assert!(client.0.call(misplaced).is_err());
        let reply = client.0.call(ClientCall::new(typed_v1::Add::NUMBER).args(vec![0; 8])).expect("a reply");
        assert!(matches!(Response::<Fetch>::from_reply(reply).results(), Err(Error::Decode(_))));
        // The connection closes, so the engine ends the call.
        client.0.0.begin_close(client.0.1);
        assert!(matches!(client.add(&(1, 2)), Err(Error::Call(_))));
    });
}

#[test]
fn a_deferred_call_reports_that_its_connection_has_closed() {
    let (send_call, calls) = channel();
    let mut services = Services::new();
    let deferred =
        Procedure::deferred(move |call| take::<FetchLater>(call, |call| send_call.send(call).expect("the test waits")));
    services.add(FetchLater::PROGRAM, FetchLater::VERSION, FetchLater::NUMBER, deferred);
    let [config, _] = configs();
    let (_world, mut client) = World::pair_with("typed-closed", small_server(), services, config);
    client.send(FetchLater::NUMBER, &[0; 8], 0);
    let call: Deferred<FetchLater> = calls.recv().expect("a call");
    assert!(!call.is_disconnected());
    drop(client);
    assert!(wait_until(|| call.is_disconnected()));
}

/// The buffer of a reply may be longer than the declared length, so the engine has to check the length explicitly. In
/// version 1, the client offers no Reply chunk for longer results.
#[test]
fn results_beyond_the_declared_length_are_refused() {
    with_clients("typed-declared", |client| {
        assert_eq!(client.count(&100).expect("a reply").results().expect("numbers").0.len(), 100);
        for count in [101, 10_001] {
            assert!(matches!(client.count(&count), Err(Error::Refused(Refusal::SystemError))), "{count}");
        }
    });
}

/// Arguments that announce more bytes than they write.
struct Short;

impl Encode for Short {
    fn encoded_len(&self) -> usize {
        8
    }

    fn encode(&self, _: &mut Encoder<'_>) -> Result<(), EncodeError> {
        Ok(())
    }
}

impl Decode<'_> for Short {
    fn decode(_: &mut Decoder<'_>) -> Result<Self, BadXdr> {
        Ok(Self)
    }
}

enum ShortAdd {}

impl Signature for ShortAdd {
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = typed_v1::Add::NUMBER;
    const NAME: &'static str = "ADD";
    const BINDING: Binding = Binding::inline(8, 4);
    const HEAD: usize = 0;
    const MAX_INLINE_RESULT: usize = 0;
    type Args<'a> = Short;
    type Results<'a> = i32;
}

#[test]
fn unwritten_arguments_are_sent_as_zeroes() {
    with_clients("typed-short", |client| {
        for n in 0..50 {
            // This call leaves bytes other than zero in the buffers.
            client.store(&blob(&[0xA5; 64], &[0xA5; 300])).expect("a reply");
            let short = call::<ShortAdd, _>(&mut client.0, CallOptions::new(), &Short).expect("a reply");
            assert_eq!(short.results().expect("a sum"), 0, "{n}");
        }
    });
}

#[test]
fn one_way_procedures_run_and_have_no_reply() {
    let (world, address, blobs) = serving("typed-one-way");
    let [mut v1, mut v2] =
        configs().map(|config| typed_v1::Client(Client::connect(&address, config).expect("a connection")));
    let responses = [v2.note(&1).expect("sent").into_reply(), v2.note_later(&2).expect("sent").into_reply()];
    assert!(responses.iter().all(|reply| reply.results().is_empty()));
    // The reply to this call arrives after the one-way calls were received.
    assert_eq!(value(v2.add(&(1, 2))), 3);
    assert!(wait_until(|| blobs.notes.lock().expect("no panic").len() == 2));
    let mut notes = blobs.notes.lock().expect("no panic").clone();
    notes.sort_unstable();
    assert_eq!(notes, [1, 2]);
    assert_eq!(world.stats().calls_dropped, 0, "one-way calls do not count as dropped");
    let Err(Error::Call(failed)) = v1.note(&1) else { panic!("version 1 has no one-way calls") };
    assert_eq!(failed.error, Defect::NotOneWay.into());
}

/// Stores data through a client that has its own thread, and fetches the data back, inline or in chunks.
fn store_and_fetch(client: &mut typed_v1::Client<Client>, data: &[u8], chunks: bool) {
    let blob = blob(b"threads", data);
    let (blob, store, fetch) = if chunks {
        let mut buffer = client.0.alloc(data.len()).expect("a buffer");
        buffer.copy_from_slice(data);
        let placed = Blob { data: Bulk::placed(data.len()), ..blob };
        (placed, CallOptions::new().lend(buffer), CallOptions::new().write_chunk(1 << 20))
    } else {
        (blob, CallOptions::new(), CallOptions::new())
    };
    assert_eq!(value(client.store_with(&blob, store)), sum(data));
    let response = client.fetch_with(&Wanted { name: b"threads", max_bytes: 1 << 20 }, fetch).expect("a reply");
    let Found::Found(found) = response.results().expect("results") else { panic!("the blob is there") };
    assert!(found.data.bytes() == data);
}

#[test]
fn a_server_calls_its_client_with_the_same_types() {
    let mut world = World::new("typed-reverse");
    for_each(configs(), |config| {
        let (services_with_caller, callers) = services_with_hello();
        let address = world.serve_with(small_server(), services_with_caller);
        // The client serves the program, and the server calls the client.
        let forward = ClientConfig { services: Some(Arc::new(services().0)), ..small_client(config.shard.clone()) };
        let mut forward = Client::connect(&address, forward).expect("a connection");
        forward.call(ClientCall::new(HELLO)).expect("a reply");
        let caller = callers.recv().expect("the caller");
        let has_chunks = config.shard.wire.credit_mode != CreditMode::V1;
        let mut client = typed_v1::Client(world.server().call_back(caller, config).expect("a client of this server"));
        assert_eq!(value(client.add(&(2, 3))), 5);
        // A call may also be started now and joined later.
        let call = CallOptions::<Store>::new().into_call(&mut client.0, &blob(b"later", b"data")).expect("a call");
        let reply = client.0.start(call).expect("a start").join().expect("a reply");
        assert_eq!(Response::<Store>::from_reply(reply).results().expect("a checksum"), sum(b"data"));
        assert!(matches!(client.absent(), Err(Error::Refused(Refusal::ProcedureUnavailable))));
        // Version 1 has no chunks in this direction.
        store_and_fetch(&mut client, &data_of(4, if has_chunks { 30_000 } else { 500 }), has_chunks);
    });
}

#[test]
fn procedures_may_be_named_like_traits_of_the_language() {
    let mut world = World::new("typed-names");
    let cache = ProgramCache::default();
    let mut on_shards = Services::new();
    typed_names::add(&mut on_shards, &Arc::new(Names), &cache);
    // A thread of the application runs the deferred calls, and answers each immediately.
    let (submit, submitted) = channel::<DeferredCall>();
    let thread = std::thread::spawn(move || {
        for mut call in submitted {
            let outcome = typed_names::run(&Names, &mut call);
            call.answer(outcome);
        }
    });
    let mut deferred = on_shards.clone();
    typed_names::add_deferred(&mut deferred, move |call| submit.send(call).expect("a thread"), &cache);
    for services in [on_shards, deferred] {
        let address = world.serve_with(small_server().with_workers(1), services);
        let config = ClientConfig::new(PROGRAM, typed_names::VERSION);
        let mut client = typed_names::Client(Client::connect(&address, config).expect("a connection"));
        assert_eq!(call_names(&mut client), [1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 6, 5, 4]);
    }
    drop(world);
    thread.join().expect("no panic");
}

/// `xdrgen` refuses exactly the definitions on which `Services::add` would panic.
#[test]
fn the_compiler_has_the_limits_of_the_engine() {
    let compiles = |items: usize, number: u32| {
        let fields: String = (0..items).map(|n| format!("opaque f{n}<9>; ")).collect();
        let text = format!("struct a {{ {fields}}}; program P {{ version V {{ void F(a) = {number}; }} = 1; }} = 1;");
        let keys: Vec<_> = (0..items).map(|n| format!("'a.f{n}'")).collect();
        let placement = format!("eligible = [{}]", keys.join(", "));
        let source = |text| xdrgen::Source { name: "limits".into(), text };
        xdrgen::parse(&source(text), Some(&source(placement))).is_ok()
    };
    assert!(compiles(MAX_CHUNKS, MAX_PROCEDURE));
    assert!(!compiles(MAX_CHUNKS + 1, MAX_PROCEDURE) && !compiles(MAX_CHUNKS, MAX_PROCEDURE + 1));
}
