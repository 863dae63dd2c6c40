//! Statistics of a server's procedures.

use rpcrdma::stats::{ProcedureStats, Refusals};
use rpcrdma_tests::prelude::*;

/// Defers its calls and answers after [`WHILE`].
const LATER: u32 = 50;
const WHILE: Duration = Duration::from_millis(20);

fn services() -> Services {
    let later = |mut call: DeferredCall| {
        drop(std::thread::spawn(move || {
            std::thread::sleep(WHILE);
            let answered = call.reply_writer().put(b"late").is_ok();
            assert!(answered, "there is room");
            call.answer(Ok(()));
        }));
    };
    standard_and([(LATER, Procedure::deferred(later))])
}

fn counted(world: &World) -> Vec<ProcedureStats> {
    world.server().stats().swap_remove(0).procedures
}

/// Calls, bytes in, bytes out.
fn of(counted: &[ProcedureStats], procedure: u32) -> (u64, u64, u64) {
    let of = counted.iter().find(|of| (of.program, of.version, of.procedure) == (PROGRAM, VERSION, procedure));
    of.map_or((0, 0, 0), |of| {
        assert_eq!(of.calls, of.latency.len(), "each that is counted was timed");
        (of.calls, of.bytes_in, of.bytes_out)
    })
}

fn refused(client: &mut LocalClient, procedure: u32, args: &[u8]) -> CallError {
    let call = client.prepared(procedure, args);
    client.call(call).map(drop).expect_err("it is refused").error
}

#[test]
fn all_calls_are_counted_by_procedure_where_all_are_timed() {
    let (world, mut client) =
        World::pair_with("procedures", small().with(|c| c.debug.sample_latency = 1), services(), small());
    for _ in 0..10 {
        echo(&mut client, &[7; 100]).unwrap();
    }
    store(&mut client, 1, &[5000, 800]).unwrap();
    load(&mut client, 2, &[(3000, 2000)]).unwrap();
    client.run(LATER, b"").unwrap();
    let now = counted(&world);
    assert_eq!(of(&now, ECHO), (10, 1000, 1000));
    assert_eq!(of(&now, STORE), (1, 4 + 5000 + 800, 8));
    assert_eq!(of(&now, LOAD), (1, 8, 4 + 2000));
    assert_eq!(of(&now, LATER), (1, 0, 4));
    let later = now.iter().find(|of| of.procedure == LATER).expect("it was called");
    assert!(later.latency.min() >= WHILE.as_nanos() as u64 * 98 / 100, "until it was answered");
    // Reading them changes nothing.
    let again = counted(&world);
    assert_eq!(again.len(), 4);
    assert_eq!([ECHO, STORE, LOAD, LATER].map(|p| of(&again, p)), [ECHO, STORE, LOAD, LATER].map(|p| of(&now, p)));
}

/// Holds for any rate of timed calls.
#[test]
fn refusals_are_counted_by_accept_status() {
    for sample_latency in [0, 64] {
        let (world, mut client) = World::pair_with(
            "refusals",
            small().with(|c| c.debug.sample_latency = sample_latency),
            services(),
            small(),
        );
        // GARBAGE_ARGS, SYSTEM_ERR, PROC_UNAVAIL, AUTH_ERROR, by the handler.
        for (kind, times) in [(0, 3), (1, 2), (2, 1), (3, 1)] {
            for _ in 0..times {
                refused(&mut client, REFUSE, &be(&[kind]));
            }
        }
        refused(&mut client, PANIC, &[]);
        // No such procedure: no procedure counts the call.
        refused(&mut client, 999, &[]);
        // The procedure declares no chunk: the client retransmits the call without it.
        let first = client.first();
        let mut call = client.prepared(REFUSE, &be(&[0]));
        call = call.read_chunk(4, client.alloc(first, 100).unwrap());
        assert_eq!(client.outcome(call).map(drop), Err(CallError::Refused(Refusal::GarbageArguments)));
        let stats = world.server().stats().swap_remove(0);
        let told = |of: &Refusals| {
            let Refusals { unavailable, garbage_arguments, system_errors, authentication, transport, .. } = *of;
            [unavailable, garbage_arguments, system_errors, authentication, transport]
        };
        let of = |procedure| stats.procedures.iter().find(|of| of.procedure == procedure).expect("it was refused");
        assert_eq!(told(&of(REFUSE).refusals), [1, 4, 2, 1, 1]);
        assert_eq!(told(&of(PANIC).refusals), [0, 0, 1, 0, 0]);
        assert_eq!(told(&stats.refusals), [2, 4, 3, 1, 1]);
        assert_eq!(stats.procedures.len(), 2);
        assert_eq!(stats.calls_failed, 11);
        if sample_latency == 0 {
            assert_eq!((of(REFUSE).calls, stats.latency.len()), (0, 0), "none is timed");
        }
    }
}
