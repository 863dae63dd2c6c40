//! The only reader of the clock.

use std::time::{Duration, Instant};

/// Turns between two looks at the clock.
const TURNS: u32 = 16;

/// Nanoseconds since the shard was made.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    start: Instant,
    now: u64,
    turns: u32,
}

impl Clock {
    pub(super) fn real() -> Self {
        let start = Instant::now();
        Self { start, now: 0, turns: 0 }
    }

    /// The time as of some turns ago.
    #[inline]
    pub(super) fn turn(&mut self) -> u64 {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) { self.read() } else { self.now }
    }

    /// The time now.
    #[inline]
    pub(super) fn read(&mut self) -> u64 {
        self.now = self.start.elapsed().as_nanos() as u64;
        self.now
    }

    /// A moment from now; `u64::MAX` for no time given.
    #[inline]
    pub(super) fn after(&mut self, time: Option<Duration>) -> u64 {
        match time {
            None => u64::MAX,
            Some(time) => self.read().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        }
    }
}
