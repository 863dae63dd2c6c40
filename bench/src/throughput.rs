//! Measurement loop for rates: keeps a number of operations outstanding, and counts completions.
#![forbid(unsafe_code)]

use crate::clock::Clock;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::progress::Progress;
use crate::stop;
use crate::target::{IDLE_POLLS, Length, QuietTime, Target, abandonment_error};

/// Minimum interval over which the peak rate is measured.
const SLICE_NS: u64 = 10_000_000;
/// Operations per clock reading, unless a poll completes more.
const CLOCK_READ_EVERY: u64 = 64;

/// Keeps `depth` operations outstanding and counts completions.
///
/// A counted run starts and ends with no operation outstanding, so none from before its start counts. A timed run
/// counts the completions within its time, with `depth` operations outstanding at both ends.
pub(crate) fn measure(
    target: &mut impl Target,
    clock: &Clock,
    length: Length,
    progress: &mut Progress,
) -> Result<Figures, Failure> {
    let depth = target.depth();
    let mut free: Vec<u32> = (0..depth).rev().collect();
    let mut done_now = Vec::with_capacity(depth as usize);
    let (mut started, mut done, mut counted_at) = (0u64, 0u64, 0u64);
    let mut idle_polls = 0;
    let mut meter = RateMeter::default();
    let (mut elapsed, mut quiet) = (0, QuietTime::default());
    let origin = clock.ns();
    if length.counts(0, 0) {
        meter.record(0, 0);
    }
    loop {
        let allowed = may_start(length, started, done, elapsed).min(free.len() as u64);
        for token in free.drain(free.len() - allowed as usize..).rev() {
            target.start(token)?;
        }
        started += allowed;
        let any = allowed != 0;
        if any {
            target.flush()?;
        } else if free.len() == depth as usize {
            break;
        }
        target.poll(&mut done_now)?;
        idle_polls += u32::from(done_now.is_empty());
        done += done_now.len() as u64;
        free.append(&mut done_now);
        let at_edge = meter.first.is_none() || !length.has_more(started, elapsed);
        let may_read_clock = at_edge || idle_polls >= IDLE_POLLS;
        if done - counted_at >= CLOCK_READ_EVERY || (may_read_clock && done > counted_at) {
            (counted_at, idle_polls) = (done, 0);
            let now = clock.ns();
            elapsed = now - origin;
            quiet.reset(elapsed);
            if length.counts(done, elapsed) {
                meter.record(done, elapsed);
            }
            progress.tick(now, length.share(done, elapsed), done);
        } else if idle_polls >= IDLE_POLLS || stop::is_requested() {
            // `quiet` counts from the last clock reading with completions.
            idle_polls = 0;
            let now = clock.ns() - origin;
            if length.abandons(quiet.add_until(now), now) {
                break;
            }
        }
    }
    let broken = abandonment_error(target, length, depth as usize - free.len());
    match meter.total() {
        Some(figures) => Ok(Figures { broken, ..figures }),
        None => Err(Failure::Run(broken.unwrap_or_else(|| {
            "too few operations were done within the measured time; use a larger -n or -D, or a smaller -f".to_owned()
        }))),
    }
}

/// Operations that may start. A counted run starts none between the warm-up and its completion.
fn may_start(length: Length, started: u64, done: u64, elapsed_ns: u64) -> u64 {
    match length {
        _ if stop::is_requested() => 0,
        Length::Operations { warm_up, .. } if started >= warm_up && done < warm_up => 0,
        Length::Operations { warm_up, .. } if started < warm_up => warm_up - started,
        Length::Operations { warm_up, counted } => warm_up + counted - started,
        Length::Time { total, .. } if elapsed_ns < total => u64::MAX,
        Length::Time { .. } => 0,
    }
}

/// Completions up to a clock reading, and its time in nanoseconds.
#[derive(Clone, Copy, Default)]
struct Sample {
    done: u64,
    ns: u64,
}

/// Counts and times between the first clock reading and the last.
#[derive(Default)]
struct RateMeter {
    first: Option<Sample>,
    /// Start of the current interval of the peak rate.
    slice: Sample,
    last: Sample,
    peak: f64,
}

impl RateMeter {
    fn record(&mut self, done: u64, ns: u64) {
        self.last = Sample { done, ns };
        if self.first.is_none() {
            self.first = Some(self.last);
            self.slice = self.last;
        }
        if ns - self.slice.ns >= SLICE_NS {
            self.peak = self.peak.max(rate(self.slice, self.last));
            self.slice = self.last;
        }
    }

    /// The peak equals the average in runs shorter than a slice.
    fn total(&self) -> Option<Figures> {
        let first = self.first?;
        let operations = self.last.done - first.done;
        if operations == 0 || self.last.ns == first.ns {
            return None;
        }
        let per_second = rate(first, self.last);
        let seconds = (self.last.ns - first.ns) as f64 / 1e9;
        let peak = Some(self.peak.max(per_second));
        Some(Figures { operations, seconds, per_second: Some(per_second), peak, samples: None, broken: None })
    }
}

fn rate(from: Sample, to: Sample) -> f64 {
    (to.done - from.done) as f64 * 1e9 / (to.ns - from.ns) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::fake::Fake;

    fn run(fake: &mut Fake, length: Length) -> Result<Figures, Failure> {
        measure(fake, &Clock::new(), length, &mut Progress::new(String::new(), 0))
    }

    #[test]
    fn counts_after_the_warm_up() {
        for (depth, per_poll) in [(1, 1), (16, 5), (200, 200)] {
            let mut fake = Fake::new(depth, per_poll);
            let out = run(&mut fake, Length::Operations { counted: 10_000, warm_up: 500 }).unwrap();
            assert_eq!(out.operations, 10_000);
            assert_eq!(fake.started, 10_500);
            assert!(out.peak >= out.per_second && out.per_second.is_some_and(f64::is_finite));
            assert!(fake.begun.is_empty());
        }
    }

    #[test]
    fn no_more_operations_start_than_requested() {
        let mut fake = Fake::new(64, 64);
        assert_eq!(run(&mut fake, Length::Operations { counted: 5, warm_up: 0 }).unwrap().operations, 5);
        assert_eq!(fake.started, 5);
    }

    #[test]
    fn a_timed_run_ends_after_its_time() {
        let (mut fake, clock) = Fake::timed(8, 2);
        let length = Length::Time { total: 60_000_000, margin: 10_000_000 };
        let out = measure(&mut fake, &clock, length, &mut Progress::new(String::new(), 0)).unwrap();
        assert!(out.operations < fake.started && out.seconds <= 0.040 + 1e-9, "{out:?}");
        assert!(fake.begun.is_empty());
        let none = run(&mut Fake::new(1, 1), Length::Time { total: 4, margin: 2 });
        let Err(Failure::Run(text)) = none else { panic!("{none:?}") };
        assert!(text.contains("within the measured time; use a larger -n or -D, or a smaller -f"), "{text}");
    }

    #[test]
    fn a_stalled_target_ends_the_run_with_the_figures_until_then() {
        let (time, count) =
            (Length::Time { total: 1_000_000, margin: 0 }, Length::Operations { counted: 1_000_000, warm_up: 0 });
        for (depth, length, grace) in [(1, time, "5s"), (200, time, "5s"), (200, count, "60s")] {
            let (mut fake, clock) = Fake::timed(depth, 1);
            fake.stalls_at = 500;
            let out = measure(&mut fake, &clock, length, &mut Progress::new(String::new(), 0)).unwrap();
            let outstanding = fake.begun.len();
            assert_eq!(out.operations, 500 - outstanding as u64, "{out:?}");
            let expected = format!("the server stopped answering: outstanding operations: {outstanding};");
            let broken = out.broken.unwrap_or_default();
            assert!(broken.starts_with(&expected) && broken.ends_with(grace), "{broken}");
        }
    }

    #[test]
    fn peak_is_of_the_best_slice() {
        let mut meter = RateMeter::default();
        for (done, ms) in [(0, 0), (100, 10), (400, 20), (500, 30), (505, 31)] {
            meter.record(done, ms * 1_000_000);
        }
        let total = meter.total().unwrap();
        assert_eq!((total.operations, total.peak), (505, Some(30_000.0)));
        assert_eq!(total.seconds, 0.031);
        assert!(RateMeter::default().total().is_none());
    }
}
