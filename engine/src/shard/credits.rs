//! Credit limits that follow the load: those of busy connections grow while Receives are plenty, and shrink
//! to an equal share when they get short. And what keeps quiet connections alive: a pure grant; in version 1,
//! which has no such message, an RDMA Write of no bytes, which the peer's device acknowledges by itself.
//!
//! Whether a peer waits for credits is not to be seen from here: a receiver that keeps up replenishes each
//! message at once. So a credit limit grows where it is turned over often, and only as far as half of the
//! shard's Receives go: they are posted anyway.

use super::clock::nanoseconds;
use super::conn::Conn;
use super::context::Context;
use super::stage::Stage;
use crate::config::RECEIVE_MARGIN;
use crate::fabric::Fabric;
use crate::proto::MIN_CREDITS;
use crate::wire::Version;

/// Of the usual intervals between looks at the control plane, so many are between two looks at a credit limit: at each
/// of them one of so many parts of the connections is looked at, as a look at all of many would hold up their messages.
const PARTS: u64 = 8;
/// How often a credit limit is turned over between two looks by a connection that is busy.
const TURNOVERS: u64 = 8;
/// In the time between two messages that keep a connection alive there are so many moments at which they go out.
const SLOTS: u64 = 8;

/// How much is made of a connection's credits, as of the last look.
#[derive(Debug, Default)]
pub(super) struct Use {
    /// Messages that it had sent and received.
    sent: u64,
    received: u64,
    /// Since when it has sent none, in nanoseconds.
    quiet_since: u64,
}

impl Use {
    /// It is made again: the messages are counted from the start.
    pub(super) fn restart(&mut self) {
        (self.sent, self.received) = (0, 0);
    }

    /// So many messages have been received: how many since the last look?
    fn turned(&mut self, received: u64) -> u64 {
        received - std::mem::replace(&mut self.received, received)
    }

    /// So many messages have been sent by now; true if there was none for so long that one is due.
    fn is_quiet(&mut self, sent: u64, now: u64, every: u64) -> bool {
        let quiet = sent == self.sent && now >= self.due(every);
        if sent != self.sent || quiet {
            // The look is soon after the moment that it is for.
            (self.sent, self.quiet_since) = (sent, now - now % moment(every));
        }
        quiet
    }

    /// When a message is due for want of others. Up to an eighth of the time later, as the messages of many
    /// connections go out together then: each time costs an idle shard a sleep and the polls before it.
    fn due(&self, every: u64) -> u64 {
        self.quiet_since.saturating_add(every).next_multiple_of(moment(every))
    }
}

/// From one moment to the next at which messages go out that keep connections alive, in nanoseconds.
fn moment(every: u64) -> u64 {
    (every / SLOTS).max(1)
}

/// When windows are fitted, and when it is looked which connections are quiet.
#[derive(Debug, Default)]
pub(super) struct Fitting {
    /// In nanoseconds.
    due: u64,
    /// The part of the connections whose turn it is then.
    part: u64,
    /// The next moment at which quiet connections are kept alive, in nanoseconds.
    alive_due: u64,
}

impl Fitting {
    /// The connections whose turn it is: one part of them after each `interval`, in nanoseconds; more if there was no
    /// look for longer.
    fn take_due(&mut self, now: u64, interval: u64) -> Turn {
        let Some(late) = now.checked_sub(self.due) else { return Turn { first: 0, parts: 0 } };
        let turn = Turn { first: self.part, parts: (late / interval.max(1) + 1).min(PARTS) };
        self.due = now.saturating_add(interval);
        self.part = (self.part + turn.parts) % PARTS;
        turn
    }

    /// Whether to look which connections are quiet: all of them, at each moment. However often the control plane is
    /// looked at, each of many connections that are being made costs no look at the others.
    fn takes_quiet(&mut self, now: u64, every: u64) -> bool {
        let due = every != 0 && now >= self.alive_due;
        if due {
            self.alive_due = now.saturating_add(1).checked_next_multiple_of(moment(every)).unwrap_or(u64::MAX);
        }
        due
    }
}

/// Whose turn it is.
struct Turn {
    first: u64,
    parts: u64,
}

impl Turn {
    fn is_nobodys(&self) -> bool {
        self.parts == 0
    }

    /// Of the connection in this place of the table.
    fn has(&self, slot: usize) -> bool {
        (slot as u64 + PARTS - self.first) % PARTS < self.parts
    }
}

impl<F: Fabric> Context<F> {
    /// Receives are posted for all that peers may send when `conn`, which is not in the table now, has let
    /// its peer send one more.
    #[inline]
    pub(super) fn receives_ok(&mut self, conn: &mut Conn) -> bool {
        self.receives.suffice() || self.spares_receives(conn)
    }

    /// The same, while there are fewer than all reserves together: calls may have their buffers for long.
    #[cold]
    fn spares_receives(&mut self, conn: &mut Conn) -> bool {
        let own = conn.proto.spared();
        let mut others = match self.receives.spared_in(self.stats.polls) {
            Some(all) => all.saturating_sub(conn.promise.spared()),
            None => self.count_spared(),
        };
        if !self.receives.suffice_without(others + own) {
            // Calls may have come meanwhile.
            others = self.count_spared();
        }
        let suffice = self.receives.suffice_without(others + own);
        if !suffice {
            self.receives.note_shortage();
        }
        // What its peer is told of now is needed.
        conn.promise.spare(if suffice { own.saturating_sub(2) } else { own });
        self.receives.set_spared(self.stats.polls, others + conn.promise.spared());
        suffice
    }

    /// Receives that those in the table do not need, as of this turn.
    #[cold]
    pub(super) fn spared_in_turn(&mut self) -> u32 {
        self.receives.spared_in(self.stats.polls).unwrap_or_else(|| self.count_spared())
    }

    /// Whether there are Receives for one more connection.
    pub(super) fn spares_for_another(&mut self) -> bool {
        let spared = self.count_spared();
        self.receives.suffice_without(spared)
    }

    /// Counts the Receives that those in the table do not need for now. Where there are many connections it takes its
    /// time: once in a turn must do.
    fn count_spared(&mut self) -> u32 {
        let mut all = 0;
        for conn in self.conns.iter_mut() {
            conn.promise.spare(conn.proto.spared());
            all += conn.promise.spared();
        }
        self.receives.set_spared(self.stats.polls, all);
        all
    }

    /// Part of step 5 of a turn: fits credit limits to their use, now and then, and keeps connections alive.
    pub(super) fn adapt(&mut self, fitting: &mut Fitting) {
        let now = self.clock.read();
        if self.receives.ran_short() {
            self.relieved();
        }
        let turn = fitting.take_due(now, nanoseconds(self.config.control_interval));
        let every = nanoseconds(self.config.keep_alive);
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
        let total = self.config.receives.saturating_sub(RECEIVE_MARGIN);
        let free = self.receives.unpromised().saturating_sub(RECEIVE_MARGIN);
        let credits = conn.proto.credits().credit_limit();
        let share = (total / open.max(1)).saturating_sub(2) as u32;
        let wanted = if free < total / 8 {
            credits.min(share)
        } else if turned >= TURNOVERS * u64::from(credits) && free > total / 4 * 3 {
            credits.saturating_add(credits.min((free / 4) as u32)).min(self.config.max_credits.max(credits))
        } else {
            credits
        };
        let wanted = wanted.max(MIN_CREDITS);
        // Version 1 of a side that takes no calls has none.
        if wanted != credits && credits != 0 && conn.stage() == Stage::Open {
            conn.proto.set_credit_limit(wanted);
            conn.fit();
        }
        self.rebalance(conn);
    }

    /// Counts what a connection was promised as it is now.
    pub(super) fn rebalance(&mut self, conn: &mut Conn) {
        let (receives, overcommit) = (conn.proto.reserve(), conn.proto.credits().overcommit());
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
    fn a_connection_is_quiet_once_for_each_time_that_passes() {
        let mut usage = Use::default();
        assert!(!usage.is_quiet(3, 100, 10), "it has sent three");
        assert!(!usage.is_quiet(3, 109, 10));
        assert!(usage.is_quiet(3, 110, 10));
        assert!(!usage.is_quiet(3, 119, 10), "one message is enough for a while");
        assert!(!usage.is_quiet(4, 120, 10), "that message");
        assert_eq!(usage.quiet_since, 120);
    }

    #[test]
    fn connections_that_fell_quiet_one_after_the_other_are_kept_alive_together() {
        let every = 8000;
        let mut all: Vec<Use> = (1..=1000).map(|since| Use { quiet_since: since, ..Use::default() }).collect();
        assert!(all.iter().all(|usage| usage.due(every) == 9000));
        assert!(!all.iter_mut().any(|usage| usage.is_quiet(0, 8999, every)));
        assert!(all.iter_mut().all(|usage| usage.is_quiet(0, 9000, every)));
        assert!(all.iter().all(|usage| usage.due(every) == 17_000), "and not later each time");
    }

    #[test]
    fn it_is_looked_which_are_quiet_once_for_each_moment_however_often_control_is() {
        let mut fitting = Fitting::default();
        let looks = |fitting: &mut Fitting, every| (800..1600).filter(|&now| fitting.takes_quiet(now, every)).count();
        assert_eq!((looks(&mut fitting, 0), looks(&mut fitting, 800)), (0, 8), "at 800, 900 and so on");
        let mut usage = Use::default();
        assert!(!usage.is_quiet(1, 1203, 800), "it is a look for 1200");
        assert_eq!(usage.due(800), 2000);
    }

    #[test]
    fn what_was_received_is_counted_once_and_from_the_start_when_it_is_made_again() {
        let mut usage = Use::default();
        assert_eq!((usage.turned(5), usage.turned(5), usage.turned(12)), (5, 0, 7));
        usage.restart();
        assert_eq!(usage.turned(2), 2);
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
