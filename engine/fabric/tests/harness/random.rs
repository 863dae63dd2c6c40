//! Seeded random numbers, for the fabrics of tests.

#![forbid(unsafe_code)]

/// The generator xorshift64*, which is small and random enough to choose faults.
#[derive(Debug)]
pub(crate) struct Xorshift(u64);

impl Xorshift {
    /// Starts the sequence of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        // The state must not be zero, because it would stay zero.
        Self(seed ^ 0x9e37_79b9_7f4a_7c15 | 1)
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A random number below `n`. It is 0 if `n` is 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// Returns true with this probability, in thousandths.
    pub(crate) fn chance(&mut self, per_mille: u16) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }
}
