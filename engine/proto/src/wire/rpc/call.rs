//! Call headers, and answers to malformed calls.

use thiserror::Error;

use super::super::xdr::{BadXdr, Decoder, EncodeError, Encoder};
use super::auth::{AuthStat, OpaqueAuth};
use super::reply::{AcceptStat, RejectStat, ReplyBody};
use super::{MessageType, RPC_VERSION};

/// Bytes before the credential.
const FIXED_LEN: usize = 24;

/// Bytes of a call header with AUTH_NONE.
pub const ANONYMOUS_CALL_LEN: usize = FIXED_LEN + 2 * OpaqueAuth::NONE.encoded_len();

/// The header of a call. The arguments follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallHeader<'a> {
    /// Transaction id.
    pub xid: u32,
    /// Program number.
    pub program: u32,
    /// Program version.
    pub version: u32,
    /// Procedure number.
    pub procedure: u32,
    /// The caller's identity.
    pub credential: OpaqueAuth<'a>,
    /// The proof of the credential.
    pub verifier: OpaqueAuth<'a>,
}

/// An RPC message that is not a valid call or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{kind}")]
pub struct RpcError {
    /// The kind of error.
    pub kind: RpcErrorKind,
    /// The message's XID, if the message is long enough.
    pub xid: Option<u32>,
}

/// Kinds of errors in an RPC header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RpcErrorKind {
    /// Not the expected message type, or too short to decide.
    #[error("not an RPC {expected}")]
    NotA {
        /// The expected type.
        expected: MessageType,
    },
    /// A call of another version of RPC.
    #[error("RPC version {rpcvers}")]
    RpcVersion {
        /// `rpcvers`.
        rpcvers: u32,
    },
    /// The credential is truncated or too long.
    #[error("bad credential at byte {at}")]
    Credential {
        /// Offset of its start.
        at: usize,
    },
    /// The verifier is truncated or too long.
    #[error("bad verifier at byte {at}")]
    Verifier {
        /// Offset of its start.
        at: usize,
    },
    /// Any other item that is truncated or invalid.
    #[error("bad {what} at byte {at}")]
    Garbage {
        /// The item.
        what: &'static str,
        /// Offset of its start.
        at: usize,
    },
}

impl From<BadXdr> for RpcErrorKind {
    fn from(BadXdr { what, at }: BadXdr) -> Self {
        RpcErrorKind::Garbage { what, at }
    }
}

impl RpcErrorKind {
    pub(super) fn into_error(self, message: &[u8]) -> RpcError {
        RpcError { kind: self, xid: message.first_chunk().map(|xid| u32::from_be_bytes(*xid)) }
    }
}

impl RpcError {
    /// The reply to a malformed call. `None` if the message is to be dropped.
    pub const fn answer(&self) -> Option<ReplyBody<'static>> {
        Some(match self.kind {
            RpcErrorKind::NotA { .. } => return None,
            RpcErrorKind::RpcVersion { .. } => {
                ReplyBody::Denied(RejectStat::RpcMismatch { low: RPC_VERSION, high: RPC_VERSION })
            }
            RpcErrorKind::Credential { .. } => ReplyBody::Denied(RejectStat::AuthError(AuthStat::BadCred.code())),
            RpcErrorKind::Verifier { .. } => ReplyBody::Denied(RejectStat::AuthError(AuthStat::BadVerf.code())),
            RpcErrorKind::Garbage { .. } => {
                ReplyBody::Accepted { verifier: OpaqueAuth::NONE, stat: AcceptStat::GarbageArgs }
            }
        })
    }
}

/// The words after a call's XID: CALL, RPC version 2.
const CALL_OF_RPC_2: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 2];

impl<'a> CallHeader<'a> {
    /// Reads a header with AUTH_NONE, which has a fixed length. Any other header needs [`parse`](Self::parse).
    #[inline(always)]
    pub fn read_anonymous(message: &[u8]) -> Option<CallHeader<'static>> {
        let header: &[u8; ANONYMOUS_CALL_LEN] = message.first_chunk()?;
        if header[4..12] != CALL_OF_RPC_2 || header[FIXED_LEN..] != [0; ANONYMOUS_CALL_LEN - FIXED_LEN] {
            return None;
        }
        let [xid, program, version, procedure] = [0, 12, 16, 20].map(|at| super::word(header, at));
        Some(CallHeader { xid, program, version, procedure, credential: OpaqueAuth::NONE, verifier: OpaqueAuth::NONE })
    }

    /// Reads the header of a call. Returns also the offset of the arguments.
    #[inline]
    pub fn parse(message: &'a [u8]) -> Result<(CallHeader<'a>, usize), RpcError> {
        if let Some(header) = Self::read_anonymous(message) {
            return Ok((header, ANONYMOUS_CALL_LEN));
        }
        Self::read(message).map_err(|kind| kind.into_error(message))
    }

    /// Reads the header of a call, without the fast path of [`parse`](Self::parse).
    pub(in crate::wire) fn read(message: &'a [u8]) -> Result<(CallHeader<'a>, usize), RpcErrorKind> {
        let not_a_call = RpcErrorKind::NotA { expected: MessageType::Call };
        let mut reader = Decoder::new(message);
        let xid = reader.u32("xid").map_err(|_| not_a_call)?;
        if reader.u32("msg_type").ok() != Some(MessageType::Call.code()) {
            return Err(not_a_call);
        }
        let rpcvers = reader.u32("rpcvers")?;
        if rpcvers != RPC_VERSION {
            return Err(RpcErrorKind::RpcVersion { rpcvers });
        }
        let (program, version, procedure) = (reader.u32("prog")?, reader.u32("vers")?, reader.u32("proc")?);
        let at = reader.at();
        let credential = OpaqueAuth::read(&mut reader, "cred").map_err(|_| RpcErrorKind::Credential { at })?;
        let at = reader.at();
        let verifier = OpaqueAuth::read(&mut reader, "verf").map_err(|_| RpcErrorKind::Verifier { at })?;
        Ok((CallHeader { xid, program, version, procedure, credential, verifier }, reader.at()))
    }

    /// Bytes on the wire.
    pub const fn encoded_len(&self) -> usize {
        FIXED_LEN + self.credential.encoded_len() + self.verifier.encoded_len()
    }

    /// Writes the header to the start of `out` and returns its length.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        let (needed, available) = (self.encoded_len(), out.len());
        let words = [self.xid, MessageType::Call.code(), RPC_VERSION, self.program, self.version, self.procedure];
        match out.split_first_chunk_mut::<FIXED_LEN>() {
            Some((fixed, auth)) if needed <= available => {
                for (bytes, word) in fixed.as_chunks_mut().0.iter_mut().zip(words) {
                    *bytes = word.to_be_bytes();
                }
                let mut writer = Encoder::new(auth);
                self.credential.emit(&mut writer)?;
                self.verifier.emit(&mut writer)?;
                Ok(FIXED_LEN + writer.len())
            }
            _ => Err(EncodeError::new(needed, available)),
        }
    }
}
