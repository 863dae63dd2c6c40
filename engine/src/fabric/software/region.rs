//! Registered memory: ours, and what peers have shown to us.

use std::collections::HashMap;
use std::rc::{Rc, Weak};

use rpcrdma_mempool::{Arena, ArenaId, PeerMapping};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use super::address::system;
use crate::fabric::{Access, FabricError};

/// One registered arena.
#[derive(Debug)]
pub(super) struct Region {
    arena: ArenaId,
    access: Access,
    bytes: u64,
    /// What peers call it.
    pub(super) id: u32,
    /// For memory that peers may be shown.
    descriptor: Option<OwnedFd>,
}

impl Region {
    /// Whether all these rights were registered.
    pub(super) fn permits(&self, access: Access) -> bool {
        (self.access.remote_read || !access.remote_read) && (self.access.remote_write || !access.remote_write)
    }

    /// Descriptor and size, to show to a peer.
    pub(super) fn showing(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.descriptor.as_ref().map(|d| (d.as_fd(), self.bytes))
    }
}

/// What is registered with one fabric.
#[derive(Debug, Default)]
pub(super) struct Regions {
    list: Vec<Region>,
    next_id: u32,
}

impl Regions {
    pub(super) fn add(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        if self.contains(arena.id()) {
            return Err(FabricError::Misuse(format!("{:?} is registered already", arena.id())));
        }
        let remote = access.remote_read || access.remote_write;
        let descriptor = if remote {
            let fd = arena.fd().try_clone_to_owned();
            Some(fd.map_err(|e| system("dup of an arena's descriptor (limit: ulimit -n)", e))?)
        } else {
            None
        };
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.list.push(Region { arena: arena.id(), access, bytes: arena.len() as u64, id, descriptor });
        Ok(())
    }

    pub(super) fn remove(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        let at = self.list.iter().position(|r| r.arena == arena);
        let at = at.ok_or_else(|| FabricError::Misuse(format!("{arena:?} is not registered")))?;
        self.list.remove(at);
        Ok(())
    }

    /// Whether memory of this arena may be used in work requests. On the path of every message.
    #[inline]
    pub(super) fn contains(&self, arena: ArenaId) -> bool {
        self.list.first().is_some_and(|r| r.arena == arena) || self.is_further_down(arena)
    }

    #[inline(never)]
    fn is_further_down(&self, arena: ArenaId) -> bool {
        self.list.iter().any(|r| r.arena == arena)
    }

    pub(super) fn get(&self, arena: ArenaId) -> Option<&Region> {
        self.list.iter().find(|r| r.arena == arena)
    }
}

/// All memory of peers that is mapped here. Connections that show the same memory share one mapping of it.
#[derive(Debug, Default)]
pub(super) struct PeerMemory {
    by_inode: HashMap<(u64, u64), Weak<PeerMapping>>,
}

impl PeerMemory {
    /// Maps a peer's memory of exactly `bytes`, after checking that it cannot shrink under us.
    pub(super) fn map(&mut self, fd: OwnedFd, bytes: u64) -> Result<Rc<PeerMapping>, String> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| format!("fstat: {e}"))?;
        if stat.st_size as u64 != bytes {
            return Err(format!("memory of {} bytes was announced as {bytes}", stat.st_size));
        }
        let key = (stat.st_dev, stat.st_ino);
        if let Some(mapping) = self.by_inode.get(&key).and_then(Weak::upgrade) {
            return Ok(mapping);
        }
        self.by_inode.retain(|_, mapping| mapping.strong_count() > 0);
        let max = usize::try_from(bytes).map_err(|_| format!("{bytes} bytes are more than can be mapped"))?;
        // Only our own user and root get this far: whoever takes hugetlb pages back under us could as well kill us.
        let mapping = Rc::new(PeerMapping::map_trusted(fd, max).map_err(|e| e.to_string())?);
        self.by_inode.insert(key, Rc::downgrade(&mapping));
        Ok(mapping)
    }
}

/// Maps memory of a connection itself, of exactly `bytes`: sealed against shrinking, in small pages.
pub(super) fn map(fd: OwnedFd, bytes: usize) -> Result<PeerMapping, String> {
    let mapping = PeerMapping::map(fd, bytes).map_err(|e| e.to_string())?;
    if mapping.len() != bytes {
        return Err(format!("memory of {} bytes where {bytes} were announced", mapping.len()));
    }
    Ok(mapping)
}

/// The memory that one connection's peer has shown.
#[derive(Debug, Default)]
pub(super) struct Shown {
    list: Vec<(u32, Rc<PeerMapping>)>,
    bytes: u64,
}

impl Shown {
    /// Counts what the connection itself has mapped.
    pub(super) fn new(bytes: u64) -> Self {
        Self { list: Vec::new(), bytes }
    }

    /// Adds a region within the bounds of the configuration.
    pub(super) fn add(
        &mut self,
        memory: &mut PeerMemory,
        id: u32,
        fd: OwnedFd,
        bytes: u64,
        limit: u64,
    ) -> Result<(), String> {
        let total = self.bytes.saturating_add(bytes);
        if total > limit || self.list.len() >= 1024 {
            return Err(format!(
                "it shows {total} bytes in {} pieces; max_mapped_per_peer is {limit}",
                self.list.len() + 1
            ));
        }
        if self.get(id).is_some() {
            return Err(format!("region {id} is shown twice"));
        }
        self.list.push((id, memory.map(fd, bytes)?));
        self.bytes = total;
        Ok(())
    }

    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<&Rc<PeerMapping>> {
        self.list.iter().find(|(i, _)| *i == id).map(|(_, m)| m)
    }
}
