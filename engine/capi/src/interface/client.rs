#![expect(unsafe_code, reason = "functions of C")]
//! Clients whose calls block.

use std::ffi::{c_char, c_int, c_void};

use rpcrdma::Client;
use rustix::io::Errno;

use crate::any::{Any, any};
use crate::arguments::{copy, store};
use crate::calling::CallingClient;
use crate::ended::Ended;
use crate::failure::{code_of, entry};
use crate::handle::{Numbers, foreign, hold, lend};
use crate::interface::knobs;
use crate::interface::local_client::{report, rpcrdma_done};
use crate::names::in_c;
use crate::process;
use crate::request::{self, NotBlocking, rpcrdma_request};
use crate::types::*;

/// Connects to a server, for calls of `program` and `version`; blocks. The client has a thread of its own.
///
/// `address` is `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`. `config` may be NULL. NULL after a failure:
///
/// - ECONNREFUSED: nobody listens at the address, there is no such host, or the server takes no more connections;
/// - ETIMEDOUT: the server did not answer in time (the text names the knob);
/// - EAGAIN: the server has no receives left for one more connection: try again later, or raise its `memory.receives`;
/// - ECONNRESET: the server closed the connection before it was established;
/// - EKEYREJECTED: a host key is missing or wrong (`wire.host_key`, at this side or at the server): no call was
///   executed, and a retry fails in the same way;
/// - EPROTO: the peer broke the protocol;
/// - EINVAL: an argument or a knob;
/// - EADDRNOTAVAIL, ENOMEM, EAGAIN, EFBIG, EMFILE, ENFILE, ENOSPC, ENODEV and EIO as for `rpcrdma_server_start`; the
///   text tells which EAGAIN it is.
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
        Ok(hold(CallingClient::new(Client::connect(&address, config)?)))
    })
}

/// A handle of the same connection for another thread, or NULL. The connection closes when the last one is freed.
///
/// The thread that uses `client` calls this function, and passes the new handle on. NULL after a failure: EINVAL,
/// EBADF, or EBUSY because another thread uses `client` now.
///
/// # Safety
/// `client` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_share(client: *mut rpcrdma_client) -> *mut rpcrdma_client {
    entry("rpcrdma_client_share", || {
        // SAFETY: the caller's promise.
        let client = unsafe { lend(client) }?;
        Ok(hold(client.share()))
    })
}

/// Makes a call, and blocks until its end.
///
/// Returns 0 or a negative code: ETIMEDOUT, ECONNRESET (the connection was lost), EKEYREJECTED (the server has
/// restarted and refuses the host key: not executed, and a retry is pointless), ENOTCONN, EAGAIN (`limits.max_calls`),
/// ENOBUFS and EMSGSIZE (a knob that the text names), ENOMEM, EMFILE, ENFILE and EFBIG (the system refuses memory for
/// chunks, by the limit that the text names), EREMOTEIO (the server refused it: `rpcrdma_reply_status`), EACCES (it
/// refused the credential), EBUSY (it drains, or has no memory), EPROTO (a malformed reply, a server that refuses
/// version 1, or another transport error), EOPNOTSUPP (a call back to a client that takes none: it has no
/// `rpcrdma_config_callbacks`, or its `debug.reverse` is `none`), EINVAL.
///
/// EDEADLK: a handler or task on the shard of the connection would wait for itself, as would the thread that polls its
/// server (`rpcrdma_local_server_call_back`). Use `rpcrdma_client_start` there.
///
/// A server that answers EBUSY has not run the call, unless the reply itself found no memory: try again later. EBUSY
/// without a reply: another thread uses `client` now.
///
/// ETIMEDOUT does not tell whether the call was sent: the text does. A call that waited in vain for a credit was not
/// sent, and its text says that all credits are in use.
///
/// `*reply` is the reply if the call has started, also if it failed then, and else NULL. `rpcrdma_free` ends it.
/// `reply` may be NULL.
///
/// The buffers of its chunks stay with the caller if `*reply` is NULL, as after each EINVAL, EBADF, EPERM and EDEADLK.
/// Otherwise the reply has them, also of a call that ended with EAGAIN, ENOTCONN, ENOBUFS or EMSGSIZE without being
/// sent; without `reply` they are freed. A caller with buffers in its request passes `reply`, because other codes alone
/// do not tell.
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
        let mut result = unsafe { request::start(client.waiting()?, request) }?;
        if let Err(failed) = &mut result
            && code_of(&failed.error) == Errno::INVAL
        {
            // SAFETY: the caller's promise. The request was to start that call, and this thread has only waited for it.
            unsafe { request::return_buffers(request, &mut failed.returned) };
            return Err(failed.error.into());
        }
        let ended = Ended::new(result);
        let code = ended.code();
        if !reply.is_null() {
            // SAFETY: the caller's promise.
            unsafe { store(reply, hold(ended)) };
        }
        Ok(code)
    })
}

/// Starts a call without blocking; `rpcrdma_client_poll` reports its end, once. A Read chunk that is to be copied waits
/// for the connection's thread to allocate its memory.
///
/// Also on the thread that runs the connection: in handlers of a server that calls back, and where a server is polled.
/// There a Read chunk cannot be copied (EDEADLK).
///
/// Returns 0, or a negative code if it does not start: EAGAIN (`limits.max_calls`; for calls of a server
/// `debug.reverse_credits`), ENOTCONN (the thread of the connection has stopped), EINVAL, EMSGSIZE; and for a Read
/// chunk to be copied those of `rpcrdma_alloc`. Then the buffers of its chunks stay with the caller.
///
/// The connection's thread finds other causes, which the poll reports, and the buffers are in that reply: such is
/// ENOTCONN without a connection, or EINVAL for the position of a chunk, a buffer of another client, or a one-way call
/// that has chunks.
///
/// # Safety
/// As for `rpcrdma_local_client_start`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_start(client: *mut rpcrdma_client, request: *const rpcrdma_request) -> c_int {
    entry("rpcrdma_client_start", || {
        // SAFETY: the caller's promise.
        let mut client = unsafe { lend(client) }?;
        // SAFETY: the caller's promise.
        let started = unsafe { request::start(&mut NotBlocking(&mut client), request) }?;
        match started {
            Ok((token, call)) => client.keep(token, call),
            Err(mut failed) => {
                // SAFETY: the caller's promise. The request was to start that call.
                unsafe { request::return_buffers(request, &mut failed.returned) };
                return Err(failed.error.into());
            }
        }
        Ok(0)
    })
}

/// Passes each started call that has ended to `done`. Never blocks. If `done` is NULL, ended calls are left to the next
/// poll with a function.
///
/// Calls of `rpcrdma_local_server_call_back` end in polls of the server: poll the client after each. The function may
/// start calls, whose ends are for later polls, and end the client. The calls that this poll has found are reported all
/// the same. Calls of a client that ends are not reported any more.
///
/// Returns 1 if a call has ended, 0 if not, or a negative code of the handle.
///
/// # Safety
/// `client` as for `rpcrdma_free`; `done` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_client_poll(
    client: *mut rpcrdma_client,
    done: rpcrdma_done,
    context: *mut c_void,
) -> c_int {
    entry("rpcrdma_client_poll", || {
        // SAFETY: the caller's promise.
        let mut client = unsafe { lend(client) }?;
        let Some(done) = done else { return Ok(0) };
        let ended = client.ended();
        // The client is free while a function runs, which may use it, or end it.
        drop(client);
        let found = c_int::from(!ended.is_empty());
        for call in ended {
            // SAFETY: the caller's promise.
            unsafe { report(Numbers::next_of_thread(), call, done, context) };
        }
        Ok(found)
    })
}

/// Writes to `room` why a client's connection has closed, as text with a zero byte, of at most `len` bytes.
///
/// `client` is a `rpcrdma_client` or a `rpcrdma_local_client`. Returns the length of the whole; 0 while it is open, and
/// while the client reconnects; or a negative code of the handle. `room` may be NULL, or `len` 0.
///
/// # Safety
/// `client` as for `rpcrdma_free`; `room` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_close_reason(client: *mut c_void, room: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_close_reason", || {
        // SAFETY: the caller's promise.
        let reason = match unsafe { any(client) }? {
            Any::Client(mut client) => client.client().close_reason().map(ToString::to_string),
            Any::LocalClient(local) => local.client.close_reason(local.connection()).map(ToString::to_string),
            Any::Server(_) | Any::LocalServer(_) => return Err(foreign()),
        };
        // SAFETY: the caller's promise.
        unsafe { copy(&in_c(reason.unwrap_or_default()), room, len) }
    })
}
