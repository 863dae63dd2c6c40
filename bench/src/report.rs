//! Report of one invocation, for JSON and the text table.
#![forbid(unsafe_code)]

use rpcrdma::fabric::Capabilities;
use serde::Serialize;

use crate::cli::{CommonArgs, Named};
use crate::counters::Usage;
use crate::env::Machine;
use crate::fabrics;
use crate::figures::Test;
use crate::pin::Placement;
use crate::probe::Probes;
use crate::samples::Latency;

/// Version of this layout. A removed field, or a new meaning of a field, increments it.
pub(crate) const SCHEMA: u32 = 1;

#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    /// `None` if the run failed before a server answered.
    pub(crate) test_info: Option<TestInfo>,
    /// One entry per size, in order.
    pub(crate) results: Vec<Entry>,
    /// Cause of an aborted run. `results` then lacks the remaining sizes.
    pub(crate) error: Option<String>,
}

/// Test, endpoints and machine.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct TestInfo {
    /// Title of the banner.
    pub(crate) title: String,
    pub(crate) test: String,
    pub(crate) op: String,
    /// Steps of one operation that its measured time covers.
    pub(crate) method: String,
    /// `software`, `iwarp` or `verbs`. Figures of the software fabric are not figures of a network.
    pub(crate) fabric: String,
    pub(crate) device: String,
    /// Limits of the device on this side.
    pub(crate) device_limits: String,
    /// Address of the server.
    pub(crate) address: String,
    /// This invocation started the server.
    pub(crate) loopback: bool,
    /// `closed`, or `open` with the operations per second.
    #[serde(rename = "loop")]
    pub(crate) looped: String,
    /// Cores of the threads, and the source of the choice.
    pub(crate) pinning: String,
    pub(crate) client_core: usize,
    /// Core of the server, on the server's machine.
    pub(crate) server_core: Option<usize>,
    /// Name of the clock.
    pub(crate) clock: String,
    /// Idle policy of the client.
    pub(crate) idle: String,
    /// Idle policy of the server.
    pub(crate) server_idle: String,
    /// Connections.
    pub(crate) qps: u32,
    /// Work requests per completion.
    pub(crate) cq_mod: Option<u32>,
    /// Work requests of one poll are posted as one chain.
    pub(crate) batching: bool,
    /// Engine options, where calls are measured.
    #[serde(flatten)]
    pub(crate) engine: Option<EngineInfo>,
    pub(crate) rpcperf_version: &'static str,
    pub(crate) optimized_build: bool,
    #[serde(flatten)]
    pub(crate) machine: Machine,
}

impl TestInfo {
    /// Fields common to calls (`RPC`) and raw tests (`Raw`) at `address`.
    pub(crate) fn new(
        (layer, op): (&str, &str),
        common: &CommonArgs,
        placement: &Placement,
        test: Test,
        (address, fabric, capabilities): (&str, &str, Capabilities),
    ) -> Self {
        let capital = op[..1].to_uppercase() + &op[1..];
        let title = match test {
            Test::Latency { .. } => "Latency Test: full round trips",
            Test::Rate => "Rate Test",
            Test::Bandwidth => "BW Test",
        };
        Self {
            title: format!("{layer} {capital} {title}"),
            op: op.to_owned(),
            fabric: fabric.to_owned(),
            device_limits: fabrics::describe_limits(&capabilities),
            device: capabilities.device,
            address: address.to_owned(),
            loopback: common.loopback.is_some(),
            looped: test.loop_kind(),
            pinning: placement.note.clone(),
            client_core: placement.client,
            server_core: Some(placement.server),
            idle: common.idle.name(),
            qps: common.qp,
            batching: !common.no_batch,
            rpcperf_version: env!("CARGO_PKG_VERSION"),
            optimized_build: !cfg!(debug_assertions),
            machine: Machine::read(Some(placement.client)),
            ..Self::default()
        }
    }
}

/// Engine options in force.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct EngineInfo {
    /// Version and credit mode.
    pub(crate) protocol: &'static str,
    /// Form of the payload.
    pub(crate) form: String,
    /// Who calls: the client (`forward`), the server (`reverse`), or both ends (`both`).
    pub(crate) direction: String,
    /// Credit limit of the client.
    pub(crate) credits: u32,
    /// Credit limit of the server.
    pub(crate) server_credits: u32,
    /// Inline threshold, in bytes.
    #[serde(rename = "inline")]
    pub(crate) inline_threshold: u32,
    /// Shards of the server.
    pub(crate) shards: u32,
    /// Worker threads of the server; 0: its shards run the procedures.
    pub(crate) workers: u32,
    /// Delay of the server's replies in microseconds; 0: until the next poll of the shard's task.
    pub(crate) deferred_us: Option<u32>,
    /// Sends per signaled Send.
    pub(crate) signal_every: u32,
    /// Alignment of chunks in the server's memory, in bytes.
    pub(crate) chunk_align: usize,
    /// Pure grants wait until half of the credit limit is used.
    pub(crate) coalesced_grants: bool,
    /// The server revokes a call's exposed memory by Send With Invalidate.
    pub(crate) remote_invalidate: bool,
}

/// Figures of one direction, or of both together.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Measured {
    /// Counted operations.
    pub(crate) iters: u64,
    /// Duration of the counted operations.
    pub(crate) seconds: f64,
    /// Round-trip times.
    pub(crate) rtt_ns: Option<Latency>,
    /// Operations per second.
    pub(crate) rps: Option<f64>,
    /// Operations per second of the best 10 ms slice.
    pub(crate) peak_rps: Option<f64>,
    /// Payload bytes per second, in one direction.
    pub(crate) bytes_per_s: Option<f64>,
    /// Payload bytes per second of the best 10 ms slice.
    pub(crate) peak_bytes_per_s: Option<f64>,
}

/// Result of one size.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Entry {
    /// Payload in bytes.
    pub(crate) size: usize,
    /// Outstanding operations in each direction, over all connections.
    pub(crate) outstanding: u32,
    /// Figures of the client's calls, or of the server's calls if only the server calls.
    #[serde(flatten)]
    pub(crate) own: Measured,
    /// Figures of the server's calls, if both sides call.
    pub(crate) reverse: Option<Measured>,
    /// Figures of both directions together. Round trips cover all calls.
    pub(crate) sum: Option<Measured>,
    /// Bytes that one core copied per second between two hot buffers of this size, in the same run.
    pub(crate) memcpy_bytes_per_s: Option<f64>,
    /// `bytes_per_s` divided by `memcpy_bytes_per_s`.
    pub(crate) memcpy_ratio: Option<f64>,
    /// Round trip of a cache line between the two cores, before and after the measurement. A large difference means
    /// that the hypervisor moved the cores meanwhile.
    pub(crate) probe_rtt_ns: Probes,
    /// Preemptions of the client's thread during the measurement. More than a few mean that another task competes for
    /// the core.
    pub(crate) preemptions: Option<u64>,
    /// Counters of the client's engine, warm-up included.
    pub(crate) client: Option<Usage>,
    /// Counters of the server's engine, if this invocation started the server.
    pub(crate) server: Option<Usage>,
    /// Missed limits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) limits_missed: Vec<String>,
}
