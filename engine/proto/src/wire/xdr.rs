//! The XDR forms (RFC 4506) of the headers: words, booleans, opaque data.
//!
//! [`Reader`] never reads past its bytes. Its errors name the invalid item and its position. [`Writer`] never writes
//! past its buffer. Both work in place.

use thiserror::Error;

/// An item that is invalid XDR: truncated, or a boolean above 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("bad {what} at byte {at}")]
pub struct BadXdr {
    /// The item's name in its specification.
    pub what: &'static str,
    /// Offset of the item in the input, in bytes.
    pub at: usize,
}

/// The output buffer is too small. Its content is unspecified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("needs {needed} bytes of space, found {available}")]
pub struct NoSpace {
    /// Minimum bytes needed.
    pub needed: usize,
    /// Bytes of the buffer.
    pub available: usize,
}

/// `len` rounded up to a multiple of four, as in XDR.
pub const fn padded(len: usize) -> usize {
    (len + 3) & !3
}

/// The big-endian word at `at`, or 0 past the end. For accessors of checked bytes.
#[inline]
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at.wrapping_add(4)).and_then(|word| word.first_chunk()) {
        Some(word) => u32::from_be_bytes(*word),
        None => 0,
    }
}

/// A cursor over received bytes.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// A cursor at the first byte.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, at: 0 }
    }

    /// A cursor at byte `at`. Errors count from the start of `bytes`.
    pub const fn starting_at(bytes: &'a [u8], at: usize) -> Self {
        Reader { bytes, at }
    }

    /// Offset of the next item.
    pub const fn at(&self) -> usize {
        self.at
    }

    /// All unread bytes.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The next `len` bytes, without padding.
    #[inline]
    pub fn bytes(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], BadXdr> {
        let bad = BadXdr { what, at: self.at };
        let end = self.at.checked_add(len).ok_or(bad)?;
        let bytes = self.bytes.get(self.at..end).ok_or(bad)?;
        self.at = end;
        Ok(bytes)
    }

    /// `unsigned int`.
    #[inline]
    pub fn u32(&mut self, what: &'static str) -> Result<u32, BadXdr> {
        let at = self.at;
        match self.bytes(4, what)?.try_into() {
            Ok(word) => Ok(u32::from_be_bytes(word)),
            Err(_) => Err(BadXdr { what, at }),
        }
    }

    /// `bool`, which also precedes optional data. Values above 1 are errors.
    #[inline]
    pub fn bool(&mut self, what: &'static str) -> Result<bool, BadXdr> {
        let at = self.at;
        match self.u32(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(BadXdr { what, at }),
        }
    }

    /// `opaque<max>`: a length, the bytes, and padding. Padding values are not checked.
    pub fn opaque(&mut self, max: usize, what: &'static str) -> Result<&'a [u8], BadXdr> {
        let at = self.at;
        let len = self.u32(what)? as usize;
        if len > max {
            return Err(BadXdr { what, at });
        }
        let bytes = self.bytes(len, what)?;
        self.bytes(len.wrapping_neg() % 4, what)?;
        Ok(bytes)
    }

    /// `unsigned int<>` in encoded form.
    pub fn words(&mut self, what: &'static str) -> Result<&'a [[u8; 4]], BadXdr> {
        let at = self.at;
        let count = self.u32(what)? as usize;
        let len = count.checked_mul(4).ok_or(BadXdr { what, at })?;
        Ok(self.bytes(len, what)?.as_chunks().0)
    }
}

/// A cursor over a buffer to send.
#[derive(Debug)]
pub struct Writer<'b> {
    out: &'b mut [u8],
    at: usize,
}

impl<'b> Writer<'b> {
    /// A cursor at the first byte of `out`.
    pub const fn new(out: &'b mut [u8]) -> Self {
        Writer { out, at: 0 }
    }

    /// Bytes written.
    pub const fn len(&self) -> usize {
        self.at
    }

    /// Whether nothing was written.
    pub const fn is_empty(&self) -> bool {
        self.at == 0
    }

    /// The written bytes, for the lifetime of the buffer.
    pub fn into_written(self) -> &'b [u8] {
        let (written, _) = self.out.split_at_mut(self.at);
        written
    }

    /// Raw bytes, not padded.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), NoSpace> {
        let end = self.at + bytes.len();
        let available = self.out.len();
        let space = self.out.get_mut(self.at..end).ok_or(NoSpace { needed: end, available })?;
        space.copy_from_slice(bytes);
        self.at = end;
        Ok(())
    }

    /// `unsigned int`.
    #[inline]
    pub fn u32(&mut self, word: u32) -> Result<(), NoSpace> {
        self.bytes(&word.to_be_bytes())
    }

    /// Writes several words with one length check.
    #[inline(always)]
    pub fn words<const N: usize>(&mut self, words: [u32; N]) -> Result<(), NoSpace> {
        self.bytes(words.map(u32::to_be_bytes).as_flattened())
    }

    /// `unsigned hyper`.
    #[inline]
    pub fn u64(&mut self, word: u64) -> Result<(), NoSpace> {
        self.bytes(&word.to_be_bytes())
    }

    /// `bool`.
    pub fn bool(&mut self, value: bool) -> Result<(), NoSpace> {
        self.u32(value.into())
    }

    /// `opaque<>`: length, bytes, zero padding. Message lengths are far below 2^32.
    pub fn opaque(&mut self, bytes: &[u8]) -> Result<(), NoSpace> {
        self.u32(bytes.len() as u32)?;
        self.bytes(bytes)?;
        self.bytes(&[0; 3][..bytes.len().wrapping_neg() % 4])
    }
}
