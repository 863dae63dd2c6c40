//! A key-value store over ONC RPC with values transferred by RDMA.
//!
//! This program uses only what the README and the documentation of the engine describe.
//!
//! | module | contents |
//! | --- | --- |
//! | `protocol` | types and procedures, generated from `kv.x` |
//! | `log` | the values: a log per shard, and one index over all of them |
//! | `ring` | an io_uring, and the memory of its operations |
//! | `server` | the procedures of one shard, and the task that writes its log and reads all logs |
//! | `client` | the store for a client on tokio |
//!
//! Each shard has a thread, an io_uring and a log. Any shard may put a key, so all shards share the index, which
//! each lookup locks.

pub mod client;
mod log;
pub mod protocol;
mod ring;
pub mod server;

/// Compiles and runs the tutorial.
#[cfg(doctest)]
#[doc = include_str!("../../../tools/xdrgen/README.md")]
mod tutorial {}
