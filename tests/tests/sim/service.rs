//! Procedures of simulated services, in addition to those of all tests.
//!
//! They cover long messages, and calls that the server at first refuses. Each checks its arguments and counts
//! its executions.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};

use rpcrdma::service::MAX_CHUNKS;
use rpcrdma::service::duplicate_requests::{ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::{Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::{PROGRAM, VERSION, filled, pattern, patterned, put_pattern, services_with};

use crate::deferred_calls::DeferredCalls;
use crate::plan::Plan;

/// Returns its arguments. They start with a [`Name`], as do those of the following procedures.
pub(crate) const NOTE: u32 = 20;
/// A one-way procedure that checks its arguments.
pub(crate) const TELL: u32 = 21;
/// After the name: seed, bytes of inline results, bytes of each result in a Write chunk, a 0 word, filler. Read chunks:
/// the patterns of seed, seed + 1, and so on. Inline results: the pattern of seed. Write chunks: the patterns of seed +
/// 1 and so on.
pub(crate) const MIX: u32 = 22;
/// Takes no chunks. After the name: seed, bytes of each item, a 0 word, the items with their round-up, filler. Results:
/// the number of items.
pub(crate) const FLAT: u32 = 23;
/// After the name: seed, bytes of each result, a 0 word. Refuses a result whose Write chunk is too small.
pub(crate) const GROW: u32 = 24;
/// Returns no chunks. After the name: seed, bytes of inline results.
pub(crate) const GIVE: u32 = 25;

pub(crate) const PANICS: u32 = 26;

/// [`NOTE`], executed once however often the call is retransmitted.
pub(crate) const ONCE: u32 = 27;

/// Identifier of a call: its caller, and its number among the calls of this caller.
pub(crate) type Name = (u32, u32);

/// Executions of each call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs(Arc<Mutex<BTreeMap<Name, u32>>>);

impl Runs {
    fn add(&self, name: Name) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
    }

    pub(crate) fn of(&self, name: Name) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&name).copied().unwrap_or(0)
    }
}

/// The filler's seed.
pub(crate) fn filler(seed: u32) -> u32 {
    seed ^ 0x00FF_0000
}

pub(crate) fn services(plan: &Plan, runs: &Runs, later: &DeferredCalls) -> Services {
    let longest = plan.longest_message;
    // The declared maximum covers any chunk.
    let chunk = plan.longest_chunk.max(longest);
    let mut services = services_with(longest, chunk, false);
    // ONCE is neither deferred nor on workers, because a retransmission that arrives while its call runs gets no reply.
    // Its caller would have to retransmit again.
    let chosen = |mask: u32, procedure: u32| procedure != ONCE && mask >> (procedure - NOTE) & 1 != 0;
    let is_later = |procedure| chosen(plan.deferred, procedure) && !chosen(plan.on_workers, procedure);
    let mut add = |procedure: u32, entry: Procedure| {
        let entry = if chosen(plan.on_workers, procedure) { entry.on_workers() } else { entry };
        services.add(PROGRAM, VERSION, procedure, entry);
    };
    let recorded = |procedure, handler| {
        let work = recorded(runs, handler);
        if is_later(procedure) { later.procedure(work) } else { Procedure::new(work) }
    };
    add(NOTE, recorded(NOTE, note).max_reply(longest));
    let one_way_runs = runs.clone();
    add(
        TELL,
        Procedure::new(move |call| {
            if let Ok(mut words) = Words::of(call)
                && let Ok(name) = words.name()
                && patterned(name.1, words.rest())
            {
                one_way_runs.add(name);
            }
            Ok(())
        })
        .one_way(),
    );
    let both = recorded(MIX, mix).read_chunks(MAX_CHUNKS, chunk).uncounted().write_chunks(MAX_CHUNKS, chunk);
    add(MIX, both.max_reply(longest));
    add(FLAT, recorded(FLAT, flat));
    add(GROW, recorded(GROW, grow).write_chunks(MAX_CHUNKS, chunk));
    add(GIVE, recorded(GIVE, give).max_reply(longest));
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let caller = |call: &ServerCall| {
        let name = Words::of(call).and_then(|mut words| words.name()).ok()?;
        Some(ClientId::number(u64::from(name.0)))
    };
    add(ONCE, recorded(ONCE, note).max_reply(longest).cached(cache, caller));
    // Unlike `panic!`, this does not print a message.
    add(PANICS, Procedure::new(|_| resume_unwind(Box::new("as the plan wants"))));
    services
}

type Checked = fn(&mut ServerCall) -> Result<Name, Refusal>;

/// A handler whose successes are counted.
fn recorded(runs: &Runs, handler: Checked) -> impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + use<> {
    let runs = runs.clone();
    move |call| handler(call).map(|name| runs.add(name))
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

    /// Words up to a 0 word. Each is encoded plus one.
    fn list(&mut self) -> Result<Vec<usize>, Refusal> {
        let mut list = Vec::new();
        loop {
            match self.next()? {
                0 => return Ok(list),
                _ if list.len() == MAX_CHUNKS => return Err(Refusal::GarbageArguments),
                length => list.push(length as usize - 1),
            }
        }
    }

    fn rest(&self) -> &'a [u8] {
        self.0
    }
}

fn require(holds: bool) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::GarbageArguments) }
}

fn results(call: &mut ServerCall, seed: u32, len: usize) -> Result<(), Refusal> {
    pattern(seed, call.reply_mut(len)?);
    Ok(())
}

fn note(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let name = words.name()?;
    require(patterned(name.1, words.rest()))?;
    let args = call.args().to_vec();
    call.reply_mut(args.len())?.copy_from_slice(&args);
    Ok(name)
}

fn mix(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed, inline_len) = (words.name()?, words.next()?, words.next()? as usize);
    let wanted = words.list()?;
    require(patterned(filler(seed), words.rest()))?;
    for n in 0..call.read_chunks() {
        require(patterned(seed + n as u32, call.read_chunk(n).ok_or(Refusal::SystemError)?))?;
    }
    for (n, &len) in wanted.iter().enumerate() {
        let room = call.write_chunk_capacity(n).ok_or(Refusal::GarbageArguments)?;
        let len = len.min(room);
        if let Ok(writer) = call.result_writer(n) {
            put_pattern(writer, seed + 1 + n as u32, len)?;
        }
    }
    results(call, seed, inline_len)?;
    Ok(name)
}

fn flat(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed) = (words.name()?, words.next()?);
    let items = words.list()?;
    let mut rest = words.rest();
    for (n, &len) in items.iter().enumerate() {
        let (item, more) = rest.split_at_checked(len.next_multiple_of(4)).ok_or(Refusal::GarbageArguments)?;
        require(patterned(seed + n as u32, &item[..len]) && filled(0, &item[len..]))?;
        rest = more;
    }
    require(patterned(filler(seed), rest))?;
    results(call, seed, 4 * items.len())?;
    Ok(name)
}

fn grow(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed) = (words.name()?, words.next()?);
    let wanted = words.list()?;
    require(patterned(filler(seed), words.rest()))?;
    for (n, &len) in wanted.iter().enumerate() {
        let room = call.write_chunk_capacity(n).ok_or(Refusal::GarbageArguments)?;
        if room < len {
            return Err(Refusal::ShortChunk { index: n as u32, needed: len as u32 });
        }
        put_pattern(call.result_writer(n)?, seed + n as u32, len)?;
    }
    results(call, seed, 8)?;
    Ok(name)
}

fn give(call: &mut ServerCall) -> Result<Name, Refusal> {
    let mut words = Words::of(call)?;
    let (name, seed, len) = (words.name()?, words.next()?, words.next()? as usize);
    results(call, seed, len)?;
    Ok(name)
}
