//! A byte stream cut into its segments (RFC 5044 §§4, 6).

use thiserror::Error;

use super::crc::Crc;
use super::segment::{HEADER, HeaderError, LENGTH, Segment, fpdu_len, trailer, whole_header};
use super::terminate::Fault;

/// Splits a connection's input after its [`Setup`](super::Setup) into segments.
///
/// Without CRC only headers are copied. A payload may bypass the reader, from the socket to its place:
/// [`payload_left`](Self::payload_left), [`take`](Self::take). With a CRC, a whole FPDU is checked before any of it is
/// reported.
///
/// ```
/// use rpcrdma_fabric::iwarp::wire::{Opcode, Place, QUEUE_SEND, Reader, Segment, Step, WireError};
///
/// let opcode = Opcode::Send { invalidate: None, solicited: false };
/// let send = Segment { opcode, last: true, place: Place::Untagged { queue: QUEUE_SEND, msn: 1, offset: 0 } };
/// let mut stream = send.encode(3).to_vec();
/// stream.extend_from_slice(b"abc\0\0\0\0\0"); // With one byte of pad, and a CRC that is not looked at.
///
/// let mut reader = Reader::new(false);
/// let mut input = &stream[..];
/// assert_eq!(reader.step(&mut input)?, Some(Step::Segment { segment: send, len: 3 }));
/// assert_eq!(reader.step(&mut input)?, Some(Step::Payload(b"abc")));
/// assert_eq!(reader.step(&mut input)?, Some(Step::End));
/// assert_eq!(reader.step(&mut input)?, None);
/// assert!(reader.is_between());
/// # Ok::<(), WireError>(())
/// ```
#[derive(Debug)]
pub struct Reader {
    framer: Framer,
    /// With CRC.
    checked: Option<Checked>,
}

/// The next item of the stream. Each segment yields one [`Segment`](Self::Segment), its [`Payload`](Self::Payload)s, if
/// any, and one [`End`](Self::End).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The header of a segment.
    Segment {
        /// The received value.
        segment: Segment,
        /// Bytes of payload.
        len: usize,
    },
    /// The next bytes of its payload; not empty.
    Payload(&'a [u8]),
    /// The end of the segment, with pad and CRC.
    End,
}

/// Errors of a stream. The stream ends with it; the reader must not be used afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// A header, which [`Reader::header`] has.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The CRC of an FPDU.
    #[error("CRC {found:#010x} of an FPDU that has {computed:#010x}")]
    Crc {
        /// The CRC at the FPDU's end.
        found: u32,
        /// The correct value.
        computed: u32,
    },
}

impl WireError {
    /// The Terminate fault for this error.
    pub const fn fault(self) -> Fault {
        match self {
            Self::Header(error) => error.fault(),
            Self::Crc { .. } => Fault::Crc,
        }
    }
}

impl Reader {
    /// A reader at a stream's start, with or without CRCs.
    pub fn new(crc: bool) -> Self {
        Self { framer: Framer::new(), checked: crc.then(Checked::default) }
    }

    /// The next step; consumes its bytes from the input. `None`: the input is consumed, and the needed part of it is
    /// kept.
    #[inline]
    pub fn step<'a, 'b: 'a>(&'a mut self, input: &mut &'b [u8]) -> Result<Option<Step<'a>>, WireError> {
        let Some(checked) = &mut self.checked else { return self.framer.step(input) };
        if self.framer.part == Part::Between && !checked.begin(input)? {
            return Ok(None);
        }
        if checked.kept.is_empty() {
            return self.framer.step(input);
        }
        let mut kept = &checked.kept[checked.told..];
        let step = self.framer.step(&mut kept)?;
        checked.told = checked.kept.len() - kept.len();
        Ok(step)
    }

    /// Bytes of the current payload that may bypass the reader. They are read from the socket to their place: the whole
    /// rest, if the input is consumed.
    #[inline]
    pub fn payload_left(&self) -> usize {
        if self.framer.part == Part::Payload && self.checked.is_none() { self.framer.left } else { 0 }
    }

    /// So many of these were.
    ///
    /// # Panics
    /// If fewer are left.
    #[inline]
    pub fn take(&mut self, n: usize) {
        assert!(n <= self.payload_left(), "{n} bytes of a payload with {} left", self.payload_left());
        self.framer.taken(n);
    }

    /// Length and header of the current segment, 16 or 20 bytes. They suit [`Terminate::new`](super::Terminate::new).
    /// After a [`HeaderError`] those of the faulty segment, as many as arrived. They stay until bytes of the next
    /// segment arrive.
    pub fn header(&self) -> &[u8] {
        let header = &self.framer.header[..self.framer.filled];
        whole_header(header).unwrap_or(header)
    }

    /// Whether the stream may end here: only whole segments, nothing kept.
    #[inline]
    pub fn is_between(&self) -> bool {
        self.framer.part == Part::Between && self.checked.as_ref().is_none_or(Checked::is_told)
    }
}

/// The framer's position in an FPDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Nothing of the next FPDU was seen.
    Between,
    /// Length and header.
    Header,
    Payload,
    /// Pad and CRC.
    Trailer,
}

/// Cuts, and checks nothing but headers.
#[derive(Debug)]
struct Framer {
    /// Length and header. A short header leaves room for later bytes.
    header: [u8; HEADER],
    /// Received bytes of it.
    filled: usize,
    part: Part,
    /// Remaining bytes of payload or trailer; at least one of a payload.
    left: usize,
    /// Bytes of pad and CRC behind the payload.
    trailer: usize,
}

impl Framer {
    const fn new() -> Self {
        Self { header: [0; HEADER], filled: 0, part: Part::Between, left: 0, trailer: 0 }
    }

    #[inline]
    fn step<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Step<'b>>, WireError> {
        match self.part {
            Part::Between | Part::Header => self.head(input),
            Part::Payload => {
                let (payload, rest) = input.split_at(self.left.min(input.len()));
                if payload.is_empty() {
                    return Ok(None);
                }
                *input = rest;
                self.taken(payload.len());
                Ok(Some(Step::Payload(payload)))
            }
            Part::Trailer => {
                let skipped = self.left.min(input.len());
                *input = &input[skipped..];
                self.left -= skipped;
                if self.left > 0 {
                    return Ok(None);
                }
                self.part = Part::Between;
                Ok(Some(Step::End))
            }
        }
    }

    /// Fast path: most headers arrive whole, followed by at least the longest header's bytes. No FPDU is shorter.
    // Not in line: so the other steps, which are short, can be.
    #[inline(never)]
    fn head<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Step<'b>>, WireError> {
        if self.part == Part::Between
            && let Some(header) = input.first_chunk::<HEADER>()
            && let Ok(Some((segment, len, used))) = Segment::decode(header)
        {
            self.header = *header;
            self.filled = HEADER;
            *input = &input[used..];
            return Ok(Some(self.begin(segment, len, used)));
        }
        self.split_head(input)
    }

    /// Handles a header that arrives in parts, or is invalid.
    #[cold]
    fn split_head<'b>(&mut self, input: &mut &'b [u8]) -> Result<Option<Step<'b>>, WireError> {
        if input.is_empty() && self.part == Part::Between {
            return Ok(None);
        }
        let before = if self.part == Part::Between { 0 } else { self.filled };
        self.part = Part::Header;
        self.filled = HEADER.min(before + input.len());
        self.header[before..self.filled].copy_from_slice(&input[..self.filled - before]);
        let decoded = Segment::decode(&self.header[..self.filled]);
        let used = if let Ok(Some((.., used))) = decoded { used } else { self.filled };
        *input = &input[used - before..];
        Ok(decoded?.map(|(segment, len, used)| self.begin(segment, len, used)))
    }

    /// Starts a segment whose header took `used` bytes.
    #[inline]
    fn begin(&mut self, segment: Segment, len: usize, used: usize) -> Step<'static> {
        self.trailer = trailer(used - LENGTH + len);
        (self.part, self.left) = if len > 0 { (Part::Payload, len) } else { (Part::Trailer, self.trailer) };
        Step::Segment { segment, len }
    }

    /// Counts `n` bytes of the payload as taken.
    #[inline]
    fn taken(&mut self, n: usize) {
        self.left -= n;
        if self.left == 0 {
            (self.part, self.left) = (Part::Trailer, self.trailer);
        }
    }
}

/// FPDUs read whole and checked before any report.
#[derive(Debug, Default)]
struct Checked {
    /// The received part of a split FPDU; room for one, once needed.
    kept: Vec<u8>,
    /// Reported bytes of it. None before it is whole.
    told: usize,
}

impl Checked {
    fn is_told(&self) -> bool {
        self.told == self.kept.len()
    }

    /// Whether the next FPDU is complete and correct. It is in `kept`, or if that is empty, at the start of the input.
    fn begin(&mut self, input: &mut &[u8]) -> Result<bool, WireError> {
        if self.is_told() {
            self.kept.clear();
            self.told = 0;
            if let Some(fpdu) = length(input).and_then(|len| input.get(..len)) {
                return check(fpdu).map(|()| true);
            }
        }
        loop {
            let wanted = length(&self.kept).unwrap_or(LENGTH);
            let missing = wanted - self.kept.len();
            if missing == 0 {
                return check(&self.kept).map(|()| true);
            }
            if input.is_empty() {
                return Ok(false);
            }
            let (part, rest) = input.split_at(missing.min(input.len()));
            self.kept.reserve_exact(missing);
            self.kept.extend_from_slice(part);
            *input = rest;
        }
    }
}

/// Bytes of the FPDU that the bytes begin with.
fn length(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk().map(|len| fpdu_len(usize::from(u16::from_be_bytes(*len))))
}

/// Whether the CRC of a whole FPDU is right.
fn check(fpdu: &[u8]) -> Result<(), WireError> {
    let (covered, found) = fpdu.split_last_chunk().expect("an FPDU has a CRC");
    let mut crc = Crc::new();
    crc.update(covered);
    let computed = crc.finish();
    if *found == computed {
        return Ok(());
    }
    Err(WireError::Crc { found: u32::from_le_bytes(*found), computed: u32::from_le_bytes(computed) })
}
