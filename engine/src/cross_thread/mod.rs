//! Lock-free queues, slots and wake-ups between shards and other threads.
//!
//! ```text
//!  application thread ── Sender ═ ring ═▶ Mailbox ──▶ shard ── ShardPort ═ ring ═▶ worker
//!         ▲                                             │ ▲                          │
//!         └──── Ticket ◀─────── slot ◀───── Completer ──┘ └───────── ring ◀──────────┘
//! ```
//!
//! # Ownership
//! 1. Every ring has one [`Producer`](spsc::Producer) and one [`Consumer`](spsc::Consumer), moved and never cloned.
//!    Many senders are many rings, so no two threads write the same line.
//! 2. A [`Ticket`](slot::Ticket) and its [`Completer`](slot::Completer) are the two ends of one slot, with the same
//!    rule.
//! 3. A thread publishes an item, then notifies the other one by its [`Signal`](parker::Signal). That costs a fence and
//!    a load while the other thread is awake.
//! 4. Deferred calls, rings that become busy, and rings of new shards move by an intrusive queue (`return_queue.rs`),
//!    with many producers and one consumer.
//! 5. Any end may be dropped at any time; the other end detects it. No item is lost, or dropped twice.
//!
//! Nothing here allocates after set-up. Blocking calls: [`slot::Ticket::wait`], `block_on`, [`parker::Sleeper::park`],
//! and the drop of [`workers::WorkerPool`].

pub(crate) mod bell;
pub(crate) mod block_on;
pub mod idle;
pub mod mailbox;
pub(crate) mod panics;
pub mod parker;
pub mod pin;
pub(crate) mod return_queue;
mod ring_sender;
pub mod slot;
pub mod spsc;
pub mod workers;

/// Runs a model through its interleavings, with up to three preemptions each, or `LOOM_MAX_PREEMPTIONS`.
#[cfg(all(test, loom))]
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}
