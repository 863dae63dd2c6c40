//! Shared helpers of the integration tests.
//!
//! A [`World`] holds servers and clients. Other modules hold the services, recognizable data, misbehaving peers
//! ([`RawPeer`]), and child processes.
#![forbid(unsafe_code)]

mod balance;
mod cable;
mod calls;
mod child;
mod data;
pub mod document;
mod held;
mod lists;
pub mod place;
mod polled;
pub mod prelude;
mod raw;
mod raw_server;
mod reverse;
mod rows;
mod script;
mod services;
pub mod source;
mod threads;
mod timed;
pub mod typed;
mod world;

pub use balance::{eventually, open_descriptors, settles, shard_leak};
pub use cable::Cable;
pub use calls::{Calls, Outcome, ThreadCalls, block_on, connect_polling, goes_on, outcome_of, plain};
pub use child::{CHILD_TEST, Child, child_role};
pub use data::{Random, data_of, filled, pattern, patterned, put_pattern};
pub use held::{GATED, Gate, HELD, Held, Way, answer, elsewhere};
pub use lists::{Cut, Lists, reads, segment};
pub use polled::{polled_client, polled_server, simulated_client, simulated_server};
pub use raw::{
    ARGS_AT, Message, RPC_CALL, RPC_REPLY, RawListener, RawPeer, UNTOUCHED, XID, be, call_bytes, call_bytes_as,
    contents, remote, reply_bytes, with_word,
};
pub use raw_server::{Place, RawServer};
pub use reverse::{HELLO, both_ways, both_ways_with, call_back, called_back, serving_client, telling_services};
pub use rows::{Row, chain, for_each, pairs, row, says, with_raw, with_raw_of};
pub use script::Step;
pub use services::{
    CREDENTIAL, ECHO, LOAD, LONGER, MIRROR, PANIC, PROGRAM, REFUSE, REPLY, STORE, StandardHandler, VERSION,
    WORKER_ECHO, echo_of, request_cache, run_once, services_by, services_for, services_of, services_with, standard_and,
    standard_services,
};
pub use timed::TimedServer;
pub use world::{
    Draining, OfClient, OfServer, With, World, echo, few_credits, in_mode, load, local_and, mirror, own_pool,
    reconnecting, scarce, served_or_lost, small, small_client, small_server, store, unharmed,
};

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
