//! Arrays of variable length, and linked lists.
//!
//! On the wire, an optional pointer precedes each element of a list, and announces it.

use std::fmt;

use crate::{BadXdr, Decode, Decoder, Encode, EncodeError, Encoder};

/// `T x<>`: a view of received elements, or a slice of elements to send.
///
/// Received elements are checked once, when the array is decoded; [`iter`](Self::iter) decodes each again.
pub type Array<'a, T> = Sequence<'a, T, false>;

/// `T *first`, where the XDR type ends with `T *next`.
///
/// A view of received elements, or elements to send. The Rust type `T` omits the pointer.
pub type List<'a, T> = Sequence<'a, T, true>;

/// An [`Array`], or a [`List`], in which a pointer precedes each element.
///
/// The elements are either all values or all encoded; the other field is empty.
pub struct Sequence<'a, T, const LINKED: bool> {
    elements: &'a [T],
    /// Checked bytes of `count` elements, with the pointers in front of them.
    encoded: &'a [u8],
    count: usize,
}

impl<T, const LINKED: bool> Clone for Sequence<'_, T, LINKED> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const LINKED: bool> Copy for Sequence<'_, T, LINKED> {}

impl<'a, T, const LINKED: bool> From<&'a [T]> for Sequence<'a, T, LINKED> {
    fn from(elements: &'a [T]) -> Self {
        Self { elements, encoded: &[], count: 0 }
    }
}

/// No elements.
impl<T, const LINKED: bool> Default for Sequence<'_, T, LINKED> {
    fn default() -> Self {
        Self::from(&[][..])
    }
}

impl<'a, T, const LINKED: bool> Sequence<'a, T, LINKED> {
    /// Bytes of the pointer in front of an element.
    const POINTER: usize = if LINKED { 4 } else { 0 };

    fn from_encoded(encoded: &'a [u8], count: usize) -> Self {
        Self { elements: &[], encoded, count }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.elements.len() + self.count
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a, T: Decode<'a> + Clone, const LINKED: bool> Sequence<'a, T, LINKED> {
    /// The elements, in order.
    #[must_use]
    pub fn iter(&self) -> Iter<'a, T, LINKED> {
        Iter { elements: self.elements.iter(), encoded: Decoder::new(self.encoded), count: self.count }
    }
}

impl<T: Encode, const LINKED: bool> Sequence<'_, T, LINKED> {
    /// Bytes of the elements, and of the word that counts them or ends them.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        4 + self.encoded.len()
            + self.elements.iter().map(|element| Self::POINTER + element.encoded_len()).sum::<usize>()
    }

    fn encode_elements(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
        for element in self.elements {
            if LINKED {
                to.bool(true)?;
            }
            element.encode(to)?;
        }
        to.bytes(self.encoded)
    }
}

impl<'a, T: Decode<'a>> Array<'a, T> {
    /// Reads an array of at most `max` elements.
    ///
    /// # Errors
    /// There are more elements, or one is not a valid `T`.
    pub fn decode(from: &mut Decoder<'a>, max: usize, what: &'static str) -> Result<Self, BadXdr> {
        let bad = BadXdr { what, at: from.at() };
        let count = from.u32(what)? as usize;
        // Each element takes at least a word, so a larger count is invalid without decoding.
        if count > max || count > from.rest().len() / 4 {
            return Err(bad);
        }
        let at = from.at();
        for _ in 0..count {
            T::decode(from)?;
        }
        Ok(Self::from_encoded(from.since(at), count))
    }
}

impl<T: Encode> Array<'_, T> {
    /// Writes at most `max` elements.
    ///
    /// # Errors
    /// There are more elements, or there is no room.
    pub fn encode(&self, to: &mut Encoder<'_>, max: usize) -> Result<(), EncodeError> {
        to.count(self.len(), max)?;
        self.encode_elements(to)
    }
}

impl<'a, T: Decode<'a>> Decode<'a> for List<'a, T> {
    fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr> {
        let at = from.at();
        let (mut bytes, mut count) = (from.since(at), 0);
        while from.bool("pointer to the next element")? {
            T::decode(from)?;
            (bytes, count) = (from.since(at), count + 1);
        }
        Ok(Self::from_encoded(bytes, count))
    }
}

impl<T: Encode> Encode for List<'_, T> {
    fn encoded_len(&self) -> usize {
        // This calls the inherent method, which arrays have, too.
        self.encoded_len()
    }

    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), EncodeError> {
        self.encode_elements(to)?;
        to.bool(false)
    }
}

impl<'a, T: Decode<'a> + Clone, const LINKED: bool> IntoIterator for Sequence<'a, T, LINKED> {
    type Item = T;
    type IntoIter = Iter<'a, T, LINKED>;

    fn into_iter(self) -> Iter<'a, T, LINKED> {
        self.iter()
    }
}

impl<'a, T: Decode<'a> + Clone + fmt::Debug, const LINKED: bool> fmt::Debug for Sequence<'a, T, LINKED> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a, T: Decode<'a> + Clone + PartialEq, const LINKED: bool> PartialEq for Sequence<'a, T, LINKED> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

/// Elements of a [`Sequence`].
#[derive(Debug)]
pub struct Iter<'a, T, const LINKED: bool> {
    elements: std::slice::Iter<'a, T>,
    encoded: Decoder<'a>,
    count: usize,
}

impl<'a, T: Decode<'a> + Clone, const LINKED: bool> Iterator for Iter<'a, T, LINKED> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if let Some(element) = self.elements.next() {
            return Some(element.clone());
        }
        self.count = self.count.checked_sub(1)?;
        let pointer = Sequence::<T, LINKED>::POINTER;
        self.encoded.bytes(pointer, "pointer to the next element").ok()?;
        T::decode(&mut self.encoded).ok()
    }
}

/// Builds a [`List`] element by element, into one growing buffer.
///
/// It is for elements whose parts do not live as long as the list.
#[derive(Debug, Default)]
pub struct ListBuilder {
    bytes: Vec<u8>,
    count: usize,
}

impl ListBuilder {
    /// An empty list, with room for `bytes` bytes of elements and their pointers.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), count: 0 }
    }

    /// Bytes of the encoded elements and their pointers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds an element. All must be of the type of the [list](Self::list).
    ///
    /// # Errors
    /// A length exceeds its bound in the protocol: the element is not added.
    pub fn push<T: Encode>(&mut self, element: &T) -> Result<(), EncodeError> {
        let at = self.bytes.len();
        self.bytes.resize(at + 4 + element.encoded_len(), 0);
        let mut to = Encoder::new(&mut self.bytes[at..]);
        let result = to.bool(true).and_then(|()| element.encode(&mut to));
        match result {
            Ok(()) => self.count += 1,
            Err(_) => self.bytes.truncate(at),
        }
        result
    }

    /// The list.
    #[must_use]
    pub fn list<T>(&self) -> List<'_, T> {
        Sequence::from_encoded(&self.bytes, self.count)
    }
}
