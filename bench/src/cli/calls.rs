//! What the tests of calls take, and their server.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use rpcrdma::CreditMode;
use rpcrdma::config::AcceptConfig;
use rpcrdma_config::ConfigArgs;
use serde::{Deserialize, Serialize};

use super::{CommonArgs, EXIT_CODES, LatencyArgs, ThroughputArgs, parse_size};
use crate::failure::Failure;

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct LatArgs {
    /// The operation
    #[arg(long, value_enum, default_value_t = RpcOp::Echo)]
    pub(crate) op: RpcOp,
    #[command(flatten)]
    pub(crate) travel: TravelArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) latency: LatencyArgs,
    /// Calls under way at a time, of each connection
    #[arg(short = 't', long, value_name = "N", default_value_t = 1, value_parser = outstanding())]
    pub(crate) outstanding: u32,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RateArgs {
    /// The operation
    #[arg(long, value_enum, default_value_t = RpcOp::Echo)]
    pub(crate) op: RpcOp,
    #[command(flatten)]
    pub(crate) travel: TravelArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Calls under way at a time, of each connection
    #[arg(short = 't', long, value_name = "N", default_value_t = 64, value_parser = outstanding())]
    pub(crate) outstanding: u32,
    #[command(flatten)]
    pub(crate) throughput: ThroughputArgs,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BwArgs {
    /// The operation
    #[arg(long, value_enum, default_value_t = RpcOp::Read)]
    pub(crate) op: RpcOp,
    #[command(flatten)]
    pub(crate) travel: TravelArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Calls under way at a time, of each connection; fewer if their payload is more than 32 MiB. Each has a
    /// buffer of its own: few of them stay in a core's cache, as perftest's one does
    #[arg(short = 't', long, value_name = "N", default_value_t = 4, value_parser = outstanding())]
    pub(crate) outstanding: u32,
    #[command(flatten)]
    pub(crate) throughput: ThroughputArgs,
}

impl LatArgs {
    /// The payload without `-s`, in bytes.
    pub(crate) fn usual_size(&self) -> usize {
        self.travel.usual_size(64)
    }
}

impl RateArgs {
    /// The payload without `-s`, in bytes.
    pub(crate) fn usual_size(&self) -> usize {
        self.travel.usual_size(64)
    }
}

impl BwArgs {
    /// The payload without `-s`, in bytes.
    pub(crate) fn usual_size(&self) -> usize {
        self.travel.usual_size(match (self.op, self.travel.form) {
            (RpcOp::Echo, _) | (_, Some(Form::Inline)) => 2048,
            _ => 65536,
        })
    }
}

/// As many calls as the highest credit limit has replies for.
pub(super) fn outstanding() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=16_383)
}

/// How calls travel, and who makes them.
#[derive(Clone, Debug, Args)]
pub(crate) struct TravelArgs {
    /// How the payload travels, of calls and of replies (default: inline; of read and write, chunk)
    #[arg(long, value_enum)]
    pub(crate) form: Option<Form>,
    /// The server calls the client, on the connection that the client made
    #[arg(long, conflicts_with = "both")]
    pub(crate) reverse: bool,
    /// Client and server call each other at once, on one connection, for a time (default: -D 2)
    #[arg(long, conflicts_with_all = ["iters", "warmup"])]
    pub(crate) both: bool,
}

impl TravelArgs {
    /// The size of a payload that nobody asked for: `usual`, unless the form is one for larger ones.
    fn usual_size(&self, usual: usize) -> usize {
        if matches!(self.form, Some(Form::Continued | Form::Long)) { 64 << 10 } else { usual }
    }

    /// How long to measure without a number of calls or seconds: two directions at once for a time, so that
    /// each is measured while the other is there.
    pub(crate) fn seconds(&self) -> Option<f64> {
        self.both.then_some(2.0)
    }

    /// Who calls whom.
    pub(crate) fn direction(&self) -> Direction {
        match (self.reverse, self.both) {
            (true, _) => Direction::Reverse,
            (_, true) => Direction::Both,
            _ => Direction::Forward,
        }
    }
}

/// Who calls whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The client, which has made the connection, calls the server.
    Forward,
    /// The server calls the client.
    Reverse,
    /// Both at once.
    Both,
}

impl Direction {
    /// For reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Reverse => "reverse",
            Self::Both => "both",
        }
    }
}

/// How a payload travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Form {
    /// In one message
    Inline,
    /// In several messages; version 2
    Continued,
    /// Apart from the message, in a Read chunk or a Write chunk
    Chunk,
    /// The whole RPC message is in a chunk: that of position zero of a call, the Reply chunk of a reply
    Long,
}

impl Form {
    /// As it is given on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Continued => "continued",
            Self::Chunk => "chunk",
            Self::Long => "long",
        }
    }
}

/// How the engine runs, at both ends.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArgs {
    /// Protocol version: the lower one of both ends' is used
    #[arg(long, id = "protocol", long = "version", value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) protocol: u8,
    /// Credit scheme of version 2; incremental, if either end wants that (default: windowed)
    #[arg(long, value_enum)]
    pub(crate) credit_scheme: Option<CreditScheme>,
    /// Credit limit: messages that the peer may have under way (default: 64, or twice -t)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=32_767))]
    pub(crate) credits: Option<u32>,
    /// Connections of -q that take calls; the others stay open and idle (default: all)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) active: Option<u32>,
    /// Inline threshold: the longest message; both ends alike
    #[arg(long = "inline", value_name = "BYTES", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1024..=1 << 20))]
    pub(crate) inline_threshold: u32,
    /// Threads that run the procedures; 0: the shard itself does
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=256))]
    pub(crate) workers: u32,
    /// Shards of the server, over which connections are spread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) shards: u32,
    /// Answer calls later, by the shard's task: the next time that it is turned, or after so many microseconds
    #[arg(long, value_name = "poll|US", conflicts_with = "workers")]
    pub(crate) defer: Option<Defer>,
    /// Grant credits for each message, rather than for half the credit limit
    #[arg(long)]
    pub(crate) no_coalesce: bool,
    /// Revoke exposed memory at the client, rather than by Send With Invalidate
    #[arg(long)]
    pub(crate) no_remote_invalidate: bool,
    /// One signalled Send in so many
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(crate) signal_every: u32,
    /// What chunks in the server's memory start at a multiple of, in bytes: as much as O_DIRECT wants
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    pub(crate) chunk_align: usize,
    /// Buffers of 512 bytes of each shard (default: 1024, and as many as may be sent at a time)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) small_buffers: Option<u32>,
    /// Buffers of a message's length of each shard (default: 256, and as many as may be sent at a time)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) message_buffers: Option<u32>,
    /// The server's buffers for chunks, by size (default: 64K, 1M and the largest payload, one for each call)
    #[arg(long, value_name = "BYTES:N", value_delimiter = ',')]
    pub(crate) bulk_buffers: Vec<BufferClass>,
    /// RDMA Reads that the server has under way on each connection (default: no limit)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_reads: Option<u32>,
    /// Milliseconds without a message before it is found out whether the other end is there; 0 for never
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub(crate) keep_alive: u32,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

impl EngineArgs {
    /// The knobs that these options set, if they are not as without them.
    pub(crate) fn knobs(&self) -> impl Iterator<Item = &'static str> {
        let knobs = [
            (self.scheme().is_ok_and(|scheme| scheme != CreditMode::V2Windowed), "wire.credit_mode"),
            (self.credits.is_some(), "limits.credits"),
            (self.inline_threshold != 4096, "wire.receive_size"),
            (self.no_coalesce, "poll.coalesce_grants"),
            (self.no_remote_invalidate, "wire.remote_invalidate"),
            (self.signal_every != 16, "poll.signal_every"),
            (self.chunk_align != 64, "memory.chunk_align"),
            (self.small_buffers.is_some(), "memory.small_buffers"),
            (self.message_buffers.is_some(), "memory.message_buffers"),
            (!self.bulk_buffers.is_empty(), "memory.bulk_buffers"),
            (self.max_reads.is_some(), "limits.max_reads"),
            (self.keep_alive != 2000, "timeouts.keep_alive"),
        ];
        knobs.into_iter().filter_map(|(given, knob)| given.then_some(knob))
    }

    /// Version and credit scheme.
    pub(crate) fn scheme(&self) -> Result<CreditMode, Failure> {
        match (self.protocol, self.credit_scheme) {
            (1, None) => Ok(CreditMode::V1),
            (1, Some(_)) => Err(Failure::Usage(
                "--credit-scheme: version 1 has one scheme only, that of RFC 8166 section 3.3".to_owned(),
            )),
            (_, None | Some(CreditScheme::Windowed)) => Ok(CreditMode::V2Windowed),
            (_, Some(CreditScheme::Incremental)) => Ok(CreditMode::V2Incremental),
        }
    }

    /// The same options, for the command line of a server.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut out: Vec<String> = Vec::new();
        let mut option = |name: &str, value: String| out.extend([name.to_owned(), value]);
        option("--version", self.protocol.to_string());
        if let Some(scheme) = self.credit_scheme {
            option("--credit-scheme", scheme.name().to_owned());
        }
        if let Some(credits) = self.credits {
            option("--credits", credits.to_string());
        }
        option("--inline", self.inline_threshold.to_string());
        if let Some(defer) = self.defer {
            option("--defer", defer.to_string());
        } else {
            option("--workers", self.workers.to_string());
        }
        option("--shards", self.shards.to_string());
        if let Some(count) = self.small_buffers {
            option("--small-buffers", count.to_string());
        }
        if let Some(count) = self.message_buffers {
            option("--message-buffers", count.to_string());
        }
        if let Some(reads) = self.max_reads {
            option("--max-reads", reads.to_string());
        }
        for class in &self.bulk_buffers {
            option("--bulk-buffers", class.to_string());
        }
        option("--signal-every", self.signal_every.to_string());
        option("--chunk-align", self.chunk_align.to_string());
        option("--keep-alive", self.keep_alive.to_string());
        out.extend(self.no_coalesce.then(|| "--no-coalesce".to_owned()));
        out.extend(self.no_remote_invalidate.then(|| "--no-remote-invalidate".to_owned()));
        out.extend(self.config.arguments::<AcceptConfig>());
        out
    }
}

/// By how many microseconds calls are answered later; 0: in the shard's next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Defer(pub(crate) u32);

impl FromStr for Defer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "poll" {
            return Ok(Self(0));
        }
        let microseconds = text.parse().ok().filter(|us| (1..=1_000_000).contains(us));
        microseconds.map(Self).ok_or_else(|| "wanted `poll`, or from 1 to 1000000 microseconds".to_owned())
    }
}

impl fmt::Display for Defer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("poll"),
            microseconds => microseconds.fmt(f),
        }
    }
}

/// Buffers of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferClass {
    /// Bytes of each.
    pub(crate) size: usize,
    /// How many.
    pub(crate) count: usize,
}

impl FromStr for BufferClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (size, count) = text.split_once(':').ok_or("wanted BYTES:N, e.g. 64K:32")?;
        let count = count.parse().ok().filter(|count| (1..=1 << 20).contains(count));
        Ok(Self { size: parse_size(size)?, count: count.ok_or("wanted 1 to 1048576 buffers behind the colon")? })
    }
}

impl fmt::Display for BufferClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.size, self.count)
    }
}

/// How version 2 counts credits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CreditScheme {
    /// Each header says how many messages were received, and the credits beyond them
    Windowed,
    /// Each header grants some more
    Incremental,
}

impl CreditScheme {
    /// As it is given on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Windowed => "windowed",
            Self::Incremental => "incremental",
        }
    }
}

/// A procedure of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum RpcOp {
    /// No arguments, no results
    Null,
    /// The payload inline, and back inline
    Echo,
    /// The payload from the server, by RDMA Write
    Read,
    /// The payload to the server, by RDMA Read
    Write,
}

impl RpcOp {
    /// As it is given on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Echo => "echo",
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    /// The payload travels by RDMA, apart from the messages.
    pub(crate) fn is_bulk(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}
