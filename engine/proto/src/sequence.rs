//! A peer's continued message: its invariants and length (version 2 §6.3.2.2).

use super::{CallError, Knob};
use crate::wire::{Flags, HeaderType, View};

/// Longest CONNPROP to reassemble from parts, in bytes.
const LONGEST_CONNPROP: usize = 64 << 10;

/// Received parts of one message, without the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) xid: u32,
    htype: HeaderType,
    pub(super) response: bool,
    /// Bytes of payload so far.
    bytes: usize,
    /// Whether the payload is kept: a reply or call for us, within the limit.
    kept: bool,
    /// Whether memory for it was lacking.
    no_memory: bool,
}

impl Sequence {
    /// One that starts with this message. `wanted` is false for an unclaimed message.
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

    /// Whether the payload is kept.
    pub(super) fn is_kept(&self) -> bool {
        self.kept
    }

    /// Adds a part of this many bytes to an RPC message of at most `limit` bytes. Returns whether it is kept.
    pub(super) fn add(&mut self, bytes: usize, limit: usize) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        self.kept &= self.bytes <= limit;
        self.kept
    }

    /// Adds a part of a CONNPROP. Returns whether it is kept.
    pub(super) fn add_properties(&mut self, bytes: usize) -> bool {
        self.add(bytes, LONGEST_CONNPROP)
    }

    /// The error of the call whose reply was not kept.
    pub(super) fn error(&self) -> CallError {
        match self.no_memory {
            true => CallError::NoReplyBuffer { needed: self.bytes, knob: Knob::LONG_BUFFERS },
            false => CallError::MalformedReply("longer than this side puts together (wire.reassemble_up_to)"),
        }
    }
}

/// The peer's unfinished messages, and their outcomes.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    /// The incoming continued message.
    pub(super) open: Option<Sequence>,
    /// Continued messages that have begun. The number wraps.
    begun: u32,
    /// The XID of an interrupted continued reply.
    orphan: Option<u32>,
}

impl Sequences {
    /// The number of the message in progress, unique per message.
    pub(super) fn number(&self) -> Option<u32> {
        self.open.map(|_| self.begun)
    }

    /// Starts or continues a message by a part; true for the first.
    pub(super) fn begin(&mut self) -> bool {
        let first = self.open.is_none();
        self.begun = self.begun.wrapping_add(u32::from(first));
        first
    }

    /// Drops the payload of the message in progress for lack of memory.
    pub(super) fn drop_payload(&mut self) {
        if let Some(sequence) = &mut self.open {
            (sequence.kept, sequence.no_memory) = (false, true);
        }
    }

    /// Ends the message in progress, whose rest will not arrive. The call of a reply then ends by its
    /// [XID](Self::take_orphan).
    pub(super) fn break_off(&mut self) {
        if let Some(sequence) = self.open.take().filter(|sequence| sequence.response) {
            self.orphan = Some(sequence.xid);
        }
    }

    /// The XID of a continued reply that was broken off, once.
    pub(super) fn take_orphan(&mut self) -> Option<u32> {
        self.orphan.take()
    }
}
