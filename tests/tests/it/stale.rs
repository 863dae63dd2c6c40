//! Reused memory: bytes of earlier users never reach a peer.
//! Handlers and callers leave parts of their buffers unwritten.

use rpcrdma::wire::EncodeError;
use rpcrdma_tests::prelude::*;

use super::own_memory::{PAGE, own_arena};
use super::read_targets::{PAGES, page_of};

/// The byte that fills all messages and chunks of one client. No other client may receive it.
const SECRET: u8 = 0xA5;
/// Procedures whose arguments, results and chunks are the secret, each with its limit of inline results in bytes.
const SPILLS: [(u32, usize); 3] = [(198, 100), (199, 3000), (200, 20_000)];
/// A procedure that echoes its arguments in a message of the same form.
const LONG_ECHO: u32 = 300;
/// The number of the first procedure that leaves results unwritten.
const FIRST_PARTIAL_WRITER: u32 = 500;
/// Bytes of inline results: the first two fit one message, the third needs a continued message or a Reply chunk, and
/// the last needs a Reply chunk.
const LENGTHS: [usize; 4] = [100, 3000, 8000, 20_000];
/// Bytes of results in Write chunks.
const CHUNKS: [usize; 2] = [5000, 1_000_000];

type Handler = fn(&mut ServerCall, usize) -> Result<(), Refusal>;

/// Handlers that leave `len` bytes of inline results unwritten, each with the number of bytes that it sets to 1 at the
/// start.
const INLINE: [(Handler, usize); 5] = [
    (|call, len| Ok(call.reply_mut(len).map(drop)?), 0),
    (|call, len| Ok(call.reply_mut(len).map(|results| results[..3].fill(1))?), 3),
    (
        |call, len| {
            call.reply_writer().put(&[1; 5]).map_err(|_| Refusal::SystemError)?;
            Ok(call.reply_mut(len).map(drop)?)
        },
        5,
    ),
    (
        |call, len| {
            call.reply_mut(len)?.fill(1);
            call.reply_writer();
            Ok(call.reply_mut(len).map(drop)?)
        },
        0,
    ),
    (
        |call, len| {
            call.reply_mut(40)?.fill(1);
            call.reply_mut(7)?;
            Ok(call.reply_mut(len).map(drop)?)
        },
        7,
    ),
];

/// Handlers that write ones and then zeroes into a Write chunk, each with the number of its ones. The second handler
/// replaces its first writer by another one, which starts again at byte 0.
const DIRECT: [(Handler, usize); 2] = [
    (
        |call, len| {
            let mut writer = call.result_writer(0)?;
            writer.put(&[1; 5])?;
            Ok(writer.put_zeroes(len - 5)?)
        },
        5,
    ),
    (
        |call, len| {
            call.result_writer(0)?.put(&[1; 9])?;
            let mut writer = call.result_writer(0)?;
            writer.put(&[1; 2])?;
            Ok(writer.put_zeroes(len - 2)?)
        },
        2,
    ),
];

/// Checks that all arguments are the secret, and returns the secret as results.
fn spill(call: &mut ServerCall) -> Result<(), Refusal> {
    let len = call.args().len();
    if !is_filled_with(SECRET, call.args()) || !is_filled_with(SECRET, call.read_chunk(0).unwrap_or_default()) {
        return Err(Refusal::GarbageArguments);
    }
    if let Ok(mut writer) = call.result_writer(0) {
        writer.put(&vec![SECRET; writer.room()])?;
    }
    call.reply_mut(len)?.fill(SECRET);
    Ok(())
}

/// How the calls of partial writers are answered.
const ANSWER_MODES: [AnswerMode; 4] = [AnswerMode::Shard, AnswerMode::Workers, AnswerMode::Thread, AnswerMode::Future];

/// A procedure that leaves results unwritten.
#[derive(Clone)]
struct PartialWriter {
    number: u32,
    procedure: Procedure,
    /// Bytes of the results.
    len: usize,
    /// Bytes at the start of the results that are 1.
    ones: usize,
    /// Whether the results are in a Write chunk.
    is_in_chunk: bool,
}

impl PartialWriter {
    fn expected(&self) -> Vec<u8> {
        ones_then_zeroes(self.len, self.ones)
    }
}

/// All partial writers. For each answer mode, those with inline results precede those with a Write chunk.
fn partial_writers() -> Vec<PartialWriter> {
    let inline = INLINE.iter().flat_map(|handler| LENGTHS.map(|len| (handler, len, false)));
    let direct = DIRECT.iter().flat_map(|handler| CHUNKS.map(|len| (handler, len, true)));
    let all: Vec<_> = inline.chain(direct).collect();
    /// A handler with the number of its ones, the length of the results, and whether they go into a chunk.
    type Answer<'a> = (&'a (Handler, usize), usize, bool);
    let make = |(number, (answer_mode, (&(handler, ones), len, is_in_chunk))): (u32, (AnswerMode, Answer<'_>))| {
        let procedure = answer_mode.procedure(move |call| handler(call, len));
        let procedure = if is_in_chunk { procedure.write_chunks(1, 1 << 20) } else { procedure.max_reply(len) };
        PartialWriter { number, procedure, len, ones, is_in_chunk }
    };
    (FIRST_PARTIAL_WRITER..).zip(pairs(ANSWER_MODES, all)).map(make).collect()
}

fn services() -> Services {
    let mut services = standard_and([(LONG_ECHO, echo_of(20_000))]);
    for (number, room) in SPILLS {
        let spill = Procedure::new(spill).max_reply(room).read_chunks(1, 1 << 20).uncounted().write_chunks(1, 1 << 20);
        services.add(PROGRAM, VERSION, number, spill);
    }
    for writer in partial_writers() {
        services.add(PROGRAM, VERSION, writer.number, writer.procedure);
    }
    services
}

/// A call that sends and receives only the secret.
fn secret_call(client: &mut LocalClient, args: usize, chunk: usize) -> ClientCall {
    let (procedure, _) = SPILLS.into_iter().find(|&(_, room)| args <= room).expect("a procedure for this length");
    let call = client.prepare_call(procedure, &vec![SECRET; args]).expect_reply(args);
    if chunk == 0 {
        return call;
    }
    let mut data = client.alloc(client.first(), chunk).unwrap();
    data.full_mut().fill(SECRET);
    call.read_chunk(args, data).write_chunk_into(client.alloc(client.first(), chunk).unwrap())
}

/// Fills the memory of both ends with the secret: as many buffers of each size as calls hold at a time, up to the size
/// for results of `len` bytes.
fn fill_with_secrets(client: &mut LocalClient, len: usize) {
    // Bytes of arguments, bytes of each chunk, and number of calls at a time.
    let sizes =
        [(60, 0, 16), (3000, 0, 16), (8000, 0, 4), (19_000, 0, 4), (64, 5000, 4), (64, 60_000, 4), (64, 1 << 20, 2)];
    // The calls with the largest chunks take as long as all others, so they are made only before results of that size.
    for (args, chunk, calls) in sizes.into_iter().filter(|&(_, chunk, _)| chunk <= 60_000 || len > 60_000) {
        client.launch_each(0..calls as u64, |client, _| secret_call(client, args, chunk));
        client.for_each_completion(calls, |done| {
            let reply = done.result.unwrap();
            assert!(reply.results().len() == args && is_filled_with(SECRET, reply.results()));
        });
    }
}

fn ones_then_zeroes(len: usize, ones: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..ones].fill(1);
    bytes
}

/// Starts a server of these services, and two clients.
fn start_two_clients(name: &'static str, mode: CreditMode, services: Services) -> (World, Address, [LocalClient; 2]) {
    let (world, address) = World::serving(name, mode.with_workers(1), services);
    let clients = [0; 2].map(|_| world.client(&address, mode));
    (world, address, clients)
}

fn alloc_room(client: &mut LocalClient, len: usize) -> Buf {
    let mut room = client.alloc(client.first(), len).unwrap();
    room.fill(UNTOUCHED);
    room
}

#[test]
fn unwritten_results_are_zero() {
    for_each(CREDIT_MODES, |mode| {
        let (_world, _, [mut victim, mut other]) = start_two_clients("unwritten-results", mode, services());
        // The credit mode affects the forms of replies, not the threads of handlers, so one mode covers the threads.
        let answer_modes = if mode == CreditMode::V2Windowed { ANSWER_MODES.len() } else { 1 };
        let all = partial_writers();
        let count = answer_modes * all.len() / ANSWER_MODES.len();
        for writer in all.into_iter().take(count) {
            let _row = row((writer.number, writer.len));
            fill_with_secrets(&mut victim, writer.len);
            let call = other.prepare_call(writer.number, b"");
            if writer.is_in_chunk {
                let call = call.write_chunk_into(alloc_room(&mut other, writer.len + 100));
                let mut reply = other.call(call).unwrap();
                assert!(reply.results().is_empty());
                let mut chunk = reply.take_chunks().next().unwrap();
                assert!(chunk[..] == writer.expected());
                chunk.set_window(0, writer.len + 100);
                assert!(is_filled_with(UNTOUCHED, &chunk[writer.len..]), "bytes after the result are unchanged");
            } else {
                assert_eq!(other.outcome(call.expect_reply(writer.len)), Ok(writer.expected()));
            }
        }
    });
}

/// The reply to a refused or dropped call has neither written results nor bytes of earlier calls.
#[test]
fn results_of_refused_and_dropped_calls_are_not_sent() {
    /// The number of the first of these procedures.
    const FIRST: u32 = 400;
    const LEN: usize = 3000;
    fn write_results(call: &mut ServerCall) {
        call.reply_mut(LEN).expect("a buffer")[..5].fill(1);
        if let Ok(mut writer) = call.result_writer(0) {
            writer.put(&[1; 5]).and_then(|()| writer.put_zeroes(LEN - 5)).expect("a chunk");
        }
    }
    let refuse = |call: &mut ServerCall| {
        write_results(call);
        Err(Refusal::SystemError)
    };
    // A handler that panics drops a deferred call.
    fn panics(call: &mut ServerCall) -> Result<(), Refusal> {
        write_results(call);
        panic!("as the test wants");
    }
    let mut all: Vec<_> = ANSWER_MODES.map(|answer_mode| answer_mode.procedure(refuse)).into();
    all.extend(
        [AnswerMode::Deferred, AnswerMode::Thread, AnswerMode::Future].map(|answer_mode| answer_mode.procedure(panics)),
    );
    for_each(CREDIT_MODES, |mode| {
        let mut services = services();
        for (number, procedure) in (FIRST..).zip(all.clone()) {
            services.add(PROGRAM, VERSION, number, procedure.max_reply(LEN).write_chunks(1, 1 << 16));
        }
        let (_world, address, [mut victim, mut other]) = start_two_clients("unwritten-given-up", mode, services);
        let mut peer = RawPeer::connect_in(&address, mode);
        for_each(FIRST..FIRST + all.len() as u32, |number| {
            fill_with_secrets(&mut victim, LEN);
            peer.call_as(number, number, Chunks::NONE, &[]);
            // RFC 5531 §9: MSG_ACCEPTED with an empty verifier, SYSTEM_ERR, and no results.
            assert_eq!(peer.answer().payload(), be(&[number, 1, 0, 0, 0, 5]));
            let call = other.prepare_call(number, b"").write_chunk_into(alloc_room(&mut other, LEN));
            let mut failed = other.call(call).unwrap_err();
            assert_eq!(failed.error, CallError::Refused(Refusal::SystemError));
            let room = failed.returned.take_chunks().next().expect("the call returns the chunk");
            assert!(is_filled_with(UNTOUCHED, &room), "the chunk is unchanged");
        });
    });
}

/// A short chunk is read into a page of the application that held another client's longer chunk.
#[test]
fn chunks_contain_no_bytes_of_earlier_calls() {
    const STORED: u32 = 400;
    for_each(CREDIT_MODES, |mode| {
        let mut world = World::new("unwritten-read-target");
        let (arena, _) = own_arena(PAGES * PAGE);
        let own = arena.clone();
        let mirror = |call: &mut ServerCall| {
            let page = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
            Ok(call.set_result(0, page)?)
        };
        let stored = Procedure::new(mirror).read_chunks(1, PAGE).uncounted().write_chunks(1, PAGE);
        let stored = stored.results_from_handler().place_reads_in(move |_, _, _| page_of(&own));
        let shard = in_mode(mode).with(|c| c.memory.arenas = vec![arena]);
        let address = world.serve_with(shard, standard_and([(STORED, stored)]));
        let [mut victim, mut other] = [0; 2].map(|_| world.client(&address, mode));
        let store = |client: &mut LocalClient, byte: u8, len: usize| {
            let mut data = client.alloc(client.first(), len).unwrap();
            data.fill(byte);
            let call = client.prepare_call(STORED, &[0; 4]).read_chunk(4, data);
            let call = call.write_chunk_into(alloc_room(client, PAGE));
            let mut page = client.call(call).unwrap().take_chunks().next().unwrap();
            assert!(page[..] == vec![byte; len], "{len} bytes");
            page.set_window(0, PAGE);
            assert!(is_filled_with(UNTOUCHED, &page[len..]), "bytes after {len} bytes are unchanged");
        };
        for len in [1, 3, 100, 4093] {
            // The clients share pages, whether the server uses its pages in turn or one of them repeatedly.
            (0..2 * PAGES).for_each(|_| store(&mut victim, SECRET, PAGE));
            (0..2 * PAGES).for_each(|_| store(&mut other, 1, len));
        }
    });
}

/// Neither the first reply nor the cached reply has bytes beyond the results.
#[test]
fn cached_replies_contain_no_bytes_of_other_calls() {
    let cache = request_cache(64);
    let mut services = services();
    let procedures: Vec<_> = (400..).zip(pairs(INLINE, [100, 3000])).collect();
    for &(number, ((handler, _), len)) in &procedures {
        let procedure = Procedure::new(move |call| handler(call, len)).max_reply(len);
        services.add(PROGRAM, VERSION, number, run_once(procedure, &cache));
    }
    let (world, address) = World::serving("unwritten-kept", small_server().with_workers(1), services);
    let mut victim = world.client(&address, small_config());
    let mut peer = RawPeer::connect(&address);
    for (number, ((_, ones), len)) in procedures {
        for _ in 0..2 {
            fill_with_secrets(&mut victim, len);
            peer.call_as(number, number, Chunks::NONE, &[]);
            let reply = reply_bytes(number, &ones_then_zeroes(len, ones));
            assert!(peer.receive().expect("a reply").payload() == reply, "procedure {number}");
        }
    }
    assert_eq!(cache.stats().hits, 10);
}

/// A client has two servers. Neither receives data that the client exchanged with the other.
#[test]
fn unwritten_bytes_of_a_clients_buffer_are_zero() {
    for_each(CREDIT_MODES, |mode| {
        let mut world = World::new("unwritten-arguments");
        let [first, other] = [0; 2].map(|_| world.serve_with(mode.with_workers(1), services()));
        let mut client = world.client(&first, mode);
        let second = client.add_connection(&other).unwrap();
        for_each(pairs([100, 3000, 3900, 20_000], [0, 5]), |(len, ones)| {
            fill_with_secrets(&mut client, len);
            let mut call = client.prepare(LONG_ECHO, len).unwrap().expect_reply(len);
            call.put_args(&vec![1; ones]).unwrap();
            assert!(client.call_on(second, call).unwrap().results() == ones_then_zeroes(len, ones));
            let mut call = client.prepare(LONG_ECHO, len).unwrap();
            assert!(is_filled_with(0, call.args_mut()));
            call.args_mut().fill(SECRET);
            call.put_args(b"").unwrap();
            assert_eq!(call.put_args(b"1"), Err(EncodeError::new(1, 0)));
            assert!(is_filled_with(SECRET, call.args_mut()), "written arguments are kept");
        });
        // Chunk memory belongs to one connection, and each connection starts with new memory. A byte of an XID there
        // may equal the secret by chance, so the test looks for eight such bytes in a row.
        for len in [100, 1 << 16, 1 << 20] {
            let mut chunk = client.alloc(second, len).unwrap();
            assert_eq!(chunk.full_mut().windows(8).filter(|bytes| **bytes == [SECRET; 8]).count(), 0, "{len} bytes");
        }
        let third = client.add_connection(&first).unwrap();
        assert!(is_filled_with(0, client.alloc(third, 1 << 16).unwrap().full_mut()));
    });
}

#[test]
fn unwritten_reverse_replies_are_zero() {
    let mut world = World::new("unwritten-reverse");
    let first = world.serve_with(small_config().with_workers(1), services());
    let (hello_services, callers) = services_with_hello();
    let other = world.serve_with(small_config(), hello_services);
    // The client has no workers, so procedures for workers run on its shard.
    let config = ClientConfig { services: Some(Arc::new(services())), ..small_client(small_config()) };
    let mut client = LocalClient::connect(&first, config.with(|c| c.shard.limits.max_calls = 200)).unwrap();
    let second = client.add_connection(&other).unwrap();
    let hello = client.prepare_call(HELLO, b"");
    client.call_on(second, hello).unwrap();
    let mut back = reverse_client(&world, &callers);
    for writer in partial_writers() {
        let _row = row((writer.number, writer.len));
        fill_with_secrets(&mut client, writer.len);
        let call = ClientCall::new(writer.number);
        let call = if writer.is_in_chunk { call.write_chunk(writer.len as u32) } else { call.expect_reply(writer.len) };
        let mut pending = back.start(call).unwrap();
        let reply = eventually(|| {
            client.poll(|_| {});
            pending.try_take()
        });
        let reply = reply.unwrap();
        let results = if writer.is_in_chunk { reply.chunk(0).unwrap_or_default() } else { reply.results() };
        assert!(results == writer.expected());
    }
    drop(back);
}
