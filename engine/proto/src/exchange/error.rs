//! Errors of the peer and of the owner.

use super::{MAX_ANSWERS, MAX_REQUESTED};
use crate::wire::optional::OperationCode;
use crate::wire::properties::PropertyId;
use crate::wire::{BadXdr, ErrorBody};

/// Reason why a received operation was rejected. Nothing of it has taken effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// Not one of the four operations.
    #[error("unknown optional operation {0}")]
    UnknownOperation(u32),
    /// The message, or a known property's value, is invalid XDR.
    #[error(transparent)]
    BadXdr(#[from] BadXdr),
    /// A subset names a property that is not in its set.
    #[error("{0} names a property beyond the end of the set")]
    SubsetTooLong(&'static str),
    /// RESPONSE is set on an operation that is not a response.
    #[error("{} with flag RESPONSE", .0.name())]
    WrongFlag(OperationCode),
    /// More properties than [`MAX_REQUESTED`].
    #[error("request for {0} properties exceeds {MAX_REQUESTED}")]
    TooManyProperties(usize),
    /// More requests than answers can be queued.
    #[error("{MAX_ANSWERS} answers to requests are already queued")]
    TooManyRequests,
    /// An answer without a request.
    #[error("answer without a request, XID {0:#x}")]
    NotRequested(u32),
    /// The answer is unreadable, lacks RESPONSE or does not partition the request. All requested values count as
    /// rejected.
    #[error("malformed answer to a request")]
    BadAnswer,
}

impl ExchangeError {
    /// The error to report (XC §2.1, §4); `None` for answers.
    pub const fn answer(&self) -> Option<ErrorBody> {
        match self {
            ExchangeError::UnknownOperation(_) => Some(ErrorBody::InvalHtype),
            ExchangeError::BadXdr(_) | ExchangeError::SubsetTooLong(_) => Some(ErrorBody::BadXdr),
            ExchangeError::WrongFlag(_) => Some(ErrorBody::InvalFlag),
            ExchangeError::TooManyProperties(_) | ExchangeError::TooManyRequests => Some(ErrorBody::System),
            ExchangeError::NotRequested(_) | ExchangeError::BadAnswer => None,
        }
    }
}

/// Reason why this end may not request or announce a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The peer does not know these operations.
    #[error("the peer does not support changes of characteristics")]
    Unsupported,
    /// The last request is not answered yet.
    #[error("the previous request is unanswered")]
    Busy,
    /// An empty request.
    #[error("empty request")]
    Empty,
    /// A property occurs twice in one request.
    #[error("{0} was requested twice")]
    Twice(PropertyId),
    /// An earlier request for the property is pending.
    #[error("{0} is pending at the peer")]
    Pending(PropertyId),
    /// The property is constant, or the peer has never stated it (version 2 §6.4.4).
    #[error("{0} is constant")]
    Constant(PropertyId),
    /// The peer has no pending request for the property.
    #[error("the peer has no pending request for {0}")]
    NotPending(PropertyId),
    /// This revision of the protocol lacks the property.
    #[error("this revision of version 2 has no property {0}")]
    NotInRevision(PropertyId),
}
