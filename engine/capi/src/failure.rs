//! Failures of the interface's functions: a code for the caller, and a text per thread.
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

use crate::names::to_c_names;
use crate::process::{self, set_errno};

/// Failure of a function of the interface.
///
/// It is boxed, so that the results of functions stay in registers.
pub(crate) struct ApiFailure(Box<(Errno, String)>);

impl ApiFailure {
    #[cold]
    #[inline(never)]
    pub(crate) fn new(code: Errno, text: impl Display) -> Self {
        Self(Box::new((code, to_c_names(text.to_string()))))
    }

    /// A failure whose text is kept unchanged, because Rust names in it would be the caller's own words.
    #[cold]
    pub(crate) fn untranslated(code: Errno, text: String) -> Self {
        Self(Box::new((code, text)))
    }

    /// A failure with EINVAL.
    #[cold]
    #[inline(never)]
    pub(crate) fn argument(text: impl Display) -> Self {
        Self::new(Errno::INVAL, text)
    }

    /// Puts the subject of the failure in front of its text.
    #[cold]
    pub(crate) fn with_subject(self, what: impl Display) -> Self {
        let (code, text) = *self.0;
        Self::untranslated(code, format!("{what}: {text}"))
    }

    /// The code.
    pub(crate) fn code(&self) -> Errno {
        self.0.0
    }

    /// The text.
    pub(crate) fn text(&self) -> &str {
        &self.0.1
    }

    /// Stores the text as the thread's last failure, and the code as its errno. Returns the negative code.
    #[cold]
    #[inline(never)]
    pub(crate) fn report(self) -> c_int {
        let (code, text) = *self.0;
        let text = text.replace('\0', " ");
        let len = (0..TEXT_SIZE.min(text.len() + 1)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        // The address of the thread's buffer stays valid when the next failure overwrites the text.
        LAST_TEXT.with_borrow_mut(|last| {
            last[..len].copy_from_slice(&text.as_bytes()[..len]);
            last[len] = 0;
        });
        set_errno(code);
        -code.raw_os_error()
    }
}

impl From<StartError> for ApiFailure {
    fn from(error: StartError) -> Self {
        let code = match error.kind() {
            StartErrorKind::Config | StartErrorKind::Core => Errno::INVAL,
            StartErrorKind::Address if error.is_address_in_use() => Errno::ADDRINUSE,
            StartErrorKind::Address => Errno::ADDRNOTAVAIL,
            StartErrorKind::Memory => Errno::NOMEM,
            StartErrorKind::Device => Errno::NODEV,
            _ => Errno::IO,
        };
        Self::new(resource_limit_code(error.os_error()).unwrap_or(code), text_with_causes(&error))
    }
}

impl From<ConnectError> for ApiFailure {
    fn from(error: ConnectError) -> Self {
        let code = match &error {
            ConnectError::Start(_) => match error {
                ConnectError::Start(error) => return error.into(),
                _ => Errno::IO,
            },
            ConnectError::TimedOut { .. } => Errno::TIMEDOUT,
            ConnectError::NotAuthenticated { reason, .. } | ConnectError::Refused { reason, .. } => {
                connect_error_code(reason)
            }
            ConnectError::Fabric(error) => connect_error_code(&error.clone().into()),
            _ => Errno::IO,
        };
        Self::new(code, text_with_causes(&error))
    }
}

/// The code for a connection that was not established.
pub(crate) fn connect_error_code(reason: &CloseReason) -> Errno {
    let limit = resource_limit_code(reason.os_error());
    limit.unwrap_or_else(|| match reason.kind() {
        _ if reason.is_bad_address() => Errno::INVAL,
        _ if reason.is_unreachable() => Errno::CONNREFUSED,
        _ if reason.is_server_full() => Errno::AGAIN,
        CloseReasonKind::TimedOut => Errno::TIMEDOUT,
        CloseReasonKind::PeerFault => Errno::PROTO,
        CloseReasonKind::NotAuthenticated => Errno::KEYREJECTED,
        CloseReasonKind::Peer | CloseReasonKind::Evicted => Errno::CONNRESET,
        _ => Errno::IO,
    })
}

impl From<CallError> for ApiFailure {
    fn from(error: CallError) -> Self {
        Self::new(call_error_code(&error), error)
    }
}

/// The code for a failed call.
pub(crate) fn call_error_code(error: &CallError) -> Errno {
    match error {
        CallError::TimedOut { .. } | CallError::NoCredits { .. } => Errno::TIMEDOUT,
        CallError::Cancelled { .. } => Errno::CANCELED,
        CallError::ConnectionLost { .. } => Errno::CONNRESET,
        CallError::NotAuthenticated => Errno::KEYREJECTED,
        CallError::Closed => Errno::NOTCONN,
        CallError::TooManyCalls { .. } => Errno::AGAIN,
        CallError::NoMemory { .. } | CallError::NoReplyBuffer { .. } => Errno::NOBUFS,
        // EAGAIN is reserved for `TooManyCalls`.
        CallError::OutOfMemory { os_error, .. } => {
            resource_limit_code(*os_error).filter(|code| *code != Errno::AGAIN).unwrap_or(Errno::NOMEM)
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

/// The system's error of this number, if it is about a limit that the caller can raise.
///
/// ENOBUFS, for lack of memory for a socket, becomes ENOMEM, the code for lack of memory for a mapping.
fn resource_limit_code(os_error: Option<i32>) -> Option<Errno> {
    let limits = [Errno::AGAIN, Errno::FBIG, Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOSPC];
    match os_error.map(Errno::from_raw_os_error)? {
        Errno::NOBUFS => Some(Errno::NOMEM),
        code => limits.contains(&code).then_some(code),
    }
}

/// The text of an error with the texts of its causes.
fn text_with_causes(error: &dyn Error) -> String {
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

/// Bytes of the longest text, including its zero byte.
const TEXT_SIZE: usize = 1024;

thread_local! {
    /// Text of the thread's last failure.
    static LAST_TEXT: RefCell<[u8; TEXT_SIZE]> = const { RefCell::new([0; TEXT_SIZE]) };
}

/// Text of the thread's last failure, empty before the first. The next failure overwrites it.
pub(crate) fn last_text() -> *const c_char {
    LAST_TEXT.with(|last| last.as_ptr().cast_const().cast())
}

/// Return type of a function of the interface.
pub(crate) trait ReturnValue: Sized {
    /// The return value after a failure with this negative code.
    fn failed(code: c_int) -> Self;
}

impl ReturnValue for c_int {
    fn failed(code: c_int) -> Self {
        code
    }
}

impl<T> ReturnValue for *mut T {
    fn failed(_: c_int) -> Self {
        null_mut()
    }
}

impl<T> ReturnValue for *const T {
    fn failed(_: c_int) -> Self {
        std::ptr::null()
    }
}

/// Runs the body of a function of the interface, reports its failure, and stops unwinding.
#[inline(always)]
pub(crate) fn entry<T: ReturnValue>(name: &'static str, body: impl FnOnce() -> Result<T, ApiFailure>) -> T {
    match catch_unwind(AssertUnwindSafe(|| process::check_not_forked().and_then(|()| body()))) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => T::failed(failure.report()),
        Err(panic) => T::failed(panicked(name, &*panic)),
    }
}

/// Reports a panic, whose location the panic hook has printed.
#[cold]
#[inline(never)]
fn panicked(name: &str, panic: &(dyn std::any::Any + Send)) -> c_int {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = format!("{name} panicked: {}", text.unwrap_or("(the panic value is not a string)"));
    log::error!("{text}");
    ApiFailure::new(Errno::IO, text).report()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_threads_or_descriptors_has_the_code_of_the_system_call() {
        let code = |errno: Errno| resource_limit_code(Some(errno.raw_os_error()));
        for errno in [Errno::AGAIN, Errno::NOMEM, Errno::FBIG, Errno::MFILE, Errno::NFILE, Errno::NOSPC] {
            assert_eq!(code(errno), Some(errno));
        }
        assert_eq!(code(Errno::NOBUFS), Some(Errno::NOMEM));
        let of_call = |os_error| call_error_code(&CallError::OutOfMemory { answered: false, os_error });
        let number = |errno: Errno| Some(errno.raw_os_error());
        assert_eq!([of_call(None), of_call(number(Errno::AGAIN))], [Errno::NOMEM; 2]);
        assert_eq!(of_call(number(Errno::MFILE)), Errno::MFILE);
        assert_eq!((code(Errno::CONNREFUSED), resource_limit_code(None)), (None, None));
    }
}
