use std::sync::Arc;

use rpcrdma_mempool::Buf;

use super::*;
use crate::handoff::parker::{Sleeper, Wake};
use crate::proto::Event;
use crate::service::Procedure;
use crate::shard::testing::{NoDevice, call, context, message, open_conn, receive, received, small};

/// Answers with four bytes.
const SHORT: u32 = 1;
/// Runs on workers.
const ELSEWHERE: u32 = 2;

struct Scene {
    responder: Responder,
    cx: Context<NoDevice>,
    watch: Watch,
    /// Receives that were taken before the pool was emptied.
    spare: Vec<Buf>,
}

impl Scene {
    fn new() -> Self {
        let mut services = Services::new();
        let answer = |call: &mut ServerCall| {
            call.reply_mut(4).ok_or(crate::proto::Refusal::SystemError)?.fill(9);
            Ok(())
        };
        services.add(1, 1, SHORT, Procedure::new(answer));
        services.add(1, 1, ELSEWHERE, Procedure::new(answer).on_workers());
        let responder = Responder::new(Some(Arc::new(services)));
        let mut cx = context(small());
        let spare = std::iter::from_fn(|| cx.alloc(cx.config.receive_size)).take(16).collect();
        Self { responder, cx, watch: Watch::default(), spare }
    }

    /// A call comes.
    fn serve(&mut self, conn: &mut Conn, xid: u32, procedure: u32) {
        let buf = self.cx.alloc(self.cx.config.receive_size).expect("a buffer");
        self.serve_message(conn, xid, procedure, buf);
    }

    /// The same in this buffer.
    fn serve_message(&mut self, conn: &mut Conn, xid: u32, procedure: u32, buf: Buf) {
        let Self { responder, cx, .. } = self;
        let message = received(buf, &message(16, &call(xid, procedure)));
        let (call, read) = receive(conn, &message, |conn, event, incoming| match event {
            Event::Call { id } => {
                let mut call = responder.take_call(cx, conn, id);
                let read = responder.read(conn, incoming, &message, &mut call);
                (call, read)
            }
            event => panic!("{event:?}"),
        });
        responder.serve(cx, conn, call, read, message);
    }

    /// The same where the buffers that are left are not to be taken for the call's message.
    fn serve_held(&mut self, conn: &mut Conn, xid: u32) {
        let message = self.spare.pop().expect("as many as the test needs");
        self.serve_message(conn, xid, SHORT, message);
    }

    /// The XIDs of the replies that were sent on a connection since it was asked last.
    fn sent(&mut self, conn: &mut Conn) -> Vec<u32> {
        self.cx.post_chain(conn);
        let sent = self.cx.fabric.take_sent();
        sent.iter().map(|bytes| u32::from_be_bytes(bytes[..4].try_into().expect("a word"))).collect()
    }

    /// Takes all buffers that a reply would do with.
    fn empty_pool(&self) -> Vec<Buf> {
        std::iter::from_fn(|| self.cx.pool.alloc(1)).collect()
    }
}

#[test]
fn a_call_is_answered_once_and_its_box_comes_back() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    for xid in 1..=3 {
        scene.serve(&mut conn, xid, SHORT);
        assert_eq!(scene.sent(&mut conn), [xid]);
        assert!(conn.served.holds_nothing() && !scene.responder.holds_calls_back());
    }
    assert_eq!(scene.cx.stats.calls, 3);
}

#[test]
fn calls_without_memory_wait_hold_nothing_and_go_on_in_their_order() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let held = scene.empty_pool();
    for xid in 1..=3 {
        scene.serve_held(&mut conn, xid);
    }
    assert!(scene.responder.waits_for_memory() && scene.responder.holds_calls_back());
    assert!(scene.responder.waiting.iter().all(|waiting| waiting.call.reply.is_none()));
    assert!(scene.sent(&mut conn).is_empty());
    drop(held);
    scene.cx.conns.insert(conn);
    assert_eq!(scene.responder.go_on(&mut scene.cx, &mut scene.watch, 1), 3);
    let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
    assert_eq!(scene.sent(&mut conn), [1, 2, 3]);
    assert!(!scene.responder.holds_calls_back());
}

#[test]
fn who_is_gone_waits_for_nothing() {
    let mut scene = Scene::new();
    let (mut gone, mut stays) = (open_conn(0, true), open_conn(1, true));
    let held = scene.empty_pool();
    scene.serve_held(&mut gone, 1);
    scene.serve_held(&mut stays, 2);
    scene.serve_held(&mut gone, 3);
    scene.responder.connection_lost(&mut gone);
    assert_eq!(scene.responder.waiting.len(), 1, "nor do their messages keep their buffers");
    drop(held);
    scene.cx.conns.insert(stays);
    assert_eq!(scene.responder.go_on(&mut scene.cx, &mut scene.watch, 1), 1, "that of the other connection");
    let mut stays = scene.cx.conns.take_slot(1).expect("it is there");
    assert_eq!(scene.sent(&mut stays), [2]);
}

#[test]
fn without_workers_their_procedures_run_here() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    scene.serve(&mut conn, 5, ELSEWHERE);
    assert_eq!(scene.sent(&mut conn), [5]);
    assert!(conn.served.none_at_workers());
}

#[test]
fn calls_for_workers_are_held_back_until_they_are_taken_and_come_home_once() {
    let mut scene = Scene::new();
    let mut conn = open_conn(0, true);
    let services = scene.responder.services.clone().expect("services");
    let mut workers = SimulatedWorkers::new(1, 2, services);
    let sleeper = Sleeper::new(Wake::Fabric(scene.cx.fabric.waker()));
    scene.responder.use_workers(workers.pool(), &sleeper.signal());
    for xid in 1..=5 {
        scene.serve(&mut conn, xid, ELSEWHERE);
    }
    assert!(scene.responder.holds_calls_back() && !conn.served.none_at_workers());
    scene.cx.conns.insert(conn);
    let mut answered = Vec::new();
    for _ in 0..8 {
        scene.responder.go_on(&mut scene.cx, &mut scene.watch, 1);
        workers.turn(0);
        scene.responder.collect(&mut scene.cx);
        let mut conn = scene.cx.conns.take_slot(0).expect("it is there");
        answered.extend(scene.sent(&mut conn));
        scene.cx.conns.give_back(conn);
    }
    assert_eq!(answered, [1, 2, 3, 4, 5]);
    assert_eq!(scene.responder.worker_depth(), 0);
    assert!(scene.cx.conns.take_slot(0).expect("it is there").served.none_at_workers());
}

#[test]
fn one_connection_beyond_its_share_waits_for_itself_alone() {
    let mut scene = Scene::new();
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
    assert!(Served::held(&conn) > 1);
    let before = scene.responder.shares.deferred();
    assert_eq!(before, conn.served.deferred.len());
    scene.responder.connection_lost(&mut conn);
    assert_eq!((scene.responder.shares.deferred(), conn.served.deferred.len()), (0, 0));
}
