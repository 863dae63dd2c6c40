//! Calls that end for their caller before their reply: timed out, or cancelled.

use super::Requester;
use super::chunks::ChunkMemory;
use super::outcome::{FailedCall, Sink};
use crate::fabric::Fabric;
use crate::proto::{CallError, CallId};
use crate::shard::conn::Conn;
use crate::shard::context::Context;

impl Requester {
    /// Ends calls whose deadline has passed.
    #[inline(never)]
    pub(in crate::shard) fn expire<F: Fabric>(&mut self, cx: &mut Context<F>, now: u64) {
        let mut next = u64::MAX;
        let mut unsent = Vec::new();
        let mut expire = |cx: &mut Context<F>, conn: &mut Conn| {
            while let Some((call, token, error)) = conn.proto.handle_timeout(now) {
                let (sink, memory) = Self::abandon(conn, call);
                match error {
                    CallError::TimedOut { sent: false } => unsent.push(((sink, memory), token, error)),
                    _ => self.deliver(cx, sink, token, Err(FailedCall::new(error, memory))),
                }
            }
            // The credits that they lack may be those of calls that expired with them.
            let lack =
                if unsent.is_empty() { None } else { conn.proto.calls().lack_of_credits(conn.proto.credits(), now) };
            for ((sink, memory), token, error) in unsent.drain(..) {
                self.deliver(cx, sink, token, Err(FailedCall::new(lack.unwrap_or(error), memory)));
            }
            next = next.min(conn.proto.calls().next_deadline());
        };
        cx.with_each(&mut expire);
        for conn in cx.conns.take_parked() {
            cx.lend(conn, &mut expire);
        }
        self.next_deadline = next;
    }

    /// Cancels a call. Its memory returns when the peer can no longer reach it.
    pub(in crate::shard) fn cancel<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId) {
        if let Some((token, error)) = conn.proto.cancel(call, cx.clock.read()) {
            let (sink, memory) = Self::abandon(conn, call);
            self.deliver(cx, sink, token, Err(FailedCall::new(error, memory)));
        }
    }

    /// Ends a call for its caller before its reply. The record stays, with its exposure, until the reply arrives or the
    /// connection closes: the peer may be about to revoke a window by Send With Invalidate, and a second revocation
    /// would break the connection.
    fn abandon(conn: &mut Conn, call: CallId) -> (Sink, ChunkMemory) {
        let out = conn.out_call(call);
        let sink = std::mem::replace(&mut out.sink, Sink::Polled);
        // Present unless exposed.
        let memory = out.memory.take();
        out.forget();
        (sink, memory)
    }
}
