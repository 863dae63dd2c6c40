//! Services of a server: programs, versions, procedures, and which arguments and results may travel as chunks.

use std::fmt;
use std::sync::Arc;

use rpcrdma_mempool::Buf;

use super::call::{Answered, Call, MAX_CHUNKS, Ready, ServerCall};
use super::deferred::DeferredCall;
use super::duplicate_requests::{CHECKSUMMED, CallKey, Client, DuplicateRequestCache, Lookup};
use super::handler::{Asynchronous, Handler, Held, Local, Sharing, Task, Threads};
use crate::binding::Binding;
use crate::cross_thread::panics::caught;
use crate::proto::Refusal;
use crate::start_error::StartError;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, ProgramNumber};

/// A procedure: its handler, and its upper-layer binding (RFC 8166 §6).
///
/// ```
/// use rpcrdma::{Procedure, Refusal};
///
/// let reverse: Procedure = Procedure::new(|call| {
///     let mut bytes = call.args().to_vec();
///     bytes.reverse();
///     call.reply_mut(bytes.len()).map_err(|_| Refusal::GarbageArguments)?.copy_from_slice(&bytes);
///     Ok(())
/// });
/// let reverse = reverse.max_reply(1024);
/// ```
#[must_use = "add it to `Services`"]
#[derive(Clone)]
pub struct Procedure<S: Sharing = Threads> {
    handler: Handler<S>,
    /// Whether it runs on a worker thread, so that its handler may block and compute. Otherwise it runs on the shard
    /// that received the call, which does nothing else meanwhile.
    pub(crate) on_workers: bool,
    pub(crate) binding: Binding,
    /// Whether the handler gives the memory of results in Write chunks. Otherwise it writes them to the shard's pool.
    pub(crate) results_from_handler: bool,
    /// Chooses the target memory of Read chunks; without it, the shard's pool.
    pub(crate) read_target: Option<S::Place>,
    pub(crate) cached: Option<Cached>,
    /// Whether its calls have no reply.
    pub(crate) silent: bool,
    /// Whether it always runs on the shard, and is not cached.
    pub(crate) plain: bool,
    /// Bytes of the RPC message of a reply: the longest results or refusal.
    pub(crate) reply_room: usize,
}

/// The duplicate request cache of a procedure, with the function that identifies callers.
#[derive(Clone)]
pub(crate) struct Cached {
    cache: Arc<DuplicateRequestCache>,
    client: Arc<Identify>,
    /// Bytes that the key covers of each argument.
    checksummed: usize,
}

/// Identifies the caller of a call.
type Identify = dyn Fn(&ServerCall) -> Option<Client> + Send + Sync;

impl Cached {
    pub(crate) fn new(
        cache: Arc<DuplicateRequestCache>,
        client: impl Fn(&ServerCall) -> Option<Client> + Send + Sync + 'static,
    ) -> Self {
        Self { cache, client: Arc::new(client), checksummed: CHECKSUMMED }
    }

    /// Looks a call up. `None` if it is new: its entry of the cache is stored in the call, which counts against the
    /// quota of `owner`.
    ///
    /// # Errors
    /// Text of the panic of the application's function that identifies callers.
    pub(crate) fn look_up(&self, call: &mut Call<Ready>, owner: &str) -> Result<Option<Lookup>, Box<str>> {
        let Some(key) = self.key(call.view())? else { return Ok(Some(Lookup::Unidentified)) };
        Ok(match self.cache.begin(key, owner) {
            Lookup::New(reservation) => {
                call.set_reservation(reservation);
                None
            }
            known => Some(known),
        })
    }

    /// Whether the original of this retransmitted call still runs.
    pub(crate) fn is_running(&self, call: &Call<Ready>) -> bool {
        matches!(self.key(call.view()), Ok(Some(key)) if self.cache.is_running(&key))
    }

    fn key(&self, call: &ServerCall) -> Result<Option<CallKey>, Box<str>> {
        let client = caught(|| (self.client)(call))?;
        Ok(client.map(|client| self.cache.key(client, call, self.checksummed)))
    }
}

impl<S: Sharing> fmt::Debug for Procedure<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Procedure")
            .field("on_workers", &self.on_workers)
            .field("binding", &self.binding)
            .finish_non_exhaustive()
    }
}

impl Procedure {
    /// Runs the procedure on workers.
    ///
    /// A call whose connection closes before a worker takes it does not run: nobody awaits its reply. This includes
    /// [one-way](Self::one_way) calls, and all queued calls at the end of the server.
    pub fn on_workers(mut self) -> Self {
        self.on_workers = true;
        self
    }

    /// Converts it to a procedure of one shard.
    fn to_local(&self) -> Procedure<Local> {
        Procedure {
            handler: self.handler.to_local(),
            on_workers: self.on_workers,
            binding: self.binding,
            results_from_handler: self.results_from_handler,
            read_target: self.read_target.clone().map(|choose| choose as _),
            cached: self.cached.clone(),
            silent: self.silent,
            plain: self.plain,
            reply_room: self.reply_room,
        }
    }
}

impl<S: Sharing> Procedure<S> {
    fn of(handler: Handler<S>) -> Self {
        Self {
            handler,
            on_workers: false,
            binding: Binding::inline(usize::MAX, 256),
            results_from_handler: false,
            read_target: None,
            cached: None,
            silent: false,
            plain: true,
            reply_room: REFUSAL_LEN,
        }
    }

    /// A procedure on the shard: inline only, replies up to 256 bytes.
    ///
    /// Handlers of [`Services`] are `Send` and `Sync`, as all shards and workers run them. Those of [`LocalServices`]
    /// run on one thread and may share state by `Rc` and `Cell`. `Held` and `Asynchronous` in signatures state this.
    pub fn new(handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Held<S::Run>) -> Self {
        Self::of(Handler::Run(handler.hold()))
    }

    /// A procedure whose handler answers [later](DeferredCall::answer), from any thread.
    ///
    /// For servers that submit I/O. The handler runs on the shard, and must not block.
    pub fn deferred(handler: impl Fn(DeferredCall) + Held<S::Defer>) -> Self {
        Self::of(Handler::Defer(handler.hold()))
    }

    /// A procedure whose handler is a future, polled by the shard.
    ///
    /// Any thread may wake it; it needs no runtime. It [answers](DeferredCall::answer) its call, and may go on after
    /// that. It is dropped when the connection closes.
    pub fn asynchronous<T, H>(handler: H) -> Self
    where
        T: Future<Output = ()> + 'static,
        H: Fn(DeferredCall) -> T + Asynchronous<S::Defer>,
    {
        Self::of(Handler::Defer(handler.begin()))
    }

    /// Does not answer calls: callers make [one-way](crate::client::ClientCall::one_way) calls.
    ///
    /// The result of a handler is discarded. A [deferred](Self::deferred) call ends when it is dropped.
    pub fn one_way(mut self) -> Self {
        self.silent = true;
        if let Handler::Run(run) = self.handler {
            self.handler = Handler::Run(S::silent(run));
        }
        self
    }

    /// Reads Read chunks into memory that `choose` returns.
    ///
    /// `choose` gets the call with its inline arguments, the index of the chunk, and the chunk's bytes, an XDR round-up
    /// included. The window of the buffer is the target; it may be longer than the chunk. With `None` the chunk is read
    /// into memory of the shard's pool. The handler gets the chunk by [`ServerCall::read_chunk`] or
    /// [`take_read_chunk`](ServerCall::take_read_chunk).
    ///
    /// The buffer must be of a pool made on the shard's thread, in its own arena or in one of
    /// [`memory.arenas`](crate::config::MemoryConfig::arenas). A call with an unsuitable or too short buffer is
    /// answered with SYSTEM_ERR, and none of its chunks is read. The log says why.
    /// [`ShardStats::get`](crate::stats::ShardStats::get)`("read_targets_refused")` counts them.
    ///
    /// `choose` runs on the shard and must not block. It runs again for a call that has waited for memory.
    #[doc(alias("direct data placement", "zero copy"))]
    pub fn place_reads_in(
        mut self,
        choose: impl Fn(&ServerCall, usize, usize) -> Option<Buf> + Held<S::Place>,
    ) -> Self {
        self.read_target = Some(choose.hold());
        self
    }

    /// Upper-layer binding of the procedure.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// Sets the upper-layer binding, capped at [`MAX_CHUNKS`] each way.
    pub fn with_binding(mut self, mut binding: Binding) -> Self {
        binding.arguments.count = binding.arguments.count.min(MAX_CHUNKS);
        binding.results.count = binding.results.count.min(MAX_CHUNKS);
        self.binding = binding;
        self
    }

    /// Runs each call once, even if it is retransmitted.
    ///
    /// A retransmission has the client, XID, procedure, credential and arguments of the first call. Where each message
    /// has its own credential, as with RPCSEC_GSS, no call is recognized.
    ///
    /// A retransmitted call gets the reply of the first one, once that has run. It gets SYSTEM_ERR if that reply is no
    /// longer cached, or was lost with a handler that panicked. While the cache is full of calls that run, a new call
    /// gets ERR_SYSTEM in version 2; in version 1 its connection is closed, so that the client retransmits. `client`
    /// identifies the caller: [`by_host`](super::duplicate_requests::by_host),
    /// [`by_credential`](super::duplicate_requests::by_credential), or a function of the upper layer. A call without an
    /// identity (`None`) runs each time.
    ///
    /// A handler that refuses with anything but [`Refusal::SystemError`] must have done nothing: a retransmission runs
    /// again.
    ///
    /// Results must be inline: those in Write chunks are not kept. [`Services::add`] refuses such a procedure.
    #[doc(alias("drc", "exactly once"))]
    pub fn cached(
        mut self,
        cache: Arc<DuplicateRequestCache>,
        client: impl Fn(&ServerCall) -> Option<Client> + Send + Sync + 'static,
    ) -> Self {
        self.cached = Some(Cached::new(cache, client));
        self
    }

    /// Bytes of each argument that identify a retransmission; default 256.
    ///
    /// They tell it from another call with the same XID and lengths. Inline arguments are one argument; each Read chunk
    /// is another. Call this after [`cached`](Self::cached).
    pub fn checksummed(mut self, bytes: usize) -> Self {
        if let Some(cached) = &mut self.cached {
            cached.checksummed = bytes;
        }
        self
    }

    /// Runs a call that runs on the shard; otherwise returns it.
    #[inline(always)]
    pub(crate) fn run_here(&self, call: Call<Ready>) -> Result<Call<Answered>, Call<Ready>> {
        if self.plain { Ok(self.run(call)) } else { Err(call) }
    }

    /// Runs a call, on a shard or a worker. A panic costs this call only.
    #[inline(always)]
    pub(crate) fn run(&self, mut call: Call<Ready>) -> Call<Answered> {
        let Handler::Run(run) = &self.handler else { return call.answered(Ok(())) };
        match caught(|| run(call.view_mut())) {
            Ok(Ok(())) => call.answered(Ok(())),
            Ok(Err(refusal)) => call.refused(refusal),
            Err(panic) => call.panicked(panic),
        }
    }

    /// Memory for a Read chunk of `len` bytes; `None` for the shard's pool.
    ///
    /// # Errors
    /// Text of the panic of `choose`.
    pub(crate) fn choose_read_target(
        &self,
        call: &Call<Ready>,
        chunk: usize,
        len: usize,
    ) -> Result<Option<Buf>, Box<str>> {
        let Some(choose) = &self.read_target else { return Ok(None) };
        caught(|| choose(call.view(), chunk, len))
    }

    /// Whether its handler takes calls, to answer them later.
    pub(crate) fn takes_calls(&self) -> bool {
        matches!(self.handler, Handler::Defer(_))
    }

    /// Passes a call to the handler; returns its future, if any. If the handler panics, the call is dropped and
    /// answered as such; `panicked` gets the text.
    pub(crate) fn take(&self, call: DeferredCall, panicked: impl FnOnce(Box<str>)) -> Option<Task> {
        let Handler::Defer(take) = &self.handler else { return None };
        caught(|| take(call)).unwrap_or_else(|panic| {
            panicked(panic);
            None
        })
    }

    /// DDP-eligible arguments (Read chunks): number, and bytes of each.
    ///
    /// A call with more is refused by a transport error, and nothing of it is read.
    pub fn read_chunks(mut self, count: usize, max_len: usize) -> Self {
        self.binding = self.binding.arguments(count.min(MAX_CHUNKS), max_len);
        self
    }

    /// DDP-eligible arguments have no length word in front; see [`Binding::uncounted`].
    ///
    /// Without this, the inline arguments hold the length word of each: 4 bytes, as for `opaque<>`.
    pub fn uncounted(mut self) -> Self {
        self.binding = self.binding.uncounted();
        self
    }

    /// DDP-eligible results (Write chunks): number, and bytes of each.
    ///
    /// Room beyond `max_len` that a caller offers stays unused.
    pub fn write_chunks(mut self, count: usize, max_len: usize) -> Self {
        self.binding = self.binding.results(count.min(MAX_CHUNKS), max_len);
        self
    }

    /// Results in Write chunks are in memory of the handler.
    pub fn results_from_handler(mut self) -> Self {
        self.results_from_handler = true;
        self
    }

    /// Most bytes of inline results: room in the buffer of each reply.
    pub fn max_reply(mut self, bytes: usize) -> Self {
        self.binding.max_reply = bytes;
        self
    }
}

/// Program, version and number of a procedure, as log lines and errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcedureName {
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
}

impl fmt::Display for ProcedureName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, version, procedure } = *self;
        write!(f, "procedure {procedure} of program {}, version {version}", ProgramNumber(program))
    }
}

#[derive(Clone, Debug)]
struct ServiceVersion {
    program: u32,
    version: u32,
    /// Index into `entries` by procedure number, or [`NO_ENTRY`].
    procedures: Vec<usize>,
}

/// Programs, versions and procedures of a server; `Send` and `Sync`.
///
/// Procedure 0 of each version answers by itself (RFC 5531 §12.1), unless given.
///
/// ```
/// use rpcrdma::{Procedure, Services};
///
/// let mut services = Services::new();
/// services.add(0x2000_0001, 1, 1, Procedure::new(|_| Ok(())));
/// services.add(0x2000_0001, 1, 2, Procedure::new(|_| Ok(())).on_workers());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Services<S: Sharing = Threads> {
    versions: Vec<ServiceVersion>,
    entries: Vec<Procedure<S>>,
}

/// [`Services`] of one shard, whose handlers need not be `Send`.
///
/// ```
/// use std::{cell::Cell, rc::Rc};
///
/// use rpcrdma::server::{LocalServer, ServerConfig};
/// use rpcrdma::service::{LocalProcedure, LocalServices};
///
/// let calls = Rc::new(Cell::new(0));
/// let address = format!("soft:local-services-{}", std::process::id()).parse()?;
/// let server = LocalServer::start_with(
///     &address,
///     |_| {
///         let count = LocalProcedure::new(move |_| Ok(calls.set(calls.get() + 1)));
///         let mut services = LocalServices::new();
///         services.add(0x2000_0001, 1, 1, count);
///         services
///     },
///     &ServerConfig::default(),
/// )?;
/// # drop(server);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type LocalServices = Services<Local>;

/// A [`Procedure`] of one shard, whose handler need not be `Send`.
pub type LocalProcedure = Procedure<Local>;

/// Longest RPC reply header of a refusal: accepted, with a range, and no verifier.
pub(crate) const REFUSAL_LEN: usize = 64;
/// Marks a procedure number without an entry.
pub(crate) const NO_ENTRY: usize = usize::MAX;
/// Highest valid procedure number.
pub const MAX_PROCEDURE: u32 = 1023;

impl Services {
    /// Copies the services for one shard, which may add its own.
    pub fn to_local(&self) -> LocalServices {
        Services { versions: self.versions.clone(), entries: self.entries.iter().map(Procedure::to_local).collect() }
    }
}

impl<S: Sharing> Services<S> {
    /// No services.
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks each declaration by `check`.
    fn check(&self, check: impl Fn(&Procedure<S>) -> Option<String>) -> Result<(), StartError> {
        let refused = self.procedures().find_map(|(name, entry)| {
            let cause = check(&self.entries[entry])?;
            Some(StartError::conflict(format_args!("{name}: {cause}")))
        });
        refused.map_or(Ok(()), Err)
    }

    /// Name and entry of each procedure.
    pub(crate) fn procedures(&self) -> impl Iterator<Item = (ProcedureName, usize)> + '_ {
        self.versions.iter().flat_map(|&ServiceVersion { program, version, ref procedures }| {
            let name = move |number| ProcedureName { program, version, procedure: number as u32 };
            let entries = procedures.iter().enumerate().filter(|&(_, &entry)| entry != NO_ENTRY);
            entries.map(move |(number, &entry)| (name(number), entry))
        })
    }

    /// Name of an entry's procedure.
    #[cold]
    pub(crate) fn name_of(&self, entry: usize) -> Option<ProcedureName> {
        self.procedures().find(|&(_, found)| found == entry).map(|(name, _)| name)
    }

    /// Checks that no procedure runs on workers, for a server without them.
    pub(crate) fn check_placement(&self) -> Result<(), StartError> {
        let cause = "`Procedure::on_workers`, or `run` in the placement file, needs `ServerConfig::workers`, and the server has none";
        self.check(|entry| entry.on_workers.then(|| cause.into()))
    }

    /// Checks that no procedure needs a longer buffer than the longest. Replies need `headroom` beside their bytes.
    /// `possible` is the length that no configuration exceeds.
    pub(crate) fn check_buffers(&self, longest: usize, possible: usize, headroom: usize) -> Result<(), StartError> {
        self.check(|entry| {
            let Binding { arguments, results, .. } = entry.binding;
            let needs = [
                ("read_chunks", if arguments.count > 0 && entry.read_target.is_none() { arguments.max_len } else { 0 }),
                ("write_chunks", if results.count > 0 && !entry.results_from_handler { results.max_len } else { 0 }),
                ("max_reply", headroom.saturating_add(entry.reply_room)),
            ];
            let (declared, needed) = needs.into_iter().find(|&(_, needed)| needed > longest)?;
            let knob = if declared == "max_reply" { "long_buffers" } else { "bulk_buffers" };
            let remedy = match needed <= possible {
                true => format!("add some of {needed} bytes to `memory.{knob}`"),
                false => format!("`memory.{knob}` has buffers of at most {possible} bytes: declare fewer"),
            };
            Some(format!(
                "`{declared}` needs buffers of {needed} bytes, headers included, and the longest have {longest}: \
                 {remedy}"
            ))
        })
    }

    /// Adds or replaces a procedure.
    ///
    /// # Panics
    /// The number exceeds [`MAX_PROCEDURE`]; a [cached](Procedure::cached) procedure has results in Write chunks; a
    /// procedure that takes its calls is to run [on workers](Procedure::on_workers).
    pub fn add(&mut self, program: u32, version: u32, procedure: u32, mut entry: Procedure<S>) -> &mut Self {
        let name = ProcedureName { program, version, procedure };
        assert!(procedure <= MAX_PROCEDURE, "{name}: the highest number is {MAX_PROCEDURE}");
        assert!(
            entry.cached.is_none() || entry.binding.results.count == 0,
            "{name} runs once, and results in Write chunks are not kept"
        );
        assert!(
            !entry.takes_calls() || !entry.on_workers,
            "{name} takes its calls, which it does on the shard, and is to run on workers"
        );
        entry.reply_room = ACCEPTED_REPLY_LEN.saturating_add(entry.binding.max_reply).max(REFUSAL_LEN);
        entry.plain = !entry.on_workers && entry.cached.is_none() && !entry.takes_calls();
        let at = self.versions.iter().position(|v| v.program == program && v.version == version);
        let at = at.unwrap_or_else(|| {
            self.entries.push(Procedure::of(Handler::Null));
            let null = self.entries.len() - 1;
            self.versions.push(ServiceVersion { program, version, procedures: vec![null] });
            self.versions.len() - 1
        });
        let procedures = &mut self.versions[at].procedures;
        if procedures.len() <= procedure as usize {
            procedures.resize(procedure as usize + 1, NO_ENTRY);
        }
        procedures[procedure as usize] = self.entries.len();
        self.entries.push(entry);
        self
    }

    pub(crate) fn entry(&self, index: usize) -> &Procedure<S> {
        &self.entries[index]
    }

    /// The entry of a procedure, or its refusal (RFC 5531 §9).
    pub(crate) fn find(&self, program: u32, version: u32, procedure: u32) -> Result<usize, Refusal> {
        let versions = || self.versions.iter().filter(move |known| known.program == program);
        if let Some(known) = versions().find(|known| known.version == version) {
            let entry = known.procedures.get(procedure as usize).filter(|&&entry| entry != NO_ENTRY);
            return entry.copied().ok_or(Refusal::ProcedureUnavailable);
        }
        let numbers = || versions().map(|known| known.version);
        Err(match (numbers().min(), numbers().max()) {
            (Some(low), Some(high)) => Refusal::ProgramMismatch { low, high },
            _ => Refusal::ProgramUnavailable,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_procedure_declares_nothing_twice() {
        let write = Binding::inline(88, 136).arguments(1, 1 << 20);
        assert_eq!(*LocalProcedure::new(|_| Ok(())).with_binding(write).binding(), write);
        let step_by_step = LocalProcedure::new(|_| Ok(())).read_chunks(1, 1 << 20).max_reply(136);
        assert_eq!(step_by_step.binding().arguments, write.arguments);
        assert_eq!(step_by_step.binding().max_reply, write.max_reply);
        let many = LocalProcedure::new(|_| Ok(())).with_binding(Binding::inline(0, 0).arguments(9, 1).results(9, 1));
        assert_eq!((many.binding().arguments.count, many.binding().results.count), (MAX_CHUNKS, MAX_CHUNKS));
    }

    #[test]
    fn a_refused_declaration_names_procedure_program_and_version() {
        let refused: [(u32, fn() -> Procedure); 3] = [
            (MAX_PROCEDURE + 1, || Procedure::new(|_| Ok(()))),
            (7, || Procedure::deferred(|_| {}).on_workers()),
            (7, || {
                let cache = Arc::new(DuplicateRequestCache::new(Default::default()));
                Procedure::new(|_| Ok(())).cached(cache, |_| None).write_chunks(1, 1)
            }),
        ];
        for (number, procedure) in refused {
            let add = || _ = Services::new().add(0x2000_0001, 3, number, procedure());
            let text = caught(add).expect_err("an invalid declaration");
            let name = format!("procedure {number} of program 0x20000001, version 3");
            assert!(text.starts_with(&name), "{text}");
        }
    }

    #[test]
    fn a_declaration_beyond_any_buffer_is_told_that_no_knob_helps() {
        let says = |procedure: Procedure| {
            let mut services = Services::new();
            services.add(0x2000_0001, 3, 7, procedure);
            services.check_buffers(1 << 20, 1 << 30, 64).expect_err("it is longer than 1 MiB").to_string()
        };
        let (new, longest) = (|| Procedure::new(|_| Ok(())), 1 << 30);
        for (procedure, knob) in [
            (new().read_chunks(1, longest + 1), "memory.bulk_buffers"),
            (new().write_chunks(1, longest + 1), "memory.bulk_buffers"),
            (new().max_reply(longest), "memory.long_buffers"),
        ] {
            let (text, end) =
                (says(procedure), format!("`{knob}` has buffers of at most {longest} bytes: declare fewer"));
            assert!(
                text.starts_with("procedure 7 of program 0x20000001, version 3: ") && text.ends_with(&end),
                "{text}"
            );
        }
        assert!(says(new().read_chunks(1, longest)).ends_with("add some of 1073741824 bytes to `memory.bulk_buffers`"));
    }

    #[test]
    fn missing_procedures_are_refused_by_rfc_5531() {
        let mut services = LocalServices::new();
        services.add(100, 2, 5, Procedure::new(|_| Ok(())));
        services.add(100, 4, 1, Procedure::new(|_| Ok(())));
        assert!(services.find(100, 2, 5).is_ok());
        assert!(services.find(100, 2, 0).is_ok(), "procedure 0 answers");
        assert_eq!(services.find(100, 2, 4), Err(Refusal::ProcedureUnavailable));
        assert_eq!(services.find(100, 2, u32::MAX), Err(Refusal::ProcedureUnavailable));
        assert_eq!(services.find(100, 3, 5), Err(Refusal::ProgramMismatch { low: 2, high: 4 }));
        assert_eq!(services.find(101, 2, 5), Err(Refusal::ProgramUnavailable));
    }
}
