//! Distance of two cores: the round trip of a cache line.
//!
//! A hypervisor may move virtual cores while a benchmark runs: between hardware threads of one core, cores of one cache
//! and cores of different caches. Figures differ several times between these placements. A probe before and after each
//! measurement lets the reader discard runs with a changed placement.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde::Serialize;

use crate::clock::Clock;
use crate::pin;

/// Timed round trips; the median is reported.
const ROUNDS: u64 = 2001;
/// Untimed round trips before them.
const WARM_UP: u64 = 500;
/// Time limit of all round trips.
const TIME_LIMIT_NS: u64 = 2_000_000_000;
/// Value that stops the other side.
const STOP: u64 = u64::MAX;

/// Medians before and after a measurement, in nanoseconds; absent without a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Probes {
    pub(crate) before: Option<u64>,
    pub(crate) after: Option<u64>,
}

/// A value on two cache lines of its own, because the processor often prefetches the neighbour line.
#[repr(align(128))]
struct CacheLine(AtomicU64);

/// Median round trip in nanoseconds between this thread's core and `core`, with one line per direction. `None` if that
/// core never answers.
pub(crate) fn line_round_trip(clock: &Clock, core: usize) -> Option<u64> {
    let (ping, pong) = (CacheLine(AtomicU64::new(0)), CacheLine(AtomicU64::new(0)));
    thread::scope(|scope| {
        scope.spawn(|| echo(&ping, &pong, core));
        let median = time(clock, &ping, &pong);
        ping.0.store(STOP, Ordering::Release); // pairs with the Acquire load in `echo`
        median
    })
}

fn echo(ping: &CacheLine, pong: &CacheLine, core: usize) {
    if pin::pin(core).is_err() {
        return; // `time` gives up after `TIME_LIMIT_NS`
    }
    let mut seen = 0;
    loop {
        let value = spin(|| {
            let value = ping.0.load(Ordering::Acquire); // pairs with the Release stores of `time`
            (value != seen).then_some(value)
        });
        if value == STOP {
            return;
        }
        pong.0.store(value, Ordering::Release); // pairs with the Acquire load in `time`
        seen = value;
    }
}

fn time(clock: &Clock, ping: &CacheLine, pong: &CacheLine) -> Option<u64> {
    let mut times = Vec::with_capacity((WARM_UP + ROUNDS) as usize);
    let deadline = clock.ns() + TIME_LIMIT_NS;
    for round in 1..=WARM_UP + ROUNDS {
        let start = clock.ns();
        ping.0.store(round, Ordering::Release); // pairs with the Acquire load in `echo`
        let mut turns = 0u32;
        spin(|| {
            turns = turns.wrapping_add(1);
            let late = turns.is_multiple_of(4096) && clock.ns() > deadline;
            // Pairs with the Release store in `echo`.
            (pong.0.load(Ordering::Acquire) == round || late).then_some(())
        });
        if pong.0.load(Ordering::Relaxed) != round {
            break;
        }
        times.push(clock.ns() - start);
    }
    median(&mut times)
}

/// Median of the completed round trips. A busy core completes fewer than `ROUNDS`.
fn median(times: &mut [u64]) -> Option<u64> {
    let warm = if times.len() > WARM_UP as usize { WARM_UP as usize } else { 0 };
    let timed = &mut times[warm..];
    timed.sort_unstable();
    timed.get(timed.len() / 2).copied()
}

/// Spins without a pause instruction, because its duration would distort the result. Yields at intervals, because the
/// other side may wait for this core.
fn spin<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    loop {
        for _ in 0..20_000 {
            if let Some(value) = ready() {
                return value;
            }
        }
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_completes_even_on_one_core() {
        let core = rustix::thread::sched_getcpu();
        assert!(line_round_trip(&Clock::new(), core).is_some_and(|ns| ns > 0));
    }

    #[test]
    fn the_median_covers_answered_probes() {
        let warm = WARM_UP as usize;
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [7, 3, 5]), Some(5), "round trips of the warm-up, because there are no others");
        let mut times = vec![1000; warm];
        times.extend([9, 1, 4]);
        assert_eq!(median(&mut times), Some(4), "cold round trips are excluded");
    }

    #[test]
    fn a_core_that_does_not_exist_gives_no_median() {
        assert_eq!(line_round_trip(&Clock::new(), rustix::thread::CpuSet::MAX_CPU - 1), None);
    }
}
