//! `rpcrdma tune` with the real `rpcperf`, on the software fabric.
//!
//! One knob is deliberately bad, and the tool must find it. No figure that depends on time is checked.

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

/// Serializes the tests: each run spins on two cores and would starve another.
fn alone() -> MutexGuard<'static, ()> {
    static CORES: Mutex<()> = Mutex::new(());
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tunes with this program in a few short runs. Returns its JSON result.
///
/// A busy host may complete too few calls in a short run. The program then asks for a longer one, and this function
/// repeats it.
fn tuned(program: &Path, folder: &Path, mut seconds: f64, arguments: &str) -> Value {
    let _cores = alone();
    let result = folder.join("result.json");
    loop {
        let time = seconds.to_string();
        let fixed = ["tune", "--pairs", "9", "--seconds", &time];
        let paths = ["--rpcperf".as_ref(), program.as_os_str(), "--json".as_ref(), result.as_os_str()];
        let words = fixed.iter().map(AsRef::as_ref).chain(paths).chain(arguments.split_whitespace().map(AsRef::as_ref));
        let args = Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).args;
        match tune::run(&args) {
            Err(error) if seconds < 5.0 && error.to_string().contains("done within the time that counts") => {
                seconds *= 2.0;
            }
            ended => {
                assert_eq!(ended.unwrap_or_else(|error| panic!("{arguments}: {error}")), ExitStatus::Success);
                return serde_json::from_str(&fs::read_to_string(&result).expect("the result")).expect("JSON");
            }
        }
    }
}

/// The script reports four times the rate of the others if one Send in 4 is signalled, whatever `rpcperf` has measured.
#[test]
fn tune_finds_a_deliberately_bad_knob() {
    let folder = tempfile::tempdir().expect("a directory");
    let program = folder.path().join("rpcperf");
    let text = format!(
        "#!/bin/sh\nrps=1000\ncase \" $* \" in *' --signal-every 4 '*) rps=4000 ;; esac\n\
         said=$('{RPCPERF}' \"$@\") || exit\necho \"$said\" | sed \"s/\\\"rps\\\": [0-9.e+]*/\\\"rps\\\": $rps/\"\n"
    );
    fs::write(&program, text).expect("a file");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let said = tuned(
        &program,
        folder.path(),
        0.15,
        "--aim calls --repeats 2 --combine 1 --start idle=event --knob signal_every=4,64 --knob batch=off -- -t 64",
    );
    assert_eq!((&said["best"], &said["proven"]), (&"signal_every=4 idle=event".into(), &true.into()), "{said:#}");
    assert_eq!(said["comparison"]["ratio"].as_f64().map(f64::round), Some(4.0), "{said:#}");
    assert!(said["rpcperf"].as_str().is_some_and(|version| version.starts_with("rpcperf ")), "{said:#}");
    assert_eq!(said["candidates"].as_array().map(Vec::len), Some(3), "{said:#}");
    let server = said["recommended"]["server"].as_str().expect("text");
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

/// Each aim finds its figure in the output of `rpcperf`, and each knob is an option of `rpcperf`. The one candidate is
/// reported as impossible, so that nothing is compared.
#[test]
fn every_aim_is_measured() {
    let folder = tempfile::tempdir().expect("a directory");
    for (arguments, of) in [
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
        let said = tuned(Path::new(RPCPERF), folder.path(), 0.2, &arguments);
        assert!(said["start"]["figure"].as_f64() > Some(0.0), "{of}: {said:#}");
        assert_eq!((&said["start"]["runs"], &said["comparison"]), (&1.into(), &Value::Null), "{said:#}");
        let failed = said["candidates"][0]["failed"].as_str().expect("text");
        assert!(failed.contains("4096"), "{failed}");
    }
}
