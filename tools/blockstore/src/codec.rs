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
//! Upper-layer binding (RFC 8166 §6): the contents of the two `data` always travel as chunks, their length
//! words always inline. Data of no bytes needs no chunk. Nothing has to be aligned; no data is longer than
//! `block_max`.
#![forbid(unsafe_code)]

use nfs3_types::xdr_codec::{Error, Unpack, XdrCodec};

/// Program number, from the range that is everybody's own.
pub(crate) const PROGRAM: u32 = 0x2b10_c570;
/// Program version.
pub(crate) const VERSION: u32 = 1;

/// Says what the store is: nothing to [`Info`].
pub(crate) const INFO: u32 = 1;
/// [`ReadArgs`] to [`ReadData`].
pub(crate) const READ: u32 = 2;
/// [`WriteArgs`] to [`Written`].
pub(crate) const WRITE: u32 = 3;
/// Makes all that was written before stable: nothing to nothing.
pub(crate) const FLUSH: u32 = 4;

/// Longest results of any procedure, in bytes.
pub(crate) const MAX_RESULT: usize = 20;

/// Why the store did not do what was asked. It did nothing of it then.
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

/// What the store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct Info {
    /// Bytes that it holds; fixed.
    pub(crate) size: u64,
    /// Most bytes of one READ or WRITE.
    pub(crate) block_max: u32,
    pub(crate) writable: bool,
}

/// Asks for bytes. The call's Write chunk says where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct ReadArgs {
    pub(crate) offset: u64,
    pub(crate) count: u32,
}

/// Bytes that were read: fewer than asked for at the end of the store, or where the Write chunk had no more
/// room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct ReadData {
    /// The last byte of the store is among them, or before them.
    pub(crate) eof: bool,
    /// Length of the data, which is in the Write chunk.
    pub(crate) count: u32,
}

/// Bytes to be written: all of them, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct WriteArgs {
    pub(crate) offset: u64,
    /// Length of the data, which is in a Read chunk at [`DATA_AT`](Self::DATA_AT).
    pub(crate) count: u32,
}

impl WriteArgs {
    /// Where the data belongs in the arguments: behind its length.
    pub(crate) const DATA_AT: usize = 12;
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, XdrCodec)]
pub(crate) struct Written {
    pub(crate) count: u32,
    /// It outlives a crash of the server's host already. Else FLUSH makes it so.
    pub(crate) stable: bool,
}

/// Reads arguments; `None` if they are not exactly that.
pub(crate) fn decode_args<T: Unpack>(mut bytes: &[u8]) -> Option<T> {
    let (args, _) = T::unpack(&mut bytes).ok()?;
    bytes.is_empty().then_some(args)
}

/// Reads a result; the outer error says that it is none.
pub(crate) fn decode_result<T: Unpack>(mut bytes: &[u8]) -> Result<Result<T, Status>, Error> {
    match bytes.split_first_chunk() {
        Some(([0, 0, 0, 0], mut value)) => Ok(Ok(T::unpack(&mut value)?.0)),
        _ => Ok(Err(Status::unpack(&mut bytes)?.0)),
    }
}
