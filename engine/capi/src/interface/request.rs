#![expect(unsafe_code, reason = "functions of C")]
//! Calls of clients, and their replies.

use std::ffi::{c_int, c_uint, c_void};

use rpcrdma::client::ClientCall;

use crate::arguments::{bytes, store};
use crate::failure::entry;
use crate::handle::{hold, lend, take};
use crate::memory::Memory;
use crate::request::Request;
use crate::types::{rpcrdma_buffer, rpcrdma_reply, rpcrdma_request};

/// A call of `procedure`, with `len` bytes of XDR encoded arguments, which are copied.
///
/// `rpcrdma_client_call` and `rpcrdma_local_client_start` end it, or `rpcrdma_free`. NULL after a failure.
///
/// # Safety
/// `args` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_request_new(procedure: u32, args: *const c_void, len: usize) -> *mut rpcrdma_request {
    entry("rpcrdma_request_new", || {
        // SAFETY: the caller's promise.
        let args = unsafe { bytes("args", args.cast(), len) }?;
        let call = ClientCall::new(procedure);
        Ok(hold(Request::new(if args.is_empty() { call } else { call.args(args) })))
    })
}

/// Adds a Read chunk: an argument from a buffer of `rpcrdma_alloc`, which the server reads by RDMA. It is the argument
/// at byte `position` of the arguments, without XDR round-up. The buffer ends, also after a failure.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// `request` and `buffer` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_request_read_chunk(
    request: *mut rpcrdma_request,
    position: usize,
    buffer: *mut rpcrdma_buffer,
) -> c_int {
    entry("rpcrdma_request_read_chunk", || {
        // SAFETY: the caller's promise.
        let data = unsafe { take(buffer) }?.into_own()?;
        // SAFETY: the caller's promise.
        unsafe { lend(request) }?.with(|call| call.read_chunk(position, data));
        Ok(0)
    })
}

/// Adds a Write chunk: room for the next eligible result, which the server writes by RDMA.
///
/// It is `buffer` of `rpcrdma_alloc`, which ends; or, if `buffer` is NULL, `len` bytes of the client's memory.
///
/// Returns 0 or a negative code.
///
/// # Safety
/// As for `rpcrdma_request_read_chunk`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_request_write_chunk(
    request: *mut rpcrdma_request,
    buffer: *mut rpcrdma_buffer,
    len: u32,
) -> c_int {
    entry("rpcrdma_request_write_chunk", || {
        let room = match buffer.is_null() {
            true => None,
            // SAFETY: the caller's promise.
            false => Some(unsafe { take(buffer) }?.into_own()?),
        };
        // SAFETY: the caller's promise.
        let mut request = unsafe { lend(request) }?;
        request.with(|call| match room {
            Some(room) => call.write_chunk_into(room),
            None => call.write_chunk(len),
        });
        Ok(0)
    })
}

/// Sets the time-out in milliseconds (negative: none, the default), and the most bytes of inline results (0: what fits
/// into one message).
///
/// Returns 0 or a negative code.
///
/// # Safety
/// As for `rpcrdma_request_read_chunk`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_request_limits(
    request: *mut rpcrdma_request,
    milliseconds: c_int,
    max_reply: usize,
) -> c_int {
    entry("rpcrdma_request_limits", || {
        // SAFETY: the caller's promise.
        let mut request = unsafe { lend(request) }?;
        request.set_timeout(milliseconds.into());
        request.with(|call| call.expect_reply(max_reply));
        Ok(0)
    })
}

/// The inline results, in place; their bytes in `len`. NULL for a call that has failed.
///
/// # Safety
/// `reply` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_results(reply: *mut rpcrdma_reply, len: *mut usize) -> *const c_void {
    entry("rpcrdma_reply_results", || {
        // SAFETY: the caller's promise.
        let reply = unsafe { lend(reply) }?;
        let results = reply.reply()?.results();
        // SAFETY: the caller's promise.
        unsafe { store(len, results.len()) };
        Ok(results.as_ptr().cast())
    })
}

/// Takes the buffer of Write chunk `index` (`is_result`: 1), as long as its data; or that of Read chunk `index`
/// (`is_result`: 0), for the next call. Also of a failed call, where the server can no longer reach it.
///
/// NULL if there is none.
///
/// # Safety
/// `reply` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_take(
    reply: *mut rpcrdma_reply,
    is_result: c_int,
    index: c_uint,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_reply_take", || {
        // SAFETY: the caller's promise.
        let buffer = unsafe { lend(reply) }?.take(is_result != 0, index as usize)?;
        Ok(hold(Memory::Own(buffer)))
    })
}

/// Keeps the reply that a callback got, beyond the callback. `rpcrdma_free` ends it.
///
/// # Safety
/// `reply` is the callback's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_keep(reply: *mut rpcrdma_reply) -> *mut rpcrdma_reply {
    entry("rpcrdma_reply_keep", || {
        // SAFETY: the caller's promise.
        let kept = unsafe { lend(reply) }?.keep()?;
        Ok(hold(kept))
    })
}
