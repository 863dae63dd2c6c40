//! A continued message of the peer (version 2 §6.3.2.2): what must be the same in all of them, and
//! how much there is.

use crate::wire::{Flags, HeaderType, View};

/// Parts of one message that have come, the last one still to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) xid: u32,
    pub(super) htype: HeaderType,
    pub(super) response: bool,
    /// Bytes of payload so far.
    bytes: usize,
    /// The payload is of use: it answers a call of ours or is one for us, and is not too long so far.
    pub(super) kept: bool,
    /// There was no memory for it.
    pub(super) no_memory: bool,
}

impl Sequence {
    /// One that starts with this message. `wanted` is false if nobody waits for it.
    pub(super) fn new(view: &View<'_>, wanted: bool) -> Self {
        Self {
            xid: view.xid(),
            htype: view.htype(),
            response: view.flags().contains(Flags::RESPONSE),
            bytes: 0,
            kept: wanted,
            no_memory: false,
        }
    }

    /// Whether a message may be its next part.
    pub(super) fn continues_with(&self, view: &View<'_>) -> bool {
        self.xid == view.xid() && self.htype == view.htype() && self.response == view.flags().contains(Flags::RESPONSE)
    }

    /// Bytes of payload so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a part's payload into account.
    pub(super) fn add(&mut self, bytes: usize, most: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.kept &= self.bytes <= most;
    }
}
