//! Buffers of the shard's pools, and the lengths that each user may take.

use rpcrdma_mempool::{ArenaId, Buf, Pool};

use super::Context;
use crate::config::{BUFFER_ALIGN, HEADROOM_CHUNKS};
use crate::fabric::{Access, Fabric};
use crate::proto::{CallError, Knob};
use crate::start_error::StartError;

impl<F: Fabric> Context<F> {
    /// Allocates a pool buffer for `len` bytes; counts failures.
    #[inline]
    pub(in crate::shard) fn alloc(&mut self, len: usize) -> Option<Buf> {
        let buf = self.pool.alloc(len);
        self.stats.pool_empty += u64::from(buf.is_none());
        buf
    }

    /// As above, for a call of this side.
    ///
    /// # Errors
    /// Out of buffers, or too long.
    #[inline]
    pub(in crate::shard) fn alloc_for_call(&mut self, len: usize) -> Result<Buf, CallError> {
        self.alloc(len).ok_or_else(|| self.lacks_buffer(len))
    }

    /// Reason for the lack of a pool buffer for `len` bytes.
    #[cold]
    pub(in crate::shard) fn lacks_buffer(&self, len: usize) -> CallError {
        self.config.lacks_buffer(self.serves, len)
    }

    /// The knob for pool buffers of `len` bytes, or for longer ones.
    #[cold]
    pub(in crate::shard) fn knob_of_buffers(&self, len: usize) -> Knob {
        self.config.knob_of_buffers(self.serves, len)
    }

    /// The longest buffer for a reply of `len` bytes. A reply that fits a message leaves the longer ones to bulk data:
    /// otherwise users with many unanswered calls would hold all of them.
    #[inline(always)]
    pub(in crate::shard) fn longest_for_reply(&self, len: usize) -> usize {
        self.config.longest_for_reply(len).min(self.longest_for(len))
    }

    /// Bytes of the smallest buffers that hold `len` bytes.
    pub(in crate::shard) fn class_of(&self, len: usize) -> usize {
        self.pool.sizes().find(|&size| size >= len).unwrap_or(usize::MAX)
    }

    /// Reserves buffers of a size for the calls that wait for them.
    pub(in crate::shard) fn reserve_size(&mut self, size: usize) {
        if let Err(at) = self.awaited.binary_search(&size) {
            self.awaited.insert(at, size);
        }
    }

    /// Ends all reservations of sizes.
    pub(in crate::shard) fn release_sizes(&mut self) {
        self.awaited.clear();
    }

    /// Whether this size is reserved for waiting calls.
    pub(in crate::shard) fn is_awaited(&self, size: usize) -> bool {
        self.awaited.contains(&size)
    }

    /// Whether any size is reserved.
    #[inline(always)]
    pub(in crate::shard) fn awaits_some(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// The longest buffer for `len` bytes that no call waits for.
    #[inline(always)]
    pub(in crate::shard) fn longest_for(&self, len: usize) -> usize {
        if self.awaits_some() { self.longest_not_awaited(len) } else { usize::MAX }
    }

    #[cold]
    fn longest_not_awaited(&self, len: usize) -> usize {
        let own = self.class_of(len);
        self.awaited.iter().find(|&&size| size > own).map_or(usize::MAX, |&size| size - 1)
    }

    /// Bytes of a chunk's buffer for `len` bytes, with room for alignment if the pool has such buffers.
    #[inline]
    pub(in crate::shard) fn chunk_room(&self, len: usize) -> usize {
        if self.config.memory.chunk_align > BUFFER_ALIGN { self.aligned_room(len) } else { len }
    }

    #[inline(never)]
    fn aligned_room(&self, len: usize) -> usize {
        let room = len + self.config.memory.chunk_align - BUFFER_ALIGN;
        if self.pool.room(room).1 > 0 { room } else { len }
    }

    /// Allocates a pool buffer for a chunk of `len` bytes, aligned as configured.
    #[inline]
    pub(in crate::shard) fn alloc_chunk(&self, len: usize) -> Option<Buf> {
        match self.config.memory.chunk_align > BUFFER_ALIGN {
            true => self.alloc_aligned(len),
            false => self.pool.alloc_within(len, self.longest_for(len)),
        }
    }

    /// The window starts at an aligned byte within the buffer, so that the buffers still spread over the sets of the
    /// cache.
    #[inline(never)]
    fn alloc_aligned(&self, len: usize) -> Option<Buf> {
        let (align, room) = (self.config.memory.chunk_align, self.aligned_room(len));
        let mut buf = self.pool.alloc_within(room, self.longest_for(room))?;
        if room > len {
            buf.set_window(buf.address().next_multiple_of(align) - buf.address(), len);
        }
        Some(buf)
    }

    /// Allocates from an extra pool of bulk buffers, created at first use: exposed to a peer, or to none.
    ///
    /// # Errors
    /// [`CallError::NoMemory`] while no such buffer is free, [`CallError::TooLong`] if the pool never has one,
    /// [`CallError::OutOfMemory`] if the system refuses the pool's memory.
    pub(in crate::shard) fn alloc_bulk(
        &mut self,
        pool: &mut Option<Pool>,
        exposed: bool,
        len: usize,
    ) -> Result<Buf, CallError> {
        if pool.is_none() && !self.config.memory.bulk_buffers.is_empty() {
            match self.bulk_pool(exposed) {
                Ok(made) => *pool = Some(made),
                Err(error) => {
                    let what = if exposed { "memory to expose to a peer" } else { "memory for a copy of a reply" };
                    self.error(what, format_args!("{what}: {error}"));
                    return Err(CallError::OutOfMemory { answered: false, os_error: error.os_error() });
                }
            }
        }
        let buf = pool.as_ref().and_then(|pool| {
            pool.drain_remote();
            pool.alloc(len)
        });
        buf.ok_or_else(|| self.config.lacks_exposed_buffer(len))
    }

    fn bulk_pool(&mut self, exposed: bool) -> Result<Pool, StartError> {
        let pool = Pool::new(&self.config.exposed_pool())?;
        if exposed {
            self.fabric.register(pool.arena(), Access::REMOTE)?;
        }
        Ok(pool)
    }

    /// Whether the fabric has registered this memory, for work requests of this side.
    pub(in crate::shard) fn knows(&self, arena: ArenaId) -> bool {
        arena == self.pool.arena().id() || self.config.memory.arenas.iter().any(|own| own.id() == arena)
    }

    /// Copies a message, with the usual headroom for a header with chunks. `None` without memory.
    pub(in crate::shard) fn copy_of(&mut self, message: &[u8]) -> Option<Buf> {
        self.copy_with(HEADROOM_CHUNKS, message)
    }

    /// Copies a message, with `room` bytes of headroom.
    pub(in crate::shard) fn copy_with(&mut self, room: usize, message: &[u8]) -> Option<Buf> {
        let mut copy = self.alloc(room + message.len())?;
        copy.set_window(room, message.len());
        copy.copy_from_slice(message);
        Some(copy)
    }

    /// Returns a message with the usual headroom for a header with chunks; copies it if it has less.
    pub(in crate::shard) fn roomy(&mut self, message: Buf) -> Option<Buf> {
        if message.start() >= HEADROOM_CHUNKS { Some(message) } else { self.copy_of(&message) }
    }
}

#[cfg(test)]
mod tests {
    use crate::shard::testing::{context, small};

    #[test]
    fn a_chunk_is_aligned_where_any_buffer_lets_it_be() {
        let mut config = small();
        (config.memory.chunk_align, config.memory.bulk_buffers) = (4096, vec![(1 << 17, 2)]);
        let cx = context(config.clone());
        let rooms = [(100, 100 + 4032), (1 << 16, (1 << 16) + 4032), (1 << 17, 1 << 17)];
        rooms.into_iter().for_each(|(len, room)| assert_eq!(cx.chunk_room(len), room));
        let first = cx.alloc_chunk(1 << 16).expect("of the longer buffers");
        assert!(first.address().is_multiple_of(4096) && first.capacity() == 1 << 17);
        assert_eq!(cx.alloc_chunk(1 << 17).expect("the other").start(), 0, "none is long enough to align it");
        let _second = cx.alloc_chunk(1 << 16).expect("the other");
        assert!(cx.alloc_chunk(1 << 16).is_none(), "those that would not be aligned are no second choice");
        config.memory.chunk_align = 64;
        assert_eq!(context(config).chunk_room(100), 100);
    }
}
