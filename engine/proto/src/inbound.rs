//! The peer's calls that this side serves.

/// Identifier of a peer's call until it is answered.
///
/// A stale identifier never names a newer call. The default names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct InboundId {
    index: u32,
    generation: u32,
}

impl InboundId {
    /// The slot: dense and reused, below the table's capacity.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// Slot of a call: the data for its answer.
#[derive(Clone, Copy, Debug)]
struct InboundSlot {
    xid: u32,
    /// Generation of the current call, or of the next.
    generation: u32,
    /// In a free slot, the next free slot or [`NO_SLOT`]; in a used slot, [`IN_SERVICE`] or [`WITH_CHUNKS`].
    next: u32,
}

/// [`InboundSlot::next`] of the last free slot. No slot has this index, nor one of the two below.
const NO_SLOT: u32 = u32::MAX;
/// [`InboundSlot::next`] of a call in service without chunk lists.
const IN_SERVICE: u32 = u32::MAX - 1;
/// [`InboundSlot::next`] of a call in service with a chunk list.
const WITH_CHUNKS: u32 = u32::MAX - 2;

/// The peer's calls. There are two slots per concurrent call, because in version 1 a peer may have twice as many calls
/// as credits. Free slots form a list, with the last freed slot first.
#[derive(Debug)]
pub struct InboundTable {
    slots: Vec<InboundSlot>,
    /// The first free slot, or [`NO_SLOT`].
    free: u32,
    /// Calls in service, which are not answered yet.
    in_service: usize,
    /// Calls in service with chunk lists.
    with_chunks: usize,
}

impl InboundTable {
    /// A table for `calls` concurrent calls.
    pub(super) fn new(calls: usize) -> Self {
        let mut table = Self { slots: Vec::new(), free: NO_SLOT, in_service: 0, with_chunks: 0 };
        table.grow_to(calls);
        table
    }

    /// Address of the first slots, for prefetching: most messages use them.
    #[inline]
    pub fn hot_address(&self) -> *const u8 {
        self.slots.as_ptr().cast()
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, xid: u32, has_chunks: bool) -> Option<InboundId> {
        let index = self.free;
        // In a full table `free` is `NO_SLOT`, which is no index.
        let slot = self.slots.get_mut(index as usize)?;
        self.free = slot.next;
        (slot.xid, slot.next) = (xid, if has_chunks { WITH_CHUNKS } else { IN_SERVICE });
        self.in_service += 1;
        self.with_chunks += usize::from(has_chunks);
        Some(InboundId { index, generation: slot.generation })
    }

    /// The XID of a call in service.
    pub(super) fn xid(&self, id: InboundId) -> Option<u32> {
        let slot = self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation)?;
        Some(slot.xid)
    }

    /// Removes a call, and returns its XID.
    #[inline(always)]
    pub(super) fn remove(&mut self, id: InboundId) -> Option<u32> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.generation = slot.generation.wrapping_add(1);
        self.with_chunks -= usize::from(slot.next == WITH_CHUNKS);
        slot.next = self.free;
        self.free = id.index;
        self.in_service -= 1;
        Some(slot.xid)
    }

    /// Whether the peer sent this call twice, and both are in service.
    pub fn is_duplicate(&self, id: InboundId) -> bool {
        let Some(xid) = self.xid(id) else { return false };
        let in_service = |slot: &&InboundSlot| matches!(slot.next, IN_SERVICE | WITH_CHUNKS);
        self.slots.iter().filter(in_service).filter(|slot| slot.xid == xid).count() > 1
    }

    /// Grows the table to `calls` concurrent calls. It never shrinks.
    pub(super) fn grow_to(&mut self, calls: usize) {
        let capacity = 2 * calls;
        let old = self.slots.len();
        if capacity > old {
            // New slots are used first, the lowest before the others.
            let next = |slot: usize| if slot + 1 == capacity { self.free } else { slot as u32 + 1 };
            self.slots.extend((old..capacity).map(|slot| InboundSlot { xid: 0, generation: 1, next: next(slot) }));
            self.free = old as u32;
        }
    }

    /// Unanswered calls, including those with queued replies.
    #[inline]
    pub fn len(&self) -> usize {
        self.in_service
    }

    /// Unanswered calls that came with chunk lists.
    pub fn with_chunks(&self) -> usize {
        self.with_chunks
    }

    /// Slots; see [`InboundId::index`].
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Whether all calls are answered.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_answered_once_and_a_stale_identifier_is_unknown() {
        let mut table = InboundTable::new(1);
        let first = table.insert(7, false).unwrap();
        assert!(table.insert(9, false).is_some() && table.insert(8, false).is_none());
        assert_eq!(table.remove(first), Some(7));
        assert!(table.remove(first).is_none() && table.len() == 1, "it is answered once");
        let second = table.insert(8, false).unwrap();
        assert_eq!(first.index(), second.index());
        assert!(table.xid(first).is_none() && table.remove(first).is_none());
        assert_eq!(table.xid(second), Some(8));
    }

    #[test]
    fn a_duplicate_call_is_detected_while_both_are_served() {
        let mut table = InboundTable::new(3);
        let (first, other) = (table.insert(7, false).unwrap(), table.insert(8, false).unwrap());
        assert!(!table.is_duplicate(first));
        let second = table.insert(7, false).unwrap();
        assert!(table.is_duplicate(first) && table.is_duplicate(second) && !table.is_duplicate(other));
        table.remove(first);
        assert!(!table.is_duplicate(first) && !table.is_duplicate(second));
    }

    #[test]
    fn a_larger_table_keeps_its_entries() {
        let mut table = InboundTable::new(1);
        let first = table.insert(7, false).unwrap();
        table.grow_to(2);
        let more = [8, 9, 10].map(|xid| table.insert(xid, false).unwrap());
        assert!(table.insert(11, false).is_none());
        assert_eq!([first, more[0], more[2]].map(|id| table.xid(id).unwrap()), [7, 8, 10]);
        table.grow_to(1);
        assert_eq!((table.capacity(), table.len()), (4, 4));
    }

    #[test]
    fn calls_with_chunks_are_counted_until_they_are_answered() {
        let mut table = InboundTable::new(1);
        let inline = table.insert(1, false).unwrap();
        let chunked = table.insert(1, true).unwrap();
        assert!(table.is_duplicate(inline) && table.is_duplicate(chunked));
        assert_eq!((table.len(), table.with_chunks()), (2, 1));
        assert_eq!((table.remove(inline), table.with_chunks()), (Some(1), 1));
        assert_eq!((table.remove(chunked), table.with_chunks()), (Some(1), 0));
        assert!(table.remove(chunked).is_none() && table.with_chunks() == 0);
    }
}
