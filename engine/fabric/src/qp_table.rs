//! The queue pairs of a fabric, by slot and generation.

#![forbid(unsafe_code)]

use std::convert::Infallible;

use super::{FabricError, QpId};

/// Number of generations of a slot: 29 bits, which leave three bits of a 64-bit token free beside the slot's 32.
pub(super) const GENERATIONS: u32 = 1 << 29;

#[derive(Debug)]
struct QpSlot<Qp> {
    generation: u32,
    qp: Option<Box<Qp>>,
}

/// Queue pairs in slots, which are reused with a new generation each time.
#[derive(Debug)]
pub(super) struct QpTable<Qp> {
    slots: Vec<QpSlot<Qp>>,
    free: Vec<u32>,
}

impl<Qp> Default for QpTable<Qp> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<Qp> QpTable<Qp> {
    /// Number of queue pairs.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Creates a queue pair in a free slot. `make` gets its identifier.
    pub(super) fn insert(&mut self, make: impl FnOnce(QpId) -> Qp) -> QpId {
        let Ok(id) = self.try_insert(|id| Ok::<_, Infallible>(make(id)));
        id
    }

    /// Creates a queue pair in a free slot with a constructor that may fail.
    pub(super) fn try_insert<E>(&mut self, make: impl FnOnce(QpId) -> Result<Qp, E>) -> Result<QpId, E> {
        let slot = self.free.last().copied().unwrap_or(self.slots.len() as u32);
        let generation = self.slots.get(slot as usize).map_or(0, |entry| entry.generation);
        let id = QpId { slot, generation };
        let entry = QpSlot { generation, qp: Some(Box::new(make(id)?)) };
        match self.free.pop() {
            Some(_) => self.slots[slot as usize] = entry,
            None => self.slots.push(entry),
        }
        Ok(id)
    }

    pub(super) fn remove(&mut self, id: QpId) -> Option<Box<Qp>> {
        let entry = self.slots.get_mut(id.slot as usize).filter(|s| s.generation == id.generation)?;
        let qp = entry.qp.take()?;
        entry.generation = (entry.generation + 1) % GENERATIONS;
        self.free.push(id.slot);
        Some(qp)
    }

    /// The queue pair with this identifier, for changes.
    #[inline]
    pub(super) fn get_mut(&mut self, id: QpId) -> Option<&mut Qp> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        if slot.generation == id.generation { slot.qp.as_deref_mut() } else { None }
    }

    /// The queue pair with this identifier, for changes; an error if there is none.
    ///
    /// # Errors
    /// No queue pair has this identifier.
    pub(super) fn require_mut(&mut self, id: QpId) -> Result<&mut Qp, FabricError> {
        self.get_mut(id).ok_or_else(|| FabricError::misuse(format_args!("unknown queue pair {id:?}")))
    }

    /// The queue pair with this identifier.
    #[inline]
    pub(super) fn get(&self, id: QpId) -> Option<&Qp> {
        let slot = self.slots.get(id.slot as usize)?;
        if slot.generation == id.generation { slot.qp.as_deref() } else { None }
    }

    /// The current queue pair of a slot, for changes.
    #[inline]
    pub(super) fn get_by_slot_mut(&mut self, slot: u32) -> Option<&mut Qp> {
        self.slots.get_mut(slot as usize)?.qp.as_deref_mut()
    }

    /// The current queue pair of a slot.
    pub(super) fn get_by_slot(&self, slot: u32) -> Option<&Qp> {
        self.slots.get(slot as usize)?.qp.as_deref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Qp> {
        self.slots.iter().filter_map(|s| s.qp.as_deref())
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Qp> {
        self.slots.iter_mut().filter_map(|s| s.qp.as_deref_mut())
    }
}
