//! A call at the server, answered at once or later.
#![forbid(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::fmt::Display;
use std::ops::{Deref, DerefMut};

use rpcrdma::service::DeferredCall;
use rpcrdma::{Refusal, ServerCall};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::handle::Borrowed;
use crate::services::refusal;

/// A call, and the functions that have failed for it.
pub(crate) struct Call {
    of: Of,
    /// `None` for most calls: one word to check for each.
    failures: Option<Box<Failures>>,
}

enum Of {
    Now(Borrowed<ServerCall>),
    Later(DeferredCall),
}

/// The functions that have failed for a call.
#[derive(Default)]
struct Failures {
    /// The last one: its code, and the refusal that it stands for.
    last: Option<(Errno, Refusal)>,
    /// Results that a function could not write, and that none has written since.
    missing: Vec<(Part, Refusal)>,
}

/// A part of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The inline results.
    Inline,
    /// The data of the Write chunk with this index.
    Chunk(usize),
}

impl Call {
    /// A call that its handler answers by its result.
    pub(crate) fn now(call: Borrowed<ServerCall>) -> Self {
        Self { of: Of::Now(call), failures: None }
    }

    /// A call that is answered later.
    pub(crate) fn later(call: DeferredCall) -> Self {
        Self { of: Of::Later(call), failures: None }
    }

    /// Keeps the refusal that a failure stands for.
    #[cold]
    pub(crate) fn fail(&mut self, code: Errno, error: impl Display + Into<Refusal>) -> Failure {
        let failure = Failure::new(code, &error);
        self.failures.get_or_insert_default().last = Some((code, error.into()));
        failure
    }

    /// As [`fail`](Self::fail), for a function that did not write a part of the results: unless a later one
    /// [writes](Self::wrote) it, the call has no results.
    #[cold]
    pub(crate) fn fail_to_write(&mut self, part: Part, code: Errno, error: impl Display + Into<Refusal>) -> Failure {
        let failure = self.fail(code, error);
        if let Some(Failures { last: Some((_, refusal)), missing }) = self.failures.as_deref_mut() {
            missing.retain(|(known, _)| *known != part);
            missing.push((part, *refusal));
        }
        failure
    }

    /// As [`fail_to_write`](Self::fail_to_write), for `len` bytes of a Write chunk: without any, nothing is missing.
    ///
    /// ENOENT tells the handler that the data belongs inline, so it is the code only if the caller does not offer the
    /// chunk.
    #[cold]
    pub(crate) fn fail_to_fill(
        &mut self,
        index: usize,
        len: usize,
        if_offered: Errno,
        error: impl Display + Into<Refusal>,
    ) -> Failure {
        let code = if self.offers(index) { if_offered } else { Errno::NOENT };
        match len {
            0 => self.fail(code, error),
            _ => self.fail_to_write(Part::Chunk(index), code, error),
        }
    }

    /// A function has written a part of the results. Inline results also have the data of Write chunks that the caller
    /// does not offer.
    #[inline]
    pub(crate) fn wrote(&mut self, part: Part) {
        if self.failures.is_some() {
            self.is_no_longer_missing(part);
        }
    }

    #[cold]
    fn is_no_longer_missing(&mut self, part: Part) {
        let Some(failures) = self.failures.as_mut() else { return };
        let mut missing = std::mem::take(&mut failures.missing);
        missing.retain(|(known, _)| match *known {
            Part::Chunk(index) if part == Part::Inline => self.offers(index),
            known => known != part,
        });
        if let Some(failures) = self.failures.as_mut() {
            failures.missing = missing;
        }
    }

    /// Whether the caller offers a Write chunk of this index, for data that is not inline.
    pub(crate) fn offers(&self, index: usize) -> bool {
        self.write_chunk_capacity(index).is_some()
    }

    /// What a handler's result means. A negative one that is not a failure's is the handler's own.
    #[inline]
    pub(crate) fn outcome(&self, status: c_int) -> Result<(), Refusal> {
        match (status, &self.failures) {
            (0, None) => Ok(()),
            (_, failures) => refused(status, failures.as_deref()),
        }
    }

    /// Answers it, if it is one for later.
    pub(crate) fn answer(self, status: c_int) {
        let outcome = self.outcome(status);
        if let Of::Later(call) = self.of {
            call.answer(outcome);
        }
    }

    /// Whether nobody awaits the reply.
    pub(crate) fn is_disconnected(&self) -> bool {
        matches!(&self.of, Of::Later(call) if call.is_disconnected())
    }
}

/// The outcome of a call with this status, some functions for which have failed.
#[cold]
fn refused(status: c_int, failures: Option<&Failures>) -> Result<(), Refusal> {
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

/// Inline results of this many bytes are no whole number of XDR units.
pub(crate) struct Unaligned(pub(crate) usize);

impl Display for Unaligned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "results of {} bytes: XDR data is a multiple of 4 bytes long, padded with zeroes", self.0)
    }
}

impl From<Unaligned> for Refusal {
    fn from(Unaligned(len): Unaligned) -> Self {
        Self::of_unaligned_results(len)
    }
}

/// A function that was to write results has refused its arguments.
pub(crate) struct BadArgument(pub(crate) Failure);

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

impl Deref for Call {
    type Target = ServerCall;

    #[inline]
    fn deref(&self) -> &ServerCall {
        match &self.of {
            Of::Now(call) => call,
            Of::Later(call) => call,
        }
    }
}

impl DerefMut for Call {
    #[inline]
    fn deref_mut(&mut self) -> &mut ServerCall {
        match &mut self.of {
            Of::Now(call) => call,
            Of::Later(call) => call,
        }
    }
}
