//! Inputs of a fabric's connection management: shared listeners, sockets, and a waker.

#![forbid(unsafe_code)]

use std::fmt::{Arguments, Debug};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// Time without accepting connections after accept has failed. Mostly the process has too many open files: a
/// connection that waits keeps its listener readable, and every further accept fails until a file is closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
            NotAccepted::Failed(error) => self.parts().1.accept_failed(Self::FABRIC, error),
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
    /// The end of a pause in which the listeners are not watched.
    accepts_again: Option<Instant>,
    /// The error of the last accept, until one succeeds. It is reported once.
    accept_error: Option<Errno>,
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
        let set = Self { epoll, waker, listeners: Vec::new(), accepts_again: None, accept_error: None };
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
        self.watch_listener(listener)?;
        self.listeners.push((listener.clone(), listener.seat(self.waker())));
        Ok(())
    }

    fn watch_listener(&self, listener: &L) -> Result<(), FabricError> {
        // Exclusive: of the shards that share it and sleep, one wakes per connection.
        self.add(listener.socket(), LISTENER, EventFlags::IN | EventFlags::EXCLUSIVE)
    }

    /// Stops watching the listeners for a while.
    #[cold]
    fn pause_accepts(&mut self) {
        self.listeners.iter().for_each(|(listener, _)| self.forget(listener.socket()));
        self.accepts_again = Some(Instant::now() + ACCEPT_PAUSE);
    }

    /// Watches the listeners again after a pause.
    #[cold]
    fn resume_accepts(&mut self) {
        self.accepts_again = None;
        if self.listeners.iter().any(|(listener, _)| self.watch_listener(listener).is_err()) {
            self.pause_accepts();
        }
    }

    /// Time until the listeners are watched again; `None` unless accepting is paused.
    pub(crate) fn resumes_in(&self) -> Option<Duration> {
        self.accepts_again.map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn unlisten(&mut self) {
        self.accepts_again = None;
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
    /// this shard's are returned. Pauses when the system denies one.
    pub(crate) fn accept(
        &mut self,
        count: usize,
        most: usize,
        mut not: impl FnMut(NotAccepted),
    ) -> Vec<Arrival<L::Visitor>> {
        let mut arrivals = Vec::new();
        let mut denied = None;
        for (listener, seat) in &self.listeners {
            // Bounded, refusals included: a storm of connections leaves time for established ones.
            for _ in 0..most.min(count) {
                match listener.accept() {
                    Ok(Ok(visitor)) => {
                        self.accept_error = None;
                        arrivals.extend(seat.place(visitor, most));
                    }
                    Ok(Err(why)) => not(NotAccepted::Refused(why)),
                    Err(Errno::CONNABORTED) => not(NotAccepted::Refused("it has gone again".to_owned())),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(error) => {
                        denied = Some(error);
                        break;
                    }
                }
            }
        }
        if let Some(error) = denied {
            if self.accept_error.replace(error) != denied {
                not(NotAccepted::Failed(error));
            }
            self.pause_accepts();
        }
        arrivals
    }

    /// Takes connections that other fabrics of a shared listener hand over.
    pub(crate) fn handed(&self) -> Vec<Arrival<L::Visitor>> {
        self.listeners.iter().flat_map(|(_, seat)| seat.handed()).collect()
    }

    /// Waits for news, as long as allowed; `None` if it was interrupted. A wake ends this wait, and the next one until
    /// [`woken`](Self::woken).
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> Option<impl Iterator<Item = News> + Clone + use<L>> {
        let mut timeout = timeout;
        if let Some(left) = self.resumes_in() {
            if left.is_zero() {
                self.resume_accepts();
            }
            timeout = shorter(timeout, self.resumes_in());
        }
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

/// Error of a call, with the limit that it has reached.
pub(crate) fn failed(call: &str, error: impl Into<io::Error>) -> FabricError {
    FabricError::failed(call, &error.into())
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;
    use std::net::{TcpListener, TcpStream};
    use std::rc::Rc;
    use std::time::Instant;

    use super::*;
    use crate::seats::Seats;

    /// A listener whose accepts fail as without descriptors, and are counted, until `works`.
    #[derive(Clone, Debug)]
    struct Failing {
        listener: Rc<TcpListener>,
        accepts: Rc<Cell<u64>>,
        works: Rc<Cell<bool>>,
    }

    impl Listen for Failing {
        type Visitor = TcpStream;

        fn socket(&self) -> BorrowedFd<'_> {
            self.listener.as_fd()
        }

        fn seat(&self, waker: Waker) -> Seat<TcpStream> {
            Seat::new(&Arc::<Seats<TcpStream>>::default(), waker)
        }

        fn accept(&self) -> Result<Result<TcpStream, String>, Errno> {
            self.accepts.set(self.accepts.get() + 1);
            let accepted = || self.listener.accept().map(|(stream, _)| Ok(stream));
            let error = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
            if self.works.get() { accepted().map_err(error) } else { Err(Errno::MFILE) }
        }
    }

    #[test]
    fn failing_accepts_pause_the_listener_until_one_succeeds() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        let failing = Failing { listener: Rc::new(listener), accepts: Rc::default(), works: Rc::default() };
        let mut sockets = Sockets::new().unwrap();
        sockets.listen(&failing).unwrap();
        let began = Instant::now();
        let _waiting = TcpStream::connect(at).unwrap();
        let mut reports = Vec::new();
        let mut accept = |sockets: &mut Sockets<Failing>, timeout| {
            let news = sockets.wait(timeout).into_iter().flatten().any(|news| news == News::Listener);
            let mut accept = |sockets: &mut Sockets<_>| {
                sockets.accept(16, 16, |why| reports.push(matches!(why, NotAccepted::Failed(Errno::MFILE))))
            };
            if news { accept(sockets).len() } else { 0 }
        };
        // A shard that polls.
        for _ in 0..2000 {
            assert_eq!(accept(&mut sockets, Some(Duration::ZERO)), 0);
        }
        let pauses = |began: Instant| 1 + (began.elapsed().as_millis() / ACCEPT_PAUSE.as_millis()) as u64;
        assert!(failing.accepts.get() <= pauses(began), "{} accepts", failing.accepts.get());
        assert!(sockets.resumes_in().is_some_and(|left| left <= ACCEPT_PAUSE), "a sleep ends with the pause");
        // One that sleeps.
        let before = failing.accepts.get();
        while failing.accepts.get() < before + 2 {
            assert_eq!(accept(&mut sockets, None), 0);
        }
        assert!(failing.accepts.get() <= pauses(began), "{} accepts", failing.accepts.get());
        failing.works.set(true);
        while accept(&mut sockets, None) == 0 {}
        assert_eq!(sockets.resumes_in(), None);
        assert_eq!(reports, [true], "one report");
    }
}
