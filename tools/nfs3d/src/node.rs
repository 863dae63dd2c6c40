//! A file that clients have a handle of, open.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nfs3_types::nfs3::nfsstat3;
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, Stat, accessat, fstat, fsync, openat};
use rustix::io::{self, Errno};

use crate::codec::Outcome;
use crate::handles::FileHandle;
use crate::identity::Identity;
use crate::status::status;

/// An inode of the export. It cannot be used anew for another file while this lives.
#[derive(Debug)]
pub(crate) struct Node {
    /// Opened with `O_PATH`: nobody's rights are used up yet.
    file: OwnedFd,
    handle: FileHandle,
    ino: u64,
    kind: FileType,
    /// Held from "attributes before" to "attributes after", so that what is between is one operation's work.
    changes: Mutex<()>,
    reader: OnceLock<OwnedFd>,
    writer: OnceLock<OwnedFd>,
}

/// A descriptor that is kept, or was opened for one call.
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

    /// For calls that take an `O_PATH` descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn handle(&self) -> &FileHandle {
        &self.handle
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

    /// A path that leads to this very inode.
    pub(crate) fn path(&self) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }

    /// Its attributes; stale if its last name is gone.
    pub(crate) fn stat(&self) -> Outcome<Stat> {
        let stat = fstat(&self.file).map_err(status)?;
        if stat.st_nlink == 0 { Err(nfsstat3::NFS3ERR_STALE) } else { Ok(stat) }
    }

    /// Keeps others who announce their changes in this way from the node.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It holds data.
    pub(crate) fn check_regular(&self) -> Outcome<()> {
        match self.kind {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(nfsstat3::NFS3ERR_ISDIR),
            _ => Err(nfsstat3::NFS3ERR_INVAL),
        }
    }

    /// It holds names.
    pub(crate) fn check_dir(&self) -> Outcome<()> {
        if self.is_dir() { Ok(()) } else { Err(nfsstat3::NFS3ERR_NOTDIR) }
    }

    fn reopen(&self, flags: OFlags) -> io::Result<OwnedFd> {
        openat(CWD, self.path(), flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty())
    }

    fn kept<'a>(&self, place: &'a OnceLock<OwnedFd>, flags: OFlags) -> io::Result<BorrowedFd<'a>> {
        if let Some(fd) = place.get() {
            return Ok(fd.as_fd());
        }
        let fd = self.reopen(flags)?;
        // Of two that came at once one is closed again.
        Ok(place.get_or_init(|| fd).as_fd())
    }

    /// Opened by the server, for its own purposes: reading, or making it stable.
    pub(crate) fn own_reader(&self) -> Outcome<BorrowedFd<'_>> {
        self.kept(&self.reader, OFlags::RDONLY).map_err(status)
    }

    /// Opens it for a user's reading. A file's owner, whose client has let him open it before, always may; so
    /// may whoever may execute it, for that is done by reading.
    pub(crate) fn reader(&self, who: &Identity, owner: u32) -> Outcome<Opened<'_>> {
        let may = || {
            who.owns(owner)
                || self.permits(who, Access::READ_OK)
                || (!self.is_dir() && self.permits(who, Access::EXEC_OK))
        };
        if may() { Ok(Opened::Kept(self.own_reader()?)) } else { Err(nfsstat3::NFS3ERR_ACCES) }
    }

    /// Opens a directory for a user's reading, from its start.
    pub(crate) fn open_dir(&self, who: &Identity) -> Outcome<OwnedFd> {
        self.check_dir()?;
        who.act(|| self.reopen(OFlags::RDONLY | OFlags::DIRECTORY)).map_err(status)
    }

    /// Opens it for a user's writing.
    pub(crate) fn writer(&self, who: &Identity, owner: u32) -> Outcome<Opened<'_>> {
        if who.owns(owner) {
            match self.kept(&self.writer, OFlags::WRONLY) {
                Ok(fd) => return Ok(Opened::Kept(fd)),
                // The server's user may not: perhaps this one may.
                Err(Errno::ACCESS | Errno::PERM) => {}
                Err(error) => return Err(status(error)),
            }
        }
        who.act(|| self.reopen(OFlags::WRONLY)).map(Opened::Own).map_err(status)
    }

    /// Whether the user may.
    pub(crate) fn permits(&self, who: &Identity, what: Access) -> bool {
        who.act(|| accessat(CWD, self.path(), what, AtFlags::EACCESS)).is_ok()
    }

    /// Opens it for a user who is to cut it, or to make it longer.
    pub(crate) fn open_to_cut(&self, who: &Identity, owner: u32) -> Outcome<Opened<'_>> {
        self.check_regular()?;
        self.writer(who, owner)
    }

    /// Makes a directory's names, or a file's data and attributes, stable.
    pub(crate) fn sync(&self) -> Outcome<()> {
        match self.kept(&self.reader, OFlags::RDONLY).and_then(fsync) {
            // What cannot be opened, or not be synced, has nothing to be made stable.
            Ok(()) | Err(Errno::INVAL | Errno::NXIO | Errno::LOOP) => Ok(()),
            Err(error) => Err(status(error)),
        }
    }
}
