//! The memory windows of one queue pair.
//!
//! A window is free, bound, or being revoked. `QpWindows` holds the exposed memory until the revocation is proven. It
//! never invalidates a window twice, because some devices (rxe) then report a failure.

#![forbid(unsafe_code)]

use std::rc::Rc;

use rdma_sys::ibv_mw;
use rpcrdma_mempool::{ArenaId, Lent};

use super::errors;
use super::number_map::NumberMap;
use super::sys::{MemoryWindow, ProtectionDomain};
use crate::{FabricError, QpId, WindowId};

/// The bits of a key that the window's owner chooses. The other bits identify the window.
const KEY_VARIANT: u32 = 0xFF;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowState {
    Free,
    Bound,
    /// A local invalidation was posted.
    Revoking,
}

struct WindowEntry {
    mw: MemoryWindow,
    state: WindowState,
    /// The exposed memory.
    mem: Option<Lent>,
}

pub(super) struct QpWindows {
    pd: Rc<ProtectionDomain>,
    limit: u32,
    list: Vec<WindowEntry>,
    /// Index into `list` by the constant part of the key.
    by_key: NumberMap<u32>,
}

impl QpWindows {
    pub(super) fn new(pd: &Rc<ProtectionDomain>, limit: u32) -> Self {
        Self { pd: Rc::clone(pd), limit, list: Vec::new(), by_key: NumberMap::default() }
    }

    /// Allocates a free window for this queue pair.
    pub(super) fn add(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let index = self.list.len() as u32;
        if index >= self.limit {
            return Err(FabricError::window_limit_reached(qp, self.limit));
        }
        let mw = MemoryWindow::new(&self.pd).map_err(|error| errors::pin_error("ibv_alloc_mw", &error))?;
        self.by_key.insert(mw.rkey() & !KEY_VARIANT, index);
        self.list.push(WindowEntry { mw, state: WindowState::Free, mem: None });
        Ok(WindowId { qp, index })
    }

    /// The key after the next bind.
    #[inline]
    pub(super) fn next_rkey(&self, index: u32) -> Option<u32> {
        self.list.get(index as usize).map(|window| key_after_bind(window.mw.rkey()))
    }

    /// Moves a window from state `from` to state `to`. The error is `otherwise` if the window is in another state.
    #[inline]
    fn transition(
        &mut self,
        index: u32,
        (from, to): (WindowState, WindowState),
        otherwise: &'static str,
    ) -> Result<&mut WindowEntry, &'static str> {
        let window = self.list.get_mut(index as usize).ok_or("a window that was never allocated")?;
        if window.state != from {
            return Err(otherwise);
        }
        window.state = to;
        Ok(window)
    }

    /// Marks a free window as bound, before its bind is posted. Returns the window, and the key that the bind gives it.
    #[inline]
    pub(super) fn begin_bind(&mut self, index: u32) -> Result<(*mut ibv_mw, u32), &'static str> {
        let window = self.transition(index, (WindowState::Free, WindowState::Bound), "a window that is bound")?;
        Ok((window.mw.raw(), key_after_bind(window.mw.rkey())))
    }

    /// Records a posted bind.
    #[inline]
    pub(super) fn record_bind(&mut self, index: u32, mem: Lent) {
        if let Some(window) = self.list.get_mut(index as usize) {
            window.mw.set_rkey(key_after_bind(window.mw.rkey()));
            window.mem = Some(mem);
        }
    }

    /// Marks a bound window as being revoked before the local invalidation is posted. Returns its key.
    #[inline]
    pub(super) fn begin_revoke(&mut self, index: u32) -> Result<u32, &'static str> {
        let window =
            self.transition(index, (WindowState::Bound, WindowState::Revoking), "a window that is not bound")?;
        Ok(window.mw.rkey())
    }

    /// Frees a window after its local invalidation.
    #[inline]
    pub(super) fn free(&mut self, index: u32) {
        if let Some(window) = self.list.get_mut(index as usize) {
            window.state = WindowState::Free;
            window.mem = None;
        }
    }

    /// Frees the window whose key the peer has invalidated. Returns false if no bound window has the key.
    #[inline]
    pub(super) fn free_invalidated(&mut self, rkey: u32) -> bool {
        let index = self.by_key.get(&(rkey & !KEY_VARIANT)).copied().unwrap_or(u32::MAX);
        let window = self.list.get(index as usize);
        let is_bound = window.is_some_and(|window| window.state == WindowState::Bound && window.mw.rkey() == rkey);
        if is_bound {
            self.free(index);
        }
        is_bound
    }

    /// Whether a window is bound to memory of this arena.
    pub(super) fn exposes(&self, arena: ArenaId) -> bool {
        self.list.iter().filter_map(|window| window.mem.as_ref()).any(|mem| mem.arena() == arena)
    }

    /// Deallocates all windows. This must precede the queue pair's destruction, because bound windows make it fail on
    /// some devices.
    pub(super) fn destroy(&mut self) {
        for WindowEntry { mw, mem, .. } in self.list.drain(..) {
            if let Err(error) = mw.destroy() {
                log::error!("ibv_dealloc_mw: {error}");
                // The peer may still reach the memory, so it is leaked instead of reused.
                std::mem::forget(mem);
            }
        }
        self.by_key.clear();
    }
}

impl Drop for QpWindows {
    fn drop(&mut self) {
        self.destroy();
    }
}

#[inline]
fn key_after_bind(rkey: u32) -> u32 {
    rkey & !KEY_VARIANT | rkey.wrapping_add(1) & KEY_VARIANT
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_the_low_byte_of_a_key_changes() {
        assert_eq!(super::key_after_bind(0x1234_56FE), 0x1234_56FF);
        assert_eq!(super::key_after_bind(0x1234_56FF), 0x1234_5600);
    }
}
