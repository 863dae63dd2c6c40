//! Orderly close of connections: after their calls, and after messages that may be in flight.

use std::time::Duration;

use super::Shard;
use super::clock::nanoseconds;
use super::connection::Conn;
use super::connection::Stage;
use crate::fabric::{Fabric, QpId};
use crate::wire::Version;

/// Round trips without a message after which a connection of a draining shard closes. After an error for one call a
/// peer may send another: it arrives one round trip after the error was sent. The others cover lost packets.
const ROUND_TRIPS: u32 = 3;
/// Time that TCP takes for a lost packet besides: its least retransmission time-out.
const RETRANSMISSION: Duration = Duration::from_millis(200);
/// Round trip of a peer whose packets may be lost.
const DISTANT: Duration = Duration::from_millis(2);
/// Longest such silence.
const LONGEST_SILENCE: Duration = Duration::from_secs(1);

/// Time without a message of a peer after which no message of it is in flight; at least `least`.
pub(super) fn silence(least: Duration, round_trip: Option<Duration>) -> Duration {
    let distant = round_trip.filter(|time| *time >= DISTANT);
    let time = distant.map_or(Duration::ZERO, |time| time.saturating_mul(ROUND_TRIPS).saturating_add(RETRANSMISSION));
    least.max(time.min(LONGEST_SILENCE))
}

/// Whether bytes are on their way to the peer's host. Known where the device reports the round trip (iWARP); elsewhere
/// sent messages wait for a peer that may not poll.
pub(super) fn in_transit(fabric: &mut impl Fabric, qp: QpId) -> bool {
    fabric.round_trip(qp).is_some() && fabric.flow(qp).is_some_and(|flow| flow.queued > 0)
}

/// Whether a connection has sent messages whose memory the fabric may still use. Not every fabric knows, so that Sends
/// without a completion count, too.
pub(super) fn holds_sends(fabric: &mut impl Fabric, conn: &Conn) -> bool {
    conn.sends.under_way() > 0 && fabric.holds_sends(conn.qp())
}

impl<F: Fabric> Shard<F> {
    /// Drains the shard: closes each connection once its calls have ended, and its peer has been silent for a moment.
    pub fn drain(&mut self) {
        self.life.draining = true;
        self.cx.fabric.unlisten();
        self.with_each(Self::start_drain);
        self.end_parked();
    }

    /// Whether a draining connection without calls stays open for messages in flight. These are the rest of a message,
    /// or calls when the shard drains, as the peer gets an error for each. Messages after the close are lost, and the
    /// peer cannot know whether they ran. The time starts once the peer has received the replies: its next call is
    /// behind them.
    pub(super) fn lingers(&mut self, conn: &mut Conn) -> bool {
        // Replies may be in memory that the fabric still sends. A slow peer takes long for them, but a close waits only
        // for a moment. `timeouts.progress` ends a connection whose peer receives nothing.
        let awaits = holds_sends(&mut self.cx.fabric, conn);
        let now = self.cx.clock.read();
        if awaits {
            // The device completes unsignaled Sends with a later one.
            self.cx.request_completion(conn);
            self.cx.schedule.wake_by(now + nanoseconds(self.cx.config.poll.control_interval));
        }
        let in_transit = in_transit(&mut self.cx.fabric, conn.qp());
        // Version 1 has no such error: its clients retransmit.
        let tells = conn.accepted().is_some() && conn.proto.terms().version != Version::V1;
        let silence = match self.life.draining && tells {
            true => {
                let round_trip = self.cx.fabric.round_trip(conn.qp());
                nanoseconds(silence(self.cx.config.poll.control_interval, round_trip))
            }
            false => 0,
        };
        let until = conn.lingers_until(now, silence, awaits || silence > 0 && in_transit);
        self.cx.schedule.wake_by(until);
        awaits || now < until
    }

    /// Part of step 5 of a turn: closes draining connections that were silent for long enough. Of the others it learns
    /// which replies were received, for `Undrained`.
    #[cold]
    pub(super) fn look_at_lingering(&mut self) {
        self.with_each(|shard, conn| {
            if conn.stage() == Stage::Draining {
                shard.cx.request_completion(conn);
                shard.cx.ready.add(conn);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distant_peer_has_three_round_trips_and_at_most_a_second() {
        let silences = [None, Some(0), Some(3), Some(100), Some(5000)]
            .map(|round_trip| silence(Duration::from_millis(10), round_trip.map(Duration::from_millis)).as_millis());
        assert_eq!(silences, [10, 10, 209, 500, 1000]);
        let rare = Duration::from_secs(2);
        assert_eq!(silence(rare, Some(rare)), rare, "it is not looked more often");
    }
}
