//! A client whose shard has its own thread.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use rpcrdma::fabric::Disconnect;
use rpcrdma::shard::CloseCause;
use rpcrdma_tests::prelude::*;

use super::calls::workers;
use super::lifecycle::{GATED, Gate, gated};
use super::returned::{KEEP, keeping};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A minimal executor.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn connect(world: &World, address: &Address, config: Config) -> Client {
    let _ = world;
    Client::connect(address, small_client(config)).expect("a connection")
}

#[test]
fn blocking_calls_futures_and_polls() {
    let (world, address) = World::standard("client", workers());
    for idle in [IdlePolicy::Poll, IdlePolicy::default(), IdlePolicy::Event] {
        let mut client = connect(&world, &address, small().with(|c| c.poll.idle = idle));
        for len in [0, 1, 64, 191, 192, 193, 1000, 3900] {
            let args = data_of(len as u32, len);
            let reply = client.call(ClientCall::new(ECHO).args(args.clone())).unwrap();
            assert_eq!(reply.results(), args);
            let pending = client.start(ClientCall::new(ECHO).args(args.clone())).unwrap();
            assert_eq!(block_on(pending).unwrap().results(), args);
            let mut pending = client.start(ClientCall::new(ECHO).args(args.clone())).unwrap();
            assert_eq!(eventually(|| pending.try_take()).unwrap().results(), args);
        }
        // The call takes two messages, but the procedure has no room for such a reply.
        let failed = client.call(ClientCall::new(ECHO).args(vec![0; 6000])).unwrap_err();
        assert_eq!(failed.error, CallError::Refused(Refusal::SystemError));
        // Longer than any buffer, so it does not become a message.
        let error = client.call(ClientCall::new(ECHO).args(vec![0; 2 << 20])).unwrap_err();
        assert!(
            matches!(
                error,
                FailedCall { error: CallError::TooLong { limit: 0x10_0000, knob: Knob::LONG_BUFFERS, .. }, .. }
            ),
            "{error}"
        );
        assert_eq!(client.stats().unwrap().calls_failed, 2);
    }
}

#[test]
fn futures_that_are_dropped_harm_nobody() {
    let (world, address) = World::standard("dropped", workers());
    let mut client = connect(&world, &address, small());
    for round in 0..20 {
        let mut kept = Vec::new();
        for n in 0..30u32 {
            let args = [&200u32.to_be_bytes()[..], &n.to_be_bytes()].concat();
            let pending = client.start(ClientCall::new(WORKER_ECHO).args(args.clone())).unwrap();
            if (n + round) % 2 == 0 {
                kept.push((args, pending));
            }
        }
        for (args, pending) in kept {
            assert_eq!(block_on(pending).unwrap().results(), args);
        }
    }
    // Dropped calls end by themselves.
    assert!(settles(|| client.call(ClientCall::new(ECHO)).is_ok()));
}

#[test]
fn chunks_through_the_ring() {
    let (world, address) = World::standard("client-chunks", small_server());
    let mut client = connect(&world, &address, small());
    for seed in 0..50u32 {
        let mut data = client.alloc(10_001).unwrap();
        pattern(seed, &mut data);
        let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(10_001);
        let mut reply = client.call(call).unwrap();
        assert!(patterned(seed, reply.chunk(0).unwrap()));
        // Memory of a reply may be kept and reused.
        let sent = reply.take_sent().next().unwrap();
        let call = ClientCall::new(STORE).args(seed.to_be_bytes()).read_chunk(4, sent);
        assert_eq!(client.call(call).unwrap().results(), 10_001u32.to_be_bytes());
    }
    let abandoned = ClientCall::new(LOAD).args([0, 0, 0, 1, 0, 0, 0, 9]).write_chunk(1 << 20);
    drop(client.start(abandoned).unwrap());
    assert!(settles(|| client.stats().unwrap().exposed_buffers == 0));
    let failed = client.call(ClientCall::new(LOAD).args([0; 8]).write_chunk(1 << 30)).unwrap_err();
    assert_eq!(failed.error, CallError::TooLong { needed: 1 << 30, limit: 1 << 20, knob: Knob::BULK_BUFFERS });
}

#[test]
fn many_threads_share_one_connection() {
    let (world, address) = World::standard("another", workers());
    let client = connect(&world, &address, small());
    std::thread::scope(|scope| {
        for thread in 0..6u32 {
            let mut client = client.clone();
            scope.spawn(move || {
                for n in 0..300u32 {
                    let args = [[thread as u8; 60], [n as u8; 60]].concat();
                    match n % 3 {
                        0 => {
                            let reply = client.call(ClientCall::new(ECHO).args(args.clone())).unwrap();
                            assert_eq!(reply.results(), args);
                        }
                        1 => {
                            let a = client.start(ClientCall::new(ECHO).args(args.clone())).unwrap();
                            let b = client.start(ClientCall::new(ECHO).args([9])).unwrap();
                            assert_eq!(block_on(b).unwrap().results(), [9]);
                            assert_eq!(block_on(a).unwrap().results(), args);
                        }
                        _ => {
                            let mut data = client.alloc(300).unwrap();
                            pattern(n, &mut data);
                            let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(300);
                            assert!(patterned(n, client.call(call).unwrap().chunk(0).unwrap()));
                        }
                    }
                }
            });
        }
    });
    let stats = client.stats().unwrap();
    assert_eq!((stats.calls, stats.calls_failed, stats.connections), (6 * 400, 0, 1));
}

#[test]
fn deadlines_limits_and_the_end() {
    let (gate, shut) = (Gate::default(), Gate::default());
    let (mut world, address) = World::serving("client-limits", workers(), gated(&gate, true));
    let _open = (gate.opens(), shut.opens());
    let mut client = connect(&world, &address, small().with(|c| c.limits.max_calls = 4));
    let slow = || ClientCall::new(GATED);
    let failed = client.call(slow().timeout(Duration::from_millis(1))).unwrap_err();
    assert_eq!(failed.error, CallError::TimedOut { sent: true });

    let mut started: Vec<_> = (0..4).map(|_| client.start(slow()).unwrap()).collect();
    let refused = client.start(slow()).unwrap_err();
    assert_eq!(refused.error, CallError::TooManyCalls { limit: 4 });
    let last = started.pop().unwrap();
    gate.open();
    // Calls beyond the connection's table end the same way.
    let results: Vec<_> = started.into_iter().map(|mut pending| pending.join().map(drop)).collect();
    assert!(
        results
            .iter()
            .all(|result| matches!(result, Ok(()) | Err(FailedCall { error: CallError::TooManyCalls { .. }, .. }))),
        "{results:?}"
    );
    drop(last);

    client.close();
    assert!(settles(|| client.call(ClientCall::new(ECHO)).is_err_and(|failed| failed.error == CallError::Closed)));
    let address = world.serve_with(workers(), gated(&shut, true));
    let mut orphan = connect(&world, &address, small());
    let mut pending = orphan.start(slow()).unwrap();
    drop(orphan);
    assert!(
        matches!(pending.join(), Err(FailedCall { error: CallError::ConnectionLost { .. }, .. })),
        "its client is gone"
    );
}

#[test]
fn a_lost_server_ends_waiting_calls() {
    let (mut world, address) = World::standard("client-lost", workers());
    let mut client = connect(&world, &address, small());
    let slow = || ClientCall::new(WORKER_ECHO).args(20_000u32.to_be_bytes());
    let pending: Vec<_> = (0..20).map(|_| client.start(slow()).unwrap()).collect();
    let waiter = {
        let mut client = client.clone();
        std::thread::spawn(move || client.call(ClientCall::new(WORKER_ECHO).args(20_000u32.to_be_bytes())).map(drop))
    };
    drop(world.take_server());
    for mut pending in pending {
        assert!(matches!(
            pending.join().map(drop),
            Ok(()) | Err(FailedCall { error: CallError::ConnectionLost { .. }, .. })
        ));
    }
    let end = waiter.join().unwrap();
    assert!(served_or_lost(&end), "{end:?}");
    // If every reply arrived before the server went, the client may not have noticed the end.
    assert!(settles(|| match client.call(slow()).map(drop) {
        Err(FailedCall { error: CallError::Closed, .. }) => true,
        Err(FailedCall { error: CallError::ConnectionLost { .. }, .. }) => false,
        other => panic!("{other:?} from a server that is gone"),
    }));
}

#[test]
fn a_lost_connection_has_a_reason() {
    let mut world = World::new("client-reason");
    let address = world.address();
    for _ in 0..10 {
        let (services, kept) = keeping();
        world.serve_at(&address, small_server(), services);
        let mut client = connect(&world, &address, small());
        let other = client.clone();
        // No handler answers it.
        let mut slow = client.start(ClientCall::new(KEEP)).unwrap();
        client.call(ClientCall::new(ECHO)).unwrap();
        assert!(settles(|| !kept.lock().expect("no panic").is_empty()));
        assert_eq!((client.close_reason(), other.close_reason()), (None, None));
        let server = world.take_server();
        let end = std::thread::spawn(move || drop(server));
        assert!(matches!(slow.join(), Err(FailedCall { error: CallError::ConnectionLost { .. }, .. })));
        // The reason is available once a call has ended.
        for client in [&client, &other] {
            let cause = client.close_reason().map(CloseReason::cause);
            assert!(matches!(cause, Some(CloseCause::Disconnected { .. })));
        }
        end.join().unwrap();
        kept.lock().expect("no panic").clear();
    }
}

#[test]
fn calls_started_before_a_close_complete() {
    let (world, address) = World::standard("client-close-order", small_server());
    for _ in 0..50 {
        let mut client = connect(&world, &address, small());
        let mut other = client.clone();
        // A quiet ring and a new one: the close travels by a third.
        client.call(ClientCall::new(ECHO)).unwrap();
        let calls = [client.start(ClientCall::new(ECHO)).unwrap(), other.start(ClientCall::new(ECHO)).unwrap()];
        client.close();
        for mut call in calls {
            call.join().unwrap();
        }
    }
}

#[test]
fn a_closed_connection_reports_its_reason() {
    let (world, address) = World::standard("client-closed", small_server());
    let mut client = connect(&world, &address, small());
    client.call(ClientCall::new(ECHO)).unwrap();
    assert_eq!(client.close_reason(), None);
    client.close();
    assert!(settles(|| client.close_reason().is_some()));
    let reason = client.close_reason().map(CloseReason::cause);
    assert!(matches!(reason, Some(CloseCause::Disconnected { cause: Disconnect::Local, .. })), "{reason:?}");
    assert_eq!(client.call(ClientCall::new(ECHO)).map(drop).map_err(CallError::from), Err(CallError::Closed));
}

/// The result of a future.
fn end_of<T>(future: &mut std::pin::Pin<Box<impl Future<Output = T>>>) -> T {
    eventually(|| match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    })
}

/// A reply that nobody takes does not keep its receive: the server's next replies would find none.
#[test]
fn calls_that_nobody_joins_take_no_receives() {
    let (world, address) =
        World::standard("unjoined", small_server().with(|c| c.shard.timeouts.progress = Duration::from_secs(1)));
    let config = small().with(|c| (c.limits.max_calls, c.memory.small_buffers) = (4096, 4096));
    let mut client = connect(&world, &address, config);
    let args = |n: u32| [n.to_be_bytes(), [7; 4]].concat();
    let call = |n| client.start(ClientCall::new(ECHO).args(args(n))).expect("a slot");
    let calls: Vec<_> = (0..4096).map(call).collect();
    // The last is answered after all others.
    for (n, mut call) in (0..4096).zip(calls).rev() {
        assert_eq!(call.join().expect("a reply").results(), args(n));
    }
    assert!(client.close_reason().is_none());
}

/// Requests for memory are served in order. None waits for memory of a closed connection.
#[test]
fn futures_of_memory_wait_for_a_free_buffer_in_order() {
    let (_world, address) = World::standard("memory-later", small_server());
    let config = small().with(|c| c.memory.bulk_buffers = vec![(4096, 1)]);
    let mut client = Client::connect(&address, small_client(config)).unwrap();
    let held = client.alloc(4096).expect("the only one");
    let mut context = Context::from_waker(Waker::noop());
    let (mut first, mut second) = (Box::pin(client.alloc_async(1)), Box::pin(client.alloc_async(1)));
    let refused = client.alloc(1).map(drop);
    assert_eq!(refused, Err(CallError::NoMemory { needed: 1, knob: Knob::BULK_BUFFERS }), "this does not wait");
    assert!(first.as_mut().poll(&mut context).is_pending() && second.as_mut().poll(&mut context).is_pending());
    let given_up = client.alloc_async(1);
    let last = Box::pin(client.alloc_async(1));
    drop((held, given_up));
    let buf = end_of(&mut first);
    assert!(matches!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending), "in order");
    drop(buf.expect("a buffer"));
    drop(end_of(&mut second).expect("a buffer"));
    let held = end_of(&mut { last }).expect("a buffer, behind one that was given up");
    let too_long = end_of(&mut Box::pin(client.alloc_async(4097))).map(drop);
    assert!(matches!(too_long, Err(CallError::TooLong { .. })), "{too_long:?}");
    let mut left = Box::pin(client.alloc_async(1));
    client.close();
    assert_eq!(end_of(&mut left).map(drop), Err(CallError::Closed));
    drop(held);
}
