#![expect(unsafe_code, reason = "functions of C")]
//! Servers, with threads of their own or polled; what polled servers and clients have in common.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rpcrdma::Server;
use rpcrdma::server::LocalServer;
use rustix::io::Errno;

use crate::any::{Any, any};
use crate::arguments::{addresses, copy};
use crate::calling::CallingClient;
use crate::failure::{Failure, entry};
use crate::handle::{hold, lend, share, take};
use crate::hosted::Hosted;
use crate::interface::general::may_end;
use crate::interface::knobs;
use crate::interface::threads::hold_here;
use crate::polled::PolledServer;
use crate::process;
use crate::types::*;

/// Starts a server on one or several addresses, separated by commas; blocks for some milliseconds.
///
/// An address is `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`. Each shard, a thread, serves one of them;
/// `server.shards` says how many there are, by default one for each address. `config` may be NULL.
///
/// NULL after a failure: the text names the call, the limit and the remedy.
///
/// - EINVAL: an argument, or a knob, such as a core or a NUMA node that this process may not use;
/// - EADDRINUSE: another server has the address, or `server.stats`;
/// - EADDRNOTAVAIL: this host cannot serve the address;
/// - ENOENT: no folder for `server.stats`;
/// - ENOMEM: memory exceeds what the host has left, the control group, RLIMIT_AS (`ulimit -v`), RLIMIT_MEMLOCK
///   (`ulimit -l`, for devices) or `vm.max_map_count`;
/// - EAGAIN: a thread exceeds RLIMIT_NPROC (`ulimit -u`), RLIMIT_AS (for its stack) or the control group;
/// - EFBIG: memory of the library, which is a file to the kernel, exceeds RLIMIT_FSIZE (`ulimit -f`);
/// - EMFILE, ENFILE: the process has no descriptor left (RLIMIT_NOFILE, `ulimit -n`), or the host (`fs.file-max`);
/// - ENOSPC: too many watched sockets (`fs.epoll.max_user_watches`), or objects of the device;
/// - ENODEV: the device lacks something, or there is none;
/// - EIO: another system call.
///
/// # Safety
/// `address` ends with a zero byte; the handles as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_server_start(
    address: *const c_char,
    services: *mut rpcrdma_services,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_server {
    entry("rpcrdma_server_start", || {
        process::prepare();
        // SAFETY: the caller's promise.
        let addresses = unsafe { addresses(address) }?;
        // SAFETY: the caller's promise.
        let services = unsafe { lend(services) }?;
        // SAFETY: the caller's promise.
        let mut config = unsafe { knobs(config, |knobs| knobs.server(addresses.len(), &services)) }?;
        let (first, others) = addresses.split_first().ok_or_else(|| Failure::argument("address is empty"))?;
        config.more_addresses = others.to_vec();
        services.add_arenas(&mut config.shard.memory.arenas);
        config.peers = services.peers();
        let server = match services.application() {
            Some(make) => Server::start_with(first, move |setup| Ok(make(setup)), &config),
            None => Server::start(first, services.services(), &config),
        };
        Ok(hold(Hosted::new(server?)))
    })
}

/// A client for calls to the client that made `call`, on the same connection (RFC 8167). It outlives the call.
///
/// A handler on a shard must not block for such a call: it uses `rpcrdma_client_start`, runs on workers
/// (`RPCRDMA_ON_WORKERS`), or is a deferred one that another thread answers.
///
/// `config` may be NULL. `rpcrdma_free` ends the client. NULL after a failure: EINVAL (the call is of another server,
/// or a knob), EBADF or EBUSY for one of the handles. It does not ask the peer: one that takes no calls is found by the
/// first call, which ends with EOPNOTSUPP.
///
/// # Safety
/// The handles as for `rpcrdma_free`; the call was not answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_server_call_back(
    server: *mut rpcrdma_server,
    call: *mut rpcrdma_call,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_client {
    entry("rpcrdma_server_call_back", || {
        // SAFETY: the caller's promise.
        let (server, call) = (unsafe { share(server) }?, unsafe { lend(call) }?);
        // SAFETY: the caller's promise.
        let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
        let client = server.call_backs.client(call.info().caller(), config);
        Ok(hold(CallingClient::new(client.ok_or_else(another)?)))
    })
}

/// Stops a server gracefully: no new calls, and those under way are answered. Blocks for at most `milliseconds`: calls
/// have nine tenths of it, and all but a second of a longer time. The server ends, and is freed, unless the result is
/// -EDEADLK. Its handlers may use it until then, and may call back the clients whose calls they have not answered yet.
///
/// Returns 0; -ETIMEDOUT if it cut off calls, or connections that clients kept open, as 0 milliseconds do: the text
/// says which; -EDEADLK as for `rpcrdma_free`.
///
/// After -ETIMEDOUT, handlers that still run return later, on the server's threads. Then the hook of
/// `rpcrdma_services_peers` hears of the end of their connections, and the server gives up arenas. What these functions
/// use must stay until then, the library included.
///
/// # Safety
/// `server` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_server_drain(server: *mut rpcrdma_server, milliseconds: u32) -> c_int {
    entry("rpcrdma_server_drain", || {
        // SAFETY: the caller's promise.
        unsafe { may_end(server) }?;
        // SAFETY: the caller's promise.
        let running = unsafe { share(server) }?.take()?;
        let drained = running.drain(Duration::from_millis(milliseconds.into()));
        // SAFETY: as above. Handlers have used the handle until here.
        drop(unsafe { take(server) }?);
        drained.map(|_| 0).map_err(|left| Failure::new(Errno::TIMEDOUT, left))
    })
}

/// Starts a server on one address that the calling thread polls.
///
/// It has no thread, but those of `server.workers`, and, for up to a second after it, one that has unmapped large chunk
/// memory of a client of this host.
///
/// As for `rpcrdma_server_start`. `server.shards` above 1, `server.cores`, `server.stats` and `poll.core` are for
/// servers with threads: EINVAL. So are services with a task.
///
/// The log does not report a handler that blocks its thread, as it does for servers with threads ("shard was blocked").
///
/// # Safety
/// As for `rpcrdma_server_start`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_start(
    address: *const c_char,
    services: *mut rpcrdma_services,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_local_server {
    entry("rpcrdma_local_server_start", || {
        process::prepare();
        // SAFETY: the caller's promise.
        let addresses = unsafe { addresses(address) }?;
        let [address] = &addresses[..] else { return Err(Failure::argument("a polled server has one address")) };
        // SAFETY: the caller's promise.
        let services = unsafe { lend(services) }?;
        // SAFETY: the caller's promise.
        let mut config = unsafe { knobs(config, |knobs| knobs.local_server(&services)) }?;
        services.add_arenas(&mut config.shard.memory.arenas);
        config.peers = services.peers();
        if services.has_task() {
            return Err(Failure::argument("the services have a task: a polled server's thread does that work itself"));
        }
        Ok(hold_here(PolledServer::new(LocalServer::start(address, services.services(), &config)?)))
    })
}

/// A client for calls to the client that made `call`, on the same connection (RFC 8167). It outlives the call.
///
/// The thread that polls the server uses `rpcrdma_client_start`, and `rpcrdma_client_poll` after each poll of the
/// server. Other threads may also use `rpcrdma_client_call`. `call` is a deferred one: in a handler of this server, the
/// server is in use (EBUSY). `config` may be NULL. NULL after a failure: as for `rpcrdma_server_call_back`, and EPERM
/// on another thread than that of the server. `rpcrdma_free` ends the client, which may outlive the server: its calls
/// fail then.
///
/// A call with Read chunks needs another thread than the one that polls the server: `rpcrdma_alloc` and a copy of
/// `rpcrdma_read_chunk::data` wait for the server's turn (EDEADLK).
///
/// # Safety
/// As for `rpcrdma_server_call_back`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_call_back(
    server: *mut rpcrdma_local_server,
    call: *mut rpcrdma_call,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_client {
    entry("rpcrdma_local_server_call_back", || {
        // SAFETY: the caller's promise.
        let (mut polled, call) = (unsafe { lend(server) }?, unsafe { lend(call) }?);
        // SAFETY: the caller's promise.
        let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
        Ok(hold(polled.call_back(call.info().caller(), config).ok_or_else(another)?))
    })
}

/// Turns a polled server once, with bounded work. Never blocks.
///
/// Returns 1 if there was work, 0 if there was none, or a negative code of the handle.
///
/// # Safety
/// `server` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_poll(server: *mut rpcrdma_local_server) -> c_int {
    entry("rpcrdma_local_server_poll", || {
        // SAFETY: the caller's promise.
        let busy = unsafe { lend(server) }?.server.poll();
        Ok(c_int::from(busy))
    })
}

/// Starts to drain a polled server: no new calls, and those under way are answered while it is polled. Until then the
/// server may call back the clients that wait for them.
///
/// Returns 1 once it is drained, 0 before, or a negative code. A drain has no time limit: `rpcrdma_free` ends the
/// server at once.
///
/// # Safety
/// `server` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_drain(server: *mut rpcrdma_local_server) -> c_int {
    entry("rpcrdma_local_server_drain", || {
        // SAFETY: the caller's promise.
        let mut polled = unsafe { lend(server) }?;
        polled.server.begin_drain();
        Ok(c_int::from(polled.server.is_drained()))
    })
}

/// The descriptor of a polled server or client, for epoll: readable while it is armed and has work. It closes with the
/// handle.
///
/// Returns the descriptor, or -EINVAL for a server or client with threads.
///
/// # Safety
/// `handle` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_fd(handle: *mut c_void) -> c_int {
    entry("rpcrdma_fd", || {
        // SAFETY: the caller's promise.
        match unsafe { any(handle) }? {
            Any::LocalServer(polled) => Ok(polled.server.as_fd().as_raw_fd()),
            Any::LocalClient(local) => Ok(local.client.as_fd().as_raw_fd()),
            Any::Server(_) | Any::Client(_) => Err(has_threads()),
        }
    })
}

/// Prepares a polled server or client for a sleep of at most `milliseconds` in epoll. Negative: no limit of the caller.
///
/// Returns the milliseconds to sleep, rounded up; or -EAGAIN if there is work: poll instead. In either case,
/// `rpcrdma_disarm` follows. Work that arrives after `rpcrdma_arm` makes the descriptor readable. -EINVAL as for
/// `rpcrdma_fd`.
///
/// # Safety
/// `handle` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_arm(handle: *mut c_void, milliseconds: c_int) -> c_int {
    entry("rpcrdma_arm", || {
        let longest = Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::from(u32::MAX)));
        // SAFETY: the caller's promise.
        let sleep = match unsafe { any(handle) }? {
            Any::LocalServer(mut polled) => polled.server.arm(longest),
            Any::LocalClient(mut local) => local.arm(longest),
            Any::Server(_) | Any::Client(_) => return Err(has_threads()),
        };
        let round_up = |sleep: Duration| c_int::try_from(sleep.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX);
        Ok(sleep.map_or(-Errno::AGAIN.raw_os_error(), round_up))
    })
}

/// Ends what `rpcrdma_arm` has prepared. Returns 0, or -EINVAL as for `rpcrdma_fd`.
///
/// # Safety
/// `handle` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_disarm(handle: *mut c_void) -> c_int {
    entry("rpcrdma_disarm", || {
        // SAFETY: the caller's promise.
        match unsafe { any(handle) }? {
            Any::LocalServer(mut polled) => polled.server.disarm(),
            Any::LocalClient(mut local) => local.client.disarm(),
            Any::Server(_) | Any::Client(_) => return Err(has_threads()),
        }
        Ok(0)
    })
}

/// Writes the statistics of a server or client to `room` as JSON: an array with an object for each shard. At most `len`
/// bytes, with the zero byte at the end.
///
/// `tuning.md` has the units of its fields, and what to do about their values. `peers` has at most 64 connections of
/// each shard of a server: about 1 KiB each.
///
/// It blocks until each shard has answered: as long as a handler or task blocks a shard. In a handler or task of the
/// same server it returns -EDEADLK, unless that runs on a worker (`RPCRDMA_ON_WORKERS`). In one of a polled server it
/// returns -EBUSY: call it between polls.
///
/// Returns the length of the whole, or a negative code. `room` may be NULL, or `len` 0: then only the length is
/// returned. Of a client whose server or thread has ended, the array is empty.
///
/// # Safety
/// `handle` as for `rpcrdma_free`; `room` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_stats(handle: *mut c_void, room: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_stats", || {
        let own = || Failure::new(Errno::DEADLK, "a shard's handlers and tasks would wait for their own shard");
        // SAFETY: the caller's promise.
        let stats = match unsafe { any(handle) }? {
            Any::Server(server) if server.is_on_own_shard() => return Err(own()),
            Any::Client(client) if client.is_on_own_shard() => return Err(own()),
            Any::Server(server) => server.stats_with_connections(MOST_PEERS),
            Any::LocalServer(mut polled) => vec![polled.server.stats_with_connections(MOST_PEERS)],
            Any::Client(mut client) => client.client().stats().into_iter().collect(),
            Any::LocalClient(mut local) => vec![local.client.stats()],
        };
        let text = serde_json::to_string(&stats).map_err(|error| Failure::new(Errno::IO, error))?;
        // SAFETY: the caller's promise.
        unsafe { copy(&text, room, len) }
    })
}

/// Most connections of a shard in the statistics.
const MOST_PEERS: usize = 64;

/// A call that another server took.
#[cold]
fn another() -> Failure {
    Failure::argument("the call is another server's")
}

/// A server or client that nobody polls.
#[cold]
fn has_threads() -> Failure {
    Failure::argument("the handle has a thread that polls it: rpcrdma_local_server and rpcrdma_local_client have none")
}
