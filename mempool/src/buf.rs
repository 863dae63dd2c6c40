#![expect(unsafe_code, reason = "turns a buffer's ownership into access to its bytes")]
//! Buffers of pool memory: four types, by access to the bytes.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use crate::arena::ArenaId;
use crate::core::{BufHeader, release, state};
use crate::sync::{AtomicU32, Ordering, fence};

/// A part of a buffer: `start + len` is at most the capacity.
///
/// It is one word, so that a [`Handle`] has two words and is passed in registers. If its halves were stored one by one
/// and loaded together, each load would stall, because the core cannot forward two stores to one load.
#[derive(Clone, Copy)]
struct BufRange(u64);

impl BufRange {
    #[inline]
    fn new(start: u32, len: u32) -> Self {
        Self(u64::from(len) << 32 | u64::from(start))
    }

    #[inline]
    fn start(self) -> usize {
        self.0 as u32 as usize
    }

    #[inline]
    fn len(self) -> usize {
        (self.0 >> 32) as usize
    }
}

/// A buffer, and a part of it. The public types around it keep the buffer's [`BufHeader`] and the core alive.
#[derive(Clone, Copy)]
struct Handle {
    header: NonNull<BufHeader>,
    range: BufRange,
}

impl Handle {
    #[inline]
    fn header(&self) -> &BufHeader {
        // SAFETY: the buffer is allocated, so its core and the header are alive.
        unsafe { self.header.as_ref() }
    }

    #[inline]
    fn state(&self) -> &AtomicU32 {
        &self.header().state
    }

    /// Turns the last handle into a [`Buf`]. The caller gives up its copy.
    #[inline]
    fn into_buf(self) -> Buf {
        self.state().store(state::HELD, Ordering::Relaxed);
        Buf { handle: self }
    }

    /// First byte of the range.
    #[inline]
    fn first_byte(&self) -> NonNull<u8> {
        // SAFETY: the range lies in the buffer.
        unsafe { self.header().data.add(self.range.start()) }
    }

    fn describe(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, len) = (self.range.start(), self.range.len());
        let BufHeader { capacity, arena, offset, .. } = self.header();
        write!(f, "{name}({start}+{len} of {capacity}, arena {arena} at {offset})")
    }
}

/// Getters of all four types. They return the buffer's location, not its contents.
macro_rules! location_getters {
    ($name:ident) => {
        impl $name {
            /// Bytes of the range.
            #[inline]
            #[expect(clippy::len_without_is_empty, reason = "the length of memory, whatever its content")]
            pub fn len(&self) -> usize {
                self.handle.range.len()
            }

            /// Bytes of the whole buffer: the size of its class.
            #[inline]
            pub fn capacity(&self) -> usize {
                self.handle.header().capacity as usize
            }

            /// Offset of the range in the buffer.
            #[inline]
            #[doc(hidden)]
            pub fn start(&self) -> usize {
                self.handle.range.start()
            }

            /// The arena that the buffer lies in.
            #[inline]
            #[doc(hidden)]
            pub fn arena(&self) -> ArenaId {
                self.handle.header().arena
            }

            /// Offset of the range in the arena.
            #[inline]
            #[doc(hidden)]
            pub fn offset(&self) -> usize {
                self.base_offset() + self.start()
            }

            /// Offset of the buffer in the arena.
            #[inline]
            #[doc(hidden)]
            pub fn base_offset(&self) -> usize {
                self.handle.header().offset
            }

            /// Address of the range's first byte in this process, for devices.
            #[inline]
            pub fn address(&self) -> usize {
                self.handle.first_byte().addr().get()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.handle.describe(stringify!($name), f)
            }
        }
    };
}

/// A buffer with one holder. Dereferences to its range: `[start, start + len)` of the capacity.
///
/// Dropping it on any thread returns it to its pool. On the owner thread it goes to the free list, without an atomic
/// operation; elsewhere to the pool's lock-free list.
pub struct Buf {
    handle: Handle,
}

/// An immutable buffer. Clones share it, on any thread, without allocation; the last returns it to its pool.
pub struct Frozen {
    handle: Handle,
}

/// A buffer lent to the device for one-sided transfers. No reference to its bytes exists, so the device may read and
/// write them. Bytes can be copied in and out, as the software device does. Offsets count from the start of the range.
///
/// It stays on the pool's thread, so its clones are counted without atomic operations. The last clone either
/// [`reclaim`](Self::reclaim)s the buffer, or returns it to its pool when dropped.
pub struct Lent {
    handle: Handle,
    /// Keeps the type from being `Send` and `Sync`, because clones are counted without atomic operations.
    _not_send: PhantomData<*mut ()>,
}

/// A buffer owned by the device until its transfer ends.
///
/// Dropping it does not free the buffer, because the device may still write to it. The buffer is lost, and
/// [`PoolStats::leaked`](crate::PoolStats::leaked) counts it.
#[must_use = "a posted buffer that is dropped is lost"]
pub struct Posted {
    handle: Handle,
}

location_getters!(Buf);
location_getters!(Frozen);
location_getters!(Lent);
location_getters!(Posted);

// SAFETY: a `Buf` is the only access to its bytes, and returning it works from any thread.
unsafe impl Send for Buf {}
// SAFETY: a shared `Buf` gives shared access to its bytes only.
unsafe impl Sync for Buf {}
// SAFETY: clones are counted atomically, and the bytes do not change.
unsafe impl Send for Frozen {}
// SAFETY: clones are counted atomically, and the bytes do not change.
unsafe impl Sync for Frozen {}
// SAFETY: it gives no access to the bytes, and only becomes a `Buf`, which is `Send`.
unsafe impl Send for Posted {}
// SAFETY: a reference gives no access to the bytes.
unsafe impl Sync for Posted {}

impl Buf {
    /// The first `len` bytes of a buffer.
    ///
    /// # Safety
    /// The buffer was just taken from the free list, and `len` is at most its capacity.
    #[inline]
    pub(crate) unsafe fn new(header: NonNull<BufHeader>, len: u32) -> Self {
        Self { handle: Handle { header, range: BufRange::new(0, len) } }
    }

    #[inline]
    fn into_handle(self) -> Handle {
        ManuallyDrop::new(self).handle
    }

    /// Sets the range of bytes.
    ///
    /// # Panics
    /// If `start + len` exceeds the capacity.
    #[inline]
    pub fn set_window(&mut self, start: usize, len: usize) {
        let capacity = self.capacity();
        if start > capacity || len > capacity - start {
            panic_out_of_bounds(start, len, capacity);
        }
        self.handle.range = BufRange::new(start as u32, len as u32);
    }

    /// Moves the range's start back to byte `start`; its end stays. False if `start` is not before the range.
    #[inline]
    #[must_use = "false means that nothing was moved"]
    #[doc(hidden)]
    pub fn extend_front(&mut self, start: usize) -> bool {
        let range = self.handle.range;
        let is_before = start <= range.start();
        if is_before {
            let added = range.start() - start;
            self.handle.range = BufRange::new(start as u32, (range.len() + added) as u32);
        }
        is_before
    }

    /// The whole buffer, without regard to the range.
    #[inline]
    #[doc(hidden)]
    pub fn full_mut(&mut self) -> &mut [u8] {
        // SAFETY: `data` is valid for `capacity` initialised bytes, which are this `Buf`'s alone.
        unsafe { slice::from_raw_parts_mut(self.handle.header().data.as_ptr(), self.capacity()) }
    }

    /// Makes the buffer immutable and shareable.
    #[inline]
    pub fn freeze(self) -> Frozen {
        let handle = self.into_handle();
        // Relaxed: whatever passes a clone to another thread synchronises.
        handle.state().store(state::FROZEN | 1, Ordering::Relaxed);
        Frozen { handle }
    }

    /// Lends the buffer to the device. Returns the buffer as the error on any thread but the owner of its pool, and
    /// after the pool's end.
    #[inline]
    #[doc(hidden)]
    pub fn lend(self) -> Result<Lent, Self> {
        if !self.handle.header().is_on_owner_thread() {
            return Err(self);
        }
        let handle = self.into_handle();
        handle.state().store(state::LENT | 1, Ordering::Relaxed);
        Ok(Lent { handle, _not_send: PhantomData })
    }

    /// Makes the device the owner of the buffer.
    #[inline]
    #[doc(hidden)]
    pub fn post(self) -> Posted {
        let handle = self.into_handle();
        handle.state().store(state::POSTED, Ordering::Relaxed);
        Posted { handle }
    }
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is valid for `len` initialised bytes. The borrow of `self` excludes writers.
        unsafe { slice::from_raw_parts(self.handle.first_byte().as_ptr(), self.handle.range.len()) }
    }
}

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is valid for `len` initialised bytes, which are this `Buf`'s alone.
        unsafe { slice::from_raw_parts_mut(self.handle.first_byte().as_ptr(), self.handle.range.len()) }
    }
}

impl Drop for Buf {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this is the only handle of the buffer, and it ends here.
        unsafe { release(self.handle.header) };
    }
}

impl Frozen {
    /// A clone that covers `len` bytes of the range from `start` on. Nothing is copied.
    ///
    /// # Panics
    /// If `start + len` exceeds the range.
    #[inline]
    pub fn part(&self, start: usize, len: usize) -> Self {
        let whole = self.len();
        assert!(start <= whole && len <= whole - start, "part {start}+{len} of {whole} bytes");
        let mut part = self.clone();
        part.handle.range = BufRange::new((self.start() + start) as u32, len as u32);
        part
    }

    /// Attaches an owner to the bytes. Allocates.
    ///
    /// `owner` is dropped with the last clone or part of the result, on any thread. From then on nothing reads the
    /// bytes through the result. The buffer is released after `owner`, so its memory is still valid during the drop.
    pub fn with_owner(self, owner: impl Send + Sync + 'static) -> Self {
        let (header, range) = (self.handle.header().copy_with_own_count(), self.handle.range);
        let owned = NonNull::from(Box::leak(Box::new(Owned { header, _owner: Box::new(owner), _bytes: self })));
        Self { handle: Handle { header: owned.cast(), range } }
    }

    /// Whether the bytes have an owner, which is dropped with the last clone.
    #[inline]
    #[doc(hidden)]
    pub fn has_owner(&self) -> bool {
        // Relaxed: this does not change while clones live.
        is_owned(self.handle.state().load(Ordering::Relaxed))
    }
}

/// Header, owner and bytes of a [`Frozen`] with an owner. Its clones point here, and have their own count.
#[repr(C)]
struct Owned {
    /// The first field: the clones have its address.
    header: BufHeader,
    /// Dropped before the bytes, because its drop may use their memory, which stays mapped meanwhile.
    _owner: Box<dyn Any + Send + Sync>,
    _bytes: Frozen,
}

impl Deref for Frozen {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is valid for `len` initialised bytes; no `Buf` of this buffer exists, so there is no
        // writer.
        unsafe { slice::from_raw_parts(self.handle.first_byte().as_ptr(), self.handle.range.len()) }
    }
}

impl Clone for Frozen {
    #[inline]
    fn clone(&self) -> Self {
        // Relaxed: `self` keeps the count above zero meanwhile.
        let before = self.handle.state().fetch_add(1, Ordering::Relaxed);
        check_count(before);
        Self { handle: self.handle }
    }
}

impl Drop for Frozen {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the fence of the last clone: our reads of the bytes happen before their reuse.
        let before = self.handle.state().fetch_sub(1, Ordering::Release);
        if before & state::COUNT != 1 {
            return;
        }
        // Acquire pairs with the decrement of every other clone.
        fence(Ordering::Acquire);
        if is_owned(before) {
            // SAFETY: only `with_owner` sets this state, and this was the last clone.
            return unsafe { drop_owned(self.handle.header) };
        }
        drop(self.handle.into_buf());
    }
}

impl Lent {
    /// Takes the buffer back, range unchanged, if this is the only clone.
    #[inline]
    pub fn reclaim(self) -> Result<Buf, Self> {
        if self.handle.state().load(Ordering::Relaxed) & state::COUNT != 1 {
            return Err(self);
        }
        Ok(ManuallyDrop::new(self).handle.into_buf())
    }

    /// The address of `len` bytes at `offset` of the range, if they are all in it.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len() {
            return None;
        }
        // SAFETY: `offset` is within the range, checked above.
        Some(unsafe { self.handle.first_byte().add(offset) })
    }

    /// Copies `src` to `offset` of the range. False, with nothing copied, if out of bounds.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub fn write_at(&self, offset: usize, src: &[u8]) -> bool {
        let Some(dst) = self.at(offset, src.len()) else { return false };
        // SAFETY: `dst` is valid for `src.len()` bytes (`at`). No reference to the bytes of a living `Lent` exists, so
        // `src` is elsewhere. No other thread copies, because a `Lent` stays on its thread.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), src.len()) };
        true
    }

    /// Copies `dst.len()` bytes at `offset` of the range to `dst`. False, with nothing copied, if out of bounds.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub fn read_at(&self, offset: usize, dst: &mut [u8]) -> bool {
        let Some(src) = self.at(offset, dst.len()) else { return false };
        // SAFETY: `src` is valid for `dst.len()` bytes (`at`). No reference to the bytes of a living `Lent` exists, so
        // `dst` is elsewhere. No other thread copies, because a `Lent` stays on its thread.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
        true
    }
}

impl Clone for Lent {
    #[inline]
    fn clone(&self) -> Self {
        // One thread counts all clones, so no read-modify-write is needed.
        let state = self.handle.state();
        let before = state.load(Ordering::Relaxed);
        check_count(before);
        state.store(before + 1, Ordering::Relaxed);
        Self { handle: self.handle, _not_send: PhantomData }
    }
}

impl Drop for Lent {
    #[inline]
    fn drop(&mut self) {
        let state = self.handle.state();
        let before = state.load(Ordering::Relaxed);
        if before & state::COUNT != 1 {
            state.store(before - 1, Ordering::Relaxed);
            return;
        }
        drop(self.handle.into_buf());
    }
}

impl Posted {
    /// Takes the buffer back, range unchanged.
    ///
    /// # Safety
    /// The device has proved that it is done with the buffer: by the completion of its request, or by the destruction
    /// of its queue.
    #[inline]
    pub unsafe fn complete(self) -> Buf {
        ManuallyDrop::new(self).handle.into_buf()
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        self.handle.header().leak();
    }
}

/// Drops the owner of a [`Frozen`], and then the bytes.
///
/// # Safety
/// `header` is that of [`Frozen::with_owner`], and the caller's was the last handle.
#[cold]
unsafe fn drop_owned(header: NonNull<BufHeader>) {
    // SAFETY: the header is the first field of an `Owned`, which `with_owner` leaked; the pointer is to all of it.
    drop(unsafe { Box::from_raw(header.cast::<Owned>().as_ptr()) });
}

/// Whether this is the state of a [`Frozen`] with an owner.
#[inline]
fn is_owned(state: u32) -> bool {
    state & !state::COUNT == state::OWNED
}

/// Aborts before the count wraps, which would free a buffer in use. Half of the range leaves room for all threads at
/// once.
#[inline]
fn check_count(before: u32) {
    #[cold]
    fn overflow() -> ! {
        std::process::abort()
    }
    if before & state::COUNT > state::COUNT / 2 {
        overflow();
    }
}

/// Panics out of line, off the path of successful calls.
#[cold]
#[inline(never)]
fn panic_out_of_bounds(start: usize, len: usize, capacity: usize) -> ! {
    panic!("range {start}+{len} exceeds the buffer of {capacity} bytes");
}

#[cfg(all(test, not(loom)))]
mod tests;
