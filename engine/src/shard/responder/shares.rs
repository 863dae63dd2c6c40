//! How much of the pool one peer may hold: whatever there is, but of the last quarter of the buffers that would do a
//! connection gets only what one call, or a few short ones, need, and of the last eighth a host gets no more with all
//! its connections. So peers that take no replies, or answer no RDMA Reads, and have been given all that they may ask
//! for, leave something to each of the others until their [deadline](crate::shard::progress) has come.
//!
//! What is held is counted in calls: those that are being served, and those whose replies are not known to have left. A
//! call beyond the share waits, with nothing but the message that it came in, until its own connection, or its host, has
//! come down to it. So does one beyond the connection's [RDMA Reads](super::reads). Nobody waits behind it but those
//! calls of its connection that need bulk memory, too: they keep their order. However many wait, none is refused because
//! others do: the message of each is in a Receive that its connection was promised, and the promise is not renewed before
//! the call has ended.

use std::collections::HashMap;

use rpcrdma_mempool::Buf;

use super::lines::Waiting;
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
/// Calls that one may hold memory for while the pool is short: this part of what there is, or one.
const PART: usize = 64;

/// Nanoseconds for each connection until hosts are counted again: some times what it takes.
const RECOUNT: u64 = 1000;

/// What is held back because its connection, or its host, is beyond its share.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Calls that are held back, of all connections.
    held_back: usize,
    /// Calls that hosts hold memory for, as they were counted last, and those that were let through since.
    hosts: HashMap<Party, usize>,
    /// When they are to be counted again, in nanoseconds.
    recount: u64,
}

/// What a call needs, as far as its share is concerned.
#[derive(Clone, Copy, Debug)]
struct Request {
    /// Bytes of the longest buffer.
    len: usize,
    /// Bytes of the longest that it may have.
    longest: usize,
    /// Buffers of bulk memory, or one.
    count: usize,
    /// It is refused where it would have to wait.
    refused: bool,
}

impl Request {
    fn bulk(len: usize, count: usize) -> Self {
        Self { len, longest: usize::MAX, count, refused: false }
    }

    /// Of the smallest that would do there are so many that nobody is beyond a share.
    #[inline(always)]
    fn meets_plenty<F: Fabric>(&self, cx: &Context<F>) -> bool {
        let (first, fitting) = cx.pool.first_room(self.len);
        // Those beside one are as good as taken.
        !is_short(first.saturating_sub(self.count - 1), shared(cx, self.len, fitting))
    }
}

/// Calls that one may hold memory for where the pool is short, which has `count` buffers that would do.
fn share(count: usize) -> usize {
    (count / PART).max(1)
}

/// Whether the last part for connections is begun of so many buffers, of which so many are free.
#[inline(always)]
fn is_short(free: usize, count: usize) -> bool {
    free * LAST < count
}

/// Of `count` buffers that hold `len` bytes, those that are there to be shared: not the posted Receives.
#[inline(always)]
pub(super) fn shared<F: Fabric>(cx: &Context<F>, len: usize, count: usize) -> usize {
    let posted = if len <= cx.sizing.configured_capacity() { cx.receives.held() } else { 0 };
    count.saturating_sub(posted)
}

impl Shares {
    /// Calls that are held back, of all connections.
    pub(super) fn held_back(&self) -> usize {
        self.held_back
    }

    /// A buffer of `len` bytes for the reply of a call, unless that must wait because of what its connection, or its host, holds
    /// already.
    #[inline(always)]
    pub(super) fn alloc<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, len: usize) -> Option<Buf> {
        // The smallest that would do are almost always so many that nobody is beyond a share.
        let plenty = |free, count| !is_short(free, count) || !is_short(free, shared(cx, len, count));
        let first = cx.pool.alloc_if(len, |free, count| !cx.awaits_some() && plenty(free, count));
        first.or_else(|| self.alloc_unless_beyond(cx, conn, len))
    }

    #[inline(never)]
    fn alloc_unless_beyond<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, len: usize) -> Option<Buf> {
        let request = Request { len, longest: cx.longest_for_reply(len), count: 1, refused: false };
        // What others wait for is got in turn.
        let in_turn = !cx.awaits_some() || !cx.is_awaited(cx.class_of(len));
        let may = in_turn && !self.is_beyond(cx, conn, request);
        may.then(|| cx.pool.alloc_within(len, request.longest)).flatten()
    }

    /// Whether a call that needs such memory must wait because of what its connection, or its host, holds already.
    #[inline(never)]
    fn is_beyond<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, request: Request) -> bool {
        let Request { len, longest, count: needed, refused } = request;
        // Larger ones need not be counted where the smallest that would do are enough.
        if request.meets_plenty(cx) {
            return false;
        }
        let (free, count) = cx.pool.room_within(len, longest);
        let (free, count) = (free.saturating_sub(needed - 1), shared(cx, len, count));
        // Who may not wait would be refused, though there is some: for him the last eighth is kept.
        if !is_short(free, count) || (refused && !is_short_for_hosts(free, count)) {
            return false;
        }
        let share = share(count);
        // The call at hand is among them.
        Served::held(conn) > share
            || (is_short_for_hosts(free, count) && conn.host().is_some() && self.host_is_beyond(cx, conn, share))
    }

    /// Whether a host holds memory for so many calls already. If not, one more is counted.
    #[cold]
    fn host_is_beyond<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, share: usize) -> bool {
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
            // It is not let through yet.
            self.hosts.entry(host).and_modify(|held| *held = held.saturating_sub(1));
        }
        let held = self.hosts.entry(host).or_default();
        let beyond = *held >= share;
        *held += usize::from(!beyond);
        beyond
    }

    /// Counts what a connection holds memory for among what its host does.
    fn count<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        let mut held = conn.served.held_calls(&conn.proto);
        if conn.sends.under_way() > 0 && cx.fabric.holds_sends(conn.qp()) {
            held += conn.sends.under_way() as usize;
            // Some may have left unheard.
            cx.request_completion(conn);
        }
        *self.hosts.entry(conn.party()).or_default() += held;
    }
}

impl Responder {
    /// Whether a call must wait until its connection holds less, or behind those that do.
    #[inline(always)]
    pub(super) fn must_wait<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &Unready) -> bool {
        (!conn.served.held_back.is_empty() && self.is_behind(cx, conn, call)) || self.exceeds_share(cx, conn, call)
    }

    /// Goes on with the calls that wait, as what they wait for may have come home by now; true if one that
    /// has come after them must not go past those that are left.
    #[cold]
    fn is_behind<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: &Unready) -> bool {
        self.resume(cx, conn);
        let bulk = call.fetches() || call.chunks().results() > 0;
        // What must not wait would be refused.
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
        let Some(entry) = call.entry() else {
            // It is yet to come, and nothing else is known.
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
                Request { longest: cx.longest_for_reply(len), ..Request::bulk(len, 1) }
            }
            len => Request::bulk(cx.chunk_room(len), 2 * MAX_CHUNKS),
        };
        // There are almost always so many that nothing more need be known.
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

    /// A call is held back until its connection is within its share.
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

    /// More calls of a connection are under way than Receives were promised for, as version 1 tolerates, and others
    /// are short of what they are in.
    pub(super) fn is_beyond_promise<F: Fabric>(cx: &Context<F>, conn: &Conn) -> bool {
        let beyond = conn.proto.calls_served() > conn.proto.credits().credit_limit() as usize;
        beyond && conn.proto.terms().version == Version::V1 && !cx.receives.suffice()
    }

    /// Goes on with the held back calls of a connection, and with replies that wait.
    #[cold]
    pub(in crate::shard) fn resume<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        self.resume_replies(cx, conn);
        while let Some(waiting) = conn.served.held_back.pop_front() {
            self.shares.held_back -= 1;
            if self.exceeds_share(cx, conn, waiting.call()) {
                conn.served.held_back.push_front(waiting);
                self.shares.held_back += 1;
                // What it waits for may have gone out unheard.
                return cx.request_completion(conn);
            }
            self.start(cx, conn, waiting.end());
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
                self.tell_of_held_back(cx, conn);
            }
        });
        if self.shares.held_back + self.unwritten > 0 {
            let soon = cx.clock.read() + nanoseconds(cx.config.poll.control_interval);
            cx.schedule.wake_by(soon);
        }
    }

    /// Tells the log of a call that is held back for long.
    pub(super) fn tell_of_held_back<F: Fabric>(&self, cx: &mut Context<F>, conn: &mut Conn) {
        let now = cx.clock.read();
        if !conn.served.held_back.front_mut().is_some_and(|first| first.is_to_be_told(now)) {
            return;
        }
        let Some(first) = conn.served.held_back.front() else { return };
        let peer = conn.accepted().map_or("", |accepted| accepted.host());
        match Self::exceeds_reads(&cx.config, conn, first.call()) {
            true => {
                let why =
                    "its connection has as many RDMA Reads under way as `limits.max_reads` and `max_read_bytes` allow";
                Self::tell_of_wait(cx, peer, first.call(), self.waiting(), why);
            }
            false => {
                let lack = self.waits_for(cx, first.call()).lack(cx);
                let why = format_args!("few are free, and its connection, or its host, has its share of them: {lack}");
                Self::tell_of_wait(cx, peer, first.call(), self.waiting(), why);
            }
        }
    }

    /// The calls of a connection that is over wait no more.
    pub(super) fn drop_held_back(&mut self, conn: &mut Conn) {
        self.shares.held_back -= conn.served.held_back.len();
        for waiting in conn.served.held_back.drain(..) {
            self.boxes.put_unready(waiting.end());
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
