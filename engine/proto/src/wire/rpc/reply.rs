//! Reply headers of accepted and denied calls.

use std::fmt;

use super::super::xdr::{BadXdr, Decoder, EncodeError, Encoder};
use super::MessageType;
use super::auth::{AuthStat, Flavor, MAX_AUTH_LEN, OpaqueAuth};
use super::call::{RpcError, RpcErrorKind};

/// Bytes of the header of a successful reply with an AUTH_NONE verifier.
pub const ACCEPTED_REPLY_LEN: usize = 24;

/// Maximum bytes of a successful reply's header for a credential flavor. Except for AUTH_NONE and AUTH_SYS, the
/// verifier may have any valid length (RFC 8166 §8.2.2.2).
#[inline]
pub const fn accepted_reply_room(flavor: u32) -> usize {
    let known = flavor == Flavor::None.code() || flavor == Flavor::Sys.code();
    if known { ACCEPTED_REPLY_LEN } else { ACCEPTED_REPLY_LEN + MAX_AUTH_LEN }
}

const MSG_ACCEPTED: u32 = 0;
const MSG_DENIED: u32 = 1;

/// The header of a reply. Results follow it on [`AcceptStat::Success`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader<'a> {
    /// Transaction id of the call.
    pub xid: u32,
    /// The status of the call.
    pub body: ReplyBody<'a>,
}

/// Status of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyBody<'a> {
    /// The call was accepted. It may still have failed.
    Accepted {
        /// The server's verifier.
        verifier: OpaqueAuth<'a>,
        /// The result status.
        stat: AcceptStat,
    },
    /// The call was denied.
    Denied(RejectStat),
}

/// Result status of an accepted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptStat {
    /// Results follow.
    Success,
    /// The program is not available.
    ProgUnavail,
    /// The program has only other versions.
    ProgMismatch {
        /// Lowest version.
        low: u32,
        /// Highest version.
        high: u32,
    },
    /// The procedure is not available.
    ProcUnavail,
    /// The arguments cannot be decoded.
    GarbageArgs,
    /// Any other error of the server.
    SystemErr,
}

/// Reason to deny a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectStat {
    /// The server has another RPC version.
    RpcMismatch {
        /// Lowest version.
        low: u32,
        /// Highest version.
        high: u32,
    },
    /// Authentication failed, or needs another form. The number is an `auth_stat`. [`AuthStat`] names the known ones.
    AuthError(u32),
}

/// One row per `accept_stat`, in the order of the codes.
const ACCEPT_STAT: [&str; 6] =
    ["SUCCESS", "PROG_UNAVAIL", "PROG_MISMATCH", "PROC_UNAVAIL", "GARBAGE_ARGS", "SYSTEM_ERR"];
/// One row per `reject_stat`, in the order of the codes.
const REJECT_STAT: [&str; 2] = ["RPC_MISMATCH", "AUTH_ERROR"];

impl AcceptStat {
    /// `accept_stat`.
    pub const fn code(&self) -> u32 {
        match self {
            AcceptStat::Success => 0,
            AcceptStat::ProgUnavail => 1,
            AcceptStat::ProgMismatch { .. } => 2,
            AcceptStat::ProcUnavail => 3,
            AcceptStat::GarbageArgs => 4,
            AcceptStat::SystemErr => 5,
        }
    }

    /// The name of the status.
    pub const fn name(&self) -> &'static str {
        ACCEPT_STAT[self.code() as usize]
    }
}

impl RejectStat {
    /// `reject_stat`.
    pub const fn code(&self) -> u32 {
        match self {
            RejectStat::RpcMismatch { .. } => 0,
            RejectStat::AuthError(_) => 1,
        }
    }

    /// The name of the reason.
    pub const fn name(&self) -> &'static str {
        REJECT_STAT[self.code() as usize]
    }
}

/// The name and its arguments.
impl fmt::Display for ReplyBody<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ReplyBody::Accepted { stat: stat @ AcceptStat::ProgMismatch { low, high }, .. } => {
                write!(f, "{}({low}..={high})", stat.name())
            }
            ReplyBody::Accepted { stat, .. } => f.write_str(stat.name()),
            ReplyBody::Denied(stat @ RejectStat::RpcMismatch { low, high }) => {
                write!(f, "{}({low}..={high})", stat.name())
            }
            ReplyBody::Denied(stat @ RejectStat::AuthError(code)) => match AuthStat::from_code(code) {
                Some(why) => write!(f, "{}({why})", stat.name()),
                None => write!(f, "{}({code})", stat.name()),
            },
        }
    }
}

impl<'a> ReplyBody<'a> {
    /// Success, with an AUTH_NONE verifier.
    pub const SUCCESS: ReplyBody<'static> = ReplyBody::accepted(AcceptStat::Success);

    /// This status, with an AUTH_NONE verifier.
    pub const fn accepted(stat: AcceptStat) -> ReplyBody<'static> {
        ReplyBody::Accepted { verifier: OpaqueAuth::NONE, stat }
    }

    fn read(reader: &mut Decoder<'a>) -> Result<ReplyBody<'a>, BadXdr> {
        let at = reader.at();
        match reader.u32("reply_stat")? {
            MSG_ACCEPTED => {
                let verifier = OpaqueAuth::read(reader, "verf")?;
                Ok(ReplyBody::Accepted { verifier, stat: read_accept_stat(reader)? })
            }
            MSG_DENIED => Ok(ReplyBody::Denied(read_reject_stat(reader)?)),
            _ => Err(BadXdr { what: "reply_stat", at }),
        }
    }
}

fn read_accept_stat(reader: &mut Decoder<'_>) -> Result<AcceptStat, BadXdr> {
    let at = reader.at();
    Ok(match reader.u32("accept_stat")? {
        0 => AcceptStat::Success,
        1 => AcceptStat::ProgUnavail,
        2 => AcceptStat::ProgMismatch { low: reader.u32("mismatch_info")?, high: reader.u32("mismatch_info")? },
        3 => AcceptStat::ProcUnavail,
        4 => AcceptStat::GarbageArgs,
        5 => AcceptStat::SystemErr,
        _ => return Err(BadXdr { what: "accept_stat", at }),
    })
}

fn read_reject_stat(reader: &mut Decoder<'_>) -> Result<RejectStat, BadXdr> {
    let at = reader.at();
    Ok(match reader.u32("reject_stat")? {
        0 => RejectStat::RpcMismatch { low: reader.u32("mismatch_info")?, high: reader.u32("mismatch_info")? },
        1 => RejectStat::AuthError(reader.u32("auth_stat")?),
        _ => return Err(BadXdr { what: "reject_stat", at }),
    })
}

impl<'a> ReplyHeader<'a> {
    /// Reads the header of a reply. Returns also the offset of the results.
    #[inline]
    pub fn parse(message: &'a [u8]) -> Result<(ReplyHeader<'a>, usize), RpcError> {
        // Fast path for nearly all replies: accepted, AUTH_NONE, success.
        if let Some(head) = message.first_chunk::<ACCEPTED_REPLY_LEN>() {
            let (xid, rest) = head.split_at(4);
            if rest == SUCCESS_TAIL {
                let xid = super::word(xid, 0);
                return Ok((ReplyHeader { xid, body: ReplyBody::SUCCESS }, ACCEPTED_REPLY_LEN));
            }
        }
        Self::read(message).map_err(|kind| kind.into_error(message))
    }

    fn read(message: &'a [u8]) -> Result<(ReplyHeader<'a>, usize), RpcErrorKind> {
        let not_a_reply = RpcErrorKind::NotA { expected: MessageType::Reply };
        let mut reader = Decoder::new(message);
        let xid = reader.u32("xid").map_err(|_| not_a_reply)?;
        if reader.u32("msg_type").ok() != Some(MessageType::Reply.code()) {
            return Err(not_a_reply);
        }
        let body = ReplyBody::read(&mut reader)?;
        Ok((ReplyHeader { xid, body }, reader.at()))
    }

    /// Bytes on the wire.
    pub const fn encoded_len(&self) -> usize {
        match &self.body {
            ReplyBody::Accepted { verifier, stat: AcceptStat::ProgMismatch { .. } } => 24 + verifier.encoded_len(),
            ReplyBody::Accepted { verifier, .. } => 16 + verifier.encoded_len(),
            ReplyBody::Denied(RejectStat::RpcMismatch { .. }) => 24,
            ReplyBody::Denied(RejectStat::AuthError(_)) => 20,
        }
    }

    /// Writes the header to the start of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        let mut writer = Encoder::new(out);
        writer.words([self.xid, MessageType::Reply.code()])?;
        match &self.body {
            ReplyBody::Accepted { verifier, stat } => {
                writer.u32(MSG_ACCEPTED)?;
                verifier.emit(&mut writer)?;
                writer.u32(stat.code())?;
                if let AcceptStat::ProgMismatch { low, high } = stat {
                    writer.words([*low, *high])?;
                }
            }
            ReplyBody::Denied(stat) => {
                writer.words([MSG_DENIED, stat.code()])?;
                match stat {
                    RejectStat::RpcMismatch { low, high } => writer.words([*low, *high])?,
                    RejectStat::AuthError(why) => writer.u32(*why)?,
                }
            }
        }
        Ok(writer.len())
    }
}

/// The words after a successful reply's XID: REPLY, MSG_ACCEPTED, AUTH_NONE of length 0, SUCCESS.
const SUCCESS_TAIL: [u8; ACCEPTED_REPLY_LEN - 4] = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Writes a successful reply header with an AUTH_NONE verifier. It is the fast path of [`ReplyHeader::emit`].
///
/// # Panics
/// If `out` is shorter than [`ACCEPTED_REPLY_LEN`].
#[inline]
pub fn emit_accepted_success(out: &mut [u8], xid: u32) -> usize {
    let (head, tail) = out[..ACCEPTED_REPLY_LEN].split_at_mut(4);
    head.copy_from_slice(&xid.to_be_bytes());
    tail.copy_from_slice(&SUCCESS_TAIL);
    ACCEPTED_REPLY_LEN
}
