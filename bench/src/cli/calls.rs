//! Arguments of the call tests and of their server.
#![forbid(unsafe_code)]

use std::str::FromStr;

use clap::{Args, ValueEnum};
use rpcrdma::CreditMode;
use rpcrdma_config::{ConfigArgs, HostKeyArgs};
use serde::{Deserialize, Serialize};

use super::{CommonArgs, EXIT_CODES, LatencyArgs, ThroughputArgs, parse_size};
use crate::failure::Failure;
use crate::target::Length;

/// Arguments of every call test.
#[derive(Debug, Args)]
pub(crate) struct CallArgs {
    /// The operation
    #[arg(long, value_enum, default_value_t = RpcOp::Echo)]
    pub(crate) op: RpcOp,
    #[command(flatten)]
    pub(crate) wire_form: FormArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Outstanding calls per connection
    #[arg(short = 't', long, value_name = "N", default_value_t = 64, value_parser = outstanding())]
    pub(crate) outstanding: u32,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES, mut_arg("outstanding", |arg| arg.default_value("1")))]
pub(crate) struct LatArgs {
    #[command(flatten)]
    pub(crate) call: CallArgs,
    #[command(flatten)]
    pub(crate) latency: LatencyArgs,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RateArgs {
    #[command(flatten)]
    pub(crate) call: CallArgs,
    #[command(flatten)]
    pub(crate) throughput: ThroughputArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = EXIT_CODES,
    mut_arg("op", |arg| arg.default_value("read")),
    mut_arg("outstanding", |arg| arg.default_value("4").help(OUTSTANDING_OF_BW)),
)]
pub(crate) struct BwArgs {
    #[command(flatten)]
    pub(crate) call: CallArgs,
    #[command(flatten)]
    pub(crate) throughput: ThroughputArgs,
}

const OUTSTANDING_OF_BW: &str = "\
Outstanding calls per connection; fewer if their payload exceeds 32 MiB in total. Each call has its own buffer: few \
buffers stay in a core's cache, as perftest's single buffer does";

impl BwArgs {
    /// Default payload size in bytes, used without `-s`.
    pub(crate) fn usual_size(&self) -> usize {
        self.call.wire_form.usual_size(match (self.call.op, self.call.wire_form.form) {
            (RpcOp::Echo, _) | (_, Some(Form::Inline)) => 2048,
            _ => 65536,
        })
    }
}

/// Range of `-t`: the highest credit limit, 32767, covers 16383 calls and their replies.
pub(super) fn outstanding() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=16_383)
}

impl CallArgs {
    /// Length of the measurement. Both directions run for a time by default, so that each is measured under the other's
    /// load.
    pub(crate) fn length(&self, default_iters: u64) -> Result<Length, Failure> {
        self.common.length_or(default_iters, self.wire_form.both.then_some(2.0))
    }
}

/// Arguments of the form and direction of calls.
#[derive(Clone, Debug, Args)]
pub(crate) struct FormArgs {
    /// Form of the payload, in calls and replies (default: chunk for read and write, otherwise inline)
    #[arg(long, value_enum)]
    pub(crate) form: Option<Form>,
    /// The server calls the client, on the client's connection
    #[arg(long, conflicts_with = "both")]
    pub(crate) reverse: bool,
    /// Client and server call each other concurrently on one connection, for a time (default: -D 2)
    #[arg(long, conflicts_with_all = ["iters", "warmup"])]
    pub(crate) both: bool,
}

impl FormArgs {
    /// The default payload size: `usual`, or 64 KiB for the forms of long messages.
    pub(crate) fn usual_size(&self, usual: usize) -> usize {
        if matches!(self.form, Some(Form::Continued | Form::Long)) { 64 << 10 } else { usual }
    }

    pub(crate) fn direction(&self) -> Direction {
        match (self.reverse, self.both) {
            (true, _) => Direction::Reverse,
            (_, true) => Direction::Both,
            _ => Direction::Forward,
        }
    }
}

/// Direction of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// The client calls the server.
    Forward,
    /// The server calls the client.
    Reverse,
    /// Client and server call each other concurrently.
    Both,
}

/// Form of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Form {
    /// In one message
    Inline,
    /// In several messages; version 2
    Continued,
    /// In a Read chunk or a Write chunk, apart from the message
    Chunk,
    /// The whole RPC message in a chunk: a call's Position Zero Read chunk, a reply's Reply chunk
    Long,
}

/// Engine options of both ends.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArgs {
    /// Highest protocol version; both ends use the lower one of the two
    #[arg(long, id = "protocol", long = "version", value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) protocol: u8,
    /// Credit mode of version 2; incremental if either end selects it (default: windowed)
    #[arg(long, value_enum)]
    pub(crate) credit_mode: Option<V2CreditMode>,
    /// Credit limit: messages that the peer may have outstanding (default: 64, or 16 beyond 64 connections, and at
    /// least twice -t)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=32_767))]
    pub(crate) credits: Option<u32>,
    /// Connections of -q that carry calls; the others stay open and idle (default: all)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) active: Option<u32>,
    /// Inline threshold in bytes; must be equal at both ends
    #[arg(long = "inline", value_name = "BYTES", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1024..=1 << 20))]
    pub(crate) inline_threshold: u32,
    /// Worker threads that run the procedures; 0: the shard runs them
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=256))]
    pub(crate) workers: u32,
    /// Shards of the server; they share the connections
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) shards: u32,
    /// Defer replies: the shard's task answers at its next poll, or after this many microseconds
    #[arg(long, value_name = "poll|US", conflicts_with = "workers")]
    pub(crate) defer: Option<Defer>,
    /// Grant credits after each message instead of after half of the credit limit
    #[arg(long)]
    pub(crate) no_coalesce: bool,
    /// The client revokes exposed memory, instead of the server by Send With Invalidate
    #[arg(long)]
    pub(crate) no_remote_invalidate: bool,
    /// One signaled Send per N Sends
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(crate) signal_every: u32,
    /// Alignment of chunks in the server's memory, in bytes, for example as O_DIRECT requires
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    pub(crate) chunk_align: usize,
    /// Buffers of 512 bytes per shard (default: 1024, plus one for each Send that may be outstanding)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) small_buffers: Option<u32>,
    /// Buffers of the message size per shard (default: 256, plus one for each Send that may be outstanding)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) message_buffers: Option<u32>,
    /// The server's buffers for chunks, by size (default: 64K, 1M and the largest payload: one buffer of each per call)
    #[arg(long, value_name = "BYTES:N", value_delimiter = ',')]
    pub(crate) bulk_buffers: Vec<BufferClass>,
    /// Outstanding RDMA Reads of the server per connection (default: no limit)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_reads: Option<u32>,
    /// Idle time in milliseconds before a keep-alive probe; 0: never
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub(crate) keep_alive: u32,
    #[command(flatten)]
    pub(crate) host_key: HostKeyArgs,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

impl EngineArgs {
    /// The knobs that differ from their defaults because of these options.
    pub(crate) fn knobs(&self) -> impl Iterator<Item = &'static str> {
        let knobs = [
            (self.credits.is_some(), "limits.credits"),
            (self.no_coalesce, "debug.coalesce_grants"),
            (self.no_remote_invalidate, "debug.remote_invalidate"),
            (self.signal_every != 16, "debug.signal_every"),
            (self.chunk_align != 64, "memory.chunk_align"),
            (self.small_buffers.is_some(), "memory.small_buffers"),
            (self.message_buffers.is_some(), "memory.message_buffers"),
            (!self.bulk_buffers.is_empty(), "memory.bulk_buffers"),
            (self.max_reads.is_some(), "limits.max_reads"),
            (self.keep_alive != 2000, "timeouts.keep_alive"),
        ];
        knobs.into_iter().filter_map(|(given, knob)| given.then_some(knob))
    }

    pub(crate) fn configured_mode(&self) -> Result<CreditMode, Failure> {
        match (self.protocol, self.credit_mode) {
            (1, None) => Ok(CreditMode::V1),
            (1, Some(_)) => Err(Failure::Usage(
                "--credit-mode: version 1 has one credit mode only, that of RFC 8166 section 3.3".to_owned(),
            )),
            (_, None | Some(V2CreditMode::Windowed)) => Ok(CreditMode::V2Windowed),
            (_, Some(V2CreditMode::Incremental)) => Ok(CreditMode::V2Incremental),
        }
    }
}

/// Delay of a reply in microseconds; 0: until the next poll of the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Defer(pub(crate) u32);

impl FromStr for Defer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "poll" {
            return Ok(Self(0));
        }
        let microseconds = text.parse().ok().filter(|us| (1..=1_000_000).contains(us));
        microseconds.map(Self).ok_or_else(|| "expected `poll`, or 1 to 1000000 microseconds".to_owned())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferClass {
    /// Bytes of each buffer.
    pub(crate) size: usize,
    pub(crate) count: usize,
}

impl FromStr for BufferClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (size, count) = text.split_once(':').ok_or("expected BYTES:N, such as 64K:32")?;
        let count = count.parse().ok().filter(|count| (1..=1 << 20).contains(count));
        Ok(Self { size: parse_size(size)?, count: count.ok_or("expected 1 to 1048576 buffers after the colon")? })
    }
}

/// Credit mode of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum V2CreditMode {
    /// Each header states how many messages were received, and how many more may be sent
    Windowed,
    /// Each header grants additional credits
    Incremental,
}

/// Procedures of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum RpcOp {
    /// No arguments, no results
    Null,
    /// The payload inline in both directions
    Echo,
    /// The payload from the server, by RDMA Write
    Read,
    /// The payload to the server, by RDMA Read
    Write,
}

impl RpcOp {
    /// True if the payload travels by RDMA, apart from the messages.
    pub(crate) fn is_bulk(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}
