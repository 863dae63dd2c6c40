//! The doorbell protocol between a sleeping side and a sending side.
//!
//! Each direction has one word on its own cache line. The sleeper sets the word, and the other side takes it:
//!
//! | sleeper | other side |
//! |---|---|
//! | S1 exchange: word := the awaited event | P1 publish the event |
//! | S2 poll once more, sleep if there is no event | P2 exchange: word := 0; ring if it was set |
//!
//! S1 and P2 are read-modify-writes with acquire and release, so the later one sees the earlier one. If P2 is later, it
//! sees the word and rings. If S1 is later, it has acquired all that P2 released, including the event of P1, and S2
//! finds it. No fence is needed. Without a sleeper, the line stays in the sender's cache, and P2 costs 2 ns.

use super::memory::Word;

/// The event that a sleeper waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(super) enum WakeReason {
    /// A message.
    Message = 1,
    /// A message, or the consumption of a sent one.
    Anything = 2,
}

/// One side's doorbell: the first word of its own cache line.
#[derive(Debug)]
pub(super) struct Doorbell<'a, W>(pub(super) &'a W);

impl<W: Word> Doorbell<'_, W> {
    /// S1: requests a wake-up. The sleeper must poll once more before it sleeps.
    #[inline]
    pub(super) fn set(self, reason: WakeReason) {
        // Pairs with `take` and `take_if_anything`.
        self.0.exchange(reason as u64);
    }

    /// Withdraws the request, because the sleeper is awake.
    #[inline]
    pub(super) fn clear(self) {
        // An exchange instead of a plain store, so that the next `set` acquires the release of an earlier `take`.
        self.0.exchange(0);
    }

    /// P2 after a message: takes the request, and returns whether to ring.
    #[inline]
    pub(super) fn take(self) -> bool {
        // Pairs with `set`.
        self.0.exchange(0) != 0
    }

    /// P2 after a report of progress: takes a request for `Anything`, and returns whether to ring.
    #[inline]
    pub(super) fn take_if_anything(self) -> bool {
        // Pairs with `set`. `newest` leaves the word unchanged, because a sleeper that waits for messages only still
        // needs it.
        self.0.newest() == WakeReason::Anything as u64 && self.0.exchange(0) != 0
    }
}
