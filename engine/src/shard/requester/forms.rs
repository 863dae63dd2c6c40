//! Forms of this side's calls: chunks of call and reply, and new forms after a refusal.

use rpcrdma_mempool::Buf;

use super::chunks::{ChunkMemory, Memory};
use super::exposures::{Ending, Exposure, Place};
use super::{Requester, calls_are_taken};
use crate::config::HEADROOM_CHUNKS;
use crate::fabric::Fabric;
use crate::proto::{
    CallError, CallForm, CallId, CallLengths, Defect, FIRST_MESSAGE_LEN, FormLimits, LEAST_LAST_PART, Terms,
    choose_call,
};
use crate::service::MAX_SEGMENTS;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::stage::Stage;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, CallHeader};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ErrorBody, SEGMENT_LEN, Version};

/// Most new forms of a refused call.
const MAX_RETRIES: u8 = 2;

impl Requester {
    /// Chooses the form of a call beyond the fast path, and allocates its memory: none without `may_expose`.
    ///
    /// # Errors
    /// It cannot be sent.
    #[inline(always)]
    pub(super) fn shape<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        message: &mut Buf,
        memory: &mut ChunkMemory,
        max_reply: usize,
        may_expose: bool,
    ) -> Result<(), CallError> {
        // A connection that accepts fast-path calls accepts this one, too.
        if conn.requests.plain_call == 0 {
            // A draining connection finishes its calls, and accepts no new one.
            if !matches!(conn.stage(), Stage::Open | Stage::Draining) {
                return Err(CallError::Closed);
            }
            if !conn.proto.session().may_call() || !calls_are_taken(&conn.proto) {
                return Err(CallError::NoReverse);
            }
        }
        if let Some(memory) = memory.get() {
            conn.check_memory(memory, message)?;
        }
        let may_expose = may_expose && conn.proto.terms().form_limits(conn.proto.config()).chunks;
        let chunks = measure(memory.get(), conn.proto.terms())?;
        let lists = chunks.encoded_len();
        if may_expose
            && chunks.reply.is_none()
            && message.len() + lists <= conn.requests.plain_call
            && max_reply + lists <= conn.requests.plain_reply
        {
            // Call and reply fit one message, with their lists.
            return self.make_room(cx, conn, message, &chunks);
        }
        self.choose_form(cx, conn, message, memory, max_reply, (may_expose, chunks))
    }

    /// As above, for a call that may exceed its message.
    #[cold]
    fn choose_form<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        message: &mut Buf,
        memory: &mut ChunkMemory,
        max_reply: usize,
        (may_expose, chunks): (bool, ChunkCounts),
    ) -> Result<(), CallError> {
        let limits = FormLimits { chunks: may_expose, ..conn.proto.terms().form_limits(conn.proto.config()) };
        // The reply returns the Write chunks.
        let returned = ChunkCounts { reads: 0, reply: None, ..chunks };
        let (header, reply_header) =
            (conn.proto.credits().header_len(&chunks), conn.proto.credits().header_len(&returned));
        let reply = ACCEPTED_REPLY_LEN + max_reply;
        if memory.get().is_some_and(|memory| !memory.is_empty()) && !limits.chunks {
            return Err(Defect::NoChunks.into());
        }
        // Size of an added Reply chunk, if there is none.
        let segments = segments_of(padded(reply), conn.proto.terms());
        let lengths = CallLengths {
            header,
            reply_chunk: if chunks.reply.is_some() { 0 } else { 4 + SEGMENT_LEN * segments },
            call: message.len(),
            reply_header,
            reply,
        };
        let mut plan = choose_call(&limits, &lengths)?;
        if memory.get().is_some_and(|memory| memory.reply.is_some()) {
            // The memory has a larger Reply chunk, from the last attempt.
            plan.reply_chunk = false;
        }
        if plan.form != CallForm::Long && !plan.reply_chunk {
            return self.make_room(cx, conn, message, &chunks);
        }
        let memory = memory.get_or_new();
        if plan.reply_chunk {
            memory.reply = Some(self.alloc_for(cx, conn, padded(reply))?);
        }
        if plan.form == CallForm::Long {
            let mut long = self.alloc_for(cx, conn, message.len())?;
            long.copy_from_slice(message);
            memory.call = Some(long);
            *message = cx.copy_of(&[]).ok_or_else(|| cx.lacks_buffer(HEADROOM_CHUNKS))?;
        }
        let chunks = measure(Some(memory), conn.proto.terms())?;
        self.make_room(cx, conn, message, &chunks)
    }

    /// Ensures room for the headers of the call and of its reply, with such lists: in one message each, and in the
    /// call's headroom.
    ///
    /// # Errors
    /// [`CallError::Invalid`]; [`CallError::NoMemory`] to move the call to a buffer with room.
    #[inline]
    pub(super) fn make_room<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &Conn,
        message: &mut Buf,
        chunks: &ChunkCounts,
    ) -> Result<(), CallError> {
        let header = conn.proto.credits().header_len(chunks);
        // The usual lists fit the shortest messages.
        if header <= message.start().min(FIRST_MESSAGE_LEN - LEAST_LAST_PART) {
            return Ok(());
        }
        self.make_more_room(cx, conn, message, chunks, header)
    }

    #[cold]
    fn make_more_room<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &Conn,
        message: &mut Buf,
        chunks: &ChunkCounts,
        header: usize,
    ) -> Result<(), CallError> {
        let terms = conn.proto.terms();
        let returned = conn.proto.credits().header_len(&ChunkCounts { reads: 0, ..*chunks });
        for (needed, limit) in [(header, terms.send_inline_threshold), (returned, terms.receive_inline_threshold)] {
            let limit = limit - LEAST_LAST_PART;
            if needed > limit {
                return Err(Defect::HeaderTooLong { needed, limit }.into());
            }
        }
        if message.start() < header {
            let needed = header + message.len();
            *message = cx.copy_with(header, message).ok_or_else(|| cx.lacks_buffer(needed))?;
        }
        Ok(())
    }

    /// Retries a refused call, once no memory of it is exposed, or ends it.
    #[cold]
    pub(in crate::shard) fn retry<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        token: u64,
        error: ErrorBody,
        invalidated: Option<u32>,
    ) {
        let exposure = conn.exposure_of(call);
        let long = exposure.as_deref().is_some_and(Exposure::is_long);
        // A long call that cannot be read stays so (version 2 §6.4.3), unless it failed for other chunks.
        let hopeless = long
            && matches!(error, ErrorBody::ReadChunks { .. })
            && exposure.is_some_and(|exposure| exposure.is_long_only());
        let gone = !long && !conn.out_call(call).keeps();
        if gone && matches!(error, ErrorBody::ReplyResource { .. }) {
            // This peer does not continue its replies: from now on every call is kept, and offers room for its reply.
            conn.requests.keeps_all = true;
            conn.refresh();
        }
        let out = conn.out_call(call);
        let spent = match error {
            ErrorBody::System => !cx.connect.retransmit || u32::from(out.refusals) >= cx.connect.reconnect_attempts,
            _ => out.retries >= MAX_RETRIES,
        };
        if spent || hopeless || gone {
            conn.proto.give_up(call);
            return self.failed(cx, conn, call, token, CallError::Transport(error), invalidated);
        }
        if error == ErrorBody::System {
            out.refusals = out.refusals.saturating_add(1);
        } else {
            out.retries += 1;
            cx.stats.calls_retransmitted += 1;
        }
        match out.exposure.take() {
            Some(index) => {
                let ending = Ending::again(token, call, error);
                self.conclude(cx, conn, index, invalidated, Some(ending));
            }
            None => self.send_again(cx, conn, call, error, ChunkMemory::new()),
        }
    }

    /// Queues a call again, with the resources that its refusal requires.
    pub(super) fn send_again<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        error: ErrorBody,
        mut memory: ChunkMemory,
    ) {
        if !conn.proto.calls().is_waiting(call) {
            // The call timed out, or was cancelled.
            return;
        }
        if error == ErrorBody::System {
            return self.put_off(cx, conn, call, memory);
        }
        let formed = self.form_larger(cx, conn, call, error, &mut memory);
        let out = conn.out_call(call);
        out.memory = memory.unless_empty();
        match formed {
            Ok(message) => {
                (out.message, out.exposure) = (Some(message), None);
                conn.proto.resend(call);
                cx.ready.add(conn);
            }
            Err(lacks @ CallError::NoReplyBuffer { .. }) => self.give_up_call(cx, conn, call, lacks),
            // The server refused the call before it ran, and this side has no buffer for all of it.
            Err(lacks @ (CallError::NoMemory { .. } | CallError::TooLong { .. }))
                if matches!(error, ErrorBody::ReadChunks { .. }) && conn.out_call(call).retries == 1 =>
            {
                self.give_up_call(cx, conn, call, lacks)
            }
            Err(_) => self.give_up_call(cx, conn, call, CallError::Transport(error)),
        }
    }

    /// Gives a call the form that its refusal requires; returns its message.
    fn form_larger<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        error: ErrorBody,
        memory: &mut ChunkMemory,
    ) -> Result<Buf, CallError> {
        let retries = conn.out_call(call).retries;
        let given = memory.get_or_new();
        let kept = conn.out_call(call).take_kept(cx).or_else(|| given.call.take());
        let message = kept.ok_or(CallError::Transport(error))?;
        let message = self.enlarge(cx, conn, given, &message, error, retries)?.unwrap_or(message);
        let out = conn.out_call(call);
        if let ErrorBody::ReplyResource { length_needed } = error {
            // A new connection would have to find this out again, and the call may run each time.
            let needed = (length_needed as usize).saturating_sub(ACCEPTED_REPLY_LEN);
            out.max_reply = out.max_reply.max(needed);
        }
        let max_reply = out.max_reply;
        let needed = HEADROOM_CHUNKS + message.len();
        let mut message = cx.roomy(message).ok_or_else(|| cx.lacks_buffer(needed))?;
        self.shape(cx, conn, &mut message, memory, max_reply, true)?;
        Ok(message)
    }

    /// Gives a call that waited for a reconnect a form for the new terms.
    ///
    /// # Errors
    /// It cannot be sent.
    pub(super) fn form_again<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
    ) -> Result<(), CallError> {
        let out = conn.out_call(call);
        let (message, memory, max_reply) = (out.message.take(), out.memory.take(), out.max_reply);
        let (mut memory, one_way) = (memory, out.empty_reply.is_some());
        // The chunks of its last form.
        let long = memory.get_mut().and_then(|memory| {
            memory.reply = None;
            memory.call.take()
        });
        let message = message.filter(|message| !message.is_empty()).or(long);
        let needed = HEADROOM_CHUNKS + message.as_ref().map_or(0, |message| message.len());
        let mut memory = memory.unless_empty();
        let formed = match message.and_then(|message| cx.roomy(message)) {
            None => Err(cx.lacks_buffer(needed)),
            Some(_) if one_way && conn.proto.terms().version == Version::V1 => Err(Defect::NotOneWay.into()),
            Some(mut message) => self.shape(cx, conn, &mut message, &mut memory, max_reply, !one_way).map(|()| message),
        };
        let out = conn.out_call(call);
        out.memory = memory;
        (out.message, out.retries) = (Some(formed?), 0);
        Ok(())
    }

    /// Allocates the resources that the refusal requires. Returns a new message if the call moves to a chunk.
    fn enlarge<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        memory: &mut Memory,
        message: &Buf,
        error: ErrorBody,
        retries: u8,
    ) -> Result<Option<Buf>, CallError> {
        match error {
            ErrorBody::ReplyResource { length_needed } => {
                if retries > 1 {
                    // The responder cannot use the Write chunks: all results become inline (version 2 §6.4.3).
                    memory.receive.clear();
                    memory.most_results = None;
                }
                let needed = (length_needed as usize).max(cx.config.wire.receive_size);
                memory.reply = Some(self.alloc_for(cx, conn, padded(needed)).map_err(CallError::of_reply)?);
                Ok(None)
            }
            ErrorBody::WriteResource { chunk_index, length_needed } => {
                let index = (chunk_index as usize).checked_sub(1).ok_or(CallError::Transport(error))?;
                let chunk = memory.receive.get_mut(index).ok_or(CallError::Transport(error))?;
                *chunk = self.alloc_for(cx, conn, length_needed as usize).map_err(CallError::of_reply)?;
                Ok(None)
            }
            ErrorBody::ReadChunks { .. } => {
                let total = message.len() + memory.send.iter().map(|(_, buf)| padded(buf.len())).sum::<usize>();
                let mut whole = self.alloc_for(cx, conn, total)?;
                unreduce(message, memory, &mut whole);
                memory.send.clear();
                // Even if it fits a message, or would be continued (version 2 §6.4.3).
                memory.call = Some(whole);
                Ok(Some(cx.copy_of(&[]).ok_or_else(|| cx.lacks_buffer(HEADROOM_CHUNKS))?))
            }
            _ => Err(CallError::Transport(error)),
        }
    }
}

/// Inserts the data of Read chunks at their positions, with XDR round-up.
fn unreduce(message: &[u8], memory: &Memory, whole: &mut [u8]) {
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

/// Number of segments for `len` bytes, at the peer's segment size.
#[inline]
pub(super) fn segments_of(len: usize, terms: &Terms) -> usize {
    let size = terms.segment_size as usize;
    if len <= size { usize::from(len > 0) } else { len.div_ceil(size) }
}

/// Chunk lists of memory before exposure.
///
/// # Errors
/// [`CallError::Invalid`] if they have more segments than this side, or the peer, handles.
#[inline(always)]
pub(super) fn measure(memory: Option<&Memory>, terms: &Terms) -> Result<ChunkCounts, CallError> {
    let Some(memory) = memory else { return Ok(ChunkCounts::default()) };
    let (mut counts, mut most) = (ChunkCounts::default(), 0);
    let mut count = |buf: &Buf| {
        let segments = segments_of(buf.len(), terms);
        most = segments.max(most);
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
    if most > MAX_SEGMENTS {
        return Err(Defect::ChunkSegments { segments: most, limit: MAX_SEGMENTS }.into());
    }
    if segments > limit { Err(Defect::HeaderSegments { segments, limit }.into()) } else { Ok(counts) }
}

/// Chunk lists of exposed memory.
pub(super) fn counts_of(exposure: &Exposure, terms: &Terms) -> ChunkCounts {
    let mut counts = ChunkCounts::default();
    for part in exposure.all() {
        let segments = segments_of(part.at.target.length as usize, terms);
        match part.place {
            Place::Read(_) => counts.reads += segments,
            Place::Write(_) => {
                (counts.writes, counts.write_segments) = (counts.writes + 1, counts.write_segments + segments)
            }
            Place::Reply => counts.reply = Some(segments),
        }
    }
    counts
}

impl Conn {
    /// Checks the chunks of a call: owner of the memory, emptiness, and positions. `message` is the reduced one.
    #[inline]
    fn check_memory(&self, memory: &Memory, message: &[u8]) -> Result<(), CallError> {
        let mine = self.requests.exposed.as_ref().map(|pool| pool.arena().id());
        let fits = |buf: &Buf| Some(buf.arena()) == mine && !buf.is_empty();
        // Position zero is the message itself. The others are in order, as is the chunks' data, and none is beyond the
        // end.
        let (mut earliest, mut end) = (4, message.len());
        for (position, buf) in &memory.send {
            if !fits(buf) {
                return Err(unfit(buf));
            }
            let (at, len) = (*position as usize, padded(buf.len()));
            if !at.is_multiple_of(4) || at < earliest || at > end {
                return Err(misplaced(*position, message));
            }
            (earliest, end) = (at + len, end + len);
        }
        match memory.receive.iter().find(|buf| !fits(buf)) {
            Some(buf) => Err(unfit(buf)),
            None => Ok(()),
        }
    }
}

/// Error of a buffer that cannot be a chunk.
#[cold]
fn unfit(buf: &Buf) -> CallError {
    if buf.is_empty() { Defect::EmptyChunk.into() } else { Defect::ForeignMemory.into() }
}

/// Error of an invalid Read chunk position, relative to the arguments as the caller gave it.
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
        let mut memory = Memory::default();
        memory.send.push((8, buf(b"abcde")));
        memory.send.push((20, buf(b"xyz!")));
        // Eight bytes, the first chunk up to 16, four bytes, the second chunk up to 24, the rest.
        let mut whole = [0xFF; 28];
        unreduce(b"head1234mid.tail", &memory, &mut whole);
        assert_eq!(&whole, b"head1234abcde\0\0\0mid.xyz!tail");
    }
}
