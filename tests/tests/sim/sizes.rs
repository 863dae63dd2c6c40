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
    /// Size of this side's Receives: `told_first` from the connect messages (version 1), `told` from later messages.
    /// Each is stored with the count of messages at which it was sent. The first applies until the peer provably has
    /// read the next.
    told_first: usize,
    told: VecDeque<(u32, usize)>,
    /// The same for the peer's Receives.
    heard_first: usize,
    heard: VecDeque<(u32, usize)>,
    /// Messages that increments allow the peer.
    limit: u32,
    /// A CONNPROP was sent, and one was received. Only the first of each end counts.
    introduced: bool,
    met: bool,
    /// The peer may be hostile; its values mean nothing.
    hostile: bool,
}

impl Sizes {
    /// A new connection with both ends' private data.
    pub(crate) fn new(server: bool, ours: &[u8], theirs: &[u8], hostile: bool) -> Self {
        let size = |data: &[u8]| PrivateData::parse(data).unwrap_or_default().receive_size as usize;
        Self {
            told_first: size(ours),
            told: VecDeque::from([(0, DEFAULT)]),
            heard_first: size(theirs),
            heard: VecDeque::from([(0, DEFAULT)]),
            limit: u32::from(!server),
            introduced: false,
            met: false,
            hostile,
        }
    }

    /// Records the peer's private data.
    pub(crate) fn heard_from(&mut self, theirs: &[u8]) {
        self.heard_first = PrivateData::parse(theirs).unwrap_or_default().receive_size as usize;
    }

    /// Checks the `count`th sent message.
    ///
    /// # Errors
    /// It may be too long for the peer.
    pub(crate) fn send(&mut self, message: &[u8], revision: Revision, count: u32) -> Result<(), String> {
        let Ok(view) = View::check(message, revision) else { return Ok(()) };
        let most = match (view.version(), view.received()) {
            (Version::V1, _) => self.heard_first,
            (Version::V2, Some(received)) => {
                forget(&mut self.heard, received);
                largest(&self.heard)
            }
            // It does not reveal the messages already read.
            (Version::V2, None) => largest(&self.heard),
        };
        if message.len() > most.max(LEAST) && !self.hostile {
            return Err(format!("it sends {} bytes to a peer that takes {most}", message.len()));
        }
        if let Some(size) = receive_size(&view, revision, &mut self.introduced) {
            self.told.push_back((count, size));
        }
        Ok(())
    }

    /// Records the `count`th received message.
    pub(crate) fn receive(&mut self, message: &[u8], revision: Revision, count: u32) {
        let view = match View::check(message, revision) {
            Ok(view) => view,
            // It grants credits even if it is malformed.
            Err(error) => return error.credit().into_iter().for_each(|credit| self.granted(credit)),
        };
        if view.version() == Version::V1 {
            return;
        }
        if let Some(size) = receive_size(&view, revision, &mut self.met) {
            self.heard.push_back((count, size));
        }
        match view.received() {
            Some(received) => forget(&mut self.told, received),
            None if !matches!(view.body(), ViewBody::Error(_)) => self.granted(view.credit()),
            None => {}
        }
    }

    fn granted(&mut self, credit: u32) {
        let newly = credit & 0xFFFF;
        self.limit = self.limit.wrapping_add(newly);
        // The peer has room for so many; it has received the others.
        if newly > 0 {
            forget(&mut self.told, self.limit.wrapping_sub(credit >> 16));
        }
    }

    /// The longest message that the peer may send. `version` is the negotiated one, if any.
    pub(crate) fn promised(&self, version: Option<Version>) -> usize {
        match version {
            Some(Version::V1) => self.told_first,
            Some(Version::V2) => largest(&self.told),
            None => self.told_first,
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
fn receive_size(view: &View<'_>, revision: Revision, introduced: &mut bool) -> Option<usize> {
    let in_set = |set: PropertySet<'_>| {
        let mut all = Properties::default();
        let said: Result<Vec<_>, _> = set.iter().map(|property| all.apply(&property, revision)).collect();
        said.ok()?.contains(&Some(PropertyId::ReceiveSize)).then_some(all.receive_size as usize)
    };
    match view.body() {
        ViewBody::Connprop(_) if *introduced => None,
        ViewBody::Connprop(set) => {
            *introduced = true;
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
