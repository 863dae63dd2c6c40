//! Comparison of the block store with `fio`, on the same file and with the same system calls.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use rpcrdma::Address;
use rpcrdma::auth::AuthPolicy;
use rpcrdma_config::program::say;
use rustix::thread::CpuSet;
use serde_json::{Value, json};

use crate::client::BlockClient;
use crate::demo::{ServerProcess, create_random_file};
use crate::parse_size;

#[derive(Debug, Args)]
pub(crate) struct Compare {
    /// Size of the file, in bytes. It is smaller if less than twice the size is free on the disk.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_size)]
    size: u64,
    /// Directory of the temporary file. Default: the system's temporary directory.
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// Number of rounds, each of which measures `fio` and then the block store.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each measurement.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Core of the server's shard, and of `fio`.
    #[arg(long, value_name = "CORE", default_value_t = 0)]
    server_core: usize,
    /// Core of the client.
    #[arg(long, value_name = "CORE", default_value_t = 1)]
    client_core: usize,
    /// Measure only rows whose names contain this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Also write the rows to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A measured operation.
struct Row {
    name: &'static str,
    /// Name of the operation in `fio` (`--rw`).
    fio: &'static str,
    block: usize,
    depth: usize,
}

impl Row {
    fn is_write(&self) -> bool {
        self.fio.ends_with("write")
    }

    fn is_random(&self) -> bool {
        self.fio.starts_with("rand")
    }
}

const ROWS: [Row; 6] = [
    Row { name: "4 KiB random reads, depth 1", fio: "randread", block: 4096, depth: 1 },
    Row { name: "4 KiB random reads, depth 32", fio: "randread", block: 4096, depth: 32 },
    Row { name: "4 KiB random reads, depth 128", fio: "randread", block: 4096, depth: 128 },
    Row { name: "4 KiB random writes, depth 32", fio: "randwrite", block: 4096, depth: 32 },
    Row { name: "1 MiB sequential reads, depth 8", fio: "read", block: 1 << 20, depth: 8 },
    Row { name: "1 MiB sequential writes, depth 8", fio: "write", block: 1 << 20, depth: 8 },
];
/// The operation whose processor time is also measured.
const PROCESSOR_TIME_ROW: &Row = &ROWS[1];

/// Blocks per second, and processor time per block in microseconds.
struct Measurement {
    rate: f64,
    processor: f64,
}

pub(crate) fn run(options: &Compare) -> anyhow::Result<()> {
    let chosen: Vec<&Row> = ROWS.iter().filter(|row| row.name.contains(&options.only)).collect();
    ensure!(
        !chosen.is_empty(),
        "no row name contains --only {:?}: expected part of one of {:?}",
        options.only,
        ROWS.each_ref().map(|row| row.name)
    );
    let version = Command::new("fio").arg("--version").stderr(Stdio::null()).output();
    let version = version.context("cannot run fio, which is needed (apt-get install fio)")?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::Builder::new().prefix("blockstore-").tempdir_in(&parent);
    let dir = dir.with_context(|| format!("cannot create a directory in {} (--dir)", parent.display()))?;
    let disk = rustix::fs::statvfs(dir.path()).context("statvfs")?;
    let size = options.size.min(disk.f_bavail * disk.f_frsize / 2) >> 20 << 20;
    ensure!(size > 0, "{}: less than 2 MiB are free on the disk (--dir)", parent.display());
    let path = dir.path().join("store");
    create_random_file(path.clone(), size, 1)?.sync_all().context("fsync")?;
    say(&format!(
        "{version} and blockstore on {}, {size} bytes; {} rounds of {} s; server and fio on core {}, client on core {}",
        path.display(),
        options.rounds,
        options.seconds,
        options.server_core,
        options.client_core
    ));
    let time = Duration::from_secs(options.seconds);
    // Measures `fio` and the block store in turn.
    let alternate = |server: &mut Option<MeasuredServer>, row: &Row, idle: &str| {
        let (mut fio, mut store) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            fio.push(run_fio(row, &path, size, options)?);
            store.push(MeasuredServer::get(server, &path, options, idle)?.measure(row, size, time)?);
        }
        anyhow::Ok([fio, store])
    };

    let mut server = None;
    let mut rows = Vec::new();
    say("| | fio | blockstore | ratio |\n| --- | --- | --- | --- |");
    for row in chosen {
        let [fio, store] = alternate(&mut server, row, "adaptive")?
            .map(|all| Rounds::from_measurements(&all, |measurement| measurement.rate));
        let ratio = store.median / fio.median;
        say(&format!("| {} | {fio} | {store} | {ratio:.2} |", row.name));
        rows.push(json!({
            "name": row.name, "fio": fio.median, "blockstore": store.median, "ratio": ratio,
            "fio_rounds": fio.all, "blockstore_rounds": store.all,
        }));
    }
    stop(server)?;

    // The processor time needs a server that sleeps, because a polling shard uses all of the core.
    let mut server = None;
    let measured = alternate(&mut server, PROCESSOR_TIME_ROW, "event")?;
    stop(server)?;
    let rates = Rounds::from_measurements(&measured[1], |measurement| measurement.rate);
    let [fio, store] = measured.map(|all| Rounds::from_measurements(&all, |measurement| measurement.processor));
    say(&format!(
        "processor time of one of the {}, in µs, with a server that sleeps when it can ({:.0}/s): fio {:.2}, blockstore {:.2}",
        PROCESSOR_TIME_ROW.name, rates.median, fio.median, store.median
    ));
    rows.push(json!({
        "name": "processor time of a 4 KiB read, µs", "fio": fio.median, "blockstore": store.median,
        "ratio": store.median / fio.median,
    }));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&rows)?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// One number of each round.
struct Rounds {
    all: Vec<f64>,
    median: f64,
}

impl Rounds {
    fn from_measurements(rounds: &[Measurement], value: fn(&Measurement) -> f64) -> Self {
        let all: Vec<f64> = rounds.iter().map(value).collect();
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        Self { median: sorted[sorted.len() / 2], all }
    }
}

impl std::fmt::Display for Rounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let min = self.all.iter().copied().fold(f64::INFINITY, f64::min);
        let max = self.all.iter().copied().fold(0.0, f64::max);
        write!(f, "{:.0} ({min:.0}–{max:.0})", self.median)
    }
}

/// A server process, its address, and the core of its client.
struct MeasuredServer {
    process: ServerProcess,
    address: Address,
    client_core: usize,
}

impl MeasuredServer {
    /// Returns the server, which is started at the first use.
    fn get<'a>(server: &'a mut Option<Self>, path: &Path, options: &Compare, idle: &str) -> anyhow::Result<&'a Self> {
        if server.is_none() {
            let address: Address = format!("soft:blockstore-{}-{idle}", std::process::id()).parse()?;
            let arguments = ["--io", "uring", "--idle", idle, "--cores", &options.server_core.to_string()];
            let process = ServerProcess::start(&address, path, &arguments.map(str::to_owned))?;
            *server = Some(Self { process, address, client_core: options.client_core });
        }
        server.as_ref().context("a server")
    }

    fn measure(&self, row: &Row, size: u64, time: Duration) -> anyhow::Result<Measurement> {
        let run = || {
            // The affinity applies only to this thread, which runs the client.
            let mut core = CpuSet::new();
            core.set(self.client_core);
            rustix::thread::sched_setaffinity(None, &core).context("the client's core")?;
            let mut client = BlockClient::connect(&self.address, row.block, row.depth, AuthPolicy::Off)?;
            let before = processor_time(self.process.id())?;
            let (blocks, elapsed) = client.measure(row.is_write(), row.is_random(), size, time)?;
            let after = processor_time(self.process.id())?;
            let per_block = after.saturating_sub(before).as_secs_f64() * 1e6 / blocks.max(1) as f64;
            Ok(Measurement { rate: blocks as f64 / elapsed.as_secs_f64(), processor: per_block })
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|_| bail!("the client panicked")))
    }
}

fn stop(server: Option<MeasuredServer>) -> anyhow::Result<()> {
    server.map_or(Ok(()), |server| server.process.stop())
}

/// Processor time of all threads of a process, including the kernel's threads for its io_urings.
fn processor_time(process: u32) -> anyhow::Result<Duration> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        // The thread may have ended.
        let Ok(text) = std::fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        let nanoseconds = text.split_whitespace().next().context("schedstat")?;
        sum += nanoseconds.parse::<u64>().context("schedstat")?;
    }
    Ok(Duration::from_nanos(sum))
}

fn run_fio(row: &Row, path: &Path, size: u64, options: &Compare) -> anyhow::Result<Measurement> {
    let mut command = Command::new("fio");
    command.arg("--name=blockstore").arg(format!("--filename={}", path.display())).arg(format!("--size={size}"));
    command.args(["--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--time_based=1"]);
    command.args(["--norandommap=1", "--randrepeat=0", "--output-format=json"]);
    command.arg(format!("--rw={}", row.fio)).arg(format!("--bs={}", row.block));
    command.arg(format!("--iodepth={}", row.depth)).arg(format!("--runtime={}", options.seconds));
    command.arg(format!("--cpus_allowed={}", options.server_core));
    let output = command.stdin(Stdio::null()).output().context("fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr).trim());
    let all: Value = serde_json::from_slice(&output.stdout).context("invalid JSON from fio")?;
    let job = &all["jobs"][0];
    let moved = &job[if row.is_write() { "write" } else { "read" }];
    let number =
        |values: &Value, name: &str| values[name].as_f64().with_context(|| format!("the JSON of fio lacks {name}"));
    let percent = number(job, "usr_cpu")? + number(job, "sys_cpu")?;
    let microseconds = number(moved, "runtime")? * 1e3;
    let processor = percent / 100.0 * microseconds / number(moved, "total_ios")?.max(1.0);
    Ok(Measurement { rate: number(moved, "iops")?, processor })
}
