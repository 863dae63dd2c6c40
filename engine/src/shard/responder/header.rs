//! Decoder of peers' calls: RPC header and chunk lists, checked against the declaration.

use std::borrow::Cow;
use std::ops::Range;

use super::Responder;
use super::needs::Lack;
use crate::proto::binding::reduction_allowed;
use crate::proto::{Incoming, LIMITS, Lists, Refusal};
use crate::service::{Arrived, Call, Chunks, Header, LocalProcedure, REFUSAL_LEN};
use crate::shard::conn::Conn;
use crate::wire::rpc::{self, AcceptStat, RejectStat, ReplyBody};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ErrorBody, Head, ReadSegment, SEGMENT_LEN, Segment, Version, View};

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
    System(Trouble),
}

/// Cause of ERR_SYSTEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) enum Trouble {
    /// The connection drains.
    Draining,
    /// It exceeds the shard's whole pool.
    NeverFits(Lack),
    /// No buffers now, and it cannot wait. Has the missing buffers, where known.
    NoBuffers(Option<Lack>),
    /// Its received parts were dropped.
    NoParts,
    /// Its Read data was lost.
    Lost,
    /// The duplicate request cache cannot tell whether it ran before.
    CacheFull,
    /// The workers stopped before one took it.
    NoWorkers,
}

impl Trouble {
    /// Whether it is temporary, or another server may help.
    pub(super) fn passes(self) -> bool {
        !matches!(self, Self::NeverFits(_) | Self::Lost)
    }

    /// Text for the log, the same for all such calls, and the remedy.
    pub(super) fn words(self) -> (&'static str, Cow<'static, str>) {
        let (what, why) = match self {
            Self::Draining => ("calls to a server that drains", "server is draining"),
            Self::NeverFits(lack) => {
                return ("calls that need more than all buffers", format!("exceeds all buffers: {lack}").into());
            }
            Self::NoBuffers(lack) => {
                let lack = lack.map_or_else(
                    || "too few free buffers (memory.long_buffers, memory.message_buffers)".to_owned(),
                    |lack| lack.to_string(),
                );
                let why = format!("no free buffer, and it may not wait or waited for 1 s: {lack}");
                return ("calls for which there was no memory", why.into());
            }
            Self::NoParts => (
                "calls in parts for which there was no memory",
                "its parts were dropped, as such messages have half of the buffers (memory.long_buffers)",
            ),
            Self::CacheFull => (
                "calls for which the reply cache had no room",
                "duplicate request cache full of running calls, or of this client's (DuplicateRequestCacheConfig::entries)",
            ),
            Self::NoWorkers => ("calls that met no worker", "workers have stopped"),
            Self::Lost => ("calls whose memory did not come home", "memory of its RDMA Reads was not returned"),
        };
        (what, why.into())
    }
}

/// Wire form of a handler's refusal (RFC 5531 §9).
pub(super) fn reply_body(refusal: Refusal) -> ReplyBody<'static> {
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

/// Offsets of program, version and procedure in the RPC message of a call.
const NAME: Range<usize> = 12..24;

/// A procedure, as in the RPC header of a call.
pub(super) struct Found {
    name: [u8; 12],
    entry: usize,
}

impl Found {
    /// Index of the procedure's entry in the services.
    pub(super) fn entry(&self) -> usize {
        self.entry
    }
}

impl Responder {
    /// Decodes the RPC header of a call without chunks in this message, if it is ordinary: AUTH_NONE, and the procedure
    /// called last. `None` for any other call, which needs a [full decode](Self::read_rpc).
    #[inline(always)]
    pub(super) fn read_again(&self, head: &Head, message: &[u8]) -> Option<Header> {
        let message = message.get(head.len..)?;
        let header = rpc::AnonymousCall::read(message)?;
        let last = self.last.as_ref()?;
        let again = header.xid == head.xid && message.get(NAME)? == last.name;
        again.then_some(Header { entry: last.entry, len: rpc::AnonymousCall::LEN })
    }

    /// Decodes the RPC header and chunk lists of a call in this message, and checks them against the declaration. Every
    /// length, count and position is bounded here before use.
    #[inline(always)]
    pub(in crate::shard) fn read(
        &mut self,
        conn: &Conn,
        incoming: &Incoming,
        message: &[u8],
        call: &mut Call<Arrived>,
    ) -> Result<Header, CallRefusal> {
        call.set_head(incoming.head.xid, incoming.head.inv_handle);
        match incoming.lists {
            Lists::None => {}
            Lists::Single(chunks) => {
                let write = chunks.write.map(|segment| [segment]);
                take_lists(call, conn, chunks.read, write, None::<[Segment; 0]>)?;
            }
            Lists::Checked(header) => read_lists(conn, &header.view(message), call)?,
        }
        self.read_rpc(message.get(incoming.head.len..).unwrap_or_default(), call)
    }

    /// Decodes the RPC message of a call, and checks its chunks against the declaration.
    #[inline(always)]
    pub(super) fn read_rpc(&mut self, message: &[u8], call: &Call<Arrived>) -> Result<Header, CallRefusal> {
        // Most headers have a known layout and length.
        match rpc::AnonymousCall::read(message) {
            Some(header) => self.take_header(&header.into(), rpc::AnonymousCall::LEN, message, call),
            None => self.read_named(message, call),
        }
    }

    /// As above, with a credential.
    #[inline(never)]
    fn read_named(&mut self, message: &[u8], call: &Call<Arrived>) -> Result<Header, CallRefusal> {
        let (header, len) = rpc::CallHeader::parse(message).map_err(|error| {
            // The XIDs differ, whatever else is wrong, or the message has none (RFC 8166 §4.5.2, version 2 §6.4.1).
            match message.first_chunk().map(|xid| u32::from_be_bytes(*xid)) {
                Some(xid) if xid == call.xid() => error.answer().map_or(CallRefusal::NotACall, CallRefusal::Rpc),
                _ => CallRefusal::Transport(ErrorBody::BadXdr),
            }
        })?;
        self.take_header(&header, len, message, call)
    }

    /// Checks a call against the RPC header of its message, of `len` bytes, which precedes the arguments.
    #[inline(always)]
    fn take_header(
        &mut self,
        header: &rpc::CallHeader<'_>,
        len: usize,
        message: &[u8],
        call: &Call<Arrived>,
    ) -> Result<Header, CallRefusal> {
        if header.xid != call.xid() {
            // RFC 8166 §4.1: they are equal; otherwise the caller could not match a reply.
            return Err(CallRefusal::Transport(ErrorBody::BadXdr));
        }
        let Some(services) = &self.services else { return Err(CallRefusal::NotACall) };
        let found = services.find(header.program, header.version, header.procedure);
        let entry = found.map_err(|refusal| CallRefusal::Rpc(reply_body(refusal)))?;
        if call.returns() || call.fetches() {
            check_chunks(header.credential, services.entry(entry), (len, message.len()), call.chunks())
                .map_err(|error| CallRefusal::Undeclared { entry, error })?;
        }
        let name = message.get(NAME).and_then(<[u8]>::first_chunk);
        self.last = name.map(|&name| Found { name, entry });
        self.ran.add(entry);
        Ok(Header { entry, len })
    }
}

/// Checks the chunks of a call against the declaration. `inline` bytes of its RPC message are outside chunks; the
/// arguments start at `args_at`.
#[inline(never)]
fn check_chunks(
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

/// Copies the chunk lists of a checked call, if any.
#[inline(never)]
pub(super) fn read_lists(conn: &Conn, view: &View<'_>, call: &mut Call<Arrived>) -> Result<(), CallRefusal> {
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
#[inline(always)]
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

#[inline(always)]
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

#[inline(always)]
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
