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

/// Reports a field of a fabric's configuration unless it is valid; `rule` states the allowed values.
pub(crate) fn check_field(
    fabric: &str,
    is_valid: bool,
    field: &str,
    got: usize,
    rule: &str,
) -> Result<(), FabricError> {
    if is_valid { Ok(()) } else { Err(FabricError::misuse(format!("{fabric} fabric: {field} = {got}: {rule}"))) }
}

/// Checks that a buffer of `buf_len` bytes has `len` bytes from `offset` on.
#[inline]
pub(crate) fn check_bounds(offset: usize, len: usize, buf_len: usize) -> Result<(), &'static str> {
    if offset.checked_add(len).is_some_and(|end| end <= buf_len) { Ok(()) } else { Err(BOUNDS) }
}

/// Checks the memory for a window: at least one byte of a buffer of `buf_len` bytes.
#[inline]
pub(crate) fn check_nonempty_bounds(offset: usize, len: usize, buf_len: usize) -> Result<(), &'static str> {
    if len == 0 { Err(BOUNDS) } else { check_bounds(offset, len, buf_len) }
}

impl Source {
    /// The arena and the length of the buffer.
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
        let require_registered = |arena| require(permits(arena, Access::LOCAL), FOREIGN);
        match self {
            Self::Send { buf, .. } => {
                require(buf.len() <= max_message, "a message longer than the negotiated max_message")?;
                require_registered(buf.arena())
            }
            Self::Write { src, offset, len, .. } => {
                let (arena, buf_len) = src.extent();
                require_registered(arena).and_then(|()| check_bounds(*offset, *len, buf_len))
            }
            Self::Read { dst, offset, len, .. } => {
                require_registered(dst.arena()).and_then(|()| check_bounds(*offset, *len, dst.len()))
            }
            Self::Bind { window, mem, offset, len, access } => {
                require(permits(mem.arena(), *access), "memory that is not registered with these rights")?;
                check_nonempty_bounds(*offset, *len, mem.len())?;
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
