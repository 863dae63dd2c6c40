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
    /// The server closed it: others needed its receives.
    Evicted,
    /// The device, or the network to the peer, failed.
    Device,
    /// The reason was not kept.
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
                LocalClose::Displaced => Kind::Evicted,
                LocalClose::ConnectTimeout
                | LocalClose::NegotiationTimeout
                | LocalClose::NegotiationRefused(_)
                | LocalClose::SetupTimeout
                | LocalClose::ProgressTimeout(_) => Kind::TimedOut,
            },
            CloseCause::Before => Kind::Unknown,
        }
    }

    /// The address is not of the fabric's form: no attempt succeeds. For the C interface.
    #[doc(hidden)]
    pub fn is_bad_address(&self) -> bool {
        matches!(&self.0, CloseCause::Fabric(error) if error.kind() == FabricErrorKind::Address)
    }

    /// Nobody listens at the address, or the server takes no more connections. For the C interface.
    #[doc(hidden)]
    pub fn is_unreachable(&self) -> bool {
        match &self.0 {
            CloseCause::Fabric(error) => error.is_unreachable(),
            CloseCause::Rejected { said } => said == REJECTED_CLOSED,
            _ => false,
        }
    }

    /// The server has no receives for another connection now. For the C interface.
    #[doc(hidden)]
    pub fn is_out_of_receives(&self) -> bool {
        matches!(&self.0, CloseCause::Rejected { said } if said == REJECTED_NO_RECEIVES)
    }

    /// Number of the error of a failed system call, if it is known. For the C interface.
    #[doc(hidden)]
    pub fn os_error(&self) -> Option<i32> {
        match &self.0 {
            CloseCause::Fabric(error) => error.os_error(),
            _ => None,
        }
    }

    /// The next attempt to connect would fail in the same way.
    pub(crate) fn is_permanent(&self) -> bool {
        use PeerFault::{NoCommonVersion, NotAuthenticated};
        matches!(self.0, CloseCause::PeerFault(NoCommonVersion { .. } | NotAuthenticated(_)))
    }

    /// Its cause, with all details.
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

/// What a server says that takes no connections any more.
pub(crate) const REJECTED_CLOSED: &[u8] = b"closed";
/// What a server says without receives for another connection.
pub(crate) const REJECTED_NO_RECEIVES: &[u8] = b"no receives left";

/// Whether a work request failed through the peer's fault.
pub(crate) fn is_peer_fault(status: Status) -> bool {
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
    // Escaped: the peer's bytes must not look like log lines of ours.
    #[error("rejected by the peer: {}", String::from_utf8_lossy(.said).escape_debug())]
    Rejected {
        /// Text that the peer sent with the rejection.
        said: Vec<u8>,
    },
    /// The device failed to execute a work request.
    #[error("{}", not_done(*opcode, *status))]
    Device {
        /// Operation of the work request.
        opcode: Opcode,
        /// Its completion status.
        status: Status,
    },
    /// The device rejected a work request.
    #[error("{}", not_posted(*.0))]
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
    /// This side ended it.
    #[error(transparent)]
    Local(#[from] LocalClose),
    /// It ended before its client registered for the reason.
    #[error("connection ended before its client read the reason")]
    Before,
}

impl CloseCause {
    /// Category of its end in the log, for an accepted connection. `None` for a regular end, or one that is logged
    /// already.
    pub(crate) fn for_the_log(&self) -> Option<&'static str> {
        match self {
            // Flushed with its connection, as when a peer leaves amid a transfer: the device did not fail.
            Self::Device { status: Status::Flushed, .. } => None,
            // A request has failed, or the peer has acknowledged nothing for the fabric's whole time-out.
            Self::Device { .. } | Self::Disconnected { cause: Disconnect::Failure, .. } => {
                Some("connections ended by their device")
            }
            Self::Local(LocalClose::Displaced) => Some("connections ended as others needed their Receives"),
            Self::Local(LocalClose::SetupTimeout) => Some("connections that were not set up in time"),
            _ => None,
        }
    }
}

/// Slot for the close reason that a client's thread reads.
pub(crate) type ClosedBecause = OnceLock<CloseReason>;

/// Why this side closed a connection without a fault of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalClose {
    /// The application asked for it.
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
    /// The server answered the first message by an error, and sent nothing else before
    /// [`connect.negotiation`](crate::config::ConnectConfig::negotiation) had passed.
    #[error("peer answered the first message with {0} and sent nothing else (connect.negotiation)")]
    NegotiationRefused(ErrorBody),
    /// [`accept.setup`](crate::config::AcceptConfig::setup) has passed.
    #[error("connection setup timed out (accept.setup)")]
    SetupTimeout,
    /// [`timeouts.progress`](crate::config::TimeoutConfig::progress) has passed.
    #[error("{0} (timeouts.progress, limits.min_rate)")]
    ProgressTimeout(&'static str),
    /// Evicted: others needed its receives.
    ///
    /// It was silent ([`accept.evict_after`](crate::config::AcceptConfig::evict_after)), or its host exceeded its
    /// share ([`memory.receives`](crate::config::MemoryConfig::receives)).
    #[error("evicted: others need its receives (memory.receives)")]
    Displaced,
    /// A message that was counted as sent could not be sent.
    #[error("{0} could not be sent")]
    Unsendable(&'static str),
}

fn not_done(opcode: Opcode, status: Status) -> String {
    match status {
        Status::Flushed => format!("the connection ended with a {opcode:?} under way"),
        _ => format!("{opcode:?} failed: {status:?}"),
    }
}

fn not_posted(error: PostError) -> String {
    match error {
        PostError::QueueFull => "send queue of the device is full".into(),
        PostError::NotConnected => "device is not connected".into(),
        PostError::Invalid(why) => format!("device refused a work request: {why}"),
        _ => format!("device refused a work request: {error:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_peers_are_escaped() {
        let rejected = CloseCause::Rejected { said: b"full\n\x1b[31m\xff".to_vec() };
        assert_eq!(rejected.to_string(), "rejected by the peer: full\\n\\u{1b}[31m\u{fffd}");
    }

    #[test]
    fn a_request_that_went_with_its_connection_is_no_failure_of_the_device() {
        let ended = |status| CloseCause::Device { opcode: Opcode::Write, status };
        assert!(ended(Status::RetryExceeded).for_the_log().is_some() && ended(Status::Flushed).for_the_log().is_none());
        assert_eq!(ended(Status::RetryExceeded).to_string(), "Write failed: RetryExceeded");
        assert_eq!(ended(Status::Flushed).to_string(), "the connection ended with a Write under way");
    }

    #[test]
    fn a_reason_of_another_layer_keeps_its_words() {
        let fault = PeerFault::VersionChanged(1);
        assert_eq!(CloseReason::from(fault).to_string(), fault.to_string());
        let stalled = CloseReason::from(LocalClose::ProgressTimeout("peer is too slow"));
        assert_eq!(stalled.to_string(), "peer is too slow (timeouts.progress, limits.min_rate)");
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
