//! Faults of a peer, and refusals of a server.

use std::fmt;

use crate::auth::AuthError;
use crate::wire::rpc::{AcceptStat, RejectStat, ReplyBody};
use crate::wire::xdr::EncodeErrorKind;
use crate::wire::{EncodeError, ErrorBody, WireErrorKind};

/// The peer broke a rule of the protocol: the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerFault {
    /// The peer sent more messages than were granted.
    #[error("peer exceeded its credits: message {received}, limit {limit}")]
    CreditsExceeded {
        /// Number of the message.
        received: u32,
        /// The granted limit.
        limit: u32,
    },
    /// The peer has more calls in progress than were granted.
    #[error("peer has more than {limit} calls in progress")]
    TooManyCalls {
        /// Concurrent calls that this side accepts.
        limit: u32,
    },
    /// The connection uses windowed credits, and a header lacks the count.
    #[error("peer omitted the count of received messages (windowed credits)")]
    CreditWordMissing,
    /// The peer acknowledged unsent messages.
    #[error("peer acknowledged {acknowledged} messages of {sent} sent")]
    AcknowledgedTooMuch {
        /// Messages that it acknowledged.
        acknowledged: u32,
        /// Messages that were sent.
        sent: u32,
    },
    /// The peer's increments exceed the largest credit limit.
    #[error("peer granted {newly} credits in addition to {available}, which exceeds the valid range")]
    GrantedTooMuch {
        /// Credits that were unused before.
        available: u32,
        /// Credits that this message adds.
        newly: u32,
    },
    /// The peer supports no version of this end.
    #[error("peer supports only versions {low} to {high} (wire.credit_mode, wire.version_1)")]
    NoCommonVersion {
        /// Lowest version of the peer.
        low: u32,
        /// Highest version of the peer.
        high: u32,
    },
    /// The peer changed the protocol version in the middle of the connection.
    #[error("peer changed to protocol version {0}")]
    VersionChanged(u32),
    /// The peer failed to authenticate, as policy requires.
    #[error(transparent)]
    NotAuthenticated(#[from] AuthError),
    /// The peer exceeds the rate of unsolicited messages.
    #[error("peer sent more than {per_second} unsolicited messages in a second (limits.max_unsolicited_per_second)")]
    Unsolicited {
        /// The tolerated rate.
        per_second: u32,
    },
}

/// Reason why a message was dropped or rejected while the connection continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// Shorter than a fixed header: dropped silently (RFC 8166 §4.5).
    TooShort,
    /// Answered with the protocol's error.
    Answered(ErrorBody),
    /// An unusable message that is not answered, because it is an error or comes from a responder.
    Dropped(WireErrorKind),
    /// A reply whose call has ended, by deadline or cancellation.
    Late,
    /// A reply, or error, to an unknown call.
    UnknownXid,
    /// A header type without meaning in this direction or state.
    Unexpected,
}

/// A knob of the configuration that bounds a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knob(&'static str);

#[doc(hidden)]
impl Knob {
    /// The smaller Receive size of both ends, or `max_receive_size`, its upper limit.
    pub const RECEIVE_SIZE: Self = Self("wire.receive_size");
    /// The longest message in parts, at either end.
    pub const REASSEMBLE_UP_TO: Self = Self("wire.reassemble_up_to");
    /// Buffers for short messages.
    pub const SMALL_BUFFERS: Self = Self("memory.small_buffers");
    /// Buffers for one message each.
    pub const MESSAGE_BUFFERS: Self = Self("memory.message_buffers");
    /// Buffers for longer messages.
    pub const LONG_BUFFERS: Self = Self("memory.long_buffers");
    /// Buffers for chunks.
    pub const BULK_BUFFERS: Self = Self("memory.bulk_buffers");
    /// Receives of the shard.
    pub const RECEIVES: Self = Self("memory.receives");
}

impl Knob {
    /// The knob's name in `Config`.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name())
    }
}

/// Replies of RFC 5531 §9 other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No such program.
    #[error("program unavailable")]
    ProgramUnavailable,
    /// The program has other versions.
    #[error("program version mismatch, server has {low} to {high}")]
    ProgramMismatch {
        /// Lowest version.
        low: u32,
        /// Highest version.
        high: u32,
    },
    /// No such procedure.
    #[error("procedure unavailable")]
    ProcedureUnavailable,
    /// The arguments could not be decoded.
    #[error("garbage arguments")]
    GarbageArguments,
    /// A failure inside the server.
    #[error("system error at the server (see its log)")]
    SystemError,
    /// The server supports other RPC versions.
    #[error("RPC version mismatch, server has {low} to {high}")]
    RpcMismatch {
        /// Lowest version.
        low: u32,
        /// Highest version.
        high: u32,
    },
    /// A Write chunk of the caller is too short for its result. The answer is a transport error.
    ///
    /// In version 2 the caller then retransmits the call with a longer chunk, or with a Reply chunk for the results. It
    /// does so at most twice, with the same XID. Version 1 has no such error: the call fails. The handler runs again
    /// each time. For a call that must not run twice, the handler computes the length first, or the procedure is
    /// `Procedure::cached`.
    #[error("Write chunk {index} is too short for {needed} bytes")]
    ShortChunk {
        /// Index of the chunk, from 0.
        index: u32,
        /// Bytes of the result.
        needed: u32,
    },
    /// A [`SystemError`](Self::SystemError) with its cause in the server's log. `?` converts encoding errors to this
    /// refusal.
    #[doc(hidden)]
    #[error("system error at the server (see its log)")]
    Failed {
        /// The cause.
        what: HandlerFailure,
        /// Bytes of the result.
        needed: u32,
        /// Limit in bytes.
        limit: u32,
    },
    /// No reply, for procedures of `Procedure::one_way`. In any other procedure it becomes a
    /// [`SystemError`](Self::SystemError), because the caller waits for a reply.
    #[error("no reply")]
    NoReply,
    /// The credential was refused; the `auth_stat` of RFC 5531 §9.
    #[error("authentication refused, auth_stat {0}")]
    Authentication(u32),
}

/// Cause of a handler's failure, for the log.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandlerFailure {
    /// The inline results exceed the declared length.
    Reply,
    /// A length in typed results exceeds its bound.
    Bound,
    /// A union's `Default` arm has the switch of another arm.
    Switch,
    /// The result exceeds the length declared for a Write chunk.
    Undeclared,
    /// The call has no such Write chunk; `needed` is its index. If the procedure declares the chunk, the arguments are
    /// at fault.
    NoChunk,
    /// The Write chunk holds the handler's own memory already.
    Shared,
    /// The pool has no memory for the Write chunk.
    NoMemory,
    /// A typed result names more placed bytes than the handler wrote.
    Unwritten,
    /// The inline results are no whole number of XDR units; `needed` is their length.
    Unaligned,
    /// A handler in C returned a code without a meaning; `needed` has its bits.
    Code,
    /// A handler in C ignored that a function did not write the results.
    Ignored,
}

/// Results that do not fit are a system error, because the procedure declared less. The log names the lengths.
impl From<EncodeError> for Refusal {
    fn from(error: EncodeError) -> Self {
        let what = match error.kind() {
            EncodeErrorKind::Bound => HandlerFailure::Bound,
            EncodeErrorKind::PlacedLength => HandlerFailure::Unwritten,
            EncodeErrorKind::Switch => HandlerFailure::Switch,
            _ => HandlerFailure::Reply,
        };
        Self::failed(what, error.needed, error.available)
    }
}

impl Refusal {
    /// A system error with its cause.
    #[doc(hidden)]
    #[cold]
    pub fn failed(what: HandlerFailure, needed: usize, limit: usize) -> Self {
        let [needed, limit] = [needed, limit].map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX));
        Self::Failed { what, needed, limit }
    }

    /// A system error: a handler in C wrote inline results of this many bytes, which is not a multiple of 4.
    #[doc(hidden)]
    #[cold]
    pub fn of_unaligned_results(len: usize) -> Self {
        Self::failed(HandlerFailure::Unaligned, len, 4)
    }

    /// A system error: a handler in C ignored that a function did not write its results.
    #[doc(hidden)]
    #[cold]
    pub fn of_ignored_failure() -> Self {
        Self::failed(HandlerFailure::Ignored, 0, 0)
    }

    /// A system error: a handler in C returned a code without a meaning.
    #[doc(hidden)]
    #[cold]
    pub fn of_unknown_code(code: i32) -> Self {
        Self::Failed { what: HandlerFailure::Code, needed: code.cast_unsigned(), limit: 0 }
    }

    /// The log text of a system error.
    #[doc(hidden)]
    #[cold]
    pub fn cause(&self) -> String {
        let Self::Failed { what, needed, limit } = self else { return format!("handler returned Refusal::{self:?}") };
        let code = needed.cast_signed();
        let [needed, limit] = [needed, limit].map(|&bytes| match bytes {
            u32::MAX => format!("{bytes} or more"),
            _ => bytes.to_string(),
        });
        match what {
            HandlerFailure::Reply => format!(
                "inline results of at least {needed} bytes exceed {limit} (Procedure::max_reply, or max_reply and \
                 max_inline_result in the placement file; or the caller offers a Write chunk)"
            ),
            HandlerFailure::Switch => "result is the `Default` arm with a switch of another arm".to_owned(),
            HandlerFailure::Bound => {
                format!("length {needed} in the results exceeds {limit}, the bound in the `.x` file")
            }
            HandlerFailure::Unwritten => {
                format!("result names {needed} placed bytes, {limit} were written (Bulk::placed)")
            }
            HandlerFailure::Undeclared => {
                format!("result of {needed} bytes exceeds {limit} (Procedure::write_chunks, or its bound)")
            }
            HandlerFailure::NoChunk => format!("result in undeclared Write chunk {needed} (Procedure::write_chunks)"),
            HandlerFailure::Shared => {
                "Write chunk written after ServerCall::set_result gave it other memory".to_owned()
            }
            HandlerFailure::NoMemory => {
                "no pool memory for a Write chunk (Procedure::results_from_handler: use ServerCall::set_result)"
                    .to_owned()
            }
            HandlerFailure::Unaligned => {
                format!("inline results of {needed} bytes are not a multiple of 4, as XDR requires")
            }
            HandlerFailure::Code => format!(
                "handler returned {code}, which is neither 0, nor an `RPCRDMA_` status, nor the code of a function \
                 that failed to write results of this call"
            ),
            HandlerFailure::Ignored => {
                "a function that was to write the results refused its arguments (rpcrdma_error tells the handler why)"
                    .to_owned()
            }
        }
    }

    /// The refusal in a reply; `None` for success.
    #[inline]
    #[doc(hidden)]
    pub fn from_reply_body(reply: &ReplyBody<'_>) -> Option<Self> {
        match reply {
            ReplyBody::Accepted { stat, .. } => match *stat {
                AcceptStat::Success => None,
                AcceptStat::ProgUnavail => Some(Self::ProgramUnavailable),
                AcceptStat::ProgMismatch { low, high } => Some(Self::ProgramMismatch { low, high }),
                AcceptStat::ProcUnavail => Some(Self::ProcedureUnavailable),
                AcceptStat::GarbageArgs => Some(Self::GarbageArguments),
                AcceptStat::SystemErr => Some(Self::SystemError),
            },
            ReplyBody::Denied(RejectStat::RpcMismatch { low, high }) => {
                Some(Self::RpcMismatch { low: *low, high: *high })
            }
            ReplyBody::Denied(RejectStat::AuthError(stat)) => Some(Self::Authentication(*stat)),
        }
    }
}
