//! Input and output of a [`Connection`]: events and outgoing messages.

#[cfg(doc)]
use super::Connection;
use super::{CallError, CallId, InboundId, PeerFault, Rejected, exchange};
use crate::wire::ErrorBody;

/// The call or reply that is complete with a received message.
///
/// Its header is the one that the owner has decoded, or else [`Connection::header`]. That of a message in parts is the
/// header of the last part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A call of the peer: end it by [`Connection::reply`], [`Connection::reply_error`] or [`Connection::forget`].
    Call {
        /// This side's name for it.
        id: InboundId,
    },
    /// A call of this side was answered; it has left the table.
    Reply {
        /// The call.
        call: CallId,
        /// The caller's own name for it.
        token: u64,
    },
    /// Neither. The message may have [events](Connection::poll_event).
    Nothing,
}

/// A consequence of a received message. Complete calls and replies are [`Received`] instead.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer violated a rule: the connection must end.
    Fault(PeerFault),
    /// A call of this side failed, and has left the table.
    Failed {
        /// The call.
        call: CallId,
        /// The caller's own name for it.
        token: u64,
        /// The error.
        error: CallError,
    },
    /// A call of this side got an error that more resources may cure, or the peer's shortage or drain. It stays in the
    /// table. Use [`Connection::resend`] or [`Connection::give_up`]. If the error concerns the length of its results,
    /// the call was executed.
    Retryable {
        /// The call.
        call: CallId,
        /// The caller's own name for it.
        token: u64,
        /// The error.
        error: ErrorBody,
    },
    /// The late reply to a call that timed out or was cancelled. Its slot is free now.
    Late {
        /// The call.
        call: CallId,
    },
    /// A part of a continued message, other than the last. The owner keeps the payload until the last part yields the
    /// call or reply.
    Part {
        /// Whether it is the first part.
        first: bool,
        /// Offset of the payload in the message; `None` for a payload that is not needed.
        payload: Option<usize>,
    },
    /// The version and the [terms](Connection::terms) are negotiated: a client may call.
    Settled,
    /// A characteristic of the connection. The terms may have changed.
    Changed(exchange::Event),
    /// Dropped, or answered with an error that is queued already.
    Rejected(Rejected),
}

/// A message that may be sent now. [`Connection::write_header`] writes its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// A call of this side.
    Call(CallId),
    /// The reply to a peer's call.
    Reply(InboundId),
    /// The next part of the continued message.
    Continue,
    /// An error, properties or an operation: a header only. It keeps its place until it is written.
    Control {
        /// Most bytes of the message.
        room: usize,
    },
    /// A pure grant: a header only. It keeps its place until it is written, unless another message grants before.
    Grant {
        /// Whether the peer needs it. Otherwise it is a keep-alive.
        due: bool,
    },
}

impl Outgoing {
    /// Most bytes of a pure grant, and of an error.
    pub const SHORT: usize = 64;
}
