//! An outgoing continued message (version 2 §4.5.2).

use rpcrdma_mempool::Buf;

use crate::proto::{CallId, Outgoing};
use crate::service::{Call, Replying};

/// Owner of an outgoing continued message.
#[derive(Debug)]
pub(super) enum Whose {
    /// A call of this side, and its exposure.
    Call(CallId, Option<u32>),
    /// The reply to a peer's call.
    Reply(Call<Replying>),
}

impl Whose {
    pub(super) fn outgoing(&self) -> Outgoing {
        match self {
            Self::Call(call, _) => Outgoing::Call(*call),
            Self::Reply(call) => Outgoing::Reply(call.id()),
        }
    }
}

/// An outgoing continued message.
#[derive(Debug)]
pub(super) struct Continuation {
    pub(super) of: Whose,
    /// Its window is the unsent rest.
    pub(super) rest: Buf,
    /// Start and length of the message in the buffer.
    pub(super) whole: (usize, usize),
    /// Bytes of the last part's header.
    pub(super) last_header: usize,
}

impl Continuation {
    /// The whole `message`, for the last part's header.
    pub(super) fn new(of: Whose, message: Buf, last_header: usize) -> Self {
        let whole = (message.start(), message.len());
        Self { of, rest: message, whole, last_header }
    }
}
