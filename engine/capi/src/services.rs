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
    /// Bytes of inline results that there is at least room for, at most 1 GiB; 0: 256.
    pub max_reply: usize,
    /// Most Read chunks of a call, at most 4: eligible arguments (RFC 8166 §6).
    pub read_chunks: u32,
    /// Most Write chunks of a call, at most 4: eligible results.
    pub write_chunks: u32,
    /// Most bytes of a Read chunk: at most 1 GiB, and with `reads_into` 4 GiB less 1.
    pub max_read: usize,
    /// Most bytes of a Write chunk: at most 1 GiB, and with `RPCRDMA_OWN_RESULTS` 4 GiB less 1.
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

/// Bytes of the longest buffer of `memory.bulk_buffers` and `memory.long_buffers`.
const LONGEST_BUFFER: usize = 1 << 30;
/// Most bytes of a chunk: its length is an XDR integer.
const LONGEST_CHUNK: usize = u32::MAX as usize;

/// A version of a program, as errors name it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub(crate) program: u32,
    pub(crate) version: u32,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, version } = *self;
        // Registered numbers are decimal, as in the texts of the engine.
        match program {
            ..0x2000_0000 => write!(f, "program {program}, version {version}"),
            _ => write!(f, "program {program:#x}, version {version}"),
        }
    }
}

/// A procedure, as errors name it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    of: Program,
    number: u32,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "procedure {} of {}", self.number, self.of)
    }
}

/// Procedures, a task of each shard, and what hears of connections.
#[derive(Default)]
pub(crate) struct Table {
    services: Services,
    known: HashSet<Name>,
    /// The first one that runs on workers.
    on_workers: Option<Name>,
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

    /// A procedure that runs on workers.
    pub(crate) fn on_workers(&self) -> Option<Name> {
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
    /// EEXIST: it was added before. EINVAL, EBADF or EBUSY: its declaration, or its arena. The text names it.
    pub(crate) fn add(&mut self, program: Program, of: &rpcrdma_procedure) -> Result<(), Failure> {
        let name = Name { of: program, number: of.number };
        if self.known.contains(&name) {
            return Err(Failure::new(Errno::EXIST, "it was added before").of(name));
        }
        let procedure = self.procedure(of).map_err(|failure| failure.of(name))?;
        self.services.add(program.program, program.version, of.number, procedure);
        if of.flags & RPCRDMA_ON_WORKERS != 0 {
            self.on_workers.get_or_insert(name);
        }
        self.known.insert(name);
        Ok(())
    }

    /// The procedure of an entry.
    fn procedure(&mut self, of: &rpcrdma_procedure) -> Result<Procedure, Failure> {
        let number = of.number;
        let wrong = |text: &str| Err(Failure::argument(text));
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
        for (field, count) in [("read_chunks", of.read_chunks), ("write_chunks", of.write_chunks)] {
            if count as usize > MAX_CHUNKS {
                return wrong(&format!("{field} is {count}: at most {MAX_CHUNKS}"));
            }
        }
        let has = |flag: u32| of.flags & flag != 0;
        let unknown = of.flags & !(2 * RPCRDMA_UNCOUNTED - 1);
        if unknown != 0 {
            return wrong(&format!("flags has {unknown:#x}, which is no flag of a procedure"));
        }
        if (of.read_chunks > 0) != (of.max_read > 0) {
            return wrong(&format!("read_chunks is {}, and max_read {}: both or none", of.read_chunks, of.max_read));
        }
        if (of.write_chunks > 0) != (of.max_write > 0) && !has(RPCRDMA_OWN_RESULTS) {
            return wrong(&format!(
                "write_chunks is {}, and max_write {}: both or none",
                of.write_chunks, of.max_write
            ));
        }
        check_sizes(of)?;
        let mut procedure = procedure.max_reply(if of.max_reply == 0 { 256 } else { of.max_reply });
        if of.read_chunks > 0 {
            procedure = procedure.read_chunks(of.read_chunks as usize, of.max_read);
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
        // Last: a refused entry leaves the arena as it was.
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
        Ok(procedure)
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

/// Refuses sizes that no server can have, whatever its configuration is.
fn check_sizes(of: &rpcrdma_procedure) -> Result<(), Failure> {
    let has = |flag: u32| of.flags & flag != 0;
    let chunk = |is_own: bool| match is_own {
        true => (LONGEST_CHUNK, "the protocol has no longer chunks"),
        false => (LONGEST_BUFFER, "memory.bulk_buffers has no longer buffers"),
    };
    let reply = (LONGEST_BUFFER, "memory.long_buffers has no longer buffers");
    let sizes = [
        ("max_reply", of.max_reply, reply),
        ("max_read", of.max_read, chunk(!of.reads_into.is_null())),
        ("max_write", of.max_write, chunk(has(RPCRDMA_OWN_RESULTS))),
    ];
    match sizes.into_iter().find(|(_, size, (most, _))| size > most) {
        Some((field, size, (most, why))) => {
            Err(Failure::argument(format_args!("{field} is {size}: at most {most} bytes, as {why}")))
        }
        None => Ok(()),
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

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::memory::Adopted;

    const PROGRAM: Program = Program { program: 0x2000_0001, version: 3 };

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

    /// An arena of one page, which stays.
    fn adopted() -> Adopted {
        #[repr(align(4096))]
        struct Page([u8; 4096]);
        let page = Box::leak(Box::new(Page([0; 4096])));
        // SAFETY: the page stays as long as the process, and nobody else has it.
        unsafe { Adopted::new(page.0.as_mut_ptr().cast(), 4096, None) }.ok().expect("a page")
    }

    /// Code and text of a refused entry.
    fn refused(entry: rpcrdma_procedure) -> (Errno, String) {
        let failure = Table::default().add(PROGRAM, &entry).expect_err("an invalid entry");
        (failure.code(), failure.text().to_owned())
    }

    #[test]
    fn a_refused_procedure_is_named_with_its_program_and_version() {
        let arena: *mut rpcrdma_arena = hold(adopted());
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
        let mut table = Table::default();
        assert!(table.add(PROGRAM, &entry()).is_ok());
        let twice = table.add(PROGRAM, &entry()).expect_err("it was added before");
        assert_eq!(twice.code(), Errno::EXIST);
        assert_eq!(twice.text(), "procedure 7 of program 0x20000001, version 3: it was added before");
        let nfs = Program { program: 100003, version: 3 };
        assert_eq!(Name { of: nfs, number: 6 }.to_string(), "procedure 6 of program 100003, version 3");
        // SAFETY: it came from `hold`.
        assert!(unsafe { crate::handle::take(arena) }.is_ok());
    }

    #[test]
    fn sizes_that_no_configuration_permits_are_refused_at_once() {
        let arena: *mut rpcrdma_arena = hold(adopted());
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
            assert!(Table::default().add(PROGRAM, &possible).is_ok());
        }
        // SAFETY: it came from `hold`.
        assert!(unsafe { crate::handle::take(arena) }.is_ok());
        // The limit is that of the knobs.
        for (size, is_possible) in [(LONGEST_BUFFER, true), (LONGEST_BUFFER + 1, false)] {
            let mut config = rpcrdma::Config::default();
            config.memory.bulk_buffers = vec![(size, 1)];
            config.memory.long_buffers = vec![(size, 1)];
            assert_eq!(config.validate().is_ok(), is_possible, "{size}");
        }
    }
}
