#![expect(unsafe_code, reason = "a handle is a pointer that callers in C hold")]
//! Handles: pointers to slots, with checks of what can be seen of wrong use.
//!
//! A slot has a mark. It says the kind of the handle, and whether it is free, unused, or in use by a function. Freed
//! slots stay for the thread's next handles of the kind, so that a freed handle is seen as such until then, or until the
//! thread ends.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::LocalKey;

use rustix::io::Errno;

use crate::failure::Failure;

/// A kind of handles: the type that a pointer in C has.
pub(crate) trait Kind: Sized + 'static {
    /// What a handle stands for.
    type Value: 'static;
    /// Name of the type in C.
    const NAME: &'static str;
    /// Mark of a live handle: no other memory is likely to hold it. The last two bits are 0.
    const MARK: u64;
    /// Whether it belongs to the thread that made it.
    const BOUND: bool;

    /// Freed slots of this thread.
    fn spare() -> &'static LocalKey<Spare<Self>>;
}

/// Bits of a mark: in use by a function, or freed.
const IN_USE: u64 = 1;
const FREED: u64 = 2;
/// Most freed slots of a thread and kind to keep.
const MOST_SPARE: usize = 1024;

/// Freed slots.
pub(crate) struct Spare<K: Kind>(RefCell<Vec<Box<Slot<K>>>>);

impl<K: Kind> Spare<K> {
    pub(crate) const fn new() -> Self {
        Self(RefCell::new(Vec::new()))
    }

    /// As [`hold`], in one of these slots.
    #[inline]
    pub(crate) fn hold(&self, value: K::Value) -> *mut K {
        let mut slot = self.0.borrow_mut().pop().unwrap_or_else(Slot::freed);
        slot.thread.set(this_thread::<K>());
        slot.value.get_mut().write(value);
        // Release: with the Acquire of `Slot::claim` by another thread, which got the pointer in whatever way.
        slot.mark.store(K::MARK, Ordering::Release);
        let pointer = Box::into_raw(slot).cast();
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
    pub(crate) unsafe fn take(&self, pointer: *mut K) -> Result<K::Value, Failure> {
        // SAFETY: the caller's promise.
        let slot = unsafe { end(pointer) }?;
        // SAFETY: it was live, and has a value.
        let value = unsafe { slot.value.get().read() };
        // SAFETY: as above; its next holder gets another one.
        let value = unsafe { value.assume_init() };
        let mut spare = self.0.borrow_mut();
        if spare.len() < MOST_SPARE {
            spare.push(slot);
        }
        Ok(value)
    }
}

/// What a handle points to.
#[repr(C)]
pub(crate) struct Slot<K: Kind> {
    mark: AtomicU64,
    /// Thread that made it.
    thread: Cell<usize>,
    /// On the heap. Otherwise it ends with the function that made it, and its holder cannot free it.
    is_boxed: bool,
    /// Only a live slot has it.
    value: UnsafeCell<MaybeUninit<K::Value>>,
}

/// Tells threads apart: no two have it at one time. 0 for kinds that any thread uses.
#[inline(always)]
fn this_thread<K: Kind>() -> usize {
    if !K::BOUND {
        return 0;
    }
    // The address of a thread-local variable takes a function call in a shared library.
    #[cfg(target_arch = "x86_64")]
    {
        let pointer: usize;
        // SAFETY: the psABI has the thread pointer there, for reading.
        unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(pure, readonly, nostack, preserves_flags)) };
        pointer
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        thread_local!(static PLACE: Cell<u8> = const { Cell::new(0) });
        PLACE.with(|place| std::ptr::from_ref(place).addr())
    }
}

/// A new handle. It lives until it is [taken](take).
#[inline]
pub(crate) fn hold<K: Kind>(value: K::Value) -> *mut K {
    let mut value = Some(value);
    let held = K::spare().try_with(|spare| value.take().map(|value| spare.hold(value))).ok().flatten();
    // The thread ends, and has no spare ones any more.
    held.unwrap_or_else(|| value.map_or(std::ptr::null_mut(), |value| Spare::new().hold(value)))
}

/// Runs `body` with a handle that lives as long as it runs, and then `end` with its result and the value.
#[inline]
pub(crate) fn during<K: Kind, R, T>(
    value: K::Value,
    body: impl FnOnce(*mut K) -> R,
    end: impl FnOnce(R, &mut K::Value) -> T,
) -> T {
    let slot = Slot::<K> {
        mark: AtomicU64::new(K::MARK),
        thread: Cell::new(this_thread::<K>()),
        is_boxed: false,
        value: UnsafeCell::new(MaybeUninit::new(value)),
    };
    let pointer = std::ptr::from_ref(&slot).cast_mut().cast();
    checked::add(pointer);
    let result = body(pointer);
    checked::remove(pointer);
    slot.mark.store(K::MARK | FREED, Ordering::Relaxed);
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
    fn freed() -> Box<Self> {
        let mark = AtomicU64::new(K::MARK | FREED);
        Box::new(Self { mark, thread: Cell::new(0), is_boxed: true, value: UnsafeCell::new(MaybeUninit::uninit()) })
    }

    /// Claims a live slot for the function that runs.
    #[inline(always)]
    fn claim(&self) -> Result<(), Failure> {
        if K::BOUND {
            // No other thread writes it: the caller is the thread that may, or fails.
            let mark = self.mark.load(Ordering::Relaxed);
            if mark != K::MARK || self.thread.get() != this_thread::<K>() {
                return Err(self.unusable(mark));
            }
            self.mark.store(K::MARK | IN_USE, Ordering::Relaxed);
            return Ok(());
        }
        // Acquire: with the Release of `hold` and of the last use, on another thread.
        match self.mark.compare_exchange(K::MARK, K::MARK | IN_USE, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            Err(mark) => Err(self.unusable(mark)),
        }
    }

    #[cold]
    fn unusable(&self, mark: u64) -> Failure {
        let name = K::NAME;
        match mark ^ K::MARK {
            0 => Failure::new(Errno::PERM, format_args!("{name}: another thread made it, and only that may use it")),
            IN_USE => Failure::new(Errno::BUSY, format_args!("{name}: a function uses it now")),
            FREED => checked::wrong(format_args!("{name}: freed or answered already")),
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
    let wrong = |text| Failure::argument(format_args!("the handle {text}"));
    let pointer = NonNull::new(pointer.cast::<AtomicU64>()).ok_or_else(|| wrong("is NULL"))?;
    if !pointer.is_aligned() || !checked::knows(pointer) {
        return Err(checked::wrong("freed already, or not a handle"));
    }
    // SAFETY: the caller promises that it points to a slot, which begins with its mark.
    let mark = unsafe { pointer.as_ref() };
    Ok(mark.load(Ordering::Relaxed) & !(IN_USE | FREED))
}

/// The slot of a handle.
///
/// # Safety
/// As [`lend`].
#[inline(always)]
unsafe fn slot<'a, K: Kind>(pointer: *mut K) -> Result<&'a Slot<K>, Failure> {
    let Some(pointer) = NonNull::new(pointer.cast::<Slot<K>>()) else {
        return Err(Failure::argument(format_args!("{} is NULL", K::NAME)));
    };
    if !pointer.is_aligned() || !checked::knows(pointer) {
        return Err(checked::wrong(format_args!("{}: freed already, or not a handle", K::NAME)));
    }
    // SAFETY: the caller promises that it points to a slot, live or spare. Slots are shared, with interior mutability.
    Ok(unsafe { pointer.as_ref() })
}

/// A handle's value, for the function that runs.
pub(crate) struct Lent<'a, K: Kind>(&'a Slot<K>);

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
    let slot = unsafe { slot(pointer) }?;
    slot.claim()?;
    Ok(Lent(slot))
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

/// Ends a handle: takes its slot, which is free then.
///
/// # Safety
/// As [`take`].
#[inline]
unsafe fn end<K: Kind>(pointer: *mut K) -> Result<Box<Slot<K>>, Failure> {
    // SAFETY: the caller's promise.
    let lent = unsafe { lend(pointer) }?;
    if !lent.0.is_boxed {
        return Err(Failure::argument(format_args!("{}: it ends by itself, with the function that got it", K::NAME)));
    }
    std::mem::forget(lent);
    checked::remove(pointer);
    // SAFETY: `hold` made it by `Box::into_raw`. Nobody else has it: it was live, and is claimed now.
    let mut slot = unsafe { Box::from_raw(pointer.cast::<Slot<K>>()) };
    *slot.mark.get_mut() = K::MARK | FREED;
    Ok(slot)
}

impl<K: Kind> Deref for Lent<'_, K> {
    type Target = K::Value;

    #[inline(always)]
    fn deref(&self) -> &K::Value {
        // SAFETY: the slot is claimed for this borrow alone.
        let value = unsafe { &*self.0.value.get() };
        // SAFETY: it is live, and has a value.
        unsafe { value.assume_init_ref() }
    }
}

impl<K: Kind> DerefMut for Lent<'_, K> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut K::Value {
        // SAFETY: the slot is claimed for this borrow alone.
        let value = unsafe { &mut *self.0.value.get() };
        // SAFETY: it is live, and has a value.
        unsafe { value.assume_init_mut() }
    }
}

impl<K: Kind> Drop for Lent<'_, K> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: with the Acquire of `Slot::claim`.
        self.0.mark.store(K::MARK, Ordering::Release);
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
    let slot = unsafe { slot(pointer) }?;
    // Acquire: with the Release of `hold`.
    match slot.mark.load(Ordering::Acquire) {
        mark if mark == K::MARK => {}
        mark => return Err(slot.unusable(mark)),
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

    #[inline(always)]
    pub(super) fn add<K>(_pointer: *mut K) {
        #[cfg(feature = "checked")]
        live().insert(_pointer.addr());
    }

    #[inline(always)]
    pub(super) fn remove<K>(_pointer: *mut K) {
        #[cfg(feature = "checked")]
        live().remove(&_pointer.addr());
    }

    /// Whether it is a live handle, as far as this build knows.
    #[inline(always)]
    pub(super) fn knows<T>(_pointer: std::ptr::NonNull<T>) -> bool {
        #[cfg(feature = "checked")]
        return live().contains(&_pointer.addr().get());
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
