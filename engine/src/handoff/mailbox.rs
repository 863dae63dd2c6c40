//! Many application threads to one shard: a ring for each thread, read in turn by the shard.
//!
//! A thread joins a running shard through the [`Connector`]: its new ring waits behind a small lock until the
//! shard, which looks at one flag each turn, takes it in. From then on nothing is shared between senders.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::{Arc, AtomicBool, Ordering, thread};

use super::lock::{Mutex, lock};
use super::parker::Signal;
use super::spsc::{Consumer, Producer, ring};

/// Items taken from one ring before the next one has its turn.
const QUANTUM: usize = 16;

/// New things on their way into a running polling thread.
pub(super) struct Intake<R> {
    /// Something waits. Checked each turn.
    fresh: AtomicBool,
    /// `None` once closed.
    waiting: Mutex<Option<Vec<R>>>,
}

impl<R> Intake<R> {
    pub(super) fn new() -> Self {
        Self { fresh: AtomicBool::new(false), waiting: Mutex::new(Some(Vec::new())) }
    }

    /// Gives it back when the other side has closed.
    pub(super) fn offer(&self, new: R) -> Result<(), R> {
        match &mut *lock(&self.waiting) {
            Some(waiting) => waiting.push(new),
            None => return Err(new),
        }
        // What it announces is ordered by the lock; for a sleeper's second look the notifier's fence does it.
        self.fresh.store(true, Ordering::Release);
        Ok(())
    }

    #[inline]
    pub(super) fn is_fresh(&self) -> bool {
        self.fresh.load(Ordering::Relaxed)
    }

    #[cold]
    pub(super) fn take(&self) -> Vec<R> {
        // First the flag, then the list: what comes in between raises the flag again.
        self.fresh.store(false, Ordering::Relaxed);
        lock(&self.waiting).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Refuses all that comes later, and gives back what waited.
    pub(super) fn close(&self) -> Vec<R> {
        lock(&self.waiting).take().unwrap_or_default()
    }
}

/// The shard's end: all rings of all senders.
///
/// Dropping it closes every ring; items inside are dropped, and later sends are refused with
/// [`SendError::Closed`].
pub struct Mailbox<T> {
    rings: Vec<Consumer<T>>,
    /// Whose turn it is.
    next: usize,
    intake: Arc<Intake<Consumer<T>>>,
    signal: Signal,
}

impl<T> Mailbox<T> {
    /// An inbox without senders; `signal` wakes the thread that will poll it.
    pub fn new(signal: Signal) -> Self {
        Self { rings: Vec::new(), next: 0, intake: Arc::new(Intake::new()), signal }
    }

    /// What other threads join with.
    pub fn connector(&self) -> Connector<T> {
        Connector { intake: Arc::clone(&self.intake), signal: self.signal.clone() }
    }

    /// Hands up to `max` items to `take`, from the senders in turn; returns how many. Forgets senders that
    /// are gone.
    #[inline]
    pub fn poll(&mut self, max: usize, mut take: impl FnMut(T)) -> usize {
        if self.intake.is_fresh() {
            self.rings.append(&mut self.intake.take());
        }
        let mut taken = 0;
        // Rings in a row that had less than asked for: when that is all of them, nothing is left.
        let mut drained = 0;
        while taken < max && drained < self.rings.len() {
            if self.next >= self.rings.len() {
                self.next = 0;
            }
            let ring = &mut self.rings[self.next];
            let quantum = QUANTUM.min(max - taken);
            let batch = ring.drain(quantum);
            let count = batch.len();
            batch.for_each(&mut take);
            if count == 0 && ring.is_closed() {
                self.rings.swap_remove(self.next);
                continue;
            }
            drained = if count < quantum { drained + 1 } else { 0 };
            taken += count;
            self.next += 1;
        }
        taken
    }

    /// True if a poll would find something: items, or a sender that came or went. The second look before
    /// sleeping.
    pub fn has_work(&self) -> bool {
        self.intake.is_fresh() || self.rings.iter().any(|ring| !ring.is_empty() || ring.is_closed())
    }

    /// Senders known to the shard.
    pub fn senders(&self) -> usize {
        self.rings.len()
    }

    /// Items that wait, over all rings.
    pub fn depth(&self) -> usize {
        self.rings.iter().map(Consumer::len).sum()
    }
}

impl<T> Drop for Mailbox<T> {
    fn drop(&mut self) {
        drop(self.intake.close());
    }
}

/// Makes senders to one shard. Any thread may hold a clone.
pub struct Connector<T> {
    intake: Arc<Intake<Consumer<T>>>,
    signal: Signal,
}

impl<T> Clone for Connector<T> {
    fn clone(&self) -> Self {
        Self { intake: Arc::clone(&self.intake), signal: self.signal.clone() }
    }
}

impl<T> Connector<T> {
    /// Joins, with a ring of `capacity` items. Takes a lock and allocates: once per application thread, not
    /// per call. If the shard is gone already the sender is born closed.
    pub fn connect(&self, capacity: usize) -> Sender<T> {
        let (producer, consumer) = ring(capacity);
        // A refused consumer is dropped here, and that closes the ring.
        drop(self.intake.offer(consumer));
        Sender::from_parts(producer, self.signal.clone())
    }
}

/// Why an item was not sent. It comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError<T> {
    /// The receiver has not kept up: try again later, or do less.
    #[error("the ring is full")]
    Full(T),
    /// The receiver is gone for good.
    #[error("the receiver is gone")]
    Closed(T),
}

impl<T> SendError<T> {
    /// What was to be sent.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(item) | Self::Closed(item) => item,
        }
    }
}

/// One application thread's end. Dropping it sends what was staged.
pub struct Sender<T> {
    ring: Producer<T>,
    signal: Signal,
}

impl<T> Sender<T> {
    /// A ring's end, with whom to notify.
    pub(super) fn from_parts(ring: Producer<T>, signal: Signal) -> Self {
        Self { ring, signal }
    }

    /// Sends and wakes the receiver if it sleeps. An item that was accepted is taken by the receiver, or
    /// dropped by it when it ends: it never waits in a ring that nobody reads.
    #[inline]
    pub fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        self.stage(item)?;
        self.ring.publish();
        // Its fence is also the one that `Producer::is_closed` asks for.
        self.signal.notify();
        if self.ring.is_closed() {
            // What is left ends with the newest item, which is this one.
            return self.take_back().map_or(Ok(()), |item| Err(SendError::Closed(item)));
        }
        Ok(())
    }

    /// Puts an item in, to be sent by the next [`flush`](Self::flush).
    #[inline]
    pub fn stage(&mut self, item: T) -> Result<(), SendError<T>> {
        if self.ring.is_closed() {
            return Err(SendError::Closed(item));
        }
        self.ring.stage(item).map_err(SendError::Full)
    }

    /// Sends all that was staged: one store and at most one wake-up. If the receiver is gone, it is dropped
    /// here.
    #[inline]
    pub fn flush(&mut self) {
        self.ring.publish();
        // Its fence is also the one that `Producer::is_closed` asks for.
        self.signal.notify();
        if self.ring.is_closed() {
            drop(self.take_back());
        }
    }

    /// Waits for the receiver's last act, which is near, and takes back what it left; returns the newest.
    #[cold]
    fn take_back(&mut self) -> Option<T> {
        while !self.ring.is_abandoned() {
            thread::yield_now();
        }
        std::iter::from_fn(|| self.ring.reclaim()).last()
    }

    /// True once the receiver is gone.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.ring.is_closed()
    }

    /// Items that the receiver has not taken yet.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// True if the receiver has taken everything.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Items that may wait at most.
    pub fn capacity(&self) -> usize {
        self.ring.capacity()
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        // Closed before the notification, so that a sleeping receiver wakes to see it.
        self.ring.close();
        self.flush();
    }
}

#[cfg(test)]
mod tests;
