//! The shard's clock: the only code that reads the time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Busy turns between two clock readings.
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
    /// The start, and the kernel's last tick: some milliseconds. It costs a fraction of a reading.
    Real(Instant, Timespec),
    Simulated(SimulatedTime),
}

/// Nanoseconds since the shard's creation.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    source: Source,
    now: u64,
    turns: u32,
    /// The last turn found nothing.
    idle: bool,
}

impl Clock {
    pub(super) fn real() -> Self {
        Self::new(Source::Real(Instant::now(), last_tick()), 0)
    }

    pub(super) fn simulated(time: &SimulatedTime) -> Self {
        Self::new(Source::Simulated(time.clone()), time.now())
    }

    fn new(source: Source, now: u64) -> Self {
        Self { source, now, turns: 0, idle: false }
    }

    /// Starts a turn; reads the clock in some of them, and after an idle turn and a tick: the owner may poll rarely.
    #[inline]
    pub(super) fn turn(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) || self.idle && self.has_ticked() {
            self.read();
        }
    }

    /// Ends a turn.
    #[inline(always)]
    pub(super) fn turned(&mut self, busy: bool) {
        self.idle = !busy;
    }

    #[inline(never)]
    fn has_ticked(&mut self) -> bool {
        match &mut self.source {
            Source::Real(_, tick) => {
                let now = last_tick();
                std::mem::replace(tick, now) != now
            }
            Source::Simulated(time) => self.now != time.now(),
        }
    }

    /// The time of the last reading: at most some busy turns, or one tick, ago.
    #[inline]
    pub(super) fn of_turn(&self) -> u64 {
        self.now
    }

    /// The time now.
    #[inline]
    pub(super) fn read(&mut self) -> u64 {
        self.now = match &self.source {
            Source::Real(start, _) => nanoseconds(start.elapsed()),
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

/// Time of the kernel's last tick.
#[inline]
fn last_tick() -> Timespec {
    clock_gettime(ClockId::MonotonicCoarse)
}

#[inline]
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rare_turn_sees_the_time_after_an_idle_one() {
        let (time, second) = (SimulatedTime::new(), Duration::from_secs(1));
        let mut clocks = [(Clock::simulated(&time), true), (Clock::simulated(&time), false)];
        for turn in 1..TURNS {
            for (clock, busy) in &mut clocks {
                clock.turn();
                clock.turned(*busy);
            }
            let seen = clocks.each_ref().map(|(clock, _)| clock.of_turn());
            assert_eq!(seen, [0, time.now()], "turn {turn}");
            time.advance(second);
        }
        clocks[0].0.turn();
        assert_eq!(clocks[0].0.of_turn(), time.now(), "a busy one reads the clock at times");
    }

    #[test]
    fn the_kernels_ticks_tell_a_rare_turn() {
        let mut clock = Clock::real();
        clock.turned(false);
        std::thread::sleep(Duration::from_millis(50));
        clock.turn();
        assert!(clock.of_turn() >= 50_000_000, "{clock:?}");
    }
}
