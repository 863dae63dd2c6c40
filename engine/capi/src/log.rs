#![expect(unsafe_code, reason = "the log's function is of C")]
//! The log, passed to a function.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use log::{LevelFilter, Log, Metadata, Record};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::names::in_c;

type Function = unsafe extern "C-unwind" fn(context: *mut c_void, level: c_int, line: *const c_char);

/// Where lines go.
pub(crate) struct Sink {
    function: Function,
    context: *mut c_void,
}

impl Sink {
    /// # Safety
    /// Any thread may call `function` with `context`.
    pub(crate) unsafe fn new(function: Function, context: *mut c_void) -> Self {
        Self { function, context }
    }
}

// SAFETY: any thread may call the function.
unsafe impl Send for Sink {}
// SAFETY: as above, at once.
unsafe impl Sync for Sink {}

impl Log for Sink {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = in_c(record.args().to_string()).replace('\0', " ");
            let line = CString::new(line).unwrap_or_default();
            // SAFETY: promised to `new`.
            unsafe { (self.function)(self.context, record.level() as c_int, line.as_ptr()) }
        }
    }

    fn flush(&self) {}
}

/// The sink, once it is the log of the process.
static SINK: OnceLock<Sink> = OnceLock::new();

/// Makes it the log of the process.
pub(crate) fn install(sink: Sink, most: c_int) -> Result<(), Failure> {
    let most = match most {
        0 => LevelFilter::Off,
        1 => LevelFilter::Error,
        2 => LevelFilter::Warn,
        3 => LevelFilter::Info,
        4 => LevelFilter::Debug,
        _ => return Err(Failure::argument(format_args!("most is {most}: 0 (no lines) to 4 (debug)"))),
    };
    SINK.set(sink).map_err(|_| Failure::new(Errno::BUSY, "rpcrdma_log was called before"))?;
    let sink = SINK.get().ok_or_else(|| Failure::new(Errno::BUSY, "no log"))?;
    log::set_logger(sink).map_err(|error| Failure::new(Errno::BUSY, error))?;
    log::set_max_level(most);
    Ok(())
}
