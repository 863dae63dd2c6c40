//! What a peer does over time: not what it says, which is right, but when it says it, and what it leaves out.

use std::time::Duration;

use rpcrdma_tests::Random;

use super::LEAST_RATE;
use crate::device::Kind;

/// See the page of this module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Conduct {
    /// Does all that it has to, at once.
    Fast,
    /// Does all that it has to, at so many bytes in a second each way.
    Rate(u64),
    /// Does all that it has to, but answers RDMA Reads. So often it sends an RDMA Write of no bytes.
    AnswersNoReads(Option<Duration>),
    /// Grants the server no more messages once it has had an answer.
    GrantsNothing,
    /// Sends a byte of what it has to send so often; of a ring, as many fewer messages.
    Trickles(Duration),
    /// Takes nothing of what it is sent, once it has asked for it.
    TakesNothing,
    /// Does all that it has to for so long, and nothing from then on.
    Stops(Duration),
    /// Sends so many bytes of its next message after so long, and nothing from then on. Of a ring: says that a message
    /// is there, and writes nothing of it.
    Halves(Duration, usize),
    /// Is there for so long, goes, and comes again.
    ComesAndGoes(Duration),
}

impl Conduct {
    /// Anything that is possible on such a fabric; of a siege, what holds memory.
    pub(super) fn draw(random: &mut Random, kind: Kind, siege: bool) -> Self {
        let millis = |random: &mut Random, most: usize| Duration::from_millis(1 + random.below(most) as u64);
        match if siege { 3 + random.below(5) } else { random.below(10) } {
            0 => Self::Fast,
            // At the least rate and an eighth, for what TCP would call overhead, and up to sixteen times that.
            1 | 2 => Self::Rate((LEAST_RATE + LEAST_RATE / 8) << random.below(5)),
            3 => Self::Rate(1 + random.below(LEAST_RATE as usize / 2) as u64),
            4 | 5 if kind == Kind::Software => Self::GrantsNothing,
            4 => Self::AnswersNoReads(None),
            5 => Self::AnswersNoReads(Some(millis(random, 300))),
            6 => Self::Trickles(millis(random, 500)),
            7 => Self::TakesNothing,
            8 => match random.below(2) {
                0 => Self::Stops(millis(random, 4000)),
                _ => Self::Halves(millis(random, 4000), 1 + random.below(60)),
            },
            _ => Self::ComesAndGoes(millis(random, 2000)),
        }
    }

    /// It keeps what it owes to the least rate: it must never be ended.
    pub(super) fn is_honest(self) -> bool {
        match self {
            Self::Fast => true,
            Self::Rate(rate) => rate > LEAST_RATE,
            _ => false,
        }
    }

    /// Bytes that it moves each way in this time.
    pub(super) fn bytes_in(self, time: Duration) -> f64 {
        match self {
            Self::Rate(rate) => rate as f64 * time.as_secs_f64(),
            Self::Trickles(each) => time.as_secs_f64() / each.as_secs_f64(),
            _ => f64::INFINITY,
        }
    }

    /// Its name in the tally.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fast => "peers that are fast",
            Self::Rate(rate) if rate > LEAST_RATE => "peers that are slow",
            Self::Rate(_) => "peers that are too slow",
            Self::AnswersNoReads(None) => "peers that answer no Reads",
            Self::AnswersNoReads(Some(_)) => "peers that answer no Reads, and say that they are there",
            Self::GrantsNothing => "peers that grant nothing",
            Self::Trickles(_) => "peers that trickle",
            Self::TakesNothing => "peers that take nothing",
            Self::Stops(_) => "peers that stop",
            Self::Halves(..) => "peers that send halves",
            Self::ComesAndGoes(_) => "peers that come and go",
        }
    }
}
