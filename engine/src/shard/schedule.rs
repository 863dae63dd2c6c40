//! Schedule of the control plane and of timers.

use std::time::Duration;

use super::clock::nanoseconds;

/// Divisor of the control-plane interval while a connection is being set up: at most seven extra runs for each.
const HASTE: u64 = 128;

/// Times are in nanoseconds since the shard's creation.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Next control-plane run.
    control_due: u64,
    /// Time to the next run, if it is sooner than usual.
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

    /// Hastens the control plane for a new connection. It runs in the next turn, and then more often for about one
    /// `interval`: more work for this and other connections follows soon.
    pub(super) fn hasten(&mut self, interval: Duration) {
        self.control_due = 0;
        self.pace = nanoseconds(interval) / HASTE;
    }

    /// Whether a run is due.
    #[inline]
    pub(super) fn is_control_due(&self, now: u64) -> bool {
        now >= self.control_due
    }

    /// Whether it runs now; if so, schedules the next run `interval` later. After [`hasten`](Self::hasten) the next run
    /// is sooner, and the interval doubles after each run.
    #[inline]
    pub(super) fn control_is_due(&mut self, now: u64, interval: Duration) -> bool {
        let due = self.is_control_due(now);
        if due {
            let pace = self.pace.min(nanoseconds(interval));
            self.control_due = now.saturating_add(pace);
            self.pace = pace.saturating_mul(2).max(1);
        }
        due
    }

    /// Clears the timers at a run: users set them again.
    pub(super) fn begin(&mut self) {
        self.next = u64::MAX;
    }

    /// Sets a timer.
    pub(super) fn wake_by(&mut self, time: u64) {
        self.next = self.next.min(time);
    }

    /// The next timer; 0 if the control plane is due.
    pub(super) fn next(&self) -> u64 {
        if self.control_due == 0 { 0 } else { self.next }
    }

    /// Records the end of a sleep until `next`; `control`: the device has control events.
    pub(super) fn woken(&mut self, control: bool, next: u64) {
        self.control_due = if control { 0 } else { self.control_due.min(next) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_is_looked_at_at_intervals_or_at_once() {
        let mut schedule = Schedule::default();
        let interval = Duration::from_nanos(10);
        assert!(schedule.control_is_due(5, interval), "at first");
        assert!(!schedule.control_is_due(14, interval));
        assert!(schedule.control_is_due(15, interval));
        schedule.control_now();
        assert!(schedule.control_is_due(16, interval), "as it was asked for");
        schedule.woken(false, 20);
        assert!(!schedule.control_is_due(19, interval) && schedule.control_is_due(20, interval), "no later than asked");
        schedule.woken(true, u64::MAX);
        assert!(schedule.control_is_due(20, interval), "the device has events");
    }

    #[test]
    fn while_connections_are_made_looks_are_frequent_and_then_as_rare_as_before() {
        let interval = Duration::from_micros(1280);
        let looks = |schedule: &mut Schedule, from: u64, to: u64| {
            (from..to).step_by(1000).filter(|&now| schedule.control_is_due(now, interval)).count()
        };
        let mut schedule = Schedule::default();
        assert_eq!(looks(&mut schedule, 0, 12_800_000), 10, "one each interval");
        schedule.hasten(interval);
        assert!(schedule.control_is_due(12_800_000, interval), "at once");
        assert!(!schedule.control_is_due(12_809_000, interval) && schedule.control_is_due(12_810_000, interval));
        assert_eq!(looks(&mut schedule, 12_811_000, 14_080_000), 6, "each after twice as long");
        assert_eq!(looks(&mut schedule, 14_080_000, 26_880_000), 10, "one each interval");
    }

    #[test]
    fn the_earliest_time_counts_until_control_is_looked_at() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.next(), 0, "the first look");
        assert!(schedule.control_is_due(0, Duration::from_nanos(1)));
        assert_eq!(schedule.next(), u64::MAX);
        schedule.wake_by(30);
        schedule.wake_by(20);
        schedule.wake_by(40);
        assert_eq!(schedule.next(), 20);
        schedule.control_now();
        assert_eq!(schedule.next(), 0, "nobody sleeps through what is due at once");
        assert!(schedule.control_is_due(5, Duration::from_nanos(1)));
        schedule.begin();
        assert_eq!(schedule.next(), u64::MAX);
    }
}
