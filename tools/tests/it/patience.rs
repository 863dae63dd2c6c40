//! What a test waits for, and what it takes.

use std::process::Command;
use std::time::{Duration, Instant};

/// Whether there is such a program; says so if not.
pub(crate) fn has(program: &str) -> bool {
    let there =
        Command::new(program).arg("--version").output().is_ok() || Command::new(program).arg("-V").output().is_ok();
    if !there {
        println!("not run: there is no {program} (apt-get install {program})");
    }
    there
}

/// Waits until something is so: true, or false if it does not come.
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
