//! Message and Receive sizes by sent and received headers, as they change.

use std::collections::VecDeque;

use rpcrdma::wire::optional::{Operation, OperationCode};
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::properties::{Properties, PropertyId, PropertySet};
use rpcrdma::wire::{Revision, Version, View, ViewBody};

/// Receive size of version 2 by default, and the minimum of every peer.
const DEFAULT: usize = 4096;
const LEAST: usize = 1024;

/// The sizes of one connection's messages.
#[derive(Debug)]
pub(crate) struct Sizes {
    /// Size of this side's Receives: `own_first_size` from the connect messages (version 1), `own_sizes` from later
    /// messages. Each of these is stored with the count of messages at which it was sent. The first one applies until
    /// the peer has provably read the next.
    own_first_size: usize,
    own_sizes: VecDeque<(u32, usize)>,
    /// Size of the peer's Receives, from the connect messages and from later messages.
    peer_first_size: usize,
    peer_sizes: VecDeque<(u32, usize)>,
    /// Messages that increments allow the peer.
    limit: u32,
    /// A CONNPROP was sent, and one was received. Only the first of each end counts.
    sent_connprop: bool,
    received_connprop: bool,
    /// The peer may be hostile; its values mean nothing.
    hostile: bool,
}

impl Sizes {
    /// A new connection with both ends' private data.
    pub(crate) fn new(server: bool, ours: &[u8], theirs: &[u8], hostile: bool) -> Self {
        let size = |data: &[u8]| PrivateData::parse(data).unwrap_or_default().receive_size as usize;
        Self {
            own_first_size: size(ours),
            own_sizes: VecDeque::from([(0, DEFAULT)]),
            peer_first_size: size(theirs),
            peer_sizes: VecDeque::from([(0, DEFAULT)]),
            limit: u32::from(!server),
            sent_connprop: false,
            received_connprop: false,
            hostile,
        }
    }

    /// Records the peer's private data.
    pub(crate) fn set_peer_private_data(&mut self, theirs: &[u8]) {
        self.peer_first_size = PrivateData::parse(theirs).unwrap_or_default().receive_size as usize;
    }

    /// Checks the `count`th sent message.
    ///
    /// # Errors
    /// It may be too long for the peer.
    pub(crate) fn send(&mut self, message: &[u8], revision: Revision, count: u32) -> Result<(), String> {
        let Ok(view) = View::check(message, revision) else { return Ok(()) };
        let most = match (view.version(), view.received()) {
            (Version::V1, _) => self.peer_first_size,
            (Version::V2, Some(received)) => {
                forget(&mut self.peer_sizes, received);
                largest(&self.peer_sizes)
            }
            // A message with increments does not reveal which messages its sender has read.
            (Version::V2, None) => largest(&self.peer_sizes),
        };
        if message.len() > most.max(LEAST) && !self.hostile {
            return Err(format!("it sends {} bytes to a peer that takes {most}", message.len()));
        }
        if let Some(size) = receive_size(&view, revision, &mut self.sent_connprop) {
            self.own_sizes.push_back((count, size));
        }
        Ok(())
    }

    /// Records the `count`th received message.
    pub(crate) fn receive(&mut self, message: &[u8], revision: Revision, count: u32) {
        let view = match View::check(message, revision) {
            Ok(view) => view,
            // A malformed message grants credits, too.
            Err(error) => return error.credit().into_iter().for_each(|credit| self.granted(credit)),
        };
        if view.version() == Version::V1 {
            return;
        }
        if let Some(size) = receive_size(&view, revision, &mut self.received_connprop) {
            self.peer_sizes.push_back((count, size));
        }
        match view.received() {
            Some(received) => forget(&mut self.own_sizes, received),
            None if !matches!(view.body(), ViewBody::Error(_)) => self.granted(view.credit()),
            None => {}
        }
    }

    fn granted(&mut self, credit: u32) {
        let newly = credit & 0xFFFF;
        self.limit = self.limit.wrapping_add(newly);
        // The outstanding limit is the room of the peer, which has received all earlier messages.
        if newly > 0 {
            forget(&mut self.own_sizes, self.limit.wrapping_sub(credit >> 16));
        }
    }

    /// The longest message that the peer may send. `version` is the negotiated one, if any.
    pub(crate) fn promised(&self, version: Option<Version>) -> usize {
        match version {
            Some(Version::V1) => self.own_first_size,
            Some(Version::V2) => largest(&self.own_sizes),
            None => self.own_first_size,
        }
    }
}

/// Removes all but the last of the values sent up to a count.
fn forget(said: &mut VecDeque<(u32, usize)>, count: u32) {
    while said.get(1).is_some_and(|&(at, _)| count.wrapping_sub(at) as i32 >= 0) {
        said.pop_front();
    }
}

fn largest(said: &VecDeque<(u32, usize)>) -> usize {
    said.iter().map(|&(_, size)| size).max().unwrap_or(DEFAULT)
}

/// The Receive size that a message announces for its sender.
fn receive_size(view: &View<'_>, revision: Revision, seen: &mut bool) -> Option<usize> {
    let in_set = |set: PropertySet<'_>| {
        let mut all = Properties::default();
        let said: Result<Vec<_>, _> = set.iter().map(|property| all.apply(&property, revision)).collect();
        said.ok()?.contains(&Some(PropertyId::ReceiveSize)).then_some(all.receive_size as usize)
    };
    match view.body() {
        ViewBody::Connprop(_) if *seen => None,
        ViewBody::Connprop(set) => {
            *seen = true;
            in_set(set)
        }
        ViewBody::Optional { opttype, optinfo } => {
            match Operation::parse(OperationCode::from_code(opttype)?, optinfo).ok()? {
                Operation::Initial { start, .. } => in_set(start),
                Operation::Update { now, .. } => {
                    let mut all = Properties::default();
                    let id = all.apply(&now, revision).ok()??;
                    (id == PropertyId::ReceiveSize).then_some(all.receive_size as usize)
                }
                Operation::Request { .. } | Operation::Respond { .. } => None,
            }
        }
        _ => None,
    }
}

/// A device that reports its smallest Receive.
pub(crate) trait Smallest {
    /// The smallest of the shared queue.
    fn smallest_receive(&mut self) -> Option<usize>;
}
