//! The block store beside `fio`, on the same file with the same system calls.
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
use crate::demo::{ServerProcess, pseudo_random};
use crate::size;

#[derive(Debug, Args)]
pub(crate) struct Compare {
    /// Size of the file in bytes; less if the disk has less than twice this free.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = size)]
    size: u64,
    /// Directory of the temporary file. Default: that of the system.
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// Rounds of `fio`, then the block store.
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
    /// Print only rows whose names contain this.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Write the rows to this file as JSON, too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measured operation.
struct Row {
    name: &'static str,
    /// Name in `fio`.
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
/// Row of processor time.
const TIMED: &Row = &ROWS[1];

/// Blocks per second, and processor time of each in microseconds.
struct Figure {
    rate: f64,
    processor: f64,
}

pub(crate) fn run(options: &Compare) -> anyhow::Result<()> {
    let chosen: Vec<&Row> = ROWS.iter().filter(|row| row.name.contains(&options.only)).collect();
    ensure!(
        !chosen.is_empty(),
        "--only {:?} is in no row's name: {:?}",
        options.only,
        ROWS.each_ref().map(|row| row.name)
    );
    let version = Command::new("fio").arg("--version").stderr(Stdio::null()).output();
    let version = version.context("fio is needed, and cannot be run (apt-get install fio)")?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::Builder::new().prefix("blockstore-").tempdir_in(&parent);
    let dir = dir.with_context(|| format!("a directory in {}", parent.display()))?;
    let disk = rustix::fs::statvfs(dir.path()).context("statvfs")?;
    let size = options.size.min(disk.f_bavail * disk.f_frsize / 2) >> 20 << 20;
    ensure!(size > 0, "{}: the disk is full", parent.display());
    let path = dir.path().join("store");
    pseudo_random(path.clone(), size, 1)?.sync_all().context("fsync")?;
    say(&format!(
        "{version} and blockstore on {}, {size} bytes; {} rounds of {} s; server and fio on core {}, client on core {}",
        path.display(),
        options.rounds,
        options.seconds,
        options.server_core,
        options.client_core
    ));
    let time = Duration::from_secs(options.seconds);
    // Figures of `fio` and of the block store, in turn.
    let alternate = |server: &mut Option<Served>, row: &Row, idle: &str| {
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            theirs.push(run_fio(row, &path, size, options)?);
            ours.push(Served::get(server, &path, options, idle)?.measure(row, size, time)?);
        }
        anyhow::Ok([theirs, ours])
    };

    let mut server = None;
    let mut rows = Vec::new();
    say("| | fio | blockstore | ratio |\n| --- | --- | --- | --- |");
    for row in chosen {
        let [theirs, ours] = alternate(&mut server, row, "adaptive")?.map(|all| Rounds::of(&all, |one| one.rate));
        let ratio = ours.median / theirs.median;
        say(&format!("| {} | {theirs} | {ours} | {ratio:.2} |", row.name));
        rows.push(json!({
            "name": row.name, "fio": theirs.median, "blockstore": ours.median, "ratio": ratio,
            "fio_rounds": theirs.all, "blockstore_rounds": ours.all,
        }));
    }
    stop(server)?;

    // A polling shard takes all of the core.
    let mut server = None;
    let figures = alternate(&mut server, TIMED, "event")?;
    stop(server)?;
    let rates = Rounds::of(&figures[1], |one| one.rate);
    let [theirs, ours] = figures.map(|all| Rounds::of(&all, |one| one.processor));
    say(&format!(
        "processor time of one of the {}, in µs, with a server that sleeps when it can ({:.0}/s): fio {:.2}, blockstore {:.2}",
        TIMED.name, rates.median, theirs.median, ours.median
    ));
    rows.push(json!({
        "name": "processor time of a 4 KiB read, µs", "fio": theirs.median, "blockstore": ours.median,
        "ratio": ours.median / theirs.median,
    }));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&rows)?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Figures of one row.
struct Rounds {
    all: Vec<f64>,
    median: f64,
}

impl Rounds {
    fn of(figures: &[Figure], which: fn(&Figure) -> f64) -> Self {
        let all: Vec<f64> = figures.iter().map(which).collect();
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        Self { median: sorted[sorted.len() / 2], all }
    }
}

impl std::fmt::Display for Rounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let least = self.all.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.all.iter().copied().fold(0.0, f64::max);
        write!(f, "{:.0} ({least:.0}–{most:.0})", self.median)
    }
}

/// A server process.
struct Served {
    process: ServerProcess,
    address: Address,
    client_core: usize,
}

impl Served {
    /// The server; started at first use.
    fn get<'a>(server: &'a mut Option<Self>, path: &Path, options: &Compare, idle: &str) -> anyhow::Result<&'a Self> {
        if server.is_none() {
            let address: Address = format!("soft:blockstore-{}-{idle}", std::process::id()).parse()?;
            let arguments = ["--io", "uring", "--idle", idle, "--cores", &options.server_core.to_string()];
            let process = ServerProcess::start(&address, path, &arguments.map(str::to_owned))?;
            *server = Some(Self { process, address, client_core: options.client_core });
        }
        server.as_ref().context("a server")
    }

    fn measure(&self, row: &Row, size: u64, time: Duration) -> anyhow::Result<Figure> {
        let run = || {
            // Only the thread of the client.
            let mut core = CpuSet::new();
            core.set(self.client_core);
            rustix::thread::sched_setaffinity(None, &core).context("the client's core")?;
            let mut client = BlockClient::connect(&self.address, row.block, row.depth, AuthPolicy::Off)?;
            let before = processor_time(self.process.id())?;
            let (blocks, took) = client.measure(row.is_write(), row.is_random(), size, time)?;
            let after = processor_time(self.process.id())?;
            let each = after.saturating_sub(before).as_secs_f64() * 1e6 / blocks.max(1) as f64;
            Ok(Figure { rate: blocks as f64 / took.as_secs_f64(), processor: each })
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|_| bail!("the client has panicked")))
    }
}

fn stop(server: Option<Served>) -> anyhow::Result<()> {
    server.map_or(Ok(()), |server| server.process.stop())
}

/// Processor time of all threads of a process, including its io_urings.
fn processor_time(process: u32) -> anyhow::Result<Duration> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        // It may have ended.
        let Ok(text) = std::fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        let nanoseconds = text.split_whitespace().next().context("schedstat")?;
        sum += nanoseconds.parse::<u64>().context("schedstat")?;
    }
    Ok(Duration::from_nanos(sum))
}

fn run_fio(row: &Row, path: &Path, size: u64, options: &Compare) -> anyhow::Result<Figure> {
    let mut command = Command::new("fio");
    command.arg("--name=blockstore").arg(format!("--filename={}", path.display())).arg(format!("--size={size}"));
    command.args(["--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--time_based=1"]);
    command.args(["--norandommap=1", "--randrepeat=0", "--output-format=json"]);
    command.arg(format!("--rw={}", row.fio)).arg(format!("--bs={}", row.block));
    command.arg(format!("--iodepth={}", row.depth)).arg(format!("--runtime={}", options.seconds));
    command.arg(format!("--cpus_allowed={}", options.server_core));
    let output = command.stdin(Stdio::null()).output().context("fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr).trim());
    let all: Value = serde_json::from_slice(&output.stdout).context("what fio says")?;
    let job = &all["jobs"][0];
    let moved = &job[if row.is_write() { "write" } else { "read" }];
    let number = |of: &Value, name: &str| of[name].as_f64().with_context(|| format!("fio does not say {name}"));
    let percent = number(job, "usr_cpu")? + number(job, "sys_cpu")?;
    let took = number(moved, "runtime")? * 1e3;
    let processor = percent / 100.0 * took / number(moved, "total_ios")?.max(1.0);
    Ok(Figure { rate: number(moved, "iops")?, processor })
}
