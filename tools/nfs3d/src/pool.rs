//! Worker threads, which may wait for a disk. Shards, and the [shares](crate::shares) of other clients, continue.
#![forbid(unsafe_code)]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use rpcrdma::Refusal;
use rpcrdma::service::duplicate_requests::Client;
use rpcrdma::service::{Caller, DeferredCall};

use crate::export::Export;
use crate::lock::lock;
use crate::nfs;
use crate::nfs3::nfs_v3;
use crate::shares::Shares;

/// Holder of threads.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Holder {
    /// A host, with all its connections.
    Host(Client),
    /// A connection of an unidentified client.
    Connection(Caller),
}

/// Threads for an export, until the process ends.
pub struct Pool {
    shares: Mutex<Shares<Holder, DeferredCall>>,
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
            thread::Builder::new().name(format!("nfs3d-io-{number}")).spawn(move || pool.work(&export))?;
        }
        Ok(pool)
    }

    /// Queues a call until its client's share admits it.
    pub(crate) fn submit(&self, call: DeferredCall) {
        let holder = nfs::host(&call).map_or_else(|| Holder::Connection(call.info().caller()), Holder::Host);
        // A host with a stalled disk may reconnect and retransmit repeatedly. Its abandoned calls would hold memory.
        let needless = |call: &DeferredCall| call.is_disconnected() && !nfs::runs_once(call.info().procedure());
        let mut shares = lock(&self.shares);
        shares.forget(holder, needless);
        shares.add(holder, call);
        let ready = shares.is_ready();
        drop(shares);
        if ready {
            self.ready.notify_one();
        }
    }

    fn work(&self, export: &Export) {
        let mut shares = lock(&self.shares);
        loop {
            let Some((holder, mut call)) = shares.take() else {
                shares = self.ready.wait(shares).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // One completed call may admit two.
            let more = shares.is_ready();
            drop(shares);
            if more {
                self.ready.notify_one();
            }
            // A panic ends its call, not the thread.
            let outcome = catch_unwind(AssertUnwindSafe(|| nfs_v3::run(export, &mut call)));
            call.answer(outcome.unwrap_or(Err(Refusal::SystemError)));
            shares = lock(&self.shares);
            shares.give_back(holder);
        }
    }
}
