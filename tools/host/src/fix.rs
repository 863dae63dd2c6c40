//! The commands that mend what was found: lines for a shell, with `sudo` where somebody else than root reads them.

use crate::scene::Scene;

impl Scene {
    /// A command that root must give.
    pub(crate) fn as_root(&self, command: &str) -> String {
        let sudo = if self.process().is_root() { "" } else { "sudo " };
        format!("{sudo}{command}")
    }

    /// Sets a variable of the kernel; it holds until the next boot.
    pub(crate) fn sysctl(&self, setting: &str) -> String {
        self.as_root(&format!("sysctl -w {setting}"))
    }

    /// Writes a value to files.
    pub(crate) fn write(&self, value: &str, paths: &[String]) -> String {
        // A shell has its own meaning for most of what is no part of a word.
        let plain = value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-,.+$".contains(&b));
        let value = if plain { value.to_owned() } else { format!("'{value}'") };
        format!("echo {value} | {}", self.as_root(&format!("tee {}", paths.join(" "))))
    }
}
