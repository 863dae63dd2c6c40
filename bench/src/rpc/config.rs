//! Engine configuration of a test, at either end.
#![forbid(unsafe_code)]

use std::time::Duration;

use rpcrdma::config::DeviceConfig;
use rpcrdma::{Config, CreditMode};
use rpcrdma_config::{BUDGET, HOST_KEY_ID, Role};

use crate::cli::{DeviceArgs, EngineArgs, Form, Idle};
use crate::failure::Failure;

/// Limit of the memory for buffers of one size, in bytes. Further calls wait.
const MAX_PER_SIZE: usize = 32 << 20;
/// Limit of the memory for one buffer of a size per connection, in bytes.
const MAX_FOR_CONNECTIONS: usize = 128 << 20;
/// Receives of a shard beyond those that connections reserve.
const SPARE_RECEIVES: usize = 256;
/// A connection gets at most 1/`SHARE` of the remaining receives.
const SHARE: usize = 8;

/// Lower bound of reverse credits: the engine's default.
const MIN_REVERSE_CREDITS: u32 = 8;
/// Bytes beyond the payload in a buffer: the headers of an RPC message, and room in front of it.
const SLACK: usize = 1024;
/// Largest chunk alignment of the engine.
const LARGEST_ALIGNMENT: usize = 4096;

/// Load for which the memory of a side is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    /// Connections.
    pub(crate) connections: usize,
    /// Outstanding calls per connection.
    pub(crate) outstanding: usize,
    /// Largest payload that travels by RDMA, in bytes; 0: none.
    pub(crate) bulk: usize,
    /// Largest payload in RPC messages that may exceed one Send, in bytes; 0: none.
    pub(crate) message: usize,
    /// Form of the payloads; only [`Form::Continued`] and [`Form::Long`] matter.
    pub(crate) form: Form,
}

impl Load {
    /// Outstanding calls of all connections.
    pub(crate) fn calls(&self) -> usize {
        self.connections * self.outstanding
    }

    /// Sizes and numbers of a server's payload buffers.
    pub(crate) fn bulk_buffers(&self) -> Vec<(usize, usize)> {
        buffer_sizes(self.bulk).map(|size| (size, self.affordable(size))).collect()
    }

    /// Sizes and numbers of buffers for RPC messages. Each call takes two: call and reply, or call and copy. Two more
    /// serve reassembly.
    fn long_buffers(&self) -> Vec<(usize, usize)> {
        buffer_sizes(self.message).map(|size| (size + SLACK, 2 * self.affordable(size) + 2)).collect()
    }

    /// Sizes and numbers of exposed buffers, for RPC messages in chunks: two per call.
    pub(crate) fn exposed_messages(&self) -> Vec<(usize, usize)> {
        if self.form != Form::Long {
            return Vec::new();
        }
        buffer_sizes(self.message).map(|size| (size + SLACK, 2 * self.affordable(size))).collect()
    }

    /// Number of buffers of `size` bytes: one per call, or per connection, within the memory limits.
    fn affordable(&self, size: usize) -> usize {
        let for_connections = self.connections.min(MAX_FOR_CONNECTIONS / size);
        self.calls().min(MAX_PER_SIZE / size).max(for_connections).max(1)
    }

    /// Outstanding calls with payloads of `size` bytes on each of `connections`, at a server sized for `self`.
    pub(crate) fn outstanding_with(&self, size: usize, connections: usize) -> usize {
        let class = buffer_sizes(self.bulk.max(self.message)).find(|&largest| size <= largest);
        class.map_or(1, |class| (self.affordable(class) / connections).max(1))
    }
}

/// Buffers for chunks of payloads and of RPC messages, merged by size.
fn chunk_buffers(load: &Load) -> Vec<(usize, usize)> {
    let mut all = [load.bulk_buffers(), load.exposed_messages()].concat();
    all.sort_unstable();
    all.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        kept.1 += if same { next.1 } else { 0 };
        same
    });
    all
}

/// Buffer sizes up to `largest`, in ascending order; none for 0.
fn buffer_sizes(largest: usize) -> impl Iterator<Item = usize> {
    let sizes = [64 << 10, 1 << 20].into_iter().filter(move |&size| size < largest).chain(Some(largest));
    sizes.filter(|&size| size > 0)
}

/// Configuration of both ends: the options, and memory for `load`.
pub(crate) fn common_config(
    args: &EngineArgs,
    device: &DeviceArgs,
    idle: Idle,
    batch: bool,
    load: &Load,
) -> Result<Config, Failure> {
    let usual = if load.connections <= 64 { 64 } else { 16 };
    let credits = args.credits.unwrap_or((2 * load.outstanding as u32).clamp(usual, 32_767));
    let reverse_credits = (load.outstanding as u32).max(MIN_REVERSE_CREDITS);
    let per_connection = credits as usize + 1 + reverse_credits as usize;
    let mut config = Config::default();
    // Longest shift of a chunk's start. The engine rejects an alignment beyond `LARGEST_ALIGNMENT`.
    let slack = args.chunk_align.saturating_sub(config.memory.chunk_align).min(LARGEST_ALIGNMENT);
    let sends = load.connections * (2 * load.outstanding + args.signal_every as usize);

    let memory = &mut config.memory;
    memory.budget = BUDGET;
    memory.receives = SPARE_RECEIVES + (load.connections + SHARE) * per_connection;
    memory.small_buffers = args.small_buffers.map_or(1024 + sends, |count| count as usize);
    memory.message_buffers = args.message_buffers.map_or(256 + sends, |count| count as usize);
    memory.bulk_buffers = chunk_buffers(load).into_iter().map(|(size, count)| (size + slack, count)).collect();
    memory.chunk_align = args.chunk_align;
    memory.long_buffers = load.long_buffers();

    let limits = &mut config.limits;
    (limits.credits, limits.max_calls) = (credits, load.outstanding);
    limits.max_credits = limits.max_credits.max(credits);

    // A waiting side relies on probes: some devices do not report a lost link.
    config.timeouts.keep_alive = Duration::from_millis(args.keep_alive.into());

    let wire = &mut config.wire;
    wire.credit_mode = args.configured_mode()?;
    wire.receive_size = args.inline_threshold as usize & !3;
    let debug = &mut config.debug;
    debug.reverse_credits = reverse_credits;
    match load.form {
        Form::Continued => debug.continue_up_to = usize::MAX,
        Form::Long => debug.continue_up_to = 0,
        Form::Inline | Form::Chunk => {}
    }
    wire.reassemble_up_to = wire.reassemble_up_to.max(load.message + SLACK);
    debug.remote_invalidate = !args.no_remote_invalidate;
    wire.host_auth = args.host_key.policy(HOST_KEY_ID).map_err(|error| Failure::Usage(format!("{error:#}")))?;

    config.device = DeviceConfig {
        name: device.ib_dev.clone(),
        gid_index: device.gid_index,
        tos: device.tos,
        service_level: device.sl,
        path_mtu: device.mtu,
    };
    (config.iwarp, debug.fpdu_size) = (device.iwarp(), device.fpdu.unwrap_or_default());

    config.poll.idle = idle.policy();
    (debug.signal_every, debug.batch) = (args.signal_every, batch);
    debug.coalesce_grants = !args.no_coalesce;
    Ok(config)
}

/// Knobs that only options of rpcperf set, because both ends, raw tests and reports depend on them.
const BY_OPTION: [(&str, &str); 5] = [
    ("poll.core", "--cores"),
    ("poll.idle", "--idle"),
    ("debug.batch", "--no-batch"),
    ("wire.receive_size", "--inline"),
    ("wire.credit_mode", "--version and --credit-mode"),
];

/// Applies the configuration file, the environment and `--set`, and adds the knobs of the role.
pub(crate) fn apply_settings<R: Role + Default>(
    args: &EngineArgs,
    device: &DeviceArgs,
    config: &Config,
) -> Result<(Config, R), Failure> {
    let device = [
        (device.ib_dev.is_some(), "device.name"),
        (device.gid_index.is_some(), "device.gid_index"),
        (device.tos.is_some(), "device.tos"),
        (device.sl.is_some(), "device.service_level"),
        (device.mtu.is_some(), "device.path_mtu"),
        (device.crc.is_some(), "iwarp.crc"),
        (device.fpdu.is_some(), "debug.fpdu_size"),
        (device.sndbuf.is_some(), "iwarp.send_buffer"),
        (device.rcvbuf.is_some(), "iwarp.receive_buffer"),
        (device.busy_poll.is_some(), "iwarp.busy_poll"),
    ];
    for (knob, option) in BY_OPTION {
        if args.config.set.iter().any(|text| text.split('=').next().is_some_and(|name| name.trim() == knob)) {
            return Err(Failure::Usage(format!("--set {knob}: rpcperf sets it by {option} only")));
        }
    }
    let options: Vec<_> = BY_OPTION
        .into_iter()
        .map(|(knob, _)| knob)
        .chain(args.knobs())
        .chain(device.into_iter().filter_map(|(given, knob)| given.then_some(knob)))
        .collect();
    let settings = args.config.load().and_then(|settings| settings.apply(config, &R::default(), &options));
    settings.map_err(|error| Failure::Usage(error.to_string()))
}

/// Adds the options of a server: reads and chunk buffers.
pub(crate) fn with_server_options(args: &EngineArgs, mut config: Config) -> Config {
    config.limits.max_reads = args.max_reads.map(|reads| reads as usize);
    if !args.bulk_buffers.is_empty() {
        config.memory.bulk_buffers = args.bulk_buffers.iter().map(|class| (class.size, class.count)).collect();
    }
    config
}

/// Mode that two ends with these preferences negotiate, which is the lower one.
pub(crate) fn negotiated_mode(first: CreditMode, second: CreditMode) -> CreditMode {
    match (first, second) {
        (CreditMode::V1, _) | (_, CreditMode::V1) => CreditMode::V1,
        (CreditMode::V2Incremental, _) | (_, CreditMode::V2Incremental) => CreditMode::V2Incremental,
        (CreditMode::V2Windowed, CreditMode::V2Windowed) => CreditMode::V2Windowed,
    }
}

/// Version and credit mode for people.
pub(crate) fn mode_name(mode: CreditMode) -> &'static str {
    match mode {
        CreditMode::V1 => "version 1",
        CreditMode::V2Windowed => "version 2, windowed credits",
        CreditMode::V2Incremental => "version 2, incremental credits",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ends_agree_on_the_lower_mode() {
        let all = [CreditMode::V1, CreditMode::V2Incremental, CreditMode::V2Windowed];
        for (n, &one) in all.iter().enumerate() {
            for (m, &other) in all.iter().enumerate() {
                assert_eq!(negotiated_mode(one, other), all[n.min(m)]);
            }
        }
    }

    #[test]
    fn memory_for_payloads_is_bounded() {
        let load = Load { connections: 4, outstanding: 16, bulk: 8 << 20, message: 0, form: Form::Chunk };
        assert_eq!(load.bulk_buffers(), [(64 << 10, 64), (1 << 20, 32), (8 << 20, 4)]);
        assert_eq!(load.outstanding_with(4096, 1), 64);
        assert_eq!(load.outstanding_with(65537, 4), 8);
        assert_eq!(load.outstanding_with(8 << 20, 4), 1);
        assert_eq!(load.outstanding_with(1 << 10, 1000), 1);
        assert_eq!(
            Load { connections: 2100, ..load }.bulk_buffers(),
            [(64 << 10, 2048), (1 << 20, 128), (8 << 20, 16)]
        );
        assert_eq!(Load { bulk: 64 << 10, ..load }.bulk_buffers(), [(64 << 10, 64)]);
        assert_eq!(Load { bulk: 0, ..load }.bulk_buffers(), []);
        assert_eq!((load.long_buffers(), load.exposed_messages()), (vec![], vec![]));
        let long = Load { bulk: 0, message: 8 << 20, form: Form::Long, ..load };
        assert_eq!(long.outstanding_with(8 << 20, 4), 1);
        assert_eq!(long.long_buffers().last(), Some(&((8 << 20) + SLACK, 10)));
        assert_eq!(long.exposed_messages().first(), Some(&((64 << 10) + SLACK, 128)));
        assert_eq!(Load { form: Form::Continued, ..long }.exposed_messages(), []);
    }
}
