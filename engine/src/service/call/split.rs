//! A call in parts, for a handler that reads its arguments while it writes results.

use std::net::IpAddr;

use rpcrdma_mempool::Frozen;

use super::super::writer::ResultWriter;
use super::chunks::{ReadArguments, ResultChunk};
use super::{CallParts, CalledFrom, Caller, Message, NoResult, PROCEDURE, PROGRAM, Reply, ServerCall, VERSION};
use crate::proto::Refusal;

/// A call's origin and header, while its results are written.
#[derive(Clone, Copy, Debug)]
pub struct CallInfo<'a> {
    from: &'a CalledFrom,
    message: &'a Message,
    peer: Option<&'a str>,
    xid: u32,
}

impl<'a> CallInfo<'a> {
    /// RPC transaction identifier.
    #[must_use]
    pub fn xid(&self) -> u32 {
        self.xid
    }

    /// Program number.
    #[must_use]
    pub fn program(&self) -> u32 {
        self.message.word(PROGRAM)
    }

    /// Program version.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.message.word(VERSION)
    }

    /// Procedure number.
    #[must_use]
    pub fn procedure(&self) -> u32 {
        self.message.word(PROCEDURE)
    }

    /// Connection of the caller.
    #[must_use]
    pub fn caller(&self) -> Caller {
        self.from.caller
    }

    /// Credential of the caller: flavor and body (RFC 5531 §8.2).
    #[must_use]
    pub fn credential(&self) -> (u32, &'a [u8]) {
        self.message.credential()
    }

    /// Address of the caller's host, unauthenticated; `None` without addresses.
    ///
    /// The same for all connections of the host, across reconnects.
    #[must_use]
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.from.host
    }

    /// Authenticated name of the caller's host, if any; see [`auth`](crate::auth).
    ///
    /// It names the host, not the user: that one is in the [credential](Self::credential).
    #[must_use]
    pub fn peer_identity(&self) -> Option<&'a str> {
        self.peer
    }
}

/// What a call brought.
pub(crate) struct Incoming<'a> {
    /// Inline arguments.
    pub(crate) inline: &'a [u8],
    /// `None` without Read chunks.
    pub(crate) chunks: Option<&'a ReadArguments>,
}

/// Memory of a call's results.
pub(crate) struct Outgoing<'a> {
    reply: &'a mut Reply,
    results: &'a mut [ResultChunk],
    /// Most bytes of inline results.
    room: usize,
}

impl<'a> Outgoing<'a> {
    /// Most bytes of inline results that the reply can carry.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Memory of the inline results, uninitialized, and their length.
    #[inline(always)]
    pub(crate) fn inline(&mut self) -> (&mut [u8], &mut usize, Results<'_>) {
        let Reply { buf, at, len } = &mut *self.reply;
        let room = buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..)).unwrap_or_default();
        (room, len, Results { chunks: self.results })
    }

    /// The same memory, for longer.
    pub(crate) fn into_inline(self) -> &'a mut [u8] {
        let Reply { buf, at, .. } = self.reply;
        buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..)).unwrap_or_default()
    }

    /// The same, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Outgoing<'_> {
        Outgoing { reply: self.reply, results: self.results, room: self.room }
    }

    /// Whether the caller offers Write chunk `index`. An empty one requests an inline result, as does none.
    #[inline(always)]
    pub(crate) fn has_chunk(&self, index: usize) -> bool {
        self.results.get(index).is_some_and(ResultChunk::has_room)
    }

    /// Whether the caller offers Write chunks.
    #[inline(always)]
    pub(crate) fn has_chunks(&self) -> bool {
        !self.results.is_empty()
    }

    /// Writer of a Write chunk's result.
    pub(crate) fn into_writer(self, index: usize) -> Result<ResultWriter<'a>, NoResult> {
        self.results.get_mut(index).ok_or(NoResult::no_chunk(index))?.writer(index)
    }

    /// Sends the service's own memory as a result.
    pub(crate) fn share(&mut self, index: usize, bytes: Frozen) -> Result<(), NoResult> {
        self.results.get_mut(index).ok_or(NoResult::no_chunk(index))?.share(index, bytes)
    }
}

/// Write chunks of a call, while its inline results are written.
pub(crate) struct Results<'a> {
    chunks: &'a mut [ResultChunk],
}

impl Results<'_> {
    /// Whether item `index` goes into a Write chunk.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.chunks.get(index).is_some_and(ResultChunk::has_room)
    }

    /// Copies a result into a chunk.
    pub(crate) fn copy(&mut self, index: usize, bytes: &[u8]) -> Result<(), Refusal> {
        let result = self.chunks.get_mut(index).ok_or(NoResult::no_chunk(index))?;
        if bytes.is_empty() {
            result.truncate(0);
            return Ok(());
        }
        Ok(result.writer(index)?.put(bytes)?)
    }

    /// Sends the first `len` bytes of a chunk. If it holds fewer, returns their number.
    pub(crate) fn send(&mut self, index: usize, len: usize) -> Result<(), usize> {
        let result = self.chunks.get_mut(index).ok_or(0_usize)?;
        (len <= result.len).then(|| result.truncate(len)).ok_or(result.len)
    }

    /// Sends nothing in the chunks from `index` on.
    pub(crate) fn clear_from(&mut self, index: usize) {
        self.chunks.iter_mut().skip(index).for_each(|result| result.truncate(0));
    }
}

impl<T: ?Sized> ServerCall<T> {
    /// The call in parts. The room of the reply is needed where results may be written in it ahead.
    #[inline(always)]
    pub(crate) fn split(&mut self, needs_room: bool) -> (CallInfo<'_>, Incoming<'_>, Outgoing<'_>) {
        let room = if needs_room { self.reply_room() } else { 0 };
        let parts = &mut self.parts;
        let inline = parts.message.args();
        let (peer, chunks, results) = match parts.extras.get_mut() {
            None => (None, None, &mut [][..]),
            Some(extra) => {
                let (arguments, results) = extra.chunks.split();
                (extra.peer.as_deref(), (!arguments.is_empty()).then_some(arguments), results)
            }
        };
        let info = CallInfo { from: &parts.from, message: &parts.message, peer, xid: parts.xid };
        (info, Incoming { inline, chunks }, Outgoing { reply: &mut parts.reply, results, room })
    }

    /// Origin and header of the call.
    #[must_use]
    pub fn info(&self) -> CallInfo<'_> {
        let CallParts { from, message, extras, xid, .. } = &self.parts;
        CallInfo { from, message, peer: extras.get().and_then(|extra| extra.peer.as_deref()), xid: *xid }
    }

    /// What the call brought.
    pub(crate) fn incoming(&self) -> Incoming<'_> {
        let arguments = &self.parts.chunks().arguments;
        Incoming { inline: self.args(), chunks: (!arguments.is_empty()).then_some(arguments) }
    }
}
