//! Decoding of XDR (RFC 4506).

use thiserror::Error;

use crate::Decode;
use crate::bulk::{Bulk, ReceivedChunks};
use crate::recursive::MAX_DEPTH;

/// An item that is invalid XDR, such as a truncated one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("bad {what} at byte {at}")]
pub struct BadXdr {
    /// The item's name in its specification, or what else is invalid.
    pub what: &'static str,
    /// Offset of the item in the input, in bytes.
    pub at: usize,
}

/// A cursor over received bytes; never reads past them.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
    at: usize,
    is_strict: bool,
    /// Number of values of recursive types that enclose the next item.
    depth: u8,
    /// Items that arrived in chunks.
    received: Option<&'a dyn ReceivedChunks>,
    /// Index of the next item that may have arrived in a chunk.
    item: usize,
    /// Chunks used.
    chunks: usize,
    /// Bytes of items in chunks, with round-up.
    chunk_bytes: usize,
}

impl<'a> Decoder<'a> {
    /// A cursor at the first byte.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self::starting_at(bytes, 0)
    }

    /// A cursor at byte `at`. Offsets in errors count from the start of `bytes`.
    #[must_use]
    pub const fn starting_at(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, is_strict: false, depth: 0, received: None, item: 0, chunks: 0, chunk_bytes: 0 }
    }

    /// A cursor over a message whose DDP-eligible items may have arrived in chunks.
    #[must_use]
    pub fn with_chunks(bytes: &'a [u8], received: &'a dyn ReceivedChunks) -> Self {
        Self { received: Some(received), ..Self::new(bytes) }
    }

    /// Rejects padding that is not zero, so that encoding the value yields the same bytes.
    #[must_use]
    pub fn strict(self) -> Self {
        Self { is_strict: true, ..self }
    }

    /// Offset of the next item.
    #[must_use]
    pub const fn at(&self) -> usize {
        self.at
    }

    /// All unread bytes.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The bytes from an earlier [position](Self::at) to the current one.
    #[must_use]
    pub fn since(&self, at: usize) -> &'a [u8] {
        self.bytes.get(at..self.at).unwrap_or_default()
    }

    /// Checks that all bytes were read, and all chunks used.
    ///
    /// # Errors
    /// Bytes or chunks are left.
    #[inline]
    pub fn end(&self) -> Result<(), BadXdr> {
        let what = match self.received {
            _ if self.at < self.bytes.len() => "end of the message",
            Some(received) if !received.is_complete(self.chunks) => "position of a chunk",
            _ => return Ok(()),
        };
        Err(BadXdr { what, at: self.at })
    }

    /// The next `len` bytes, without padding.
    ///
    /// # Errors
    /// Fewer bytes are left.
    #[inline]
    pub fn bytes(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], BadXdr> {
        let bad = BadXdr { what, at: self.at };
        let end = self.at.checked_add(len).ok_or(bad)?;
        let bytes = self.bytes.get(self.at..end).ok_or(bad)?;
        self.at = end;
        Ok(bytes)
    }

    #[inline(always)]
    fn array<const N: usize>(&mut self, what: &'static str) -> Result<&'a [u8; N], BadXdr> {
        let bad = BadXdr { what, at: self.at };
        let bytes = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk()).ok_or(bad)?;
        self.at += N;
        Ok(bytes)
    }

    /// `unsigned int`.
    ///
    /// # Errors
    /// Fewer bytes are left.
    #[inline]
    pub fn u32(&mut self, what: &'static str) -> Result<u32, BadXdr> {
        self.array(what).map(|word| u32::from_be_bytes(*word))
    }

    /// `N` words, with one length check.
    ///
    /// # Errors
    /// Fewer bytes are left.
    #[inline(always)]
    pub fn word_array<const N: usize>(&mut self, what: &'static str) -> Result<[u32; N], BadXdr> {
        let bad = BadXdr { what, at: self.at };
        let (words, _) = self.bytes.get(self.at..).unwrap_or_default().as_chunks();
        let words: &[_; N] = words.first_chunk().ok_or(bad)?;
        self.at += 4 * N;
        Ok(words.map(u32::from_be_bytes))
    }

    /// `unsigned hyper`.
    ///
    /// # Errors
    /// Fewer bytes are left.
    #[inline]
    pub fn u64(&mut self, what: &'static str) -> Result<u64, BadXdr> {
        self.array(what).map(|word| u64::from_be_bytes(*word))
    }

    /// `bool`, which also precedes optional data.
    ///
    /// # Errors
    /// Fewer bytes are left, or the value exceeds 1.
    #[inline]
    pub fn bool(&mut self, what: &'static str) -> Result<bool, BadXdr> {
        match self.u32(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.unknown(what)),
        }
    }

    #[inline]
    fn skip_padding(&mut self, len: usize, what: &'static str) -> Result<(), BadXdr> {
        let at = self.at;
        let padding = self.bytes(len.wrapping_neg() % 4, what)?;
        if self.is_strict && padding.iter().any(|&byte| byte != 0) {
            return Err(BadXdr { what: "padding", at });
        }
        Ok(())
    }

    /// `opaque[N]`: the bytes, and padding.
    ///
    /// # Errors
    /// Fewer bytes are left, or a [`strict`](Self::strict) decoder finds padding that is not zero.
    #[inline]
    pub fn fixed<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], BadXdr> {
        let bytes = *self.array(what)?;
        self.skip_padding(N, what)?;
        Ok(bytes)
    }

    /// `opaque<max>` or `string<max>`: a length, the bytes, and padding.
    ///
    /// # Errors
    /// Fewer bytes are left, the length exceeds `max`, or a [`strict`](Self::strict) decoder finds padding that is not
    /// zero.
    #[inline]
    pub fn opaque(&mut self, max: usize, what: &'static str) -> Result<&'a [u8], BadXdr> {
        let bad = BadXdr { what, at: self.at };
        let len = self.u32(what)? as usize;
        if len > max {
            return Err(bad);
        }
        let bytes = self.bytes(len, what)?;
        self.skip_padding(len, what)?;
        Ok(bytes)
    }

    /// `opaque<max>` that may have arrived in a chunk. Its length is in the message either way.
    ///
    /// # Errors
    /// Fewer bytes are left, the length exceeds `max`, the chunk has another length, or a [`strict`](Self::strict)
    /// decoder finds padding that is not zero.
    #[inline]
    pub fn bulk(&mut self, max: usize, what: &'static str) -> Result<Bulk<'a>, BadXdr> {
        let at = self.at;
        let Some(received) = self.received else { return self.opaque(max, what).map(Bulk::from) };
        let len = self.u32(what)? as usize;
        let chunk = received.item(self.item, self.chunks, self.at + self.chunk_bytes, len);
        self.item += 1;
        let Some(bytes) = chunk else {
            self.at = at;
            return self.opaque(max, what).map(Bulk::from);
        };
        if bytes.len() != len || len > max {
            return Err(BadXdr { what, at });
        }
        self.chunks += 1;
        self.chunk_bytes += crate::padded(len);
        Ok(Bulk::from(bytes))
    }

    /// Checks a `T` inside a value of its own type, and returns its bytes.
    ///
    /// # Errors
    /// The bytes are not a valid `T`, or the nesting exceeds [`MAX_DEPTH`].
    #[inline(never)]
    pub(crate) fn nested<T: Decode<'a>>(&mut self) -> Result<&'a [u8], BadXdr> {
        let at = self.at;
        if usize::from(self.depth) == MAX_DEPTH {
            return Err(BadXdr { what: "nesting depth", at });
        }
        self.depth += 1;
        T::decode(self)?;
        self.depth -= 1;
        Ok(self.since(at))
    }

    /// `unsigned int<>` in encoded form.
    ///
    /// # Errors
    /// Fewer bytes are left.
    pub fn words(&mut self, what: &'static str) -> Result<&'a [[u8; 4]], BadXdr> {
        let at = self.at;
        let count = self.u32(what)? as usize;
        let len = count.checked_mul(4).ok_or(BadXdr { what, at })?;
        Ok(self.bytes(len, what)?.as_chunks().0)
    }

    /// The error of an undefined value in the word that was read last.
    #[cold]
    #[must_use]
    pub fn unknown(&self, what: &'static str) -> BadXdr {
        BadXdr { what, at: self.at.saturating_sub(4) }
    }
}
