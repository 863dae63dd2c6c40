//! Memory that the device knows.

#![forbid(unsafe_code)]

use std::rc::Rc;

use rpcrdma_mempool::{Arena, ArenaId};

use super::explain;
use super::map::NumberMap;
use super::sys::{MemoryRegion, ProtectionDomain};
use crate::{Access, FabricError};

/// Registered arenas.
pub(super) struct Regions {
    pd: Rc<ProtectionDomain>,
    /// The oldest: a shard's own, which nearly all messages are in.
    first: Option<(ArenaId, Region)>,
    /// All others.
    by_arena: NumberMap<Region>,
}

/// A registered arena.
pub(super) struct Region {
    pub(super) mr: MemoryRegion,
    pub(super) access: Access,
}

impl Regions {
    pub(super) fn new(pd: &Rc<ProtectionDomain>) -> Self {
        Self { pd: Rc::clone(pd), first: None, by_arena: NumberMap::default() }
    }

    pub(super) fn add(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        let id = arena.id();
        if self.get(id).is_some() {
            return Err(FabricError::Misuse(format!("arena {id} is registered already")));
        }
        let may_expose = access.remote_read || access.remote_write;
        let mr = MemoryRegion::new(&self.pd, arena, may_expose)
            .map_err(|e| explain::pinning(format!("ibv_reg_mr of {} bytes", arena.len()), &e))?;
        let region = Region { mr, access };
        if self.first.is_none() {
            self.first = Some((id, region));
        } else {
            self.by_arena.insert(id.get(), region);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        let first = self.first.take_if(|(id, _)| *id == arena).map(|(_, region)| region);
        match first.or_else(|| self.by_arena.remove(&arena.get())) {
            Some(_) => Ok(()),
            None => Err(FabricError::Misuse(format!("arena {arena} is not registered"))),
        }
    }

    #[inline]
    pub(super) fn get(&self, arena: ArenaId) -> Option<&Region> {
        match &self.first {
            Some((id, region)) if *id == arena => Some(region),
            _ => self.by_arena.get(&arena.get()),
        }
    }
}
