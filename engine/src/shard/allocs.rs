//! Client threads that wait for chunk memory: in order for each connection, until a buffer is free or the connection
//! closes.

use std::collections::VecDeque;

use rpcrdma_mempool::Buf;

use super::{ConnRef, Shard};
use crate::fabric::Fabric;
use crate::handoff::slot::Completer;
use crate::proto::CallError;

/// Answers a waiter. Dropped, it reports that the shard has stopped.
type Answer = Completer<Result<Buf, CallError>>;

/// Waiters.
#[derive(Default)]
pub(super) struct AllocQueue {
    waiting: VecDeque<(ConnRef, usize, Answer)>,
    /// Connections whose first waiter found no buffer in this turn.
    blocked: Vec<ConnRef>,
}

impl AllocQueue {
    /// Memory freed by other threads wakes nobody: the shard polls.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

impl<F: Fabric> Shard<F> {
    /// Queues a wait for chunk memory. An impossible size fails at once.
    pub(super) fn alloc_later(&mut self, conn: ConnRef, len: usize, answer: Answer) {
        if !self.allocs.waiting.iter().any(|(other, ..)| *other == conn) {
            match self.alloc_exposed(conn, len) {
                Err(CallError::NoMemory { .. }) => {}
                Err(CallError::Closed) if self.cx.conns.has(conn) => {}
                result => return answer.complete(result),
            }
        }
        self.allocs.waiting.push_back((conn, len, answer));
    }

    /// Answers waiters with memory, and those of closed connections. Returns their number.
    pub(super) fn turn_allocs(&mut self) -> usize {
        if self.allocs.is_empty() {
            return 0;
        }
        let mut queue = std::mem::take(&mut self.allocs);
        let before = queue.waiting.len();
        for _ in 0..before {
            let Some((conn, len, answer)) = queue.waiting.pop_front() else { break };
            // No overtaking.
            let result = if queue.blocked.contains(&conn) { None } else { self.alloc_again(conn, len) };
            match result {
                Some(result) => answer.complete(result),
                None => {
                    queue.blocked.push(conn);
                    queue.waiting.push_back((conn, len, answer));
                }
            }
        }
        queue.blocked.clear();
        let answered = before - queue.waiting.len();
        self.allocs = queue;
        answered
    }

    /// `None` without memory.
    fn alloc_again(&mut self, conn: ConnRef, len: usize) -> Option<Result<Buf, CallError>> {
        match self.cx.conns.get(conn) {
            Some(of) if of.requests.has_exposed_pool() => of.requests.alloc(len).map(Ok),
            None if self.cx.conns.has(conn) => None,
            _ => match self.alloc_exposed(conn, len) {
                Err(CallError::NoMemory { .. }) => None,
                result => Some(result),
            },
        }
    }
}
