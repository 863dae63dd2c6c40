//! Upper-layer bindings, items in chunks, RPCSEC_GSS (version 2 §4.4; RFC 8166 §3.4, §6, §8.2.2).

use rpcrdma::binding::{Binding, Bindings};
use rpcrdma::proto::binding::BindingError;
use rpcrdma_tests::prelude::*;

fn client_with_bindings(bindings: &[(u32, Binding)], mode: CreditMode) -> ClientConfig {
    let mut all = Bindings::new();
    for &(procedure, binding) in bindings {
        all.add(PROGRAM, VERSION, procedure, binding);
    }
    ClientConfig { bindings: Some(Arc::new(all)), ..mode.into_client_config() }
}

/// A call with four bytes of arguments, Read chunks of `sent` bytes and Write chunks of `room` bytes.
fn call_with_chunks(client: &mut LocalClient, procedure: u32, sent: &[usize], room: &[usize]) -> Outcome {
    client.run_call(|client| client.prepare_chunked_call(procedure, &[0; 4], sent, room))
}

#[test]
fn a_client_refuses_to_reduce_ineligible_items() {
    for_each(CREDIT_MODES, |mode| {
        let table = [
            (ECHO, Binding::inline(100, 100)),
            (STORE, Binding::inline(100, 100).arguments(1, 500)),
            (LOAD, Binding::inline(100, 100).results(1, 500)),
        ];
        let (world, mut client) = World::pair("binding", mode, client_with_bindings(&table, mode));
        let too_many = |found, max| BindingError::TooManyArguments { found, max };
        for (procedure, sent, error) in [
            (ECHO, &[8][..], too_many(1, 0)),
            (STORE, &[8, 8], too_many(2, 1)),
            (STORE, &[501], BindingError::ArgumentTooLong { index: 0, len: 501, max: 500 }),
            // The bindings have no reducible item of MIRROR.
            (MIRROR, &[8], BindingError::ReductionOff),
        ] {
            assert_eq!(call_with_chunks(&mut client, procedure, sent, &[]), Err(Defect::Binding(error).into()));
        }
        for (procedure, room) in [(ECHO, &[8][..]), (STORE, &[8]), (LOAD, &[8, 8])] {
            let end = call_with_chunks(&mut client, procedure, &[], room);
            let Err(CallError::Invalid(call)) = &end else { panic!("{end:?}") };
            assert!(matches!(call.defect(), Defect::Binding(BindingError::TooManyResults { .. })));
        }
        assert_eq!(world.stats().calls, 0, "no refused call is sent");
        echo(&mut client, b"four").expect("an echo");
        store(&mut client, 1, &[500]).expect("an eligible item");
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}

#[test]
fn a_reduced_result_sent_inline_ends_the_call() {
    for_each(CREDIT_MODES, |mode| {
        let server = RawServer::start_in(mode, "missed", move |peer| {
            for (inline, length) in [(4 + 504, 0), (4, 504)] {
                let call = peer.next_call();
                let room = call.write_chunks()[0][0];
                peer.write(&[1; 504], remote(room));
                let used = Lists::new().write([Segment { length, ..room }]);
                peer.reply_with(call.xid(), &used, &reply_bytes(call.xid(), &vec![0; inline]), None);
            }
        });
        let mut client = server.client(client_with_bindings(&[(LOAD, Binding::inline(100, 4).results(1, 504))], mode));
        let error = call_with_chunks(&mut client, LOAD, &[], &[504]).expect_err("the item is inline");
        assert!(matches!(error, CallError::MalformedReply(_)), "{error}");
        assert_eq!(call_with_chunks(&mut client, LOAD, &[], &[504]), Ok(vec![0; 4]));
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}

/// READ of NFS version 3: program, version and procedure.
const READ: (u32, u32, u32) = (100_003, 3, 6);
/// Bytes of file data in the READ result.
const FILE: usize = 5001;

/// NFS version 3 READ (RFC 1813 §3.3.6) with its binding. The file has [`FILE`] bytes or is absent.
fn nfs_services() -> Services {
    let procedure = Procedure::new(|call| {
        if call.args().first() != Some(&0) {
            // The failure arm of the union has the status and no attributes.
            return Ok(call.reply_writer().put(&be(&[2, 0]))?);
        }
        put_pattern(call.result_writer(0)?, 1, FILE)?;
        // Status, no attributes, count, end of file, length of the data.
        Ok(call.reply_writer().put(&be(&[0, 0, FILE as u32, 1, FILE as u32]))?)
    });
    let mut services = standard_services();
    // The data is the only reducible item, and its length stays inline (RFC 8267 §4.1).
    services.add(READ.0, READ.1, READ.2, procedure.with_binding(Binding::inline(80, 104).results(1, 1 << 20)));
    services
}

#[test]
fn nfs3_read_counts_stay_inline_and_data_goes_to_the_write_chunk() {
    with_raw_of("nfs3", CREDIT_MODES, &nfs_services(), |client| {
        // The length word stays inline, without the data. The failure arm of the union has no reducible item.
        for (arg, written, results) in [(0, FILE, be(&[0, 0, FILE as u32, 1, FILE as u32])), (1, 0, be(&[2, 0]))] {
            let (room, memory) = client.expose_writable(8192);
            let call = call_bytes(XID, READ.0, READ.1, READ.2, &[arg; 20]);
            client.send_msg(XID, &Lists::new().write([room]), &call);
            let answer = client.answer();
            assert_eq!(answer.payload(), reply_bytes(XID, &results));
            assert!(answer.writes().map(|chunk| chunk.total_length()).eq([written as u64]));
            let chunk = contents(&memory, 8192);
            assert!(has_pattern(1, &chunk[..written]) && is_filled_with(UNTOUCHED, &chunk[written..]));
        }
    });
}

/// The count before an item determines the item's length. This holds for any maximum of the procedure, any segments of
/// the chunk, and any form of the call.
#[test]
fn read_chunk_padding_is_removed_by_the_preceding_count() {
    let join = |call: &mut ServerCall| {
        let parts: Vec<_> = (0..call.read_chunks()).filter_map(|n| call.read_chunk(n)).collect();
        let joined = parts.join(&b'|');
        Ok(call.reply_writer().put(&joined)?)
    };
    let procedure = || Procedure::new(join).read_chunks(2, 1 << 20);
    let services = standard_and([(20, procedure()), (21, procedure().uncounted())]);
    with_raw_of("without-padding", CREDIT_MODES, &services, |client| {
        let (first, _first) = client.expose(b"fiveB\x01\x02\x03", Access::REMOTE_READ);
        let (second, _second) = client.expose(b"sixsix\x04\x05", Access::REMOTE_READ);
        let read = |position, target| ReadSegment { position: ARGS_AT + position, target };
        let (first_read, second_read) = (|len| read(4, first.part(0, len)), |len| read(16, second.part(0, len)));
        let in_segments =
            [read(4, first.part(0, 3)), read(4, first.part(3, 2)), read(4, first.part(5, 3)), second_read(8)];
        let cases: [(&[ReadSegment], &[u32], &[u8]); 6] = [
            (&[first_read(8)], &[5], b"fiveB"),
            (&[first_read(5)], &[5], b"fiveB"),
            (&[first_read(8), second_read(8)], &[5, 6], b"fiveB|sixsix"),
            (&[first_read(5), second_read(8)], &[5, 6], b"fiveB|sixsix"),
            (&[first_read(8), second_read(6)], &[5, 6], b"fiveB|sixsix"),
            (&in_segments, &[5, 6], b"fiveB|sixsix"),
        ];
        for_each(cases, |(list, counts, joined)| {
            assert_eq!(client.call_and_receive(20, reads(list), &be(counts)).payload(), reply_bytes(XID, joined));
            let message = call_bytes(XID, PROGRAM, VERSION, 20, &be(counts));
            let (target, _memory) = client.expose(&message, Access::REMOTE_READ);
            client.send_nomsg(XID, reads(&[&[ReadSegment { position: 0, target }], list].concat()));
            assert_eq!(client.answer().payload(), reply_bytes(XID, joined), "long");
        });
        let answer = client.call_and_receive(21, reads(&[first_read(8)]), &be(&[5]));
        assert_eq!(answer.payload(), reply_bytes(XID, b"fiveB\x01\x02\x03"), "an uncounted item keeps its padding");
        // The count differs from the item's length, padded or not, so the data is ambiguous.
        let at_0 = ReadSegment { position: ARGS_AT, ..first_read(8) };
        for_each(
            [(first_read(8), 4), (first_read(8), 9), (first_read(8), 0), (first_read(5), 8), (at_0, 8)],
            |(read, count)| {
                let answer = client.call_and_receive(20, reads(&[read]), &be(&[count]));
                assert_eq!(answer.reply_body(), ReplyBody::accepted(AcceptStat::GarbageArgs));
            },
        );
    });
}

/// The exact replies of RFC 5531 §9.
#[test]
fn refusals_return_write_chunks_unused() {
    with_raw("refused-chunks", CREDIT_MODES, |client| {
        let ((first, memory), (second, _second)) = (client.expose_writable(600), client.expose_writable(8));
        let lists = Lists::new().write(first.cut(&[300, 300])).write([second]);
        let mismatch = AcceptStat::ProgMismatch { low: VERSION, high: 5 };
        for (program, version, procedure, stat) in [
            (PROGRAM, VERSION, LOAD, AcceptStat::GarbageArgs),
            (PROGRAM + 1, VERSION, LOAD, AcceptStat::ProgUnavail),
            (PROGRAM, 4, LOAD, mismatch),
            (PROGRAM, 9, LOAD, mismatch),
            (PROGRAM, VERSION, 999, AcceptStat::ProcUnavail),
        ] {
            client.send_msg(XID, &lists, &call_bytes(XID, program, version, procedure, b""));
            let answer = client.answer();
            let (reply, end) = ReplyHeader::parse(answer.payload()).expect("an RPC reply");
            assert_eq!((answer.htype(), reply.xid, reply.body), (HeaderType::Msg, XID, ReplyBody::accepted(stat)));
            assert_eq!(answer.payload().len(), end, "nothing follows the refusal");
            let unused = |segment: Segment| Segment { length: 0, ..segment };
            let expected = [vec![unused(first), unused(first.part(300, 0))], vec![unused(second)]];
            assert_eq!(answer.write_chunks(), expected, "{stat:?}");
        }
        assert_eq!(contents(&memory, 600), [UNTOUCHED; 600]);
    });
}

/// Puts an item into the Write chunk of this index. Returns whether there is such a chunk.
type PutItem = fn(&mut ServerCall, usize, &[u8]) -> bool;

/// Writes an opaque item of each length, in its Write chunk if there is one, else inline. Handlers treat an empty Write
/// chunk as absent, and differ only in `put_item`.
fn write_items(call: &mut ServerCall, lens: [usize; 2], put_item: PutItem) -> Result<(), Refusal> {
    let mut inline = Vec::new();
    for (n, len) in lens.into_iter().enumerate() {
        let item = vec![n as u8 + 1; len];
        inline.extend(be(&[len as u32]));
        if !put_item(call, n, &item) {
            inline.extend_from_slice(&item);
            inline.resize(inline.len().next_multiple_of(4), 0);
        }
    }
    Ok(call.reply_writer().put(&inline)?)
}

fn put_by_capacity(call: &mut ServerCall, n: usize, item: &[u8]) -> bool {
    let has_chunk = call.write_chunk_capacity(n).is_some();
    if has_chunk {
        call.result_writer(n).expect("a chunk").put(item).expect("room");
    }
    has_chunk
}

#[test]
fn a_result_of_an_empty_write_chunk_is_sent_inline() {
    let put_by_writer =
        |call: &mut ServerCall, n, item: &[u8]| call.result_writer(n).map(|mut to| to.put(item).expect("room")).is_ok();
    let put_own_memory = |call: &mut ServerCall, n, item: &[u8]| {
        let argument = call.take_read_chunk(n).expect("the results are the arguments");
        assert_eq!(&argument[..], item);
        call.set_result(n, argument).is_ok()
    };
    let procedure = |put_item: PutItem| {
        let procedure = Procedure::new(move |call| write_items(call, [5, 100], put_item));
        procedure.write_chunks(2, 100).read_chunks(2, 100).uncounted()
    };
    // These two procedures have no inline form of their result.
    let needs_chunk = Procedure::new(|call| Ok(call.result_writer(0)?.put(b"data")?));
    let returns_argument = Procedure::new(|call| {
        let argument = call.take_read_chunk(0).expect("an argument");
        Ok(call.set_result(0, argument)?)
    });
    let services = standard_and([
        (20, procedure(put_by_capacity)),
        (21, procedure(put_by_writer)),
        (22, procedure(put_own_memory)),
        (23, needs_chunk.write_chunks(1, 100)),
        (24, returns_argument.write_chunks(1, 100).read_chunks(1, 100).uncounted()),
    ]);
    with_raw_of("empty-write", CREDIT_MODES, &services, |client| {
        let (room, memory) = client.expose_writable(100);
        let (first, _first) = client.expose(&[1; 5], Access::REMOTE_READ);
        let (second, _second) = client.expose(&[2; 100], Access::REMOTE_READ);
        let argument = Lists::new().read(ARGS_AT, [first]);
        let arguments = argument.clone().read(ARGS_AT + 8, [second]);
        // At first only the second item has a chunk; then both items are inline.
        let inline = [be(&[5]), vec![1, 1, 1, 1, 1, 0, 0, 0], be(&[100])].concat();
        for (counts, segments, results) in
            [([0, 1], &[room][..], inline.clone()), ([0, 0], &[], [&inline[..], &[2; 100]].concat())]
        {
            for (procedure, lists) in [(20, Lists::new()), (21, Lists::new()), (22, arguments.clone())] {
                let answer = client.call_and_receive(procedure, &lists.write([]).write(segments), b"");
                let returned: Vec<_> = answer.writes().map(|chunk| chunk.len()).collect();
                assert_eq!(returned, counts, "{procedure}: an empty chunk is returned empty");
                assert_eq!(answer.payload(), reply_bytes(XID, &results), "{procedure}");
            }
        }
        assert_eq!(contents(&memory, 100), [2; 100]);
        for (procedure, lists) in [(23, Lists::new()), (24, argument)] {
            let answer = client.call_and_receive(procedure, &lists.write([]), b"");
            assert_eq!(answer.reply_body(), ReplyBody::accepted(AcceptStat::GarbageArgs), "{procedure}: {answer}");
        }
    });
}

/// If an empty Write chunk makes a result inline, the rules of long replies apply to it.
#[test]
fn an_inline_result_of_an_empty_write_chunk_may_be_long() {
    const LEN: usize = 6000;
    let two_items = Procedure::new(|call| write_items(call, [LEN, 4], put_by_capacity));
    let mut services = services_for(8192);
    services.add(PROGRAM, VERSION, 20, two_items.write_chunks(2, LEN).max_reply(8192));
    with_raw_of("empty-write-long", CREDIT_MODES, &services, |client| {
        let message = reply_bytes(XID, &[be(&[LEN as u32]), vec![1; LEN], be(&[4]), vec![2; 4]].concat());
        let (room, memory) = client.expose_writable(message.len());
        let empty = Lists::new().write([]).write([]);
        let answer = client.call_and_receive(20, &empty.clone().reply([room]), b"");
        assert_eq!(answer.htype(), HeaderType::Nomsg);
        assert!(answer.writes().map(|chunk| chunk.len()).eq([0, 0]));
        assert_eq!(contents(&memory, message.len()), message);
        // Without a Reply chunk the reply is continued. Version 1 has no continued messages.
        client.call(20, &empty, b"");
        match client.version {
            Version::V1 => client.expect_err_chunk("the reply fits no message"),
            Version::V2 => assert_eq!(client.whole_answer().0, message),
        }
    });
}

/// The flavor RPCSEC_GSS, and the procedure of its data messages.
const GSS: u32 = 6;
const DATA: u32 = 0;

/// A credential (RFC 2203 §5): version 1, procedure, sequence number, service, 4-byte handle.
fn gss_credential(procedure: u32, service: u32) -> Vec<u8> {
    be(&[1, procedure, 7, service, 4, 0xABCD])
}

fn gss_call(credential: &[u8], procedure: u32, args: &[u8]) -> Vec<u8> {
    call_bytes_as(OpaqueAuth { flavor: GSS, body: credential }, XID, PROGRAM, VERSION, procedure, args)
}

/// Checks that the server accepts a reduced argument and a reduced result under this credential, or refuses them.
fn assert_server_reduces(client: &mut RawPeer, credential: &[u8], allowed: bool) {
    let ((read, _from), (write, _to)) = (client.expose_readable(0, 64), client.expose_writable(64));
    let store = gss_call(credential, STORE, &be(&[0]));
    let reduced = Lists::new().read(store.len() as u32, [read]);
    let load = gss_call(credential, LOAD, &be(&[0, 64]));
    for (n, (call, lists)) in [(store, reduced), (load, Lists::new().write([write]))].iter().enumerate() {
        client.send_msg(XID, lists, call);
        match (allowed, client.version) {
            (true, _) => assert_eq!(client.answer().htype(), HeaderType::Msg),
            (false, Version::V1) => client.expect_err_chunk("reduced under RPCSEC_GSS"),
            (false, _) if n == 0 => assert_eq!(client.error(), (XID, ErrorBody::ReadChunks { max: 0 })),
            (false, _) => assert!(matches!(client.error(), (XID, ErrorBody::ReplyResource { .. }))),
        }
    }
    // Inline calls succeed with any credential.
    client.send_msg(XID, Chunks::NONE, &gss_call(credential, ECHO, b"four"));
    assert_eq!(client.answer().payload(), reply_bytes(XID, b"four"));
}

/// Whether a client with this credential sends reducible items in chunks; otherwise it refuses the calls.
fn client_reduces(credential: &[u8]) -> bool {
    let (server, calls) = RawServer::recording("gss-client", RawListener::accept);
    let credential = Credential::opaque(GSS, credential.to_vec());
    let mut client = server.client(ClientConfig { credential, ..small_client(small_config()) });
    let results = [call_with_chunks(&mut client, STORE, &[8], &[]), call_with_chunks(&mut client, LOAD, &[], &[8])];
    inline_call(&mut client).expect("an inline call");
    drop((client, server));
    let sent: Vec<bool> = calls.try_iter().map(|call| call.has_chunks()).collect();
    if results.iter().all(Result::is_ok) {
        assert_eq!(sent, [true, true, false]);
        return true;
    }
    let refused = Err(Defect::Binding(BindingError::ReductionOff).into());
    assert_eq!(results, [refused.clone(), refused]);
    assert_eq!(sent, [false], "only the inline call is sent");
    false
}

#[test]
fn gss_integrity_privacy_and_control_messages_disable_reduction() {
    // Procedure, service, and whether items may be reduced.
    let cases = [(DATA, 1, true), (DATA, 2, false), (DATA, 3, false), (1, 1, false), (2, 1, false), (3, 1, false)];
    with_raw("gss-services", CREDIT_MODES, |client| {
        for_each(cases.into_iter().chain([(DATA, 9, false)]), |(procedure, service, allowed)| {
            assert_server_reduces(client, &gss_credential(procedure, service), allowed);
        });
    });
    for_each(cases, |(procedure, service, allowed)| {
        assert_eq!(client_reduces(&gss_credential(procedure, service)), allowed);
    });
}

/// A long call reduces no item, so any credential allows it.
#[test]
fn gss_messages_may_be_long() {
    with_raw_of("gss-long", CREDIT_MODES, &services_for(8192), |client| {
        let (whole, _call) = client.expose(&gss_call(&gss_credential(DATA, 3), ECHO, &[5; 6000]), Access::REMOTE_READ);
        let (room, memory) = client.expose_writable(6024);
        client.send_nomsg(XID, &Lists::new().read(0, [whole]).reply([room]));
        assert_eq!(client.answer().htype(), HeaderType::Nomsg);
        assert_eq!(contents(&memory, 6024), reply_bytes(XID, &[5; 6000]));
    });
}
