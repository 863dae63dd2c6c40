//! Transport properties of each end (version 2 §5).
//!
//! [`PropertySet`] is the encoded list. [`Properties`] holds its values. An omitted or empty property has its default.

use super::codes::{Revision, codes};
use super::word::word;
use super::xdr::{BadXdr, Decoder, EncodeError, Encoder, padded};

/// First identifier reserved for experiments; the range ends at `u32::MAX`.
pub const EXPERIMENTAL: u32 = 0xFFFF_FF00;

codes! {
    /// The known properties, by their code in [`Revision::Ietf00`].
    pub enum PropertyId {
        /// Longest message that the property's sender sends, `uint32`, bytes.
        SendSize = 1, "SBSIZ";
        /// Size of the sender's receive buffers, `uint32`, bytes.
        ReceiveSize = 2, "RBSIZ";
        /// Longest segment that the sender supports, `uint32`, bytes.
        SegmentSize = 3, "RSSIZ";
        /// Maximum segments in one header, `uint32`.
        SegmentCount = 4, "RCSIZ";
        /// Supported requests in the reverse direction, see [`ReverseSupport`].
        ReverseSupport = 5, "BRS";
        /// A message of host authentication, `opaque<>`.
        HostAuth = 6, "HOSTAUTH";
        /// Experimental: 1 offers windowed credit accounting, `uint32`.
        WindowedCredits = 0xFFFF_FF00, "WINDOWED_CREDITS";
        /// Experimental: 1 announces support of OPTIONAL headers, `uint32`.
        OptionalType = 0xFFFF_FF01, "OPTIONAL_TYPE";
        /// Experimental: replies may use Send With Invalidate, `bool`.
        RemoteInvalidation = 0xFFFF_FF02, "REQREMINV";
    }
}

impl PropertyId {
    /// `rdma_which`. `None` if this revision lacks the property.
    pub const fn which(self, revision: Revision) -> Option<u32> {
        match (revision, self) {
            (Revision::Ietf00, _) => Some(self.code()),
            (Revision::Cel09, PropertyId::ReceiveSize) => Some(1),
            (Revision::Cel09, PropertyId::ReverseSupport) => Some(2),
            (Revision::Cel09, _) if self.code() >= EXPERIMENTAL => Some(self.code()),
            (Revision::Cel09, _) => None,
        }
    }

    /// The property with this `rdma_which` in this revision.
    pub fn of_revision(which: u32, revision: Revision) -> Option<PropertyId> {
        PropertyId::ALL.iter().copied().find(|id| id.which(revision) == Some(which))
    }

    /// The largest value of a property of one word; `None` for an opaque one.
    const fn max_word(self, revision: Revision) -> Option<u32> {
        match (self, revision) {
            (PropertyId::HostAuth, _) => None,
            (PropertyId::RemoteInvalidation, _) => Some(1),
            // The older document defines an enumeration, the newer one a number.
            (PropertyId::ReverseSupport, Revision::Cel09) => Some(2),
            _ => Some(u32::MAX),
        }
    }
}

/// A peer's support of requests in the reverse direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum ReverseSupport {
    /// No support.
    None = 0,
    /// Inline messages only.
    #[default]
    Inline = 1,
    /// As in the forward direction.
    General = 2,
}

impl ReverseSupport {
    /// The number on the wire.
    #[doc(hidden)]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The level with this number. Undefined numbers count as the default.
    #[doc(hidden)]
    pub const fn from_code(code: u32) -> ReverseSupport {
        match code {
            0 => ReverseSupport::None,
            2 => ReverseSupport::General,
            _ => ReverseSupport::Inline,
        }
    }
}

/// One property in its wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Property<'a> {
    /// `rdma_which`.
    pub which: u32,
    /// `rdma_data`: the XDR form of the value. Empty for the default.
    pub data: &'a [u8],
}

impl<'a> Property<'a> {
    pub(super) fn read(reader: &mut Decoder<'a>) -> Result<Property<'a>, BadXdr> {
        Ok(Property { which: reader.u32("rdma_which")?, data: reader.opaque(usize::MAX, "rdma_data")? })
    }

    pub(super) fn emit(&self, out: &mut Encoder<'_>) -> Result<(), EncodeError> {
        out.u32(self.which)?;
        out.opaque(self.data, usize::MAX)
    }

    /// Bytes of the property on the wire.
    pub const fn encoded_len(&self) -> usize {
        8 + padded(self.data.len())
    }

    /// Checks that the data has this revision's form of the property. Unknown properties pass.
    pub fn check(&self, revision: Revision) -> Result<(), BadXdr> {
        let Some(id) = PropertyId::of_revision(self.which, revision) else { return Ok(()) };
        let bad = BadXdr { what: id.name(), at: 0 };
        let valid = match id.max_word(revision) {
            _ if self.data.is_empty() => true,
            Some(max) => self.data.len() == 4 && word(self.data, 0) <= max,
            None => {
                let mut reader = Decoder::new(self.data);
                reader.opaque(usize::MAX, id.name())?;
                reader.rest().is_empty()
            }
        };
        if valid { Ok(()) } else { Err(bad) }
    }

    /// The value of a one-word property. `None` requests the default.
    pub fn uint32(&self) -> Option<u32> {
        self.data.first_chunk().map(|word| u32::from_be_bytes(*word))
    }

    /// The value of an opaque property. `None` requests the default.
    pub fn opaque(&self) -> Option<&'a [u8]> {
        Decoder::new(self.data).opaque(usize::MAX, "rdma_data").ok()
    }
}

/// A well-formed list of properties, in no particular order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PropertySet<'a> {
    count: u32,
    bytes: &'a [u8],
}

impl<'a> PropertySet<'a> {
    /// Reads a set.
    pub(super) fn read(reader: &mut Decoder<'a>) -> Result<PropertySet<'a>, BadXdr> {
        let count = reader.u32("rdma_props")?;
        let (start, rest) = (reader.at(), reader.rest());
        for _ in 0..count {
            Property::read(reader)?;
        }
        Ok(PropertySet { count, bytes: rest.get(..reader.at() - start).unwrap_or_default() })
    }

    /// Reads a set from all of `bytes`. Checks known properties by revision, and that none is repeated.
    pub fn parse(bytes: &'a [u8], revision: Revision) -> Result<PropertySet<'a>, BadXdr> {
        let mut reader = Decoder::new(bytes);
        let set = PropertySet::read(&mut reader)?;
        set.check_known(revision, 0)?;
        match reader.rest() {
            [] => Ok(set),
            _ => Err(BadXdr { what: "end of rdma_props", at: reader.at() }),
        }
    }

    /// Checks that known properties have this revision's form, and that none is repeated: its value would be ambiguous.
    /// `at` is the offset of the set. Errors contain the offset of the property.
    pub(crate) fn check_known(&self, revision: Revision, mut at: usize) -> Result<(), BadXdr> {
        at += 4;
        let mut seen = 0_u32;
        for property in self.iter() {
            property.check(revision).map_err(|bad| BadXdr { at, ..bad })?;
            if let Some(id) = PropertyId::of_revision(property.which, revision) {
                let bit = PropertyId::ALL.iter().position(|&known| known == id).map_or(0, |index| 1 << index);
                if seen & bit != 0 {
                    return Err(BadXdr { what: id.name(), at });
                }
                seen |= bit;
            }
            at += property.encoded_len();
        }
        Ok(())
    }

    /// The properties. Repeated properties appear repeatedly.
    pub fn iter(&self) -> impl Iterator<Item = Property<'a>> + Clone + use<'a> {
        let mut reader = Decoder::new(self.bytes);
        (0..self.count).map_while(move |_| Property::read(&mut reader).ok())
    }

    /// Number of properties.
    pub const fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether the set is empty.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of the set on the wire.
    pub const fn encoded_len(&self) -> usize {
        4 + self.bytes.len()
    }

    pub(crate) fn emit(&self, out: &mut Encoder<'_>) -> Result<(), EncodeError> {
        out.u32(self.count)?;
        out.bytes(self.bytes)
    }
}

/// Writes properties one by one into the caller's buffer.
///
/// ```
/// use rpcrdma_proto::wire::properties::{Builder, PropertyId};
/// let mut buffer = [0; 64];
/// let set = Builder::new(&mut buffer).uint32(PropertyId::ReceiveSize.code(), 8192)?.finish();
/// assert_eq!(set.iter().next().unwrap().uint32(), Some(8192));
/// # Ok::<(), rpcrdma_proto::wire::EncodeError>(())
/// ```
#[derive(Debug)]
pub struct Builder<'b> {
    out: Encoder<'b>,
    count: u32,
}

impl<'b> Builder<'b> {
    /// An empty set in `buffer`.
    pub const fn new(buffer: &'b mut [u8]) -> Self {
        Builder { out: Encoder::new(buffer), count: 0 }
    }

    /// Adds a property in its wire form.
    pub fn property(mut self, property: Property<'_>) -> Result<Self, EncodeError> {
        property.emit(&mut self.out)?;
        self.count += 1;
        Ok(self)
    }

    /// Adds a one-word property.
    pub fn uint32(self, which: u32, value: u32) -> Result<Self, EncodeError> {
        self.property(Property { which, data: &value.to_be_bytes() })
    }

    /// Adds an opaque property.
    pub fn opaque(mut self, which: u32, value: &[u8]) -> Result<Self, EncodeError> {
        self.out.words([which, 4 + padded(value.len()) as u32])?;
        self.out.opaque(value, usize::MAX)?;
        self.count += 1;
        Ok(self)
    }

    /// The set.
    pub fn finish(self) -> PropertySet<'b> {
        PropertySet { count: self.count, bytes: self.out.into_written() }
    }
}

with_defaults! {
    /// All known properties of a set, as one value.
    ///
    /// Default: the defaults of version 2 §5.2, without experimental properties.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Properties<'a> {
        /// [`PropertyId::SendSize`], bytes.
        pub send_size: u32 = 4096,
        /// [`PropertyId::ReceiveSize`], bytes.
        pub receive_size: u32 = 4096,
        /// [`PropertyId::SegmentSize`], bytes.
        pub segment_size: u32 = 1_048_576,
        /// [`PropertyId::SegmentCount`].
        pub segment_count: u32 = 16,
        /// [`PropertyId::ReverseSupport`].
        pub reverse_support: ReverseSupport = ReverseSupport::Inline,
        /// [`PropertyId::HostAuth`]. `None` without a message.
        pub host_auth: Option<&'a [u8]> = None,
        /// [`PropertyId::WindowedCredits`] is offered.
        pub windowed_credits: bool = false,
        /// [`PropertyId::OptionalType`] is offered.
        pub optional_type: bool = false,
        /// [`PropertyId::RemoteInvalidation`].
        pub remote_invalidation: bool = false,
    }
}

impl<'a> Properties<'a> {
    /// The values of `set`. Unknown properties are ignored. The last of repeated properties counts, but
    /// [`PropertySet::parse`] refuses repeated ones.
    pub fn from_set(set: &PropertySet<'a>, revision: Revision) -> Result<Properties<'a>, BadXdr> {
        let mut properties = Properties::default();
        for property in set.iter() {
            properties.apply(&property, revision)?;
        }
        Ok(properties)
    }

    /// Applies one property of an update. Returns its identifier, or `None` if unknown.
    pub fn apply(&mut self, property: &Property<'a>, revision: Revision) -> Result<Option<PropertyId>, BadXdr> {
        property.check(revision)?;
        let Some(id) = PropertyId::of_revision(property.which, revision) else { return Ok(None) };
        let default = Properties::default();
        let value = property.uint32();
        match id {
            PropertyId::SendSize => self.send_size = value.unwrap_or(default.send_size),
            PropertyId::ReceiveSize => self.receive_size = value.unwrap_or(default.receive_size),
            PropertyId::SegmentSize => self.segment_size = value.unwrap_or(default.segment_size),
            PropertyId::SegmentCount => self.segment_count = value.unwrap_or(default.segment_count),
            PropertyId::ReverseSupport => {
                self.reverse_support = value.map_or(default.reverse_support, ReverseSupport::from_code);
            }
            PropertyId::HostAuth => self.host_auth = property.opaque(),
            PropertyId::WindowedCredits => self.windowed_credits = value == Some(1),
            PropertyId::OptionalType => self.optional_type = value == Some(1),
            PropertyId::RemoteInvalidation => self.remote_invalidation = value == Some(1),
        }
        Ok(Some(id))
    }

    /// Writes the set. It contains the properties of the specification's table that the revision has. Experimental
    /// values and the authentication message are written only if they differ from the default.
    pub fn emit<'b>(&self, buffer: &'b mut [u8], revision: Revision) -> Result<PropertySet<'b>, EncodeError> {
        let words = [
            (PropertyId::SendSize, self.send_size, true),
            (PropertyId::ReceiveSize, self.receive_size, true),
            (PropertyId::SegmentSize, self.segment_size, true),
            (PropertyId::SegmentCount, self.segment_count, true),
            (PropertyId::ReverseSupport, self.reverse_support.code(), true),
            (PropertyId::WindowedCredits, 1, self.windowed_credits),
            (PropertyId::OptionalType, 1, self.optional_type),
            (PropertyId::RemoteInvalidation, 1, self.remote_invalidation),
        ];
        let mut builder = Builder::new(buffer);
        for (id, value, wanted) in words {
            if let Some(which) = id.which(revision).filter(|_| wanted) {
                builder = builder.uint32(which, value)?;
            }
        }
        if let (Some(message), Some(which)) = (self.host_auth, PropertyId::HostAuth.which(revision)) {
            builder = builder.opaque(which, message)?;
        }
        Ok(builder.finish())
    }
}

/// A subset of a property set. Bit `n` represents property `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Subset<'a> {
    words: &'a [[u8; 4]],
}

impl<'a> Subset<'a> {
    pub(super) fn read(reader: &mut Decoder<'a>, what: &'static str) -> Result<Subset<'a>, BadXdr> {
        Ok(Subset { words: reader.words(what)? })
    }

    pub(super) fn emit(&self, out: &mut Encoder<'_>) -> Result<(), EncodeError> {
        out.u32(self.words.len() as u32)?;
        out.bytes(self.words.as_flattened())
    }

    /// Encodes a subset of these positions into `buffer`. It takes four bytes per 32 positions, up to the highest
    /// position.
    pub fn encode(positions: impl IntoIterator<Item = usize>, buffer: &'a mut [u8]) -> Result<Subset<'a>, EncodeError> {
        buffer.fill(0);
        let available = buffer.len();
        let (words, _) = buffer.as_chunks_mut::<4>();
        let mut len = 0;
        for position in positions {
            let index = position / 32;
            let word = words.get_mut(index).ok_or(EncodeError::new(4 * (index + 1), available))?;
            *word = (u32::from_be_bytes(*word) | 1 << (position % 32)).to_be_bytes();
            len = len.max(index + 1);
        }
        let words: &'a [[u8; 4]] = words;
        Ok(Subset { words: &words[..len] })
    }

    /// Whether the subset contains property `position`. Omitted words count as zero.
    pub fn contains(&self, position: usize) -> bool {
        self.words.get(position / 32).is_some_and(|word| u32::from_be_bytes(*word) >> (position % 32) & 1 == 1)
    }

    /// The positions in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..32 * self.words.len()).filter(|position| self.contains(*position))
    }

    /// Bytes of the subset on the wire.
    pub const fn encoded_len(&self) -> usize {
        4 + 4 * self.words.len()
    }
}
