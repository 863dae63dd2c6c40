//! What one core copies: the yardstick beside every bandwidth of a fabric that is made of copies.
#![forbid(unsafe_code)]

use std::hint::black_box;

use crate::clock::Clock;

/// Time spent on it, in slices of which the best counts: what else the core did is not the yardstick.
const SLICES: u32 = 10;
/// Length of each.
const SLICE_NS: u64 = 2_000_000;
/// Copies between two looks at the clock are about this many bytes.
const BYTES_PER_LOOK: usize = 256 * 1024;

/// Bytes per second of one core that copies `size` bytes between the same two buffers again and again (so: from the
/// nearest cache that holds both).
pub(crate) fn bytes_per_second(clock: &Clock, size: usize) -> f64 {
    let source = vec![0x5au8; size];
    let mut target = vec![0u8; size];
    let copies = (BYTES_PER_LOOK / size.max(1)).max(1);
    let mut round = |count: usize| {
        for _ in 0..count {
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
        }
    };
    round(copies);
    let mut best = 0.0f64;
    for _ in 0..SLICES {
        let start = clock.ns();
        let mut bytes = 0u64;
        let mut ns = 0;
        while ns < SLICE_NS {
            round(copies);
            bytes += (copies * size) as u64;
            ns = clock.ns() - start;
        }
        best = best.max(bytes as f64 * 1e9 / ns as f64);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_a_rate() {
        let clock = Clock::new();
        for size in [1, 64, 1 << 20] {
            let rate = bytes_per_second(&clock, size);
            assert!(rate.is_finite() && rate > 0.0);
        }
    }
}
