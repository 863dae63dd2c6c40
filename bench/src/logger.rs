//! What the engine has to say about trouble goes to standard error: what is at least as grave as `RUST_LOG` says
//! (`error`, `warn`, `info`, `debug`, `trace`).
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

/// From now on it is shown; without `RUST_LOG` warnings and errors.
pub(crate) fn install() {
    // Only a second logger would be refused.
    if log::set_logger(&Stderr).is_ok() {
        let level = std::env::var("RUST_LOG").ok().and_then(|level| level.parse().ok());
        log::set_max_level(level.unwrap_or(LevelFilter::Warn));
    }
}
