//! Engine of this side's calls: the requester (RFC 8166 §2.1).
//!
//! It gives each call a form, exposes its memory, sends it, matches its reply, and ends it.
//!
//! | file | holds |
//! |---|---|
//! | `abandoned` | calls that end for their caller before their reply |
//! | `calls` | start of a call: exposes its memory, sends its message |
//! | `forms` | forms of calls, with their chunks, and new forms after a refusal |
//! | `refused` | calls that wait for their retransmission after a refusal |
//! | `replies` | end of a call: match, revoke, deliver |
//! | `chunks` | chunk memory of a call |
//! | `exposures` | memory exposed by a connection to its peer |
//! | `lists` | chunk lists of the current call |
//! | `outcome` | outcomes of calls, and their receivers |
//! | `unanswered` | log of calls without an answer |

mod abandoned;
mod calls;
mod chunks;
mod exposures;
mod forms;
mod lists;
mod outcome;
mod refused;
#[path = "completion.rs"]
mod replies;
#[cfg(test)]
mod tests;
mod unanswered;

use rpcrdma_mempool::{Buf, Pool};

use super::close_reason::CloseReasonKind;
use super::conn::Conn;
use super::context::Context;
use super::list::push;
use super::stage::Stage;
use crate::fabric::{Fabric, QpId};
use crate::proto::{CallError, CallId, Connection};
use crate::wire::properties::ReverseSupport;
use crate::wire::rpc::ACCEPTED_REPLY_LEN;
use crate::wire::{self, Version};

pub(super) use calls::call_header_len;
pub(crate) use calls::{CallRequest, procedure_of};
pub(crate) use chunks::{ChunkMemory, Memory};
use exposures::{Exposure, Exposures};
use lists::Lists;
pub(crate) use outcome::Sink;
use outcome::Untaken;
pub use outcome::{CallResult, Done, FailedCall, Reply, Returned};
use unanswered::Checks;

pub(super) struct Requester {
    /// Ended calls, for the shard's owner.
    done: Vec<Done>,
    /// Chunk lists of the current call.
    lists: Lists,
    /// Copies of replies in memory that their peer may still reach; created at first use.
    copies: Option<Pool>,
    /// Replies that other threads have not taken.
    untaken: Untaken,
    /// Refused calls, with the times and connections of their retransmission.
    put_off: Vec<(u64, QpId, CallId)>,
    /// Lower bound of all deadlines, in nanoseconds.
    next_deadline: u64,
    checks: Checks,
}

/// This side's calls on one connection.
#[derive(Default)]
pub(super) struct Requests {
    /// By call slot.
    calls: Vec<OutCall>,
    exposures: Exposures,
    /// Memory exposed to this peer only; created at first use.
    exposed: Option<Pool>,
    /// Limits of the fast path: bytes of RPC message, and of results.
    plain_call: usize,
    plain_reply: usize,
    /// The peer has refused a call for lack of a Reply chunk: the fast path is off.
    keeps_all: bool,
    /// Whether a call was answered since the connection was made.
    answered: bool,
    /// Program and version of a call that was started, zeroes before; most connections have one.
    program: (u32, u32),
}

/// A call whose message waits to be sent, or for its reply: a reused slot.
#[derive(Debug, Default)]
struct OutCall {
    /// Whether it is in use. A polled fast-path call that was sent at once does not use its slot.
    used: bool,
    sink: Sink,
    /// The message, until sent.
    message: Option<Buf>,
    /// Its chunks until sent; then they are in `exposure`.
    memory: ChunkMemory,
    /// Index of its exposure.
    exposure: Option<u32>,
    /// Start in nanoseconds, if it is sampled.
    started: Option<u64>,
    /// For a retransmission: a copy of the message, or the message itself if it was sent in parts.
    kept: Option<Buf>,
    copy: Vec<u8>,
    /// Most bytes of inline results.
    max_reply: usize,
    /// Reply of a one-way call, which completes once sent.
    empty_reply: Option<Buf>,
    /// Number of retransmissions with more resources.
    retries: u8,
    /// Number of refusals by ERR_SYSTEM.
    refusals: u16,
    /// Sent on an earlier connection: the server may have executed it.
    was_sent: bool,
}

/// Longest message copied into its slot. Longer ones take a buffer.
const SHORT: usize = 256;

impl OutCall {
    /// Keeps a copy of the message for a retransmission, if there is memory.
    #[inline]
    fn keep<F: Fabric>(&mut self, cx: &mut Context<F>, message: &[u8]) {
        self.copy.clear();
        if message.len() <= SHORT {
            self.copy.extend_from_slice(message);
        } else {
            self.kept = cx.copy_of(message);
        }
    }

    /// Whether it keeps a message.
    fn keeps(&self) -> bool {
        self.kept.is_some() || !self.copy.is_empty()
    }

    /// Takes the kept message, if there is memory for it.
    fn take_kept<F: Fabric>(&mut self, cx: &mut Context<F>) -> Option<Buf> {
        if !self.copy.is_empty() {
            self.kept = cx.copy_of(&self.copy);
            self.copy.clear();
        }
        self.kept.take()
    }

    /// Drops the message, which will not be sent (again).
    #[inline]
    fn forget(&mut self) {
        (self.message, self.memory, self.kept, self.empty_reply) = (None, ChunkMemory::NONE, None, None);
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

    /// Address of the slots, for a prefetch: the first ones are used most.
    #[inline]
    pub(super) fn first_place(&self) -> *const [u8; size_of::<OutCall>()] {
        self.calls.as_ptr().cast()
    }

    /// Whether a call was answered since the connection was made.
    pub(super) fn was_answered(&self) -> bool {
        self.answered
    }

    /// Resets for a reconnect.
    pub(super) fn begin_anew(&mut self) {
        self.answered = false;
    }

    /// Sets the program of the calls, for log lines.
    pub(super) fn set_program(&mut self, program: u32, version: u32) {
        self.program = (program, version);
    }

    /// A buffer exposed to this peer only, if that pool exists and has one.
    #[inline(always)]
    pub(super) fn alloc(&self, len: usize) -> Option<Buf> {
        let pool = self.exposed.as_ref()?;
        pool.drain_remote();
        pool.alloc(len)
    }

    /// The pool of memory exposed to this peer, if it exists.
    pub(super) fn exposed_pool(&self) -> Option<&Pool> {
        self.exposed.as_ref()
    }

    pub(super) fn has_exposed_pool(&self) -> bool {
        self.exposed.is_some()
    }

    /// Resizes the slots to the protocol's limit.
    pub(super) fn fit(&mut self, slots: usize) {
        self.calls.resize_with(slots, OutCall::default);
    }

    /// Recomputes the limits of the fast path after the terms may have changed.
    pub(super) fn refresh(&mut self, stage: Stage, proto: &Connection) {
        let (call, reply) = match stage {
            Stage::Open if proto.session().may_call() && calls_are_taken(proto) && !self.may_need_more(proto) => {
                let terms = proto.terms();
                let header = wire::msg_len(terms.version, true);
                (terms.send_inline_threshold - header, terms.receive_inline_threshold - header - ACCEPTED_REPLY_LEN)
            }
            _ => (0, 0),
        };
        (self.plain_call, self.plain_reply) = (call, reply);
    }

    /// Whether the peer may refuse a call without reply room, with the length of the Reply chunk that it needs. Such a
    /// call is kept.
    fn may_need_more(&self, proto: &Connection) -> bool {
        let limits = proto.terms().form_limits(proto.config());
        // Version 1 does not report the length.
        let said = proto.terms().version == Version::V2 && !limits.continuation;
        limits.chunks && (said || self.keeps_all)
    }

    /// Resets after the loss of the device.
    pub(super) fn forget_device(&mut self) {
        // Cancelled calls have kept theirs until now.
        self.calls.iter_mut().for_each(|out| out.exposure = None);
        self.exposures.forget_device();
        (self.plain_call, self.plain_reply) = (0, 0);
    }

    /// Whether no memory is exposed.
    pub(super) fn expose_nothing(&self) -> bool {
        self.exposures.is_empty()
    }

    /// Buffers exposed, or held by the application.
    pub(super) fn exposed_buffers(&self) -> u64 {
        let classes = self.exposed.as_ref().map_or_else(Vec::new, |pool| pool.stats().classes);
        classes.iter().map(|class| class.outstanding as u64).sum()
    }
}

/// Whether the peer accepts calls of this side.
fn calls_are_taken(proto: &Connection) -> bool {
    let config = proto.config();
    config.max_calls > 0 && (!config.server || proto.terms().reverse != ReverseSupport::None)
}

impl Conn {
    #[inline]
    fn exposure_of(&mut self, call: CallId) -> Option<&mut Exposure> {
        let index = self.requests.calls.get(self.proto.calls().slot(call))?.exposure?;
        self.requests.exposures.get_mut(index)
    }

    /// Whether new calls of this side are refused, because it drains and serves no call whose handler may call back.
    fn refuses_calls(&self) -> bool {
        self.stage() == Stage::Draining && self.proto.inbound().is_empty()
    }

    /// Whether an exposure still belongs to a call.
    #[cold]
    pub(super) fn exposes(&self, call: CallId, index: u32) -> bool {
        let slot = self.proto.calls().slot(call);
        self.proto.calls().is_owed(call) && self.requests.calls.get(slot).is_some_and(|out| out.exposure == Some(index))
    }

    /// Keeps a call's message that was sent in parts, completely or not.
    pub(super) fn keep_whole(&mut self, call: CallId, mut message: Buf, (start, len): (usize, usize)) {
        if self.proto.calls().is_under_way(call) {
            message.set_window(start, len);
            let out = self.out_call(call);
            out.copy.clear();
            out.kept = Some(message);
        }
    }

    /// Record of a call; created if missing.
    fn out_call(&mut self, call: CallId) -> &mut OutCall {
        let out = &mut self.requests.calls[self.proto.calls().slot(call)];
        out.used = true;
        out
    }

    /// Ends a call's record: returns its sink, its exposure, its start if it is sampled.
    #[inline(always)]
    fn end_call(&mut self, call: CallId) -> (Sink, Option<u32>, Option<u64>) {
        let slot = self.proto.calls().slot(call);
        let out = &mut self.requests.calls[slot];
        if !std::mem::take(&mut out.used) {
            return (Sink::Polled, None, None);
        }
        if out.message.is_some() || out.kept.is_some() || out.memory.is_some() || out.empty_reply.is_some() {
            out.forget();
        }
        out.copy.clear();
        out.was_sent = false;
        (std::mem::take(&mut out.sink), out.exposure.take(), out.started.take())
    }
}

impl Requester {
    pub(super) fn new() -> Self {
        Self {
            done: Vec::with_capacity(256),
            lists: Lists::default(),
            copies: None,
            untaken: Untaken::default(),
            put_off: Vec::new(),
            next_deadline: u64::MAX,
            checks: Checks::default(),
        }
    }

    /// Ended calls not taken yet, oldest first.
    #[inline]
    pub(super) fn done(&mut self) -> &mut Vec<Done> {
        &mut self.done
    }

    /// Lower bound of all deadlines, in nanoseconds.
    #[inline]
    pub(super) fn next_deadline(&self) -> u64 {
        self.next_deadline
    }

    /// Pools beside the shard's.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.copies.iter().chain(self.untaken.pool())
    }

    /// Reports an outcome.
    #[inline(always)]
    pub(super) fn deliver<F: Fabric>(&mut self, cx: &mut Context<F>, sink: Sink, token: u64, mut result: CallResult) {
        if result.is_err() {
            cx.stats.calls_failed += 1;
        }
        match sink {
            Sink::Polled => push(&mut self.done, || Done { token, result }),
            Sink::Thread(completer) => {
                if cx.receives.are_scarce()
                    && let Ok(reply) = &mut result
                {
                    self.untaken.take(reply, cx.sizing.capacity(), cx.config.arena());
                }
                completer.complete(result);
            }
        }
    }

    /// Ends a call that did not start.
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

    /// Ends a call that cannot be sent (again), with its refusal or the missing resources.
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

    /// As above, with separate memory.
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

    /// Ends all calls and exposures of a connection that closes for good, for a reason of this kind.
    pub(super) fn connection_lost<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, kind: CloseReasonKind) {
        for index in conn.requests.exposures.ended() {
            let Some(ending) = conn.requests.exposures.ending(index) else { continue };
            let (memory, _) = conn.requests.exposures.recover(index, true, ending.result.is_ok());
            if let Some((call, _)) = ending.again {
                // Not retransmitted: it ends with the calls below, unless cancelled meanwhile.
                if conn.proto.calls().is_waiting(call) {
                    conn.out_call(call).memory = memory;
                }
                continue;
            }
            // Its reply had arrived; only the revocation was missing, and is done.
            let error = ending.result.err().map_or(CallError::ConnectionLost { sent: true }, CallError::from);
            self.deliver(cx, ending.sink, ending.token, Err(FailedCall::new(error, memory)));
        }
        while let Some((call, token, error)) = conn.proto.lost() {
            let error = outcome::of_closed(error, conn.out_call(call).was_sent, kind);
            let mut memory = conn.out_call(call).memory.take();
            let (sink, exposure, _) = conn.end_call(call);
            if let (true, Some(index)) = (memory.is_none(), exposure) {
                // The device holds nothing of this connection now.
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

    /// Parks the calls of a connection that will reconnect, if they can be retransmitted.
    pub(super) fn interrupt<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        // Calls with a reply that await revocation end normally: the device holds nothing now.
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

    /// Gives waiting calls a form for the terms of the new connection.
    #[cold]
    pub(super) fn resume<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        for call in conn.proto.calls().queued() {
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

/// Takes back the exposed memory of a call. False if it is lost: then the call cannot be retransmitted.
fn bring_home(conn: &mut Conn, call: CallId) -> bool {
    let Some(index) = conn.out_call(call).exposure.take() else { return true };
    let memory = conn.requests.exposures.bring_home(index);
    let whole = memory.is_some();
    conn.out_call(call).memory = memory;
    whole
}
