//! Timing and omissions of a peer, whose messages are correct.

use std::time::Duration;

use rpcrdma_tests::Random;

use super::MIN_RATE;
use crate::device::FabricKind;

/// A peer's behaviour over time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Conduct {
    /// Meets all obligations immediately.
    Fast,
    /// Meets all obligations, but moves only this number of bytes per second in each direction.
    Rate(u64),
    /// Answers no RDMA Reads. If there is an interval, sends an RDMA Write of no bytes once per interval.
    AnswersNoReads(Option<Duration>),
    /// Grants the server no more messages after its first reply.
    GrantsNothing,
    /// Moves one byte per interval in each direction; over a ring, whole messages at proportionally longer intervals.
    Trickles(Duration),
    /// Stops receiving after a few replies.
    TakesNothing,
    /// Meets all obligations for this time, and none afterwards.
    Stops(Duration),
    /// After this time, sends this number of bytes of its next message, and nothing afterwards. Over a ring, it
    /// announces the message, and writes none of it.
    SendsPartially(Duration, usize),
    /// Stays connected for this time, leaves, and reconnects after a random time.
    Reconnects(Duration),
}

impl Conduct {
    /// Draws a conduct that is possible on the fabric. If `holds_memory`, the conduct makes the peer hold memory of the
    /// server.
    pub(super) fn draw(random: &mut Random, kind: FabricKind, holds_memory: bool) -> Self {
        let millis = |random: &mut Random, max: usize| Duration::from_millis(1 + random.below(max) as u64);
        match if holds_memory { 3 + random.below(5) } else { random.below(10) } {
            0 => Self::Fast,
            // From the minimum rate plus an eighth (TCP's overhead) up to sixteen times that.
            1 | 2 => Self::Rate((MIN_RATE + MIN_RATE / 8) << random.below(5)),
            3 => Self::Rate(1 + random.below(MIN_RATE as usize / 2) as u64),
            4 | 5 if kind == FabricKind::Software => Self::GrantsNothing,
            4 => Self::AnswersNoReads(None),
            5 => Self::AnswersNoReads(Some(millis(random, 300))),
            6 => Self::Trickles(millis(random, 500)),
            7 => Self::TakesNothing,
            8 => match random.below(2) {
                0 => Self::Stops(millis(random, 4000)),
                _ => Self::SendsPartially(millis(random, 4000), 1 + random.below(60)),
            },
            _ => Self::Reconnects(millis(random, 2000)),
        }
    }

    /// Whether the peer meets the minimum rate, so that the server must never disconnect it.
    pub(super) fn is_honest(self) -> bool {
        match self {
            Self::Fast => true,
            Self::Rate(rate) => rate > MIN_RATE,
            _ => false,
        }
    }

    /// Number of bytes that the peer may move in each direction within this time.
    pub(super) fn bytes_in(self, time: Duration) -> f64 {
        match self {
            Self::Rate(rate) => rate as f64 * time.as_secs_f64(),
            Self::Trickles(interval) => time.as_secs_f64() / interval.as_secs_f64(),
            _ => f64::INFINITY,
        }
    }

    /// Name of the conduct in the tally.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fast => "peers that are fast",
            Self::Rate(rate) if rate > MIN_RATE => "peers that are slow",
            Self::Rate(_) => "peers that are too slow",
            Self::AnswersNoReads(None) => "peers that answer no Reads",
            Self::AnswersNoReads(Some(_)) => "peers that answer no Reads, and send empty Writes",
            Self::GrantsNothing => "peers that grant nothing",
            Self::Trickles(_) => "peers that trickle",
            Self::TakesNothing => "peers that take nothing",
            Self::Stops(_) => "peers that stop",
            Self::SendsPartially(..) => "peers that send partial messages",
            Self::Reconnects(_) => "peers that reconnect",
        }
    }
}
