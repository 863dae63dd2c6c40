//! Memory of a shard.

use rpcrdma_mempool::{Arena, PagePolicy};

use super::{BUFFER_ALIGN, ConfigError, RECEIVE_MARGIN, check, range};

/// Memory of a shard: receives and buffers, which are made and registered when it starts.
///
/// | too small | too large |
/// |---|---|
/// | `receives`: connections are refused, evicted, or get few credits | `receive_size` bytes each |
/// | `small_buffers`, `message_buffers`: calls fail with [`NoMemory`](crate::CallError::NoMemory), replies wait | 512 bytes, or two messages and headroom, each |
/// | `bulk_buffers`, `long_buffers`: [`TooLong`](crate::CallError::TooLong) if no class is so long, else calls wait | bytes times number |
///
/// A start that asks for more than the host has fails with [`BuffersError`](crate::BuffersError).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct MemoryConfig {
    /// Receives of the shard: bounds receive memory whatever the number of connections. When they are short, each host
    /// keeps an equal part, at most half. 256 to 1048576. Default 4096.
    pub receives: usize,
    /// Buffers of 512 bytes for short messages, 16 to 16777216. Default 4096: as many as [`receives`](Self::receives),
    /// so that each call under way has one for a short reply, whatever others keep.
    pub small_buffers: usize,
    /// Buffers of [`receive_size`](super::WireConfig::receive_size) bytes and headroom, beside those for
    /// [`receives`](Self::receives): for long messages, and for received ones that the application still holds.
    /// 1 to 16777216. Default 512.
    pub message_buffers: usize,
    /// Buffers for bulk data: bytes and number of each class, 1 byte to 1 GiB and 1 to 16777216. A server reads and
    /// writes chunks through them. A client connection has its own set, made when it is first used. Where peers reach
    /// exposed memory at any time (the software fabric) a shard has one more set, for copies of long replies. Default
    /// 32 of 64 KiB and 8 of 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::classes"))]
    pub bulk_buffers: Vec<(usize, usize)>,
    /// Buffers for RPC messages longer than one Send, to be sent, assembled or fetched: bytes and number of each class,
    /// in the same ranges. Default 16 of 32 KiB and 2 of 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::classes"))]
    pub long_buffers: Vec<(usize, usize)>,
    /// Alignment of the memory of Read chunks and of results in Write chunks, at a server: what the device wants that
    /// they go on to, such as 512 or 4096 bytes for O_DIRECT. Each such buffer must hold so much more, less 64 bytes:
    /// [`bulk_buffers`](Self::bulk_buffers) must be longer than the chunks. A chunk that no such buffer holds is not
    /// aligned; any other chunk takes those buffers alone. A power of two, 64 to 4096. Default 64.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub chunk_align: usize,
    /// Pages that the pools are made of. Default: the largest available.
    pub pages: PagePolicy,
    /// Whether the pools' pages are touched when they are made. Otherwise the first use of each page costs a page
    /// fault, and a host without memory is noticed then: for tests, which make many shards and use little of each. RDMA
    /// devices pin, and so touch, all registered memory. Default true.
    pub prefault: bool,
    /// NUMA node of the pools. Default: where the shard runs.
    pub numa_node: Option<u32>,
    /// Further memory of the application that the shard may send from
    /// ([`ServerCall::set_result`](crate::ServerCall::set_result)), and read into
    /// ([`Procedure::place_reads_in`](crate::Procedure::place_reads_in)): arenas of its own making, or over memory that it has
    /// mapped ([`Arena::over`]). Never exposed to peers. Each shard of a server registers all of them, so that whichever
    /// has a call may answer from any. Default none. No part of configuration files.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub arenas: Vec<Arena>,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            receives: 4096,
            small_buffers: 4096,
            message_buffers: 512,
            bulk_buffers: vec![(64 << 10, 32), (1 << 20, 8)],
            long_buffers: vec![(32 << 10, 16), (1 << 20, 2)],
            chunk_align: BUFFER_ALIGN,
            pages: PagePolicy::Auto,
            prefault: true,
            numa_node: None,
            arenas: Vec::new(),
        }
    }
}

impl MemoryConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        const MOST: usize = 1 << 24;
        range("memory.receives", self.receives, 2 * RECEIVE_MARGIN..=1 << 20)?;
        range("memory.small_buffers", self.small_buffers, 16..=MOST)?;
        range("memory.message_buffers", self.message_buffers, 1..=MOST)?;
        let align = self.chunk_align;
        let possible = align.is_power_of_two() && (BUFFER_ALIGN..=4096).contains(&align);
        check(possible, "memory.chunk_align", align, "a power of two, 64 to 4096 bytes")?;
        for (knob, classes) in
            [("memory.bulk_buffers", &self.bulk_buffers), ("memory.long_buffers", &self.long_buffers)]
        {
            for &(size, count) in classes {
                let possible = (1..=1 << 30).contains(&size) && (1..=MOST).contains(&count);
                let wanted = "1 to 1073741824 bytes and 1 to 16777216 buffers of each class";
                check(possible, knob, format_args!("{count} of {size} bytes"), wanted)?;
            }
        }
        Ok(())
    }
}
