//! Forms of this side's calls: chunks of call and reply, room for their headers, and new forms for a retransmission.

use rpcrdma_mempool::Buf;

use super::exposures::{CallBuffers, ChunkMemory, segments_of};
use super::outgoing_calls::peer_accepts_calls;
use crate::config::HEADROOM_CHUNKS;
use crate::fabric::Fabric;
use crate::proto::{
    CallError, CallForm, CallId, CallLengths, ConnectionTerms, Defect, FIRST_MESSAGE_LEN, FormLimits, Knob,
    MIN_LAST_PART, choose_call,
};
use crate::service::MAX_SEGMENTS;
use crate::shard::connection::{Conn, Stage};
use crate::shard::context::ShardContext;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, CallHeader};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ErrorBody, SEGMENT_LEN, Version};

/// Cause of a retransmission.
#[derive(Clone, Copy, Debug)]
pub(super) enum RetransmitCause {
    /// The peer refused the call with this error, because it lacks memory, drains, or needs other chunks.
    Refused(ErrorBody),
    /// The connection was lost, and has reconnected.
    Reconnected,
}

/// Chooses the form of a call that may need more than an inline message. Allocates exposed memory only if it
/// `may_expose` any.
///
/// # Errors
/// The call cannot be sent.
#[inline(always)]
pub(super) fn form<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &mut Conn,
    message: &mut Buf,
    memory: &mut ChunkMemory,
    max_reply: usize,
    may_expose: bool,
) -> Result<(), CallError> {
    // A connection that accepts inline calls accepts this call, too.
    if conn.calls.inline_call == 0 {
        // A draining connection finishes its calls, and accepts no new one.
        if !matches!(conn.stage(), Stage::Open | Stage::Draining) {
            return Err(CallError::Closed);
        }
        if !conn.proto.session().may_call() || !peer_accepts_calls(&conn.proto) {
            return Err(CallError::NoReverse);
        }
    }
    if let Some(memory) = memory.get() {
        check_memory(conn, memory, message)?;
    }
    let may_expose = may_expose && conn.proto.terms().form_limits(conn.proto.config()).chunks;
    let chunks = measure(memory.get(), conn.proto.terms())?;
    let lists = chunks.encoded_len();
    let fits = || conn.calls.fit_inline(message.len() + lists, max_reply + lists);
    if may_expose && chunks.reply.is_none() && fits() {
        return make_room(cx, conn, message, &chunks);
    }
    choose_form(cx, conn, message, memory, max_reply, (may_expose, chunks))
}

/// Chooses the form of a call that may not fit one message, or whose reply may not.
#[cold]
fn choose_form<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &mut Conn,
    message: &mut Buf,
    memory: &mut ChunkMemory,
    max_reply: usize,
    (may_expose, chunks): (bool, ChunkCounts),
) -> Result<(), CallError> {
    let limits = FormLimits { chunks: may_expose, ..conn.proto.terms().form_limits(conn.proto.config()) };
    // The reply returns the Write chunks.
    let returned = ChunkCounts { reads: 0, reply: None, ..chunks };
    let (header, reply_header) = (conn.proto.credits().header_len(&chunks), conn.proto.credits().header_len(&returned));
    let reply = ACCEPTED_REPLY_LEN + max_reply;
    if memory.get().is_some_and(|memory| !memory.is_empty()) && !limits.chunks {
        return Err(Defect::NoChunks.into());
    }
    // A Reply chunk may be added if there is none. This is the number of its segments.
    let segments = segments_of(padded(reply), conn.proto.terms());
    let lengths = CallLengths {
        header,
        reply_chunk: if chunks.reply.is_some() { 0 } else { 4 + SEGMENT_LEN * segments },
        call: message.len(),
        reply_header,
        reply,
    };
    let plan = choose_call(&limits, &lengths)?;
    // A Reply chunk that the memory has already is from the last attempt, and longer.
    if plan.reply_chunk && chunks.reply.is_none() {
        memory.get_or_new().reply = Some(cx.alloc_exposed_on(conn, padded(reply))?);
    }
    if plan.form == CallForm::Long {
        let mut long = cx.alloc_exposed_on(conn, message.len())?;
        long.copy_from_slice(message);
        memory.get_or_new().call = Some(long);
        *message = cx.memory.copy_of(&[]).ok_or_else(|| cx.memory.missing_buffer(HEADROOM_CHUNKS))?;
    }
    let chunks = measure(memory.get(), conn.proto.terms())?;
    make_room(cx, conn, message, &chunks)
}

/// Ensures room for the headers of the call and of its reply, with these chunk lists: each header must fit one message,
/// and the call's header must fit the headroom.
///
/// # Errors
/// [`CallError::Invalid`] if a header does not fit; [`CallError::NoMemory`] without a buffer that has the headroom.
#[inline]
fn make_room<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    message: &mut Buf,
    chunks: &ChunkCounts,
) -> Result<(), CallError> {
    let header = conn.proto.credits().header_len(chunks);
    // The usual lists fit even the shortest messages.
    if header <= message.start().min(FIRST_MESSAGE_LEN - MIN_LAST_PART) {
        return Ok(());
    }
    make_more_room(cx, conn, message, chunks, header)
}

#[cold]
fn make_more_room<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    message: &mut Buf,
    chunks: &ChunkCounts,
    header: usize,
) -> Result<(), CallError> {
    let terms = conn.proto.terms();
    let returned = conn.proto.credits().header_len(&ChunkCounts { reads: 0, ..*chunks });
    for (needed, limit) in [(header, terms.send_inline_threshold), (returned, terms.receive_inline_threshold)] {
        let limit = limit - MIN_LAST_PART;
        if needed > limit {
            return Err(Defect::HeaderTooLong { needed, limit }.into());
        }
    }
    if message.start() < header {
        let needed = header + message.len();
        *message = cx.memory.copy_with(header, message).ok_or_else(|| cx.memory.missing_buffer(needed))?;
    }
    Ok(())
}

/// Whether a call that waited for a credit still fits its form: the peer may have changed its terms.
pub(super) fn still_fits<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &Conn,
    message: &mut Buf,
    memory: Option<&CallBuffers>,
) -> Result<(), CallError> {
    let chunks = measure(memory, conn.proto.terms())?;
    let (needed, limit) =
        (conn.proto.credits().header_len(&chunks) + message.len(), conn.proto.terms().send_inline_threshold);
    if needed > limit && !conn.proto.terms().form_limits(conn.proto.config()).continuation {
        return Err(CallError::TooLong { needed, limit, knob: Knob::RECEIVE_SIZE });
    }
    if memory.is_some() { make_room(cx, conn, message, &chunks) } else { Ok(()) }
}

/// Chooses the form of a kept call for its retransmission; returns its message.
///
/// # Errors
/// The call cannot be sent.
pub(super) fn form_retransmission<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &mut Conn,
    call: CallId,
    cause: RetransmitCause,
    memory: &mut ChunkMemory,
) -> Result<Buf, CallError> {
    let slot = conn.calls.slot(&conn.proto, call);
    let kept = slot.message.take().or_else(|| slot.take_kept(&mut cx.memory)).filter(|message| !message.is_empty());
    let mut message = kept
        .or_else(|| memory.get_mut().and_then(|memory| memory.call.take()))
        .ok_or_else(|| cx.memory.missing_buffer(HEADROOM_CHUNKS))?;
    let may_expose = slot.empty_reply.is_none();
    match cause {
        RetransmitCause::Reconnected | RetransmitCause::Refused(ErrorBody::System) => {
            slot.retries = 0;
            // A Reply chunk of the last form is not needed any more.
            if let Some(memory) = memory.get_mut() {
                memory.reply = None;
            }
            if !may_expose && conn.proto.terms().version == Version::V1 {
                return Err(Defect::NotOneWay.into());
            }
        }
        RetransmitCause::Refused(error) => {
            let is_last = slot.retries > 1;
            if let ErrorBody::ReplyResource { length_needed } = error {
                // The length is kept, because otherwise the call could run once more on a new connection to find it.
                let needed = (length_needed as usize).saturating_sub(ACCEPTED_REPLY_LEN);
                slot.max_reply = slot.max_reply.max(needed);
            }
            if let Some(reduced) = enlarge(cx, conn, memory.get_or_new(), &message, error, is_last)? {
                message = reduced;
            }
        }
    }
    let needed = HEADROOM_CHUNKS + message.len();
    message = cx.memory.with_headroom(message).ok_or_else(|| cx.memory.missing_buffer(needed))?;
    if memory.get().is_some_and(CallBuffers::is_empty) {
        *memory = ChunkMemory::NONE;
    }
    let max_reply = conn.calls.slot(&conn.proto, call).max_reply;
    form(cx, conn, &mut message, memory, max_reply, may_expose)?;
    Ok(message)
}

/// Allocates the resources that a refusal requires; `is_last` means that an earlier form was refused, too. Returns a
/// new message if the call moves to a chunk.
fn enlarge<F: Fabric>(
    cx: &mut ShardContext<F>,
    conn: &mut Conn,
    memory: &mut CallBuffers,
    message: &Buf,
    error: ErrorBody,
    is_last: bool,
) -> Result<Option<Buf>, CallError> {
    match error {
        ErrorBody::ReplyResource { length_needed } => {
            if is_last {
                // The responder cannot use the Write chunks, so all results become inline (version 2 §6.4.3).
                memory.receive.clear();
                memory.max_inline_results = None;
            }
            let needed = (length_needed as usize).max(cx.config.wire.receive_size);
            memory.reply = Some(cx.alloc_exposed_on(conn, padded(needed)).map_err(CallError::into_reply_error)?);
            Ok(None)
        }
        ErrorBody::WriteResource { chunk_index, length_needed } => {
            let index = (chunk_index as usize).checked_sub(1).ok_or(CallError::Transport(error))?;
            let chunk = memory.receive.get_mut(index).ok_or(CallError::Transport(error))?;
            *chunk = cx.alloc_exposed_on(conn, length_needed as usize).map_err(CallError::into_reply_error)?;
            Ok(None)
        }
        ErrorBody::ReadChunks { .. } => {
            let total = message.len() + memory.send.iter().map(|(_, buf)| padded(buf.len())).sum::<usize>();
            let mut whole = cx.alloc_exposed_on(conn, total)?;
            unreduce(message, memory, &mut whole);
            memory.send.clear();
            // The call is long even if it fits a message, or could be continued (version 2 §6.4.3).
            memory.call = Some(whole);
            Ok(Some(cx.memory.copy_of(&[]).ok_or_else(|| cx.memory.missing_buffer(HEADROOM_CHUNKS))?))
        }
        _ => Err(CallError::Transport(error)),
    }
}

/// Inserts the data of Read chunks at their positions, with XDR round-up.
fn unreduce(message: &[u8], memory: &CallBuffers, whole: &mut [u8]) {
    let (mut from, mut to) = (0, 0);
    for (position, data) in &memory.send {
        // Positions refer to the unreduced message.
        let inline = (*position as usize).saturating_sub(to).min(message.len() - from);
        whole[to..to + inline].copy_from_slice(&message[from..from + inline]);
        (from, to) = (from + inline, to + inline);
        whole[to..to + data.len()].copy_from_slice(data);
        whole[to + data.len()..to + padded(data.len())].fill(0);
        to += padded(data.len());
    }
    whole[to..].copy_from_slice(&message[from..]);
}

/// Chunk lists of memory before exposure.
///
/// # Errors
/// [`CallError::Invalid`] if they have more segments than this side, or the peer, handles.
#[inline(always)]
pub(super) fn measure(memory: Option<&CallBuffers>, terms: &ConnectionTerms) -> Result<ChunkCounts, CallError> {
    let Some(memory) = memory else { return Ok(ChunkCounts::default()) };
    let (mut counts, mut longest) = (ChunkCounts::default(), 0);
    let mut count = |buf: &Buf| {
        let segments = segments_of(buf.len(), terms);
        longest = segments.max(longest);
        segments
    };
    if let Some(call) = &memory.call {
        counts.reads = count(call);
    }
    for (_, buf) in &memory.send {
        counts.reads += count(buf);
    }
    for buf in &memory.receive {
        counts.write_segments += count(buf);
    }
    counts.writes = memory.receive.len();
    counts.reply = memory.reply.as_ref().map(count);
    let (segments, limit) = (counts.segments(), terms.segment_count as usize);
    if longest > MAX_SEGMENTS {
        return Err(Defect::ChunkSegments { segments: longest, limit: MAX_SEGMENTS }.into());
    }
    if segments > limit { Err(Defect::HeaderSegments { segments, limit }.into()) } else { Ok(counts) }
}

/// Checks the chunks of a call: owner of the memory, emptiness, and positions. `message` is the reduced RPC message.
#[inline]
fn check_memory(conn: &Conn, memory: &CallBuffers, message: &[u8]) -> Result<(), CallError> {
    let own_arena = conn.calls.exposed_pool().map(|pool| pool.arena().id());
    let is_exposable = |buf: &Buf| Some(buf.arena()) == own_arena && !buf.is_empty();
    // Position zero would be the message itself. Positions ascend, no chunk overlaps the next one, and none starts
    // beyond the end.
    let (mut earliest, mut end) = (4, message.len());
    for (position, buf) in &memory.send {
        if !is_exposable(buf) {
            return Err(unfit(buf));
        }
        let (at, len) = (*position as usize, padded(buf.len()));
        if !at.is_multiple_of(4) || at < earliest || at > end {
            return Err(misplaced(*position, message));
        }
        (earliest, end) = (at + len, end + len);
    }
    memory.receive.iter().find(|buf| !is_exposable(buf)).map_or(Ok(()), |buf| Err(unfit(buf)))
}

/// Error for a buffer that cannot be a chunk.
#[cold]
fn unfit(buf: &Buf) -> CallError {
    if buf.is_empty() { Defect::EmptyChunk.into() } else { Defect::ForeignMemory.into() }
}

/// Error for an invalid Read chunk position, relative to the arguments, as the caller gave it.
#[cold]
fn misplaced(position: u32, message: &[u8]) -> CallError {
    let args_at = CallHeader::parse(message).map_or(0, |(_, len)| len as u32);
    Defect::Position(position.saturating_sub(args_at)).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rpcrdma_mempool::{ArenaConfig, Class, Pool, PoolConfig};

    #[test]
    fn an_unreduced_message_has_its_chunks_and_their_round_up_in_place() {
        let classes = vec![Class { size: 64, count: 4 }];
        let pool = Pool::new(&PoolConfig { classes, arena: ArenaConfig::default() }).unwrap();
        let buf = |bytes: &[u8]| {
            let mut buf = pool.alloc(bytes.len()).unwrap();
            buf.copy_from_slice(bytes);
            buf
        };
        let mut memory = CallBuffers::default();
        memory.send.push((8, buf(b"abcde")));
        memory.send.push((20, buf(b"xyz!")));
        // Eight bytes, the first chunk up to 16, four bytes, the second chunk up to 24, the rest.
        let mut whole = [0xFF; 28];
        unreduce(b"head1234mid.tail", &memory, &mut whole);
        assert_eq!(&whole, b"head1234abcde\0\0\0mid.xyz!tail");
    }
}
