//! The opaque types of the interface, and what each stands for.
#![forbid(unsafe_code)]

use std::thread::LocalKey;

use crate::call::Call;
use crate::calling::CallingClient;
use crate::config::Knobs;
use crate::ended::Ended;
use crate::handle::{Common, Kind, Spare};
use crate::hosted::Hosted;
use crate::memory::{Adopted, Memory};
use crate::polled::{Polled, PolledServer};
use crate::services::Table;

/// Knobs of servers and clients, by the names of `tuning.md`. One thread at a time uses it.
pub struct rpcrdma_config(());
/// Procedures of a server, or of a client that takes calls. One thread at a time uses it.
pub struct rpcrdma_services(());
/// A server with threads of its own. Any thread uses it.
pub struct rpcrdma_server(());
/// A server that its thread polls. Only the thread that made it uses it, or that `rpcrdma_attach` gave it to.
pub struct rpcrdma_local_server(());
/// A call at the server. Its handler uses it; a deferred one, any one thread at a time.
pub struct rpcrdma_call(());
/// A client whose connection another thread runs: one of its own, or a server's. One thread at a time uses it.
pub struct rpcrdma_client(());
/// A client that its thread polls. Only the thread that made it uses it, or that `rpcrdma_attach` gave it to.
pub struct rpcrdma_local_client(());
/// The reply of a call. One thread at a time uses it.
pub struct rpcrdma_reply(());
/// Memory of a chunk, registered with the device. One thread at a time uses it.
pub struct rpcrdma_buffer(());
/// Memory that the application has mapped. Any thread uses it.
pub struct rpcrdma_arena(());

macro_rules! kinds {
    ($($name:ident, $value:ty, $number:literal, bound: $bound:literal, tagged: $tagged:literal;)*) => {
        $(impl Kind for $name {
            type Value = $value;
            const NAME: &'static str = stringify!($name);
            const MARK: u64 = 0x7072_646d_6100 | $number << 2;
            const BOUND: bool = $bound;
            const TAGGED: bool = $tagged;

            fn spare() -> &'static LocalKey<Spare<Self>> {
                thread_local!(static SPARE: Spare<$name> = const { Spare::new() });
                &SPARE
            }

            fn common() -> &'static Common<Self> {
                static COMMON: Common<$name> = Common::new();
                &COMMON
            }
        })*
    };
}

kinds! {
    rpcrdma_config, Knobs, 1, bound: false, tagged: false;
    rpcrdma_services, Table, 2, bound: false, tagged: false;
    rpcrdma_server, Hosted, 3, bound: false, tagged: false;
    rpcrdma_local_server, PolledServer, 4, bound: true, tagged: false;
    rpcrdma_call, Call, 5, bound: false, tagged: true;
    rpcrdma_client, CallingClient, 6, bound: false, tagged: false;
    rpcrdma_local_client, Polled, 7, bound: true, tagged: false;
    rpcrdma_reply, Ended, 8, bound: false, tagged: true;
    rpcrdma_buffer, Memory, 9, bound: false, tagged: true;
    rpcrdma_arena, Adopted, 10, bound: false, tagged: false;
}
