//! ONC RPC over RDMA, protocol versions 1 and 2: poll-mode, core-pinned.
//!
//! A [`Server`] runs [`Services`]: tables of [`Procedure`]s, each with a handler that gets a [`ServerCall`]. A
//! [`Client`] or [`LocalClient`] makes [`ClientCall`](client::ClientCall)s. Short arguments and results travel inline.
//! Bulk data travels in chunks, by RDMA: the server reads an argument from a *Read chunk* of the client, and writes a
//! result to a *Write chunk*.
//!
//! ```
//! use rpcrdma::client::{ClientCall, ClientConfig};
//! use rpcrdma::server::ServerConfig;
//! use rpcrdma::{Address, LocalClient, Procedure, Refusal, Server, Services};
//!
//! /// Program numbers from 0x20000000 to 0x3fffffff are for local use (RFC 5531 §13).
//! const PROGRAM: u32 = 0x2000_0001;
//! const VERSION: u32 = 1;
//! const UPPERCASE: u32 = 1;
//! const LONGEST: usize = 64 << 10;
//!
//! // The software fabric needs no device. `verbs:HOST[:PORT]` names a device, in builds with the feature `verbs`.
//! let address: Address = format!("soft:uppercase-{}", std::process::id()).parse()?;
//!
//! // Arguments and results that may travel as chunks are declared. Calls with other chunks are refused.
//! let uppercase = Procedure::new(|call| {
//!     let text = call.take_read_chunk(0).ok_or(Refusal::GarbageArguments)?;
//!     let mut result = call.result_writer(0)?;
//!     result.put(&text.to_ascii_uppercase())?;
//!     // The other results travel inline: here the length of the text.
//!     let len = (text.len() as u32).to_be_bytes();
//!     call.reply_mut(4)?.copy_from_slice(&len);
//!     Ok(())
//! });
//! // XDR's `opaque<>` has a length word inline. The argument of this procedure has none, hence `uncounted`.
//! let uppercase = uppercase.read_chunks(1, LONGEST).uncounted().write_chunks(1, LONGEST);
//! let mut services = Services::new();
//! services.add(PROGRAM, VERSION, UPPERCASE, uppercase);
//! let server = Server::start(&address, services, &ServerConfig::default())?;
//!
//! let mut client = LocalClient::connect(&address, ClientConfig::new(PROGRAM, VERSION))?;
//! let connection = client.first();
//! let text = b"one message, two chunks".repeat(1000);
//! // The client allocates memory for chunks. The server can access it only during this call.
//! let mut argument = client.alloc(connection, text.len())?;
//! argument.copy_from_slice(&text);
//! let call = ClientCall::new(UPPERCASE).read_chunk(0, argument).write_chunk(text.len() as u32);
//! let reply = client.call(call)?;
//! assert_eq!(reply.results(), (text.len() as u32).to_be_bytes());
//! assert_eq!(reply.chunk(0), Some(&text.to_ascii_uppercase()[..]));
//!
//! drop(client);
//! server.drain(std::time::Duration::from_secs(10))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choosing an API
//!
//! | your code | server | client |
//! |---|---|---|
//! | threads, or an async runtime | [`Server::start`] | [`Client`], [`Endpoint`] |
//! | state per core | [`Server::start_with`] | [`LocalClient`] |
//! | external event loop | [`LocalServer`](server::LocalServer) | [`LocalClient`] |
//!
//! No runtime is needed. The futures of [`Client`] work with any. Handlers run on their shard, on
//! [workers](Procedure::on_workers), or wherever the application takes a [deferred](Procedure::deferred) call.
//!
//! # Modules
//!
//! | | |
//! |---|---|
//! | [`client`] | clients, calls, their configuration |
//! | [`server`] | servers, their configuration, peers |
//! | [`service`] | procedures, handlers, duplicate request cache |
//! | [`typed`] | services of types that `xdrgen` generates |
//! | [`config`] | knobs of a shard, in groups |
//! | [`stats`] | counters, gauges, histograms |
//! | [`auth`] | host authentication |
//! | [`binding`] | upper-layer bindings: DDP-eligible items, which may travel as chunks |
//! | [`rpc`], [`xdr`] | credentials; encoding of arguments and results |
//!
//! # Errors
//!
//! A call ends with a [`Reply`] or a [`CallError`], which says whether the call was sent and may be retried.
//! [`FailedCall`] returns the buffers of its chunks. A connection ends with a [`CloseReason`]. Later versions
//! may add variants to errors. The cause of a refusal is in the server's log (crate `log`): install a logger.
//!
//! `README.md` of the package follows a call through the code. `PROTOCOL.md` has the wire protocol. `tuning.md` in the
//! repository has the knobs.

// docs.rs sets `docsrs`, which makes rustdoc show the feature that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Items that these lints find unused without the feature are used with it.
#![cfg_attr(not(feature = "unstable-internals"), allow(unreachable_pub, dead_code))]

pub mod client;
pub mod config;
pub mod server;
pub mod service;
pub mod stats;
pub mod typed;

// Rings and slots between shards and other threads.
#[cfg(not(feature = "unstable-internals"))]
mod cross_thread;
#[cfg(feature = "unstable-internals")]
#[doc(hidden)]
pub mod cross_thread;
// Event loop of one core.
#[cfg(not(feature = "unstable-internals"))]
mod shard;
#[cfg(feature = "unstable-internals")]
#[doc(hidden)]
pub mod shard;

mod address;
mod start_error;

/// Host authentication: keys, and the policy toward peers.
///
/// The engine has one mechanism, [`PreSharedKey`](auth::PreSharedKey). Further mechanisms implement the traits of
/// `rpcrdma_proto::auth`, which may change between releases.
pub mod auth {
    pub use rpcrdma_proto::auth::{AuthPolicy, KeyError, Mechanism, PreSharedKey};
}

/// RPC credentials and verifiers (RFC 5531 §8).
pub mod rpc {
    pub use rpcrdma_proto::wire::rpc::{AuthStat, AuthSys};
}

/// Upper-layer bindings: DDP-eligible items, which may travel as chunks (RFC 8166 §6).
pub mod binding {
    pub use rpcrdma_proto::binding::{Binding, Bindings};
}

pub use address::{Address, AddressError};
pub use client::{Client, Endpoint, LocalClient};
pub use config::{Config, ConfigError};
pub use cross_thread::idle::IdlePolicy;
pub use proto::{CallError, CallProgress, CreditMode, ErrorParty, InvalidCall, Knob, Refusal};
pub use rpcrdma_fabric::FabricError;
pub use rpcrdma_mempool::{Arena, Buf, Frozen, MemError, PagePolicy, PageSize};
#[doc(no_inline)]
pub use rpcrdma_xdr as xdr;
pub use server::Server;
pub use service::{Procedure, ServerCall, Services};
pub use shard::{CallResult, CloseReason, CloseReasonKind, FailedCall, Reply, ResizeError};
pub use start_error::{StartError, StartErrorKind};

#[cfg(feature = "unstable-internals")]
#[doc(hidden)]
pub use {rpcrdma_fabric as fabric, rpcrdma_mempool as mempool, rpcrdma_proto as proto, rpcrdma_proto::wire};
#[cfg(not(feature = "unstable-internals"))]
use {rpcrdma_fabric as fabric, rpcrdma_proto as proto, rpcrdma_proto::wire};
