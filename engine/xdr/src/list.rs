//! Lists by optional pointers: `struct entry { …; entry *next; }`.

use std::fmt;

use crate::{BadXdr, Decode, Decoder, Encode, Encoder, NoSpace};

/// `T *first`, where `T` ends with an optional pointer to the next `T`.
///
/// A view of received elements, or elements to send. `T` has no field for the pointer.
pub struct List<'a, T>(Elements<'a, T>);

enum Elements<'a, T> {
    Slice(&'a [T]),
    /// Checked bytes up to the last pointer, which is not among them.
    Encoded(&'a [u8]),
}

impl<T> Clone for List<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for List<'_, T> {}

impl<T> Clone for Elements<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Elements<'_, T> {}

impl<'a, T> From<&'a [T]> for List<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Self(Elements::Slice(elements))
    }
}

/// No elements.
impl<T> Default for List<'_, T> {
    fn default() -> Self {
        Self(Elements::Slice(&[]))
    }
}

impl<'a, T: Decode<'a> + Clone> List<'a, T> {
    /// The elements, in order.
    #[must_use]
    pub fn iter(&self) -> ListIter<'a, T> {
        ListIter(match self.0 {
            Elements::Slice(elements) => Left::Slice(elements.iter()),
            Elements::Encoded(bytes) => Left::Encoded(Decoder::new(bytes)),
        })
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self.0 {
            Elements::Slice(elements) => elements.is_empty(),
            Elements::Encoded(bytes) => bytes.is_empty(),
        }
    }
}

impl<'a, T: Decode<'a>> Decode<'a> for List<'a, T> {
    fn decode(from: &mut Decoder<'a>) -> Result<Self, BadXdr> {
        let at = from.at();
        let mut bytes = from.since(at);
        while from.bool("pointer to the next element")? {
            T::decode(from)?;
            bytes = from.since(at);
        }
        Ok(Self(Elements::Encoded(bytes)))
    }
}

impl<T: Encode> Encode for List<'_, T> {
    fn encoded_len(&self) -> usize {
        4 + match self.0 {
            Elements::Slice(elements) => elements.iter().map(|element| 4 + element.encoded_len()).sum(),
            Elements::Encoded(bytes) => bytes.len(),
        }
    }

    fn encode(&self, to: &mut Encoder<'_>) -> Result<(), NoSpace> {
        match self.0 {
            Elements::Slice(elements) => {
                for element in elements {
                    to.bool(true)?;
                    element.encode(to)?;
                }
            }
            Elements::Encoded(bytes) => to.bytes(bytes)?,
        }
        to.bool(false)
    }
}

impl<'a, T: Decode<'a> + Clone> IntoIterator for List<'a, T> {
    type Item = T;
    type IntoIter = ListIter<'a, T>;

    fn into_iter(self) -> ListIter<'a, T> {
        self.iter()
    }
}

impl<'a, T: Decode<'a> + Clone + fmt::Debug> fmt::Debug for List<'a, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a, T: Decode<'a> + Clone + PartialEq> PartialEq for List<'a, T> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

/// Elements of a [`List`].
#[derive(Debug)]
pub struct ListIter<'a, T>(Left<'a, T>);

#[derive(Debug)]
enum Left<'a, T> {
    Slice(std::slice::Iter<'a, T>),
    Encoded(Decoder<'a>),
}

impl<'a, T: Decode<'a> + Clone> Iterator for ListIter<'a, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        match &mut self.0 {
            Left::Slice(elements) => elements.next().cloned(),
            Left::Encoded(from) => match from.bool("pointer to the next element") {
                Ok(true) => T::decode(from).ok(),
                _ => None,
            },
        }
    }
}

/// Builds a [`List`] element by element, in one allocation.
///
/// For elements whose parts do not live as long as the list.
#[derive(Debug, Default)]
pub struct ListBuilder {
    bytes: Vec<u8>,
}

impl ListBuilder {
    /// An empty list, with room for elements of `bytes` bytes.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes) }
    }

    /// Bytes of its elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds an element. All must be of the type of the [list](Self::list).
    ///
    /// # Errors
    /// A length exceeds its bound in the protocol: the element is not added.
    pub fn push<T: Encode>(&mut self, element: &T) -> Result<(), NoSpace> {
        let at = self.bytes.len();
        self.bytes.resize(at + 4 + element.encoded_len(), 0);
        let mut to = Encoder::new(&mut self.bytes[at..]);
        let done = to.bool(true).and_then(|()| element.encode(&mut to));
        if done.is_err() {
            self.bytes.truncate(at);
        }
        done
    }

    /// The list.
    #[must_use]
    pub fn list<T>(&self) -> List<'_, T> {
        List(Elements::Encoded(&self.bytes))
    }
}
