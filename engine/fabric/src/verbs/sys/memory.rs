#![expect(unsafe_code, reason = "calls libibverbs")]
//! Registered memory and its windows.

use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use rdma_sys::{ibv_access_flags, ibv_alloc_mw, ibv_dereg_mr, ibv_mr, ibv_mw, ibv_mw_type, ibv_reg_mr};
use rpcrdma_mempool::Arena;

use super::device::{Object, ProtectionDomain};
use super::{check, made};

/// An arena registered with the device. Keeps the arena alive.
pub(crate) struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    arena: Arena,
    _pd: Rc<ProtectionDomain>,
}

impl MemoryRegion {
    /// Registers a whole arena for local work requests, and for windows if `may_expose`. Peers never get rights to the
    /// region itself.
    pub(crate) fn new(pd: &Rc<ProtectionDomain>, arena: &Arena, may_expose: bool) -> io::Result<Self> {
        let mut access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if may_expose {
            access |= ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        }
        let base = std::ptr::with_exposed_provenance_mut(arena.base_address());
        // SAFETY: the range is the arena's mapping, which `arena` keeps mapped. The device writes only to posted or
        // lent buffers there. No references to these exist meanwhile.
        let raw = made(unsafe { ibv_reg_mr(pd.raw(), base, arena.len(), access as i32) })?;
        // SAFETY: the region was just created. Its keys never change.
        let lkey = unsafe { raw.as_ref().lkey };
        Ok(Self { raw, lkey, arena: arena.clone(), _pd: Rc::clone(pd) })
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    pub(crate) fn raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is deregistered once. The device cannot access the memory afterwards.
        if let Err(error) = check(unsafe { ibv_dereg_mr(self.raw()) }) {
            log::error!("ibv_dereg_mr: {error}");
            // The device may still reach the pages, so they stay mapped.
            std::mem::forget(self.arena.clone());
        }
    }
}

/// A type-2 memory window.
pub(crate) struct MemoryWindow(Object<ibv_mw, Rc<ProtectionDomain>>);

impl MemoryWindow {
    pub(crate) fn new(pd: &Rc<ProtectionDomain>) -> io::Result<Self> {
        // SAFETY: the domain is alive.
        let raw = unsafe { ibv_alloc_mw(pd.raw(), ibv_mw_type::IBV_MW_TYPE_2) };
        Ok(Self(Object::new(raw.unwrap_or(std::ptr::null_mut()), Rc::clone(pd))?))
    }

    /// The window's key as known to the library.
    #[inline]
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: the window lives as long as `self`.
        unsafe { (*self.raw()).rkey }
    }

    /// Updates the library's key of a window after a posted bind. Some providers (rxe) do not update it, and would use
    /// the old key in the next bind.
    #[inline]
    pub(crate) fn set_rkey(&mut self, rkey: u32) {
        // SAFETY: the window lives as long as `self` and has no other reference.
        unsafe { (*self.raw()).rkey = rkey };
    }

    #[inline]
    pub(crate) fn raw(&self) -> *mut ibv_mw {
        self.0.raw()
    }

    /// Revokes the peer's access, whether the window is bound or not. After an error the revocation is uncertain.
    pub(crate) fn deallocate(self) -> io::Result<()> {
        self.0.destroy()
    }
}
