//! How much of the pool one connection may hold: whatever there is, but of the last quarter of the buffers
//! that would do only what one call, or a few short ones, need. So a peer that takes no replies, and has been
//! given all that it may ask for, leaves something to each of the others
//! until its [deadline](super::progress) has come.
//!
//! What a connection holds is counted in calls: those that are being served, and those whose replies are not
//! known to have left. A call beyond the share waits, with nothing but the message that it came in, until its
//! own connection has come down to it. So does one beyond the connection's [RDMA Reads](super::reads). Nobody waits
//! behind it but those calls of its connection that need bulk memory, too: they keep their order.

use std::mem::take;

use rpcrdma_mempool::Buf;

use super::memory::{Waiting, release};
use super::replies::reply_room;
use super::{Responder, Served};
use crate::fabric::Fabric;
use crate::service::{OwnedCall, ResultMemory};
use crate::shard::clock::nanoseconds;
use crate::shard::conn::Conn;
use crate::shard::context::Context;

/// A pool is short when no more than this part of its buffers is free.
const LAST: usize = 4;
/// Calls that a connection may hold memory for while the pool is short: this part of what there is, or one.
const PART: usize = 64;

/// What is held back because its connection is beyond its share.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Calls that are held back, of all connections.
    held_back: usize,
}

impl Shares {
    /// Calls that are held back, of all connections.
    #[cfg(test)]
    pub(super) fn held_back(&self) -> usize {
        self.held_back
    }
}

/// Whether a connection that holds memory for so many calls, the one at hand among them, is beyond its share,
/// where `free` of `count` buffers would do.
fn is_beyond(held: usize, free: usize, count: usize) -> bool {
    is_short(free, count) && held > (count / PART).max(1)
}

/// Whether the last part is begun of so many buffers, of which so many are free.
#[inline(always)]
fn is_short(free: usize, count: usize) -> bool {
    free * LAST < count
}

impl Responder {
    /// A buffer of `len` bytes for a call, unless that must wait because of what its connection holds
    /// already.
    #[inline(always)]
    pub(super) fn alloc_in_share<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, len: usize) -> Option<Buf> {
        // The smallest that would do are almost always so many that nobody is beyond a share.
        let first = cx.pool.alloc_if(len, |free, count| !is_short(free, self.shared(cx, len, count)));
        first.or_else(|| self.alloc_unless_over_share(cx, conn, len))
    }

    #[inline(never)]
    fn alloc_unless_over_share<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, len: usize) -> Option<Buf> {
        if self.is_over_share(cx, conn, len) { None } else { cx.pool.alloc(len) }
    }

    /// Whether a call that needs a buffer of `len` bytes must wait because of what its connection holds
    /// already.
    fn is_over_share<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, len: usize) -> bool {
        Served::held(conn) > 1 && self.is_beyond_share(cx, conn, len)
    }

    /// The same, of a call that needs bulk memory: each one counts.
    #[inline(never)]
    pub(super) fn is_beyond_share<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, len: usize) -> bool {
        let (first, count) = cx.pool.first_room(len);
        let count = self.shared(cx, len, count);
        // Larger ones need not be counted where the smallest that would do are enough.
        let free = if is_short(first, count) { cx.pool.room(len).0 } else { first };
        is_beyond(Served::held(conn), free, count)
    }

    /// Of `count` buffers that hold `len` bytes, those that are there to be shared: not the posted Receives.
    #[inline(always)]
    fn shared<F: Fabric>(&self, cx: &Context<F>, len: usize, count: usize) -> usize {
        let posted = if len <= cx.sizing.configured_capacity() { cx.receives.held() } else { 0 };
        count.saturating_sub(posted)
    }

    /// Whether a call must wait until its connection holds less, or behind those that do. What is to be read
    /// for it is in `self.fetch`.
    #[inline(always)]
    pub(super) fn must_wait<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &OwnedCall) -> bool {
        (!conn.served.held_back.is_empty() && self.is_behind(cx, conn, call)) || self.exceeds_share(cx, conn, call)
    }

    /// Goes on with the calls that wait, as what they wait for may have come home by now; true if one that
    /// has come after them must not go past those that are left.
    #[cold]
    fn is_behind<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &OwnedCall) -> bool {
        let fetch = take(&mut self.fetch);
        self.resume(cx, conn);
        self.fetch = fetch;
        let bulk = !self.fetch.is_empty() || !call.results.is_empty();
        // What must not wait would be refused.
        bulk && !conn.served.held_back.is_empty() && !self.holds_what_others_wait_for(cx, call)
    }

    /// Whether a call is beyond the share of its connection, or beyond its Reads. What is to be read for it is in
    /// `self.fetch`.
    #[inline(always)]
    fn exceeds_share<F: Fabric>(&self, cx: &Context<F>, conn: &Conn, call: &OwnedCall) -> bool {
        if self.exceeds_reads(&cx.config, conn) {
            return true;
        }
        let bulk = self.fetch.iter().map(|&(_, part)| part.length as usize).max();
        let Some(services) = &self.services else { return false };
        if call.message.is_none() {
            // It is yet to come, and nothing else is known.
            return bulk.is_some_and(|len| self.is_beyond_share(cx, conn, cx.chunk_room(len)));
        }
        let entry = services.entry(call.entry);
        let pool = entry.result_memory == ResultMemory::Pool;
        let results = call.results.iter().filter(|_| pool).map(|result| result.capacity as usize).max();
        match bulk.max(results.map(|len| len.min(entry.binding.results.max_len))) {
            Some(len) if len > 0 => self.is_beyond_share(cx, conn, cx.chunk_room(len)),
            _ => self.is_over_share(cx, conn, reply_room(call, entry).1),
        }
    }

    /// A call is held back until its connection is within its share; what is to be read for it is in
    /// `self.fetch`.
    #[cold]
    pub(super) fn hold_back<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Box<OwnedCall>) {
        let by_reads = self.waits_for_reads(&cx.config, conn);
        let fetch = take(&mut self.fetch);
        release(&mut call);
        // Each has the buffer of a message. One may wait on every connection, or none would get on.
        let most = (cx.config.message_buffers / 2).max(2);
        let crowded = conn.served.held_back.len() >= most / 2 || self.shares.held_back >= most;
        if (!by_reads && (crowded && !conn.served.held_back.is_empty() || self.holds_what_others_wait_for(cx, &call)))
            || !self.could_hold(cx, &call, &fetch)
        {
            return self.refuse_for_memory(cx, conn, call, &fetch);
        }
        match by_reads {
            true => cx.stats.read_waits += 1,
            false => cx.stats.memory_waits += 1,
        }
        self.shares.held_back += 1;
        conn.served.held_back.push_back(Waiting { call, fetch });
        cx.request_completion(conn);
        cx.schedule.control_now();
    }

    /// Goes on with the held back calls of a connection, and with replies that wait.
    #[cold]
    pub(in crate::shard) fn resume<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        self.resume_replies(cx, conn);
        while let Some(Waiting { call, fetch }) = conn.served.held_back.pop_front() {
            self.shares.held_back -= 1;
            let before = std::mem::replace(&mut self.fetch, fetch);
            if self.exceeds_share(cx, conn, &call) {
                let fetch = std::mem::replace(&mut self.fetch, before);
                conn.served.held_back.push_front(Waiting { call, fetch });
                self.shares.held_back += 1;
                // What it waits for may have gone out unheard.
                return cx.request_completion(conn);
            }
            self.start(cx, conn, call);
            cx.ready.add(conn);
        }
    }

    /// Part of step 5 of a turn: others may have brought memory home.
    pub(super) fn resume_all<F: Fabric>(&mut self, cx: &mut Context<F>) {
        if self.shares.held_back + self.unwritten == 0 {
            return;
        }
        cx.with_each(|cx, conn| {
            if conn.served.is_gated() {
                self.resume(cx, conn);
            }
        });
        if self.shares.held_back + self.unwritten > 0 {
            let soon = cx.clock.read() + nanoseconds(cx.config.control_interval);
            cx.schedule.wake_by(soon);
        }
    }

    /// The calls of a connection that is over wait no more.
    pub(super) fn drop_held_back(&mut self, conn: &mut Conn) {
        self.shares.held_back -= conn.served.held_back.len();
        for waiting in conn.served.held_back.drain(..) {
            self.boxes.put(waiting.call);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_quarter_goes_round() {
        assert!(!is_beyond(500, 25, 100), "there is enough");
        assert!(is_beyond(2, 24, 100));
        assert!(!is_beyond(1, 0, 100), "the only call of a connection waits for memory, not for its share");
        assert!(!is_beyond(10, 0, 640) && is_beyond(11, 0, 640), "a few, where there are many");
        assert!(!is_beyond(9, 0, 0), "there is none such");
    }
}
