#![expect(unsafe_code, reason = "calls the application's C log function")]
//! Logger that passes lines to the application's function.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use log::{LevelFilter, Log, Metadata, Record};
use rustix::io::Errno;

use crate::failure::ApiFailure;
use crate::names::to_c_names;

type LogFunction = unsafe extern "C-unwind" fn(context: *mut c_void, level: c_int, line: *const c_char);

/// The function that gets the lines.
pub(crate) struct LogSink {
    function: LogFunction,
    context: *mut c_void,
}

impl LogSink {
    /// # Safety
    /// Any thread may call `function` with `context`, also concurrently.
    pub(crate) unsafe fn new(function: LogFunction, context: *mut c_void) -> Self {
        Self { function, context }
    }
}

// SAFETY: the caller of `new` guarantees that any thread may call the function.
unsafe impl Send for LogSink {}
// SAFETY: the caller of `new` guarantees that threads may call the function concurrently.
unsafe impl Sync for LogSink {}

impl Log for LogSink {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = to_c_names(record.args().to_string()).replace('\0', " ");
            let line = CString::new(line).unwrap_or_default();
            // SAFETY: the caller of `new` guarantees it.
            unsafe { (self.function)(self.context, record.level() as c_int, line.as_ptr()) }
        }
    }

    fn flush(&self) {}
}

/// The log of the process, once installed.
static LOG_SINK: OnceLock<LogSink> = OnceLock::new();

/// Makes `sink` the log of the process.
pub(crate) fn install(sink: LogSink, highest: c_int) -> Result<(), ApiFailure> {
    let max_level = match highest {
        0 => LevelFilter::Off,
        1 => LevelFilter::Error,
        2 => LevelFilter::Warn,
        3 => LevelFilter::Info,
        4 => LevelFilter::Debug,
        _ => {
            return Err(ApiFailure::argument(format_args!(
                "max_level is {highest}: expected 0 (no lines) to 4 (debug)"
            )));
        }
    };
    LOG_SINK.set(sink).map_err(|_| ApiFailure::new(Errno::BUSY, "rpcrdma_log was called before"))?;
    let sink = LOG_SINK.get().ok_or_else(|| ApiFailure::new(Errno::BUSY, "no log"))?;
    log::set_logger(sink).map_err(|error| ApiFailure::new(Errno::BUSY, error))?;
    log::set_max_level(max_level);
    Ok(())
}
