//! Worker threads, which may wait for a disk.
//!
//! While a thread waits, the shards and the threads in the [shares](crate::shares) of other clients continue.
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rpcrdma::Refusal;
use rpcrdma::service::DeferredCall;
use rpcrdma_config::program;

use crate::export::Export;
use crate::lock::lock;
use crate::nfs3::nfs_v3;
use crate::shares::Shares;

/// Threads that run the calls of an export until the process ends.
pub struct Pool {
    /// Shares by host, because a client can choose any number of connections and credentials.
    shares: Mutex<Shares<Arc<str>, DeferredCall>>,
    /// Wakes a thread for ready work.
    ready: Condvar,
}

impl Pool {
    /// Starts `threads` threads, at least 1.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(export: &Arc<Export>, threads: usize) -> io::Result<Arc<Self>> {
        let pool = Arc::new(Self { shares: Mutex::new(Shares::new(threads)), ready: Condvar::new() });
        for number in 0..threads {
            let (pool, export) = (Arc::clone(&pool), Arc::clone(export));
            program::spawn(&format!("nfs3d-io-{number}"), move || pool.work(&export))?;
        }
        Ok(pool)
    }

    /// Queues a call until the share of its host admits it.
    pub(crate) fn submit(&self, call: DeferredCall) {
        let host = Arc::clone(call.quota_owner());
        let mut shares = lock(&self.shares);
        // A host whose calls wait for a stalled disk may reconnect and retransmit repeatedly. If they were not removed
        // here, the calls of its closed connections would hold memory.
        shares.retain(&host, DeferredCall::skip_if_disconnected);
        shares.push(host, call);
        let is_ready = shares.is_ready();
        drop(shares);
        if is_ready {
            self.ready.notify_one();
        }
    }

    fn work(&self, export: &Export) {
        let mut shares = lock(&self.shares);
        loop {
            let Some((host, call)) = shares.assign() else {
                shares = self.ready.wait(shares).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // One completed call may admit two others, so this thread wakes another one.
            let is_ready = shares.is_ready();
            drop(shares);
            if is_ready {
                self.ready.notify_one();
            }
            // A call of a closed connection does not run, because its reply could not be sent and the client
            // retransmits.
            if let Some(mut call) = call.skip_if_disconnected() {
                // A panic ends only the call.
                let outcome = catch_unwind(AssertUnwindSafe(|| nfs_v3::run(export, &mut call)));
                call.answer(outcome.unwrap_or(Err(Refusal::SystemError)));
            }
            shares = lock(&self.shares);
            shares.release(&host);
        }
    }
}
