//! Rate-limited log lines of clients.
#![forbid(unsafe_code)]

use std::fmt::Arguments;
use std::sync::{LazyLock, Mutex};
use std::time::Instant;

use log::Level;
use rpcrdma_fabric::log_limit::LogLimit;

use crate::lock::lock;

/// Writes or counts a line of a kind, in words that fit behind "17 more: ".
pub(crate) fn log(level: Level, what: &'static str, line: Arguments<'_>) {
    static LIMIT: LazyLock<(Instant, Mutex<LogLimit>)> =
        LazyLock::new(|| (Instant::now(), Mutex::new(LogLimit::new(module_path!()))));
    let (began, limit) = &*LIMIT;
    let now = began.elapsed().as_nanos() as u64;
    lock(limit).log(now, level, what, line);
}
