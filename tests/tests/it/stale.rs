//! Reused memory: bytes of earlier users never reach a peer.
//! Handlers and callers leave parts of their buffers unwritten.

use rpcrdma::wire::EncodeError;
use rpcrdma_tests::prelude::*;

use super::own_memory::{PAGE, own_arena};
use super::read_targets::{PAGES, page_of};

/// The content of all of the server's memory from one client. No other client may see it.
const SECRET: u8 = 0xA5;
/// Procedures with the secret as arguments, results and chunks, and their limits of inline results in bytes.
const SPILLS: [(u32, usize); 3] = [(198, 100), (199, 3000), (200, 20_000)];
/// Echoes its arguments, in a message of the same form.
const LONG_ECHO: u32 = 300;
/// The first of the procedures that leave results unwritten.
const SLOPPY: u32 = 500;
/// Bytes of inline results: a short message, a long one, one in parts or in a Reply chunk, one in a Reply chunk.
const LENGTHS: [usize; 4] = [100, 3000, 8000, 20_000];
/// Bytes of results in Write chunks.
const CHUNKS: [usize; 2] = [5000, 1_000_000];

type Handler = fn(&mut ServerCall, usize) -> Result<(), Refusal>;

/// Handlers that leave `len` bytes of inline results unwritten, except for this number of ones at the start.
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

/// Handlers that leave parts of a result in a Write chunk unwritten. The last writer starts again at byte 0.
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

fn spill(call: &mut ServerCall) -> Result<(), Refusal> {
    let len = call.args().len();
    if !filled(SECRET, call.args()) || !filled(SECRET, call.read_chunk(0).unwrap_or_default()) {
        return Err(Refusal::GarbageArguments);
    }
    if let Ok(mut writer) = call.result_writer(0) {
        writer.put(&vec![SECRET; writer.room()])?;
    }
    call.reply_mut(len)?.fill(SECRET);
    Ok(())
}

/// How the sloppy procedures are answered.
const ANSWER_MODES: [AnswerMode; 4] = [AnswerMode::Shard, AnswerMode::Workers, AnswerMode::Thread, AnswerMode::Future];

/// A procedure that leaves results unwritten.
#[derive(Clone)]
struct Sloppy {
    number: u32,
    procedure: Procedure,
    /// Bytes of its results, and the ones at their start.
    len: usize,
    ones: usize,
    /// True if the results are in a Write chunk.
    chunk: bool,
}

impl Sloppy {
    fn expected(&self) -> Vec<u8> {
        expected(self.len, self.ones)
    }
}

/// The sloppy procedures. For each answer mode, inline ones come first, by length, then those with chunks.
fn sloppy() -> Vec<Sloppy> {
    let inline = INLINE.iter().flat_map(|one| LENGTHS.map(|len| (one, len, false)));
    let direct = DIRECT.iter().flat_map(|one| CHUNKS.map(|len| (one, len, true)));
    let all: Vec<_> = inline.chain(direct).collect();
    /// A handler with the bytes that it writes, the length of the results, and whether they go into a chunk.
    type Answer<'a> = (&'a (Handler, usize), usize, bool);
    let make = |(number, (answer_mode, (&(handler, ones), len, chunk))): (u32, (AnswerMode, Answer<'_>))| {
        let procedure = answer_mode.procedure(move |call| handler(call, len));
        let procedure = if chunk { procedure.write_chunks(1, 1 << 20) } else { procedure.max_reply(len) };
        Sloppy { number, procedure, len, ones, chunk }
    };
    (SLOPPY..).zip(pairs(ANSWER_MODES, all)).map(make).collect()
}

fn services() -> Services {
    let mut services = standard_and([(LONG_ECHO, echo_of(20_000))]);
    for (number, room) in SPILLS {
        let spill = Procedure::new(spill).max_reply(room).read_chunks(1, 1 << 20).uncounted().write_chunks(1, 1 << 20);
        services.add(PROGRAM, VERSION, number, spill);
    }
    for one in sloppy() {
        services.add(PROGRAM, VERSION, one.number, one.procedure);
    }
    services
}

/// A call that sends and receives nothing but the secret.
fn secret_call(client: &mut LocalClient, args: usize, chunk: usize) -> ClientCall {
    let (procedure, _) = SPILLS.into_iter().find(|&(_, room)| args <= room).expect("not too long");
    let call = client.prepared(procedure, &vec![SECRET; args]).expect_reply(args);
    if chunk == 0 {
        return call;
    }
    let mut data = client.alloc(client.first(), chunk).unwrap();
    data.full_mut().fill(SECRET);
    call.read_chunk(args, data).write_chunk_into(client.alloc(client.first(), chunk).unwrap())
}

/// Fills the memory of both ends with the secret. It covers as many buffers of each size as calls hold at a time, up to
/// the size for results of `len` bytes.
fn fill_with_secrets(client: &mut LocalClient, len: usize) {
    let sizes =
        [(60, 0, 16), (3000, 0, 16), (8000, 0, 4), (19_000, 0, 4), (64, 5000, 4), (64, 60_000, 4), (64, 1 << 20, 2)];
    // The largest calls take as long as all others, and most results are far shorter.
    for (args, chunk, calls) in sizes.into_iter().filter(|&(_, chunk, _)| chunk <= 60_000 || len > 60_000) {
        client.launch_each(0..calls as u64, |client, _| secret_call(client, args, chunk));
        client.each_end(calls, |done| {
            let reply = done.result.unwrap();
            assert!(reply.results().len() == args && filled(SECRET, reply.results()));
        });
    }
}

fn expected(len: usize, ones: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..ones].fill(1);
    bytes
}

/// A server of these services, and two clients.
fn two_clients(name: &'static str, mode: CreditMode, services: Services) -> (World, Address, [LocalClient; 2]) {
    let (world, address) = World::serving(name, mode.with_workers(1), services);
    let clients = [0; 2].map(|_| world.client(&address, mode));
    (world, address, clients)
}

fn room(client: &mut LocalClient, len: usize) -> Buf {
    let mut room = client.alloc(client.first(), len).unwrap();
    room.fill(UNTOUCHED);
    room
}

#[test]
fn unwritten_results_are_zero() {
    for_each(CREDIT_MODES, |mode| {
        let (_world, _, [mut victim, mut other]) = two_clients("unwritten-results", mode, services());
        // In the other modes the forms of replies differ, but not the threads of handlers.
        let answer_modes = if mode == CreditMode::V2Windowed { ANSWER_MODES.len() } else { 1 };
        let all = sloppy();
        let count = answer_modes * all.len() / ANSWER_MODES.len();
        for one in all.into_iter().take(count) {
            let _row = row((one.number, one.len));
            fill_with_secrets(&mut victim, one.len);
            let call = other.prepared(one.number, b"");
            if one.chunk {
                let call = call.write_chunk_into(room(&mut other, one.len + 100));
                let mut reply = other.call(call).unwrap();
                assert!(reply.results().is_empty());
                let mut chunk = reply.take_chunks().next().unwrap();
                assert!(chunk[..] == one.expected());
                chunk.set_window(0, one.len + 100);
                assert!(filled(UNTOUCHED, &chunk[one.len..]), "bytes after the result were written");
            } else {
                assert_eq!(other.outcome(call.expect_reply(one.len)), Ok(one.expected()));
            }
        }
    });
}

/// A refused or dropped call sends neither its written results nor earlier content.
#[test]
fn results_of_refused_and_dropped_calls_are_not_sent() {
    const GIVEN_UP: u32 = 400;
    const LEN: usize = 3000;
    fn begin(call: &mut ServerCall) {
        call.reply_mut(LEN).expect("room")[..5].fill(1);
        if let Ok(mut writer) = call.result_writer(0) {
            writer.put(&[1; 5]).and_then(|()| writer.put_zeroes(LEN - 5)).expect("room");
        }
    }
    let refuse = |call: &mut ServerCall| {
        begin(call);
        Err(Refusal::SystemError)
    };
    // A handler that panics drops a deferred call.
    fn panics(call: &mut ServerCall) -> Result<(), Refusal> {
        begin(call);
        panic!("as the test wants");
    }
    let mut all: Vec<_> = ANSWER_MODES.map(|answer_mode| answer_mode.procedure(refuse)).into();
    all.extend(
        [AnswerMode::Deferred, AnswerMode::Thread, AnswerMode::Future].map(|answer_mode| answer_mode.procedure(panics)),
    );
    for_each(CREDIT_MODES, |mode| {
        let mut services = services();
        for (number, procedure) in (GIVEN_UP..).zip(all.clone()) {
            services.add(PROGRAM, VERSION, number, procedure.max_reply(LEN).write_chunks(1, 1 << 16));
        }
        let (_world, address, [mut victim, mut other]) = two_clients("unwritten-given-up", mode, services);
        let mut peer = RawPeer::connect_in(&address, mode);
        for_each(GIVEN_UP..GIVEN_UP + all.len() as u32, |number| {
            fill_with_secrets(&mut victim, LEN);
            peer.call_as(number, number, Chunks::NONE, &[]);
            // RFC 5531 §9: MSG_ACCEPTED with an empty verifier, SYSTEM_ERR, and no results.
            assert_eq!(peer.answer().payload(), be(&[number, 1, 0, 0, 0, 5]));
            let call = other.prepared(number, b"").write_chunk_into(room(&mut other, LEN));
            let mut failed = other.call(call).unwrap_err();
            assert_eq!(failed.error, CallError::Refused(Refusal::SystemError));
            let room = failed.returned.take_chunks().next().expect("it comes back");
            assert!(filled(UNTOUCHED, &room), "the chunk was written");
        });
    });
}

/// A short chunk lands in a page of the application's cache that held another client's long chunk.
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
            let call = client.prepared(STORED, &[0; 4]).read_chunk(4, data);
            let call = call.write_chunk_into(room(client, PAGE));
            let mut page = client.call(call).unwrap().take_chunks().next().unwrap();
            assert!(page[..] == vec![byte; len], "{len} bytes");
            page.set_window(0, PAGE);
            assert!(filled(UNTOUCHED, &page[len..]), "{len} bytes: behind them");
        };
        for len in [1, 3, 100, 4093] {
            // The server uses its pages in turn, or one page repeatedly.
            (0..2 * PAGES).for_each(|_| store(&mut victim, SECRET, PAGE));
            (0..2 * PAGES).for_each(|_| store(&mut other, 1, len));
        }
    });
}

/// Both replies are clean, and the cache keeps nothing beyond the results.
#[test]
fn cached_replies_contain_no_bytes_of_other_calls() {
    let cache = request_cache(64);
    let mut services = services();
    let kept: Vec<_> = (400..).zip(pairs(INLINE, [100, 3000])).collect();
    for &(number, ((handler, _), len)) in &kept {
        let procedure = Procedure::new(move |call| handler(call, len)).max_reply(len);
        services.add(PROGRAM, VERSION, number, run_once(procedure, &cache));
    }
    let (world, address) = World::serving("unwritten-kept", small_server().with_workers(1), services);
    let mut victim = world.client(&address, small());
    let mut peer = RawPeer::connect(&address);
    for (number, ((_, ones), len)) in kept {
        for _ in 0..2 {
            fill_with_secrets(&mut victim, len);
            peer.call_as(number, number, Chunks::NONE, &[]);
            let reply = reply_bytes(number, &expected(len, ones));
            assert!(peer.receive().expect("a reply").payload() == reply, "procedure {number}");
        }
    }
    assert_eq!(cache.stats().hits, 10);
}

/// A client of two servers. Neither server sees data that the client exchanged with the other.
#[test]
fn unwritten_bytes_of_a_clients_buffer_are_zero() {
    for_each(CREDIT_MODES, |mode| {
        let mut world = World::new("unwritten-arguments");
        let [one, other] = [0; 2].map(|_| world.serve_with(mode.with_workers(1), services()));
        let mut client = world.client(&one, mode);
        let second = client.add_connection(&other).unwrap();
        for_each(pairs([100, 3000, 3900, 20_000], [0, 5]), |(len, ones)| {
            fill_with_secrets(&mut client, len);
            let mut call = client.prepare(LONG_ECHO, len).unwrap().expect_reply(len);
            call.put_args(&vec![1; ones]).unwrap();
            assert!(client.call_on(second, call).unwrap().results() == expected(len, ones));
            let mut call = client.prepare(LONG_ECHO, len).unwrap();
            assert!(filled(0, call.args_mut()));
            call.args_mut().fill(SECRET);
            call.put_args(b"").unwrap();
            assert_eq!(call.put_args(b"1"), Err(EncodeError::new(1, 0)));
            assert!(filled(SECRET, call.args_mut()), "what is written stays");
        });
        // Memory for chunks belongs to a connection, and is new with it. One byte of an XID may equal the secret; eight
        // in a row do not.
        for len in [100, 1 << 16, 1 << 20] {
            let mut chunk = client.alloc(second, len).unwrap();
            assert_eq!(chunk.full_mut().windows(8).filter(|bytes| **bytes == [SECRET; 8]).count(), 0, "{len} bytes");
        }
        let third = client.add_connection(&one).unwrap();
        assert!(filled(0, client.alloc(third, 1 << 16).unwrap().full_mut()));
    });
}

#[test]
fn unwritten_reverse_replies_are_zero() {
    let mut world = World::new("unwritten-reverse");
    let one = world.serve_with(small().with_workers(1), services());
    let (telling, told) = services_with_hello();
    let other = world.serve_with(small(), telling);
    // The client has no workers, so their procedures run on its shard, too.
    let config = ClientConfig { services: Some(Arc::new(services())), ..small_client(small()) };
    let mut client = LocalClient::connect(&one, config.with(|c| c.shard.limits.max_calls = 200)).unwrap();
    let second = client.add_connection(&other).unwrap();
    let hello = client.prepared(HELLO, b"");
    client.call_on(second, hello).unwrap();
    let mut back = called_back(&world, &told);
    for one in sloppy() {
        let _row = row((one.number, one.len));
        fill_with_secrets(&mut client, one.len);
        let call = ClientCall::new(one.number);
        let call = if one.chunk { call.write_chunk(one.len as u32) } else { call.expect_reply(one.len) };
        let mut pending = back.start(call).unwrap();
        let reply = eventually(|| {
            client.poll(|_| {});
            pending.try_take()
        });
        let reply = reply.unwrap();
        let got = if one.chunk { reply.chunk(0).unwrap_or_default() } else { reply.results() };
        assert!(got == one.expected());
    }
    drop(back);
}
