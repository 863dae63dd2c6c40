//! The shard's clock: the only code that reads the time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Turns between two clock readings.
const TURNS: u32 = 16;

/// Simulated time, for all shards of a thread that [use it](super::Shard::simulate). Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SimulatedTime(Rc<Cell<u64>>);

impl SimulatedTime {
    /// Starts at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Nanoseconds passed.
    pub fn now(&self) -> u64 {
        self.0.get()
    }

    /// Advances the time.
    pub fn advance(&self, time: Duration) {
        self.0.set(self.0.get().saturating_add(nanoseconds(time)));
    }
}

#[derive(Clone, Debug)]
enum Source {
    Real(Instant),
    Simulated(SimulatedTime),
}

/// Nanoseconds since the shard's creation.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    source: Source,
    now: u64,
    turns: u32,
}

impl Clock {
    pub(super) fn real() -> Self {
        Self { source: Source::Real(Instant::now()), now: 0, turns: 0 }
    }

    pub(super) fn simulated(time: &SimulatedTime) -> Self {
        Self { source: Source::Simulated(time.clone()), now: time.now(), turns: 0 }
    }

    /// Starts a turn; reads the clock in some of them.
    #[inline]
    pub(super) fn turn(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            self.read();
        }
    }

    /// The time of the last reading, at most some turns ago.
    #[inline]
    pub(super) fn of_turn(&self) -> u64 {
        self.now
    }

    /// The time now.
    #[inline]
    pub(super) fn read(&mut self) -> u64 {
        self.now = match &self.source {
            Source::Real(start) => nanoseconds(start.elapsed()),
            Source::Simulated(time) => time.now(),
        };
        self.now
    }

    /// A deadline from now; `u64::MAX` without a duration.
    #[inline]
    pub(super) fn after(&mut self, time: Option<Duration>) -> u64 {
        match time {
            None => u64::MAX,
            Some(time) => self.read().saturating_add(nanoseconds(time)),
        }
    }
}

#[inline]
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
