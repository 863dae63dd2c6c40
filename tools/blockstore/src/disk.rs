//! The store's file on one shard's io_uring: what is asked of it waits here until there is room in the ring, goes
//! past the page cache where it can, and is gone on with where the kernel has stopped short.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use rpcrdma::Arena;
use rpcrdma::service::ShardTask;
use rustix::io::Errno;

use crate::codec::Status;
use crate::store::{self, Store};
use crate::sys::{Job, Ring, What};

/// Places of the files in the ring.
const FILE: u32 = 0;
const DIRECT: u32 = 1;

/// What has become of a job.
type Finish = fn(&Store, Job, Result<(), Status>);

/// The file, for the handlers of one shard.
#[derive(Clone)]
pub(crate) struct Disk(Weak<RefCell<Inner>>);

impl Disk {
    /// A ring for `entries` jobs at once over a store, and the task that turns it; `finish` gets each job when it
    /// is over.
    pub(crate) fn open(store: &Arc<Store>, arena: &Arena, entries: u32, finish: Finish) -> io::Result<(Self, Turn)> {
        let mut files = vec![store.file().as_fd()];
        files.extend(store.direct().map(|direct| direct.file.as_fd()));
        let mut ring = Ring::new(entries, &files)?;
        if let Err(error) = ring.register(arena) {
            let bytes = arena.len();
            eprintln!("{bytes} bytes are not registered with the io_uring ({error}; see `ulimit -l`): slower");
        }
        let descriptor = ring.descriptor().try_clone_to_owned()?;
        let store = Arc::clone(store);
        let (waiting, held) = (VecDeque::new(), VecDeque::new());
        let inner = Inner { store, ring, waiting, held, waits: false, finish, no_direct: false };
        let inner = Rc::new(RefCell::new(inner));
        Ok((Self(Rc::downgrade(&inner)), Turn { inner, descriptor }))
    }

    /// Has a job done. When the task is gone, its call is dropped, and so answered.
    pub(crate) fn start(&self, job: Job) {
        if let Some(inner) = self.0.upgrade() {
            inner.borrow_mut().waiting.push_back(job);
        }
    }
}

/// The shard's task.
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
    /// What the ring has had no room for.
    waiting: VecDeque<Job>,
    /// Writes that the gate has not let in; they go in order.
    held: VecDeque<Job>,
    /// The first of them is one that goes first.
    waits: bool,
    finish: Finish,
    /// The file has refused what it had said it would take.
    no_direct: bool,
}

impl Inner {
    /// Gives the ring what there is room for, with one call of the system, and ends what has completed.
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
        // What is held waits for other shards, too, of which nothing wakes this one.
        busy || !self.held.is_empty()
    }

    /// Starts the writes that the gate lets in by now.
    fn start_held(&mut self) -> bool {
        let mut any = false;
        while let Some(mut job) = self.held.pop_front() {
            let direct = self.goes_direct(&mut job);
            if let Err(job) = self.start_write(job, direct) {
                self.held.push_front(job);
                return any;
            }
            any = true;
        }
        any
    }

    /// Gives the ring a job, or keeps it where it waits for the gate; it comes back if the ring is full.
    fn admit(&mut self, mut job: Job) -> Result<(), Job> {
        let direct = self.goes_direct(&mut job);
        if job.what() != What::Write {
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

    /// Starts a write, if the gate lets it in and the ring has room.
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

    /// Whether what is left of a job goes past the page cache.
    fn goes_direct(&self, job: &mut Job) -> bool {
        let Some(direct) = self.store.direct() else { return false };
        if self.no_direct || job.what() == What::Sync {
            return false;
        }
        let (at, left) = (job.at(), job.left());
        job.memory().is_some_and(|memory| direct.takes(memory, at, left))
    }

    fn ended(&mut self, job: Job, moved: Result<usize, Errno>) {
        let (what, went_direct) = (job.what(), job.file() == DIRECT);
        if what == What::Write {
            self.store.gate.leave(went_direct);
        }
        let outcome = match moved {
            Ok(_) if job.left() == 0 => Ok(()),
            // The file is shorter than it was.
            Ok(0) if what != What::Sync => Err(store::status(name(what), &io::ErrorKind::UnexpectedEof.into())),
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => return self.waiting.push_back(job),
            Err(Errno::INVAL) if went_direct => return self.without_direct(job),
            Err(error) => Err(store::status(name(what), &error.into())),
        };
        (self.finish)(&self.store, job, outcome);
    }

    /// The file has refused what it should have taken.
    fn without_direct(&mut self, job: Job) {
        if !self.no_direct {
            eprintln!("O_DIRECT is refused although all is aligned: buffered I/O from now on");
        }
        self.no_direct = true;
        self.waiting.push_back(job);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Other shards go on.
        let gate = &self.store.gate;
        gate.no_longer_waits(&mut self.waits);
        self.ring.wait_for_all(|job| {
            if job.what() == What::Write {
                gate.leave(job.file() == DIRECT);
            }
        });
    }
}

fn name(what: What) -> &'static str {
    match what {
        What::Read => "read",
        What::Write => "write",
        What::Sync => "fdatasync",
    }
}
