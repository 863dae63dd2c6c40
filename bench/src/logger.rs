//! What the engine has to say about trouble goes to standard error.
#![forbid(unsafe_code)]

use log::{Level, LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            eprintln!("rpcperf: {}", record.args());
        }
    }

    fn flush(&self) {}
}

/// From now on, warnings and errors are shown.
pub(crate) fn install() {
    // Only a second logger would be refused.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
