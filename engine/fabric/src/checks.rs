//! Checks of work requests and configurations, common to all fabrics.

#![forbid(unsafe_code)]

use rpcrdma_mempool::ArenaId;

use crate::window_keys::WindowKeys;
use crate::{Access, Capabilities, ConnectParams, FabricError, QpId, Source, WorkRequest};

/// The defect of a work request that names unregistered memory.
pub(crate) const FOREIGN: &str = "memory that is not registered with this fabric";
/// The defect of a work request that exceeds its buffer.
const BOUNDS: &str = "bytes outside of the buffer";

/// Maximum windows per side and queue pair, because a steering tag has 16 bits for an index.
pub(crate) const MAX_WINDOWS: usize = 1 << 16;

/// Checks a field of a fabric's configuration; `rule` states the allowed values.
pub(crate) fn field(fabric: &str, ok: bool, field: &str, got: usize, rule: &str) -> Result<(), FabricError> {
    if ok { Ok(()) } else { Err(FabricError::misuse(format!("{fabric} fabric: {field} = {got}: {rule}"))) }
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

impl WorkRequest {
    /// Checks a new request as the driver of a device does.
    ///
    /// `permits` states whether an arena is registered with these rights. A valid bind or invalidation is marked
    /// as posted in `keys`, which holds the windows of the queue pair.
    #[inline]
    pub(crate) fn check<T>(
        &self,
        qp: QpId,
        keys: &mut WindowKeys<T>,
        max_message: usize,
        permits: impl Fn(ArenaId, Access) -> bool,
    ) -> Result<(), &'static str> {
        let require = |holds: bool, wrong: &'static str| if holds { Ok(()) } else { Err(wrong) };
        let known = |arena| require(permits(arena, Access::LOCAL), FOREIGN);
        match self {
            Self::Send { buf, .. } => {
                require(buf.len() <= max_message, "a message longer than the negotiated max_message")?;
                known(buf.arena())
            }
            Self::Write { src, offset, len, .. } => {
                let (arena, all) = src.extent();
                known(arena).and_then(|()| inside(*offset, *len, all))
            }
            Self::Read { dst, offset, len, .. } => known(dst.arena()).and_then(|()| inside(*offset, *len, dst.len())),
            Self::Bind { window, mem, offset, len, access } => {
                require(permits(mem.arena(), *access), "memory that is not registered with these rights")?;
                inside_some(*offset, *len, mem.len())?;
                require(*access != Access::LOCAL, "a window without rights")?;
                let is_free = window.qp == qp && keys.post_bind(window.index);
                require(is_free, "a window that is not free, or of another queue pair")
            }
            Self::LocalInvalidate { window } => {
                let is_bound = window.qp == qp && keys.post_invalidate(window.index);
                require(is_bound, "a window that is not bound, or of another queue pair")
            }
        }
    }
}

impl Capabilities {
    /// Checks the parameters of a new queue pair of a fabric over sockets.
    pub(crate) fn check_params(&self, params: &ConnectParams) -> Result<(), FabricError> {
        for (what, got, limit) in [
            ("bytes of private data", params.private_data.len(), self.max_connect_private_data),
            ("send_queue_depth", params.send_queue_depth as usize, self.max_send_wr as usize),
            ("windows", params.windows as usize, MAX_WINDOWS),
        ] {
            if got > limit {
                return Err(FabricError::misuse(format!("{what}: {got} exceeds {limit}")));
            }
        }
        Ok(())
    }
}
