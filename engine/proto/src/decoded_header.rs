//! A decoded header.

use crate::wire::{CheckedHeader, Head, HeaderType, SingleChunks, View};

/// The decoded header of a call or reply.
///
/// Most headers are decoded by a fixed layout, and the others are checked as a whole. Both ways are equivalent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodedHeader {
    /// The header words before the lists.
    pub head: Head,
    /// The chunk lists after these words.
    pub lists: DecodedLists,
}

/// The chunk lists of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodedLists {
    /// There are no lists: the message is a MSG in one piece, in the negotiated layout.
    None,
    /// At most one chunk in each direction, with one segment, in the negotiated layout.
    Single(SingleChunks),
    /// The lists of a header that was checked as a whole.
    Checked(CheckedHeader),
}

/// The kinds of chunk lists in a message, as far as the connection uses them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListKinds {
    /// Whether the RPC message is in a chunk (RDMA_NOMSG).
    pub(super) long: bool,
    /// Whether the message has a Read list.
    pub(super) reads: bool,
}

impl DecodedLists {
    /// The kinds of lists that were decoded by layout; `None` if there are none.
    ///
    /// For a header that was checked as a whole, [`ListKinds::from_view`] returns the kinds.
    #[inline]
    pub(super) fn kinds(&self) -> Option<ListKinds> {
        match self {
            DecodedLists::Single(chunks) => Some(ListKinds { long: false, reads: chunks.has_read() }),
            DecodedLists::None | DecodedLists::Checked(_) => None,
        }
    }
}

impl ListKinds {
    /// The kinds of lists in a checked header; `None` without lists.
    #[inline]
    pub(super) fn from_view(view: &View<'_>) -> Option<Self> {
        let long = view.htype() == HeaderType::Nomsg;
        view.has_chunks().then(|| Self { long, reads: view.reads().next().is_some() })
    }
}

impl DecodedHeader {
    /// The header of a message that was checked as a whole.
    ///
    /// `response` tells whether the message is a response, which a header of version 1 does not show.
    pub(super) fn checked(view: &View<'_>, response: bool) -> Self {
        Self { head: Head::from_view(view, response), lists: DecodedLists::Checked(view.detach()) }
    }

    /// The view of the header's message; `None` unless the header was checked as a whole.
    #[inline]
    pub fn view<'m>(&self, message: &'m [u8]) -> Option<View<'m>> {
        match &self.lists {
            DecodedLists::Checked(header) => Some(header.view(message)),
            DecodedLists::None | DecodedLists::Single(_) => None,
        }
    }
}

impl From<Head> for DecodedHeader {
    #[inline]
    fn from(head: Head) -> Self {
        Self { head, lists: DecodedLists::None }
    }
}
