//! Lock-free queues, slots and wake-ups between shards and other threads.
//!
//! ```text
//!  application thread ── Sender ═ ring ═▶ Mailbox ──▶ shard ── ShardPort ═ ring ═▶ worker
//!         ▲                                             │ ▲                          │
//!         └── ResultTicket ◀──── slot ◀──── Completer ──┘ └───────── ring ◀──────────┘
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `spsc` | a bounded ring between one producer and one consumer |
//! | `ring_sender` | the producer of a ring, with the signal that wakes its consumer |
//! | `mailbox` | commands of many application threads to one shard |
//! | `slot` | slots for the results of calls, with their tickets and completers |
//! | `return_queue` | an intrusive queue of boxes, with many producers and one consumer |
//! | `workers` | the pool of worker threads, and a shard's port to it |
//! | `parker` | sleep of a polling thread until another thread notifies it |
//! | `wake_flag` | a flag that any thread sets and one polling thread takes |
//! | `idle` | idle policies: when a polling thread spins, yields or sleeps |
//! | `block_on` | blocking wait for a future |
//! | `pin` | cores of the process, and pinning of threads to them |
//! | `panics` | catching of panics in application code |
//!
//! # Ownership
//! 1. Every ring has one [`SpscProducer`](spsc::SpscProducer) and one [`SpscConsumer`](spsc::SpscConsumer), which are
//!    moved and never cloned. Each sender has its own ring, so no two threads write the same cache line.
//! 2. A [`ResultTicket`](slot::ResultTicket) and its [`Completer`](slot::Completer) are the two ends of one slot. Both
//!    are moved and never cloned.
//! 3. A thread publishes an item, then notifies the other one by its [`Signal`](parker::Signal). That costs a fence and
//!    a load while the other thread is awake.
//! 4. `return_queue` passes three kinds of boxes: deferred calls to their shard, a sender's ring that has become busy
//!    to the mailbox, and the rings of a new shard to a worker.
//! 5. Any end may be dropped at any time; the other end detects it. No item is lost, or dropped twice.
//!
//! Nothing here allocates after set-up. Blocking calls: [`slot::ResultTicket::wait`], `block_on`,
//! [`parker::Parker::park`], and the drop of [`workers::WorkerPool`].

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
pub(crate) mod wake_flag;
pub mod workers;

/// Explores the interleavings of a model, with up to three preemptions each, or `LOOM_MAX_PREEMPTIONS`.
#[cfg(all(test, loom))]
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}
