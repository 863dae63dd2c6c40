//! Values inside values of their own type.

use std::fmt;
use std::marker::PhantomData;

use crate::{BadXdr, Decode, Decoder, Encode, EncodeError, Encoder, encode};

/// Maximum nesting depth of values of a recursive type.
///
/// Decoding rejects deeper values, so that no message exhausts the stack.
pub const MAX_DEPTH: usize = 64;

/// View of an encoded value inside a value of its own type.
///
/// An example is a branch of a tree. The view replaces a `Box`: nothing is allocated when a message is decoded, nothing
/// is dropped, and a value is encoded without recursion. [`get`](Self::get) decodes one level. At most [`MAX_DEPTH`]
/// such values may be nested.
pub struct Recursive<'a, T> {
    /// Checked bytes of the value.
    bytes: &'a [u8],
    value: PhantomData<fn() -> T>,
}

impl<T> Clone for Recursive<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Recursive<'_, T> {}

impl<'a, T: Decode<'a>> Recursive<'a, T> {
    /// Encodes `value` into `memory`, and returns the view of it. The former content of `memory` is lost.
    ///
    /// # Errors
    /// A length in `value` exceeds its bound in the protocol, or its nesting exceeds [`MAX_DEPTH`]. The content of
    /// `memory` is then unspecified.
    pub fn new(value: &T, memory: &'a mut Vec<u8>) -> Result<Self, EncodeError>
    where
        T: Encode,
    {
        memory.clear();
        let bytes = encode(value)?;
        *memory = bytes;
        match Decoder::new(memory).nested::<T>() {
            Ok(bytes) if bytes.len() == memory.len() => Ok(Self { bytes, value: PhantomData }),
            _ => Err(EncodeError::depth(MAX_DEPTH)),
        }
    }

    /// The value.
    ///
    /// # Panics
    /// If `T` decodes the same bytes in two ways, which no generated type does.
    #[must_use]
    pub fn get(&self) -> T {
        T::decode(&mut Decoder::new(self.bytes)).expect("the bytes were checked when the view was made")
    }
}

impl<'a, T: Decode<'a>> Decode<'a> for Recursive<'a, T> {
    fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr> {
        Ok(Self { bytes: from.nested::<T>()?, value: PhantomData })
    }
}

impl<T> Encode for Recursive<'_, T> {
    fn encoded_len(&self) -> usize {
        self.bytes.len()
    }

    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
        to.bytes(self.bytes)
    }
}

impl<'a, T: Decode<'a> + fmt::Debug> fmt::Debug for Recursive<'a, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl<'a, T: Decode<'a> + PartialEq> PartialEq for Recursive<'a, T> {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}
