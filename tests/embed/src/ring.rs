//! An io_uring, and the memory that the kernel uses until completion.
#![expect(unsafe_code, reason = "the kernel gets memory by its address, and its completions are trusted")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types::Fd};
use rpcrdma::typed::Deferred;

use crate::log::Record;
use crate::protocol::kv_v1;

/// Maximum number of outstanding jobs.
const ENTRIES: u32 = 128;
/// `RWF_DSYNC` of `pwritev2`: written data is on the disk at completion.
const DSYNC: i32 = 2;

/// An operation for the kernel.
pub(crate) enum Job {
    /// Reads a value into the memory that its call answers from.
    Read(Get),
    /// Appends records to a log.
    Write(Batch),
}

/// A read in progress.
pub(crate) struct Get {
    pub(crate) call: Deferred<kv_v1::Get>,
    file: Arc<File>,
    at: u64,
    pub(crate) len: usize,
    /// Bytes read so far.
    done: usize,
}

impl Get {
    /// Creates the read of a value, for a call whose result buffer has space for it.
    pub(crate) fn new(call: Deferred<kv_v1::Get>, file: Arc<File>, at: u64, len: usize) -> Self {
        Self { call, file, at, len, done: 0 }
    }

    /// True if the whole value was read.
    pub(crate) fn is_whole(&self) -> bool {
        self.done == self.len
    }
}

/// A call that changes the store.
pub(crate) enum Change {
    Put(Deferred<kv_v1::Put>),
    Delete(Deferred<kv_v1::Delete>),
}

/// A record in a write, and its call.
pub(crate) struct Put {
    pub(crate) record: Record,
    pub(crate) call: Change,
}

impl Put {
    /// The value, in the memory that it arrived in: the message, or the target of an RDMA Read.
    fn value(&self) -> &[u8] {
        match &self.call {
            Change::Put(call) => call.args().value.0.bytes(),
            Change::Delete(_) => &[],
        }
    }
}

/// Layout of `struct iovec`.
#[repr(C)]
struct IoVec {
    base: *const u8,
    len: usize,
}

/// Consecutive records in one write.
pub(crate) struct Batch {
    file: Arc<File>,
    pub(crate) at: u64,
    pub(crate) puts: Vec<Put>,
    pieces: Vec<IoVec>,
}

impl Batch {
    /// Maximum records per batch. The kernel accepts 1024 pieces, and a record has two.
    pub(crate) const MAX_RECORDS: usize = 256;

    pub(crate) fn new(file: Arc<File>, at: u64, puts: Vec<Put>) -> Self {
        let pieces = puts.iter().flat_map(|put| [&put.record.front[..], put.value()]);
        let pieces = pieces.map(|bytes| IoVec { base: bytes.as_ptr(), len: bytes.len() }).collect();
        Self { file, at, puts, pieces }
    }

    pub(crate) fn len(&self) -> u64 {
        self.puts.iter().map(|put| put.record.len()).sum()
    }
}

/// The io_uring of one shard.
pub(crate) struct Ring {
    ring: IoUring,
    /// Jobs in progress, by slot.
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
}

impl Ring {
    pub(crate) fn new() -> io::Result<Self> {
        let jobs = (0..ENTRIES).map(|_| None).collect();
        Ok(Self { ring: IoUring::new(ENTRIES)?, jobs, free: (0..ENTRIES as usize).collect() })
    }

    /// Descriptor that is readable while a completion is pending.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Queues a job for the next [`submit`](Self::submit); returns it if the ring is full.
    pub(crate) fn start(&mut self, mut job: Job) -> Result<(), Job> {
        let Some(&slot) = self.free.last() else { return Err(job) };
        let entry: squeue::Entry = match &mut job {
            Job::Read(Get { call, file, at, len, done }) => {
                // `Get::new` requires room for `len` bytes.
                let Ok(mut room) = call.data() else { return Err(job) };
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
        // SAFETY: the kernel uses the job's file and memory. `jobs` keeps the job untouched until its completion; see
        // also `Drop`. Moving the job does not move the memory: arguments and results of a kept call, and vectors
        // whose length does not change.
        if unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }.is_err() {
            return Err(job);
        }
        self.free.pop();
        self.jobs[slot] = Some(job);
        Ok(())
    }

    /// Submits the queued jobs.
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

    /// Returns the next completed job, and the number of bytes that this operation moved.
    pub(crate) fn next_completion(&mut self) -> Option<(Job, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
        let slot = entry.user_data() as usize;
        let mut job = self.jobs[slot].take()?;
        self.free.push(slot);
        let moved = usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        if let (Job::Read(get), Ok(moved)) = (&mut job, &moved) {
            get.done += moved;
            if get.is_whole()
                && let Ok(mut value) = get.call.data()
            {
                // SAFETY: the kernel has written all of these bytes, from the start, and has completed.
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
            while self.next_completion().is_some() {}
        }
    }
}
