//! Failures of a fabric, or of what it stands on.

#![forbid(unsafe_code)]

use rpcrdma_mempool::ArenaId;

/// A failure of the fabric or of its environment. The text names the call, the limit found and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The address is not of this fabric's form.
    #[error("address {address:?}: {detail}")]
    Address {
        /// As given.
        address: String,
        /// What is wrong with it.
        detail: String,
    },
    /// Another listener has it already.
    #[error("address {address:?} is in use: {detail}")]
    AddressInUse {
        /// As given.
        address: String,
        /// What was found there, and the remedy.
        detail: String,
    },
    /// Nobody listens there.
    #[error("nobody listens at {address:?}: {detail}")]
    Unreachable {
        /// As given.
        address: String,
        /// What was tried, and the remedy.
        detail: String,
    },
    /// A call to the operating system or the device failed.
    #[error("{call}: {detail}")]
    System {
        /// What was called, and with what size.
        call: String,
        /// The error, the limit found, the command that fixes it.
        detail: String,
    },
    /// The peer does not keep to the fabric's own protocol.
    #[error("peer: {0}")]
    Peer(String),
    /// The verbs fabric was to use an iWARP device.
    #[error(
        "{device} is an iWARP device, which the verbs fabric does not drive: it has no memory windows, so that each \
         exposure would need a registration of its own; addresses `iwarp:HOST:PORT` talk to iWARP devices over plain \
         TCP, and `verbs:HOST:PORT` is for InfiniBand and RoCE"
    )]
    Iwarp {
        /// As the kernel calls it.
        device: String,
    },
    /// Memory that the application has mapped itself was to be shown to peers of the software fabric, who map what they
    /// are shown.
    #[error(
        "arena {arena} is memory that the application has mapped, and peers of the software fabric must map what they \
         are shown: take memory of `Arena::new`, which is a sealed memfd, or register it with `Access::LOCAL`"
    )]
    NotShowable {
        /// The memory.
        arena: ArenaId,
    },
    /// The caller asked for what cannot be: an unknown queue pair, a bound window, memory never registered.
    #[error("misuse: {0}")]
    Misuse(String),
}

impl FabricError {
    /// Memory is to be taken from the device that a peer may still reach.
    #[cold]
    pub(crate) fn still_bound(arena: ArenaId) -> Self {
        Self::Misuse(format!("a window is still bound to arena {arena}"))
    }
}
