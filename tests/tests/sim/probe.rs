//! A device with an onlooker: it writes down what passes, and keeps its own account of what is exposed and of what was
//! promised, so that the engine's counts are not all there is to believe.

use std::collections::VecDeque;
use std::time::Duration;

use rpcrdma::Config;
use rpcrdma::fabric::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError,
    FabricStats, Opcode, PostError, Posting, QpId, RequestId, Waker, WindowId, WorkRequest,
};
use rpcrdma::wire::{Revision, View};
use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use crate::flow::Flow;
use crate::journal::Journal;

/// A buffer, whatever its window.
pub(crate) type Place = (ArenaId, usize);

/// What the onlooker knows of a queue pair.
#[derive(Debug)]
struct Seen {
    qp: QpId,
    /// Requests that were posted, until a completion shows that they are done.
    posted: VecDeque<Request>,
    /// Windows that the peer may use.
    bound: Vec<Bound>,
    flow: Flow,
    /// A request has failed: what it posts is not carried out any more.
    failed: bool,
}

#[derive(Debug)]
struct Request {
    opcode: Opcode,
    signalled: bool,
    window: Option<WindowId>,
}

#[derive(Debug)]
struct Bound {
    window: WindowId,
    rkey: u32,
    place: Place,
}

/// The device.
#[derive(Debug)]
pub(crate) struct Probe<F> {
    inner: F,
    journal: Journal,
    revision: Revision,
    /// Messages that a peer may have under way, at most.
    window: u32,
    /// Connections to this address are to somebody who keeps to no rule.
    hostile: Option<FabricAddress>,
    seen: Vec<Seen>,
    /// Queue pairs by the order in which they were connected.
    connected: Vec<QpId>,
    /// Receives that the inner fabric has.
    receives: u32,
}

impl<F: Fabric> Probe<F> {
    /// Looks on.
    pub(crate) fn new(inner: F, journal: Journal, config: &Config, hostile: Option<FabricAddress>) -> Self {
        let Config { revision, window, .. } = *config;
        let (seen, connected) = (Vec::new(), Vec::new());
        Self { inner, journal, revision, window, hostile, seen, connected, receives: 0 }
    }

    /// The device itself.
    pub(crate) fn inner(&self) -> &F {
        &self.inner
    }

    /// The queue pair of the connection that was started as number `index`.
    pub(crate) fn connected(&self, index: usize) -> Option<QpId> {
        self.connected.get(index).copied()
    }

    /// Whether a peer may reach this memory.
    pub(crate) fn exposes(&self, place: Place) -> bool {
        self.seen.iter().any(|seen| seen.bound.iter().any(|bound| bound.place == place))
    }

    /// Windows that peers may use.
    pub(crate) fn windows(&self) -> usize {
        self.seen.iter().map(|seen| seen.bound.len()).sum()
    }

    fn see(&mut self, qp: QpId) -> Option<&mut Seen> {
        self.seen.iter_mut().find(|seen| seen.qp == qp)
    }

    fn add(&mut self, qp: QpId, flow: Flow) {
        let seen = Seen { qp, posted: VecDeque::new(), bound: Vec::new(), flow, failed: false };
        self.seen.push(seen);
    }

    /// What is to be remembered of a request if it is posted.
    fn look(&self, posting: &Posting) -> (Request, Option<Bound>, Option<Vec<u8>>) {
        let (opcode, window, mut bound, mut message) = match &posting.wr {
            WorkRequest::Send { buf, .. } => (Opcode::Send, None, None, Some(buf.to_vec())),
            WorkRequest::Write { .. } => (Opcode::Write, None, None, None),
            WorkRequest::Read { .. } => (Opcode::Read, None, None, None),
            WorkRequest::Bind { window, mem, .. } => (Opcode::Bind, Some(*window), Some(mem), None),
            WorkRequest::LocalInvalidate { window } => (Opcode::LocalInvalidate, Some(*window), None, None),
        };
        let bound = bound.take().zip(window).map(|(mem, window)| Bound {
            window,
            rkey: self.inner.next_rkey(window),
            place: (mem.arena(), mem.base_offset()),
        });
        (Request { opcode, signalled: posting.signalled, window }, bound, message.take())
    }

    /// A request was posted.
    fn post(&mut self, qp: QpId, (request, bound, message): (Request, Option<Bound>, Option<Vec<u8>>)) {
        let length = message.as_ref().map_or(0, Vec::len);
        let mark = if request.signalled { " signalled" } else { "" };
        self.journal.note(format_args!("{qp:?} > {:?}{mark} {length}", request.opcode));
        if let Some(bound) = &bound {
            assert!(!self.exposes(bound.place), "{}: memory is exposed twice", self.journal.who());
        }
        let revision = self.revision;
        let who = self.journal.clone();
        let Some(seen) = self.see(qp) else { panic!("{}: a post to nobody", who.who()) };
        if seen.failed {
            return;
        }
        if let (Opcode::LocalInvalidate, Some(window)) = (request.opcode, request.window) {
            let known = seen.bound.iter().any(|bound| bound.window == window);
            assert!(known, "{}: it revokes a window that nobody may use", who.who());
        }
        let told = message.map_or(Ok(()), |message| seen.flow.send(&message, revision));
        if let Err(wrong) = told {
            panic!("{} {qp:?}: {wrong}", who.who());
        }
        seen.bound.extend(bound);
        seen.posted.push_back(request);
    }

    /// Messages that may come from all peers together, and Receives for them.
    pub(crate) fn promises(&self) -> (u32, u32) {
        (self.seen.iter().map(|seen| seen.flow.promised()).sum(), self.receives)
    }

    /// What was promised to each peer, and to all, must be there.
    fn check_promises(&self) {
        let (promised, _) = self.promises();
        let who = self.journal.who();
        for Seen { qp, flow, .. } in &self.seen {
            let may_come = flow.promised();
            assert!(
                may_come <= self.window + 1,
                "{who} {qp:?}: {may_come} messages in a window of {}",
                self.window
            );
        }
        assert!(
            promised <= self.receives,
            "{who}: {promised} messages may come, for {} Receives",
            self.receives
        );
    }

    fn complete(&mut self, completion: &Completion) {
        let Completion { qp, opcode, status, buf, invalidated, .. } = completion;
        let length = buf.as_ref().map_or(0, |buf| buf.len());
        let mark = if invalidated.is_some() { " invalidated" } else { "" };
        self.journal.note(format_args!("{qp:?} < {opcode:?} {status:?}{mark} {length}"));
        if let (Some(buf), true) = (buf, status.is_ok()) {
            self.journal.trace(|| describe(buf, self.revision));
        }
        self.receives -= u32::from(buf.is_some());
        let revision = self.revision;
        // Else it is late, of a queue pair that was destroyed.
        let Some(seen) = self.see(*qp) else { return };
        if !status.is_ok() {
            seen.failed = true;
        } else if let Some(buf) = buf {
            seen.flow.receive(buf, revision);
            seen.bound.retain(|bound| Some(bound.rkey) != *invalidated);
        } else {
            // In order: whatever was posted before is done.
            while let Some(request) = seen.posted.pop_front() {
                if request.opcode == Opcode::LocalInvalidate {
                    seen.bound.retain(|bound| Some(bound.window) != request.window);
                }
                if request.signalled {
                    assert_eq!(request.opcode, *opcode, "{qp:?} completes in another order");
                    break;
                }
            }
        }
    }
}

fn describe(message: &[u8], revision: Revision) -> String {
    match View::check(message, revision) {
        Ok(view) => view.to_string(),
        Err(error) => format!("{error:?}"),
    }
}

impl<F: Fabric> Fabric for Probe<F> {
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
        self.journal.note(format_args!("unlisten"));
        self.inner.unlisten();
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        let qp = self.inner.connect(address, params)?;
        self.journal.note(format_args!("{qp:?} connects"));
        self.connected.push(qp);
        let hostile = self.hostile.as_ref() == Some(address);
        self.add(qp, Flow::new(false, hostile));
        Ok(qp)
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let qp = self.inner.accept(request, params)?;
        self.journal.note(format_args!("{qp:?} accepts"));
        self.add(qp, Flow::new(true, false));
        Ok(qp)
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        self.journal.note(format_args!("rejects: {}", String::from_utf8_lossy(private_data)));
        self.inner.reject(request, private_data);
    }

    fn disconnect(&mut self, qp: QpId) {
        self.journal.note(format_args!("{qp:?} disconnect"));
        self.inner.disconnect(qp);
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.journal.note(format_args!("{qp:?} destroy"));
        self.inner.destroy_qp(qp);
        self.seen.retain(|seen| seen.qp != qp);
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        let before = events.len();
        self.inner.poll_control(events);
        for event in &events[before..] {
            match event {
                // Who it is differs from process to process.
                ControlEvent::ConnectRequest { request, .. } => {
                    self.journal.note(format_args!("{request:?} asks"));
                }
                ControlEvent::Established { qp, .. } => self.journal.note(format_args!("{qp:?} is up")),
                ControlEvent::Rejected { qp, .. } => self.journal.note(format_args!("{qp:?} is rejected")),
                ControlEvent::ConnectFailed { qp, .. } => self.journal.note(format_args!("{qp:?} failed")),
                ControlEvent::Disconnected { qp, .. } => self.journal.note(format_args!("{qp:?} is over")),
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
        let taken = self.inner.post_recv(qp, bufs);
        self.receives += taken as u32;
        taken
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let mut looks: Vec<_> = chain.iter().map(|posting| self.look(posting)).collect();
        let count = chain.len();
        let result = self.inner.post_send(qp, chain);
        looks.truncate(count - chain.len());
        for look in looks {
            self.post(qp, look);
        }
        if result.is_err() {
            self.journal.note(format_args!("{qp:?} {} left: {result:?}", chain.len()));
        }
        self.check_promises();
        result
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        let count = self.inner.poll_cq(out, max);
        for completion in &out[before..] {
            self.complete(completion);
        }
        count
    }

    fn arm(&mut self) {
        self.inner.arm();
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.inner.wait(timeout);
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}
