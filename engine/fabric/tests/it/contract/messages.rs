//! Cases about Sends and Receives.

use super::*;
use rpcrdma_fabric::Source;

pub(super) fn cases<F: Fabric>() -> Vec<Case<F>> {
    vec![
        Case { name: "messages arrive whole and in order", check: order },
        Case { name: "messages of every length arrive", check: lengths },
        Case { name: "many messages use every position of the rings", check: volume },
        Case { name: "many short calls and replies alternate", check: short_messages },
        Case { name: "a long message arrives after short ones were received", check: long_after_short },
        Case { name: "a shared receive queue serves all connections", check: shared_queue },
        Case { name: "Receives after a fence are used last", check: fenced_receives },
        Case { name: "a private receive queue serves one queue pair only", check: own_queue },
        Case { name: "a chain is executed in order", check: chain },
        Case { name: "only signaled requests complete", check: selective_signaling },
        Case { name: "an unsignaled request that fails is reported", check: unsignaled_failure },
        Case { name: "a message longer than its Receive ends the connection", check: too_long },
        Case { name: "without a Receive and without retries, the Send fails", check: not_ready },
        Case { name: "without a Receive, the Send fails after its retries", check: few_retries },
        Case { name: "without a Receive, but with unlimited retries, the message waits", check: waits_for_receive },
        Case { name: "a full send queue refuses requests until it has room", check: queue_full },
        Case { name: "concurrent Sends in both directions arrive", check: both_directions },
        Case { name: "memory that is not registered is refused", check: foreign_memory },
        Case { name: "a Send with immediate data is not a message", check: send_with_immediate },
        Case { name: "a Write with immediate data is not a message", check: write_with_immediate },
        Case { name: "a Write of nothing with immediate data is not a message", check: empty_write_with_immediate },
    ]
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 31 + i * 7) as u8).collect()
}

fn order<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 100)?;
    for i in 0..100u64 {
        w.client.send_now(c, i, &pattern(i as usize, 64))?;
    }
    for i in 0..100u64 {
        let got = w.server_done(s, Opcode::Recv)?;
        expect_eq("message", bytes(&got)?, &pattern(i as usize, 64)[..])?;
        let sent = w.client_done(c, Opcode::Send)?;
        expect_eq("completion", (sent.wr_id, sent.status), (i, Status::Success))?;
    }
    Ok(())
}

fn lengths<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let edges = [0, 1, 15, 16, 47, 48, 49, 63, 64, 65, 111, 112, 113, 127, 128, 4000, 4079, 4080, 4081, 4095, 4096];
    for len in edges {
        w.server.post_receives(None, 1)?;
        w.client.send_quietly(c, 0, &pattern(len, len))?;
        let got = w.server_done(s, Opcode::Recv)?;
        expect_eq(&format!("message of {len} bytes"), bytes(&got)?, &pattern(len, len)[..])?;
    }
    Ok(())
}

fn volume<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 64)?;
    let (mut sent, mut got) = (0usize, 0usize);
    let total = 3000;
    let len = |i: usize| (i * 97) % 4097;
    w.until("all messages arrive", |w| {
        while sent < total && sent < got + 64 {
            w.client.send_quietly(c, 0, &pattern(sent, len(sent))).ok()?;
            sent += 1;
        }
        while let Some(done) = w.server.take(s, Opcode::Recv) {
            let expected = pattern(got, len(got));
            if bytes(&done).ok()? != &expected[..] {
                return Some(Err(format!("message {got} arrives damaged")));
            }
            got += 1;
            let mut back = vec![done.buf?.into_buf()];
            w.server.fabric.post_recv(None, &mut back);
        }
        (got == total).then_some(Ok(()))
    })?
}

fn short_messages<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 1)?;
    w.client.post_receives(None, 1)?;
    for i in 0..6000 {
        w.client.send_quietly(c, 0, &pattern(i, 100))?;
        let got = w.server_done(s, Opcode::Recv)?;
        expect_eq("call", bytes(&got)?, &pattern(i, 100)[..])?;
        w.server.repost(got)?;
        w.server.send_quietly(s, 0, &pattern(i + 1, 100))?;
        let got = w.client_done(c, Opcode::Recv)?;
        expect_eq("reply", bytes(&got)?, &pattern(i + 1, 100)[..])?;
        w.client.repost(got)?;
    }
    Ok(())
}

fn long_after_short<F: Fabric>(w: &mut World<F>) -> Outcome {
    for short in [0, 8, 20, 40, 70] {
        let (c, s) = w.connect()?;
        w.server.post_receives(None, 1)?;
        for i in 0..short {
            w.client.send_now(c, 0, &pattern(i, 100))?;
            let got = w.server_done(s, Opcode::Recv)?;
            w.server.repost(got)?;
            w.client_done(c, Opcode::Send)?;
        }
        w.client.send_quietly(c, 0, &pattern(short, 2048))?;
        let got = w.server_done(s, Opcode::Recv).map_err(|e| format!("after {short} messages: {e}"))?;
        expect_eq("message", bytes(&got)?, &pattern(short, 2048)[..])?;
    }
    Ok(())
}

fn shared_queue<F: Fabric>(w: &mut World<F>) -> Outcome {
    let pairs = [w.connect()?, w.connect()?, w.connect()?];
    w.server.post_receives(None, 3)?;
    for (i, (c, _)) in pairs.iter().enumerate() {
        w.client.send_now(*c, 7, &pattern(i, 100))?;
    }
    for (i, (c, s)) in pairs.iter().enumerate() {
        let got = w.server_done(*s, Opcode::Recv)?;
        expect_eq("message", bytes(&got)?, &pattern(i, 100)[..])?;
        expect_eq("completion", w.client_done(*c, Opcode::Send)?.status, Status::Success)?;
    }
    Ok(())
}

fn fenced_receives<F: Fabric>(w: &mut World<F>) -> Outcome {
    const OLD: usize = 5;
    let (c, s) = w.connect()?;
    let post_larger = |end: &mut End<F>| {
        let mut bufs = vec![end.pool.alloc(1 << 20).ok_or("the pool is empty")?];
        expect_eq("Receives posted", end.fabric.post_recv(None, &mut bufs), 1)
    };
    w.client.post_receives(None, OLD)?;
    w.client.fabric.fence_receives();
    for i in 0..3 * OLD {
        // Two larger Receives are posted in separate chains before they are needed, then one for each message.
        if i == 0 || i == OLD - 1 || i > OLD {
            post_larger(&mut w.client)?;
        }
        w.server.send_quietly(s, 0, &pattern(i, 64))?;
        let got = w.client_done(c, Opcode::Recv)?;
        expect_eq("message", bytes(&got)?, &pattern(i, 64)[..])?;
        let old = got.buf.as_ref().is_some_and(|buf| buf.capacity() < 1 << 20);
        expect_eq(&format!("message {i} uses a Receive from before the fence"), old, i < OLD)?;
    }
    Ok(())
}

fn own_queue<F: Fabric>(w: &mut World<F>) -> Outcome {
    let own = ConnectParams {
        own_receive_queue: Some(4),
        rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY,
        ..ConnectParams::default()
    };
    let (c, s) = w.connect_with(&ConnectParams::default(), &own)?;
    // This queue pair does not use the shared Receives.
    w.server.post_receives(None, 1)?;
    w.client.send_now(c, 1, b"first")?;
    w.idle();
    ensure!(w.server.take(s, Opcode::Recv).is_none(), "the queue pair uses no Receive of the shared queue");
    w.server.post_receives(Some(s), 2)?;
    let got = w.server_done(s, Opcode::Recv)?;
    expect_eq("message", bytes(&got)?, b"first")?;
    let mut bufs: Vec<Buf> = (0..9).map_while(|_| w.server.pool.alloc(RECEIVE_SIZE)).collect();
    let taken = w.server.fabric.post_recv(Some(s), &mut bufs);
    ensure!((3..=8).contains(&taken), "a queue of 4 with 1 posted took {taken} of 9");
    // The disconnect flushes the Receives left in the connection's queue.
    w.server.fabric.disconnect(s);
    for _ in 0..=taken {
        let flushed = w.server_done(s, Opcode::Recv)?;
        ensure!(flushed.status == Status::Flushed && flushed.buf.is_some(), "{flushed:?}");
    }
    Ok(())
}

fn chain<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 16)?;
    let chain: Result<Vec<_>, _> = (0..16).map(|i| w.client.send(i, &pattern(i as usize, 200))).collect();
    w.client.post(c, chain?)?;
    for i in 0..16 {
        let got = w.server_done(s, Opcode::Recv)?;
        expect_eq("message", bytes(&got)?, &pattern(i, 200)[..])?;
        expect_eq("completion", w.client_done(c, Opcode::Send)?.wr_id, i as u64)?;
    }
    Ok(())
}

fn selective_signaling<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 20)?;
    for i in 0..20u64 {
        let send = Posting { signaled: i % 10 == 9, ..w.client.send(i, b"x")? };
        w.client.post(c, [send])?;
    }
    for _ in 0..20 {
        bytes(&w.server_done(s, Opcode::Recv)?)?;
    }
    expect_eq("first signaled", w.client_done(c, Opcode::Send)?.wr_id, 9)?;
    expect_eq("second signaled", w.client_done(c, Opcode::Send)?.wr_id, 19)?;
    w.idle();
    ensure!(w.client.completions.is_empty(), "unsignaled Sends do not complete: {:?}", w.client.completions);
    Ok(())
}

fn unsignaled_failure<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 2)?;
    let sends = [w.client.quiet_send(1, b"fits")?, w.client.quiet_send(2, &[1; 64])?];
    w.client.post(c, sends)?;
    bytes(&w.server_done(s, Opcode::Recv)?)?;
    bytes(&w.server_done(s, Opcode::Recv)?)?;
    // The third message has no Receive.
    w.client.send_quietly(c, 3, b"too many")?;
    if !w.acknowledges() {
        w.wait_client_disconnected(c)?;
        return w.wait_server_disconnected(s);
    }
    let failed = w.client_done(c, Opcode::Send)?;
    expect_eq("failure", (failed.wr_id, failed.status), (3, Status::RnrRetryExceeded))
}

fn too_long<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let mut short = w.server.pool.alloc(RECEIVE_SIZE).into_iter().collect::<Vec<_>>();
    let capacity = short.first().map_or(0, |b| b.capacity());
    w.server.fabric.post_recv(None, &mut short);
    w.client.send_now(c, 1, &vec![7; capacity + 1])?;
    let got = w.server_done(s, Opcode::Recv)?;
    // Soft-RoCE reports LocalQpOperation.
    ensure!(matches!(got.status, Status::LocalLength | Status::LocalQpOperation), "receiver: {got:?}");
    let sent = w.client_done(c, Opcode::Send)?;
    expect_eq("sender", sent.wr_id, 1)?;
    let is_refused = matches!(sent.status, Status::RemoteInvalidRequest | Status::RemoteOperation);
    ensure!(is_refused || !w.acknowledges(), "sender: {sent:?}");
    w.wait_both_disconnected(c, s)
}

fn not_ready<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let sends = [w.client.send(1, b"no Receive")?, w.client.quiet_send(2, b"flushed")?];
    w.client.post(c, sends)?;
    if w.acknowledges() {
        let sent = w.client_done(c, Opcode::Send)?;
        expect_eq("first", (sent.wr_id, sent.status), (1, Status::RnrRetryExceeded))?;
        let sent = w.client_done(c, Opcode::Send)?;
        expect_eq("second", (sent.wr_id, sent.status), (2, Status::Flushed))?;
    }
    w.wait_both_disconnected(c, s)?;
    expect_eq("messages without a Receive", w.server.fabric.stats().receiver_not_ready, 1)
}

fn few_retries<F: Fabric>(w: &mut World<F>) -> Outcome {
    let retrying = ConnectParams { rnr_retry: 2, ..ConnectParams::default() };
    let (c, s) = w.connect_with(&ConnectParams::default(), &retrying)?;
    w.client.send_now(c, 1, b"no Receive")?;
    let status = w.client_done(c, Opcode::Send)?.status;
    ensure!(status == Status::RnrRetryExceeded || !w.acknowledges(), "status: {status:?}");
    w.wait_both_disconnected(c, s)
}

fn waits_for_receive<F: Fabric>(w: &mut World<F>) -> Outcome {
    let retrying = ConnectParams { rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY, ..ConnectParams::default() };
    let (c, s) = w.connect_with(&retrying, &retrying)?;
    let sends = [w.client.send(1, b"one")?, w.client.send(2, b"two")?];
    w.client.post(c, sends)?;
    w.idle();
    let completions = &w.client.completions;
    ensure!(completions.is_empty() || !w.acknowledges(), "a Send waits for a Receive: {completions:?}");
    ensure!(w.client.events.is_empty() && w.server.events.is_empty(), "a waiting connection stays established");
    w.server.post_receives(None, 2)?;
    expect_eq("first", bytes(&w.server_done(s, Opcode::Recv)?)?, b"one")?;
    expect_eq("second", bytes(&w.server_done(s, Opcode::Recv)?)?, b"two")?;
    expect_eq("first", w.client_done(c, Opcode::Send)?.wr_id, 1)?;
    expect_eq("second", w.client_done(c, Opcode::Send)?.wr_id, 2)?;
    ensure!(w.server.fabric.stats().receiver_not_ready > 0, "receiver_not_ready is counted");
    Ok(())
}

fn queue_full<F: Fabric>(w: &mut World<F>) -> Outcome {
    let shallow = ConnectParams { send_queue_depth: 8, ..ConnectParams::default() };
    let retrying = ConnectParams { rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY, ..ConnectParams::default() };
    let (c, s) = w.connect_with(&shallow, &retrying)?;
    let mut chain = Vec::new();
    for i in 0..40 {
        chain.push(w.client.send(i, b"fill")?);
    }
    let result = w.client.fabric.post_send(c, &mut chain);
    expect_eq("result", result, Err(PostError::QueueFull))?;
    let posted = 40 - chain.len();
    ensure!((8..40).contains(&posted), "a queue of 8 took {posted} of 40");
    expect_eq("first refused request", chain.first().map(|p| p.wr_id), Some(posted as u64))?;
    w.server.post_receives(None, 40)?;
    w.until("the rest is posted", |w| {
        let _ = w.client.fabric.post_send(c, &mut chain);
        chain.is_empty().then_some(())
    })?;
    for i in 0..40 {
        bytes(&w.server_done(s, Opcode::Recv)?)?;
        expect_eq("completion", w.client_done(c, Opcode::Send)?.wr_id, i)?;
    }
    Ok(())
}

fn both_directions<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 64)?;
    w.client.post_receives(None, 64)?;
    for i in 0..64 {
        let to_server = w.client.quiet_send(0, &pattern(i, 300))?;
        let to_client = w.server.quiet_send(0, &pattern(i + 1000, 500))?;
        w.client.post(c, [to_server])?;
        w.server.post(s, [to_client])?;
    }
    for i in 0..64 {
        expect_eq("to the server", bytes(&w.server_done(s, Opcode::Recv)?)?, &pattern(i, 300)[..])?;
        expect_eq("to the client", bytes(&w.client_done(c, Opcode::Recv)?)?, &pattern(i + 1000, 500)[..])?;
    }
    Ok(())
}

fn foreign_memory<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, _) = w.connect()?;
    ensure!(
        w.client.fabric.register(w.client.pool.arena(), Access::LOCAL).is_err(),
        "a registered arena cannot be registered again"
    );
    let foreign = Pool::new(&PoolConfig {
        classes: vec![Class { size: RECEIVE_SIZE, count: 2 }],
        arena: ArenaConfig { pages: PagePolicy::Small, ..ArenaConfig::default() },
    });
    let foreign = foreign.map_err(|e| e.to_string())?;
    ensure!(w.client.fabric.deregister(foreign.arena().id()).is_err(), "an unregistered arena cannot be deregistered");
    let buf = foreign.alloc(10).ok_or("empty")?;
    let send = Posting { wr_id: 1, signaled: true, wr: WorkRequest::Send { buf, invalidate: None, fence: false } };
    let (left, error) = w.client.post_refused(c, send)?;
    ensure!(matches!(error, PostError::Invalid(_)), "{error:?}");
    drop(left);
    let mut bufs: Vec<Buf> = foreign.alloc(10).into_iter().collect();
    expect_eq("Receives taken", w.client.fabric.post_recv(None, &mut bufs), 0)?;
    bufs.clear();
    foreign.close().map_err(|e| e.to_string())
}

/// Lets the client post a request with immediate data, which must end its connection and deliver no message.
///
/// The consumed Receive is empty, although its buffer has data of another client. The other client's connection
/// continues.
fn expect_immediate_refused<F: Fabric>(w: &mut World<F>, (c, s): (QpId, QpId), posting: Posting) -> Outcome {
    let (other, other_at_server) = w.connect()?;
    w.server.post_receives(None, 1)?;
    w.client.send_now(other, 1, &pattern(5, 300))?;
    let got = w.server_done(other_at_server, Opcode::Recv)?;
    expect_eq("message", bytes(&got)?, &pattern(5, 300)[..])?;
    // The reposted buffer still has the other client's data.
    w.server.repost(got)?;
    if !w.client.fabric.post_immediate(c, posting, 7) {
        // The software fabric's rings have no such records.
        w.missing = Some("the fabric has no work requests with immediate data");
        return Ok(());
    }
    let got = w.server_done(s, Opcode::Recv)?;
    expect_eq("status", got.status, Status::RemoteInvalidRequest)?;
    expect_eq("bytes of the Receive", got.buf.as_deref(), Some(&[][..]))?;
    w.wait_both_disconnected(c, s)?;
    expect_eq("counted violations", w.server.fabric.stats().peer_violations, 1)?;
    w.server.repost(got)?;
    w.client.send_now(other, 2, &pattern(6, 300))?;
    expect_eq(
        "message of the other client",
        bytes(&w.server_done(other_at_server, Opcode::Recv)?)?,
        &pattern(6, 300)[..],
    )
}

fn send_with_immediate<F: Fabric>(w: &mut World<F>) -> Outcome {
    let pair = w.connect()?;
    let posting = w.client.send(3, &pattern(1, 200))?;
    expect_immediate_refused(w, pair, posting)
}

fn write_with_immediate<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let place = w.server.lent(&[0; 300])?;
    let (_, remote) = w.server.expose(s, &place, Access::REMOTE_WRITE)?;
    w.idle();
    let src = Source::Lent(w.client.lent(&pattern(1, 300))?);
    let wr = WorkRequest::Write { src, offset: 0, len: 300, remote };
    expect_immediate_refused(w, (c, s), Posting { wr_id: 3, signaled: true, wr })
}

fn empty_write_with_immediate<F: Fabric>(w: &mut World<F>) -> Outcome {
    let pair = w.connect()?;
    let src = Source::Lent(w.client.lent(&[0; 8])?);
    // An empty Write needs no key.
    let remote = RemoteMemory { rkey: 0, address: 0 };
    let wr = WorkRequest::Write { src, offset: 0, len: 0, remote };
    expect_immediate_refused(w, pair, Posting { wr_id: 3, signaled: true, wr })
}
