//! Worker threads, which may wait for a disk. Shards, and the [shares](crate::shares) of other clients, continue.
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

/// Threads for an export, until the process ends.
pub struct Pool {
    /// By host: a client chooses its connections and credentials freely.
    shares: Mutex<Shares<Arc<str>, DeferredCall>>,
    /// Signals work for another thread.
    ready: Condvar,
}

impl Pool {
    /// Starts threads, at least 1.
    ///
    /// # Errors
    /// The system denies threads.
    pub fn start(export: &Arc<Export>, threads: usize) -> io::Result<Arc<Self>> {
        let pool = Arc::new(Self { shares: Mutex::new(Shares::new(threads)), ready: Condvar::new() });
        for number in 0..threads {
            let (pool, export) = (Arc::clone(&pool), Arc::clone(export));
            program::spawn(&format!("nfs3d-io-{number}"), move || pool.work(&export))?;
        }
        Ok(pool)
    }

    /// Queues a call until its host's share admits it.
    pub(crate) fn submit(&self, call: DeferredCall) {
        let host = Arc::clone(call.quota_owner());
        let mut shares = lock(&self.shares);
        // A host with a stalled disk may reconnect and retransmit repeatedly. Its abandoned calls would hold memory.
        shares.retain(&host, DeferredCall::skip_if_disconnected);
        shares.add(host, call);
        let ready = shares.is_ready();
        drop(shares);
        if ready {
            self.ready.notify_one();
        }
    }

    fn work(&self, export: &Export) {
        let mut shares = lock(&self.shares);
        loop {
            let Some((host, call)) = shares.take() else {
                shares = self.ready.wait(shares).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // One completed call may admit two.
            let more = shares.is_ready();
            drop(shares);
            if more {
                self.ready.notify_one();
            }
            // Nobody awaits the reply of a closed connection, and a client retransmits.
            if let Some(mut call) = call.skip_if_disconnected() {
                // A panic ends its call, not the thread.
                let outcome = catch_unwind(AssertUnwindSafe(|| nfs_v3::run(export, &mut call)));
                call.answer(outcome.unwrap_or(Err(Refusal::SystemError)));
            }
            shares = lock(&self.shares);
            shares.give_back(&host);
        }
    }
}
