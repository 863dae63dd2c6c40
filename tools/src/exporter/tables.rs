//! Metrics of a shard's tables: pools and refusals.

use rpcrdma::stats::{ClassStats, Refusals};

/// A number of each `S`.
type Number<S> = fn(&S) -> u64;

/// Gauges of a size class of the pool: name, description, and value.
pub(super) const POOL_GAUGES: [(&str, &str, Number<ClassStats>); 3] = [
    ("pool_buffers", "Buffers of a size class of the pool", |class| class.count as u64),
    ("pool_buffers_free", "Of these, those that are free", |class| class.free as u64),
    ("pool_buffers_lowest", "The fewest that were free", |class| class.low_water as u64),
];

/// Causes of refusals: values of the label `reason`.
pub(crate) const REFUSALS: [(&str, Number<Refusals>); 6] = [
    ("unavailable", |refusals| refusals.unavailable),
    ("garbage_arguments", |refusals| refusals.garbage_arguments),
    ("system_errors", |refusals| refusals.system_errors),
    ("authentication", |refusals| refusals.authentication),
    ("transport", |refusals| refusals.transport),
    ("err_system", |refusals| refusals.err_system),
];
