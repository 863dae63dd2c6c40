//! Measurement clock: the time-stamp counter where it is reliable.
#![forbid(unsafe_code)]

#[cfg(test)]
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Nanoseconds since its creation.
pub(crate) struct Clock {
    inner: quanta::Clock,
    origin: u64,
    name: String,
}

impl Clock {
    /// Creates a clock. Its calibration takes some milliseconds.
    pub(crate) fn new() -> Self {
        let inner = quanta::Clock::new();
        let name = name_of(&inner);
        let origin = inner.raw();
        Self { inner, origin, name }
    }

    /// Nanoseconds since the creation: one counter read and one multiplication.
    #[inline]
    pub(crate) fn ns(&self) -> u64 {
        self.inner.delta_as_nanos(self.origin, self.inner.raw())
    }

    /// A mock clock that starts at 0 and advances on request.
    #[cfg(test)]
    pub(crate) fn mock() -> (Self, Arc<quanta::Mock>) {
        let (inner, time) = quanta::Clock::mock();
        (Self { inner, origin: 0, name: String::new() }, time)
    }

    /// Source and frequency.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// Names the source of a clock. `quanta` falls back to the system clock without notice, which is recognized because
/// its raw values advance by one per nanosecond.
fn name_of(clock: &quanta::Clock) -> String {
    let (wall, ticks) = (Instant::now(), clock.raw());
    while wall.elapsed() < Duration::from_millis(5) {
        std::hint::spin_loop();
    }
    let (ticks, ns) = (clock.raw().wrapping_sub(ticks), wall.elapsed().as_nanos() as u64);
    let ticks_per_ns = ticks as f64 / ns as f64;
    if (ticks_per_ns - 1.0).abs() < 1e-3 {
        "CLOCK_MONOTONIC (no invariant time-stamp counter here: about 25 ns a read)".to_owned()
    } else {
        format!("TSC at {ticks_per_ns:.3} GHz, calibrated against CLOCK_MONOTONIC (quanta)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_advances_in_nanoseconds() {
        let clock = Clock::new();
        // A pause of this thread between the two clock readings can only lengthen the measured time.
        let (start, wall) = (clock.ns(), Instant::now());
        while wall.elapsed() < Duration::from_millis(2) {}
        let ns = clock.ns() - start;
        // This checks only the unit, which would be wrong by a large factor.
        assert!(ns >= 1_300_000, "{ns} ns for 2 ms");
        assert!(clock.name().contains("TSC") || clock.name().contains("CLOCK_MONOTONIC"));
    }

    #[test]
    fn a_mock_clock_advances_on_request() {
        let (clock, time) = Clock::mock();
        assert_eq!(clock.ns(), 0);
        time.increment(Duration::from_nanos(70));
        assert_eq!(clock.ns(), 70);
    }
}
