//! Cost of refused and silent connections, counted in checks of their sockets.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::*;
use crate::connection_manager::{EVENTS, READS};
use crate::iwarp::{Crc, IwarpConfig};
use crate::testing::loopback_address;
use crate::{ConnectParams, ControlEvent, Fabric, FabricAddress};

/// Longest wait for an expected event.
const PATIENCE: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);
/// Connections of a kind: more than one poll accepts.
const MANY: usize = 2 * EVENTS + 10;

/// A server that refuses all requests.
struct Refuser {
    fabric: IwarpFabric,
    at: FabricAddress,
    _listener: IwarpListener,
}

impl Refuser {
    fn new(config: IwarpConfig) -> Self {
        let at = loopback_address();
        let mut fabric = IwarpFabric::new(config).expect("open");
        let listener = IwarpFabric::bind(&at).expect("bound");
        fabric.listen(&listener).expect("listening");
        Self { fabric, at, _listener: listener }
    }

    /// A peer that sends bytes with its connection.
    fn peer(&self, says: &[u8]) -> TcpStream {
        let mut socket = TcpStream::connect(&self.at.0).expect("connected");
        socket.write_all(says).expect("room");
        socket
    }

    /// Polls the control plane once; returns the number of checked sockets.
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
            let looks = self.turn();
            // Those that are accepted are read at once.
            assert!(looks <= 2 * EVENTS as u64, "{what}: {looks} looks in a turn");
            assert!(start.elapsed() < PATIENCE, "{what}");
        }
    }
}

fn request(config: &IwarpConfig) -> Vec<u8> {
    let mut bytes = Vec::new();
    RequestedParameters::new(config, &ConnectParams::default()).request(b"").encode(&mut bytes);
    bytes
}

#[test]
fn refused_and_half_open_connections_cost_no_turn_anything() {
    let config = IwarpConfig { linger: HOUR, handshake_timeout: HOUR, max_handshakes: MANY, ..IwarpConfig::default() };
    let whole = request(&config);
    let mut server = Refuser::new(config);
    let mut refused: Vec<_> = (0..MANY).map(|_| server.peer(&whole)).collect();
    server.turn_until("refused", |all| all.closing.len() == MANY);
    let mut half_open: Vec<_> = (0..MANY).map(|_| server.peer(&whole[..5])).collect();
    server.turn_until("half open", |all| {
        all.incomplete.iter().filter(|request| request.incoming.len() == 5).count() == MANY
    });

    for _ in 0..100 {
        assert_eq!(server.turn(), 0, "a turn in which nobody says anything");
        assert!(!server.fabric.wait(Some(Duration::ZERO)), "nothing has come that the owner must know");
    }
    assert!(server.fabric.longest_wait() > Some(HOUR / 2), "it sleeps until the first of them has had its time");

    let (before, start) = (READS.get(), Instant::now());
    for peer in refused.iter_mut().chain(&mut half_open) {
        peer.write_all(&whole[5..6]).expect("room");
    }
    while READS.get() - before < 2 * MANY as u64 {
        let looks = READS.get();
        assert!(!server.fabric.wait(Some(Duration::ZERO)), "nothing has come that the owner must know");
        let looks = READS.get() - looks;
        assert!(looks <= EVENTS as u64, "{looks} looks for what all of them say");
        assert!(start.elapsed() < PATIENCE, "{} of {MANY} and {MANY} heard", READS.get() - before);
    }
    assert_eq!(server.turn(), 0, "each was looked at once");
    assert_eq!((server.fabric.connections.incomplete.len(), server.fabric.connections.closing.len()), (MANY, MANY));

    drop((refused, half_open));
    server.turn_until("gone", |all| all.incomplete.is_empty() && all.closing.is_empty());
    assert_eq!(server.fabric.longest_wait(), None);
}

/// Places are taken by requests that the owner has not answered yet.
#[test]
fn connections_wait_for_a_slow_owner() {
    const PLACES: usize = 3;
    let config = IwarpConfig { max_handshakes: PLACES, linger: HOUR, ..IwarpConfig::default() };
    let whole = request(&config);
    let mut server = Refuser::new(config);
    let _peers: Vec<_> = (0..3 * PLACES).map(|_| server.peer(&whole)).collect();
    let (mut events, start) = (Vec::new(), Instant::now());
    for answered in 0..3 * PLACES {
        while events.is_empty() {
            server.fabric.poll_control(&mut events);
            assert!(start.elapsed() < PATIENCE, "{answered} have asked");
        }
        let Some(ControlEvent::ConnectRequest { request, .. }) = events.pop() else { panic!("{events:?}") };
        server.fabric.poll_control(&mut events);
        assert!(events.len() < PLACES, "one place is that of the request which is answered next");
        server.fabric.reject(request, b"no");
    }
    assert_eq!((server.fabric.connections.closing.len(), server.fabric.stats().requests_refused), (3 * PLACES, 0));
}

/// Refused by the owner, or because the request is unsupported.
#[test]
fn refused_peers_are_seen_off_for_linger() {
    for (linger, crc) in [(HOUR, false), (HOUR, true), (Duration::ZERO, false), (Duration::ZERO, true)] {
        let config = IwarpConfig { linger, crc: Crc::Never, ..IwarpConfig::default() };
        let asks = request(&IwarpConfig { crc: if crc { Crc::Always } else { Crc::Never }, ..config.clone() });
        let mut server = Refuser::new(config);
        let _peer = server.peer(&asks);
        let start = Instant::now();
        let request = loop {
            let mut events = Vec::new();
            server.fabric.poll_control(&mut events);
            if let Some(ControlEvent::ConnectRequest { request, .. }) = events.pop() {
                break request;
            }
            assert!(start.elapsed() < PATIENCE, "nobody asks");
        };
        if crc {
            server.fabric.accept(request, &ConnectParams::default()).expect_err("CRCs are not done here");
        } else {
            server.fabric.reject(request, b"no");
        }
        let until = server.fabric.connections.closing.next_deadline().expect("it is being seen off");
        assert_eq!(until > Instant::now() + HOUR / 2, linger == HOUR, "linger {linger:?}, CRCs {crc}");
        server.turn();
        assert_eq!(server.fabric.connections.closing.is_empty(), linger.is_zero(), "linger {linger:?}, CRCs {crc}");
    }
}

#[test]
fn peers_out_of_turn_or_gone_get_no_answer() {
    for leaves in [false, true] {
        let config = IwarpConfig::default();
        let whole = request(&config);
        let mut server = Refuser::new(config);
        let mut peer = server.peer(&whole);
        let start = Instant::now();
        while server.fabric.connections.complete.is_empty() {
            server.fabric.poll_sockets(None);
            assert!(start.elapsed() < PATIENCE, "nobody asks");
        }
        let id = RequestId(*server.fabric.connections.complete.first_key_value().expect("one that asks").0);
        if leaves {
            drop(peer);
        } else {
            peer.write_all(b"more").expect("room");
        }
        server.fabric.poll_sockets(None);
        assert!(server.fabric.connections.complete.is_empty());
        assert_eq!(server.fabric.stats().requests_refused, u64::from(!leaves));
        let error = server.fabric.accept(id, &ConnectParams::default()).expect_err("it has gone");
        assert!(error.to_string().contains("given up its connect request"), "{error}");
    }
}
