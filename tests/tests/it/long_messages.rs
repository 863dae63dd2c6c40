//! Long messages: Position Zero Read chunks and Reply chunks (version 2 §4.5.4; RFC 8166 §3.5.3).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rpcrdma_tests::prelude::*;

/// Runs a test in each credit mode, with a raw client of a server that sends long replies.
fn with_long(name: &'static str, test: impl FnMut(&mut RawPeer)) {
    with_raw_of(name, CREDIT_MODES, &services_for(16 << 10), test);
}

#[test]
fn a_long_call_is_read_and_answered() {
    with_long("long-call", |client| {
        // The argument is opaque data of 8993 bytes with its XDR padding, which the reply repeats.
        let args = [be(&[8993]), data_of(1, 8993), vec![0; 3]].concat();
        let message = call_bytes(XID, PROGRAM, VERSION, ECHO, &args);
        let (whole, _memory) = client.expose(&message, Access::REMOTE_READ);
        let (room, replied) = client.expose_writable(9024);
        // Segments may end at any byte.
        client.send_nomsg(XID, &Lists::new().read(0, whole.cut(&[1, 38, 3, 5001, 3997])).reply([room]));
        assert_eq!(client.answer().htype(), HeaderType::Nomsg);
        assert_eq!(contents(&replied, 9024), reply_bytes(XID, &args));
        // The positions of further Read chunks count from the start of the whole message.
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[5]));
        let (whole, _memory) = client.expose(&message, Access::REMOTE_READ);
        let ((first, _first_memory), (second, _second_memory)) =
            (client.expose_readable(5, 501), client.expose_readable(6, 8));
        let lists = Lists::new().read(0, whole.cut(&[40, 4])).read(ARGS_AT + 4, first.cut(&[500, 1]));
        client.send_nomsg(XID, &lists.read(ARGS_AT + 4 + 504, [second]));
        assert_eq!(client.answer().payload(), reply_bytes(XID, &be(&[501, 8])));
    });
}

#[test]
fn a_nomsg_without_its_payload_chunk_is_refused() {
    with_long("no-payload", |client| {
        let (memory, _memory) = client.expose(&[0; 64], Access::REMOTE);
        for (what, lists) in [
            ("Write chunks", Lists::new().write([memory])),
            ("a Reply chunk", Lists::new().reply([memory])),
            ("a Read chunk at another position", Lists::new().read(40, [memory])),
            ("an empty chunk", Lists::new().read(0, [memory.part(0, 0)])),
        ] {
            client.send_nomsg(XID, &lists);
            client.expect_bad_xdr(what);
            client.ping();
        }
    });
    // A reply without its payload chunk is malformed, too.
    for_each(CREDIT_MODES, |mode| {
        let server = RawServer::start_in(mode, "no-payload-2", move |peer| {
            for used in [false, true] {
                let call = peer.next_call();
                let empty = reply_segment(&call).part(0, 0);
                // A NOMSG without chunks is a reply because of its XID: a pure grant has XID 0.
                send_nomsg(peer, call.xid(), used.then_some(empty));
            }
        });
        let mut client = server.client(mode);
        for _ in 0..2 {
            assert_matches!(call_with_reply_room(&mut client).expect_err("no reply"), CallError::MalformedReply(_));
            assert_eq!(client.stats().exposed_buffers, 0);
        }
    });
}

fn reply_segment(call: &Message) -> Segment {
    call.reply_chunk().expect("a Reply chunk").segments().next().expect("a segment")
}

/// Sends a reply as a NOMSG, whose Reply chunk has the segment `used`, or no segment.
fn send_nomsg(peer: &mut RawPeer, xid: u32, used: Option<Segment>) {
    let lists = match (peer.version, used) {
        (_, Some(used)) => Lists::new().reply([used]),
        // Version 1 has no NOMSG without chunks: an empty Reply chunk is the minimum.
        (Version::V1, None) => Lists::new().reply([]),
        (Version::V2, None) => Lists::new(),
    };
    peer.send_body(xid, Flags::RESPONSE, Body::Nomsg(lists.chunks()), b"");
}

/// Writes a reply into the call's Reply chunk, and sends its header.
fn send_long_reply(peer: &mut RawPeer, call: &Message, message: &[u8]) {
    let room = reply_segment(call);
    peer.write(message, remote(room));
    send_nomsg(peer, call.xid(), Some(room.part(0, message.len() as u32)));
}

/// Makes a call that allows a reply of 20000 bytes.
fn call_with_reply_room(client: &mut LocalClient) -> Outcome {
    client.run_call(|client| client.prepare_call(ECHO, &[0; 4]).expect_reply(20_000))
}

/// A configuration without continued messages.
fn without_continuation(mode: CreditMode) -> Config {
    in_mode(mode).with(|c| c.debug.continue_up_to = 0)
}

#[test]
fn a_long_reply_with_two_different_xids_ends_its_call() {
    for_each(CREDIT_MODES, |mode| {
        let server = RawServer::start_in(mode, "long-reply-xids", move |peer| {
            for wrong in [1, 0] {
                let call = peer.next_call();
                send_long_reply(peer, &call, &reply_bytes(call.xid() ^ wrong, &[9; 12_000]));
            }
        });
        let mut client = server.client(without_continuation(mode));
        assert_matches!(call_with_reply_room(&mut client).expect_err("another XID"), CallError::MalformedReply(_));
        assert_eq!(call_with_reply_room(&mut client), Ok(vec![9; 12_000]));
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}

/// The memfds of this process that have `bytes` at offset `at`. On the software fabric an address is an arena offset,
/// so the client's memory is among them. A hostile process may keep such a descriptor forever.
fn memories_with(bytes: &[u8], at: u64) -> Vec<File> {
    let open = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten().map(|entry| entry.path());
    let is_memory =
        |path: &PathBuf| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
    // Other tests open and close descriptors at the same time, so opening a path again may fail.
    let files = open.filter(is_memory).filter_map(|path| File::options().read(true).write(true).open(path).ok());
    let mut found = vec![0; bytes.len()];
    files.filter(|file| file.read_exact_at(&mut found, at).is_ok() && found == bytes).collect()
}

/// The server writes into the Reply chunk after its reply. This is possible only on the software fabric, where the peer
/// itself enforces the windows.
#[test]
fn later_writes_of_the_server_do_not_change_a_reply() {
    if test_fabric::on_device() {
        return;
    }
    let random = data_of(std::process::id(), 8000);
    for_each(CREDIT_MODES, |mode| {
        let ((send_read, await_read), (send_changed, await_changed)) = (channel(), channel());
        let results = random.clone();
        let server = RawServer::start_in(mode, "changed-reply", move |peer| {
            let call = peer.next_call();
            let (room, message) = (reply_segment(&call), reply_bytes(call.xid(), &results));
            peer.write(&message, remote(room));
            // The list may include the server's own memory. The client has no copy yet, because the reply was not sent.
            let memories = memories_with(&message, room.offset);
            assert!(!memories.is_empty(), "the arena that the client has exposed");
            send_nomsg(peer, call.xid(), Some(room.part(0, message.len() as u32)));
            await_read.recv().expect("the client has read the reply");
            for memory in memories {
                memory.write_all_at(&vec![0xff; message.len()], room.offset).expect("the descriptor is open");
            }
            send_changed.send(()).expect("the client waits");
        });
        let mut client = server.client(without_continuation(mode));
        let call = client.prepare_call(ECHO, &[0; 4]).expect_reply(20_000);
        let reply = client.call(call).expect("a reply");
        assert!(reply.results() == random);
        send_read.send(()).expect("the server waits");
        await_changed.recv().expect("the server has changed the memory");
        assert!(reply.results() == random, "the reply of the client is unchanged");
    });
}

/// Makes a call with `args` bytes of arguments, and Read chunks of these lengths behind them, to a raw server. Returns
/// the header that the server received, and the RPC message that it read from the Position Zero Read chunk.
fn record_long_call(mode: CreditMode, segment_size: u32, args: usize, chunks: &[usize]) -> (Message, Vec<u8>) {
    let (send_call, calls) = channel();
    let server = RawServer::start_silently("long-calls", move |peer| {
        peer.offers = Properties { segment_size, ..peer.offers };
        peer.answer_properties_in(mode);
        let call = peer.next_call();
        let whole: Vec<_> = call.reads().filter(|read| read.position == 0).collect();
        let message = whole.iter().flat_map(|read| peer.fetch(read.target).expect("the chunk is readable")).collect();
        let xid = call.xid();
        send_call.send((call, message)).expect("the test waits");
        peer.reply(xid, b"");
    });
    let mut client = server.client(without_continuation(mode));
    let call = client.prepare_chunked_call(STORE, &data_of(3, args), chunks, &[]);
    client.call(call).expect("a reply");
    assert_eq!(client.stats().exposed_buffers, 0);
    calls.recv().expect("the server received the call")
}

#[test]
fn version_1_sends_oversize_messages_as_long_messages() {
    for (args, htype) in [(956, HeaderType::Msg), (960, HeaderType::Nomsg), (60_000, HeaderType::Nomsg)] {
        let (header, message) = record_long_call(CreditMode::V1, 0, args, &[]);
        let is_long = htype == HeaderType::Nomsg;
        assert_eq!((header.htype(), header.version(), header.has_chunks()), (htype, Version::V1, is_long));
        if is_long {
            assert!(header.payload().is_empty());
            let (call, args_at) = CallHeader::parse(&message).expect("an RPC call");
            assert_eq!((call.xid, call.procedure, message.len()), (header.xid(), STORE, args_at + args));
            assert!(has_pattern(3, &message[args_at..]));
        }
    }
}

#[test]
fn a_long_call_has_position_0_in_every_segment() {
    let reads = |call: &Message| call.reads().map(|read| (read.position, read.target.length)).collect::<Vec<_>>();
    let at = ARGS_AT + 20_000;
    for_each(V2_CREDIT_MODES, |mode| {
        let (call, message) = record_long_call(mode, 4096, 20_000, &[5000]);
        assert_eq!(reads(&call), [(0, 4096), (0, 4096), (0, 4096), (0, 4096), (0, 3656), (at, 4096), (at, 904)]);
        assert!(call.htype() == HeaderType::Nomsg && !call.flags().contains(Flags::RESPONSE));
        assert!(message.len() == at as usize && has_pattern(3, &message[ARGS_AT as usize..]));
    });
    // In version 1 each chunk has one segment.
    assert_eq!(reads(&record_long_call(CreditMode::V1, 0, 20_000, &[5000]).0), [(0, at), (at, 5000)]);
}

#[test]
fn a_reply_that_does_not_fit_inline_uses_the_reply_chunk() {
    with_long("reply-chunk", |client| {
        let (room, memory) = client.expose_writable(10_000);
        let segments = room.cut(&[4000, 1, 5000, 999]);
        let answer = client.call_and_receive(REPLY, &Lists::new().reply(&segments), &be(&[6000]));
        assert_eq!((answer.htype(), answer.payload()), (HeaderType::Nomsg, &b""[..]));
        assert_eq!(answer.flags().contains(Flags::RESPONSE), client.version == Version::V2);
        let used: Vec<_> = answer.reply_chunk().expect("the reply returns the chunk").segments().collect();
        let with_length = |(offered, length): (&Segment, _)| Segment { length, ..*offered };
        assert_eq!(used, segments.iter().zip([4000, 1, 2023, 0]).map(with_length).collect::<Vec<_>>());
        let written = contents(&memory, 10_000);
        assert!(written[..24] == reply_bytes(XID, b"") && has_pattern(6000, &written[24..6024]));
        assert!(is_filled_with(UNTOUCHED, &written[6024..]), "nothing else is written");
    });
}

/// A result item with a Write chunk goes into that chunk. The rest of the reply uses the Reply chunk only if it is
/// still too long for a message.
#[test]
fn a_reply_is_reduced_before_it_goes_into_the_reply_chunk() {
    const ITEM: usize = 2001;
    let both = Procedure::new(|call| {
        let len = call.args().first().map_or(0, |&byte| 100 * usize::from(byte));
        put_pattern(call.result_writer(0)?, 7, ITEM)?;
        pattern(8, call.reply_mut(len)?);
        Ok(())
    });
    let services = standard_and([(20, both.write_chunks(1, 4000).max_reply(20_000))]);
    with_raw_of("reduced-first", CREDIT_MODES, &services, |client| {
        let ((write, item), (room, rest)) = (client.expose_writable(3000), client.expose_writable(9000));
        // The shorter replies fit inline without the item.
        for (args, long) in [(1u8, false), (30, client.version == Version::V1), (80, true)] {
            let _row = row(args);
            let answer = client.call_and_receive(20, &Lists::new().write([write]).reply([room]), &[args, 0, 0, 0]);
            let message = reply_bytes(XID, &data_of(8, 100 * usize::from(args)));
            assert!(answer.writes().map(|chunk| chunk.total_length()).eq([ITEM as u64]));
            let used = answer.reply_chunk().expect("the reply returns the chunk").total_length();
            assert_eq!(used, if long { message.len() as u64 } else { 0 });
            let (first, second) = (contents(&item, 3000), contents(&rest, 9000));
            assert!(has_pattern(7, &first[..ITEM]) && is_filled_with(UNTOUCHED, &first[ITEM..]));
            match long {
                true => assert!(answer.payload().is_empty() && second[..message.len()] == message),
                false => assert_eq!(answer.payload(), message),
            }
        }
    });
}

#[test]
fn replies_return_used_and_unused_reply_chunks() {
    with_long("comes-back", |client| {
        let segments = client.expose_writable(9000).0.cut(&[5000, 4000]);
        // The Reply chunk is used, not needed, not needed by a refusal, or has no segments.
        let cases: [(u32, u32, &[Segment], &[u32]); 4] = [
            (REPLY, 8000, &segments, &[5000, 3024]),
            (REPLY, 16, &segments, &[0, 0]),
            (REFUSE, 0, &segments, &[0, 0]),
            (REPLY, 16, &[], &[]),
        ];
        for (procedure, word, offered, lens) in cases {
            let answer = client.call_and_receive(procedure, &Lists::new().reply(offered), &be(&[word]));
            let used =
                answer.reply_chunk().expect("the reply returns the chunk").segments().map(|segment| segment.length);
            assert_eq!(used.collect::<Vec<_>>(), lens, "{procedure}, {word}");
        }
        assert!(
            client.call_and_receive(REPLY, Chunks::NONE, &be(&[16])).reply_chunk().is_none(),
            "the call offers no Reply chunk"
        );
    });
}

#[test]
fn version_1_offers_a_reply_chunk_when_a_reply_may_not_fit() {
    let (server, calls) = RawServer::recording("offers", |mut listener| listener.accept_in(CreditMode::V1));
    let mut client = server.client(CreditMode::V1);
    for_each([(0, false), (972, false), (973, true), (10_001, true), (60_000, true)], |(expected, offered)| {
        let call = client.prepare_call(ECHO, &[0; 4]).expect_reply(expected);
        client.call(call).expect("a reply");
        let room = calls.recv().expect("the server recorded the call").reply_chunk().map(|chunk| chunk.total_length());
        assert_eq!(room.is_some(), offered);
        assert!(room.is_none_or(|room| room >= 24 + expected as u64), "{room:?}");
    });
}
