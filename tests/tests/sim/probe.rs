//! A device wrapper that checks the engine's counts of exposed memory, credits and message sizes.
//!
//! The probe keeps its own counts, from all requests and completions.

use std::collections::VecDeque;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma::auth::AuthPolicy;
use rpcrdma::fabric::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Opcode, PostError, Posting, QpId, RequestId, Waker, WindowId, WorkRequest,
};
use rpcrdma::wire::{Revision, Version, View};
use rpcrdma::{Config, CreditMode};
use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use crate::caller::Addresses;
use crate::census::Census;
use crate::flow::FlowControl;
use crate::journal::Journal;
use crate::sizes::{Sizes, SmallestReceive};

/// Identifies a buffer by its arena and its offset there.
pub(crate) type BufferId = (ArenaId, usize);

/// State of a queue pair, as far as the probe observes it.
#[derive(Debug)]
struct QpRecord {
    qp: QpId,
    /// Posted requests that no completion covers yet.
    posted: VecDeque<Request>,
    /// Windows that the peer may use.
    bound: Vec<Bound>,
    flow: FlowControl,
    sizes: Sizes,
    census: Census,
    /// Whether a request has failed, so that the device executes no later one.
    failed: bool,
    /// At a client: the group that it connects to.
    group: Option<usize>,
    established: bool,
    /// How the connection ended, if it has ended.
    end: Option<End>,
}

/// The end of a connection, as a device observes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// This side has closed the connection.
    Own,
    /// The peer or the network has ended the connection.
    Other,
    /// The server refused the connection, because the server lacked Receives.
    NoReceives,
}

/// Numbers of connections that the peer or the network ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LossCounts {
    /// Number of connections that ended after they were established.
    pub(crate) after_established: u64,
    /// Number of connections that ended before they were established.
    pub(crate) before_established: u64,
}

#[derive(Debug)]
struct Request {
    opcode: Opcode,
    signaled: bool,
    window: Option<WindowId>,
}

/// A bound window.
#[derive(Debug)]
struct Bound {
    window: WindowId,
    rkey: u32,
    buffer: BufferId,
}

#[derive(Debug)]
pub(crate) struct Probe<F> {
    inner: F,
    journal: Journal,
    revision: Revision,
    /// The version that this side prefers.
    version: Version,
    /// Whether this side, as a server, accepts version 1. Version 1 cannot authenticate.
    accepts_version_1: bool,
    /// Whether this side accepts calls.
    serves: bool,
    /// Whether hostile peers may connect to this side.
    has_hostile_clients: bool,
    /// Messages that a peer may have outstanding at first.
    credits: u32,
    /// Maximum messages that a peer may ever have outstanding.
    max_credits: u32,
    /// By group: its address.
    groups: Vec<FabricAddress>,
    /// Address of the hostile server.
    hostile: Option<FabricAddress>,
    records: Vec<QpRecord>,
    /// Number of Receives that are posted to the inner fabric and have not completed.
    receives: u32,
    /// Private data of connect requests.
    requests: Vec<(RequestId, Vec<u8>)>,
    /// Number of connections that have ended.
    ends: u64,
    /// Connections that the peer or the network ended: the group, and whether the connection was established.
    lost: Vec<(QpId, usize, bool)>,
    /// Number of established connections that this side destroyed without a disconnect.
    destroyed_unclosed: u64,
}

impl<F: Fabric + SmallestReceive> Probe<F> {
    pub(crate) fn new(
        inner: F,
        journal: Journal,
        config: &Config,
        addresses: Option<&Addresses>,
        (serves, has_hostile_clients): (bool, bool),
    ) -> Self {
        let groups: Vec<_> = addresses
            .map_or_else(Vec::new, |all| all.groups.iter().map(|group| group.fabric_address().clone()).collect());
        Self {
            inner,
            journal,
            revision: config.debug.revision,
            version: if config.wire.credit_mode == CreditMode::V1 { Version::V1 } else { Version::V2 },
            accepts_version_1: config.wire.version_1 && !matches!(config.wire.host_auth, AuthPolicy::Required(_)),
            serves,
            has_hostile_clients,
            credits: config.limits.credits,
            // Version 1 counts each direction separately. Version 2 allows one more message, a pure grant.
            max_credits: config.limits.credits.max(config.limits.max_credits) + config.debug.reverse_credits.max(4) + 1,
            lost: Vec::new(),
            groups,
            hostile: addresses.map(|all| all.hostile.fabric_address().clone()),
            records: Vec::new(),
            receives: 0,
            requests: Vec::new(),
            ends: 0,
            destroyed_unclosed: 0,
        }
    }

    pub(crate) fn inner(&self) -> &F {
        &self.inner
    }

    pub(crate) fn ends(&self) -> u64 {
        self.ends
    }

    /// Connections to a group that the peer or the network ended, except those in `broken`, which chaos broke here.
    pub(crate) fn losses(&self, group: usize, broken: &[QpId]) -> LossCounts {
        let mut losses = LossCounts::default();
        let of_group = self.lost.iter().filter(|(qp, qp_group, _)| *qp_group == group && !broken.contains(qp));
        for (_, _, established) in of_group {
            *if *established { &mut losses.after_established } else { &mut losses.before_established } += 1;
        }
        losses
    }

    /// Number of established connections that this side destroyed without a disconnect.
    pub(crate) fn destroyed_unclosed(&self) -> u64 {
        self.destroyed_unclosed
    }

    /// Whether a peer may reach this memory.
    pub(crate) fn exposes(&self, buffer: BufferId) -> bool {
        self.records.iter().any(|record| record.bound.iter().any(|bound| bound.buffer == buffer))
    }

    /// Number of windows that peers may use.
    pub(crate) fn windows(&self) -> usize {
        self.records.iter().map(|record| record.bound.len()).sum()
    }

    fn record_of(&mut self, qp: QpId) -> Option<&mut QpRecord> {
        self.records.iter_mut().find(|record| record.qp == qp)
    }

    fn add_record(&mut self, qp: QpId, server: bool, hostile: bool, group: Option<usize>, sizes: Sizes) {
        let mut flow = FlowControl::new(server, hostile, self.serves, self.version);
        flow.accepts_version_1 = self.accepts_version_1;
        self.records.push(QpRecord {
            qp,
            posted: VecDeque::new(),
            bound: Vec::new(),
            flow,
            sizes,
            census: Census::new(server, self.credits),
            failed: false,
            group,
            established: false,
            end: None,
        });
    }

    /// Removes a connection's record, and counts how the connection ended.
    fn remove_record(&mut self, qp: QpId) {
        let Some(at) = self.records.iter().position(|record| record.qp == qp) else { return };
        let QpRecord { established, end, group, .. } = self.records.remove(at);
        self.ends += 1;
        match (end, group) {
            (None, _) => self.destroyed_unclosed += u64::from(established),
            (Some(End::Other), Some(group)) => self.lost.push((qp, group, established)),
            _ => {}
        }
    }

    /// Records how a connection ended, unless an earlier end is known.
    fn record_end(&mut self, qp: QpId, end: End) {
        if let Some(record) = self.record_of(qp) {
            record.end.get_or_insert(end);
        }
    }

    /// Describes a request before the post consumes it: the request, the window that it binds, and its message.
    fn describe_request(&self, posting: &Posting) -> (Request, Option<Bound>, Option<Vec<u8>>) {
        let (opcode, window, memory, message) = match &posting.wr {
            WorkRequest::Send { buf, .. } => (Opcode::Send, None, None, Some(buf.to_vec())),
            WorkRequest::Write { .. } => (Opcode::Write, None, None, None),
            WorkRequest::Read { .. } => (Opcode::Read, None, None, None),
            WorkRequest::Bind { window, mem, .. } => (Opcode::Bind, Some(*window), Some(mem), None),
            WorkRequest::LocalInvalidate { window } => (Opcode::LocalInvalidate, Some(*window), None, None),
        };
        let bound = memory.zip(window).map(|(mem, window)| Bound {
            window,
            rkey: self.inner.next_rkey(window),
            buffer: (mem.arena(), mem.base_offset()),
        });
        (Request { opcode, signaled: posting.signaled, window }, bound, message)
    }

    /// Records a posted request, and checks its exposure or its message.
    fn record_post(&mut self, qp: QpId, (request, bound, message): (Request, Option<Bound>, Option<Vec<u8>>)) {
        let length = message.as_ref().map_or(0, Vec::len);
        let mark = if request.signaled { " signaled" } else { "" };
        self.journal.note(format_args!("{qp:?} > {:?}{mark} {length}", request.opcode));
        if let Some(bound) = &bound {
            assert!(!self.exposes(bound.buffer), "{}: memory is exposed twice", self.journal.participant());
        }
        let revision = self.revision;
        let journal = self.journal.clone();
        let Some(record) = self.record_of(qp) else {
            panic!("{}: a post to an unknown queue pair", journal.participant())
        };
        if record.failed {
            return;
        }
        if let (Opcode::LocalInvalidate, Some(window)) = (request.opcode, request.window) {
            // A hostile peer may revoke a window that belongs to another call, before this side has processed that.
            let is_bound = record.bound.iter().any(|bound| bound.window == window) || record.flow.is_hostile();
            assert!(is_bound, "{}: only a bound window may be invalidated", journal.participant());
        }
        let checked = message.map_or(Ok(()), |message| {
            record.census.count_message(&message, revision, &journal);
            record.flow.send(&message, revision)?;
            record.sizes.send(&message, revision, record.flow.sent())
        });
        if let Err(violation) = checked {
            panic!("{} {qp:?}: {violation}", journal.participant());
        }
        record.bound.extend(bound);
        record.posted.push_back(request);
    }

    /// Returns the number of messages that all peers together may send, and the number of posted Receives.
    pub(crate) fn promised_and_posted(&self) -> (u32, u32) {
        (self.records.iter().map(|record| record.flow.promised()).sum(), self.receives)
    }

    /// Checks that every Receive has room for any message that a peer may send.
    fn check_sizes(&mut self) {
        let Some(smallest) = self.inner.smallest_receive() else { return };
        for QpRecord { qp, flow, sizes, .. } in &self.records {
            let promised = sizes.promised(flow.negotiated());
            let participant = self.journal.participant();
            assert!(
                promised <= smallest,
                "{participant} {qp:?}: the peer may send {promised} bytes, a Receive has {smallest}"
            );
        }
    }

    /// Checks that Receives are large enough, that no peer may send more than `max_credits` messages, and that there is
    /// a posted Receive for each message that all peers together may send.
    fn check_promises(&mut self) {
        self.check_sizes();
        let (promised, _) = self.promised_and_posted();
        let participant = self.journal.participant();
        for QpRecord { qp, flow, .. } in &self.records {
            let (count, max) = (flow.promised(), self.max_credits);
            assert!(count <= max, "{participant} {qp:?}: the peer may send {count} messages, at most {max} expected");
        }
        assert!(
            promised <= self.receives,
            "{participant}: peers may send {promised} messages to {} Receives",
            self.receives
        );
    }

    /// Records a completion, and removes the requests and windows that it shows to be finished.
    fn record_completion(&mut self, completion: &Completion) {
        let Completion { qp, opcode, status, buf, invalidated, .. } = completion;
        let length = buf.as_ref().map_or(0, |buf| buf.len());
        let mark = if invalidated.is_some() { " invalidated" } else { "" };
        self.journal.note(format_args!("{qp:?} < {opcode:?} {status:?}{mark} {length}"));
        if let (Some(buf), true) = (buf, status.is_ok()) {
            self.journal.trace(|| describe(buf, self.revision));
        }
        self.receives -= u32::from(buf.is_some());
        let revision = self.revision;
        // A delayed completion of a destroyed queue pair has no record.
        let Some(record) = self.record_of(*qp) else { return };
        if !status.is_ok() {
            record.failed = true;
            record.end.get_or_insert(End::Other);
        } else if let Some(buf) = buf {
            record.flow.receive(buf, revision);
            record.sizes.receive(buf, revision, record.flow.received());
            record.bound.retain(|bound| Some(bound.rkey) != *invalidated);
        } else {
            // Completions are in order, so this one also covers all earlier unsignaled requests.
            while let Some(request) = record.posted.pop_front() {
                if request.opcode == Opcode::LocalInvalidate {
                    record.bound.retain(|bound| Some(bound.window) != request.window);
                }
                if request.signaled {
                    assert_eq!(request.opcode, *opcode, "{qp:?} must complete requests in order");
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

impl<F: Fabric + SmallestReceive> Fabric for Probe<F> {
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
        let hostile = self.hostile.as_ref() == Some(address);
        let group = self.groups.iter().position(|group| group == address);
        self.add_record(qp, false, hostile, group, Sizes::new(false, &params.private_data, &[], hostile));
        Ok(qp)
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let qp = self.inner.accept(request, params)?;
        self.journal.note(format_args!("{qp:?} accepts"));
        let index = self.requests.iter().position(|(known, _)| *known == request);
        let theirs = index.map(|at| self.requests.swap_remove(at).1).unwrap_or_default();
        let sizes = Sizes::new(true, &params.private_data, &theirs, self.has_hostile_clients);
        self.add_record(qp, true, false, None, sizes);
        Ok(qp)
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        self.journal.note(format_args!("rejects: {}", String::from_utf8_lossy(private_data)));
        self.inner.reject(request, private_data);
    }

    fn disconnect(&mut self, qp: QpId) {
        self.journal.note(format_args!("{qp:?} disconnect"));
        self.record_end(qp, End::Own);
        self.inner.disconnect(qp);
    }

    fn holds_sends(&mut self, qp: QpId) -> bool {
        self.inner.holds_sends(qp)
    }

    fn flow(&mut self, qp: QpId) -> Option<rpcrdma::fabric::Flow> {
        self.inner.flow(qp)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.journal.note(format_args!("{qp:?} destroy"));
        self.inner.destroy_qp(qp);
        self.remove_record(qp);
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        let before = events.len();
        self.inner.poll_control(events);
        for event in &events[before..] {
            match event {
                // Omits the peer's address, which differs from process to process.
                ControlEvent::ConnectRequest { request, private_data, .. } => {
                    self.requests.push((*request, private_data.clone()));
                    self.journal.note(format_args!("{request:?} arrives"));
                }
                ControlEvent::Established { qp, private_data } => {
                    self.journal.note(format_args!("{qp:?} is established"));
                    if let Some(record) = self.record_of(*qp) {
                        record.established = true;
                        if !private_data.is_empty() {
                            record.sizes.set_peer_private_data(private_data);
                        }
                    }
                }
                ControlEvent::Rejected { qp, private_data } => {
                    self.journal.note(format_args!("{qp:?} is rejected"));
                    let no_receives = private_data == b"no receives left";
                    self.record_end(*qp, if no_receives { End::NoReceives } else { End::Other });
                }
                ControlEvent::ConnectFailed { qp, .. } => {
                    self.journal.note(format_args!("{qp:?} failed"));
                    self.record_end(*qp, End::Other);
                }
                ControlEvent::Disconnected { qp, .. } => {
                    self.journal.note(format_args!("{qp:?} has ended"));
                    self.record_end(*qp, End::Other);
                }
                ControlEvent::Device(event) => self.journal.note(format_args!("{event}")),
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
        self.check_sizes();
        taken
    }

    fn fence_receives(&mut self) {
        self.inner.fence_receives();
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        let mut requests: Vec<_> = chain.iter().map(|posting| self.describe_request(posting)).collect();
        let count = chain.len();
        let result = self.inner.post_send(qp, chain);
        if let Err(PostError::NotConnected) = result {
            self.record_end(qp, End::Other);
        }
        requests.truncate(count - chain.len());
        for request in requests {
            self.record_post(qp, request);
        }
        if result.is_err() {
            self.journal.note(format_args!("{qp:?}: {} requests not posted: {result:?}", chain.len()));
        }
        self.check_promises();
        result
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        let count = self.inner.poll_cq(out, max);
        for completion in &out[before..] {
            self.record_completion(completion);
        }
        count
    }

    fn arm(&mut self) {
        self.inner.arm();
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.inner.descriptor()
    }

    fn longest_wait(&self) -> Option<Duration> {
        self.inner.longest_wait()
    }
}
