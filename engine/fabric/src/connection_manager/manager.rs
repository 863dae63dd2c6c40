//! The connections of a fabric that are not, or no longer, a queue pair's.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::expiring::Expiring;
use super::{Answer, ConnectProgress, Handshake, Limits, Received, Sockets, TICK, Token, receive};
use crate::accept_balancer::{Accepted, ConnectionCount};
use crate::keys::Randoms;
use crate::{ControlEvent, FabricAddress, FabricError, QpId, RequestId};

/// Most expired entries of each kind dropped per pass.
const EXPIRIES: usize = 64;
/// Closed connections whose peers have not closed them yet. Beyond that the oldest are reset.
const CLOSING: usize = 1024;
/// Bytes of a closed connection discarded per read.
const SCRATCH: usize = 16 << 10;
/// Divisor of the places for incomplete requests: the most of one host.
const SHARE: usize = 4;

/// A connection that a peer has started.
#[derive(Debug)]
pub(crate) struct Request<H: Handshake> {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: H::Peer,
    /// What the peer has sent so far.
    pub(crate) incoming: H::Incoming,
    pub(crate) count: ConnectionCount,
}

/// A connection that this side has started.
#[derive(Debug)]
pub(crate) struct Dial<H: Handshake> {
    pub(super) qp: QpId,
    address: FabricAddress,
    /// `None` while the listener's queue is full. Nothing announces room in it.
    pub(super) socket: Option<OwnedFd>,
    /// Whether our request is sent.
    has_asked: bool,
    pub(super) state: H::Dial,
}

/// The end of a dial, and the peer's answer.
pub(super) type Dialed<H> = (Dial<H>, Result<Answer<<H as Handshake>::Answer>, FabricError>);

impl<H: Handshake> Dial<H> {
    /// Watches the new socket, and sends our request if it is connected.
    fn proceed(
        &mut self,
        id: u64,
        progress: ConnectProgress,
        sockets: &Sockets<H::Listener>,
        fabric: &mut H,
    ) -> Result<(), FabricError> {
        let (socket, flags) = match progress {
            ConnectProgress::QueueFull => return Ok(()),
            ConnectProgress::Connecting(socket) => (socket, EventFlags::OUT),
            ConnectProgress::Connected(socket) => (socket, EventFlags::IN | EventFlags::RDHUP),
        };
        sockets.sleeper.add(&socket, Token::Dial(id), flags)?;
        self.has_asked = flags != EventFlags::OUT;
        if self.has_asked {
            fabric.send_request(socket.as_fd(), &self.address, &mut self.state)?;
        }
        self.socket = Some(socket);
        Ok(())
    }
}

/// The connections of a fabric that are not, or no longer, a queue pair's. A pass costs the same for any number: only
/// sockets with news are read, and the oldest expire first.
#[derive(Debug)]
pub(crate) struct ConnectionManager<H: Handshake> {
    pub(crate) sockets: Sockets<H::Listener>,
    pub(crate) limits: Limits,
    /// Accepted connections that have not been read.
    unread: VecDeque<Accepted<(OwnedFd, H::Peer)>>,
    /// Incomplete requests of peers, each for the handshake's time.
    pub(crate) incomplete: Expiring<Request<H>>,
    /// Complete requests, by the same numbers. They wait for the owner without a limit.
    pub(crate) complete: BTreeMap<u64, Request<H>>,
    /// Unanswered connections of this side, each for the handshake's time.
    dials: Expiring<Dial<H>>,
    /// Sockets that this side has shut down. Later input of their peers is discarded: a TCP socket that is closed with
    /// input unread is reset, and its peer then loses what it has not read.
    pub(crate) closing: Expiring<OwnedFd>,
    pub(crate) randoms: Randoms,
}

impl<H: Handshake> ConnectionManager<H> {
    pub(crate) fn new(limits: Limits) -> Result<Self, FabricError> {
        Ok(Self {
            sockets: Sockets::new()?,
            limits,
            unread: VecDeque::new(),
            incomplete: Expiring::default(),
            complete: BTreeMap::new(),
            dials: Expiring::default(),
            closing: Expiring::default(),
            randoms: Randoms::default(),
        })
    }

    /// Forgets the dial of a queue pair that is destroyed.
    pub(crate) fn forget_dial(&mut self, qp: QpId) {
        if let Some((Dial { socket: Some(socket), .. }, _)) = self.give_up(qp) {
            self.close(socket);
        }
    }

    /// Closes a socket. Where peers could lose unread data by that, it stays open until its peer has read everything,
    /// for `linger` at most.
    pub(crate) fn close(&mut self, socket: OwnedFd) {
        let _ = rustix::net::shutdown(&socket, Shutdown::Write);
        let token = Token::Closing(self.closing.next);
        if !H::LINGERS || self.sockets.sleeper.add(&socket, token, EventFlags::IN | EventFlags::RDHUP).is_err() {
            // Without a watch the peer's end would go unnoticed: it is cut off.
            return;
        }
        if self.closing.len() >= CLOSING {
            self.closing.remove_oldest(|_| true);
        }
        self.closing.insert(Instant::now() + self.limits.linger, socket);
    }

    /// Waits until the hosts of the peers of closed connections have everything, within the sockets' time.
    /// `unacknowledged` returns the bytes that a host has not acknowledged.
    pub(crate) fn finish_closing(&mut self, unacknowledged: impl Fn(BorrowedFd<'_>) -> Result<usize, Errno>) {
        loop {
            let now = Instant::now();
            while self.closing.pop_due(now).is_some() {}
            // A reset socket acknowledges nothing.
            let is_busy = |socket: &OwnedFd| unacknowledged(socket.as_fd()).is_ok_and(|bytes| bytes > 0);
            self.closing.retain(|socket| is_busy(socket) && !has_ended(socket));
            if self.closing.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for sockets up to `timeout`. Serves listeners, requests and closed connections, and returns all tokens.
    /// `None` if it was interrupted.
    pub(super) fn wait(
        &mut self,
        fabric: &mut H,
        timeout: Option<Duration>,
    ) -> Option<impl Iterator<Item = Token> + use<H>> {
        let tokens = self.sockets.wait(timeout)?;
        // Requests beyond their number wait, since calls of other connections wait meanwhile. The owner then polls
        // again at once, and unread input stays readable. Accepted connections come first: new ones may arrive without
        // end.
        let mut left = H::REQUESTS;
        for token in tokens.clone() {
            if let Token::Request(id) = token
                && left > 0
            {
                left -= usize::from(self.read_request(id, fabric));
            }
        }
        self.unread.extend(self.sockets.take_handed_over());
        self.read_accepted(&mut left, fabric);
        for token in tokens.clone() {
            match token {
                Token::Listener if left > 0 => {
                    self.accept(fabric);
                    self.read_accepted(&mut left, fabric);
                }
                Token::Closing(id) if self.closing.get_mut(id).is_some_and(|socket| has_ended(socket)) => {
                    self.closing.remove(id);
                }
                _ => {}
            }
        }
        Some(tokens)
    }

    /// Longest sleep: until something expires, or is due without an announcement. `None` if nothing can.
    pub(crate) fn longest_wait(&self) -> Option<Duration> {
        let deadlines = [self.incomplete.next_deadline(), self.closing.next_deadline(), self.dials.next_deadline()];
        let next = deadlines.into_iter().flatten().min();
        let expiry = next.map(|next| next.saturating_duration_since(Instant::now()));
        let unread = (!self.unread.is_empty()).then_some(Duration::ZERO);
        let tick = self.dials.iter().any(|dial| dial.socket.is_none()).then_some(TICK);
        [expiry, unread, tick, self.sockets.resumes_in()].into_iter().flatten().min()
    }

    /// Accepts connections up to the free places among unanswered requests. The others stay in the listener's queue: a
    /// slow owner does not cause refusals.
    fn accept(&mut self, fabric: &mut H) {
        let most = self.limits.max_handshakes;
        let places = most.saturating_sub(self.complete.len() + self.unread.len()).min(H::ACCEPTS);
        if places == 0 {
            return;
        }
        let (accepted, failed) = self.sockets.accept(places, most, |why| fabric.refuse(format_args!("{why}")));
        self.unread.extend(accepted);
        if let Some(error) = failed {
            fabric.control().log.accept_failed(H::FABRIC, error);
        }
    }

    /// Reads accepted connections until so many requests are complete; subtracts those that are.
    fn read_accepted(&mut self, left: &mut usize, fabric: &mut H) {
        while *left > 0
            && let Some(accepted) = self.unread.pop_front()
        {
            *left -= usize::from(self.admit(accepted, fabric));
        }
    }

    /// Admits an accepted connection. True if its request is complete already.
    fn admit(&mut self, accepted: Accepted<(OwnedFd, H::Peer)>, fabric: &mut H) -> bool {
        let Accepted { request: (socket, peer), count } = accepted;
        let most = self.limits.max_handshakes;
        let is_same = |request: &Request<H>| H::is_same_host(&request.peer, &peer);
        // A host with many incomplete requests evicts its own.
        if self.incomplete.iter().filter(|request| is_same(request)).count() >= (most / SHARE).max(1) {
            self.evict(fabric, is_same);
        } else if self.incomplete.len() + self.complete.len() >= most && !self.evict(fabric, |_| true) {
            fabric.refuse(format_args!("{peer}: {most} requests (max_handshakes) wait for an answer"));
            return false;
        }
        let token = Token::Request(self.incomplete.next);
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) = fabric.equip(socket.as_fd()).and_then(|()| self.sockets.sleeper.add(&socket, token, flags))
        {
            fabric.refuse(format_args!("{peer}: {error}"));
            return false;
        }
        let deadline = Instant::now() + self.limits.handshake_timeout;
        let request = Request { socket, peer, incoming: H::Incoming::default(), count };
        let id = self.incomplete.insert(deadline, request);
        self.read_request(id, fabric)
    }

    /// Drops the oldest incomplete request that satisfies `which`. False if there is none.
    fn evict(&mut self, fabric: &mut H, which: impl Fn(&Request<H>) -> bool) -> bool {
        let Some(gone) = self.incomplete.remove_oldest(which) else { return false };
        fabric.refuse(format_args!("{}: evicted, since it sent nothing while others wait (max_handshakes)", gone.peer));
        true
    }

    /// Reads from a peer. True if its request is complete now, for the owner to answer. A complete one ends by any
    /// input.
    fn read_request(&mut self, id: u64, fabric: &mut H) -> bool {
        let Some(request) = self.incomplete.get_mut(id).or_else(|| self.complete.get_mut(&id)) else { return false };
        let fault = match fabric.read_request(request.socket.as_fd(), &mut request.incoming) {
            Received::Pending => return false,
            Received::Message(private_data) => {
                let peer = request.peer.to_string();
                self.complete.extend(self.incomplete.remove(id).map(|request| (id, request)));
                let request = RequestId(id);
                fabric.control().events.push_back(ControlEvent::ConnectRequest { request, private_data, peer });
                return true;
            }
            Received::Closed => None,
            Received::Failed(error) => Some(error.detail().to_owned()),
        };
        if let Some(Request { socket, peer, .. }) = self.incomplete.remove(id).or_else(|| self.complete.remove(&id)) {
            match fault {
                None => log::debug!("{}: {peer} has given up its connect request", H::FABRIC),
                Some(why) => {
                    fabric.refuse(format_args!("{peer}: {why}"));
                    H::send_refusal(socket.as_fd(), why);
                }
            }
        }
        false
    }

    /// Takes a complete request, for the owner to accept.
    ///
    /// # Errors
    /// The peer has given it up.
    pub(crate) fn take_request(&mut self, request: RequestId) -> Result<Request<H>, FabricError> {
        let taken = self.complete.remove(&request.0);
        let taken = taken.ok_or_else(|| FabricError::closed("it has given up its connect request"))?;
        self.sockets.sleeper.remove(&taken.socket);
        Ok(taken)
    }

    /// Refuses a request in the name of the owner.
    pub(crate) fn reject(&mut self, fabric: &H, request: RequestId, private_data: &[u8]) {
        if let Ok(Request { socket, incoming, .. }) = self.take_request(request) {
            fabric.send_reject(socket.as_fd(), &incoming, private_data);
            self.close(socket);
        }
    }

    /// Drives a new outgoing connection of a queue pair through its handshake.
    pub(crate) fn dial(
        &mut self,
        fabric: &mut H,
        qp: QpId,
        (address, progress): (&FabricAddress, ConnectProgress),
        state: H::Dial,
    ) -> Result<(), FabricError> {
        let mut dial = Dial { qp, address: address.clone(), socket: None, has_asked: false, state };
        dial.proceed(self.dials.next, progress, &self.sockets, fabric)?;
        self.dials.insert(Instant::now() + self.limits.handshake_timeout, dial);
        Ok(())
    }

    /// Handles news of a dial's socket: it is connected, or has an answer. Returns the dial if that ends it.
    pub(super) fn read_dial(&mut self, id: u64, fabric: &mut H) -> Option<Dialed<H>> {
        let dial = self.dials.get_mut(id)?;
        let socket = dial.socket.as_ref()?;
        let answer = if dial.has_asked {
            fabric.read_answer(socket.as_fd(), &mut dial.state)
        } else if let Err(error) = fabric.send_request(socket.as_fd(), &dial.address, &mut dial.state) {
            Received::Failed(error)
        } else {
            self.sockets.sleeper.modify(socket, Token::Dial(id), EventFlags::IN);
            dial.has_asked = true;
            Received::Pending
        };
        let result = match answer {
            Received::Pending => return None,
            Received::Message(answer) => Ok(answer),
            Received::Closed => Err(FabricError::closed("it closed the connection before it answered")),
            Received::Failed(error) => Err(error),
        };
        let dial = self.dials.remove(id);
        self.end_dial(dial, result)
    }

    /// Ends the dial of a queue pair.
    pub(super) fn give_up(&mut self, qp: QpId) -> Option<Dialed<H>> {
        let dial = self.dials.remove_oldest(|dial| dial.qp == qp);
        self.end_dial(dial, Err(FabricError::closed("disconnected before it answered")))
    }

    /// Ends what has expired, and connects dials that wait for room in a listener's queue. Returns a dial that has
    /// ended; the rest is due at the next pass.
    pub(super) fn expire(&mut self, fabric: &mut H, now: Instant) -> Option<Dialed<H>> {
        for _ in 0..EXPIRIES {
            let (incomplete, closing) = (self.incomplete.pop_due(now), self.closing.pop_due(now));
            if incomplete.is_none() && closing.is_none() {
                break;
            }
        }
        if let Some(dial) = self.dials.pop_due(now) {
            return self.end_dial(Some(dial), Err(H::timed_out(self.limits.handshake_timeout)));
        }
        let mut full = None;
        let failed = self.dials.iter_mut().filter(|(_, dial)| dial.socket.is_none()).find_map(|(id, dial)| {
            // Without room for one there is none for the next.
            if full.as_ref() == Some(&dial.address) {
                return None;
            }
            let progress = fabric.open(&dial.address);
            let proceeds = progress.and_then(|progress| dial.proceed(id, progress, &self.sockets, fabric));
            full = dial.socket.is_none().then(|| dial.address.clone());
            Some((id, proceeds.err()?))
        });
        let (id, error) = failed?;
        let dial = self.dials.remove(id);
        self.end_dial(dial, Err(error))
    }

    fn end_dial(&self, dial: Option<Dial<H>>, result: Result<Answer<H::Answer>, FabricError>) -> Option<Dialed<H>> {
        let dial = dial?;
        if let Some(socket) = &dial.socket {
            self.sockets.sleeper.remove(socket);
        }
        Some((dial, result))
    }
}

/// Discards input of a closed connection; true if its peer has ended.
fn has_ended(socket: &OwnedFd) -> bool {
    // Once: the set reports the rest again.
    !matches!(receive(socket, &mut [0; SCRATCH]), Ok(1..) | Err(Errno::AGAIN | Errno::INTR))
}
