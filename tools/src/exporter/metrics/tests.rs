use std::collections::BTreeSet;

use rpcrdma::stats::ShardSnapshot;

use super::*;

fn snapshot(shards: u32) -> Snapshot {
    let mut snapshot = Snapshot::default();
    snapshot.uptime = 1_500_000_000;
    for n in 0..shards {
        let mut stats = ShardStats::default();
        (stats.calls, stats.receive_size, stats.credits_granted) = (1000 + u64::from(n), 4096, 64);
        stats.latency.record_n(1_500, 30).expect("within its bounds");
        stats.latency.record_n(3_000_000, 3).expect("within its bounds");
        stats.latency.record_n(30_000_000_000, 1).expect("within its bounds");
        stats.batch.record_n(3, 5).expect("within its bounds");
        stats.refusals.transport = 4;
        // Two arenas have a class of the same size.
        let mut class = ClassStats::default();
        (class.size, class.count, class.free, class.low_water, class.failures) = (512, 10, 5, 2, 1);
        stats.pool.classes = vec![class, class];
        let mut procedure = ProcedureStats::default();
        (procedure.program, procedure.version, procedure.procedure, procedure.bytes_in) = (100_003, 3, 6, 777);
        procedure.latency.record_n(2_000, 8).expect("within its bounds");
        stats.procedures.push(procedure);
        let mut shard = ShardSnapshot::default();
        (shard.shard, shard.address, shard.stats) = (n, "soft:\"a\"".to_owned(), Some(stats));
        snapshot.shards.push(shard);
    }
    snapshot
}

fn devices() -> Vec<DeviceCounter> {
    let counter = |origin, name: &str, value| {
        let [device, port, name] = ["mlx5_0", "1", name].map(str::to_owned);
        DeviceCounter { origin, device, port, name, value }
    };
    vec![counter(Origin::Driver, "out_of_buffer", 12), counter(Origin::Port, "link_downed", 3)]
}

/// Returns all samples: name with labels, and value.
fn samples(text: &str) -> Vec<(&str, &str)> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' ')).collect()
}

fn value(text: &str, series: &str) -> f64 {
    let found: Vec<_> = samples(text).into_iter().filter(|(name, _)| *name == series).collect();
    let [(_, value)] = found[..] else { panic!("{series}: {found:?} in\n{text}") };
    value.parse().expect("a number")
}

#[test]
fn metrics_have_the_values_of_the_snapshot_in_base_units() {
    let text = encode_text(Some(snapshot(2)), devices());
    for (series, expected) in [
        ("rpcrdma_up", 1.0),
        ("rpcrdma_uptime_seconds", 1.5),
        (r#"rpcrdma_calls_total{shard="1"}"#, 1001.0),
        (r#"rpcrdma_credits_granted{shard="0"}"#, 64.0),
        (r#"rpcrdma_receive_size_bytes{shard="0"}"#, 4096.0),
        (r#"rpcrdma_shard_up{shard="0",address="soft:\"a\"",core=""}"#, 1.0),
        (r#"rpcrdma_refusals_total{shard="0",reason="transport"}"#, 4.0),
        (r#"rpcrdma_pool_buffers{shard="0",size="512"}"#, 20.0),
        (r#"rpcrdma_pool_misses_total{shard="0",size="512"}"#, 2.0),
        (r#"rpcrdma_call_latency_seconds_count{shard="0"}"#, 34.0),
        (r#"rpcrdma_call_latency_seconds_bucket{le="0.000001",shard="0"}"#, 0.0),
        (r#"rpcrdma_call_latency_seconds_bucket{le="0.000002",shard="0"}"#, 30.0),
        (r#"rpcrdma_call_latency_seconds_bucket{le="0.005",shard="0"}"#, 33.0),
        (r#"rpcrdma_call_latency_seconds_bucket{le="10.0",shard="0"}"#, 33.0),
        (r#"rpcrdma_call_latency_seconds_bucket{le="+Inf",shard="0"}"#, 34.0),
        (r#"rpcrdma_post_work_requests_bucket{le="4.0",shard="0"}"#, 5.0),
        (r#"rpcrdma_procedure_latency_seconds_count{shard="0",program="100003",version="3",procedure="6"}"#, 8.0),
        (r#"rpcrdma_procedure_argument_bytes_total{shard="0",program="100003",version="3",procedure="6"}"#, 777.0),
        (r#"rpcrdma_device_hw_counter_total{device="mlx5_0",port="1",counter="out_of_buffer"}"#, 12.0),
        (r#"rpcrdma_device_port_counter_total{device="mlx5_0",port="1",counter="link_downed"}"#, 3.0),
    ] {
        assert_eq!(value(&text, series), expected, "{series}");
    }
    let sum = value(&text, r#"rpcrdma_call_latency_seconds_sum{shard="0"}"#);
    assert!((30.0..30.5).contains(&sum), "{sum}");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn series_are_unique_and_families_have_valid_names_and_help() {
    let text = encode_text(Some(snapshot(3)), devices());
    let all = samples(&text);
    let names: BTreeSet<_> = all.iter().map(|sample| sample.0).collect();
    assert_eq!(names.len(), all.len(), "Prometheus refuses duplicate series");
    let mut families = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').expect("name and type");
        families += 1;
        let is_name_char = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(name.starts_with("rpcrdma_") && name.chars().all(is_name_char) && !name.ends_with("_total"), "{line}");
        assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help text");
    }
    assert!(families > 60, "{families}");
}

#[test]
fn absent_servers_and_shards_without_an_answer_are_reported_as_down() {
    let absent = encode_text(None, devices());
    assert_eq!(value(&absent, "rpcrdma_up"), 0.0);
    assert!(!absent.contains("rpcrdma_calls") && absent.contains("out_of_buffer"), "{absent}");
    let mut stuck = snapshot(2);
    stuck.shards[1].stats = None;
    let stuck = encode_text(Some(stuck), Vec::new());
    assert_eq!(value(&stuck, r#"rpcrdma_shard_up{shard="1",address="soft:\"a\"",core=""}"#), 0.0);
    assert!(!stuck.contains(r#"rpcrdma_calls_total{shard="1"}"#));
}

/// Returns the names of the metrics in a query.
fn metrics(query: &str) -> Vec<&str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    query.split(|c| !word(c)).filter(|word| word.starts_with("rpcrdma_")).collect()
}

#[test]
fn the_dashboard_queries_existing_metrics() {
    let text = encode_text(Some(snapshot(1)), devices());
    let existing: BTreeSet<&str> =
        samples(&text).iter().map(|(name, _)| name.split('{').next().unwrap_or(name)).collect();
    let dashboard: serde_json::Value = serde_json::from_str(include_str!("../../../grafana.json")).expect("JSON");
    let mut queried = 0;
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let query = target["expr"].as_str().expect("a query");
            let names = metrics(query);
            assert!(!names.is_empty(), "{query}");
            for name in names {
                assert!(existing.contains(name), "{query}: no metric {name}");
                queried += 1;
            }
        }
    }
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    let variables: Vec<_> =
        variables.iter().filter_map(|variable| variable["query"].as_str()).flat_map(metrics).collect();
    assert!(variables.iter().all(|name| existing.contains(name)) && !variables.is_empty(), "{variables:?}");
    assert!(queried > 30, "{queried}");
}
