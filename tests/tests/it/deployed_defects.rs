//! Defects of deployed implementations, one test each.
//! `tests/peers.md` names the others with the tests that would find them.

use rpcrdma_tests::prelude::*;

/// A grant of 0 limits its client to one call at a time. A grant that echoes the request promises Receives that do not
/// exist.
#[test]
fn version_1_grants_do_not_depend_on_the_requested_credits() {
    const CREDITS: u32 = 12;
    let shard = in_mode(CreditMode::V1).with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
    let (_world, address) = World::standard("grants", shard);
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    let (memory, _room) = client.expose(&[0; 6000], Access::REMOTE_WRITE);
    for credit in [0, 1, CREDITS, 64, 30_000, u32::MAX] {
        client.credit = credit;
        // An inline reply, a Reply chunk, an RPC refusal, a transport error: each carries a grant.
        for (procedure, lists, args) in [
            (ECHO, Lists::new(), &be(&[7])[..]),
            (REPLY, Lists::new().reply([memory]), &be(&[5000])),
            (999, Lists::new(), b""),
            (ECHO, Lists::new().read(ARGS_AT + 4, [memory]), &[0; 4]),
        ] {
            let granted = client.ask(procedure, &lists, args).credit();
            assert_eq!(granted, CREDITS, "{credit} requested, procedure {procedure}");
        }
    }
}

/// Covers each combination of lists in a call. The reply's header returns the same lists, has its encoded length, and
/// precedes the results.
#[test]
fn results_follow_the_header_for_all_combinations_of_lists() {
    with_raw("lists", CREDIT_MODES, |client| {
        let (room, _memory) = client.room(4096);
        let part = |n: u32, length| room.part(512 * n, length);
        let (one, three) = (vec![part(0, 64)], vec![part(0, 16), part(1, 0), part(2, 48)]);
        // A Write chunk with the lengths that it has in the reply, and a Reply chunk, which is not used.
        let writes = [(None, vec![]), (Some(&one), vec![64]), (Some(&three), vec![16, 0, 48])];
        for_each(pairs(writes, [None, Some(&vec![]), Some(&one), Some(&three)]), |((write, lens), reply)| {
            let lists = write.map_or_else(Lists::new, |write| Lists::new().write(write));
            let answer = client.ask(LOAD, &reply.map_or(lists.clone(), |reply| lists.reply(reply)), &be(&[9, 64]));
            assert_eq!(answer.payload(), reply_bytes(XID, &be(&vec![64; usize::from(write.is_some())])));
            let returned: Vec<_> = answer.write_chunks().concat().iter().map(|segment| segment.length).collect();
            assert_eq!(returned, lens);
            let returned = answer.reply_chunk().map(|chunk| (chunk.len(), chunk.total_length()));
            assert_eq!(returned, reply.map(|reply| (reply.len(), 0)));
        });
    });
}
