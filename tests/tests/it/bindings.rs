//! Upper-layer bindings, items in chunks, RPCSEC_GSS (version 2 §4.4; RFC 8166 §3.4, §6, §8.2.2).

use rpcrdma::binding::{Binding, Bindings};
use rpcrdma::proto::binding::BindingError;
use rpcrdma_tests::prelude::*;

fn bound(bindings: &[(u32, Binding)], mode: CreditMode) -> ClientConfig {
    let mut all = Bindings::new();
    for &(procedure, binding) in bindings {
        all.add(PROGRAM, VERSION, procedure, binding);
    }
    ClientConfig { bindings: Some(Arc::new(all)), ..mode.of_client() }
}

/// A call with four bytes of arguments, Read chunks of `sent` bytes and Write chunks of `room` bytes.
fn chunked(client: &mut LocalClient, procedure: u32, sent: &[usize], room: &[usize]) -> Outcome {
    client.run_call(|client| client.chunked(procedure, &[0; 4], sent, room))
}

#[test]
fn a_client_refuses_to_reduce_ineligible_items() {
    for_each(CREDIT_MODES, |mode| {
        let table = [
            (ECHO, Binding::inline(100, 100)),
            (STORE, Binding::inline(100, 100).arguments(1, 500)),
            (LOAD, Binding::inline(100, 100).results(1, 500)),
        ];
        let (world, mut client) = World::pair("binding", mode, bound(&table, mode));
        let too_many = |found, max| BindingError::TooManyArguments { found, max };
        for (procedure, sent, error) in [
            (ECHO, &[8][..], too_many(1, 0)),
            (STORE, &[8, 8], too_many(2, 1)),
            (STORE, &[501], BindingError::ArgumentTooLong { index: 0, len: 501, max: 500 }),
            // The bindings have no reducible item of MIRROR.
            (MIRROR, &[8], BindingError::ReductionOff),
        ] {
            assert_eq!(chunked(&mut client, procedure, sent, &[]), Err(Defect::Binding(error).into()));
        }
        for (procedure, room) in [(ECHO, &[8][..]), (STORE, &[8]), (LOAD, &[8, 8])] {
            let end = chunked(&mut client, procedure, &[], room);
            let Err(CallError::Invalid(call)) = &end else { panic!("{end:?}") };
            assert!(matches!(call.defect(), Defect::Binding(BindingError::TooManyResults { .. })));
        }
        assert_eq!(world.stats().calls, 0, "a refused call was sent");
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
        let mut client = server.client(bound(&[(LOAD, Binding::inline(100, 4).results(1, 504))], mode));
        let error = chunked(&mut client, LOAD, &[], &[504]).expect_err("the item is inline");
        assert!(matches!(error, CallError::MalformedReply(_)), "{error}");
        assert_eq!(chunked(&mut client, LOAD, &[], &[504]), Ok(vec![0; 4]));
        assert_eq!(client.stats().exposed_buffers, 0);
    });
}

/// READ of NFS version 3: program, version and procedure.
const READ: (u32, u32, u32) = (100_003, 3, 6);
/// Bytes of file data in the READ result.
const FILE: usize = 5001;

/// NFS version 3 READ (RFC 1813 §3.3.6) with its binding. The file has [`FILE`] bytes or is absent.
fn nfs() -> Services {
    let procedure = Procedure::new(|call| {
        if call.args().first() != Some(&0) {
            // The failure arm of the union: status, absent attributes.
            return Ok(call.reply_writer().put(&be(&[2, 0]))?);
        }
        put_pattern(call.result_writer(0)?, 1, FILE)?;
        // Status, no attributes, count, end of file, length of the data.
        Ok(call.reply_writer().put(&be(&[0, 0, FILE as u32, 1, FILE as u32]))?)
    });
    let mut services = standard_services();
    // RFC 8267 §4.1: the data; its length stays.
    services.add(READ.0, READ.1, READ.2, procedure.with_binding(Binding::inline(80, 104).results(1, 1 << 20)));
    services
}

#[test]
fn nfs3_read_counts_stay_inline_and_data_goes_to_the_write_chunk() {
    with_raw_of("nfs3", CREDIT_MODES, &nfs(), |client| {
        // The length word stays inline, without the data. The failure arm of the union has no reducible item.
        for (arg, written, results) in [(0, FILE, be(&[0, 0, FILE as u32, 1, FILE as u32])), (1, 0, be(&[2, 0]))] {
            let (room, memory) = client.room(8192);
            let call = call_bytes(XID, READ.0, READ.1, READ.2, &[arg; 20]);
            client.msg(XID, &Lists::new().write([room]), &call);
            let answer = client.answer();
            assert_eq!(answer.payload(), reply_bytes(XID, &results));
            assert!(answer.writes().map(|chunk| chunk.total_length()).eq([written as u64]));
            let now = contents(&memory, 8192);
            assert!(patterned(1, &now[..written]) && filled(UNTOUCHED, &now[written..]));
        }
    });
}

/// The count before an item determines its length. This holds for any maximum of the procedure, any segments of the
/// chunk, and any form of the call.
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
        let (first, _one) = client.expose(b"fiveB\x01\x02\x03", Access::REMOTE_READ);
        let (second, _two) = client.expose(b"sixsix\x04\x05", Access::REMOTE_READ);
        let read = |position, target| ReadSegment { position: ARGS_AT + position, target };
        let (one, two) = (|len| read(4, first.part(0, len)), |len| read(16, second.part(0, len)));
        let cut = [read(4, first.part(0, 3)), read(4, first.part(3, 2)), read(4, first.part(5, 3)), two(8)];
        let cases: [(&[ReadSegment], &[u32], &[u8]); 6] = [
            (&[one(8)], &[5], b"fiveB"),
            (&[one(5)], &[5], b"fiveB"),
            (&[one(8), two(8)], &[5, 6], b"fiveB|sixsix"),
            (&[one(5), two(8)], &[5, 6], b"fiveB|sixsix"),
            (&[one(8), two(6)], &[5, 6], b"fiveB|sixsix"),
            (&cut, &[5, 6], b"fiveB|sixsix"),
        ];
        for_each(cases, |(list, args, joined)| {
            assert_eq!(client.ask(20, reads(list), &be(args)).payload(), reply_bytes(XID, joined));
            let message = call_bytes(XID, PROGRAM, VERSION, 20, &be(args));
            let (target, _memory) = client.expose(&message, Access::REMOTE_READ);
            client.nomsg(XID, reads(&[&[ReadSegment { position: 0, target }], list].concat()));
            assert_eq!(client.answer().payload(), reply_bytes(XID, joined), "long");
        });
        let answer = client.ask(21, reads(&[one(8)]), &be(&[5]));
        assert_eq!(answer.payload(), reply_bytes(XID, b"fiveB\x01\x02\x03"), "no count");
        // The count differs from the item's length, padded or not, so the data is ambiguous.
        let at_0 = ReadSegment { position: ARGS_AT, ..one(8) };
        for_each([(one(8), 4), (one(8), 9), (one(8), 0), (one(5), 8), (at_0, 8)], |(read, word)| {
            let answer = client.ask(20, reads(&[read]), &be(&[word]));
            assert_eq!(answer.reply_body(), ReplyBody::accepted(AcceptStat::GarbageArgs));
        });
    });
}

/// The exact replies of RFC 5531 §9.
#[test]
fn refusals_return_write_chunks_unused() {
    with_raw("refused-chunks", CREDIT_MODES, |client| {
        let ((one, memory), (two, _other)) = (client.room(600), client.room(8));
        let lists = Lists::new().write(one.cut(&[300, 300])).write([two]);
        let mismatch = AcceptStat::ProgMismatch { low: VERSION, high: 5 };
        for (program, version, procedure, stat) in [
            (PROGRAM, VERSION, LOAD, AcceptStat::GarbageArgs),
            (PROGRAM + 1, VERSION, LOAD, AcceptStat::ProgUnavail),
            (PROGRAM, 4, LOAD, mismatch),
            (PROGRAM, 9, LOAD, mismatch),
            (PROGRAM, VERSION, 999, AcceptStat::ProcUnavail),
        ] {
            client.msg(XID, &lists, &call_bytes(XID, program, version, procedure, b""));
            let answer = client.answer();
            let (reply, end) = ReplyHeader::parse(answer.payload()).expect("an RPC reply");
            assert_eq!((answer.htype(), reply.xid, reply.body), (HeaderType::Msg, XID, ReplyBody::accepted(stat)));
            assert_eq!(answer.payload().len(), end, "nothing follows the refusal");
            let unused = |segment: Segment| Segment { length: 0, ..segment };
            let expected = [vec![unused(one), unused(one.part(300, 0))], vec![unused(two)]];
            assert_eq!(answer.write_chunks(), expected, "{stat:?}");
        }
        assert_eq!(contents(&memory, 600), [UNTOUCHED; 600]);
    });
}

/// Puts an item into the Write chunk with its index, if there is one.
type ToChunk = fn(&mut ServerCall, usize, &[u8]) -> bool;

/// Writes the results: an opaque of each length, in its Write chunk if there is one, else inline. The handlers do not
/// know about empty chunks. They differ in the function that reports whether there is a chunk.
fn items(call: &mut ServerCall, lens: [usize; 2], to_chunk: ToChunk) -> Result<(), Refusal> {
    let mut inline = Vec::new();
    for (n, len) in lens.into_iter().enumerate() {
        let item = vec![n as u8 + 1; len];
        inline.extend(be(&[len as u32]));
        if !to_chunk(call, n, &item) {
            inline.extend_from_slice(&item);
            inline.resize(inline.len().next_multiple_of(4), 0);
        }
    }
    Ok(call.reply_writer().put(&inline)?)
}

fn by_capacity(call: &mut ServerCall, n: usize, item: &[u8]) -> bool {
    let has_chunk = call.write_chunk_capacity(n).is_some();
    if has_chunk {
        call.result_writer(n).expect("a chunk").put(item).expect("room");
    }
    has_chunk
}

#[test]
fn a_result_of_an_empty_write_chunk_is_sent_inline() {
    let by_writer =
        |call: &mut ServerCall, n, item: &[u8]| call.result_writer(n).map(|mut to| to.put(item).expect("room")).is_ok();
    let by_own_memory = |call: &mut ServerCall, n, item: &[u8]| {
        let argument = call.take_read_chunk(n).expect("the results are the arguments");
        assert_eq!(&argument[..], item);
        call.set_result(n, argument).is_ok()
    };
    let run = |to_chunk: ToChunk| {
        let run = Procedure::new(move |call| items(call, [5, 100], to_chunk));
        run.write_chunks(2, 100).read_chunks(2, 100).uncounted()
    };
    // These two procedures have no inline form of their result.
    let needs_chunk = Procedure::new(|call| Ok(call.result_writer(0)?.put(b"data")?));
    let returns = Procedure::new(|call| {
        let argument = call.take_read_chunk(0).expect("an argument");
        Ok(call.set_result(0, argument)?)
    });
    let services = standard_and([
        (20, run(by_capacity)),
        (21, run(by_writer)),
        (22, run(by_own_memory)),
        (23, needs_chunk.write_chunks(1, 100)),
        (24, returns.write_chunks(1, 100).read_chunks(1, 100).uncounted()),
    ]);
    with_raw_of("empty-write", CREDIT_MODES, &services, |client| {
        let (room, memory) = client.room(100);
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
                let answer = client.ask(procedure, &lists.write([]).write(segments), b"");
                let returned: Vec<_> = answer.writes().map(|chunk| chunk.len()).collect();
                assert_eq!(returned, counts, "{procedure}: an empty chunk comes back as it is");
                assert_eq!(answer.payload(), reply_bytes(XID, &results), "{procedure}");
            }
        }
        assert_eq!(contents(&memory, 100), [2; 100]);
        for (procedure, lists) in [(23, Lists::new()), (24, argument)] {
            let answer = client.ask(procedure, &lists.write([]), b"");
            assert_eq!(answer.reply_body(), ReplyBody::accepted(AcceptStat::GarbageArgs), "{procedure}: {answer}");
        }
    });
}

/// The rules of long replies hold for a result that an empty Write chunk brings inline.
#[test]
fn an_inline_result_of_an_empty_write_chunk_may_be_long() {
    const LEN: usize = 6000;
    let run = Procedure::new(|call| items(call, [LEN, 4], by_capacity));
    let mut services = services_for(8192);
    services.add(PROGRAM, VERSION, 20, run.write_chunks(2, LEN).max_reply(8192));
    with_raw_of("empty-write-long", CREDIT_MODES, &services, |client| {
        let whole = reply_bytes(XID, &[be(&[LEN as u32]), vec![1; LEN], be(&[4]), vec![2; 4]].concat());
        let (room, memory) = client.room(whole.len());
        let empty = Lists::new().write([]).write([]);
        let answer = client.ask(20, &empty.clone().reply([room]), b"");
        assert_eq!(answer.htype(), HeaderType::Nomsg);
        assert!(answer.writes().map(|chunk| chunk.len()).eq([0, 0]));
        assert_eq!(contents(&memory, whole.len()), whole);
        // Without a Reply chunk it is continued, which version 1 cannot.
        client.call(20, &empty, b"");
        match client.version {
            Version::V1 => client.err_chunk("the reply fits no message"),
            Version::V2 => assert_eq!(client.whole_answer().0, whole),
        }
    });
}

const GSS: u32 = 6;
const DATA: u32 = 0;

/// A credential (RFC 2203 §5): version 1, procedure, sequence number, service, 4-byte handle.
fn gss(procedure: u32, service: u32) -> Vec<u8> {
    be(&[1, procedure, 7, service, 4, 0xABCD])
}

fn call_of(credential: &[u8], procedure: u32, args: &[u8]) -> Vec<u8> {
    call_bytes_as(OpaqueAuth { flavor: GSS, body: credential }, XID, PROGRAM, VERSION, procedure, args)
}

/// Checks the server's answers to this credential when an argument or a result is reduced.
fn server_takes(client: &mut RawPeer, credential: &[u8], allowed: bool) {
    let ((read, _from), (write, _to)) = (client.source(0, 64), client.room(64));
    let store = call_of(credential, STORE, &be(&[0]));
    let reduced = Lists::new().read(store.len() as u32, [read]);
    let load = call_of(credential, LOAD, &be(&[0, 64]));
    for (n, (call, lists)) in [(store, reduced), (load, Lists::new().write([write]))].iter().enumerate() {
        client.msg(XID, lists, call);
        match (allowed, client.version) {
            (true, _) => assert_eq!(client.answer().htype(), HeaderType::Msg),
            (false, Version::V1) => client.err_chunk("reduced under RPCSEC_GSS"),
            (false, _) if n == 0 => assert_eq!(client.error(), (XID, ErrorBody::ReadChunks { max: 0 })),
            (false, _) => assert!(matches!(client.error(), (XID, ErrorBody::ReplyResource { .. }))),
        }
    }
    // Inline calls succeed with any credential.
    client.msg(XID, Chunks::NONE, &call_of(credential, ECHO, b"four"));
    assert_eq!(client.answer().payload(), reply_bytes(XID, b"four"));
}

/// Whether a client with this credential sends reducible items in chunks; otherwise it refuses the calls.
fn client_reduces(credential: &[u8]) -> bool {
    let (server, calls) = RawServer::recording("gss-client", RawListener::accept);
    let credential = Credential::opaque(GSS, credential.to_vec());
    let mut client = server.client(ClientConfig { credential, ..small_client(small()) });
    let results = [chunked(&mut client, STORE, &[8], &[]), chunked(&mut client, LOAD, &[], &[8])];
    inline_call(&mut client).expect("an inline call");
    drop((client, server));
    let sent: Vec<bool> = calls.try_iter().map(|call| call.has_chunks()).collect();
    if results.iter().all(Result::is_ok) {
        assert_eq!(sent, [true, true, false]);
        return true;
    }
    let refused = Err(Defect::Binding(BindingError::ReductionOff).into());
    assert_eq!(results, [refused.clone(), refused]);
    assert_eq!(sent, [false], "a refused call was sent");
    false
}

#[test]
fn gss_integrity_privacy_and_control_messages_disable_reduction() {
    // Procedure, service, and whether items may be reduced.
    let cases = [(DATA, 1, true), (DATA, 2, false), (DATA, 3, false), (1, 1, false), (2, 1, false), (3, 1, false)];
    with_raw("gss-services", CREDIT_MODES, |client| {
        for_each(cases.into_iter().chain([(DATA, 9, false)]), |(procedure, service, allowed)| {
            server_takes(client, &gss(procedure, service), allowed);
        });
    });
    for_each(cases, |(procedure, service, allowed)| {
        assert_eq!(client_reduces(&gss(procedure, service)), allowed);
    });
}

/// A long call is no reduction, so any credential allows it.
#[test]
fn gss_messages_may_be_long() {
    with_raw_of("gss-long", CREDIT_MODES, &services_for(8192), |client| {
        let (whole, _call) = client.expose(&call_of(&gss(DATA, 3), ECHO, &[5; 6000]), Access::REMOTE_READ);
        let (room, memory) = client.room(6024);
        client.nomsg(XID, &Lists::new().read(0, [whole]).reply([room]));
        assert_eq!(client.answer().htype(), HeaderType::Nomsg);
        assert_eq!(contents(&memory, 6024), reply_bytes(XID, &[5; 6000]));
    });
}
