//! Memory of a shard.

use rpcrdma_mempool::{Arena, PagePolicy};

use super::{BUFFER_ALIGN, ConfigError, RECEIVE_MARGIN, between, check};

/// Most buffers of a size.
pub(crate) const MOST_BUFFERS: usize = 1 << 24;

knobs! {
    /// Memory of a shard: receives and buffers, registered at the start.
    ///
    /// | too small | too large |
    /// |---|---|
    /// | `receives`: connections are refused, evicted, or get few credits | `receive_size` bytes each |
    /// | `small_buffers`, `message_buffers`: calls fail with [`NoMemory`](crate::CallError::NoMemory), replies wait | 512 bytes, or two messages and headroom, each |
    /// | `bulk_buffers`, `long_buffers`: [`TooLong`](crate::CallError::TooLong) if no class is so long, else calls wait | bytes times number |
    ///
    /// A start that asks for more than the host has fails with
    /// [`StartErrorKind::Memory`](crate::StartErrorKind::Memory). With a [`budget`](Self::budget), a number of 0 is
    /// computed: see [`MemoryConfig::within`].
    pub struct MemoryConfig, "memory";

    /// Most bytes of a shard's memory; 0 for no limit.
    ///
    /// They are for receives and buffers, and at clients for the chunks of one connection. The numbers below that are 0
    /// share what the others leave of it, in the proportions of their defaults. There are always receives for the
    /// credits of a connection, and a buffer of each size. Default 0.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub budget: usize = 0;
    /// Receives of the shard, 256 to 1048576. Default 4096.
    ///
    /// Bounds receive memory whatever the number of connections. When receives are short, each host keeps an equal
    /// part, at most half.
    #[doc(alias("srq", "shared receive queue", "receive queue"))]
    pub receives: usize = 4096, between(2 * RECEIVE_MARGIN..=1 << 20);
    /// Buffers of 512 bytes, 16 to 16777216. Default 4096.
    ///
    /// As many as [`receives`](Self::receives) guarantee each call under way a buffer for a short reply.
    pub small_buffers: usize = 4096, between(16..=MOST_BUFFERS);
    /// Buffers of `receive_size` bytes and headroom, 1 to 16777216. Default 512.
    ///
    /// For long messages, and for received messages that the application still holds; beside those for
    /// [`receives`](Self::receives).
    pub message_buffers: usize = 512, between(1..=MOST_BUFFERS);
    /// Buffers for chunks: bytes and number of each class.
    ///
    /// For data that travels by RDMA Read and RDMA Write. Sizes count the chunk alone: data of 64 KiB takes a buffer of
    /// 64 KiB. The [expected reply](crate::client::ClientCall::expect_reply) of a client takes 24 bytes more, for its
    /// RPC header. 1 byte to 1 GiB, 1 to 16777216 buffers, 29 classes.
    ///
    /// A server reads and writes chunks through them. A client connection has its own set, made when it is first used.
    /// Where peers reach exposed memory at any time (the software fabric) a shard has one more set, for copies of long
    /// replies. Default 32 of 64 KiB and 8 of 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::classes"))]
    pub bulk_buffers: Vec<(usize, usize)> = vec![(64 << 10, 32), (1 << 20, 8)];
    /// Buffers for long messages without chunks: bytes and number of each class.
    ///
    /// For RPC messages longer than one Send, to be sent, assembled or fetched. Sizes include headers, which take up to
    /// 2 KiB: arguments or results of 64 KiB take a buffer of 66 KiB. With classes of 64 KiB and 1 MiB they take one of
    /// 1 MiB. Ranges as of [`bulk_buffers`](Self::bulk_buffers). Default 16 of 32 KiB and 2 of 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::classes"))]
    pub long_buffers: Vec<(usize, usize)> = vec![(32 << 10, 16), (1 << 20, 2)];
    /// Alignment of chunks at a server; a power of two.
    ///
    /// 64 to 4096.
    ///
    /// For Read chunks, and results in Write chunks, that go on to a device: 512 or 4096 bytes for `O_DIRECT`. Buffers
    /// must be longer than chunks by the alignment, less 64 bytes: choose [`bulk_buffers`](Self::bulk_buffers) longer
    /// than the chunks. A chunk that no such buffer holds is not aligned; any other chunk takes those buffers only.
    /// Default 64.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub chunk_align: usize = BUFFER_ALIGN;
    /// Page size of the pools. Default: the largest available.
    pub pages: PagePolicy = PagePolicy::Auto;
    /// NUMA node of the pools. Default: that of the shard's core.
    pub numa_node: Option<u32> = None;
    /// Memory of the application that the shard registers. Default none.
    ///
    /// The shard sends from it ([`ServerCall::set_result`](crate::ServerCall::set_result)) and reads into it
    /// ([`Procedure::place_reads_in`](crate::Procedure::place_reads_in)). The application makes the arenas with crate
    /// `rpcrdma-mempool`: by `ArenaConfig`, or by `GivenMemory` over memory that it has mapped. Peers never get access.
    /// Each shard of a server registers all of them, so that any shard can answer from any arena. Not in configuration
    /// files.
    #[cfg_attr(feature = "serde", serde(skip))]
    #[doc(alias("mr", "memory region"))]
    pub arenas: Vec<Arena> = Vec::new();
}

/// Size classes of each list: the pool takes 64 in all.
const MAX_CLASSES: usize = 29;

impl MemoryConfig {
    /// Memory of a shard that may have so many bytes.
    ///
    /// All numbers follow from them. Credits and message sizes of the [`Config`](super::Config) count when the shard
    /// starts. Each number can be set afterwards; the others then share the rest.
    ///
    /// ```
    /// use rpcrdma::config::{Config, MemoryConfig};
    ///
    /// let mut config = Config { memory: MemoryConfig::within(256 << 20), ..Config::default() };
    /// config.memory.receives = 16384;
    /// config.validate()?;
    /// # Ok::<(), rpcrdma::ConfigError>(())
    /// ```
    pub fn within(budget: usize) -> Self {
        let mut memory = Self { budget, receives: 0, small_buffers: 0, message_buffers: 0, ..Self::default() };
        memory.bulk_buffers.iter_mut().chain(&mut memory.long_buffers).for_each(|(_, count)| *count = 0);
        memory
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()?;
        let align = self.chunk_align;
        let possible = align.is_power_of_two() && (BUFFER_ALIGN..=4096).contains(&align);
        check(possible, "memory.chunk_align", align, "a power of two, 64 to 4096 bytes")?;
        for (knob, classes) in
            [("memory.bulk_buffers", &self.bulk_buffers), ("memory.long_buffers", &self.long_buffers)]
        {
            let possible = classes.len() <= MAX_CLASSES;
            check(possible, knob, format_args!("{} size classes", classes.len()), "at most 29 of them")?;
            for &(size, count) in classes {
                let possible = (1..=1 << 30).contains(&size) && (1..=MOST_BUFFERS).contains(&count);
                let wanted = "1 to 1073741824 bytes and 1 to 16777216 buffers of each class";
                check(possible, knob, format_args!("{count} of {size} bytes"), wanted)?;
            }
        }
        Ok(())
    }
}
