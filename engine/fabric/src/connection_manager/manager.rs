//! Connections of a fabric before they get a queue pair, and after they have lost it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::deadline_queue::DeadlineQueue;
use super::{
    ConnectAnswer, ConnectProgress, ConnectionHandshake, ManagerConfig, SocketInput, Sockets, TICK, Token, receive,
};
use crate::accept_balancer::{Accepted, ConnectionCount};
use crate::window_keys::RandomNumbers;
use crate::{ControlEvent, FabricAddress, FabricError, QpId, RequestId};

/// Maximum expired values of each queue that one pass drops.
const EXPIRIES: usize = 64;
/// Bytes of a closed connection that one read discards.
const SCRATCH: usize = 16 << 10;

/// A connection that a peer has started.
#[derive(Debug)]
pub(crate) struct IncomingConnection<H: ConnectionHandshake> {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: H::Peer,
    /// The part of the request that the peer has sent so far.
    pub(crate) incoming: H::Incoming,
    pub(crate) count: ConnectionCount,
}

/// A connection that this side has started.
#[derive(Debug)]
pub(crate) struct Dial<H: ConnectionHandshake> {
    pub(super) qp: QpId,
    address: FabricAddress,
    /// `None` while the listener's queue is full. No event reports room in the queue, so the connect is repeated.
    pub(super) socket: Option<OwnedFd>,
    /// Whether our request is sent.
    has_sent_request: bool,
    pub(super) state: H::Dial,
}

/// A finished dial, with the peer's answer.
pub(super) type Dialed<H> = (Dial<H>, Result<ConnectAnswer<<H as ConnectionHandshake>::Answer>, FabricError>);

impl<H: ConnectionHandshake> Dial<H> {
    /// Watches the new socket, and sends our request if it is connected.
    fn advance_dial(
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
        sockets.epoll_set.add(&socket, Token::Dial(id), flags)?;
        self.has_sent_request = flags != EventFlags::OUT;
        if self.has_sent_request {
            fabric.send_request(socket.as_fd(), &self.address, &mut self.state)?;
        }
        self.socket = Some(socket);
        Ok(())
    }
}

/// Connections of a fabric before they get a queue pair, and after they have lost it. The cost of a pass does not
/// depend on their number: only sockets with events are read, and the oldest expire first.
///
/// The *owner* is the user of the fabric, who polls it, and accepts or rejects connect requests.
#[derive(Debug)]
pub(crate) struct ConnectionManager<H: ConnectionHandshake> {
    pub(crate) sockets: Sockets<H::Listener>,
    pub(crate) limits: ManagerConfig,
    /// Accepted connections that have not been read.
    unread: VecDeque<Accepted<(OwnedFd, H::Peer)>>,
    /// Incomplete requests of peers, until the handshake's time-out.
    pub(crate) incomplete: DeadlineQueue<IncomingConnection<H>>,
    /// Complete requests, by their numbers in `incomplete`. They wait without a time-out until the owner
    /// accepts or rejects them.
    pub(crate) complete: BTreeMap<u64, IncomingConnection<H>>,
    /// Unanswered connections of this side, until the handshake's time-out.
    dials: DeadlineQueue<Dial<H>>,
    /// Sockets that this side has shut down. Later input of their peers is discarded, because closing a TCP socket with
    /// unread input resets the connection, and the peer then loses data that it has not read yet.
    pub(crate) closing: DeadlineQueue<OwnedFd>,
    pub(crate) randoms: RandomNumbers,
}

impl<H: ConnectionHandshake> ConnectionManager<H> {
    pub(crate) fn new(limits: ManagerConfig) -> Result<Self, FabricError> {
        Ok(Self {
            sockets: Sockets::new()?,
            limits,
            unread: VecDeque::new(),
            incomplete: DeadlineQueue::default(),
            complete: BTreeMap::new(),
            dials: DeadlineQueue::default(),
            closing: DeadlineQueue::default(),
            randoms: RandomNumbers::default(),
        })
    }

    /// Drops the dial of a queue pair that is destroyed.
    pub(crate) fn forget_dial(&mut self, qp: QpId) {
        if let Some((Dial { socket: Some(socket), .. }, _)) = self.abandon_dial(qp) {
            self.close(socket);
        }
    }

    /// Closes a socket. Where peers could lose unread data, the socket stays open until its peer has read everything,
    /// for `linger` at most.
    pub(crate) fn close(&mut self, socket: OwnedFd) {
        let _ = rustix::net::shutdown(&socket, Shutdown::Write);
        let token = Token::Closing(self.closing.next);
        if !H::LINGERS || self.sockets.epoll_set.add(&socket, token, EventFlags::IN | EventFlags::RDHUP).is_err() {
            // Without a watch that reports when the peer has closed the connection, the socket is closed immediately.
            return;
        }
        if self.closing.len() >= self.limits.max_closing {
            self.closing.remove_oldest(|_| true);
        }
        self.closing.insert(Instant::now() + self.limits.linger, socket);
    }

    /// Waits until the peers' hosts have acknowledged all data of closed connections, or the connections have expired.
    /// `unacknowledged` returns the bytes that a host has not acknowledged.
    pub(crate) fn finish_closing(&mut self, unacknowledged: impl Fn(BorrowedFd<'_>) -> Result<usize, Errno>) {
        loop {
            let now = Instant::now();
            while self.closing.pop_due(now).is_some() {}
            // An error means that the connection was reset, so no acknowledgement will follow.
            let is_busy = |socket: &OwnedFd| unacknowledged(socket.as_fd()).is_ok_and(|bytes| bytes > 0);
            self.closing.retain(|socket| is_busy(socket) && !has_ended(socket));
            if self.closing.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for sockets up to `timeout`. Serves listeners, requests and closed connections, and returns all tokens.
    /// `None` if a signal interrupted the wait.
    pub(super) fn wait(
        &mut self,
        fabric: &mut H,
        timeout: Option<Duration>,
    ) -> Option<impl Iterator<Item = Token> + use<H>> {
        let tokens = self.sockets.wait(timeout)?;
        // At most `H::REQUESTS` requests are completed, because calls of other connections wait for this poll. The
        // owner then polls again immediately, and unread input stays readable. Accepted connections are read before
        // further ones are accepted, because new connections may arrive endlessly.
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

    /// Longest sleep: until a value expires, or work is due that no event announces. `None` if unlimited.
    pub(crate) fn longest_wait(&self) -> Option<Duration> {
        let deadlines = [self.incomplete.next_deadline(), self.closing.next_deadline(), self.dials.next_deadline()];
        let next = deadlines.into_iter().flatten().min();
        let expiry = next.map(|next| next.saturating_duration_since(Instant::now()));
        let unread = (!self.unread.is_empty()).then_some(Duration::ZERO);
        let tick = self.dials.iter().any(|dial| dial.socket.is_none()).then_some(TICK);
        [expiry, unread, tick, self.sockets.accept_pause_left()].into_iter().flatten().min()
    }

    /// Accepts connections while fewer than `max_handshakes` complete requests and unread connections wait. Others stay
    /// in the listener's queue, so that a slow owner does not cause refusals.
    fn accept(&mut self, fabric: &mut H) {
        let limit = self.limits.max_handshakes;
        let places = limit.saturating_sub(self.complete.len() + self.unread.len()).min(H::ACCEPTS);
        if places == 0 {
            return;
        }
        let (accepted, failed) = self.sockets.accept(places, limit, |why| fabric.refuse(format_args!("{why}")));
        self.unread.extend(accepted);
        if let Some(error) = failed {
            fabric.control().log.accept_failed(H::FABRIC, error);
        }
    }

    /// Reads accepted connections until `left` requests are complete, and subtracts those from `left`.
    fn read_accepted(&mut self, left: &mut usize, fabric: &mut H) {
        while *left > 0
            && let Some(accepted) = self.unread.pop_front()
        {
            *left -= usize::from(self.admit(accepted, fabric));
        }
    }

    /// Admits an accepted connection. True if its request is already complete.
    fn admit(&mut self, accepted: Accepted<(OwnedFd, H::Peer)>, fabric: &mut H) -> bool {
        let Accepted { request: (socket, peer), count } = accepted;
        // Complete requests do not count, because they must not evict incomplete ones of other hosts.
        if self.incomplete.len() >= self.limits.max_handshakes {
            self.evict(fabric);
        }
        let token = Token::Request(self.incomplete.next);
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) =
            fabric.equip(socket.as_fd()).and_then(|()| self.sockets.epoll_set.add(&socket, token, flags))
        {
            fabric.refuse(format_args!("{peer}: {error}"));
            return false;
        }
        let deadline = Instant::now() + self.limits.handshake_timeout;
        let request = IncomingConnection { socket, peer, incoming: H::Incoming::default(), count };
        let id = self.incomplete.insert(deadline, request);
        self.read_request(id, fabric)
    }

    /// Drops the oldest incomplete request of the host that has the most incomplete requests.
    fn evict(&mut self, fabric: &mut H) {
        let mut counts = HashMap::new();
        for request in self.incomplete.iter() {
            *counts.entry(H::host(&request.peer)).or_insert(0) += 1;
        }
        let max_count = counts.values().copied().max().unwrap_or(0);
        let oldest = self.incomplete.remove_oldest(|request| counts[&H::host(&request.peer)] == max_count);
        if let Some(IncomingConnection { peer, .. }) = oldest {
            fabric.refuse(format_args!(
                "{peer}: evicted, because its request is incomplete and others wait (max_handshakes)"
            ));
        }
    }

    /// Reads from a peer. True if its request is now complete, so that the owner can answer it. A complete request is
    /// dropped if its peer sends more or closes the connection.
    fn read_request(&mut self, id: u64, fabric: &mut H) -> bool {
        let Some(request) = self.incomplete.get_mut(id).or_else(|| self.complete.get_mut(&id)) else { return false };
        let fault = match fabric.read_request(request.socket.as_fd(), &mut request.incoming) {
            SocketInput::Pending => return false,
            SocketInput::Message(private_data) => {
                let peer = request.peer.to_string();
                self.complete.extend(self.incomplete.remove(id).map(|request| (id, request)));
                let request = RequestId(id);
                fabric.control().events.push_back(ControlEvent::ConnectRequest { request, private_data, peer });
                return true;
            }
            SocketInput::Closed => None,
            SocketInput::Failed(error) => Some(error.detail().to_owned()),
        };
        if let Some(IncomingConnection { socket, peer, .. }) =
            self.incomplete.remove(id).or_else(|| self.complete.remove(&id))
        {
            match fault {
                None => log::debug!("{}: {peer} has withdrawn its connect request", H::FABRIC),
                Some(why) => {
                    fabric.refuse(format_args!("{peer}: {why}"));
                    H::send_refusal(socket.as_fd(), why);
                }
            }
        }
        false
    }

    /// Takes a complete request that the owner accepts or rejects.
    ///
    /// # Errors
    /// The peer has withdrawn the request.
    pub(crate) fn take_request(&mut self, request: RequestId) -> Result<IncomingConnection<H>, FabricError> {
        let taken = self.complete.remove(&request.0);
        let taken = taken.ok_or_else(|| FabricError::connection_closed("connect request withdrawn"))?;
        self.sockets.epoll_set.remove(&taken.socket);
        Ok(taken)
    }

    /// Refuses a request on behalf of the owner.
    pub(crate) fn reject(&mut self, fabric: &H, request: RequestId, private_data: &[u8]) {
        if let Ok(IncomingConnection { socket, incoming, .. }) = self.take_request(request) {
            fabric.send_reject(socket.as_fd(), &incoming, private_data);
            self.close(socket);
        }
    }

    /// Starts the handshake of a queue pair's new outgoing connection.
    pub(crate) fn dial(
        &mut self,
        fabric: &mut H,
        qp: QpId,
        (address, progress): (&FabricAddress, ConnectProgress),
        state: H::Dial,
    ) -> Result<(), FabricError> {
        let mut dial = Dial { qp, address: address.clone(), socket: None, has_sent_request: false, state };
        dial.advance_dial(self.dials.next, progress, &self.sockets, fabric)?;
        self.dials.insert(Instant::now() + self.limits.handshake_timeout, dial);
        Ok(())
    }

    /// Handles an event of a dial's socket: it is connected, or has an answer. Returns the dial if it has ended.
    pub(super) fn read_dial(&mut self, id: u64, fabric: &mut H) -> Option<Dialed<H>> {
        let dial = self.dials.get_mut(id)?;
        let socket = dial.socket.as_ref()?;
        let answer = if dial.has_sent_request {
            fabric.read_answer(socket.as_fd(), &mut dial.state)
        } else if let Err(error) = fabric.send_request(socket.as_fd(), &dial.address, &mut dial.state) {
            SocketInput::Failed(error)
        } else {
            self.sockets.epoll_set.modify(socket, Token::Dial(id), EventFlags::IN);
            dial.has_sent_request = true;
            SocketInput::Pending
        };
        let result = match answer {
            SocketInput::Pending => return None,
            SocketInput::Message(answer) => Ok(answer),
            SocketInput::Closed => Err(FabricError::connection_closed("connection closed before an answer")),
            SocketInput::Failed(error) => Err(error),
        };
        let dial = self.dials.remove(id);
        self.end_dial(dial, result)
    }

    /// Ends the dial of a queue pair before the peer has answered.
    pub(super) fn abandon_dial(&mut self, qp: QpId) -> Option<Dialed<H>> {
        let dial = self.dials.remove_oldest(|dial| dial.qp == qp);
        self.end_dial(dial, Err(FabricError::connection_closed("no answer before this side disconnected")))
    }

    /// Drops expired values, and connects dials that wait for room in a listener's queue. Returns a dial that has
    /// ended; the caller repeats the call for others.
    pub(super) fn expire(&mut self, fabric: &mut H, now: Instant) -> Option<Dialed<H>> {
        for _ in 0..EXPIRIES {
            let (incomplete, closing) = (self.incomplete.pop_due(now), self.closing.pop_due(now));
            if incomplete.is_none() && closing.is_none() {
                break;
            }
        }
        if let Some(dial) = self.dials.pop_due(now) {
            return self.end_dial(Some(dial), Err(FabricError::timed_out("debug.handshake_timeout")));
        }
        let mut full = None;
        let failed = self.dials.iter_mut().filter(|(_, dial)| dial.socket.is_none()).find_map(|(id, dial)| {
            // If the listener's queue has no room for one dial, it has none for the next.
            if full.as_ref() == Some(&dial.address) {
                return None;
            }
            let progress = fabric.open(&dial.address);
            let result = progress.and_then(|progress| dial.advance_dial(id, progress, &self.sockets, fabric));
            full = dial.socket.is_none().then(|| dial.address.clone());
            Some((id, result.err()?))
        });
        let (id, error) = failed?;
        let dial = self.dials.remove(id);
        self.end_dial(dial, Err(error))
    }

    fn end_dial(
        &self,
        dial: Option<Dial<H>>,
        result: Result<ConnectAnswer<H::Answer>, FabricError>,
    ) -> Option<Dialed<H>> {
        let dial = dial?;
        if let Some(socket) = &dial.socket {
            self.sockets.epoll_set.remove(socket);
        }
        Some((dial, result))
    }
}

/// Discards input of a closed connection; true if its peer has closed it.
fn has_ended(socket: &OwnedFd) -> bool {
    // One read suffices, because the set reports remaining input again.
    !matches!(receive(socket, &mut [0; SCRATCH]), Ok(1..) | Err(Errno::AGAIN | Errno::INTR))
}
