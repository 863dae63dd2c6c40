//! How far apart two cores are right now: the round trip of a cache line between them.
//!
//! A hypervisor may move virtual cores between hardware threads of one core, cores of one cache and cores of
//! different caches while a benchmark runs; figures differ several times between these. A probe before and
//! after each measurement lets the reader drop the runs whose surroundings changed.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde::Serialize;

use crate::clock::Clock;
use crate::pin;

/// Round trips that are timed; the median is reported.
const ROUNDS: u64 = 2001;
/// Round trips before these.
const WARM_UP: u64 = 500;
/// No more round trips after this long.
const PATIENCE_NS: u64 = 2_000_000_000;
/// Tells the other side to stop.
const STOP: u64 = u64::MAX;

/// Medians around one measurement, in nanoseconds; absent where none could be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Probes {
    /// Just before it.
    pub(crate) before: Option<u64>,
    /// Just after it.
    pub(crate) after: Option<u64>,
}

/// Two cache lines each: the neighbour line is often fetched along.
#[repr(align(128))]
struct Line(AtomicU64);

/// Median round trip in nanoseconds, one line for each direction, between this thread's core and `there`.
/// `None` if that core does not answer at all.
pub(crate) fn line_round_trip(clock: &Clock, there: usize) -> Option<u64> {
    let (ping, pong) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    thread::scope(|scope| {
        scope.spawn(|| echo(&ping, &pong, there));
        let median = time(clock, &ping, &pong);
        ping.0.store(STOP, Ordering::Release); // pairs with the Acquire load in `echo`
        median
    })
}

fn echo(ping: &Line, pong: &Line, core: usize) {
    if pin::pin(core).is_err() {
        return; // the other side runs out of patience
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

fn time(clock: &Clock, ping: &Line, pong: &Line) -> Option<u64> {
    let mut times = Vec::with_capacity((WARM_UP + ROUNDS) as usize);
    let give_up = clock.ns() + PATIENCE_NS;
    for round in 1..=WARM_UP + ROUNDS {
        let start = clock.ns();
        ping.0.store(round, Ordering::Release); // pairs with the Acquire load in `echo`
        let mut turns = 0u32;
        spin(|| {
            turns = turns.wrapping_add(1);
            let late = turns.is_multiple_of(4096) && clock.ns() > give_up;
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

/// Of the round trips that were made. A core that others keep busy answers fewer than asked for.
fn median(times: &mut [u64]) -> Option<u64> {
    let warm = if times.len() > WARM_UP as usize { WARM_UP as usize } else { 0 };
    let timed = &mut times[warm..];
    timed.sort_unstable();
    timed.get(timed.len() / 2).copied()
}

/// Spins without a pause instruction, whose length would show in the result; yields now and then, for the
/// other side may be waiting for this very core.
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
    fn answers_even_on_one_core() {
        let core = rustix::thread::sched_getcpu();
        assert!(line_round_trip(&Clock::new(), core).is_some_and(|ns| ns > 0));
    }

    #[test]
    fn the_median_covers_answered_probes() {
        let warm = WARM_UP as usize;
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [7, 3, 5]), Some(5), "few answers, all of them cold");
        let mut times = vec![1000; warm];
        times.extend([9, 1, 4]);
        assert_eq!(median(&mut times), Some(4), "the cold ones are left out");
    }

    #[test]
    fn a_core_that_is_not_there_does_not_answer() {
        assert_eq!(line_round_trip(&Clock::new(), rustix::thread::CpuSet::MAX_CPU - 1), None);
    }
}
