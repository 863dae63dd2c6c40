//! Cost of refused and silent connections, counted in checks of their sockets.

use std::cell::Cell;
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::*;
use crate::iwarp::{Crc, IwarpConfig};
use crate::sockets::EVENTS;
use crate::testing::loopback_address;
use crate::{ConnectParams, ControlEvent, Fabric, FabricAddress};

thread_local! {
    /// Reads from sockets that are no queue pair's.
    pub(super) static LOOKS: Cell<u64> = const { Cell::new(0) };
}

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
        let before = LOOKS.get();
        let mut events = Vec::new();
        self.fabric.poll_control(&mut events);
        for event in events {
            if let ControlEvent::ConnectRequest { request, .. } = event {
                self.fabric.reject(request, b"no");
            }
        }
        LOOKS.get() - before
    }

    fn turn_until(&mut self, what: &str, mut done: impl FnMut(&mut Connections) -> bool) {
        let start = Instant::now();
        while !done(&mut self.fabric.connections) {
            let looks = self.turn();
            // Those that are accepted are read at once.
            assert!(looks <= 2 * EVENTS as u64, "{what}: {looks} looks in a turn");
            assert!(start.elapsed() < PATIENCE, "{what}");
        }
    }
}

fn request(config: &IwarpConfig) -> Vec<u8> {
    let mut bytes = Vec::new();
    Wishes::new(config, &ConnectParams::default()).request(b"").encode(&mut bytes);
    bytes
}

#[test]
fn refused_and_half_open_connections_cost_no_turn_anything() {
    let config = IwarpConfig { linger: HOUR, handshake_timeout: HOUR, max_handshakes: MANY, ..IwarpConfig::default() };
    let whole = request(&config);
    let mut server = Refuser::new(config);
    let mut refused: Vec<_> = (0..MANY).map(|_| server.peer(&whole)).collect();
    server.turn_until("refused", |all| all.partings.len() == MANY);
    let mut half_open: Vec<_> = (0..MANY).map(|_| server.peer(&whole[..5])).collect();
    server.turn_until("half open", |all| {
        let mut heard = 0;
        all.silent.retain(|request| {
            heard += usize::from(request.got.len() == 5);
            true
        });
        heard == MANY
    });

    for _ in 0..100 {
        assert_eq!(server.turn(), 0, "a turn in which nobody says anything");
        assert!(!server.fabric.wait(Some(Duration::ZERO)), "nothing has come that the owner must know");
    }
    assert!(server.fabric.longest_wait() > Some(HOUR / 2), "it sleeps until the first of them has had its time");

    let (before, start) = (LOOKS.get(), Instant::now());
    for peer in refused.iter_mut().chain(&mut half_open) {
        peer.write_all(&whole[5..6]).expect("room");
    }
    while LOOKS.get() - before < 2 * MANY as u64 {
        let looks = LOOKS.get();
        assert!(!server.fabric.wait(Some(Duration::ZERO)), "nothing has come that the owner must know");
        let looks = LOOKS.get() - looks;
        assert!(looks <= EVENTS as u64, "{looks} looks for what all of them say");
        assert!(start.elapsed() < PATIENCE, "{} of {MANY} and {MANY} heard", LOOKS.get() - before);
    }
    assert_eq!(server.turn(), 0, "each was looked at once");
    assert_eq!((server.fabric.connections.silent.len(), server.fabric.connections.partings.len()), (MANY, MANY));

    drop((refused, half_open));
    server.turn_until("gone", |all| all.silent.is_empty() && all.partings.is_empty());
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
    assert_eq!((server.fabric.connections.partings.len(), server.fabric.stats().requests_refused), (3 * PLACES, 0));
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
        let until = server.fabric.connections.partings.next_deadline().expect("it is being seen off");
        assert_eq!(until > Instant::now() + HOUR / 2, linger == HOUR, "linger {linger:?}, CRCs {crc}");
        server.turn();
        assert_eq!(server.fabric.connections.partings.is_empty(), linger.is_zero(), "linger {linger:?}, CRCs {crc}");
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
        while server.fabric.connections.asked.is_empty() {
            server.fabric.pump(None);
            assert!(start.elapsed() < PATIENCE, "nobody asks");
        }
        let id = RequestId(*server.fabric.connections.asked.first_key_value().expect("one that asks").0);
        if leaves {
            drop(peer);
        } else {
            peer.write_all(b"more").expect("room");
        }
        server.fabric.pump(None);
        assert!(server.fabric.connections.asked.is_empty());
        assert_eq!(server.fabric.stats().requests_refused, u64::from(!leaves));
        let error = server.fabric.accept(id, &ConnectParams::default()).expect_err("it has gone");
        assert!(error.to_string().contains("given up its connect request"), "{error}");
    }
}

#[test]
fn tokens_are_read_back() {
    for token in [Token::Sockets, Token::Request(0), Token::Request(1 << 40), Token::Dial(u32::MAX), Token::Parting(7)]
    {
        assert_eq!(Token::of(token.data()), token);
        assert!(token.data() >= FIRST_TOKEN);
    }
}
