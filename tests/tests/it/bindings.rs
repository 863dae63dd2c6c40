//! Upper-layer bindings, items in chunks, RPCSEC_GSS (version 2 §4.4; RFC 8166 §3.4, §6, §8.2.2).

use std::sync::Arc;
use std::sync::mpsc::channel;

use rpcrdma::binding::{Binding, Bindings};
use rpcrdma::client::{ClientConfig, Credential, LocalClient};
use rpcrdma::fabric::{Access, RemoteMemory};
use rpcrdma::proto::Defect;
use rpcrdma::proto::binding::BindingError;
use rpcrdma::wire::rpc::{AcceptStat, CallHeader, OpaqueAuth, ReplyBody, ReplyHeader};
use rpcrdma::wire::{Body, Chunks, ErrorBody, Flags, HeaderType, ReadSegment, Revision, Segment, View, WriteList};
use rpcrdma::{CallError, CreditMode, Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::With;
use rpcrdma_tests::*;

use super::hostile_client::be;
use super::hostile_server::{Server, reply};
use super::rules_of_clients::next;
use super::rules_of_servers::{ARGS_AT, Client, SCHEMES, XID, assert_err_chunk, pair, reads, server_of};

fn view(bytes: &[u8]) -> View<'_> {
    View::check(bytes, Revision::Ietf00).expect("a header")
}

fn bound(bindings: &[(u32, Binding)], scheme: CreditMode) -> ClientConfig {
    let mut all = Bindings::new();
    for &(procedure, binding) in bindings {
        all.add(PROGRAM, VERSION, procedure, binding);
    }
    ClientConfig { bindings: Some(Arc::new(all)), ..small_client(small().with(|c| c.wire.credit_mode = scheme)) }
}

/// A call with four bytes of arguments, Read chunks of `sent` bytes and Write chunks of `room` bytes.
fn chunked(client: &mut LocalClient, procedure: u32, sent: &[usize], room: &[usize]) -> Result<Vec<u8>, CallError> {
    let first = client.first();
    let mut call = client.prepare(procedure, 4)?;
    let mut at = 4;
    for &len in sent {
        call = call.read_chunk(at, client.alloc(first, len)?);
        at += len.next_multiple_of(4);
    }
    for &len in room {
        call = call.write_chunk_into(client.alloc(first, len)?);
    }
    client.call(call).map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

#[test]
fn a_client_refuses_to_reduce_ineligible_items() {
    for scheme in SCHEMES {
        let mut world = World::new("binding");
        let address = world.serve(server_of(scheme));
        let table = [
            (ECHO, Binding::inline(100, 100)),
            (STORE, Binding::inline(100, 100).arguments(1, 500)),
            (LOAD, Binding::inline(100, 100).results(1, 500)),
        ];
        let mut client = LocalClient::connect(&address, bound(&table, scheme)).expect("a connection");
        let broken = |error| Err(Defect::Binding(error).into());
        let too_many = |found, max| broken(BindingError::TooManyArguments { found, max });
        assert_eq!(chunked(&mut client, ECHO, &[8], &[]), too_many(1, 0));
        assert_eq!(chunked(&mut client, STORE, &[8, 8], &[]), too_many(2, 1));
        let longer = BindingError::ArgumentTooLong { index: 0, len: 501, max: 500 };
        assert_eq!(chunked(&mut client, STORE, &[501], &[]), broken(longer));
        for (procedure, room) in [(ECHO, &[8][..]), (STORE, &[8]), (LOAD, &[8, 8])] {
            let result = chunked(&mut client, procedure, &[], room);
            assert!(
                matches!(result, Err(CallError::Invalid(call)) if matches!(call.defect(), Defect::Binding(BindingError::TooManyResults { .. })))
            );
        }
        // The table has no reducible item of MIRROR.
        assert_eq!(chunked(&mut client, MIRROR, &[8], &[]), broken(BindingError::ReductionOff));
        assert_eq!(world.server().stats()[0].calls, 0, "nothing of that was sent");
        echo(&mut client, b"four").expect("an echo");
        store(&mut client, 1, &[500]).expect("what may be reduced");
        assert_eq!(client.stats().exposed_buffers, 0);
    }
}

#[test]
fn a_result_that_missed_its_write_chunk_ends_the_call() {
    for scheme in SCHEMES {
        let world = World::new("missed");
        let address = world.address();
        let server = Server::start_silently(&address, move |peer| {
            match scheme {
                CreditMode::V1 => peer.version = rpcrdma::wire::Version::V1,
                _ => peer.welcome(),
            }
            for inline in [4 + 504, 4] {
                let bytes = next(peer).expect("a call");
                let xid = view(&bytes).xid();
                let room = view(&bytes).writes().next().expect("a chunk").segments().next().expect("a segment");
                let used = Segment { length: if inline == 4 { 504 } else { 0 }, ..room };
                peer.write(&vec![1; 504], RemoteMemory { rkey: room.handle, address: room.offset });
                let writes = WriteList { counts: &[1], segments: &[used] };
                reply(peer, xid, Chunks { writes, ..Chunks::NONE }, &reply_bytes(xid, &vec![0; inline]), None);
            }
            while peer.receive().is_some() {}
        });
        let table = [(LOAD, Binding::inline(100, 4).results(1, 504))];
        let mut client = LocalClient::connect(&address, bound(&table, scheme)).expect("a connection");
        let error = chunked(&mut client, LOAD, &[], &[504]).expect_err("the item is inline");
        assert!(matches!(error, CallError::MalformedReply(_)), "{scheme:?}: {error}");
        assert_eq!(chunked(&mut client, LOAD, &[], &[504]), Ok(vec![0; 4]), "{scheme:?}");
        assert_eq!(client.stats().exposed_buffers, 0);
        drop(client);
        server.join();
    }
}

/// READ of NFS version 3: program, version and procedure.
const READ: (u32, u32, u32) = (100_003, 3, 6);

/// Bytes of file data in the READ result.
const FILE: usize = 5001;

/// NFS version 3 READ (RFC 1813 §3.3.6) with its binding. The file has [`FILE`] bytes or is absent.
fn nfs() -> Services {
    let procedure = Procedure::new(|call| {
        let found = call.args().first() == Some(&0);
        if !found {
            // The failure arm of the union: status, absent attributes.
            call.reply_mut(8)?.copy_from_slice(&be(&[2, 0]));
            return Ok(());
        }
        let len = FILE as u32;
        put_pattern(call.result_writer(0)?, 1, FILE)?;
        // Status, no attributes, count, end of file, length of the data.
        call.reply_mut(20)?.copy_from_slice(&be(&[0, 0, len, 1, len]));
        Ok(())
    })
    // RFC 8267 §4.1: the data; its length stays.
    .with_binding(Binding::inline(80, 104).results(1, 1 << 20));
    let mut services = Services::new();
    services.add(READ.0, READ.1, READ.2, procedure);
    services
}

#[test]
fn nfs3_counts_stay_in_the_message_and_bytes_go_to_the_chunk() {
    for scheme in SCHEMES {
        let mut world = World::new("nfs3");
        let address = world.serve_with(server_of(scheme), nfs());
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        for found in [true, false] {
            let (room, memory) = client.peer.expose(&[0xEE; 8192], Access::REMOTE_WRITE);
            let writes = WriteList { counts: &[1], segments: &[room] };
            let args = [u8::from(!found); 20];
            let call = call_bytes(XID, READ.0, READ.1, READ.2, &args);
            client.send(XID, Flags::NONE, Body::Msg(Chunks { writes, ..Chunks::NONE }), &call);
            let bytes = client.answer().bytes;
            let (written, results) = match found {
                // The length word stays inline, without the data.
                true => (FILE, be(&[0, 0, FILE as u32, 1, FILE as u32])),
                // The failure arm of the union has no reducible item.
                false => (0, be(&[2, 0])),
            };
            assert_eq!(view(&bytes).payload(), reply_bytes(XID, &results), "{scheme:?}");
            let lens: Vec<_> = view(&bytes).writes().map(|chunk| chunk.total_length()).collect();
            assert_eq!(lens, [written as u64], "{scheme:?}");
            let mut now = [0; 8192];
            assert!(memory.read_at(0, &mut now) && patterned(1, &now[..written]));
            assert!(filled(0xEE, &now[written..]), "{scheme:?}");
        }
    }
}

#[test]
fn read_chunks_with_their_padding_are_taken() {
    for scheme in SCHEMES {
        let mut world = World::new("with-padding");
        let mut services = standard_services();
        let lens = Procedure::new(|call| {
            let mut lens = Vec::new();
            for n in 0..call.read_chunks() {
                let data = call.read_chunk(n).ok_or(Refusal::SystemError)?;
                let item = data.get(..data.len().min(501)).filter(|item| patterned(n as u32, item));
                lens.extend((item.ok_or(Refusal::GarbageArguments)?.len() as u32).to_be_bytes());
            }
            call.reply_mut(lens.len())?.copy_from_slice(&lens);
            Ok(())
        });
        services.add(PROGRAM, VERSION, 20, lens.read_chunks(2, 501));
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let mut data = [[0; 504]; 2];
        for (n, data) in data.iter_mut().enumerate() {
            pattern(n as u32, &mut data[..501]);
        }
        let (first, _one) = client.peer.expose(&data[0], Access::REMOTE_READ);
        let (second, _two) = client.peer.expose(&data[1], Access::REMOTE_READ);
        // Padding in both chunks, in the first, in none. The second position always counts the first item with its
        // padding, and the second length word.
        for lens in [[504, 504], [504, 501], [501, 501]] {
            let read =
                |position, target: Segment, length| ReadSegment { position, target: Segment { length, ..target } };
            let list = [read(ARGS_AT + 4, first, lens[0]), read(ARGS_AT + 4 + 504 + 4, second, lens[1])];
            client.call(20, reads(&list), &be(&[501, 501]));
            let bytes = client.answer().bytes;
            assert_eq!(view(&bytes).payload(), reply_bytes(XID, &be(&[501, 501])), "{scheme:?} {lens:?}");
        }
        // One byte above the padded maximum.
        let list = [ReadSegment { position: ARGS_AT + 4, target: Segment { length: 505, ..first } }];
        client.call(20, reads(&list), &be(&[501]));
        match scheme {
            CreditMode::V1 => assert_err_chunk(&mut client, "an item that is too long"),
            _ => assert_eq!(client.error(), (XID, ErrorBody::BadXdr)),
        }
    }
}

/// The count before an item marks its end, for any maximum of the procedure, any segments of the chunk, and any form of
/// the call.
#[test]
fn read_chunks_lose_their_padding_by_the_count_in_front() {
    for scheme in SCHEMES {
        let mut world = World::new("without-padding");
        let mut services = standard_services();
        let join = |call: &mut ServerCall| {
            let parts: Vec<_> = (0..call.read_chunks()).filter_map(|n| call.read_chunk(n)).collect();
            let joined = parts.join(&b'|');
            call.reply_writer().put(&joined).map_err(|_| Refusal::SystemError)
        };
        services.add(PROGRAM, VERSION, 20, Procedure::new(join).read_chunks(2, 1 << 20));
        services.add(PROGRAM, VERSION, 21, Procedure::new(join).read_chunks(2, 1 << 20).uncounted());
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (first, _one) = client.peer.expose(b"fiveB\x01\x02\x03", Access::REMOTE_READ);
        let (second, _two) = client.peer.expose(b"sixsix\x04\x05", Access::REMOTE_READ);
        let part = |position, of: Segment, offset: u32, length| ReadSegment {
            position: ARGS_AT + position,
            target: Segment { length, offset: of.offset + u64::from(offset), ..of },
        };
        let (one, two) = (|length| part(4, first, 0, length), |length| part(16, second, 0, length));
        let cut = [part(4, first, 0, 3), part(4, first, 3, 2), part(4, first, 5, 3), two(8)];
        let both = be(&[5, 6]);
        let cases: [(&[ReadSegment], &[u8], &[u8]); 6] = [
            (&[one(8)], &be(&[5]), b"fiveB"),
            (&[one(5)], &be(&[5]), b"fiveB"),
            (&[one(8), two(8)], &both, b"fiveB|sixsix"),
            (&[one(5), two(8)], &both, b"fiveB|sixsix"),
            (&[one(8), two(6)], &both, b"fiveB|sixsix"),
            (&cut, &both, b"fiveB|sixsix"),
        ];
        for (list, args, joined) in cases {
            client.call(20, reads(list), args);
            let bytes = client.answer().bytes;
            assert_eq!(view(&bytes).payload(), reply_bytes(XID, joined), "{scheme:?} {list:?}");
            let (message, _memory) =
                client.peer.expose(&call_bytes(XID, PROGRAM, VERSION, 20, args), Access::REMOTE_READ);
            let mut long = vec![ReadSegment { position: 0, target: message }];
            long.extend(list);
            client.send(XID, Flags::NONE, Body::Nomsg(reads(&long)), &[]);
            let bytes = client.answer().bytes;
            assert_eq!(view(&bytes).payload(), reply_bytes(XID, joined), "{scheme:?} long {list:?}");
        }
        client.call(21, reads(&[one(8)]), &be(&[5]));
        let bytes = client.answer().bytes;
        assert_eq!(view(&bytes).payload(), reply_bytes(XID, b"fiveB\x01\x02\x03"), "{scheme:?}: no count");
        // The count differs from the item's length, padded or not, so the data is ambiguous.
        let garbage = ReplyBody::accepted(AcceptStat::GarbageArgs);
        let at_0 = [ReadSegment { position: ARGS_AT, ..one(8) }];
        let miscounted = [(&[one(8)], 4), (&[one(8)], 9), (&[one(8)], 0), (&[one(5)], 8), (&at_0, 8)];
        for (n, (list, word)) in miscounted.into_iter().enumerate() {
            client.call(20, reads(list), &be(&[word]));
            let bytes = client.answer().bytes;
            let reply = ReplyHeader::parse(view(&bytes).payload()).expect("a reply").0;
            assert_eq!(reply.body, garbage, "{scheme:?}: case {n}");
        }
        client.ping();
    }
}

#[test]
fn refusals_return_write_chunks_unused() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("refused-chunks", scheme);
        let (one, memory) = client.peer.expose(&[0xEE; 600], Access::REMOTE_WRITE);
        let (two, _other) = client.peer.expose(&[0xEE; 8], Access::REMOTE_WRITE);
        let half = |skip: u64| Segment { length: 300, offset: one.offset + skip, ..one };
        let segments = [half(0), half(300), two];
        let writes = WriteList { counts: &[2, 1], segments: &segments };
        // Garbage arguments, an unknown version, an unknown procedure.
        let calls = [
            (call_bytes(XID, PROGRAM, VERSION, LOAD, b""), AcceptStat::GarbageArgs),
            (call_bytes(XID, PROGRAM, 9, LOAD, b""), AcceptStat::ProgMismatch { low: VERSION, high: 5 }),
            (call_bytes(XID, PROGRAM, VERSION, 999, b""), AcceptStat::ProcUnavail),
        ];
        for (call, stat) in calls {
            client.send(XID, Flags::NONE, Body::Msg(Chunks { writes, ..Chunks::NONE }), &call);
            let bytes = client.answer().bytes;
            assert_eq!(view(&bytes).htype(), HeaderType::Msg);
            let (header, _) = ReplyHeader::parse(view(&bytes).payload()).expect("an RPC reply");
            assert_eq!(header.body, ReplyBody::accepted(stat), "{scheme:?}");
            let returned: Vec<Vec<Segment>> = view(&bytes).writes().map(|chunk| chunk.segments().collect()).collect();
            let unused = segments.map(|segment| Segment { length: 0, ..segment });
            assert_eq!(returned, [unused[..2].to_vec(), unused[2..].to_vec()], "{scheme:?} {stat:?}");
        }
        let mut now = [0; 600];
        assert!(memory.read_at(0, &mut now) && now == [0xEE; 600]);
        client.ping();
    }
}

/// Puts an item into the Write chunk with its index, if there is one.
type ToChunk = fn(&mut ServerCall, usize, &[u8]) -> bool;

/// Writes the results: an opaque of each length, in its Write chunk if there is one, else inline. The handlers know
/// nothing of empty chunks; they differ in the function that tells them whether there is a chunk.
fn items(call: &mut ServerCall, lens: [usize; 2], to_chunk: ToChunk) {
    let mut inline = Vec::new();
    for (n, len) in lens.into_iter().enumerate() {
        let item = vec![n as u8 + 1; len];
        inline.extend(be(&[len as u32]));
        if !to_chunk(call, n, &item) {
            inline.extend_from_slice(&item);
            inline.resize(inline.len().next_multiple_of(4), 0);
        }
    }
    call.reply_mut(inline.len()).expect("declared").copy_from_slice(&inline);
}

fn by_capacity(call: &mut ServerCall, n: usize, item: &[u8]) -> bool {
    let has_chunk = call.write_chunk_capacity(n).is_some();
    if has_chunk {
        call.result_writer(n).expect("a chunk").put(item).expect("room");
    }
    has_chunk
}

#[test]
fn an_empty_write_chunk_brings_its_result_inline() {
    let by_writer = |call: &mut ServerCall, n, item: &[u8]| match call.result_writer(n) {
        Ok(mut to) => to.put(item).map(|()| true).expect("room"),
        Err(_) => false,
    };
    let by_own_memory = |call: &mut ServerCall, n, item: &[u8]| {
        let argument = call.take_read_chunk(n).expect("the results are the arguments");
        assert_eq!(&argument[..], item);
        call.set_result(n, argument).is_ok()
    };
    for scheme in SCHEMES {
        let mut world = World::new("empty-write");
        let mut services = standard_services();
        let to_chunk: [ToChunk; 3] = [by_capacity, by_writer, by_own_memory];
        for (n, to_chunk) in to_chunk.into_iter().enumerate() {
            let run = Procedure::new(move |call| {
                items(call, [5, 100], to_chunk);
                Ok(())
            });
            services.add(PROGRAM, VERSION, 20 + n as u32, run.write_chunks(2, 100).read_chunks(2, 100).uncounted());
        }
        // Two that have no inline form of their result.
        let needs_chunk = Procedure::new(|call| Ok(call.result_writer(0)?.put(b"data")?));
        services.add(PROGRAM, VERSION, 23, needs_chunk.write_chunks(1, 100));
        let returns = Procedure::new(|call| {
            let argument = call.take_read_chunk(0).expect("an argument");
            Ok(call.set_result(0, argument)?)
        });
        services.add(PROGRAM, VERSION, 24, returns.write_chunks(1, 100).read_chunks(1, 100).uncounted());
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let (room, memory) = client.peer.expose(&[0xEE; 100], Access::REMOTE_WRITE);
        let (first, _first) = client.peer.expose(&[1; 5], Access::REMOTE_READ);
        let (second, _second) = client.peer.expose(&[2; 100], Access::REMOTE_READ);
        let segments = [room];
        let arguments = [(ARGS_AT, first), (ARGS_AT + 8, second)];
        let arguments = arguments.map(|(position, target)| ReadSegment { position, target });
        // First the second item alone in its chunk, then both inline.
        for (counts, segments) in [(&[0, 1][..], &segments[..]), (&[0, 0], &[])] {
            let mut results = [be(&[5]), vec![1, 1, 1, 1, 1, 0, 0, 0], be(&[100])].concat();
            if segments.is_empty() {
                results.extend([2; 100]);
            }
            for (procedure, reads) in [(20, &[][..]), (21, &[]), (22, &arguments)] {
                let writes = WriteList { counts, segments };
                client.call(procedure, Chunks { reads, writes, ..Chunks::NONE }, b"");
                let bytes = client.answer().bytes;
                let returned: Vec<_> = view(&bytes).writes().map(|chunk| chunk.len() as u32).collect();
                assert_eq!(returned, counts, "{scheme:?}, {procedure}: an empty chunk comes back as it is");
                assert_eq!(view(&bytes).payload(), reply_bytes(XID, &results), "{scheme:?}, {procedure}");
            }
        }
        let mut now = [0; 100];
        assert!(memory.read_at(0, &mut now) && now == [2; 100]);
        for (procedure, reads) in [(23, &[][..]), (24, &arguments[..1])] {
            let writes = WriteList { counts: &[0], segments: &[] };
            client.call(procedure, Chunks { reads, writes, ..Chunks::NONE }, b"");
            let bytes = client.answer().bytes;
            let what = format!("{scheme:?}, {procedure}: {}", view(&bytes));
            let refused = ReplyHeader::parse(view(&bytes).payload()).expect(&what).0.body;
            assert!(matches!(refused, ReplyBody::Accepted { stat: AcceptStat::GarbageArgs, .. }), "{what}");
        }
        client.ping();
    }
}

/// The rules of long replies hold for a result that an empty Write chunk brings inline.
#[test]
fn an_inline_result_of_an_empty_write_chunk_may_be_long() {
    const LEN: usize = 6000;
    for scheme in SCHEMES {
        let mut world = World::new("empty-write-long");
        let mut services = services_for(8192);
        let run = Procedure::new(|call| {
            items(call, [LEN, 4], by_capacity);
            Ok(())
        });
        services.add(PROGRAM, VERSION, 20, run.write_chunks(2, LEN).max_reply(8192));
        let address = world.serve_with(server_of(scheme), services);
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let whole = reply_bytes(XID, &[be(&[LEN as u32]), vec![1; LEN], be(&[4]), vec![2; 4]].concat());
        let (room, memory) = client.peer.expose(&vec![0; whole.len()], Access::REMOTE_WRITE);
        let writes = WriteList { counts: &[0, 0], segments: &[] };
        client.call(20, Chunks { writes, reply: Some(&[room]), ..Chunks::NONE }, b"");
        let bytes = client.answer().bytes;
        assert_eq!(view(&bytes).htype(), HeaderType::Nomsg, "{scheme:?}");
        assert_eq!(view(&bytes).writes().map(|chunk| chunk.len()).collect::<Vec<_>>(), [0, 0]);
        let mut now = vec![0; whole.len()];
        assert!(memory.read_at(0, &mut now) && now == whole, "{scheme:?}");
        // Without a Reply chunk it is continued, which version 1 cannot.
        client.call(20, Chunks { writes, ..Chunks::NONE }, b"");
        if scheme == CreditMode::V1 {
            assert_err_chunk(&mut client, "the reply fits no message");
            continue;
        }
        let (mut payload, mut more) = (Vec::new(), true);
        while more {
            let bytes = client.answer().bytes;
            payload.extend_from_slice(view(&bytes).payload());
            more = view(&bytes).flags().contains(Flags::MORE);
        }
        assert_eq!(payload, whole, "{scheme:?}");
    }
}

/// Authentication flavor.
const GSS: u32 = 6;
const DATA: u32 = 0;

/// A credential (RFC 2203 §5): version 1, procedure, sequence number, service, 4-byte handle.
fn gss(procedure: u32, service: u32) -> Vec<u8> {
    be(&[1, procedure, 7, service, 4, 0xABCD])
}

fn call_of(credential: &[u8], procedure: u32, args: &[u8]) -> Vec<u8> {
    let credential = OpaqueAuth { flavor: GSS, body: credential };
    let verifier = OpaqueAuth::NONE;
    let header = CallHeader { xid: XID, program: PROGRAM, version: VERSION, procedure, credential, verifier };
    let mut bytes = vec![0; header.encoded_len()];
    header.emit(&mut bytes).expect("as long as it says");
    bytes.extend_from_slice(args);
    bytes
}

/// Checks the server's answers to this credential when an argument or a result is reduced.
fn server_takes(client: &mut Client, scheme: CreditMode, credential: &[u8], allowed: bool) {
    let mut data = [0; 64];
    pattern(0, &mut data);
    let (read, _from) = client.peer.expose(&data, Access::REMOTE_READ);
    let (write, _to) = client.peer.expose(&data, Access::REMOTE_WRITE);
    let store = call_of(credential, STORE, &be(&[0]));
    let list = [ReadSegment { position: store.len() as u32, target: read }];
    let load = call_of(credential, LOAD, &be(&[0, 64]));
    let writes = WriteList { counts: &[1], segments: &[write] };
    let cases = [(store, reads(&list)), (load, Chunks { writes, ..Chunks::NONE })];
    for (n, (call, chunks)) in cases.into_iter().enumerate() {
        client.send(XID, Flags::NONE, Body::Msg(chunks), &call);
        match (allowed, scheme) {
            (true, _) => assert_eq!(view(&client.answer().bytes).htype(), HeaderType::Msg),
            (false, CreditMode::V1) => assert_err_chunk(client, "reduced under RPCSEC_GSS"),
            (false, _) if n == 0 => assert_eq!(client.error(), (XID, ErrorBody::ReadChunks { max: 0 })),
            (false, _) => assert!(matches!(client.error(), (XID, ErrorBody::ReplyResource { .. }))),
        }
    }
    // Inline calls succeed with any credential.
    client.send(XID, Flags::NONE, Body::Msg(Chunks::NONE), &call_of(credential, ECHO, b"four"));
    assert_eq!(view(&client.answer().bytes).payload(), reply_bytes(XID, b"four"));
}

/// Whether a client with this credential sends reducible items in chunks; otherwise it refuses the calls.
fn client_reduces(credential: &[u8]) -> bool {
    let world = World::new("gss-client");
    let address = world.address();
    let (tell, told) = channel();
    let server = Server::start(&address, move |peer| {
        while let Some(bytes) = next(peer) {
            let (xid, chunks) = (view(&bytes).xid(), view(&bytes).has_chunks());
            tell.send(chunks).expect("the test listens");
            reply(peer, xid, Chunks::NONE, &reply_bytes(xid, b""), None);
        }
    });
    let credential = Credential::opaque(GSS, credential.to_vec());
    let config = ClientConfig { credential, ..small_client(small()) };
    let mut client = LocalClient::connect(&address, config).expect("a connection");
    let results = [chunked(&mut client, STORE, &[8], &[]), chunked(&mut client, LOAD, &[], &[8])];
    let call = client.prepare(ECHO, 4).expect("a buffer");
    client.call(call).expect("inline it is like any other");
    drop(client);
    server.join();
    let sent: Vec<bool> = told.try_iter().collect();
    if results.iter().all(Result::is_ok) {
        assert_eq!(sent, [true, true, false]);
        return true;
    }
    let refused = Err(Defect::Binding(BindingError::ReductionOff).into());
    assert_eq!(results, [refused.clone(), refused]);
    assert_eq!(sent, [false], "no message of a call that was refused");
    false
}

#[test]
fn gss_integrity_and_privacy_switch_reduction_off() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("gss-services", scheme);
        for (service, allowed) in [(1, true), (2, false), (3, false), (9, false)] {
            server_takes(&mut client, scheme, &gss(DATA, service), allowed);
        }
    }
    assert!(client_reduces(&gss(DATA, 1)));
    assert!(!client_reduces(&gss(DATA, 2)));
    assert!(!client_reduces(&gss(DATA, 3)));
}

#[test]
fn gss_control_messages_are_never_reduced() {
    for scheme in SCHEMES {
        let (_world, _, mut client) = pair("gss-control", scheme);
        for procedure in [1, 2, 3] {
            server_takes(&mut client, scheme, &gss(procedure, 1), false);
        }
    }
    for procedure in [1, 2, 3] {
        assert!(!client_reduces(&gss(procedure, 1)));
    }
}

/// A long call is no reduction, so any credential allows it.
#[test]
fn gss_messages_may_be_long() {
    for scheme in SCHEMES {
        let mut world = World::new("gss-long");
        let address = world.serve_with(server_of(scheme), services_for(8192));
        let mut client = Client::connect(&address, scheme, Revision::Ietf00);
        let call = call_of(&gss(DATA, 3), ECHO, &[5; 6000]);
        let (whole, _call) = client.peer.expose(&call, Access::REMOTE_READ);
        let (room, memory) = client.peer.expose(&[0; 6024], Access::REMOTE_WRITE);
        let list = [ReadSegment { position: 0, target: whole }];
        let chunks = Chunks { reads: &list, reply: Some(&[room]), ..Chunks::NONE };
        client.send(XID, Flags::NONE, Body::Nomsg(chunks), b"");
        assert_eq!(view(&client.answer().bytes).htype(), HeaderType::Nomsg, "{scheme:?}");
        let mut now = [0; 6024];
        assert!(memory.read_at(0, &mut now) && now[..] == reply_bytes(XID, &[5; 6000]));
    }
}
