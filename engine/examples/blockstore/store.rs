#![expect(unsafe_code, reason = "maps a file")]
//! The file behind the store, mapped into memory.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::{PoisonError, RwLock};

use anyhow::{Context, bail, ensure};
use memmap2::{Mmap, MmapMut, MmapOptions};
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use crate::codec::Status;

/// Bytes of a stripe, at least; a multiple of every page size.
const STRIPE: u64 = 1 << 20;
/// Most stripes: each is a mapping, and a process may have 65530 of them.
const MAX_STRIPES: u64 = 4096;

/// A file of fixed size, read and written through its mapping.
///
/// It is mapped in stripes with a lock each, so that threads of this process never read what another one writes. Two calls
/// for the same stripe wait for each other as long as a copy takes, and no longer.
///
/// The file is locked (`flock`) as long as the store lives. That keeps other stores away, and whoever else asks for the
/// lock. It does not keep away who does not ask: whoever cuts the file short meanwhile ends this process, by SIGBUS, at the
/// next touch of what is gone. So does a disk error at the read of a page.
#[derive(Debug)]
pub(crate) struct Store {
    file: File,
    size: u64,
    writable: bool,
    stripe: u64,
    stripes: Vec<RwLock<Stripe>>,
}

#[derive(Debug)]
enum Stripe {
    Fixed(Mmap),
    Writable(MmapMut),
}

impl Stripe {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Fixed(map) => map,
            Self::Writable(map) => map,
        }
    }
}

impl Store {
    /// Opens a file; with `size`, makes it that long, or new, if it is not. Every byte has its place on the disk then: a
    /// write through a mapping has no way to say that the disk is full, other than SIGBUS.
    pub(crate) fn open(path: &Path, size: Option<u64>, read_only: bool) -> anyhow::Result<Self> {
        let shown = path.display();
        let writable = !read_only;
        let create = size.is_some() && writable;
        let file = OpenOptions::new().read(true).write(writable).create(create).truncate(false).open(path);
        let file = file.with_context(|| match (size, read_only) {
            (None, false) => format!(
                "{shown}: cannot be opened to read and write (--size makes it, --read-only only reads)"
            ),
            _ => format!("{shown}: cannot be opened"),
        })?;
        let metadata = file.metadata().with_context(|| format!("{shown}: fstat"))?;
        ensure!(metadata.is_file(), "{shown}: is not a regular file");
        let lock = if writable {
            FlockOperation::NonBlockingLockExclusive
        } else {
            FlockOperation::NonBlockingLockShared
        };
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
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size)
                .with_context(|| format!("{shown}: fallocate of {size} bytes (see `df {shown}`)"))?;
        }
        let stripe = size.div_ceil(MAX_STRIPES).next_multiple_of(STRIPE);
        let starts = (0..size).step_by(stripe as usize);
        let stripes = starts.map(|at| Ok(RwLock::new(map(&file, at, stripe.min(size - at), writable)?)));
        let stripes = stripes
            .collect::<std::io::Result<_>>()
            .with_context(|| format!("{shown}: mmap of {size} bytes"))?;
        Ok(Self { file, size, writable, stripe, stripes })
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Fills `out` from `offset` on; returns how many bytes there were. None is fewer than there is room for, but at the
    /// end.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize, Status> {
        let left = self.size.checked_sub(offset).ok_or(Status::OutOfRange)?;
        let len = (out.len() as u64).min(left) as usize;
        let mut done = 0;
        while done < len {
            let (stripe, at) = self.stripe_of(offset + done as u64);
            let stripe = stripe.read().unwrap_or_else(PoisonError::into_inner);
            let bytes = &stripe.bytes()[at..];
            let part = bytes.len().min(len - done);
            out[done..done + part].copy_from_slice(&bytes[..part]);
            done += part;
        }
        Ok(len)
    }

    /// Writes all of `data`, or nothing.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), Status> {
        if !self.writable {
            return Err(Status::ReadOnly);
        }
        if self.size.checked_sub(offset).is_none_or(|left| left < data.len() as u64) {
            return Err(Status::OutOfRange);
        }
        let mut done = 0;
        while done < data.len() {
            let (stripe, at) = self.stripe_of(offset + done as u64);
            let mut stripe = stripe.write().unwrap_or_else(PoisonError::into_inner);
            let Stripe::Writable(map) = &mut *stripe else { return Err(Status::ReadOnly) };
            let bytes = &mut map[at..];
            let part = bytes.len().min(data.len() - done);
            bytes[..part].copy_from_slice(&data[done..done + part]);
            done += part;
        }
        Ok(())
    }

    /// Waits until all that was written is on the disk.
    ///
    /// Linux does for `fdatasync` of a file what it does for `msync(MS_SYNC)` of a mapping of all of it, and
    /// `fdatasync` needs no lock: copies go on meanwhile.
    pub(crate) fn flush(&self) -> Result<(), Status> {
        if !self.writable {
            return Ok(());
        }
        self.file.sync_data().map_err(|error| {
            eprintln!("fdatasync: {error}");
            match error.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Status::NoSpace,
                _ => Status::IoError,
            }
        })
    }

    /// The stripe that a byte is in, and where it is there. The byte is in the store.
    fn stripe_of(&self, offset: u64) -> (&RwLock<Stripe>, usize) {
        (&self.stripes[(offset / self.stripe) as usize], (offset % self.stripe) as usize)
    }
}

fn map(file: &File, offset: u64, len: u64, writable: bool) -> std::io::Result<Stripe> {
    let mut options = MmapOptions::new();
    options.offset(offset).len(len as usize);
    if writable {
        // SAFETY: what a mapping shows must not change while a reference to it lives. In this process, each part of the file is
        // mapped once, by the one `Store` that holds the file's lock, and reached through its stripe's lock alone. Other processes
        // are kept out by the file's lock as far as they ask for it; see `Store` for those that do not.
        unsafe { options.map_mut(file) }.map(Stripe::Writable)
    } else {
        // SAFETY: as above; and nobody in this process can write to it.
        unsafe { options.map(file) }.map(Stripe::Fixed)
    }
}
