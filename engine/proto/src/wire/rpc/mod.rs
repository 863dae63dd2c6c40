//! RPC call and reply headers (RFC 5531 §9), for transport and dispatch.

mod auth;
mod call;
mod reply;

pub use auth::{AuthStat, AuthSys, Flavor, MAX_AUTH_LEN, OpaqueAuth};
pub use call::{ANONYMOUS_CALL_LEN, CallHeader, RpcError, RpcErrorKind};
pub use reply::{
    ACCEPTED_REPLY_LEN, AcceptStat, RejectStat, ReplyBody, ReplyHeader, accepted_reply_room, emit_accepted_success,
};

use std::fmt;

use super::codes::codes;
use super::word::word;

/// The only version of the RPC protocol.
pub const RPC_VERSION: u32 = 2;

/// A program number in its usual notation. Registered numbers, below 0x20000000, are decimal. All others are
/// hexadecimal (RFC 5531 §8.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramNumber(pub u32);

impl fmt::Display for ProgramNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            number @ ..0x2000_0000 => write!(f, "{number}"),
            number => write!(f, "{number:#x}"),
        }
    }
}

codes! {
    /// Whether an RPC message is a call or a reply.
    pub enum MessageType {
        /// A call.
        Call = 0, "CALL";
        /// A reply.
        Reply = 1, "REPLY";
    }
}

/// XID and type of an RPC message. `None` if invalid.
#[inline]
pub fn peek(message: &[u8]) -> Option<(u32, MessageType)> {
    let head: &[u8; 8] = message.first_chunk()?;
    Some((word(head, 0), MessageType::from_code(word(head, 4))?))
}
