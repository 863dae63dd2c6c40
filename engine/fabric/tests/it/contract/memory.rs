//! Cases about RDMA Reads, RDMA Writes and memory windows.

use super::*;
use rpcrdma_fabric::Source;

pub(super) fn cases<F: Fabric>() -> Vec<Case<F>> {
    vec![
        Case { name: "a Write is visible before the Send after it", check: write_then_send },
        Case { name: "a Write of shared immutable memory arrives", check: write_frozen },
        Case { name: "a Read returns data of an earlier Write", check: read_after_write },
        Case { name: "a long Write and a long Read arrive complete", check: long_transfers },
        Case { name: "a window exposes part of a buffer and no more", check: part_of_buffer },
        Case { name: "a key is stale after a local invalidation", check: local_invalidation },
        Case { name: "Send With Invalidate revokes, and its completion has the key", check: remote_invalidation },
        Case { name: "a window bound again has a new key, the old one is stale", check: rebound },
        Case { name: "a Write past the end of a window is refused", check: write_bounds },
        Case { name: "a Read past the end of a window is refused", check: read_bounds },
        Case { name: "a Write needs the right to write", check: write_rights },
        Case { name: "a Read needs the right to read", check: read_rights },
        Case { name: "an unknown key is refused", check: no_such_key },
        Case { name: "a key works on its own connection only", check: other_connection },
        Case { name: "a key of another connection invalidates nothing", check: invalidate_of_another },
        Case { name: "invalidating an unbound key ends the connection", check: invalidate_nothing },
        Case { name: "windows are limited, and bind only memory that may be exposed", check: bind_checks },
        Case { name: "exposed memory is returned when its queue pair is destroyed", check: exposed_then_destroyed },
    ]
}

fn write_request<F: Fabric>(w: &World<F>, contents: &[u8], remote: RemoteMemory) -> Result<Posting, String> {
    let src = Source::Lent(w.server.lent(contents)?);
    let wr = WorkRequest::Write { src, offset: 0, len: contents.len(), remote };
    Ok(Posting { wr_id: 0x33, signaled: true, wr })
}

fn write_now<F: Fabric>(w: &mut World<F>, s: QpId, contents: &[u8], remote: RemoteMemory) -> Outcome {
    let write = write_request(w, contents, remote)?;
    w.server.post(s, [write])
}

/// Connects, and exposes memory of the client. Returns both queue pairs, the memory and its remote address.
fn connect_and_expose<F: Fabric>(
    w: &mut World<F>,
    contents: &[u8],
    access: Access,
) -> Result<(QpId, QpId, Lent, RemoteMemory), String> {
    let (c, s) = w.connect()?;
    let place = w.client.lent(contents)?;
    let (_, remote) = w.client.expose(c, &place, access)?;
    Ok((c, s, place, remote))
}

fn read_request(dst: &Lent, len: usize, remote: RemoteMemory) -> Posting {
    Posting { wr_id: 0x44, signaled: true, wr: WorkRequest::Read { dst: dst.clone(), offset: 0, len, remote } }
}

fn contents(lent: &Lent) -> Result<Vec<u8>, String> {
    let mut to = vec![0; lent.len()];
    ensure!(lent.read_at(0, &mut to), "lent memory cannot be read");
    Ok(to)
}

/// Expects these bytes at `from`. Without acknowledgements, they may arrive soon after the completion of the Write.
fn expect_memory<F: Fabric>(w: &mut World<F>, place: &Lent, from: usize, expected: &[u8]) -> Outcome {
    let part = |place: &Lent| contents(place).map(|all| all[from..from + expected.len()].to_vec());
    if w.acknowledges() {
        return expect_eq("memory", &part(place)?[..], expected);
    }
    w.until("the memory changes", |_| part(place).is_ok_and(|part| part == expected).then_some(()))
}

fn offset_by(remote: RemoteMemory, by: u64) -> RemoteMemory {
    RemoteMemory { address: remote.address + by, ..remote }
}

fn invalidate_request(window: WindowId) -> Posting {
    Posting { wr_id: 0x55, signaled: true, wr: WorkRequest::LocalInvalidate { window } }
}

/// Marks the case as skipped, and returns true, if the device does not check the bounds of windows.
fn skip_without_bounds<F: Fabric>(w: &mut World<F>) -> bool {
    if !w.client.fabric.capabilities().checks_window_bounds {
        w.missing = Some("the device does not check the bounds of windows");
    }
    w.missing.is_some()
}

/// Expects the posted request and the connection to end with `RemoteAccess`.
fn expect_refused<F: Fabric>(w: &mut World<F>, c: QpId, s: QpId, opcode: Opcode) -> Outcome {
    let status = w.server_done(s, opcode)?.status;
    // Without acknowledgements, a Write completes successfully once it is sent.
    let completed_early = !w.acknowledges() && opcode == Opcode::Write && status == Status::Success;
    ensure!(status == Status::RemoteAccess || completed_early, "status: {status:?}");
    w.until("the refusal is counted", |w| {
        (w.server.fabric.stats().access_refused + w.client.fabric.stats().access_refused > 0).then_some(())
    })?;
    w.wait_both_disconnected(c, s)
}

fn write_then_send<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.client.post_receives(None, 1)?;
    let place = w.client.lent(&[0; 3000])?;
    let (_, remote) = w.client.expose(c, &place, Access::REMOTE_WRITE)?;
    let chain = [write_request(w, &[0xab; 3000], remote)?, w.server.quiet_send(1, b"written")?];
    w.server.post(s, chain)?;
    expect_eq("message", bytes(&w.client_done(c, Opcode::Recv)?)?, b"written")?;
    expect_eq("memory", contents(&place)?, vec![0xab; 3000])?;
    let done = w.server_done(s, Opcode::Write)?;
    expect_eq("completion", (done.wr_id, done.status), (0x33, Status::Success))
}

fn write_frozen<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (_, s, place, remote) = connect_and_expose(w, &[0; 100], Access::REMOTE_WRITE)?;
    let shared = w.server.message(b"0123456789")?.freeze();
    let half = |offset: usize, remote| {
        let wr = WorkRequest::Write { src: Source::Frozen(shared.clone()), offset, len: 5, remote };
        Posting { wr_id: 1, signaled: true, wr }
    };
    w.server.post(s, [half(5, remote), half(0, offset_by(remote, 5))])?;
    expect_eq("first", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    expect_eq("second", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    expect_memory(w, &place, 0, b"5678901234\0\0")
}

fn read_after_write<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (_, s, _place, remote) = connect_and_expose(w, &[1; 500], Access::REMOTE)?;
    let to = w.server.lent(&[0; 500])?;
    let chain = [write_request(w, &[2; 250], remote)?, read_request(&to, 500, remote)];
    w.server.post(s, chain)?;
    expect_eq("Write", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    expect_eq("Read", w.server_done(s, Opcode::Read)?.status, Status::Success)?;
    let got = contents(&to)?;
    expect_eq("written half", &got[..250], &[2; 250][..])?;
    expect_eq("other half", &got[250..], &[1; 250][..])
}

fn long_transfers<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let len = 3 << 20;
    let pattern: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    let place = w.client.lent(&vec![0; len])?;
    let (_, remote) = w.client.expose(c, &place, Access::REMOTE)?;
    w.client.post_receives(None, 1)?;
    let chain = [write_request(w, &pattern, remote)?, w.server.send(9, b"behind")?];
    w.server.post(s, chain)?;
    expect_eq("message", bytes(&w.client_done(c, Opcode::Recv)?)?, b"behind")?;
    ensure!(contents(&place)? == pattern, "the Write arrives unchanged");
    expect_eq("Write", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    expect_eq("Send", w.server_done(s, Opcode::Send)?.status, Status::Success)?;
    let to = w.server.lent(&vec![0; len])?;
    w.server.post(s, [read_request(&to, len, remote)])?;
    expect_eq("Read", w.server_done(s, Opcode::Read)?.status, Status::Success)?;
    ensure!(contents(&to)? == pattern, "the Read arrives unchanged");
    Ok(())
}

fn part_of_buffer<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let mem = w.client.lent(&[1; 1000])?;
    let window = w.client.fabric.alloc_window(c).map_err(|e| e.to_string())?;
    let rkey = w.client.fabric.next_rkey(window);
    let remote = RemoteMemory { rkey, address: w.client.fabric.remote_address(&mem, 100) };
    let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 100, len: 50, access: Access::REMOTE };
    w.client.post(c, [Posting { wr_id: 5, signaled: true, wr }])?;
    let bound = w.client_done(c, Opcode::Bind)?;
    expect_eq("bind", (bound.wr_id, bound.status), (5, Status::Success))?;
    write_now(w, s, &[2; 50], remote)?;
    expect_eq("inside", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    expect_memory(w, &mem, 99, &[[1].as_slice(), &[2; 50], &[1]].concat())?;
    if skip_without_bounds(w) {
        return Ok(());
    }
    write_now(w, s, &[3; 1], RemoteMemory { address: remote.address - 1, ..remote })?;
    expect_refused(w, c, s, Opcode::Write)
}

fn local_invalidation<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let place = w.client.lent(&[0; 64])?;
    let (window, remote) = w.client.expose(c, &place, Access::REMOTE)?;
    w.client.post(c, [invalidate_request(window)])?;
    let done = w.client_done(c, Opcode::LocalInvalidate)?;
    expect_eq("completion", (done.wr_id, done.status), (0x55, Status::Success))?;
    ensure!(place.reclaim().is_ok(), "the fabric has returned the memory");
    write_now(w, s, &[1; 64], remote)?;
    expect_refused(w, c, s, Opcode::Write)
}

fn remote_invalidation<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.client.post_receives(None, 2)?;
    let place = w.client.lent(&[0; 64])?;
    let (window, remote) = w.client.expose(c, &place, Access::REMOTE_WRITE)?;
    let wr = WorkRequest::Send { buf: w.server.message(b"done")?, invalidate: Some(remote.rkey), fence: true };
    let chain = [write_request(w, &[9; 64], remote)?, Posting { wr_id: 2, signaled: true, wr }];
    w.server.post(s, chain)?;
    let got = w.client_done(c, Opcode::Recv)?;
    expect_eq("message", bytes(&got)?, b"done")?;
    expect_eq("invalidated", got.invalidated, Some(remote.rkey))?;
    expect_eq("memory", contents(&place)?, vec![9; 64])?;
    expect_eq("Send", w.server_done(s, Opcode::Send)?.status, Status::Success)?;
    let place = place.reclaim().map_err(|_| "the fabric has not returned the memory")?;
    // The window is free, so a new bind needs no local invalidation.
    let place = place.lend().map_err(|_| "lend")?;
    let again = w.client.rebind(c, window, &place, Access::REMOTE)?;
    ensure!(again.rkey != remote.rkey, "a new bind has a new key");
    write_now(w, s, &[8; 64], again)?;
    while !w.server.completions.is_empty() {
        w.server.completions.clear();
    }
    w.until("the memory changes", |_| contents(&place).ok().filter(|c| c == &[8; 64]).map(|_| ()))
}

fn rebound<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    let place = w.client.lent(&[0; 64])?;
    let (window, first) = w.client.expose(c, &place, Access::REMOTE)?;
    w.client.post(c, [invalidate_request(window)])?;
    expect_eq("invalidated", w.client_done(c, Opcode::LocalInvalidate)?.status, Status::Success)?;
    let second = w.client.rebind(c, window, &place, Access::REMOTE)?;
    ensure!(first.rkey != second.rkey, "a new bind has a new key");
    write_now(w, s, &[1; 64], second)?;
    expect_eq("new key", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    write_now(w, s, &[2; 64], first)?;
    expect_refused(w, c, s, Opcode::Write)?;
    expect_eq("memory", contents(&place)?, vec![1; 64])
}

fn write_bounds<F: Fabric>(w: &mut World<F>) -> Outcome {
    if skip_without_bounds(w) {
        return Ok(());
    }
    let (c, s, place, remote) = connect_and_expose(w, &[0; 64], Access::REMOTE)?;
    write_now(w, s, &[1; 64], offset_by(remote, 1))?;
    expect_refused(w, c, s, Opcode::Write)?;
    expect_eq("memory", contents(&place)?, vec![0; 64])
}

fn read_bounds<F: Fabric>(w: &mut World<F>) -> Outcome {
    if skip_without_bounds(w) {
        return Ok(());
    }
    let (c, s, _place, remote) = connect_and_expose(w, &[0; 64], Access::REMOTE)?;
    let to = w.server.lent(&[0; 100])?;
    w.server.post(s, [read_request(&to, 65, remote)])?;
    expect_refused(w, c, s, Opcode::Read)
}

fn write_rights<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s, place, remote) = connect_and_expose(w, &[0; 64], Access::REMOTE_READ)?;
    write_now(w, s, &[1; 64], remote)?;
    expect_refused(w, c, s, Opcode::Write)?;
    expect_eq("memory", contents(&place)?, vec![0; 64])
}

fn read_rights<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s, _place, remote) = connect_and_expose(w, &[5; 64], Access::REMOTE_WRITE)?;
    let to = w.server.lent(&[0; 64])?;
    w.server.post(s, [read_request(&to, 64, remote)])?;
    expect_refused(w, c, s, Opcode::Read)?;
    expect_eq("memory", contents(&to)?, vec![0; 64])
}

fn no_such_key<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s, _place, remote) = connect_and_expose(w, &[0; 64], Access::REMOTE)?;
    write_now(w, s, &[1; 64], RemoteMemory { rkey: remote.rkey ^ 0x8000_0000, ..remote })?;
    expect_refused(w, c, s, Opcode::Write)
}

fn other_connection<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c1, s1) = w.connect()?;
    let (c2, s2) = w.connect()?;
    let place = w.client.lent(&[0; 64])?;
    let (_, remote) = w.client.expose(c1, &place, Access::REMOTE)?;
    write_now(w, s2, &[1; 64], remote)?;
    expect_refused(w, c2, s2, Opcode::Write)?;
    write_now(w, s1, &[2; 64], remote)?;
    expect_eq("Write on its own connection", w.server_done(s1, Opcode::Write)?.status, Status::Success)?;
    expect_memory(w, &place, 0, &[2; 64])
}

fn invalidate_nothing<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s) = w.connect()?;
    w.client.post_receives(None, 1)?;
    let wr = WorkRequest::Send { buf: w.server.message(b"?")?, invalidate: Some(0xdead_0100), fence: false };
    w.server.post(s, [Posting { wr_id: 3, signaled: true, wr }])?;
    w.wait_both_disconnected(c, s)?;
    let got = w.client_done(c, Opcode::Recv)?;
    ensure!(!got.status.is_ok() && got.buf.is_some(), "{got:?}");
    Ok(())
}

fn invalidate_of_another<F: Fabric>(w: &mut World<F>) -> Outcome {
    // Soft-RoCE checks neither bounds nor the owner of a window.
    if !w.client.fabric.capabilities().checks_window_bounds {
        w.missing = Some("the device does not check whose windows are invalidated");
        return Ok(());
    }
    let (c1, s1) = w.connect()?;
    let (c2, s2) = w.connect()?;
    w.client.post_receives(None, 1)?;
    let place = w.client.lent(&[0; 64])?;
    let (_, remote) = w.client.expose(c1, &place, Access::REMOTE)?;
    let wr = WorkRequest::Send { buf: w.server.message(b"?")?, invalidate: Some(remote.rkey), fence: false };
    w.server.post(s2, [Posting { wr_id: 3, signaled: true, wr }])?;
    w.wait_both_disconnected(c2, s2)?;
    let got = w.client_done(c2, Opcode::Recv)?;
    ensure!(!got.status.is_ok() && got.buf.is_some(), "{got:?}");
    write_now(w, s1, &[2; 64], remote)?;
    expect_eq("Write on its own connection", w.server_done(s1, Opcode::Write)?.status, Status::Success)?;
    expect_memory(w, &place, 0, &[2; 64])
}

fn bind_checks<F: Fabric>(w: &mut World<F>) -> Outcome {
    let few = ConnectParams { windows: 2, ..ConnectParams::default() };
    let (c, _) = w.connect_with(&few, &few)?;
    let (c2, _) = w.connect()?;
    let first = w.client.fabric.alloc_window(c).map_err(|e| e.to_string())?;
    let second = w.client.fabric.alloc_window(c).map_err(|e| e.to_string())?;
    ensure!(first != second, "each window has its own identifier");
    ensure!(w.client.fabric.alloc_window(c).is_err(), "a third window is refused if two are allowed");
    let mem = w.client.lent(&[0; 64])?;
    let expect_refused = |w: &mut World<F>, qp, window, mem: &Lent, offset, len| {
        let wr = WorkRequest::Bind { window, mem: mem.clone(), offset, len, access: Access::REMOTE };
        let (left, error) = w.client.post_refused(qp, Posting { wr_id: 1, signaled: true, wr })?;
        drop(left);
        ensure!(matches!(error, PostError::Invalid(_)), "{error:?}");
        Ok(())
    };
    expect_refused(w, c, first, &mem, 0, 0).map_err(|e| format!("no bytes: {e}"))?;
    expect_refused(w, c, first, &mem, 1, 64).map_err(|e| format!("past the end: {e}"))?;
    expect_refused(w, c2, first, &mem, 0, 64).map_err(|e| format!("another queue pair's window: {e}"))?;
    let private = w.client.message(&[0; 64])?.lend().map_err(|_| "lend")?;
    expect_refused(w, c, first, &private, 0, 64).map_err(|e| format!("memory without remote rights: {e}"))?;
    w.client.rebind(c, first, &mem, Access::REMOTE)?;
    expect_refused(w, c, first, &mem, 0, 64).map_err(|e| format!("a window that is bound: {e}"))
}

fn exposed_then_destroyed<F: Fabric>(w: &mut World<F>) -> Outcome {
    let (c, s, place, remote) = connect_and_expose(w, &[0; 64], Access::REMOTE)?;
    write_now(w, s, &[1; 64], remote)?;
    expect_eq("Write", w.server_done(s, Opcode::Write)?.status, Status::Success)?;
    w.client.fabric.destroy_qp(c);
    let mut place = Some(place);
    w.until("the memory is returned", |_| match place.take()?.reclaim() {
        Ok(_) => Some(()),
        Err(lent) => {
            place = Some(lent);
            None
        }
    })
}
