//! The arenas that are registered with a fabric over sockets.

#![forbid(unsafe_code)]

use rpcrdma_mempool::ArenaId;

use crate::{Access, FabricError};

/// Registered arenas, with the rights that peers may get.
///
/// `T` is the fabric's own record of each arena.
#[derive(Debug)]
pub(crate) struct Registrations<T> {
    /// The first registered arena. It is the shard's own, and holds nearly all messages.
    first: Option<ArenaId>,
    /// Sorted by arena, so that a search is fast even if each connection adds one.
    list: Vec<(ArenaId, Access, T)>,
}

impl<T> Default for Registrations<T> {
    fn default() -> Self {
        Self { first: None, list: Vec::new() }
    }
}

impl<T> Registrations<T> {
    /// Registers an arena. `make` creates the fabric's record of it.
    pub(crate) fn add(
        &mut self,
        arena: ArenaId,
        access: Access,
        make: impl FnOnce() -> Result<T, FabricError>,
    ) -> Result<(), FabricError> {
        let Err(at) = self.find(arena) else {
            return Err(FabricError::misuse(format!("arena {arena} is registered already")));
        };
        self.list.insert(at, (arena, access, make()?));
        self.first.get_or_insert(arena);
        Ok(())
    }

    pub(crate) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        let at = self.find(arena).map_err(|_| FabricError::misuse(format!("arena {arena} is not registered")))?;
        self.list.remove(at);
        self.first.take_if(|first| *first == arena);
        Ok(())
    }

    /// Whether work requests may use this arena's memory with these rights.
    #[inline]
    pub(crate) fn permits(&self, arena: ArenaId, access: Access) -> bool {
        match access {
            Access::LOCAL => self.contains(arena),
            access => self.find(arena).is_ok_and(|at| self.list[at].1.permits(access)),
        }
    }

    /// Whether memory of this arena may be used in work requests. On the path of every message.
    #[inline]
    pub(crate) fn contains(&self, arena: ArenaId) -> bool {
        self.first == Some(arena) || self.contains_other(arena)
    }

    #[inline(never)]
    fn contains_other(&self, arena: ArenaId) -> bool {
        self.find(arena).is_ok()
    }

    #[inline]
    pub(crate) fn get(&self, arena: ArenaId) -> Option<&T> {
        self.find(arena).ok().map(|at| &self.list[at].2)
    }

    /// Index of the arena, or the index to insert it at.
    #[inline]
    fn find(&self, arena: ArenaId) -> Result<usize, usize> {
        self.list.binary_search_by_key(&arena, |(known, ..)| *known)
    }
}
