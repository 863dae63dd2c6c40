//! The descriptors that a fabric sleeps on.

#![forbid(unsafe_code)]

use std::time::Duration;

use rustix::event::epoll::EventFlags;
use rustix::fd::BorrowedFd;

use crate::FabricError;
use crate::sleeper::Sleeper;

/// Event sources. Their numbers are the tokens of a [`Sleeper`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EventSource {
    /// Another thread.
    Waker = Sleeper::WAKER as isize,
    /// Completions.
    Completions,
    /// Connection events.
    Connections,
    /// Connect requests.
    Listener,
    /// Asynchronous events.
    Device,
}

/// Number of event sources.
const SOURCES: usize = EventSource::Device as usize + 1;

impl EventSource {
    /// Has a descriptor end the sleep.
    pub(super) fn watch(self, sleeper: &Sleeper, fd: BorrowedFd<'_>) -> Result<(), FabricError> {
        sleeper.add(fd, self as u64, EventFlags::IN)
    }
}

/// Waits for events and returns the sources that may have one. A time-out of `None` is infinite.
pub(super) fn wait(sleeper: &Sleeper, timeout: Option<Duration>) -> [bool; SOURCES] {
    let mut happened = [false; SOURCES];
    // After a signal the caller polls, finds nothing, and returns.
    for token in sleeper.wait::<SOURCES>(timeout).into_iter().flatten() {
        if let Some(place) = happened.get_mut(token as usize) {
            *place = true;
        }
    }
    happened
}
