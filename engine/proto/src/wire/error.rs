//! Errors in received headers, and errors of the protocol.

use std::fmt;

use thiserror::Error;

use super::codes::{Flags, HeaderType, Revision, Version};
use super::view::common_version_range;
use super::word::word;
use super::xdr::{BadXdr, Decoder, Encoder, NoSpace};

/// Bytes of the shortest version 1 call or reply header.
const MIN_V1_LEN: usize = 28;

/// An unusable received header: the error and the fields for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{kind}")]
pub struct WireError {
    /// The kind of error.
    pub kind: WireErrorKind,
    /// `rdma_xid`, 0 if truncated.
    pub(super) xid: u32,
    /// `rdma_vers`, 0 if truncated.
    pub(super) vers: u32,
    /// `rdma_flags` of version 2, 0 if truncated.
    flags: u32,
    /// `rdma_credit` and `rdma_htype`, 0 if truncated.
    credit: u32,
    htype: u32,
    /// Version 1: the header has a Read list, at least in part.
    reads: bool,
    /// The range of an ERR_VERS in the layout of all versions.
    range: Option<(u32, u32)>,
    len: usize,
}

/// Kinds of errors in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireErrorKind {
    /// Shorter than four words, the minimum in every version. Dropped without an answer.
    #[error("header of {len} bytes, at least 16 are needed")]
    TooShort {
        /// Bytes received.
        len: usize,
    },
    /// Neither version 1 nor 2.
    #[error("unsupported version {vers}")]
    UnsupportedVersion {
        /// `rdma_vers`.
        vers: u32,
    },
    /// A header type outside this version.
    #[error("invalid header type {htype:#x}")]
    InvalidHtype {
        /// `rdma_htype`.
        htype: u32,
    },
    /// An unknown flag, or one that is invalid for the header type or its lists.
    #[error("invalid flags {flags:#x}")]
    InvalidFlag {
        /// `rdma_flags`.
        flags: u32,
    },
    /// A malformed item.
    #[error("bad {what} at byte {at}")]
    BadXdr {
        /// The item.
        what: &'static str,
        /// Offset of the item in the header, in bytes.
        at: usize,
    },
}

impl WireErrorKind {
    /// A short name for statistics and machine-readable output.
    pub const fn name(&self) -> &'static str {
        match self {
            WireErrorKind::TooShort { .. } => "too_short",
            WireErrorKind::UnsupportedVersion { .. } => "unsupported_version",
            WireErrorKind::InvalidHtype { .. } => "invalid_htype",
            WireErrorKind::InvalidFlag { .. } => "invalid_flag",
            WireErrorKind::BadXdr { .. } => "bad_xdr",
        }
    }
}

impl From<BadXdr> for WireErrorKind {
    fn from(BadXdr { what, at }: BadXdr) -> Self {
        WireErrorKind::BadXdr { what, at }
    }
}

impl WireError {
    /// `rdma_xid`, if the header is long enough for an answer.
    pub const fn xid(&self) -> Option<u32> {
        match self.kind {
            WireErrorKind::TooShort { .. } => None,
            _ => Some(self.xid),
        }
    }

    /// `rdma_vers`, if the header is long enough for an answer. An error reply echoes it.
    pub const fn vers(&self) -> Option<u32> {
        match self.kind {
            WireErrorKind::TooShort { .. } => None,
            _ => Some(self.vers),
        }
    }

    /// Records an error in the header at the start of `bytes`.
    pub(super) fn new(kind: WireErrorKind, bytes: &[u8]) -> WireError {
        let vers = word(bytes, 4);
        let flags = if vers == Version::V2.code() { word(bytes, 16) } else { 0 };
        let htype = word(bytes, 12);
        let lists = [HeaderType::Msg.code(), HeaderType::Nomsg.code()].contains(&htype);
        let reads = vers == Version::V1.code() && lists && word(bytes, 16) == 1;
        let (xid, credit, range, len) = (word(bytes, 0), word(bytes, 8), common_version_range(bytes), bytes.len());
        WireError { kind, xid, vers, flags, credit, htype, reads, range, len }
    }

    /// The supported versions of a peer of unknown version, which uses the ERR_VERS layout of all versions.
    pub const fn version_range(&self) -> Option<(u32, u32)> {
        self.range
    }

    /// `rdma_credit` of a version 2 message other than an error. The grant is valid whatever the error.
    pub const fn credit(&self) -> Option<u32> {
        match self.version() {
            Some(Version::V2) if !self.is_error() => Some(self.credit),
            _ => None,
        }
    }

    /// Whether the header is an error of any version. Errors are never answered.
    pub const fn is_error(&self) -> bool {
        self.vers().is_some() && self.htype == HeaderType::Error.code()
    }

    /// Whether the header is a version 2 CONNPROP.
    pub const fn is_connprop(&self) -> bool {
        matches!(self.version(), Some(Version::V2)) && self.htype == HeaderType::Connprop.code()
    }

    /// Whether the header is a version 2 OPTIONAL with an invalid body.
    pub const fn is_malformed_optional(&self) -> bool {
        matches!((self.version(), self.kind), (Some(Version::V2), WireErrorKind::BadXdr { .. }))
            && self.htype == HeaderType::Optional.code()
    }

    /// Version 1: whether the header has a Read list, as calls do (RFC 8166 §4.3.1).
    pub const fn has_reads(&self) -> bool {
        self.reads
    }

    /// Whether the message is shorter than any call or reply. It is dropped without an answer (RFC 8166 §4.5).
    pub const fn is_too_short(&self) -> bool {
        match self.version() {
            Some(Version::V1) => self.len < MIN_V1_LEN,
            _ => matches!(self.kind, WireErrorKind::TooShort { .. }),
        }
    }

    /// Whether the header marks a reply or an error. False in version 1, which has no such mark.
    pub const fn is_response(&self) -> bool {
        Flags(self.flags).contains(Flags::RESPONSE)
    }

    /// The version of the header, if it is known.
    pub const fn version(&self) -> Option<Version> {
        match self.vers() {
            Some(vers) => Version::from_code(vers),
            None => None,
        }
    }

    /// A responder's error (RFC 8166 §4.5, version 2 §6.4.3). `None` for no answer. `supported` is the version range
    /// for ERR_VERS. Requesters never send errors.
    pub const fn answer(&self, supported: (Version, Version)) -> Option<ErrorBody> {
        match self.kind {
            WireErrorKind::TooShort { .. } => None,
            WireErrorKind::UnsupportedVersion { .. } => {
                Some(ErrorBody::Vers { low: supported.0.code(), high: supported.1.code() })
            }
            WireErrorKind::InvalidHtype { .. } => Some(ErrorBody::InvalHtype),
            WireErrorKind::InvalidFlag { .. } => Some(ErrorBody::InvalFlag),
            WireErrorKind::BadXdr { .. } => Some(ErrorBody::BadXdr),
        }
    }
}

/// The report of an ERROR header. Version 1 has two errors: all except [`ErrorBody::Vers`] are ERR_CHUNK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorBody {
    /// The version is not supported.
    Vers {
        /// Lowest supported version.
        low: u32,
        /// Highest supported version.
        high: u32,
    },
    /// The header is malformed. ERR_CHUNK in version 1.
    BadXdr,
    /// The header type is unknown or not supported.
    InvalHtype,
    /// The flags are unknown or contradictory. Sent as INVAL_HTYPE in [`Revision::Cel09`], which lacks this error.
    InvalFlag,
    /// More Read chunks than the responder supports.
    ReadChunks {
        /// The responder's maximum.
        max: u32,
    },
    /// More Write chunks than the responder supports.
    WriteChunks {
        /// The responder's maximum.
        max: u32,
    },
    /// A chunk with more segments than the responder supports.
    Segments {
        /// The responder's maximum.
        max: u32,
    },
    /// A Write chunk is too small for the result.
    WriteResource {
        /// The first such chunk, counted from 1. 0 if unknown.
        chunk_index: u32,
        /// Bytes needed in the chunk.
        length_needed: u32,
    },
    /// The reply fits neither inline nor into the Reply chunk.
    ReplyResource {
        /// Bytes needed in the Reply chunk.
        length_needed: u32,
    },
    /// Any other failure of the responder. The transaction ends.
    System,
    /// A code unknown to this revision. It still reports an error.
    Unknown(u32),
}

/// One row per error: name, code in [`Revision::Ietf00`], code in [`Revision::Cel09`], arguments.
const TABLE: [(&str, u32, u32, &[&str]); 10] = [
    ("ERR_VERS", 1, 1, &["rdma_vers_low", "rdma_vers_high"]),
    ("ERR_BAD_XDR", 2, 2, &[]),
    ("ERR_INVAL_HTYPE", 3, 3, &[]),
    ("ERR_INVAL_FLAG", 4, 3, &[]),
    ("ERR_READ_CHUNKS", 5, 4, &["rdma_max_chunks"]),
    ("ERR_WRITE_CHUNKS", 6, 5, &["rdma_max_chunks"]),
    ("ERR_SEGMENTS", 7, 6, &["rdma_max_segments"]),
    ("ERR_WRITE_RESOURCE", 8, 7, &["rdma_chunk_index", "rdma_length_needed"]),
    ("ERR_REPLY_RESOURCE", 9, 8, &["rdma_length_needed"]),
    ("ERR_SYSTEM", 10, 9, &[]),
];

/// Row of the error with this code. Version 1 has the first two.
fn row_of(code: u32, version: Version, revision: Revision) -> Option<usize> {
    // The first match wins, so code 3 of Cel09 is INVAL_HTYPE.
    match (version, revision) {
        (Version::V1, _) => TABLE[..2].iter().position(|row| row.1 == code),
        (Version::V2, Revision::Ietf00) => TABLE.iter().position(|row| row.1 == code),
        (Version::V2, Revision::Cel09) => TABLE.iter().position(|row| row.2 == code),
    }
}

impl ErrorBody {
    /// Row of the table, and the arguments. `None` for unknown codes.
    const fn parts(&self) -> Option<(usize, [u32; 2])> {
        Some(match *self {
            ErrorBody::Vers { low, high } => (0, [low, high]),
            ErrorBody::BadXdr => (1, [0, 0]),
            ErrorBody::InvalHtype => (2, [0, 0]),
            ErrorBody::InvalFlag => (3, [0, 0]),
            ErrorBody::ReadChunks { max } => (4, [max, 0]),
            ErrorBody::WriteChunks { max } => (5, [max, 0]),
            ErrorBody::Segments { max } => (6, [max, 0]),
            ErrorBody::WriteResource { chunk_index, length_needed } => (7, [chunk_index, length_needed]),
            ErrorBody::ReplyResource { length_needed } => (8, [length_needed, 0]),
            ErrorBody::System => (9, [0, 0]),
            ErrorBody::Unknown(_) => return None,
        })
    }

    /// Whether the version 2 error with this code has exactly one argument.
    pub(super) fn has_one_argument(code: u32, revision: Revision) -> bool {
        row_of(code, Version::V2, revision).is_some_and(|row| TABLE[row].3.len() == 1)
    }

    /// The error's name, in the terms of version 2.
    pub const fn name(&self) -> &'static str {
        match self.parts() {
            Some((row, _)) => TABLE[row].0,
            None => "ERR_UNKNOWN",
        }
    }

    /// The error's name in this version: in version 1, [`ErrorBody::BadXdr`] is ERR_CHUNK.
    pub const fn name_in(&self, version: Version) -> &'static str {
        match (version, self) {
            (Version::V1, ErrorBody::BadXdr) => "ERR_CHUNK",
            _ => self.name(),
        }
    }

    /// `rdma_err`.
    pub const fn code(&self, version: Version, revision: Revision) -> u32 {
        match (self, version, self.parts()) {
            (ErrorBody::Unknown(code), _, _) => *code,
            (ErrorBody::Vers { .. }, _, _) => 1,
            (_, Version::V1, _) => 2,
            (_, Version::V2, Some((row, _))) => match revision {
                Revision::Ietf00 => TABLE[row].1,
                Revision::Cel09 => TABLE[row].2,
            },
            (_, Version::V2, None) => 0,
        }
    }

    /// The words after the code, and their number. In version 1 only ERR_VERS has any.
    const fn arguments(&self, version: Version) -> ([u32; 2], usize) {
        match (self.parts(), version) {
            (Some((row, words)), Version::V2) | (Some((row @ 0, words)), Version::V1) => (words, TABLE[row].3.len()),
            _ => ([0, 0], 0),
        }
    }

    /// Bytes of `rdma_err` and its arguments.
    pub fn encoded_len(&self, version: Version) -> usize {
        4 + 4 * self.arguments(version).1
    }

    pub(super) fn emit(&self, out: &mut Encoder<'_>, version: Version, revision: Revision) -> Result<(), NoSpace> {
        out.u32(self.code(version, revision))?;
        let (words, count) = self.arguments(version);
        words[..count].iter().try_for_each(|word| out.u32(*word))
    }

    pub(super) fn read(reader: &mut Decoder<'_>, version: Version, revision: Revision) -> Result<ErrorBody, BadXdr> {
        let code = reader.u32("rdma_err")?;
        let Some(row) = row_of(code, version, revision) else { return Ok(ErrorBody::Unknown(code)) };
        let mut words = [0; 2];
        for (word, &what) in words.iter_mut().zip(TABLE[row].3) {
            *word = reader.u32(what)?;
        }
        let [first, second] = words;
        Ok(match row {
            0 => ErrorBody::Vers { low: first, high: second },
            1 => ErrorBody::BadXdr,
            2 => ErrorBody::InvalHtype,
            3 => ErrorBody::InvalFlag,
            4 => ErrorBody::ReadChunks { max: first },
            5 => ErrorBody::WriteChunks { max: first },
            6 => ErrorBody::Segments { max: first },
            7 => ErrorBody::WriteResource { chunk_index: first, length_needed: second },
            8 => ErrorBody::ReplyResource { length_needed: first },
            _ => ErrorBody::System,
        })
    }
}

/// The name and its arguments.
impl fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match *self {
            ErrorBody::Vers { low, high } => write!(f, "({low}..={high})"),
            ErrorBody::ReadChunks { max } | ErrorBody::WriteChunks { max } | ErrorBody::Segments { max } => {
                write!(f, "(max {max})")
            }
            // Counted from 0. Only the wire counts from 1.
            ErrorBody::WriteResource { chunk_index, length_needed } => match chunk_index.checked_sub(1) {
                Some(index) => write!(f, "(Write chunk {index} needs {length_needed} bytes)"),
                None => write!(f, "(a Write chunk needs {length_needed} bytes)"),
            },
            ErrorBody::ReplyResource { length_needed } => write!(f, "(reply needs {length_needed} bytes)"),
            ErrorBody::Unknown(code) => write!(f, "({code})"),
            _ => Ok(()),
        }
    }
}
