//! Tests of the program `rpcrdma topo`, and of its proposed configuration.

use std::fs;

use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::{Config, IdlePolicy};
use rpcrdma_host::plan::{Plan, PlanRequest};
use rpcrdma_host::{Topology, Tree};
use serde_json::Value;
use tempfile::TempDir;

fn topo(arguments: &[&str]) -> (i32, String, String) {
    crate::tool::rpcrdma("topo", arguments)
}

/// Creates a machine with two nodes of four cores and a disk on the second.
fn machine() -> TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (path, text) in [
        ("sys/devices/system/cpu/online", "0-7\n"),
        ("sys/devices/system/cpu/isolated", "5-6\n"),
        ("sys/devices/system/node/node0/cpulist", "0-3\n"),
        ("sys/devices/system/node/node1/cpulist", "4-7\n"),
        ("sys/devices/system/node/node1/distance", "21 10\n"),
        ("sys/devices/system/cpu/cpu4/cache/index2/level", "2\n"),
        ("sys/devices/system/cpu/cpu4/cache/index2/type", "Unified\n"),
        ("sys/devices/system/cpu/cpu4/cache/index2/size", "1024K\n"),
        ("sys/devices/system/cpu/cpu4/cache/index2/shared_cpu_list", "4\n"),
        ("sys/devices/system/cpu/cpu4/cache/index3/level", "3\n"),
        ("sys/devices/system/cpu/cpu4/cache/index3/type", "Unified\n"),
        ("sys/devices/system/cpu/cpu4/cache/index3/size", "32768K\n"),
        ("sys/devices/system/cpu/cpu4/cache/index3/shared_cpu_list", "4-7\n"),
        ("sys/class/nvme/nvme0/device/numa_node", "1\n"),
    ] {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
    root
}

#[test]
fn text_and_json_output_agree() {
    let machine = machine();
    let root = ["--root", machine.path().to_str().expect("a path of text")];
    let (status, out, _) = topo(&[&["--device", "nvme0", "--shards", "3", "--workers", "1"], &root[..]].concat());
    assert_eq!(status, 0);
    for words in [
        "node 1: cores 4-7, distances 21 10\n  nvme nvme0\n  core 4: L2 1024K, L3 32768K of 4-7\n  core 5",
        "isolated: 5-6\n",
        "shards on 5,6,4, workers on 7\n",
        "nvme0 is on node 1",
        "rpcperf serve --listen soft:server --only calls --idle poll --cores 5,6,4,7 --shards 3 --workers 1\n",
        "nfs3d /srv/data --listen soft:server --cores 5,6,4 --idle poll --workers 1\n",
        "cores: Some(vec![5, 6, 4]),\n",
    ] {
        assert!(out.contains(words), "{words:?} is not in: {out}");
    }
    let (status, out, _) = topo(&[&["iwarp:192.0.2.1", "--cores", "4", "--json"], &root[..]].concat());
    let report: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(status, 0);
    assert_eq!(
        (&report["plan"]["shards"], &report["plan"]["workers"]),
        (&[5, 6, 4][..].into(), &[7][..].into()),
        "{report}"
    );
    assert!(report["plan"]["commands"][0].as_str().is_some_and(|line| line.contains("--listen iwarp:192.0.2.1 ")));
    assert_eq!((&report["cores"][5]["isolated"], &report["nodes"][1]["cores"][0]), (&true.into(), &4.into()));
    assert_eq!((&report["devices"][0]["name"], &report["devices"][0]["kind"]), (&"nvme0".into(), &"nvme".into()));
}

#[test]
fn a_core_is_proposed_on_this_machine() {
    let (status, out, errors) = topo(&["--json", "--cores", "1"]);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {errors}"));
    assert_eq!(status, 0);
    assert_eq!(report["plan"]["shards"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(topo(&[]).0, 0);
}

#[test]
fn impossible_placements_are_refused() {
    let machine = machine();
    let root = ["--root", machine.path().to_str().expect("a path of text")];
    let (status, out, errors) = topo(&[&["--shards", "9"], &root[..]].concat());
    assert_eq!((status, out.as_str()), (1, ""));
    assert!(errors.contains("request at most 8"), "{errors}");
    let (status, _, errors) = topo(&[&["--device", "mlx5_0"], &root[..]].concat());
    assert!(status == 1 && errors.contains("unknown --device `mlx5_0`"), "{errors}");
    for arguments in [&["--workers", "1"][..], &["--shards", "0"], &["--cores", "1", "--shards", "1"], &["tcp:x"]] {
        assert_eq!(topo(arguments).0, 2, "{arguments:?}");
    }
}

/// Returns the value of a block and the text of its code.
macro_rules! value_and_code {
    ($($code:tt)*) => {
        ({ $($code)* }, stringify!($($code)*))
    };
}

#[test]
fn the_printed_configuration_compiles() {
    let machine = machine();
    let topology = Topology::read(&Tree::new(machine.path()));
    let plan = Plan::propose(&topology, None, PlanRequest::Threads { shards: 2, workers: 1 }).expect("there is room");
    #[rustfmt::skip]
    let (config, text) = value_and_code! {
        let mut shard = Config::default();
        shard.poll.idle = IdlePolicy::Poll;
        shard.memory.numa_node = Some(1);
        ServerConfig {
        shard,
        shards: 2,
        cores: Some(vec![5, 6]),
        workers: Some(WorkerConfig { count: 1, cores: Some(vec![4]), ..WorkerConfig::default() }),
        ..ServerConfig::default()
        }
    };
    assert_eq!(config.cores.as_deref(), Some(plan.shards()));
    let squeezed = |text: &str| text.split_whitespace().collect::<String>();
    assert_eq!(squeezed(&plan.configuration()), squeezed(text));
}
