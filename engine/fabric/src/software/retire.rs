//! Requests that were carried out and wait for their turn to be reported.

use crate::{Opcode, Status};

/// One such request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retire {
    pub(super) wr_id: u64,
    /// Reported once the peer has taken everything before this position.
    pub(super) end: u64,
    pub(super) opcode: Opcode,
    pub(super) signalled: bool,
    pub(super) status: Status,
}

/// A queue of them, of fixed size: entered and left with every message.
#[derive(Debug)]
pub(super) struct RetireQueue {
    /// A power of two.
    places: Box<[Retire]>,
    first: usize,
    len: usize,
    signalled: usize,
}

impl RetireQueue {
    pub(super) fn new(depth: usize) -> Self {
        let nothing = Retire { wr_id: 0, end: 0, opcode: Opcode::Send, signalled: false, status: Status::Success };
        Self { places: vec![nothing; depth.next_power_of_two()].into(), first: 0, len: 0, signalled: 0 }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether one of them is waited for.
    #[inline]
    pub(super) fn has_signalled(&self) -> bool {
        self.signalled != 0
    }

    /// Enters one. The send queue's depth, which is checked at post, keeps it from running over.
    #[inline]
    pub(super) fn push(&mut self, retire: Retire) {
        debug_assert!(self.len < self.places.len(), "{} requests in {} places", self.len, self.places.len());
        let at = (self.first + self.len) & (self.places.len() - 1);
        if let Some(place) = self.places.get_mut(at) {
            *place = retire;
        }
        self.len += 1;
        self.signalled += usize::from(retire.signalled);
    }

    /// Forgets all of them; none is signalled.
    #[inline]
    pub(super) fn clear(&mut self) {
        debug_assert_eq!(self.signalled, 0);
        self.len = 0;
    }

    #[inline]
    pub(super) fn front(&self) -> Option<&Retire> {
        if self.len == 0 { None } else { self.places.get(self.first) }
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<Retire> {
        let front = *self.front()?;
        self.first = (self.first + 1) & (self.places.len() - 1);
        self.len -= 1;
        self.signalled -= usize::from(front.signalled);
        Some(front)
    }
}
