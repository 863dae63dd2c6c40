//! Work request identifiers, which consist of owner and request.

#![forbid(unsafe_code)]

use crate::QpId;

/// Limit of a fabric's queue pair slots, for which an identifier has 16 bits.
pub(super) const MAX_QPS: u32 = 1 << 16;
const GENERATION: u32 = (1 << 15) - 1;
const RECEIVE: u64 = 1 << 63;

/// The poster of a work request: a queue pair, or the shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner(u64);

impl Owner {
    /// The shared receive queue. No queue pair has this value.
    pub(super) const SHARED: Self = Self(0x7FFF_FFFF << 32);

    pub(super) fn new(qp: QpId) -> Self {
        // `SHARED` is the last generation of the last slot, which is never used.
        Self(u64::from((qp.generation & GENERATION) << 16 | qp.slot & (MAX_QPS - 1)) << 32)
    }

    #[inline]
    pub(super) fn send_id(self, sequence: u32) -> u64 {
        self.0 | u64::from(sequence)
    }

    #[inline]
    pub(super) fn receive_id(self, index: u32) -> u64 {
        RECEIVE | self.0 | u64::from(index)
    }
}

/// A work request identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrId(pub(super) u64);

impl WrId {
    #[inline]
    pub(super) fn is_receive(self) -> bool {
        self.0 & RECEIVE != 0
    }

    #[inline]
    pub(super) fn owner(self) -> Owner {
        Owner(self.0 & !RECEIVE & !u64::from(u32::MAX))
    }

    /// The slot of the queue pair.
    #[inline]
    pub(super) fn slot(self) -> u32 {
        (self.0 >> 32) as u32 & (MAX_QPS - 1)
    }

    /// Sequence number of a Send, or table index of a Receive.
    #[inline]
    pub(super) fn index(self) -> u32 {
        self.0 as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_request_ids_decode_to_owner_and_index() {
        let id = QpId { slot: 65534, generation: 0x1_0003 };
        let owner = Owner::new(id);
        let (send, receive) = (WrId(owner.send_id(u32::MAX)), WrId(owner.receive_id(7)));
        assert!(!send.is_receive() && receive.is_receive());
        assert_eq!((send.owner(), send.slot(), send.index()), (owner, 65534, u32::MAX));
        assert_eq!((receive.owner(), receive.slot(), receive.index()), (owner, 65534, 7));
        assert_ne!(owner, Owner::new(QpId { slot: 65534, generation: 0x1_0004 }));
        let shared = WrId(Owner::SHARED.receive_id(u32::MAX));
        assert!(shared.is_receive() && shared.owner() == Owner::SHARED && shared.index() == u32::MAX);
        assert_ne!(owner, Owner::SHARED);
    }
}
