//! Locks that a panic of another holder does not break.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also one whose earlier holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
