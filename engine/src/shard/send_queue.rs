//! Send queue of a connection: work requests of this turn, signaling, completed Sends.
//!
//! One Send in several is signaled. As Sends complete in order, its completion covers those before it.

use std::collections::VecDeque;

use rpcrdma_mempool::{Buf, Lent};

use super::memory::push;
use crate::fabric::{Posting, RemoteMemory, Source, WorkRequest};

#[derive(Debug)]
pub(super) struct SendQueue {
    /// Work requests to post.
    chain: Vec<Posting>,
    /// Numbers of the last Send, the last signaled one, and the last completed one. Numbers wrap.
    sends: u32,
    signaled: u32,
    completed: u32,
    /// Whether the next Send is signaled in any case.
    signal_next: bool,
    /// Number of the last Send that follows RDMA Writes.
    writer: u32,
    /// Bytes of RDMA Writes queued so far.
    written: u64,
    /// Numbers of the Sends that follow counted RDMA Writes, and the bytes of these Writes.
    writes: VecDeque<(u32, usize)>,
}

impl SendQueue {
    pub(super) fn new() -> Self {
        Self {
            chain: Vec::with_capacity(64),
            sends: 0,
            signaled: 0,
            completed: 0,
            signal_next: false,
            writer: 0,
            written: 0,
            writes: VecDeque::new(),
        }
    }

    /// Address of the queued work requests, for a prefetch.
    #[inline]
    pub(super) fn chain_address(&self) -> *const Posting {
        self.chain.as_ptr()
    }

    /// Queues an unsignaled work request.
    #[inline]
    pub(super) fn push(&mut self, wr: WorkRequest) {
        push(&mut self.chain, || Posting { wr_id: 0, signaled: false, wr });
    }

    /// Queues a work request other than a Send, with an identifier for its completion.
    #[inline(always)]
    pub(super) fn push_named(&mut self, wr_id: u64, signaled: bool, wr: impl FnOnce() -> WorkRequest) {
        push(&mut self.chain, || Posting { wr_id, signaled, wr: wr() });
    }

    /// Signals the next Send, because calls wait for the memory that its completion returns.
    pub(super) fn signal_next_send(&mut self) {
        self.signal_next = true;
    }

    /// Queues a Send; one in `signal_every` is signaled.
    #[inline(never)]
    pub(super) fn push_send(&mut self, buf: Buf, invalidate: Option<u32>, signal_every: u32) {
        // This check comes first, so that the fast path needs no stack.
        if self.chain.len() == self.chain.capacity() {
            return self.grow_and_push_send(buf, invalidate, signal_every);
        }
        self.sends = self.sends.wrapping_add(1);
        let signaled = self.sends.wrapping_sub(self.signaled) >= signal_every || self.signal_next;
        if signaled {
            self.signaled = self.sends;
            self.signal_next = false;
        }
        let wr = WorkRequest::Send { buf, invalidate, fence: false };
        self.chain.push(Posting { wr_id: u64::from(self.sends), signaled, wr });
    }

    #[cold]
    #[inline(never)]
    fn grow_and_push_send(&mut self, buf: Buf, invalidate: Option<u32>, signal_every: u32) {
        self.chain.reserve(1);
        self.push_send(buf, invalidate, signal_every);
    }

    /// Queues a signaled RDMA Write of no bytes, which the peer's device acknowledges without a Receive or a valid key.
    /// Its completion completes all Sends before it; if it fails, the connection ends.
    pub(super) fn push_empty_write(&mut self, nothing: Lent) {
        self.sends = self.sends.wrapping_add(1);
        self.signaled = self.sends;
        let remote = RemoteMemory { rkey: 0, address: 0 };
        let wr = WorkRequest::Write { src: Source::Lent(nothing), offset: 0, len: 0, remote };
        self.chain.push(Posting { wr_id: u64::from(self.sends), signaled: true, wr });
    }

    /// Whether nothing is queued.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.chain.is_empty()
    }

    /// Queued work requests.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.chain.len()
    }

    /// Removes work requests other than Sends, queued after the first `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        debug_assert!(!self.chain[len..].iter().any(|posting| matches!(posting.wr, WorkRequest::Send { .. })));
        self.chain.truncate(len);
    }

    /// Posts the queue with `post`, which removes the work requests that the device accepts; returns their number.
    #[inline]
    pub(super) fn post<E>(&mut self, post: impl FnOnce(&mut Vec<Posting>) -> Result<(), E>) -> (usize, Result<(), E>) {
        let count = self.chain.len();
        let result = post(&mut self.chain);
        (count - self.chain.len(), result)
    }

    /// Records the completion of a signaled Send, and of all before it.
    #[inline]
    pub(super) fn send_completed(&mut self, wr_id: u64) {
        self.completed = wr_id as u32;
        if !self.writes.is_empty() {
            self.forget_written();
        }
    }

    /// Records RDMA Writes of this many bytes, queued for the next Send. With `count`,
    /// [`outstanding_writes`](Self::outstanding_writes) includes them.
    #[inline]
    pub(super) fn record_writes(&mut self, bytes: usize, count: bool) {
        self.written += bytes as u64;
        if bytes > 0 {
            self.writer = self.sends.wrapping_add(1);
        }
        if count && bytes > 0 {
            self.writes.push_back((self.sends.wrapping_add(1), bytes));
        }
    }

    /// Bytes of all RDMA Writes queued so far.
    pub(super) fn written_so_far(&self) -> u64 {
        self.written
    }

    /// Bytes that are queued and not posted yet.
    pub(super) fn unposted(&self) -> u64 {
        self.chain.iter().map(|posting| posting.wr.payload() as u64).sum()
    }

    /// Bytes of counted RDMA Writes that have not completed.
    pub(super) fn outstanding_writes(&self) -> usize {
        self.writes.iter().map(|&(_, bytes)| bytes).sum()
    }

    #[cold]
    fn forget_written(&mut self) {
        // Numbers wrap, and outstanding ones are less than half their range after the last completed one.
        let completed = self.completed;
        self.writes.retain(|&(send, _)| send.wrapping_sub(completed).cast_signed() > 0);
    }

    /// Whether Sends follow the last signaled one. No completion reports them until a later Send is signaled.
    pub(super) fn has_unsignaled(&self) -> bool {
        self.sends != self.signaled
    }

    /// Whether a signaled Send is outstanding.
    pub(super) fn awaits_completion(&self) -> bool {
        self.completed != self.signaled
    }

    /// Sends that have not completed.
    #[inline]
    pub(super) fn outstanding(&self) -> u32 {
        self.sends.wrapping_sub(self.completed)
    }

    /// Sends that have not completed, up to the last one that follows RDMA Writes.
    pub(super) fn outstanding_writers(&self) -> u32 {
        let count = self.writer.wrapping_sub(self.completed);
        if (1..=self.outstanding()).contains(&count) { count } else { 0 }
    }

    /// Numbers of the last Send, and of the last completed one. They wrap.
    pub(super) fn numbers(&self) -> (u32, u32) {
        (self.sends, self.completed)
    }

    /// Resets after the loss of the device: posted work counts as completed, and queued work is dropped.
    pub(super) fn forget_device(&mut self) {
        self.chain.clear();
        self.writes.clear();
        self.written = 0;
        (self.signaled, self.completed) = (self.sends, self.sends);
    }
}

#[cfg(test)]
mod tests {
    use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

    use super::*;

    fn pool() -> Pool {
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        Pool::new(&PoolConfig { classes: vec![Class { size: 64, count: 100 }], arena }).expect("memory")
    }

    fn buf(pool: &Pool) -> Buf {
        pool.alloc(8).expect("a buffer")
    }

    /// Identifiers of the signaled work requests.
    fn signaled(queue: &mut SendQueue) -> Vec<u64> {
        let mut ids = Vec::new();
        let (count, result) = queue.post(|chain| {
            ids.extend(chain.drain(..).filter(|posting| posting.signaled).map(|posting| posting.wr_id));
            Ok::<(), ()>(())
        });
        assert!(count > 0 && result == Ok(()) && queue.is_empty());
        ids
    }

    #[test]
    fn one_send_in_several_is_signaled_and_completes_those_before_it() {
        let (pool, mut queue) = (pool(), SendQueue { sends: u32::MAX - 2, ..SendQueue::new() });
        queue.forget_device();
        for _ in 0..7 {
            queue.push_send(buf(&pool), None, 4);
        }
        assert_eq!(queue.outstanding(), 7);
        assert_eq!(signaled(&mut queue), [1], "the fourth Send, whose number has wrapped");
        assert!(queue.has_unsignaled() && queue.awaits_completion());
        queue.send_completed(1);
        assert!(queue.has_unsignaled() && !queue.awaits_completion());
        assert_eq!((queue.outstanding(), queue.numbers()), (3, (4, 1)));
    }

    #[test]
    fn an_awaited_send_is_signaled() {
        let (pool, mut queue) = (pool(), SendQueue::new());
        for awaited in [false, true, false] {
            if awaited {
                queue.signal_next_send();
            }
            queue.push_send(buf(&pool), None, 16);
        }
        assert_eq!(signaled(&mut queue), [2]);
        assert!(queue.has_unsignaled() && queue.awaits_completion());
    }

    #[test]
    fn an_empty_write_completes_all_earlier_sends() {
        let (pool, mut queue) = (pool(), SendQueue::new());
        queue.push_send(buf(&pool), None, 16);
        assert!(queue.has_unsignaled() && !queue.awaits_completion());
        queue.push_empty_write(buf(&pool).lend().expect("lent by the owning thread"));
        assert!(!queue.has_unsignaled() && queue.awaits_completion());
        assert_eq!(signaled(&mut queue), [2]);
        queue.send_completed(2);
        assert_eq!(queue.outstanding(), 0);
    }

    #[test]
    fn written_bytes_count_until_the_next_send_completes() {
        let (pool, mut queue) = (pool(), SendQueue { sends: u32::MAX - 1, ..SendQueue::new() });
        for bytes in [0, 10, 200, 3000] {
            queue.record_writes(bytes, true);
            queue.push_send(buf(&pool), None, 16);
        }
        assert_eq!((queue.outstanding_writes(), queue.written_so_far()), (3210, 3210));
        queue.send_completed(u64::from(u32::MAX));
        assert_eq!(queue.outstanding_writes(), 3210, "no Write precedes the first Send");
        queue.send_completed(1);
        assert_eq!(queue.outstanding_writes(), 3000, "numbers wrap");
        queue.forget_device();
        assert_eq!(queue.outstanding_writes(), 0);
    }

    #[test]
    fn other_work_requests_do_not_count_as_sends_and_unposted_ones_stay_queued() {
        let (pool, mut queue) = (pool(), SendQueue::new());
        let lent = buf(&pool).lend().expect("lent by the owning thread");
        let remote = RemoteMemory { rkey: 1, address: 2 };
        let read = || WorkRequest::Read { dst: lent.clone(), offset: 0, len: 8, remote };
        queue.push_send(buf(&pool), None, 16);
        queue.push(read());
        queue.push_named(7, true, read);
        queue.truncate(2);
        assert_eq!((queue.len(), queue.outstanding()), (2, 1));
        let (count, result) = queue.post(|chain| {
            chain.drain(..1);
            Err("full")
        });
        assert_eq!((count, result, queue.len()), (1, Err("full"), 1));
        queue.forget_device();
        assert!(queue.is_empty() && queue.outstanding() == 0 && !queue.has_unsignaled());
    }
}
