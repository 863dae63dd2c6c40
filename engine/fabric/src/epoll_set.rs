//! The descriptors that a fabric sleeps on, and a waker for other threads.

#![forbid(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::failed;
use crate::{FabricError, Waker};

/// A set of descriptors, each watched under a token. One of them is a waker.
#[derive(Debug)]
pub(crate) struct EpollSet {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
}

impl EpollSet {
    /// The token of the waker.
    pub(crate) const WAKER: u64 = 0;

    pub(crate) fn new() -> Result<Self, FabricError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(|e| failed("epoll_create", e))?;
        let waker = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|e| failed("eventfd", e))?;
        let set = Self { epoll, waker: Arc::new(waker) };
        set.add(&*set.waker, Self::WAKER, EventFlags::IN)?;
        Ok(set)
    }

    /// A descriptor that is readable when a watched descriptor has an event.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.waker))
    }

    /// Watches a descriptor for these events.
    pub(crate) fn add(&self, fd: impl AsFd, token: impl Into<u64>, flags: EventFlags) -> Result<(), FabricError> {
        epoll::add(&self.epoll, fd, EventData::new_u64(token.into()), flags).map_err(|e| failed("epoll_ctl", e))
    }

    /// Changes the events of a watched descriptor.
    pub(crate) fn modify(&self, fd: impl AsFd, token: impl Into<u64>, flags: EventFlags) {
        // This cannot fail: the descriptor was added, and is still open.
        let _ = epoll::modify(&self.epoll, fd, EventData::new_u64(token.into()), flags);
    }

    /// Stops watching a descriptor.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        // This fails if the descriptor was never added.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events up to `timeout`, and returns the tokens, at most `N`. `None` if a signal interrupted the wait.
    /// A wake ends this wait, and further ones until [`clear_waker`](Self::clear_waker).
    pub(crate) fn wait<const N: usize>(
        &self,
        timeout: Option<Duration>,
    ) -> Option<impl Iterator<Item = u64> + Clone + use<N>> {
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        let mut space = [MaybeUninit::<epoll::Event>::uninit(); N];
        let (ready, _) = epoll::wait(&self.epoll, &mut space, timeout.as_ref()).ok()?;
        let mut tokens = [Self::WAKER; N];
        ready.iter().zip(&mut tokens).for_each(|(event, token)| *token = event.data.u64());
        Some(tokens.into_iter().take(ready.len()))
    }

    /// Clears the wakes so far.
    pub(crate) fn clear_waker(&self) {
        // This fails if the waker was not used.
        let _ = rustix::io::read(&*self.waker, &mut [0; 8]);
    }
}

/// The shorter of two times; `None` is unlimited.
pub(crate) fn shorter(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    [a, b].into_iter().flatten().min()
}
