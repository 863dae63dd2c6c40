#![expect(unsafe_code, reason = "functions of C")]
//! Replies of calls that clients make.

use std::ffi::{c_int, c_uint, c_void};

use crate::arguments::store;
use crate::failure::entry;
use crate::handle::{hold, lend};
use crate::memory::Memory;
use crate::types::{rpcrdma_buffer, rpcrdma_reply};

/// The inline results, in place; their bytes in `len`. NULL for a call that has failed, with its code, as
/// `rpcrdma_client_call` returns it.
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

/// Why the server refused the call: `RPCRDMA_PROG_UNAVAIL` and others, as handlers return them. 0 if it did not.
///
/// Negative for a call that has failed otherwise, as `rpcrdma_client_call` returns it. So is a refusal for another
/// version of RPC itself.
///
/// # Safety
/// `reply` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_status(reply: *mut rpcrdma_reply) -> c_int {
    entry("rpcrdma_reply_status", || {
        // SAFETY: the caller's promise.
        unsafe { lend(reply) }?.status()
    })
}

/// Takes the buffer of Write chunk `index`, as long as its data. Also of a failed call, where the server can no longer
/// reach it.
///
/// NULL with EINVAL if there is none; so after a time-out or a cancel, while the server may still answer.
///
/// # Safety
/// `reply` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_take_write_chunk(
    reply: *mut rpcrdma_reply,
    index: c_uint,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_reply_take_write_chunk", || {
        // SAFETY: the caller's promise.
        let buffer = unsafe { lend(reply) }?.take(true, index as usize)?;
        Ok(hold(Memory::Own(buffer)))
    })
}

/// Takes the buffer of Read chunk `index`, for the next call. As for `rpcrdma_reply_take_write_chunk`.
///
/// # Safety
/// `reply` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_reply_take_read_chunk(
    reply: *mut rpcrdma_reply,
    index: c_uint,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_reply_take_read_chunk", || {
        // SAFETY: the caller's promise.
        let buffer = unsafe { lend(reply) }?.take(false, index as usize)?;
        Ok(hold(Memory::Own(buffer)))
    })
}

/// Keeps the reply that a callback got, beyond the callback. `rpcrdma_free` ends it. NULL with EINVAL if it was kept
/// already.
///
/// It holds a buffer of the client, which has at least `memory.receives`. While none is left, no reply arrives: the
/// calls time out, and the server ends the connection. Copy results to keep them long.
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
