//! Procedures of a server, calls, and results.
//!
//! [`Procedure`]s have handlers and bindings; a handler gets a [`ServerCall`] and writes its results. The [duplicate
//! request cache](duplicate_requests) answers retransmitted calls. The shards of a [`Server`](crate::Server) run the
//! handlers.
//!
//! | file | holds |
//! |---|---|
//! | `procedure` | `Procedure`, and the tables of procedures: `Services` |
//! | `handler` | stored handlers, and the threads that may run them |
//! | `call` | a served call: its states, its chunks, and what its handler sees |
//! | `writer` | `ResultWriter`, which writes results into the memory that is sent |
//! | `deferred` | `DeferredCall`, which is answered later, and the queue that returns it to its shard |
//! | `duplicate_requests` | the duplicate request cache |
//! | `task` | application code beside the handlers: `ShardTask`, `Application` |

mod call;
mod deferred;
pub mod duplicate_requests;
mod handler;
mod procedure;
mod task;
mod writer;

pub(crate) use call::ShardNumber;
pub(crate) use call::{
    Admitted, Answered, Arrived, CallChunks, CallParts, CallPool, CallTiming, LengthMismatch, Long, ParsedHeader,
    Ready, Refused, ReplyMessage, Replying, ResultRoom, Results, RpcMessage, ServedCall, Unready,
};
pub use call::{CallInfo, Caller, MAX_CHUNKS, MAX_SEGMENTS, NoResult, ServerCall};
pub use deferred::DeferredCall;
pub(crate) use deferred::{DeferredOrigin, DeferredReturnQueue};
pub(crate) use handler::Task;
#[doc(hidden)]
pub use handler::{Local, Sharing, Threads};
pub use procedure::{LocalProcedure, LocalServices, MAX_PROCEDURE, Procedure, Services};
pub(crate) use procedure::{NO_ENTRY, ProcedureCache, ProcedureName, REFUSAL_LEN};
pub use task::{Application, ShardSetup, ShardTask};
pub use writer::{ResultTooLong, ResultWriter};
