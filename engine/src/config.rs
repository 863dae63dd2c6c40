//! Every knob of a shard, with its unit, its default and its cost. `tuning.md` says when to change one.

use std::borrow::Cow;
use std::time::Duration;

use rpcrdma_mempool::{Arena, ArenaConfig, AvailableMemory, Class, MemError, PagePolicy, PoolConfig};

use crate::auth::AuthPolicy;
use crate::fabric::iwarp::IwarpConfig;
use crate::fabric::path::{OutOfRange, PathConfig};
use crate::fabric::software::SoftwareConfig;
#[cfg(feature = "verbs")]
use crate::fabric::verbs::VerbsConfig;
use crate::handoff::idle::IdlePolicy;
use crate::proto::{CallError, Knob, LIMITS, MAX_CREDITS, MIN_CREDITS, Scheme};
use crate::wire::properties::ReverseSupport;
use crate::wire::{self, ChunkCounts, Limits, Revision, Version};

/// Bytes in front of a message for a transport header without chunks.
pub(crate) const HEADROOM_PLAIN: usize = 64;
/// Bytes in front of a call of ours for a transport header with as many chunks as a call may have, each of
/// one segment. One whose peer wants shorter segments is moved to where it has more room.
pub(crate) const HEADROOM_CHUNKS: usize = headroom_for(&Limits { segments: 1, ..LIMITS }.call());
/// Bytes in front of a reply for the longest transport header that it can have.
pub(crate) const HEADROOM_REPLY: usize = headroom_for(&LIMITS.reply());
/// What the pool's buffers start at multiples of.
pub(crate) const BUFFER_ALIGN: usize = 64;
/// Size class of buffers for short messages, headroom included.
pub(crate) const SMALL_BUFFER: usize = 512;

/// Room for the longest header with such lists, in whole cache lines.
pub(crate) const fn headroom_for(counts: &ChunkCounts) -> usize {
    (wire::msg_len(Version::V2, true) + counts.encoded_len()).next_multiple_of(64)
}

/// How a shard behaves. Both ends of a connection must agree on `revision`; versions, credits and thresholds
/// are negotiated.
#[derive(Clone, Debug)]
pub struct Config {
    /// Protocol version and credit scheme that this end prefers. Default: version 2, windowed.
    pub scheme: Scheme,
    /// Goes on in version 1 with a peer that does not speak version 2; a server also takes peers that start
    /// in it. Default true.
    pub version_1: bool,
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    pub revision: Revision,
    /// Size of each Receive, and the longest Send, in bytes; the inline thresholds are the least of both
    /// ends. Version 2 needs 4096 at least. Default 4096.
    pub receive_size: usize,
    /// The most that `receive_size` may be changed to while connected
    /// ([`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size)), and the longest Send
    /// to a peer that takes so much; bytes. Less than `receive_size` counts as `receive_size`. Default 0.
    pub max_receive_size: usize,
    /// Offers to peers that either end may change its characteristics while connected, in version 2. Default
    /// true.
    pub optional_operations: bool,
    /// Changes the size of the shard's Receives when a peer asks for it, within 4096 and `max_receive_size`:
    /// for peers that are trusted, because it is the same for all of them. Default false.
    pub resize_on_request: bool,
    /// RPC messages up to this length are continued in several messages rather than sent as a chunk, where
    /// the peer has version 2; bytes. Default 8192: what two or three messages hold; from there on a
    /// chunk is cheaper (`tuning.md`).
    pub continue_up_to: usize,
    /// Longest RPC message that is put together from parts, or fetched as a long call, and longest call that
    /// is sent in parts because it may have no chunks; bytes. Default 1 MiB.
    pub reassemble_up_to: usize,
    /// Calls in the reverse direction that may be under way in version 1, which counts the directions apart:
    /// a client with services keeps Receives for so many, at least 1, a server for so many replies.
    /// Default 8.
    pub reverse_credits: u32,
    /// Most calls of one connection that handlers may have taken and not answered yet
    /// ([`DeferredCall`](crate::service::DeferredCall)): further ones wait. At least 1. A call that is taken, or waits for
    /// that, keeps its memory, and the Receive that it came in. Default 1024.
    pub max_deferred: u32,
    /// Most RDMA Reads of one connection that may be under way for its peer's calls: further calls with Read chunks
    /// wait until others have been read. The Reads of one call, one for each segment, are not parted: it goes alone.
    /// At least 1. Default none: what credits and memory allow.
    pub max_reads: Option<usize>,
    /// The same, of bytes. At least 1. Default none.
    pub max_read_bytes: Option<usize>,
    /// Most bytes that the RDMA Writes of one connection may have under way, for replies with Write chunks or in Reply
    /// chunks: further ones wait, with their results, until others are known to have left. The Writes of one reply are
    /// not parted: it goes alone. At least 1. Default none: what credits and memory allow.
    pub max_write_bytes: Option<usize>,
    /// Calls in the reverse direction that a client with services takes: inline ones only, or any. Default
    /// any.
    pub reverse: ReverseSupport,
    /// Whether peers must prove who they are, in version 2. Default off. A shard's connections in both roles
    /// follow it.
    pub host_auth: AuthPolicy,
    /// How often a client's connection that was lost is tried to be made again, before it is given up; 0 for
    /// never. These are counted anew once it was of use: a call was answered, or it was open for as long as the
    /// longest of `reconnect_backoff`. Default 0.
    pub reconnect_attempts: u32,
    /// How long the first of these attempts waits, and the longest: the wait doubles each time.
    /// Default 10 ms and 1 s.
    pub reconnect_backoff: (Duration, Duration),
    /// Keeps each call, most as a copy, until its reply has come, so that it can be sent again on a new
    /// connection. Default false.
    pub retransmit: bool,
    /// How long a client waits for the answer to its first message; then it tries again in version 1.
    /// Default 1 s.
    pub negotiation_timeout: Duration,
    /// The credit limit that a connection starts with: Receives kept for it, messages that its peer may have
    /// under way, and calls that are not answered among them. 4 to 32767. Default 64. Each costs `receive_size` bytes. A
    /// new connection gets at most an eighth of what `receives` has left beyond 128.
    pub credits: u32,
    /// What the credit limit of a connection may grow to that uses all of it. Less than `credits` counts as `credits`.
    /// It grows while three quarters of the Receives are free. Credit limits shrink again when Receives get short, but
    /// for those of version 1. Default 256.
    pub max_credits: u32,
    /// How long nothing may be sent on a connection before it is found out whether the peer is there, at most an
    /// eighth of that later, so that this is done for many connections at once; zero for never. In version 2 a
    /// pure grant is sent; in version 1 an RDMA Write of no bytes, which the peer's device acknowledges (it must
    /// permit RDMA Writes, as that of every requester with Write or Reply chunks does). Default never.
    pub keep_alive: Duration,
    /// How long an incoming connection may take until it is set up: until both ends know of it,
    /// and, if version 2 is all that is spoken, until its first message. Default 5 s.
    pub setup_timeout: Duration,
    /// How long an accepted connection may say nothing of use before it is ended when Receives for another one are
    /// wanted. One that has said nothing yet is ended after 10 ms. For another host any connection may be ended whose
    /// host keeps more than its share of [`receives`](Self::receives). Default 10 s.
    pub silent_after: Duration,
    /// How long a peer may owe something for which this side holds memory: to take what it is sent, to answer RDMA
    /// Reads, to grant a credit for replies that wait, to end a message that it has begun. Then its connection ends.
    /// Time in which it moves at least [`least_rate`](Self::least_rate) does not count, where a reply that is granted
    /// counts as [`receive_size`](Self::receive_size) bytes. A verbs device does not tell
    /// what moves: there the time that all of it takes at that rate is added. Looked at every eighth of it;
    /// `Duration::MAX` for never. Default 10 s.
    pub progress_timeout: Duration,
    /// Bytes in a second that a connection moves, in both directions together, whose peer is slow and no more: it is
    /// not ended for what it owes. At least 1. Default 16 KiB, which a line of 256 kbit/s moves with delay and loss.
    /// A peer that is so slow may hold its share of memory for as long as its calls take at this rate.
    pub least_rate: u64,
    /// Messages of no use that a peer may send in a second, and at once: malformed ones, replies to no call,
    /// grants that nothing asked for. Beyond that its connection ends. Default 1000.
    pub useless_per_second: u32,
    /// Receives of the shard in all: bounds receive memory whatever the number of connections. When they are short,
    /// each host keeps an equal part, at most half. Default 4096.
    pub receives: usize,
    /// Calls that a client connection may have outstanding. Default 128. Each costs about 100 bytes.
    pub max_calls: usize,
    /// Buffers of 512 bytes for short messages. Default 4096: as many as [`receives`](Self::receives), so that each call
    /// that may be under way has one for a short reply, whatever others keep.
    pub small_buffers: usize,
    /// Buffers of `receive_size` bytes and headroom, beside those for `receives`: for long messages, and for
    /// received ones that the application still holds. Default 512.
    pub message_buffers: usize,
    /// Buffers for bulk data: bytes and number of each class. A server reads and writes chunks through them;
    /// a client connection has its own set, made when it is first used, and where peers reach what they
    /// were shown at any time (the software fabric) a shard has one more, for copies of long replies.
    /// Default 32 of 64 KiB and 8 of 1 MiB.
    pub bulk_buffers: Vec<(usize, usize)>,
    /// What the memory of Read chunks and of results in Write chunks starts at multiples of, at a server: what
    /// the device wants that they go on to, such as 512 or 4096 bytes for O_DIRECT. Each such buffer must hold
    /// so much more, less 64 bytes: `bulk_buffers` must be longer than the chunks. What none of them holds is
    /// not aligned; any other chunk takes those buffers alone. A power of two, 64 to 4096. Default 64.
    pub chunk_align: usize,
    /// Buffers for RPC messages that are longer than one Send: to be sent, put together or fetched; bytes
    /// and number of each class. Default 16 of 32 KiB and 2 of 1 MiB.
    pub long_buffers: Vec<(usize, usize)>,
    /// Pages that the pools are made of. Default: the largest that there are.
    pub pages: PagePolicy,
    /// Whether the pools' pages are touched when they are made. Otherwise the first use of each page costs a page
    /// fault, and a host that has no more memory is noticed then: for tests, which make many shards and use little
    /// of each. RDMA devices pin, and so touch, all that is registered. Default true.
    pub prefault: bool,
    /// NUMA node of the pools. Default: where the shard runs.
    pub numa_node: Option<u32>,
    /// Further memory of the application that the shard may send from
    /// ([`ServerCall::set_result`](crate::ServerCall::set_result)), and read into
    /// ([`Procedure::landing`](crate::Procedure::landing)): arenas of its own making, or over memory that it has
    /// mapped ([`Arena::over`]). Peers are not shown it. Each shard of a server registers all of them, so that
    /// whichever has a call may answer from any. Default none.
    pub arenas: Vec<Arena>,
    /// The core that the shard's thread is pinned to. Default: none.
    pub core: Option<usize>,
    /// The RDMA device, such as `mlx5_0`, of all addresses; of no meaning to the other fabrics. Default: the one that
    /// the [address](crate::Address#devices) names, or the one that has it or is on the way there.
    pub device: Option<String>,
    /// Which of the device's GIDs connections go out from, and a server listens at, by its index; of no
    /// meaning to the other fabrics. Default: the one that the address names, or the one of the way there.
    pub gid_index: Option<u32>,
    /// Type of service of IPv4, traffic class of IPv6 and of RoCE, of this side's packets: the DSCP in the upper six
    /// bits. 0 to 255. Verbs and iWARP; other fabrics refuse it. Default: of RoCE what the client asked for, else the
    /// system's.
    pub tos: Option<u8>,
    /// Service level of InfiniBand, priority of RoCE over VLANs, of this side's packets. 0 to 15. Verbs alone; other
    /// fabrics refuse it. Default: the one of the path.
    pub service_level: Option<u8>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes, at most what the port has. A client connects with it; a server
    /// refuses clients that ask for more. Verbs alone, and of clients RoCE alone; other fabrics refuse it. Default:
    /// the one of the path.
    pub path_mtu: Option<u32>,
    /// Sockets, CRCs and time limits of the iWARP fabric; of no meaning to the others. Its `max_message`,
    /// `shared_receives` and `tos` follow from `receive_size`, `receives` and `tos`.
    pub iwarp: IwarpConfig,
    /// What the shard's thread does when there is nothing to do. Default adaptive.
    pub idle: IdlePolicy,
    /// Every how many Sends of a queue pair one is signalled. 1 signals each. Default 16.
    pub signal_every: u32,
    /// One post per queue pair and turn; without, each work request is posted by itself. Default true.
    pub batch: bool,
    /// What most messages are is told by one look at a header of known layout; without, each is checked item
    /// by item, which comes to the same. Default true.
    pub decode_by_layout: bool,
    /// Pure grants wait until half the credit limit is used; without, each message is reported at once.
    /// Default true.
    pub coalesce_grants: bool,
    /// A client offers one handle of a call for Send With Invalidate, a server uses what is offered. Default
    /// true.
    pub remote_invalidate: bool,
    /// Every how many calls, in the mean, one is timed for the latency histogram, and counted in what a server keeps
    /// of each procedure ([`ProcedureStats`](crate::stats::ProcedureStats)): a power of two, 1 for all, or 0 for
    /// none. Default 64. Timing a call reads the clock twice.
    pub sample_latency: u32,
    /// Longest sleep, and longest time between looks at the control plane while busy. Default
    /// 10 ms.
    pub control_interval: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            scheme: Scheme::V2Windowed,
            version_1: true,
            revision: Revision::Ietf00,
            receive_size: 4096,
            max_receive_size: 0,
            optional_operations: true,
            resize_on_request: false,
            continue_up_to: 8 << 10,
            reassemble_up_to: 1 << 20,
            reverse_credits: 8,
            max_deferred: 1024,
            max_reads: None,
            max_read_bytes: None,
            max_write_bytes: None,
            reverse: ReverseSupport::General,
            host_auth: AuthPolicy::Off,
            reconnect_attempts: 0,
            reconnect_backoff: (Duration::from_millis(10), Duration::from_secs(1)),
            retransmit: false,
            negotiation_timeout: Duration::from_secs(1),
            credits: 64,
            max_credits: 256,
            keep_alive: Duration::ZERO,
            setup_timeout: Duration::from_secs(5),
            silent_after: Duration::from_secs(10),
            progress_timeout: Duration::from_secs(10),
            least_rate: 16 << 10,
            useless_per_second: 1000,
            receives: 4096,
            max_calls: 128,
            small_buffers: 4096,
            message_buffers: 512,
            bulk_buffers: vec![(64 << 10, 32), (1 << 20, 8)],
            chunk_align: BUFFER_ALIGN,
            long_buffers: vec![(32 << 10, 16), (1 << 20, 2)],
            pages: PagePolicy::Auto,
            prefault: true,
            numa_node: None,
            arenas: Vec::new(),
            core: None,
            device: None,
            gid_index: None,
            tos: None,
            service_level: None,
            path_mtu: None,
            iwarp: IwarpConfig::default(),
            idle: IdlePolicy::default(),
            signal_every: 16,
            batch: true,
            decode_by_layout: true,
            coalesce_grants: true,
            remote_invalidate: true,
            sample_latency: 64,
            control_interval: Duration::from_millis(10),
        }
    }
}

/// A configuration that cannot work: which knob, and what it may be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{knob} is {value}: {wanted}")]
#[non_exhaustive]
pub struct ConfigError {
    /// The field.
    pub knob: &'static str,
    /// Its value.
    pub value: usize,
    /// What it may be.
    pub wanted: Cow<'static, str>,
}

/// The host has not the memory for the buffers of a configuration.
#[derive(Debug, thiserror::Error)]
#[error(
    "{shards} shards with buffers of {bytes} bytes each, {knob_bytes} of them for {knob}, are more than there is \
     memory for: {source}"
)]
#[non_exhaustive]
pub struct BuffersError {
    /// How many such shards there were to be.
    pub shards: usize,
    /// What the buffers of each come to.
    pub bytes: usize,
    /// The knob that asks for most of it.
    pub knob: Knob,
    /// What that asks for.
    pub knob_bytes: usize,
    /// What there is, and the remedy.
    pub source: MemError,
}

impl Config {
    /// The software fabric for a shard like this.
    pub fn software(&self) -> SoftwareConfig {
        let (max_message, defaults) = (self.longest_message(), SoftwareConfig::default());
        SoftwareConfig {
            max_message,
            // It holds two of the longest at least.
            ring_bytes: defaults.ring_bytes.max((2 * max_message).next_power_of_two()),
            shared_receives: self.receives + RECEIVE_MARGIN,
            may_sleep: self.idle != IdlePolicy::Poll,
            ..defaults
        }
    }

    /// The iWARP fabric for a shard like this.
    pub fn iwarp(&self) -> IwarpConfig {
        IwarpConfig {
            max_message: self.longest_message(),
            shared_receives: self.receives + RECEIVE_MARGIN,
            tos: self.tos,
            ..self.iwarp.clone()
        }
    }

    /// The verbs fabric for a shard like this.
    #[cfg(feature = "verbs")]
    pub fn verbs(&self) -> VerbsConfig {
        VerbsConfig {
            device: self.device.clone(),
            gid_index: self.gid_index,
            path: self.path(),
            shared_receives: (self.receives + RECEIVE_MARGIN) as u32,
            ..VerbsConfig::default()
        }
    }

    /// What the packets of a shard like this are to have.
    pub fn path(&self) -> PathConfig {
        PathConfig { tos: self.tos, service_level: self.service_level, path_mtu: self.path_mtu }
    }

    /// Longest message that is ever sent or received, bytes.
    pub(crate) fn longest_message(&self) -> usize {
        self.receive_size.max(self.max_receive_size)
    }

    /// Checks what the types do not.
    ///
    /// # Errors
    /// Names the knob and its bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let check = |ok: bool, knob, value, wanted: &'static str| {
            if ok { Ok(()) } else { Err(ConfigError { knob, value, wanted: wanted.into() }) }
        };
        let size = self.receive_size;
        check((1024..=1 << 20).contains(&size), "receive_size", size, "1024 to 1048576 bytes")?;
        check(size.is_multiple_of(4), "receive_size", size, "a multiple of 4")?;
        let of_version_2 = "at least 4096 bytes in version 2 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.2)";
        check(self.scheme == Scheme::V1 || size >= 4096, "receive_size", size, of_version_2)?;
        let most = self.max_receive_size;
        check(most <= 1 << 20 && most.is_multiple_of(4), "max_receive_size", most, "up to 1048576, a multiple of 4")?;
        check(self.reassemble_up_to <= 1 << 30, "reassemble_up_to", self.reassemble_up_to, "at most 1 GiB")?;
        check(self.max_deferred > 0, "max_deferred", 0, "at least 1")?;
        check(self.progress_timeout > Duration::ZERO, "progress_timeout", 0, "more than 0")?;
        check(self.least_rate > 0, "least_rate", 0, "at least 1 byte in a second")?;
        check(self.max_reads != Some(0), "max_reads", 0, "at least 1, or none for no limit")?;
        check(self.max_read_bytes != Some(0), "max_read_bytes", 0, "at least 1, or none for no limit")?;
        check(self.max_write_bytes != Some(0), "max_write_bytes", 0, "at least 1, or none for no limit")?;
        let reverse = self.reverse_credits;
        check(reverse <= MAX_CREDITS, "reverse_credits", reverse as usize, "at most 32767")?;
        let credits = self.credits;
        check((MIN_CREDITS..=MAX_CREDITS).contains(&credits), "credits", credits as usize, "4 to 32767")?;
        let most = self.max_credits;
        check((MIN_CREDITS..=MAX_CREDITS).contains(&most), "max_credits", most as usize, "4 to 32767")?;
        check((2 * RECEIVE_MARGIN..=1 << 20).contains(&self.receives), "receives", self.receives, "256 to 1048576")?;
        // Beside the margin there is one Receive more than credits: for a pure grant.
        let backed = self.receives - RECEIVE_MARGIN - 1;
        for (knob, credits, most, rest) in [
            ("credits", self.credits, backed, ", and some are held in reserve"),
            ("max_credits", self.max_credits, self.receives, ""),
        ] {
            if credits as usize > most {
                let receives = self.receives;
                let wanted = format!("at most {most}: each takes a Receive, of which `receives` has {receives}{rest}");
                return Err(ConfigError { knob, value: credits as usize, wanted: wanted.into() });
            }
        }
        check((1..=1 << 16).contains(&self.max_calls), "max_calls", self.max_calls, "1 to 65536")?;
        let most = 1 << 24;
        check((16..=most).contains(&self.small_buffers), "small_buffers", self.small_buffers, "16 to 16 Mi")?;
        check((1..=most).contains(&self.message_buffers), "message_buffers", self.message_buffers, "1 to 16 Mi")?;
        check(self.signal_every >= 1, "signal_every", self.signal_every as usize, "at least 1")?;
        let sample = self.sample_latency;
        check(sample == 0 || sample.is_power_of_two(), "sample_latency", sample as usize, "0 or a power of two")?;
        if let Some(OutOfRange { knob, value, wanted }) = self.path().out_of_range() {
            return Err(ConfigError { knob, value: value as usize, wanted: wanted.into() });
        }
        let align = self.chunk_align;
        let possible = align.is_power_of_two() && (BUFFER_ALIGN..=4096).contains(&align);
        check(possible, "chunk_align", align, "a power of two, 64 to 4096 bytes")?;
        for (knob, classes) in [("bulk_buffers", &self.bulk_buffers), ("long_buffers", &self.long_buffers)] {
            for &(size, count) in classes {
                check((1..=1 << 30).contains(&size), knob, size, "buffers of 1 byte to 1 GiB")?;
                check((1..=most).contains(&count), knob, count, "1 to 16 Mi buffers of each size")?;
            }
        }
        Ok(())
    }

    /// The buffers of a shard, by the knob that asks for them; `serves`: some of them for the peers' calls.
    fn buffers(&self, serves: bool) -> [(Knob, Vec<Class>); 5] {
        let class = |size, count| Class { size, count };
        let all = |classes: &[(usize, usize)]| classes.iter().map(|&(size, count)| class(size, count)).collect();
        let messages = self.message_buffers;
        let mut message_buffers =
            vec![class(self.receive_size, messages), class(self.receive_size + HEADROOM_REPLY, messages)];
        if self.longest_message() > self.receive_size {
            message_buffers.push(class(self.longest_message() + HEADROOM_REPLY, messages));
        }
        [
            (Knob::SmallBuffers, vec![class(SMALL_BUFFER, self.small_buffers)]),
            (Knob::MessageBuffers, message_buffers),
            (Knob::Receives, vec![class(self.receive_size, self.receives)]),
            (Knob::LongBuffers, all(&self.long_buffers)),
            (Knob::BulkBuffers, if serves { all(&self.bulk_buffers) } else { Vec::new() }),
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

    /// The memory that one peer is shown.
    pub(crate) fn exposed_pool(&self) -> PoolConfig {
        let classes = self.bulk_buffers.iter().map(|&(size, count)| Class { size, count }).collect();
        PoolConfig { classes, arena: self.arena() }
    }

    /// The arena of a shard's pool, or of a connection's exposed memory: of the bytes that its pool takes.
    pub(crate) fn arena(&self) -> ArenaConfig {
        let Self { pages, prefault, numa_node: node, .. } = *self;
        ArenaConfig { bytes: 0, pages, prefault, node, ..ArenaConfig::default() }
    }

    /// Bytes of the longest buffer of a shard's pool.
    pub(crate) fn longest_buffer(&self, serves: bool) -> usize {
        self.pool(serves).classes.last().map_or(0, |class| class.size)
    }

    /// Why there is no buffer of so many bytes among these: none is ever so long, or none is free.
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

    /// What asks for the smallest of these buffers that hold so many bytes.
    fn knob_of(buffers: &[(Knob, Vec<Class>)], needed: usize) -> Option<Knob> {
        let of_all = buffers.iter().flat_map(|(knob, classes)| classes.iter().map(|class| (class.size, *knob)));
        of_all.filter(|&(size, _)| size >= needed).min_by_key(|&(size, _)| size).map(|(_, knob)| knob)
    }

    /// What asks for the buffers of the shard's pool that hold so many bytes, or would have to.
    #[cold]
    pub(crate) fn knob_of_buffers(&self, serves: bool, needed: usize) -> Knob {
        Self::knob_of(&self.buffers(serves), needed).unwrap_or(Knob::BulkBuffers)
    }

    /// Bytes of the longest buffer that a reply of `len` bytes, its headers included, may have.
    #[inline]
    pub(crate) fn longest_for_reply(&self, len: usize) -> usize {
        let longest = self.longest_message() + HEADROOM_REPLY;
        if len <= longest { longest } else { usize::MAX }
    }

    /// Why there is no buffer of so many bytes in the shard's pool.
    #[cold]
    pub(crate) fn lacks_buffer(&self, serves: bool, needed: usize) -> CallError {
        Self::lacks(&self.buffers(serves), needed, Knob::LongBuffers)
    }

    /// Why there is none in the memory that one peer is shown.
    #[cold]
    pub(crate) fn lacks_exposed_buffer(&self, needed: usize) -> CallError {
        Self::lacks(&[(Knob::BulkBuffers, self.exposed_pool().classes)], needed, Knob::BulkBuffers)
    }

    /// Whether the host has the memory for so many shards like this. One that does not serve has the memory
    /// for a connection, too.
    pub(crate) fn check_memory(&self, serves: bool, shards: usize) -> Result<(), Box<BuffersError>> {
        let mut pools = vec![self.pool(serves)];
        if !serves && !self.bulk_buffers.is_empty() {
            pools.push(self.exposed_pool());
        }
        let mut available = AvailableMemory::now(self.numa_node);
        let mut fit = || {
            let arenas = pools.iter().map(PoolConfig::own_arena).collect::<Result<Vec<_>, _>>()?;
            (0..shards).try_for_each(|_| arenas.iter().try_for_each(|arena| available.set_aside(arena)))
        };
        fit().map_err(|source| {
            let bytes_of = |classes: &[Class]| classes.iter().map(|class| class.size.saturating_mul(class.count)).sum();
            let of_knobs = self.buffers(true).map(|(knob, classes)| (knob, bytes_of(&classes)));
            let (knob, knob_bytes) = of_knobs.into_iter().max_by_key(|of| of.1).unwrap_or((Knob::Receives, 0));
            let bytes = pools.iter().map(|pool| bytes_of(&pool.classes)).sum();
            Box::new(BuffersError { shards, bytes, knob, knob_bytes, source })
        })
    }
}

/// Receives that a shard keeps posted beyond what it has promised: what one turn may consume, and as much
/// again before more are posted.
pub(crate) const RECEIVE_MARGIN: usize = 128;
/// The rest of the margin at which more are posted.
pub(crate) const RECEIVE_LOW_WATER: usize = 64;
/// Completions that one turn takes.
pub(crate) const POLL_BATCH: usize = 64;
