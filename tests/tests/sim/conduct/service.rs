//! The standard program, and a procedure that runs once per call.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use rpcrdma::service::duplicate_requests::{ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig};
use rpcrdma::{Procedure, Refusal, ServerCall, Services};
use rpcrdma_tests::{PROGRAM, VERSION, has_pattern, services_with};

/// A procedure that runs once, however often a call is retransmitted.
///
/// Arguments: mark of the caller. Read chunk: a unique number, and its pattern. Results: that number.
pub(super) const CACHED: u32 = 20;

/// Identifies the caller by the mark in its arguments.
fn caller(call: &ServerCall) -> Option<ClientId> {
    let mark = call.args().first_chunk()?;
    Some(ClientId::number(u64::from(u32::from_be_bytes(*mark))))
}

pub(super) fn services(chunk: usize) -> Services {
    let executed = Mutex::new(BTreeSet::new());
    let handler = move |call: &mut ServerCall| {
        let data = call.read_chunk(0).and_then(|data| data.split_first_chunk()).ok_or(Refusal::GarbageArguments)?;
        let (&number, contents) = data;
        if !has_pattern(u32::from_be_bytes(number), contents) {
            return Err(Refusal::GarbageArguments);
        }
        assert!(executed.lock().expect("no holder panics").insert(number), "each call must run once");
        call.reply_mut(number.len())?.copy_from_slice(&number);
        Ok(())
    };
    let cache = Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default()));
    let mut services = services_with(4096, chunk, false);
    let procedure = Procedure::new(handler).read_chunks(1, chunk).uncounted().cached(cache, caller);
    services.add(PROGRAM, VERSION, CACHED, procedure);
    services
}
