//! Hostile peers: whatever they do costs them their own connection, and nobody else anything.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rpcrdma_mempool::{
    ArenaConfig, Buf, Class, Lent, PagePolicy, PeerMapping, Pool, PoolConfig, SharedMapping,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;

use super::address::{Accepted, Peer};
use super::connect::{make, table_bytes};
use super::memory::{Layout, Memory, Side};
use super::message::{Message, Received};
use super::region::{Budget, PER_CONNECTION, PeerMemory};
use super::ring::{Header, Producer};
use super::window::{BUSY, ENTRY};
use super::{SoftwareConfig, SoftwareFabric, SoftwareListener, address};
use crate::log_limit::{LINES, tests::heard};
use crate::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, Opcode, Posting,
    QpId, RemoteMemory, Source, Status, WorkRequest,
};

const RING: u32 = 16 << 10;
const WINDOWS: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(10);

/// A server, and an honest client whose messages must get through whatever happens.
struct Town {
    address: FabricAddress,
    server: SoftwareFabric,
    client: SoftwareFabric,
    pool: Pool,
    exposed: Pool,
    honest: (QpId, QpId),
    done: Vec<Completion>,
    events: Vec<ControlEvent>,
    sent: u64,
    _listener: SoftwareListener,
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

fn params() -> ConnectParams {
    ConnectParams { windows: WINDOWS, rnr_retry: 7, ..ConnectParams::default() }
}

impl Town {
    fn new(name: &str) -> Self {
        let address = FabricAddress(format!("hostile-{name}-{}", std::process::id()));
        let (mut server, mut client) = (open(), open());
        let (pool, exposed) = (pool(), pool());
        for fabric in [&mut server, &mut client] {
            fabric.register(pool.arena(), Access::LOCAL).expect("register");
            fabric.register(exposed.arena(), Access::REMOTE).expect("register");
        }
        let listener = SoftwareFabric::bind(&address).expect("bind");
        server.listen(&listener).expect("listen");
        let placeholder = QpId { slot: u32::MAX, generation: 0 };
        let mut town = Self {
            address,
            server,
            client,
            pool,
            exposed,
            honest: (placeholder, placeholder),
            done: Vec::new(),
            events: Vec::new(),
            sent: 0,
            _listener: listener,
        };
        let c = town.client.connect(&town.address.clone(), &params()).expect("connect");
        let s = town.accept();
        town.honest = (c, s);
        town.receives(8);
        town.check();
        town
    }

    /// Accepts the connect request that is there, or comes.
    fn accept(&mut self) -> QpId {
        let request = self.until("a connect request", |t| {
            let at = t.events.iter().position(|e| matches!(e, ControlEvent::ConnectRequest { .. }))?;
            match t.events.remove(at) {
                ControlEvent::ConnectRequest { request, .. } => Some(request),
                _ => None,
            }
        });
        self.server.accept(request, &params()).expect("accept")
    }

    fn receives(&mut self, n: usize) {
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

    fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {:?} {:?}", self.done, self.events);
            self.turn();
        }
    }

    /// The honest connection works.
    fn check(&mut self) {
        self.sent += 1;
        let sent = self.sent;
        let mut buf = self.pool.alloc(8).expect("buffer");
        buf.copy_from_slice(&sent.to_le_bytes());
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        let honest = self.honest;
        self.until("the honest connection is up", |t| {
            t.client.table.get(honest.0).filter(|q| q.is_live()).map(|_| ())
        });
        let posted = self.client.post_send(honest.0, &mut vec![Posting { wr_id: 0, signalled: false, wr }]);
        assert_eq!(posted, Ok(()));
        let got = self.until("the honest message", |t| {
            let at = t.done.iter().position(|d| d.qp == honest.1 && d.opcode == Opcode::Recv)?;
            Some(t.done.swap_remove(at))
        });
        assert_eq!(got.status, Status::Success);
        let buf = got.buf.expect("buffer");
        assert_eq!(buf[..], sent.to_le_bytes());
        assert_eq!(self.server.post_recv(None, &mut vec![buf.into_buf()]), 1);
    }

    /// This queue pair of the server ends.
    fn ends(&mut self, qp: QpId) {
        self.until("the hostile connection ends", |t| {
            let at = t
                .events
                .iter()
                .position(|e| matches!(e, ControlEvent::Disconnected { qp: id, .. } if *id == qp))?;
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

    /// A hostile client with a correct handshake; its queue pair at the server.
    fn intruder(&mut self) -> (Intruder, QpId) {
        let intruder = Intruder::new(&self.address);
        let qp = self.accept();
        let peer_table = match Message::receive(intruder.socket.as_fd()) {
            Received::Message(Message::Accept { .. }, mut fds) => fds.pop().expect("a descriptor"),
            other => panic!("no answer: {other:?}"),
        };
        let bytes = table_bytes(WINDOWS).expect("windows");
        let peer_table = PeerMapping::map(peer_table, bytes).expect("map");
        self.turn();
        (Intruder { peer_table: Some(peer_table), ..intruder }, qp)
    }

    fn refused(&mut self, what: &str, intruder: &OwnedFd) {
        let start = Instant::now();
        while !matches!(Message::receive(intruder.as_fd()), Received::Closed) {
            assert!(start.elapsed() < PATIENCE, "{what}: it is not refused");
            self.turn();
        }
        assert!(!self.events.iter().any(|e| matches!(e, ControlEvent::ConnectRequest { .. })), "{what}");
        self.check();
    }
}

fn open() -> SoftwareFabric {
    SoftwareFabric::new(config()).expect("open")
}

/// A connection, and what is behind it, in hostile hands.
struct Intruder {
    socket: OwnedFd,
    ring: PeerMapping,
    table: PeerMapping,
    peer_table: Option<PeerMapping>,
    layout: Layout,
}

fn hello() -> Message {
    Message::Hello {
        may_sleep: true,
        ring_bytes: RING,
        max_message: 4096,
        windows: WINDOWS,
        private_data: vec![],
    }
}

fn dial(address: &FabricAddress) -> OwnedFd {
    address::connect(address).expect("connect").expect("room")
}

impl Intruder {
    fn new(to: &FabricAddress) -> Self {
        let socket = dial(to);
        let layout = Layout::new(RING);
        let (ring, ring_fd) = make(layout.bytes(), "intruder").expect("ring");
        let (table, table_fd) = make(table_bytes(WINDOWS).expect("windows"), "intruder").expect("table");
        hello().send(socket.as_fd(), &[ring_fd.as_fd(), table_fd.as_fd()]).expect("send");
        Self { socket, ring, table, peer_table: None, layout }
    }

    fn at(&self) -> usize {
        self.layout.ring(Side::Connector)
    }

    fn say(&self, message: &Message, fds: &[BorrowedFd<'_>]) {
        message.send(self.socket.as_fd(), fds).expect("send");
    }
}

fn sealed(bytes: usize) -> SharedMapping {
    SharedMapping::create(bytes, "sealed").expect("memory")
}

fn unsealed(bytes: u64) -> OwnedFd {
    let fd =
        rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
    rustix::fs::ftruncate(&fd, bytes).expect("ftruncate");
    fd
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").expect("/dev/null").into()
}

fn raw(socket: &OwnedFd, bytes: &[u8]) {
    rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL).expect("send");
}

#[test]
fn bad_hellos_are_refused() {
    let mut town = Town::new("hello");
    let layout = Layout::new(RING);
    let ring = sealed(layout.bytes());
    let table = sealed(table_bytes(WINDOWS).expect("windows"));
    let short = sealed(4096);
    let (open_ring, open_table) = (unsealed(layout.bytes() as u64), unsealed(4096));
    let nothing = null();
    let good = [ring.fd(), table.fd()];
    let change = |ring_bytes, max_message, windows| Message::Hello {
        may_sleep: false,
        ring_bytes,
        max_message,
        windows,
        private_data: vec![],
    };
    let cases: Vec<(&str, Message, Vec<BorrowedFd<'_>>)> = vec![
        ("no descriptors", hello(), vec![]),
        ("one descriptor", hello(), vec![ring.fd()]),
        ("unsealed rings", hello(), vec![open_ring.as_fd(), table.fd()]),
        ("an unsealed table", hello(), vec![ring.fd(), open_table.as_fd()]),
        ("rings too short", hello(), vec![short.fd(), table.fd()]),
        ("rings too long", change(RING / 2, 2048, WINDOWS), good.to_vec()),
        ("a device", hello(), vec![nothing.as_fd(), nothing.as_fd()]),
        ("no rings", change(0, 4096, WINDOWS), good.to_vec()),
        ("an odd ring", change(12345, 4096, WINDOWS), good.to_vec()),
        ("huge rings", change(1 << 31, 4096, WINDOWS), good.to_vec()),
        ("messages longer than rings", change(RING, RING, WINDOWS), good.to_vec()),
        ("no messages", change(RING, 0, WINDOWS), good.to_vec()),
        ("windows without end", change(RING, 4096, u32::MAX), good.to_vec()),
        ("more windows than the table has", change(RING, 4096, 60_000), good.to_vec()),
        ("an answer instead", Message::Reject { private_data: vec![1] }, vec![]),
        ("a bell instead", Message::Bell, vec![]),
    ];
    for (what, message, fds) in &cases {
        let socket = dial(&town.address);
        message.send(socket.as_fd(), fds).expect("send");
        town.refused(what, &socket);
    }
    // The same with bytes that are no message at all.
    for bytes in [
        &b""[..],
        b"x",
        b"RPsf",
        b"RPsf\x02\0",
        b"RPsf\x03\0\x01\0",
        b"RPsf\x02\0\x09\0",
        b"RPsf\x02\0\x05\xff",
        &[0; 288],
        &[0xff; 5000],
    ] {
        let socket = dial(&town.address);
        raw(&socket, bytes);
        town.refused(&format!("{} bytes", bytes.len()), &socket);
    }
}

/// Other users of the host, who knock without end: a turn stays short, and so does the log.
#[test]
fn a_storm_of_strangers() {
    const STRANGERS: usize = 200;
    heard();
    let mut town = Town::new("strangers");
    let gate = FabricAddress(format!("hostile-gate-{}", std::process::id()));
    let listener = SoftwareListener::bind_for(&gate, |_| Err("a stranger".to_owned())).expect("bind");
    town.server.listen(&listener).expect("listen");
    let strangers: Vec<OwnedFd> = (0..STRANGERS).map(|_| dial(&gate)).collect();
    let most = config().max_handshakes as u64;
    let before = town.server.stats().requests_refused;
    town.server.poll_control(&mut town.events);
    assert_eq!(town.server.stats().requests_refused - before, most, "refusals in one turn");
    for socket in &strangers {
        town.refused("a stranger", socket);
    }
    assert_eq!(town.server.stats().requests_refused - before, STRANGERS as u64);
    let (intruder, qp) = town.intruder();
    drop(intruder);
    town.ends(qp);
    // The sum is told when the time is over, or at the end.
    drop(town);
    let lines = heard();
    let (sums, lines): (Vec<String>, Vec<String>) =
        lines.into_iter().partition(|line| line.contains("more: "));
    assert!(lines.iter().all(|line| line.contains("a stranger")), "{lines:?}");
    // So many in ten seconds, and the machine may be slow.
    assert!(lines.len() <= 3 * LINES as usize && !sums.is_empty(), "{lines:?} {sums:?}");
    let told: usize = sums.iter().filter_map(|line| line.split(' ').nth(1)?.parse::<usize>().ok()).sum();
    assert_eq!(told + lines.len(), STRANGERS, "{sums:?}");
}

#[test]
fn a_flag_is_known_only_where_it_says_something() {
    for (kind, body, known) in [(1, 12, true), (2, 12, true), (3, 0, false), (4, 16, false), (5, 0, false)] {
        for (flags, known) in [(0, true), (1, known), (2, false)] {
            let bytes = [b"RPsf\x02\0".as_slice(), &[kind, flags], &[0; 16][..body]].concat();
            assert_eq!(Message::decode(&bytes).is_ok(), known, "kind {kind}, flags {flags}");
        }
    }
}

#[test]
fn silent_handshakes_cost_only_themselves() {
    let mut town = Town::new("silent");
    let mut silent: Vec<OwnedFd> = Vec::new();
    for _ in 0..100 {
        silent.push(dial(&town.address));
        town.turn();
    }
    town.check();
    // Somebody who does speak gets through, with all of them still there.
    let (intruder, qp) = town.intruder();
    drop(intruder);
    town.ends(qp);
    // The silent ones are gone after their time.
    for socket in &silent {
        town.refused("silent", socket);
    }
}

/// A process that opens connections without end, and says nothing on any, drives out its own and nobody else's.
#[test]
fn silence_of_one_process_leaves_places_to_others() {
    static PID: AtomicI32 = AtomicI32::new(1);
    let mut town = Town::new("one-process");
    town.server.common.config.handshake_timeout = 10 * PATIENCE;
    let gate = FabricAddress(format!("hostile-process-{}", std::process::id()));
    let admit = |_: BorrowedFd<'_>| Ok(Peer { pid: PID.load(Ordering::Relaxed), uid: 0 });
    let listener = SoftwareListener::bind_for(&gate, admit).expect("bind");
    town.server.listen(&listener).expect("listen");
    // Slow, but honest.
    let slow = dial(&gate);
    town.turn();
    PID.store(2, Ordering::Relaxed);
    let mut silent = Vec::new();
    for _ in 0..10 * config().max_handshakes {
        silent.push(dial(&gate));
        town.turn();
    }
    assert_eq!(town.server.connections.requests.len(), 1 + config().max_handshakes / 4);
    let (_ring, ring_fd) = make(Layout::new(RING).bytes(), "slow").expect("ring");
    let (_table, table_fd) = make(table_bytes(WINDOWS).expect("windows"), "slow").expect("table");
    hello().send(slow.as_fd(), &[ring_fd.as_fd(), table_fd.as_fd()]).expect("send");
    let qp = town.accept();
    town.turn();
    assert!(matches!(Message::receive(slow.as_fd()), Received::Message(Message::Accept { .. }, _)));
    drop(slow);
    town.ends(qp);
}

#[test]
fn record_headers_that_cannot_be() {
    let mut town = Town::new("headers");
    let valid = Header::message(8, None, 0).words().0;
    let mut random = 12345u64;
    for i in 0..120u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let first = match i {
            0 => u64::MAX,
            1 => 1,
            // One byte too long; as long as it gets.
            2 => valid & !0xff_ffff | 4097,
            3 => valid | 0xff_ffff,
            4 => valid | 1 << 31,
            // It has taken what was never sent.
            5 => valid | 64 << 32,
            _ => random | 1 << 31,
        };
        let violations = town.server.stats().peer_violations;
        let (intruder, qp) = town.intruder();
        intruder.ring.store_relaxed(intruder.at() + 8, random);
        intruder.ring.publish(intruder.at(), first);
        town.ends(qp);
        assert_eq!(town.server.stats().peer_violations, violations + 1, "{first:#x} {random:#x}");
    }
}

#[test]
fn reports_that_cannot_be() {
    let mut town = Town::new("reports");
    let send = |town: &mut Town, qp| {
        let buf = town.pool.alloc(100).expect("buffer");
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        town.server.post_send(qp, &mut vec![Posting { wr_id: 9, signalled: true, wr }])
    };
    let (intruder, qp) = town.intruder();
    assert_eq!(send(&mut town, qp), Ok(()));
    intruder.ring.publish(intruder.layout.report(Side::Connector), 1 << 40);
    town.until("the Send ends", |t| {
        t.done.iter().find(|d| d.qp == qp && d.status == Status::Flushed).map(|_| ())
    });
    town.ends(qp);
    // Refusals with codes that no one has.
    for code in [3, u64::MAX] {
        let (intruder, qp) = town.intruder();
        assert_eq!(send(&mut town, qp), Ok(()));
        intruder.ring.publish(intruder.layout.report(Side::Connector) + 8, code);
        town.until("the Send ends", |t| {
            t.done.iter().find(|d| d.status == Status::RemoteOperation).map(|_| ())
        });
        town.ends(qp);
    }
}

#[test]
fn messages_out_of_place() {
    let mut town = Town::new("control");
    let memory = sealed(8192);
    let open_memory = unsealed(8192);
    let big = sealed(2 << 20);
    type Attack<'a> = Box<dyn Fn(&Intruder) + 'a>;
    let region = |id, bytes| Message::Region { id, bytes };
    let attacks: Vec<(&str, Attack<'_>)> = vec![
        ("a second Hello", Box::new(|i| i.say(&hello(), &[memory.fd(), memory.fd()]))),
        ("a Reject", Box::new(|i| i.say(&Message::Reject { private_data: vec![] }, &[]))),
        ("a region of nothing", Box::new(|i| i.say(&region(1, 8192), &[]))),
        ("a region of two", Box::new(|i| i.say(&region(1, 8192), &[memory.fd(), memory.fd()]))),
        ("a bell with a descriptor", Box::new(|i| i.say(&Message::Bell, &[memory.fd()]))),
        ("an unsealed region", Box::new(|i| i.say(&region(1, 8192), &[open_memory.as_fd()]))),
        ("a region that lies of its size", Box::new(|i| i.say(&region(1, 4096), &[memory.fd()]))),
        ("a region of no bytes", Box::new(|i| i.say(&region(1, 0), &[memory.fd()]))),
        ("a region of too many bytes", Box::new(|i| i.say(&region(1, 2 << 20), &[big.fd()]))),
        ("a region of all bytes", Box::new(|i| i.say(&region(1, u64::MAX), &[big.fd()]))),
        (
            "one region twice",
            Box::new(|i| {
                i.say(&region(1, 8192), &[memory.fd()]);
                i.say(&region(1, 8192), &[memory.fd()]);
            }),
        ),
        (
            "more regions than may be mapped",
            Box::new(|i| {
                for id in 0..100 {
                    i.say(&region(id, 16 << 10), &[sealed(16 << 10).fd()]);
                }
                for id in 100..200 {
                    // By now it may have been shut out.
                    let _ = region(id, 16 << 10).send(i.socket.as_fd(), &[sealed(16 << 10).fd()]);
                }
            }),
        ),
        ("noise", Box::new(|i| raw(&i.socket, &[7; 100]))),
    ];
    for (what, attack) in &attacks {
        println!("{what}");
        let violations = town.server.stats().peer_violations;
        let (intruder, qp) = town.intruder();
        attack(&intruder);
        town.ends(qp);
        assert_eq!(town.server.stats().peer_violations, violations + 1, "{what}");
    }
}

/// Many pieces of memory, each of which is a mapping, of which a process has so many.
#[test]
fn shown_memory_is_a_share_of_the_mappings_that_there_are() {
    const MOST: usize = 64;
    static BUDGET: Budget = Budget::new(MOST);
    let mut town = Town::new("mappings");
    let budget = &BUDGET;
    town.server.common.peer_memory = PeerMemory::new(budget);
    let show = |intruder: &Intruder, id| {
        let _ = Message::Region { id, bytes: 4096 }.send(intruder.socket.as_fd(), &[sealed(4096).fd()]);
    };
    // One alone gets its share, or what its own bound is, and no more.
    let default = town.server.common.config.max_regions_per_peer;
    for (regions, taken_by_one) in [(default, 4..=MOST / 8), (3, 3..=3)] {
        town.server.common.config.max_regions_per_peer = regions;
        let violations = town.server.stats().peer_violations;
        let (intruder, qp) = town.intruder();
        assert_eq!(budget.left(), MOST - PER_CONNECTION);
        (0..MOST as u32).for_each(|id| show(&intruder, id));
        town.until("it is ended", |t| (t.server.stats().peer_violations > violations).then_some(()));
        let taken = MOST - PER_CONNECTION - budget.left();
        assert!(
            taken_by_one.contains(&taken),
            "{taken} of {MOST} mappings, max_regions_per_peer is {regions}"
        );
        drop(intruder);
        town.ends(qp);
        assert_eq!(budget.left(), MOST, "all come back");
    }
    town.server.common.config.max_regions_per_peer = default;
    let violations = town.server.stats().peer_violations;
    // Many together: the last ones of them get one each, and when there is none left, no connection.
    let mut intruders = Vec::new();
    while budget.left() >= PER_CONNECTION {
        let (intruder, qp) = town.intruder();
        let before = budget.left();
        for id in 0..8 {
            if budget.left() / 8 > id as usize || id == 0 && before > 0 {
                show(&intruder, id);
                town.turn();
            }
        }
        assert!(before == 0 || budget.left() < before, "a connection cannot show its first memory");
        intruders.push((intruder, qp));
    }
    assert_eq!(town.server.stats().peer_violations, violations, "each kept to its share");
    let refused = town.server.stats().requests_refused;
    let one_more = Intruder::new(&town.address);
    town.refused("there are no mappings", &one_more.socket);
    assert_eq!(town.server.stats().requests_refused, refused + 1);
    for (intruder, qp) in intruders {
        drop(intruder);
        town.ends(qp);
    }
    assert_eq!(budget.left(), MOST, "all come back");
    let (intruder, qp) = town.intruder();
    drop(intruder);
    town.ends(qp);
}

/// Memory that takes long to unmap is unmapped elsewhere; its place is free when it is.
#[test]
fn long_memory_gives_its_place_back() {
    const LEN: usize = 256 << 20;
    static BUDGET: Budget = Budget::new(4);
    let budget = &BUDGET;
    let mut memory = PeerMemory::new(budget);
    let long = sealed(LEN);
    let show = || long.fd().try_clone_to_owned().expect("a descriptor");
    let first = memory.map(show(), LEN as u64).expect("mapped");
    let second = memory.map(show(), LEN as u64).expect("mapped");
    assert_eq!((first.len(), budget.left()), (LEN, 3), "one mapping for both");
    drop(first);
    assert_eq!(budget.left(), 3);
    drop(second);
    let start = Instant::now();
    while budget.left() < 4 {
        assert!(start.elapsed() < PATIENCE, "it is not unmapped");
        std::thread::yield_now();
    }
    assert_eq!(memory.map(show(), LEN as u64 + 1).err().map(|why| why.contains("announced")), Some(true));
    let places: Vec<_> = (0..4).map(|_| budget.take(1).expect("a place")).collect();
    let why = memory.map(show(), LEN as u64).expect_err("there is no place");
    assert!(why.contains("vm.max_map_count"), "{why}");
    drop(places);
    assert_eq!(budget.left(), 4);
}

/// Bells without end, and nobody there to be woken.
#[test]
fn a_storm_of_bells() {
    let mut town = Town::new("bells");
    let (intruder, qp) = town.intruder();
    for _ in 0..200 {
        while Message::Bell.send(intruder.socket.as_fd(), &[]).is_ok() {}
        town.check();
    }
    drop(intruder);
    town.ends(qp);
}

fn lend(town: &Town) -> Lent {
    town.exposed.alloc(4096).expect("buffer").lend().expect("lend")
}

/// A table whose entries lead nowhere, or into memory that is not that long.
#[test]
fn windows_that_lie() {
    let mut town = Town::new("windows");
    let memory = sealed(8192);
    let rights = 3u64 << 32;
    // Region and rights, first address, length, address asked for.
    let lies: [(u64, u64, u64, u64); 6] = [
        (7 | rights, 0, 4096, 0),
        (1 | rights, 0, u64::MAX, 8192 - 1),
        (1 | rights, 0, u64::MAX, 1 << 40),
        (1 | rights, u64::MAX - 10, 4096, u64::MAX - 5),
        (1, 0, 4096, 0),
        (1 | rights, 4096, 100, 0),
    ];
    for (place, first, len, address) in lies {
        for write in [true, false] {
            let refused = town.server.stats().access_refused;
            let (intruder, qp) = town.intruder();
            intruder.say(&Message::Region { id: 1, bytes: 8192 }, &[memory.fd()]);
            let rkey = 0xabcd_0000u32;
            intruder.table.store_relaxed(8, place);
            intruder.table.store_relaxed(16, first);
            intruder.table.store_relaxed(24, len);
            intruder.table.publish(0, u64::from(rkey) << 32 | 1);
            let remote = RemoteMemory { rkey, address };
            let wr = if write {
                WorkRequest::Write { src: Source::Lent(lend(&town)), offset: 0, len: 64, remote }
            } else {
                WorkRequest::Read { dst: lend(&town), offset: 0, len: 64, remote }
            };
            let posted = town.server.post_send(qp, &mut vec![Posting { wr_id: 1, signalled: true, wr }]);
            assert_eq!(posted, Ok(()));
            town.until("it is refused", |t| {
                t.done.iter().find(|d| d.qp == qp && d.status == Status::RemoteAccess).map(|_| ())
            });
            town.ends(qp);
            assert_eq!(
                town.server.stats().access_refused,
                refused + 1,
                "{place:#x} {first:#x} {len:#x} {address:#x}"
            );
        }
    }
    // Keys whose index is behind the table.
    let (_intruder, qp) = town.intruder();
    let remote = RemoteMemory { rkey: u32::MAX, address: 0 };
    let wr = WorkRequest::Write { src: Source::Lent(lend(&town)), offset: 0, len: 64, remote };
    town.server.post_send(qp, &mut vec![Posting { wr_id: 1, signalled: true, wr }]).expect("post");
    town.ends(qp);
}

/// A peer that is in the middle of a copy for ever holds its own connection up, and memory only for `linger`.
#[test]
fn a_peer_that_never_ends_its_copy() {
    let mut town = Town::new("busy");
    let (intruder, qp) = town.intruder();
    let window = town.server.alloc_window(qp).expect("window");
    let mem = lend(&town);
    let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len: 4096, access: Access::REMOTE };
    town.server.post_send(qp, &mut vec![Posting { wr_id: 1, signalled: true, wr }]).expect("bind");
    let table = intruder.peer_table.as_ref().expect("table");
    let entry = window.index as usize * ENTRY;
    let valid = table.load(entry);
    assert_eq!(valid & 1, 1, "not bound: {valid:#x}");
    table.publish(entry + BUSY, 1);
    let wr = WorkRequest::LocalInvalidate { window };
    town.server.post_send(qp, &mut vec![Posting { wr_id: 2, signalled: true, wr }]).expect("invalidate");
    for _ in 0..200 {
        town.check();
    }
    assert!(!town.done.iter().any(|d| d.opcode == Opcode::LocalInvalidate), "revoked while the peer copies");
    town.server.destroy_qp(qp);
    let mem = mem.reclaim().expect_err("the memory is free while the peer copies");
    let mut mem = Some(mem);
    town.until("the memory comes home", |t| {
        t.check();
        match mem.take()?.reclaim() {
            Ok(_) => Some(()),
            Err(lent) => {
                mem = Some(lent);
                None
            }
        }
    });
}

/// A peer that takes nothing, or never ends a copy: what waits for it ends with a status, and holds no buffer any more.
#[test]
fn a_peer_that_takes_nothing_is_ended() {
    let mut town = Town::new("takes-nothing");
    town.server.common.config.retry_timeout = Duration::from_millis(200);
    let free = |town: &Town| town.pool.stats().classes.iter().map(|class| class.outstanding).sum::<usize>();
    let before = free(&town);
    let (_intruder, qp) = town.intruder();
    let mut chain: Vec<Posting> = (0..32)
        .map(|wr_id| {
            let buf = town.pool.alloc(4000).expect("buffer");
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            Posting { wr_id, signalled: true, wr }
        })
        .collect();
    town.server.post_send(qp, &mut chain).expect("post");
    assert!(free(&town) > before + 20, "a ring of {RING} bytes has no room for all of them");
    // Time in which nobody looks is not the peer's.
    let (start, limit) = (Instant::now(), Duration::from_secs(40));
    let waiting = town.server.table.get(qp).expect("it waits");
    let mut waited =
        |seconds| waiting.waited(start + Duration::from_secs(seconds), limit).map(|t| t.as_secs());
    assert_eq!([0, 10, 20, 31, 41].map(&mut waited), [0, 10, 20, 0, 10].map(Some));
    waiting.waits = None;
    waiting.watch_waiting(&mut town.server.common);
    town.until("the first of them ends", |t| {
        t.done.iter().find(|d| d.qp == qp && d.status == Status::RnrRetryExceeded && d.wr_id == 0).map(|_| ())
    });
    assert_eq!(town.done.iter().filter(|d| d.qp == qp && d.status == Status::Flushed).count(), 31);
    assert_eq!(free(&town), before);
    town.ends(qp);
    // In the middle of a copy for ever: the memory cannot be had back, and the connection ends.
    let (intruder, qp) = town.intruder();
    let window = town.server.alloc_window(qp).expect("window");
    let wr = WorkRequest::Bind { window, mem: lend(&town), offset: 0, len: 4096, access: Access::REMOTE };
    town.server.post_send(qp, &mut vec![Posting { wr_id: 1, signalled: false, wr }]).expect("bind");
    let table = intruder.peer_table.as_ref().expect("table");
    table.publish(window.index as usize * ENTRY + BUSY, 1);
    let wr = WorkRequest::LocalInvalidate { window };
    town.server.post_send(qp, &mut vec![Posting { wr_id: 2, signalled: true, wr }]).expect("invalidate");
    town.ends(qp);
}

/// Rings as long as they get, of a connector whose acceptor is more modest: no more is used than the acceptor has.
#[test]
fn rings_are_no_longer_than_ours() {
    let mut town = Town::new("rings");
    const LONG: u32 = 1 << 18;
    town.server.common.config.max_mapped_per_peer = 1 << 30;
    let socket = dial(&town.address);
    let (ring, ring_fd) = make(Layout::new(LONG).bytes(), "intruder").expect("ring");
    let (_table, table_fd) = make(table_bytes(WINDOWS).expect("windows"), "intruder").expect("table");
    let hello = Message::Hello {
        may_sleep: true,
        ring_bytes: LONG,
        max_message: LONG / 2,
        windows: WINDOWS,
        private_data: vec![],
    };
    hello.send(socket.as_fd(), &[ring_fd.as_fd(), table_fd.as_fd()]).expect("send");
    let qp = town.accept();
    match Message::receive(socket.as_fd()) {
        Received::Message(Message::Accept { ring_bytes, max_message, .. }, _) => {
            assert_eq!((ring_bytes, max_message), (RING, 4096));
        }
        other => panic!("no answer: {other:?}"),
    }
    let mut chain: Vec<Posting> = (0..100)
        .map(|wr_id| {
            let buf = town.pool.alloc(4000).expect("buffer");
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            Posting { wr_id, signalled: false, wr }
        })
        .collect();
    town.server.post_send(qp, &mut chain).expect("post");
    let layout = Layout::new(RING);
    let untouched = (layout.bytes()..ring.len()).step_by(8).all(|at| ring.load(at) == 0);
    assert!(untouched && ring.load(layout.ring(Side::Acceptor)) != 0);
    drop(socket);
    town.ends(qp);
    // An honest one, which has messages both ways, several times round the ring.
    let long = SoftwareConfig { ring_bytes: LONG as usize, max_message: 8192, ..config() };
    let mut client = SoftwareFabric::new(long).expect("open");
    client.register(town.pool.arena(), Access::LOCAL).expect("register");
    let c = client.connect(&town.address, &params()).expect("connect");
    let s = town.accept();
    town.until("it is up", |_| {
        client.poll_control(&mut Vec::new());
        client.table.get(c).filter(|q| q.is_live()).map(|_| ())
    });
    let mut bufs: Vec<Buf> = (0..8).map_while(|_| town.pool.alloc(4096)).collect();
    assert_eq!(client.post_recv(None, &mut bufs), 8);
    for round in 0..40u8 {
        let send = |fabric: &mut SoftwareFabric, qp, pool: &Pool| {
            let mut buf = pool.alloc(3000).expect("buffer");
            buf.fill(round);
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            fabric.post_send(qp, &mut vec![Posting { wr_id: 0, signalled: false, wr }]).expect("post");
        };
        send(&mut client, c, &town.pool);
        let got = town.until("the client's message", |t| {
            let at = t.done.iter().position(|d| d.qp == s && d.opcode == Opcode::Recv)?;
            t.done.swap_remove(at).buf
        });
        assert!(got.len() == 3000 && got.iter().all(|&byte| byte == round));
        town.server.post_recv(None, &mut vec![got.into_buf()]);
        send(&mut town.server, s, &town.pool);
        let got = town.until("the server's message", |_| {
            let mut done = Vec::new();
            client.poll_cq(&mut done, 1);
            done.pop()?.buf
        });
        assert!(got.len() == 3000 && got.iter().all(|&byte| byte == round));
        client.post_recv(None, &mut vec![got.into_buf()]);
    }
    drop(client);
    town.ends(s);
}

/// Noise all over the shared memory, while it is in use.
#[test]
fn scribbling() {
    let mut town = Town::new("scribble");
    for round in 0..20u64 {
        let (intruder, qp) = town.intruder();
        let Intruder { socket, ring, table, peer_table, layout } = intruder;
        let scribbler = std::thread::spawn(move || {
            let mut random = round + 1;
            let ring = layout.rings(ring, Side::Connector).expect("rings");
            let peer_table = peer_table.expect("table");
            for _ in 0..2000 {
                for _ in 0..16 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let at = (random >> 33) as usize;
                    ring.store_relaxed((at % layout.bytes()) & !7, random);
                    peer_table.store_relaxed((at % 4096) & !7, random);
                    table.store_relaxed((at % 4096) & !7, random);
                }
                // And a record now and then that can be.
                let mut tx = Producer::new(layout.ring_bytes());
                tx.push(&ring.tx(), Header::message(100, None, 0), &[1; 100]);
            }
            drop(socket);
        });
        let window = town.server.alloc_window(qp).ok();
        while !scribbler.is_finished() {
            let buf = town.pool.alloc(100);
            if let Some(buf) = buf {
                let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
                let _ = town.server.post_send(qp, &mut vec![Posting { wr_id: 1, signalled: true, wr }]);
            }
            if let Some(window) = window {
                let wr = WorkRequest::Bind {
                    window,
                    mem: lend(&town),
                    offset: 0,
                    len: 64,
                    access: Access::REMOTE,
                };
                let wr2 = WorkRequest::LocalInvalidate { window };
                let bind = Posting { wr_id: 2, signalled: false, wr };
                let _ = town
                    .server
                    .post_send(qp, &mut vec![bind, Posting { wr_id: 3, signalled: false, wr: wr2 }]);
            }
            town.turn();
            for done in std::mem::take(&mut town.done) {
                if let Some(buf) = done.buf {
                    town.server.post_recv(None, &mut vec![buf.into_buf()]);
                }
            }
        }
        scribbler.join().expect("scribbler");
        town.server.destroy_qp(qp);
        town.events.clear();
        town.done.clear();
        town.check();
    }
}

/// An acceptor that answers nonsense.
#[test]
fn answers_that_cannot_be() {
    let address = FabricAddress(format!("hostile-acceptor-{}", std::process::id()));
    let listener = SoftwareFabric::bind(&address).expect("bind");
    let table = sealed(table_bytes(WINDOWS).expect("windows"));
    let open_table = unsealed(4096);
    let rings = |ring_bytes, max_message, windows| Message::Accept {
        may_sleep: true,
        ring_bytes,
        max_message,
        windows,
        private_data: vec![],
    };
    let accept = |max_message, windows| rings(RING, max_message, windows);
    let answers: Vec<(Message, Vec<BorrowedFd<'_>>)> = vec![
        (rings(0, 4096, WINDOWS), vec![table.fd()]),
        (rings(RING - 64, 4096, WINDOWS), vec![table.fd()]),
        (rings(2 * RING, 4096, WINDOWS), vec![table.fd()]),
        (rings(u32::MAX, 4096, WINDOWS), vec![table.fd()]),
        (rings(RING / 4, 4096, WINDOWS), vec![table.fd()]),
        (accept(4096, WINDOWS), vec![]),
        (accept(4096, WINDOWS), vec![open_table.as_fd()]),
        (accept(4096, WINDOWS), vec![table.fd(), table.fd()]),
        (accept(4097, WINDOWS), vec![table.fd()]),
        (accept(0, WINDOWS), vec![table.fd()]),
        (accept(4096, u32::MAX), vec![table.fd()]),
        (accept(4096, 1000), vec![table.fd()]),
        (Message::Bell, vec![]),
        (hello(), vec![table.fd(), table.fd()]),
        (Message::Region { id: 1, bytes: 4096 }, vec![table.fd()]),
    ];
    let mut client = open();
    for (answer, fds) in &answers {
        let qp = client.connect(&address, &params()).expect("connect");
        let Accepted::Peer(socket, _) = listener.accept() else { panic!("no connection") };
        answer.send(socket.as_fd(), fds).expect("send");
        let mut events = Vec::new();
        client.poll_control(&mut events);
        let failed = matches!(&events[..], [ControlEvent::ConnectFailed { qp: id, error: FabricError::Peer(_) }] if *id == qp);
        assert!(failed, "{answer:?}: {events:?}");
        client.destroy_qp(qp);
    }
    // One that never answers.
    let qp = client.connect(&address, &params()).expect("connect");
    let start = Instant::now();
    let mut events = Vec::new();
    while events.is_empty() {
        assert!(start.elapsed() < PATIENCE, "it waits for ever");
        client.poll_control(&mut events);
    }
    assert!(matches!(&events[..], [ControlEvent::ConnectFailed { qp: id, .. }] if *id == qp), "{events:?}");
}
