//! Connect requests: from opened connections to ones awaiting the owner's answer.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rpcrdma_mempool::PeerMapping;

use super::address::{Peer, Visitor};
use super::config::RING_BYTES;
use super::connect::{Connections, Token, table_bytes};
use super::memory::Layout;
use super::message::{Descriptors, Message, NO_DESCRIPTORS, Opening, Received};
use super::qp::Common;
use super::region::{self, Places};
use crate::seats::{Arrival, Taken};
use crate::sockets::{Refuses, failed};
use crate::{ControlEvent, RequestId};

/// Divisor of the places for silent connections: the most of one process.
const SHARE: usize = 4;

/// Most connections accepted from a listener in one poll.
const ACCEPTS: usize = 16;

/// A connection that a peer has started.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) deadline: Instant,
    /// The opening message; once present, the owner is next.
    pub(super) offer: Option<Offer>,
    /// Counts it.
    pub(super) taken: Taken,
}

impl Request {
    /// It has sent nothing yet.
    fn is_silent(&self) -> bool {
        self.offer.is_none()
    }
}

/// A Hello that was found good.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) layout: Layout,
    pub(super) ring: PeerMapping,
    pub(super) table: PeerMapping,
    pub(super) windows: u32,
    pub(super) max_message: u32,
    pub(super) may_sleep: bool,
    /// Of its mappings, our own table of windows included.
    pub(super) places: Places,
}

impl Connections {
    /// Accepts connections of the listeners and reads their openings at once. True if that was a request; later
    /// messages wait.
    pub(super) fn accept_sockets(&mut self, common: &mut Common) -> bool {
        let arrivals = self.sockets.accept(ACCEPTS, common.config.max_handshakes, |not| common.not_accepted(not));
        self.arrivals.extend(arrivals);
        self.read_arrivals(common)
    }

    /// Reads the openings of accepted connections, up to the first request. True if there was one.
    pub(super) fn read_arrivals(&mut self, common: &mut Common) -> bool {
        while let Some(arrival) = self.arrivals.pop_front() {
            if self.accept_socket(common, arrival) {
                return true;
            }
        }
        false
    }

    fn accept_socket(&mut self, common: &mut Common, arrival: Arrival<Visitor>) -> bool {
        let Arrival { who: (socket, peer), taken } = arrival;
        let most = common.config.max_handshakes;
        let own = |request: &Request| request.is_silent() && request.peer.pid == peer.pid;
        // A process with many silent connections evicts its own.
        if self.requests.iter().filter(|request| own(request)).count() >= (most / SHARE).max(1) {
            self.drop_oldest(common, own);
        } else if self.requests.len() >= most && !self.drop_oldest(common, Request::is_silent) {
            common.refuse(format_args!("{peer}: {most} requests (max_handshakes) wait for an answer"));
            return false;
        }
        let id = RequestId(self.next_request);
        self.next_request += 1;
        if let Err(error) = self.watch(socket.as_fd(), Token::Request(id.0)) {
            common.refuse(format_args!("{peer}: {error}"));
            return false;
        }
        let deadline = Instant::now() + common.config.handshake_timeout;
        self.requests.push(Request { id, socket, peer, deadline, offer: None, taken });
        self.read_request(id, common)
    }

    /// Drops the oldest request that satisfies `which`. False if there is none.
    fn drop_oldest(&mut self, common: &mut Common, which: impl Fn(&Request) -> bool) -> bool {
        let these = self.requests.iter().enumerate().filter(|(_, request)| which(request));
        let Some((at, _)) = these.min_by_key(|(_, request)| request.deadline) else { return false };
        let gone = self.requests.swap_remove(at);
        common.refuse(format_args!("{}: it says nothing, and there are others (max_handshakes)", gone.peer));
        true
    }

    /// Reads its messages. True if that is a request, for the owner to answer.
    pub(super) fn read_request(&mut self, id: RequestId, common: &mut Common) -> bool {
        let Some(at) = self.requests.iter().position(|r| r.id == id) else { return false };
        let request = &mut self.requests[at];
        let refused = match (Message::receive(request.socket.as_fd()), request.offer.is_some()) {
            (Received::Empty, _) => return false,
            (Received::Message(Message::Hello(hello), fds), false) => match Offer::check(common, &hello, fds) {
                Ok(offer) => {
                    request.offer = Some(offer);
                    let (peer, private_data) = (request.peer.to_string(), hello.private_data);
                    common.events.push_back(ControlEvent::ConnectRequest { request: id, private_data, peer });
                    return true;
                }
                Err(why) => why,
            },
            (Received::Message(..), _) => "a message out of turn".to_owned(),
            (Received::Closed, _) => {
                log::debug!("software fabric: {} has given up its connect request", request.peer);
                self.requests.swap_remove(at);
                return false;
            }
            (Received::Garbage(why), _) => why.to_owned(),
            (Received::NoDescriptors(error), _) => failed(NO_DESCRIPTORS, error).to_string(),
        };
        common.refuse(format_args!("{}: {refused}", request.peer));
        self.end_request(id, &Message::Refused { reason: refused });
        false
    }
}

impl Offer {
    fn check(common: &Common, hello: &Opening, fds: Descriptors) -> Result<Self, String> {
        let &Opening { may_sleep, ring_bytes, max_message, windows, .. } = hello;
        let [ring, table] = fds.into_inner().map_err(|fds| format!("{} descriptors instead of 2", fds.len()))?;
        if !ring_bytes.is_power_of_two() || !RING_BYTES.contains(&(ring_bytes as usize)) {
            return Err(format!("rings of {ring_bytes} bytes"));
        }
        if max_message == 0 || max_message > ring_bytes / 2 {
            return Err(format!("messages of {max_message} bytes in rings of {ring_bytes}"));
        }
        let all = Layout::new(ring_bytes).bytes();
        let mapped = all as u64 + table_bytes(windows)? as u64;
        let most = common.config.max_mapped_per_peer;
        if mapped > most {
            return Err(format!("{mapped} bytes to map; max_mapped_per_peer is {most}"));
        }
        Ok(Self {
            // Of longer rings only our length is used.
            layout: Layout::new(ring_bytes.min(common.config.ring_bytes as u32)),
            ring: region::map(ring, all)?,
            table: region::map(table, table_bytes(windows)?)?,
            windows,
            max_message,
            may_sleep,
            places: common.peer_memory.budget.take(region::PER_CONNECTION)?,
        })
    }
}
