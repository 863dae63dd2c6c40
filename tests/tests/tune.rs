//! Tests of `rpcrdma tune` with the real `rpcperf`.
//!
//! No test checks a figure that depends on time.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use clap::Parser;
use rpcrdma::fabric::testing::loopback_address;
use rpcrdma_tools::command::ExitStatus;
use rpcrdma_tools::tune;
use rustix::thread::CpuSet;
use serde_json::Value;

const RPCPERF: &str = env!("CARGO_BIN_EXE_rpcperf_tuned");

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: tune::Args,
}

/// Serializes the tests, because each run spins on two cores and would starve another.
fn lock_cores() -> MutexGuard<'static, ()> {
    static CORES: Mutex<()> = Mutex::new(());
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `rpcrdma tune` with this benchmark program. Returns its JSON result.
///
/// A busy host may complete too few calls in a short run. `tune` then fails, and this function doubles the time.
fn run_tune(program: &Path, directory: &Path, mut seconds: f64, arguments: &str) -> Value {
    let _cores = lock_cores();
    let result = directory.join("result.json");
    loop {
        let time = seconds.to_string();
        let fixed = ["tune", "--pairs", "9", "--seconds", &time];
        let paths = ["--rpcperf".as_ref(), program.as_os_str(), "--json".as_ref(), result.as_os_str()];
        let words = fixed.iter().map(AsRef::as_ref).chain(paths).chain(arguments.split_whitespace().map(AsRef::as_ref));
        let args = Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).args;
        match tune::run(&args) {
            Err(error) if seconds < 5.0 && error.to_string().contains("done within the measured time") => {
                seconds *= 2.0;
            }
            outcome => {
                assert_eq!(outcome.unwrap_or_else(|error| panic!("{arguments}: {error}")), ExitStatus::Success);
                return serde_json::from_str(&fs::read_to_string(&result).expect("the result")).expect("JSON");
            }
        }
    }
}

/// The benchmark program is a script around `rpcperf`. It replaces the measured rate: by 4000 calls per second if one
/// Send in 4 is signaled, otherwise by 1000.
#[test]
fn tune_finds_a_deliberately_bad_knob() {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("rpcperf");
    let text = format!(
        "#!/bin/sh\nrps=1000\ncase \" $* \" in *' --signal-every 4 '*) rps=4000 ;; esac\n\
         report=$('{RPCPERF}' \"$@\") || exit\necho \"$report\" | sed \"s/\\\"rps\\\": [0-9.e+]*/\\\"rps\\\": $rps/\"\n"
    );
    fs::write(&program, text).expect("a file");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a file of this user");
    let report = run_tune(
        &program,
        directory.path(),
        0.15,
        "--aim calls --repeats 2 --combine 1 --start idle=event --knob signal_every=4,64 --knob batch=off -- -t 64",
    );
    assert_eq!((&report["best"], &report["proven"]), (&"signal_every=4 idle=event".into(), &true.into()), "{report:#}");
    assert_eq!(report["comparison"]["ratio"].as_f64().map(f64::round), Some(4.0), "{report:#}");
    assert!(report["rpcperf"].as_str().is_some_and(|version| version.starts_with("rpcperf ")), "{report:#}");
    assert_eq!(report["candidates"].as_array().map(Vec::len), Some(3), "{report:#}");
    let server = report["recommended"]["server"].as_str().expect("text");
    for line in ["limits.credits = 128", "debug.signal_every = 4", "poll.idle = IdlePolicy::Event"] {
        assert!(server.contains(&format!("shard.{line};\n")), "{server}");
    }
}

/// At most two of the cores available to this process.
fn cores() -> String {
    let all = rustix::thread::sched_getaffinity(None).expect("the cores");
    let cores = (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).take(2);
    cores.map(|core| core.to_string()).collect::<Vec<_>>().join(",")
}

/// For each aim, `rpcperf` reports the figure, and it accepts each knob. `tune` compares nothing, because its only
/// candidate, `inline=1024`, is below the minimum.
#[test]
fn every_aim_is_measured() {
    let directory = tempfile::tempdir().expect("a directory");
    for (arguments, figure) in [
        (
            "--aim calls --start credits=32 --start batch=off --start coalesce_grants=off --start signal_every=4 \
             --start idle=event --start small_buffers=2000 --start message_buffers=300 --start workers=1",
            "rps",
        ),
        ("--aim bytes --start shards=2 --start idle=adaptive --start bulk_buffers=64K:8+1M:2", "bytes_per_s"),
        ("--aim p99 --rate 2000", "p99"),
        ("--aim cpu", "cpu"),
        (&format!("--aim cpu --rate 2000 soft:rpcrdma-tests-tune-{}", std::process::id()), "cpu"),
        (&format!("--aim calls --cores {} iwarp:{}", cores(), loopback_address().0), "rps"),
    ] {
        let arguments = format!("{arguments} --repeats 1 --knob inline=1024");
        let report = run_tune(Path::new(RPCPERF), directory.path(), 0.2, &arguments);
        assert!(report["start"]["figure"].as_f64() > Some(0.0), "{figure}: {report:#}");
        assert_eq!((&report["start"]["runs"], &report["comparison"]), (&1.into(), &Value::Null), "{report:#}");
        let failed = report["candidates"][0]["failed"].as_str().expect("text");
        assert!(failed.contains("4096"), "{failed}");
    }
}
