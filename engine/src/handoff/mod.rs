//! Lock-free hand-off between shards and the threads around them.
//!
//! ```text
//!  application thread ── Sender ═ ring ═▶ Mailbox ──▶ shard ── ShardPort ═ ring ═▶ worker
//!         ▲                                             │ ▲                          │
//!         └──── Ticket ◀─────── slot ◀───── Completer ──┘ └───────── ring ◀──────────┘
//! ```
//!
//! # Who may hold which end
//! 1. Every ring has one [`Producer`](spsc::Producer) and one [`Consumer`](spsc::Consumer). Ends are moved, never
//!    cloned: many senders are many rings, so no two threads ever write the same line.
//! 2. A [`Ticket`](slot::Ticket) and its [`Completer`](slot::Completer) are the two ends of one slot, with the same
//!    rule.
//! 3. Whoever puts something into a ring tells the other thread through its [`Signal`](parker::Signal), after
//!    publishing. That costs one fence and one load while the other thread is awake.
//! 4. What comes home from anywhere, as calls that handlers have taken, or rings that have been quiet, does so by a
//!    list (`returns.rs`) with any number of givers and one taker: its links are in what comes.
//! 5. Dropping an end is always allowed and always seen by the other one; nothing that was handed over is lost or
//!    dropped twice.
//!
//! Nothing here allocates after set-up, and nothing blocks unless its name says so ([`slot::Ticket::wait`],
//! `block_on`, [`parker::Sleeper::park`], [`workers::WorkerPool`]'s drop).

pub(crate) mod bell;
pub(crate) mod block_on;
pub mod idle;
mod intake;
pub mod mailbox;
pub(crate) mod panics;
pub mod parker;
pub mod pin;
pub(crate) mod returns;
mod ring_sender;
pub mod slot;
pub mod spsc;
pub mod workers;

/// Locks of the cold paths: std's, or loom's so that models see what they order.
mod lock {
    use std::sync::PoisonError;

    #[cfg(loom)]
    pub(super) use loom::sync::{Mutex, MutexGuard};
    #[cfg(not(loom))]
    pub(super) use std::sync::{Mutex, MutexGuard};

    /// Locks, and goes on after a panic of another holder: what these locks guard is replaced whole, never
    /// half.
    pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs a model through its interleavings. Up to three preemptions in each, which finds nearly everything in
/// seconds; `LOOM_MAX_PREEMPTIONS` asks for another bound.
#[cfg(all(test, loom))]
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}
