#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions for servers with threads, for polled servers, and for polled servers and clients alike.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rpcrdma::server::LocalServer;
use rpcrdma::{Address, Server};
use rustix::io::Errno;

use crate::any::{AnyEndpoint, lend_any};
use crate::arguments::{addresses, copy_text};
use crate::failure::{ApiFailure, entry};
use crate::handle::{lend, new_handle, share, take};
use crate::interface::general::check_may_end;
use crate::interface::knobs;
use crate::interface::threads::new_bound_handle;
use crate::polled::PolledServer;
use crate::process;
use crate::threaded_client::ThreadedClient;
use crate::threaded_server::ThreadedServer;
use crate::types::*;

/// Starts a server with threads of its own.
///
/// The function blocks for some milliseconds. Each shard is a thread, and serves one of the addresses. `server.shards`
/// is the number of shards, by default one for each address.
///
/// Calls may arrive before this function returns. A handler that needs the server's handle, to call back, waits for it
/// on a worker (`RPCRDMA_ON_WORKERS`), or defers the call.
///
/// # Parameters
/// - `address`: one or several addresses, separated by commas: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
///   The system chooses a port for `PORT` 0, but no function returns it.
/// - `services`: the procedures.
/// - `config`: the knobs, or NULL for the defaults.
///
/// # Ownership
/// The caller frees the server, by `rpcrdma_free` or `rpcrdma_server_drain`. Services and configuration may be freed
/// before the server.
///
/// # Threads
/// Any thread. No other thread uses `services` or `config` at the same time.
///
/// # Returns
/// The server, or NULL after a failure: the text names the system call, the limit and the remedy.
/// - EINVAL: an argument or a knob is invalid, such as a core or a NUMA node that this process may not use.
/// - EADDRINUSE: another server has the address, or `server.stats`; or `address` lists one address twice.
/// - EADDRNOTAVAIL: this host cannot serve the address, or the path of `server.stats` or `soft:` is not that of a socket.
/// - ENOENT: the directory of `server.stats` does not exist.
/// - ENOMEM: the server needs more memory than the host has left, or than the control group, RLIMIT_AS (`ulimit -v`),
///   RLIMIT_MEMLOCK (`ulimit -l`, for devices) or `vm.max_map_count` permits.
/// - EAGAIN: a thread exceeds RLIMIT_NPROC (`ulimit -u`), RLIMIT_AS (for its stack) or the limit of the control group.
/// - EFBIG: memory of the library, which the kernel treats as a file, exceeds RLIMIT_FSIZE (`ulimit -f`).
/// - EMFILE, ENFILE: the process has no descriptor left (RLIMIT_NOFILE, `ulimit -n`), or the host has none
///   (`fs.file-max`).
/// - ENOSPC: there are too many watched sockets (`fs.epoll.max_user_watches`) or objects of the device.
/// - ENODEV: the device lacks a capability, or there is no device.
/// - EIO: another system call failed.
/// - a handle code.
///
/// # Safety
/// `address` is NULL, or ends with a zero byte; `services` and `config` are NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_server_start(
    address: *const c_char,
    services: *mut rpcrdma_services,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_server {
    entry("rpcrdma_server_start", || {
        process::prepare();
        // SAFETY: the caller passes NULL or texts that end with a zero byte.
        let addresses = unsafe { addresses(address) }?;
        // SAFETY: the caller passes NULL or a handle of this library.
        let services = unsafe { lend(services) }?;
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut config = unsafe { knobs(config, |knobs| knobs.server(addresses.len(), &services)) }?;
        let (first, others) = addresses.split_first().ok_or_else(|| ApiFailure::argument("address is empty"))?;
        config.more_addresses = others.to_vec();
        services.add_arenas(&mut config.shard.memory.arenas);
        config.peers = services.peers();
        let server = match services.application() {
            Some(make) => Server::start_with(first, move |setup| Ok(make(setup)), &config),
            None => Server::start(first, services.services(), &config),
        };
        let server = server.map_err(|error| explain_repeated_address(&addresses, error.into()))?;
        Ok(new_handle(ThreadedServer::new(server)))
    })
}

/// Makes a client that calls back the caller of a call.
///
/// Its calls use the connection of `call` (RFC 8167). A handler on a shard must not block on such a call. Instead, it
/// uses `rpcrdma_client_start`, runs on workers (`RPCRDMA_ON_WORKERS`), or defers `call`, which another thread answers.
/// The function does not ask the peer whether it accepts calls. If the peer does not, the first call ends with
/// EOPNOTSUPP.
///
/// # Parameters
/// - `server`: the server.
/// - `call`: a call that was not answered.
/// - `program`, `version`: program of the calls, and its version.
/// - `config`: the knobs, or NULL for the defaults.
///
/// # Ownership
/// The caller frees the client (`rpcrdma_free`). The client may outlive the call.
///
/// # Threads
/// Any thread that may use `call`.
///
/// # Returns
/// The client, or NULL after a failure.
/// - EINVAL: the call is of another server, or a knob is invalid.
/// - EBADF, EBUSY: the handle code of `server`, `call` or `config`.
///
/// # Safety
/// The handles are NULL or came from this library; the call was not answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_server_call_back(
    server: *mut rpcrdma_server,
    call: *mut rpcrdma_call,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_client {
    entry("rpcrdma_server_call_back", || {
        // SAFETY: the caller guarantees it.
        let (server, call) = (unsafe { share(server) }?, unsafe { lend(call) }?);
        // SAFETY: the caller passes NULL or a handle of this library.
        let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
        let client = server.call_backs.client(call.info().caller(), config);
        Ok(new_handle(ThreadedClient::new(client.ok_or_else(call_of_other_server)?)))
    })
}

/// Stops a server gracefully, and frees it.
///
/// The server takes no new calls, and answers those under way. The function blocks for at most `milliseconds`: calls
/// have nine tenths of that time, or all but one second of it if that is more. Meanwhile, handlers may use the server,
/// and may call back the clients whose calls they have not answered yet.
///
/// After -ETIMEDOUT, handlers that still run return later, on the server's threads. After they have returned, the hook
/// of `rpcrdma_services_peers` is called for the ends of their connections, and the server releases arenas. Until then,
/// memory that these functions use must stay valid, their code, including this library, must stay loaded, and another
/// server cannot listen at the address (EADDRINUSE).
///
/// # Parameters
/// - `server`: the server.
/// - `milliseconds`: the maximum time of the drain. With 0, calls are cut off immediately.
///
/// # Ownership
/// The server ends, and is freed, unless the result is -EDEADLK.
///
/// # Threads
/// Any thread, except in a handler or task of the server.
///
/// # Returns
/// - 0: no call and no connection was cut off.
/// - -ETIMEDOUT: calls, or connections that clients kept open, were cut off, as with 0 milliseconds. The text names
///   them.
/// - -EDEADLK: a handler or task drains its own server.
/// - a negative handle code.
///
/// # Safety
/// `server` is NULL or came from this library, and nobody frees it at the same time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_server_drain(server: *mut rpcrdma_server, milliseconds: u32) -> c_int {
    entry("rpcrdma_server_drain", || {
        // SAFETY: the caller guarantees it.
        unsafe { check_may_end(server) }?;
        // SAFETY: the caller guarantees it.
        let running = unsafe { share(server) }?.take()?;
        let drained = running.drain(Duration::from_millis(milliseconds.into()));
        // SAFETY: the caller guarantees it. Handlers have used the handle until here.
        drop(unsafe { take(server) }?);
        drained.map(|_| 0).map_err(|left| ApiFailure::new(Errno::TIMEDOUT, left))
    })
}

/// Starts a server on one address that the calling thread polls.
///
/// The server has no threads except those of `server.workers`, and at times threads that unmap large chunk memory of
/// clients on this host, which may outlive the server by up to a second. The log does not report a handler that blocks
/// its thread, as it does for servers with threads ("shard was blocked").
///
/// # Parameters
/// - `address`: one address: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
/// - `services`: the procedures, without a task.
/// - `config`: the knobs, or NULL for the defaults.
///
/// # Ownership
/// The caller frees the server (`rpcrdma_free`). Services and configuration may be freed before it.
///
/// # Threads
/// Any thread, which polls the server from then on.
///
/// # Returns
/// The server, or NULL after a failure.
/// - EINVAL: an argument or a knob is invalid. `server.shards` above 1, `server.cores`, `server.stats` and `poll.core`
///   are for servers with threads, and so are services with a task.
/// - the other codes of `rpcrdma_server_start`.
///
/// # Safety
/// `address` is NULL, or ends with a zero byte; `services` and `config` are NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_start(
    address: *const c_char,
    services: *mut rpcrdma_services,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_local_server {
    entry("rpcrdma_local_server_start", || {
        process::prepare();
        // SAFETY: the caller passes NULL or texts that end with a zero byte.
        let addresses = unsafe { addresses(address) }?;
        let [address] = &addresses[..] else { return Err(ApiFailure::argument("a polled server has one address")) };
        // SAFETY: the caller passes NULL or a handle of this library.
        let services = unsafe { lend(services) }?;
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut config = unsafe { knobs(config, |knobs| knobs.local_server(&services)) }?;
        services.add_arenas(&mut config.shard.memory.arenas);
        config.peers = services.peers();
        if services.has_task() {
            return Err(ApiFailure::argument(
                "the services have a task: a polled server's thread does that work itself",
            ));
        }
        Ok(new_bound_handle(PolledServer::new(LocalServer::start(address, services.services(), &config)?)))
    })
}

/// Makes a client that calls back a caller of a polled server.
///
/// Its calls use the connection of `call` (RFC 8167). The thread that polls the server uses `rpcrdma_client_start`, and
/// `rpcrdma_client_poll` after each poll of the server. Other threads may also use `rpcrdma_client_call`. The thread
/// that polls the server cannot make a call with Read chunks, because `rpcrdma_alloc` and a copy of
/// `rpcrdma_read_chunk::data` wait for a poll of the server (EDEADLK).
///
/// # Parameters
/// - `server`: the server.
/// - `call`: a deferred call. A handler of this server cannot use the function, because the server is in use (EBUSY).
/// - `program`, `version`: program of the calls, and its version.
/// - `config`: the knobs, or NULL for the defaults.
///
/// # Ownership
/// The caller frees the client (`rpcrdma_free`). The client may outlive the call, and also the server: its calls fail
/// then.
///
/// # Threads
/// The thread of the server. Any thread may use the client, one at a time.
///
/// # Returns
/// The client, or NULL after a failure.
/// - EPERM: the calling thread is not that of the server.
/// - EINVAL: the call is of another server, or a knob is invalid.
/// - EBADF, EBUSY: the handle code of `server`, `call` or `config`.
///
/// # Safety
/// The handles are NULL or came from this library; the call was not answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_call_back(
    server: *mut rpcrdma_local_server,
    call: *mut rpcrdma_call,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_client {
    entry("rpcrdma_local_server_call_back", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let (mut polled, call) = (unsafe { lend(server) }?, unsafe { lend(call) }?);
        // SAFETY: the caller passes NULL or a handle of this library.
        let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
        Ok(new_handle(polled.call_back(call.info().caller(), config).ok_or_else(call_of_other_server)?))
    })
}

/// Polls a server once, with bounded work.
///
/// The function never blocks.
///
/// # Parameters
/// - `server`: the server.
///
/// # Ownership
/// No memory changes hands.
///
/// # Threads
/// The thread of the server. Handlers run on it, within the poll.
///
/// # Returns
/// - 1: there was work.
/// - 0: there was none.
/// - a negative handle code.
///
/// # Safety
/// `server` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_poll(server: *mut rpcrdma_local_server) -> c_int {
    entry("rpcrdma_local_server_poll", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let busy = unsafe { lend(server) }?.server.poll();
        Ok(c_int::from(busy))
    })
}

/// Starts to drain a polled server, and returns whether it is drained.
///
/// The server takes no new calls, and answers those under way while it is polled. Until it is drained, it may call back
/// the clients that wait for their answers. A drain has no time limit: `rpcrdma_free` ends the server immediately.
///
/// # Parameters
/// - `server`: the server.
///
/// # Ownership
/// The caller still frees the server.
///
/// # Threads
/// The thread of the server.
///
/// # Returns
/// - 1: the server is drained.
/// - 0: the server is not drained yet.
/// - a negative handle code.
///
/// # Safety
/// `server` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_server_drain(server: *mut rpcrdma_local_server) -> c_int {
    entry("rpcrdma_local_server_drain", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut polled = unsafe { lend(server) }?;
        polled.server.begin_drain();
        Ok(c_int::from(polled.server.is_drained()))
    })
}

/// Returns the descriptor of a polled server or client, for epoll.
///
/// It is readable while the handle is armed (`rpcrdma_arm`) and has work.
///
/// # Parameters
/// - `handle`: a polled server or client.
///
/// # Ownership
/// The descriptor closes with the handle.
///
/// # Threads
/// The thread of the handle.
///
/// # Returns
/// - the descriptor.
/// - -EINVAL: the server or client has threads.
/// - a negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_fd(handle: *mut c_void) -> c_int {
    entry("rpcrdma_fd", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        match unsafe { lend_any(handle) }? {
            AnyEndpoint::LocalServer(polled) => Ok(polled.server.as_fd().as_raw_fd()),
            AnyEndpoint::LocalClient(local) => Ok(local.client.as_fd().as_raw_fd()),
            AnyEndpoint::Server(_) | AnyEndpoint::Client(_) => Err(has_threads()),
        }
    })
}

/// Prepares a polled server or client for a sleep in epoll.
///
/// Work that arrives after this call makes the descriptor readable. Call `rpcrdma_disarm` after each call of this
/// function, even if it returned -EAGAIN.
///
/// # Parameters
/// - `handle`: a polled server or client.
/// - `milliseconds`: the longest sleep; negative: the caller has no limit.
///
/// # Ownership
/// No memory changes hands.
///
/// # Threads
/// The thread of the handle.
///
/// # Returns
/// - the milliseconds to sleep, rounded up.
/// - -EAGAIN: there is work, or `milliseconds` is 0, so poll instead.
/// - -EINVAL: the server or client has threads.
/// - a negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_arm(handle: *mut c_void, milliseconds: c_int) -> c_int {
    entry("rpcrdma_arm", || {
        let longest = Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::from(u32::MAX)));
        // SAFETY: the caller passes NULL or a handle of this library.
        let sleep = match unsafe { lend_any(handle) }? {
            AnyEndpoint::LocalServer(mut polled) => polled.server.arm(longest),
            AnyEndpoint::LocalClient(mut local) => local.arm(longest),
            AnyEndpoint::Server(_) | AnyEndpoint::Client(_) => return Err(has_threads()),
        };
        let round_up = |sleep: Duration| c_int::try_from(sleep.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX);
        Ok(sleep.map_or(-Errno::AGAIN.raw_os_error(), round_up))
    })
}

/// Ends the preparation of `rpcrdma_arm`.
///
/// # Parameters
/// - `handle`: a polled server or client.
///
/// # Ownership
/// No memory changes hands.
///
/// # Threads
/// The thread of the handle.
///
/// # Returns
/// - 0: the handle is disarmed.
/// - -EINVAL: the server or client has threads.
/// - a negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_disarm(handle: *mut c_void) -> c_int {
    entry("rpcrdma_disarm", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        match unsafe { lend_any(handle) }? {
            AnyEndpoint::LocalServer(mut polled) => polled.server.disarm(),
            AnyEndpoint::LocalClient(mut local) => local.client.disarm(),
            AnyEndpoint::Server(_) | AnyEndpoint::Client(_) => return Err(has_threads()),
        }
        Ok(0)
    })
}

/// Writes the statistics of a server or client as JSON.
///
/// The text is an array with an object for each shard. `tuning.md` has the units of the fields, and what to do about
/// their values. `peers` lists at most 64 connections of each shard of a server, with about 1 KiB for each. The
/// function blocks until each shard has answered, so a handler or task that blocks a shard delays it.
///
/// # Parameters
/// - `handle`: a server or client of any kind.
/// - `buf`: gets the text, cut off to fit into `len` bytes with its final zero byte. NULL: only the length is
///   returned.
/// - `len`: bytes of `buf`. 0: only the length is returned.
///
/// # Ownership
/// `buf` stays the caller's.
///
/// # Threads
/// Any thread for a server with threads, one thread at a time for a client, and the thread of a polled server or
/// client.
///
/// # Returns
/// - the length of the whole text. A polled server that is drained still has its statistics. For a client that calls back
///   on a connection of a server that was freed, the array is empty.
/// - -EBADF: the server was freed or drained, or another thread is freeing or draining it.
/// - -EDEADLK: the caller is a handler or task of the same server, or the thread that runs the connection of a client,
///   and would wait for itself. A handler on a worker (`RPCRDMA_ON_WORKERS`) may call the function.
/// - -EBUSY: a handler of a polled server calls the function. Call it between polls instead.
/// - a negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library; `buf` is NULL, or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_stats(handle: *mut c_void, buf: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_stats", || {
        let deadlock = || ApiFailure::new(Errno::DEADLK, "a shard's handlers and tasks would wait for their own shard");
        // SAFETY: the caller passes NULL or a handle of this library.
        let stats = match unsafe { lend_any(handle) }? {
            AnyEndpoint::Server(server) if server.is_on_own_shard() => return Err(deadlock()),
            AnyEndpoint::Client(client) if client.is_on_own_shard() => return Err(deadlock()),
            AnyEndpoint::Server(server) => server.stats_with_connections(MAX_PEERS),
            AnyEndpoint::LocalServer(mut polled) => vec![polled.server.stats_with_connections(MAX_PEERS)],
            AnyEndpoint::Client(mut client) => client.client().stats().into_iter().collect(),
            AnyEndpoint::LocalClient(mut local) => vec![local.client.stats()],
        };
        let text = serde_json::to_string(&stats).map_err(|error| ApiFailure::new(Errno::IO, error))?;
        // SAFETY: the caller passes NULL or `len` writable bytes.
        unsafe { copy_text(&text, buf, len) }
    })
}

/// Maximum connections of a shard in the statistics.
const MAX_PEERS: usize = 64;

/// Explains the failure of a start whose list of addresses repeats an address.
#[cold]
fn explain_repeated_address(addresses: &[Address], failure: ApiFailure) -> ApiFailure {
    let repeated = addresses.iter().enumerate().find(|(index, address)| addresses[..*index].contains(address));
    match repeated {
        Some((_, address)) if failure.code() == Errno::ADDRINUSE => ApiFailure::new(
            Errno::ADDRINUSE,
            format_args!(
                "address {address} is listed twice: list it once (server.shards sets the shards that share it)"
            ),
        ),
        _ => failure,
    }
}

/// The failure of a function that got a call of another server.
#[cold]
fn call_of_other_server() -> ApiFailure {
    ApiFailure::argument("the call is of another server")
}

/// The failure of a function for polled handles that got a handle with a thread.
#[cold]
fn has_threads() -> ApiFailure {
    ApiFailure::argument(
        "the handle has a thread that polls it: rpcrdma_local_server and rpcrdma_local_client have none",
    )
}
