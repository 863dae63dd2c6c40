//! Finding files by inode number without kernel handles: by known names, then by a search of the tree.
#![forbid(unsafe_code)]

mod link_table;
mod search;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat, StatxFlags, fstat, openat, openat2, statx};
use rustix::io;

use crate::lock::lock;
use crate::nfs3::Nfsstat3;
use crate::status::Outcome;
use link_table::LinkTable;
use search::{Progress, Search, Wanted, is_absence};

/// Bytes of a birth time: seconds and nanoseconds.
const BIRTH: usize = 12;
/// Limit of directories above a file. It bounds the time of each call that opens a file by its path.
const DEPTH: usize = 512;
/// Limit of the memory for known names, in bytes.
const KNOWN_LIMIT: usize = 128 << 20;
/// Longest path of a system call, in bytes, without its final zero.
pub(crate) const PATH_MAX: usize = 4095;

/// Finds files of an export by inode number and birth time.
pub(crate) struct Names {
    root: OwnedFd,
    root_ino: u64,
    dev: u64,
    /// No system call is made with this lock held, because each LOOKUP needs it.
    known: Mutex<LinkTable>,
    /// Inodes that are searched for, until one of their names was followed or they are known to be absent. No system
    /// call is made with this lock held.
    wanted: Mutex<HashMap<u64, Wanted>>,
    /// Locked while a call performs its part of the search.
    search: Mutex<Search>,
}

impl Names {
    pub(crate) fn new(root: OwnedFd, stat: &Stat) -> Self {
        let (known, search) = (Mutex::new(LinkTable::new(KNOWN_LIMIT)), Mutex::new(Search::new()));
        Self { root, root_ino: stat.st_ino, dev: stat.st_dev, known, wanted: Mutex::default(), search }
    }

    /// Birth time (btime) of a file, which distinguishes inodes that reuse a number.
    ///
    /// It is zero if the file system does not record it.
    pub(crate) fn birth(file: BorrowedFd<'_>) -> io::Result<[u8; BIRTH]> {
        let stat = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
        let mut birth = [0; BIRTH];
        if StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME) {
            birth[..8].copy_from_slice(&stat.stx_btime.tv_sec.to_be_bytes());
            birth[8..].copy_from_slice(&stat.stx_btime.tv_nsec.to_be_bytes());
        }
        Ok(birth)
    }

    /// Records a name of an inode.
    pub(crate) fn learn(&self, parent: u64, name: &[u8], ino: u64) {
        lock(&self.known).insert(ino, parent, name);
    }

    /// Number of known names.
    #[cfg(test)]
    pub(crate) fn known_count(&self) -> usize {
        lock(&self.known).len()
    }

    /// Forgets a removed name of an inode. If it was the last one, any known name of the inode is forgotten.
    pub(crate) fn forget(&self, parent: u64, name: &[u8], ino: u64, is_last: bool) {
        let mut known = lock(&self.known);
        if is_last { known.remove(ino) } else { known.remove_name(ino, parent, name) }
    }

    /// Opens the file of an inode number and birth time with `O_PATH`.
    ///
    /// # Errors
    /// `NFS3ERR_JUKEBOX` while the search is not complete, because each call performs only a bounded part of it.
    /// `NFS3ERR_STALE` if the search has shown that no name leads to the file, or if a later file has the inode number.
    pub(crate) fn find(&self, ino: u64, birth: &[u8]) -> Outcome<OwnedFd> {
        if let Some(file) = self.follow(ino, birth)? {
            return Ok(file);
        }
        let search = &mut *lock(&self.search);
        // Another call may have found the file meanwhile.
        if let Some(file) = self.follow(ino, birth)? {
            return Ok(file);
        }
        let mut budget = search.names_per_call;
        loop {
            match search.advance(self, ino, &mut budget)? {
                // If the name does not lead to the inode (at a mount point, for example), the search continues.
                Progress::Found => {
                    if let Some(file) = self.follow(ino, birth)? {
                        return Ok(file);
                    }
                }
                Progress::Absent => return Err(Nfsstat3::ErrStale),
                Progress::Pending => return Err(Nfsstat3::ErrJukebox),
            }
        }
    }

    /// Opens an inode by its known names, and verifies it. Forgets a name that does not lead to it.
    ///
    /// # Errors
    /// `NFS3ERR_STALE` if the inode has another birth time, because file systems give the number of a removed file to a
    /// new one. The name belongs to the new file, and stays known.
    fn follow(&self, ino: u64, birth: &[u8]) -> Outcome<Option<OwnedFd>> {
        let Some(path) = lock(&self.known).path(ino, self.root_ino, DEPTH) else { return Ok(None) };
        let opened = self.descend(path.iter().map(|(_, name)| &**name)).and_then(|file| {
            let stat = fstat(&file)?;
            Ok(((stat.st_ino, stat.st_dev) == (ino, self.dev)).then_some(file))
        });
        match opened {
            Ok(Some(file)) => {
                lock(&self.wanted).remove(&ino);
                let is_same_file = Self::birth(file.as_fd())? == birth;
                return if is_same_file { Ok(Some(file)) } else { Err(Nfsstat3::ErrStale) };
            }
            Err(error) if !is_absence(error) => return Err(error.into()),
            Ok(None) | Err(_) => {}
        }
        if let Some((parent, name)) = path.first() {
            lock(&self.known).remove_name(ino, *parent, name);
        }
        Ok(None)
    }

    /// Opens a path below the root with `O_PATH`, given its names in reverse order.
    ///
    /// Follows no links, and does not leave the mounted file system.
    fn descend<'a>(&self, names: impl DoubleEndedIterator<Item = &'a [u8]>) -> io::Result<OwnedFd> {
        let (mut file, mut path) = (None, Vec::<u8>::new());
        let open = |dir: &Option<OwnedFd>, path: &[u8]| {
            let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            open_within(dir.as_ref().unwrap_or(&self.root), path, flags, how)
        };
        // Each system call opens as many names together as a path may hold.
        for name in names.rev() {
            if path.len() + 1 + name.len() > PATH_MAX {
                file = Some(open(&file, &path)?);
                path.clear();
            }
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
        }
        if path.is_empty() { self.root.try_clone().map_err(|_| io::Errno::MFILE) } else { open(&file, &path) }
    }
}

/// Opens a name in a directory with `O_PATH`, without following links. Fails with `EXDEV` at a mount point, including
/// bind mounts of the same file system.
pub(crate) fn open_path(dir: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    open_within(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, ResolveFlags::NO_XDEV)
}

/// Opens a directory for reads by its name in another one, on the same mounted file system.
fn open_below(dir: &OwnedFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    open_within(dir, name, flags, ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV)
}

/// Opens a path below a directory, within its mount.
///
/// A system without openat2, such as Linux before 5.6, treats bind mounts of the same file system as directories of it,
/// and follows symbolic links within a path. Callers therefore verify the file that a path of several names leads to.
fn open_within(dir: impl AsFd, path: &[u8], flags: OFlags, how: ResolveFlags) -> io::Result<OwnedFd> {
    match openat2(&dir, path, flags, Mode::empty(), how) {
        Err(io::Errno::NOSYS) => {
            let file = openat(&dir, path, flags, Mode::empty())?;
            if fstat(&file)?.st_dev == fstat(&dir)?.st_dev { Ok(file) } else { Err(io::Errno::XDEV) }
        }
        opened => opened,
    }
}
