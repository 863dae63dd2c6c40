//! ONC RPC over RDMA, protocol versions 1 and 2: poll-mode, core-pinned.
//!
//! ```text
//!  client · server          the public face
//!      │ handoff            rings between shards and other threads
//!    shard                  one core's loop
//!   ├── proto               one connection's rules, without I/O
//!   │    └── wire           bytes <-> headers
//!   └── fabric              what an RDMA device is: software, (verbs)
//!        └── mempool        hugepage arenas, per-core pools
//! ```
//!
//! Beside it, for what goes beside RDMA: `stream`, RPC over TCP, and `rpcbind`.
//!
//! Arrows point down only. Start at [`server::Server`] and [`client::LocalClient`]; `PROTOCOL.md` beside this
//! crate says what is on the wire, and `README.md` how a call goes through the code.

pub mod client;
pub mod config;
pub mod handoff;
pub mod rpcbind;
pub mod server;
pub mod service;
pub mod shard;
pub mod stats;
pub mod stream;

mod address;

pub use address::{Address, AddressError};
pub use client::{Client, LocalClient};
pub use config::Config;
pub use handoff::idle::IdlePolicy;
pub use proto::{CallError, Refusal, Scheme};
pub use rpcrdma_fabric as fabric;
pub use rpcrdma_mempool as mempool;
pub use rpcrdma_proto as proto;
pub use rpcrdma_proto::{auth, binding, wire};
pub use server::Server;
pub use service::{Procedure, ServerCall, Services};
pub use shard::{CallResult, Reply};
