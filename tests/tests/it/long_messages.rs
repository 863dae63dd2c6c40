//! Long messages: Position Zero Read chunks and Reply chunks (version 2 §4.5.4; RFC 8166 §3.5.3).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rpcrdma_tests::prelude::*;

/// Runs a test in each credit mode, with a raw client of a server of long replies.
fn with_long(name: &'static str, test: impl FnMut(&mut RawPeer)) {
    with_raw_of(name, CREDIT_MODES, &services_for(16 << 10), test);
}

#[test]
fn a_long_call_is_read_and_answered() {
    with_long("long-call", |client| {
        // Opaque data of 8993 bytes in XDR: the reply has its padding, too.
        let args = [be(&[8993]), data_of(1, 8993), vec![0; 3]].concat();
        let message = call_bytes(XID, PROGRAM, VERSION, ECHO, &args);
        let (whole, _memory) = client.expose(&message, Access::REMOTE_READ);
        let (room, replied) = client.room(9024);
        // Segments may end anywhere.
        client.nomsg(XID, &Lists::new().read(0, whole.cut(&[1, 38, 3, 5001, 3997])).reply([room]));
        assert_eq!(client.answer().htype(), HeaderType::Nomsg);
        assert_eq!(contents(&replied, 9024), reply_bytes(XID, &args));
        // Further chunks have their positions in the whole message.
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[5]));
        let (whole, _memory) = client.expose(&message, Access::REMOTE_READ);
        let ((first, _one), (second, _two)) = (client.source(5, 501), client.source(6, 8));
        let lists = Lists::new().read(0, whole.cut(&[40, 4])).read(ARGS_AT + 4, first.cut(&[500, 1]));
        client.nomsg(XID, &lists.read(ARGS_AT + 4 + 504, [second]));
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
            client.nomsg(XID, &lists);
            client.bad_xdr(what);
            client.ping();
        }
    });
    // A reply without its payload chunk is malformed, too.
    for_each(CREDIT_MODES, |mode| {
        let server = RawServer::start_in(mode, "no-payload-2", move |peer| {
            for used in [false, true] {
                let call = peer.next_call();
                let empty = room_of(&call).part(0, 0);
                // A NOMSG without chunks is a reply because of its XID: a pure grant has XID 0.
                long_reply(peer, call.xid(), used.then_some(empty));
            }
        });
        let mut client = server.client(mode);
        for _ in 0..2 {
            assert_matches!(with_room(&mut client).expect_err("no reply"), CallError::MalformedReply(_));
            assert_eq!(client.stats().exposed_buffers, 0);
        }
    });
}

fn room_of(call: &Message) -> Segment {
    call.reply_chunk().expect("room").segments().next().expect("a segment")
}

/// Sends a NOMSG that has used this Reply chunk, or none.
fn long_reply(peer: &mut RawPeer, xid: u32, used: Option<Segment>) {
    let lists = match (peer.version, used) {
        (_, Some(used)) => Lists::new().reply([used]),
        // Version 1 has no NOMSG without chunks: an empty Reply chunk is the minimum.
        (Version::V1, None) => Lists::new().reply([]),
        (Version::V2, None) => Lists::new(),
    };
    peer.send_body(xid, Flags::RESPONSE, Body::Nomsg(lists.chunks()), b"");
}

/// Writes a long reply into a call's Reply chunk, and sends its header.
fn reply_long(peer: &mut RawPeer, call: &Message, message: &[u8]) {
    let room = room_of(call);
    peer.write(message, remote(room));
    long_reply(peer, call.xid(), Some(room.part(0, message.len() as u32)));
}

/// A call that allows a reply of 20000 bytes.
fn with_room(client: &mut LocalClient) -> Outcome {
    client.run_call(|client| client.prepared(ECHO, &[0; 4]).expect_reply(20_000))
}

/// A configuration without continued messages.
fn uncontinued(mode: CreditMode) -> Config {
    in_mode(mode).with(|c| c.debug.continue_up_to = 0)
}

#[test]
fn a_long_reply_with_two_different_xids_ends_its_call() {
    for_each(CREDIT_MODES, |mode| {
        let server = RawServer::start_in(mode, "long-reply-xids", move |peer| {
            for wrong in [1, 0] {
                let call = peer.next_call();
                reply_long(peer, &call, &reply_bytes(call.xid() ^ wrong, &[9; 12_000]));
            }
        });
        let mut client = server.client(uncontinued(mode));
        assert_matches!(with_room(&mut client).expect_err("another XID"), CallError::MalformedReply(_));
        assert_eq!(with_room(&mut client), Ok(vec![9; 12_000]));
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}

/// The memfds of this process with these bytes at this offset. On the software fabric addresses are arena offsets, so
/// the client's memory is among them. A hostile process keeps such access for good.
fn memories_with(bytes: &[u8], at: u64) -> Vec<File> {
    let open = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten().map(|entry| entry.path());
    let is_memory =
        |path: &PathBuf| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
    // Descriptors of other tests open and close meanwhile.
    let files = open.filter(is_memory).filter_map(|path| File::options().read(true).write(true).open(path).ok());
    let mut found = vec![0; bytes.len()];
    files.filter(|file| file.read_exact_at(&mut found, at).is_ok() && found == bytes).collect()
}

/// The server writes into the Reply chunk after its reply. This is possible on a fabric whose peer itself enforces the
/// windows.
#[test]
fn later_writes_of_the_server_do_not_change_a_reply() {
    if test_fabric::on_device() {
        return;
    }
    let random = data_of(std::process::id(), 8000);
    for_each(CREDIT_MODES, |mode| {
        let ((read, is_read), (changed, is_changed)) = (channel(), channel());
        let results = random.clone();
        let server = RawServer::start_in(mode, "changed-reply", move |peer| {
            let call = peer.next_call();
            let (room, message) = (room_of(&call), reply_bytes(call.xid(), &results));
            peer.write(&message, remote(room));
            // Possibly also the server's own memory, but not the client's copy, which does not exist yet.
            let memories = memories_with(&message, room.offset);
            assert!(!memories.is_empty(), "the arena that the client has exposed");
            long_reply(peer, call.xid(), Some(room.part(0, message.len() as u32)));
            is_read.recv().expect("the client has read it");
            for memory in memories {
                memory.write_all_at(&vec![0xff; message.len()], room.offset).expect("still its memory");
            }
            changed.send(()).expect("the client waits");
        });
        let mut client = server.client(uncontinued(mode));
        let call = client.prepared(ECHO, &[0; 4]).expect_reply(20_000);
        let reply = client.call(call).expect("a reply");
        assert!(reply.results() == random);
        read.send(()).expect("the server waits");
        is_changed.recv().expect("the server has changed it");
        assert!(reply.results() == random, "the server has changed the reply of the client");
    });
}

/// A raw server's view of a long call with `args` bytes of arguments and a Read chunk behind them: its header, and the
/// RPC message, read from the Read list's segments.
fn long_call(mode: CreditMode, segment_size: u32, args: usize, chunk: &[usize]) -> (Message, Vec<u8>) {
    let (tell, told) = channel();
    let server = RawServer::start_silently("long-calls", move |peer| {
        peer.offers = Properties { segment_size, ..peer.offers };
        peer.answer_properties_in(mode);
        let call = peer.next_call();
        let whole: Vec<_> = call.reads().filter(|read| read.position == 0).collect();
        let message = whole.iter().flat_map(|read| peer.fetch(read.target).expect("it is offered")).collect();
        let xid = call.xid();
        tell.send((call, message)).expect("the test listens");
        peer.reply(xid, b"");
    });
    let mut client = server.client(uncontinued(mode));
    let call = client.chunked(STORE, &data_of(3, args), chunk, &[]);
    client.call(call).expect("a reply");
    assert_eq!(client.stats().exposed_buffers, 0);
    told.recv().expect("the server has spoken")
}

#[test]
fn version_1_sends_oversize_messages_as_long_messages() {
    for (args, htype) in [(956, HeaderType::Msg), (960, HeaderType::Nomsg), (60_000, HeaderType::Nomsg)] {
        let (header, message) = long_call(CreditMode::V1, 0, args, &[]);
        let chunk = htype == HeaderType::Nomsg;
        assert_eq!((header.htype(), header.version(), header.has_chunks()), (htype, Version::V1, chunk));
        if chunk {
            assert!(header.payload().is_empty());
            let (call, args_at) = CallHeader::parse(&message).expect("an RPC call");
            assert_eq!((call.xid, call.procedure, message.len()), (header.xid(), STORE, args_at + args));
            assert!(patterned(3, &message[args_at..]));
        }
    }
}

#[test]
fn a_long_call_has_position_0_in_every_segment() {
    let reads = |call: &Message| call.reads().map(|read| (read.position, read.target.length)).collect::<Vec<_>>();
    let at = ARGS_AT + 20_000;
    for_each(V2_CREDIT_MODES, |mode| {
        let (call, message) = long_call(mode, 4096, 20_000, &[5000]);
        assert_eq!(reads(&call), [(0, 4096), (0, 4096), (0, 4096), (0, 4096), (0, 3656), (at, 4096), (at, 904)]);
        assert!(call.htype() == HeaderType::Nomsg && !call.flags().contains(Flags::RESPONSE));
        assert!(message.len() == at as usize && patterned(3, &message[ARGS_AT as usize..]));
    });
    // In version 1 each chunk has one segment.
    assert_eq!(reads(&long_call(CreditMode::V1, 0, 20_000, &[5000]).0), [(0, at), (at, 5000)]);
}

#[test]
fn a_reply_that_does_not_fit_inline_uses_the_reply_chunk() {
    with_long("reply-chunk", |client| {
        let (room, memory) = client.room(10_000);
        let segments = room.cut(&[4000, 1, 5000, 999]);
        let answer = client.ask(REPLY, &Lists::new().reply(&segments), &be(&[6000]));
        assert_eq!((answer.htype(), answer.payload()), (HeaderType::Nomsg, &b""[..]));
        assert_eq!(answer.flags().contains(Flags::RESPONSE), client.version == Version::V2);
        let used: Vec<_> = answer.reply_chunk().expect("it comes back").segments().collect();
        let with = |(given, length): (&Segment, _)| Segment { length, ..*given };
        assert_eq!(used, segments.iter().zip([4000, 1, 2023, 0]).map(with).collect::<Vec<_>>());
        let written = contents(&memory, 10_000);
        assert!(written[..24] == reply_bytes(XID, b"") && patterned(6000, &written[24..6024]));
        assert!(filled(UNTOUCHED, &written[6024..]), "more was written");
    });
}

/// An item with a Write chunk goes there. The rest uses the Reply chunk only if it is still too long.
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
        let ((write, item), (room, rest)) = (client.room(3000), client.room(9000));
        // The shorter replies fit inline without the item.
        for (args, long) in [(1u8, false), (30, client.version == Version::V1), (80, true)] {
            let _row = row(args);
            let answer = client.ask(20, &Lists::new().write([write]).reply([room]), &[args, 0, 0, 0]);
            let message = reply_bytes(XID, &data_of(8, 100 * usize::from(args)));
            assert!(answer.writes().map(|chunk| chunk.total_length()).eq([ITEM as u64]));
            let used = answer.reply_chunk().expect("it comes back").total_length();
            assert_eq!(used, if long { message.len() as u64 } else { 0 });
            let (first, second) = (contents(&item, 3000), contents(&rest, 9000));
            assert!(patterned(7, &first[..ITEM]) && filled(UNTOUCHED, &first[ITEM..]));
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
        let segments = client.room(9000).0.cut(&[5000, 4000]);
        // Used, not needed, not needed by a refusal, without segments.
        let cases: [(u32, u32, &[Segment], &[u32]); 4] = [
            (REPLY, 8000, &segments, &[5000, 3024]),
            (REPLY, 16, &segments, &[0, 0]),
            (REFUSE, 0, &segments, &[0, 0]),
            (REPLY, 16, &[], &[]),
        ];
        for (procedure, word, offered, lens) in cases {
            let answer = client.ask(procedure, &Lists::new().reply(offered), &be(&[word]));
            let used = answer.reply_chunk().expect("it comes back").segments().map(|segment| segment.length);
            assert_eq!(used.collect::<Vec<_>>(), lens, "{procedure}, {word}");
        }
        assert!(client.ask(REPLY, Chunks::NONE, &be(&[16])).reply_chunk().is_none(), "none was offered");
    });
}

#[test]
fn version_1_offers_a_reply_chunk_when_a_reply_may_not_fit() {
    let (server, calls) = RawServer::recording("offers", |mut listener| listener.accept_in(CreditMode::V1));
    let mut client = server.client(CreditMode::V1);
    for_each([(0, false), (972, false), (973, true), (10_001, true), (60_000, true)], |(expected, offered)| {
        let call = client.prepared(ECHO, &[0; 4]).expect_reply(expected);
        client.call(call).expect("a reply");
        let room = calls.recv().expect("the server speaks").reply_chunk().map(|chunk| chunk.total_length());
        assert_eq!(room.is_some(), offered);
        assert!(room.is_none_or(|room| room >= 24 + expected as u64), "{room:?}");
    });
}
