//! Maps whose keys the device chooses: queue pair numbers and memory keys.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub(super) type NumberMap<V> = HashMap<u32, V, BuildHasherDefault<MultiplyHasher>>;

/// A hasher of one multiplication. Peers cannot force collisions, because the device and the kernel choose the numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MultiplyHasher(u64);

impl Hasher for MultiplyHasher {
    #[inline]
    fn finish(&self) -> u64 {
        // The table uses the highest and the lowest bits.
        self.0 ^ self.0 >> 32
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.0 = u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }
}
