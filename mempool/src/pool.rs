#![expect(unsafe_code, reason = "keeps the pointer to the pool's core")]
//! Pools: one core's buffers.

use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;

use crate::arena::Arena;
use crate::buf::Buf;
use crate::classes::{LINE, lay_out, lay_out_pages};
use crate::config::{Class, PoolConfig};
use crate::core::{ClassList, Core, NOBODY, abandon, state};
use crate::current_thread;
use crate::error::{Leak, MemError};
use crate::sync::Ordering;

/// Buffers of a few sizes, for one thread.
///
/// The pool belongs to the thread that created it and cannot leave it. Its buffers can: drop them on any thread. A pool
/// may be dropped while buffers are in use; the last of them unmaps the memory. [`close`](Self::close) reports them.
pub struct Pool {
    /// A raw pointer also keeps the pool from being `Send` or `Sync`. All of its owner-only access rests on that.
    core: NonNull<Core>,
    /// Requests that no class could ever hold.
    oversize: Cell<u64>,
}

impl Pool {
    /// A pool in its own arena. With `arena.bytes` 0 the arena has the size of the classes.
    pub fn new(config: &PoolConfig) -> Result<Self, MemError> {
        Self::in_arena(Arena::new(&config.own_arena()?)?, &config.classes)
    }

    /// A pool in a free range of an arena, beside others. The range is free again after the pool and all its buffers.
    pub fn in_arena(arena: Arena, classes: &[Class]) -> Result<Self, MemError> {
        let (placed, bytes) = lay_out(classes)?;
        let offset = arena.take(bytes, LINE)?;
        Ok(Self { core: Core::new(arena, offset, &placed), oversize: Cell::new(0) })
    }

    /// A pool of pages in a free range of an arena. Its buffers have one size and no gaps, each at a multiple of the
    /// size in the arena. So a buffer's page of the application's memory is known ([`Buf::base_offset`]), and pages of
    /// 4096 bytes suit O_DIRECT. Their first lines share the sets of the cache. Without need of such places,
    /// [classes](Self::in_arena) are faster.
    ///
    /// # Errors
    /// No such range exists; or the size is 0 or not a multiple of 64, or the count is 0.
    pub fn of_pages(arena: Arena, pages: Class) -> Result<Self, MemError> {
        let (placed, bytes) = lay_out_pages(pages)?;
        let offset = arena.take(bytes, pages.size)?;
        Ok(Self { core: Core::new(arena, offset, &placed), oversize: Cell::new(0) })
    }

    #[inline]
    fn core(&self) -> &Core {
        // SAFETY: the core outlives the pool, which ends it in `drop` only.
        unsafe { self.core.as_ref() }
    }

    /// Allocates a buffer of `len` bytes from the smallest class available. The bytes are those of its last use. `None`
    /// when all are out.
    #[inline]
    pub fn alloc(&self, len: usize) -> Option<Buf> {
        for list in self.core().classes() {
            if len <= list.size()
                && let Some(meta) = list.pop()
            {
                // SAFETY: the buffer came from the free list, so it has no other holder, and `len` is within its
                // capacity.
                return Some(unsafe { Buf::new(meta, len as u32) });
            }
        }
        self.refuse(len);
        None
    }

    /// The same from classes of at most `longest` bytes. Longer ones are spared.
    #[inline]
    pub fn alloc_within(&self, len: usize, longest: usize) -> Option<Buf> {
        let list = self.core().classes().iter().find(|list| list.size() >= len);
        match list.filter(|list| list.free() > 0 && list.size() <= longest).and_then(|list| list.pop()) {
            // SAFETY: as in `alloc`.
            Some(meta) => Some(unsafe { Buf::new(meta, len as u32) }),
            None => self.alloc_larger(len, longest),
        }
    }

    #[cold]
    fn alloc_larger(&self, len: usize, longest: usize) -> Option<Buf> {
        let mut classes = self.core().classes().iter().filter(|list| (len..=longest).contains(&list.size()));
        // SAFETY: as in `alloc`.
        let buf = classes.find_map(|list| list.pop()).map(|meta| unsafe { Buf::new(meta, len as u32) });
        if buf.is_none() {
            self.refuse(len);
        }
        buf
    }

    /// Allocates buffers, as [`alloc`](Self::alloc), until none is left. It looks up the class once.
    #[inline]
    pub fn alloc_many(&self, len: usize) -> impl Iterator<Item = Buf> + '_ {
        let mut classes = self.core().classes().iter().skip_while(move |list| list.size() < len);
        let mut class = classes.next();
        std::iter::from_fn(move || {
            loop {
                if let Some(meta) = class?.pop() {
                    // SAFETY: as in `alloc`; classes come by size, and smaller ones were skipped.
                    return Some(unsafe { Buf::new(meta, len as u32) });
                }
                class = classes.next();
            }
        })
    }

    /// As [`alloc`](Self::alloc), from the smallest fitting class, if `enough` accepts
    /// [`first_room`](Self::first_room)'s count.
    #[inline]
    pub fn alloc_if(&self, len: usize, enough: impl FnOnce(usize, usize) -> bool) -> Option<Buf> {
        let list = self.core().classes().iter().find(|list| list.size() >= len)?;
        if list.free() == 0 || !enough(list.free(), list.fitting()) {
            return None;
        }
        // SAFETY: as in `alloc`.
        list.pop().map(|meta| unsafe { Buf::new(meta, len as u32) })
    }

    #[cold]
    fn refuse(&self, len: usize) {
        if self.core().classes().last().is_none_or(|largest| len > largest.size()) {
            self.oversize.set(self.oversize.get() + 1);
        }
    }

    /// Gives the pool up, before it moves to another thread that [adopts](Self::adopt) it.
    ///
    /// From now on buffers return as from other threads, also on this one. For code that moves the pool, which safe
    /// code cannot.
    #[doc(hidden)]
    pub fn disown(&self) {
        self.core().set_owner(NOBODY);
    }

    /// Makes this thread the owner of a pool that was [given up](Self::disown).
    #[doc(hidden)]
    pub fn adopt(&self) {
        self.core().set_owner(current_thread());
    }

    /// The memory that the buffers lie in.
    #[inline]
    pub fn arena(&self) -> &Arena {
        self.core().arena()
    }

    /// Whether other threads have returned buffers. One relaxed load.
    #[inline]
    pub fn has_remote(&self) -> bool {
        self.core().has_remote()
    }

    /// Takes in the buffers that other threads dropped; returns how many. Once per turn; one relaxed load
    /// when there are none.
    #[inline]
    pub fn drain_remote(&self) -> usize {
        self.core().drain()
    }

    /// Counters. Buffers that other threads dropped count as outstanding until
    /// [`drain_remote`](Self::drain_remote).
    pub fn stats(&self) -> PoolStats {
        let classes = self.core().classes().iter().map(|list| ClassStats {
            size: list.size(),
            count: list.count(),
            free: list.free(),
            outstanding: list.count() - list.free(),
            low_water: list.low_water(),
            failures: list.failures(),
        });
        PoolStats { classes: classes.collect(), leaked: self.core().leaked(), oversize: self.oversize.get() }
    }

    /// Free and total buffers that hold `len` bytes. Buffers dropped by other threads count as in
    /// [`stats`](Self::stats).
    #[inline]
    pub fn room(&self, len: usize) -> (usize, usize) {
        self.room_within(len, usize::MAX)
    }

    /// The same of classes of at most `longest` bytes.
    #[inline]
    pub fn room_within(&self, len: usize, longest: usize) -> (usize, usize) {
        let fitting = self.core().classes().iter().filter(|list| (len..=longest).contains(&list.size()));
        fitting.fold((0, 0), |(free, count), list| (free + list.free(), count + list.count()))
    }

    /// The same for the smallest fitting class only. [`alloc`](Self::alloc) takes from it first. This is fast.
    #[inline]
    pub fn first_room(&self, len: usize) -> (usize, usize) {
        let first = self.core().classes().iter().find(|list| list.size() >= len);
        first.map_or((0, 0), |list| (list.free(), list.fitting()))
    }

    /// Starts the low-water marks anew.
    pub fn reset_low_water(&self) {
        self.core().classes().iter().for_each(|list| list.reset_low_water());
    }

    /// Counts buffers by holder, after taking in those dropped by other threads. Walks all buffers.
    pub fn census(&self) -> Census {
        self.drain_remote();
        Census { classes: self.core().classes().iter().map(|list| self.census_of(list)).collect() }
    }

    fn census_of(&self, list: &ClassList) -> ClassCensus {
        let mut census =
            ClassCensus { size: list.size(), count: list.count(), free: list.free(), ..Default::default() };
        let mut plain = 0;
        for meta in self.core().metas_of(list) {
            // Relaxed: buffers on other threads may change hands while we count.
            match meta.state.load(Ordering::Relaxed) & !state::COUNT {
                state::FROZEN => census.frozen += 1,
                state::LENT => census.lent += 1,
                state::POSTED => census.posted += 1,
                state::LEAKED => census.leaked += 1,
                _ => plain += 1,
            }
        }
        census.held = plain - census.free;
        census
    }

    /// Buffers of `len` to `longest` bytes in active use. Each is a [`Buf`] or a [`Lent`](crate::Lent).
    /// [`Frozen`](crate::Frozen) ones do not count: their readers may keep them. Walks them all.
    pub fn busy_within(&self, len: usize, longest: usize) -> usize {
        let fitting = self.core().classes().iter().filter(|list| (len..=longest).contains(&list.size()));
        fitting.map(|list| self.census_of(list)).map(|census| census.held + census.lent).sum()
    }

    /// The sizes of the classes, the smallest first.
    #[inline]
    pub fn sizes(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.core().classes().iter().map(|list| list.size())
    }

    /// Ends the pool; an error lists outstanding buffers. They stay valid until dropped.
    pub fn close(self) -> Result<(), Leak> {
        let mut classes = self.census().classes;
        classes.retain(|class| class.outstanding() > 0);
        if classes.is_empty() { Ok(()) } else { Err(Leak { classes }) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: once, by the pool, which cannot be on another thread than its owner's.
        unsafe { abandon(self.core) };
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("arena", self.arena()).field("stats", &self.stats()).finish()
    }
}

/// Counters of a pool; see [`Pool::stats`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct PoolStats {
    /// Smallest size first.
    #[cfg_attr(feature = "serde", serde(rename = "pool"))]
    pub classes: Vec<ClassStats>,
    /// Buffers lost because a [`Posted`](crate::Posted) was dropped.
    #[cfg_attr(feature = "serde", serde(rename = "buffers_leaked"))]
    pub leaked: u64,
    /// Requests longer than the largest class.
    #[cfg_attr(feature = "serde", serde(rename = "pool_oversize"))]
    pub oversize: u64,
}

/// Counters of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct ClassStats {
    /// Capacity of its buffers, in bytes.
    pub size: usize,
    /// Number of buffers.
    #[cfg_attr(feature = "serde", serde(rename = "buffers"))]
    pub count: usize,
    /// On the free list.
    #[cfg_attr(feature = "serde", serde(rename = "buffers_free"))]
    pub free: usize,
    /// Not on it.
    #[cfg_attr(feature = "serde", serde(rename = "buffers_used"))]
    pub outstanding: usize,
    /// Fewest free since the start or the last [`Pool::reset_low_water`].
    #[cfg_attr(feature = "serde", serde(rename = "buffers_lowest"))]
    pub low_water: usize,
    /// Fitting requests that found the class empty. They took a larger class, or failed.
    #[cfg_attr(feature = "serde", serde(rename = "misses"))]
    pub failures: u64,
}

/// Holders of a pool's buffers; see [`Pool::census`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// Smallest size first.
    pub classes: Vec<ClassCensus>,
}

/// Holders of the buffers of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCensus {
    /// Capacity of its buffers, in bytes.
    pub size: usize,
    /// Buffers there are; the sum of all below.
    pub count: usize,
    /// On the free list.
    pub free: usize,
    /// In a [`Buf`].
    pub held: usize,
    /// In a [`Frozen`](crate::Frozen) and its clones.
    pub frozen: usize,
    /// In a [`Lent`](crate::Lent) and its clones.
    pub lent: usize,
    /// In a [`Posted`](crate::Posted).
    pub posted: usize,
    /// In a [`Posted`](crate::Posted) that was dropped.
    pub leaked: usize,
}

impl ClassCensus {
    /// Not on the free list.
    pub fn outstanding(&self) -> usize {
        self.count - self.free
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
