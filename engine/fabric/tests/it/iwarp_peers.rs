//! Tests with hostile or defective iWARP peers, which the tests implement over TCP sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rpcrdma_fabric::iwarp::wire::{
    EnhancedData, MpaFrame, MpaFrameKind, PayloadPlace, RdmapOpcode, ReaderStep, SegmentHeader, SegmentReader,
    Terminate, TerminateFault, crc32c, fpdu_len,
};
use rpcrdma_fabric::iwarp::{Crc, IwarpFabric, IwarpFabricConfig, IwarpListener};
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
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time-out of the fabric in tests that wait until it passes.
const SHORT_TIMEOUT: Duration = Duration::from_millis(300);
/// Bytes of an FPDU's length field.
const MPA_LEN: usize = 2;
/// Bytes of an FPDU's CRC.
const CRC_LEN: usize = 4;
/// Private data of RPC-over-RDMA (RFC 8797): format, version 1, remote invalidation, and 4 KiB in each direction.
const PRIVATE_DATA: &[u8] = b"\xf6\xab\x0e\x18\x01\x01\x03\x03";

/// A fabric that accepts every connection, and also connects to peers.
struct Server {
    fabric: IwarpFabric,
    address: SocketAddr,
    _listener: IwarpListener,
    pool: Pool,
    done: Vec<Completion>,
    /// Established connections.
    up: Vec<QpId>,
    /// Ended connections.
    ended: Vec<(QpId, Disconnect, String)>,
    /// Failed connects of the server.
    failed: Vec<(QpId, FabricError)>,
    params: ConnectParams,
}

impl Server {
    fn new(config: IwarpFabricConfig) -> Self {
        let FabricAddress(address) = loopback_address();
        let mut fabric = IwarpFabric::new(config).expect("a fabric");
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
            address: address.parse().expect("an address"),
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
                // The peer may already have canceled the request.
                ControlEvent::ConnectRequest { request, .. } => drop(self.fabric.accept(request, &self.params)),
                ControlEvent::Established { qp, .. } => self.up.push(qp),
                ControlEvent::Disconnected { qp, cause, reason } => self.ended.push((qp, cause, reason)),
                ControlEvent::ConnectFailed { qp, error } => self.failed.push((qp, error)),
                _ => {}
            }
        }
        self.pool.drain_remote();
    }

    /// Polls until `find` returns a value.
    fn poll_until<T>(&mut self, what: &str, mut find: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = find(self) {
                return found;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}: {:?} {:?}", self.done, self.ended);
            self.turn();
            std::thread::yield_now();
        }
    }

    /// Connects a peer that does not send anything yet.
    fn connect_silent_peer(&self) -> Peer {
        let socket = TcpStream::connect(self.address).expect("connected");
        Peer::new(socket)
    }

    /// Connects to a peer, which receives the MPA Request Frame and does not answer yet.
    fn connect_to_peer(&mut self) -> (Peer, QpId) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bound");
        let at = listener.local_addr().expect("an address");
        let qp = self.fabric.connect(&FabricAddress(at.to_string()), &self.params).expect("begun");
        let mut peer = Peer::new(listener.accept().expect("connected").0);
        let (_, len) = self.poll_until("a request", |_| {
            peer.read_available();
            MpaFrame::decode(MpaFrameKind::Request, &peer.received).expect("a request")
        });
        assert_eq!(peer.received.drain(..).len(), len, "the server sends nothing else before the reply");
        (peer, qp)
    }

    /// Waits for the error of a connect of the server.
    fn wait_connect_error(&mut self, qp: QpId) -> String {
        self.poll_until("a failure", |server| {
            let (_, error) = server.failed.iter().find(|(failed, _)| *failed == qp)?;
            Some(error.to_string())
        })
    }

    /// Posts a Write of `len` bytes.
    fn post_write(&mut self, qp: QpId, wr_id: u64, len: usize) {
        let src = Source::Frozen(self.pool.alloc(len).expect("a buffer").freeze());
        let remote = RemoteMemory { rkey: 7, address: 0 };
        let wr = WorkRequest::Write { src, offset: 0, len, remote };
        self.fabric.post_send(qp, &mut vec![Posting { wr_id, signaled: true, wr }]).expect("posted");
    }

    /// Waits for `n` Writes and returns their statuses.
    fn wait_writes(&mut self, n: usize) -> Vec<Status> {
        self.poll_until("completions", |server| {
            let writes = server.done.iter().filter(|c| c.opcode == Opcode::Write);
            (writes.clone().count() == n).then(|| writes.map(|c| c.status).collect())
        })
    }

    /// Connects a peer with MPA revision 2.
    fn establish(&mut self, crc: bool) -> (Peer, QpId) {
        self.establish_revision(2, crc)
    }

    /// Connects a peer with this MPA revision.
    fn establish_revision(&mut self, revision: u8, crc: bool) -> (Peer, QpId) {
        let peer = self.connect_silent_peer();
        self.finish_handshake(peer, revision, crc)
    }

    /// Establishes the connection of a peer that has not sent anything yet.
    fn finish_handshake(&mut self, mut peer: Peer, revision: u8, crc: bool) -> (Peer, QpId) {
        peer.send(&request_frame(crc, revision));
        let before = self.up.len();
        let qp = self.poll_until("a connection", |server| server.up.get(before).copied());
        let reply = self.poll_until("a reply", |_| {
            peer.read_available();
            MpaFrame::decode(MpaFrameKind::Reply, &peer.received).expect("a reply")
        });
        assert!(!reply.0.reject && reply.0.revision == revision);
        peer.received.drain(..reply.1);
        (peer, qp)
    }

    /// Checks that the server still accepts a new peer and receives its message.
    fn check_serves_new_peer(&mut self) {
        let (mut peer, qp) = self.establish(false);
        peer.send(&fpdu(SEND, true, untagged(0, 1, 0), b"hello", false));
        let got = self.poll_until("a message", |server| {
            let at = server.done.iter().position(|c| c.qp == qp && c.opcode == Opcode::Recv)?;
            Some(server.done.swap_remove(at))
        });
        let buf = got.buf.expect("a buffer");
        assert_eq!((&buf[..], got.status), (&b"hello"[..], Status::Success));
        assert_eq!(self.fabric.post_recv(None, &mut vec![buf.into_buf()]), 1);
        drop(peer);
        self.poll_until("its end", |server| server.ended.iter().any(|(ended, ..)| *ended == qp).then_some(()));
    }

    /// Waits for the end of a connection. Returns its cause and reason.
    fn wait_end(&mut self, qp: QpId) -> (Disconnect, String) {
        self.poll_until("the end", |server| {
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
        self.pool.close().expect("all memory has returned");
    }
}

/// An iWARP peer, which a test controls.
struct Peer {
    socket: TcpStream,
    received: Vec<u8>,
}

impl Peer {
    fn new(socket: TcpStream) -> Self {
        socket.set_nodelay(true).expect("TCP_NODELAY");
        socket.set_nonblocking(true).expect("O_NONBLOCK");
        Self { socket, received: Vec::new() }
    }

    /// Closes with a RST.
    fn reset(self) {
        set_socket_linger(&self.socket, Some(Duration::ZERO)).expect("SO_LINGER");
    }

    fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the socket has space");
    }

    /// Reads all available bytes. Returns true at the end of the stream.
    fn read_available(&mut self) -> bool {
        let mut space = [0; 4096];
        loop {
            match self.socket.read(&mut space) {
                Ok(0) => return true,
                Ok(n) => self.received.extend_from_slice(&space[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
        }
    }

    /// Waits for the end of the stream and returns the fault that the Terminate message reports.
    fn terminate_fault(&mut self, server: &mut Server, crc: bool) -> Option<TerminateFault> {
        server.poll_until("the end of the stream", |_| self.read_available().then_some(()));
        let (mut reader, mut input) = (SegmentReader::new(crc), &self.received[..]);
        let (mut opcode, mut fault) = (None, None);
        while let Some(step) = reader.step(&mut input).expect("a stream") {
            match step {
                ReaderStep::Segment { segment, .. } => opcode = Some(segment.opcode),
                ReaderStep::Payload(bytes) if opcode == Some(RdmapOpcode::Terminate) => {
                    fault = Terminate::decode(bytes).expect("a Terminate").fault();
                }
                _ => {}
            }
        }
        fault
    }
}

const SEND: RdmapOpcode = RdmapOpcode::Send { invalidate: None, solicited: false };

fn untagged(queue: u32, msn: u32, offset: u32) -> PayloadPlace {
    PayloadPlace::Untagged { queue, msn, offset }
}

fn request_frame(crc: bool, revision: u8) -> Vec<u8> {
    mpa_frame(MpaFrameKind::Request, crc, revision, 4)
}

fn mpa_frame(kind: MpaFrameKind, crc: bool, revision: u8, ord: u16) -> Vec<u8> {
    let enhanced =
        EnhancedData { ird: 4, ord, peer_to_peer: false, rtr_send: false, rtr_write: false, rtr_read: false };
    let enhanced = (revision == 2).then_some(enhanced);
    let setup =
        MpaFrame { kind, revision, markers: false, crc, reject: false, enhanced, private_data: PRIVATE_DATA.to_vec() };
    let mut bytes = Vec::new();
    setup.encode(&mut bytes);
    bytes
}

fn fpdu(opcode: RdmapOpcode, last: bool, place: PayloadPlace, payload: &[u8], crc: bool) -> Vec<u8> {
    let header = SegmentHeader { opcode, last, place }.encode(payload.len());
    let mut bytes = [&header[..], payload].concat();
    let whole = fpdu_len(header.len() - MPA_LEN + payload.len());
    bytes.resize(whole - CRC_LEN, 0);
    bytes.extend(if crc { crc32c(&bytes).to_le_bytes() } else { [0; CRC_LEN] });
    bytes
}

fn short_timeouts() -> IwarpFabricConfig {
    IwarpFabricConfig { retry_timeout: SHORT_TIMEOUT, handshake_timeout: SHORT_TIMEOUT, ..IwarpFabricConfig::default() }
}

#[test]
fn silent_connections_do_not_block_new_peers() {
    let mut server = Server::new(IwarpFabricConfig { max_handshakes: 8, ..IwarpFabricConfig::default() });
    // Connects 10,000 peers, or as many as the descriptor limit permits. They connect faster than the server accepts
    // them, because the server rarely polls.
    let files = getrlimit(Resource::Nofile);
    let count = files.maximum.map_or(10_000, |limit| limit.saturating_sub(500).min(10_000)) as usize;
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }).expect("up to the hard limit");
    if count < 10_000 {
        println!("run with {count} sockets instead of 10,000: the hard limit of files (ulimit -Hn) permits no more");
    }
    let mut silent = Vec::new();
    while silent.len() < count {
        silent.extend((0..500).map(|_| server.connect_silent_peer()));
        let connected = silent.len() as u64;
        server.poll_until("refusals", |server| (server.fabric.stats().requests_refused + 8 >= connected).then_some(()));
    }
    server.check_serves_new_peer();
    let open = silent.iter_mut().filter_map(|peer| (!peer.read_available()).then_some(())).count();
    assert!(open <= 8, "at most eight silent connections stay open, not {open}");
    server.close();
}

#[test]
fn slow_handshakes_end_at_the_handshake_timeout() {
    let mut server = Server::new(short_timeouts());
    let mut peer = server.connect_silent_peer();
    for byte in request_frame(false, 2) {
        if peer.socket.write_all(&[byte]).is_err() {
            break;
        }
        let next = Instant::now() + SHORT_TIMEOUT / 8;
        while Instant::now() < next {
            server.turn();
        }
    }
    server.poll_until("the end", |_| peer.read_available().then_some(()));
    assert!(server.up.is_empty());
    server.check_serves_new_peer();
    server.close();
}

#[test]
fn unsupported_requests_are_refused_by_a_reply() {
    let mut server = Server::new(IwarpFabricConfig { crc: Crc::Never, ..IwarpFabricConfig::default() });
    for (what, bytes) in [("revision 3", request_frame(false, 3)), ("CRCs", request_frame(true, 2))] {
        let mut peer = server.connect_silent_peer();
        peer.send(&bytes);
        server.poll_until(what, |_| peer.read_available().then_some(()));
        let (reply, _) = MpaFrame::decode(MpaFrameKind::Reply, &peer.received).expect("a reply").expect("whole");
        assert!(reply.reject, "{what}");
    }
    // The server closes the connection without a reply after invalid bytes, and after an FPDU before the reply.
    let early = [request_frame(false, 2), fpdu(SEND, true, untagged(0, 1, 0), b"early", false)].concat();
    for (what, bytes) in [("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec()), ("an early FPDU", early)] {
        let mut peer = server.connect_silent_peer();
        peer.send(&bytes);
        server.poll_until(what, |_| peer.read_available().then_some(()));
        assert!(peer.received.is_empty(), "{what}");
    }
    assert!(server.up.is_empty() && server.fabric.stats().requests_refused == 4);
    server.check_serves_new_peer();
    server.close();
}

/// MPA revision 1 does not announce the read depth, so the fabric sends one Read at a time.
#[test]
fn a_peer_of_revision_1_is_served_and_read_from() {
    let mut server = Server::new(IwarpFabricConfig::default());
    let (mut peer, qp) = server.establish_revision(1, false);
    peer.send(&fpdu(SEND, true, untagged(0, 1, 0), b"hello", false));
    server.poll_until("a message", |server| server.done.pop());
    let read = |wr_id| {
        let dst = server.pool.alloc(4096).expect("a buffer").lend().expect("lent by the owning thread");
        let remote = RemoteMemory { rkey: 7, address: 0 };
        Posting { wr_id, signaled: true, wr: WorkRequest::Read { dst, offset: 0, len: 4, remote } }
    };
    server.fabric.post_send(qp, &mut vec![read(1), read(2)]).expect("posted");
    for n in 1..=2 {
        // A Read Request has 18 bytes of DDP header and 28 of payload, which begins with the sink's STag.
        let whole = fpdu_len(18 + 28);
        server.poll_until("a Read Request", |_| (peer.read_available() || peer.received.len() >= whole).then_some(()));
        server.turn();
        peer.read_available();
        assert_eq!(peer.received.len(), whole, "only one Read is outstanding");
        let sink = peer.received[20..24].first_chunk().expect("an STag");
        let place = PayloadPlace::Tagged { stag: u32::from_be_bytes(*sink), offset: 0 };
        peer.received.clear();
        peer.send(&fpdu(RdmapOpcode::ReadResponse, true, place, b"data", false));
        let done = server.poll_until("a Read", |server| server.done.pop());
        assert_eq!((done.wr_id, done.status), (n, Status::Success));
    }
    server.close();
}

#[test]
fn violations_are_answered_by_a_terminate() {
    for (what, crc, bytes, expected) in [
        (
            "a Write to an unknown STag",
            false,
            fpdu(RdmapOpcode::Write, true, PayloadPlace::Tagged { stag: 0x1234_5678, offset: 0 }, b"mine", false),
            Some(TerminateFault::TaggedInvalidStag),
        ),
        ("a CRC of zeros", true, fpdu(SEND, true, untagged(0, 1, 0), b"hello", false), Some(TerminateFault::Crc)),
        ("a length of zero", false, vec![0; 8], Some(TerminateFault::StreamCatastrophic)),
        (
            "a length too short for a header",
            false,
            vec![0, 3, 0x41, 0x43, 0, 0, 0, 0],
            Some(TerminateFault::StreamCatastrophic),
        ),
        ("another version", false, fpdu_of_version(0), Some(TerminateFault::UntaggedVersion)),
    ] {
        let mut server = Server::new(IwarpFabricConfig::default());
        let (mut peer, qp) = server.establish(crc);
        peer.send(&bytes);
        assert_eq!(peer.terminate_fault(&mut server, crc), expected, "{what}");
        assert_eq!(server.wait_end(qp).0, Disconnect::Violation, "{what}");
        server.check_serves_new_peer();
        server.close();
    }
}

fn fpdu_of_version(version: u8) -> Vec<u8> {
    let mut bytes = fpdu(SEND, true, untagged(0, 1, 0), b"hello", false);
    bytes[2] = bytes[2] & !3 | version;
    bytes
}

#[test]
fn half_a_message_occupies_a_receive_until_retry_timeout() {
    let mut server = Server::new(short_timeouts());
    let (mut peer, qp) = server.establish(false);
    let message = fpdu(SEND, true, untagged(0, 1, 0), &[1; 1000], false);
    peer.send(&message[..500]);
    let (cause, reason) = server.wait_end(qp);
    assert_eq!(cause, Disconnect::Failure);
    assert!(reason.contains("the rest of a message"), "{reason}");
    server.check_serves_new_peer();
    server.close();
}

/// `rnr_retry` 7 means unlimited retries, but `retry_timeout` still bounds the wait. The last of nine messages has no
/// Receive.
#[test]
fn a_message_waits_for_a_receive_until_retry_timeout() {
    let messages: Vec<_> = (1..10).map(|msn| fpdu(SEND, true, untagged(0, msn, 0), &[msn as u8; 100], false)).collect();
    let messages = messages.concat();
    for (config, times_out) in [(IwarpFabricConfig::default(), false), (short_timeouts(), true)] {
        let mut server = Server::new(config);
        server.params.rnr_retry = ConnectParams::UNLIMITED_RNR_RETRY;
        let (mut peer, qp) = server.establish(false);
        peer.send(&messages);
        server
            .poll_until("a message that waits", |server| (server.fabric.stats().receiver_not_ready > 0).then_some(()));
        if times_out {
            assert_eq!(peer.terminate_fault(&mut server, false), Some(TerminateFault::NoBuffer));
            let (cause, reason) = server.wait_end(qp);
            assert_eq!(cause, Disconnect::Violation);
            assert!(reason.contains("no Receive was posted for a message within iwarp.retry_timeout"), "{reason}");
        }
        let mut bufs: Vec<Buf> = server.done.drain(..).filter_map(|c| Some(c.buf?.into_buf())).collect();
        assert_eq!(server.fabric.post_recv(None, &mut bufs), 8);
        if !times_out {
            let last = server.poll_until("the message", |server| server.done.pop());
            assert_eq!((last.qp, last.buf.as_ref().map(|buf| buf[0])), (qp, Some(9)));
            assert!(server.ended.is_empty());
        }
        server.check_serves_new_peer();
        server.close();
    }
}

#[test]
fn a_peer_that_stops_reading_is_disconnected_and_others_are_served() {
    let mut server = Server::new(IwarpFabricConfig { send_buffer: Some(64 << 10), ..short_timeouts() });
    let (mut peer, qp) = server.establish(false);
    // The server may send only after the peer's first FPDU, which is this empty Write.
    peer.send(&fpdu(RdmapOpcode::Write, true, PayloadPlace::Tagged { stag: 0, offset: 0 }, b"", false));
    (0..12).for_each(|wr_id| server.post_write(qp, wr_id, 1 << 20));
    server.check_serves_new_peer();
    let (cause, reason) = server.wait_end(qp);
    assert_eq!(cause, Disconnect::Failure);
    // TCP has the same time-out, and may report it before the fabric does.
    let reasons = ["acknowledged no sent data", "TCP did not answer for iwarp.retry_timeout"];
    assert!(reasons.iter().any(|words| reason.contains(words)), "{reason}");
    let last = server.wait_writes(12);
    assert!(last.contains(&Status::RetryExceeded) && last.last() == Some(&Status::Flushed), "{last:?}");
    server.check_serves_new_peer();
    server.close();
}

/// TCP_USER_TIMEOUT would end such a connection, because the peer's TCP window stays smaller than a segment. So the
/// fabric clears it while it times the peer's progress itself.
#[test]
fn a_slowly_reading_peer_stays_connected() {
    // In the first case the socket buffer is full. In the others it holds all data, without and with a Read Request.
    check_slow_reader(64 << 10, 1 << 20, false);
    check_slow_reader(400 << 10, 250 << 10, false);
    check_slow_reader(400 << 10, 250 << 10, true);
}

/// The server sends a Write of `len` bytes, and optionally a Read that the peer does not answer.
fn check_slow_reader(send_buffer: usize, len: usize, read: bool) {
    let retry_timeout = 8 * SHORT_TIMEOUT;
    let config = IwarpFabricConfig { retry_timeout, send_buffer: Some(send_buffer), ..IwarpFabricConfig::default() };
    let mut server = Server::new(config);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    set_socket_recv_buffer_size(&socket, 16 << 10).expect("SO_RCVBUF");
    rustix::net::connect(&socket, &server.address).expect("connected");
    let (mut peer, qp) = server.finish_handshake(Peer::new(socket.into()), 2, false);
    peer.send(&fpdu(RdmapOpcode::Write, true, PayloadPlace::Tagged { stag: 0, offset: 0 }, b"", false));
    server.post_write(qp, 0, len);
    if read {
        let dst = server.pool.alloc(100).expect("a buffer").lend().expect("lent by the owning thread");
        let wr = WorkRequest::Read { dst, offset: 0, len: 100, remote: RemoteMemory { rkey: 7, address: 0 } };
        server.fabric.post_send(qp, &mut vec![Posting { wr_id: 99, signaled: true, wr }]).expect("posted");
    }
    let (start, mut taken) = (Instant::now(), 0);
    while start.elapsed() < 2 * retry_timeout {
        // The peer's TCP window opens so rarely that TCP sends probes in between.
        taken += peer.socket.read(&mut [0; 1024]).unwrap_or(0);
        server.turn();
        assert!(server.ended.is_empty(), "{:?} after {taken} bytes", server.ended);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(taken < len / 2, "the peer reads less than half of the data, not {taken} bytes");
    drop(peer);
    server.wait_end(qp);
    server.close();
}

#[test]
fn a_close_at_any_byte_ends_only_that_connection() {
    let mut server = Server::new(IwarpFabricConfig::default());
    let message = fpdu(SEND, true, untagged(0, 1, 0), &[1; 100], false);
    for cut in (0..message.len()).step_by(7) {
        let (mut peer, qp) = server.establish(false);
        peer.send(&message[..cut]);
        drop(peer);
        assert_eq!(server.wait_end(qp).0, Disconnect::Peer, "after {cut} bytes");
        server.fabric.destroy_qp(qp);
        server.up.retain(|up| *up != qp);
        // The Receive of the partial message is returned, so that it can be posted again.
        let mut back: Vec<Buf> = server.done.drain(..).filter_map(|c| Some(c.buf?.into_buf())).collect();
        assert!(back.len() <= 1, "at most one Receive is returned after {cut} bytes");
        server.fabric.post_recv(None, &mut back);
    }
    server.check_serves_new_peer();
    server.close();
}

#[test]
fn an_invalid_reply_fails_the_connect() {
    let mut server = Server::new(IwarpFabricConfig::default());
    let (insufficient_ird, catastrophic) =
        (Some(TerminateFault::InsufficientIrd), Some(TerminateFault::MpaCatastrophic));
    for (what, reply, expected, fault) in [
        ("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "invalid MPA Reply Frame", None),
        ("the server's own request", request_frame(false, 2), "invalid MPA Reply Frame", None),
        ("revision 1", mpa_frame(MpaFrameKind::Reply, false, 1, 4), "without enhanced data", catastrophic),
        (
            "more Reads than the server accepts",
            mpa_frame(MpaFrameKind::Reply, false, 2, 17),
            "ORD 17 exceeds IRD 16",
            insufficient_ird,
        ),
        (
            "half a reply, then the end of the stream",
            mpa_frame(MpaFrameKind::Reply, false, 2, 4)[..19].to_vec(),
            "connection closed before an answer",
            None,
        ),
        ("only the end of the stream", Vec::new(), "connection closed before an answer", None),
    ] {
        let (mut peer, qp) = server.connect_to_peer();
        peer.send(&reply);
        if expected.starts_with("connection closed") {
            peer.socket.shutdown(Shutdown::Write).expect("shutdown");
        }
        let error = server.wait_connect_error(qp);
        assert!(error.contains(expected), "{what}: {error}");
        server.fabric.destroy_qp(qp);
        assert_eq!(peer.terminate_fault(&mut server, false), fault, "{what}");
    }
    let (peer, qp) = server.connect_to_peer();
    peer.reset();
    let error = server.wait_connect_error(qp);
    assert!(error.contains("reset"), "{error}");
    assert!(server.up.is_empty() && server.ended.is_empty(), "{:?} {:?}", server.up, server.ended);
    server.check_serves_new_peer();
    server.close();
}

#[test]
fn a_missing_reply_fails_the_connect_after_handshake_timeout() {
    let mut server = Server::new(short_timeouts());
    let half_reply = &mpa_frame(MpaFrameKind::Reply, false, 2, 4)[..30];
    for reply in [&[][..], half_reply] {
        let (mut peer, qp) = server.connect_to_peer();
        peer.send(reply);
        let error = server.wait_connect_error(qp);
        assert!(error.contains("did not answer within debug.handshake_timeout"), "{error}");
        server.fabric.destroy_qp(qp);
        server.poll_until("the end", |_| peer.read_available().then_some(()));
    }
    server.check_serves_new_peer();
    server.close();
}

/// The TCP segment with the reply also has the first message or a part of it.
#[test]
fn bytes_after_the_reply_are_the_first_message() {
    let mut server = Server::new(IwarpFabricConfig::default());
    let message = fpdu(SEND, true, untagged(0, 1, 0), b"hello", false);
    for cut in [message.len(), 30, 1] {
        let (mut peer, qp) = server.connect_to_peer();
        peer.send(&[&mpa_frame(MpaFrameKind::Reply, false, 2, 4)[..], &message[..cut]].concat());
        server.poll_until("a connection", |server| server.up.contains(&qp).then_some(()));
        peer.send(&message[cut..]);
        let got = server.poll_until("a message", |server| server.done.pop());
        let buf = got.buf.expect("a buffer");
        assert_eq!((got.qp, got.status, &buf[..]), (qp, Status::Success, &b"hello"[..]), "{cut} bytes with the reply");
        assert_eq!(server.fabric.post_recv(None, &mut vec![buf.into_buf()]), 1);
    }
    server.close();
}

/// The peer sends half a message while much data is in flight to it. A reset and a half-close both end the connection.
#[test]
fn a_reset_or_half_close_during_traffic_ends_only_that_connection() {
    for reset in [true, false] {
        let mut server = Server::new(IwarpFabricConfig { send_buffer: Some(64 << 10), ..IwarpFabricConfig::default() });
        let (mut peer, qp) = server.establish(false);
        peer.send(&fpdu(SEND, true, untagged(0, 1, 0), b"a call", false));
        let call = server.poll_until("a message", |server| server.done.pop());
        (0..8).for_each(|wr_id| server.post_write(qp, wr_id, 1 << 20));
        let second = fpdu(SEND, true, untagged(0, 2, 0), &[1; 1000], false);
        if reset {
            peer.send(&second[..500]);
            // After these turns, the received half of the message occupies a Receive.
            (0..100).for_each(|_| server.turn());
            peer.reset();
            assert_eq!(server.wait_end(qp).0, Disconnect::Peer);
        } else {
            peer.send(&second);
            peer.socket.shutdown(Shutdown::Write).expect("shutdown");
            // The fabric delivers messages received before the end.
            let last = server.poll_until("the last message", |server| {
                let at = server.done.iter().position(|c| c.opcode == Opcode::Recv)?;
                Some(server.done.swap_remove(at))
            });
            assert_eq!((last.status, last.buf.map(|buf| buf.len())), (Status::Success, Some(1000)));
            let (cause, reason) = server.wait_end(qp);
            assert_eq!((cause, &reason[..]), (Disconnect::Peer, "the peer closed the connection"));
            // Only the part of the first Write that the socket took arrives.
            server.poll_until("the end of the stream", |_| peer.read_available().then_some(()));
            assert!(!peer.received.is_empty() && peer.received.len() < 8 << 20, "{} bytes", peer.received.len());
        }
        // A Write posted after the end is flushed, as are the Writes in flight.
        server.post_write(qp, 8, 1 << 20);
        let ends = server.wait_writes(9);
        assert_eq!(ends.last(), Some(&Status::Flushed), "{ends:?}");
        assert!(ends.iter().all(|end| matches!(end, Status::Success | Status::Flushed)), "{ends:?}");
        drop(call);
        server.check_serves_new_peer();
        server.close();
    }
}

/// More messages arrive than one poll returns, from more connections than one poll reads without epoll.
#[test]
fn later_polls_return_the_completions_that_exceed_a_full_poll() {
    for crc in [false, true] {
        let mut server = Server::new(IwarpFabricConfig::default());
        let mut peers: Vec<_> = (0..8).map(|_| server.establish(crc)).collect();
        let mut receives: Vec<Buf> = (0..48).map(|_| server.pool.alloc(4096).expect("a buffer")).collect();
        assert_eq!(server.fabric.post_recv(None, &mut receives), 48);
        for (peer, _) in &mut peers {
            let all = (1..8).map(|msn| fpdu(SEND, true, untagged(0, msn, 0), &[msn as u8; 100], crc));
            peer.send(&all.collect::<Vec<_>>().concat());
        }
        let start = Instant::now();
        while server.done.len() < 56 {
            server.fabric.poll_cq(&mut server.done, 3);
            assert!(start.elapsed() < TIMEOUT, "56 messages arrive within {TIMEOUT:?}, not {}", server.done.len());
        }
        for (_, qp) in &peers {
            let messages = server.done.iter().filter(|c| c.qp == *qp);
            let first: Vec<_> = messages.map(|c| c.buf.as_ref().map(|buf| buf[0])).collect();
            assert_eq!(first, (1..8).map(Some).collect::<Vec<_>>());
        }
        server.close();
    }
}

/// Connections of which each poll leaves input, or of which epoll reports more than a poll has room for, take turns.
#[test]
fn a_message_arrives_soon_while_other_connections_fill_each_poll() {
    const ROOM: usize = 8;
    let mut server = Server::new(IwarpFabricConfig::default());
    let mut flooders: Vec<_> = (0..16).map(|_| server.establish(false).0).collect();
    let (mut witness, witness_qp) = server.establish(false);
    // A turn's share of segments ends within these messages.
    let cut = |msn: u32| {
        let segment = move |at: u32| fpdu(SEND, at == 84, untagged(0, msn, at), &[7; 4], false);
        (0..88).step_by(4).flat_map(segment)
    };
    let messages: Vec<u8> = (1..=60).flat_map(cut).collect();
    for flooder in &mut flooders {
        flooder.send(&messages);
    }
    let arrives_after = |server: &mut Server| {
        for polls in 1..1000 {
            let mut receives: Vec<Buf> = (0..ROOM).map_while(|_| server.pool.alloc(4096)).collect();
            server.fabric.post_recv(None, &mut receives);
            drop(receives);
            server.fabric.poll_cq(&mut server.done, ROOM);
            if server.done.drain(..).any(|completion| completion.qp == witness_qp) {
                return polls;
            }
        }
        panic!("the message of the witness does not arrive")
    };
    witness.send(&fpdu(SEND, true, untagged(0, 1, 0), b"early", false));
    let polls = arrives_after(&mut server);
    assert!(polls < 40, "{polls} polls");
    for msn in 2..5 {
        witness.send(&fpdu(SEND, true, untagged(0, msn, 0), b"while others have unread input", false));
        let polls = arrives_after(&mut server);
        assert!(polls < 40, "{polls} polls");
    }
    server.close();
}
