//! Code of others, which may panic.
#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs what is another's.
///
/// # Errors
/// What it had to say, if it panicked.
#[inline(always)]
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Box<str>> {
    // What it has borrowed of others is its own to have left in order.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| text(&*panic))
}

/// What a panic has to say.
#[cold]
fn text(panic: &(dyn Any + Send)) -> Box<str> {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("with something else than a text").into()
}
