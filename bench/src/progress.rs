//! Progress of a long run, as one line on standard error.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};

/// Interval between updates.
const INTERVAL_NS: u64 = 1_000_000_000;

/// Progress line, written between operations, at most once a second, and only to a terminal.
pub(crate) struct Progress {
    is_shown: bool,
    is_enabled: bool,
    due: u64,
    label: String,
}

impl Progress {
    pub(crate) fn new(label: String, now_ns: u64) -> Self {
        Self { is_shown: false, is_enabled: std::io::stderr().is_terminal(), due: now_ns + INTERVAL_NS, label }
    }

    /// Progress without output.
    pub(crate) fn silent() -> Self {
        Self { is_shown: false, is_enabled: false, due: u64::MAX, label: String::new() }
    }

    /// Updates the line if it is due. Returns true after an update, which takes time.
    #[inline]
    pub(crate) fn tick(&mut self, now_ns: u64, share: f64, operations: u64) -> bool {
        let due = now_ns >= self.due && self.is_enabled;
        if due {
            self.show(now_ns, share, operations);
        }
        due
    }

    #[cold]
    fn show(&mut self, now_ns: u64, share: f64, operations: u64) {
        self.due = now_ns + INTERVAL_NS;
        self.is_shown = true;
        // A failed write must not stop the measurement.
        let _ = write!(std::io::stderr(), "\r{}: {:3.0} %, {operations} done\x1b[K", self.label, share * 100.0);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
