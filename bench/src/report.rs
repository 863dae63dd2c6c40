//! What is reported. One description serves both forms: JSON is these values as they are, and the text table
//! is made of them.
#![forbid(unsafe_code)]

use serde::Serialize;

use crate::counters::Usage;
use crate::env::Machine;
use crate::probe::Probes;
use crate::samples::Latency;

/// Version of this layout: a field that changes its meaning or goes away makes a new one.
pub(crate) const SCHEMA: u32 = 1;

/// The whole of one invocation.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    /// What was measured, on what.
    pub(crate) test_info: TestInfo,
    /// One for each size, in order.
    pub(crate) results: Vec<Entry>,
    /// Why the run broke off: then `results` lacks the sizes that were left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// What was measured, on what.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TestInfo {
    /// Title for people.
    pub(crate) title: String,
    /// The subcommand.
    pub(crate) test: String,
    /// The operation.
    pub(crate) op: String,
    /// What one operation consists of, and so what its time spans.
    pub(crate) method: String,
    /// `software` or `verbs`. Figures of the software fabric are not figures of a network.
    pub(crate) fabric: String,
    /// Device behind it.
    pub(crate) device: String,
    /// What it gives to this side.
    pub(crate) device_limits: String,
    /// Where the server listens.
    pub(crate) address: String,
    /// The server is a process that this invocation started.
    pub(crate) loopback: bool,
    /// `closed`, or `open` with the operations per second.
    #[serde(rename = "loop")]
    pub(crate) looped: String,
    /// Which core ran what, and who said so.
    pub(crate) pinning: String,
    /// The client's core.
    pub(crate) client_core: usize,
    /// The server's core, if it is on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) server_core: Option<usize>,
    /// What measured time.
    pub(crate) clock: String,
    /// What the client does when there is nothing to do.
    pub(crate) idle: String,
    /// What the server does then.
    pub(crate) server_idle: String,
    /// Connections.
    pub(crate) qps: u32,
    /// One completion for so many work requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cq_mod: Option<u32>,
    /// Work requests of one turn go out as one chain.
    pub(crate) batching: bool,
    /// How the engine runs, where calls are measured.
    #[serde(flatten)]
    pub(crate) engine: Option<EngineInfo>,
    /// Of this program.
    pub(crate) rpcperf_version: &'static str,
    /// It was built with optimization.
    pub(crate) optimized_build: bool,
    /// The machine.
    #[serde(flatten)]
    pub(crate) machine: Machine,
}

/// How the engine runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct EngineInfo {
    /// Version and credit scheme.
    pub(crate) protocol: &'static str,
    /// How the payload travels.
    pub(crate) form: &'static str,
    /// Who calls: `forward` the client, `reverse` the server, `both` each the other.
    pub(crate) direction: &'static str,
    /// The client's credit limit.
    pub(crate) credits: u32,
    /// The server's.
    pub(crate) server_credits: u32,
    /// The longest message, in bytes.
    #[serde(rename = "inline")]
    pub(crate) inline_threshold: u32,
    /// The server's shards.
    pub(crate) shards: u32,
    /// The server's threads that run procedures; 0: its shard does.
    pub(crate) workers: u32,
    /// Microseconds by which the server answers later; 0: the next time that its shard's task is turned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deferred_us: Option<u32>,
    /// One signalled Send in so many.
    pub(crate) signal_every: u32,
    /// What chunks in the server's memory start at a multiple of, in bytes.
    pub(crate) chunk_align: usize,
    /// Pure grants wait until half the credit limit is used.
    pub(crate) coalesced_grants: bool,
    /// The server revokes what a call exposed, by Send With Invalidate.
    pub(crate) remote_invalidate: bool,
}

/// What came out of a run in one direction, or of two at once.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Measured {
    /// Operations that counted.
    pub(crate) iters: u64,
    /// The time that they took.
    pub(crate) seconds: f64,
    /// Round trips.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rtt_ns: Option<Latency>,
    /// Operations per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rps: Option<f64>,
    /// The same of the best slice of 10 ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_rps: Option<f64>,
    /// Payload in one direction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_s: Option<f64>,
    /// The most payload in a slice of 10 ms, as a rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes_per_s: Option<f64>,
}

/// The result of one size.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Entry {
    /// Bytes of payload.
    pub(crate) size: usize,
    /// Operations under way at a time in each direction, of all connections together.
    pub(crate) outstanding: u32,
    /// Of the client's calls; of the server's, where only the server calls.
    #[serde(flatten)]
    pub(crate) own: Measured,
    /// Of the server's calls, where both call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reverse: Option<Measured>,
    /// Of both together; its round trips are those of all calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sum: Option<Measured>,
    /// What one core copied between two hot buffers of this size, in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memcpy_bytes_per_s: Option<f64>,
    /// `bytes_per_s` by `memcpy_bytes_per_s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memcpy_ratio: Option<f64>,
    /// Round trip of a cache line between the two cores, around the measurement: two values that differ much
    /// mean that the cores were moved meanwhile.
    pub(crate) probe_rtt_ns: Probes,
    /// Times that the kernel took the client's core away during the measurement: more than a few, and
    /// something else wants that core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) preemptions: Option<u64>,
    /// What the client's engine counted, warm-up included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) client: Option<Usage>,
    /// What the server's engine counted, if the server is ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) server: Option<Usage>,
    /// Limits that this result misses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) limits_missed: Vec<String>,
}
