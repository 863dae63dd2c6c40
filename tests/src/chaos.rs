//! A fabric that misbehaves as devices may: seeded, so that a failure comes again with its seed.

use std::collections::VecDeque;
use std::time::Duration;

use rpcrdma::fabric::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError,
    FabricStats, Opcode, PostError, Posting, QpId, RequestId, Status, Waker, WindowId,
};
use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use crate::data::Random;

/// How often what goes wrong: once in so many times; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chaos {
    /// Polls whose completions come later, and all behind them.
    pub delay: usize,
    /// Posts that find the queue full after a part.
    pub queue_full: usize,
    /// Receives that are not taken.
    pub receives_refused: usize,
    /// Polls in which a connection ends by itself.
    pub disconnect: usize,
    /// Polls in which a work request fails.
    pub failure: usize,
}

/// See the page of this module.
pub struct ChaosFabric<F> {
    inner: F,
    chaos: Chaos,
    random: Random,
    /// Completions that come later.
    held: VecDeque<Completion>,
    /// Empty polls until they do.
    wait: usize,
    live: Vec<QpId>,
}

impl<F: Fabric> ChaosFabric<F> {
    /// Wraps a fabric.
    pub fn new(inner: F, chaos: Chaos, seed: u64) -> Self {
        Self { inner, chaos, random: Random::new(seed), held: VecDeque::new(), wait: 0, live: Vec::new() }
    }

    fn victim(&mut self) -> Option<QpId> {
        if self.live.is_empty() { None } else { Some(self.live[self.random.below(self.live.len())]) }
    }
}

impl<F: Fabric> Fabric for ChaosFabric<F> {
    type Listener = F::Listener;

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn stats(&self) -> FabricStats {
        self.inner.stats()
    }
    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        self.inner.register(arena, access)
    }
    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        self.inner.deregister(arena)
    }
    fn bind(address: &FabricAddress) -> Result<Self::Listener, FabricError> {
        F::bind(address)
    }
    fn listen(&mut self, listener: &Self::Listener) -> Result<(), FabricError> {
        self.inner.listen(listener)
    }
    fn unlisten(&mut self) {
        self.inner.unlisten();
    }
    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.inner.connect(address, params)
    }
    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        self.inner.accept(request, params)
    }
    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        self.inner.reject(request, private_data);
    }
    fn disconnect(&mut self, qp: QpId) {
        self.inner.disconnect(qp);
    }
    fn destroy_qp(&mut self, qp: QpId) {
        self.live.retain(|&live| live != qp);
        self.inner.destroy_qp(qp);
    }
    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        let before = events.len();
        self.inner.poll_control(events);
        for event in &events[before..] {
            if let ControlEvent::Established { qp, .. } = event {
                self.live.push(*qp);
            }
        }
    }
    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        self.inner.alloc_window(qp)
    }
    fn next_rkey(&self, window: WindowId) -> u32 {
        self.inner.next_rkey(window)
    }
    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        self.inner.remote_address(mem, offset)
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let refused = if self.random.once_in(self.chaos.receives_refused) {
            self.random.below(bufs.len() + 1)
        } else {
            0
        };
        let kept = bufs.split_off(bufs.len() - refused);
        let took = self.inner.post_recv(qp, bufs);
        bufs.extend(kept);
        took
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        if !self.random.once_in(self.chaos.queue_full) {
            return self.inner.post_send(qp, chain);
        }
        let rest = chain.split_off(self.random.below(chain.len() + 1));
        let result = self.inner.post_send(qp, chain);
        let full = !rest.is_empty();
        chain.extend(rest);
        result.and(if full { Err(PostError::QueueFull) } else { Ok(()) })
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        if self.wait > 0 {
            self.wait -= 1;
            return 0;
        }
        let ready = self.held.len().min(max);
        out.extend(self.held.drain(..ready));
        self.inner.poll_cq(out, max - ready);
        if self.random.once_in(self.chaos.delay) {
            // Later, and everything behind them too: the order stays.
            let keep = before + self.random.below(out.len() - before + 1);
            let late: Vec<_> = out.drain(keep..).collect();
            for completion in late.into_iter().rev() {
                self.held.push_front(completion);
            }
            self.wait = self.random.below(50);
        }
        if self.random.once_in(self.chaos.disconnect)
            && let Some(qp) = self.victim()
        {
            self.inner.disconnect(qp);
        }
        if out.len() - before < max
            && self.random.once_in(self.chaos.failure)
            && let Some(qp) = self.victim()
        {
            let status = Status::RetryExceeded;
            out.push(Completion { wr_id: 0, qp, opcode: Opcode::Send, status, buf: None, invalidated: None });
        }
        out.len() - before
    }

    fn arm(&mut self) {
        self.inner.arm();
    }
    fn wait(&mut self, timeout: Option<Duration>) {
        // What is held back wakes nobody.
        let held = !self.held.is_empty() || self.wait > 0;
        self.inner.wait(if held { Some(Duration::ZERO) } else { timeout });
    }
    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}
