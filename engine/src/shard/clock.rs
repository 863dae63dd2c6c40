//! The shard's clock: the only code that reads the time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Turns between two clock readings.
const TURNS: u32 = 16;
/// The same while idle, of a shard that its owner polls, perhaps rarely.
const IDLE_TURNS: u32 = 2;

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
    /// Turns to the next reading.
    left: u32,
    /// The most of them after an idle turn.
    idle: u32,
}

impl Clock {
    pub(super) fn real() -> Self {
        Self::new(Source::Real(Instant::now()), 0)
    }

    pub(super) fn simulated(time: &SimulatedTime) -> Self {
        Self::new(Source::Simulated(time.clone()), time.now())
    }

    fn new(source: Source, now: u64) -> Self {
        Self { source, now, left: TURNS, idle: IDLE_TURNS }
    }

    /// For a shard on its own thread: turns follow each other closely, so that idle ones need not read the clock.
    pub(super) fn spin(&mut self) {
        self.idle = TURNS;
    }

    /// Starts a turn; reads the clock in some of them.
    #[inline]
    pub(super) fn turn(&mut self) {
        self.left -= 1;
        if self.left == 0 {
            self.left = TURNS;
            self.read();
        }
    }

    /// Ends a turn without work.
    #[inline(always)]
    pub(super) fn idled(&mut self) {
        self.left = self.left.min(self.idle);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_turns_read_the_clock_more_often_unless_the_shard_spins() {
        let time = SimulatedTime::new();
        let readings = |busy: bool, spins: bool| {
            let mut clock = Clock::simulated(&time);
            if spins {
                clock.spin();
            }
            (0..32)
                .filter(|_| {
                    time.advance(Duration::from_secs(1));
                    clock.turn();
                    if !busy {
                        clock.idled();
                    }
                    clock.of_turn() == time.now()
                })
                .count()
        };
        assert_eq!([readings(true, false), readings(false, true), readings(true, true)], [2; 3]);
        assert_eq!(readings(false, false), 15, "each second turn after the first");
    }
}
