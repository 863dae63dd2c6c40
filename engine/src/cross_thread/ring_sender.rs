//! Producer of a ring, with the signal of the receiving thread.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::thread;

use super::parker::Signal;
use super::spsc::Producer;

/// Reason why an item was not sent; returns the item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError<T> {
    /// The receiver has not kept up: try again later.
    #[error("the ring is full")]
    Full(T),
    /// The receiver is gone for good.
    #[error("the receiver is gone")]
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

/// A producer that wakes the receiving thread.
pub(super) struct RingSender<T> {
    pub(super) producer: Producer<T>,
    pub(super) signal: Signal,
}

impl<T> RingSender<T> {
    /// A sender that wakes the receiver by `signal`.
    pub(super) fn new(producer: Producer<T>, signal: Signal) -> Self {
        Self { producer, signal }
    }

    /// Sends, and wakes a sleeping receiver; a `SeqCst` fence follows the item. The receiver takes an accepted item, or
    /// drops it at its end.
    #[inline]
    pub(super) fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        if self.producer.is_closed() {
            return Err(SendError::Closed(item));
        }
        self.producer.push(item).map_err(SendError::Full)?;
        // Its fence is also the one that `Producer::is_closed` requires.
        self.signal.notify();
        if self.producer.is_closed() {
            // This item is the newest.
            return self.take_back().map_or(Ok(()), |item| Err(SendError::Closed(item)));
        }
        Ok(())
    }

    /// Waits for the receiver's end, which is near; returns the newest of the items that it left.
    #[cold]
    pub(super) fn take_back(&mut self) -> Option<T> {
        while !self.producer.is_abandoned() {
            thread::yield_now();
        }
        std::iter::from_fn(|| self.producer.reclaim()).last()
    }

    /// Closes the ring, and wakes the receiver; a `SeqCst` fence follows the close.
    pub(super) fn close(&mut self) {
        // Close before the notification: a woken receiver has to see it.
        self.producer.close();
        self.signal.notify();
        if self.producer.is_closed() {
            drop(self.take_back());
        }
    }
}

impl<T> Drop for RingSender<T> {
    fn drop(&mut self) {
        self.close();
    }
}
