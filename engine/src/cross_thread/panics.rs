//! Catching of panics in application code.
#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs application code, and catches its panic.
///
/// # Errors
/// The text of the panic.
#[inline(always)]
pub(crate) fn catch_panic<T>(run: impl FnOnce() -> T) -> Result<T, Box<str>> {
    // The application is responsible for the state that it borrows.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| text(&*panic))
}

/// Text of a panic.
#[cold]
fn text(panic: &(dyn Any + Send)) -> Box<str> {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(the panic value is not a string)").into()
}
