//! Servers and clients of one test, with a check for leaks at its end.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rpcrdma::client::{ClientCall, ClientConfig, Connection, LocalClient};
use rpcrdma::fabric::Fabric;
use rpcrdma::server::{ServerConfig, Undrained, WorkerConfig};
use rpcrdma::service::{Application, LocalProcedure, LocalServices, ShardSetup, ShardTask};
use rpcrdma::stats::ShardStats;
use rpcrdma::{Address, CallError, CallResult, Config, CreditMode, FailedCall, Server, Services};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, PagePolicy, Pool, PoolConfig};

use crate::data::{has_pattern, pattern};
use crate::held_calls::{HELD, HeldCalls};
use crate::leaks::{open_descriptors, shard_leak, wait_until};
use crate::raw::RawPeer;
use crate::services::{ECHO, LOAD, MIRROR, PROGRAM, STORE, VERSION, services_of, standard_and, standard_services};
use crate::test_fabric;
use crate::timed::TimedServer;

/// Worlds run one at a time, because each counts the descriptors of the process.
static WORLD_LOCK: Mutex<()> = Mutex::new(());

/// The thread that drains a server.
pub type Draining = JoinHandle<Result<Vec<ShardStats>, Undrained>>;

/// The servers of one test.
///
/// The drop checks that no server holds memory, and that the process has the same open descriptors as before. Drop
/// clients first.
pub struct World {
    name: &'static str,
    /// Descriptors that were open before the test.
    descriptors: Vec<String>,
    servers: Vec<Server>,
    _lock: MutexGuard<'static, ()>,
}

impl World {
    /// Creates a world as soon as no other one exists. Addresses and failures contain `name`.
    pub fn new(name: &'static str) -> Self {
        let lock = WORLD_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        test_fabric::print_logs();
        test_fabric::warm_up();
        Self { name, descriptors: open_descriptors(), servers: Vec::new(), _lock: lock }
    }

    /// A world with a server of these services.
    pub fn serving(name: &'static str, config: impl IntoServerConfig, services: Services) -> (Self, Address) {
        let mut world = Self::new(name);
        let address = world.serve_with(config, services);
        (world, address)
    }

    /// A world with a server of the standard services.
    pub fn standard(name: &'static str, config: impl IntoServerConfig) -> (Self, Address) {
        let config = config.into_server_config();
        let services = services_of(&config);
        Self::serving(name, config, services)
    }

    /// A world with a server of the standard services and [`HELD`].
    ///
    /// The test answers the calls of [`HELD`].
    pub fn holding(name: &'static str, config: impl IntoServerConfig) -> (Self, Address, HeldCalls) {
        let held = HeldCalls::default();
        let (world, address) = Self::serving(name, config, standard_and([(HELD, held.procedure())]));
        (world, address, held)
    }

    /// A world with a server of the standard services in simulated time.
    pub fn timed(name: &'static str, config: impl IntoServerConfig) -> (Self, Address, TimedServer) {
        let world = Self::new(name);
        let (address, server) = world.serve_timed(config);
        (world, address, server)
    }

    /// A world with a server of these services in simulated time.
    pub fn timed_with(
        name: &'static str,
        config: impl IntoServerConfig,
        services: Services,
    ) -> (Self, Address, TimedServer) {
        let world = Self::new(name);
        let address = world.address();
        let server = TimedServer::start(&address, config, services);
        (world, address, server)
    }

    /// A world with a server of the standard services, and its client.
    pub fn pair(
        name: &'static str,
        server: impl IntoServerConfig,
        client: impl IntoClientConfig,
    ) -> (Self, LocalClient) {
        let (world, address) = Self::standard(name, server);
        let client = world.client(&address, client);
        (world, client)
    }

    /// A world with a server of these services, and its client.
    pub fn pair_with(
        name: &'static str,
        server: impl IntoServerConfig,
        services: Services,
        client: impl IntoClientConfig,
    ) -> (Self, LocalClient) {
        let (world, address) = Self::serving(name, server, services);
        let client = world.client(&address, client);
        (world, client)
    }

    /// A world with a server of the standard services in this credit mode, and a raw client.
    pub fn raw(name: &'static str, mode: CreditMode) -> (Self, RawPeer) {
        let (world, address) = Self::standard(name, mode);
        (world, RawPeer::connect_in(&address, mode))
    }

    /// A world with a server of the standard services in this credit mode, its address, and a raw client.
    pub fn raw_at(name: &'static str, mode: CreditMode) -> (Self, Address, RawPeer) {
        let (world, address) = Self::standard(name, mode);
        let client = RawPeer::connect_in(&address, mode);
        (world, address, client)
    }

    /// A world with a server of these services in this credit mode, and a raw client.
    pub fn raw_with(name: &'static str, mode: CreditMode, services: Services) -> (Self, RawPeer) {
        let (world, address) = Self::serving(name, mode, services);
        (world, RawPeer::connect_in(&address, mode))
    }

    /// A world with a server of the standard services, and a witness.
    ///
    /// The witness is a client. Server and witness have this credit mode. The test checks with [`assert_served`] that
    /// the server still serves the witness.
    pub fn witnessed(name: &'static str, mode: CreditMode) -> (Self, Address, LocalClient) {
        let (world, address) = Self::standard(name, mode);
        let witness = world.client(&address, mode);
        (world, address, witness)
    }

    /// A unique address.
    pub fn address(&self) -> Address {
        test_fabric::new_address(self.name)
    }

    /// Starts a server of the standard services.
    pub fn serve(&mut self, config: impl IntoServerConfig) -> Address {
        let config = config.into_server_config();
        let services = services_of(&config);
        self.serve_with(config, services)
    }

    /// Starts a server of these services.
    pub fn serve_with(&mut self, config: impl IntoServerConfig, services: Services) -> Address {
        let address = self.address();
        self.serve_at(&address, config, services);
        address
    }

    /// Starts a server of these services at `address`.
    pub fn serve_at(&mut self, address: &Address, config: impl IntoServerConfig, services: Services) {
        self.servers.push(Server::start(address, services, &config.into_server_config()).expect("a server"));
    }

    /// Starts a server whose shards each have their own services and task. Drop the server before this world.
    pub fn serve_tasks<T: ShardTask + 'static>(
        &self,
        config: impl IntoServerConfig,
        make: impl Fn(&ShardSetup<'_>) -> (LocalServices, T) + Send + Sync + 'static,
    ) -> (Address, Server) {
        let address = self.address();
        let make = move |setup: &ShardSetup<'_>| {
            let (services, task) = make(setup);
            Ok(Application { services, task: Some(Box::new(task)) })
        };
        let server = Server::start_with(&address, make, &config.into_server_config()).expect("a server");
        (address, server)
    }

    /// Starts a server of the standard services in simulated time. Drop the server before this world.
    pub fn serve_timed(&self, config: impl IntoServerConfig) -> (Address, TimedServer) {
        let config = config.into_server_config();
        let services = services_of(&config);
        let address = self.address();
        let server = TimedServer::start(&address, config, services);
        (address, server)
    }

    /// The latest server.
    pub fn server(&self) -> &Server {
        self.servers.last().expect("a server was started")
    }

    /// Statistics of the latest server's first shard.
    pub fn stats(&self) -> ShardStats {
        self.server().stats().swap_remove(0)
    }

    /// Removes the latest server from this world. Its drop ends the server.
    pub fn take_server(&mut self) -> Server {
        self.servers.pop().expect("a server was started")
    }

    /// Drains the latest server on a thread.
    pub fn drain(&mut self, time: Duration) -> Draining {
        let server = self.take_server();
        std::thread::spawn(move || server.drain(time))
    }

    /// Connects a client that the test polls.
    pub fn client(&self, address: &Address, config: impl IntoClientConfig) -> LocalClient {
        LocalClient::connect(address, config.into_client_config()).expect("a connection")
    }

    /// Waits until the latest server has no connections and holds no memory.
    pub fn assert_server_clean(&self) {
        assert_clean(self.name, self.server());
    }
}

/// Waits until a server has no connections and holds no memory.
fn assert_clean(name: &str, server: &Server) {
    let mut leaks = Vec::new();
    let clean = wait_until(|| {
        leaks = server.stats().iter().filter_map(shard_leak).collect();
        leaks.is_empty()
    });
    assert!(clean, "{name}: {leaks:#?}");
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for server in &self.servers {
            assert_clean(self.name, server);
        }
        self.servers.clear();
        let mut descriptors = Vec::new();
        let unchanged = wait_until(|| {
            descriptors = open_descriptors();
            descriptors == self.descriptors
        });
        assert!(unchanged, "{}: open descriptors {descriptors:?}, expected {:?}", self.name, self.descriptors);
    }
}

/// The standard services of one shard, and a further procedure.
pub fn local_and(number: u32, procedure: LocalProcedure) -> LocalServices {
    let mut services = standard_services().to_local();
    services.add(PROGRAM, VERSION, number, procedure);
    services
}

/// Configuration of a shard that starts fast: little memory, small pages without prefaulting.
pub fn small_config() -> Config {
    Config::default().with(|c| {
        c.memory.receives = 640;
        c.memory.small_buffers = 160;
        c.memory.message_buffers = 160;
        c.memory.bulk_buffers = vec![(64 << 10, 16), (1 << 20, 5)];
        c.memory.pages = PagePolicy::Small;
        c.debug.prefault = false;
    })
}

/// Configuration of a [small](small_config) shard with few buffers.
///
/// It has `bulk` buffers of 64 KiB for chunks, and `long` buffers of 32 KiB for long messages.
pub fn scarce_config(bulk: usize, long: usize) -> Config {
    small_config()
        .with(|c| (c.memory.bulk_buffers, c.memory.long_buffers) = (vec![(64 << 10, bulk)], vec![(32 << 10, long)]))
}

/// Configuration of a [small](small_config) shard with this credit mode.
pub fn in_mode(mode: CreditMode) -> Config {
    small_config().with(|c| c.wire.credit_mode = mode)
}

/// Configuration of a [small](small_config) shard whose connections always have `credits` credits.
pub fn few_credits(mode: CreditMode, credits: u32) -> Config {
    in_mode(mode).with(|c| (c.limits.credits, c.limits.max_credits) = (credits, credits))
}

/// Application memory, whose arena can be given to an engine.
pub fn own_pool(size: usize, count: usize) -> Pool {
    let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "own", ..ArenaConfig::default() };
    Pool::new(&PoolConfig { classes: vec![Class { size, count }], arena }).expect("memory")
}

/// Changes a configuration.
pub trait With: Sized {
    /// Returns the configuration after `change`.
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl With for Config {}
impl With for ClientConfig {}
impl With for ServerConfig {}

/// Configuration of a test's client, in part or complete.
///
/// A shard's configuration and a credit mode leave the rest to defaults.
pub trait IntoClientConfig {
    /// The complete configuration.
    fn into_client_config(self) -> ClientConfig;
}

impl IntoClientConfig for Config {
    fn into_client_config(self) -> ClientConfig {
        small_client(self)
    }
}

impl IntoClientConfig for CreditMode {
    fn into_client_config(self) -> ClientConfig {
        small_client(in_mode(self))
    }
}

impl IntoClientConfig for ClientConfig {
    fn into_client_config(self) -> ClientConfig {
        self
    }
}

/// Configuration of a test's server, in part or complete.
///
/// A shard's configuration and a credit mode leave the rest to defaults.
pub trait IntoServerConfig: Sized {
    /// The complete configuration.
    fn into_server_config(self) -> ServerConfig;

    /// The configuration with `count` workers.
    fn with_workers(self, count: usize) -> ServerConfig {
        let workers = Some(WorkerConfig { count, ..WorkerConfig::default() });
        ServerConfig { workers, ..self.into_server_config() }
    }
}

impl IntoServerConfig for Config {
    fn into_server_config(self) -> ServerConfig {
        ServerConfig { shard: self, ..small_server() }
    }
}

impl IntoServerConfig for CreditMode {
    fn into_server_config(self) -> ServerConfig {
        in_mode(self).into_server_config()
    }
}

impl IntoServerConfig for ServerConfig {
    fn into_server_config(self) -> ServerConfig {
        self
    }
}

/// Configuration of a server with one [small](small_config) shard.
pub fn small_server() -> ServerConfig {
    ServerConfig { shard: small_config(), ..ServerConfig::default() }
}

/// Configuration of a client of the standard program.
pub fn small_client(shard: Config) -> ClientConfig {
    ClientConfig { shard, ..ClientConfig::new(PROGRAM, VERSION) }
}

/// Configuration of a client that reconnects up to `attempts` times.
///
/// The delay before each attempt is at most 10 ms.
pub fn reconnecting(config: impl IntoClientConfig, attempts: u32) -> ClientConfig {
    config.into_client_config().with(|c| {
        c.connect.reconnect_attempts = attempts;
        c.connect.reconnect_backoff = (Duration::from_millis(1), Duration::from_millis(10));
    })
}

/// Whether the call has its reply, or was lost with its connection.
pub fn served_or_lost<T>(result: &Result<T, FailedCall>) -> bool {
    let lost = |failed: &FailedCall| matches!(failed.error, CallError::ConnectionLost { .. } | CallError::Closed);
    result.as_ref().err().is_none_or(lost)
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_be_bytes()).collect()
}

/// Prepares a call with these arguments.
fn prepare_call<F: Fabric>(client: &mut LocalClient<F>, procedure: u32, args: &[u8]) -> Result<ClientCall, CallError> {
    let mut call = client.prepare(procedure, args.len())?;
    call.args_mut().copy_from_slice(args);
    Ok(call)
}

/// Allocates memory with the pattern of a seed.
fn pattern_buf<F: Fabric>(
    client: &mut LocalClient<F>,
    connection: Connection,
    seed: u32,
    len: usize,
) -> Result<Buf, CallError> {
    let mut data = client.alloc(connection, len)?;
    pattern(seed, &mut data);
    Ok(data)
}

/// Calls [`ECHO`] with these bytes, and checks the reply.
///
/// # Errors
/// The failure of a call without a reply.
pub fn echo<F: Fabric>(client: &mut LocalClient<F>, args: &[u8]) -> Result<(), CallError> {
    let mut call = client.prepare(ECHO, args.len())?;
    call.args_mut().copy_from_slice(args);
    let reply = client.call(call)?;
    assert_eq!(reply.results(), args, "results of an echo");
    Ok(())
}

/// Sends Read chunks of these lengths, and checks that the server has read them.
///
/// # Errors
/// The failure of a call without a reply.
pub fn store<F: Fabric>(client: &mut LocalClient<F>, seed: u32, lens: &[usize]) -> Result<(), CallError> {
    let first = client.first();
    let mut call = prepare_call(client, STORE, &words(&[seed]))?;
    let mut position = 4;
    for (n, &len) in lens.iter().enumerate() {
        let data = pattern_buf(client, first, seed + n as u32, len)?;
        call = call.read_chunk(position, data);
        position += len.next_multiple_of(4);
    }
    let mut reply = client.call(call)?;
    let expected: Vec<u32> = lens.iter().map(|&len| len as u32).collect();
    assert_eq!(reply.results(), words(&expected), "lengths of the chunks that the server has read");
    let mut returned = 0;
    for (n, buf) in reply.take_sent().enumerate() {
        assert!(has_pattern(seed + n as u32, &buf) && buf.len() == lens[n], "returned memory must be unchanged");
        returned += 1;
    }
    assert_eq!(returned, lens.len(), "returned Read chunks");
    Ok(())
}

/// Offers Write chunks, and checks the written results.
///
/// `chunks` has for each chunk its capacity and the length of the result. A longer result is cut to the capacity.
///
/// # Errors
/// The failure of a call without a reply.
pub fn load<F: Fabric>(client: &mut LocalClient<F>, seed: u32, chunks: &[(usize, usize)]) -> Result<(), CallError> {
    let first = client.first();
    let mut args = vec![seed];
    args.extend(chunks.iter().map(|&(_, wanted)| wanted as u32));
    let mut call = prepare_call(client, LOAD, &words(&args))?;
    for &(capacity, _) in chunks {
        let mut buf = client.alloc(first, capacity)?;
        buf.fill(0xEE);
        call = call.write_chunk_into(buf);
    }
    check_write_chunks(client.call(call), seed, chunks)
}

/// Checks the results in Write chunks, as [`load`] describes them.
fn check_write_chunks(result: CallResult, seed: u32, chunks: &[(usize, usize)]) -> Result<(), CallError> {
    let reply = result?;
    for (n, &(capacity, wanted)) in chunks.iter().enumerate() {
        let chunk = reply.chunk(n).expect("as many chunks as were offered");
        assert_eq!(chunk.len(), wanted.min(capacity), "length of chunk {n}");
        assert!(has_pattern(seed + n as u32, chunk), "chunk {n} must have the pattern of its seed");
    }
    Ok(())
}

/// Sends Read chunks, and checks that the server returns the same data in Write chunks.
///
/// # Errors
/// The failure of a call without a reply.
pub fn mirror<F: Fabric>(client: &mut LocalClient<F>, seed: u32, lens: &[usize]) -> Result<(), CallError> {
    let first = client.first();
    let mut call = prepare_call(client, MIRROR, &words(&[seed]))?;
    let mut position = 4;
    for (n, &len) in lens.iter().enumerate() {
        let data = pattern_buf(client, first, seed + n as u32, len)?;
        call = call.read_chunk(position, data);
        position += len.next_multiple_of(4);
        let result = client.alloc(first, len)?;
        call = call.write_chunk_into(result);
    }
    let chunks: Vec<_> = lens.iter().map(|&len| (len, len)).collect();
    check_write_chunks(client.call(call), seed, &chunks)
}

/// Checks that the server serves a client, whatever other clients do.
pub fn assert_served<F: Fabric>(witness: &mut LocalClient<F>) {
    for seed in 0..5 {
        echo(witness, &[seed as u8; 50]).expect("a reply to the witness");
        mirror(witness, seed, &[777]).expect("a reply to the witness");
    }
}
