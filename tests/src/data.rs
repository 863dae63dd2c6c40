//! Data that can be recognized, and numbers that come again with their seed.

/// Fills `bytes` with what belongs to this seed.
pub fn pattern(seed: u32, bytes: &mut [u8]) {
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = expected(seed, n);
    }
}

/// Whether `bytes` are what belongs to this seed.
pub fn patterned(seed: u32, bytes: &[u8]) -> bool {
    bytes.iter().enumerate().all(|(n, &byte)| byte == expected(seed, n))
}

fn expected(seed: u32, n: usize) -> u8 {
    ((seed.wrapping_mul(0x9E37_79B9) >> 24) as usize + n + (n >> 8) * 3) as u8
}

/// Pseudo-random numbers (xorshift): the same for the same seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts anew.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.draw() >> 32) as usize) % end
    }

    /// True once in `n` times, on average; never for 0.
    pub fn once_in(&mut self, n: usize) -> bool {
        n != 0 && self.below(n) == 0
    }
}
