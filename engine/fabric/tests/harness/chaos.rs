//! A wrapper that injects faults within the contract of a fabric.
//!
//! Requests fail, connections break, completions are late, and those of different queue pairs are reordered.
//!
//! With the same seed, the same calls meet the same faults. No request is lost: an injected failure is reported like
//! any other, in order, and the memory of its request is returned.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use super::inner;
use super::random::Xorshift;
use crate::forward::forward;
use crate::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Status, Waker, WindowId, WorkRequest,
};

/// Rates of faults. Each field except `seed` is a probability in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChaosConfig {
    /// Seed of the sequence of faults.
    pub seed: u64,
    /// Per posted Send: it fails as if the peer had posted no Receive.
    pub receiver_not_ready: u16,
    /// Per posted request: the queue pair enters the error state.
    pub flush: u16,
    /// Per posted Read or Write: it fails as if its key did not permit it.
    pub rights: u16,
    /// Per completion: it is delayed by 1 to 64 polls, as are later completions of its queue pair.
    pub delay: u16,
    /// Per poll: completions of different queue pairs are reordered.
    pub reorder: u16,
    /// Per `poll_control`: one connection breaks.
    pub disconnect: u16,
    /// Per posted chain: the send queue accepts only a part of it.
    pub queue_full: u16,
    /// Per posted chain of Receives: the queue accepts only a part of it.
    pub receives_refused: u16,
    /// Per posted Send: the device refuses it and the rest of its chain. The connection stays up.
    pub sends_refused: u16,
    /// Per posted LocalInvalidate: the device refuses it and the rest of its chain. The connection stays up.
    pub invalidations_refused: u16,
}

/// Faults injected so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChaosStats {
    /// Injected failures. The requests after a failed request are not counted.
    pub failed: u64,
    /// Late completions.
    pub delayed: u64,
    /// Polls with reordered completions.
    pub reordered: u64,
    /// Broken connections.
    pub disconnected: u64,
    /// Posted chains of requests or Receives that were accepted only in part.
    pub cut_short: u64,
}

/// A fabric with injected faults.
#[derive(Debug)]
pub struct Chaos<F> {
    inner: F,
    config: ChaosConfig,
    random: Xorshift,
    stats: ChaosStats,
    /// Connected queue pairs, in which faults may be injected.
    live: Vec<QpId>,
    /// Queue pairs with an injected failure that is not completely reported, oldest first.
    failing: Vec<FailingQp>,
    /// Queue pairs that this wrapper has broken, oldest first.
    broken: Vec<QpId>,
    /// Late completions, in order of arrival.
    late: VecDeque<LateCompletion>,
    /// Number of polls so far.
    polls: u64,
}

/// A queue pair with an injected failure.
#[derive(Debug)]
struct FailingQp {
    qp: QpId,
    /// The failed request and all later ones, with the statuses to report.
    postings: Vec<(Posting, Status)>,
    /// Completions to report for a destroyed queue pair, whose memory has been returned.
    unreported: Vec<Completion>,
    /// True once the inner fabric has flushed the queue pair's earlier requests.
    inner_has_flushed: bool,
}

/// A completion, and the number of the first poll that may report it.
#[derive(Debug)]
struct LateCompletion {
    until: u64,
    completion: Completion,
}

impl<F: Fabric> Chaos<F> {
    /// True if this wrapper itself has completions to report.
    fn is_busy(&self) -> bool {
        !self.late.is_empty() || self.failing.iter().any(|failing| failing.inner_has_flushed)
    }

    /// Wraps a fabric.
    pub fn new(inner: F, config: ChaosConfig) -> Self {
        Self {
            inner,
            config,
            random: Xorshift::new(config.seed),
            stats: ChaosStats::default(),
            live: Vec::new(),
            failing: Vec::new(),
            broken: Vec::new(),
            late: VecDeque::new(),
            polls: 0,
        }
    }

    /// Faults injected so far.
    pub fn chaos_stats(&self) -> ChaosStats {
        self.stats
    }

    /// Connections broken so far, oldest first. All others have no failed requests, but posts may still be refused.
    pub fn broken(&self) -> &[QpId] {
        &self.broken
    }

    /// The inner fabric.
    pub fn inner(&mut self) -> &mut F {
        &mut self.inner
    }

    /// Records a connected queue pair. A queue pair that this wrapper has broken stays unrecorded.
    fn record_connected(&mut self, qp: QpId) {
        if !self.live.contains(&qp) && !self.broken.contains(&qp) {
            self.live.push(qp);
        }
    }

    /// Chooses the failure to inject for this request, if any.
    fn choose_failure(&mut self, wr: &WorkRequest) -> Option<Status> {
        let failure = match wr {
            WorkRequest::Send { .. } if self.random.chance(self.config.receiver_not_ready) => {
                Some(Status::RnrRetryExceeded)
            }
            WorkRequest::Write { .. } | WorkRequest::Read { .. } if self.random.chance(self.config.rights) => {
                Some(Status::RemoteAccess)
            }
            _ => None,
        };
        failure.or_else(|| self.random.chance(self.config.flush).then_some(Status::Flushed))
    }

    /// Reports injected failures, once the inner fabric has reported all earlier requests of the queue pair.
    fn report_failures(&mut self, out: &mut Vec<Completion>, end: usize) {
        for failing in self.failing.iter_mut().filter(|failing| failing.inner_has_flushed) {
            let qp = failing.qp;
            let n = failing.unreported.len().min(end.saturating_sub(out.len()));
            out.extend(failing.unreported.drain(..n));
            let n = failing.postings.len().min(end.saturating_sub(out.len()));
            out.extend(failing.postings.drain(..n).map(|(posting, status)| failed_completion(qp, &posting, status)));
        }
        // From now on the inner queue pair is in the error state, and flushes later requests itself.
        self.failing.retain(|failing| {
            !failing.inner_has_flushed || !failing.postings.is_empty() || !failing.unreported.is_empty()
        });
    }

    /// Finds the injected failure of a queue pair.
    fn find_failing(&mut self, qp: QpId) -> Option<&mut FailingQp> {
        self.failing.iter_mut().find(|failing| failing.qp == qp)
    }

    /// Chooses whether the device refuses this request.
    fn choose_refusal(&mut self, wr: &WorkRequest) -> bool {
        match wr {
            WorkRequest::Send { .. } => self.random.chance(self.config.sends_refused),
            WorkRequest::LocalInvalidate { .. } => self.random.chance(self.config.invalidations_refused),
            _ => false,
        }
    }

    /// Posts a chain without injected failures. The device may refuse a part of the chain.
    fn post_or_refuse(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let Some(at) = chain.iter().position(|posting| self.choose_refusal(&posting.wr)) else {
            return self.post_or_cut_short(qp, chain);
        };
        self.stats.cut_short += 1;
        let mut rest = chain.split_off(at);
        let result = self.inner.post_send(qp, chain);
        chain.append(&mut rest);
        result.and(Err(PostError::Invalid("chaos")))
    }

    /// Posts a chain. The send queue may take only a part of the chain.
    fn post_or_cut_short(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        if !self.random.chance(self.config.queue_full) {
            return self.inner.post_send(qp, chain);
        }
        let mut rest = chain.split_off(self.random.below(chain.len() as u64 + 1) as usize);
        let result = self.inner.post_send(qp, chain);
        let is_full = !rest.is_empty();
        self.stats.cut_short += u64::from(is_full);
        chain.append(&mut rest);
        result.and(if is_full { Err(PostError::QueueFull) } else { Ok(()) })
    }

    /// Moves the completions after `before` to the late ones, each with its delay.
    fn delay(&mut self, out: &mut Vec<Completion>, before: usize) {
        if self.config.delay == 0 && self.late.is_empty() {
            return;
        }
        for completion in out.drain(before..) {
            let preceding =
                self.late.iter().rev().find(|late| late.completion.qp == completion.qp).map_or(0, |late| late.until);
            let own = if self.random.chance(self.config.delay) {
                self.stats.delayed += 1;
                self.polls + 1 + self.random.below(64)
            } else {
                self.polls
            };
            self.late.push_back(LateCompletion { until: own.max(preceding), completion });
        }
    }

    /// Reports late completions that are due.
    fn release_due(&mut self, out: &mut Vec<Completion>, end: usize) {
        let mut kept = VecDeque::with_capacity(self.late.len());
        for late in self.late.drain(..) {
            if late.until <= self.polls && out.len() < end {
                out.push(late.completion);
            } else {
                kept.push_back(late);
            }
        }
        self.late = kept;
    }

    /// Sometimes reorders completions of different queue pairs.
    fn reorder(&mut self, batch: &mut [Completion]) {
        if batch.len() > 1 && self.random.chance(self.config.reorder) {
            self.stats.reordered += 1;
            let salt = self.random.next();
            // The key is a random order of the queue pairs. The sort is stable, so the completions of one queue pair
            // stay in order.
            batch.sort_by_key(|c| (u64::from(c.qp.slot) + 1).wrapping_mul(salt | 1) >> 32);
        }
    }
}

fn failed_completion(qp: QpId, posting: &Posting, status: Status) -> Completion {
    Completion::ended(qp, posting.wr_id, posting.wr.opcode(), status)
}

impl<F: Fabric> Fabric for Chaos<F> {
    type Listener = F::Listener;

    fn bind(address: &FabricAddress) -> Result<Self::Listener, FabricError> {
        F::bind(address)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.live.retain(|&id| id != qp);
        self.inner.destroy_qp(qp);
        if let Some(failing) = self.find_failing(qp) {
            // After the destruction, the inner fabric reports only what it has flushed, so our failures follow at once.
            failing.inner_has_flushed = true;
            let postings = failing.postings.drain(..);
            failing.unreported.extend(postings.map(|(posting, status)| failed_completion(qp, &posting, status)));
        }
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        let before = events.len();
        self.inner.poll_control(events);
        for event in &events[before..] {
            match event {
                ControlEvent::Established { qp, .. } => self.record_connected(*qp),
                ControlEvent::Disconnected { qp, .. } => {
                    self.live.retain(|id| id != qp);
                    if let Some(failing) = self.find_failing(*qp) {
                        failing.inner_has_flushed = true;
                    }
                }
                _ => {}
            }
        }
        if !self.live.is_empty() && self.random.chance(self.config.disconnect) {
            let index = self.random.below(self.live.len() as u64) as usize;
            let broken = self.live.swap_remove(index);
            self.stats.disconnected += 1;
            self.broken.push(broken);
            self.inner.disconnect(broken);
        }
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        if !self.random.chance(self.config.receives_refused) {
            return self.inner.post_recv(qp, bufs);
        }
        self.stats.cut_short += 1;
        let mut kept = bufs.split_off(self.random.below(bufs.len() as u64 + 1) as usize);
        let taken = self.inner.post_recv(qp, bufs);
        bufs.append(&mut kept);
        taken
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        if let Some(failing) = self.find_failing(qp) {
            failing.postings.extend(chain.drain(..).map(|posting| (posting, Status::Flushed)));
            return Ok(());
        }
        let mut failed = None;
        if self.live.contains(&qp) {
            for (at, posting) in chain.iter().enumerate() {
                if let Some(status) = self.choose_failure(&posting.wr) {
                    failed = Some((at, status));
                    break;
                }
            }
        }
        let Some((at, status)) = failed else { return self.post_or_refuse(qp, chain) };
        let mut rest = chain.split_off(at);
        let result = self.inner.post_send(qp, chain);
        if result.is_err() {
            // The post has failed already, before the request that was chosen to fail.
            chain.append(&mut rest);
            return result;
        }
        self.stats.failed += 1;
        let status_of = |i| if i == 0 { status } else { Status::Flushed };
        let postings = rest.into_iter().enumerate().map(|(i, posting)| (posting, status_of(i))).collect();
        self.failing.push(FailingQp { qp, postings, unreported: Vec::new(), inner_has_flushed: false });
        self.broken.push(qp);
        self.inner.disconnect(qp);
        Ok(())
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        let end = before.saturating_add(max);
        self.polls += 1;
        let n = self.inner.poll_cq(out, max);
        // A message may arrive, and its receiver may answer it, before the event `Established`.
        for message in out[before..].iter().filter(|c| c.buf.is_some() && c.status.is_ok()) {
            self.record_connected(message.qp);
        }
        if n < max {
            self.report_failures(out, end);
        }
        self.delay(out, before);
        self.release_due(out, end);
        self.reorder(&mut out[before..]);
        out.len() - before
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let is_busy = self.is_busy();
        self.inner.wait(if is_busy { Some(Duration::ZERO) } else { timeout }) || is_busy
    }

    fn longest_wait(&self) -> Option<Duration> {
        if self.is_busy() { Some(Duration::ZERO) } else { self.inner.longest_wait() }
    }

    forward! {
        inner(self):
        fn capabilities(&self) -> &Capabilities;
        fn stats(&self) -> FabricStats;
        fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError>;
        fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError>;
        fn listen(&mut self, listener: &Self::Listener) -> Result<(), FabricError>;
        fn unlisten(&mut self);
        fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError>;
        fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError>;
        fn reject(&mut self, request: RequestId, private_data: &[u8]);
        fn disconnect(&mut self, qp: QpId);
        fn holds_sends(&mut self, qp: QpId) -> bool;
        fn flow(&mut self, qp: QpId) -> Option<Flow>;
        fn round_trip(&mut self, qp: QpId) -> Option<Duration>;
        fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError>;
        fn next_rkey(&self, window: WindowId) -> u32;
        fn remote_address(&self, mem: &Lent, offset: usize) -> u64;
        fn fence_receives(&mut self);
        fn arm(&mut self);
        fn waker(&self) -> Waker;
        fn descriptor(&self) -> BorrowedFd<'_>;
    }
}
