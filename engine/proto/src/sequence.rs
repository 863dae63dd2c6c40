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

/// What the peer has begun and not ended, and what came of it.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    /// A continued message that is coming in.
    open: Option<Sequence>,
    /// Continued messages that have begun. The number wraps.
    begun: u32,
    /// The XID of a continued reply that was broken off.
    orphan: Option<u32>,
}

impl Sequences {
    /// The message that is coming in.
    #[inline]
    pub(super) fn open(&self) -> Option<Sequence> {
        self.open
    }

    /// The number of the message that is coming in: another one for each.
    pub(super) fn number(&self) -> Option<u32> {
        self.open.map(|_| self.begun)
    }

    /// A part has come of a message; true if it is the first.
    pub(super) fn begin(&mut self) -> bool {
        let first = self.open.is_none();
        self.begun = self.begun.wrapping_add(u32::from(first));
        first
    }

    /// More parts of it are to come.
    pub(super) fn go_on(&mut self, sequence: Sequence) {
        self.open = Some(sequence);
    }

    /// No more are.
    pub(super) fn end(&mut self) {
        self.open = None;
    }

    /// There is no memory for the message that is coming in.
    pub(super) fn spoil(&mut self) {
        if let Some(sequence) = &mut self.open {
            (sequence.kept, sequence.no_memory) = (false, true);
        }
    }

    /// The reply that was coming in is broken off.
    pub(super) fn leave_orphan(&mut self, xid: u32) {
        self.orphan = Some(xid);
    }

    /// The XID of a reply that was broken off; once.
    pub(super) fn take_orphan(&mut self) -> Option<u32> {
        self.orphan.take()
    }
}
