//! Read chunks of a call: RDMA Reads, and their target memory.

use arrayvec::ArrayVec;
use log::Level;
use rpcrdma_mempool::{Buf, Lent};

use super::procedures::Procedures;
use super::served::{PendingReads, Reading};
use crate::fabric::{Fabric, RemoteMemory, WorkRequest};
use crate::proto::MAX_READ_SEGMENTS;
use crate::service::{Call, CallParts, LengthMismatch, LocalProcedure, MAX_CHUNKS, Ready};
use crate::shard::connection::Conn;
use crate::shard::context::Context;
use crate::shard::send_queue::SendQueue;
use crate::wire::Segment;

/// Reason for the lack of a target.
pub(super) enum NoTarget {
    /// No buffer is free.
    NoMemory,
    /// The procedure chose unsuitable memory, for this reason.
    Unsuitable(String),
}

/// Posts the RDMA Reads of a call. All have completed when the last one has.
///
/// # Errors
/// The call, without any Read posted.
pub(super) fn post_reads<F: Fabric>(
    cx: &Context<F>,
    conn: &mut Conn,
    procedures: &Procedures,
    mut call: Reading,
) -> Result<(), (Reading, NoTarget)> {
    let Conn { sends, served, .. } = conn;
    let (before, pending) = (sends.len(), &mut served.reads[call.id().index()]);
    match push_reads(cx, sends, procedures, &mut call, &mut pending.targets) {
        Ok(count) => {
            (pending.call, pending.count) = (Some(call), count);
            Ok(())
        }
        Err(why) => {
            pending.targets.clear();
            sends.truncate(before);
            Err((call, why))
        }
    }
}

/// Queues the RDMA Reads of a call, and adds their targets; returns their number.
fn push_reads<F: Fabric>(
    cx: &Context<F>,
    sends: &mut SendQueue,
    procedures: &Procedures,
    call: &mut Reading,
    targets: &mut ArrayVec<Lent, MAX_CHUNKS>,
) -> Result<usize, NoTarget> {
    let name = call.id().index() as u64;
    let first_two = {
        let mut reads = call.chunks().to_fetch();
        (reads.next(), reads.next())
    };
    if let (Some((position, segment)), None) = first_two {
        // Most chunks have one segment.
        let target = choose_target(cx, procedures, call, position, segment.length as usize)?;
        sends.push_named(name, true, || read_of(&target, 0, &segment));
        targets.push(target);
        return Ok(1);
    }
    let all: ArrayVec<(u32, Segment), MAX_READ_SEGMENTS> = call.chunks().to_fetch().collect();
    let lens: ArrayVec<usize, MAX_CHUNKS> = call.chunks().chunks_to_fetch().collect();
    let (count, mut filled, mut lens, mut before) = (all.len(), 0, lens.into_iter(), None);
    for (at, (position, segment)) in all.into_iter().enumerate() {
        if before.replace(position) != Some(position) {
            targets.push(choose_target(cx, procedures, call, position, lens.next().unwrap_or_default())?);
            filled = 0;
        }
        let Some(target) = targets.last() else { continue };
        // Reads complete in order: the last one is signaled.
        sends.push_named(name, at + 1 == count, || read_of(target, filled, &segment));
        filled += segment.length as usize;
    }
    Ok(count)
}

/// Target of a call's next Read chunk, `len` bytes at this position: the procedure's choice, or pool memory.
#[inline(always)]
fn choose_target<F: Fabric>(
    cx: &Context<F>,
    procedures: &Procedures,
    call: &mut Reading,
    position: u32,
    len: usize,
) -> Result<Lent, NoTarget> {
    // The message of a long call is no argument.
    if let Reading::Ready(call) = call {
        let (index, entry) = (call.push_argument(position), procedures.entry(call.entry()));
        if entry.read_target.is_some() {
            return choose_own_target(cx, entry, call, index, len);
        }
    }
    lend(cx.memory.alloc_chunk(len))
}

#[inline]
fn lend(buf: Option<Buf>) -> Result<Lent, NoTarget> {
    buf.and_then(|buf| buf.lend().ok()).ok_or(NoTarget::NoMemory)
}

/// Lets a procedure choose the target of a Read chunk.
#[inline(never)]
fn choose_own_target<F: Fabric>(
    cx: &Context<F>,
    entry: &LocalProcedure,
    call: &Call<Ready>,
    index: usize,
    len: usize,
) -> Result<Lent, NoTarget> {
    let unsuitable = |why: String| Err(NoTarget::Unsuitable(why));
    let mut buf = match entry.choose_read_target(call, index, len) {
        Ok(Some(buf)) => buf,
        Ok(None) if cx.memory.pool.room(len).1 == 0 => {
            return unsuitable(format!("none was chosen, and no buffer of `memory.bulk_buffers` has {len} bytes"));
        }
        Ok(None) => return lend(cx.memory.alloc_chunk(len)),
        Err(panic) => {
            return unsuitable(format!("the `Procedure::place_reads_in` callback panicked: {panic}"));
        }
    };
    if buf.len() < len {
        return unsuitable(format!("a buffer of {} bytes for {len}", buf.len()));
    }
    if !cx.memory.knows(buf.arena()) {
        return unsuitable(format!("a buffer in arena {}, which is not among `memory.arenas`", buf.arena()));
    }
    buf.set_window(buf.start(), len);
    buf.lend().or_else(|_| unsuitable("a buffer of a pool that was not made on the shard's thread".to_owned()))
}

/// RDMA Read of a segment, into a buffer at an offset.
#[inline]
fn read_of(target: &Lent, offset: usize, from: &Segment) -> WorkRequest {
    let remote = RemoteMemory { rkey: from.handle, address: from.offset };
    WorkRequest::Read { dst: target.clone(), offset, len: from.length as usize, remote }
}

/// Takes the call whose RDMA Reads have completed, with their targets.
#[inline]
pub(super) fn take_completed(conn: &mut Conn, index: usize) -> Option<(Reading, &mut ArrayVec<Lent, MAX_CHUNKS>)> {
    let PendingReads { call, targets, .. } = conn.served.reads.get_mut(index)?;
    let call = call.take()?;
    conn.served.fetched = conn.served.fetched.wrapping_add(1);
    Some((call, targets))
}

/// Logs a Read chunk whose procedure chose unsuitable memory for it.
#[cold]
pub(super) fn log_unsuitable<F: Fabric>(cx: &mut Context<F>, conn: &Conn, call: &CallParts, why: &str) {
    cx.stats.read_targets_refused += 1;
    let (peer, name) = (conn.who(), call.name());
    let line = format_args!("{peer}: SYSTEM_ERR to {name}: Read chunk: {why}");
    cx.log_of(Level::Error, "Read chunks that cannot land", Some(name), line);
}

/// Logs a Read chunk that does not match its length word: the real length is unknown.
#[cold]
pub(super) fn log_miscounted<F: Fabric>(cx: &mut Context<F>, conn: &Conn, call: &CallParts, wrong: &LengthMismatch) {
    let (peer, name, chunk) = (conn.who(), call.name(), wrong.chunk);
    let word = wrong.word.map_or_else(|| "no count".to_owned(), |word| format!("count {word}"));
    let line = format_args!(
        "{peer}: GARBAGE_ARGS to {name}: {word} before a Read chunk of {chunk} bytes (Procedure::uncounted, unless its reduced arguments are opaque<> or string<>)"
    );
    cx.log_of(Level::Warn, "Read chunks that are not what the word in front of them counts", Some(name), line);
}
