//! Shared helpers of the integration tests: a [`World`] with servers and clients in it, the services that tests call,
//! data that can be recognized, peers that misbehave ([`RawPeer`]), and child processes that are killed.
#![forbid(unsafe_code)]

mod balance;
mod chaos;
mod child;
mod data;
mod raw;
mod services;
mod world;

pub use balance::{open_descriptors, settles, shard_leak};
pub use chaos::{Chaos, ChaosFabric};
pub use child::{CHILD_TEST, Child, child_role};
pub use data::{Random, pattern, patterned};
pub use raw::{Message, RawListener, RawPeer, call_bytes, reply_bytes};
pub use services::{
    CREDENTIAL, ECHO, LOAD, MIRROR, PANIC, PROGRAM, REFUSE, REPLY, STORE, VERSION, WORKER_ECHO,
    standard_services,
};
pub use world::{World, echo, load, mirror, small, small_client, small_server, store};
