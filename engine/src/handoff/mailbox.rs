//! Many application threads to one shard: a ring for each, of which the shard looks at those that are in use.
//!
//! A ring that is quiet is nobody's to look at: its receiving end waits in the *berth* that it shares with its
//! sender. Whoever sends looks there, and if the end is there brings it *home*, to the shard, by a list without a
//! lock. From then on the shard looks at that ring each turn, and nothing is shared between senders; until it has
//! found nothing there for a while, and there are others to look at: then it puts the end back. So a turn costs what
//! the senders that have something to say cost, whatever the number of those that have not. A new ring is a quiet
//! one.
//!
//! SYNC POINT berth: the sender publishes an item, or its end, has a fence, and looks at the berth; the shard puts the
//! receiving end there, has a fence, and looks at the ring once more. One of them sees what the other did: nothing
//! that was sent waits in a ring that nobody looks at.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::{Arc, Ordering, fence};

use super::parker::Signal;
use super::returns::{Berth, Home, Link, Linked, WayHome};
use super::ring_sender::RingSender;
pub use super::ring_sender::SendError;
use super::spsc::{Consumer, ring};

/// Items taken from one ring before the next one has its turn.
const QUANTUM: usize = 16;
/// So many rings are looked at each turn, used or not. To look costs a few nanoseconds; to put a ring away, and to
/// bring it home, some hundred.
const FEW: usize = if cfg!(loom) { 0 } else { 16 };
/// Looks in a row that found nothing, after which a ring is put away: what it costs to bring it home again.
const QUIET: u32 = if cfg!(loom) { 1 } else { 64 };

/// The receiving end of one sender's ring.
struct Inlet<T: Send> {
    items: Consumer<T>,
    /// Looks in a row that found nothing.
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
/// Dropping it closes every ring; items inside are dropped, and later sends are refused with
/// [`SendError::Closed`].
pub struct Mailbox<T: Send> {
    /// Those that are looked at.
    #[expect(clippy::vec_box, reason = "the boxes go to their senders, and come home")]
    busy: Vec<Box<Inlet<T>>>,
    /// Whose turn it is.
    next: usize,
    home: Home<Inlet<T>>,
    signal: Signal,
}

impl<T: Send> Mailbox<T> {
    /// An inbox without senders; `signal` wakes the thread that will poll it.
    pub fn new(signal: Signal) -> Self {
        Self { busy: Vec::new(), next: 0, home: Home::new(), signal }
    }

    /// What other threads join with.
    pub fn connector(&self) -> Connector<T> {
        Connector { way: self.home.way(), signal: self.signal.clone() }
    }

    /// Hands up to `max` items to `take`, from the senders in turn; returns how many. Forgets senders that
    /// are gone.
    #[inline]
    pub fn poll(&mut self, max: usize, mut take: impl FnMut(T)) -> usize {
        if !self.home.is_empty() {
            self.busy.extend(self.home.take());
        }
        let mut taken = 0;
        // Rings in a row that had less than asked for: when that is all of them, nothing is left.
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

    /// Forgets a ring whose sender is gone, and leaves any other to its sender.
    #[cold]
    fn put_away(&mut self, at: usize) {
        let mut inlet = self.busy.swap_remove(at);
        if inlet.items.is_closed() {
            return;
        }
        inlet.quiet = 0;
        let (berth, glance) = (Arc::clone(&inlet.berth), inlet.items.glance());
        berth.put(inlet);
        // SYNC POINT berth: with the fence in `RingSender::send` and `close`, in front of the look in `Sender::join`.
        fence(Ordering::SeqCst);
        if glance.has_news() {
            // Else the sender brings it.
            self.busy.extend(berth.take());
        }
    }

    /// True if a poll would find something: items, or a sender that came or went. The second look before
    /// sleeping.
    pub fn has_work(&self) -> bool {
        !self.home.is_empty() || self.busy.iter().any(|inlet| !inlet.items.is_empty() || inlet.items.is_closed())
    }

    /// Senders whose rings are looked at.
    pub fn busy(&self) -> usize {
        self.busy.len()
    }
}

/// Makes senders to one shard. Any thread may hold a clone.
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
    /// Joins, with a ring of `capacity` items. Allocates: once per application thread, not per call. If the
    /// shard is gone already the sender is born closed.
    pub fn connect(&self, capacity: usize) -> Sender<T> {
        let (producer, items) = ring(capacity);
        let berth = Arc::new(Berth::new());
        // The two hold each other; but a sender that ends takes the inlet out, or the shard has it and drops it.
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
    /// Sends and wakes the receiver if it sleeps. An item that was accepted is taken by the receiver, or
    /// dropped by it when it ends: it never waits in a ring that nobody reads.
    #[inline]
    pub fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        self.ring.send(item)?;
        // SYNC POINT berth: with the fence in `Mailbox::put_away`.
        if self.berth.is_empty() { Ok(()) } else { self.join() }
    }

    /// Has the shard look at the ring. Gives the newest item back if there is no shard.
    #[cold]
    fn join(&mut self) -> Result<(), SendError<T>> {
        // It is not there if the shard has taken it back.
        let Some(inlet) = self.berth.take() else { return Ok(()) };
        match self.way.give_back(inlet) {
            Ok(()) => {
                self.ring.notify();
                Ok(())
            }
            Err(mut inlet) => {
                // What is in it stays there.
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
        // A shard that is gone needs no telling.
        let _ = self.join();
    }
}

#[cfg(test)]
mod tests;
