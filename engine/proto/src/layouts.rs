//! Layouts of the peer's headers, for fast-path decoding.

use super::ConnConfig;
use super::decoded_header::{DecodedHeader, DecodedLists};
use crate::wire::{Head, HeadLayout};

/// Direction of an RPC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageDirection {
    /// From the caller.
    Call,
    /// To the caller.
    Reply,
}

/// Layouts of the peer's headers. They decode most headers without a check of the whole message.
#[derive(Debug)]
pub struct HeaderLayouts {
    /// The expected layout, unless this side [parses all messages as a whole](ConnConfig::decode_by_layout).
    decoder: Option<HeadLayout>,
    /// The layout of most messages; `None` while none is expected.
    pub(super) expected: Option<HeadLayout>,
    by_layout: bool,
    /// Whether the peer has sent a windowed header: all later ones are windowed.
    pub(super) windowed: bool,
}

impl HeaderLayouts {
    pub(super) fn new(config: &ConnConfig) -> Self {
        Self { decoder: None, expected: None, by_layout: config.decode_by_layout, windowed: false }
    }

    /// Sets whether messages are decoded by their layout.
    #[cfg(test)]
    pub(super) fn set_decode_by_layout(&mut self, enabled: bool) {
        self.by_layout = enabled;
        self.set_expected(self.expected);
    }

    pub(super) fn set_expected(&mut self, layout: Option<HeadLayout>) {
        self.expected = layout;
        self.decoder = layout.filter(|_| self.by_layout);
    }

    /// The direction of a plain message; `None` if the message is not plain.
    ///
    /// A plain message is in one piece, without chunks, and has a windowed header. [`Head::from_windowed`] reads that
    /// header, so that an owner with a function for each direction need not [decode](Self::decode) it.
    #[inline]
    pub fn plain_direction(&self, message: &[u8]) -> Option<MessageDirection> {
        self.decoder.filter(|&layout| layout == HeadLayout::V2Windowed)?;
        let is_reply = Head::windowed_direction(message)?;
        Some(if is_reply { MessageDirection::Reply } else { MessageDirection::Call })
    }

    /// Decodes a header of the expected layout. `None` for a header that must be checked as a whole.
    #[inline(always)]
    pub fn decode(&self, message: &[u8]) -> Option<DecodedHeader> {
        let (head, chunks) = self.decoder?.read(message)?;
        Some(DecodedHeader {
            head,
            lists: if chunks.are_absent() { DecodedLists::None } else { DecodedLists::Single(chunks) },
        })
    }
}
