#![expect(unsafe_code, reason = "keeps the pointer to the pool's core")]
//! Pools: one core's buffers.

use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;

use crate::arena::Arena;
use crate::buf::Buf;
use crate::classes::{LINE, lay_out, stride};
use crate::config::{Class, PoolConfig};
use crate::core::{ClassList, Core, NO_OWNER, abandon};
use crate::current_thread;
use crate::error::{Leak, MemError};
use crate::stats::{Census, PoolStats};
use crate::sync::Ordering;

/// Buffers of a few sizes, for one thread.
///
/// The pool belongs to the thread that created it and cannot leave it. Its buffers can: drop them on any thread. A pool
/// may be dropped while buffers are in use; the last of them unmaps the memory. [`close`](Self::close) reports them.
pub struct Pool {
    /// A raw pointer also keeps the pool from being `Send` or `Sync`, which owner-only access relies on.
    core: NonNull<Core>,
    /// Requests that no class could ever hold.
    oversize: Cell<u64>,
}

impl Pool {
    /// A pool in its own arena. With `arena.bytes` 0 the arena has the size of the classes.
    pub fn new(config: &PoolConfig) -> Result<Self, MemError> {
        Self::in_arena(Arena::new(&config.own_arena()?)?, &config.classes)
    }

    /// A pool in a free range of an arena, which other pools may share. The range is free again once the pool and all
    /// its buffers have been dropped.
    pub fn in_arena(arena: Arena, classes: &[Class]) -> Result<Self, MemError> {
        Self::with_layout(arena, classes, stride, LINE)
    }

    /// A pool of pages in a free range of an arena. Its buffers have one size, no gaps, and each begins at a multiple
    /// of the size in the arena. So a buffer's page of the application's memory is known ([`Buf::base_offset`]), and
    /// pages of 4096 bytes suit O_DIRECT. For other uses [classes](Self::in_arena) are faster, because the first lines
    /// of pages share few sets of the cache.
    ///
    /// # Errors
    /// No such range exists; or the size is 0 or not a multiple of 64, or the count is 0.
    pub fn of_pages(arena: Arena, pages: Class) -> Result<Self, MemError> {
        if !pages.size.is_multiple_of(LINE) {
            let why = format!("invalid size classes: pages of {} bytes: expected a multiple of {LINE}", pages.size);
            return Err(MemError::invalid(why));
        }
        Self::with_layout(arena, &[pages], |size| size, pages.size)
    }

    /// A pool in a range of the arena at a multiple of `align`. `stride` is the distance of neighbouring buffers.
    fn with_layout(
        arena: Arena,
        classes: &[Class],
        stride: impl Fn(usize) -> usize,
        align: usize,
    ) -> Result<Self, MemError> {
        let (layouts, bytes) = lay_out(classes, stride)?;
        let offset = arena.alloc_range(bytes, align)?;
        Ok(Self { core: Core::new(arena, offset, &layouts), oversize: Cell::new(0) })
    }

    #[inline]
    fn core(&self) -> &Core {
        // SAFETY: the core outlives the pool, which ends it in `drop` only.
        unsafe { self.core.as_ref() }
    }

    /// The smallest class whose buffers hold `len` bytes.
    #[inline]
    fn first_class(&self, len: usize) -> Option<&ClassList> {
        self.core().classes.iter().find(|class| class.layout.size >= len)
    }

    /// The classes with buffers of `len` to `longest` bytes, the smallest first.
    #[inline]
    fn classes_within(&self, len: usize, longest: usize) -> impl Iterator<Item = &ClassList> {
        let fitting = self.core().classes.iter().filter(move |class| class.layout.size >= len);
        fitting.take_while(move |class| class.layout.size <= longest)
    }

    /// Takes a buffer of this class, unless it is too short or the class is empty.
    #[inline]
    fn alloc_from(class: &ClassList, len: usize) -> Option<Buf> {
        if len > class.layout.size {
            return None;
        }
        // SAFETY: the buffer came from the free list, so it has no other holder, and `len` is within its capacity.
        class.pop().map(|header| unsafe { Buf::new(header, len as u32) })
    }

    /// Allocates a buffer of `len` bytes from the smallest class available. The bytes are those of its last use. `None`
    /// when all fitting buffers are allocated.
    #[inline]
    pub fn alloc(&self, len: usize) -> Option<Buf> {
        self.alloc_within(len, usize::MAX)
    }

    /// Allocates `len` bytes from classes of at most `longest` bytes.
    #[inline]
    pub fn alloc_within(&self, len: usize, longest: usize) -> Option<Buf> {
        for class in self.classes_within(len, longest) {
            if let Some(buf) = Self::alloc_from(class, len) {
                return Some(buf);
            }
        }
        self.count_oversize(len);
        None
    }

    /// Counts a request that failed, if no class could ever hold it.
    #[cold]
    fn count_oversize(&self, len: usize) {
        self.oversize.set(self.oversize.get() + u64::from(self.first_class(len).is_none()));
    }

    /// Allocates buffers as [`alloc`](Self::alloc) does, until none is left, but looks up the class once.
    #[inline]
    pub fn alloc_many(&self, len: usize) -> impl Iterator<Item = Buf> + '_ {
        let classes = self.classes_within(len, usize::MAX);
        classes.flat_map(move |class| std::iter::from_fn(move || Self::alloc_from(class, len)))
    }

    /// Allocates from the smallest fitting class, if `enough` accepts the numbers of [`first_room`](Self::first_room).
    #[inline]
    pub fn alloc_if(&self, len: usize, enough: impl FnOnce(usize, usize) -> bool) -> Option<Buf> {
        let class = self.first_class(len).filter(|class| class.free() > 0 && enough(class.free(), class.fitting))?;
        Self::alloc_from(class, len)
    }

    /// Gives the pool up, before it moves to another thread that [adopts](Self::adopt) it.
    ///
    /// From now on buffers return as if from other threads, even on this thread. Only unsafe code can move a pool.
    #[doc(hidden)]
    pub fn disown(&self) {
        self.core().set_owner(NO_OWNER);
    }

    /// Makes this thread the owner of a pool that was [given up](Self::disown).
    #[doc(hidden)]
    pub fn adopt(&self) {
        self.core().set_owner(current_thread());
    }

    /// The memory that the buffers lie in.
    #[inline]
    pub fn arena(&self) -> &Arena {
        &self.core().arena
    }

    /// Whether other threads have returned buffers. One relaxed load.
    #[inline]
    pub fn has_remote(&self) -> bool {
        self.core().remote_free.has_any()
    }

    /// Moves the buffers that other threads dropped to the free lists, and returns their number. Called once per turn;
    /// it costs one relaxed load when there are none.
    #[inline]
    pub fn drain_remote(&self) -> usize {
        self.core().drain()
    }

    /// Counters. Buffers that other threads dropped count as outstanding until
    /// [`drain_remote`](Self::drain_remote).
    pub fn stats(&self) -> PoolStats {
        let classes = self.core().classes.iter().map(ClassList::stats).collect();
        let leaked = self.core().leaked.load(Ordering::Relaxed);
        PoolStats { classes, leaked, oversize: self.oversize.get() }
    }

    /// Free and total buffers that hold `len` bytes. Buffers dropped by other threads count as in
    /// [`stats`](Self::stats).
    #[inline]
    pub fn room(&self, len: usize) -> (usize, usize) {
        self.room_within(len, usize::MAX)
    }

    /// Free and total buffers of `len` to `longest` bytes.
    #[inline]
    pub fn room_within(&self, len: usize, longest: usize) -> (usize, usize) {
        self.classes_within(len, longest)
            .fold((0, 0), |(free, count), class| (free + class.free(), count + class.layout.count))
    }

    /// Free buffers of the smallest fitting class, and the total of [`room`](Self::room).
    ///
    /// [`alloc`](Self::alloc) takes from this class first. Faster than [`room`](Self::room).
    #[inline]
    pub fn first_room(&self, len: usize) -> (usize, usize) {
        self.first_class(len).map_or((0, 0), |class| (class.free(), class.fitting))
    }

    /// Resets the low-water marks to the current levels.
    pub fn reset_low_water(&self) {
        self.core().classes.iter().for_each(ClassList::reset_low_water);
    }

    /// Counts buffers by holder, after taking in those dropped by other threads. Walks all buffers.
    pub fn census(&self) -> Census {
        self.drain_remote();
        Census { classes: self.core().classes.iter().map(|class| self.core().census(class)).collect() }
    }

    /// Buffers of `len` to `longest` bytes in active use. Each is a [`Buf`] or a [`Lent`](crate::Lent).
    /// [`Frozen`](crate::Frozen) ones do not count, because their readers may keep them. Walks all of these buffers.
    pub fn busy_within(&self, len: usize, longest: usize) -> usize {
        let censuses = self.classes_within(len, longest).map(|class| self.core().census(class));
        censuses.map(|census| census.held + census.lent).sum()
    }

    /// The sizes of the classes, the smallest first.
    #[inline]
    pub fn sizes(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.core().classes.iter().map(|class| class.layout.size)
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
        // SAFETY: called once, by the pool, which cannot be on another thread than its owner's.
        unsafe { abandon(self.core) };
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("arena", self.arena()).field("stats", &self.stats()).finish()
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
