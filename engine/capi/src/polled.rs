//! A client that its thread polls.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::client::{CallId, Connection, Done, LocalClient};

use crate::handle::Numbers;

/// A client with one connection, and calls that ended and were not reported yet.
pub(crate) struct Polled {
    pub(crate) client: LocalClient,
    ended: VecDeque<Done>,
    /// A function that gets an end runs.
    pub(crate) is_reporting: bool,
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
        Self { client, ended: VecDeque::new(), is_reporting: false, id, numbers: Numbers::of_thread() }
    }

    #[inline]
    pub(crate) fn connection(&self) -> Connection {
        self.client.first()
    }

    /// Number of calls that have ended, to be reported by this poll. Those that end while functions run are the next
    /// one's, and none while a function runs: the poll ends, and the stack stays bounded.
    #[inline(always)]
    pub(crate) fn ended_calls(&mut self) -> usize {
        let ended = self.client.shard_mut().done().len() + self.ended.len();
        if ended > 0 && self.is_reporting { 0 } else { ended }
    }

    /// The next call that ended, of as many that are left to be reported. The last one is the shard's, unless it came
    /// with others.
    #[inline(always)]
    pub(crate) fn next(&mut self, left: usize) -> Option<Done> {
        if left > 1 || !self.ended.is_empty() { self.next_of_many() } else { self.client.shard_mut().done().pop() }
    }

    #[inline(never)]
    fn next_of_many(&mut self) -> Option<Done> {
        self.ended.extend(self.client.shard_mut().done().drain(..));
        self.ended.pop_front()
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

    /// As [`LocalClient::arm`]; a call that was not reported is work, too.
    pub(crate) fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.client.arm(longest).filter(|_| self.ended.is_empty())
    }

    pub(crate) fn cancel(&mut self, call: CallId) {
        self.client.cancel(self.client.first(), call);
    }
}
