//! Rules of RFC 8166 for both ends of version 1: credits and chunks.

use rpcrdma::wire::xdr::padded;
use rpcrdma_tests::prelude::*;

const CREDITS: u32 = 8;

/// Runs the script of a raw server whose client makes `calls` concurrent calls.
fn with_calls(name: &'static str, calls: u64, script: impl FnOnce(&mut Requester<'_>) + Send + 'static) {
    let server = RawServer::start_in(CreditMode::V1, name, |peer| {
        let mut requester = Requester { peer, unanswered: Vec::new() };
        script(&mut requester);
        // The remaining calls are answered, too.
        requester.answer(requester.unanswered.len(), CREDITS);
        assert_eq!(peer.failures, [], "each reply finds a Receive");
    });
    let mut client = server.client(few_credits(CreditMode::V1, CREDITS));
    client.launch_each(0..calls, |client, _| client.prepare_call(ECHO, &[0; 4]));
    assert!(client.completions(calls as usize).iter().all(|(_, end)| end.is_ok()));
}

/// A server's view of a client that has more calls than credits.
struct Requester<'a> {
    peer: &'a mut RawPeer,
    /// Calls that the server has received and not answered.
    unanswered: Vec<u32>,
}

impl Requester<'_> {
    /// Receives calls until `count` of them are unanswered, and checks that no more arrive.
    #[track_caller]
    fn expect_unanswered(&mut self, count: usize) {
        for call in self.peer.expect_only(count.saturating_sub(self.unanswered.len())) {
            assert_eq!((call.version(), call.htype(), call.credit()), (Version::V1, HeaderType::Msg, CREDITS));
            self.unanswered.push(call.xid());
        }
        assert_eq!(self.unanswered.len(), count);
    }

    /// Answers `calls` calls, the latest first.
    fn answer(&mut self, calls: usize, grant: u32) {
        self.peer.credit = grant;
        for xid in self.unanswered.split_off(self.unanswered.len() - calls).into_iter().rev() {
            self.peer.reply(xid, b"");
        }
    }
}

#[test]
fn the_first_call_of_version_1_is_alone_until_its_reply_grants_credits() {
    with_calls("v1-first", 30, |requester| {
        requester.expect_unanswered(1);
        // Messages that answer no call grant no credits: a reply and an error for an unknown XID.
        let unknown_xid = requester.unanswered[0] ^ 0x8000_0000;
        requester.peer.credit = CREDITS;
        requester.peer.reply(unknown_xid, b"");
        requester.peer.send(&be(&[unknown_xid, 1, CREDITS, 4, 2]));
        requester.expect_unanswered(1);
        requester.answer(1, 5);
        requester.expect_unanswered(5);
    });
}

#[test]
fn a_requester_of_version_1_has_no_more_calls_unanswered_than_were_granted() {
    with_calls("v1-grants", 60, |requester| {
        requester.expect_unanswered(1);
        // Number of calls to answer, credits that their replies grant, and number of unanswered calls afterwards.
        let steps = [
            (1, 3, 3),
            (1, 4, 4),
            // The client has a Receive for each of four replies that arrive together.
            (4, 7, 7),
            // The grant is below the number of unanswered calls: the client sends no call until fewer are unanswered.
            (1, 2, 6),
            (3, 2, 3),
            (2, 2, 2),
            (2, 1, 1),
            // The grant exceeds the request: the request is the limit.
            (1, CREDITS + 1, 8),
            (1, 30_000, 8),
            (1, u32::MAX, 8),
        ];
        for_each(steps, |(calls, grant, unanswered)| {
            requester.answer(calls, grant);
            requester.expect_unanswered(unanswered);
        });
    });
}

/// A client that uses each grant in full immediately finds a Receive for every call, while the server's grants grow.
#[test]
fn a_responder_of_version_1_posts_receives_before_it_grants_credits() {
    let shard = few_credits(CreditMode::V1, 4).with(|c| (c.limits.max_credits, c.memory.receives) = (64, 1024));
    // The server reviews each credit limit once in this interval.
    let review_interval = 8 * shard.poll.control_interval;
    let (_world, address, server) = World::timed("v1-receives", shard);
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    let (mut unanswered, mut granted) = (0, 1);
    let grown = wait_until(|| {
        for _ in 0..500 {
            while unanswered < granted {
                client.call(ECHO, Chunks::NONE, b"four");
                unanswered += 1;
            }
            granted = client.answer().credit();
            assert!((4..=64).contains(&granted), "{granted} granted");
            unanswered -= 1;
        }
        server.pass(review_interval);
        granted >= 16
    });
    assert!(grown, "{granted} credits granted, expected at least 16");
    let stats = server.stats();
    assert_eq!((stats.fabric.receiver_not_ready, stats.peer_faults), (0, 0));
    assert_eq!(client.failures, []);
}

/// Each item goes into its own Write chunk, with its own length, even if it would fit inline. The message does not
/// contain the item.
#[test]
fn results_go_into_their_write_chunks_even_if_short() {
    const ROOM: u32 = 5000;
    with_raw("short-results", CREDIT_MODES, |client| {
        let (room, memory) = client.expose_writable(3 * ROOM as usize);
        let segments = room.cut(&[ROOM; 3]);
        let mut before = contents(&memory, 3 * ROOM as usize);
        for_each([[1, 2, 3], [4, 5, 6], [7, 1, 1], [500, 0, 1], [999, 1000, 1001], [4999, 5000, 1]], |lens| {
            let lists = segments.iter().fold(Lists::new(), |lists, &segment| lists.write([segment]));
            let answer = client.call_and_receive(LOAD, &lists, &be(&[&[9], &lens[..]].concat()));
            assert_eq!(answer.payload(), reply_bytes(XID, &be(&[ROOM; 3])));
            let used = segments.iter().zip(lens).map(|(&segment, length)| Segment { length, ..segment });
            assert_eq!(answer.write_chunks().concat(), used.collect::<Vec<_>>());
            // The server writes nothing beyond the items: neither their padding nor another item.
            let now = contents(&memory, 3 * ROOM as usize);
            for (n, len) in lens.into_iter().enumerate() {
                let (at, len) = (n * ROOM as usize, len as usize);
                assert!(has_pattern(9 + n as u32, &now[at..at + len]), "item {n}");
                before[at..at + len].copy_from_slice(&now[at..at + len]);
            }
            assert!(now == before, "only the items are written");
        });
    });
}

/// The arguments are two items, each after its length, and a last word.
#[test]
fn read_chunks_are_accepted_with_and_without_their_padding() {
    let check = |call: &mut ServerCall| {
        let word = |n: usize| call.args().get(4 * n..4 * n + 4).ok_or(Refusal::GarbageArguments);
        let mut at = 4;
        for n in 0..2 {
            let count = u32::from_be_bytes(word(n)?.try_into().expect("a word")) as usize;
            let data = call.read_chunk(n).ok_or(Refusal::SystemError)?;
            let whole = data.len() == count || data.len() == padded(count);
            if !whole || !has_pattern(n as u32, &data[..count]) || call.read_chunk_at(n) != Some(at) {
                return Err(Refusal::GarbageArguments);
            }
            at += padded(count) + 4;
        }
        let good = call.args().len() == 12 && word(2)? == b"last";
        if good { Ok(()) } else { Err(Refusal::GarbageArguments) }
    };
    // The first procedure accepts much longer items, the second one items of at most 501 bytes.
    let checking = |longest| Procedure::new(check).read_chunks(2, longest);
    let services = standard_and([(20, checking(1 << 20)), (21, checking(501))]);
    with_raw_of("short-arguments", CREDIT_MODES, &services, |client| {
        let lens = [1, 2, 3, 4, 5, 6, 7, 8, 501, 4095].map(|len| (20, len));
        for_each(lens.into_iter().chain([(21, 501)]), |(procedure, len): (u32, u32)| {
            let whole = padded(len as usize) as u32;
            let mut item = |n| {
                let data = [data_of(n, len as usize), vec![0xFF; (whole - len) as usize]].concat();
                client.expose(&data, Access::REMOTE_READ)
            };
            let ((first, _first_memory), (second, _second_memory)) = (item(0), item(1));
            let args = [be(&[len, len]), b"last".to_vec()].concat();
            // The padding may have a segment of its own.
            let (bare, with_padding, split) = ([len], [whole], [len, whole - len]);
            let mut cuts =
                vec![(&bare[..], len), (&with_padding[..], len), (&bare[..], whole), (&with_padding[..], whole)];
            cuts.extend((whole > len).then_some((&split[..], len)));
            for (first_lens, second_len) in cuts {
                let lists = Lists::new().read(ARGS_AT + 4, first.cut(first_lens));
                let lists = lists.read(ARGS_AT + 4 + whole + 4, second.cut(&[second_len]));
                assert_eq!(
                    client.call_and_receive(procedure, &lists, &args).payload(),
                    reply_bytes(XID, b""),
                    "{first_lens:?}, {second_len}"
                );
            }
        });
        // The chunk is one byte longer than an item of 501 bytes with its padding.
        client.call(21, &Lists::new().read(ARGS_AT + 4, [segment(505)]), &be(&[501]));
        client.expect_bad_xdr("an item that is too long");
    });
}

/// ERR_CHUNK reports that the same call would fail in the same way (RFC 8267 §6.4.2), even if a disconnect
/// follows (§6.7.2). The call therefore ends without retransmission.
#[test]
fn err_chunk_ends_its_call_without_retransmission() {
    type Form = fn(&mut LocalClient) -> ClientCall;
    let forms: [(&str, Form); 4] = [
        ("a Read chunk", |client| client.prepare_chunked_call(MIRROR, &[0; 4], &[100], &[])),
        ("a Write chunk", |client| client.prepare_call(MIRROR, &[0; 4]).write_chunk(100)),
        ("a Reply chunk", |client| client.prepare_call(MIRROR, &[0; 4]).expect_reply(10_000)),
        ("a long call", |client| client.prepare_call(MIRROR, &[0; 5000])),
    ];
    for_each(pairs(forms, [false, true]), |((_, form), disconnects)| {
        let server = RawServer::listen("err-chunk-ends", move |mut listener| {
            let mut peer = listener.accept_in(CreditMode::V1);
            let refused = peer.next_call().xid();
            peer.send(&be(&[refused, 1, CREDITS, 4, 2]));
            if disconnects {
                drop(peer);
                peer = listener.accept_in(CreditMode::V1);
            }
            while let Some(call) = peer.next_message() {
                assert_ne!(call.xid(), refused, "a refused call is not retransmitted");
                peer.reply(call.xid(), b"fine");
            }
        });
        let config = CreditMode::V1.into_client_config();
        let mut client =
            server.client(config.with(|c| (c.connect.reconnect_attempts, c.connect.retransmit) = (5, true)));
        let call = form(&mut client);
        assert_matches!(client.outcome(call), Err(CallError::Transport(_)));
        assert_eq!(client.stats().exposed_buffers, 0);
        assert_answered(&mut client, 1);
        assert!(disconnects || client.stats().calls_retransmitted == 0);
    });
}
