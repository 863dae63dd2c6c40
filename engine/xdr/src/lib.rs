//! XDR (RFC 4506) in place.
//!
//! [`Decoder`] reads received bytes: opaque data, strings, arrays and lists are views of them, and nothing is
//! allocated. [`Encoder`] writes into memory that is sent. `xdrgen` generates types that implement [`Decode`] and
//! [`Encode`].
//!
//! | XDR | Rust |
//! |---|---|
//! | `int`, `unsigned int`, `hyper`, `unsigned hyper` | `i32`, `u32`, `i64`, `u64` |
//! | `float`, `double`, `bool` | `f32`, `f64`, `bool` |
//! | `opaque x[n]` | `[u8; n]` |
//! | `opaque x<>`, `string x<>` | `&[u8]` |
//! | `T x[n]`, `T x<>`, `T *x` | `[T; n]`, [`Array`], [`Option`] |
//! | a list by optional pointers | [`List`] |
//! | a value inside one of its own type, other than a list | [`Recursive`] |
//! | `opaque x<>` that may travel as a chunk (RFC 8166 §6.1) | [`Bulk`] |
//!
//! Decoding checks each length before use, and takes time linear in the bytes. Lists need no recursion; other
//! values inside values of their own type have at most [`MAX_DEPTH`] levels.
#![forbid(unsafe_code)]

mod bulk;
mod decoder;
mod encoder;
mod recursive;
mod sequence;
mod values;

pub use bulk::{Bulk, BulkLocation, BulkPlacement, ReceivedChunks};
pub use decoder::{BadXdr, Decoder};
pub use encoder::{EncodeError, EncodeErrorKind, Encoder};
pub use recursive::{MAX_DEPTH, Recursive};
pub use sequence::{Array, Iter, List, ListBuilder, Sequence};

/// A value that is read from XDR.
pub trait Decode<'a>: Sized {
    /// Reads the value.
    ///
    /// # Errors
    /// The bytes are not a valid value. The decoder's position is then unspecified.
    fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr>;
}

/// A value that is written as XDR.
pub trait Encode {
    /// Bytes of the encoded value, without [placed](Bulk::placed) data.
    fn encoded_len(&self) -> usize;

    /// Writes the value.
    ///
    /// # Errors
    /// There is no room for it, or a length exceeds its bound in the protocol. The output's content is unspecified.
    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError>;
}

/// `len` rounded up to a multiple of four, as in XDR.
#[must_use]
pub const fn padded(len: usize) -> usize {
    (len + 3) & !3
}

/// Decodes a value from all of `bytes`.
///
/// # Errors
/// The bytes are not a valid value, or some are left over.
#[inline]
pub fn decode<'a, T: Decode<'a>>(bytes: &'a [u8]) -> Result<T, BadXdr> {
    let mut from = Decoder::new(bytes);
    let value = T::decode(&mut from)?;
    from.end()?;
    Ok(value)
}

/// Encodes a value.
///
/// # Errors
/// A length exceeds its bound in the protocol.
pub fn encode<T: Encode + ?Sized>(value: &T) -> Result<Vec<u8>, EncodeError> {
    let mut bytes = vec![0; value.encoded_len()];
    value.encode(&mut Encoder::new(&mut bytes))?;
    Ok(bytes)
}
