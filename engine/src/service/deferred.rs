//! Calls that are answered later: their handler takes them, and answers them when it can, on any thread.
//!
//! A call on its way home is in a list that its shard looks at in each turn while any is out; who puts it there
//! wakes the shard, which costs a fence and a load while it is awake. Whether the connection is still there, the
//! shard alone knows for certain: a call whose connection is over goes home all the same, and no further.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::call::{OwnedCall, ServerCall};
use crate::handoff::parker::Signal;
use crate::handoff::returns::WayHome;
use crate::proto::Refusal;

/// Where calls that were taken came from: one connection, for as long as it lasts.
pub(crate) struct Origin {
    way: WayHome<OwnedCall>,
    signal: Signal,
    over: AtomicBool,
}

impl Origin {
    /// A connection of the shard that this leads to.
    pub(crate) fn new(way: WayHome<OwnedCall>, signal: Signal) -> Self {
        Self { way, signal, over: AtomicBool::new(false) }
    }

    /// The connection is over.
    pub(crate) fn end(&self) {
        // Relaxed: nothing is read because of it that another thread wrote.
        self.over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// A call that its handler has taken, to answer it when it can: on the shard's thread, for example in the
/// application's [task](super::ShardTask), or on any other. Arguments, chunks and the memory of the results are
/// those of the [`ServerCall`] that it is; all of that stays with it for as long as it is kept, so how many a
/// connection may have out is [bounded](crate::Config::max_deferred).
///
/// One that is dropped unanswered is answered with SYSTEM_ERR, and counted
/// ([`ShardStats::calls_dropped`](crate::stats::ShardStats::calls_dropped)).
pub struct DeferredCall {
    /// `None` once it is on its way home.
    call: Option<Box<OwnedCall>>,
    origin: Arc<Origin>,
}

impl DeferredCall {
    #[inline]
    pub(crate) fn new(call: Box<OwnedCall>, origin: &Arc<Origin>) -> Self {
        Self { call: Some(call), origin: Arc::clone(origin) }
    }

    /// Answers it: with the results that were written, or with a refusal. The reply goes out in the shard's
    /// current turn, or its next one. If the connection is over meanwhile, nothing happens.
    #[inline]
    pub fn answer(mut self, outcome: Result<(), Refusal>) {
        if let Some(mut call) = self.call.take() {
            call.refusal = outcome.err();
            self.send_home(call);
        }
    }

    #[inline]
    fn send_home(&self, mut call: Box<OwnedCall>) {
        // What has run must not run again, whoever is left to hear of it.
        call.remember();
        // A shard that is gone needs nothing back.
        if self.origin.way.give_back(call).is_ok() {
            self.origin.signal.notify();
        }
    }

    /// Whether the connection that it came on is over, so that nobody waits for the answer any more. What the
    /// call has asked for may be done all the same, or be left.
    pub fn is_abandoned(&self) -> bool {
        self.origin.is_over()
    }
}

impl Drop for DeferredCall {
    #[inline]
    fn drop(&mut self) {
        if let Some(mut call) = self.call.take() {
            call.drop_unanswered();
            self.send_home(call);
        }
    }
}

impl Deref for DeferredCall {
    type Target = ServerCall;

    #[inline]
    fn deref(&self) -> &ServerCall {
        self.call.as_deref().expect("it goes home once, by value")
    }
}

impl DerefMut for DeferredCall {
    #[inline]
    fn deref_mut(&mut self) -> &mut ServerCall {
        self.call.as_deref_mut().expect("it goes home once, by value")
    }
}

impl fmt::Debug for DeferredCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredCall").field("xid", &self.xid()).field("procedure", &self.procedure()).finish()
    }
}
