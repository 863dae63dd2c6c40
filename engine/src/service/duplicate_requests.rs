//! Replies kept for a while, so that a call which comes twice runs once.
//!
//! A client whose connection is lost sends its unanswered calls again, with the same XIDs. For a procedure
//! that must not run twice (one that appends, renames, removes) the
//! cache is asked first. [`Procedure::cached`](super::Procedure::cached) does that, for procedures on shards
//! and on workers; what it does is this:
//!
//! ```
//! # use std::sync::Arc;
//! use rpcrdma::service::duplicate_requests::{CallKey, Client, Lookup, DuplicateRequestCache, DuplicateRequestCacheConfig};
//! let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
//! let key = CallKey::new(Client::number(7), 0x1234, 100003, 3, 12, b"arguments");
//! match cache.begin(key) {
//!     Lookup::New(claim) => claim.finish(b"results"), // after running it
//!     Lookup::InProgress => {}                          // answer both when the first one is through
//!     Lookup::Done(reply) => drop(reply),               // send this
//!     Lookup::Lost | Lookup::Full => {}                 // answer SYSTEM_ERR
//! }
//! assert!(matches!(cache.begin(key), Lookup::Done(reply) if &reply[..] == b"results"));
//! ```
//!
//! One cache serves all shards and workers: the new connection may well land on another shard than the old
//! one, so a cache per shard would miss just what it is there for. It is cut into parts, each with its own
//! lock, held for a lookup and never while a call runs. Calls that use it are not the ones for which a lock
//! would show.
//!
//! What it is not: it is in memory, so it does not outlive the server; it is bounded, so a reply may be gone
//! when it is asked for, soonest when clients that call much push it out; and it keeps inline results only,
//! so a procedure whose results go into Write chunks has no use for it (those read, and may run twice).
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::ServerCall;
use crate::wire::rpc::OpaqueAuth;

/// Bytes that the key's checksum covers of the inline arguments, and of each that came as a Read chunk.
pub const CHECKSUMMED: usize = 256;
/// Memory of an entry beside its reply, bytes, about: key, state, and its place in the queue.
pub const ENTRY_LEN: usize = 2 * (size_of::<CallKey>() + size_of::<State>());

/// What the cache may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DuplicateRequestCacheConfig {
    /// Most calls, in progress or finished. Each takes about [`ENTRY_LEN`] bytes.
    pub entries: usize,
    /// Most bytes of replies. The longest that is kept is one part's share: [`DuplicateRequestCache::longest_reply`].
    pub bytes: usize,
    /// How long a finished call is remembered. A client sends a call again within its own time-out, of some minutes at
    /// most; one that uses an XID anew later makes another call.
    pub keep: Duration,
}

/// 4096 calls, 16 MiB of replies, and 120 s, which is what Linux's NFS server has.
impl Default for DuplicateRequestCacheConfig {
    fn default() -> Self {
        Self { entries: 4096, bytes: 16 << 20, keep: Duration::from_secs(120) }
    }
}

/// Who calls. It must be the same after a reconnect, and different clients must have different ones: an
/// identifier of the upper layer, or the name that [host authentication](crate::auth) proved; not the
/// connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Client([u8; 32]);

impl Client {
    /// A client that the service knows by number.
    pub const fn number(number: u64) -> Self {
        let mut id = [0; 32];
        let (_, tail) = id.split_at_mut(24);
        tail.copy_from_slice(&number.to_be_bytes());
        Client(id)
    }

    /// A client that the service knows by some bytes, of any length; a digest of them is kept.
    pub fn named(name: &[u8]) -> Self {
        Client(Sha256::digest(name).into())
    }
}

/// The client whose host has [proved its name](ServerCall::peer_identity). All users of a host are one client
/// then: right if the host numbers its calls.
pub fn by_host(call: &ServerCall) -> Option<Client> {
    call.peer_identity().map(|name| Client::named(name.as_bytes()))
}

/// The client with this credential: right where a credential names a caller on a host, as AUTH_SYS with machine name
/// and stamp does; `None` for AUTH_NONE. [`Credential::sys`](crate::client::Credential::sys) stamps 0: its machine names
/// must differ then.
pub fn by_credential(call: &ServerCall) -> Option<Client> {
    let (flavor, body) = call.credential();
    (flavor != 0).then(|| Client::named(&[&flavor.to_be_bytes()[..], body].concat()))
}

/// What makes two calls the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallKey {
    client: Client,
    xid: u32,
    program: u32,
    version: u32,
    procedure: u32,
    checksum: u64,
}

impl CallKey {
    /// The key of a call with these arguments: those that came inline, without RPC header, whose credential
    /// may differ when the call comes again. The first [`CHECKSUMMED`] bytes count, and the length: a
    /// client that uses an XID anew soon, for another call, gets no old reply. Arguments that came as Read chunks are
    /// [added](Self::with_chunk).
    pub fn new(client: Client, xid: u32, program: u32, version: u32, procedure: u32, args: &[u8]) -> Self {
        Self { client, xid, program, version, procedure, checksum: 0 }.with(args, CHECKSUMMED)
    }

    /// The same of a call with this argument besides, as it came in a Read chunk: its first [`CHECKSUMMED`] bytes
    /// count, and its length.
    #[must_use]
    pub fn with_chunk(self, bytes: &[u8]) -> Self {
        self.with(bytes, CHECKSUMMED)
    }

    /// Of a call that is being served; so many bytes count of each argument.
    pub(super) fn of(client: Client, call: &ServerCall, checksummed: usize) -> Self {
        let (program, version, procedure) = (call.program(), call.version(), call.procedure());
        let inline = Self { client, xid: call.xid(), program, version, procedure, checksum: 0 };
        let inline = inline.with(call.args(), checksummed);
        (0..call.read_chunks()).fold(inline, |key, n| key.with(call.read_chunk(n).unwrap_or_default(), checksummed))
    }

    fn with(self, bytes: &[u8], checksummed: usize) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.checksum);
        hasher.write_usize(bytes.len());
        hasher.write(&bytes[..bytes.len().min(checksummed)]);
        Self { checksum: hasher.finish(), ..self }
    }
}

/// What is known of a call.
#[derive(Debug)]
#[must_use = "a call that came twice must not run"]
pub enum Lookup {
    /// It is new: run it, then [finish](Claim::finish) the claim.
    New(Claim),
    /// It runs right now. The first one's answer goes to the connection that it came by, which may be gone:
    /// this one waits until the first [is through](DuplicateRequestCache::is_running), and then asks again.
    InProgress,
    /// It ran: send this reply.
    Done(Kept),
    /// It ran, or began to, but its reply is not there: too long, or its handler never gave one. It must not
    /// run again.
    Lost,
    /// Every entry is in progress: it cannot be told whether this call is. It must not run.
    Full,
}

#[derive(Clone, Debug)]
enum State {
    InProgress,
    /// `None` for [`Lookup::Lost`].
    Finished(Option<Kept>),
}

/// A reply that was kept: its results, and its verifier.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The verifier's body, and the results.
    bytes: Arc<[u8]>,
    flavor: u32,
    results_at: u32,
}

impl Kept {
    fn new(verifier: OpaqueAuth<'_>, results: &[u8]) -> Self {
        let OpaqueAuth { flavor, body } = verifier;
        let bytes = if body.is_empty() { results.into() } else { [body, results].concat().into() };
        Self { bytes, flavor, results_at: body.len() as u32 }
    }

    /// Its verifier; AUTH_NONE, where none was given.
    pub fn verifier(&self) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: self.flavor, body: self.bytes.get(..self.results_at as usize).unwrap_or(&[]) }
    }
}

impl Deref for Kept {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(self.results_at as usize..).unwrap_or(&[])
    }
}

/// Counters since the start, and what is held now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DuplicateRequestCacheStats {
    /// Calls that were answered from the cache.
    pub hits: u64,
    /// Calls that were new.
    pub misses: u64,
    /// Calls that came again while they ran.
    pub early: u64,
    /// Calls that came again and whose reply was not there.
    pub lost: u64,
    /// Calls for which there was no room.
    pub full: u64,
    /// Finished calls that were forgotten for others.
    pub evictions: u64,
    /// Finished calls that were forgotten after [their time](DuplicateRequestCacheConfig::keep).
    pub expired: u64,
    /// Calls held, in progress and finished.
    pub entries: u64,
    /// Bytes of replies held.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Part {
    calls: HashMap<CallKey, State>,
    /// Finished calls, the longest finished first, and when.
    finished: VecDeque<(Instant, CallKey)>,
    stats: DuplicateRequestCacheStats,
}

/// A bounded memory of calls and their replies; see the module page.
#[derive(Debug)]
pub struct DuplicateRequestCache {
    parts: Box<[Mutex<Part>]>,
    hasher: RandomState,
    /// Of each part.
    limits: DuplicateRequestCacheConfig,
}

impl DuplicateRequestCache {
    /// Empty. At least one entry is held.
    pub fn new(config: DuplicateRequestCacheConfig) -> Self {
        // Few enough that each part holds its share of calls whatever their keys are.
        let parts = (config.entries / 64).clamp(1, 16);
        Self {
            parts: (0..parts).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            limits: DuplicateRequestCacheConfig {
                entries: (config.entries / parts).max(1),
                bytes: config.bytes / parts,
                keep: config.keep,
            },
        }
    }

    /// The longest reply that is kept; a longer one makes its call [`Lookup::Lost`].
    pub fn longest_reply(&self) -> usize {
        self.limits.bytes
    }

    /// Looks a call up, and enters it if it is new. The oldest finished call is forgotten for it, if need be.
    pub fn begin(self: &Arc<Self>, key: CallKey) -> Lookup {
        let part = &mut *self.part(&key);
        part.expire(self.limits.keep);
        match part.calls.get(&key) {
            Some(State::InProgress) => {
                part.stats.early += 1;
                return Lookup::InProgress;
            }
            Some(State::Finished(Some(reply))) => {
                part.stats.hits += 1;
                return Lookup::Done(reply.clone());
            }
            Some(State::Finished(None)) => {
                part.stats.lost += 1;
                return Lookup::Lost;
            }
            None => {}
        }
        while part.calls.len() >= self.limits.entries {
            if !part.evict() {
                part.stats.full += 1;
                return Lookup::Full;
            }
        }
        part.stats.misses += 1;
        part.calls.insert(key, State::InProgress);
        Lookup::New(Claim { cache: Arc::clone(self), key, over: false })
    }

    /// Whether a call runs right now.
    pub fn is_running(&self, key: &CallKey) -> bool {
        matches!(self.part(key).calls.get(key), Some(State::InProgress))
    }

    /// What happened so far, of all parts.
    pub fn stats(&self) -> DuplicateRequestCacheStats {
        let mut sum = DuplicateRequestCacheStats::default();
        for part in &self.parts {
            let part = lock(part);
            let stats = &part.stats;
            sum.hits += stats.hits;
            sum.misses += stats.misses;
            sum.early += stats.early;
            sum.lost += stats.lost;
            sum.full += stats.full;
            sum.evictions += stats.evictions;
            sum.expired += stats.expired;
            sum.entries += part.calls.len() as u64;
            sum.bytes += stats.bytes;
        }
        sum
    }

    fn part(&self, key: &CallKey) -> MutexGuard<'_, Part> {
        let at = self.hasher.hash_one(key) as usize % self.parts.len();
        lock(&self.parts[at])
    }

    fn finish(&self, key: &CallKey, reply: Option<(OpaqueAuth<'_>, &[u8])>) {
        let reply = reply
            .filter(|(verifier, results)| verifier.body.len() + results.len() <= self.limits.bytes)
            .map(|(verifier, results)| Kept::new(verifier, results));
        let len = reply.as_ref().map_or(0, |reply| reply.bytes.len()) as u64;
        let part = &mut *self.part(key);
        while part.stats.bytes + len > self.limits.bytes as u64 && part.evict() {}
        part.stats.bytes += len;
        part.calls.insert(*key, State::Finished(reply));
        part.finished.push_back((Instant::now(), *key));
    }
}

impl Part {
    /// Makes room: forgets the call that finished longest ago; false if none has.
    fn evict(&mut self) -> bool {
        let forgotten = self.forget_oldest();
        self.stats.evictions += u64::from(forgotten);
        forgotten
    }

    /// Forgets the calls that finished so long ago.
    fn expire(&mut self, keep: Duration) {
        while self.finished.front().is_some_and(|(finished, _)| finished.elapsed() >= keep) {
            self.stats.expired += u64::from(self.forget_oldest());
        }
    }

    fn forget_oldest(&mut self) -> bool {
        let Some((_, key)) = self.finished.pop_front() else { return false };
        if let Some(State::Finished(Some(reply))) = self.calls.remove(&key) {
            self.stats.bytes -= reply.bytes.len() as u64;
        }
        true
    }
}

/// Goes on after a panic of another holder: nothing is left half done that another could see.
fn lock(part: &Mutex<Part>) -> MutexGuard<'_, Part> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call that runs. Dropped without a word, as when its handler panics, it counts as finished without a
/// reply: part of it may have been done.
#[derive(Debug)]
pub struct Claim {
    cache: Arc<DuplicateRequestCache>,
    key: CallKey,
    over: bool,
}

impl Claim {
    /// It ran: from now on this is the answer, for as long as there is room. To be said before the reply is
    /// sent.
    pub fn finish(self, reply: &[u8]) {
        self.finish_with(OpaqueAuth::NONE, reply);
    }

    /// As [`finish`](Self::finish), of a reply that has this verifier.
    pub fn finish_with(mut self, verifier: OpaqueAuth<'_>, reply: &[u8]) {
        self.over = true;
        self.cache.finish(&self.key, Some((verifier, reply)));
    }

    /// It did not run, and did nothing: when it comes again it is new.
    pub fn forget(mut self) {
        self.over = true;
        self.cache.part(&self.key).calls.remove(&self.key);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.over {
            self.cache.finish(&self.key, None);
        }
    }
}
