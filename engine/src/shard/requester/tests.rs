use std::time::Duration;

use super::*;
use crate::fabric::{ReceivedBuf, WorkRequest};
use crate::proto::{Event, Received};
use crate::shard::ConnRef;
use crate::shard::clock::{Clock, SimulatedTime};
use crate::shard::connection::close_reason::CloseReasonKind;
use crate::shard::testing::{NoDevice, call, context, message, message_with_lists, open_conn, received, reply, small};
use crate::wire::ErrorBody;

/// An engine, its context, and one connection in the table.
struct Scene {
    requester: Requester,
    cx: Context<NoDevice>,
    time: SimulatedTime,
    name: ConnRef,
}

impl Scene {
    fn new() -> Self {
        let (mut cx, time) = (context(small()), SimulatedTime::new());
        cx.clock = Clock::simulated(&time);
        let conn = open_conn(0, false);
        let name = ConnRef(conn.qp());
        cx.conns.insert(conn);
        Self { requester: Requester::new(), cx, time, name }
    }

    fn with<T>(&mut self, work: impl FnOnce(&mut Requester, &mut Context<NoDevice>, &mut Conn) -> T) -> T {
        let conn = self.cx.conns.take_ref(self.name).expect("it is there");
        let requester = &mut self.requester;
        self.cx.with_conn(conn, |cx, conn| work(requester, cx, conn))
    }

    /// Starts a call; `exposed` is the length of its Write chunk.
    fn start(&mut self, token: u64, deadline: Option<Duration>, exposed: Option<usize>) -> CallId {
        let mut memory = ChunkMemory::NONE;
        if let Some(len) = exposed {
            let buf = self.with(|_, cx, conn| cx.alloc_exposed_on(conn, len)).expect("memory");
            memory.get_or_new().receive.push(buf);
        }
        let bytes: Vec<_> = call(0, 1).iter().flat_map(|word| word.to_be_bytes()).collect();
        let message = self.cx.memory.copy_of(&bytes).expect("a buffer");
        let request = CallRequest {
            message,
            memory,
            max_reply: 64,
            timeout: deadline,
            token,
            target: CompletionTarget::Polled,
            procedure: 0,
        };
        let call = self.requester.start(&mut self.cx, self.name, request, false).expect("it starts");
        self.with(|_, cx, conn| cx.post_chain(conn));
        call
    }

    /// Receives the peer's answer.
    fn answer(&mut self, message: &[u8], invalidated: Option<u32>) {
        self.with(|requester, cx, conn| {
            let message: ReceivedBuf =
                received(cx.memory.alloc(cx.config.wire.receive_size).expect("a buffer"), message);
            match conn.proto.handle_message(&message) {
                Received::Reply { call, token } => {
                    let header = *conn.proto.header();
                    let read = conn.read_reply(call, &header, &message);
                    requester.replied(cx, conn, (call, token), read, message, invalidated);
                }
                _ => match conn.proto.poll_event() {
                    Some(Event::Late { call }) => requester.late(cx, conn, call, invalidated),
                    event => panic!("{event:?}"),
                },
            }
            cx.post_chain(conn);
        });
    }

    /// Tokens and outcomes of the ended calls.
    fn ended(&mut self) -> Vec<(u64, Result<(), CallError>)> {
        self.requester
            .done()
            .drain(..)
            .map(|done| (done.token, done.result.map(drop).map_err(CallError::from)))
            .collect()
    }
}

/// Kinds of the posted work requests.
fn kinds(scene: &mut Scene) -> Vec<&'static str> {
    let kind = |wr: &WorkRequest| match wr {
        WorkRequest::Send { .. } => "send",
        WorkRequest::Bind { .. } => "bind",
        WorkRequest::LocalInvalidate { .. } => "invalidate",
        _ => "other",
    };
    scene.cx.fabric.posted.drain(..).map(|posting| kind(&posting.wr)).collect()
}

#[test]
fn a_call_ends_once_with_its_reply() {
    let mut scene = Scene::new();
    let call = scene.start(7, None, None);
    assert_eq!(kinds(&mut scene), ["send"]);
    assert!(scene.ended().is_empty());
    scene.answer(&message(16, &reply(call.xid())), None);
    assert_eq!(scene.ended(), [(7, Ok(()))]);
    scene.with(|requester, cx, conn| requester.connection_lost(cx, conn, CloseReasonKind::Peer));
    assert!(scene.ended().is_empty(), "it has ended before the connection was lost");
}

#[test]
fn a_timed_out_call_ends_at_once_and_its_reply_is_dropped() {
    let mut scene = Scene::new();
    let call = scene.start(1, Some(Duration::from_nanos(100)), None);
    assert_eq!(scene.requester.next_deadline(), 100);
    scene.time.advance(Duration::from_nanos(100));
    scene.requester.expire(&mut scene.cx, 100);
    assert_eq!(scene.ended(), [(1, Err(CallError::TimedOut { sent: true }))]);
    assert_eq!(scene.requester.next_deadline(), u64::MAX);
    scene.answer(&message(16, &reply(call.xid())), None);
    assert!(scene.ended().is_empty(), "nobody waits for it any more");
}

#[test]
fn the_calls_of_a_lost_connection_end_and_no_other() {
    let mut scene = Scene::new();
    scene.start(1, None, None);
    scene.start(2, None, Some(256));
    scene.with(|requester, cx, conn| requester.connection_lost(cx, conn, CloseReasonKind::Peer));
    let mut ended = scene.ended();
    ended.sort_by_key(|&(token, _)| token);
    // The second call had to wait for the first one's credit.
    let lost = |sent| Err(CallError::ConnectionLost { sent });
    assert_eq!(ended, [(1, lost(true)), (2, lost(false))]);
}

#[test]
fn a_call_that_was_to_be_sent_again_gives_its_memory_back_with_its_connection() {
    let mut scene = Scene::new();
    let call = scene.start(5, None, Some(256));
    kinds(&mut scene);
    let error = ErrorBody::ReplyResource { length_needed: 512 };
    scene.with(|requester, cx, conn| {
        // A refused call waits.
        conn.proto.interrupt();
        requester.retry(cx, conn, call, 5, error, None);
    });
    assert!(scene.ended().is_empty(), "what it exposes is to be revoked first");
    scene.with(|requester, cx, conn| requester.connection_lost(cx, conn, CloseReasonKind::Peer));
    let mut ended: Vec<_> = scene.requester.done().drain(..).collect();
    assert_eq!(ended.len(), 1);
    let failed = ended[0].result.as_mut().expect_err("it is over");
    assert!(matches!(failed.error, CallError::ConnectionLost { .. }), "{failed}");
    assert_eq!(failed.returned.take_chunks().map(|buf| buf.len()).collect::<Vec<_>>(), [256]);
}

#[test]
fn a_call_that_cannot_be_sent_again_gives_its_memory_back() {
    let mut scene = Scene::new();
    scene.start(4, None, None);
    // The call waits for a credit, as a refused one does.
    let call = scene.start(5, None, Some(256));
    // No Reply chunk can be this long.
    let error = ErrorBody::ReplyResource { length_needed: 1 << 30 };
    scene.with(|requester, cx, conn| {
        let slot = conn.calls.slot(&conn.proto, call);
        slot.kept = slot.message.take();
        let memory = slot.memory.take();
        assert!(memory.is_some(), "its chunk");
        requester.refused(cx, conn, call, error, memory);
    });
    let mut ended: Vec<_> = scene.requester.done().drain(..).collect();
    assert_eq!(ended.len(), 1);
    let failed = ended[0].result.as_mut().expect_err("it cannot be");
    assert!(matches!(failed.error, CallError::NoReplyBuffer { .. }), "{failed}");
    assert_eq!(failed.returned.take_chunks().map(|buf| buf.len()).collect::<Vec<_>>(), [256]);
}

#[test]
fn exposed_memory_is_revoked_before_its_call_ends() {
    let mut scene = Scene::new();
    let call = scene.start(3, None, Some(256));
    assert_eq!(kinds(&mut scene), ["bind", "send"], "nobody may use a window before it is bound");
    let index = scene.with(|_, _, conn| conn.calls.slot(&conn.proto, call).exposure).expect("one");
    let (handle, offset) = scene.with(|_, _, conn| {
        let segment = conn.calls.exposure(&conn.proto, call).expect("one").parts[0].at.target;
        (segment.handle, segment.offset)
    });
    let lists = [0, 1, 1, handle, 200, (offset >> 32) as u32, offset as u32, 0, 0];
    scene.answer(&message_with_lists(16, &lists, &reply(call.xid())), None);
    assert_eq!(kinds(&mut scene), ["invalidate"]);
    assert!(scene.ended().is_empty(), "the peer may still reach it");
    scene.with(|requester, cx, conn| requester.revoked(cx, conn, index));
    let done: Vec<_> = scene.requester.done().drain(..).collect();
    assert_eq!(done.len(), 1);
    let reply = done[0].result.as_ref().expect("a reply");
    assert_eq!(reply.chunk(0).map(<[u8]>::len), Some(200));
    scene.with(|_, _, conn| assert!(conn.calls.expose_nothing()));
}

#[test]
fn a_peer_that_has_revoked_it_itself_saves_the_revocation() {
    let mut scene = Scene::new();
    let call = scene.start(3, None, Some(256));
    kinds(&mut scene);
    let handle =
        scene.with(|_, _, conn| conn.calls.exposure(&conn.proto, call).expect("one").parts[0].at.target.handle);
    scene.answer(&message(16, &reply(call.xid())), Some(handle));
    assert!(kinds(&mut scene).is_empty());
    assert_eq!(scene.ended(), [(3, Ok(()))]);
}
