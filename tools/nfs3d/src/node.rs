//! An open file with a handle.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, Stat, accessat, fstat, fsync, openat};
use rustix::io::{self, Errno};

use crate::handles::FileHandle;
use crate::identity::Identity;
use crate::lock::lock;
use crate::nfs3::{NfsFh3, Nfsstat3};
use crate::status::Outcome;

/// An inode of the export; not reused while this lives.
#[derive(Debug)]
pub(crate) struct Node {
    /// Opened with `O_PATH`: without a user's access check.
    file: OwnedFd,
    handle: FileHandle,
    ino: u64,
    kind: FileType,
    /// Held from "attributes before" to "attributes after", so that both belong to one operation.
    changes: Mutex<()>,
    reader: OnceLock<OwnedFd>,
    writer: OnceLock<OwnedFd>,
}

/// A cached descriptor, or one of a single call.
pub(crate) enum Opened<'a> {
    Kept(BorrowedFd<'a>),
    Own(OwnedFd),
}

impl AsFd for Opened<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Kept(fd) => *fd,
            Self::Own(fd) => fd.as_fd(),
        }
    }
}

impl Node {
    pub(crate) fn new(file: OwnedFd, handle: FileHandle, stat: &Stat) -> Self {
        Self {
            file,
            handle,
            ino: stat.st_ino,
            kind: FileType::from_raw_mode(stat.st_mode),
            changes: Mutex::new(()),
            reader: OnceLock::new(),
            writer: OnceLock::new(),
        }
    }

    /// For system calls on an `O_PATH` descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn handle(&self) -> NfsFh3<'_> {
        NfsFh3 { data: &self.handle }
    }

    pub(crate) fn ino(&self) -> u64 {
        self.ino
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    pub(crate) fn is_symlink(&self) -> bool {
        self.kind == FileType::Symlink
    }

    /// A path to this inode.
    pub(crate) fn path(&self) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }

    /// Attributes; stale without a name.
    pub(crate) fn stat(&self) -> Outcome<Stat> {
        let stat = fstat(&self.file)?;
        if stat.st_nlink == 0 { Err(Nfsstat3::ErrStale) } else { Ok(stat) }
    }

    /// Excludes other changes of the node.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.changes)
    }

    /// It holds data.
    pub(crate) fn check_regular(&self) -> Outcome<()> {
        match self.kind {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(Nfsstat3::ErrIsdir),
            _ => Err(Nfsstat3::ErrInval),
        }
    }

    /// It holds names.
    pub(crate) fn check_dir(&self) -> Outcome<()> {
        if self.is_dir() { Ok(()) } else { Err(Nfsstat3::ErrNotdir) }
    }

    fn reopen(&self, flags: OFlags) -> io::Result<OwnedFd> {
        openat(CWD, self.path(), flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty())
    }

    fn kept<'a>(&self, place: &'a OnceLock<OwnedFd>, flags: OFlags) -> io::Result<BorrowedFd<'a>> {
        if let Some(fd) = place.get() {
            return Ok(fd.as_fd());
        }
        let fd = self.reopen(flags)?;
        // A concurrent second descriptor is closed.
        Ok(place.get_or_init(|| fd).as_fd())
    }

    /// Opened by the server for its own reads and syncs.
    pub(crate) fn own_reader(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(self.kept(&self.reader, OFlags::RDONLY)?)
    }

    /// Opens a regular file for reads of a user. The owner always may, as its client has checked the open. So may a
    /// user with execute permission, as execution reads.
    pub(crate) fn reader(&self, who: &Identity, owner: u32) -> Outcome<BorrowedFd<'_>> {
        self.check_regular()?;
        let may = who.owns(owner) || self.permits(who, Access::READ_OK) || self.permits(who, Access::EXEC_OK);
        if may { self.own_reader() } else { Err(Nfsstat3::ErrAcces) }
    }

    /// Opens a directory for reads of a user, from its start.
    pub(crate) fn open_dir(&self, who: &Identity) -> Outcome<OwnedFd> {
        self.check_dir()?;
        Ok(who.act(|| self.reopen(OFlags::RDONLY | OFlags::DIRECTORY))?)
    }

    /// Opens a regular file for writes of a user.
    pub(crate) fn writer(&self, who: &Identity, owner: u32) -> Outcome<Opened<'_>> {
        self.check_regular()?;
        if who.owns(owner) {
            match self.kept(&self.writer, OFlags::WRONLY) {
                Ok(fd) => return Ok(Opened::Kept(fd)),
                // The server's user may not; the caller's user may.
                Err(Errno::ACCESS | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Opened::Own(who.act(|| self.reopen(OFlags::WRONLY))?))
    }

    /// Checks access of the user.
    pub(crate) fn permits(&self, who: &Identity, what: Access) -> bool {
        who.act(|| accessat(CWD, self.path(), what, AtFlags::EACCESS)).is_ok()
    }

    /// Syncs names of a directory, or data and attributes of a file.
    pub(crate) fn sync(&self) -> Outcome<()> {
        match self.kept(&self.reader, OFlags::RDONLY).and_then(fsync) {
            // Files that cannot be opened or synced have no unstable data.
            Ok(()) | Err(Errno::INVAL | Errno::NXIO | Errno::LOOP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
