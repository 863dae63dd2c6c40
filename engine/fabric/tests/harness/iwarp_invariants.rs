//! Invariants of any wire bytes, for tests and the fuzz target.

use super::*;

/// The events of a stream, each payload in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A segment, and the bytes of its payload that were there.
    Segment(Segment, usize, Vec<u8>),
    /// The end of the segment.
    End,
    /// The stream cannot be read further.
    Error(SegmentError),
}

/// Reads a stream in pieces of the lengths `cuts`, then the rest. With `past`, payloads are read past the reader where
/// possible. Checks the reader's own statements on the way.
pub fn read(stream: &[u8], crc: bool, cuts: &[usize], past: bool) -> Vec<Event> {
    let mut reader = SegmentReader::new(crc);
    let mut events = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter();
    loop {
        if past && reader.payload_left() > 0 {
            let n = reader.payload_left().min(rest.len());
            placed(&mut events, &rest[..n]);
            rest = &rest[n..];
            reader.take(n);
        }
        let (mut input, behind) = rest.split_at(cuts.next().map_or(rest.len(), |cut| *cut.min(&rest.len())));
        let piece = input.len();
        let mut used = 0;
        loop {
            let is_between = matches!(events.last(), None | Some(Event::End));
            assert!(is_between || !reader.is_between(), "{events:?}");
            let step = reader.step(&mut input);
            assert!(piece - input.len() >= used, "nothing comes back");
            used = piece - input.len();
            match step {
                Ok(Some(Step::Segment { segment, len })) => {
                    assert!(is_between, "{events:?}");
                    assert_eq!(Segment::decode(reader.header()), Ok(Some((segment, len, reader.header().len()))));
                    events.push(Event::Segment(segment, len, Vec::new()));
                }
                Ok(Some(Step::Payload(bytes))) => {
                    assert!(!bytes.is_empty());
                    placed(&mut events, bytes);
                }
                Ok(Some(Step::End)) => {
                    assert!(matches!(events.last(), Some(Event::Segment(_, len, payload)) if *len == payload.len()));
                    assert!(reader.is_between());
                    events.push(Event::End);
                }
                Ok(None) => {
                    assert!(input.is_empty(), "{} bytes of the input are left", input.len());
                    break;
                }
                Err(error) => {
                    assert_eq!(reader.step(&mut input).map(|_| ()), Err(error), "and again");
                    events.push(Event::Error(error));
                    return events;
                }
            }
            assert!(!crc || reader.payload_left() == 0);
            if past && reader.payload_left() > 0 {
                break;
            }
        }
        rest = &rest[used..];
        if rest.is_empty() && behind.is_empty() {
            return events;
        }
    }
}

fn placed(events: &mut [Event], bytes: &[u8]) {
    let Some(Event::Segment(_, len, payload)) = events.last_mut() else { panic!("a payload of nothing") };
    payload.extend_from_slice(bytes);
    assert!(payload.len() <= *len);
}

/// Checks that cuts do not change a stream's events. Whole segments encode as they were read, but for reserved bits.
pub fn stream(bytes: &[u8], crc: bool, cuts: &[usize]) {
    let whole = read(bytes, crc, &[], false);
    for past in [false, true] {
        assert_eq!(read(bytes, crc, cuts, past), whole, "cut at {cuts:?}, past the reader: {past}");
    }
    let mut at = 0;
    for event in whole {
        if let Event::Segment(segment, len, _) = event {
            let header = segment.encode(len);
            assert_eq!(Segment::decode(&header), Ok(Some((segment, len, header.len()))));
            let there = &bytes[at..at + header.len()];
            assert_eq!(header[..2], there[..2]);
            assert_eq!(header[2] ^ there[2] & !0x3C, 0, "DDP control");
            assert_eq!(header[3] ^ there[3] & !0x30, 0, "RDMAP control");
            at += fpdu_len(header.len() - 2 + len);
        }
    }
}

/// Checks that a decoded frame encodes and decodes alike. Later bytes do not matter, and a shorter input does not
/// decode better.
pub fn setup(bytes: &[u8]) {
    for kind in [Kind::Request, Kind::Reply] {
        let decoded = Setup::decode(kind, bytes);
        if let Ok(Some((setup, used))) = &decoded {
            let mut again = Vec::new();
            setup.encode(&mut again);
            assert_eq!(again.len(), *used);
            assert_eq!(Setup::decode(kind, &again), decoded);
            assert_eq!(Setup::decode(kind, &bytes[..*used]), decoded);
            assert_eq!(Setup::decode(kind, &bytes[..used - 1]), Ok(None));
        }
        if decoded == Ok(None) {
            assert!((0..bytes.len()).all(|len| Setup::decode(kind, &bytes[..len]) == Ok(None)));
        }
    }
}

/// Checks that a decoded Terminate encodes as in the RFC. It must decode alike.
pub fn terminate(bytes: &[u8]) {
    let Ok(terminate) = Terminate::decode(bytes) else { return assert!(bytes.len() < 4) };
    assert!(!terminate.to_string().is_empty());
    let mut again = Vec::new();
    terminate.encode(&mut again);
    assert!(again.len() <= 52);
    // A nonexistent reason without an indication of the order may be read as reversed.
    if terminate.fault().is_some() || !terminate.header.is_empty() {
        assert_eq!(Terminate::decode(&again), Ok(terminate));
    }
}
