//! Changing characteristics of a running connection (draft-dnoveck-nfsv4-rpcrdma-xcharext-02, called XC
//! below).
//!
//! Each end has one [`Exchange`] per connection whose peer offered [`PropertyId::OptionalType`]. It starts with the
//! CONNPROP values ([`adopt_connprop`](Exchange::adopt_connprop)) and states all values of this end once (INITXCH).
//! From then on:
//!
//! | this end | on the wire | the peer's end |
//! | --- | --- | --- |
//! | [`request`](Exchange::request) | REQXCH → | event [`Requested`], then [`answer`](Exchange::answer) |
//! | event [`Answer`] | ← RESPXCH: done, rejected, pending | |
//! | event [`Peer`] | ← UPDXCH | [`update`](Exchange::update) |
//! | events [`Peer`], [`Answer`] | ← UPDXCH that ends a pending request | [`resolve`](Exchange::resolve) |
//!
//! [`Requested`]: CharacteristicEvent::Requested
//! [`Answer`]: CharacteristicEvent::Answer
//! [`Peer`]: CharacteristicEvent::Peer
//!
//! The owner passes each OPTIONAL message to [`handle`](Exchange::handle) and each error about such a message to
//! [`failed`](Exchange::failed). It takes the [events](Exchange::poll_event) after each and sends the output of
//! [`poll_transmit`](Exchange::poll_transmit).
//!
//! The draft leaves some cases open, which are decided as follows. There is one request at a time per end, because
//! nothing ties an update to its request (XC §4.4). A second request of the peer is rejected, wholly or for the pending
//! values, as XC §3 permits. An update of a value declared constant is accepted, because the peer knows its own state.
//! A repeated INITXCH counts as updates. Memory is bounded: at most six characteristics of a message are kept, and at
//! most [`MAX_ANSWERS`] answers wait to be sent.
#![forbid(unsafe_code)]

mod characteristic;
mod error;
#[cfg(test)]
mod model;
mod operation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use crate::wire::optional::{Operation, OperationCode};
use crate::wire::properties::{Properties, PropertyId, PropertySet, Subset};
use crate::wire::{ErrorBody, Flags, Revision};

pub use characteristic::Characteristic;
use characteristic::{COUNT, IdSet};
pub use error::{ChangeError, ExchangeError};
pub use operation::EncodedOperation;
use operation::QueuedOperation;

/// Maximum properties in one request of the peer, known or not. Its answer then takes less than 150 bytes.
pub const MAX_REQUESTED: usize = 256;
/// Maximum queued answers. A peer that sends more requests without granting credits gets errors.
pub const MAX_ANSWERS: usize = 4;

/// Characteristics of one message.
pub type CharacteristicList = ArrayVec<Characteristic, COUNT>;

/// An event for the owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CharacteristicEvent {
    /// A characteristic of the peer has changed to this value.
    Peer(Characteristic),
    /// The peer requests these values. Decide by [`Exchange::answer`], now or later.
    Requested(CharacteristicList),
    /// The outcome of a value that this end requested. After [`ChangeOutcome::Pending`] a second answer follows.
    Answer {
        /// The value that was requested.
        wanted: Characteristic,
        /// The outcome.
        outcome: ChangeOutcome,
    },
    /// The peer does not support these operations. Its values stay as they are.
    Unsupported,
}

/// The outcome of a requested value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// The peer has adopted the value.
    Done,
    /// The peer keeps its value.
    Rejected,
    /// The peer may change the value later.
    Pending,
    /// The peer has changed its value, but to this one.
    Partial(Characteristic),
}

/// This end's decision about a value that the peer requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Already in effect before the answer, because the peer relies on it immediately.
    Done,
    /// Rejected.
    Rejected,
    /// Undecided until [`Exchange::resolve`].
    Pending,
}

/// A request of the peer that the owner has not decided.
#[derive(Clone, Debug)]
struct PeerRequest {
    xid: u32,
    count: usize,
    /// Undecided values, with their positions in the request. All other positions are rejected.
    open: ArrayVec<(usize, Characteristic), COUNT>,
}

/// A requested value, and the previous one.
#[derive(Clone, Copy, Debug)]
struct PendingRequest {
    wanted: Characteristic,
    before: Characteristic,
}

/// One end of the exchange of characteristics of a connection.
#[derive(Clone, Debug, Default)]
pub struct Exchange {
    revision: Revision,
    local: Properties<'static>,
    local_constant: IdSet,
    peer: Properties<'static>,
    peer_constant: IdSet,
    peer_stated: IdSet,
    /// This end's request without an answer.
    request: Option<(u32, CharacteristicList)>,
    /// Values that this end requested, and the peer answered with pending.
    pending_requests: ArrayVec<PendingRequest, COUNT>,
    peer_request: Option<PeerRequest>,
    /// Properties that the peer requested, and this end answered with pending.
    answered_pending: IdSet,
    queue: VecDeque<QueuedOperation>,
    events: VecDeque<CharacteristicEvent>,
    supported: bool,
    unexpected: u64,
}

impl Exchange {
    /// Creates an end with the values of `local`, and queues INITXCH.
    ///
    /// The values in `constant` never change. Windowed credits, OPTIONAL support and host authentication are not
    /// characteristics, so they are ignored.
    pub fn new(revision: Revision, local: &Properties<'static>, constant: &[PropertyId]) -> Self {
        Self {
            revision,
            local: Properties { windowed_credits: false, optional_type: false, host_auth: None, ..*local },
            local_constant: constant.iter().copied().collect(),
            queue: VecDeque::from([QueuedOperation::Initial]),
            supported: true,
            ..Self::default()
        }
    }

    /// Adopts the values of the peer's CONNPROP, without events, because the owner has processed it.
    pub fn adopt_connprop(&mut self, properties: &PropertySet<'_>) {
        for property in properties.iter() {
            if let Ok(Some(value)) = Characteristic::read(&property, self.revision) {
                value.store(&mut self.peer);
                self.peer_stated.insert(value.id());
            }
        }
    }

    /// This end's announced values.
    pub const fn local(&self) -> &Properties<'static> {
        &self.local
    }

    /// The peer's values, with defaults for those not announced.
    pub const fn peer(&self) -> &Properties<'static> {
        &self.peer
    }

    /// This end's pending request for a value.
    pub fn wanted(&self, id: PropertyId) -> Option<Characteristic> {
        let requested = self.request.iter().flat_map(|(_, wanted)| wanted).copied();
        requested.chain(self.pending_requests.iter().map(|request| request.wanted)).find(|wanted| wanted.id() == id)
    }

    /// Number of harmless protocol violations of the peer, such as a changed constant value, or the end of a request
    /// that was not pending.
    pub const fn unexpected(&self) -> u64 {
        self.unexpected
    }

    // ---- input

    /// Processes an OPTIONAL message: its XID, flags, `rdma_opttype` and `rdma_optinfo`.
    ///
    /// # Errors
    /// The message had no effect. Send [`ExchangeError::answer`] with the same XID.
    pub fn handle(&mut self, xid: u32, flags: Flags, opttype: u32, optinfo: &[u8]) -> Result<(), ExchangeError> {
        let code = OperationCode::from_code(opttype).ok_or(ExchangeError::UnknownOperation(opttype))?;
        let is_response = flags.contains(Flags::RESPONSE);
        if code == OperationCode::Respond {
            let wanted = match &self.request {
                Some((expected, _)) if *expected == xid => self.request.take().map(|(_, wanted)| wanted),
                _ => None,
            };
            let wanted = wanted.ok_or(ExchangeError::NotRequested(xid))?;
            let answer = Operation::parse(code, optinfo).ok().filter(|_| is_response);
            return self.handle_response(wanted, answer);
        }
        if is_response {
            return Err(ExchangeError::WrongFlag(code));
        }
        match Operation::parse(code, optinfo)? {
            Operation::Initial { start, constant } => self.handle_initial(&start, &constant),
            Operation::Request { want } => self.handle_request(xid, &want),
            Operation::Update { now, clears_pending } => {
                if let Some(value) = Characteristic::read(&now, self.revision)? {
                    self.handle_update(value, clears_pending);
                }
                Ok(())
            }
            Operation::Respond { .. } => Ok(()),
        }
    }

    /// Processes an error that the peer reported with this XID. True if it concerned an operation of this end.
    pub fn failed(&mut self, xid: u32, error: &ErrorBody) -> bool {
        let request = self.request.take_if(|(expected, _)| *expected == xid);
        // INITXCH and UPDXCH have XID 0.
        let is_own = request.is_some() || (xid == 0 && *error == ErrorBody::InvalHtype);
        for wanted in request.into_iter().flat_map(|(_, wanted)| wanted) {
            self.events.push_back(CharacteristicEvent::Answer { wanted, outcome: ChangeOutcome::Rejected });
        }
        if is_own && *error == ErrorBody::InvalHtype && std::mem::replace(&mut self.supported, false) {
            self.queue.clear();
            self.events.push_back(CharacteristicEvent::Unsupported);
        }
        is_own
    }

    /// INITXCH (XC §4.1).
    fn handle_initial(&mut self, start: &PropertySet<'_>, constant: &Subset<'_>) -> Result<(), ExchangeError> {
        if constant.iter().any(|position| position >= start.len()) {
            return Err(ExchangeError::SubsetTooLong("optixch_nochg"));
        }
        start.check_known(self.revision, 0)?;
        let earlier = self.peer;
        for (position, property) in start.iter().enumerate() {
            let Some(value) = Characteristic::read(&property, self.revision)? else { continue };
            let id = value.id();
            let changed = value.replace_in(&mut self.peer);
            self.unexpected += u64::from(changed && self.peer_constant.contains(&id));
            self.peer_stated.insert(id);
            if constant.contains(position) {
                self.peer_constant.insert(id);
            }
        }
        for now in Characteristic::all(&self.peer) {
            if now.value_in(&earlier) != now {
                self.events.push_back(CharacteristicEvent::Peer(now));
            }
        }
        Ok(())
    }

    /// REQXCH (XC §4.2).
    fn handle_request(&mut self, xid: u32, want: &PropertySet<'_>) -> Result<(), ExchangeError> {
        let count = want.len();
        if count > MAX_REQUESTED {
            return Err(ExchangeError::TooManyProperties(count));
        }
        let is_busy = self.peer_request.is_some();
        let answers = self.queue.iter().filter(|message| matches!(message, QueuedOperation::Answer { .. })).count();
        if answers + usize::from(is_busy) >= MAX_ANSWERS {
            return Err(ExchangeError::TooManyRequests);
        }
        let mut open = ArrayVec::<_, COUNT>::new();
        let mut seen = IdSet::default();
        for (position, property) in want.iter().enumerate() {
            let Some(value) = Characteristic::read(&property, self.revision)? else { continue };
            let id = value.id();
            let is_repeated = !seen.insert(id);
            if !(is_repeated || is_busy || self.local_constant.contains(&id) || self.answered_pending.contains(&id)) {
                open.push((position, value));
            }
        }
        if open.is_empty() {
            let (done, pending) = Default::default();
            self.queue.push_back(QueuedOperation::Answer { xid, count, done, pending });
        } else {
            self.events.push_back(CharacteristicEvent::Requested(open.iter().map(|(_, value)| *value).collect()));
            self.peer_request = Some(PeerRequest { xid, count, open });
        }
        Ok(())
    }

    /// RESPXCH (XC §4.3). `answer` is `None` if the message is malformed or lacks [`Flags::RESPONSE`].
    fn handle_response(
        &mut self,
        wanted: CharacteristicList,
        answer: Option<Operation<'_>>,
    ) -> Result<(), ExchangeError> {
        let subsets = match answer {
            Some(Operation::Respond { done, rejected, pending }) if is_partition(&wanted, done, rejected, pending) => {
                Some((done, pending))
            }
            _ => None,
        };
        let (done, pending) = subsets.unwrap_or_default();
        for (position, wanted) in wanted.into_iter().enumerate() {
            let outcome = if done.contains(position) {
                self.adopt(wanted);
                ChangeOutcome::Done
            } else if pending.contains(position) {
                self.pending_requests.push(PendingRequest { wanted, before: wanted.value_in(&self.peer) });
                ChangeOutcome::Pending
            } else {
                ChangeOutcome::Rejected
            };
            self.events.push_back(CharacteristicEvent::Answer { wanted, outcome });
        }
        subsets.map(|_| ()).ok_or(ExchangeError::BadAnswer)
    }

    /// UPDXCH (XC §4.4).
    fn handle_update(&mut self, now: Characteristic, clears_pending: bool) {
        let id = now.id();
        // A characteristic that the peer never stated may not change.
        let is_constant = self.peer_constant.contains(&id) || !self.peer_stated.contains(&id);
        let changed = self.adopt(now);
        self.unexpected += u64::from(is_constant && changed);
        if !clears_pending {
            return;
        }
        let Some(index) = self.pending_requests.iter().position(|request| request.wanted.id() == id) else {
            self.unexpected += 1;
            return;
        };
        let PendingRequest { wanted, before } = self.pending_requests.remove(index);
        let outcome = match now {
            _ if now == wanted => ChangeOutcome::Done,
            _ if now == before => ChangeOutcome::Rejected,
            _ => ChangeOutcome::Partial(now),
        };
        self.events.push_back(CharacteristicEvent::Answer { wanted, outcome });
    }

    /// Adopts a value of the peer; true if it is new.
    fn adopt(&mut self, value: Characteristic) -> bool {
        let changed = value.replace_in(&mut self.peer);
        if changed {
            self.events.push_back(CharacteristicEvent::Peer(value));
        }
        changed
    }

    /// The next event of the last input, oldest first. Empty the queue after each input.
    pub fn poll_event(&mut self) -> Option<CharacteristicEvent> {
        self.events.pop_front()
    }

    // ---- commands

    /// Requests that the peer adopt these values. The XID is unique among this end's requests. Each value yields one
    /// [`CharacteristicEvent::Answer`], and a second one if the first is [`ChangeOutcome::Pending`].
    ///
    /// # Errors
    /// Nothing was requested.
    pub fn request(&mut self, xid: u32, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        if !self.supported {
            return Err(ChangeError::Unsupported);
        }
        if self.request.is_some() {
            return Err(ChangeError::Busy);
        }
        if wanted.is_empty() {
            return Err(ChangeError::Empty);
        }
        let mut seen = IdSet::default();
        for value in wanted {
            let id = self.in_revision(*value)?;
            if !seen.insert(id) {
                return Err(ChangeError::Twice(id));
            }
            if self.peer_constant.contains(&id) || !self.peer_stated.contains(&id) {
                return Err(ChangeError::Constant(id));
            }
            if self.pending_requests.iter().any(|request| request.wanted.id() == id) {
                return Err(ChangeError::Pending(id));
            }
        }
        // The list has room, because duplicates were rejected.
        let wanted: CharacteristicList = wanted.iter().copied().collect();
        self.queue.push_back(QueuedOperation::Request { xid, wanted: wanted.clone() });
        self.request = Some((xid, wanted));
        Ok(())
    }

    /// Decides the peer's request, which was a [`Requested`](CharacteristicEvent::Requested) event. A value with
    /// [`Verdict::Done`] must already be in effect. Returns false if there is no request.
    pub fn answer(&mut self, mut decide: impl FnMut(Characteristic) -> Verdict) -> bool {
        let Some(PeerRequest { xid, count, open }) = self.peer_request.take() else { return false };
        let (mut done, mut pending) = (ArrayVec::new(), ArrayVec::new());
        for (position, value) in open {
            match decide(value) {
                Verdict::Done => {
                    value.store(&mut self.local);
                    done.push(position);
                }
                Verdict::Pending => {
                    self.answered_pending.insert(value.id());
                    pending.push(position);
                }
                Verdict::Rejected => {}
            }
        }
        self.queue.push_back(QueuedOperation::Answer { xid, count, done, pending });
        true
    }

    /// Announces a new value of this end, unless already announced. It replaces an unsent one of the same kind.
    ///
    /// A reduction (smaller Receives, fewer segments, no more reverse calls, no more remote invalidation) must be
    /// announced first, and take effect when the peer has read the announcement, because messages under way may rely on
    /// the old value. An increase must be in effect before it is announced (XC §3.1). The order is reversed for
    /// [`Characteristic::SendSize`], which limits what this end sends: a reduction must be in effect before it is
    /// announced, and an increase announced before it takes effect.
    ///
    /// # Errors
    /// The change was not announced.
    pub fn update(&mut self, now: Characteristic) -> Result<(), ChangeError> {
        let id = self.may_change(now)?;
        if now.replace_in(&mut self.local) {
            self.queue_update(id, now, false);
        }
        Ok(())
    }

    /// Ends a request that this end answered with [`Verdict::Pending`]. The value is the requested one, the old one, or
    /// one between them.
    ///
    /// # Errors
    /// The change was not announced.
    pub fn resolve(&mut self, now: Characteristic) -> Result<(), ChangeError> {
        let id = self.may_change(now)?;
        if !self.answered_pending.remove(&id) {
            return Err(ChangeError::NotPending(id));
        }
        now.store(&mut self.local);
        self.queue_update(id, now, true);
        Ok(())
    }

    fn may_change(&self, value: Characteristic) -> Result<PropertyId, ChangeError> {
        if !self.supported {
            return Err(ChangeError::Unsupported);
        }
        let id = self.in_revision(value)?;
        if self.local_constant.contains(&id) { Err(ChangeError::Constant(id)) } else { Ok(id) }
    }

    fn in_revision(&self, value: Characteristic) -> Result<PropertyId, ChangeError> {
        let id = value.id();
        id.which(self.revision).map(|_| id).ok_or(ChangeError::NotInRevision(id))
    }

    fn queue_update(&mut self, id: PropertyId, now: Characteristic, clears_pending: bool) {
        let update = QueuedOperation::Update { now, clears_pending };
        // An update before a queued answer is not replaced, because the answer may state another value.
        let unsent = self
            .queue
            .iter_mut()
            .rev()
            .take_while(|message| !matches!(message, QueuedOperation::Answer { .. }))
            .find(|message| matches!(message, QueuedOperation::Update { now, .. } if now.id() == id));
        match unsent {
            Some(unsent @ QueuedOperation::Update { clears_pending: false, .. }) => *unsent = update,
            _ => self.queue.push_back(update),
        }
    }

    // ---- output

    /// Whether [`poll_transmit`](Self::poll_transmit) has an operation.
    pub fn has_output(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next operation, which counts as sent. Call this only when a message may be sent.
    pub fn poll_transmit(&mut self) -> Option<EncodedOperation> {
        let message = self.queue.pop_front()?;
        message.encode(self.revision, &self.local, &self.local_constant)
    }
}

/// Whether each requested property, and no other, is in exactly one subset.
fn is_partition(wanted: &CharacteristicList, done: Subset<'_>, rejected: Subset<'_>, pending: Subset<'_>) -> bool {
    let subsets = [done, rejected, pending];
    let is_inside = |subset: &Subset<'_>| subset.iter().all(|position| position < wanted.len());
    let is_in_one = |at: usize| subsets.iter().filter(|subset| subset.contains(at)).count() == 1;
    subsets.iter().all(is_inside) && (0..wanted.len()).all(is_in_one)
}
