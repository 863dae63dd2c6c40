//! Outgoing operations.

use arrayvec::ArrayVec;

use super::characteristic::{COUNT, Characteristic, IdSet};
use super::{CharacteristicList, MAX_REQUESTED};
use crate::wire::optional::{Operation, OperationCode};
use crate::wire::properties::{Builder, Properties, PropertySet, Subset};
use crate::wire::{Flags, Revision};

/// An operation to send: an OPTIONAL header with these fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedOperation {
    /// `rdma_xid`: the XID of the request for REQXCH and RESPXCH, otherwise 0.
    pub xid: u32,
    /// [`Flags::RESPONSE`] with RESPXCH, because the receiver has chosen its XID.
    pub flags: Flags,
    /// `rdma_opttype`.
    pub code: OperationCode,
    /// `rdma_optinfo`; below 200 bytes, so that it fits the smallest Receive.
    pub optinfo: Vec<u8>,
}

/// An operation that waits to be sent.
#[derive(Clone, Debug)]
pub(super) enum QueuedOperation {
    Initial,
    Request { xid: u32, wanted: CharacteristicList },
    Answer { xid: u32, count: usize, done: ArrayVec<usize, COUNT>, pending: ArrayVec<usize, COUNT> },
    Update { now: Characteristic, clears_pending: bool },
}

impl QueuedOperation {
    /// Encodes the operation with the values of this end in `local`; those in `constant` never change.
    ///
    /// `None` for an update of a characteristic that `revision` does not have.
    pub(super) fn encode(
        &self,
        revision: Revision,
        local: &Properties<'_>,
        constant: &IdSet,
    ) -> Option<EncodedOperation> {
        Some(match self {
            QueuedOperation::Initial => {
                let all: CharacteristicList = Characteristic::all(local)
                    .into_iter()
                    .filter(|value| value.id().which(revision).is_some())
                    .collect();
                let constant_positions = (0..all.len()).filter(|at| constant.contains(&all[*at].id()));
                let (mut bytes, mut words) = ([0; SET_LEN], [0; 4]);
                let start = property_set(revision, &all, &mut bytes);
                let constant = subset(constant_positions, &mut words);
                encode_operation(0, Operation::Initial { start, constant })
            }
            QueuedOperation::Request { xid, wanted } => {
                encode_operation(*xid, Operation::Request { want: property_set(revision, wanted, &mut [0; SET_LEN]) })
            }
            QueuedOperation::Answer { xid, count, done, pending } => {
                let rejected = (0..*count).filter(|at| !done.contains(at) && !pending.contains(at));
                let mut words = [[0; MAX_REQUESTED / 8]; 3];
                let [rejected_words, done_words, pending_words] = &mut words;
                let rejected = subset(rejected, rejected_words);
                let done = subset(done.iter().copied(), done_words);
                let pending = subset(pending.iter().copied(), pending_words);
                encode_operation(*xid, Operation::Respond { done, rejected, pending })
            }
            QueuedOperation::Update { now, clears_pending } => {
                let mut bytes = [0; SET_LEN];
                let set = property_set(revision, &[*now], &mut bytes);
                let now = set.iter().next()?;
                encode_operation(0, Operation::Update { now, clears_pending: *clears_pending })
            }
        })
    }
}

fn property_set<'b>(revision: Revision, values: &[Characteristic], buffer: &'b mut [u8; SET_LEN]) -> PropertySet<'b> {
    let mut builder = Builder::new(buffer);
    for value in values {
        if let Some(which) = value.id().which(revision) {
            builder = builder.uint32(which, value.word()).expect("room for every characteristic");
        }
    }
    builder.finish()
}

/// Bytes of a set of all characteristics, without its count.
const SET_LEN: usize = 12 * COUNT;

pub(super) fn subset(positions: impl IntoIterator<Item = usize>, buffer: &mut [u8]) -> Subset<'_> {
    Subset::encode(positions, buffer).expect("room for every position")
}

pub(super) fn encode_operation(xid: u32, operation: Operation<'_>) -> EncodedOperation {
    let mut optinfo = vec![0; operation.encoded_len()];
    operation.emit(&mut optinfo).expect("room for its own length");
    let code = operation.code();
    let flags = if code == OperationCode::Respond { Flags::RESPONSE } else { Flags::NONE };
    EncodedOperation { xid, flags, code, optinfo }
}
