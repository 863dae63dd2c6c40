//! Messages that go out in parts (version 2 §4.5.2).

use rpcrdma_mempool::Buf;

use super::Shard;
use super::conn::{Conn, Parts};
use super::shape::counts_of;
use crate::config::{HEADROOM_CHUNKS, HEADROOM_PLAIN, SMALL_BUFFER};
use crate::fabric::Fabric;
use crate::proto::Outgoing;
use crate::service::ServerCall;
use crate::wire::ChunkCounts;

/// Bytes of the shortest parts, but for the last: what the smallest buffers hold.
const LEAST_PART: usize = SMALL_BUFFER - HEADROOM_PLAIN;

impl<F: Fabric> Shard<F> {
    /// Sends the first part of a call or reply; its window is what goes in parts.
    #[cold]
    pub(super) fn start_parts(
        &mut self,
        conn: &mut Conn,
        of: Outgoing,
        message: Buf,
        exposure: Option<u32>,
        call: Option<Box<ServerCall>>,
        receives_ok: bool,
    ) {
        let last_header = match &call {
            Some(call) => super::replying::reply_header_len(&conn.proto, call),
            None => call_header(conn, exposure),
        };
        if let (Outgoing::Call(call), Some(_)) = (of, exposure) {
            let slot = conn.proto.call_slot(call);
            conn.calls[slot].exposure = exposure;
        }
        let whole = (message.start(), message.len());
        conn.parts = Some(Parts { of, message, whole, exposure, call, last_header });
        self.next_part(conn, receives_ok);
    }

    /// Sends one more part. False if there was no memory for it: it is tried again in the next turn.
    pub(super) fn next_part(&mut self, conn: &mut Conn, receives_ok: bool) -> bool {
        let Some(mut parts) = conn.parts.take() else { return true };
        if let (Outgoing::Call(call), Some(index)) = (parts.of, parts.exposure)
            && !conn.exposes(call, index)
        {
            // It was answered before it was complete: what it exposed is others' now. The rest still goes
            // out, or what follows would be taken for it.
            (parts.exposure, parts.last_header) = (None, call_header(conn, None));
        }
        let limit = conn.proto.terms().send_inline;
        let left = parts.message.len();
        if parts.last_header + left <= limit {
            self.last_part(conn, parts, receives_ok);
            return true;
        }
        // The last part is never empty, and parts end where XDR words do.
        let room = (limit - conn.proto.header_len(&ChunkCounts::default())) & !3;
        let longest = if room < left { room } else { (left / 2) & !3 };
        if longest == 0 {
            // The peer has come to receive less since it began: nothing of it fits behind the last header.
            self.unsendable(conn, "the rest of a message");
            conn.parts = Some(parts);
            return true;
        }
        let sent = self.alloc_part(longest).is_some_and(|(mut buf, take)| {
            let end = HEADROOM_PLAIN + take;
            let bytes = parts.message.get(..take).unwrap_or_default();
            buf.full_mut()[HEADROOM_PLAIN..end].copy_from_slice(bytes);
            match conn.proto.emit_part(parts.of, receives_ok, buf.full_mut(), HEADROOM_PLAIN) {
                Some(start) => {
                    buf.set_window(start, end - start);
                    conn.sends.push_send(buf, None, self.config.signal_every);
                }
                None => self.unsendable(conn, "a part of a message"),
            }
            let start = parts.message.start();
            parts.message.set_window(start + take, left - take);
            true
        });
        conn.parts = Some(parts);
        conn.proto.hold_queue();
        Self::make_ready(&mut self.ready, conn);
        sent
    }

    /// A buffer for a part of so many bytes, or of fewer if there is none: what waits behind this message may
    /// hold all the others.
    fn alloc_part(&mut self, longest: usize) -> Option<(Buf, usize)> {
        let mut take = longest;
        loop {
            match self.pool.alloc(HEADROOM_PLAIN + take) {
                Some(buf) => return Some((buf, take)),
                None if take > LEAST_PART => take = (take / 2).max(LEAST_PART) & !3,
                None => break,
            }
        }
        self.stats.pool_empty += 1;
        None
    }

    fn last_part(&mut self, conn: &mut Conn, mut parts: Parts, receives_ok: bool) {
        if let Some(call) = parts.call {
            let at = (parts.message.start(), parts.message.len());
            let returns = call.returns;
            return self.transmit_reply_message(conn, call, parts.message, at, returns, receives_ok);
        }
        let Outgoing::Call(call) = parts.of else { return };
        // It may have to be sent again: so the message itself stays here, if there is memory for the rest of
        // it.
        if conn.proto.is_under_way(call)
            && let Some(last) = self.copy_with(parts.last_header.max(HEADROOM_CHUNKS), &parts.message)
        {
            let whole = std::mem::replace(&mut parts.message, last);
            conn.keep_whole(call, whole, parts.whole);
        }
        match parts.exposure {
            Some(index) => self.transmit_exposed(conn, call, parts.message, index, receives_ok),
            None => self.transmit_rest(conn, call, parts.message, receives_ok),
        }
    }
}

/// Whether a call is too long for one message.
#[cold]
pub(super) fn starts_parts(conn: &Conn, message: &Buf, exposure: Option<u32>) -> bool {
    call_header(conn, exposure) + message.len() > conn.proto.terms().send_inline
}

/// Bytes of a call's header.
fn call_header(conn: &Conn, exposure: Option<u32>) -> usize {
    let exposure = exposure.and_then(|index| conn.exposures.get(index));
    let chunks = exposure.map_or(ChunkCounts::default(), |exposure| counts_of(exposure, conn.proto.terms()));
    conn.proto.header_len(&chunks)
}
