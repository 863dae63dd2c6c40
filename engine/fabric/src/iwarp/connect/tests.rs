//! Cost of refused and silent connections, measured in reads of their sockets.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType};

use super::*;
use crate::connection_manager::{EVENTS, READS};
use crate::iwarp::{Crc, IwarpFabricConfig};
use crate::testing::loopback_address;
use crate::{ConnectParams, ControlEvent, Fabric, FabricAddress};

/// Longest wait for an expected event.
const TIMEOUT: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);
/// Number of connections of each kind, which is more than one poll accepts.
const MANY: usize = 2 * EVENTS + 10;

/// A server that refuses all requests.
struct RefusingServer {
    fabric: IwarpFabric,
    at: FabricAddress,
    _listener: IwarpListener,
}

impl RefusingServer {
    fn new(config: IwarpFabricConfig) -> Self {
        let at = loopback_address();
        let mut fabric = IwarpFabric::new(config).expect("open");
        let listener = IwarpFabric::bind(&at).expect("bound");
        fabric.listen(&listener).expect("listening");
        Self { fabric, at, _listener: listener }
    }

    /// Connects a peer, which sends these bytes.
    fn connect_peer(&self, bytes: &[u8]) -> TcpStream {
        self.connect_peer_from([127, 0, 0, 1], bytes)
    }

    /// Connects a peer of the host with this address, which sends these bytes.
    fn connect_peer_from(&self, host: [u8; 4], bytes: &[u8]) -> TcpStream {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        rustix::net::bind(&socket, &SocketAddr::from((host, 0))).expect("a free port");
        rustix::net::connect(&socket, &self.at.0.parse::<SocketAddr>().expect("an address")).expect("connected");
        let mut socket = TcpStream::from(socket);
        socket.write_all(bytes).expect("room");
        socket
    }

    /// Polls the control plane once, and returns the number of reads from sockets.
    fn turn(&mut self) -> u64 {
        let before = READS.get();
        let mut events = Vec::new();
        self.fabric.poll_control(&mut events);
        for event in events {
            if let ControlEvent::ConnectRequest { request, .. } = event {
                self.fabric.reject(request, b"no");
            }
        }
        READS.get() - before
    }

    fn turn_until(&mut self, what: &str, mut done: impl FnMut(&ConnectionManager<FabricState>) -> bool) {
        let start = Instant::now();
        while !done(&self.fabric.connections) {
            let reads = self.turn();
            // Accepted sockets are read immediately.
            assert!(reads <= 2 * EVENTS as u64, "{what}: {reads} reads in a turn");
            assert!(start.elapsed() < TIMEOUT, "{what}");
        }
    }
}

fn request(config: &IwarpFabricConfig) -> Vec<u8> {
    let mut bytes = Vec::new();
    RequestedParameters::new(config, &ConnectParams::default()).request(b"").encode(&mut bytes);
    bytes
}

#[test]
fn idle_refused_and_half_open_connections_cost_no_reads() {
    let config = IwarpFabricConfig {
        linger: HOUR,
        handshake_timeout: HOUR,
        max_handshakes: MANY,
        ..IwarpFabricConfig::default()
    };
    let whole = request(&config);
    let mut server = RefusingServer::new(config);
    let mut refused: Vec<_> = (0..MANY).map(|_| server.connect_peer(&whole)).collect();
    server.turn_until("refused", |all| all.closing.len() == MANY);
    let mut half_open: Vec<_> = (0..MANY).map(|_| server.connect_peer(&whole[..5])).collect();
    server.turn_until("half open", |all| {
        all.incomplete.iter().filter(|request| request.incoming.len() == 5).count() == MANY
    });

    for _ in 0..100 {
        assert_eq!(server.turn(), 0, "a turn in which no peer sends anything");
        assert!(!server.fabric.wait(Some(Duration::ZERO)), "no event for the owner");
    }
    assert!(server.fabric.longest_wait() > Some(HOUR / 2), "the fabric sleeps until the first time-out");

    let (before, start) = (READS.get(), Instant::now());
    for peer in refused.iter_mut().chain(&mut half_open) {
        peer.write_all(&whole[5..6]).expect("room");
    }
    while READS.get() - before < 2 * MANY as u64 {
        let reads = READS.get();
        assert!(!server.fabric.wait(Some(Duration::ZERO)), "no event for the owner");
        let reads = READS.get() - reads;
        assert!(reads <= EVENTS as u64, "{reads} reads in one wait");
        assert!(start.elapsed() < TIMEOUT, "{} of {MANY} and {MANY} sockets read", READS.get() - before);
    }
    assert_eq!(server.turn(), 0, "each socket was read once");
    assert_eq!((server.fabric.connections.incomplete.len(), server.fabric.connections.closing.len()), (MANY, MANY));

    drop((refused, half_open));
    server.turn_until("gone", |all| all.incomplete.is_empty() && all.closing.is_empty());
    assert_eq!(server.fabric.longest_wait(), None);
}

/// Requests that the owner has not answered yet count against `max_handshakes`, so further connections wait.
#[test]
fn unanswered_requests_count_as_handshakes() {
    const PLACES: usize = 3;
    let config = IwarpFabricConfig { max_handshakes: PLACES, linger: HOUR, ..IwarpFabricConfig::default() };
    let whole = request(&config);
    let mut server = RefusingServer::new(config);
    let _peers: Vec<_> = (0..3 * PLACES).map(|_| server.connect_peer(&whole)).collect();
    let (mut events, start) = (Vec::new(), Instant::now());
    for answered in 0..3 * PLACES {
        while events.is_empty() {
            server.fabric.poll_control(&mut events);
            assert!(start.elapsed() < TIMEOUT, "{answered} requests have arrived");
        }
        let Some(ControlEvent::ConnectRequest { request, .. }) = events.pop() else { panic!("{events:?}") };
        server.fabric.poll_control(&mut events);
        assert!(events.len() < PLACES, "the request that is answered next has one place");
        server.fabric.reject(request, b"no");
    }
    assert_eq!((server.fabric.connections.closing.len(), server.fabric.stats().requests_refused), (3 * PLACES, 0));
}

/// A host that opens silent connections without end loses only its own.
#[test]
fn the_host_with_most_handshakes_loses_its_oldest() {
    const PLACES: usize = 4;
    let config = IwarpFabricConfig { max_handshakes: PLACES, ..IwarpFabricConfig::default() };
    let whole = request(&config);
    let mut server = RefusingServer::new(config);
    let slow = server.connect_peer_from([127, 0, 0, 2], &whole[..5]);
    server.turn_until("the slow peer", |all| all.incomplete.len() == 1);
    let silent: Vec<_> = (0..3 * PLACES).map(|_| server.connect_peer(&[])).collect();
    let refused = 2 * PLACES as u64 + 1;
    let start = Instant::now();
    while server.fabric.stats().requests_refused < refused {
        server.turn();
        assert!(start.elapsed() < TIMEOUT, "{} evicted", server.fabric.stats().requests_refused);
    }
    let hosts: Vec<_> = server.fabric.connections.incomplete.iter().map(|request| request.peer.ip()).collect();
    assert_eq!((hosts.len(), hosts[0]), (PLACES, [127, 0, 0, 2].into()));
    drop((slow, silent));
}

/// A host with many complete requests, which the owner answers late, evicts no slow handshake of another host.
#[test]
fn complete_requests_evict_no_incomplete_ones() {
    const PLACES: usize = 3;
    let config = IwarpFabricConfig { max_handshakes: PLACES, ..IwarpFabricConfig::default() };
    let whole = request(&config);
    let mut server = RefusingServer::new(config);
    let slow = server.connect_peer_from([127, 0, 0, 2], &whole[..5]);
    server.turn_until("the slow peer", |all| all.incomplete.len() == 1);
    let complete: Vec<_> = (0..3 * PLACES).map(|_| server.connect_peer(&whole)).collect();
    let (mut events, start) = (Vec::new(), Instant::now());
    while events.len() < PLACES {
        server.fabric.poll_control(&mut events);
        assert!(start.elapsed() < TIMEOUT, "{} requests", events.len());
    }
    server.fabric.poll_control(&mut events);
    assert_eq!((server.fabric.connections.incomplete.len(), server.fabric.stats().requests_refused), (1, 0));
    drop((slow, complete));
}

/// The owner refuses the request, or the fabric does because it does not support the request.
#[test]
fn refused_sockets_stay_open_for_linger() {
    for (linger, crc) in [(HOUR, false), (HOUR, true), (Duration::ZERO, false), (Duration::ZERO, true)] {
        let config = IwarpFabricConfig { linger, crc: Crc::Never, ..IwarpFabricConfig::default() };
        let request_bytes =
            request(&IwarpFabricConfig { crc: if crc { Crc::Always } else { Crc::Never }, ..config.clone() });
        let mut server = RefusingServer::new(config);
        let _peer = server.connect_peer(&request_bytes);
        let start = Instant::now();
        let request = loop {
            let mut events = Vec::new();
            server.fabric.poll_control(&mut events);
            if let Some(ControlEvent::ConnectRequest { request, .. }) = events.pop() {
                break request;
            }
            assert!(start.elapsed() < TIMEOUT, "no request arrives");
        };
        if crc {
            server.fabric.accept(request, &ConnectParams::default()).expect_err("the server never uses CRCs");
        } else {
            server.fabric.reject(request, b"no");
        }
        let until = server.fabric.connections.closing.next_deadline().expect("a closing socket");
        assert_eq!(until > Instant::now() + HOUR / 2, linger == HOUR, "linger {linger:?}, CRCs {crc}");
        server.turn();
        assert_eq!(server.fabric.connections.closing.is_empty(), linger.is_zero(), "linger {linger:?}, CRCs {crc}");
    }
}

#[test]
fn requests_of_closed_or_early_sending_peers_are_dropped() {
    for closes in [false, true] {
        let config = IwarpFabricConfig::default();
        let whole = request(&config);
        let mut server = RefusingServer::new(config);
        let mut peer = server.connect_peer(&whole);
        let start = Instant::now();
        while server.fabric.connections.complete.is_empty() {
            server.fabric.poll_sockets(None);
            assert!(start.elapsed() < TIMEOUT, "no request arrives");
        }
        let id = RequestId(*server.fabric.connections.complete.first_key_value().expect("a request").0);
        if closes {
            drop(peer);
        } else {
            peer.write_all(b"more").expect("room");
        }
        server.fabric.poll_sockets(None);
        assert!(server.fabric.connections.complete.is_empty());
        assert_eq!(server.fabric.stats().requests_refused, u64::from(!closes));
        let error = server.fabric.accept(id, &ConnectParams::default()).expect_err("no such request");
        assert!(error.to_string().contains("connect request withdrawn"), "{error}");
    }
}
