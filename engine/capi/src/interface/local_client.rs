#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of clients that the application polls.

use std::ffi::{c_char, c_int, c_void};

use rpcrdma::client::{CallId, ClientConfig, CompletedCall, ConnectError};
use rpcrdma::{Address, LocalClient};
use rustix::io::Errno;

use crate::arguments::store;
use crate::ended_call::EndedCall;
use crate::failure::{ApiFailure, connect_error_code, entry};
use crate::handle::{LentHandle, lend, lend_if_live, with_temporary_handle};
use crate::interface::knobs;
use crate::interface::threads::new_bound_handle;
use crate::polled::PolledClient;
use crate::process;
use crate::request::{self, rpcrdma_request};
use crate::types::*;

/// A completed call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_completion {
    /// Bytes that this version of the library has written.
    ///
    /// A program that may run with an earlier version than it was built with compares this number with
    /// `sizeof(rpcrdma_completion)`, because later versions have more fields at the end.
    pub size: usize,
    /// `token` of the request.
    pub token: u64,
    /// The inline results, in place. NULL for a call that has failed.
    pub results: *const c_void,
    /// Bytes at `results`.
    pub results_len: usize,
    /// The reply. It holds the buffers of the chunks: take them (`rpcrdma_reply_take_read_chunk`) for the next call.
    pub reply: *mut rpcrdma_reply,
    /// 0, or a negative code, as `rpcrdma_client_call` returns it.
    pub error: c_int,
}

/// Reports a completed call.
///
/// The function may start calls, and free the client. If it polls this client, completions that this poll finds are
/// reported after the function returns.
/// For a failed call, `rpcrdma_error` has its text here until another function fails. No exception of C++ may leave the
/// function, nor pthread_exit: the process would end. Nor may longjmp leave it: the client would report no more calls.
///
/// # Parameters
/// - `context`: the argument of the poll.
/// - `completion`: the completed call.
///
/// # Ownership
/// `completion`, its results and its reply are valid until the function returns. `rpcrdma_reply_keep` keeps the reply
/// and its results longer.
///
/// # Threads
/// The function runs on the thread that polls the client, within the poll.
pub type rpcrdma_done =
    Option<unsafe extern "C-unwind" fn(context: *mut c_void, completion: *const rpcrdma_completion)>;

/// A [`rpcrdma_done`] that is not NULL.
type DoneFunction = unsafe extern "C-unwind" fn(context: *mut c_void, completion: *const rpcrdma_completion);

/// Makes a client that `connect` connects.
///
/// # Safety
/// See `rpcrdma_client_connect`.
unsafe fn connect_with(
    address: *const c_char,
    (program, version): (u32, u32),
    config: *mut rpcrdma_config,
    connect: impl FnOnce(&Address, ClientConfig) -> Result<LocalClient, ConnectError>,
) -> Result<*mut rpcrdma_local_client, ApiFailure> {
    process::prepare();
    // SAFETY: the caller passes NULL or a text that ends with a zero byte.
    let address = unsafe { crate::arguments::address(address) }?;
    // SAFETY: the caller passes NULL or a handle of this library.
    let config = unsafe { knobs(config, |knobs| knobs.local_client(program, version)) }?;
    Ok(new_bound_handle(PolledClient::new(connect(&address, config)?)))
}

/// Connects a polled client to a server, and blocks until connected.
///
/// The client has no thread: nothing happens unless it is polled.
///
/// # Parameters
/// - `address`: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
/// - `program`, `version`: program of the calls, and its version.
/// - `config`: the knobs, or NULL for the defaults.
///
/// # Ownership
/// The caller frees the client (`rpcrdma_free`). The configuration may be freed before it.
///
/// # Threads
/// Any thread, which polls the client from then on.
///
/// # Returns
/// The client, or NULL with a code of `rpcrdma_client_connect`.
///
/// # Safety
/// `address` is NULL, or ends with a zero byte; `config` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_connect(
    address: *const c_char,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_local_client {
    entry("rpcrdma_local_client_connect", || {
        // SAFETY: the caller guarantees it.
        unsafe { connect_with(address, (program, version), config, LocalClient::connect) }
    })
}

/// Begins to connect a polled client to a server, without blocking.
///
/// Poll the client until `rpcrdma_local_client_is_established` is not 0. The first connect is tried once. If it fails,
/// this function returns NULL, or `rpcrdma_local_client_is_established` returns the code. The connect ends after
/// `debug.handshake_timeout` (5 s); `connect.timeout` applies to functions that block.
///
/// # Parameters
/// - `address`: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
/// - `program`, `version`: program of the calls, and its version.
/// - `config`: the knobs, or NULL for the defaults.
///
/// # Ownership
/// The caller frees the client (`rpcrdma_free`). The configuration may be freed before it.
///
/// # Threads
/// Any thread, which polls the client from then on.
///
/// # Returns
/// The client, or NULL with a code of `rpcrdma_client_connect`.
///
/// # Safety
/// `address` is NULL, or ends with a zero byte; `config` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_begin(
    address: *const c_char,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_local_client {
    entry("rpcrdma_local_client_begin", || {
        // SAFETY: the caller guarantees it.
        unsafe { connect_with(address, (program, version), config, LocalClient::begin) }
    })
}

/// Tells whether calls of a polled client may be started.
///
/// `rpcrdma_local_client_poll` does not tell, because it returns 0 if the connection has ended. Calls that are started
/// while the client reconnects (`connect.reconnect_attempts`) are sent once it has reconnected.
///
/// # Parameters
/// - `client`: the client.
///
/// # Ownership
/// No memory changes hands.
///
/// # Threads
/// The thread of the client.
///
/// # Returns
/// - 1: calls may be started.
/// - 0: the client is still connecting.
/// - -ENOTCONN: the connection was established, and has ended; the text says why.
/// - -ECONNREFUSED, -ETIMEDOUT or another code of `rpcrdma_client_connect`: the connect has failed; the text says why.
/// - another negative handle code.
///
/// # Safety
/// `client` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_is_established(client: *mut rpcrdma_local_client) -> c_int {
    entry("rpcrdma_local_client_is_established", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let local = unsafe { lend(client) }?;
        match local.client.close_reason(local.connection()) {
            Some(reason) if local.was_established() => Err(ApiFailure::new(Errno::NOTCONN, reason)),
            Some(reason) => Err(ApiFailure::new(connect_error_code(reason), reason)),
            None => Ok(c_int::from(local.client.is_established(local.connection()))),
        }
    })
}

/// Starts a call; `rpcrdma_local_client_poll` reports its completion, once.
///
/// # Parameters
/// - `client`: the client.
/// - `request`: the call.
/// - `xid`: gets the number of the call, for `rpcrdma_local_client_cancel`, or 0 if the call has ended already. The
///   pointer may be NULL.
///
/// # Ownership
/// If the call starts, it has the buffers of its chunks, which its reply returns. If it does not start, they stay with
/// the caller, and the poll reports no completion.
///
/// # Threads
/// The thread of the client.
///
/// # Returns
/// - 0: the call has started. The poll reports other causes of failure, and the buffers are in that reply: ENOTCONN,
///   EAGAIN (`limits.max_calls`), and those of a call that waits for a reconnect.
/// - -ENOBUFS: there is no memory for the call, its chunks or its reply now (the text names the knob): poll, and try
///   again.
/// - -EMSGSIZE: there is never memory for the call, its chunks or its reply (the text names the knob).
/// - -ENOMEM, -EMFILE, -ENFILE, -EFBIG: the system refuses memory, as for `rpcrdma_alloc`.
/// - -EINVAL: the request is invalid.
/// - -ENOTCONN: there is no connection, which a Read chunk to be copied needs.
/// - another negative handle code.
///
/// # Safety
/// `client` and the buffers of `request` are NULL or came from this library; `request` is NULL, or points to `size`
/// readable bytes, and each of its arrays has its stated length; `xid` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_start(
    client: *mut rpcrdma_local_client,
    request: *const rpcrdma_request,
    xid: *mut u32,
) -> c_int {
    entry("rpcrdma_local_client_start", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut local = unsafe { lend(client) }?;
        // SAFETY: the caller passes NULL or a request whose arrays have their stated lengths.
        let call = unsafe { request::start(&mut local.client, request) }?;
        if call.is_none()
            && let Some(mut failed) = local.take_failed_start()
        {
            // SAFETY: the caller guarantees it. The call is of this request.
            unsafe { request::return_buffers(request, &mut failed.returned) };
            return Err(failed.error.into());
        }
        // SAFETY: the caller passes NULL or a writable place.
        unsafe { store(xid, call.map_or(0, CallId::xid)) };
        Ok(0)
    })
}

/// Cancels a call, which ends with -ECANCELED if it is still under way.
///
/// The server may have run the call. The call keeps its credit, as after a time-out.
///
/// # Parameters
/// - `client`: the client.
/// - `xid`: the number of the call, of `rpcrdma_local_client_start`.
///
/// # Ownership
/// The buffers of its chunks stay with the call, until the server answers it, or the connection ends.
///
/// # Threads
/// The thread of the client.
///
/// # Returns
/// - 0: the call is cancelled, or there is no such call.
/// - a negative handle code.
///
/// # Safety
/// `client` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_cancel(client: *mut rpcrdma_local_client, xid: u32) -> c_int {
    entry("rpcrdma_local_client_cancel", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        unsafe { lend(client) }?.cancel(CallId::of_xid(xid));
        Ok(0)
    })
}

/// Polls a client once, and reports completed calls.
///
/// The function never blocks. A loop polls at least 20 times a second, and the time of the `done` functions counts
/// towards the time between two polls.
///
/// # Parameters
/// - `client`: the client.
/// - `done`: gets each completed call. Calls that it starts, and that complete immediately, are reported by the next
///   poll. NULL: completed calls are left to the next poll with a function.
/// - `context`: first argument of `done`.
///
/// # Ownership
/// The reply of a completion is the library's until `rpcrdma_reply_keep`.
///
/// # Threads
/// The thread of the client. `done` runs on it.
///
/// # Returns
/// - 1: there was work, or a call has completed.
/// - 0: neither.
/// - a negative handle code.
///
/// # Safety
/// `client` is NULL or came from this library; `done` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_local_client_poll(
    client: *mut rpcrdma_local_client,
    done: rpcrdma_done,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_local_client_poll", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut local = unsafe { lend(client) }?;
        let busy = local.turn();
        let (Some(done), true) = (done, local.has_ends_to_report()) else { return Ok(c_int::from(busy)) };
        local.begin_report();
        let id = local.id();
        // The client is not in use while `done` runs, which may use it, or free it.
        match local.take_only_ended() {
            Some(ended) => {
                let tag = local.next_tag();
                drop(local);
                // SAFETY: the caller permits calls of `done` with `context`.
                unsafe { report(tag, ended, done, context) };
            }
            None => {
                let batch = local.take_ended();
                drop(local);
                // SAFETY: the caller guarantees it.
                unsafe { report_all(client, id, batch, done, context) };
            }
        }
        // SAFETY: `client` was a live handle before.
        if let Some(mut local) = unsafe { lend_if_same(client, id) } {
            local.end_report();
        }
        Ok(1)
    })
}

/// Lends a client again, unless `done` has freed it. A later client may have the same handle.
///
/// # Safety
/// `client` was a live handle before.
#[inline(always)]
unsafe fn lend_if_same<'a>(client: *mut rpcrdma_local_client, id: u64) -> Option<LentHandle<'a, rpcrdma_local_client>> {
    // SAFETY: the caller guarantees it.
    unsafe { lend_if_live(client) }.filter(|again| again.id() == id)
}

/// Passes the ends of calls to `done`, until it frees the client.
///
/// # Safety
/// See [`report`] and [`lend_if_same`].
#[inline(never)]
unsafe fn report_all(
    client: *mut rpcrdma_local_client,
    id: u64,
    mut batch: Vec<CompletedCall>,
    done: DoneFunction,
    context: *mut c_void,
) {
    for ended in batch.drain(..) {
        // SAFETY: `client` was a live handle before.
        let Some(local) = (unsafe { lend_if_same(client, id) }) else { return };
        let tag = local.next_tag();
        drop(local);
        // SAFETY: the caller permits calls of `done` with `context`.
        unsafe { report(tag, ended, done, context) };
    }
    // SAFETY: `client` was a live handle before.
    if let Some(mut local) = unsafe { lend_if_same(client, id) } {
        local.reuse_batch(batch);
    }
}

/// Passes a completed call to a function.
///
/// # Safety
/// `done` may be called with `context`.
#[inline(always)]
pub(crate) unsafe fn report(tag: u16, ended: CompletedCall, done: DoneFunction, context: *mut c_void) {
    let token = ended.token;
    let (error, results) = match &ended.result {
        Ok(reply) => (0, reply.results()),
        Err(failed) => (ApiFailure::from(failed.error).report(), &[][..]),
    };
    let results_len = results.len();
    let results = if error == 0 { results.as_ptr().cast() } else { std::ptr::null() };
    let call_done = |reply| {
        let size = size_of::<rpcrdma_completion>();
        let completion = rpcrdma_completion { size, token, results, results_len, reply, error };
        // SAFETY: the caller guarantees it.
        unsafe { done(context, &completion) }
    };
    with_temporary_handle(tag, EndedCall::new(ended.result), call_done, |(), _| ());
}
