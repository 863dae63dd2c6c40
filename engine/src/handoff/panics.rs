//! Panics of application code.
#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs application code.
///
/// # Errors
/// Text of its panic.
#[inline(always)]
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Box<str>> {
    // It answers for the state of what it borrows.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| text(&*panic))
}

/// Text of a panic.
#[cold]
fn text(panic: &(dyn Any + Send)) -> Box<str> {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("with something else than a text").into()
}
