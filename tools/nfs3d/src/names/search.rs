//! Search of the tree for files whose names are unknown.
//!
//! A pass visits the tree once, directory by directory, and opens each directory from its parent, so its cost is linear
//! in the number of names. Each call performs a bounded part of the pass. The next call that needs a search continues
//! the pass, whichever file it searches for, and the names that the pass records serve all calls.
//!
//! A file that exists is missed if it, or a directory above it, moves from a directory that the pass has not visited to
//! one that it has. Such a move changes the first directory, so a pass proves absence if no directory changed between
//! the beginning of the pass and the end of its visit.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, RawDir, SeekFrom, fstat, seek};
use rustix::io::{self, Errno};
use rustix::time::{ClockId, clock_gettime};

use super::{DEPTH, Names, open_below};
use crate::lock::lock;

/// Limit of names that one call visits.
const NAMES_PER_CALL: usize = 16 << 10;
/// Time limit of one call's part of the search.
const TIME_PER_CALL: Duration = Duration::from_millis(100);
/// Limit of names of a pass, because the tree may grow during the pass.
const NAMES_PER_PASS: u64 = 1 << 32;
/// Minimum pause between passes. A pause lasts at least as long as the last pass took.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Limit of files that are searched for together.
const MAX_WANTED: usize = 1 << 16;
/// A file is absent if this many passes in a row have not listed it, even if directories changed during each of them.
/// Without this limit, a client would never learn of a removed file if the tree changes all the time.
pub(super) const CHANGED_PASSES: u64 = 16;
/// Passes after which the search for a file is abandoned, because its client has not asked for the file again.
const RESULT_PASSES: u64 = 2 * CHANGED_PASSES;
/// Limit of subdirectories that each frame holds. The others are read later.
const BATCH: usize = 32;

/// A directory on the way from the root to the current one.
struct Frame {
    ino: u64,
    name: Box<[u8]>,
    /// Subdirectories to be visited.
    subdirs: Vec<Box<[u8]>>,
    /// Position after the last entry read.
    cookie: u64,
    at_end: bool,
}

impl Frame {
    fn new(ino: u64, name: Box<[u8]>) -> Self {
        Self { ino, name, subdirs: Vec::new(), cookie: 0, at_end: false }
    }
}

/// Result of a call's part of the search.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// A name of the inode was recorded.
    Found,
    /// No name leads to the inode: see [`Search::is_absent`].
    Absent,
    /// The search must continue.
    Pending,
}

/// An inode that is searched for. Passes are numbered from 1.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// The first pass that began after the request.
    first_pass: u64,
    /// The last pass that listed the inode, although the name did not lead to it afterwards.
    listed_pass: u64,
}

/// State of the search. [`Names`] keeps it locked, so that one call at a time searches.
pub(super) struct Search {
    /// Directories from the root to the current one; empty between passes.
    frames: Vec<Frame>,
    /// The current directory, of the last frame.
    dir: Option<OwnedFd>,
    /// Inode numbers of the directories entered in this pass, because each is entered once.
    seen: HashSet<u64>,
    /// Number of passes begun.
    pub(super) begun: u64,
    /// Number of passes completed.
    completed: u64,
    /// The last completed pass during which no directory changed.
    conclusive: u64,
    /// Beginning of this pass, by the clock of the file system's time stamps: seconds and nanoseconds.
    began_at: (i64, i64),
    /// A directory changed during this pass, or was not visited completely.
    changed: bool,
    /// Names visited in this pass.
    pub(super) visited: u64,
    /// Directories opened in this pass.
    pub(super) opened: u64,
    /// Time that calls have spent in this pass.
    elapsed: Duration,
    /// Earliest start of the next pass.
    next_pass_at: Option<Instant>,
    /// Limit of names that one call visits.
    pub(super) names_per_call: usize,
}

impl Search {
    pub(super) fn new() -> Self {
        Self {
            frames: Vec::new(),
            dir: None,
            seen: HashSet::new(),
            begun: 0,
            completed: 0,
            conclusive: 0,
            began_at: (0, 0),
            changed: false,
            visited: 0,
            opened: 0,
            elapsed: Duration::ZERO,
            next_pass_at: None,
            names_per_call: NAMES_PER_CALL,
        }
    }

    /// Ends the pause between passes.
    #[cfg(test)]
    pub(super) fn end_pause(&mut self) {
        self.next_pass_at = None;
    }

    /// Whether this pass has entered a directory.
    #[cfg(test)]
    pub(super) fn has_entered(&self, dir: &std::path::Path) -> bool {
        use std::os::unix::fs::MetadataExt;
        self.seen.contains(&dir.metadata().expect("a directory").ino())
    }

    /// Searches for an inode until it is found or `budget` names were visited. Subtracts the visited names from
    /// `budget`.
    ///
    /// # Errors
    /// Those of the system, such as too many open files.
    pub(super) fn advance(&mut self, names: &Names, ino: u64, budget: &mut usize) -> io::Result<Progress> {
        if !self.request(names, ino) {
            return Ok(Progress::Pending);
        }
        if self.end_if_absent(names, ino) {
            return Ok(Progress::Absent);
        }
        let start = Instant::now();
        if self.frames.is_empty() {
            if self.next_pass_at.is_some_and(|next| start < next) {
                return Ok(Progress::Pending);
            }
            self.begin_pass(names)?;
        }
        let found = self.visit(names, ino, budget, start);
        self.elapsed += start.elapsed();
        if found? {
            let mut wanted = lock(&names.wanted);
            wanted.entry(ino).and_modify(|wanted| wanted.listed_pass = self.begun);
            return Ok(Progress::Found);
        }
        if !self.frames.is_empty() {
            return Ok(Progress::Pending);
        }
        self.completed = self.begun;
        if !self.changed {
            self.conclusive = self.begun;
        }
        self.next_pass_at = Some(Instant::now() + self.elapsed.max(MIN_PAUSE));
        (self.dir, self.seen) = (None, HashSet::new());
        Ok(if self.end_if_absent(names, ino) { Progress::Absent } else { Progress::Pending })
    }

    /// Records that an inode is searched for. Returns false if too many other inodes are searched for.
    fn request(&self, names: &Names, ino: u64) -> bool {
        let mut wanted = lock(&names.wanted);
        if wanted.len() >= MAX_WANTED && !wanted.contains_key(&ino) {
            wanted.retain(|_, wanted| !self.is_absent(*wanted));
            if wanted.len() >= MAX_WANTED {
                return false;
            }
        }
        wanted.entry(ino).or_insert(Wanted { first_pass: self.begun + 1, listed_pass: 0 });
        true
    }

    /// True if a conclusive pass since the request has found no name that leads to the inode, or if
    /// [`CHANGED_PASSES`] passes in a row have not listed it.
    fn is_absent(&self, wanted: Wanted) -> bool {
        let unlisted_from = wanted.first_pass.max(wanted.listed_pass + 1);
        self.conclusive >= wanted.first_pass || self.completed + 1 >= unlisted_from + CHANGED_PASSES
    }

    /// Ends the search for an inode if the inode is absent. Returns true if so.
    fn end_if_absent(&self, names: &Names, ino: u64) -> bool {
        let mut wanted = lock(&names.wanted);
        let absent = wanted.get(&ino).is_some_and(|wanted| self.is_absent(*wanted));
        if absent {
            wanted.remove(&ino);
        }
        absent
    }

    fn begin_pass(&mut self, names: &Names) -> io::Result<()> {
        self.dir = Some(open_below(&names.root, b".")?);
        // The kernel takes time stamps of files from this clock, which lags behind the precise one.
        let now = clock_gettime(ClockId::RealtimeCoarse);
        (self.began_at, self.changed) = ((now.tv_sec, now.tv_nsec), false);
        self.frames.push(Frame::new(names.root_ino, Box::default()));
        self.begun += 1;
        (self.visited, self.opened, self.elapsed) = (0, 1, Duration::ZERO);
        let oldest = self.begun.saturating_sub(RESULT_PASSES);
        lock(&names.wanted).retain(|_, wanted| wanted.first_pass >= oldest);
        Ok(())
    }

    /// Visits names until the limits of the call or the end of the pass. Returns true if the inode was found.
    fn visit(&mut self, names: &Names, ino: u64, budget: &mut usize, start: Instant) -> io::Result<bool> {
        while *budget > 0 && start.elapsed() < TIME_PER_CALL {
            let Some(frame) = self.frames.last_mut() else { break };
            if self.visited >= NAMES_PER_PASS {
                log::warn!(
                    "search for moved files: the tree has more than {NAMES_PER_PASS} names, and files beyond this \
                     limit are not found"
                );
                self.frames.clear();
                self.changed = true;
            } else if let Some(name) = frame.subdirs.pop() {
                *budget -= 1;
                self.enter(names, name)?;
            } else if frame.at_end {
                *budget -= 1;
                self.leave(names)?;
            } else if self.read(names, ino, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a subdirectory the current directory. Skips a subdirectory that was removed or visited, is too deep or
    /// unreadable, or is on another file system.
    fn enter(&mut self, names: &Names, name: Box<[u8]>) -> io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        self.opened += 1;
        let opened = match open_below(dir, &name) {
            Err(error) if is_absence(error) => return Ok(()),
            Err(error) => {
                // The next call retries the subdirectory.
                if let Some(frame) = self.frames.last_mut() {
                    frame.subdirs.push(name.clone());
                }
                return Err(error);
            }
            Ok(opened) => opened,
        };
        let stat = fstat(&opened)?;
        if stat.st_dev == names.dev && self.frames.len() <= DEPTH && self.seen.insert(stat.st_ino) {
            self.dir = Some(opened);
            self.frames.push(Frame::new(stat.st_ino, name));
        }
        Ok(())
    }

    /// Makes the parent the current directory, or else its nearest ancestor that still exists.
    fn leave(&mut self, names: &Names) -> io::Result<()> {
        self.opened += 1;
        let stat = self.dir.as_ref().and_then(|dir| fstat(dir).ok());
        self.changed |= stat.is_none_or(|stat| (stat.st_ctime, stat.st_ctime_nsec as i64) >= self.began_at);
        let above = self.dir.as_ref().map(|dir| open_below(dir, b".."));
        self.frames.pop();
        let mut above = above.and_then(Result::ok);
        while let Some(frame) = self.frames.last() {
            if above.as_ref().is_some_and(|dir| fstat(dir).is_ok_and(|stat| stat.st_ino == frame.ino)) {
                break;
            }
            // The directory just left was moved meanwhile, or the server may list but not search it.
            self.opened += 1;
            let path = self.frames.iter().skip(1).rev().map(|frame| &*frame.name);
            above = match names.descend(path).and_then(|dir| open_below(&dir, b".")) {
                Err(error) if !is_absence(error) => return Err(error),
                Ok(dir) if fstat(&dir)?.st_ino == frame.ino => Some(dir),
                _ => {
                    // The rest of this directory is not visited.
                    self.changed = true;
                    self.frames.pop();
                    None
                }
            };
        }
        self.dir = above;
        Ok(())
    }

    /// Reads and records names of the current directory, up to [`BATCH`] subdirectories.
    ///
    /// Returns true if the inode was found.
    fn read(&mut self, names: &Names, wanted: u64, budget: &mut usize) -> io::Result<bool> {
        let (Some(dir), Some((frame, above))) = (&self.dir, self.frames.split_last_mut()) else { return Ok(false) };
        seek(dir, SeekFrom::Start(frame.cookie))?;
        let mut found = false;
        let mut buffer = [MaybeUninit::<u8>::uninit(); 8 << 10];
        let mut entries = RawDir::new(dir, &mut buffer);
        while !found && *budget > 0 && frame.subdirs.len() < BATCH {
            let Some(entry) = entries.next() else {
                frame.at_end = true;
                break;
            };
            let entry = match entry {
                // The directory was removed meanwhile.
                Err(Errno::NOENT) => {
                    frame.at_end = true;
                    break;
                }
                entry => entry?,
            };
            frame.cookie = entry.next_entry_cookie();
            let (name, ino) = (entry.file_name().to_bytes(), entry.ino());
            if name == b"." || name == b".." {
                continue;
            }
            *budget -= 1;
            self.visited += 1;
            if matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                frame.subdirs.push(name.into());
            }
            // This call follows the name of its own inode immediately. Any other inode may move before a call follows
            // its name, so this pass does not decide about it.
            let is_wanted = ino == wanted || lock(&names.wanted).remove(&ino).is_some();
            let mut links = lock(&names.known);
            if !is_wanted {
                links.insert_if_room(ino, frame.ino, name);
                continue;
            }
            // The links of the directories above are recorded again, because they may have been dropped for lack of
            // room.
            links.insert(ino, frame.ino, name);
            let mut below = &*frame;
            for frame in above.iter().rev() {
                links.insert(below.ino, frame.ino, &below.name);
                below = frame;
            }
            found = ino == wanted;
        }
        Ok(found)
    }
}

/// True if the error means that the path leads to no such file, or that the server's user may not follow the path.
pub(super) fn is_absence(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::ACCESS)
}
