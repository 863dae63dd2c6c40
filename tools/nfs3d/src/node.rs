//! Open files with handles.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, Stat, StatxAttributes, StatxFlags, accessat, fstat, fsync, openat,
    statx,
};
use rustix::io::{self, Errno, fcntl_dupfd_cloexec};

use crate::handles::FileHandle;
use crate::identity::Identity;
use crate::lock::lock;
use crate::nfs3::{NfsFh3, Nfsstat3};
use crate::status::Outcome;

/// An inode of the export. Its number is not reused while the node exists.
#[derive(Debug)]
pub(crate) struct Node {
    /// Opened with `O_PATH`, which involves no check of a user's access to the file.
    file: OwnedFd,
    handle: FileHandle,
    ino: u64,
    kind: FileType,
    /// Held while the server reads the attributes before an operation, changes the file, and reads the attributes after
    /// it, so that no other operation changes them in between.
    changes: Mutex<()>,
    reader: OnceLock<OwnedFd>,
    writer: OnceLock<OwnedFd>,
}

/// A file opened for writes: a cached descriptor, or one of a single call.
pub(crate) enum WritableFile<'a> {
    Cached(BorrowedFd<'a>),
    Owned(OwnedFd),
}

impl AsFd for WritableFile<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Cached(fd) => *fd,
            Self::Owned(fd) => fd.as_fd(),
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

    /// The `O_PATH` descriptor.
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

    /// Attributes. Fails with `NFS3ERR_STALE` if the file has no name any more.
    pub(crate) fn stat(&self) -> Outcome<Stat> {
        let stat = fstat(&self.file)?;
        if stat.st_nlink == 0 { Err(Nfsstat3::ErrStale) } else { Ok(stat) }
    }

    /// Owner of a file that is about to be written.
    ///
    /// # Errors
    /// `NFS3ERR_PERM` for an append-only or immutable file, even if a descriptor was opened before it became so.
    /// `NFS3ERR_STALE` if the file has no name any more.
    pub(crate) fn owner_for_write(&self) -> Outcome<u32> {
        let stat = match statx(&self.file, "", AtFlags::EMPTY_PATH, StatxFlags::UID | StatxFlags::NLINK) {
            // A system call filter may deny statx.
            Err(Errno::NOSYS | Errno::PERM) => return Ok(self.stat()?.st_uid),
            stat => stat?,
        };
        if stat.stx_nlink == 0 {
            Err(Nfsstat3::ErrStale)
        } else if stat.stx_attributes.intersects(StatxAttributes::APPEND | StatxAttributes::IMMUTABLE) {
            Err(Nfsstat3::ErrPerm)
        } else {
            Ok(stat.stx_uid)
        }
    }

    /// Excludes other changes of the node by the server.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.changes)
    }

    /// Checks that the file is regular.
    pub(crate) fn check_regular(&self) -> Outcome<()> {
        match self.kind {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(Nfsstat3::ErrIsdir),
            _ => Err(Nfsstat3::ErrInval),
        }
    }

    /// Checks that the file is a directory.
    pub(crate) fn check_dir(&self) -> Outcome<()> {
        if self.is_dir() { Ok(()) } else { Err(Nfsstat3::ErrNotdir) }
    }

    fn reopen(&self, flags: OFlags) -> io::Result<OwnedFd> {
        openat(CWD, self.path(), flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty())
    }

    fn cached_or_open(
        cell: &OnceLock<OwnedFd>,
        open: impl FnOnce() -> io::Result<OwnedFd>,
    ) -> io::Result<BorrowedFd<'_>> {
        if let Some(fd) = cell.get() {
            return Ok(fd.as_fd());
        }
        let fd = open()?;
        // If another thread has stored a descriptor meanwhile, the new one is closed.
        Ok(cell.get_or_init(|| fd).as_fd())
    }

    /// Descriptor for reads and syncs, opened with the server's own privileges.
    pub(crate) fn server_reader(&self) -> Outcome<BorrowedFd<'_>> {
        Ok(Self::cached_or_open(&self.reader, || self.reopen(OFlags::RDONLY))?)
    }

    /// Opens a regular file for reads by a user.
    ///
    /// The owner may always read, because the owner's client has checked the open. A user with execute permission may
    /// also read, because executing a file reads it.
    pub(crate) fn reader(&self, user: &Identity, owner: u32) -> Outcome<BorrowedFd<'_>> {
        self.check_regular()?;
        let may_read = user.owns(owner) || self.permits(user, Access::READ_OK) || self.permits(user, Access::EXEC_OK);
        if may_read { self.server_reader() } else { Err(Nfsstat3::ErrAcces) }
    }

    /// Opens a directory for reads by a user, from its start.
    pub(crate) fn open_dir(&self, user: &Identity) -> Outcome<OwnedFd> {
        self.check_dir()?;
        Ok(user.run_as(|| self.reopen(OFlags::RDONLY | OFlags::DIRECTORY))?)
    }

    /// Opens a regular file for writes by a user.
    ///
    /// The descriptor grants access only. The user's privileges at the write itself decide about set-ID bits, reserved
    /// blocks and quotas, so writes must be within `Identity::run_as`.
    pub(crate) fn writer(&self, user: &Identity, owner: u32) -> Outcome<WritableFile<'_>> {
        self.check_regular()?;
        let open = || self.reopen(OFlags::WRONLY);
        if !user.owns(owner) {
            return Ok(WritableFile::Owned(user.run_as(open)?));
        }
        // The owner may write although the mode forbids it, because the owner's client has checked the open.
        let open_as_owner =
            || user.run_as(open).or_else(|error| if error == Errno::ACCESS { open() } else { Err(error) });
        Ok(WritableFile::Cached(Self::cached_or_open(&self.writer, open_as_owner)?))
    }

    /// Keeps the descriptor that created the file for reads and writes by its owner.
    ///
    /// The mode of a new file may deny access to its owner, whose client may use the file nevertheless, as the process
    /// that created it could. Only root can open such a file later, so a server that is not root keeps this descriptor
    /// while the node exists.
    pub(crate) fn keep_creator(&self, user: &Identity, creator: OwnedFd) -> Outcome<()> {
        // Another process may have replaced the new file.
        if user.is_fixed() && fstat(&creator)?.st_ino == self.ino {
            let _ = self.reader.set(fcntl_dupfd_cloexec(&creator, 0)?);
            let _ = self.writer.set(creator);
        }
        Ok(())
    }

    /// True if the user has this access.
    pub(crate) fn permits(&self, user: &Identity, access: Access) -> bool {
        user.run_as(|| accessat(CWD, self.path(), access, AtFlags::EACCESS)).is_ok()
    }

    /// Opens a descriptor for `sync`; `None` if the file cannot be synced.
    ///
    /// Opening a FIFO or a device has effects, a symbolic link cannot be opened, and a server that is not root may lack
    /// access to a file.
    pub(crate) fn syncer(&self) -> Outcome<Option<BorrowedFd<'_>>> {
        if !matches!(self.kind, FileType::RegularFile | FileType::Directory) {
            return Ok(None);
        }
        let reader = Self::cached_or_open(&self.reader, || self.reopen(OFlags::RDONLY));
        let opened = reader.or_else(|error| match error {
            Errno::ACCESS => Self::cached_or_open(&self.writer, || self.reopen(OFlags::WRONLY)),
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
            // EINVAL: the file system does not support fsync.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
