//! Private data of version 1 connects (RFC 8797), and defaults without it.

use std::time::Duration;

use std::sync::mpsc::channel;

use rpcrdma::fabric::Access;
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::{Body, Chunks, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, WriteList};
use rpcrdma::{Address, Config, CreditMode};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, XID, assert_err_chunk, reads};

/// Bytes of the headers of a call and of a reply.
const CALL_HEADERS: usize = 28 + 40;
const REPLY_HEADERS: usize = 28 + 24;

fn said(send_size: u32, receive_size: u32, remote_invalidation: bool) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    PrivateData { remote_invalidation, send_size, receive_size }.emit(&mut bytes).expect("space");
    bytes
}

fn version_1(receive_size: usize) -> Config {
    small().with(|c| {
        c.wire.credit_mode = CreditMode::V1;
        c.wire.receive_size = receive_size;
    })
}

fn serve(world: &mut World, shard: Config) -> Address {
    let services = services_for(shard.wire.receive_size);
    world.serve_with(ServerConfig { shard, ..small_server() }, services)
}

fn client_saying(address: &Address, private_data: &[u8]) -> Client {
    let mut peer = RawPeer::try_connect(address, private_data).expect("a connection");
    peer.version = Version::V1;
    Client { peer }
}

/// Checks that the longest reply has `bytes` bytes, headers included.
fn assert_longest_reply(client: &mut Client, bytes: usize) {
    let len = (bytes - REPLY_HEADERS) as u32;
    client.call(REPLY, Chunks::NONE, &be(&[len]));
    assert_eq!(client.answer().bytes.len(), bytes);
    client.call(REPLY, Chunks::NONE, &be(&[len + 4]));
    assert_err_chunk(client, "a reply that is too long");
    client.ping();
}

/// Checks a client's longest inline call, and its longest expected reply without a Reply chunk. Both include headers.
fn assert_thresholds_of_calls(private_data: Vec<u8>, call: usize, reply_len: usize) {
    let world = World::new("call-thresholds");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::listen(&address, move |mut listener| {
        listener.private_data = private_data;
        let mut peer = listener.accept_silently();
        peer.version = Version::V1;
        while let Some(bytes) = next(&mut peer) {
            let view = View::check(&bytes, Revision::Ietf00).expect("a header");
            let xid = view.xid();
            tell.send((bytes.len(), view.htype(), view.reply_chunk().is_some())).expect("the test listens");
            reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        }
    });
    let mut client = world.client(&address, version_1(8192));
    let mut sent = |args: usize, results: usize| {
        let mut call = client.prepare(ECHO, args).expect("a buffer");
        call = call.expect_reply(results);
        client.call(call).expect("a reply");
        told.recv().expect("the server speaks")
    };
    assert_eq!(sent(call - CALL_HEADERS, 0), (call, HeaderType::Msg, false));
    assert_eq!(sent(call - CALL_HEADERS + 4, 0).1, HeaderType::Nomsg);
    assert!(!sent(0, reply_len - REPLY_HEADERS).2);
    assert!(sent(0, reply_len - REPLY_HEADERS + 4).2);
    drop(client);
    server.join();
}

#[test]
fn without_private_data_both_thresholds_are_1024() {
    let mut world = World::new("no-private-data");
    let address = serve(&mut world, version_1(8192));
    let mut client = client_saying(&address, b"");
    assert_longest_reply(&mut client, 1024);
    // The server takes calls of this size and larger ones.
    for len in [1024, 8192] {
        let args = vec![0; len - CALL_HEADERS];
        client.call(STORE, Chunks::NONE, &args);
        let view = client.answer().bytes;
        assert_eq!(View::check(&view, Revision::Ietf00).expect("a header").htype(), HeaderType::Msg);
    }
    drop(client);
    drop(world);
    assert_thresholds_of_calls(Vec::new(), 1024, 1024);
}

#[test]
fn private_data_sets_the_thresholds_of_each_direction() {
    let mut world = World::new("thresholds-v1");
    let address = serve(&mut world, version_1(8192));
    let mut client = client_saying(&address, &said(2048, 3072, false));
    assert_eq!(
        PrivateData::parse(&client.peer.private_data),
        Some(PrivateData { remote_invalidation: true, send_size: 8192, receive_size: 8192 })
    );
    assert_longest_reply(&mut client, 3072);
    drop(client);
    // The server does not exceed its own send size.
    let mut client = client_saying(&address, &said(2048, 65536, false));
    assert_longest_reply(&mut client, 8192);
    drop(client);
    drop(world);
    assert_thresholds_of_calls(said(3072, 2048, false), 2048, 3072);
    assert_thresholds_of_calls(said(65536, 65536, false), 8192, 8192);
}

#[test]
fn private_data_of_others_is_as_none() {
    let mut world = World::new("others-data");
    let address = serve(&mut world, version_1(8192));
    let mut cut = said(8192, 8192, true);
    cut.truncate(7);
    let mut newer = said(8192, 8192, true);
    newer[4] = 2;
    let mut other = said(8192, 8192, true);
    other[0] ^= 1;
    for data in [vec![0xA5; 40], cut, newer, other] {
        assert_longest_reply(&mut client_saying(&address, &data), 1024);
    }
    // Foreign data may precede the private data.
    let mut client = client_saying(&address, &[&[7; 5][..], &said(2048, 2048, false), &[0; 9]].concat());
    assert_longest_reply(&mut client, 2048);
    drop(client);
    drop(world);
    assert_thresholds_of_calls(vec![0xF6; 30], 1024, 1024);
}

#[test]
fn settings_may_change_with_a_reconnection() {
    let world = World::new("resettled");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::listen(&address, move |mut listener| {
        for private_data in [said(4096, 4096, true), Vec::new(), said(2048, 2048, false)] {
            listener.private_data = private_data;
            let mut peer = listener.accept_next();
            peer.version = Version::V1;
            for _ in 0..2 {
                let bytes = next(&mut peer).expect("a call");
                let view = View::check(&bytes, Revision::Ietf00).expect("a header");
                tell.send((bytes.len(), view.htype())).expect("the test listens");
                let xid = view.xid();
                reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
            }
            // The client has the replies before it sends more.
            assert!(next(&mut peer).is_some());
        }
        let mut peer = listener.accept_next();
        peer.version = Version::V1;
        let xid = View::check(&next(&mut peer).expect("a call"), Revision::Ietf00).expect("a header").xid();
        reply(&mut peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        while peer.receive().is_some() {}
    });
    let config = small_client(version_1(4096)).with(|c| {
        c.connect.reconnect_attempts = 1000;
        c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(10));
        c.connect.retransmit = true;
    });
    let mut client = world.client(&address, config);
    for receive_size in [4096, 1024, 2048] {
        // An exact fit shows which threshold is in force. The third call of each connection is answered on the next
        // one.
        for args in [receive_size - CALL_HEADERS, receive_size - CALL_HEADERS + 4] {
            let call = client.prepare(ECHO, args).expect("a buffer");
            client.call(call).expect("a reply");
        }
        assert_eq!(told.recv().expect("the server speaks"), (receive_size, HeaderType::Msg));
        assert_eq!(told.recv().expect("the server speaks").1, HeaderType::Nomsg);
        let first = client.first();
        let mut call = client.prepare(ECHO, 0).expect("a buffer");
        call = call.timeout(Duration::from_millis(1));
        client.start(first, call, 1);
        let mut ended = false;
        // The call times out after it was sent; then the connection is lost.
        assert!(settles(|| {
            client.poll(|_| ended = true);
            ended && !client.is_established(first)
        }));
        assert!(settles(|| {
            client.poll(|_| {});
            client.is_established(first)
        }));
    }
    let call = client.prepare(ECHO, 0).expect("a buffer");
    client.call(call).expect("a reply");
    drop(client);
    server.join();
}

/// Makes calls with each kind of chunk. Returns the handles of each call and the handle that its reply invalidates.
fn invalidated(client: &mut Client) -> Vec<(Vec<u32>, Option<u32>)> {
    let mut data = [0; 64];
    pattern(0, &mut data);
    let mut answers = Vec::new();
    let mut call = |client: &mut Client, procedure, chunks: Chunks<'_>, args: &[u8], handles: &[u32]| {
        client.call(procedure, chunks, args);
        let message = client.answer();
        let view = View::check(&message.bytes, Revision::Ietf00).expect("a header");
        assert_eq!(view.htype(), HeaderType::Msg);
        answers.push((handles.to_vec(), message.invalidated));
    };
    let (read, _from) = client.peer.expose(&data, Access::REMOTE_READ);
    let list = [ReadSegment { position: ARGS_AT + 4, target: read }];
    call(client, STORE, reads(&list), &be(&[0]), &[read.handle]);
    let (write, _to) = client.peer.expose(&data, Access::REMOTE_WRITE);
    let writes = WriteList { counts: &[1], segments: &[write] };
    call(client, LOAD, Chunks { writes, ..Chunks::NONE }, &be(&[0, 64]), &[write.handle]);
    let (room, _room) = client.peer.expose(&data, Access::REMOTE_WRITE);
    call(client, ECHO, Chunks { reply: Some(&[room]), ..Chunks::NONE }, &be(&[0]), &[room.handle]);
    let (read, _from) = client.peer.expose(&data, Access::REMOTE_READ);
    let (write, _to) = client.peer.expose(&data, Access::REMOTE_WRITE);
    let list = [ReadSegment { position: ARGS_AT + 4, target: read }];
    let writes = WriteList { counts: &[1], segments: &[write] };
    let both = [read.handle, write.handle];
    call(client, MIRROR, Chunks { reads: &list, writes, ..Chunks::NONE }, &be(&[0]), &both);
    // Segments with one handle; then a segment for the last bytes of several calls, as the Linux client's write pad is.
    let (whole, _to) = client.peer.expose(&data, Access::REMOTE_WRITE);
    let part = |at: u32, length| Segment { offset: whole.offset + u64::from(at), length, ..whole };
    let writes = WriteList { counts: &[2], segments: &[part(0, 40), part(40, 24)] };
    call(client, LOAD, Chunks { writes, ..Chunks::NONE }, &be(&[0, 64]), &[whole.handle]);
    let (pad, _pad) = client.peer.expose(&[0; 4], Access::REMOTE_WRITE);
    for _ in 0..2 {
        let (write, _to) = client.peer.expose(&data, Access::REMOTE_WRITE);
        let writes = WriteList { counts: &[2], segments: &[Segment { length: 61, ..write }, pad] };
        let both = [write.handle, pad.handle];
        call(client, LOAD, Chunks { writes, ..Chunks::NONE }, &be(&[0, 61]), &both);
    }
    let (read, _from) = client.peer.expose(&data, Access::REMOTE_READ);
    let half = |at| Segment { offset: read.offset + at, length: 32, ..read };
    let list = [0, 32].map(|at| ReadSegment { position: ARGS_AT + 4, target: half(at) });
    call(client, STORE, reads(&list), &be(&[0]), &[read.handle]);
    call(client, ECHO, Chunks::NONE, &be(&[0]), &[]);
    // A long call.
    let message = call_bytes(XID, PROGRAM, VERSION, ECHO, &be(&[0]));
    let (whole, _call) = client.peer.expose(&message, Access::REMOTE_READ);
    let list = [ReadSegment { position: 0, target: whole }];
    client.send(XID, Flags::NONE, Body::Nomsg(reads(&list)), b"");
    answers.push((vec![whole.handle], client.answer().invalidated));
    answers
}

#[test]
fn version_1_invalidates_the_only_handle_of_the_call_that_it_answers() {
    let mut world = World::new("invalidates-v1");
    let address = serve(&mut world, version_1(4096));
    let mut client = client_saying(&address, &said(4096, 4096, true));
    for (handles, invalidated) in invalidated(&mut client) {
        // The only handle, or none.
        let only = if let [only] = handles[..] { Some(only) } else { None };
        assert_eq!(invalidated, only, "of {handles:x?}");
    }
    client.ping();
    // A client accepts invalidation of any of its handles, too.
    let address = world.address();
    let server = Server::listen(&address, |mut listener| {
        listener.private_data = said(4096, 4096, true);
        let mut peer = listener.accept_silently();
        peer.version = Version::V1;
        for which in 0..4 {
            let bytes = next(&mut peer).expect("a call");
            let view = View::check(&bytes, Revision::Ietf00).expect("a header");
            let mut handles: Vec<_> = view.reads().map(|read| read.target.handle).collect();
            handles.extend(view.writes().flat_map(|chunk| chunk.segments()).map(|segment| segment.handle));
            assert_eq!(handles.len(), 4);
            let writes = WriteList { counts: &[0, 0], segments: &[] };
            let chunks = Chunks { writes, ..Chunks::NONE };
            reply(&mut peer, view.xid(), chunks, &reply_bytes(view.xid(), b""), Some(handles[which]));
        }
        while peer.receive().is_some() {}
    });
    let mut client = world.client(&address, version_1(4096));
    let first = client.first();
    for _ in 0..4 {
        let mut call = client.prepare(MIRROR, 4).expect("a buffer");
        for n in 0..2 {
            call = call.read_chunk(4 + 8 * n, client.alloc(first, 8).expect("a buffer"));
            call = call.write_chunk_into(client.alloc(first, 8).expect("a buffer"));
        }
        client.call(call).expect("a reply");
    }
    assert_eq!(client.stats().exposed_buffers, 0);
    drop(client);
    server.join();
}

#[test]
fn version_1_invalidates_only_if_both_ends_agree() {
    let mut world = World::new("both-say");
    for (remote_invalidate, data) in [
        (true, said(4096, 4096, false)),
        (false, said(4096, 4096, true)),
        (false, said(4096, 4096, false)),
        (true, Vec::new()),
        (true, vec![1; 30]),
    ] {
        let address = serve(&mut world, version_1(4096).with(|c| c.wire.remote_invalidate = remote_invalidate));
        let mut client = client_saying(&address, &data);
        let own = PrivateData::parse(&client.peer.private_data).expect("the server's private data");
        assert_eq!(own.remote_invalidation, remote_invalidate);
        for (handles, invalidated) in invalidated(&mut client) {
            assert_eq!(invalidated, None, "{remote_invalidate}, {data:x?}, {handles:x?}");
        }
    }
}
