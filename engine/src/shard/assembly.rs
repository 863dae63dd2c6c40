//! What has come of continued messages. They have at most half of the long buffers of each size, and none of the last
//! eighth: for one more the host that has most of them makes room, with its oldest.
//!
//! Who has such a buffer is written down where it is taken and where it goes: whatever peers send,
//! connections are not counted for it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::rc::Rc;

use rpcrdma_mempool::Buf;

use super::conn::Conn;
use super::context::Context;
use super::host::{Party, is_short_for_hosts};
use crate::fabric::{Fabric, QpId};
use crate::wire::View;

/// Who has a long buffer for what it puts together: by the age of the message.
type Holders = Rc<RefCell<BTreeMap<u64, Holder>>>;

#[derive(Clone, Copy, Debug)]
struct Holder {
    qp: QpId,
    party: Party,
    /// Of its buffer.
    capacity: usize,
}

/// The continued messages of all connections.
#[derive(Debug, Default)]
pub(super) struct Assemblies {
    begun: u64,
    long: Holders,
}

impl Assemblies {
    /// One more begins: how many there were, with it.
    pub(super) fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// What has come of the message of this age, of this connection, is in `buf`.
    fn hold(&self, buf: Buf, is_long: bool, age: u64, (qp, party): (QpId, Party)) -> Assembly {
        let place = is_long.then(|| {
            self.long.borrow_mut().insert(age, Holder { qp, party, capacity: buf.capacity() });
            Place { age, among: Rc::clone(&self.long) }
        });
        Assembly { buf, _place: place }
    }

    /// Whether one more may have one of `count` buffers of at least so many bytes, of which so many are free.
    fn may_have(&self, size: usize, (free, count): (usize, usize)) -> bool {
        // No more can be in use for that than are in use at all.
        let held = || self.long.borrow().values().filter(|holder| holder.capacity >= size).count();
        free * 2 > count || (held() < count / 2 && !is_short_for_hosts(free, count))
    }

    /// Who makes room for a message of this party that began with the number `age` and needs a buffer of at least so
    /// many bytes: the party that has most such buffers, with its oldest. If none has more than this one, that is one of
    /// its own, from before this message.
    fn makes_room(&self, size: usize, age: u64, party: Party) -> Option<QpId> {
        let holders = self.long.borrow();
        let holders = || holders.iter().filter(|(_, holder)| holder.capacity >= size);
        let mut counts: HashMap<Party, usize> = HashMap::new();
        holders().for_each(|(_, holder)| *counts.entry(holder.party).or_default() += 1);
        let most = counts.values().copied().max()?;
        let has_most = |party: &Party| counts.get(party) == Some(&most);
        let makes_room = |begun: u64, of: &Party| match has_most(&party) {
            true => *of == party && begun < age,
            false => has_most(of),
        };
        holders().find(|&(&begun, holder)| makes_room(begun, &holder.party)).map(|(_, holder)| holder.qp)
    }
}

/// The continued message that a connection puts together.
#[derive(Debug, Default)]
pub(super) struct Assembling {
    /// What has come of it.
    held: Option<Assembly>,
    /// When it began: the number of such messages that the shard had seen before.
    age: u64,
}

impl Assembling {
    /// There is one.
    #[inline]
    pub(super) fn is_under_way(&self) -> bool {
        self.held.is_some()
    }

    /// Drops what has come.
    pub(super) fn give_up(&mut self) {
        self.held = None;
    }

    /// Bytes that have come of it, if its buffer is so long.
    pub(super) fn held_in(&self, range: &RangeInclusive<usize>) -> Option<usize> {
        let buf = &self.held.as_ref()?.buf;
        range.contains(&buf.capacity()).then(|| buf.len())
    }

    fn take(&mut self) -> Option<Buf> {
        self.held.take().map(|assembly| assembly.buf)
    }
}

/// What has come of a continued message.
#[derive(Debug)]
struct Assembly {
    buf: Buf,
    _place: Option<Place>,
}

/// Among those who have long buffers, until it is dropped.
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
    /// A part of a message has come that is not the last; `view` is the part, if it is of use.
    #[cold]
    pub(super) fn part_came(&mut self, conn: &mut Conn, first: bool, view: Option<&View<'_>>) {
        if first {
            conn.assembling.give_up();
        }
        let Some(part) = view.map(View::payload) else { return };
        if first {
            conn.assembling.age = self.assemblies.begin();
            match self.alloc_assembly(conn, part.len(), 2 * self.config.receive_size) {
                Some(mut buf) => {
                    buf.set_window(0, 0);
                    self.hold_assembly(conn, buf);
                }
                // Else the last part would be taken for the whole.
                None => conn.proto.spoil_sequence(),
            }
        }
        self.assemble(conn, part);
    }

    /// The last part of a message has come: all of it. `None` without memory for it.
    #[cold]
    pub(super) fn assemble_last(&mut self, conn: &mut Conn, part: &[u8]) -> Option<Buf> {
        self.assemble(conn, part);
        conn.assembling.take()
    }

    /// Appends a part to what has come of a message.
    fn assemble(&mut self, conn: &mut Conn, part: &[u8]) {
        let Some(mut buf) = conn.assembling.take() else { return };
        let len = buf.len();
        if len + part.len() > buf.capacity() {
            let needed = len + part.len();
            let Some(mut larger) = self.alloc_assembly(conn, needed, 2 * needed) else {
                return conn.proto.spoil_sequence();
            };
            larger.full_mut()[..len].copy_from_slice(&buf);
            buf = larger;
        }
        buf.set_window(0, len + part.len());
        buf[len..].copy_from_slice(part);
        self.hold_assembly(conn, buf);
    }

    /// A buffer for what comes in parts, and has so many bytes, or better `roomy` as many. `conn` is not in
    /// the table, and has none.
    fn alloc_assembly(&mut self, conn: &Conn, len: usize, roomy: usize) -> Option<Buf> {
        let buf = self.alloc_in_part(roomy).or_else(|| self.alloc_in_part(len)).or_else(|| {
            self.drop_assembly(conn, len);
            self.alloc_in_part(len)
        });
        self.stats.pool_empty += u64::from(buf.is_none());
        buf
    }

    /// A buffer of so many bytes, of a size of which continued messages have not their part.
    fn alloc_in_part(&self, len: usize) -> Option<Buf> {
        let may_have = |size: &usize| {
            *size <= self.sizing.configured_capacity() || self.assemblies.may_have(*size, self.pool.room(*size))
        };
        let longest = self.pool.sizes().filter(|&size| size >= len).take_while(may_have).last()?;
        self.pool.alloc_within(len, longest.min(self.longest_for(len)))
    }

    /// What has come of the message of a connection is in this buffer.
    fn hold_assembly(&self, conn: &mut Conn, buf: Buf) {
        let is_long = buf.capacity() > self.sizing.configured_capacity();
        let whose = (conn.qp(), conn.party());
        conn.assembling.held = Some(self.assemblies.hold(buf, is_long, conn.assembling.age, whose));
    }

    /// Whoever [makes room](Assemblies::makes_room) loses its message: all that comes of it yet is dropped, and it is
    /// answered with an error.
    fn drop_assembly(&mut self, conn: &Conn, len: usize) {
        let Some(who) = self.assemblies.makes_room(len, conn.assembling.age, conn.party()) else { return };
        let Some(other) = self.conns.get_mut(who) else { return };
        other.assembling.give_up();
        other.proto.spoil_sequence();
        self.stats.pool_empty += 1;
        let host = other.accepted().map_or("a server", |accepted| accepted.host()).to_owned();
        self.warn("messages in parts that made room for others", format_args!(
            "a message in parts of {host} made room for another: such messages have half of the buffers (Config::long_buffers)"
        ));
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
        let pool = pool([4, 4]);
        let mut all = Assemblies::default();
        let other = Party::Connection(qp(0));
        let mut hold = |is_long, slot, len| {
            let age = all.begin();
            (all.hold(pool.alloc(len).expect("a buffer"), is_long, age, (qp(slot), Party::Connection(qp(slot)))), age)
        };
        let ((first, _), (second, _), (short, _), (third, last)) =
            (hold(true, 7, 64), hold(true, 5, 64), hold(false, 6, 64), hold(true, 3, 128));
        assert_eq!(all.makes_room(64, last, other), Some(qp(7)));
        assert_eq!(all.makes_room(65, last + 1, other), Some(qp(3)), "the only one that has so much");
        assert_eq!(
            all.makes_room(64, 1, Party::Connection(qp(7))),
            None,
            "nobody makes room for an older one of its own"
        );
        assert!(!all.may_have(64, (0, 6)) && all.may_have(64, (2, 8)), "three have long buffers: half of six");
        assert!(!all.may_have(64, (1, 8)), "the last eighth is for others");
        assert!(all.may_have(128, (0, 4)) && !all.may_have(128, (0, 2)), "one has a longer one");
        assert!(all.may_have(64, (4, 6)), "most are free");
        // It gets a longer one.
        let grown = all.hold(first.buf, true, 1, (qp(7), Party::Connection(qp(7))));
        assert_eq!(all.makes_room(64, last, other), Some(qp(7)));
        drop((grown, short));
        assert_eq!(all.makes_room(64, last, other), Some(qp(5)));
        drop(second);
        assert_eq!(all.makes_room(64, last, Party::Connection(qp(3))), None, "the last one itself is not older");
        assert!(!all.may_have(64, (0, 2)) && all.may_have(64, (0, 4)));
        drop(third);
        assert!(all.long.borrow().is_empty());
    }

    /// One host begins more and more of them: it makes room for itself, and for others.
    #[test]
    fn the_host_that_has_most_makes_room() {
        let (pool, mut all) = (pool([8, 1]), Assemblies::default());
        let (greedy, modest) = (Party::Host([10, 0, 0, 1].into()), Party::Host([10, 0, 0, 2].into()));
        let mut hold = |slot, party| {
            let age = all.begin();
            all.hold(pool.alloc(64).expect("a buffer"), true, age, (qp(slot), party))
        };
        // The modest one's is the oldest of all.
        let _held = [hold(1, modest), hold(2, greedy), hold(3, greedy)];
        let age = all.begin();
        assert_eq!(all.makes_room(64, age, greedy), Some(qp(2)), "the other host's stays");
        assert_eq!(all.makes_room(64, age, modest), Some(qp(2)));
        assert_eq!(all.makes_room(64, age, Party::Host([10, 0, 0, 3].into())), Some(qp(2)));
        // It began this one first, and is to make room with what came later: this one goes.
        assert_eq!(all.makes_room(64, 1, greedy), None);
    }
}
