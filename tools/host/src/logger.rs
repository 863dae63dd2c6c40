//! A program's log on standard error.
//!
//! `RUST_LOG` sets the lowest logged level (`error`, `warn`, `info`, `debug`, `trace`; `warn` by default).

use std::io::Write;

struct Log;

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let _ = writeln!(std::io::stderr(), "{}: {}", record.level(), record.args());
        }
    }

    fn flush(&self) {}
}

/// Installs the logger, unless another one is installed.
pub fn start() {
    if log::set_logger(&Log).is_ok() {
        let level = std::env::var("RUST_LOG").ok().and_then(|level| level.parse().ok());
        log::set_max_level(level.unwrap_or(log::LevelFilter::Warn));
    }
}
