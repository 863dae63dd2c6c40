//! Private data of version 1 connects (RFC 8797), and defaults without it.

use rpcrdma::wire::private_data::PrivateData;
use rpcrdma_tests::prelude::*;

/// Bytes of the transport header and the RPC header of a call without chunks.
const CALL_HEADERS: usize = 28 + RPC_CALL;
/// Bytes of both headers of a reply without chunks.
const REPLY_HEADERS: usize = 28 + RPC_REPLY;

/// Makes a call with `args` bytes of arguments and `results` bytes of expected results. Returns the length and type of
/// the message that the server received, and whether it has a Reply chunk.
pub(super) fn record_call(
    client: &mut LocalClient,
    calls: &Receiver<Message>,
    args: usize,
    results: usize,
) -> (usize, HeaderType, bool) {
    let call = client.prepare_call(ECHO, &vec![0; args]).expect_reply(results);
    client.call(call).expect("a reply");
    let call = calls.recv().expect("a recorded call");
    (call.len(), call.htype(), call.reply_chunk().is_some())
}

/// Checks the longest call in one message, and the longest expected reply without a Reply chunk.
pub(super) fn assert_longest(
    client: &mut LocalClient,
    calls: &Receiver<Message>,
    header: usize,
    call: usize,
    reply_len: usize,
) {
    assert_eq!(record_call(client, calls, call - header - RPC_CALL, 0), (call, HeaderType::Msg, false));
    assert_eq!(record_call(client, calls, call - header - RPC_CALL + 4, 0).1, HeaderType::Nomsg);
    assert!(!record_call(client, calls, 0, reply_len - header - RPC_REPLY).2);
    assert!(record_call(client, calls, 0, reply_len - header - RPC_REPLY + 4).2);
}

pub(super) fn encode_private_data(send_size: u32, receive_size: u32, remote_invalidation: bool) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    PrivateData { remote_invalidation, send_size, receive_size }.emit(&mut bytes).expect("space");
    bytes
}

fn version_1(receive_size: usize) -> Config {
    in_mode(CreditMode::V1).with(|c| c.wire.receive_size = receive_size)
}

fn serving(name: &'static str, config: Config) -> (World, Address) {
    let services = services_for(config.wire.receive_size);
    World::serving(name, config, services)
}

/// Checks that the longest reply has `bytes` bytes, headers included.
fn assert_longest_reply(mut client: RawPeer, bytes: usize) -> RawPeer {
    let len = (bytes - REPLY_HEADERS) as u32;
    assert_eq!(client.call_and_receive(REPLY, Chunks::NONE, &be(&[len])).len(), bytes);
    client.call(REPLY, Chunks::NONE, &be(&[len + 4]));
    client.expect_err_chunk("a reply that is too long");
    client.ping();
    client
}

/// Checks a client's longest inline call, and its longest expected reply without a Reply chunk. Both include headers.
fn assert_thresholds_of_calls(private_data: Vec<u8>, call: usize, reply_len: usize) {
    let (server, calls) = RawServer::recording("call-thresholds", move |mut listener| {
        listener.private_data = private_data;
        listener.accept_in(CreditMode::V1)
    });
    assert_longest(&mut server.client(version_1(8192)), &calls, 28, call, reply_len);
}

#[test]
fn without_private_data_both_thresholds_are_1024() {
    let (world, address) = serving("no-private-data", version_1(8192));
    let mut client = assert_longest_reply(RawPeer::connect_with_private_data(&address, b""), 1024);
    // The server accepts calls of this size, and of the size of its Receives.
    for len in [1024, 8192] {
        assert_eq!(client.call_and_receive(STORE, Chunks::NONE, &vec![0; len - CALL_HEADERS]).htype(), HeaderType::Msg);
    }
    drop((client, world));
    assert_thresholds_of_calls(Vec::new(), 1024, 1024);
}

#[test]
fn private_data_sets_the_thresholds_of_each_direction() {
    let (world, address) = serving("thresholds-v1", version_1(8192));
    let client = assert_longest_reply(
        RawPeer::connect_with_private_data(&address, &encode_private_data(2048, 3072, false)),
        3072,
    );
    let expected = PrivateData { remote_invalidation: true, send_size: 8192, receive_size: 8192 };
    assert_eq!(PrivateData::parse(&client.private_data), Some(expected));
    drop(client);
    // The server does not exceed its own send size.
    assert_longest_reply(RawPeer::connect_with_private_data(&address, &encode_private_data(2048, 65536, false)), 8192);
    drop(world);
    assert_thresholds_of_calls(encode_private_data(3072, 2048, false), 2048, 3072);
    assert_thresholds_of_calls(encode_private_data(65536, 65536, false), 8192, 8192);
}

#[test]
fn unknown_private_data_is_ignored() {
    let (world, address) = serving("others-data", version_1(8192));
    let good = encode_private_data(8192, 8192, true);
    let newer = [&good[..4], &[2], &good[5..]].concat();
    let other = [&[good[0] ^ 1], &good[1..]].concat();
    for data in [vec![0xA5; 40], good[..7].to_vec(), newer, other] {
        assert_longest_reply(RawPeer::connect_with_private_data(&address, &data), 1024);
    }
    // Other data may precede and follow the private data.
    let embedded = [&[7; 5][..], &encode_private_data(2048, 2048, false), &[0; 9]].concat();
    assert_longest_reply(RawPeer::connect_with_private_data(&address, &embedded), 2048);
    drop(world);
    assert_thresholds_of_calls(vec![0xF6; 30], 1024, 1024);
}

#[test]
fn thresholds_may_change_with_a_reconnection() {
    let (report, reports) = channel();
    let server = RawServer::listen("resettled", move |mut listener| {
        for private_data in [encode_private_data(4096, 4096, true), Vec::new(), encode_private_data(2048, 2048, false)]
        {
            listener.private_data = private_data;
            let mut peer = listener.accept_in(CreditMode::V1);
            for _ in 0..2 {
                let call = peer.next_call();
                report.send((call.len(), call.htype())).expect("the test listens");
                peer.reply(call.xid(), b"");
            }
            // The third call shows that the client has received both replies. It is answered on the next connection.
            peer.next_call();
        }
        let mut peer = listener.accept_in(CreditMode::V1);
        let call = peer.next_call();
        peer.reply(call.xid(), b"");
        peer.wait_until_over();
    });
    let mut client = server.client(reconnecting(version_1(4096), 1000).with(|c| c.connect.retransmit = true));
    for receive_size in [4096, 1024, 2048] {
        // A call that just fits and one that just exceeds the threshold show which threshold is in force.
        for args in [receive_size - CALL_HEADERS, receive_size - CALL_HEADERS + 4] {
            client.run(ECHO, &vec![0; args]).expect("a reply");
        }
        assert_eq!(reports.recv().expect("the server reports"), (receive_size, HeaderType::Msg));
        assert_eq!(reports.recv().expect("the server reports").1, HeaderType::Nomsg);
        // The call times out after it was sent; then the connection is lost.
        client.send_call(1, |client| client.prepare_call(ECHO, b"").timeout(Duration::from_millis(1)));
        client.end().1.expect_err("no answer");
        client.poll_until(|client| !client.is_established(client.first()));
        client.poll_until(|client| client.is_established(client.first()));
    }
    client.run(ECHO, b"").expect("a reply");
}

/// Makes calls with each kind of chunk. Returns the handles of each call and the handle that its reply invalidates.
fn collect_invalidations(client: &mut RawPeer) -> Vec<(Vec<u32>, Option<u32>)> {
    let mut answers = Vec::new();
    let mut ask = |client: &mut RawPeer, procedure, lists: Lists, args: &[u32], segments: &[Segment]| {
        let answer = client.call_and_receive(procedure, &lists, &be(args));
        assert_eq!(answer.htype(), HeaderType::Msg);
        answers.push((segments.iter().map(|segment| segment.handle).collect(), answer.invalidated));
    };
    let (at, lists) = (ARGS_AT + 4, Lists::new);
    let (read, _from) = client.expose_readable(0, 64);
    ask(client, STORE, lists().read(at, [read]), &[0], &[read]);
    let (write, _to) = client.expose_writable(64);
    ask(client, LOAD, lists().write([write]), &[0, 64], &[write]);
    let (room, _room) = client.expose_writable(64);
    ask(client, ECHO, lists().reply([room]), &[0], &[room]);
    let ((read, _from), (write, _to)) = (client.expose_readable(0, 64), client.expose_writable(64));
    ask(client, MIRROR, lists().read(at, [read]).write([write]), &[0], &[read, write]);
    // The first chunk has two segments with one handle. Then several calls share a segment for their last bytes, which
    // is like the write pad of the Linux client.
    let (whole, _to) = client.expose_writable(64);
    ask(client, LOAD, lists().write(whole.cut(&[40, 24])), &[0, 64], &[whole]);
    let (pad, _pad) = client.expose_writable(4);
    for _ in 0..2 {
        let (write, _to) = client.expose_writable(64);
        ask(client, LOAD, lists().write([write.part(0, 61), pad]), &[0, 61], &[write, pad]);
    }
    let (read, _from) = client.expose_readable(0, 64);
    ask(client, STORE, lists().read(at, read.cut(&[32, 32])), &[0], &[read]);
    ask(client, ECHO, lists(), &[0], &[]);
    // A long call.
    let message = call_bytes(XID, PROGRAM, VERSION, ECHO, &be(&[0]));
    let (whole, _call) = client.expose(&message, Access::REMOTE_READ);
    client.send_nomsg(XID, &lists().read(0, [whole]));
    answers.push((vec![whole.handle], client.answer().invalidated));
    answers
}

#[test]
fn version_1_invalidates_the_only_handle_of_the_call_that_it_answers() {
    let (world, address) = serving("invalidates-v1", version_1(4096));
    let mut client = RawPeer::connect_with_private_data(&address, &encode_private_data(4096, 4096, true));
    for (handles, invalidated) in collect_invalidations(&mut client) {
        // The reply invalidates the only handle of its call, or none of several.
        assert_eq!(invalidated, if let [only] = handles[..] { Some(only) } else { None }, "of {handles:x?}");
    }
    client.ping();
    // A client accepts the invalidation of any handle of its call.
    let server = RawServer::listen(&world.address(), |mut listener| {
        listener.private_data = encode_private_data(4096, 4096, true);
        let mut peer = listener.accept_silently();
        peer.version = Version::V1;
        for which in 0..4 {
            let call = peer.next_call();
            let segments = call.reads().map(|read| read.target).chain(call.write_chunks().concat());
            let handles: Vec<_> = segments.map(|segment| segment.handle).collect();
            assert_eq!(handles.len(), 4);
            let empty = Lists::new().write([]).write([]);
            peer.reply_with(call.xid(), &empty, &reply_bytes(call.xid(), b""), Some(handles[which]));
        }
        peer.wait_until_over();
    });
    let mut client = server.client(version_1(4096));
    for _ in 0..4 {
        let call = client.prepare_chunked_call(MIRROR, &[0; 4], &[8, 8], &[8, 8]);
        client.call(call).expect("a reply");
    }
    assert_eq!(client.stats().exposed_buffers, 0);
}

#[test]
fn version_1_invalidates_only_if_both_ends_agree() {
    let cases = [
        (true, encode_private_data(4096, 4096, false)),
        (false, encode_private_data(4096, 4096, true)),
        (false, encode_private_data(4096, 4096, false)),
        (true, Vec::new()),
        (true, vec![1; 30]),
    ];
    for_each(cases, |(remote_invalidate, data)| {
        let config = version_1(4096).with(|c| c.debug.remote_invalidate = remote_invalidate);
        let (_world, address) = serving("both-say", config);
        let mut client = RawPeer::connect_with_private_data(&address, &data);
        let own = PrivateData::parse(&client.private_data).expect("the server's private data");
        assert_eq!(own.remote_invalidation, remote_invalidate);
        for (handles, invalidated) in collect_invalidations(&mut client) {
            assert_eq!(invalidated, None, "{handles:x?}");
        }
    });
}
