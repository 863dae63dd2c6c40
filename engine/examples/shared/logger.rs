//! Where the examples' servers write what the engine logs: warnings and errors go to standard error.

use std::io::Write;

struct Log;

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let _ = writeln!(std::io::stderr(), "{}: {}", record.level(), record.args());
        }
    }

    fn flush(&self) {}
}

/// Begins to write them.
pub(crate) fn start() {
    if log::set_logger(&Log).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}
