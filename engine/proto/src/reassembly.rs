//! A peer's continued message: its invariants and length (version 2 §6.3.2.2).

use super::{CallError, Knob};
use crate::wire::{Flags, HeaderType, View};

/// Longest CONNPROP to reassemble from parts, in bytes.
pub(super) const LONGEST_CONNPROP: usize = 64 << 10;

/// Received parts of one message, without the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartialMessage {
    pub(super) xid: u32,
    htype: HeaderType,
    pub(super) response: bool,
    /// Bytes of payload so far.
    bytes: usize,
    /// Whether the payload is kept, because it is a call or reply for this side and within the limit.
    pub(super) kept: bool,
    /// Whether the payload was dropped for lack of memory.
    no_memory: bool,
}

impl PartialMessage {
    /// Starts with the first part. `wanted` is false if this side has no use for the message.
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

    /// Whether `view` may be the next part of this message.
    pub(super) fn continues_with(&self, view: &View<'_>) -> bool {
        self.xid == view.xid() && self.htype == view.htype() && self.response == view.flags().contains(Flags::RESPONSE)
    }

    /// Adds a part of this many bytes to a message of at most `limit` bytes. Returns whether the part is kept.
    pub(super) fn add(&mut self, bytes: usize, limit: usize) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        self.kept &= self.bytes <= limit;
        self.kept
    }

    /// Drops the payload for lack of memory.
    pub(super) fn drop_payload(&mut self) {
        (self.kept, self.no_memory) = (false, true);
    }

    /// The error of a call whose reply was not kept.
    pub(super) fn error(&self) -> CallError {
        match self.no_memory {
            true => CallError::NoReplyBuffer { needed: self.bytes, knob: Knob::LONG_BUFFERS },
            false => CallError::MalformedReply(
                "it exceeds the longest message that this side reassembles (wire.reassemble_up_to)",
            ),
        }
    }
}

/// The peer's incomplete continued message, and the last aborted one.
#[derive(Debug, Default)]
pub(super) struct PartialMessages {
    /// The incoming continued message.
    pub(super) open: Option<PartialMessage>,
    /// Number of continued messages that have begun; wraps.
    pub(super) begun: u32,
    /// The XID of a continued reply that was aborted. Its call ends after the current message.
    pub(super) orphan: Option<u32>,
}
