//! A continued message that goes out (version 2 §4.5.2).

use rpcrdma_mempool::Buf;

use crate::proto::{CallId, Outgoing};
use crate::service::{Call, Replying};

/// Whose message goes out in parts.
#[derive(Debug)]
pub(super) enum Whose {
    /// A call of ours, and what it exposes.
    Call(CallId, Option<u32>),
    /// The reply to a call of the peer's.
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

/// A continued message that goes out.
#[derive(Debug)]
pub(super) struct Continuation {
    pub(super) of: Whose,
    /// Its window is what is left.
    pub(super) rest: Buf,
    /// Where all of it starts in the buffer, and its length.
    pub(super) whole: (usize, usize),
    /// Bytes of the last part's header.
    pub(super) last_header: usize,
}

impl Continuation {
    /// All of `message`, which the last part's header goes with.
    pub(super) fn new(of: Whose, message: Buf, last_header: usize) -> Self {
        let whole = (message.start(), message.len());
        Self { of, rest: message, whole, last_header }
    }
}
