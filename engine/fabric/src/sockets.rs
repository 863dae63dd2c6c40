//! Inputs of a fabric's connection management: shared listeners, sockets, and a waker.

#![forbid(unsafe_code)]

use std::fmt::{Arguments, Debug};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;

use crate::log_limit::ClockedLog;
use crate::seats::{Arrival, Seat};
use crate::{FabricError, FabricStats, Waker};

/// Most sockets with news per pass; the others follow in the next.
pub(crate) const EVENTS: usize = 64;
/// Tokens of the set's own descriptors. A fabric's tokens are larger.
const WAKER: u64 = 0;
const LISTENER: u64 = 1;
/// The least token that is free.
pub(crate) const FIRST_TOKEN: u64 = 2;

/// A bound address, shared by shards that all take its connections.
pub(crate) trait Listen: Clone + Debug {
    /// A peer's socket and address.
    type Visitor: Debug;

    fn socket(&self) -> BorrowedFd<'_>;
    /// A place among the fabrics that share it.
    fn seat(&self, waker: Waker) -> Seat<Self::Visitor>;
    /// Accepts one connection, or returns why it was closed.
    fn accept(&self) -> Result<Result<Self::Visitor, String>, Errno>;
}

/// What refused connect requests are counted and logged by.
pub(crate) trait Refuses {
    /// The fabric, in log lines.
    const FABRIC: &str;

    fn parts(&mut self) -> (&mut FabricStats, &mut ClockedLog);

    /// A listener reduced its offer.
    #[cold]
    fn not_accepted(&mut self, why: NotAccepted) {
        match why {
            NotAccepted::Refused(why) => self.refuse(format_args!("{why}")),
            NotAccepted::Failed(error) => {
                let error = failed("accept", error);
                self.parts().1.warn("failures of accept", format_args!("{}: {error}", Self::FABRIC));
            }
        }
    }

    /// Counts and logs a refused connect request.
    #[cold]
    fn refuse(&mut self, why: Arguments<'_>) {
        let (stats, log) = self.parts();
        stats.requests_refused += 1;
        log.warn("connect requests refused", format_args!("{}: connect request refused: {why}", Self::FABRIC));
    }
}

/// The cause of a connection that was not accepted.
#[derive(Debug)]
pub(crate) enum NotAccepted {
    /// It was closed, and why.
    Refused(String),
    /// The system call failed.
    Failed(Errno),
}

/// Sockets off the message path, and the means to wait for them.
#[derive(Debug)]
pub(crate) struct Sockets<L: Listen> {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
    listeners: Vec<(L, Seat<L::Visitor>)>,
}

/// News of a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum News {
    /// The waker was used.
    Wake,
    /// A peer connects.
    Listener,
    /// The socket that is watched with this token has something.
    Socket(u64),
}

impl<L: Listen> Sockets<L> {
    pub(crate) fn new() -> Result<Self, FabricError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(|e| failed("epoll_create", e))?;
        let waker = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let waker = Arc::new(waker.map_err(|e| failed("eventfd", e))?);
        let set = Self { epoll, waker, listeners: Vec::new() };
        set.add(set.waker.as_fd(), WAKER, EventFlags::IN)?;
        Ok(set)
    }

    /// Readable when there is work.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.waker))
    }

    pub(crate) fn listen(&mut self, listener: &L) -> Result<(), FabricError> {
        // Exclusive: of the shards that share it and sleep, one wakes per connection.
        self.add(listener.socket(), LISTENER, EventFlags::IN | EventFlags::EXCLUSIVE)?;
        self.listeners.push((listener.clone(), listener.seat(self.waker())));
        Ok(())
    }

    pub(crate) fn unlisten(&mut self) {
        for (listener, _) in std::mem::take(&mut self.listeners) {
            self.forget(listener.socket());
        }
    }

    /// Watches a socket for these events. `token` identifies the socket: [`FIRST_TOKEN`] or more.
    pub(crate) fn watch(&self, socket: BorrowedFd<'_>, token: u64, flags: EventFlags) -> Result<(), FabricError> {
        debug_assert!(token >= FIRST_TOKEN);
        self.add(socket, token, flags)
    }

    /// Changes the events of a watched socket.
    pub(crate) fn watch_for(&self, socket: BorrowedFd<'_>, token: u64, flags: EventFlags) {
        // It was added, and it is still open.
        let _ = epoll::modify(&self.epoll, socket, EventData::new_u64(token), flags);
    }

    /// Stops watching a socket.
    pub(crate) fn forget(&self, socket: impl AsFd) {
        // It is open; perhaps it was never added.
        let _ = epoll::delete(&self.epoll, socket);
    }

    fn add(&self, socket: BorrowedFd<'_>, token: u64, flags: EventFlags) -> Result<(), FabricError> {
        epoll::add(&self.epoll, socket, EventData::new_u64(token), flags).map_err(|e| failed("epoll_ctl", e))
    }

    /// Accepts connections of the listeners, up to a number from each. Each shard has a maximum of unanswered ones;
    /// this shard's are returned.
    pub(crate) fn accept(
        &self,
        count: usize,
        most: usize,
        mut not: impl FnMut(NotAccepted),
    ) -> Vec<Arrival<L::Visitor>> {
        let mut arrivals = Vec::new();
        for (listener, seat) in &self.listeners {
            // Bounded, refusals included: a storm of connections leaves time for established ones.
            for _ in 0..most.min(count) {
                match listener.accept() {
                    Ok(Ok(visitor)) => arrivals.extend(seat.place(visitor, most)),
                    Ok(Err(why)) => not(NotAccepted::Refused(why)),
                    Err(Errno::CONNABORTED) => not(NotAccepted::Refused("it has gone again".to_owned())),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(error) => {
                        not(NotAccepted::Failed(error));
                        break;
                    }
                }
            }
        }
        arrivals
    }

    /// Takes connections that other fabrics of a shared listener hand over.
    pub(crate) fn handed(&self) -> Vec<Arrival<L::Visitor>> {
        self.listeners.iter().flat_map(|(_, seat)| seat.handed()).collect()
    }

    /// Waits for news, as long as allowed; `None` if it was interrupted. A wake ends this wait, and the next one until
    /// [`woken`](Self::woken).
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<impl Iterator<Item = News> + Clone + use<L>> {
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut space = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let (ready, _) = epoll::wait(&self.epoll, &mut space, timeout.as_ref()).ok()?;
        let mut news = [WAKER; EVENTS];
        ready.iter().zip(&mut news).for_each(|(event, place)| *place = event.data.u64());
        Some(news.into_iter().take(ready.len()).map(|token| match token {
            WAKER => News::Wake,
            LISTENER => News::Listener,
            token => News::Socket(token),
        }))
    }

    /// Forgets the wakes so far.
    pub(crate) fn woken(&self) {
        let mut count = [0; 8];
        // Empty unless the waker was used.
        let _ = rustix::io::read(&*self.waker, &mut count);
    }
}

/// The shorter of two times, of which either may be without end.
pub(crate) fn shorter(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Error of a call, with its usual limit.
pub(crate) fn failed(call: &str, error: Errno) -> FabricError {
    let hint = match error {
        Errno::MFILE => " (open files: `ulimit -n` shows the limit, `ulimit -n 65536` raises it)",
        Errno::NFILE => " (open files of the host: sysctl fs.file-max)",
        Errno::NOSPC => " (sockets that may be watched: sysctl fs.epoll.max_user_watches)",
        Errno::NOBUFS | Errno::NOMEM => " (memory of the kernel: sysctl net.ipv4.tcp_mem for TCP)",
        _ => "",
    };
    FabricError::system(call, format!("{error}{hint}"))
}

/// Numbers that are hard to guess from outside.
#[derive(Debug, Default)]
pub(crate) struct Randoms {
    state: RandomState,
    count: u64,
}

impl Randoms {
    /// Another one each time.
    pub(crate) fn next(&mut self) -> u32 {
        self.count += 1;
        let mut hasher = self.state.build_hasher();
        hasher.write_u64(self.count);
        hasher.finish() as u32
    }
}
