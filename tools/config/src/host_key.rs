//! The option `--host-key`, which authenticates hosts by a pre-shared key in a file.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use rpcrdma::auth::{AuthPolicy, PreSharedKey};

use crate::secret_file;

/// Default ID of the host key.
pub const HOST_KEY_ID: &str = "rpcrdma";

/// Options of programs that authenticate hosts.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct HostKeyArgs {
    /// Pre-shared key of both hosts, in a file (`umask 077; openssl rand -out FILE 32` creates one)
    ///
    /// Peers without the key are refused. Traffic is not encrypted. A file that other users may read or replace is
    /// refused (`chmod 600 FILE`).
    #[arg(long, value_name = "FILE")]
    pub host_key: Option<PathBuf>,
    /// ID of the host key, the same on both hosts [default: rpcrdma, or blockstore for a block store]
    #[arg(long, value_name = "ID", requires = "host_key")]
    pub host_key_id: Option<String>,
}

impl HostKeyArgs {
    /// Returns the policy. Without a key, peers need not authenticate. `id` is the program's default ID.
    ///
    /// # Errors
    /// The file cannot be read, other users may read or replace it, or it holds no key.
    pub fn policy(&self, id: &str) -> anyhow::Result<AuthPolicy> {
        let Some(path) = &self.host_key else { return Ok(AuthPolicy::Off) };
        let id = self.host_key_id.as_deref().unwrap_or(id);
        let key = secret_file::read(path).and_then(|key| Ok(PreSharedKey::new(id, &key)?));
        Ok(AuthPolicy::Required(Arc::new(key.with_context(|| format!("--host-key {}", path.display()))?)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_that_other_users_may_read_or_write_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("key");
        std::fs::write(&path, [7; 32]).expect("space");
        let with_mode = |mode| {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("our file");
            HostKeyArgs { host_key: Some(path.clone()), host_key_id: None }.policy(HOST_KEY_ID)
        };
        assert!(matches!(with_mode(0o600), Ok(AuthPolicy::Required(_))));
        for (mode, harm) in [
            (0o620, "replace"),
            (0o602, "replace"),
            (0o666, "replace"),
            (0o640, "read"),
            (0o604, "read"),
            (0o444, "read"),
        ] {
            let error = format!("{:#}", with_mode(mode).expect_err("other users have access"));
            let real = path.canonicalize().expect("a path");
            let real = real.display();
            let expected =
                format!("{real} has mode {mode:04o}, so that other users could {harm} the key: chmod 600 {real}");
            assert!(error.starts_with("--host-key ") && error.ends_with(&expected), "{error}");
        }
        // The owner alone may read the file.
        assert!(matches!(with_mode(0o400), Ok(AuthPolicy::Required(_))));
        assert!(matches!(HostKeyArgs::default().policy(HOST_KEY_ID), Ok(AuthPolicy::Off)));
    }
}
