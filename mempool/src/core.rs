#![expect(unsafe_code, reason = "shared bookkeeping of a pool, freed by whoever brings home the last buffer")]
//! What a pool and its buffers share: free lists, buffer states, the way home.
//!
//! A [`Core`] lives on the heap behind plain pointers: in the [`Pool`](crate::Pool) and in every buffer that is out. It is not counted
//! per allocation. While the pool lives, the core lives; when the pool goes, it leaves the number of buffers
//! that are out behind in [`Home`], and the last of them frees the core.

use std::cell::Cell;
use std::ptr::NonNull;

use crate::arena::Arena;
use crate::classes::{Placed, Slot};
use crate::home::{Home, Returned};
use crate::owner;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Who has a buffer, in the high bits of its state word, and how many clones there are, in the low ones. Allocation and
/// return do not touch the word: 0 is a free buffer as well as a held one.
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
    /// A `Posted` that was dropped: the device may write to it for ever.
    pub(crate) const LEAKED: u32 = 4 << 29;
}

/// One size class, with its free list. The list belongs to the owner thread.
pub(crate) struct ClassList {
    placed: Placed,
    /// First byte of the first buffer.
    base: NonNull<u8>,
    /// `stack[..free]`: free buffers, by index within the class. The last one freed is the first to go out, cache-warm.
    stack: Box<[Cell<u32>]>,
    free: Cell<usize>,
    low_water: Cell<usize>,
    failures: Cell<u64>,
}

impl ClassList {
    fn new(placed: Placed, base: NonNull<u8>) -> Self {
        // In reverse, so that the first buffer goes out first.
        let stack = (0..placed.count as u32).rev().map(Cell::new).collect();
        let all = placed.count;
        Self { placed, base, stack, free: Cell::new(all), low_water: Cell::new(all), failures: Cell::new(0) }
    }

    /// Capacity of the buffers.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.placed.size
    }

    /// Buffers there are.
    pub(crate) fn count(&self) -> usize {
        self.placed.count
    }

    /// Takes a free buffer: its index among all of the pool, and its first byte. Owner thread only.
    #[inline]
    pub(crate) fn pop(&self) -> Option<(u32, NonNull<u8>)> {
        let Some(free) = self.free.get().checked_sub(1) else {
            self.failures.set(self.failures.get() + 1);
            return None;
        };
        let index = self.stack[free].get();
        self.free.set(free);
        if free < self.low_water.get() {
            self.low_water.set(free);
        }
        // SAFETY: `index < count`, as all indices on the stack; the buffer lies in the range that the class was laid out in.
        let data = unsafe { self.base.add(index as usize * self.placed.stride) };
        Some((self.placed.first + index, data))
    }

    /// Puts a buffer back. Owner thread only.
    #[inline]
    fn push(&self, index: u32) {
        let free = self.free.get();
        self.stack[free].set(index - self.placed.first);
        self.free.set(free + 1);
    }

    /// Buffers on the free list. Owner thread only.
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

    /// Indices of its buffers among all of the pool.
    pub(crate) fn indices(&self) -> std::ops::Range<u32> {
        self.placed.first..self.placed.first + self.placed.count as u32
    }
}

/// See the module page.
pub(crate) struct Core {
    /// The owner's number; [`owner::NOBODY`] once the pool is gone. Only the owner ever finds its own number here.
    owner: AtomicU64,
    arena: Arena,
    /// Where the pool's range starts in the arena.
    offset: usize,
    /// Smallest size first.
    classes: Box<[ClassList]>,
    /// State words, by index of the buffer.
    states: Box<[AtomicU32]>,
    leaked: AtomicU64,
    home: Home,
}

impl Core {
    /// Owned by this thread, all buffers free. `offset`: a range of the arena that is this pool's.
    pub(crate) fn new(arena: Arena, offset: usize, placed: &[Placed]) -> NonNull<Self> {
        let count = placed.iter().map(|class| class.count).sum();
        let list = |class: &Placed| {
            // SAFETY: the caller took the range from the arena for exactly these classes.
            let base = unsafe { arena.base().add(offset + class.offset) };
            ClassList::new(*class, base)
        };
        let core = Self {
            owner: AtomicU64::new(owner::enlist()),
            offset,
            classes: placed.iter().map(list).collect(),
            states: (0..count).map(|_| AtomicU32::new(state::HELD)).collect(),
            leaked: AtomicU64::new(0),
            home: Home::new(count),
            arena,
        };
        NonNull::from(Box::leak(Box::new(core)))
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

    /// The state word of a buffer.
    #[inline]
    pub(crate) fn state(&self, index: u32) -> &AtomicU32 {
        &self.states[index as usize]
    }

    /// True on the thread that owns the living pool, and nowhere else.
    #[inline]
    pub(crate) fn is_mine(&self) -> bool {
        // Relaxed: a thread sees its own stores, and no other thread's number is its own.
        self.owner.load(Ordering::Relaxed) == owner::current()
    }

    /// Takes in what other threads returned. Owner thread only.
    #[inline]
    pub(crate) fn drain(&self) -> usize {
        self.home.take(|index| self.take_in(index))
    }

    fn take_in(&self, index: u32) {
        // The classes lie in the order of their indices; there is always one that begins at 0.
        if let Some(class) = self.classes.iter().rev().find(|class| class.placed.first <= index) {
            class.push(index);
        }
    }

    /// Counts a buffer that the device may never give back.
    #[cold]
    pub(crate) fn leak(&self, index: u32) {
        self.state(index).store(state::LEAKED, Ordering::Relaxed);
        self.leaked.fetch_add(1, Ordering::Relaxed);
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

/// Brings a buffer home, from any thread.
///
/// # Safety
/// `core` is that of a living buffer, whose slot is `slot`, and which the caller gives up with this call.
#[inline]
pub(crate) unsafe fn release(core: NonNull<Core>, slot: Slot) {
    // SAFETY: the buffer is out, so the core lives until it is returned, below.
    let this = unsafe { core.as_ref() };
    if this.is_mine() {
        this.classes[slot.class()].push(slot.index());
    } else {
        // SAFETY: as for this function.
        unsafe { release_remote(core, slot) };
    }
}

/// The way of other threads, and of buffers that outlive their pool.
///
/// # Safety
/// As for [`release`].
#[cold]
#[inline(never)]
unsafe fn release_remote(core: NonNull<Core>, slot: Slot) {
    // SAFETY: the buffer is out, so the core lives until it is returned by this push.
    let returned = unsafe { core.as_ref() }.home.push(slot.index());
    if returned == Returned::Last {
        // SAFETY: the pool is gone and this was the last buffer (`Home`), so nobody has the pointer any more.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
    }
}

/// Ends the pool's own use of the core. The last buffer out, or this call, frees it.
///
/// # Safety
/// Called once, by the pool, on the owner thread, as the last thing that it does with `core`.
pub(crate) unsafe fn abandon(core: NonNull<Core>) {
    // SAFETY: the pool is not gone yet.
    let this = unsafe { core.as_ref() };
    let out = this.classes.iter().map(|class| class.count() - class.free()).sum();
    // Relaxed: from now on nobody finds its own number; other threads never did.
    this.owner.store(owner::NOBODY, Ordering::Relaxed);
    if this.home.close(out) {
        // SAFETY: no buffer is out, and the pool gives its pointer up.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
    }
}
