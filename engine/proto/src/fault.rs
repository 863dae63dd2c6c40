//! What a peer can do wrong, and how a call can end: one place for both.

use std::fmt;

use crate::auth::AuthError;
use crate::binding::BindingError;
use crate::wire::rpc::{AcceptStat, RejectStat, ReplyBody};
use crate::wire::{ErrorBody, NoSpace, WireErrorKind};

/// The peer broke a rule that the connection cannot outlive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerFault {
    /// It sent more messages than it was granted.
    #[error("peer exceeded its credits: message {received}, limit {limit}")]
    CreditsExceeded {
        /// The message's number.
        received: u32,
        /// What was granted.
        limit: u32,
    },
    /// It has more calls in progress than it was granted.
    #[error("peer has more than {limit} calls in progress")]
    TooManyCalls {
        /// Calls that this side takes at a time.
        limit: u32,
    },
    /// The connection uses windowed credits and a header came without the count.
    #[error("header without the count of received messages on a connection with windowed credits")]
    CreditWordMissing,
    /// It acknowledged messages that were never sent.
    #[error("peer acknowledges {acknowledged} messages, {sent} were sent")]
    AcknowledgedTooMuch {
        /// Its claim.
        acknowledged: u32,
        /// The truth.
        sent: u32,
    },
    /// Its increments add up to more than a credit limit can be.
    #[error("peer grants {newly} on top of {available}")]
    GrantedTooMuch {
        /// Unused before.
        available: u32,
        /// Added by this message.
        newly: u32,
    },
    /// It speaks none of the versions that this end does.
    #[error(
        "peer speaks versions {low} to {high}, none of which this end is configured for (wire.credit_mode, wire.version_1)"
    )]
    NoCommonVersion {
        /// Its lowest.
        low: u32,
        /// Its highest.
        high: u32,
    },
    /// It changed the protocol version in the middle of the connection.
    #[error("peer changed to protocol version {0}")]
    VersionChanged(u32),
    /// It has not proved who it is, and policy asks for it; or it tried, and failed.
    #[error("host authentication: {0}")]
    NotAuthenticated(#[from] AuthError),
    /// It sends messages that are of no use.
    #[error("peer sends more than {per_second} messages of no use in a second (limits.max_unsolicited_per_second)")]
    Useless {
        /// So many are put up with.
        per_second: u32,
    },
}

/// Why a message was dropped or answered with an error, though the connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejected {
    /// Not even a fixed header: dropped silently (RFC 8166 §4.5).
    TooShort,
    /// Answered with the protocol's own error.
    Answered(ErrorBody),
    /// Nonsense that is not answered: it came from a responder, and errors never flow from requester to
    /// responder; or it is an error itself.
    Dropped(WireErrorKind),
    /// A reply whose call has ended, by deadline or cancellation.
    Late,
    /// A reply, or error, to a call that was never made.
    UnknownXid,
    /// A header type that has no meaning in this direction or state.
    Unexpected,
}

/// How a call ended that has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// Its deadline passed.
    #[error("deadline passed ({})", sent_text(*.sent))]
    DeadlinePassed {
        /// It had been sent: the server may have carried it out.
        sent: bool,
    },
    /// The caller cancelled it.
    #[error("cancelled ({})", sent_text(*.sent))]
    Cancelled {
        /// It had been sent: the server may have carried it out.
        sent: bool,
    },
    /// The connection ended first. Why is known of the connection, not of each call: `LocalClient` and
    /// `Client` tell it by `closed_because`, which says nothing where the connection is made again.
    #[error("connection lost ({})", sent_text(*.sent))]
    ConnectionLost {
        /// It had been sent: the server may have carried it out.
        sent: bool,
    },
    /// The responder answered with a transport error.
    #[error("transport error {}{}", .0, hint(.0))]
    Transport(ErrorBody),
    /// The reply is not a reply, or does not fit the call.
    #[error("malformed reply: {0}")]
    MalformedReply(&'static str),
    /// The server refused the call, or could not decode or serve it (RFC 5531 §9).
    #[error("refused by the server: {0}")]
    Refused(Refusal),
    /// The call, its reply or a chunk is longer than this can ever be here: than what may be sent without
    /// chunks, where it may have none, or than any buffer. To try again is of no use.
    #[error("{needed} bytes are too long, {limit} is the most: {knob} bounds it")]
    TooLong {
        /// Bytes of the message with its headers, or of the chunk.
        needed: usize,
        /// The most that there may be.
        limit: usize,
        /// What bounds them.
        knob: Knob,
    },
    /// As many calls are under way as may be at a time: try again when one has ended.
    #[error(
        "{limit} calls are under way, and no more may be: `limits.max_calls`, or `limits.reverse_credits` in the reverse \
         direction, bounds them"
    )]
    TooManyCalls {
        /// What bounds them.
        limit: usize,
    },
    /// More chunks than one call may have each way.
    #[error("a call may have {limit} Read chunks and as many Write chunks, and no more")]
    TooManyChunks {
        /// [`MAX_CHUNKS`](super::MAX_CHUNKS).
        limit: usize,
    },
    /// A chunk for a call that was prepared without.
    #[error("the call was prepared without chunks: `LocalClient::prepare_with_chunks` makes room for them")]
    NotForChunks,
    /// A chunk has more segments, of the length that the peer handles (RSSIZ), than a chunk may have:
    /// [`MAX_SEGMENTS`](super::MAX_SEGMENTS).
    #[error("a chunk of {segments} segments as the peer handles them (RSSIZ), of which one chunk may have {limit}")]
    ChunkSegments {
        /// Of the longest chunk.
        segments: usize,
        /// What a chunk may have.
        limit: usize,
    },
    /// The call's chunks have more segments together than the peer takes in one header (RCSIZ).
    #[error("{segments} segments in one header, of which the peer takes {limit} (RCSIZ)")]
    HeaderSegments {
        /// Of all chunks.
        segments: usize,
        /// What the peer takes.
        limit: usize,
    },
    /// The transport header that lists the chunks of the call, or the one that returns them with its reply,
    /// does not fit one message.
    #[error(
        "a header of {needed} bytes for the call's chunks, of which one message has room for {limit}: fewer chunks, or a \
         larger `wire.receive_size` of both ends"
    )]
    HeaderTooLong {
        /// Bytes of the header.
        needed: usize,
        /// What there is room for.
        limit: usize,
    },
    /// A chunk's memory is not of this connection's `LocalClient::alloc`.
    #[error("the memory of a chunk is not of `alloc` for this connection")]
    ForeignMemory,
    /// A chunk of no bytes: there is nothing to expose.
    #[error("a chunk of the call has no bytes")]
    EmptyChunk,
    /// A Read chunk's position in the RPC message is no multiple of 4, or lies before the end of the chunk in
    /// front of it.
    #[error("no Read chunk can be at position {0}: a multiple of 4, behind the chunk in front of it")]
    Position(u32),
    /// The peer takes no calls in this direction, or none that this side may make.
    #[error("the peer takes no calls in the reverse direction: a client does with `ClientConfig::services`")]
    NoReverse,
    /// A call without a reply cannot be made here: version 1 counts its credits by replies, and what has
    /// chunks must say when it is done with them.
    #[error("a call without a reply needs version 2, and has no chunks")]
    NotOneWay,
    /// It breaks the binding of its procedure.
    #[error("not as its binding has it: {0}")]
    Binding(BindingError),
    /// It has chunks, and goes in a direction in which the peer takes none.
    #[error("no chunks go in this direction: in version 2 by the peer's `wire.reverse`, in version 1 never")]
    NoChunks,
    /// All buffers of this side that would do are in use: try again when calls have ended, or their replies
    /// have been dropped. (Where the other side has none it answers [`ErrorBody::System`].)
    #[error("no buffer of this side for {needed} bytes is free now: {knob} says how many there are")]
    NoMemory {
        /// Bytes of the buffer.
        needed: usize,
        /// What says how many there are.
        knob: Knob,
    },
    /// Not connected: the connection is not open yet, or takes no more calls, or is over.
    #[error("not connected: the connection is not open yet, or closes, or is over (`closed_because` says why)")]
    Closed,
}

/// A knob of the configuration that bounds a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Knob {
    /// Of the lesser end: or `max_receive_size`, up to which it may be changed.
    ReceiveSize,
    /// The same of both ends.
    ReassembleUpTo,
    /// Buffers for short messages.
    SmallBuffers,
    /// Buffers of a message each.
    MessageBuffers,
    /// Buffers for longer messages.
    LongBuffers,
    /// Buffers for chunks.
    BulkBuffers,
    /// Receives of the shard.
    Receives,
}

impl Knob {
    /// Its place in `Config`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReceiveSize => "wire.receive_size",
            Self::ReassembleUpTo => "wire.reassemble_up_to",
            Self::SmallBuffers => "memory.small_buffers",
            Self::MessageBuffers => "memory.message_buffers",
            Self::LongBuffers => "memory.long_buffers",
            Self::BulkBuffers => "memory.bulk_buffers",
            Self::Receives => "memory.receives",
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name())
    }
}

/// What is to be known of a transport error beside its name.
fn hint(error: &ErrorBody) -> &'static str {
    match error {
        ErrorBody::System => " (the other side has no memory for the call, ends, or has failed: its log says which)",
        _ => "",
    }
}

fn sent_text(sent: bool) -> &'static str {
    if sent { "sent: the server may have carried it out" } else { "never sent" }
}

/// The forms of RFC 5531 §9 that are not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
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
    /// The server has a problem of its own.
    #[error("system error at the server (its log says which)")]
    SystemError,
    /// The server speaks other RPC versions.
    #[error("RPC version mismatch, server has {low} to {high}")]
    RpcMismatch {
        /// Lowest version.
        low: u32,
        /// Highest version.
        high: u32,
    },
    /// A Write chunk of the caller is too small for its result: answered with the transport's own error, and
    /// the caller may come again with more room.
    #[error("Write chunk {index} is too small, {needed} bytes are needed")]
    ShortChunk {
        /// Which, counted from 0.
        index: u32,
        /// Bytes of the result.
        needed: u32,
    },
    /// Nothing is answered: what a procedure of `Procedure::one_way` comes to. From any other it is a
    /// [`SystemError`](Self::SystemError): its caller waits for an answer.
    #[error("no reply")]
    NoReply,
    /// The credential was refused; the `auth_stat` of RFC 5531 §9.
    #[error("authentication refused, auth_stat {0}")]
    Authentication(u32),
}

/// Results that do not fit where they go are the server's own trouble: it declared less.
impl From<NoSpace> for Refusal {
    fn from(_: NoSpace) -> Self {
        Self::SystemError
    }
}

impl Refusal {
    /// What a reply says; `None` for success.
    #[inline]
    pub fn of(reply: &ReplyBody<'_>) -> Option<Self> {
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
