#![expect(unsafe_code, reason = "functions of C")]
//! A call at the server: arguments, results, answer.
//!
//! Arguments and the room for results stay in place until the call is answered.

use std::ffi::{c_char, c_int, c_uint, c_void};

use rustix::io::Errno;

use crate::arguments::{array, copy, store, store_sized};
use crate::call::{BadArgument, Part, Unaligned};
use crate::failure::{Failure, entry};
use crate::handle::{hold, lend, take};
use crate::memory::Memory;
use crate::peers::name_of;
use crate::types::{rpcrdma_buffer, rpcrdma_call};

/// What a call's header says.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct rpcrdma_call_info {
    /// Transaction ID.
    pub xid: u32,
    /// Program number.
    pub program: u32,
    /// Program version.
    pub version: u32,
    /// Procedure number.
    pub procedure: u32,
    /// Read chunks of the call.
    pub read_chunks: u32,
    /// Shard that took the call, as the task of `rpcrdma_services_task` gets it; 0 without several.
    pub shard: u32,
    /// Flavor of the credential (RFC 5531 §8.2).
    pub credential_flavor: u32,
    /// Body of the credential, in place.
    pub credential: *const c_void,
    /// Its bytes.
    pub credential_len: usize,
    /// Inline arguments, in place.
    pub args: *const c_void,
    /// Their bytes.
    pub args_len: usize,
    /// Number of the connection: no other one of `shard` has had it.
    pub connection: u64,
}

/// Writes the call's header to `info`, which has `size` bytes: `sizeof *info`. Returns 0 or a negative code of the
/// handle.
///
/// # Safety
/// `call` is NULL, or a call that was not answered; `info` is NULL, or has `size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_header(
    call: *mut rpcrdma_call,
    info: *mut rpcrdma_call_info,
    size: usize,
) -> c_int {
    entry("rpcrdma_call_header", || {
        // SAFETY: the caller's promise.
        let call = unsafe { lend(call) }?;
        let header = call.info();
        let (flavor, body) = header.credential();
        let value = rpcrdma_call_info {
            xid: header.xid(),
            program: header.program(),
            version: header.version(),
            procedure: header.procedure(),
            read_chunks: call.read_chunks() as u32,
            shard: header.caller().shard(),
            credential_flavor: flavor,
            credential: body.as_ptr().cast(),
            credential_len: body.len(),
            args: call.args().as_ptr().cast(),
            args_len: call.args().len(),
            connection: header.caller().connection(),
        };
        // SAFETY: the caller's promise.
        unsafe { store_sized(info, value, size) };
        Ok(0)
    })
}

/// Writes the peer to `room`: its authenticated identity (`wire.host_key`), or else its IP address. At most `len`
/// bytes, with the zero byte at the end. Over `soft:`, which has no addresses, it is empty without an identity.
///
/// Returns the length of the whole, or a negative code of the handle. `room` may be NULL, or `len` 0.
///
/// # Safety
/// As for `rpcrdma_call_header`; `room` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_peer(call: *mut rpcrdma_call, room: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_call_peer", || {
        // SAFETY: the caller's promise.
        let call = unsafe { lend(call) }?;
        let info = call.info();
        // SAFETY: the caller's promise.
        unsafe { copy(&name_of(info.peer_identity(), info.peer_host()), room, len) }
    })
}

/// The data of Read chunk `index`, in place: an argument that the client sent by RDMA. Its bytes in `len`, its byte in
/// the unreduced arguments in `position`. NULL with EINVAL if there is no such chunk: `read_chunks` of
/// `rpcrdma_call_header` tells without a failure.
///
/// The length of the data is among the inline arguments, and `position` counts it. Empty data has no chunk, and data in
/// a call without chunks is inline.
///
/// # Safety
/// As for `rpcrdma_call_header`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_read_chunk(
    call: *mut rpcrdma_call,
    index: c_uint,
    len: *mut usize,
    position: *mut usize,
) -> *const c_void {
    entry("rpcrdma_call_read_chunk", || {
        // SAFETY: the caller's promise.
        let call = unsafe { lend(call) }?;
        let index = index as usize;
        let none = || Failure::argument(format_args!("the call has no Read chunk {index}"));
        let data = call.read_chunk(index).ok_or_else(none)?;
        // SAFETY: the caller's promise.
        unsafe { store(len, data.len()) };
        // SAFETY: the caller's promise.
        unsafe { store(position, call.read_chunk_at(index).unwrap_or(0)) };
        Ok(data.as_ptr().cast())
    })
}

/// Takes the memory of Read chunk `index`, to be kept beyond the call, or lent as a result. It is only read.
///
/// It is memory of the call's shard: a result of that shard's calls alone (`shard` of `rpcrdma_call_header`), unless it
/// came with `reads_into`.
///
/// The caller frees it. NULL with EINVAL if there is no such chunk.
///
/// # Safety
/// As for `rpcrdma_call_header`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_take_read_chunk(call: *mut rpcrdma_call, index: c_uint) -> *mut rpcrdma_buffer {
    entry("rpcrdma_call_take_read_chunk", || {
        // SAFETY: the caller's promise.
        let mut call = unsafe { lend(call) }?;
        let none = || Failure::argument(format_args!("the call has no Read chunk {index}"));
        let own = call.arena();
        Ok(hold(Memory::taken(call.take_read_chunk(index as usize).ok_or_else(none)?, own)))
    })
}

/// Room for `len` bytes of inline results, in the memory sent; it holds zeroes. A second call changes the length, and
/// keeps what was written: it returns the same address.
///
/// There is room for at least `max_reply` bytes of the procedure. 0 bytes have an address, too. NULL with EMSGSIZE if
/// they exceed the room, and with EINVAL if `len` is not a multiple of 4, as XDR requires: pad with zeroes. The handler
/// may then write other results. Otherwise the caller gets SYSTEM_ERR, whatever the handler returns.
///
/// # Safety
/// As for `rpcrdma_call_header`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_reply(call: *mut rpcrdma_call, len: usize) -> *mut c_void {
    entry("rpcrdma_call_reply", || {
        // SAFETY: the caller's promise.
        let mut call = unsafe { lend(call) }?;
        if !len.is_multiple_of(4) {
            return Err(call.fail_to_write(Part::Inline, Errno::INVAL, Unaligned(len)));
        }
        match call.reply_mut(len).map(|room| room.as_mut_ptr()) {
            Ok(room) => {
                call.wrote(Part::Inline);
                Ok(room.cast())
            }
            Err(error) => Err(call.fail_to_write(Part::Inline, Errno::MSGSIZE, error)),
        }
    })
}

/// Sends `len` bytes, which are copied, as inline results, instead of `rpcrdma_call_reply`.
///
/// Returns 0, -EMSGSIZE if they exceed the room, or -EINVAL if `len` is not a multiple of 4, or `results` is NULL for
/// more than 0 bytes: then as for `rpcrdma_call_reply`.
///
/// # Safety
/// As for `rpcrdma_call_header`; `results` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_reply_with(call: *mut rpcrdma_call, results: *const c_void, len: usize) -> c_int {
    entry("rpcrdma_call_reply_with", || {
        // SAFETY: the caller's promise.
        let mut call = unsafe { lend(call) }?;
        // SAFETY: the caller's promise.
        let results = match unsafe { array::<u8>("results", results.cast(), len) } {
            Ok(_) if !len.is_multiple_of(4) => {
                return Err(call.fail_to_write(Part::Inline, Errno::INVAL, Unaligned(len)));
            }
            Ok(results) => results,
            Err(failure) => return Err(call.fail_to_write(Part::Inline, Errno::INVAL, BadArgument(failure))),
        };
        match call.reply_writer().put(results) {
            Ok(()) => {
                call.wrote(Part::Inline);
                Ok(0)
            }
            Err(error) => Err(call.fail_to_write(Part::Inline, Errno::MSGSIZE, error)),
        }
    })
}

/// The memory of Write chunk `index`, for a result that travels by RDMA; its bytes in `room`.
///
/// It is not initialized. The handler or a device writes it; `rpcrdma_call_write_chunk_filled` says how much, after the
/// last call of this function, which forgets what was filled. The length of the data belongs to the inline results.
/// NULL with ENOENT if the caller offers no such chunk, or one of 0 bytes, which asks for the data inline (RFC 8166
/// §4.3.2.3): then the data belongs there, too. NULL with EINVAL if it offers the chunk, and the handler has no memory
/// to write: the procedure has `RPCRDMA_OWN_RESULTS`, or the chunk has a buffer of `rpcrdma_call_result`.
///
/// If `room` is too short for the data, the handler writes nothing, and returns what
/// `rpcrdma_call_write_chunk_filled(call, index, len)` returns. A code of its own would be SYSTEM_ERR.
///
/// # Safety
/// As for `rpcrdma_call_header`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_write_chunk(
    call: *mut rpcrdma_call,
    index: c_uint,
    room: *mut usize,
) -> *mut c_void {
    entry("rpcrdma_call_write_chunk", || {
        // SAFETY: the caller's promise.
        let mut call = unsafe { lend(call) }?;
        let index = index as usize;
        match call.result_writer(index).map(|mut writer| (writer.as_mut_ptr(), writer.room())) {
            Ok((memory, bytes)) => {
                // SAFETY: the caller's promise.
                unsafe { store(room, bytes) };
                Ok(memory.cast())
            }
            Err(error) => Err(call.fail_to_fill(index, 0, Errno::INVAL, error)),
        }
    })
}

/// Sends the first `len` bytes of Write chunk `index`: with 0, an empty result.
///
/// Returns 0, -ENOENT or -EINVAL as for `rpcrdma_call_write_chunk`, or -EMSGSIZE if the chunk is shorter. The handler
/// may return that; if it returns 0 without having sent other data in this chunk, that means the same. In version 2,
/// the client then retransmits the call with a longer chunk, and the handler runs again. In version 1, the call fails
/// with EPROTO.
///
/// # Safety
/// As for `rpcrdma_call_header`. The bytes were written for this call, completely: others would be another client's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_write_chunk_filled(call: *mut rpcrdma_call, index: c_uint, len: usize) -> c_int {
    entry("rpcrdma_call_write_chunk_filled", || {
        // SAFETY: the caller's promise.
        let mut call = unsafe { lend(call) }?;
        let index = index as usize;
        let mut writer = match call.result_writer(index) {
            Ok(writer) => writer,
            Err(error) => return Err(call.fail_to_fill(index, len, Errno::INVAL, error)),
        };
        if len > writer.room() {
            // Fails, and says why.
            let error = writer.put_zeroes(len).expect_err("there is no room");
            return Err(call.fail_to_write(Part::Chunk(index), Errno::MSGSIZE, error));
        }
        // SAFETY: the caller's promise.
        unsafe { writer.advance(len) };
        call.wrote(Part::Chunk(index));
        Ok(0)
    })
}

/// Sends a buffer as the result in Write chunk `index`, without a copy: memory of the application, a Read chunk that
/// was taken, or a part of either. The buffer ends, also after a failure.
///
/// Returns 0, -ENOENT if the caller offers no such chunk, -EMSGSIZE if it is shorter (as for
/// `rpcrdma_call_write_chunk_filled`), or -EXDEV for a Read chunk of another shard or server, and for a client's
/// buffer: copy those. With -ENOENT the data belongs to the inline results: have a further part of it while they are
/// written. An arena that the server has not registered (`rpcrdma_config_arena`) is seen later: the caller gets
/// SYSTEM_ERR, and the log has the cause.
///
/// # Safety
/// As for `rpcrdma_call_header`; `buffer` as for `rpcrdma_free`. Its bytes do not change until the reply was sent:
/// `release` of `rpcrdma_arena_part` tells.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_result(
    call: *mut rpcrdma_call,
    index: c_uint,
    buffer: *mut rpcrdma_buffer,
) -> c_int {
    entry("rpcrdma_call_result", || {
        // SAFETY: the caller's promise.
        let buffer = unsafe { take(buffer) };
        // SAFETY: the caller's promise.
        let mut call = unsafe { lend(call) }?;
        let index = index as usize;
        let bytes = match buffer.and_then(|buffer| buffer.into_result(call.arena())) {
            Ok(bytes) => bytes,
            Err(failure) => {
                let code = failure.code();
                return Err(call.fail_to_write(Part::Chunk(index), code, BadArgument(failure)));
            }
        };
        let len = bytes.len();
        match call.set_result(index, bytes) {
            Ok(()) => {
                call.wrote(Part::Chunk(index));
                Ok(0)
            }
            Err(error) => Err(call.fail_to_fill(index, len, Errno::MSGSIZE, error)),
        }
    })
}

/// Answers a deferred call, from any thread. The call ends.
///
/// `status` is 0 for the results written, an `RPCRDMA_` status, or the negative code of a function that has failed for
/// this call. Nothing happens if the connection has closed.
///
/// Returns 0; -EBADF if it was answered before, as far as that can be seen; -EINVAL for a call that its handler answers
/// by its result.
///
/// # Safety
/// As for `rpcrdma_call_header`. Nobody writes its results any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_answer(call: *mut rpcrdma_call, status: c_int) -> c_int {
    entry("rpcrdma_call_answer", || {
        // SAFETY: the caller's promise.
        unsafe { take(call) }?.answer(status);
        Ok(0)
    })
}

/// 1 if the connection of a deferred call has closed, so that nobody awaits the reply; else 0, or a negative code. Such
/// a call is answered all the same.
///
/// # Safety
/// As for `rpcrdma_call_header`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_is_disconnected(call: *mut rpcrdma_call) -> c_int {
    entry("rpcrdma_call_is_disconnected", || {
        // SAFETY: the caller's promise.
        let call = unsafe { lend(call) }?;
        Ok(c_int::from(call.is_disconnected()))
    })
}
