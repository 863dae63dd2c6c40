//! Commands of many application threads to one shard, with a ring for each sender.
//!
//! The shard polls busy rings only, so a turn costs nothing for idle senders. The consumer of an idle ring waits in a
//! slot that it shares with its sender. A sender that finds the consumer in the slot passes it to the shard by a
//! lock-free queue. The shard then polls the ring in each turn. After a number of empty polls it puts the consumer back
//! into the slot, if it polls many other rings. A new ring is idle.
//!
//! SYNC POINT `idle`: the sender publishes an item, or closes the ring; then a fence; then it checks the slot. The
//! shard puts the consumer into the slot; then a fence; then it checks the ring once more. One of them sees the other's
//! write, so no item waits in an unpolled ring.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::{Arc, Ordering, fence};

use super::parker::Signal;
use super::return_queue::{AtomicSlot, Link, Linked, ReturnHandle, ReturnQueue};
use super::ring_sender::RingSender;
pub use super::ring_sender::SendError;
use super::spsc::{SpscConsumer, ring};

/// Maximum number of items taken from one ring at a time.
const QUANTUM: usize = 16;
/// Number of rings that are polled even when idle.
///
/// A poll costs a few nanoseconds, whereas a round trip through the slot costs a few hundred.
const ALWAYS_POLLED: usize = if cfg!(loom) { 0 } else { 16 };
/// Consecutive empty polls after which a ring is idle.
const IDLE_AFTER: u32 = if cfg!(loom) { 1 } else { 64 };

/// The consumer of one sender's ring.
struct SenderRing<T: Send> {
    items: SpscConsumer<T>,
    /// Consecutive empty polls.
    empty_polls: u32,
    idle_slot: Arc<AtomicSlot<Self>>,
    link: Link<Self>,
}

impl<T: Send> Linked for SenderRing<T> {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.link
    }
}

/// The shard's end: the rings of all senders.
///
/// Dropping the mailbox closes every ring and drops its items. Later sends fail with [`SendError::Closed`].
pub struct Mailbox<T: Send> {
    /// Polled rings.
    #[expect(clippy::vec_box, reason = "the boxes move to the slots of their senders, and back")]
    busy: Vec<Box<SenderRing<T>>>,
    /// The ring to poll first.
    next: usize,
    /// Rings that have become busy.
    activated: ReturnQueue<SenderRing<T>>,
    signal: Signal,
}

impl<T: Send> Mailbox<T> {
    /// A mailbox without senders; `signal` wakes the thread that polls it.
    pub fn new(signal: Signal) -> Self {
        Self { busy: Vec::new(), next: 0, activated: ReturnQueue::new(), signal }
    }

    /// A connector, by which other threads create senders.
    pub fn connector(&self) -> Connector<T> {
        Connector { activated: self.activated.handle(), signal: self.signal.clone() }
    }

    /// Passes up to `max` items to `take`, from the senders in turn; returns their number. Frees the rings of senders
    /// that were dropped.
    #[inline]
    pub fn poll(&mut self, max: usize, mut take: impl FnMut(T)) -> usize {
        if !self.activated.is_empty() {
            self.busy.extend(self.activated.drain());
        }
        let mut taken = 0;
        // Consecutive rings with fewer items than requested. Once it equals the number of rings, no item is left.
        let mut drained = 0;
        while taken < max && drained < self.busy.len() {
            if self.next >= self.busy.len() {
                self.next = 0;
            }
            let can_idle = self.busy.len() > ALWAYS_POLLED;
            let ring = &mut self.busy[self.next];
            let quantum = QUANTUM.min(max - taken);
            let count = ring.items.drain(quantum).map(&mut take).count();
            if count > 0 {
                ring.empty_polls = 0;
            } else {
                ring.empty_polls += u32::from(can_idle);
                if (can_idle && ring.empty_polls >= IDLE_AFTER) || ring.items.is_finished() {
                    self.make_idle(self.next);
                    continue;
                }
            }
            drained = if count < quantum { drained + 1 } else { 0 };
            taken += count;
            self.next += 1;
        }
        taken
    }

    /// Puts a ring into its slot, or drops it if it has no sender.
    #[cold]
    fn make_idle(&mut self, at: usize) {
        let mut ring = self.busy.swap_remove(at);
        if ring.items.is_finished() {
            return;
        }
        ring.empty_polls = 0;
        let (slot, view) = (Arc::clone(&ring.idle_slot), ring.items.view());
        slot.put(ring);
        // SYNC POINT `idle`: pairs with the fence in `RingSender::send` and `close`, before the check in
        // `Sender::activate`.
        fence(Ordering::SeqCst);
        if view.has_changed() {
            // If the slot is empty, the sender has taken the ring and passes it to the shard.
            self.busy.extend(slot.take());
        }
    }

    /// Whether a poll would find items, or a new or closed sender. Check it before sleeping.
    pub fn has_work(&self) -> bool {
        !self.activated.is_empty() || self.busy.iter().any(|ring| !ring.items.is_empty() || ring.items.is_finished())
    }

    /// Number of polled rings.
    pub fn busy_rings(&self) -> usize {
        self.busy.len()
    }
}

/// Creates senders to one shard, on any thread.
pub struct Connector<T: Send> {
    activated: ReturnHandle<SenderRing<T>>,
    signal: Signal,
}

impl<T: Send> Clone for Connector<T> {
    fn clone(&self) -> Self {
        Self { activated: self.activated.clone(), signal: self.signal.clone() }
    }
}

impl<T: Send> Connector<T> {
    /// Creates a sender, with a ring of `capacity` items; allocates. The sender is closed if the shard has stopped.
    pub fn connect(&self, capacity: usize) -> Sender<T> {
        let (producer, items) = ring(capacity);
        let idle_slot = Arc::new(AtomicSlot::new());
        // The ring and its slot own each other until the sender is dropped: it takes the ring out of the slot, or the
        // shard has the ring and drops it.
        idle_slot.put(Box::new(SenderRing {
            items,
            empty_polls: 0,
            idle_slot: Arc::clone(&idle_slot),
            link: Link::default(),
        }));
        Sender { ring: RingSender::new(producer, self.signal.clone()), idle_slot, activated: self.activated.clone() }
    }
}

/// One application thread's end.
pub struct Sender<T: Send> {
    ring: RingSender<T>,
    idle_slot: Arc<AtomicSlot<SenderRing<T>>>,
    activated: ReturnHandle<SenderRing<T>>,
}

impl<T: Send> Sender<T> {
    /// Sends an item, and wakes the mailbox's thread if it sleeps. The mailbox takes an accepted item, or drops it when
    /// the mailbox itself is dropped.
    #[inline]
    pub fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        self.ring.send(item)?;
        // SYNC POINT `idle`: pairs with the fence in `Mailbox::make_idle`.
        if self.idle_slot.is_empty() { Ok(()) } else { self.activate() }
    }

    /// Passes the consumer to the shard. Returns the newest item if the shard has stopped.
    #[cold]
    fn activate(&mut self) -> Result<(), SendError<T>> {
        // The shard may have taken the consumer back.
        let Some(ring) = self.idle_slot.take() else { return Ok(()) };
        match self.activated.push(ring) {
            Ok(()) => {
                self.ring.signal.notify();
                Ok(())
            }
            Err(mut ring) => {
                // A consumer that is closed before its drop leaves its items in the ring, to be reclaimed.
                ring.items.close();
                drop(ring);
                self.ring.reclaim_newest().map_or(Ok(()), |item| Err(SendError::Closed(item)))
            }
        }
    }

    /// Whether the mailbox has been dropped.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.ring.producer.is_closed() || self.activated.is_closed()
    }
}

impl<T: Send> Drop for Sender<T> {
    fn drop(&mut self) {
        self.ring.close();
        // An error means that the shard has stopped.
        let _ = self.activate();
    }
}

#[cfg(test)]
mod tests;
