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

use rpcrdma::xdr::{BadXdr, NoSpace, Reader, Writer};

/// Program number, from the range that is everybody's own.
pub(crate) const PROGRAM: u32 = 0x2b10_c570;
/// Program version.
pub(crate) const VERSION: u32 = 1;

/// Says what the store is: `()` to [`Info`].
pub(crate) const INFO: u32 = 1;
/// [`ReadArgs`] to [`ReadData`].
pub(crate) const READ: u32 = 2;
/// [`WriteArgs`] to [`Written`].
pub(crate) const WRITE: u32 = 3;
/// Makes all that was written before stable: `()` to `()`.
pub(crate) const FLUSH: u32 = 4;

/// Longest results of any procedure, in bytes.
pub(crate) const MAX_RESULT: usize = 4 + Info::LEN;

/// Why the store did not do what was asked. It did nothing of it then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    OutOfRange = 1,
    TooLong = 2,
    ReadOnly = 3,
    NoSpace = 4,
    IoError = 5,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OutOfRange => "beyond the end of the store",
            Self::TooLong => "longer than the store's longest block",
            Self::ReadOnly => "the store is read-only",
            Self::NoSpace => "no space is left on the server's disk",
            Self::IoError => "input/output error at the server",
        })
    }
}

impl std::error::Error for Status {}

impl Status {
    fn from_code(code: u32) -> Option<Self> {
        [Self::OutOfRange, Self::TooLong, Self::ReadOnly, Self::NoSpace, Self::IoError]
            .into_iter()
            .find(|status| *status as u32 == code)
    }
}

/// What has an XDR encoding of fixed length.
pub(crate) trait Xdr: Sized {
    /// Bytes of the encoding.
    const LEN: usize;
    fn encode(&self, out: &mut Writer<'_>) -> Result<(), NoSpace>;
    fn decode(from: &mut Reader<'_>) -> Result<Self, BadXdr>;
}

impl Xdr for () {
    const LEN: usize = 0;

    fn encode(&self, _: &mut Writer<'_>) -> Result<(), NoSpace> {
        Ok(())
    }

    fn decode(_: &mut Reader<'_>) -> Result<Self, BadXdr> {
        Ok(())
    }
}

/// What the store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Info {
    /// Bytes that it holds; fixed.
    pub(crate) size: u64,
    /// Most bytes of one READ or WRITE.
    pub(crate) block_max: u32,
    pub(crate) writable: bool,
}

impl Xdr for Info {
    const LEN: usize = 16;

    fn encode(&self, out: &mut Writer<'_>) -> Result<(), NoSpace> {
        out.u64(self.size)?;
        out.u32(self.block_max)?;
        out.bool(self.writable)
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, BadXdr> {
        Ok(Self { size: hyper(from, "size")?, block_max: from.u32("block_max")?, writable: from.bool("writable")? })
    }
}

/// Asks for bytes. The call's Write chunk says where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadArgs {
    pub(crate) offset: u64,
    pub(crate) count: u32,
}

impl Xdr for ReadArgs {
    const LEN: usize = 12;

    fn encode(&self, out: &mut Writer<'_>) -> Result<(), NoSpace> {
        out.u64(self.offset)?;
        out.u32(self.count)
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, BadXdr> {
        Ok(Self { offset: hyper(from, "offset")?, count: from.u32("count")? })
    }
}

/// Bytes that were read: fewer than asked for at the end of the store, or where the Write chunk had no more
/// room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadData {
    /// The last byte of the store is among them, or before them.
    pub(crate) eof: bool,
    /// Length of the data, which is in the Write chunk.
    pub(crate) count: u32,
}

impl Xdr for ReadData {
    const LEN: usize = 8;

    fn encode(&self, out: &mut Writer<'_>) -> Result<(), NoSpace> {
        out.bool(self.eof)?;
        out.u32(self.count)
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, BadXdr> {
        Ok(Self { eof: from.bool("eof")?, count: from.u32("data")? })
    }
}

/// Bytes to be written: all of them, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WriteArgs {
    pub(crate) offset: u64,
    /// Length of the data, which is in a Read chunk at [`DATA_AT`](Self::DATA_AT).
    pub(crate) count: u32,
}

impl WriteArgs {
    /// Where the data belongs in the arguments: behind its length.
    pub(crate) const DATA_AT: usize = Self::LEN;
}

impl Xdr for WriteArgs {
    const LEN: usize = 12;

    fn encode(&self, out: &mut Writer<'_>) -> Result<(), NoSpace> {
        out.u64(self.offset)?;
        out.u32(self.count)
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, BadXdr> {
        Ok(Self { offset: hyper(from, "offset")?, count: from.u32("data")? })
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) count: u32,
    /// It outlives a crash of the server's host already. Else FLUSH makes it so.
    pub(crate) stable: bool,
}

impl Xdr for Written {
    const LEN: usize = 8;

    fn encode(&self, out: &mut Writer<'_>) -> Result<(), NoSpace> {
        out.u32(self.count)?;
        out.bool(self.stable)
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, BadXdr> {
        Ok(Self { count: from.u32("count")?, stable: from.bool("stable")? })
    }
}

fn hyper(from: &mut Reader<'_>, what: &'static str) -> Result<u64, BadXdr> {
    Ok(u64::from(from.u32(what)?) << 32 | u64::from(from.u32(what)?))
}

/// Reads arguments; `None` if they are not exactly that.
pub(crate) fn decode_args<T: Xdr>(bytes: &[u8]) -> Option<T> {
    let mut from = Reader::new(bytes);
    T::decode(&mut from).ok().filter(|_| from.rest().is_empty())
}

/// Bytes that a result is encoded in.
pub(crate) fn result_len<T: Xdr>(result: &Result<T, Status>) -> usize {
    4 + if result.is_ok() { T::LEN } else { 0 }
}

/// Writes a result.
pub(crate) fn encode_result<T: Xdr>(result: &Result<T, Status>, out: &mut [u8]) -> Result<(), NoSpace> {
    let mut out = Writer::new(out);
    match result {
        Ok(value) => {
            out.u32(0)?;
            value.encode(&mut out)
        }
        Err(status) => out.u32(*status as u32),
    }
}

/// Reads a result; the outer error says that it is none.
pub(crate) fn decode_result<T: Xdr>(bytes: &[u8]) -> Result<Result<T, Status>, BadXdr> {
    let mut from = Reader::new(bytes);
    match from.u32("status")? {
        0 => T::decode(&mut from).map(Ok),
        code => Status::from_code(code).map(Err).ok_or(BadXdr { what: "status", at: 0 }),
    }
}
