//! Deferred calls: their handler takes them, and answers them later, on any thread.
//!
//! Answered calls are in a queue that the shard checks in each turn while any call is deferred. Adding one wakes the
//! shard, which costs a fence and a load while it is awake. Only the shard knows whether the connection is still open,
//! so a call of a closed connection returns to the shard and is dropped there.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::call::{Answered, Call, OwnedCall, Ready, ServerCall};
use crate::cross_thread::parker::Signal;
use crate::cross_thread::return_queue::{ReturnHandle, ReturnQueue};
use crate::proto::Refusal;

/// Connection that deferred calls came from.
pub(crate) struct Origin {
    /// Name of the peer in log lines.
    peer: Box<str>,
    /// Returns calls to their shard.
    shard: ReturnHandle<OwnedCall>,
    /// Wakes the shard.
    signal: Signal,
    is_over: AtomicBool,
    /// Owner of the quotas of its calls.
    owner: Arc<str>,
}

impl Origin {
    /// Marks the connection as closed.
    pub(crate) fn end(&self) {
        // Relaxed: orders no other data.
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Name of the peer in log lines.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the connection is closed.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

/// The shard's end of the queue of returned calls.
pub(crate) struct DeferredReturnQueue {
    returned: ReturnQueue<OwnedCall>,
    /// Wakes the shard.
    signal: Signal,
}

impl DeferredReturnQueue {
    /// A queue that wakes the shard by `signal`.
    pub(crate) fn new(signal: Signal) -> Self {
        Self { returned: ReturnQueue::new(), signal }
    }

    /// Creates the origin of the calls of one more connection, to this peer. They count against the quotas of `owner`.
    pub(crate) fn origin(&self, owner: &Arc<str>, peer: Box<str>) -> Arc<Origin> {
        let (shard, signal, owner) = (self.returned.handle(), self.signal.clone(), Arc::clone(owner));
        Arc::new(Origin { peer, shard, signal, is_over: AtomicBool::new(false), owner })
    }

    /// Takes all returned calls, oldest first.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Call<Answered>> + use<> {
        self.returned.drain().map(Call::in_memory)
    }
}

/// A call taken by its handler, for a later reply; `Send`.
///
/// It is answered on the shard's thread, as by a [task](super::ShardTask), or on any other thread. It derefs to the
/// [`ServerCall`], and keeps its arguments, chunks and result memory until it is answered or dropped.
/// [`limits.max_deferred`](crate::config::LimitsConfig::max_deferred) bounds their number for a connection.
///
/// A dropped call is answered with SYSTEM_ERR. [`ShardStats::get`](crate::stats::ShardStats::get)`("calls_dropped")`
/// counts such calls.
#[must_use = "answer it; dropped, its caller gets SYSTEM_ERR"]
#[doc(alias = "asynchronous reply")]
pub struct DeferredCall {
    /// `None` once answered.
    call: Option<Call<Ready>>,
    origin: Arc<Origin>,
}

impl DeferredCall {
    #[inline]
    pub(crate) fn new(call: Call<Ready>, origin: &Arc<Origin>) -> Self {
        Self { call: Some(call), origin: Arc::clone(origin) }
    }

    /// Answers the call, with its results or a refusal; never blocks.
    ///
    /// The shard sends the reply in its current or next turn. If the connection is closed, nothing happens.
    #[inline]
    pub fn answer(mut self, outcome: Result<(), Refusal>) {
        self.end(|call| call.answered(outcome));
    }

    /// Ends the call by `answer`, unless it has ended, and returns it to its shard.
    #[inline]
    fn end(&mut self, answer: impl FnOnce(Call<Ready>) -> Call<Answered>) {
        let Some(call) = self.call.take() else { return };
        // A stopped shard needs no reply.
        if self.origin.shard.push(answer(call).into_memory()).is_ok() {
            self.origin.signal.notify();
        }
    }

    /// Whether the connection is closed, so that nobody awaits the reply.
    ///
    /// Check it before long work. Answer or drop such a call at once: it still counts for its host.
    ///
    /// It stays false when only the caller gives up, such as by a time-out: the protocol does not report that.
    pub fn is_disconnected(&self) -> bool {
        self.origin.is_over()
    }

    /// Drops a call that has not begun, if its connection is closed.
    ///
    /// Otherwise returns it. A dropped [cached](super::Procedure::cached) call counts as not run, so that its
    /// retransmission runs. For calls that waited in a queue of the application.
    #[must_use]
    pub fn skip_if_disconnected(mut self) -> Option<Self> {
        if !self.is_disconnected() {
            return Some(self);
        }
        self.end(Call::skipped);
        None
    }

    /// Owner of the quotas that the call counts against.
    ///
    /// It is the caller's host, or its process on a fabric without addresses. All connections of a host have the same
    /// one, whatever their credentials. An IPv6 host owns its network of 64 bits. For quotas of the application, such
    /// as of its threads.
    pub fn quota_owner(&self) -> &Arc<str> {
        &self.origin.owner
    }
}

impl Drop for DeferredCall {
    #[inline]
    fn drop(&mut self) {
        self.end(Call::dropped);
    }
}

impl Deref for DeferredCall {
    type Target = ServerCall;

    #[inline]
    fn deref(&self) -> &ServerCall {
        self.call.as_ref().expect("a call ends once, by value").view()
    }
}

impl DerefMut for DeferredCall {
    #[inline]
    fn deref_mut(&mut self) -> &mut ServerCall {
        self.call.as_mut().expect("a call ends once, by value").view_mut()
    }
}

impl fmt::Debug for DeferredCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredCall")
            .field("xid", &self.info().xid())
            .field("procedure", &self.info().procedure())
            .finish()
    }
}
