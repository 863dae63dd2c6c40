//! The file behind the store. With an io_uring it goes by the file's descriptors; without one it is read through a
//! mapping and written by `pwrite`.
//!
//! Reads through a mapping cost no system call, which is what a shard wants. Writes go by the system, because a mapping
//! is bad at them: it can only say by SIGBUS that the disk is full, and the first write to each page is a fault,
//! which the file system may make dearer than the copy. Both see the same pages: those of the page cache.
//!
//! A tmpfs is not mapped: there a mapping takes a page of the disk also to read a hole, and says by SIGBUS that there
//! is none. The system reads a hole without.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use memmap2::Mmap;
use rpcrdma::service::ResultWriter;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, FsWord, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::codec::Status;
use crate::sys;

/// Bytes of a stripe, at least; a multiple of every page size.
const STRIPE: u64 = 1 << 20;
/// Most stripes: each is a mapping, and a process may have 65530 of them.
const MAX_STRIPES: u64 = 4096;
/// What `fstatfs` calls a tmpfs (linux/magic.h).
const TMPFS_MAGIC: FsWord = 0x0102_1994;

/// A file of fixed size. Nothing in it needs to be aligned.
///
/// [Mapped](Self::map), it is so in stripes with a lock each: bytes that a reference shows do not change, because
/// whoever writes to a stripe holds its lock. Reads never wait for that lock: they ask the system instead.
///
/// The file is locked (`flock`) as long as the store lives. That keeps other stores away, and whoever else
/// asks for the lock. It does not keep away who does not ask: whoever cuts the file short meanwhile ends this
/// process, by SIGBUS, at the next read of what is gone. So does a disk error under a mapping.
#[derive(Debug)]
pub(crate) struct Store {
    file: File,
    size: u64,
    writable: bool,
    stripe: u64,
    /// Of a tmpfs without their mappings.
    stripes: Vec<RwLock<Option<Mmap>>>,
    direct: Option<Direct>,
    pub(crate) gate: Gate,
}

/// The file once more, past the page cache.
#[derive(Debug)]
pub(crate) struct Direct {
    pub(crate) file: File,
    /// What offsets and lengths must be multiples of.
    pub(crate) block: usize,
    /// What memory must start at a multiple of.
    pub(crate) align: usize,
}

impl Direct {
    /// Whether these bytes may go past the page cache.
    pub(crate) fn takes(&self, memory: *const u8, offset: u64, len: usize) -> bool {
        offset.is_multiple_of(self.block as u64)
            && len.is_multiple_of(self.block)
            && memory.addr().is_multiple_of(self.align)
    }
}

/// Keeps writes past the page cache apart from those that go through it. Side by side on one page, the latter would
/// write back what they have read before the former were there. One of the latter that waits goes first.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Writes past the page cache that are under way; less than 0: those through it.
    inside: AtomicI64,
    /// Shards whose next write is one through the page cache that waits.
    waiting: AtomicUsize,
}

impl Gate {
    /// Lets a write in, if there are none of the other kind.
    pub(crate) fn enter(&self, direct: bool) -> bool {
        if direct && self.waiting.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let enter = |inside: i64| match direct {
            true => (inside >= 0).then_some(inside + 1),
            false => (inside <= 0).then_some(inside - 1),
        };
        // What the others' system calls have done is done for all.
        self.inside.fetch_update(Ordering::AcqRel, Ordering::Relaxed, enter).is_ok()
    }

    /// It has ended.
    pub(crate) fn leave(&self, direct: bool) {
        self.inside.fetch_add(if direct { -1 } else { 1 }, Ordering::AcqRel);
    }

    /// A shard's next write is one through the page cache that waits. The flag is the shard's.
    pub(crate) fn waits(&self, flag: &mut bool) {
        if !std::mem::replace(flag, true) {
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It is not, any more.
    pub(crate) fn no_longer_waits(&self, flag: &mut bool) {
        if std::mem::take(flag) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Store {
    /// Opens a file; with `size`, makes it that long, or new, if it is not, and reserves its place on the
    /// disk, where the file system can do so.
    pub(crate) fn open(path: &Path, size: Option<u64>, read_only: bool) -> anyhow::Result<Self> {
        let shown = path.display();
        let writable = !read_only;
        let create = size.is_some() && writable;
        let file = OpenOptions::new().read(true).write(writable).create(create).truncate(false).open(path);
        let file = file.with_context(|| match (size, read_only) {
            (None, false) => {
                format!("{shown}: cannot be opened to read and write (--size makes it, --read-only only reads)")
            }
            _ => format!("{shown}: cannot be opened"),
        })?;
        let metadata = file.metadata().with_context(|| format!("{shown}: fstat"))?;
        ensure!(metadata.is_file(), "{shown}: is not a regular file");
        let lock =
            if writable { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
        match locked(&file, lock) {
            Err(Errno::WOULDBLOCK) => bail!("{shown}: another process has locked it; `lslocks` says which"),
            outcome => outcome.with_context(|| format!("{shown}: flock"))?,
        }
        let size = match size {
            Some(size) if size < metadata.len() => {
                bail!("{shown}: has {} bytes already, and is not cut to {size}", metadata.len())
            }
            Some(size) if writable => size,
            _ => metadata.len(),
        };
        ensure!(size > 0, "{shown}: is empty; --size BYTES gives it a size");
        if writable {
            reserve(&file, size).with_context(|| format!("{shown}: fallocate of {size} bytes (see `df {shown}`)"))?;
        }
        let stripe = size.div_ceil(MAX_STRIPES).next_multiple_of(STRIPE);
        Ok(Self { file, size, writable, stripe, stripes: Vec::new(), direct: None, gate: Gate::default() })
    }

    /// Maps it, for [`read`](Self::read), if it is not on a tmpfs.
    pub(crate) fn map(&mut self) -> anyhow::Result<()> {
        let (size, stripe) = (self.size, self.stripe);
        let starts = (0..size).step_by(stripe as usize);
        let mapped = rustix::fs::fstatfs(&self.file).context("fstatfs")?.f_type != TMPFS_MAGIC;
        let map = |at| mapped.then(|| sys::map(&self.file, at, stripe.min(size - at))).transpose();
        let stripes = starts.map(|at| Ok(RwLock::new(map(at)?)));
        let stripes = stripes.collect::<std::io::Result<_>>();
        self.stripes = stripes.with_context(|| format!("mmap of {size} bytes (see `ulimit -v`)"))?;
        Ok(())
    }

    /// Opens it once more, past the page cache.
    ///
    /// # Errors
    /// The file system has no O_DIRECT, or does not say what it wants.
    pub(crate) fn open_direct(&mut self) -> anyhow::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(self.writable).custom_flags(OFlags::DIRECT.bits() as i32);
        // The same file, whatever its name is by now.
        let file = options.open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        // Linux 6.1 says what it wants.
        let told = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
        ensure!(told.stx_mask & StatxFlags::DIOALIGN.bits() != 0, "statx does not tell the alignment");
        let (block, align) = (told.stx_dio_offset_align as usize, told.stx_dio_mem_align as usize);
        ensure!(block > 0 && align > 0, "statx says that it is not possible");
        self.direct = Some(Direct { file, block, align });
        Ok(())
    }

    /// The file past the page cache, if there is a way.
    pub(crate) fn direct(&self) -> Option<&Direct> {
        self.direct.as_ref()
    }

    /// The file through the page cache.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Bytes from `offset` on.
    pub(crate) fn left(&self, offset: u64) -> Result<u64, Status> {
        self.size.checked_sub(offset).ok_or(Status::OutOfRange)
    }

    /// Writes `most` bytes from `offset` on to `out`; returns how many there were: fewer than `out` has room
    /// for only at the end.
    ///
    /// Bytes that are being written meanwhile may be old or new.
    pub(crate) fn read(&self, offset: u64, most: usize, out: &mut ResultWriter<'_>) -> Result<usize, Status> {
        let len = self.left(offset)?.min(most.min(out.room()) as u64) as usize;
        for part in self.parts(offset, len) {
            let len = part.of_data.len();
            let done = match self.stripes[part.stripe].try_read().as_deref() {
                Ok(Some(map)) => out.put(&map[part.at..part.at + len]).map_err(std::io::Error::other),
                // It is not mapped; or it is being written, by a thread that may have to wait. The system copies
                // without waiting for that one.
                Ok(None) | Err(_) => match out.read_from(&self.file, part.offset, len) {
                    Ok(read) if read < len => Err(ErrorKind::UnexpectedEof.into()),
                    read => read.map(drop),
                },
            };
            done.map_err(|error| status("pread", &error))?;
        }
        Ok(len)
    }

    /// Whether so many bytes may be written from `offset` on.
    pub(crate) fn may_write(&self, offset: u64, len: u64) -> Result<(), Status> {
        if !self.writable {
            return Err(Status::ReadOnly);
        }
        if self.left(offset)? < len { Err(Status::OutOfRange) } else { Ok(()) }
    }

    /// Writes all of `data`, or nothing; but part of it where the disk fails in the middle. May block.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), Status> {
        self.may_write(offset, data.len() as u64)?;
        for part in self.parts(offset, data.len()) {
            let _alone = self.stripes[part.stripe].write().unwrap_or_else(PoisonError::into_inner);
            self.file.write_all_at(&data[part.of_data], part.offset).map_err(|error| status("pwrite", &error))?;
        }
        Ok(())
    }

    /// Waits until all that was written is on the disk.
    pub(crate) fn flush(&self) -> Result<(), Status> {
        if !self.writable {
            return Ok(());
        }
        self.file.sync_data().map_err(|error| status("fdatasync", &error))
    }

    /// Cuts `len` bytes from `offset` on where stripes end. All are in the store.
    fn parts(&self, offset: u64, len: usize) -> impl Iterator<Item = Part> + use<> {
        let stripe = self.stripe;
        let mut done = 0;
        std::iter::from_fn(move || {
            let start = offset + done as u64;
            let at = start % stripe;
            let end = len.min(done + (stripe - at) as usize);
            let part = Part { stripe: (start / stripe) as usize, at: at as usize, offset: start, of_data: done..end };
            done = end;
            (!part.of_data.is_empty()).then_some(part)
        })
    }
}

/// Bytes that are all in one stripe.
struct Part {
    stripe: usize,
    /// Where they start in the stripe.
    at: usize,
    /// Where they start in the file.
    offset: u64,
    /// Where they are in the caller's data.
    of_data: Range<usize>,
}

/// Locks a file. The io_uring of a server that has just ended keeps its lock until the last of its blocks has been
/// moved, and a little longer: so it is tried for a second.
fn locked(file: &File, lock: FlockOperation) -> rustix::io::Result<()> {
    for _ in 0..100 {
        match rustix::fs::flock(file, lock) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
    rustix::fs::flock(file, lock)
}

/// Makes a file at least `size` bytes long, with room on the disk for all of them.
fn reserve(file: &File, size: u64) -> std::io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        // This file system reserves nothing: a WRITE may find the disk full.
        Err(Errno::OPNOTSUPP) => file.set_len(size),
        outcome => Ok(outcome?),
    }
}

/// What a call of the system that failed is to whoever asked for it.
pub(crate) fn status(call: &str, error: &std::io::Error) -> Status {
    eprintln!("{call}: {error}");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Status::NoSpace,
        _ => Status::IoError,
    }
}
