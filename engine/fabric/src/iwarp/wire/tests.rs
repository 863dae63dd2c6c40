//! Property tests of the codec, for all values and for any bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use super::invariants::{self, Event, read};
use super::*;

/// Decodes hexadecimal digits. Blanks are ignored.
pub(super) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn segment() -> impl Strategy<Value = SegmentHeader> {
    let tagged = (any::<bool>(), any::<u32>(), any::<u64>()).prop_map(|(response, stag, offset)| {
        (if response { RdmapOpcode::ReadResponse } else { RdmapOpcode::Write }, PayloadPlace::Tagged { stag, offset })
    });
    let opcode = prop_oneof![
        Just(RdmapOpcode::ReadRequest),
        Just(RdmapOpcode::Terminate),
        (any::<Option<u32>>(), any::<bool>())
            .prop_map(|(invalidate, solicited)| RdmapOpcode::Send { invalidate, solicited }),
    ];
    let untagged = (opcode, any::<(u32, u32, u32)>())
        .prop_map(|(opcode, (queue, msn, offset))| (opcode, PayloadPlace::Untagged { queue, msn, offset }));
    (prop_oneof![tagged, untagged], any::<bool>()).prop_map(|((opcode, place), last)| SegmentHeader {
        opcode,
        last,
        place,
    })
}

fn setup() -> impl Strategy<Value = MpaFrame> {
    let enhanced = (0..=0x3FFFu16, 0..=0x3FFFu16, any::<[bool; 4]>()).prop_map(|(ird, ord, [a, b, c, d])| {
        EnhancedData { ird, ord, peer_to_peer: a, rtr_send: a && b, rtr_write: a && c, rtr_read: a && d }
    });
    let revision = prop_oneof![
        any::<u8>().prop_map(|revision| (revision, None)),
        (2..=u8::MAX, enhanced).prop_map(|(revision, enhanced)| (revision, Some(enhanced))),
    ];
    let private_data = prop_oneof![vec(any::<u8>(), 0..64), vec(any::<u8>(), MAX_PRIVATE_DATA - 4)];
    (any::<[bool; 4]>(), revision, private_data).prop_map(
        |([reply, markers, crc, reject], (revision, enhanced), private_data)| MpaFrame {
            kind: if reply { MpaFrameKind::Reply } else { MpaFrameKind::Request },
            revision,
            markers,
            crc,
            reject: reply && reject,
            enhanced,
            private_data,
        },
    )
}

fn fpdu(segment: &SegmentHeader, payload: &[u8]) -> Vec<u8> {
    let mut out = segment.encode(payload.len()).to_vec();
    out.extend_from_slice(payload);
    out.resize(out.len() + pad(out.len() - 2), 0);
    out.extend_from_slice(&crc32c(&out).to_le_bytes());
    out
}

/// Headers with their payloads.
fn segments() -> impl Strategy<Value = Vec<(SegmentHeader, Vec<u8>)>> {
    vec((segment(), prop_oneof![vec(any::<u8>(), 0..9), vec(any::<u8>(), 0..200)]), 1..6)
}

fn stream(segments: &[(SegmentHeader, Vec<u8>)]) -> Vec<u8> {
    segments.iter().flat_map(|(segment, payload)| fpdu(segment, payload)).collect()
}

fn events(segments: &[(SegmentHeader, Vec<u8>)]) -> Vec<Event> {
    let both = |(segment, payload): &(SegmentHeader, Vec<u8>)| {
        [Event::Segment(*segment, payload.len(), payload.clone()), Event::End]
    };
    segments.iter().flat_map(both).collect()
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    vec(prop_oneof![0..4usize, 0..40usize], 0..200)
}

proptest! {
    #[test]
    fn segment_headers_decode_as_encoded(segment in segment(), payload in 0..=MAX_ULPDU - UNTAGGED_HEADER) {
        let header = segment.encode(payload);
        prop_assert_eq!(SegmentHeader::decode(&header), Ok(Some((segment, payload, header.len()))));
        for len in 0..header.len() {
            prop_assert_eq!(SegmentHeader::decode(&header[..len]), Ok(None));
        }
    }

    #[test]
    fn mpa_frames_decode_as_encoded(setup in setup(), behind in any::<[u8; 3]>()) {
        let mut frame = Vec::new();
        setup.encode(&mut frame);
        invariants::setup(&frame);
        let len = frame.len();
        frame.extend_from_slice(&behind);
        prop_assert_eq!(MpaFrame::decode(setup.kind, &frame), Ok(Some((setup, len))));
    }

    #[test]
    fn read_requests_decode_as_encoded(bytes in any::<[u8; ReadRequest::LEN]>()) {
        prop_assert_eq!(ReadRequest::decode(&bytes).encode(), bytes);
    }

    #[test]
    fn terminates_decode_as_encoded(
        fault in proptest::sample::select(TerminateFault::ALL),
        segment in proptest::option::of(segment()),
        read in any::<Option<[u8; ReadRequest::LEN]>>(),
    ) {
        let (layer, etype, code) = fault.codes();
        prop_assert_eq!(TerminateFault::from_codes(layer, etype, code), Some(fault));
        let segment = segment.map(|segment| segment.encode(99));
        let terminate = Terminate::new(fault, segment.as_deref(), read.as_ref());
        prop_assert_eq!(terminate.fault(), Some(fault));
        let mut bytes = Vec::new();
        terminate.encode(&mut bytes);
        prop_assert_eq!(Terminate::decode(&bytes), Ok(terminate));
        invariants::terminate(&bytes);
    }

    #[test]
    fn valid_streams_are_read_alike_however_they_are_cut(
        segments in segments(), cuts in cuts(), crc: bool, bypass: bool,
    ) {
        let stream = stream(&segments);
        prop_assert_eq!(read(&stream, crc, &cuts, bypass), events(&segments));
        // The stream is also read byte by byte.
        prop_assert_eq!(read(&stream, crc, &vec![1; stream.len()], bypass), events(&segments));
    }

    #[test]
    fn a_stream_cut_inside_an_fpdu_is_not_at_a_boundary(
        segments in segments(), crc: bool, at: proptest::sample::Index,
    ) {
        let stream = stream(&segments);
        let mut input = &stream[..at.index(stream.len())];
        let mut boundaries = vec![0];
        boundaries.extend(segments.iter().scan(0, |end, (segment, payload)| {
            *end += fpdu(segment, payload).len();
            Some(*end)
        }));
        let is_at_boundary = boundaries.contains(&input.len());
        let mut reader = SegmentReader::new(crc);
        while reader.step(&mut input).expect("the stream is valid").is_some() {}
        prop_assert_eq!(reader.is_at_fpdu_boundary(), is_at_boundary);
    }

    #[test]
    fn any_stream_is_read_alike_however_it_is_cut(bytes in vec(any::<u8>(), 0..300), cuts in cuts(), crc: bool) {
        invariants::stream(&bytes, crc, &cuts);
    }

    #[test]
    fn streams_with_a_wrong_byte_are_read_alike_however_they_are_cut(
        segments in segments(), cuts in cuts(), at: proptest::sample::Index, byte: u8,
    ) {
        let mut stream = stream(&segments);
        *at.get_mut(&mut stream) = byte;
        invariants::stream(&stream, false, &cuts);
        invariants::stream(&stream, true, &cuts);
    }

    #[test]
    fn a_flipped_bit_fails_the_crc(
        segments in segments(), at: proptest::sample::Index, bit in 0..8u32, cuts in cuts(),
    ) {
        let right = stream(&segments);
        let mut wrong = right.clone();
        *at.get_mut(&mut wrong) ^= 1 << bit;
        // If the length is wrong, enough bytes follow for an FPDU of maximum length.
        wrong.resize(wrong.len() + fpdu_len(MAX_ULPDU), 0);
        let (found, all) = (read(&wrong, true, &cuts, false), events(&segments));
        let is_found = matches!(found.last(), Some(Event::Error(SegmentError::Crc { .. })));
        prop_assert!(is_found);
        // The reader reports all FPDUs before the wrong one, and nothing of that one.
        let mut end = 0;
        let whole = segments.iter().take_while(|(segment, payload)| {
            end += fpdu(segment, payload).len();
            end <= at.index(right.len())
        });
        let whole = 2 * whole.count();
        prop_assert_eq!(&found[..found.len() - 1], &all[..whole]);
    }

    #[test]
    fn any_bytes_decode_as_an_mpa_frame_or_fail(bytes in vec(any::<u8>(), 0..40), key in 0..3) {
        let front: &[u8] = match key {
            0 => MpaFrameKind::Request.key(),
            1 => MpaFrameKind::Reply.key(),
            _ => &[],
        };
        invariants::setup(&[front, &bytes].concat());
    }

    #[test]
    fn any_bytes_decode_as_a_terminate_or_fail(bytes in vec(any::<u8>(), 0..60)) {
        invariants::terminate(&bytes);
    }
}

#[test]
fn fpdus_are_multiples_of_four() {
    for ulpdu in 0..=MAX_ULPDU {
        assert!(fpdu_len(ulpdu).is_multiple_of(4) && fpdu_len(ulpdu) == 2 + ulpdu + pad(ulpdu) + 4 && pad(ulpdu) < 4);
    }
}

/// With CRCs, the longest FPDU is collected once, in a buffer of its size.
#[test]
fn the_longest_segment_is_read() {
    let place = PayloadPlace::Tagged { stag: 1, offset: 2 };
    let longest = SegmentHeader { opcode: RdmapOpcode::Write, last: false, place };
    let payload: Vec<u8> = (0..MAX_ULPDU - TAGGED_HEADER).map(|at| at as u8).collect();
    let segments = [(longest, payload.clone()), (longest, payload)];
    for crc in [false, true] {
        for cuts in [vec![], vec![7; 20_000], vec![65_536; 2]] {
            assert_eq!(read(&stream(&segments), crc, &cuts, true), events(&segments));
        }
    }
}

/// The payload stays in the input, also with CRCs if the input holds the whole FPDU.
#[test]
fn payloads_are_not_copied() {
    let place = PayloadPlace::Tagged { stag: 1, offset: 2 };
    let stream = fpdu(&SegmentHeader { opcode: RdmapOpcode::Write, last: true, place }, &[7; 100]);
    for crc in [false, true] {
        let (mut reader, mut input) = (SegmentReader::new(crc), &stream[..]);
        assert!(matches!(reader.step(&mut input), Ok(Some(ReaderStep::Segment { len: 100, .. }))));
        let Ok(Some(ReaderStep::Payload(payload))) = reader.step(&mut input) else { panic!("no payload") };
        assert_eq!(payload.as_ptr_range(), stream[16..116].as_ptr_range());
    }
}

/// Bytes that bypass the reader are not taken from the input.
#[test]
fn payloads_can_bypass_the_reader() {
    let place = PayloadPlace::Tagged { stag: 1, offset: 2 };
    let stream = fpdu(&SegmentHeader { opcode: RdmapOpcode::ReadResponse, last: true, place }, &[7; 100]);
    let mut reader = SegmentReader::new(false);
    assert_eq!(reader.payload_left(), 0);
    let mut input = &stream[..20];
    assert!(matches!(reader.step(&mut input), Ok(Some(ReaderStep::Segment { len: 100, .. }))));
    assert_eq!(reader.payload_left(), 100);
    assert_eq!(reader.step(&mut input), Ok(Some(ReaderStep::Payload(&[7; 4]))));
    reader.skip_payload(90);
    assert_eq!(reader.payload_left(), 6);
    assert!(!reader.is_at_fpdu_boundary());
    reader.skip_payload(6);
    assert_eq!(reader.payload_left(), 0);
    let mut input = &stream[116..];
    assert_eq!(reader.step(&mut input), Ok(Some(ReaderStep::End)));
    assert!(reader.is_at_fpdu_boundary() && input.is_empty());
}
