//! Conformance cases for every fabric.
//!
//! A [`World`] is two fabrics and a bound address. [`run`] makes one per case, runs it, and then checks that all memory
//! has come home. Cases end with an error in words; they never hang: an event missing after [`PATIENCE`] is an error
//! too.

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

/// How long a case waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Turns in which something that must *not* happen is waited for.
const QUIET_TURNS: usize = 3000;
/// Bytes of a Receive.
const RECEIVE: usize = 4096;

/// The result of a case, with the error as text.
pub(crate) type Outcome = Result<(), String>;

/// One thing that every fabric has to do.
pub(crate) struct Case<F: Fabric> {
    /// The requirement, in a few words.
    pub(crate) name: &'static str,
    /// Does it.
    pub(crate) check: fn(&mut World<F>) -> Outcome,
}

/// The result of a run of cases.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Cases that held.
    pub(crate) passed: Vec<&'static str>,
    /// Cases that did not, and why.
    pub(crate) failed: Vec<(&'static str, String)>,
    /// Cases that need an absent device feature, with that feature.
    pub(crate) skipped: Vec<(&'static str, &'static str)>,
}

/// Cases about work requests with immediate data, which devices alone have.
pub(crate) const IMMEDIATE_DATA: [&str; 3] = [
    "a Send with immediate data is no message",
    "a Write with immediate data is no message",
    "a Write of nothing with immediate data is no message",
];

impl Report {
    /// For a fabric that can be asked everything but this.
    ///
    /// # Panics
    /// If a case does not hold, or others were not asked.
    pub(crate) fn assert_all_but(&self, not_asked: &[&str]) {
        assert!(self.failed.is_empty(), "{:#?}", self.failed);
        let skipped: Vec<_> = self.skipped.iter().map(|(name, _)| *name).collect();
        assert_eq!(skipped, not_asked, "{:#?}", self.skipped);
        assert!(self.passed.len() >= 40, "only {} cases ran", self.passed.len());
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

/// An address without a listener, from a [`loopback_address`]. Ports of the latter begin with 2.
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

/// Runs cases on fabrics that keep a connection's last messages briefly. `make` gets true for cases that leave
/// messages unread for a while, which is long on a slow host.
pub(crate) fn run_lingering<F: Fabric>(
    cases: Vec<Case<F>>,
    mut make: impl FnMut(bool) -> Result<(F, F, FabricAddress), FabricError>,
) -> Report {
    let mut report = Report::default();
    for case in cases {
        let lies = case.name == connections::LETS_MESSAGES_LIE;
        report.add(run(vec![case], || make(lies)));
    }
    report
}

/// Runs cases on fabrics whose addresses are not names. `nowhere` derives an address without a listener.
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
        let outcome = world.map_err(|e| format!("no world: {e}")).and_then(|mut world| {
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

/// Makes a check of a case: an error in words unless it holds.
macro_rules! ensure {
    ($holds:expr, $($words:tt)+) => {
        if !$holds {
            return Err(format!($($words)+));
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
    /// Queue pairs to destroy in the end.
    pub(crate) qps: Vec<QpId>,
}

/// Two fabrics, and an address that the server listens at.
pub(crate) struct World<F: Fabric> {
    /// Connects.
    pub(crate) client: End<F>,
    /// Accepts.
    pub(crate) server: End<F>,
    /// Where the server listens.
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
            let classes = vec![Class { size: RECEIVE, count }, Class { size: 4 << 20, count: 2 }];
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

    /// Memory to expose or to copy to and from, with these contents.
    pub(crate) fn lent(&self, bytes: &[u8]) -> Result<Lent, String> {
        let mut buf = self.exposed.alloc(bytes.len()).ok_or("the pool is empty")?;
        buf.copy_from_slice(bytes);
        buf.lend().map_err(|_| "a buffer of this thread cannot be lent".to_owned())
    }

    /// Posts `n` Receives of 4096 bytes.
    pub(crate) fn post_receives(&mut self, qp: Option<QpId>, n: usize) -> Outcome {
        let mut bufs: Vec<Buf> = (0..n).map_while(|_| self.pool.alloc(RECEIVE)).collect();
        ensure!(bufs.len() == n, "the pool is empty");
        let took = self.fabric.post_recv(qp, &mut bufs);
        ensure!(took == n && bufs.is_empty(), "of {n} Receives {took} were posted");
        Ok(())
    }

    /// Posts a chain whole.
    pub(crate) fn post(&mut self, qp: QpId, chain: impl IntoIterator<Item = Posting>) -> Outcome {
        let mut chain: Vec<Posting> = chain.into_iter().collect();
        let result = self.fabric.post_send(qp, &mut chain);
        ensure!(result.is_ok() && chain.is_empty(), "post_send: {result:?}, {} left", chain.len());
        Ok(())
    }

    /// Posts one request that must be refused, and gives it back.
    pub(crate) fn refused(&mut self, qp: QpId, posting: Posting) -> Result<(Posting, PostError), String> {
        let mut chain = vec![posting];
        match (self.fabric.post_send(qp, &mut chain), chain.pop()) {
            (Err(error), Some(posting)) => Ok((posting, error)),
            (result, left) => Err(format!("post_send took it: {result:?}, left {left:?}")),
        }
    }

    /// A signalled Send.
    pub(crate) fn send(&self, wr_id: u64, bytes: &[u8]) -> Result<Posting, String> {
        let buf = self.message(bytes)?;
        Ok(Posting { wr_id, signalled: true, wr: WorkRequest::Send { buf, invalidate: None, fence: false } })
    }

    /// A Send that completes only on failure.
    pub(crate) fn quiet_send(&self, wr_id: u64, bytes: &[u8]) -> Result<Posting, String> {
        Ok(Posting { signalled: false, ..self.send(wr_id, bytes)? })
    }

    /// Posts a signalled Send.
    fn send_now(&mut self, qp: QpId, wr_id: u64, bytes: &[u8]) -> Outcome {
        let send = self.send(wr_id, bytes)?;
        self.post(qp, [send])
    }

    /// Posts a Send that completes only on failure.
    fn send_quietly(&mut self, qp: QpId, wr_id: u64, bytes: &[u8]) -> Outcome {
        let send = self.quiet_send(wr_id, bytes)?;
        self.post(qp, [send])
    }

    /// Posts the buffer of a message to the shared queue again.
    fn post_again(&mut self, done: Completion) -> Outcome {
        let mut bufs = done.buf.into_iter().map(ReceivedBuf::into_buf).collect();
        same("Receives posted again", self.fabric.post_recv(None, &mut bufs), 1)
    }

    /// Binds a new, signalled window to a buffer; returns its remote address.
    pub(crate) fn expose(&mut self, qp: QpId, mem: &Lent, access: Access) -> Result<(WindowId, RemoteMemory), String> {
        let window = self.fabric.alloc_window(qp).map_err(|e| e.to_string())?;
        let remote = self.rebind(qp, window, mem, access)?;
        Ok((window, remote))
    }

    /// Binds a free window to a whole buffer, unsignalled.
    pub(crate) fn rebind(
        &mut self,
        qp: QpId,
        window: WindowId,
        mem: &Lent,
        access: Access,
    ) -> Result<RemoteMemory, String> {
        let remote = RemoteMemory { rkey: self.fabric.next_rkey(window), address: self.fabric.remote_address(mem, 0) };
        let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len: mem.len(), access };
        self.post(qp, [Posting { wr_id: 0xb1d, signalled: false, wr }])?;
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
        self.pool.close().map_err(|leak| format!("messages did not come home: {leak}"))?;
        self.exposed.close().map_err(|leak| format!("exposed memory did not come home: {leak}"))
    }
}

impl<F: Fabric> World<F> {
    /// Registers memory with both, and lets the server listen.
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

    /// Whether a completion proves delivery to the peer.
    pub(crate) fn acknowledges(&self) -> bool {
        self.client.fabric.capabilities().acknowledges
    }

    /// One turn of both.
    pub(crate) fn turn(&mut self) {
        self.client.turn();
        self.server.turn();
    }

    /// Turns until there is something.
    pub(crate) fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> Result<T, String> {
        let start = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return Ok(found);
            }
            if start.elapsed() > PATIENCE {
                return Err(format!(
                    "{what}: did not happen within {PATIENCE:?}; client: {:?} {:?}; server: {:?} {:?}",
                    self.client.completions, self.client.events, self.server.completions, self.server.events
                ));
            }
            self.turn();
        }
    }

    /// Turns for a while in which nothing may happen.
    pub(crate) fn quiet(&mut self) {
        for _ in 0..QUIET_TURNS {
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

    /// A connect request that waits at the server.
    pub(crate) fn request(&mut self) -> Result<(RequestId, Vec<u8>), String> {
        self.until("the server sees a connect request", |w| {
            let at = w.server.events.iter().position(|e| matches!(e, ControlEvent::ConnectRequest { .. }))?;
            match w.server.events.remove(at) {
                ControlEvent::ConnectRequest { request, private_data, .. } => Some((request, private_data)),
                _ => None,
            }
        })
    }

    /// The client begins to connect.
    fn ask(&mut self, params: &ConnectParams) -> Result<QpId, String> {
        let c = self.client.fabric.connect(&self.address, params).map_err(|e| e.to_string())?;
        self.client.qps.push(c);
        Ok(c)
    }

    /// The server accepts.
    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, String> {
        let s = self.server.fabric.accept(request, params).map_err(|e| e.to_string())?;
        self.server.qps.push(s);
        Ok(s)
    }

    /// Connects with these parameters at each end; returns both queue pairs.
    pub(crate) fn connect_with(
        &mut self,
        client: &ConnectParams,
        server: &ConnectParams,
    ) -> Result<(QpId, QpId), String> {
        let c = self.ask(client)?;
        let (request, _) = self.request()?;
        let s = self.accept(request, server)?;
        self.established(c, s)?;
        Ok((c, s))
    }

    /// Connects with default parameters.
    pub(crate) fn connect(&mut self) -> Result<(QpId, QpId), String> {
        self.connect_with(&ConnectParams::default(), &ConnectParams::default())
    }

    /// Waits until both ends are connected; returns the acceptor's private data.
    pub(crate) fn established(&mut self, client: QpId, server: QpId) -> Result<Vec<u8>, String> {
        let take = |end: &mut End<F>, id: QpId| {
            let at = end.events.iter().position(|e| matches!(e, ControlEvent::Established { qp, .. } if *qp == id))?;
            match end.events.remove(at) {
                ControlEvent::Established { private_data, .. } => Some(private_data),
                _ => None,
            }
        };
        let said = self.until("the client is connected", |w| take(&mut w.client, client))?;
        self.until("the server is connected", |w| take(&mut w.server, server))?;
        Ok(said)
    }

    /// Waits for the client's `Disconnected` event.
    pub(crate) fn client_disconnected(&mut self, qp: QpId) -> Outcome {
        self.until("the client hears of the end", |w| take_disconnected(&mut w.client.events, qp))
    }

    /// Waits for the server's `Disconnected` event.
    pub(crate) fn server_disconnected(&mut self, qp: QpId) -> Outcome {
        self.until("the server hears of the end", |w| take_disconnected(&mut w.server.events, qp))
    }

    /// Waits for the `Disconnected` event of both ends.
    fn both_disconnected(&mut self, client: QpId, server: QpId) -> Outcome {
        self.client_disconnected(client)?;
        self.server_disconnected(server)
    }

    /// Destroys everything; all memory must be home then.
    pub(crate) fn close(self) -> Outcome {
        let Self { client, server, .. } = self;
        // Both close before either is checked: a departed peer holds nothing any more.
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

/// Both are the same.
fn same<T: PartialEq + Debug>(what: &str, got: T, wanted: T) -> Outcome {
    ensure!(got == wanted, "{what}: got {got:?}, wanted {wanted:?}");
    Ok(())
}
