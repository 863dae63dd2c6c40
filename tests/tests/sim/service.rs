//! Procedures of the simulated services, in addition to those of `rpcrdma_tests`.
//!
//! These procedures cover long messages, and calls that the server at first rejects because of their chunks. Each
//! procedure checks its arguments and counts its executions.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};

use rpcrdma::service::MAX_CHUNKS;
use rpcrdma::service::duplicate_requests::{ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::{Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::{PROGRAM, VERSION, has_pattern, is_filled_with, pattern, put_pattern, services_with};

use crate::deferred_calls::DeferredCalls;
use crate::plan::Plan;

/// Returns its arguments, which are a [`Name`] and a pattern. The arguments of all other procedures except [`PANICS`]
/// also start with a name.
pub(crate) const NOTE: u32 = 20;
/// A one-way procedure with the arguments of [`NOTE`].
pub(crate) const ONE_WAY: u32 = 21;
/// Takes and returns inline data and chunks.
///
/// Arguments after the name: seed, bytes of inline results, bytes of each result in a Write chunk, a 0 word, filler.
/// Read chunks: the patterns of seed, seed + 1, and so on. Inline results: the pattern of seed. Write chunks: the
/// patterns of seed + 1, seed + 2, and so on.
pub(crate) const MIX: u32 = 22;
/// Takes several items inline, and no chunks.
///
/// Arguments after the name: seed, bytes of each item, a 0 word, the items with their XDR padding, filler. Results: 4
/// bytes per item.
pub(crate) const FLAT: u32 = 23;
/// Refuses a call whose Write chunk is too small for its result.
///
/// Arguments after the name: seed, bytes of each result, a 0 word, filler.
pub(crate) const GROW: u32 = 24;
/// Returns inline results, and no chunks. Arguments after the name: seed, bytes of the results.
pub(crate) const GIVE: u32 = 25;

pub(crate) const PANICS: u32 = 26;

/// The procedure of [`NOTE`], executed once however often a call is retransmitted.
pub(crate) const ONCE: u32 = 27;

/// Identifier of a call: the number of its caller, and its number among that caller's calls.
pub(crate) type Name = (u32, u32);

/// Number of executions of each call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Executions(Arc<Mutex<BTreeMap<Name, u32>>>);

impl Executions {
    fn add(&self, name: Name) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
    }

    pub(crate) fn count(&self, name: Name) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&name).copied().unwrap_or(0)
    }
}

/// Seed of the filler behind the other arguments.
pub(crate) fn filler(seed: u32) -> u32 {
    seed ^ 0x00FF_0000
}

/// The services of a group of servers, or of the clients.
pub(crate) fn services(plan: &Plan, executions: &Executions, deferred: &DeferredCalls) -> Services {
    let longest = plan.longest_message;
    // Covers chunks and long messages.
    let chunk = plan.longest_chunk.max(longest);
    let mut services = services_with(longest, chunk, false);
    // ONCE is neither deferred nor on workers. Otherwise a retransmission could arrive while the call runs, and would
    // get no reply.
    let is_chosen = |mask: u32, procedure: u32| procedure != ONCE && mask >> (procedure - NOTE) & 1 != 0;
    let is_deferred = |procedure| is_chosen(plan.deferred, procedure) && !is_chosen(plan.on_workers, procedure);
    let mut add = |procedure: u32, entry: Procedure| {
        let entry = if is_chosen(plan.on_workers, procedure) { entry.on_workers() } else { entry };
        services.add(PROGRAM, VERSION, procedure, entry);
    };
    let counted_procedure = |procedure, handler| {
        let handler = counted(executions, handler);
        if is_deferred(procedure) { deferred.procedure(handler) } else { Procedure::new(handler) }
    };
    add(NOTE, counted_procedure(NOTE, note).max_reply(longest));
    let one_way_executions = executions.clone();
    add(
        ONE_WAY,
        Procedure::new(move |call| {
            if let Ok(mut words) = Words::of(call)
                && let Ok(name) = words.name()
                && has_pattern(name.1, words.rest())
            {
                one_way_executions.add(name);
            }
            Ok(())
        })
        .one_way(),
    );
    let mixed = counted_procedure(MIX, mix).read_chunks(MAX_CHUNKS, chunk).uncounted();
    add(MIX, mixed.write_chunks(MAX_CHUNKS, chunk).max_reply(longest));
    add(FLAT, counted_procedure(FLAT, flat));
    add(GROW, counted_procedure(GROW, grow).write_chunks(MAX_CHUNKS, chunk));
    add(GIVE, counted_procedure(GIVE, give).max_reply(longest));
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let caller = |call: &ServerCall| {
        let name = Words::of(call).and_then(|mut words| words.name()).ok()?;
        Some(ClientId::number(u64::from(name.0)))
    };
    add(ONCE, counted_procedure(ONCE, note).max_reply(longest).cached(cache, caller));
    // Unlike `panic!`, `resume_unwind` prints no message.
    add(PANICS, Procedure::new(|_| resume_unwind(Box::new("panic of the test"))));
    services
}

/// A handler that returns the name of its call.
type NamingHandler = fn(&mut ServerCall) -> Result<Name, Refusal>;

/// Wraps a handler to count the executions that succeed.
fn counted(
    executions: &Executions,
    handler: NamingHandler,
) -> impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + use<> {
    let executions = executions.clone();
    move |call| handler(call).map(|name| executions.add(name))
}

/// Reads arguments word by word.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn of(call: &'a ServerCall) -> Result<Self, Refusal> {
        Ok(Self(call.args()))
    }

    fn next(&mut self) -> Result<u32, Refusal> {
        let (word, rest) = self.0.split_first_chunk().ok_or(Refusal::GarbageArguments)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*word))
    }

    fn name(&mut self) -> Result<Name, Refusal> {
        Ok((self.next()?, self.next()?))
    }

    /// Reads lengths up to a 0 word. Each is encoded as length + 1.
    fn lengths(&mut self) -> Result<Vec<usize>, Refusal> {
        let mut lengths = Vec::new();
        loop {
            match self.next()? {
                0 => return Ok(lengths),
                _ if lengths.len() == MAX_CHUNKS => return Err(Refusal::GarbageArguments),
                length => lengths.push(length as usize - 1),
            }
        }
    }

    fn rest(&self) -> &'a [u8] {
        self.0
    }
}

/// Refuses the call unless its arguments are valid.
fn require(valid: bool) -> Result<(), Refusal> {
    if valid { Ok(()) } else { Err(Refusal::GarbageArguments) }
}

/// Writes the pattern of `seed` as inline results.
fn write_results(call: &mut ServerCall, seed: u32, len: usize) -> Result<(), Refusal> {
    pattern(seed, call.reply_mut(len)?);
    Ok(())
}

fn note(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let name = words.name()?;
    require(has_pattern(name.1, words.rest()))?;
    let args = call.args().to_vec();
    call.reply_mut(args.len())?.copy_from_slice(&args);
    Ok(name)
}

fn mix(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed, inline_len) = (words.name()?, words.next()?, words.next()? as usize);
    let wanted = words.lengths()?;
    require(has_pattern(filler(seed), words.rest()))?;
    for n in 0..call.read_chunks() {
        require(has_pattern(seed + n as u32, call.read_chunk(n).ok_or(Refusal::SystemError)?))?;
    }
    for (n, &len) in wanted.iter().enumerate() {
        let room = call.write_chunk_capacity(n).ok_or(Refusal::GarbageArguments)?;
        let len = len.min(room);
        if let Ok(writer) = call.result_writer(n) {
            put_pattern(writer, seed + 1 + n as u32, len)?;
        }
    }
    write_results(call, seed, inline_len)?;
    Ok(name)
}

fn flat(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed) = (words.name()?, words.next()?);
    let items = words.lengths()?;
    let mut rest = words.rest();
    for (n, &len) in items.iter().enumerate() {
        let (item, more) = rest.split_at_checked(len.next_multiple_of(4)).ok_or(Refusal::GarbageArguments)?;
        require(has_pattern(seed + n as u32, &item[..len]) && is_filled_with(0, &item[len..]))?;
        rest = more;
    }
    require(has_pattern(filler(seed), rest))?;
    write_results(call, seed, 4 * items.len())?;
    Ok(name)
}

fn grow(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed) = (words.name()?, words.next()?);
    let wanted = words.lengths()?;
    require(has_pattern(filler(seed), words.rest()))?;
    for (n, &len) in wanted.iter().enumerate() {
        let room = call.write_chunk_capacity(n).ok_or(Refusal::GarbageArguments)?;
        if room < len {
            return Err(Refusal::ShortChunk { index: n as u32, needed: len as u32 });
        }
        put_pattern(call.result_writer(n)?, seed + n as u32, len)?;
    }
    write_results(call, seed, 8)?;
    Ok(name)
}

fn give(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed, len) = (words.name()?, words.next()?, words.next()? as usize);
    write_results(call, seed, len)?;
    Ok(name)
}
