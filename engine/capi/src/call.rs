//! A call at the server, answered immediately or later.
#![forbid(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::fmt::Display;
use std::ops::{Deref, DerefMut};

use rpcrdma::service::DeferredCall;
use rpcrdma::{Refusal, ServerCall};
use rustix::io::Errno;

use crate::failure::ApiFailure;
use crate::handle::Borrowed;
use crate::services::refusal;

/// A call at the server, and the failures of functions that write its results.
pub(crate) struct ServedCall {
    form: CallHandling,
    /// `None` for most calls, so that each call checks only one word.
    failures: Option<Box<Failures>>,
}

enum CallHandling {
    Handled(Borrowed<ServerCall>),
    Deferred(DeferredCall),
}

/// The failures of functions that write results of a call.
#[derive(Default)]
struct Failures {
    /// Code of the last failure, and the refusal with that meaning.
    last: Option<(Errno, Refusal)>,
    /// Parts of the results that a function failed to write, and that none has written since.
    missing: Vec<(ResultPart, Refusal)>,
}

/// A part of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResultPart {
    /// The inline results.
    Inline,
    /// The data of the Write chunk with this index.
    Chunk(usize),
}

impl ServedCall {
    /// Wraps a call that its handler answers by its return value.
    pub(crate) fn handled(call: Borrowed<ServerCall>) -> Self {
        Self { form: CallHandling::Handled(call), failures: None }
    }

    /// Wraps a call that is answered later.
    pub(crate) fn deferred(call: DeferredCall) -> Self {
        Self { form: CallHandling::Deferred(call), failures: None }
    }

    /// Records a failure with its refusal, and returns it for the caller.
    #[cold]
    pub(crate) fn fail(&mut self, code: Errno, error: impl Display + Into<Refusal>) -> ApiFailure {
        let failure = ApiFailure::new(code, &error);
        self.failures.get_or_insert_default().last = Some((code, error.into()));
        failure
    }

    /// Records a failure to write a part of the results.
    ///
    /// The call is refused unless a later function [writes](Self::record_written) that part.
    #[cold]
    pub(crate) fn fail_to_write(
        &mut self,
        part: ResultPart,
        code: Errno,
        error: impl Display + Into<Refusal>,
    ) -> ApiFailure {
        let failure = self.fail(code, error);
        if let Some(Failures { last: Some((_, refusal)), missing }) = self.failures.as_deref_mut() {
            missing.retain(|(known, _)| *known != part);
            missing.push((part, *refusal));
        }
        failure
    }

    /// Records a failure to fill `len` bytes of a Write chunk. With 0 bytes, no result is missing.
    ///
    /// ENOENT tells the handler that the data belongs inline, so it is the code only if the caller does not offer the
    /// chunk.
    #[cold]
    pub(crate) fn fail_to_fill(
        &mut self,
        index: usize,
        len: usize,
        code_if_offered: Errno,
        error: impl Display + Into<Refusal>,
    ) -> ApiFailure {
        let code = if self.offers_chunk(index) { code_if_offered } else { Errno::NOENT };
        match len {
            0 => self.fail(code, error),
            _ => self.fail_to_write(ResultPart::Chunk(index), code, error),
        }
    }

    /// Records that a function has written a part of the results.
    ///
    /// Inline results include the data of Write chunks that the caller does not offer.
    #[inline]
    pub(crate) fn record_written(&mut self, part: ResultPart) {
        if self.failures.is_some() {
            self.remove_missing(part);
        }
    }

    #[cold]
    fn remove_missing(&mut self, part: ResultPart) {
        let Some(failures) = self.failures.as_mut() else { return };
        let mut missing = std::mem::take(&mut failures.missing);
        missing.retain(|(known, _)| match *known {
            ResultPart::Chunk(index) if part == ResultPart::Inline => self.offers_chunk(index),
            known => known != part,
        });
        if let Some(failures) = self.failures.as_mut() {
            failures.missing = missing;
        }
    }

    /// Whether the caller offers a Write chunk of this index.
    pub(crate) fn offers_chunk(&self, index: usize) -> bool {
        self.write_chunk_capacity(index).is_some()
    }

    /// Translates a handler's return value.
    ///
    /// A negative value that is not the code of the last failure is the handler's own.
    #[inline]
    pub(crate) fn outcome(&self, status: c_int) -> Result<(), Refusal> {
        match (status, &self.failures) {
            (0, None) => Ok(()),
            (_, failures) => outcome_after_failures(status, failures.as_deref()),
        }
    }

    /// Answers a deferred call.
    pub(crate) fn answer(self, status: c_int) {
        let outcome = self.outcome(status);
        if let CallHandling::Deferred(call) = self.form {
            call.answer(outcome);
        }
    }

    /// Whether this is a deferred call whose connection has closed.
    pub(crate) fn is_disconnected(&self) -> bool {
        matches!(&self.form, CallHandling::Deferred(call) if call.is_disconnected())
    }
}

/// Translates a handler's return value if it is not 0, or if functions have failed for the call.
#[cold]
fn outcome_after_failures(status: c_int, failures: Option<&Failures>) -> Result<(), Refusal> {
    let last = failures.and_then(|failures| failures.last);
    match (status, last) {
        (0, _) => match failures.and_then(|failures| failures.missing.first()) {
            Some((_, refusal)) => Err(*refusal),
            None => Ok(()),
        },
        (..0, Some((code, refusal))) if status == -code.raw_os_error() => Err(refusal),
        _ => Err(refusal(status)),
    }
}

/// Inline results whose length is not a multiple of the XDR unit.
pub(crate) struct UnalignedResults(pub(crate) usize);

impl Display for UnalignedResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "results of {} bytes: XDR data is a multiple of 4 bytes long, padded with zeroes", self.0)
    }
}

impl From<UnalignedResults> for Refusal {
    fn from(UnalignedResults(len): UnalignedResults) -> Self {
        Self::of_unaligned_results(len)
    }
}

/// An argument that a function for writing results has refused.
pub(crate) struct BadArgument(pub(crate) ApiFailure);

impl Display for BadArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.text())
    }
}

impl From<BadArgument> for Refusal {
    fn from(_: BadArgument) -> Self {
        Self::of_ignored_failure()
    }
}

impl Deref for ServedCall {
    type Target = ServerCall;

    #[inline]
    fn deref(&self) -> &ServerCall {
        match &self.form {
            CallHandling::Handled(call) => call,
            CallHandling::Deferred(call) => call,
        }
    }
}

impl DerefMut for ServedCall {
    #[inline]
    fn deref_mut(&mut self) -> &mut ServerCall {
        match &mut self.form {
            CallHandling::Handled(call) => call,
            CallHandling::Deferred(call) => call,
        }
    }
}
