//! How many bytes the RDMA Writes of one connection's replies may have under way
//! ([`limits.max_write_bytes`](crate::config::LimitsConfig::max_write_bytes)). A reply beyond that waits, with its
//! results, until others are known to have left; those that write nothing go past it. The rule is that of [RDMA
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

/// Bytes that the RDMA Writes of a reply carry.
fn bytes_of(conn: &Conn, call: &Call<Replying>) -> usize {
    let chunks = call.chunks();
    let len = call.reply_len();
    let long = chunks.reply().is_some() && matches!(reply_form(conn, call, len), ReplyForm::ReplyChunk);
    chunks.result_bytes() + if long { len } else { 0 }
}

/// Bytes that are being written, or are about to be.
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
    /// A reply that must wait for others, or behind those that do, waits; else it is given back.
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

    /// Goes on with the replies that wait, as others may have left by now.
    pub(super) fn resume_replies<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        while let Some(call) = conn.served.unwritten.front() {
            if must_wait(&cx.config, conn, call) {
                // What it waits for may have gone out unheard.
                return cx.request_completion(conn);
            }
            let Some(call) = conn.served.unwritten.pop_front() else { return };
            self.unwritten -= 1;
            self.answer(cx, conn, call);
            cx.ready.add(conn);
        }
    }

    /// The replies of a connection that is over wait no more.
    pub(super) fn drop_unwritten(&mut self, conn: &mut Conn) {
        self.unwritten -= conn.served.unwritten.len();
        conn.served.unwritten.drain(..).for_each(|call| self.boxes.put(call));
    }
}
