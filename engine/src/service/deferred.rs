//! Deferred calls, which their handler takes and answers later, on any thread.
//!
//! Answered calls are in a queue that the shard checks in each turn while any call is deferred. Adding a call wakes the
//! shard, which costs a fence and a load while the shard is awake. Only the shard knows whether the connection is still
//! open, so a call of a closed connection returns to the shard, too, and is dropped there.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::call::{Answered, OwnedCall, Ready, ServedCall, ServerCall};
use crate::cross_thread::parker::Signal;
use crate::cross_thread::return_queue::{ReturnHandle, ReturnQueue};
use crate::proto::Refusal;

/// Connection that deferred calls arrived on.
pub(crate) struct DeferredOrigin {
    /// Name of the peer in log lines.
    peer: Box<str>,
    /// Returns calls to their shard.
    shard: ReturnHandle<OwnedCall>,
    /// Wakes the shard.
    signal: Signal,
    /// Whether the connection is closed.
    is_closed: AtomicBool,
    /// Owner of the quotas that its calls count against.
    owner: Arc<str>,
}

impl DeferredOrigin {
    /// Marks the connection as closed.
    pub(crate) fn set_closed(&self) {
        // The flag orders no other data, so it can be relaxed.
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Name of the peer in log lines.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the connection is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

/// The shard's end of the queue of returned calls.
pub(crate) struct DeferredReturnQueue {
    returned: ReturnQueue<OwnedCall>,
    /// Wakes the shard.
    signal: Signal,
}

impl DeferredReturnQueue {
    /// A queue that wakes the shard with `signal`.
    pub(crate) fn new(signal: Signal) -> Self {
        Self { returned: ReturnQueue::new(), signal }
    }

    /// Creates the origin of the calls of a connection to this peer. They count against the quotas of `owner`.
    pub(crate) fn origin(&self, owner: &Arc<str>, peer: Box<str>) -> Arc<DeferredOrigin> {
        let (shard, signal, owner) = (self.returned.handle(), self.signal.clone(), Arc::clone(owner));
        Arc::new(DeferredOrigin { peer, shard, signal, is_closed: AtomicBool::new(false), owner })
    }

    /// Takes all returned calls, oldest first.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = ServedCall<Answered>> + use<> {
        self.returned.drain().map(ServedCall::in_memory)
    }
}

/// A call taken by its handler, for a later reply; `Send`.
///
/// It is answered on the shard's thread, for example by a [task](super::ShardTask), or on any other thread. It
/// dereferences to the [`ServerCall`], and keeps the call's arguments, chunks and result memory until it is answered or
/// dropped. [`limits.max_deferred`](crate::config::LimitsConfig::max_deferred) bounds the deferred calls of a
/// connection.
///
/// A dropped call is answered with SYSTEM_ERR. [`ShardStats::get`](crate::stats::ShardStats::get)`("calls_dropped")`
/// counts such calls.
#[must_use = "answer the call; if it is dropped, its caller gets SYSTEM_ERR"]
#[doc(alias = "asynchronous reply")]
pub struct DeferredCall {
    /// `None` once answered.
    call: Option<ServedCall<Ready>>,
    origin: Arc<DeferredOrigin>,
}

impl DeferredCall {
    #[inline]
    pub(crate) fn new(call: ServedCall<Ready>, origin: &Arc<DeferredOrigin>) -> Self {
        Self { call: Some(call), origin: Arc::clone(origin) }
    }

    /// Answers the call, with its results or a refusal; never blocks.
    ///
    /// The shard sends the reply in its current or next turn. If the connection is closed, no reply is sent.
    #[inline]
    pub fn answer(mut self, outcome: Result<(), Refusal>) {
        self.end(|call| call.answered(outcome));
    }

    /// Ends the call with `answer`, unless it has ended, and returns it to its shard.
    #[inline]
    fn end(&mut self, answer: impl FnOnce(ServedCall<Ready>) -> ServedCall<Answered>) {
        let Some(call) = self.call.take() else { return };
        // A shard that has stopped refuses the call, which is then dropped.
        if self.origin.shard.push(answer(call).into_memory()).is_ok() {
            self.origin.signal.notify();
        }
    }

    /// Whether the connection is closed: no caller waits for the reply.
    ///
    /// Check this before long work. Answer or drop a disconnected call immediately, because it still counts against the
    /// quota of its host.
    ///
    /// The result stays false if the caller abandons the call, for example at a time-out, because the protocol does not
    /// report that.
    pub fn is_disconnected(&self) -> bool {
        self.origin.is_closed()
    }

    /// Drops a call that has not begun, if its connection is closed.
    ///
    /// Otherwise returns the call. A [cached](super::Procedure::cached) call that is dropped counts as not run, so that
    /// its retransmission runs. Use this function for calls that waited in a queue of the application.
    #[must_use]
    pub fn skip_if_disconnected(mut self) -> Option<Self> {
        if !self.is_disconnected() {
            return Some(self);
        }
        self.end(ServedCall::skipped);
        None
    }

    /// Owner of the quotas that the call counts against.
    ///
    /// It is the caller's host, or its process on a fabric without addresses. All connections of a host have the same
    /// owner, whatever their credentials. All addresses of an IPv6 network of 64 bits count as one host. The
    /// application may use it for its own quotas, for example to limit the threads that one host occupies.
    pub fn quota_owner(&self) -> &Arc<str> {
        &self.origin.owner
    }
}

impl Drop for DeferredCall {
    #[inline]
    fn drop(&mut self) {
        self.end(ServedCall::dropped);
    }
}

impl Deref for DeferredCall {
    type Target = ServerCall;

    #[inline]
    fn deref(&self) -> &ServerCall {
        self.call.as_ref().expect("a call in use has not ended").view()
    }
}

impl DerefMut for DeferredCall {
    #[inline]
    fn deref_mut(&mut self) -> &mut ServerCall {
        self.call.as_mut().expect("a call in use has not ended").view_mut()
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
