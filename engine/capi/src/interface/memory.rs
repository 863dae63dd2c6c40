#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of buffers, and of memory of the application.

use std::ffi::{c_int, c_void};

use crate::any::{AnyEndpoint, lend_any};
use crate::arguments::store;
use crate::failure::{ApiFailure, entry};
use crate::handle::{lend, new_handle, share, wrong_kind};
use crate::memory::{AdoptedArena, BufferMemory, ReleaseCallback};
use crate::types::*;

/// Allocates a buffer for a chunk of a client's call.
///
/// The buffer is registered with the client's device. It has zeroes, or data of earlier calls to this server.
///
/// # Parameters
/// - `client`: a `rpcrdma_client` or a `rpcrdma_local_client`.
/// - `len`: bytes of the buffer.
///
/// # Ownership
/// The caller frees the buffer (`rpcrdma_free`), or lends it to a call, which takes it.
///
/// # Threads
/// The thread that may use the client.
///
/// # Returns
/// The buffer, or NULL after a failure.
/// - EINVAL: `len` is 0, as for mmap: no chunk is empty.
/// - ENOBUFS: the client has no such buffer left now (`memory.bulk_buffers`).
/// - EMSGSIZE: no buffer of the client is that long.
/// - ENOMEM, EMFILE, ENFILE, EFBIG: the memory of all the client's buffers could not be allocated. The text names the
///   limit. The next call requests the memory again.
/// - ENOTCONN: the connection has ended.
/// - EDEADLK: the calling thread runs the client's connection, as for `rpcrdma_client_call`.
/// - a handle code.
///
/// # Safety
/// `client` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_alloc(client: *mut c_void, len: usize) -> *mut rpcrdma_buffer {
    entry("rpcrdma_alloc", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let client = unsafe { lend_any(client) }?;
        if len == 0 {
            return Err(ApiFailure::argument("len is 0: a chunk has at least one byte"));
        }
        let buffer = match client {
            AnyEndpoint::Client(mut client) => client.blocking_client()?.alloc(len)?,
            AnyEndpoint::LocalClient(mut local) => {
                let connection = local.connection();
                local.client.alloc(connection, len)?
            }
            AnyEndpoint::Server(_) | AnyEndpoint::LocalServer(_) => return Err(wrong_kind()),
        };
        Ok(new_handle(BufferMemory::Owned(buffer)))
    })
}

/// Returns the bytes of a buffer.
///
/// Buffers of `rpcrdma_call_take_read_chunk` and of `rpcrdma_arena_part` are read-only. A buffer of 0 bytes has an
/// address, too.
///
/// # Parameters
/// - `buffer`: the buffer.
/// - `len`: gets the number of bytes.
///
/// # Ownership
/// The bytes belong to the buffer, and are valid until its handle becomes invalid.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// The bytes, or NULL with a handle code.
///
/// # Safety
/// `buffer` is NULL or came from this library; `len` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_buffer_data(buffer: *mut rpcrdma_buffer, len: *mut usize) -> *mut c_void {
    entry("rpcrdma_buffer_data", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let (data, bytes) = unsafe { lend(buffer) }?.bytes();
        // SAFETY: the caller passes NULL or a writable place.
        unsafe { store(len, bytes) };
        Ok(data.cast())
    })
}

/// Restricts a buffer to a part of its bytes.
///
/// The part is taken from the buffer's whole memory, or from its present bytes if the buffer is read-only. A buffer of
/// 0 bytes is an empty result (`rpcrdma_call_result`), and cannot be a chunk of a request.
///
/// # Parameters
/// - `buffer`: the buffer.
/// - `start`: first byte.
/// - `len`: number of bytes.
///
/// # Ownership
/// The caller still frees the buffer.
///
/// # Threads
/// One thread at a time.
///
/// # Returns
/// - 0: the buffer has these bytes.
/// - -EINVAL: the memory has fewer bytes.
/// - a negative handle code.
///
/// # Safety
/// `buffer` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_buffer_window(buffer: *mut rpcrdma_buffer, start: usize, len: usize) -> c_int {
    entry("rpcrdma_buffer_window", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        unsafe { lend(buffer) }?.set_range(start, len).map(|()| 0)
    })
}

/// Adopts memory that the application has mapped.
///
/// The memory is either sent as results (`rpcrdma_arena_part`), or takes Read chunks (`reads_into` of a procedure), not
/// both. From 4 GiB on, it is only for Read chunks. A server registers the memory if its configuration
/// (`rpcrdma_config_arena`) or one of its procedures has the arena.
///
/// # Parameters
/// - `base`: first byte, at a multiple of 4096.
/// - `len`: number of bytes, a multiple of 4096.
/// - `release`: is called once, with `context`, when no server, client, services or buffer uses the memory any more. It
///   may be NULL.
/// - `context`: argument of `release`.
///
/// # Ownership
/// The caller frees the arena (`rpcrdma_free`). The memory stays the application's, which keeps it mapped until
/// `release` is called. After a failure `release` is called, too.
///
/// # Threads
/// Any thread. `release` may be called on any thread.
///
/// # Returns
/// The arena, or NULL after a failure.
/// - EINVAL: `base` is NULL, `base` or `len` is not a multiple of 4096, `len` is 0, or the memory would end beyond the
///   address space.
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
        // SAFETY: the caller guarantees it.
        let release = unsafe { ReleaseCallback::new(release, context) };
        // SAFETY: the caller guarantees it.
        Ok(new_handle(unsafe { AdoptedArena::new(base, len, release) }?))
    })
}

/// Makes a buffer of a part of the application's memory.
///
/// Parts may overlap. A part of 0 bytes is an empty result.
///
/// `release` is called once nobody uses the part any more. From then on, the bytes of the part may change. After
/// `rpcrdma_call_result`, that is when the reply was sent, or its connection has ended. A peer that takes no data
/// delays the release for `timeouts.progress`, and a slow peer as long as it keeps to `limits.min_rate`. The `release`
/// of the arena comes after those of all parts.
///
/// # Parameters
/// - `arena`: the memory.
/// - `start`: first byte.
/// - `len`: number of bytes.
/// - `release`: is called once, with `context`, or is NULL. The function is short, and does not wait. It may write the
///   part's bytes, answer calls, and lend parts.
/// - `context`: argument of `release`.
///
/// # Ownership
/// The caller frees the buffer (`rpcrdma_free`), or sends it (`rpcrdma_call_result`). After a failure `release` is
/// called, too.
///
/// # Threads
/// Any thread. `release` is called on any thread, within any function of this library, so hold no lock that it takes
/// while you call this library.
///
/// # Returns
/// The buffer, or NULL after a failure.
/// - EINVAL: the arena has fewer bytes.
/// - EBUSY: the arena is for Read chunks, as it is from 4 GiB on.
/// - a handle code.
///
/// # Safety
/// `arena` is NULL or came from this library. The bytes do not change while they are lent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_arena_part(
    arena: *mut rpcrdma_arena,
    start: usize,
    len: usize,
    release: Option<unsafe extern "C-unwind" fn(context: *mut c_void)>,
    context: *mut c_void,
) -> *mut rpcrdma_buffer {
    entry("rpcrdma_arena_part", || {
        // SAFETY: the caller guarantees it.
        let release = unsafe { ReleaseCallback::new(release, context) };
        // SAFETY: the caller guarantees it.
        let arena = unsafe { share(arena) }?;
        Ok::<_, ApiFailure>(new_handle(arena.part(start, len, release)?))
    })
}
