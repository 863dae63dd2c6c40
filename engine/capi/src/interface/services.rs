#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of services.

use std::ffi::{c_int, c_void};

use crate::failure::entry;
use crate::handle::{lend, new_handle};
use crate::peers::rpcrdma_peer_hook;
use crate::services::{ProgramVersion, ServiceTable, rpcrdma_procedure, rpcrdma_task};
use crate::types::rpcrdma_services;

/// Creates services without procedures.
///
/// # Ownership
/// The caller frees the services (`rpcrdma_free`).
///
/// # Threads
/// Any thread.
///
/// # Returns
/// The services, or NULL after a failure.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_services_new() -> *mut rpcrdma_services {
    entry("rpcrdma_services_new", || Ok(new_handle(ServiceTable::default())))
}

/// Adds the procedures of a program's version.
///
/// Procedure 0 is answered without results if no table has it.
///
/// # Parameters
/// - `services`: the services.
/// - `program`, `version`: the program and its version.
/// - `table`: the procedures.
/// - `count`: number of entries.
/// - `size`: `sizeof *table`.
///
/// # Ownership
/// The table is copied. Its contexts stay the application's. An arena of `reads_into` is shared; the caller still frees
/// its handle.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// The text of a failure names procedure, program, version and cause. The procedures before the refused one are added.
/// - 0: all procedures are added.
/// - -EEXIST: the procedure was added before.
/// - -EINVAL: the entry is invalid, or the table has no entry.
/// - -EBUSY: `reads_into` has parts (`rpcrdma_arena_part`).
/// - -EBADF: `reads_into` is not an arena.
/// - a negative handle code.
///
/// # Safety
/// `services` and the arenas are NULL or came from this library; `table` has `count` entries, whose functions may be
/// called with their contexts on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_services_add(
    services: *mut rpcrdma_services,
    program: u32,
    version: u32,
    table: *const rpcrdma_procedure,
    count: usize,
    size: usize,
) -> c_int {
    entry("rpcrdma_services_add", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut services = unsafe { lend(services) }?;
        let program = ProgramVersion { program, version };
        // SAFETY: the caller guarantees it.
        let procedures =
            unsafe { crate::arguments::table(table, count, size) }.map_err(|failure| failure.with_subject(program))?;
        procedures.iter().try_for_each(|procedure| services.add(program, procedure)).map(|()| 0)
    })
}

/// Gives each shard of a server a task.
///
/// The task submits I/O, checks for completions, and answers deferred calls, whose replies are sent in the same turn. A
/// server with a task has no workers. A client's task does not run. A second call replaces the task.
///
/// # Parameters
/// - `services`: the services.
/// - `poll`: runs in each turn, and must not block.
/// - `descriptor`: returns a descriptor (such as an io_uring or an eventfd) that wakes a sleeping shard when it is
///   readable; -1 if there is none. The shard calls it before each sleep, after a last `poll`. NULL: the task has no
///   descriptor. The shard ignores a closed descriptor, and one of a file or directory, which the log then reports.
/// - `context`: first argument of both functions.
///
/// # Ownership
/// The descriptor is the application's, and stays open while the server lives.
///
/// # Threads
/// One thread at a time. `poll` and `descriptor` run on the shard's thread.
///
/// # Returns
/// - 0: the task is set.
/// - -EINVAL: `poll` is NULL.
/// - a negative handle code.
///
/// # Safety
/// `services` is NULL or came from this library; `poll` and `descriptor` may be called with `context` on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_services_task(
    services: *mut rpcrdma_services,
    poll: rpcrdma_task,
    descriptor: rpcrdma_task,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_services_task", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut services = unsafe { lend(services) }?;
        services.set_task(poll, descriptor, context).map(|()| 0)
    })
}

/// Sets a hook that reports the connections of a server's clients.
///
/// In the hook, an application can free its state of a client. A second call replaces the hook. The hook of a client's
/// services (`rpcrdma_config_callbacks`) is ignored.
///
/// # Parameters
/// - `services`: the services.
/// - `hook`: the hook.
/// - `context`: first argument of `hook`.
///
/// # Ownership
/// `context` stays the application's.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// - 0: the hook is set.
/// - -EINVAL: `hook` is NULL.
/// - a negative handle code.
///
/// # Safety
/// `services` is NULL or came from this library; `hook` may be called with `context` on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_services_peers(
    services: *mut rpcrdma_services,
    hook: rpcrdma_peer_hook,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_services_peers", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut services = unsafe { lend(services) }?;
        services.set_peers(hook, context).map(|()| 0)
    })
}
