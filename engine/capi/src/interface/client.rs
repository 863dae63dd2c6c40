#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of clients whose connection another thread runs.

use std::ffi::{c_char, c_int, c_void};

use rpcrdma::Client;
use rustix::io::Errno;

use crate::any::{AnyEndpoint, lend_any};
use crate::arguments::{copy_text, store};
use crate::ended_call::EndedCall;
use crate::failure::{call_error_code, entry};
use crate::handle::{TemporaryTags, lend, new_handle, wrong_kind};
use crate::interface::knobs;
use crate::interface::local_client::{report, rpcrdma_done};
use crate::names::to_c_names;
use crate::process;
use crate::request::{self, NonBlocking, rpcrdma_request};
use crate::threaded_client::ThreadedClient;
use crate::types::*;

/// Connects to a server, and blocks until connected.
///
/// The client has a thread of its own.
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
/// Any thread. One thread at a time uses the client.
///
/// # Returns
/// The client, or NULL after a failure.
/// - ECONNREFUSED: the address has no listener, there is no such host, or the server is about to end.
/// - ETIMEDOUT: the server did not answer in time (the text names the knob). A server without free descriptors answers
///   nobody, and its log says so.
/// - EAGAIN: the server has no receives or connections left for one more client: try again later, or raise its
///   `memory.receives` or `limits.max_connections`. Or this host has too few resources, as for `rpcrdma_server_start`.
///   The text names the cause.
/// - ECONNRESET: the server closed the connection before it was established.
/// - EKEYREJECTED: a host key is missing or wrong (`wire.host_key`, at this side or at the server). No call was
///   executed, and a retry fails in the same way.
/// - EPROTO: the peer broke the protocol.
/// - EINVAL: an argument or a knob is invalid.
/// - EADDRNOTAVAIL, ENOMEM, EFBIG, EMFILE, ENFILE, ENOSPC, ENODEV, EIO: as for `rpcrdma_server_start`.
/// - a handle code.
///
/// # Safety
/// `address` is NULL, or ends with a zero byte; `config` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_connect(
    address: *const c_char,
    program: u32,
    version: u32,
    config: *mut rpcrdma_config,
) -> *mut rpcrdma_client {
    entry("rpcrdma_client_connect", || {
        process::prepare();
        // SAFETY: the caller passes NULL or a text that ends with a zero byte.
        let address = unsafe { crate::arguments::address(address) }?;
        // SAFETY: the caller passes NULL or a handle of this library.
        let config = unsafe { knobs(config, |knobs| knobs.client(program, version)) }?;
        Ok(new_handle(ThreadedClient::new(Client::connect(&address, config)?)))
    })
}

/// Makes another handle of a client's connection, for another thread.
///
/// # Parameters
/// - `client`: the client.
///
/// # Ownership
/// The caller frees both handles (`rpcrdma_free`). The connection closes when the last one is freed.
///
/// # Threads
/// The thread that uses `client`. This thread passes the new handle to the other thread.
///
/// # Returns
/// The new handle, or NULL after a failure.
/// - EINVAL: `client` is NULL.
/// - EBADF: `client` was freed or is of another kind.
/// - EBUSY: another thread uses `client` now.
///
/// # Safety
/// `client` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_share(client: *mut rpcrdma_client) -> *mut rpcrdma_client {
    entry("rpcrdma_client_share", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let client = unsafe { lend(client) }?;
        Ok(new_handle(client.share()))
    })
}

/// Makes a call, and blocks until it completes.
///
/// # Parameters
/// - `client`: the client.
/// - `request`: the call.
/// - `reply`: `*reply` gets the reply if the call started, even if it failed later, else NULL. `reply` may be NULL, but
///   then the buffers of a call that started are freed, and the codes do not always tell whether it started.
///
/// # Ownership
/// The caller frees the reply (`rpcrdma_free`). The buffers of the request's chunks stay with the caller if `*reply` is
/// NULL, as after each EINVAL, EBADF, EPERM and EDEADLK. Otherwise the reply has them, even if the call ended with
/// EAGAIN, ENOTCONN, ENOBUFS or EMSGSIZE without being sent.
///
/// # Threads
/// One thread at a time. Handlers and tasks on the shard of the connection, and the thread that polls its server, use
/// `rpcrdma_client_start` instead.
///
/// # Returns
/// - 0: the server has answered.
/// - -ETIMEDOUT: the time-out has passed. The code does not tell whether the call was sent: the text does. A call that
///   got no credit was not sent, and its text says that all credits are in use.
/// - -ECONNRESET: the connection was lost.
/// - -EKEYREJECTED: the server has restarted and refuses the host key. The call was not executed, and a retry is
///   pointless. Later calls fail with -ENOTCONN.
/// - -ENOTCONN: there is no connection. `rpcrdma_close_reason` has the cause.
/// - -EAGAIN: too many calls are outstanding (`limits.max_calls`).
/// - -ENOBUFS, -EMSGSIZE: the text names the knob.
/// - -ENOMEM, -EMFILE, -ENFILE, -EFBIG: memory for chunks could not be allocated. The text names the limit.
/// - -EREMOTEIO: the server refused the call (`rpcrdma_reply_status`).
/// - -EACCES: the server refused the credential.
/// - -EBUSY with a reply: the server drains, or has no memory: try again later. The call was not run, unless only its
///   reply lacked memory.
/// - -EBUSY without a reply: another thread uses `client` now.
/// - -EPROTO: a malformed reply, a server that refuses version 1, or another transport error.
/// - -EOPNOTSUPP: a call back to a client that accepts no calls: it has no `rpcrdma_config_callbacks`, or its
///   `debug.reverse` is `none`.
/// - -EINVAL: the request is invalid.
/// - -EDEADLK: a handler or task on the shard of the connection would wait for itself, as would the thread that polls
///   its server (`rpcrdma_local_server_call_back`).
/// - another negative handle code.
///
/// # Safety
/// `client` and the buffers of `request` are NULL or came from this library; `request` is NULL, or points to `size`
/// readable bytes, and each of its arrays has its stated length; `reply` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_call(
    client: *mut rpcrdma_client,
    request: *const rpcrdma_request,
    reply: *mut *mut rpcrdma_reply,
) -> c_int {
    entry("rpcrdma_client_call", || {
        // SAFETY: the caller passes NULL or a writable place.
        unsafe { store(reply, std::ptr::null_mut()) };
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut client = unsafe { lend(client) }?;
        // SAFETY: the caller passes NULL or a request whose arrays have their stated lengths.
        let mut result = unsafe { request::start(client.blocking_client()?, request) }?;
        if let Err(failed) = &mut result
            && call_error_code(&failed.error) == Errno::INVAL
        {
            // SAFETY: the caller guarantees it. The call is of this request, and this thread has only waited for it.
            unsafe { request::return_buffers(request, &mut failed.returned) };
            return Err(failed.error.into());
        }
        let ended = EndedCall::new(result);
        let code = ended.code();
        if !reply.is_null() {
            // SAFETY: the caller passes NULL or a writable place.
            unsafe { store(reply, new_handle(ended)) };
        }
        Ok(code)
    })
}

/// Starts a call without blocking; `rpcrdma_client_poll` reports its completion, once.
///
/// Exception: with a Read chunk to be copied, it blocks until the connection's thread has allocated the memory.
///
/// # Parameters
/// - `client`: the client.
/// - `request`: the call.
///
/// # Ownership
/// If the call starts, it has the buffers of its chunks, which its reply returns. If it does not start, they stay with
/// the caller.
///
/// # Threads
/// One thread at a time. It may be the connection's own thread, that is, in a handler, or the thread that polls the
/// server. On that thread a Read chunk cannot be copied (EDEADLK).
///
/// # Returns
/// - 0: the call has started. The poll reports failures that the connection's thread finds later, with a reply that has
///   the buffers: ENOTCONN without a connection, and EINVAL for the position of a chunk, a buffer of another client, or
///   a one-way call that has chunks.
/// - -EAGAIN: too many calls are outstanding (`limits.max_calls`; for calls of a server `debug.reverse_credits`).
/// - -ENOTCONN: the thread of the connection has stopped.
/// - -EINVAL, -EMSGSIZE: the request is invalid.
/// - the codes of `rpcrdma_alloc`: for a Read chunk to be copied.
/// - another negative handle code.
///
/// # Safety
/// `client` and the buffers of `request` are NULL or came from this library; `request` is NULL, or points to `size`
/// readable bytes, and each of its arrays has its stated length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_start(client: *mut rpcrdma_client, request: *const rpcrdma_request) -> c_int {
    entry("rpcrdma_client_start", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut client = unsafe { lend(client) }?;
        // SAFETY: the caller passes NULL or a request whose arrays have their stated lengths.
        let started = unsafe { request::start(&mut NonBlocking(&mut client), request) }?;
        match started {
            Ok((token, call)) => client.add_started(token, call),
            Err(mut failed) => {
                // SAFETY: the caller guarantees it. The call is of this request.
                unsafe { request::return_buffers(request, &mut failed.returned) };
                return Err(failed.error.into());
            }
        }
        Ok(0)
    })
}

/// Reports completed calls.
///
/// The function never blocks. Calls of `rpcrdma_local_server_call_back` complete in polls of the server: poll the
/// client after each.
///
/// # Parameters
/// - `client`: the client.
/// - `done`: gets each completed call. It may start calls, which a later poll reports. It may also free the client; the
///   calls that this poll has found are reported even then. NULL: completed calls are left to the next poll with a
///   function.
/// - `context`: first argument of `done`.
///
/// # Ownership
/// The reply of a completion is the library's until `rpcrdma_reply_keep`. Calls of a client that is freed are not
/// reported any more.
///
/// # Threads
/// One thread at a time. `done` runs on it.
///
/// # Returns
/// - 1: a call has completed.
/// - 0: no call has completed.
/// - a negative handle code.
///
/// # Safety
/// `client` is NULL or came from this library; `done` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_poll(
    client: *mut rpcrdma_client,
    done: rpcrdma_done,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_client_poll", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut client = unsafe { lend(client) }?;
        let Some(done) = done else { return Ok(0) };
        let ended = client.take_ended();
        // The client is not in use while `done` runs, which may use it, or free it.
        drop(client);
        let found = c_int::from(!ended.is_empty());
        for call in ended {
            // SAFETY: the caller permits calls of `done` with `context`.
            unsafe { report(TemporaryTags::next_of_thread(), call, done, context) };
        }
        Ok(found)
    })
}

/// Writes why a client's connection has closed, as text.
///
/// # Parameters
/// - `client`: a `rpcrdma_client` or a `rpcrdma_local_client`.
/// - `buf`: gets the text, cut off to fit into `len` bytes with its final zero byte. The pointer may be NULL.
/// - `len`: bytes of `buf`. It may be 0.
///
/// # Ownership
/// `buf` stays the caller's.
///
/// # Threads
/// The thread that may use the client.
///
/// # Returns
/// - the length of the whole text.
/// - 0: the connection is open, or the client reconnects.
/// - a negative handle code.
///
/// # Safety
/// `client` is NULL or came from this library; `buf` is NULL, or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_close_reason(client: *mut c_void, buf: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_close_reason", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let reason = match unsafe { lend_any(client) }? {
            AnyEndpoint::Client(mut client) => client.client().close_reason().map(ToString::to_string),
            AnyEndpoint::LocalClient(local) => local.client.close_reason(local.connection()).map(ToString::to_string),
            AnyEndpoint::Server(_) | AnyEndpoint::LocalServer(_) => return Err(wrong_kind()),
        };
        // SAFETY: the caller passes NULL or `len` writable bytes.
        unsafe { copy_text(&to_c_names(reason.unwrap_or_default()), buf, len) }
    })
}
