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
    expected: Option<HeadLayout>,
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

    /// The layout of most messages.
    #[inline]
    pub(super) fn expected(&self) -> Option<HeadLayout> {
        self.expected
    }

    pub(super) fn expect(&mut self, layout: Option<HeadLayout>) {
        self.expected = layout;
        self.decoder = layout.filter(|_| self.by_layout);
    }

    /// Decodes a windowed header without chunks, as most messages have. `None` for any other.
    #[inline]
    pub(super) fn decode_windowed(&self, message: &[u8]) -> Option<Head> {
        if self.decoder == Some(HeadLayout::V2Windowed) { Head::read_windowed(message) } else { None }
    }

    /// Decodes any other header of the expected layout. `None` for one that must be checked as a whole.
    pub(super) fn decode(&self, message: &[u8]) -> Option<Incoming> {
        let layout = self.decoder?;
        if layout != HeadLayout::V2Windowed
            && let Some(head) = layout.read(message)
        {
            return Some(head.into());
        }
        let (head, chunks) = layout.read_with_chunks(message)?;
        Some(Incoming { head, lists: Lists::Single(chunks) })
    }
}
