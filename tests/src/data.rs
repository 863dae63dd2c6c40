//! Data patterns of a seed, and reproducible random numbers.

use rpcrdma::service::{ResultTooLong, ResultWriter};

/// Ascending bytes. There are two periods, so that 256 bytes can start at any value.
const RAMP: [u8; 512] = {
    let mut ramp = [0; 512];
    let mut n = 0;
    while n < ramp.len() {
        ramp[n] = n as u8;
        n += 1;
    }
    ramp
};
/// Length of a block, the unit of copies and comparisons. Loops over bytes would take most of a simulation's time.
const BLOCK: usize = 256;

/// Fills `bytes` with the pattern of `seed`.
pub fn pattern(seed: u32, bytes: &mut [u8]) {
    for (n, block) in bytes.chunks_mut(BLOCK).enumerate() {
        block.copy_from_slice(pattern_block(seed, n, block.len()));
    }
}

/// Returns `len` bytes of the pattern of `seed`.
pub fn data_of(seed: u32, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    pattern(seed, &mut data);
    data
}

/// Writes `len` bytes of the pattern of `seed` to a result.
pub fn put_pattern(mut writer: ResultWriter<'_>, seed: u32, len: usize) -> Result<(), ResultTooLong> {
    (0..len.div_ceil(BLOCK)).try_for_each(|n| writer.put(pattern_block(seed, n, BLOCK.min(len - n * BLOCK))))
}

/// Whether `bytes` are the pattern of `seed`.
pub fn has_pattern(seed: u32, bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK).enumerate().all(|(n, block)| block == pattern_block(seed, n, block.len()))
}

/// Whether each of `bytes` is `byte`.
pub fn is_filled_with(byte: u8, bytes: &[u8]) -> bool {
    bytes.split_first().is_none_or(|(&first, rest)| first == byte && *rest == bytes[..rest.len()])
}

/// The first `len` bytes of block `n`. A block starts 3 higher than the previous one, so that adjacent blocks differ.
fn pattern_block(seed: u32, n: usize, len: usize) -> &'static [u8] {
    let first = ((seed.wrapping_mul(0x9E37_79B9) >> 24) as usize + 3 * n) % BLOCK;
    &RAMP[first..first + len]
}

/// Pseudo-random numbers (xorshift), reproducible by seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
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
