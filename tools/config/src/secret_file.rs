//! Files with secret keys, which no other user may read or replace.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail, ensure};
use rustix::fs::OFlags;

/// Read permission of the group and of others.
const OTHERS_READ: u32 = 0o044;
/// Write permission of the group and of others.
const OTHERS_WRITE: u32 = 0o022;
/// Sticky bit of a directory: only the owner of a file may remove or rename it.
const STICKY: u32 = 0o1000;
/// Maximum symbolic links on the path of a key, which is Linux's limit for any path.
const MAX_LINKS: usize = 40;
/// Maximum bytes read from the file of a key.
const MAX_LEN: u64 = 4096;

/// Reads a key.
///
/// # Errors
/// - The file cannot be read, or is not a regular file.
/// - A user other than root and the user of this process owns the file, or may write it.
/// - Such a user owns a directory on its path, or may write one that is not sticky, or owns a symbolic link in a sticky
///   directory.
/// - Such a user may read the file. A file of root may be readable to its group, so that a service can use a key
///   without the permission to change it.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let (real, file) = open(path)?;
    file.take(MAX_LEN).read_to_end(&mut bytes).with_context(|| real.display().to_string())?;
    Ok(bytes)
}

/// Checks a file that contains a key among other text.
///
/// # Errors
/// Those of [`read`].
pub fn check(path: &Path) -> anyhow::Result<()> {
    open(path).map(drop)
}

/// Opens and checks the file of a key. Returns its path without symbolic links, and the file.
fn open(path: &Path) -> anyhow::Result<(PathBuf, File)> {
    let real = resolve(path)?;
    // Opening a FIFO without a writer would block. The resolved path has no link, unless a link was created since.
    let flags = OFlags::NONBLOCK.union(OFlags::NOFOLLOW).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&real);
    let file = file.with_context(|| real.display().to_string())?;
    let stat = file.metadata().with_context(|| real.display().to_string())?;
    ensure!(stat.is_file(), "{} is not a regular file: copy the key to one", real.display());
    check_file(&real, &stat)?;
    Ok((real, file))
}

/// Creates the file of a key with mode 0600, whatever the umask. Returns `None` if it exists.
///
/// # Errors
/// The file cannot be created, or a directory or symbolic link on its path is refused as by [`read`].
pub fn create(path: &Path) -> anyhow::Result<Option<File>> {
    let real = resolve(path)?;
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&real) {
        Ok(file) => {
            file.set_permissions(PermissionsExt::from_mode(0o600)).with_context(|| real.display().to_string())?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error).with_context(|| real.display().to_string()),
    }
}

/// Resolves the symbolic links of a path, and checks each link and directory. The last component need not exist.
fn resolve(path: &Path) -> anyhow::Result<PathBuf> {
    let context = |path: &Path| path.display().to_string();
    let named = std::path::absolute(path).with_context(|| context(path))?;
    let mut names = reversed_components(&named);
    let (mut real, mut links, mut can_others_write) = (PathBuf::new(), 0, false);
    while let Some(name) = names.pop() {
        if name == ".." {
            // The parent was checked before, but its mode is needed for the next component.
            real.pop();
        } else {
            real.push(&name);
        }
        let stat = match real.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound && names.is_empty() => break,
            stat => stat.with_context(|| context(&real))?,
        };
        if stat.is_symlink() {
            if can_others_write {
                check_owner(&real, &stat)?;
            }
            links += 1;
            ensure!(links <= MAX_LINKS, "{} leads through more than {MAX_LINKS} symbolic links", path.display());
            let target = real.read_link().with_context(|| context(&real))?;
            names.append(&mut reversed_components(&target));
            real.pop();
        } else if stat.is_dir() {
            can_others_write = check_directory(&real, &stat)?;
        }
    }
    Ok(real)
}

/// Returns the components of a path, the last one first.
fn reversed_components(path: &Path) -> Vec<OsString> {
    path.components().rev().filter(|part| *part != Component::CurDir).map(|part| part.as_os_str().into()).collect()
}

/// Checks that no other user may replace files in a directory. Returns whether others may create files there.
fn check_directory(path: &Path, stat: &Metadata) -> anyhow::Result<bool> {
    check_owner(path, stat)?;
    let (shown, mode) = (path.display(), stat.mode() & 0o7777);
    let can_others_write = mode & OTHERS_WRITE != 0;
    if can_others_write && mode & STICKY == 0 {
        bail!("{shown} has mode {mode:04o}, so that other users could replace the key: chmod go-w {shown}");
    }
    Ok(can_others_write)
}

/// Checks that no other user may read or change the file of a key.
fn check_file(path: &Path, stat: &Metadata) -> anyhow::Result<()> {
    check_owner(path, stat)?;
    let (shown, mode) = (path.display(), stat.mode() & 0o7777);
    // A service that does not run as root reads root's file as a member of its group, or by an access control list,
    // whose mask stat reports instead of the group's permissions.
    let can_group_read = stat.uid() != rustix::process::geteuid().as_raw();
    let forbidden_read = if can_group_read { OTHERS_READ & 0o007 } else { OTHERS_READ };
    let harm = match (mode & forbidden_read != 0, mode & OTHERS_WRITE != 0) {
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
