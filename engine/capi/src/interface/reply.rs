#![expect(unsafe_code, reason = "functions of C")]
//! Replies of calls that clients make.

use std::ffi::{c_int, c_uint, c_void};

use crate::arguments::store;
use crate::failure::entry;
use crate::handle::{hold, lend};
use crate::memory::Memory;
use crate::types::{rpcrdma_buffer, rpcrdma_reply};

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
