//! Memory of a shard: its pool, its Receives, and the buffer sizes that are withheld for waiting calls.

use rpcrdma_mempool::{Arena, ArenaId, Buf, Pool};

use super::admission::receive_budget::ReceiveBudget;
use crate::config::{BUFFER_ALIGN, Config, HEADROOM_CHUNKS, ShardBuffers};
use crate::proto::{CallError, Knob};
use crate::start_error::StartError;

/// Appends an item to a list that nearly always has room: builds it in place, and grows the list out of line.
#[inline(always)]
pub(super) fn push<T>(list: &mut Vec<T>, make: impl FnOnce() -> T) {
    if list.len() < list.capacity() { list.push(make()) } else { grow(list, make()) }
}

#[cold]
#[inline(never)]
fn grow<T>(list: &mut Vec<T>, item: T) {
    list.push(item);
}

/// Receives of one size other than the configured one.
#[derive(Debug)]
pub(super) struct SizedPool {
    pub(super) size: usize,
    pub(super) pool: Pool,
}

/// Sizes of a shard's Receives. They [change](super::characteristics) while calls run.
#[derive(Debug, Default)]
pub(super) struct ReceiveSizes {
    /// Lower bound of the message size of all Receives, announced to new peers.
    pub(super) announced: usize,
    /// Message size of new Receives.
    pub(super) filled: usize,
    /// Memory of the current size, unless that is the configured one.
    pub(super) current: Option<SizedPool>,
    /// Memory of earlier sizes, still in use.
    pub(super) retired: Vec<SizedPool>,
    /// Receives posted since the start.
    pub(super) posted: u64,
    /// Buffer bytes of a new Receive.
    pub(super) capacity: usize,
    /// Buffer bytes of a Receive of the configured size. Longer buffers also serve calls, so they do not count as
    /// Receives.
    pub(super) configured_capacity: usize,
}

impl ReceiveSizes {
    /// Pools of sizes other than the configured one.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.current.iter().chain(&self.retired).map(|sized| &sized.pool)
    }
}

/// Memory of a shard. It has no policy about calls.
pub(super) struct ShardMemory {
    buffers: ShardBuffers,
    /// Alignment of chunks in the pool.
    chunk_align: usize,
    /// Arenas beside the pool's that the fabric has registered.
    arenas: Vec<ArenaId>,
    pub(super) pool: Pool,
    pub(super) receives: ReceiveBudget,
    /// Buffers of a Receive's size that are left to calls, unless Receives need them.
    left_to_calls: usize,
    pub(super) sizes: ReceiveSizes,
    /// Buffer sizes that are withheld for waiting calls, ascending.
    withheld_sizes: Vec<usize>,
    /// Failed allocations.
    pub(super) failures: u64,
}

impl ShardMemory {
    /// Allocates the memory of a configuration; `serves` includes memory for peers' calls.
    ///
    /// # Errors
    /// A limit is exceeded, or a system call failed. The text names the cause, the knob, and the remedy.
    pub(super) fn new(config: &Config, serves: bool) -> Result<Self, StartError> {
        let (classes, announced) = (config.pool(serves), config.wire.receive_size);
        let capacity = classes.classes.iter().map(|class| class.size).find(|&size| size >= announced).unwrap_or(0);
        let pool = Pool::new(&classes).map_err(|error| config.add_memory_knob(error.into()))?;
        log::debug!("shard pool: {}", pool.arena().report());
        let (filled, configured_capacity) = (announced, capacity);
        Ok(Self {
            buffers: config.shard_buffers(serves),
            chunk_align: config.memory.chunk_align,
            arenas: config.memory.arenas.iter().map(Arena::id).collect(),
            pool,
            receives: ReceiveBudget::new(config.memory.receives),
            left_to_calls: config.memory.message_buffers / 2,
            sizes: ReceiveSizes { announced, filled, capacity, configured_capacity, ..ReceiveSizes::default() },
            withheld_sizes: Vec::new(),
            failures: 0,
        })
    }

    /// Takes buffers for Receives, up to the reserved number, the overcommit, and the margin; `spared` of the reserved
    /// ones are not needed. Beyond the needed ones, takes only buffers of a Receive's size, and leaves half of
    /// `message_buffers` free for calls.
    #[inline]
    pub(super) fn take_receives(&mut self, spared: u32) {
        self.sizes.pools().for_each(|pool| _ = pool.drain_remote());
        let current = self.sizes.current.as_ref();
        let (pool, size) = current.map_or((&self.pool, self.sizes.filled), |current| (&current.pool, current.size));
        let needed = self.receives.needed_without(spared);
        let surplus = pool.first_room(size).0.saturating_sub(self.left_to_calls);
        let mut bufs = pool.alloc_many(size);
        for taken in 0..self.receives.wanted().min(needed.max(surplus)) {
            let Some(buf) = bufs.next() else {
                self.failures += 1;
                break;
            };
            if taken >= needed && buf.capacity() > self.sizes.capacity {
                break;
            }
            self.receives.add(buf);
        }
        drop(bufs);
        self.receives.count_surplus(pool.first_room(size).0);
    }

    /// Allocates a pool buffer for `len` bytes; counts failures.
    #[inline]
    pub(super) fn alloc(&mut self, len: usize) -> Option<Buf> {
        let buf = self.pool.alloc(len);
        self.failures += u64::from(buf.is_none());
        buf
    }

    /// Allocates a pool buffer of `len` bytes for a call of this side.
    ///
    /// # Errors
    /// No buffer is free, or none is that long.
    #[inline]
    pub(super) fn alloc_for_call(&mut self, len: usize) -> Result<Buf, CallError> {
        self.alloc(len).ok_or_else(|| self.missing_buffer(len))
    }

    /// Reason for the lack of a pool buffer for `len` bytes.
    #[cold]
    pub(super) fn missing_buffer(&self, len: usize) -> CallError {
        self.buffers.missing_buffer(len)
    }

    /// The knob for pool buffers of `len` bytes, or for longer ones.
    pub(super) fn knob_of_buffers(&self, len: usize) -> Knob {
        self.buffers.knob_of(len)
    }

    /// Bytes of the longest buffer that a reply of `len` bytes may take, even if calls wait for buffers of that size.
    pub(super) fn longest_suitable(&self, len: usize) -> usize {
        self.buffers.longest_for_reply(len)
    }

    /// Bytes of the longest buffer that a reply of `len` bytes may take, below the withheld sizes. A reply that fits a
    /// message leaves longer buffers to bulk data, because otherwise users with many unanswered calls would hold all of
    /// them.
    #[inline(always)]
    pub(super) fn longest_for_reply(&self, len: usize) -> usize {
        self.buffers.longest_for_reply(len).min(self.longest_for(len))
    }

    /// Bytes of the smallest buffers that hold `len` bytes.
    pub(super) fn class_of(&self, len: usize) -> usize {
        self.pool.sizes().find(|&size| size >= len).unwrap_or(usize::MAX)
    }

    /// Withholds buffers of a size from later calls, because an earlier call waits for them.
    pub(super) fn withhold_size(&mut self, size: usize) {
        if let Err(at) = self.withheld_sizes.binary_search(&size) {
            self.withheld_sizes.insert(at, size);
        }
    }

    /// Releases all withheld sizes.
    pub(super) fn release_sizes(&mut self) {
        self.withheld_sizes.clear();
    }

    /// Whether this size is withheld for waiting calls.
    pub(super) fn is_size_withheld(&self, size: usize) -> bool {
        self.withheld_sizes.contains(&size)
    }

    /// Whether any size is withheld.
    #[inline(always)]
    pub(super) fn has_withheld_sizes(&self) -> bool {
        !self.withheld_sizes.is_empty()
    }

    /// Bytes of the longest buffer that `len` bytes may take, below the withheld sizes.
    #[inline(always)]
    pub(super) fn longest_for(&self, len: usize) -> usize {
        if self.has_withheld_sizes() { self.longest_not_withheld(len) } else { usize::MAX }
    }

    #[cold]
    fn longest_not_withheld(&self, len: usize) -> usize {
        let class = self.class_of(len);
        self.withheld_sizes.iter().find(|&&size| size > class).map_or(usize::MAX, |&size| size - 1)
    }

    /// Number of buffers that calls share: `count` buffers that hold `len` bytes, less those that are Receives.
    #[inline]
    pub(super) fn unposted(&self, len: usize, count: usize) -> usize {
        let posted = if len <= self.sizes.configured_capacity { self.receives.held() } else { 0 };
        count.saturating_sub(posted)
    }

    /// Bytes of the buffer for a chunk of `len` bytes, with room for alignment if the pool has such buffers.
    #[inline]
    pub(super) fn chunk_room(&self, len: usize) -> usize {
        if self.chunk_align > BUFFER_ALIGN { self.aligned_room(len) } else { len }
    }

    #[inline(never)]
    fn aligned_room(&self, len: usize) -> usize {
        let room = len + self.chunk_align - BUFFER_ALIGN;
        if self.pool.room(room).1 > 0 { room } else { len }
    }

    /// Allocates a pool buffer for a chunk of `len` bytes, aligned as configured.
    #[inline]
    pub(super) fn alloc_chunk(&self, len: usize) -> Option<Buf> {
        match self.chunk_align > BUFFER_ALIGN {
            true => self.alloc_aligned(len),
            false => self.pool.alloc_within(len, self.longest_for(len)),
        }
    }

    /// Allocates a buffer whose range starts at an aligned byte. The buffers themselves are not aligned, so that they
    /// spread over the sets of the cache.
    #[inline(never)]
    fn alloc_aligned(&self, len: usize) -> Option<Buf> {
        let (align, room) = (self.chunk_align, self.aligned_room(len));
        let mut buf = self.pool.alloc_within(room, self.longest_for(room))?;
        if room > len {
            buf.set_window(buf.address().next_multiple_of(align) - buf.address(), len);
        }
        Some(buf)
    }

    /// Whether the fabric has registered this memory, for work requests of this side.
    pub(super) fn is_registered(&self, arena: ArenaId) -> bool {
        arena == self.pool.arena().id() || self.arenas.contains(&arena)
    }

    /// Copies a message, with the usual headroom for a header with chunks. `None` without memory.
    pub(super) fn copy_of(&mut self, message: &[u8]) -> Option<Buf> {
        self.copy_with(HEADROOM_CHUNKS, message)
    }

    /// Copies a message, with `room` bytes of headroom.
    pub(super) fn copy_with(&mut self, room: usize, message: &[u8]) -> Option<Buf> {
        let mut copy = self.alloc(room + message.len())?;
        copy.set_window(room, message.len());
        copy.copy_from_slice(message);
        Some(copy)
    }

    /// Returns a message with the usual headroom for a header with chunks; copies a message that has less.
    pub(super) fn with_headroom(&mut self, message: Buf) -> Option<Buf> {
        if message.start() >= HEADROOM_CHUNKS { Some(message) } else { self.copy_of(&message) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::admission::receive_budget::ReceiveReservation;
    use crate::shard::testing::{context, small_config};

    /// The free buffers of a Receive's size, and those of the next size.
    fn free(memory: &ShardMemory) -> [usize; 2] {
        let size = memory.sizes.filled;
        let own = memory.pool.first_room(size).0;
        [own, memory.pool.first_room(size + 1).0]
    }

    /// `small` has 64 `message_buffers`.
    #[test]
    fn receives_that_are_not_needed_leave_buffers_to_calls() {
        let mut memory = context(small_config()).memory;
        let mut reservation = ReceiveReservation::default();
        memory.receives.reserve(&mut reservation, 250, 0);
        let [own, longer] = free(&memory);
        let calls: Vec<_> = memory.pool.alloc_many(memory.sizes.filled).take(own - 100).collect();
        let before = memory.receives.held();
        memory.take_receives(250);
        assert_eq!((memory.receives.held() - before, free(&memory)), (100 - 32, [32, longer]));
        // If all reserved Receives are needed, they take even longer buffers.
        memory.take_receives(0);
        assert_eq!(memory.receives.held(), 250);
        let [own, rest] = free(&memory);
        assert_eq!((own, longer - rest), (0, 250 - before - 100));
        drop(calls);
    }

    #[test]
    fn a_chunk_is_aligned_if_any_buffer_has_room_for_that() {
        let mut config = small_config();
        (config.memory.chunk_align, config.memory.bulk_buffers) = (4096, vec![(1 << 17, 2)]);
        let memory = context(config.clone()).memory;
        let rooms = [(100, 100 + 4032), (1 << 16, (1 << 16) + 4032), (1 << 17, 1 << 17)];
        rooms.into_iter().for_each(|(len, room)| assert_eq!(memory.chunk_room(len), room));
        let first = memory.alloc_chunk(1 << 16).expect("one of the longer buffers");
        assert!(first.address().is_multiple_of(4096) && first.capacity() == 1 << 17);
        assert_eq!(memory.alloc_chunk(1 << 17).expect("the other buffer").start(), 0, "no buffer has room to align it");
        let _second = memory.alloc_chunk(1 << 16).expect("the other buffer");
        assert!(memory.alloc_chunk(1 << 16).is_none(), "shorter buffers cannot align it, and are not used");
        config.memory.chunk_align = 64;
        assert_eq!(context(config).memory.chunk_room(100), 100);
    }
}
