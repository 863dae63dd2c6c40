//! Rates between two snapshots, with their minimum and maximum since the first.

use std::collections::{BTreeMap, HashMap, HashSet};

use hdrhistogram::Histogram;
use rpcrdma::stats::{ClassStats, ConnectionStats, ProcedureStats, Refusals, ShardStats, Snapshot};
use serde::Serialize;

use crate::exporter::REFUSALS;

/// A figure of the last interval, with its minimum and maximum so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Figure {
    pub(crate) now: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// The figures of one interval.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct View {
    pub(crate) pid: u32,
    /// Nanoseconds since the server started.
    pub(crate) uptime: u64,
    /// Length of the interval, in nanoseconds. It is 0 after the first snapshot and after a restart of the server, when
    /// there are no rates.
    pub(crate) interval: u64,
    pub(crate) shards: Vec<ShardRow>,
    pub(crate) procedures: Vec<ProcedureRow>,
    pub(crate) connections: Vec<ConnectionRow>,
    /// Number of connections that the snapshot omits, because it lists a limited number per shard.
    pub(crate) connections_omitted: u64,
}

/// Figures of a shard. Rates are per second, times in nanoseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ShardRow {
    pub(crate) shard: u32,
    pub(crate) address: String,
    pub(crate) core: Option<usize>,
    /// Whether the shard answered. If not, the following fields are 0 or missing.
    pub(crate) answered: bool,
    /// Fraction of its turns that were busy, 0 to 1.
    pub(crate) busy: Option<Figure>,
    pub(crate) calls: Option<Figure>,
    pub(crate) calls_failed: Option<Figure>,
    /// Median latency of the timed calls.
    pub(crate) p50: Option<Figure>,
    /// 99th percentile of the latency of the timed calls.
    pub(crate) p99: Option<Figure>,
    /// Mean number of work requests per post.
    #[serde(rename = "post_work_requests")]
    pub(crate) batch: Option<Figure>,
    /// 99th percentile of work requests per post.
    #[serde(rename = "post_work_requests_p99")]
    pub(crate) batch_p99: Option<Figure>,
    pub(crate) messages_received: Option<Figure>,
    pub(crate) messages_sent: Option<Figure>,
    pub(crate) doorbells: Option<Figure>,
    pub(crate) sleeps: Option<Figure>,
    pub(crate) memory_waits: Option<Figure>,
    /// Calls that waited because of the limit of their connection's RDMA Reads.
    pub(crate) read_waits: Option<Figure>,
    pub(crate) backpressure: Option<Figure>,
    pub(crate) pool_empty: Option<Figure>,
    pub(crate) faults: Option<Figure>,
    pub(crate) connections: u64,
    pub(crate) connections_made: u64,
    pub(crate) credits_used: u64,
    pub(crate) credits_granted: u64,
    pub(crate) receives_posted: u64,
    pub(crate) receives_reserved: u64,
    pub(crate) receives_lowest: u64,
    pub(crate) worker_queue_depth: u64,
    pub(crate) calls_waiting: u64,
    /// Waiting time of the longest waiting call, in nanoseconds.
    pub(crate) longest_wait: u64,
    /// The size class of the pool that came closest to exhaustion.
    pub(crate) pool_low: Option<PoolLow>,
    pub(crate) memory_waits_total: u64,
    pub(crate) faults_total: u64,
}

/// Low-water mark of a size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PoolLow {
    /// Size of its buffers, in bytes.
    pub(crate) size: usize,
    /// Lowest number of free buffers.
    #[serde(rename = "buffers_lowest")]
    pub(crate) low_water: usize,
    /// Number of buffers.
    #[serde(rename = "buffers")]
    pub(crate) count: usize,
}

/// Figures of a procedure on all shards. Calls, bytes and times cover only timed calls.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ProcedureRow {
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
    pub(crate) timed: Option<Figure>,
    /// Fraction of all timed calls of the interval, 0 to 1.
    pub(crate) share: Option<f64>,
    pub(crate) p50: Option<Figure>,
    pub(crate) p99: Option<Figure>,
    /// Mean bytes of a call's arguments.
    #[serde(rename = "argument_bytes")]
    pub(crate) bytes_in: Option<f64>,
    /// Mean bytes of a call's results.
    #[serde(rename = "result_bytes")]
    pub(crate) bytes_out: Option<f64>,
    pub(crate) refused: Option<Figure>,
    pub(crate) timed_total: u64,
    pub(crate) refused_total: u64,
}

/// Figures of a connection.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ConnectionRow {
    pub(crate) shard: u32,
    #[serde(flatten)]
    pub(crate) now: ConnectionStats,
    /// Useful messages per second.
    pub(crate) messages: Option<Figure>,
}

/// Returns the number of connections that ended because of protocol violations or stalled peers, plus device errors.
pub(crate) fn faults(stats: &ShardStats) -> u64 {
    let device = &stats.fabric;
    let device_errors = [
        device.receiver_not_ready,
        device.access_refused,
        device.peer_violations,
        device.port_downs,
        device.device_failures,
    ];
    [stats.peer_faults, stats.peers_stalled].into_iter().chain(device_errors).fold(0, u64::saturating_add)
}

/// Returns the number of all refusals.
pub(crate) fn sum_refusals(refusals: &Refusals) -> u64 {
    REFUSALS.iter().fold(0, |sum, (_, read)| sum.saturating_add(read(refusals)))
}

/// Computes figures from consecutive snapshots.
#[derive(Debug, Default)]
pub(crate) struct Model {
    last: Option<Snapshot>,
    /// Minimum and maximum of each figure, by its subject.
    extremes: HashMap<(Subject, &'static str), (f64, f64)>,
}

/// Subject of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Shard(u32),
    Procedure(u32, u32, u32),
    Connection(u32, u32, u32),
}

impl Model {
    /// Returns the interval since the last snapshot. A restart of the server resets the extremes.
    pub(crate) fn update(&mut self, now: Snapshot) -> View {
        let before = self.last.take().filter(|before| is_next(before, &now));
        if before.is_none() {
            self.extremes.clear();
        }
        let view = self.build_view(before.as_ref(), &now);
        self.drop_extremes_of_closed_connections(&view);
        self.last = Some(now);
        view
    }

    fn build_view(&mut self, before: Option<&Snapshot>, now: &Snapshot) -> View {
        let interval = before.map_or(0, |before| now.uptime - before.uptime);
        let mut view = View { pid: now.pid, uptime: now.uptime, interval, ..View::default() };
        for shard in &now.shards {
            let earlier = before.and_then(|before| before.shards.iter().find(|earlier| earlier.shard == shard.shard));
            let earlier = earlier.and_then(|earlier| earlier.stats.as_ref());
            let mut row = ShardRow {
                shard: shard.shard,
                address: shard.address.clone(),
                core: shard.core,
                answered: shard.stats.is_some(),
                ..ShardRow::default()
            };
            if let Some(stats) = &shard.stats {
                self.fill_row(&mut row, earlier, stats, interval);
                view.connections_omitted += stats.connections.saturating_sub(stats.peers.len() as u64);
                let rows = stats.peers.iter().map(|peer| self.connection_row(shard.shard, earlier, peer, interval));
                view.connections.extend(rows);
            }
            view.shards.push(row);
        }
        view.procedures = self.procedure_rows(before, now, interval);
        view
    }

    /// Fills in the figures of a shard that answered.
    fn fill_row(&mut self, row: &mut ShardRow, before: Option<&ShardStats>, now: &ShardStats, interval: u64) {
        let subject = Subject::Shard(row.shard);
        let mut rate = |name, of_stats: fn(&ShardStats) -> u64| {
            let rate = per_second(of_stats(before?), of_stats(now), interval)?;
            Some(self.figure(subject, name, rate))
        };
        row.calls = rate("calls", |stats| stats.calls);
        row.calls_failed = rate("calls_failed", |stats| stats.calls_failed);
        row.messages_received = rate("received", |stats| stats.messages.received);
        row.messages_sent = rate("sent", |stats| stats.messages.sent);
        row.doorbells = rate("doorbells", |stats| stats.fabric.doorbells);
        row.sleeps = rate("sleeps", |stats| stats.sleeps);
        row.memory_waits = rate("memory_waits", |stats| stats.memory_waits);
        row.read_waits = rate("read_waits", |stats| stats.read_waits);
        row.backpressure = rate("backpressure", |stats| stats.backpressure);
        row.pool_empty = rate("pool_empty", |stats| stats.pool_empty);
        row.faults = rate("faults", faults);
        row.busy = before.and_then(|before| busy(before, now)).map(|share| self.figure(subject, "busy", share));
        if let Some(latency) = before.and_then(|before| between(&before.latency, &now.latency)) {
            row.p50 = Some(self.figure(subject, "p50", latency.value_at_quantile(0.5) as f64));
            row.p99 = Some(self.figure(subject, "p99", latency.value_at_quantile(0.99) as f64));
        }
        if let Some(batch) = before.and_then(|before| between(&before.batch, &now.batch)) {
            row.batch = Some(self.figure(subject, "batch", batch.mean()));
            row.batch_p99 = Some(self.figure(subject, "batch_p99", batch.value_at_quantile(0.99) as f64));
        }
        (row.connections, row.connections_made) = (now.connections, now.connections_made);
        (row.credits_used, row.credits_granted) = (now.credits_used, now.credits_granted);
        (row.receives_posted, row.receives_reserved) = (now.receives_posted, now.receives_reserved);
        (row.receives_lowest, row.worker_queue_depth) = (now.receives_lowest, now.worker_queue_depth);
        (row.calls_waiting, row.longest_wait) = (now.calls_waiting, now.longest_wait);
        let share = |class: &&ClassStats| (class.low_water * 1_000_000).checked_div(class.count);
        row.pool_low = now.pool.classes.iter().filter(|class| class.count > 0).min_by_key(share).map(|class| PoolLow {
            size: class.size,
            low_water: class.low_water,
            count: class.count,
        });
        (row.memory_waits_total, row.faults_total) = (now.memory_waits, faults(now));
    }

    fn connection_row(
        &mut self,
        shard: u32,
        before: Option<&ShardStats>,
        now: &ConnectionStats,
        interval: u64,
    ) -> ConnectionRow {
        let id = |peer: &ConnectionStats| (peer.slot, peer.generation);
        let before = before.and_then(|before| before.peers.iter().find(|earlier| id(earlier) == id(now)));
        let rate = before.and_then(|before| per_second(before.useful, now.useful, interval));
        let subject = Subject::Connection(shard, now.slot, now.generation);
        ConnectionRow { shard, now: now.clone(), messages: rate.map(|rate| self.figure(subject, "messages", rate)) }
    }

    fn procedure_rows(&mut self, before: Option<&Snapshot>, now: &Snapshot, interval: u64) -> Vec<ProcedureRow> {
        let (before, now) = (before.map(by_procedure).unwrap_or_default(), by_procedure(now));
        let none = (ProcedureStats::default(), 0);
        let mut rows = Vec::new();
        for (&name, (stats, refused)) in &now {
            let mut row = ProcedureRow {
                program: name.0,
                version: name.1,
                procedure: name.2,
                timed_total: stats.calls,
                refused_total: *refused,
                ..ProcedureRow::default()
            };
            if interval > 0 {
                // A procedure that the earlier snapshot lacks had no calls.
                let (earlier, refused_before) = before.get(&name).unwrap_or(&none);
                let subject = Subject::Procedure(name.0, name.1, name.2);
                let rate = |before: u64, now: u64| per_second(before, now, interval);
                row.timed = rate(earlier.calls, stats.calls).map(|rate| self.figure(subject, "timed", rate));
                let refusals = rate(*refused_before, row.refused_total);
                row.refused = refusals.map(|rate| self.figure(subject, "refused", rate));
                if let Some(latency) = between(&earlier.latency, &stats.latency) {
                    row.p50 = Some(self.figure(subject, "p50", latency.value_at_quantile(0.5) as f64));
                    row.p99 = Some(self.figure(subject, "p99", latency.value_at_quantile(0.99) as f64));
                    let mean = |before: u64, now: u64| Some(now.checked_sub(before)? as f64 / latency.len() as f64);
                    row.bytes_in = mean(earlier.bytes_in, stats.bytes_in);
                    row.bytes_out = mean(earlier.bytes_out, stats.bytes_out);
                }
            }
            rows.push(row);
        }
        let all: f64 = rows.iter().filter_map(|row| row.timed).map(|timed| timed.now).sum();
        for row in &mut rows {
            row.share = row.timed.filter(|_| all > 0.0).map(|timed| timed.now / all);
        }
        rows
    }

    /// Returns a figure with its updated extremes.
    fn figure(&mut self, subject: Subject, name: &'static str, now: f64) -> Figure {
        let (min, max) = self.extremes.entry((subject, name)).or_insert((now, now));
        (*min, *max) = (min.min(now), max.max(now));
        Figure { now, min: *min, max: *max }
    }

    /// Drops the extremes of closed connections.
    fn drop_extremes_of_closed_connections(&mut self, view: &View) {
        let subject = |row: &ConnectionRow| Subject::Connection(row.shard, row.now.slot, row.now.generation);
        let open: HashSet<Subject> = view.connections.iter().map(subject).collect();
        self.extremes.retain(|(subject, _), _| !matches!(subject, Subject::Connection(..)) || open.contains(subject));
    }
}

/// Whether both snapshots are of the same server, in this order.
fn is_next(before: &Snapshot, now: &Snapshot) -> bool {
    before.pid == now.pid && before.uptime < now.uptime
}

/// Returns the rate per second, or `None` if the count decreased or no time has passed.
fn per_second(before: u64, now: u64, interval: u64) -> Option<f64> {
    let count = now.checked_sub(before)?;
    (interval > 0).then(|| count as f64 * 1e9 / interval as f64)
}

fn busy(before: &ShardStats, now: &ShardStats) -> Option<f64> {
    let turns = now.turns.checked_sub(before.turns).filter(|&turns| turns > 0)?;
    let idle = now.idle_turns.checked_sub(before.idle_turns)?;
    Some(turns.saturating_sub(idle) as f64 / turns as f64)
}

/// Returns the values recorded between two snapshots, or `None` if there are none, or fewer than before.
fn between(before: &Histogram<u64>, now: &Histogram<u64>) -> Option<Histogram<u64>> {
    let mut between = now.clone();
    between.subtract(before).ok()?;
    (!between.is_empty()).then_some(between)
}

/// Returns the sums over all shards by procedure, each with the number of its refusals.
fn by_procedure(snapshot: &Snapshot) -> BTreeMap<(u32, u32, u32), (ProcedureStats, u64)> {
    let mut all = BTreeMap::new();
    for stats in snapshot.shards.iter().filter_map(|shard| shard.stats.as_ref()) {
        for procedure in &stats.procedures {
            let none = || {
                let mut none = ProcedureStats::default();
                none.latency.auto(true);
                (none, 0_u64)
            };
            let (sum, refusals) =
                all.entry((procedure.program, procedure.version, procedure.procedure)).or_insert_with(none);
            sum.calls = sum.calls.saturating_add(procedure.calls);
            sum.bytes_in = sum.bytes_in.saturating_add(procedure.bytes_in);
            sum.bytes_out = sum.bytes_out.saturating_add(procedure.bytes_out);
            // Adding cannot fail, because the histogram resizes itself.
            let _ = sum.latency.add(&*procedure.latency);
            *refusals = refusals.saturating_add(sum_refusals(&procedure.refusals));
        }
    }
    all
}

#[cfg(test)]
mod tests;
