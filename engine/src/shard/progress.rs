//! Deadlines of ours on what a peer owes: to take what it is sent, to grant credits for the replies that it
//! has asked for, to end a message that it has begun. Until then it holds memory of the shard. Nothing on the
//! path of messages reads a clock for it: the connections are looked at now and then, and what has not moved
//! since is timed.

use super::clock::nanoseconds;
use super::close_reason::{LocalClose, Stall};
use super::conn::Conn;
use super::context::Context;
use super::stage::Stage;
use crate::fabric::Fabric;

/// Looks at a connection within [`Config::progress_timeout`](crate::Config::progress_timeout).
const LOOKS: u64 = 8;

/// What is waited for on a connection. Whatever is counted has another number when it moves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Owed {
    /// Sends so far, and how many of them are known to have left.
    pub(super) sends: u32,
    pub(super) left: u32,
    /// Replies wait for a grant.
    pub(super) ungranted: bool,
    /// The number of the message that has come in part.
    pub(super) half_sent: Option<u32>,
}

/// How long one thing has been waited for.
#[derive(Clone, Copy, Debug, Default)]
struct Stopwatch {
    of: Option<u32>,
    nanos: u64,
}

impl Stopwatch {
    /// `elapsed` later it is this that is waited for: how long now?
    fn waited(&mut self, of: Option<u32>, elapsed: u64) -> u64 {
        self.nanos = if of.is_some() && of == self.of { self.nanos.saturating_add(elapsed) } else { 0 };
        self.of = of;
        self.nanos
    }
}

/// What a peer has been waited for, as of the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// The Send that must leave next: not the last one, or a peer that takes one now and then would never be
    /// late.
    mark: u32,
    sends: Stopwatch,
    grant: Stopwatch,
    message: Stopwatch,
}

impl Progress {
    /// Looks again, `elapsed` nanoseconds later: the longest that anything has been owed, and what that is.
    pub(super) fn look(&mut self, owed: Owed, elapsed: u64) -> (u64, Stall) {
        if owed.left.wrapping_sub(self.mark) as i32 >= 0 {
            self.mark = owed.sends;
        }
        let unsent = (owed.sends != owed.left).then_some(self.mark);
        let waits = [
            (self.sends.waited(unsent, elapsed), Stall::Sends),
            (self.grant.waited(owed.ungranted.then_some(owed.sends), elapsed), Stall::Grant),
            (self.message.waited(owed.half_sent, elapsed), Stall::Message),
        ];
        waits.into_iter().max_by_key(|wait| wait.0).unwrap_or((0, Stall::Sends))
    }

    /// How long it takes to hear of the Send that must leave next.
    fn unheard(&self) -> u64 {
        self.sends.nanos
    }

    /// Anything is owed.
    fn is_owed(&self) -> bool {
        self.sends.of.is_some() || self.grant.of.is_some() || self.message.of.is_some()
    }
}

/// When the connections are looked at.
#[derive(Debug, Default)]
pub(super) struct Watch {
    looked: u64,
    due: u64,
    /// Something is owed, so that the next look must not be slept through.
    owed: bool,
}

impl Watch {
    /// A look begins: nanoseconds since the last one, as far as they count. While this side was not there,
    /// nobody could make progress.
    fn begin(&mut self, now: u64, every: u64) -> u64 {
        let elapsed = now.saturating_sub(self.looked).min(every.saturating_mul(2));
        (self.looked, self.due, self.owed) = (now, now.saturating_add(every), false);
        elapsed
    }

    /// When the next look must be, in nanoseconds.
    fn next(&self) -> u64 {
        if self.owed { self.due } else { u64::MAX }
    }
}

impl Watch {
    /// Part of step 5 of a turn: ends the connections whose peers owe something for too long. `pressed`:
    /// calls wait for memory that such peers may hold.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut Context<F>, pressed: bool) {
        let now = cx.clock.read();
        if now >= self.due || pressed {
            let limit = nanoseconds(cx.config.progress_timeout);
            self.end_stalled(cx, now, limit);
        }
        cx.schedule.wake_by(self.next());
    }

    /// Looks at all connections that are in the table, and ends those whose peers have owed something for
    /// `limit` nanoseconds. Returns how many.
    #[cold]
    pub(super) fn end_stalled<F: Fabric>(&mut self, cx: &mut Context<F>, now: u64, limit: u64) -> usize {
        let timeout = nanoseconds(cx.config.progress_timeout);
        let every = (timeout / LOOKS).max(nanoseconds(cx.config.control_interval));
        let elapsed = self.begin(now, every);
        let mut ended = 0;
        cx.with_each(|cx, conn| {
            if self.look(cx, conn, elapsed, limit) {
                ended += 1;
            } else if conn.progress.unheard() >= timeout / 4 {
                // Of the last Sends nothing may ever be heard: they are asked for.
                cx.request_completion(conn);
            }
        });
        ended
    }

    /// Looks at one connection; true if it is ended for what it owes.
    fn look<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, elapsed: u64, limit: u64) -> bool {
        if matches!(conn.stage(), Stage::Connecting | Stage::Reconnecting) {
            return false;
        }
        let in_device = cx.fabric.holds_sends(conn.qp());
        let (waited, why) = conn.progress.look(conn.owed(in_device), elapsed);
        self.owed |= conn.progress.is_owed();
        if waited < limit.max(1) || conn.is_over() {
            return false;
        }
        cx.stats.peers_stalled += 1;
        conn.end_for(LocalClose::ProgressTimeout(why));
        true
    }

    /// The same for one that is not in the table, in the middle of a look.
    pub(super) fn is_stalled<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, limit: u64) -> bool {
        self.look(cx, conn, 0, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(sends: u32, left: u32) -> Owed {
        Owed { sends, left, ..Owed::default() }
    }

    #[test]
    fn what_does_not_leave_is_late_however_much_follows_it() {
        let mut progress = Progress::default();
        assert_eq!(progress.look(sent(5, 0), 10).0, 0, "it is seen for the first time");
        assert_eq!(progress.look(sent(9, 4), 10).0, 10, "the fifth has not left");
        assert_eq!(progress.look(sent(9, 5), 10).0, 0, "now it has, and the ninth is awaited");
        assert_eq!(progress.look(sent(90, 8), 10).0, 10, "one now and then is not enough");
        assert_eq!(progress.look(sent(90, 90), 10).0, 0);
        assert!(!progress.is_owed());
        assert_eq!(progress.look(sent(90, 90), 1000).0, 0, "nothing is owed");
    }

    #[test]
    fn numbers_of_sends_may_wrap() {
        let mut progress = Progress { mark: u32::MAX, ..Progress::default() };
        progress.look(sent(u32::MAX, u32::MAX), 1);
        progress.look(sent(3, u32::MAX), 1);
        assert_eq!(progress.look(sent(4, 1), 7).0, 7);
        assert_eq!(progress.look(sent(4, 3), 7).0, 0);
    }

    #[test]
    fn grants_and_ends_of_messages_are_owed_too() {
        let mut progress = Progress::default();
        let owed = Owed { ungranted: true, half_sent: Some(1), ..Owed::default() };
        progress.look(owed, 1);
        assert_eq!(progress.look(owed, 5).0, 5);
        let (waited, why) = progress.look(Owed { ungranted: false, ..owed }, 5);
        assert_eq!((waited, why), (10, Stall::Message));
        assert_eq!(progress.look(Owed { half_sent: Some(2), ..Owed::default() }, 5).0, 0, "another message");
    }

    #[test]
    fn time_in_which_nobody_looked_is_held_against_nobody() {
        let mut watch = Watch::default();
        assert_eq!(watch.begin(100, 10), 20);
        assert_eq!(watch.begin(105, 10), 5);
        watch.owed = true;
        assert_eq!(watch.next(), 115);
        assert_eq!(watch.begin(u64::MAX, 10), 20);
        assert_eq!(watch.next(), u64::MAX, "nothing was found to be owed");
    }
}
