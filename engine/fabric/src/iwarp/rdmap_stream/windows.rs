//! Memory windows of one stream, with bytes and rights (RFC 5042 §6).
//!
//! Only this side reads or writes the memory, so bounds and rights are exact for each segment.

#![forbid(unsafe_code)]

use std::cell::Cell;

use rpcrdma_mempool::{ArenaId, Lent};

use crate::Access;
use crate::iwarp::wire::Fault;
use crate::keys::{Keys, Revoked};

/// The memory that a window exposes.
#[derive(Debug)]
pub(in crate::iwarp) struct ExposedRange {
    mem: Lent,
    /// The peer's name of the first exposed byte: its offset in the arena.
    address: u64,
    len: u64,
    access: Access,
    /// The stream position after the last byte that is sent from here.
    busy_until: Cell<u64>,
}

/// The windows of our side of one queue pair.
#[derive(Debug)]
pub(in crate::iwarp) struct Windows {
    pub(in crate::iwarp) keys: Keys<ExposedRange>,
}

impl Windows {
    /// No windows. `random` makes their STags hard to guess.
    pub(super) fn new(limit: u32, random: u32) -> Self {
        Self { keys: Keys::new(limit, random) }
    }

    /// Executes a bind of an unbound window: exposes `len` bytes of `mem` from `offset` on.
    pub(super) fn bind(&mut self, index: u32, mem: Lent, offset: usize, len: usize, access: Access) {
        let address = (mem.offset() + offset) as u64;
        let range = ExposedRange { mem, address, len: len as u64, access, busy_until: Cell::new(0) };
        let bound = self.keys.bind(index, range);
        debug_assert!(bound.is_some(), "a bind was posted for a window that is bound");
    }

    /// Revokes a window by index, for a local invalidation. The stream has sent all before `sent`. Repeat the call
    /// while it returns `Busy`: the peer can read or write nothing more of the window meanwhile.
    pub(super) fn revoke(&mut self, index: u32, sent: u64) -> Revoked {
        self.keys.revoke(index, |_, _, exposure| exposure.busy_until.get() <= sent)
    }

    /// Revokes a window by its STag, at the request of a peer's message.
    pub(super) fn revoke_key(&mut self, stag: u32, sent: u64) -> Revoked {
        self.keys.revoke_key(stag, |_, _, exposure| exposure.busy_until.get() <= sent)
    }

    /// The memory of `len` bytes at `address` of this STag, and their offset in it.
    ///
    /// A refusal has the fault of a Write, whose tagged segments DDP places, or of a Read Request, which RDMAP checks
    /// (RFC 5041 §8.2 and RFC 5040 §7.1).
    pub(super) fn find(&self, stag: u32, address: u64, len: u64, write: bool) -> Result<(&Lent, usize), Fault> {
        let [invalid, bounds, wrap] = if write {
            [Fault::TaggedInvalidStag, Fault::TaggedBounds, Fault::TaggedOffsetWrap]
        } else {
            [Fault::InvalidStag, Fault::Bounds, Fault::OffsetWrap]
        };
        let exposure = self.keys.find(stag).ok_or(invalid)?;
        address.checked_add(len).ok_or(wrap)?;
        let skip = address.checked_sub(exposure.address).ok_or(bounds)?;
        exposure.len.checked_sub(skip).filter(|left| len <= *left).ok_or(bounds)?;
        let granted = if write { exposure.access.remote_write } else { exposure.access.remote_read };
        let offset = address as usize - exposure.mem.offset();
        if granted { Ok((&exposure.mem, offset)) } else { Err(Fault::AccessRights) }
    }

    /// Keeps the window's memory until the stream has sent all bytes before this position.
    pub(super) fn keep_until(&self, stag: u32, position: u64) {
        self.keys.find(stag).inspect(|exposure| exposure.busy_until.set(position));
    }

    /// Whether memory of this arena is exposed right now.
    pub(in crate::iwarp) fn exposes(&self, arena: ArenaId) -> bool {
        self.keys.bound().any(|exposure| exposure.mem.arena() == arena)
    }

    /// Ends the stream: no memory is reachable from here on.
    pub(super) fn clear(&mut self) {
        self.keys.revoke_all(|_, _, _| true);
    }
}
