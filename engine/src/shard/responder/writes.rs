//! Limit of one connection's outstanding bytes of RDMA Writes.
//!
//! It is [`limits.max_write_bytes`](crate::config::LimitsConfig::max_write_bytes). A reply beyond it waits, with its
//! results, until others have completed; replies without Writes overtake it. The rule is that of [RDMA
//! Reads](super::reads).

use super::reads::is_beyond;
use super::replies::reply_form;
use super::{Responder, Served};
use crate::config::Config;
use crate::fabric::Fabric;
use crate::proto::ReplyForm;
use crate::service::{Call, Replying};
use crate::shard::conn::Conn;
use crate::shard::context::Context;

/// Bytes of a reply's RDMA Writes.
fn bytes_of(conn: &Conn, call: &Call<Replying>) -> usize {
    let chunks = call.chunks();
    let len = call.reply_len();
    let long = chunks.reply().is_some() && matches!(reply_form(conn, call, len), ReplyForm::ReplyChunk);
    chunks.result_bytes() + if long { len } else { 0 }
}

/// Bytes of outstanding and queued RDMA Writes.
fn under_way(conn: &Conn) -> usize {
    let Served { replies, .. } = &conn.served;
    let queued: usize = replies.iter().flatten().map(|call| bytes_of(conn, call)).sum();
    conn.sends.written() + queued
}

fn must_wait(config: &Config, conn: &Conn, call: &Call<Replying>) -> bool {
    let bytes = bytes_of(conn, call);
    bytes > 0 && is_beyond(config.limits.max_write_bytes, under_way(conn), bytes)
}

impl Responder {
    /// Queues a reply that must wait, for other Writes or behind waiting replies; otherwise returns it.
    pub(super) fn hold_reply<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Replying>,
    ) -> Option<Call<Replying>> {
        let behind = || !conn.served.unwritten.is_empty() && bytes_of(conn, &call) > 0;
        if cx.config.limits.max_write_bytes.is_none() || !(behind() || must_wait(&cx.config, conn, &call)) {
            return Some(call);
        }
        cx.stats.write_waits += 1;
        self.unwritten += 1;
        conn.served.unwritten.push_back(call);
        cx.request_completion(conn);
        cx.schedule.control_now();
        None
    }

    /// Continues waiting replies after others may have completed.
    pub(super) fn resume_replies<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        while let Some(call) = conn.served.unwritten.front() {
            if must_wait(&cx.config, conn, call) {
                // The awaited Sends may have completed unsignaled.
                return cx.request_completion(conn);
            }
            let Some(call) = conn.served.unwritten.pop_front() else { return };
            self.unwritten -= 1;
            self.answer(cx, conn, call);
            cx.ready.add(conn);
        }
    }

    /// Drops the waiting replies of a closed connection.
    pub(super) fn drop_unwritten(&mut self, conn: &mut Conn) {
        self.unwritten -= conn.served.unwritten.len();
        conn.served.unwritten.drain(..).for_each(|call| self.boxes.put(call));
    }
}
