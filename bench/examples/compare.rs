//! Compares calls with what the same two cores do without them: UCX, memcpy, bare cache lines, and another `rpcperf`.
//! Each row is a ratio of two runs, one behind the other. `bench/measurements.md` has the figures.
//!
//! ```sh
//! cargo build --release -p rpcrdma-bench --bins --examples
//! target/release/examples/compare [ROUNDS [RPCPERF]]
//! ```
//!
//! It uses cores 0 and 1, which nothing else should use meanwhile. A round takes about ten seconds; five are made unless
//! ROUNDS says another number. `here` and `there` are the medians of the two sides of a ratio, in the units that the row
//! names. Of times the smaller ratio is better, of calls and bytes a second the larger one.
//!
//! RPCPERF is the other one, such as the release before. Without it, and without `ucx_perftest` of UCX, their rows are
//! "not run". The cores are near to each other, or far, by the round trip of a cache line. Pairs between which that
//! changed are left out.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

use rpcperf::{Failure, Run, beside, median};

#[path = "common/rpcperf.rs"]
mod rpcperf;

/// The cores of the server and of the client, as `rpcperf` takes them.
const CORES: [usize; 2] = [1, 0];
const UCX: &str = "ucx_perftest";
const UCX_OPTIONS: [&str; 9] = ["-p", "13337", "-t", "ucp_am_lat", "-s", "64", "-n", "200000", "-f"];
/// Calls under way on each connection where many connections are compared with one.
const DEPTH: usize = 32;
const CONNECTIONS: usize = 1000;
/// Cache lines of a call's record in the ring, as of its reply's: 144 bytes and 128, and a header of 16.
const RECORD: usize = 3;
/// Words of a cache line.
const LINE: usize = 8;

/// Of each row and of near and far cores the pairs' figures.
type Rows = BTreeMap<(&'static str, bool), Vec<[f64; 2]>>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let rounds = arguments.next().map_or(Ok(5), |text| text.parse::<usize>());
    let rounds = rounds.map_err(|_| "usage: compare [ROUNDS [RPCPERF]]")?;
    let other = arguments.next().map(PathBuf::from);
    let own = beside()?;
    let (many, depth) = (CONNECTIONS.to_string(), DEPTH.to_string());
    let rate = |q| ["rate", "-s", "64", "-t", &depth, "-D", "0.5", "-f", "0.05", "-q", q];
    let (of_one, of_many) = (rate("1"), rate(&many));
    let mut rows = Rows::new();
    for round in 1..=rounds {
        let lat = run(&own, &["lat", "-s", "64", "-n", "200000"], "/rtt_ns/p50")?;
        if let Some(figure) = ucx()? {
            // UCX does not say how far apart the cores were: the runs before it and behind it do.
            let behind = run(&own, &["lat", "-s", "64", "-n", "20000"], "/rtt_ns/p50")?;
            pair(&mut rows, "1 64 B round trip, ns / UCX", lat, Run { figure, far: [lat.far[1], behind.far[0]] });
        }
        if let Some(other) = &other {
            let pairs = [run(&own, &of_one, "/rps")?, run(other, &of_one, "/rps")?];
            pair(&mut rows, "2 64 B calls/s, 32 at a time / the other's", pairs[0], pairs[1]);
        }
        for (op, size, name) in [
            ("write", "64K", "3 64 KiB by RDMA Read, B/s / memcpy"),
            ("read", "64K", "4 64 KiB by RDMA Write, B/s / memcpy"),
            ("write", "1M", "5 1 MiB by RDMA Read, B/s / memcpy"),
            ("read", "1M", "6 1 MiB by RDMA Write, B/s / memcpy"),
        ] {
            let arguments = ["bw", "--op", op, "-s", size, "-D", "0.4", "-f", "0.05"];
            let [bytes, memcpy] = figures(&own, &arguments, ["/bytes_per_s", "/memcpy_bytes_per_s"])?;
            pair(&mut rows, name, bytes, memcpy);
        }
        let per_call = |run: Run| Run { figure: 1e9 / run.figure, ..run };
        let single = per_call(run(&own, &of_one, "/rps")?);
        pair(
            &mut rows,
            "7 a call, ns, of 1000 connections x 32 / of one",
            per_call(run(&own, &of_many, "/rps")?),
            single,
        );
        let lines = |connections| Ok::<_, Failure>(Run { figure: bare_lines(connections)?, ..single });
        pair(&mut rows, "8 as many bare lines, ns, of 1000 x 32 / of 1 x 32", lines(CONNECTIONS)?, lines(1)?);
        eprintln!("round {round} of {rounds}");
    }
    println!("| what | cores | pairs | here | there | ratio (least to most) |\n| --- | --- | --- | --- | --- | --- |");
    for ((name, far), pairs) in &rows {
        let ratios = || pairs.iter().map(|[here, there]| here / there);
        let [least, most] = [ratios().fold(f64::MAX, f64::min), ratios().fold(0.0, f64::max)];
        let [here, there] = [0, 1].map(|side| median(pairs.iter().map(|pair| pair[side])).unwrap_or_default());
        let (ratio, cores) = (median(ratios()).unwrap_or_default(), if *far { "far" } else { "near" });
        let name = &name[2..];
        println!(
            "| {name} | {cores} | {} | {here:.4e} | {there:.4e} | {ratio:.2} ({least:.2} to {most:.2}) |",
            pairs.len()
        );
    }
    for (row, ran) in
        [("UCX", rows.keys().any(|(name, _)| name.ends_with("UCX"))), ("the other rpcperf", other.is_some())]
    {
        if !ran {
            println!("not run: {row}");
        }
    }
    Ok(())
}

/// Notes a pair, if the cores were as far apart throughout.
fn pair(rows: &mut Rows, name: &'static str, here: Run, there: Run) {
    let far = here.far[0];
    if [here.far, there.far].as_flattened().iter().all(|other| *other == far) {
        rows.entry((name, far)).or_default().push([here.figure, there.figure]);
    }
}

/// One figure of one run.
fn run(rpcperf: &Path, arguments: &[&str], what: &str) -> Result<Run, Failure> {
    figures(rpcperf, arguments, [what]).map(|[run]| run)
}

/// Figures of one run.
fn figures<const N: usize>(rpcperf: &Path, arguments: &[&str], what: [&str; N]) -> Result<[Run; N], Failure> {
    let runs = rpcperf::figures(rpcperf, arguments, what)?;
    runs.ok_or_else(|| format!("{} refuses {arguments:?}", rpcperf.display()).into())
}

/// The typical round trip of UCX's active messages, in nanoseconds; `None` without UCX. Its own figure is half of that.
fn ucx() -> Result<Option<f64>, Failure> {
    let start = |core: usize, arguments: &[&str]| {
        let mut command = Command::new("taskset");
        command.args(["-c", &core.to_string(), UCX]).args(arguments).env("UCX_TLS", "posix,self").stderr(Stdio::null());
        command
    };
    if Command::new(UCX).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return Ok(None);
    }
    let _server = Ended(start(CORES[0], &UCX_OPTIONS[..2]).stdout(Stdio::null()).spawn()?);
    std::thread::sleep(Duration::from_millis(500));
    let arguments: Vec<_> = ["127.0.0.1"].into_iter().chain(UCX_OPTIONS).collect();
    let output = start(CORES[1], &arguments).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let half =
        text.lines().last().and_then(|line| line.split_whitespace().nth(1)).and_then(|us| us.parse::<f64>().ok());
    Ok(Some(half.ok_or(text)? * 2000.0))
}

/// A process that does not outlive this value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What two threads take to carry a call's cache lines there and its reply's back, without any call: nanoseconds each.
/// Each connection has memory of its own for [`DEPTH`] records each way, and for as many at each end that they are
/// copied into. The connections take turns in an order that no hardware foresees.
fn bare_lines(connections: usize) -> Result<f64, Failure> {
    let words = connections * DEPTH * RECORD * LINE;
    let memory = || (0..words).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let (calls, replies) = (memory(), memory());
    // 7919 is prime to any number of connections used here.
    let order: Vec<_> = (0..connections).map(|n| n * 7919 % connections * DEPTH).collect();
    let rounds = (2_000_000 / (connections * DEPTH)).max(2) as u64;
    let put = |to: &[AtomicU64], at: usize, round: u64| {
        let record = &to[at * RECORD * LINE..][..RECORD * LINE];
        record[1..].iter().for_each(|word| word.store(round, Ordering::Relaxed));
        record[0].store(round, Ordering::Release); // pairs with the Acquire load in `take`
    };
    let take = |from: &[AtomicU64], into: &mut [u64], at: usize, round: u64| {
        let place = at * RECORD * LINE..(at + 1) * RECORD * LINE;
        let record = &from[place.clone()];
        // Pairs with the Release store in `put`.
        while record[0].load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
        into[place].iter_mut().zip(record).for_each(|(to, word)| *to = word.load(Ordering::Relaxed));
    };
    let ours = |order: &[usize], round: u64, work: &mut dyn FnMut(usize, u64)| {
        order.iter().flat_map(|&first| first..first + DEPTH).for_each(|at| work(at, round));
    };
    // Both are tried here: a thread that ended early would be waited for.
    pin(CORES[0])?;
    pin(CORES[1])?;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            pin(CORES[0])?;
            let mut copies = vec![0; words];
            for round in 1..=rounds {
                ours(&order, round, &mut |at, round| {
                    take(&calls, &mut copies, at, round);
                    put(&replies, at, round);
                });
            }
            Ok::<_, rustix::io::Errno>(())
        });
        let mut copies = vec![0; words];
        let start = Instant::now();
        ours(&order, 1, &mut |at, round| put(&calls, at, round));
        for round in 1..=rounds {
            for connection in order.chunks(1) {
                ours(connection, round, &mut |at, round| take(&replies, &mut copies, at, round));
                if round < rounds {
                    ours(connection, round + 1, &mut |at, round| put(&calls, at, round));
                }
            }
        }
        let took = start.elapsed().as_nanos() as f64;
        server.join().map_err(|_| "the other thread panicked")??;
        Ok(took / (rounds * words as u64 / (RECORD * LINE) as u64) as f64)
    })
}

fn pin(core: usize) -> Result<(), rustix::io::Errno> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores)
}
