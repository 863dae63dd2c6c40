//! Buffers of a shard: their sizes and numbers, the knobs behind them, and the host memory that they need.

use rpcrdma_mempool::{ArenaConfig, AvailableMemory, Class, PoolConfig};

use super::{Config, ConfigError, DebugConfig, MAX_BUFFERS, MemoryConfig, RECEIVE_MARGIN};
use crate::proto::{CHUNK_LIMITS, CallError, Knob};
use crate::start_error::{StartError, StartErrorKind};
use crate::wire::{self, ChunkCounts, ChunkLimits, Version};

/// Bytes in front of a message for a transport header without chunks.
pub(crate) const HEADROOM_INLINE: usize = 64;
/// Bytes in front of an outgoing call for a header with up to three chunks of one segment each.
///
/// A call with more chunks is moved to a longer buffer.
pub(crate) const HEADROOM_CALL: usize = 128;
/// Bytes in front of an outgoing call for a header with the maximum number of chunks, of one segment each.
pub(crate) const HEADROOM_CHUNKS: usize = headroom_for(&ChunkLimits { segments: 1, ..CHUNK_LIMITS }.call());
/// Bytes in front of a reply for the longest possible transport header.
pub(crate) const HEADROOM_REPLY: usize = headroom_for(&CHUNK_LIMITS.reply());
/// Alignment of the pool's buffers.
pub(crate) const BUFFER_ALIGN: usize = 64;
/// Size class of buffers for short messages, headroom included.
pub(crate) const SMALL_BUFFER: usize = 512;

/// Approximate bytes of an outstanding call.
const CALL_BYTES: usize = 100;

/// Bytes that a buffer of this size takes in its arena.
fn padded(size: usize) -> usize {
    Class { size, count: 1 }.bytes()
}

/// Bytes for the longest header with these chunk lists, in whole cache lines.
pub(crate) const fn headroom_for(counts: &ChunkCounts) -> usize {
    (wire::msg_len(Version::V2, true) + counts.encoded_len()).next_multiple_of(64)
}

/// A number of buffers, which the budget determines unless it is set.
struct BufferCount<'a> {
    count: &'a mut usize,
    /// Bytes of each buffer.
    bytes: usize,
    /// Default number, which is also the weight in the budget.
    usual: usize,
    min: usize,
    max: usize,
}

impl BufferCount<'_> {
    /// Bytes of `count` buffers.
    fn bytes(&self, count: usize) -> u128 {
        self.bytes.saturating_mul(count) as u128
    }
}

/// The numbers of buffers of a list of size classes.
///
/// The largest class has four fifths of the weight of the default list.
fn class_counts<'a>(
    list: &'a mut [(usize, usize)],
    usual: &[(usize, usize)],
) -> impl Iterator<Item = BufferCount<'a>> + use<'a> {
    let share = usual.iter().map(|(size, count)| size * count).sum::<usize>() / 5;
    let (largest, others) = (list.iter().map(|class| class.0).max(), list.len().saturating_sub(1).max(1));
    list.iter_mut().map(move |(size, count)| {
        let share = if Some(*size) == largest { 4 * share } else { share / others };
        BufferCount { count, bytes: padded(*size), usual: (share / (*size).max(1)).max(1), min: 1, max: MAX_BUFFERS }
    })
}

impl Config {
    /// The configuration with the numbers of buffers that its budget determines.
    ///
    /// # Errors
    /// The budget is too small. The error names the smallest sufficient budget.
    #[doc(hidden)]
    pub fn sized(&self) -> Result<Self, ConfigError> {
        let mut sized = self.clone();
        let budget = self.memory.budget as u128;
        if budget == 0 {
            return Ok(sized);
        }
        let (usual, message_bytes) =
            (MemoryConfig::default(), self.message_sizes().into_iter().map(padded).sum::<usize>());
        let credits = self.limits.credits as usize + RECEIVE_MARGIN + 1;
        let min_receives = credits.max(self.limits.max_credits as usize).max(2 * RECEIVE_MARGIN);
        let MemoryConfig { receives, small_buffers, message_buffers, bulk_buffers, long_buffers, .. } =
            &mut sized.memory;
        // The largest class holds the longest message, unless the number of its buffers is set.
        if let Some((size, 0)) = long_buffers.iter_mut().max_by_key(|class| class.0) {
            *size = (*size).max(self.wire.reassemble_up_to);
        }
        let buffer_count = |count, bytes, usual, min, max| BufferCount { count, bytes, usual, min, max };
        let all = [
            buffer_count(receives, padded(self.wire.receive_size), usual.receives, min_receives, 1 << 20),
            buffer_count(small_buffers, padded(SMALL_BUFFER), usual.small_buffers, 16, MAX_BUFFERS),
            buffer_count(message_buffers, message_bytes, usual.message_buffers, 1, MAX_BUFFERS),
        ];
        let all = all.into_iter().chain(class_counts(bulk_buffers, &usual.bulk_buffers));
        let all = all.chain(class_counts(long_buffers, &usual.long_buffers));
        let (mut derived, set): (Vec<_>, Vec<_>) = all.partition(|count| *count.count == 0);
        let mut reserved: u128 = set.iter().map(|count| count.bytes(*count.count)).sum();
        let needed = reserved + derived.iter().map(|count| count.bytes(count.min)).sum::<u128>();
        if needed > budget {
            let expected = format!("at least {needed} bytes for the values of memory, limits and wire");
            return Err(ConfigError::new("memory.budget", budget, expected));
        }
        // A number that would be below its minimum is set to the minimum, and the others share the remaining bytes.
        loop {
            let weight: u128 = derived.iter().map(|count| count.bytes(count.usual)).sum();
            let remaining = budget - reserved;
            let short = derived.iter().position(|count| count.usual as u128 * remaining < count.min as u128 * weight);
            let Some(short) = short else {
                for BufferCount { count, usual, max, .. } in derived {
                    *count = usize::try_from(usual as u128 * remaining / weight.max(1)).unwrap_or(max).min(max);
                }
                return Ok(sized);
            };
            let count = derived.swap_remove(short);
            reserved += count.bytes(count.min);
            *count.count = count.min;
        }
    }

    /// Bytes of a shard's memory, including the chunks of one connection at clients.
    #[doc(hidden)]
    pub fn memory_bytes(&self) -> usize {
        self.buffers(true).iter().flat_map(|(_, classes)| classes).map(Class::bytes).sum()
    }

    /// Bytes that each knob costs, with the memory that they are part of.
    #[doc(hidden)]
    pub fn costs(&self) -> Vec<(&'static str, usize, &'static str)> {
        let (limits, DebugConfig { reverse_credits, sample_latency, .. }) = (&self.limits, &self.debug);
        let size = self.wire.receive_size;
        let receive_sized = self.memory.receives + self.message_sizes().len() * self.memory.message_buffers;
        let buffers = self.buffers(true).map(|(knob, classes)| {
            let scope = if knob == Knob::BULK_BUFFERS { "per server shard or client connection" } else { "per shard" };
            (knob.name(), classes.iter().map(Class::bytes).sum::<usize>(), scope)
        });
        let mut costs = vec![
            ("memory.budget", self.memory_bytes(), "per shard, the sum of its buffers"),
            ("wire.receive_size", size * receive_sized, "per shard, in receives and message_buffers"),
            ("limits.credits", size * (limits.credits as usize + 1), "of the receives, per connection"),
            ("limits.max_credits", size * (limits.max_credits as usize + 1), "of the receives, per busy connection"),
            ("limits.max_calls", CALL_BYTES * limits.max_calls, "per client connection, about"),
            (
                "debug.reverse_credits",
                size * *reverse_credits as usize,
                "of the receives, per connection that is called",
            ),
            ("debug.sample_latency", if *sample_latency == 0 { 0 } else { 30 << 10 }, "per called procedure, about"),
            ("iwarp.send_buffer", self.iwarp.send_buffer.unwrap_or(0), "of the kernel, per connection"),
            ("iwarp.receive_buffer", self.iwarp.receive_buffer.unwrap_or(0), "of the kernel, per connection"),
        ];
        costs.extend(buffers);
        costs.retain(|cost| cost.1 > 0);
        costs
    }

    /// Sizes of the buffers that one of `message_buffers` consists of.
    fn message_sizes(&self) -> Vec<usize> {
        let (size, longest) = (self.wire.receive_size, self.longest_message());
        let longer = (longest > size).then_some(longest + HEADROOM_REPLY);
        [size, size + HEADROOM_REPLY].into_iter().chain(longer).collect()
    }

    /// The buffers of a shard, by the knob that determines them.
    ///
    /// Buffers for chunks are included if the shard `serves` calls of peers.
    fn buffers(&self, serves: bool) -> [(Knob, Vec<Class>); 5] {
        let class = |size, count| Class { size, count };
        let all = |classes: &[(usize, usize)]| classes.iter().map(|&(size, count)| class(size, count)).collect();
        let messages = self.message_sizes().into_iter().map(|size| class(size, self.memory.message_buffers)).collect();
        [
            (Knob::SMALL_BUFFERS, vec![class(SMALL_BUFFER, self.memory.small_buffers)]),
            (Knob::MESSAGE_BUFFERS, messages),
            (Knob::RECEIVES, vec![class(self.wire.receive_size, self.memory.receives)]),
            (Knob::LONG_BUFFERS, all(&self.memory.long_buffers)),
            (Knob::BULK_BUFFERS, if serves { all(&self.memory.bulk_buffers) } else { Vec::new() }),
        ]
    }

    /// The buffers of a shard, which may serve calls of peers.
    pub(crate) fn shard_buffers(&self, serves: bool) -> ShardBuffers {
        ShardBuffers { by_knob: self.buffers(serves), longest_reply: self.longest_message() + HEADROOM_REPLY }
    }

    /// The pool of a shard, which may serve calls of peers. Buffers of equal size are one class.
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

    /// Configuration of a pool's arena, without its size.
    pub(crate) fn arena(&self) -> ArenaConfig {
        let MemoryConfig { pages, numa_node: node, .. } = self.memory;
        ArenaConfig { bytes: 0, pages, prefault: self.debug.prefault, node, ..ArenaConfig::default() }
    }

    /// Bytes of the longest buffer of a shard's pool.
    pub(crate) fn longest_buffer(&self, serves: bool) -> usize {
        self.pool(serves).classes.last().map_or(0, |class| class.size)
    }

    /// Error of a missing buffer: none is long enough, or none is free.
    #[cold]
    fn missing_buffer(buffers: &[(Knob, Vec<Class>)], needed: usize, knob_if_too_long: Knob) -> CallError {
        match Self::knob_of(buffers, needed) {
            Some(knob) => CallError::NoMemory { needed, knob },
            None => {
                let limit = buffers.iter().flat_map(|(_, classes)| classes).map(|class| class.size).max().unwrap_or(0);
                CallError::TooLong { needed, limit, knob: knob_if_too_long }
            }
        }
    }

    /// Knob of the smallest buffers that hold the `needed` bytes.
    ///
    /// If several knobs have that size, this is `memory.bulk_buffers`, because bulk data needs the most buffers.
    fn knob_of(buffers: &[(Knob, Vec<Class>)], needed: usize) -> Option<Knob> {
        let sizes = buffers.iter().flat_map(|(knob, classes)| classes.iter().map(|class| (class.size, *knob)));
        sizes
            .filter(|&(size, _)| size >= needed)
            .min_by_key(|&(size, knob)| (size, knob != Knob::BULK_BUFFERS))
            .map(|(_, knob)| knob)
    }

    /// Error of a missing buffer in the exposed memory of one peer.
    #[cold]
    pub(crate) fn missing_exposed_buffer(&self, needed: usize) -> CallError {
        Self::missing_buffer(&[(Knob::BULK_BUFFERS, self.exposed_pool().classes)], needed, Knob::BULK_BUFFERS)
    }

    /// Checks that the host has memory for this number of shards.
    ///
    /// At clients this includes the exposed memory of one connection per shard.
    pub(crate) fn check_memory(&self, serves: bool, shards: usize) -> Result<(), StartError> {
        let mut pools = vec![self.pool(serves)];
        if !serves && !self.memory.bulk_buffers.is_empty() {
            pools.push(self.exposed_pool());
        }
        let mut available = AvailableMemory::now(self.memory.numa_node);
        let free = available.bytes(self.memory.pages);
        let mut set_aside = || {
            let arenas = pools.iter().map(PoolConfig::own_arena).collect::<Result<Vec<_>, _>>()?;
            (0..shards).try_for_each(|_| arenas.iter().try_for_each(|arena| available.set_aside(arena)))
        };
        set_aside().map_err(|source| {
            let (knob, knob_bytes) = self.largest_knob();
            let bytes: usize = pools.iter().flat_map(|pool| &pool.classes).map(Class::bytes).sum();
            let (of_shards, each) = match shards {
                1 => (String::new(), ""),
                _ => (format!(" of {shards} shards"), " each"),
            };
            let text = format_args!(
                "buffers{of_shards} exceed the {free} bytes of memory that are available: {bytes} bytes{each}, \
                 {knob_bytes} of them for {knob}"
            );
            StartError::new(StartErrorKind::Memory, text).caused_by(source)
        })
    }

    /// The knob that determines most of a shard's memory, and its bytes.
    fn largest_knob(&self) -> (Knob, usize) {
        let bytes = |(knob, classes): (Knob, Vec<Class>)| (knob, classes.iter().map(Class::bytes).sum());
        self.buffers(true).into_iter().map(bytes).max_by_key(|&(_, bytes)| bytes).unwrap_or((Knob::RECEIVES, 0))
    }

    /// Adds the responsible knob to an error of a shard's pool.
    #[cold]
    pub(crate) fn add_memory_knob(&self, error: StartError) -> StartError {
        match error.kind() {
            StartErrorKind::Memory => {
                let (knob, bytes) = self.largest_knob();
                error.with_knobs(format_args!("{knob} has most of the shard's memory: {bytes} bytes"))
            }
            StartErrorKind::Config if self.memory.numa_node.is_some() => error.with_knobs("memory.numa_node"),
            _ => error,
        }
    }
}

/// The buffers of a shard, by the knob that determines them.
#[derive(Debug)]
pub(crate) struct ShardBuffers {
    by_knob: [(Knob, Vec<Class>); 5],
    /// Bytes of a reply that fits a message, its headers included.
    longest_reply: usize,
}

impl ShardBuffers {
    /// Knob of the buffers that hold the `needed` bytes, or `memory.bulk_buffers` if none does.
    #[cold]
    pub(crate) fn knob_of(&self, needed: usize) -> Knob {
        Config::knob_of(&self.by_knob, needed).unwrap_or(Knob::BULK_BUFFERS)
    }

    /// Error of a missing buffer.
    #[cold]
    pub(crate) fn missing_buffer(&self, needed: usize) -> CallError {
        Config::missing_buffer(&self.by_knob, needed, Knob::LONG_BUFFERS)
    }

    /// Bytes of the longest buffer that a reply of `len` bytes, including its headers, may take.
    #[inline]
    pub(crate) fn longest_for_reply(&self, len: usize) -> usize {
        if len <= self.longest_reply { self.longest_reply } else { usize::MAX }
    }
}
