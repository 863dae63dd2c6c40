//! Executed requests until the peer has taken them.

use std::collections::VecDeque;

use crate::{Opcode, Status};

/// An executed request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExecutedRequest {
    pub(super) wr_id: u64,
    /// The request is reported once the peer has taken everything before this position.
    pub(super) end: u64,
    pub(super) opcode: Opcode,
    pub(super) signaled: bool,
    pub(super) status: Status,
}

impl ExecutedRequest {
    /// Whether the request needs a completion, because it is signaled or has failed.
    #[inline]
    fn is_reported(&self) -> bool {
        self.signaled || !self.status.is_ok()
    }
}

/// A queue of executed requests, of fixed size. The completion of a request also removes all requests before it.
#[derive(Debug)]
pub(super) struct RetireQueue {
    /// The slots, whose number is a power of two.
    slots: Box<[ExecutedRequest]>,
    /// Numbers of removed and of added requests so far.
    removed: usize,
    added: usize,
    /// Requests that need a completion, by the number of requests added before each.
    reported: VecDeque<usize>,
}

impl RetireQueue {
    pub(super) fn new(depth: usize) -> Self {
        let empty =
            ExecutedRequest { wr_id: 0, end: 0, opcode: Opcode::Send, signaled: false, status: Status::Success };
        let slots = vec![empty; depth.next_power_of_two()].into();
        Self { slots, removed: 0, added: 0, reported: VecDeque::new() }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.added - self.removed
    }

    /// Whether any request needs a completion.
    #[inline]
    pub(super) fn has_reported(&self) -> bool {
        !self.reported.is_empty()
    }

    /// Adds a request. The check of the send queue's depth at post prevents an overflow.
    #[inline]
    pub(super) fn push(&mut self, request: ExecutedRequest) {
        debug_assert!(self.len() < self.slots.len(), "{} requests in {} slots", self.len(), self.slots.len());
        if request.is_reported() {
            self.add_reported();
        }
        let at = self.added & (self.slots.len() - 1);
        self.added += 1;
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = request;
        }
    }

    #[inline(never)]
    fn add_reported(&mut self) {
        self.reported.push_back(self.added);
    }

    /// Removes all requests, none of which needs a completion.
    #[inline]
    pub(super) fn clear(&mut self) {
        debug_assert!(self.reported.is_empty());
        self.removed = self.added;
    }

    fn get(&self, at: usize) -> Option<&ExecutedRequest> {
        self.slots.get(at & (self.slots.len() - 1))
    }

    /// The first request that needs a completion.
    pub(super) fn first_reported(&self) -> Option<&ExecutedRequest> {
        self.get(*self.reported.front()?)
    }

    /// Removes the first request that needs a completion, and all before it.
    pub(super) fn pop_reported(&mut self) {
        if let Some(at) = self.reported.pop_front() {
            self.removed = at + 1;
        }
    }

    /// Removes the first request, if it ends at this position or before.
    pub(super) fn pop(&mut self, until: u64) -> Option<ExecutedRequest> {
        let first = *self.get(self.removed).filter(|first| self.removed != self.added && first.end <= until)?;
        if first.is_reported() {
            self.reported.pop_front();
        }
        self.removed += 1;
        Some(first)
    }
}
