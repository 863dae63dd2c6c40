//! Last states of a served call: after its handler or a refusal, up to the reply.

use rpcrdma_mempool::{ArenaId, Buf};

use super::chunks::Chunks;
use super::state::{Answered, Call, Refused, Replying};
use super::{CallParts, OwnedCall, Reply};
use crate::fabric::ReceivedBuf;
use crate::proto::Refusal;
use crate::service::REFUSAL_LEN;
use crate::wire::rpc::{self, ACCEPTED_REPLY_LEN, AcceptStat, OpaqueAuth, ReplyBody, ReplyHeader};

/// RPC message of a reply, or its unsent rest.
#[derive(Debug)]
pub(crate) struct ReplyMessage {
    pub(crate) buf: Buf,
    /// Offset and length in the buffer. Its transport header fits in front of it.
    pub(crate) at: usize,
    pub(crate) len: usize,
    /// Whether its call needs nothing else.
    pub(crate) plain: bool,
}

impl Call<Answered> {
    /// Keeps its reply for a retransmission.
    #[inline(never)]
    pub(super) fn remember(&mut self) {
        let CallParts { reply: Reply { buf, at, len }, outcome, extras, .. } = self.parts();
        let Some(extra) = extras.get_mut() else { return };
        let Some(claim) = extra.claim.take() else { return };
        match outcome {
            Ok(()) => {
                let results = buf.as_mut().and_then(|buf| buf.full_mut().get(*at..*at + *len));
                claim.finish(extra.verifier.get(), results.unwrap_or_default());
            }
            // Its effects are unknown.
            Err(Refusal::SystemError | Refusal::Failed { .. } | Refusal::NoReply) => drop(claim),
            Err(_) => claim.forget(),
        }
    }

    /// Refusal instead of results, if any.
    #[inline(always)]
    pub(crate) fn outcome(&self) -> Result<(), Refusal> {
        self.outcome
    }

    /// Completes and takes the reply of an ordinary call; otherwise returns the call. Results, if any, are in its
    /// message, which begins at byte `at`, after a header without verifier.
    #[inline(always)]
    pub(crate) fn complete_plain(mut self, at: usize) -> Result<(Call<Replying>, ReplyMessage), Self> {
        let CallParts { xid, reply, outcome, extras, .. } = self.parts();
        if outcome.is_err() || !extras.leave_reply_plain() || reply.at != at + ACCEPTED_REPLY_LEN {
            return Err(self);
        }
        let Some(mut buf) = reply.buf.take() else { return Err(self) };
        if let Some(header) = buf.full_mut().get_mut(at..reply.at) {
            rpc::emit_accepted_success(header, *xid);
        }
        let message = ReplyMessage { buf, at, len: reply.len + ACCEPTED_REPLY_LEN, plain: true };
        Ok((self.becomes(), message))
    }

    /// Text of its handler's panic, if any.
    #[cold]
    pub(crate) fn take_panic(&mut self) -> Option<Box<str>> {
        self.parts().extras.get_mut()?.panic.take()
    }

    /// Arenas of results in the handler's memory.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = ArenaId> {
        self.chunks().arenas()
    }

    /// Bytes of its arguments and results, if it is timed.
    pub(crate) fn note_bytes(&mut self) {
        let parts = self.parts();
        let Some(extra) = parts.extras.get_mut() else { return };
        let Some(stamp) = &mut extra.stamp else { return };
        stamp.bytes_in = parts.message.args().len() as u64 + extra.chunks.read_bytes();
        if parts.outcome.is_ok() {
            stamp.bytes_out = (parts.reply.len + extra.chunks.result_bytes()) as u64;
        }
    }

    /// Whether its reply has a verifier that is not AUTH_NONE.
    #[inline(always)]
    pub(crate) fn has_verifier(&self) -> bool {
        self.extras.get().is_some_and(|extra| extra.verifier.is_some())
    }

    /// Bytes of the RPC header of its reply.
    #[inline(always)]
    pub(crate) fn header_len(&self) -> usize {
        CallParts::header_len(self)
    }

    /// Moves its results to byte `at` of the reply's buffer, or of a longer one, unless they are that far back. False
    /// without memory.
    #[cold]
    pub(crate) fn move_results(&mut self, at: usize, alloc: impl FnOnce(usize) -> Option<Buf>) -> bool {
        let reply = &mut self.parts().reply;
        let (results, end) = (reply.at..reply.at + reply.len, at + reply.len);
        if at <= reply.at {
            return true;
        }
        match &mut reply.buf {
            Some(buf) if end <= buf.capacity() => buf.full_mut().copy_within(results, at),
            Some(buf) => {
                let Some(mut longer) = alloc(end) else { return false };
                longer[at..].copy_from_slice(&buf.full_mut()[results]);
                reply.buf = Some(longer);
            }
            None => return false,
        }
        reply.at = at;
        true
    }

    /// Writes its RPC reply header in front of its results, if it fits.
    #[inline(always)]
    pub(crate) fn complete(mut self) -> Call<Replying> {
        let header_len = self.header_len();
        let CallParts { xid, reply: Reply { buf, at, len }, extras, .. } = self.parts();
        let end = *at;
        (*at, *len) = (end - header_len, *len + header_len);
        if let Some(header) = buf.as_mut().and_then(|buf| buf.full_mut().get_mut(*at..end)) {
            match extras.get().map(|extra| &extra.verifier).filter(|verifier| verifier.is_some()) {
                None => _ = rpc::emit_accepted_success(header, *xid),
                Some(verifier) => emit_verified(header, *xid, verifier.get()),
            }
        }
        self.becomes()
    }
}

#[inline(never)]
fn emit_verified(out: &mut [u8], xid: u32, verifier: OpaqueAuth<'_>) {
    let body = ReplyBody::Accepted { verifier, stat: AcceptStat::Success };
    let written = ReplyHeader { xid, body }.emit(out);
    debug_assert_eq!(written, Ok(out.len()));
}

impl Call<Refused> {
    /// Writes its reply, without results, at byte `at` of the first buffer with room. That is the one of its reply, of
    /// its message, or a new one.
    ///
    /// # Errors
    /// Out of memory.
    #[cold]
    pub(crate) fn compose(
        mut self,
        body: ReplyBody<'_>,
        at: usize,
        alloc: impl FnOnce(usize) -> Option<Buf>,
    ) -> Result<Call<Replying>, Self> {
        let CallParts { xid, message, reply, extras, .. } = self.parts();
        if let Some(extra) = extras.get_mut() {
            extra.chunks.results.iter_mut().for_each(|result| result.len = 0);
        }
        let verifier = extras.get().map_or(OpaqueAuth::NONE, |extra| extra.verifier.get());
        let body = match body {
            ReplyBody::Accepted { stat, .. } => ReplyBody::Accepted { verifier, stat },
            denied @ ReplyBody::Denied(_) => denied,
        };
        let header = ReplyHeader { xid: *xid, body };
        let needed = at + header.encoded_len();
        if reply.buf.as_ref().is_none_or(|buf| buf.capacity() < needed) {
            // Its own message is no longer needed.
            let message = message.buf.take().filter(|message| message.capacity() >= needed);
            reply.buf =
                message.map(ReceivedBuf::into_buf).or_else(|| alloc(at + header.encoded_len().max(REFUSAL_LEN)));
        }
        let written = reply.buf.as_mut().and_then(|buf| header.emit(buf.full_mut().get_mut(at..)?).ok());
        let Some(len) = written else { return Err(self) };
        (reply.at, reply.len) = (at, len);
        Ok(self.becomes())
    }
}

impl Call<Replying> {
    /// Bytes of the RPC message of its reply.
    pub(crate) fn reply_len(&self) -> usize {
        self.reply.len
    }

    /// Bytes of its reply, and of its results in chunks.
    pub(crate) fn bytes(&self) -> usize {
        self.reply.len + self.chunks().result_bytes()
    }

    /// Takes the message of its reply, to be sent.
    #[inline(always)]
    pub(crate) fn take_reply(&mut self) -> Option<ReplyMessage> {
        let plain = !self.extras.has_any();
        let Reply { buf, at, len } = &mut self.parts().reply;
        Some(ReplyMessage { buf: buf.take()?, at: *at, len: *len, plain })
    }

    /// Stores its reply, which has to wait.
    #[inline(always)]
    pub(crate) fn put_reply(&mut self, ReplyMessage { buf, at, len, .. }: ReplyMessage) {
        self.parts().reply = Reply { buf: Some(buf), at, len };
    }

    /// Takes the buffer of its message, which is no longer needed.
    #[inline(always)]
    pub(crate) fn take_message(&mut self) -> Option<ReceivedBuf> {
        self.parts().message.buf.take()
    }

    /// Ends the call: returns its message, and its memory for reuse.
    #[inline(always)]
    pub(crate) fn end_with_message(mut self) -> (Option<ReceivedBuf>, Box<OwnedCall>) {
        (self.take_message(), self.end())
    }

    /// Its chunk lists, for writing.
    #[inline(always)]
    pub(crate) fn chunks_mut(&mut self) -> Option<&mut Chunks> {
        self.parts().extras.get_mut().map(|extra| &mut extra.chunks)
    }
}
