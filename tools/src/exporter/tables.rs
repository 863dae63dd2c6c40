//! Gauges of a shard's buffer pool, and reasons of refusals.

use rpcrdma::stats::{ClassStats, Refusals};

/// Reads a number of `S`.
type Getter<S> = fn(&S) -> u64;

/// Gauges of a size class of the pool: name, help text and value.
pub(super) const POOL_GAUGES: [(&str, &str, Getter<ClassStats>); 3] = [
    ("pool_buffers", "Buffers of a pool size class", |class| class.count as u64),
    ("pool_buffers_free", "Free buffers of a pool size class", |class| class.free as u64),
    ("pool_buffers_lowest", "Lowest number of free buffers of a pool size class", |class| class.low_water as u64),
];

/// Reasons of refusals, which are values of the label `reason`.
pub(crate) const REFUSALS: [(&str, Getter<Refusals>); 6] = [
    ("unavailable", |refusals| refusals.unavailable),
    ("garbage_arguments", |refusals| refusals.garbage_arguments),
    ("system_errors", |refusals| refusals.system_errors),
    ("authentication", |refusals| refusals.authentication),
    ("transport", |refusals| refusals.transport),
    ("err_system", |refusals| refusals.err_system),
];
