//! A decoded header.

use crate::wire::{CheckedHeader, Head, HeaderType, SingleChunks, View};

/// The decoded header of a call or reply. Most are decoded by fixed layout, the others checked as a whole. Both ways
/// are equivalent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// The header words before the lists.
    pub head: Head,
    /// The lists behind them.
    pub lists: Lists,
}

/// The chunk lists of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lists {
    /// None: a MSG in one piece, in the negotiated layout.
    None,
    /// At most one chunk each way, of one segment, in the same layout.
    Single(SingleChunks),
    /// Any header, checked as a whole.
    Checked(CheckedHeader),
}

/// The meaning of a message's lists to the connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListKinds {
    /// Whether the RPC message is in one of them (RDMA_NOMSG).
    pub(super) long: bool,
    /// Whether it has a Read list.
    pub(super) reads: bool,
}

impl Lists {
    /// The kinds of lists that were decoded by layout; `None` without any.
    #[inline]
    pub(super) fn kinds(&self) -> Option<ListKinds> {
        match self {
            Lists::Single(chunks) => Some(ListKinds { long: false, reads: chunks.has_read() }),
            Lists::None | Lists::Checked(_) => None,
        }
    }
}

impl ListKinds {
    /// The kinds of lists in a checked header; `None` without any.
    #[inline]
    pub(super) fn of(view: &View<'_>) -> Option<Self> {
        let long = view.htype() == HeaderType::Nomsg;
        view.has_chunks().then(|| Self { long, reads: view.reads().next().is_some() })
    }
}

impl Incoming {
    /// A header that was checked as a whole. In version 1 it does not show whether it is a `response`.
    pub(super) fn checked(view: &View<'_>, response: bool) -> Self {
        Self { head: Head::of(view, response), lists: Lists::Checked(view.detach()) }
    }

    /// The view of its message; `None` unless checked as a whole.
    #[inline]
    pub fn view<'m>(&self, message: &'m [u8]) -> Option<View<'m>> {
        match &self.lists {
            Lists::Checked(header) => Some(header.view(message)),
            Lists::None | Lists::Single(_) => None,
        }
    }
}

impl From<Head> for Incoming {
    #[inline]
    fn from(head: Head) -> Self {
        Self { head, lists: Lists::None }
    }
}
