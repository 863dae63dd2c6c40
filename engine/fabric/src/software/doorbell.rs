//! The doorbell protocol between a sleeping side and a sending side.
//!
//! Each direction has one word on its own cache line. The sleeper sets it and the other side takes it:
//!
//! | sleeper | other side |
//! |---|---|
//! | S1 exchange: word := the awaited news | P1 publish the news |
//! | S2 look for news once more, sleep if there is none | P2 exchange: word := 0; ring if it was set |
//!
//! S1 and P2 are read-modify-writes with acquire and release, so the later one sees the earlier one. If P2 is later, it
//! sees the word and rings. If S1 is later, it has acquired all that P2 released, including the news of P1, and S2
//! finds it. No fence is needed. Without a sleeper, the line stays in the sender's cache: 2 ns.

use super::memory::{Lines, Word};

/// The news that a sleeper waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(super) enum Waits {
    /// A message.
    Message = 1,
    /// A message, or the consumption of a sent one.
    Anything = 2,
}

/// One side's bell: the first word of its own cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doorbell(pub(super) usize);

impl Doorbell {
    /// S1: the sleeper requests a wake-up. It must check for news once more before it sleeps.
    #[inline]
    pub(super) fn set(self, lines: &impl Lines, waits: Waits) {
        // Pairs with `take` and `take_if_anything`.
        lines.words(self.0).0.exchange(waits as u64);
    }

    /// The sleeper is awake.
    #[inline]
    pub(super) fn clear(self, lines: &impl Lines) {
        // An exchange and no plain store: the next `set` acquires the release of an earlier `take`.
        lines.words(self.0).0.exchange(0);
    }

    /// P2, behind a message: whether to ring.
    #[inline]
    pub(super) fn take(self, lines: &impl Lines) -> bool {
        // Pairs with `set`.
        lines.words(self.0).0.exchange(0) != 0
    }

    /// P2, behind a report of consumption: whether to ring.
    #[inline]
    pub(super) fn take_if_anything(self, lines: &impl Lines) -> bool {
        // Pairs with `set`. An exchange for itself: the word must stay for the next message if only that is
        // waited for.
        lines.words(self.0).0.newest() == Waits::Anything as u64 && lines.words(self.0).0.exchange(0) != 0
    }
}
