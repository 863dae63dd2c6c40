#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions of a call at the server: arguments, results, answer.
//!
//! Arguments and the room for results stay in place until the call is answered.

use std::ffi::{c_char, c_int, c_uint, c_void};

use rustix::io::Errno;

use crate::arguments::{array, copy_text, store, store_sized};
use crate::call::{BadArgument, ResultPart, UnalignedResults};
use crate::failure::{ApiFailure, entry};
use crate::handle::{lend, new_handle, take};
use crate::memory::BufferMemory;
use crate::peers::peer_name;
use crate::types::{rpcrdma_buffer, rpcrdma_call};

/// The header of a call.
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
    /// Number of Read chunks of the call.
    pub read_chunks: u32,
    /// Shard that took the call, as the task of `rpcrdma_services_task` gets it; 0 if there is only one.
    pub shard: u32,
    /// Flavor of the credential (RFC 5531 §8.2).
    pub credential_flavor: u32,
    /// Body of the credential, in place.
    pub credential: *const c_void,
    /// Bytes at `credential`.
    pub credential_len: usize,
    /// Inline arguments, in place.
    pub args: *const c_void,
    /// Bytes at `args`.
    pub args_len: usize,
    /// Number of the connection: no other connection of `shard` has had it.
    pub connection: u64,
}

/// Writes the header of a call to a struct.
///
/// # Parameters
/// - `call`: the call.
/// - `info`: gets the header.
/// - `size`: `sizeof *info`.
///
/// # Ownership
/// The credential and the arguments are in the call's memory, until it is answered.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// - 0: the header is in `info`.
/// - a negative handle code.
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
        // SAFETY: the caller passes NULL or a handle of this library.
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
        // SAFETY: the caller guarantees it.
        unsafe { store_sized(info, value, size) };
        Ok(0)
    })
}

/// Writes the identity or address of a call's peer as text.
///
/// The text is the authenticated identity (`wire.host_key`), or else the IP address. Over `soft:`, which has no
/// addresses, it is empty without an identity.
///
/// # Parameters
/// - `call`: the call.
/// - `buf`: gets the text, cut off to fit into `len` bytes with its final zero byte. The pointer may be NULL.
/// - `len`: bytes of `buf`. It may be 0.
///
/// # Ownership
/// `buf` stays the caller's.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// - the length of the whole text.
/// - a negative handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered; `buf` is NULL, or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_peer(call: *mut rpcrdma_call, buf: *mut c_char, len: usize) -> c_int {
    entry("rpcrdma_call_peer", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let call = unsafe { lend(call) }?;
        let info = call.info();
        // SAFETY: the caller passes NULL or `len` writable bytes.
        unsafe { copy_text(&peer_name(info.peer_identity(), info.peer_host()), buf, len) }
    })
}

/// Returns the data of a Read chunk, in place.
///
/// The data is an argument that the client sent by RDMA. Its length is among the inline arguments, and `position`
/// counts it. Empty data has no chunk, and data in a call without chunks is inline.
///
/// # Parameters
/// - `call`: the call.
/// - `index`: index of the chunk. `read_chunks` of `rpcrdma_call_header` is the number of chunks.
/// - `len`: gets the length of the data.
/// - `position`: gets the offset of the data in the unreduced arguments, in bytes.
///
/// # Ownership
/// The data is in the call's memory, until it is answered.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// The data, or NULL after a failure.
/// - EINVAL: the call has no such chunk.
/// - a handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered; `len` and `position` are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_read_chunk(
    call: *mut rpcrdma_call,
    index: c_uint,
    len: *mut usize,
    position: *mut usize,
) -> *const c_void {
    entry("rpcrdma_call_read_chunk", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let call = unsafe { lend(call) }?;
        let index = index as usize;
        let none = || ApiFailure::argument(format_args!("the call has no Read chunk {index}"));
        let data = call.read_chunk(index).ok_or_else(none)?;
        // SAFETY: the caller passes NULL or a writable place.
        unsafe { store(len, data.len()) };
        // SAFETY: the caller passes NULL or a writable place.
        unsafe { store(position, call.read_chunk_at(index).unwrap_or(0)) };
        Ok(data.as_ptr().cast())
    })
}

/// Takes the memory of a Read chunk out of a call.
///
/// The buffer may be kept beyond the call, or lent as a result. The buffer is read-only. It is memory of the call's
/// shard, and can be a result only of calls of that shard (`shard` of `rpcrdma_call_header`), unless the chunk arrived
/// in `reads_into`.
///
/// # Parameters
/// - `call`: the call.
/// - `index`: index of the chunk.
///
/// # Ownership
/// The caller frees the buffer (`rpcrdma_free`).
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// The buffer, or NULL after a failure.
/// - EINVAL: the call has no such chunk.
/// - a handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_take_read_chunk(call: *mut rpcrdma_call, index: c_uint) -> *mut rpcrdma_buffer {
    entry("rpcrdma_call_take_read_chunk", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut call = unsafe { lend(call) }?;
        let none = || ApiFailure::argument(format_args!("the call has no Read chunk {index}"));
        let shard_arena = call.arena();
        Ok(new_handle(BufferMemory::of_read_chunk(call.take_read_chunk(index as usize).ok_or_else(none)?, shard_arena)))
    })
}

/// Returns room for inline results, in the memory that is sent.
///
/// The room holds zeroes. A second call changes the length, keeps the bytes that were written, and returns the same
/// address. There is room for at least the `max_reply` bytes of the procedure. A room of 0 bytes has an address, too.
/// After a failure the handler may write other results. Otherwise the caller gets SYSTEM_ERR, whatever the handler
/// returns.
///
/// # Parameters
/// - `call`: the call.
/// - `len`: bytes of the results, a multiple of 4 as XDR requires: pad with zeroes.
///
/// # Ownership
/// The room is in the call's memory, until it is answered.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// The room, or NULL after a failure.
/// - EMSGSIZE: `len` exceeds the room.
/// - EINVAL: `len` is not a multiple of 4.
/// - a handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_reply(call: *mut rpcrdma_call, len: usize) -> *mut c_void {
    entry("rpcrdma_call_reply", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut call = unsafe { lend(call) }?;
        if !len.is_multiple_of(4) {
            return Err(call.fail_to_write(ResultPart::Inline, Errno::INVAL, UnalignedResults(len)));
        }
        match call.reply_mut(len).map(|room| room.as_mut_ptr()) {
            Ok(room) => {
                call.record_written(ResultPart::Inline);
                Ok(room.cast())
            }
            Err(error) => Err(call.fail_to_write(ResultPart::Inline, Errno::MSGSIZE, error)),
        }
    })
}

/// Copies inline results into the reply, instead of `rpcrdma_call_reply`.
///
/// After a failure the handler may write other results. Otherwise the caller gets SYSTEM_ERR, whatever the handler
/// returns.
///
/// # Parameters
/// - `call`: the call.
/// - `results`: the results.
/// - `len`: bytes at `results`, a multiple of 4 as XDR requires: pad with zeroes.
///
/// # Ownership
/// The results are copied.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// - 0: the results are in the reply.
/// - -EMSGSIZE: `len` exceeds the room.
/// - -EINVAL: `len` is not a multiple of 4, or `results` is NULL for more than 0 bytes.
/// - a negative handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered; `results` is NULL, or has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_reply_with(call: *mut rpcrdma_call, results: *const c_void, len: usize) -> c_int {
    entry("rpcrdma_call_reply_with", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut call = unsafe { lend(call) }?;
        // SAFETY: the caller guarantees it.
        let results = match unsafe { array::<u8>("results", results.cast(), len) } {
            Ok(_) if !len.is_multiple_of(4) => {
                return Err(call.fail_to_write(ResultPart::Inline, Errno::INVAL, UnalignedResults(len)));
            }
            Ok(results) => results,
            Err(failure) => return Err(call.fail_to_write(ResultPart::Inline, Errno::INVAL, BadArgument(failure))),
        };
        match call.reply_writer().put(results) {
            Ok(()) => {
                call.record_written(ResultPart::Inline);
                Ok(0)
            }
            Err(error) => Err(call.fail_to_write(ResultPart::Inline, Errno::MSGSIZE, error)),
        }
    })
}

/// Returns the memory of a Write chunk.
///
/// The memory is for a result that travels by RDMA, and is not initialized. The handler or a device writes it. Then
/// `rpcrdma_call_write_chunk_filled` sets the number of written bytes; this function resets that number to 0. The
/// length of the data belongs to the inline results.
///
/// If the chunk is too short for the data, the handler writes nothing, and returns the result of
/// `rpcrdma_call_write_chunk_filled(call, index, len)`. If it returns a code of its own, the caller gets SYSTEM_ERR.
///
/// # Parameters
/// - `call`: the call.
/// - `index`: index of the chunk.
/// - `room`: gets the length of the chunk.
///
/// # Ownership
/// The memory is the library's. The handler may write it until the call is answered.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// The memory, or NULL after a failure.
/// - ENOENT: the caller offers no such chunk, or one of 0 bytes, which asks for the data inline (RFC 8166 §4.3.2.3).
///   Then the data itself belongs to the inline results.
/// - EINVAL: the caller offers the chunk, but the handler has no memory to write, because the procedure has
///   `RPCRDMA_OWN_RESULTS`, or the chunk has a buffer of `rpcrdma_call_result`.
/// - a handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered; `room` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_write_chunk(
    call: *mut rpcrdma_call,
    index: c_uint,
    room: *mut usize,
) -> *mut c_void {
    entry("rpcrdma_call_write_chunk", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut call = unsafe { lend(call) }?;
        let index = index as usize;
        match call.result_writer(index).map(|mut writer| (writer.as_mut_ptr(), writer.room())) {
            Ok((memory, bytes)) => {
                // SAFETY: the caller passes NULL or a writable place.
                unsafe { store(room, bytes) };
                Ok(memory.cast())
            }
            Err(error) => Err(call.fail_to_fill(index, 0, Errno::INVAL, error)),
        }
    })
}

/// Sends the first bytes of a Write chunk.
///
/// # Parameters
/// - `call`: the call.
/// - `index`: index of the chunk.
/// - `len`: bytes that were written for this call; 0: the result is empty.
///
/// # Ownership
/// The memory is the library's.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// - 0: the bytes are sent with the reply.
/// - -ENOENT: the caller offers no such chunk, or one of 0 bytes.
/// - -EINVAL: the handler has no memory to write, as for `rpcrdma_call_write_chunk`.
/// - -EMSGSIZE: the chunk is shorter. The handler may return this code. If it returns 0 without having sent other data
///   in this chunk, that means the same. In version 2, the client then retransmits the call with a longer chunk, and
///   the handler runs again. In version 1, the call fails with EPROTO.
/// - a negative handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered. All `len` bytes were written for this call, because other bytes
/// would be data of another client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_write_chunk_filled(call: *mut rpcrdma_call, index: c_uint, len: usize) -> c_int {
    entry("rpcrdma_call_write_chunk_filled", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut call = unsafe { lend(call) }?;
        let index = index as usize;
        let mut writer = match call.result_writer(index) {
            Ok(writer) => writer,
            Err(error) => return Err(call.fail_to_fill(index, len, Errno::INVAL, error)),
        };
        if len > writer.room() {
            // The writer refuses the zeroes with an error that names the cause.
            let error = writer.put_zeroes(len).expect_err("there is no room");
            return Err(call.fail_to_write(ResultPart::Chunk(index), Errno::MSGSIZE, error));
        }
        // SAFETY: the caller guarantees it.
        unsafe { writer.advance(len) };
        call.record_written(ResultPart::Chunk(index));
        Ok(0)
    })
}

/// Sends a buffer as the result in a Write chunk, without a copy.
///
/// The buffer is memory of the application, a Read chunk that was taken, or a part of either. An arena that the server
/// has not registered (`rpcrdma_config_arena`) is detected later: the caller gets SYSTEM_ERR, and the log has the
/// cause.
///
/// # Parameters
/// - `call`: the call.
/// - `index`: index of the chunk.
/// - `buffer`: the result.
///
/// # Ownership
/// The handle of the buffer ends, also after a failure. The library has its bytes until `release` of
/// `rpcrdma_arena_part` is called.
///
/// # Threads
/// The handler's thread; for a deferred call any thread, one at a time.
///
/// # Returns
/// - 0: the buffer is sent with the reply.
/// - -ENOENT: the caller offers no such chunk. The data belongs to the inline results. The handle is invalid now, so
///   hold another part of this memory until the results are written.
/// - -EMSGSIZE: the chunk is shorter. The handler may return this code, as for `rpcrdma_call_write_chunk_filled`.
/// - -EXDEV: the buffer is a Read chunk of another shard or server, or a client's buffer: copy it.
/// - a negative handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered; `buffer` is NULL or came from this library. The bytes of the buffer
/// do not change until the reply was sent, which `release` of `rpcrdma_arena_part` reports.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_result(
    call: *mut rpcrdma_call,
    index: c_uint,
    buffer: *mut rpcrdma_buffer,
) -> c_int {
    entry("rpcrdma_call_result", || {
        // SAFETY: the caller guarantees it.
        let buffer = unsafe { take(buffer) };
        // SAFETY: the caller passes NULL or a handle of this library.
        let mut call = unsafe { lend(call) }?;
        let index = index as usize;
        let bytes = match buffer.and_then(|buffer| buffer.into_result(call.arena())) {
            Ok(bytes) => bytes,
            Err(failure) => {
                let code = failure.code();
                return Err(call.fail_to_write(ResultPart::Chunk(index), code, BadArgument(failure)));
            }
        };
        let len = bytes.len();
        match call.set_result(index, bytes) {
            Ok(()) => {
                call.record_written(ResultPart::Chunk(index));
                Ok(0)
            }
            Err(error) => Err(call.fail_to_fill(index, len, Errno::MSGSIZE, error)),
        }
    })
}

/// Answers a deferred call.
///
/// If the connection has closed, no reply is sent.
///
/// # Parameters
/// - `call`: the call.
/// - `status`: 0 for the results that were written, an `RPCRDMA_` status, or the negative code of a function that has
///   failed for this call. The status means the same as the result of an `rpcrdma_handler`.
///
/// # Ownership
/// The handle of the call ends, with its arguments and its room for results.
///
/// # Threads
/// Any thread, one at a time.
///
/// # Returns
/// - 0: the call is answered.
/// - -EBADF: the call was answered before, as far as that can be detected.
/// - -EINVAL: the handler of the call answers it by its result.
/// - another negative handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered. Nobody writes its results any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_answer(call: *mut rpcrdma_call, status: c_int) -> c_int {
    entry("rpcrdma_call_answer", || {
        // SAFETY: the caller guarantees it.
        unsafe { take(call) }?.answer(status);
        Ok(0)
    })
}

/// Tells whether the connection of a deferred call has closed.
///
/// Nobody awaits the reply of a call whose connection has closed, but the call must still be answered.
///
/// # Parameters
/// - `call`: the call.
///
/// # Ownership
/// The caller still answers the call.
///
/// # Threads
/// Any thread, one at a time.
///
/// # Returns
/// - 1: the connection has closed.
/// - 0: it has not.
/// - a negative handle code.
///
/// # Safety
/// `call` is NULL, or a call that was not answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_call_is_disconnected(call: *mut rpcrdma_call) -> c_int {
    entry("rpcrdma_call_is_disconnected", || {
        // SAFETY: the caller passes NULL or a handle of this library.
        let call = unsafe { lend(call) }?;
        Ok(c_int::from(call.is_disconnected()))
    })
}
