//! DDP-eligible items: opaque data that travels in a message or as a chunk.

use std::fmt;

use crate::EncodeError;

/// `opaque<>` that may travel as a chunk (RFC 8166 §6.1).
///
/// A receiver reads its [`bytes`](Self::bytes), whether they came in the message or in a chunk. A sender encodes bytes,
/// or data that is already [placed](Self::placed).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Bulk<'a> {
    /// `None` if the data is placed.
    bytes: Option<&'a [u8]>,
    len: usize,
}

impl<'a> Bulk<'a> {
    /// Data of `len` bytes in memory that the engine has, or will fill.
    #[must_use]
    pub const fn placed(len: usize) -> Self {
        Self { bytes: None, len }
    }

    /// The data; empty if it is [placed](Self::placed).
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes.unwrap_or_default()
    }

    /// Length of the data in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the data has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the data is in memory of the engine.
    #[must_use]
    pub const fn is_placed(&self) -> bool {
        self.bytes.is_none()
    }

    /// Bytes in the message: the length word, and data that is not [placed](Self::placed).
    #[must_use]
    pub const fn encoded_len(&self) -> usize {
        match self.bytes {
            Some(bytes) => 4 + crate::padded(bytes.len()),
            None => 4,
        }
    }
}

impl<'a> From<&'a [u8]> for Bulk<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes: Some(bytes), len: bytes.len() }
    }
}

/// Empty data.
impl Default for Bulk<'_> {
    fn default() -> Self {
        Self::from(&[][..])
    }
}

impl fmt::Debug for Bulk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

/// The chunks that arrived with a message.
pub trait ReceivedChunks: fmt::Debug {
    /// Data of an eligible item, or `None` if it is in the message.
    ///
    /// `item` is its index among eligible items, and `used` the number of chunks that earlier items took. `position` is
    /// the offset of its data in the unreduced message (RFC 8166 §3.4.5), and `len` its length word.
    fn item(&self, item: usize, used: usize, position: usize, len: usize) -> Option<&[u8]>;

    /// Whether `used` chunks are all that arrived.
    fn is_complete(&self, used: usize) -> bool;
}

/// Place for the data of an eligible item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkLocation {
    /// In a chunk: only its length is in the message.
    Apart,
    /// In the message.
    Inline,
    /// Already in the memory of the message, from this byte on.
    At(usize),
}

/// Chooses the place for the data of each eligible item.
pub trait BulkPlacement {
    /// Places eligible item `item`. `position` is the offset of its data in the unreduced message.
    ///
    /// # Errors
    /// The message or the chunk has no room.
    fn place(&mut self, item: usize, bulk: &Bulk<'_>, position: usize) -> Result<BulkLocation, EncodeError>;
}
