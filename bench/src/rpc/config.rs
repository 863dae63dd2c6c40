//! How the engine is set up for a test, at either end.
#![forbid(unsafe_code)]

use rpcrdma::{Config, IdlePolicy, Scheme};

use crate::cli::{EngineArgs, Idle};
use crate::failure::Failure;

/// Memory that buffers of one size may take, as far as there is one for each connection.
const MOST_PER_SIZE: usize = 32 << 20;
/// Receives that a shard keeps besides those promised.
const SPARE_RECEIVES: usize = 256;
/// A connection gets at most this part of the Receives that are left.
const SHARE: usize = 8;

/// What a side must be ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    /// Connections.
    pub(crate) connections: usize,
    /// Calls under way at a time, of each.
    pub(crate) outstanding: usize,
    /// Bytes of the largest payload that travels by RDMA; 0: none does.
    pub(crate) bulk: usize,
}

impl Load {
    /// Calls of all connections together.
    pub(crate) fn calls(&self) -> usize {
        self.connections * self.outstanding
    }

    /// Sizes and numbers of a server's buffers for payloads.
    pub(crate) fn bulk_buffers(&self) -> Vec<(usize, usize)> {
        let steps = [64 << 10, 1 << 20, self.bulk];
        let sizes = steps.into_iter().filter(|&size| size < self.bulk).chain(Some(self.bulk));
        sizes.filter(|&size| size > 0).map(|size| (size, self.affordable(size))).collect()
    }

    /// Buffers for payloads of `size` bytes: one for each call, or as many as their memory allows.
    fn affordable(&self, size: usize) -> usize {
        self.calls().min(MOST_PER_SIZE / size).max(self.connections)
    }

    /// Calls that each of `connections` may have under way with payloads of `size` bytes, when the server is set up for `self`.
    pub(crate) fn outstanding_with(&self, size: usize, connections: usize) -> usize {
        let class = self.bulk_buffers().into_iter().find(|&(largest, _)| size <= largest);
        class.map_or(1, |(_, count)| (count / connections).max(1))
    }
}

/// Everything that both ends share: the options, and memory for so many messages.
pub(crate) fn shared(args: &EngineArgs, idle: Idle, batch: bool, load: &Load) -> Result<Config, Failure> {
    let usual = if load.connections <= 64 { 64 } else { 16 };
    let window = args.credits.unwrap_or((2 * load.outstanding as u32).clamp(usual, 32_767));
    let one = window as usize + 1;
    let sends = load.connections * (2 * load.outstanding + args.signal_every as usize);
    Ok(Config {
        scheme: args.scheme()?,
        inline: args.inline as usize & !3,
        window,
        receives: SPARE_RECEIVES + (load.connections + SHARE) * one,
        max_calls: load.outstanding,
        small_buffers: 1024 + sends,
        message_buffers: 256 + sends,
        bulk_buffers: load.bulk_buffers(),
        idle: policy(idle),
        signal_every: args.signal_every,
        batch,
        coalesce_grants: !args.no_coalesce,
        remote_invalidate: !args.no_remote_invalidate,
        ..Config::default()
    })
}

/// The engine's name for an idle policy.
pub(crate) fn policy(idle: Idle) -> IdlePolicy {
    match idle {
        Idle::Poll => IdlePolicy::Poll,
        Idle::Adaptive => IdlePolicy::default(),
        Idle::Event => IdlePolicy::Event,
    }
}

/// Version and scheme in words.
pub(crate) fn scheme_name(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::V1 => "version 1",
        Scheme::V2Windowed => "version 2, windowed credits",
        Scheme::V2Incremental => "version 2, incremental credits",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_payloads_is_bounded() {
        let load = Load { connections: 4, outstanding: 16, bulk: 8 << 20 };
        assert_eq!(load.bulk_buffers(), [(64 << 10, 64), (1 << 20, 32), (8 << 20, 4)]);
        assert_eq!(load.outstanding_with(4096, 1), 64);
        assert_eq!(load.outstanding_with(65537, 4), 8);
        assert_eq!(load.outstanding_with(8 << 20, 4), 1);
        assert_eq!(load.outstanding_with(1 << 10, 1000), 1);
        assert_eq!(Load { bulk: 64 << 10, ..load }.bulk_buffers(), [(64 << 10, 64)]);
        assert_eq!(Load { bulk: 0, ..load }.bulk_buffers(), []);
    }
}
