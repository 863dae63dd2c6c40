//! Calls that are answered later: their handler takes them, and answers them when it can, on any thread.
//!
//! A call on its way home is in a list that its shard looks at in each turn while any is out; who puts it there
//! wakes the shard, which costs a fence and a load while it is awake. Whether the connection is still there, the
//! shard alone knows for certain: a call whose connection is over goes home all the same, and no further.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::call::{Answered, Call, OwnedCall, Ready, ServerCall};
use crate::handoff::parker::Signal;
use crate::handoff::returns::{Came, Home, WayHome};
use crate::proto::Refusal;

/// Where calls that were taken came from: one connection, for as long as it lasts.
pub(crate) struct Origin {
    way: WayHome<OwnedCall>,
    signal: Signal,
    over: AtomicBool,
}

impl Origin {
    /// The connection is over.
    pub(crate) fn end(&self) {
        // Relaxed: nothing is read because of it that another thread wrote.
        self.over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// Where calls that were taken come home to, on their shard.
pub(crate) struct CallsHome {
    home: Home<OwnedCall>,
    /// Wakes the shard.
    signal: Signal,
}

impl CallsHome {
    /// `signal` wakes the shard.
    pub(crate) fn new(signal: Signal) -> Self {
        Self { home: Home::new(), signal }
    }

    /// What leads here, for one more connection of the shard.
    pub(crate) fn origin(&self) -> Arc<Origin> {
        Arc::new(Origin { way: self.home.way(), signal: self.signal.clone(), over: AtomicBool::new(false) })
    }

    /// Takes all that have come, in their order.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> CameHome {
        CameHome(self.home.take())
    }
}

/// Calls that have come home, oldest first.
pub(crate) struct CameHome(Came<OwnedCall>);

impl CameHome {
    /// All were taken.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Iterator for CameHome {
    type Item = Call<Answered>;

    #[inline(always)]
    fn next(&mut self) -> Option<Call<Answered>> {
        Call::next_of(&mut self.0)
    }
}

/// A call that its handler has taken, to answer it when it can: on the shard's thread, for example in the
/// application's [task](super::ShardTask), or on any other. Arguments, chunks and the memory of the results are
/// those of the [`ServerCall`] that it is; all of that stays with it for as long as it is kept, so how many a
/// connection may have out is [`limits.max_deferred`](crate::config::LimitsConfig::max_deferred).
///
/// One that is dropped unanswered is answered with SYSTEM_ERR, and counted
/// ([`ShardStats::calls_dropped`](crate::stats::ShardStats::calls_dropped)).
pub struct DeferredCall {
    /// `None` once it is on its way home.
    call: Option<Call<Ready>>,
    origin: Arc<Origin>,
}

impl DeferredCall {
    #[inline]
    pub(crate) fn new(call: Call<Ready>, origin: &Arc<Origin>) -> Self {
        Self { call: Some(call), origin: Arc::clone(origin) }
    }

    /// Answers it: with the results that were written, or with a refusal. The reply goes out in the shard's
    /// current turn, or its next one. If the connection is over meanwhile, nothing happens.
    #[inline]
    pub fn answer(mut self, outcome: Result<(), Refusal>) {
        if let Some(call) = self.call.take() {
            self.send_home(call.answered(outcome));
        }
    }

    #[inline]
    fn send_home(&self, call: Call<Answered>) {
        // A shard that is gone needs nothing back.
        if call.go_home(&self.origin.way).is_ok() {
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
        if let Some(call) = self.call.take() {
            self.send_home(call.dropped());
        }
    }
}

impl Deref for DeferredCall {
    type Target = ServerCall;

    #[inline]
    fn deref(&self) -> &ServerCall {
        self.call.as_ref().expect("it goes home once, by value").view()
    }
}

impl DerefMut for DeferredCall {
    #[inline]
    fn deref_mut(&mut self) -> &mut ServerCall {
        self.call.as_mut().expect("it goes home once, by value").view_mut()
    }
}

impl fmt::Debug for DeferredCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredCall").field("xid", &self.xid()).field("procedure", &self.procedure()).finish()
    }
}
