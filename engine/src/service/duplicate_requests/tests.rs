//! Tests of the duplicate request cache: calls run at most once, in bounded memory.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;

use super::*;

fn cache(entries: usize, bytes: usize) -> Arc<DuplicateRequestCache> {
    Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig {
        entries,
        bytes,
        ..DuplicateRequestCacheConfig::default()
    }))
}

/// Host of the callers, in tests with one host.
const HOST: &str = "192.0.2.1";

fn begin(cache: &Arc<DuplicateRequestCache>, key: CallKey) -> Lookup {
    cache.begin(key, HOST)
}

/// Key of a call, with a checksum that `CACHE` has computed.
fn key_of(client: ClientId, xid: u32, program: u32, version: u32, procedure: u32, args: &[u8]) -> CallKey {
    let checksum = checksum(&CACHE, (0, &[]), &[args]);
    CallKey { client, xid, program, version, procedure, checksum }
}

static CACHE: LazyLock<DuplicateRequestCache> =
    LazyLock::new(|| DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));

fn checksum(cache: &DuplicateRequestCache, credential: (u32, &[u8]), arguments: &[&[u8]]) -> u64 {
    cache.checksum(credential, arguments.iter().copied(), DEFAULT_CHECKSUM_LEN)
}

fn key(xid: u32) -> CallKey {
    key_of(ClientId::number(1), xid, 100, 3, 9, b"arguments")
}

fn begin_new(cache: &Arc<DuplicateRequestCache>, key: CallKey) -> CacheReservation {
    match cache.begin(key, HOST) {
        Lookup::New(reservation) => reservation,
        other => panic!("not new: {other:?}"),
    }
}

fn reply(cache: &Arc<DuplicateRequestCache>, key: CallKey) -> Option<Vec<u8>> {
    match cache.begin(key, HOST) {
        Lookup::Done(reply) => Some(reply.to_vec()),
        _ => None,
    }
}

#[test]
fn a_call_runs_once_and_each_retransmission_gets_its_reply() {
    let cache = cache(8, 1024);
    let reservation = begin_new(&cache, key(1));
    assert!(matches!(begin(&cache, key(1)), Lookup::InProgress));
    reservation.finish(OpaqueAuth::NONE, b"results");
    assert_eq!(reply(&cache, key(1)).as_deref(), Some(&b"results"[..]));
    assert_eq!(reply(&cache, key(1)).as_deref(), Some(&b"results"[..]), "each retransmission gets the reply");
    let expected =
        DuplicateRequestCacheStats { hits: 2, misses: 1, early: 1, entries: 1, bytes: 7, ..Default::default() };
    assert_eq!(cache.stats(), expected);
    assert_eq!((expected.get("hits"), expected.get("bytes"), expected.get("calls")), (Some(2), Some(7), None));
}

#[test]
fn the_verifier_of_a_reply_is_kept() {
    let cache = cache(8, 1024);
    let verifier = OpaqueAuth { flavor: 5, body: b"body" };
    begin_new(&cache, key(1)).finish(verifier, b"results");
    let Lookup::Done(kept) = begin(&cache, key(1)) else { panic!("no reply") };
    assert_eq!((kept.verifier(), &kept[..]), (verifier, &b"results"[..]));
}

#[test]
fn arguments_in_chunks_are_part_of_the_checksum() {
    let args = [7; 300];
    let checksum_with = |chunks: &[&[u8]]| checksum(&CACHE, (0, &[]), &[&[&b"arguments"[..]], chunks].concat());
    let (mut covered, mut uncovered) = (args, args);
    (covered[255], uncovered[256]) = (8, 8);
    assert_eq!(checksum_with(&[&args]), checksum_with(&[&uncovered]), "the checksum covers the first 256 bytes");
    let checksums = [
        checksum_with(&[]),
        checksum_with(&[&args]),
        checksum_with(&[&covered]),
        checksum_with(&[&args[..299]]),
        checksum_with(&[&[]]),
        checksum_with(&[&args, &[]]),
    ];
    for (n, checksum) in checksums.iter().enumerate() {
        assert!(checksums[n + 1..].iter().all(|other| other != checksum), "{n}");
    }
}

/// The checksum covers the whole credential, also beyond the number of bytes that it covers of an argument.
#[test]
fn a_call_of_another_user_is_another_call() {
    let (body, args) = ([7; 400], &[&b"arguments"[..]][..]);
    let mut changed = body;
    changed[399] = 8;
    let checksum_with = |flavor, body: &[u8]| checksum(&CACHE, (flavor, body), args);
    assert_eq!(checksum_with(1, &body), checksum_with(1, &body));
    let checksums = [
        checksum_with(0, &[]),
        checksum_with(1, &[]),
        checksum_with(1, &body),
        checksum_with(1, &changed),
        checksum_with(1, &body[..396]),
        checksum_with(2, &body),
    ];
    for (n, checksum) in checksums.iter().enumerate() {
        assert!(checksums[n + 1..].iter().all(|other| other != checksum), "{n}");
    }
    let other = DuplicateRequestCache::new(DuplicateRequestCacheConfig::default());
    assert_ne!(checksum(&other, (1, &body), args), checksum_with(1, &body), "a peer cannot compute the checksum");
}

#[test]
fn a_finished_call_expires_after_its_lifetime() {
    for (keep, forgotten) in [(Duration::MAX, false), (Duration::ZERO, true)] {
        let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig {
            keep,
            ..DuplicateRequestCacheConfig::default()
        }));
        let running = begin_new(&cache, key(1));
        begin_new(&cache, key(2)).finish(OpaqueAuth::NONE, b"results");
        assert_eq!(reply(&cache, key(2)).is_none(), forgotten, "{keep:?}");
        assert!(matches!(begin(&cache, key(1)), Lookup::InProgress), "a running call does not expire");
        running.finish(OpaqueAuth::NONE, b"");
        let stats = cache.stats();
        assert_eq!((stats.expired > 0, stats.evictions), (forgotten, 0), "{stats:?}");
    }
}

#[test]
fn calls_that_differ_in_anything_are_different_calls() {
    let args = [7; 300];
    let client = ClientId::number(1);
    let mut covered = args;
    covered[255] = 8;
    let mut uncovered = args;
    uncovered[256] = 8;
    let first = key_of(client, 1, 100, 3, 9, &args);
    let others = [
        key_of(ClientId::number(2), 1, 100, 3, 9, &args),
        key_of(ClientId::named(b"one"), 1, 100, 3, 9, &args),
        key_of(client, 2, 100, 3, 9, &args),
        key_of(client, 1, 101, 3, 9, &args),
        key_of(client, 1, 100, 4, 9, &args),
        key_of(client, 1, 100, 3, 10, &args),
        key_of(client, 1, 100, 3, 9, &args[..299]),
        key_of(client, 1, 100, 3, 9, &covered),
    ];
    assert!(others.iter().all(|other| *other != first));
    assert_eq!(key_of(client, 1, 100, 3, 9, &uncovered), first, "the checksum covers the first 256 bytes");
    assert_ne!(ClientId::named(&[]), ClientId::number(0));
    let cache = cache(64, 1024);
    begin_new(&cache, first).finish(OpaqueAuth::NONE, b"first");
    for other in others {
        begin_new(&cache, other).finish(OpaqueAuth::NONE, b"other");
    }
    assert_eq!(reply(&cache, first).as_deref(), Some(&b"first"[..]));
}

#[test]
fn the_call_that_finished_first_is_evicted_first() {
    let cache = cache(3, 1024);
    let slow = begin_new(&cache, key(0));
    begin_new(&cache, key(1)).finish(OpaqueAuth::NONE, b"1");
    begin_new(&cache, key(2)).finish(OpaqueAuth::NONE, b"2");
    slow.finish(OpaqueAuth::NONE, b"0");
    begin_new(&cache, key(3)).finish(OpaqueAuth::NONE, b"3");
    assert_eq!(cache.stats().evictions, 1);
    assert_eq!(
        reply(&cache, key(0)).as_deref(),
        Some(&b"0"[..]),
        "it began before the others, and finished after them"
    );
    assert_eq!(reply(&cache, key(2)).as_deref(), Some(&b"2"[..]));
    drop(begin_new(&cache, key(1)));
}

#[test]
fn calls_in_progress_are_never_evicted() {
    let cache = cache(3, 1024);
    let other = |xid| cache.begin(key(xid), "192.0.2.2");
    let mut reservations: Vec<CacheReservation> = (0..2).map(|xid| begin_new(&cache, key(xid))).collect();
    let Lookup::New(reservation) = other(2) else { panic!("there is room") };
    reservations.push(reservation);
    assert!(matches!(other(9), Lookup::Full));
    assert!((0..2).all(|xid| matches!(begin(&cache, key(xid)), Lookup::InProgress)));
    reservations.into_iter().for_each(|reservation| reservation.finish(OpaqueAuth::NONE, b"done"));
    begin_new(&cache, key(9)).finish(OpaqueAuth::NONE, b"9");
    assert_eq!((cache.stats().entries, cache.stats().full), (3, 1));
}

/// However many calls of some hosts run, there is room for the next host. The number of a host's clients does not
/// matter.
#[test]
fn running_calls_of_a_host_leave_room_for_others() {
    let cache = cache(60, 1024);
    let begin = |host: u32, xid| {
        let client = ClientId::number(u64::from(xid % 3));
        cache.begin(key_of(client, xid, 100, host, 9, b"arguments"), &host.to_string())
    };
    let start = |host, xid| match begin(host, xid) {
        Lookup::New(reservation) => reservation,
        other => panic!("not new: {other:?}"),
    };
    let mut reservations = Vec::new();
    for (host, share) in [(1, 30), (2, 15), (3, 8), (4, 4)] {
        reservations.extend((0..share).map(|xid| start(host, xid)));
        assert!(matches!(begin(host, 99), Lookup::Full), "{host}");
    }
    // Calls that have ended no longer count.
    drop(reservations.remove(0));
    reservations.remove(0).forget();
    reservations.remove(0).finish(OpaqueAuth::NONE, b"done");
    reservations.extend((0..3).map(|xid| start(5, xid)));
    assert!(matches!(begin(5, 99), Lookup::Full));
}

#[test]
fn a_host_with_many_calls_evicts_only_its_own() {
    let cache = cache(4096, 1 << 20);
    let key_for = |client, xid| key_of(ClientId::number(client), xid, 100, 3, 12, b"arguments");
    for xid in 0..200 {
        begin_new(&cache, key_for(0, xid)).finish(OpaqueAuth::NONE, &xid.to_be_bytes());
    }
    for xid in 0..15_000 {
        match cache.begin(key_for(1 + u64::from(xid), xid), "192.0.2.2") {
            Lookup::New(reservation) => reservation.finish(OpaqueAuth::NONE, &[0; 80]),
            other => panic!("not new: {other:?}"),
        }
    }
    let repeated: Vec<_> = (0..200).map(|xid| reply(&cache, key_for(0, xid))).collect();
    assert_eq!(repeated, (0..200u32).map(|xid| Some(xid.to_be_bytes().to_vec())).collect::<Vec<_>>());
    assert!(cache.stats().evictions > 10_000);
}

/// Among hosts with equally many calls, the host whose oldest call finished first loses that call.
#[test]
fn the_oldest_call_is_evicted_among_hosts_with_equally_many_calls() {
    let cache = cache(4, 1024);
    for (xid, host) in [(0, "b"), (1, "a"), (2, "d"), (3, "c")] {
        let Lookup::New(reservation) = cache.begin(key(xid), host) else { panic!("{host}") };
        reservation.finish(OpaqueAuth::NONE, host.as_bytes());
    }
    for (xid, oldest) in [(4, 0), (5, 1), (6, 2), (7, 3)] {
        let Lookup::New(reservation) = cache.begin(key(xid), &xid.to_string()) else { panic!("{xid}") };
        let part = lock(&cache.parts[0]);
        assert!(
            !part.calls.contains_key(&key(oldest)) && (oldest + 1..4).all(|xid| part.calls.contains_key(&key(xid)))
        );
        drop(part);
        reservation.finish(OpaqueAuth::NONE, b"");
    }
}

/// Long replies of a host evict its own replies, and never those of a host that holds fewer bytes.
#[test]
fn long_replies_evict_only_replies_of_the_host_with_the_most_bytes() {
    let cache = cache(16, 100);
    let finish = |xid, host, len: usize| match cache.begin(key(xid), host) {
        Lookup::New(reservation) => reservation.finish(OpaqueAuth::NONE, &vec![xid as u8; len]),
        other => panic!("not new: {other:?}"),
    };
    (0..2).for_each(|xid| finish(xid, "a", 20));
    (2..12).for_each(|xid| finish(xid, "b", 30));
    assert_eq!((cache.stats().bytes, cache.stats().evictions), (100, 8));
    assert!((0..2).all(|xid| reply(&cache, key(xid)) == Some(vec![xid as u8; 20])));
    // A reply longer than all of the other host's evicts its own host's replies, and is not kept, because it still does
    // not fit.
    finish(12, "b", 70);
    assert!(matches!(begin(&cache, key(12)), Lookup::Lost));
    assert!((0..2).all(|xid| reply(&cache, key(xid)) == Some(vec![xid as u8; 20])));
    assert_eq!(cache.stats().bytes, 40);
    // A reply of a host with fewer bytes evicts replies of the host with more.
    finish(13, "c", 60);
    finish(14, "a", 30);
    assert_eq!((reply(&cache, key(13)), reply(&cache, key(14))), (None, Some(vec![14; 30])));
}

#[test]
fn replies_beyond_the_byte_limit_evict_older_ones() {
    let cache = cache(16, 100);
    begin_new(&cache, key(1)).finish(OpaqueAuth::NONE, &[1; 60]);
    begin_new(&cache, key(2)).finish(OpaqueAuth::NONE, &[2; 40]);
    assert_eq!((cache.stats().entries, cache.stats().bytes), (2, 100));
    begin_new(&cache, key(3)).finish(OpaqueAuth::NONE, &[3; 50]);
    assert_eq!((cache.stats().entries, cache.stats().bytes), (2, 90));
    assert_eq!(reply(&cache, key(2)), Some(vec![2; 40]));
}

#[test]
fn a_call_whose_reply_is_too_long_to_keep_does_not_run_again() {
    let cache = cache(16, 100);
    begin_new(&cache, key(1)).finish(OpaqueAuth::NONE, &[1; 60]);
    begin_new(&cache, key(2)).finish(OpaqueAuth::NONE, &[2; 101]);
    assert!(matches!(begin(&cache, key(2)), Lookup::Lost));
    assert_eq!(reply(&cache, key(1)), Some(vec![1; 60]), "the first reply is still in the cache");
    assert_eq!((cache.stats().lost, cache.stats().bytes), (1, 60));
}

#[test]
fn a_call_whose_handler_panics_does_not_run_again() {
    let cache = cache(16, 100);
    let reservation = begin_new(&cache, key(1));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _reservation = reservation;
        std::panic::resume_unwind(Box::new("the test panics here"));
    }));
    assert!(panicked.is_err());
    assert!(matches!(begin(&cache, key(1)), Lookup::Lost));
}

#[test]
fn a_forgotten_call_runs_again() {
    let cache = cache(16, 100);
    begin_new(&cache, key(1)).forget();
    assert_eq!(cache.stats().entries, 0);
    begin_new(&cache, key(1)).finish(OpaqueAuth::NONE, b"second time");
    assert_eq!(reply(&cache, key(1)).as_deref(), Some(&b"second time"[..]));
}

#[test]
fn many_threads_run_each_call_once() {
    let cache = cache(4096, 1 << 20);
    let runs: Vec<AtomicU32> = (0..200).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for (xid, runs) in runs.iter().enumerate() {
                    match begin(&cache, key(xid as u32)) {
                        Lookup::New(reservation) => {
                            runs.fetch_add(1, Ordering::Relaxed);
                            reservation.finish(OpaqueAuth::NONE, &(xid as u32).to_be_bytes());
                        }
                        Lookup::Done(reply) => assert_eq!(&reply[..], (xid as u32).to_be_bytes()),
                        Lookup::InProgress => {}
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
    let stats = cache.stats();
    assert_eq!((stats.misses, stats.hits + stats.early), (200, 600));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Compares with an unbounded model. The cache may evict only finished calls, and its bounds hold.
    #[test]
    fn only_finished_calls_are_evicted_and_bounds_hold(
        steps in prop::collection::vec((0u32..12, 0u8..4, 0usize..60), 0..200),
    ) {
        let cache = cache(6, 100);
        let mut running: HashMap<u32, CacheReservation> = HashMap::new();
        let mut finished: HashMap<u32, Option<Vec<u8>>> = HashMap::new();
        for (xid, action, len) in steps {
            match action {
                // A call arrives. The cache must find it as the model does, or have evicted it after its end.
                0 | 1 => match begin(&cache, key(xid)) {
                    Lookup::New(reservation) => {
                        prop_assert!(running.insert(xid, reservation).is_none());
                        finished.remove(&xid);
                    }
                    Lookup::InProgress => prop_assert!(running.contains_key(&xid)),
                    Lookup::Done(reply) => {
                        prop_assert_eq!(finished.get(&xid), Some(&Some(reply.to_vec())));
                    }
                    Lookup::Lost => prop_assert_eq!(finished.get(&xid), Some(&None)),
                    Lookup::Full => prop_assert!(running.len() == 3),
                    Lookup::Unidentified => prop_assert!(false, "the call has a key"),
                },
                // The call is answered.
                2 => if let Some(reservation) = running.remove(&xid) {
                    let reply = vec![xid as u8; len];
                    reservation.finish(OpaqueAuth::NONE, &reply);
                    finished.insert(xid, Some(reply));
                },
                // The call ends without a reply: the cache forgets it, or keeps it as a call whose reply is lost.
                _ => if let Some(reservation) = running.remove(&xid) {
                    if len < 30 {
                        reservation.forget();
                    } else {
                        drop(reservation);
                        finished.insert(xid, None);
                    }
                },
            }
            let stats = cache.stats();
            prop_assert!(stats.entries <= 6 && stats.bytes <= 100);
            prop_assert!(stats.entries >= running.len() as u64);
        }
        // After the last call, all entries are finished, and the statistics count exactly the bytes of their replies.
        drop(running);
        let reply_bytes: u64 = cache.parts.iter().map(|part| {
            let part = lock(part);
            assert_eq!(part.finished(), part.calls.len());
            part.calls.values().map(|entry| match &entry.state {
                CallState::Finished(Some(reply)) => reply.len() as u64,
                _ => 0,
            }).sum::<u64>()
        }).sum();
        prop_assert_eq!(reply_bytes, cache.stats().bytes);
    }
}
