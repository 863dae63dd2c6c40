#![expect(unsafe_code, reason = "a request of C has pointers")]
//! Calls of clients, described by `rpcrdma_request`.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use rpcrdma::client::{CallId, ClientCall, LocalClient, Pending, ReturnedBuffers};
use rpcrdma::service::MAX_CHUNKS;
use rpcrdma::{Buf, CallResult, Client, FailedCall};
use rustix::io::Errno;

use crate::arguments::{array, null_argument};
use crate::failure::ApiFailure;
use crate::handle::{lend, restore_handle, take};
use crate::memory::BufferMemory;
use crate::services::RPCRDMA_ONE_WAY;
use crate::threaded_client::ThreadedClient;
use crate::types::rpcrdma_buffer;

/// A Read chunk: an argument that the server reads by RDMA.
///
/// A chunk of 0 bytes is refused with EINVAL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_read_chunk {
    /// Offset of the argument in the unreduced arguments, in bytes. The bytes of earlier chunks count.
    pub position: usize,
    /// A buffer of `rpcrdma_alloc` whose bytes are the argument, without XDR round-up. NULL: `data` is copied.
    pub buffer: *mut rpcrdma_buffer,
    /// Bytes to be copied to the client's memory, if `buffer` is NULL.
    pub data: *const c_void,
    /// Bytes at `data`.
    pub len: usize,
}

/// A Write chunk: room for a result that the server writes by RDMA.
///
/// The chunk is for the next eligible result. A chunk of 0 bytes is refused with EINVAL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_write_chunk {
    /// A buffer of `rpcrdma_alloc`. NULL: `len` bytes of the client's memory.
    pub buffer: *mut rpcrdma_buffer,
    /// Bytes of the chunk, if `buffer` is NULL.
    pub len: usize,
}

/// A call to make.
///
/// For example `{.size = sizeof(rpcrdma_request), .procedure = 1, .args = &number, .args_len = sizeof number}`, or in
/// C++17 `rpcrdma_request q{}; q.size = sizeof q;`. All fields but `size` may be 0.
///
/// # Ownership
/// The functions that take a request copy it and the arguments. If the call starts, they also take the buffers of its
/// chunks, and the handles of these buffers become invalid. After the call, `rpcrdma_reply_take_read_chunk` and
/// `rpcrdma_reply_take_write_chunk` return the buffers. The exception is a call of version 2 that the library
/// retransmits because the server accepts no chunks or fewer Read chunks, or wants a longer Write chunk: the lent
/// buffers return to the pool, and the results are in other buffers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_request {
    /// `sizeof(rpcrdma_request)`.
    ///
    /// Later versions of this library have more fields at the end, and take requests of earlier versions. This version
    /// takes requests of later versions if the further fields are 0.
    pub size: usize,
    /// Procedure number.
    pub procedure: u32,
    /// `RPCRDMA_ONE_WAY`, or 0.
    pub flags: u32,
    /// A number that the completion of the call repeats.
    pub token: u64,
    /// XDR encoded arguments, without those in chunks.
    pub args: *const c_void,
    /// Bytes at `args`, a multiple of 4 as XDR requires.
    pub args_len: usize,
    /// Read chunks, at most 4, in the order of their positions. All have buffers, or none has.
    pub read_chunks: *const rpcrdma_read_chunk,
    /// Number of Read chunks.
    pub read_count: usize,
    /// Write chunks, at most 4, in the order of the results.
    pub write_chunks: *const rpcrdma_write_chunk,
    /// Number of Write chunks.
    pub write_count: usize,
    /// Bytes to reserve for inline results. With 0, the results must fit into one message; 256 bytes always do.
    ///
    /// More may arrive, so check the length of the results.
    pub max_reply: usize,
    /// Time-out in milliseconds; 0 or less: none.
    ///
    /// The thread that runs the connection ends the call. For a polled server that calls back, that is the
    /// application's own thread, and the time-out comes with the next poll. A call that timed out or was cancelled
    /// keeps its credit and the memory of its chunks until the server answers it, or the connection ends. The
    /// connection ends after `timeouts.progress` in which such calls held all credits, or in which
    /// `limits.max_abandoned` (32) of them were unanswered.
    pub timeout: c_int,
}

/// A client that can start calls.
pub(crate) trait CallStarter {
    /// A started call.
    type Started;
    /// Makes a call with inline arguments.
    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, ApiFailure>;
    /// Allocates memory of a chunk.
    fn alloc(&mut self, len: usize) -> Result<Buf, ApiFailure>;
    /// Starts a call.
    fn start(&mut self, call: ClientCall, token: u64) -> Self::Started;
}

impl CallStarter for LocalClient {
    type Started = Option<CallId>;

    #[inline(always)]
    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, ApiFailure> {
        let mut call = LocalClient::prepare(self, procedure, args.len())?;
        if !args.is_empty() {
            // `prepare` has reserved room for the arguments, so this cannot fail.
            let _ = call.put_args(args);
        }
        Ok(call)
    }

    fn alloc(&mut self, len: usize) -> Result<Buf, ApiFailure> {
        Ok(LocalClient::alloc(self, self.first(), len)?)
    }

    #[inline(always)]
    fn start(&mut self, call: ClientCall, token: u64) -> Option<CallId> {
        LocalClient::start(self, self.first(), call, token)
    }
}

/// Starting a call blocks until it ends.
impl CallStarter for Client {
    type Started = CallResult;

    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, ApiFailure> {
        if u32::try_from(args.len()).is_err() {
            // Such arguments are refused before they are copied.
            return Err(ApiFailure::new(
                Errno::MSGSIZE,
                format_args!("args_len is {}: no message has that many bytes", args.len()),
            ));
        }
        let call = ClientCall::new(procedure);
        Ok(if args.is_empty() { call } else { call.args(args) })
    }

    fn alloc(&mut self, len: usize) -> Result<Buf, ApiFailure> {
        Ok(Client::alloc(self, len)?)
    }

    fn start(&mut self, call: ClientCall, _: u64) -> CallResult {
        self.call(call)
    }
}

/// A client whose calls are started without blocking.
pub(crate) struct NonBlocking<'a>(pub(crate) &'a mut ThreadedClient);

impl CallStarter for NonBlocking<'_> {
    /// The token of the call, and the call.
    type Started = Result<(u64, Pending), FailedCall>;

    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, ApiFailure> {
        self.0.client().prepare(procedure, args)
    }

    fn alloc(&mut self, len: usize) -> Result<Buf, ApiFailure> {
        Ok(self.0.blocking_client()?.alloc(len)?)
    }

    fn start(&mut self, call: ClientCall, token: u64) -> Self::Started {
        self.0.client().start(call).map(|call| (token, call))
    }
}

/// Starts the call that a request describes.
///
/// # Errors
/// The request is null or invalid, or the client has no memory for the call. The buffers of the request are untouched.
///
/// # Safety
/// `request` is null, or points to `size` readable bytes, and each of its arrays has its stated length. For its buffers
/// see [`take`].
#[inline(always)]
pub(crate) unsafe fn start<C: CallStarter>(
    client: &mut C,
    request: *const rpcrdma_request,
) -> Result<C::Started, ApiFailure> {
    if request.is_null() {
        return Err(null_argument("request"));
    }
    // SAFETY: the caller guarantees it: each version of the struct begins with its size.
    if unsafe { request.cast::<usize>().read() } != size_of::<rpcrdma_request>() {
        // SAFETY: the caller guarantees it.
        let request = unsafe { read_other_version(request) }?;
        // SAFETY: the caller guarantees it.
        return unsafe { start_sized(client, &request) };
    }
    // SAFETY: the request has the size of this version.
    let request = unsafe { &*request };
    // SAFETY: the caller guarantees it.
    unsafe { start_sized(client, request) }
}

/// Starts the call of a request that has the size of this version.
///
/// # Safety
/// See [`start`].
#[inline(always)]
unsafe fn start_sized<C: CallStarter>(client: &mut C, request: &rpcrdma_request) -> Result<C::Started, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let args = unsafe { array::<u8>("args", request.args.cast(), request.args_len) }?;
    if !args.len().is_multiple_of(4) {
        return Err(unaligned_args(args.len()));
    }
    let is_inline = request.read_count | request.write_count | request.max_reply == 0;
    if is_inline && request.flags == 0 && request.timeout == 0 {
        // This result is not wrapped in another one, so that it stays in registers as far as possible.
        let call = client.prepare(request.procedure, args)?;
        return Ok(client.start(call, request.token));
    }
    // SAFETY: the caller guarantees it.
    unsafe { start_with_options(client, request, args) }
}

/// Reads a request of another version of the struct.
///
/// # Errors
/// Its size is not that of any version, or it uses fields that only a later version has.
///
/// # Safety
/// The request has `size` readable bytes.
#[cold]
#[inline(never)]
unsafe fn read_other_version(request: *const rpcrdma_request) -> Result<rpcrdma_request, ApiFailure> {
    // SAFETY: the caller guarantees it: each version of the struct begins with its size.
    let (size, known) = (unsafe { request.cast::<usize>().read() }, size_of::<rpcrdma_request>());
    if !(known..=LONGEST_REQUEST).contains(&size) {
        return Err(ApiFailure::argument(format_args!(
            "size of the rpcrdma_request is {size}, instead of {known}: set it to sizeof(rpcrdma_request)"
        )));
    }
    // SAFETY: the caller guarantees it.
    let later = unsafe { array::<u8>("request", request.cast(), size) }?;
    if later[known..].iter().any(|byte| *byte != 0) {
        return Err(ApiFailure::argument(format_args!(
            "the rpcrdma_request has {size} bytes, and those beyond {known} are not 0: this version of the library \
             lacks their fields"
        )));
    }
    // SAFETY: the request begins with the fields of this version.
    Ok(unsafe { request.read() })
}

/// Bytes of the longest request that a later version may have.
const LONGEST_REQUEST: usize = 4096;

#[cold]
#[inline(never)]
fn unaligned_args(len: usize) -> ApiFailure {
    ApiFailure::argument(format_args!("args_len is {len}: XDR data is a multiple of 4 bytes long, padded with zeroes"))
}

/// Checks the length of a Write chunk or a reply.
///
/// # Errors
/// The protocol has no message or chunk of that length.
fn check_length(name: &str, len: usize) -> Result<u32, ApiFailure> {
    u32::try_from(len).map_err(|_| {
        ApiFailure::new(Errno::MSGSIZE, format_args!("{name} is {len} bytes: the protocol has at most {}", u32::MAX))
    })
}

/// Starts a call with flags, chunks, a reply limit or a time-out, which most calls do not have.
///
/// # Safety
/// See [`start`].
#[inline(never)]
unsafe fn start_with_options<C: CallStarter>(
    client: &mut C,
    request: &rpcrdma_request,
    args: &[u8],
) -> Result<C::Started, ApiFailure> {
    if request.flags & !RPCRDMA_ONE_WAY != 0 {
        return Err(ApiFailure::argument(format_args!("flags is {:#x}: expected 0 or RPCRDMA_ONE_WAY", request.flags)));
    }
    // SAFETY: the caller guarantees it.
    let reads = unsafe { array("read_chunks", request.read_chunks, request.read_count) }?;
    // SAFETY: the caller guarantees it.
    let writes = unsafe { array("write_chunks", request.write_chunks, request.write_count) }?;
    // All lengths are checked before the first buffer ends.
    check_length("max_reply", request.max_reply)?;
    for chunk in writes.iter().filter(|chunk| chunk.buffer.is_null()) {
        check_length("len of a Write chunk", chunk.len)?;
    }
    let mut unchecked = Some((reads, writes));
    let mut call = client.prepare(request.procedure, args)?;
    for chunk in reads {
        // SAFETY: the caller guarantees it.
        call = call.read_chunk(chunk.position, unsafe { read_chunk_memory(client, chunk, &mut unchecked) }?);
    }
    for chunk in writes {
        call = match chunk.buffer.is_null() {
            true => call.write_chunk(chunk.len as u32),
            // SAFETY: the caller guarantees it.
            false => call.write_chunk_into(unsafe { take_buffer(chunk.buffer, &mut unchecked) }?),
        };
    }
    if let Ok(milliseconds @ 1..) = u64::try_from(request.timeout) {
        call = call.timeout(Duration::from_millis(milliseconds));
    }
    if request.flags == RPCRDMA_ONE_WAY {
        call = call.one_way();
    }
    Ok(client.start(call.expect_reply(request.max_reply), request.token))
}

/// Returns the buffers of a call that did not start to their handles, which [`take_buffer`] has ended.
///
/// # Safety
/// See [`start`]. This is called with the same request, on the same thread, right after the call failed to start.
#[cold]
#[inline(never)]
pub(crate) unsafe fn return_buffers(request: *const rpcrdma_request, returned: &mut ReturnedBuffers) {
    // SAFETY: the request was read before; the caller guarantees it.
    let Ok(request) = (unsafe { read_other_version(request) }) else { return };
    // SAFETY: the caller guarantees it.
    let reads = unsafe { array("read_chunks", request.read_chunks, request.read_count) }.unwrap_or_default();
    // SAFETY: the caller guarantees it.
    let writes = unsafe { array("write_chunks", request.write_chunks, request.write_count) }.unwrap_or_default();
    for (chunk, buf) in reads.iter().zip(returned.take_sent()) {
        if !chunk.buffer.is_null() {
            // SAFETY: the caller guarantees it.
            unsafe { restore_handle(chunk.buffer, BufferMemory::Owned(buf)) };
        }
    }
    let bufs: Vec<Buf> = returned.take_chunks().collect();
    // Write chunks without a buffer were allocated in their order, up to the first that failed.
    let lent = writes.iter().filter(|chunk| !chunk.buffer.is_null()).count();
    let (mut allocated, mut bufs) = (bufs.len().saturating_sub(lent), bufs.into_iter());
    for chunk in writes {
        if !chunk.buffer.is_null() {
            let Some(buf) = bufs.next() else { return };
            // SAFETY: the caller guarantees it.
            unsafe { restore_handle(chunk.buffer, BufferMemory::Owned(buf)) };
        } else if allocated > 0 {
            allocated -= 1;
            drop(bufs.next());
        }
    }
}

/// Takes or allocates the memory of a Read chunk.
///
/// # Safety
/// See [`start`].
#[inline(always)]
unsafe fn read_chunk_memory<C: CallStarter>(
    client: &mut C,
    chunk: &rpcrdma_read_chunk,
    unchecked: &mut Option<RequestChunks<'_>>,
) -> Result<Buf, ApiFailure> {
    if !chunk.buffer.is_null() {
        // SAFETY: the caller guarantees it.
        return unsafe { take_buffer(chunk.buffer, unchecked) };
    }
    // SAFETY: the caller guarantees it.
    let data = unsafe { array::<u8>("data", chunk.data.cast(), chunk.len) }?;
    let mut copy = client.alloc(data.len())?;
    copy.copy_from_slice(data);
    Ok(copy)
}

/// Read chunks and Write chunks of a request.
type RequestChunks<'a> = (&'a [rpcrdma_read_chunk], &'a [rpcrdma_write_chunk]);

/// Takes the memory of a chunk's buffer, and invalidates the buffer's handle.
///
/// All buffers of the request are checked before the first handle becomes invalid.
///
/// # Safety
/// See [`take`].
#[inline(never)]
unsafe fn take_buffer(
    buffer: *mut rpcrdma_buffer,
    unchecked: &mut Option<RequestChunks<'_>>,
) -> Result<Buf, ApiFailure> {
    if let Some((reads, writes)) = unchecked.take() {
        // SAFETY: the caller guarantees it.
        unsafe { check_buffers(reads, writes) }?;
    }
    // SAFETY: the caller guarantees it.
    unsafe { take(buffer) }?.into_client_buffer()
}

/// Checks whether the buffers of chunks can be taken.
///
/// # Safety
/// See [`start`].
unsafe fn check_buffers(reads: &[rpcrdma_read_chunk], writes: &[rpcrdma_write_chunk]) -> Result<(), ApiFailure> {
    if reads.iter().any(|chunk| chunk.buffer.is_null() != reads[0].buffer.is_null()) {
        // If there is no memory for a copy, the call does not start, and buffers taken before would be lost.
        return Err(ApiFailure::argument("some Read chunks have buffers, and others have none: expected all or none"));
    }
    let buffers = reads.iter().map(|chunk| chunk.buffer).chain(writes.iter().map(|chunk| chunk.buffer));
    let buffers = buffers.filter(|buffer| !buffer.is_null());
    if reads.len().max(writes.len()) > MAX_CHUNKS {
        return Err(ApiFailure::argument(format_args!(
            "{} Read chunks and {} Write chunks exceed {MAX_CHUNKS} each",
            reads.len(),
            writes.len()
        )));
    }
    for buffer in buffers.clone() {
        if buffers.clone().filter(|&other| other == buffer).count() > 1 {
            return Err(ApiFailure::argument("a buffer belongs to two chunks"));
        }
        // SAFETY: the caller guarantees it.
        let memory = unsafe { lend(buffer) }?;
        if !matches!(*memory, BufferMemory::Owned(_)) {
            return Err(ApiFailure::argument("a chunk's buffer is read-only: use one from rpcrdma_alloc"));
        }
    }
    Ok(())
}
