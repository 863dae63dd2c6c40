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

    fn kept(place: &OnceLock<OwnedFd>, open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<BorrowedFd<'_>> {
        if let Some(fd) = place.get() {
            return Ok(fd.as_fd());
        }
        let fd = open()?;
        // A concurrent second descriptor is closed.
        Ok(place.get_or_init(|| fd).as_fd())
    }

    /// Opened by the server for its own reads and syncs.
    pub(crate) fn own_reader(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(Self::kept(&self.reader, || self.reopen(OFlags::RDONLY))?)
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

    /// Opens a regular file for writes of a user. The descriptor grants access only: the user's privileges at the write
    /// itself decide about set-ID bits, reserved blocks and quotas, so writes belong into `Identity::act`.
    pub(crate) fn writer(&self, who: &Identity, owner: u32) -> Outcome<Opened<'_>> {
        self.check_regular()?;
        let open = || self.reopen(OFlags::WRONLY);
        if !who.owns(owner) {
            return Ok(Opened::Own(who.act(open)?));
        }
        // The owner may write although the mode forbids it, as its client has checked the open.
        let open_as_owner = || who.act(open).or_else(|error| if error == Errno::ACCESS { open() } else { Err(error) });
        Ok(Opened::Kept(Self::kept(&self.writer, open_as_owner)?))
    }

    /// Checks access of the user.
    pub(crate) fn permits(&self, who: &Identity, what: Access) -> bool {
        who.act(|| accessat(CWD, self.path(), what, AtFlags::EACCESS)).is_ok()
    }

    /// Opens for `sync`. `None` if there is nothing to sync with: opening a FIFO or a device has effects, a symbolic
    /// link cannot be opened, and a server that is not root may lack access to a file.
    pub(crate) fn syncer(&self) -> Outcome<Option<BorrowedFd<'_>>> {
        if !matches!(self.kind, FileType::RegularFile | FileType::Directory) {
            return Ok(None);
        }
        let reader = Self::kept(&self.reader, || self.reopen(OFlags::RDONLY));
        let opened = reader.or_else(|error| match error {
            Errno::ACCESS => Self::kept(&self.writer, || self.reopen(OFlags::WRONLY)),
            error => Err(error),
        });
        match opened {
            Err(Errno::ACCESS | Errno::ISDIR) => Ok(None),
            opened => Ok(Some(opened?)),
        }
    }

    /// Syncs names of a directory, or data and attributes of a file.
    pub(crate) fn sync(&self) -> Outcome<()> {
        match self.syncer()?.map_or(Ok(()), fsync) {
            // The file system has no sync.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
