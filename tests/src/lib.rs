//! Shared helpers of the integration tests.
//!
//! A [`World`] holds servers and clients. Other modules hold the services, recognizable data, misbehaving peers
//! ([`RawPeer`]), and child processes.
#![forbid(unsafe_code)]

mod balance;
mod cable;
mod child;
mod data;
pub mod document;
pub mod place;
mod raw;
mod services;
pub mod source;
mod threads;
mod timed;
mod world;

pub use balance::{open_descriptors, settles, shard_leak};
pub use cable::Cable;
pub use child::{CHILD_TEST, Child, child_role};
pub use data::{Random, filled, pattern, patterned, put_pattern};
pub use raw::{Message, RawListener, RawPeer, call_bytes, call_bytes_as, reply_bytes};
pub use services::{
    CREDENTIAL, ECHO, LOAD, LONGER, MIRROR, PANIC, PROGRAM, REFUSE, REPLY, STORE, StandardHandler, VERSION,
    WORKER_ECHO, services_by, services_for, services_of, services_with, standard_services,
};
pub use timed::TimedServer;
pub use world::{With, World, echo, load, mirror, served_or_lost, small, small_client, small_server, store};

/// Compiles the examples in documents outside the crates, and runs those that can run.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../README.md")]
    mod readme {}
    #[doc = include_str!("../../engine/README.md")]
    mod engine {}
    #[doc = include_str!("../../engine/crates-io.md")]
    mod engine_crate {}
    #[doc = include_str!("../../engine/xdr/README.md")]
    mod xdr {}
    #[doc = include_str!("../../mempool/README.md")]
    mod mempool {}
    #[doc = include_str!("../../tools/host/README.md")]
    mod host {}
    #[doc = include_str!("../../tuning.md")]
    mod tuning {}
}
