//! A server under load with a statistics socket, in this process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rpcrdma::client::ClientConfig;
use rpcrdma::config::{DebugConfig, MemoryConfig, PollConfig};
use rpcrdma::mempool::PagePolicy;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Config, IdlePolicy, LocalClient, Procedure, Server, Services};
use tempfile::TempDir;

/// Program of the server, whose procedure 1 returns its arguments.
pub(crate) const PROGRAM: u32 = 0x2000_0042;

/// A server, and a client that calls it.
pub(crate) struct LoadedServer {
    server: Option<Server>,
    address: Address,
    directory: TempDir,
    stop: Arc<AtomicBool>,
    load: Option<JoinHandle<()>>,
}

/// Returns a configuration of a shard with little memory.
pub(crate) fn shard() -> Config {
    Config {
        memory: MemoryConfig {
            receives: 640,
            small_buffers: 160,
            message_buffers: 160,
            bulk_buffers: vec![(64 << 10, 4)],
            pages: PagePolicy::Small,
            ..MemoryConfig::default()
        },
        debug: DebugConfig { sample_latency: 1, ..DebugConfig::default() },
        ..Config::default()
    }
}

impl LoadedServer {
    pub(crate) fn start() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let address = format!("soft:loaded-{}-{number}", std::process::id()).parse().expect("an address");
        let directory = tempfile::tempdir().expect("a directory");
        let mut server = Self { server: None, address, directory, stop: Arc::default(), load: None };
        server.serve();
        let (address, stop) = (server.address.clone(), Arc::clone(&server.stop));
        server.load = Some(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                call(&address, &stop);
                std::thread::sleep(Duration::from_millis(20));
            }
        }));
        server
    }

    /// Starts or restarts the server.
    pub(crate) fn serve(&mut self) {
        let mut services = Services::new();
        let echo = Procedure::new(|call| {
            let arguments = call.args().to_vec();
            let reply = call.reply_mut(arguments.len())?;
            reply.copy_from_slice(&arguments);
            Ok(())
        });
        services.add(PROGRAM, 1, 1, echo);
        let shard = Config { poll: PollConfig { idle: IdlePolicy::Event, ..shard().poll }, ..shard() };
        let config = ServerConfig { shard, stats: Some(self.stats()), ..ServerConfig::default() };
        self.server = Some(Server::start(&self.address, services, &config).expect("a server"));
    }

    /// Ends the server. The client retries until it is restarted.
    pub(crate) fn end(&mut self) {
        drop(self.server.take());
    }

    /// Path of the statistics socket.
    pub(crate) fn stats(&self) -> PathBuf {
        self.directory.path().join("stats")
    }

    /// A directory for files of the test.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }
}

/// Makes one call per millisecond while the connection lasts, a measurable rate that leaves cores to other tests.
fn call(address: &Address, stop: &AtomicBool) {
    let shard = Config { poll: PollConfig { idle: IdlePolicy::Event, ..shard().poll }, ..shard() };
    let config = ClientConfig { shard, ..ClientConfig::new(PROGRAM, 1) };
    let Ok(mut client) = LocalClient::connect(address, config) else { return };
    while !stop.load(Ordering::Relaxed) {
        let Ok(call) = client.prepare(1, 64) else { return };
        if client.call(call).is_err() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for LoadedServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(load) = self.load.take() {
            let _ = load.join();
        }
    }
}

/// Returns a command that runs the tested program.
pub(crate) fn rpcrdma() -> Command {
    Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
}
