//! Memory of served calls, for reuse.

use super::call::{Arrived, Call, OwnedCall, Unready};
use crate::fabric::QpId;
use crate::proto::InboundId;

/// Memory of served calls: kept for reuse, so that a call allocates none.
#[derive(Debug, Default)]
pub(crate) struct CallPool {
    #[expect(clippy::vec_box, reason = "the boxes themselves are what is kept")]
    spare: Vec<Box<OwnedCall>>,
    /// The box returned last, while unused: most calls end before the next arrives.
    last: Option<Box<OwnedCall>>,
    /// Index of their shard.
    pub(crate) shard: u32,
}

impl CallPool {
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.spare.len() + usize::from(self.last.is_some())
    }

    /// Takes a box for a call that arrived on this connection, by this name.
    #[inline(always)]
    pub(crate) fn take(&mut self, qp: QpId, id: InboundId) -> Call<Arrived> {
        match self.last.take().or_else(|| self.spare.pop()) {
            Some(memory) => Call::in_reused(memory, qp, id),
            None => Call::in_new(self.shard, qp, id),
        }
    }

    /// Takes a call back, and frees its buffers.
    #[inline]
    pub(crate) fn put<S>(&mut self, call: Call<S>) {
        self.put_memory(call.end());
    }

    /// Takes back the memory of a call without buffers.
    #[inline(always)]
    pub(crate) fn put_memory(&mut self, memory: Box<OwnedCall>) {
        match &mut self.last {
            last @ None => *last = Some(memory),
            Some(_) => self.spare.push(memory),
        }
    }

    /// Takes back a call that waited for memory.
    pub(crate) fn put_unready(&mut self, call: Unready) {
        match call {
            Unready::Long(call) => self.put(call),
            Unready::Admitted(call) => self.put(call),
        }
    }
}
