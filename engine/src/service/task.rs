//! Application code on a shard's thread, beside its handlers.

use std::fmt;
use std::task::Waker;

use rpcrdma_mempool::Arena;
use rustix::fd::BorrowedFd;

use super::procedure::LocalServices;

/// Application work on a shard's thread, polled once per turn.
///
/// It submits I/O, checks for completions, and answers deferred calls.
pub trait ShardTask {
    /// Does a bounded amount of work, without blocking.
    ///
    /// Returns true if there was any.
    ///
    /// The shard calls this once per turn, after the handlers of that turn's calls, and sends the task's replies in the
    /// same turn. The shard sleeps, by its [`IdlePolicy`](crate::IdlePolicy), when neither the shard nor the task has
    /// found work for a while.
    ///
    /// If the task panics, here or in [`descriptor`](Self::descriptor), the panic is logged, and the task is dropped
    /// with the calls that it holds. The shard continues, even if that drop panics.
    fn poll(&mut self) -> bool;

    /// A descriptor, readable while there is work, for a sleeping shard.
    ///
    /// It may be an io_uring, an epoll, or an eventfd. The shard requests it before each sleep, after a last
    /// [`poll`](Self::poll). Without a descriptor, [`ShardSetup::waker`] must wake the shard.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Properties of a shard, for an application that starts on it.
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardSetup<'a> {
    /// Index of the shard in its server, from 0.
    pub index: usize,
    /// Memory of calls and results, to be registered with io_uring, too.
    pub arena: &'a Arena,
    /// Wakes the shard for a turn, from any thread.
    pub waker: Waker,
}

/// Services and task of one shard, which need not be [`Send`].
#[derive(Default)]
pub struct Application {
    /// Services of the shard.
    pub services: LocalServices,
    /// Task of the shard, if any.
    pub task: Option<Box<dyn ShardTask>>,
}

impl fmt::Debug for Application {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { services, task } = self;
        f.debug_struct("Application").field("services", services).field("task", &task.is_some()).finish()
    }
}
