//! Reasons for the end of a connection.

use std::sync::OnceLock;

use crate::fabric::{Disconnect, FabricError, FabricErrorKind, Opcode, PostError, Status};
use crate::proto::PeerFault;
use crate::wire::ErrorBody;

/// Reason why a connection ended, or was not established.
///
/// The text names the cause, and the knob if there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct CloseReason(pub(crate) CloseCause);

/// Category of a [`CloseReason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CloseReasonKind {
    /// The peer closed or rejected the connection.
    Peer,
    /// The peer broke the protocol.
    PeerFault,
    /// A host key is missing or wrong, at either side.
    ///
    /// See [`wire.host_auth`](crate::config::WireConfig::host_auth). A retry fails in the same way.
    NotAuthenticated,
    /// This side closed the connection, or its shard stopped.
    Local,
    /// A time-out passed: connect, negotiation, setup or progress.
    TimedOut,
    /// The server evicted the connection, because another connection needed its place.
    Evicted,
    /// The device, or the network to the peer, failed.
    Device,
    /// The reason is not known any more.
    Unknown,
}

impl CloseReason {
    /// Category of this reason.
    pub fn kind(&self) -> CloseReasonKind {
        use CloseReasonKind as Kind;
        match &self.0 {
            CloseCause::PeerFault(PeerFault::NotAuthenticated(_)) => Kind::NotAuthenticated,
            CloseCause::PeerFault(_) => Kind::PeerFault,
            CloseCause::Device { status, .. } if is_peer_fault(*status) => Kind::PeerFault,
            CloseCause::Fabric(error) if error.kind() == FabricErrorKind::Peer => Kind::PeerFault,
            CloseCause::Fabric(error) if error.kind() == FabricErrorKind::Closed => Kind::Peer,
            CloseCause::Fabric(error) if error.kind() == FabricErrorKind::TimedOut => Kind::TimedOut,
            CloseCause::Rejected { .. } | CloseCause::Device { status: Status::Flushed, .. } => Kind::Peer,
            CloseCause::Device { .. } | CloseCause::NotPosted(_) | CloseCause::Fabric(_) => Kind::Device,
            CloseCause::Disconnected { cause, .. } => match cause {
                Disconnect::Peer => Kind::Peer,
                Disconnect::Local => Kind::Local,
                Disconnect::Violation | Disconnect::Refused => Kind::PeerFault,
                _ => Kind::Device,
            },
            CloseCause::Local(local) => match local {
                LocalClose::Requested | LocalClose::Stopped | LocalClose::Unsendable(_) => Kind::Local,
                LocalClose::Evicted => Kind::Evicted,
                LocalClose::ConnectTimeout
                | LocalClose::NegotiationTimeout
                | LocalClose::NegotiationRefused(_)
                | LocalClose::SetupTimeout
                | LocalClose::ProgressTimeout(_) => Kind::TimedOut,
            },
            CloseCause::Unknown => Kind::Unknown,
        }
    }

    /// Whether the address is invalid for its fabric, so that no attempt succeeds.
    ///
    /// For the C interface.
    #[doc(hidden)]
    pub fn is_bad_address(&self) -> bool {
        matches!(&self.0, CloseCause::Fabric(error) if error.kind() == FabricErrorKind::Address)
    }

    /// Whether no server listens at the address, or it accepts no connections.
    ///
    /// For the C interface.
    #[doc(hidden)]
    pub fn is_unreachable(&self) -> bool {
        match &self.0 {
            CloseCause::Fabric(error) => error.is_unreachable(),
            CloseCause::Rejected { text } => text == REJECTED_CLOSED,
            _ => false,
        }
    }

    /// Whether the server lacks receives for another connection now, or has as many connections as it accepts.
    ///
    /// For the C interface.
    #[doc(hidden)]
    pub fn is_server_full(&self) -> bool {
        let texts = [REJECTED_NO_RECEIVES, REJECTED_NO_CONNECTIONS];
        matches!(&self.0, CloseCause::Rejected { text } if texts.contains(&&**text))
    }

    /// Error number of a failed system call, if known.
    ///
    /// For the C interface.
    #[doc(hidden)]
    pub fn os_error(&self) -> Option<i32> {
        match &self.0 {
            CloseCause::Fabric(error) => error.os_error(),
            _ => None,
        }
    }

    /// Whether the next attempt to connect would fail in the same way.
    pub(crate) fn is_permanent(&self) -> bool {
        use PeerFault::{NoCommonVersion, NotAuthenticated};
        matches!(self.0, CloseCause::PeerFault(NoCommonVersion { .. } | NotAuthenticated(_)))
    }

    /// The cause, with all details.
    #[cfg(feature = "unstable-internals")]
    pub fn cause(&self) -> &CloseCause {
        &self.0
    }
}

impl<T: Into<CloseCause>> From<T> for CloseReason {
    fn from(cause: T) -> Self {
        Self(cause.into())
    }
}

/// Text of a rejection by a server that takes no connections any more.
pub(crate) const REJECTED_CLOSED: &[u8] = b"closed";
/// Text of a rejection by a server that lacks Receives for another connection.
pub(crate) const REJECTED_NO_RECEIVES: &[u8] = b"no receives left";
/// Text of a rejection by a server that has as many connections as it accepts.
pub(crate) const REJECTED_NO_CONNECTIONS: &[u8] = b"no connections left (limits.max_connections)";

/// Log category of connections that ended because their peers violated a protocol.
pub(crate) const PEER_FAULTS: &str = "connections closed after protocol violations of their peers";

/// Whether a work request failed through the peer's fault.
fn is_peer_fault(status: Status) -> bool {
    matches!(status, Status::LocalLength | Status::RemoteAccess | Status::RemoteInvalidRequest)
}

/// The cause within a [`CloseReason`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseCause {
    /// The peer broke a rule of the protocol.
    #[error(transparent)]
    PeerFault(#[from] PeerFault),
    /// The peer rejected the connection.
    // The text is escaped, so that the peer's bytes cannot look like log lines of this side.
    #[error("rejected by the peer: {}", String::from_utf8_lossy(.text).escape_debug())]
    Rejected {
        /// Text that the peer sent with the rejection.
        text: Vec<u8>,
    },
    /// The device failed to execute a work request.
    #[error("{}", describe_failure(*opcode, *status))]
    Device {
        /// Operation of the work request.
        opcode: Opcode,
        /// Its completion status.
        status: Status,
    },
    /// The device rejected a work request.
    #[error("{}", describe_post_error(*.0))]
    NotPosted(PostError),
    /// The fabric could not connect.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The connection was closed, or lost.
    #[error("{detail}")]
    Disconnected {
        /// Party that caused it.
        cause: Disconnect,
        /// Text of the fabric.
        detail: String,
    },
    /// This side ended the connection.
    #[error(transparent)]
    Local(#[from] LocalClose),
    /// The connection ended before its client registered for the reason.
    #[error("connection ended before its client read the reason")]
    Unknown,
}

impl CloseCause {
    /// Log category of the close of an accepted connection. `None` for a regular close, or one that is logged already.
    pub(crate) fn log_category(&self) -> Option<&'static str> {
        match self {
            // The request was flushed with its connection, as when a peer closes it amid a transfer: no device failed.
            Self::Device { status: Status::Flushed, .. } => None,
            // A work request has failed, or the peer acknowledged nothing until the fabric's time-out.
            Self::Device { .. } | Self::Disconnected { cause: Disconnect::Failure, .. } => {
                Some("connections lost because the device or the network failed")
            }
            Self::Disconnected { cause: Disconnect::Violation | Disconnect::Refused, .. } => Some(PEER_FAULTS),
            Self::Local(LocalClose::Evicted) => Some("connections evicted because others needed their places"),
            Self::Local(LocalClose::SetupTimeout) => Some("connections whose setup timed out"),
            _ => None,
        }
    }
}

/// Slot for the close reason that a client's thread reads.
pub(crate) type CloseReasonSlot = OnceLock<CloseReason>;

/// Reason of this side to close a connection without a peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalClose {
    /// The application closed the connection.
    #[error("closed by this side")]
    Requested,
    /// The connection's shard stopped.
    #[error("shard stopped")]
    Stopped,
    /// [`connect.timeout`](crate::config::ConnectConfig::timeout) has passed.
    #[error("connect timed out (connect.timeout)")]
    ConnectTimeout,
    /// [`connect.negotiation`](crate::config::ConnectConfig::negotiation) has passed.
    #[error("peer did not answer the first message (connect.negotiation)")]
    NegotiationTimeout,
    /// The server answered the first message with an error, and sent nothing else before
    /// [`connect.negotiation`](crate::config::ConnectConfig::negotiation) had passed.
    #[error("peer answered the first message with {0} and sent nothing else (connect.negotiation)")]
    NegotiationRefused(ErrorBody),
    /// [`accept.setup`](crate::config::AcceptConfig::setup) has passed.
    #[error("connection setup timed out (accept.setup)")]
    SetupTimeout,
    /// [`timeouts.progress`](crate::config::TimeoutConfig::progress) has passed.
    #[error("{0} (timeouts.progress, limits.min_rate)")]
    ProgressTimeout(&'static str),
    /// The shard evicted the connection, because another needed its place.
    ///
    /// It was silent ([`accept.evict_after`](crate::config::AcceptConfig::evict_after)), or its host exceeded its
    /// share of [`memory.receives`](crate::config::MemoryConfig::receives) or
    /// [`limits.max_connections`](crate::config::LimitsConfig::max_connections).
    #[error("evicted: another connection needs its place (memory.receives, limits.max_connections)")]
    Evicted,
    /// A message that was counted as sent could not be sent.
    #[error("{0} could not be sent")]
    Unsendable(&'static str),
}

fn describe_failure(opcode: Opcode, status: Status) -> String {
    match status {
        Status::Flushed => format!("connection ended during a {opcode:?}"),
        _ => format!("{opcode:?} failed: {status}"),
    }
}

fn describe_post_error(error: PostError) -> String {
    match error {
        PostError::QueueFull => "send queue is full".into(),
        PostError::NotConnected => "queue pair is not connected".into(),
        PostError::Invalid(why) => format!("device refused a work request: {why}"),
        _ => format!("device refused a work request: {error:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_texts_of_peers_are_escaped() {
        let rejected = CloseCause::Rejected { text: b"full\n\x1b[31m\xff".to_vec() };
        assert_eq!(rejected.to_string(), "rejected by the peer: full\\n\\u{1b}[31m\u{fffd}");
    }

    #[test]
    fn a_flushed_work_request_does_not_count_as_failure_of_the_device() {
        let ended = |status| CloseCause::Device { opcode: Opcode::Write, status };
        assert!(
            ended(Status::RetryExceeded).log_category().is_some() && ended(Status::Flushed).log_category().is_none()
        );
        assert_eq!(
            ended(Status::RetryExceeded).to_string(),
            "Write failed: transport retries exceeded: the peer does not acknowledge"
        );
        assert_eq!(ended(Status::Flushed).to_string(), "connection ended during a Write");
    }

    #[test]
    fn a_close_reason_has_the_text_of_its_cause() {
        let fault = PeerFault::VersionChanged(1);
        assert_eq!(CloseReason::from(fault).to_string(), fault.to_string());
        let stalled = CloseReason::from(LocalClose::ProgressTimeout("peer is too slow"));
        assert_eq!(stalled.to_string(), "peer is too slow (timeouts.progress, limits.min_rate)");
    }

    #[test]
    fn connections_that_end_for_faults_or_failures_are_logged_and_regular_closes_are_not() {
        let category = |cause| CloseCause::Disconnected { cause, detail: String::new() }.log_category();
        assert_eq!([Disconnect::Violation, Disconnect::Refused].map(category), [Some(PEER_FAULTS); 2]);
        assert!(category(Disconnect::Failure).is_some());
        assert_eq!([Disconnect::Peer, Disconnect::Local].map(category), [None; 2]);
    }

    #[test]
    fn the_kind_separates_peer_faults_from_failures() {
        let kind = |cause: CloseCause| CloseReason::from(cause).kind();
        let device = |status| kind(CloseCause::Device { opcode: Opcode::Write, status });
        assert_eq!(device(Status::RetryExceeded), CloseReasonKind::Device);
        assert_eq!(device(Status::RemoteAccess), CloseReasonKind::PeerFault);
        assert_eq!(device(Status::Flushed), CloseReasonKind::Peer);
        let ended = |cause| kind(CloseCause::Disconnected { cause, detail: String::new() });
        assert_eq!(ended(Disconnect::Refused), CloseReasonKind::PeerFault);
        assert_eq!(ended(Disconnect::PortDown), CloseReasonKind::Device);
        assert_eq!(kind(FabricError::new(FabricErrorKind::Peer, "version").into()), CloseReasonKind::PeerFault);
        assert_eq!(kind(FabricError::new(FabricErrorKind::Closed, "gone").into()), CloseReasonKind::Peer);
        assert_eq!(kind(LocalClose::SetupTimeout.into()), CloseReasonKind::TimedOut);
        let silent = FabricError::new(FabricErrorKind::TimedOut, "no answer");
        assert_eq!(kind(silent.into()), CloseReasonKind::TimedOut);
    }
}
