//! The C interface of `rpcrdma`, which `rpcrdma.h` declares.
//!
//! | file | holds |
//! |---|---|
//! | `interface` | the functions, by subject |
//! | `types` | the opaque types, and their values |
//! | `handle`, `any` | handles, and the detection of misuse |
//! | `failure` | codes and texts of failures; panics stop there |
//! | `process` | standard descriptors, children of fork |
//! | `names` | translation of Rust names in texts to C names |
//! | `arguments` | strings, arrays, and pointers for results |
//! | `config`, `services`, `call`, `memory` | values of handles: knobs, procedures, calls at the server, buffers |
//! | `threaded_server`, `threaded_client`, `polled` | values of handles: servers and clients |
//! | `ended_call` | values of handles: replies |
//! | `read_places` | memory of the application for Read chunks |
//! | `log` | the log, passed to a function |
//! | `request` | calls of clients, described by `rpcrdma_request` |
//! | `peers` | reports of connections to the application |

#![expect(non_camel_case_types, reason = "names of C")]

mod any;
mod arguments;
mod call;
mod config;
mod ended_call;
mod failure;
mod handle;
mod interface;
mod log;
mod memory;
mod names;
mod peers;
mod polled;
mod process;
mod read_places;
mod request;
mod services;
mod threaded_client;
mod threaded_server;
mod types;

pub use interface::*;
pub use peers::{rpcrdma_peer_event, rpcrdma_peer_hook};
pub use request::{rpcrdma_read_chunk, rpcrdma_request, rpcrdma_write_chunk};
pub use services::{
    RPCRDMA_AUTH_ERROR, RPCRDMA_CACHED, RPCRDMA_GARBAGE_ARGS, RPCRDMA_NO_REPLY, RPCRDMA_ON_WORKERS, RPCRDMA_ONE_WAY,
    RPCRDMA_OWN_RESULTS, RPCRDMA_PROC_UNAVAIL, RPCRDMA_PROG_MISMATCH, RPCRDMA_PROG_UNAVAIL, RPCRDMA_SYSTEM_ERR,
    RPCRDMA_UNCOUNTED, rpcrdma_deferred_handler, rpcrdma_handler, rpcrdma_procedure, rpcrdma_task,
};
pub use types::*;
