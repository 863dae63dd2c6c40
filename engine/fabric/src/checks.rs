//! Checks of work requests and configurations, common to all fabrics.

#![forbid(unsafe_code)]

use rpcrdma_mempool::ArenaId;

use crate::{FabricError, Source};

/// Memory that a work request may not name.
pub(crate) const FOREIGN: &str = "memory that is not registered with this fabric";
/// Bytes that are not the buffer's.
const BOUNDS: &str = "bytes outside of the buffer";

/// Checks a field of a fabric's configuration; `rule` states the allowed values.
pub(crate) fn field(fabric: &str, ok: bool, field: &str, got: usize, rule: &str) -> Result<(), FabricError> {
    if ok { Ok(()) } else { Err(FabricError::misuse(format!("{fabric} fabric: {field} = {got}: {rule}"))) }
}

/// Checks that a work request names registered memory.
#[inline]
pub(crate) fn known(registered: bool) -> Result<(), &'static str> {
    if registered { Ok(()) } else { Err(FOREIGN) }
}

/// Checks that a buffer of `all` bytes has `len` bytes from `offset` on.
#[inline]
pub(crate) fn inside(offset: usize, len: usize, all: usize) -> Result<(), &'static str> {
    if offset.checked_add(len).is_some_and(|end| end <= all) { Ok(()) } else { Err(BOUNDS) }
}

/// Checks the memory for a window: at least one byte of a buffer of `all` bytes.
#[inline]
pub(crate) fn inside_some(offset: usize, len: usize, all: usize) -> Result<(), &'static str> {
    if len == 0 { Err(BOUNDS) } else { inside(offset, len, all) }
}

impl Source {
    /// The memory, and how many bytes the buffer has.
    #[inline]
    pub(crate) fn extent(&self) -> (ArenaId, usize) {
        match self {
            Self::Lent(lent) => (lent.arena(), lent.len()),
            Self::Frozen(frozen) => (frozen.arena(), frozen.len()),
        }
    }
}
