//! Continued messages, which travel in parts (version 2 §4.5.2): how they are sent, and how received ones are
//! reassembled.
//!
//! Reassembly uses at most half of the long buffers of each size. While an eighth or less of them is free, each host
//! may use only one. If a host needs one more, the shard drops the slowest message of the host with the most messages.
//! If no host has more than one, the shard drops a message that has taken [long](LONG).
//!
//! The shard lists the messages in long buffers, so that peers' messages do not cause scans of all connections.

use std::collections::HashMap;

use rpcrdma_mempool::Buf;

use super::admission::quota::{QuotaOwner, is_scarce_for_hosts};
use super::connection::{Conn, Continuation, MessageOwner};
use super::context::{ConnTable, ShardContext};
use crate::config::{HEADROOM_INLINE, SMALL_BUFFER};
use crate::fabric::{Fabric, QpId};
use crate::proto::{Form, Outgoing};
use crate::wire::ChunkCounts;

/// Payload bytes of the shortest parts, which use the smallest buffers. The last part may be shorter.
const LEAST_CONTINUED: usize = SMALL_BUFFER - HEADROOM_INLINE;
/// Nanoseconds after which the only message of a host yields to a host without one.
const LONG: u64 = 100_000_000;

/// An incoming continued message in a long buffer.
#[derive(Clone, Copy, Debug)]
struct Assembly {
    qp: QpId,
    owner: QuotaOwner,
    /// Size of its buffer, in bytes.
    capacity: usize,
    /// Received bytes.
    len: usize,
    /// Age and start of the message, as in [`Assembling`](super::connection::Assembling).
    age: u64,
    began: u64,
}

impl Assembly {
    /// Average rate in bytes per second.
    fn rate(&self, now: u64) -> u64 {
        (self.len as u64).saturating_mul(1_000_000_000) / now.saturating_sub(self.began).max(1)
    }
}

/// The continued messages of all connections.
#[derive(Debug, Default)]
pub(super) struct Assemblies {
    /// Number of messages so far.
    begun: u64,
    /// Messages in long buffers, and some that have ended since the last [`refresh`](Self::refresh).
    long: Vec<Assembly>,
}

impl Assemblies {
    /// Updates the progress of the messages of connections in the table, and forgets all others.
    fn refresh(&mut self, conns: &ConnTable) {
        self.long.retain_mut(|assembly| {
            let conn = conns.peek(assembly.qp.slot).filter(|conn| conn.qp() == assembly.qp);
            let buf =
                conn.filter(|conn| conn.assembling.age == assembly.age).and_then(|conn| conn.assembling.buf.as_ref());
            buf.inspect(|buf| (assembly.capacity, assembly.len) = (buf.capacity(), buf.len())).is_some()
        });
    }

    /// Stores the parts of a connection's message in `buf`. Buffers of at most `short` bytes are not listed.
    fn store(&mut self, conn: &mut Conn, buf: Buf, short: usize) {
        let (age, began) = (conn.assembling.age, conn.assembling.began);
        if buf.capacity() > short && !self.long.iter().any(|assembly| assembly.age == age) {
            let (qp, owner) = (conn.qp(), conn.quota_owner());
            self.long.push(Assembly { qp, owner, capacity: buf.capacity(), len: buf.len(), age, began });
        }
        conn.assembling.buf = Some(buf);
    }

    /// Whether this owner may take one more buffer of at least `size` bytes. `count` such buffers exist, `free` are
    /// free.
    fn may_take(&self, size: usize, (free, count): (usize, usize), owner: QuotaOwner) -> bool {
        // If more than half are free, reassembly uses less than half.
        if free * 2 > count {
            return true;
        }
        let held = || self.long.iter().filter(|assembly| assembly.capacity >= size);
        let is_first = || held().all(|assembly| assembly.owner != owner);
        held().count() < count / 2 && (!is_scarce_for_hosts(free, count) || is_first())
    }

    /// Chooses the message to drop for the message `age` of this owner, which needs a buffer of at least `size` bytes.
    /// If no owner has more messages than this one, it is an earlier message of this owner. Otherwise it is a message
    /// of the owner with the most. If no owner has more than one, it is a message that has taken long.
    fn choose_dropped(&self, size: usize, age: u64, owner: QuotaOwner, now: u64) -> Option<QpId> {
        let in_size = || self.long.iter().filter(|assembly| assembly.capacity >= size);
        let mut counts: HashMap<QuotaOwner, usize> = HashMap::new();
        in_size().for_each(|assembly| *counts.entry(assembly.owner).or_default() += 1);
        let max_count = counts.values().copied().max()?;
        let count = |owner: &QuotaOwner| counts.get(owner).copied().unwrap_or(0);
        let owner_has_most = count(&owner) == max_count;
        let may_drop = |assembly: &&Assembly| match (assembly.owner == owner, owner_has_most) {
            (is_own, true) => is_own && assembly.age < age,
            (is_own, false) => {
                let takes_long = || !is_own && now.saturating_sub(assembly.began) >= LONG;
                if max_count > 1 { count(&assembly.owner) == max_count } else { takes_long() }
            }
        };
        in_size().filter(may_drop).min_by_key(|assembly| (assembly.rate(now), assembly.age)).map(|assembly| assembly.qp)
    }
}

/// Handles the payload of a part other than the last, if it is needed.
#[cold]
pub(super) fn receive_part<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, first: bool, payload: Option<&[u8]>) {
    if first {
        conn.assembling.discard();
    }
    let Some(part) = payload else { return };
    if first {
        cx.assemblies.begun += 1;
        (conn.assembling.age, conn.assembling.began) = (cx.assemblies.begun, cx.clock.read());
        match alloc(cx, conn, part.len(), 2 * cx.config.wire.receive_size) {
            Some(mut buf) => {
                buf.set_window(0, 0);
                conn.assembling.buf = Some(buf);
            }
            // The later parts are dropped, too; otherwise the last one would be taken for the whole message.
            None => conn.proto.drop_parts(),
        }
    }
    assemble(cx, conn, part);
}

/// Handles the last part, and returns the whole message. `None` without memory for it.
#[cold]
pub(super) fn assemble_last<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, part: &[u8]) -> Option<Buf> {
    assemble(cx, conn, part);
    conn.assembling.buf.take()
}

fn assemble<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, part: &[u8]) {
    let Some(mut buf) = conn.assembling.buf.take() else { return };
    let (len, needed) = (buf.len(), buf.len() + part.len());
    if needed > buf.capacity() {
        let Some(mut larger) = alloc(cx, conn, needed, 2 * needed) else {
            return conn.proto.drop_parts();
        };
        larger.full_mut()[..len].copy_from_slice(&buf);
        buf = larger;
    }
    buf.set_window(0, needed);
    buf[len..].copy_from_slice(part);
    cx.assemblies.store(conn, buf, cx.memory.sizes.configured_capacity);
}

/// Allocates a buffer for `preferred` bytes of parts or, if there is none, for `len` bytes. `conn` is lent, so it is
/// not in the table, and has no buffer of that length.
fn alloc<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, len: usize, preferred: usize) -> Option<Buf> {
    let owner = conn.quota_owner();
    let buf = alloc_in_part(cx, owner, preferred).or_else(|| alloc_in_part(cx, owner, len)).or_else(|| {
        drop_slowest(cx, conn, len);
        alloc_in_part(cx, owner, len)
    });
    cx.stats.pool_empty += u64::from(buf.is_none());
    buf
}

/// Allocates a buffer of at least `len` bytes, of a size with room for continued messages.
fn alloc_in_part<F: Fabric>(cx: &mut ShardContext<F>, owner: QuotaOwner, len: usize) -> Option<Buf> {
    let ShardContext { memory, conns, assemblies, .. } = cx;
    assemblies.refresh(conns);
    let is_short = |size: usize| size <= memory.sizes.configured_capacity;
    let may_take = |&size: &usize| is_short(size) || assemblies.may_take(size, memory.pool.room(size), owner);
    let longest = memory.pool.sizes().filter(|&size| size >= len).take_while(may_take).last()?;
    memory.pool.alloc_within(len, longest.min(memory.longest_for(len)))
}

/// Drops the [chosen](Assemblies::choose_dropped) message. The shard ignores its later parts, and answers it with an
/// error.
fn drop_slowest<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, len: usize) {
    let now = cx.clock.read();
    let slowest = cx.assemblies.choose_dropped(len, conn.assembling.age, conn.quota_owner(), now);
    let Some(other) = slowest.and_then(|qp| cx.conns.get_mut(qp)) else { return };
    other.assembling.discard();
    other.proto.drop_parts();
    cx.stats.pool_empty += 1;
    let (dropped, winner) = (other.log_name(), conn.log_name());
    let line = format_args!(
        "{dropped}: message in parts dropped in favour of {winner}: such messages may use half of the buffers \
         (memory.long_buffers)"
    );
    cx.warn("messages in parts dropped in favour of others", line);
}

pub(super) enum NextPart {
    Sent,
    /// There is no memory for the part, which is sent later.
    NoMemory,
    /// The last part remains, which the message's owner sends.
    Last(Continuation),
}

impl<F: Fabric> ShardContext<F> {
    /// Sends the first part of a message that is too long for one part.
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
            // The peer answered before the message was complete, so its exposed memory belongs to the caller again. The
            // rest has to be sent nevertheless, because otherwise the peer would take the next message for it.
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

    /// Sends a part other than the last. Returns false if there is no memory.
    fn transmit_part(&mut self, conn: &mut Conn, mut continuation: Continuation) -> bool {
        let (limit, left) = (conn.proto.terms().send_inline_threshold, continuation.rest.len());
        // The last part is never empty, and parts end at XDR words.
        let room = (limit - conn.proto.credits().header_len(&ChunkCounts::default())) & !3;
        let longest = if room < left { room } else { (left / 2) & !3 };
        if longest == 0 {
            // The peer has reduced its receive size, so that no payload fits behind the last header.
            self.end_unsendable(conn, "the rest of a message");
            conn.continuation = Some(continuation);
            return true;
        }
        let out = match &continuation.owner {
            MessageOwner::Call(call, _) => Outgoing::Call(*call),
            MessageOwner::Reply(call) => Outgoing::Reply(call.id()),
        };
        let sent = self.alloc_continuation(longest).is_some_and(|(mut buf, take)| {
            let end = HEADROOM_INLINE + take;
            let bytes = continuation.rest.get(..take).unwrap_or_default();
            buf.full_mut()[HEADROOM_INLINE..end].copy_from_slice(bytes);
            match conn.proto.write_header(out, &Form::PART, buf.full_mut(), HEADROOM_INLINE) {
                Some(start) => {
                    buf.set_window(start, end - start);
                    conn.sends.push_send(buf, None, self.config.debug.signal_every);
                }
                None => self.end_unsendable(conn, "a part of a message"),
            }
            let start = continuation.rest.start();
            continuation.rest.set_window(start + take, left - take);
            true
        });
        conn.continuation = Some(continuation);
        if sent {
            self.ready.add(conn);
        } else {
            // This call writes nothing: it only makes the rest precede all other messages again.
            conn.proto.write_header(out, &Form::PART, &mut [], 0);
            self.park_for_buffer(conn);
        }
        sent
    }

    /// Allocates a buffer for a part of `longest` bytes, or for a shorter part if there is none, because messages that
    /// wait behind this one may hold all longer buffers.
    fn alloc_continuation(&mut self, longest: usize) -> Option<(Buf, usize)> {
        let mut take = longest;
        loop {
            match self.memory.pool.alloc(HEADROOM_INLINE + take) {
                Some(buf) => return Some((buf, take)),
                None if take > LEAST_CONTINUED => take = (take / 2).max(LEAST_CONTINUED) & !3,
                None => break,
            }
        }
        self.stats.pool_empty += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

    use super::*;
    use crate::shard::testing::open_conn;

    fn qp(slot: u32) -> QpId {
        QpId { slot, generation: 0 }
    }

    fn pool(counts: [usize; 2]) -> Pool {
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let classes = [64, 128].into_iter().zip(counts).map(|(size, count)| Class { size, count }).collect();
        Pool::new(&PoolConfig { classes, arena }).expect("memory")
    }

    #[test]
    fn long_buffers_are_counted_from_allocation_to_release() {
        let (pool, mut all, mut table) = (pool([4, 4]), Assemblies::default(), ConnTable::default());
        let (one, other) = (QuotaOwner::Connection(qp(7)), QuotaOwner::Connection(qp(0)));
        for (slot, len, short) in [(7, 64, 0), (5, 64, 0), (6, 64, 64), (3, 128, 0)] {
            let mut conn = open_conn(slot, true);
            all.begun += 1;
            conn.assembling.age = all.begun;
            all.store(&mut conn, pool.alloc(len).expect("a buffer"), short);
            table.insert(conn);
        }
        all.refresh(&table);
        assert!(!all.may_take(64, (0, 6), other) && all.may_take(64, (2, 8), other), "three messages hold half of six");
        assert!(
            !all.may_take(64, (1, 8), one) && all.may_take(64, (1, 8), other),
            "each owner gets one of the last eighth"
        );
        assert!(
            all.may_take(128, (0, 4), other) && !all.may_take(128, (0, 2), other),
            "one message has a longer buffer"
        );
        assert!(all.may_take(64, (4, 6), one), "most buffers are free");
        assert_eq!(all.choose_dropped(65, 5, other, LONG), Some(qp(3)), "the only message in a buffer of this size");
        for slot in [7, 6, 5] {
            table.get_mut(qp(slot)).expect("in the table").assembling.discard();
        }
        all.refresh(&table);
        assert!(!all.may_take(64, (0, 2), other) && all.may_take(64, (0, 4), other));
        drop(table.take(qp(3)));
        all.refresh(&table);
        assert!(all.long.is_empty());
        assert_eq!(all.choose_dropped(64, 5, other, LONG), None);
    }

    /// Messages of a host that begins ever more of them are dropped for its own new ones and for those of other hosts.
    #[test]
    fn the_slowest_message_of_the_host_with_the_most_is_dropped() {
        let (greedy, modest) = (QuotaOwner::Host([10, 0, 0, 1].into()), QuotaOwner::Host([10, 0, 0, 2].into()));
        let newcomer = QuotaOwner::Host([10, 0, 0, 3].into());
        let held =
            |slot, owner, len, began| Assembly { qp: qp(slot), owner, capacity: 64, len, age: slot.into(), began };
        // The modest host's message is the oldest and the slowest.
        let long = vec![held(1, modest, 1, 0), held(2, greedy, 64, 5), held(3, greedy, 2, 5)];
        let (mut all, now, age) = (Assemblies { begun: 4, long }, 100, 4);
        assert_eq!(all.choose_dropped(64, age, greedy, now), Some(qp(3)), "not the other host's, nor the faster one");
        assert_eq!(all.choose_dropped(64, age, modest, now), Some(qp(3)));
        assert_eq!(all.choose_dropped(64, age, newcomer, now), Some(qp(3)));
        // For a host's oldest message no other is dropped, because its later messages have precedence.
        assert_eq!(all.choose_dropped(64, 1, greedy, now), None);
        assert_eq!(all.choose_dropped(64, age, newcomer, LONG), Some(qp(3)), "even though another host's takes long");
        all.long.remove(1);
        assert_eq!(
            all.choose_dropped(64, age, newcomer, now),
            None,
            "no host has more than one, and no message takes long"
        );
        assert_eq!(all.choose_dropped(64, age, newcomer, LONG), Some(qp(1)), "a message that takes long");
        assert_eq!(
            all.choose_dropped(64, age, greedy, LONG),
            Some(qp(3)),
            "no host has more, so the host's own message is dropped"
        );
    }
}
