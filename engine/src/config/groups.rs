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

/// A group of knobs: type, unit in files, default, and the check where one knob alone has a range.
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

/// Refuses a value unless `ok`.
fn check(
    ok: bool,
    knob: &'static str,
    value: impl Display,
    wanted: impl Into<Cow<'static, str>>,
) -> Result<(), ConfigError> {
    if ok { Ok(()) } else { Err(ConfigError::new(knob, value, wanted)) }
}

/// Checks a value, for the macro `knobs`.
fn apply<T>(
    knob: &'static str,
    value: T,
    check: impl FnOnce(&'static str, T) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    check(knob, value)
}

/// Refuses a value out of this range.
fn between<T: PartialOrd + Display>(of: RangeInclusive<T>) -> impl FnOnce(&'static str, T) -> Result<(), ConfigError> {
    move |knob, value| check(of.contains(&value), knob, value, format!("{} to {}", of.start(), of.end()))
}

/// Refuses 0.
fn positive<T: PartialEq + Default + Display>(knob: &'static str, value: T) -> Result<(), ConfigError> {
    check(value != T::default(), knob, value, "at least 1")
}

/// Longest duration: clocks do not overflow.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Refuses a time that is zero or too long.
fn duration(knob: &'static str, value: Duration) -> Result<(), ConfigError> {
    let possible = !value.is_zero() && value <= LONGEST;
    check(possible, knob, format_args!("{value:?}"), "more than 0 s, at most 24 h")
}

/// Most buffers of a size.
pub(super) const MOST_BUFFERS: usize = 1 << 24;
/// Bytes of the longest buffer.
pub(crate) const LONGEST_BUFFER: usize = 1 << 30;
/// Most bytes of memory: the address space of a process.
const MOST_BYTES: usize = 1 << 47;

/// Refuses a number of a core or NUMA node that no host has: sets of cores in the C library have 1024, and so many
/// nodes are the most that the kernel can be built for.
fn number_of_host<T: TryInto<usize>>(knob: &'static str, number: Option<T>) -> Result<(), ConfigError> {
    number.map_or(Ok(()), |number| between(0..=1023)(knob, number.try_into().unwrap_or(usize::MAX)))
}

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
    /// credits of a connection, and a buffer of each size. At most 128 TiB. Default 0.
    pub budget: usize as "units::bytes" = 0, |knob, bytes| between(0..=MOST_BYTES)(knob, bytes);
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
    /// RPC header. 1 byte to 1 GiB, 1 to 16777216 buffers, 29 classes, 128 TiB in all.
    ///
    /// A server reads and writes chunks through them. A client connection has its own set, made when it is first used.
    /// Where peers reach exposed memory at any time (the software fabric) a shard has one more set, for copies of long
    /// replies. Default 32 of 64 KiB and 8 of 1 MiB.
    pub bulk_buffers: Vec<(usize, usize)> as "units::classes" = vec![(64 << 10, 32), (1 << 20, 8)];
    /// Buffers for long messages without chunks: bytes and number of each class.
    ///
    /// For RPC messages longer than one Send, to be sent, assembled or fetched. Sizes include headers, which take up to
    /// 2 KiB: arguments or results of 64 KiB take a buffer of 66 KiB. With classes of 64 KiB and 1 MiB they take one of
    /// 1 MiB. Ranges as of [`bulk_buffers`](Self::bulk_buffers). Default 16 of 32 KiB and 2 of 1 MiB.
    pub long_buffers: Vec<(usize, usize)> as "units::classes" = vec![(32 << 10, 16), (1 << 20, 2)];
    /// Alignment of chunks at a server; a power of two.
    ///
    /// 64 to 4096.
    ///
    /// For Read chunks, and results in Write chunks, that go on to a device: 512 or 4096 bytes for `O_DIRECT`. Buffers
    /// must be longer than chunks by the alignment, less 64 bytes: choose [`bulk_buffers`](Self::bulk_buffers) longer
    /// than the chunks. A chunk that no such buffer holds is not aligned; any other chunk takes those buffers only.
    /// Default 64.
    pub chunk_align: usize as "units::bytes" = BUFFER_ALIGN;
    /// Page size of the pools. Default: the largest available.
    pub pages: PagePolicy = PagePolicy::Auto;
    /// NUMA node of the pools, 0 to 1023. Default: that of the shard's core.
    pub numa_node: Option<u32> = None, number_of_host;
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
                let possible = (1..=LONGEST_BUFFER).contains(&size) && (1..=MOST_BUFFERS).contains(&count);
                let wanted = "1 to 1073741824 bytes and 1 to 16777216 buffers of each class";
                check(possible, knob, format_args!("{count} of {size} bytes"), wanted)?;
            }
            let all: usize = classes.iter().map(|(size, count)| size * count).sum();
            let wanted = "at most 140737488355328, the address space of a process";
            check(all <= MOST_BYTES, knob, format_args!("{all} bytes in all"), wanted)?;
        }
        Ok(())
    }
}

knobs! {
    /// Limits of one connection: outstanding work, and messages without use.
    ///
    /// | too small | too large |
    /// |---|---|
    /// | `credits`, `max_credits`: calls wait, throughput falls | few connections share the receives |
    /// | `max_calls`: [`TooManyCalls`](crate::CallError::TooManyCalls) | about 100 bytes each |
    /// | `max_abandoned`: connections are closed for answers that are merely late | abandoned calls hold the credits of others |
    /// | `max_deferred`, `max_reads`, `max_read_bytes`, `max_write_bytes`: calls wait | one peer takes the buffers of others |
    /// | `min_rate`: slow peers hold memory for long | slow peers that are honest are disconnected |
    /// | `max_unsolicited_per_second`: honest peers are disconnected | a hostile peer costs CPU time |
    pub struct LimitsConfig, "limits";

    /// Initial credit limit of a connection, 4 to 32767. Default 64.
    ///
    /// It bounds the receives kept for the connection, the messages that its peer may have outstanding, and the
    /// unanswered calls among them. Each credit costs `receive_size` bytes. A new connection gets at most an eighth of
    /// the [`receives`](super::MemoryConfig::receives) left beyond 128.
    #[doc(alias("credit grant", "flow control"))]
    pub credits: u32 = 64, between(MIN_CREDITS..=MAX_CREDITS);
    /// Highest credit limit of a busy connection, 4 to 32767. Default 256.
    ///
    /// At least [`credits`](Self::credits). A limit grows while three quarters of the receives are
    /// free. It shrinks again, except in version 1, when receives get short.
    pub max_credits: u32 = 256, between(MIN_CREDITS..=MAX_CREDITS);
    /// Outstanding calls of a client connection, 1 to 65536. Default 128. Each costs about 100 bytes.
    #[doc(alias = "queue depth")]
    pub max_calls: usize = 128, between(1..=1 << 16);
    /// Abandoned calls that a peer may leave unanswered, at least 1. Default 32.
    ///
    /// They are counted for each connection. A call that has timed out or was cancelled keeps its credit until it is
    /// answered, because only its server or the end of the connection frees it. With so many of them, or while they
    /// hold all credits, the server has to answer one within [`progress`](super::TimeoutConfig::progress). Otherwise
    /// the connection is closed, and made again if [`reconnect_attempts`](super::ConnectConfig::reconnect_attempts)
    /// permits. It also applies to calls of a server in the reverse direction.
    pub max_abandoned: usize = 32, positive;
    /// Deferred calls of one connection, at least 1. Default 1024.
    ///
    /// Further calls of [deferred](crate::service::DeferredCall) procedures wait. A deferred or waiting call keeps its
    /// memory, and its receive.
    ///
    /// All connections of a host, open and closed, have at most half of [`receives`](super::MemoryConfig::receives) in
    /// calls that are deferred or on workers; several hosts leave each other half of the rest. Further calls wait.
    pub max_deferred: u32 = 1024, positive;
    /// Outstanding RDMA Reads of one connection, at least 1. Default none.
    ///
    /// Further calls with Read chunks wait. The Reads of one call, one for each segment, are not split: a call that
    /// exceeds the limit goes alone. Without a limit, credits and memory bound them.
    #[doc(alias = "ord")]
    pub max_reads: Option<usize> = None, positive_or_none;
    /// Outstanding bytes of RDMA Reads, at least 1. Default none.
    pub max_read_bytes: Option<usize> as "units::some_bytes" = None, positive_or_none;
    /// Outstanding bytes of RDMA Writes, at least 1. Default none.
    ///
    /// Applies to replies with Write chunks or in Reply chunks. Further replies wait, with their results. The Writes of
    /// one reply are not split: a reply that exceeds the limit goes alone. Without a limit, credits and memory bound
    /// them.
    pub max_write_bytes: Option<usize> as "units::some_bytes" = None, positive_or_none;
    /// Lowest rate of a working peer, bytes per second, both directions.
    ///
    /// It holds for each connection, whose own bytes are measured: clients that share a slow line share its rate, so
    /// set it to that of the line, divided by their number. A peer at this rate is not disconnected for
    /// [`progress`](super::TimeoutConfig::progress). It may hold its share of memory for as long as its calls take at
    /// this rate. At least 1. Default 16 KiB, which a line of 256 kbit/s moves with delay and loss.
    pub min_rate: u64 as "units::bytes" = 16 << 10, |knob, rate| check(rate > 0, knob, 0, "at least 1 byte per second");
    /// Unsolicited messages per second, and at once. Default 1000.
    ///
    /// Malformed messages, replies to no call, grants that nothing asked for. Beyond that the connection is closed.
    pub max_unsolicited_per_second: u32 = 1000;
}

impl LimitsConfig {
    pub(super) fn validate(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        self.check_each()?;
        let (Self { credits, max_credits, .. }, receives) = (self, memory.receives);
        // Beside the margin there is one receive more than credits: for a pure grant.
        let reserve = RECEIVE_MARGIN + 1;
        let backed = receives - reserve;
        let wanted = format!("{MIN_CREDITS} to {backed}, as memory.receives is {receives}, {reserve} in reserve");
        check(*credits as usize <= backed, "limits.credits", credits, wanted)?;
        let knob = "limits.max_credits";
        check(max_credits >= credits, knob, max_credits, format!("at least limits.credits, which is {credits}"))?;
        let wanted = format!("{MIN_CREDITS} to {receives}, as memory.receives is {receives}");
        check(*max_credits as usize <= receives, knob, max_credits, wanted)
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
    /// | `progress`: slow peers are disconnected | a stalled peer holds memory for so long |
    /// | `keep_alive`: traffic on idle connections | a dead peer is noticed when something is next sent |
    pub struct TimeoutConfig, "timeouts";

    /// Time-out of a stalled peer for which memory is held. Default 10 s.
    ///
    /// A peer stalls when it does not take sent data, answer RDMA Reads, grant a credit for waiting replies, or finish
    /// a message that it has begun. Then its connection is closed. Time in which it moves at least
    /// [`min_rate`](super::LimitsConfig::min_rate) does not count; a granted reply counts as
    /// [`receive_size`](super::WireConfig::receive_size) bytes. A verbs device does not report partial progress: there
    /// the time of the whole transfer at that rate is added. Checked every eighth of it; `Duration::MAX` ("never" in
    /// files) disables it.
    pub progress: Duration as "units::duration" = Duration::from_secs(10), |knob, wait| check(!wait.is_zero(), knob, "0s", "more than 0 s");
    /// Idle time before a keep-alive probe; zero (default) for never.
    ///
    /// The probe is sent at most an eighth later, so that many connections are probed together. In version 2 it is a
    /// pure grant; in version 1 an RDMA Write of no bytes, which the peer's device acknowledges. The peer must permit
    /// RDMA Writes, as every requester with Write or Reply chunks does.
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
    /// | `receive_size` too small | longer messages go as chunks, which cost a round trip or more |
    /// | `receive_size` too large | `memory.receives` and `memory.message_buffers` times as many bytes |
    /// | `reassemble_up_to` too small | longer calls are answered with SYSTEM_ERR |
    pub struct WireConfig, "wire";

    /// Preferred protocol version and credit accounting. Default: version 2, windowed.
    pub credit_mode: CreditMode = CreditMode::V2Windowed;
    /// Accepts peers that speak only version 1. Default true, as `credit_mode` `V1` needs.
    pub version_1: bool = true;
    /// Bytes of each receive, and of the longest Send. Default 4096.
    ///
    /// 1024 to 1048576, a multiple of 4; at least 4096 in version 2. The inline thresholds are the smaller of both
    /// ends'.
    #[doc(alias = "inline threshold")]
    pub receive_size: usize as "units::bytes" = 4096;
    /// Longest RPC message assembled, fetched, or sent in parts, bytes.
    ///
    /// Sending in parts is for calls without chunks. At most 1 GiB. Default 1 MiB.
    pub reassemble_up_to: usize as "units::bytes" = 1 << 20, |knob, bytes| check(bytes <= 1 << 30, knob, bytes, "at most 1073741824 bytes");
    /// Host authentication, in version 2. Default off.
    ///
    /// A shard's connections in both roles follow it. Where it is required, `credit_mode` is one of version 2. Not in
    /// configuration files: it has keys.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub host_auth: AuthPolicy = AuthPolicy::Off;
}

impl WireConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()?;
        let size = self.receive_size;
        let possible = (1024..=1 << 20).contains(&size) && size.is_multiple_of(4);
        check(possible, "wire.receive_size", size, "1024 to 1048576 bytes, a multiple of 4")?;
        let version_2 = self.credit_mode != CreditMode::V1;
        let no_version = "a mode of version 2, or wire.version_1 true, which is false: no version is left";
        check(version_2 || self.version_1, "wire.credit_mode", "v1", no_version)?;
        let no_authentication = "a mode of version 2, as wire.host_auth is required, and version 1 has no \
                                 authentication of hosts; or host authentication that is off or optional";
        let required = matches!(self.host_auth, AuthPolicy::Required(_));
        check(version_2 || !required, "wire.credit_mode", "v1", no_authentication)?;
        let of_version_2 = "4096 to 1048576 bytes in version 2 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.2), or \
                            wire.credit_mode v1";
        check(!version_2 || size >= 4096, "wire.receive_size", size, of_version_2)
    }
}

/// The RDMA device, and the marks of its packets.
///
/// | wrong | effect |
/// |---|---|
/// | `name`, `gid_index` | the start fails, or no peer is reached: an address of another network |
/// | `tos`, `service_level` that the switches do not know | packets travel in the lossy class: retransmissions under load |
/// | `path_mtu` too small | less throughput of large chunks |
/// | `path_mtu` larger than a switch passes | connections are made, and the first large message is lost |
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct DeviceConfig {
    /// Name of the RDMA device, such as `mlx5_0`. Other fabrics ignore it.
    ///
    /// Default: the one that the [address](crate::Address#devices) names, else the one that has the address, or the
    /// route to it.
    pub name: Option<String>,
    /// GID index of this side, 0 to 255. Other fabrics ignore it.
    ///
    /// Default: the one that the address names, else that of the route.
    pub gid_index: Option<u32>,
    /// Type of service or traffic class of packets, 0 to 255.
    ///
    /// For IPv4, IPv6 and RoCE; the DSCP is the upper six bits. Verbs and iWARP; other fabrics refuse it. Default: a
    /// RoCE server takes the client's, all others the system's.
    #[doc(alias("dscp", "traffic class"))]
    pub tos: Option<u8>,
    /// InfiniBand service level, or VLAN priority of RoCE, 0 to 15.
    ///
    /// Verbs only; other fabrics refuse it. Default: that of the path.
    pub service_level: Option<u8>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes.
    ///
    /// At most the port's MTU. A client connects with it; a server refuses clients that ask for more. Verbs only,
    /// clients on RoCE only; other fabrics refuse it. Default: that of the path.
    pub path_mtu: Option<u32>,
}

impl DeviceConfig {
    /// Marks of the packets of such a shard.
    #[doc(hidden)]
    pub fn path(&self) -> PathConfig {
        PathConfig { tos: self.tos, service_level: self.service_level, path_mtu: self.path_mtu }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check(self.name.as_deref() != Some(""), "device.name", "empty", "the name of a device, or unset")?;
        self.gid_index.map_or(Ok(()), |index| between(0..=255)("device.gid_index", index))?;
        self.path().out_of_range().map_or(Ok(()), |OutOfRange { knob, value, wanted }| {
            let knob = if knob == "path_mtu" { "device.path_mtu" } else { "device.service_level" };
            Err(ConfigError::new(knob, value, wanted))
        })
    }
}

knobs! {
    /// Sockets, CRCs and time-outs of the iWARP fabric; others ignore them.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `crc` [`Never`](Crc::Never) | peers that require CRCs are refused |
    /// | `send_buffer`, `receive_buffer` too small | less throughput over long paths |
    /// | `retry_timeout` too long | a peer that stops holds buffers for so long |
    pub struct IwarpConfig, "iwarp";

    /// Whether FPDUs carry a CRC-32C. Default: if the peer wants it.
    ///
    /// It costs about 0.1 ns per byte, and a copy of received data.
    pub crc: Crc = Crc::IfAsked;
    /// `SO_SNDBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_wmem`).
    pub send_buffer: Option<usize> as "units::some_bytes" = None, buffer;
    /// `SO_RCVBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_rmem`).
    pub receive_buffer: Option<usize> as "units::some_bytes" = None, buffer;
    /// `SO_BUSY_POLL`: time that the kernel polls for an empty read.
    ///
    /// Default: `net.core.busy_read`. Loopback and virtual devices ignore it.
    pub busy_poll: Option<Duration> as "units::some_duration" = None;
    /// Time-out of unacknowledged data (`TCP_USER_TIMEOUT`) and half messages. Default 30 s.
    ///
    /// 1 ms to 24 h. It also applies to an unanswered RDMA Read, and to a message that waits for a receive. After it
    /// the connection closes. This side counts while a full socket is not empty.
    pub retry_timeout: Duration as "units::duration" = Duration::from_secs(30), |knob, wait: Duration| {
        check(wait.as_millis() > 0, knob, format_args!("{wait:?}"), "1 ms to 24 h")?;
        duration(knob, wait)
    };
    /// Idle time before a TCP keep-alive probe (`TCP_KEEPIDLE`). Default 60 s.
    ///
    /// 1 s to 32767 s. Two more probes follow, a third of this apart.
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
    /// | `core` that others use too | latency of a scheduler's time slice |
    /// | `idle` [`Poll`](IdlePolicy::Poll) with more shards than cores | the same |
    /// | `idle` [`Event`](IdlePolicy::Event) under load | a wake-up, some microseconds, for each message after a pause |
    /// | `control_interval` too long | connects, closes and time-outs are late by it |
    pub struct PollConfig, "poll";

    /// Core that the shard's thread is pinned to, 0 to 1023. Default: none.
    pub core: Option<usize> = None, number_of_host;
    /// Idle policy of the shard's thread. Default adaptive.
    pub idle: IdlePolicy = IdlePolicy::default();
    /// Longest sleep, and longest control-plane interval while busy. At most 24 h. Default 10 ms.
    pub control_interval: Duration as "units::duration" = Duration::from_millis(10), duration;
}

knobs! {
    /// Switches of single optimizations, and corner cases of protocol and fabrics.
    ///
    /// The defaults are right for nearly all programs. Change one to measure what an optimization is worth, or for a
    /// peer or a device that needs it. Both ends must agree on [`revision`](Self::revision).
    pub struct DebugConfig, "debug";

    /// Batches work requests: one post per queue pair and turn. Default true.
    #[doc(alias = "doorbell")]
    pub batch: bool = true;
    /// Sends of a queue pair for each signaled one. Default 16. 1 signals each.
    #[doc(alias("completion queue", "signaled"))]
    pub signal_every: u32 = 16, positive;
    /// Fast-path decoding of headers with the usual layout. Default true.
    pub decode_by_layout: bool = true;
    /// Delays pure grants until half the credit limit is used. Default true.
    ///
    /// Otherwise each message is acknowledged at once.
    pub coalesce_grants: bool = true;
    /// Calls for each one timed, on average. Default 64.
    ///
    /// A power of two; 1 for all, 0 for none. Timed calls are in the latency histogram, and in
    /// [`ProcedureStats`](crate::stats::ProcedureStats) of a server. Timing a call reads the clock twice.
    pub sample_latency: u32 = 64, |knob, calls: u32| {
        check(calls == 0 || calls.is_power_of_two(), knob, calls, "0 or a power of two")
    };
    /// Touches the pools' pages when they are made. Default true.
    ///
    /// Otherwise the first use of each page costs a page fault, and a lack of memory shows only then: for tests, which
    /// make many shards and use little of each. RDMA devices pin, and so touch, all registered memory.
    pub prefault: bool = true;
    /// Send With Invalidate: clients offer a handle, servers use it. Default true; false if a device misreports it.
    #[doc(alias = "send with invalidate")]
    pub remote_invalidate: bool = true;
    /// Continues messages up to this length instead of using chunks, bytes.
    ///
    /// Version 2 only. Default 8192, which takes two or three messages; longer ones are cheaper as a chunk.
    #[doc(alias = "message continuation")]
    pub continue_up_to: usize as "units::bytes" = 8 << 10;
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    ///
    /// If it differs between the ends, messages of version 2 are malformed to the peer.
    pub revision: Revision = Revision::Ietf00;
    /// Lets either end change its characteristics while connected. Default true.
    ///
    /// Version 2 only. False for a peer that rejects unknown properties.
    pub optional_operations: bool = true;
    /// Upper bound of [`receive_size`](super::WireConfig::receive_size) while connected, bytes. Default 0.
    ///
    /// See [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size). It also bounds Sends to a
    /// peer with larger receives. 0 counts as `receive_size`, which it must not be less than otherwise.
    pub max_receive_size: usize as "units::bytes" = 0, |knob, bytes| {
        let possible = bytes <= 1 << 20 && bytes.is_multiple_of(4);
        check(possible, knob, bytes, "0 to 1048576 bytes, a multiple of 4")
    };
    /// Resizes receives when a peer asks for it. Default false.
    ///
    /// Within 4096 and [`max_receive_size`](Self::max_receive_size). For trusted peers: the size is the same for all of
    /// them. Needs `optional_operations`, and a `credit_mode` of version 2.
    pub resize_on_request: bool = false;
    /// Reverse-direction calls that a client with services takes. Default any.
    pub reverse: ReverseSupport = ReverseSupport::General;
    /// Outstanding reverse-direction calls in version 1, 0 to 32767. Default 8.
    ///
    /// Version 1 counts the directions apart: a client with services keeps receives for so many, at least 1, a server
    /// for so many replies.
    pub reverse_credits: u32 = 8, between(0..=MAX_CREDITS);
    /// Length of the FPDUs that the iWARP fabric sends. Default: by the peer.
    pub fpdu_size: FpduSize = FpduSize::default();
    /// RDMA Reads outstanding per side of an iWARP connection, 1 to 16383. Default 16.
    pub read_depth: u16 = 16, between(1..=MAX_READ_DEPTH);
    /// Concurrent handshakes of a listener of the iWARP or the software fabric. Default 64.
    ///
    /// The longest idle one is evicted.
    pub max_handshakes: usize = 64, positive;
    /// Time-out of connection setup over iWARP and shared memory, at either side. Default 5 s.
    pub handshake_timeout: Duration as "units::duration" = Duration::from_secs(5), duration;
    /// Time for a closing connection to send its data. Default 1 s.
    pub linger: Duration as "units::duration" = Duration::from_secs(1), duration;
}

impl DebugConfig {
    /// Checks all values, and that none contradicts the wire group.
    pub(super) fn validate(&self, wire: &WireConfig) -> Result<(), ConfigError> {
        self.check_each()?;
        let (most, size) = (self.max_receive_size, wire.receive_size);
        let wanted = format!("0, or at least wire.receive_size, which is {size}");
        check(most == 0 || most >= size, "debug.max_receive_size", most, wanted)?;
        let (never, knob) = (!self.resize_on_request, "debug.resize_on_request");
        let asks = "false, or debug.optional_operations true, which is false: a peer asks by such an operation";
        check(never || self.optional_operations, knob, true, asks)?;
        let only_2 = "false, as wire.credit_mode is v1: only a peer of version 2 asks for another size";
        check(never || wire.credit_mode != CreditMode::V1, knob, true, only_2)
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
    /// Setup ends when both ends know of the connection; with version 2 only, at its first message.
    pub setup: Duration as "units::duration" = Duration::from_secs(5), duration;
    /// Silence after which a connection may be evicted. Default 10 s.
    ///
    /// Accepted connections without useful messages are evicted when others need receives. One that has sent nothing
    /// yet may be evicted after 10 ms. A connection of a host with more than its share of
    /// [`receives`](super::MemoryConfig::receives) may be evicted for another host at any time.
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
    /// | `negotiation` too long | connecting to a silent server of version 1 takes so long |
    /// | `reconnect_attempts` 0 | the first loss after the negotiation ends the connection and fails its calls |
    /// | `reconnect_backoff` too short | many clients storm a server that restarts |
    /// | `retransmit` without a duplicate request cache at the server | calls that are not idempotent may run twice |
    pub struct ConnectConfig, "connect";

    /// Time-out of connecting. At most 24 h. Default 5 s.
    pub timeout: Duration as "units::duration" = Duration::from_secs(5), duration;
    /// Wait for the first answer before falling back to version 1. At most 24 h. Default 3 s.
    ///
    /// A connection lost twice before the first answer falls back too. The fallback lasts for one connection: the next
    /// reconnect tries version 2 again. It does not happen to a connection that has used version 2 before. A version
    /// error of the server leads to version 1 at once. Each fallback is logged.
    pub negotiation: Duration as "units::duration" = Duration::from_secs(3), duration;
    /// Attempts to reconnect before giving up. Default 0.
    ///
    /// The count restarts after a useful connection: a call was answered, or it was open for the longest
    /// [`reconnect_backoff`](Self::reconnect_backoff).
    pub reconnect_attempts: u32 = 0;
    /// First and longest wait before an attempt; it doubles each time. At most 24 h. Default 10 ms and 1 s.
    pub reconnect_backoff: (Duration, Duration) as "units::durations" = (Duration::from_millis(10), Duration::from_secs(1));
    /// Retransmits unanswered calls on a new connection. Default false.
    ///
    /// Keeps each call until its reply arrives, most as a copy.
    ///
    /// A server that drains or lacks memory refuses calls with ERR_SYSTEM. They are retransmitted, too: on the next
    /// connection, or on the same one after [`reconnect_backoff`](Self::reconnect_backoff). A call fails after
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
        check(first <= longest, knob, value, "the first wait, and the longest, not less than it")?;
        check(longest <= LONGEST, knob, value, "at most 24 h")
    }
}
