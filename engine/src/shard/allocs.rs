//! Queues of client threads that wait for chunk memory.
//!
//! Waiters are served in order for each connection and size of buffer. A wait ends when a buffer is free, the waiter
//! abandons it, or the connection closes.

use std::collections::VecDeque;

use rpcrdma_mempool::Buf;

use super::clock::nanoseconds;
use super::{ConnRef, Shard};
use crate::cross_thread::slot::Completer;
use crate::fabric::Fabric;
use crate::proto::CallError;

/// Answers a waiter. Dropped, it reports that the shard has stopped.
type Answer = Completer<Result<Buf, CallError>>;

/// Waiters of one connection for buffers of one size, oldest first.
struct Line {
    conn: ConnRef,
    /// Bytes of the smallest buffers that hold the requests.
    size: usize,
    waiting: VecDeque<(usize, Answer)>,
}

/// Waiters. Each connection has memory of its own, so no connection waits for another.
#[derive(Default)]
pub(super) struct AllocQueue {
    /// No line is empty between turns. Longer buffers come first: shorter requests may use them.
    lines: Vec<Line>,
    /// Time of the next removal of abandoned waits, in nanoseconds.
    sweep_at: u64,
}

impl AllocQueue {
    /// Memory freed by other threads wakes nobody: the shard polls.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    fn push(&mut self, conn: ConnRef, size: usize, len: usize, answer: Answer) {
        let line = match self.lines.iter().position(|line| line.conn == conn && line.size == size) {
            Some(at) => &mut self.lines[at],
            None => {
                let at = self.lines.partition_point(|line| line.size >= size);
                self.lines.insert(at, Line { conn, size, waiting: VecDeque::new() });
                &mut self.lines[at]
            }
        };
        line.waiting.push_back((len, answer));
    }

    /// Removes abandoned waits.
    #[cold]
    fn sweep(&mut self) {
        self.lines.iter_mut().for_each(|line| line.waiting.retain(|(_, answer)| !answer.is_abandoned()));
        self.lines.retain(|line| !line.waiting.is_empty());
    }
}

impl<F: Fabric> Shard<F> {
    /// Queues a wait for chunk memory. An impossible length fails at once.
    pub(super) fn alloc_later(&mut self, conn: ConnRef, len: usize, answer: Answer) {
        let sizes = self.cx.config.memory.bulk_buffers.iter().map(|&(size, _)| size);
        let Some(size) = sizes.filter(|&size| size >= len).min() else {
            return answer.complete(Err(self.cx.config.lacks_exposed_buffer(len)));
        };
        // Behind other waiters it waits for this turn's end: they may want the same buffer.
        if !self.allocs.lines.iter().any(|line| line.conn == conn) {
            match self.alloc_exposed(conn, len) {
                Err(CallError::NoMemory { .. }) => {}
                Err(CallError::Closed) if self.cx.conns.has(conn) => {}
                result => return answer.complete(result),
            }
        }
        self.allocs.push(conn, size, len, answer);
    }

    /// Answers waiters with memory, and those of closed connections. Returns their number.
    pub(super) fn turn_allocs(&mut self) -> usize {
        if self.allocs.is_empty() {
            return 0;
        }
        let mut queue = std::mem::take(&mut self.allocs);
        let now = self.cx.clock.of_turn();
        if now >= queue.sweep_at {
            queue.sweep();
            queue.sweep_at = now.saturating_add(nanoseconds(self.cx.config.poll.control_interval));
        }
        let mut answered = 0;
        for Line { conn, waiting, .. } in &mut queue.lines {
            // No overtaking.
            while let Some((len, answer)) = waiting.pop_front() {
                if answer.is_abandoned() {
                    continue;
                }
                let Some(result) = self.alloc_again(*conn, len) else {
                    waiting.push_front((len, answer));
                    break;
                };
                answer.complete(result);
                answered += 1;
            }
        }
        queue.lines.retain(|line| !line.waiting.is_empty());
        self.allocs = queue;
        answered
    }

    /// Retries for a waiter; `None` without memory.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cross_thread::slot::{Ticket, oneshot};
    use crate::shard::SimulatedTime;
    use crate::shard::testing::{NoDevice, open_conn, small};

    type Wait = Ticket<Result<Buf, CallError>>;

    /// A shard with a connection that has a buffer of each of two sizes.
    fn shard() -> (Shard<NoDevice>, ConnRef, SimulatedTime) {
        let mut config = small();
        config.memory.bulk_buffers = vec![(4096, 1), (65536, 1)];
        let mut shard = Shard::open(NoDevice::default(), config, None).expect("memory");
        let time = SimulatedTime::default();
        shard.simulate(&time);
        let conn = open_conn(0, false);
        let name = ConnRef(conn.qp());
        shard.cx.conns.insert(conn);
        (shard, name, time)
    }

    fn ask(shard: &mut Shard<NoDevice>, conn: ConnRef, len: usize) -> Wait {
        let (wait, answer) = oneshot();
        shard.alloc_later(conn, len, answer);
        wait
    }

    fn got(wait: &mut Wait) -> Option<Result<usize, CallError>> {
        wait.try_take().map(|answer| answer.expect("the shard runs").map(|buf| buf.capacity()))
    }

    #[test]
    fn a_wait_blocks_neither_another_size_nor_an_impossible_one() {
        let (mut shard, conn, _) = shard();
        let long = shard.alloc_exposed(conn, 65536).expect("the only one");
        let mut waits = ask(&mut shard, conn, 65536);
        let impossible = got(&mut ask(&mut shard, conn, 65537));
        assert!(matches!(impossible, Some(Err(CallError::TooLong { .. }))), "{impossible:?}");
        let mut short = ask(&mut shard, conn, 1);
        assert_eq!((shard.turn_allocs(), got(&mut short)), (1, Some(Ok(4096))));
        assert_eq!((shard.turn_allocs(), got(&mut waits)), (0, None));
        // The long buffer goes to the waiter that needs it, in any order of the buffers.
        let short = shard.alloc_exposed(conn, 1).expect("the short one");
        let mut later = ask(&mut shard, conn, 1);
        drop(long);
        assert_eq!((shard.turn_allocs(), got(&mut waits), got(&mut later)), (1, Some(Ok(65536)), None));
        assert_eq!((shard.turn_allocs(), got(&mut later)), (1, Some(Ok(65536))));
        drop(short);
        assert!(shard.allocs.is_empty());
    }

    #[test]
    fn an_abandoned_wait_leaves_the_queue_before_a_buffer_is_free() {
        let (mut shard, conn, time) = shard();
        let _long = shard.alloc_exposed(conn, 65536).expect("the only one");
        let mut waits = ask(&mut shard, conn, 65536);
        let others: Vec<_> = (0..1000).map(|_| ask(&mut shard, conn, 65536)).collect();
        assert_eq!((shard.turn_allocs(), shard.allocs.lines[0].waiting.len()), (0, 1001));
        drop(others);
        time.advance(shard.cx.config.poll.control_interval);
        shard.cx.clock.read();
        assert_eq!((shard.turn_allocs(), shard.allocs.lines[0].waiting.len()), (0, 1));
        assert_eq!(got(&mut waits), None);
    }
}
