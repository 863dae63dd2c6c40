//! Codec properties that hold for all inputs, and helpers for other tests.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::invariants::{self, OwnedView, check_view, compare_heads_with_view};
use super::properties::{Builder, Properties, Property, PropertyId, ReverseSupport, Subset};
use super::*;

/// Bytes of a hex dump: digits in groups, blanks ignored.
pub(super) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// The parts of a header of any type, owned.
#[derive(Clone, Debug)]
struct HeaderParts {
    xid: u32,
    credit: u32,
    received: Option<u32>,
    flags: Flags,
    kind: Kind,
    inv_handle: u32,
    reads: Vec<ReadSegment>,
    writes: Vec<Vec<Segment>>,
    reply: Option<Vec<Segment>>,
    properties: Vec<(u32, Vec<u8>)>,
    payload: Vec<u8>,
}

#[derive(Clone, Debug)]
enum Kind {
    Msg,
    Nomsg,
    Msgp(u32, u32),
    Done,
    Error(ErrorBody),
    Connprop,
    Optional(u32, Vec<u8>),
}

impl HeaderParts {
    /// Drops parts that this version and revision lack.
    fn fit(mut self, version: Version, revision: Revision) -> HeaderParts {
        let has_more = matches!(self.kind, Kind::Msg | Kind::Connprop) && revision == Revision::Ietf00;
        if version == Version::V1 {
            (self.received, self.flags, self.inv_handle) = (None, Flags::NONE, 0);
        } else if !has_more {
            self.flags = self.flags.without(Flags::MORE);
        }
        if self.flags.contains(Flags::MORE) {
            (self.reads, self.writes, self.reply) = (vec![], vec![], None);
        }
        let empty = self.reads.is_empty() && self.writes.is_empty() && self.reply.is_none();
        if version == Version::V1 && empty && matches!(self.kind, Kind::Nomsg) {
            self.reply = Some(vec![]);
        }
        self
    }

    fn with_header<T>(&self, then: impl FnOnce(Header<'_>) -> T) -> T {
        let counts: Vec<_> = self.writes.iter().map(|chunk| chunk.len() as u32).collect();
        let segments = self.writes.concat();
        let mut buffer = [0; 2048];
        let set = self
            .properties
            .iter()
            .try_fold(Builder::new(&mut buffer), |set, (which, data)| set.property(Property { which: *which, data }))
            .expect("space")
            .finish();
        let chunks = Chunks {
            inv_handle: self.inv_handle,
            reads: &self.reads,
            writes: WriteList { counts: &counts, segments: &segments },
            reply: self.reply.as_deref(),
        };
        let body = match &self.kind {
            Kind::Msg => Body::Msg(chunks),
            Kind::Nomsg => Body::Nomsg(chunks),
            Kind::Msgp(align, thresh) => Body::Msgp { align: *align, thresh: *thresh, chunks },
            Kind::Done => Body::Done,
            Kind::Error(error) => Body::Error(*error),
            Kind::Connprop => Body::Connprop(set),
            Kind::Optional(opttype, optinfo) => Body::Optional { opttype: *opttype, optinfo },
        };
        let flags = if self.received.is_some() { self.flags.with(Flags::RECEIVED) } else { self.flags };
        then(Header { xid: self.xid, credit: self.credit, received: self.received, flags, body })
    }

    fn encode(&self, version: Version, revision: Revision) -> Vec<u8> {
        self.with_header(|header| {
            let mut out = vec![0; header.encoded_len(version, revision)];
            assert_eq!(header.emit(&mut out, version, revision), Ok(out.len()));
            out
        })
    }
}

fn segment() -> impl Strategy<Value = Segment> {
    any::<(u32, u32, u64)>().prop_map(|(handle, length, offset)| Segment { handle, length, offset })
}

fn chunk() -> impl Strategy<Value = Vec<Segment>> {
    prop::collection::vec(segment(), 0..4)
}

fn error_body(version: Version, revision: Revision) -> impl Strategy<Value = ErrorBody> {
    (0..11_u32, any::<u32>(), any::<u32>()).prop_map(move |(row, a, b)| match (row, version, revision) {
        (0, ..) => ErrorBody::Vers { low: a, high: b },
        (10, ..) => ErrorBody::Unknown(a | 0x100),
        (_, Version::V1, _) => ErrorBody::BadXdr,
        (1, ..) => ErrorBody::BadXdr,
        (2, ..) | (3, _, Revision::Cel09) => ErrorBody::InvalHtype,
        (3, ..) => ErrorBody::InvalFlag,
        (4, ..) => ErrorBody::ReadChunks { max: a },
        (5, ..) => ErrorBody::WriteChunks { max: a },
        (6, ..) => ErrorBody::Segments { max: a },
        (7, ..) => ErrorBody::WriteResource { chunk_index: a, length_needed: b },
        (8, ..) => ErrorBody::ReplyResource { length_needed: a },
        _ => ErrorBody::System,
    })
}

fn kind(version: Version, revision: Revision) -> BoxedStrategy<Kind> {
    let either = prop_oneof![Just(Kind::Msg), Just(Kind::Nomsg), error_body(version, revision).prop_map(Kind::Error),];
    let opaque = prop::collection::vec(any::<u8>(), 0..40);
    match version {
        Version::V1 => prop_oneof![
            either,
            any::<(u32, u32)>().prop_map(|(align, thresh)| Kind::Msgp(align, thresh)),
            Just(Kind::Done)
        ]
        .boxed(),
        Version::V2 => prop_oneof![
            either,
            Just(Kind::Connprop),
            (0..6_u32, opaque).prop_map(|(opttype, optinfo)| Kind::Optional(opttype, optinfo))
        ]
        .boxed(),
    }
}

fn property() -> impl Strategy<Value = (u32, Vec<u8>)> {
    let word = prop::collection::vec(any::<u8>(), 4);
    prop_oneof![
        (1..=4_u32, word).prop_map(|(which, data)| (which, data)),
        (0..7_u32).prop_map(|which| (which, vec![])),
        (100..u32::MAX - 256, prop::collection::vec(any::<u8>(), 0..9)),
    ]
}

/// A version, a revision, and matching header parts.
fn parts() -> impl Strategy<Value = (Version, Revision, HeaderParts)> {
    let versions = prop::sample::select(Version::ALL);
    let revisions = prop::sample::select(Revision::ALL);
    (versions, revisions).prop_flat_map(|(version, revision)| {
        let words = (any::<u32>(), any::<u32>(), any::<Option<u32>>(), 0..4_u32, any::<u32>());
        let lists = (
            prop::collection::vec(
                (prop_oneof![any::<u32>(), 0..3_u32], segment())
                    .prop_map(|(position, target)| ReadSegment { position, target }),
                0..4,
            ),
            prop::collection::vec(chunk(), 0..4),
            prop::option::of(chunk()),
        );
        // The older document defines property 2 as an enumeration, so random words are invalid there.
        let properties = match revision {
            Revision::Ietf00 => prop::collection::vec(property(), 0..6).boxed(),
            Revision::Cel09 => Just(vec![(1, vec![0, 0, 16, 0]), (2, vec![0, 0, 0, 2]), (3, vec![7])]).boxed(),
        };
        let payload = prop::collection::vec(any::<u8>(), 0..32);
        (words, kind(version, revision), lists, properties, payload).prop_map(
            move |((xid, credit, received, flags, inv_handle), kind, lists, mut properties, payload)| {
                // A known property may not be repeated.
                let mut seen = HashSet::new();
                properties.retain(|(which, _)| *which >= 100 || seen.insert(*which));
                let (reads, writes, reply) = lists;
                let flags = Flags(flags);
                let parts = HeaderParts {
                    xid,
                    credit,
                    received,
                    flags,
                    kind,
                    inv_handle,
                    reads,
                    writes,
                    reply,
                    properties,
                    payload,
                };
                (version, revision, parts.fit(version, revision))
            },
        )
    })
}

/// An independent count for [`View::check_limits`].
fn is_within(view: &View<'_>, limits: &ChunkLimits) -> bool {
    let mut reads = BTreeMap::new();
    view.reads().for_each(|read| *reads.entry(read.position).or_insert(0) += 1);
    let chunks = reads.keys().filter(|&&position| position != 0).count();
    let written: Vec<_> = view.writes().chain(view.reply_chunk()).map(|chunk| chunk.len()).collect();
    chunks <= limits.read_chunks as usize
        && view.writes().count() <= limits.write_chunks as usize
        && reads.into_values().chain(written).all(|count| count <= limits.segments as usize)
}

proptest! {
    /// Limits apply to chunks, wherever their segments are in the list.
    #[test]
    fn limits_hold_for_each_chunk((version, revision, parts) in parts(), segments in 0..4_u32, chunks in 0..3_u32) {
        let header = parts.encode(version, revision);
        let view = View::check(&header, revision).expect("valid");
        let limits = ChunkLimits { read_chunks: chunks, write_chunks: chunks, segments };
        prop_assert_eq!(view.check_limits(&limits).is_ok(), is_within(&view, &limits), "{:?} {}", limits, view);
    }

    /// A value encodes and decodes to the same value, and the payload offset is correct.
    #[test]
    fn an_encoded_value_decodes_to_itself((version, revision, parts) in parts()) {
        let header = parts.encode(version, revision);
        let message = [&header[..], &parts.payload].concat();
        let carries_payload = matches!(parts.kind, Kind::Msg | Kind::Msgp(..));
        let is_part = matches!(parts.kind, Kind::Connprop) && parts.flags.contains(Flags::MORE);
        let whole = match parts.kind {
            _ if carries_payload || is_part || version == Version::V1 => message,
            // With four more bytes, the header could be an ERR_VERS in the layout that all versions share.
            Kind::Error(_) => header.clone(),
            _ => {
                prop_assert_eq!(View::check(&message, revision).is_ok(), parts.payload.is_empty());
                header.clone()
            }
        };
        let view = View::check(&whole, revision).expect("valid");
        prop_assert_eq!(view.version(), version);
        prop_assert_eq!(view.payload_offset(), if is_part { whole.len() } else { header.len() });
        prop_assert_eq!(view.payload(), if carries_payload { &parts.payload[..] } else { &[] });
        parts.with_header(|value| assert_eq!(OwnedView::new(&view).header(), value));
        check_view(&view);
    }

    /// No header is a prefix of another one. The exception is the ERR_VERS of RFC 8166 §7.
    #[test]
    fn strict_prefixes_are_errors((version, revision, parts) in parts()) {
        let header = parts.encode(version, revision);
        for len in 0..header.len() {
            let result = View::check(&header[..len], revision);
            let is_also_err_vers = version == Version::V2
                && matches!(parts.kind, Kind::Error(_)) // an error with two arguments
                && len == ERR_VERS_LEN
                && header[16..20] == [0, 0, 0, 1]
                && header[20..24] <= header[24..28]; // a valid range of versions
            // A CONNPROP in parts is checked only when it is complete.
            let is_part = matches!(parts.kind, Kind::Connprop) && parts.flags.contains(Flags::MORE) && len >= 20;
            if is_part {
                continue;
            }
            prop_assert_eq!(result.is_ok(), is_also_err_vers, "{} of {}", len, header.len());
            if let Err(error) = result {
                prop_assert_eq!(error.xid(), (len >= COMMON_LEN).then_some(parts.xid));
                prop_assert_eq!(error.version(), (len >= COMMON_LEN).then_some(version));
            }
        }
    }

    /// Fast-path decoding agrees with the view in both directions, for valid headers and with one word changed.
    #[test]
    fn fast_path_decoding_agrees_with_views(
        (version, revision, parts) in parts(),
        (xid, credit, received, response) in any::<(u32, u32, Option<u32>, bool)>(),
        payload in prop::collection::vec(prop_oneof![3 => 0..3_u32, 1 => any::<u32>()], 0..5),
        changed in prop::option::of((0..24_usize, prop_oneof![0..3_u32, any::<u32>()])),
        (read, write, handle) in any::<(Option<[u32; 4]>, Option<[u32; 3]>, u32)>(),
    ) {
        compare_heads_with_view(&[parts.encode(version, revision), parts.payload].concat(), revision);
        let flags = if response { Flags::RESPONSE } else { Flags::NONE };
        let segment = |[handle, length, low]: [u32; 3]| Segment { handle, length, offset: u64::from(low) << 7 };
        let read = read.map(|[position, rest @ ..]| ReadSegment { position, target: segment(rest) });
        let (write, counts) = (write.map(segment), [u32::from(write.is_some())]);
        let chunks = Chunks {
            inv_handle: if version == Version::V2 { handle } else { 0 },
            reads: read.as_slice(),
            writes: WriteList { counts: &counts[..counts[0] as usize], segments: write.as_slice() },
            ..Chunks::NONE
        };
        let value = Header { xid, credit, received, flags, body: Body::Msg(chunks) };
        let mut header = [0; 128];
        let len = value.emit(&mut header, version, revision).expect("space");
        let mut message = header[..len].to_vec();
        message.extend(payload.into_iter().flat_map(u32::to_be_bytes));
        compare_heads_with_view(&message, revision);
        if let Some((at, word)) = changed && let Some(place) = message.get_mut(4 * at..4 * at + 4) {
            place.copy_from_slice(&word.to_be_bytes());
            compare_heads_with_view(&message, revision);
        }
    }

    /// [`emit_msg`] and [`emit_windowed`] write the bytes of [`Header::emit`].
    #[test]
    fn fast_path_encoders_agree_with_emit(
        version in prop::sample::select(Version::ALL),
        (xid, credit, received, flags) in any::<(u32, u32, Option<u32>, u32)>(),
    ) {
        let flags = Flags(flags % 4);
        let value = Header { xid, credit, received, flags, body: Body::Msg(Chunks::NONE) };
        let (mut slow, mut fast) = ([0xEE; 64], [0xEE; 64]);
        let len = value.emit(&mut slow, version, Revision::Ietf00).expect("space");
        prop_assert_eq!(len, msg_len(version, received.is_some()));
        prop_assert_eq!(emit_msg(&mut fast, version, xid, credit, received, flags), len);
        prop_assert_eq!(fast, slow);
        if let (Version::V2, Some(received)) = (version, received) {
            let mut windowed = [0xEE; WINDOWED_LEN];
            emit_windowed(&mut windowed, xid, credit, received, flags);
            prop_assert_eq!(&windowed, &slow[..WINDOWED_LEN]);
        }
    }

    /// [`emit_windowed_single`] writes the bytes of [`Header::emit_before`], for one segment outside a Reply chunk.
    #[test]
    fn fast_path_encoder_of_one_segment_agrees_with_emit(
        (xid, credit, received, flags, inv_handle) in any::<(u32, u32, u32, u32, u32)>(),
        reads in prop::collection::vec((any::<u32>(), segment()), 0..3),
        writes in prop::collection::vec(segment(), 0..3),
        end in 0..100_usize,
    ) {
        let reads: Vec<_> = reads.into_iter().map(|(position, target)| ReadSegment { position, target }).collect();
        let counts = [writes.len() as u32];
        let list = WriteList { counts: &counts[..writes.len().min(1)], segments: &writes };
        let chunks = Chunks { inv_handle, reads: &reads, writes: list, reply: None };
        let flags = Flags(flags % 4);
        let value = Header { xid, credit, received: Some(received), flags, body: Body::Msg(chunks) };
        let (mut slow, mut fast) = ([0xEE; 100], [0xEE; 100]);
        let start = value.emit_before(&mut slow, end, Version::V2, Revision::Ietf00);
        let single = emit_windowed_single(&mut fast, end, (xid, credit, received), flags, &chunks);
        if reads.len() + writes.len() == 1 {
            prop_assert_eq!(single, start);
            prop_assert_eq!(fast, slow);
        } else {
            prop_assert_eq!((single, fast), (None, [0xEE; 100]));
        }
    }

    /// Random bytes after a plausible start never cause a panic.
    #[test]
    fn random_bytes_never_panic(
        revision in prop::sample::select(Revision::ALL),
        vers in prop_oneof![1..=2_u32, any::<u32>()],
        htype in prop_oneof![0..6_u32, Just(0xFFFF_FF05), any::<u32>()],
        words in prop::collection::vec(prop_oneof![4 => 0..4_u32, 1 => any::<u32>()], 0..60),
        cut in 0..4_usize,
    ) {
        let all = [1, vers, 2, htype].into_iter().chain(words).flat_map(u32::to_be_bytes);
        let mut message: Vec<u8> = all.collect();
        message.truncate(message.len() - cut);
        invariants::message(&message, revision);
    }

    /// A valid header with one byte changed is an error or another valid header. It never causes a panic.
    #[test]
    fn one_changed_byte_never_panics(
        (version, revision, parts) in parts(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut message = [parts.encode(version, revision), parts.payload].concat();
        let at = at.index(message.len());
        message[at] = byte;
        invariants::message(&message, revision);
    }

    /// Random bytes never cause a panic in the parsers of properties, RPC, AUTH_SYS and private data.
    #[test]
    fn random_bytes_never_panic_in_other_parsers(
        words in prop::collection::vec(prop_oneof![3 => 0..3_u32, 1 => any::<u32>()], 0..40),
    ) {
        let message: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        for revision in Revision::ALL {
            invariants::properties(&message, *revision);
        }
        invariants::rpc_message(&message);
        invariants::auth_sys(&message);
        invariants::connect_message(&message);
    }

    #[test]
    fn a_subset_contains_exactly_its_positions(positions in prop::collection::btree_set(0..128_usize, 0..20)) {
        let mut buffer = [0xEE; 16];
        let subset = Subset::encode(positions.iter().copied(), &mut buffer).expect("space");
        prop_assert!(subset.iter().eq(positions.iter().copied()));
        let words = positions.last().map_or(0, |last| last / 32 + 1);
        prop_assert_eq!(subset.encoded_len(), 4 + 4 * words);
    }

    #[test]
    fn property_values_are_equal_after_encoding_and_decoding_in_each_revision_that_has_them(
        words in any::<[u32; 4]>(),
        reverse in 0..3_u32,
        host_auth in prop::option::of(prop::collection::vec(any::<u8>(), 0..300)),
        offers in any::<[bool; 3]>(),
    ) {
        let mut properties = Properties {
            send_size: words[0],
            receive_size: words[1],
            segment_size: words[2],
            segment_count: words[3],
            reverse_support: ReverseSupport::from_code(reverse),
            host_auth: host_auth.as_deref(),
            windowed_credits: offers[0],
            optional_type: offers[1],
            remote_invalidation: offers[2],
        };
        let mut buffer = [0; 512];
        let set = properties.emit(&mut buffer, Revision::Ietf00).expect("space");
        prop_assert_eq!(Properties::from_set(&set, Revision::Ietf00), Ok(properties));

        let set = properties.emit(&mut buffer, Revision::Cel09).expect("space");
        let default = Properties::default();
        properties.send_size = default.send_size;
        properties.segment_size = default.segment_size;
        properties.segment_count = default.segment_count;
        properties.host_auth = None;
        prop_assert_eq!(Properties::from_set(&set, Revision::Cel09), Ok(properties));
    }
}

/// Each table has unique numbers and names, and lookups find each row.
#[test]
fn tables_are_unambiguous() {
    for revision in Revision::ALL {
        for id in PropertyId::ALL {
            if let Some(which) = id.which(*revision) {
                assert_eq!(PropertyId::of_revision(which, *revision), Some(*id));
            }
        }
    }
    for htype in HeaderType::ALL {
        assert_eq!(HeaderType::from_code(htype.code()), Some(*htype));
        let versions = Version::ALL.iter().filter(|v| HeaderType::of_version(htype.code(), **v).is_some());
        assert!(versions.count() > 0, "{htype} is of some version");
    }
    assert_eq!(PropertyId::of_revision(6, Revision::Cel09), None);
    assert_eq!(Revision::default(), Revision::Ietf00);
}
