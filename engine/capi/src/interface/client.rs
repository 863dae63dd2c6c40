#![expect(unsafe_code, reason = "functions of C")]
//! Clients whose calls block.

use std::ffi::{c_char, c_int, c_void};

use rpcrdma::Client;

use crate::any::{Any, any};
use crate::arguments::{copy, store};
use crate::ended::Ended;
use crate::failure::entry;
use crate::handle::{foreign, hold, lend};
use crate::interface::knobs;
use crate::process;
use crate::request::{self, rpcrdma_request};
use crate::types::*;

/// Connects to a server, for calls of `program` and `version`; blocks. The client has a thread of its own.
///
/// `address` is `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`. `config` may be NULL. NULL after a failure:
///
/// - ECONNREFUSED: nobody listens at the address, there is no such host, or the server takes no more connections;
/// - ETIMEDOUT: the server did not answer in time (the text names the knob);
/// - EAGAIN: the server has no receives left for one more connection: try again later, or raise its `memory.receives`;
/// - ECONNRESET: the server closed the connection before it was established;
/// - EPROTO: the peer broke the protocol;
/// - EINVAL: an argument or a knob;
/// - EADDRNOTAVAIL, ENOMEM, ENODEV and EIO as for `rpcrdma_server_start`.
///
/// # Safety
/// `address` ends with a zero byte; `config` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_connect(
    address: *const c_char,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_client {
    entry("rpcrdma_client_connect", || {
        process::prepare();
        // SAFETY: the caller's promise.
        let address = unsafe { crate::arguments::address(address) }?;
        // SAFETY: the caller's promise.
        let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
        Ok(hold(Client::connect(&address, config)?))
    })
}

/// A handle of the same connection for another thread, or NULL. The connection closes when the last one is freed.
///
/// # Safety
/// `client` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_share(client: *mut rpcrdma_client) -> *mut rpcrdma_client {
    entry("rpcrdma_client_share", || {
        // SAFETY: the caller's promise.
        let client = unsafe { lend(client) }?;
        Ok(hold(client.clone()))
    })
}

/// Makes a call, and blocks until its end.
///
/// Returns 0 or a negative code: ETIMEDOUT, ECONNRESET (the connection was lost), ENOTCONN, EAGAIN
/// (`limits.max_calls`), ENOBUFS and EMSGSIZE (a knob that the text names), EREMOTEIO (the server refused it:
/// `rpcrdma_reply_status`), EACCES (it refused the credential), EBUSY (it drains, or has no memory), EPROTO (a
/// malformed reply or another transport error), EINVAL.
///
/// A server that answers EBUSY has not run the call, unless the reply itself found no memory: try again later. EBUSY
/// without a reply: another thread uses `client` now.
///
/// `*reply` is the reply if the call has started, also if it failed then, and else NULL. `rpcrdma_free` ends it.
/// `reply` may be NULL.
///
/// # Safety
/// As for `rpcrdma_local_client_start`; `reply` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_call(
    client: *mut rpcrdma_client,
    request: *const rpcrdma_request,
    reply: *mut *mut rpcrdma_reply,
) -> c_int {
    entry("rpcrdma_client_call", || {
        // SAFETY: the caller's promise.
        unsafe { store(reply, std::ptr::null_mut()) };
        // SAFETY: the caller's promise.
        let mut client = unsafe { lend(client) }?;
        // SAFETY: the caller's promise.
        let ended = Ended::new(unsafe { request::start(&mut *client, request) }?);
        let code = ended.code();
        if !reply.is_null() {
            // SAFETY: the caller's promise.
            unsafe { store(reply, hold(ended)) };
        }
        Ok(code)
    })
}

/// Writes to `room` why a client's connection has closed, as text with a zero byte, of at most `len` bytes.
///
/// `client` is a `rpcrdma_client` or a `rpcrdma_local_client`. Returns the length of the whole; 0 while it is open.
///
/// # Safety
/// `client` as for `rpcrdma_free`; `room` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_close_reason(client: *mut c_void, room: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_close_reason", || {
        // SAFETY: the caller's promise.
        let reason = match unsafe { any(client) }? {
            Any::Client(client) => client.close_reason().map(ToString::to_string),
            Any::LocalClient(local) => local.client.close_reason(local.connection()).map(ToString::to_string),
            Any::Server(_) | Any::LocalServer(_) => return Err(foreign()),
        };
        // SAFETY: the caller's promise.
        unsafe { copy(&reason.unwrap_or_default(), room, len) }
    })
}
