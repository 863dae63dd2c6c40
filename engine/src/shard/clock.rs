//! The only reader of the clock.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Turns between two looks at the clock.
const TURNS: u32 = 16;

/// Time that passes only when it is told to, for simulations: the same for all shards of a thread that
/// [use it](super::Shard::simulate). Clones are the same time.
#[derive(Clone, Debug, Default)]
pub struct SimulatedTime(Rc<Cell<u64>>);

impl SimulatedTime {
    /// Stands at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Nanoseconds that have passed.
    pub fn now(&self) -> u64 {
        self.0.get()
    }

    /// Lets time pass.
    pub fn advance(&self, time: Duration) {
        self.0.set(self.0.get().saturating_add(nanoseconds(time)));
    }
}

#[derive(Clone, Debug)]
enum Source {
    Real(Instant),
    Simulated(SimulatedTime),
}

/// Nanoseconds since the shard was made.
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

    /// A turn begins: in one of some, the clock is read.
    #[inline]
    pub(super) fn turn(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            self.read();
        }
    }

    /// The time as of some turns ago, or as it was read since.
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

    /// A moment from now; `u64::MAX` for no time given.
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
