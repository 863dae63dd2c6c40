//! Shared helpers of the integration tests.
//!
//! A [`World`] has the servers of a test. Other modules have the services, data patterns, peers without an engine
//! ([`RawPeer`]), and child processes.
#![forbid(unsafe_code)]

mod calls;
mod child;
mod data;
pub mod document;
mod held_calls;
mod leaks;
mod lists;
mod polled;
pub mod prelude;
mod raw;
mod raw_server;
mod reverse;
mod rows;
mod script;
mod services;
pub mod source;
mod tcp_proxy;
pub mod test_fabric;
mod threads;
mod timed;
pub mod typed;
mod world;

pub use calls::{Calls, Outcome, ThreadCalls, assert_answered, block_on, connect_polling, inline_call, outcome_of};
pub use child::{CHILD_TEST, Child, child_role};
pub use data::{Random, data_of, has_pattern, is_filled_with, pattern, put_pattern};
pub use held_calls::{AnswerMode, GATED, Gate, HELD, HeldCalls, answer, wake_by_thread};
pub use leaks::{eventually, open_descriptors, shard_leak, wait_until};
pub use lists::{Cut, Lists, reads, segment};
pub use polled::{polled_client, polled_server, simulated_client, simulated_server};
pub use raw::{
    ARGS_AT, Message, RPC_CALL, RPC_REPLY, RawListener, RawPeer, UNTOUCHED, XID, be, call_bytes, call_bytes_as,
    contents, remote, reply_bytes, with_word,
};
pub use raw_server::{RawServer, ServerPlace};
pub use reverse::{HELLO, both_ways, both_ways_with, call_back, reverse_client, services_with_hello, serving_client};
pub use rows::{Row, assert_contains, chain, for_each, pairs, row, with_raw, with_raw_of};
pub use script::Step;
pub use services::{
    CREDENTIAL, ECHO, LOAD, MIRROR, PANIC, PROGRAM, REFUSE, REPLY, REPLY_EXCESS, STORE, StandardHandler, VERSION,
    WORKER_ECHO, echo_of, request_cache, run_once, services_by, services_for, services_of, services_with, standard_and,
    standard_services,
};
pub use tcp_proxy::TcpProxy;
pub use timed::TimedServer;
pub use world::{
    Draining, IntoClientConfig, IntoServerConfig, With, World, assert_served, echo, few_credits, in_mode, load,
    local_and, mirror, own_pool, reconnecting, scarce_config, served_or_lost, small_client, small_config, small_server,
    store,
};

/// Makes doc tests of the examples in documents.
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
