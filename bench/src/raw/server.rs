//! Server of the raw tests: echoes or discards messages, exposes memory.
#![forbid(unsafe_code)]

use rpcrdma::fabric::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, Opcode, PostError, Posting, QpId, RequestId, Status,
    WindowId, WorkRequest,
};
use rpcrdma_config::print_error;
use rpcrdma_mempool::{Buf, Lent, Pool};

use super::hello::{Hello, MAX_MEMORY, SIGNAL_EVERY, WELCOME_BYTES, Welcome};
use super::memory::registered_pool;
use crate::failure::Failure;
use crate::idle::Idler;

/// Completions per poll.
const POLL_BATCH: usize = 64;
/// Fewest receives in a posted chain.
const REFILL_AT: usize = 16;
/// Polls of a busy server per poll of connection management.
const CONTROL_EVERY: u32 = 1 << 16;

/// Serves raw tests on one listening fabric.
pub(crate) struct RawServer<F: Fabric> {
    fabric: F,
    welcome_message: Welcome,
    /// By slot of the queue pair.
    peers: Vec<Option<RawPeer>>,
    /// Peers with work in this turn, each once.
    touched: Vec<usize>,
    idler: Idler,
    completions: Vec<Completion>,
    events: Vec<ControlEvent>,
    turns: u32,
}

/// One connection.
struct RawPeer {
    qp: QpId,
    name: String,
    hello: Hello,
    messages: Pool,
    exposed: Option<Exposed>,
    chain: Vec<Posting>,
    /// Buffers to post as receives.
    unposted: Vec<Buf>,
    sends: u32,
    is_touched: bool,
}

/// Memory for the client's Reads and Writes.
struct Exposed {
    pool: Pool,
    memory: Lent,
}

impl<F: Fabric> RawServer<F> {
    /// Serves connections to `fabric`. Clients receive `welcome_message`.
    pub(crate) fn new(fabric: F, welcome_message: Welcome, idler: Idler) -> Self {
        Self {
            fabric,
            welcome_message,
            peers: Vec::new(),
            touched: Vec::new(),
            idler,
            completions: Vec::with_capacity(POLL_BATCH),
            events: Vec::new(),
            turns: 0,
        }
    }

    pub(crate) fn run(mut self) -> ! {
        loop {
            self.turn();
        }
    }

    /// Number of connections.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.peers.iter().flatten().count()
    }

    /// One turn: completions, posting, and connection management if it is due.
    pub(crate) fn turn(&mut self) {
        self.turns = self.turns.wrapping_add(1);
        let mut completions = std::mem::take(&mut self.completions);
        let is_control_due = if self.fabric.poll_cq(&mut completions, POLL_BATCH) == 0 {
            self.idler.empty(&mut self.fabric)
        } else {
            self.idler.busy();
            self.turns.is_multiple_of(CONTROL_EVERY)
        };
        for completion in completions.drain(..) {
            self.process_completion(completion);
        }
        self.completions = completions;
        while let Some(slot) = self.touched.pop() {
            self.post(slot);
        }
        if is_control_due {
            self.process_control_events();
        }
    }

    fn process_completion(&mut self, completion: Completion) {
        let slot = completion.qp.slot as usize;
        let Some(peer) = self.peers.get_mut(slot).and_then(Option::as_mut).filter(|p| p.qp == completion.qp) else {
            return; // a late completion of a destroyed queue pair
        };
        // A later event or an earlier completion reports the cause of a flush.
        if completion.status == Status::Flushed {
            return;
        }
        if !completion.status.is_ok() {
            let why = format!("{:?} ended with {:?}", completion.opcode, completion.status);
            self.drop_peer(slot, Some(&why));
            return;
        }
        if let (Opcode::Recv, Some(buf)) = (completion.opcode, completion.buf) {
            if peer.hello.echo {
                peer.send(buf.into_buf());
                peer.unposted.extend(peer.messages.alloc(peer.hello.buffer_bytes()));
            } else {
                peer.unposted.push(buf.into_buf());
            }
        }
        if !peer.hello.batch {
            self.post(slot);
        } else if !std::mem::replace(&mut peer.is_touched, true) {
            self.touched.push(slot);
        }
    }

    /// Posts the gathered work requests and receives of a peer.
    fn post(&mut self, slot: usize) {
        let Some(peer) = self.peers.get_mut(slot).and_then(Option::as_mut) else { return };
        peer.is_touched = false;
        if peer.unposted.len() >= if peer.hello.batch { REFILL_AT } else { 1 } {
            self.fabric.post_recv(Some(peer.qp), &mut peer.unposted);
        }
        if peer.chain.is_empty() {
            return;
        }
        match self.fabric.post_send(peer.qp, &mut peer.chain) {
            // The completion that frees an entry touches the peer again.
            Ok(()) | Err(PostError::QueueFull) => {}
            Err(error) => self.drop_peer(slot, Some(&format!("post: {error:?}"))),
        }
    }

    fn process_control_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.fabric.poll_control(&mut events);
        for event in events.drain(..) {
            match event {
                ControlEvent::ConnectRequest { request, private_data, peer } => {
                    if let Err(why) = self.accept(request, &private_data, &peer) {
                        print_error!("rpcperf: {peer}: refused: {why}");
                        let room = self.fabric.capabilities().max_accept_private_data;
                        let text = why.as_bytes();
                        self.fabric.reject(request, &text[..text.len().min(room)]);
                    }
                }
                ControlEvent::Established { qp, .. } => self.welcome(qp),
                ControlEvent::Disconnected { qp, .. } => self.close(qp, None),
                ControlEvent::Rejected { qp, .. } => self.close(qp, None),
                ControlEvent::ConnectFailed { qp, error } => self.close(qp, Some(&error.to_string())),
                ControlEvent::Device(event) => print_error!("rpcperf: {event}"),
            }
        }
        self.events = events;
    }

    /// Prepares the requested resources, then accepts.
    fn accept(&mut self, request: RequestId, private_data: &[u8], name: &str) -> Result<(), String> {
        let hello = Hello::decode(private_data)?;
        let longest = self.fabric.capabilities().max_message;
        if hello.message > longest {
            return Err(format!("messages of {} bytes exceed the limit of the device, {longest}", hello.message));
        }
        if hello.memory().is_none_or(|bytes| bytes > MAX_MEMORY) {
            return Err(format!("a connection needs more than {MAX_MEMORY} bytes of memory here: lower -s or -t"));
        }
        let (messages, exposed) = self.allocate_memory(&hello).map_err(|e| e.to_string())?;
        let params = ConnectParams {
            send_queue_depth: hello.depth + 2 * SIGNAL_EVERY,
            own_receive_queue: Some(hello.receives() as u32),
            windows: 1,
            rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY,
            ..ConnectParams::default()
        };
        let qp = match self.fabric.accept(request, &params) {
            Ok(qp) => qp,
            Err(error) => {
                self.release(messages, exposed);
                return Err(error.to_string());
            }
        };
        let mut peer = RawPeer {
            qp,
            name: name.to_owned(),
            hello,
            messages,
            exposed,
            chain: Vec::with_capacity(hello.buffers()),
            unposted: Vec::with_capacity(hello.buffers()),
            sends: 0,
            is_touched: false,
        };
        let RawPeer { unposted, messages, .. } = &mut peer;
        unposted.extend((0..hello.receives()).map_while(|_| messages.alloc(hello.buffer_bytes())));
        self.fabric.post_recv(Some(qp), &mut peer.unposted);
        let slot = qp.slot as usize;
        if self.peers.len() <= slot {
            self.peers.resize_with(slot + 1, || None);
        }
        self.peers[slot] = Some(peer);
        Ok(())
    }

    fn allocate_memory(&mut self, hello: &Hello) -> Result<(Pool, Option<Exposed>), Failure> {
        let messages = registered_pool(&mut self.fabric, hello.buffer_bytes(), hello.buffers(), Access::LOCAL)?;
        if hello.exposed == 0 {
            return Ok((messages, None));
        }
        match self.expose(hello.exposed as usize) {
            Ok(exposed) => Ok((messages, Some(exposed))),
            Err(failure) => {
                self.release(messages, None);
                Err(failure)
            }
        }
    }

    /// Allocates memory for one peer.
    ///
    /// The arena is for this peer only, because some fabrics let a peer access all of it.
    fn expose(&mut self, bytes: usize) -> Result<Exposed, Failure> {
        let pool = registered_pool(&mut self.fabric, bytes, 1, Access::REMOTE)?;
        let memory = super::memory::alloc(&pool, bytes)?.lend();
        let memory = memory.map_err(|_| Failure::Run("a pool lends on its own thread only".into()))?;
        Ok(Exposed { pool, memory })
    }

    /// Binds a window to the exposed memory, if any, and sends its key and address. The binding completes before the
    /// message.
    fn welcome(&mut self, qp: QpId) {
        let Some(peer) = self.peers.get_mut(qp.slot as usize).and_then(Option::as_mut).filter(|p| p.qp == qp) else {
            return;
        };
        let slot = qp.slot as usize;
        let mut welcome = self.welcome_message;
        if let Some(exposed) = &peer.exposed {
            let window: WindowId = match self.fabric.alloc_window(qp) {
                Ok(window) => window,
                Err(error) => return self.drop_peer(slot, Some(&error.to_string())),
            };
            welcome.rkey = self.fabric.next_rkey(window);
            welcome.address = self.fabric.remote_address(&exposed.memory, 0);
            let mem = exposed.memory.clone();
            let len = mem.len();
            let wr = WorkRequest::Bind { window, mem, offset: 0, len, access: Access::REMOTE };
            peer.chain.push(Posting { wr_id: 0, signaled: true, wr });
        }
        // Some receives could not be posted before the connection was established.
        self.fabric.post_recv(Some(qp), &mut peer.unposted);
        if let Some(mut buf) = peer.messages.alloc(WELCOME_BYTES) {
            buf.copy_from_slice(&welcome.encode());
            peer.send(buf);
        }
        self.post(slot);
    }

    /// Closes a connection because of a control event, unless it is closed already.
    fn close(&mut self, qp: QpId, why: Option<&str>) {
        let slot = qp.slot as usize;
        if self.peers.get(slot).and_then(Option::as_ref).is_some_and(|peer| peer.qp == qp) {
            self.drop_peer(slot, why);
        }
    }

    /// Closes a connection and frees its memory; prints the cause unless the client closed it.
    fn drop_peer(&mut self, slot: usize, why: Option<&str>) {
        let Some(peer) = self.peers.get_mut(slot).and_then(Option::take) else { return };
        if let Some(why) = why {
            print_error!("rpcperf: {}: {why}", peer.name);
        }
        self.fabric.destroy_qp(peer.qp);
        let RawPeer { messages, exposed, chain, unposted, .. } = peer;
        drop((chain, unposted));
        self.release(messages, exposed);
    }

    fn release(&mut self, messages: Pool, exposed: Option<Exposed>) {
        let arenas = [Some(messages.arena().id()), exposed.as_ref().map(|e| e.pool.arena().id())];
        drop((messages, exposed));
        for arena in arenas.into_iter().flatten() {
            if let Err(error) = self.fabric.deregister(arena) {
                print_error!("rpcperf: deregister: {error}");
            }
        }
    }
}

impl RawPeer {
    fn send(&mut self, buf: Buf) {
        self.sends = self.sends.wrapping_add(1);
        let signaled = self.sends.is_multiple_of(SIGNAL_EVERY);
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        self.chain.push(Posting { wr_id: 0, signaled, wr });
    }
}
