//! Plain sockets as hostile or defective iWARP peers.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rpcrdma_fabric::iwarp::wire::{
    Enhanced, Fault, Kind, Opcode as Message, Place, Segment, SegmentReader, Setup, Step, Terminate, crc32c, fpdu_len,
};
use rpcrdma_fabric::iwarp::{Crc, IwarpConfig, IwarpFabric, IwarpListener};
use rpcrdma_fabric::testing::loopback_address;
use rpcrdma_fabric::{
    Access, Completion, ConnectParams, ControlEvent, Disconnect, Fabric, FabricAddress, FabricError, Opcode, Posting,
    QpId, RemoteMemory, Source, Status, WorkRequest,
};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, PagePolicy, Pool, PoolConfig};
use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Time-out of each awaited event.
const PATIENCE: Duration = Duration::from_secs(20);
/// Fabric time-outs that tests wait for.
const SHORT: Duration = Duration::from_millis(300);

/// A server that accepts every connection and also opens some.
struct Server {
    fabric: IwarpFabric,
    at: SocketAddr,
    _listener: IwarpListener,
    pool: Pool,
    done: Vec<Completion>,
    up: Vec<QpId>,
    ended: Vec<(QpId, Disconnect, String)>,
    /// Connections that it opened and that failed.
    failed: Vec<(QpId, FabricError)>,
    params: ConnectParams,
}

impl Server {
    fn new(config: IwarpConfig) -> Self {
        let FabricAddress(address) = loopback_address();
        let mut fabric = IwarpFabric::new(config).expect("open");
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let classes = vec![Class { size: 4096, count: 64 }, Class { size: 1 << 20, count: 16 }];
        let pool = Pool::new(&PoolConfig { classes, arena }).expect("memory");
        fabric.register(pool.arena(), Access::REMOTE).expect("registered");
        let listener = IwarpFabric::bind(&FabricAddress(address.clone())).expect("bound");
        fabric.listen(&listener).expect("listening");
        let mut receives: Vec<Buf> = (0..8).map(|_| pool.alloc(4096).expect("a buffer")).collect();
        assert_eq!(fabric.post_recv(None, &mut receives), 8);
        Self {
            fabric,
            at: address.parse().expect("an address"),
            _listener: listener,
            pool,
            done: Vec::new(),
            up: Vec::new(),
            ended: Vec::new(),
            failed: Vec::new(),
            params: ConnectParams::default(),
        }
    }

    fn turn(&mut self) {
        self.fabric.poll_cq(&mut self.done, 64);
        let mut events = Vec::new();
        self.fabric.poll_control(&mut events);
        for event in events {
            match event {
                // The request may be gone already.
                ControlEvent::ConnectRequest { request, .. } => drop(self.fabric.accept(request, &self.params)),
                ControlEvent::Established { qp, .. } => self.up.push(qp),
                ControlEvent::Disconnected { qp, cause, reason } => self.ended.push((qp, cause, reason)),
                ControlEvent::ConnectFailed { qp, error } => self.failed.push((qp, error)),
                _ => {}
            }
        }
        self.pool.drain_remote();
    }

    fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {:?} {:?}", self.done, self.ended);
            self.turn();
            std::thread::yield_now();
        }
    }

    /// Connects a peer that sends nothing yet.
    fn stranger(&self) -> Peer {
        let socket = TcpStream::connect(self.at).expect("connected");
        Peer::new(socket)
    }

    /// Opens a connection to a peer, which receives its MPA request.
    fn asked(&mut self) -> (Peer, QpId) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bound");
        let at = listener.local_addr().expect("an address");
        let qp = self.fabric.connect(&FabricAddress(at.to_string()), &self.params).expect("begun");
        let mut peer = Peer::new(listener.accept().expect("connected").0);
        let (_, len) = self.until("a request", |_| {
            peer.listen();
            Setup::decode(Kind::Request, &peer.got).expect("a request")
        });
        assert_eq!(peer.got.drain(..).len(), len, "it says no more before the answer");
        (peer, qp)
    }

    /// Error of a connection that the server opened.
    fn failure_of(&mut self, qp: QpId) -> String {
        self.until("a failure", |server| {
            let (_, error) = server.failed.iter().find(|(failed, _)| *failed == qp)?;
            Some(error.to_string())
        })
    }

    /// Posts a Write of `len` bytes.
    fn write(&mut self, qp: QpId, wr_id: u64, len: usize) {
        let src = Source::Frozen(self.pool.alloc(len).expect("a buffer").freeze());
        let remote = RemoteMemory { rkey: 7, address: 0 };
        let wr = WorkRequest::Write { src, offset: 0, len, remote };
        self.fabric.post_send(qp, &mut vec![Posting { wr_id, signalled: true, wr }]).expect("posted");
    }

    /// Waits for `n` Writes and returns their statuses.
    fn writes(&mut self, n: usize) -> Vec<Status> {
        self.until("completions", |server| {
            let writes = server.done.iter().filter(|c| c.opcode == Opcode::Write);
            (writes.clone().count() == n).then(|| writes.map(|c| c.status).collect())
        })
    }

    /// An established peer with MPA revision 2.
    fn peer(&mut self, crc: bool) -> (Peer, QpId) {
        self.peer_of(2, crc)
    }

    /// An established peer with this MPA revision.
    fn peer_of(&mut self, revision: u8, crc: bool) -> (Peer, QpId) {
        let peer = self.stranger();
        self.joined(peer, revision, crc)
    }

    /// Establishes the connection of a silent peer.
    fn joined(&mut self, mut peer: Peer, revision: u8, crc: bool) -> (Peer, QpId) {
        peer.say(&request(crc, revision));
        let before = self.up.len();
        let qp = self.until("a connection", |server| server.up.get(before).copied());
        let reply = self.until("a reply", |_| {
            peer.listen();
            Setup::decode(Kind::Reply, &peer.got).expect("a reply")
        });
        assert!(!reply.0.reject && reply.0.revision == revision);
        peer.got.drain(..reply.1);
        (peer, qp)
    }

    /// Checks that the server still accepts a new peer and receives its message.
    fn serves(&mut self) {
        let (mut peer, qp) = self.peer(false);
        peer.say(&fpdu(SEND, true, untagged(0, 1, 0), b"hello", false));
        let got = self.until("a message", |server| {
            let at = server.done.iter().position(|c| c.qp == qp && c.opcode == Opcode::Recv)?;
            Some(server.done.swap_remove(at))
        });
        let buf = got.buf.expect("a buffer");
        assert_eq!((&buf[..], got.status), (&b"hello"[..], Status::Success));
        assert_eq!(self.fabric.post_recv(None, &mut vec![buf.into_buf()]), 1);
        drop(peer);
        self.until("its end", |server| server.ended.iter().any(|(ended, ..)| *ended == qp).then_some(()));
    }

    fn end_of(&mut self, qp: QpId) -> (Disconnect, String) {
        self.until("the end", |server| {
            let (_, cause, reason) = server.ended.iter().find(|(ended, ..)| *ended == qp)?;
            Some((*cause, reason.clone()))
        })
    }

    /// Closes the fabric and checks that all memory returns to the pool.
    fn close(mut self) {
        for qp in std::mem::take(&mut self.up) {
            self.fabric.destroy_qp(qp);
        }
        while self.fabric.poll_cq(&mut self.done, 64) > 0 {}
        self.done.clear();
        drop(self.fabric);
        self.pool.close().expect("all memory is home");
    }
}

struct Peer {
    socket: TcpStream,
    got: Vec<u8>,
}

impl Peer {
    fn new(socket: TcpStream) -> Self {
        socket.set_nodelay(true).expect("TCP_NODELAY");
        socket.set_nonblocking(true).expect("O_NONBLOCK");
        Self { socket, got: Vec::new() }
    }

    /// Closes with a RST.
    fn reset(self) {
        set_socket_linger(&self.socket, Some(Duration::ZERO)).expect("SO_LINGER");
    }

    fn say(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("room in the socket");
    }

    /// Reads all available bytes. Returns true at the end of the stream.
    fn listen(&mut self) -> bool {
        let mut space = [0; 4096];
        loop {
            match self.socket.read(&mut space) {
                Ok(0) => return true,
                Ok(n) => self.got.extend_from_slice(&space[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
        }
    }

    /// Waits for the end of the stream and returns the fault that the Terminate message reports.
    fn told(&mut self, server: &mut Server, crc: bool) -> Option<Fault> {
        server.until("the end of the stream", |_| self.listen().then_some(()));
        let (mut reader, mut input) = (SegmentReader::new(crc), &self.got[..]);
        let (mut opcode, mut fault) = (None, None);
        while let Some(step) = reader.step(&mut input).expect("a stream") {
            match step {
                Step::Segment { segment, .. } => opcode = Some(segment.opcode),
                Step::Payload(bytes) if opcode == Some(Message::Terminate) => {
                    fault = Terminate::decode(bytes).expect("a Terminate").fault();
                }
                _ => {}
            }
        }
        fault
    }
}

const SEND: Message = Message::Send { invalidate: None, solicited: false };

fn untagged(queue: u32, msn: u32, offset: u32) -> Place {
    Place::Untagged { queue, msn, offset }
}

fn request(crc: bool, revision: u8) -> Vec<u8> {
    frame(Kind::Request, crc, revision, 4)
}

fn frame(kind: Kind, crc: bool, revision: u8, ord: u16) -> Vec<u8> {
    let enhanced = Enhanced { ird: 4, ord, peer_to_peer: false, rtr_send: false, rtr_write: false, rtr_read: false };
    let enhanced = (revision == 2).then_some(enhanced);
    let setup = Setup {
        kind,
        revision,
        markers: false,
        crc,
        reject: false,
        enhanced,
        private_data: b"\xf6\xab\x0e\x18\x01\x01\x03\x03".to_vec(),
    };
    let mut bytes = Vec::new();
    setup.encode(&mut bytes);
    bytes
}

fn fpdu(opcode: Message, last: bool, place: Place, payload: &[u8], crc: bool) -> Vec<u8> {
    let header = Segment { opcode, last, place }.encode(payload.len());
    let mut bytes = [&header[..], payload].concat();
    let whole = fpdu_len(header.len() - 2 + payload.len());
    bytes.resize(whole - 4, 0);
    bytes.extend(if crc { crc32c(&bytes).to_le_bytes() } else { [0; 4] });
    bytes
}

fn impatient() -> IwarpConfig {
    IwarpConfig { retry_timeout: SHORT, handshake_timeout: SHORT, ..IwarpConfig::default() }
}

#[test]
fn silent_strangers_keep_no_peer_out() {
    let mut server = Server::new(IwarpConfig { max_handshakes: 8, ..IwarpConfig::default() });
    // 10,000 peers, or as many as the descriptor limit permits. The server polls rarely, so they connect faster than it
    // accepts.
    let files = getrlimit(Resource::Nofile);
    let most = files.maximum.map_or(10_000, |most| most.saturating_sub(500).min(10_000)) as usize;
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }).expect("up to the hard limit");
    if most < 10_000 {
        println!("not run: 10,000 sockets: the hard limit of files (ulimit -Hn) leaves room for {most}");
    }
    let mut strangers = Vec::new();
    while strangers.len() < most {
        strangers.extend((0..500).map(|_| server.stranger()));
        let come = strangers.len() as u64;
        server.until("refusals", |server| (server.fabric.stats().requests_refused + 8 >= come).then_some(()));
    }
    server.serves();
    let open = strangers.iter_mut().filter_map(|peer| (!peer.listen()).then_some(())).count();
    assert!(open <= 8, "{open} strangers are still there");
    server.close();
}

#[test]
fn dribbling_peers_are_closed_in_time() {
    let mut server = Server::new(impatient());
    let mut peer = server.stranger();
    for byte in request(false, 2) {
        if peer.socket.write_all(&[byte]).is_err() {
            break;
        }
        let next = Instant::now() + SHORT / 8;
        while Instant::now() < next {
            server.turn();
        }
    }
    server.until("the end", |_| peer.listen().then_some(()));
    assert!(server.up.is_empty());
    server.serves();
    server.close();
}

#[test]
fn unsupported_requests_are_refused_by_a_reply() {
    let mut server = Server::new(IwarpConfig { crc: Crc::Never, ..IwarpConfig::default() });
    for (what, bytes) in [("revision 3", request(false, 3)), ("CRCs", request(true, 2))] {
        let mut peer = server.stranger();
        peer.say(&bytes);
        server.until(what, |_| peer.listen().then_some(()));
        let (reply, _) = Setup::decode(Kind::Reply, &peer.got).expect("a reply").expect("whole");
        assert!(reply.reject, "{what}");
    }
    // Bytes that are no FPDU, and an FPDU before the reply.
    let early = [request(false, 2), fpdu(SEND, true, untagged(0, 1, 0), b"early", false)].concat();
    for (what, bytes) in [("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec()), ("an early FPDU", early)] {
        let mut peer = server.stranger();
        peer.say(&bytes);
        server.until(what, |_| peer.listen().then_some(()));
        assert!(peer.got.is_empty(), "{what}");
    }
    assert!(server.up.is_empty() && server.fabric.stats().requests_refused == 4);
    server.serves();
    server.close();
}

/// MPA revision 1 does not announce the read depth, so the fabric sends one Read at a time.
#[test]
fn a_peer_of_revision_1_is_served_and_read_from() {
    let mut server = Server::new(IwarpConfig::default());
    let (mut peer, qp) = server.peer_of(1, false);
    peer.say(&fpdu(SEND, true, untagged(0, 1, 0), b"hello", false));
    server.until("a message", |server| server.done.pop());
    let read = |wr_id| {
        let dst = server.pool.alloc(4096).expect("a buffer").lend().expect("by its owner");
        let remote = RemoteMemory { rkey: 7, address: 0 };
        Posting { wr_id, signalled: true, wr: WorkRequest::Read { dst, offset: 0, len: 4, remote } }
    };
    server.fabric.post_send(qp, &mut vec![read(1), read(2)]).expect("posted");
    for n in 1..=2 {
        // 18 bytes of DDP header follow the length field. The sink's STag comes next.
        let whole = fpdu_len(18 + 28);
        server.until("a Read Request", |_| (peer.listen() || peer.got.len() >= whole).then_some(()));
        server.turn();
        peer.listen();
        assert_eq!(peer.got.len(), whole, "one Read is under way");
        let sink = peer.got[20..24].first_chunk().expect("an STag");
        let place = Place::Tagged { stag: u32::from_be_bytes(*sink), offset: 0 };
        peer.got.clear();
        peer.say(&fpdu(Message::ReadResponse, true, place, b"data", false));
        let done = server.until("a Read", |server| server.done.pop());
        assert_eq!((done.wr_id, done.status), (n, Status::Success));
    }
    server.close();
}

#[test]
fn violations_are_answered_by_a_terminate() {
    for (what, crc, bytes, wanted) in [
        (
            "a Write to no memory",
            false,
            fpdu(Message::Write, true, Place::Tagged { stag: 0x1234_5678, offset: 0 }, b"mine", false),
            Some(Fault::TaggedInvalidStag),
        ),
        ("a CRC of zeros", true, fpdu(SEND, true, untagged(0, 1, 0), b"hello", false), Some(Fault::Crc)),
        ("a length of nothing", false, vec![0; 8], Some(Fault::StreamCatastrophic)),
        ("a length too short for a header", false, vec![0, 3, 0x41, 0x43, 0, 0, 0, 0], Some(Fault::StreamCatastrophic)),
        ("another version", false, fpdu_of_version(0), Some(Fault::UntaggedVersion)),
    ] {
        let mut server = Server::new(IwarpConfig::default());
        let (mut peer, qp) = server.peer(crc);
        peer.say(&bytes);
        assert_eq!(peer.told(&mut server, crc), wanted, "{what}");
        assert_eq!(server.end_of(qp).0, Disconnect::Violation, "{what}");
        server.serves();
        server.close();
    }
}

fn fpdu_of_version(version: u8) -> Vec<u8> {
    let mut bytes = fpdu(SEND, true, untagged(0, 1, 0), b"hello", false);
    bytes[2] = bytes[2] & !3 | version;
    bytes
}

#[test]
fn half_a_message_holds_a_receive_for_a_while() {
    let mut server = Server::new(impatient());
    let (mut peer, qp) = server.peer(false);
    let message = fpdu(SEND, true, untagged(0, 1, 0), &[1; 1000], false);
    peer.say(&message[..500]);
    let (cause, reason) = server.end_of(qp);
    assert_eq!(cause, Disconnect::Failure);
    assert!(reason.contains("rest of a message"), "{reason}");
    server.serves();
    server.close();
}

/// `rnr_retry` 7 means unlimited retries, but `retry_timeout` still bounds the wait for a Receive.
#[test]
fn a_message_waits_for_a_receive_until_retry_timeout() {
    let beyond: Vec<_> = (1..10).map(|msn| fpdu(SEND, true, untagged(0, msn, 0), &[msn as u8; 100], false)).collect();
    let beyond = beyond.concat();
    for (config, late) in [(IwarpConfig::default(), false), (impatient(), true)] {
        let mut server = Server::new(config);
        server.params.rnr_retry = 7;
        let (mut peer, qp) = server.peer(false);
        peer.say(&beyond);
        server.until("a message that waits", |server| (server.fabric.stats().receiver_not_ready > 0).then_some(()));
        if late {
            assert_eq!(peer.told(&mut server, false), Some(Fault::NoBuffer));
            let (cause, reason) = server.end_of(qp);
            assert_eq!(cause, Disconnect::Violation);
            assert!(reason.contains("no Receive for longer than iwarp.retry_timeout"), "{reason}");
        }
        let mut bufs: Vec<Buf> = server.done.drain(..).filter_map(|c| Some(c.buf?.into_buf())).collect();
        assert_eq!(server.fabric.post_recv(None, &mut bufs), 8);
        if !late {
            let last = server.until("the message", |server| server.done.pop());
            assert_eq!((last.qp, last.buf.as_ref().map(|buf| buf[0])), (qp, Some(9)));
            assert!(server.ended.is_empty());
        }
        server.serves();
        server.close();
    }
}

#[test]
fn a_peer_that_stops_reading_is_given_up_and_others_are_served() {
    let mut server = Server::new(IwarpConfig { send_buffer: Some(64 << 10), ..impatient() });
    let (mut peer, qp) = server.peer(false);
    // The peer must send the first FPDU. This empty Write lets the server send.
    peer.say(&fpdu(Message::Write, true, Place::Tagged { stag: 0, offset: 0 }, b"", false));
    (0..12).for_each(|wr_id| server.write(qp, wr_id, 1 << 20));
    server.serves();
    let (cause, reason) = server.end_of(qp);
    assert_eq!(cause, Disconnect::Failure);
    // TCP has the same limit and reports first if the fabric is polled late.
    let told = ["takes nothing", "TCP had no answer from the peer for retry_timeout"];
    assert!(told.iter().any(|words| reason.contains(words)), "{reason}");
    let last = server.writes(12);
    assert!(last.contains(&Status::RetryExceeded) && last.last() == Some(&Status::Flushed), "{last:?}");
    server.serves();
    server.close();
}

/// TCP's own time-out treats a window smaller than a segment as no answer.
#[test]
fn a_peer_that_takes_little_at_a_time_is_not_given_up() {
    // The socket buffer is full, or holds all the data, with and without a Read Request.
    takes_little_at_a_time(64 << 10, 1 << 20, false);
    takes_little_at_a_time(400 << 10, 250 << 10, false);
    takes_little_at_a_time(400 << 10, 250 << 10, true);
}

/// The server sends a Write of `len` bytes, and optionally a Read that the peer does not answer.
fn takes_little_at_a_time(send_buffer: usize, len: usize, read: bool) {
    let retry_timeout = 8 * SHORT;
    let config = IwarpConfig { retry_timeout, send_buffer: Some(send_buffer), ..IwarpConfig::default() };
    let mut server = Server::new(config);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    set_socket_recv_buffer_size(&socket, 16 << 10).expect("SO_RCVBUF");
    rustix::net::connect(&socket, &server.at).expect("connected");
    let (mut peer, qp) = server.joined(Peer::new(socket.into()), 2, false);
    peer.say(&fpdu(Message::Write, true, Place::Tagged { stag: 0, offset: 0 }, b"", false));
    server.write(qp, 0, len);
    if read {
        let dst = server.pool.alloc(100).expect("a buffer").lend().expect("of this thread");
        let wr = WorkRequest::Read { dst, offset: 0, len: 100, remote: RemoteMemory { rkey: 7, address: 0 } };
        server.fabric.post_send(qp, &mut vec![Posting { wr_id: 99, signalled: true, wr }]).expect("posted");
    }
    let (start, mut taken) = (Instant::now(), 0);
    while start.elapsed() < 2 * retry_timeout {
        // The window opens so rarely that TCP probes it in between.
        taken += peer.socket.read(&mut [0; 1024]).unwrap_or(0);
        server.turn();
        assert!(server.ended.is_empty(), "{:?} after {taken} bytes", server.ended);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(taken < len / 2, "it was not slow: {taken} bytes");
    drop(peer);
    server.end_of(qp);
    server.close();
}

#[test]
fn the_end_of_a_peer_at_any_byte_ends_its_connection_alone() {
    let mut server = Server::new(IwarpConfig::default());
    let message = fpdu(SEND, true, untagged(0, 1, 0), &[1; 100], false);
    for cut in (0..message.len()).step_by(7) {
        let (mut peer, qp) = server.peer(false);
        peer.say(&message[..cut]);
        drop(peer);
        assert_eq!(server.end_of(qp).0, Disconnect::Peer, "after {cut} bytes");
        server.fabric.destroy_qp(qp);
        server.up.retain(|up| *up != qp);
        // The Receive of the partial message.
        let mut back: Vec<Buf> = server.done.drain(..).filter_map(|c| Some(c.buf?.into_buf())).collect();
        assert!(back.len() <= 1, "after {cut} bytes");
        server.fabric.post_recv(None, &mut back);
    }
    server.serves();
    server.close();
}

#[test]
fn a_wrong_answer_fails_the_connect() {
    let mut server = Server::new(IwarpConfig::default());
    let (few, other) = (Some(Fault::InsufficientIrd), Some(Fault::MpaCatastrophic));
    for (what, answer, wanted, fault) in [
        ("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "no MPA Reply Frame", None),
        ("its own request", request(false, 2), "no MPA Reply Frame", None),
        ("revision 1", frame(Kind::Reply, false, 1, 4), "not enhanced", other),
        ("more Reads than are taken", frame(Kind::Reply, false, 2, 17), "17 Reads at a time, of which 16", few),
        ("half an answer, and its end", frame(Kind::Reply, false, 2, 4)[..19].to_vec(), "closed the connection", None),
        ("its end alone", Vec::new(), "closed the connection before it answered", None),
    ] {
        let (mut peer, qp) = server.asked();
        peer.say(&answer);
        if wanted.starts_with("closed") {
            peer.socket.shutdown(Shutdown::Write).expect("its end");
        }
        let error = server.failure_of(qp);
        assert!(error.contains(wanted), "{what}: {error}");
        server.fabric.destroy_qp(qp);
        assert_eq!(peer.told(&mut server, false), fault, "{what}");
    }
    let (peer, qp) = server.asked();
    peer.reset();
    let error = server.failure_of(qp);
    assert!(error.contains("reset"), "{error}");
    assert!(server.up.is_empty() && server.ended.is_empty(), "{:?} {:?}", server.up, server.ended);
    server.serves();
    server.close();
}

#[test]
fn a_missing_answer_fails_the_connect_after_a_while() {
    let mut server = Server::new(impatient());
    let half = &frame(Kind::Reply, false, 2, 4)[..30];
    for said in [&[][..], half] {
        let (mut peer, qp) = server.asked();
        peer.say(said);
        let error = server.failure_of(qp);
        assert!(error.contains("did not answer within debug.handshake_timeout"), "{error}");
        server.fabric.destroy_qp(qp);
        server.until("the end", |_| peer.listen().then_some(()));
    }
    server.serves();
    server.close();
}

/// The reply's segment also carries the first message, complete or in part.
#[test]
fn bytes_behind_the_answer_are_the_first_message() {
    let mut server = Server::new(IwarpConfig::default());
    let message = fpdu(SEND, true, untagged(0, 1, 0), b"hello", false);
    for cut in [message.len(), 30, 1] {
        let (mut peer, qp) = server.asked();
        peer.say(&[&frame(Kind::Reply, false, 2, 4)[..], &message[..cut]].concat());
        server.until("a connection", |server| server.up.contains(&qp).then_some(()));
        peer.say(&message[cut..]);
        let got = server.until("a message", |server| server.done.pop());
        let buf = got.buf.expect("a buffer");
        assert_eq!((got.qp, got.status, &buf[..]), (qp, Status::Success, &b"hello"[..]), "{cut} bytes with the answer");
        assert_eq!(server.fabric.post_recv(None, &mut vec![buf.into_buf()]), 1);
    }
    server.close();
}

/// The peer sends half a message while much data is in flight to it. A reset and a half-close both end the connection.
#[test]
fn a_reset_and_a_half_close_amid_traffic_end_that_connection_alone() {
    for reset in [true, false] {
        let mut server = Server::new(IwarpConfig { send_buffer: Some(64 << 10), ..IwarpConfig::default() });
        let (mut peer, qp) = server.peer(false);
        peer.say(&fpdu(SEND, true, untagged(0, 1, 0), b"a call", false));
        let call = server.until("a message", |server| server.done.pop());
        (0..8).for_each(|wr_id| server.write(qp, wr_id, 1 << 20));
        let more = fpdu(SEND, true, untagged(0, 2, 0), &[1; 1000], false);
        if reset {
            peer.say(&more[..500]);
            // Half of the message has a Receive by now.
            (0..100).for_each(|_| server.turn());
            peer.reset();
            assert_eq!(server.end_of(qp).0, Disconnect::Peer);
        } else {
            peer.say(&more);
            peer.socket.shutdown(Shutdown::Write).expect("shutdown");
            // The fabric delivers messages received before the end.
            let last = server.until("the last message", |server| {
                let at = server.done.iter().position(|c| c.opcode == Opcode::Recv)?;
                Some(server.done.swap_remove(at))
            });
            assert_eq!((last.status, last.buf.map(|buf| buf.len())), (Status::Success, Some(1000)));
            let (cause, reason) = server.end_of(qp);
            assert_eq!((cause, &reason[..]), (Disconnect::Peer, "the peer closed the connection"));
            // Only the part of the first Write that the socket took arrives.
            server.until("the end of the stream", |_| peer.listen().then_some(()));
            assert!(!peer.got.is_empty() && peer.got.len() < 8 << 20, "{} bytes", peer.got.len());
        }
        // The reply is posted after the end and is flushed with the Writes in flight.
        server.write(qp, 8, 1 << 20);
        let ends = server.writes(9);
        assert_eq!(ends.last(), Some(&Status::Flushed), "{ends:?}");
        assert!(ends.iter().all(|end| matches!(end, Status::Success | Status::Flushed)), "{ends:?}");
        drop(call);
        server.serves();
        server.close();
    }
}

/// More messages than one poll completes, from more connections than one poll reads unprompted.
#[test]
fn the_next_look_takes_the_rest_of_a_full_one() {
    for crc in [false, true] {
        let mut server = Server::new(IwarpConfig::default());
        let mut peers: Vec<_> = (0..8).map(|_| server.peer(crc)).collect();
        let mut more: Vec<Buf> = (0..48).map(|_| server.pool.alloc(4096).expect("a buffer")).collect();
        assert_eq!(server.fabric.post_recv(None, &mut more), 48);
        for (peer, _) in &mut peers {
            let all = (1..8).map(|msn| fpdu(SEND, true, untagged(0, msn, 0), &[msn as u8; 100], crc));
            peer.say(&all.collect::<Vec<_>>().concat());
        }
        let start = Instant::now();
        while server.done.len() < 56 {
            server.fabric.poll_cq(&mut server.done, 3);
            assert!(start.elapsed() < PATIENCE, "{} of 56 messages", server.done.len());
        }
        for (_, qp) in &peers {
            let mine = server.done.iter().filter(|c| c.qp == *qp);
            let first: Vec<_> = mine.map(|c| c.buf.as_ref().map(|buf| buf[0])).collect();
            assert_eq!(first, (1..8).map(Some).collect::<Vec<_>>());
        }
        server.close();
    }
}
