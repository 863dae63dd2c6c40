//! The properties that may change while connected, as values.

use std::collections::BTreeSet;

use crate::wire::properties::{Properties, Property, PropertyId, ReverseSupport};
use crate::wire::{BadXdr, Revision};

/// Kinds of characteristics.
pub(super) const COUNT: usize = 6;

/// A characteristic and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Characteristic {
    /// Longest message that the announcing end sends, in bytes.
    SendSize(u32),
    /// Size of the Receives that the announcing end posts, in bytes.
    ReceiveSize(u32),
    /// Longest segment that the announcing end handles, in bytes.
    SegmentSize(u32),
    /// Maximum segments in one header.
    SegmentCount(u32),
    /// Requests that the announcing end accepts in the reverse direction.
    ReverseSupport(ReverseSupport),
    /// Whether the announcing end, as a requester, accepts Send With Invalidate.
    RemoteInvalidation(bool),
}

impl Characteristic {
    /// The property.
    pub const fn id(self) -> PropertyId {
        match self {
            Characteristic::SendSize(_) => PropertyId::SendSize,
            Characteristic::ReceiveSize(_) => PropertyId::ReceiveSize,
            Characteristic::SegmentSize(_) => PropertyId::SegmentSize,
            Characteristic::SegmentCount(_) => PropertyId::SegmentCount,
            Characteristic::ReverseSupport(_) => PropertyId::ReverseSupport,
            Characteristic::RemoteInvalidation(_) => PropertyId::RemoteInvalidation,
        }
    }

    /// The value in wire form.
    pub const fn word(self) -> u32 {
        match self {
            Characteristic::SendSize(value)
            | Characteristic::ReceiveSize(value)
            | Characteristic::SegmentSize(value)
            | Characteristic::SegmentCount(value) => value,
            Characteristic::ReverseSupport(level) => level.code(),
            Characteristic::RemoteInvalidation(yes) => yes as u32,
        }
    }

    /// The characteristic that a property sets. Empty data means the default. `None` for other properties.
    pub(super) fn read(property: &Property<'_>, revision: Revision) -> Result<Option<Characteristic>, BadXdr> {
        let mut value = Properties::default();
        let id = value.apply(property, revision)?;
        Ok(id.and_then(|id| Self::all(&value).into_iter().find(|value| value.id() == id)))
    }

    pub(super) const fn all(properties: &Properties<'_>) -> [Characteristic; COUNT] {
        [
            Characteristic::SendSize(properties.send_size),
            Characteristic::ReceiveSize(properties.receive_size),
            Characteristic::SegmentSize(properties.segment_size),
            Characteristic::SegmentCount(properties.segment_count),
            Characteristic::ReverseSupport(properties.reverse_support),
            Characteristic::RemoteInvalidation(properties.remote_invalidation),
        ]
    }

    /// The characteristic of the same kind in `properties`.
    pub(super) fn value_in(self, properties: &Properties<'_>) -> Characteristic {
        Self::all(properties).into_iter().find(|value| value.id() == self.id()).unwrap_or(self)
    }

    pub(super) fn store(self, properties: &mut Properties<'_>) {
        match self {
            Characteristic::SendSize(value) => properties.send_size = value,
            Characteristic::ReceiveSize(value) => properties.receive_size = value,
            Characteristic::SegmentSize(value) => properties.segment_size = value,
            Characteristic::SegmentCount(value) => properties.segment_count = value,
            Characteristic::ReverseSupport(level) => properties.reverse_support = level,
            Characteristic::RemoteInvalidation(yes) => properties.remote_invalidation = yes,
        }
    }

    /// [Stores](Self::store) the value. True if `properties` had another one.
    pub(super) fn replace_in(self, properties: &mut Properties<'_>) -> bool {
        let before = self.value_in(properties);
        self.store(properties);
        before != self
    }
}

/// A set of kinds of characteristics.
pub(super) type IdSet = BTreeSet<PropertyId>;
