#![expect(unsafe_code, reason = "maps a file, and lets the kernel read and write the memory of calls")]
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
    // SAFETY: the bytes of a mapping must not change while a reference to them exists. In this process only the
    // `Store` has the file open. It writes to a stripe only while it holds the stripe's lock exclusively, and
    // references exist only under the same lock. The file's lock keeps out other processes that respect it;
    // `Store` documents the effects of processes that ignore it.
    unsafe { options.map(file) }
}

/// A deferred call.
#[derive(Debug)]
pub(crate) enum Call {
    /// Read the file into the result.
    Read(Deferred<Read>),
    /// Write the argument to the file.
    Write(Deferred<Write>),
    /// Make earlier writes stable.
    Flush(Deferred<Flush>),
}

/// A call and its memory, which is part of a chunk or a message, at any address.
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
    /// Index of the file at the last submission.
    file: u32,
}

impl Job {
    /// Creates a job of `len` bytes.
    ///
    /// # Panics
    /// If the call has less memory.
    pub(crate) fn new(mut call: Call, offset: u64, len: usize) -> Self {
        let (memory, room) = match &mut call {
            Call::Read(call) => call.data().map_or((ptr::null_mut(), 0), |mut data| (data.as_mut_ptr(), data.room())),
            Call::Write(call) => {
                let data = call.args().data.bytes();
                (data.as_ptr().cast_mut(), data.len())
            }
            Call::Flush(_) => (ptr::null_mut(), 0),
        };
        assert!(len <= room, "a job of {len} bytes exceeds the {room} bytes of its call");
        Self { call, memory, offset, len, done: 0, file: 0 }
    }

    pub(crate) fn is_write(&self) -> bool {
        matches!(self.call, Call::Write(_))
    }

    /// Name of the job's system call.
    pub(crate) fn system_call(&self) -> &'static str {
        match self.call {
            Call::Read(_) => "read",
            Call::Write(_) => "write",
            Call::Flush(_) => "fdatasync",
        }
    }

    /// Offset in the file of the remaining bytes.
    pub(crate) fn file_offset(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// Index of the file at the last submission.
    pub(crate) fn file(&self) -> u32 {
        self.file
    }

    /// Number of remaining bytes.
    pub(crate) fn remaining(&self) -> usize {
        self.len - self.done
    }

    /// Memory of the remaining bytes.
    pub(crate) fn memory(&self) -> *mut u8 {
        self.memory.wrapping_add(self.done)
    }

    /// Returns the call with its offset and length. The bytes that were read become the data of its result.
    pub(crate) fn into_call(mut self) -> (Call, u64, usize) {
        if let Call::Read(call) = &mut self.call
            && let Ok(mut data) = call.data()
        {
            // SAFETY: the kernel has reported that it wrote each of these bytes, from the start of the result on.
            // It writes no more, because the job is not in a ring.
            unsafe { data.advance(self.done) };
        }
        (self.call, self.offset, self.len)
    }
}

/// Longest registered buffer.
const MAX_REGISTERED: usize = 1 << 30;

/// The io_uring of one shard, which owns submitted jobs until the kernel no longer uses their memory.
pub(crate) struct Ring {
    ring: IoUring,
    /// Registered memory, as buffers of [`MAX_REGISTERED`] bytes.
    registered: Option<Arena>,
    /// Submitted jobs by slot.
    jobs: Vec<Option<Job>>,
    /// Free slots.
    free: Vec<usize>,
}

impl Ring {
    /// Creates a ring of `entries` jobs for these files, which jobs name by index.
    pub(crate) fn new(entries: u32, files: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        // Completions run in the shard's own system calls, without interrupts (Linux 6.0). IORING_SETUP_DEFER_TASKRUN
        // would not wake sleepers on the descriptor.
        let optimized = builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().build(entries);
        let ring = match optimized {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => IoUring::new(entries),
            other => other,
        }?;
        let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        if !files.is_empty() {
            ring.submitter().register_files(&files)?;
        }
        // This call fails if a seccomp filter allows the creation of a ring but not its use.
        ring.submit()?;
        let jobs = (0..entries).map(|_| None).collect();
        Ok(Self { ring, registered: None, jobs, free: (0..entries as usize).rev().collect() })
    }

    /// Registers memory, which saves a page look-up per job.
    pub(crate) fn register(&mut self, arena: &Arena) -> io::Result<()> {
        let (base, len) = (arena.base_address(), arena.len());
        let buffers = (0..len).step_by(MAX_REGISTERED).map(|at| libc::iovec {
            iov_base: ptr::with_exposed_provenance_mut(base + at),
            iov_len: MAX_REGISTERED.min(len - at),
        });
        let buffers: Vec<_> = buffers.collect();
        // SAFETY: the arena stays mapped while a handle to it exists, and `registered` keeps a handle beside the ring.
        unsafe { self.ring.submitter().register_buffers(&buffers) }?;
        self.registered = Some(arena.clone());
        Ok(())
    }

    /// The ring's descriptor, which is readable after a completion.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Index of the registered buffer that holds all of these bytes.
    fn registered_buffer(&self, memory: *mut u8, len: usize) -> Option<u16> {
        let arena = self.registered.as_ref()?;
        let first = memory.addr().checked_sub(arena.base_address())?;
        let last = first + len.checked_sub(1)?;
        (last < arena.len() && first / MAX_REGISTERED == last / MAX_REGISTERED)
            .then_some((first / MAX_REGISTERED) as u16)
    }

    /// Queues a job for the next [`submit`](Self::submit). Returns it if the ring is full.
    pub(crate) fn start(&mut self, mut job: Job, file: u32) -> Result<(), Job> {
        let Some(&slot) = self.free.last() else { return Err(job) };
        let (memory, len, at) = (job.memory(), job.remaining() as u32, job.file_offset());
        let entry = match (&job.call, self.registered_buffer(memory, job.remaining())) {
            (Call::Read(_), Some(buffer)) => {
                opcode::ReadFixed::new(Fixed(file), memory, len, buffer).offset(at).build()
            }
            (Call::Read(_), None) => opcode::Read::new(Fixed(file), memory, len).offset(at).build(),
            (Call::Write(_), Some(buffer)) => {
                opcode::WriteFixed::new(Fixed(file), memory, len, buffer).offset(at).build()
            }
            (Call::Write(_), None) => opcode::Write::new(Fixed(file), memory, len).offset(at).build(),
            (Call::Flush(_), _) => opcode::Fsync::new(Fixed(file)).flags(FsyncFlags::DATASYNC).build(),
        };
        let entry = entry.user_data(slot as u64);
        let mut queue = self.ring.submission();
        // SAFETY: the `len` bytes at `memory` belong to the call, as `Job::new` has checked. They are in a buffer of
        // the pool, whose address does not change when the call or its box moves, and which belongs to the call
        // until the call is answered or dropped. The call stays in `jobs`, where nothing touches it, until the
        // kernel has reported its completion, also when the connection or the server ends: see `drop`.
        if unsafe { queue.push(&entry) }.is_err() {
            return Err(job);
        }
        drop(queue);
        job.file = file;
        self.jobs[slot] = Some(job);
        self.free.pop();
        Ok(())
    }

    /// Submits queued jobs, and runs deferred completions. Returns true if there were any.
    pub(crate) fn submit(&mut self) -> io::Result<bool> {
        let queue = self.ring.submission();
        if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
            return Ok(false);
        }
        drop(queue);
        match self.ring.submit() {
            Ok(_) => Ok(true),
            Err(error) if is_transient(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Returns a completed job, and the number of bytes that were moved.
    pub(crate) fn take_completed(&mut self) -> Option<(Job, Result<usize, Errno>)> {
        loop {
            let completed = self.ring.completion().next()?;
            let slot = completed.user_data() as usize;
            let Some(mut job) = self.jobs.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let moved = match usize::try_from(completed.result()) {
                Ok(moved) => Ok(moved.min(job.remaining())),
                Err(_) => Err(Errno::from_raw_os_error(-completed.result())),
            };
            job.done += moved.unwrap_or(0);
            return Some((job, moved));
        }
    }

    /// Number of outstanding jobs.
    pub(crate) fn outstanding(&self) -> usize {
        self.jobs.len() - self.free.len()
    }
}

/// Whether the system call can be repeated after this error.
fn is_transient(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INTR | Errno::AGAIN | Errno::BUSY))
}

impl Ring {
    /// Waits until the kernel no longer uses the memory of any job. `complete` is called with each job.
    pub(crate) fn wait_for_all(&mut self, mut complete: impl FnMut(&Job)) {
        while self.outstanding() > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_transient(&error) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => {
                    print_error!("io_uring_enter: {error}: the memory of {} blocks is leaked", self.outstanding());
                    self.jobs.drain(..).flatten().for_each(mem::forget);
                    self.free.clear();
                    mem::forget(self.registered.take());
                    return;
                }
            }
            while let Some((job, _)) = self.take_completed() {
                complete(&job);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.wait_for_all(|_| {});
    }
}
