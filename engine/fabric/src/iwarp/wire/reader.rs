//! Division of a byte stream into segments (RFC 5044 §§4, 6).

use crc32c::crc32c;

use super::segment::{HEADER, LENGTH, SegmentError, SegmentHeader, fpdu_len, trailer_len, whole_header};

/// Splits a connection's input after its [`MpaFrame`](super::MpaFrame) into segments.
///
/// Without CRCs only headers are copied, and a payload may bypass the reader on its way from the socket to its place;
/// see [`payload_left`](Self::payload_left) and [`skip_payload`](Self::skip_payload). With CRCs, the reader checks a
/// whole FPDU before it reports any part of it.
///
/// ```
/// use rpcrdma_fabric::iwarp::wire::{
///     PayloadPlace, QUEUE_SEND, RdmapOpcode, ReaderStep, SegmentError, SegmentHeader, SegmentReader,
/// };
///
/// let opcode = RdmapOpcode::Send { invalidate: None, solicited: false };
/// let place = PayloadPlace::Untagged { queue: QUEUE_SEND, msn: 1, offset: 0 };
/// let send = SegmentHeader { opcode, last: true, place };
/// let mut stream = send.encode(3).to_vec();
/// stream.extend_from_slice(b"abc\0\0\0\0\0"); // One byte of pad, and a CRC field that is not checked.
///
/// let mut reader = SegmentReader::new(false);
/// let mut input = &stream[..];
/// assert_eq!(reader.step(&mut input)?, Some(ReaderStep::Segment { segment: send, len: 3 }));
/// assert_eq!(reader.step(&mut input)?, Some(ReaderStep::Payload(b"abc")));
/// assert_eq!(reader.step(&mut input)?, Some(ReaderStep::End));
/// assert_eq!(reader.step(&mut input)?, None);
/// assert!(reader.is_at_fpdu_boundary());
/// # Ok::<(), SegmentError>(())
/// ```
#[derive(Debug, Default)]
pub struct SegmentReader {
    framer: Framer,
    /// Whether FPDUs have a CRC. Then each FPDU is collected and checked before any part of it is reported.
    crc: bool,
    /// An FPDU that has arrived in parts. Empty if the current FPDU lies in the input.
    collected: Vec<u8>,
    /// Number of reported bytes of `collected`. 0 until it is complete.
    reported: usize,
}

/// A step of reading the stream.
///
/// Each segment yields one [`Segment`](Self::Segment), any number of [`Payload`](Self::Payload)s, and one
/// [`End`](Self::End).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderStep<'a> {
    /// The header of a segment.
    Segment {
        /// The header.
        segment: SegmentHeader,
        /// Bytes of payload.
        len: usize,
    },
    /// The next bytes of the payload, not empty.
    Payload(&'a [u8]),
    /// The end of the segment, after pad and CRC.
    End,
}

impl SegmentReader {
    /// Creates a reader for a stream's start, with or without CRCs.
    pub fn new(crc: bool) -> Self {
        Self { crc, ..Self::default() }
    }

    /// Returns the next step and consumes its bytes from the input.
    ///
    /// `None` if the whole input is consumed. The reader then keeps the part of it that later steps need.
    ///
    /// # Errors
    /// The segment is invalid. The stream cannot be read any further.
    #[inline]
    pub fn step<'a, 'b: 'a>(&'a mut self, input: &mut &'b [u8]) -> Result<Option<ReaderStep<'a>>, SegmentError> {
        if self.crc && self.framer.part == FpduPart::Between && !self.collect_fpdu(input)? {
            return Ok(None);
        }
        if self.collected.is_empty() {
            return self.framer.step(input);
        }
        let mut collected = &self.collected[self.reported..];
        let step = self.framer.step(&mut collected)?;
        self.reported = self.collected.len() - collected.len();
        Ok(step)
    }

    /// Returns whether the next FPDU is complete and correct. It is in `collected` or, if that is empty, at the start
    /// of the input.
    fn collect_fpdu(&mut self, input: &mut &[u8]) -> Result<bool, SegmentError> {
        if self.reported == self.collected.len() {
            self.collected.clear();
            self.reported = 0;
            if let Some(fpdu) = fpdu_len_of(input).and_then(|len| input.get(..len)) {
                return check_crc(fpdu).map(|()| true);
            }
        }
        loop {
            let missing = fpdu_len_of(&self.collected).unwrap_or(LENGTH) - self.collected.len();
            if missing == 0 {
                return check_crc(&self.collected).map(|()| true);
            }
            if input.is_empty() {
                return Ok(false);
            }
            let (part, rest) = input.split_at(missing.min(input.len()));
            self.collected.reserve_exact(missing);
            self.collected.extend_from_slice(part);
            *input = rest;
        }
    }

    /// Bytes of the current payload that may bypass the reader.
    ///
    /// Once the input is consumed, these are all bytes of the payload that are missing. If FPDUs have a CRC, the number
    /// is always 0.
    #[inline]
    pub fn payload_left(&self) -> usize {
        if self.framer.part == FpduPart::Payload && !self.crc { self.framer.remaining } else { 0 }
    }

    /// Counts `n` bytes of the payload that have bypassed the reader.
    ///
    /// # Panics
    /// If the payload has fewer bytes left.
    #[inline]
    pub fn skip_payload(&mut self, n: usize) {
        assert!(n <= self.payload_left(), "{n} bytes of a payload with {} left", self.payload_left());
        self.framer.advance_payload(n);
    }

    /// Length and header of the current segment, as [`Terminate::new`](super::Terminate::new) needs them.
    ///
    /// Both together have 16 or 20 bytes, and stay until bytes of the next segment arrive. After a [`SegmentError`]
    /// they are the length and header of the faulty segment, as far as they have arrived.
    pub fn header(&self) -> &[u8] {
        let header = &self.framer.header[..self.framer.filled];
        whole_header(header).unwrap_or(header)
    }

    /// Whether all FPDUs are complete, so that the stream may end.
    #[inline]
    pub fn is_at_fpdu_boundary(&self) -> bool {
        self.framer.part == FpduPart::Between && self.reported == self.collected.len()
    }
}

/// The framer's position in an FPDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum FpduPart {
    /// Before the first byte of the next FPDU.
    #[default]
    Between,
    /// Length and header.
    Header,
    Payload,
    /// Pad and CRC.
    Trailer,
}

/// Splits a stream into its segments, and checks only their headers.
#[derive(Debug, Default)]
struct Framer {
    /// Length and header. The array may hold bytes beyond a tagged header, which is shorter; these are not consumed
    /// from the input.
    header: [u8; HEADER],
    /// Number of received bytes in `header`.
    filled: usize,
    part: FpduPart,
    /// Remaining bytes of payload or trailer; never 0 within a payload.
    remaining: usize,
    /// Bytes of pad and CRC after the payload.
    trailer: usize,
}

impl Framer {
    #[inline]
    fn step<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<ReaderStep<'b>>, SegmentError> {
        if matches!(self.part, FpduPart::Between | FpduPart::Header) {
            return self.read_header(input);
        }
        let (bytes, rest) = input.split_at(self.remaining.min(input.len()));
        *input = rest;
        if self.part == FpduPart::Payload {
            self.advance_payload(bytes.len());
            return Ok((!bytes.is_empty()).then_some(ReaderStep::Payload(bytes)));
        }
        self.remaining -= bytes.len();
        if self.remaining > 0 {
            return Ok(None);
        }
        self.part = FpduPart::Between;
        Ok(Some(ReaderStep::End))
    }

    /// Reads length and header, which may arrive in parts. Bytes after a tagged header, which is shorter, stay in the
    /// input.
    // Not inlined, so that `step`, which is otherwise short, can be.
    #[inline(never)]
    fn read_header<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<ReaderStep<'b>>, SegmentError> {
        if self.part == FpduPart::Between {
            if input.is_empty() {
                return Ok(None);
            }
            (self.part, self.filled) = (FpduPart::Header, 0);
        }
        let before = self.filled;
        self.filled = HEADER.min(before + input.len());
        self.header[before..self.filled].copy_from_slice(&input[..self.filled - before]);
        let (segment, len, used) = match SegmentHeader::decode(&self.header[..self.filled]) {
            Ok(Some(decoded)) => decoded,
            incomplete_or_invalid => {
                *input = &input[self.filled - before..];
                return incomplete_or_invalid.map(|_| None);
            }
        };
        *input = &input[used - before..];
        (self.part, self.remaining, self.trailer) = (FpduPart::Payload, len, trailer_len(used - LENGTH + len));
        self.advance_payload(0);
        Ok(Some(ReaderStep::Segment { segment, len }))
    }

    /// Counts `n` bytes of the payload as read.
    #[inline]
    fn advance_payload(&mut self, n: usize) {
        self.remaining -= n;
        if self.remaining == 0 {
            (self.part, self.remaining) = (FpduPart::Trailer, self.trailer);
        }
    }
}

/// Length of the FPDU that begins with these bytes. `None` if its length field is incomplete.
fn fpdu_len_of(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk().map(|len| fpdu_len(usize::from(u16::from_be_bytes(*len))))
}

/// Checks the CRC of a complete FPDU.
fn check_crc(fpdu: &[u8]) -> Result<(), SegmentError> {
    let (covered, found) = fpdu.split_last_chunk().expect("an FPDU has a CRC");
    let (found, computed) = (u32::from_le_bytes(*found), crc32c(covered));
    if found == computed { Ok(()) } else { Err(SegmentError::Crc { found, computed }) }
}
