//! Memory windows of one stream, with their ranges and rights (RFC 5042 §6).
//!
//! Only this side's thread reads or writes the memory, so it can check exact bounds and rights for each segment.

#![forbid(unsafe_code)]

use std::cell::Cell;

use rpcrdma_mempool::Lent;

use crate::Access;
use crate::iwarp::wire::TerminateFault;
use crate::window_keys::WindowKeys;

/// The windows of this side of one queue pair.
pub(in crate::iwarp) type Windows = WindowKeys<ExposedRange>;

/// The memory that a window exposes.
#[derive(Debug)]
pub(in crate::iwarp) struct ExposedRange {
    pub(in crate::iwarp) mem: Lent,
    /// The address of the first exposed byte for the peer: its offset in the arena.
    address: u64,
    len: u64,
    access: Access,
    /// Stream position after the last byte queued for sending from this memory.
    pub(super) busy_until: Cell<u64>,
}

impl ExposedRange {
    /// The `len` bytes of `mem` from `offset` on.
    pub(super) fn new(mem: Lent, offset: usize, len: usize, access: Access) -> Self {
        let address = (mem.offset() + offset) as u64;
        Self { mem, address, len: len as u64, access, busy_until: Cell::new(0) }
    }

    /// Returns a predicate for [`WindowKeys::revoke`]: whether the stream no longer uses the memory.
    ///
    /// `sent` is the position up to which the stream has sent its bytes.
    pub(super) fn unused_after(sent: u64) -> impl FnOnce(u32, u32, &Self) -> bool {
        move |_, _, range| range.busy_until.get() <= sent
    }

    /// Finds the range of this STag with `len` bytes at `address`, and their offset in its memory.
    ///
    /// # Errors
    /// The STag, the bounds or the rights do not permit the access. A Write fails with a DDP error, because DDP places
    /// tagged segments; a Read Request fails with an RDMAP error (RFC 5041 §8.2, RFC 5040 §7.1).
    pub(super) fn find(
        windows: &Windows,
        stag: u32,
        address: u64,
        len: u64,
        is_write: bool,
    ) -> Result<(&Self, usize), TerminateFault> {
        let [invalid, bounds, wrap] = if is_write {
            [TerminateFault::TaggedInvalidStag, TerminateFault::TaggedBounds, TerminateFault::TaggedOffsetWrap]
        } else {
            [TerminateFault::InvalidStag, TerminateFault::Bounds, TerminateFault::OffsetWrap]
        };
        let range = windows.find(stag).ok_or(invalid)?;
        address.checked_add(len).ok_or(wrap)?;
        let skip = address.checked_sub(range.address).ok_or(bounds)?;
        range.len.checked_sub(skip).filter(|rest| len <= *rest).ok_or(bounds)?;
        let granted = if is_write { range.access.remote_write } else { range.access.remote_read };
        let offset = address as usize - range.mem.offset();
        if granted { Ok((range, offset)) } else { Err(TerminateFault::AccessRights) }
    }
}
