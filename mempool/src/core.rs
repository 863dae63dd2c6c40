#![expect(unsafe_code, reason = "shared bookkeeping of a pool, freed by whoever brings home the last buffer")]
//! Shared state of a pool and its buffers. It has free lists, buffer states and returns.
//!
//! A [`Core`] lives on the heap behind plain pointers: in the [`Pool`](crate::Pool) and in every buffer that is out. It
//! is not counted per allocation. While the pool lives, the core lives. A dropped pool leaves the number of outstanding
//! buffers in [`Home`], and the last of them frees the core.

use std::cell::{Cell, OnceCell};
use std::ptr::NonNull;

use crate::arena::{Arena, ArenaId};
use crate::classes::Placed;
use crate::current_thread;
use crate::home::{Home, Returned};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// No thread has this number: it marks a pool without an owner.
pub(crate) const NOBODY: u64 = u64::MAX;

/// The holder of a buffer (high bits) and its clones (low bits). Allocation and return do not touch the word: 0 is a
/// free buffer as well as a held one.
pub(crate) mod state {
    /// Bits of the clone count.
    pub(crate) const COUNT: u32 = (1 << 29) - 1;
    /// On a free list, on the way home, or a `Buf`.
    pub(crate) const HELD: u32 = 0;
    /// `Frozen`.
    pub(crate) const FROZEN: u32 = 1 << 29;
    /// `Lent`.
    pub(crate) const LENT: u32 = 2 << 29;
    /// `Posted`.
    pub(crate) const POSTED: u32 = 3 << 29;
    /// A `Posted` that was dropped: the device may write to it at any time.
    pub(crate) const LEAKED: u32 = 4 << 29;
    /// Bookkeeping of a `Frozen` with an owner, beside that of its buffer.
    pub(crate) const OWNED: u32 = 5 << 29;
}

/// Bookkeeping of one buffer, on its own cache line. It is out of reach of peers that see the data.
#[repr(align(64))]
pub(crate) struct Meta {
    core: NonNull<Core>,
    /// The class that the buffer belongs to, in `core`.
    list: NonNull<ClassList>,
    /// First byte.
    pub(crate) data: NonNull<u8>,
    /// Offset of the first byte in the arena.
    pub(crate) offset: usize,
    /// Bytes.
    pub(crate) capacity: u32,
    pub(crate) arena: ArenaId,
    /// Among all buffers of the pool.
    index: u32,
    /// See [`state`].
    pub(crate) state: AtomicU32,
}

impl Meta {
    #[inline]
    fn core(&self) -> &Core {
        // SAFETY: the core owns this, so it lives as long.
        unsafe { self.core.as_ref() }
    }

    #[inline]
    fn list(&self) -> &ClassList {
        // SAFETY: the core owns both.
        unsafe { self.list.as_ref() }
    }

    /// Its pool's core, and its index there.
    fn place(&self) -> (NonNull<Core>, u32) {
        (self.core, self.index)
    }

    /// True on the thread that owns the living pool, and nowhere else.
    #[inline]
    pub(crate) fn is_mine(&self) -> bool {
        // Relaxed: a thread sees its own stores, and no other thread's number is its own.
        self.core().owner.load(Ordering::Relaxed) == current_thread()
    }

    /// The same place with a count of its own, of one.
    pub(crate) fn owned(&self) -> Self {
        Self { state: AtomicU32::new(state::OWNED | 1), ..*self }
    }

    /// Counts a buffer that the device may never return.
    #[cold]
    pub(crate) fn leak(&self) {
        self.state.store(state::LEAKED, Ordering::Relaxed);
        self.core().leaked.fetch_add(1, Ordering::Relaxed);
    }
}

/// One size class, with its free list. The list belongs to the owner thread.
pub(crate) struct ClassList {
    placed: Placed,
    /// Buffers of this class and of all larger ones.
    fitting: usize,
    /// `stack[..free]`: free buffers. The last one freed is allocated first, cache-warm.
    stack: Box<[Cell<Option<NonNull<Meta>>>]>,
    free: Cell<usize>,
    low_water: Cell<usize>,
    failures: Cell<u64>,
}

impl ClassList {
    /// With room for all its buffers, and none of them. `larger`: buffers of larger classes.
    fn new(placed: &Placed, larger: usize) -> Self {
        Self {
            placed: *placed,
            fitting: placed.count + larger,
            stack: (0..placed.count).map(|_| Cell::new(None)).collect(),
            free: Cell::new(0),
            low_water: Cell::new(placed.count),
            failures: Cell::new(0),
        }
    }

    /// Capacity of the buffers.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.placed.size
    }

    /// Number of buffers.
    pub(crate) fn count(&self) -> usize {
        self.placed.count
    }

    /// Buffers of this size or more.
    #[inline]
    pub(crate) fn fitting(&self) -> usize {
        self.fitting
    }

    /// Takes a free buffer. Owner thread only.
    #[inline]
    pub(crate) fn pop(&self) -> Option<NonNull<Meta>> {
        let Some(free) = self.free.get().checked_sub(1) else {
            self.failures.set(self.failures.get() + 1);
            return None;
        };
        self.free.set(free);
        if free < self.low_water.get() {
            self.low_water.set(free);
        }
        self.stack[free].get()
    }

    /// Puts a buffer of this class back. Owner thread only.
    #[inline]
    fn push(&self, meta: NonNull<Meta>) {
        let free = self.free.get();
        self.stack[free].set(Some(meta));
        self.free.set(free + 1);
    }

    /// Buffers on the free list. Owner thread only.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.free.get()
    }

    /// Fewest free since the last reset. Owner thread only.
    pub(crate) fn low_water(&self) -> usize {
        self.low_water.get()
    }

    /// Starts the low-water mark anew. Owner thread only.
    pub(crate) fn reset_low_water(&self) {
        self.low_water.set(self.free.get());
    }

    /// Times that the class was wanted and empty. Owner thread only.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.get()
    }
}

/// See the module page.
pub(crate) struct Core {
    /// The owner's number; [`NOBODY`] once the pool was dropped, and while it moves to another thread. Only the owner
    /// finds its own number here, or after its end, and that of a pool that was leaked, a thread that has the number
    /// now.
    owner: AtomicU64,
    arena: Arena,
    /// Offset of the pool's range in the arena.
    offset: usize,
    /// Smallest size first.
    classes: Box<[ClassList]>,
    /// The buffers, class by class. Filled once the core has its place, which they point to.
    metas: OnceCell<Box<[Meta]>>,
    leaked: AtomicU64,
    home: Home,
}

impl Core {
    /// Owned by this thread, all buffers free. `offset`: a range of the arena that is this pool's.
    pub(crate) fn new(arena: Arena, offset: usize, placed: &[Placed]) -> NonNull<Self> {
        let count = placed.iter().map(|class| class.count).sum();
        let larger = |class: &Placed| count - class.first as usize - class.count;
        let core = NonNull::from(Box::leak(Box::new(Self {
            owner: AtomicU64::new(current_thread()),
            arena,
            offset,
            classes: placed.iter().map(|class| ClassList::new(class, larger(class))).collect(),
            metas: OnceCell::new(),
            leaked: AtomicU64::new(0),
            home: Home::new(count),
        })));
        // SAFETY: leaked just now.
        let this = unsafe { core.as_ref() };
        let metas = this.metas.get_or_init(|| this.classes.iter().flat_map(|list| this.buffers(core, list)).collect());
        // In reverse, so that the first buffer is allocated first.
        metas.iter().rev().for_each(|meta| meta.list().push(NonNull::from(meta)));
        core
    }

    /// The buffers of one class.
    fn buffers(&self, core: NonNull<Self>, list: &ClassList) -> impl Iterator<Item = Meta> {
        let Placed { size, count, stride, offset, first } = list.placed;
        (0..count).map(move |i| {
            let offset = self.offset + offset + i * stride;
            // SAFETY: the caller of `new` took the range from the arena for exactly these classes.
            let data = unsafe { self.arena.base().add(offset) };
            Meta {
                core,
                list: NonNull::from(list),
                data,
                offset,
                capacity: size as u32,
                arena: self.arena.id(),
                index: first + i as u32,
                state: AtomicU32::new(state::HELD),
            }
        })
    }

    /// Sets the owner: this thread, or nobody. Only the thread that has the pool calls it.
    pub(crate) fn set_owner(&self, owner: u64) {
        // Relaxed: a thread that gave the pool up sees its own store, and any later owner got the pool from it.
        self.owner.store(owner, Ordering::Relaxed);
    }

    fn metas(&self) -> &[Meta] {
        self.metas.get().map_or(&[], |metas| metas)
    }

    #[inline]
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The size classes. Their free lists may only be touched on the owner thread.
    #[inline]
    pub(crate) fn classes(&self) -> &[ClassList] {
        &self.classes
    }

    /// The metadata of one class's buffers.
    pub(crate) fn metas_of(&self, list: &ClassList) -> &[Meta] {
        let first = list.placed.first as usize;
        &self.metas()[first..first + list.placed.count]
    }

    /// Other threads have returned something. Owner thread only.
    #[inline]
    pub(crate) fn has_remote(&self) -> bool {
        self.home.has_any()
    }

    /// Takes in buffers that other threads returned. Owner thread only.
    #[inline]
    pub(crate) fn drain(&self) -> usize {
        self.home.take(|index| {
            let meta = &self.metas()[index as usize];
            meta.list().push(NonNull::from(meta));
        })
    }

    /// Buffers leaked so far.
    pub(crate) fn leaked(&self) -> u64 {
        self.leaked.load(Ordering::Relaxed)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.arena.give_back(self.offset);
    }
}

/// Returns a buffer, from any thread.
///
/// # Safety
/// `meta` is that of a buffer that is out, and that the caller gives up with this call.
#[inline]
pub(crate) unsafe fn release(meta: NonNull<Meta>) {
    // SAFETY: the buffer is out, so the core, which owns this, lives until it is returned, below.
    let this = unsafe { meta.as_ref() };
    if this.is_mine() {
        this.list().push(meta);
    } else {
        // SAFETY: as for this function.
        unsafe { release_remote(meta) };
    }
}

/// The way of other threads, and of buffers that outlive their pool.
///
/// # Safety
/// As for [`release`].
#[cold]
#[inline(never)]
unsafe fn release_remote(meta: NonNull<Meta>) {
    // SAFETY: the buffer is out, so the core, which owns this, lives until the push.
    let (core, index) = unsafe { meta.as_ref() }.place();
    // SAFETY: as above.
    let returned = unsafe { core.as_ref() }.home.push(index);
    if returned == Returned::Last {
        // SAFETY: the pool was dropped and this was the last buffer (`Home`), so no other pointer to it exists.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
    }
}

/// Ends the pool's own use of the core. The last buffer out, or this call, frees it.
///
/// # Safety
/// Called once, by the pool, on the owner thread, as the last thing that it does with `core`.
pub(crate) unsafe fn abandon(core: NonNull<Core>) {
    // SAFETY: the pool still exists.
    let this = unsafe { core.as_ref() };
    let out = this.classes.iter().map(|class| class.count() - class.free()).sum();
    // Relaxed: from now on no thread finds its own number; other threads never did.
    this.owner.store(NOBODY, Ordering::Relaxed);
    if this.home.close(out) {
        // SAFETY: no buffer is out, and the pool gives its pointer up.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
    }
}
