//! The properties that may change while connected, as values.

use crate::wire::properties::{Properties, Property, PropertyId, ReverseSupport};
use crate::wire::{BadXdr, Revision};

/// Kinds of characteristics.
pub(super) const COUNT: usize = 6;

/// A characteristic and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Characteristic {
    /// Longest message that its end sends, bytes.
    SendSize(u32),
    /// Size of the Receives that its end posts, bytes.
    ReceiveSize(u32),
    /// Longest segment that its end handles, bytes.
    SegmentSize(u32),
    /// Most segments in one header.
    SegmentCount(u32),
    /// Which requests its end takes in the reverse direction.
    ReverseSupport(ReverseSupport),
    /// Its end, as a requester, takes replies by Send With Invalidate.
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

    /// The value as it is on the wire.
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

    /// Whether the end whose value this is must tell the peer before it changes over from `before`, and else
    /// only after it has changed over.
    ///
    /// A promise that shrinks (smaller Receives, fewer segments, no more reverse calls, no more remote
    /// invalidation) is told first, and kept until the peer is known to have read it: messages that rely
    /// on it may be under way. One that grows must be true before it is told (XC §3.1). With what its end
    /// sends it is the other way round.
    pub const fn told_first(self, before: Characteristic) -> bool {
        let (now, before) = (self.word(), before.word());
        match self {
            Characteristic::SendSize(_) => now > before,
            _ => now < before,
        }
    }

    /// The characteristic in a property, with its default if there is no data; `None` if it is none.
    pub(super) fn read(property: &Property<'_>, revision: Revision) -> Result<Option<Characteristic>, BadXdr> {
        let mut value = Properties::default();
        let id = value.apply(property, revision)?;
        Ok(id.and_then(|id| Self::all(&value).into_iter().find(|value| value.id() == id)))
    }

    pub(super) const fn all(of: &Properties<'_>) -> [Characteristic; COUNT] {
        [
            Characteristic::SendSize(of.send_size),
            Characteristic::ReceiveSize(of.receive_size),
            Characteristic::SegmentSize(of.segment_size),
            Characteristic::SegmentCount(of.segment_count),
            Characteristic::ReverseSupport(of.reverse_support),
            Characteristic::RemoteInvalidation(of.remote_invalidation),
        ]
    }

    /// The value of the same kind that `properties` has.
    pub(super) fn kept_in(self, properties: &Properties<'_>) -> Characteristic {
        Self::all(properties)[index(self.id())]
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

    /// As [`store`](Self::store); true if it was another value before.
    pub(super) fn replaced_in(self, properties: &mut Properties<'_>) -> bool {
        let before = self.kept_in(properties);
        self.store(properties);
        before != self
    }
}

/// The characteristics in `properties`, and nothing else.
pub(super) fn detached(properties: &Properties<'_>) -> Properties<'static> {
    let mut detached = Properties::default();
    Characteristic::all(properties).into_iter().for_each(|value| value.store(&mut detached));
    detached
}

/// Position in [`Characteristic::all`]; [`COUNT`] for what is no characteristic.
const fn index(id: PropertyId) -> usize {
    match id {
        PropertyId::SendSize => 0,
        PropertyId::ReceiveSize => 1,
        PropertyId::SegmentSize => 2,
        PropertyId::SegmentCount => 3,
        PropertyId::ReverseSupport => 4,
        PropertyId::RemoteInvalidation => 5,
        PropertyId::HostAuth | PropertyId::WindowedCredits | PropertyId::OptionalType => COUNT,
    }
}

/// A set of kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct IdSet(u8);

impl IdSet {
    const fn bit(id: PropertyId) -> u8 {
        1 << index(id)
    }

    pub(super) const fn contains(self, id: PropertyId) -> bool {
        self.0 & Self::bit(id) != 0
    }

    /// True if it was not there.
    pub(super) const fn insert(&mut self, id: PropertyId) -> bool {
        let new = !self.contains(id);
        self.0 |= Self::bit(id);
        new
    }

    /// True if it was there.
    pub(super) const fn remove(&mut self, id: PropertyId) -> bool {
        let there = self.contains(id);
        self.0 &= !Self::bit(id);
        there
    }
}

impl FromIterator<PropertyId> for IdSet {
    fn from_iter<T: IntoIterator<Item = PropertyId>>(ids: T) -> Self {
        let mut set = IdSet::default();
        ids.into_iter().for_each(|id| _ = set.insert(id));
        set
    }
}
