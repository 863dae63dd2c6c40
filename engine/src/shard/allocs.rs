//! Threads of clients that wait for memory for a chunk: in order of arrival for each connection, until a buffer is free
//! or the connection ends.

use std::collections::VecDeque;

use rpcrdma_mempool::Buf;

use super::{ConnRef, Shard};
use crate::fabric::Fabric;
use crate::handoff::slot::Completer;
use crate::proto::CallError;

/// What answers one of them. Dropped, it says that the shard has stopped.
type Answer = Completer<Result<Buf, CallError>>;

/// Those that wait.
#[derive(Default)]
pub(super) struct AllocQueue {
    waiting: VecDeque<(ConnRef, usize, Answer)>,
    /// Connections whose first in line found no buffer in this turn.
    blocked: Vec<ConnRef>,
}

impl AllocQueue {
    /// Memory that other threads let go wakes nobody: the shard looks for it.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

impl<F: Fabric> Shard<F> {
    /// Memory for a chunk, as soon as there is some. What the connection never has is an error at once.
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

    /// Answers those for whom there is memory now, and those whose connection has ended. Returns how many these are.
    pub(super) fn turn_allocs(&mut self) -> usize {
        if self.allocs.is_empty() {
            return 0;
        }
        let mut queue = std::mem::take(&mut self.allocs);
        let before = queue.waiting.len();
        for _ in 0..before {
            let Some((conn, len, answer)) = queue.waiting.pop_front() else { break };
            // Nobody overtakes.
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

    /// `None` while there is none.
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
