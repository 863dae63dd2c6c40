//! The C interface of `rpcrdma`: `rpcrdma.h` has its functions.
//!
//! | file | holds |
//! |---|---|
//! | `interface` | the functions, by subject |
//! | `types` | the opaque types, and what each stands for |
//! | `handle`, `any` | handles, and checks of their use |
//! | `failure`, `process` | codes, texts, the end of an unwinding; standard descriptors, children of fork |
//! | `names` | names in texts, which are C's |
//! | `arguments` | texts, and places for results |
//! | `config`, `services`, `hosted`, `call`, `calling`, `memory` | what the handles stand for |
//! | `reads`, `ended`, `polled`, `log` | likewise |
//! | `request` | calls of clients, as C describes them |
//! | `peers` | what an application hears of connections |

#![expect(non_camel_case_types, reason = "names of C")]

mod any;
mod arguments;
mod call;
mod calling;
mod config;
mod ended;
mod failure;
mod handle;
mod hosted;
mod interface;
mod log;
mod memory;
mod names;
mod peers;
mod polled;
mod process;
mod reads;
mod request;
mod services;
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
