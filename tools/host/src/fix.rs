//! Shell commands that fix findings, with `sudo` for users other than root.

use crate::context::CheckContext;

impl CheckContext {
    /// Returns a command that needs root, with `sudo` if necessary.
    pub(crate) fn as_root(&self, command: &str) -> String {
        let sudo = if self.process().is_root() { "" } else { "sudo " };
        format!("{sudo}{command}")
    }

    /// Returns the command that sets a kernel variable until the next boot.
    pub(crate) fn sysctl(&self, setting: &str) -> String {
        self.as_root(&format!("sysctl -w {setting}"))
    }

    /// Returns the command that writes a value to files.
    pub(crate) fn write(&self, value: &str, paths: &[String]) -> String {
        // The shell interprets most other characters.
        let needs_no_quotes = value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-,.+$".contains(&b));
        let value = if needs_no_quotes { value.to_owned() } else { format!("'{value}'") };
        format!("echo {value} | {}", self.as_root(&format!("tee {}", paths.join(" "))))
    }
}
