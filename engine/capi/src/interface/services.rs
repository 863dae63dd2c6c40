#![expect(unsafe_code, reason = "functions of C")]
//! Tables of procedures.

use std::ffi::{c_int, c_void};

use crate::failure::entry;
use crate::handle::{hold, lend};
use crate::peers::rpcrdma_peer_hook;
use crate::services::{Program, Table, rpcrdma_procedure, rpcrdma_task};
use crate::types::rpcrdma_services;

/// Services without procedures. `rpcrdma_free` ends them.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_services_new() -> *mut rpcrdma_services {
    entry("rpcrdma_services_new", || Ok(hold(Table::default())))
}

/// Adds the procedures of a program's version. `size` is `sizeof *table`. The table is copied. Procedure 0 is answered
/// without results if no table has it.
///
/// Returns 0; -EEXIST for a procedure that was added before; -EINVAL for an entry that no server can have, or for no
/// entry; -EBUSY for a `reads_into` with parts (`rpcrdma_arena_part`), -EBADF for one that is no arena. The text names
/// procedure, program, version and cause. The procedures before it are added.
///
/// # Safety
/// `services` and arenas as for `rpcrdma_free`; `table` has `count` entries, whose functions may be called with their
/// contexts on any thread.
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
        // SAFETY: the caller's promise.
        let mut services = unsafe { lend(services) }?;
        let program = Program { program, version };
        // SAFETY: the caller's promise.
        let procedures =
            unsafe { crate::arguments::table(table, count, size) }.map_err(|failure| failure.of(program))?;
        procedures.iter().try_for_each(|procedure| services.add(program, procedure)).map(|()| 0)
    })
}

/// Gives each shard of a server a task: `poll` runs in each turn, on the shard's thread.
///
/// It submits I/O, checks for completions, and answers deferred calls, whose replies go out in the same turn. It does
/// not block. A shard that sleeps wakes when the descriptor is readable that `descriptor` returns, such as of an
/// io_uring or an eventfd; -1 or NULL: the task has none. `descriptor` is called on the shard's thread, too, after a
/// last `poll` before each sleep. The descriptor stays open while the server lives. The shard ignores a closed
/// descriptor, and that of a file or directory, and the log says so. A server with a task has no workers. A client's
/// task does not run.
///
/// Returns 0, or -EINVAL if `poll` is NULL. A second call replaces the task.
///
/// # Safety
/// As for `rpcrdma_services_add`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_services_task(
    services: *mut rpcrdma_services,
    poll: rpcrdma_task,
    descriptor: rpcrdma_task,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_services_task", || {
        // SAFETY: the caller's promise.
        let mut services = unsafe { lend(services) }?;
        services.set_task(poll, descriptor, context).map(|()| 0)
    })
}

/// Tells `hook` of the connections of a server's clients: an application frees then what it has of a client.
///
/// Returns 0, or -EINVAL if it is NULL. A second call replaces it. That of a client (`rpcrdma_config_callbacks`) is
/// ignored.
///
/// # Safety
/// As for `rpcrdma_services_add`, with `hook` and `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_services_peers(
    services: *mut rpcrdma_services,
    hook: rpcrdma_peer_hook,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_services_peers", || {
        // SAFETY: the caller's promise.
        let mut services = unsafe { lend(services) }?;
        services.set_peers(hook, context).map(|()| 0)
    })
}
