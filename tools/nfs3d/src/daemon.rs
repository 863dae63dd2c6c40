//! The NFS version 3 server: exports one directory over RDMA.
//!
//! ```text
//! cargo run --release -p rpcrdma-nfs3d --features verbs --bin nfs3d -- /srv/data --listen verbs:10.0.0.1:20049
//! mount -t nfs -o vers=3,proto=rdma,port=20049,mountproto=tcp,mountport=20048,nolock 10.0.0.1:/srv/data /mnt
//! ```
//!
//! MOUNT is on TCP. The other protocols of RFC 8267 §5.1 are not implemented. Without NLM and NSM, clients must mount
//! with `nolock`, and locks hold within one host. Clients work without NFSACL.

use std::fs::DirBuilder;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use rpcrdma::config::{AcceptConfig, LimitsConfig, MemoryConfig, PollConfig, TimeoutConfig, WireConfig};
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Config, Server};
use rpcrdma_config::program::{self, READY, VERSION, say};
use rpcrdma_config::{BUDGET, ConfigArgs, HOST_KEY_ID, HostKeyArgs, Idle, memory_line, print_error, secret_file};
use rpcrdma_rpcbind::{Mapping, Registration, Transport};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::descriptors::Descriptors;
use crate::mount3::mount_v3;
use crate::nfs3::nfs_v3;
use crate::{Export, HandleSource, IwarpOptions, Key, Options, Policy, Pool, Squash, mount, nfs};

/// Interval at which unused files are closed. A file is closed after one to two intervals without use.
const CLOSE_INTERVAL: Duration = Duration::from_secs(5);
/// Credits of each connection, which bound its outstanding calls.
const CREDITS: u32 = 32;

/// Export a directory by NFS version 3, over RDMA, TCP (iWARP) or the software fabric.
///
/// As root, the server acts as the user of the caller's AUTH_SYS credential (see --squash), without the capabilities of
/// root. Every host that reaches the server can claim to be any user, so use a trusted network. A server that is not
/// root acts as its own user.
///
/// File systems mounted below the directory are not exported. Bind mounts of the directory's own file system are
/// recognized since Linux 5.6. There is no lock manager (NLM, NSM), so clients mount with nolock, and other hosts do
/// not see their locks. There are no ACLs (NFSACL).
#[derive(Debug, Parser)]
#[command(name = "nfs3d", version, long_version = VERSION.as_str(), args_override_self = true)]
struct Cli {
    /// Exported directory.
    directory: PathBuf,
    /// Addresses to serve NFS at, separated by commas: verbs:HOST:PORT, verbs:DEVICE/GID@HOST:PORT, iwarp:HOST:PORT,
    /// soft:NAME.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "soft:nfs3d")]
    listen: Vec<Address>,
    /// TCP port of MOUNT; 0 selects a free port. MOUNT serves 64 connections, at most 16 per host, and evicts the
    /// least recently used one for a new one. It closes a connection after 30 s without a call, or when a call takes
    /// 5 s. Paths have at most 1024 bytes. The list of mounts has at most 1024 entries.
    #[arg(long, value_name = "PORT", default_value_t = 20048)]
    mount_port: u16,
    /// Register NFS and MOUNT with the host's rpcbind, and withdraw them at the end. rpcbind holds one IPv4 and one
    /// IPv6 address per program.
    #[arg(long)]
    rpcbind: bool,
    /// Which users are mapped to nobody.
    #[arg(long, value_enum, default_value = "root")]
    squash: Squash,
    /// Refuse changes.
    #[arg(long)]
    read_only: bool,
    /// Reply to changes of names and attributes before they are stable. Written data is as stable as the client asks,
    /// with and without this option.
    #[arg(long = "async")]
    not_sync: bool,
    /// Threads for file operations, which may block. One client host gets at most half of them, the next one half of
    /// the rest, and so on, so that a slow disk does not stop other hosts. With 0, the shards perform file operations.
    /// This is fastest for files in memory, but blocks all clients of the shard. Root needs at least 1 for verbs:
    /// addresses.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(0..=256))]
    workers: u16,
    /// Cores of the shards, separated by commas; at least one for each address. Default: one unpinned shard for each
    /// address.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    cores: Vec<usize>,
    /// Idle policy of the shards.
    #[arg(long, value_enum, default_value = "yield")]
    idle: Idle,
    /// Clients of one shard that may be busy at the same time. Each takes 32.5 MiB of memory, within memory.budget (1
    /// GiB).
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    clients: u16,
    /// Idle seconds before a keep-alive probe; 0 disables probes. Until a probe fails, a vanished client keeps its
    /// memory.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    keep_alive: u32,
    /// Seconds without progress, such as in moving the data of a WRITE, before the server ends the connection. Time in
    /// which the client moves data at --min-rate does not count. The set-up of a connection over iwarp: or soft: is
    /// limited by debug.handshake_timeout instead (5 s).
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    progress_timeout: u32,
    /// Minimum data rate of a client, in bytes per second; see --progress-timeout.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 10, value_parser = clap::value_parser!(u64).range(1..))]
    min_rate: u64,
    /// How file handles identify files.
    #[arg(long, value_enum, default_value = "auto")]
    handles: HandleSource,
    /// File of the key that seals file handles; created if missing. With the same key, handles survive a restart. The
    /// file must not be in the exported directory, and no other user may be able to read or write it, or to write a
    /// directory above it.
    /// [default: nfs3d.key in /var/lib for root, in ~/.local/state for others]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Unix socket for statistics, for `rpcrdma top` and `rpcrdma exporter`.
    #[arg(long, value_name = "PATH")]
    stats: Option<PathBuf>,
    #[command(flatten)]
    iwarp: IwarpOptions,
    #[command(flatten)]
    host_key: HostKeyArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Definition of the command line, for its manual.
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Runs the program with the arguments of the process.
pub fn run() -> ExitCode {
    program::start();
    let matches = command_line().get_matches();
    let options = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    program::exit("error", serve(&options, &matches))
}

fn serve(options: &Cli, matches: &ArgMatches) -> anyhow::Result<()> {
    rpcrdma_host::logger::start();
    let (shard, accept) = config(options, matches)?;
    if options.config.print_config {
        print!("{}", rpcrdma_config::to_toml(&shard, &accept));
        return Ok(());
    }
    let (first, config) = program::shards(&options.listen, &options.cores)?;
    let mut config = ServerConfig { shard, accept, stats: options.stats.clone(), ..config };
    print_error!("{}", memory_line(&config.shard, config.shards, 0));
    // From here on, signals wait for the loop at the end of this function.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot handle SIGINT and SIGTERM")?;
    let key = read_or_create_key(&options.key.clone().map_or_else(default_key_path, Ok)?, &options.directory)?;
    // The umask must not restrict the modes that clients choose. All other files are created with an explicit mode.
    rustix::process::umask(rustix::fs::Mode::empty());
    let policy = Policy::new(options.squash);
    policy.prepare()?;
    // The kernel denies an RDMA device to a thread whose credentials have changed since the device was opened.
    ensure!(
        options.workers > 0
            || !policy.is_privileged()
            || options.listen.iter().all(|address| address.scheme() != "verbs"),
        "--workers 0: the shards would switch to the user IDs of callers, and threads that do so may not use the RDMA \
         devices of verbs: addresses: use --workers 1 or more"
    );
    let descriptors = Descriptors::divide(&config, options.workers.into())?;
    descriptors.limit_connections(&mut config.shard);
    let export = Arc::new(Export::open(
        &options.directory,
        Options {
            read_only: options.read_only,
            sync: !options.not_sync,
            policy,
            handles: options.handles,
            key,
            max_open_files: descriptors.files,
        },
    )?);
    let mount_port = mount::serve(&export, options.mount_port)?;
    let pool = (options.workers > 0).then(|| Pool::start(&export, options.workers.into())).transpose();
    let pool = pool.with_context(|| format!("cannot start {} threads (--workers)", options.workers))?;
    let server = Server::start(first, nfs::services(&export, pool.as_ref()), &config)?;
    let registered = if options.rpcbind { Some(register(&options.listen, mount_port)?) } else { None };
    let exported = Arc::clone(&export);
    program::spawn("tidy", move || {
        loop {
            std::thread::sleep(CLOSE_INTERVAL);
            exported.close_unused();
        }
    })?;
    say(&format!(
        "{READY} on {}: {}, {}, {}; MOUNT on TCP port {mount_port}; {}; {descriptors}",
        options.listen.iter().map(Address::to_string).collect::<Vec<_>>().join(", "),
        export.path.display(),
        if options.read_only { "read-only" } else { "writable" },
        export.handle_source_name(),
        match options.squash {
            _ if !policy.is_privileged() => "all calls run as the server's user",
            Squash::All => "all calls run as nobody",
            Squash::None | Squash::Root => "calls run as their users",
        },
    ));
    signals.forever().next();
    if let Some(registered) = registered {
        registered.withdraw()?;
    }
    say(&program::drain(server));
    Ok(())
}

/// Registers both programs with rpcbind.
fn register(listen: &[Address], mount_port: u16) -> anyhow::Result<Registration> {
    let nfs = |address: &Address| {
        let socket_address = address
            .socket_address()?
            .with_context(|| format!("--rpcbind: cannot register {address}, which has no IP address"))?;
        Ok(Mapping::new(nfs_v3::PROGRAM, nfs_v3::VERSION, Transport::Rdma, socket_address))
    };
    let mut mappings = listen.iter().map(nfs).collect::<anyhow::Result<Vec<_>>>()?;
    let mount = (Ipv4Addr::UNSPECIFIED, mount_port).into();
    mappings.push(Mapping::new(mount_v3::PROGRAM, mount_v3::VERSION, Transport::Tcp, mount));
    Ok(Registration::new(mappings)?)
}

/// Configuration, with buffers for `--clients` times `CREDITS` calls.
fn config(options: &Cli, matches: &ArgMatches) -> anyhow::Result<(Config, AcceptConfig)> {
    let calls = CREDITS as usize * usize::from(options.clients);
    let mut shard = Config {
        limits: LimitsConfig {
            credits: CREDITS,
            max_credits: CREDITS,
            min_rate: options.min_rate,
            ..LimitsConfig::default()
        },
        poll: PollConfig { idle: options.idle.policy(), ..PollConfig::default() },
        timeouts: TimeoutConfig {
            keep_alive: Duration::from_secs(options.keep_alive.into()),
            progress: Duration::from_secs(options.progress_timeout.into()),
        },
        memory: MemoryConfig {
            budget: BUDGET,
            bulk_buffers: vec![(16 << 10, calls), (nfs::TRANSFER as usize, calls)],
            long_buffers: vec![(nfs::DIRECTORY as usize + 4096, calls.min(64))],
            ..MemoryConfig::default()
        },
        wire: WireConfig { host_auth: options.host_key.policy(HOST_KEY_ID)?, ..WireConfig::default() },
        ..Config::default()
    };
    options.iwarp.configure(&mut shard, &options.listen)?;
    let knobs = [
        ("idle", "poll.idle"),
        ("keep_alive", "timeouts.keep_alive"),
        ("progress_timeout", "timeouts.progress"),
        ("min_rate", "limits.min_rate"),
        ("crc", "iwarp.crc"),
        ("fpdu", "debug.fpdu_size"),
    ];
    let given = rpcrdma_config::given(matches, &knobs);
    Ok(options.config.load()?.apply(&shard, &AcceptConfig::default(), &given)?)
}

/// Default path of the key.
fn default_key_path() -> anyhow::Result<PathBuf> {
    let directory = if rustix::process::geteuid().is_root() {
        PathBuf::from("/var/lib")
    } else {
        let home = std::env::var_os("HOME").context("HOME is not set: name the key of file handles by --key FILE")?;
        PathBuf::from(home).join(".local/state")
    };
    // Only this user may write in the directory, whatever the umask is.
    let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    created.with_context(|| format!("cannot create {} for the key of file handles", directory.display()))?;
    Ok(directory.join("nfs3d.key"))
}

/// Reads or creates the key, outside of the exported directory.
fn read_or_create_key(path: &Path, directory: &Path) -> anyhow::Result<Key> {
    let mut key = Key::default();
    let name = || path.display().to_string();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let (Ok(parent), Ok(directory)) = (parent.canonicalize(), directory.canonicalize()) {
        ensure!(
            !parent.starts_with(directory),
            "--key {}: the key must be outside of the exported directory, which clients can read",
            name()
        );
    }
    if let Some(mut file) = secret_file::create(path).context("--key")? {
        getrandom::fill(&mut key)
            .map_err(|error| anyhow::anyhow!("cannot get random bytes from the system: {error}"))?;
        file.write_all(&key)
            .and_then(|()| file.sync_all())
            .with_context(|| format!("cannot write the key {}", name()))?;
    } else {
        let bytes = secret_file::read(path).context("--key")?;
        let links = path.metadata().with_context(name)?.nlink();
        ensure!(
            links == 1,
            "--key {}: the file has {links} hard links, and clients could reach it by one in the exported directory: \
             remove the others, which `find DIRECTORY -samefile {}` lists",
            name(),
            name()
        );
        ensure!(
            bytes.len() == key.len(),
            "invalid key {}: expected {} bytes, found {}",
            name(),
            key.len(),
            bytes.len()
        );
        key.copy_from_slice(&bytes);
    }
    Ok(key)
}
