//! Failures of a fabric or of its environment.

#![forbid(unsafe_code)]

use std::fmt;

use rpcrdma_mempool::ArenaId;

/// A failure of the fabric or of its environment. The text names the call, the limit found and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct FabricError {
    kind: FabricErrorKind,
    text: Box<str>,
}

/// The subject of a [`FabricError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FabricErrorKind {
    /// The address is not of this fabric's form.
    Address,
    /// Another listener has the address.
    AddressInUse,
    /// Nobody listens at the address.
    Unreachable,
    /// The peer, or its host, did not answer in time.
    TimedOut,
    /// A call to the operating system or the device failed.
    System,
    /// The peer breaks the fabric's own protocol.
    Peer,
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
        Self { kind, text: text.to_string().into() }
    }

    /// The subject.
    #[doc(hidden)]
    pub fn kind(&self) -> FabricErrorKind {
        self.kind
    }

    /// Whether the address has no listener. Another attempt may succeed.
    pub fn is_unreachable(&self) -> bool {
        self.kind == FabricErrorKind::Unreachable
    }

    /// An address of another form, with the defect.
    pub(crate) fn address(address: impl AsRef<str>, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Address, format_args!("address {:?}: {detail}", address.as_ref()))
    }

    /// Another listener has the address. `detail`: its state, and the remedy.
    pub(crate) fn in_use(address: impl AsRef<str>, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::AddressInUse, format_args!("address {:?} is in use: {detail}", address.as_ref()))
    }

    /// No listener at the address. `detail`: the failed call, and the remedy.
    pub(crate) fn unreachable(address: impl AsRef<str>, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Unreachable, format_args!("nobody listens at {:?}: {detail}", address.as_ref()))
    }

    /// A peer that did not answer within the time-out `knob`.
    pub(crate) fn timed_out(knob: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::TimedOut, format_args!("peer did not answer within {knob}"))
    }

    /// A failed call with its size. `detail`: the error, the limit, and the command that fixes it.
    pub(crate) fn system(call: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::System, format_args!("{call}: {detail}"))
    }

    /// A failed call, because there is no such device. `detail`: the reason, and the command that fixes it.
    #[cfg(feature = "verbs")]
    pub(crate) fn no_device(call: impl fmt::Display, detail: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Unsupported, format_args!("{call}: {detail}"))
    }

    /// The peer breaks the fabric's own protocol.
    pub(crate) fn peer(what: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Peer, format_args!("peer: {what}"))
    }

    /// An invalid request of the caller.
    pub(crate) fn misuse(what: impl fmt::Display) -> Self {
        Self::new(FabricErrorKind::Misuse, format_args!("misuse: {what}"))
    }

    /// The verbs fabric does not support iWARP devices.
    #[cfg(feature = "verbs")]
    pub(crate) fn iwarp(device: impl fmt::Display) -> Self {
        let text = format_args!(
            "{device} is an iWARP device: its devices have no memory windows, which the verbs fabric needs \
             (addresses `iwarp:HOST:PORT` reach iWARP devices over plain TCP)"
        );
        Self::new(FabricErrorKind::Unsupported, text)
    }

    /// Memory mapped by the application cannot be exposed on the software fabric, since peers must map it.
    pub(crate) fn not_showable(arena: ArenaId) -> Self {
        let text = format_args!(
            "arena {arena} was mapped by the application, and peers of the software fabric must map it (use \
             `ArenaConfig::build`, or register it with `Access::LOCAL`)"
        );
        Self::new(FabricErrorKind::Unsupported, text)
    }

    /// A window is still bound to the memory.
    #[cold]
    pub(crate) fn still_bound(arena: ArenaId) -> Self {
        Self::misuse(format_args!("a window is still bound to arena {arena}"))
    }
}
