//! SIGINT and SIGTERM.
//!
//! The first signal ends a measurement with its results so far. A second signal, or one outside of a measurement, such
//! as while connecting, ends the process.
//!
//! A server handles no signals. Its client's request ends its measurement instead.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use rpcrdma_config::print_error;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::Failure;

/// Error in the results of an interrupted run.
pub(crate) const INTERRUPTED: &str = "interrupted by SIGINT or SIGTERM";
/// Error in the results of a run whose process a signal has ended.
const ENDED: &str =
    "interrupted by SIGINT or SIGTERM outside of a measurement, or twice: the results are those until then";
/// Exit code of a process that a signal has ended.
const EXIT: i32 = 1;

static REQUESTED: AtomicBool = AtomicBool::new(false);
static MEASURING: AtomicBool = AtomicBool::new(false);

/// Handles the signals from now on, on a separate thread. It calls `end` with the reason before it ends the process.
pub(crate) fn handle_signals(end: impl Fn(&str) + Send + 'static) -> Result<(), Failure> {
    let failed = |error| Failure::run("signal handlers", error);
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed)?;
    let handle = move || {
        for _ in signals.forever() {
            let first = !REQUESTED.swap(true, Ordering::SeqCst);
            if !(first && MEASURING.load(Ordering::SeqCst)) {
                print_error!("rpcperf: {ENDED}");
                end(ENDED);
                std::process::exit(EXIT);
            }
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(handle).map_err(failed)?;
    Ok(())
}

/// Whether a measurement is to end.
pub(crate) fn is_requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Sets whether the measurement of a server is to end.
pub(crate) fn set_requested(requested: bool) {
    REQUESTED.store(requested, Ordering::SeqCst);
}

/// Sets whether a measurement is in progress. A measurement checks [`is_requested`].
pub(crate) fn set_measuring(measuring: bool) {
    MEASURING.store(measuring, Ordering::SeqCst);
}
