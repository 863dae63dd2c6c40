//! Periodic checks of connections, in parts, because a check of all together would delay their messages.
//!
//! # Obligations
//!
//! A connection closes if an obligation of its peer is open for longer than
//! [`timeouts.progress`](crate::config::TimeoutConfig::progress).
//!
//! # Credit limits, and keep-alive of quiet connections
//!
//! The limits of busy connections grow while Receives are plentiful, and shrink to an equal share when Receives are
//! short. A keep-alive is a pure grant; in version 1 it is an RDMA Write of no bytes, which the peer's device
//! acknowledges.
//!
//! The shard cannot see that a peer waits for credits, because a fast receiver replaces each used credit immediately.
//! So the limit of a busy connection grows while more than three quarters of the shard's Receives are unreserved. This
//! costs nothing, because unreserved Receives are posted anyway.
//!
//! # Calls without an answer
//!
//! Calls of this side that have been without an answer for a second are logged. The checks age the calls, so that the
//! message path reads no clock for them.

use std::mem;

use log::Level;

use super::admission::receive_budget::keep_alive_tick;
use super::clock::nanoseconds;
use super::connection::close_reason::LocalClose;
use super::connection::{Conn, Stage};
use super::context::ShardContext;
use super::obligations::{Interval, PeerObligations};
use crate::config::RECEIVE_MARGIN;
use crate::fabric::Fabric;
use crate::proto::MIN_CREDITS;
use crate::service::ProcedureName;
use crate::stats::ShardStats;
use crate::wire::Version;

/// Number of parts in which connections are checked.
const PARTS: usize = 16;
/// Checks of obligations within [`timeouts.progress`](crate::config::TimeoutConfig::progress).
const CHECKS: u64 = 8;
/// Allowance for bytes that the device sends before the awaited ones and does not report: headers, and messages of the
/// peer.
const SLACK: u64 = 256 << 10;
/// Control-plane intervals between two checks of a credit limit.
const INTERVALS: u64 = 8;
/// Least number of messages of a busy connection between two checks, in multiples of its credit limit.
const TURNOVERS: u64 = 8;

/// Nanoseconds between two checks of a connection's unanswered calls: a second.
const UNANSWERED_INTERVAL: u64 = 1_000_000_000;
/// Number of connections up to which the unanswered calls of all are checked together.
const MAX_CHECKED_TOGETHER: usize = 64;

/// For each part that is due, the nanoseconds since its last check. A connection's part is its slot modulo [`PARTS`].
type Due = [Option<u64>; PARTS];

/// Schedule of a periodic check, part by part.
#[derive(Debug, Default)]
struct Rounds {
    /// Time of each part's last check, in nanoseconds.
    checked: [u64; PARTS],
    /// Next part, and the time of its check in nanoseconds.
    part: usize,
    due: u64,
}

impl Rounds {
    /// Starts the checks that are due. Each part is due every `interval` nanoseconds; after a pause several parts are
    /// due, each once.
    fn begin(&mut self, now: u64, interval: u64) -> Due {
        let (mut due, step) = ([None; PARTS], (interval / PARTS as u64).max(1));
        let Some(late) = now.checked_sub(self.due) else { return due };
        for _ in 0..(late / step).saturating_add(1).min(PARTS as u64) {
            let checked = mem::replace(&mut self.checked[self.part], now);
            due[self.part] = Some(now.saturating_sub(checked));
            self.part = (self.part + 1) % PARTS;
        }
        self.due = now.saturating_add(step);
        due
    }
}

/// Schedule of the checks of obligations.
#[derive(Debug, Default)]
pub(super) struct ObligationChecks {
    rounds: Rounds,
    /// Time when all parts are due.
    all_due: u64,
    /// Parts checked since the last obligation or work. Once all were checked, no check needs to interrupt a sleep.
    quiet: usize,
    /// Whether the last checks followed a pause.
    paused: bool,
    /// The shard's work at the last call of [`next_full_check`](Self::next_full_check), as [`work_of`] counts it.
    work: u64,
}

/// Count of turns with work and of started calls. It uses the shard's counters only: those of a device may need a
/// system call.
fn work_of(stats: &ShardStats) -> u64 {
    (stats.turns - stats.idle_turns).wrapping_add(stats.calls)
}

impl ObligationChecks {
    /// Starts the checks that are due, each part every `interval` nanoseconds.
    ///
    /// The time of a pause counts as 0, because peers cannot make progress while this side is suspended, and their
    /// messages may be unread. Each further pause in a row counts as at most two intervals.
    fn begin(&mut self, now: u64, interval: u64) -> Due {
        let is_pause = now.saturating_sub(self.rounds.due) > interval.saturating_mul(2);
        let was_paused = mem::replace(&mut self.paused, is_pause);
        let max_nanos = if is_pause && !was_paused { 0 } else { interval.saturating_mul(2) };
        let due = self.rounds.begin(now, interval).map(|part| part.map(|nanos| nanos.min(max_nanos)));
        self.quiet += due.iter().flatten().count();
        self.all_due = now.saturating_add(interval);
        due
    }

    /// Time when a sleeping shard must check all parts, in nanoseconds. `work` is the shard's work so far.
    fn next_full_check(&mut self, work: u64) -> u64 {
        if mem::replace(&mut self.work, work) != work {
            self.quiet = 0;
        }
        if self.quiet < PARTS { self.all_due } else { u64::MAX }
    }

    /// Closes the connections whose peers are late; part of step 5 of a turn.
    pub(super) fn run_checks<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        let now = cx.clock.read();
        if now >= self.rounds.due {
            self.end_stalled(cx, now);
        }
        self.before_sleep(cx);
    }

    /// Limits a sleep to the next check of all connections: peers may have obligations from work since the last check.
    pub(super) fn before_sleep<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        cx.schedule.wake_by(self.next_full_check(work_of(&cx.stats)));
    }

    /// Checks the due connections, and closes those whose peers are late.
    fn end_stalled<F: Fabric>(&mut self, cx: &mut ShardContext<F>, now: u64) {
        let timeout = nanoseconds(cx.config.timeouts.progress);
        let interval = (timeout / CHECKS).max(nanoseconds(cx.config.poll.control_interval)).max(1);
        let due = self.begin(now, interval);
        cx.with_slots(
            |slot| due[slot % PARTS].is_some(),
            |cx, conn| {
                let nanos = due[conn.qp().slot as usize % PARTS].unwrap_or(0);
                if !self.check(cx, conn, nanos, timeout) && conn.obligations.awaits_sends() {
                    // The last Sends may be unsignaled, so their completion is requested. A signaled request that
                    // follows later Reads would complete only after these, and their bytes do not extend the deadline.
                    cx.request_completion(conn);
                }
            },
        );
    }

    /// Checks one connection; returns true if it closes.
    fn check<F: Fabric>(&mut self, cx: &mut ShardContext<F>, conn: &mut Conn, nanos: u64, timeout: u64) -> bool {
        if matches!(conn.stage(), Stage::Connecting | Stage::Reconnecting) {
            return false;
        }
        let (in_device, flow) = (cx.fabric.holds_sends(conn.qp()), cx.fabric.flow(conn.qp()));
        let current = obligations_of(conn, in_device, cx.config.limits.max_abandoned);
        let unfinished_message = if current.half_sent.is_some() { cx.config.wire.reassemble_up_to as u64 } else { 0 };
        // The device does not report bytes that are not posted yet. If it reports no bytes at all, those of all
        // outstanding Reads and Writes are unseen.
        let unseen = unfinished_message
            + match flow {
                Some(_) => SLACK + conn.sends.unposted(),
                None => conn.served.outstanding_reads().bytes as u64 + (current.written - conn.obligations.written),
            };
        let (receive, min_rate) = (cx.config.wire.receive_size as u64, cx.config.limits.min_rate);
        let (waited, why) = conn.obligations.check(current, &Interval { nanos, flow, unseen, receive, min_rate });
        if conn.obligations.is_any_owed() {
            self.quiet = 0;
        }
        if waited < timeout.max(1) || conn.has_ended() {
            return false;
        }
        cx.stats.peers_stalled += 1;
        let why = LocalClose::ProgressTimeout(why);
        let peer = conn.log_name();
        cx.warn(
            "connections ended because their peers made no progress",
            format_args!("{peer}: connection ended: {why}"),
        );
        conn.end_for(why);
        true
    }
}

/// Obligations of the peer. `in_device` means that the device holds memory of this connection.
fn obligations_of(conn: &Conn, in_device: bool, max_abandoned: usize) -> PeerObligations {
    // Sends that hold no memory of this side are no obligation, because a busy peer may delay their completions.
    let status = conn.proto.status();
    let holds = in_device || !conn.sends.is_empty() || status.has_replies;
    let (sends, completed) = conn.sends.numbers();
    let (read_calls, read_calls_done) = conn.served.read_calls();
    PeerObligations {
        sends,
        completed: if holds { completed } else { sends },
        written: conn.sends.written_so_far(),
        read_calls,
        read_calls_done,
        queued_replies: status.queued,
        sent_replies: status.sent,
        waiting: if status.queued == status.sent { 0 } else { conn.served.waiting_bytes() },
        half_sent: status.partial_message,
        withheld: conn.proto.calls().withheld_answers(max_abandoned, conn.proto.credits()),
    }
}

/// Schedule of credit limits and keep-alive.
#[derive(Debug, Default)]
pub(super) struct CreditLimits {
    rounds: Rounds,
    /// Next keep-alive of quiet connections, in nanoseconds.
    keep_alive_due: u64,
}

impl CreditLimits {
    /// Whether to check all connections for keep-alive now. Many new connections, which make the control plane run more
    /// often, cause no extra checks.
    fn take_keep_alive(&mut self, now: u64, interval: u64) -> bool {
        let due = interval != 0 && now >= self.keep_alive_due;
        if due {
            self.keep_alive_due =
                now.saturating_add(1).checked_next_multiple_of(keep_alive_tick(interval)).unwrap_or(u64::MAX);
        }
        due
    }

    /// Adapts credit limits, and sends keep-alives; part of step 5 of a turn.
    pub(super) fn adapt_limits<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        let now = cx.clock.read();
        cx.resume_grants();
        let due = self.rounds.begin(now, INTERVALS * nanoseconds(cx.config.poll.control_interval));
        let interval = nanoseconds(cx.config.timeouts.keep_alive);
        let keep_alive = self.take_keep_alive(now, interval);
        if interval != 0 && !cx.conns.slots().is_empty() {
            cx.schedule.wake_by(self.keep_alive_due);
        }
        if due == [None; PARTS] && !keep_alive {
            return;
        }
        let open = cx.conns.iter().count();
        cx.with_slots(
            |slot| keep_alive || due[slot % PARTS].is_some(),
            |cx, conn| {
                if due[conn.qp().slot as usize % PARTS].is_some() {
                    conn.advance_time(now);
                    fit_limit(cx, conn, open);
                }
                if keep_alive && conn.stage() == Stage::Open {
                    send_keep_alive(cx, conn, now, interval);
                }
            },
        );
        cx.refill();
    }
}

/// Adapts the credit limit of one of `open` connections.
fn fit_limit<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, open: usize) {
    let received = conn.usage.count_received(conn.proto.counters().received);
    let total = cx.config.memory.receives.saturating_sub(RECEIVE_MARGIN);
    let free = cx.memory.receives.reservable().saturating_sub(RECEIVE_MARGIN);
    let credits = conn.proto.credits().credit_limit();
    let is_busy = received >= TURNOVERS * u64::from(credits);
    let (are_short, are_plentiful) = (free < total / 8, free > total / 4 * 3);
    let wanted = if are_short {
        credits.min((total / open.max(1)).saturating_sub(2) as u32)
    } else if is_busy && are_plentiful {
        let max_growth = cx.config.limits.max_credits.saturating_sub(credits);
        credits + cx.memory.receives.take_surplus(credits.min((free / 4) as u32).min(max_growth))
    } else {
        credits
    };
    let wanted = wanted.max(MIN_CREDITS);
    // A version 1 client without reverse calls grants no credits.
    if wanted != credits && credits != 0 && conn.stage() == Stage::Open {
        conn.proto.set_credit_limit(wanted);
        conn.grow_served_slots();
    }
    cx.update_reservation(conn);
}

fn send_keep_alive<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn, now: u64, interval: u64) {
    if !conn.usage.needs_keep_alive(conn.proto.counters().sent, now, interval) {
        return;
    }
    if conn.proto.terms().version == Version::V2 {
        conn.proto.request_keep_alive();
        cx.ready.add(conn);
    } else if !conn.sends.awaits_completion() {
        cx.write_empty(conn);
    }
}

/// Schedule of the checks for calls of this side without an answer.
#[derive(Debug, Default)]
pub(super) struct UnansweredCalls {
    /// Time of each part's next check, in nanoseconds.
    due: [u64; PARTS],
    /// Next part.
    part: usize,
}

impl UnansweredCalls {
    /// Takes the next part, if it is due.
    fn take_due(&mut self, now: u64) -> Option<usize> {
        let part = self.part;
        if now < self.due[part] {
            return None;
        }
        self.due[part] = now.saturating_add(UNANSWERED_INTERVAL);
        self.part = (part + 1) % PARTS;
        Some(part)
    }

    /// Logs calls without an answer, by procedure; part of a control-plane run.
    pub(super) fn report<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        let now = cx.clock.read();
        let parts = if cx.conns.slots().len() <= MAX_CHECKED_TOGETHER { PARTS } else { 1 };
        for _ in 0..parts {
            let Some(part) = self.take_due(now) else { return };
            cx.with_slots(|slot| slot % PARTS == part, report_unanswered);
        }
    }
}

/// Ages the calls on one connection, and logs those without an answer.
fn report_unanswered<F: Fabric>(cx: &mut ShardContext<F>, conn: &mut Conn) {
    let mut old = conn.proto.age_calls();
    old.sort_unstable();
    for calls in old.chunk_by(|call, next| call == next) {
        log_unanswered(cx, conn, calls[0], calls.len());
    }
}

/// Logs the calls of one procedure. Its number is known modulo 2^16, and its program is the one called last on the
/// connection, because storing both with each call would slow down all calls.
#[cold]
fn log_unanswered<F: Fabric>(cx: &mut ShardContext<F>, conn: &Conn, procedure: u16, calls: usize) {
    let (program, version) = conn.calls.program;
    let name = ProcedureName { program, version, procedure: procedure.into() };
    let line = format_args!(
        "{}: {calls} calls of {name} (the program called last on this connection) have had no answer for a second; \
         unanswered calls hold credits (ClientCall::timeout, limits.max_abandoned)",
        conn.log_name()
    );
    cx.log_for_procedure(Level::Warn, "calls without an answer for a second", Some(name), line);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interval of each part.
    const INTERVAL: u64 = 10 * PARTS as u64;

    #[test]
    fn each_part_is_due_once_per_interval_and_after_a_pause_all_are() {
        let mut rounds = Rounds::default();
        let mut at = |now| {
            let due = rounds.begin(now, INTERVAL);
            (0..2 * PARTS).filter(|&slot| due[slot % PARTS].is_some()).collect::<Vec<_>>()
        };
        assert_eq!(at(1_000_000).len(), 32, "all parts are due at first");
        assert!(at(1_000_000).is_empty() && at(1_000_009).is_empty(), "no part is due again immediately");
        let turns: Vec<_> = (1..=PARTS as u64).map(|n| at(1_000_000 + 10 * n)).collect();
        assert_eq!((&turns[0][..], &turns[15][..]), (&[0, 16][..], &[15, 31][..]));
        assert!(at(1_000_169).is_empty());
        assert_eq!(at(1_000_170 + 2 * 10), [0, 1, 2, 16, 17, 18], "the missed parts are due, too");
        assert_eq!(at(1_000_170 + 3 * 10), [3, 19]);
        assert_eq!(at(2_000_000).len(), 32, "after a pause each part is due once");
    }

    #[test]
    fn keep_alive_is_due_once_per_tick() {
        let mut limits = CreditLimits::default();
        let due = |limits: &mut CreditLimits, interval| {
            (800..1600).filter(|&now| limits.take_keep_alive(now, interval)).count()
        };
        assert_eq!((due(&mut limits, 0), due(&mut limits, 800)), (0, 8), "at 800, 900 and so on");
    }

    #[test]
    fn a_pause_does_not_count_as_delay_of_a_peer() {
        let mut checks = ObligationChecks::default();
        assert_eq!(checks.begin(10_000, INTERVAL), [Some(0); PARTS], "after a pause all parts are due");
        assert_eq!(
            checks.begin(20_000, INTERVAL),
            [Some(2 * INTERVAL); PARTS],
            "the second pause in a row counts as two checks"
        );
        assert_eq!(checks.begin(checks.rounds.due, INTERVAL)[0], Some(10));
        assert_eq!(checks.begin(u64::MAX, INTERVAL), [Some(0); PARTS]);
    }

    #[test]
    fn parts_are_checked_in_turn() {
        let mut checks = ObligationChecks::default();
        checks.begin(10_000, INTERVAL);
        for part in 0..PARTS {
            let turn = checks.begin(checks.rounds.due, INTERVAL);
            let checked: Vec<_> = (0..PARTS).filter(|&other| turn[other].is_some()).collect();
            assert_eq!((checked, turn[part]), (vec![part], Some(10 + 10 * part as u64)));
        }
        let turn = checks.begin(checks.rounds.due + 20, INTERVAL);
        assert_eq!(
            turn.iter().filter(|part| part.is_some()).count(),
            3,
            "two intervals late, so two more parts are due"
        );
        assert_eq!(turn[..3], [Some(INTERVAL + 20), Some(INTERVAL + 10), Some(INTERVAL)]);
    }

    #[test]
    fn all_parts_are_checked_after_a_sleep_unless_nothing_was_owed_or_done() {
        let mut checks = ObligationChecks::default();
        checks.begin(10_000, INTERVAL);
        assert_eq!(checks.next_full_check(0), u64::MAX, "no obligation was found");
        assert_eq!(checks.next_full_check(1), 10_000 + INTERVAL, "the work since then may have caused an obligation");
        assert_eq!(checks.begin(checks.all_due, INTERVAL), [Some(INTERVAL); PARTS]);
        assert_eq!(checks.next_full_check(1), u64::MAX);
        // This part has an obligation.
        checks.begin(checks.rounds.due, INTERVAL);
        checks.quiet = 0;
        assert_eq!(checks.next_full_check(1), checks.rounds.due + INTERVAL - 10);
    }
}
