#![expect(unsafe_code, reason = "functions of C")]
//! Clients that their thread polls.

use std::ffi::{c_char, c_int, c_void};

use rpcrdma::client::{CallId, ClientConfig, ConnectError};
use rpcrdma::{Address, LocalClient};
use rustix::io::Errno;

use crate::arguments::store;
use crate::failure::{Failure, entry};
use crate::handle::{during, hold, lend, take};
use crate::interface::knobs;
use crate::polled::Polled;
use crate::process;
use crate::request::{Ended, Request};
use crate::types::*;

/// Gets the end of a call: `error` is 0, or negative, as `rpcrdma_client_call` returns it.
///
/// The reply is valid until the function returns, or `rpcrdma_reply_keep`, and holds the buffers of its chunks until
/// then: take them (`rpcrdma_reply_take`) for the next call. The function may start calls, and poll. No exception of
/// C++ may leave it: the process ends.
pub type rpcrdma_done =
    Option<unsafe extern "C" fn(context: *mut c_void, token: u64, error: c_int, reply: *mut rpcrdma_reply)>;

/// A client, connected by `connect`.
///
/// # Safety
/// As for `rpcrdma_client_connect`.
unsafe fn open(
    address: *const c_char,
    (program, version): (u32, u32),
    config: *mut rpcrdma_config,
    connect: impl FnOnce(&Address, ClientConfig) -> Result<LocalClient, ConnectError>,
) -> Result<*mut rpcrdma_local_client, Failure> {
    process::prepare();
    // SAFETY: the caller's promise.
    let address = unsafe { crate::arguments::address(address) }?;
    // SAFETY: the caller's promise.
    let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
    Ok(hold(Polled::new(connect(&address, config)?)))
}

/// Connects to a server, for calls of `program` and `version`; blocks until connected. The client has no thread:
/// nothing happens unless it is polled.
///
/// As for `rpcrdma_client_connect`.
///
/// # Safety
/// As for `rpcrdma_client_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_connect(
    address: *const c_char,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_local_client {
    entry("rpcrdma_local_client_connect", || {
        // SAFETY: the caller's promise.
        unsafe { open(address, (program, version), config, LocalClient::connect) }
    })
}

/// As `rpcrdma_local_client_connect`, but does not block: poll it until `rpcrdma_local_client_is_established` is not 0.
///
/// # Safety
/// As for `rpcrdma_client_connect`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_begin(
    address: *const c_char,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_local_client {
    entry("rpcrdma_local_client_begin", || {
        // SAFETY: the caller's promise.
        unsafe { open(address, (program, version), config, LocalClient::begin) }
    })
}

/// 1 once calls may be started, 0 while the client connects, -ENOTCONN if its connection has ended: the text says why.
///
/// # Safety
/// `client` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_is_established(client: *mut rpcrdma_local_client) -> c_int {
    entry("rpcrdma_local_client_is_established", || {
        // SAFETY: the caller's promise.
        let local = unsafe { lend(client) }?;
        match local.client.close_reason(local.connection()) {
            Some(reason) => Err(Failure::new(Errno::NOTCONN, reason)),
            None => Ok(c_int::from(local.client.is_established(local.connection()))),
        }
    })
}

/// A call in the memory that it is sent from, so that its arguments are not copied: `args` gets room for `len` bytes,
/// which are zero. `rpcrdma_request_new` makes one that copies.
///
/// NULL after a failure: ENOBUFS (poll, and try again), EMSGSIZE.
///
/// # Safety
/// `client` as for `rpcrdma_free`; `args` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_request(
    client: *mut rpcrdma_local_client,
    procedure: u32,
    len: usize,
    args: *mut *mut c_void,
) -> *mut rpcrdma_request {
    entry("rpcrdma_local_client_request", || {
        // SAFETY: the caller's promise.
        let mut local = unsafe { lend(client) }?;
        let mut call = local.client.prepare(procedure, len)?;
        // SAFETY: the caller's promise.
        unsafe { store(args, call.args_mut().as_mut_ptr().cast()) };
        Ok(local.requests.hold(Request::new(call)))
    })
}

/// Starts a call; `rpcrdma_local_client_poll` reports its end with `token`, once. The request ends, also after a
/// failure.
///
/// Returns 0; `xid`, unless it is NULL, gets the call's number, for `rpcrdma_local_client_cancel`, or 0 if it has ended
/// already.
///
/// # Safety
/// `client` and `request` as for `rpcrdma_free`; `xid` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_start(
    client: *mut rpcrdma_local_client,
    request: *mut rpcrdma_request,
    token: u64,
    xid: *mut u32,
) -> c_int {
    entry("rpcrdma_local_client_start", || {
        // SAFETY: the caller's promise.
        let mut local = match unsafe { lend(client) } {
            Ok(local) => local,
            Err(failure) => {
                // SAFETY: the caller's promise. It ends in any case.
                drop(unsafe { take(request) });
                return Err(failure);
            }
        };
        // SAFETY: the caller's promise.
        let call = unsafe { local.requests.take(request) }?.into_call()?;
        let connection = local.connection();
        let call = local.client.start(connection, call, token);
        // SAFETY: the caller's promise.
        unsafe { store(xid, call.map_or(0, CallId::xid)) };
        Ok(0)
    })
}

/// Cancels a call: it ends with -ECANCELED, if it is still under way. The server may have run it.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// `client` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_cancel(client: *mut rpcrdma_local_client, xid: u32) -> c_int {
    entry("rpcrdma_local_client_cancel", || {
        // SAFETY: the caller's promise.
        unsafe { lend(client) }?.cancel(CallId::of_xid(xid));
        Ok(0)
    })
}

/// Turns the client once, and passes each call that has ended to `done`. Never blocks.
///
/// Returns 1 if there was work, 0 if there was none, or a negative code.
///
/// # Safety
/// `client` as for `rpcrdma_free`; `done` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_poll(
    client: *mut rpcrdma_local_client,
    done: rpcrdma_done,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_local_client_poll", || {
        // SAFETY: the caller's promise.
        let busy = unsafe { lend(client) }?.turn();
        // The client is free while a function runs, which may use it.
        loop {
            // SAFETY: the caller's promise.
            let Some(ended) = unsafe { lend(client) }?.next() else { break };
            let Some(done) = done else { continue };
            let (token, ended) = (ended.token, Ended::new(ended.result));
            let error = ended.code();
            // SAFETY: the caller's promise.
            during(ended, |reply| unsafe { done(context, token, error, reply) });
        }
        Ok(c_int::from(busy))
    })
}
