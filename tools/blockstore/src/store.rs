//! The file of the store: by descriptors with an io_uring; otherwise reads use a mapping, writes `pwrite`.
//!
//! Reads from a mapping need no system call. Writes to one do not suit a server: a full disk raises SIGBUS, and the
//! first write to each page is a fault, which may cost more than the copy. Both share the page cache.
//!
//! A tmpfs is not mapped: there even reads of a hole allocate a page, and raise SIGBUS on a full disk.
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
use rpcrdma_config::print_error;
use rpcrdma_config::program::describe;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, FsWord, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::protocol::Status;
use crate::sys;

/// Limit of one READ or WRITE, in bytes.
pub(crate) const BLOCK_MAX: usize = 1 << 20;
/// Minimum size of a stripe in bytes; a multiple of every page size.
const STRIPE: u64 = 1 << 20;
/// Limit of stripes: each is a mapping, and a process may have 65530.
const MAX_STRIPES: u64 = 4096;
/// Type of a tmpfs in `fstatfs` (linux/magic.h).
const TMPFS_MAGIC: FsWord = 0x0102_1994;

/// A file of fixed size. Alignment is free.
///
/// [Mapped](Self::map), it has stripes with a lock each. Bytes behind a reference do not change, as writers hold the
/// lock. Reads never wait for it: they use a system call instead.
///
/// The file is locked (`flock`) while the store lives, which keeps out other stores. A process that ignores the lock
/// and truncates the file ends this process by SIGBUS, at the next read of the missing part. So does a disk error under
/// a mapping.
#[derive(Debug)]
pub(crate) struct Store {
    file: File,
    size: u64,
    writable: bool,
    stripe: u64,
    /// Empty for a tmpfs.
    stripes: Vec<RwLock<Option<Mmap>>>,
    direct: Option<Direct>,
    pub(crate) gate: Gate,
}

/// The file, opened with O_DIRECT.
#[derive(Debug)]
pub(crate) struct Direct {
    pub(crate) file: File,
    /// Alignment of offsets and lengths.
    pub(crate) block: usize,
    /// Alignment of memory.
    pub(crate) align: usize,
}

impl Direct {
    /// True if O_DIRECT can move these bytes.
    pub(crate) fn takes(&self, memory: *const u8, offset: u64, len: usize) -> bool {
        offset.is_multiple_of(self.block as u64)
            && len.is_multiple_of(self.block)
            && memory.addr().is_multiple_of(self.align)
    }
}

/// Separates O_DIRECT writes from buffered ones. On one page, a buffered write would write back stale data of a
/// concurrent O_DIRECT write. A waiting buffered write has priority.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Outstanding O_DIRECT writes; below 0: buffered ones.
    inside: AtomicI64,
    /// Shards with a waiting buffered write.
    waiting: AtomicUsize,
}

impl Gate {
    /// Admits a write unless writes of the other kind are outstanding.
    pub(crate) fn enter(&self, direct: bool) -> bool {
        if direct && self.waiting.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let enter = |inside: i64| match direct {
            true => (inside >= 0).then_some(inside + 1),
            false => (inside <= 0).then_some(inside - 1),
        };
        // The other kind's writes happen before.
        self.inside.fetch_update(Ordering::AcqRel, Ordering::Relaxed, enter).is_ok()
    }

    /// Ends an admitted write.
    pub(crate) fn leave(&self, direct: bool) {
        self.inside.fetch_add(if direct { -1 } else { 1 }, Ordering::AcqRel);
    }

    /// A buffered write of a shard waits. The flag is the shard's.
    pub(crate) fn waits(&self, flag: &mut bool) {
        if !std::mem::replace(flag, true) {
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It no longer waits.
    pub(crate) fn no_longer_waits(&self, flag: &mut bool) {
        if std::mem::take(flag) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Store {
    /// Opens a file. With `size`, creates or grows it, and reserves disk space if the file system can.
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

    /// Maps the file for [`read`](Self::read), unless on a tmpfs.
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

    /// Opens the file with O_DIRECT.
    ///
    /// # Errors
    /// The file system has no O_DIRECT, or does not report its alignment.
    pub(crate) fn open_direct(&mut self) -> anyhow::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(self.writable).custom_flags(OFlags::DIRECT.bits() as i32);
        // The same file, even if renamed.
        let file = options.open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        // Reported since Linux 6.1.
        let told = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
        ensure!(told.stx_mask & StatxFlags::DIOALIGN.bits() != 0, "statx does not tell the alignment");
        let (block, align) = (told.stx_dio_offset_align as usize, told.stx_dio_mem_align as usize);
        ensure!(block > 0 && align > 0, "statx says that it is not possible");
        self.direct = Some(Direct { file, block, align });
        Ok(())
    }

    /// The file with O_DIRECT, if open.
    pub(crate) fn direct(&self) -> Option<&Direct> {
        self.direct.as_ref()
    }

    /// The buffered file.
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
    fn left(&self, offset: u64) -> Result<u64, Status> {
        self.size.checked_sub(offset).ok_or(Status::OutOfRange)
    }

    /// Bytes that a READ of `count` bytes returns where there is this room.
    pub(crate) fn may_read(&self, offset: u64, count: u32, room: usize) -> Result<usize, Status> {
        if count as usize > BLOCK_MAX {
            return Err(Status::TooLong);
        }
        Ok(self.left(offset)?.min(room.min(count as usize) as u64) as usize)
    }

    /// Copies up to `count` bytes from `offset` to `out`. Returns their number, less than fits only at the end.
    ///
    /// Concurrent writes may show old or new bytes.
    pub(crate) fn read(&self, offset: u64, count: u32, out: &mut ResultWriter<'_>) -> Result<usize, Status> {
        let len = self.may_read(offset, count, out.room())?;
        for part in self.parts(offset, len) {
            let len = part.of_data.len();
            let done = match self.stripes[part.stripe].try_read().as_deref() {
                Ok(Some(map)) => out.put(&map[part.at..part.at + len]).map_err(std::io::Error::other),
                // Not mapped, or locked by a writer that may block. A system call does not wait for it.
                Ok(None) | Err(_) => match out.read_from(&self.file, part.offset, len) {
                    Ok(read) if read < len => Err(ErrorKind::UnexpectedEof.into()),
                    read => read.map(drop),
                },
            };
            done.map_err(|error| status("pread", &error))?;
        }
        Ok(len)
    }

    /// True if this range may be written.
    pub(crate) fn may_write(&self, offset: u64, len: usize) -> Result<(), Status> {
        if !self.writable {
            return Err(Status::ReadOnly);
        }
        if self.left(offset)? < len as u64 { Err(Status::OutOfRange) } else { Ok(()) }
    }

    /// Writes all of `data` or nothing, except after a disk failure in the middle. May block.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), Status> {
        self.may_write(offset, data.len())?;
        for part in self.parts(offset, data.len()) {
            let _alone = self.stripes[part.stripe].write().unwrap_or_else(PoisonError::into_inner);
            self.file.write_all_at(&data[part.of_data], part.offset).map_err(|error| status("pwrite", &error))?;
        }
        Ok(())
    }

    /// Waits until all writes are on the disk.
    pub(crate) fn flush(&self) -> Result<(), Status> {
        if !self.writable {
            return Ok(());
        }
        self.file.sync_data().map_err(|error| status("fdatasync", &error))
    }

    /// Splits a range of the store at the ends of stripes.
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

/// A range within one stripe.
struct Part {
    stripe: usize,
    /// Offset in the stripe.
    at: usize,
    /// Offset in the file.
    offset: u64,
    /// Range of the caller's data.
    of_data: Range<usize>,
}

/// Locks a file, with tries for a second: a previous server's io_uring holds its lock until its last block has been
/// moved, and briefly after.
fn locked(file: &File, lock: FlockOperation) -> rustix::io::Result<()> {
    for _ in 0..100 {
        match rustix::fs::flock(file, lock) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
    rustix::fs::flock(file, lock)
}

/// Makes a file at least `size` bytes long, with reserved disk space.
fn reserve(file: &File, size: u64) -> std::io::Result<()> {
    // A tmpfs ends the call with EINTR at the end of an io_uring of this thread, as if a signal had come.
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size)) {
        // This file system reserves nothing: a WRITE may fill the disk.
        Err(Errno::OPNOTSUPP) => file.set_len(size),
        outcome => Ok(outcome?),
    }
}

/// Status for a failed system call.
pub(crate) fn status(call: &str, error: &std::io::Error) -> Status {
    print_error!("{call}: {}", describe(error));
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Status::NoSpace,
        _ => Status::IoError,
    }
}
