//! Metrics of a shard's tables: pools and refusals.

use rpcrdma::stats::{ClassStats, Refusals};

/// A number of each `S`.
pub(super) struct Number<S> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) of: fn(&S) -> u64,
}

const fn number<S>(name: &'static str, help: &'static str, of: fn(&S) -> u64) -> Number<S> {
    Number { name, help, of }
}

/// Gauges of a size class of the pool.
pub(super) const POOL_GAUGES: &[Number<ClassStats>] = &[
    number("pool_buffers", "Buffers of a size class of the pool", |class| class.count as u64),
    number("pool_buffers_free", "Of these, those that are free", |class| class.free as u64),
    number("pool_buffers_lowest", "The fewest that were free", |class| class.low_water as u64),
];

/// Causes of refusals: values of the label `reason`.
pub(super) const REFUSALS: &[Reason] = &[
    Reason { name: "unavailable", of: |refusals| refusals.unavailable },
    Reason { name: "garbage_arguments", of: |refusals| refusals.garbage_arguments },
    Reason { name: "system_errors", of: |refusals| refusals.system_errors },
    Reason { name: "authentication", of: |refusals| refusals.authentication },
    Reason { name: "transport", of: |refusals| refusals.transport },
    Reason { name: "err_system", of: |refusals| refusals.err_system },
];

/// One cause.
pub(super) struct Reason {
    pub(super) name: &'static str,
    pub(super) of: fn(&Refusals) -> u64,
}
