//! Deadlines of a peer's duties.
//!
//! The duties are to receive its messages, answer RDMA Reads, grant credits for its replies, finish a message, and
//! answer calls that this side has abandoned. Until then it holds memory or credits of the shard.
//!
//! A slow peer is not disconnected. Other bytes precede a debt in the queue, so each byte moved in either direction
//! pays for its time at [`limits.min_rate`](crate::config::LimitsConfig::min_rate). Only the bytes in front of the debt
//! pay: other traffic does not extend the deadline without limit. If the device does not report progress, those bytes
//! are paid for in advance.
//!
//! A granted reply pays as much as a whole receive. Otherwise short replies would disconnect a peer with few credits
//! that grants slowly but steadily. The replies before the last one are bounded, and so is their pay.
//!
//! The message path reads no clock for it. Periodic checks of the connections time each debt that has not moved.

#[cfg(test)]
mod tests;

use super::clock::nanoseconds;
use super::close_reason::{LocalClose, Stall};
use super::conn::Conn;
use super::context::Context;
use super::stage::Stage;
use crate::config::Config;
use crate::fabric::{Fabric, Flow};
use crate::stats::ShardStats;

/// Checks of a connection within [`timeouts.progress`](crate::config::TimeoutConfig::progress).
const LOOKS: u64 = 8;

/// Unreported bytes that may precede the debt: headers, and messages of the peer.
const SLACK: u64 = 256 << 10;

/// Counters of awaited items. Each changes when its item moves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Owed {
    /// Sends so far, and those completed.
    pub(super) sends: u32,
    pub(super) left: u32,
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

/// Time between two checks of a connection, and the bytes moved in it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Passed {
    /// In nanoseconds.
    nanos: u64,
    /// Time of the moved bytes at the least rate, in nanoseconds; `None` if the device does not report them.
    moved: Option<u64>,
    /// Time of the bytes still to move.
    queued: u64,
    /// Time of the replies still to be sent.
    waiting: u64,
    /// Time of a whole receive.
    receive: u64,
    /// Time of the granted replies, each as a whole receive.
    granted: u64,
}

/// Wait for one debt.
#[derive(Clone, Copy, Debug, Default)]
struct Stopwatch {
    of: Option<u32>,
    nanos: u64,
    /// Time that bytes may still pay for, in nanoseconds.
    payable: u64,
}

impl Stopwatch {
    /// Checks it: returns the time waited, less the time that bytes have paid for.
    fn waited(&mut self, of: Option<u32>, passed: &Passed) -> u64 {
        if of.is_none() || of != self.of {
            *self = Self { of, nanos: 0, payable: passed.queued };
            return 0;
        }
        self.nanos = self.nanos.saturating_add(passed.nanos).saturating_sub(passed.granted);
        let Some(moved) = passed.moved else { return self.nanos.saturating_sub(self.payable) };
        // The other direction may move bytes meanwhile. Its surplus does not reduce the time left to pay.
        let paid = moved.min(self.payable).min(self.nanos);
        self.payable -= paid;
        self.nanos = self.nanos.saturating_sub(paid);
        self.nanos
    }
}

/// Wait for items in a sequence: for the last item of the previous check. With the newest item, a peer that completes
/// one now and then would never be late.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    mark: u32,
    watch: Stopwatch,
}

impl Queue {
    /// Whether the awaited item is complete.
    fn is_done(&self, done: u32) -> bool {
        done.wrapping_sub(self.mark).cast_signed() >= 0
    }

    /// Compares the totals of all and of completed items. Numbers wrap.
    fn waited(&mut self, all: u32, done: u32, passed: &Passed) -> u64 {
        if self.is_done(done) || all == done {
            self.mark = all;
        }
        self.watch.waited((all != done).then_some(self.mark), passed)
    }
}

/// Waits for a peer, as of the last check.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    sends: Queue,
    reads: Queue,
    replies: Queue,
    message: Stopwatch,
    answers: Stopwatch,
    /// Moved bytes.
    moved: u64,
    /// Granted replies.
    granted: u32,
    /// Bytes of RDMA Writes before the next Send to complete.
    written: u64,
}

impl Progress {
    /// Checks again, `nanos` nanoseconds later. `unseen`: unreported bytes that may have to move first. `waiting`:
    /// bytes of replies waiting to be sent. `receive`: bytes of a whole receive.
    pub(super) fn pass(
        &mut self,
        nanos: u64,
        flow: Option<Flow>,
        (unseen, waiting, receive): (u64, u64, u64),
        least_rate: u64,
    ) -> Passed {
        let time = |bytes: u64| {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(least_rate.max(1));
            u64::try_from(nanos).unwrap_or(u64::MAX)
        };
        // An eighth exceeds the bytes of the headers.
        let queued = flow.map_or(0, |flow| flow.queued.saturating_add(flow.queued / 8));
        let moved = flow.map(|flow| flow.moved.saturating_sub(std::mem::replace(&mut self.moved, flow.moved)));
        let queued = time(queued.saturating_add(unseen));
        Passed { nanos, moved: moved.map(time), queued, waiting: time(waiting), receive: time(receive), granted: 0 }
    }

    /// The longest wait, and its debt.
    pub(super) fn look(&mut self, owed: Owed, passed: &Passed) -> (u64, Stall) {
        if self.sends.is_done(owed.left) {
            self.written = owed.written;
        }
        // The last reply follows the bytes and grants of the others.
        let newly = owed.granted.wrapping_sub(std::mem::replace(&mut self.granted, owed.granted)).cast_signed();
        let granted = passed.receive.saturating_mul(newly.max(0) as u64);
        let behind = Passed { queued: passed.queued.saturating_add(passed.waiting), granted, ..*passed };
        // Bytes do not extend this one: an answer may be short.
        let still = Passed { moved: None, queued: 0, ..*passed };
        let waits = [
            (self.sends.waited(owed.sends, owed.left, passed), Stall::Sends),
            (self.reads.waited(owed.fetches, owed.fetched, passed), Stall::Reads),
            (self.replies.waited(owed.replies, owed.granted, &behind), Stall::Grant),
            (self.message.waited(owed.half_sent, passed), Stall::Message),
            (self.answers.waited(owed.withheld, &still), Stall::Answers),
        ];
        match waits.into_iter().rev().max_by_key(|wait| wait.0).unwrap_or((0, Stall::Sends)) {
            // Each may have to wait for the other.
            (waited, Stall::Sends) if waited > 0 && waited == waits[1].0 => (waited, Stall::SendsOrReads),
            longest => longest,
        }
    }

    /// Whether a Send is awaited.
    fn awaits_send(&self) -> bool {
        self.sends.watch.of.is_some()
    }

    /// Whether anything is owed.
    fn is_owed(&self) -> bool {
        let watches = [self.sends.watch, self.reads.watch, self.replies.watch, self.message, self.answers];
        watches.iter().any(|watch| watch.of.is_some())
    }
}

/// Number of parts in which connections are checked: a check of all at once would delay calls.
const PARTS: usize = 16;

/// Schedule of the checks.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Time of each part's last check, in nanoseconds.
    looked: [u64; PARTS],
    /// Next part, and its time.
    part: usize,
    due: u64,
    /// Time when all are due.
    all_due: u64,
    /// Parts checked since the last debt or work. After all of them, no check needs to interrupt a sleep.
    quiet: usize,
    /// Whether the last checks followed a pause.
    paused: bool,
    /// The shard's work until then, as [`done`] counts it.
    done: u64,
}

/// Count of turns with work and of started calls. It uses the shard's counters only: those of a device may need a
/// system call.
fn done(stats: &ShardStats) -> u64 {
    (stats.turns - stats.idle_turns).wrapping_add(stats.calls)
}

/// Parts to check now, with the nanoseconds to count since the last check of each.
type Turn = [Option<u64>; PARTS];

impl Watch {
    /// Starts the checks of each part every `every` nanoseconds. After a pause several are due, at most all.
    ///
    /// While this side was suspended, no peer could make progress, and messages may be unread: that time does not
    /// count. For repeated pauses, at most the time of two checks counts.
    fn begin(&mut self, now: u64, every: u64) -> Turn {
        let step = (every / PARTS as u64).max(1);
        let late = now.saturating_sub(self.due);
        let parts = (late / step).saturating_add(1).min(PARTS as u64);
        let was_paused = std::mem::replace(&mut self.paused, late > every.saturating_mul(2));
        let most = if self.paused && !was_paused { 0 } else { every.saturating_mul(2) };
        let mut turn = Turn::default();
        for _ in 0..parts {
            let looked = std::mem::replace(&mut self.looked[self.part], now);
            turn[self.part] = Some(now.saturating_sub(looked).min(most));
            self.part = (self.part + 1) % PARTS;
            self.quiet += 1;
        }
        (self.due, self.all_due) = (now.saturating_add(step), now.saturating_add(every));
        turn
    }

    /// Time when a sleeping shard must check all parts, in nanoseconds. `done`: its work so far.
    fn next(&mut self, done: u64) -> u64 {
        if std::mem::replace(&mut self.done, done) != done {
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

    /// Limits a sleep to the next check of all connections: work since the last check may have left a debt.
    pub(super) fn before_sleep<F: Fabric>(&mut self, cx: &mut Context<F>) {
        let next = self.next(done(&cx.stats));
        cx.schedule.wake_by(next);
    }

    /// Checks the due connections, and closes those whose debt exceeds
    /// [`timeouts.progress`](crate::config::TimeoutConfig::progress).
    #[cold]
    fn end_stalled<F: Fabric>(&mut self, cx: &mut Context<F>, now: u64) {
        let timeout = nanoseconds(cx.config.timeouts.progress);
        let every = (timeout / LOOKS).max(nanoseconds(cx.config.poll.control_interval)).max(1);
        let turn = self.begin(now, every);
        let whose = |slot: usize| turn[slot % PARTS];
        cx.with_those(
            |slot| whose(slot).is_some(),
            |cx, conn| {
                let elapsed = whose(conn.qp().slot as usize).unwrap_or(0);
                let ended = self.look(cx, conn, elapsed, timeout);
                if !ended && conn.progress.awaits_send() {
                    // The last Sends may be unsignaled, so completion is requested. It is requested at once: later work
                    // requests follow later Reads, whose bytes do not count.
                    cx.request_completion(conn);
                }
            },
        );
    }

    /// Checks one connection; true if it closes.
    fn look<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, elapsed: u64, timeout: u64) -> bool {
        if matches!(conn.stage(), Stage::Connecting | Stage::Reconnecting) {
            return false;
        }
        let in_device = cx.fabric.holds_sends(conn.qp());
        let flow = cx.fabric.flow(conn.qp());
        let owed = conn.owed(in_device, cx.config.limits.max_abandoned);
        let unseen = unseen(&cx.config, conn, &owed, flow.is_some());
        let bytes = (unseen, owed.waiting, cx.config.wire.receive_size as u64);
        let passed = conn.progress.pass(elapsed, flow, bytes, cx.config.limits.min_rate);
        let (waited, why) = conn.progress.look(owed, &passed);
        if conn.progress.is_owed() {
            self.quiet = 0;
        }
        if waited < timeout.max(1) || conn.is_over() {
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

/// Unreported bytes that may have to move before the debt: those not yet posted. If the device reports no bytes
/// (`tells`), the known bytes count.
fn unseen(config: &Config, conn: &Conn, owed: &Owed, tells: bool) -> u64 {
    let rest = if owed.half_sent.is_some() { config.wire.reassemble_up_to as u64 } else { 0 };
    let known = || conn.served.read_bytes() as u64 + (owed.written - conn.progress.written);
    rest + if tells { SLACK + conn.sends.unposted() } else { known() }
}
