//! Reassembly of continued messages.
//!
//! They use at most half of the long buffers of each size. Of the last eighth, each host may use one buffer. For one
//! more, the shard drops the slowest message of the host with the most. If no host has more than one, it drops a
//! message that has taken [long](LONG).
//!
//! The users of such buffers are recorded at allocation and release: messages of peers cause no scan of connections.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::rc::Rc;

use rpcrdma_mempool::Buf;

use super::admission::quota::{QuotaOwner, is_scarce_for_hosts};
use super::connection::Conn;
use super::context::Context;
use crate::fabric::{Fabric, QpId};

/// Users of long buffers, by the age of the message.
type Holders = Rc<RefCell<BTreeMap<u64, Holder>>>;

/// Nanoseconds after which the only message of a host yields to a host without one.
const LONG: u64 = 100_000_000;

#[derive(Clone, Copy, Debug)]
struct Holder {
    qp: QpId,
    party: QuotaOwner,
    /// Size of its buffer, in bytes.
    capacity: usize,
    /// Received bytes.
    len: usize,
    /// Start of the message, in nanoseconds.
    began: u64,
}

impl Holder {
    /// Average rate, bytes per second.
    fn rate(&self, now: u64) -> u64 {
        (self.len as u64).saturating_mul(1_000_000_000) / now.saturating_sub(self.began).max(1)
    }
}

/// The continued messages of all connections.
#[derive(Debug, Default)]
pub(super) struct Assemblies {
    begun: u64,
    long: Holders,
}

impl Assemblies {
    /// Counts one more message; returns the count.
    pub(super) fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// Records `buf` as the storage of this connection's message with this age.
    fn hold(&self, buf: Buf, is_long: bool, (age, began): (u64, u64), (qp, party): (QpId, QuotaOwner)) -> Assembly {
        let place = is_long.then(|| {
            let holder = Holder { qp, party, capacity: buf.capacity(), len: buf.len(), began };
            self.long.borrow_mut().insert(age, holder);
            Place { age, among: Rc::clone(&self.long) }
        });
        Assembly { buf, _place: place }
    }

    /// Whether this party may take one more buffer of at least `size` bytes. `count` such buffers exist, `free` are
    /// free.
    fn may_have(&self, size: usize, (free, count): (usize, usize), party: QuotaOwner) -> bool {
        // At most the buffers in use serve reassembly.
        if free * 2 > count {
            return true;
        }
        let holders = self.long.borrow();
        let held = || holders.values().filter(|holder| holder.capacity >= size);
        let is_first = || held().all(|holder| holder.party != party);
        held().count() < count / 2 && (!is_scarce_for_hosts(free, count) || is_first())
    }

    /// Picks the message to drop for the message `age` of this party, which needs a buffer of at least `size` bytes.
    /// That is an earlier message of this party, if no party has more. Otherwise it is one of the party with the most.
    /// If each party has one, it is one that has taken long.
    fn makes_room(&self, size: usize, age: u64, party: QuotaOwner, now: u64) -> Option<QpId> {
        let holders = self.long.borrow();
        let holders = || holders.iter().filter(|(_, holder)| holder.capacity >= size);
        let mut counts: HashMap<QuotaOwner, usize> = HashMap::new();
        holders().for_each(|(_, holder)| *counts.entry(holder.party).or_default() += 1);
        let most = counts.values().copied().max()?;
        let count = |party: &QuotaOwner| counts.get(party).copied().unwrap_or(0);
        let makes_room = |&(&begun, holder): &(&u64, &Holder)| match (holder.party == party, count(&party) == most) {
            (own, true) => own && begun < age,
            (own, false) => {
                let takes_long = || !own && now.saturating_sub(holder.began) >= LONG;
                if most > 1 { count(&holder.party) == most } else { takes_long() }
            }
        };
        holders().filter(makes_room).min_by_key(|(_, holder)| holder.rate(now)).map(|(_, holder)| holder.qp)
    }
}

/// A connection's incoming continued message.
#[derive(Debug, Default)]
pub(super) struct Assembling {
    /// Its received parts.
    held: Option<Assembly>,
    /// The shard's count of such messages at its start, itself included.
    age: u64,
    /// Its start, in nanoseconds.
    began: u64,
}

impl Assembling {
    /// Whether there is one.
    #[inline]
    pub(super) fn is_under_way(&self) -> bool {
        self.held.is_some()
    }

    /// Drops the received parts.
    pub(super) fn give_up(&mut self) {
        self.held = None;
    }

    /// Its identity and progress, if its buffer's size is in this range. The value changes with each part.
    pub(super) fn held_in(&self, range: &RangeInclusive<usize>) -> Option<u64> {
        let buf = &self.held.as_ref()?.buf;
        range.contains(&buf.capacity()).then(|| (self.age << 32).wrapping_add(buf.len() as u64))
    }

    fn take(&mut self) -> Option<Buf> {
        self.held.take().map(|assembly| assembly.buf)
    }
}

/// Received parts of a continued message.
#[derive(Debug)]
struct Assembly {
    buf: Buf,
    _place: Option<Place>,
}

/// Entry among the users of long buffers; dropping it removes the entry.
#[derive(Debug)]
struct Place {
    age: u64,
    among: Holders,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.among.borrow_mut().remove(&self.age);
    }
}

impl<F: Fabric> Context<F> {
    /// Handles the payload of a part other than the last, if it is needed.
    #[cold]
    pub(super) fn receive_part(&mut self, conn: &mut Conn, first: bool, payload: Option<&[u8]>) {
        if first {
            conn.assembling.give_up();
        }
        let Some(part) = payload else { return };
        if first {
            (conn.assembling.age, conn.assembling.began) = (self.assemblies.begin(), self.clock.read());
            match self.alloc_assembly(conn, part.len(), 2 * self.config.wire.receive_size) {
                Some(mut buf) => {
                    buf.set_window(0, 0);
                    self.hold_assembly(conn, buf);
                }
                // Otherwise the last part would pass as the whole message.
                None => conn.proto.drop_parts(),
            }
        }
        self.assemble(conn, part);
    }

    /// Handles the last part: returns the message. `None` without memory for it.
    #[cold]
    pub(super) fn assemble_last(&mut self, conn: &mut Conn, part: &[u8]) -> Option<Buf> {
        self.assemble(conn, part);
        conn.assembling.take()
    }

    fn assemble(&mut self, conn: &mut Conn, part: &[u8]) {
        let Some(mut buf) = conn.assembling.take() else { return };
        let len = buf.len();
        if len + part.len() > buf.capacity() {
            let needed = len + part.len();
            let Some(mut larger) = self.alloc_assembly(conn, needed, 2 * needed) else {
                return conn.proto.drop_parts();
            };
            larger.full_mut()[..len].copy_from_slice(&buf);
            buf = larger;
        }
        buf.set_window(0, len + part.len());
        buf[len..].copy_from_slice(part);
        self.hold_assembly(conn, buf);
    }

    /// Allocates a buffer for `len` bytes of parts, or preferably for `roomy` bytes. `conn` is not in the table, and
    /// has no such buffer.
    fn alloc_assembly(&mut self, conn: &Conn, len: usize, roomy: usize) -> Option<Buf> {
        let party = conn.quota_owner();
        let buf = self.alloc_in_part(party, roomy).or_else(|| self.alloc_in_part(party, len)).or_else(|| {
            self.drop_assembly(conn, len);
            self.alloc_in_part(party, len)
        });
        self.stats.pool_empty += u64::from(buf.is_none());
        buf
    }

    /// Allocates a buffer of at least `len` bytes, of a size with room for continued messages.
    fn alloc_in_part(&self, party: QuotaOwner, len: usize) -> Option<Buf> {
        let is_short = |size: usize| size <= self.sizing.configured_capacity();
        let may_have = |&size: &usize| is_short(size) || self.assemblies.may_have(size, self.pool.room(size), party);
        let longest = self.pool.sizes().filter(|&size| size >= len).take_while(may_have).last()?;
        self.pool.alloc_within(len, longest.min(self.longest_for(len)))
    }

    /// Stores the parts of a connection's message in `buf`.
    fn hold_assembly(&self, conn: &mut Conn, buf: Buf) {
        let is_long = buf.capacity() > self.sizing.configured_capacity();
        let whose = (conn.qp(), conn.quota_owner());
        conn.assembling.held =
            Some(self.assemblies.hold(buf, is_long, (conn.assembling.age, conn.assembling.began), whose));
    }

    /// Drops the message that [makes room](Assemblies::makes_room). The shard ignores its later parts, and answers it
    /// with an error.
    fn drop_assembly(&mut self, conn: &Conn, len: usize) {
        let now = self.clock.read();
        let Some(who) = self.assemblies.makes_room(len, conn.assembling.age, conn.quota_owner(), now) else { return };
        let Some(other) = self.conns.get_mut(who) else { return };
        other.assembling.give_up();
        other.proto.drop_parts();
        self.stats.pool_empty += 1;
        let name = |conn: &Conn| conn.accepted().map_or("a server", |accepted| accepted.host()).to_owned();
        let (loser, winner) = (name(other), name(conn));
        let line = format_args!(
            "{loser}: message in parts dropped in favour of {winner}, as such messages have half of the buffers \
             (memory.long_buffers)"
        );
        self.warn("messages in parts that made room for others", line);
    }
}

#[cfg(test)]
mod tests {
    use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

    use super::*;

    fn qp(slot: u32) -> QpId {
        QpId { slot, generation: 0 }
    }

    fn pool(counts: [usize; 2]) -> Pool {
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let classes = [64, 128].into_iter().zip(counts).map(|(size, count)| Class { size, count }).collect();
        Pool::new(&PoolConfig { classes, arena }).expect("memory")
    }

    #[test]
    fn long_buffers_are_counted_from_where_they_are_taken_to_where_they_go() {
        let (pool, mut all) = (pool([4, 4]), Assemblies::default());
        let (one, other) = (QuotaOwner::Connection(qp(7)), QuotaOwner::Connection(qp(0)));
        let mut hold = |is_long, slot, len| {
            let age = all.begin();
            all.hold(
                pool.alloc(len).expect("a buffer"),
                is_long,
                (age, 0),
                (qp(slot), QuotaOwner::Connection(qp(slot))),
            )
        };
        let (first, second, short, third) =
            (hold(true, 7, 64), hold(true, 5, 64), hold(false, 6, 64), hold(true, 3, 128));
        assert!(!all.may_have(64, (0, 6), other) && all.may_have(64, (2, 8), other), "three have some: half of six");
        assert!(!all.may_have(64, (1, 8), one) && all.may_have(64, (1, 8), other), "one of the last eighth for each");
        assert!(all.may_have(128, (0, 4), other) && !all.may_have(128, (0, 2), other), "one has a longer one");
        assert!(all.may_have(64, (4, 6), one), "most are free");
        assert_eq!(all.makes_room(65, 5, other, LONG), Some(qp(3)), "the only one that has so much");
        drop((first, short, second));
        assert!(!all.may_have(64, (0, 2), other) && all.may_have(64, (0, 4), other));
        drop(third);
        assert!(all.long.borrow().is_empty());
        assert_eq!(all.makes_room(64, 5, other, LONG), None);
    }

    /// A host that begins ever more messages makes room for itself and for others.
    #[test]
    fn the_host_that_has_most_makes_room() {
        let (pool, mut all) = (pool([8, 1]), Assemblies::default());
        let (greedy, modest) = (QuotaOwner::Host([10, 0, 0, 1].into()), QuotaOwner::Host([10, 0, 0, 2].into()));
        let newcomer = QuotaOwner::Host([10, 0, 0, 3].into());
        let mut hold = |slot, party, len, began| {
            let (age, buf) = (all.begin(), pool.alloc(len).expect("a buffer"));
            all.hold(buf, true, (age, began), (qp(slot), party))
        };
        // The modest host's message is the oldest and the slowest.
        let held = [hold(1, modest, 1, 0), hold(2, greedy, 64, 5), hold(3, greedy, 2, 5)];
        let now = 100;
        let age = all.begin();
        assert_eq!(
            all.makes_room(64, age, greedy, now),
            Some(qp(3)),
            "the other host's stays, and who is nearly through"
        );
        assert_eq!(all.makes_room(64, age, modest, now), Some(qp(3)));
        assert_eq!(all.makes_room(64, age, newcomer, now), Some(qp(3)));
        // Its oldest message has to yield to its later ones, so it is dropped itself.
        assert_eq!(all.makes_room(64, 1, greedy, now), None);
        assert_eq!(all.makes_room(64, age, newcomer, LONG), Some(qp(3)), "whoever else takes long");
        let [modest_one, one, _] = held;
        drop(one);
        assert_eq!(all.makes_room(64, age, newcomer, now), None, "nobody who has one, and has just begun it");
        assert_eq!(all.makes_room(64, age, newcomer, LONG), Some(qp(1)), "but who takes long");
        assert_eq!(all.makes_room(64, age, greedy, LONG), Some(qp(3)), "as many as any other: one of its own");
        drop(modest_one);
    }
}
