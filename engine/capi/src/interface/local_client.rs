#![expect(unsafe_code, reason = "functions of C")]
//! Clients that their thread polls.

use std::ffi::{c_char, c_int, c_void};

use rpcrdma::client::{CallId, ClientConfig, ConnectError, Done};
use rpcrdma::{Address, LocalClient};
use rustix::io::Errno;

use crate::arguments::store;
use crate::ended::Ended;
use crate::failure::{Failure, entry};
use crate::handle::{Lent, during, lend, lend_again};
use crate::interface::knobs;
use crate::interface::threads::hold_here;
use crate::polled::Polled;
use crate::process;
use crate::request::{self, rpcrdma_request};
use crate::types::*;

/// The end of a call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_completion {
    /// Bytes that this version of the library has written. A program that may run with an earlier version than it was
    /// built with compares it with `sizeof(rpcrdma_completion)`: later versions have more fields at the end.
    pub size: usize,
    /// Of the request.
    pub token: u64,
    /// The inline results, in place. NULL for a call that has failed.
    pub results: *const c_void,
    /// Their bytes.
    pub results_len: usize,
    /// The reply, which holds the buffers of chunks: take them (`rpcrdma_reply_take_read_chunk`) for the next call.
    pub reply: *mut rpcrdma_reply,
    /// 0, or negative, as `rpcrdma_client_call` returns it.
    pub error: c_int,
}

/// Gets the end of a call. `completion`, its results and its reply are valid until the function returns, or
/// `rpcrdma_reply_keep`. For a failed call, `rpcrdma_error` has its text here until another function fails.
///
/// The function may start calls, and end the client. If it polls this client, the ends of calls wait until it returns.
/// No exception of C++ may leave it, nor pthread_exit: the process ends. Nor may longjmp: the client would report no
/// more.
pub type rpcrdma_done =
    Option<unsafe extern "C-unwind" fn(context: *mut c_void, completion: *const rpcrdma_completion)>;

/// One that is not NULL.
type Reports = unsafe extern "C-unwind" fn(context: *mut c_void, completion: *const rpcrdma_completion);

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
    let config = unsafe { knobs(config, |knobs| knobs.local_client(program, version)) }?;
    Ok(hold_here(Polled::new(connect(&address, config)?)))
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
/// The first connect is tried once. If it fails, this returns NULL, or `rpcrdma_local_client_is_established` -ENOTCONN.
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
/// `rpcrdma_local_client_poll` does not tell: it returns 0 then. Calls that are started while the client reconnects
/// (`connect.reconnect_attempts`) are sent once it has.
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

/// Starts a call; `rpcrdma_local_client_poll` reports its end, once.
///
/// Returns 0, or a negative code if it does not start: ENOBUFS (poll, and try again) and EMSGSIZE, for lack of memory
/// for the call, its chunks or its reply (the text names the knob); ENOMEM, EMFILE, ENFILE and EFBIG as for
/// `rpcrdma_alloc`; EINVAL; and ENOTCONN for a Read chunk that it would copy. The poll reports no end of such a call,
/// and the buffers of its chunks stay with the caller. `xid`, unless it is NULL, gets the call's number, for
/// `rpcrdma_local_client_cancel`, or 0 if it has ended already.
///
/// The poll reports other causes, and this function returns 0: ENOTCONN, EAGAIN (`limits.max_calls`), and what a call
/// meets that waits for a reconnect. The buffers are in that reply.
///
/// # Safety
/// `client` and the buffers of `request` as for `rpcrdma_free`; its pointers have what it says; `xid` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_start(
    client: *mut rpcrdma_local_client,
    request: *const rpcrdma_request,
    xid: *mut u32,
) -> c_int {
    entry("rpcrdma_local_client_start", || {
        // SAFETY: the caller's promise.
        let mut local = unsafe { lend(client) }?;
        // SAFETY: the caller's promise.
        let call = unsafe { request::start(&mut local.client, request) }?;
        if call.is_none()
            && let Some(mut failed) = local.not_started()
        {
            // SAFETY: the caller's promise. The request was to start that call.
            unsafe { request::return_buffers(request, &mut failed.returned) };
            return Err(failed.error.into());
        }
        // SAFETY: the caller's promise.
        unsafe { store(xid, call.map_or(0, CallId::xid)) };
        Ok(0)
    })
}

/// Cancels a call: it ends with -ECANCELED, if it is still under way. The server may have run it.
///
/// Returns 0, also if there is no such call, or a negative code of the handle. The call keeps its credit, as after a
/// time-out.
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

/// Turns the client once, and passes each call that has ended to `done`. Never blocks. Calls that `done` starts, and
/// that end at once, are reported by the next poll. If `done` is NULL, ended calls are left to the next poll with a
/// function.
///
/// All functions of a poll together are the time between two polls: a loop polls at least 20 times a second.
///
/// Returns 1 if there was work or a call has ended, 0 if not, or a negative code of the handle.
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
        let mut local = unsafe { lend(client) }?;
        let busy = local.client.turn();
        let (Some(done), true) = (done, local.is_to_report()) else { return Ok(c_int::from(busy)) };
        local.begin_report();
        let id = local.id();
        // The client is free while a function runs, which may use it, or end it.
        match local.only_ended() {
            Some(ended) => {
                let number = local.number();
                drop(local);
                // SAFETY: the caller's promise.
                unsafe { report(number, ended, done, context) };
            }
            None => {
                let batch = local.ended();
                drop(local);
                // SAFETY: the caller's promise.
                unsafe { report_all(client, id, batch, done, context) };
            }
        }
        // SAFETY: it was a handle before.
        if let Some(mut local) = unsafe { lend_still(client, id) } {
            local.reported();
        }
        Ok(1)
    })
}

/// The client, if a function has not ended it. The next client may have the same handle.
///
/// # Safety
/// It was a handle before.
#[inline(always)]
unsafe fn lend_still<'a>(client: *mut rpcrdma_local_client, id: u64) -> Option<Lent<'a, rpcrdma_local_client>> {
    // SAFETY: the caller's promise.
    unsafe { lend_again(client) }.filter(|again| again.id() == id)
}

/// Passes the ends of calls to a function, until it ends the client.
///
/// # Safety
/// As for [`report`] and [`lend_still`].
#[inline(never)]
unsafe fn report_all(
    client: *mut rpcrdma_local_client,
    id: u64,
    mut batch: Vec<Done>,
    done: Reports,
    context: *mut c_void,
) {
    for ended in batch.drain(..) {
        // SAFETY: the caller's promise.
        let Some(local) = (unsafe { lend_still(client, id) }) else { return };
        let number = local.number();
        drop(local);
        // SAFETY: the caller's promise.
        unsafe { report(number, ended, done, context) };
    }
    // SAFETY: the caller's promise.
    if let Some(mut local) = unsafe { lend_still(client, id) } {
        local.reuse(batch);
    }
}

/// Passes the end of a call to a function.
///
/// # Safety
/// `done` may be called with `context`.
#[inline(always)]
pub(crate) unsafe fn report(number: u16, ended: Done, done: Reports, context: *mut c_void) {
    let token = ended.token;
    let (error, results) = match &ended.result {
        Ok(reply) => (0, reply.results()),
        Err(failed) => (Failure::from(failed.error).report(), &[][..]),
    };
    let results_len = results.len();
    let results = if error == 0 { results.as_ptr().cast() } else { std::ptr::null() };
    let pass = |reply| {
        let size = size_of::<rpcrdma_completion>();
        let completion = rpcrdma_completion { size, token, results, results_len, reply, error };
        // SAFETY: the caller's promise.
        unsafe { done(context, &completion) }
    };
    during(number, Ended::new(ended.result), pass, |(), _| ());
}
