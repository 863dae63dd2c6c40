//! Codec of MPA, DDP and RDMAP (RFC 5044, 6581, 5041, 5040).
//!
//! The codec has no I/O and no clock, and never panics on input.
//!
//! A connection begins with one [`MpaFrame`] in each direction. After it, each direction is a sequence of *FPDUs*, with
//! one DDP segment each:
//!
//! ```text
//!  2 bytes    14 or 18 bytes                                   0 to 3 bytes   4 bytes
//! ┌────────┬──────────────────────────────────────┬─────────┬──────────────┬─────────┐
//! │ length │ header: DDP and RDMAP control, place │ payload │ pad of zeros │ CRC-32C │
//! └────────┴──────────────────────────────────────┴─────────┴──────────────┴─────────┘
//!           └──────────── ULPDU: length bytes ─────────────┘
//! ```
//!
//! [`SegmentHeader::encode`] encodes length and header, and [`pad`] returns the number of zeros after the payload.
//! [`crc32c`](fn@crc32c) covers everything before the CRC, whose least significant byte is sent first (RFC 5044 §4.4).
//! [`SegmentReader`] decodes a byte stream that is cut anywhere. Markers (RFC 5044 §4.3) are neither encoded nor
//! decoded, because an end that does not request them gets none.
//!
//! | file | holds |
//! | --- | --- |
//! | [`mpa`] | the frames that set up a connection |
//! | [`segment`] | length and header of a segment |
//! | [`read_request`] | the body of a Read Request |
//! | [`terminate`] | the body of a Terminate: faults and their codes |
//! | [`reader`] | the division of a byte stream into segments |
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[path = "../../../tests/harness/iwarp_invariants.rs"]
pub mod invariants;
pub mod mpa;
pub mod read_request;
pub mod reader;
pub mod segment;
pub mod terminate;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_golden;

pub use crc32c::crc32c;

pub use self::mpa::{EnhancedData, MAX_PRIVATE_DATA, MpaFrame, MpaFrameError, MpaFrameKind};
pub use self::read_request::ReadRequest;
pub use self::reader::{ReaderStep, SegmentReader};
pub use self::segment::{
    MAX_ULPDU, PayloadPlace, QUEUE_READ_REQUEST, QUEUE_SEND, QUEUE_TERMINATE, RdmapOpcode, SegmentError, SegmentHeader,
    TAGGED_HEADER, UNTAGGED_HEADER, fpdu_len, pad,
};
pub use self::terminate::{Terminate, TerminateError, TerminateFault};
