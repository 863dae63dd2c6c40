//! Tests of the hosts' shares of threads, and of calls of closed connections.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::server::ServerConfig;
use rpcrdma::typed::CallOptions;
use rpcrdma::{Address, LocalClient, Server};
use tempfile::TempDir;

use super::*;
use crate::nfs3::nfs_v3::{Create, PROGRAM, VERSION, bindings};
use crate::nfs3::{Create3Args, Createhow3, Diropargs3, Filename3};
use crate::{HandleSource, Options, Policy, Squash, UNCHANGED, nfs};

const THREADS: usize = 8;
/// Calls of each connection.
const CALLS: usize = 4;

/// A server of a temporary directory.
struct TestServer {
    directory: TempDir,
    export: Arc<Export>,
    pool: Arc<Pool>,
    address: Address,
    _server: Server,
}

impl TestServer {
    fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        // Calls without a credential, which run as nobody, create files there, too.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
        let options = Options {
            read_only: false,
            sync: false,
            policy: Policy::new(Squash::None),
            handles: HandleSource::Auto,
            key: [7; 32],
            max_open_files: 100,
        };
        let export = Arc::new(Export::open(directory.path(), options).expect("a directory"));
        let pool = Pool::start(&export, THREADS).expect("threads");
        let address: Address = format!("soft:nfs3d-pool-{name}-{}", std::process::id()).parse().expect("an address");
        let services = nfs::services(&export, Some(&pool));
        let server = Server::start(&address, services, &ServerConfig::default()).expect("a server");
        Self { directory, export, pool, address, _server: server }
    }

    /// A connection with the machine name of an AUTH_SYS credential, or without a credential.
    fn connect(&self, machine: Option<&str>) -> LocalClient {
        let mut config = ClientConfig::new(PROGRAM, VERSION);
        if let Some(machine) = machine {
            config.credential = Credential::sys(machine, 0, 0, &[]).expect("a credential");
        }
        config.bindings = Some(Arc::new(bindings()));
        LocalClient::connect(&self.address, config).expect("connected")
    }

    /// Numbers of calls that hold threads and of calls that wait, of all hosts.
    fn held_and_waiting(&self) -> (usize, usize) {
        let shares = lock(&self.pool.shares);
        let clients = || shares.clients.values();
        (THREADS - shares.free, clients().map(|client| client.waiting.len()).sum())
    }

    /// Number of waiting calls of closed connections.
    fn waiting_on_closed_connections(&self) -> usize {
        let shares = lock(&self.pool.shares);
        let waiting = shares.clients.values().flat_map(|client| &client.waiting);
        waiting.filter(|call| call.is_disconnected()).count()
    }

    fn names(&self) -> HashSet<String> {
        let entries = fs::read_dir(self.directory.path()).expect("a directory");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
    }

    /// Starts a CREATE in the root.
    fn start_create(&self, client: &mut LocalClient, name: &str) {
        let how = Createhow3::Guarded(UNCHANGED);
        let args = Create3Args {
            r#where: Diropargs3 { dir: self.export.root.handle(), name: Filename3(name.as_bytes()) },
            how,
        };
        let first = client.first();
        let call = CallOptions::<Create>::new().into_call(&mut (&mut *client, first), &args).expect("memory");
        client.start(first, call, 0);
        client.flush();
    }
}

/// Polls clients until a condition holds. Returns the number of their calls that ended.
#[track_caller]
fn poll_until(clients: &mut [LocalClient], what: &str, mut holds: impl FnMut(usize) -> bool) -> usize {
    let (since, mut ended) = (Instant::now(), 0);
    while !holds(ended) {
        // The time limit only bounds a hang.
        assert!(since.elapsed() < Duration::from_secs(60), "{what}");
        for client in &mut *clients {
            client.poll(|done| ended += usize::from(done.result.is_ok()));
        }
        std::thread::yield_now();
    }
    ended
}

/// A client chooses its machine names and its number of connections, so neither must gain it another share.
#[test]
fn a_host_has_one_share_whatever_its_credentials_and_connections() {
    let server = TestServer::new("shares");
    let mut clients = vec![server.connect(Some("one")), server.connect(Some("two"))];
    clients.extend((0..12).map(|_| server.connect(None)));
    // Each CREATE waits for the lock of the directory, and holds its thread meanwhile.
    let directory_lock = server.export.root.lock();
    for (n, client) in clients.iter_mut().enumerate() {
        (0..CALLS).for_each(|call| server.start_create(client, &format!("{n}-{call}")));
    }
    let all = clients.len() * CALLS;
    poll_until(&mut clients, "calls arrive, and threads take them", |_| {
        let (held, waiting) = server.held_and_waiting();
        held + waiting == all && !lock(&server.pool.shares).is_ready()
    });
    assert_eq!(server.held_and_waiting(), (THREADS / 2, all - THREADS / 2), "the other half is for other hosts");
    drop(directory_lock);
    poll_until(&mut clients, "calls end", |ended| ended == all);
    assert_eq!((server.names().len(), server.held_and_waiting()), (all, (0, 0)));
}

/// The replies of closed connections could not be sent, so their waiting calls take no thread from other calls.
#[test]
fn waiting_calls_of_closed_connections_do_not_run() {
    for another_call in [false, true] {
        let server = TestServer::new(&format!("closed-{another_call}"));
        let mut staying = [server.connect(Some("tests"))];
        let directory_lock = server.export.root.lock();
        (0..CALLS).for_each(|call| server.start_create(&mut staying[0], &format!("staying-{call}")));
        poll_until(&mut staying, "calls hold their threads", |_| server.held_and_waiting() == (CALLS, 0));
        let mut leaving = [Some("tests"), Some("other"), None].map(|machine| server.connect(machine));
        for (n, client) in leaving.iter_mut().enumerate() {
            (0..CALLS).for_each(|call| server.start_create(client, &format!("leaving-{n}-{call}")));
        }
        poll_until(&mut leaving, "calls wait", |_| server.held_and_waiting() == (CALLS, 3 * CALLS));
        drop(leaving);
        poll_until(&mut staying, "the server sees that the connections are closed", |_| {
            server.waiting_on_closed_connections() == 3 * CALLS
        });
        let mut all = CALLS;
        if another_call {
            // Another call of their host removes them from the queue.
            server.start_create(&mut staying[0], "staying-and-last");
            poll_until(&mut staying, "another call waits", |_| server.held_and_waiting() == (CALLS, 1));
            all += 1;
        }
        drop(directory_lock);
        poll_until(&mut staying, "calls end", |ended| ended == all);
        poll_until(&mut staying, "the pool is idle", |_| server.held_and_waiting() == (0, 0));
        let names = server.names();
        assert_eq!(names.len(), all);
        assert!(names.iter().all(|name| name.starts_with("staying")), "{names:?}");
    }
}
