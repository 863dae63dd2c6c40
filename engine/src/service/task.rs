//! What an application does on a shard's thread, beside its handlers.

use std::fmt;
use std::task::Waker;

use rpcrdma_mempool::Arena;
use rustix::fd::BorrowedFd;

use super::procedure::LocalServices;

/// Work of the application's own on a shard's thread: submits I/O, looks what has completed, and answers the
/// calls that waited for it.
pub trait ShardTask {
    /// Does what there is to do, as far as it does not block, and a bounded part of it. True if there was
    /// anything: the shard goes to sleep, as its [`IdlePolicy`](crate::IdlePolicy) says, when neither it nor
    /// this has found work for a while. Called once a turn, behind the handlers of what came in this turn;
    /// what is answered here goes out in the same turn.
    ///
    /// One that panics, here or in [`descriptor`](Self::descriptor), is logged and dropped, with the calls that it
    /// holds; the shard goes on, whatever that drop does.
    fn poll(&mut self) -> bool;

    /// A descriptor that is readable while there is something to do, for a shard that sleeps: that of an
    /// io_uring, an epoll, an eventfd. Asked for before each sleep, behind a last [`poll`](Self::poll). Without
    /// one, who has work for the task wakes the shard ([`ShardSetup::waker`]).
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// What a shard is, for what an application makes on its thread.
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardSetup<'a> {
    /// Which of the server's shards, from 0 on.
    pub index: usize,
    /// The memory that calls and their results are in: that of a server may be registered elsewhere, too, as
    /// with an io_uring.
    pub arena: &'a Arena,
    /// Wakes the shard, from any thread: it takes a turn.
    pub waker: Waker,
}

/// What an application makes for one shard, on its thread; nothing of it has to be [`Send`].
#[derive(Default)]
pub struct Application {
    /// What the shard serves.
    pub services: LocalServices,
    /// What it does beside that.
    pub task: Option<Box<dyn ShardTask>>,
}

impl fmt::Debug for Application {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { services, task } = self;
        f.debug_struct("Application").field("services", services).field("task", &task.is_some()).finish()
    }
}
