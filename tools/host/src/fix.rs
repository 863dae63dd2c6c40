//! Shell commands that fix findings, with `sudo` for users other than root.

use crate::scene::Scene;

impl Scene {
    /// A command that needs root.
    pub(crate) fn as_root(&self, command: &str) -> String {
        let sudo = if self.process().is_root() { "" } else { "sudo " };
        format!("{sudo}{command}")
    }

    /// Sets a kernel variable until the next boot.
    pub(crate) fn sysctl(&self, setting: &str) -> String {
        self.as_root(&format!("sysctl -w {setting}"))
    }

    /// Writes a value to files.
    pub(crate) fn write(&self, value: &str, paths: &[String]) -> String {
        // The shell interprets most other characters.
        let plain = value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-,.+$".contains(&b));
        let value = if plain { value.to_owned() } else { format!("'{value}'") };
        format!("echo {value} | {}", self.as_root(&format!("tee {}", paths.join(" "))))
    }
}
