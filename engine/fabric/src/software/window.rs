//! Memory windows: the table of exposed memory, used by both sides.
//!
//! The owner of a table writes its entries and revokes them; the peer claims an entry for the time of a copy. Each side
//! writes a word that the other reads: the owner the key, the peer BUSY. Each side writes its word before it reads the
//! other's, with a full fence between. So if a revocation and a claim are concurrent, at least one sees the other:
//!
//! | owner | peer |
//! |---|---|
//! | bind: write the fields, publish key + VALID | claim: set BUSY, fence, read the key; if it differs, clear BUSY |
//! | revoke: clear VALID, fence, read BUSY; done if clear, else wait | copy, then clear BUSY |
//!
//! A failed claim sets BUSY for a moment; the owner then checks once more than necessary.
//!
//! Either side may be a hostile process, and both can write the table. The owner keeps its own record of binds and
//! reads only BUSY from the table. The peer checks the fields that it reads against its mappings.

use std::sync::atomic::AtomicU64;

use rpcrdma_mempool::{ArenaId, Lent, PeerMapping};

use super::memory::Word;
use crate::Access;
use crate::window_keys::{Revoked, WindowKeys, index_of};

/// Bytes of an entry: a cache line.
pub(super) const ENTRY_BYTES: usize = 64;
/// Indexes of an entry's words: the key, and the fields.
const KEY: usize = 0;
const REGION_AND_RIGHTS: usize = 1;
const ADDRESS: usize = 2;
const LEN: usize = 3;
/// Index of the word that is not zero while the peer copies.
pub(super) const BUSY: usize = 4;

/// Flag of the word `KEY`.
const VALID: u64 = 1;
/// Flags of the word `REGION_AND_RIGHTS`.
const READ: u64 = 1 << 32;
const WRITE: u64 = 1 << 33;

/// The windows of our side of one queue pair.
#[derive(Debug)]
pub(super) struct OwnWindows {
    table: PeerMapping,
    /// The keys, with the exposed memory while the peer can reach it.
    pub(super) keys: WindowKeys<Lent>,
}

/// The memory that a bind exposes: the fields of a window's entry except its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WindowFields {
    pub(super) region: u32,
    pub(super) access: Access,
    pub(super) address: u64,
    pub(super) len: u64,
}

impl OwnWindows {
    /// Windows in a zeroed table. `random` makes their keys hard to guess.
    pub(super) fn new(table: PeerMapping, limit: u32, random: u32) -> Self {
        Self { table, keys: WindowKeys::new(limit, random) }
    }

    /// Binds a window to memory. False if the window is still bound.
    #[inline]
    pub(super) fn bind(&mut self, index: u32, mem: &Lent, exposure: WindowFields) -> bool {
        let Some(entry) = WindowTableEntry::at(&self.table, index as usize) else { return false };
        let Some(rkey) = self.keys.bind(index, mem.clone()) else { return false };
        entry.bind(rkey, exposure);
        true
    }

    /// Revokes a window by index, for an invalidation of our own. The caller repeats the call while it returns `Busy`.
    pub(super) fn revoke(&mut self, index: u32) -> Revoked {
        self.keys.revoke(index, revoke_in(&self.table))
    }

    /// Revokes a window by key, at the request of a peer's message.
    pub(super) fn revoke_key(&mut self, rkey: u32) -> Revoked {
        self.keys.revoke_key(rkey, revoke_in(&self.table))
    }

    /// Whether memory of this arena is exposed.
    pub(super) fn exposes(&self, arena: ArenaId) -> bool {
        self.keys.bound().any(|mem| mem.arena() == arena)
    }

    /// Revokes all windows. True if the peer is not copying; otherwise the caller repeats the call.
    pub(super) fn revoke_all(&mut self) -> bool {
        self.keys.revoke_all(revoke_in(&self.table))
    }
}

/// Revokes a key in the table; true if the peer is not copying.
fn revoke_in(table: &PeerMapping) -> impl Fn(u32, u32, &Lent) -> bool {
    |index, rkey, _| WindowTableEntry::at(table, index as usize).is_none_or(|entry| entry.revoke(rkey))
}

/// The windows of the peer's side.
#[derive(Debug)]
pub(super) struct PeerWindows {
    table: PeerMapping,
    windows: u32,
}

/// A claimed window, whose revocation by the peer waits until it is released.
#[derive(Debug)]
pub(super) struct ClaimedWindow {
    index: usize,
    /// The peer's region.
    pub(super) region: u32,
    /// First byte, in the region.
    pub(super) offset: usize,
}

impl PeerWindows {
    /// The table of a peer with this number of windows. The caller has checked the mapping's length.
    pub(super) fn new(table: PeerMapping, windows: u32) -> Self {
        Self { table, windows }
    }

    /// Claims a window for a copy, if the key is valid and grants it.
    pub(super) fn claim(&self, rkey: u32, address: u64, len: u64, write: bool) -> Option<ClaimedWindow> {
        let index = index_of(rkey, self.windows.max(1)) as usize;
        if index >= self.windows as usize {
            return None;
        }
        let fields = WindowTableEntry::at(&self.table, index)?.claim(rkey)?;
        let claim = ClaimedWindow { index, region: fields.region, offset: address as usize };
        let granted = if write { fields.access.remote_write } else { fields.access.remote_read };
        let inside = || address.checked_sub(fields.address).and_then(|skip| fields.len.checked_sub(skip));
        if granted && inside().is_some_and(|left| len <= left) {
            return Some(claim);
        }
        self.release(claim);
        None
    }

    /// Ends a copy.
    pub(super) fn release(&self, claim: ClaimedWindow) {
        if let Some(entry) = WindowTableEntry::at(&self.table, claim.index) {
            entry.release();
        }
    }
}

/// One entry of a table, for both sides; see the module documentation.
#[derive(Debug)]
struct WindowTableEntry<'a, W>(&'a [W; 8]);

impl<'a> WindowTableEntry<'a, AtomicU64> {
    /// Entry `index` of a table; `None` behind its end.
    #[inline]
    fn at(table: &'a PeerMapping, index: usize) -> Option<Self> {
        table.line(index.checked_mul(ENTRY_BYTES)?).map(Self)
    }
}

impl<W: Word> WindowTableEntry<'_, W> {
    fn bind(&self, rkey: u32, exposure: WindowFields) {
        let WindowFields { region, access, address, len } = exposure;
        let rights = if access.remote_read { READ } else { 0 } | if access.remote_write { WRITE } else { 0 };
        self.0[REGION_AND_RIGHTS].set(u64::from(region) | rights);
        self.0[ADDRESS].set(address);
        self.0[LEN].set(len);
        // Pairs with the load in `claim`: a load that sees the key also sees the fields.
        self.0[KEY].publish(u64::from(rkey) << 32 | VALID);
    }

    /// Revokes the key. False while the peer copies.
    fn revoke(&self, rkey: u32) -> bool {
        self.0[KEY].set(u64::from(rkey) << 32);
        // Pairs with the fence in `claim`: this side sees BUSY, or the peer sees the revoked key.
        W::full_fence();
        // Pairs with `release`: the copy has ended.
        self.0[BUSY].acquire() == 0
    }

    fn claim(&self, rkey: u32) -> Option<WindowFields> {
        self.0[BUSY].set(1);
        // Pairs with the fence in `revoke`.
        W::full_fence();
        // Pairs with the publication in `bind`.
        if self.0[KEY].acquire() != u64::from(rkey) << 32 | VALID {
            self.release();
            return None;
        }
        let region_and_rights = self.0[REGION_AND_RIGHTS].get();
        Some(WindowFields {
            region: region_and_rights as u32,
            access: Access { remote_read: region_and_rights & READ != 0, remote_write: region_and_rights & WRITE != 0 },
            address: self.0[ADDRESS].get(),
            len: self.0[LEN].get(),
        })
    }

    fn release(&self) {
        // Pairs with the load in `revoke`.
        self.0[BUSY].publish(0);
    }
}

/// One entry for loom models, which derive its fields from the key.
#[cfg(all(test, loom))]
pub(super) mod model {
    use loom::sync::atomic::AtomicU64;

    use super::*;

    pub(in super::super) struct WindowModel([AtomicU64; 8]);

    impl WindowModel {
        pub(in super::super) fn new() -> Self {
            Self(std::array::from_fn(|_| AtomicU64::new(0)))
        }

        fn fields(rkey: u32) -> WindowFields {
            WindowFields { region: rkey, access: Access::REMOTE, address: u64::from(rkey) * 100, len: u64::from(rkey) }
        }

        pub(in super::super) fn bind(&self, rkey: u32) {
            WindowTableEntry(&self.0).bind(rkey, Self::fields(rkey));
        }

        pub(in super::super) fn revoke(&self, rkey: u32) -> bool {
            WindowTableEntry(&self.0).revoke(rkey)
        }

        pub(in super::super) fn claim(&self, rkey: u32) -> bool {
            match WindowTableEntry(&self.0).claim(rkey) {
                None => false,
                Some(fields) => {
                    assert_eq!(fields, Self::fields(rkey), "the fields of another bind");
                    true
                }
            }
        }

        pub(in super::super) fn release(&self) {
            WindowTableEntry(&self.0).release();
        }
    }
}
