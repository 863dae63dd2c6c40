//! Optional operations, which change characteristics of a running connection.
//!
//! One header type carries them, [`HeaderType::Optional`](super::HeaderType::Optional), with an operation code
//! (`rdma_opttype`) and an opaque body (`rdma_optinfo`). Codes and bodies follow
//! draft-dnoveck-nfsv4-rpcrdma-xcharext-02 §4. Property identifiers follow the base revision. An endpoint sends
//! operations only to peers that offered [`PropertyId::OptionalType`](super::properties::PropertyId::OptionalType).

use super::codes::codes;
use super::properties::{Property, PropertySet, Subset};
use super::xdr::{BadXdr, Decoder, EncodeError, Encoder};

codes! {
    /// The operation, `rdma_opttype`. A receiver answers an unknown one with INVAL_HTYPE.
    pub enum OperationCode {
        /// The sender's characteristics.
        Initial = 1, "INITXCH";
        /// A request to change characteristics.
        Request = 2, "REQXCH";
        /// The results of a request.
        Respond = 3, "RESPXCH";
        /// A characteristic has changed.
        Update = 4, "UPDXCH";
    }
}

/// An operation with its body. [`Property::check`] and [`Properties::apply`](super::properties::Properties::apply)
/// check the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// The sender's characteristics.
    Initial {
        /// All values.
        start: PropertySet<'a>,
        /// The values of `start` that are not expected to change.
        constant: Subset<'a>,
    },
    /// A request to change characteristics.
    Request {
        /// The requested values.
        want: PropertySet<'a>,
    },
    /// The answer, with the XID of the request. Each requested property is in exactly one subset.
    Respond {
        /// Changed.
        done: Subset<'a>,
        /// Refused.
        rejected: Subset<'a>,
        /// Undecided. Updates follow.
        pending: Subset<'a>,
    },
    /// A change, with or without a request.
    Update {
        /// The new value.
        now: Property<'a>,
        /// Whether this ends a pending request for the characteristic.
        clears_pending: bool,
    },
}

impl<'a> Operation<'a> {
    /// The code for this body.
    pub const fn code(&self) -> OperationCode {
        match self {
            Operation::Initial { .. } => OperationCode::Initial,
            Operation::Request { .. } => OperationCode::Request,
            Operation::Respond { .. } => OperationCode::Respond,
            Operation::Update { .. } => OperationCode::Update,
        }
    }

    /// Reads a body. Trailing bytes are an error.
    pub fn parse(code: OperationCode, optinfo: &'a [u8]) -> Result<Operation<'a>, BadXdr> {
        let mut reader = Decoder::new(optinfo);
        let operation = match code {
            OperationCode::Initial => Operation::Initial {
                start: PropertySet::read(&mut reader)?,
                constant: Subset::read(&mut reader, "optixch_nochg")?,
            },
            OperationCode::Request => Operation::Request { want: PropertySet::read(&mut reader)? },
            OperationCode::Respond => Operation::Respond {
                done: Subset::read(&mut reader, "optrespxch_done")?,
                rejected: Subset::read(&mut reader, "optrespxch_rej")?,
                pending: Subset::read(&mut reader, "optrespxch_pend")?,
            },
            OperationCode::Update => Operation::Update {
                now: Property::read(&mut reader)?,
                clears_pending: reader.bool("optupdxch_pendclr")?,
            },
        };
        match reader.rest() {
            [] => Ok(operation),
            _ => Err(BadXdr { what: "end of rdma_optinfo", at: reader.at() }),
        }
    }

    /// Bytes of the body.
    pub const fn encoded_len(&self) -> usize {
        match self {
            Operation::Initial { start, constant } => start.encoded_len() + constant.encoded_len(),
            Operation::Request { want } => want.encoded_len(),
            Operation::Respond { done, rejected, pending } => {
                done.encoded_len() + rejected.encoded_len() + pending.encoded_len()
            }
            Operation::Update { now, .. } => now.encoded_len() + 4,
        }
    }

    /// Writes the body to the start of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        let mut writer = Encoder::new(out);
        match self {
            Operation::Initial { start, constant } => {
                start.emit(&mut writer)?;
                constant.emit(&mut writer)?;
            }
            Operation::Request { want } => want.emit(&mut writer)?,
            Operation::Respond { done, rejected, pending } => {
                done.emit(&mut writer)?;
                rejected.emit(&mut writer)?;
                pending.emit(&mut writer)?;
            }
            Operation::Update { now, clears_pending } => {
                now.emit(&mut writer)?;
                writer.bool(*clears_pending)?;
            }
        }
        Ok(writer.len())
    }
}
