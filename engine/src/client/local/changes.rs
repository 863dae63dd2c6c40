//! Characteristics of running connections (xcharext-02): what this end changes, and what it asks its peers to
//! change.

use super::{Connection, LocalClient};
use crate::fabric::Fabric;
use crate::proto::Terms;
use crate::proto::exchange::{ChangeError, Characteristic, Event};
use crate::shard::ResizeError;

impl<F: Fabric> LocalClient<F> {
    /// Changes the size of the Receives of all connections, while calls run: larger ones take effect when
    /// all older ones have been used up by messages that arrive, smaller ones when every peer is known to
    /// have read that it may send no more. Until then `receive_size` and `receive_size_posted` of the
    /// [statistics](Self::stats) differ.
    ///
    /// Memory for Receives of another size than [`wire.receive_size`](crate::config::WireConfig::receive_size) is made
    /// here, and given back when it is no longer used: this takes as long as making a pool of `receives`
    /// of them.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeError> {
        self.shard.change_receive_size(bytes)
    }

    /// From now on calls on a connection offer a handle for Send With Invalidate, or none, and the server is
    /// told.
    ///
    /// # Errors
    /// Nothing has changed: [`ChangeError::Unsupported`] with a peer that does not know of such changes,
    /// [`ChangeError::Constant`] if [`wire.remote_invalidate`](crate::config::WireConfig::remote_invalidate) is
    /// off.
    pub fn set_remote_invalidation(&mut self, connection: Connection, yes: bool) -> Result<(), ChangeError> {
        self.shard.set_remote_invalidation(connection.0, yes)
    }

    /// Asks the server to change characteristics of its end. [`take_changes`](Self::take_changes) tells what
    /// becomes of it.
    ///
    /// # Errors
    /// Nothing was asked for.
    pub fn request_change(&mut self, connection: Connection, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        self.shard.request_change(connection.0, wanted)
    }

    /// What servers have told of their characteristics, asked for, and answered, oldest first; the last 256.
    pub fn take_changes(&mut self) -> Vec<(Connection, Event)> {
        self.shard.take_changes().map(|(conn, event)| (Connection(conn), event)).collect()
    }

    /// What a connection may send, and what it may be sent; `None` when it is not open.
    pub fn terms(&self, connection: Connection) -> Option<Terms> {
        self.shard.terms(connection.0)
    }

    /// Messages (version 1: calls) that a connection may send now, by the credits that its server has
    /// granted; `None` when it is not open.
    pub fn credits(&self, connection: Connection) -> Option<u32> {
        self.shard.credits(connection.0)
    }
}
