//! Arrays of variable length.

use std::fmt;

use crate::{BadXdr, Decode, Decoder, Encode, Encoder, NoSpace};

/// `T x<>`: a view of received elements, or a slice of elements to send.
///
/// Received elements are checked once, when the array is decoded; [`iter`](Self::iter) decodes each again.
pub struct Array<'a, T>(Elements<'a, T>);

enum Elements<'a, T> {
    Slice(&'a [T]),
    /// Checked bytes of so many elements.
    Encoded {
        bytes: &'a [u8],
        count: usize,
    },
}

impl<T> Clone for Array<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<'_, T> {}

impl<T> Clone for Elements<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Elements<'_, T> {}

impl<'a, T> From<&'a [T]> for Array<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Self(Elements::Slice(elements))
    }
}

/// No elements.
impl<T> Default for Array<'_, T> {
    fn default() -> Self {
        Self(Elements::Slice(&[]))
    }
}

impl<T> Array<'_, T> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self.0 {
            Elements::Slice(elements) => elements.len(),
            Elements::Encoded { count, .. } => count,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a, T: Decode<'a> + Clone> Array<'a, T> {
    /// The elements, in order.
    #[must_use]
    pub fn iter(&self) -> ArrayIter<'a, T> {
        ArrayIter(match self.0 {
            Elements::Slice(elements) => Left::Slice(elements.iter()),
            Elements::Encoded { bytes, count } => Left::Encoded { from: Decoder::new(bytes), count },
        })
    }

    /// Reads an array of at most `max` elements.
    ///
    /// # Errors
    /// There are more, or one is no `T`.
    pub fn decode(from: &mut Decoder<'a>, max: usize, what: &'static str) -> Result<Self, BadXdr> {
        let bad = BadXdr { what, at: from.at() };
        let count = from.u32(what)? as usize;
        // An element takes a word at least: a count of more needs no loop to be refused.
        if count > max || count > from.rest().len() / 4 {
            return Err(bad);
        }
        let at = from.at();
        for _ in 0..count {
            T::decode(from)?;
        }
        Ok(Self(Elements::Encoded { bytes: from.since(at), count }))
    }
}

impl<T: Encode> Array<'_, T> {
    /// Bytes of the encoded array.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        4 + match self.0 {
            Elements::Slice(elements) => elements.iter().map(Encode::encoded_len).sum(),
            Elements::Encoded { bytes, .. } => bytes.len(),
        }
    }

    /// Writes at most `max` elements.
    ///
    /// # Errors
    /// There are more, or no room.
    pub fn encode(&self, to: &mut Encoder<'_>, max: usize) -> Result<(), NoSpace> {
        to.count(self.len(), max)?;
        match self.0 {
            Elements::Slice(elements) => elements.iter().try_for_each(|element| element.encode(to)),
            Elements::Encoded { bytes, .. } => to.bytes(bytes),
        }
    }
}

impl<'a, T: Decode<'a> + Clone> IntoIterator for Array<'a, T> {
    type Item = T;
    type IntoIter = ArrayIter<'a, T>;

    fn into_iter(self) -> ArrayIter<'a, T> {
        self.iter()
    }
}

impl<'a, T: Decode<'a> + Clone + fmt::Debug> fmt::Debug for Array<'a, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a, T: Decode<'a> + Clone + PartialEq> PartialEq for Array<'a, T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

/// Elements of an [`Array`].
#[derive(Debug)]
pub struct ArrayIter<'a, T>(Left<'a, T>);

#[derive(Debug)]
enum Left<'a, T> {
    Slice(std::slice::Iter<'a, T>),
    Encoded { from: Decoder<'a>, count: usize },
}

impl<'a, T: Decode<'a> + Clone> Iterator for ArrayIter<'a, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        match &mut self.0 {
            Left::Slice(elements) => elements.next().cloned(),
            Left::Encoded { from, count } => {
                *count = count.checked_sub(1)?;
                T::decode(from).ok()
            }
        }
    }
}
