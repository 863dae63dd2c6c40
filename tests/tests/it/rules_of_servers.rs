//! Protocol rules of responders, observed from the other end.
//! `engine/REQUIREMENTS.md` lists these tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rpcrdma::fabric::Access;
use rpcrdma::server::ServerConfig;
use rpcrdma::wire::properties::{Builder, Property};
use rpcrdma::wire::rpc::{AcceptStat, ReplyBody, ReplyHeader};
use rpcrdma::wire::{
    Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, Version, View, WriteList,
};
use rpcrdma::{Address, CreditMode, Procedure};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::{be, error_of, unharmed};

pub(super) const SCHEMES: [CreditMode; 3] = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];
/// Bytes of the RPC header of these calls: the offset of their arguments.
pub(super) const ARGS_AT: u32 = 40;
pub(super) const XID: u32 = 0x0102_0304;

/// A raw client with a credit mode.
pub(super) struct Client {
    pub(super) peer: RawPeer,
}

impl Client {
    pub(super) fn connect(address: &Address, scheme: CreditMode, revision: Revision) -> Self {
        let mut peer = RawPeer::connect_silently(address);
        peer.revision = revision;
        match scheme {
            CreditMode::V1 => peer.version = Version::V1,
            _ => peer.introduce(),
        }
        assert_eq!(peer.windowed, scheme == CreditMode::V2Windowed);
        Self { peer }
    }

    pub(super) fn send(&mut self, xid: u32, flags: Flags, body: Body<'_>, payload: &[u8]) {
        let bytes = self.peer.message(xid, flags, body, payload);
        self.peer.send(&bytes);
    }

    pub(super) fn call(&mut self, procedure: u32, chunks: Chunks<'_>, args: &[u8]) {
        let call = call_bytes(XID, PROGRAM, VERSION, procedure, args);
        self.send(XID, Flags::NONE, Body::Msg(chunks), &call);
    }

    /// The next message other than grants and properties.
    pub(super) fn answer(&mut self) -> Message {
        loop {
            let message = self.peer.receive().expect("the connection goes on");
            let view = View::check(&message.bytes, self.peer.revision).expect("a header");
            let grant = view.htype() == HeaderType::Nomsg && view.xid() == 0;
            if !grant && view.htype() != HeaderType::Connprop {
                return message;
            }
        }
    }

    pub(super) fn error(&mut self) -> (u32, ErrorBody) {
        error_of(&self.answer().bytes, self.peer.revision)
    }

    /// Checks that the connection is alive, and that no unexpected message has arrived.
    pub(super) fn ping(&mut self) {
        let call = call_bytes(7, PROGRAM, VERSION, ECHO, b"ping");
        self.send(7, Flags::NONE, Body::Msg(Chunks::NONE), &call);
        let message = self.answer();
        let view = View::check(&message.bytes, self.peer.revision).expect("a header");
        assert_eq!((view.xid(), view.payload()), (7, &reply_bytes(7, b"ping")[..]));
    }
}

pub(super) fn server_of(scheme: CreditMode) -> ServerConfig {
    ServerConfig { shard: small().with(|c| c.wire.credit_mode = scheme), ..small_server() }
}

/// A server and its client.
pub(super) fn pair(name: &'static str, scheme: CreditMode) -> (World, Address, Client) {
    let mut world = World::new(name);
    let address = world.serve(server_of(scheme));
    let client = Client::connect(&address, scheme, Revision::Ietf00);
    (world, address, client)
}

pub(super) fn reads(list: &[ReadSegment]) -> Chunks<'_> {
    Chunks { reads: list, ..Chunks::NONE }
}

pub(super) fn segment(length: u32) -> Segment {
    Segment { handle: 1, length, offset: 0 }
}

#[test]
fn replies_repeat_xid_and_version_and_have_no_read_list() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("replies", scheme);
        let mut data = [0; 64];
        pattern(0, &mut data);
        let (read, _from) = client.peer.expose(&data, Access::REMOTE_READ);
        let (write, _to) = client.peer.expose(&data, Access::REMOTE_WRITE);
        let read = [ReadSegment { position: ARGS_AT + 4, target: read }];
        let write = WriteList { counts: &[1], segments: &[write] };
        let cases: [(u32, Chunks<'_>, &[u8]); 6] = [
            (ECHO, Chunks::NONE, b"any"),
            (STORE, reads(&read), &[0; 4]),
            (LOAD, Chunks { writes: write, ..Chunks::NONE }, &[0, 0, 0, 0, 0, 0, 0, 64]),
            (MIRROR, Chunks { reads: &read, writes: write, ..Chunks::NONE }, &[0; 4]),
            (REFUSE, Chunks::NONE, &[0; 4]),
            (999, Chunks::NONE, b""),
        ];
        for (procedure, chunks, args) in cases {
            client.call(procedure, chunks, args);
            let bytes = client.answer().bytes;
            let view = View::check(&bytes, Revision::Ietf00).expect("a header");
            assert_eq!((view.xid(), view.version()), (XID, client.peer.version), "{scheme:?} {procedure}");
            let flags = match scheme {
                CreditMode::V2Windowed => Flags::RESPONSE.with(Flags::RECEIVED),
                CreditMode::V2Incremental => Flags::RESPONSE,
                CreditMode::V1 => Flags::NONE,
            };
            assert_eq!((view.htype(), view.flags()), (HeaderType::Msg, flags), "{scheme:?} {procedure}");
            assert_eq!(view.reads().count(), 0, "{scheme:?} {procedure}");
            assert_eq!(view.payload()[..8], be(&[XID, 1]), "{scheme:?} {procedure}: XID and REPLY");
            let granted = match scheme {
                CreditMode::V2Incremental => view.credit() >> 16,
                _ => view.credit(),
            };
            assert_ne!(granted, 0, "{scheme:?} {procedure}");
        }
    }
}

/// RFC 5531 §9.
#[test]
fn another_version_of_rpc_is_answered_with_the_range() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("rpcvers", scheme);
        for rpcvers in [0, 1, 3, u32::MAX] {
            let mut call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"");
            call[8..12].copy_from_slice(&rpcvers.to_be_bytes());
            let bytes = client.peer.message(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            client.peer.send(&bytes);
            let bytes = client.answer().bytes;
            let view = View::check(&bytes, Revision::Ietf00).expect("a header");
            // REPLY, MSG_DENIED, RPC_MISMATCH, from 2 to 2.
            assert_eq!(view.payload(), be(&[XID, 1, 1, 0, 2, 2]), "{scheme:?} {rpcvers}");
        }
    }
}

#[test]
fn write_chunks_come_back_with_their_segments_and_true_lengths() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("written", scheme);
        let (all, memory) = client.peer.expose(&[0xEE; 1000], Access::REMOTE_WRITE);
        let (other, untouched) = client.peer.expose(&[0xEE; 100], Access::REMOTE_WRITE);
        let part = |offset, length| Segment { length, offset: all.offset + offset, ..all };
        let segments = [part(0, 300), part(300, 400), part(700, 300), other];
        let writes = WriteList { counts: &[3, 1], segments: &segments };
        // 501 bytes, which XDR would pad to 504, and none.
        client.call(LOAD, Chunks { writes, ..Chunks::NONE }, &be(&[9, 501, 0]));
        let bytes = client.answer().bytes;
        let view = View::check(&bytes, Revision::Ietf00).expect("a header");
        let returned: Vec<Vec<Segment>> = view.writes().map(|chunk| chunk.segments().collect()).collect();
        let with = |segment: Segment, length| Segment { length, ..segment };
        let expected =
            [vec![with(segments[0], 300), with(segments[1], 201), with(segments[2], 0)], vec![with(other, 0)]];
        assert_eq!(returned, expected, "{scheme:?}");
        let (mut now, mut rest) = ([0; 1000], [0; 100]);
        assert!(memory.read_at(0, &mut now) && untouched.read_at(0, &mut rest));
        assert!(patterned(9, &now[..501]), "{scheme:?}");
        assert!(now[501..].iter().chain(&rest).all(|&byte| byte == 0xEE), "{scheme:?}: padding was written");
    }
}

#[test]
fn read_chunks_of_several_segments_are_joined_in_order() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("joined", scheme);
        let (mut first, mut second) = ([0; 1001], [0; 10]);
        pattern(5, &mut first);
        pattern(6, &mut second);
        let (first, _one) = client.peer.expose(&first, Access::REMOTE_READ);
        let (second, _two) = client.peer.expose(&second, Access::REMOTE_READ);
        let position = ARGS_AT + 4;
        let part = |offset, length| ReadSegment {
            position,
            target: Segment { length, offset: first.offset + offset, ..first },
        };
        // The second chunk follows the first and its padding.
        let behind = ReadSegment { position: position + 1004, target: second };
        let list = [part(0, 1), part(1, 2), part(3, 997), part(1000, 1), behind];
        client.call(STORE, reads(&list), &be(&[5]));
        let bytes = client.answer().bytes;
        let view = View::check(&bytes, Revision::Ietf00).expect("a header");
        assert_eq!(view.payload(), reply_bytes(XID, &be(&[1001, 10])), "{scheme:?}");
    }
}

/// The error's maximum is that of the procedure, or 0.
#[test]
fn read_chunks_beyond_those_of_the_procedure_are_refused_with_their_number() {
    const TWO: u32 = 20;
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let mut world = World::new("read-chunks");
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, TWO, Procedure::new(|_| Ok(())).read_chunks(2, 64).uncounted());
        let shard = small().with(|c| c.wire.credit_mode = scheme);
        let address = world.serve_with(ServerConfig { shard, ..small_server() }, services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (target, _memory) = client.peer.expose(&[0; 64], Access::REMOTE_READ);
        let list = [0, 64, 128].map(|at| ReadSegment { position: ARGS_AT + at, target });
        for (procedure, most) in [(TWO, 2), (ECHO, 0)] {
            client.call(procedure, reads(&list), b"");
            let error = error_of(&client.answer().bytes, Revision::Ietf00);
            assert_eq!(error, (XID, ErrorBody::ReadChunks { max: most }), "{scheme:?} {procedure}");
        }
        client.call(TWO, reads(&list[..2]), b"");
        let bytes = client.answer().bytes;
        assert_eq!(View::check(&bytes, Revision::Ietf00).expect("a header").htype(), HeaderType::Msg);
    }
}

#[test]
fn errors_have_the_response_flag() {
    for revision in [Revision::Ietf00, Revision::Cel09] {
        for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
            let mut world = World::new("flagged");
            let shard = small().with(|c| {
                c.wire.credit_mode = scheme;
                c.wire.revision = revision;
            });
            let address = world.serve(ServerConfig { shard, ..small_server() });
            let mut client = Client::connect(&address, scheme, revision);
            client.call(ECHO, reads(&[ReadSegment { position: ARGS_AT, target: segment(1) }]), b"");
            let bytes = client.answer().bytes;
            assert_eq!(error_of(&bytes, revision), (XID, ErrorBody::ReadChunks { max: 0 }));
            let view = View::check(&bytes, revision).expect("a header");
            assert_eq!(view.version(), Version::V2);
            assert!(view.flags().contains(Flags::RESPONSE), "{revision:?} {scheme:?}");
            client.ping();
        }
    }
}

#[test]
fn pure_grants_have_xid_0_no_chunks_and_no_flag() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let (_world, _, mut client) = pair("grants", scheme);
        client.ping();
        // Each message consumes a Receive and gets no answer. A grant is due after half the credits.
        for _ in 0..small().limits.credits - 1 {
            client.send(XID, Flags::RESPONSE, Body::Msg(Chunks::NONE), &reply_bytes(XID, b""));
        }
        let bytes = client.peer.receive().expect("a grant").bytes;
        let view = View::check(&bytes, Revision::Ietf00).expect("a header");
        assert_eq!((view.htype(), view.xid(), view.has_chunks()), (HeaderType::Nomsg, 0, false), "{scheme:?}");
        assert_eq!(view.flags().without(Flags::RECEIVED), Flags::NONE, "{scheme:?}");
        assert_eq!((view.inv_handle(), view.payload_offset()), (0, bytes.len()), "{scheme:?}");
    }
}

#[test]
fn an_operation_that_is_not_supported_gets_inval_htype() {
    for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let (_world, _, mut client) = pair("operations", scheme);
        client.ping();
        for opttype in [1, 2, 3, 4, 5, u32::MAX] {
            client.send(XID, Flags::NONE, Body::Optional { opttype, optinfo: &[0; 8] }, b"");
            assert_eq!(client.error(), (XID, ErrorBody::InvalHtype), "{scheme:?} {opttype}");
        }
        // Whatever the body is: none, one word, more opaque data than the message has, and bytes after its end.
        let whole = client.peer.message(XID, Flags::NONE, Body::Optional { opttype: 1, optinfo: &[] }, b"");
        let words: [&[u32]; 4] = [&[], &[1], &[1, 100, 0], &[1, 0, 7]];
        for body in words {
            let mut bytes = whole[..whole.len() - 8].to_vec();
            if client.peer.windowed {
                bytes[20..24].copy_from_slice(&client.peer.received.to_be_bytes());
            }
            bytes.extend(be(body));
            client.peer.send(&bytes);
            assert_eq!(client.error(), (XID, ErrorBody::InvalHtype), "{scheme:?} {body:?}");
        }
        for htype in [2u32, 3, 6, 0xFFFF_FF04] {
            let mut bytes = client.peer.message(XID, Flags::NONE, Body::Nomsg(Chunks::NONE), b"");
            bytes[12..16].copy_from_slice(&htype.to_be_bytes());
            client.peer.send(&bytes);
            assert_eq!(client.error(), (XID, ErrorBody::InvalHtype), "{scheme:?} {htype}");
        }
        client.ping();
    }
}

#[test]
fn malformed_properties_get_bad_xdr_and_unknown_ones_pass() {
    let (_world, address, _) = pair("properties", CreditMode::V2Windowed);
    let size = 4096u32.to_be_bytes();
    let cases: [(&str, u32, &[u8], bool); 8] = [
        ("good", 2, &size, true),
        ("the default", 2, b"", true),
        ("unknown, and of a strange length", 0x1234_5678, b"abc", true),
        ("an experiment of others", 0xFFFF_FFFE, b"", true),
        ("a number of three bytes", 2, &size[1..], false),
        ("two numbers for one", 1, &[0; 8], false),
        ("a boolean of 2", 0xFFFF_FF02, &[0, 0, 0, 2], false),
        ("opaque data beyond their own end", 6, &[0, 0, 0, 9, 1, 2, 3, 4], false),
    ];
    for (name, which, data, good) in cases {
        // Each case stands between two valid properties.
        let mut buffer = [0; 64];
        let set = Builder::new(&mut buffer)
            .uint32(3, 1 << 20)
            .and_then(|set| set.property(Property { which, data }))
            .and_then(|set| set.uint32(4, 16))
            .expect("space")
            .finish();
        let mut client = Client::connect(&address, CreditMode::V2Windowed, Revision::Ietf00);
        client.send(XID, Flags::NONE, Body::Connprop(set), b"");
        if !good {
            assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{name}");
        }
        client.ping();
    }
    // Data beyond the end of the message.
    let mut client = Client::connect(&address, CreditMode::V2Windowed, Revision::Ietf00);
    let mut buffer = [0; 64];
    let set = Builder::new(&mut buffer).uint32(2, 4096).expect("space").finish();
    let bytes = client.peer.message(XID, Flags::NONE, Body::Connprop(set), b"");
    client.peer.send(&bytes[..bytes.len() - 4]);
    assert_eq!(client.error(), (XID, ErrorBody::BadXdr));
    client.ping();
}

#[test]
fn unknown_flags_of_a_connprop_get_inval_flag() {
    for revision in [Revision::Ietf00, Revision::Cel09] {
        // The older revision has this code in place of INVAL_FLAG. There, MORE is unknown, too.
        let (error, flags) = match revision {
            Revision::Ietf00 => (ErrorBody::InvalFlag, [0x80, 0x8000_0000]),
            Revision::Cel09 => (ErrorBody::InvalHtype, [0x80, 2]),
        };
        for scheme in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
            let mut world = World::new("connprop-flags");
            let server = server_of(scheme).with(|c| c.shard.wire.revision = revision);
            let address = world.serve(server);
            for flag in flags {
                let mut buffer = [0; 64];
                let which = if revision == Revision::Cel09 { 1 } else { 2 };
                let set = Builder::new(&mut buffer).uint32(which, 4096).expect("space").finish();
                let mut client = Client::connect(&address, scheme, revision);
                let mut bytes = client.peer.message(XID, Flags::NONE, Body::Connprop(set), b"");
                let said = u32::from_be_bytes(bytes[16..20].try_into().expect("a word")) | flag;
                bytes[16..20].copy_from_slice(&said.to_be_bytes());
                client.peer.send(&bytes);
                assert_eq!(client.error(), (XID, error), "{revision:?} {scheme:?} {flag:#x}");
                client.ping();
            }
            // The received count before both ends have offered it.
            let mut peer = RawPeer::connect_silently(&address);
            (peer.revision, peer.windowed) = (revision, true);
            let mut buffer = [0; 64];
            let set = Builder::new(&mut buffer).uint32(9, 4096).expect("space").finish();
            let bytes = peer.message(XID, Flags::NONE, Body::Connprop(set), b"");
            peer.send(&bytes);
            assert_eq!(Client { peer }.error(), (XID, error), "{revision:?} {scheme:?}");
        }
    }
}

/// Whatever else is wrong with the RPC header, and in a long call, too.
#[test]
fn differing_xids_get_bad_xdr_or_err_chunk() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("two-xids", scheme);
        client.ping();
        let other = XID + 1;
        let good = call_bytes(other, PROGRAM, VERSION, ECHO, b"four");
        let with = |at: usize, word: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
            bytes
        };
        let payloads = [
            good.clone(),
            // Message type, RPC version, program, length of the credential.
            with(4, 7),
            with(8, 3),
            with(12, 1),
            with(28, 1000),
            good[..4].to_vec(),
            good[..8].to_vec(),
            good[..20].to_vec(),
        ];
        let assert_refused = |client: &mut Client, what: &str| match scheme {
            CreditMode::V1 => assert_err_chunk(client, what),
            _ => assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}: {what}"),
        };
        for payload in payloads {
            client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &payload);
            assert_refused(&mut client, &format!("{payload:?}"));
            let (whole, _memory) = client.peer.expose(&payload, Access::REMOTE_READ);
            client.send(XID, Flags::NONE, Body::Nomsg(reads(&[ReadSegment { position: 0, target: whole }])), b"");
            assert_refused(&mut client, &format!("{payload:?} in a chunk"));
        }
        client.ping();
    }
}

#[test]
fn more_where_it_has_no_meaning_gets_inval_flag() {
    let (_world, _, mut client) = pair("more", CreditMode::V2Windowed);
    client.ping();
    let write = WriteList { counts: &[1], segments: &[segment(8)] };
    let bodies = [
        Body::Nomsg(Chunks::NONE),
        Body::Nomsg(Chunks { writes: write, ..Chunks::NONE }),
        Body::Optional { opttype: 1, optinfo: b"" },
    ];
    for body in bodies {
        client.send(XID, Flags::MORE, body, b"");
        assert_eq!(client.error(), (XID, ErrorBody::InvalFlag), "{body:?}");
    }
    // Errors are never answered.
    client.send(XID, Flags::MORE, Body::Error(ErrorBody::System), b"");
    client.ping();
}

#[test]
fn a_call_that_the_transport_refuses_is_not_run() {
    for scheme in SCHEMES {
        let mut world = World::new("not-run");
        let runs = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&runs);
        let handler = move |_: &mut rpcrdma::ServerCall| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let mut services = standard_services();
        services.add(PROGRAM, VERSION, 20, Procedure::new(handler).read_chunks(1, 500).write_chunks(1, 500));
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        client.ping();
        let read = |position, length| ReadSegment { position: ARGS_AT + position, target: segment(length) };
        let lists: [&[ReadSegment]; 6] = [
            &[read(2, 8)],
            &[read(400, 8)],
            &[read(0, 501)],
            &[read(0, 0)],
            &[read(0, 8), read(8, 8)],
            &[read(0, 8); 17],
        ];
        for list in lists {
            client.call(20, reads(list), &[0; 8]);
            let (xid, error) = client.error();
            assert_eq!(xid, XID, "{scheme:?} {list:?}: {error}");
        }
        let writes = WriteList { counts: &[1, 1], segments: &[segment(8); 2] };
        client.call(20, Chunks { writes, ..Chunks::NONE }, &[0; 8]);
        assert_eq!(client.error().0, XID, "{scheme:?}");
        let call = call_bytes(XID + 1, PROGRAM, VERSION, 20, &[0; 8]);
        client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call);
        assert_eq!(client.error(), (XID, ErrorBody::BadXdr), "{scheme:?}");
        assert_eq!(runs.load(Ordering::Relaxed), 0, "{scheme:?}");
        client.call(20, Chunks::NONE, &[0; 8]);
        client.answer();
        assert_eq!(runs.load(Ordering::Relaxed), 1, "{scheme:?}: a good call is run");
    }
}

#[test]
fn a_server_invalidates_only_handles_of_the_call() {
    for remote_invalidate in [true, false] {
        let mut world = World::new("offered");
        let shard = small().with(|c| c.wire.remote_invalidate = remote_invalidate);
        let address = world.serve(ServerConfig { shard, ..small_server() });
        let mut client = Client::connect(&address, CreditMode::V2Windowed, Revision::Ietf00);
        let mut load = |offer: bool, position: Option<u32>| {
            let (write, _memory) = client.peer.expose(&[0; 64], Access::REMOTE_WRITE);
            let inv_handle = if offer { write.handle } else { 0 };
            let writes = WriteList { counts: &[1], segments: &[write] };
            let bad = position.map(|position| ReadSegment { position, target: segment(8) });
            let chunks = Chunks { inv_handle, reads: bad.as_slice(), writes, reply: None };
            client.call(if bad.is_some() { MIRROR } else { LOAD }, chunks, &be(&[0, 64]));
            let message = client.answer();
            (message.invalidated.is_some(), message.invalidated.is_none_or(|key| key == write.handle))
        };
        assert_eq!(load(true, None), (remote_invalidate, true));
        assert_eq!(load(false, None), (false, true), "nothing was offered");
        assert_eq!(load(true, Some(41)), (false, true), "errors revoke nothing");
        assert_eq!(load(true, None), (remote_invalidate, true));
    }
}

/// The only error of version 1: XID, version, credits, ERROR, ERR_CHUNK.
pub(super) fn assert_err_chunk(client: &mut Client, what: &str) {
    let bytes = client.answer().bytes;
    assert_eq!(bytes.len(), 20, "{what}");
    assert_eq!((&bytes[..8], &bytes[12..]), (&be(&[XID, 1])[..], &be(&[4, 2])[..]), "{what}");
    assert_ne!(bytes[8..12], [0; 4], "{what}: no credits");
}

#[test]
fn version_1_errors_repeat_xid_and_version_with_err_chunk() {
    let (world, address, mut client) = pair("err-chunk", CreditMode::V1);
    let mut witness = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    client.ping();
    let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"");
    let cases: [(&str, Vec<u8>); 7] = [
        ("an unknown procedure", be(&[XID, 1, 9, 9, 0, 0, 0])),
        ("a type of version 2", be(&[XID, 1, 9, 5, 0, 0, 0])),
        ("NOMSG without chunks", be(&[XID, 1, 9, 1, 0, 0, 0])),
        ("a boolean of 2", be(&[XID, 1, 9, 0, 2, 0, 0])),
        ("a list that is cut off", be(&[XID, 1, 9, 0, 1, 40, 1])),
        ("MSGP", [be(&[XID, 1, 9, 2, 4, 1024, 0, 0, 0]), call].concat()),
        ("two XIDs", [be(&[XID, 1, 9, 0, 0, 0, 0]), call_bytes(XID + 1, PROGRAM, VERSION, ECHO, b"")].concat()),
    ];
    for (what, bytes) in cases {
        client.peer.send(&bytes);
        assert_err_chunk(&mut client, what);
        client.ping();
        unharmed(&mut witness);
    }
}

#[test]
fn version_1_refuses_undeclared_chunks_with_err_chunk() {
    let (_world, _, mut client) = pair("undeclared", CreditMode::V1);
    client.ping();
    let read = |n: u32| ReadSegment { position: ARGS_AT + 4 + 8 * n, target: segment(8) };
    client.call(ECHO, reads(&[read(0)]), &[0; 4]);
    assert_err_chunk(&mut client, "an argument that may not be reduced");
    let five: Vec<_> = (0..5).map(read).collect();
    client.call(STORE, reads(&five), &[0; 4]);
    assert_err_chunk(&mut client, "more arguments than may be reduced");
    let writes = WriteList { counts: &[1], segments: &[segment(8)] };
    client.call(ECHO, Chunks { writes, ..Chunks::NONE }, &[0; 4]);
    assert_err_chunk(&mut client, "a result that may not be reduced");
    client.ping();
}

#[test]
fn version_1_servers_drop_done_and_error_in_silence() {
    let (_world, _, mut client) = pair("dropped", CreditMode::V1);
    client.ping();
    for words in [&[XID, 1, 9, 3, 0, 0, 0][..], &[XID, 1, 9, 4, 2, 0, 0], &[XID, 1, 9, 4, 1, 1, 1]] {
        client.peer.send(&be(words));
        client.ping();
    }
}

#[test]
fn version_1_drops_messages_shorter_than_28_bytes() {
    let (world, address, mut client) = pair("too-short", CreditMode::V1);
    let mut witness = world.client(&address, small().with(|c| c.wire.credit_mode = CreditMode::V1));
    client.ping();
    // The claimed type does not matter.
    let mut sent = 0;
    for htype in [0, 1, 2, 3, 4, 9] {
        let whole = be(&[XID, 1, 9, htype, 0, 0, 0]);
        for len in [1, 3, 4, 15, 16, 19, 20, 24, 27] {
            // An ERROR and a DONE have fewer words, so they are not too short.
            if htype == 3 && len >= 16 || htype == 4 && len >= 20 {
                continue;
            }
            client.peer.send(&whole[..len]);
            client.ping();
            sent += 1;
        }
        unharmed(&mut witness);
    }
    assert_eq!(world.server().stats()[0].messages.rejected_short, sent);
}

/// Order alone distinguishes calls for a server: it runs and answers each.
#[test]
fn calls_that_share_an_xid_are_all_answered() {
    for scheme in SCHEMES {
        let mut world = World::new("shared-xid");
        let workers = Some(rpcrdma::server::WorkerConfig { count: 1, ..Default::default() });
        let address = world.serve(ServerConfig { workers, ..server_of(scheme) });
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        client.ping();
        for procedure in [ECHO, WORKER_ECHO] {
            for n in 0..10 {
                client.call(procedure, Chunks::NONE, &be(&[n]));
            }
            let mut answers: Vec<_> = (0..10)
                .map(|_| {
                    let bytes = client.answer().bytes;
                    let view = View::check(&bytes, Revision::Ietf00).expect("a header");
                    assert_eq!(view.xid(), XID);
                    view.payload().to_vec()
                })
                .collect();
            answers.sort();
            let expected: Vec<_> = (0..10).map(|n| reply_bytes(XID, &be(&[n]))).collect();
            assert_eq!(answers, expected, "{scheme:?}");
        }
    }
}

#[test]
fn version_1_garbage_arguments_are_answered_by_rpc() {
    let (_world, _, mut client) = pair("garbage", CreditMode::V1);
    client.call(STORE, Chunks::NONE, b"");
    let bytes = client.answer().bytes;
    let view = View::check(&bytes, Revision::Ietf00).expect("a header");
    assert_eq!((view.xid(), view.htype()), (XID, HeaderType::Msg));
    let (reply, _) = ReplyHeader::parse(view.payload()).expect("an RPC reply");
    assert_eq!(reply.body, ReplyBody::accepted(AcceptStat::GarbageArgs));
    client.ping();
}

/// Every program has procedure 0, which any caller may run (RFC 5531 §12.1). AUTH_NONE differs from every other flavor
/// (§10).
#[test]
fn the_null_procedure_asks_for_no_authentication() {
    use rpcrdma::wire::rpc::{CallHeader, OpaqueAuth};
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("null", scheme);
        client.ping();
        for (flavor, body) in [(0, &b""[..]), (1, b"malformed..."), (6, &[7; 20]), (0x1234_5678, &[0; 400])] {
            let credential = OpaqueAuth { flavor, body };
            let (program, version) = (PROGRAM, VERSION);
            let verifier = OpaqueAuth::NONE;
            let header = CallHeader { xid: XID, program, version, procedure: 0, credential, verifier };
            let mut call = vec![0; header.encoded_len()];
            header.emit(&mut call).expect("as long as it says");
            client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call);
            let bytes = client.answer().bytes;
            let view = View::check(&bytes, Revision::Ietf00).expect("a header");
            assert_eq!(view.payload(), reply_bytes(XID, b""), "{scheme:?} {flavor}");
        }
    }
}

/// A Position Zero Read chunk would be a second RPC message.
#[test]
fn a_call_behind_its_header_has_no_position_zero_read_chunk() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("twice", scheme);
        client.ping();
        let call = call_bytes(XID, PROGRAM, VERSION, ECHO, b"four");
        let (whole, _memory) = client.peer.expose(&call, Access::REMOTE_READ);
        for procedure in [ECHO, STORE] {
            client.call(procedure, reads(&[ReadSegment { position: 0, target: whole }]), &[0; 4]);
            match scheme {
                CreditMode::V1 => assert_err_chunk(&mut client, "MSG with a Position Zero Read chunk"),
                _ => assert_eq!(client.error().0, XID, "{scheme:?}"),
            }
            client.ping();
        }
    }
}
