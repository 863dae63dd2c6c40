//! Receive windows that follow the load: those of busy connections grow while Receives are plenty, and shrink
//! to an equal share when they get short. And what keeps quiet connections alive: a pure grant; in version 1,
//! which has no such message, an RDMA Write of no bytes, which the peer's device acknowledges by itself.
//!
//! Whether a peer waits for credits is not to be seen from here: a receiver that keeps up replenishes each
//! message at once. So a window grows where it is turned over often, and only as far as half of the shard's
//! Receives go: they are posted anyway.

use super::Shard;
use super::clock::nanoseconds;
use super::conn::Conn;
use super::stage::Stage;
use crate::config::RECEIVE_MARGIN;
use crate::fabric::Fabric;
use crate::proto::MIN_WINDOW;
use crate::wire::Version;

/// Looks at the control plane between two looks at the windows.
const EVERY: u32 = 8;
/// How often a window is turned over between two looks by a connection that is busy.
const TURNOVERS: u64 = 8;

impl<F: Fabric> Shard<F> {
    /// Receives are posted for all that peers may send when `conn`, which is not in the table now, has let
    /// its peer send one more.
    #[inline]
    pub(super) fn receives_ok(&self, conn: &Conn) -> bool {
        self.receives.suffice() || self.spares_receives(conn)
    }

    /// The same, while there are fewer than all reserves together: calls may have their buffers for long.
    #[cold]
    fn spares_receives(&self, conn: &Conn) -> bool {
        let others: u32 = self.conns.iter().map(|other| other.proto.spared()).sum();
        // An answer of version 1 makes it one fewer.
        self.receives.suffice_without(others + conn.proto.spared())
    }

    /// Part of step 5 of a turn: fits windows to their use, now and then, and keeps connections alive.
    pub(super) fn adapt(&mut self) {
        self.adaptations = self.adaptations.wrapping_add(1);
        let windows = self.adaptations.is_multiple_of(EVERY);
        let keep_alive = !self.config.keep_alive.is_zero();
        if !windows && !keep_alive {
            return;
        }
        let open = self.conns.iter().count();
        let now = self.clock.read();
        self.with_each(|shard, conn| {
            if windows {
                conn.pass_time(now);
                shard.fit_window(conn, open);
            }
            if keep_alive && conn.stage == Stage::Open {
                shard.keep_alive(conn);
            }
        });
        self.refill();
    }

    fn fit_window(&mut self, conn: &mut Conn, open: usize) {
        let received = conn.proto.counters().received;
        let turned = received - std::mem::replace(&mut conn.last_received, received);
        let total = self.config.receives.saturating_sub(RECEIVE_MARGIN);
        let free = self.receives.unpromised().saturating_sub(RECEIVE_MARGIN);
        let window = conn.proto.credits().window();
        let share = (total / open.max(1)).saturating_sub(2) as u32;
        let wanted = if free < total / 8 {
            window.min(share)
        } else if turned >= TURNOVERS * u64::from(window) && free > total / 2 {
            window.saturating_add(window.min((free / 4) as u32)).min(self.config.max_window.max(window))
        } else {
            window
        };
        let wanted = wanted.max(MIN_WINDOW);
        // Version 1 of a side that takes no calls has none.
        if wanted != window && window != 0 && conn.stage == Stage::Open {
            conn.proto.set_window(wanted);
            conn.fit();
        }
        self.rebalance(conn);
    }

    /// Counts what a connection was promised as it is now.
    pub(super) fn rebalance(&mut self, conn: &mut Conn) {
        let (receives, overcommit) = (conn.proto.reserve(), conn.proto.credits().overcommit());
        self.receives.promise(&mut conn.promise, receives, overcommit);
    }

    fn keep_alive(&mut self, conn: &mut Conn) {
        let now = self.clock.read();
        let every = nanoseconds(self.config.keep_alive);
        let sent = conn.proto.counters().sent;
        if sent != conn.last_sent {
            (conn.last_sent, conn.quiet_since) = (sent, now);
        } else if now - conn.quiet_since >= every {
            conn.quiet_since = now;
            if conn.proto.terms().version == Version::V2 {
                conn.proto.keep_alive();
                Self::make_ready(&mut self.ready, conn);
            } else if !conn.sends.awaits_end() {
                self.write_nothing(conn);
            }
        }
        self.next_control = self.next_control.min(conn.quiet_since + every);
    }
}
