//! Runs programs in a terminal.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::wait::eventually;

/// A terminal, which is a session of a separate tmux server.
pub(crate) struct Terminal {
    socket: String,
    /// The last screen, which is printed if the test fails.
    pub(crate) seen: String,
}

impl Terminal {
    /// Opens a terminal of this size that runs a shell command. Its socket is in `directory`.
    pub(crate) fn open(directory: &Path, (width, height): (u32, u32), command: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let socket = directory.join(format!("tmux{number}")).display().to_string();
        let terminal = Self { socket, seen: String::new() };
        let (width, height) = (width.to_string(), height.to_string());
        // `/dev/null` replaces the user's settings.
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-s", "t", "-x", &width, "-y", &height, command]);
        terminal
    }

    pub(crate) fn tmux(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux").args(["-S", &self.socket]).args(arguments).output().expect("tmux runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Waits until the screen meets a condition.
    pub(crate) fn shows(&mut self, condition: impl Fn(&str) -> bool) -> bool {
        eventually(|| {
            self.seen = self.tmux(&["capture-pane", "-p", "-t", "t"]);
            condition(&self.seen)
        })
    }

    pub(crate) fn key(&self, key: &str) {
        self.tmux(&["send-keys", "-t", "t", key]);
    }

    /// Waits until the session has ended, which happens when its program exits.
    pub(crate) fn ends(&self) -> bool {
        eventually(|| !self.tmux(&["list-sessions"]).contains("t:"))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the screen was:\n{}", self.seen);
        }
        self.tmux(&["kill-server"]);
    }
}
