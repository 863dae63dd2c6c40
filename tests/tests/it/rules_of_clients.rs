//! What the texts require of every requester, seen from the other end of the wire; `engine/REQUIREMENTS.md` names these tests.

use std::sync::mpsc;

use rpcrdma::wire::rpc::CallHeader;
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, HeaderType, Revision, Version, View};
use rpcrdma::{CallError, Config, Scheme};
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, plain, reply};

/// The next message that is more than a grant.
fn next(peer: &mut RawPeer) -> Option<Vec<u8>> {
    loop {
        let bytes = peer.receive()?.bytes;
        if View::check(&bytes, Revision::Ietf00).expect("clients send good headers").xid() != 0 {
            return Some(bytes);
        }
    }
}

#[test]
fn calls_offer_items_without_padding_at_their_positions() {
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental, Scheme::V1] {
        let world = World::new("calls");
        let address = world.address();
        let (said, says) = mpsc::channel();
        let server = Server::start_silently(&address, move |peer| {
            match scheme {
                Scheme::V1 => peer.version = Version::V1,
                _ => peer.welcome(),
            }
            let bytes = next(peer).expect("a call");
            let xid = View::check(&bytes, Revision::Ietf00).expect("a header").xid();
            said.send(bytes).expect("somebody listens");
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
            while peer.receive().is_some() {}
        });
        let mut client = world.client(&address, Config { scheme, ..small() });
        let first = client.first();
        // Arguments: a word, 501 bytes and their padding, a word, 7 bytes.
        let mut call = client.prepare_with_chunks(MIRROR, 8).expect("a buffer");
        call.args_mut().copy_from_slice(&be(&[501, 7]));
        for (at, len) in [(4, 501), (4 + 504 + 4, 7)] {
            call.send_chunk(at, client.alloc(first, len).expect("a buffer")).expect("room");
        }
        for len in [503, 1] {
            call.receive_chunk(client.alloc(first, len).expect("a buffer")).expect("room");
        }
        client.call(call).expect("a reply");
        let bytes = says.recv().expect("the server speaks");
        let view = View::check(&bytes, Revision::Ietf00).expect("a header");
        let (flags, version) = match scheme {
            Scheme::V2Windowed => (Flags::RECEIVED, Version::V2),
            Scheme::V2Incremental => (Flags::NONE, Version::V2),
            Scheme::V1 => (Flags::NONE, Version::V1),
        };
        assert_eq!((view.htype(), view.version(), view.flags()), (HeaderType::Msg, version, flags));
        // The message without its chunks, and without their padding.
        let (header, args_at) = CallHeader::parse(view.payload()).expect("an RPC call");
        assert_eq!((header.xid, header.procedure), (view.xid(), MIRROR));
        assert_eq!(view.payload()[4..8], be(&[0]), "CALL");
        assert_eq!(view.payload()[args_at..], be(&[501, 7]), "{scheme:?}");
        let at = args_at as u32;
        let reads: Vec<_> = view.reads().map(|read| (read.position, read.target.length)).collect();
        assert_eq!(reads, [(at + 4, 501), (at + 512, 7)], "{scheme:?}");
        let writes: Vec<Vec<u32>> =
            view.writes().map(|chunk| chunk.segments().map(|segment| segment.length).collect()).collect();
        assert_eq!(writes, [[503], [1]], "{scheme:?}");
        let mut handles: Vec<_> = view.reads().map(|read| read.target.handle).collect();
        handles.extend(view.writes().flat_map(|chunk| chunk.segments()).map(|segment| segment.handle));
        match scheme {
            Scheme::V1 => assert_eq!(view.inv_handle(), 0),
            _ => assert!(handles.contains(&view.inv_handle()), "{:#x} of {handles:x?}", view.inv_handle()),
        }
        drop(client);
        server.join();
    }
}

#[test]
fn clients_say_nothing_to_what_they_cannot_use() {
    let world = World::new("nothing-said");
    let address = world.address();
    let server = Server::start_silently(&address, |peer| {
        peer.version = Version::V1;
        // Nothing but calls comes from the client, whatever it is sent.
        let next_xid = |peer: &mut RawPeer| {
            let bytes = peer.receive()?.bytes;
            let view = View::check(&bytes, Revision::Ietf00).expect("clients send good headers");
            assert_eq!((view.htype(), view.version()), (HeaderType::Msg, Version::V1));
            Some(view.xid())
        };
        let xid = next_xid(peer).expect("a call");
        let stranger = xid ^ 0x8000_0000;
        let useless = [
            be(&[xid, 1, 9, 2, 4, 1024, 0, 0, 0, xid, 1, 0, 0, 0, 0]),
            // Less than a header: not even the call that they name is touched.
            be(&[xid, 1, 9, 4]),
            be(&[xid, 1, 9, 4, 1]),
            be(&[xid, 1, 9, 0, 1, 0]),
            be(&[xid, 1, 9, 3, 0, 0, 0]),
            be(&[stranger, 1, 9, 4]),
            be(&[stranger, 1, 9, 4, 1, 1]),
            be(&[stranger, 1, 9, 4, 2]),
            be(&[stranger, 1, 9, 0, 1, 0]),
            be(&[stranger, 1, 9, 77, 0, 0, 0]),
            be(&[stranger, 3, 9, 0, 0, 0, 0]),
            vec![0; 5],
        ];
        for bytes in &useless {
            peer.send(bytes);
        }
        reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        // Replies that are cut off, and of no known type: they name a call, which ends.
        for words in [&[1, 9, 0, 1, 0, 0][..], &[1, 9, 77, 0, 0, 0]] {
            let xid = next_xid(peer).expect("a call");
            peer.send(&be(&[&[xid], words].concat()));
        }
        while let Some(xid) = next_xid(peer) {
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b"fine"), None);
        }
    });
    let mut client = world.client(&address, Config { scheme: Scheme::V1, ..small() });
    assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    for _ in 0..2 {
        assert!(matches!(plain(&mut client), Err(CallError::MalformedReply(_))));
    }
    for _ in 0..5 {
        assert_eq!(plain(&mut client), Ok(b"fine".to_vec()));
    }
    drop(client);
    server.join();
}

/// An error that asks for more than can be given ends its call, with what it says.
#[test]
fn errors_that_cannot_be_obeyed_end_their_call_with_what_they_say() {
    let errors = [
        // There is one Write chunk, and it is counted from 1.
        ErrorBody::WriteResource { chunk_index: 0, length_needed: 100 },
        ErrorBody::WriteResource { chunk_index: 2, length_needed: 100 },
    ];
    let world = World::new("hopeless");
    let address = world.address();
    let server = Server::start(&address, move |peer| {
        for error in errors {
            let bytes = next(peer).expect("a call");
            let xid = View::check(&bytes, Revision::Ietf00).expect("a header").xid();
            let bytes = peer.message(xid, Flags::RESPONSE, Body::Error(error), b"");
            peer.send(&bytes);
        }
        while next(peer).is_some() {}
    });
    let mut client = world.client(&address, small());
    let first = client.first();
    for error in errors {
        let mut call = client.prepare_with_chunks(LOAD, 8).expect("a buffer");
        call.receive_chunk(client.alloc(first, 10).expect("a buffer")).expect("room");
        assert_eq!(client.call(call).map(drop), Err(CallError::Transport(error)));
        assert_eq!(client.stats().exposed_buffers, 0);
    }
    drop(client);
    server.join();
}
