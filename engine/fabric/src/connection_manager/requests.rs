//! Connections that peers have started and that the owner has not answered yet.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll::EventFlags;

use super::sockets::NotAccepted;
use super::{ConnectionManager, Handshake, Received, Token};
use crate::accept_balancer::{Accepted, ConnectionCount};
use crate::{ControlEvent, FabricError, RequestId};

/// Divisor of the places for incomplete requests: the most of one host.
const SHARE: usize = 4;

/// A connection that a peer has started.
#[derive(Debug)]
pub(crate) struct Request<H: Handshake> {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: H::Peer,
    /// What the peer has sent so far.
    pub(crate) incoming: H::Incoming,
    /// Counts it.
    pub(crate) count: ConnectionCount,
}

impl<H: Handshake> ConnectionManager<H> {
    /// Accepts connections up to the free places among unanswered requests. The others stay in the listener's queue: a
    /// slow owner does not cause refusals.
    pub(super) fn accept(&mut self, fabric: &mut H) {
        let most = self.limits.max_handshakes;
        let places = most.saturating_sub(self.complete.len() + self.unread.len()).min(H::ACCEPTS);
        if places == 0 {
            return;
        }
        let accepted = self.sockets.accept(places, most, |why| match why {
            NotAccepted::Refused(why) => fabric.refuse(format_args!("{why}")),
            NotAccepted::Failed(error) => fabric.control().log.accept_failed(H::FABRIC, error),
        });
        self.unread.extend(accepted);
    }

    /// Reads accepted connections until `most` requests are complete; returns how many are.
    pub(super) fn read_accepted(&mut self, most: usize, fabric: &mut H) -> usize {
        let mut complete = 0;
        while complete < most
            && let Some(accepted) = self.unread.pop_front()
        {
            complete += usize::from(self.admit(accepted, fabric));
        }
        complete
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
        fabric.refuse(format_args!("{}: it says nothing, and there are others (max_handshakes)", gone.peer));
        true
    }

    /// Reads from a peer. True if its request is complete now, for the owner to answer. A complete one ends by any
    /// input.
    pub(super) fn read_request(&mut self, id: u64, fabric: &mut H) -> bool {
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
}
