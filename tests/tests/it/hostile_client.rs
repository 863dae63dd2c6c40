//! Clients that break rules, beside a witness that must be served.

use rpcrdma_tests::prelude::*;

/// Reaction of a server to a message.
#[derive(Debug)]
enum Reaction {
    /// A transport error under the message's XID.
    Error(ErrorBody),
    /// No answer.
    Silence,
    /// A disconnect.
    End,
}

#[test]
fn malformed_messages_get_the_errors_of_the_protocol() {
    use ErrorBody::{BadXdr, InvalFlag, InvalHtype, ReadChunks, Segments, WriteChunks};
    use Reaction::{End, Error, Silence};
    const GOOD: Segment = Segment { handle: 1, length: 64, offset: 0 };
    const SEGMENTS: Reaction = Error(Segments { max: 16 });
    const MAX: u32 = u32::MAX;
    const fn segment_with(length: u32, offset: u64) -> Segment {
        Segment { length, offset, ..GOOD }
    }
    fn echo_call(xid: u32) -> Vec<u8> {
        call_bytes(xid, PROGRAM, VERSION, ECHO, b"")
    }
    fn message(peer: &RawPeer, flags: Flags, body: Body<'_>) -> Vec<u8> {
        peer.message(XID, flags, body, b"")
    }
    fn nomsg(peer: &RawPeer, flags: Flags, lists: &Lists) -> Vec<u8> {
        message(peer, flags, Body::Nomsg(lists.chunks()))
    }
    fn msg(peer: &RawPeer, flags: Flags, lists: &Lists, payload: &[u8]) -> Vec<u8> {
        peer.message(XID, flags, Body::Msg(lists.chunks()), payload)
    }
    fn inline(peer: &RawPeer, payload: &[u8]) -> Vec<u8> {
        msg(peer, Flags::NONE, &Lists::new(), payload)
    }
    fn call(peer: &RawPeer, procedure: u32, lists: &Lists) -> Vec<u8> {
        msg(peer, Flags::NONE, lists, &call_bytes(XID, PROGRAM, VERSION, procedure, &[0; 4]))
    }
    /// A call with these segments, each with its position.
    fn reads(peer: &RawPeer, list: &[(u32, Segment)]) -> Vec<u8> {
        call(peer, STORE, &list.iter().fold(Lists::new(), |lists, &(at, target)| lists.read(at, [target])))
    }
    /// A call with Write chunks of these numbers of segments.
    fn writes(peer: &RawPeer, counts: &[usize]) -> Vec<u8> {
        call(peer, LOAD, &counts.iter().fold(Lists::new(), |lists, &count| lists.write(vec![GOOD; count])))
    }
    /// A header of version 2. After the XID follow: version, credit, type, flags, count, handle to invalidate, and
    /// lists.
    fn raw(words: &[u32]) -> Vec<u8> {
        be(&[&[XID], words].concat())
    }
    type Make = fn(&RawPeer) -> Vec<u8>;
    let cases: [(&str, Reaction, Make); 44] = [
        ("one byte", Silence, |_| vec![1]),
        ("15 bytes", Silence, |_| vec![0; 15]),
        ("cut off after the common words", Error(BadXdr), |_| raw(&[2, 9, 0])),
        ("cut off after the flags", Error(BadXdr), |_| raw(&[2, 9, 0, 4])),
        ("cut off in the lists", Error(BadXdr), |_| raw(&[2, 9, 0, 4, 0, 0, 1, 4, 5])),
        ("a boolean of 2", Error(BadXdr), |_| raw(&[2, 9, 0, 4, 0, 0, 2, 0, 0])),
        ("an unknown type", Error(InvalHtype), |_| raw(&[2, 9, 77, 4, 0, 0, 0, 0, 0])),
        ("a type of version 1", Error(InvalHtype), |_| raw(&[2, 9, 2, 4, 0, 0, 0, 0, 0])),
        ("an unknown flag", Error(InvalFlag), |_| raw(&[2, 9, 0, 0x8004, 0, 0, 0, 0, 0])),
        ("a segment count beyond the message", Error(BadXdr), |_| raw(&[2, 9, 0, 4, 0, 0, 0, 1, MAX, 0, 0])),
        ("chunks before the last part", Error(InvalFlag), |p| {
            msg(p, Flags::MORE, &Lists::new().read(44, [GOOD]), &echo_call(XID))
        }),
        ("no count of received messages", End, |_| [raw(&[2, 9, 0, 0, 0, 0, 0, 0]), echo_call(XID)].concat()),
        ("an acknowledgement of messages that were not sent", End, |_| {
            [raw(&[2, 9, 0, 4, 99, 0, 0, 0, 0]), echo_call(XID)].concat()
        }),
        ("a reply", Silence, |p| msg(p, Flags::RESPONSE, &Lists::new(), &reply_bytes(XID, b""))),
        ("an error", Silence, |p| message(p, Flags::RESPONSE, Body::Error(ErrorBody::System))),
        ("an RPC reply as a call", Silence, |p| inline(p, &reply_bytes(XID, b""))),
        ("half an RPC message", Silence, |p| inline(p, &echo_call(XID)[..6])),
        ("different XIDs in the two headers", Error(BadXdr), |p| inline(p, &echo_call(XID + 1))),
        ("a call in a chunk that is not exposed", End, |p| nomsg(p, Flags::NONE, &Lists::new().read(0, [GOOD]))),
        ("a position that is not a multiple of 4", Error(BadXdr), |p| reads(p, &[(42, GOOD)])),
        ("a position in the RPC header", Error(BadXdr), |p| reads(p, &[(8, GOOD)])),
        ("a position beyond the message", Error(BadXdr), |p| reads(p, &[(400, GOOD)])),
        ("descending positions", Error(BadXdr), |p| reads(p, &[(44, GOOD), (40, GOOD)])),
        ("chunks that overlap", Error(BadXdr), |p| reads(p, &[(40, GOOD), (44, GOOD)])),
        ("an empty segment", Error(BadXdr), |p| reads(p, &[(44, segment_with(0, 0))])),
        ("a segment of 4 GiB", Error(BadXdr), |p| reads(p, &[(44, segment_with(MAX, 0))])),
        ("two segments of 4 GiB in all", Error(BadXdr), |p| reads(p, &[(44, segment_with(1 << 31, 0)); 2])),
        ("five Read chunks", Error(ReadChunks { max: 4 }), |p| reads(p, &[0, 1, 2, 3, 4].map(|n| (44 + 64 * n, GOOD)))),
        ("17 segments", SEGMENTS, |p| reads(p, &[(44, GOOD); 17])),
        ("five Write chunks", Error(WriteChunks { max: 4 }), |p| writes(p, &[1; 5])),
        ("a Write chunk of 17 segments", SEGMENTS, |p| writes(p, &[17])),
        ("100 empty Write chunks", Error(WriteChunks { max: 4 }), |p| writes(p, &[0; 100])),
        ("a Reply chunk of 17 segments", SEGMENTS, |p| call(p, ECHO, &Lists::new().reply([GOOD; 17]))),
        ("20 segments of 4 GiB", SEGMENTS, |p| reads(p, &[(44, segment_with(MAX, u64::MAX)); 20])),
        ("a list without its end", Error(BadXdr), |_| [raw(&[2, 9, 0, 4, 0, 0]), [0, 0, 0, 1].repeat(900)].concat()),
        ("a NOMSG without chunks", Error(BadXdr), |p| nomsg(p, Flags::NONE, &Lists::new())),
        ("a NOMSG with the flag MORE", Error(InvalFlag), |p| nomsg(p, Flags::MORE, &Lists::new())),
        ("an operation that was not offered", Error(InvalHtype), |p| {
            message(p, Flags::NONE, Body::Optional { opttype: 2, optinfo: b"" })
        }),
        ("properties beyond the message", Error(BadXdr), |_| raw(&[2, 9, 5, 4, 0, 7, MAX, 1, 2])),
        ("a property that is longer than the message", Error(BadXdr), |_| raw(&[2, 9, 5, 4, 0, 1, 2, 4000, 4096])),
        ("an error without the flag RESPONSE", Silence, |p| message(p, Flags::NONE, Body::Error(BadXdr))),
        ("another version", End, |_| [raw(&[3, 9, 0, 0, 0, 0]), echo_call(XID)].concat()),
        ("version 1", End, |_| [raw(&[1, 9, 0, 0, 0, 0]), echo_call(XID)].concat()),
        ("a Read of memory that is not exposed", End, |p| reads(p, &[(44, GOOD)])),
    ];
    let (world, address, mut witness) = World::witnessed("malformed", CreditMode::V2Windowed);
    for_each(cases, |(_, reaction, make)| {
        let mut peer = RawPeer::connect(&address);
        peer.ping();
        let faults = world.stats().peer_faults;
        peer.send(&make(&peer));
        match reaction {
            Error(expected) => assert_eq!(peer.error(), (XID, expected)),
            Silence => {}
            End => {
                peer.wait_until_over();
                assert!(wait_until(|| world.stats().peer_faults == faults + 1), "the fault is counted");
            }
        }
        // Messages arrive in order, so an unexpected answer would precede this reply.
        if !matches!(reaction, End) {
            peer.ping();
        }
        peer.vanish();
        assert_served(&mut witness);
    });
    let (messages, faults) = (world.stats().messages, world.stats().peer_faults);
    assert_eq!(faults, 6);
    // Calls that exceed the procedure's declaration count as failed calls, other malformed messages as rejected
    // messages.
    assert_eq!((messages.rejected_short, messages.rejected_unknown_xid, messages.rejected_unexpected), (2, 3, 0));
    assert!(messages.rejected_answered >= 20, "{messages:?}");
}

#[test]
fn random_messages_affect_no_other_client() {
    for_each(CREDIT_MODES, |mode| {
        let (world, address, mut witness) = World::witnessed("random", mode);
        let mut random = Random::new(mode as u64 + 7);
        for _ in 0..40 {
            let mut peer = RawPeer::connect_in(&address, mode);
            for _ in 0..20 {
                // A valid message with up to three changed bytes, which may also be truncated.
                let call = call_bytes(9, PROGRAM, VERSION, 1 + random.below(6) as u32, &[0; 40]);
                let target = Segment { handle: random.draw() as u32, ..segment(random.below(9000) as u32) };
                let lists = match random.below(4) {
                    0 => Lists::new().read(44, [target]),
                    1 => Lists::new().write([target]),
                    2 => Lists::new().read(44, [target]).write([target]).reply([]).offer(5),
                    _ => Lists::new(),
                };
                let mut bytes = peer.message(9, Flags::NONE, Body::Msg(lists.chunks()), &call);
                for _ in 0..random.below(4) {
                    let at = random.below(bytes.len());
                    bytes[at] = random.draw() as u8;
                }
                if random.once_in(4) {
                    bytes.truncate(1 + random.below(bytes.len()));
                }
                peer.send_invalidating(&bytes, random.once_in(20).then(|| random.draw() as u32));
                peer.turn();
                if peer.is_over() {
                    break;
                }
            }
            if random.once_in(2) { peer.vanish() } else { peer.disconnect() }
        }
        assert_served(&mut witness);
        drop(witness);
        world.assert_server_clean();
    });
}

#[test]
fn a_client_that_ignores_its_credits_loses_its_connection() {
    for_each(CREDIT_MODES, |mode| {
        let (world, address, mut witness) = World::witnessed("credits", mode);
        for _ in 0..5 {
            let mut peer = RawPeer::connect_in(&address, mode);
            if mode != CreditMode::V1 {
                // With credit for its replies, a fast server would grant further credits.
                peer.credit = 0;
            }
            (1..1000).for_each(|xid| peer.call_as(xid, ECHO, Chunks::NONE, b"now"));
            assert_served(&mut witness);
            // Version 1 counts outstanding calls, so an excess depends on the speed of the replies.
            if mode == CreditMode::V1 { peer.vanish() } else { drop(peer.wait_until_over()) }
        }
        assert_served(&mut witness);
        let faults = world.stats().peer_faults;
        assert!(faults == 5 || (mode == CreditMode::V1 && faults < 5), "{faults} faults");
    });
}

#[test]
fn memory_that_was_not_offered_is_not_touched() {
    let (world, address, mut witness) = World::witnessed("keys", CreditMode::V2Windowed);
    let data = data_of(0, 1000);
    let connect = |access: Access| -> (RawPeer, Segment, Lent) {
        let mut peer = RawPeer::connect(&address);
        peer.ping();
        let (segment, memory) = peer.expose(&data, access);
        (peer, segment, memory)
    };
    let call = |peer: &mut RawPeer, write: bool, target: Segment| match write {
        true => peer.call(LOAD, &Lists::new().write([target]), &be(&[0, 1001])),
        false => peer.call(STORE, &Lists::new().read(44, [target]), &[0; 4]),
    };
    // Correct segments for comparison: all of the exposed memory, and parts of it.
    let (mut peer, segment, _memory) = connect(Access::REMOTE_READ);
    for length in [1000, 999, 1] {
        call(&mut peer, false, Segment { length, ..segment });
        assert_eq!(peer.answer().payload(), reply_bytes(XID, &be(&[length])));
    }
    type Falsify = fn(Segment) -> Segment;
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let cases: [(&str, [Access; 2], Falsify); 5] = [
        ("another key", [read, write], |segment| Segment { handle: segment.handle ^ 0x100, ..segment }),
        ("the preceding key", [read, write], |segment| Segment { handle: segment.handle.wrapping_sub(1), ..segment }),
        ("beyond its end", [read, write], |segment| Segment { length: segment.length + 1, ..segment }),
        ("before its start", [read, write], |segment| Segment { offset: segment.offset.wrapping_sub(4), ..segment }),
        ("the wrong access right", [write, read], |segment| segment),
    ];
    let mut faults = 0;
    for (name, accesses, falsify) in cases {
        for (access, write) in accesses.into_iter().zip([false, true]) {
            let _row = row((name, write));
            let (mut peer, segment, memory) = connect(access);
            let crosses_bound = ["beyond its end", "before its start"].contains(&name);
            if crosses_bound && !peer.checks_window_bounds() {
                continue;
            }
            call(&mut peer, write, falsify(segment));
            peer.wait_until_over();
            assert_eq!(contents(&memory, 1000), data);
            faults += 1;
            assert_served(&mut witness);
        }
    }
    assert!(wait_until(|| world.stats().peer_faults == faults), "{} of {faults}", world.stats().peer_faults);
}

#[test]
fn err_vers_has_the_layout_common_to_all_versions() {
    let only_2 = small_config().with(|c| c.wire.version_1 = false);
    let cases =
        [(small_config(), 0, 1, 2), (small_config(), 3, 1, 2), (in_mode(CreditMode::V1), 2, 1, 1), (only_2, 1, 2, 2)];
    for (config, version, low, high) in cases {
        let _row = row((version, low, high));
        let (_world, address) = World::standard("err-vers", config);
        let mut peer = RawPeer::connect_silently(&address);
        peer.send(&be(&[77, version, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        let bytes = peer.receive().expect("an answer").bytes;
        let credit = u32::from_be_bytes(bytes[8..12].try_into().expect("four bytes"));
        assert_eq!(bytes, be(&[77, version, credit, 4, 1, low, high]));
    }
}

#[test]
fn a_violation_is_recorded_when_the_disconnect_arrives_in_the_same_turn() {
    // Each turn polls the control plane after its other steps.
    let config = small_config().with(|c| c.poll.control_interval = Duration::from_nanos(1));
    let (world, address) = World::standard("same-turn", config);
    for count in 1..=10 {
        let mut peer = RawPeer::connect(&address);
        peer.ping();
        peer.send_nomsg(XID, &Lists::new().read(0, [segment(64)]));
        peer.wait_until_over();
        assert!(wait_until(|| world.stats().connections == 0));
        assert_eq!(world.stats().peer_faults, count, "the fault is the Read of memory that is not exposed");
        peer.vanish();
    }
}
