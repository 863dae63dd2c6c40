//! The opaque types of the interface, and the value of each.
#![forbid(unsafe_code)]

use std::thread::LocalKey;

use crate::call::ServedCall;
use crate::config::Knobs;
use crate::ended_call::EndedCall;
use crate::handle::{HandleKind, SharedFreeSlots, ThreadFreeSlots};
use crate::memory::{AdoptedArena, BufferMemory};
use crate::polled::{PolledClient, PolledServer};
use crate::services::ServiceTable;
use crate::threaded_client::ThreadedClient;
use crate::threaded_server::ThreadedServer;

/// Knobs of servers and clients, named as in `tuning.md`.
///
/// One thread at a time uses it.
pub struct rpcrdma_config(());
/// Procedures of a server, or of a client that takes calls.
///
/// One thread at a time uses it.
pub struct rpcrdma_services(());
/// A server with threads of its own.
///
/// Any number of threads may use it concurrently.
pub struct rpcrdma_server(());
/// A server that the application polls.
///
/// Only its thread uses it: the one that made it, or that got it by `rpcrdma_attach`.
pub struct rpcrdma_local_server(());
/// A call at the server.
///
/// Only the handler of a call may use it. A deferred call may be used by any thread, one at a time.
pub struct rpcrdma_call(());
/// A client whose connection runs on a background thread.
///
/// The client has this thread for itself, or shares a server's. One application thread at a time uses the client.
pub struct rpcrdma_client(());
/// A client that the application polls.
///
/// Only its thread uses it: the one that made it, or that got it by `rpcrdma_attach`.
pub struct rpcrdma_local_client(());
/// The reply of a call.
///
/// One thread at a time uses it.
pub struct rpcrdma_reply(());
/// Memory of a chunk, registered with the device.
///
/// One thread at a time uses it.
pub struct rpcrdma_buffer(());
/// Memory that the application has mapped.
///
/// Any number of threads may use it concurrently.
pub struct rpcrdma_arena(());

macro_rules! kinds {
    ($($name:ident, $value:ty, $number:literal, bound: $bound:literal, tagged: $tagged:literal;)*) => {
        $(impl HandleKind for $name {
            type Value = $value;
            const NAME: &'static str = stringify!($name);
            const MARK: u64 = 0x7072_646d_6100 | $number << 2;
            const BOUND: bool = $bound;
            const TAGGED: bool = $tagged;

            fn thread_slots() -> &'static LocalKey<ThreadFreeSlots<Self>> {
                thread_local!(static THREAD_SLOTS: ThreadFreeSlots<$name> = const { ThreadFreeSlots::new() });
                &THREAD_SLOTS
            }

            fn shared_slots() -> &'static SharedFreeSlots<Self> {
                static SHARED_SLOTS: SharedFreeSlots<$name> = SharedFreeSlots::new();
                &SHARED_SLOTS
            }
        })*
    };
}

kinds! {
    rpcrdma_config, Knobs, 1, bound: false, tagged: false;
    rpcrdma_services, ServiceTable, 2, bound: false, tagged: false;
    rpcrdma_server, ThreadedServer, 3, bound: false, tagged: false;
    rpcrdma_local_server, PolledServer, 4, bound: true, tagged: false;
    rpcrdma_call, ServedCall, 5, bound: false, tagged: true;
    rpcrdma_client, ThreadedClient, 6, bound: false, tagged: false;
    rpcrdma_local_client, PolledClient, 7, bound: true, tagged: false;
    rpcrdma_reply, EndedCall, 8, bound: false, tagged: true;
    rpcrdma_buffer, BufferMemory, 9, bound: false, tagged: true;
    rpcrdma_arena, AdoptedArena, 10, bound: false, tagged: false;
}
