//! Encoding of XDR (RFC 4506).

use std::fmt;

use thiserror::Error;

use crate::bulk::{Bulk, BulkLocation, BulkPlacement};
use crate::padded;

/// A value cannot be encoded: no room for an item, or a length above its bound. The output's content is unspecified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{}", self.text())]
pub struct EncodeError {
    /// Minimum bytes needed, or the length.
    pub needed: usize,
    /// Bytes of the buffer, or the bound.
    pub available: usize,
    kind: EncodeErrorKind,
}

/// Kind of an [`EncodeError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeErrorKind {
    /// The buffer is too short.
    Space,
    /// A length exceeds the bound of its type.
    Bound,
    /// Placed data has no buffer or chunk of its length.
    PlacedLength,
    /// A default arm has the switch value of another arm.
    Switch,
    /// Values of a recursive type are nested too deep.
    Depth,
}

impl EncodeError {
    /// A buffer of `available` bytes is too short.
    #[must_use]
    pub const fn new(needed: usize, available: usize) -> Self {
        Self { needed, available, kind: EncodeErrorKind::Space }
    }

    /// A length exceeds the bound of its type.
    #[must_use]
    pub const fn bound(len: usize, bound: usize) -> Self {
        Self { needed: len, available: bound, kind: EncodeErrorKind::Bound }
    }

    /// Placed data does not match its buffer or chunk.
    #[must_use]
    pub const fn placed(len: usize, available: usize) -> Self {
        Self { needed: len, available, kind: EncodeErrorKind::PlacedLength }
    }

    /// A union's default arm has the switch value of another arm.
    #[must_use]
    pub const fn switch() -> Self {
        Self { needed: 4, available: 0, kind: EncodeErrorKind::Switch }
    }

    /// Values of a recursive type have more than `limit` levels.
    #[must_use]
    pub const fn depth(limit: usize) -> Self {
        Self { needed: limit + 1, available: limit, kind: EncodeErrorKind::Depth }
    }

    /// Kind of the error.
    #[must_use]
    pub const fn kind(&self) -> EncodeErrorKind {
        self.kind
    }

    fn text(&self) -> String {
        let Self { needed, available, kind } = self;
        match kind {
            EncodeErrorKind::Space => format!("needs {needed} bytes of space, found {available}"),
            EncodeErrorKind::Bound => format!("length {needed} exceeds {available}, the bound in the `.x` file"),
            EncodeErrorKind::Depth => format!("values of a recursive type are nested more than {available} deep"),
            EncodeErrorKind::Switch => "`Default` with a switch of another arm".to_owned(),
            EncodeErrorKind::PlacedLength if *available == 0 => {
                format!("`Bulk::placed` of {needed} bytes without a buffer or chunk")
            }
            EncodeErrorKind::PlacedLength if *needed == 0 => {
                format!("buffer of {available} bytes is lent, and no argument names it by `Bulk::placed`")
            }
            EncodeErrorKind::PlacedLength => {
                format!("`Bulk::placed` of {needed} bytes for a buffer of {available}: the lengths must be equal")
            }
        }
    }
}

/// A cursor over memory to send; never writes past it.
pub struct Encoder<'b> {
    out: &'b mut [u8],
    at: usize,
    /// Chooses the places of eligible items. If `None`, they are inline.
    placement: Option<&'b mut dyn BulkPlacement>,
    /// Index of the next eligible item.
    item: usize,
    /// Bytes of items in chunks, with round-up.
    chunk_bytes: usize,
}

impl<'b> Encoder<'b> {
    /// A cursor at the first byte of `out`.
    #[must_use]
    pub const fn new(out: &'b mut [u8]) -> Self {
        Self { out, at: 0, placement: None, item: 0, chunk_bytes: 0 }
    }

    /// A cursor over a message whose DDP-eligible items may travel as chunks.
    #[must_use]
    pub fn placing(out: &'b mut [u8], place: &'b mut dyn BulkPlacement) -> Self {
        Self { placement: Some(place), ..Self::new(out) }
    }

    /// Bytes written.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.at
    }

    /// Whether nothing was written.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.at == 0
    }

    /// The written bytes, for the lifetime of the buffer.
    #[must_use]
    pub fn into_written(self) -> &'b [u8] {
        let (written, _) = self.out.split_at_mut(self.at);
        written
    }

    /// Raw bytes, not padded.
    ///
    /// # Errors
    /// There is no room.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        let end = self.at + bytes.len();
        let available = self.out.len();
        let space = self.out.get_mut(self.at..end).ok_or(EncodeError::new(end, available))?;
        space.copy_from_slice(bytes);
        self.at = end;
        Ok(())
    }

    /// `unsigned int`.
    ///
    /// # Errors
    /// There is no room.
    #[inline]
    pub fn u32(&mut self, word: u32) -> Result<(), EncodeError> {
        self.bytes(&word.to_be_bytes())
    }

    /// Writes several words with one length check.
    ///
    /// # Errors
    /// There is no room.
    #[inline(always)]
    pub fn words<const N: usize>(&mut self, words: [u32; N]) -> Result<(), EncodeError> {
        let (at, available) = (self.at, self.out.len());
        let (space, _) = self.out.get_mut(at..).unwrap_or_default().as_chunks_mut();
        let space: &mut [[u8; 4]; N] = space.first_chunk_mut().ok_or(EncodeError::new(at + 4 * N, available))?;
        *space = words.map(u32::to_be_bytes);
        self.at = at + 4 * N;
        Ok(())
    }

    /// `unsigned hyper`.
    ///
    /// # Errors
    /// There is no room.
    #[inline]
    pub fn u64(&mut self, word: u64) -> Result<(), EncodeError> {
        self.bytes(&word.to_be_bytes())
    }

    /// `bool`.
    ///
    /// # Errors
    /// There is no room.
    #[inline]
    pub fn bool(&mut self, value: bool) -> Result<(), EncodeError> {
        self.u32(value.into())
    }

    /// `opaque[N]`: the bytes, and zero padding.
    ///
    /// # Errors
    /// There is no room.
    #[inline]
    pub fn fixed(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        self.bytes(bytes)?;
        self.write_padding(bytes.len())
    }

    #[inline]
    fn write_padding(&mut self, len: usize) -> Result<(), EncodeError> {
        self.bytes(&[0; 3][..len.wrapping_neg() % 4])
    }

    /// A length or count, at most `max`.
    ///
    /// # Errors
    /// The count exceeds `max` or 2³² - 1, or there is no room.
    #[inline]
    pub fn count(&mut self, count: usize, max: usize) -> Result<(), EncodeError> {
        match u32::try_from(count) {
            Ok(word) if count <= max => self.u32(word),
            _ => Err(EncodeError::bound(count, max.min(u32::MAX as usize))),
        }
    }

    /// `opaque<max>` or `string<max>`: length, bytes, zero padding.
    ///
    /// # Errors
    /// There are more than `max` bytes, or there is no room.
    #[inline]
    pub fn opaque(&mut self, bytes: &[u8], max: usize) -> Result<(), EncodeError> {
        self.count(bytes.len(), max)?;
        self.fixed(bytes)
    }

    /// `opaque<max>` that may travel as a chunk. Its length is in the message either way.
    ///
    /// # Errors
    /// There are more than `max` bytes, the message or chunk has no room, or the data is placed but has no place in the
    /// message.
    pub fn bulk(&mut self, bulk: &Bulk<'_>, max: usize) -> Result<(), EncodeError> {
        self.count(bulk.len(), max)?;
        let position = self.at + self.chunk_bytes;
        let location = match &mut self.placement {
            Some(placement) => placement.place(self.item, bulk, position)?,
            None => BulkLocation::Inline,
        };
        self.item += 1;
        match location {
            BulkLocation::Apart => self.chunk_bytes += padded(bulk.len()),
            BulkLocation::Inline if bulk.is_placed() && !bulk.is_empty() => {
                return Err(EncodeError::placed(bulk.len(), 0));
            }
            BulkLocation::Inline => self.fixed(bulk.bytes())?,
            BulkLocation::At(from) => {
                let (to, available) = (self.at, self.out.len());
                let end = from.max(to).saturating_add(bulk.len());
                if end > available {
                    return Err(EncodeError::new(end, available));
                }
                if from != to {
                    self.out.copy_within(from..from + bulk.len(), to);
                }
                self.at = to + bulk.len();
                self.write_padding(bulk.len())?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Encoder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("at", &self.at).field("of", &self.out.len()).finish_non_exhaustive()
    }
}
