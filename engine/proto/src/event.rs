//! Input and output of a [`Connection`]: events and outgoing messages.

#[cfg(doc)]
use super::Connection;
use super::{CallError, CallId, InboundId, PeerFault, RejectReason, exchange};
use crate::wire::ErrorBody;

/// The call or reply that a received message completes.
///
/// If the owner has not decoded the header itself, [`Connection::header`] returns it. The header of a continued message
/// is that of its last part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedMessage {
    /// A call of the peer: end it by [`Connection::reply`], [`Connection::reply_error`] or [`Connection::forget`].
    Call {
        /// This side's identifier of the call.
        id: InboundId,
    },
    /// A call of this side was answered; it has left the table.
    Reply {
        /// The call.
        call: CallId,
        /// The caller's token.
        token: u64,
    },
    /// Neither a call nor a reply is complete. The message may have [events](Connection::poll_event).
    Nothing,
}

/// A consequence of a received message. Complete calls and replies are [`ReceivedMessage`] instead.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer violated a rule: the connection must end.
    Fault(PeerFault),
    /// A call of this side failed, and has left the table.
    Failed {
        /// The call.
        call: CallId,
        /// The caller's token.
        token: u64,
        /// The error.
        error: CallError,
    },
    /// A call of this side got a transport error that a retry may avoid: a chunk was too short, or the peer lacks
    /// memory or drains.
    ///
    /// The call stays in the table until [`Connection::retransmit`] or [`Connection::remove_call`]. If the error
    /// concerns the length of its results, the call was executed.
    Retryable {
        /// The call.
        call: CallId,
        /// The caller's token.
        token: u64,
        /// The error.
        error: ErrorBody,
    },
    /// The late reply to a call that timed out or was cancelled. The call's slot is free now.
    Late {
        /// The call.
        call: CallId,
    },
    /// A part of a continued message, other than the last. The owner keeps the payload until the last part yields the
    /// call or reply.
    Part {
        /// Whether this is the first part.
        first: bool,
        /// Offset of the payload in the message; `None` for a payload that is not needed.
        payload: Option<usize>,
    },
    /// The version and the [terms](Connection::terms) are negotiated: a client may call.
    Negotiated,
    /// An event of the characteristics exchange. The terms may have changed.
    Changed(exchange::CharacteristicEvent),
    /// The message was dropped, or answered with an error that is already queued.
    Rejected(RejectReason),
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
    /// An error, properties or an operation, which is a header only. It stays in the queue until it is written.
    Control {
        /// Maximum length of the message in bytes.
        room: usize,
    },
    /// A pure grant, which is a header only. [`Connection::poll_transmit`] returns it until it is written, or another
    /// message carries the credits.
    Grant {
        /// Whether the peer needs the credits; false for a keep-alive.
        due: bool,
    },
}

impl Outgoing {
    /// Maximum length in bytes of a pure grant or an error message.
    pub const SHORT: usize = 64;
}
