#![expect(unsafe_code, reason = "functions of C")]
//! Buffers of chunks, and memory of the application.

use std::ffi::{c_int, c_void};

use crate::any::{Any, any};
use crate::arguments::store;
use crate::failure::{Failure, entry};
use crate::handle::{foreign, hold, lend, share};
use crate::memory::{Adopted, Memory, Release};
use crate::types::*;

/// A buffer of `len` bytes for a chunk of a call of this client, registered with its device.
///
/// `client` is a `rpcrdma_client` or a `rpcrdma_local_client`. The buffer has zeroes, or data of earlier calls to this
/// server. `rpcrdma_free` ends it, or the call that it is lent to.
///
/// NULL after a failure:
/// - EINVAL: `len` is 0, as for mmap: no chunk is empty;
/// - ENOBUFS: the client has no such buffer left now (`memory.bulk_buffers`);
/// - EMSGSIZE: it never has one so long;
/// - ENOMEM, EMFILE, ENFILE or EFBIG: the system refuses the memory of all its buffers, by the limit that the text
///   names; the next call asks again;
/// - ENOTCONN: the connection has ended;
/// - EDEADLK: as for `rpcrdma_client_call`.
///
/// # Safety
/// `client` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_alloc(client: *mut c_void, len: usize) -> *mut rpcrdma_buffer {
    entry("rpcrdma_alloc", || {
        // SAFETY: the caller's promise.
        let client = unsafe { any(client) }?;
        if len == 0 {
            return Err(Failure::argument("len is 0: a chunk has at least one byte"));
        }
        let buffer = match client {
            Any::Client(mut client) => client.waiting()?.alloc(len)?,
            Any::LocalClient(mut local) => {
                let connection = local.connection();
                local.client.alloc(connection, len)?
            }
            Any::Server(_) | Any::LocalServer(_) => return Err(foreign()),
        };
        Ok(hold(Memory::Own(buffer)))
    })
}

/// The bytes of a buffer; their number in `len`. NULL with a code of the handle. Those of
/// `rpcrdma_call_take_read_chunk` and of `rpcrdma_arena_part` are only read. 0 bytes have an address, too.
///
/// # Safety
/// `buffer` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_buffer_data(buffer: *mut rpcrdma_buffer, len: *mut usize) -> *mut c_void {
    entry("rpcrdma_buffer_data", || {
        // SAFETY: the caller's promise.
        let (data, bytes) = unsafe { lend(buffer) }?.bytes();
        // SAFETY: the caller's promise.
        unsafe { store(len, bytes) };
        Ok(data.cast())
    })
}

/// Restricts a buffer to `len` bytes from byte `start`: of its whole memory, or of its present bytes if it is only
/// read. A buffer of 0 bytes is an empty result (`rpcrdma_call_result`), and no chunk of a request.
///
/// Returns 0, or -EINVAL if it has fewer.
///
/// # Safety
/// `buffer` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_buffer_window(buffer: *mut rpcrdma_buffer, start: usize, len: usize) -> c_int {
    entry("rpcrdma_buffer_window", || {
        // SAFETY: the caller's promise.
        unsafe { lend(buffer) }?.set_window(start, len).map(|()| 0)
    })
}

/// Adopts memory that the application has mapped: to send it as results (`rpcrdma_arena_part`), or for Read chunks
/// (`reads_into` of a procedure), not both. From 4 GiB on, it is for Read chunks alone.
///
/// `base` and `len` are multiples of 4096. `release` is called once when no server, client, services or buffer uses it
/// any more, on any thread, with `context`; it may be NULL. Servers register it: `rpcrdma_config_arena`, or because
/// their procedures have it.
///
/// NULL with EINVAL if `base` is NULL, if one of them is not such a multiple, if `len` is 0, or if the memory would end
/// beyond the address space; `release` is called then, too.
///
/// # Safety
/// The memory stays mapped until `release` is called, and no part of it changes while it is lent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_arena_new(
    base: *mut c_void,
    len: usize,
    release: Option<unsafe extern "C-unwind" fn(context: *mut c_void)>,
    context: *mut c_void,
) -> *mut rpcrdma_arena {
    entry("rpcrdma_arena_new", || {
        // SAFETY: the caller's promise.
        let release = unsafe { Release::new(release, context) };
        // SAFETY: the caller's promise.
        Ok(hold(unsafe { Adopted::new(base, len, release) }?))
    })
}

/// A buffer of `len` bytes from byte `start` of the application's memory. Parts may overlap. One of 0 bytes is an empty
/// result.
///
/// `release` is called once when nobody uses the part any more, with `context`; it may be NULL. The part's bytes may
/// change from then on. After `rpcrdma_call_result`, that is when the reply was sent, or its connection has ended. A
/// peer that takes nothing delays it for `timeouts.progress`, a slow one as long as it keeps to `limits.min_rate`.
///
/// It is called on any thread, within any function of this library: it is short, and does not wait. Hold no lock that
/// it takes while you call this library. It may write the part's bytes, answer calls, and lend parts. The arena's own
/// `release` comes after those of all parts.
///
/// NULL with EINVAL if the arena has fewer bytes, or with EBUSY if it is for Read chunks, as it is from 4 GiB on;
/// `release` is called then, too.
///
/// # Safety
/// `arena` as for `rpcrdma_free`. The bytes do not change while they are lent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_arena_part(
    arena: *mut rpcrdma_arena,
    start: usize,
    len: usize,
    release: Option<unsafe extern "C-unwind" fn(context: *mut c_void)>,
    context: *mut c_void,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_arena_part", || {
        // SAFETY: the caller's promise.
        let release = unsafe { Release::new(release, context) };
        // SAFETY: the caller's promise.
        let arena = unsafe { share(arena) }?;
        Ok::<_, Failure>(hold(arena.part(start, len, release)?))
    })
}
