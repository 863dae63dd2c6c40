//! A call of a client that has ended: the value of a reply handle.
#![forbid(unsafe_code)]

use std::ffi::c_int;

use rpcrdma::{Buf, CallError, CallResult, Reply};

use crate::failure::ApiFailure;
use crate::services::status;

/// A call of a client that has ended, with its reply or failure.
pub(crate) struct EndedCall {
    /// `None` once `rpcrdma_reply_keep` has moved it to another handle.
    result: Option<CallResult>,
    /// Buffers of the Write chunks and of the Read chunks, each filled when the first buffer is taken.
    buffers: Option<Box<[Option<ChunkBuffers>; 2]>>,
}

/// Buffers of one chunk list; `None` once taken.
type ChunkBuffers = Vec<Option<Buf>>;

impl EndedCall {
    #[inline]
    pub(crate) fn new(result: CallResult) -> Self {
        Self { result: Some(result), buffers: None }
    }

    /// Moves result and buffers to another handle.
    pub(crate) fn keep(&mut self) -> Result<Self, ApiFailure> {
        let result = self.result.take().ok_or_else(already_kept)?;
        Ok(Self { result: Some(result), buffers: std::mem::take(&mut self.buffers) })
    }

    /// The negative code of a failed call, whose text becomes the thread's; 0 for an answered call.
    #[inline]
    pub(crate) fn code(&self) -> c_int {
        match self.reply() {
            Ok(_) => 0,
            Err(failure) => failure.report(),
        }
    }

    #[inline]
    pub(crate) fn reply(&self) -> Result<&Reply, ApiFailure> {
        match self.result.as_ref().ok_or_else(already_kept)? {
            Ok(reply) => Ok(reply),
            Err(failed) => Err(failed.error.into()),
        }
    }

    /// The status with which the server refused the call; 0 for an answered call.
    pub(crate) fn status(&self) -> Result<c_int, ApiFailure> {
        match self.result.as_ref().ok_or_else(already_kept)? {
            Ok(_) => Ok(0),
            Err(failed) => match failed.error {
                CallError::Refused(refusal) => status(refusal).ok_or_else(|| failed.error.into()),
                error => Err(error.into()),
            },
        }
    }

    /// Takes the buffer of Write chunk `index` if `is_result`, otherwise of Read chunk `index`.
    pub(crate) fn take(&mut self, is_result: bool, index: usize) -> Result<Buf, ApiFailure> {
        let list = usize::from(!is_result);
        if self.buffers.as_ref().is_none_or(|lists| lists[list].is_none()) {
            let (first, others) = match &mut self.result {
                Some(Ok(reply)) if is_result => split_first(reply.take_chunks()),
                Some(Ok(reply)) => split_first(reply.take_sent()),
                Some(Err(failed)) if is_result => split_first(failed.returned.take_chunks()),
                Some(Err(failed)) => split_first(failed.returned.take_sent()),
                None => (None, Vec::new()),
            };
            if index == 0 && others.is_empty() {
                // A single buffer needs no list, so nothing is allocated.
                return first.ok_or_else(|| no_buffer(0));
            }
            self.buffers.get_or_insert_default()[list] = Some(first.into_iter().chain(others).map(Some).collect());
        }
        let buffers = self.buffers.as_mut().and_then(|lists| lists[list].as_mut());
        buffers.and_then(|buffers| buffers.get_mut(index)?.take()).ok_or_else(|| no_buffer(index))
    }
}

fn split_first(mut all: impl Iterator<Item = Buf>) -> (Option<Buf>, Vec<Buf>) {
    (all.next(), all.collect())
}

#[cold]
fn no_buffer(index: usize) -> ApiFailure {
    ApiFailure::argument(format_args!("the reply has no buffer of chunk {index}"))
}

#[cold]
fn already_kept() -> ApiFailure {
    ApiFailure::argument("rpcrdma_reply_keep has moved this reply to another handle")
}
