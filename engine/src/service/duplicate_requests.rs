//! Duplicate request cache (DRC): retransmitted calls do not run twice.
//!
//! A client that reconnects retransmits unanswered calls, with the same XIDs. A procedure that must not run twice
//! (append, rename, remove) declares a cache by [`Procedure::cached`](super::Procedure::cached). The shard looks calls
//! up before they run, on the shard or on workers. A retransmission has the client, XID, procedure, credential and
//! arguments of the original call. One cache serves all shards and workers, because a new connection may be on another
//! shard. The cache has parts, each with a lock that is held for a lookup only.
//!
//! Limits: the cache does not survive a restart of the server. It is bounded, so a reply may be evicted before the end
//! of its lifetime. The evicted reply is the oldest one of the host that holds the most, so a host with many calls
//! evicts its own replies, whatever connections and credentials it uses. The cache keeps inline results only, because
//! procedures with results in Write chunks are reads, which may run twice.
#![forbid(unsafe_code)]

mod part;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sha2::{Digest, Sha256};

use self::part::{CacheEntry, CachePart};
use super::ServerCall;
use crate::fabric::host::network;
use crate::stats::{HasMetrics, Metric, fields};
use crate::wire::rpc::OpaqueAuth;

/// Default bytes of each argument that the checksum of the key covers.
pub(super) const DEFAULT_CHECKSUM_LEN: usize = 256;

/// Limits of a [`DuplicateRequestCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DuplicateRequestCacheConfig {
    /// Maximum number of calls, running or finished; about 170 bytes each.
    ///
    /// The running calls of one host take at most about half of the entries that running calls of other hosts leave
    /// free. When all entries are taken, a new call evicts the oldest finished call of the host that has the most
    /// calls.
    pub entries: usize,
    /// Maximum bytes of all replies together.
    ///
    /// When they are exceeded, a new reply evicts replies of the host that holds the most bytes, oldest first. The new
    /// reply is not kept if it alone has more bytes than any other host holds. The bytes are divided among the parts of
    /// the cache, one for each 256 `entries` and at most 16, and a reply longer than its part is not kept: with 4096
    /// `entries` or more, a reply longer than a sixteenth of `bytes`.
    pub bytes: usize,
    /// Lifetime of a finished call.
    ///
    /// A client retransmits within its own time-out, some minutes at most. A later call with the same XID is a new one.
    pub keep: Duration,
}

/// 4096 calls, 16 MiB of replies, and the 120 s of Linux's NFS server.
impl Default for DuplicateRequestCacheConfig {
    fn default() -> Self {
        Self { entries: 4096, bytes: 16 << 20, keep: Duration::from_secs(120) }
    }
}

/// Identity of a caller, stable across reconnects.
///
/// Different clients must have different identities, such as an identifier of the upper layer, or the name that [host
/// authentication](crate::auth) proved. A connection does not identify a client. Users of one client may share its
/// identity, because the cache compares the credentials of calls, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientId([u8; 32]);

impl ClientId {
    /// Identity of a client with a number.
    pub const fn number(number: u64) -> Self {
        let mut id = [0; 32];
        let (_, tail) = id.split_at_mut(24);
        tail.copy_from_slice(&number.to_be_bytes());
        ClientId(id)
    }

    /// Identity of a client, from a name of any length.
    pub fn named(name: &[u8]) -> Self {
        ClientId(Sha256::digest(name).into())
    }
}

/// Identifies the client by its [authenticated host](super::CallInfo::peer_identity).
///
/// All users of a host are then one client, which is right if the host assigns the XIDs of all its calls. No user gets
/// the reply of another one, because the cache also compares credentials.
pub fn by_host(call: &ServerCall) -> Option<ClientId> {
    call.info().peer_identity().map(|name| ClientId::named(name.as_bytes()))
}

/// Identifies the client by the unauthenticated address of its host. For `nfs3d` and the C interface.
///
/// An IPv6 network of 64 bits counts as one host. On a fabric without addresses, all callers are one client. This is
/// right if each host assigns the XIDs of all its calls.
#[doc(hidden)]
pub fn by_address(call: &ServerCall) -> Option<ClientId> {
    let bits = |host| match network(host) {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    };
    let mut id = [0; 32];
    id[16..].copy_from_slice(&call.info().peer_host().map_or(0, bits).to_be_bytes());
    Some(ClientId(id))
}

/// Identifies the client by its credential; `None` for AUTH_NONE.
///
/// This is right where a credential names a caller on a host, as AUTH_SYS with machine name and stamp does.
/// [`Credential::sys`](crate::client::Credential::sys) uses the stamp 0, so its machine names must differ.
pub fn by_credential(call: &ServerCall) -> Option<ClientId> {
    let (flavor, body) = call.info().credential();
    (flavor != 0).then(|| ClientId::named(&[&flavor.to_be_bytes()[..], body].concat()))
}

/// Key of a call, which is equal for a retransmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallKey {
    client: ClientId,
    xid: u32,
    program: u32,
    version: u32,
    procedure: u32,
    /// Keyed hash of the credential and the arguments.
    checksum: u64,
}

impl Hash for CallKey {
    /// Hashes only the fields that distinguish calls, because each call is hashed several times.
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.client.0);
        state.write_u32(self.xid);
        state.write_u64(self.checksum);
    }
}

/// Outcome of a lookup.
#[derive(Debug)]
#[must_use = "a retransmitted call must not run"]
pub(crate) enum Lookup {
    /// The call is new. Run it, then [finish](CacheReservation::finish) the reservation.
    New(CacheReservation),
    /// The original call is running.
    ///
    /// Its reply is sent on its own connection, which may be closed. Wait until it [has
    /// finished](DuplicateRequestCache::is_running), and look up again.
    InProgress,
    /// The call has run. Send this reply.
    Done(CachedReply),
    /// The call has run, or began to run, but its reply was not kept.
    ///
    /// The reply was too long, by itself or beside those of other hosts, or its handler did not answer. The call must
    /// not run again.
    Lost,
    /// All entries, or all of the host's share, are calls in progress. The call must not run.
    Full,
    /// The caller has no identity, so the call runs each time.
    Unidentified,
}

/// State of a call in the cache.
#[derive(Clone, Debug)]
enum CallState {
    InProgress,
    /// `None` for [`Lookup::Lost`].
    Finished(Option<CachedReply>),
}

/// A cached reply: its results, and its verifier.
#[derive(Clone, Debug)]
pub(crate) struct CachedReply {
    /// Body of the verifier, then the results.
    bytes: Arc<[u8]>,
    flavor: u32,
    results_at: u32,
}

impl CachedReply {
    fn new(verifier: OpaqueAuth<'_>, results: &[u8]) -> Self {
        let OpaqueAuth { flavor, body } = verifier;
        let bytes = if body.is_empty() { results.into() } else { [body, results].concat().into() };
        Self { bytes, flavor, results_at: body.len() as u32 }
    }

    /// Verifier of the reply; AUTH_NONE if none was set.
    pub(crate) fn verifier(&self) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: self.flavor, body: self.bytes.get(..self.results_at as usize).unwrap_or(&[]) }
    }
}

impl Deref for CachedReply {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(self.results_at as usize..).unwrap_or(&[])
    }
}

fields! {
    /// Counters and gauges of a [`DuplicateRequestCache`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    struct DuplicateRequestCacheStats {
        hits: u64 = Counter "Calls answered from the cache",
        misses: u64 = Counter "New calls",
        early: u64 = Counter "Retransmissions of a running call",
        lost: u64 = Counter "Retransmissions whose reply was not kept",
        full: u64 = Counter "New calls refused because the cache was full",
        evictions: u64 = Counter "Finished calls evicted for others",
        expired: u64 = Counter "Finished calls that expired",
        entries: u64 = Gauge "Calls in the cache, in progress and finished",
        bytes: u64 = Gauge "Bytes of cached replies",
    }
}

impl DuplicateRequestCacheStats {
    /// All counters and gauges, always in the same order.
    pub fn metrics(&self) -> impl Iterator<Item = Metric> + '_ {
        self.own_metrics()
    }

    /// Value of the [`Metric`] with this name, if it exists.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.metrics().find(|metric| metric.name == name).map(|metric| metric.value)
    }
}

/// A bounded duplicate request cache, shared by shards and workers.
///
/// ```
/// use std::sync::Arc;
/// use rpcrdma::Procedure;
/// use rpcrdma::service::duplicate_requests::{DuplicateRequestCache, DuplicateRequestCacheConfig, by_host};
///
/// let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
/// let append: Procedure = Procedure::new(|_| Ok(())).cached(cache, by_host);
/// ```
#[derive(Debug)]
#[doc(alias("drc", "reply cache"))]
pub struct DuplicateRequestCache {
    parts: Box<[Mutex<CachePart>]>,
    hasher: RandomState,
    /// Limits of each part.
    limits: DuplicateRequestCacheConfig,
}

impl DuplicateRequestCache {
    /// An empty cache, of at least one entry; allocates as it fills.
    pub fn new(config: DuplicateRequestCacheConfig) -> Self {
        // There are few parts, so that all calls, and the calls of each client, spread about evenly over them.
        let parts = (config.entries / 256).clamp(1, 16);
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

    /// Key of a served call, with `checksum_len` bytes of each argument.
    ///
    /// The checksum keeps a new call that reuses an XID, and a call of another user on the same client, from getting
    /// the cached reply. The inline arguments, without the RPC header, count as one argument, and each Read chunk as
    /// another one.
    pub(super) fn key(&self, client: ClientId, call: &ServerCall, checksum_len: usize) -> CallKey {
        let info = call.info();
        let chunks = (0..call.read_chunks()).map(|n| call.read_chunk(n).unwrap_or_default());
        let checksum = self.checksum(info.credential(), std::iter::once(call.args()).chain(chunks), checksum_len);
        let (program, version, procedure) = (info.program(), info.version(), info.procedure());
        CallKey { client, xid: info.xid(), program, version, procedure, checksum }
    }

    /// Hash of a whole credential, and of `checksum_len` bytes of each argument.
    ///
    /// The hash has a random key, so a peer cannot choose a credential or arguments with the checksum of another user's
    /// call.
    fn checksum<'a>(
        &self,
        (flavor, body): (u32, &[u8]),
        arguments: impl Iterator<Item = &'a [u8]>,
        checksum_len: usize,
    ) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u32(flavor);
        hasher.write_usize(body.len());
        hasher.write(body);
        for bytes in arguments {
            hasher.write_usize(bytes.len());
            hasher.write(&bytes[..bytes.len().min(checksum_len)]);
        }
        hasher.finish()
    }

    /// Looks a call up, and adds it if it is new.
    ///
    /// A new call counts against the quota of `owner`, and may evict a finished call.
    pub(crate) fn begin(self: &Arc<Self>, key: CallKey, owner: &str) -> Lookup {
        let host = self.hasher.hash_one(owner);
        let part = &mut *self.part(&key);
        part.expire(self.limits.keep);
        let (counter, outcome) = match part.calls.get(&key).map(|entry| entry.state.clone()) {
            Some(CallState::InProgress) => (&mut part.stats.early, Lookup::InProgress),
            Some(CallState::Finished(Some(reply))) => (&mut part.stats.hits, Lookup::Done(reply)),
            Some(CallState::Finished(None)) => (&mut part.stats.lost, Lookup::Lost),
            None if part.start(key, host, self.limits.entries) => {
                let reservation = CacheReservation { cache: Arc::clone(self), key, is_released: false };
                (&mut part.stats.misses, Lookup::New(reservation))
            }
            None => (&mut part.stats.full, Lookup::Full),
        };
        *counter += 1;
        outcome
    }

    /// Whether the call is running.
    pub(crate) fn is_running(&self, key: &CallKey) -> bool {
        matches!(self.part(key).calls.get(key), Some(CacheEntry { state: CallState::InProgress, .. }))
    }

    /// Statistics of the cache.
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

    fn part(&self, key: &CallKey) -> MutexGuard<'_, CachePart> {
        let at = self.hasher.hash_one(key) as usize % self.parts.len();
        lock(&self.parts[at])
    }

    fn finish(&self, key: &CallKey, reply: Option<(OpaqueAuth<'_>, &[u8])>) {
        let limit = self.limits.bytes;
        let reply = reply
            .filter(|(verifier, results)| verifier.body.len() + results.len() <= limit)
            .map(|(verifier, results)| CachedReply::new(verifier, results));
        self.part(key).finish(key, reply, limit as u64);
    }
}

/// Locks a part of the cache. Poisoning is ignored, because a panic leaves no inconsistent state.
fn lock(part: &Mutex<CachePart>) -> MutexGuard<'_, CachePart> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Entry of a running call, to be finished or forgotten.
///
/// Dropping it, as when the handler panics, finishes the call without a reply, because its effects are unknown.
#[derive(Debug)]
#[must_use = "finish or forget it; if it is dropped, the reply of the call counts as lost"]
pub(crate) struct CacheReservation {
    cache: Arc<DuplicateRequestCache>,
    key: CallKey,
    /// Whether the call was finished or forgotten.
    is_released: bool,
}

impl CacheReservation {
    /// Stores the reply of the call, before it is sent.
    pub(crate) fn finish(mut self, verifier: OpaqueAuth<'_>, reply: &[u8]) {
        self.is_released = true;
        self.cache.finish(&self.key, Some((verifier, reply)));
    }

    /// Removes a call that did nothing, so that a retransmission runs.
    pub(crate) fn forget(mut self) {
        self.is_released = true;
        self.cache.part(&self.key).forget(&self.key);
    }
}

impl Drop for CacheReservation {
    fn drop(&mut self) {
        if !self.is_released {
            self.cache.finish(&self.key, None);
        }
    }
}
