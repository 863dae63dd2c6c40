//! Memory windows of one queue pair, with their current and next keys.
//!
//! A key (steering tag) has 24 bits that identify the window, some of them random. The other 8 bits change at each
//! bind, so the key of one bind is stale after the next.

#![forbid(unsafe_code)]

use std::hash::{BuildHasher, RandomState};

use crate::{FabricError, QpId, WindowId};

/// Number of bits for the index of one of `limit` windows, within a key's upper 24.
fn index_bits(limit: u32) -> u32 {
    limit.next_power_of_two().trailing_zeros()
}

/// The index of the window that a key names among `limit`, whether it exists or not.
pub(crate) fn index_of(rkey: u32, limit: u32) -> u32 {
    (rkey >> 8) & (limit.next_power_of_two() - 1)
}

/// The key of a window after one more bind.
fn key_after_bind(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// The result of a revocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Revoked {
    /// The peer can no longer reach the memory.
    Done,
    /// The memory is in use: the peer is copying it, or bytes of it are in flight to the peer.
    Busy,
    /// The window was not bound.
    NotBound,
}

/// The windows of one side of a queue pair: their keys, and the memory bound to each.
#[derive(Debug)]
pub(crate) struct WindowKeys<T> {
    limit: u32,
    random: u32,
    windows: Vec<WindowKey<T>>,
}

/// The key of one window.
#[derive(Debug)]
struct WindowKey<T> {
    /// Key of the last executed bind.
    current: u32,
    /// Key of the last posted bind, which may be ahead of `current`.
    posted: u32,
    /// Whether the window will be bound once all posted requests are executed.
    will_be_bound: bool,
    /// Whether the current key is valid.
    is_valid: bool,
    /// The memory that the last bind exposes, until its revocation has ended.
    bound: Option<T>,
}

impl<T> WindowKeys<T> {
    /// An empty list of at most `limit` windows. `random` makes their keys hard to guess.
    pub(crate) fn new(limit: u32, random: u32) -> Self {
        Self { limit, random, windows: Vec::new() }
    }

    /// Allocates a window of this queue pair, within the limit.
    pub(crate) fn alloc(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let index = self.windows.len() as u32;
        if index >= self.limit {
            return Err(FabricError::window_limit_reached(qp, self.limit));
        }
        let bits = index_bits(self.limit);
        let high = self.random >> 8 >> bits << bits;
        // The lower 8 bits start at a random value, so that the first key is as hard to guess as the others.
        let rkey = (high | index) << 8 | self.random.rotate_left(index) & 0xff;
        self.windows.push(WindowKey {
            current: rkey,
            posted: rkey,
            will_be_bound: false,
            is_valid: false,
            bound: None,
        });
        Ok(WindowId { qp, index })
    }

    /// The key that the next posted bind makes valid.
    pub(crate) fn next(&self, index: u32) -> Option<u32> {
        self.windows.get(index as usize).map(|window| key_after_bind(window.posted))
    }

    /// Records that a bind is posted; false if the window is not free.
    pub(crate) fn post_bind(&mut self, index: u32) -> bool {
        let Some(key) = self.windows.get_mut(index as usize).filter(|key| !key.will_be_bound) else { return false };
        (key.posted, key.will_be_bound) = (key_after_bind(key.posted), true);
        true
    }

    /// Records that an invalidation is posted; false if the window is free.
    pub(crate) fn post_invalidate(&mut self, index: u32) -> bool {
        let Some(key) = self.windows.get_mut(index as usize).filter(|key| key.will_be_bound) else { return false };
        key.will_be_bound = false;
        true
    }

    /// Executes a posted bind, and returns the key that becomes valid. `None` if memory is still bound to the window.
    #[inline]
    pub(crate) fn bind(&mut self, index: u32, what: T) -> Option<u32> {
        let key = self.windows.get_mut(index as usize).filter(|key| key.bound.is_none())?;
        key.current = key_after_bind(key.current);
        (key.is_valid, key.bound) = (true, Some(what));
        Some(key.current)
    }

    /// Revokes a window by index: its key is invalid from now on.
    ///
    /// `end_access` gets index, key and bound memory. It makes the key invalid for the peer, and returns whether the
    /// memory is no longer in use. Otherwise the window is busy, and the caller repeats the call.
    pub(crate) fn revoke(&mut self, index: u32, end_access: impl FnOnce(u32, u32, &T) -> bool) -> Revoked {
        let Some(key) = self.windows.get_mut(index as usize) else { return Revoked::NotBound };
        let Some(bound) = &key.bound else { return Revoked::NotBound };
        key.is_valid = false;
        if !end_access(index, key.current, bound) {
            return Revoked::Busy;
        }
        key.bound = None;
        Revoked::Done
    }

    /// Revokes a window by its key, at the request of a peer's message.
    pub(crate) fn revoke_key(&mut self, rkey: u32, end_access: impl FnOnce(u32, u32, &T) -> bool) -> Revoked {
        let Some(index) = self.index(rkey) else { return Revoked::NotBound };
        if let Some(key) = self.windows.get_mut(index as usize) {
            // Unlike in `revoke`, no posted invalidation has cleared `will_be_bound`. A later posted bind stays posted.
            let has_later_bind = key.posted != key.current;
            key.will_be_bound &= has_later_bind;
        }
        self.revoke(index, end_access)
    }

    /// Revokes all windows as [`revoke`](Self::revoke) does. Returns false if any is busy; the caller then repeats the
    /// call.
    pub(crate) fn revoke_all(&mut self, end_access: impl Fn(u32, u32, &T) -> bool) -> bool {
        (0..self.windows.len() as u32).filter(|&index| self.revoke(index, &end_access) == Revoked::Busy).count() == 0
    }

    /// The memory bound to the window with this valid key.
    #[inline]
    pub(crate) fn find(&self, rkey: u32) -> Option<&T> {
        self.windows.get(self.index(rkey)? as usize)?.bound.as_ref()
    }

    /// All bound memory, including that of unfinished revocations.
    pub(crate) fn bound(&self) -> impl Iterator<Item = &T> {
        self.windows.iter().filter_map(|key| key.bound.as_ref())
    }

    /// Index of the window with this valid key.
    #[inline]
    fn index(&self, rkey: u32) -> Option<u32> {
        let index = index_of(rkey, self.limit.max(1));
        self.windows.get(index as usize).filter(|key| key.is_valid && key.current == rkey).map(|_| index)
    }
}

/// Random numbers that peers cannot easily guess.
#[derive(Debug, Default)]
pub(crate) struct RandomNumbers {
    state: RandomState,
    count: u64,
}

impl RandomNumbers {
    /// The next number.
    pub(crate) fn next(&mut self) -> u32 {
        self.count += 1;
        self.state.hash_one(self.count) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5040 §8.1.1: all key bits except the index are random.
    #[test]
    fn all_key_bits_but_the_index_are_random() {
        let key = |random| {
            let mut keys = WindowKeys::<()>::new(8, random);
            let window = keys.alloc(QpId::NONE).expect("a window");
            keys.next(window.index).expect("a key")
        };
        let index = 8..8 + index_bits(8);
        for bit in (0..32).filter(|bit| !index.contains(bit)) {
            let changed = key(0x5a5a_5a5a) ^ key(0x5a5a_5a5a ^ 1 << bit);
            assert_ne!(changed, 0, "bit {bit}");
        }
    }
}
