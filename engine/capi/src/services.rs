#![expect(unsafe_code, reason = "a table of C has function pointers, and contexts that its functions share")]
//! Procedures whose handlers are functions of C.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rpcrdma::server::PeerHook;
use rpcrdma::service::duplicate_requests::{
    ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig, by_address, by_host,
};
use rpcrdma::service::{Application, MAX_CHUNKS, MAX_PROCEDURE, ShardSetup, ShardTask};
use rpcrdma::{Arena, Procedure, Refusal, ServerCall, Services};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;

use crate::call::{ResultPart, ServedCall};
use crate::failure::ApiFailure;
use crate::handle::{Borrowed, TemporaryTags, new_handle, share, with_temporary_handle};
use crate::peers::{self, rpcrdma_peer_hook};
use crate::read_places::ReadPlaces;
use crate::types::{rpcrdma_arena, rpcrdma_call};

/// Runs a call, and answers it with its return value.
///
/// No exception of C++ may leave the handler: the process would end.
///
/// # Parameters
/// - `context`: `context` of the procedure.
/// - `call`: the call.
/// - `args`, `args_len`: the inline arguments, in place.
/// - `results`: room for at least `max_reply` bytes of inline results, which are not initialized.
/// - `results_len`: 0 at first. The handler writes all inline results at `results`, and stores their number of bytes
///   here. The number must be a multiple of 4, as XDR requires: pad with zeroes, or the caller gets SYSTEM_ERR. A
///   handler that uses `rpcrdma_call_reply` leaves the number 0.
///
/// # Ownership
/// The call, its arguments and the room for results are valid until the handler returns.
///
/// # Threads
/// The handler runs on a shard, or on a worker with `RPCRDMA_ON_WORKERS`. Several threads may run it concurrently.
///
/// # Returns
/// - 0: the results are complete. But if a function failed to write a part of the results, and no later function wrote
///   that part, 0 is treated as the failed function's code.
/// - an `RPCRDMA_` status: refuses the call with it.
/// - -EMSGSIZE, if the last function that failed to write results of this call returned it because the caller's Write
///   chunk is shorter than a result that `max_write` allows: the caller gets a transport error. In version 2 its client
///   retransmits the call with a longer chunk; in version 1 the call fails with EPROTO.
/// - -ENOENT, if that function returned it because the caller does not offer a Write chunk that the procedure declares:
///   the caller gets GARBAGE_ARGS.
/// - any other negative code, including one that no such function returned: the caller gets SYSTEM_ERR, and the log has
///   the cause, or the code.
/// - any other number: the caller gets SYSTEM_ERR, and the log has the number.
pub type rpcrdma_handler = Option<
    unsafe extern "C-unwind" fn(
        context: *mut c_void,
        call: *mut rpcrdma_call,
        args: *const c_void,
        args_len: usize,
        results: *mut c_void,
        results_len: *mut usize,
    ) -> c_int,
>;

/// Takes a call that `rpcrdma_call_answer` answers, now or later.
///
/// # Parameters
/// - `context`: `context` of the procedure.
/// - `call`: the call.
/// - `args`, `args_len`: the inline arguments, in place.
///
/// # Ownership
/// The call is the application's, with its arguments, until `rpcrdma_call_answer`.
///
/// # Threads
/// The handler runs on a shard, and must not block. Any thread may answer the call.
pub type rpcrdma_deferred_handler = Option<
    unsafe extern "C-unwind" fn(context: *mut c_void, call: *mut rpcrdma_call, args: *const c_void, args_len: usize),
>;

/// The procedure runs on workers, so its handler may block. `server.workers` (default 0) must be at least 1.
pub const RPCRDMA_ON_WORKERS: u32 = 1;
/// Calls of the procedure have a duplicate request cache.
///
/// A call that is retransmitted to the same server does not run again. A new server process starts with an empty
/// cache. The cache identifies a client by its host and its credential (`client.auth_sys`). Each client of this library
/// has its own stamp in the credential, so that two clients of one process are distinct. Calls without a credential run
/// again. A cached procedure has no Write chunks. The cache has the default sizes of `DuplicateRequestCacheConfig` in
/// `tuning.md`, which C cannot change.
pub const RPCRDMA_CACHED: u32 = 2;
/// Calls have no reply, and end once they are sent.
///
/// The caller does not learn whether such a call has run. The procedure and the request both need the flag: without it
/// in the request, the call ends only by its time-out. One-way calls with chunks end with EINVAL and are not sent, and
/// so do all one-way calls on a connection of version 1, which does not have them.
pub const RPCRDMA_ONE_WAY: u32 = 4;
/// Write chunks are filled from the application's memory (`rpcrdma_call_result`), not the library's.
pub const RPCRDMA_OWN_RESULTS: u32 = 8;
/// The inline arguments have no length word for an argument in a Read chunk.
///
/// Without this flag, the library compares the length word before each Read chunk's position with the length of the
/// chunk, and refuses a call with GARBAGE_ARGS if they differ.
pub const RPCRDMA_UNCOUNTED: u32 = 16;

/// A procedure of a table.
///
/// For example `{.number = 1, .handler = get, .max_reply = 16}`. A procedure has either a handler or a deferred
/// handler. All other fields may be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_procedure {
    /// Procedure number.
    pub number: u32,
    /// `RPCRDMA_ON_WORKERS` and other flags of procedures, or 0.
    pub flags: u32,
    /// Answers a call by its return value.
    pub handler: rpcrdma_handler,
    /// Answers a call later.
    pub deferred: rpcrdma_deferred_handler,
    /// First argument of the handler. Any thread may use it.
    pub context: *mut c_void,
    /// Bytes that the inline results of a reply may have, up to 1 GiB; 0 means 256. The library may provide more room.
    pub max_reply: usize,
    /// Maximum Read chunks of a call, up to 4. They are its eligible arguments (RFC 8166 §6).
    pub read_chunks: u32,
    /// Maximum Write chunks of a call, up to 4. They are its eligible results.
    pub write_chunks: u32,
    /// Maximum bytes of a Read chunk: up to 1 GiB, or with `reads_into` 4 GiB less 1.
    pub max_read: usize,
    /// Maximum bytes of a Write chunk: up to 1 GiB, or with `RPCRDMA_OWN_RESULTS` 4 GiB less 1.
    pub max_write: usize,
    /// Memory for the data of Read chunks, or NULL for the library's.
    ///
    /// The memory is divided into places of `max_read` bytes, rounded up to a multiple of 4096. A place is free again
    /// once the call of its chunk is answered, and the buffer that took the chunk is freed. While no place is free,
    /// chunks arrive in the library's memory.
    pub reads_into: *mut rpcrdma_arena,
}

/// Does work on a shard's thread, in each turn of the shard.
///
/// The task must not block.
///
/// # Parameters
/// - `context`: the argument of `rpcrdma_services_task`.
/// - `shard`: the number of the shard.
///
/// # Returns
/// - 0: there was no work.
/// - any other number: there was work.
pub type rpcrdma_task = Option<unsafe extern "C-unwind" fn(context: *mut c_void, shard: c_uint) -> c_int>;

/// The client of a cached call, identified by its host, so that it keeps its entries when it reconnects.
///
/// `None` without a credential.
fn cache_client(call: &ServerCall) -> Option<ClientId> {
    let (flavor, _) = call.info().credential();
    if flavor == 0 { None } else { by_host(call).or_else(|| by_address(call)) }
}

/// A pointer that is passed to functions of the application.
#[derive(Clone, Copy)]
pub(crate) struct CallbackContext(*mut c_void);

// SAFETY: the interface says that functions get it on any thread.
unsafe impl Send for CallbackContext {}
// SAFETY: the interface says that several threads may use it concurrently.
unsafe impl Sync for CallbackContext {}

impl CallbackContext {
    /// The pointer. Closures that call this capture the whole struct, which is `Send`.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Bytes of the longest buffer of `memory.bulk_buffers` and `memory.long_buffers`.
const LONGEST_BUFFER: usize = 1 << 30;
/// Maximum bytes of a chunk, whose length is an XDR unsigned integer.
const LONGEST_CHUNK: usize = u32::MAX as usize;

/// A version of a program, for error texts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProgramVersion {
    pub(crate) program: u32,
    pub(crate) version: u32,
}

impl fmt::Display for ProgramVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, version } = *self;
        // Registered numbers are decimal, as in the texts of the engine.
        match program {
            ..0x2000_0000 => write!(f, "program {program}, version {version}"),
            _ => write!(f, "program {program:#x}, version {version}"),
        }
    }
}

/// A procedure of a program, for error texts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProcedureId {
    program: ProgramVersion,
    number: u32,
}

impl fmt::Display for ProcedureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "procedure {} of {}", self.number, self.program)
    }
}

/// Value of a services handle: procedures, the task of each shard, and the peer hook.
#[derive(Default)]
pub(crate) struct ServiceTable {
    services: Services,
    known: HashSet<ProcedureId>,
    /// The first procedure that runs on workers.
    on_workers: Option<ProcedureId>,
    cache: Option<Arc<DuplicateRequestCache>>,
    task: Option<TaskFunctions>,
    peers: Option<PeerHook>,
    /// Memory for Read chunks.
    arenas: Vec<Arena>,
}

/// The functions of `rpcrdma_services_task`.
#[derive(Clone, Copy)]
struct TaskFunctions {
    poll: unsafe extern "C-unwind" fn(*mut c_void, c_uint) -> c_int,
    descriptor: rpcrdma_task,
    context: CallbackContext,
}

impl ServiceTable {
    pub(crate) fn services(&self) -> Services {
        self.services.clone()
    }

    /// A procedure that runs on workers.
    pub(crate) fn on_workers(&self) -> Option<ProcedureId> {
        self.on_workers
    }

    pub(crate) fn has_task(&self) -> bool {
        self.task.is_some()
    }

    /// Adds the arenas of Read chunks to those of a server, or of a client that is called back.
    pub(crate) fn add_arenas(&self, to: &mut Vec<Arena>) {
        for arena in &self.arenas {
            if to.iter().all(|known| known.id() != arena.id()) {
                to.push(arena.clone());
            }
        }
    }

    /// Adds a procedure.
    ///
    /// # Errors
    /// EEXIST: the procedure was added before. EINVAL, EBADF or EBUSY: its declaration or its arena is invalid. The
    /// text names the procedure.
    pub(crate) fn add(&mut self, program: ProgramVersion, entry: &rpcrdma_procedure) -> Result<(), ApiFailure> {
        let name = ProcedureId { program, number: entry.number };
        if self.known.contains(&name) {
            return Err(ApiFailure::new(Errno::EXIST, "it was added before").with_subject(name));
        }
        let procedure = self.procedure(entry).map_err(|failure| failure.with_subject(name))?;
        self.services.add(program.program, program.version, entry.number, procedure);
        if entry.flags & RPCRDMA_ON_WORKERS != 0 {
            self.on_workers.get_or_insert(name);
        }
        self.known.insert(name);
        Ok(())
    }

    /// Makes the procedure of an entry.
    fn procedure(&mut self, entry: &rpcrdma_procedure) -> Result<Procedure, ApiFailure> {
        let number = entry.number;
        let wrong = |text: &str| Err(ApiFailure::argument(text));
        let context = CallbackContext(entry.context);
        let procedure: Procedure = match (entry.handler, entry.deferred) {
            (Some(handler), None) => Procedure::new(move |call| {
                let (args, mut writer) = call.args_and_writer();
                let (args, args_len, results) = (args.as_ptr().cast(), args.len(), writer.as_mut_ptr().cast());
                // SAFETY: the handle with the call ends within the closure, which borrows the call.
                let call = ServedCall::handled(unsafe { Borrowed::new(call) });
                let run = |call| {
                    let mut len = 0;
                    // SAFETY: the caller of `rpcrdma_services_add` guarantees that the handler may be called.
                    let status = unsafe { handler(context.get(), call, args, args_len, results, &raw mut len) };
                    (status, len)
                };
                with_temporary_handle(TemporaryTags::next_of_thread(), call, run, |(status, len), call| {
                    if status == 0 && len > 0 {
                        count_results(call, len)?;
                    }
                    call.outcome(status)
                })
            }),
            (None, Some(deferred)) => Procedure::deferred(move |call| {
                let (args, len) = (call.args().as_ptr().cast(), call.args().len());
                let handle = new_handle(ServedCall::deferred(call));
                // SAFETY: the caller of `rpcrdma_services_add` guarantees that the handler may be called.
                unsafe { deferred(context.get(), handle, args, len) }
            }),
            (None, None) => return wrong("it has no handler"),
            (Some(_), Some(_)) => return wrong("it has a handler and a deferred handler"),
        };
        if number > MAX_PROCEDURE {
            return wrong(&format!("number exceeds {MAX_PROCEDURE}"));
        }
        for (field, count) in [("read_chunks", entry.read_chunks), ("write_chunks", entry.write_chunks)] {
            if count as usize > MAX_CHUNKS {
                return wrong(&format!("{field} is {count}: at most {MAX_CHUNKS}"));
            }
        }
        let has = |flag: u32| entry.flags & flag != 0;
        let unknown = entry.flags & !(2 * RPCRDMA_UNCOUNTED - 1);
        if unknown != 0 {
            return wrong(&format!(
                "flags has {unknown:#x}: expected flags of procedures (RPCRDMA_ON_WORKERS and others)"
            ));
        }
        if (entry.read_chunks > 0) != (entry.max_read > 0) {
            return wrong(&format!(
                "read_chunks is {}, and max_read {}: set both or none",
                entry.read_chunks, entry.max_read
            ));
        }
        if (entry.write_chunks > 0) != (entry.max_write > 0) && !has(RPCRDMA_OWN_RESULTS) {
            return wrong(&format!(
                "write_chunks is {}, and max_write {}: set both or none",
                entry.write_chunks, entry.max_write
            ));
        }
        check_sizes(entry)?;
        let mut procedure = procedure.max_reply(if entry.max_reply == 0 { 256 } else { entry.max_reply });
        if entry.read_chunks > 0 {
            procedure = procedure.read_chunks(entry.read_chunks as usize, entry.max_read);
        }
        if entry.write_chunks > 0 {
            procedure = procedure.write_chunks(entry.write_chunks as usize, entry.max_write);
        }
        if has(RPCRDMA_UNCOUNTED) {
            procedure = procedure.uncounted();
        }
        if has(RPCRDMA_OWN_RESULTS) {
            procedure = procedure.results_from_handler();
        }
        if has(RPCRDMA_ONE_WAY) {
            procedure = procedure.one_way();
        }
        if has(RPCRDMA_CACHED) {
            if entry.write_chunks > 0 {
                return wrong("a cached procedure has no Write chunks");
            }
            let new = || Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
            procedure = procedure.cached(Arc::clone(self.cache.get_or_insert_with(new)), cache_client);
        }
        if has(RPCRDMA_ON_WORKERS) {
            if entry.deferred.is_some() {
                return wrong("a deferred handler runs on the shard, not on workers");
            }
            procedure = procedure.on_workers();
        }
        // The arena is checked last, so that a refused entry leaves it as it was.
        if !entry.reads_into.is_null() {
            if entry.read_chunks == 0 {
                return wrong("reads_into without read_chunks");
            }
            // SAFETY: the caller of `rpcrdma_services_add` guarantees that the handle came from this library.
            let adopted = unsafe { share(entry.reads_into) }?;
            let places = ReadPlaces::new(adopted.arena.clone(), entry.max_read)?;
            self.arenas.push(adopted.for_reads()?);
            procedure = procedure.place_reads_in(move |_, _, _| places.allocate());
        }
        Ok(procedure)
    }

    /// Gives each shard a task.
    pub(crate) fn set_task(
        &mut self,
        poll: rpcrdma_task,
        descriptor: rpcrdma_task,
        context: *mut c_void,
    ) -> Result<(), ApiFailure> {
        let poll = poll.ok_or_else(|| ApiFailure::argument("poll is NULL"))?;
        self.task = Some(TaskFunctions { poll, descriptor, context: CallbackContext(context) });
        Ok(())
    }

    /// Sets the peer hook.
    pub(crate) fn set_peers(&mut self, hook: rpcrdma_peer_hook, context: *mut c_void) -> Result<(), ApiFailure> {
        let hook = hook.ok_or_else(|| ApiFailure::argument("hook is NULL"))?;
        // SAFETY: the caller of `rpcrdma_services_peers` guarantees that the hook may be called on any thread.
        self.peers = Some(unsafe { peers::peer_hook(hook, CallbackContext(context)) });
        Ok(())
    }

    pub(crate) fn peers(&self) -> Option<PeerHook> {
        self.peers.clone()
    }

    /// Makes the application of each shard, if the services have a task.
    pub(crate) fn application(&self) -> Option<impl Fn(&ShardSetup<'_>) -> Application + Send + Sync + 'static> {
        let (task, services) = (self.task?, self.services.clone());
        Some(move |setup: &ShardSetup<'_>| {
            let task = ShardTaskInstance { task, shard: setup.index as c_uint, has_logged: Cell::new(false) };
            Application { services: services.to_local(), task: Some(Box::new(task)) }
        })
    }
}

/// Refuses sizes that no configuration permits.
fn check_sizes(entry: &rpcrdma_procedure) -> Result<(), ApiFailure> {
    let has = |flag: u32| entry.flags & flag != 0;
    let chunk = |is_application_memory: bool| match is_application_memory {
        true => (LONGEST_CHUNK, "the protocol has no longer chunks"),
        false => (LONGEST_BUFFER, "memory.bulk_buffers has no longer buffers"),
    };
    let reply = (LONGEST_BUFFER, "memory.long_buffers has no longer buffers");
    let sizes = [
        ("max_reply", entry.max_reply, reply),
        ("max_read", entry.max_read, chunk(!entry.reads_into.is_null())),
        ("max_write", entry.max_write, chunk(has(RPCRDMA_OWN_RESULTS))),
    ];
    match sizes.into_iter().find(|(_, size, (limit, _))| size > limit) {
        Some((field, size, (limit, why))) => {
            Err(ApiFailure::argument(format_args!("{field} is {size}: at most {limit} bytes, as {why}")))
        }
        None => Ok(()),
    }
}

/// The task of one shard.
struct ShardTaskInstance {
    task: TaskFunctions,
    shard: c_uint,
    /// Whether the log already has a line about an unusable descriptor.
    has_logged: Cell<bool>,
}

impl ShardTaskInstance {
    /// Whether the shard can sleep on this descriptor. A file cannot be used, because it is always readable.
    fn is_usable(&self, fd: BorrowedFd<'_>) -> bool {
        let why = match fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::RegularFile | FileType::Directory) => "it is a file or a directory".to_owned(),
            Ok(_) => return true,
            Err(error) => error.to_string(),
        };
        if !self.has_logged.replace(true) {
            log::error!("descriptor of the task of shard {}: {why}: the shard sleeps without it", self.shard);
        }
        false
    }
}

impl ShardTask for ShardTaskInstance {
    fn poll(&mut self) -> bool {
        // SAFETY: the caller of `rpcrdma_services_task` guarantees that `poll` may be called on any thread.
        unsafe { (self.task.poll)(self.task.context.get(), self.shard) != 0 }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let descriptor = self.task.descriptor?;
        // SAFETY: the caller of `rpcrdma_services_task` guarantees that `descriptor` may be called on any thread.
        let fd = unsafe { descriptor(self.task.context.get(), self.shard) };
        // SAFETY: the interface says that the descriptor stays open while the server lives.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) });
        fd.filter(|fd| self.is_usable(*fd))
    }
}

/// Adds the `len` bytes of inline results that a handler has written in place to the reply.
fn count_results(call: &mut ServedCall, len: usize) -> Result<(), Refusal> {
    if !len.is_multiple_of(4) {
        return Err(Refusal::of_unaligned_results(len));
    }
    let mut writer = call.reply_writer();
    if len > writer.room() {
        // The writer refuses the zeroes with an error that names the cause.
        return Ok(writer.put_zeroes(len)?);
    }
    // SAFETY: the handler says that it has written these bytes.
    unsafe { writer.advance(len) };
    call.record_written(ResultPart::Inline);
    Ok(())
}

/// The refusal of a status.
pub(crate) fn refusal(status: c_int) -> Refusal {
    match status {
        RPCRDMA_PROG_UNAVAIL => Refusal::ProgramUnavailable,
        RPCRDMA_PROC_UNAVAIL => Refusal::ProcedureUnavailable,
        RPCRDMA_GARBAGE_ARGS => Refusal::GarbageArguments,
        RPCRDMA_NO_REPLY => Refusal::NoReply,
        auth if (RPCRDMA_AUTH_ERROR..RPCRDMA_AUTH_ERROR + 256).contains(&auth) => {
            Refusal::Authentication((auth - RPCRDMA_AUTH_ERROR) as u32)
        }
        RPCRDMA_SYSTEM_ERR => Refusal::SystemError,
        _ => Refusal::of_unknown_code(status),
    }
}

/// The status of a refusal. `None` if it has none.
pub(crate) fn status(refusal: Refusal) -> Option<c_int> {
    Some(match refusal {
        Refusal::ProgramUnavailable => RPCRDMA_PROG_UNAVAIL,
        Refusal::ProgramMismatch { .. } => RPCRDMA_PROG_MISMATCH,
        Refusal::ProcedureUnavailable => RPCRDMA_PROC_UNAVAIL,
        Refusal::GarbageArguments => RPCRDMA_GARBAGE_ARGS,
        Refusal::SystemError => RPCRDMA_SYSTEM_ERR,
        Refusal::Authentication(auth) => RPCRDMA_AUTH_ERROR.saturating_add(c_int::try_from(auth).unwrap_or(c_int::MAX)),
        _ => return None,
    })
}

/// `PROG_UNAVAIL` of RFC 5531 §9: the server does not have the program.
pub const RPCRDMA_PROG_UNAVAIL: c_int = 1;
/// `PROG_MISMATCH`: the server has other versions of the program. Only in replies.
pub const RPCRDMA_PROG_MISMATCH: c_int = 2;
/// `PROC_UNAVAIL`: the program does not have the procedure.
pub const RPCRDMA_PROC_UNAVAIL: c_int = 3;
/// `GARBAGE_ARGS`: the arguments cannot be decoded.
pub const RPCRDMA_GARBAGE_ARGS: c_int = 4;
/// `SYSTEM_ERR`: the server has failed.
pub const RPCRDMA_SYSTEM_ERR: c_int = 5;
/// The call has no reply; for procedures with `RPCRDMA_ONE_WAY`.
///
/// Other procedures refuse the call with `SYSTEM_ERR`.
pub const RPCRDMA_NO_REPLY: c_int = 6;
/// `AUTH_ERROR`: add the `auth_stat` of RFC 5531 §9, 0 to 255.
///
/// A larger sum is `SYSTEM_ERR`.
pub const RPCRDMA_AUTH_ERROR: c_int = 256;

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::memory::AdoptedArena;

    const PROGRAM: ProgramVersion = ProgramVersion { program: 0x2000_0001, version: 3 };

    extern "C-unwind" fn nothing(
        _: *mut c_void,
        _: *mut rpcrdma_call,
        _: *const c_void,
        _: usize,
        _: *mut c_void,
        _: *mut usize,
    ) -> c_int {
        0
    }

    fn entry() -> rpcrdma_procedure {
        rpcrdma_procedure {
            number: 7,
            flags: 0,
            handler: Some(nothing),
            deferred: None,
            context: ptr::null_mut(),
            max_reply: 0,
            read_chunks: 0,
            write_chunks: 0,
            max_read: 0,
            max_write: 0,
            reads_into: ptr::null_mut(),
        }
    }

    /// An arena of one page, which is never freed.
    fn adopted() -> AdoptedArena {
        #[repr(align(4096))]
        struct AlignedPage([u8; 4096]);
        let page = Box::leak(Box::new(AlignedPage([0; 4096])));
        // SAFETY: the page is never freed, and nobody else uses it.
        unsafe { AdoptedArena::new(page.0.as_mut_ptr().cast(), 4096, None) }.ok().expect("a page")
    }

    /// Code and text of a refused entry.
    fn refused(entry: rpcrdma_procedure) -> (Errno, String) {
        let failure = ServiceTable::default().add(PROGRAM, &entry).expect_err("an invalid entry");
        (failure.code(), failure.text().to_owned())
    }

    #[test]
    fn a_refused_procedure_is_named_with_its_program_and_version() {
        let arena: *mut rpcrdma_arena = new_handle(adopted());
        let entries: [fn(*mut rpcrdma_arena) -> rpcrdma_procedure; 10] = [
            |_| rpcrdma_procedure { handler: None, ..entry() },
            |_| rpcrdma_procedure { flags: 1 << 31, ..entry() },
            |_| rpcrdma_procedure { read_chunks: 5, max_read: 1, ..entry() },
            |_| rpcrdma_procedure { write_chunks: 5, max_write: 1, ..entry() },
            |_| rpcrdma_procedure { read_chunks: 1, ..entry() },
            |_| rpcrdma_procedure { write_chunks: 1, ..entry() },
            |_| rpcrdma_procedure { flags: RPCRDMA_CACHED, write_chunks: 1, max_write: 1, ..entry() },
            |arena| rpcrdma_procedure { reads_into: arena, ..entry() },
            |arena| rpcrdma_procedure { read_chunks: 1, max_read: 4097, reads_into: arena, ..entry() },
            |_| rpcrdma_procedure { max_reply: usize::MAX, ..entry() },
        ];
        for entry in entries {
            let (code, text) = refused(entry(arena));
            assert_eq!(code, Errno::INVAL, "{text}");
            assert!(text.starts_with("procedure 7 of program 0x20000001, version 3: "), "{text}");
        }
        let mut table = ServiceTable::default();
        assert!(table.add(PROGRAM, &entry()).is_ok());
        let twice = table.add(PROGRAM, &entry()).expect_err("it was added before");
        assert_eq!(twice.code(), Errno::EXIST);
        assert_eq!(twice.text(), "procedure 7 of program 0x20000001, version 3: it was added before");
        let nfs = ProgramVersion { program: 100003, version: 3 };
        assert_eq!(ProcedureId { program: nfs, number: 6 }.to_string(), "procedure 6 of program 100003, version 3");
        // SAFETY: it came from `new_handle`.
        assert!(unsafe { crate::handle::take(arena) }.is_ok());
    }

    #[test]
    fn sizes_that_no_configuration_permits_are_refused_immediately() {
        let arena: *mut rpcrdma_arena = new_handle(adopted());
        let (buffer, chunk) = (LONGEST_BUFFER + 1, LONGEST_CHUNK + 1);
        let reads = |max_read| rpcrdma_procedure { read_chunks: 1, max_read, ..entry() };
        let writes = |max_write| rpcrdma_procedure { write_chunks: 1, max_write, ..entry() };
        for (entry, text) in [
            (rpcrdma_procedure { max_reply: buffer, ..entry() }, "max_reply is 1073741825: at most 1073741824 bytes"),
            (reads(buffer), "max_read is 1073741825: at most 1073741824 bytes, as memory.bulk_buffers"),
            (writes(buffer), "max_write is 1073741825: at most 1073741824 bytes, as memory.bulk_buffers"),
            (rpcrdma_procedure { reads_into: arena, ..reads(chunk) }, "max_read is 4294967296: at most 4294967295"),
            (
                rpcrdma_procedure { flags: RPCRDMA_OWN_RESULTS, ..writes(chunk) },
                "max_write is 4294967296: at most 4294967295",
            ),
        ] {
            assert!(refused(entry).1.contains(text), "{text}");
        }
        let own = rpcrdma_procedure { flags: RPCRDMA_OWN_RESULTS, ..writes(LONGEST_CHUNK) };
        for possible in [reads(LONGEST_BUFFER), writes(LONGEST_BUFFER), own] {
            assert!(ServiceTable::default().add(PROGRAM, &possible).is_ok());
        }
        // SAFETY: it came from `new_handle`.
        assert!(unsafe { crate::handle::take(arena) }.is_ok());
        // The limit is the same as that of the knobs.
        for (size, is_possible) in [(LONGEST_BUFFER, true), (LONGEST_BUFFER + 1, false)] {
            let mut config = rpcrdma::Config::default();
            config.memory.bulk_buffers = vec![(size, 1)];
            config.memory.long_buffers = vec![(size, 1)];
            assert_eq!(config.validate().is_ok(), is_possible, "{size}");
        }
    }
}
