//! Hostile peers: any attack ends their own connection, and no other.

mod balance;
mod handshake;
mod memory;
mod ring;
mod sleep;

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, Line, PagePolicy, PeerMapping, Pool, PoolConfig, SharedMapping};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;

use super::address::PeerProcess;
use super::connect::{create_shared, table_bytes};
use super::memory::{Layout, Side, Word};
use super::message::{Opening, SocketMessage};
use super::region::{MAPPINGS_PER_CONNECTION, MappingBudget, PeerMemory};
use super::ring::RecordHeader;
use super::window::{BUSY, ENTRY_BYTES};
use super::{SoftwareConfig, SoftwareFabric, SoftwareListener, address};
use crate::connection_manager::{ConnectProgress, Listen, SocketInput};
use crate::log_limit::{LINES, tests::logged};
use crate::{
    Access, Completion, ConnectParams, ControlEvent, Disconnect, Fabric, FabricAddress, Opcode, Posting, QpId,
    RemoteMemory, Source, Status, WorkRequest,
};

const RING: u32 = 16 << 10;
const WINDOWS: u32 = 4;
const TIMEOUT: Duration = Duration::from_secs(30);

/// A hostile client's view of its rings.
fn layout(ring_bytes: u32) -> Layout {
    Layout { side: Side::Connector, ring_bytes }
}

/// A server, and an honest client whose messages must always arrive.
struct Cluster {
    address: FabricAddress,
    server: SoftwareFabric,
    client: SoftwareFabric,
    pool: Pool,
    exposed: Pool,
    honest: (QpId, QpId),
    done: Vec<Completion>,
    events: Vec<ControlEvent>,
    sent: u64,
    listener: SoftwareListener,
}

fn pool() -> Pool {
    let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
    Pool::new(&PoolConfig { classes: vec![Class { size: 4096, count: 256 }], arena }).expect("pool")
}

fn config() -> SoftwareConfig {
    SoftwareConfig {
        ring_bytes: RING as usize,
        max_message: 4096,
        max_handshakes: 8,
        max_mapped_per_peer: 1 << 20,
        handshake_timeout: Duration::from_millis(200),
        linger: Duration::from_millis(100),
        ..SoftwareConfig::default()
    }
}

/// The configuration of an honest client, whose host may be slow.
fn honest() -> SoftwareConfig {
    SoftwareConfig { handshake_timeout: 10 * TIMEOUT, ..config() }
}

fn params() -> ConnectParams {
    ConnectParams { windows: WINDOWS, rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY, ..ConnectParams::default() }
}

impl Cluster {
    fn new(name: &str) -> Self {
        let address = FabricAddress(format!("hostile-{name}-{}", std::process::id()));
        let (mut server, mut client) = (open(), SoftwareFabric::new(honest()).expect("open"));
        let (pool, exposed) = (pool(), pool());
        for fabric in [&mut server, &mut client] {
            fabric.register(pool.arena(), Access::LOCAL).expect("register");
            fabric.register(exposed.arena(), Access::REMOTE).expect("register");
        }
        let listener = SoftwareFabric::bind(&address).expect("bind");
        server.listen(&listener).expect("listen");
        let placeholder = QpId::NONE;
        let mut cluster = Self {
            address,
            server,
            client,
            pool,
            exposed,
            honest: (placeholder, placeholder),
            done: Vec::new(),
            events: Vec::new(),
            sent: 0,
            listener,
        };
        let c = cluster.client.connect(&cluster.address.clone(), &params()).expect("connect");
        let s = cluster.accept();
        cluster.honest = (c, s);
        cluster.post_receives(8);
        cluster.check();
        cluster
    }

    /// Accepts the pending or next connect request.
    fn accept(&mut self) -> QpId {
        let request = self.wait_until("a connect request", |t| {
            let at = t.events.iter().position(|e| matches!(e, ControlEvent::ConnectRequest { .. }))?;
            match t.events.remove(at) {
                ControlEvent::ConnectRequest { request, .. } => Some(request),
                _ => None,
            }
        });
        self.server.accept(request, &params()).expect("accept")
    }

    fn post_receives(&mut self, n: usize) {
        let mut bufs: Vec<Buf> = (0..n).map_while(|_| self.pool.alloc(4096)).collect();
        assert_eq!(self.server.post_recv(None, &mut bufs), n);
    }

    fn turn(&mut self) {
        let mut none = Vec::new();
        self.server.poll_cq(&mut self.done, 64);
        self.server.poll_control(&mut self.events);
        self.client.poll_cq(&mut none, 64);
        self.client.poll_control(&mut Vec::new());
    }

    fn wait_until<T>(&mut self, what: &str, mut check: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = check(self) {
                return found;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}: {:?} {:?}", self.done, self.events);
            self.turn();
        }
    }

    /// Checks that the honest connection works.
    fn check(&mut self) {
        self.sent += 1;
        let sent = self.sent;
        let mut buf = self.pool.alloc(8).expect("buffer");
        buf.copy_from_slice(&sent.to_le_bytes());
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        let honest = self.honest;
        self.wait_until("the honest connection is up", |t| {
            t.client.table.get_mut(honest.0).filter(|q| q.is_live()).map(|_| ())
        });
        let posted = self.client.post_send(honest.0, &mut vec![Posting { wr_id: 0, signaled: false, wr }]);
        assert_eq!(posted, Ok(()));
        let got = self.wait_until("the honest message", |t| {
            let at = t.done.iter().position(|d| d.qp == honest.1 && d.opcode == Opcode::Recv)?;
            Some(t.done.swap_remove(at))
        });
        assert_eq!(got.status, Status::Success);
        let buf = got.buf.expect("buffer");
        assert_eq!(buf[..], sent.to_le_bytes());
        assert_eq!(self.server.post_recv(None, &mut vec![buf.into_buf()]), 1);
    }

    /// Waits until this queue pair of the server has ended, and destroys it.
    fn expect_end(&mut self, qp: QpId) {
        self.wait_until("the hostile connection ends", |t| {
            let at =
                t.events.iter().position(|e| matches!(e, ControlEvent::Disconnected { qp: id, .. } if *id == qp))?;
            Some(t.events.remove(at))
        });
        for done in std::mem::take(&mut self.done) {
            if let Some(buf) = done.buf {
                assert_eq!(self.server.post_recv(None, &mut vec![buf.into_buf()]), 1);
            }
        }
        self.server.destroy_qp(qp);
        self.check();
    }

    /// Connects a hostile client with a correct handshake. Also returns its queue pair at the server.
    fn hostile_peer(&mut self) -> (HostilePeer, QpId) {
        let hostile = HostilePeer::new(&self.address);
        let qp = self.accept();
        let peer_table = match SocketMessage::receive(hostile.socket.as_fd()) {
            SocketInput::Message((SocketMessage::Accept(_), mut fds)) => fds.pop().expect("a descriptor"),
            other => panic!("no answer: {other:?}"),
        };
        let bytes = table_bytes(WINDOWS).expect("windows");
        let peer_table = PeerMapping::map(peer_table, bytes).expect("map");
        self.turn();
        (HostilePeer { peer_table: Some(peer_table), ..hostile }, qp)
    }

    fn expect_refusal(&mut self, what: &str, hostile: &OwnedFd) {
        let start = Instant::now();
        while !matches!(SocketMessage::receive(hostile.as_fd()), SocketInput::Closed) {
            assert!(start.elapsed() < TIMEOUT, "{what}: not refused");
            self.turn();
        }
        assert!(!self.events.iter().any(|e| matches!(e, ControlEvent::ConnectRequest { .. })), "{what}");
        self.check();
    }
}

fn open() -> SoftwareFabric {
    SoftwareFabric::new(config()).expect("open")
}

/// The hostile end of a connection, with its memory.
struct HostilePeer {
    socket: OwnedFd,
    ring: PeerMapping,
    table: PeerMapping,
    peer_table: Option<PeerMapping>,
    layout: Layout,
}

fn hello() -> SocketMessage {
    SocketMessage::Hello(Opening {
        may_sleep: true,
        ring_bytes: RING,
        max_message: 4096,
        windows: WINDOWS,
        private_data: vec![],
    })
}

fn dial(address: &FabricAddress) -> OwnedFd {
    match address::connect(address).expect("connect") {
        ConnectProgress::Connected(socket) => socket,
        other => panic!("not connected: {other:?}"),
    }
}

impl HostilePeer {
    fn new(to: &FabricAddress) -> Self {
        let socket = dial(to);
        let layout = layout(RING);
        let (ring, ring_fd) = create_shared(layout.bytes(), "hostile").expect("ring");
        let (table, table_fd) = create_shared(table_bytes(WINDOWS).expect("windows"), "hostile").expect("table");
        hello().send(socket.as_fd(), &[ring_fd.as_fd(), table_fd.as_fd()]).expect("send");
        Self { socket, ring, table, peer_table: None, layout }
    }

    fn ring_start(&self) -> usize {
        self.layout.tx_ring()
    }

    /// The cache line with this peer's report.
    fn report(&self) -> &Line {
        self.ring.line(64 * self.layout.lines().own_report).expect("a line")
    }

    fn send(&self, message: &SocketMessage, fds: &[BorrowedFd<'_>]) {
        message.send(self.socket.as_fd(), fds).expect("send");
    }
}

/// The word at an offset of shared memory.
fn word(memory: &PeerMapping, at: usize) -> &AtomicU64 {
    &memory.line(at & !63).expect("a line")[at % 64 / 8]
}

fn sealed(bytes: usize) -> SharedMapping {
    SharedMapping::create(bytes, "sealed").expect("memory")
}

fn unsealed(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
    rustix::fs::ftruncate(&fd, bytes).expect("ftruncate");
    fd
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").expect("/dev/null").into()
}

fn send_raw(socket: &OwnedFd, bytes: &[u8]) {
    rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL).expect("send");
}

fn lend(cluster: &Cluster) -> Lent {
    cluster.exposed.alloc(4096).expect("buffer").lend().expect("lend")
}
