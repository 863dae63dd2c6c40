//! Copy rate of one core, for comparison with a copying fabric's bandwidth.
#![forbid(unsafe_code)]

use std::hint::black_box;

use crate::clock::Clock;

/// Duration of one measurement.
const SPAN_NS: u64 = 20_000_000;
/// Bytes copied per clock reading, approximately.
const BYTES_PER_CLOCK_READ: usize = 256 * 1024;
/// Alignment of both buffers, as in pools. Heap addresses are arbitrary. On some processors the offset of two addresses
/// within a page changes the speed by up to a third.
const PAGE: usize = 4096;

/// Average rate of one core in bytes per second. It copies `size` bytes repeatedly between the same two buffers, so
/// that the data is in the nearest cache that holds both.
pub(crate) fn bytes_per_second(clock: &Clock, size: usize) -> f64 {
    let (mut source, mut target) = (vec![0x5au8; size + PAGE], vec![0u8; size + PAGE]);
    let (source, target) = (page_aligned(&mut source, size), page_aligned(&mut target, size));
    let copies = (BYTES_PER_CLOCK_READ / size.max(1)).max(1);
    let mut round = || {
        for _ in 0..copies {
            target.copy_from_slice(black_box(source));
            black_box(&mut *target);
        }
    };
    round();
    let start = clock.ns();
    let (mut bytes, mut ns) = (0u64, 0);
    while ns < SPAN_NS {
        round();
        bytes += (copies * size) as u64;
        ns = clock.ns() - start;
    }
    bytes as f64 * 1e9 / ns as f64
}

fn page_aligned(buffer: &mut [u8], size: usize) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(PAGE).min(PAGE);
    &mut buffer[skip..skip + size]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_positive() {
        let clock = Clock::new();
        for size in [1, 64, 1 << 20] {
            let rate = bytes_per_second(&clock, size);
            assert!(rate.is_finite() && rate > 0.0);
        }
    }
}
