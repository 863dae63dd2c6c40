//! I/O on the store's file through the io_uring of one shard.
//!
//! Jobs wait for room in the ring, use O_DIRECT where possible, and are resubmitted after short transfers.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use rpcrdma::Arena;
use rpcrdma::service::ShardTask;
use rpcrdma_config::print_error;
use rustix::io::Errno;

use crate::protocol::Status;
use crate::store::{self, Store};
use crate::sys::{Job, Ring};

/// Index of the buffered file in the ring.
const FILE: u32 = 0;
/// Index of the file with O_DIRECT in the ring.
const DIRECT: u32 = 1;

/// Callback for a completed job.
type Finish = fn(&Store, Job, Result<(), Status>);

/// A handle with which the handlers of one shard queue jobs.
#[derive(Clone)]
pub(crate) struct Disk(Weak<RefCell<DiskState>>);

impl Disk {
    /// Creates a ring of `entries` jobs for a store, and its task. `finish` is called with each completed job.
    pub(crate) fn open(
        store: &Arc<Store>,
        arena: &Arena,
        entries: u32,
        finish: Finish,
    ) -> io::Result<(Self, DiskTask)> {
        let mut files = vec![store.file().as_fd()];
        files.extend(store.direct().map(|direct| direct.file.as_fd()));
        let mut ring = Ring::new(entries, &files)?;
        if let Err(error) = ring.register(arena) {
            let bytes = arena.len();
            print_error!(
                "{bytes} bytes are not registered with the io_uring ({error}; see `ulimit -l`): I/O is slower"
            );
        }
        let descriptor = ring.descriptor().try_clone_to_owned()?;
        let store = Arc::clone(store);
        let (waiting, gated) = (VecDeque::new(), VecDeque::new());
        let state = DiskState { store, ring, waiting, gated, has_priority: false, finish, is_direct_disabled: false };
        let state = Rc::new(RefCell::new(state));
        Ok((Self(Rc::downgrade(&state)), DiskTask { state, descriptor }))
    }

    /// Queues a job. If the task has ended, the job is dropped, which also answers its call.
    pub(crate) fn start(&self, job: Job) {
        if let Some(state) = self.0.upgrade() {
            state.borrow_mut().waiting.push_back(job);
        }
    }
}

/// The shard's task, which submits and completes jobs.
pub(crate) struct DiskTask {
    state: Rc<RefCell<DiskState>>,
    /// Duplicate of the ring's descriptor.
    descriptor: OwnedFd,
}

impl ShardTask for DiskTask {
    fn poll(&mut self) -> bool {
        self.state.borrow_mut().run()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.descriptor.as_fd())
    }
}

struct DiskState {
    store: Arc<Store>,
    ring: Ring,
    /// Jobs that wait for room in the ring.
    waiting: VecDeque<Job>,
    /// Writes that wait for the gate, oldest first.
    gated: VecDeque<Job>,
    /// Whether the first gated write has priority at the gate.
    has_priority: bool,
    finish: Finish,
    /// Whether O_DIRECT failed despite the right alignment, and is no longer used.
    is_direct_disabled: bool,
}

impl DiskState {
    /// Submits jobs with one system call, and completes finished ones. Returns true if there was work.
    fn run(&mut self) -> bool {
        let mut is_busy = self.start_gated();
        while let Some(job) = self.waiting.pop_front() {
            match self.admit(job) {
                Ok(()) => is_busy = true,
                Err(job) => {
                    self.waiting.push_front(job);
                    break;
                }
            }
        }
        match self.ring.submit() {
            Ok(submitted) => is_busy |= submitted,
            Err(error) => panic!("io_uring_enter: {error}"),
        }
        while let Some((job, moved)) = self.ring.take_completed() {
            is_busy = true;
            self.complete(job, moved);
        }
        // Gated writes wait for other shards, which do not wake this shard, so it must not sleep.
        is_busy || !self.gated.is_empty()
    }

    /// Starts the writes that the gate admits. Returns true if there were any.
    fn start_gated(&mut self) -> bool {
        let mut has_started = false;
        while let Some(job) = self.gated.pop_front() {
            let direct = self.uses_direct(&job);
            if let Err(job) = self.start_write(job, direct) {
                self.gated.push_front(job);
                return has_started;
            }
            has_started = true;
        }
        has_started
    }

    /// Submits a job, or queues it for the gate. Returns the job if the ring is full.
    fn admit(&mut self, job: Job) -> Result<(), Job> {
        let direct = self.uses_direct(&job);
        if !job.is_write() {
            return self.ring.start(job, if direct { DIRECT } else { FILE });
        }
        let job = match self.gated.is_empty() {
            true => self.start_write(job, direct),
            false => Err(job),
        };
        if let Err(job) = job {
            self.gated.push_back(job);
        }
        Ok(())
    }

    /// Starts a write if the gate and the ring admit it. Otherwise, returns the job.
    fn start_write(&mut self, job: Job, direct: bool) -> Result<(), Job> {
        let gate = &self.store.gate;
        if direct {
            gate.clear_waiting(&mut self.has_priority);
        }
        if !gate.enter(direct) {
            if !direct {
                gate.set_waiting(&mut self.has_priority);
            }
            return Err(job);
        }
        gate.clear_waiting(&mut self.has_priority);
        let started = self.ring.start(job, if direct { DIRECT } else { FILE });
        if started.is_err() {
            gate.leave(direct);
        }
        started
    }

    /// Whether the rest of a job can use O_DIRECT. Data in a message is rarely aligned for it.
    fn uses_direct(&self, job: &Job) -> bool {
        let direct = self.store.direct().filter(|_| !self.is_direct_disabled && job.remaining() > 0);
        direct.is_some_and(|direct| direct.accepts(job.memory(), job.file_offset(), job.remaining()))
    }

    fn complete(&mut self, job: Job, moved: Result<usize, Errno>) {
        let (name, was_direct) = (job.system_call(), job.file() == DIRECT);
        if job.is_write() {
            self.store.gate.leave(was_direct);
        }
        let outcome = match moved {
            Ok(_) if job.remaining() == 0 => Ok(()),
            // No bytes were moved, because the file was truncated.
            Ok(0) => Err(store::report(name, &io::ErrorKind::UnexpectedEof.into())),
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => return self.waiting.push_back(job),
            Err(Errno::INVAL) if was_direct => {
                if !std::mem::replace(&mut self.is_direct_disabled, true) {
                    print_error!("O_DIRECT fails although the data is aligned: using buffered I/O from now on");
                }
                return self.waiting.push_back(job);
            }
            Err(error) => Err(store::report(name, &error.into())),
        };
        (self.finish)(&self.store, job, outcome);
    }
}

impl Drop for DiskState {
    fn drop(&mut self) {
        // The gate must not keep the entries of this shard, because other shards continue.
        let gate = &self.store.gate;
        gate.clear_waiting(&mut self.has_priority);
        self.ring.wait_for_all(|job| {
            if job.is_write() {
                gate.leave(job.file() == DIRECT);
            }
        });
    }
}
