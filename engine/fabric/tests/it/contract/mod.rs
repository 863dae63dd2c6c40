//! Conformance cases for every fabric.
//!
//! A [`World`] is two fabrics and a bound address. [`run`] makes a world for each case, runs the case, and then checks
//! that all buffers have returned to their pools. A failed case returns an error as text. A case fails if an event is
//! missing after [`TIMEOUT`].

mod connections;
mod memory;
mod messages;

use std::fmt::Debug;
use std::time::{Duration, Instant};

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

use rpcrdma_fabric::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricErrorKind, Opcode,
    PostError, Posting, QpId, ReceivedBuf, RemoteMemory, RequestId, Status, WindowId, WorkRequest,
};

/// Time-out of each event that must happen.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Number of turns in which an event must *not* happen.
const IDLE_TURNS: usize = 3000;
/// Bytes of a Receive.
const RECEIVE_SIZE: usize = 4096;

/// The result of a case, with the error as text.
pub(crate) type Outcome = Result<(), String>;

/// One requirement of every fabric.
pub(crate) struct Case<F: Fabric> {
    /// The requirement, in a few words.
    pub(crate) name: &'static str,
    /// Checks the requirement.
    pub(crate) check: fn(&mut World<F>) -> Outcome,
}

/// The result of a run of cases.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Cases that passed.
    pub(crate) passed: Vec<&'static str>,
    /// Cases that failed, with the error.
    pub(crate) failed: Vec<(&'static str, String)>,
    /// Cases that need an absent device feature, with that feature.
    pub(crate) skipped: Vec<(&'static str, &'static str)>,
}

/// Cases about work requests with immediate data, which only RDMA devices support.
pub(crate) const IMMEDIATE_DATA: [&str; 3] = [
    "a Send with immediate data is not a message",
    "a Write with immediate data is not a message",
    "a Write of nothing with immediate data is not a message",
];

impl Report {
    /// Asserts that all cases passed, and that exactly the `unsupported` cases were skipped.
    ///
    /// # Panics
    /// If a case failed, or if other cases were skipped.
    pub(crate) fn assert_all_but(&self, unsupported: &[&str]) {
        assert!(self.failed.is_empty(), "{:#?}", self.failed);
        let skipped: Vec<_> = self.skipped.iter().map(|(name, _)| *name).collect();
        assert_eq!(skipped, unsupported, "{:#?}", self.skipped);
        assert!(self.passed.len() >= 40, "expected at least 40 passed cases, got {}", self.passed.len());
    }

    fn add(&mut self, other: Self) {
        self.passed.extend(other.passed);
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
    }
}

/// All cases.
pub(crate) fn cases<F: Fabric>() -> Vec<Case<F>> {
    let mut all = messages::cases();
    all.extend(memory::cases());
    all.extend(connections::cases());
    all
}

/// Derives an address without a listener from a [`loopback_address`], whose ports begin with 2.
pub(crate) fn nowhere(address: &FabricAddress) -> FabricAddress {
    FabricAddress(address.0.replace(":2", ":3"))
}

/// Runs each case in its own world.
pub(crate) fn run<F: Fabric>(
    cases: Vec<Case<F>>,
    make: impl FnMut() -> Result<(F, F, FabricAddress), FabricError>,
) -> Report {
    run_with(cases, make, |address| FabricAddress(format!("{}-nowhere", address.0)))
}

/// Runs cases on fabrics that keep the last messages of a connection only for a limited time. `make` gets true for a
/// case that leaves messages unpolled, which may take long on a slow host.
pub(crate) fn run_lingering<F: Fabric>(
    cases: Vec<Case<F>>,
    mut make: impl FnMut(bool) -> Result<(F, F, FabricAddress), FabricError>,
) -> Report {
    let mut report = Report::default();
    for case in cases {
        let leaves_unpolled = case.name == connections::LEAVES_MESSAGES_UNPOLLED;
        report.add(run(vec![case], || make(leaves_unpolled)));
    }
    report
}

/// Runs each case in its own world, for fabrics with any form of address. `nowhere` derives an address without a
/// listener.
pub(crate) fn run_with<F: Fabric>(
    cases: Vec<Case<F>>,
    mut make: impl FnMut() -> Result<(F, F, FabricAddress), FabricError>,
    nowhere: impl Fn(&FabricAddress) -> FabricAddress,
) -> Report {
    let mut report = Report::default();
    for case in cases {
        log::debug!("case: {}", case.name);
        let world = make().and_then(|(client, server, address)| {
            let nowhere = nowhere(&address);
            World::new(client, server, address, nowhere)
        });
        let mut missing = None;
        let outcome = world.map_err(|e| format!("cannot make two fabrics: {e}")).and_then(|mut world| {
            let outcome = (case.check)(&mut world);
            missing = world.missing;
            outcome.and(world.close())
        });
        match (outcome, missing) {
            (Err(why), _) => report.failed.push((case.name, why)),
            (Ok(()), None) => report.passed.push(case.name),
            (Ok(()), Some(missing)) => report.skipped.push((case.name, missing)),
        }
    }
    report
}

/// Returns from the function with an error text unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
use ensure;

/// One end: a fabric, its memory and its output so far.
pub(crate) struct End<F: Fabric> {
    /// The device.
    pub(crate) fabric: F,
    /// Memory for messages, registered without remote rights.
    pub(crate) pool: Pool,
    /// Memory to expose, in a separate arena.
    pub(crate) exposed: Pool,
    /// Completions not yet consumed.
    pub(crate) completions: Vec<Completion>,
    /// Events not yet consumed.
    pub(crate) events: Vec<ControlEvent>,
    /// Queue pairs to destroy at the end.
    pub(crate) qps: Vec<QpId>,
}

/// Two fabrics, and an address that the server listens at.
pub(crate) struct World<F: Fabric> {
    /// The side that connects.
    pub(crate) client: End<F>,
    /// The side that accepts.
    pub(crate) server: End<F>,
    /// The address at which the server listens.
    pub(crate) address: FabricAddress,
    /// Keeps the address bound.
    _listener: F::Listener,
    /// A well-formed address without a listener.
    pub(crate) nowhere: FabricAddress,
    /// The missing device feature, if the case needs one.
    pub(crate) missing: Option<&'static str>,
}

impl<F: Fabric> End<F> {
    fn new(mut fabric: F) -> Result<Self, FabricError> {
        let pool = |name, count| {
            let arena =
                ArenaConfig { bytes: 0, name, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
            let classes = vec![Class { size: RECEIVE_SIZE, count }, Class { size: 4 << 20, count: 2 }];
            Pool::new(&PoolConfig { classes, arena }).map_err(|e| FabricError::new(FabricErrorKind::System, e))
        };
        let (messages, exposed) = (pool("contract-messages", 1024)?, pool("contract-exposed", 64)?);
        fabric.register(messages.arena(), Access::LOCAL)?;
        fabric.register(exposed.arena(), Access::REMOTE)?;
        Ok(Self { fabric, pool: messages, exposed, completions: Vec::new(), events: Vec::new(), qps: Vec::new() })
    }

    /// A message buffer with these contents.
    pub(crate) fn message(&self, bytes: &[u8]) -> Result<Buf, String> {
        let mut buf = self.pool.alloc(bytes.len()).ok_or("the pool is empty")?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }

    /// Lent memory with these contents, for a window or as source or target of RDMA work.
    pub(crate) fn lent(&self, bytes: &[u8]) -> Result<Lent, String> {
        let mut buf = self.exposed.alloc(bytes.len()).ok_or("the pool is empty")?;
        buf.copy_from_slice(bytes);
        buf.lend().map_err(|_| "a buffer of this thread cannot be lent".to_owned())
    }

    /// Posts `n` Receives of 4096 bytes.
    pub(crate) fn post_receives(&mut self, qp: Option<QpId>, n: usize) -> Outcome {
        let mut bufs: Vec<Buf> = (0..n).map_while(|_| self.pool.alloc(RECEIVE_SIZE)).collect();
        ensure!(bufs.len() == n, "the pool is empty");
        let taken = self.fabric.post_recv(qp, &mut bufs);
        ensure!(taken == n && bufs.is_empty(), "{taken} of {n} Receives were posted");
        Ok(())
    }

    /// Posts a whole chain.
    pub(crate) fn post(&mut self, qp: QpId, chain: impl IntoIterator<Item = Posting>) -> Outcome {
        let mut chain: Vec<Posting> = chain.into_iter().collect();
        let result = self.fabric.post_send(qp, &mut chain);
        ensure!(result.is_ok() && chain.is_empty(), "post_send: {result:?}, {} left", chain.len());
        Ok(())
    }

    /// Posts one request that must be refused. Returns the request and the error.
    pub(crate) fn post_refused(&mut self, qp: QpId, posting: Posting) -> Result<(Posting, PostError), String> {
        let mut chain = vec![posting];
        match (self.fabric.post_send(qp, &mut chain), chain.pop()) {
            (Err(error), Some(posting)) => Ok((posting, error)),
            (result, left) => Err(format!("post_send took the request: {result:?}, left {left:?}")),
        }
    }

    /// A signaled Send.
    pub(crate) fn send(&self, wr_id: u64, bytes: &[u8]) -> Result<Posting, String> {
        let buf = self.message(bytes)?;
        Ok(Posting { wr_id, signaled: true, wr: WorkRequest::Send { buf, invalidate: None, fence: false } })
    }

    /// An unsignaled Send, which completes only on failure.
    pub(crate) fn quiet_send(&self, wr_id: u64, bytes: &[u8]) -> Result<Posting, String> {
        Ok(Posting { signaled: false, ..self.send(wr_id, bytes)? })
    }

    /// Posts a signaled Send.
    fn send_now(&mut self, qp: QpId, wr_id: u64, bytes: &[u8]) -> Outcome {
        let send = self.send(wr_id, bytes)?;
        self.post(qp, [send])
    }

    /// Posts an unsignaled Send.
    fn send_quietly(&mut self, qp: QpId, wr_id: u64, bytes: &[u8]) -> Outcome {
        let send = self.quiet_send(wr_id, bytes)?;
        self.post(qp, [send])
    }

    /// Posts the buffer of a received message to the shared queue.
    fn repost(&mut self, done: Completion) -> Outcome {
        let mut bufs = done.buf.into_iter().map(ReceivedBuf::into_buf).collect();
        expect_eq("reposted Receives", self.fabric.post_recv(None, &mut bufs), 1)
    }

    /// Binds a new window to a buffer, and returns its remote address.
    pub(crate) fn expose(&mut self, qp: QpId, mem: &Lent, access: Access) -> Result<(WindowId, RemoteMemory), String> {
        let window = self.fabric.alloc_window(qp).map_err(|e| e.to_string())?;
        let remote = self.rebind(qp, window, mem, access)?;
        Ok((window, remote))
    }

    /// Binds a free window to a whole buffer, by an unsignaled request.
    pub(crate) fn rebind(
        &mut self,
        qp: QpId,
        window: WindowId,
        mem: &Lent,
        access: Access,
    ) -> Result<RemoteMemory, String> {
        let remote = RemoteMemory { rkey: self.fabric.next_rkey(window), address: self.fabric.remote_address(mem, 0) };
        let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len: mem.len(), access };
        self.post(qp, [Posting { wr_id: 0xb1d, signaled: false, wr }])?;
        Ok(remote)
    }

    /// Takes the oldest completion of this kind on this queue pair.
    pub(crate) fn take(&mut self, qp: QpId, opcode: Opcode) -> Option<Completion> {
        let at = self.completions.iter().position(|c| c.qp == qp && c.opcode == opcode)?;
        Some(self.completions.remove(at))
    }

    fn turn(&mut self) {
        self.fabric.poll_cq(&mut self.completions, 64);
        self.fabric.poll_control(&mut self.events);
        self.pool.drain_remote();
        self.exposed.drain_remote();
    }

    fn close(mut self) -> Outcome {
        for qp in std::mem::take(&mut self.qps) {
            self.fabric.destroy_qp(qp);
        }
        self.completions.clear();
        while self.fabric.poll_cq(&mut self.completions, 64) > 0 {
            self.completions.clear();
        }
        drop(self.fabric);
        self.pool.close().map_err(|leak| format!("message buffers were not returned: {leak}"))?;
        self.exposed.close().map_err(|leak| format!("exposed memory was not returned: {leak}"))
    }
}

impl<F: Fabric> World<F> {
    /// Registers memory with both fabrics, and lets the server listen.
    pub(crate) fn new(
        client: F,
        server: F,
        address: FabricAddress,
        nowhere: FabricAddress,
    ) -> Result<Self, FabricError> {
        let (client, mut server) = (End::new(client)?, End::new(server)?);
        let listener = F::bind(&address)?;
        server.fabric.listen(&listener)?;
        Ok(Self { client, server, address, _listener: listener, nowhere, missing: None })
    }

    /// True if the completion of a request proves its delivery to the peer.
    pub(crate) fn acknowledges(&self) -> bool {
        self.client.fabric.capabilities().acknowledges
    }

    /// One turn of both ends.
    pub(crate) fn turn(&mut self) {
        self.client.turn();
        self.server.turn();
    }

    /// Runs turns until `check` returns a value.
    pub(crate) fn until<T>(&mut self, what: &str, mut check: impl FnMut(&mut Self) -> Option<T>) -> Result<T, String> {
        let start = Instant::now();
        loop {
            if let Some(found) = check(self) {
                return Ok(found);
            }
            if start.elapsed() > TIMEOUT {
                return Err(format!(
                    "{what}: did not happen within {TIMEOUT:?}; client: {:?} {:?}; server: {:?} {:?}",
                    self.client.completions, self.client.events, self.server.completions, self.server.events
                ));
            }
            self.turn();
        }
    }

    /// Runs turns in which an unexpected event could happen.
    pub(crate) fn idle(&mut self) {
        for _ in 0..IDLE_TURNS {
            self.turn();
        }
    }

    /// The client's next completion of this kind.
    pub(crate) fn client_done(&mut self, qp: QpId, opcode: Opcode) -> Result<Completion, String> {
        self.until(&format!("{opcode:?} completes at the client"), |w| w.client.take(qp, opcode))
    }

    /// The server's next completion of this kind.
    pub(crate) fn server_done(&mut self, qp: QpId, opcode: Opcode) -> Result<Completion, String> {
        self.until(&format!("{opcode:?} completes at the server"), |w| w.server.take(qp, opcode))
    }

    /// Waits for a connect request at the server.
    pub(crate) fn wait_request(&mut self) -> Result<(RequestId, Vec<u8>), String> {
        self.until("the server sees a connect request", |w| {
            let at = w.server.events.iter().position(|e| matches!(e, ControlEvent::ConnectRequest { .. }))?;
            match w.server.events.remove(at) {
                ControlEvent::ConnectRequest { request, private_data, .. } => Some((request, private_data)),
                _ => None,
            }
        })
    }

    /// Starts to connect the client.
    fn start_connect(&mut self, params: &ConnectParams) -> Result<QpId, String> {
        let c = self.client.fabric.connect(&self.address, params).map_err(|e| e.to_string())?;
        self.client.qps.push(c);
        Ok(c)
    }

    /// Accepts a request at the server.
    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, String> {
        let s = self.server.fabric.accept(request, params).map_err(|e| e.to_string())?;
        self.server.qps.push(s);
        Ok(s)
    }

    /// Connects with the parameters of each end. Returns the queue pairs of client and server.
    pub(crate) fn connect_with(
        &mut self,
        client: &ConnectParams,
        server: &ConnectParams,
    ) -> Result<(QpId, QpId), String> {
        let c = self.start_connect(client)?;
        let (request, _) = self.wait_request()?;
        let s = self.accept(request, server)?;
        self.wait_established(c, s)?;
        Ok((c, s))
    }

    /// Connects with default parameters.
    pub(crate) fn connect(&mut self) -> Result<(QpId, QpId), String> {
        self.connect_with(&ConnectParams::default(), &ConnectParams::default())
    }

    /// Waits until both ends are connected. Returns the private data of the server's answer.
    pub(crate) fn wait_established(&mut self, client: QpId, server: QpId) -> Result<Vec<u8>, String> {
        let take = |end: &mut End<F>, id: QpId| {
            let at = end.events.iter().position(|e| matches!(e, ControlEvent::Established { qp, .. } if *qp == id))?;
            match end.events.remove(at) {
                ControlEvent::Established { private_data, .. } => Some(private_data),
                _ => None,
            }
        };
        let private_data = self.until("the client is connected", |w| take(&mut w.client, client))?;
        self.until("the server is connected", |w| take(&mut w.server, server))?;
        Ok(private_data)
    }

    /// Waits for the client's `Disconnected` event.
    pub(crate) fn wait_client_disconnected(&mut self, qp: QpId) -> Outcome {
        self.until("the client gets the Disconnected event", |w| take_disconnected(&mut w.client.events, qp))
    }

    /// Waits for the server's `Disconnected` event.
    pub(crate) fn wait_server_disconnected(&mut self, qp: QpId) -> Outcome {
        self.until("the server gets the Disconnected event", |w| take_disconnected(&mut w.server.events, qp))
    }

    /// Waits for the `Disconnected` event of both ends.
    fn wait_both_disconnected(&mut self, client: QpId, server: QpId) -> Outcome {
        self.wait_client_disconnected(client)?;
        self.wait_server_disconnected(server)
    }

    /// Destroys everything, and checks that all buffers have returned.
    pub(crate) fn close(self) -> Outcome {
        let Self { client, server, .. } = self;
        // The server closes first, so that it holds none of the client's memory. The client closes in any case.
        let server = server.close();
        client.close().and(server)
    }
}

fn take_disconnected(events: &mut Vec<ControlEvent>, id: QpId) -> Option<()> {
    let at = events.iter().position(|e| matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id))?;
    events.remove(at);
    Some(())
}

/// The bytes of a received message.
fn bytes(completion: &Completion) -> Result<&[u8], String> {
    ensure!(completion.status == Status::Success, "{completion:?}");
    completion.buf.as_deref().ok_or_else(|| format!("a Receive without its buffer: {completion:?}"))
}

/// Returns an error text unless a value equals the expected one.
fn expect_eq<T: PartialEq + Debug>(what: &str, got: T, expected: T) -> Outcome {
    ensure!(got == expected, "{what}: got {got:?}, expected {expected:?}");
    Ok(())
}
