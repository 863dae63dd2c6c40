//! Measurement loop for round trips.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::clock::Clock;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::progress::Progress;
use crate::samples::Samples;
use crate::stop;
use crate::target::{IDLE_POLLS, Length, QuietTime, Target, abandonment_error};

/// Measures round trips.
///
/// Closed loop (`rate` absent): an operation starts when another completes, and is timed from its start. Open loop:
/// operations are due at a steady `rate` per second, and each is timed from its *due* time. If the target stalls, all
/// operations due meanwhile show the delay (no coordinated omission). The duration includes warm-up and margins.
pub(crate) fn measure(
    target: &mut impl Target,
    clock: &Clock,
    length: Length,
    rate: Option<f64>,
    progress: &mut Progress,
) -> Result<Figures, Failure> {
    let depth = target.depth();
    let mut free: Vec<u32> = (0..depth).rev().collect();
    let mut began = vec![0u64; depth as usize];
    let mut done_now = Vec::with_capacity(depth as usize);
    let mut samples = Samples::new();
    let (mut started, mut done) = (0u64, 0u64);
    let interval_ns = rate.map(|per_second| 1e9 / per_second);
    let origin = clock.ns();
    // As in perftest, one clock reading ends an operation and starts the next, so each includes the loop's own time.
    let (mut now, mut last) = (origin, origin);
    let mut idle_polls = 0u32;
    let mut quiet = QuietTime::default();
    quiet.reset(origin);
    loop {
        if !free.is_empty() {
            let mut any = false;
            while let Some(&token) = free.last() {
                let due = interval_ns.map_or(now, |ns| origin + (started as f64 * ns) as u64);
                if due > now || !length.has_more(started, now - origin) {
                    break;
                }
                free.pop();
                began[token as usize] = due;
                target.start(token)?;
                started += 1;
                any = true;
            }
            if any {
                quiet.reset(now);
                target.flush()?;
            } else if free.len() == depth as usize && !length.has_more(started, now - origin) {
                break;
            }
        }
        if let Some(ns) = interval_ns {
            let due = origin + (started as f64 * ns) as u64;
            target.set_next_due((!free.is_empty()).then(|| Duration::from_nanos(due.saturating_sub(now))));
        }
        target.poll(&mut done_now)?;
        if done_now.is_empty() {
            idle_polls = idle_polls.wrapping_add(1);
            if interval_ns.is_some() || idle_polls.is_multiple_of(IDLE_POLLS) || stop::is_requested() {
                now = clock.ns();
                if free.len() < depth as usize && length.abandons(quiet.add_until(now), now - origin) {
                    break;
                }
            }
            continue;
        }
        now = clock.ns();
        last = now;
        quiet.reset(now);
        for token in done_now.drain(..) {
            let since = began[token as usize];
            if length.counts(done, since - origin) {
                samples.record(now - since);
            }
            done += 1;
            free.push(token);
        }
        if progress.tick(now, length.share(done, now - origin), done) {
            now = clock.ns();
        }
    }
    let broken = abandonment_error(target, length, depth as usize - free.len());
    if samples.count() == 0 {
        return Err(Failure::Run(broken.unwrap_or_else(|| {
            "no operation was done within the measured time; use a longer -D or a smaller -f".to_owned()
        })));
    }
    let (operations, seconds) = (samples.count(), (last - origin) as f64 / 1e9);
    Ok(Figures { operations, seconds, per_second: None, peak: None, samples: Some(samples), broken })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::fake::Fake;

    fn run(fake: &mut Fake, length: Length, rate: Option<f64>) -> Result<Figures, Failure> {
        run_with_clock(&Clock::new(), fake, length, rate)
    }

    fn run_with_clock(clock: &Clock, fake: &mut Fake, length: Length, rate: Option<f64>) -> Result<Figures, Failure> {
        measure(fake, clock, length, rate, &mut Progress::new(String::new(), 0))
    }

    #[test]
    fn warm_up_operations_are_not_counted() {
        for (depth, per_poll) in [(1, 1), (8, 3), (8, 8)] {
            let mut fake = Fake::new(depth, per_poll);
            let out = run(&mut fake, Length::Operations { counted: 1000, warm_up: 77 }, None).unwrap();
            assert_eq!((out.operations, fake.started), (1000, 1077));
            assert!(fake.begun.is_empty(), "all operations have completed");
        }
    }

    #[test]
    fn operations_in_the_margins_are_not_counted() {
        let (mut fake, clock) = Fake::timed(4, 1);
        let time = Length::Time { total: 600_000, margin: 200_000 };
        let out = run_with_clock(&clock, &mut fake, time, None).unwrap();
        assert!(out.operations > 0 && out.operations < fake.started);
        let none = run(&mut Fake::new(1, 1), Length::Time { total: 4, margin: 2 }, None);
        let Err(Failure::Run(text)) = none else { panic!("{none:?}") };
        assert!(text.contains("within the measured time; use a longer -D or a smaller -f"), "{text}");
    }

    #[test]
    fn an_open_loop_times_operations_from_their_due_time() {
        /// Stalls for 30 ms at its hundredth operation.
        struct StallingTarget(Fake);
        impl Target for StallingTarget {
            fn depth(&self) -> u32 {
                self.0.depth()
            }
            fn start(&mut self, token: u32) -> Result<(), Failure> {
                if self.0.started == 100 {
                    std::thread::sleep(Duration::from_millis(30));
                }
                self.0.start(token)
            }
            fn flush(&mut self) -> Result<(), Failure> {
                self.0.flush()
            }
            fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
                self.0.poll(done)
            }
        }
        let length = Length::Operations { counted: 1000, warm_up: 0 };
        let clock = Clock::new();
        let mut progress = Progress::new(String::new(), 0);
        let out = measure(&mut StallingTarget(Fake::new(1, 1)), &clock, length, Some(10_000.0), &mut progress).unwrap();
        // 300 operations were due during the stall. A closed loop would count only one slow operation.
        let samples = out.samples.unwrap();
        let late = samples.histogram().count_between(1_000_000, 60_000_000_000);
        assert!(late >= 250, "{late}");
        assert!(samples.max() >= 29_000_000);
    }

    #[test]
    fn an_open_loop_sleeps_until_the_next_operation_is_due() {
        /// Records the permitted sleeps.
        struct SleepRecorder(Fake, Vec<Option<Duration>>);
        impl Target for SleepRecorder {
            fn depth(&self) -> u32 {
                self.0.depth()
            }
            fn start(&mut self, token: u32) -> Result<(), Failure> {
                self.0.start(token)
            }
            fn flush(&mut self) -> Result<(), Failure> {
                self.0.flush()
            }
            fn set_next_due(&mut self, next: Option<Duration>) {
                assert_eq!(
                    next.is_none(),
                    self.0.begun.len() == self.0.depth as usize,
                    "with `depth` operations outstanding, the loop waits for completions"
                );
                self.1.push(next);
            }
            fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
                self.0.poll(done)
            }
        }
        let length = Length::Operations { counted: 50, warm_up: 0 };
        for (depth, rate) in [(4, Some(10_000.0)), (1, Some(10_000.0)), (4, None)] {
            let mut sleeper = SleepRecorder(Fake::new(depth, 1), Vec::new());
            measure(&mut sleeper, &Clock::new(), length, rate, &mut Progress::new(String::new(), 0)).unwrap();
            assert_eq!(sleeper.1.is_empty(), rate.is_none());
            assert!(sleeper.1.iter().flatten().all(|next| *next <= Duration::from_micros(100)), "{:?}", sleeper.1);
        }
    }

    #[test]
    fn a_stalled_target_ends_the_run_with_the_figures_until_then() {
        let (time, count) =
            (Length::Time { total: 600_000, margin: 0 }, Length::Operations { counted: 1_000_000, warm_up: 0 });
        for (rate, depth, length) in
            [(None, 4, time), (Some(1e6), 4, time), (Some(1e6), 1000, time), (Some(1e6), 1000, count)]
        {
            let (mut fake, clock) = Fake::timed(depth, 1);
            fake.stalls_at = 100;
            let out = run_with_clock(&clock, &mut fake, length, rate).unwrap();
            let outstanding = fake.begun.len();
            assert_eq!(out.operations, fake.started - outstanding as u64, "{out:?}");
            assert!(out.seconds < 600e-6, "{}", out.seconds);
            let expected = format!("the server stopped answering: outstanding operations: {outstanding};");
            assert!(out.broken.is_some_and(|why| why.starts_with(&expected)), "{expected}");
            let (mut none, clock) = Fake::timed(1, 1);
            none.stalls_at = 0;
            let none = run_with_clock(&clock, &mut none, length, rate);
            assert!(none.is_err_and(|failure| failure.to_string().contains("stopped answering")));
        }
    }

    #[test]
    fn failures_end_the_run() {
        let mut fake = Fake::new(2, 1);
        fake.fails_at = 10;
        assert!(run(&mut fake, Length::Operations { counted: 100, warm_up: 0 }, None).is_err());
    }
}
