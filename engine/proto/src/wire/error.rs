//! Errors in received headers, and errors of the protocol.

use std::fmt;

use thiserror::Error;

use super::codes::{Flags, HeaderType, Revision, Version};
use super::view::{COMMON_LEN, common_version_range};
use super::word::word;
use super::xdr::{BadXdr, Decoder, EncodeError, Encoder};

/// Bytes of the shortest version 1 call or reply header.
const MIN_V1_LEN: usize = 28;

/// An unusable received header: the error and the fields for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{kind}")]
pub struct WireError {
    /// The kind of error.
    pub kind: WireErrorKind,
    /// The first five words, 0 where truncated: `rdma_xid`, `rdma_vers`, `rdma_credit`, `rdma_htype`, and `rdma_flags`
    /// of version 2 or the first word of the Read list of version 1.
    words: [u32; 5],
    /// The range of an ERR_VERS in the layout of all versions.
    range: Option<(u32, u32)>,
    len: usize,
}

/// Kinds of errors in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireErrorKind {
    /// Shorter than four words, the minimum in every version. Dropped without an answer.
    #[error("header of {len} bytes: expected at least 16")]
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

    /// A responder's error (RFC 8166 §4.5, version 2 §6.4.3). `None` for no answer. `supported` is the version range
    /// for ERR_VERS. Requesters never send errors.
    pub const fn answer(&self, supported: (Version, Version)) -> Option<ErrorBody> {
        match self {
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

impl From<BadXdr> for WireErrorKind {
    fn from(BadXdr { what, at }: BadXdr) -> Self {
        WireErrorKind::BadXdr { what, at }
    }
}

impl WireError {
    /// Records an error in the header at the start of `bytes`.
    pub(super) fn new(kind: WireErrorKind, bytes: &[u8]) -> WireError {
        let words = std::array::from_fn(|at| word(bytes, 4 * at));
        WireError { kind, words, range: common_version_range(bytes), len: bytes.len() }
    }

    /// `rdma_xid`, if the header is long enough for an answer.
    pub fn xid(&self) -> Option<u32> {
        (self.len >= COMMON_LEN).then_some(self.words[0])
    }

    /// `rdma_vers`, if the header is long enough for an answer. An error reply echoes it.
    pub fn vers(&self) -> Option<u32> {
        (self.len >= COMMON_LEN).then_some(self.words[1])
    }

    /// The version of the header, if it is known.
    pub fn version(&self) -> Option<Version> {
        self.vers().and_then(Version::from_code)
    }

    /// The supported versions of a peer of unknown version, which uses the ERR_VERS layout of all versions.
    pub const fn version_range(&self) -> Option<(u32, u32)> {
        self.range
    }

    /// The header type, if version and type are known.
    pub fn htype(&self) -> Option<HeaderType> {
        HeaderType::of_version(self.words[3], self.version()?)
    }

    /// `rdma_credit` of a version 2 message other than an ERROR. Its grant is valid whatever the error is.
    pub fn credit(&self) -> Option<u32> {
        (self.version() == Some(Version::V2) && !self.is_error()).then_some(self.words[2])
    }

    /// Whether the header is an error of any version. Errors are never answered.
    pub fn is_error(&self) -> bool {
        self.vers().is_some() && self.words[3] == HeaderType::Error.code()
    }

    /// Version 1: whether the header has a Read list, as calls do (RFC 8166 §4.3.1), at least in part.
    pub fn has_reads(&self) -> bool {
        let has_lists = matches!(self.htype(), Some(HeaderType::Msg | HeaderType::Nomsg));
        has_lists && self.version() == Some(Version::V1) && self.words[4] == 1
    }

    /// Whether the message is shorter than any call or reply. It is dropped without an answer (RFC 8166 §4.5).
    pub fn is_too_short(&self) -> bool {
        match self.version() {
            Some(Version::V1) => self.len < MIN_V1_LEN,
            _ => self.len < COMMON_LEN,
        }
    }

    /// Whether the header marks a reply or an error. False in version 1, which has no such mark.
    pub fn is_response(&self) -> bool {
        self.version() == Some(Version::V2) && Flags(self.words[4]).contains(Flags::RESPONSE)
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
fn find_row(code: u32, version: Version, revision: Revision) -> Option<usize> {
    // The first match wins, so code 3 of Cel09 is INVAL_HTYPE.
    match (version, revision) {
        (Version::V1, _) => TABLE[..2].iter().position(|row| row.1 == code),
        (Version::V2, Revision::Ietf00) => TABLE.iter().position(|row| row.1 == code),
        (Version::V2, Revision::Cel09) => TABLE.iter().position(|row| row.2 == code),
    }
}

impl ErrorBody {
    /// Row of the table, and the arguments. `None` for unknown codes.
    const fn row_and_arguments(&self) -> Option<(usize, [u32; 2])> {
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
        find_row(code, Version::V2, revision).is_some_and(|row| TABLE[row].3.len() == 1)
    }

    /// The error's name, in the terms of version 2.
    pub const fn name(&self) -> &'static str {
        match self.row_and_arguments() {
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
        match (self, version, self.row_and_arguments()) {
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
        match (self.row_and_arguments(), version) {
            (Some((row, words)), Version::V2) | (Some((row @ 0, words)), Version::V1) => (words, TABLE[row].3.len()),
            _ => ([0, 0], 0),
        }
    }

    /// Bytes of `rdma_err` and its arguments.
    pub fn encoded_len(&self, version: Version) -> usize {
        4 + 4 * self.arguments(version).1
    }

    pub(super) fn emit(&self, out: &mut Encoder<'_>, version: Version, revision: Revision) -> Result<(), EncodeError> {
        out.u32(self.code(version, revision))?;
        let (words, count) = self.arguments(version);
        words[..count].iter().try_for_each(|word| out.u32(*word))
    }

    pub(super) fn read(reader: &mut Decoder<'_>, version: Version, revision: Revision) -> Result<ErrorBody, BadXdr> {
        let code = reader.u32("rdma_err")?;
        let Some(row) = find_row(code, version, revision) else { return Ok(ErrorBody::Unknown(code)) };
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
