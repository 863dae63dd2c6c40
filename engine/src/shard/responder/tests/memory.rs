//! Calls that wait for memory.

use super::*;

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
    let longest = scene.cx.config.longest_for_reply(1);
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
    let longest = scene.cx.config.longest_for_reply(1);
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
