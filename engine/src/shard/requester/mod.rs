//! The engine of our calls, the requester's half (RFC 8166 §2.1): each is given a form, exposed, sent,
//! matched with its reply, and ended.
//!
//! | file | holds |
//! |---|---|
//! | `calls` | a call starts: its memory is exposed, and its message sent |
//! | `forms` | the form that a call takes, and the chunks that go with it; what is sent again |
//! | `replies` | a reply has come: what it says, and the end of its call |
//! | `chunks` | the memory that goes with a call |
//! | `exposures` | what one connection exposes to its peer |
//! | `lists` | the chunk lists of the call that is being sent |
//! | `outcome` | how a call ends, and who is told |

mod calls;
mod chunks;
mod exposures;
mod forms;
mod lists;
mod outcome;
mod replies;
#[cfg(test)]
mod tests;

use rpcrdma_mempool::{Buf, Pool};

use super::conn::Conn;
use super::context::Context;
use super::list::push;
use super::stage::Stage;
use crate::fabric::Fabric;
use crate::proto::{CallError, CallId, Connection};
use crate::wire::properties::ReverseSupport;
use crate::wire::rpc::ACCEPTED_REPLY_LEN;
use crate::wire::{self, Version};

pub(crate) use calls::CallRequest;
pub(super) use calls::call_header_len;
pub(crate) use chunks::{ChunkMemory, Memory};
use exposures::{Exposure, Exposures};
use lists::Lists;
pub(crate) use outcome::Sink;
pub use outcome::{CallResult, Done, FailedCall, Reply, Returned};

/// See the module page.
pub(super) struct Requester {
    /// Calls that have ended, for the shard's owner.
    done: Vec<Done>,
    /// The chunk lists of the call that is being sent.
    lists: Lists,
    /// Where replies go that came into memory which their peer may reach even now; made for the first of
    /// them.
    copies: Option<Pool>,
    /// No call's deadline is earlier, in nanoseconds.
    next_deadline: u64,
}

/// Our calls on one connection.
#[derive(Default)]
pub(super) struct Requests {
    /// By call slot.
    calls: Vec<OutCall>,
    exposures: Exposures,
    /// Memory that this peer alone can reach; made at first use.
    exposed: Option<Pool>,
    /// Calls up to this length, with results up to that length, need no thought about their form: bytes of
    /// RPC message, and of results.
    plain_call: usize,
    plain_reply: usize,
    /// The peer has refused a plain call for want of a Reply chunk: from then on no call is plain.
    keeps_all: bool,
    /// One was answered since the connection was made.
    answered: bool,
}

/// A call of ours whose message waits to be sent, or for its reply: a slot, used again and again.
#[derive(Debug, Default)]
struct OutCall {
    /// Anything of it is of use. Of a polled call that went out at once, and was plain, nothing is.
    used: bool,
    sink: Sink,
    /// The message; gone once it was sent.
    message: Option<Buf>,
    /// Its chunks; gone to `exposure` once it was sent.
    memory: ChunkMemory,
    /// What it exposes: its index in the exposures.
    exposure: Option<u32>,
    /// When it was started, in nanoseconds, if it is one of those that are timed.
    started: Option<u64>,
    /// What was sent, to send it again: a copy of the message, or itself if it went out in parts. One of the two.
    kept: Option<Buf>,
    copy: Vec<u8>,
    /// Most bytes of inline results.
    max_reply: usize,
    /// It is over when it is sent: no reply comes.
    one_way: bool,
    /// How often it was sent again.
    retries: u8,
    /// It was sent on an earlier connection: the server may have carried it out.
    was_sent: bool,
}

/// Longest message of which a copy stays with its slot. Longer ones take a buffer.
const SHORT: usize = 256;

impl OutCall {
    /// Keeps a copy of the message, so that it can be sent again; without memory for that it is not.
    #[inline]
    fn keep<F: Fabric>(&mut self, cx: &mut Context<F>, message: &[u8]) {
        self.copy.clear();
        if message.len() <= SHORT {
            self.copy.extend_from_slice(message);
        } else {
            self.kept = cx.copy_of(message);
        }
    }

    /// Something is kept.
    fn keeps(&self) -> bool {
        self.kept.is_some() || !self.copy.is_empty()
    }

    /// What is kept, if there is memory for it.
    fn take_kept<F: Fabric>(&mut self, cx: &mut Context<F>) -> Option<Buf> {
        if !self.copy.is_empty() {
            self.kept = cx.copy_of(&self.copy);
            self.copy.clear();
        }
        self.kept.take()
    }

    /// It will not be sent, or not again.
    #[inline]
    fn forget(&mut self) {
        (self.message, self.memory, self.kept, self.one_way) = (None, ChunkMemory::NONE, None, false);
        self.max_reply = 0;
        self.copy.clear();
    }
}

impl Requests {
    pub(super) fn new(slots: usize) -> Self {
        let mut requests = Self::default();
        requests.fit(slots);
        requests
    }

    /// Where the slots begin: the first ones are used most. What is there is no one else's to name.
    #[inline]
    pub(super) fn first_place(&self) -> *const [u8; size_of::<OutCall>()] {
        self.calls.as_ptr().cast()
    }

    /// One was answered since the connection was made.
    pub(super) fn was_answered(&self) -> bool {
        self.answered
    }

    /// The connection is made again.
    pub(super) fn begin_anew(&mut self) {
        self.answered = false;
    }

    /// A buffer of the memory that this peer alone can reach, if that is made, and has one.
    #[inline]
    pub(super) fn alloc(&self, len: usize) -> Option<Buf> {
        let pool = self.exposed.as_ref()?;
        pool.drain_remote();
        pool.alloc(len)
    }

    /// That memory is made.
    pub(super) fn has_exposed_pool(&self) -> bool {
        self.exposed.is_some()
    }

    /// As many slots as the protocol has.
    pub(super) fn fit(&mut self, slots: usize) {
        self.calls.resize_with(slots, OutCall::default);
    }

    /// The connection's terms may have changed: says again what needs no thought.
    pub(super) fn refresh(&mut self, stage: Stage, proto: &Connection) {
        let (call, reply) = match stage {
            Stage::Open if proto.may_call() && calls_are_taken(proto) && !self.may_need_more(proto) => {
                let terms = proto.terms();
                let header = wire::msg_len(terms.version, true);
                (terms.send_inline_threshold - header, terms.receive_inline_threshold - header - ACCEPTED_REPLY_LEN)
            }
            _ => (0, 0),
        };
        (self.plain_call, self.plain_reply) = (call, reply);
    }

    /// A call that says nothing of its reply may be refused, and told how long a Reply chunk it needs: such a
    /// call is kept.
    fn may_need_more(&self, proto: &Connection) -> bool {
        let limits = proto.form_limits();
        // Version 1 has no word for the length.
        let said = proto.terms().version == Version::V2 && !limits.continuation;
        limits.chunks && (said || self.keeps_all)
    }

    /// The device is gone, with all that it held.
    pub(super) fn forget_device(&mut self) {
        // Calls that were given up have kept theirs until now.
        self.calls.iter_mut().for_each(|out| out.exposure = None);
        self.exposures.forget_device();
        (self.plain_call, self.plain_reply) = (0, 0);
    }

    /// Nothing of them is exposed.
    pub(super) fn expose_nothing(&self) -> bool {
        self.exposures.is_empty()
    }

    /// Buffers that are exposed, or with the application.
    pub(super) fn exposed_buffers(&self) -> u64 {
        let classes = self.exposed.as_ref().map_or_else(Vec::new, |pool| pool.stats().classes);
        classes.iter().map(|class| class.outstanding as u64).sum()
    }
}

/// Whether the peer takes calls of this side.
fn calls_are_taken(proto: &Connection) -> bool {
    let config = proto.config();
    config.max_calls > 0 && (!config.server || proto.terms().reverse != ReverseSupport::None)
}

impl Conn {
    /// What a call exposes.
    #[inline]
    fn exposure_of(&mut self, call: CallId) -> Option<&mut Exposure> {
        let index = self.requests.calls.get(self.proto.call_slot(call))?.exposure?;
        self.requests.exposures.get_mut(index)
    }

    /// Whether an exposure is still that of a call.
    #[cold]
    pub(super) fn exposes(&self, call: CallId, index: u32) -> bool {
        let slot = self.proto.call_slot(call);
        self.proto.is_owed(call) && self.requests.calls.get(slot).is_some_and(|out| out.exposure == Some(index))
    }

    /// Keeps a call's message of which all, or some, has gone out in parts.
    pub(super) fn keep_whole(&mut self, call: CallId, mut message: Buf, (start, len): (usize, usize)) {
        if self.proto.is_under_way(call) {
            message.set_window(start, len);
            let out = self.out_call(call);
            out.copy.clear();
            out.kept = Some(message);
        }
    }

    /// What is kept of a call of ours: from now on, if nothing was.
    fn out_call(&mut self, call: CallId) -> &mut OutCall {
        let out = &mut self.requests.calls[self.proto.call_slot(call)];
        out.used = true;
        out
    }

    /// Ends a call's record: who is to be told, what it exposes, when it was started if it is timed.
    #[inline(always)]
    fn end_call(&mut self, call: CallId) -> (Sink, Option<u32>, Option<u64>) {
        let slot = self.proto.call_slot(call);
        let out = &mut self.requests.calls[slot];
        if !std::mem::take(&mut out.used) {
            return (Sink::Polled, None, None);
        }
        if out.message.is_some() || out.kept.is_some() || out.memory.is_some() || out.one_way {
            out.forget();
        }
        out.copy.clear();
        out.was_sent = false;
        (std::mem::take(&mut out.sink), out.exposure.take(), out.started.take())
    }
}

impl Requester {
    pub(super) fn new() -> Self {
        Self { done: Vec::with_capacity(256), lists: Lists::default(), copies: None, next_deadline: u64::MAX }
    }

    /// The calls that have ended and were not taken yet, oldest first.
    #[inline]
    pub(super) fn done(&mut self) -> &mut Vec<Done> {
        &mut self.done
    }

    /// No call's deadline is earlier, in nanoseconds.
    #[inline]
    pub(super) fn next_deadline(&self) -> u64 {
        self.next_deadline
    }

    /// The pools that are not the shard's.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.copies.iter()
    }

    /// Tells how a call ended.
    #[inline(always)]
    pub(super) fn deliver<F: Fabric>(&mut self, cx: &mut Context<F>, sink: Sink, token: u64, result: CallResult) {
        if result.is_err() {
            cx.stats.calls_failed += 1;
        }
        match sink {
            Sink::Polled => push(&mut self.done, || Done { token, result }),
            Sink::Thread(completer) => completer.complete(result),
        }
    }

    /// A call is not started.
    #[cold]
    pub(super) fn fail_call<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        sink: Sink,
        token: u64,
        failed: FailedCall,
    ) -> Option<CallId> {
        self.deliver(cx, sink, token, Err(failed));
        None
    }

    /// Calls whose deadline has come.
    #[inline(never)]
    pub(super) fn expire<F: Fabric>(&mut self, cx: &mut Context<F>, now: u64) {
        let mut next = u64::MAX;
        let mut expire = |cx: &mut Context<F>, conn: &mut Conn| {
            while let Some((call, token, error)) = conn.proto.handle_timeout(now) {
                self.abandon(cx, conn, call, token, error);
            }
            next = next.min(conn.proto.next_timeout());
        };
        cx.with_each(&mut expire);
        for conn in cx.conns.take_parked() {
            cx.lend(conn, &mut expire);
        }
        self.next_deadline = next;
    }

    /// Gives up a call. Its memory comes home when the peer can no longer reach it.
    pub(super) fn cancel<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId) {
        if let Some((token, error)) = conn.proto.cancel(call) {
            self.abandon(cx, conn, call, token, error);
        }
    }

    /// Tells the caller that its call is over while the reply is still owed. The record stays, with what is
    /// exposed, until the reply has come or the connection is gone: revoking a window that the peer may be
    /// about to revoke by Send With Invalidate would break the connection.
    fn abandon<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId, token: u64, error: CallError) {
        let out = conn.out_call(call);
        let sink = std::mem::replace(&mut out.sink, Sink::Polled);
        // It is there if it has not been exposed.
        let memory = out.memory.take();
        out.forget();
        self.deliver(cx, sink, token, Err(FailedCall::new(error, memory)));
    }

    /// A call that cannot be sent, or not again, ends: with what it was refused for, or with what it would
    /// take.
    pub(super) fn give_up_call<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        error: CallError,
    ) {
        let memory = conn.out_call(call).memory.take();
        self.give_up_with(cx, conn, call, error, memory);
    }

    /// The same of one whose memory is not with it.
    #[cold]
    fn give_up_with<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        error: CallError,
        memory: ChunkMemory,
    ) {
        if let Some(token) = conn.proto.give_up(call) {
            let (sink, ..) = conn.end_call(call);
            self.deliver(cx, sink, token, Err(FailedCall::new(error, memory)));
        }
    }

    /// The connection is over, and will not be made again: so are its calls, and what they exposed.
    pub(super) fn connection_lost<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        for index in conn.requests.exposures.ended() {
            let Some(ending) = conn.requests.exposures.ending(index) else { continue };
            let (memory, _) = conn.requests.exposures.recover(index, true, ending.result.is_ok());
            if let Some((call, _)) = ending.again {
                // It is not sent again: it ends with those below, if it was not given up meanwhile.
                if conn.proto.is_waiting(call) {
                    conn.out_call(call).memory = memory;
                }
                continue;
            }
            // Its reply had come; only the revocation was owed, and that is done.
            let error = ending.result.err().map_or(CallError::ConnectionLost { sent: true }, CallError::from);
            self.deliver(cx, ending.sink, ending.token, Err(FailedCall::new(error, memory)));
        }
        while let Some((call, token, error)) = conn.proto.lost() {
            let mut memory = conn.out_call(call).memory.take();
            let (sink, exposure, _) = conn.end_call(call);
            if let (true, Some(index)) = (memory.is_none(), exposure) {
                // The device is through with all that it held of this connection.
                memory = conn.requests.exposures.bring_home(index);
            }
            self.deliver(cx, sink, token, Err(FailedCall::new(error, memory)));
        }
        conn.requests.exposures.forget_device();
        if let Some(pool) = conn.requests.exposed.take()
            && let Err(error) = cx.fabric.deregister(pool.arena().id())
        {
            cx.error(
                "memory that is not given back",
                format_args!("{}: memory of a closed connection: {error}", conn.who()),
            );
        }
    }

    /// The connection is gone, and will be made again: its calls wait with it, as far as they can be sent
    /// again.
    pub(super) fn interrupt<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        // What has come and was only to be revoked ends as it would have: the device holds nothing any more.
        for index in conn.requests.exposures.ended() {
            self.revoked(cx, conn, index);
        }
        for (call, sent) in conn.proto.interrupt() {
            let whole = bring_home(conn, call);
            let out = conn.out_call(call);
            if out.message.is_none() {
                out.message = out.take_kept(cx).filter(|_| cx.connect.retransmit);
            }
            out.was_sent |= sent;
            let long = out.memory.get().is_some_and(|memory| memory.call.is_some());
            if whole && (out.message.is_some() || (long && (cx.connect.retransmit || !sent))) {
                continue;
            }
            self.give_up_call(cx, conn, call, CallError::ConnectionLost { sent });
        }
    }

    /// The connection is open again: what waits gets the form that its terms ask for.
    #[cold]
    pub(super) fn resume<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        for call in conn.proto.queued() {
            match self.form_again(cx, conn, call) {
                Ok(()) => cx.stats.calls_retransmitted += 1,
                Err(_) if conn.out_call(call).was_sent => {
                    self.give_up_call(cx, conn, call, CallError::ConnectionLost { sent: true })
                }
                Err(error) => self.give_up_call(cx, conn, call, error),
            }
        }
    }
}

/// Takes back what a call exposes. False if it cannot be had: then the call cannot be sent again.
fn bring_home(conn: &mut Conn, call: CallId) -> bool {
    let Some(index) = conn.out_call(call).exposure.take() else { return true };
    let memory = conn.requests.exposures.bring_home(index);
    let whole = memory.is_some();
    conn.out_call(call).memory = memory;
    whole
}
