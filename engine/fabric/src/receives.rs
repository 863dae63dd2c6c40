//! A receive queue in this process's memory, and completions of failed Receives.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use rpcrdma_mempool::{ArenaId, Buf};

use crate::{Completion, Opcode, QpId, ReceivedBuf, Status};

impl Completion {
    /// The completion of a Receive that got no message, or one that did not fit.
    pub(crate) fn failed_receive(qp: QpId, status: Status, buf: Buf) -> Self {
        let buf = Some(ReceivedBuf::new(buf, 0));
        Self { wr_id: 0, qp, opcode: Opcode::Recv, status, buf, invalidated: None }
    }
}

/// Posted receives. The last one posted is warmest in the cache, and is used first.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    bufs: Vec<Buf>,
    /// Receives posted after a fence, which are used after the ones in `bufs`.
    after_fence: Vec<Buf>,
    is_fenced: bool,
    depth: usize,
}

impl ReceiveQueue {
    /// An empty queue of `depth` places.
    pub(crate) fn new(depth: usize) -> Self {
        Self { bufs: Vec::with_capacity(depth), after_fence: Vec::new(), is_fenced: false, depth }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.bufs.is_empty() && self.after_fence.is_empty()
    }

    /// Takes the next receive.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Buf> {
        self.bufs.pop().or_else(|| self.pop_after_fence())
    }

    /// Takes the first receive that was posted after the fence, and ends the fence.
    #[cold]
    fn pop_after_fence(&mut self) -> Option<Buf> {
        self.is_fenced = false;
        std::mem::swap(&mut self.bufs, &mut self.after_fence);
        self.bufs.pop()
    }

    /// Number of free places.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.depth.saturating_sub(self.bufs.len() + self.after_fence.len())
    }

    /// Adds receives, at most as many as there is [`room`](Self::room) for.
    #[inline]
    pub(crate) fn post(&mut self, bufs: impl Iterator<Item = Buf>) {
        if self.is_fenced { self.after_fence.extend(bufs) } else { self.bufs.extend(bufs) }
    }

    /// Posts buffers from the front of `bufs`, while there is room and their arenas are registered, and returns their
    /// number. If `ended` names the queue pair, which has ended, the buffers are flushed instead.
    #[inline]
    pub(crate) fn post_registered(
        &mut self,
        bufs: &mut Vec<Buf>,
        is_registered: impl Fn(ArenaId) -> bool,
        ended: Option<QpId>,
        ready: &mut VecDeque<Completion>,
    ) -> usize {
        let room = bufs.len().min(self.room());
        let n = bufs[..room].iter().take_while(|buf| is_registered(buf.arena())).count();
        match ended {
            None if n == bufs.len() && !self.is_fenced => self.bufs.append(bufs),
            None => self.post(bufs.drain(..n)),
            Some(qp) => ready.extend(bufs.drain(..n).map(|buf| Completion::failed_receive(qp, Status::Flushed, buf))),
        }
        n
    }

    /// Makes the receives posted so far precede later ones.
    pub(crate) fn fence(&mut self) {
        // The older receives are now last in `bufs`, and are used first.
        self.after_fence.append(&mut self.bufs);
        std::mem::swap(&mut self.bufs, &mut self.after_fence);
        self.is_fenced = true;
    }

    /// All posted receives.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Buf> {
        self.bufs.iter().chain(&self.after_fence)
    }

    /// Takes all posted receives.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Buf> + '_ {
        self.bufs.drain(..).chain(self.after_fence.drain(..))
    }
}
