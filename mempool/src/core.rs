#![expect(unsafe_code, reason = "shared bookkeeping of a pool, freed with the last buffer")]
//! Shared state of a pool and its buffers: free lists, buffer states and remote frees.
//!
//! A [`Core`] lives on the heap behind plain pointers: in the [`Pool`](crate::Pool) and in every allocated buffer.
//! An allocation counts no reference, because the core lives as long as the pool. A dropped pool leaves the number of
//! outstanding buffers in its [`IndexStack`], and the last of them frees the core.

use std::cell::{Cell, OnceCell};
use std::ptr::NonNull;

use crate::arena::{Arena, ArenaId};
use crate::classes::ClassLayout;
use crate::current_thread;
use crate::index_stack::IndexStack;
use crate::stats::{ClassCensus, ClassStats};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// No thread has this number: it marks a pool without an owner.
pub(crate) const NO_OWNER: u64 = u64::MAX;

/// The holder of a buffer (high bits) and its clones (low bits). Allocation and return do not touch the word: 0 is a
/// free buffer as well as a held one.
pub(crate) mod state {
    /// Bits of the clone count.
    pub(crate) const COUNT: u32 = (1 << 29) - 1;
    /// On a free list, in the list of remote frees, or a `Buf`.
    pub(crate) const HELD: u32 = 0;
    /// `Frozen`.
    pub(crate) const FROZEN: u32 = 1 << 29;
    /// `Lent`.
    pub(crate) const LENT: u32 = 2 << 29;
    /// `Posted`.
    pub(crate) const POSTED: u32 = 3 << 29;
    /// A `Posted` that was dropped: the device may write to it at any time.
    pub(crate) const LEAKED: u32 = 4 << 29;
    /// `Frozen` with an owner, whose own header has this state. The header of its buffer remains `FROZEN`.
    pub(crate) const OWNED: u32 = 5 << 29;
}

/// Bookkeeping of one buffer, on its own cache line. It is out of reach of peers that see the data.
#[repr(align(64))]
pub(crate) struct BufHeader {
    core: NonNull<Core>,
    /// The class that the buffer belongs to, in `core`.
    class: NonNull<ClassList>,
    /// First byte.
    pub(crate) data: NonNull<u8>,
    /// Offset of the first byte in the arena.
    pub(crate) offset: usize,
    /// Bytes.
    pub(crate) capacity: u32,
    pub(crate) arena: ArenaId,
    /// Index among all buffers of the pool.
    index: u32,
    /// Link of the list of remote frees.
    next: AtomicU32,
    /// See [`state`].
    pub(crate) state: AtomicU32,
}

impl BufHeader {
    #[inline]
    fn core(&self) -> &Core {
        // SAFETY: the core owns the header, so it lives as long.
        unsafe { self.core.as_ref() }
    }

    #[inline]
    fn class(&self) -> &ClassList {
        // SAFETY: the core owns both.
        unsafe { self.class.as_ref() }
    }

    /// True on the thread that owns the living pool, and nowhere else.
    #[inline]
    pub(crate) fn is_on_owner_thread(&self) -> bool {
        // Relaxed: a thread sees its own stores, and no other thread's number is its own.
        self.core().owner.load(Ordering::Relaxed) == current_thread()
    }

    /// A copy of this header for a [`Frozen`](crate::Frozen) with an owner. Its own clone count is one.
    pub(crate) fn copy_with_own_count(&self) -> Self {
        Self { next: AtomicU32::new(IndexStack::NIL), state: AtomicU32::new(state::OWNED | 1), ..*self }
    }

    /// Counts a buffer that the device may never return.
    #[cold]
    pub(crate) fn leak(&self) {
        self.state.store(state::LEAKED, Ordering::Relaxed);
        self.core().leaked.fetch_add(1, Ordering::Relaxed);
    }
}

/// One size class, with its free list. Only the owner thread uses its methods.
pub(crate) struct ClassList {
    pub(crate) layout: ClassLayout,
    /// Buffers of this class and of all larger ones.
    pub(crate) fitting: usize,
    /// `stack[..free]`: free buffers. The last one freed is allocated first, cache-warm.
    stack: Box<[Cell<Option<NonNull<BufHeader>>>]>,
    free: Cell<usize>,
    low_water: Cell<usize>,
    failures: Cell<u64>,
}

impl ClassList {
    /// An empty list with room for all buffers of the class. `larger` is the number of buffers of larger classes.
    fn new(layout: &ClassLayout, larger: usize) -> Self {
        Self {
            layout: *layout,
            fitting: layout.count + larger,
            stack: (0..layout.count).map(|_| Cell::new(None)).collect(),
            free: Cell::new(0),
            low_water: Cell::new(layout.count),
            failures: Cell::new(0),
        }
    }

    /// Takes a free buffer.
    #[inline]
    pub(crate) fn pop(&self) -> Option<NonNull<BufHeader>> {
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

    /// Puts a buffer of this class back.
    #[inline]
    fn push(&self, header: NonNull<BufHeader>) {
        let free = self.free.get();
        self.stack[free].set(Some(header));
        self.free.set(free + 1);
    }

    /// Buffers on the free list.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.free.get()
    }

    /// Resets the low-water mark to the current level.
    pub(crate) fn reset_low_water(&self) {
        self.low_water.set(self.free.get());
    }

    pub(crate) fn stats(&self) -> ClassStats {
        let (ClassLayout { size, count, .. }, free) = (self.layout, self.free());
        let (low_water, failures) = (self.low_water.get(), self.failures.get());
        ClassStats { size, count, free, outstanding: count - free, low_water, failures }
    }
}

/// The state that a pool shares with its buffers; see the module documentation.
pub(crate) struct Core {
    /// The owner's number, or [`NO_OWNER`] once the pool was dropped and while it moves to another thread. Only the
    /// owner finds its own number here. When the owner of a leaked pool has ended, a new thread may get its number, and
    /// is then the owner.
    owner: AtomicU64,
    pub(crate) arena: Arena,
    /// Offset of the pool's range in the arena.
    offset: usize,
    /// Smallest size first. Their free lists may only be touched on the owner thread.
    pub(crate) classes: Box<[ClassList]>,
    /// The headers, class by class. They are made once the core has its final address, because they point to it.
    headers: OnceCell<Box<[BufHeader]>>,
    pub(crate) leaked: AtomicU64,
    /// Buffers that other threads returned.
    pub(crate) remote_free: IndexStack,
}

impl Core {
    /// A core owned by this thread, with all buffers free. `offset` is the start of the pool's range in the arena.
    pub(crate) fn new(arena: Arena, offset: usize, layouts: &[ClassLayout]) -> NonNull<Self> {
        let count: usize = layouts.iter().map(|class| class.count).sum();
        let larger = |class: &ClassLayout| count - class.first as usize - class.count;
        let core = NonNull::from(Box::leak(Box::new(Self {
            owner: AtomicU64::new(current_thread()),
            arena,
            offset,
            classes: layouts.iter().map(|class| ClassList::new(class, larger(class))).collect(),
            headers: OnceCell::new(),
            leaked: AtomicU64::new(0),
            remote_free: IndexStack::default(),
        })));
        // SAFETY: leaked just now.
        let this = unsafe { core.as_ref() };
        let headers = || this.classes.iter().flat_map(|class| this.class_headers(core, class)).collect();
        // In reverse, so that the first buffer is allocated first.
        this.headers.get_or_init(headers).iter().rev().for_each(|header| header.class().push(NonNull::from(header)));
        core
    }

    /// The headers of one class.
    fn class_headers(&self, core: NonNull<Self>, class: &ClassList) -> impl Iterator<Item = BufHeader> {
        let ClassLayout { size, count, stride, offset, first } = class.layout;
        (0..count).map(move |i| {
            let offset = self.offset + offset + i * stride;
            // SAFETY: the caller of `new` took the range from the arena for exactly these classes.
            let data = unsafe { self.arena.base().add(offset) };
            BufHeader {
                core,
                class: NonNull::from(class),
                data,
                offset,
                capacity: size as u32,
                arena: self.arena.id(),
                index: first + i as u32,
                next: AtomicU32::new(IndexStack::NIL),
                state: AtomicU32::new(state::HELD),
            }
        })
    }

    /// Sets the owner to this thread, or to none. Only the thread that has the pool calls this.
    pub(crate) fn set_owner(&self, owner: u64) {
        // Relaxed: a thread that gave the pool up sees its own store, and any later owner got the pool from it.
        self.owner.store(owner, Ordering::Relaxed);
    }

    fn headers(&self) -> &[BufHeader] {
        self.headers.get().map_or(&[], |headers| headers)
    }

    /// Counts the buffers of a class by holder. Owner thread only.
    pub(crate) fn census(&self, class: &ClassList) -> ClassCensus {
        let ClassLayout { size, count, first, .. } = class.layout;
        let mut census = ClassCensus { size, count, free: class.free(), ..Default::default() };
        for header in &self.headers()[first as usize..first as usize + count] {
            // Relaxed: buffers on other threads may change hands while we count.
            match header.state.load(Ordering::Relaxed) & !state::COUNT {
                state::FROZEN => census.frozen += 1,
                state::LENT => census.lent += 1,
                state::POSTED => census.posted += 1,
                state::LEAKED => census.leaked += 1,
                _ => census.held += 1,
            }
        }
        // A free buffer has the state of a held one.
        census.held -= census.free;
        census
    }

    /// Moves the buffers that other threads returned to the free lists. Owner thread only.
    #[inline]
    pub(crate) fn drain(&self) -> usize {
        if !self.remote_free.has_any() {
            return 0;
        }
        let returned = IndexStack::list(self.remote_free.take(), |index| self.link(index));
        let push = |header: &BufHeader| header.class().push(NonNull::from(header));
        returned.map(|index| push(&self.headers()[index as usize])).count()
    }

    /// The link of a buffer in the list of remote frees.
    fn link(&self, index: u32) -> &AtomicU32 {
        &self.headers()[index as usize].next
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.arena.free_range(self.offset);
    }
}

/// Returns a buffer, from any thread.
///
/// # Safety
/// `header` is that of an allocated buffer, which the caller gives up with this call.
#[inline]
pub(crate) unsafe fn release(header: NonNull<BufHeader>) {
    // SAFETY: the buffer is allocated, so the core, which owns the header, lives until the buffer is returned, below.
    let this = unsafe { header.as_ref() };
    if this.is_on_owner_thread() {
        this.class().push(header);
    } else {
        // SAFETY: the caller gives up an allocated buffer.
        unsafe { release_remote(header) };
    }
}

/// Returns a buffer from another thread, or one that outlives its pool.
///
/// # Safety
/// The conditions are those of [`release`].
#[cold]
#[inline(never)]
unsafe fn release_remote(header: NonNull<BufHeader>) {
    // SAFETY: the buffer is allocated, so the core, which owns the header, lives until the push.
    let BufHeader { core, index, next, .. } = unsafe { header.as_ref() };
    let core = *core;
    // SAFETY: the buffer is allocated, so its core lives until the push.
    if unsafe { core.as_ref() }.remote_free.push(*index, next) {
        // SAFETY: the pool was dropped and this was the last buffer, so no other pointer to the core exists.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
    }
}

/// Ends the pool's own use of the core. This call frees the core if no buffer is outstanding; otherwise the last buffer
/// does.
///
/// # Safety
/// Called once, by the pool, on the owner thread, as the last thing that it does with `core`.
pub(crate) unsafe fn abandon(core: NonNull<Core>) {
    // SAFETY: the pool still exists.
    let this = unsafe { core.as_ref() };
    let outstanding = this.classes.iter().map(|class| class.layout.count - class.free()).sum();
    // From now on no thread finds its own number here; other threads never did.
    this.set_owner(NO_OWNER);
    if this.remote_free.close(outstanding, |index| this.link(index)) {
        // SAFETY: no buffer is allocated, and the pool gives its pointer up.
        drop(unsafe { Box::from_raw(core.as_ptr()) });
    }
}
