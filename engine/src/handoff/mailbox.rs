//! Messages of many application threads to one shard: a ring for each sender.
//!
//! The shard polls busy rings only, so a turn costs nothing for idle senders. The receiving end of an idle ring waits
//! in the *berth* that it shares with its sender. A sender that finds the end there passes it to the shard, by a
//! lock-free list. The shard then polls the ring in each turn. After a number of empty polls it puts the end back, if
//! it polls many other rings. A new ring is idle.
//!
//! SYNC POINT berth: the sender publishes an item, or its end; then a fence; then it checks the berth. The shard puts
//! the receiving end there; then a fence; then it checks the ring once more. One of them sees the other's write, so no
//! item waits in an unpolled ring.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::{Arc, Ordering, fence};

use super::parker::Signal;
use super::returns::{Berth, Home, Link, Linked, WayHome};
use super::ring_sender::RingSender;
pub use super::ring_sender::SendError;
use super::spsc::{Consumer, ring};

/// Most items taken from one ring at a time.
const QUANTUM: usize = 16;
/// Up to this many rings are polled even when idle. A poll costs a few nanoseconds, a round trip to the berth some
/// hundred.
const FEW: usize = if cfg!(loom) { 0 } else { 16 };
/// Empty polls in a row after which a ring returns to its berth.
const QUIET: u32 = if cfg!(loom) { 1 } else { 64 };

/// The receiving end of one sender's ring.
struct Inlet<T: Send> {
    items: Consumer<T>,
    /// Empty polls in a row.
    quiet: u32,
    berth: Arc<Berth<Self>>,
    link: Link<Self>,
}

impl<T: Send> Linked for Inlet<T> {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.link
    }
}

/// The shard's end: the rings of all senders.
///
/// Dropping it closes every ring: it drops their items, and later sends fail with [`SendError::Closed`].
pub struct Mailbox<T: Send> {
    /// Polled rings.
    #[expect(clippy::vec_box, reason = "the boxes go to their senders, and return")]
    busy: Vec<Box<Inlet<T>>>,
    /// The ring to poll first.
    next: usize,
    home: Home<Inlet<T>>,
    signal: Signal,
}

impl<T: Send> Mailbox<T> {
    /// An inbox without senders; `signal` wakes the thread that will poll it.
    pub fn new(signal: Signal) -> Self {
        Self { busy: Vec::new(), next: 0, home: Home::new(), signal }
    }

    /// A connector for other threads.
    pub fn connector(&self) -> Connector<T> {
        Connector { way: self.home.way(), signal: self.signal.clone() }
    }

    /// Passes up to `max` items to `take`, from the senders in turn; returns their number. Forgets closed senders.
    #[inline]
    pub fn poll(&mut self, max: usize, mut take: impl FnMut(T)) -> usize {
        if !self.home.is_empty() {
            self.busy.extend(self.home.take());
        }
        let mut taken = 0;
        // Consecutive rings with fewer items than requested; all of them, when nothing is left.
        let mut drained = 0;
        while taken < max && drained < self.busy.len() {
            if self.next >= self.busy.len() {
                self.next = 0;
            }
            let many = self.busy.len() > FEW;
            let inlet = &mut self.busy[self.next];
            let quantum = QUANTUM.min(max - taken);
            let batch = inlet.items.drain(quantum);
            let count = batch.len();
            batch.for_each(&mut take);
            if count > 0 {
                inlet.quiet = 0;
            } else {
                inlet.quiet += u32::from(many);
                if (many && inlet.quiet >= QUIET) || inlet.items.is_closed() {
                    self.put_away(self.next);
                    continue;
                }
            }
            drained = if count < quantum { drained + 1 } else { 0 };
            taken += count;
            self.next += 1;
        }
        taken
    }

    /// Puts a ring into its berth; drops one without a sender.
    #[cold]
    fn put_away(&mut self, at: usize) {
        let mut inlet = self.busy.swap_remove(at);
        if inlet.items.is_closed() {
            return;
        }
        inlet.quiet = 0;
        let (berth, glance) = (Arc::clone(&inlet.berth), inlet.items.glance());
        berth.put(inlet);
        // SYNC POINT berth: with the fence in `RingSender::send` and `close`, before the check in `Sender::join`.
        fence(Ordering::SeqCst);
        if glance.has_news() {
            // Otherwise the sender gives it back.
            self.busy.extend(berth.take());
        }
    }

    /// Whether a poll would find items, or a new or closed sender: the check before sleeping.
    pub fn has_work(&self) -> bool {
        !self.home.is_empty() || self.busy.iter().any(|inlet| !inlet.items.is_empty() || inlet.items.is_closed())
    }

    /// Number of polled rings.
    pub fn busy(&self) -> usize {
        self.busy.len()
    }
}

/// Creates senders to one shard, on any thread.
pub struct Connector<T: Send> {
    way: WayHome<Inlet<T>>,
    signal: Signal,
}

impl<T: Send> Clone for Connector<T> {
    fn clone(&self) -> Self {
        Self { way: self.way.clone(), signal: self.signal.clone() }
    }
}

impl<T: Send> Connector<T> {
    /// Creates a sender, with a ring of `capacity` items; allocates. It is closed if the shard is gone.
    pub fn connect(&self, capacity: usize) -> Sender<T> {
        let (producer, items) = ring(capacity);
        let berth = Arc::new(Berth::new());
        // A cycle, which ends with the sender: it takes the inlet out, or the shard has the inlet and drops it.
        berth.put(Box::new(Inlet { items, quiet: 0, berth: Arc::clone(&berth), link: Link::default() }));
        Sender { ring: RingSender::new(producer, self.signal.clone()), berth, way: self.way.clone() }
    }
}

/// One application thread's end.
pub struct Sender<T: Send> {
    ring: RingSender<T>,
    berth: Arc<Berth<Inlet<T>>>,
    way: WayHome<Inlet<T>>,
}

impl<T: Send> Sender<T> {
    /// Sends, and wakes a sleeping receiver. The receiver takes an accepted item, or drops it at its end.
    #[inline]
    pub fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        self.ring.send(item)?;
        // SYNC POINT berth: with the fence in `Mailbox::put_away`.
        if self.berth.is_empty() { Ok(()) } else { self.join() }
    }

    /// Passes the receiving end to the shard. Returns the newest item if there is no shard.
    #[cold]
    fn join(&mut self) -> Result<(), SendError<T>> {
        // The shard may have taken the end back.
        let Some(inlet) = self.berth.take() else { return Ok(()) };
        match self.way.give_back(inlet) {
            Ok(()) => {
                self.ring.notify();
                Ok(())
            }
            Err(mut inlet) => {
                // Its items stay in the ring.
                inlet.items.close();
                drop(inlet);
                self.ring.take_back().map_or(Ok(()), |item| Err(SendError::Closed(item)))
            }
        }
    }

    /// True once the receiver is gone.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.ring.is_closed() || self.way.is_closed()
    }
}

impl<T: Send> Drop for Sender<T> {
    fn drop(&mut self) {
        self.ring.close();
        // The shard may be gone.
        let _ = self.join();
    }
}

#[cfg(test)]
mod tests;
