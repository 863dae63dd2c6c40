//! Input and output of a [`Connection`]: events and outgoing messages.

#[cfg(doc)]
use super::Connection;
use super::{CallError, CallId, InboundId, Rejected};
use crate::wire::ErrorBody;

/// The meaning of a received message.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A call of this side was answered; it is out of the table.
    Reply {
        /// The call.
        call: CallId,
        /// The caller's own name for it.
        token: u64,
    },
    /// A call of this side got a transport error, and has left the table.
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
    /// A call of the peer: end it with [`Connection::reply`] or [`Connection::reply_error`].
    Call {
        /// This side's name for it.
        id: InboundId,
    },
    /// The late reply to a call that timed out or was cancelled. Its slot is free now.
    Late {
        /// The call.
        call: CallId,
    },
    /// A part of a continued message, other than the last. The last part yields a [`Call`](Self::Call) or
    /// [`Reply`](Self::Reply). The owner keeps the payload.
    Continued {
        /// Whether it is the first part.
        first: bool,
        /// Whether the payload is useful.
        kept: bool,
    },
    /// The version and the [terms](Connection::terms) are negotiated.
    Settled,
    /// Flow control, or terms.
    Grant,
    /// Characteristics: see [`Connection::poll_change`]. The terms may have changed.
    Changed,
    /// Dropped, or answered with an error that is queued already.
    Rejected(Rejected),
}

/// A message that may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// A call of this side.
    Call(CallId),
    /// The reply to a peer's call.
    Reply(InboundId),
    /// The next part of the message passed to [`Connection::hold_queue`].
    Continue,
    /// This side's properties; header only.
    Connprop,
    /// An operation on characteristics; header only.
    Optional,
    /// A transport error about the message with this XID; header only.
    Error {
        /// XID of the message that it answers.
        xid: u32,
        /// The error.
        error: ErrorBody,
    },
    /// The answer to an unsupported version, in the layout of all versions.
    WrongVersion {
        /// XID of the message that it answers.
        xid: u32,
        /// Its version.
        vers: u32,
    },
    /// A pure grant; header only.
    Grant,
}
