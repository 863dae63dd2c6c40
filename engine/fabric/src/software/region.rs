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

/// What a fabric keeps of a registered arena.
#[derive(Debug)]
pub(super) struct Region {
    bytes: u64,
    /// Its number at peers.
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

    /// Descriptor and size, to expose the memory to a peer.
    pub(super) fn exposable(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.descriptor.as_ref().map(|d| (d.as_fd(), self.bytes))
    }
}

/// Mappings per connection: its rings, and a window table of each side.
pub(super) const PER_CONNECTION: usize = 3;
/// Divisor of the remaining mappings for a connection's share.
const SHARE: usize = 8;
/// Bytes of a mapping that is unmapped on another thread. The kernel's time grows with the pages.
const LONG: usize = 64 << 20;

/// The share of the process's mappings for connections of the software fabric.
#[derive(Debug)]
pub(super) struct Budget {
    most: usize,
    used: AtomicUsize,
}

/// The budget of the process, shared by its fabrics: half of the mappings that the kernel permits.
pub(super) static PROCESS: LazyLock<Budget> = LazyLock::new(|| {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let limit = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(65530usize);
    Budget::new(limit / 2)
});

impl Budget {
    pub(super) const fn new(most: usize) -> Self {
        Self { most, used: AtomicUsize::new(0) }
    }

    /// Mappings that are left.
    pub(super) fn left(&self) -> usize {
        // It counts, and orders nothing.
        self.most.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Takes `count` places, until they are dropped.
    pub(super) fn take(&'static self, count: usize) -> Result<Places, String> {
        // Taken before the check, so that concurrent fabrics do not exceed the budget. An error returns them.
        let places = Places { budget: self, count };
        if self.used.fetch_add(count, Ordering::Relaxed) + count <= self.most {
            return Ok(places);
        }
        Err(format!(
            "{} memory mappings of connections are all that this process may have: raise vm.max_map_count (sysctl), \
             which is twice that",
            self.most
        ))
    }
}

/// Mappings that were taken out of a [`Budget`].
#[derive(Debug)]
pub(super) struct Places {
    budget: &'static Budget,
    count: usize,
}

impl Drop for Places {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Mapped memory of a peer, and its place: unmapped first, then free.
pub(super) type Mapping = (PeerMapping, Places);

/// Unmaps long mappings, so that no shard waits for it. When many wait, shards unmap themselves.
static UNMAPPER: Reaper<Mapping> = Reaper::new("rpcrdma-unmap", 8, 256);

/// All mapped memory of peers. Connections that expose the same memory share one mapping.
#[derive(Debug)]
pub(super) struct PeerMemory {
    by_inode: HashMap<(u64, u64), Weak<Mapping>>,
    pub(super) budget: &'static Budget,
}

impl PeerMemory {
    pub(super) fn new(budget: &'static Budget) -> Self {
        Self { by_inode: HashMap::new(), budget }
    }

    /// Maps a peer's memory of exactly `bytes`; checks that it cannot shrink.
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
        let place = self.budget.take(1)?;
        let max = usize::try_from(bytes).map_err(|_| format!("{bytes} bytes are more than can be mapped"))?;
        // Only our own user and root get this far: they could kill us in other ways than by taking hugetlb pages back.
        let mapping = PeerMapping::map_trusted(fd, max).map_err(|e| e.to_string())?;
        let mapping = Rc::new((mapping, place));
        self.by_inode.insert(key, Rc::downgrade(&mapping));
        Ok(mapping)
    }
}

/// Maps a connection's own memory of exactly `bytes`: sealed, in small pages.
pub(super) fn map(fd: OwnedFd, bytes: usize) -> Result<PeerMapping, String> {
    let mapping = PeerMapping::map(fd, bytes).map_err(|e| e.to_string())?;
    if mapping.len() != bytes {
        return Err(format!("memory of {} bytes instead of {bytes}", mapping.len()));
    }
    Ok(mapping)
}

/// Exposed memory of one connection's peer.
#[derive(Debug)]
pub(super) struct ExposedMemory {
    list: Vec<(u32, Rc<Mapping>)>,
    bytes: u64,
    /// The connection's own mappings.
    _places: Places,
}

impl ExposedMemory {
    /// Counts the connection's own mappings.
    pub(super) fn new(bytes: u64, places: Places) -> Self {
        Self { list: Vec::new(), bytes, _places: places }
    }

    /// Adds a region within the bounds of the configuration.
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
            return Err(format!("it exposes {total} bytes; max_mapped_per_peer is {}", config.max_mapped_per_peer));
        }
        // No connection takes the last ones, but for its first.
        let share = (memory.budget.left() / SHARE).max(1);
        if self.list.len() >= config.max_regions_per_peer.min(share) {
            return Err(format!(
                "it exposes {} regions; max_regions_per_peer is {}, its share of vm.max_map_count is {share}",
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
        // Those that no other connection uses.
        let unused = self.list.drain(..).filter_map(|(_, mapping)| Rc::into_inner(mapping));
        for mapping in unused.filter(|(memory, _)| memory.len() > LONG && !UNMAPPER.is_full()) {
            UNMAPPER.dispose(mapping);
        }
    }
}
