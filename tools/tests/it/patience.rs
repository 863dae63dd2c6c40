//! Waiting for conditions, and required programs.

use std::process::Command;
use std::time::{Duration, Instant};

/// Whether a program is installed; prints a line if not.
pub(crate) fn has(program: &str) -> bool {
    let there =
        Command::new(program).arg("--version").output().is_ok() || Command::new(program).arg("-V").output().is_ok();
    if !there {
        println!("not run: there is no {program} (apt-get install {program})");
    }
    there
}

/// Waits for a condition. Returns false after a time-out.
pub(crate) fn settles(mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
