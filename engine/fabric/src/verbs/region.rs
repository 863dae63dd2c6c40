//! Memory registered with the device.

#![forbid(unsafe_code)]

use std::rc::Rc;

use rpcrdma_mempool::{Arena, ArenaId};

use super::explain;
use super::map::NumberMap;
use super::sys::{MemoryRegion, ProtectionDomain};
use crate::{Access, FabricError};

/// Registered arenas.
pub(super) struct MemoryRegions {
    /// `None` without a device.
    pd: Option<Rc<ProtectionDomain>>,
    /// Arenas to register once a device is present.
    waiting: Vec<(Arena, Access)>,
    /// The first registered arena. It is the shard's own and holds nearly all messages.
    first: Option<(ArenaId, RegisteredArena)>,
    /// All other arenas.
    by_arena: NumberMap<RegisteredArena>,
}

pub(super) struct RegisteredArena {
    pub(super) mr: MemoryRegion,
    pub(super) access: Access,
}

impl MemoryRegions {
    pub(super) fn new(pd: Option<&Rc<ProtectionDomain>>) -> Self {
        Self { pd: pd.cloned(), waiting: Vec::new(), first: None, by_arena: NumberMap::default() }
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
        let may_expose = access.remote_read || access.remote_write;
        let mr = MemoryRegion::new(pd, arena, may_expose)
            .map_err(|e| explain::pin_error(format!("ibv_reg_mr of {} bytes", arena.len()), &e))?;
        let region = RegisteredArena { mr, access };
        if self.first.is_none() {
            self.first = Some((id, region));
        } else {
            self.by_arena.insert(id.get(), region);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        if let Some(at) = self.waiting.iter().position(|(known, _)| known.id() == arena) {
            self.waiting.remove(at);
            return Ok(());
        }
        let is_first = self.first.take_if(|(id, _)| *id == arena).is_some();
        if is_first || self.by_arena.remove(&arena.get()).is_some() {
            return Ok(());
        }
        Err(FabricError::misuse(format!("arena {arena} is not registered")))
    }

    /// Deregisters all arenas. They are registered again with the next device.
    pub(super) fn close(&mut self) {
        self.pd = None;
        let oldest = self.first.take().map(|(_, region)| region);
        let all = oldest.into_iter().chain(self.by_arena.drain().map(|(_, region)| region));
        self.waiting.extend(all.map(|region| (region.mr.arena().clone(), region.access)));
    }

    /// Registers all known arenas with a device. On an error none stays registered.
    ///
    /// # Errors
    /// The first failed registration.
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
        match &self.first {
            Some((id, region)) if *id == arena => Some(region),
            _ => self.by_arena.get(&arena.get()),
        }
    }
}
