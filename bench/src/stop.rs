//! SIGINT and SIGTERM: the first ends the measurement with its results so far, the second ends the process.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::failure::Failure;

/// What the results of an interrupted run say.
pub(crate) const INTERRUPTED: &str = "interrupted by SIGINT or SIGTERM: the figures are those until then";
/// Exit code of the second signal.
const EXIT: i32 = 1;

static REQUESTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Handles the signals from now on.
pub(crate) fn on_signals() -> Result<(), Failure> {
    let requested = REQUESTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        // In this order, so that the first signal only sets the flag.
        flag::register_conditional_shutdown(signal, EXIT, Arc::clone(requested))
            .and_then(|_| flag::register(signal, Arc::clone(requested)))
            .map_err(|error| Failure::run("signal handlers", error))?;
    }
    Ok(())
}

/// Whether a signal has come.
pub(crate) fn is_requested() -> bool {
    REQUESTED.get().is_some_and(|requested| requested.load(Ordering::Relaxed))
}
