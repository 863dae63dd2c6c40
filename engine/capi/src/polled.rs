//! Clients and servers that the application polls.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::client::{CallId, ClientConfig, CompletedCall, Connection, LocalClient};
use rpcrdma::server::{CallBacks, LocalServer};
use rpcrdma::service::Caller;
use rpcrdma::{CallError, FailedCall};
use rpcrdma_mempool::current_thread;
use rustix::io::Errno;

use crate::failure::{ApiFailure, call_error_code};
use crate::handle::TemporaryTags;
use crate::threaded_client::{ENDED, ThreadedClient};

/// A polled client with one connection.
pub(crate) struct PolledClient {
    pub(crate) client: LocalClient,
    /// Whether the connection was ever seen established.
    was_established: bool,
    /// Whether a poll is reporting the ends of calls.
    is_reporting: bool,
    /// Empty list for the next batch.
    next_batch: Vec<CompletedCall>,
    /// Distinguishes the client from a later one in the same slot.
    id: u64,
    /// Tags of the client's replies, shared with the other temporary handles of its thread.
    tags: TemporaryTags,
}

impl PolledClient {
    pub(crate) fn new(client: LocalClient) -> Self {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        // Relaxed: the number only has to be unique.
        let id = CREATED.fetch_add(1, Ordering::Relaxed);
        let was_established = client.is_established(client.first());
        Self {
            client,
            was_established,
            is_reporting: false,
            next_batch: Vec::new(),
            id,
            tags: TemporaryTags::of_thread(),
        }
    }

    /// Releases state that belongs to this thread.
    ///
    /// # Errors
    /// EBUSY: a poll is reporting the ends of calls.
    pub(crate) fn leave_thread(&mut self) -> Result<(), ApiFailure> {
        if self.is_reporting {
            return Err(ApiFailure::new(Errno::BUSY, "rpcrdma_local_client: a poll is reporting the ends of calls"));
        }
        self.client.shard().leave_thread();
        self.tags = TemporaryTags::of_no_thread();
        Ok(())
    }

    /// Makes the client belong to this thread.
    pub(crate) fn enter_thread(&mut self) {
        self.client.shard().enter_thread();
        self.tags = TemporaryTags::of_thread();
    }

    #[inline]
    pub(crate) fn connection(&self) -> Connection {
        self.client.first()
    }

    /// Runs one turn of the client. Returns true if there was work.
    #[inline]
    pub(crate) fn turn(&mut self) -> bool {
        let busy = self.client.turn();
        if !self.was_established {
            self.was_established = self.client.is_established(self.connection());
        }
        busy
    }

    /// Whether the connection was established, so that its end is not a failed connect.
    pub(crate) fn was_established(&self) -> bool {
        self.was_established
    }

    /// Whether this poll has ends of calls to report.
    ///
    /// The client is not in use while they are reported. Calls that end meanwhile are left to the next poll. A poll
    /// within a report reports nothing, so that each poll ends and the stack stays bounded.
    #[inline]
    pub(crate) fn has_ends_to_report(&mut self) -> bool {
        !self.client.shard_mut().done().is_empty() && !self.is_reporting
    }

    #[inline]
    pub(crate) fn begin_report(&mut self) {
        self.is_reporting = true;
    }

    /// Takes the call that has ended, if it is the only one.
    #[inline]
    pub(crate) fn take_only_ended(&mut self) -> Option<CompletedCall> {
        let done = self.client.shard_mut().done();
        if done.len() == 1 { done.pop() } else { None }
    }

    /// Takes all calls that have ended. [`reuse_batch`](Self::reuse_batch) returns the list.
    #[inline]
    pub(crate) fn take_ended(&mut self) -> Vec<CompletedCall> {
        std::mem::replace(self.client.shard_mut().done(), std::mem::take(&mut self.next_batch))
    }

    #[inline]
    pub(crate) fn end_report(&mut self) {
        self.is_reporting = false;
    }

    /// Returns the empty list of a batch, for the next one.
    pub(crate) fn reuse_batch(&mut self, batch: Vec<CompletedCall>) {
        self.next_batch = batch;
    }

    /// Tag of the next report's reply.
    #[inline]
    pub(crate) fn next_tag(&self) -> u16 {
        self.tags.next()
    }

    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Arms the client for a sleep. Calls that are being reported count as work.
    ///
    /// See [`LocalClient::arm`].
    pub(crate) fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.client.arm(longest).filter(|_| !self.is_reporting)
    }

    /// Takes the end of a call that has just failed to start, for lack of memory or as an invalid call.
    ///
    /// No poll reports that end. Ends for other causes are left for the poll.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_failed_start(&mut self) -> Option<FailedCall> {
        let is_returned = |done: &mut CompletedCall| match &done.result {
            Err(FailedCall { error: CallError::OutOfMemory { answered: false, .. }, .. }) => true,
            Err(failed) => matches!(call_error_code(&failed.error), Errno::NOBUFS | Errno::MSGSIZE | Errno::INVAL),
            Ok(_) => false,
        };
        self.client.shard_mut().done().pop_if(is_returned)?.result.err()
    }

    pub(crate) fn cancel(&mut self, call: CallId) {
        self.client.cancel(self.client.first(), call);
    }
}

/// A polled server.
pub(crate) struct PolledServer {
    pub(crate) server: LocalServer,
    /// Makes clients for calls to the server's clients. Created by the first [`call_back`](Self::call_back).
    call_backs: Option<CallBacks>,
    /// The thread that polls the server. It is dropped last, because the drop of the other fields may run handlers.
    thread: PollingThread,
}

/// The thread that polls a server. The server's clients must not block it.
///
/// When dropped, it stores [`ENDED`] for these clients.
struct PollingThread(Arc<AtomicU64>);

impl Drop for PollingThread {
    fn drop(&mut self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }
}

impl PolledServer {
    pub(crate) fn new(server: LocalServer) -> Self {
        Self { server, call_backs: None, thread: PollingThread(Arc::new(AtomicU64::new(current_thread()))) }
    }

    /// Makes a client that calls back a caller. `None` for a caller of another server.
    pub(crate) fn call_back(&mut self, caller: Caller, config: ClientConfig) -> Option<ThreadedClient> {
        let call_backs = self.call_backs.get_or_insert_with(|| self.server.call_backs());
        Some(ThreadedClient::of_polled(call_backs.client(caller, config)?, Arc::clone(&self.thread.0)))
    }

    /// Releases state that belongs to this thread.
    pub(crate) fn leave_thread(&mut self) {
        self.server.shard().leave_thread();
        self.thread.0.store(0, Ordering::Relaxed);
    }

    /// Makes the server belong to this thread.
    pub(crate) fn enter_thread(&mut self) {
        self.server.shard().enter_thread();
        self.thread.0.store(current_thread(), Ordering::Relaxed);
    }
}
