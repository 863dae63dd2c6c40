//! Registered memory: our own, and that exposed by peers.

use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rpcrdma_mempool::{Arena, PeerMapping};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use super::config::SoftwareConfig;
use crate::error::failed;
use crate::reaper::Reaper;
use crate::registrations::Registrations;
use crate::{Access, FabricError};

/// The fabric's record of a registered arena.
#[derive(Debug)]
pub(super) struct Region {
    bytes: u64,
    /// The number by which peers know the region.
    pub(super) id: u32,
    /// Present for memory that may be exposed to peers.
    descriptor: Option<OwnedFd>,
}

/// A fabric's registrations.
pub(super) type Regions = Registrations<Region>;

impl Region {
    pub(super) fn new(arena: &Arena, access: Access, id: u32) -> Result<Self, FabricError> {
        let mut descriptor = None;
        if access != Access::LOCAL {
            let fd = arena.fd().ok_or_else(|| FabricError::not_exposable(arena.id()))?.try_clone_to_owned();
            descriptor = Some(fd.map_err(|e| failed("dup of an arena's descriptor", e))?);
        }
        Ok(Self { bytes: arena.len() as u64, id, descriptor })
    }

    /// Descriptor and size of memory that may be exposed to a peer.
    pub(super) fn exposable(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.descriptor.as_ref().map(|d| (d.as_fd(), self.bytes))
    }
}

/// Mappings per connection: its rings, and the window table of each side.
pub(super) const MAPPINGS_PER_CONNECTION: usize = 3;
/// A connection may have at most one in this many of the remaining mappings.
const SHARE: usize = 8;
/// Mappings of more bytes are unmapped on another thread, because this takes longer the more pages there are.
const LONG: usize = 64 << 20;

/// The mappings that connections of the software fabric may have in this process.
#[derive(Debug)]
pub(super) struct MappingBudget {
    limit: usize,
    used: AtomicUsize,
}

/// The budget of the process, shared by its fabrics: half of the mappings that the kernel permits.
pub(super) static PROCESS_BUDGET: LazyLock<MappingBudget> = LazyLock::new(|| {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let limit = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(65530usize);
    MappingBudget::new(limit / 2)
});

impl MappingBudget {
    pub(super) const fn new(limit: usize) -> Self {
        Self { limit, used: AtomicUsize::new(0) }
    }

    /// Mappings that are not reserved.
    pub(super) fn remaining(&self) -> usize {
        // Relaxed: the counter orders no other accesses.
        self.limit.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Reserves `count` mappings until the result is dropped.
    pub(super) fn reserve(&'static self, count: usize) -> Result<MappingReservation, String> {
        // Counted before the check, so that concurrent fabrics do not exceed the budget. After an error, the drop of
        // the reservation subtracts `count` again.
        let reservation = MappingReservation { budget: self, count };
        if self.used.fetch_add(count, Ordering::Relaxed) + count <= self.limit {
            return Ok(reservation);
        }
        Err(format!(
            "this process has reached its limit of {} mappings for connections, half of vm.max_map_count: raise that \
             sysctl",
            self.limit
        ))
    }
}

/// Mappings that are reserved from a [`MappingBudget`].
#[derive(Debug)]
pub(super) struct MappingReservation {
    budget: &'static MappingBudget,
    count: usize,
}

impl Drop for MappingReservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Mapped memory of a peer, and its reservation, which is returned after the memory is unmapped.
pub(super) type Mapping = (PeerMapping, MappingReservation);

/// Unmaps long mappings, so that shards need not wait. When many mappings wait, shards unmap themselves.
static UNMAPPER: Reaper<Mapping> = Reaper::new("rpcrdma-unmap", 8, 256);

/// All mapped memory of peers. Connections that expose the same memory share one mapping.
#[derive(Debug)]
pub(super) struct PeerMemory {
    by_inode: HashMap<(u64, u64), Weak<Mapping>>,
    pub(super) budget: &'static MappingBudget,
}

impl PeerMemory {
    pub(super) fn new(budget: &'static MappingBudget) -> Self {
        Self { by_inode: HashMap::new(), budget }
    }

    /// Maps a peer's memory of exactly `bytes` bytes, which must be sealed against shrinking.
    pub(super) fn map(&mut self, fd: OwnedFd, bytes: u64) -> Result<Rc<Mapping>, String> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| format!("fstat: {e}"))?;
        if stat.st_size as u64 != bytes {
            return Err(format!("memory of {} bytes was announced as {bytes}", stat.st_size));
        }
        let key = (stat.st_dev, stat.st_ino);
        if let Some(mapping) = self.by_inode.get(&key).and_then(Weak::upgrade) {
            return Ok(mapping);
        }
        self.by_inode.retain(|_, mapping| mapping.strong_count() > 0);
        let reservation = self.budget.reserve(1)?;
        let len = usize::try_from(bytes).map_err(|_| format!("{bytes} bytes exceed the address space"))?;
        // Hugetlb pages, which their owner can remove during use, are accepted: peers run as our own user or as root,
        // and could kill this process anyway.
        let mapping = PeerMapping::map_trusted(fd, len).map_err(|e| e.to_string())?;
        let mapping = Rc::new((mapping, reservation));
        self.by_inode.insert(key, Rc::downgrade(&mapping));
        Ok(mapping)
    }
}

/// Maps a connection's own memory of exactly `bytes` bytes, which must be sealed and in small pages.
pub(super) fn map(fd: OwnedFd, bytes: usize) -> Result<PeerMapping, String> {
    let mapping = PeerMapping::map(fd, bytes).map_err(|e| e.to_string())?;
    if mapping.len() != bytes {
        return Err(format!("memory of {} bytes: expected {bytes}", mapping.len()));
    }
    Ok(mapping)
}

/// Exposed memory of one connection's peer.
#[derive(Debug)]
pub(super) struct ExposedMemory {
    list: Vec<(u32, Rc<Mapping>)>,
    bytes: u64,
    /// The connection's own mappings.
    _mappings: MappingReservation,
}

impl ExposedMemory {
    /// No exposed memory yet. `bytes` and `mappings` are those of the connection itself.
    pub(super) fn new(bytes: u64, mappings: MappingReservation) -> Self {
        Self { list: Vec::new(), bytes, _mappings: mappings }
    }

    /// Adds a region within the limits of the configuration.
    pub(super) fn add(
        &mut self,
        memory: &mut PeerMemory,
        id: u32,
        fd: OwnedFd,
        bytes: u64,
        config: &SoftwareConfig,
    ) -> Result<(), String> {
        let total = self.bytes.saturating_add(bytes);
        if total > config.max_mapped_per_peer {
            return Err(format!("{total} mapped bytes exceed {} (max_mapped_per_peer)", config.max_mapped_per_peer));
        }
        // However few mappings remain, the share permits a connection's first region.
        let share = (memory.budget.remaining() / SHARE).max(1);
        if self.list.len() >= config.max_regions_per_peer.min(share) {
            return Err(format!(
                "{} exposed regions exceed the limit: max_regions_per_peer is {}, the share of vm.max_map_count is \
                 {share}",
                self.list.len() + 1,
                config.max_regions_per_peer
            ));
        }
        if self.get(id).is_some() {
            return Err(format!("region {id} is exposed twice"));
        }
        self.list.push((id, memory.map(fd, bytes)?));
        self.bytes = total;
        Ok(())
    }

    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<&PeerMapping> {
        self.list.iter().find(|(known, _)| *known == id).map(|(_, mapping)| &mapping.0)
    }
}

impl Drop for ExposedMemory {
    fn drop(&mut self) {
        // Mappings that no other connection uses.
        let unused = self.list.drain(..).filter_map(|(_, mapping)| Rc::into_inner(mapping));
        for mapping in unused.filter(|(memory, _)| memory.len() > LONG && !UNMAPPER.is_full()) {
            UNMAPPER.dispose(mapping);
        }
    }
}
