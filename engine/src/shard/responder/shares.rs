//! Shares of the pool, by connection and host.
//!
//! Peers that receive no replies, or answer no RDMA Reads, leave memory to others until their
//! [deadline](crate::shard::progress). Of the last quarter of the suitable buffers a connection gets the needs of one
//! call, or of a few short ones. Of the last eighth a host gets that much for all its connections.
//!
//! Held memory is counted in calls: running ones, and those whose replies have not completed. For memory of chunks only
//! calls with chunk lists count: a long call without any keeps nobody from bulk memory. A call beyond the share, or
//! beyond the connection's [RDMA Reads](super::reads), waits with only its message. Later calls of the connection that
//! need bulk memory wait behind it. The number of waiting calls causes no refusal: each has a promised receive, and the
//! promise is renewed only after the call has ended.

use std::collections::HashMap;

use rpcrdma_mempool::Buf;

use super::lines::Waiting;
use super::parties::Parties;
use super::replies::reply_room;
use super::{Responder, Served};
use crate::fabric::Fabric;
use crate::service::{MAX_CHUNKS, ResultMemory, Unready};
use crate::shard::clock::nanoseconds;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::host::{Party, is_short_for_hosts};
use crate::wire::Version;

/// A pool is short for a connection when less than this part of its buffers is free.
const LAST: usize = 4;
/// Divisor of the buffers: calls that a holder may have while the pool is short, at least one.
const PART: usize = 64;

/// Nanoseconds between two counts of hosts, for each connection: a multiple of their cost.
const RECOUNT: u64 = 1000;

/// Calls held back because their connection or host is beyond its share.
#[derive(Debug)]
pub(super) struct Shares {
    /// Calls away, which keep their memory beyond the end of their connections.
    pub(super) parties: Parties,
    /// Held back calls, of all connections.
    held_back: usize,
    /// Calls by host at the last count, and those admitted since.
    hosts: HashMap<Party, Held>,
    /// Time of the next count, in nanoseconds.
    recount: u64,
}

/// Calls that hold memory.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    calls: usize,
    /// Those that hold memory of chunks.
    with_chunks: usize,
}

/// Needs of a call that count for its share.
#[derive(Clone, Copy, Debug)]
struct Request {
    /// Bytes of the longest buffer.
    len: usize,
    /// Bytes of the longest permitted buffer.
    longest: usize,
    /// Buffers of bulk memory, or one.
    count: usize,
    /// Refused instead of waiting.
    refused: bool,
    /// Memory of chunks.
    chunks: bool,
}

impl Request {
    fn bulk(len: usize, count: usize) -> Self {
        Self { len, longest: usize::MAX, count, refused: false, chunks: true }
    }

    /// Whether the smallest suitable buffers are plenty, so that no share applies.
    #[inline(always)]
    fn meets_plenty<F: Fabric>(&self, cx: &Context<F>) -> bool {
        let (first, fitting) = cx.pool.first_room(self.len);
        // All but one count as allocated.
        !is_short(first.saturating_sub(self.count - 1), shared(cx, self.len, fitting))
    }
}

/// Calls that a holder may have in a short pool with `count` suitable buffers.
fn share(count: usize) -> usize {
    (count / PART).max(1)
}

/// Whether the free buffers are within the last part, in which connections have shares.
#[inline(always)]
fn is_short(free: usize, count: usize) -> bool {
    free * LAST < count
}

/// Of `count` buffers that hold `len` bytes, the number to share: without the posted receives.
#[inline(always)]
pub(super) fn shared<F: Fabric>(cx: &Context<F>, len: usize, count: usize) -> usize {
    let posted = if len <= cx.sizing.configured_capacity() { cx.receives.held() } else { 0 };
    count.saturating_sub(posted)
}

impl Shares {
    pub(super) fn new(most_away: usize) -> Self {
        Self { parties: Parties::new(most_away), held_back: 0, hosts: HashMap::new(), recount: 0 }
    }

    /// Held back calls, of all connections.
    pub(super) fn held_back(&self) -> usize {
        self.held_back
    }

    /// Allocates a reply buffer of `len` bytes, unless the call must wait for the share of its connection or host.
    #[inline(always)]
    pub(super) fn alloc<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, len: usize) -> Option<Buf> {
        // The smallest suitable buffers are almost always plenty, so that no share applies.
        let plenty = |free, count| !is_short(free, count) || !is_short(free, shared(cx, len, count));
        let first = cx.pool.alloc_if(len, |free, count| !cx.awaits_some() && plenty(free, count));
        first.or_else(|| self.alloc_unless_beyond(cx, conn, len))
    }

    #[inline(never)]
    fn alloc_unless_beyond<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, len: usize) -> Option<Buf> {
        let longest = cx.longest_for_reply(len);
        let request = Request { len, longest, count: 1, refused: false, chunks: false };
        // Awaited buffers go to the calls in their order.
        let in_turn = !cx.awaits_some() || !cx.is_awaited(cx.class_of(len));
        let may = in_turn && !self.is_beyond(cx, conn, request);
        may.then(|| cx.pool.alloc_within(len, request.longest)).flatten()
    }

    /// Whether a call with such needs must wait for the share of its connection or host.
    #[inline(never)]
    fn is_beyond<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, request: Request) -> bool {
        let Request { len, longest, count: needed, refused, chunks } = request;
        // If the smallest suitable buffers suffice, the larger ones need no count.
        if request.meets_plenty(cx) {
            return false;
        }
        let (free, count) = cx.pool.room_within(len, longest);
        let (free, count) = (free.saturating_sub(needed - 1), shared(cx, len, count));
        // A call that may not wait would be refused in spite of free buffers: the last eighth is reserved for it.
        if !is_short(free, count) || (refused && !is_short_for_hosts(free, count)) {
            return false;
        }
        let share = share(count);
        let dead = self.parties.dead_of(conn, chunks);
        // A new connection of a process has its share with the closed ones. A host has more for all of them.
        let own_dead = if chunks && conn.host().is_some() { 0 } else { dead };
        // This call is included.
        Served::held(conn, chunks) + own_dead > share
            || (is_short_for_hosts(free, count)
                && conn.host().is_some()
                && self.host_is_beyond(cx, conn, share.saturating_sub(dead - own_dead), chunks))
    }

    /// Whether a host has as many calls as its share. If not, counts one more.
    #[cold]
    fn host_is_beyond<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, share: usize, chunks: bool) -> bool {
        let host = conn.party();
        let now = cx.clock.read();
        if now >= self.recount {
            self.hosts.clear();
            let mut connections = 1;
            cx.with_each(|cx, other| {
                connections += 1;
                self.count(cx, other);
            });
            self.count(cx, conn);
            self.recount = now.saturating_add(RECOUNT * connections);
            // This call is not admitted yet.
            self.hosts.entry(host).and_modify(|held| {
                held.calls = held.calls.saturating_sub(1);
                held.with_chunks = held.with_chunks.saturating_sub(usize::from(chunks));
            });
        }
        let held = self.hosts.entry(host).or_default();
        let beyond = (if chunks { held.with_chunks } else { held.calls }) >= share;
        held.calls += usize::from(!beyond);
        held.with_chunks += usize::from(!beyond && chunks);
        beyond
    }

    /// Adds the calls of a connection to those of its host.
    fn count<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        let mut held = [false, true].map(|chunks| conn.served.held_calls(&conn.proto, chunks));
        if conn.sends.under_way() > 0 && cx.fabric.holds_sends(conn.qp()) {
            held[0] += conn.sends.under_way() as usize;
            held[1] += conn.sends.writers_under_way() as usize;
            // Some may have completed unsignaled.
            cx.request_completion(conn);
        }
        let host = self.hosts.entry(conn.party()).or_default();
        host.calls += held[0];
        host.with_chunks += held[1];
    }
}

impl Responder {
    /// Whether a call must wait: until its connection holds less, or behind waiting calls.
    #[inline(always)]
    pub(super) fn must_wait<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &Unready) -> bool {
        (!conn.served.held_back.is_empty() && self.is_behind(cx, conn, call)) || self.exceeds_share(cx, conn, call)
    }

    /// Continues waiting calls after buffers may have been freed. True if a later call must not overtake the others.
    #[cold]
    fn is_behind<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &Unready) -> bool {
        self.resume(cx, conn);
        let bulk = call.fetches() || call.chunks().results() > 0;
        // A call that must not wait would be refused.
        bulk && !conn.served.held_back.is_empty() && !call.is_put_together()
    }

    /// Whether a call is beyond the share of its connection, or beyond its Reads.
    #[inline(always)]
    fn exceeds_share<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &Unready) -> bool {
        if Self::exceeds_reads(&cx.config, conn, call) {
            return true;
        }
        let chunks = call.chunks();
        let bulk = chunks.longest_read();
        let Some(services) = &self.services else { return false };
        let Some(entry) = call.known_entry() else {
            // Not read yet; its other needs are unknown.
            return bulk > 0 && self.shares.is_beyond(cx, conn, Request::bulk(cx.chunk_room(bulk), 1));
        };
        let entry = services.entry(entry);
        let results = match entry.result_memory {
            ResultMemory::Pool => chunks.largest_capacity().min(entry.binding.results.max_len),
            ResultMemory::Handler => 0,
        };
        let request = match bulk.max(results) {
            0 => {
                let (_, len) = reply_room(call, entry);
                Request { longest: cx.longest_for_reply(len), chunks: false, ..Request::bulk(len, 1) }
            }
            len => Request::bulk(cx.chunk_room(len), 2 * MAX_CHUNKS),
        };
        // Almost always buffers are plenty, and no other check is needed.
        !request.meets_plenty(cx) && self.exceeds_share_of(cx, conn, call, request)
    }

    #[inline(never)]
    fn exceeds_share_of<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: &Unready,
        request: Request,
    ) -> bool {
        let count = (call.chunks().chunks_to_fetch().count() + call.chunks().results()).max(1);
        let refused = call.is_put_together();
        self.shares.is_beyond(cx, conn, Request { count, refused, ..request })
    }

    /// Holds a call back until its connection is within its share.
    #[cold]
    pub(super) fn hold_back<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        let by_reads = Self::waits_for_reads(&cx.config, conn, &call);
        let may_not_wait = match by_reads {
            true => self.never_fits(cx, &call).is_some() || Self::is_beyond_promise(cx, conn),
            false => self.may_not_wait(cx, conn, &call),
        };
        if may_not_wait {
            return self.refuse_for_memory(cx, conn, call);
        }
        match by_reads {
            true => cx.stats.read_waits += 1,
            false => cx.stats.memory_waits += 1,
        }
        self.shares.held_back += 1;
        let now = cx.clock.read();
        conn.served.held_back.push_back(Waiting::new(call, now));
        cx.request_completion(conn);
        cx.schedule.control_now();
    }

    /// Whether a connection has more calls than promised receives while others lack receives. Version 1 tolerates this.
    pub(super) fn is_beyond_promise<F: Fabric>(cx: &Context<F>, conn: &Conn) -> bool {
        let beyond = conn.proto.inbound().len() > conn.proto.credits().credit_limit() as usize;
        beyond && conn.proto.terms().version == Version::V1 && !cx.receives.suffice()
    }

    /// Continues a connection's held back calls and waiting replies.
    #[cold]
    pub(in crate::shard) fn resume<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        self.resume_replies(cx, conn);
        while let Some(waiting) = conn.served.held_back.pop_front() {
            self.shares.held_back -= 1;
            if self.exceeds_share(cx, conn, &waiting.call) {
                conn.served.held_back.push_front(waiting);
                self.shares.held_back += 1;
                // The awaited Sends may have completed unsignaled.
                return cx.request_completion(conn);
            }
            self.start(cx, conn, waiting.call);
            cx.ready.add(conn);
        }
    }

    /// Part of step 5 of a turn: other connections may have freed memory.
    pub(super) fn resume_all<F: Fabric>(&mut self, cx: &mut Context<F>) {
        if self.shares.held_back + self.unwritten == 0 {
            return;
        }
        cx.with_each(|cx, conn| {
            if conn.served.is_gated() {
                self.resume(cx, conn);
                self.tell_of_held_back(cx, conn);
            }
        });
        if self.shares.held_back + self.unwritten > 0 {
            let soon = cx.clock.read() + nanoseconds(cx.config.poll.control_interval);
            cx.schedule.wake_by(soon);
        }
    }

    /// Logs a long wait of a held back call.
    pub(super) fn tell_of_held_back<F: Fabric>(&self, cx: &mut Context<F>, conn: &mut Conn) {
        let now = cx.clock.read();
        if !conn.served.held_back.front_mut().is_some_and(|first| first.is_to_be_told(now)) {
            return;
        }
        let Some(first) = conn.served.held_back.front() else { return };
        let peer = conn.accepted().map_or("", |accepted| accepted.host());
        match Self::exceeds_reads(&cx.config, conn, &first.call) {
            true => {
                let why =
                    "its connection has as many RDMA Reads under way as `limits.max_reads` and `max_read_bytes` allow";
                Self::tell_of_wait(cx, peer, &first.call, self.waiting(), why);
            }
            false => {
                let lack = self.waits_for(cx, &first.call).lack(cx);
                let why = format_args!("few are free, and its connection, or its host, has its share of them: {lack}");
                Self::tell_of_wait(cx, peer, &first.call, self.waiting(), why);
            }
        }
    }

    /// Drops the held back calls of a closed connection.
    pub(super) fn drop_held_back(&mut self, conn: &mut Conn) {
        self.shares.held_back -= conn.served.held_back.len();
        for waiting in conn.served.held_back.drain(..) {
            self.boxes.put_unready(waiting.call);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_quarter_goes_round() {
        assert!(!is_short(25, 100) && is_short(24, 100));
        assert!(!is_short(0, 0), "there is none such");
        assert_eq!([1, 100, 640].map(share), [1, 1, 10], "a few, where there are many");
    }
}
