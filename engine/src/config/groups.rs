//! Groups of knobs, with their ranges.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use rpcrdma_mempool::{Arena, PagePolicy};

use super::{BUFFER_ALIGN, ConfigError, RECEIVE_MARGIN};
use crate::auth::AuthPolicy;
use crate::cross_thread::idle::IdlePolicy;
use crate::fabric::iwarp::{Crc, FpduSize, MAX_READ_DEPTH};
use crate::fabric::path::{OutOfRange, PathConfig};
#[cfg(feature = "serde")]
use crate::fabric::units;
use crate::proto::{CreditMode, MAX_CREDITS, MIN_CREDITS};
use crate::wire::Revision;
use crate::wire::properties::ReverseSupport;

/// Declares a group of knobs: type, unit in files, default, and the check of each knob that has a range by itself.
macro_rules! knobs {
    (
        $(#[$meta:meta])* pub struct $name:ident, $group:literal;
        $($(#[$of_knob:meta])* pub $knob:ident: $type:ty $(as $unit:tt)? = $default:expr $(, $check:expr)?;)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
        pub struct $name {
            $($(#[$of_knob])* $(#[cfg_attr(feature = "serde", serde(with = $unit))])? pub $knob: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($knob: $default,)* }
            }
        }

        impl $name {
            /// Checks each knob by itself.
            pub(super) fn check_each(&self) -> Result<(), ConfigError> {
                $($(apply(concat!($group, ".", stringify!($knob)), self.$knob, $check)?;)?)*
                Ok(())
            }
        }
    };
}

/// Refuses a value unless it `is_valid`.
fn check(
    is_valid: bool,
    knob: &'static str,
    value: impl Display,
    expected: impl Into<Cow<'static, str>>,
) -> Result<(), ConfigError> {
    if is_valid { Ok(()) } else { Err(ConfigError::new(knob, value, expected)) }
}

/// Applies the check of a knob to its value, for the macro `knobs`.
fn apply<T>(
    knob: &'static str,
    value: T,
    check: impl FnOnce(&'static str, T) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    check(knob, value)
}

/// Refuses a value outside this range.
fn between<T: PartialOrd + Display>(
    range: RangeInclusive<T>,
) -> impl FnOnce(&'static str, T) -> Result<(), ConfigError> {
    move |knob, value| check(range.contains(&value), knob, value, format!("{} to {}", range.start(), range.end()))
}

/// Refuses 0.
fn positive<T: PartialEq + Default + Display>(knob: &'static str, value: T) -> Result<(), ConfigError> {
    check(value != T::default(), knob, value, "at least 1")
}

/// Longest duration of a knob, with which no clock overflows.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Refuses a duration that is zero or too long.
fn duration(knob: &'static str, value: Duration) -> Result<(), ConfigError> {
    let is_valid = !value.is_zero() && value <= LONGEST;
    check(is_valid, knob, format_args!("{value:?}"), "more than 0 s, at most 24 h")
}

/// Maximum number of buffers of a size.
pub(super) const MAX_BUFFERS: usize = 1 << 24;
/// Bytes of the longest buffer.
pub(crate) const LONGEST_BUFFER: usize = 1 << 30;
/// Maximum bytes of memory: the address space of a process.
const MAX_BYTES: usize = 1 << 47;

/// Refuses a number of a core or NUMA node that no host has.
///
/// Sets of cores in the C library have 1024 cores, and the kernel can be built for at most that many nodes.
fn core_or_node<T: TryInto<usize>>(knob: &'static str, number: Option<T>) -> Result<(), ConfigError> {
    number.map_or(Ok(()), |number| between(0..=1023)(knob, number.try_into().unwrap_or(usize::MAX)))
}

knobs! {
    /// Memory of a shard: receives and buffers, registered at the start.
    ///
    /// | too small | cost of more |
    /// |---|---|
    /// | `receives`: connections are refused, evicted, or get few credits | `receive_size` bytes each |
    /// | `small_buffers`, `message_buffers`: calls fail with [`NoMemory`](crate::CallError::NoMemory), replies wait | 512 bytes, or two messages and headroom, each |
    /// | `bulk_buffers`, `long_buffers`: [`TooLong`](crate::CallError::TooLong) if no class is long enough, else calls wait | their bytes, each |
    ///
    /// The start fails with [`StartErrorKind::Memory`](crate::StartErrorKind::Memory) if the host has too little
    /// memory. With a [`budget`](Self::budget), a number of 0 is computed: see [`MemoryConfig::within`].
    pub struct MemoryConfig, "memory";

    /// Maximum bytes of a shard's memory; 0 for no limit.
    ///
    /// It covers receives and buffers, and at clients the chunks of one connection. The numbers of this group that are
    /// 0 share the bytes that the other ones leave, in the proportions of their defaults. There are always enough
    /// receives for the credits of a connection, and a buffer of each size. At most 128 TiB. Default 0.
    pub budget: usize as "units::bytes" = 0, |knob, bytes| between(0..=MAX_BYTES)(knob, bytes);
    /// Receives of the shard, 256 to 1048576. Default 4096.
    ///
    /// They bound receive memory whatever the number of connections. While receives are scarce, each host may keep an
    /// equal share of them, at most half.
    #[doc(alias("srq", "shared receive queue", "receive queue"))]
    pub receives: usize = 4096, between(2 * RECEIVE_MARGIN..=1 << 20);
    /// Buffers of 512 bytes, 16 to 16777216. Default 4096.
    ///
    /// With as many of them as [`receives`](Self::receives), each call under way has a buffer for a short reply.
    pub small_buffers: usize = 4096, between(16..=MAX_BUFFERS);
    /// Buffers of `receive_size` bytes and headroom, 1 to 16777216. Default 512.
    ///
    /// They hold long messages, and received messages that the application still uses. The buffers of
    /// [`receives`](Self::receives) are separate.
    pub message_buffers: usize = 512, between(1..=MAX_BUFFERS);
    /// Buffers for chunks: bytes and number of each class.
    ///
    /// They hold data that travels by RDMA Read and RDMA Write. Sizes count the chunk alone: data of 64 KiB takes a
    /// buffer of 64 KiB. The [expected reply](crate::client::ClientCall::expect_reply) of a client takes 24 bytes more,
    /// for its RPC header. A class has buffers of 1 byte to 1 GiB, 1 to 16777216 of them. At most 29 classes, and
    /// 128 TiB in all.
    ///
    /// A server reads and writes chunks through them. A client connection has its own set, allocated at its first use.
    /// On the software fabric, where peers reach exposed memory at any time, a shard has one more set, for copies of
    /// long replies. Default 32 of 64 KiB and 8 of 1 MiB.
    pub bulk_buffers: Vec<(usize, usize)> as "units::classes" = vec![(64 << 10, 32), (1 << 20, 8)];
    /// Buffers for long messages without chunks: bytes and number of each class.
    ///
    /// They hold RPC messages longer than one Send, which are sent, assembled or fetched. Sizes include headers, which
    /// take up to 2 KiB, so arguments or results of 64 KiB need a buffer of 66 KiB: with classes of 64 KiB and 1 MiB
    /// they take one of 1 MiB. The ranges are those of [`bulk_buffers`](Self::bulk_buffers). Default 16 of 32 KiB and 2
    /// of 1 MiB.
    pub long_buffers: Vec<(usize, usize)> as "units::classes" = vec![(32 << 10, 16), (1 << 20, 2)];
    /// Chunk alignment at a server: a power of two, 64 to 4096.
    ///
    /// It matters for Read chunks, and results in Write chunks, that are passed on to a device: 512 or 4096 bytes for
    /// `O_DIRECT`. A buffer must be longer than its chunk by the alignment less 64 bytes, so choose
    /// [`bulk_buffers`](Self::bulk_buffers) longer than the chunks. A chunk for which no buffer is long enough is not
    /// aligned; any other chunk takes only buffers in which it can be aligned. Default 64.
    pub chunk_align: usize as "units::bytes" = BUFFER_ALIGN;
    /// Page size of the pools. Default: the largest available.
    pub pages: PagePolicy = PagePolicy::Auto;
    /// NUMA node of the pools, 0 to 1023. Default: that of the shard's core.
    pub numa_node: Option<u32> = None, core_or_node;
    /// Memory of the application that the shard registers. Default: none.
    ///
    /// The shard sends from it ([`ServerCall::set_result`](crate::ServerCall::set_result)) and reads into it
    /// ([`Procedure::place_reads_in`](crate::Procedure::place_reads_in)). The application makes the arenas with crate
    /// `rpcrdma-mempool`: by `ArenaConfig`, or by `ExternalMemory` over memory that it has mapped. Peers never get
    /// access to them. Each shard of a server registers all arenas, so that any shard can answer from any arena.
    /// Configuration files do not have this knob.
    #[cfg_attr(feature = "serde", serde(skip))]
    #[doc(alias("mr", "memory region"))]
    pub arenas: Vec<Arena> = Vec::new();
}

/// Maximum number of size classes in each list, because the pool takes 64 in all.
const MAX_CLASSES: usize = 29;

impl MemoryConfig {
    /// Configures a shard's memory by its total bytes.
    ///
    /// All numbers of buffers are computed from the budget when the shard starts, with the credits and message sizes of
    /// the [`Config`](super::Config). Each number can be set afterwards; the others then share the rest.
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
        let is_valid = align.is_power_of_two() && (BUFFER_ALIGN..=4096).contains(&align);
        check(is_valid, "memory.chunk_align", align, "a power of two, 64 to 4096 bytes")?;
        for (knob, classes) in
            [("memory.bulk_buffers", &self.bulk_buffers), ("memory.long_buffers", &self.long_buffers)]
        {
            let is_valid = classes.len() <= MAX_CLASSES;
            check(is_valid, knob, format_args!("{} size classes", classes.len()), "at most 29")?;
            for &(size, count) in classes {
                let is_valid = (1..=LONGEST_BUFFER).contains(&size) && (1..=MAX_BUFFERS).contains(&count);
                let expected = "1 to 1073741824 bytes and 1 to 16777216 buffers of each class";
                check(is_valid, knob, format_args!("{count} of {size} bytes"), expected)?;
            }
            let all: usize = classes.iter().map(|(size, count)| size * count).sum();
            let expected = "at most 140737488355328, the address space of a process";
            check(all <= MAX_BYTES, knob, format_args!("{all} bytes in all"), expected)?;
        }
        Ok(())
    }
}

knobs! {
    /// Limits of one connection: outstanding work, and unsolicited messages.
    ///
    /// | too small | too large |
    /// |---|---|
    /// | `credits`, `max_credits`: calls wait, throughput falls | the receives suffice for few connections |
    /// | `max_calls`: [`TooManyCalls`](crate::CallError::TooManyCalls) | about 100 bytes each |
    /// | `max_abandoned`: connections are closed for answers that are merely late | abandoned calls hold credits that other calls need |
    /// | `max_deferred`, `max_reads`, `max_read_bytes`, `max_write_bytes`: calls wait | one peer takes the buffers of others |
    /// | `min_rate`: slow peers hold memory for long | honest but slow peers are disconnected |
    /// | `max_unsolicited_per_second`: honest peers are disconnected | a hostile peer costs CPU time |
    /// | `max_connections`: new peers are refused, idle ones evicted | the process runs out of file descriptors |
    pub struct LimitsConfig, "limits";

    /// Initial credit limit of a connection, 4 to 32767. Default 64.
    ///
    /// It bounds the receives reserved for the connection, the messages that its peer may have outstanding, and the
    /// unanswered calls among them. Each credit costs `receive_size` bytes. A new connection gets at most an eighth of
    /// the unreserved [`receives`](super::MemoryConfig::receives) beyond 128.
    #[doc(alias("credit grant", "flow control"))]
    pub credits: u32 = 64, between(MIN_CREDITS..=MAX_CREDITS);
    /// Highest credit limit of a busy connection, 4 to 32767. Default 256.
    ///
    /// At least [`credits`](Self::credits). The credit limit of a connection grows while three quarters of the receives
    /// are free. It shrinks again when receives become scarce, except in version 1.
    pub max_credits: u32 = 256, between(MIN_CREDITS..=MAX_CREDITS);
    /// Outstanding calls of a client connection, 1 to 65536. Default 128. Each costs about 100 bytes.
    #[doc(alias = "queue depth")]
    pub max_calls: usize = 128, between(1..=1 << 16);
    /// Abandoned calls that a peer may leave unanswered, at least 1. Default 32.
    ///
    /// The limit applies to each connection. A call that has timed out or was cancelled keeps its credit until it is
    /// answered, because only the server's answer or the end of the connection frees the credit. When this many calls
    /// are abandoned, or when they hold all credits, the server has to answer one within
    /// [`progress`](super::TimeoutConfig::progress). Otherwise the connection is closed, and re-established if
    /// [`reconnect_attempts`](super::ConnectConfig::reconnect_attempts) permits. The limit also applies to
    /// reverse-direction calls of a server.
    pub max_abandoned: usize = 32, positive;
    /// Deferred calls of one connection, at least 1. Default 1024.
    ///
    /// Further calls of [deferred](crate::service::DeferredCall) procedures wait. A deferred or waiting call keeps its
    /// memory, and its receive.
    ///
    /// The deferred calls and calls on workers of one host, over all its open and closed connections, hold at most half
    /// of the [`receives`](super::MemoryConfig::receives) that other hosts' calls leave. Further calls wait.
    pub max_deferred: u32 = 1024, positive;
    /// Outstanding RDMA Reads of one connection, at least 1. Default: no limit.
    ///
    /// Further calls with Read chunks wait. The Reads of one call, one for each segment, are posted together, so a call
    /// that exceeds the limit waits until no other Read is outstanding. Without a limit, credits and memory bound them.
    #[doc(alias = "ord")]
    pub max_reads: Option<usize> = None, positive_or_none;
    /// Outstanding bytes of RDMA Reads of one connection, at least 1. Default: no limit.
    pub max_read_bytes: Option<usize> as "units::some_bytes" = None, positive_or_none;
    /// Outstanding bytes of RDMA Writes of one connection, at least 1. Default: no limit.
    ///
    /// Applies to replies with Write chunks or in Reply chunks. Further replies wait, with their results. The Writes of
    /// one reply are posted together, so a reply that exceeds the limit waits until no other Write is outstanding.
    /// Without a limit, credits and memory bound them.
    pub max_write_bytes: Option<usize> as "units::some_bytes" = None, positive_or_none;
    /// Lowest rate of a working peer, bytes per second, both directions.
    ///
    /// The rate is measured for each connection by itself. Clients that share a slow line share its rate, so set the
    /// knob to the rate of the line divided by the number of clients. A peer that is at least this fast is not
    /// disconnected by [`progress`](super::TimeoutConfig::progress). It may hold its share of memory for as long as its
    /// calls take at this rate. At least 1. Default 16 KiB, which a line of 256 kbit/s reaches despite delay and loss.
    pub min_rate: u64 as "units::bytes" = 16 << 10, |knob, rate| check(rate > 0, knob, 0, "at least 1 byte per second");
    /// Unsolicited messages per second, and in one burst. Default 1000.
    ///
    /// These are malformed messages, replies to unknown calls, and unrequested credit grants. The connection is closed
    /// when the limit is exceeded.
    pub max_unsolicited_per_second: u32 = 1000;
    /// Connections that a shard accepts, at least 1. Default: as many as [`receives`](super::MemoryConfig::receives)
    /// allows.
    ///
    /// Each takes a file descriptor. Over iWARP and shared memory, so do as many closed connections, for
    /// `debug.linger`, and `debug.max_handshakes` unfinished handshakes.
    pub max_connections: Option<usize> = None, positive_or_none;
}

impl LimitsConfig {
    pub(super) fn validate(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        self.check_each()?;
        let (Self { credits, max_credits, .. }, receives) = (self, memory.receives);
        // A connection needs one receive more than credits, for a pure grant.
        let reserve = RECEIVE_MARGIN + 1;
        let limit = receives - reserve;
        let expected =
            format!("{MIN_CREDITS} to {limit}, because memory.receives is {receives}, with {reserve} in reserve");
        check(*credits as usize <= limit, "limits.credits", credits, expected)?;
        let knob = "limits.max_credits";
        check(max_credits >= credits, knob, max_credits, format!("at least limits.credits, which is {credits}"))?;
        let expected = format!("{MIN_CREDITS} to {receives}, because memory.receives is {receives}");
        check(*max_credits as usize <= receives, knob, max_credits, expected)
    }
}

fn positive_or_none(knob: &'static str, limit: Option<usize>) -> Result<(), ConfigError> {
    check(limit != Some(0), knob, 0, "at least 1, or unset for no limit")
}

knobs! {
    /// Time-outs of connections that are open.
    ///
    /// | too short | too long |
    /// |---|---|
    /// | `progress`: slow peers are disconnected | a stalled peer holds memory for all this time |
    /// | `keep_alive`: traffic on idle connections | a dead peer is detected only by the next message sent to it |
    pub struct TimeoutConfig, "timeouts";

    /// Time-out of a stalled peer for which memory is held. Default 10 s.
    ///
    /// A peer stalls when it does not take sent data, answer RDMA Reads, grant a credit for waiting replies, or finish
    /// a message that it has begun. Its connection is closed after this time. The deadline extends by the moved bytes
    /// divided by [`min_rate`](super::LimitsConfig::min_rate), where a granted reply counts as
    /// [`receive_size`](super::WireConfig::receive_size) bytes. A verbs device does not report partial progress, so the
    /// deadline extends by the time of the whole transfer at that rate. The shard checks the deadline eight times in
    /// this period. `Duration::MAX` ("never" in files) disables it.
    pub progress: Duration as "units::duration" = Duration::from_secs(10), |knob, wait: Duration| {
        check(!wait.is_zero(), knob, format_args!("{wait:?}"), "more than 0 s")
    };
    /// Idle time before a keep-alive probe; zero (default) for never.
    ///
    /// The probe is sent at most an eighth later, so that many connections are probed together. In version 2 the probe
    /// is a pure grant. In version 1 it is an RDMA Write of no bytes, which the peer's device acknowledges. The peer
    /// must permit RDMA Writes, as every requester with Write or Reply chunks does.
    #[doc(alias = "heartbeat")]
    pub keep_alive: Duration as "units::duration" = Duration::ZERO;
}

knobs! {
    /// Protocol version, form of messages, and authentication of hosts.
    ///
    /// Both ends negotiate versions, credits and thresholds.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `credit_mode` `V1`, or `version_1` off, at one end alone | peers without a version in common do not connect |
    /// | `receive_size` too small | longer messages travel in chunks, which cost a round trip or more |
    /// | `receive_size` too large | memory for `memory.receives` and `memory.message_buffers` grows with it |
    /// | `reassemble_up_to` too small | longer calls get ERR_SYSTEM (continued) or ERR_READ_CHUNKS (in a Read chunk; ERR_BAD_XDR in version 1) |
    pub struct WireConfig, "wire";

    /// Preferred protocol version and credit accounting. Default: version 2, windowed.
    pub credit_mode: CreditMode = CreditMode::V2Windowed;
    /// Accepts peers that support only version 1. Default true.
    ///
    /// `credit_mode` `V1` requires it.
    pub version_1: bool = true;
    /// Bytes of each receive, and of the longest Send. Default 4096.
    ///
    /// 1024 to 1048576, a multiple of 4; at least 4096 in version 2. Each inline threshold is the smaller of the values
    /// of both ends.
    #[doc(alias = "inline threshold")]
    pub receive_size: usize as "units::bytes" = 4096;
    /// Longest RPC message assembled, fetched, or sent in parts, bytes.
    ///
    /// Only messages without chunks are sent in parts. At most 1 GiB. Default 1 MiB.
    pub reassemble_up_to: usize as "units::bytes" = 1 << 20, |knob, bytes| check(bytes <= 1 << 30, knob, bytes, "at most 1073741824 bytes");
    /// Host authentication, in version 2. Default off.
    ///
    /// It applies to the shard's connections in both roles. If it is required, `credit_mode` must be one of version 2.
    /// Configuration files do not have this knob, because it holds keys.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub host_auth: AuthPolicy = AuthPolicy::Off;
}

impl WireConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()?;
        let size = self.receive_size;
        let is_valid = (1024..=1 << 20).contains(&size) && size.is_multiple_of(4);
        check(is_valid, "wire.receive_size", size, "1024 to 1048576 bytes, a multiple of 4")?;
        let version_2 = self.credit_mode != CreditMode::V1;
        let no_version = "a mode of version 2, or wire.version_1 true, which is false";
        check(version_2 || self.version_1, "wire.credit_mode", "v1", no_version)?;
        let no_authentication = "a mode of version 2, because wire.host_auth is required and version 1 has no host \
                                 authentication; or wire.host_auth off or optional";
        let required = matches!(self.host_auth, AuthPolicy::Required(_));
        check(version_2 || !required, "wire.credit_mode", "v1", no_authentication)?;
        let of_version_2 = "4096 to 1048576 bytes in version 2 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.2), or \
                            wire.credit_mode v1";
        check(!version_2 || size >= 4096, "wire.receive_size", size, of_version_2)
    }
}

/// The RDMA device, and the path attributes of its packets.
///
/// | wrong | effect |
/// |---|---|
/// | `name`, `gid_index` | the start fails, or no peer is reachable because the address is of another network |
/// | `tos`, `service_level` that the switches do not know | packets travel in the lossy class, and are retransmitted under load |
/// | `path_mtu` too small | less throughput of large chunks |
/// | `path_mtu` larger than a switch forwards | connections are established, but the first large message is lost |
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct DeviceConfig {
    /// Name of the RDMA device, such as `mlx5_0`. Other fabrics ignore it.
    ///
    /// Default: the device that the [address](crate::Address#devices) names, else the device that has the address or
    /// the route to it.
    pub name: Option<String>,
    /// GID index of this side, 0 to 255. Other fabrics ignore it.
    ///
    /// Default: the index that the address names, else the GID of the route.
    pub gid_index: Option<u32>,
    /// Type of service or traffic class of packets, 0 to 255.
    ///
    /// It applies to IPv4, IPv6 and RoCE; the DSCP is the upper six bits. Verbs and iWARP have it; other fabrics refuse
    /// it. Default: that of the client for a RoCE server, otherwise that of the system.
    #[doc(alias("dscp", "traffic class"))]
    pub tos: Option<u8>,
    /// InfiniBand service level, or VLAN priority of RoCE, 0 to 15.
    ///
    /// Verbs only; other fabrics refuse it. Default: the service level of the path.
    pub service_level: Option<u8>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes.
    ///
    /// At most the port's MTU. A client connects with it; a server refuses clients that request more. Verbs only, and
    /// at clients on RoCE only; other fabrics refuse it. Default: the MTU of the path.
    pub path_mtu: Option<u32>,
}

impl DeviceConfig {
    /// Path attributes of the packets of a shard with this configuration.
    #[doc(hidden)]
    pub fn path(&self) -> PathConfig {
        PathConfig { tos: self.tos, service_level: self.service_level, path_mtu: self.path_mtu }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check(self.name.as_deref() != Some(""), "device.name", "", "the name of a device, or unset")?;
        self.gid_index.map_or(Ok(()), |index| between(0..=255)("device.gid_index", index))?;
        self.path().out_of_range().map_or(Ok(()), |OutOfRange { knob, value, expected }| {
            let knob = if knob == "path_mtu" { "device.path_mtu" } else { "device.service_level" };
            Err(ConfigError::new(knob, value, expected))
        })
    }
}

knobs! {
    /// Sockets, CRCs and time-outs of the iWARP fabric; others ignore them.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `crc` [`Never`](Crc::Never) | peers that require CRCs are refused |
    /// | `send_buffer`, `receive_buffer` too small | less throughput over paths with a long delay |
    /// | `retry_timeout` too long | an unreachable peer holds buffers for all this time |
    pub struct IwarpConfig, "iwarp";

    /// Whether FPDUs carry a CRC-32C. Default: if the peer requests it.
    ///
    /// It costs about 0.1 ns per byte, and a copy of received data.
    pub crc: Crc = Crc::IfAsked;
    /// `SO_SNDBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_wmem`).
    pub send_buffer: Option<usize> as "units::some_bytes" = None, buffer;
    /// `SO_RCVBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_rmem`).
    pub receive_buffer: Option<usize> as "units::some_bytes" = None, buffer;
    /// `SO_BUSY_POLL`: time that the kernel polls the device in an empty read.
    ///
    /// Default: `net.core.busy_read`. Loopback and virtual devices ignore it.
    pub busy_poll: Option<Duration> as "units::some_duration" = None;
    /// Time-out of unacknowledged data and incomplete messages. Default 30 s.
    ///
    /// 1 ms to 24 h. It also applies to an unanswered RDMA Read, and to a message that waits for a receive. The
    /// connection is closed after this time. The fabric sets `TCP_USER_TIMEOUT`, but as soon as it finds unacknowledged
    /// data it measures the time itself, because TCP would also end a connection whose peer acknowledges slowly.
    pub retry_timeout: Duration as "units::duration" = Duration::from_secs(30), |knob, wait: Duration| {
        check(wait.as_millis() > 0, knob, format_args!("{wait:?}"), "1 ms to 24 h")?;
        duration(knob, wait)
    };
    /// Idle time before a TCP keep-alive probe (`TCP_KEEPIDLE`). Default 60 s.
    ///
    /// 1 s to 32767 s. Two more probes follow, each after a third of this time.
    pub keep_alive: Duration as "units::duration" = Duration::from_secs(60), |knob, wait: Duration| {
        check((1..=32767).contains(&wait.as_secs()), knob, format_args!("{wait:?}"), "1 s to 32767 s")
    };
}

/// Checks the size of a socket's buffer.
fn buffer(knob: &'static str, bytes: Option<usize>) -> Result<(), ConfigError> {
    bytes.map_or(Ok(()), |bytes| between(1..=i32::MAX as usize)(knob, bytes))
}

knobs! {
    /// Polling loop of a shard: core, idle policy.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `core` that other threads use, too | latency of a scheduler's time slice |
    /// | `idle` [`Poll`](IdlePolicy::Poll) with more shards than cores | latency of a scheduler's time slice |
    /// | `idle` [`Event`](IdlePolicy::Event) under load | a wake-up of some microseconds for each message after a pause |
    /// | `control_interval` too long | connects, closes and time-outs are late by up to this time |
    pub struct PollConfig, "poll";

    /// Core that the shard's thread is pinned to, 0 to 1023. Default: none.
    pub core: Option<usize> = None, core_or_node;
    /// Idle policy of the shard's thread. Default adaptive.
    pub idle: IdlePolicy = IdlePolicy::default();
    /// Longest sleep, and longest control-plane interval while busy. At most 24 h. Default 10 ms.
    pub control_interval: Duration as "units::duration" = Duration::from_millis(10), duration;
}

knobs! {
    /// Switches of single optimizations, and corner cases of protocol and fabrics.
    ///
    /// The defaults are right for nearly all programs. Change a knob to measure the effect of an optimization, or for a
    /// peer or a device that needs it. Both ends must agree on [`revision`](Self::revision).
    pub struct DebugConfig, "debug";

    /// Batches work requests: one post per queue pair and turn. Default true.
    #[doc(alias = "doorbell")]
    pub batch: bool = true;
    /// Sends of a queue pair per signaled Send; 1 signals each. Default 16.
    #[doc(alias("completion queue", "signaled"))]
    pub signal_every: u32 = 16, positive;
    /// Decodes headers of the usual layouts on a fast path. Default true.
    pub decode_by_layout: bool = true;
    /// Delays pure grants until half the credit limit is used. Default true.
    ///
    /// If false, each message is acknowledged immediately.
    pub coalesce_grants: bool = true;
    /// Calls per timed call, on average. Default 64.
    ///
    /// A power of two; 1 times all calls, 0 none. Timed calls are in the latency histogram, and in
    /// [`ProcedureStats`](crate::stats::ProcedureStats) of a server. Timing a call reads the clock twice.
    pub sample_latency: u32 = 64, |knob, calls: u32| {
        check(calls == 0 || calls.is_power_of_two(), knob, calls, "0 or a power of two")
    };
    /// Touches the pages of the pools when they are allocated. Default true.
    ///
    /// If false, the first use of each page costs a page fault, and a lack of memory is detected only then. False suits
    /// tests, which create many shards and use little memory of each. RDMA devices pin, and so touch, all registered
    /// memory.
    pub prefault: bool = true;
    /// Uses Send With Invalidate. Default true.
    ///
    /// Clients then offer a handle, which servers invalidate with the reply. Set it to false if a device wrongly
    /// reports support.
    #[doc(alias = "send with invalidate")]
    pub remote_invalidate: bool = true;
    /// Length up to which messages are continued instead of using chunks, bytes.
    ///
    /// Version 2 only. Default 8192, which takes two or three messages; a chunk is cheaper for longer ones.
    #[doc(alias = "message continuation")]
    pub continue_up_to: usize as "units::bytes" = 8 << 10;
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    ///
    /// If the ends differ, each treats the version 2 messages of the other one as malformed.
    pub revision: Revision = Revision::Ietf00;
    /// Lets either end change its characteristics while connected. Default true.
    ///
    /// Version 2 only. Set it to false for a peer that rejects unknown properties.
    pub optional_operations: bool = true;
    /// Upper bound of [`receive_size`](super::WireConfig::receive_size) while connected, bytes. Default 0.
    ///
    /// See [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size). It also bounds Sends to a
    /// peer with larger receives. 0 stands for `receive_size`; any other value must be at least `receive_size`.
    pub max_receive_size: usize as "units::bytes" = 0, |knob, bytes| {
        let is_valid = bytes <= 1 << 20 && bytes.is_multiple_of(4);
        check(is_valid, knob, bytes, "0 to 1048576 bytes, a multiple of 4")
    };
    /// Resizes receives when a peer requests it. Default false.
    ///
    /// The size is 4096 to [`max_receive_size`](Self::max_receive_size). Allow it only for trusted peers, because the
    /// size changes for all of them. It needs `optional_operations`, and a `credit_mode` of version 2.
    pub resize_on_request: bool = false;
    /// Reverse-direction calls that a client with services accepts. Default: any.
    pub reverse: ReverseSupport = ReverseSupport::General;
    /// Outstanding reverse-direction calls in version 1, 0 to 32767. Default 8.
    ///
    /// Version 1 counts credits of each direction separately. A client with services reserves receives for this many
    /// calls, at least 1, and a server for this many replies.
    pub reverse_credits: u32 = 8, between(0..=MAX_CREDITS);
    /// Length of the FPDUs that the iWARP fabric sends. Default: depends on the peer.
    pub fpdu_size: FpduSize = FpduSize::default();
    /// RDMA Reads outstanding per side of an iWARP connection, 1 to 16383. Default 16.
    pub read_depth: u16 = 16, between(1..=MAX_READ_DEPTH);
    /// Concurrent handshakes of a listener of the iWARP or the software fabric. Default 64.
    ///
    /// When the limit is exceeded, the host with the most handshakes loses its oldest one.
    pub max_handshakes: usize = 64, positive;
    /// Time-out of connection setup over iWARP and shared memory, at either side. Default 5 s.
    pub handshake_timeout: Duration as "units::duration" = Duration::from_secs(5), duration;
    /// Time for a closing connection to send its data. Default 1 s.
    pub linger: Duration as "units::duration" = Duration::from_secs(1), duration;
}

impl DebugConfig {
    /// Checks that all values are valid, and that none contradicts the wire group.
    pub(super) fn validate(&self, wire: &WireConfig) -> Result<(), ConfigError> {
        self.check_each()?;
        let (max_size, size) = (self.max_receive_size, wire.receive_size);
        let expected = format!("0, or at least wire.receive_size, which is {size}");
        check(max_size == 0 || max_size >= size, "debug.max_receive_size", max_size, expected)?;
        let (is_off, knob) = (!self.resize_on_request, "debug.resize_on_request");
        let expected = "false, or debug.optional_operations true, which is false: a request is such an operation";
        check(is_off || self.optional_operations, knob, true, expected)?;
        let expected = "false, because wire.credit_mode is v1, and only peers of version 2 request another size";
        check(is_off || wire.credit_mode != CreditMode::V1, knob, true, expected)
    }
}

knobs! {
    /// Setup and eviction of accepted connections.
    ///
    /// | too short | too long |
    /// |---|---|
    /// | `setup`: peers on slow links never connect | half-open connections hold receives |
    /// | `evict_after`: idle peers reconnect again and again | new peers are refused while receives are scarce |
    pub struct AcceptConfig, "accept";

    /// Time-out for an incoming connection's setup, at most 24 h. Default 5 s.
    ///
    /// Setup ends when both ends know that the connection is established. If version 1 is disabled, it ends with the
    /// peer's first message.
    pub setup: Duration as "units::duration" = Duration::from_secs(5), duration;
    /// Silence after which a connection may be evicted. Default 10 s.
    ///
    /// When a new connection lacks receives, or there are [`max_connections`](super::LimitsConfig::max_connections),
    /// the shard evicts a connection of the same host that has carried no useful message for this long. A connection
    /// that has not sent anything yet may be evicted after 10 ms. If a host exceeds its share, its connections may be
    /// evicted for another host at any time.
    pub evict_after: Duration as "units::duration" = Duration::from_secs(10);
}

impl AcceptConfig {
    /// Checks all values.
    ///
    /// # Errors
    /// Names the knob, its value and its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()
    }
}

knobs! {
    /// Connecting, reconnecting after a lost connection, and retransmission of calls.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `timeout` too short | a slow server is never reached |
    /// | `negotiation` too short | version 1 is used with a slow server of version 2 |
    /// | `negotiation` too long | connecting takes this long if a server of version 1 does not answer version 2 |
    /// | `reconnect_attempts` 0 | the first loss after the negotiation ends the connection and fails its calls |
    /// | `reconnect_backoff` too short | many clients overload a server that restarts |
    /// | `retransmit` without a duplicate request cache at the server | calls that are not idempotent may run twice |
    pub struct ConnectConfig, "connect";

    /// Time-out of connects that block. At most 24 h. Default 5 s.
    ///
    /// `debug.handshake_timeout` limits connects that do not block, and reconnects.
    pub timeout: Duration as "units::duration" = Duration::from_secs(5), duration;
    /// Wait for the first answer before falling back to version 1. At most 24 h. Default 3 s.
    ///
    /// A connection that is lost twice before the first answer falls back, too. The fallback lasts until the connection
    /// is lost: the next reconnect tries version 2 again. A connection that has used version 2 before does not fall
    /// back. A version error of the server leads to version 1 immediately. Each fallback is logged.
    pub negotiation: Duration as "units::duration" = Duration::from_secs(3), duration;
    /// Attempts to reconnect before giving up. Default 0.
    ///
    /// The count restarts when a call was answered, or when the connection was open for the longest
    /// [`reconnect_backoff`](Self::reconnect_backoff).
    pub reconnect_attempts: u32 = 0;
    /// First and longest wait before an attempt; it doubles each time. At most 24 h. Default 10 ms and 1 s.
    pub reconnect_backoff: (Duration, Duration) as "units::durations" = (Duration::from_millis(10), Duration::from_secs(1));
    /// Retransmits unanswered calls on a new connection. Default false.
    ///
    /// The client keeps each call until its reply arrives, most calls as a copy.
    ///
    /// A server that drains or lacks memory refuses calls with ERR_SYSTEM. These calls are retransmitted, too: on the
    /// next connection, or on the same one after [`reconnect_backoff`](Self::reconnect_backoff). A call fails after
    /// [`reconnect_attempts`](Self::reconnect_attempts) such retransmissions.
    pub retransmit: bool = false;
}

impl ConnectConfig {
    /// Checks all values.
    ///
    /// # Errors
    /// Names the knob, its value and its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()?;
        let (first, longest) = self.reconnect_backoff;
        let value = format_args!("{first:?} and {longest:?}");
        let knob = "connect.reconnect_backoff";
        check(first <= longest, knob, value, "a first wait that does not exceed the longest")?;
        check(longest <= LONGEST, knob, value, "at most 24 h")
    }
}
