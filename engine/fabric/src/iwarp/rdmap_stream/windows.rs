//! Memory windows of one stream, with bytes and rights (RFC 5042 §6).
//!
//! Only this side reads or writes the memory, so bounds and rights are exact for each segment.

#![forbid(unsafe_code)]

use std::cell::Cell;

use rpcrdma_mempool::Lent;

use crate::Access;
use crate::iwarp::wire::Fault;
use crate::keys::Keys;

/// The windows of our side of one queue pair.
pub(in crate::iwarp) type Windows = Keys<ExposedRange>;

/// The memory that a window exposes.
#[derive(Debug)]
pub(in crate::iwarp) struct ExposedRange {
    pub(in crate::iwarp) mem: Lent,
    /// The peer's name of the first exposed byte: its offset in the arena.
    address: u64,
    len: u64,
    access: Access,
    /// The stream position after the last byte that is sent from here.
    pub(super) busy_until: Cell<u64>,
}

impl ExposedRange {
    /// The `len` bytes of `mem` from `offset` on.
    pub(super) fn new(mem: Lent, offset: usize, len: usize, access: Access) -> Self {
        let address = (mem.offset() + offset) as u64;
        Self { mem, address, len: len as u64, access, busy_until: Cell::new(0) }
    }

    /// Tells [`Keys::revoke`] whether the stream, which has sent all before `sent`, needs the memory no more.
    pub(super) fn is_free(sent: u64) -> impl FnOnce(u32, u32, &Self) -> bool {
        move |_, _, range| range.busy_until.get() <= sent
    }

    /// The range of this STag with `len` bytes at `address`, and their offset in its memory.
    ///
    /// A refusal has the fault of a Write, whose tagged segments DDP places, or of a Read Request, which RDMAP checks
    /// (RFC 5041 §8.2 and RFC 5040 §7.1).
    pub(super) fn find(
        windows: &Windows,
        stag: u32,
        address: u64,
        len: u64,
        write: bool,
    ) -> Result<(&Self, usize), Fault> {
        let [invalid, bounds, wrap] = if write {
            [Fault::TaggedInvalidStag, Fault::TaggedBounds, Fault::TaggedOffsetWrap]
        } else {
            [Fault::InvalidStag, Fault::Bounds, Fault::OffsetWrap]
        };
        let range = windows.find(stag).ok_or(invalid)?;
        address.checked_add(len).ok_or(wrap)?;
        let skip = address.checked_sub(range.address).ok_or(bounds)?;
        range.len.checked_sub(skip).filter(|left| len <= *left).ok_or(bounds)?;
        let granted = if write { range.access.remote_write } else { range.access.remote_read };
        let offset = address as usize - range.mem.offset();
        if granted { Ok((range, offset)) } else { Err(Fault::AccessRights) }
    }
}
