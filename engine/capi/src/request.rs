//! A call that a client makes, and its end.
#![forbid(unsafe_code)]

use std::ffi::c_int;
use std::time::Duration;

use rpcrdma::client::ClientCall;
use rpcrdma::{Buf, CallResult, Reply};

use crate::failure::Failure;

/// A call that is built.
pub(crate) struct Request(Option<ClientCall>);

impl Request {
    pub(crate) fn new(call: ClientCall) -> Self {
        Self(Some(call))
    }

    /// Changes it.
    #[inline]
    pub(crate) fn with(&mut self, change: impl FnOnce(ClientCall) -> ClientCall) {
        self.0 = self.0.take().map(change);
    }

    pub(crate) fn into_call(self) -> Result<ClientCall, Failure> {
        self.0.ok_or_else(spent)
    }

    /// Sets the time-out; none for a negative number.
    pub(crate) fn set_timeout(&mut self, milliseconds: i64) {
        if let Ok(milliseconds) = u64::try_from(milliseconds) {
            self.with(|call| call.timeout(Duration::from_millis(milliseconds)));
        }
    }
}

#[cold]
fn spent() -> Failure {
    Failure::argument("the request was used")
}

/// The end of a call.
pub(crate) struct Ended {
    /// `None` once another handle has it.
    result: Option<CallResult>,
    /// Buffers of its Write chunks, and of its Read chunks, once one was taken.
    buffers: [Option<Vec<Option<Buf>>>; 2],
}

impl Ended {
    pub(crate) fn new(result: CallResult) -> Self {
        Self { result: Some(result), buffers: [None, None] }
    }

    /// Takes all of it, for another handle.
    pub(crate) fn keep(&mut self) -> Result<Self, Failure> {
        let result = self.result.take().ok_or_else(kept)?;
        Ok(Self { result: Some(result), buffers: std::mem::take(&mut self.buffers) })
    }

    /// Code of its failure, negative; 0 for an answered call. Sets the thread's text.
    pub(crate) fn code(&self) -> c_int {
        match self.reply() {
            Ok(_) => 0,
            Err(failure) => failure.report(),
        }
    }

    pub(crate) fn reply(&self) -> Result<&Reply, Failure> {
        match self.result.as_ref().ok_or_else(kept)? {
            Ok(reply) => Ok(reply),
            Err(failed) => Err(failed.error.into()),
        }
    }

    /// Takes a buffer of a chunk: of Write chunk `index`, or of Read chunk `index`.
    pub(crate) fn take(&mut self, is_result: bool, index: usize) -> Result<Buf, Failure> {
        let buffers = self.buffers[usize::from(!is_result)].get_or_insert_with(|| match &mut self.result {
            Some(Ok(reply)) if is_result => reply.take_chunks().map(Some).collect(),
            Some(Ok(reply)) => reply.take_sent().map(Some).collect(),
            Some(Err(failed)) if is_result => failed.returned.take_chunks().map(Some).collect(),
            Some(Err(failed)) => failed.returned.take_sent().map(Some).collect(),
            None => Vec::new(),
        });
        let buffer = buffers.get_mut(index).and_then(Option::take);
        buffer.ok_or_else(|| Failure::argument(format_args!("there is no buffer {index} to be taken")))
    }
}

#[cold]
fn kept() -> Failure {
    Failure::argument("rpcrdma_reply_keep gave it to another handle")
}
