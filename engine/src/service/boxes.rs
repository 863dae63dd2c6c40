//! The memory of served calls.

use super::call::OwnedCall;
use crate::fabric::QpId;
use crate::proto::InboundId;

/// Keeps the boxes of served calls for reuse: none is allocated per call.
#[derive(Debug, Default)]
pub(crate) struct CallBoxes {
    #[expect(clippy::vec_box, reason = "the boxes themselves are what is kept")]
    spare: Vec<Box<OwnedCall>>,
    /// Index of the shard that they are of.
    pub(crate) shard: u32,
}

impl CallBoxes {
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.spare.len()
    }

    #[inline]
    pub(crate) fn take(&mut self, qp: QpId, id: InboundId) -> Box<OwnedCall> {
        match self.spare.pop() {
            Some(mut call) => {
                call.qp = qp;
                call.id = id;
                call.results_len = 0;
                call
            }
            None => OwnedCall::blank(self.shard, qp, id),
        }
    }

    /// Takes a call back; its buffers go home.
    #[inline(always)]
    pub(crate) fn put(&mut self, mut call: Box<OwnedCall>) {
        // Most have given both away.
        if call.message.is_some() {
            call.message = None;
        }
        if call.reply.is_some() {
            call.reply = None;
        }
        if call.unusual {
            call.clear();
        }
        self.spare.push(call);
    }
}
