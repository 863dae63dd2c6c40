//! A call at the server, answered at once or later.
#![forbid(unsafe_code)]

use std::ffi::c_int;
use std::fmt::Display;
use std::ops::{Deref, DerefMut};

use rpcrdma::service::DeferredCall;
use rpcrdma::{Refusal, ServerCall};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::handle::Borrowed;
use crate::services::refusal;

/// A call, and how the last function on it has failed.
pub(crate) struct Call {
    of: Of,
    failed: Option<(Errno, Refusal)>,
}

enum Of {
    Now(Borrowed<ServerCall>),
    Later(DeferredCall),
}

impl Call {
    /// A call that its handler answers by its result.
    pub(crate) fn now(call: Borrowed<ServerCall>) -> Self {
        Self { of: Of::Now(call), failed: None }
    }

    /// A call that is answered later.
    pub(crate) fn later(call: DeferredCall) -> Self {
        Self { of: Of::Later(call), failed: None }
    }

    /// Keeps the refusal that a failure stands for.
    #[cold]
    pub(crate) fn fail(&mut self, code: Errno, error: impl Display + Into<Refusal>) -> Failure {
        let failure = Failure::new(code, &error);
        self.failed = Some((code, error.into()));
        failure
    }

    /// What a handler's result means. A negative one that is not the failure's is the handler's own.
    #[inline]
    pub(crate) fn outcome(&self, status: c_int) -> Result<(), Refusal> {
        match (status, self.failed) {
            (0, _) => Ok(()),
            (..0, Some((code, refusal))) if status == -code.raw_os_error() => Err(refusal),
            _ => Err(refusal(status)),
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
