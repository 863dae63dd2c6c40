#![expect(unsafe_code, reason = "frees bookkeeping that its last handle points to")]
//! Shared buffers with an owner, who is dropped with the last clone.

use std::any::Any;
use std::ptr::NonNull;

use super::{Frozen, Handle, is_owned};
use crate::core::Meta;
use crate::sync::Ordering;

/// What the clones of such a buffer point to: bookkeeping with a count of their own.
#[repr(C)]
struct Owned {
    /// The first field: the clones have its address.
    meta: Meta,
    /// It goes before the bytes: its drop may use their memory, which stays mapped meanwhile.
    _owner: Box<dyn Any + Send + Sync>,
    _bytes: Frozen,
}

impl Frozen {
    /// These bytes, with an owner. `owner` is dropped with the last clone or part of the result, on any thread: nothing
    /// reads the bytes on its behalf any more. Their buffer goes next, so their memory is still there. Allocates.
    pub fn with_owner(self, owner: impl Send + Sync + 'static) -> Self {
        let (meta, window) = (self.handle.meta().owned(), self.handle.window);
        let owned = NonNull::from(Box::leak(Box::new(Owned { meta, _owner: Box::new(owner), _bytes: self })));
        Self { handle: Handle { meta: owned.cast(), window } }
    }

    /// Whether it has an owner, who waits for its end.
    #[inline]
    #[doc(hidden)]
    pub fn has_owner(&self) -> bool {
        // Relaxed: it does not change while clones live.
        is_owned(self.handle.state().load(Ordering::Relaxed))
    }
}

/// Drops the owner.
///
/// # Safety
/// `meta` is that of [`Frozen::with_owner`], and the caller's was the last handle.
#[cold]
pub(super) unsafe fn end(meta: NonNull<Meta>) {
    // SAFETY: it is the first field of an `Owned`, which `with_owner` leaked; the pointer is to all of it.
    drop(unsafe { Box::from_raw(meta.cast::<Owned>().as_ptr()) });
}
