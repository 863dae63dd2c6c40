//! Layouts of the peer's headers, for fast-path decoding.

use super::ConnConfig;
use super::incoming::{Incoming, Lists};
use crate::wire::{Head, HeadLayout};

/// Layouts of the peer's headers.
#[derive(Debug)]
pub(super) struct HeaderLayouts {
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
    pub(super) fn decode_by_layout(&mut self, yes: bool) {
        self.by_layout = yes;
        self.expect(self.expected);
    }

    pub(super) fn expect(&mut self, layout: Option<HeadLayout>) {
        self.expected = layout;
        self.decoder = layout.filter(|_| self.by_layout);
    }

    /// Whether a message with a windowed header without chunks, as most have, is a reply. `None` for any other.
    #[inline]
    pub(super) fn windowed_direction(&self, message: &[u8]) -> Option<bool> {
        if self.decoder == Some(HeadLayout::V2Windowed) { Head::windowed_direction(message) } else { None }
    }

    /// Decodes any other header of the expected layout. `None` for one that must be checked as a whole.
    #[inline]
    pub(super) fn decode(&self, message: &[u8]) -> Option<Incoming> {
        let (head, chunks) = self.decoder?.read(message)?;
        Some(Incoming { head, lists: if chunks.are_absent() { Lists::None } else { Lists::Single(chunks) } })
    }
}
