//! Files by inode number without kernel handles: by known names, then by a search of the tree.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, StatxFlags, fstat, openat, statx};
use rustix::io;

use crate::lock::lock;
use crate::nfs3::Nfsstat3;
use crate::status::Outcome;

/// Bytes of a time of birth: seconds and nanoseconds.
const BIRTH: usize = 12;
/// Minimum time between searches of the tree, despite stale handles.
const REST: Duration = Duration::from_secs(1);
/// Limit of directories above a file.
const DEPTH: usize = 4096;

/// A name of an inode: the directory's inode number, and the name in it.
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

    /// Time of birth, which differs for a later inode of the same number. Some file systems do not record it.
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
        lock(&self.known).links.insert(ino, (parent, name.into()));
    }

    /// Opens the file with `O_PATH`.
    pub(crate) fn find(&self, ino: u64, birth: &[u8]) -> Outcome<OwnedFd> {
        if let Some(file) = self.follow(ino, birth) {
            return Ok(file);
        }
        {
            let known = &mut *lock(&self.known);
            if known.looked.is_some_and(|looked| looked.elapsed() < REST) {
                return Err(Nfsstat3::ErrJukebox);
            }
            known.links.clear();
            self.look(&mut known.links)?;
            known.looked = Some(Instant::now());
        }
        self.follow(ino, birth).ok_or(Nfsstat3::ErrStale)
    }

    /// Opens an inode by path, and verifies it.
    fn follow(&self, ino: u64, birth: &[u8]) -> Option<OwnedFd> {
        let file = self.descend(&lock(&self.known).links, ino)?;
        (Self::birth(file.as_fd()).ok()? == birth).then_some(file)
    }

    /// Opens an inode from the root by known names.
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
            file = open_path(&file, name).ok()?;
        }
        let stat = fstat(&file).ok()?;
        ((stat.st_ino, stat.st_dev) == (ino, self.dev)).then_some(file)
    }

    /// Records every name of the tree.
    fn look(&self, links: &mut HashMap<u64, Link>) -> io::Result<()> {
        // Numbers instead of descriptors, which are limited.
        let mut to_do = vec![self.root_ino];
        let mut seen = HashSet::from([self.root_ino]);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        while let Some(dir_ino) = to_do.pop() {
            // Skips other file systems, unreadable directories, and files.
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

/// Opens a name in a directory with `O_PATH`, without following links.
pub(crate) fn open_path(dir: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}
