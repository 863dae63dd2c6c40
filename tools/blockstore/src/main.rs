//! A block store over one file, and a client that copies a file into it and verifies it.
//!
//! ```text
//! cargo run --release --bin blockstore -- demo
//!
//! cargo run --release --bin blockstore -- serve --file store.img --size 1G --listen soft:store
//! cargo run --release --bin blockstore -- copy SOURCE soft:store
//! cargo run --release --bin blockstore -- verify SOURCE soft:store
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `protocol` | the protocol, generated from `blockstore.x` |
//! | `store` | the file: with O_DIRECT and buffered, or mapped |
//! | `disk` | I/O of a shard: queue, O_DIRECT, short transfers |
//! | `sys` | io_uring on calls' buffers, and file mappings; the only unsafe code |
//! | `server` | procedures, and the threads that run them |
//! | `client` | concurrent calls in reused buffers |
//! | `demo` | a demonstration with a server in a second process |
//! | `compare` | comparison with `fio` on the same file |
#![deny(unsafe_code)]
#![warn(clippy::print_stderr)]

mod client;
mod compare;
mod demo;
mod disk;
mod protocol;
mod server;
mod store;
mod sys;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, ValueEnum};
use rpcrdma::config::{AcceptConfig, MemoryConfig, PollConfig, WireConfig};
use rpcrdma::server::{ServerConfig, WorkerConfig};
use rpcrdma::service::ShardSetup;
use rpcrdma::{Address, Config, Server};
use rpcrdma_config::program::{self, READY, VERSION, say};
use rpcrdma_config::{BUDGET, ConfigArgs, HostKeyArgs, Idle, memory_line, print_error};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use client::{BlockClient, TransferStats};
use store::{BLOCK_MAX, Store};

/// Usual page size, in bytes.
const PAGE: usize = 4096;

/// Serve one file as a block store over RDMA, and copy files to such a store.
#[derive(Debug, Parser)]
#[command(name = "blockstore", version, long_version = VERSION.as_str())]
enum Cli {
    /// Serve a file until SIGINT or SIGTERM.
    Serve(Serve),
    /// Copy a file to the start of a store, and flush it.
    Copy(Transfer),
    /// Read a store in random order, and compare it with a file.
    Verify(Verify),
    /// Serve a temporary file in a second process, copy to it, verify it, and print the speed.
    Demo(demo::Demo),
    /// Measure a store and `fio` on the same file, in turn.
    Compare(compare::Compare),
}

/// I/O engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Io {
    /// io_uring if allowed, else threads.
    Auto,
    /// io_uring.
    Uring,
    /// Shards read from a mapping (on tmpfs by system calls), and worker threads write.
    Threads,
}

#[derive(Debug, Args)]
struct Serve {
    /// File to serve.
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Create the file, or grow it to this size: bytes, or with K, M, G, T (1024 each).
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    size: Option<u64>,
    /// Addresses, separated by commas: verbs:HOST:PORT, iwarp:HOST:PORT, soft:NAME.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "soft:blockstore")]
    listen: Vec<Address>,
    /// Cores of the shards, separated by commas. Default: one unpinned shard for each address.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cores: Vec<usize>,
    /// I/O engine.
    #[arg(long, value_enum, default_value_t = Io::Auto)]
    io: Io,
    /// Threads that run WRITE and FLUSH without io_uring, because both may block. With 0, the shards run them, which
    /// blocks all clients meanwhile.
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,
    /// Use the page cache, also with io_uring.
    #[arg(long)]
    buffered: bool,
    /// Limit of outstanding blocks per shard with io_uring. Further blocks wait.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    ring: u32,
    /// Idle policy of the shards.
    #[arg(long, value_enum, default_value_t = Idle::Adaptive)]
    idle: Idle,
    /// Refuse WRITE.
    #[arg(long)]
    read_only: bool,
    /// Unix socket for statistics, for `rpcrdma top` and `rpcrdma exporter`.
    #[arg(long, value_name = "PATH")]
    stats: Option<PathBuf>,
    #[command(flatten)]
    host_key: HostKeyArgs,
    /// Stop when the process that started this one ends.
    #[arg(long, hide = true)]
    parent: Option<u32>,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Debug, Args)]
struct Transfer {
    /// Local file.
    source: PathBuf,
    /// Address of the store: verbs:HOST:PORT, iwarp:HOST:PORT, soft:NAME.
    address: Address,
    #[command(flatten)]
    calls: CallOptions,
    #[command(flatten)]
    host_key: HostKeyArgs,
}

/// ID of a block store's host key.
const HOST_KEY_ID: &str = "blockstore";

/// Options of the client's calls.
#[derive(Clone, Copy, Debug, Args)]
struct CallOptions {
    /// Bytes per call.
    #[arg(long, value_name = "BYTES", default_value = "64K", value_parser = parse_block)]
    block: usize,
    /// Limit of outstanding calls.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    depth: u16,
}

#[derive(Debug, Args)]
struct Verify {
    #[command(flatten)]
    transfer: Transfer,
    /// Seed of the order of blocks.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Parses bytes, with K, M, G or T for powers of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let unit = text.chars().last().and_then(|unit| "KMGT".find(unit.to_ascii_uppercase()));
    let (digits, shift) = unit.map_or((text, 0), |unit| (&text[..text.len() - 1], 10 * (unit as u32 + 1)));
    let number: u64 =
        digits.parse().map_err(|_| "expected a number, with K, M, G or T for powers of 1024".to_owned())?;
    number
        .checked_mul(1 << shift)
        .filter(|&bytes| bytes <= i64::MAX as u64)
        .ok_or_else(|| "expected less than 8 EiB".into())
}

/// Parses a block length in bytes, with K, M, G or T for powers of 1024.
fn parse_block(text: &str) -> Result<usize, String> {
    match parse_size(text)? {
        0 => Err("expected at least 1".into()),
        bytes => usize::try_from(bytes).map_err(|_| "too large".into()),
    }
}

fn main() -> ExitCode {
    program::start();
    let matches = Cli::command().get_matches();
    let options = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let outcome = match options {
        Cli::Serve(options) => serve(&options, matches.subcommand().map_or(&matches, |(_, subcommand)| subcommand)),
        Cli::Copy(options) => copy(&options),
        Cli::Verify(options) => verify(&options),
        Cli::Demo(options) => demo::run(&options),
        Cli::Compare(options) => compare::run(&options),
    };
    program::exit("error", outcome)
}

fn serve(options: &Serve, matches: &ArgMatches) -> anyhow::Result<()> {
    rpcrdma_host::logger::start();
    let (first, server_defaults) = program::shards(&options.listen, &options.cores)?;
    // From here on, the signals do not end the process, and the end of this function waits for them.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("SIGINT and SIGTERM")?;
    if let Some(parent) = options.parent {
        demo::stop_with_parent(parent)?;
    }
    let uring = uses_uring(options.io)?;
    if options.config.print_config {
        // The file is not opened, so the page size is assumed as its alignment. Few devices need a coarser alignment.
        let (shard, accept) = config(options, matches, if uring && !options.buffered { PAGE } else { 1 })?;
        print!("{}", rpcrdma_config::to_toml(&shard, &accept));
        return Ok(());
    }
    let mut store = Store::open(&options.file, options.size, options.read_only)?;
    let shown = options.file.display();
    let mut align = 1;
    if !uring {
        store.map().with_context(|| format!("{shown}"))?;
    } else if !options.buffered {
        match store.open_direct() {
            // Blocks start at a page, because the device's request for any other block has one more segment.
            Ok(()) => align = store.direct().map_or(1, |direct| direct.memory_align.max(PAGE)),
            Err(error) => print_error!("{shown}: no O_DIRECT here ({error:#}): using buffered I/O"),
        }
    }
    let (shard, accept) = config(options, matches, align)?;
    let mut config = ServerConfig { shard, accept, stats: options.stats.clone(), ..server_defaults };
    print_error!("{}", memory_line(&config.shard, config.shards, 0));
    let store = Arc::new(store);
    let (server, engine) = if uring {
        let (shard_store, entries) = (Arc::clone(&store), options.ring);
        let make = move |setup: &ShardSetup<'_>| server::uring_application(&shard_store, setup, entries);
        let direct = store.direct().map_or("", |_| ", O_DIRECT");
        (Server::start_with(first, make, &config)?, format!("io_uring{direct}"))
    } else {
        let count = options.workers;
        config.workers = (count > 0).then(|| WorkerConfig { count, ..WorkerConfig::default() });
        (Server::start(first, server::services(&store, count > 0), &config)?, format!("{count} worker(s)"))
    };
    let access = if store.is_writable() { "writable" } else { "read-only" };
    say(&format!(
        "{READY} on {}: {shown}, {} bytes, {access}; {} shard(s), {engine}",
        options.listen.iter().map(Address::to_string).collect::<Vec<_>>().join(", "),
        store.size(),
        config.shards,
    ));
    signals.forever().next();
    let drained = program::drain(server);
    store.flush()?;
    say(&drained);
    Ok(())
}

/// Returns the configuration, with buffers for outstanding blocks that start at multiples of `align`.
fn config(options: &Serve, matches: &ArgMatches, align: usize) -> anyhow::Result<(Config, AcceptConfig)> {
    let bulk_buffers = vec![(4096 + align, 256), ((64 << 10) + align, 256), (BLOCK_MAX + align, 64)];
    let shard = Config {
        wire: WireConfig { host_auth: options.host_key.policy(HOST_KEY_ID)?, ..WireConfig::default() },
        memory: MemoryConfig {
            budget: BUDGET,
            bulk_buffers,
            chunk_align: align.clamp(64, 4096),
            ..MemoryConfig::default()
        },
        poll: PollConfig { idle: options.idle.policy(), ..PollConfig::default() },
        ..Config::default()
    };
    let given = rpcrdma_config::given(matches, &[("idle", "poll.idle")]);
    Ok(options.config.load()?.apply(&shard, &AcceptConfig::default(), &given)?)
}

/// Hints for an io_uring that does not work.
const URING_HINTS: &str = "see `sysctl kernel.io_uring_disabled`, `ulimit -l`, and seccomp";

/// Whether io_uring is used. If it does not work, `Io::Auto` prints why.
fn uses_uring(io: Io) -> anyhow::Result<bool> {
    let file = File::open("/dev/null").context("/dev/null")?;
    // Tests with a ring like those of the shards.
    match (io, sys::Ring::new(1, &[file.as_fd()])) {
        (Io::Threads, _) => Ok(false),
        (_, Ok(_)) => Ok(true),
        (Io::Uring, Err(error)) => bail!("io_uring: {error} ({URING_HINTS})"),
        (Io::Auto, Err(error)) => {
            print_error!("no io_uring here ({error}; {URING_HINTS}): shards read the blocks, and workers write them");
            Ok(false)
        }
    }
}

fn open_source(path: &Path) -> anyhow::Result<(File, u64)> {
    let source = File::open(path).with_context(|| format!("{}", path.display()))?;
    let size = source.metadata().with_context(|| format!("{}", path.display()))?.len();
    Ok((source, size))
}

fn copy(options: &Transfer) -> anyhow::Result<()> {
    let (source, size) = open_source(&options.source)?;
    let CallOptions { block, depth } = options.calls;
    let mut client =
        BlockClient::connect(&options.address, block, depth.into(), options.host_key.policy(HOST_KEY_ID)?)?;
    report("copied", &client.copy(&source, size)?, &options.address);
    say(&format!("flushed in {:.3} s", client.flush()?.as_secs_f64()));
    Ok(())
}

fn verify(options: &Verify) -> anyhow::Result<()> {
    let Transfer { source, address, calls: CallOptions { block, depth }, host_key } = &options.transfer;
    let (source, size) = open_source(source)?;
    let mut client = BlockClient::connect(address, *block, usize::from(*depth), host_key.policy(HOST_KEY_ID)?)?;
    let (figures, sum) = client.verify(&source, size, options.seed)?;
    report("verified", &figures, address);
    say(&format!("crc32 {sum:08x}, equal to the source's"));
    Ok(())
}

/// Prints the bytes, time, rate and fabric of a transfer.
fn report(what: &str, stats: &TransferStats, address: &Address) {
    let TransferStats { bytes, time, retried } = stats;
    let retried = if *retried > 0 { format!(", {retried} calls retried") } else { String::new() };
    let seconds = time.as_secs_f64();
    let rate = *bytes as f64 / 1e6 / seconds;
    let fabric = if matches!(address, Address::Soft(_)) { "software fabric" } else { address.scheme() };
    say(&format!("{what} {bytes} bytes in {seconds:.3} s: {rate:.0} MB/s{retried} ({fabric})"));
}
