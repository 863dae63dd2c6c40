//! Sleep until an event of the device, the connection manager, or another thread.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::{BorrowedFd, OwnedFd};

use crate::Waker;

/// Event sources.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// Completions.
    Completions = 0,
    /// Connection events.
    Connections = 1,
    /// Connect requests.
    Listener = 2,
    /// Asynchronous events.
    Device = 3,
    /// Another thread.
    Waker = 4,
}

const ALL: [Source; 5] = [Source::Completions, Source::Connections, Source::Listener, Source::Device, Source::Waker];

/// All descriptors of a fabric.
pub(super) struct Sleeper {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
}

impl Sleeper {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let sleeper = Self { epoll, waker };
        sleeper.add(Source::Waker, rustix::fd::AsFd::as_fd(&*sleeper.waker))?;
        Ok(sleeper)
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        rustix::fd::AsFd::as_fd(&self.epoll)
    }

    pub(super) fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.waker))
    }

    pub(super) fn add(&self, source: Source, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(source as u64), EventFlags::IN)?)
    }

    pub(super) fn remove(&self, fd: BorrowedFd<'_>) {
        // The descriptor may never have been added.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events and returns the sources that may have one. A time-out of `None` is infinite.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> [bool; ALL.len()] {
        let mut happened = [false; ALL.len()];
        let mut events = [const { std::mem::MaybeUninit::uninit() }; ALL.len()];
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        // The only error is a signal. The caller polls, finds nothing, and returns.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, timeout.as_ref()) else {
            return happened;
        };
        for event in events {
            if let Some(place) = happened.get_mut(event.data.u64() as usize) {
                *place = true;
            }
        }
        happened
    }

    /// Clears the waker.
    pub(super) fn awake(&self) {
        let _ = rustix::io::read(&*self.waker, &mut [0; 8]);
    }
}
