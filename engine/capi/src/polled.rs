//! A client that its thread polls.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::FailedCall;
use rpcrdma::client::{CallId, Connection, Done, LocalClient};
use rustix::io::Errno;

use crate::failure::code_of;
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

    #[inline]
    pub(crate) fn connection(&self) -> Connection {
        self.client.first()
    }

    /// Whether calls have ended that this poll reports, while the client is free. Those that end meanwhile are the next
    /// poll's, and none are that of a poll by a function that gets a call: the poll ends, and the stack stays bounded.
    #[inline(always)]
    pub(crate) fn is_to_report(&mut self) -> bool {
        !self.client.shard_mut().done().is_empty() && !self.is_reporting
    }

    #[inline(always)]
    pub(crate) fn begin_report(&mut self) {
        self.is_reporting = true;
    }

    /// The call that has ended, if it is the only one.
    #[inline(always)]
    pub(crate) fn only_ended(&mut self) -> Option<Done> {
        let done = self.client.shard_mut().done();
        if done.len() == 1 { done.pop() } else { None }
    }

    /// All calls that have ended; [`reuse`](Self::reuse) gets the batch back.
    #[inline(always)]
    pub(crate) fn ended(&mut self) -> Vec<Done> {
        std::mem::replace(self.client.shard_mut().done(), std::mem::take(&mut self.spare))
    }

    #[inline(always)]
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

    /// Takes the end of a call whose start has failed just now, for lack of memory: nothing reports it. Ends for other
    /// causes are left to be reported.
    #[cold]
    #[inline(never)]
    pub(crate) fn not_started(&mut self) -> Option<FailedCall> {
        let lacks_memory = |done: &mut Done| match &done.result {
            Err(failed) => matches!(code_of(&failed.error), Errno::NOBUFS | Errno::MSGSIZE),
            Ok(_) => false,
        };
        self.client.shard_mut().done().pop_if(lacks_memory)?.result.err()
    }

    pub(crate) fn cancel(&mut self, call: CallId) {
        self.client.cancel(self.client.first(), call);
    }
}
