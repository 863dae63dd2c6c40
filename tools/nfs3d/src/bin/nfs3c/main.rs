//! An NFS version 3 client without a mount: lists, reads and writes files over RDMA, with concurrent calls.
//!
//! ```text
//! cargo run --release -p rpcrdma-nfs3d --features verbs --bin nfs3c -- verbs:10.0.0.1 /srv/nfs ls
//! cargo run --release -p rpcrdma-nfs3d --features verbs --bin nfs3c -- verbs:10.0.0.1 /srv/nfs put local-file \
//!     directory/file
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `mount` | the handle of an export, from MOUNT version 3 on TCP |
//! | `calls` | a connection, and single calls on it |
//! | `busy` | retries of calls that the server is too busy to execute |
//! | `escape` | escaping of names in output |
//! | `concurrent` | concurrent calls |
//! | `transfer` | files to the server and back |
//! | `tree` | directory trees |
//!
//! The iWARP options are those of `nfs3d`.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr)]

mod busy;
mod calls;
mod concurrent;
mod escape;
mod mount;
mod transfer;
mod tree;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Parser, Subcommand};
use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::config::{LimitsConfig, MemoryConfig, WireConfig};
use rpcrdma::{Address, Config, CreditMode, LocalClient};
use rpcrdma_config::{BUDGET, memory_line, print_error};
use rpcrdma_config::{HOST_KEY_ID, HostKeyArgs, program};
use rpcrdma_nfs3d::IwarpOptions;
use rpcrdma_nfs3d::nfs3::nfs_v3::{PROGRAM, VERSION, bindings};

use calls::{DIRECTORY, Nfs};
use escape::Escaped;

/// List, read and write the files of an NFS version 3 server over RDMA.
#[derive(Debug, Parser)]
#[command(name = "nfs3c", version, long_version = program::VERSION.as_str())]
struct Cli {
    /// Address of the server: `verbs:HOST[:PORT]`, `iwarp:HOST[:PORT]`, `soft:NAME`.
    server: Address,
    /// Exported directory.
    export: OsString,
    /// TCP address of MOUNT. [default: the server's host, or this one; port 20048]
    #[arg(long, value_name = "HOST[:PORT]")]
    mount: Option<String>,
    /// Get the ports of NFS and MOUNT from rpcbind at the server's host.
    #[arg(long, conflicts_with = "mount")]
    rpcbind: bool,
    /// Limit of outstanding calls.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Bytes of each READ and WRITE, within the server's limits.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 18, value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
    block: u32,
    /// Longest data of READ and WRITE to send inline, 0 to 1048576 bytes. Longer data travels in a chunk, as does any
    /// message that exceeds one Send.
    #[arg(long, value_name = "BYTES", default_value_t = 512, value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    inline: u32,
    /// Initial RPC-over-RDMA version. Falls back from 2 to 1 if the server does not support version 2.
    #[arg(long, value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    rdma_version: u8,
    /// Do not let the server invalidate handles (Send With Invalidate).
    #[arg(long)]
    no_invalidate: bool,
    #[command(flatten)]
    iwarp: IwarpOptions,
    #[command(flatten)]
    host_key: HostKeyArgs,
    /// Seconds for which calls are retried while the server is too busy to execute them (NFS3ERR_JUKEBOX); 0 disables
    /// retries.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(..=86_400))]
    busy_timeout: u32,
    /// Print statistics of the connection on standard error, as a line of JSON.
    #[arg(long)]
    stats: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List a directory, with attributes and targets of symbolic links. Control characters, backslashes and bytes
    /// that are not UTF-8 are escaped, as `ls -b` does.
    Ls {
        /// Path below the export.
        #[arg(default_value = "")]
        path: OsString,
    },
    /// Print the attributes of a file.
    Stat {
        /// Path below the export.
        path: OsString,
    },
    /// Copy a regular file from the server.
    Get {
        /// Path below the export.
        path: OsString,
        /// Local copy.
        local: PathBuf,
    },
    /// Copy files to the server.
    Put {
        /// Local files. Pipes and devices are read to their end before the first call.
        #[arg(required = true)]
        local: Vec<PathBuf>,
        /// Path below the export: of the copy of one file, or of the directory for the copies of several.
        path: OsString,
    },
    /// Print the SHA-256 of each file below a directory, as `sha256sum` does, and the target of each symbolic link.
    Sum {
        /// Path below the export.
        #[arg(default_value = "")]
        path: OsString,
    },
    /// Read the first block of a file repeatedly, one call after another, and print the round-trip times.
    Time {
        /// Path below the export.
        path: OsString,
        /// Number of calls.
        #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
        calls: u32,
    },
}

fn main() -> ExitCode {
    program::start();
    program::exit("nfs3c", run(&Cli::parse()))
}

fn run(options: &Cli) -> anyhow::Result<()> {
    let (server, at) = mount::addresses(&options.server, options.mount.as_deref(), options.rpcbind)?;
    let root = mount::root_handle(at, options.export.as_bytes())?;
    let config = config(options)?;
    print_error!("nfs3c: {}", memory_line(&config.shard, 1, 1));
    let client = LocalClient::connect(&server, config)?;
    let busy_timeout = Duration::from_secs(options.busy_timeout.into());
    let mut nfs = Nfs::new(client, root, options.depth.into(), options.block, busy_timeout)?;
    nfs.inline = options.inline;
    let mut out = io::stdout().lock();
    match &options.command {
        Command::Ls { path } => {
            let path = path.as_bytes();
            let directory = nfs.find(path)?;
            for entry in tree::list(&mut nfs, &directory, path)? {
                let (attributes, name) = (tree::describe(&entry.attributes), Escaped(&entry.name));
                match &entry.target {
                    Some(target) => writeln!(out, "{attributes} {name} -> {}", Escaped(target))?,
                    None => writeln!(out, "{attributes} {name}")?,
                }
            }
        }
        Command::Stat { path } => {
            let path = path.as_bytes();
            let file = nfs.find(path)?;
            writeln!(out, "{} {}", tree::describe(&nfs.getattr(&file, path)?), Escaped(path))?;
        }
        Command::Get { path, local } => transfer::get(&mut nfs, path.as_bytes(), local)?,
        Command::Put { local, path } => {
            for (original, path) in copies(local, path)? {
                transfer::put(&mut nfs, original, path.as_os_str().as_bytes())?;
            }
        }
        Command::Sum { path } => {
            let directory = nfs.find(path.as_bytes())?;
            tree::print_sums(&mut nfs, &directory, &mut out)?;
        }
        Command::Time { path, calls } => {
            let file = nfs.find(path.as_bytes())?;
            let mut times = Vec::new();
            for _ in 0..*calls {
                let started = Instant::now();
                transfer::read_first_block(&mut nfs, &file, path.as_bytes())?;
                times.push(started.elapsed().as_secs_f64() * 1e6);
            }
            times.sort_unstable_by(f64::total_cmp);
            let quantile = |share: f64| times[(times.len() as f64 * share).ceil() as usize - 1];
            let [median, p99, max] = [0.5, 0.99, 1.0].map(quantile);
            writeln!(out, "{calls} READs: median {median:.0} µs, p99 {p99:.0} µs, maximum {max:.0} µs")?;
        }
    }
    if options.stats {
        print_error!("{}", nfs.stats());
    }
    Ok(())
}

/// Pairs each local file with the path of its copy: `path` for one file, or below `path` for several.
fn copies<'a>(local: &'a [PathBuf], path: &OsStr) -> anyhow::Result<Vec<(&'a Path, PathBuf)>> {
    if let [one] = local {
        return Ok(vec![(one, path.into())]);
    }
    let mut names = HashSet::new();
    let copy = |original: &'a PathBuf| {
        let shown = Escaped(original.as_os_str().as_bytes());
        let name = original.file_name().with_context(|| format!("{shown}: the path ends without a file name"))?;
        ensure!(names.insert(name), "{shown}: the copy of another file has the same name");
        Ok((original.as_path(), Path::new(path).join(name)))
    };
    local.iter().map(copy).collect()
}

/// Limit of the bytes of a message without its block of data.
const HEADERS: usize = 1024;

/// Configuration, with memory for the outstanding calls.
fn config(options: &Cli) -> anyhow::Result<ClientConfig> {
    let depth = usize::from(options.depth);
    let mut config = ClientConfig::new(PROGRAM, VERSION);
    config.shard = Config {
        wire: WireConfig {
            credit_mode: if options.rdma_version == 1 { CreditMode::V1 } else { CreditMode::V2Windowed },
            host_auth: options.host_key.policy(HOST_KEY_ID)?,
            ..config.shard.wire
        },
        limits: LimitsConfig { max_calls: depth.max(16), ..config.shard.limits },
        memory: MemoryConfig {
            budget: BUDGET,
            bulk_buffers: vec![(options.block as usize + HEADERS, depth), (DIRECTORY + 4096, 4)],
            ..config.shard.memory
        },
        ..config.shard
    };
    config.shard.debug.remote_invalidate = !options.no_invalidate;
    options.iwarp.configure(&mut config.shard, std::slice::from_ref(&options.server))?;
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    config.credential = Credential::sys("nfs3c", uid.as_raw(), gid.as_raw(), &[])
        .map_err(|_| anyhow::anyhow!("the AUTH_SYS credential is too long"))?;
    config.bindings = Some(Arc::new(bindings()));
    Ok(config)
}
