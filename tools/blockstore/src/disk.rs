//! The file of the store on one shard's io_uring. Jobs wait for room in the ring, use O_DIRECT where possible, and are
//! resubmitted after short transfers.
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

/// Indexes of the files in the ring.
const FILE: u32 = 0;
const DIRECT: u32 = 1;

/// Outcome of a job.
type Finish = fn(&Store, Job, Result<(), Status>);

/// Handle for the handlers of one shard.
#[derive(Clone)]
pub(crate) struct Disk(Weak<RefCell<Inner>>);

impl Disk {
    /// A ring of `entries` jobs over a store, and its task. `finish` gets each completed job.
    pub(crate) fn open(store: &Arc<Store>, arena: &Arena, entries: u32, finish: Finish) -> io::Result<(Self, Turn)> {
        let mut files = vec![store.file().as_fd()];
        files.extend(store.direct().map(|direct| direct.file.as_fd()));
        let mut ring = Ring::new(entries, &files)?;
        if let Err(error) = ring.register(arena) {
            let bytes = arena.len();
            print_error!("{bytes} bytes are not registered with the io_uring ({error}; see `ulimit -l`): slower");
        }
        let descriptor = ring.descriptor().try_clone_to_owned()?;
        let store = Arc::clone(store);
        let (waiting, held) = (VecDeque::new(), VecDeque::new());
        let inner = Inner { store, ring, waiting, held, waits: false, finish, no_direct: false };
        let inner = Rc::new(RefCell::new(inner));
        Ok((Self(Rc::downgrade(&inner)), Turn { inner, descriptor }))
    }

    /// Queues a job. Without a task, its call is dropped, and so answered.
    pub(crate) fn start(&self, job: Job) {
        if let Some(inner) = self.0.upgrade() {
            inner.borrow_mut().waiting.push_back(job);
        }
    }
}

/// Task of the shard.
pub(crate) struct Turn {
    inner: Rc<RefCell<Inner>>,
    /// The ring's.
    descriptor: OwnedFd,
}

impl ShardTask for Turn {
    fn poll(&mut self) -> bool {
        self.inner.borrow_mut().turn()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.descriptor.as_fd())
    }
}

struct Inner {
    store: Arc<Store>,
    ring: Ring,
    /// Jobs that wait for room in the ring.
    waiting: VecDeque<Job>,
    /// Writes that wait for the gate, in order.
    held: VecDeque<Job>,
    /// The first one has priority at the gate.
    waits: bool,
    finish: Finish,
    /// O_DIRECT failed despite its announced alignment.
    no_direct: bool,
}

impl Inner {
    /// Submits jobs with one system call, and ends completed ones.
    fn turn(&mut self) -> bool {
        let mut busy = self.start_held();
        while let Some(job) = self.waiting.pop_front() {
            match self.admit(job) {
                Ok(()) => busy = true,
                Err(job) => {
                    self.waiting.push_front(job);
                    break;
                }
            }
        }
        match self.ring.submit() {
            Ok(any) => busy |= any,
            Err(error) => panic!("io_uring_enter: {error}"),
        }
        while let Some((job, moved)) = self.ring.take_completed() {
            busy = true;
            self.ended(job, moved);
        }
        // Held writes wait for other shards, which do not wake this one.
        busy || !self.held.is_empty()
    }

    /// Starts the writes that the gate admits.
    fn start_held(&mut self) -> bool {
        let mut any = false;
        while let Some(job) = self.held.pop_front() {
            let direct = self.goes_direct(&job);
            if let Err(job) = self.start_write(job, direct) {
                self.held.push_front(job);
                return any;
            }
            any = true;
        }
        any
    }

    /// Submits a job, or queues it for the gate. Returns it if the ring is full.
    fn admit(&mut self, job: Job) -> Result<(), Job> {
        let direct = self.goes_direct(&job);
        if !job.is_write() {
            return self.ring.start(job, if direct { DIRECT } else { FILE });
        }
        let job = match self.held.is_empty() {
            true => self.start_write(job, direct),
            false => Err(job),
        };
        if let Err(job) = job {
            self.held.push_back(job);
        }
        Ok(())
    }

    /// Starts a write if gate and ring admit it.
    fn start_write(&mut self, job: Job, direct: bool) -> Result<(), Job> {
        let gate = &self.store.gate;
        if direct {
            gate.no_longer_waits(&mut self.waits);
        }
        if !gate.enter(direct) {
            if !direct {
                gate.waits(&mut self.waits);
            }
            return Err(job);
        }
        gate.no_longer_waits(&mut self.waits);
        let started = self.ring.start(job, if direct { DIRECT } else { FILE });
        if started.is_err() {
            gate.leave(direct);
        }
        started
    }

    /// True if the rest of a job uses O_DIRECT: data in a message is rarely aligned.
    fn goes_direct(&self, job: &Job) -> bool {
        let direct = self.store.direct().filter(|_| !self.no_direct && job.left() > 0);
        direct.is_some_and(|direct| direct.takes(job.memory(), job.at(), job.left()))
    }

    fn ended(&mut self, job: Job, moved: Result<usize, Errno>) {
        let (name, went_direct) = (job.name(), job.file() == DIRECT);
        if job.is_write() {
            self.store.gate.leave(went_direct);
        }
        let outcome = match moved {
            Ok(_) if job.left() == 0 => Ok(()),
            // The file was truncated.
            Ok(0) => Err(store::status(name, &io::ErrorKind::UnexpectedEof.into())),
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => return self.waiting.push_back(job),
            Err(Errno::INVAL) if went_direct => {
                if !std::mem::replace(&mut self.no_direct, true) {
                    print_error!("O_DIRECT is refused although all is aligned: buffered I/O from now on");
                }
                return self.waiting.push_back(job);
            }
            Err(error) => Err(store::status(name, &error.into())),
        };
        (self.finish)(&self.store, job, outcome);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Other shards continue.
        let gate = &self.store.gate;
        gate.no_longer_waits(&mut self.waits);
        self.ring.wait_for_all(|job| {
            if job.is_write() {
                gate.leave(job.file() == DIRECT);
            }
        });
    }
}
