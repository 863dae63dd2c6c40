#![expect(unsafe_code, reason = "functions of C")]
//! Configuration by name.

use std::ffi::{c_char, c_int};
use std::path::Path;
use std::sync::Arc;

use crate::arguments::text;
use crate::config::Knobs;
use crate::failure::entry;
use crate::handle::{hold, lend, share};
use crate::types::{rpcrdma_arena, rpcrdma_config, rpcrdma_services};

/// A configuration with the defaults of all knobs. `rpcrdma_free` ends it.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_config_new() -> *mut rpcrdma_config {
    entry("rpcrdma_config_new", || Ok(hold(Knobs::default())))
}

/// Sets a knob to the value that `value` says, as in a TOML file or behind `--set`.
///
/// `name` is `group.knob`, such as `memory.receives`, or a knob that one group has, such as `credits`. `tuning.md` has
/// all. Values are as there: `64`, `"30s"`, `[[65536, 32], [1048576, 8]]` for `memory.bulk_buffers`. Beside those,
/// there are `server.shards`, `server.cores` (`0,2` or `0-3`), `server.workers` (threads), `server.stats` (a socket for
/// `rpcrdma top`), `client.auth_sys` (`UID:GID:GID,…`, the credential of all calls) and `wire.host_key`. A knob that is
/// set again has its last value. `memory.budget` determines receives and all buffers that are not set.
///
/// Each call checks the knob, and those that depend on it: set `memory.receives` before a `limits.credits` that needs
/// it. It takes some microseconds. A file of `rpcrdma_config_load` is checked at its end. A value that no host can have
/// is refused. What depends on the host, such as the number of its cores, is checked at the start. A client has smaller
/// defaults, such as 1024 receives: its connect checks with those, and may fail.
///
/// `wire.host_key` (`wire.host_auth` in Rust) is `ID:KEY`, the key in hexadecimal digits (`openssl rand -hex 32`). Both
/// ends need the same: peers without it are refused, and so is version 1. Such a client's connect fails with
/// EKEYREJECTED. A client of version 1 connects, and its calls end with -EPROTO: they were not executed, and a retry
/// fails in the same way. The code is not EKEYREJECTED, because the server names only its versions: calls to a server
/// whose `wire.version_1` is false end with the same error. ID names the key, not the host: `rpcrdma_call_peer` says
/// it. All hosts with one key have one name; that of `blockstore` is `blockstore`.
///
/// Returns 0, or -EINVAL: the text names the knob, the value, and what it takes, with the other knob if that is a
/// limit. For a name of an earlier version it gives the present one.
///
/// # Safety
/// `config` as for `rpcrdma_free`; `name` and `value` end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_set(
    config: *mut rpcrdma_config,
    name: *const c_char,
    value: *const c_char,
) -> c_int {
    entry("rpcrdma_config_set", || {
        // SAFETY: the caller's promise.
        let mut config = unsafe { lend(config) }?;
        // SAFETY: the caller's promise.
        let (name, value) = (unsafe { text("name", name) }?, unsafe { text("value", value) }?);
        config.set(name, value).map(|()| 0)
    })
}

/// Reads a TOML file of knobs, as programs do with `--config`: all that `rpcrdma_config_set` takes, in their groups.
/// A file has at most 4 MiB.
///
/// A file with `wire.host_key` is a secret: it is refused if a user other than root and that of this process may read
/// or replace it (`chmod 600 FILE`), as the programs of this project refuse the file of their key.
///
/// Returns 0; -ENOENT or another code of a file that cannot be read; -EINVAL, and the text names the file, and the
/// line, the knob or the limit. After a failure the configuration is as before.
///
/// # Safety
/// As for `rpcrdma_config_set`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_load(config: *mut rpcrdma_config, path: *const c_char) -> c_int {
    entry("rpcrdma_config_load", || {
        // SAFETY: the caller's promise.
        let mut config = unsafe { lend(config) }?;
        // SAFETY: the caller's promise.
        let path = unsafe { text("path", path) }?;
        config.load(Path::new(path)).map(|()| 0)
    })
}

/// Has a client take calls from its server, in the reverse direction (RFC 8167). The services are copied. Their
/// procedures run on the thread of the client's connection, those of `RPCRDMA_ON_WORKERS`, too.
///
/// Returns 0 or a negative code of a handle.
///
/// # Safety
/// As for `rpcrdma_config_set`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_callbacks(
    config: *mut rpcrdma_config,
    services: *mut rpcrdma_services,
) -> c_int {
    entry("rpcrdma_config_callbacks", || {
        // SAFETY: the caller's promise.
        let (mut config, services) = (unsafe { lend(config) }?, unsafe { lend(services) }?);
        config.callbacks = Some(Arc::new(services.services()));
        config.callback_arenas.clear();
        services.add_arenas(&mut config.callback_arenas);
        Ok(0)
    })
}

/// Registers the application's memory with the devices of servers and clients. An arena that it has already is ignored.
///
/// Returns 0 or a negative code of a handle.
///
/// # Safety
/// As for `rpcrdma_config_set`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_config_arena(config: *mut rpcrdma_config, arena: *mut rpcrdma_arena) -> c_int {
    entry("rpcrdma_config_arena", || {
        // SAFETY: the caller's promise.
        let (mut config, arena) = (unsafe { lend(config) }?, unsafe { share(arena) }?);
        if config.arenas.iter().all(|known| known.id() != arena.arena.id()) {
            config.arenas.push(arena.arena.clone());
        }
        Ok(0)
    })
}
