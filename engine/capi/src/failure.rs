//! Failures: a code for the caller, and a text for the thread.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{c_char, c_int};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use rpcrdma::client::ConnectError;
use rpcrdma::{CallError, CloseReason, CloseReasonKind, Refusal, StartError, StartErrorKind};
use rustix::io::Errno;

use crate::names::in_c;
use crate::process::{self, set_errno};

/// A failed call into the library. Boxed: results of functions stay in registers.
pub(crate) struct Failure(Box<(Errno, String)>);

impl Failure {
    #[cold]
    #[inline(never)]
    pub(crate) fn new(code: Errno, text: impl Display) -> Self {
        Self(Box::new((code, in_c(text.to_string()))))
    }

    /// As [`new`](Self::new), with a text whose names of Rust are those that the caller wrote.
    #[cold]
    pub(crate) fn as_is(code: Errno, text: String) -> Self {
        Self(Box::new((code, text)))
    }

    /// An argument is wrong.
    #[cold]
    #[inline(never)]
    pub(crate) fn argument(text: impl Display) -> Self {
        Self::new(Errno::INVAL, text)
    }

    /// Puts its subject in front of the text.
    #[cold]
    pub(crate) fn of(self, what: impl Display) -> Self {
        let (code, text) = *self.0;
        Self::as_is(code, format!("{what}: {text}"))
    }

    /// Its code.
    pub(crate) fn code(&self) -> Errno {
        self.0.0
    }

    /// Its text.
    pub(crate) fn text(&self) -> &str {
        &self.0.1
    }

    /// The code, negative; the text becomes the thread's, and the code its errno.
    #[cold]
    #[inline(never)]
    pub(crate) fn report(self) -> c_int {
        let (code, text) = *self.0;
        let text = text.replace('\0', " ");
        let len = (0..LONGEST.min(text.len() + 1)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        // A buffer of the thread: its address outlives the text.
        LAST.with_borrow_mut(|last| {
            last[..len].copy_from_slice(&text.as_bytes()[..len]);
            last[len] = 0;
        });
        set_errno(code);
        -code.raw_os_error()
    }
}

/// For failures that the text alone explains.
impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        let code = match error.kind() {
            StartErrorKind::Config | StartErrorKind::Core => Errno::INVAL,
            StartErrorKind::Address if error.is_address_in_use() => Errno::ADDRINUSE,
            StartErrorKind::Address => Errno::ADDRNOTAVAIL,
            StartErrorKind::Memory => Errno::NOMEM,
            StartErrorKind::Device => Errno::NODEV,
            _ => Errno::IO,
        };
        Self::new(limit_of_process(error.os_error()).unwrap_or(code), chain(&error))
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let code = match &error {
            ConnectError::Start(_) => match error {
                ConnectError::Start(error) => return error.into(),
                _ => Errno::IO,
            },
            ConnectError::TimedOut { .. } => Errno::TIMEDOUT,
            ConnectError::NotAuthenticated { reason, .. } | ConnectError::Refused { reason, .. } => {
                code_of_refused(reason)
            }
            ConnectError::Fabric(error) => code_of_refused(&error.clone().into()),
            _ => Errno::IO,
        };
        Self::new(code, chain(&error))
    }
}

/// The code of a connection that was not established.
fn code_of_refused(reason: &CloseReason) -> Errno {
    let limit = limit_of_process(reason.os_error());
    limit.unwrap_or_else(|| match reason.kind() {
        _ if reason.is_bad_address() => Errno::INVAL,
        _ if reason.is_unreachable() => Errno::CONNREFUSED,
        _ if reason.is_out_of_receives() => Errno::AGAIN,
        CloseReasonKind::TimedOut => Errno::TIMEDOUT,
        CloseReasonKind::PeerFault => Errno::PROTO,
        CloseReasonKind::NotAuthenticated => Errno::KEYREJECTED,
        CloseReasonKind::Peer | CloseReasonKind::Evicted => Errno::CONNRESET,
        _ => Errno::IO,
    })
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self::new(code_of(&error), error)
    }
}

/// The code of a failed call.
pub(crate) fn code_of(error: &CallError) -> Errno {
    match error {
        CallError::TimedOut { .. } | CallError::NoCredits { .. } => Errno::TIMEDOUT,
        CallError::Cancelled { .. } => Errno::CANCELED,
        CallError::ConnectionLost { .. } => Errno::CONNRESET,
        CallError::NotAuthenticated => Errno::KEYREJECTED,
        CallError::Closed => Errno::NOTCONN,
        CallError::TooManyCalls { .. } => Errno::AGAIN,
        CallError::NoMemory { .. } | CallError::NoReplyBuffer { .. } => Errno::NOBUFS,
        // EAGAIN is that of `TooManyCalls`.
        CallError::OutOfMemory { os_error, .. } => {
            limit_of_process(*os_error).filter(|code| *code != Errno::AGAIN).unwrap_or(Errno::NOMEM)
        }
        CallError::TooLong { .. } => Errno::MSGSIZE,
        CallError::NoReverse => Errno::OPNOTSUPP,
        error if error.is_busy() => Errno::BUSY,
        CallError::MalformedReply(_) | CallError::Transport(_) => Errno::PROTO,
        CallError::Refused(Refusal::Authentication(_)) => Errno::ACCESS,
        CallError::Refused(_) => Errno::REMOTEIO,
        _ => Errno::INVAL,
    }
}

/// The system's error of this number, if it tells of a limit that the caller can raise. A system call without memory
/// for a socket has another code than one without memory for a mapping: callers get one for both.
fn limit_of_process(os_error: Option<i32>) -> Option<Errno> {
    let limits = [Errno::AGAIN, Errno::FBIG, Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOSPC];
    match os_error.map(Errno::from_raw_os_error)? {
        Errno::NOBUFS => Some(Errno::NOMEM),
        code => limits.contains(&code).then_some(code),
    }
}

/// An error with its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let more = source.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = source.source();
    }
    text
}

/// Bytes of the longest text, with the zero byte at its end.
const LONGEST: usize = 1024;

thread_local! {
    /// Text of the thread's last failure.
    static LAST: RefCell<[u8; LONGEST]> = const { RefCell::new([0; LONGEST]) };
}

/// The thread's last failure; empty before the first. The next one overwrites it.
pub(crate) fn last() -> *const c_char {
    LAST.with(|last| last.as_ptr().cast_const().cast())
}

/// What a function of the interface returns.
pub(crate) trait Outcome: Sized {
    /// After a failure with this code, which is negative.
    fn failed(code: c_int) -> Self;
}

impl Outcome for c_int {
    fn failed(code: c_int) -> Self {
        code
    }
}

impl<T> Outcome for *mut T {
    fn failed(_: c_int) -> Self {
        null_mut()
    }
}

impl<T> Outcome for *const T {
    fn failed(_: c_int) -> Self {
        std::ptr::null()
    }
}

/// The body of a function of the interface: reports its failure, and ends an unwinding.
#[inline(always)]
pub(crate) fn entry<T: Outcome>(name: &'static str, body: impl FnOnce() -> Result<T, Failure>) -> T {
    match catch_unwind(AssertUnwindSafe(|| process::check().and_then(|()| body()))) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => T::failed(failure.report()),
        Err(panic) => T::failed(panicked(name, &*panic)),
    }
}

/// The panic hook has printed its place.
#[cold]
#[inline(never)]
fn panicked(name: &str, panic: &(dyn std::any::Any + Send)) -> c_int {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = format!("{name}: panic: {}", text.unwrap_or("without a text"));
    log::error!("{text}");
    Failure::new(Errno::IO, text).report()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_threads_or_descriptors_has_the_code_of_the_system_call() {
        let code = |errno: Errno| limit_of_process(Some(errno.raw_os_error()));
        for errno in [Errno::AGAIN, Errno::NOMEM, Errno::FBIG, Errno::MFILE, Errno::NFILE, Errno::NOSPC] {
            assert_eq!(code(errno), Some(errno));
        }
        assert_eq!(code(Errno::NOBUFS), Some(Errno::NOMEM));
        let of_call = |os_error| code_of(&CallError::OutOfMemory { answered: false, os_error });
        let number = |errno: Errno| Some(errno.raw_os_error());
        assert_eq!([of_call(None), of_call(number(Errno::AGAIN))], [Errno::NOMEM; 2]);
        assert_eq!(of_call(number(Errno::MFILE)), Errno::MFILE);
        assert_eq!((code(Errno::CONNREFUSED), limit_of_process(None)), (None, None));
    }
}
