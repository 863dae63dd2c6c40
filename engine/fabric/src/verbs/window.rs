//! The memory windows of one queue pair.
//!
//! A window is free, bound, or in revocation. `Windows` holds the exposed memory until the revocation is proven. It
//! never invalidates a window twice, because some devices (rxe) fail on that.

#![forbid(unsafe_code)]

use std::rc::Rc;

use rpcrdma_mempool::{ArenaId, Lent};

use super::explain;
use super::map::NumberMap;
use super::sys::{MemoryWindow, ProtectionDomain};
use crate::{FabricError, QpId, WindowId};

/// The owner's part of a key. The other bits identify the window.
const KEY_VARIANT: u32 = 0xFF;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Bound,
    /// A local invalidation was posted.
    Revoking,
}

struct Window {
    mw: MemoryWindow,
    state: State,
    /// The exposed memory.
    mem: Option<Lent>,
}

pub(super) struct Windows {
    pd: Rc<ProtectionDomain>,
    limit: u32,
    list: Vec<Window>,
    /// Index into `list` by the constant part of the key.
    by_key: NumberMap<u32>,
}

/// A window's values for a bind.
pub(super) struct Binding {
    pub(super) mw: *mut rdma_sys::ibv_mw,
    /// The window's key after the bind.
    pub(super) rkey: u32,
}

impl Windows {
    pub(super) fn new(pd: &Rc<ProtectionDomain>, limit: u32) -> Self {
        Self { pd: Rc::clone(pd), limit, list: Vec::new(), by_key: NumberMap::default() }
    }

    /// Adds a free window of this queue pair.
    pub(super) fn add(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        let index = self.list.len() as u32;
        if index >= self.limit {
            return Err(FabricError::all_windows(qp, self.limit));
        }
        let mw = MemoryWindow::new(&self.pd).map_err(|error| explain::pinning("ibv_alloc_mw", &error))?;
        self.by_key.insert(mw.rkey() & !KEY_VARIANT, index);
        self.list.push(Window { mw, state: State::Free, mem: None });
        Ok(WindowId { qp, index })
    }

    /// The key after the next bind.
    #[inline]
    pub(super) fn next_rkey(&self, index: u32) -> Option<u32> {
        self.list.get(index as usize).map(|window| next(window.mw.rkey()))
    }

    /// Takes a free window for a bind before its post.
    #[inline]
    pub(super) fn begin_bind(&mut self, index: u32) -> Result<Binding, &'static str> {
        let window = self.list.get_mut(index as usize).ok_or("a window that was never made")?;
        if window.state != State::Free {
            return Err("a window that is bound");
        }
        window.state = State::Bound;
        Ok(Binding { mw: window.mw.raw(), rkey: next(window.mw.rkey()) })
    }

    /// Records a posted bind.
    #[inline]
    pub(super) fn bound(&mut self, index: u32, mem: Lent) {
        if let Some(window) = self.list.get_mut(index as usize) {
            window.mw.set_rkey(next(window.mw.rkey()));
            window.mem = Some(mem);
        }
    }

    /// Takes a bound window for a local invalidation before its post. Returns its key.
    #[inline]
    pub(super) fn begin_revoke(&mut self, index: u32) -> Result<u32, &'static str> {
        let window = self.list.get_mut(index as usize).ok_or("a window that was never made")?;
        if window.state != State::Bound {
            return Err("a window that is not bound");
        }
        window.state = State::Revoking;
        Ok(window.mw.rkey())
    }

    /// Reverts a local invalidation that was not posted.
    pub(super) fn undo_revoke(&mut self, index: u32) {
        if let Some(window) = self.list.get_mut(index as usize) {
            window.state = State::Bound;
        }
    }

    /// Frees a window after its local invalidation, or one whose bind was not posted.
    #[inline]
    pub(super) fn free(&mut self, index: u32) {
        if let Some(window) = self.list.get_mut(index as usize) {
            window.state = State::Free;
            window.mem = None;
        }
    }

    /// Frees the window whose key the peer invalidated. False if no bound window has the key.
    #[inline]
    pub(super) fn revoked_by_peer(&mut self, rkey: u32) -> bool {
        let index = self.by_key.get(&(rkey & !KEY_VARIANT)).copied().unwrap_or(u32::MAX);
        let window = self.list.get(index as usize);
        let is_bound = window.is_some_and(|window| window.state == State::Bound && window.mw.rkey() == rkey);
        if is_bound {
            self.free(index);
        }
        is_bound
    }

    /// Whether a window is bound to memory of this arena.
    pub(super) fn exposes(&self, arena: ArenaId) -> bool {
        self.list.iter().filter_map(|window| window.mem.as_ref()).any(|mem| mem.arena() == arena)
    }

    /// Deallocates all windows. Must precede the queue pair's destruction, which a bound window blocks on some devices.
    pub(super) fn destroy(&mut self) {
        for Window { mw, mem, .. } in self.list.drain(..) {
            if let Err(error) = mw.deallocate() {
                log::error!("ibv_dealloc_mw: {error}");
                // The peer may still reach the memory, so it is never reused.
                std::mem::forget(mem);
            }
        }
        self.by_key.clear();
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.destroy();
    }
}

#[inline]
fn next(rkey: u32) -> u32 {
    rkey & !KEY_VARIANT | rkey.wrapping_add(1) & KEY_VARIANT
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_the_low_byte_of_a_key_changes() {
        assert_eq!(super::next(0x1234_56FE), 0x1234_56FF);
        assert_eq!(super::next(0x1234_56FF), 0x1234_5600);
    }
}
