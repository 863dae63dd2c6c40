//! The peer's calls that are being served.

use super::free_list::FreeList;

/// A call of the peer, until it is answered. Stale ones never name a newer call; the default names none.
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

/// What must be remembered to answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Inbound {
    pub(super) xid: u32,
    generation: u32,
    live: bool,
}

/// Slots of served calls: two for each call that the peer may have under way, as version 1 tolerates twice as many.
#[derive(Debug)]
pub(super) struct InboundTable {
    slots: Vec<Inbound>,
    free: FreeList,
}

impl InboundTable {
    /// For so many calls under way.
    pub(super) fn new(calls: usize) -> Self {
        let capacity = 2 * calls;
        Self { slots: vec![Inbound::default(); capacity], free: FreeList::new(capacity) }
    }

    /// Where slots and links begin: the first ones are used most.
    #[inline]
    pub(super) fn first_places(&self) -> [*const u8; 2] {
        [self.slots.as_ptr().cast(), self.free.first_place()]
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, xid: u32) -> Option<InboundId> {
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        let generation = slot.generation.wrapping_add(1);
        *slot = Inbound { xid, generation, live: true };
        Some(InboundId { index, generation })
    }

    pub(super) fn get(&self, id: InboundId) -> Option<&Inbound> {
        let slot = self.slots.get(id.index as usize)?;
        (slot.live && slot.generation == id.generation).then_some(slot)
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, id: InboundId) -> Option<Inbound> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if !slot.live || slot.generation != id.generation {
            return None;
        }
        slot.live = false;
        self.free.push(id.index);
        Some(*slot)
    }

    /// Whether the peer has made this call twice, and the other one is being served, too.
    pub(super) fn is_double(&self, id: InboundId) -> bool {
        let Some(call) = self.get(id) else { return false };
        self.slots.iter().filter(|slot| slot.live && slot.xid == call.xid).count() > 1
    }

    /// So many calls may be under way from now on. It never gets smaller.
    pub(super) fn fit(&mut self, calls: usize) {
        let capacity = 2 * calls;
        if capacity > self.slots.len() {
            self.slots.resize(capacity, Inbound::default());
            self.free.grow(capacity);
        }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_answered_once_and_a_stale_name_is_nobodys() {
        let mut table = InboundTable::new(1);
        let first = table.insert(7).unwrap();
        assert!(table.insert(9).is_some() && table.insert(8).is_none());
        assert_eq!(table.remove(first).map(|call| call.xid), Some(7));
        assert!(table.remove(first).is_none() && table.len() == 1, "it is answered once");
        let second = table.insert(8).unwrap();
        assert_eq!(first.index(), second.index());
        assert!(table.get(first).is_none() && table.remove(first).is_none());
        assert_eq!(table.get(second).map(|call| call.xid), Some(8));
    }

    #[test]
    fn a_call_that_is_made_twice_is_seen_while_both_are_served() {
        let mut table = InboundTable::new(3);
        let (first, other) = (table.insert(7).unwrap(), table.insert(8).unwrap());
        assert!(!table.is_double(first));
        let second = table.insert(7).unwrap();
        assert!(table.is_double(first) && table.is_double(second) && !table.is_double(other));
        table.remove(first);
        assert!(!table.is_double(first) && !table.is_double(second));
    }

    #[test]
    fn a_larger_table_has_room_for_more_and_keeps_what_it_had() {
        let mut table = InboundTable::new(1);
        let first = table.insert(7).unwrap();
        table.fit(2);
        let more = [8, 9, 10].map(|xid| table.insert(xid).unwrap());
        assert!(table.insert(11).is_none());
        assert_eq!([first, more[0], more[2]].map(|id| table.get(id).unwrap().xid), [7, 8, 10]);
        table.fit(1);
        assert_eq!((table.capacity(), table.len()), (4, 4));
    }
}
