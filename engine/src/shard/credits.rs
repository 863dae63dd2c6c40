//! Credit limits that follow the load, and keep-alive of quiet connections.
//!
//! The limits of busy connections grow while receives are plenty, and shrink to an equal share when they get short. A
//! keep-alive is a pure grant; in version 1 it is an RDMA Write of no bytes, which the peer's device acknowledges.
//!
//! A waiting peer is not visible here: a fast receiver replenishes each message at once. So the limit of a busy
//! connection grows until half of the shard's receives are promised: they are posted anyway.

use super::clock::nanoseconds;
use super::conn::Conn;
use super::context::Context;
use super::stage::Stage;
use super::usage::moment;
use crate::config::RECEIVE_MARGIN;
use crate::fabric::Fabric;
use crate::proto::MIN_CREDITS;
use crate::wire::Version;

/// Control-plane intervals between two checks of a credit limit. Each interval checks one of this many parts of the
/// connections, as a check of all would delay their messages.
const PARTS: u64 = 8;
/// Turnovers of a busy connection's credit limit between two checks.
const TURNOVERS: u64 = 8;

/// Schedule of credit limits and keep-alive.
#[derive(Debug, Default)]
pub(super) struct Fitting {
    /// Next check, in nanoseconds.
    due: u64,
    /// Part of the connections due then.
    part: u64,
    /// Next keep-alive of quiet connections, in nanoseconds.
    alive_due: u64,
}

impl Fitting {
    /// The due connections: one part after each `interval`, in nanoseconds; more after a pause.
    fn take_due(&mut self, now: u64, interval: u64) -> Turn {
        let Some(late) = now.checked_sub(self.due) else { return Turn { first: 0, parts: 0 } };
        let turn = Turn { first: self.part, parts: (late / interval.max(1) + 1).min(PARTS) };
        self.due = now.saturating_add(interval);
        self.part = (self.part + turn.parts) % PARTS;
        turn
    }

    /// Whether to check all connections for keep-alive. Many new connections, which hasten the control plane, cause no
    /// extra checks.
    fn takes_quiet(&mut self, now: u64, every: u64) -> bool {
        let due = every != 0 && now >= self.alive_due;
        if due {
            self.alive_due = now.saturating_add(1).checked_next_multiple_of(moment(every)).unwrap_or(u64::MAX);
        }
        due
    }
}

/// Connections due.
struct Turn {
    first: u64,
    parts: u64,
}

impl Turn {
    fn is_nobodys(&self) -> bool {
        self.parts == 0
    }

    /// Whether the connection in this place of the table is due.
    fn has(&self, slot: usize) -> bool {
        (slot as u64 + PARTS - self.first) % PARTS < self.parts
    }
}

impl<F: Fabric> Context<F> {
    /// Tells a connection whether receives suffice for all peers after it grants one more message. It is not in the
    /// table now.
    #[inline]
    pub(super) fn check_receives(&mut self, conn: &mut Conn) {
        let ready = self.receives.suffice() || self.spares_receives(conn);
        conn.proto.set_receives_ready(ready);
    }

    /// Whether receives suffice without the full reserve of each connection: calls may keep their buffers for long.
    #[cold]
    fn spares_receives(&mut self, conn: &mut Conn) -> bool {
        let own = conn.proto.status().spared;
        let mut others = match self.receives.spared_in(self.stats.turns) {
            Some(all) => all.saturating_sub(conn.promise.spared()),
            None => self.count_spared(),
        };
        if !self.receives.suffice_without(others + own) {
            // Calls may have arrived meanwhile.
            others = self.count_spared();
        }
        let suffice = self.receives.suffice_without(others + own);
        if !suffice {
            self.receives.note_shortage();
        }
        // The receives granted now are needed.
        conn.promise.spare(if suffice { own.saturating_sub(2) } else { own });
        self.receives.set_spared(self.stats.turns, others + conn.promise.spared());
        suffice
    }

    /// Receives that connections in the table do not need, as of this turn.
    #[cold]
    pub(super) fn spared_in_turn(&mut self) -> u32 {
        self.receives.spared_in(self.stats.turns).unwrap_or_else(|| self.count_spared())
    }

    /// Whether receives suffice for one more connection.
    pub(super) fn spares_for_another(&mut self) -> bool {
        let spared = self.count_spared();
        self.receives.suffice_without(spared)
    }

    /// Counts the receives that connections in the table do not need now. It runs once per turn, as it takes long with
    /// many connections.
    fn count_spared(&mut self) -> u32 {
        let mut all = 0;
        for conn in self.conns.iter_mut() {
            conn.promise.spare(conn.proto.status().spared);
            all += conn.promise.spared();
        }
        self.receives.set_spared(self.stats.turns, all);
        all
    }

    /// Part of step 5 of a turn: adapts credit limits, and sends keep-alives.
    pub(super) fn adapt(&mut self, fitting: &mut Fitting) {
        let now = self.clock.read();
        if self.receives.ran_short() {
            self.relieved();
        }
        let turn = fitting.take_due(now, nanoseconds(self.config.poll.control_interval));
        let every = nanoseconds(self.config.timeouts.keep_alive);
        let keep_alive = fitting.takes_quiet(now, every);
        if every != 0 && !self.conns.slots().is_empty() {
            self.schedule.wake_by(fitting.alive_due);
        }
        if turn.is_nobodys() && !keep_alive {
            return;
        }
        let open = self.conns.iter().count();
        let looks_at = |slot| keep_alive || turn.has(slot);
        self.with_those(looks_at, |cx, conn| {
            if turn.has(conn.qp().slot as usize) {
                conn.pass_time(now);
                cx.fit_credits(conn, open);
            }
            if keep_alive && conn.stage() == Stage::Open {
                cx.keep_alive(conn, now, every);
            }
        });
        self.refill();
    }

    fn fit_credits(&mut self, conn: &mut Conn, open: usize) {
        let turned = conn.usage.turned(conn.proto.counters().received);
        let total = self.config.memory.receives.saturating_sub(RECEIVE_MARGIN);
        let free = self.receives.unpromised().saturating_sub(RECEIVE_MARGIN);
        let credits = conn.proto.credits().credit_limit();
        let share = (total / open.max(1)).saturating_sub(2) as u32;
        let wanted = if free < total / 8 {
            credits.min(share)
        } else if turned >= TURNOVERS * u64::from(credits) && free > total / 4 * 3 {
            let most = self.config.limits.max_credits.saturating_sub(credits);
            credits + self.receives.take_reserve(credits.min((free / 4) as u32).min(most))
        } else {
            credits
        };
        let wanted = wanted.max(MIN_CREDITS);
        // Version 1 without reverse calls has none.
        if wanted != credits && credits != 0 && conn.stage() == Stage::Open {
            conn.proto.set_credit_limit(wanted);
            conn.fit();
        }
        self.rebalance(conn);
    }

    /// Updates the promise to a connection.
    pub(super) fn rebalance(&mut self, conn: &mut Conn) {
        let (receives, overcommit) = (conn.proto.status().reserve, conn.proto.credits().overcommit());
        self.receives.promise(&mut conn.promise, receives, overcommit);
    }

    fn keep_alive(&mut self, conn: &mut Conn, now: u64, every: u64) {
        if conn.usage.is_quiet(conn.proto.counters().sent, now, every) {
            if conn.proto.terms().version == Version::V2 {
                conn.proto.keep_alive();
                self.ready.add(conn);
            } else if !conn.sends.awaits_end() {
                self.write_nothing(conn);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_which_are_quiet_once_for_each_moment_however_often_control_is() {
        let mut fitting = Fitting::default();
        let looks = |fitting: &mut Fitting, every| (800..1600).filter(|&now| fitting.takes_quiet(now, every)).count();
        assert_eq!((looks(&mut fitting, 0), looks(&mut fitting, 800)), (0, 8), "at 800, 900 and so on");
    }

    #[test]
    fn windows_are_fitted_now_and_then_those_of_one_part_of_the_connections_after_the_other() {
        let mut fitting = Fitting::default();
        let mut at = |now| {
            let turn = fitting.take_due(now, 16);
            (0..2 * PARTS as usize).filter(|&slot| turn.has(slot)).collect::<Vec<_>>()
        };
        assert_eq!(at(1_000_000).len(), 16, "all of them at first");
        assert!(at(1_000_000).is_empty() && at(1_000_015).is_empty(), "however often they are asked for");
        let turns: Vec<_> = (1..=PARTS).map(|n| at(1_000_000 + 16 * n)).collect();
        assert_eq!((&turns[0][..], &turns[7][..]), (&[0, 8][..], &[7, 15][..]));
        assert!(at(1_000_143).is_empty());
        assert_eq!(at(1_000_144 + 3 * 16 - 1), [0, 1, 2, 8, 9, 10], "those that were left out meanwhile, too");
        assert_eq!(at(1_000_144 + 4 * 16 - 1), [3, 11]);
        assert_eq!(at(2_000_000).len(), 16, "each no more than once");
    }
}
