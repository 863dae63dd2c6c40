//! Typed services: a bulk item is the same to handlers and callers, whichever way it travels.

use std::collections::HashMap;
use std::thread::JoinHandle;

use rpcrdma::binding::Binding;
use rpcrdma::service::MAX_PROCEDURE;
use rpcrdma::typed::{Answer, Cache, CallInfo, Deferred, Error, Request, Response, Sent, Signature, Transport, call};
use rpcrdma::xdr::{BadXdr, Bulk, Decode, Decoder, Encode, Encoder, NoSpace};
use rpcrdma_tests::prelude::*;

use super::reverse::{HELLO, telling_services};
use protocol::typed_v1::{self, Count, Fetch, FetchAsync, FetchLater, PROGRAM, Store, VERSION};
use protocol::{Blob, Found, Numbers, Pair, Wanted, typed_names};

#[expect(unreachable_pub, dead_code, reason = "generated for any module")]
mod protocol {
    include!(concat!(env!("OUT_DIR"), "/typed.rs"));
}

/// Lengths of blobs: nothing, unpadded, about what fits a message, and longer than any message.
const LENS: [usize; 7] = [0, 1, 1021, 2999, 3001, 9001, 100_003];

/// A store of blobs.
#[derive(Default)]
struct Blobs {
    blobs: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Numbers of one-way calls.
    notes: Mutex<Vec<u32>>,
}

/// A checksum.
fn sum(data: &[u8]) -> u32 {
    data.iter().fold(7, |sum: u32, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

impl Blobs {
    fn found<T>(&self, name: &[u8], then: impl FnOnce(Option<&[u8]>, u32) -> T) -> T {
        let blobs = self.blobs.lock().expect("no panic");
        then(blobs.get(name).map(Vec::as_slice), blobs.len() as u32)
    }

    /// Writes the data in place, and answers.
    fn answer_in_place<P>(&self, mut call: Deferred<P>)
    where
        P: for<'a> Signature<Args<'a> = Wanted<'a>, Results<'a> = Found<'a>>,
    {
        let name = call.args().name.to_vec();
        let data = self.found(&name, |data, _| data.map(<[u8]>::to_vec));
        let Some(data) = data else {
            // What was written for a success is not sent.
            call.data().expect("a writer").put(b"left").expect("room for 4 bytes");
            return call.send(&Found::Missing(self.found(b"", |_, count| count)));
        };
        let most = call.args().most as usize;
        let mut room = match call.data() {
            Ok(room) => room,
            Err(refusal) => return call.refuse(refusal),
        };
        let len = data.len().min(most).min(room.room());
        room.put(&data[..len]).expect("as much as there is room for");
        let blob = Blob { name: &name, data: Bulk::placed(len), checksum: sum(&data[..len]) };
        call.send(&Found::Found(blob));
    }
}

impl typed_v1::Server for Arc<Blobs> {
    fn add(&self, _: CallInfo<'_>, args: (i32, i32), answer: Answer<'_, typed_v1::Add>) -> Result<Sent, Refusal> {
        answer.send(&args.0.wrapping_add(args.1))
    }

    fn store(&self, info: CallInfo<'_>, blob: Blob<'_>, answer: Answer<'_, Store>) -> Result<Sent, Refusal> {
        assert_eq!((info.program(), info.version(), info.procedure()), (PROGRAM, VERSION, Store::NUMBER));
        let data = blob.data.bytes();
        if blob.checksum != sum(data) {
            return Err(Refusal::GarbageArguments);
        }
        self.blobs.lock().expect("no panic").insert(blob.name.to_vec(), data.to_vec());
        answer.send(&sum(data))
    }

    fn fetch(&self, _: CallInfo<'_>, wanted: Wanted<'_>, answer: Answer<'_, Fetch>) -> Result<Sent, Refusal> {
        self.found(wanted.name, |data, count| match data {
            Some(data) => {
                let data = &data[..data.len().min(wanted.most as usize)];
                answer.send(&Found::Found(Blob { name: wanted.name, data: data.into(), checksum: sum(data) }))
            }
            None => answer.send(&Found::Missing(count)),
        })
    }

    fn fetch_later(&self, call: Deferred<FetchLater>) {
        let blobs = Arc::clone(self);
        let thread = std::thread::spawn(move || blobs.answer_in_place(call));
        self.threads.lock().expect("no panic").push(thread);
    }

    fn fetch_async(&self, call: Deferred<FetchAsync>) -> impl Future<Output = ()> + 'static {
        let blobs = Arc::clone(self);
        async move { blobs.answer_in_place(call) }
    }

    fn note(&self, _: CallInfo<'_>, number: u32, answer: Answer<'_, typed_v1::Note>) -> Result<Sent, Refusal> {
        self.notes.lock().expect("no panic").push(number);
        answer.send(&())
    }

    fn note_later(&self, call: Deferred<typed_v1::NoteLater>) {
        // The call ends when it is dropped. One with a reply would get SYSTEM_ERR.
        self.notes.lock().expect("no panic").push(call.args());
    }

    fn sum(&self, _: CallInfo<'_>, blob: Blob<'_>, answer: Answer<'_, typed_v1::Sum>) -> Result<Sent, Refusal> {
        answer.send(&sum(blob.data.bytes()))
    }

    fn swap(&self, _: CallInfo<'_>, pair: Pair<'_>, answer: Answer<'_, typed_v1::Swap>) -> Result<Sent, Refusal> {
        answer.send(&Pair { first: pair.second, second: pair.first })
    }

    fn count(&self, _: CallInfo<'_>, most: u32, answer: Answer<'_, Count>) -> Result<Sent, Refusal> {
        let numbers: Vec<u32> = (0..most).collect();
        answer.send(&Numbers(numbers[..].into()))
    }
}

/// Services of the program, and their store.
fn services() -> (Services, Arc<Blobs>) {
    let (mut services, blobs) = (Services::new(), Arc::new(Blobs::default()));
    typed_v1::add(&mut services, &Arc::new(Arc::clone(&blobs)));
    (services, blobs)
}

fn with_worker() -> ServerConfig {
    small_server().with_workers(1)
}

/// A world with a server of the program.
fn serving(name: &'static str) -> (World, Address, Arc<Blobs>) {
    let (services, blobs) = services();
    let (world, address) = World::serving(name, with_worker(), services);
    (world, address, blobs)
}

/// A client of the program on the test's thread.
type Typed<'a> = typed_v1::Client<(&'a mut LocalClient, Connection)>;

/// Runs a test with a client of the program in each version.
fn with_clients(world: &World, address: &Address, mut test: impl FnMut(&mut Typed<'_>)) {
    for config in configs() {
        let _row = row(config.shard.wire.credit_mode);
        let mut client = world.client(address, config);
        let connection = client.first();
        test(&mut typed_v1::Client((&mut client, connection)));
    }
}

/// The value of a reply.
fn value<P, T>(response: Result<Response<P>, Error>) -> T
where
    P: for<'a> Signature<Results<'a> = T>,
{
    response.expect("a reply").results().expect("results")
}

/// Memory of a client with this content.
fn lent(client: &mut LocalClient, data: &[u8]) -> Buf {
    let mut lent = client.alloc(client.first(), data.len()).expect("a buffer");
    lent.copy_from_slice(data);
    lent
}

fn blob<'a>(name: &'a [u8], data: &'a [u8]) -> Blob<'a> {
    Blob { name, data: data.into(), checksum: sum(data) }
}

/// A client of the program, in versions 1 and 2.
fn configs() -> [ClientConfig; 2] {
    [CreditMode::V1, CreditMode::V2Windowed].map(|mode| {
        let bindings = Some(Arc::new(typed_v1::bindings()));
        ClientConfig { shard: in_mode(mode), bindings, ..ClientConfig::new(PROGRAM, VERSION) }
    })
}

/// Ways of a client's room for a result.
#[derive(Clone, Copy, Debug)]
enum Room {
    /// None: it comes in the message, or in a Reply chunk.
    Inline,
    /// A Write chunk of the client's choice.
    Chunk,
    /// A Write chunk in a buffer of the caller, shorter than the data may be.
    Buf,
}

fn fetched<P>(
    client: &mut (&mut LocalClient, Connection),
    name: &[u8],
    data: &[u8],
    room: Room,
    call: impl FnOnce(&mut (&mut LocalClient, Connection), &Wanted<'_>, Request<P>) -> Result<Response<P>, Error>,
) where
    P: for<'a> Signature<Args<'a> = Wanted<'a>, Results<'a> = Found<'a>>,
{
    let (request, most) = match room {
        Room::Inline => (Request::new(), P::MAX_INLINE_RESULT),
        Room::Chunk => (Request::new().room(1 << 20), usize::MAX),
        Room::Buf => {
            let buf = client.0.alloc(client.1, 5000).expect("a buffer");
            (Request::new().room_in(buf), 5000)
        }
    };
    let wanted = Wanted { name, most: most.min(1 << 20) as u32 };
    let response = call(client, &wanted, request).expect("a reply");
    let Found::Found(blob) = response.results().expect("results") else { panic!("the blob is there") };
    assert_eq!(blob.name, name, "{room:?}");
    assert_eq!(blob.checksum, sum(blob.data.bytes()), "{} {room:?}", P::NAME);
    assert_eq!(blob.data.bytes(), &data[..blob.data.len()], "{} {room:?}", P::NAME);
    assert_eq!(blob.data.len(), data.len().min(most), "{} {room:?}", P::NAME);
}

#[test]
fn bulk_items_are_the_same_by_every_way() {
    let (world, address, blobs) = serving("typed");
    with_clients(&world, &address, |of| {
        for (n, len) in LENS.into_iter().enumerate() {
            let (name, data) = (vec![b'n'; n], data_of(n as u32, len));
            let blob = blob(&name, &data);
            // In the message, or in a long one.
            assert_eq!(value(of.store(&blob)), sum(&data), "{len} bytes");
            assert_eq!(value(of.sum(&blob)), sum(&data));
            // In a Read chunk.
            let placed = Blob { data: Bulk::placed(len), ..blob };
            let request = Request::new().lend(lent(of.0.0, &data));
            let stored = of.store_with(&placed, request).expect("a reply");
            assert_eq!(stored.results().expect("a checksum"), sum(&data));
            assert_eq!(stored.into_reply().take_sent().count(), len.min(1), "the buffer comes back");
            for room in [Room::Inline, Room::Chunk, Room::Buf] {
                // The handler that copies answers as much as is asked for, and a shorter chunk is an error.
                fetched::<Fetch>(&mut of.0, &name, &data, room, |to, wanted, request| {
                    typed_v1::Client((&mut *to.0, to.1)).fetch_with(wanted, request)
                });
                fetched::<FetchLater>(&mut of.0, &name, &data, room, |to, wanted, request| {
                    typed_v1::Client((&mut *to.0, to.1)).fetch_later_with(wanted, request)
                });
                fetched::<FetchAsync>(&mut of.0, &name, &data, room, |to, wanted, request| {
                    typed_v1::Client((&mut *to.0, to.1)).fetch_async_with(wanted, request)
                });
            }
        }
        for request in [Request::new(), Request::new().room(5000)] {
            let missing = of.fetch_later_with(&Wanted { name: b"nobody", most: 9 }, request).expect("a reply");
            assert_eq!(missing.results().expect("results"), Found::Missing(LENS.len() as u32));
        }
    });
    blobs.threads.lock().expect("no panic").drain(..).for_each(|thread| thread.join().expect("no panic"));
}

#[test]
fn several_bulk_items_keep_their_order() {
    let (world, address, _) = serving("typed-pair");
    let (long, short) = (data_of(1, 70_001), data_of(2, 1003));
    with_clients(&world, &address, |of| {
        for_each(pairs(pairs([false, true], 0..4), 0..3), |((swapped, lends), rooms)| {
            let (first, second) = if swapped { (&short, &long) } else { (&long, &short) };
            let mut request = Request::new();
            let mut item = |is_lent: bool, data| {
                if !is_lent {
                    return Bulk::from(data);
                }
                request = std::mem::take(&mut request).lend(lent(of.0.0, data));
                Bulk::placed(data.len())
            };
            let pair = Pair { first: item(lends & 1 > 0, first), second: item(lends & 2 > 0, second) };
            let request = (0..rooms).fold(request, |request, _| request.room(70_001));
            let response = of.swap_with(&pair, request).expect("a reply");
            let swapped = response.results().expect("a pair");
            assert!(swapped.first.bytes() == &second[..] && swapped.second.bytes() == &first[..]);
        });
    });
}

#[test]
fn an_empty_write_chunk_of_a_typed_result_brings_it_inline() {
    let opaque = |data: &[u8]| {
        let mut bytes = [&be(&[data.len() as u32]), data].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    };
    for_each(SCHEMES, |scheme| {
        let services = services().0;
        let config = ServerConfig { workers: Some(WorkerConfig::default()), ..scheme.of_server() };
        let (_world, address) = World::serving("typed-empty-write", config, services);
        let mut client = RawPeer::connect_in(&address, scheme);
        let (room, memory) = client.room(100);
        let args = [opaque(&[1; 100]), opaque(&[2; 5])].concat();
        let call = call_bytes(XID, PROGRAM, VERSION, typed_v1::Swap::NUMBER, &args);
        let both = [opaque(&[2; 5]), opaque(&[1; 100])].concat();
        let first_inline = [opaque(&[2; 5]), be(&[100])].concat();
        for (counts, segments, results) in [([0, 1], &[room][..], first_inline), ([0, 0], &[], both)] {
            client.msg(XID, &Lists::new().write([]).write(segments), &call);
            let answer = client.answer();
            assert!(answer.writes().map(|chunk| chunk.len()).eq(counts));
            assert_eq!(answer.payload(), reply_bytes(XID, &results));
        }
        assert_eq!(contents(&memory, 100), [1; 100]);
    });
}

#[test]
fn errors_of_the_engine_of_rpc_and_of_decoding_differ() {
    let (world, address, _) = serving("typed-errors");
    with_clients(&world, &address, |of| {
        assert_eq!(value(of.add(&(i32::MAX, 1))), i32::MIN);
        // Unimplemented.
        let absent = of.absent().expect_err("no such procedure");
        assert!(matches!(absent, Error::Refused(Refusal::ProcedureUnavailable)));
        let untyped = of.0.call(ClientCall::new(typed_v1::Absent::NUMBER)).expect_err("no such procedure");
        assert_eq!(absent.to_string(), untyped.to_string(), "both forms have one text");
        // The handler refuses.
        let wrong = Blob { checksum: 0, ..blob(b"n", b"data") };
        assert!(matches!(of.store(&wrong), Err(Error::Refused(Refusal::GarbageArguments))));
        // A client of another program is not used.
        let mut names = typed_names::Client((&mut *of.0.0, of.0.1));
        let refused = names.send(&1).expect_err("another version");
        assert!(matches!(refused, Error::Call(failed) if failed.error == Defect::OtherProgram.into()));
        // A name longer than its bound is not sent.
        assert!(matches!(of.store(&blob(&[0; 65], b"data")), Err(Error::Encode(_))));
        // Arguments that are none do not reach the handler: too few, too many, a name too long.
        let short = ClientCall::new(Store::NUMBER).args(vec![0; 8]);
        let more = ClientCall::new(typed_v1::Add::NUMBER).args(vec![0; 12]);
        let name = [be(&[65]), vec![0; 68 + 8]].concat();
        let named = ClientCall::new(FetchLater::NUMBER).args(name.clone());
        let future = ClientCall::new(FetchAsync::NUMBER).args(name);
        for call in [short, more, named, future] {
            let failed = of.0.call(call).expect_err("no arguments of it").error;
            assert_eq!(failed, CallError::Refused(Refusal::GarbageArguments));
        }
        // A chunk where no item is.
        let misplaced = ClientCall::new(Store::NUMBER).args(be(&[0, 64, 0])).read_chunk(0, lent(of.0.0, &[0; 64]));
        assert!(of.0.call(misplaced).is_err());
        // A buffer that no argument names is not sent.
        let request = Request::new().lend(lent(of.0.0, &[0; 64]));
        assert!(matches!(of.store_with(&blob(b"n", b"data"), request), Err(Error::Encode(_))));
        // Results of another type.
        let reply = of.0.call(ClientCall::new(typed_v1::Add::NUMBER).args(vec![0; 8])).expect("a reply");
        assert!(matches!(Response::<Fetch>::of(reply).results(), Err(Error::Decode(_))));
    });
    // The engine's own.
    for config in configs() {
        let client = Client::connect(&address, config).expect("a connection");
        client.close();
        assert!(settles(|| client.is_closed()));
        assert!(matches!(typed_v1::Client(client).add(&(1, 2)), Err(Error::Call(_))));
    }
}

#[test]
fn a_deferred_call_reports_that_its_connection_has_closed() {
    let (hold, held) = channel();
    let mut services = Services::new();
    let deferred = Procedure::deferred(move |call| {
        rpcrdma::typed::take::<FetchLater>(call, |call| hold.send(call).expect("a test"));
    });
    services.add(FetchLater::PROGRAM, FetchLater::VERSION, FetchLater::NUMBER, deferred);
    let (world, address) = World::serving("typed-closed", small_server(), services);
    let [config, _] = configs();
    let mut client = world.client(&address, config);
    client.launch(ClientCall::new(FetchLater::NUMBER).args(vec![0; 8]), 0);
    let call: Deferred<FetchLater> = eventually(|| {
        client.poll(|_| {});
        held.try_recv().ok()
    });
    assert!(!call.is_disconnected());
    drop(client);
    assert!(settles(|| call.is_disconnected()));
}

/// The buffer of a reply is longer than what is declared. Without this bound, version 1 would lack a Reply chunk for
/// it.
#[test]
fn results_beyond_the_declared_length_are_refused() {
    let (world, address, _) = serving("typed-declared");
    with_clients(&world, &address, |of| {
        assert_eq!(of.count(&100).expect("a reply").results().expect("numbers").0.len(), 100);
        for most in [101, 10_001] {
            assert!(matches!(of.count(&most), Err(Error::Refused(Refusal::SystemError))), "{most}");
        }
    });
}

/// Arguments that announce more bytes than they write.
struct Short;

impl Encode for Short {
    fn encoded_len(&self) -> usize {
        8
    }

    fn encode(&self, _: &mut Encoder<'_>) -> Result<(), NoSpace> {
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
    let (world, address, _) = serving("typed-short");
    with_clients(&world, &address, |of| {
        for n in 0..50 {
            // Fills the buffers.
            of.store(&blob(&[0xA5; 64], &[0xA5; 300])).expect("a reply");
            let short = call::<ShortAdd, _>(&mut of.0, Request::new(), &Short).expect("a reply");
            assert_eq!(short.results().expect("a sum"), 0, "{n}");
        }
    });
}

#[test]
fn one_way_procedures_run_and_have_no_reply() {
    let (_world, address, blobs) = serving("typed-one-way");
    let [v1, v2] = configs();
    let mut of = typed_v1::Client(Client::connect(&address, v2).expect("a connection"));
    let responses = [of.note(&1).expect("sent").into_reply(), of.note_later(&2).expect("sent").into_reply()];
    assert!(responses.iter().all(|reply| reply.results().is_empty()));
    // Its reply arrives behind the calls.
    assert_eq!(value(of.add(&(1, 2))), 3);
    assert!(settles(|| blobs.notes.lock().expect("no panic").len() == 2));
    let mut notes = blobs.notes.lock().expect("no panic").clone();
    notes.sort_unstable();
    assert_eq!(notes, [1, 2]);

    let mut of = typed_v1::Client(Client::connect(&address, v1).expect("a connection"));
    let Err(Error::Call(failed)) = of.note(&1) else { panic!("version 1 has no one-way calls") };
    assert_eq!(failed.error, Defect::NotOneWay.into());
}

#[test]
fn a_client_of_threads_makes_the_same_calls() {
    let (_world, address, _) = serving("typed-threads");
    for config in configs() {
        let mut of = typed_v1::Client(Client::connect(&address, config).expect("a connection"));
        let data = data_of(3, 20_000);
        let blob = blob(b"threads", &data);
        assert_eq!(value(of.store(&blob)), sum(&data));
        let mut lent = of.0.alloc(data.len()).expect("a buffer");
        lent.copy_from_slice(&data);
        let placed = Blob { data: Bulk::placed(data.len()), ..blob };
        let call = Request::<Store>::new().lend(lent).into_call(&mut of.0, &placed).expect("a call");
        let reply = of.0.start(call).expect("a start").join().expect("a reply");
        assert_eq!(Response::<Store>::of(reply).results().expect("a checksum"), sum(&data));
        let wanted = Wanted { name: b"threads", most: 1 << 20 };
        let response = of.fetch_with(&wanted, Request::new().room(1 << 20)).expect("a reply");
        let Found::Found(found) = response.results().expect("results") else { panic!("it is there") };
        assert!(found.data.bytes() == data);
    }
}

#[test]
fn a_server_calls_its_client_by_the_same_types() {
    let mut world = World::new("typed-reverse");
    for config in configs() {
        let (services, told) = telling_services();
        let address = world.serve_with(small_server(), services);
        // The client serves the program, and its server calls it.
        let callbacks = Some(Arc::new(self::services().0));
        let forward = ClientConfig { services: callbacks, ..small_client(config.shard.clone()) };
        let mut forward = Client::connect(&address, forward).expect("a connection");
        forward.call(ClientCall::new(HELLO)).expect("a reply");
        let caller = told.recv().expect("the caller");
        let has_chunks = config.shard.wire.credit_mode != CreditMode::V1;
        let reverse = world.server().call_back(caller, config).expect("a client of this server");
        let mut of = typed_v1::Client(reverse);
        assert_eq!(value(of.add(&(2, 3))), 5);
        assert!(matches!(of.absent(), Err(Error::Refused(Refusal::ProcedureUnavailable))));
        // Version 1 has no chunks in this direction.
        let data = data_of(4, if has_chunks { 30_000 } else { 500 });
        let blob = blob(b"back", &data);
        let (blob, store, fetch) = if has_chunks {
            let mut lent = of.0.alloc(data.len()).expect("a buffer");
            lent.copy_from_slice(&data);
            let placed = Blob { data: Bulk::placed(data.len()), ..blob };
            (placed, Request::new().lend(lent), Request::new().room(40_000))
        } else {
            (blob, Request::new(), Request::new())
        };
        assert_eq!(value(of.store_with(&blob, store)), sum(&data));
        let response = of.fetch_with(&Wanted { name: b"back", most: 1 << 20 }, fetch).expect("a reply");
        let Found::Found(found) = response.results().expect("results") else { panic!("it is there") };
        assert!(found.data.bytes() == data);
    }
}

/// A server whose procedures return their argument and their number.
struct Names;

macro_rules! names {
    ($($method:ident: $signature:ident),*) => {
        impl typed_names::Server for Names {
            $(fn $method(
                &self,
                _: CallInfo<'_>,
                arg: i32,
                answer: Answer<'_, typed_names::$signature>,
            ) -> Result<Sent, Refusal> {
                answer.send(&(arg + typed_names::$signature::NUMBER as i32))
            })*

            fn into_(&self, call: Deferred<typed_names::Into>) {
                let sum = call.args() + typed_names::Into::NUMBER as i32;
                call.send(&sum);
            }

            fn clone_(&self, call: Deferred<typed_names::Clone>) -> impl Future<Output = ()> + 'static {
                let sum = call.args() + typed_names::Clone::NUMBER as i32;
                async move { call.send(&sum) }
            }

            fn future(&self, call: Deferred<typed_names::Future>) -> impl Future<Output = ()> + 'static {
                let sum = call.args() + typed_names::Future::NUMBER as i32;
                async move { call.send(&sum) }
            }
        }

        /// Calls each procedure, and returns the results less the argument.
        fn call_names(of: &mut typed_names::Client<Client>) -> Vec<i32> {
            let mut numbers = vec![$(of.$method(&100).expect("a reply").results().expect("a sum") - 100),*];
            for response in [of.into_(&100).map(|of| of.results()), of.clone_(&100).map(|of| of.results())] {
                numbers.push(response.expect("a reply").expect("a sum") - 100);
            }
            numbers.push(of.future(&100).expect("a reply").results().expect("a sum") - 100);
            numbers
        }
    };
}
names! {
    send: Send, sync: Sync, sized: Sized, to_owned_: ToOwned, as_ref: AsRef, drop: Drop, s: S_, t: T_, f: F_,
    r#fn: Fn, copy: Copy, run: Run, add: Add
}

#[test]
fn procedures_may_have_the_names_of_the_languages_traits() {
    let mut world = World::new("typed-names");
    let cache = Cache::default();
    let on_shards = {
        let mut services = Services::new();
        typed_names::add(&mut services, &Arc::new(Names), &cache);
        services
    };
    // A thread of the application runs what answers at once.
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
        let address = world.serve_with(with_worker(), services);
        let config = ClientConfig::new(PROGRAM, typed_names::VERSION);
        let mut of = typed_names::Client(Client::connect(&address, config).expect("a connection"));
        assert_eq!(call_names(&mut of), [1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 6, 5, 4]);
    }
    drop(world);
    thread.join().expect("no panic");
}

/// The compiler refuses what `Services::add` would panic on, and no more.
#[test]
fn limits_of_the_compiler_are_those_of_the_engine() {
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
