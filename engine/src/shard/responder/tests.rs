use std::sync::{Arc, mpsc};
use std::time::Duration;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Frozen, PagePolicy, Pool, PoolConfig};

use super::*;
use crate::config::Config;
use crate::cross_thread::parker::{Parker, Wake};
use crate::fabric::ReceivedBuf;
use crate::proto::{DecodedLists, ReceivedMessage};
use crate::service::duplicate_requests::{ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig};
use crate::service::{DeferredCall, ParsedHeader, Procedure, Replying, Services};
use crate::shard::checks::ObligationChecks;
use crate::shard::clock::{Clock, SimulatedTime};
use crate::shard::peer_events::PeerInfo;
use crate::shard::testing::{
    NoDevice, call, context, handle, message, message_with_lists, open_conn, received, small_config,
};
use crate::wire::Segment;

/// Procedure that replies with four bytes.
const SHORT: u32 = 1;
/// Procedure that runs on workers.
const ON_WORKERS: u32 = 2;
/// Procedure whose calls are deferred, and held by the fixture.
const DEFERRED: u32 = 3;
/// Procedure that returns bulk data.
const BULK: u32 = 4;
/// Procedure that runs on workers, with a duplicate request cache.
const CACHED: u32 = 5;

struct ResponderFixture {
    responder: Responder,
    services: Arc<Services>,
    held: mpsc::Receiver<DeferredCall>,
    cx: ShardContext<NoDevice>,
    /// Receive buffers that were allocated before the test empties the pool.
    spare: Vec<Buf>,
    /// Memory of the service, outside of the shard's pool.
    service_pool: Pool,
}

impl ResponderFixture {
    fn new() -> Self {
        Self::with(small_config())
    }

    fn with(config: Config) -> Self {
        let mut services = Services::new();
        let answer = |call: &mut crate::ServerCall| {
            call.reply_mut(4)?.fill(9);
            Ok(())
        };
        services.add(1, 1, SHORT, Procedure::new(answer));
        services.add(1, 1, ON_WORKERS, Procedure::new(answer).on_workers());
        services.add(1, 1, BULK, Procedure::new(answer).write_chunks(1, 50_000));
        let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
        let once = Procedure::new(answer).on_workers().cached(cache, |_| Some(ClientId::number(1)));
        services.add(1, 1, CACHED, once);
        let (hold, held) = mpsc::channel();
        services.add(
            1,
            1,
            DEFERRED,
            Procedure::deferred(move |call| hold.send(call).expect("the fixture has the receiver")),
        );
        let mut cx = context(config);
        cx.config.limits.max_deferred = 2;
        let signal = Parker::new(Wake::Fabric(cx.fabric.waker())).signal();
        let responder = Responder::new(Some(services.to_local()), signal, 128);
        let spare = std::iter::from_fn(|| cx.memory.alloc(cx.config.wire.receive_size)).take(16).collect();
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let service_pool =
            Pool::new(&PoolConfig { classes: vec![Class { size: 8192, count: 16 }], arena }).expect("memory");
        Self { responder, services: Arc::new(services), held, cx, spare, service_pool }
    }

    /// Lets a call arrive.
    fn serve(&mut self, conn: &mut Conn, xid: u32, procedure: u32) {
        let buf = self.cx.memory.alloc(self.cx.config.wire.receive_size).expect("a buffer");
        self.serve_message(conn, xid, procedure, buf);
    }

    /// Lets a call arrive in this buffer.
    fn serve_message(&mut self, conn: &mut Conn, xid: u32, procedure: u32, buf: Buf) {
        let Self { responder, cx, .. } = self;
        let message = received(buf, &message(16, &call(xid, procedure)));
        let (ReceivedMessage::Call { id }, header) = handle(conn, &message) else { panic!("not decoded as a call") };
        let call = responder.take_call(cx, conn, id, &header.head);
        match &header.lists {
            DecodedLists::Checked(checked) => responder.accept_checked(cx, conn, call, checked, message),
            _ => responder.accept_decoded(cx, conn, call, &header, message),
        }
    }

    /// Lets a call arrive in a spare buffer, so that it takes no buffer of the pool.
    fn serve_in_spare(&mut self, conn: &mut Conn, xid: u32) {
        let message = self.spare.pop().expect("a spare buffer");
        self.serve_message(conn, xid, SHORT, message);
    }

    /// A call that has arrived, with Write chunks of these lengths.
    fn arrived_call(&mut self, conn: &mut Conn, xid: u32, writes: &[u32]) -> ServedCall<Arrived> {
        let Self { responder, cx, .. } = self;
        let write_list = writes.iter().flat_map(|&len| [1, 1, 1, len, 0, 0]);
        let lists: Vec<u32> = [0].into_iter().chain(write_list).chain([0, 0]).collect();
        let message = message_with_lists(16, &lists, &call(xid, SHORT));
        let message = received(cx.memory.alloc(cx.config.wire.receive_size).expect("a buffer"), &message);
        let (ReceivedMessage::Call { id }, header) = handle(conn, &message) else { panic!("not decoded as a call") };
        let mut call = responder.take_call(cx, conn, id, &header.head);
        for &length in writes {
            call.begin_chunks().store_write_chunk([Segment { handle: 1, length, offset: 0 }]);
        }
        call
    }

    /// A call that its handler has answered, with this number of bytes for a Write chunk.
    fn answered_call(&mut self, conn: &mut Conn, xid: u32, bytes: usize) -> ServedCall<Replying> {
        // A chunk without room accepts no result, not even an empty one.
        let call = self.arrived_call(conn, xid, &[bytes.max(1) as u32]);
        let (message, reply) =
            (self.cx.memory.alloc(100).expect("a buffer"), self.cx.memory.alloc(200).expect("a buffer"));
        let call =
            call.admit(RpcMessage { buf: ReceivedBuf::whole(message), at: 0 }, ParsedHeader { entry: 0, len: 40 });
        let mut call = call.with_reply_buffer(reply, 160);
        let mut result = self.service_pool.alloc(bytes).expect("a buffer");
        result.set_window(0, bytes);
        call.view_mut().set_result(0, result.freeze()).expect("there is room");
        call.answered(Ok(())).complete()
    }

    /// A call in a spare buffer, which needs `chunks` buffers of `long_buffers`, and one buffer for its reply.
    fn bulk_call(&mut self, conn: &mut Conn, xid: u32, chunks: usize) -> Unready {
        let call = self.arrived_call(conn, xid, &vec![40_000; chunks]);
        let message = self.spare.pop().map(ReceivedBuf::whole).expect("a spare buffer");
        let entry = self.services.find(1, 1, BULK).expect("present");
        Unready::Admitted(call.admit(RpcMessage { buf: message, at: 0 }, ParsedHeader { entry, len: 40 }))
    }

    /// XIDs of the replies that were sent on a connection since the last call of this function.
    fn take_sent_xids(&mut self, conn: &mut Conn) -> Vec<u32> {
        self.cx.post_chain(conn);
        let sent = self.cx.fabric.take_sent();
        sent.iter().map(|bytes| u32::from_be_bytes(bytes[..4].try_into().expect("a word"))).collect()
    }

    /// Allocates all buffers that a reply could use.
    fn empty_pool(&self) -> Vec<Buf> {
        std::iter::from_fn(|| self.cx.memory.pool.alloc(1)).collect()
    }

    /// Allocates and freezes all buffers that a reply could use. Frozen buffers are not expected back, so calls that
    /// need them are unservable.
    fn freeze_pool(&self) -> Vec<Frozen> {
        self.empty_pool().into_iter().map(Buf::freeze).collect()
    }
}

#[test]
fn each_call_is_answered_once() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=3 {
        fixture.serve(&mut conn, xid, SHORT);
        assert_eq!(fixture.take_sent_xids(&mut conn), [xid]);
        assert!(conn.served.holds_nothing() && !fixture.responder.has_waiting_work());
    }
    assert_eq!(fixture.cx.stats.calls, 3);
}

#[test]
fn procedures_for_workers_run_on_the_shard_without_workers() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    fixture.serve(&mut conn, 5, ON_WORKERS);
    assert_eq!(fixture.take_sent_xids(&mut conn), [5]);
    assert!(conn.served.has_no_pending_calls());
}

#[test]
fn calls_for_workers_wait_for_room_in_the_rings_and_return_once() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let mut workers = SimulatedWorkers::new(1, 2, Arc::clone(&fixture.services));
    fixture.responder.use_workers(&workers.pool);
    for xid in 1..=5 {
        fixture.serve(&mut conn, xid, ON_WORKERS);
    }
    assert!(fixture.responder.has_waiting_work() && !conn.served.has_no_pending_calls());
    fixture.cx.conns.insert(conn);
    let mut answered = Vec::new();
    for _ in 0..8 {
        fixture.responder.continue_waiting(&mut fixture.cx);
        workers.turn(0);
        fixture.responder.collect(&mut fixture.cx);
        let mut conn = fixture.cx.conns.take_slot(0).expect("present");
        answered.extend(fixture.take_sent_xids(&mut conn));
        fixture.cx.conns.restore(conn);
    }
    assert_eq!(answered, [1, 2, 3, 4, 5]);
    assert_eq!(fixture.responder.pending.with_workers(), 0);
    assert!(fixture.cx.conns.take_slot(0).expect("present").served.has_no_pending_calls());
}

#[test]
fn deferred_calls_return_once_and_waiting_ones_follow() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=4 {
        fixture.serve(&mut conn, xid, DEFERRED);
    }
    let taken: Vec<_> = fixture.held.try_iter().collect();
    assert_eq!(
        taken.iter().map(|call| call.info().xid()).collect::<Vec<_>>(),
        [1, 2],
        "at most two calls may be deferred"
    );
    assert_eq!((fixture.responder.pending.len(), conn.served.deferred, conn.served.not_handed_over.len()), (2, 2, 2));
    assert!(!conn.served.has_no_pending_calls() && fixture.take_sent_xids(&mut conn).is_empty());
    fixture.cx.conns.insert(conn);
    assert_eq!(fixture.responder.collect(&mut fixture.cx), 0);
    let mut taken = taken.into_iter();
    taken.next_back().expect("the second").answer(Ok(()));
    drop(taken.next().expect("the first"));
    assert_eq!(fixture.responder.collect(&mut fixture.cx), 2);
    assert_eq!((fixture.cx.stats.calls_dropped, fixture.cx.stats.calls_failed), (1, 1));
    let mut conn = fixture.cx.conns.take_slot(0).expect("present");
    assert_eq!(fixture.take_sent_xids(&mut conn), [2, 1], "in the order of their return");
    fixture.held.try_iter().for_each(|call| call.answer(Ok(())));
    fixture.serve(&mut conn, 5, DEFERRED);
    assert_eq!(conn.served.not_handed_over.len(), 1, "two calls are deferred until the shard collects them");
    fixture.cx.conns.insert(conn);
    // The shard collects calls 3 and 4, and then call 5, which is deferred in their place.
    while fixture.responder.collect(&mut fixture.cx) > 0 {
        fixture.held.try_iter().for_each(|call| call.answer(Ok(())));
    }
    let mut conn = fixture.cx.conns.take_slot(0).expect("present");
    assert_eq!(fixture.take_sent_xids(&mut conn), [3, 4, 5]);
    assert!(conn.served.has_no_pending_calls() && fixture.responder.pending.is_empty());
}

#[test]
fn a_peer_that_receives_nothing_is_disconnected_while_others_have_deferred_calls() {
    let mut fixture = ResponderFixture::new();
    let (mut stalled, mut conn) = (open_conn(0, true), open_conn(1, true));
    // A reply that never completes.
    fixture.serve(&mut stalled, 1, SHORT);
    assert_eq!(fixture.take_sent_xids(&mut stalled), [1]);
    fixture.serve(&mut conn, 2, DEFERRED);
    let held = fixture.empty_pool();
    fixture.serve_in_spare(&mut conn, 3);
    fixture.cx.conns.insert(stalled);
    fixture.cx.conns.insert(conn);
    let (mut checks, time) = (ObligationChecks::default(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    for _ in 0..20 {
        time.advance(Duration::from_secs(1));
        checks.run_checks(&mut fixture.cx);
        fixture.responder.continue_waiting(&mut fixture.cx);
    }
    assert_eq!(fixture.cx.stats.peers_stalled, 1, "the peer is disconnected after `timeouts.progress`");
    assert!(
        fixture.responder.waits_for_memory() && fixture.cx.stats.calls_failed == 0,
        "the deferred call may free its buffers"
    );
    drop(held);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 1);
}

#[test]
fn a_deferred_call_of_a_closed_connection_is_dropped() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=3 {
        fixture.serve(&mut conn, xid, DEFERRED);
    }
    let mut taken: Vec<_> = fixture.held.try_iter().collect();
    assert!(!taken.iter().any(DeferredCall::is_disconnected));
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut conn);
    assert!(taken.iter().all(DeferredCall::is_disconnected));
    assert!(conn.served.not_handed_over.is_empty(), "the third call is dropped");
    taken.pop().expect("the second").answer(Ok(()));
    drop(taken);
    assert_eq!(fixture.responder.collect(&mut fixture.cx), 2);
    assert_eq!(
        (fixture.responder.pending.len(), fixture.responder.replies.call_pool.len()),
        (0, 3),
        "the memory of all calls is back in the pool"
    );
}

#[test]
fn a_cached_call_of_a_closed_connection_runs_when_it_is_retransmitted() {
    let mut fixture = ResponderFixture::new();
    let mut workers = SimulatedWorkers::new(1, 2, Arc::clone(&fixture.services));
    fixture.responder.use_workers(&workers.pool);
    let (mut closed, mut conn) = (open_conn(0, true), open_conn(1, true));
    fixture.serve(&mut closed, 7, CACHED);
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut closed);
    fixture.responder.continue_waiting(&mut fixture.cx);
    fixture.responder.dispatch(&mut fixture.cx);
    assert!(workers.turn(0));
    assert_eq!((fixture.responder.collect(&mut fixture.cx), fixture.responder.pending.len()), (1, 0));
    assert_eq!(fixture.cx.memory.receives.reservable(), 256, "its Receive can be reserved again");
    fixture.serve(&mut conn, 7, CACHED);
    fixture.responder.dispatch(&mut fixture.cx);
    assert!(workers.turn(0), "the call of the closed connection did not run");
    fixture.cx.conns.insert(conn);
    fixture.responder.collect(&mut fixture.cx);
    let mut conn = fixture.cx.conns.take_slot(1).expect("present");
    assert_eq!((fixture.take_sent_xids(&mut conn), fixture.cx.stats.calls), (vec![7], 1));
}

#[test]
fn a_host_that_reconnects_waits_for_its_own_calls() {
    let mut fixture = ResponderFixture::new();
    fixture.cx.config.limits.max_deferred = 8;
    fixture.responder.admission = Admission::new(12);
    let conn = |slot, host: &str| {
        let mut conn = open_conn(slot, true);
        conn.set_accepted(PeerInfo::new(host, 0), None);
        conn
    };
    let mut held = Vec::new();
    for slot in 0..4 {
        let mut conn = conn(slot, "192.0.2.1:7");
        (1..=4).for_each(|xid| fixture.serve(&mut conn, xid, DEFERRED));
        held.extend(fixture.held.try_iter());
        fixture.responder.end_connection_calls(&mut fixture.cx, &mut conn);
    }
    assert_eq!(
        (held.len(), fixture.responder.not_handed_over, fixture.responder.owners_with_orphans()[0].orphans(false)),
        (6, 0, 6)
    );
    assert_eq!(fixture.cx.memory.receives.reservable(), 256 - 6);
    let (mut late, mut other) = (conn(4, "192.0.2.1:7"), conn(5, "192.0.2.2:7"));
    fixture.serve(&mut late, 1, DEFERRED);
    fixture.serve(&mut other, 2, DEFERRED);
    assert_eq!(
        fixture.held.try_iter().map(|call| call.info().xid()).collect::<Vec<_>>(),
        [2],
        "the other host's call does not wait"
    );
    fixture.cx.conns.insert(late);
    fixture.cx.conns.insert(other);
    held.truncate(5);
    fixture.responder.collect(&mut fixture.cx);
    fixture.responder.control(&mut fixture.cx, false);
    assert_eq!(fixture.held.try_iter().map(|call| call.info().xid()).collect::<Vec<_>>(), [1]);
    drop(held);
    while fixture.responder.collect(&mut fixture.cx) > 0 {}
    assert!(fixture.responder.pending.is_empty() && fixture.responder.owners_with_orphans().is_empty());
    assert_eq!(fixture.cx.memory.receives.reservable(), 256);
}

#[test]
fn a_connection_beyond_its_quota_delays_no_other() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    // The device reports no completions, so all replies stay outstanding.
    let held = fixture.empty_pool();
    let free = held.len() / 8;
    let mut held = held;
    held.truncate(held.len() - free);
    let mut xid = 0;
    while !conn.served.awaits_completions() {
        xid += 1;
        assert!(xid < 16, "buffers are scarce, so a call must wait");
        fixture.serve_in_spare(&mut conn, xid);
    }
    let mut other = open_conn(1, true);
    fixture.serve_in_spare(&mut other, 100);
    assert!(!other.served.awaits_completions(), "the other connection holds no buffers yet");
    assert!(conn.served.count_memory_holders(&conn.proto, false) + conn.sends.outstanding() as usize > 1);
    assert_eq!(fixture.responder.admission.queue.len(), 1);
    fixture.cx.conns.insert(conn);
    let reported = |fixture: &mut ResponderFixture| {
        fixture.responder.continue_waiting(&mut fixture.cx);
        fixture.responder.admission.queue.reported()
    };
    assert_eq!(reported(&mut fixture), 0);
    time.advance(Duration::from_secs(1));
    assert_eq!(reported(&mut fixture), 1, "calls beyond a quota are logged, too");
    let mut conn = fixture.cx.conns.take_slot(0).expect("present");
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut conn);
    assert_eq!((fixture.responder.admission.queue.len(), conn.served.awaits_completions()), (0, false));
}

#[test]
fn replies_beyond_the_write_limit_delay_no_others() {
    let mut fixture = ResponderFixture::new();
    fixture.cx.config.limits.max_write_bytes = Some(1000);
    let (mut conn, mut other) = (open_conn(0, true), open_conn(1, true));
    let mut is_sent = |conn: &mut Conn, xid: u32, bytes: usize| {
        let reply = fixture.answered_call(conn, xid, bytes);
        let delayed = conn.served.delayed.len();
        fixture.responder.replies.send_paced(&mut fixture.cx, conn, reply);
        conn.served.delayed.len() == delayed
    };
    assert!(is_sent(&mut conn, 1, 5000), "a reply that exceeds the limit by itself is sent alone");
    assert!(!is_sent(&mut conn, 2, 600) && !is_sent(&mut conn, 3, 400));
    assert!(is_sent(&mut conn, 4, 0), "a reply without RDMA Writes is not delayed");
    assert!(
        is_sent(&mut other, 5, 600) && is_sent(&mut other, 6, 400),
        "the other connection has no outstanding RDMA Writes"
    );
    assert!(!is_sent(&mut other, 7, 1));
    assert!(conn.sends.awaits_completion(), "a completion was requested");
    assert_eq!((fixture.cx.stats.write_waits, fixture.responder.replies.delayed), (3, 3));
    conn.sends.send_completed(1);
    fixture.responder.resume(&mut fixture.cx, &mut conn);
    assert!(!conn.served.awaits_completions() && other.served.awaits_completions());
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut other);
    assert_eq!((fixture.responder.replies.delayed, other.served.awaits_completions()), (0, false));
}

fn must_wait(fixture: &mut ResponderFixture, conn: &mut Conn, call: &Unready) -> bool {
    let ResponderFixture { responder: Responder { admission, procedures, .. }, cx, .. } = fixture;
    admission.must_wait(cx, conn, procedures.entry_of(call), call).is_some()
}

#[test]
fn calls_without_memory_wait_and_start_in_order() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let held = fixture.empty_pool();
    for xid in 1..=3 {
        fixture.serve_in_spare(&mut conn, xid);
    }
    assert!(fixture.responder.waits_for_memory() && fixture.responder.has_waiting_work());
    assert!(fixture.take_sent_xids(&mut conn).is_empty());
    drop(held);
    fixture.cx.conns.insert(conn);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 3);
    let mut conn = fixture.cx.conns.take_slot(0).expect("present");
    assert_eq!(fixture.take_sent_xids(&mut conn), [1, 2, 3]);
    assert!(!fixture.responder.has_waiting_work());
}

#[test]
fn calls_of_closed_connections_leave_the_queue() {
    let mut fixture = ResponderFixture::new();
    let (mut closing, mut open) = (open_conn(0, true), open_conn(1, true));
    let held = fixture.empty_pool();
    fixture.serve_in_spare(&mut closing, 1);
    fixture.serve_in_spare(&mut open, 2);
    fixture.serve_in_spare(&mut closing, 3);
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut closing);
    assert_eq!(fixture.responder.admission.queue.len(), 1, "only the open connection's call is left");
    drop(held);
    fixture.cx.conns.insert(open);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 1, "the call of the open connection");
    let mut open = fixture.cx.conns.take_slot(1).expect("present");
    assert_eq!(fixture.take_sent_xids(&mut open), [2]);
}

#[test]
fn a_closed_connection_leaves_no_reservation() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let held = fixture.empty_pool();
    fixture.serve_in_spare(&mut conn, 1);
    assert!(fixture.cx.memory.has_withheld_sizes());
    drop(held);
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut conn);
    assert!(fixture.responder.has_waiting_work(), "the next turn releases the size");
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 0);
    assert!(!fixture.cx.memory.has_withheld_sizes() && !fixture.responder.has_waiting_work());
}

/// The time limit starts anew for each call, even if others have waited for the same buffers.
#[test]
fn an_unservable_call_is_refused_after_a_second() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let (mut closing, mut open) = (open_conn(0, true), open_conn(1, true));
    let _kept = fixture.freeze_pool();
    fixture.serve_in_spare(&mut closing, 1);
    fixture.cx.conns.insert(closing);
    fixture.responder.continue_waiting(&mut fixture.cx);
    let mut closing = fixture.cx.conns.take_slot(0).expect("present");
    fixture.responder.end_connection_calls(&mut fixture.cx, &mut closing);
    let _kept_later = fixture.freeze_pool();
    time.advance(Duration::from_secs(10));
    fixture.serve_in_spare(&mut open, 2);
    let _kept_spares: Vec<_> = fixture.spare.drain(..).map(Buf::freeze).collect();
    fixture.cx.conns.insert(open);
    for millis in [0, 999] {
        time.advance(Duration::from_millis(millis));
        fixture.responder.continue_waiting(&mut fixture.cx);
        assert_eq!(fixture.responder.admission.queue.len(), 1, "after {millis} ms");
    }
    time.advance(Duration::from_millis(1));
    fixture.responder.continue_waiting(&mut fixture.cx);
    assert!(!fixture.responder.waits_for_memory() && fixture.cx.stats.pool_empty == 1);
}

/// The second and later calls wait for their quota, or for the call before them, until the first call is refused.
#[test]
fn unservable_calls_of_a_connection_are_refused_in_the_same_second() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    let calls: Vec<_> = (1..=4).map(|xid| fixture.bulk_call(&mut conn, xid, 1)).collect();
    let _kept = fixture.freeze_pool();
    calls.into_iter().for_each(|call| fixture.responder.start(&mut fixture.cx, &mut conn, call));
    fixture.cx.conns.insert(conn);
    let mut pass = |millis| {
        time.advance(Duration::from_millis(millis));
        fixture.responder.control(&mut fixture.cx, false);
        fixture.responder.continue_waiting(&mut fixture.cx);
        // While a refusal is being sent, its connection may still free memory.
        let mut conn = fixture.cx.conns.take_slot(0).expect("present");
        fixture.take_sent_xids(&mut conn);
        fixture.cx.conns.insert(conn);
        (fixture.responder.admission.queue.len(), fixture.cx.stats.pool_empty)
    };
    assert_eq!([0, 999].map(&mut pass), [(4, 0); 2]);
    (0..10).for_each(|_| _ = pass(10));
    assert_eq!(pass(10), (0, 4));
}

/// Otherwise peers with many unanswered calls would hold all bulk memory.
#[test]
fn short_replies_do_not_use_bulk_memory() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let longest = fixture.cx.memory.longest_suitable(1);
    let held: Vec<_> = std::iter::from_fn(|| fixture.cx.memory.pool.alloc_within(1, longest)).collect();
    fixture.serve_in_spare(&mut conn, 1);
    assert!(fixture.responder.waits_for_memory() && fixture.take_sent_xids(&mut conn).is_empty());
    assert_eq!(fixture.cx.memory.pool.room(1).0, 4, "the `long_buffers` are free");
    let call = &fixture.responder.admission.queue.iter().next().expect("a waiting call").call;
    let demand = Demand::new(&fixture.cx.memory, fixture.responder.procedures.entry_of(call), call);
    let deficit = demand.deficit(&fixture.cx.memory);
    assert_eq!(demand.beyond_pool(&fixture.cx.memory, call), None);
    assert!(deficit.to_string().ends_with("exist (`memory.small_buffers`)"), "{deficit}");
    drop(held);
    fixture.cx.conns.insert(conn);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 1);
}

/// A deferred call holds a reply buffer, which it will free, so a waiting call is not refused.
#[test]
fn bulk_calls_without_a_reply_buffer_wait_for_deferred_calls() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let (mut deferred, mut conn) = (open_conn(0, true), open_conn(1, true));
    fixture.serve(&mut deferred, 1, DEFERRED);
    let longest = fixture.cx.memory.longest_suitable(1);
    let held: Vec<_> = std::iter::from_fn(|| fixture.cx.memory.pool.alloc_within(1, longest)).collect();
    let call = fixture.bulk_call(&mut conn, 2, 1);
    fixture.responder.start(&mut fixture.cx, &mut conn, call);
    assert_eq!(fixture.responder.admission.queue.len(), 1);
    fixture.cx.conns.insert(deferred);
    fixture.cx.conns.insert(conn);
    for _ in 0..30 {
        time.advance(Duration::from_millis(100));
        fixture.responder.continue_waiting(&mut fixture.cx);
    }
    assert!(fixture.responder.waits_for_memory() && fixture.cx.stats.calls_failed == 0);
    drop(held);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 1);
}

/// A call that needs several buffers can exceed its connection's quota, even if a call that needs one does not.
#[test]
fn all_buffers_of_a_call_count_for_its_quota() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let _under_way = fixture.bulk_call(&mut conn, 1, 1);
    let _held = fixture.cx.memory.pool.alloc(40_000).expect("one of four");
    let call = fixture.bulk_call(&mut conn, 3, 4);
    assert!(must_wait(&mut fixture, &mut conn, &call));
    conn.proto.forget(call.id());
    let call = fixture.bulk_call(&mut conn, 4, 1);
    assert!(!must_wait(&mut fixture, &mut conn, &call), "one buffer is within the quota");
}

#[test]
fn a_call_behind_a_waiting_call_of_its_connection_reports_that_cause() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let _under_way = fixture.bulk_call(&mut conn, 1, 1);
    let _held = fixture.cx.memory.pool.alloc(40_000).expect("one of four");
    for (xid, chunks) in [(2, 4), (3, 1)] {
        let call = fixture.bulk_call(&mut conn, xid, chunks);
        fixture.responder.start(&mut fixture.cx, &mut conn, call);
    }
    let causes: Vec<_> = fixture.responder.admission.queue.iter().map(|waiting| waiting.cause.to_string()).collect();
    assert_eq!(causes.len(), 2, "{causes:?}");
    assert!(causes[0].contains("4 buffers of at least"), "{causes:?}");
    assert_eq!(causes[1], "an earlier call of its connection waits");
    assert_eq!((fixture.cx.stats.memory_waits, fixture.cx.stats.read_waits), (2, 0));
}

/// A call in a spare buffer that was assembled from a chunk, and needs one buffer of `long_buffers`.
fn assembled_call(fixture: &mut ResponderFixture, conn: &mut Conn, xid: u32) -> Unready {
    let mut call = fixture.arrived_call(conn, xid, &[40_000]);
    call.set_assembled();
    let message = fixture.spare.pop().map(ReceivedBuf::whole).expect("a spare buffer");
    let entry = fixture.services.find(1, 1, BULK).expect("present");
    Unready::Admitted(call.admit(RpcMessage { buf: message, at: 0 }, ParsedHeader { entry, len: 40 }))
}

/// A responder with eight buffers of `long_buffers`, of which one is free. Also returns the other buffers.
fn with_one_of_eight_free() -> (ResponderFixture, Vec<Buf>) {
    let mut config = small_config();
    config.memory.long_buffers = vec![(65536, 8)];
    let fixture = ResponderFixture::with(config);
    let held = (0..7).map(|_| fixture.cx.memory.pool.alloc(40_000).expect("one of eight")).collect();
    (fixture, held)
}

/// Such a call is refused if it would have to wait, and no completion could arrive before.
#[test]
fn replies_that_the_device_has_sent_do_not_count_for_an_assembled_call() {
    let (mut fixture, _held) = with_one_of_eight_free();
    let mut conn = open_conn(0, true);
    conn.sends.record_writes(8, false);
    conn.sends.push_send(fixture.cx.memory.alloc(8).expect("a buffer"), None, 16);
    let call = assembled_call(&mut fixture, &mut conn, 1);
    for has_read_sends in [false, true] {
        fixture.cx.fabric.has_read_sends = has_read_sends;
        assert_eq!(must_wait(&mut fixture, &mut conn, &call), !has_read_sends);
    }
}

/// The call was counted when it got the buffer for its message.
#[test]
fn an_assembled_call_counts_once_for_the_quota_of_its_host() {
    let (mut fixture, _held) = with_one_of_eight_free();
    fixture.cx.clock = Clock::simulated(&SimulatedTime::new());
    let mut conn = open_conn(0, true);
    conn.set_accepted(PeerInfo::new("192.0.2.1:7", 0), Some("192.0.2.1".parse().expect("an address")));
    let arrived = fixture.bulk_call(&mut conn, 1, 1);
    assert!(!must_wait(&mut fixture, &mut conn, &arrived));
    conn.proto.forget(arrived.id());
    let assembled = assembled_call(&mut fixture, &mut conn, 2);
    assert!(!must_wait(&mut fixture, &mut conn, &assembled), "its own message does not exceed the quota");
    conn.proto.forget(assembled.id());
    let another = fixture.bulk_call(&mut conn, 3, 1);
    assert!(must_wait(&mut fixture, &mut conn, &another), "the host has its call");
}

/// Calls without chunks may wait for an event or a lock without limit.
#[test]
fn calls_without_chunks_do_not_count_for_the_quota_of_bulk_memory() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    fixture.serve(&mut conn, 1, DEFERRED);
    let header = fixture.cx.memory.alloc(8).expect("a buffer");
    conn.sends.push_send(header, None, 16);
    let _held = fixture.cx.memory.pool.alloc(40_000).expect("one of four");
    let call = fixture.bulk_call(&mut conn, 3, 4);
    assert!(!must_wait(&mut fixture, &mut conn, &call));
    let header = fixture.cx.memory.alloc(8).expect("a buffer");
    conn.sends.record_writes(8, false);
    conn.sends.push_send(header, None, 16);
    assert!(must_wait(&mut fixture, &mut conn, &call), "outstanding results count");
    conn.sends.send_completed(2);
    assert!(!must_wait(&mut fixture, &mut conn, &call));
}

/// Calls that need one buffer overtake the call that needs many, except during its reservation.
#[test]
fn a_call_that_needs_many_buffers_is_only_overtaken_outside_its_reservation() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let (mut many, mut single) = (open_conn(0, true), open_conn(1, true));
    let bulk = |fixture: &mut ResponderFixture, conn: &mut Conn, xid: u32, chunks: usize| {
        let call = fixture.bulk_call(conn, xid, chunks);
        fixture.responder.start(&mut fixture.cx, conn, call);
    };
    let mut held = vec![fixture.cx.memory.pool.alloc(40_000).expect("a buffer")];
    bulk(&mut fixture, &mut many, 1, 4);
    bulk(&mut fixture, &mut single, 2, 1);
    assert_eq!(
        fixture.responder.admission.queue.len(),
        2,
        "three buffers are free; the first call needs four, and reserves them"
    );
    fixture.cx.conns.insert(many);
    fixture.cx.conns.insert(single);
    let pass = |fixture: &mut ResponderFixture, millis| {
        time.advance(Duration::from_millis(millis));
        fixture.responder.continue_waiting(&mut fixture.cx)
    };
    assert_eq!((pass(&mut fixture, 1), pass(&mut fixture, 998)), (0, 0), "the later call waits");
    assert_eq!(pass(&mut fixture, 2), 1, "the reservation ends after a second");
    let mut single = fixture.cx.conns.take_slot(1).expect("present");
    bulk(&mut fixture, &mut single, 3, 1);
    assert_eq!(fixture.responder.admission.queue.len(), 1, "without a reservation a new call starts");
    fixture.cx.conns.restore(single);
    assert_eq!((pass(&mut fixture, 4000), fixture.responder.admission.queue.len()), (0, 1));
    let mut single = fixture.cx.conns.take_slot(1).expect("present");
    bulk(&mut fixture, &mut single, 4, 1);
    assert_eq!(fixture.responder.admission.queue.len(), 2, "the next reservation delays new calls again");
    fixture.cx.conns.restore(single);
    held.clear();
    fixture.cx.fabric.take_sent();
    assert!(pass(&mut fixture, 1) >= 1, "enough buffers are free");
}

/// Calls of a host whose buffers do not become free would otherwise delay those of others for a second in every five.
#[test]
fn reservations_of_calls_that_do_not_start_become_rarer_for_their_host_only() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let mut held = vec![fixture.cx.memory.pool.alloc(40_000).expect("one of four")];
    let wait_for_four = |fixture: &mut ResponderFixture, slot, host: &str| {
        let mut conn = open_conn(slot, true);
        conn.set_accepted(PeerInfo::new(host, 0), None);
        let call = fixture.bulk_call(&mut conn, 1, 4);
        fixture.responder.start(&mut fixture.cx, &mut conn, call);
        fixture.cx.conns.insert(conn);
    };
    let seconds_with_reservation = |fixture: &mut ResponderFixture, seconds| {
        let has_reservation = |_| {
            time.advance(Duration::from_secs(1));
            fixture.responder.continue_waiting(&mut fixture.cx);
            usize::from(fixture.cx.memory.has_withheld_sizes())
        };
        (0..seconds).map(has_reservation).sum::<usize>()
    };
    wait_for_four(&mut fixture, 0, "192.0.2.1:7");
    assert_eq!(seconds_with_reservation(&mut fixture, 100), 4, "after pauses of 4, 8, 16 and 32 s");
    wait_for_four(&mut fixture, 1, "192.0.2.1:8");
    assert_eq!(seconds_with_reservation(&mut fixture, 5), 0, "other connections of the host pause, too");
    wait_for_four(&mut fixture, 2, "192.0.2.2:7");
    assert!(fixture.cx.memory.has_withheld_sizes(), "the call of another host has a reservation immediately");
    held.clear();
    assert!(fixture.responder.continue_waiting(&mut fixture.cx) > 0, "buffers for the first call are free");
}

/// A message may be in a longer buffer than necessary.
#[test]
fn the_buffer_of_a_calls_own_message_is_not_part_of_its_demand() {
    let mut fixture = ResponderFixture::new();
    let mut conn = open_conn(0, true);
    let long = fixture.cx.memory.pool.alloc(40_000).expect("a buffer");
    let _held = fixture.empty_pool();
    fixture.serve_message(&mut conn, 1, SHORT, long);
    let call = &fixture.responder.admission.queue.iter().next().expect("a waiting call").call;
    let demand = Demand::new(&fixture.cx.memory, fixture.responder.procedures.entry_of(call), call);
    assert_eq!(demand.deficit(&fixture.cx.memory).size, 512, "only a reply buffer is missing");
}

/// The later call also needs a longer buffer, and starts only after the first call.
#[test]
fn the_call_that_has_waited_longest_gets_a_freed_buffer() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let call = fixture.bulk_call(&mut later, 2, 1);
    let mut held = fixture.empty_pool();
    fixture.serve_in_spare(&mut first, 1);
    time.advance(Duration::from_millis(1));
    fixture.responder.start(&mut fixture.cx, &mut later, call);
    assert_eq!(fixture.responder.admission.queue.len(), 2);
    fixture.cx.conns.insert(first);
    fixture.cx.conns.insert(later);
    for len in [512, 65536] {
        let at = held.iter().position(|buf| buf.capacity() == len).expect("an allocated buffer");
        held.swap_remove(at);
    }
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 1);
    let mut first = fixture.cx.conns.take_slot(0).expect("present");
    assert_eq!(fixture.take_sent_xids(&mut first), [1], "the later call needs the same size for its reply");
}

#[test]
fn a_call_starts_without_a_reservation_when_enough_buffers_are_free() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let mut held: Vec<_> = (0..3).map(|_| fixture.cx.memory.pool.alloc(40_000).expect("one of four")).collect();
    for (slot, chunks) in [(0, 4), (1, 2)] {
        let mut conn = open_conn(slot, true);
        let call = fixture.bulk_call(&mut conn, 1, chunks);
        fixture.responder.start(&mut fixture.cx, &mut conn, call);
        fixture.cx.conns.insert(conn);
    }
    for _ in 0..3 {
        time.advance(Duration::from_millis(600));
        assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 0);
    }
    assert!(
        !fixture.cx.memory.has_withheld_sizes() && fixture.responder.admission.queue.len() == 2,
        "the reservation has ended"
    );
    held.pop();
    assert_eq!(
        (fixture.responder.continue_waiting(&mut fixture.cx), fixture.responder.admission.queue.len()),
        (1, 1),
        "the call that needs two buffers starts"
    );
}

/// Later calls cannot use buffers of the sizes that the first one reserves.
#[test]
fn a_call_gathers_several_buffers_before_later_calls() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let (bulk, single) = (fixture.bulk_call(&mut first, 1, 4), fixture.bulk_call(&mut later, 2, 1));
    let mut held = fixture.empty_pool();
    let mut free_one = |len: usize| {
        let at = held.iter().position(|buf| buf.capacity() == len).expect("an allocated buffer");
        drop(held.swap_remove(at));
    };
    (0..3).for_each(|_| free_one(65536));
    fixture.responder.start(&mut fixture.cx, &mut first, bulk);
    time.advance(Duration::from_millis(1));
    fixture.responder.start(&mut fixture.cx, &mut later, single);
    fixture.cx.conns.insert(first);
    fixture.cx.conns.insert(later);
    free_one(512);
    assert_eq!(
        fixture.responder.continue_waiting(&mut fixture.cx),
        0,
        "a reply buffer and three bulk buffers are free, and the later call gets none"
    );
    free_one(65536);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 1);
    let mut first = fixture.cx.conns.take_slot(0).expect("present");
    assert_eq!(fixture.take_sent_xids(&mut first).len(), 1);
}

/// A call that needs only a reply buffer respects reserved sizes, too.
#[test]
fn short_replies_do_not_use_reserved_sizes() {
    let mut config = small_config();
    config.memory.small_buffers = 4096;
    let mut fixture = ResponderFixture::with(config);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let mut held = fixture.empty_pool();
    fixture.serve_in_spare(&mut first, 1);
    assert!(fixture.cx.memory.is_size_withheld(512));
    held.clear();
    fixture.serve_in_spare(&mut later, 2);
    assert_eq!((fixture.responder.admission.queue.len(), fixture.take_sent_xids(&mut later)), (2, vec![]));
    fixture.cx.conns.insert(first);
    fixture.cx.conns.insert(later);
    assert_eq!(fixture.responder.continue_waiting(&mut fixture.cx), 2);
}

/// A call that needs one buffer of each of two sizes reserves both, once one of them is free.
#[test]
fn a_call_that_lacks_one_of_two_sizes_reserves_both_for_a_second() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    let call = fixture.bulk_call(&mut conn, 1, 1);
    let mut held = fixture.empty_pool();
    fixture.responder.start(&mut fixture.cx, &mut conn, call);
    fixture.cx.conns.insert(conn);
    let mut free_one = |fixture: &mut ResponderFixture, len: usize| {
        let at = held.iter().position(|buf| buf.capacity() == len).expect("an allocated buffer");
        held.swap_remove(at);
        fixture.responder.continue_waiting(&mut fixture.cx)
    };
    let reserved = |fixture: &ResponderFixture| [512, 65536].map(|len| fixture.cx.memory.is_size_withheld(len));
    assert_eq!(reserved(&fixture), [false, true], "the call waits for the longer size");
    assert_eq!((free_one(&mut fixture, 65536), reserved(&fixture)), (0, [true, true]));
    time.advance(Duration::from_millis(999));
    assert_eq!((fixture.responder.continue_waiting(&mut fixture.cx), reserved(&fixture)), (0, [true, true]));
    time.advance(Duration::from_millis(1));
    assert_eq!(
        (fixture.responder.continue_waiting(&mut fixture.cx), reserved(&fixture)),
        (0, [true, false]),
        "the reservation has ended"
    );
    assert_eq!((free_one(&mut fixture, 512), reserved(&fixture)), (1, [false, false]));
}

#[test]
fn waiting_calls_are_counted_and_logged_after_a_second() {
    let (mut fixture, time) = (ResponderFixture::new(), SimulatedTime::new());
    fixture.cx.clock = Clock::simulated(&time);
    let (mut conn, mut other) = (open_conn(0, true), open_conn(1, true));
    fixture.serve(&mut other, 1, DEFERRED);
    let held = fixture.empty_pool();
    fixture.serve_in_spare(&mut conn, 2);
    time.advance(Duration::from_millis(700));
    fixture.serve_in_spare(&mut conn, 3);
    fixture.cx.conns.insert(conn);
    fixture.cx.conns.insert(other);
    let waiting = |fixture: &mut ResponderFixture| {
        fixture.responder.continue_waiting(&mut fixture.cx);
        let mut stats = ShardStats::default();
        fixture.responder.add_to(&mut stats, fixture.cx.clock.read());
        (stats.calls_waiting, stats.longest_wait / 1_000_000, fixture.responder.admission.queue.reported())
    };
    assert_eq!(waiting(&mut fixture), (2, 700, 0));
    time.advance(Duration::from_millis(300));
    assert_eq!(waiting(&mut fixture), (2, 1000, 1), "the first call was logged");
    drop(held);
    assert_eq!(waiting(&mut fixture), (0, 0, 0));
}

/// Version 1 tolerates more calls than credits, but no Receives are reserved for them.
#[test]
fn calls_beyond_the_credit_limit_do_not_wait_while_receives_are_short() {
    for short in [false, true] {
        let mut fixture = ResponderFixture::new();
        let mut conn = open_conn(0, true);
        conn.set_accepted(PeerInfo::new("192.0.2.1:700", 0), None);
        let limit = conn.proto.credits().credit_limit();
        if short {
            let too_many = fixture.cx.memory.receives.posted() as u32 + 1;
            fixture.cx.memory.receives.reserve(&mut conn.receive_reservation, too_many, 0);
        }
        let size = fixture.cx.config.wire.receive_size;
        let messages: Vec<_> = (0..=limit).map(|_| fixture.cx.memory.alloc(size).expect("a buffer")).collect();
        let _kept = fixture.empty_pool();
        for (xid, message) in (1..).zip(messages) {
            fixture.serve_message(&mut conn, xid, SHORT, message);
        }
        let shed = u64::from(short);
        assert_eq!(fixture.cx.stats.calls_shed, shed);
        let waiting = fixture.responder.admission.queue.len();
        assert_eq!(waiting as u64, u64::from(limit) + 1 - shed);
        assert_eq!(conn.stage() == Stage::Draining, short, "its client retransmits the call");
    }
}

/// Each turn has a pass while a call lacks a buffer, so its time must not grow with the number of waiting calls.
#[test]
fn passes_without_freed_buffers_try_few_calls() {
    let mut fixture = ResponderFixture::new();
    let _held = fixture.empty_pool();
    let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
    let messages = Pool::new(&PoolConfig { classes: vec![Class { size: 2048, count: 256 }], arena }).expect("memory");
    for slot in 0..32 {
        let mut conn = open_conn(slot, true);
        for xid in 1..=8 {
            fixture.serve_message(&mut conn, xid, SHORT, messages.alloc(1024).expect("a buffer"));
        }
        fixture.cx.conns.insert(conn);
    }
    fixture.responder.continue_waiting(&mut fixture.cx);
    let queue = &fixture.responder.admission.queue;
    assert!(
        queue.iter().filter(|waiting| !waiting.cause.lacks_buffer()).count() > 32,
        "these calls exceed the quotas of their connections"
    );
    let numbers = |fixture: &ResponderFixture| -> Vec<u32> {
        fixture.responder.admission.queue.iter().map(|waiting| waiting.call.id().index() as u32).collect()
    };
    let before = numbers(&fixture);
    let tries = |fixture: &mut ResponderFixture| {
        fixture.responder.admission.queue.begin_pass(&mut fixture.cx, 0);
        let mut tries = 0;
        while let Some(waiting) = fixture.responder.admission.queue.next_candidate(&fixture.cx) {
            tries += 1;
            let conn = fixture.cx.conns.take(waiting.call.qp()).expect("present");
            fixture.cx.with_conn(conn, |cx, conn| fixture.responder.retry(cx, conn, waiting, 0));
        }
        fixture.responder.admission.queue.end_pass(&mut fixture.cx, 0);
        tries
    };
    assert_eq!(tries(&mut fixture), 1, "the first call reserves the size");
    fixture.responder.admission.queue.request_pass();
    assert!(tries(&mut fixture) > 32, "a requested pass also tries the calls beyond a quota");
    assert_eq!(numbers(&fixture), before, "all calls keep their places");
}
