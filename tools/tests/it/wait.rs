//! Waiting for conditions, and required programs.

use std::process::Command;
use std::time::{Duration, Instant};

/// Whether a program is installed; prints a line if not.
pub(crate) fn has(program: &str) -> bool {
    let is_installed =
        Command::new(program).arg("--version").output().is_ok() || Command::new(program).arg("-V").output().is_ok();
    if !is_installed {
        println!("not run: {program} is missing (apt-get install {program})");
    }
    is_installed
}

/// Waits until a condition is true. Returns false after a time-out.
pub(crate) fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if condition() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
