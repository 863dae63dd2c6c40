//! Calls without a reply.

use rpcrdma_tests::prelude::*;

/// Passes its arguments to the test.
const NOTE: u32 = 60;

#[test]
fn one_way_calls_run_in_order_and_take_no_credits() {
    for_each(V2_CREDIT_MODES, |mode| {
        let (services, notes) = note_services();
        let (_world, mut client) = World::pair_with("one-way", small_server(), services, mode);
        // Every hundredth call is continued, though a call with a reply would use chunks for that length.
        let args = |n: u64| match n % 200 {
            99 => vec![n as u8; 6000],
            199 => vec![n as u8; 60_000],
            _ => vec![n as u8; 4 * (n % 20) as usize],
        };
        let call = |client: &mut LocalClient, n: u64| {
            let mut call = client.prepare(NOTE, args(n).len()).ok()?;
            call.args_mut().copy_from_slice(&args(n));
            Some(call.one_way())
        };
        // 100 calls at a time, because each needs a call slot.
        client.keep_busy(100, 2000, call, |done| drop(done.result.expect("the call is sent")));
        // The echo arrives after the last one-way call.
        echo(&mut client, b"done").unwrap();
        assert!(notes.try_iter().eq((0..2000).map(args)));
    });
}

/// Returns services with [`NOTE`], and the arguments of its calls.
fn note_services() -> (Services, Receiver<Vec<u8>>) {
    let (report, notes) = channel();
    let note = Procedure::new(move |call| {
        report.send(call.args().to_vec()).expect("the test waits");
        Ok(())
    });
    let services = standard_and([(NOTE, note.one_way())]);
    (services, notes)
}

#[test]
fn one_way_calls_may_be_as_long_as_reassemble_up_to() {
    let (services, notes) = note_services();
    let config =
        || small_config().with(|c| (c.wire.reassemble_up_to, c.memory.long_buffers) = (100_000, vec![(128 << 10, 8)]));
    let (_world, mut client) = World::pair_with("one-way-long", config(), services, config());
    // The RPC header has 40 bytes.
    let [call, longer] = [99_960, 99_964].map(|len| client.prepare_call(NOTE, &data_of(7, len)).one_way());
    assert_eq!(client.outcome(call), Ok(Vec::new()));
    assert!(notes.recv_timeout(Duration::from_secs(20)).expect("the call runs") == data_of(7, 99_960));
    assert_matches!(client.outcome(longer).expect_err("the call is too long"), CallError::TooLong { .. });
    assert_eq!(client.stats().exposed_buffers, 0);
}

#[test]
fn one_way_calls_are_refused_in_version_1_and_with_chunks() {
    let (services, notes) = note_services();
    let (world, address) = World::serving("one-way-not", small_server(), services);
    let mut client = world.client(&address, CreditMode::V1);
    assert_eq!(client.run_call(|client| client.prepare_call(NOTE, b"").one_way()), Err(Defect::NotOneWay.into()));
    // Version 1 counts credits by replies, so a caller that waits for a reply gets one.
    client.run(NOTE, b"").unwrap();
    assert_eq!((world.stats().calls, world.stats().calls_failed), (1, 0), "an empty reply is no failure");
    let mut client = world.client(&address, small_config());
    let call = client.prepare_chunked_call(NOTE, b"", &[], &[100]).one_way();
    assert_eq!(client.outcome(call), Err(Defect::NotOneWay.into()));
    let mut client = Client::connect(&address, small_client(small_config())).unwrap();
    for n in 0..100u8 {
        assert_eq!(outcome_of(client.call(ClientCall::new(NOTE).args([n; 8]).one_way())), Ok(Vec::new()));
    }
    let chunk = client.alloc(100).unwrap();
    let refused = client.call(ClientCall::new(NOTE).write_chunk_into(chunk).one_way());
    assert_eq!(outcome_of(refused), Err(Defect::NotOneWay.into()));
    // The one-way calls run in order, after the call of version 1.
    let ran: Vec<_> = (0..101).map(|_| notes.recv_timeout(Duration::from_secs(20)).expect("the call runs")).collect();
    assert!(ran[1..].iter().zip(0..).all(|(args, n)| *args == [n; 8]));
}
