//! A client that its thread polls.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::Duration;

use rpcrdma::client::{CallId, Connection, Done, LocalClient};

use crate::handle::Spare;
use crate::types::rpcrdma_request;

/// A client with one connection, and calls that ended and were not reported yet.
pub(crate) struct Polled {
    pub(crate) client: LocalClient,
    ended: VecDeque<Done>,
    /// Slots of its requests.
    pub(crate) requests: Spare<rpcrdma_request>,
}

impl Polled {
    pub(crate) fn new(client: LocalClient) -> Self {
        Self { client, ended: VecDeque::new(), requests: Spare::new() }
    }

    pub(crate) fn connection(&self) -> Connection {
        self.client.first()
    }

    /// One turn. True if there was work.
    pub(crate) fn turn(&mut self) -> bool {
        self.client.poll(|done| self.ended.push_back(done))
    }

    /// The next call that ended.
    pub(crate) fn next(&mut self) -> Option<Done> {
        self.ended.pop_front()
    }

    /// As [`LocalClient::arm`]; a call that was not reported is work, too.
    pub(crate) fn arm(&mut self, longest: Duration) -> Option<Duration> {
        self.client.arm(longest).filter(|_| self.ended.is_empty())
    }

    pub(crate) fn cancel(&mut self, call: CallId) {
        self.client.cancel(self.client.first(), call);
    }
}
