//! Deadlines of a peer's obligations.
//!
//! A peer has to receive its messages, answer RDMA Reads, grant credits for its replies, finish a message that it has
//! begun, and answer calls that this side has abandoned. Until then it holds memory or credits of the shard.
//!
//! A slow peer is not disconnected while it moves [`limits.min_rate`](crate::config::LimitsConfig::min_rate) bytes per
//! second. Other bytes precede an obligation in the queue, so each byte moved in either direction extends the deadline
//! by its time at that rate. Only the bytes in front of the obligation count; otherwise other traffic would extend the
//! deadline without limit. If the device does not report progress, the time of those bytes is granted in advance.
//!
//! A granted reply, however short, extends the deadline by the time of a full receive buffer. Otherwise short replies
//! would disconnect a peer with few credits that grants slowly but steadily. The number of replies is bounded, and so
//! is that time.
//!
//! The message path reads no clock for these deadlines. Periodic checks of the connections time each obligation without
//! progress.

use crate::fabric::Flow;

/// Descriptions of a stalled peer, by obligation: receive messages, answer RDMA Reads, one of both if both have waited
/// equally long, grant credits, finish a message, and answer calls that this side has abandoned.
const SENDS: &str = "peer receives too slowly, or nothing";
const READS: &str = "peer answers RDMA Reads too slowly, or not at all";
const SENDS_OR_READS: &str = "peer receives or answers RDMA Reads too slowly, or not at all";
const GRANT: &str = "peer grants too few credits, or none, for replies or for the rest of a message";
const MESSAGE: &str = "peer sends the rest of a message too slowly, or not at all";
const ANSWERS: &str = "peer does not answer calls that their callers abandoned and that hold its credits \
                       (limits.max_abandoned)";

/// Counters of a peer's obligations. Each changes with the obligation's progress.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PeerObligations {
    /// Sends so far, and those completed.
    pub(super) sends: u32,
    pub(super) completed: u32,
    /// Bytes of all RDMA Writes queued before these Sends.
    pub(super) written: u64,
    /// Numbers of calls so far whose RDMA Reads were posted, and completed.
    pub(super) read_calls: u32,
    pub(super) read_calls_done: u32,
    /// Replies and parts of messages that had to wait for a grant so far, and those of them that were sent.
    pub(super) queued_replies: u32,
    pub(super) sent_replies: u32,
    /// Bytes of waiting replies, if any waits for a grant.
    pub(super) waiting: u64,
    /// Number of the incomplete incoming message.
    pub(super) half_sent: Option<u32>,
    /// Number of late answers so far; `None` unless the peer leaves too many abandoned calls unanswered.
    pub(super) withheld: Option<u32>,
}

/// Progress of a connection since its last check, and the limits that apply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval {
    pub(super) nanos: u64,
    /// Bytes that the device reports; `None` if it does not report them.
    pub(super) flow: Option<Flow>,
    /// Bytes that the device does not report, and that may have to move before the obligation is met.
    pub(super) unseen: u64,
    /// Size of a receive buffer, in bytes.
    pub(super) receive: u64,
    /// Least rate of a peer, in bytes per second.
    pub(super) min_rate: u64,
}

/// Times of an interval that concern one obligation, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Elapsed {
    nanos: u64,
    /// Time of the moved bytes at the least rate; `None` if the device does not report them.
    moved: Option<u64>,
    /// Time of the bytes still to move.
    queued: u64,
    /// Time of the granted replies, each counted as a full receive buffer.
    granted: u64,
}

/// Time that one obligation has taken.
#[derive(Clone, Copy, Debug, Default)]
struct ObligationTimer {
    /// Number of the timed obligation, if there is one.
    number: Option<u32>,
    nanos: u64,
    /// Time by which moved bytes may still extend the deadline, in nanoseconds.
    extension: u64,
}

impl ObligationTimer {
    /// Returns the time waited for the obligation of this number, less the time of moved bytes. A new number restarts
    /// the timer.
    fn check(&mut self, number: Option<u32>, elapsed: &Elapsed) -> u64 {
        if number.is_none() || number != self.number {
            *self = Self { number, nanos: 0, extension: elapsed.queued };
            return 0;
        }
        self.nanos = self.nanos.saturating_add(elapsed.nanos).saturating_sub(elapsed.granted);
        let Some(moved) = elapsed.moved else { return self.nanos.saturating_sub(self.extension) };
        // More bytes may have moved than the waited time needs, for example in the other direction. Such bytes do not
        // use up the extension.
        let used = moved.min(self.extension).min(self.nanos);
        self.extension -= used;
        self.nanos -= used;
        self.nanos
    }
}

/// Timer of items in a sequence. It times the item that was the last one when it started, because a peer that completes
/// single items slowly must count as late, too.
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

    /// Returns the time waited for the awaited item, given the numbers of all items and of completed ones.
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
    /// Bytes that the device has moved.
    moved: u64,
    /// [`PeerObligations::sent_replies`] at the last check.
    sent_replies: u32,
    /// [`PeerObligations::written`] when the awaited Send was chosen.
    pub(super) written: u64,
}

impl ObligationTimers {
    /// Checks all obligations; returns the longest wait, and its description.
    pub(super) fn check(&mut self, obligations: PeerObligations, interval: &Interval) -> (u64, &'static str) {
        let time = |bytes: u64| {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(interval.min_rate.max(1));
            u64::try_from(nanos).unwrap_or(u64::MAX)
        };
        let moved = interval.flow.map(|flow| flow.moved.saturating_sub(std::mem::replace(&mut self.moved, flow.moved)));
        // Headers add less than an eighth to the queued bytes.
        let queued = interval.flow.map_or(0, |flow| flow.queued.saturating_add(flow.queued / 8));
        let queued = time(queued.saturating_add(interval.unseen));
        let elapsed = Elapsed { nanos: interval.nanos, moved: moved.map(time), queued, granted: 0 };
        if self.sends.is_done(obligations.completed) {
            self.written = obligations.written;
        }
        // The last reply has to wait for the bytes and grants of the earlier ones.
        let newly_granted = obligations
            .sent_replies
            .wrapping_sub(std::mem::replace(&mut self.sent_replies, obligations.sent_replies))
            .cast_signed();
        let granted = time(interval.receive).saturating_mul(newly_granted.max(0) as u64);
        let of_replies = Elapsed { queued: queued.saturating_add(time(obligations.waiting)), granted, ..elapsed };
        // An answer may be short, so moved bytes do not extend its deadline.
        let of_answers = Elapsed { moved: None, queued: 0, ..elapsed };
        let waits = [
            (self.sends.check(obligations.sends, obligations.completed, &elapsed), SENDS),
            (self.reads.check(obligations.read_calls, obligations.read_calls_done, &elapsed), READS),
            (self.replies.check(obligations.queued_replies, obligations.sent_replies, &of_replies), GRANT),
            (self.message.check(obligations.half_sent, &elapsed), MESSAGE),
            (self.answers.check(obligations.withheld, &of_answers), ANSWERS),
        ];
        match waits.into_iter().rev().max_by_key(|wait| wait.0).unwrap_or((0, SENDS)) {
            // Sends and Reads may wait for each other, so both are named.
            (waited, SENDS) if waited > 0 && waited == waits[1].0 => (waited, SENDS_OR_READS),
            longest => longest,
        }
    }

    /// Whether Sends were outstanding at the last check.
    pub(super) fn awaits_sends(&self) -> bool {
        self.sends.timer.number.is_some()
    }

    /// Whether there is an obligation.
    pub(super) fn is_any_owed(&self) -> bool {
        let sequences = [self.sends, self.reads, self.replies].map(|sequence| sequence.timer);
        sequences.iter().chain([&self.message, &self.answers]).any(|timer| timer.number.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rate at which a byte takes a nanosecond.
    const RATE: u64 = 1_000_000_000;

    fn sent(sends: u32, completed: u32) -> PeerObligations {
        PeerObligations { sends, completed, ..PeerObligations::default() }
    }

    /// Checks on a device that reports no bytes. A Receive has 3 bytes.
    fn check(timers: &mut ObligationTimers, obligations: PeerObligations, nanos: u64) -> (u64, &'static str) {
        timers.check(obligations, &Interval { nanos, flow: None, unseen: 0, receive: 3, min_rate: RATE })
    }

    /// Checks on a device that has moved `moved` bytes in all, and still has `queued` bytes.
    fn check_flow(
        timers: &mut ObligationTimers,
        obligations: PeerObligations,
        nanos: u64,
        moved: u64,
        queued: u64,
    ) -> u64 {
        let flow = Some(Flow { moved, queued });
        timers.check(obligations, &Interval { nanos, flow, unseen: 0, receive: 0, min_rate: RATE }).0
    }

    #[test]
    fn a_stuck_send_is_late_even_if_others_follow() {
        let mut timers = ObligationTimers::default();
        assert_eq!(check(&mut timers, sent(5, 0), 10).0, 0, "the first check only starts the timer");
        assert_eq!(check(&mut timers, sent(9, 4), 10).0, 10, "the fifth has not completed");
        assert_eq!(check(&mut timers, sent(9, 5), 10).0, 0, "the fifth has completed, and the ninth is awaited");
        assert_eq!(check(&mut timers, sent(90, 8), 10).0, 10, "the ninth has not completed");
        assert_eq!(check(&mut timers, sent(90, 90), 10).0, 0);
        assert!(!timers.is_any_owed());
        assert_eq!(check(&mut timers, sent(90, 90), 1000).0, 0, "there is no obligation");
    }

    #[test]
    fn numbers_of_sends_may_wrap() {
        let mut timers = ObligationTimers::default();
        timers.sends.mark = u32::MAX;
        check(&mut timers, sent(u32::MAX, u32::MAX), 1);
        check(&mut timers, sent(3, u32::MAX), 1);
        assert_eq!(check(&mut timers, sent(4, 1), 7).0, 7);
        assert_eq!(check(&mut timers, sent(4, 3), 7).0, 0);
    }

    #[test]
    fn grants_unfinished_messages_and_reads_have_deadlines() {
        let mut timers = ObligationTimers::default();
        let obligations =
            PeerObligations { queued_replies: 3, sent_replies: 2, half_sent: Some(1), ..PeerObligations::default() };
        check(&mut timers, obligations, 1);
        assert_eq!(check(&mut timers, obligations, 5).0, 5);
        assert_eq!(check(&mut timers, PeerObligations { sent_replies: 3, ..obligations }, 5), (10, MESSAGE));
        assert_eq!(
            check(&mut timers, PeerObligations { half_sent: Some(2), ..PeerObligations::default() }, 5).0,
            0,
            "another message restarts the timer"
        );
        let reads = |read_calls_done| PeerObligations { read_calls: 3, read_calls_done, ..PeerObligations::default() };
        check(&mut timers, reads(0), 1);
        assert_eq!(check(&mut timers, reads(2), 5), (5, READS), "the third is awaited");
        assert_eq!(check(&mut timers, reads(3), 5).0, 0);
        assert!(!timers.is_any_owed());
    }

    #[test]
    fn an_answer_to_an_abandoned_call_restarts_the_wait_and_bytes_do_not() {
        let mut timers = ObligationTimers::default();
        let obligations = |late| PeerObligations { withheld: Some(late), ..PeerObligations::default() };
        check_flow(&mut timers, obligations(7), 1, 0, 1000);
        assert_eq!(check_flow(&mut timers, obligations(7), 5, 500, 1000), 5);
        assert_eq!(check(&mut timers, obligations(7), 5), (10, ANSWERS));
        assert!(timers.is_any_owed());
        assert_eq!(check(&mut timers, obligations(8), 5).0, 0, "an abandoned call was answered");
        assert_eq!(check(&mut timers, PeerObligations::default(), 5).0, 0);
        assert!(!timers.is_any_owed());
    }

    #[test]
    fn grants_below_the_least_rate_make_a_peer_late() {
        let mut timers = ObligationTimers::default();
        let replies = |queued_replies, sent_replies| PeerObligations {
            queued_replies,
            sent_replies,
            ..PeerObligations::default()
        };
        check(&mut timers, replies(40, 0), 1);
        assert_eq!(check(&mut timers, replies(41, 1), 5), (2, GRANT), "the granted reply extends the deadline by 3 ns");
        assert_eq!(check(&mut timers, replies(42, 2), 5), (4, GRANT), "the grants are slower than the least rate");
        assert_eq!(check(&mut timers, replies(42, 2), 5), (9, GRANT));
        assert_eq!(check(&mut timers, replies(50, 40), 5).0, 0, "all replies of the first check are granted");
        assert_eq!(check(&mut timers, replies(50, 50), 5).0, 0);
        assert!(!timers.is_any_owed());
    }

    #[test]
    fn a_peer_that_grants_at_the_least_rate_is_never_late() {
        let mut timers = ObligationTimers { sent_replies: u32::MAX - 9, ..ObligationTimers::default() };
        let obligations = |granted: u32| PeerObligations {
            queued_replies: 30,
            sent_replies: granted.wrapping_sub(10),
            ..PeerObligations::default()
        };
        check(&mut timers, obligations(0), 1);
        // Each check grants two replies in the time of two Receives.
        let late: Vec<_> = (1..=15).map(|n| check(&mut timers, obligations(2 * n), 6).0).collect();
        assert_eq!(late, [0; 15]);
        assert_eq!(check(&mut timers, obligations(39), 6).0, 0, "nine grants together");
        assert_eq!(check(&mut timers, obligations(38), 6).0, 6, "the last reply waits again");
    }

    #[test]
    fn bytes_of_earlier_replies_extend_the_deadline_of_the_last() {
        let obligations = PeerObligations { queued_replies: 40, waiting: 150, ..PeerObligations::default() };
        let mut timers = ObligationTimers::default();
        check_flow(&mut timers, obligations, 100, 0, 0);
        let waited = [100, 200, 300].map(|moved| check_flow(&mut timers, obligations, 100, moved, 0));
        assert_eq!(waited, [0, 50, 150]);
    }

    #[test]
    fn sends_and_reads_that_wait_equally_are_both_named() {
        let mut timers = ObligationTimers::default();
        let obligations = PeerObligations { sends: 1, read_calls: 1, ..PeerObligations::default() };
        check(&mut timers, obligations, 1);
        assert_eq!(check(&mut timers, obligations, 5), (5, SENDS_OR_READS), "each may wait for the other");
        assert_eq!(
            check(&mut timers, PeerObligations { completed: 1, ..obligations }, 5),
            (10, READS),
            "the Send has completed"
        );
        assert_eq!(check(&mut timers, PeerObligations { read_calls_done: 1, ..obligations }, 5).1, SENDS);
    }

    #[test]
    fn moved_bytes_extend_the_deadline_by_their_time() {
        let (mut timers, obligations) = (ObligationTimers::default(), sent(1, 0));
        check_flow(&mut timers, obligations, 1, 500, 800);
        assert_eq!(check_flow(&mut timers, obligations, 100, 600, 700), 0, "the bytes moved at the least rate");
        assert_eq!(check_flow(&mut timers, obligations, 100, 640, 660), 60, "the bytes moved too slowly");
        assert_eq!(
            check_flow(&mut timers, obligations, 100, 900, 400),
            0,
            "a later surplus makes up for an earlier lag"
        );
        assert_eq!(check_flow(&mut timers, obligations, 100, 900, 400), 100, "without further bytes the time counts");
    }

    #[test]
    fn a_timer_counts_only_earlier_bytes() {
        let (mut timers, obligations) = (ObligationTimers::default(), sent(1, 0));
        check_flow(&mut timers, obligations, 1, 0, 80);
        assert_eq!(check_flow(&mut timers, obligations, 100, 1000, 80), 10, "80 bytes, and an eighth for headers");
        assert_eq!(
            check_flow(&mut timers, obligations, 100, 2000, 80),
            110,
            "bytes behind the obligation do not count"
        );
    }

    #[test]
    fn surplus_bytes_do_not_use_up_the_extension() {
        let (mut timers, obligations) = (ObligationTimers::default(), sent(1, 0));
        check_flow(&mut timers, obligations, 1, 0, 800);
        // Twice the necessary bytes move in each direction. The extension of 900 covers 9 checks.
        let waited: Vec<_> = (1..=10).map(|n| check_flow(&mut timers, obligations, 100, 400 * n, 0)).collect();
        assert_eq!(waited, [[0; 9].as_slice(), &[100]].concat());
    }

    #[test]
    fn without_reported_bytes_their_time_is_granted_in_advance() {
        let (mut timers, obligations) =
            (ObligationTimers::default(), PeerObligations { read_calls: 1, ..PeerObligations::default() });
        timers.check(obligations, &Interval { nanos: 1, flow: None, unseen: 300, receive: 0, min_rate: RATE });
        assert_eq!([250, 50, 20].map(|nanos| check(&mut timers, obligations, nanos).0), [0, 0, 20]);
    }
}
