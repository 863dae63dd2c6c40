#![expect(unsafe_code, reason = "maps a file, and has the kernel read and write the memory of calls")]
//! Memory shared with the kernel: the mapping of a file, and the io_uring between a file and the memory of calls.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{IoUring, opcode};
use memmap2::{Mmap, MmapOptions};
use rpcrdma::Arena;
use rpcrdma::typed::Deferred;
use rpcrdma_config::print_error;
use rustix::io::Errno;

use crate::protocol::blockstore_v1::{Flush, Read, Write};

/// Maps part of a file.
pub(crate) fn map(file: &File, offset: u64, len: u64) -> io::Result<Mmap> {
    let mut options = MmapOptions::new();
    options.offset(offset).len(len as usize);
    // SAFETY: what a mapping shows must not change while a reference to it lives. In this process the file is
    // open in one place, the `Store`, which writes to a stripe only while it holds the stripe's lock for
    // itself, and references live only under the same lock. Other processes are kept out by the file's
    // lock as far as they ask for it; see `Store` for others.
    unsafe { options.map(file) }
}

/// A call, by its operation.
#[derive(Debug)]
pub(crate) enum Call {
    /// Read the file into the result.
    Read(Deferred<Read>),
    /// Write the argument to the file.
    Write(Deferred<Write>),
    /// Make earlier writes stable.
    Flush(Deferred<Flush>),
}

/// A call, and its memory: a chunk's or a message's, at any address.
#[derive(Debug)]
pub(crate) struct Job {
    call: Call,
    /// Start of the result or argument.
    memory: *mut u8,
    /// Offset in the file.
    offset: u64,
    len: usize,
    /// Bytes moved by the kernel, to or from the call's memory.
    done: usize,
    /// Index of the file of its last submission.
    file: u32,
}

impl Job {
    /// A job of `len` bytes.
    ///
    /// # Panics
    /// The call has less memory.
    pub(crate) fn new(mut call: Call, offset: u64, len: usize) -> Self {
        let (memory, room) = match &mut call {
            Call::Read(call) => call.data().map_or((ptr::null_mut(), 0), |mut data| (data.as_mut_ptr(), data.room())),
            Call::Write(call) => {
                let data = call.args().data.bytes();
                (data.as_ptr().cast_mut(), data.len())
            }
            Call::Flush(_) => (ptr::null_mut(), 0),
        };
        assert!(len <= room, "{len} bytes of a call that has {room}");
        Self { call, memory, offset, len, done: 0, file: 0 }
    }

    pub(crate) fn is_write(&self) -> bool {
        matches!(self.call, Call::Write(_))
    }

    /// Its system call.
    pub(crate) fn name(&self) -> &'static str {
        match self.call {
            Call::Read(_) => "read",
            Call::Write(_) => "write",
            Call::Flush(_) => "fdatasync",
        }
    }

    /// Offset of the rest in the file.
    pub(crate) fn at(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// Index of the file of its last submission.
    pub(crate) fn file(&self) -> u32 {
        self.file
    }

    /// Bytes of the rest.
    pub(crate) fn left(&self) -> usize {
        self.len - self.done
    }

    /// Memory of the rest.
    pub(crate) fn memory(&self) -> *mut u8 {
        self.memory.wrapping_add(self.done)
    }

    /// The call, with the bytes read as its data, its offset and length.
    pub(crate) fn into_call(mut self) -> (Call, u64, usize) {
        if let Call::Read(call) = &mut self.call
            && let Ok(mut data) = call.data()
        {
            // SAFETY: the kernel has said of each of these bytes that it has written it, from the start of the
            // result on; and as the job is not in a ring, it writes no more.
            unsafe { data.advance(self.done) };
        }
        (self.call, self.offset, self.len)
    }
}

/// Longest registered buffer.
const PIECE: usize = 1 << 30;

/// An io_uring of one shard. It owns submitted jobs until the kernel is done with their memory.
pub(crate) struct Ring {
    ring: IoUring,
    /// Registered memory, in pieces.
    registered: Option<Arena>,
    /// By token.
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
}

impl Ring {
    /// A ring of `entries` jobs over these files, by index.
    pub(crate) fn new(entries: u32, files: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        // Completions run in the shard's own system calls, without interrupts (Linux 6.0). IORING_SETUP_DEFER_TASKRUN
        // would not wake sleepers on the descriptor.
        let lean = builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().build(entries);
        let ring = match lean {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => IoUring::new(entries),
            other => other,
        }?;
        let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        if !files.is_empty() {
            ring.submitter().register_files(&files)?;
        }
        // A filter may allow the creation of a ring but not its use: fail now.
        ring.submit()?;
        let jobs = (0..entries).map(|_| None).collect();
        Ok(Self { ring, registered: None, jobs, free: (0..entries as usize).rev().collect() })
    }

    /// Registers memory, which saves a page look-up per job.
    pub(crate) fn register(&mut self, arena: &Arena) -> io::Result<()> {
        let (base, len) = (arena.base_address(), arena.len());
        let pieces = (0..len).step_by(PIECE).map(|at| libc::iovec {
            iov_base: ptr::with_exposed_provenance_mut(base + at),
            iov_len: PIECE.min(len - at),
        });
        let pieces: Vec<_> = pieces.collect();
        // SAFETY: the arena stays mapped for as long as there is a handle to it, and one is kept beside the ring.
        unsafe { self.ring.submitter().register_buffers(&pieces) }?;
        self.registered = Some(arena.clone());
        Ok(())
    }

    /// Readable after a completion.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// The registered buffer that holds all of these bytes.
    fn piece(&self, memory: *mut u8, len: usize) -> Option<u16> {
        let arena = self.registered.as_ref()?;
        let first = memory.addr().checked_sub(arena.base_address())?;
        let last = first + len.checked_sub(1)?;
        (last < arena.len() && first / PIECE == last / PIECE).then_some((first / PIECE) as u16)
    }

    /// Queues a job for the next [`submit`](Self::submit). Returns it if the ring is full.
    pub(crate) fn start(&mut self, mut job: Job, file: u32) -> Result<(), Job> {
        let Some(&slot) = self.free.last() else { return Err(job) };
        let (memory, len, at) = (job.memory(), job.left() as u32, job.at());
        let entry = match (&job.call, self.piece(memory, job.left())) {
            (Call::Read(_), Some(piece)) => opcode::ReadFixed::new(Fixed(file), memory, len, piece).offset(at).build(),
            (Call::Read(_), None) => opcode::Read::new(Fixed(file), memory, len).offset(at).build(),
            (Call::Write(_), Some(piece)) => {
                opcode::WriteFixed::new(Fixed(file), memory, len, piece).offset(at).build()
            }
            (Call::Write(_), None) => opcode::Write::new(Fixed(file), memory, len).offset(at).build(),
            (Call::Flush(_), _) => opcode::Fsync::new(Fixed(file)).flags(FsyncFlags::DATASYNC).build(),
        };
        let entry = entry.user_data(slot as u64);
        let mut queue = self.ring.submission();
        // SAFETY: the `len` bytes at `memory` are the call's, as `Job::new` has checked. They are in a buffer of
        // the pool, which is where it is however the call, or its box, is moved, and which is the call's until
        // that is answered or dropped. The call is kept in `jobs`, where nobody touches it, until the kernel has
        // said that it is done with it, also when the connection or the server ends: see `drop`.
        if unsafe { queue.push(&entry) }.is_err() {
            return Err(job);
        }
        drop(queue);
        job.file = file;
        self.jobs[slot] = Some(job);
        self.free.pop();
        Ok(())
    }

    /// Submits queued jobs, and runs deferred completions. True if there were any.
    pub(crate) fn submit(&mut self) -> io::Result<bool> {
        let queue = self.ring.submission();
        if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
            return Ok(false);
        }
        drop(queue);
        match self.ring.submit() {
            Ok(_) => Ok(true),
            Err(error) if passes(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// A completed job, and its moved bytes.
    pub(crate) fn take_completed(&mut self) -> Option<(Job, Result<usize, Errno>)> {
        loop {
            let completed = self.ring.completion().next()?;
            let slot = completed.user_data() as usize;
            let Some(mut job) = self.jobs.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let moved = match usize::try_from(completed.result()) {
                Ok(moved) => Ok(moved.min(job.left())),
                Err(_) => Err(Errno::from_raw_os_error(-completed.result())),
            };
            job.done += moved.unwrap_or(0);
            return Some((job, moved));
        }
    }

    /// Outstanding jobs.
    pub(crate) fn under_way(&self) -> usize {
        self.jobs.len() - self.free.len()
    }
}

/// True for transient errors.
fn passes(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INTR | Errno::AGAIN | Errno::BUSY))
}

impl Ring {
    /// Waits until the kernel is done with the memory of all jobs. `ended` gets each.
    pub(crate) fn wait_for_all(&mut self, mut ended: impl FnMut(&Job)) {
        while self.under_way() > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if passes(&error) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => {
                    print_error!("io_uring_enter: {error}: {} blocks are never given back", self.under_way());
                    self.jobs.drain(..).flatten().for_each(mem::forget);
                    self.free.clear();
                    mem::forget(self.registered.take());
                    return;
                }
            }
            while let Some((job, _)) = self.take_completed() {
                ended(&job);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.wait_for_all(|_| {});
    }
}
