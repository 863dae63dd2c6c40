//! Engine log on standard error, filtered by `RUST_LOG`.
//!
//! Levels: `error`, `warn`, `info`, `debug`, `trace`.
#![forbid(unsafe_code)]

use log::{LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            eprintln!("rpcperf: {}", record.args());
        }
    }

    fn flush(&self) {}
}

/// Installs the logger. Without `RUST_LOG` it prints warnings and errors.
pub(crate) fn install() {
    // Fails only if a logger is installed already.
    if log::set_logger(&Stderr).is_ok() {
        let level = std::env::var("RUST_LOG").ok().and_then(|level| level.parse().ok());
        log::set_max_level(level.unwrap_or(LevelFilter::Warn));
    }
}
