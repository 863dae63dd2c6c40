//! Cases about connection setup, teardown and sleep.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

/// The case whose server leaves messages unpolled after the peer's disconnect.
pub(super) const LEAVES_MESSAGES_UNPOLLED: &str = "the end of a connection is reported after its last message";

pub(super) fn cases<F: Fabric>() -> Vec<Case<F>> {
    vec![
        Case { name: "private data travels both ways", check: private_data },
        Case { name: "a rejected connection has the reason", check: rejected },
        Case { name: "a disconnect is reported at both ends", check: disconnect },
        Case { name: "an early disconnect, before the client polls the answer, is reported", check: disconnect_early },
        Case { name: "messages sent before a disconnect arrive", check: sent_before_disconnect },
        Case { name: LEAVES_MESSAGES_UNPOLLED, check: end_after_messages },
        Case { name: "a disconnect flushes in order and returns memory", check: flush_order },
        Case { name: "a destroyed queue pair completes no request twice", check: destroy_with_work },
        Case { name: "a stale queue pair is refused", check: stale },
        Case { name: "a queue pair in error flushes posted requests", check: post_in_error },
        Case { name: "nothing can be posted before the connection is established", check: not_connected },
        Case { name: "many connections each receive their own messages", check: many },
        Case { name: "connections end in either order", check: end_in_either_order },
        Case { name: "an address is bound once", check: in_use },
        Case { name: "a connect to an address without a listener fails", check: unreachable },
        Case { name: "unlisten refuses new connections and keeps established ones", check: unlisten },
        Case { name: "a sleeper wakes for a message", check: wakes_for_message },
        Case { name: "a sleeper wakes for a completion", check: wakes_for_completion },
        Case {
            name: "a sleeper wakes for a connect request, and for the end of a connection",
            check: wakes_for_events,
        },
        Case {
            name: "a sleeper wakes for its waker in another thread, and after the time-out",
            check: wakes_for_waker,
        },
    ]
}

fn private_data<F: Fabric>(w: &mut World<F>) -> Outcome {
    let request_data = vec![1; w.client.fabric.capabilities().max_connect_private_data.min(56)];
    let answer_data = vec![2; w.server.fabric.capabilities().max_accept_private_data.min(196)];
    let params = ConnectParams { private_data: request_data.clone(), ..ConnectParams::default() };
    let c = w.start_connect(&params)?;
    let (request, got) = w.wait_request()?;
    expect_eq("data of the request", &got[..request_data.len().min(got.len())], &request_data[..])?;
    let params = ConnectParams { private_data: answer_data.clone(), ..ConnectParams::default() };
    let s = w.accept(request, &params)?;
    let got = w.wait_established(c, s)?;
    expect_eq("data of the answer", &got[..answer_data.len().min(got.len())], &answer_data[..])
}

fn rejected<F: Fabric>(w: &mut World<F>) -> Outcome {
    let c = w.start_connect(&ConnectParams::default())?;
    let (request, _) = w.wait_request()?;
    w.server.fabric.reject(request, b"full");
    let reason = w.until("the client is rejected", |w| {
        w.client.events.iter().find_map(|e| match e {
            ControlEvent::Rejected { qp, private_data } if *qp == c => Some(private_data.clone()),
            _ => None,
        })
    })?;
    expect_eq("reason", reason.get(..4), Some(&b"full"[..]))
}

fn disconnect<F: Fabric>(w: &mut World<F>) -> Outcome {
    for by_client in [true, false] {
        let (c, s) = w.connect()?;
        if by_client {
            w.client.fabric.disconnect(c);
        } else {
            w.server.fabric.disconnect(s);
        }
        w.wait_both_disconnected(c, s)?;
        w.client.fabric.destroy_qp(c);
        w.server.fabric.destroy_qp(s);
    }
    Ok(())
}

fn disconnect_early<F: Fabric>(w: &mut World<F>) -> Outcome {
    let params = ConnectParams::default();
    let c = w.start_connect(&params)?;
    let (request, _) = w.wait_request()?;
    let s = w.accept(request, &params)?;
    // The answer has arrived, but the client has not polled it.
    w.client.fabric.disconnect(c);
    w.until("the client gets an event for the end", |w| {
        let is_end = |e: &ControlEvent| match e {
            ControlEvent::ConnectFailed { qp, .. } | ControlEvent::Disconnected { qp, .. } => *qp == c,
            _ => false,
        };
        w.client.events.iter().any(is_end).then_some(())
    })?;
    w.wait_server_disconnected(s)
}

fn sent_before_disconnect<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 8)?;
    let sends: Result<Vec<_>, _> = (0..8).map(|i| w.client.send(i, &[i as u8; 100])).collect();
    w.client.post(c, sends?)?;
    w.until("the messages arrive", |w| {
        w.server.turn();
        (w.server.completions.len() == 8).then_some(())
    })?;
    w.client.fabric.disconnect(c);
    for i in 0..8 {
        expect_eq("message", bytes(&w.server_done(s, Opcode::Recv)?)?, &[i as u8; 100][..])?;
        let sent = w.client_done(c, Opcode::Send)?;
        expect_eq("completion", (sent.wr_id, sent.status), (i, Status::Success))?;
    }
    w.wait_both_disconnected(c, s)
}

fn end_after_messages<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 4)?;
    let sends: Result<Vec<_>, _> = (0..4).map(|i| w.client.quiet_send(i, &[i as u8; 300])).collect();
    w.client.post(c, sends?)?;
    w.client.fabric.disconnect(c);
    // The server stands for a busy one, which polls completions late, and control events before them.
    for _ in 0..IDLE_TURNS {
        w.client.turn();
        w.server.fabric.poll_control(&mut w.server.events);
    }
    ensure!(take_disconnected(&mut w.server.events, s).is_none(), "the end is reported after the messages");
    for i in 0..4 {
        expect_eq("message", bytes(&w.server_done(s, Opcode::Recv)?)?, &[i as u8; 300][..])?;
    }
    w.wait_server_disconnected(s)
}

fn flush_order<F: Fabric>(w: &mut World<F>) -> Outcome {
    let retrying = ConnectParams { rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY, ..ConnectParams::default() };
    let (c, s) = w.connect_with(&retrying, &retrying)?;
    let sends: Result<Vec<_>, _> = (0..20).map(|i| w.client.quiet_send(i, &[0; 4000])).collect();
    w.client.post(c, sends?)?;
    w.server.fabric.destroy_qp(s);
    if !w.acknowledges() {
        // Without acknowledgements, the Sends completed when they left.
        return w.wait_client_disconnected(c);
    }
    for i in 0..20 {
        let ended = w.client_done(c, Opcode::Send)?;
        ensure!(!ended.status.is_ok(), "{ended:?}");
        expect_eq("order", ended.wr_id, i)?;
    }
    w.wait_client_disconnected(c)
}

fn destroy_with_work<F: Fabric>(w: &mut World<F>) -> Outcome {
    let own = ConnectParams {
        own_receive_queue: Some(16),
        rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY,
        ..ConnectParams::default()
    };
    let (c, s) = w.connect_with(&own, &own)?;
    w.client.post_receives(Some(c), 16)?;
    let sends: Result<Vec<_>, _> = (0..10).map(|i| w.client.send(i, &[0; 2000])).collect();
    w.client.post(c, sends?)?;
    w.client.fabric.destroy_qp(c);
    w.turn();
    let (mut sends, mut receives) = (0, 0);
    for done in w.client.completions.drain(..) {
        ensure!(done.qp == c, "{done:?}");
        match done.opcode {
            Opcode::Recv => receives += 1,
            _ => sends += 1,
        }
    }
    ensure!(sends <= 10 && receives <= 16, "at most 10 Sends and 16 Receives complete, not {sends} and {receives}");
    w.wait_server_disconnected(s)
}

fn stale<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.client.fabric.destroy_qp(c);
    w.wait_server_disconnected(s)?;
    let (c2, s2) = w.connect()?;
    ensure!(c2 != c, "each queue pair has a new identifier");
    let send = w.client.send(1, b"old")?;
    let (left, error) = w.client.post_refused(c, send)?;
    expect_eq("error", error, PostError::NotConnected)?;
    drop(left);
    ensure!(w.client.fabric.alloc_window(c).is_err(), "a destroyed queue pair gets no window");
    w.client.fabric.disconnect(c);
    w.client.fabric.destroy_qp(c);
    w.server.post_receives(None, 1)?;
    w.client.send_now(c2, 2, b"new")?;
    expect_eq("message", bytes(&w.server_done(s2, Opcode::Recv)?)?, b"new")
}

fn post_in_error<F: Fabric>(w: &mut World<F>) -> Outcome {
    let own = ConnectParams { own_receive_queue: Some(4), ..ConnectParams::default() };
    let (c, s) = w.connect_with(&own, &own)?;
    w.server.fabric.disconnect(s);
    w.wait_client_disconnected(c)?;
    w.client.send_now(c, 5, b"late")?;
    let ended = w.client_done(c, Opcode::Send)?;
    expect_eq("Send", (ended.wr_id, ended.status), (5, Status::Flushed))?;
    w.client.post_receives(Some(c), 1)?;
    let ended = w.client_done(c, Opcode::Recv)?;
    ensure!(ended.status == Status::Flushed && ended.buf.is_some(), "{ended:?}");
    Ok(())
}

fn not_connected<F: Fabric>(w: &mut World<F>) -> Outcome {
    let own = ConnectParams { own_receive_queue: Some(4), ..ConnectParams::default() };
    let c = w.start_connect(&own)?;
    let send = w.client.send(1, b"early")?;
    let (left, error) = w.client.post_refused(c, send)?;
    expect_eq("error", error, PostError::NotConnected)?;
    drop(left);
    // Receives and windows may precede the connection.
    w.client.post_receives(Some(c), 1)?;
    w.client.fabric.alloc_window(c).map_err(|e| e.to_string())?;
    let (request, _) = w.wait_request()?;
    let s = w.accept(request, &ConnectParams::default())?;
    w.wait_established(c, s)?;
    w.server.send_now(s, 2, b"hello")?;
    expect_eq("message", bytes(&w.client_done(c, Opcode::Recv)?)?, b"hello")
}

fn many<F: Fabric>(w: &mut World<F>) -> Outcome {
    let pairs: Result<Vec<_>, _> = (0..40).map(|_| w.connect()).collect();
    let pairs = pairs?;
    for round in 0..3u8 {
        // Idle periods let the fabric's idle handling run.
        w.idle();
        w.server.post_receives(None, pairs.len())?;
        for (i, (c, _)) in pairs.iter().enumerate() {
            w.client.send_now(*c, i as u64, &[i as u8, round])?;
        }
        for (i, (c, s)) in pairs.iter().enumerate() {
            expect_eq("message", bytes(&w.server_done(*s, Opcode::Recv)?)?, &[i as u8, round][..])?;
            expect_eq("completion", w.client_done(*c, Opcode::Send)?.wr_id, i as u64)?;
        }
    }
    Ok(())
}

fn end_in_either_order<F: Fabric>(w: &mut World<F>) -> Outcome {
    for i in 0..30u64 {
        let (c, s) = w.connect()?;
        w.server.post_receives(None, 1)?;
        w.client.send_now(c, i, b"visit")?;
        bytes(&w.server_done(s, Opcode::Recv)?)?;
        if i % 2 == 0 {
            w.client.fabric.destroy_qp(c);
            w.wait_server_disconnected(s)?;
            w.server.fabric.destroy_qp(s);
        } else {
            w.server.fabric.destroy_qp(s);
            w.wait_client_disconnected(c)?;
            w.client.fabric.destroy_qp(c);
        }
    }
    Ok(())
}

fn in_use<F: Fabric>(w: &mut World<F>) -> Outcome {
    match F::bind(&w.address) {
        Err(error) if error.kind() == FabricErrorKind::AddressInUse => Ok(()),
        Err(other) => Err(format!("another error: {other}")),
        Ok(_) => Err("an address in use can be bound".to_owned()),
    }
}

fn unreachable<F: Fabric>(w: &mut World<F>) -> Outcome {
    let nowhere = w.nowhere.clone();
    match w.client.fabric.connect(&nowhere, &ConnectParams::default()) {
        Err(error) if error.kind() == FabricErrorKind::Unreachable => Ok(()),
        Err(other) => Err(format!("another error: {other}")),
        Ok(qp) => {
            w.client.qps.push(qp);
            w.until("the connect fails", |w| {
                w.client
                    .events
                    .iter()
                    .any(|e| matches!(e, ControlEvent::ConnectFailed { qp: id, .. } if *id == qp))
                    .then_some(())
            })
        }
    }
}

fn unlisten<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.fabric.unlisten();
    if let Ok(qp) = w.client.fabric.connect(&w.address, &ConnectParams::default()) {
        w.client.qps.push(qp);
    }
    w.idle();
    ensure!(
        !w.server.events.iter().any(|e| matches!(e, ControlEvent::ConnectRequest { .. })),
        "no connect request arrives after unlisten"
    );
    w.server.post_receives(None, 1)?;
    w.client.send_now(c, 1, b"still here")?;
    expect_eq("message", bytes(&w.server_done(s, Opcode::Recv)?)?, b"still here")
}

/// Arms the server, checks that no completion is ready, runs `act`, and waits. Returns the duration of the wait.
fn sleep_after<F: Fabric>(w: &mut World<F>, act: impl FnOnce(&mut World<F>) -> Outcome) -> Result<Duration, String> {
    w.server.fabric.arm();
    let n = w.server.fabric.poll_cq(&mut w.server.completions, 64);
    expect_eq("completions before the sleep", n, 0)?;
    act(w)?;
    let start = Instant::now();
    w.server.fabric.wait(Some(TIMEOUT));
    Ok(start.elapsed())
}

/// Returns an error text if a sleep lasted until its time-out.
fn expect_woken(slept: Duration) -> Outcome {
    ensure!(slept < TIMEOUT, "the sleeper wakes before its time-out");
    Ok(())
}

/// True if an armed fabric would not sleep. A fabric whose `longest_wait` is zero never sleeps.
fn would_wake<F: Fabric>(fabric: &F) -> bool {
    if fabric.longest_wait() == Some(Duration::ZERO) {
        return true;
    }
    let descriptor = fabric.descriptor();
    let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&no_wait)).is_ok_and(|ready| ready > 0)
}

fn wakes_for_message<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.server.post_receives(None, 40)?;
    w.idle();
    for i in 0..20u64 {
        let send = w.client.quiet_send(i, b"wake up")?;
        let slept = sleep_after(w, |w| w.client.post(c, [send]))?;
        expect_woken(slept)?;
        bytes(&w.server_done(s, Opcode::Recv)?)?;
        // The server polls for this message, without a sleep.
        w.client.send_quietly(c, i, b"awake")?;
        bytes(&w.server_done(s, Opcode::Recv)?)?;
    }
    Ok(())
}

fn wakes_for_completion<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let send = w.server.send(1, b"for the client")?;
    w.client.post_receives(None, 1)?;
    w.idle();
    w.server.post(s, [send])?;
    w.server.fabric.arm();
    w.server.fabric.poll_cq(&mut w.server.completions, 64);
    let mut got = Vec::new();
    let start = Instant::now();
    while w.client.take(c, Opcode::Recv).is_none() {
        ensure!(start.elapsed() < TIMEOUT, "the message arrives within the time-out");
        w.client.turn();
    }
    // The client has no more work and only polls.
    for _ in 0..IDLE_TURNS {
        w.client.fabric.poll_cq(&mut got, 64);
    }
    // Some devices complete the Send without polls of the client, and may have done so already.
    if w.server.completions.is_empty() {
        let start = Instant::now();
        w.server.fabric.wait(Some(TIMEOUT));
        expect_woken(start.elapsed())?;
    }
    expect_eq("completion", w.server_done(s, Opcode::Send)?.wr_id, 1)
}

fn wakes_for_events<F: Fabric>(w: &mut World<F>) -> Outcome {
    let mut connecting = None;
    let slept = sleep_after(w, |w| {
        connecting = Some(w.client.fabric.connect(&w.address, &ConnectParams::default()).map_err(|e| e.to_string())?);
        // Some fabrics need several turns before the server sees the request.
        let start = Instant::now();
        while !would_wake(&w.server.fabric) {
            ensure!(start.elapsed() < TIMEOUT, "the request wakes the server");
            w.client.turn();
        }
        Ok(())
    })?;
    expect_woken(slept)?;
    let c = connecting.ok_or("the client did not connect")?;
    w.client.qps.push(c);
    let (request, _) = w.wait_request()?;
    let s = w.accept(request, &ConnectParams::default())?;
    w.wait_established(c, s)?;
    let slept = sleep_after(w, |w| {
        w.client.fabric.destroy_qp(c);
        Ok(())
    })?;
    expect_woken(slept)?;
    w.wait_server_disconnected(s)
}

fn wakes_for_waker<F: Fabric>(w: &mut World<F>) -> Outcome {
    let waker = w.server.fabric.waker();
    let slept = sleep_after(w, |_| {
        waker.wake();
        Ok(())
    })?;
    expect_woken(slept)?;
    let thread = std::thread::spawn({
        let waker = waker.clone();
        move || {
            std::thread::sleep(Duration::from_millis(20));
            waker.wake();
        }
    });
    let slept = sleep_after(w, |_| Ok(()))?;
    thread.join().map_err(|_| "the thread panicked")?;
    expect_woken(slept)?;
    // Without a wake-up, `wait` returns after the time-out.
    w.server.fabric.arm();
    w.server.fabric.wait(Some(Duration::from_millis(1)));
    Ok(())
}
