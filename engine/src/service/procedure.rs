//! Procedures and their tables: handlers, bindings, programs and versions.

use std::fmt;
use std::sync::Arc;

use rpcrdma_mempool::Buf;

use super::call::{Answered, MAX_CHUNKS, Ready, ServedCall, ServerCall};
use super::deferred::DeferredCall;
use super::duplicate_requests::{CallKey, ClientId, DEFAULT_CHECKSUM_LEN, DuplicateRequestCache, Lookup};
use super::handler::{Handler, IntoAsyncHandler, IntoHandler, Local, Sharing, Task, Threads};
use crate::binding::Binding;
use crate::cross_thread::panics::catch_panic;
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
    /// Whether the handler runs on a worker thread, so that it may block and compute. Otherwise it runs on the shard
    /// that received the call, which does nothing else meanwhile.
    pub(crate) on_workers: bool,
    pub(crate) binding: Binding,
    /// Whether the handler provides the memory of results in Write chunks. Otherwise it writes them to the shard's
    /// pool.
    pub(crate) results_from_handler: bool,
    /// Chooses the target memory of Read chunks; `None` for the shard's pool.
    pub(crate) read_target: Option<S::Place>,
    pub(crate) cached: Option<ProcedureCache>,
    /// Whether its calls have no reply.
    pub(crate) is_one_way: bool,
    /// Whether its calls always run immediately on the receiving shard, and are not cached.
    runs_immediately: bool,
    /// Bytes of the RPC message of the longest reply, with results or a refusal.
    pub(crate) reply_room: usize,
}

/// The duplicate request cache of a procedure, with the function that identifies clients.
#[derive(Clone)]
pub(crate) struct ProcedureCache {
    cache: Arc<DuplicateRequestCache>,
    client: Arc<Identify>,
    /// Bytes of each argument that the key covers.
    checksum_len: usize,
}

/// Identifies the caller of a call.
type Identify = dyn Fn(&ServerCall) -> Option<ClientId> + Send + Sync;

impl ProcedureCache {
    pub(crate) fn new(
        cache: Arc<DuplicateRequestCache>,
        client: impl Fn(&ServerCall) -> Option<ClientId> + Send + Sync + 'static,
    ) -> Self {
        Self { cache, client: Arc::new(client), checksum_len: DEFAULT_CHECKSUM_LEN }
    }

    /// Looks a call up in the cache.
    ///
    /// Returns `None` for a new call, which then holds its entry of the cache and counts against the quota of `owner`.
    ///
    /// # Errors
    /// The application's function that identifies clients panicked, with this text.
    pub(crate) fn look_up(&self, call: &mut ServedCall<Ready>, owner: &str) -> Result<Option<Lookup>, Box<str>> {
        let Some(key) = self.key(call.view())? else { return Ok(Some(Lookup::Unidentified)) };
        Ok(match self.cache.begin(key, owner) {
            Lookup::New(reservation) => {
                call.set_reservation(reservation);
                None
            }
            known => Some(known),
        })
    }

    /// Whether the original call of this retransmission is still running.
    pub(crate) fn is_running(&self, call: &ServedCall<Ready>) -> bool {
        matches!(self.key(call.view()), Ok(Some(key)) if self.cache.is_running(&key))
    }

    fn key(&self, call: &ServerCall) -> Result<Option<CallKey>, Box<str>> {
        let client = catch_panic(|| (self.client)(call))?;
        Ok(client.map(|client| self.cache.key(client, call, self.checksum_len)))
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
    /// A call whose connection closes before a worker takes it does not run, because no caller waits for its reply.
    /// This includes [one-way](Self::one_way) calls, and all queued calls when the server stops.
    pub fn on_workers(mut self) -> Self {
        self.on_workers = true;
        self
    }

    /// Converts the procedure to one of a single shard.
    fn to_local(&self) -> Procedure<Local> {
        Procedure {
            handler: self.handler.to_local(),
            on_workers: self.on_workers,
            binding: self.binding,
            results_from_handler: self.results_from_handler,
            read_target: self.read_target.clone().map(|choose| choose as _),
            cached: self.cached.clone(),
            is_one_way: self.is_one_way,
            runs_immediately: self.runs_immediately,
            reply_room: self.reply_room,
        }
    }
}

impl<S: Sharing> Procedure<S> {
    fn with_handler(handler: Handler<S>) -> Self {
        Self {
            handler,
            on_workers: false,
            binding: Binding::inline(usize::MAX, 256),
            results_from_handler: false,
            read_target: None,
            cached: None,
            is_one_way: false,
            runs_immediately: true,
            reply_room: REFUSAL_LEN,
        }
    }

    /// A procedure without chunks that runs on the shard.
    ///
    /// Its replies have up to 256 bytes, see [`max_reply`](Self::max_reply).
    ///
    /// Handlers of [`Services`] are `Send` and `Sync`, because all shards and workers run them. Handlers of
    /// [`LocalServices`] run on one thread and may share state by `Rc` and `Cell`. The bounds `IntoHandler` and
    /// `IntoAsyncHandler` express this.
    pub fn new(handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + IntoHandler<S::Run>) -> Self {
        Self::with_handler(Handler::Run(handler.into_handler()))
    }

    /// A procedure whose handler answers [later](DeferredCall::answer), from any thread.
    ///
    /// This suits servers that submit I/O. The handler runs on the shard, and must not block.
    pub fn deferred(handler: impl Fn(DeferredCall) + IntoHandler<S::Defer>) -> Self {
        Self::with_handler(Handler::Defer(handler.into_handler()))
    }

    /// A procedure whose handler is a future, polled by the shard.
    ///
    /// Any thread may wake the future; it needs no runtime. It [answers](DeferredCall::answer) its call, and may
    /// continue after that. It is dropped when the connection closes.
    pub fn asynchronous<T, H>(handler: H) -> Self
    where
        T: Future<Output = ()> + 'static,
        H: Fn(DeferredCall) -> T + IntoAsyncHandler<S::Defer>,
    {
        Self::with_handler(Handler::Defer(handler.into_async_handler()))
    }

    /// Sends no replies; callers make [one-way](crate::client::ClientCall::one_way) calls.
    ///
    /// The result of a handler is discarded. A [deferred](Self::deferred) call ends when it is dropped.
    pub fn one_way(mut self) -> Self {
        self.is_one_way = true;
        if let Handler::Run(run) = self.handler {
            self.handler = Handler::Run(S::without_reply(run));
        }
        self
    }

    /// Reads Read chunks into memory that `choose` returns.
    ///
    /// `choose` gets the call with its inline arguments, the index of the chunk, and the length of the chunk including
    /// an XDR round-up. The current range of the returned buffer is the target; it may be longer than the chunk. If
    /// `choose` returns `None`, the chunk is read into memory of the shard's pool. The handler gets the chunk by
    /// [`ServerCall::read_chunk`] or [`take_read_chunk`](ServerCall::take_read_chunk).
    ///
    /// The buffer must come from a pool that was created on the shard's thread, in the shard's own arena or in one of
    /// [`memory.arenas`](crate::config::MemoryConfig::arenas). A call with an unsuitable or too short buffer is
    /// answered with SYSTEM_ERR, and none of its chunks is read. The log names the cause, and
    /// [`ShardStats::get`](crate::stats::ShardStats::get)`("read_targets_refused")` counts such buffers.
    ///
    /// `choose` runs on the shard and must not block. It runs again for a call that has waited for memory.
    #[doc(alias("direct data placement", "zero copy"))]
    pub fn place_reads_in(
        mut self,
        choose: impl Fn(&ServerCall, usize, usize) -> Option<Buf> + IntoHandler<S::Place>,
    ) -> Self {
        self.read_target = Some(choose.into_handler());
        self
    }

    /// Upper-layer binding of the procedure.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// Sets the upper-layer binding, with at most [`MAX_CHUNKS`] chunks each way.
    pub fn with_binding(mut self, mut binding: Binding) -> Self {
        binding.arguments.count = binding.arguments.count.min(MAX_CHUNKS);
        binding.results.count = binding.results.count.min(MAX_CHUNKS);
        self.binding = binding;
        self
    }

    /// Runs each call once, even if it is retransmitted.
    ///
    /// A retransmission has the client, XID, procedure, credential and arguments of the original call. Where each
    /// message has its own credential, as with RPCSEC_GSS, no retransmission is recognized.
    ///
    /// A retransmission gets the reply of the original call, once that has run. It gets SYSTEM_ERR if that reply is no
    /// longer cached, or was lost because the handler panicked. While the cache is full of running calls, a new call
    /// gets the transport error ERR_SYSTEM in version 2; in version 1 its connection is closed, so that the client
    /// retransmits. `client` identifies the caller: [`by_host`](super::duplicate_requests::by_host),
    /// [`by_credential`](super::duplicate_requests::by_credential), or a function of the upper layer. A call without an
    /// identity (`None`) runs each time.
    ///
    /// A handler that refuses a call with anything but [`Refusal::SystemError`] must not have changed anything, because
    /// a retransmission runs again.
    ///
    /// Results must be inline, because those in Write chunks are not kept. [`Services::add`] panics for a procedure
    /// with Write chunks.
    #[doc(alias("drc", "exactly once"))]
    pub fn cached(
        mut self,
        cache: Arc<DuplicateRequestCache>,
        client: impl Fn(&ServerCall) -> Option<ClientId> + Send + Sync + 'static,
    ) -> Self {
        self.cached = Some(ProcedureCache::new(cache, client));
        self
    }

    /// Bytes of each argument that identify a retransmission; default 256.
    ///
    /// These bytes distinguish a retransmission from another call with the same XID and lengths. The inline arguments
    /// count as one argument, and each Read chunk as another one. Call this after [`cached`](Self::cached).
    pub fn checksummed(mut self, bytes: usize) -> Self {
        if let Some(cached) = &mut self.cached {
            cached.checksum_len = bytes;
        }
        self
    }

    /// Runs a call whose procedure always runs immediately on the shard; returns any other call.
    #[inline(always)]
    pub(crate) fn run_immediately(&self, call: ServedCall<Ready>) -> Result<ServedCall<Answered>, ServedCall<Ready>> {
        if self.runs_immediately { Ok(self.run(call)) } else { Err(call) }
    }

    /// Runs a call, on a shard or a worker. A panic of the handler ends only this call.
    #[inline(always)]
    pub(crate) fn run(&self, mut call: ServedCall<Ready>) -> ServedCall<Answered> {
        let Handler::Run(run) = &self.handler else { return call.answered(Ok(())) };
        match catch_panic(|| run(call.view_mut())) {
            Ok(Ok(())) => call.answered(Ok(())),
            Ok(Err(refusal)) => call.refused(refusal),
            Err(panic) => call.panicked(panic),
        }
    }

    /// Chooses memory for a Read chunk of `len` bytes; `None` stands for the shard's pool.
    ///
    /// # Errors
    /// The `place_reads_in` callback panicked, with this text.
    pub(crate) fn choose_read_target(
        &self,
        call: &ServedCall<Ready>,
        chunk: usize,
        len: usize,
    ) -> Result<Option<Buf>, Box<str>> {
        let Some(choose) = &self.read_target else { return Ok(None) };
        catch_panic(|| choose(call.view(), chunk, len))
    }

    /// Whether its handler takes calls, and answers them later.
    pub(crate) fn is_deferred(&self) -> bool {
        matches!(self.handler, Handler::Defer(_))
    }

    /// Passes a call to its deferred handler; returns the handler's future, if any.
    ///
    /// If the handler panics, the call is answered like a dropped call (SYSTEM_ERR), and `panicked` gets the text.
    pub(crate) fn defer(&self, call: DeferredCall, panicked: impl FnOnce(Box<str>)) -> Option<Task> {
        let Handler::Defer(handler) = &self.handler else { return None };
        catch_panic(|| handler(call)).unwrap_or_else(|panic| {
            panicked(panic);
            None
        })
    }

    /// DDP-eligible arguments (Read chunks): number, and maximum bytes of each.
    ///
    /// A call that exceeds them is refused by a transport error, and none of its chunks is read.
    pub fn read_chunks(mut self, count: usize, max_len: usize) -> Self {
        self.binding = self.binding.arguments(count.min(MAX_CHUNKS), max_len);
        self
    }

    /// Declares that no length word precedes DDP-eligible arguments; see [`Binding::uncounted`].
    ///
    /// Without this, the inline arguments hold a length word of 4 bytes for each of them, as for `opaque<>`.
    pub fn uncounted(mut self) -> Self {
        self.binding = self.binding.uncounted();
        self
    }

    /// DDP-eligible results (Write chunks): number, and maximum bytes of each.
    ///
    /// If a caller offers more room than `max_len`, the rest stays unused.
    pub fn write_chunks(mut self, count: usize, max_len: usize) -> Self {
        self.binding = self.binding.results(count.min(MAX_CHUNKS), max_len);
        self
    }

    /// Declares that the handler provides the memory of results in Write chunks.
    pub fn results_from_handler(mut self) -> Self {
        self.results_from_handler = true;
        self
    }

    /// Maximum bytes of inline results; each reply's buffer has room for them.
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

/// Procedures of one version of a program.
#[derive(Clone, Debug)]
struct ServiceVersion {
    program: u32,
    version: u32,
    /// Index into `entries` by procedure number, or [`NO_ENTRY`].
    procedures: Vec<usize>,
}

/// Programs, versions and procedures of a server; `Send` and `Sync`.
///
/// Procedure 0 of each version is answered by the engine (RFC 5531 §12.1), unless it is added.
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
/// Marks a procedure number without a procedure.
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

    /// Checks each procedure with `check`, which returns the defect.
    fn check(&self, check: impl Fn(&Procedure<S>) -> Option<String>) -> Result<(), StartError> {
        let refused = self.procedures().find_map(|(name, index)| {
            let cause = check(&self.entries[index])?;
            Some(StartError::conflict(format_args!("{name}: {cause}")))
        });
        refused.map_or(Ok(()), Err)
    }

    /// Name of each procedure, and its index in `entries`.
    pub(crate) fn procedures(&self) -> impl Iterator<Item = (ProcedureName, usize)> + '_ {
        self.versions.iter().flat_map(|&ServiceVersion { program, version, ref procedures }| {
            let name = move |number| ProcedureName { program, version, procedure: number as u32 };
            let indices = procedures.iter().enumerate().filter(|&(_, &index)| index != NO_ENTRY);
            indices.map(move |(number, &index)| (name(number), index))
        })
    }

    /// Name of the procedure with this index.
    #[cold]
    pub(crate) fn name_of(&self, index: usize) -> Option<ProcedureName> {
        self.procedures().find(|&(_, other)| other == index).map(|(name, _)| name)
    }

    /// Checks that no procedure runs on workers, for a server without them.
    pub(crate) fn check_placement(&self) -> Result<(), StartError> {
        let cause = "`Procedure::on_workers`, or `run` in the placement file, needs `ServerConfig::workers`, which is \
                     `None`";
        self.check(|procedure| procedure.on_workers.then(|| cause.into()))
    }

    /// Checks that buffers of `longest` bytes suffice for every procedure.
    ///
    /// A reply needs `headroom` bytes in addition. Buffers have at most `possible` bytes in any configuration.
    pub(crate) fn check_buffers(&self, longest: usize, possible: usize, headroom: usize) -> Result<(), StartError> {
        self.check(|procedure| {
            let Binding { arguments, results, .. } = procedure.binding;
            let reads_into_pool = arguments.count > 0 && procedure.read_target.is_none();
            let writes_from_pool = results.count > 0 && !procedure.results_from_handler;
            let needs = [
                ("read_chunks", if reads_into_pool { arguments.max_len } else { 0 }),
                ("write_chunks", if writes_from_pool { results.max_len } else { 0 }),
                ("max_reply", headroom.saturating_add(procedure.reply_room)),
            ];
            let (declared, needed) = needs.into_iter().find(|&(_, needed)| needed > longest)?;
            let knob = if declared == "max_reply" { "long_buffers" } else { "bulk_buffers" };
            let remedy = match needed <= possible {
                true => format!("add buffers of {needed} bytes to `memory.{knob}`"),
                false => format!("declare fewer bytes, because buffers of `memory.{knob}` have at most {possible}"),
            };
            Some(format!(
                "`{declared}` needs buffers of {needed} bytes, including headers, which exceeds the longest buffer of \
                 {longest} bytes: {remedy}"
            ))
        })
    }

    /// Adds or replaces a procedure.
    ///
    /// # Panics
    /// If the number exceeds [`MAX_PROCEDURE`], if a [cached](Procedure::cached) procedure has results in Write chunks,
    /// or if a [deferred](Procedure::deferred) procedure runs [on workers](Procedure::on_workers).
    pub fn add(&mut self, program: u32, version: u32, procedure: u32, mut entry: Procedure<S>) -> &mut Self {
        let name = ProcedureName { program, version, procedure };
        assert!(procedure <= MAX_PROCEDURE, "{name}: the number exceeds {MAX_PROCEDURE}");
        assert!(
            entry.cached.is_none() || entry.binding.results.count == 0,
            "{name}: `Procedure::cached` excludes `write_chunks`, because results in Write chunks are not kept"
        );
        assert!(
            !entry.is_deferred() || !entry.on_workers,
            "{name}: a deferred handler runs on the shard, which excludes `Procedure::on_workers`"
        );
        entry.reply_room = ACCEPTED_REPLY_LEN.saturating_add(entry.binding.max_reply).max(REFUSAL_LEN);
        entry.runs_immediately = !entry.on_workers && entry.cached.is_none() && !entry.is_deferred();
        let at = self.versions.iter().position(|v| v.program == program && v.version == version);
        let at = at.unwrap_or_else(|| {
            self.entries.push(Procedure::with_handler(Handler::Null));
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

    /// The procedure with this index.
    pub(crate) fn entry(&self, index: usize) -> &Procedure<S> {
        &self.entries[index]
    }

    /// Index of a procedure, or the refusal of its calls (RFC 5531 §9).
    pub(crate) fn find(&self, program: u32, version: u32, procedure: u32) -> Result<usize, Refusal> {
        let versions = || self.versions.iter().filter(move |known| known.program == program);
        if let Some(known) = versions().find(|known| known.version == version) {
            let index = known.procedures.get(procedure as usize).filter(|&&index| index != NO_ENTRY);
            return index.copied().ok_or(Refusal::ProcedureUnavailable);
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
    fn a_binding_equals_the_declarations_one_by_one() {
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
            let text = catch_panic(add).expect_err("an invalid declaration");
            let name = format!("procedure {number} of program 0x20000001, version 3");
            assert!(text.starts_with(&name), "{text}");
        }
    }

    #[test]
    fn error_of_a_declaration_beyond_any_buffer_suggests_a_smaller_one() {
        let error_of = |procedure: Procedure| {
            let mut services = Services::new();
            services.add(0x2000_0001, 3, 7, procedure);
            services.check_buffers(1 << 20, 1 << 30, 64).expect_err("the declaration exceeds 1 MiB").to_string()
        };
        let (new, longest) = (|| Procedure::new(|_| Ok(())), 1 << 30);
        for (procedure, knob) in [
            (new().read_chunks(1, longest + 1), "memory.bulk_buffers"),
            (new().write_chunks(1, longest + 1), "memory.bulk_buffers"),
            (new().max_reply(longest), "memory.long_buffers"),
        ] {
            let end = format!("declare fewer bytes, because buffers of `{knob}` have at most {longest}");
            let text = error_of(procedure);
            assert!(
                text.starts_with("procedure 7 of program 0x20000001, version 3: ") && text.ends_with(&end),
                "{text}"
            );
        }
        let text = error_of(new().read_chunks(1, longest));
        assert!(text.ends_with("add buffers of 1073741824 bytes to `memory.bulk_buffers`"), "{text}");
    }

    #[test]
    fn missing_procedures_are_refused_by_rfc_5531() {
        let mut services = LocalServices::new();
        services.add(100, 2, 5, Procedure::new(|_| Ok(())));
        services.add(100, 4, 1, Procedure::new(|_| Ok(())));
        assert!(services.find(100, 2, 5).is_ok());
        assert!(services.find(100, 2, 0).is_ok(), "procedure 0 is answered by the engine");
        assert_eq!(services.find(100, 2, 4), Err(Refusal::ProcedureUnavailable));
        assert_eq!(services.find(100, 2, u32::MAX), Err(Refusal::ProcedureUnavailable));
        assert_eq!(services.find(100, 3, 5), Err(Refusal::ProgramMismatch { low: 2, high: 4 }));
        assert_eq!(services.find(101, 2, 5), Err(Refusal::ProgramUnavailable));
    }
}
