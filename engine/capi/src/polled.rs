//! Clients and servers that their thread polls.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::client::{CallId, ClientConfig, Connection, Done, LocalClient};
use rpcrdma::server::{CallBacks, LocalServer};
use rpcrdma::service::Caller;
use rpcrdma::{CallError, FailedCall};
use rpcrdma_mempool::current_thread;
use rustix::io::Errno;

use crate::calling::{CallingClient, ENDED};
use crate::failure::{Failure, code_of};
use crate::handle::Numbers;

/// A client with one connection.
pub(crate) struct Polled {
    pub(crate) client: LocalClient,
    /// Functions get the calls of a batch.
    is_reporting: bool,
    /// Room of the next batch.
    spare: Vec<Done>,
    /// Tells it from another one in the same place.
    id: u64,
    /// Those of its replies, with the other handles of its thread.
    numbers: Numbers,
}

impl Polled {
    pub(crate) fn new(client: LocalClient) -> Self {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        // Relaxed: only the number counts.
        let id = CREATED.fetch_add(1, Ordering::Relaxed);
        Self { client, is_reporting: false, spare: Vec::new(), id, numbers: Numbers::of_thread() }
    }

    /// Gives up what belongs to this thread.
    ///
    /// # Errors
    /// EBUSY: it reports the end of a call.
    pub(crate) fn leave_thread(&mut self) -> Result<(), Failure> {
        if self.is_reporting {
            return Err(Failure::new(Errno::BUSY, "rpcrdma_local_client: a poll reports the ends of calls now"));
        }
        self.client.shard().leave_thread();
        self.numbers = Numbers::of_nobody();
        Ok(())
    }

    /// Belongs to this thread from now on.
    pub(crate) fn enter_thread(&mut self) {
        self.client.shard().enter_thread();
        self.numbers = Numbers::of_thread();
    }

    #[inline]
    pub(crate) fn connection(&self) -> Connection {
        self.client.first()
    }

    /// Whether calls have ended that this poll reports, while the client is free. Those that end meanwhile are the next
    /// poll's, and none are that of a poll by a function that gets a call: the poll ends, and the stack stays bounded.
    #[inline]
    pub(crate) fn is_to_report(&mut self) -> bool {
        !self.client.shard_mut().done().is_empty() && !self.is_reporting
    }

    #[inline]
    pub(crate) fn begin_report(&mut self) {
        self.is_reporting = true;
    }

    /// The call that has ended, if it is the only one.
    #[inline]
    pub(crate) fn only_ended(&mut self) -> Option<Done> {
        let done = self.client.shard_mut().done();
        if done.len() == 1 { done.pop() } else { None }
    }

    /// All calls that have ended; [`reuse`](Self::reuse) gets the batch back.
    #[inline]
    pub(crate) fn ended(&mut self) -> Vec<Done> {
        std::mem::replace(self.client.shard_mut().done(), std::mem::take(&mut self.spare))
    }

    #[inline]
    pub(crate) fn reported(&mut self) {
        self.is_reporting = false;
    }

    /// Keeps the room of a batch.
    pub(crate) fn reuse(&mut self, batch: Vec<Done>) {
        self.spare = batch;
    }

    /// Number of a report.
    #[inline]
    pub(crate) fn number(&self) -> u16 {
        self.numbers.next()
    }

    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// As [`LocalClient::arm`]; calls that are being reported are work, too.
    pub(crate) fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.client.arm(longest).filter(|_| !self.is_reporting)
    }

    /// Takes the end of a call whose start has failed just now, for lack of memory or as an invalid call: nothing
    /// reports it. Ends for other causes are left to be reported.
    #[cold]
    #[inline(never)]
    pub(crate) fn not_started(&mut self) -> Option<FailedCall> {
        let is_returned = |done: &mut Done| match &done.result {
            Err(FailedCall { error: CallError::OutOfMemory { answered: false, .. }, .. }) => true,
            Err(failed) => matches!(code_of(&failed.error), Errno::NOBUFS | Errno::MSGSIZE | Errno::INVAL),
            Ok(_) => false,
        };
        self.client.shard_mut().done().pop_if(is_returned)?.result.err()
    }

    pub(crate) fn cancel(&mut self, call: CallId) {
        self.client.cancel(self.client.first(), call);
    }
}

/// A server, and what makes clients for calls to its clients.
pub(crate) struct PolledServer {
    pub(crate) server: LocalServer,
    /// Made by the first [`call_back`](Self::call_back).
    call_backs: Option<CallBacks>,
    /// The thread that polls it. Dropped last: what ends before may still run handlers on that thread.
    thread: PollingThread,
}

/// The thread that polls a server, for the server's clients, which must not block it. Its drop tells them of the end.
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

    /// A client for calls to a caller. `None` for a caller of another server.
    pub(crate) fn call_back(&mut self, caller: Caller, config: ClientConfig) -> Option<CallingClient> {
        let call_backs = self.call_backs.get_or_insert_with(|| self.server.call_backs());
        Some(CallingClient::of_polled(call_backs.client(caller, config)?, Arc::clone(&self.thread.0)))
    }

    /// Gives up what belongs to this thread.
    pub(crate) fn leave_thread(&mut self) {
        self.server.shard().leave_thread();
        self.thread.0.store(0, Ordering::Relaxed);
    }

    /// Belongs to this thread from now on.
    pub(crate) fn enter_thread(&mut self) {
        self.server.shard().enter_thread();
        self.thread.0.store(current_thread(), Ordering::Relaxed);
    }
}
