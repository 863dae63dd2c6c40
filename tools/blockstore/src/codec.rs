//! The block store's protocol: arguments and results in XDR (RFC 4506), without their bulk data.
//!
//! ```text
//! enum status      { OK = 0, OUT_OF_RANGE = 1, TOO_LONG = 2, READ_ONLY = 3, NO_SPACE = 4, IO_ERROR = 5 };
//! struct info      { unsigned hyper size; unsigned int block_max; bool writable; };
//! struct read_args { unsigned hyper offset; unsigned int count; };
//! struct read_data { bool eof; opaque data<>; };                   /* data: in the call's Write chunk */
//! struct write_args { unsigned hyper offset; opaque data<>; };     /* data: in a Read chunk */
//! struct written   { unsigned int count; bool stable; };
//! union result switch (status) { case OK: the procedure's; default: void; };
//!
//! program BLOCKSTORE { version V1 {
//!     void   NULL(void)        = 0;
//!     result INFO(void)        = 1;    /* info */
//!     result READ(read_args)   = 2;    /* read_data */
//!     result WRITE(write_args) = 3;    /* written */
//!     result FLUSH(void)       = 4;    /* void */
//! } = 1; } = 0x2b10c570;
//! ```
//!
//! Upper-layer binding (RFC 8166 §6): the contents of both `data` always travel as chunks, their length words inline.
//! Empty data needs no chunk. Alignment is free. `block_max` limits the length.
#![forbid(unsafe_code)]

use nfs3_types::xdr_codec::{Error, Unpack, XdrCodec};

/// Program number, from the range for private use.
pub(crate) const PROGRAM: u32 = 0x2b10_c570;
/// Program version.
pub(crate) const VERSION: u32 = 1;

/// Returns [`Info`]; no arguments.
pub(crate) const INFO: u32 = 1;
/// [`ReadArgs`] to [`ReadData`].
pub(crate) const READ: u32 = 2;
/// [`WriteArgs`] to [`Written`].
pub(crate) const WRITE: u32 = 3;
/// Makes earlier writes stable; no arguments, no results.
pub(crate) const FLUSH: u32 = 4;

/// Longest results of any procedure, in bytes.
pub(crate) const MAX_RESULT: usize = 20;

/// Cause of a failure. A failed procedure has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec, thiserror::Error)]
pub(crate) enum Status {
    #[error("beyond the end of the store")]
    OutOfRange = 1,
    #[error("longer than the store's longest block")]
    TooLong = 2,
    #[error("the store is read-only")]
    ReadOnly = 3,
    #[error("no space is left on the server's disk")]
    NoSpace = 4,
    #[error("input/output error at the server")]
    IoError = 5,
}

/// Description of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct Info {
    /// Size in bytes; fixed.
    pub(crate) size: u64,
    /// Limit of one READ or WRITE, in bytes.
    pub(crate) block_max: u32,
    pub(crate) writable: bool,
}

/// Arguments of READ. The data goes to the Write chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct ReadArgs {
    pub(crate) offset: u64,
    pub(crate) count: u32,
}

/// Results of READ: fewer bytes at the end of the store or of the Write chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct ReadData {
    /// The data reaches the end of the store.
    pub(crate) eof: bool,
    /// Length of the data in the Write chunk.
    pub(crate) count: u32,
}

/// Arguments of WRITE: all bytes are written, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct WriteArgs {
    pub(crate) offset: u64,
    /// Length of the data in the Read chunk at [`DATA_AT`](Self::DATA_AT).
    pub(crate) count: u32,
}

impl WriteArgs {
    /// Position of the data in the arguments: behind its length.
    pub(crate) const DATA_AT: usize = 12;
}

/// Results of WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct Written {
    pub(crate) count: u32,
    /// True if the data survives a crash of the host; otherwise it needs a FLUSH.
    pub(crate) stable: bool,
}

/// Decodes exact arguments, or `None`.
pub(crate) fn decode_args<T: Unpack>(mut bytes: &[u8]) -> Option<T> {
    let (args, _) = T::unpack(&mut bytes).ok()?;
    bytes.is_empty().then_some(args)
}

/// Decodes a result. The outer error means undecodable.
pub(crate) fn decode_result<T: Unpack>(mut bytes: &[u8]) -> Result<Result<T, Status>, Error> {
    match bytes.split_first_chunk() {
        Some(([0, 0, 0, 0], mut value)) => Ok(Ok(T::unpack(&mut value)?.0)),
        _ => Ok(Err(Status::unpack(&mut bytes)?.0)),
    }
}
