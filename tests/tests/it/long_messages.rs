//! Long messages: Position Zero Read chunks and Reply chunks (version 2 §4.5.4; RFC 8166 §3.5.3).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::channel;

use rpcrdma::fabric::{Access, RemoteMemory};
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::properties::Properties;
use rpcrdma::wire::rpc::CallHeader;
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, WriteList,
};
use rpcrdma::{CallError, CreditMode, Procedure};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, assert_err_chunk, reads, server_of};

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

/// A server of long replies and its client.
fn pair(name: &'static str, scheme: CreditMode) -> (World, Client) {
    let mut world = World::new(name);
    let shard = small().with(|c| c.wire.credit_mode = scheme);
    let address = world.serve_with(ServerConfig { shard, ..small_server() }, services_for(16 << 10));
    let client = Client::connect(&address, scheme, Revision::Ietf00);
    (world, client)
}

/// Consecutive segments of these lengths.
fn cut(whole: Segment, lens: &[u32]) -> Vec<Segment> {
    let mut offset = whole.offset;
    let next = |&length: &u32| {
        let segment = Segment { length, offset, ..whole };
        offset += u64::from(length);
        segment
    };
    lens.iter().map(next).collect()
}

fn at(position: u32, segments: &[Segment]) -> Vec<ReadSegment> {
    segments.iter().map(|&target| ReadSegment { position, target }).collect()
}

fn assert_refused(client: &mut Client, scheme: CreditMode, what: &str) {
    match scheme {
        CreditMode::V1 => assert_err_chunk(client, what),
        _ => assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}: {what}"),
    }
    client.ping();
}

#[test]
fn a_long_call_is_read_and_answered() {
    for scheme in SCHEMES {
        let (_world, mut client) = pair("long-call", scheme);
        let mut args = vec![0; 9000];
        pattern(1, &mut args);
        let message = call_bytes(XID, PROGRAM, VERSION, ECHO, &args);
        let (whole, _memory) = client.peer.expose(&message, Access::REMOTE_READ);
        let (room, replied) = client.peer.expose(&[0; 9024], Access::REMOTE_WRITE);
        // Segments may end anywhere.
        let list = at(0, &cut(whole, &[1, 38, 3, 5001, 3997]));
        let chunks = Chunks { reads: &list, reply: Some(&[room]), ..Chunks::NONE };
        client.send(XID, Flags::NONE, Body::Nomsg(chunks), b"");
        assert_eq!(view(&client.answer().bytes).htype(), HeaderType::Nomsg, "{scheme:?}");
        let mut bytes = [0; 9024];
        assert!(replied.read_at(0, &mut bytes) && bytes[..] == reply_bytes(XID, &args), "{scheme:?}");
        // Further chunks have their positions in the whole message.
        let (mut first, mut second) = ([0; 501], [0; 8]);
        pattern(5, &mut first);
        pattern(6, &mut second);
        let message = call_bytes(XID, PROGRAM, VERSION, STORE, &be(&[5]));
        let (whole, _memory) = client.peer.expose(&message, Access::REMOTE_READ);
        let (first, _one) = client.peer.expose(&first, Access::REMOTE_READ);
        let (second, _two) = client.peer.expose(&second, Access::REMOTE_READ);
        let mut list = at(0, &cut(whole, &[40, 4]));
        list.extend(at(ARGS_AT + 4, &cut(first, &[500, 1])));
        list.extend(at(ARGS_AT + 4 + 504, &[second]));
        client.send(XID, Flags::NONE, Body::Nomsg(reads(&list)), b"");
        assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, &be(&[501, 8])), "{scheme:?}");
        client.ping();
    }
}

#[test]
fn a_long_call_with_two_different_xids_is_refused() {
    for scheme in SCHEMES {
        let (_world, mut client) = pair("long-xids", scheme);
        client.ping();
        let message = call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"");
        let (whole, _memory) = client.peer.expose(&message, Access::REMOTE_READ);
        client.send(XID, Flags::NONE, Body::Nomsg(reads(&at(0, &[whole]))), b"");
        assert_refused(&mut client, scheme, "two XIDs");
    }
}

#[test]
fn a_nomsg_without_its_payload_chunk_is_refused() {
    for scheme in SCHEMES {
        let (_world, mut client) = pair("no-payload", scheme);
        client.ping();
        let (memory, _memory) = client.peer.expose(&[0; 64], Access::REMOTE);
        let list = at(40, &[memory]);
        let empty = at(0, &cut(memory, &[0]));
        let writes = WriteList { counts: &[1], segments: &[memory] };
        let cases = [
            ("Write chunks", Chunks { writes, ..Chunks::NONE }),
            ("a Reply chunk", Chunks { reply: Some(&[memory]), ..Chunks::NONE }),
            ("a Read chunk at another position", reads(&list)),
            ("an empty chunk", reads(&empty)),
        ];
        for (what, chunks) in cases {
            client.send(XID, Flags::NONE, Body::Nomsg(chunks), b"");
            assert_refused(&mut client, scheme, what);
        }
    }
    // A reply without its payload chunk is malformed, too.
    for scheme in SCHEMES {
        let world = World::new("no-payload-2");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            welcome(peer, scheme);
            for used in [false, true] {
                let bytes = next(peer).expect("a call");
                let room = view(&bytes).reply_chunk().expect("room").segments().next().expect("a segment");
                let empty = [Segment { length: 0, ..room }];
                let chunk = if used { Some(&empty[..]) } else { None };
                // With the XID of a pure grant it would be one.
                let chunks = Chunks { reply: chunk, ..Chunks::NONE };
                long_reply(peer, view(&bytes).xid(), chunks);
            }
            while peer.receive().is_some() {}
        });
        let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = scheme));
        for _ in 0..2 {
            let error = with_room(&mut client).expect_err("no reply");
            assert!(matches!(error, CallError::MalformedReply(_)), "{scheme:?}: {error}");
            assert_eq!(client.stats().exposed_buffers, 0);
        }
        drop(client);
        server.join();
    }
}

/// Prepares a raw server for this credit mode.
fn welcome(peer: &mut RawPeer, scheme: CreditMode) {
    match scheme {
        CreditMode::V1 => peer.version = Version::V1,
        _ => peer.welcome(),
    }
}

fn long_reply(peer: &mut RawPeer, xid: u32, chunks: Chunks<'_>) {
    let bytes = match (peer.version, chunks.reply) {
        // Version 1 has no NOMSG without chunks: an empty Reply chunk is the minimum.
        (Version::V1, None) => peer.message(xid, Flags::NONE, Body::Nomsg(Chunks { reply: Some(&[]), ..chunks }), b""),
        _ => peer.message(xid, Flags::RESPONSE, Body::Nomsg(chunks), b""),
    };
    peer.send(&bytes);
}

/// A call that allows a reply of 20000 bytes.
fn with_room(client: &mut rpcrdma::client::LocalClient) -> Result<Vec<u8>, CallError> {
    let mut call = client.prepare(ECHO, 4)?;
    call = call.expect_reply(20_000);
    client.call(call).map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

#[test]
fn a_long_reply_with_two_different_xids_ends_its_call() {
    for scheme in SCHEMES {
        let world = World::new("long-reply-xids");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            welcome(peer, scheme);
            for wrong in [1, 0] {
                let bytes = next(peer).expect("a call");
                let xid = view(&bytes).xid();
                let room = view(&bytes).reply_chunk().expect("room").segments().next().expect("a segment");
                let message = reply_bytes(xid ^ wrong, &[9; 12_000]);
                peer.write(&message, RemoteMemory { rkey: room.handle, address: room.offset });
                let used = [Segment { length: message.len() as u32, ..room }];
                long_reply(peer, xid, Chunks { reply: Some(&used), ..Chunks::NONE });
            }
            while peer.receive().is_some() {}
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = 0;
            }),
        );
        let error = with_room(&mut client).expect_err("another XID");
        assert!(matches!(error, CallError::MalformedReply(_)), "{scheme:?}: {error}");
        assert_eq!(with_room(&mut client), Ok(vec![9; 12_000]), "{scheme:?}");
        assert_eq!(client.stats().exposed_buffers, 0);
        drop(client);
        server.join();
    }
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
fn a_reply_that_its_server_changes_afterwards_stays_as_it_was() {
    if place::on_device() {
        return;
    }
    let mut random = [0; 8000];
    pattern(std::process::id(), &mut random);
    for scheme in SCHEMES {
        let world = World::new("changed-reply");
        let address = world.address();
        let ((read, is_read), (changed, is_changed)) = (channel(), channel());
        let server = Server::start_silently(&address, move |peer| {
            welcome(peer, scheme);
            let bytes = next(peer).expect("a call");
            let xid = view(&bytes).xid();
            let room = view(&bytes).reply_chunk().expect("room").segments().next().expect("a segment");
            let message = reply_bytes(xid, &random);
            peer.write(&message, RemoteMemory { rkey: room.handle, address: room.offset });
            // Possibly also the server's own memory, but not the client's copy, which does not exist yet.
            let memories = memories_with(&message, room.offset);
            assert!(!memories.is_empty(), "the arena that the client has exposed");
            let used = [Segment { length: message.len() as u32, ..room }];
            long_reply(peer, xid, Chunks { reply: Some(&used), ..Chunks::NONE });
            is_read.recv().expect("the client has read it");
            for memory in memories {
                memory.write_all_at(&vec![0xff; message.len()], room.offset).expect("still its memory");
            }
            changed.send(()).expect("the client waits");
            while peer.receive().is_some() {}
        });
        let mut client = world.client(
            &address,
            small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.continue_up_to = 0;
            }),
        );
        let mut call = client.prepare(ECHO, 4).expect("a buffer");
        call = call.expect_reply(20_000);
        let reply = client.call(call).expect("a reply");
        assert!(reply.results() == random, "{scheme:?}");
        read.send(()).expect("the server waits");
        is_changed.recv().expect("the server has changed it");
        assert!(reply.results() == random, "{scheme:?}: the server has changed what the client had");
        drop((reply, client));
        server.join();
    }
}

/// A raw server's view of a long call with `args` bytes of arguments and a Read chunk behind them.
struct LongCall {
    bytes: Vec<u8>,
    /// The RPC message, read from the Read list's segments.
    message: Vec<u8>,
}

fn long_call(scheme: CreditMode, segment_size: u32, args: usize, chunk: Option<usize>) -> LongCall {
    let world = World::new("long-calls");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::start_silently(&address, move |peer| {
        peer.offers = Properties { segment_size, ..peer.offers };
        welcome(peer, scheme);
        let bytes = next(peer).expect("a call");
        let mut message = Vec::new();
        for read in view(&bytes).reads().filter(|read| read.position == 0) {
            let remote = RemoteMemory { rkey: read.target.handle, address: read.target.offset };
            message.extend(peer.read(remote, read.target.length as usize).expect("it is offered"));
        }
        let xid = view(&bytes).xid();
        tell.send(LongCall { bytes, message }).expect("the test listens");
        reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        while peer.receive().is_some() {}
    });
    let mut client = world.client(
        &address,
        small().with(|c| {
            c.wire.credit_mode = scheme;
            c.wire.continue_up_to = 0;
        }),
    );
    let mut call = client.prepare(STORE, args).expect("a buffer");
    pattern(3, call.args_mut());
    let first = client.first();
    if let Some(len) = chunk {
        call = call.read_chunk(args, client.alloc(first, len).expect("a buffer"));
    }
    client.call(call).expect("a reply");
    assert_eq!(client.stats().exposed_buffers, 0);
    drop(client);
    server.join();
    told.recv().expect("the server has spoken")
}

#[test]
fn version_1_sends_oversize_messages_as_long_messages() {
    for (args, chunk) in [(956, false), (960, true), (60_000, true)] {
        let LongCall { bytes, message } = long_call(CreditMode::V1, 0, args, None);
        let (header, htype) = (view(&bytes), if chunk { HeaderType::Nomsg } else { HeaderType::Msg });
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
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let LongCall { bytes, message } = long_call(scheme, 4096, 20_000, Some(5000));
        let reads: Vec<_> = view(&bytes).reads().map(|read| (read.position, read.target.length)).collect();
        let at = ARGS_AT + 20_000;
        let expected = [(0, 4096), (0, 4096), (0, 4096), (0, 4096), (0, 3656), (at, 4096), (at, 904)];
        assert_eq!(reads, expected, "{scheme:?}");
        assert!(view(&bytes).htype() == HeaderType::Nomsg && !view(&bytes).flags().contains(Flags::RESPONSE));
        assert!(message.len() == at as usize && patterned(3, &message[ARGS_AT as usize..]));
    }
    // In version 1 each chunk has one segment.
    let LongCall { bytes, .. } = long_call(CreditMode::V1, 0, 20_000, Some(5000));
    let reads: Vec<_> = view(&bytes).reads().map(|read| (read.position, read.target.length)).collect();
    assert_eq!(reads, [(0, ARGS_AT + 20_000), (ARGS_AT + 20_000, 5000)]);
}

#[test]
fn a_reply_that_does_not_fit_inline_uses_the_reply_chunk() {
    for scheme in SCHEMES {
        let (_world, mut client) = pair("reply-chunk", scheme);
        let (room, memory) = client.peer.expose(&[0xEE; 10_000], Access::REMOTE_WRITE);
        let segments = cut(room, &[4000, 1, 5000, 999]);
        let chunks = Chunks { reply: Some(&segments), ..Chunks::NONE };
        client.call(REPLY, chunks, &be(&[6000]));
        let bytes = client.answer().bytes;
        assert_eq!((view(&bytes).htype(), view(&bytes).payload()), (HeaderType::Nomsg, &b""[..]));
        assert_eq!(view(&bytes).flags().contains(Flags::RESPONSE), scheme != CreditMode::V1, "{scheme:?}");
        let used: Vec<_> = view(&bytes).reply_chunk().expect("it comes back").segments().collect();
        let lens: Vec<_> = used.iter().map(|segment| segment.length).collect();
        assert_eq!(lens, [4000, 1, 2023, 0], "{scheme:?}");
        assert!(
            used.iter()
                .zip(&segments)
                .all(|(used, given)| { (used.handle, used.offset) == (given.handle, given.offset) })
        );
        let mut written = [0; 10_000];
        assert!(memory.read_at(0, &mut written));
        assert!(written[..24] == reply_bytes(XID, b"") && patterned(6000, &written[24..6024]), "{scheme:?}");
        assert!(written[6024..].iter().all(|&byte| byte == 0xEE), "{scheme:?}: more was written");
        client.ping();
    }
}

/// An item with a Write chunk goes there. The rest uses the Reply chunk only if it is still too long.
#[test]
fn a_reply_is_reduced_before_it_goes_into_the_reply_chunk() {
    const ITEM: usize = 2001;
    for scheme in SCHEMES {
        let mut world = World::new("reduced-first");
        let mut services = standard_services();
        let both = Procedure::new(|call| {
            let len = call.args().first().map_or(0, |&byte| 100 * usize::from(byte));
            put_pattern(call.result_writer(0)?, 7, ITEM)?;
            pattern(8, call.reply_mut(len)?);
            Ok(())
        });
        services.add(PROGRAM, VERSION, 20, both.write_chunks(1, 4000).max_reply(20_000));
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (write, item) = client.peer.expose(&[0xEE; 3000], Access::REMOTE_WRITE);
        let (room, rest) = client.peer.expose(&[0xEE; 9000], Access::REMOTE_WRITE);
        // The shorter replies fit inline without the item.
        for (args, long) in [(1u8, false), (30, scheme == CreditMode::V1), (80, true)] {
            let writes = WriteList { counts: &[1], segments: &[write] };
            let chunks = Chunks { writes, reply: Some(&[room]), ..Chunks::NONE };
            client.call(20, chunks, &[args, 0, 0, 0]);
            let bytes = client.answer().bytes;
            let view = view(&bytes);
            let len = 100 * usize::from(args);
            let mut results = vec![0; len];
            pattern(8, &mut results);
            let message = reply_bytes(XID, &results);
            let lens: Vec<_> = view.writes().map(|chunk| chunk.total_length()).collect();
            assert_eq!(lens, [ITEM as u64], "{scheme:?} {len}");
            let used = view.reply_chunk().expect("it comes back").total_length();
            assert_eq!(used, if long { message.len() as u64 } else { 0 }, "{scheme:?} {len}");
            let (mut first, mut second) = ([0; 3000], [0; 9000]);
            assert!(item.read_at(0, &mut first) && rest.read_at(0, &mut second));
            assert!(patterned(7, &first[..ITEM]) && filled(0xEE, &first[ITEM..]));
            match long {
                true => assert!(view.payload().is_empty() && second[..message.len()] == message),
                false => assert_eq!(view.payload(), message, "{scheme:?} {len}"),
            }
        }
    }
}

#[test]
fn a_reply_chunk_comes_back_used_and_unused() {
    for scheme in SCHEMES {
        let (_world, mut client) = pair("comes-back", scheme);
        let (room, _memory) = client.peer.expose(&[0; 9000], Access::REMOTE_WRITE);
        let segments = cut(room, &[5000, 4000]);
        // Used, not needed, not needed by a refusal, without segments.
        let cases: [(u32, u32, &[Segment], &[u32]); 4] = [
            (REPLY, 8000, &segments, &[5000, 3024]),
            (REPLY, 16, &segments, &[0, 0]),
            (REFUSE, 0, &segments, &[0, 0]),
            (REPLY, 16, &[], &[]),
        ];
        for (procedure, word, offered, lens) in cases {
            client.call(procedure, Chunks { reply: Some(offered), ..Chunks::NONE }, &be(&[word]));
            let bytes = client.answer().bytes;
            let used = view(&bytes).reply_chunk().expect("it comes back");
            let used: Vec<_> = used.segments().map(|segment| segment.length).collect();
            assert_eq!(used, lens, "{scheme:?}, {procedure}, {word}");
        }
        client.call(REPLY, Chunks::NONE, &be(&[16]));
        assert!(view(&client.answer().bytes).reply_chunk().is_none(), "{scheme:?}: none was offered");
    }
}

#[test]
fn a_long_reply_has_its_padding() {
    for scheme in SCHEMES {
        let (_world, mut client) = pair("padded-reply", scheme);
        // Opaque data of 5001 bytes in XDR.
        let mut item = be(&[5001]);
        item.resize(4 + 5001, 0x55);
        item.resize(4 + 5004, 0);
        let message = call_bytes(XID, PROGRAM, VERSION, ECHO, &item);
        let (whole, _call) = client.peer.expose(&message, Access::REMOTE_READ);
        let (room, memory) = client.peer.expose(&[0xEE; 6000], Access::REMOTE_WRITE);
        let list = at(0, &[whole]);
        let chunks = Chunks { reads: &list, reply: Some(&[room]), ..Chunks::NONE };
        client.send(XID, Flags::NONE, Body::Nomsg(chunks), b"");
        let bytes = client.answer().bytes;
        assert_eq!(view(&bytes).reply_chunk().expect("used").total_length(), 24 + 5008, "{scheme:?}");
        let mut written = [0; 6000];
        assert!(memory.read_at(0, &mut written) && written[24..5032] == item, "{scheme:?}");
        assert_eq!(written[5032], 0xEE, "{scheme:?}");
    }
}

#[test]
fn version_1_offers_a_reply_chunk_when_a_reply_may_not_fit() {
    let world = World::new("offers");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::start_silently(&address, move |peer| {
        peer.version = Version::V1;
        while let Some(bytes) = next(peer) {
            let (xid, offered) = (view(&bytes).xid(), view(&bytes).reply_chunk());
            tell.send(offered.map(|chunk| chunk.total_length())).expect("the test listens");
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        }
    });
    let mut client = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    for (expected, offered) in [(0, false), (972, false), (973, true), (10_001, true), (60_000, true)] {
        let mut call = client.prepare(ECHO, 4).expect("a buffer");
        call = call.expect_reply(expected);
        client.call(call).expect("a reply");
        let room = told.recv().expect("the server speaks");
        assert_eq!(room.is_some(), offered, "{expected}");
        assert!(room.is_none_or(|room| room >= 24 + expected as u64), "{expected}: {room:?}");
    }
    drop(client);
    server.join();
}
