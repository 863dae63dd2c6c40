//! The option `--host-key`: authentication of hosts by a pre-shared key in a file.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use rpcrdma::auth::{AuthPolicy, PreSharedKey};

use crate::secret_file;

/// ID of a key whose program has no other.
pub const HOST_KEY_ID: &str = "rpcrdma";

/// Options of programs that authenticate hosts.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct HostKeyArgs {
    /// Pre-shared key of both hosts, in a file (`openssl rand -out FILE 32` creates one)
    ///
    /// Peers without it are refused. It does not encrypt. Only its owner may have access to the file (`chmod 600`).
    #[arg(long, value_name = "FILE")]
    pub host_key: Option<PathBuf>,
    /// ID of the host key, the same at both hosts [default: rpcrdma, of a block store blockstore]
    #[arg(long, value_name = "ID", requires = "host_key")]
    pub host_key_id: Option<String>,
}

impl HostKeyArgs {
    /// The policy: without a key peers need not authenticate. `id` is the program's default ID.
    ///
    /// # Errors
    /// The file cannot be read, other users could replace it, or it holds no key.
    pub fn policy(&self, id: &str) -> anyhow::Result<AuthPolicy> {
        let Some(path) = &self.host_key else { return Ok(AuthPolicy::Off) };
        let id = self.host_key_id.as_deref().unwrap_or(id);
        let key = read(path).and_then(|key| Ok(PreSharedKey::new(id, &key)?));
        Ok(AuthPolicy::Required(Arc::new(key.with_context(|| format!("--host-key {}", path.display()))?)))
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let key = secret_file::read(path)?;
    let mode = path.metadata()?.mode() & 0o777;
    if mode & 0o044 != 0 {
        let path = path.display();
        eprintln!("warning: --host-key {path}: other users may read the file, mode {mode:03o} (chmod go-r {path})");
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_that_other_users_may_write_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("key");
        std::fs::write(&path, [7; 32]).expect("space");
        let with_mode = |mode| {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("our file");
            HostKeyArgs { host_key: Some(path.clone()), host_key_id: None }.policy(HOST_KEY_ID)
        };
        assert!(matches!(with_mode(0o600), Ok(AuthPolicy::Required(_))));
        assert!(matches!(with_mode(0o644), Ok(AuthPolicy::Required(_))));
        for mode in [0o620, 0o602, 0o666] {
            let error = format!("{:#}", with_mode(mode).expect_err("others may write it"));
            assert!(error.contains("--host-key") && error.contains("chmod go-w"), "{error}");
        }
        assert!(matches!(HostKeyArgs::default().policy(HOST_KEY_ID), Ok(AuthPolicy::Off)));
    }
}
