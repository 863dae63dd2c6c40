//! Memory that the device knows.

#![forbid(unsafe_code)]

use std::rc::Rc;

use rpcrdma_mempool::{Arena, ArenaId};

use super::explain;
use super::map::NumberMap;
use super::sys::{MemoryRegion, ProtectionDomain};
use crate::fabric::{Access, FabricError};

/// Registered arenas.
pub(super) struct Regions {
    pd: Rc<ProtectionDomain>,
    /// The device is an iWARP one.
    is_iwarp: bool,
    by_arena: NumberMap<Region>,
}

/// A registered arena.
pub(super) struct Region {
    pub(super) mr: MemoryRegion,
    pub(super) access: Access,
}

impl Regions {
    pub(super) fn new(pd: &Rc<ProtectionDomain>, is_iwarp: bool) -> Self {
        Self { pd: Rc::clone(pd), is_iwarp, by_arena: NumberMap::default() }
    }

    pub(super) fn add(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        let id = arena.id().get();
        if self.by_arena.contains_key(&id) {
            return Err(FabricError::Misuse(format!("arena {id} is registered already")));
        }
        let may_expose = access.remote_read || access.remote_write;
        let mr = MemoryRegion::new(&self.pd, arena, may_expose, self.is_iwarp)
            .map_err(|e| explain::pinning(format!("ibv_reg_mr of {} bytes", arena.len()), &e))?;
        self.by_arena.insert(id, Region { mr, access });
        Ok(())
    }

    pub(super) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        match self.by_arena.remove(&arena.get()) {
            Some(_) => Ok(()),
            None => Err(FabricError::Misuse(format!("arena {arena} is not registered"))),
        }
    }

    #[inline]
    pub(super) fn get(&self, arena: ArenaId) -> Option<&Region> {
        self.by_arena.get(&arena.get())
    }
}
