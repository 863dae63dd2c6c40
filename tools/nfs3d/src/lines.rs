//! Rate-limited log lines that clients cause.
#![forbid(unsafe_code)]

use std::fmt::Arguments;
use std::sync::{LazyLock, Mutex};
use std::time::Instant;

use log::Level;
use rpcrdma_fabric::log_limit::LogLimit;

use crate::lock::lock;

/// Writes a line, or counts it if its kind is over the limit. The text of `kind` follows a count,
/// as in "17 more: ".
pub(crate) fn log(level: Level, kind: &'static str, line: Arguments<'_>) {
    static LIMIT: LazyLock<(Instant, Mutex<LogLimit>)> =
        LazyLock::new(|| (Instant::now(), Mutex::new(LogLimit::new(module_path!()))));
    let (start, limit) = &*LIMIT;
    let now = start.elapsed().as_nanos() as u64;
    lock(limit).log(now, level, kind, line);
}
