//! The end of a ring that puts items in, and tells the thread at the other end.
#![forbid(unsafe_code)]

use rpcrdma_mempool::sync::thread;

use super::parker::Signal;
use super::spsc::Producer;

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

/// One thread's way to another one that polls the ring.
pub(super) struct RingSender<T> {
    ring: Producer<T>,
    signal: Signal,
}

impl<T> RingSender<T> {
    /// A ring's end, with whom to notify.
    pub(super) fn new(ring: Producer<T>, signal: Signal) -> Self {
        Self { ring, signal }
    }

    /// Sends and wakes the receiver if it sleeps. An item that was accepted is taken by the receiver, or
    /// dropped by it when it ends: it never waits in a ring that nobody reads. Comes with a `SeqCst` fence behind
    /// the item.
    #[inline]
    pub(super) fn send(&mut self, item: T) -> Result<(), SendError<T>> {
        if self.ring.is_closed() {
            return Err(SendError::Closed(item));
        }
        self.ring.push(item).map_err(SendError::Full)?;
        // Its fence is also the one that `Producer::is_closed` asks for.
        self.signal.notify();
        if self.ring.is_closed() {
            // What is left ends with the newest item, which is this one.
            return self.take_back().map_or(Ok(()), |item| Err(SendError::Closed(item)));
        }
        Ok(())
    }

    /// Waits for the receiver's last act, which is near, and takes back what it left; returns the newest.
    #[cold]
    pub(super) fn take_back(&mut self) -> Option<T> {
        while !self.ring.is_abandoned() {
            thread::yield_now();
        }
        std::iter::from_fn(|| self.ring.reclaim()).last()
    }

    /// True once the receiver is gone.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.ring.is_closed()
    }

    /// Wakes the receiver if it sleeps.
    pub(super) fn notify(&self) {
        self.signal.notify();
    }

    /// Nothing is sent any more, and the receiver is told so. Comes with a `SeqCst` fence behind that word.
    pub(super) fn close(&mut self) {
        // Closed before the notification, so that a sleeping receiver wakes to see it.
        self.ring.close();
        self.signal.notify();
        if self.ring.is_closed() {
            drop(self.take_back());
        }
    }
}

impl<T> Drop for RingSender<T> {
    fn drop(&mut self) {
        self.close();
    }
}
