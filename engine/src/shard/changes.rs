//! Characteristics of one connection that change while it is in use: what its peer says about them, and what
//! this end asks for.

use super::conn::Conn;
use super::stage::Stage;
use super::{ConnRef, Shard};
use crate::fabric::Fabric;
use crate::proto::exchange::{ChangeError, Characteristic, Event};

/// Changes that are kept for the application.
const MOST_CHANGES: usize = 256;

impl<F: Fabric> Shard<F> {
    /// Characteristics have changed, or may change now.
    #[cold]
    pub(super) fn changed(&mut self, conn: &mut Conn) {
        while let Some(event) = conn.proto.poll_change() {
            if let Event::Asked(wanted) = &event {
                self.asked_for(wanted);
            }
            if self.changes.len() == MOST_CHANGES {
                self.changes.pop_front();
            }
            self.changes.push_back((ConnRef(conn.origin), event));
        }
        if conn.proto.exchange().is_some() {
            // It may have been told less, or more, before it could be told of changes.
            let _ = conn.proto.tell_receive_size(self.sizing.announced());
        }
        if self.sizing.is_busy() {
            self.control_due = 0;
        }
        conn.refresh();
    }

    fn asked_for(&mut self, wanted: &[Characteristic]) {
        for value in wanted {
            if let Characteristic::ReceiveSize(bytes) = value {
                self.ask_for_size(*bytes as usize);
            }
        }
    }

    /// Does something to an open connection, by its owner's name for it.
    fn with_open<T>(
        &mut self,
        conn: ConnRef,
        act: impl FnOnce(&mut Conn) -> Result<T, ChangeError>,
    ) -> Result<T, ChangeError> {
        let result = self.with_ref(conn, |shard, conn| {
            let result = if conn.stage == Stage::Open { act(conn) } else { Err(ChangeError::Unsupported) };
            conn.refresh();
            Self::make_ready(&mut shard.ready, conn);
            result
        });
        result.unwrap_or(Err(ChangeError::Unsupported))
    }

    /// Asks a peer to change characteristics of its end. What becomes of it comes by
    /// [`take_changes`](Self::take_changes).
    ///
    /// # Errors
    /// Nothing was asked for.
    pub fn request_change(&mut self, conn: ConnRef, wanted: &[Characteristic]) -> Result<(), ChangeError> {
        self.with_open(conn, |conn| conn.proto.request(wanted))
    }

    /// Calls on this connection offer a handle for Send With Invalidate from now on, or none; the peer is
    /// told.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn set_remote_invalidation(&mut self, conn: ConnRef, yes: bool) -> Result<(), ChangeError> {
        self.with_open(conn, |conn| conn.proto.set_remote_invalidation(yes))
    }

    /// Takes what peers have told of their characteristics, asked for, and answered, oldest first; the last
    /// 256.
    pub fn take_changes(&mut self) -> impl Iterator<Item = (ConnRef, Event)> + '_ {
        self.changes.drain(..)
    }

    /// What a connection may send, and what it may be sent; `None` when it is not open.
    pub fn terms(&self, conn: ConnRef) -> Option<crate::proto::Terms> {
        self.open_conn(conn).map(|conn| *conn.proto.terms())
    }

    /// Messages (version 1: calls) that a connection may send now, by the credits that its peer has granted;
    /// `None` when it is not open.
    pub fn credits(&self, conn: ConnRef) -> Option<u32> {
        self.open_conn(conn).map(|conn| conn.proto.credits().available())
    }

    fn open_conn(&self, conn: ConnRef) -> Option<&Conn> {
        self.conns.get(conn).filter(|conn| conn.stage == Stage::Open)
    }
}
