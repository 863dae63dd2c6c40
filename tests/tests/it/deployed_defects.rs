//! Defects of deployed implementations, one test for each.
//! `tests/peers.md` lists further defects with the tests that would find them.

use rpcrdma_tests::prelude::*;

/// Some servers grant 0 credits, which limits the client to one call at a time. Others grant what the client requests,
/// and so promise Receives that do not exist.
#[test]
fn version_1_grants_do_not_depend_on_the_requested_credits() {
    const CREDITS: u32 = 12;
    let shard = in_mode(CreditMode::V1).with(|c| (c.limits.credits, c.limits.max_credits) = (CREDITS, CREDITS));
    let (_world, address) = World::standard("grants", shard);
    let mut client = RawPeer::connect_in(&address, CreditMode::V1);
    let (target, _memory) = client.expose(&[0; 6000], Access::REMOTE_WRITE);
    for credit in [0, 1, CREDITS, 64, 30_000, u32::MAX] {
        client.credit = credit;
        // The answers are an inline reply, a Reply chunk, an RPC refusal and a transport error. Each carries a grant.
        for (procedure, lists, args) in [
            (ECHO, Lists::new(), &be(&[7])[..]),
            (REPLY, Lists::new().reply([target]), &be(&[5000])),
            (999, Lists::new(), b""),
            (ECHO, Lists::new().read(ARGS_AT + 4, [target]), &[0; 4]),
        ] {
            let granted = client.call_and_receive(procedure, &lists, args).credit();
            assert_eq!(granted, CREDITS, "{credit} credits requested, procedure {procedure}");
        }
    }
}

/// For each combination of lists in a call, the reply's header returns the same lists, and the results follow directly
/// behind it.
#[test]
fn results_follow_the_header_for_all_combinations_of_lists() {
    with_raw("lists", CREDIT_MODES, |client| {
        let (room, _memory) = client.expose_writable(4096);
        let part = |n: u32, length| room.part(512 * n, length);
        let (one, three) = (vec![part(0, 64)], vec![part(0, 16), part(1, 0), part(2, 48)]);
        // Each Write chunk, with the segment lengths that the reply returns. No reply uses its Reply chunk.
        let writes = [(None, vec![]), (Some(&one), vec![64]), (Some(&three), vec![16, 0, 48])];
        for_each(pairs(writes, [None, Some(&vec![]), Some(&one), Some(&three)]), |((write, lens), reply)| {
            let lists = write.map_or_else(Lists::new, |write| Lists::new().write(write));
            let answer =
                client.call_and_receive(LOAD, &reply.map_or(lists.clone(), |reply| lists.reply(reply)), &be(&[9, 64]));
            assert_eq!(answer.payload(), reply_bytes(XID, &be(&vec![64; usize::from(write.is_some())])));
            let returned: Vec<_> = answer.write_chunks().concat().iter().map(|segment| segment.length).collect();
            assert_eq!(returned, lens);
            let returned = answer.reply_chunk().map(|chunk| (chunk.len(), chunk.total_length()));
            assert_eq!(returned, reply.map(|reply| (reply.len(), 0)));
        });
    });
}
