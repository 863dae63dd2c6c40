//! Free slots of a table.

/// Numbers of free slots, last freed first. Taking and returning follow at most one link.
#[derive(Clone, Debug)]
pub(super) struct FreeList {
    /// For each free slot, the next free one.
    links: Box<[u32]>,
    first: u32,
    len: usize,
}

/// No slot has this number.
const NONE: u32 = u32::MAX;

impl FreeList {
    /// Slots 0 to `capacity`, all free; the lowest is used first.
    pub(super) fn new(capacity: usize) -> Self {
        let mut list = Self { links: Box::new([]), first: NONE, len: 0 };
        list.grow(capacity);
        list
    }

    /// Grows to `capacity` slots; new ones are free and used first.
    pub(super) fn grow(&mut self, capacity: usize) {
        let old = self.links.len();
        let mut links = std::mem::take(&mut self.links).into_vec();
        links.resize(capacity.max(old), NONE);
        self.links = links.into();
        for slot in (old..capacity).rev() {
            self.push(slot as u32);
        }
    }

    /// Start of the links.
    #[inline]
    pub(super) fn first_place(&self) -> *const u8 {
        self.links.as_ptr().cast()
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<u32> {
        let slot = self.first;
        // `NONE` has no link.
        self.first = *self.links.get(slot as usize)?;
        self.len -= 1;
        Some(slot)
    }

    /// Returns a used slot.
    #[inline]
    pub(super) fn push(&mut self, slot: u32) {
        if let Some(link) = self.links.get_mut(slot as usize) {
            *link = self.first;
            self.first = slot;
            self.len += 1;
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_is_given_out_once_and_the_last_freed_first() {
        let mut list = FreeList::new(3);
        assert_eq!([list.pop(), list.pop(), list.pop(), list.pop()], [Some(0), Some(1), Some(2), None]);
        list.push(0);
        list.push(2);
        assert_eq!((list.len(), list.pop()), (2, Some(2)));
        list.grow(5);
        list.grow(4);
        assert_eq!(list.len(), 3);
        assert_eq!([list.pop(), list.pop(), list.pop(), list.pop()], [Some(3), Some(4), Some(0), None]);
    }
}
