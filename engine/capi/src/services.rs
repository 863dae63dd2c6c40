#![expect(unsafe_code, reason = "a table of C has function pointers, and contexts that its functions share")]
//! Procedures whose handlers are functions of C.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rpcrdma::server::PeerHook;
use rpcrdma::service::duplicate_requests::{
    Client, DuplicateRequestCache, DuplicateRequestCacheConfig, by_address, by_host,
};
use rpcrdma::service::{Application, MAX_CHUNKS, MAX_PROCEDURE, ShardSetup, ShardTask};
use rpcrdma::{Arena, Procedure, Refusal, ServerCall, Services};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;

use crate::call::{Call, Part};
use crate::failure::Failure;
use crate::handle::{Borrowed, Numbers, during, hold, share};
use crate::peers::{self, rpcrdma_peer_hook};
use crate::reads::Places;
use crate::types::{rpcrdma_arena, rpcrdma_call};

/// Answers a call at once: writes its results, and returns 0.
///
/// `args` are the inline arguments, in place. `results` has room for `max_reply` bytes of inline results, which are not
/// initialized. `*results_len` is 0: the handler writes them all, and their number there, which is a multiple of 4 as
/// XDR requires: the handler pads with zeroes. With another number the caller gets SYSTEM_ERR. Or it uses
/// `rpcrdma_call_reply`.
///
/// It runs on a shard, or on a worker, and several threads may run it at once. The call is valid until it returns.
/// Another result refuses the call: an `RPCRDMA_` status, or the negative code of the last function that has failed to
/// write results of this call, which the caller gets as follows:
///
/// - -EMSGSIZE of a Write chunk of the caller that is shorter than the result, which `max_write` allows: an error of
///   the transport, by which a client of version 2 sends the call again with a longer chunk; in version 1 the call
///   fails with EPROTO;
/// - -ENOENT of a Write chunk that the procedure declares, and the caller does not offer: GARBAGE_ARGS;
/// - any other negative code, also one of no such function: SYSTEM_ERR, and the log has the cause, or the code.
///
/// So is 0 if a function that writes results has failed for this call, and none has written that part of them since.
/// Other numbers are SYSTEM_ERR, and the log has the number. No exception of C++ may leave it: the process ends.
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

/// Takes a call, to be answered by `rpcrdma_call_answer`, now or later, on any thread. `args` are the inline arguments,
/// in place until then.
///
/// It runs on a shard and must not block.
pub type rpcrdma_deferred_handler = Option<
    unsafe extern "C-unwind" fn(context: *mut c_void, call: *mut rpcrdma_call, args: *const c_void, args_len: usize),
>;

/// The procedure runs on workers (`server.workers`): its handler may block.
pub const RPCRDMA_ON_WORKERS: u32 = 1;
/// A call that is retransmitted to the same server does not run again. A new process has nothing of the old one's
/// cache. A client is a credential, as of `client.auth_sys`, on a host: each client of this library has its own stamp.
/// Calls without a credential run again. Without Write chunks. The cache has the default sizes of
/// `DuplicateRequestCacheConfig` in `tuning.md`, which C cannot change.
pub const RPCRDMA_CACHED: u32 = 2;
/// Calls have no reply, and end once they are sent: nothing tells whether one has run. Procedure and request both need
/// the flag: without it in the request, the call ends by its time-out alone.
pub const RPCRDMA_ONE_WAY: u32 = 4;
/// Write chunks get memory of the application (`rpcrdma_call_result`), and none of the library's.
pub const RPCRDMA_OWN_RESULTS: u32 = 8;
/// Reduced arguments have no length among the inline arguments. Without this flag, the library compares the length in
/// front of each Read chunk's position with the chunk, and refuses other calls with GARBAGE_ARGS.
pub const RPCRDMA_UNCOUNTED: u32 = 16;

/// A procedure of a table: `{.number = 1, .handler = get, .max_reply = 16}`.
///
/// It has a handler, or a deferred one. All else may be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_procedure {
    /// Procedure number.
    pub number: u32,
    /// `RPCRDMA_ON_WORKERS` and others, or 0.
    pub flags: u32,
    /// Answers at once.
    pub handler: rpcrdma_handler,
    /// Answers later.
    pub deferred: rpcrdma_deferred_handler,
    /// First argument of both. Any thread may use it.
    pub context: *mut c_void,
    /// Bytes of inline results that there is at least room for; 0: 256.
    pub max_reply: usize,
    /// Most Read chunks of a call: eligible arguments (RFC 8166 §6).
    pub read_chunks: u32,
    /// Most Write chunks of a call: eligible results.
    pub write_chunks: u32,
    /// Most bytes of a Read chunk.
    pub max_read: usize,
    /// Most bytes of a Write chunk.
    pub max_write: usize,
    /// Memory that Read chunks arrive in, or NULL for the library's. It has a place for each `max_read` bytes, rounded
    /// up to 4096. A place is free again once its chunk's call is answered, and the buffer freed that took the chunk.
    /// While none is free, chunks arrive in the library's memory.
    pub reads_into: *mut rpcrdma_arena,
}

/// Does work on a shard's thread, in each of its turns, without blocking. Not 0 if there was any.
pub type rpcrdma_task = Option<unsafe extern "C-unwind" fn(context: *mut c_void, shard: c_uint) -> c_int>;

/// The client of a cached call: its host, which stays the same when it connects again. `None` without a credential.
fn client_of(call: &ServerCall) -> Option<Client> {
    let (flavor, _) = call.info().credential();
    if flavor == 0 { None } else { by_host(call).or_else(|| by_address(call)) }
}

/// A pointer that functions of C get back.
#[derive(Clone, Copy)]
pub(crate) struct Context(*mut c_void);

// SAFETY: the interface says that functions with it run on any thread.
unsafe impl Send for Context {}
// SAFETY: as above, at once.
unsafe impl Sync for Context {}

impl Context {
    /// The whole of it, which closures then capture.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Procedures, a task of each shard, and what hears of connections.
#[derive(Default)]
pub(crate) struct Table {
    services: Services,
    /// Program, version and number of each.
    known: HashSet<(u32, u32, u32)>,
    /// One of them runs on workers.
    needs_workers: bool,
    cache: Option<Arc<DuplicateRequestCache>>,
    task: Option<Task>,
    peers: Option<PeerHook>,
    /// Where Read chunks arrive.
    arenas: Vec<Arena>,
}

#[derive(Clone, Copy)]
struct Task {
    poll: unsafe extern "C-unwind" fn(*mut c_void, c_uint) -> c_int,
    descriptor: rpcrdma_task,
    context: Context,
}

impl Table {
    pub(crate) fn services(&self) -> Services {
        self.services.clone()
    }

    pub(crate) fn needs_workers(&self) -> bool {
        self.needs_workers
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
    pub(crate) fn add(&mut self, program: u32, version: u32, of: &rpcrdma_procedure) -> Result<(), Failure> {
        let number = of.number;
        let wrong = |text: &str| Err(Failure::argument(format_args!("procedure {number}: {text}")));
        if self.known.contains(&(program, version, number)) {
            return Err(Failure::new(Errno::EXIST, format_args!("procedure {number}: it was added before")));
        }
        let context = Context(of.context);
        let procedure: Procedure = match (of.handler, of.deferred) {
            (Some(handler), None) => Procedure::new(move |call| {
                let (args, mut writer) = call.args_and_writer();
                let (args, args_len, results) = (args.as_ptr().cast(), args.len(), writer.as_mut_ptr().cast());
                // SAFETY: the handle that has it lives as long as the closure runs, which borrows the call.
                let call = Call::now(unsafe { Borrowed::new(call) });
                let run = |call| {
                    let mut len = 0;
                    // SAFETY: the table's author promises that it may be called.
                    let status = unsafe { handler(context.get(), call, args, args_len, results, &raw mut len) };
                    (status, len)
                };
                during(Numbers::next_of_thread(), call, run, |(status, len), call| {
                    if status == 0 && len > 0 {
                        written(call, len)?;
                    }
                    call.outcome(status)
                })
            }),
            (None, Some(deferred)) => Procedure::deferred(move |call| {
                let (args, len) = (call.args().as_ptr().cast(), call.args().len());
                let handle = hold(Call::later(call));
                // SAFETY: as above.
                unsafe { deferred(context.get(), handle, args, len) }
            }),
            (None, None) => return wrong("it has no handler"),
            (Some(_), Some(_)) => return wrong("it has a handler and a deferred handler"),
        };
        if number > MAX_PROCEDURE {
            return wrong(&format!("the highest number is {MAX_PROCEDURE}"));
        }
        if of.read_chunks.max(of.write_chunks) as usize > MAX_CHUNKS {
            return wrong(&format!("at most {MAX_CHUNKS} Read chunks and {MAX_CHUNKS} Write chunks"));
        }
        let has = |flag: u32| of.flags & flag != 0;
        if of.flags >= 2 * RPCRDMA_UNCOUNTED {
            return wrong("unknown flags");
        }
        if (of.read_chunks > 0) != (of.max_read > 0) {
            return wrong("read_chunks and max_read go together");
        }
        if (of.write_chunks > 0) != (of.max_write > 0) && !has(RPCRDMA_OWN_RESULTS) {
            return wrong("write_chunks and max_write go together");
        }
        let mut procedure = procedure.max_reply(if of.max_reply == 0 { 256 } else { of.max_reply });
        if of.read_chunks > 0 {
            procedure = procedure.read_chunks(of.read_chunks as usize, of.max_read);
        }
        if !of.reads_into.is_null() {
            if of.read_chunks == 0 {
                return wrong("reads_into without read_chunks");
            }
            // SAFETY: the table's author promises that it is an arena.
            let adopted = unsafe { share(of.reads_into) }?;
            let places = Places::new(adopted.arena.clone(), of.max_read)?;
            self.arenas.push(adopted.for_reads()?);
            procedure = procedure.place_reads_in(move |_, _, _| places.choose());
        }
        if of.write_chunks > 0 {
            procedure = procedure.write_chunks(of.write_chunks as usize, of.max_write);
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
            if of.write_chunks > 0 {
                return wrong("a cached procedure has no Write chunks");
            }
            let new = || Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
            procedure = procedure.cached(Arc::clone(self.cache.get_or_insert_with(new)), client_of);
        }
        if has(RPCRDMA_ON_WORKERS) {
            if of.deferred.is_some() {
                return wrong("a deferred handler runs on the shard, not on workers");
            }
            procedure = procedure.on_workers();
        }
        self.services.add(program, version, number, procedure);
        self.needs_workers |= has(RPCRDMA_ON_WORKERS);
        self.known.insert((program, version, number));
        Ok(())
    }

    /// Gives each shard a task.
    pub(crate) fn set_task(
        &mut self,
        poll: rpcrdma_task,
        descriptor: rpcrdma_task,
        context: *mut c_void,
    ) -> Result<(), Failure> {
        let poll = poll.ok_or_else(|| Failure::argument("the task has no function"))?;
        self.task = Some(Task { poll, descriptor, context: Context(context) });
        Ok(())
    }

    /// Tells this function of connections.
    pub(crate) fn set_peers(&mut self, hook: rpcrdma_peer_hook, context: *mut c_void) -> Result<(), Failure> {
        let hook = hook.ok_or_else(|| Failure::argument("hook is NULL"))?;
        // SAFETY: its author promises that it may be called on any shard.
        self.peers = Some(unsafe { peers::hook(hook, Context(context)) });
        Ok(())
    }

    pub(crate) fn peers(&self) -> Option<PeerHook> {
        self.peers.clone()
    }

    /// What each shard runs, if it has a task.
    pub(crate) fn application(&self) -> Option<impl Fn(&ShardSetup<'_>) -> Application + Send + Sync + 'static> {
        let (task, services) = (self.task?, self.services.clone());
        Some(move |setup: &ShardSetup<'_>| {
            let task = OfShard { task, shard: setup.index as c_uint, was_told: Cell::new(false) };
            Application { services: services.to_local(), task: Some(Box::new(task)) }
        })
    }
}

struct OfShard {
    task: Task,
    shard: c_uint,
    /// The log has a line about its descriptor.
    was_told: Cell<bool>,
}

impl OfShard {
    /// Whether its shard can sleep on this descriptor. A file is always readable.
    fn is_usable(&self, fd: BorrowedFd<'_>) -> bool {
        let why = match fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::RegularFile | FileType::Directory) => "it is a file's".to_owned(),
            Ok(_) => return true,
            Err(error) => error.to_string(),
        };
        if !self.was_told.replace(true) {
            log::error!("descriptor of the task of shard {}: {why}: the shard sleeps without it", self.shard);
        }
        false
    }
}

impl ShardTask for OfShard {
    fn poll(&mut self) -> bool {
        // SAFETY: its author promises that it may be called on any shard.
        unsafe { (self.task.poll)(self.task.context.get(), self.shard) != 0 }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let descriptor = self.task.descriptor?;
        // SAFETY: as above.
        let fd = unsafe { descriptor(self.task.context.get(), self.shard) };
        // SAFETY: the interface says that it stays open while the server lives.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) });
        fd.filter(|fd| self.is_usable(*fd))
    }
}

/// Counts inline results that a handler has written in their place.
fn written(call: &mut Call, len: usize) -> Result<(), Refusal> {
    if !len.is_multiple_of(4) {
        return Err(Refusal::of_unaligned_results(len));
    }
    let mut writer = call.reply_writer();
    if len > writer.room() {
        // Fails, and says why.
        return Ok(writer.put_zeroes(len)?);
    }
    // SAFETY: the handler's author promises that it has written them.
    unsafe { writer.advance(len) };
    call.wrote(Part::Inline);
    Ok(())
}

/// The refusal that a status stands for.
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

/// The status of a refusal, if it has one.
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

/// `PROG_UNAVAIL` of RFC 5531 §9.
pub const RPCRDMA_PROG_UNAVAIL: c_int = 1;
/// `PROG_MISMATCH`: the server has other versions of the program. Only in replies.
pub const RPCRDMA_PROG_MISMATCH: c_int = 2;
/// `PROC_UNAVAIL`.
pub const RPCRDMA_PROC_UNAVAIL: c_int = 3;
/// `GARBAGE_ARGS`: the arguments cannot be decoded.
pub const RPCRDMA_GARBAGE_ARGS: c_int = 4;
/// `SYSTEM_ERR`: the server has failed.
pub const RPCRDMA_SYSTEM_ERR: c_int = 5;
/// No reply, for procedures of `RPCRDMA_ONE_WAY`. From others it is `SYSTEM_ERR`.
pub const RPCRDMA_NO_REPLY: c_int = 6;
/// `AUTH_ERROR`: add the `auth_stat` of RFC 5531 §9, 0 to 255. A larger sum is SYSTEM_ERR.
pub const RPCRDMA_AUTH_ERROR: c_int = 256;
