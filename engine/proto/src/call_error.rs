//! Failures of a call: sent or not, safe to retry or not, cause.

use std::time::Duration;

use crate::binding::BindingError;
use crate::fault::{Knob, Refusal};
use crate::wire::ErrorBody;

/// The failure of a call.
///
/// [`progress`](Self::progress), [`may_retry`](Self::may_retry) and [`responsible_party`](Self::responsible_party)
/// answer a program's three questions:
///
/// | variant | progress | retry | responsible party |
/// | --- | --- | --- | --- |
/// | `TimedOut { sent: false }` | not sent | yes | connection: no credit granted, or not connected in time |
/// | `TimedOut { sent: true }` | unanswered | if idempotent | peer |
/// | `NoCredits` | not sent | yes | peer: it leaves calls unanswered |
/// | `Cancelled { sent: false }` | not sent | yes | caller |
/// | `Cancelled { sent: true }` | unanswered | if idempotent | caller |
/// | `ConnectionLost { sent: false }` | not sent | yes, once connected | connection |
/// | `ConnectionLost { sent: true }` | unanswered | if idempotent | connection |
/// | `NotAuthenticated` | not sent | never | caller |
/// | `Closed` | not sent | yes, on another connection | connection |
/// | `TooManyCalls` | not sent | yes, after a call has ended | caller |
/// | `NoMemory` | not sent | yes, after a buffer was returned | host |
/// | `OutOfMemory { answered: false }` | not sent | yes, after the limit was raised | host |
/// | `OutOfMemory { answered: true }` | answered | if idempotent | host |
/// | `TooLong` | not sent | never | caller |
/// | `Invalid` | not sent | never | caller |
/// | `NoReverse` | not sent | never on this connection | peer |
/// | `NoReplyBuffer` | answered | if idempotent | host |
/// | `MalformedReply` | answered | if idempotent | peer |
/// | `Transport(ERR_SYSTEM)`, unknown codes | answered | if idempotent | peer |
/// | `Transport(ERR_VERS)` | answered | never on this connection | peer |
/// | `Transport`, other codes | answered | never | caller |
/// | `Refused(SystemError)` | answered | if idempotent | peer |
/// | `Refused`, others | answered | never | caller |
///
/// "If idempotent": the server may have executed the call. A duplicate request cache does not recognize the retry,
/// because a new call has another XID. A draining server answers ERR_SYSTEM to calls that it does not run, but the code
/// has other causes, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The call's time-out has expired.
    #[error("call timed out ({})", sent_text(*.sent))]
    TimedOut {
        /// Whether the call was sent, so that the server may have executed it.
        sent: bool,
    },
    /// The call's time-out has expired while unanswered calls held all credits.
    ///
    /// A call whose caller has given up keeps its credit until the server answers it or the connection ends; see
    /// `limits.max_abandoned`.
    #[error(
        "call timed out (not sent): all credits are in use by {unanswered} unanswered calls{} (limits.max_abandoned, \
         limits.credits of the server)",
        abandoned_text(*.oldest)
    )]
    NoCredits {
        /// Calls that were sent and have no answer.
        unanswered: usize,
        /// Time since the first of these calls was abandoned. `None` if callers wait for all of them.
        oldest: Option<Duration>,
    },
    /// The caller cancelled the call.
    #[error("call cancelled ({})", sent_text(*.sent))]
    Cancelled {
        /// Whether the call was sent, so that the server may have executed it.
        sent: bool,
    },
    /// The connection ended before the reply arrived. `close_reason` of the client has the cause, unless it reconnects.
    #[error("connection lost ({})", sent_text(*.sent))]
    ConnectionLost {
        /// Whether the call was sent, so that the server may have executed it.
        sent: bool,
    },
    /// A host key is missing or wrong. `close_reason` of the client says at which side.
    #[error(
        "host key is missing or wrong: the call was not executed, and a retry fails in the same way (wire.host_auth)"
    )]
    NotAuthenticated,
    /// The connection is not established yet, is closing, or has ended.
    #[error("not connected (`close_reason` of the client says why)")]
    Closed,
    /// The limit of calls in progress is reached.
    #[error("{limit} calls in progress is the limit (limits.max_calls; reverse direction: debug.reverse_credits)")]
    TooManyCalls {
        /// Calls in progress.
        limit: usize,
    },
    /// No buffer of this side is free for the call.
    #[error("no buffer of {needed} bytes is free ({knob})")]
    NoMemory {
        /// Bytes of the buffer.
        needed: usize,
        /// The knob that counts such buffers.
        knob: Knob,
    },
    /// The system refuses the memory of this connection's chunks, which `memory.bulk_buffers` sizes.
    ///
    /// The memory is requested with the first chunk, and again with each call until it is granted.
    #[error("the system refuses memory for the connection's chunks: {} (the log has the bytes)", remedy(*.os_error))]
    OutOfMemory {
        /// Whether the server answered, so that the call may have run.
        answered: bool,
        /// The system's error number (`errno`), if it is known.
        os_error: Option<i32>,
    },
    /// The call, its reply or a chunk exceeds every buffer. Or it exceeds what may be sent without chunks.
    ///
    /// `needed` is the least size to configure.
    #[error("message or chunk of {needed} bytes exceeds {limit} ({knob})")]
    TooLong {
        /// Bytes of the message with its headers, or of the chunk.
        needed: usize,
        /// Longest permitted message or chunk.
        limit: usize,
        /// The knob of this limit.
        knob: Knob,
    },
    /// The call cannot be formed, for the cause in the text.
    #[error(transparent)]
    Invalid(#[from] InvalidCall),
    /// The peer takes no calls in the reverse direction.
    #[error("peer takes no reverse calls (ClientConfig::services and debug.reverse of the peer)")]
    NoReverse,
    /// The server answered, and this side has no buffer for the reply.
    #[error("no buffer for a reply of {needed} bytes ({knob})")]
    NoReplyBuffer {
        /// Bytes of the reply, or of its part in one chunk.
        needed: usize,
        /// The knob of this limit.
        knob: Knob,
    },
    /// The reply is malformed, or does not fit the call.
    #[error("malformed reply: {0}")]
    MalformedReply(&'static str),
    /// The responder answered with a transport error.
    #[error("transport error {}{}", .0, hint(.0))]
    Transport(#[doc(hidden)] ErrorBody),
    /// The server refused the call, or failed (RFC 5531 §9).
    #[error("refused by the server: {0}")]
    Refused(Refusal),
}

/// The last stage that a failed call reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallProgress {
    /// Not sent: the server has not executed it.
    NotSent,
    /// Sent, without a reply: the server may have executed it.
    Unanswered,
    /// Answered by the server.
    Answered,
}

/// Party that caused the failure of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorParty {
    /// The program that called: change the call or the configuration.
    Caller,
    /// This host: it lacks memory.
    Host,
    /// The peer: see its log.
    Peer,
    /// The connection: see `close_reason` of the client.
    Connection,
}

impl CallError {
    /// The error's row in the table of [`CallError`]: progress, whether a retry is safe, and the responsible party.
    const fn row(&self) -> (CallProgress, bool, ErrorParty) {
        use CallProgress::{Answered, NotSent, Unanswered};
        match self {
            Self::TimedOut { sent: false } | Self::ConnectionLost { sent: false } | Self::Closed => {
                (NotSent, true, ErrorParty::Connection)
            }
            Self::Cancelled { sent: false } | Self::TooManyCalls { .. } => (NotSent, true, ErrorParty::Caller),
            Self::NoCredits { .. } => (NotSent, true, ErrorParty::Peer),
            Self::NoMemory { .. } | Self::OutOfMemory { answered: false, .. } => (NotSent, true, ErrorParty::Host),
            Self::NotAuthenticated | Self::TooLong { .. } | Self::Invalid(_) => (NotSent, false, ErrorParty::Caller),
            Self::NoReverse => (NotSent, false, ErrorParty::Peer),
            Self::TimedOut { sent: true } => (Unanswered, false, ErrorParty::Peer),
            Self::Cancelled { sent: true } => (Unanswered, false, ErrorParty::Caller),
            Self::ConnectionLost { sent: true } => (Unanswered, false, ErrorParty::Connection),
            Self::OutOfMemory { answered: true, .. } | Self::NoReplyBuffer { .. } => {
                (Answered, false, ErrorParty::Host)
            }
            Self::MalformedReply(_)
            | Self::Transport(ErrorBody::System | ErrorBody::Unknown(_) | ErrorBody::Vers { .. })
            | Self::Refused(Refusal::SystemError) => (Answered, false, ErrorParty::Peer),
            Self::Transport(_) | Self::Refused(_) => (Answered, false, ErrorParty::Caller),
        }
    }

    /// The last stage that the call reached.
    pub const fn progress(&self) -> CallProgress {
        self.row().0
    }

    /// Whether a retry is safe, and may succeed later.
    ///
    /// If so, the server has not executed the call. The table of [`CallError`] has the conditions. An idempotent call
    /// may also be sent again where the server may have executed it.
    pub const fn may_retry(&self) -> bool {
        self.row().1
    }

    /// Whether the server drains, or has no memory for the call.
    #[doc(hidden)]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Self::Transport(ErrorBody::System))
    }

    /// Converts an error of missing local memory to the error of a call that the server has answered.
    #[doc(hidden)]
    pub const fn into_reply_error(self) -> Self {
        match self {
            Self::NoMemory { needed, knob } | Self::TooLong { needed, knob, .. } => {
                Self::NoReplyBuffer { needed, knob }
            }
            Self::OutOfMemory { os_error, .. } => Self::OutOfMemory { answered: true, os_error },
            other => other,
        }
    }

    /// Party that caused the failure.
    pub const fn responsible_party(&self) -> ErrorParty {
        self.row().2
    }
}

/// A call that cannot be formed. Its text names the limit or rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub struct InvalidCall(#[from] Defect);

impl InvalidCall {
    /// The defect.
    #[doc(hidden)]
    pub const fn defect(&self) -> Defect {
        self.0
    }
}

impl From<Defect> for CallError {
    fn from(defect: Defect) -> Self {
        Self::Invalid(InvalidCall(defect))
    }
}

impl From<BindingError> for CallError {
    fn from(error: BindingError) -> Self {
        Defect::Binding(error).into()
    }
}

/// The defect of an [`InvalidCall`].
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// `limit` is [`MAX_CHUNKS`](super::MAX_CHUNKS).
    #[error("more than {limit} Read chunks or {limit} Write chunks in one call")]
    TooManyChunks { limit: usize },
    #[error("chunk for a call without room for chunks (LocalClient::prepare)")]
    NotForChunks,
    /// `limit` is [`MAX_SEGMENTS`](super::MAX_SEGMENTS).
    #[error("chunk of {segments} segments exceeds {limit} (segment size RSSIZ of the peer): shorten the chunk")]
    ChunkSegments { segments: usize, limit: usize },
    #[error("{segments} segments in one header exceeds {limit} (RCSIZ of the peer): use fewer or shorter chunks")]
    HeaderSegments { segments: usize, limit: usize },
    /// The header of the call, or of its reply, does not fit one message.
    #[error("chunk list of {needed} bytes exceeds {limit} (wire.receive_size of both ends): use fewer chunks")]
    HeaderTooLong { needed: usize, limit: usize },
    #[error("foreign memory: chunks must be from `alloc` of this connection, calls from `prepare` of this client")]
    ForeignMemory,
    #[error(
        "the handler would block the shard that it waits for (Client::start, Client::alloc_async; on a server also \
         Procedure::on_workers)"
    )]
    OwnShard,
    #[error(
        "the procedure belongs to another program or version than the client (ClientConfig::program, \
         ClientConfig::version)"
    )]
    OtherProgram,
    #[error("chunk of 0 bytes")]
    EmptyChunk,
    #[error(
        "Read chunk at byte {0} of the arguments: expected a multiple of 4, after the previous chunk and not past the \
         end of the arguments"
    )]
    Position(u32),
    /// Only a reply returns a credit of version 1, and only a reply triggers the revocation of chunks.
    #[error("one-way call in version 1, or with chunks (wire.credit_mode)")]
    NotOneWay,
    #[error("peer takes no chunks in this direction (version 2: debug.reverse of the peer; version 1: never)")]
    NoChunks,
    #[error(transparent)]
    Binding(BindingError),
}

/// A hint at the cause or the knob.
fn hint(error: &ErrorBody) -> &'static str {
    match error {
        ErrorBody::System => " (peer lacks memory, is draining or has failed: see its log)",
        ErrorBody::BadXdr => {
            " (the call is malformed; or a chunk exceeds what the peer takes: Procedure::read_chunks, \
             Procedure::write_chunks and memory.bulk_buffers of the peer; or, in version 1, a chunk is missing or too \
             short for a result, or the call exceeds wire.reassemble_up_to of the peer)"
        }
        ErrorBody::ReadChunks { max: 0 } => {
            " (the call exceeds wire.reassemble_up_to of the peer, or its procedure takes no Read chunks: \
             Procedure::read_chunks)"
        }
        ErrorBody::WriteChunks { .. } => {
            " (not executed: its procedure takes fewer Write chunks, see Procedure::write_chunks)"
        }
        ErrorBody::Vers { .. } => {
            " (not executed, and a retry on this connection fails in the same way: see wire.credit_mode of this side, \
             and wire.version_1 and wire.host_auth of the server)"
        }
        ErrorBody::WriteResource { .. } | ErrorBody::ReplyResource { .. } => {
            " (limit of this side: memory.bulk_buffers)"
        }
        _ => "",
    }
}

/// The limit that caused an error of the system, and how to raise it. The numbers are those of Linux.
fn remedy(os_error: Option<i32>) -> &'static str {
    match os_error {
        Some(23) => "the host has no descriptor left, see `sysctl fs.file-max` (ENFILE)",
        Some(24) => "the process has no descriptor left, raise RLIMIT_NOFILE with `ulimit -n` (EMFILE)",
        Some(27) => "it exceeds RLIMIT_FSIZE, raise that with `ulimit -f` (EFBIG)",
        _ => {
            "lower memory.bulk_buffers, or raise RLIMIT_AS with `ulimit -v`, RLIMIT_MEMLOCK with `ulimit -l`, or the \
             limit of the control group (ENOMEM)"
        }
    }
}

fn sent_text(sent: bool) -> &'static str {
    if sent { "sent: the server may have executed it" } else { "not sent" }
}

fn abandoned_text(oldest: Option<Duration>) -> String {
    oldest.map_or_else(String::new, |age| {
        format!(", the first of them abandoned by its caller {:.1} s ago", age.as_secs_f64())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One error of each kind, with its row in the table of [`CallError`].
    fn all() -> Vec<(CallError, CallProgress, bool, ErrorParty)> {
        use CallError::{
            Cancelled, Closed, ConnectionLost, Invalid, MalformedReply, NoCredits, NoMemory, NoReplyBuffer, NoReverse,
            NotAuthenticated, OutOfMemory, Refused, TimedOut, TooLong, TooManyCalls, Transport,
        };
        let (needed, knob) = (70_000, Knob::BULK_BUFFERS);
        vec![
            (TimedOut { sent: false }, CallProgress::NotSent, true, ErrorParty::Connection),
            (TimedOut { sent: true }, CallProgress::Unanswered, false, ErrorParty::Peer),
            (NoCredits { unanswered: 64, oldest: None }, CallProgress::NotSent, true, ErrorParty::Peer),
            (Cancelled { sent: false }, CallProgress::NotSent, true, ErrorParty::Caller),
            (Cancelled { sent: true }, CallProgress::Unanswered, false, ErrorParty::Caller),
            (ConnectionLost { sent: false }, CallProgress::NotSent, true, ErrorParty::Connection),
            (ConnectionLost { sent: true }, CallProgress::Unanswered, false, ErrorParty::Connection),
            (NotAuthenticated, CallProgress::NotSent, false, ErrorParty::Caller),
            (Closed, CallProgress::NotSent, true, ErrorParty::Connection),
            (TooManyCalls { limit: 8 }, CallProgress::NotSent, true, ErrorParty::Caller),
            (NoMemory { needed, knob }, CallProgress::NotSent, true, ErrorParty::Host),
            (OutOfMemory { answered: false, os_error: None }, CallProgress::NotSent, true, ErrorParty::Host),
            (OutOfMemory { answered: true, os_error: None }, CallProgress::Answered, false, ErrorParty::Host),
            (TooLong { needed, limit: 65_536, knob }, CallProgress::NotSent, false, ErrorParty::Caller),
            (Invalid(Defect::EmptyChunk.into()), CallProgress::NotSent, false, ErrorParty::Caller),
            (NoReverse, CallProgress::NotSent, false, ErrorParty::Peer),
            (NoReplyBuffer { needed, knob }, CallProgress::Answered, false, ErrorParty::Host),
            (MalformedReply("its two XIDs differ"), CallProgress::Answered, false, ErrorParty::Peer),
            (Transport(ErrorBody::System), CallProgress::Answered, false, ErrorParty::Peer),
            (Transport(ErrorBody::Unknown(99)), CallProgress::Answered, false, ErrorParty::Peer),
            (Transport(ErrorBody::Vers { low: 1, high: 1 }), CallProgress::Answered, false, ErrorParty::Peer),
            (Transport(ErrorBody::BadXdr), CallProgress::Answered, false, ErrorParty::Caller),
            (Refused(Refusal::SystemError), CallProgress::Answered, false, ErrorParty::Peer),
            (Refused(Refusal::GarbageArguments), CallProgress::Answered, false, ErrorParty::Caller),
        ]
    }

    #[test]
    fn every_error_has_its_row_in_the_table() {
        for (error, progress, may_retry, party) in all() {
            assert_eq!(
                (error.progress(), error.may_retry(), error.responsible_party()),
                (progress, may_retry, party),
                "{error:?}"
            );
            assert!(
                !may_retry || progress == CallProgress::NotSent,
                "{error:?}: a call that may have run must not be retried"
            );
        }
        // The table has a row for each of these errors, in the same order.
        let rows = include_str!("call_error.rs").lines().filter_map(|line| line.strip_prefix("/// | `"));
        let rows: Vec<Vec<&str>> = rows.map(|row| row.split(" | ").collect()).collect();
        let mut all = all();
        // `ERR_SYSTEM` and unknown codes share a row.
        all.retain(|(error, ..)| !matches!(error, CallError::Transport(ErrorBody::Unknown(_))));
        assert_eq!(rows.len(), all.len());
        for (row, (error, progress, may_retry, party)) in rows.iter().zip(all) {
            let name = format!("{error:?}");
            let name = name.split([' ', '(']).next().unwrap();
            assert!(row[0].starts_with(name), "{row:?}: {name}");
            let progress = match progress {
                CallProgress::NotSent => "not sent",
                CallProgress::Unanswered => "unanswered",
                CallProgress::Answered => "answered",
            };
            assert_eq!(row[1], progress, "{row:?}");
            assert_eq!(row[2].starts_with("yes"), may_retry, "{row:?}");
            assert!(row[3].starts_with(&format!("{party:?}").to_lowercase()), "{row:?}");
        }
    }

    #[test]
    fn texts_name_the_value_the_limit_and_the_knob() {
        let assert_text = |error: CallError, text: &str| assert_eq!(error.to_string(), text);
        let error = ErrorBody::WriteResource { chunk_index: 1, length_needed: 70_000 };
        let text = "transport error ERR_WRITE_RESOURCE(Write chunk 0 needs 70000 bytes) (limit of this side: \
                    memory.bulk_buffers)";
        // The wire counts chunks from 1, and the text from 0.
        assert_text(CallError::Transport(error), text);
        assert_text(CallError::TimedOut { sent: false }, "call timed out (not sent)");
        let too_many = CallError::TooManyCalls { limit: 8 }.to_string();
        assert!(too_many.starts_with("8 calls") && too_many.contains("limits.max_calls"), "{too_many}");
        let closed = CallError::Closed.to_string();
        assert!(closed.starts_with("not connected") && closed.contains("`close_reason`"), "{closed}");
        let hint = CallError::Transport(ErrorBody::System).to_string();
        assert!(hint.contains("peer lacks memory") && hint.contains("see its log"), "{hint}");
        let hint = CallError::Transport(ErrorBody::ReplyResource { length_needed: 77 }).to_string();
        assert!(hint.contains("(reply needs 77 bytes)"), "{hint}");
        for (oldest, abandoned) in
            [(None, ""), (Some(Duration::from_secs(7)), ", the first of them abandoned by its caller 7.0 s ago")]
        {
            let text = "call timed out (not sent): all credits are in use by 4 unanswered calls";
            let knobs = " (limits.max_abandoned, limits.credits of the server)";
            assert_text(CallError::NoCredits { unanswered: 4, oldest }, &[text, abandoned, knobs].concat());
        }
        assert_text(Defect::EmptyChunk.into(), "chunk of 0 bytes");
        assert_text(
            Defect::ChunkSegments { segments: 17, limit: 16 }.into(),
            "chunk of 17 segments exceeds 16 (segment size RSSIZ of the peer): shorten the chunk",
        );
        let hint = CallError::Transport(ErrorBody::BadXdr).to_string();
        assert!(hint.contains("Procedure::read_chunks") && hint.contains("memory.bulk_buffers"), "{hint}");
        let hint = CallError::Transport(ErrorBody::ReadChunks { max: 0 }).to_string();
        assert!(hint.contains("wire.reassemble_up_to of the peer"), "{hint}");
        let hint = CallError::Transport(ErrorBody::WriteChunks { max: 1 }).to_string();
        assert!(hint.contains("not executed") && hint.contains("Procedure::write_chunks"), "{hint}");
        for (os_error, limit) in [(Some(24), "`ulimit -n`"), (Some(12), "`ulimit -v`"), (Some(27), "`ulimit -f`")] {
            let text = CallError::OutOfMemory { answered: false, os_error }.to_string();
            assert!(text.contains(limit), "{text}");
        }
        let hint = CallError::Transport(ErrorBody::Vers { low: 2, high: 2 }).to_string();
        let retry = "not executed, and a retry on this connection fails in the same way";
        assert!(hint.contains(retry) && hint.contains("wire.host_auth of the server"), "{hint}");
    }
}
