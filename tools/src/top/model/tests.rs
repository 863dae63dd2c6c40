use rpcrdma::stats::ShardSnapshot;

use super::*;

/// One second in nanoseconds.
const SECOND: u64 = 1_000_000_000;

fn snapshot(uptime: u64, stats: impl IntoIterator<Item = Option<ShardStats>>) -> Snapshot {
    let mut snapshot = Snapshot::default();
    (snapshot.format, snapshot.pid, snapshot.uptime) = (1, 7, uptime);
    for (n, stats) in stats.into_iter().enumerate() {
        let mut shard = ShardSnapshot::default();
        (shard.shard, shard.stats) = (n as u32, stats);
        snapshot.shards.push(shard);
    }
    snapshot
}

fn stats(set: impl FnOnce(&mut ShardStats)) -> Option<ShardStats> {
    let mut stats = ShardStats::default();
    set(&mut stats);
    Some(stats)
}

fn procedure(procedure: u32, calls: u64, latency: u64) -> ProcedureStats {
    let mut stats = ProcedureStats::default();
    (stats.program, stats.version, stats.procedure) = (100_003, 3, procedure);
    (stats.calls, stats.bytes_in) = (calls, 100 * calls);
    stats.latency.record_n(latency, calls).expect("within its bounds");
    stats.refusals.system_errors = calls / 10;
    stats
}

fn peer(slot: u32, generation: u32, useful: u64) -> ConnectionStats {
    let mut stats = ConnectionStats::default();
    (stats.slot, stats.generation, stats.useful) = (slot, generation, useful);
    stats
}

fn rate(figure: Option<Figure>) -> Option<(f64, f64, f64)> {
    figure.map(|figure| (figure.now, figure.min, figure.max))
}

#[test]
fn rates_are_per_second_of_server_uptime_between_two_snapshots() {
    let mut model = Model::default();
    let at = |calls: u64, turns: u64, idle: u64| stats(|s| (s.calls, s.turns, s.idle_turns) = (calls, turns, idle));
    let first = model.update(snapshot(SECOND, [at(100, 1000, 900)]));
    assert_eq!(
        (first.interval, first.shards[0].calls, first.shards[0].busy),
        (0, None, None),
        "one snapshot has no rates"
    );
    let second = model.update(snapshot(3 * SECOND, [at(300, 2000, 1150)]));
    assert_eq!(second.interval, 2 * SECOND);
    assert_eq!(rate(second.shards[0].calls), Some((100.0, 100.0, 100.0)));
    assert_eq!(rate(second.shards[0].busy), Some((0.75, 0.75, 0.75)));
    let third = model.update(snapshot(4 * SECOND, [at(310, 2100, 1250)]));
    assert_eq!(rate(third.shards[0].calls), Some((10.0, 10.0, 100.0)));
    assert_eq!(rate(third.shards[0].busy), Some((0.0, 0.0, 0.75)));
    let fourth = model.update(snapshot(5 * SECOND, [at(1310, 2200, 1250)]));
    assert_eq!(rate(fourth.shards[0].calls), Some((1000.0, 10.0, 1000.0)));
}

#[test]
fn latencies_cover_only_the_interval() {
    let mut model = Model::default();
    let at = |fast: u64, slow: u64| {
        stats(|s| {
            s.latency.record_n(1000, fast).expect("within its bounds");
            s.latency.record_n(900_000, slow).expect("within its bounds");
            s.batch.record_n(4, fast).expect("within its bounds");
        })
    };
    model.update(snapshot(SECOND, [at(100_000, 0)]));
    let second = model.update(snapshot(2 * SECOND, [at(100_010, 90)]));
    let p50 = second.shards[0].p50.expect("calls were timed").now;
    assert!((890_000.0..910_000.0).contains(&p50), "{p50}: earlier calls do not count");
    assert_eq!(rate(second.shards[0].batch).map(|batch| batch.0), Some(4.0));
    let third = model.update(snapshot(3 * SECOND, [at(100_010, 90)]));
    assert_eq!((third.shards[0].p50, third.shards[0].batch), (None, None), "nothing was timed");
}

#[test]
fn a_restart_of_the_server_resets_rates_and_extremes() {
    let mut model = Model::default();
    let at = |uptime: u64, calls: u64| snapshot(uptime, [stats(|s| s.calls = calls)]);
    model.update(at(SECOND, 0));
    model.update(at(2 * SECOND, 1_000_000));
    let restarted = model.update(at(SECOND / 2, 10));
    assert_eq!((restarted.interval, restarted.shards[0].calls), (0, None));
    let next = model.update(at(SECOND, 20));
    assert_eq!(rate(next.shards[0].calls), Some((20.0, 20.0, 20.0)), "the extremes are those of the new server");
    // Another process has a longer uptime.
    let mut other = at(9 * SECOND, 5_000);
    other.pid = 8;
    assert_eq!(model.update(other).interval, 0);
}

#[test]
fn decreasing_or_missing_counters_have_no_rate() {
    let mut model = Model::default();
    model.update(snapshot(SECOND, [stats(|s| (s.calls, s.turns) = (50, 10)), None]));
    let view = model.update(snapshot(2 * SECOND, [stats(|s| (s.calls, s.turns) = (20, 5)), stats(|s| s.calls = 9)]));
    assert_eq!((view.shards[0].calls, view.shards[0].busy, view.shards[1].calls), (None, None, None));
    let view = model.update(snapshot(3 * SECOND, [None, stats(|s| s.calls = 10)]));
    assert!(!view.shards[0].answered && view.shards[1].answered);
    assert_eq!(rate(view.shards[1].calls), Some((1.0, 1.0, 1.0)));
    // Two snapshots with the same uptime have no interval between them.
    assert_eq!(model.update(snapshot(3 * SECOND, [None, None])).interval, 0);
}

#[test]
fn figures_of_procedures_are_sums_over_all_shards() {
    let mut model = Model::default();
    let at = |one: u64, other: u64| {
        let first = stats(|s| s.procedures = vec![procedure(6, one, 1000), procedure(7, 10, 5000)]);
        [first, stats(|s| s.procedures = vec![procedure(6, other, 9000)])]
    };
    model.update(snapshot(SECOND, at(10, 0)));
    let view = model.update(snapshot(2 * SECOND, at(40, 90)));
    let [read, write] = &view.procedures[..] else { panic!("{:?}", view.procedures) };
    assert_eq!((read.procedure, read.timed_total, rate(read.timed)), (6, 130, Some((120.0, 120.0, 120.0))));
    assert_eq!((read.share, read.bytes_in, read.refused_total), (Some(1.0), Some(100.0), 13));
    let p99 = read.p99.expect("calls were timed").now;
    assert!((8900.0..9100.0).contains(&p99), "{p99}");
    assert_eq!((write.share, write.p99, write.timed.map(|timed| timed.now)), (Some(0.0), None, Some(0.0)));
}

#[test]
fn connections_in_reused_slots_are_distinct() {
    let mut model = Model::default();
    let at = |peers: Vec<ConnectionStats>, all: u64| [stats(|s| (s.peers, s.connections) = (peers, all))];
    model.update(snapshot(SECOND, at(vec![peer(0, 0, 10), peer(1, 0, 1_000_000)], 2)));
    let view = model.update(snapshot(2 * SECOND, at(vec![peer(0, 0, 30), peer(1, 1, 5)], 9)));
    let rates: Vec<_> = view.connections.iter().map(|row| row.messages.map(|messages| messages.now)).collect();
    assert_eq!((rates, view.connections_omitted), (vec![Some(20.0), None], 7));
    assert_eq!(model.extremes.keys().filter(|(subject, _)| matches!(subject, Subject::Connection(..))).count(), 1);
    model.update(snapshot(3 * SECOND, at(Vec::new(), 0)));
    assert!(
        !model.extremes.keys().any(|(subject, _)| matches!(subject, Subject::Connection(..))),
        "closed connections are dropped"
    );
}

#[test]
fn extreme_counters_saturate() {
    let mut model = Model::default();
    let saturated_stats = |n: u64| {
        stats(|s| {
            (s.turns, s.idle_turns, s.calls, s.peer_faults, s.peers_stalled) = (n, n - 7, n, n, n);
            s.procedures = vec![procedure(1, 3, 1)];
            s.procedures[0].bytes_in = n;
            s.procedures[0].refusals.transport = n;
        })
    };
    model.update(snapshot(1, [saturated_stats(8), saturated_stats(9)]));
    let view = model.update(snapshot(u64::MAX, [saturated_stats(u64::MAX), saturated_stats(u64::MAX)]));
    assert_eq!((view.shards[0].faults_total, view.procedures[0].refused_total), (u64::MAX, u64::MAX));
    serde_json::to_string(&view).expect("JSON");
}

#[test]
fn the_size_class_closest_to_exhaustion_is_reported() {
    let class = |size: usize, low_water: usize, count: usize| {
        let mut class = ClassStats::default();
        (class.size, class.low_water, class.count) = (size, low_water, count);
        class
    };
    let now = stats(|s| {
        s.pool.classes = vec![class(512, 100, 2000), class(4096, 3, 10), class(9, 0, 0), class(65536, 1, 32)]
    });
    let view = Model::default().update(snapshot(SECOND, [now]));
    assert_eq!(view.shards[0].pool_low, Some(PoolLow { size: 65536, low_water: 1, count: 32 }));
}
