#![expect(unsafe_code, reason = "a handle is a pointer that callers in C hold")]
//! Handles: pointers to slots, with checks of what can be seen of wrong use.
//!
//! A slot has a mark. It says the kind of the handle, and whether it is free, unused, or in use by a function. Slots
//! are used again, and never go back to the allocator: a freed handle points to a slot. The handles of a slot differ in
//! their upper bits, which no address has, and the mark has those of the present one. The same handle comes again after
//! 65,536 others of its slot.

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

use crate::arguments::null;
use crate::failure::Failure;

/// A kind of handles: the type that a pointer in C has.
pub(crate) trait Kind: Sized + 'static {
    /// What a handle stands for.
    type Value: 'static;
    /// Name of the type in C.
    const NAME: &'static str;
    /// Mark of a live handle: no other memory is likely to hold it. The last two bits, and those of a tag, are 0.
    const MARK: u64;
    /// Whether it belongs to the thread that made it.
    const BOUND: bool;
    /// Whether a slot's handles differ. Those of the others are plain pointers, which leak checkers know.
    const TAGGED: bool;

    /// Free slots of this thread.
    fn spare() -> &'static LocalKey<Spare<Self>>;
    /// Free slots of all threads.
    fn common() -> &'static Common<Self>;
}

/// Bits of a mark: in use by a function, or freed.
const IN_USE: u64 = 1;
const FREED: u64 = 2;
/// Bits of a handle, and of its mark, that tell it from others of its slot.
const TAG: u64 = 0xffff << 48;
const TAG_SHIFT: u32 = TAG.trailing_zeros();
/// Free slots that a thread takes from the common ones, or gives to them, at once.
const BATCH: usize = 64;

/// A free slot.
struct Free<K: Kind>(&'static Slot<K>);

// SAFETY: it has no value, and nobody has a handle of it that is not freed.
unsafe impl<K: Kind> Send for Free<K> {}

/// Free slots of all threads.
pub(crate) struct Common<K: Kind>(Mutex<Vec<Free<K>>>);

impl<K: Kind> Common<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Moves up to [`BATCH`] of them to a thread's.
    #[cold]
    fn move_to(&self, spare: &mut Vec<Free<K>>) {
        let mut common = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = common.len().saturating_sub(BATCH);
        spare.extend(common.drain(rest..));
    }

    /// Takes all but `rest` of a thread's.
    #[cold]
    fn take_from(&self, spare: &mut Vec<Free<K>>, rest: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(spare.drain(rest..));
    }
}

/// Free slots of a thread.
pub(crate) struct Spare<K: Kind>(RefCell<Vec<Free<K>>>);

impl<K: Kind> Drop for Spare<K> {
    fn drop(&mut self) {
        K::common().take_from(self.0.get_mut(), 0);
    }
}

impl<K: Kind> Spare<K> {
    pub(crate) const fn new() -> Self {
        Self(RefCell::new(Vec::new()))
    }

    /// As [`hold`], in one of these slots.
    #[inline]
    fn hold(&self, value: K::Value) -> *mut K {
        let mut spare = self.0.borrow_mut();
        if spare.is_empty() {
            K::common().move_to(&mut spare);
        }
        let Free(slot) = spare.pop().unwrap_or_else(Slot::free);
        // Relaxed, as in `end`: a thread that gets a free slot from another synchronizes by `Common`.
        let before = (slot.mark.load(Ordering::Relaxed) ^ K::MARK) >> TAG_SHIFT;
        let tag = if K::TAGGED { before.wrapping_add(1) << TAG_SHIFT } else { 0 };
        slot.thread.store(this_thread::<K>(), Ordering::Relaxed);
        // SAFETY: it is free: only this function has its value.
        let place = unsafe { &mut *slot.value.get() };
        place.write(value);
        // Release: with the Acquire of `Slot::claim` by another thread, which got the pointer in whatever way.
        slot.mark.store(K::MARK ^ tag, Ordering::Release);
        let pointer = tagged(std::ptr::from_ref(slot).cast_mut(), tag);
        checked::add(pointer);
        pointer
    }

    /// As [`take`]; the slot is one of these then.
    ///
    /// # Errors
    /// As [`lend`].
    ///
    /// # Safety
    /// As [`take`].
    #[inline]
    unsafe fn take(&self, pointer: *mut K) -> Result<K::Value, Failure> {
        // SAFETY: the caller's promise.
        let slot = unsafe { end(pointer) }?;
        // SAFETY: it was live, and has a value.
        let value = unsafe { slot.value.get().read() };
        // SAFETY: as above; its next holder gets another one.
        let value = unsafe { value.assume_init() };
        let mut spare = self.0.borrow_mut();
        spare.push(Free(slot));
        if spare.len() == 2 * BATCH {
            K::common().take_from(&mut spare, BATCH);
        }
        Ok(value)
    }
}

/// The handle of a slot.
#[inline]
fn tagged<K: Kind>(slot: *mut Slot<K>, tag: u64) -> *mut K {
    slot.cast::<K>().map_addr(|address| address | tag as usize)
}

/// The slot of a handle, and the mark of a live one.
#[inline]
fn untagged<K: Kind>(pointer: *mut K) -> (*mut Slot<K>, u64) {
    let tag = if K::TAGGED { pointer.addr() as u64 & TAG } else { 0 };
    (pointer.cast::<Slot<K>>().map_addr(|address| address & !TAG as usize), K::MARK ^ tag)
}

/// What a handle points to.
#[repr(C)]
pub(crate) struct Slot<K: Kind> {
    mark: AtomicU64,
    /// Thread that uses it; [`DETACHED`] if none does. 0 for kinds that any thread uses.
    thread: AtomicU64,
    /// On the heap. Otherwise it ends with the function that made it, and its holder cannot free it.
    is_boxed: bool,
    /// Only a live slot has it.
    value: UnsafeCell<MaybeUninit<K::Value>>,
}

/// Tells threads apart: no two have it at one time. 0 for kinds that any thread uses.
#[inline]
fn this_thread<K: Kind>() -> u64 {
    if K::BOUND { rpcrdma_mempool::current_thread() } else { 0 }
}

/// A new handle. It lives until it is [taken](take).
#[inline]
pub(crate) fn hold<K: Kind>(value: K::Value) -> *mut K {
    let mut value = Some(value);
    let held = K::spare().try_with(|spare| value.take().map(|value| spare.hold(value))).ok().flatten();
    // The thread ends, and has no spare ones any more.
    held.unwrap_or_else(|| value.map_or(std::ptr::null_mut(), |value| Spare::new().hold(value)))
}

thread_local!(static NUMBERS: Numbers = Numbers(Rc::default()));

/// Numbers of a thread's handles that end with their function: each is another one.
pub(crate) struct Numbers(Rc<Cell<u16>>);

impl Numbers {
    /// Numbers of a handle that no thread uses.
    pub(crate) fn of_nobody() -> Self {
        Self(Rc::default())
    }

    pub(crate) fn of_thread() -> Self {
        // An ending thread has others.
        NUMBERS.try_with(|own| Self(Rc::clone(&own.0))).unwrap_or_else(|_| Self(Rc::default()))
    }

    #[inline]
    pub(crate) fn next(&self) -> u16 {
        self.0.set(self.0.get().wrapping_add(1));
        self.0.get()
    }

    /// As [`next`](Self::next) of [`of_thread`](Self::of_thread).
    #[inline]
    pub(crate) fn next_of_thread() -> u16 {
        NUMBERS.try_with(Self::next).unwrap_or_default()
    }
}

/// Runs `body` with a handle that lives as long as it runs, and then `end` with its result and the value. A number
/// makes the handle another one than those before it.
#[inline(always)]
pub(crate) fn during<K: Kind, R, T>(
    number: u16,
    value: K::Value,
    body: impl FnOnce(*mut K) -> R,
    end: impl FnOnce(R, &mut K::Value) -> T,
) -> T {
    let tag = u64::from(number) << TAG_SHIFT;
    let slot = Slot::<K> {
        mark: AtomicU64::new(K::MARK ^ tag),
        thread: AtomicU64::new(this_thread::<K>()),
        is_boxed: false,
        value: UnsafeCell::new(MaybeUninit::new(value)),
    };
    let pointer = tagged(std::ptr::from_ref(&slot).cast_mut(), tag);
    checked::add(pointer);
    let result = body(pointer);
    checked::remove(pointer);
    // A thread that uses it still, against the contract, ends first.
    while !K::BOUND && slot.claim(K::MARK ^ tag).is_err() {
        std::thread::yield_now();
    }
    slot.mark.store((K::MARK ^ tag) | FREED, Ordering::Relaxed);
    // SAFETY: nobody has the handle any more.
    let value = unsafe { &mut *slot.value.get() };
    // SAFETY: it was written above, and nobody could take it.
    let result = end(result, unsafe { value.assume_init_mut() });
    // SAFETY: as above; it ends here.
    unsafe { value.assume_init_drop() };
    result
}

impl<K: Kind> Slot<K> {
    #[cold]
    fn free() -> Free<K> {
        let mark = AtomicU64::new(K::MARK | FREED);
        let value = UnsafeCell::new(MaybeUninit::uninit());
        Free(Box::leak(Box::new(Self { mark, thread: AtomicU64::new(0), is_boxed: true, value })))
    }

    /// Claims a live slot with this mark for the function that runs.
    ///
    /// # Errors
    /// The mark that it has.
    #[inline]
    fn claim(&self, live: u64) -> Result<(), u64> {
        if K::BOUND {
            // No other thread writes it: the caller is the thread that may, or fails.
            let mark = self.mark.load(Ordering::Relaxed);
            if mark != live || self.thread.load(Ordering::Relaxed) != this_thread::<K>() {
                return Err(mark);
            }
            self.mark.store(live | IN_USE, Ordering::Relaxed);
            return Ok(());
        }
        // Acquire: with the Release of `hold` and of the last use, on another thread.
        self.mark.compare_exchange(live, live | IN_USE, Ordering::Acquire, Ordering::Relaxed).map(|_| ())
    }

    /// Why a handle cannot be used whose live slot would have the mark `live`.
    #[cold]
    #[inline(never)]
    fn unusable(mark: u64, live: u64) -> Failure {
        let name = K::NAME;
        match mark ^ live {
            0 => Failure::new(
                Errno::PERM,
                format_args!(
                    "{name}: another thread uses it, or none (rpcrdma_detach there and rpcrdma_attach here pass it on; \
                     the end of its thread detaches it, too)"
                ),
            ),
            IN_USE => Failure::new(Errno::BUSY, format_args!("{name}: a function uses it now")),
            // Freed, or the mark of a later handle of the slot.
            other if other & !(TAG | IN_USE | FREED) == 0 => {
                checked::wrong(format_args!("{name}: freed or answered already"))
            }
            _ => checked::wrong(format_args!("{name}: not a handle of this kind")),
        }
    }
}

/// The mark of a handle of any kind, to tell the kind.
///
/// # Errors
/// As [`lend`].
///
/// # Safety
/// As [`lend`].
pub(crate) unsafe fn mark_of(pointer: *mut c_void) -> Result<u64, Failure> {
    let known = checked::knows(pointer);
    let pointer = pointer.cast::<AtomicU64>().map_addr(|address| address & !TAG as usize);
    let pointer = NonNull::new(pointer).ok_or_else(|| Failure::argument("the handle is NULL"))?;
    if !pointer.is_aligned() || !known {
        return Err(checked::wrong("freed already, or not a handle"));
    }
    // SAFETY: the caller promises that it points to a slot, which begins with its mark.
    let mark = unsafe { pointer.as_ref() };
    Ok(mark.load(Ordering::Relaxed) & !(TAG | IN_USE | FREED))
}

/// The slot of a handle, and the mark of a live one.
///
/// # Safety
/// As [`lend`].
#[inline(always)]
unsafe fn slot<'a, K: Kind>(pointer: *mut K) -> Result<(&'a Slot<K>, u64), Failure> {
    let (slot, live) = untagged(pointer);
    let Some(slot) = NonNull::new(slot) else { return Err(null(K::NAME)) };
    if !slot.is_aligned() || !checked::knows(pointer) {
        return Err(checked::wrong(format_args!("{}: freed already, or not a handle", K::NAME)));
    }
    // SAFETY: the caller promises that it points to a slot, live or free. Slots are shared, with interior mutability.
    Ok((unsafe { slot.as_ref() }, live))
}

/// Marks a handle that no thread uses: no thread has this number.
const DETACHED: u64 = u64::MAX;

/// Detaches a handle from this thread, after `leave` has prepared its value: any thread may [attach](attach) it then.
///
/// # Errors
/// As [`lend`].
///
/// # Safety
/// As [`lend`].
pub(crate) unsafe fn detach<K: Kind>(
    pointer: *mut K,
    leave: impl FnOnce(&mut K::Value) -> Result<(), Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let mut lent = unsafe { lend(pointer) }?;
    leave(&mut lent)?;
    let slot = lent.slot;
    drop(lent);
    // Release: with the Acquire of `attach`.
    slot.thread.store(DETACHED, Ordering::Release);
    Ok(())
}

/// Attaches a detached handle to this thread, and has `enter` prepare its value. True if it was detached, false if it
/// is this thread's already.
///
/// # Errors
/// As [`lend`].
///
/// # Safety
/// As [`lend`].
pub(crate) unsafe fn attach<K: Kind>(pointer: *mut K, enter: impl FnOnce(&mut K::Value)) -> Result<bool, Failure> {
    // SAFETY: the caller's promise.
    let (slot, live) = unsafe { slot(pointer) }?;
    let is_live = slot.mark.load(Ordering::Relaxed) == live;
    // Acquire: with the Release of `detach`. One of several threads wins.
    let own = this_thread::<K>();
    let taken = is_live && slot.thread.compare_exchange(DETACHED, own, Ordering::Acquire, Ordering::Relaxed).is_ok();
    // SAFETY: the caller's promise.
    let mut lent = unsafe { lend(pointer) }?;
    if taken {
        enter(&mut lent);
    }
    Ok(taken)
}

/// A handle's value, for the function that runs.
pub(crate) struct Lent<'a, K: Kind> {
    slot: &'a Slot<K>,
    /// Its mark while no function uses it.
    live: u64,
}

/// The value of a handle, exclusively.
///
/// # Errors
/// EINVAL: it is null. EBADF: it is of another kind, or freed. EBUSY: a function uses it. EPERM: wrong thread.
///
/// # Safety
/// `pointer` is null or came from this library. If it was freed, the errors above are likely, but not certain.
#[inline(always)]
pub(crate) unsafe fn lend<'a, K: Kind>(pointer: *mut K) -> Result<Lent<'a, K>, Failure> {
    // SAFETY: as the caller's.
    let (slot, live) = unsafe { slot(pointer) }?;
    match slot.claim(live) {
        Ok(()) => Ok(Lent { slot, live }),
        Err(mark) => Err(Slot::<K>::unusable(mark, live)),
    }
}

/// As [`lend`], for a handle that was live, after a function of the application: `None` if that has freed it.
///
/// # Safety
/// As [`lend`]; and it is not null.
#[inline]
pub(crate) unsafe fn lend_again<'a, K: Kind>(pointer: *mut K) -> Option<Lent<'a, K>> {
    let (slot, live) = untagged(pointer);
    // SAFETY: it points to a slot, as it did before.
    let slot = unsafe { &*slot };
    slot.claim(live).ok().map(|()| Lent { slot, live })
}

/// Takes the value of a handle, which ends.
///
/// # Errors
/// As [`lend`].
///
/// # Safety
/// As [`lend`]; and it came from [`hold`].
#[inline]
pub(crate) unsafe fn take<K: Kind>(pointer: *mut K) -> Result<K::Value, Failure> {
    // SAFETY: the caller's promise.
    let taken = K::spare().try_with(|spare| unsafe { spare.take(pointer) });
    // SAFETY: the caller's promise.
    taken.unwrap_or_else(|_| unsafe { Spare::new().take(pointer) })
}

/// Gives a handle that [`take`] has ended its value back: it is live again.
///
/// # Safety
/// As [`take`], which has ended it on this thread. No handle was made since.
#[cold]
pub(crate) unsafe fn revive<K: Kind>(pointer: *mut K, value: K::Value) {
    let (slot, live) = untagged(pointer);
    let free = |spare: &mut Vec<Free<K>>| {
        let at = spare.iter().rposition(|Free(free)| std::ptr::eq(*free, slot))?;
        Some(spare.swap_remove(at))
    };
    let found = K::spare().try_with(|spare| free(&mut spare.0.borrow_mut())).ok().flatten();
    // `take` may have moved it there. If another thread has its slot now, the handle stays ended.
    let found = found.or_else(|| free(&mut K::common().0.lock().unwrap_or_else(PoisonError::into_inner)));
    let Some(Free(slot)) = found else { return };
    // SAFETY: it is free: only this function has its value.
    let place = unsafe { &mut *slot.value.get() };
    place.write(value);
    slot.thread.store(this_thread::<K>(), Ordering::Relaxed);
    slot.mark.store(live, Ordering::Release);
    checked::add(pointer);
}

/// Ends a handle: takes its slot, which is free then.
///
/// # Safety
/// As [`take`].
#[inline]
unsafe fn end<K: Kind>(pointer: *mut K) -> Result<&'static Slot<K>, Failure> {
    // SAFETY: the caller's promise.
    let lent = unsafe { lend::<K>(pointer) }?;
    let (slot, live) = (lent.slot, lent.live);
    if !slot.is_boxed {
        return Err(Failure::argument(format_args!("{}: it ends by itself, with the function that got it", K::NAME)));
    }
    std::mem::forget(lent);
    checked::remove(pointer);
    slot.mark.store(live | FREED, Ordering::Relaxed);
    Ok(slot)
}

impl<K: Kind> Deref for Lent<'_, K> {
    type Target = K::Value;

    #[inline]
    fn deref(&self) -> &K::Value {
        // SAFETY: the slot is claimed for this borrow alone.
        let value = unsafe { &*self.slot.value.get() };
        // SAFETY: it is live, and has a value.
        unsafe { value.assume_init_ref() }
    }
}

impl<K: Kind> DerefMut for Lent<'_, K> {
    #[inline]
    fn deref_mut(&mut self) -> &mut K::Value {
        // SAFETY: the slot is claimed for this borrow alone.
        let value = unsafe { &mut *self.slot.value.get() };
        // SAFETY: it is live, and has a value.
        unsafe { value.assume_init_mut() }
    }
}

impl<K: Kind> Drop for Lent<'_, K> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: with the Acquire of `Slot::claim`.
        self.slot.mark.store(self.live, Ordering::Release);
    }
}

/// The value of a handle that any number of threads use at once.
///
/// # Errors
/// As [`lend`]. Such handles are never busy.
///
/// # Safety
/// As [`lend`]. Nobody frees it meanwhile, and nobody [lends](lend) handles of the kind.
#[inline]
pub(crate) unsafe fn share<'a, K: Kind<Value: Sync>>(pointer: *mut K) -> Result<&'a K::Value, Failure> {
    // SAFETY: as the caller's.
    let (slot, live) = unsafe { slot(pointer) }?;
    // Acquire: with the Release of `hold`.
    match slot.mark.load(Ordering::Acquire) {
        mark if mark == live => {}
        mark => return Err(Slot::<K>::unusable(mark, live)),
    }
    // SAFETY: it is live, and the value of such a slot is not borrowed mutably.
    let value = unsafe { &*slot.value.get() };
    // SAFETY: as above.
    Ok(unsafe { value.assume_init_ref() })
}

/// A handle of another kind than the function takes.
#[cold]
pub(crate) fn foreign() -> Failure {
    checked::wrong("the handle is of another kind")
}

/// Something borrowed for the time of a callback.
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
        // SAFETY: it is borrowed until this is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl<T: ?Sized> DerefMut for Borrowed<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, mutably.
        unsafe { self.0.as_mut() }
    }
}

/// Wrong use that is certain: ends the process in the checked build.
mod checked {
    use std::fmt::Display;

    #[cfg(not(feature = "checked"))]
    use rustix::io::Errno;

    use crate::failure::Failure;

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

    /// Whether it is a live handle, as far as this build knows.
    #[inline]
    pub(super) fn knows<K>(_pointer: *mut K) -> bool {
        #[cfg(feature = "checked")]
        return live().contains(&_pointer.addr());
        #[cfg(not(feature = "checked"))]
        true
    }

    #[cold]
    pub(super) fn wrong(text: impl Display) -> Failure {
        #[cfg(feature = "checked")]
        {
            eprintln!("rpcrdma: {text}");
            std::process::abort();
        }
        #[cfg(not(feature = "checked"))]
        Failure::new(Errno::BADF, text)
    }
}
