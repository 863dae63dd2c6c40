//! A peer's continued message: its invariants and length (version 2 §6.3.2.2).

use super::incoming::HasLists;
use super::receive::is_response;
use super::{CallError, Connection, Event, Knob, PeerFault, Rejected};
use crate::wire::properties::PropertySet;
use crate::wire::{ErrorBody, Flags, HeaderType, View};

/// Longest CONNPROP to reassemble from parts, in bytes.
const LONGEST_CONNPROP: usize = 64 << 10;

/// Received parts of one message, without the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) xid: u32,
    pub(super) htype: HeaderType,
    pub(super) response: bool,
    /// Bytes of payload so far.
    bytes: usize,
    /// Whether the payload is kept: a reply or call for us, within the limit.
    pub(super) kept: bool,
    /// Whether memory for it was lacking.
    pub(super) no_memory: bool,
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

    /// Bytes of payload so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a part's payload.
    pub(super) fn add(&mut self, bytes: usize, most: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.kept &= self.bytes <= most;
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
    pub(super) orphan: Option<u32>,
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

    /// Drops the message in progress for lack of memory.
    pub(super) fn spoil(&mut self) {
        if let Some(sequence) = &mut self.open {
            (sequence.kept, sequence.no_memory) = (false, true);
        }
    }
}

impl Connection {
    pub(super) fn continued(&mut self, mut sequence: Sequence, view: &View<'_>) -> Result<Event, PeerFault> {
        let first = self.sequences.begin();
        let more = view.flags().contains(Flags::MORE);
        if view.htype() == HeaderType::Connprop {
            let bytes = view.properties_continued();
            sequence.add(bytes.len(), LONGEST_CONNPROP);
            if sequence.kept {
                self.introduction.part.extend_from_slice(bytes);
            }
            if more {
                self.sequences.open = Some(sequence);
                return Ok(Event::Grant);
            }
            self.sequences.open = None;
            let bytes = std::mem::take(&mut self.introduction.part);
            return match PropertySet::parse(&bytes, self.config.revision) {
                Ok(properties) if sequence.kept => self.properties(view.xid(), properties),
                _ => self.bad_properties(view.xid(), ErrorBody::BadXdr),
            };
        }
        sequence.add(view.payload().len(), self.config.reassemble_up_to);
        if more {
            self.counters.continued_received += 1;
            self.sequences.open = Some(sequence);
            return Ok(Event::Continued { first, kept: sequence.kept });
        }
        self.sequences.open = None;
        match (sequence.response, sequence.kept) {
            (true, true) => Ok(self.replied(view.xid(), HasLists::of(view))),
            (false, true) => self.called(view.xid(), HasLists::of(view)),
            (true, false) if sequence.no_memory => {
                let error = CallError::NoReplyBuffer { needed: sequence.bytes(), knob: Knob::LONG_BUFFERS };
                Ok(self.end_call(view.xid(), error))
            }
            (true, false) => Ok(self.end_call(
                view.xid(),
                CallError::MalformedReply("longer than this side puts together (wire.reassemble_up_to)"),
            )),
            (false, false) if self.config.takes_calls => Ok(self.answer(view.xid(), ErrorBody::System)),
            (false, false) => Ok(self.reject(Rejected::Unexpected)),
        }
    }

    /// Handles another message in place of the next part: both are lost.
    #[cold]
    pub(super) fn broken(&mut self, sequence: Sequence, view: &View<'_>) -> Event {
        self.break_off(sequence);
        if is_response(view) || view.htype() == HeaderType::Error {
            let why = "it came between the parts of another message";
            return self.end_call(view.xid(), CallError::MalformedReply(why));
        }
        self.answer(view.xid(), ErrorBody::InvalFlag)
    }

    /// Drops a continued message whose rest will not arrive.
    #[cold]
    pub(super) fn break_off(&mut self, sequence: Sequence) {
        self.sequences.open = None;
        self.introduction.drop_part();
        if sequence.response {
            self.sequences.orphan = Some(sequence.xid);
        } else {
            self.answer(sequence.xid, ErrorBody::InvalFlag);
        }
    }
}
