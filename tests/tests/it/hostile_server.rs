//! Servers that break rules.
//! Each call of the client ends once, and the connection survives where it can.

use std::sync::mpsc;
use std::time::Duration;

use rpcrdma::client::LocalClient;
use rpcrdma::fabric::RemoteMemory;
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, ReadSegment, Revision, Segment, View, WriteList};
use rpcrdma::{Address, CallError};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

/// A call, as decoded by the server.
struct Call {
    xid: u32,
    inv_handle: u32,
    reads: Vec<ReadSegment>,
    writes: Vec<Segment>,
}

/// A server thread that takes one connection.
pub(super) struct Server(Option<std::thread::JoinHandle<()>>);

impl Server {
    /// A server that has exchanged properties with its client.
    pub(super) fn start(address: &Address, script: impl FnOnce(&mut RawPeer) + Send + 'static) -> Self {
        Self::listen(address, |listener| script(&mut listener.accept()))
    }

    /// A server that has sent nothing yet.
    pub(super) fn start_silently(address: &Address, script: impl FnOnce(&mut RawPeer) + Send + 'static) -> Self {
        Self::listen(address, |listener| script(&mut listener.accept_silently()))
    }

    pub(super) fn listen(address: &Address, script: impl FnOnce(RawListener) + Send + 'static) -> Self {
        let (ready, is_ready) = mpsc::channel();
        let address = address.clone();
        let thread = std::thread::spawn(move || {
            let listener = RawListener::bind(&address);
            ready.send(()).expect("the test waits");
            script(listener);
        });
        is_ready.recv().expect("it listens");
        Self(Some(thread))
    }

    pub(super) fn join(mut self) {
        if let Some(thread) = self.0.take() {
            thread.join().expect("the script ran");
        }
    }
}

/// The next call; `None` after the client has disconnected.
fn next_call(peer: &mut RawPeer) -> Option<Call> {
    loop {
        let bytes = peer.receive()?.bytes;
        let view = View::check(&bytes, Revision::Ietf00).expect("clients send good headers");
        if view.xid() != 0 {
            let writes = view.writes().flat_map(|chunk| chunk.segments().collect::<Vec<_>>()).collect();
            return Some(Call {
                xid: view.xid(),
                inv_handle: view.inv_handle(),
                reads: view.reads().collect(),
                writes,
            });
        }
    }
}

pub(super) fn reply(peer: &mut RawPeer, xid: u32, chunks: Chunks<'_>, payload: &[u8], invalidate: Option<u32>) {
    let bytes = peer.message(xid, Flags::RESPONSE, Body::Msg(chunks), payload);
    peer.send_invalidating(&bytes, invalidate);
}

/// Answers correctly until the client disconnects.
pub(super) fn behave(peer: &mut RawPeer) {
    while let Some(call) = next_call(peer) {
        reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b"fine"), None);
    }
}

pub(super) fn plain(client: &mut LocalClient) -> Result<Vec<u8>, CallError> {
    let call = client.prepare(ECHO, 4)?;
    client.call(call).map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

/// A call with a Read chunk and a Write chunk of 500 bytes.
fn with_memory(client: &mut LocalClient) -> Result<Vec<u8>, CallError> {
    let first = client.first();
    let mut call = client.prepare(MIRROR, 4)?;
    call = call.read_chunk(4, client.alloc(first, 500)?);
    call = call.write_chunk_into(client.alloc(first, 500)?);
    client.call(call).map(|reply| reply.chunk(0).unwrap_or_default().to_vec()).map_err(CallError::from)
}

/// Required state of the connection afterwards.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    GoOn,
    End,
}

#[test]
fn bad_replies_end_their_call_with_a_cause() {
    use Then::{End, GoOn};
    type Script = fn(&mut RawPeer, &Call);
    let malformed = |error: &CallError| matches!(error, CallError::MalformedReply(_));
    let lost = |error: &CallError| matches!(error, CallError::ConnectionLost { sent: true });
    type Check<'a> = &'a dyn Fn(&CallError) -> bool;
    let transport = |error: &CallError| matches!(error, CallError::Transport(ErrorBody::System));
    let cases: [(&str, Script, Check<'_>, Then); 13] = [
        (
            "a transport error",
            |peer, call| {
                let bytes = peer.message(call.xid, Flags::RESPONSE, Body::Error(ErrorBody::System), b"");
                peer.send(&bytes);
            },
            &transport,
            GoOn,
        ),
        ("no RPC message", |peer, call| reply(peer, call.xid, Chunks::NONE, b"", None), &malformed, GoOn),
        (
            "half an RPC header",
            |peer, call| {
                reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b"")[..13], None);
            },
            &malformed,
            GoOn,
        ),
        (
            "an RPC call",
            |peer, call| {
                reply(peer, call.xid, Chunks::NONE, &call_bytes(call.xid, 1, 1, 1, b""), None);
            },
            &malformed,
            GoOn,
        ),
        (
            "two XIDs",
            |peer, call| {
                reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid ^ 1, b""), None);
            },
            &malformed,
            GoOn,
        ),
        (
            "a Read list",
            |peer, call| {
                let reads = call.reads.clone();
                let reads = if reads.is_empty() { vec![ReadSegment::default()] } else { reads };
                reply(peer, call.xid, Chunks { reads: &reads, ..Chunks::NONE }, &reply_bytes(call.xid, b""), None);
            },
            &malformed,
            GoOn,
        ),
        (
            "more Write chunks than were offered",
            |peer, call| {
                let writes = WriteList { counts: &[1; 3], segments: &[Segment::default(); 3] };
                reply(peer, call.xid, Chunks { writes, ..Chunks::NONE }, &reply_bytes(call.xid, b""), None);
            },
            &malformed,
            GoOn,
        ),
        (
            "more bytes than there is room for",
            |peer, call| {
                let segment = Segment { length: 501, ..Segment::default() };
                let writes = WriteList { counts: &[1], segments: &[segment] };
                reply(peer, call.xid, Chunks { writes, ..Chunks::NONE }, &reply_bytes(call.xid, b""), None);
            },
            &malformed,
            GoOn,
        ),
        (
            "lengths that add up to 4 GiB and a bit",
            |peer, call| {
                let segment = Segment { length: u32::MAX, ..Segment::default() };
                let writes = WriteList { counts: &[2], segments: &[segment; 2] };
                reply(peer, call.xid, Chunks { writes, ..Chunks::NONE }, &reply_bytes(call.xid, b""), None);
            },
            &malformed,
            GoOn,
        ),
        (
            "a Reply chunk that was not offered",
            |peer, call| {
                let segment = [Segment { length: 9, ..Segment::default() }];
                reply(
                    peer,
                    call.xid,
                    Chunks { reply: Some(&segment), ..Chunks::NONE },
                    &reply_bytes(call.xid, b""),
                    None,
                );
            },
            &malformed,
            GoOn,
        ),
        (
            "a header that is cut off",
            |peer, call| {
                // Credit for the next call, which the truncated header cannot grant.
                let grant = peer.message(0, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
                peer.send(&grant);
                let bytes = peer.message(call.xid, Flags::RESPONSE, Body::Msg(Chunks::NONE), b"");
                peer.send(&bytes[..30]);
            },
            &malformed,
            GoOn,
        ),
        (
            "a key invalidated that is not theirs",
            |peer, call| {
                let key = call.inv_handle ^ 0x55;
                reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b""), Some(key));
            },
            &lost,
            End,
        ),
        (
            "an acknowledgement of what was never sent",
            |peer, call| {
                peer.received += 1000;
                reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b""), None);
                peer.received -= 1000;
            },
            &lost,
            End,
        ),
    ];
    for (name, script, is_right, then) in cases {
        for memory in [false, true] {
            let world = World::new("bad-replies");
            let address = world.address();
            let server = Server::start(&address, move |peer| {
                let call = next_call(peer).expect("a call");
                script(peer, &call);
                behave(peer);
            });
            let mut client = world.client(&address, small());
            let error = if memory { with_memory(&mut client) } else { plain(&mut client) };
            let error = error.expect_err(name);
            assert!(is_right(&error), "{name}, memory {memory}: {error}");
            assert_eq!(client.stats().exposed_buffers, 0, "{name}: memory is home with the end of the call");
            match then {
                GoOn => assert_eq!(plain(&mut client), Ok(b"fine".to_vec()), "{name}"),
                End => assert_eq!(plain(&mut client), Err(CallError::Closed), "{name}"),
            }
            drop(client);
            server.join();
        }
    }
}

#[test]
fn replies_to_nobody_and_messages_of_no_use_are_dropped() {
    let world = World::new("nobody");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        let call = next_call(peer).expect("a call");
        for xid in [0xDEAD_BEEF, call.xid ^ 0x8000_0000, call.xid.wrapping_add(1)] {
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"who?"), None);
        }
        let error = peer.message(7, Flags::RESPONSE, Body::Error(ErrorBody::System), b"");
        peer.send(&error);
        let bytes = peer.message(7, Flags::NONE, Body::Msg(Chunks::NONE), &call_bytes(7, 1, 1, 1, b""));
        peer.send(&bytes);
        peer.send(b"short");
        reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b"fine"), None);
        // Two more replies to the same call.
        for _ in 0..2 {
            reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b"twice"), None);
        }
        behave(peer);
    });
    let mut client = world.client(&address, small());
    for _ in 0..20 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    let messages = client.stats().messages;
    assert_eq!((messages.rejected_unknown_xid, messages.rejected_unexpected, messages.rejected_short), (6, 1, 1));
    drop(client);
    server.join();
}

#[test]
fn a_server_that_never_answers_costs_no_more_than_deadlines() {
    let world = World::new("silent");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        // Credit for all later calls.
        let call = next_call(peer).expect("a call");
        reply(peer, call.xid, Chunks::NONE, &reply_bytes(call.xid, b"fine"), None);
        while next_call(peer).is_some() {}
    });
    let mut client = world.client(&address, small().with(|c| c.limits.max_calls = 8));
    let first = client.first();
    assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    let mut ends = Vec::new();
    for token in 0..10 {
        let mut call = client.prepare(MIRROR, 4).expect("a buffer");
        call = call.write_chunk_into(client.alloc(first, 100).expect("a buffer"));
        call = call.timeout(Duration::from_millis(20));
        client.start(first, call, token);
    }
    assert!(settles(|| {
        client.poll(|done| ends.push(done.result.map(drop).map_err(CallError::from)));
        ends.len() == 10
    }));
    let late = ends.iter().filter(|end| matches!(end, Err(CallError::TimedOut { .. }))).count();
    let many = ends.iter().filter(|end| matches!(end, Err(CallError::TooManyCalls { .. }))).count();
    assert_eq!((late, many), (8, 2), "{ends:?}");
    assert_eq!(plain(&mut client), Err(CallError::TooManyCalls { limit: 8 }), "the server may still write");
    assert_eq!(client.stats().exposed_buffers, 8);
    drop(client);
    server.join();
}

#[test]
fn a_server_reaches_offered_memory_only() {
    let world = World::new("grab");
    let address = world.address();
    let (said, says) = mpsc::channel();
    let (ended, has_ended) = mpsc::channel();
    let server = Server::start(&address, move |peer| {
        let call = next_call(peer).expect("a call");
        let read = call.reads[0].target;
        let write = call.writes[0];
        let at =
            |segment: Segment, skip| RemoteMemory { rkey: segment.handle, address: segment.offset.wrapping_add(skip) };
        let all = peer.read(at(read, 0), 500).expect("it was offered");
        said.send(patterned(1, &all)).expect("the test listens");
        peer.write(&[3; 500], at(write, 0));
        let segment = Segment { length: 500, ..write };
        let writes = WriteList { counts: &[1], segments: &[segment] };
        reply(peer, call.xid, Chunks { writes, ..Chunks::NONE }, &reply_bytes(call.xid, b""), None);
        // The caller has its result and has not polled the client since, yet the keys are invalid.
        let () = has_ended.recv().expect("the call has ended");
        said.send(peer.read(at(read, 0), 500).is_none()).expect("the test listens");
        while peer.receive().is_some() {}
    });
    let mut client = world.client(&address, small());
    let first = client.first();
    let mut call = client.prepare(MIRROR, 4).expect("a buffer");
    let mut data = client.alloc(first, 500).expect("a buffer");
    pattern(1, &mut data);
    call = call.read_chunk(4, data);
    call = call.write_chunk_into(client.alloc(first, 500).expect("a buffer"));
    let reply = client.call(call).expect("a reply");
    assert_eq!(reply.chunk(0), Some(&[3; 500][..]));
    ended.send(()).expect("the server waits");
    assert!(says.recv().expect("the server speaks"), "it read what was offered");
    let error = plain(&mut client).expect_err("the server breaks its connection with the stale key");
    assert!(matches!(error, CallError::ConnectionLost { sent: true }), "{error}");
    assert!(says.recv().expect("the server speaks"), "a stale key is refused");
    drop(client);
    server.join();
}

#[test]
fn a_server_that_floods_its_client_loses_the_connection() {
    let world = World::new("flood");
    let address = world.address();
    let server = Server::start(&address, |peer| {
        let _ = next_call(peer).expect("a call");
        // Without credit the client cannot grant more.
        peer.credit = 0;
        for xid in 0..1000 {
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, &[0; 64]), None);
        }
        peer.wait_until_over();
    });
    let mut client = world.client(&address, small());
    let error = plain(&mut client).expect_err("no reply of its own comes");
    assert!(matches!(error, CallError::ConnectionLost { sent: true }), "{error}");
    assert_eq!(client.stats().peer_faults, 1);
    drop(client);
    server.join();
}
