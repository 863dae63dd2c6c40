//! Procedures of a server, calls, and results.
//!
//! [`Procedure`]s have handlers and bindings; a handler gets a [`ServerCall`] and writes its results. The [duplicate
//! request cache](duplicate_requests) serves retransmitted calls. Shards run the handlers; [`Server`](crate::Server)
//! has shards.

mod call;
mod deferred;
pub mod duplicate_requests;
mod handler;
mod procedure;
mod task;
mod writer;

pub(crate) use call::{
    Admitted, Answered, Arrived, Call, CallParts, CallPool, Chunks, Header, LengthMismatch, Long, Ready, Refused,
    ReplyMessage, Replying, ResultRoom, Results, RpcMessage, Stamp, Unready,
};
pub use call::{CallInfo, Caller, MAX_CHUNKS, MAX_SEGMENTS, NoResult, ServerCall};
pub use deferred::DeferredCall;
pub(crate) use deferred::{DeferredReturnQueue, Origin};
pub(crate) use handler::Task;
#[doc(hidden)]
pub use handler::{Local, Sharing, Threads};
pub(crate) use procedure::{Cached, NO_ENTRY, ProcedureName, REFUSAL_LEN};
pub use procedure::{LocalProcedure, LocalServices, MAX_PROCEDURE, Procedure, Services};
pub use task::{Application, ShardSetup, ShardTask};
pub use writer::{ResultTooLong, ResultWriter};
