//! Invariants of the codec for any bytes, for tests and the fuzz target.

use super::*;

/// An event of a stream, with each payload in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A segment: its header, the length of its payload, and the payload bytes so far.
    Segment(SegmentHeader, usize, Vec<u8>),
    /// The end of the segment.
    End,
    /// An invalid segment, after which the stream cannot be read any further.
    Error(SegmentError),
}

/// Reads a stream in pieces of the lengths `cuts`, then the rest. With `bypass`, payloads bypass the reader where
/// possible. Checks the position in the stream that the reader reports.
pub fn read(stream: &[u8], crc: bool, cuts: &[usize], bypass: bool) -> Vec<Event> {
    let mut reader = SegmentReader::new(crc);
    let mut events = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter();
    loop {
        if bypass && reader.payload_left() > 0 {
            let n = reader.payload_left().min(rest.len());
            append_payload(&mut events, &rest[..n]);
            rest = &rest[n..];
            reader.skip_payload(n);
        }
        let (mut input, following) = rest.split_at(cuts.next().map_or(rest.len(), |cut| *cut.min(&rest.len())));
        let piece = input.len();
        let mut used = 0;
        loop {
            let is_at_fpdu_boundary = matches!(events.last(), None | Some(Event::End));
            assert!(is_at_fpdu_boundary || !reader.is_at_fpdu_boundary(), "{events:?}");
            let step = reader.step(&mut input);
            assert!(piece - input.len() >= used, "the reader only moves forward");
            used = piece - input.len();
            match step {
                Ok(Some(ReaderStep::Segment { segment, len })) => {
                    assert!(is_at_fpdu_boundary, "{events:?}");
                    assert_eq!(SegmentHeader::decode(reader.header()), Ok(Some((segment, len, reader.header().len()))));
                    events.push(Event::Segment(segment, len, Vec::new()));
                }
                Ok(Some(ReaderStep::Payload(bytes))) => {
                    assert!(!bytes.is_empty());
                    append_payload(&mut events, bytes);
                }
                Ok(Some(ReaderStep::End)) => {
                    assert!(matches!(events.last(), Some(Event::Segment(_, len, payload)) if *len == payload.len()));
                    assert!(reader.is_at_fpdu_boundary());
                    events.push(Event::End);
                }
                Ok(None) => {
                    assert!(input.is_empty(), "the reader consumes all input, but {} bytes are left", input.len());
                    break;
                }
                Err(error) => {
                    assert_eq!(reader.step(&mut input).map(|_| ()), Err(error), "a later step reports the same error");
                    events.push(Event::Error(error));
                    return events;
                }
            }
            assert!(!crc || reader.payload_left() == 0);
            if bypass && reader.payload_left() > 0 {
                break;
            }
        }
        rest = &rest[used..];
        if rest.is_empty() && following.is_empty() {
            return events;
        }
    }
}

fn append_payload(events: &mut [Event], bytes: &[u8]) {
    let Some(Event::Segment(_, len, payload)) = events.last_mut() else { panic!("a payload follows its segment") };
    payload.extend_from_slice(bytes);
    assert!(payload.len() <= *len);
}

/// Checks that cuts do not change a stream's events.
///
/// The encoding of a decoded header equals the original bytes, except for reserved bits.
pub fn stream(bytes: &[u8], crc: bool, cuts: &[usize]) {
    let uncut = read(bytes, crc, &[], false);
    for bypass in [false, true] {
        assert_eq!(read(bytes, crc, cuts, bypass), uncut, "cut at {cuts:?}, bypass: {bypass}");
    }
    let mut at = 0;
    for event in uncut {
        if let Event::Segment(segment, len, _) = event {
            let header = segment.encode(len);
            assert_eq!(SegmentHeader::decode(&header), Ok(Some((segment, len, header.len()))));
            let original = &bytes[at..at + header.len()];
            assert_eq!(header[..2], original[..2]);
            assert_eq!(header[2] ^ original[2] & !0x3C, 0, "DDP control bits that are not reserved");
            assert_eq!(header[3] ^ original[3] & !0x30, 0, "RDMAP control bits that are not reserved");
            at += fpdu_len(header.len() - 2 + len);
        }
    }
}

/// Checks that the encoding of a decoded frame decodes to the same frame.
///
/// Bytes after the frame do not matter, and a part of a frame is incomplete.
pub fn setup(bytes: &[u8]) {
    for kind in [MpaFrameKind::Request, MpaFrameKind::Reply] {
        let decoded = MpaFrame::decode(kind, bytes);
        if let Ok(Some((setup, used))) = &decoded {
            let mut encoded = Vec::new();
            setup.encode(&mut encoded);
            assert_eq!(encoded.len(), *used);
            assert_eq!(MpaFrame::decode(kind, &encoded), decoded);
            assert_eq!(MpaFrame::decode(kind, &bytes[..*used]), decoded);
            assert_eq!(MpaFrame::decode(kind, &bytes[..used - 1]), Ok(None));
        }
        if decoded == Ok(None) {
            assert!((0..bytes.len()).all(|len| MpaFrame::decode(kind, &bytes[..len]) == Ok(None)));
        }
    }
}

/// Checks that the encoding of a decoded Terminate decodes to the same Terminate.
///
/// The encoded form has the layout of RFC 5040.
pub fn terminate(bytes: &[u8]) {
    let Ok(terminate) = Terminate::decode(bytes) else { return assert!(bytes.len() < 4) };
    assert!(!terminate.to_string().is_empty());
    let mut encoded = Vec::new();
    terminate.encode(&mut encoded);
    assert!(encoded.len() <= 52);
    // The header control bits show whether the layout is that of RFC 5040 or of soft-iWARP. Without them, an unknown
    // fault may decode differently.
    if terminate.fault().is_some() || !terminate.header.is_empty() {
        assert_eq!(Terminate::decode(&encoded), Ok(terminate));
    }
}
