//! Memory windows of one queue pair, with their current and next keys.
//!
//! A key (steering tag) has 24 bits that name the window, some of them random. The other 8 bits change at each bind, so
//! the key of one use is stale in the next.

#![forbid(unsafe_code)]

use std::hash::{BuildHasher, Hasher, RandomState};

/// Index bits within a key's upper 24, for up to `limit` windows.
fn index_bits(limit: u32) -> u32 {
    limit.next_power_of_two().trailing_zeros()
}

/// The window that a key would name among `limit`, existing or not.
pub(crate) fn index_of(rkey: u32, limit: u32) -> u32 {
    (rkey >> 8) & (limit.next_power_of_two() - 1)
}

/// The key of a window after one more bind.
fn following(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// The result of a revocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Revoked {
    /// The peer can no longer reach the memory.
    Done,
    /// In use now: by a copy of the peer, or by bytes on their way to it.
    Busy,
    /// It was not bound.
    NotBound,
}

/// The keys of all windows of one side of a queue pair.
#[derive(Debug)]
pub(crate) struct Keys {
    limit: u32,
    random: u32,
    windows: Vec<Key>,
}

#[derive(Debug)]
struct Key {
    /// Key of the last executed bind.
    current: u32,
    /// Key of the last posted bind; may be ahead of `current`.
    posted: u32,
    /// Whether the window will be bound once everything posted is carried out.
    posted_bound: bool,
    /// The current key is valid.
    bound: bool,
}

impl Keys {
    /// Keys of unbound windows, at most `limit`. `random` makes them hard to guess.
    pub(crate) fn new(limit: u32, random: u32) -> Self {
        Self { limit, random, windows: Vec::new() }
    }

    /// Limit of windows.
    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Makes a window, within the limit.
    pub(crate) fn add(&mut self) -> Option<u32> {
        let index = self.windows.len() as u32;
        if index >= self.limit {
            return None;
        }
        let bits = index_bits(self.limit);
        let high = self.random >> 8 >> bits << bits;
        // The generation starts anywhere, so that the first key is as hard to guess as the others.
        let rkey = (high | index) << 8 | self.random.rotate_left(index) & 0xff;
        self.windows.push(Key { current: rkey, posted: rkey, posted_bound: false, bound: false });
        Some(index)
    }

    /// The key that the next posted bind makes valid.
    pub(crate) fn next(&self, index: u32) -> Option<u32> {
        self.windows.get(index as usize).map(|key| following(key.posted))
    }

    /// Records that a bind is posted; false if the window is not free.
    pub(crate) fn post_bind(&mut self, index: u32) -> bool {
        let Some(key) = self.windows.get_mut(index as usize).filter(|key| !key.posted_bound) else { return false };
        (key.posted, key.posted_bound) = (following(key.posted), true);
        true
    }

    /// Records that an invalidation is posted; false if the window is free.
    pub(crate) fn post_invalidate(&mut self, index: u32) -> bool {
        let Some(key) = self.windows.get_mut(index as usize).filter(|key| key.posted_bound) else { return false };
        key.posted_bound = false;
        true
    }

    /// Records that a posted bind is carried out; returns the key that is valid by that.
    pub(crate) fn bound(&mut self, index: u32) -> Option<u32> {
        let key = self.windows.get_mut(index as usize)?;
        key.current = following(key.current);
        key.bound = true;
        Some(key.current)
    }

    /// Records that the window is unbound; returns the key that is invalid by that.
    pub(crate) fn revoked(&mut self, index: u32) -> Option<u32> {
        let key = self.windows.get_mut(index as usize)?;
        key.bound = false;
        Some(key.current)
    }

    /// Records that the peer has requested the invalidation, so that none of ours follows. A bind that was posted after
    /// it stays.
    pub(crate) fn invalidated(&mut self, index: u32) {
        if let Some(key) = self.windows.get_mut(index as usize) {
            key.posted_bound = key.posted != key.current && key.posted_bound;
        }
    }

    /// The window with this valid key.
    #[inline]
    pub(crate) fn find(&self, rkey: u32) -> Option<u32> {
        let index = index_of(rkey, self.limit.max(1));
        self.windows.get(index as usize).filter(|key| key.bound && key.current == rkey).map(|_| index)
    }
}

/// Numbers that are hard to guess from outside.
#[derive(Debug, Default)]
pub(crate) struct Randoms {
    state: RandomState,
    count: u64,
}

impl Randoms {
    /// Another one each time.
    pub(crate) fn next(&mut self) -> u32 {
        self.count += 1;
        let mut hasher = self.state.build_hasher();
        hasher.write_u64(self.count);
        hasher.finish() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5040 §8.1.1: all key bits but the index are random.
    #[test]
    fn stags_are_spread_over_their_range() {
        let key = |random| {
            let mut keys = Keys::new(8, random);
            keys.add().and_then(|index| keys.next(index)).expect("a window")
        };
        let index = 8..8 + index_bits(8);
        for bit in (0..32).filter(|bit| !index.contains(bit)) {
            let changed = key(0x5a5a_5a5a) ^ key(0x5a5a_5a5a ^ 1 << bit);
            assert_ne!(changed, 0, "bit {bit}");
        }
    }
}
