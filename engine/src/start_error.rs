//! Errors of starting a server, a client or a shard.

use std::error::Error;
use std::fmt;
use std::io;

use rpcrdma_mempool::{MemError, thread_limits};

use crate::fabric::{FabricError, FabricErrorKind};

/// A server, client or shard did not start.
///
/// The text names the call or knob, the limit, and the remedy. [`source`](Error::source) has the cause, such as the
/// system's error.
#[derive(Debug)]
pub struct StartError {
    kind: StartErrorKind,
    error: Box<dyn Error + Send + Sync>,
}

/// A text, and the error that caused it.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct CausedError {
    text: String,
    source: Box<dyn Error + Send + Sync>,
}

/// Category of a [`StartError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StartErrorKind {
    /// A knob is out of range, or two declarations conflict.
    Config,
    /// Memory is exhausted, limited or not permitted.
    Memory,
    /// The address is in use, invalid or unreachable.
    Address,
    /// The device, or its fabric, lacks a capability.
    Device,
    /// A thread may not run on its core.
    Core,
    /// A system call failed, for instance at a limit on threads.
    System,
    /// Code of the application failed.
    Application,
}

impl StartError {
    /// Wraps an error.
    #[cold]
    pub(crate) fn from_error(kind: StartErrorKind, error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind, error: error.into() }
    }

    /// Error with a text.
    #[cold]
    pub(crate) fn new(kind: StartErrorKind, text: impl fmt::Display) -> Self {
        Self::from_error(kind, text.to_string())
    }

    /// Error of a configuration that contradicts itself.
    #[cold]
    pub(crate) fn conflict(text: impl fmt::Display) -> Self {
        Self::new(StartErrorKind::Config, text)
    }

    /// Error of an option with an invalid value; `expected` has its valid values.
    #[cold]
    pub(crate) fn invalid(option: &str, value: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Self::conflict(format_args!("invalid {option} `{value}`: expected {expected}"))
    }

    /// Adds the error that caused this one.
    #[cold]
    pub(crate) fn caused_by(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::from_error(self.kind, CausedError { text: self.to_string(), source: source.into() })
    }

    /// Error of a thread that could not be started; `what` names the thread.
    #[cold]
    pub(crate) fn thread_not_started(what: impl fmt::Display, source: io::Error) -> Self {
        let text = format_args!("cannot start {what} ({})", thread_limits());
        Self::new(StartErrorKind::System, text).caused_by(source)
    }

    /// Adds the knobs that determine the demand for the missing resource.
    #[cold]
    pub(crate) fn with_knobs(self, knobs: impl fmt::Display) -> Self {
        Self::from_error(self.kind, CausedError { text: format!("{self} ({knobs})"), source: Box::new(self) })
    }

    /// Category of this error.
    pub fn kind(&self) -> StartErrorKind {
        self.kind
    }

    /// Whether another listener has the address.
    #[doc(hidden)]
    pub fn is_address_in_use(&self) -> bool {
        self.inner::<FabricError>().is_some_and(|error| error.kind() == FabricErrorKind::AddressInUse)
    }

    /// Number (`errno`) of the system's error that caused this one, if it is known. For the C interface.
    #[doc(hidden)]
    pub fn os_error(&self) -> Option<i32> {
        let first: &(dyn Error + 'static) = &*self.error;
        let mut causes = std::iter::successors(Some(first), |&cause| cause.source());
        causes.find_map(|cause| {
            let fabric = || cause.downcast_ref::<FabricError>()?.os_error();
            let start = || cause.downcast_ref::<Self>()?.os_error();
            cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error).or_else(fabric).or_else(start)
        })
    }

    /// The inner error, if it has this type.
    pub(crate) fn inner<T: Error + 'static>(&self) -> Option<&T> {
        self.error.downcast_ref()
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl From<MemError> for StartError {
    fn from(error: MemError) -> Self {
        let kind = if error.is_invalid() { StartErrorKind::Config } else { StartErrorKind::Memory };
        Self::from_error(kind, error)
    }
}

impl From<FabricError> for StartError {
    fn from(error: FabricError) -> Self {
        let kind = match error.kind() {
            FabricErrorKind::Address | FabricErrorKind::AddressInUse | FabricErrorKind::Unreachable => {
                StartErrorKind::Address
            }
            FabricErrorKind::System if error.is_out_of_memory() => StartErrorKind::Memory,
            FabricErrorKind::System => StartErrorKind::System,
            _ => StartErrorKind::Device,
        };
        Self::from_error(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::shard::CloseReason;

    #[test]
    fn os_error_is_found_behind_each_layer() {
        let (full, number) = (|| io::Error::from(Errno::MFILE), Errno::MFILE.raw_os_error());
        let fabric = || FabricError::failed("epoll_create", &full());
        assert!(fabric().to_string().contains(" (RLIMIT_NOFILE is "), "{}", fabric());
        assert_eq!(CloseReason::from(fabric()).os_error(), Some(number));
        assert_eq!(StartError::from(fabric().with_setting("stats")).os_error(), Some(number));
        assert_eq!(StartError::thread_not_started("a thread", full()).os_error(), Some(number));
        assert_eq!(StartError::conflict("shards").os_error(), None);
        assert_eq!(StartError::from(fabric()).with_knobs("memory.receives").os_error(), Some(number));
    }

    #[test]
    fn an_error_of_refused_memory_has_kind_memory_and_names_the_knob() {
        let full = |errno: Errno| FabricError::failed("ibv_reg_mr", &errno.into());
        assert_eq!(StartError::from(full(Errno::NOMEM)).kind(), StartErrorKind::Memory);
        assert_eq!(StartError::from(full(Errno::NOBUFS)).kind(), StartErrorKind::Memory);
        assert_eq!(StartError::from(full(Errno::MFILE)).kind(), StartErrorKind::System);
        let error = StartError::from(full(Errno::NOMEM)).with_knobs("8 bytes, memory.receives");
        assert_eq!(error.kind(), StartErrorKind::Memory);
        assert!(error.to_string().starts_with("ibv_reg_mr: "), "{error}");
        assert!(error.to_string().ends_with(" (8 bytes, memory.receives)"), "{error}");
    }
}
