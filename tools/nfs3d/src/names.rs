//! Finding files by inode number where the kernel does not: by the names they had, and by a look through the
//! whole tree.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nfs3_types::nfs3::nfsstat3;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, StatxFlags, fstat, openat, statx};
use rustix::io;

use crate::codec::Outcome;
use crate::status::status;

/// Bytes of a time of birth: seconds and nanoseconds.
const BIRTH: usize = 12;
/// The tree is not looked through more often than this, however many stale handles come.
const REST: Duration = Duration::from_secs(1);
/// Directories above a file, at most.
const DEPTH: usize = 4096;

/// A name that an inode had: the directory's inode number, and the name in it.
type Link = (u64, Box<[u8]>);

pub(crate) struct Names {
    root: OwnedFd,
    root_ino: u64,
    dev: u64,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    links: HashMap<u64, Link>,
    looked: Option<Instant>,
}

impl Names {
    pub(crate) fn new(root: OwnedFd, stat: &Stat) -> Self {
        Self { root, root_ino: stat.st_ino, dev: stat.st_dev, known: Mutex::default() }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What tells an inode from a later one of the same number. File systems that keep no time of birth
    /// cannot.
    pub(crate) fn birth(file: BorrowedFd<'_>) -> io::Result<[u8; BIRTH]> {
        let stat = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
        let mut birth = [0; BIRTH];
        if StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME) {
            birth[..8].copy_from_slice(&stat.stx_btime.tv_sec.to_be_bytes());
            birth[8..].copy_from_slice(&stat.stx_btime.tv_nsec.to_be_bytes());
        }
        Ok(birth)
    }

    pub(crate) fn learn(&self, parent: u64, name: &[u8], ino: u64) {
        self.known().links.insert(ino, (parent, name.into()));
    }

    /// Opens the file with `O_PATH`.
    pub(crate) fn find(&self, ino: u64, birth: &[u8]) -> Outcome<OwnedFd> {
        if let Some(file) = self.follow(ino, birth) {
            return Ok(file);
        }
        {
            let known = &mut *self.known();
            if known.looked.is_some_and(|looked| looked.elapsed() < REST) {
                return Err(nfsstat3::NFS3ERR_JUKEBOX);
            }
            known.links.clear();
            self.look(&mut known.links).map_err(status)?;
            known.looked = Some(Instant::now());
        }
        self.follow(ino, birth).ok_or(nfsstat3::NFS3ERR_STALE)
    }

    /// Goes down to an inode, and makes sure that it is the one that is meant.
    fn follow(&self, ino: u64, birth: &[u8]) -> Option<OwnedFd> {
        let file = self.descend(&self.known().links, ino)?;
        (Self::birth(file.as_fd()).ok()? == birth).then_some(file)
    }

    /// Goes down from the root along the names that are known.
    fn descend(&self, links: &HashMap<u64, Link>, ino: u64) -> Option<OwnedFd> {
        let (mut names, mut at) = (Vec::new(), ino);
        while at != self.root_ino {
            let (parent, name) = links.get(&at)?;
            names.push(name);
            at = *parent;
            if names.len() > DEPTH {
                return None;
            }
        }
        let mut file = self.root.try_clone().ok()?;
        for name in names.iter().rev() {
            file = open(&file, name).ok()?;
        }
        let stat = fstat(&file).ok()?;
        ((stat.st_ino, stat.st_dev) == (ino, self.dev)).then_some(file)
    }

    /// Enters every name of the tree.
    fn look(&self, links: &mut HashMap<u64, Link>) -> io::Result<()> {
        // Numbers, not descriptors: there may be more directories than may be open.
        let mut to_do = vec![self.root_ino];
        let mut seen = HashSet::from([self.root_ino]);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        while let Some(dir_ino) = to_do.pop() {
            // What is no directory, is not of this file system, or may not be read by the server has no
            // names.
            let Some(dir) = self.descend(links, dir_ino) else { continue };
            let Ok(entries) = openat(&dir, ".", flags, Mode::empty()).and_then(Dir::new) else { continue };
            for entry in entries {
                let entry = entry?;
                let (name, ino) = (entry.file_name().to_bytes(), entry.ino());
                if name == b"." || name == b".." {
                    continue;
                }
                links.insert(ino, (dir_ino, name.into()));
                let may_be_dir = matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
                if may_be_dir && seen.insert(ino) {
                    to_do.push(ino);
                }
            }
        }
        Ok(())
    }
}

fn open(dir: &OwnedFd, name: &[u8]) -> io::Result<OwnedFd> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}
