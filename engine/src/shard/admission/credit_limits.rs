//! Credit limits that follow the load, and keep-alive of quiet connections.
//!
//! The limits of busy connections grow while Receives are plentiful, and shrink to an equal share when they get short.
//! A keep-alive is a pure grant; in version 1 it is an RDMA Write of no bytes, which the peer's device acknowledges.
//!
//! A waiting peer is not visible here: a fast receiver replenishes each message at once. So the limit of a busy
//! connection grows until half of the shard's Receives are promised: they are posted anyway.

use super::credit_usage::moment;
use crate::config::RECEIVE_MARGIN;
use crate::fabric::Fabric;
use crate::proto::MIN_CREDITS;
use crate::shard::clock::nanoseconds;
use crate::shard::connection::Conn;
use crate::shard::connection::Stage;
use crate::shard::context::Context;
use crate::wire::Version;

/// Control-plane intervals between two checks of a credit limit. Each interval checks one of this many parts of the
/// connections, as a check of all would delay their messages.
const PARTS: u64 = 8;
/// Messages of a busy connection between two checks, in multiples of its credit limit.
const TURNOVERS: u64 = 8;

/// Schedule of credit limits and keep-alive.
#[derive(Debug, Default)]
pub(in crate::shard) struct CreditLimits {
    /// Next check, in nanoseconds.
    due: u64,
    /// Part of the connections due then.
    part: u64,
    /// Next keep-alive of quiet connections, in nanoseconds.
    keep_alive_due: u64,
}

/// The parts of the connections that are due.
#[derive(Clone, Copy)]
struct Due {
    first: u64,
    parts: u64,
}

impl Due {
    /// Whether the connection in this place of the table is due.
    fn has(self, slot: usize) -> bool {
        (slot as u64 + PARTS - self.first) % PARTS < self.parts
    }
}

impl CreditLimits {
    /// The due connections: one part after each `interval`, in nanoseconds; more after a pause.
    fn take_due(&mut self, now: u64, interval: u64) -> Due {
        let Some(late) = now.checked_sub(self.due) else { return Due { first: 0, parts: 0 } };
        let due = Due { first: self.part, parts: (late / interval.max(1) + 1).min(PARTS) };
        self.due = now.saturating_add(interval);
        self.part = (self.part + due.parts) % PARTS;
        due
    }

    /// Whether to check all connections for keep-alive. Many new connections, which hasten the control plane, cause no
    /// extra checks.
    fn take_keep_alive(&mut self, now: u64, every: u64) -> bool {
        let due = every != 0 && now >= self.keep_alive_due;
        if due {
            self.keep_alive_due = now.saturating_add(1).checked_next_multiple_of(moment(every)).unwrap_or(u64::MAX);
        }
        due
    }

    /// Part of step 5 of a turn: adapts credit limits, and sends keep-alives.
    pub(in crate::shard) fn adapt<F: Fabric>(&mut self, cx: &mut Context<F>) {
        let now = cx.clock.read();
        if cx.receives.ran_short() {
            cx.resume_grants();
        }
        let due = self.take_due(now, nanoseconds(cx.config.poll.control_interval));
        let every = nanoseconds(cx.config.timeouts.keep_alive);
        let keep_alive = self.take_keep_alive(now, every);
        if every != 0 && !cx.conns.slots().is_empty() {
            cx.schedule.wake_by(self.keep_alive_due);
        }
        if due.parts == 0 && !keep_alive {
            return;
        }
        let open = cx.conns.iter().count();
        cx.with_those(
            |slot| keep_alive || due.has(slot),
            |cx, conn| {
                if due.has(conn.qp().slot as usize) {
                    conn.pass_time(now);
                    fit_limit(cx, conn, open);
                }
                if keep_alive && conn.stage() == Stage::Open {
                    send_keep_alive(cx, conn, now, every);
                }
            },
        );
        cx.refill();
    }
}

/// Adapts the credit limit of one of `open` connections.
fn fit_limit<F: Fabric>(cx: &mut Context<F>, conn: &mut Conn, open: usize) {
    let received = conn.usage.count_received(conn.proto.counters().received);
    let total = cx.config.memory.receives.saturating_sub(RECEIVE_MARGIN);
    let free = cx.receives.unpromised().saturating_sub(RECEIVE_MARGIN);
    let credits = conn.proto.credits().credit_limit();
    let wanted = if free < total / 8 {
        credits.min((total / open.max(1)).saturating_sub(2) as u32)
    } else if received >= TURNOVERS * u64::from(credits) && free > total / 4 * 3 {
        let most = cx.config.limits.max_credits.saturating_sub(credits);
        credits + cx.receives.take_reserve(credits.min((free / 4) as u32).min(most))
    } else {
        credits
    };
    let wanted = wanted.max(MIN_CREDITS);
    // Version 1 without reverse calls has none.
    if wanted != credits && credits != 0 && conn.stage() == Stage::Open {
        conn.proto.set_credit_limit(wanted);
        conn.fit();
    }
    cx.rebalance(conn);
}

fn send_keep_alive<F: Fabric>(cx: &mut Context<F>, conn: &mut Conn, now: u64, every: u64) {
    if !conn.usage.needs_keep_alive(conn.proto.counters().sent, now, every) {
        return;
    }
    if conn.proto.terms().version == Version::V2 {
        conn.proto.keep_alive();
        cx.ready.add(conn);
    } else if !conn.sends.awaits_end() {
        cx.write_nothing(conn);
    }
}

impl<F: Fabric> Context<F> {
    /// Tells a connection whether Receives suffice for all peers after it grants one more message. It is not in the
    /// table now.
    #[inline]
    pub(in crate::shard) fn check_receives(&mut self, conn: &mut Conn) {
        let ready = self.receives.suffice() || self.suffices_without_spares(conn);
        conn.proto.set_receives_ready(ready);
    }

    /// Whether Receives suffice without the full reserve of each connection: calls may keep their buffers for long.
    #[cold]
    fn suffices_without_spares(&mut self, conn: &mut Conn) -> bool {
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
            self.receives.record_shortage();
        }
        // The Receives granted now are needed.
        conn.promise.set_spared(if suffice { own.saturating_sub(2) } else { own });
        self.receives.set_spared(self.stats.turns, others + conn.promise.spared());
        suffice
    }

    /// Receives that connections in the table do not need, as of this turn.
    #[cold]
    pub(in crate::shard) fn spared_in_turn(&mut self) -> u32 {
        self.receives.spared_in(self.stats.turns).unwrap_or_else(|| self.count_spared())
    }

    /// Whether Receives suffice for one more connection.
    pub(in crate::shard) fn spares_for_another(&mut self) -> bool {
        let spared = self.count_spared();
        self.receives.suffice_without(spared)
    }

    /// Counts the Receives that connections in the table do not need now. It runs once per turn, as it takes long with
    /// many connections.
    fn count_spared(&mut self) -> u32 {
        let mut all = 0;
        for conn in self.conns.iter_mut() {
            conn.promise.set_spared(conn.proto.status().spared);
            all += conn.promise.spared();
        }
        self.receives.set_spared(self.stats.turns, all);
        all
    }

    /// Updates the promise to a connection.
    pub(in crate::shard) fn rebalance(&mut self, conn: &mut Conn) {
        let (receives, overcommit) = (conn.proto.status().reserve, conn.proto.credits().overcommit());
        self.receives.promise(&mut conn.promise, receives, overcommit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_which_are_quiet_once_for_each_moment_however_often_control_is() {
        let mut limits = CreditLimits::default();
        let looks =
            |limits: &mut CreditLimits, every| (800..1600).filter(|&now| limits.take_keep_alive(now, every)).count();
        assert_eq!((looks(&mut limits, 0), looks(&mut limits, 800)), (0, 8), "at 800, 900 and so on");
    }

    #[test]
    fn windows_are_fitted_now_and_then_those_of_one_part_of_the_connections_after_the_other() {
        let mut limits = CreditLimits::default();
        let mut at = |now| {
            let due = limits.take_due(now, 16);
            (0..2 * PARTS as usize).filter(|&slot| due.has(slot)).collect::<Vec<_>>()
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
