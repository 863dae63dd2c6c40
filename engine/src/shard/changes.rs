//! Changes of a connection's characteristics, by its peer and by this end.

use std::collections::VecDeque;

use super::connection::Conn;
use super::connection::Stage;
use super::context::Context;
use super::{ConnRef, ResizeError, Shard, receive_size};
use crate::fabric::Fabric;
use crate::proto::exchange::{ChangeError, Characteristic, Event};

/// Events kept for the application.
const MOST_CHANGES: usize = 256;

/// Events of peers' characteristics, for the application.
#[derive(Debug, Default)]
pub(super) struct Changes(VecDeque<(ConnRef, Event)>);

impl Changes {
    /// Records an event of a connection. A requested receive size may be granted later.
    #[cold]
    pub(super) fn add<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &Conn, event: Event) {
        if let Event::Requested(wanted) = &event {
            for value in wanted {
                if let Characteristic::ReceiveSize(bytes) = value {
                    receive_size::request(cx, *bytes as usize);
                }
            }
        }
        self.keep((ConnRef(conn.origin()), event));
    }

    /// Adds an event; drops the oldest of too many.
    fn keep(&mut self, change: (ConnRef, Event)) {
        if self.0.len() == MOST_CHANGES {
            self.0.pop_front();
        }
        self.0.push_back(change);
    }
}

impl<F: Fabric> Context<F> {
    /// Adopts the terms of a connection, which its last message may have changed.
    #[cold]
    pub(super) fn adopt_terms(&mut self, conn: &mut Conn) {
        // The peer may have an earlier value, sent before changes were possible.
        let size = Characteristic::ReceiveSize(self.sizing.announced() as u32);
        let _ = conn.proto.changes().announce(size, false);
        if self.sizing.is_busy() {
            self.schedule.control_now();
        }
        conn.refresh();
    }
}

impl<F: Fabric> Shard<F> {
    /// Calls `act` with an open connection.
    fn with_open<T>(
        &mut self,
        conn: ConnRef,
        act: impl FnOnce(&mut Conn) -> Result<T, ChangeError>,
    ) -> Result<T, ChangeError> {
        let result = self.with_ref(conn, |shard, conn| {
            let result = if conn.stage() == Stage::Open { act(conn) } else { Err(ChangeError::Unsupported) };
            conn.refresh();
            shard.cx.ready.add(conn);
            result
        });
        result.unwrap_or(Err(ChangeError::Unsupported))
    }

    /// Changes the receive size of all connections while calls run.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeError> {
        Ok(receive_size::change(&mut self.cx, bytes)?)
    }

    /// Asks a peer to change its characteristics. [`take_changes`](Self::take_changes) reports the outcome.
    ///
    /// # Errors
    /// The request was not sent.
    pub fn request_change(&mut self, conn: ConnRef, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        self.with_open(conn, |conn| conn.proto.changes().request(wanted))
    }

    /// Switches Send With Invalidate for calls on this connection; informs the peer.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn set_remote_invalidation(&mut self, conn: ConnRef, yes: bool) -> Result<(), ChangeError> {
        self.with_open(conn, |conn| conn.proto.changes().announce(Characteristic::RemoteInvalidation(yes), false))
    }

    /// Takes the events about characteristics, oldest first; at most the last 256.
    pub fn take_changes(&mut self) -> impl Iterator<Item = (ConnRef, Event)> + '_ {
        self.changes.0.drain(..)
    }

    /// Negotiated limits of a connection; `None` while not established.
    pub fn terms(&self, conn: ConnRef) -> Option<crate::proto::Terms> {
        self.cx.open_conn(conn).map(|conn| *conn.proto.terms())
    }

    /// Messages (version 1: calls) that a connection may send now, by its granted credits; `None` while not
    /// established.
    pub fn credits(&self, conn: ConnRef) -> Option<u32> {
        self.cx.open_conn(conn).map(|conn| conn.proto.credits().available())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_changes_the_oldest_go() {
        let mut changes = Changes::default();
        for bytes in 0..=MOST_CHANGES as u32 {
            changes.keep((ConnRef::NONE, Event::Peer(Characteristic::ReceiveSize(bytes))));
        }
        let first = Event::Peer(Characteristic::ReceiveSize(1));
        assert_eq!((changes.0.len(), changes.0.front().map(|(_, event)| event)), (MOST_CHANGES, Some(&first)));
    }
}
