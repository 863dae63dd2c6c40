use std::sync::{Arc, mpsc};
use std::time::Duration;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Frozen, PagePolicy, Pool, PoolConfig};

use super::*;
use crate::config::Config;
use crate::cross_thread::parker::{Parker, Wake};
use crate::fabric::ReceivedBuf;
use crate::proto::{DecodedLists, ReceivedMessage};
use crate::service::duplicate_requests::{Client, DuplicateRequestCache, DuplicateRequestCacheConfig};
use crate::service::{DeferredCall, ParsedHeader, Procedure, Replying, Services};
use crate::shard::checks::ObligationChecks;
use crate::shard::clock::{Clock, SimulatedTime};
use crate::shard::peer_events::PeerInfo;
use crate::shard::testing::{NoDevice, call, context, handle, message, message_with_lists, open_conn, received, small};
use crate::wire::Segment;

/// Replies with four bytes.
const SHORT: u32 = 1;
/// Runs on workers.
const ELSEWHERE: u32 = 2;

/// Is deferred, and held by the scene.
const LATER: u32 = 3;

/// Returns bulk data.
const BULK: u32 = 4;
/// Runs on workers, with a duplicate request cache.
const ONCE: u32 = 5;

struct Scene {
    responder: Responder,
    services: Arc<Services>,
    held: mpsc::Receiver<DeferredCall>,
    cx: ShardContext<NoDevice>,
    /// Receive buffers that were allocated before the test empties the pool.
    spare: Vec<Buf>,
    /// Memory of the service, outside of the shard's pool.
    own: Pool,
}

impl Scene {
    fn new() -> Self {
        Self::with(small())
    }

    fn with(config: Config) -> Self {
        let mut services = Services::new();
        let answer = |call: &mut crate::ServerCall| {
            call.reply_mut(4)?.fill(9);
            Ok(())
        };
        services.add(1, 1, SHORT, Procedure::new(answer));
        services.add(1, 1, ELSEWHERE, Procedure::new(answer).on_workers());
        services.add(1, 1, BULK, Procedure::new(answer).write_chunks(1, 50_000));
        let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
        let once = Procedure::new(answer).on_workers().cached(cache, |_| Some(Client::number(1)));
        services.add(1, 1, ONCE, once);
        let (hold, held) = mpsc::channel();
        services.add(
            1,
            1,
            LATER,
            Procedure::deferred(move |call| hold.send(call).expect("the scene has the receiver")),
        );
        let mut cx = context(config);
        cx.config.limits.max_deferred = 2;
        let signal = Parker::new(Wake::Fabric(cx.fabric.waker())).signal();
        let responder = Responder::new(Some(services.to_local()), signal, 128);
        let spare = std::iter::from_fn(|| cx.memory.alloc(cx.config.wire.receive_size)).take(16).collect();
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let own = Pool::new(&PoolConfig { classes: vec![Class { size: 8192, count: 16 }], arena }).expect("memory");
        Self { responder, services: Arc::new(services), held, cx, spare, own }
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

    /// Lets a call arrive in a spare buffer, so that the pool's buffers stay where they are.
    fn serve_held(&mut self, conn: &mut Conn, xid: u32) {
        let message = self.spare.pop().expect("a spare buffer");
        self.serve_message(conn, xid, SHORT, message);
    }

    /// A call that has arrived, with Write chunks of these lengths.
    fn arrived(&mut self, conn: &mut Conn, xid: u32, writes: &[u32]) -> ServedCall<Arrived> {
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

    /// A call that is answered, with this number of bytes for a Write chunk.
    fn answered(&mut self, conn: &mut Conn, xid: u32, bytes: usize) -> ServedCall<Replying> {
        // A chunk without room accepts no result, not even an empty one.
        let call = self.arrived(conn, xid, &[bytes.max(1) as u32]);
        let (message, reply) =
            (self.cx.memory.alloc(100).expect("a buffer"), self.cx.memory.alloc(200).expect("a buffer"));
        let call =
            call.admit(RpcMessage { buf: ReceivedBuf::whole(message), at: 0 }, ParsedHeader { entry: 0, len: 40 });
        let mut call = call.with_reply_buffer(reply, 160);
        let mut result = self.own.alloc(bytes).expect("a buffer");
        result.set_window(0, bytes);
        call.view_mut().set_result(0, result.freeze()).expect("there is room");
        call.answered(Ok(())).complete()
    }

    /// A call in a spare buffer, which needs `chunks` buffers of `long_buffers`, and one for its reply.
    fn bulk(&mut self, conn: &mut Conn, xid: u32, chunks: usize) -> Unready {
        let call = self.arrived(conn, xid, &vec![40_000; chunks]);
        let message = self.spare.pop().map(ReceivedBuf::whole).expect("a spare buffer");
        let entry = self.services.find(1, 1, BULK).expect("present");
        Unready::Admitted(call.admit(RpcMessage { buf: message, at: 0 }, ParsedHeader { entry, len: 40 }))
    }

    /// XIDs of the replies that were sent on a connection since the last call of this function.
    fn sent(&mut self, conn: &mut Conn) -> Vec<u32> {
        self.cx.post_chain(conn);
        let sent = self.cx.fabric.take_sent();
        sent.iter().map(|bytes| u32::from_be_bytes(bytes[..4].try_into().expect("a word"))).collect()
    }

    /// Allocates all buffers that a reply could use.
    fn empty_pool(&self) -> Vec<Buf> {
        std::iter::from_fn(|| self.cx.memory.pool.alloc(1)).collect()
    }

    /// Allocates all buffers that a reply could use, like an application that keeps them.
    fn keep_pool(&self) -> Vec<Frozen> {
        self.empty_pool().into_iter().map(Buf::freeze).collect()
    }
}

#[test]
fn each_call_is_answered_once() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=3 {
        scene.serve(&mut conn, xid, SHORT);
        assert_eq!(scene.sent(&mut conn), [xid]);
        assert!(conn.served.holds_nothing() && !scene.responder.has_waiting_work());
    }
    assert_eq!(scene.cx.stats.calls, 3);
}

#[test]
fn without_workers_their_procedures_run_on_the_shard() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    scene.serve(&mut conn, 5, ELSEWHERE);
    assert_eq!(scene.sent(&mut conn), [5]);
    assert!(conn.served.none_pending());
}

#[test]
fn calls_for_workers_wait_for_room_in_the_rings_and_return_once() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let mut workers = SimulatedWorkers::new(1, 2, Arc::clone(&scene.services));
    scene.responder.use_workers(&workers.pool);
    for xid in 1..=5 {
        scene.serve(&mut conn, xid, ELSEWHERE);
    }
    assert!(scene.responder.has_waiting_work() && !conn.served.none_pending());
    scene.cx.conns.insert(conn);
    let mut answered = Vec::new();
    for _ in 0..8 {
        scene.responder.continue_waiting(&mut scene.cx);
        workers.turn(0);
        scene.responder.collect(&mut scene.cx);
        let mut conn = scene.cx.conns.take_slot(0).expect("present");
        answered.extend(scene.sent(&mut conn));
        scene.cx.conns.restore(conn);
    }
    assert_eq!(answered, [1, 2, 3, 4, 5]);
    assert_eq!(scene.responder.pending.with_workers(), 0);
    assert!(scene.cx.conns.take_slot(0).expect("present").served.none_pending());
}

#[test]
fn deferred_calls_return_once_and_waiting_ones_follow() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=4 {
        scene.serve(&mut conn, xid, LATER);
    }
    let taken: Vec<_> = scene.held.try_iter().collect();
    assert_eq!(taken.iter().map(|call| call.info().xid()).collect::<Vec<_>>(), [1, 2], "as many as may be deferred");
    assert_eq!((scene.responder.pending.len(), conn.served.deferred, conn.served.not_handed_over.len()), (2, 2, 2));
    assert!(!conn.served.none_pending() && scene.sent(&mut conn).is_empty());
    scene.cx.conns.insert(conn);
    assert_eq!(scene.responder.collect(&mut scene.cx), 0);
    let mut taken = taken.into_iter();
    taken.next_back().expect("the second").answer(Ok(()));
    drop(taken.next().expect("the first"));
    assert_eq!(scene.responder.collect(&mut scene.cx), 2);
    assert_eq!((scene.cx.stats.calls_dropped, scene.cx.stats.calls_failed), (1, 1));
    // The shard collects other deferred calls when it answers one at once.
    let mut conn = scene.cx.conns.take_slot(0).expect("present");
    assert_eq!(scene.sent(&mut conn), [2, 1], "in the order of their return");
    scene.held.try_iter().for_each(|call| call.answer(Ok(())));
    scene.serve(&mut conn, 5, LATER);
    assert_eq!(conn.served.not_handed_over.len(), 1, "two are deferred until the shard collects them");
    scene.cx.conns.insert(conn);
    while scene.responder.collect(&mut scene.cx) > 0 {
        scene.held.try_iter().for_each(|call| call.answer(Ok(())));
    }
    let mut conn = scene.cx.conns.take_slot(0).expect("present");
    assert_eq!(scene.sent(&mut conn), [3, 4, 5]);
    assert!(conn.served.none_pending() && scene.responder.pending.is_empty());
}

#[test]
fn a_peer_that_receives_nothing_is_disconnected_while_others_have_deferred_calls() {
    let mut scene = Scene::new();
    let (mut stalled, mut conn) = (open_conn(0, true), open_conn(1, true));
    // A reply that never completes.
    scene.serve(&mut stalled, 1, SHORT);
    assert_eq!(scene.sent(&mut stalled), [1]);
    scene.serve(&mut conn, 2, LATER);
    let held = scene.empty_pool();
    scene.serve_held(&mut conn, 3);
    scene.cx.conns.insert(stalled);
    scene.cx.conns.insert(conn);
    let (mut checks, time) = (ObligationChecks::default(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    for _ in 0..20 {
        time.advance(Duration::from_secs(1));
        checks.control(&mut scene.cx);
        scene.responder.continue_waiting(&mut scene.cx);
    }
    assert_eq!(scene.cx.stats.peers_stalled, 1, "after `timeouts.progress`");
    assert!(
        scene.responder.waits_for_memory() && scene.cx.stats.calls_failed == 0,
        "the deferred call may free its buffers"
    );
    drop(held);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
}

#[test]
fn a_deferred_call_of_a_closed_connection_is_dropped() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=3 {
        scene.serve(&mut conn, xid, LATER);
    }
    let mut taken: Vec<_> = scene.held.try_iter().collect();
    assert!(!taken.iter().any(DeferredCall::is_disconnected));
    scene.responder.end_connection_calls(&mut scene.cx, &mut conn);
    assert!(taken.iter().all(DeferredCall::is_disconnected));
    assert!(conn.served.not_handed_over.is_empty(), "the third call is dropped");
    taken.pop().expect("the second").answer(Ok(()));
    drop(taken);
    assert_eq!(scene.responder.collect(&mut scene.cx), 2);
    assert_eq!(
        (scene.responder.pending.len(), scene.responder.replies.call_pool.len()),
        (0, 3),
        "the memory of all calls is back in the pool"
    );
}

#[test]
fn a_cached_call_of_a_closed_connection_runs_when_it_is_retransmitted() {
    let mut scene = Scene::new();
    let mut workers = SimulatedWorkers::new(1, 2, Arc::clone(&scene.services));
    scene.responder.use_workers(&workers.pool);
    let (mut closed, mut conn) = (open_conn(0, true), open_conn(1, true));
    scene.serve(&mut closed, 7, ONCE);
    scene.responder.end_connection_calls(&mut scene.cx, &mut closed);
    scene.responder.continue_waiting(&mut scene.cx);
    scene.responder.dispatch(&mut scene.cx);
    assert!(workers.turn(0));
    assert_eq!((scene.responder.collect(&mut scene.cx), scene.responder.pending.len()), (1, 0));
    assert_eq!(scene.cx.memory.receives.reservable(), 256, "its Receive can be reserved again");
    scene.serve(&mut conn, 7, ONCE);
    scene.responder.dispatch(&mut scene.cx);
    assert!(workers.turn(0), "the first one did not run");
    scene.cx.conns.insert(conn);
    scene.responder.collect(&mut scene.cx);
    let mut conn = scene.cx.conns.take_slot(1).expect("present");
    assert_eq!((scene.sent(&mut conn), scene.cx.stats.calls), (vec![7], 1));
}

#[test]
fn a_host_that_reconnects_waits_for_its_own_calls() {
    let mut scene = Scene::new();
    scene.cx.config.limits.max_deferred = 8;
    scene.responder.admission = Admission::new(12);
    let conn = |slot, host: &str| {
        let mut conn = open_conn(slot, true);
        conn.set_accepted(PeerInfo::new(host, 0), None);
        conn
    };
    let mut held = Vec::new();
    for slot in 0..4 {
        let mut conn = conn(slot, "192.0.2.1:7");
        (1..=4).for_each(|xid| scene.serve(&mut conn, xid, LATER));
        held.extend(scene.held.try_iter());
        scene.responder.end_connection_calls(&mut scene.cx, &mut conn);
    }
    assert_eq!(
        (held.len(), scene.responder.not_handed_over, scene.responder.owners_with_orphans()[0].orphans(false)),
        (6, 0, 6)
    );
    assert_eq!(scene.cx.memory.receives.reservable(), 256 - 6);
    let (mut late, mut other) = (conn(4, "192.0.2.1:7"), conn(5, "192.0.2.2:7"));
    scene.serve(&mut late, 1, LATER);
    scene.serve(&mut other, 2, LATER);
    assert_eq!(
        scene.held.try_iter().map(|call| call.info().xid()).collect::<Vec<_>>(),
        [2],
        "the other host's call does not wait"
    );
    scene.cx.conns.insert(late);
    scene.cx.conns.insert(other);
    held.truncate(5);
    scene.responder.collect(&mut scene.cx);
    scene.responder.control(&mut scene.cx, false);
    assert_eq!(scene.held.try_iter().map(|call| call.info().xid()).collect::<Vec<_>>(), [1]);
    drop(held);
    while scene.responder.collect(&mut scene.cx) > 0 {}
    assert!(scene.responder.pending.is_empty() && scene.responder.owners_with_orphans().is_empty());
    assert_eq!(scene.cx.memory.receives.reservable(), 256);
}

#[test]
fn a_connection_beyond_its_quota_delays_no_other() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    // The device reports no completions, so all replies stay outstanding.
    let held = scene.empty_pool();
    let few = held.len() / 8;
    let mut held = held;
    held.truncate(held.len() - few);
    let mut xid = 0;
    while !conn.served.awaits_completions() {
        xid += 1;
        assert!(xid < 16, "buffers are scarce, so a call must wait");
        scene.serve_held(&mut conn, xid);
    }
    let mut other = open_conn(1, true);
    scene.serve_held(&mut other, 100);
    assert!(!other.served.awaits_completions(), "it holds no buffers yet");
    assert!(conn.served.held(&conn.proto, false) + conn.sends.under_way() as usize > 1);
    assert_eq!(scene.responder.admission.queue.len(), 1);
    scene.cx.conns.insert(conn);
    let reported = |scene: &mut Scene| {
        scene.responder.continue_waiting(&mut scene.cx);
        scene.responder.admission.queue.reported()
    };
    assert_eq!(reported(&mut scene), 0);
    time.advance(Duration::from_secs(1));
    assert_eq!(reported(&mut scene), 1, "calls beyond a quota are logged, too");
    let mut conn = scene.cx.conns.take_slot(0).expect("present");
    scene.responder.end_connection_calls(&mut scene.cx, &mut conn);
    assert_eq!((scene.responder.admission.queue.len(), conn.served.awaits_completions()), (0, false));
}

#[test]
fn replies_beyond_the_write_limit_delay_no_others() {
    let mut scene = Scene::new();
    scene.cx.config.limits.max_write_bytes = Some(1000);
    let (mut conn, mut other) = (open_conn(0, true), open_conn(1, true));
    let mut goes = |conn: &mut Conn, xid: u32, bytes: usize| {
        let reply = scene.answered(conn, xid, bytes);
        let delayed = conn.served.delayed.len();
        scene.responder.replies.send_paced(&mut scene.cx, conn, reply);
        conn.served.delayed.len() == delayed
    };
    assert!(goes(&mut conn, 1, 5000), "a reply that exceeds the limit by itself is sent alone");
    assert!(!goes(&mut conn, 2, 600) && !goes(&mut conn, 3, 400));
    assert!(goes(&mut conn, 4, 0), "it has no RDMA Writes");
    assert!(goes(&mut other, 5, 600) && goes(&mut other, 6, 400), "nothing is outstanding there");
    assert!(!goes(&mut other, 7, 1));
    assert!(conn.sends.awaits_end(), "a completion was requested");
    assert_eq!((scene.cx.stats.write_waits, scene.responder.replies.delayed), (3, 3));
    conn.sends.send_completed(1);
    scene.responder.resume(&mut scene.cx, &mut conn);
    assert!(!conn.served.awaits_completions() && other.served.awaits_completions());
    scene.responder.end_connection_calls(&mut scene.cx, &mut other);
    assert_eq!((scene.responder.replies.delayed, other.served.awaits_completions()), (0, false));
}

fn must_wait(scene: &mut Scene, conn: &mut Conn, call: &Unready) -> bool {
    let Scene { responder: Responder { admission, procedures, .. }, cx, .. } = scene;
    admission.must_wait(cx, conn, procedures.of(call), call).is_some()
}

#[test]
fn calls_without_memory_wait_and_start_in_order() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let held = scene.empty_pool();
    for xid in 1..=3 {
        scene.serve_held(&mut conn, xid);
    }
    assert!(scene.responder.waits_for_memory() && scene.responder.has_waiting_work());
    assert!(scene.sent(&mut conn).is_empty());
    drop(held);
    scene.cx.conns.insert(conn);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 3);
    let mut conn = scene.cx.conns.take_slot(0).expect("present");
    assert_eq!(scene.sent(&mut conn), [1, 2, 3]);
    assert!(!scene.responder.has_waiting_work());
}

#[test]
fn calls_of_closed_connections_leave_the_queue() {
    let mut scene = Scene::new();
    let (mut closing, mut open) = (open_conn(0, true), open_conn(1, true));
    let held = scene.empty_pool();
    scene.serve_held(&mut closing, 1);
    scene.serve_held(&mut open, 2);
    scene.serve_held(&mut closing, 3);
    scene.responder.end_connection_calls(&mut scene.cx, &mut closing);
    assert_eq!(scene.responder.admission.queue.len(), 1, "only the open connection's call is left");
    drop(held);
    scene.cx.conns.insert(open);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1, "the call of the open connection");
    let mut open = scene.cx.conns.take_slot(1).expect("present");
    assert_eq!(scene.sent(&mut open), [2]);
}

#[test]
fn a_closed_connection_leaves_no_reservation() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let held = scene.empty_pool();
    scene.serve_held(&mut conn, 1);
    assert!(scene.cx.memory.has_awaited_sizes());
    drop(held);
    scene.responder.end_connection_calls(&mut scene.cx, &mut conn);
    assert!(scene.responder.has_waiting_work(), "the next turn releases the size");
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 0);
    assert!(!scene.cx.memory.has_awaited_sizes() && !scene.responder.has_waiting_work());
}

/// The second counts anew for each call, even if others have waited for the same buffers.
#[test]
fn a_call_without_a_prospect_of_buffers_is_refused_after_a_second() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut closing, mut open) = (open_conn(0, true), open_conn(1, true));
    let _kept = scene.keep_pool();
    scene.serve_held(&mut closing, 1);
    scene.cx.conns.insert(closing);
    scene.responder.continue_waiting(&mut scene.cx);
    let mut closing = scene.cx.conns.take_slot(0).expect("present");
    scene.responder.end_connection_calls(&mut scene.cx, &mut closing);
    let _kept_too = scene.keep_pool();
    time.advance(Duration::from_secs(10));
    scene.serve_held(&mut open, 2);
    let _kept_as_well: Vec<_> = scene.spare.drain(..).map(Buf::freeze).collect();
    scene.cx.conns.insert(open);
    for millis in [0, 999] {
        time.advance(Duration::from_millis(millis));
        scene.responder.continue_waiting(&mut scene.cx);
        assert_eq!(scene.responder.admission.queue.len(), 1, "after {millis} ms");
    }
    time.advance(Duration::from_millis(1));
    scene.responder.continue_waiting(&mut scene.cx);
    assert!(!scene.responder.waits_for_memory() && scene.cx.stats.pool_empty == 1);
}

/// The second and later ones wait for their quota, or for the call before them, until the first one is refused.
#[test]
fn unservable_calls_of_a_connection_are_refused_in_the_same_second() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    let calls: Vec<_> = (1..=4).map(|xid| scene.bulk(&mut conn, xid, 1)).collect();
    let _kept = scene.keep_pool();
    calls.into_iter().for_each(|call| scene.responder.start(&mut scene.cx, &mut conn, call));
    scene.cx.conns.insert(conn);
    let mut pass = |millis| {
        time.advance(Duration::from_millis(millis));
        scene.responder.control(&mut scene.cx, false);
        scene.responder.continue_waiting(&mut scene.cx);
        // A refusal that is being sent counts as a prospect of memory.
        let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
        scene.sent(&mut conn);
        scene.cx.conns.insert(conn);
        (scene.responder.admission.queue.len(), scene.cx.stats.pool_empty)
    };
    assert_eq!([0, 999].map(&mut pass), [(4, 0); 2]);
    (0..10).for_each(|_| _ = pass(10));
    assert_eq!(pass(10), (0, 4));
}

/// Otherwise peers with many unanswered calls would hold all of it.
#[test]
fn short_replies_do_not_use_bulk_memory() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let longest = scene.cx.memory.longest_suitable(1);
    let held: Vec<_> = std::iter::from_fn(|| scene.cx.memory.pool.alloc_within(1, longest)).collect();
    scene.serve_held(&mut conn, 1);
    assert!(scene.responder.waits_for_memory() && scene.sent(&mut conn).is_empty());
    assert_eq!(scene.cx.memory.pool.room(1).0, 4, "the `long_buffers` are free");
    let call = &scene.responder.admission.queue.iter().next().expect("a waiting call").call;
    let demand = Demand::new(&scene.cx.memory, scene.responder.procedures.of(call), call);
    let deficit = demand.deficit(&scene.cx.memory);
    assert_eq!(demand.beyond_pool(&scene.cx.memory, call), None);
    assert!(deficit.to_string().ends_with("exist (`memory.small_buffers`)"), "{deficit}");
    drop(held);
    scene.cx.conns.insert(conn);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
}

/// Deferred calls hold reply buffers, so that there is a prospect of freed ones.
#[test]
fn calls_with_bulk_that_lack_room_for_their_reply_wait_for_deferred_ones() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut deferred, mut conn) = (open_conn(0, true), open_conn(1, true));
    scene.serve(&mut deferred, 1, LATER);
    let longest = scene.cx.memory.longest_suitable(1);
    let held: Vec<_> = std::iter::from_fn(|| scene.cx.memory.pool.alloc_within(1, longest)).collect();
    let call = scene.bulk(&mut conn, 2, 1);
    scene.responder.start(&mut scene.cx, &mut conn, call);
    assert_eq!(scene.responder.admission.queue.len(), 1);
    scene.cx.conns.insert(deferred);
    scene.cx.conns.insert(conn);
    for _ in 0..30 {
        time.advance(Duration::from_millis(100));
        scene.responder.continue_waiting(&mut scene.cx);
    }
    assert!(scene.responder.waits_for_memory() && scene.cx.stats.calls_failed == 0);
    drop(held);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
}

/// The further buffers of the call count as allocated, so that they are beyond its connection's quota.
#[test]
fn all_buffers_of_a_call_count_for_its_quota() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let _under_way = scene.bulk(&mut conn, 1, 1);
    let _held = scene.cx.memory.pool.alloc(40_000).expect("one of four");
    let call = scene.bulk(&mut conn, 3, 4);
    assert!(must_wait(&mut scene, &mut conn, &call));
    conn.proto.forget(call.id());
    let call = scene.bulk(&mut conn, 4, 1);
    assert!(!must_wait(&mut scene, &mut conn, &call), "one buffer is within the quota");
}

#[test]
fn a_call_behind_a_waiting_one_of_its_connection_has_that_as_its_cause() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let _under_way = scene.bulk(&mut conn, 1, 1);
    let _held = scene.cx.memory.pool.alloc(40_000).expect("one of four");
    for (xid, chunks) in [(2, 4), (3, 1)] {
        let call = scene.bulk(&mut conn, xid, chunks);
        scene.responder.start(&mut scene.cx, &mut conn, call);
    }
    let causes: Vec<_> = scene.responder.admission.queue.iter().map(|waiting| waiting.cause.to_string()).collect();
    assert_eq!(causes.len(), 2, "{causes:?}");
    assert!(causes[0].contains("4 buffers of at least"), "{causes:?}");
    assert_eq!(causes[1], "an earlier call of its connection waits");
    assert_eq!((scene.cx.stats.memory_waits, scene.cx.stats.read_waits), (2, 0));
}

/// Such calls may wait for an event or a lock without limit.
#[test]
fn calls_without_chunks_do_not_count_for_the_quota_of_bulk_memory() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    scene.serve(&mut conn, 1, LATER);
    let header = scene.cx.memory.alloc(8).expect("a buffer");
    conn.sends.push_send(header, None, 16);
    let _held = scene.cx.memory.pool.alloc(40_000).expect("one of four");
    let call = scene.bulk(&mut conn, 3, 4);
    assert!(!must_wait(&mut scene, &mut conn, &call));
    let header = scene.cx.memory.alloc(8).expect("a buffer");
    conn.sends.record_writes(8, false);
    conn.sends.push_send(header, None, 16);
    assert!(must_wait(&mut scene, &mut conn, &call), "outstanding results count");
    conn.sends.send_completed(2);
    assert!(!must_wait(&mut scene, &mut conn, &call));
}

/// Calls that need one buffer overtake it, except during its reservation.
#[test]
fn a_call_that_needs_many_buffers_is_overtaken_outside_its_reservation() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut many, mut one) = (open_conn(0, true), open_conn(1, true));
    let bulk = |scene: &mut Scene, conn: &mut Conn, xid: u32, chunks: usize| {
        let call = scene.bulk(conn, xid, chunks);
        scene.responder.start(&mut scene.cx, conn, call);
    };
    let mut held = vec![scene.cx.memory.pool.alloc(40_000).expect("a buffer")];
    bulk(&mut scene, &mut many, 1, 4);
    bulk(&mut scene, &mut one, 2, 1);
    assert_eq!(scene.responder.admission.queue.len(), 2, "three are free, the first call needs four and reserves them");
    scene.cx.conns.insert(many);
    scene.cx.conns.insert(one);
    let pass = |scene: &mut Scene, millis| {
        time.advance(Duration::from_millis(millis));
        scene.responder.continue_waiting(&mut scene.cx)
    };
    assert_eq!((pass(&mut scene, 1), pass(&mut scene, 998)), (0, 0), "the later call waits");
    assert_eq!(pass(&mut scene, 2), 1, "the reservation ends after a second");
    let mut one = scene.cx.conns.take_slot(1).expect("present");
    bulk(&mut scene, &mut one, 3, 1);
    assert_eq!(scene.responder.admission.queue.len(), 1, "without a reservation a new call starts");
    scene.cx.conns.restore(one);
    assert_eq!((pass(&mut scene, 4000), scene.responder.admission.queue.len()), (0, 1));
    let mut one = scene.cx.conns.take_slot(1).expect("present");
    bulk(&mut scene, &mut one, 4, 1);
    assert_eq!(scene.responder.admission.queue.len(), 2, "the next reservation delays new calls again");
    scene.cx.conns.restore(one);
    held.clear();
    scene.cx.fabric.take_sent();
    assert!(pass(&mut scene, 1) >= 1, "enough buffers are free");
}

/// A message may be in a longer buffer than necessary.
#[test]
fn the_buffer_of_a_calls_own_message_is_not_part_of_its_demand() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let long = scene.cx.memory.pool.alloc(40_000).expect("a buffer");
    let _held = scene.empty_pool();
    scene.serve_message(&mut conn, 1, SHORT, long);
    let call = &scene.responder.admission.queue.iter().next().expect("a waiting call").call;
    let demand = Demand::new(&scene.cx.memory, scene.responder.procedures.of(call), call);
    assert_eq!(demand.deficit(&scene.cx.memory).size, 512, "only a reply buffer is missing");
}

/// The later call also waits for a longer buffer, and gets none before.
#[test]
fn the_call_that_has_waited_longest_gets_a_freed_buffer() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let call = scene.bulk(&mut later, 2, 1);
    let mut held = scene.empty_pool();
    scene.serve_held(&mut first, 1);
    time.advance(Duration::from_millis(1));
    scene.responder.start(&mut scene.cx, &mut later, call);
    assert_eq!(scene.responder.admission.queue.len(), 2);
    scene.cx.conns.insert(first);
    scene.cx.conns.insert(later);
    for len in [512, 65536] {
        let one = held.iter().position(|buf| buf.capacity() == len).expect("an allocated one");
        held.swap_remove(one);
    }
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
    let mut first = scene.cx.conns.take_slot(0).expect("present");
    assert_eq!(scene.sent(&mut first), [1], "the later one needs the same size for its reply");
}

#[test]
fn a_call_starts_without_a_reservation_when_enough_buffers_are_free() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let mut held: Vec<_> = (0..3).map(|_| scene.cx.memory.pool.alloc(40_000).expect("one of four")).collect();
    for (slot, chunks) in [(0, 4), (1, 2)] {
        let mut conn = open_conn(slot, true);
        let call = scene.bulk(&mut conn, 1, chunks);
        scene.responder.start(&mut scene.cx, &mut conn, call);
        scene.cx.conns.insert(conn);
    }
    for _ in 0..3 {
        time.advance(Duration::from_millis(600));
        assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 0);
    }
    assert!(
        !scene.cx.memory.has_awaited_sizes() && scene.responder.admission.queue.len() == 2,
        "the reservation has ended"
    );
    held.pop();
    assert_eq!(
        (scene.responder.continue_waiting(&mut scene.cx), scene.responder.admission.queue.len()),
        (1, 1),
        "the call that needs two"
    );
}

/// Later calls cannot use buffers of the sizes that the first one reserves.
#[test]
fn a_call_gathers_several_buffers_before_later_calls() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let (all, one) = (scene.bulk(&mut first, 1, 4), scene.bulk(&mut later, 2, 1));
    let mut held = scene.empty_pool();
    let mut free_one = |len: usize| {
        let one = held.iter().position(|buf| buf.capacity() == len).expect("an allocated one");
        drop(held.swap_remove(one));
    };
    (0..3).for_each(|_| free_one(65536));
    scene.responder.start(&mut scene.cx, &mut first, all);
    time.advance(Duration::from_millis(1));
    scene.responder.start(&mut scene.cx, &mut later, one);
    scene.cx.conns.insert(first);
    scene.cx.conns.insert(later);
    free_one(512);
    assert_eq!(
        scene.responder.continue_waiting(&mut scene.cx),
        0,
        "a reply buffer and three others are free, and the later call starts with none"
    );
    free_one(65536);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
    let mut first = scene.cx.conns.take_slot(0).expect("present");
    assert_eq!(scene.sent(&mut first).len(), 1);
}

/// A call that needs only a reply buffer respects reserved sizes, too.
#[test]
fn short_replies_do_not_use_reserved_sizes() {
    let mut config = small();
    config.memory.small_buffers = 4096;
    let mut scene = Scene::with(config);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let mut held = scene.empty_pool();
    scene.serve_held(&mut first, 1);
    assert!(scene.cx.memory.is_awaited(512));
    held.clear();
    scene.serve_held(&mut later, 2);
    assert_eq!((scene.responder.admission.queue.len(), scene.sent(&mut later)), (2, vec![]));
    scene.cx.conns.insert(first);
    scene.cx.conns.insert(later);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 2);
}

/// A call that needs one buffer of each of two sizes reserves both, once one of them is free.
#[test]
fn a_call_that_lacks_one_of_two_sizes_reserves_both_for_a_second() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    let call = scene.bulk(&mut conn, 1, 1);
    let mut held = scene.empty_pool();
    scene.responder.start(&mut scene.cx, &mut conn, call);
    scene.cx.conns.insert(conn);
    let mut free_one = |scene: &mut Scene, len: usize| {
        let one = held.iter().position(|buf| buf.capacity() == len).expect("an allocated one");
        held.swap_remove(one);
        scene.responder.continue_waiting(&mut scene.cx)
    };
    let awaited = |scene: &Scene| [512, 65536].map(|len| scene.cx.memory.is_awaited(len));
    assert_eq!(awaited(&scene), [false, true], "it waits for the longer size");
    assert_eq!((free_one(&mut scene, 65536), awaited(&scene)), (0, [true, true]));
    time.advance(Duration::from_millis(999));
    assert_eq!((scene.responder.continue_waiting(&mut scene.cx), awaited(&scene)), (0, [true, true]));
    time.advance(Duration::from_millis(1));
    assert_eq!(
        (scene.responder.continue_waiting(&mut scene.cx), awaited(&scene)),
        (0, [true, false]),
        "the reservation has ended"
    );
    assert_eq!((free_one(&mut scene, 512), awaited(&scene)), (1, [false, false]));
}

#[test]
fn waiting_calls_are_counted_and_logged_after_a_second() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut conn, mut other) = (open_conn(0, true), open_conn(1, true));
    scene.serve(&mut other, 1, LATER);
    let held = scene.empty_pool();
    scene.serve_held(&mut conn, 2);
    time.advance(Duration::from_millis(700));
    scene.serve_held(&mut conn, 3);
    scene.cx.conns.insert(conn);
    scene.cx.conns.insert(other);
    let waiting = |scene: &mut Scene| {
        scene.responder.continue_waiting(&mut scene.cx);
        let mut stats = ShardStats::default();
        scene.responder.add_to(&mut stats, scene.cx.clock.read());
        (stats.calls_waiting, stats.longest_wait / 1_000_000, scene.responder.admission.queue.reported())
    };
    assert_eq!(waiting(&mut scene), (2, 700, 0));
    time.advance(Duration::from_millis(300));
    assert_eq!(waiting(&mut scene), (2, 1000, 1), "the first was logged");
    drop(held);
    assert_eq!(waiting(&mut scene), (0, 0, 0));
}

/// Version 1 tolerates more calls than credits, but no Receives are reserved for them.
#[test]
fn calls_beyond_the_credit_limit_do_not_wait_while_receives_are_short() {
    for short in [false, true] {
        let mut scene = Scene::new();
        let mut conn = open_conn(0, true);
        conn.set_accepted(PeerInfo::new("192.0.2.1:700", 0), None);
        let limit = conn.proto.credits().credit_limit();
        if short {
            let too_many = scene.cx.memory.receives.posted() as u32 + 1;
            scene.cx.memory.receives.reserve(&mut conn.receive_reservation, too_many, 0);
        }
        let size = scene.cx.config.wire.receive_size;
        let messages: Vec<_> = (0..=limit).map(|_| scene.cx.memory.alloc(size).expect("a buffer")).collect();
        let _kept = scene.empty_pool();
        for (xid, message) in (1..).zip(messages) {
            scene.serve_message(&mut conn, xid, SHORT, message);
        }
        let shed = u64::from(short);
        assert_eq!(scene.cx.stats.calls_shed, shed);
        let waiting = scene.responder.admission.queue.len();
        assert_eq!(waiting as u64, u64::from(limit) + 1 - shed);
        assert_eq!(conn.stage() == Stage::Draining, short, "its client retransmits the call");
    }
}

/// Each turn has a pass while a call lacks a buffer, so its time must not grow with the number of waiting calls.
#[test]
fn passes_without_freed_buffers_try_few_calls() {
    let mut scene = Scene::new();
    let _held = scene.empty_pool();
    let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
    let messages = Pool::new(&PoolConfig { classes: vec![Class { size: 2048, count: 256 }], arena }).expect("memory");
    for slot in 0..32 {
        let mut conn = open_conn(slot, true);
        for xid in 1..=8 {
            scene.serve_message(&mut conn, xid, SHORT, messages.alloc(1024).expect("a buffer"));
        }
        scene.cx.conns.insert(conn);
    }
    scene.responder.continue_waiting(&mut scene.cx);
    let queue = &scene.responder.admission.queue;
    assert!(queue.iter().filter(|waiting| waiting.cause.is_own()).count() > 32, "beyond the quotas of connections");
    let numbers = |scene: &Scene| -> Vec<u32> {
        scene.responder.admission.queue.iter().map(|waiting| waiting.call.id().index() as u32).collect()
    };
    let before = numbers(&scene);
    let tries = |scene: &mut Scene| {
        scene.responder.admission.queue.begin_pass(&mut scene.cx, 0);
        let mut tries = 0;
        while let Some(waiting) = scene.responder.admission.queue.next_candidate(&scene.cx) {
            tries += 1;
            let conn = scene.cx.conns.take(waiting.call.qp()).expect("present");
            scene.cx.with_conn(conn, |cx, conn| scene.responder.retry(cx, conn, waiting, 0));
        }
        scene.responder.admission.queue.end_pass(&mut scene.cx, 0);
        tries
    };
    assert_eq!(tries(&mut scene), 1, "the first call reserves the size");
    scene.responder.admission.queue.request_pass();
    assert!(tries(&mut scene) > 32, "a requested pass also tries the calls beyond a quota");
    assert_eq!(numbers(&scene), before, "all keep their places");
}
