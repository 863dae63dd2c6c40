//! Chunks of the peers' calls: checks of their lists, and RDMA Reads of Read chunks into their target memory.

use arrayvec::ArrayVec;
use log::Level;
use rpcrdma_mempool::{Buf, Lent};

use super::procedures::Procedures;
use super::replies::CallRefusal;
use super::served_calls::{PendingReads, ReadingCall};
use crate::fabric::{Fabric, RemoteMemory, WorkRequest};
use crate::proto::binding::reduction_allowed;
use crate::proto::{CHUNK_LIMITS, MAX_READ_SEGMENTS};
use crate::service::{
    Arrived, CallChunks, CallParts, LengthMismatch, LocalProcedure, MAX_CHUNKS, REFUSAL_LEN, Ready, ServedCall,
};
use crate::shard::connection::Conn;
use crate::shard::context::ShardContext;
use crate::shard::send_queue::SendQueue;
use crate::wire::rpc;
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ErrorBody, ReadSegment, SEGMENT_LEN, Segment, SingleChunks, Version, View};

/// Checks the chunks of a call against its procedure's declaration. `inline` bytes of the RPC message are outside
/// chunks; the arguments start at `args_at`.
#[inline(never)]
pub(super) fn check_chunks(
    credential: rpc::OpaqueAuth<'_>,
    entry: &LocalProcedure,
    (args_at, inline): (usize, usize),
    chunks: &CallChunks,
) -> Result<(), ErrorBody> {
    if credential.flavor != rpc::Flavor::None.code() {
        check_reduction(&credential, entry, chunks)?;
    }
    check_reads(chunks.reads(), entry, args_at, inline)?;
    check_writes(entry, credential.flavor, chunks.results())
}

/// Copies the chunk lists of a call whose header has a known layout.
#[inline]
pub(super) fn copy_single_chunks(
    call: &mut ServedCall<Arrived>,
    conn: &Conn,
    chunks: &SingleChunks,
    message: &[u8],
) -> Result<(), CallRefusal> {
    let write = chunks.write(message).map(|segment| [segment]);
    copy_lists(call, conn, chunks.read(message), write, None::<[Segment; 0]>)
}

/// Copies the chunk lists of a call, if any. Every length, count and position is bounded here before use.
pub(super) fn copy_chunk_lists(
    call: &mut ServedCall<Arrived>,
    conn: &Conn,
    view: &View<'_>,
) -> Result<(), CallRefusal> {
    if !view.has_chunks() {
        // Without chunks, a handle to invalidate would name memory of another call.
        call.set_transport_header(call.xid(), 0);
        return Ok(());
    }
    view.check_limits(&CHUNK_LIMITS).map_err(CallRefusal::Transport)?;
    let writes = view.writes().map(|chunk| chunk.segments());
    let reply = view.reply_chunk().map(|chunk| chunk.segments());
    copy_lists(call, conn, view.reads(), writes, reply)
}

/// Copies chunk lists that are within the limits, and chooses the handle to invalidate.
#[inline]
fn copy_lists<W: IntoIterator<Item = Segment>>(
    call: &mut ServedCall<Arrived>,
    conn: &Conn,
    reads: impl IntoIterator<Item = ReadSegment>,
    writes: impl IntoIterator<Item = W>,
    reply: Option<impl IntoIterator<Item = Segment>>,
) -> Result<(), CallRefusal> {
    let chunks = call.begin_chunks();
    chunks.store_reads(reads);
    writes.into_iter().for_each(|chunk| chunks.store_write_chunk(chunk));
    if let Some(chunk) = reply {
        chunks.store_reply_chunk(chunk);
    }
    let returned = chunks.returned();
    check_returned(&returned, conn.served.inline_room as usize).map_err(CallRefusal::Transport)?;
    if conn.proto.terms().version == Version::V1 {
        // Version 1 has no field for the handle to invalidate (RFC 8797 §4.1). If a call has several handles, the
        // requester may still need some: the Linux client uses one handle for the padding of all its Read chunks.
        let only = chunks.only_handle();
        call.set_transport_header(call.xid(), only);
    } else if !call.chunks().has_handle(call.inv_handle()) {
        // The handle is not one of the call's (version 2 §6.3.3.2), so it stays valid.
        call.set_transport_header(call.xid(), 0);
    }
    Ok(())
}

/// Checks that a refusal fits the caller's receive size, together with the Write list and Reply chunk that its header
/// returns. `inline_room` is the room for an RPC message, in bytes.
fn check_returned(returned: &ChunkCounts, inline_room: usize) -> Result<(), ErrorBody> {
    let room = inline_room.saturating_sub(REFUSAL_LEN);
    if returned.encoded_len() <= room {
        return Ok(());
    }
    let chunks = returned.writes + usize::from(returned.reply.is_some());
    let fixed = returned.encoded_len() - SEGMENT_LEN * returned.segments();
    Err(ErrorBody::Segments { max: (room.saturating_sub(fixed) / SEGMENT_LEN / chunks) as u32 })
}

/// Rejects chunks under RPCSEC_GSS integrity or privacy, where neither call nor reply is reduced (version 2 §10.2.2).
#[cold]
fn check_reduction(
    credential: &rpc::OpaqueAuth<'_>,
    entry: &LocalProcedure,
    chunks: &CallChunks,
) -> Result<(), ErrorBody> {
    if reduction_allowed(credential.flavor, credential.body) {
        return Ok(());
    }
    if !chunks.reads().is_empty() {
        return Err(ErrorBody::ReadChunks { max: 0 });
    }
    if chunks.results() > 0 {
        let length_needed = rpc::accepted_reply_room(credential.flavor) + entry.binding.reply_len(0);
        return Err(ErrorBody::ReplyResource { length_needed: length_needed as u32 });
    }
    Ok(())
}

/// Checks the Position Zero Read chunk, at the front of the Read list, against the longest RPC message.
pub(super) fn check_position_zero(chunks: &CallChunks, longest: u64) -> Result<(), CallRefusal> {
    match chunks.message_bytes() {
        0 => Err(CallRefusal::Transport(ErrorBody::BadXdr)),
        bytes if bytes > longest => Err(CallRefusal::TooLong { bytes, limit: longest }),
        _ => Ok(()),
    }
}

fn check_reads(list: &[ReadSegment], entry: &LocalProcedure, args_at: usize, inline: usize) -> Result<(), ErrorBody> {
    // Earliest start of the next chunk, and bytes that earlier chunks have inserted before it.
    let (mut earliest, mut inserted) = (args_at as u64, 0u64);
    let (mut rest, mut chunks) = (list, 0);
    while let [first, behind @ ..] = rest {
        if chunks == entry.binding.arguments.count {
            return Err(ErrorBody::ReadChunks { max: entry.binding.arguments.count as u32 });
        }
        let (position, at) = (first.position, u64::from(first.position));
        if !position.is_multiple_of(4) || at < earliest || at > inline as u64 + inserted {
            return Err(ErrorBody::BadXdr);
        }
        let mut len = 0;
        rest = behind;
        let mut segment = Some(first);
        while let Some(read) = segment {
            len += u64::from(read.target.length);
            segment = rest.first().filter(|next| next.position == position);
            if segment.is_some() {
                rest = rest.get(1..).unwrap_or_default();
            }
        }
        // The chunk may include its padding (RFC 8166 §3.4.5.2).
        let longest = entry.binding.arguments.max_len as u64;
        if len == 0 || (len > longest && len > longest.next_multiple_of(4)) {
            return Err(ErrorBody::BadXdr);
        }
        (earliest, inserted) = (at + len, inserted + padded(len as usize) as u64);
        chunks += 1;
    }
    Ok(())
}

fn check_writes(entry: &LocalProcedure, flavor: u32, results: usize) -> Result<(), ErrorBody> {
    match (results, entry.binding.results.count) {
        (0, _) => Ok(()),
        // A requester without continued messages needs a Reply chunk instead (version 2 §6.4.3).
        (_, 0) => {
            let length_needed = (rpc::accepted_reply_room(flavor) + entry.binding.max_reply) as u32;
            Err(ErrorBody::ReplyResource { length_needed })
        }
        (chunks, limit) if chunks > limit => Err(ErrorBody::WriteChunks { max: limit as u32 }),
        _ => Ok(()),
    }
}

/// Reason why an RDMA Read has no target.
pub(super) enum NoTarget {
    /// No buffer is free.
    NoMemory,
    /// The procedure chose unsuitable memory, for this reason.
    Unsuitable(String),
}

/// Queues the RDMA Reads of a call, and stores the call until the last one completes.
///
/// # Errors
/// The call, and the reason. No Read is queued.
pub(super) fn post_reads<F: Fabric>(
    cx: &ShardContext<F>,
    conn: &mut Conn,
    procedures: &Procedures,
    mut call: ReadingCall,
) -> Result<(), (ReadingCall, NoTarget)> {
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
    cx: &ShardContext<F>,
    sends: &mut SendQueue,
    procedures: &Procedures,
    call: &mut ReadingCall,
    targets: &mut ArrayVec<Lent, MAX_CHUNKS>,
) -> Result<usize, NoTarget> {
    let wr_id = call.id().index() as u64;
    let first_two = {
        let mut reads = call.chunks().to_fetch();
        (reads.next(), reads.next())
    };
    if let (Some((position, segment)), None) = first_two {
        // Most chunks have one segment.
        let target = choose_target(cx, procedures, call, position, segment.length as usize)?;
        sends.push_named(wr_id, true, || read_of(&target, 0, &segment));
        targets.push(target);
        return Ok(1);
    }
    let all: ArrayVec<(u32, Segment), MAX_READ_SEGMENTS> = call.chunks().to_fetch().collect();
    let lens: ArrayVec<usize, MAX_CHUNKS> = call.chunks().chunks_to_fetch().collect();
    let (count, mut filled, mut lens, mut last_position) = (all.len(), 0, lens.into_iter(), None);
    for (at, (position, segment)) in all.into_iter().enumerate() {
        if last_position.replace(position) != Some(position) {
            targets.push(choose_target(cx, procedures, call, position, lens.next().unwrap_or_default())?);
            filled = 0;
        }
        let Some(target) = targets.last() else { continue };
        // Reads complete in order, so only the last one is signaled.
        sends.push_named(wr_id, at + 1 == count, || read_of(target, filled, &segment));
        filled += segment.length as usize;
    }
    Ok(count)
}

/// Target of a call's next Read chunk, `len` bytes at this position: the procedure's choice, or pool memory.
#[inline(always)]
fn choose_target<F: Fabric>(
    cx: &ShardContext<F>,
    procedures: &Procedures,
    call: &mut ReadingCall,
    position: u32,
    len: usize,
) -> Result<Lent, NoTarget> {
    // A procedure chooses targets only for arguments, and not for the message of a long call.
    if let ReadingCall::Ready(call) = call {
        let (index, entry) = (call.push_argument(position), procedures.entry(call.procedure_index()));
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
    cx: &ShardContext<F>,
    entry: &LocalProcedure,
    call: &ServedCall<Ready>,
    index: usize,
    len: usize,
) -> Result<Lent, NoTarget> {
    let unsuitable = |why: String| Err(NoTarget::Unsuitable(why));
    let mut buf = match entry.choose_read_target(call, index, len) {
        Ok(Some(buf)) => buf,
        Ok(None) if cx.memory.pool.room(len).1 == 0 => {
            return unsuitable(format!(
                "`Procedure::place_reads_in` chose none, and no buffer has {len} bytes (memory.bulk_buffers)"
            ));
        }
        Ok(None) => return lend(cx.memory.alloc_chunk(len)),
        Err(panic) => {
            return unsuitable(format!("`Procedure::place_reads_in` panicked: {panic}"));
        }
    };
    if buf.len() < len {
        return unsuitable(format!("the chosen buffer of {} bytes is shorter than {len} bytes", buf.len()));
    }
    if !cx.memory.is_registered(buf.arena()) {
        return unsuitable(format!("the chosen buffer is in unregistered arena {} (memory.arenas)", buf.arena()));
    }
    buf.set_window(buf.start(), len);
    buf.lend().or_else(|_| unsuitable("the chosen buffer is of a pool of another thread".to_owned()))
}

/// RDMA Read of a segment, into a buffer at an offset.
#[inline]
fn read_of(target: &Lent, offset: usize, from: &Segment) -> WorkRequest {
    let remote = RemoteMemory { rkey: from.handle, address: from.offset };
    WorkRequest::Read { dst: target.clone(), offset, len: from.length as usize, remote }
}

/// Takes the call whose RDMA Reads have completed, with their targets.
#[inline]
pub(super) fn take_completed(conn: &mut Conn, index: usize) -> Option<(ReadingCall, &mut ArrayVec<Lent, MAX_CHUNKS>)> {
    let PendingReads { call, targets, .. } = conn.served.reads.get_mut(index)?;
    let call = call.take()?;
    conn.served.read_calls_done = conn.served.read_calls_done.wrapping_add(1);
    Some((call, targets))
}

/// Logs a Read chunk whose procedure chose unsuitable memory for it.
#[cold]
pub(super) fn log_unsuitable<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, call: &CallParts, why: &str) {
    cx.stats.read_targets_refused += 1;
    let (peer, name) = (conn.log_name(), call.name());
    let line = format_args!("{peer}: replied SYSTEM_ERR to {name}: no target for a Read chunk: {why}");
    cx.log_for_procedure(Level::Error, "Read chunks without a target", Some(name), line);
}

/// Logs a Read chunk whose length contradicts the length word before it.
#[cold]
pub(super) fn log_miscounted<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    call: &CallParts,
    wrong: &LengthMismatch,
) {
    let (peer, name, chunk) = (conn.log_name(), call.name(), wrong.chunk);
    let word = wrong.word.map_or_else(|| "no count".to_owned(), |word| format!("count {word}"));
    let line = format_args!(
        "{peer}: GARBAGE_ARGS to {name}: {word} before a Read chunk of {chunk} bytes (Procedure::uncounted, unless \
         its reduced arguments are opaque<> or string<>)"
    );
    cx.log_for_procedure(Level::Warn, "Read chunks that contradict their length word", Some(name), line);
}
