//! One line on standard error that says how far a long run has come.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};

/// Between two updates.
const INTERVAL_NS: u64 = 1_000_000_000;

/// The line. Written between two operations, at most once a second, and only to a terminal.
pub(crate) struct Progress {
    shown: bool,
    on: bool,
    due: u64,
    label: String,
}

impl Progress {
    /// For one measurement that starts now.
    pub(crate) fn new(label: String, now_ns: u64) -> Self {
        Self { shown: false, on: std::io::stderr().is_terminal(), due: now_ns + INTERVAL_NS, label }
    }

    /// For a measurement that nobody watches.
    pub(crate) fn silent() -> Self {
        Self { shown: false, on: false, due: u64::MAX, label: String::new() }
    }

    /// Says how far it is, if it is time to; true if it was, and so took some.
    #[inline]
    pub(crate) fn tick(&mut self, now_ns: u64, share: f64, operations: u64) -> bool {
        let due = now_ns >= self.due && self.on;
        if due {
            self.show(now_ns, share, operations);
        }
        due
    }

    #[cold]
    fn show(&mut self, now_ns: u64, share: f64, operations: u64) {
        self.due = now_ns + INTERVAL_NS;
        self.shown = true;
        // Progress that cannot be shown is no reason to stop measuring.
        let _ = write!(std::io::stderr(), "\r{}: {:3.0} %, {operations} done\x1b[K", self.label, share * 100.0);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
