//! Mutual exclusion of one user's processes that bind the same socket file.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::kind_and_owner;
use crate::FabricError;
use crate::error::failed;

/// Longest wait for a lock, which is held only for a few system calls.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for a lock on a file that other users can lock.
const FOREIGN_TIMEOUT: Duration = Duration::from_millis(200);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// Lock that keeps other processes from replacing the socket file of this name; dropping it releases the lock.
///
/// The lock is held on a file beside the socket, `.NAME.rpcrdma-lock`, which exists only while the lock is held. A lock
/// that others can hold would let any user of the host block the start of servers. So the file must belong to this
/// user, with mode 0600 and a single link. Any other file in its place is removed, if this user has the right to do so.
/// Other users cannot put such a file into a directory that only the server's user can write to.
#[derive(Debug)]
pub(super) struct BindLock {
    file: File,
    path: PathBuf,
}

impl BindLock {
    /// Waits for the lock to bind `path`, for [`TIMEOUT`] at most. Error texts call the socket `name`.
    ///
    /// # Errors
    /// The directory is missing or not writable; or the lock file cannot be removed, or is locked for longer. The error
    /// names the file's path and owner.
    pub(super) fn acquire(name: &str, path: &Path) -> Result<Self, FabricError> {
        let lock = lock_path(path);
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            let file = match open(&lock) {
                Ok(file) => file,
                // Another process has just created the file.
                Err(Errno::EXIST | Errno::INTR) => continue,
                Err(error @ (Errno::MFILE | Errno::NFILE)) => {
                    return Err(failed(&format!("open {}", lock.display()), error));
                }
                // Nothing is at the path, so the directory is at fault.
                Err(error) if std::fs::symlink_metadata(&lock).is_err() => {
                    return Err(FabricError::address(name, directory_error(path, error)));
                }
                // A link, a directory, or a file that this user may not even open.
                Err(_) => {
                    remove_foreign_file(name, &lock)?;
                    continue;
                }
            };
            let ours = is_ours(&file);
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The previous holder has removed the file: create a new one.
                Ok(()) if !is_at(&file, &lock) => {}
                Ok(()) if ours => return Ok(Self { file, path: lock }),
                // Another user's server was killed while it held the lock, or an attacker created the file.
                Ok(()) => remove_foreign_file(name, &lock)?,
                Err(Errno::WOULDBLOCK | Errno::INTR) if ours || start.elapsed() < FOREIGN_TIMEOUT => {
                    std::thread::sleep(PAUSE);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) if is_at(&file, &lock) => remove_foreign_file(name, &lock)?,
                // Another process of this user has replaced the file: try again with the new one.
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(FabricError::address(name, format!("flock {}: {error}", lock.display()))),
            }
        }
        let (shown, owner) = (lock.display(), kind_and_owner(&lock).unwrap_or_default());
        let detail = format!("{shown}, {owner}, has been locked (flock) for longer than {TIMEOUT:?}");
        Err(FabricError::address(name, format!("{detail}; `fuser -v {shown}` shows by which process")))
    }
}

impl Drop for BindLock {
    fn drop(&mut self) {
        if is_at(&self.file, &self.path) {
            // While the file is locked, no other process uses it. A file that cannot be removed is reused.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The lock file of a socket file.
fn lock_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.rpcrdma-lock"))
}

/// Opens the file, or creates it.
fn open(lock: &Path) -> Result<File, Errno> {
    // Links are not followed, and opening a pipe does not block.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let create = |error| match error {
        Errno::NOENT => rustix::fs::open(lock, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR),
        error => Err(error),
    };
    rustix::fs::open(lock, flags, Mode::empty()).or_else(create).map(File::from)
}

/// Whether no other user can hold a lock on the file.
fn is_ours(file: &File) -> bool {
    let user = rustix::process::geteuid().as_raw();
    file.metadata().is_ok_and(|m| m.is_file() && m.uid() == user && m.mode() & 0o077 == 0 && m.nlink() <= 1)
}

/// Whether the file is still the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let at_path = std::fs::symlink_metadata(path);
    file.metadata().is_ok_and(|own| at_path.is_ok_and(|m| (m.dev(), m.ino()) == (own.dev(), own.ino())))
}

/// Removes a foreign file in the lock file's place.
fn remove_foreign_file(name: &str, lock: &Path) -> Result<(), FabricError> {
    let owner = kind_and_owner(lock).unwrap_or_default();
    match std::fs::remove_file(lock).or_else(|error| std::fs::remove_dir(lock).map_err(|_| error)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let shown = lock.display();
            let remedy = "remove it, or use a directory that only the server's user may write to";
            let detail = format!("cannot remove {shown}, {owner}, which blocks the lock file: {error}; {remedy}");
            Err(FabricError::address(name, detail))
        }
        _ => Ok(()),
    }
}

fn directory_error(path: &Path, error: Errno) -> String {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match error {
        Errno::NOENT => format!("directory {}: {error}; create it first", parent.display()),
        Errno::NOTDIR => format!("directory {}: {error}; choose another path", parent.display()),
        error => format!("directory {}: {error}; its owner must permit this user to create files", parent.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fd::AsFd;
    use rustix::fs::Uid;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;
    use crate::FabricErrorKind;
    use crate::socket_file::SocketFile;

    const NOBODY: u32 = 65534;
    const ANOTHER: u32 = 65533;

    /// Runs `work` as another user, on its own thread.
    fn as_user<T: Send>(user: u32, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let run = || {
                let user = Uid::from_raw(user);
                rustix::thread::set_thread_res_uid(user, user, user).expect("root may");
                work()
            };
            scope.spawn(run).join().expect("no panic")
        })
    }

    /// A world-writable directory like /tmp; `None` unless this process is root.
    fn public_directory() -> Option<tempfile::TempDir> {
        if !rustix::process::geteuid().is_root() {
            println!("not run: needs root, to act as another user");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o1777)).expect("chmod");
        Some(directory)
    }

    fn listen(path: &Path) -> Result<SocketFile, FabricError> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        SocketFile::listen(socket.expect("a socket").as_fd(), path, 8)
    }

    fn acquire_flock(path: &Path) -> File {
        let file = File::options().read(true).open(path).expect("it may be read");
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).expect("it is free");
        file
    }

    #[test]
    fn foreign_locks_do_not_prevent_a_server_from_starting() {
        let Some(directory) = public_directory() else { return };
        let path = directory.path().join("server");
        let lock = lock_path(&path);
        let held = as_user(NOBODY, || {
            std::fs::write(&lock, "").expect("any user may");
            (acquire_flock(directory.path()), acquire_flock(&lock))
        });
        drop(listen(&path).expect("root may remove it"));
        // Other kinds of files in the lock file's place, and a file of ours that others may open.
        as_user(NOBODY, || symlink("/etc/hostname", &lock).expect("any user may"));
        drop(listen(&path).expect("a link"));
        as_user(NOBODY, || std::fs::create_dir(&lock).expect("any user may"));
        drop(listen(&path).expect("a directory with nothing in it"));
        std::fs::write(&lock, "").expect("ours");
        std::fs::set_permissions(&lock, std::fs::Permissions::from_mode(0o666)).expect("chmod");
        let held = as_user(NOBODY, || (held, acquire_flock(&lock)));
        drop(listen(&path).expect("a file of ours that all may open"));
        assert_eq!(std::fs::read_dir(directory.path()).expect("it is there").count(), 0, "nothing is left behind");
        drop(held);
    }

    #[test]
    fn a_file_that_cannot_be_removed_is_reported_with_its_owner() {
        let Some(directory) = public_directory() else { return };
        let path = directory.path().join("server");
        let lock = lock_path(&path);
        let refused = |what: &str, place: &Path| {
            let error = as_user(NOBODY, || listen(&path).expect_err("refused").to_string());
            for part in [place.to_str().expect("UTF-8"), "user 65533"] {
                assert!(error.contains(part), "{what}: {error}");
            }
        };
        let held = as_user(ANOTHER, || {
            std::fs::write(&lock, "").expect("any user may");
            acquire_flock(&lock)
        });
        refused("a lock that is held", &lock);
        drop(held);
        refused("a lock file alone", &lock);
        std::fs::remove_file(&lock).expect("root may");
        as_user(ANOTHER, || std::fs::create_dir(&lock).expect("any user may"));
        refused("a directory", &lock);
        std::fs::remove_dir(&lock).expect("root may");
        as_user(ANOTHER, || std::fs::write(&path, "").expect("any user may"));
        refused("a file in the socket's place", &path);
        std::fs::remove_file(&path).expect("root may");
        let others = as_user(ANOTHER, || listen(&path).expect("it is free"));
        refused("a socket", &path);
        drop(others);
        as_user(NOBODY, || drop(listen(&path).expect("it is free again")));
    }

    /// One of many processes replaces a dead server's file; the others find a live server.
    #[test]
    fn one_of_many_concurrent_starts_listens() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("server");
        for round in 0..10 {
            drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket without a listener"));
            let all: Vec<_> = std::thread::scope(|scope| {
                let start = |_| {
                    scope.spawn(|| {
                        let socket = rustix::net::socket_with(
                            AddressFamily::UNIX,
                            SocketType::SEQPACKET,
                            SocketFlags::CLOEXEC,
                            None,
                        );
                        let socket = socket.expect("a socket");
                        SocketFile::listen(socket.as_fd(), &path, 64).map(|file| (file, socket))
                    })
                };
                let threads: Vec<_> = (0..8).map(start).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            let refused = all
                .iter()
                .filter(|end| matches!(end, Err(error) if error.kind() == FabricErrorKind::AddressInUse))
                .count();
            assert_eq!(refused, 7, "round {round}: {all:?}");
            assert_eq!(
                std::fs::read_dir(directory.path()).expect("it is there").count(),
                1,
                "only the socket file remains"
            );
            drop(all);
        }
    }
}
