//! Layouts of the peer's headers, for fast-path decoding.

use super::ConnConfig;
use crate::wire::HeadLayout;

/// Layouts of the peer's headers.
#[derive(Debug)]
pub(super) struct Heads {
    /// As `layout`, unless this side [parses all messages as a whole](ConnConfig::decode_by_layout).
    pub(super) decoder: Option<HeadLayout>,
    /// The layout of most messages; `None` while none is expected.
    layout: Option<HeadLayout>,
    by_layout: bool,
    /// Whether the peer has sent a windowed header: all later ones are windowed.
    pub(super) windowed: bool,
}

impl Heads {
    pub(super) fn new(config: &ConnConfig) -> Self {
        Self { decoder: None, layout: None, by_layout: config.decode_by_layout, windowed: false }
    }

    /// Layout of most messages.
    #[inline]
    pub(super) fn layout(&self) -> Option<HeadLayout> {
        self.layout
    }

    pub(super) fn expect(&mut self, layout: Option<HeadLayout>) {
        self.layout = layout;
        self.decoder = layout.filter(|_| self.by_layout);
    }
}
