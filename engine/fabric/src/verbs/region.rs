//! Arenas registered with the device.

#![forbid(unsafe_code)]

use std::rc::Rc;

use rpcrdma_mempool::{Arena, ArenaId};

use super::errors;
use super::sys::{MemoryRegion, ProtectionDomain};
use crate::{Access, FabricError};

/// Registered arenas.
pub(super) struct MemoryRegions {
    /// `None` without a device.
    pd: Option<Rc<ProtectionDomain>>,
    /// Arenas to register once a device is present.
    waiting: Vec<(Arena, Access)>,
    /// Registered arenas in order of registration. The first one is the shard's own and holds nearly all messages.
    registered: Vec<RegisteredArena>,
}

pub(super) struct RegisteredArena {
    id: ArenaId,
    pub(super) lkey: u32,
    pub(super) access: Access,
    pub(super) mr: MemoryRegion,
}

impl MemoryRegions {
    pub(super) fn new(pd: Option<&Rc<ProtectionDomain>>) -> Self {
        Self { pd: pd.cloned(), waiting: Vec::new(), registered: Vec::new() }
    }

    pub(super) fn add(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        let id = arena.id();
        if self.get(id).is_some() || self.waiting.iter().any(|(known, _)| known.id() == id) {
            return Err(FabricError::misuse(format!("arena {id} is registered already")));
        }
        let Some(pd) = &self.pd else {
            self.waiting.push((arena.clone(), access));
            return Ok(());
        };
        let mr = MemoryRegion::new(pd, arena, access != Access::LOCAL)
            .map_err(|e| errors::pin_error(format!("ibv_reg_mr of {} bytes", arena.len()), &e))?;
        self.registered.push(RegisteredArena { id, lkey: mr.lkey(), access, mr });
        Ok(())
    }

    pub(super) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        let before = self.waiting.len() + self.registered.len();
        self.waiting.retain(|(known, _)| known.id() != arena);
        self.registered.retain(|region| region.id != arena);
        if self.waiting.len() + self.registered.len() < before {
            return Ok(());
        }
        Err(FabricError::misuse(format!("arena {arena} is not registered")))
    }

    /// Deregisters all arenas. `open` registers them again with the next device.
    pub(super) fn close(&mut self) {
        self.pd = None;
        let all = self.registered.drain(..);
        self.waiting.extend(all.map(|region| (region.mr.parents().0.clone(), region.access)));
    }

    /// Registers all known arenas with a device.
    ///
    /// # Errors
    /// A registration fails. Then no arena stays registered.
    pub(super) fn open(&mut self, pd: &Rc<ProtectionDomain>) -> Result<(), FabricError> {
        self.pd = Some(Rc::clone(pd));
        let waiting = std::mem::take(&mut self.waiting);
        for (done, (arena, access)) in waiting.iter().enumerate() {
            if let Err(error) = self.add(arena, *access) {
                self.close();
                self.waiting.extend_from_slice(&waiting[done..]);
                return Err(error);
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn get(&self, arena: ArenaId) -> Option<&RegisteredArena> {
        self.registered.iter().find(|region| region.id == arena)
    }
}
