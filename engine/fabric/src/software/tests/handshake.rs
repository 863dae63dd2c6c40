//! Invalid connection setup: Hello messages, answers, silence.

use super::*;
use crate::FabricErrorKind;

#[test]
fn invalid_hellos_are_refused() {
    let mut cluster = Cluster::new("hello");
    let layout = layout(RING);
    let ring = sealed(layout.bytes());
    let table = sealed(table_bytes(WINDOWS).expect("windows"));
    let short = sealed(4096);
    let (open_ring, open_table) = (unsealed(layout.bytes() as u64), unsealed(4096));
    let nothing = null();
    let good = [ring.fd(), table.fd()];
    let change = |ring_bytes, max_message, windows| {
        SocketMessage::Hello(Opening { may_sleep: false, ring_bytes, max_message, windows, private_data: vec![] })
    };
    let cases: Vec<(&str, SocketMessage, Vec<BorrowedFd<'_>>)> = vec![
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
        ("too many windows", change(RING, 4096, u32::MAX), good.to_vec()),
        ("more windows than the table has", change(RING, 4096, 60_000), good.to_vec()),
        ("an answer instead", SocketMessage::Reject { private_data: vec![1] }, vec![]),
        ("a bell instead", SocketMessage::Bell, vec![]),
    ];
    for (what, message, fds) in &cases {
        let socket = dial(&cluster.address);
        message.send(socket.as_fd(), fds).expect("send");
        cluster.expect_refusal(what, &socket);
    }
    // Datagrams that are not messages.
    for bytes in [
        &b""[..],
        b"x",
        b"RPsf",
        b"RPsf\x03\0",
        b"RPsf\x04\0\x01\0",
        b"RPsf\x03\0\x09\0",
        b"RPsf\x03\0\x05\xff",
        &[0; 288],
        &[0xff; 5000],
    ] {
        let socket = dial(&cluster.address);
        send_raw(&socket, bytes);
        cluster.expect_refusal(&format!("{} bytes", bytes.len()), &socket);
    }
}

/// Endless connects of other users of the host: a turn stays short, and so does the log.
#[test]
fn connects_of_other_users_are_limited_per_turn_and_in_the_log() {
    const CONNECTS: usize = 200;
    logged();
    let mut cluster = Cluster::new("strangers");
    let gate = FabricAddress(format!("hostile-gate-{}", std::process::id()));
    let listener = SoftwareListener::bind_for(&gate, |_| Err("another user".to_owned())).expect("bind");
    cluster.server.listen(&listener).expect("listen");
    let sockets: Vec<OwnedFd> = (0..CONNECTS).map(|_| dial(&gate)).collect();
    let max_refused = config().max_handshakes as u64;
    let before = cluster.server.stats().requests_refused;
    cluster.server.poll_control(&mut cluster.events);
    assert_eq!(cluster.server.stats().requests_refused - before, max_refused, "refusals in one turn");
    for socket in &sockets {
        cluster.expect_refusal("another user", socket);
    }
    assert_eq!(cluster.server.stats().requests_refused - before, CONNECTS as u64);
    let (hostile, qp) = cluster.hostile_peer();
    drop(hostile);
    cluster.expect_end(qp);
    // The sum is logged after the interval, or at the end.
    drop(cluster);
    let lines = logged();
    let (sums, lines): (Vec<String>, Vec<String>) = lines.into_iter().partition(|line| line.contains("more: "));
    assert!(lines.iter().all(|line| line.contains("another user")), "{lines:?}");
    // The limit holds for ten seconds, and the machine may be slow.
    assert!(lines.len() <= 3 * LINES as usize && !sums.is_empty(), "{lines:?} {sums:?}");
    let summed: usize = sums.iter().filter_map(|line| line.split(' ').nth(1)?.parse::<usize>().ok()).sum();
    assert_eq!(summed + lines.len(), CONNECTS, "{sums:?}");
}

/// The descriptor that a fabric reserves must not refer to a peer's socket, because the socket would then stay open.
#[test]
fn the_socket_of_a_destroyed_queue_pair_is_closed() {
    let mut cluster = Cluster::new("closed-socket");
    let (hostile, qp) = cluster.hostile_peer();
    let (_memory, descriptor) = create_shared(4096, "exposed").expect("memory");
    hostile.send(&SocketMessage::Region { id: 0, bytes: 4096 }, &[descriptor.as_fd()]);
    cluster.turn();
    cluster.server.destroy_qp(qp);
    let send = || SocketMessage::Bell.send(hostile.socket.as_fd(), &[]);
    cluster.wait_until("the close", |_| (send() == Err(rustix::io::Errno::PIPE)).then_some(()));
    cluster.check();
}

#[test]
fn flags_are_valid_only_in_messages_that_define_them() {
    for (kind, body, known) in [(1, 12, true), (2, 12, true), (3, 0, false), (4, 16, false), (5, 0, false)] {
        for (flags, known) in [(0, true), (1, known), (2, false)] {
            let bytes = [b"RPsf\x03\0".as_slice(), &[kind, flags], &[0; 16][..body]].concat();
            assert_eq!(SocketMessage::decode(&bytes).is_ok(), known, "kind {kind}, flags {flags}");
        }
    }
}

#[test]
fn silent_handshakes_do_not_block_others() {
    let mut cluster = Cluster::new("silent");
    let mut silent: Vec<OwnedFd> = Vec::new();
    for _ in 0..100 {
        silent.push(dial(&cluster.address));
        cluster.turn();
    }
    cluster.check();
    // A peer that sends its request connects while the silent ones are open.
    let (hostile, qp) = cluster.hostile_peer();
    drop(hostile);
    cluster.expect_end(qp);
    // The silent ones are closed after their time-out.
    for socket in &silent {
        cluster.expect_refusal("silent", socket);
    }
}

/// A process that endlessly opens silent connections evicts only its own.
#[test]
fn silent_connections_of_one_process_evict_only_its_own() {
    static PID: AtomicI32 = AtomicI32::new(1);
    let mut cluster = Cluster::new("one-process");
    cluster.server.connections.limits.handshake_timeout = 10 * TIMEOUT;
    let gate = FabricAddress(format!("hostile-process-{}", std::process::id()));
    let admit = |_: BorrowedFd<'_>| Ok(PeerProcess { pid: PID.load(Ordering::Relaxed), uid: 0 });
    let listener = SoftwareListener::bind_for(&gate, admit).expect("bind");
    cluster.server.listen(&listener).expect("listen");
    // A slow but honest peer connects first.
    let slow = dial(&gate);
    cluster.turn();
    PID.store(2, Ordering::Relaxed);
    let mut silent = Vec::new();
    for _ in 0..10 * config().max_handshakes {
        silent.push(dial(&gate));
        cluster.turn();
    }
    assert_eq!(cluster.server.connections.incomplete.len(), config().max_handshakes);
    let (_ring, ring_fd) = create_shared(layout(RING).bytes(), "slow").expect("ring");
    let (_table, table_fd) = create_shared(table_bytes(WINDOWS).expect("windows"), "slow").expect("table");
    hello().send(slow.as_fd(), &[ring_fd.as_fd(), table_fd.as_fd()]).expect("send");
    let qp = cluster.accept();
    cluster.turn();
    assert!(matches!(SocketMessage::receive(slow.as_fd()), SocketInput::Message((SocketMessage::Accept(_), _))));
    drop(slow);
    cluster.expect_end(qp);
}

/// A connector offers rings of maximum size to an acceptor with smaller ones: only the acceptor's size is used.
#[test]
fn rings_do_not_exceed_the_acceptors_maximum() {
    let mut cluster = Cluster::new("rings");
    const LONG: u32 = 1 << 18;
    cluster.server.common.config.max_mapped_per_peer = 1 << 30;
    let socket = dial(&cluster.address);
    let (ring, ring_fd) = create_shared(layout(LONG).bytes(), "hostile").expect("ring");
    let (_table, table_fd) = create_shared(table_bytes(WINDOWS).expect("windows"), "hostile").expect("table");
    let hello = SocketMessage::Hello(Opening {
        may_sleep: true,
        ring_bytes: LONG,
        max_message: LONG / 2,
        windows: WINDOWS,
        private_data: vec![],
    });
    hello.send(socket.as_fd(), &[ring_fd.as_fd(), table_fd.as_fd()]).expect("send");
    let qp = cluster.accept();
    match SocketMessage::receive(socket.as_fd()) {
        SocketInput::Message((SocketMessage::Accept(Opening { ring_bytes, max_message, .. }), _)) => {
            assert_eq!((ring_bytes, max_message), (RING, 4096));
        }
        other => panic!("no answer: {other:?}"),
    }
    let mut chain: Vec<Posting> = (0..100)
        .map(|wr_id| {
            let buf = cluster.pool.alloc(4000).expect("buffer");
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            Posting { wr_id, signaled: false, wr }
        })
        .collect();
    cluster.server.post_send(qp, &mut chain).expect("post");
    let layout = layout(RING);
    let untouched = (layout.bytes()..ring.len()).step_by(8).all(|at| word(&ring, at).get() == 0);
    assert!(untouched && word(&ring, layout.rx_ring()).get() != 0);
    drop(socket);
    cluster.expect_end(qp);
    // An honest client with long rings sends messages both ways, several times around the ring.
    let long = SoftwareConfig { ring_bytes: LONG as usize, max_message: 8192, ..honest() };
    let mut client = SoftwareFabric::new(long).expect("open");
    client.register(cluster.pool.arena(), Access::LOCAL).expect("register");
    let client_qp = client.connect(&cluster.address, &params()).expect("connect");
    let server_qp = cluster.accept();
    cluster.wait_until("the client is up", |_| {
        client.poll_control(&mut Vec::new());
        client.table.get_mut(client_qp).filter(|q| q.is_live()).map(|_| ())
    });
    let mut bufs: Vec<Buf> = (0..8).map_while(|_| cluster.pool.alloc(4096)).collect();
    assert_eq!(client.post_recv(None, &mut bufs), 8);
    for round in 0..40u8 {
        let send = |fabric: &mut SoftwareFabric, qp, pool: &Pool| {
            let mut buf = pool.alloc(3000).expect("buffer");
            buf.fill(round);
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            fabric.post_send(qp, &mut vec![Posting { wr_id: 0, signaled: false, wr }]).expect("post");
        };
        send(&mut client, client_qp, &cluster.pool);
        let got = cluster.wait_until("the client's message", |t| {
            let at = t.done.iter().position(|d| d.qp == server_qp && d.opcode == Opcode::Recv)?;
            t.done.swap_remove(at).buf
        });
        assert!(got.len() == 3000 && got.iter().all(|&byte| byte == round));
        cluster.server.post_recv(None, &mut vec![got.into_buf()]);
        send(&mut cluster.server, server_qp, &cluster.pool);
        let got = cluster.wait_until("the server's message", |_| {
            let mut done = Vec::new();
            client.poll_cq(&mut done, 1);
            done.pop()?.buf
        });
        assert!(got.len() == 3000 && got.iter().all(|&byte| byte == round));
        client.post_recv(None, &mut vec![got.into_buf()]);
    }
    drop(client);
    cluster.expect_end(server_qp);
}

/// An acceptor sends more than agreed, within the connector's offer.
#[test]
fn messages_longer_than_agreed_end_the_connection() {
    let mut cluster = Cluster::new("agreed");
    cluster.server.common.config.max_message = 2048;
    let mut client = open();
    client.register(cluster.pool.arena(), Access::LOCAL).expect("register");
    client.connect(&cluster.address, &params()).expect("connect");
    let server_qp = cluster.accept();
    let mut bufs = vec![cluster.pool.alloc(4096).expect("buffer")];
    assert_eq!(client.post_recv(None, &mut bufs), 1);
    cluster.server.table.get_mut(server_qp).expect("the queue pair").max_message = 4096;
    let buf = cluster.pool.alloc(3000).expect("buffer");
    let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
    cluster.server.post_send(server_qp, &mut vec![Posting { wr_id: 0, signaled: false, wr }]).expect("post");
    cluster.wait_until("the message is refused", |_| {
        client.poll_cq(&mut Vec::new(), 1);
        client.poll_control(&mut Vec::new());
        (client.stats().peer_violations == 1).then_some(())
    });
    drop(client);
    cluster.expect_end(server_qp);
}

/// An acceptor that sends invalid answers.
#[test]
fn invalid_answers_fail_the_connect() {
    let address = FabricAddress(format!("hostile-acceptor-{}", std::process::id()));
    let listener = SoftwareFabric::bind(&address).expect("bind");
    let table = sealed(table_bytes(WINDOWS).expect("windows"));
    let open_table = unsealed(4096);
    let rings = |ring_bytes, max_message, windows| {
        SocketMessage::Accept(Opening { may_sleep: true, ring_bytes, max_message, windows, private_data: vec![] })
    };
    let accept = |max_message, windows| rings(RING, max_message, windows);
    let answers: Vec<(SocketMessage, Vec<BorrowedFd<'_>>)> = vec![
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
        (SocketMessage::Bell, vec![]),
        (hello(), vec![table.fd(), table.fd()]),
        (SocketMessage::Region { id: 1, bytes: 4096 }, vec![table.fd()]),
    ];
    let mut client = open();
    for (answer, fds) in &answers {
        let qp = client.connect(&address, &params()).expect("connect");
        let Ok(Ok((socket, _))) = listener.accept() else { panic!("no connection") };
        answer.send(socket.as_fd(), fds).expect("send");
        let mut events = Vec::new();
        client.poll_control(&mut events);
        let [ControlEvent::ConnectFailed { qp: failed, error }] = &events[..] else { panic!("{answer:?}: {events:?}") };
        assert_eq!((*failed, error.kind()), (qp, FabricErrorKind::Peer), "{answer:?}: {error}");
        client.destroy_qp(qp);
    }
    // An acceptor that closes the connection instead.
    let qp = client.connect(&address, &params()).expect("connect");
    drop(listener.accept());
    let mut events = Vec::new();
    client.poll_control(&mut events);
    let closed =
        matches!(&events[..], [ControlEvent::ConnectFailed { error, .. }] if error.kind() == FabricErrorKind::Closed);
    assert!(closed, "{events:?}");
    client.destroy_qp(qp);
    // An acceptor that never answers.
    let qp = client.connect(&address, &params()).expect("connect");
    let start = Instant::now();
    let mut events = Vec::new();
    while events.is_empty() {
        assert!(start.elapsed() < TIMEOUT, "no time-out");
        client.poll_control(&mut events);
    }
    let [ControlEvent::ConnectFailed { qp: failed, error }] = &events[..] else { panic!("{events:?}") };
    assert_eq!((*failed, error.kind()), (qp, FabricErrorKind::TimedOut), "{error}");
}

/// Processes that endlessly connect and send requests, so that each poll finds another pending request.
#[test]
fn a_slow_request_completes_among_endless_requests() {
    const POLLS: usize = 8;
    static PID: AtomicI32 = AtomicI32::new(1);
    let mut cluster = Cluster::new("without-end");
    cluster.server.connections.limits.handshake_timeout = 10 * TIMEOUT;
    let gate = FabricAddress(format!("hostile-gate-without-end-{}", std::process::id()));
    let admit = |_: BorrowedFd<'_>| Ok(PeerProcess { pid: PID.load(Ordering::Relaxed), uid: 0 });
    let listener = SoftwareListener::bind_for(&gate, admit).expect("bind");
    cluster.server.listen(&listener).expect("listen");
    let (ring, table) = (sealed(layout(RING).bytes()), sealed(table_bytes(WINDOWS).expect("windows")));
    let send_request = |socket: &OwnedFd| hello().send(socket.as_fd(), &[ring.fd(), table.fd()]).expect("send");
    let slow = dial(&gate);
    cluster.turn();
    PID.store(2, Ordering::Relaxed);
    let mut storm = Vec::new();
    let mut completed = false;
    for poll in 0..2 * POLLS {
        // Two new requests for each one that is answered.
        for _ in 0..2 {
            let socket = dial(&gate);
            send_request(&socket);
            storm.push(socket);
        }
        if poll == POLLS {
            send_request(&slow);
        }
        cluster.server.poll_control(&mut cluster.events);
        for event in std::mem::take(&mut cluster.events) {
            if let ControlEvent::ConnectRequest { request, peer, .. } = event {
                completed |= peer.starts_with("pid 1 ");
                cluster.server.reject(request, &[]);
            }
        }
    }
    assert!(completed, "the slow request was never completed");
}
