//! Sends messages in parts (version 2 §4.5.2).

use rpcrdma_mempool::Buf;

use super::connection::Conn;
use super::context::Context;
use crate::config::{HEADROOM_PLAIN, SMALL_BUFFER};
use crate::fabric::Fabric;
use crate::proto::{CallId, Form, Outgoing};
use crate::service::{Call, Replying};
use crate::wire::ChunkCounts;

/// Payload bytes of the shortest parts, which use the smallest buffers. The last part may be shorter.
const LEAST_CONTINUED: usize = SMALL_BUFFER - HEADROOM_PLAIN;

/// Owner of an outgoing continued message.
#[derive(Debug)]
pub(super) enum MessageOwner {
    /// A call of this side, and its exposure.
    Call(CallId, Option<u32>),
    /// The reply to a peer's call.
    Reply(Call<Replying>),
}

/// An outgoing continued message.
#[derive(Debug)]
pub(super) struct Continuation {
    pub(super) owner: MessageOwner,
    /// Its window is the unsent rest.
    pub(super) rest: Buf,
    /// Start and length of the message in the buffer.
    pub(super) whole: (usize, usize),
    /// Bytes of the last part's header.
    pub(super) last_header: usize,
}

impl Continuation {
    /// The whole `message`, for the last part's header.
    pub(super) fn new(owner: MessageOwner, message: Buf, last_header: usize) -> Self {
        let whole = (message.start(), message.len());
        Self { owner, rest: message, whole, last_header }
    }
}

pub(super) enum NextPart {
    Sent,
    /// No memory: retry later.
    NoMemory,
    /// The last part: the message's owner sends it.
    Last(Continuation),
}

impl<F: Fabric> Context<F> {
    /// Sends the first part of a message that is too long for one.
    #[cold]
    pub(super) fn start_continuation(&mut self, conn: &mut Conn, continuation: Continuation) {
        debug_assert!(continuation.last_header + continuation.rest.len() > conn.proto.terms().send_inline_threshold);
        self.transmit_part(conn, continuation);
    }

    /// Sends one more part, unless it is the last.
    pub(super) fn continue_message(&mut self, conn: &mut Conn) -> NextPart {
        let Some(mut continuation) = conn.continuation.take() else { return NextPart::Sent };
        if let MessageOwner::Call(call, Some(index)) = continuation.owner
            && !conn.exposes(call, index)
        {
            // Answered before it was complete: its exposed memory is the caller's again. The rest still has to be sent:
            // otherwise the peer would take the next message for it.
            continuation.owner = MessageOwner::Call(call, None);
            continuation.last_header = conn.proto.credits().header_len(&ChunkCounts::default());
        }
        if continuation.last_header + continuation.rest.len() <= conn.proto.terms().send_inline_threshold {
            return NextPart::Last(continuation);
        }
        match self.transmit_part(conn, continuation) {
            true => NextPart::Sent,
            false => NextPart::NoMemory,
        }
    }

    /// Sends a part other than the last. False without memory.
    fn transmit_part(&mut self, conn: &mut Conn, mut continuation: Continuation) -> bool {
        let (limit, left) = (conn.proto.terms().send_inline_threshold, continuation.rest.len());
        // The last part is never empty, and parts end at XDR words.
        let room = (limit - conn.proto.credits().header_len(&ChunkCounts::default())) & !3;
        let longest = if room < left { room } else { (left / 2) & !3 };
        if longest == 0 {
            // The peer has reduced its receive size: nothing fits after the last header.
            self.unsendable(conn, "the rest of a message");
            conn.continuation = Some(continuation);
            return true;
        }
        let out = match &continuation.owner {
            MessageOwner::Call(call, _) => Outgoing::Call(*call),
            MessageOwner::Reply(call) => Outgoing::Reply(call.id()),
        };
        let sent = self.alloc_continuation(longest).is_some_and(|(mut buf, take)| {
            let end = HEADROOM_PLAIN + take;
            let bytes = continuation.rest.get(..take).unwrap_or_default();
            buf.full_mut()[HEADROOM_PLAIN..end].copy_from_slice(bytes);
            match conn.proto.write_header(out, &Form::PART, buf.full_mut(), HEADROOM_PLAIN) {
                Some(start) => {
                    buf.set_window(start, end - start);
                    conn.sends.push_send(buf, None, self.config.debug.signal_every);
                }
                None => self.unsendable(conn, "a part of a message"),
            }
            let start = continuation.rest.start();
            continuation.rest.set_window(start + take, left - take);
            true
        });
        conn.continuation = Some(continuation);
        if sent {
            self.ready.add(conn);
        } else {
            // It still goes before other messages.
            conn.proto.write_header(out, &Form::PART, &mut [], 0);
            self.park_for_buffer(conn);
        }
        sent
    }

    /// Allocates a buffer for a part of `longest` bytes, or of fewer without memory: messages that wait behind this one
    /// may hold all other buffers.
    fn alloc_continuation(&mut self, longest: usize) -> Option<(Buf, usize)> {
        let mut take = longest;
        loop {
            match self.memory.pool.alloc(HEADROOM_PLAIN + take) {
                Some(buf) => return Some((buf, take)),
                None if take > LEAST_CONTINUED => take = (take / 2).max(LEAST_CONTINUED) & !3,
                None => break,
            }
        }
        self.stats.pool_empty += 1;
        None
    }
}
