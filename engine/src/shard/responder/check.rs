//! Checks of peers' calls, and the answers to those that do not run.

use crate::proto::binding::reduction_allowed;
use crate::proto::{LIMITS, Refusal};
use crate::service::{Arrived, Call, Chunks, LocalProcedure, REFUSAL_LEN};
use crate::shard::admission::Deficit;
use crate::shard::connection::Conn;
use crate::wire::rpc::{self, AcceptStat, RejectStat, ReplyBody};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ErrorBody, ReadSegment, SEGMENT_LEN, Segment, SingleChunks, Version, View};

/// Answer to a call that does not run.
pub(in crate::shard) enum CallRefusal {
    /// No RPC call: no answer.
    NotACall,
    /// An RPC error.
    Rpc(ReplyBody<'static>),
    /// A transport error.
    Transport(ErrorBody),
    /// A transport error, as its chunks do not match the declaration of this entry.
    Undeclared { entry: usize, error: ErrorBody },
    /// A transport error, as the RPC message of `bytes` in a Read chunk exceeds `limit`.
    TooLong { bytes: u64, limit: u64 },
    /// ERR_SYSTEM, with the cause in the log.
    System(InternalError),
}

impl From<InternalError> for CallRefusal {
    fn from(error: InternalError) -> Self {
        Self::System(error)
    }
}

impl From<Refusal> for CallRefusal {
    fn from(refusal: Refusal) -> Self {
        Self::Rpc(reply_body(refusal))
    }
}

/// Cause of ERR_SYSTEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) enum InternalError {
    /// The connection drains.
    Draining,
    /// The call needs more than the shard's whole pool.
    BeyondPool(Deficit),
    /// No buffers are free, and the call cannot wait. Has the missing buffer, where known.
    NoBuffers(Option<Deficit>),
    /// The received parts of the call were dropped.
    PartsDropped,
    /// The data of its RDMA Reads was lost.
    DataLost,
    /// The duplicate request cache cannot tell whether the call ran before.
    CacheFull,
    /// The workers stopped before one took the call.
    NoWorkers,
}

impl InternalError {
    /// Whether it is temporary, or another server may help.
    pub(super) fn is_temporary(self) -> bool {
        !matches!(self, Self::BeyondPool(_) | Self::DataLost)
    }

    /// Text for the log, the same for all such calls, and the remedy.
    pub(super) fn texts(self) -> (&'static str, String) {
        let (what, why) = match self {
            Self::Draining => ("calls to a server that drains", "server is draining"),
            Self::BeyondPool(deficit) => {
                return ("calls that need more than all buffers", format!("exceeds all buffers: {deficit}"));
            }
            Self::NoBuffers(deficit) => {
                let unknown = || "too few free buffers (memory.long_buffers, memory.message_buffers)".to_owned();
                let missing = deficit.map_or_else(unknown, |deficit| deficit.to_string());
                let why = format!("no free buffer, and it may not wait or waited for 1 s: {missing}");
                return ("calls for which there was no memory", why);
            }
            Self::PartsDropped => (
                "calls in parts for which there was no memory",
                "its parts were dropped, as such messages have half of the buffers (memory.long_buffers)",
            ),
            Self::CacheFull => (
                "calls for which the reply cache had no room",
                "duplicate request cache full of running calls, or of this client's (DuplicateRequestCacheConfig::entries)",
            ),
            Self::NoWorkers => ("calls that met no worker", "workers have stopped"),
            Self::DataLost => ("calls whose memory did not come home", "memory of its RDMA Reads was not returned"),
        };
        (what, why.to_owned())
    }
}

/// Wire form of a handler's refusal (RFC 5531 §9).
fn reply_body(refusal: Refusal) -> ReplyBody<'static> {
    ReplyBody::accepted(match refusal {
        Refusal::ProgramUnavailable => AcceptStat::ProgUnavail,
        Refusal::ProgramMismatch { low, high } => AcceptStat::ProgMismatch { low, high },
        Refusal::ProcedureUnavailable => AcceptStat::ProcUnavail,
        Refusal::GarbageArguments => AcceptStat::GarbageArgs,
        Refusal::RpcMismatch { low, high } => {
            return ReplyBody::Denied(RejectStat::RpcMismatch { low, high });
        }
        Refusal::Authentication(stat) => return ReplyBody::Denied(RejectStat::AuthError(stat)),
        // With or without a cause. Refusals outside RPC do not get here.
        _ => AcceptStat::SystemErr,
    })
}

/// Checks the chunks of a call against the declaration. `inline` bytes of its RPC message are outside chunks; the
/// arguments start at `args_at`.
#[inline(never)]
pub(super) fn check_chunks(
    credential: rpc::OpaqueAuth<'_>,
    entry: &LocalProcedure,
    (args_at, inline): (usize, usize),
    chunks: &Chunks,
) -> Result<(), ErrorBody> {
    if credential.flavor != rpc::Flavor::None.code() {
        check_reduction(&credential, entry, chunks)?;
    }
    check_reads(chunks.reads(), entry, args_at, inline)?;
    check_writes(entry, credential.flavor, chunks.results())
}

/// Reads the chunks of a call whose header has a known layout.
#[inline]
pub(super) fn read_single(
    call: &mut Call<Arrived>,
    conn: &Conn,
    chunks: &SingleChunks,
    message: &[u8],
) -> Result<(), CallRefusal> {
    let write = chunks.write(message).map(|segment| [segment]);
    take_lists(call, conn, chunks.read(message), write, None::<[Segment; 0]>)
}

/// Reads the chunk lists of a call, if any. Every length, count and position is bounded here before use.
pub(super) fn read_lists(call: &mut Call<Arrived>, conn: &Conn, view: &View<'_>) -> Result<(), CallRefusal> {
    if !view.has_chunks() {
        // A handle to invalidate would name no chunk.
        call.set_head(call.xid(), 0);
        return Ok(());
    }
    view.check_limits(&LIMITS).map_err(CallRefusal::Transport)?;
    let writes = view.writes().map(|chunk| chunk.segments());
    let reply = view.reply_chunk().map(|chunk| chunk.segments());
    take_lists(call, conn, view.reads(), writes, reply)
}

/// Copies chunk lists within the limits.
#[inline]
fn take_lists<W: IntoIterator<Item = Segment>>(
    call: &mut Call<Arrived>,
    conn: &Conn,
    reads: impl IntoIterator<Item = ReadSegment>,
    writes: impl IntoIterator<Item = W>,
    reply: Option<impl IntoIterator<Item = Segment>>,
) -> Result<(), CallRefusal> {
    let chunks = call.begin_chunks();
    chunks.take_reads(reads);
    writes.into_iter().for_each(|chunk| chunks.take_write(chunk));
    if let Some(chunk) = reply {
        chunks.take_reply(chunk);
    }
    let returned = chunks.returned();
    check_returned(&returned, conn.served.inline_room as usize).map_err(CallRefusal::Transport)?;
    if conn.proto.terms().version == Version::V1 {
        // It has no field for the handle to invalidate (RFC 8797 §4.1). Of several handles the requester may keep some:
        // the Linux client has one for the padding of all its reads, for the whole connection.
        let only = chunks.only_handle();
        call.set_head(call.xid(), only);
    } else if !call.chunks().has_handle(call.inv_handle()) {
        // It is not the call's (version 2 §6.3.3.2), so it stays valid.
        call.set_head(call.xid(), 0);
    }
    Ok(())
}

/// Checks the caller's receive size, in bytes of RPC message. It must hold at least a refusal, and a header that
/// returns its Write list and Reply chunk.
fn check_returned(returned: &ChunkCounts, inline_room: usize) -> Result<(), ErrorBody> {
    let room = inline_room.saturating_sub(REFUSAL_LEN);
    if returned.encoded_len() <= room {
        return Ok(());
    }
    let chunks = returned.writes + usize::from(returned.reply.is_some());
    let fixed = returned.encoded_len() - SEGMENT_LEN * returned.segments();
    Err(ErrorBody::Segments { max: (room.saturating_sub(fixed) / SEGMENT_LEN / chunks) as u32 })
}

/// Under RPCSEC_GSS integrity or privacy nothing is reduced, in call or reply (version 2 §10.2.2).
#[cold]
fn check_reduction(credential: &rpc::OpaqueAuth<'_>, entry: &LocalProcedure, chunks: &Chunks) -> Result<(), ErrorBody> {
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
pub(super) fn check_position_zero(chunks: &Chunks, longest: u64) -> Result<(), CallRefusal> {
    match chunks.message_bytes() {
        0 => Err(CallRefusal::Transport(ErrorBody::BadXdr)),
        bytes if bytes > longest => Err(CallRefusal::TooLong { bytes, limit: longest }),
        _ => Ok(()),
    }
}

fn check_reads(asked: &[ReadSegment], entry: &LocalProcedure, args_at: usize, inline: usize) -> Result<(), ErrorBody> {
    // Earliest start of the next chunk, and bytes that earlier chunks have inserted before it.
    let (mut earliest, mut inserted) = (args_at as u64, 0u64);
    let (mut rest, mut chunks) = (asked, 0);
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
        // Its padding may be included (RFC 8166 §3.4.5.2).
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
        (chunks, most) if chunks > most => Err(ErrorBody::WriteChunks { max: most as u32 }),
        _ => Ok(()),
    }
}
