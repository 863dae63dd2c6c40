//! Invalid writes of peers to an established ring and its socket.

use super::*;

#[test]
fn invalid_record_headers_end_the_connection() {
    let mut cluster = Cluster::new("headers");
    let valid = RecordHeader::message(8, None, 0).first;
    let mut random = 12345u64;
    for i in 0..120u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let first = match i {
            0 => u64::MAX,
            1 => 1,
            // One byte too long, and as long as a header can state.
            2 => valid & !0xff_ffff | 4097,
            3 => valid | 0xff_ffff,
            4 => valid | 1 << 31,
            // An acknowledgement of messages that were never sent.
            5 => valid | 64 << 32,
            _ => random | 1 << 31,
        };
        let violations = cluster.server.stats().peer_violations;
        let (hostile, qp) = cluster.hostile_peer();
        word(&hostile.ring, hostile.ring_start() + 8).set(random);
        word(&hostile.ring, hostile.ring_start()).publish(first);
        cluster.expect_end(qp);
        assert_eq!(cluster.server.stats().peer_violations, violations + 1, "{first:#x} {random:#x}");
    }
}

/// Headers of records that are longer than the current ring, though the two sides have agreed on such messages. The
/// Receive of such a record has held another client's message before, which no peer may see.
#[test]
fn records_longer_than_the_ring_expose_no_other_bytes() {
    let mut cluster = Cluster::new("longer");
    // Each Receive has held other data before.
    let mut bufs: Vec<Buf> = std::iter::from_fn(|| cluster.pool.alloc(4096)).collect();
    for buf in &mut bufs {
        buf.fill(0xca);
    }
    drop(bufs);
    for len in [1969, 2033, 2048, 2049, 4000, 4096] {
        cluster.check();
        let violations = cluster.server.stats().peer_violations;
        let (hostile, qp) = cluster.hostile_peer();
        let RecordHeader { first, second } = RecordHeader::message(len, None, 0);
        word(&hostile.ring, hostile.ring_start() + 8).set(second);
        word(&hostile.ring, hostile.ring_start()).publish(first);
        cluster.expect_end(qp);
        assert_eq!(cluster.server.stats().peer_violations, violations + 1, "{len}");
        let bytes = cluster.done.iter().filter(|done| done.qp == qp).filter_map(|done| done.buf.as_deref());
        assert_eq!(bytes.map(<[u8]>::len).sum::<usize>(), 0, "{len}: no byte is shown that the peer never sent");
    }
}

#[test]
fn invalid_reports_end_the_connection() {
    let mut cluster = Cluster::new("reports");
    let send = |cluster: &mut Cluster, qp| {
        let buf = cluster.pool.alloc(100).expect("buffer");
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        cluster.server.post_send(qp, &mut vec![Posting { wr_id: 9, signaled: true, wr }])
    };
    let (hostile, qp) = cluster.hostile_peer();
    assert_eq!(send(&mut cluster, qp), Ok(()));
    hostile.report()[0].publish(1 << 40);
    cluster
        .wait_until("the Send ends", |t| t.done.iter().find(|d| d.qp == qp && d.status == Status::Flushed).map(|_| ()));
    cluster.expect_end(qp);
    // Refusals with unknown codes.
    for code in [3, u64::MAX] {
        let (hostile, qp) = cluster.hostile_peer();
        assert_eq!(send(&mut cluster, qp), Ok(()));
        hostile.report()[1].publish(code);
        cluster
            .wait_until("the Send ends", |t| t.done.iter().find(|d| d.status == Status::RemoteOperation).map(|_| ()));
        cluster.expect_end(qp);
    }
}

#[test]
fn unexpected_socket_messages_end_the_connection() {
    let mut cluster = Cluster::new("control");
    let memory = sealed(8192);
    let open_memory = unsealed(8192);
    let big = sealed(2 << 20);
    type Attack<'a> = Box<dyn Fn(&HostilePeer) + 'a>;
    let region = |id, bytes| SocketMessage::Region { id, bytes };
    let attacks: Vec<(&str, Attack<'_>)> = vec![
        ("a second Hello", Box::new(|peer| peer.send(&hello(), &[memory.fd(), memory.fd()]))),
        ("a Reject", Box::new(|peer| peer.send(&SocketMessage::Reject { private_data: vec![] }, &[]))),
        ("a region without a descriptor", Box::new(|peer| peer.send(&region(1, 8192), &[]))),
        ("a region with two descriptors", Box::new(|peer| peer.send(&region(1, 8192), &[memory.fd(), memory.fd()]))),
        ("a bell with a descriptor", Box::new(|peer| peer.send(&SocketMessage::Bell, &[memory.fd()]))),
        ("an unsealed region", Box::new(|peer| peer.send(&region(1, 8192), &[open_memory.as_fd()]))),
        ("a region with a wrong size", Box::new(|peer| peer.send(&region(1, 4096), &[memory.fd()]))),
        ("a region of no bytes", Box::new(|peer| peer.send(&region(1, 0), &[memory.fd()]))),
        ("a region of too many bytes", Box::new(|peer| peer.send(&region(1, 2 << 20), &[big.fd()]))),
        ("a region of the largest size", Box::new(|peer| peer.send(&region(1, u64::MAX), &[big.fd()]))),
        (
            "one region twice",
            Box::new(|peer| {
                peer.send(&region(1, 8192), &[memory.fd()]);
                peer.send(&region(1, 8192), &[memory.fd()]);
            }),
        ),
        (
            "more regions than may be mapped",
            Box::new(|peer| {
                for id in 0..100 {
                    peer.send(&region(id, 16 << 10), &[sealed(16 << 10).fd()]);
                }
                for id in 100..200 {
                    // The connection may have ended already.
                    let _ = region(id, 16 << 10).send(peer.socket.as_fd(), &[sealed(16 << 10).fd()]);
                }
            }),
        ),
        ("random bytes", Box::new(|peer| send_raw(&peer.socket, &[7; 100]))),
    ];
    for (what, attack) in &attacks {
        println!("{what}");
        let violations = cluster.server.stats().peer_violations;
        let (hostile, qp) = cluster.hostile_peer();
        attack(&hostile);
        cluster.expect_end(qp);
        assert_eq!(cluster.server.stats().peer_violations, violations + 1, "{what}");
    }
}

/// Endless Bell messages, without a sleeper.
#[test]
fn endless_bells_do_not_stop_other_connections() {
    let mut cluster = Cluster::new("bells");
    let (hostile, qp) = cluster.hostile_peer();
    for _ in 0..200 {
        while SocketMessage::Bell.send(hostile.socket.as_fd(), &[]).is_ok() {}
        cluster.check();
    }
    drop(hostile);
    cluster.expect_end(qp);
}

/// If a peer takes no messages, or never ends a copy, the requests that wait for the peer complete with an error and
/// no longer hold buffers.
#[test]
fn a_peer_that_takes_no_messages_is_disconnected() {
    let mut cluster = Cluster::new("takes-nothing");
    cluster.server.common.config.retry_timeout = Duration::from_millis(200);
    let outstanding =
        |cluster: &Cluster| cluster.pool.stats().classes.iter().map(|class| class.outstanding).sum::<usize>();
    let before = outstanding(&cluster);
    let (_hostile, qp) = cluster.hostile_peer();
    let mut chain: Vec<Posting> = (0..32)
        .map(|wr_id| {
            let buf = cluster.pool.alloc(4000).expect("buffer");
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            Posting { wr_id, signaled: true, wr }
        })
        .collect();
    cluster.server.post_send(qp, &mut chain).expect("post");
    assert!(outstanding(&cluster) > before + 20, "a ring of {RING} bytes has no room for all of them");
    // Time without a poll does not count against the peer.
    let (start, limit) = (Instant::now(), Duration::from_secs(40));
    let waiting = cluster.server.table.get_mut(qp).expect("it waits");
    let mut waited = |seconds| waiting.stalled_for(start + Duration::from_secs(seconds), limit).map(|t| t.as_secs());
    assert_eq!([0, 10, 20, 31, 41].map(&mut waited), [0, 10, 20, 0, 10].map(Some));
    waiting.stall.stop();
    cluster.wait_until("the first Send ends", |t| {
        t.done.iter().find(|d| d.qp == qp && d.status == Status::RnrRetryExceeded && d.wr_id == 0).map(|_| ())
    });
    assert_eq!(cluster.done.iter().filter(|d| d.qp == qp && d.status == Status::Flushed).count(), 31);
    assert_eq!(outstanding(&cluster), before);
    cluster.expect_end(qp);
    // Endless copy: the memory cannot be recovered, and the connection ends.
    let (hostile, qp) = cluster.hostile_peer();
    let window = cluster.server.alloc_window(qp).expect("window");
    let wr = WorkRequest::Bind { window, mem: lend(&cluster), offset: 0, len: 4096, access: Access::REMOTE };
    cluster.server.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: false, wr }]).expect("bind");
    let table = hostile.peer_table.as_ref().expect("table");
    table.line(window.index as usize * ENTRY_BYTES).expect("an entry")[BUSY].publish(1);
    let wr = WorkRequest::LocalInvalidate { window };
    cluster.server.post_send(qp, &mut vec![Posting { wr_id: 2, signaled: true, wr }]).expect("invalidate");
    cluster.expect_end(qp);
}

/// Random writes to the shared memory while it is in use.
#[test]
fn random_writes_to_shared_memory_end_only_their_connection() {
    let mut cluster = Cluster::new("scribble");
    for round in 0..20u64 {
        let (hostile, qp) = cluster.hostile_peer();
        let HostilePeer { socket, ring, table, peer_table, layout } = hostile;
        let writer = std::thread::spawn(move || {
            let mut random = round + 1;
            let ring = layout.rings(ring).expect("rings");
            let peer_table = peer_table.expect("table");
            for _ in 0..2000 {
                for _ in 0..16 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let at = (random >> 33) as usize;
                    word(&ring, (at % layout.bytes()) & !7).set(random);
                    word(&peer_table, (at % 4096) & !7).set(random);
                    word(&table, (at % 4096) & !7).set(random);
                }
                // Write a valid record now and then.
                let mut tx = layout.producer();
                assert!(tx.push(&ring.tx(), &[1; 100], || RecordHeader::message(100, None, 0)));
            }
            drop(socket);
        });
        let window = cluster.server.alloc_window(qp).ok();
        while !writer.is_finished() {
            let buf = cluster.pool.alloc(100);
            if let Some(buf) = buf {
                let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
                let _ = cluster.server.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: true, wr }]);
            }
            if let Some(window) = window {
                let wr = WorkRequest::Bind { window, mem: lend(&cluster), offset: 0, len: 64, access: Access::REMOTE };
                let wr2 = WorkRequest::LocalInvalidate { window };
                let bind = Posting { wr_id: 2, signaled: false, wr };
                let _ = cluster.server.post_send(qp, &mut vec![bind, Posting { wr_id: 3, signaled: false, wr: wr2 }]);
            }
            cluster.turn();
            for done in std::mem::take(&mut cluster.done) {
                if let Some(buf) = done.buf {
                    cluster.server.post_recv(None, &mut vec![buf.into_buf()]);
                }
            }
        }
        writer.join().expect("no panic");
        cluster.server.destroy_qp(qp);
        cluster.events.clear();
        cluster.done.clear();
        cluster.check();
    }
}
