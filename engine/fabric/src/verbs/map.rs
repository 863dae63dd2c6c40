//! Maps with device-chosen keys: queue pair numbers and memory keys.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub(super) type NumberMap<V> = HashMap<u32, V, BuildHasherDefault<Multiply>>;

/// A hash of one multiplication. The device and the kernel choose these numbers, so peers cannot force collisions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Multiply(u64);

impl Hasher for Multiply {
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
