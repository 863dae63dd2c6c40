//! Characteristics of established connections (xcharext-02): changes at this end, and requests to peers.

use super::{Connection, LocalClient};
use crate::fabric::Fabric;
use crate::proto;
#[cfg(feature = "unstable-internals")]
use crate::proto::exchange::{ChangeError, Characteristic, Event};
use crate::shard::ResizeError;

/// Negotiated limits of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms(proto::Terms);

impl Terms {
    /// Version of RPC-over-RDMA, 1 or 2.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.0.version.code()
    }

    /// Longest message to send inline, in bytes.
    #[must_use]
    pub fn send_inline_threshold(&self) -> usize {
        self.0.send_inline_threshold
    }

    /// Longest message that the peer sends inline, in bytes.
    #[must_use]
    pub fn receive_inline_threshold(&self) -> usize {
        self.0.receive_inline_threshold
    }
}

impl<F: Fabric> LocalClient<F> {
    /// Changes the receive size of all connections while calls run; allocates.
    ///
    /// Larger receives take effect once arriving messages have used up the older ones. Smaller ones take effect once
    /// every peer has read the new limit. Until then `receive_size_bytes` and `receive_size_posted_bytes` at a server's
    /// statistics socket differ.
    ///
    /// Receives of another size than [`wire.receive_size`](crate::config::WireConfig::receive_size) get a new pool,
    /// freed after use: this takes as long as making a pool of `memory.receives` of them.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeError> {
        self.shard.change_receive_size(bytes)
    }

    /// Switches Send With Invalidate for a connection's calls; informs the server.
    #[cfg(feature = "unstable-internals")]
    ///
    /// # Errors
    /// Nothing has changed: [`ChangeError::Unsupported`] with a peer that does not know of such changes,
    /// [`ChangeError::Constant`] if [`debug.remote_invalidate`](crate::config::DebugConfig::remote_invalidate) is
    /// off.
    pub fn set_remote_invalidation(&mut self, connection: Connection, yes: bool) -> Result<(), ChangeError> {
        self.shard.set_remote_invalidation(connection.0, yes)
    }

    /// Asks the server to change its characteristics. [`take_changes`](Self::take_changes) reports the outcome.
    #[cfg(feature = "unstable-internals")]
    ///
    /// # Errors
    /// The request was not sent.
    pub fn request_change(&mut self, connection: Connection, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        self.shard.request_change(connection.0, wanted)
    }

    /// Takes the last 256 events about characteristics, oldest first.
    #[cfg(feature = "unstable-internals")]
    pub fn take_changes(&mut self) -> Vec<(Connection, Event)> {
        self.shard.take_changes().map(|(conn, event)| (Connection(conn), event)).collect()
    }

    /// Negotiated limits of a connection; `None` while not established.
    #[must_use]
    pub fn terms(&self, connection: Connection) -> Option<Terms> {
        self.shard.terms(connection.0).map(Terms)
    }

    /// Messages that a connection may send now, by its granted credits. In version 1, calls. `None` while not
    /// established.
    #[must_use]
    pub fn credits(&self, connection: Connection) -> Option<u32> {
        self.shard.credits(connection.0)
    }
}
