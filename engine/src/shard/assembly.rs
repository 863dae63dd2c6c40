//! What has come of continued messages. They have at most half of the long buffers of each size, and none of the last
//! eighth: for one more the oldest of them makes room.
//!
//! Who has such a buffer is written down where it is taken and where it goes: whatever peers send,
//! connections are not counted for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

use rpcrdma_mempool::Buf;

use super::conn::Conn;
use super::context::Context;
use super::host::is_short_for_hosts;
use crate::fabric::{Fabric, QpId};
use crate::wire::View;

/// Connections with a long buffer for what they put together, and its bytes: by the age of the message.
type Holders = Rc<RefCell<BTreeMap<u64, (QpId, usize)>>>;

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
    fn hold(&self, buf: Buf, is_long: bool, age: u64, qp: QpId) -> Assembly {
        let place = is_long.then(|| {
            self.long.borrow_mut().insert(age, (qp, buf.capacity()));
            Place { age, among: Rc::clone(&self.long) }
        });
        Assembly { buf, _place: place }
    }

    /// Whether one more may have one of `count` buffers of at least so many bytes, of which so many are free.
    fn may_have(&self, size: usize, (free, count): (usize, usize)) -> bool {
        // No more can be in use for that than are in use at all.
        let held = || self.long.borrow().values().filter(|(_, capacity)| *capacity >= size).count();
        free * 2 > count || (held() < count / 2 && !is_short_for_hosts(free, count))
    }

    /// Whoever has had a buffer of at least so many bytes since before the message of this age began, for longest.
    fn oldest(&self, size: usize, before: u64) -> Option<QpId> {
        let holders = self.long.borrow();
        holders.range(..before).find(|(_, (_, capacity))| *capacity >= size).map(|(_, &(qp, _))| qp)
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
            self.drop_oldest_assembly(conn, len);
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
        conn.assembling.held = Some(self.assemblies.hold(buf, is_long, conn.assembling.age, conn.qp()));
    }

    /// Whoever began a message first, and has not ended it, loses it: all that comes of it yet is dropped,
    /// and it is answered with an error.
    fn drop_oldest_assembly(&mut self, conn: &Conn, len: usize) {
        let Some(oldest) = self.assemblies.oldest(len, conn.assembling.age) else { return };
        if let Some(other) = self.conns.get_mut(oldest) {
            other.assembling.give_up();
            other.proto.spoil_sequence();
            self.stats.pool_empty += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

    use super::*;

    #[test]
    fn long_buffers_are_counted_from_where_they_are_taken_to_where_they_go() {
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let classes = vec![Class { size: 64, count: 4 }, Class { size: 128, count: 4 }];
        let pool = Pool::new(&PoolConfig { classes, arena }).expect("memory");
        let mut all = Assemblies::default();
        let qp = |slot| QpId { slot, generation: 0 };
        let mut hold = |is_long, slot, len| {
            let age = all.begin();
            (all.hold(pool.alloc(len).expect("a buffer"), is_long, age, qp(slot)), age)
        };
        let ((first, _), (second, _), (short, _), (third, last)) =
            (hold(true, 7, 64), hold(true, 5, 64), hold(false, 6, 64), hold(true, 3, 128));
        assert_eq!(all.oldest(64, last), Some(qp(7)));
        assert_eq!(all.oldest(65, last + 1), Some(qp(3)), "the only one that has so much");
        assert_eq!(all.oldest(64, 1), None, "nobody makes room for an older one");
        assert!(!all.may_have(64, (0, 6)) && all.may_have(64, (2, 8)), "three have long buffers: half of six");
        assert!(!all.may_have(64, (1, 8)), "the last eighth is for others");
        assert!(all.may_have(128, (0, 4)) && !all.may_have(128, (0, 2)), "one has a longer one");
        assert!(all.may_have(64, (4, 6)), "most are free");
        // It gets a longer one.
        let grown = all.hold(first.buf, true, 1, qp(7));
        assert_eq!(all.oldest(64, last), Some(qp(7)));
        drop((grown, short));
        assert_eq!(all.oldest(64, last), Some(qp(5)));
        drop(second);
        assert_eq!(all.oldest(64, last), None, "the last one itself is not older");
        assert!(!all.may_have(64, (0, 2)) && all.may_have(64, (0, 4)));
        drop(third);
        assert!(all.long.borrow().is_empty());
    }
}
