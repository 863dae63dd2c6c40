//! The shard's clock, the only code that reads the time; schedule of the control plane and of timers; sampling of calls
//! for latency.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Turns between two clock readings.
const TURNS_PER_READING: u32 = 16;
/// Idle turns between two clock readings, of a shard that its owner polls, perhaps rarely.
const IDLE_TURNS_PER_READING: u32 = 2;

/// Simulated time for the shards of a thread.
///
/// Shards [use it](super::Shard::simulate) instead of the real time. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SimulatedTime(Rc<Cell<u64>>);

impl SimulatedTime {
    /// Creates a simulated time that starts at 0.
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

/// Nanoseconds between two measurements, for up to [`TURNS_PER_READING`] turns, after which a shard counts as blocked.
const BLOCKED: u64 = 1_000_000_000;

/// Nanoseconds since the shard's creation.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    began: Instant,
    /// Time of a simulation, instead of the real one.
    simulated: Option<SimulatedTime>,
    now: u64,
    /// Turns to the next reading.
    turns_left: u32,
    /// Maximum turns to the next reading after an idle turn.
    max_idle_turns: u32,
    /// The last measurement: at the start of a turn, or before or after a sleep.
    measured_at: u64,
    /// The longest time between two measurements, without sleeps.
    longest_interval: u64,
}

impl Clock {
    pub(super) fn real() -> Self {
        Self {
            began: Instant::now(),
            simulated: None,
            now: 0,
            turns_left: TURNS_PER_READING,
            max_idle_turns: IDLE_TURNS_PER_READING,
            measured_at: 0,
            longest_interval: 0,
        }
    }

    pub(super) fn simulated(time: &SimulatedTime) -> Self {
        Self { simulated: Some(time.clone()), now: time.now(), measured_at: time.now(), ..Self::real() }
    }

    /// Reads the clock less often in idle turns, because a shard on its own thread runs its turns in close succession.
    pub(super) fn read_rarely_when_idle(&mut self) {
        self.max_idle_turns = TURNS_PER_READING;
        self.end_sleep();
    }

    /// Reads the time at the start of a turn or of a sleep, and measures the turns before it.
    #[inline]
    pub(super) fn measure(&mut self) {
        let now = self.read();
        self.longest_interval = self.longest_interval.max(now.saturating_sub(self.measured_at));
        self.measured_at = now;
    }

    /// Ends a sleep, whose time does not count as a turn's.
    pub(super) fn end_sleep(&mut self) {
        self.measured_at = self.read();
    }

    /// Time of the last measurement.
    pub(super) fn measured(&self) -> u64 {
        self.measured_at
    }

    /// Longest time between two measurements since the last call, in nanoseconds, if it was a second or more. `None`
    /// for a shard that its owner polls, perhaps rarely.
    pub(super) fn take_blocked(&mut self) -> Option<u64> {
        let longest = std::mem::take(&mut self.longest_interval);
        (self.max_idle_turns == TURNS_PER_READING && longest >= BLOCKED).then_some(longest)
    }

    /// Starts a turn; reads the clock in some of them.
    #[inline]
    pub(super) fn begin_turn(&mut self) {
        self.turns_left -= 1;
        if self.turns_left == 0 {
            self.turns_left = TURNS_PER_READING;
            self.measure();
        }
    }

    /// Ends a turn without work.
    #[inline]
    pub(super) fn end_idle_turn(&mut self) {
        self.turns_left = self.turns_left.min(self.max_idle_turns);
    }

    /// The time of the last reading, which was at most [`TURNS_PER_READING`] turns ago.
    #[inline]
    pub(super) fn last_read(&self) -> u64 {
        self.now
    }

    /// The time now.
    #[inline]
    pub(super) fn read(&mut self) -> u64 {
        self.now = match &self.simulated {
            None => nanoseconds(self.began.elapsed()),
            Some(time) => time.now(),
        };
        self.now
    }

    /// A deadline from now; `u64::MAX` without a duration.
    #[inline]
    pub(super) fn deadline_after(&mut self, time: Option<Duration>) -> u64 {
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

/// Divisor of the control-plane interval while a connection is being set up: at most seven extra runs per connection.
const HASTE: u64 = 128;

/// Schedule of the control plane and of timers, in nanoseconds since the shard's creation.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Next control-plane run.
    control_due: u64,
    /// Time to the next run after [`hasten`](Self::hasten), until it reaches the usual interval.
    pace: u64,
    /// Next timer.
    next: u64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { control_due: 0, pace: u64::MAX, next: u64::MAX }
    }
}

impl Schedule {
    /// Runs the control plane in the next turn.
    #[inline]
    pub(super) fn control_now(&mut self) {
        self.control_due = 0;
    }

    /// Runs the control plane in the next turn, and then more often for about one `interval`, because a new connection
    /// causes more work for it soon.
    pub(super) fn hasten(&mut self, interval: Duration) {
        self.control_due = 0;
        self.pace = nanoseconds(interval) / HASTE;
    }

    /// Whether a run is due.
    #[inline]
    pub(super) fn is_control_due(&self, now: u64) -> bool {
        now >= self.control_due
    }

    /// Whether the control plane runs now; if so, schedules its next run `interval` later. After
    /// [`hasten`](Self::hasten) the next run is sooner, and the interval doubles after each run.
    #[inline]
    pub(super) fn take_control_due(&mut self, now: u64, interval: Duration) -> bool {
        let due = self.is_control_due(now);
        if due {
            let pace = self.pace.min(nanoseconds(interval));
            self.control_due = now.saturating_add(pace);
            self.pace = pace.saturating_mul(2).max(1);
        }
        due
    }

    /// Clears the timers at the start of a run, in which their users set them again.
    pub(super) fn begin(&mut self) {
        self.next = u64::MAX;
    }

    /// Sets a timer.
    pub(super) fn wake_by(&mut self, time: u64) {
        self.next = self.next.min(time);
    }

    /// The next timer; 0 if a control-plane run was requested, or has never run.
    pub(super) fn next(&self) -> u64 {
        if self.control_due == 0 { 0 } else { self.next }
    }

    /// Ends a sleep that lasted until `next` at most. `control` means that the device has control events.
    pub(super) fn end_sleep(&mut self, control: bool, next: u64) {
        self.control_due = if control { 0 } else { self.control_due.min(next) };
    }
}

/// Sampling of calls at irregular distances, so that calls of all kinds are sampled even if the kinds alternate.
#[derive(Debug)]
pub(super) struct Sampler {
    /// Calls until the next sample.
    until: u64,
    /// Average distance; 0 for no samples.
    average: u64,
    /// State of a xorshift generator, with the same seed in each run.
    state: u64,
}

impl Sampler {
    /// Samples one of `average` calls, at irregular distances: 1 for all, 0 for none.
    pub(super) fn new(average: u32) -> Self {
        let mut sampler = Self { until: 0, average: average.into(), state: 0x9E37_79B9_7F4A_7C15 };
        sampler.draw();
        sampler
    }

    /// Whether the next call is timed.
    #[inline]
    pub(super) fn should_sample(&mut self) -> bool {
        self.until -= 1;
        self.until == 0 && self.draw()
    }

    /// Draws the next distance: 1 to twice the average less one. True if sampling is on.
    #[inline(never)]
    fn draw(&mut self) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        // Without sampling, the count never reaches 0.
        self.until = (2 * self.average).checked_sub(1).map_or(u64::MAX, |span| self.state % span + 1);
        self.average > 0
    }
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
                clock.read_rarely_when_idle();
            }
            (0..32)
                .filter(|_| {
                    time.advance(Duration::from_secs(1));
                    clock.begin_turn();
                    if !busy {
                        clock.end_idle_turn();
                    }
                    clock.last_read() == time.now()
                })
                .count()
        };
        assert_eq!([readings(true, false), readings(false, true), readings(true, true)], [2; 3]);
        assert_eq!(readings(false, false), 15, "every second turn after the first");
    }

    #[test]
    fn time_without_turns_is_reported_once_and_sleep_does_not_count() {
        let time = SimulatedTime::new();
        let turns = |clock: &mut Clock| (0..TURNS_PER_READING).for_each(|_| clock.begin_turn());
        let mut polled = Clock::simulated(&time);
        time.advance(Duration::from_secs(5));
        turns(&mut polled);
        assert_eq!(polled.take_blocked(), None, "a shard that its owner polls never counts as blocked");
        let mut clock = Clock::simulated(&time);
        clock.read_rarely_when_idle();
        time.advance(Duration::from_millis(999));
        turns(&mut clock);
        assert_eq!(clock.take_blocked(), None);
        time.advance(Duration::from_secs(3));
        // A handler that returns reads the clock for its reply, which is no measurement.
        clock.read();
        turns(&mut clock);
        assert_eq!((clock.take_blocked(), clock.take_blocked()), (Some(3_000_000_000), None));
        time.advance(Duration::from_secs(2));
        clock.measure();
        time.advance(Duration::from_secs(7));
        clock.end_sleep();
        turns(&mut clock);
        assert_eq!(clock.take_blocked(), Some(2_000_000_000), "the turn before the sleep counts");
    }

    #[test]
    fn control_plane_runs_at_intervals_or_on_request() {
        let mut schedule = Schedule::default();
        let interval = Duration::from_nanos(10);
        assert!(schedule.take_control_due(5, interval), "the first run is due immediately");
        assert!(!schedule.take_control_due(14, interval));
        assert!(schedule.take_control_due(15, interval));
        schedule.control_now();
        assert!(schedule.take_control_due(16, interval), "a requested run is due immediately");
        schedule.end_sleep(false, 20);
        assert!(
            !schedule.take_control_due(19, interval) && schedule.take_control_due(20, interval),
            "the run is due when the sleep ends"
        );
        schedule.end_sleep(true, u64::MAX);
        assert!(schedule.take_control_due(20, interval), "a run is due because the device has events");
    }

    #[test]
    fn control_plane_runs_more_often_after_hasten_and_then_as_before() {
        let interval = Duration::from_micros(1280);
        let runs = |schedule: &mut Schedule, from: u64, to: u64| {
            (from..to).step_by(1000).filter(|&now| schedule.take_control_due(now, interval)).count()
        };
        let mut schedule = Schedule::default();
        assert_eq!(runs(&mut schedule, 0, 12_800_000), 10, "one per interval");
        schedule.hasten(interval);
        assert!(schedule.take_control_due(12_800_000, interval), "a run is due immediately");
        assert!(!schedule.take_control_due(12_809_000, interval) && schedule.take_control_due(12_810_000, interval));
        assert_eq!(runs(&mut schedule, 12_811_000, 14_080_000), 6, "each interval is twice the last");
        assert_eq!(runs(&mut schedule, 14_080_000, 26_880_000), 10, "one per interval");
    }

    #[test]
    fn the_earliest_timer_counts_until_the_control_plane_runs() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.next(), 0, "the first run is due");
        assert!(schedule.take_control_due(0, Duration::from_nanos(1)));
        assert_eq!(schedule.next(), u64::MAX);
        schedule.wake_by(30);
        schedule.wake_by(20);
        schedule.wake_by(40);
        assert_eq!(schedule.next(), 20);
        schedule.control_now();
        assert_eq!(schedule.next(), 0, "a requested run prevents sleep");
        assert!(schedule.take_control_due(5, Duration::from_nanos(1)));
        schedule.begin();
        assert_eq!(schedule.next(), u64::MAX);
    }

    #[test]
    fn samples_have_the_configured_mean_distance_and_no_pattern() {
        let mut sampler = Sampler::new(64);
        let taken: Vec<u32> = (0..64_000).filter(|_| sampler.should_sample()).collect();
        assert!((900..1100).contains(&taken.len()), "{}", taken.len());
        for pattern in [2, 3, 64] {
            let multiples = taken.iter().filter(|&&call| call % pattern == 0).count();
            let share = taken.len() / pattern as usize;
            assert!(
                (share / 2..2 * share + 2).contains(&multiples),
                "{multiples} of {} samples are multiples of {pattern}",
                taken.len()
            );
        }
    }

    #[test]
    fn all_or_no_calls_are_sampled_if_configured() {
        let (mut all, mut none) = (Sampler::new(1), Sampler::new(0));
        assert!((0..1000).all(|_| all.should_sample()) && !(0..1000).any(|_| none.should_sample()));
    }
}
