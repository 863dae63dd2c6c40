//! A received message, decoded as far as its kind requires.

use super::Connection;
use crate::wire::{Flags, Head, HeadLayout, HeaderType, Plain, SingleChunks, View, WireError};

/// A received message. Most are decoded by fixed layout, the others parsed as a whole. Both ways are equivalent.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// The header words before the lists; empty for an invalid message.
    pub head: Head,
    /// The lists behind it.
    pub lists: Lists<'a>,
}

/// The chunk lists of a received message, or its other contents.
#[derive(Clone, Copy, Debug)]
pub enum Lists<'a> {
    /// A MSG in one piece, without chunks, in the negotiated layout.
    None,
    /// As above, with at most one chunk each way, of one segment.
    Single(SingleChunks),
    /// [Checked](Connection::check) as a whole: any message, or its error.
    Checked(&'a Result<View<'a>, WireError>),
}

/// The meaning of a message's lists to the connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct HasLists {
    /// Whether the RPC message is in one of them (RDMA_NOMSG).
    pub(super) long: bool,
    /// Whether it has a Read list.
    pub(super) reads: bool,
}

impl HasLists {
    /// The lists of a message; `None` without any.
    #[inline]
    pub(super) fn of(view: &View<'_>) -> Option<Self> {
        let long = view.htype() == HeaderType::Nomsg;
        view.has_chunks().then(|| Self { long, reads: view.reads().next().is_some() })
    }
}

impl<'a> Incoming<'a> {
    /// A message that was checked as a whole.
    pub fn checked(message: &'a Result<View<'a>, WireError>) -> Self {
        let head = message.as_ref().map(|view| Head::of(view, view.flags().contains(Flags::RESPONSE)));
        Self { head: head.unwrap_or_default(), lists: Lists::Checked(message) }
    }

    /// The message checked as a whole; `None` if unnecessary or invalid.
    #[inline(always)]
    pub fn view(&self) -> Option<&'a View<'a>> {
        match self.lists {
            Lists::Checked(Ok(view)) => Some(view),
            _ => None,
        }
    }
}

impl From<Head> for Incoming<'_> {
    #[inline(always)]
    fn from(head: Head) -> Self {
        Self { head, lists: Lists::None }
    }
}

impl Connection {
    /// Decodes a message by its layout; [receive](Self::receive) it next. `None` if it has to be
    /// [checked](Self::check). The connection has not processed it yet.
    #[inline(always)]
    pub fn decode(&self, message: &[u8]) -> Option<Incoming<'static>> {
        match self.plain(message) {
            Some(plain) => plain.head(message).map(Into::into),
            None => self.decode_other(message),
        }
    }

    /// Whether a message has the usual form: windowed, and without chunks.
    #[inline(always)]
    pub fn plain(&self, message: &[u8]) -> Option<Plain> {
        if self.heads.decoder == Some(HeadLayout::V2Windowed) { Plain::of(message) } else { None }
    }

    /// Decodes any other message by its layout.
    #[inline]
    pub fn decode_other(&self, message: &[u8]) -> Option<Incoming<'static>> {
        let layout = self.heads.decoder?;
        if layout != HeadLayout::V2Windowed
            && let Some(head) = layout.read(message)
        {
            return Some(head.into());
        }
        let (head, chunks) = layout.read_with_chunks(message)?;
        Some(Incoming { head, lists: Lists::Single(chunks) })
    }

    /// Checks a message as a whole.
    ///
    /// # Errors
    /// It is no message. The connection is to [receive](Self::receive) that, too.
    pub fn check<'a>(&self, message: &'a [u8]) -> Result<View<'a>, WireError> {
        // A set of properties in parts is complete with the last one.
        match self.introduction.part.is_empty() {
            true => View::check(message, self.config.revision),
            false => View::check_continued(message, self.config.revision),
        }
    }
}
