//! An io_uring, and the memory that the kernel works on: that of calls, kept here until it is done with it.
#![expect(unsafe_code, reason = "the kernel is told of memory by its address, and taken at its word")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types::Fd};
use rpcrdma::Frozen;
use rpcrdma::service::DeferredCall;

use crate::log::Record;

/// Jobs that the kernel has at a time.
const ENTRIES: u32 = 128;
/// `RWF_DSYNC` of `pwritev2`: what is written is on the disk when it is done.
const DSYNC: i32 = 2;

/// What the kernel is to do.
pub(crate) enum Job {
    /// A value goes into the Write chunk of its call.
    Read(Get),
    /// Records go into a log.
    Write(Batch),
}

/// A value that is being read.
pub(crate) struct Get {
    pub(crate) call: DeferredCall,
    file: Arc<File>,
    at: u64,
    pub(crate) len: usize,
    /// Bytes that are there already.
    done: usize,
}

impl Get {
    /// A value for a call, in whose Write chunk there is room for it.
    pub(crate) fn new(call: DeferredCall, file: Arc<File>, at: u64, len: usize) -> Self {
        Self { call, file, at, len, done: 0 }
    }

    /// All of it is there, and is the result.
    pub(crate) fn is_whole(&self) -> bool {
        self.done == self.len
    }
}

/// The value of a record that is being written.
pub(crate) enum Value {
    None,
    Inline(Vec<u8>),
    Chunk(Frozen),
}

impl Value {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Inline(bytes) => bytes,
            Self::Chunk(bytes) => bytes,
        }
    }
}

/// A record that is being written, for whom.
pub(crate) struct Put {
    pub(crate) record: Record,
    pub(crate) value: Value,
    pub(crate) call: DeferredCall,
}

/// As `struct iovec` is.
#[repr(C)]
struct Piece {
    base: *const u8,
    len: usize,
}

/// Records that are written at once, one behind the other.
pub(crate) struct Batch {
    file: Arc<File>,
    pub(crate) at: u64,
    pub(crate) puts: Vec<Put>,
    pieces: Vec<Piece>,
}

impl Batch {
    /// Most records of one: the kernel takes 1024 pieces.
    pub(crate) const MOST: usize = 256;

    pub(crate) fn new(file: Arc<File>, at: u64, puts: Vec<Put>) -> Self {
        let pieces = puts.iter().flat_map(|put| [&put.record.front[..], put.value.bytes()]);
        let pieces = pieces.map(|bytes| Piece { base: bytes.as_ptr(), len: bytes.len() }).collect();
        Self { file, at, puts, pieces }
    }

    pub(crate) fn len(&self) -> u64 {
        self.puts.iter().map(|put| put.record.len()).sum()
    }
}

/// An io_uring of one shard.
pub(crate) struct Ring {
    ring: IoUring,
    /// What the kernel has, by its number there.
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
}

impl Ring {
    pub(crate) fn new() -> io::Result<Self> {
        let jobs = (0..ENTRIES).map(|_| None).collect();
        Ok(Self { ring: IoUring::new(ENTRIES)?, jobs, free: (0..ENTRIES as usize).collect() })
    }

    /// Readable when something has completed.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Has the kernel do a job from the next [`submit`](Self::submit) on; it comes back if that has enough to do.
    pub(crate) fn start(&mut self, mut job: Job) -> Result<(), Job> {
        let Some(&slot) = self.free.last() else { return Err(job) };
        let entry: squeue::Entry = match &mut job {
            Job::Read(Get { call, file, at, len, done }) => {
                // Whoever made the job has seen that there is room for `len` bytes.
                let Ok(mut room) = call.result_writer(0) else { return Err(job) };
                let memory = room.as_mut_ptr().wrapping_add(*done);
                let (left, at) = ((*len - *done) as u32, *at + *done as u64);
                opcode::Read::new(Fd(file.as_raw_fd()), memory, left).offset(at).build()
            }
            Job::Write(batch) => {
                let (pieces, count) = (batch.pieces.as_ptr().cast(), batch.pieces.len() as u32);
                let write = opcode::Writev::new(Fd(batch.file.as_raw_fd()), pieces, count);
                write.offset(batch.at).rw_flags(DSYNC).build()
            }
        };
        // SAFETY: file and memory are the job's, which is kept in `jobs`, and not touched there, until the kernel is
        // done with it: see `Drop`, too. The memory is where it is however the job is moved: results of a call that
        // is kept (`ResultWriter::as_mut_ptr`), buffers, and vectors whose length does not change.
        if unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }.is_err() {
            return Err(job);
        }
        self.free.pop();
        self.jobs[slot] = Some(job);
        Ok(())
    }

    /// Tells the kernel what was started.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        match self.ring.submit() {
            Err(error) if !matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy) => {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// A job that the kernel is done with, and how many bytes it has moved now.
    pub(crate) fn completed(&mut self) -> Option<(Job, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
        let slot = entry.user_data() as usize;
        let mut job = self.jobs[slot].take()?;
        self.free.push(slot);
        let moved = usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        if let (Job::Read(get), Ok(moved)) = (&mut job, &moved) {
            get.done += moved;
            if get.is_whole()
                && let Ok(mut value) = get.call.result_writer(0)
            {
                // SAFETY: the kernel has written all of these bytes there, from the start on, and is done.
                unsafe { value.advance(get.len) };
            }
        }
        Some((job, moved))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.free.len() < self.jobs.len() {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            while self.completed().is_some() {}
        }
    }
}
