#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of configurations.

use std::ffi::{c_char, c_int};
use std::path::Path;
use std::sync::Arc;

use crate::arguments::text;
use crate::config::Knobs;
use crate::failure::entry;
use crate::handle::{lend, new_handle, share};
use crate::types::{rpcrdma_arena, rpcrdma_config, rpcrdma_services};

/// Creates a configuration with the defaults of all knobs.
///
/// # Ownership
/// The caller frees the configuration (`rpcrdma_free`).
///
/// # Threads
/// Any thread.
///
/// # Returns
/// The configuration, or NULL after a failure.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_config_new() -> *mut rpcrdma_config {
    entry("rpcrdma_config_new", || Ok(new_handle(Knobs::default())))
}

/// Sets a knob, as a TOML file or `--set` does.
///
/// A knob that is set again has its last value. `memory.budget` determines receives and all buffers that are not set.
///
/// Each call checks the knob, and those that depend on it: set `memory.receives` before a `limits.credits` that needs
/// it. A call takes some microseconds. A value that no host can have is refused. A value that depends on the host, such
/// as a core, is checked when a server or client starts. A client has smaller defaults, such as 1024 receives: its
/// connect checks the knobs with those defaults, and may fail.
///
/// `wire.host_key` (`wire.host_auth` in Rust) is `ID:KEY`, with the key in hexadecimal digits (`openssl rand -hex 32`).
/// Both ends need the same key: peers without it are refused, and so is protocol version 1. A key and
/// `wire.credit_mode` v1 contradict each other, so the one that is set later is refused.
///
/// The ID names the key, not the host, so all hosts with one key have the same name. `rpcrdma_call_peer` writes this
/// name. In `blockstore` it is always `blockstore`.
///
/// The connect of a client without the key fails with EKEYREJECTED. A client of version 1 connects, but its calls end
/// with -EPROTO, because the server tells it only the supported versions, as if `wire.version_1` were false. Such calls
/// were not executed, and a retry fails in the same way.
///
/// A server creates the socket file of `server.stats` when it starts, and removes it when it ends. It replaces the
/// socket of a server that has crashed. It never replaces or removes any other file: with such a file at the path, its
/// start fails with EADDRNOTAVAIL.
///
/// # Parameters
/// - `config`: the configuration.
/// - `name`: `group.knob`, such as `memory.receives`, or the knob alone if one group has it, such as `credits`.
///   `tuning.md` lists all knobs. The C interface also has `server.shards`, `server.cores` (`0,2` or `0-3`),
///   `server.workers` (threads), `server.stats` (path of a socket for `rpcrdma top`, such as `/run/NAME/stats`),
///   `client.auth_sys` (`UID:GID:GID,…`, the credential of all calls) and `wire.host_key`.
/// - `value`: the value, written as in `tuning.md`: `64`, `"30s"`, or `[[65536, 32], [1048576, 8]]` for
///   `memory.bulk_buffers`.
///
/// # Ownership
/// The texts are copied.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// - 0: the knob is set.
/// - -EINVAL: the text begins with the knob, and names its value, the valid values, and the other knob if one sets the
///   limit. For a name of an earlier version, the text has the current name.
/// - a negative handle code.
///
/// # Safety
/// `config` is NULL or came from this library; `name` and `value` are NULL, or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_set(
    config: *mut rpcrdma_config,
    name: *const c_char,
    value: *const c_char,
) -> c_int {
    entry("rpcrdma_config_set", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut config = unsafe { lend(config) }?;
        // SAFETY: the caller passes NULL or a text that ends with a zero byte.
        let (name, value) = (unsafe { text("name", name) }?, unsafe { text("value", value) }?);
        config.set(name, value).map(|()| 0)
    })
}

/// Reads knobs from a TOML file, as programs do with `--config`.
///
/// The file may set all knobs of `rpcrdma_config_set`, in their groups, and has at most 4 MiB. The values are checked
/// together after the whole file was read. A file with `wire.host_key` is a secret: it is refused if any user except
/// root and the process's own user may read or replace it (`chmod 600 FILE`), as the programs of this project refuse
/// the file of their key.
///
/// # Parameters
/// - `config`: the configuration.
/// - `path`: path of the file.
///
/// # Ownership
/// The path is copied.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// After a failure the configuration is as before.
/// - 0: the knobs of the file are set.
/// - -ENOENT or another code of the system: the file cannot be read.
/// - -EINVAL: the text names the file, and the line, the knob or the limit.
/// - a negative handle code.
///
/// # Safety
/// `config` is NULL or came from this library; `path` is NULL, or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_load(config: *mut rpcrdma_config, path: *const c_char) -> c_int {
    entry("rpcrdma_config_load", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut config = unsafe { lend(config) }?;
        // SAFETY: the caller passes NULL or a text that ends with a zero byte.
        let path = unsafe { text("path", path) }?;
        config.load(Path::new(path)).map(|()| 0)
    })
}

/// Lets a client take calls from its server.
///
/// This is the reverse direction of RFC 8167. The procedures run on the thread of the client's connection, including
/// those with `RPCRDMA_ON_WORKERS`.
///
/// # Parameters
/// - `config`: the configuration of the client.
/// - `services`: the procedures.
///
/// # Ownership
/// The services are copied; the caller still frees its handle.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// - 0: clients of this configuration take calls.
/// - a negative handle code.
///
/// # Safety
/// `config` and `services` are NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_callbacks(
    config: *mut rpcrdma_config,
    services: *mut rpcrdma_services,
) -> c_int {
    entry("rpcrdma_config_callbacks", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let (mut config, services) = (unsafe { lend(config) }?, unsafe { lend(services) }?);
        config.callbacks = Some(Arc::new(services.services()));
        config.callback_arenas.clear();
        services.add_arenas(&mut config.callback_arenas);
        Ok(0)
    })
}

/// Registers the application's memory with the devices of servers and clients.
///
/// An arena that the configuration has already is ignored.
///
/// # Parameters
/// - `config`: the configuration.
/// - `arena`: the memory.
///
/// # Ownership
/// The servers and clients of the configuration share the arena; the caller still frees its handle.
///
/// # Threads
/// One thread at a time for `config`.
///
/// # Returns
/// - 0: the configuration has the arena.
/// - a negative handle code.
///
/// # Safety
/// `config` and `arena` are NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_arena(config: *mut rpcrdma_config, arena: *mut rpcrdma_arena) -> c_int {
    entry("rpcrdma_config_arena", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let (mut config, arena) = (unsafe { lend(config) }?, unsafe { share(arena) }?);
        if config.arenas.iter().all(|known| known.id() != arena.arena.id()) {
            config.arenas.push(arena.arena.clone());
        }
        Ok(0)
    })
}
