//! Calls without a reply.

use std::sync::atomic::{AtomicU64, Ordering};

use rpcrdma_tests::prelude::*;

const NOTE: u32 = 60;

#[test]
fn calls_without_a_reply_run_in_order_and_cost_no_credits() {
    for scheme in SCHEMES_2 {
        let sum = Arc::new(AtomicU64::new(0));
        let noted = Arc::clone(&sum);
        let note = Procedure::new(move |call| {
            let len = call.args().len() as u64;
            // The result depends on the order of the calls.
            let _ = noted
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sum| Some(sum.wrapping_mul(31).wrapping_add(len)));
            Ok(())
        });
        let services = standard_and([(NOTE, note.one_way())]);
        let (_world, mut client) = World::pair_with("one-way", small_server(), services, scheme);
        let (first, mut expected, mut ended) = (client.first(), 0u64, 0);
        for n in 0..2000u64 {
            // Every hundredth call is continued, though a call with a reply would use chunks for that length.
            let len = match n % 200 {
                99 => 6000,
                199 => 60_000,
                _ => 4 * (n % 20) as usize,
            };
            let mut call = loop {
                match client.prepare(NOTE, len) {
                    Ok(call) => break call,
                    Err(_) => drop(client.poll(|done| ended += u64::from(done.result.is_ok()))),
                }
            };
            call.args_mut().fill(n as u8);
            call = call.one_way();
            assert!(client.start(first, call, n).is_some(), "call {n} was not started");
            expected = expected.wrapping_mul(31).wrapping_add(len as u64);
            // At most as many as there are slots.
            while n + 1 - ended >= 100 {
                client.poll(|done| ended += u64::from(done.result.is_ok()));
            }
        }
        assert!(settles(|| {
            client.poll(|done| ended += u64::from(done.result.is_ok()));
            ended == 2000
        }));
        // The echo arrives behind the last of them.
        echo(&mut client, b"done").unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), expected, "{scheme:?}");
    }
}

/// Services with a [`NOTE`] that passes its arguments to the test.
fn noting() -> (Services, Receiver<Vec<u8>>) {
    let (tell, told) = channel();
    let note = Procedure::new(move |call| {
        tell.send(call.args().to_vec()).expect("the test waits");
        Ok(())
    });
    let services = standard_and([(NOTE, note.one_way())]);
    (services, told)
}

#[test]
fn a_call_without_a_reply_is_as_long_as_parts_can_be_put_together() {
    let (services, told) = noting();
    let config =
        || small().with(|c| (c.wire.reassemble_up_to, c.memory.long_buffers) = (100_000, vec![(128 << 10, 8)]));
    let (_world, mut client) = World::pair_with("one-way-long", config(), services, config());
    // The RPC header has 40 bytes.
    for (len, sent) in [(99_960, true), (99_964, false)] {
        let mut call = client.prepare(NOTE, len).expect("a buffer");
        pattern(7, call.args_mut());
        call = call.one_way();
        match client.call(call).map(drop) {
            Ok(()) => {
                let args = told.recv_timeout(Duration::from_secs(20)).expect("it runs");
                assert!(sent && args.len() == len && patterned(7, &args));
            }
            Err(error) => {
                assert!(!sent && matches!(error, FailedCall { error: CallError::TooLong { .. }, .. }), "{len}: {error}")
            }
        }
    }
    assert_eq!(client.stats().exposed_buffers, 0);
}

#[test]
fn version_1_and_chunks_have_no_calls_without_a_reply() {
    let services = standard_and([(NOTE, Procedure::new(|_| Ok(())).one_way())]);
    let (world, address) = World::serving("one-way-not", small_server(), services);
    let mut client = world.client(&address, CreditMode::V1);
    let call = client.prepare(NOTE, 0).unwrap().one_way();
    assert_eq!(client.outcome(call).map(drop), Err(Defect::NotOneWay.into()));
    // Version 1 counts credits by replies, so a caller that waits for a reply gets one.
    client.run(NOTE, b"").unwrap();
    let mut client = world.client(&address, small());
    let call = client.chunked(NOTE, b"", &[], &[100]).one_way();
    assert_eq!(client.outcome(call).map(drop), Err(Defect::NotOneWay.into()));
}

#[test]
fn a_client_with_a_thread_makes_calls_without_a_reply() {
    let (services, told) = noting();
    let (_world, address) = World::serving("one-way-threaded", small_server(), services);
    let mut client = Client::connect(&address, ClientConfig::new(PROGRAM, VERSION)).unwrap();
    for n in 0..100u8 {
        let reply = client.call(ClientCall::new(NOTE).args([n; 8]).one_way()).unwrap();
        assert!(reply.results().is_empty());
        assert_eq!(told.recv_timeout(Duration::from_secs(20)).expect("it runs"), [n; 8]);
    }
    let chunk = client.alloc(100).unwrap();
    let refused = client.call(ClientCall::new(NOTE).write_chunk_into(chunk).one_way());
    assert_eq!(refused.map(drop).map_err(CallError::from), Err(Defect::NotOneWay.into()));
}
