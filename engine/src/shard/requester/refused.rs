//! Calls refused by ERR_SYSTEM: the peer drains, or lacks memory. With `connect.retransmit` they are retransmitted.

use super::Requester;
use super::chunks::ChunkMemory;
use crate::fabric::Fabric;
use crate::proto::{CallError, CallId};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::ErrorBody;

impl Requester {
    /// Keeps a refused call: for the next connection if this one closes first, as in a drain, or for this one.
    pub(super) fn put_off<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: CallId,
        memory: ChunkMemory,
    ) {
        let out = conn.out_call(call);
        out.memory = memory.unless_empty();
        let due = cx.clock.read() + cx.backoff(u32::from(out.refusals) - 1);
        cx.schedule.wake_by(due);
        self.put_off.push((due, conn.qp(), call));
    }

    /// Part of step 5 of a turn: retransmits the refused calls that are due, if their connection is the same.
    pub(in crate::shard) fn resend_refused<F: Fabric>(&mut self, cx: &mut Context<F>) {
        if self.put_off.is_empty() {
            return;
        }
        let now = cx.clock.read();
        for (due, qp, call) in std::mem::take(&mut self.put_off) {
            if due > now {
                cx.schedule.wake_by(due);
                self.put_off.push((due, qp, call));
            } else if let Some(conn) = cx.conns.take(qp) {
                cx.lend(conn, |cx, conn| self.resend(cx, conn, call));
            }
        }
    }

    fn resend<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: CallId) {
        if !conn.proto.calls().is_waiting(call) {
            return;
        }
        let out = conn.out_call(call);
        out.message = out.take_kept(cx);
        if self.form_again(cx, conn, call).is_err() {
            return self.give_up_call(cx, conn, call, CallError::Transport(ErrorBody::System));
        }
        cx.stats.calls_retransmitted += 1;
        conn.proto.resend(call);
        cx.ready.add(conn);
    }
}
