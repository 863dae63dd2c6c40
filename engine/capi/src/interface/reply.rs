#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of replies.

use std::ffi::{c_int, c_uint, c_void};

use crate::arguments::store;
use crate::failure::entry;
use crate::handle::{lend, new_handle};
use crate::memory::BufferMemory;
use crate::types::{rpcrdma_buffer, rpcrdma_reply};

/// Returns the inline results of a call, in place.
///
/// # Parameters
/// - `reply`: the reply.
/// - `len`: gets the length of the results.
///
/// # Ownership
/// The results are in the reply, until it is freed.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// The results, or NULL after a failure.
/// - the code of a call that has failed, as `rpcrdma_client_call` returns it.
/// - a handle code.
///
/// # Safety
/// `reply` is NULL or came from this library; `len` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_results(reply: *mut rpcrdma_reply, len: *mut usize) -> *const c_void {
    entry("rpcrdma_reply_results", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let reply = unsafe { lend(reply) }?;
        let results = reply.reply()?.results();
        // SAFETY: the caller passes NULL or a writable place.
        unsafe { store(len, results.len()) };
        Ok(results.as_ptr().cast())
    })
}

/// Returns the status with which the server refused a call.
///
/// # Parameters
/// - `reply`: the reply.
///
/// # Ownership
/// The caller still frees the reply.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// - 0: the server did not refuse the call.
/// - an `RPCRDMA_` status, as handlers return it, such as `RPCRDMA_PROG_UNAVAIL`.
/// - a negative code of a call that has failed otherwise, as `rpcrdma_client_call` returns it. A refusal for another
///   version of RPC itself is such a failure.
/// - a negative handle code.
///
/// # Safety
/// `reply` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_status(reply: *mut rpcrdma_reply) -> c_int {
    entry("rpcrdma_reply_status", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        unsafe { lend(reply) }?.status()
    })
}

/// Takes the buffer of a Write chunk out of a reply.
///
/// The buffer is as long as its data. The reply of a failed call also has the buffer, unless the server can still reach
/// it.
///
/// # Parameters
/// - `reply`: the reply.
/// - `index`: index of the chunk.
///
/// # Ownership
/// The caller frees the buffer (`rpcrdma_free`), or lends it to the next call.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// The buffer, or NULL after a failure.
/// - EINVAL: there is none, such as after a time-out or a cancel, while the server may still answer.
/// - a handle code.
///
/// # Safety
/// `reply` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_take_write_chunk(
    reply: *mut rpcrdma_reply,
    index: c_uint,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_reply_take_write_chunk", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let buffer = unsafe { lend(reply) }?.take(true, index as usize)?;
        Ok(new_handle(BufferMemory::Owned(buffer)))
    })
}

/// Takes the buffer of a Read chunk out of a reply.
///
/// The buffer can be lent to another call. The reply of a failed call also has the buffer, unless the server can still
/// reach it.
///
/// # Parameters
/// - `reply`: the reply.
/// - `index`: index of the chunk.
///
/// # Ownership
/// The caller frees the buffer (`rpcrdma_free`), or lends it to the next call.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// The buffer, or NULL after a failure.
/// - EINVAL: there is none, such as after a time-out or a cancel, while the server may still answer.
/// - a handle code.
///
/// # Safety
/// `reply` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_take_read_chunk(
    reply: *mut rpcrdma_reply,
    index: c_uint,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_reply_take_read_chunk", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let buffer = unsafe { lend(reply) }?.take(false, index as usize)?;
        Ok(new_handle(BufferMemory::Owned(buffer)))
    })
}

/// Keeps the reply that a callback got, beyond the callback.
///
/// The reply holds a buffer of the client, which has at least `memory.receives` of them. While none is left, no reply
/// arrives: the calls time out, and the server ends the connection. Copy results to keep them long.
///
/// # Parameters
/// - `reply`: `reply` of a completion.
///
/// # Ownership
/// The caller frees the new reply (`rpcrdma_free`).
///
/// # Threads
/// The thread that runs the callback.
///
/// # Returns
/// The reply, or NULL after a failure.
/// - EINVAL: the reply was kept already.
/// - a handle code.
///
/// # Safety
/// `reply` is the one that the callback got.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_keep(reply: *mut rpcrdma_reply) -> *mut rpcrdma_reply {
    entry("rpcrdma_reply_keep", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let kept = unsafe { lend(reply) }?.keep()?;
        Ok(new_handle(kept))
    })
}
