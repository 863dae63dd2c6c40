//! Buffers of a shard: sizes, knobs, and memory of the host.

use rpcrdma_mempool::{ArenaConfig, AvailableMemory, Class, PoolConfig};

use super::{Config, MemoryConfig};
use crate::proto::{CallError, Knob, LIMITS};
use crate::start_error::{StartError, StartErrorKind};
use crate::wire::{self, ChunkCounts, Limits, Version};

/// Bytes in front of a message for a transport header without chunks.
pub(crate) const HEADROOM_PLAIN: usize = 64;
/// The same of an own call with up to three chunks of one segment each; others are moved to where there is room.
pub(crate) const HEADROOM_CALL: usize = 128;
/// The same of an own call with as many chunks as it may have, of one segment each.
pub(crate) const HEADROOM_CHUNKS: usize = headroom_for(&Limits { segments: 1, ..LIMITS }.call());
/// Bytes in front of a reply for the longest transport header that it can have.
pub(crate) const HEADROOM_REPLY: usize = headroom_for(&LIMITS.reply());
/// Alignment of the pool's buffers.
pub(crate) const BUFFER_ALIGN: usize = 64;
/// Size class of buffers for short messages, headroom included.
pub(crate) const SMALL_BUFFER: usize = 512;

/// Room for the longest header with such lists, in whole cache lines.
pub(crate) const fn headroom_for(counts: &ChunkCounts) -> usize {
    (wire::msg_len(Version::V2, true) + counts.encoded_len()).next_multiple_of(64)
}

impl Config {
    /// The buffers of a shard, by the knob that asks for them; `serves`: some of them for the peers' calls.
    fn buffers(&self, serves: bool) -> [(Knob, Vec<Class>); 5] {
        let class = |size, count| Class { size, count };
        let all = |classes: &[(usize, usize)]| classes.iter().map(|&(size, count)| class(size, count)).collect();
        let messages = self.memory.message_buffers;
        let mut message_buffers =
            vec![class(self.wire.receive_size, messages), class(self.wire.receive_size + HEADROOM_REPLY, messages)];
        if self.wire.longest_message() > self.wire.receive_size {
            message_buffers.push(class(self.wire.longest_message() + HEADROOM_REPLY, messages));
        }
        [
            (Knob::SMALL_BUFFERS, vec![class(SMALL_BUFFER, self.memory.small_buffers)]),
            (Knob::MESSAGE_BUFFERS, message_buffers),
            (Knob::RECEIVES, vec![class(self.wire.receive_size, self.memory.receives)]),
            (Knob::LONG_BUFFERS, all(&self.memory.long_buffers)),
            (Knob::BULK_BUFFERS, if serves { all(&self.memory.bulk_buffers) } else { Vec::new() }),
        ]
    }

    /// The pool of a shard: buffers of one size are one class, whatever they are for.
    pub(crate) fn pool(&self, serves: bool) -> PoolConfig {
        let mut classes: Vec<_> = self.buffers(serves).into_iter().flat_map(|(_, classes)| classes).collect();
        classes.sort_by_key(|class| class.size);
        classes.dedup_by(|next, kept| {
            let same = next.size == kept.size;
            kept.count += if same { next.count } else { 0 };
            same
        });
        PoolConfig { classes, arena: self.arena() }
    }

    /// Pool of the memory exposed to one peer.
    pub(crate) fn exposed_pool(&self) -> PoolConfig {
        let classes = self.memory.bulk_buffers.iter().map(|&(size, count)| Class { size, count }).collect();
        PoolConfig { classes, arena: self.arena() }
    }

    /// Arena of a pool, without its bytes.
    pub(crate) fn arena(&self) -> ArenaConfig {
        let MemoryConfig { pages, prefault, numa_node: node, .. } = self.memory;
        ArenaConfig { bytes: 0, pages, prefault, node, ..ArenaConfig::default() }
    }

    /// Bytes of the longest buffer of a shard's pool.
    pub(crate) fn longest_buffer(&self, serves: bool) -> usize {
        self.pool(serves).classes.last().map_or(0, |class| class.size)
    }

    /// Error of a missing buffer: none is so long, or none is free.
    #[cold]
    fn lacks(buffers: &[(Knob, Vec<Class>)], needed: usize, last: Knob) -> CallError {
        match Self::knob_of(buffers, needed) {
            Some(knob) => CallError::NoMemory { needed, knob },
            None => {
                let limit = buffers.iter().flat_map(|(_, classes)| classes).map(|class| class.size).max().unwrap_or(0);
                CallError::TooLong { needed, limit, knob: last }
            }
        }
    }

    /// Knob of the smallest of these buffers that hold so many bytes. Of equal ones: that of bulk data, which most
    /// needs are.
    fn knob_of(buffers: &[(Knob, Vec<Class>)], needed: usize) -> Option<Knob> {
        let of_all = buffers.iter().flat_map(|(knob, classes)| classes.iter().map(|class| (class.size, *knob)));
        of_all
            .filter(|&(size, _)| size >= needed)
            .min_by_key(|&(size, knob)| (size, knob != Knob::BULK_BUFFERS))
            .map(|(_, knob)| knob)
    }

    /// Knob of the pool's buffers that hold so many bytes, or would have to.
    #[cold]
    pub(crate) fn knob_of_buffers(&self, serves: bool, needed: usize) -> Knob {
        Self::knob_of(&self.buffers(serves), needed).unwrap_or(Knob::BULK_BUFFERS)
    }

    /// Bytes of the longest buffer that a reply of `len` bytes, its headers included, may have.
    #[inline]
    pub(crate) fn longest_for_reply(&self, len: usize) -> usize {
        let longest = self.wire.longest_message() + HEADROOM_REPLY;
        if len <= longest { longest } else { usize::MAX }
    }

    /// Error of a missing buffer in the shard's pool.
    #[cold]
    pub(crate) fn lacks_buffer(&self, serves: bool, needed: usize) -> CallError {
        Self::lacks(&self.buffers(serves), needed, Knob::LONG_BUFFERS)
    }

    /// Error of a missing buffer in the exposed memory of one peer.
    #[cold]
    pub(crate) fn lacks_exposed_buffer(&self, needed: usize) -> CallError {
        Self::lacks(&[(Knob::BULK_BUFFERS, self.exposed_pool().classes)], needed, Knob::BULK_BUFFERS)
    }

    /// Checks the host's memory for so many shards like this, with exposed memory of one connection at clients.
    pub(crate) fn check_memory(&self, serves: bool, shards: usize) -> Result<(), StartError> {
        let mut pools = vec![self.pool(serves)];
        if !serves && !self.memory.bulk_buffers.is_empty() {
            pools.push(self.exposed_pool());
        }
        let mut available = AvailableMemory::now(self.memory.numa_node);
        let free = available.bytes(self.memory.pages);
        let mut fit = || {
            let arenas = pools.iter().map(PoolConfig::own_arena).collect::<Result<Vec<_>, _>>()?;
            (0..shards).try_for_each(|_| arenas.iter().try_for_each(|arena| available.set_aside(arena)))
        };
        fit().map_err(|source| {
            let bytes_of = |classes: &[Class]| classes.iter().map(|class| class.size.saturating_mul(class.count)).sum();
            let of_knobs = self.buffers(true).map(|(knob, classes)| (knob, bytes_of(&classes)));
            let (knob, knob_bytes) = of_knobs.into_iter().max_by_key(|of| of.1).unwrap_or((Knob::RECEIVES, 0));
            let bytes: usize = pools.iter().map(|pool| bytes_of(&pool.classes)).sum();
            let (of, each) = match shards {
                1 => (String::new(), ""),
                _ => (format!(" of {shards} shards"), " each"),
            };
            let text = format_args!(
                "buffers{of} exceed the {free} bytes of memory that are available: {bytes} bytes{each}, of which \
                 {knob_bytes} ({knob})"
            );
            StartError::new(StartErrorKind::Memory, text).because(source)
        })
    }
}
