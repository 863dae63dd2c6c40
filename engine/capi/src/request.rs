#![expect(unsafe_code, reason = "a request of C has pointers")]
//! Calls that clients make.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use rpcrdma::client::{CallId, ClientCall, LocalClient, Pending, Returned};
use rpcrdma::service::MAX_CHUNKS;
use rpcrdma::{Buf, CallResult, Client, FailedCall};
use rustix::io::Errno;

use crate::arguments::{array, null};
use crate::calling::CallingClient;
use crate::failure::Failure;
use crate::handle::{lend, revive, take};
use crate::memory::Memory;
use crate::services::RPCRDMA_ONE_WAY;
use crate::types::rpcrdma_buffer;

/// A Read chunk: an argument that the server reads by RDMA. One of 0 bytes is refused: EINVAL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_read_chunk {
    /// Byte of the arguments where it belongs. The bytes of chunks before it count.
    pub position: usize,
    /// A buffer of `rpcrdma_alloc`: its bytes are the argument, without XDR round-up. NULL: `data` is copied.
    pub buffer: *mut rpcrdma_buffer,
    /// Bytes to be copied to the client's memory, if `buffer` is NULL.
    pub data: *const c_void,
    /// Their number.
    pub len: usize,
}

/// A Write chunk: room for the next eligible result, which the server writes by RDMA. One of 0 bytes is refused: EINVAL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_write_chunk {
    /// A buffer of `rpcrdma_alloc`. NULL: `len` bytes of the client's memory.
    pub buffer: *mut rpcrdma_buffer,
    /// Bytes, if `buffer` is NULL.
    pub len: usize,
}

/// A call to make: `{.size = sizeof(rpcrdma_request), .procedure = 1, .args = &number, .args_len = sizeof number}`. In
/// C++17: `rpcrdma_request q{}; q.size = sizeof q;`.
///
/// All but `size` may be 0. The functions that take it copy it and the arguments. They take the buffers of its chunks,
/// which end, but only if the call starts. `rpcrdma_reply_take_read_chunk` and `rpcrdma_reply_take_write_chunk` have
/// them after the call. The exception is a call of version 2 that the library sends again because the server takes no
/// chunks, fewer Read chunks, or wants a longer Write chunk: the lent buffers return to the pool, and the results are in
/// others.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_request {
    /// `sizeof(rpcrdma_request)`. Later versions of this library have more fields at the end, and take requests of
    /// earlier ones. This version takes later requests whose further fields are 0.
    pub size: usize,
    /// Procedure number.
    pub procedure: u32,
    /// `RPCRDMA_ONE_WAY`, or 0.
    pub flags: u32,
    /// Comes back in the completion.
    pub token: u64,
    /// XDR encoded arguments, without those in chunks.
    pub args: *const c_void,
    /// Their bytes, a multiple of 4 as XDR requires.
    pub args_len: usize,
    /// Read chunks, at most 4, in the order of their positions. All have buffers, or none.
    pub read_chunks: *const rpcrdma_read_chunk,
    /// Their number.
    pub read_count: usize,
    /// Write chunks, at most 4, in the order of the results.
    pub write_chunks: *const rpcrdma_write_chunk,
    /// Their number.
    pub write_count: usize,
    /// Bytes of inline results that there is room for; 0: what fits into one message, of which rely on 256 only. More
    /// may arrive: check the length of the results.
    pub max_reply: usize,
    /// Time-out in milliseconds; 0 or less: none. The thread that runs the connection ends the call: the application's
    /// own, for a polled server that calls back, where the time-out comes with the next poll. A call that timed out, or
    /// was cancelled, keeps its credit and the memory of its chunks until the server answers it, or the connection ends.
    /// With `limits.max_abandoned` (32) of these, or all credits, unanswered for `timeouts.progress`, the connection
    /// ends.
    pub timeout: c_int,
}

/// A client that starts calls.
pub(crate) trait Starts {
    /// What a started call is.
    type Started;
    /// A call, with arguments.
    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, Failure>;
    /// Memory of a chunk.
    fn alloc(&mut self, len: usize) -> Result<Buf, Failure>;
    fn start(&mut self, call: ClientCall, token: u64) -> Self::Started;
}

impl Starts for LocalClient {
    type Started = Option<CallId>;

    #[inline(always)]
    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, Failure> {
        let mut call = LocalClient::prepare(self, procedure, args.len())?;
        if !args.is_empty() {
            // The message has room for them.
            let _ = call.put_args(args);
        }
        Ok(call)
    }

    fn alloc(&mut self, len: usize) -> Result<Buf, Failure> {
        Ok(LocalClient::alloc(self, self.first(), len)?)
    }

    #[inline(always)]
    fn start(&mut self, call: ClientCall, token: u64) -> Option<CallId> {
        LocalClient::start(self, self.first(), call, token)
    }
}

/// Blocks until the call ends.
impl Starts for Client {
    type Started = CallResult;

    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, Failure> {
        if u32::try_from(args.len()).is_err() {
            // Not copied first.
            return Err(Failure::new(
                Errno::MSGSIZE,
                format_args!("args_len is {}: no message has as many", args.len()),
            ));
        }
        let call = ClientCall::new(procedure);
        Ok(if args.is_empty() { call } else { call.args(args) })
    }

    fn alloc(&mut self, len: usize) -> Result<Buf, Failure> {
        Ok(Client::alloc(self, len)?)
    }

    fn start(&mut self, call: ClientCall, _: u64) -> CallResult {
        self.call(call)
    }
}

/// A client whose calls are started without blocking.
pub(crate) struct NotBlocking<'a>(pub(crate) &'a mut CallingClient);

impl Starts for NotBlocking<'_> {
    /// The token of the call, and the call.
    type Started = Result<(u64, Pending), FailedCall>;

    fn prepare(&mut self, procedure: u32, args: &[u8]) -> Result<ClientCall, Failure> {
        self.0.client().prepare(procedure, args)
    }

    fn alloc(&mut self, len: usize) -> Result<Buf, Failure> {
        Ok(self.0.waiting()?.alloc(len)?)
    }

    fn start(&mut self, call: ClientCall, token: u64) -> Self::Started {
        self.0.client().start(call).map(|call| (token, call))
    }
}

/// Starts the call that a request describes.
///
/// # Errors
/// It is null, or has what it may not have; or the client has no memory for it. Then its buffers are untouched.
///
/// # Safety
/// `request` is null, or has as many bytes as its `size` says, and its pointers have as many items as it says; its
/// buffers are as for [`take`].
#[inline(always)]
pub(crate) unsafe fn start<C: Starts>(client: &mut C, request: *const rpcrdma_request) -> Result<C::Started, Failure> {
    if request.is_null() {
        return Err(null("request"));
    }
    // SAFETY: the caller's promise: each version of the struct begins with its size.
    if unsafe { request.cast::<usize>().read() } != size_of::<rpcrdma_request>() {
        // SAFETY: the caller's promise.
        let request = unsafe { sized(request) }?;
        // SAFETY: the caller's promise.
        return unsafe { start_sized(client, &request) };
    }
    // SAFETY: it has the size of this version.
    let request = unsafe { &*request };
    // SAFETY: the caller's promise.
    unsafe { start_sized(client, request) }
}

/// As [`start`], for a request of this version's size.
///
/// # Safety
/// As [`start`].
#[inline(always)]
unsafe fn start_sized<C: Starts>(client: &mut C, request: &rpcrdma_request) -> Result<C::Started, Failure> {
    // SAFETY: the caller's promise.
    let args = unsafe { array::<u8>("args", request.args.cast(), request.args_len) }?;
    if !args.len().is_multiple_of(4) {
        return Err(unaligned(args.len()));
    }
    let is_plain = request.read_count | request.write_count | request.max_reply == 0;
    if is_plain && request.flags == 0 && request.timeout == 0 {
        // In registers, as far as possible: it is not part of another result.
        let call = client.prepare(request.procedure, args)?;
        return Ok(client.start(call, request.token));
    }
    // SAFETY: the caller's promise.
    unsafe { start_unusual(client, request, args) }
}

/// A request of another version, in the form of this one.
///
/// # Errors
/// It has no size, or that of no version; or it uses what only a later version has.
///
/// # Safety
/// It has as many bytes as its `size` says.
#[cold]
#[inline(never)]
unsafe fn sized(request: *const rpcrdma_request) -> Result<rpcrdma_request, Failure> {
    // SAFETY: the caller's promise: each version begins with its size.
    let (size, own) = (unsafe { request.cast::<usize>().read() }, size_of::<rpcrdma_request>());
    if !(own..=LONGEST_REQUEST).contains(&size) {
        return Err(Failure::argument(format_args!(
            "size of the rpcrdma_request is {size}, instead of {own}: set it to sizeof(rpcrdma_request)"
        )));
    }
    // SAFETY: the caller's promise.
    let later = unsafe { array::<u8>("request", request.cast(), size) }?;
    if later[own..].iter().any(|byte| *byte != 0) {
        return Err(Failure::argument(format_args!(
            "the rpcrdma_request has {size} bytes, and those beyond {own} are not 0: this version of the library lacks \
             their fields"
        )));
    }
    // SAFETY: it begins with the fields of this version.
    Ok(unsafe { request.read() })
}

/// Bytes of the longest request that a later version may have.
const LONGEST_REQUEST: usize = 4096;

#[cold]
#[inline(never)]
fn unaligned(len: usize) -> Failure {
    Failure::argument(format_args!("args_len is {len}: XDR data is a multiple of 4 bytes long, padded with zeroes"))
}

/// The length of a Write chunk or a reply.
///
/// # Errors
/// No message or chunk of the protocol has as many bytes.
fn length(name: &str, len: usize) -> Result<u32, Failure> {
    u32::try_from(len).map_err(|_| {
        Failure::new(Errno::MSGSIZE, format_args!("{name} is {len} bytes: the protocol has at most {}", u32::MAX))
    })
}

/// As [`start`], with what most calls do not have.
///
/// # Safety
/// As [`start`].
#[inline(never)]
unsafe fn start_unusual<C: Starts>(
    client: &mut C,
    request: &rpcrdma_request,
    args: &[u8],
) -> Result<C::Started, Failure> {
    if request.flags & !RPCRDMA_ONE_WAY != 0 {
        return Err(Failure::argument("unknown flags"));
    }
    // SAFETY: the caller's promise.
    let reads = unsafe { array("read_chunks", request.read_chunks, request.read_count) }?;
    // SAFETY: the caller's promise.
    let writes = unsafe { array("write_chunks", request.write_chunks, request.write_count) }?;
    // Before the first buffer ends.
    length("max_reply", request.max_reply)?;
    for chunk in writes.iter().filter(|chunk| chunk.buffer.is_null()) {
        length("len of a Write chunk", chunk.len)?;
    }
    let mut unchecked = Some((reads, writes));
    let mut call = client.prepare(request.procedure, args)?;
    for chunk in reads {
        // SAFETY: the caller's promise.
        call = call.read_chunk(chunk.position, unsafe { argument(client, chunk, &mut unchecked) }?);
    }
    for chunk in writes {
        call = match chunk.buffer.is_null() {
            true => call.write_chunk(chunk.len as u32),
            // SAFETY: the caller's promise.
            false => call.write_chunk_into(unsafe { taken(chunk.buffer, &mut unchecked) }?),
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

/// Gives the buffers of a call that did not start back to their handles, which [`taken`] has ended.
///
/// # Safety
/// As [`start`], with the request that was to start it, on the same thread, and right after that.
#[cold]
#[inline(never)]
pub(crate) unsafe fn return_buffers(request: *const rpcrdma_request, returned: &mut Returned) {
    // SAFETY: it was started before; the caller's promise.
    let Ok(request) = (unsafe { sized(request) }) else { return };
    // SAFETY: the caller's promise.
    let reads = unsafe { array("read_chunks", request.read_chunks, request.read_count) }.unwrap_or_default();
    // SAFETY: the caller's promise.
    let writes = unsafe { array("write_chunks", request.write_chunks, request.write_count) }.unwrap_or_default();
    for (chunk, buf) in reads.iter().zip(returned.take_sent()) {
        if !chunk.buffer.is_null() {
            // SAFETY: the caller's promise.
            unsafe { revive(chunk.buffer, Memory::Own(buf)) };
        }
    }
    let bufs: Vec<Buf> = returned.take_chunks().collect();
    // Those given by length were allocated in their order, up to the first that failed.
    let own = writes.iter().filter(|chunk| !chunk.buffer.is_null()).count();
    let (mut allocated, mut bufs) = (bufs.len().saturating_sub(own), bufs.into_iter());
    for chunk in writes {
        if !chunk.buffer.is_null() {
            let Some(buf) = bufs.next() else { return };
            // SAFETY: the caller's promise.
            unsafe { revive(chunk.buffer, Memory::Own(buf)) };
        } else if allocated > 0 {
            allocated -= 1;
            drop(bufs.next());
        }
    }
}

/// The memory of a Read chunk.
///
/// # Safety
/// As [`start`].
#[inline(always)]
unsafe fn argument<C: Starts>(
    client: &mut C,
    chunk: &rpcrdma_read_chunk,
    unchecked: &mut Option<Chunks<'_>>,
) -> Result<Buf, Failure> {
    if !chunk.buffer.is_null() {
        // SAFETY: the caller's promise.
        return unsafe { taken(chunk.buffer, unchecked) };
    }
    // SAFETY: the caller's promise.
    let data = unsafe { array::<u8>("data", chunk.data.cast(), chunk.len) }?;
    let mut copy = client.alloc(data.len())?;
    copy.copy_from_slice(data);
    Ok(copy)
}

/// Those of a request.
type Chunks<'a> = (&'a [rpcrdma_read_chunk], &'a [rpcrdma_write_chunk]);

/// The memory of a chunk's buffer, which ends. Before the first one ends, all are checked.
///
/// # Safety
/// As for [`take`].
#[inline(never)]
unsafe fn taken(buffer: *mut rpcrdma_buffer, unchecked: &mut Option<Chunks<'_>>) -> Result<Buf, Failure> {
    if let Some((reads, writes)) = unchecked.take() {
        // SAFETY: the caller's promise.
        unsafe { check(reads, writes) }?;
    }
    // SAFETY: the caller's promise.
    unsafe { take(buffer) }?.into_own()
}

/// Whether the buffers of chunks can be taken.
///
/// # Safety
/// As [`start`].
unsafe fn check(reads: &[rpcrdma_read_chunk], writes: &[rpcrdma_write_chunk]) -> Result<(), Failure> {
    if reads.iter().any(|chunk| chunk.buffer.is_null() != reads[0].buffer.is_null()) {
        // Without memory for a copy the call does not start: the buffers before it would be lost.
        return Err(Failure::argument("all Read chunks have buffers, or none"));
    }
    let buffers = reads.iter().map(|chunk| chunk.buffer).chain(writes.iter().map(|chunk| chunk.buffer));
    let buffers = buffers.filter(|buffer| !buffer.is_null());
    if reads.len().max(writes.len()) > MAX_CHUNKS {
        return Err(Failure::argument(format_args!("more than {MAX_CHUNKS} Read or Write chunks")));
    }
    for buffer in buffers.clone() {
        if buffers.clone().filter(|&other| other == buffer).count() > 1 {
            return Err(Failure::argument("a buffer belongs to two chunks"));
        }
        // SAFETY: the caller's promise.
        let memory = unsafe { lend(buffer) }?;
        if !matches!(*memory, Memory::Own(_)) {
            return Err(Failure::argument("a chunk's buffer is only read: use one of rpcrdma_alloc"));
        }
    }
    Ok(())
}
