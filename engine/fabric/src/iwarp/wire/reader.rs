//! A byte stream cut into its segments (RFC 5044 §§4, 6).

use crc32c::crc32c;

use super::segment::{HEADER, LENGTH, Segment, SegmentError, fpdu_len, trailer, whole_header};

/// Splits a connection's input after its [`Setup`](super::Setup) into segments.
///
/// Without CRC only headers are copied. A payload may bypass the reader, from the socket to its place:
/// [`payload_left`](Self::payload_left), [`take`](Self::take). With a CRC, a whole FPDU is checked before any of it is
/// reported.
///
/// ```
/// use rpcrdma_fabric::iwarp::wire::{Opcode, Place, QUEUE_SEND, SegmentReader, Segment, SegmentError, Step};
///
/// let opcode = Opcode::Send { invalidate: None, solicited: false };
/// let send = Segment { opcode, last: true, place: Place::Untagged { queue: QUEUE_SEND, msn: 1, offset: 0 } };
/// let mut stream = send.encode(3).to_vec();
/// stream.extend_from_slice(b"abc\0\0\0\0\0"); // With one byte of pad, and a CRC that is not looked at.
///
/// let mut reader = SegmentReader::new(false);
/// let mut input = &stream[..];
/// assert_eq!(reader.step(&mut input)?, Some(Step::Segment { segment: send, len: 3 }));
/// assert_eq!(reader.step(&mut input)?, Some(Step::Payload(b"abc")));
/// assert_eq!(reader.step(&mut input)?, Some(Step::End));
/// assert_eq!(reader.step(&mut input)?, None);
/// assert!(reader.is_between());
/// # Ok::<(), SegmentError>(())
/// ```
#[derive(Debug, Default)]
pub struct SegmentReader {
    framer: Framer,
    /// With CRCs an FPDU is collected and checked before any of it is reported.
    crc: bool,
    /// An FPDU that has arrived in parts. Empty if it lies in the input.
    collected: Vec<u8>,
    /// Its reported bytes. None before it is whole.
    reported: usize,
}

/// The next item of the stream. Each segment yields one [`Segment`](Self::Segment), its [`Payload`](Self::Payload)s, if
/// any, and one [`End`](Self::End).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The header of a segment.
    Segment {
        /// The header.
        segment: Segment,
        /// Bytes of payload.
        len: usize,
    },
    /// The next bytes of its payload; not empty.
    Payload(&'a [u8]),
    /// The end of the segment, with pad and CRC.
    End,
}

impl SegmentReader {
    /// A reader at a stream's start, with or without CRCs.
    pub fn new(crc: bool) -> Self {
        Self { crc, ..Self::default() }
    }

    /// The next step; consumes its bytes from the input. `None`: the input is consumed, and the needed part of it is
    /// kept.
    #[inline]
    pub fn step<'a, 'b: 'a>(&'a mut self, input: &mut &'b [u8]) -> Result<Option<Step<'a>>, SegmentError> {
        if self.crc && self.framer.part == FpduPart::Between && !self.collect(input)? {
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

    /// Whether the next FPDU is whole and correct: in `collected`, or, if that is empty, at the start of the input.
    fn collect(&mut self, input: &mut &[u8]) -> Result<bool, SegmentError> {
        if self.reported == self.collected.len() {
            self.collected.clear();
            self.reported = 0;
            if let Some(fpdu) = fpdu_len_of(input).and_then(|len| input.get(..len)) {
                return check(fpdu);
            }
        }
        loop {
            let missing = fpdu_len_of(&self.collected).unwrap_or(LENGTH) - self.collected.len();
            if missing == 0 {
                return check(&self.collected);
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

    /// Bytes of the current payload that may bypass the reader. They are read from the socket to their place: the whole
    /// rest, if the input is consumed.
    #[inline]
    pub fn payload_left(&self) -> usize {
        if self.framer.part == FpduPart::Payload && !self.crc { self.framer.left } else { 0 }
    }

    /// Counts `n` bytes of the payload as read past the reader.
    ///
    /// # Panics
    /// If fewer are left.
    #[inline]
    pub fn take(&mut self, n: usize) {
        assert!(n <= self.payload_left(), "{n} bytes of a payload with {} left", self.payload_left());
        self.framer.taken(n);
    }

    /// Length and header of the current segment, 16 or 20 bytes. They suit [`Terminate::new`](super::Terminate::new).
    /// After a [`SegmentError`] those of the faulty segment, as many as arrived. They stay until bytes of the next
    /// segment arrive.
    pub fn header(&self) -> &[u8] {
        let header = &self.framer.header[..self.framer.filled];
        whole_header(header).unwrap_or(header)
    }

    /// Whether the stream may end here: only whole segments, nothing kept.
    #[inline]
    pub fn is_between(&self) -> bool {
        self.framer.part == FpduPart::Between && self.reported == self.collected.len()
    }
}

/// The framer's position in an FPDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum FpduPart {
    /// Nothing of the next FPDU was seen.
    #[default]
    Between,
    /// Length and header.
    Header,
    Payload,
    /// Pad and CRC.
    Trailer,
}

/// Splits a stream into its segments, and checks nothing but headers.
#[derive(Debug, Default)]
struct Framer {
    /// Length and header. A short header leaves room for later bytes.
    header: [u8; HEADER],
    /// Received bytes of it.
    filled: usize,
    part: FpduPart,
    /// Remaining bytes of payload or trailer; at least one of a payload.
    left: usize,
    /// Bytes of pad and CRC behind the payload.
    trailer: usize,
}

impl Framer {
    #[inline]
    fn step<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Step<'b>>, SegmentError> {
        if matches!(self.part, FpduPart::Between | FpduPart::Header) {
            return self.read_header(input);
        }
        let (bytes, rest) = input.split_at(self.left.min(input.len()));
        *input = rest;
        if self.part == FpduPart::Payload {
            self.taken(bytes.len());
            return Ok((!bytes.is_empty()).then_some(Step::Payload(bytes)));
        }
        self.left -= bytes.len();
        if self.left > 0 {
            return Ok(None);
        }
        self.part = FpduPart::Between;
        Ok(Some(Step::End))
    }

    /// Reads length and header, which may arrive in parts. The bytes behind a short header are read again.
    // Not in line: so the other steps, which are short, can be.
    #[inline(never)]
    fn read_header<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Step<'b>>, SegmentError> {
        if self.part == FpduPart::Between {
            if input.is_empty() {
                return Ok(None);
            }
            (self.part, self.filled) = (FpduPart::Header, 0);
        }
        let before = self.filled;
        self.filled = HEADER.min(before + input.len());
        self.header[before..self.filled].copy_from_slice(&input[..self.filled - before]);
        let decoded = Segment::decode(&self.header[..self.filled]);
        let used = if let Ok(Some((.., used))) = decoded { used } else { self.filled };
        *input = &input[used - before..];
        let Some((segment, len, used)) = decoded? else { return Ok(None) };
        (self.part, self.left, self.trailer) = (FpduPart::Payload, len, trailer(used - LENGTH + len));
        self.taken(0);
        Ok(Some(Step::Segment { segment, len }))
    }

    /// Counts `n` bytes of the payload as taken.
    #[inline]
    fn taken(&mut self, n: usize) {
        self.left -= n;
        if self.left == 0 {
            (self.part, self.left) = (FpduPart::Trailer, self.trailer);
        }
    }
}

/// Bytes of the FPDU that these bytes begin with.
fn fpdu_len_of(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk().map(|len| fpdu_len(usize::from(u16::from_be_bytes(*len))))
}

/// True, or the error of a whole FPDU's CRC.
fn check(fpdu: &[u8]) -> Result<bool, SegmentError> {
    let (covered, found) = fpdu.split_last_chunk().expect("an FPDU has a CRC");
    let (found, computed) = (u32::from_le_bytes(*found), crc32c(covered));
    if found == computed { Ok(true) } else { Err(SegmentError::Crc { found, computed }) }
}
