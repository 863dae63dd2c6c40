//! Statistics of a shard: counters and gauges on request, and the sampling of calls for latency.

use super::connection::Conn;
use super::context::Context;
use super::requester::Requester;
use super::responder::Responder;
use crate::fabric::Fabric;
use crate::stats::{ConnectionStats, ShardStats};
use crate::wire::Version;

/// Statistics so far, with at most `connections` in [`ShardStats::peers`]: those of the lowest slots. Resets nothing.
pub(super) fn snapshot<F: Fabric>(
    cx: &mut Context<F>,
    requester: &Requester,
    responder: &Responder,
    connections: usize,
) -> ShardStats {
    let now = cx.clock.read();
    let mut stats = cx.stats.clone();
    cx.record_batches(&mut stats);
    stats.fabric = cx.fabric.stats();
    stats.pool_empty += cx.memory.failures;
    stats.pool = cx.memory.pool.stats();
    for pool in cx.memory.sizes.pools().chain(requester.pools()) {
        pool.drain_remote();
        stats.pool.classes.extend(pool.stats().classes);
    }
    (stats.receive_size, stats.receive_size_posted) = (cx.memory.sizes.announced, cx.memory.sizes.filled);
    for conn in cx.conns.iter() {
        stats.messages.add(conn.proto.counters());
        stats.connections += 1;
        let exposed = conn.calls.exposed_pool().map_or_else(Vec::new, |pool| pool.stats().classes);
        stats.exposed_buffers += exposed.iter().map(|class| class.outstanding as u64).sum::<u64>();
        stats.credits_granted += u64::from(conn.proto.credits().credit_limit());
        stats.credits_used += u64::from(conn.proto.status().credits_used);
    }
    stats.peers = cx.conns.iter().take(connections).map(|conn| of_connection(conn, now)).collect();
    cx.memory.receives.add_to(&mut stats);
    responder.add_to(&mut stats, now);
    stats
}

fn of_connection(conn: &Conn, now: u64) -> ConnectionStats {
    let (proto, name) = (&conn.proto, conn.origin());
    let (since, heard) = conn.accepted.as_ref().map_or((now, now), |accepted| accepted.times());
    ConnectionStats {
        slot: name.slot,
        generation: name.generation,
        peer: conn.accepted.as_ref().map_or_else(String::new, |accepted| accepted.host().to_owned()),
        identity: conn.peer.as_deref().map(str::to_owned),
        stage: format!("{:?}", conn.stage()).to_lowercase(),
        version: match proto.terms().version {
            Version::V1 => 1,
            Version::V2 => 2,
        },
        credits_granted: proto.credits().credit_limit().into(),
        credits_used: proto.status().credits_used.into(),
        receives_promised: conn.promise.receives().into(),
        calls_under_way: proto.inbound().len() as u64,
        received: proto.counters().received,
        useful: proto.status().useful_messages,
        sent: proto.counters().sent,
        age: now.saturating_sub(since),
        silent: now.saturating_sub(heard),
    }
}

/// Sampling of calls, at irregular distances to cover patterns of calls.
#[derive(Debug)]
pub(super) struct Sampler {
    /// Calls until the next sample.
    until: u64,
    /// Average distance; 0 for no samples.
    every: u64,
    /// State of a xorshift generator; the same in each run.
    state: u64,
}

impl Sampler {
    /// Samples one of `every` calls on average: 1 for all, 0 for none.
    pub(super) fn new(every: u32) -> Self {
        let mut sampler = Self { until: 0, every: every.into(), state: 0x9E37_79B9_7F4A_7C15 };
        sampler.draw();
        sampler
    }

    /// Whether the next call is timed.
    #[inline]
    pub(super) fn takes(&mut self) -> bool {
        self.until -= 1;
        self.until == 0 && self.draw()
    }

    /// Draws the next distance: 1 to twice the average less one. True if sampling is on.
    #[inline(never)]
    fn draw(&mut self) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        // Without sampling, the count never reaches 0.
        self.until = (2 * self.every).checked_sub(1).map_or(u64::MAX, |most| self.state % most + 1);
        self.every > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_so_many_is_taken_in_the_mean_and_none_by_its_place() {
        let mut sampler = Sampler::new(64);
        let taken: Vec<u32> = (0..64_000).filter(|_| sampler.takes()).collect();
        assert!((900..1100).contains(&taken.len()), "{}", taken.len());
        for pattern in [2, 3, 64] {
            let of_first = taken.iter().filter(|&&call| call % pattern == 0).count();
            let share = taken.len() / pattern as usize;
            assert!((share / 2..2 * share + 2).contains(&of_first), "{of_first} of {} in {pattern}", taken.len());
        }
    }

    #[test]
    fn all_or_none() {
        let (mut all, mut none) = (Sampler::new(1), Sampler::new(0));
        assert!((0..1000).all(|_| all.takes()) && !(0..1000).any(|_| none.takes()));
    }
}
