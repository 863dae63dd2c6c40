//! Checks message sizes against the Receive sizes that sent and received headers announce.

use std::collections::VecDeque;

use rpcrdma::wire::optional::{Operation, OperationCode};
use rpcrdma::wire::private_data::PrivateData;
use rpcrdma::wire::properties::{Properties, PropertyId, PropertySet};
use rpcrdma::wire::{Revision, Version, View, ViewBody};

/// Default Receive size of version 2.
const DEFAULT_SIZE: usize = 4096;
/// Minimum Receive size of every peer.
const MIN_SIZE: usize = 1024;

/// The Receive sizes of both ends of a connection.
#[derive(Debug)]
pub(crate) struct Sizes {
    /// Size of this side's Receives that its private data announced. Version 1 uses this size.
    own_first_size: usize,
    /// Sizes of this side's Receives that its messages announced, each with the number of the message. The peer has
    /// provably read the first of these messages, and perhaps later ones.
    own_sizes: VecDeque<(u32, usize)>,
    /// Size of the peer's Receives that its private data announced. Version 1 uses this size.
    peer_first_size: usize,
    /// Sizes of the peer's Receives that its messages announced, each with the number of the message.
    peer_sizes: VecDeque<(u32, usize)>,
    /// Number of messages that the peer's increments allow this side to send.
    limit: u32,
    /// Whether a CONNPROP was sent. Only the first one counts.
    sent_connprop: bool,
    /// Whether a CONNPROP was received. Only the first one counts.
    received_connprop: bool,
    /// Whether the peer may be hostile. The sizes that a hostile peer announces are not checked.
    hostile: bool,
}

impl Sizes {
    /// State of a new connection with both ends' private data.
    pub(crate) fn new(server: bool, ours: &[u8], theirs: &[u8], hostile: bool) -> Self {
        let size = |data: &[u8]| PrivateData::parse(data).unwrap_or_default().receive_size as usize;
        Self {
            own_first_size: size(ours),
            own_sizes: VecDeque::from([(0, DEFAULT_SIZE)]),
            peer_first_size: size(theirs),
            peer_sizes: VecDeque::from([(0, DEFAULT_SIZE)]),
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

    /// Checks a sent message, which is number `count` of the connection.
    ///
    /// # Errors
    /// The message may exceed the peer's Receives.
    pub(crate) fn send(&mut self, message: &[u8], revision: Revision, count: u32) -> Result<(), String> {
        let Ok(view) = View::check(message, revision) else { return Ok(()) };
        let max = match (view.version(), view.received()) {
            (Version::V1, _) => self.peer_first_size,
            (Version::V2, Some(received)) => {
                discard_outdated(&mut self.peer_sizes, received);
                largest(&self.peer_sizes)
            }
            // A message with increments does not tell which messages its sender has read.
            (Version::V2, None) => largest(&self.peer_sizes),
        };
        if message.len() > max.max(MIN_SIZE) && !self.hostile {
            return Err(format!("sends {} bytes to a peer with Receives of {max}", message.len()));
        }
        if let Some(size) = receive_size(&view, revision, &mut self.sent_connprop) {
            self.own_sizes.push_back((count, size));
        }
        Ok(())
    }

    /// Records a received message, which is number `count` of the connection.
    pub(crate) fn receive(&mut self, message: &[u8], revision: Revision, count: u32) {
        let view = match View::check(message, revision) {
            Ok(view) => view,
            // A malformed message also grants credits.
            Err(error) => return error.credit().into_iter().for_each(|credit| self.record_increment(credit)),
        };
        if view.version() == Version::V1 {
            return;
        }
        if let Some(size) = receive_size(&view, revision, &mut self.received_connprop) {
            self.peer_sizes.push_back((count, size));
        }
        match view.received() {
            Some(received) => discard_outdated(&mut self.own_sizes, received),
            None if !matches!(view.body(), ViewBody::Error(_)) => self.record_increment(view.credit()),
            None => {}
        }
    }

    /// Records a credit value of version 2 with increments.
    fn record_increment(&mut self, credit: u32) {
        let increment = credit & 0xFFFF;
        self.limit = self.limit.wrapping_add(increment);
        // The peer allows `credit >> 16` messages in flight, so it has received all earlier ones.
        if increment > 0 {
            discard_outdated(&mut self.own_sizes, self.limit.wrapping_sub(credit >> 16));
        }
    }

    /// Length of the longest message that the peer may send. `version` is the negotiated one, if any.
    pub(crate) fn promised(&self, version: Option<Version>) -> usize {
        match version {
            Some(Version::V1) => self.own_first_size,
            Some(Version::V2) => largest(&self.own_sizes),
            None => self.own_first_size,
        }
    }
}

/// Removes sizes that a later message, up to number `count`, has replaced.
fn discard_outdated(sizes: &mut VecDeque<(u32, usize)>, count: u32) {
    while sizes.get(1).is_some_and(|&(number, _)| count.wrapping_sub(number) as i32 >= 0) {
        sizes.pop_front();
    }
}

fn largest(sizes: &VecDeque<(u32, usize)>) -> usize {
    sizes.iter().map(|&(_, size)| size).max().unwrap_or(DEFAULT_SIZE)
}

/// The Receive size that a message announces for its sender.
fn receive_size(view: &View<'_>, revision: Revision, has_connprop: &mut bool) -> Option<usize> {
    let in_set = |set: PropertySet<'_>| {
        let mut properties = Properties::default();
        let ids: Result<Vec<_>, _> = set.iter().map(|property| properties.apply(&property, revision)).collect();
        ids.ok()?.contains(&Some(PropertyId::ReceiveSize)).then_some(properties.receive_size as usize)
    };
    match view.body() {
        ViewBody::Connprop(_) if *has_connprop => None,
        ViewBody::Connprop(set) => {
            *has_connprop = true;
            in_set(set)
        }
        ViewBody::Optional { opttype, optinfo } => {
            match Operation::parse(OperationCode::from_code(opttype)?, optinfo).ok()? {
                Operation::Initial { start, .. } => in_set(start),
                Operation::Update { now, .. } => {
                    let mut properties = Properties::default();
                    let id = properties.apply(&now, revision).ok()??;
                    (id == PropertyId::ReceiveSize).then_some(properties.receive_size as usize)
                }
                Operation::Request { .. } | Operation::Respond { .. } => None,
            }
        }
        _ => None,
    }
}

/// A device that reports its smallest Receive.
pub(crate) trait SmallestReceive {
    /// Bytes of the smallest Receive in the shared queue.
    fn smallest_receive(&mut self) -> Option<usize>;
}
