//! Files with keys, which no other user may read or replace.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, bail};

/// Permission to read, of the group and of others.
const OTHERS_READ: u32 = 0o044;
/// Permission to write, of the group and of others.
const OTHERS_WRITE: u32 = 0o022;
/// Sticky bit of a directory: only the owner of a file may remove or rename it.
const STICKY: u32 = 0o1000;
/// Most bytes of a key that are read.
const LONGEST: u64 = 4096;

/// Reads a key.
///
/// # Errors
/// The file cannot be read. A user other than root and the user of this process owns or may write the file or a
/// directory on its path, which may be sticky. Or such a user may read the file; only root's file may be readable to
/// its group, so that a service can get a key that it may not change.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    check_directories(path)?;
    let file = File::open(path).with_context(|| path.display().to_string())?;
    check_file(&path.canonicalize().unwrap_or_else(|_| path.to_owned()), &file.metadata()?)?;
    file.take(LONGEST).read_to_end(&mut bytes).with_context(|| path.display().to_string())?;
    Ok(bytes)
}

/// Creates the file of a key, of mode 0600 whatever the umask; `None` if it exists.
///
/// # Errors
/// The file cannot be created, or a directory on its path is refused as by [`read`].
pub fn create(path: &Path) -> anyhow::Result<Option<File>> {
    check_directories(path)?;
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            file.set_permissions(PermissionsExt::from_mode(0o600)).with_context(|| path.display().to_string())?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Checks all directories above a file: of its name, and of the file that symbolic links lead to.
fn check_directories(path: &Path) -> anyhow::Result<()> {
    let named = std::path::absolute(path).with_context(|| path.display().to_string())?;
    let linked = named.canonicalize().ok();
    for directory in [Some(&named), linked.as_ref()].into_iter().flatten().flat_map(|path| path.ancestors().skip(1)) {
        let stat = directory.metadata().with_context(|| directory.display().to_string())?;
        check_owner(directory, &stat)?;
        let mode = stat.mode() & 0o7777;
        if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 {
            let shown = directory.display();
            bail!("{shown} has mode {mode:04o}, so that other users could replace the key: chmod go-w {shown}");
        }
    }
    Ok(())
}

/// Checks that no other user may read or change the file of a key.
fn check_file(path: &Path, stat: &Metadata) -> anyhow::Result<()> {
    check_owner(path, stat)?;
    let (shown, mode) = (path.display(), stat.mode() & 0o7777);
    // A service that does not run as root reads root's file as a member of its group, or by an access control list,
    // whose mask is shown in place of the group's permissions.
    let group_reads = stat.uid() != rustix::process::geteuid().as_raw();
    let readable = if group_reads { OTHERS_READ & 0o007 } else { OTHERS_READ };
    let harm = match (mode & readable != 0, mode & OTHERS_WRITE != 0) {
        (_, true) => "replace",
        (true, false) => "read",
        (false, false) => return Ok(()),
    };
    bail!("{shown} has mode {mode:04o}, so that other users could {harm} the key: chmod 600 {shown}");
}

/// Checks that a file or directory belongs to root or the user of this process.
fn check_owner(path: &Path, stat: &Metadata) -> anyhow::Result<()> {
    if stat.uid() != 0 && stat.uid() != rustix::process::geteuid().as_raw() {
        bail!(
            "{} belongs to user {}, who could replace the key: chown it to the user of this program, or use another path",
            path.display(),
            stat.uid()
        );
    }
    Ok(())
}
