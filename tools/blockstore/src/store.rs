//! The file of the store. An io_uring uses its descriptors; without one, reads use a mapping and writes `pwrite`.
//!
//! Reads from a mapping need no system call. Writes to a mapping do not suit a server, because a full disk raises
//! SIGBUS, and because the first write to each page causes a fault, which may cost more than the copy. The mapping and
//! `pwrite` share the page cache.
//!
//! A file on tmpfs is not mapped, because there even reads of a hole allocate a page, and raise SIGBUS on a full disk.
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
/// Limit of stripes, each of which is a mapping. A process may have 65530 mappings.
const MAX_STRIPES: u64 = 4096;
/// `f_type` of tmpfs (linux/magic.h).
const TMPFS_MAGIC: FsWord = 0x0102_1994;

/// A file of fixed size, with access at any offset.
///
/// If [mapped](Self::map), it has stripes with a lock each. Writers hold the lock, so the bytes behind a reference do
/// not change. Reads never wait for a lock, but use a system call instead.
///
/// The file is locked (`flock`) while the store exists, so that no other store can open it. If a process ignores the
/// lock and truncates the file, the next read of the missing part raises SIGBUS, which ends this process. A disk error
/// under a mapping has the same effect.
#[derive(Debug)]
pub(crate) struct Store {
    file: File,
    size: u64,
    writable: bool,
    stripe: u64,
    /// Stripes with their locks. On tmpfs, they have no mapping.
    stripes: Vec<RwLock<Option<Mmap>>>,
    direct: Option<DirectFile>,
    pub(crate) gate: Gate,
}

/// The file, opened with O_DIRECT.
#[derive(Debug)]
pub(crate) struct DirectFile {
    pub(crate) file: File,
    /// Alignment of offsets and lengths.
    pub(crate) offset_align: usize,
    /// Alignment of memory.
    pub(crate) memory_align: usize,
}

impl DirectFile {
    /// Whether O_DIRECT can move these bytes.
    pub(crate) fn accepts(&self, memory: *const u8, offset: u64, len: usize) -> bool {
        offset.is_multiple_of(self.offset_align as u64)
            && len.is_multiple_of(self.offset_align)
            && memory.addr().is_multiple_of(self.memory_align)
    }
}

/// Separates O_DIRECT writes from buffered ones.
///
/// If both write to one page, the buffered write would write back old data where the O_DIRECT write has written. A
/// waiting buffered write has priority.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Number of outstanding O_DIRECT writes, or the negated number of outstanding buffered writes.
    admitted: AtomicI64,
    /// Shards with a waiting buffered write.
    waiting: AtomicUsize,
}

impl Gate {
    /// Admits a write unless writes of the other kind are outstanding.
    pub(crate) fn enter(&self, direct: bool) -> bool {
        if direct && self.waiting.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let enter = |admitted: i64| match direct {
            true => (admitted >= 0).then_some(admitted + 1),
            false => (admitted <= 0).then_some(admitted - 1),
        };
        // Acquire: earlier writes of the other kind happen before this write.
        self.admitted.fetch_update(Ordering::AcqRel, Ordering::Relaxed, enter).is_ok()
    }

    /// Ends an admitted write.
    pub(crate) fn leave(&self, direct: bool) {
        self.admitted.fetch_add(if direct { -1 } else { 1 }, Ordering::AcqRel);
    }

    /// Marks a shard as having a waiting buffered write. `flag` records the shard's mark.
    pub(crate) fn set_waiting(&self, flag: &mut bool) {
        if !std::mem::replace(flag, true) {
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Marks a shard as having no waiting buffered write.
    pub(crate) fn clear_waiting(&self, flag: &mut bool) {
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
                format!("{shown}: cannot open for reads and writes (--size creates it, --read-only only reads)")
            }
            _ => format!("{shown}: cannot open"),
        })?;
        let metadata = file.metadata().with_context(|| format!("{shown}: fstat"))?;
        ensure!(metadata.is_file(), "{shown}: not a regular file");
        let lock =
            if writable { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
        match lock_file(&file, lock) {
            Err(Errno::WOULDBLOCK) => bail!("{shown}: another process has locked the file; `lslocks` shows which"),
            outcome => outcome.with_context(|| format!("{shown}: flock"))?,
        }
        let size = match size {
            Some(size) if size < metadata.len() => {
                bail!("{shown}: the file has {} bytes, and is not truncated to {size} (--size)", metadata.len())
            }
            Some(size) if writable => size,
            _ => metadata.len(),
        };
        ensure!(size > 0, "{shown}: the file is empty; --size BYTES sets a size");
        if writable {
            reserve(&file, size).with_context(|| format!("{shown}: fallocate of {size} bytes (see `df {shown}`)"))?;
        }
        let stripe = size.div_ceil(MAX_STRIPES).next_multiple_of(STRIPE);
        Ok(Self { file, size, writable, stripe, stripes: Vec::new(), direct: None, gate: Gate::default() })
    }

    /// Maps the file for [`read`](Self::read), except on tmpfs.
    pub(crate) fn map(&mut self) -> anyhow::Result<()> {
        let (size, stripe) = (self.size, self.stripe);
        let starts = (0..size).step_by(stripe as usize);
        let is_mappable = rustix::fs::fstatfs(&self.file).context("fstatfs")?.f_type != TMPFS_MAGIC;
        let map = |at| is_mappable.then(|| sys::map(&self.file, at, stripe.min(size - at))).transpose();
        let stripes = starts.map(|at| Ok(RwLock::new(map(at)?)));
        let stripes = stripes.collect::<std::io::Result<_>>();
        self.stripes = stripes.with_context(|| format!("mmap of {size} bytes (see `ulimit -v`)"))?;
        Ok(())
    }

    /// Opens the file with O_DIRECT.
    ///
    /// # Errors
    /// The file system does not support O_DIRECT, or does not report the alignment.
    pub(crate) fn open_direct(&mut self) -> anyhow::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(self.writable).custom_flags(OFlags::DIRECT.bits() as i32);
        // This path leads to the same file, even if the file was renamed.
        let file = options.open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        // Linux reports the alignment since 6.1.
        let stat = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
        ensure!(stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0, "statx does not report the alignment");
        let (offset_align, memory_align) = (stat.stx_dio_offset_align as usize, stat.stx_dio_mem_align as usize);
        ensure!(offset_align > 0 && memory_align > 0, "statx reports that O_DIRECT is not supported");
        self.direct = Some(DirectFile { file, offset_align, memory_align });
        Ok(())
    }

    /// The file with O_DIRECT, if open.
    pub(crate) fn direct(&self) -> Option<&DirectFile> {
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

    /// Number of bytes from `offset` to the end of the store.
    fn bytes_from(&self, offset: u64) -> Result<u64, Status> {
        self.size.checked_sub(offset).ok_or(Status::OutOfRange)
    }

    /// Checks a READ of `count` bytes. Returns the number of bytes to read: at most `room`, which the reply holds.
    pub(crate) fn check_read(&self, offset: u64, count: u32, room: usize) -> Result<usize, Status> {
        if count as usize > BLOCK_MAX {
            return Err(Status::TooLong);
        }
        Ok(self.bytes_from(offset)?.min(room.min(count as usize) as u64) as usize)
    }

    /// Copies up to `count` bytes from `offset` to `out`. Returns their number.
    ///
    /// Fewer bytes are copied only at the end of the store, or if `out` has less room. The copy may contain old or new
    /// bytes of a concurrent write.
    pub(crate) fn read(&self, offset: u64, count: u32, out: &mut ResultWriter<'_>) -> Result<usize, Status> {
        let len = self.check_read(offset, count, out.room())?;
        for part in self.parts(offset, len) {
            let len = part.data_range.len();
            let done = match self.stripes[part.stripe].try_read().as_deref() {
                Ok(Some(map)) => out.put(&map[part.at..part.at + len]).map_err(std::io::Error::other),
                // The stripe is not mapped, or is locked by a writer that may block. A system call does not wait for
                // it.
                Ok(None) | Err(_) => match out.read_from(&self.file, part.offset, len) {
                    Ok(read) if read < len => Err(ErrorKind::UnexpectedEof.into()),
                    read => read.map(drop),
                },
            };
            done.map_err(|error| report("pread", &error))?;
        }
        Ok(len)
    }

    /// Checks that a range may be written.
    pub(crate) fn check_write(&self, offset: u64, len: usize) -> Result<(), Status> {
        if !self.writable {
            return Err(Status::ReadOnly);
        }
        if self.bytes_from(offset)? < len as u64 { Err(Status::OutOfRange) } else { Ok(()) }
    }

    /// Writes all of `data` or nothing, unless the disk fails in the middle. May block.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), Status> {
        self.check_write(offset, data.len())?;
        for part in self.parts(offset, data.len()) {
            let _guard = self.stripes[part.stripe].write().unwrap_or_else(PoisonError::into_inner);
            self.file.write_all_at(&data[part.data_range], part.offset).map_err(|error| report("pwrite", &error))?;
        }
        Ok(())
    }

    /// Waits until all writes are on the disk.
    pub(crate) fn flush(&self) -> Result<(), Status> {
        if !self.writable {
            return Ok(());
        }
        self.file.sync_data().map_err(|error| report("fdatasync", &error))
    }

    /// Splits a range of the store at the ends of stripes.
    fn parts(&self, offset: u64, len: usize) -> impl Iterator<Item = StripePart> + use<> {
        let stripe = self.stripe;
        let mut done = 0;
        std::iter::from_fn(move || {
            let start = offset + done as u64;
            let at = start % stripe;
            let end = len.min(done + (stripe - at) as usize);
            let part =
                StripePart { stripe: (start / stripe) as usize, at: at as usize, offset: start, data_range: done..end };
            done = end;
            (!part.data_range.is_empty()).then_some(part)
        })
    }
}

/// A range within one stripe.
struct StripePart {
    stripe: usize,
    /// Offset in the stripe.
    at: usize,
    /// Offset in the file.
    offset: u64,
    /// Range of the caller's data.
    data_range: Range<usize>,
}

/// Locks a file, and retries for a second, because the io_uring of an earlier server holds the lock until shortly after
/// its last block has been moved.
fn lock_file(file: &File, lock: FlockOperation) -> rustix::io::Result<()> {
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
    // On tmpfs, the end of an io_uring of this thread interrupts the call with EINTR, like a signal.
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size)) {
        // The file system cannot reserve space, so a WRITE may find the disk full.
        Err(Errno::OPNOTSUPP) => file.set_len(size),
        outcome => Ok(outcome?),
    }
}

/// Prints the error of a system call, and returns the status for the client.
pub(crate) fn report(call: &str, error: &std::io::Error) -> Status {
    print_error!("{call}: {}", describe(error));
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Status::NoSpace,
        _ => Status::IoError,
    }
}
