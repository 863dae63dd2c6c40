#![expect(unsafe_code, reason = "a handle is a pointer that callers in C hold")]
//! Handles: pointers to slots. A slot detects stale and mistyped handles.
//!
//! A slot begins with a mark, which says the kind of the handle, and whether the slot is free, live, or in use by a
//! function. Slots are reused, and never return to the allocator, so a freed handle still points to a slot. Successive
//! handles of a slot differ by a tag in their upper 16 bits, which addresses do not use. The mark contains the tag of
//! the slot's current handle. A handle value recurs after 65,535 other handles of its slot.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::LocalKey;

use rustix::io::Errno;

use crate::arguments::null_argument;
use crate::failure::ApiFailure;

/// A kind of handle: the type of the pointer in C.
pub(crate) trait HandleKind: Sized + 'static {
    /// Value of a handle.
    type Value: 'static;
    /// Name of the type in C.
    const NAME: &'static str;
    /// Mark of a live handle: a value that other memory is unlikely to contain. Its lowest two bits and its tag bits
    /// are 0.
    const MARK: u64;
    /// Whether the handle is attached to one thread at a time, which alone may use it.
    const BOUND: bool;
    /// Whether the handles of a slot have tags. Handles without tags are plain pointers, which leak checkers recognize.
    const TAGGED: bool;

    /// Free slots of this thread.
    fn thread_slots() -> &'static LocalKey<ThreadFreeSlots<Self>>;
    /// Free slots of all threads.
    fn shared_slots() -> &'static SharedFreeSlots<Self>;
}

/// Bit of a mark: a function uses the slot.
const IN_USE: u64 = 1;
/// Bit of a mark: the handle was freed.
const FREED: u64 = 2;
/// Bits of the tag in a handle and its mark, by which the handles of a slot differ.
const TAG: u64 = 0xffff << 48;
const TAG_SHIFT: u32 = TAG.trailing_zeros();
/// Free slots that move between a thread and the shared list together.
const BATCH: usize = 64;

/// A free slot.
struct FreeSlot<K: HandleKind>(&'static HandleSlot<K>);

// SAFETY: a free slot has no value, and all its handles are freed.
unsafe impl<K: HandleKind> Send for FreeSlot<K> {}

/// Free slots of all threads.
pub(crate) struct SharedFreeSlots<K: HandleKind>(Mutex<Vec<FreeSlot<K>>>);

impl<K: HandleKind> SharedFreeSlots<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Moves up to [`BATCH`] slots to a thread's list.
    #[cold]
    fn move_to(&self, slots: &mut Vec<FreeSlot<K>>) {
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = shared.len().saturating_sub(BATCH);
        slots.extend(shared.drain(kept..));
    }

    /// Takes all but the first `kept` slots of a thread's list.
    #[cold]
    fn take_from(&self, slots: &mut Vec<FreeSlot<K>>, kept: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(slots.drain(kept..));
    }
}

/// Free slots of a thread.
pub(crate) struct ThreadFreeSlots<K: HandleKind>(RefCell<Vec<FreeSlot<K>>>);

impl<K: HandleKind> Drop for ThreadFreeSlots<K> {
    fn drop(&mut self) {
        K::shared_slots().take_from(self.0.get_mut(), 0);
    }
}

impl<K: HandleKind> ThreadFreeSlots<K> {
    pub(crate) const fn new() -> Self {
        Self(RefCell::new(Vec::new()))
    }

    /// Makes a handle in one of these slots, or in a new one.
    #[inline]
    fn new_handle(&self, value: K::Value) -> *mut K {
        let mut slots = self.0.borrow_mut();
        if slots.is_empty() {
            K::shared_slots().move_to(&mut slots);
        }
        let FreeSlot(slot) = slots.pop().unwrap_or_else(HandleSlot::free);
        // Relaxed, as in `end_handle`: a free slot of another thread comes through the mutex of `SharedFreeSlots`.
        let before = (slot.mark.load(Ordering::Relaxed) ^ K::MARK) >> TAG_SHIFT;
        let tag = if K::TAGGED { before.wrapping_add(1) << TAG_SHIFT } else { 0 };
        slot.thread.store(this_thread::<K>(), Ordering::Relaxed);
        // SAFETY: the slot is free, so only this function uses its value.
        let place = unsafe { &mut *slot.value.get() };
        place.write(value);
        // Release pairs with the Acquire of `HandleSlot::claim` on another thread, however it got the pointer.
        slot.mark.store(K::MARK ^ tag, Ordering::Release);
        let pointer = tagged(std::ptr::from_ref(slot).cast_mut(), tag);
        checked::add(pointer);
        pointer
    }

    /// Ends a handle and returns its value. The slot joins this list.
    ///
    /// # Errors
    /// See [`lend`].
    ///
    /// # Safety
    /// See [`take`].
    #[inline]
    unsafe fn take(&self, pointer: *mut K) -> Result<K::Value, ApiFailure> {
        // SAFETY: the caller guarantees it.
        let slot = unsafe { end_handle(pointer) }?;
        // SAFETY: the slot was live, so it has a value.
        let value = unsafe { slot.value.get().read() };
        // SAFETY: the slot was live; its next handle writes another value.
        let value = unsafe { value.assume_init() };
        let mut slots = self.0.borrow_mut();
        slots.push(FreeSlot(slot));
        if slots.len() == 2 * BATCH {
            K::shared_slots().take_from(&mut slots, BATCH);
        }
        Ok(value)
    }
}

/// The handle of a slot, with a tag.
#[inline]
fn tagged<K: HandleKind>(slot: *mut HandleSlot<K>, tag: u64) -> *mut K {
    slot.cast::<K>().map_addr(|address| address | tag as usize)
}

/// The slot of a handle, and the mark of a live one.
#[inline]
fn untagged<K: HandleKind>(pointer: *mut K) -> (*mut HandleSlot<K>, u64) {
    let tag = if K::TAGGED { pointer.addr() as u64 & TAG } else { 0 };
    (pointer.cast::<HandleSlot<K>>().map_addr(|address| address & !TAG as usize), K::MARK ^ tag)
}

/// The memory that a handle points to.
#[repr(C)]
pub(crate) struct HandleSlot<K: HandleKind> {
    mark: AtomicU64,
    /// Thread that has the handle; [`DETACHED`] if none has. 0 for kinds that any thread uses.
    thread: AtomicU64,
    /// Whether the slot is on the heap. Other slots end with the function that made them, and cannot be freed.
    is_boxed: bool,
    /// Initialized while the slot is live.
    value: UnsafeCell<MaybeUninit<K::Value>>,
}

/// Number of this thread, unique among the running ones. 0 for kinds that any thread uses.
#[inline]
fn this_thread<K: HandleKind>() -> u64 {
    if K::BOUND { rpcrdma_mempool::current_thread() } else { 0 }
}

/// Makes a handle, which lives until its value is [taken](take).
#[inline]
pub(crate) fn new_handle<K: HandleKind>(value: K::Value) -> *mut K {
    let mut value = Some(value);
    let handle = K::thread_slots().try_with(|slots| value.take().map(|value| slots.new_handle(value))).ok().flatten();
    // An ending thread has no list of free slots any more.
    handle.unwrap_or_else(|| value.map_or(std::ptr::null_mut(), |value| ThreadFreeSlots::new().new_handle(value)))
}

thread_local!(static TEMPORARY_TAGS: TemporaryTags = TemporaryTags(Rc::default()));

/// Tags of a thread's temporary handles, by which consecutive handles differ.
pub(crate) struct TemporaryTags(Rc<Cell<u16>>);

impl TemporaryTags {
    /// Tags that no thread shares, for a detached client.
    pub(crate) fn of_no_thread() -> Self {
        Self(Rc::default())
    }

    /// Tags of this thread.
    pub(crate) fn of_thread() -> Self {
        // An ending thread has lost its tags, and gets new ones.
        TEMPORARY_TAGS.try_with(|own| Self(Rc::clone(&own.0))).unwrap_or_else(|_| Self(Rc::default()))
    }

    #[inline]
    pub(crate) fn next(&self) -> u16 {
        self.0.set(self.0.get().wrapping_add(1));
        self.0.get()
    }

    /// The next tag of this thread.
    #[inline]
    pub(crate) fn next_of_thread() -> u16 {
        TEMPORARY_TAGS.try_with(Self::next).unwrap_or_default()
    }
}

/// Runs `body` with a handle that ends with it, and then `end` with the result and the value.
///
/// The tag distinguishes the handle from earlier ones at the same address.
#[inline(always)]
pub(crate) fn with_temporary_handle<K: HandleKind, R, T>(
    tag: u16,
    value: K::Value,
    body: impl FnOnce(*mut K) -> R,
    end: impl FnOnce(R, &mut K::Value) -> T,
) -> T {
    let tag = u64::from(tag) << TAG_SHIFT;
    let slot = HandleSlot::<K> {
        mark: AtomicU64::new(K::MARK ^ tag),
        thread: AtomicU64::new(this_thread::<K>()),
        is_boxed: false,
        value: UnsafeCell::new(MaybeUninit::new(value)),
    };
    let pointer = tagged(std::ptr::from_ref(&slot).cast_mut(), tag);
    checked::add(pointer);
    let result = body(pointer);
    checked::remove(pointer);
    // If a thread still uses the handle, against the contract, wait until it has finished.
    while !K::BOUND && slot.claim(K::MARK ^ tag).is_err() {
        std::thread::yield_now();
    }
    slot.mark.store((K::MARK ^ tag) | FREED, Ordering::Relaxed);
    // SAFETY: the slot is claimed or bound to this thread, and freed: nobody else uses its value.
    let value = unsafe { &mut *slot.value.get() };
    // SAFETY: the value was written above, and a slot that is not boxed cannot be taken.
    let result = end(result, unsafe { value.assume_init_mut() });
    // SAFETY: the value was written above, and is not used after this.
    unsafe { value.assume_init_drop() };
    result
}

impl<K: HandleKind> HandleSlot<K> {
    #[cold]
    fn free() -> FreeSlot<K> {
        let mark = AtomicU64::new(K::MARK | FREED);
        let value = UnsafeCell::new(MaybeUninit::uninit());
        FreeSlot(Box::leak(Box::new(Self { mark, thread: AtomicU64::new(0), is_boxed: true, value })))
    }

    /// Claims a live slot with this mark for the running function.
    ///
    /// # Errors
    /// The mark that the slot has instead.
    #[inline]
    fn claim(&self, live: u64) -> Result<(), u64> {
        if K::BOUND {
            // Only the thread that has the handle writes the mark; others fail.
            let mark = self.mark.load(Ordering::Relaxed);
            if mark != live || self.thread.load(Ordering::Relaxed) != this_thread::<K>() {
                return Err(mark);
            }
            self.mark.store(live | IN_USE, Ordering::Relaxed);
            return Ok(());
        }
        // Acquire pairs with the Release of `new_handle` and of the last use, on another thread.
        self.mark.compare_exchange(live, live | IN_USE, Ordering::Acquire, Ordering::Relaxed).map(|_| ())
    }

    /// The failure for a handle whose slot has the mark `mark` instead of `live`.
    #[cold]
    #[inline(never)]
    fn access_error(mark: u64, live: u64) -> ApiFailure {
        let name = K::NAME;
        match mark ^ live {
            0 => ApiFailure::new(
                Errno::PERM,
                format_args!(
                    "{name}: attached to another thread, or to none (to move it, call rpcrdma_detach on that thread \
                     and rpcrdma_attach on this one; the end of a thread also detaches its handles)"
                ),
            ),
            IN_USE => ApiFailure::new(Errno::BUSY, format_args!("{name}: in use by another function")),
            // The handle was freed, or the slot has a later handle.
            other if other & !(TAG | IN_USE | FREED) == 0 => {
                checked::report_misuse(format_args!("{name}: freed or answered already"))
            }
            _ => checked::report_misuse(format_args!("{name}: not a handle of this kind")),
        }
    }
}

/// The mark of a handle of any kind, by which the caller tells the kinds apart.
///
/// # Errors
/// See [`lend`].
///
/// # Safety
/// See [`lend`].
pub(crate) unsafe fn mark_of(pointer: *mut c_void) -> Result<u64, ApiFailure> {
    let is_live = checked::is_live(pointer);
    let pointer = pointer.cast::<AtomicU64>().map_addr(|address| address & !TAG as usize);
    let pointer = NonNull::new(pointer).ok_or_else(|| ApiFailure::argument("the handle is NULL"))?;
    if !pointer.is_aligned() || !is_live {
        return Err(checked::report_misuse("freed already, or not a handle"));
    }
    // SAFETY: the caller guarantees that the pointer is to a slot, which begins with its mark.
    let mark = unsafe { pointer.as_ref() };
    Ok(mark.load(Ordering::Relaxed) & !(TAG | IN_USE | FREED))
}

/// The slot of a handle, and the mark that it has while it is live.
///
/// # Safety
/// See [`lend`].
#[inline(always)]
unsafe fn slot<'a, K: HandleKind>(pointer: *mut K) -> Result<(&'a HandleSlot<K>, u64), ApiFailure> {
    let (slot, live) = untagged(pointer);
    let Some(slot) = NonNull::new(slot) else { return Err(null_argument(K::NAME)) };
    if !slot.is_aligned() || !checked::is_live(pointer) {
        return Err(checked::report_misuse(format_args!("{}: freed already, or not a handle", K::NAME)));
    }
    // SAFETY: the caller guarantees that the pointer is to a slot, live or free. Slots are shared, with interior
    // mutability.
    Ok((unsafe { slot.as_ref() }, live))
}

/// Stored instead of the thread of a detached handle. No thread has this number.
const DETACHED: u64 = u64::MAX;

/// Detaches a handle from this thread, after `leave` has prepared its value.
///
/// Then any thread may [attach](attach) it.
///
/// # Errors
/// See [`lend`].
///
/// # Safety
/// See [`lend`].
pub(crate) unsafe fn detach<K: HandleKind>(
    pointer: *mut K,
    leave: impl FnOnce(&mut K::Value) -> Result<(), ApiFailure>,
) -> Result<(), ApiFailure> {
    // SAFETY: the caller guarantees it.
    let mut lent = unsafe { lend(pointer) }?;
    leave(&mut lent)?;
    let slot = lent.slot;
    drop(lent);
    // Release pairs with the Acquire of `attach`.
    slot.thread.store(DETACHED, Ordering::Release);
    Ok(())
}

/// Attaches a detached handle to this thread, after which `enter` prepares its value.
///
/// Returns true if the handle was detached, false if this thread has it already.
///
/// # Errors
/// See [`lend`].
///
/// # Safety
/// See [`lend`].
pub(crate) unsafe fn attach<K: HandleKind>(
    pointer: *mut K,
    enter: impl FnOnce(&mut K::Value),
) -> Result<bool, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let (slot, live) = unsafe { slot(pointer) }?;
    let is_live = slot.mark.load(Ordering::Relaxed) == live;
    // Acquire pairs with the Release of `detach`. One of several threads succeeds.
    let current = this_thread::<K>();
    let was_detached =
        is_live && slot.thread.compare_exchange(DETACHED, current, Ordering::Acquire, Ordering::Relaxed).is_ok();
    // SAFETY: the caller guarantees it.
    let mut lent = unsafe { lend(pointer) }?;
    if was_detached {
        enter(&mut lent);
    }
    Ok(was_detached)
}

/// The value of a handle, lent to the running function.
pub(crate) struct LentHandle<'a, K: HandleKind> {
    slot: &'a HandleSlot<K>,
    /// Mark of the slot while no function uses it.
    live: u64,
}

/// Lends the value of a handle exclusively.
///
/// # Errors
/// EINVAL: the handle is null. EBADF: it is of another kind, or was freed. EBUSY: a function uses it. EPERM: another
/// thread has the handle, or no thread has it.
///
/// # Safety
/// `pointer` is null or came from this library. A freed handle is usually detected, but not always.
#[inline(always)]
pub(crate) unsafe fn lend<'a, K: HandleKind>(pointer: *mut K) -> Result<LentHandle<'a, K>, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let (slot, live) = unsafe { slot(pointer) }?;
    match slot.claim(live) {
        Ok(()) => Ok(LentHandle { slot, live }),
        Err(mark) => Err(HandleSlot::<K>::access_error(mark, live)),
    }
}

/// Lends a handle again after a function of the application has run. `None` if that function has freed the handle.
///
/// # Safety
/// See [`lend`]. The handle was live before that function, so it is not null.
#[inline]
pub(crate) unsafe fn lend_if_live<'a, K: HandleKind>(pointer: *mut K) -> Option<LentHandle<'a, K>> {
    let (slot, live) = untagged(pointer);
    // SAFETY: the handle points to a slot, as it did before.
    let slot = unsafe { &*slot };
    slot.claim(live).ok().map(|()| LentHandle { slot, live })
}

/// Ends a handle and returns its value.
///
/// # Errors
/// See [`lend`].
///
/// # Safety
/// See [`lend`]. The handle came from [`new_handle`].
#[inline]
pub(crate) unsafe fn take<K: HandleKind>(pointer: *mut K) -> Result<K::Value, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let taken = K::thread_slots().try_with(|slots| unsafe { slots.take(pointer) });
    // SAFETY: the caller guarantees it.
    taken.unwrap_or_else(|_| unsafe { ThreadFreeSlots::new().take(pointer) })
}

/// Revives a handle that [`take`] has ended, with this value.
///
/// # Safety
/// See [`take`], which has ended the handle on this thread. No handle was made since.
#[cold]
pub(crate) unsafe fn restore_handle<K: HandleKind>(pointer: *mut K, value: K::Value) {
    let (slot, live) = untagged(pointer);
    let remove_slot = |slots: &mut Vec<FreeSlot<K>>| {
        let at = slots.iter().rposition(|FreeSlot(free)| std::ptr::eq(*free, slot))?;
        Some(slots.swap_remove(at))
    };
    let found = K::thread_slots().try_with(|slots| remove_slot(&mut slots.0.borrow_mut())).ok().flatten();
    // `take` may have moved the slot to the shared list. If another thread has it now, the handle stays ended.
    let found = found.or_else(|| remove_slot(&mut K::shared_slots().0.lock().unwrap_or_else(PoisonError::into_inner)));
    let Some(FreeSlot(slot)) = found else { return };
    // SAFETY: the slot is free, so only this function uses its value.
    let place = unsafe { &mut *slot.value.get() };
    place.write(value);
    slot.thread.store(this_thread::<K>(), Ordering::Relaxed);
    slot.mark.store(live, Ordering::Release);
    checked::add(pointer);
}

/// Ends a handle, and returns its slot, which is free then.
///
/// # Safety
/// See [`take`].
#[inline]
unsafe fn end_handle<K: HandleKind>(pointer: *mut K) -> Result<&'static HandleSlot<K>, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let lent = unsafe { lend::<K>(pointer) }?;
    let (slot, live) = (lent.slot, lent.live);
    if !slot.is_boxed {
        return Err(ApiFailure::argument(format_args!(
            "{}: the handle becomes invalid when the callback that got it returns, and cannot be freed",
            K::NAME
        )));
    }
    std::mem::forget(lent);
    checked::remove(pointer);
    slot.mark.store(live | FREED, Ordering::Relaxed);
    Ok(slot)
}

impl<K: HandleKind> Deref for LentHandle<'_, K> {
    type Target = K::Value;

    #[inline]
    fn deref(&self) -> &K::Value {
        // SAFETY: the slot is claimed for this borrow alone.
        let value = unsafe { &*self.slot.value.get() };
        // SAFETY: the slot is live, so it has a value.
        unsafe { value.assume_init_ref() }
    }
}

impl<K: HandleKind> DerefMut for LentHandle<'_, K> {
    #[inline]
    fn deref_mut(&mut self) -> &mut K::Value {
        // SAFETY: the slot is claimed for this borrow alone.
        let value = unsafe { &mut *self.slot.value.get() };
        // SAFETY: the slot is live, so it has a value.
        unsafe { value.assume_init_mut() }
    }
}

impl<K: HandleKind> Drop for LentHandle<'_, K> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release pairs with the Acquire of `HandleSlot::claim`.
        self.slot.mark.store(self.live, Ordering::Release);
    }
}

/// The value of a handle that any number of threads may use concurrently.
///
/// # Errors
/// See [`lend`]. Shared handles are never busy.
///
/// # Safety
/// See [`lend`]. Nobody frees the handle meanwhile, and nobody [lends](lend) handles of the kind.
#[inline]
pub(crate) unsafe fn share<'a, K: HandleKind<Value: Sync>>(pointer: *mut K) -> Result<&'a K::Value, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let (slot, live) = unsafe { slot(pointer) }?;
    // Acquire pairs with the Release of `new_handle`.
    match slot.mark.load(Ordering::Acquire) {
        mark if mark == live => {}
        mark => return Err(HandleSlot::<K>::access_error(mark, live)),
    }
    // SAFETY: the slot is live, and the value of such a slot is not borrowed mutably.
    let value = unsafe { &*slot.value.get() };
    // SAFETY: the slot is live, so it has a value.
    Ok(unsafe { value.assume_init_ref() })
}

/// The failure for a handle of another kind than the function takes.
#[cold]
pub(crate) fn wrong_kind() -> ApiFailure {
    checked::report_misuse("the handle is of another kind")
}

/// A value borrowed for the duration of a callback.
pub(crate) struct Borrowed<T: ?Sized>(NonNull<T>);

impl<T: ?Sized> Borrowed<T> {
    /// # Safety
    /// The result is dropped before the borrow ends.
    pub(crate) unsafe fn new(value: &mut T) -> Self {
        Self(NonNull::from(value))
    }
}

impl<T: ?Sized> Deref for Borrowed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is borrowed until this is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl<T: ?Sized> DerefMut for Borrowed<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the value is borrowed mutably until this is dropped.
        unsafe { self.0.as_mut() }
    }
}

/// Reports misuse that is certain, and ends the process in the checked build.
mod checked {
    use std::fmt::Display;

    #[cfg(not(feature = "checked"))]
    use rustix::io::Errno;

    use crate::failure::ApiFailure;

    #[cfg(feature = "checked")]
    static LIVE: std::sync::Mutex<std::collections::BTreeSet<usize>> =
        std::sync::Mutex::new(std::collections::BTreeSet::new());

    #[cfg(feature = "checked")]
    fn live() -> std::sync::MutexGuard<'static, std::collections::BTreeSet<usize>> {
        LIVE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn add<K>(_pointer: *mut K) {
        #[cfg(feature = "checked")]
        live().insert(_pointer.addr());
    }

    #[inline]
    pub(super) fn remove<K>(_pointer: *mut K) {
        #[cfg(feature = "checked")]
        live().remove(&_pointer.addr());
    }

    /// Whether the pointer is a live handle. Only the checked build can say no.
    #[inline]
    pub(super) fn is_live<K>(_pointer: *mut K) -> bool {
        #[cfg(feature = "checked")]
        return live().contains(&_pointer.addr());
        #[cfg(not(feature = "checked"))]
        true
    }

    #[cold]
    pub(super) fn report_misuse(text: impl Display) -> ApiFailure {
        #[cfg(feature = "checked")]
        {
            eprintln!("rpcrdma: {text}");
            std::process::abort();
        }
        #[cfg(not(feature = "checked"))]
        ApiFailure::new(Errno::BADF, text)
    }
}
