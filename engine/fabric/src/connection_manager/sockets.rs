//! The descriptors that a shard sleeps on: listeners, sockets off the message path, and a waker.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::accept_balancer::{Accepted, BalancerMember};
use crate::epoll_set::{EpollSet, shorter};
use crate::{FabricError, QpId, Waker};

/// Maximum socket events per pass; further events follow in the next pass.
pub(crate) const EVENTS: usize = 64;

/// Pause after a failed accept. Usually the process has too many open files: a waiting connection keeps its listener
/// readable, and every further accept fails until a file is closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound address, shared by shards that all accept its connections.
pub(crate) trait Listen: Clone + Debug {
    /// An accepted socket and its peer.
    type Accepted: Debug;

    fn socket(&self) -> BorrowedFd<'_>;
    /// Adds a fabric to those that share the address.
    fn join(&self, waker: Waker) -> BalancerMember<Self::Accepted>;
    /// Accepts one connection, or returns the reason for closing it.
    fn accept(&self) -> Result<Result<Self::Accepted, String>, Errno>;
}

/// A descriptor with an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Token {
    /// The waker was used.
    Waker,
    /// A listener has a new connection.
    Listener,
    /// A connection that a peer has started, by its number.
    Request(u64),
    /// A connection that this side has started, by its number.
    Dial(u64),
    /// A connection that was closed, by its number.
    Closing(u64),
    /// The socket of a connected queue pair; with [`QpId::NONE`] a set of such sockets.
    Qp(QpId),
}

impl From<Token> for u64 {
    /// Encodes the kind in the upper three bits, and the number in the others.
    fn from(token: Token) -> Self {
        match token {
            Token::Waker => EpollSet::WAKER,
            Token::Listener => 1 << 61,
            Token::Request(id) => 2 << 61 | id,
            Token::Dial(id) => 3 << 61 | id,
            Token::Closing(id) => 4 << 61 | id,
            Token::Qp(qp) => 5 << 61 | Self::from(qp.generation) << 32 | Self::from(qp.slot),
        }
    }
}

impl From<u64> for Token {
    fn from(data: u64) -> Self {
        // The bits below the kind.
        let rest = data & ((1 << 61) - 1);
        match data >> 61 {
            0 => Self::Waker,
            1 => Self::Listener,
            2 => Self::Request(rest),
            3 => Self::Dial(rest),
            4 => Self::Closing(rest),
            _ => Self::Qp(QpId { slot: rest as u32, generation: (rest >> 32) as u32 }),
        }
    }
}

/// Sockets off the message path, and the means to wait for them.
#[derive(Debug)]
pub(crate) struct Sockets<L: Listen> {
    pub(crate) epoll_set: EpollSet,
    listeners: Vec<(L, BalancerMember<L::Accepted>)>,
    /// The end of a pause in which the listeners are not watched.
    accepts_resume_at: Option<Instant>,
    /// The error of the last accept, until one succeeds, so that it is reported once.
    accept_error: Option<Errno>,
}

impl<L: Listen> Sockets<L> {
    pub(super) fn new() -> Result<Self, FabricError> {
        Ok(Self { epoll_set: EpollSet::new()?, listeners: Vec::new(), accepts_resume_at: None, accept_error: None })
    }

    pub(crate) fn listen(&mut self, listener: &L) -> Result<(), FabricError> {
        self.watch_listener(listener)?;
        self.listeners.push((listener.clone(), listener.join(self.epoll_set.waker())));
        Ok(())
    }

    fn watch_listener(&self, listener: &L) -> Result<(), FabricError> {
        // Exclusive, so that a connection does not wake all sleeping shards that share the listener.
        self.epoll_set.add(listener.socket(), Token::Listener, EventFlags::IN | EventFlags::EXCLUSIVE)
    }

    /// Stops watching the listeners for a while.
    #[cold]
    fn pause_accepts(&mut self) {
        self.listeners.iter().for_each(|(listener, _)| self.epoll_set.remove(listener.socket()));
        self.accepts_resume_at = Some(Instant::now() + ACCEPT_PAUSE);
    }

    /// Watches the listeners again after a pause.
    #[cold]
    fn resume_accepts(&mut self) {
        self.accepts_resume_at = None;
        if self.listeners.iter().any(|(listener, _)| self.watch_listener(listener).is_err()) {
            self.pause_accepts();
        }
    }

    /// Time until the listeners are watched again; `None` unless accepting is paused.
    pub(super) fn accept_pause_left(&self) -> Option<Duration> {
        self.accepts_resume_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn unlisten(&mut self) {
        self.accepts_resume_at = None;
        for (listener, _) in std::mem::take(&mut self.listeners) {
            self.epoll_set.remove(listener.socket());
        }
    }

    /// Accepts up to `count` connections from each listener, and returns those that this shard keeps. At most
    /// `max_waiting` handed-over connections wait for a shard. Pauses when accept fails, and returns its error unless
    /// the previous accept failed with the same error.
    pub(super) fn accept(
        &mut self,
        count: usize,
        max_waiting: usize,
        mut refuse: impl FnMut(String),
    ) -> (Vec<Accepted<L::Accepted>>, Option<Errno>) {
        let mut accepted = Vec::new();
        let mut failed = None;
        for (listener, member) in &self.listeners {
            // Refusals count, too, so that a flood of connections leaves time for established ones.
            for _ in 0..max_waiting.min(count) {
                match listener.accept() {
                    Ok(Ok(connection)) => {
                        self.accept_error = None;
                        accepted.extend(member.assign(connection, max_waiting));
                    }
                    Ok(Err(why)) => refuse(why),
                    Err(Errno::CONNABORTED) => refuse("the peer closed the connection before the accept".to_owned()),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
        }
        if let Some(error) = failed {
            self.pause_accepts();
            failed = failed.filter(|_| self.accept_error.replace(error) != Some(error));
        }
        (accepted, failed)
    }

    /// Takes the connections that other fabrics of a shared listener have handed over.
    pub(super) fn take_handed_over(&self) -> impl Iterator<Item = Accepted<L::Accepted>> {
        self.listeners.iter().flat_map(|(_, member)| member.take_handed_over())
    }

    /// Waits as [`EpollSet::wait`] does, but at most until the listeners are watched again.
    pub(super) fn wait(
        &mut self,
        mut timeout: Option<Duration>,
    ) -> Option<impl Iterator<Item = Token> + Clone + use<L>> {
        if let Some(left) = self.accept_pause_left() {
            if left.is_zero() {
                self.resume_accepts();
            }
            timeout = shorter(timeout, self.accept_pause_left());
        }
        Some(self.epoll_set.wait::<EVENTS>(timeout)?.map(Token::from))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::rc::Rc;
    use std::sync::Arc;

    use super::*;
    use crate::accept_balancer::AcceptBalancer;
    use crate::qp_table::GENERATIONS;

    /// A listener that counts accepts. They fail as if no descriptor were free, until `works` is set.
    #[derive(Clone, Debug)]
    struct FailingListener {
        listener: Rc<TcpListener>,
        accepts: Rc<Cell<u64>>,
        works: Rc<Cell<bool>>,
    }

    impl Listen for FailingListener {
        type Accepted = TcpStream;

        fn socket(&self) -> BorrowedFd<'_> {
            self.listener.as_fd()
        }

        fn join(&self, waker: Waker) -> BalancerMember<TcpStream> {
            BalancerMember::new(&Arc::<AcceptBalancer<TcpStream>>::default(), waker)
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
        let failing = FailingListener { listener: Rc::new(listener), accepts: Rc::default(), works: Rc::default() };
        let mut sockets = Sockets::new().unwrap();
        sockets.listen(&failing).unwrap();
        let began = Instant::now();
        let _waiting = TcpStream::connect(at).unwrap();
        let mut reports = Vec::new();
        let mut accept = |sockets: &mut Sockets<FailingListener>, timeout| {
            let is_ready = sockets.wait(timeout).into_iter().flatten().any(|token| token == Token::Listener);
            if !is_ready {
                return 0;
            }
            let (accepted, failed) = sockets.accept(16, 16, |why| panic!("{why}"));
            reports.extend(failed);
            accepted.len()
        };
        // A shard that polls.
        for _ in 0..2000 {
            assert_eq!(accept(&mut sockets, Some(Duration::ZERO)), 0);
        }
        let pauses = |began: Instant| 1 + (began.elapsed().as_millis() / ACCEPT_PAUSE.as_millis()) as u64;
        assert!(failing.accepts.get() <= pauses(began), "{} accepts", failing.accepts.get());
        assert!(sockets.accept_pause_left().is_some_and(|left| left <= ACCEPT_PAUSE), "a sleep ends with the pause");
        // A shard that sleeps.
        let before = failing.accepts.get();
        while failing.accepts.get() < before + 2 {
            assert_eq!(accept(&mut sockets, None), 0);
        }
        assert!(failing.accepts.get() <= pauses(began), "{} accepts", failing.accepts.get());
        failing.works.set(true);
        while accept(&mut sockets, None) == 0 {}
        assert_eq!(sockets.accept_pause_left(), None);
        assert_eq!(reports, [Errno::MFILE], "the error is reported once");
    }

    #[test]
    fn tokens_are_decoded() {
        let qp = QpId { slot: u32::MAX, generation: GENERATIONS - 1 };
        for token in [
            Token::Waker,
            Token::Listener,
            Token::Request(1 << 40),
            Token::Dial(u64::from(u32::MAX)),
            Token::Closing(7),
            Token::Qp(qp),
            Token::Qp(QpId::NONE),
        ] {
            assert_eq!(Token::from(u64::from(token)), token);
        }
    }
}
