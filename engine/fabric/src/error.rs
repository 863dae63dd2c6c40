//! Failures of a fabric or of its environment.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use rpcrdma_mempool::{ArenaId, exceeded_limit};
use rustix::io::Errno;

use crate::QpId;

/// The beginning of the text of [`FabricErrorKind::Peer`] and [`FabricErrorKind::Closed`].
const PEER: &str = "peer: ";

/// A failure of the fabric or of its environment. The text names the call, the limit found and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct FabricError {
    kind: FabricErrorKind,
    /// The system's error, if it is known.
    errno: Option<Errno>,
    text: Box<str>,
}

/// The kind of failure that a [`FabricError`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FabricErrorKind {
    /// The address is not of this fabric's form.
    Address,
    /// Another listener has the address.
    AddressInUse,
    /// The address has no listener.
    Unreachable,
    /// The peer, or its host, did not answer in time.
    TimedOut,
    /// A call to the operating system or the device failed.
    System,
    /// The peer breaks the fabric's own protocol.
    Peer,
    /// The peer closed or refused the connection before it was established.
    Closed,
    /// There is no such device, or this fabric cannot use the device or the memory.
    Unsupported,
    /// Invalid request: unknown queue pair, bound window, or unregistered memory.
    Misuse,
}

impl FabricError {
    /// An error of this kind, with this text.
    #[cold]
    #[doc(hidden)]
    pub fn new(kind: FabricErrorKind, text: impl fmt::Display) -> Self {
        Self { kind, errno: None, text: text.to_string().into() }
    }

    /// A failed system call, with the limit that the process has reached.
    #[cold]
    #[doc(hidden)]
    pub fn failed(call: impl fmt::Display, error: &io::Error) -> Self {
        let limit = exceeded_limit(error).or_else(|| match Errno::from_io_error(error)? {
            Errno::NOSPC => Some("limit of watched sockets: sysctl fs.epoll.max_user_watches".to_owned()),
            Errno::NOBUFS | Errno::NOMEM => Some("kernel memory: sysctl net.ipv4.tcp_mem for TCP".to_owned()),
            _ => None,
        });
        let limit = limit.map_or(String::new(), |limit| format!(" ({limit})"));
        Self::system(call, format_args!("{error}{limit}")).caused_by(Some(error))
    }

    /// Puts the name of the setting that failed in front of the text.
    #[doc(hidden)]
    pub fn with_setting(self, what: &str) -> Self {
        Self { text: format!("{what}: {}", self.text).into(), ..self }
    }

    /// Records the number of the system's error, if it has one.
    pub(crate) fn caused_by(self, error: Option<&io::Error>) -> Self {
        Self { errno: error.and_then(Errno::from_io_error), ..self }
    }

    /// The kind of failure.
    #[doc(hidden)]
    pub fn kind(&self) -> FabricErrorKind {
        self.kind
    }

    /// Number of the system's error, if it is known.
    #[doc(hidden)]
    pub fn os_error(&self) -> Option<i32> {
        self.errno.map(Errno::raw_os_error)
    }

    /// Whether the system has no memory left, or the process has reached a limit on memory.
    #[doc(hidden)]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.errno, Some(Errno::NOMEM | Errno::NOBUFS))
    }

    /// The text without its leading `peer: `, for lines that name the peer themselves.
    pub(crate) fn detail(&self) -> &str {
        self.text.strip_prefix(PEER).unwrap_or(&self.text)
    }

    /// Whether the address has no listener. Another attempt may succeed.
    pub fn is_unreachable(&self) -> bool {
        self.kind == FabricErrorKind::Unreachable
    }

    /// An invalid address, with the defect.
    pub(crate) fn address(address: impl AsRef<str>, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Address, format_args!("address {:?}: {detail}", address.as_ref()))
    }

    /// Another listener has the address. `detail` is its state, and the remedy.
    pub(crate) fn in_use(address: impl AsRef<str>, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::AddressInUse, format_args!("address {:?} is in use: {detail}", address.as_ref()))
    }

    /// No listener at the address. `detail` is the failed call, and the remedy.
    pub(crate) fn unreachable(address: impl AsRef<str>, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Unreachable, format_args!("no listener at {:?}: {detail}", address.as_ref()))
    }

    /// A peer that did not answer within the time-out `knob`.
    pub(crate) fn timed_out(knob: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::TimedOut, format_args!("peer did not answer within {knob}"))
    }

    /// A failed call. `detail` is the error, the limit, and the command that fixes it.
    pub(crate) fn system(call: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::System, format_args!("{call}: {detail}"))
    }

    /// A failed call, because there is no such device. `detail` is the reason, and the command that fixes it.
    #[cfg(feature = "verbs")]
    pub(crate) fn no_device(call: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Unsupported, format_args!("{call}: {detail}"))
    }

    /// The peer breaks the fabric's own protocol.
    pub(crate) fn peer_violation(what: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Peer, format_args!("{PEER}{what}"))
    }

    /// The peer closed or refused the connection before it was established.
    pub(crate) fn connection_closed(what: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Closed, format_args!("{PEER}{what}"))
    }

    /// An invalid request of the caller.
    pub(crate) fn misuse(what: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Misuse, format_args!("misuse: {what}"))
    }

    /// The verbs fabric does not support iWARP devices.
    #[cfg(feature = "verbs")]
    pub(crate) fn unsupported_iwarp(device: impl fmt::Display) -> Self {
        let text = format_args!(
            "{device} is an iWARP device: these have no memory windows, which the verbs fabric needs \
             (addresses `iwarp:HOST:PORT` reach iWARP devices over plain TCP)"
        );
        Self::new(FabricErrorKind::Unsupported, text)
    }

    /// Memory mapped by the application cannot be exposed on the software fabric, since peers must map it.
    pub(crate) fn not_exposable(arena: ArenaId) -> Self {
        let text = format_args!(
            "arena {arena} is external memory, which peers of the software fabric cannot map (use \
             `ArenaConfig::build`, or register it with `Access::LOCAL`)"
        );
        Self::new(FabricErrorKind::Unsupported, text)
    }

    /// A queue pair has reached its limit of windows.
    pub(crate) fn window_limit_reached(qp: QpId, limit: u32) -> Self {
        Self::misuse(format_args!("{qp:?} has reached its limit of {limit} windows (ConnectParams::windows)"))
    }

    /// A window is still bound to the memory.
    #[cold]
    pub(crate) fn still_bound(arena: ArenaId) -> Self {
        Self::misuse(format_args!("a window is still bound to arena {arena}"))
    }
}

/// Error of a system call, with the limit that the process has reached.
pub(crate) fn failed(call: &str, error: impl Into<io::Error>) -> FabricError {
    FabricError::failed(call, &error.into())
}
