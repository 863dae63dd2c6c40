use std::sync::{Arc, mpsc};
use std::time::Duration;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Frozen, PagePolicy, Pool, PoolConfig};

use super::*;
use crate::config::Config;
use crate::cross_thread::parker::{Sleeper, Wake};
use crate::fabric::ReceivedBuf;
use crate::proto::{Lists, Received};
use crate::service::duplicate_requests::{Client, DuplicateRequestCache, DuplicateRequestCacheConfig};
use crate::service::{DeferredCall, Header, Procedure, Replying, Services};
use crate::shard::checks::ObligationChecks;
use crate::shard::clock::{Clock, SimulatedTime};
use crate::shard::peer_events::PeerInfo;
use crate::shard::testing::{NoDevice, call, context, handle, message, message_with_lists, open_conn, received, small};
use crate::wire::Segment;

/// Answers with four bytes.
const SHORT: u32 = 1;
/// Runs on workers.
const ELSEWHERE: u32 = 2;

/// Is taken, and held by the scene.
const LATER: u32 = 3;

/// Returns bulk data.
const BULK: u32 = 4;
/// Runs on workers, with a duplicate request cache.
const ONCE: u32 = 5;

struct Scene {
    responder: Responder,
    services: Arc<Services>,
    held: mpsc::Receiver<DeferredCall>,
    cx: Context<NoDevice>,
    /// Receives that were taken before the pool was emptied.
    spare: Vec<Buf>,
    /// Memory of the service's own.
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
        services.add(1, 1, LATER, Procedure::deferred(move |call| hold.send(call).expect("it is held")));
        let mut cx = context(config);
        cx.config.limits.max_deferred = 2;
        let signal = Sleeper::new(Wake::Fabric(cx.fabric.waker())).signal();
        let responder = Responder::new(Some(services.to_local()), signal, 128);
        let spare = std::iter::from_fn(|| cx.memory.alloc(cx.config.wire.receive_size)).take(16).collect();
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let own = Pool::new(&PoolConfig { classes: vec![Class { size: 8192, count: 16 }], arena }).expect("memory");
        Self { responder, services: Arc::new(services), held, cx, spare, own }
    }

    /// A call comes.
    fn serve(&mut self, conn: &mut Conn, xid: u32, procedure: u32) {
        let buf = self.cx.memory.alloc(self.cx.config.wire.receive_size).expect("a buffer");
        self.serve_message(conn, xid, procedure, buf);
    }

    /// A call comes, in this buffer.
    fn serve_message(&mut self, conn: &mut Conn, xid: u32, procedure: u32, buf: Buf) {
        let Self { responder, cx, .. } = self;
        let message = received(buf, &message(16, &call(xid, procedure)));
        let (Received::Call { id }, header) = handle(conn, &message) else { panic!("it is a call") };
        let call = responder.take_call(cx, conn, id, &header.head);
        match &header.lists {
            Lists::Checked(checked) => responder.accept_checked(cx, conn, call, checked, message),
            _ => responder.accept_decoded(cx, conn, call, &header, message),
        }
    }

    /// A call comes, in a buffer set aside before: those that are left in the pool stay there.
    fn serve_held(&mut self, conn: &mut Conn, xid: u32) {
        let message = self.spare.pop().expect("as many as the test needs");
        self.serve_message(conn, xid, SHORT, message);
    }

    /// A call that has come, with Write chunks of so many bytes.
    fn arrived(&mut self, conn: &mut Conn, xid: u32, writes: &[u32]) -> Call<Arrived> {
        let Self { responder, cx, .. } = self;
        let write_list = writes.iter().flat_map(|&len| [1, 1, 1, len, 0, 0]);
        let lists: Vec<u32> = [0].into_iter().chain(write_list).chain([0, 0]).collect();
        let message = message_with_lists(16, &lists, &call(xid, SHORT));
        let message = received(cx.memory.alloc(cx.config.wire.receive_size).expect("a buffer"), &message);
        let (Received::Call { id }, header) = handle(conn, &message) else { panic!("it is a call") };
        let mut call = responder.take_call(cx, conn, id, &header.head);
        for &length in writes {
            call.begin_chunks().take_write([Segment { handle: 1, length, offset: 0 }]);
        }
        call
    }

    /// A call that is answered, with so many bytes for a Write chunk.
    fn answered(&mut self, conn: &mut Conn, xid: u32, bytes: usize) -> Call<Replying> {
        // A chunk without room takes no result, not even an empty one.
        let call = self.arrived(conn, xid, &[bytes.max(1) as u32]);
        let (message, reply) =
            (self.cx.memory.alloc(100).expect("a buffer"), self.cx.memory.alloc(200).expect("a buffer"));
        let call = call.admit(RpcMessage { buf: ReceivedBuf::whole(message), at: 0 }, Header { entry: 0, len: 40 });
        let mut call = call.with_reply_buffer(reply, 160);
        let mut result = self.own.alloc(bytes).expect("a buffer");
        result.set_window(0, bytes);
        call.view_mut().set_result(0, result.freeze()).expect("there is room");
        call.answered(Ok(())).complete()
    }

    /// A call that needs so many buffers of `long_buffers`, and one for its reply, in a message that was spared.
    fn bulk(&mut self, conn: &mut Conn, xid: u32, chunks: usize) -> Unready {
        let call = self.arrived(conn, xid, &vec![40_000; chunks]);
        let message = self.spare.pop().map(ReceivedBuf::whole).expect("as many as the test needs");
        let entry = self.services.find(1, 1, BULK).expect("it is there");
        Unready::Admitted(call.admit(RpcMessage { buf: message, at: 0 }, Header { entry, len: 40 }))
    }

    /// The XIDs of the replies that were sent on a connection since it was asked last.
    fn sent(&mut self, conn: &mut Conn) -> Vec<u32> {
        self.cx.post_chain(conn);
        let sent = self.cx.fabric.take_sent();
        sent.iter().map(|bytes| u32::from_be_bytes(bytes[..4].try_into().expect("a word"))).collect()
    }

    /// Takes all buffers that a reply would do with.
    fn empty_pool(&self) -> Vec<Buf> {
        std::iter::from_fn(|| self.cx.memory.pool.alloc(1)).collect()
    }

    /// Takes all buffers that a reply would do with, as an application that keeps them.
    fn keep_pool(&self) -> Vec<Frozen> {
        self.empty_pool().into_iter().map(Buf::freeze).collect()
    }
}

#[test]
fn a_call_is_answered_once_and_its_box_comes_back() {
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
fn without_workers_their_procedures_run_here() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    scene.serve(&mut conn, 5, ELSEWHERE);
    assert_eq!(scene.sent(&mut conn), [5]);
    assert!(conn.served.none_pending());
}

#[test]
fn calls_for_workers_are_held_back_until_they_are_taken_and_come_home_once() {
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
        let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
        answered.extend(scene.sent(&mut conn));
        scene.cx.conns.restore(conn);
    }
    assert_eq!(answered, [1, 2, 3, 4, 5]);
    assert_eq!(scene.responder.pending.with_workers(), 0);
    assert!(scene.cx.conns.take_slot(0).expect("it is there").served.none_pending());
}

#[test]
fn calls_that_are_taken_come_home_once_and_make_room_for_others() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=4 {
        scene.serve(&mut conn, xid, LATER);
    }
    let taken: Vec<_> = scene.held.try_iter().collect();
    assert_eq!(taken.iter().map(|call| call.info().xid()).collect::<Vec<_>>(), [1, 2], "as many as may be out");
    assert_eq!((scene.responder.pending.len(), conn.served.deferred, conn.served.not_handed_over.len()), (2, 2, 2));
    assert!(!conn.served.none_pending() && scene.sent(&mut conn).is_empty());
    scene.cx.conns.insert(conn);
    assert_eq!(scene.responder.collect(&mut scene.cx), 0);
    let mut taken = taken.into_iter();
    taken.next_back().expect("the second").answer(Ok(()));
    drop(taken.next().expect("the first"));
    assert_eq!(scene.responder.collect(&mut scene.cx), 2);
    assert_eq!((scene.cx.stats.calls_dropped, scene.cx.stats.calls_failed), (1, 1));
    // With one that is answered here, another thread's comes home.
    let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
    assert_eq!(scene.sent(&mut conn), [2, 1], "in the order in which they came home");
    scene.held.try_iter().for_each(|call| call.answer(Ok(())));
    scene.serve(&mut conn, 5, LATER);
    assert_eq!(conn.served.not_handed_over.len(), 1, "two are out until they are seen to be home");
    scene.cx.conns.insert(conn);
    while scene.responder.collect(&mut scene.cx) > 0 {
        scene.held.try_iter().for_each(|call| call.answer(Ok(())));
    }
    let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
    assert_eq!(scene.sent(&mut conn), [3, 4, 5]);
    assert!(conn.served.none_pending() && scene.responder.pending.is_empty());
}

#[test]
fn a_peer_that_takes_nothing_is_evicted_with_calls_away() {
    let mut scene = Scene::new();
    let (mut stalled, mut conn) = (open_conn(0, true), open_conn(1, true));
    // A reply that never leaves.
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
    assert_eq!(scene.cx.stats.peers_stalled, 1, "after `progress_timeout`");
    assert!(scene.responder.waits_for_memory() && scene.cx.stats.calls_failed == 0, "what is away may come home");
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
    scene.responder.connection_lost(&mut scene.cx, &mut conn);
    assert!(taken.iter().all(DeferredCall::is_disconnected));
    assert!(conn.served.not_handed_over.is_empty(), "the third is nobody's");
    taken.pop().expect("the second").answer(Ok(()));
    drop(taken);
    assert_eq!(scene.responder.collect(&mut scene.cx), 2);
    assert_eq!(
        (scene.responder.pending.len(), scene.responder.replies.boxes.len()),
        (0, 3),
        "the boxes are there for others"
    );
}

#[test]
fn a_cached_call_of_a_closed_connection_runs_when_it_is_retransmitted() {
    let mut scene = Scene::new();
    let mut workers = SimulatedWorkers::new(1, 2, Arc::clone(&scene.services));
    scene.responder.use_workers(&workers.pool);
    let (mut closed, mut conn) = (open_conn(0, true), open_conn(1, true));
    scene.serve(&mut closed, 7, ONCE);
    scene.responder.connection_lost(&mut scene.cx, &mut closed);
    scene.responder.continue_waiting(&mut scene.cx);
    scene.responder.dispatch(&mut scene.cx);
    assert!(workers.turn(0));
    assert_eq!((scene.responder.collect(&mut scene.cx), scene.responder.pending.len()), (1, 0));
    assert_eq!(scene.cx.memory.receives.unpromised(), 256, "its receive is back");
    scene.serve(&mut conn, 7, ONCE);
    scene.responder.dispatch(&mut scene.cx);
    assert!(workers.turn(0), "the first one did nothing");
    scene.cx.conns.insert(conn);
    scene.responder.collect(&mut scene.cx);
    let mut conn = scene.cx.conns.take_slot(1).expect("it is there");
    assert_eq!((scene.sent(&mut conn), scene.cx.stats.calls), (vec![7], 1));
}

#[test]
fn a_host_that_reconnects_waits_for_its_own_calls() {
    let mut scene = Scene::new();
    scene.cx.config.limits.max_deferred = 8;
    scene.responder.admission = Admission::new(12);
    let conn = |slot, host: &str| {
        let mut conn = open_conn(slot, true);
        conn.was_accepted(PeerInfo::new(host, 0), None);
        conn
    };
    let mut held = Vec::new();
    for slot in 0..4 {
        let mut conn = conn(slot, "192.0.2.1:7");
        (1..=4).for_each(|xid| scene.serve(&mut conn, xid, LATER));
        held.extend(scene.held.try_iter());
        scene.responder.connection_lost(&mut scene.cx, &mut conn);
    }
    assert_eq!(
        (held.len(), scene.responder.not_handed_over, scene.responder.owners_with_orphans()[0].orphans(false)),
        (6, 0, 6)
    );
    assert_eq!(scene.cx.memory.receives.unpromised(), 256 - 6);
    let (mut late, mut other) = (conn(4, "192.0.2.1:7"), conn(5, "192.0.2.2:7"));
    scene.serve(&mut late, 1, LATER);
    scene.serve(&mut other, 2, LATER);
    assert_eq!(scene.held.try_iter().map(|call| call.info().xid()).collect::<Vec<_>>(), [2], "another host does not");
    scene.cx.conns.insert(late);
    scene.cx.conns.insert(other);
    held.truncate(5);
    scene.responder.collect(&mut scene.cx);
    scene.responder.control(&mut scene.cx, false);
    assert_eq!(scene.held.try_iter().map(|call| call.info().xid()).collect::<Vec<_>>(), [1]);
    drop(held);
    while scene.responder.collect(&mut scene.cx) > 0 {}
    assert!(scene.responder.pending.is_empty() && scene.responder.owners_with_orphans().is_empty());
    assert_eq!(scene.cx.memory.receives.unpromised(), 256);
}

#[test]
fn one_connection_beyond_its_share_waits_for_itself_alone() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    // Replies that do not leave: the device says nothing of them.
    let held = scene.empty_pool();
    let few = held.len() / 8;
    let mut held = held;
    held.truncate(held.len() - few);
    let mut xid = 0;
    while !conn.served.is_gated() {
        xid += 1;
        assert!(xid < 16, "the pool is short: some call must wait");
        scene.serve_held(&mut conn, xid);
    }
    let mut other = open_conn(1, true);
    scene.serve_held(&mut other, 100);
    assert!(!other.served.is_gated(), "it holds nothing yet");
    assert!(conn.served.held(&conn.proto, false) + conn.sends.under_way() as usize > 1);
    assert_eq!(scene.responder.admission.queue.len(), 1);
    scene.cx.conns.insert(conn);
    let reported = |scene: &mut Scene| {
        scene.responder.continue_waiting(&mut scene.cx);
        scene.responder.admission.queue.reported()
    };
    assert_eq!(reported(&mut scene), 0);
    time.advance(Duration::from_secs(1));
    assert_eq!(reported(&mut scene), 1, "the log names what waits for its share, too");
    let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
    scene.responder.connection_lost(&mut scene.cx, &mut conn);
    assert_eq!((scene.responder.admission.queue.len(), conn.served.is_gated()), (0, false));
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
    assert!(goes(&mut conn, 1, 5000), "what is beyond it alone goes alone");
    assert!(!goes(&mut conn, 2, 600) && !goes(&mut conn, 3, 400));
    assert!(goes(&mut conn, 4, 0), "it writes nothing");
    assert!(goes(&mut other, 5, 600) && goes(&mut other, 6, 400), "nothing else is under way there");
    assert!(!goes(&mut other, 7, 1));
    assert!(conn.sends.awaits_end(), "it is asked what has left");
    assert_eq!((scene.cx.stats.write_waits, scene.responder.replies.delayed), (3, 3));
    conn.sends.send_completed(1);
    scene.responder.resume(&mut scene.cx, &mut conn);
    assert!(!conn.served.is_gated() && other.served.is_gated());
    scene.responder.connection_lost(&mut scene.cx, &mut other);
    assert_eq!((scene.responder.replies.delayed, other.served.is_gated()), (0, false));
}

fn must_wait(scene: &mut Scene, conn: &mut Conn, call: &Unready) -> bool {
    let Scene { responder: Responder { admission, procedures, .. }, cx, .. } = scene;
    admission.must_wait(cx, conn, procedures.of(call), call).is_some()
}

#[test]
fn calls_without_memory_wait_hold_nothing_and_go_on_in_their_order() {
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
    let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
    assert_eq!(scene.sent(&mut conn), [1, 2, 3]);
    assert!(!scene.responder.has_waiting_work());
}

#[test]
fn calls_of_closed_connections_leave_the_lines() {
    let mut scene = Scene::new();
    let (mut gone, mut stays) = (open_conn(0, true), open_conn(1, true));
    let held = scene.empty_pool();
    scene.serve_held(&mut gone, 1);
    scene.serve_held(&mut stays, 2);
    scene.serve_held(&mut gone, 3);
    scene.responder.connection_lost(&mut scene.cx, &mut gone);
    assert_eq!(scene.responder.admission.queue.len(), 1, "nor do their messages keep their buffers");
    drop(held);
    scene.cx.conns.insert(stays);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1, "that of the other connection");
    let mut stays = scene.cx.conns.take_slot(1).expect("it is there");
    assert_eq!(scene.sent(&mut stays), [2]);
}

#[test]
fn a_closed_connection_leaves_no_reservation() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let held = scene.empty_pool();
    scene.serve_held(&mut conn, 1);
    assert!(scene.cx.memory.awaits_some());
    drop(held);
    scene.responder.connection_lost(&mut scene.cx, &mut conn);
    assert!(scene.responder.has_waiting_work(), "the next turn releases the size");
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 0);
    assert!(!scene.cx.memory.awaits_some() && !scene.responder.has_waiting_work());
}

/// What the application keeps is waited for a second, whoever has waited for it before.
#[test]
fn a_hopeless_call_is_refused_after_a_second() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut gone, mut stays) = (open_conn(0, true), open_conn(1, true));
    let _kept = scene.keep_pool();
    scene.serve_held(&mut gone, 1);
    scene.cx.conns.insert(gone);
    scene.responder.continue_waiting(&mut scene.cx);
    let mut gone = scene.cx.conns.take_slot(0).expect("it is there");
    scene.responder.connection_lost(&mut scene.cx, &mut gone);
    let _kept_too = scene.keep_pool();
    time.advance(Duration::from_secs(10));
    scene.serve_held(&mut stays, 2);
    let _kept_as_well: Vec<_> = scene.spare.drain(..).map(Buf::freeze).collect();
    scene.cx.conns.insert(stays);
    for millis in [0, 999] {
        time.advance(Duration::from_millis(millis));
        scene.responder.continue_waiting(&mut scene.cx);
        assert_eq!(scene.responder.admission.queue.len(), 1, "after {millis} ms");
    }
    time.advance(Duration::from_millis(1));
    scene.responder.continue_waiting(&mut scene.cx);
    assert!(!scene.responder.waits_for_memory() && scene.cx.stats.pool_empty == 1);
}

/// Or those who keep many calls would have all of it.
#[test]
fn short_replies_take_none_of_the_memory_for_bulk() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let longest = scene.cx.memory.longest_suitable(1);
    let held: Vec<_> = std::iter::from_fn(|| scene.cx.memory.pool.alloc_within(1, longest)).collect();
    scene.serve_held(&mut conn, 1);
    assert!(scene.responder.waits_for_memory() && scene.sent(&mut conn).is_empty());
    assert_eq!(scene.cx.memory.pool.room(1).0, 4, "those of `long_buffers`");
    let call = &scene.responder.admission.queue.iter().next().expect("it waits").call;
    let demand = Demand::new(&scene.cx.memory, scene.responder.procedures.of(call), call);
    let deficit = demand.deficit(&scene.cx.memory);
    assert_eq!(demand.beyond_pool(&scene.cx.memory, call), None);
    assert!(deficit.to_string().ends_with("exist (`memory.small_buffers`)"), "{deficit}");
    drop(held);
    scene.cx.conns.insert(conn);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
}

/// A call that needs bulk memory waits, as any other, for a buffer that its reply is to have while calls have been
/// taken that have such.
#[test]
fn calls_with_bulk_that_lack_room_for_their_reply_wait_for_deferred_ones() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut parked, mut conn) = (open_conn(0, true), open_conn(1, true));
    scene.serve(&mut parked, 1, LATER);
    let longest = scene.cx.memory.longest_suitable(1);
    let held: Vec<_> = std::iter::from_fn(|| scene.cx.memory.pool.alloc_within(1, longest)).collect();
    let call = scene.bulk(&mut conn, 2, 1);
    scene.responder.start(&mut scene.cx, &mut conn, call);
    assert_eq!(scene.responder.admission.queue.len(), 1);
    scene.cx.conns.insert(parked);
    scene.cx.conns.insert(conn);
    for _ in 0..30 {
        time.advance(Duration::from_millis(100));
        scene.responder.continue_waiting(&mut scene.cx);
    }
    assert!(scene.responder.waits_for_memory() && scene.cx.stats.calls_failed == 0);
    drop(held);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
}

/// What a call needs beside one buffer is as good as taken: it waits for its own connection, and stands in no line.
#[test]
fn a_call_that_needs_many_buffers_counts_them_for_its_share() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let _under_way = scene.bulk(&mut conn, 1, 1);
    let _held = scene.cx.memory.pool.alloc(40_000).expect("one of four");
    let call = scene.bulk(&mut conn, 3, 4);
    assert!(must_wait(&mut scene, &mut conn, &call));
    conn.proto.forget(call.id());
    let call = scene.bulk(&mut conn, 4, 1);
    assert!(!must_wait(&mut scene, &mut conn, &call), "one is within its share");
}

#[test]
fn a_call_behind_another_one_of_its_connection_names_that_one_as_the_cause() {
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

/// Those that await an event, or a lock, may take for ever.
#[test]
fn calls_without_chunks_do_not_count_for_a_share_of_bulk_memory() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    scene.serve(&mut conn, 1, LATER);
    let header = scene.cx.memory.alloc(8).expect("a buffer");
    conn.sends.push_send(header, None, 16);
    let _held = scene.cx.memory.pool.alloc(40_000).expect("one of four");
    let call = scene.bulk(&mut conn, 3, 4);
    assert!(!must_wait(&mut scene, &mut conn, &call));
    let header = scene.cx.memory.alloc(8).expect("a buffer");
    conn.sends.note_writes(8, false);
    conn.sends.push_send(header, None, 16);
    assert!(must_wait(&mut scene, &mut conn, &call), "results that were not sent yet count");
    conn.sends.send_completed(2);
    assert!(!must_wait(&mut scene, &mut conn, &call));
}

/// Who needs one buffer goes past who needs many, but not always.
#[test]
fn a_call_that_needs_many_buffers_lets_others_past() {
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
    assert_eq!(scene.responder.admission.queue.len(), 2, "three are free: one needs four, the other comes behind it");
    scene.cx.conns.insert(many);
    scene.cx.conns.insert(one);
    let pass = |scene: &mut Scene, millis| {
        time.advance(Duration::from_millis(millis));
        scene.responder.continue_waiting(&mut scene.cx)
    };
    assert_eq!((pass(&mut scene, 1), pass(&mut scene, 998)), (0, 0), "that is held up");
    assert_eq!(pass(&mut scene, 2), 1, "for a second");
    let mut one = scene.cx.conns.take_slot(1).expect("it is there");
    bulk(&mut scene, &mut one, 3, 1);
    assert_eq!(scene.responder.admission.queue.len(), 1, "who comes later is not held up");
    scene.cx.conns.restore(one);
    assert_eq!((pass(&mut scene, 4000), scene.responder.admission.queue.len()), (0, 1));
    let mut one = scene.cx.conns.take_slot(1).expect("it is there");
    bulk(&mut scene, &mut one, 4, 1);
    assert_eq!(scene.responder.admission.queue.len(), 2, "but after a while it is again");
    scene.cx.conns.restore(one);
    held.clear();
    scene.cx.fabric.take_sent();
    assert!(pass(&mut scene, 1) >= 1, "there are enough");
}

/// Receives may be longer than they need be.
#[test]
fn the_buffer_of_the_message_itself_gives_no_hope() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let long = scene.cx.memory.pool.alloc(40_000).expect("a buffer");
    let _held = scene.empty_pool();
    scene.serve_message(&mut conn, 1, SHORT, long);
    let call = &scene.responder.admission.queue.iter().next().expect("it waits").call;
    let demand = Demand::new(&scene.cx.memory, scene.responder.procedures.of(call), call);
    assert_eq!(demand.deficit(&scene.cx.memory).size, 512, "for its reply alone");
}

/// Also if it needs what another line waits for, too.
#[test]
fn the_longest_waiting_chooses_first() {
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
        let one = held.iter().position(|buf| buf.capacity() == len).expect("it was taken");
        held.swap_remove(one);
    }
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
    let mut first = scene.cx.conns.take_slot(0).expect("it is there");
    assert_eq!(scene.sent(&mut first), [1], "the later one needs that buffer for its reply, and one that is longer");
}

#[test]
fn a_call_that_stepped_aside_continues_when_there_is_enough() {
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
    assert!(!scene.cx.memory.awaits_some() && scene.responder.admission.queue.len() == 2, "they have stepped aside");
    held.pop();
    assert_eq!(
        (scene.responder.continue_waiting(&mut scene.cx), scene.responder.admission.queue.len()),
        (1, 1),
        "who needs two"
    );
}

/// What is gathered for it is not there for who came later, whatever else that one waits for, or does not.
#[test]
fn a_call_gathers_several_buffers_before_later_calls() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let (mut first, mut later) = (open_conn(0, true), open_conn(1, true));
    let (all, one) = (scene.bulk(&mut first, 1, 4), scene.bulk(&mut later, 2, 1));
    let mut held = scene.empty_pool();
    let mut comes_home = |len: usize| {
        let one = held.iter().position(|buf| buf.capacity() == len).expect("it was taken");
        drop(held.swap_remove(one));
    };
    (0..3).for_each(|_| comes_home(65536));
    scene.responder.start(&mut scene.cx, &mut first, all);
    time.advance(Duration::from_millis(1));
    scene.responder.start(&mut scene.cx, &mut later, one);
    scene.cx.conns.insert(first);
    scene.cx.conns.insert(later);
    comes_home(512);
    assert_eq!(
        scene.responder.continue_waiting(&mut scene.cx),
        0,
        "the later one has its room for a reply, and three others"
    );
    comes_home(65536);
    assert_eq!(scene.responder.continue_waiting(&mut scene.cx), 1);
    let mut first = scene.cx.conns.take_slot(0).expect("it is there");
    assert_eq!(scene.sent(&mut first).len(), 1);
}

/// Nor for a call that needs nothing but its reply, however many are free.
#[test]
fn short_replies_take_no_awaited_buffers() {
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

/// One of each of two sizes: what is there for it does not go to others while the other one comes home.
#[test]
fn a_call_that_lacks_another_size_holds_its_line_for_a_second() {
    let (mut scene, time) = (Scene::new(), SimulatedTime::new());
    scene.cx.clock = Clock::simulated(&time);
    let mut conn = open_conn(0, true);
    let call = scene.bulk(&mut conn, 1, 1);
    let mut held = scene.empty_pool();
    scene.responder.start(&mut scene.cx, &mut conn, call);
    scene.cx.conns.insert(conn);
    let mut comes_home = |scene: &mut Scene, len: usize| {
        let one = held.iter().position(|buf| buf.capacity() == len).expect("it was taken");
        held.swap_remove(one);
        scene.responder.continue_waiting(&mut scene.cx)
    };
    let awaited = |scene: &Scene| [512, 65536].map(|len| scene.cx.memory.is_awaited(len));
    assert_eq!(awaited(&scene), [false, true], "it waits for the longest");
    assert_eq!((comes_home(&mut scene, 65536), awaited(&scene)), (0, [true, true]));
    time.advance(Duration::from_millis(999));
    assert_eq!((scene.responder.continue_waiting(&mut scene.cx), awaited(&scene)), (0, [true, true]));
    time.advance(Duration::from_millis(1));
    assert_eq!(
        (scene.responder.continue_waiting(&mut scene.cx), awaited(&scene)),
        (0, [true, false]),
        "others are let past"
    );
    assert_eq!((comes_home(&mut scene, 512), awaited(&scene)), (1, [false, false]));
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
    assert_eq!(waiting(&mut scene), (2, 1000, 1), "of the first");
    drop(held);
    assert_eq!(waiting(&mut scene), (0, 0, 0));
}

/// Version 1 tolerates more calls than were granted, but nothing was promised for what they are in.
#[test]
fn calls_beyond_the_credit_limit_do_not_wait_while_receives_are_short() {
    for short in [false, true] {
        let mut scene = Scene::new();
        let mut conn = open_conn(0, true);
        conn.was_accepted(PeerInfo::new("192.0.2.1:700", 0), None);
        let limit = conn.proto.credits().credit_limit();
        if short {
            let too_many = scene.cx.memory.receives.posted() as u32 + 1;
            scene.cx.memory.receives.promise(&mut conn.promise, too_many, 0);
        }
        let size = scene.cx.config.wire.receive_size;
        let messages: Vec<_> = (0..=limit).map(|_| scene.cx.memory.alloc(size).expect("a buffer")).collect();
        let _kept = scene.empty_pool();
        for (xid, message) in (1..).zip(messages) {
            scene.serve_message(&mut conn, xid, SHORT, message);
        }
        let put_off = u64::from(short);
        assert_eq!(scene.cx.stats.calls_shed, put_off);
        let waiting = scene.responder.admission.queue.len();
        assert_eq!(waiting as u64, u64::from(limit) + 1 - put_off);
        assert_eq!(conn.stage() == Stage::Draining, short, "its client sends it again");
    }
}

/// A turn passes over the waiting calls as long as one lacks a buffer. Its time must not grow with their number.
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
            let conn = scene.cx.conns.take(waiting.call.qp()).expect("it is there");
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
