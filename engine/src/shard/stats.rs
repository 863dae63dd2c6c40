//! Statistics of a shard on request: counters and current gauges.

use super::Shard;
use super::conn::Conn;
use crate::fabric::Fabric;
use crate::stats::{ConnectionStats, ShardStats};
use crate::wire::Version;

impl<F: Fabric> Shard<F> {
    /// Statistics so far. Reading resets nothing.
    pub fn stats(&mut self) -> ShardStats {
        self.stats_with_connections(0)
    }

    /// As above, with at most `connections` in [`ShardStats::peers`]: those of the lowest slots.
    pub fn stats_with_connections(&mut self, connections: usize) -> ShardStats {
        let cx = &mut self.cx;
        let now = cx.clock.read();
        let mut stats = cx.stats.clone();
        cx.record_batches(&mut stats);
        stats.fabric = cx.fabric.stats();
        stats.pool = cx.pool.stats();
        let others = cx.sizing.pools().chain(self.requester.pools());
        let classes = others.flat_map(|pool| {
            pool.drain_remote();
            pool.stats().classes
        });
        stats.pool.classes.extend(classes);
        (stats.receive_size, stats.receive_size_posted) = (cx.sizing.announced(), cx.sizing.filled());
        for conn in cx.conns.iter() {
            stats.messages.add(conn.proto.counters());
            stats.connections += 1;
            stats.exposed_buffers += conn.requests.exposed_buffers();
            stats.credits_granted += u64::from(conn.proto.credits().credit_limit());
            stats.credits_used += u64::from(conn.proto.status().credits_used);
        }
        stats.peers = cx.conns.iter().take(connections).map(|conn| of_connection(conn, now)).collect();
        cx.receives.add_to(&mut stats);
        self.responder.add_to(&mut stats, now);
        stats
    }
}

fn of_connection(conn: &Conn, now: u64) -> ConnectionStats {
    let (proto, name) = (&conn.proto, conn.origin());
    let (since, heard) = conn.accepted().map_or((now, now), |accepted| accepted.times());
    ConnectionStats {
        slot: name.slot,
        generation: name.generation,
        peer: conn.accepted().map_or_else(String::new, |accepted| accepted.host().to_owned()),
        identity: conn.peer().map(|name| name.as_ref().to_owned()),
        stage: conn.stage().name().to_owned(),
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
