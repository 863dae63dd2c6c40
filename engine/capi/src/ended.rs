//! The end of a call that a client made.
#![forbid(unsafe_code)]

use std::ffi::c_int;

use rpcrdma::{Buf, CallError, CallResult, Reply};

use crate::failure::Failure;
use crate::services::status;

/// The end of a call.
pub(crate) struct Ended {
    /// `None` once another handle has it.
    result: Option<CallResult>,
    /// Buffers of its Write chunks, and of its Read chunks, once one was taken.
    buffers: Option<Box<[Option<Buffers>; 2]>>,
}

/// Those of one list, until they are taken.
type Buffers = Vec<Option<Buf>>;

impl Ended {
    #[inline]
    pub(crate) fn new(result: CallResult) -> Self {
        Self { result: Some(result), buffers: None }
    }

    /// Takes all of it, for another handle.
    pub(crate) fn keep(&mut self) -> Result<Self, Failure> {
        let result = self.result.take().ok_or_else(kept)?;
        Ok(Self { result: Some(result), buffers: std::mem::take(&mut self.buffers) })
    }

    /// Code of its failure, negative; 0 for an answered call. Sets the thread's text.
    #[inline]
    pub(crate) fn code(&self) -> c_int {
        match self.reply() {
            Ok(_) => 0,
            Err(failure) => failure.report(),
        }
    }

    #[inline]
    pub(crate) fn reply(&self) -> Result<&Reply, Failure> {
        match self.result.as_ref().ok_or_else(kept)? {
            Ok(reply) => Ok(reply),
            Err(failed) => Err(failed.error.into()),
        }
    }

    /// The status that the server refused it with; 0 for an answered call.
    pub(crate) fn status(&self) -> Result<c_int, Failure> {
        match self.result.as_ref().ok_or_else(kept)? {
            Ok(_) => Ok(0),
            Err(failed) => match failed.error {
                CallError::Refused(refusal) => status(refusal).ok_or_else(|| failed.error.into()),
                error => Err(error.into()),
            },
        }
    }

    /// Takes a buffer of a chunk: of Write chunk `index`, or of Read chunk `index`.
    pub(crate) fn take(&mut self, is_result: bool, index: usize) -> Result<Buf, Failure> {
        let list = usize::from(!is_result);
        if self.buffers.as_ref().is_none_or(|lists| lists[list].is_none()) {
            let (first, others) = match &mut self.result {
                Some(Ok(reply)) if is_result => first_of(reply.take_chunks()),
                Some(Ok(reply)) => first_of(reply.take_sent()),
                Some(Err(failed)) if is_result => first_of(failed.returned.take_chunks()),
                Some(Err(failed)) => first_of(failed.returned.take_sent()),
                None => (None, Vec::new()),
            };
            if index == 0 && others.is_empty() {
                // Without memory for a list.
                return first.ok_or_else(|| no_buffer(0));
            }
            self.buffers.get_or_insert_default()[list] = Some(first.into_iter().chain(others).map(Some).collect());
        }
        let buffers = self.buffers.as_mut().and_then(|lists| lists[list].as_mut());
        buffers.and_then(|buffers| buffers.get_mut(index)?.take()).ok_or_else(|| no_buffer(index))
    }
}

fn first_of(mut all: impl Iterator<Item = Buf>) -> (Option<Buf>, Vec<Buf>) {
    (all.next(), all.collect())
}

#[cold]
fn no_buffer(index: usize) -> Failure {
    Failure::argument(format_args!("there is no buffer {index} to be taken"))
}

#[cold]
fn kept() -> Failure {
    Failure::argument("rpcrdma_reply_keep gave it to another handle")
}
