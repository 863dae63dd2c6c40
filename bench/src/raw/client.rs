//! Client of the raw tests: work requests as a [`Target`].
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rpcrdma::fabric::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, Opcode, PostError, Posting, QpId,
    RemoteMemory, Source, WorkRequest,
};
use rpcrdma_config::print_error;
use rpcrdma_mempool::{Buf, Lent, Pool};

use super::hello::{Hello, MAX_MEMORY, SIGNAL_EVERY, Welcome};
use super::memory::{alloc, registered_pool};
use crate::cli::RawOp;
use crate::failure::Failure;
use crate::idle::Idler;
use crate::target::Target;

/// Completions per poll.
const POLL_BATCH: usize = 64;
/// Fewest receives in a posted chain.
const REFILL_AT: usize = 16;
/// Time limit for establishing a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of the Send after a Write, and of its answer.
const NOTIFICATION: usize = 8;

/// One size of one raw test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSpec {
    pub(crate) op: RawOp,
    /// Measures round trips instead of bandwidth.
    pub(crate) round_trips: bool,
    /// Payload in bytes.
    pub(crate) size: usize,
    /// Connections.
    pub(crate) qps: u32,
    /// Outstanding operations per connection.
    pub(crate) depth: u32,
    /// Work requests per completion.
    pub(crate) cq_mod: u32,
    /// Posts the work requests of one poll as one chain.
    pub(crate) batch: bool,
}

impl RawSpec {
    /// Halves the depth until its memory is within the limit.
    pub(crate) fn with_affordable_depth(mut self) -> Self {
        while self.depth > 1 && self.memory().is_none_or(|bytes| bytes > MAX_MEMORY / 2) {
            self.depth /= 2;
        }
        self
    }

    /// Memory of one side for all connections, in bytes.
    fn memory(&self) -> Option<usize> {
        self.hello().memory()?.checked_mul(self.qps as usize)
    }

    /// Whether the peer answers: a Send by its echo, and a Write by an answer to the Send that follows it.
    fn is_answered(&self) -> bool {
        self.round_trips && self.op != RawOp::Read
    }

    fn hello(&self) -> Hello {
        let message = match (self.op, self.round_trips) {
            (RawOp::Send, _) => self.size,
            (RawOp::Write, true) => NOTIFICATION,
            (RawOp::Write, false) | (RawOp::Read, _) => 0,
        };
        let exposed = if self.op == RawOp::Send { 0 } else { self.size };
        Hello {
            message: message as u32,
            echo: self.is_answered(),
            depth: self.depth,
            exposed: exposed as u64,
            batch: self.batch,
        }
    }
}

/// Connections to a raw server.
pub(crate) struct RawTarget<F: Fabric> {
    fabric: F,
    spec: RawSpec,
    hello: Hello,
    messages: Pool,
    links: Vec<Link>,
    /// Index into `links`, by slot of the queue pair.
    by_slot: Vec<usize>,
    /// Links with a non-empty chain.
    gathered: Vec<usize>,
    idler: Idler,
    completions: Vec<Completion>,
    events: Vec<ControlEvent>,
    // This field is the last, so that it is dropped last, because the buffers of `links` return to the pool.
    _local: Option<Pool>,
}

struct Link {
    qp: QpId,
    chain: Vec<Posting>,
    /// Buffers to post as receives.
    unposted: Vec<Buf>,
    /// Tokens of outstanding operations, which complete in this order.
    tokens: VecDeque<u32>,
    begun: u64,
    ended: u64,
    remote: RemoteMemory,
    /// Source of Writes or target of Reads.
    local: Option<Lent>,
    welcome: Option<Welcome>,
}

impl<F: Fabric> RawTarget<F> {
    /// Connects, and waits for the welcome of each connection.
    pub(crate) fn connect(
        mut fabric: F,
        address: &FabricAddress,
        spec: RawSpec,
        idler: Idler,
    ) -> Result<Self, Failure> {
        let hello = spec.hello();
        let qps = spec.qps as usize;
        let messages = registered_pool(&mut fabric, hello.buffer_bytes(), hello.buffers() * qps, Access::LOCAL)?;
        let local = match spec.op {
            RawOp::Send => None,
            RawOp::Read | RawOp::Write => Some(registered_pool(&mut fabric, spec.size, qps, Access::LOCAL)?),
        };
        let params = ConnectParams {
            private_data: hello.encode(),
            send_queue_depth: send_queue_depth(&spec),
            own_receive_queue: Some(hello.receives() as u32),
            windows: 0,
            rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY,
            ..ConnectParams::default()
        };
        let mut target = Self {
            fabric,
            spec,
            hello,
            messages,
            links: Vec::with_capacity(qps),
            by_slot: Vec::new(),
            gathered: Vec::with_capacity(qps),
            idler,
            completions: Vec::with_capacity(POLL_BATCH),
            events: Vec::new(),
            _local: local,
        };
        for _ in 0..qps {
            target.add_link(address, &params)?;
        }
        target.wait_until_welcome()?;
        Ok(target)
    }

    /// The server's description.
    pub(crate) fn server(&self) -> Option<Welcome> {
        self.links.first()?.welcome
    }

    fn add_link(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<(), Failure> {
        let local = match &self._local {
            None => None,
            Some(pool) => {
                let lent = alloc(pool, self.spec.size)?.lend();
                Some(lent.map_err(|_| Failure::Run("a pool lends on its own thread only".into()))?)
            }
        };
        let qp = self.fabric.connect(address, params).map_err(|e| Failure::run("connect", e))?;
        let mut unposted = Vec::with_capacity(self.hello.buffers());
        for _ in 0..self.hello.receives() {
            unposted.push(alloc(&self.messages, self.hello.buffer_bytes())?);
        }
        self.fabric.post_recv(Some(qp), &mut unposted);
        let slot = qp.slot as usize;
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, usize::MAX);
        }
        self.by_slot[slot] = self.links.len();
        let depth = self.spec.depth as usize;
        self.links.push(Link {
            qp,
            chain: Vec::with_capacity(2 * depth),
            unposted,
            tokens: VecDeque::with_capacity(depth),
            begun: 0,
            ended: 0,
            remote: RemoteMemory { rkey: 0, address: 0 },
            local,
            welcome: None,
        });
        Ok(())
    }

    fn wait_until_welcome(&mut self) -> Result<(), Failure> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut arrived = Vec::new();
        while self.links.iter().any(|link| link.welcome.is_none()) {
            if Instant::now() > deadline {
                return Err(Failure::Run(format!(
                    "no connection after {CONNECT_TIMEOUT:?}: check that `rpcperf serve` of this version listens there"
                )));
            }
            self.process_control_events()?;
            if self.fabric.poll_cq(&mut self.completions, POLL_BATCH) == 0 {
                std::thread::yield_now();
            }
            arrived.append(&mut self.completions);
            for completion in arrived.drain(..) {
                self.process_welcome(completion)?;
            }
        }
        Ok(())
    }

    fn process_welcome(&mut self, completion: Completion) -> Result<(), Failure> {
        check(&completion)?;
        let link = link_of(&mut self.links, &self.by_slot, completion.qp)?;
        let buf = completion.buf.ok_or_else(|| Failure::Run("a Receive completed without its buffer".into()))?;
        let welcome = Welcome::decode(&buf).map_err(Failure::Run)?;
        link.remote = RemoteMemory { rkey: welcome.rkey, address: welcome.address };
        link.welcome = Some(welcome);
        link.unposted.push(buf.into_buf());
        Ok(())
    }

    #[cold]
    fn process_control_events(&mut self) -> Result<(), Failure> {
        let mut events = std::mem::take(&mut self.events);
        self.fabric.poll_control(&mut events);
        for event in events.drain(..) {
            match event {
                ControlEvent::Established { qp, .. } => {
                    let link = link_of(&mut self.links, &self.by_slot, qp)?;
                    // Some receives could not be posted before the connection was established.
                    self.fabric.post_recv(Some(qp), &mut link.unposted);
                }
                ControlEvent::Rejected { private_data, .. } => {
                    let why = String::from_utf8_lossy(&private_data).trim_end_matches('\0').to_owned();
                    return Err(Failure::Run(format!("the server refused: {why}")));
                }
                ControlEvent::ConnectFailed { error, .. } => return Err(Failure::run("connect", error)),
                ControlEvent::Disconnected { reason, .. } => {
                    return Err(Failure::Run(format!("the connection ended: {reason}")));
                }
                ControlEvent::ConnectRequest { request, .. } => self.fabric.reject(request, b"this is a client"),
                ControlEvent::Device(event) => print_error!("rpcperf: {event}"),
            }
        }
        self.events = events;
        Ok(())
    }

    fn post_gathered(&mut self) -> Result<(), Failure> {
        for position in (0..self.gathered.len()).rev() {
            let index = self.gathered[position];
            self.post(index)?;
            if self.links[index].chain.is_empty() {
                self.gathered.swap_remove(position);
            }
        }
        Ok(())
    }

    fn post(&mut self, index: usize) -> Result<(), Failure> {
        let link = &mut self.links[index];
        match self.fabric.post_send(link.qp, &mut link.chain) {
            // A later poll posts the rest: completions free queue entries.
            Ok(()) | Err(PostError::QueueFull) => Ok(()),
            Err(error) => {
                self.process_control_events()?; // a control event may state the cause
                Err(Failure::Run(format!("post: {error:?}")))
            }
        }
    }
}

impl<F: Fabric> Target for RawTarget<F> {
    fn depth(&self) -> u32 {
        self.spec.depth * self.spec.qps
    }

    fn start(&mut self, token: u32) -> Result<(), Failure> {
        let index = token as usize % self.links.len();
        let spec = self.spec;
        if self.links[index].chain.is_empty() {
            self.gathered.push(index);
        }
        // Without batches each request is posted alone. The newest one is kept, so that `flush` can signal it.
        if !spec.batch && !self.links[index].chain.is_empty() {
            self.post(index)?;
        }
        let link = &mut self.links[index];
        link.tokens.push_back(token);
        link.begun += 1;
        let signaled = if spec.is_answered() {
            // This completion only frees memory and queue entries.
            link.begun.is_multiple_of(u64::from(SIGNAL_EVERY))
        } else {
            spec.round_trips || link.begun.is_multiple_of(u64::from(spec.cq_mod))
        };
        let wr_id = link.begun;
        let send = |len| -> Result<WorkRequest, Failure> {
            Ok(WorkRequest::Send { buf: alloc(&self.messages, len)?, invalidate: None, fence: false })
        };
        let wr = match (spec.op, &link.local) {
            (RawOp::Write, Some(local)) => {
                let src = Source::Lent(local.clone());
                WorkRequest::Write { src, offset: 0, len: spec.size, remote: link.remote }
            }
            (RawOp::Read, Some(local)) => {
                WorkRequest::Read { dst: local.clone(), offset: 0, len: spec.size, remote: link.remote }
            }
            _ => send(spec.size)?,
        };
        if spec.op == RawOp::Write && spec.is_answered() {
            link.chain.push(Posting { wr_id: 0, signaled: false, wr });
            link.chain.push(Posting { wr_id, signaled, wr: send(NOTIFICATION)? });
        } else {
            link.chain.push(Posting { wr_id, signaled, wr });
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        if !self.spec.is_answered() {
            for &index in &self.gathered {
                // Without this signal the last outstanding requests might never complete.
                if let Some(newest) = self.links[index].chain.last_mut() {
                    newest.signaled = true;
                }
            }
        }
        self.post_gathered()
    }

    fn set_next_due(&mut self, next: Option<Duration>) {
        self.idler.set_next_due(next);
    }

    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
        if self.fabric.poll_cq(&mut self.completions, POLL_BATCH) == 0 {
            if self.idler.empty(&mut self.fabric) {
                self.process_control_events()?;
            }
            return Ok(());
        }
        self.idler.busy();
        let answered = self.spec.is_answered();
        let refill_at = if self.spec.batch { REFILL_AT } else { 1 };
        if let Some(failed) = self.completions.iter().position(|completion| !completion.status.is_ok()) {
            self.process_control_events()?; // a control event may state the cause
            return check(&self.completions[failed]);
        }
        for completion in self.completions.drain(..) {
            let link = link_of(&mut self.links, &self.by_slot, completion.qp)?;
            let upto = match (completion.opcode, completion.buf) {
                (Opcode::Recv, Some(buf)) => {
                    let expected = self.hello.message as usize;
                    if buf.len() != expected {
                        let len = buf.len();
                        return Err(Failure::Run(format!("an answer has {len} bytes instead of {expected}")));
                    }
                    link.unposted.push(buf.into_buf());
                    if link.unposted.len() >= refill_at {
                        self.fabric.post_recv(Some(link.qp), &mut link.unposted);
                    }
                    link.ended + 1
                }
                _ if answered => continue,
                _ => completion.wr_id,
            };
            while link.ended < upto {
                link.ended += 1;
                done.extend(link.tokens.pop_front());
            }
        }
        // Posts the requests that did not fit into a send queue before.
        self.post_gathered()
    }
}

impl<F: Fabric> Drop for RawTarget<F> {
    fn drop(&mut self) {
        for link in &self.links {
            self.fabric.destroy_qp(link.qp);
        }
    }
}

/// Send queue entries for all outstanding operations. A Write with the Send after it takes two.
fn send_queue_depth(spec: &RawSpec) -> u32 {
    let per_operation = if spec.op == RawOp::Write && spec.round_trips { 2 } else { 1 };
    (spec.depth + SIGNAL_EVERY) * per_operation + SIGNAL_EVERY
}

fn link_of<'a>(links: &'a mut [Link], by_slot: &[usize], qp: QpId) -> Result<&'a mut Link, Failure> {
    let index = by_slot.get(qp.slot as usize).copied().unwrap_or(usize::MAX);
    links
        .get_mut(index)
        .filter(|link| link.qp == qp)
        .ok_or_else(|| Failure::Run(format!("the fabric reported {qp:?}, which was never connected")))
}

fn check(completion: &Completion) -> Result<(), Failure> {
    if completion.status.is_ok() {
        return Ok(());
    }
    Err(Failure::Run(format!("{:?} ended with {:?}", completion.opcode, completion.status)))
}
