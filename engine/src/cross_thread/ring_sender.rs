//! The producer of a ring, with the signal of the consuming thread.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::thread;

use super::parker::Signal;
use super::spsc::SpscProducer;

/// Reason why an item was not sent, with the item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError<T> {
    /// The receiver has not kept up: retry later.
    #[error("the ring is full")]
    Full(T),
    /// The receiver has been dropped.
    #[error("the receiver has been dropped")]
    Closed(T),
}

impl<T> SendError<T> {
    /// The unsent item.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(item) | Self::Closed(item) => item,
        }
    }
}

/// A producer that wakes the consuming thread.
pub(super) struct RingSender<T> {
    pub(super) producer: SpscProducer<T>,
    pub(super) signal: Signal,
}

impl<T> RingSender<T> {
    /// A sender that wakes the consumer with `signal`.
    pub(super) fn new(producer: SpscProducer<T>, signal: Signal) -> Self {
        Self { producer, signal }
    }

    /// Sends an item, and wakes a sleeping consumer. A `SeqCst` fence follows the push.
    ///
    /// The consumer takes an accepted item, or drops the item in its own drop.
    #[inline]
    pub(super) fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        if self.producer.is_closed() {
            return Err(SendError::Closed(item));
        }
        self.producer.push(item).map_err(SendError::Full)?;
        // The fence of `notify` is also the one that `SpscProducer::is_closed` requires.
        self.signal.notify();
        if self.producer.is_closed() {
            // The newest item is the one just pushed.
            return self.reclaim_newest().map_or(Ok(()), |item| Err(SendError::Closed(item)));
        }
        Ok(())
    }

    /// Takes the items that the consumer left in the ring, and returns the newest of them.
    ///
    /// Waits until the consumer has been dropped; it has closed the ring already, so this takes little time.
    #[cold]
    pub(super) fn reclaim_newest(&mut self) -> Option<T> {
        while !self.producer.is_abandoned() {
            thread::yield_now();
        }
        std::iter::from_fn(|| self.producer.reclaim()).last()
    }

    /// Closes the ring, and wakes the consumer; a `SeqCst` fence follows the close.
    pub(super) fn close(&mut self) {
        // The ring closes before the notification, because a woken consumer has to see that it is closed.
        self.producer.close();
        self.signal.notify();
        if self.producer.is_closed() {
            drop(self.reclaim_newest());
        }
    }
}

impl<T> Drop for RingSender<T> {
    fn drop(&mut self) {
        self.close();
    }
}
