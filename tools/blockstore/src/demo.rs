//! Demonstration with a server in a second process: copies a file, reads it back, and compares it.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use rpcrdma::Address;
use rpcrdma::auth::AuthPolicy;
use rpcrdma_config::program::{READY, say};
use rustix::process::{Pid, Signal};

use crate::client::BlockClient;
use crate::{CallOptions, Io, parse_size, report};

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Size of the file, in bytes.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_size)]
    size: u64,
    /// Directory of the temporary file and store, which need twice the size. Default: the system's temporary directory.
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    calls: CallOptions,
    /// Seed of the contents and of the order of reads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Cores of the server's shards, see `serve`.
    #[arg(long, value_name = "LIST")]
    cores: Option<String>,
    /// I/O engine of the server, see `serve`.
    #[arg(long, value_enum, default_value_t = Io::Auto)]
    io: Io,
    /// Worker threads of the server, see `serve`.
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,
}

pub(crate) fn run(options: &Demo) -> anyhow::Result<()> {
    let Demo { size, calls: CallOptions { block, depth }, .. } = *options;
    say(&format!(
        "{size} bytes in blocks of {block}, {depth} outstanding calls; software fabric (shared memory, no network)"
    ));
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::Builder::new().prefix("blockstore-").tempdir_in(&parent);
    let dir = dir.with_context(|| format!("cannot create a directory in {} (--dir)", parent.display()))?;
    let source = create_random_file(dir.path().join("source"), size, options.seed)?;
    let address: Address = format!("soft:blockstore-{}", std::process::id()).parse()?;
    let mut arguments =
        vec!["--size".into(), options.size.to_string(), "--workers".into(), options.workers.to_string()];
    let io = options.io.to_possible_value().context("--io has no name")?;
    arguments.extend(["--io".to_owned(), io.get_name().to_owned()]);
    if let Some(cores) = &options.cores {
        arguments.extend(["--cores".to_owned(), cores.clone()]);
    }
    let server = ServerProcess::start(&address, &dir.path().join("store"), &arguments)?;
    // Both processes have the files open, so their names can be removed. No file remains if either process is killed.
    dir.close().context("cannot remove the temporary directory")?;

    let mut client = BlockClient::connect(&address, block, depth.into(), AuthPolicy::Off)?;
    ensure!(client.info().size == size, "the store has {} bytes, expected {size}", client.info().size);
    report("copied", &client.copy(&source, size)?, &address);
    say(&format!("flushed in {:.3} s", client.flush()?.as_secs_f64()));
    let (figures, sum) = client.verify(&source, size, options.seed)?;
    report("verified, in random order,", &figures, &address);
    say(&format!("crc32 {sum:08x}, equal to the source's"));
    drop(client);
    server.stop()
}

/// Creates a file of `size` random bytes from `seed`.
pub(crate) fn create_random_file(path: PathBuf, size: u64, seed: u64) -> anyhow::Result<File> {
    let write = || {
        let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut chunk = vec![0; 1 << 20];
        let mut remaining = size;
        while remaining > 0 {
            let len = remaining.min(chunk.len() as u64);
            rng.fill(&mut chunk[..len as usize]);
            file.write_all(&chunk[..len as usize])?;
            remaining -= len;
        }
        Ok::<_, std::io::Error>(file)
    };
    write().with_context(|| format!("{}: cannot write {size} bytes (see `df {0}`)", path.display()))
}

/// Stops this process when its parent ends.
pub(crate) fn stop_with_parent(parent: u32) -> anyhow::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM)).context("prctl(PR_SET_PDEATHSIG)")?;
    // No signal is sent if the parent ended before the call.
    let current = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    ensure!(current == Some(parent), "the parent process {parent} has already ended");
    Ok(())
}

/// A server in a child process, which is killed on drop.
pub(crate) struct ServerProcess {
    child: Child,
    /// Standard output, held open so that the pipe does not close.
    stdout: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// Starts a server, and waits until it listens.
    pub(crate) fn start(address: &Address, store: &Path, arguments: &[String]) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's executable")?;
        let mut command = Command::new(program);
        command.args(["serve", "--parent", &std::process::id().to_string(), "--listen", &address.to_string()]);
        command.arg("--file").arg(store).args(arguments);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start the server")?;
        let stdout = child.stdout.take().context("the server's output")?;
        let mut this = Self { child, stdout: BufReader::new(stdout) };
        let ready = this.read_line()?;
        ensure!(ready.starts_with(READY), "the server did not start: see its error above");
        say(&format!("server: {ready}"));
        Ok(this)
    }

    /// Process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    fn read_line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line).context("the server's output")?;
        Ok(line.trim_end().to_owned())
    }

    /// Stops the server, and waits for its end.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM).context("kill")?;
        say(&format!("server: {}", self.read_line()?));
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Both calls fail only if the server has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
