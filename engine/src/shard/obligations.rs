//! Deadlines of what a peer owes.
//!
//! A peer has to receive its messages, answer RDMA Reads, grant credits for its replies, finish a message that it has
//! begun, and answer calls that this side has abandoned. Until then it holds memory or credits of the shard.
//!
//! A slow peer is not disconnected. Other bytes precede an obligation in the queue, so each byte moved in either
//! direction extends the deadline by its time at [`limits.min_rate`](crate::config::LimitsConfig::min_rate). Only the
//! bytes in front of the obligation count: other traffic does not extend the deadline without limit. If the device does
//! not report progress, the time of those bytes is granted in advance.
//!
//! A granted reply extends the deadline as much as a whole receive. Otherwise short replies would disconnect a peer with
//! few credits that grants slowly but steadily. The replies before the last one are bounded, and so is that time.
//!
//! The message path reads no clock for it. Periodic checks of the connections time each obligation that has not moved.

#[cfg(test)]
mod tests;

use super::clock::nanoseconds;
use super::connection::Conn;
use super::connection::Stage;
use super::connection::close_reason::{LocalClose, ObligationKind};
use super::context::Context;
use crate::fabric::{Fabric, Flow};
use crate::stats::ShardStats;

/// Checks of a connection within [`timeouts.progress`](crate::config::TimeoutConfig::progress).
const CHECKS: u64 = 8;

/// Unreported bytes that may precede an obligation: headers, and messages of the peer.
const SLACK: u64 = 256 << 10;

/// Counters of what a peer owes. Each changes when its item moves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PeerObligations {
    /// Sends so far, and those completed.
    pub(super) sends: u32,
    pub(super) completed: u32,
    /// Bytes of the RDMA Writes before them.
    pub(super) written: u64,
    /// Calls with posted RDMA Reads so far, and those completed.
    pub(super) fetches: u32,
    pub(super) fetched: u32,
    /// Replies that had to wait for a grant so far, and those granted.
    pub(super) replies: u32,
    pub(super) granted: u32,
    /// Bytes of waiting replies, if any waits for a grant.
    pub(super) waiting: u64,
    /// Number of the incomplete incoming message.
    pub(super) half_sent: Option<u32>,
    /// Late answers so far, while too many calls that this side has abandoned are without one.
    pub(super) withheld: Option<u32>,
}

/// What happened to a connection since its last check.
#[derive(Clone, Copy, Debug)]
struct Interval {
    nanos: u64,
    /// Bytes that the device reports, if it does.
    flow: Option<Flow>,
    /// Unreported bytes that may have to move first.
    unseen: u64,
    /// Bytes of a whole receive.
    receive: u64,
    /// Least rate of a peer, in bytes per second.
    min_rate: u64,
}

/// Times of an interval that concern one obligation, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Elapsed {
    nanos: u64,
    /// Time of the moved bytes at the least rate; `None` if the device does not report them.
    moved: Option<u64>,
    /// Time of the bytes still to move.
    queued: u64,
    /// Time of the granted replies, each as a whole receive.
    granted: u64,
}

/// Time that one obligation has taken.
#[derive(Clone, Copy, Debug, Default)]
struct ObligationTimer {
    of: Option<u32>,
    nanos: u64,
    /// Time by which moved bytes may still extend the deadline, in nanoseconds.
    extension: u64,
}

impl ObligationTimer {
    /// Checks it: returns the time waited, less the time of moved bytes.
    fn check(&mut self, of: Option<u32>, elapsed: &Elapsed) -> u64 {
        if of.is_none() || of != self.of {
            *self = Self { of, nanos: 0, extension: elapsed.queued };
            return 0;
        }
        self.nanos = self.nanos.saturating_add(elapsed.nanos).saturating_sub(elapsed.granted);
        let Some(moved) = elapsed.moved else { return self.nanos.saturating_sub(self.extension) };
        // The other direction may move bytes meanwhile. Its surplus does not reduce what is left.
        let used = moved.min(self.extension).min(self.nanos);
        self.extension -= used;
        self.nanos -= used;
        self.nanos
    }
}

/// Timer of items in a sequence: of the last item of the previous check. With the newest item, a peer that completes
/// one now and then would never be late.
#[derive(Clone, Copy, Debug, Default)]
struct SequenceTimer {
    mark: u32,
    timer: ObligationTimer,
}

impl SequenceTimer {
    /// Whether the awaited item is complete. Numbers wrap.
    fn is_done(&self, done: u32) -> bool {
        done.wrapping_sub(self.mark).cast_signed() >= 0
    }

    /// Compares the totals of all and of completed items.
    fn check(&mut self, all: u32, done: u32, elapsed: &Elapsed) -> u64 {
        if self.is_done(done) || all == done {
            self.mark = all;
        }
        self.timer.check((all != done).then_some(self.mark), elapsed)
    }
}

/// Timers of a peer's obligations, as of the last check.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ObligationTimers {
    sends: SequenceTimer,
    reads: SequenceTimer,
    replies: SequenceTimer,
    message: ObligationTimer,
    answers: ObligationTimer,
    /// Moved bytes.
    moved: u64,
    /// Granted replies.
    granted: u32,
    /// Bytes of RDMA Writes before the next Send to complete.
    written: u64,
}

impl ObligationTimers {
    /// Checks all: returns the longest wait, and its kind.
    fn check(&mut self, owed: PeerObligations, interval: &Interval) -> (u64, ObligationKind) {
        let time = |bytes: u64| {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(interval.min_rate.max(1));
            u64::try_from(nanos).unwrap_or(u64::MAX)
        };
        let moved = interval.flow.map(|flow| flow.moved.saturating_sub(std::mem::replace(&mut self.moved, flow.moved)));
        // An eighth exceeds the bytes of the headers.
        let queued = interval.flow.map_or(0, |flow| flow.queued.saturating_add(flow.queued / 8));
        let queued = time(queued.saturating_add(interval.unseen));
        let elapsed = Elapsed { nanos: interval.nanos, moved: moved.map(time), queued, granted: 0 };
        if self.sends.is_done(owed.completed) {
            self.written = owed.written;
        }
        // The last reply follows the bytes and grants of the others.
        let newly = owed.granted.wrapping_sub(std::mem::replace(&mut self.granted, owed.granted)).cast_signed();
        let granted = time(interval.receive).saturating_mul(newly.max(0) as u64);
        let of_replies = Elapsed { queued: queued.saturating_add(time(owed.waiting)), granted, ..elapsed };
        // An answer may be short, so bytes do not extend its deadline.
        let of_answers = Elapsed { moved: None, queued: 0, ..elapsed };
        let waits = [
            (self.sends.check(owed.sends, owed.completed, &elapsed), ObligationKind::Sends),
            (self.reads.check(owed.fetches, owed.fetched, &elapsed), ObligationKind::Reads),
            (self.replies.check(owed.replies, owed.granted, &of_replies), ObligationKind::Grant),
            (self.message.check(owed.half_sent, &elapsed), ObligationKind::Message),
            (self.answers.check(owed.withheld, &of_answers), ObligationKind::Answers),
        ];
        match waits.into_iter().rev().max_by_key(|wait| wait.0).unwrap_or((0, ObligationKind::Sends)) {
            // Each may have to wait for the other.
            (waited, ObligationKind::Sends) if waited > 0 && waited == waits[1].0 => {
                (waited, ObligationKind::SendsOrReads)
            }
            longest => longest,
        }
    }

    /// Whether anything is owed.
    fn is_any_owed(&self) -> bool {
        let sequences = [self.sends, self.reads, self.replies].map(|sequence| sequence.timer);
        sequences.iter().chain([&self.message, &self.answers]).any(|timer| timer.of.is_some())
    }
}

/// Number of parts in which connections are checked: a check of all at once would delay calls.
const PARTS: usize = 16;

/// Schedule of the checks.
#[derive(Debug, Default)]
pub(super) struct ObligationChecks {
    /// Time of each part's last check, in nanoseconds.
    checked: [u64; PARTS],
    /// Next part, and its time.
    part: usize,
    due: u64,
    /// Time when all are due.
    all_due: u64,
    /// Parts checked since the last obligation or work. After all of them, no check needs to interrupt a sleep.
    quiet: usize,
    /// Whether the last checks followed a pause.
    paused: bool,
    /// The shard's work until then, as [`work_of`] counts it.
    work: u64,
}

/// Count of turns with work and of started calls. It uses the shard's counters only: those of a device may need a
/// system call.
fn work_of(stats: &ShardStats) -> u64 {
    (stats.turns - stats.idle_turns).wrapping_add(stats.calls)
}

impl ObligationChecks {
    /// Starts the checks of each part every `every` nanoseconds: returns the parts to check now, with the nanoseconds to
    /// count since the last check of each. After a pause several are due, at most all.
    ///
    /// While this side was suspended, no peer could make progress, and messages may be unread: that time does not
    /// count. For repeated pauses, at most the time of two checks counts.
    fn begin(&mut self, now: u64, every: u64) -> [Option<u64>; PARTS] {
        let step = (every / PARTS as u64).max(1);
        let late = now.saturating_sub(self.due);
        let parts = (late / step).saturating_add(1).min(PARTS as u64);
        let was_paused = std::mem::replace(&mut self.paused, late > every.saturating_mul(2));
        let most = if self.paused && !was_paused { 0 } else { every.saturating_mul(2) };
        let mut due = [None; PARTS];
        for _ in 0..parts {
            let checked = std::mem::replace(&mut self.checked[self.part], now);
            due[self.part] = Some(now.saturating_sub(checked).min(most));
            self.part = (self.part + 1) % PARTS;
            self.quiet += 1;
        }
        (self.due, self.all_due) = (now.saturating_add(step), now.saturating_add(every));
        due
    }

    /// Time when a sleeping shard must check all parts, in nanoseconds. `work`: its work so far.
    fn next(&mut self, work: u64) -> u64 {
        if std::mem::replace(&mut self.work, work) != work {
            self.quiet = 0;
        }
        if self.quiet < PARTS { self.all_due } else { u64::MAX }
    }

    /// Part of step 5 of a turn: closes the connections whose peers are late.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut Context<F>) {
        let now = cx.clock.read();
        if now >= self.due {
            self.end_stalled(cx, now);
        }
        self.before_sleep(cx);
    }

    /// Limits a sleep to the next check of all connections: peers may owe something for work since the last check.
    pub(super) fn before_sleep<F: Fabric>(&mut self, cx: &mut Context<F>) {
        let next = self.next(work_of(&cx.stats));
        cx.schedule.wake_by(next);
    }

    /// Checks the due connections, and closes those whose peers owe something for longer than
    /// [`timeouts.progress`](crate::config::TimeoutConfig::progress).
    #[cold]
    fn end_stalled<F: Fabric>(&mut self, cx: &mut Context<F>, now: u64) {
        let timeout = nanoseconds(cx.config.timeouts.progress);
        let every = (timeout / CHECKS).max(nanoseconds(cx.config.poll.control_interval)).max(1);
        let due = self.begin(now, every);
        cx.with_those(
            |slot| due[slot % PARTS].is_some(),
            |cx, conn| {
                let elapsed = due[conn.qp().slot as usize % PARTS].unwrap_or(0);
                let ended = self.check(cx, conn, elapsed, timeout);
                if !ended && conn.obligations.sends.timer.of.is_some() {
                    // The last Sends may be unsignaled, so completion is requested. It is requested at once: later work
                    // requests follow later Reads, whose bytes do not count.
                    cx.request_completion(conn);
                }
            },
        );
    }

    /// Checks one connection; true if it closes.
    fn check<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, nanos: u64, timeout: u64) -> bool {
        if matches!(conn.stage(), Stage::Connecting | Stage::Reconnecting) {
            return false;
        }
        let in_device = cx.fabric.holds_sends(conn.qp());
        let flow = cx.fabric.flow(conn.qp());
        let owed = conn.owed(in_device, cx.config.limits.max_abandoned);
        let rest = if owed.half_sent.is_some() { cx.config.wire.reassemble_up_to as u64 } else { 0 };
        // If the device reports bytes, those not yet posted may come first; otherwise all known ones.
        let unseen = rest
            + match flow {
                Some(_) => SLACK + conn.sends.unposted(),
                None => conn.served.outstanding_reads().bytes as u64 + (owed.written - conn.obligations.written),
            };
        let (receive, min_rate) = (cx.config.wire.receive_size as u64, cx.config.limits.min_rate);
        let (waited, why) = conn.obligations.check(owed, &Interval { nanos, flow, unseen, receive, min_rate });
        if conn.obligations.is_any_owed() {
            self.quiet = 0;
        }
        if waited < timeout.max(1) || conn.has_ended() {
            return false;
        }
        cx.stats.peers_stalled += 1;
        let why = LocalClose::ProgressTimeout(why.text());
        let peer = conn.who();
        cx.warn("connections ended for what their peers owe", format_args!("{peer}: connection ended: {why}"));
        conn.end_for(why);
        true
    }
}
