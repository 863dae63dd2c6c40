//! A client whose shard runs on a thread of the library, or on the thread with which the application polls a server.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rpcrdma::Client;
use rpcrdma::client::{CompletedCall, Pending};
use rpcrdma_mempool::current_thread;
use rustix::io::Errno;

use crate::failure::ApiFailure;

/// Stored instead of the polling thread once the server has ended. No thread has this number.
pub(crate) const ENDED: u64 = u64::MAX;

/// A client with the calls that it has started without blocking.
pub(crate) struct ThreadedClient {
    client: Client,
    /// The thread that polls its server, or [`ENDED`]. That thread must not wait for an answer of its own shard.
    polled_by: Option<Arc<AtomicU64>>,
    /// Calls whose ends are not reported yet, oldest first, with their tokens.
    started: Vec<(u64, Pending)>,
}

impl ThreadedClient {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, polled_by: None, started: Vec::new() }
    }

    /// A client on a connection of a server that `thread` polls.
    pub(crate) fn of_polled(client: Client, thread: Arc<AtomicU64>) -> Self {
        Self { client, polled_by: Some(thread), started: Vec::new() }
    }

    /// Makes another client on the connection, without calls.
    pub(crate) fn share(&self) -> Self {
        Self { client: self.client.clone(), polled_by: self.polled_by.clone(), started: Vec::new() }
    }

    /// The client, for operations that do not wait for its shard.
    pub(crate) fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Whether this thread runs the client's shard.
    pub(crate) fn is_on_own_shard(&self) -> bool {
        let polled_here = |thread: &Arc<AtomicU64>| thread.load(Ordering::Relaxed) == current_thread();
        self.client.is_on_own_shard() || self.polled_by.as_ref().is_some_and(polled_here)
    }

    /// The client, for operations that wait for its shard.
    ///
    /// # Errors
    /// EDEADLK: this thread runs the shard. ENOTCONN: the polled server that ran the shard has ended.
    pub(crate) fn blocking_client(&mut self) -> Result<&mut Client, ApiFailure> {
        if self.polled_by.as_ref().is_some_and(|thread| thread.load(Ordering::Relaxed) == ENDED) {
            return Err(ApiFailure::new(
                Errno::NOTCONN,
                "the server of this client was freed, and their connection has ended with it: free the client, too",
            ));
        }
        if self.is_on_own_shard() {
            return Err(ApiFailure::new(
                Errno::DEADLK,
                "this thread runs the client's connection, and would wait for itself: use rpcrdma_client_start, or \
                 another thread",
            ));
        }
        Ok(&mut self.client)
    }

    /// Adds a started call, whose end will be reported.
    pub(crate) fn add_started(&mut self, token: u64, call: Pending) {
        self.started.push((token, call));
    }

    /// Takes the calls that have ended.
    pub(crate) fn take_ended(&mut self) -> Vec<CompletedCall> {
        let mut ended = Vec::new();
        self.started.retain_mut(|(token, call)| match call.try_take() {
            Some(result) => {
                ended.push(CompletedCall { token: *token, result });
                false
            }
            None => true,
        });
        ended
    }
}
