#![expect(unsafe_code, reason = "maps a file")]
//! The file behind the store: read through a mapping, written by `pwrite`.
//!
//! Reads cost no system call, which is what a shard wants. Writes go by the system, because a mapping is bad
//! at them: it can only say by SIGBUS that the disk is full, and the first write to each page is a fault,
//! which the file system may make dearer than the copy. Both see the same pages: those of the page cache.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{PoisonError, RwLock};

use anyhow::{Context, bail, ensure};
use memmap2::{Mmap, MmapOptions};
use rpcrdma::service::ResultWriter;
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use crate::codec::Status;

/// Bytes of a stripe, at least; a multiple of every page size.
const STRIPE: u64 = 1 << 20;
/// Most stripes: each is a mapping, and a process may have 65530 of them.
const MAX_STRIPES: u64 = 4096;

/// A file of fixed size. Nothing in it needs to be aligned.
///
/// It is mapped in stripes with a lock each: bytes that a reference shows do not change, because whoever
/// writes to a stripe holds its lock. Reads never wait for that lock: they ask the system instead.
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
    stripes: Vec<RwLock<Mmap>>,
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
        match rustix::fs::flock(&file, lock) {
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
        let starts = (0..size).step_by(stripe as usize);
        let stripes = starts.map(|at| Ok(RwLock::new(map(&file, at, stripe.min(size - at))?)));
        let stripes = stripes
            .collect::<std::io::Result<_>>()
            .with_context(|| format!("{shown}: mmap of {size} bytes (see `ulimit -v`)"))?;
        Ok(Self { file, size, writable, stripe, stripes })
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
            let done = match self.stripes[part.stripe].try_read() {
                Ok(map) => out.put(&map[part.at..part.at + len]).map_err(std::io::Error::other),
                // It is being written, by a thread that may have to wait. The system copies without waiting
                // for that one.
                Err(_) => match out.read_from(&self.file, part.offset, len) {
                    Ok(read) if read < len => Err(ErrorKind::UnexpectedEof.into()),
                    read => read.map(drop),
                },
            };
            done.map_err(|error| status("pread", &error))?;
        }
        Ok(len)
    }

    /// Writes all of `data`, or nothing; but part of it where the disk fails in the middle. May block.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), Status> {
        if !self.writable {
            return Err(Status::ReadOnly);
        }
        if self.left(offset)? < data.len() as u64 {
            return Err(Status::OutOfRange);
        }
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

/// Makes a file at least `size` bytes long, with room on the disk for all of them.
fn reserve(file: &File, size: u64) -> std::io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        // This file system reserves nothing: a WRITE may find the disk full.
        Err(Errno::OPNOTSUPP) => file.set_len(size),
        outcome => Ok(outcome?),
    }
}

fn status(call: &str, error: &std::io::Error) -> Status {
    eprintln!("{call}: {error}");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Status::NoSpace,
        _ => Status::IoError,
    }
}

fn map(file: &File, offset: u64, len: u64) -> std::io::Result<Mmap> {
    let mut options = MmapOptions::new();
    options.offset(offset).len(len as usize);
    // SAFETY: what a mapping shows must not change while a reference to it lives. In this process the file is
    // open in one place, the `Store`, which writes to a stripe only while it holds the stripe's lock for
    // itself, and references live only under the same lock. Other processes are kept out by the file's
    // lock as far as they ask for it; see `Store` for others.
    unsafe { options.map(file) }
}
