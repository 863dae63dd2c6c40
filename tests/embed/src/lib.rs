//! A key-value store over ONC RPC, whose values go by RDMA: the program of somebody who embeds the engine, and has its
//! README and its documentation to go by.
//!
//! | module | holds |
//! | --- | --- |
//! | `protocol` | the procedures, and what they take and give |
//! | `xdr` | as much of XDR (RFC 4506) as they need |
//! | `log` | where values are: a log of each shard, and one index over all of them |
//! | `ring` | an io_uring, and the memory that the kernel works on |
//! | `server` | the procedures of one shard, and its task: what goes into its log, and comes from any |
//! | `client` | the store as a client on tokio sees it |
//!
//! Each shard has its thread, its io_uring and its log; a key may be put by any of them, so the index is shared, and
//! locked for as long as it takes to look a key up.

pub mod client;
mod log;
pub mod protocol;
mod ring;
pub mod server;
mod xdr;
