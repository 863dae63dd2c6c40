//! Executed requests that wait for their completion.

use std::collections::VecDeque;

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

impl Retire {
    /// Its end is reported: it is signalled, or has failed.
    #[inline]
    fn is_reported(&self) -> bool {
        self.signalled || !self.status.is_ok()
    }
}

/// A queue of them, of fixed size: entered with every message. One that is reported takes those before it along.
#[derive(Debug)]
pub(super) struct RetireQueue {
    /// A power of two.
    places: Box<[Retire]>,
    /// Numbers of removed and of added requests.
    left: usize,
    entered: usize,
    /// Those to report, by their count at entry.
    reported: VecDeque<usize>,
}

impl RetireQueue {
    pub(super) fn new(depth: usize) -> Self {
        let nothing = Retire { wr_id: 0, end: 0, opcode: Opcode::Send, signalled: false, status: Status::Success };
        let places = vec![nothing; depth.next_power_of_two()].into();
        Self { places, left: 0, entered: 0, reported: VecDeque::new() }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entered - self.left
    }

    /// Whether any request needs a completion.
    #[inline]
    pub(super) fn has_reported(&self) -> bool {
        !self.reported.is_empty()
    }

    /// Adds a request. The check of the send queue's depth at post prevents an overflow.
    #[inline]
    pub(super) fn push(&mut self, retire: Retire) {
        debug_assert!(self.len() < self.places.len(), "{} requests in {} places", self.len(), self.places.len());
        if retire.is_reported() {
            self.note_reported();
        }
        let at = self.entered & (self.places.len() - 1);
        self.entered += 1;
        if let Some(place) = self.places.get_mut(at) {
            *place = retire;
        }
    }

    #[inline(never)]
    fn note_reported(&mut self) {
        self.reported.push_back(self.entered);
    }

    /// Removes all requests, none of which needs a completion.
    #[inline]
    pub(super) fn clear(&mut self) {
        debug_assert!(self.reported.is_empty());
        self.left = self.entered;
    }

    fn get(&self, at: usize) -> Option<&Retire> {
        self.places.get(at & (self.places.len() - 1))
    }

    /// The first request that needs a completion.
    pub(super) fn first_reported(&self) -> Option<&Retire> {
        self.get(*self.reported.front()?)
    }

    /// Removes the first request that needs a completion, and all before it.
    pub(super) fn pop_reported(&mut self) {
        if let Some(at) = self.reported.pop_front() {
            self.left = at + 1;
        }
    }

    /// Removes the first request, if it ends at this position or before.
    pub(super) fn pop(&mut self, until: u64) -> Option<Retire> {
        let first = *self.get(self.left).filter(|first| self.left != self.entered && first.end <= until)?;
        if first.is_reported() {
            self.reported.pop_front();
        }
        self.left += 1;
        Some(first)
    }
}
