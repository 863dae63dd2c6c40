//! A block store over one file, and a client that copies a file into it and verifies it.
//!
//! ```text
//! cargo run --release --example blockstore -- demo
//!
//! cargo run --release --example blockstore -- serve --file store.img --size 1G --listen soft:store
//! cargo run --release --example blockstore -- copy SOURCE soft:store
//! cargo run --release --example blockstore -- verify SOURCE soft:store
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `codec` | the protocol: procedures, arguments, results, and what of them travels as chunks |
//! | `store` | the file, mapped; the only unsafe code |
//! | `server` | what each procedure does, and where it runs |
//! | `client` | many calls under way, in buffers that are used again |
//! | `demo` | all of it at once, with the server in a second process |
#![deny(unsafe_code)]

mod client;
mod codec;
mod demo;
mod server;
mod store;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Parser};
use rpcrdma::{Address, Server};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use client::{BlockClient, Figures};
use store::Store;

/// First word of the line that the server writes to standard output once clients may connect.
const READY: &str = "listening";
/// How long calls under way may take to end when the server is told to stop.
const DRAIN: Duration = Duration::from_secs(10);

/// A block store over RPC-over-RDMA.
#[derive(Debug, Parser)]
#[command(name = "blockstore")]
enum Cli {
    /// Serves a file until SIGINT or SIGTERM.
    Serve(Serve),
    /// Copies a file to the start of a store, and flushes it.
    Copy(Transfer),
    /// Reads a store in random order, and compares it with a file.
    Verify(Verify),
    /// Serves a temporary file in a second process, copies to it, verifies it, and says how fast that was.
    Demo(demo::Demo),
}

#[derive(Debug, Args)]
struct Serve {
    /// The file.
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Makes the file this long, if it is shorter or does not exist: bytes, or with K, M, G, T (1024 each).
    #[arg(long, value_name = "BYTES", value_parser = size)]
    size: Option<u64>,
    /// Where to listen.
    #[arg(long, value_name = "ADDRESS", default_value = "soft:blockstore")]
    listen: Address,
    /// Cores to pin shards to, one each, separated by commas. Without, there is one shard, anywhere.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cores: Vec<usize>,
    /// Threads for WRITE and FLUSH, which may block. With 0, they run on the shards, which stand still
    /// meanwhile.
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,
    /// Serves the file as it is, and refuses WRITE.
    #[arg(long)]
    read_only: bool,
    /// Stops when the process that started this one ends.
    #[arg(long, hide = true)]
    parent: Option<u32>,
}

#[derive(Debug, Args)]
struct Transfer {
    /// The file.
    source: PathBuf,
    /// The store's address: soft:NAME.
    address: Address,
    #[command(flatten)]
    shape: Shape,
}

#[derive(Clone, Copy, Debug, Args)]
struct Shape {
    /// Bytes of each call.
    #[arg(long, value_name = "BYTES", default_value = "64K", value_parser = block)]
    block: usize,
    /// Calls under way.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    depth: u16,
}

#[derive(Debug, Args)]
struct Verify {
    #[command(flatten)]
    transfer: Transfer,
    /// Gives the order of the blocks.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Bytes: a number, and K, M, G or T for powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let unit = text.chars().last().and_then(|unit| "KMGT".find(unit.to_ascii_uppercase()));
    let (digits, shift) = unit.map_or((text, 0), |unit| (&text[..text.len() - 1], 10 * (unit as u32 + 1)));
    let number: u64 = digits.parse().map_err(|_| "a number, with K, M, G or T for powers of 1024".to_owned())?;
    number.checked_mul(1 << shift).filter(|&bytes| bytes <= i64::MAX as u64).ok_or_else(|| "too large".into())
}

fn block(text: &str) -> Result<usize, String> {
    match size(text)? {
        0 => Err("at least 1".into()),
        bytes => usize::try_from(bytes).map_err(|_| "too large".into()),
    }
}

fn main() -> ExitCode {
    let outcome = match Cli::parse() {
        Cli::Serve(options) => serve(&options),
        Cli::Copy(options) => copy(&options),
        Cli::Verify(options) => verify(&options),
        Cli::Demo(options) => demo::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(options: &Serve) -> anyhow::Result<()> {
    // Before there is anything to lose: what comes from now on is waited for below.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("SIGINT and SIGTERM")?;
    if let Some(parent) = options.parent {
        demo::stop_with(parent)?;
    }
    let store = Arc::new(Store::open(&options.file, options.size, options.read_only)?);
    let config = server::config(&options.cores, options.workers);
    let server = Server::start(&options.listen, server::services(&store, options.workers > 0), &config)?;
    let access = if store.is_writable() { "writable" } else { "read-only" };
    say(&format!(
        "{READY} on {}: {}, {} bytes, {access}; {} shard(s), {} worker(s)",
        options.listen,
        options.file.display(),
        store.size(),
        config.shards,
        options.workers
    ));
    signals.forever().next();
    let (calls, failed) =
        server.stats().iter().fold((0, 0), |sum, shard| (sum.0 + shard.calls, sum.1 + shard.calls_failed));
    let drained = server.drain(DRAIN).map_or_else(|left| left.to_string(), |()| "drained".to_owned());
    store.flush()?;
    say(&format!("{drained}; {calls} calls served, {failed} refused"));
    Ok(())
}

fn open_source(path: &Path) -> anyhow::Result<(File, u64)> {
    let source = File::open(path).with_context(|| format!("{}", path.display()))?;
    let size = source.metadata().with_context(|| format!("{}", path.display()))?.len();
    Ok((source, size))
}

fn copy(options: &Transfer) -> anyhow::Result<()> {
    let (source, size) = open_source(&options.source)?;
    let Shape { block, depth } = options.shape;
    let mut client = BlockClient::connect(&options.address, block, depth.into())?;
    report("copied", &client.copy(&source, size)?);
    say(&format!("flushed in {:.3} s", client.flush()?.as_secs_f64()));
    Ok(())
}

fn verify(options: &Verify) -> anyhow::Result<()> {
    let Transfer { source, address, shape: Shape { block, depth } } = &options.transfer;
    let (source, size) = open_source(source)?;
    let mut client = BlockClient::connect(address, *block, usize::from(*depth))?;
    let (figures, sum) = client.verify(&source, size, options.seed)?;
    report("verified", &figures);
    say(&format!("crc32 {sum:08x}, equal to the source's"));
    Ok(())
}

/// A line on standard output; whoever read it may have gone, which is no reason to stop.
fn say(line: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn report(what: &str, figures: &Figures) {
    let Figures { bytes, time, retried } = figures;
    let retried = if *retried > 0 { format!(", {retried} calls made again") } else { String::new() };
    let speed = figures.megabytes_per_second();
    say(&format!("{what} {bytes} bytes in {:.3} s: {speed:.0} MB/s{retried} (software fabric)", time.as_secs_f64()));
}
