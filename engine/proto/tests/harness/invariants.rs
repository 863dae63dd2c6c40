//! Invariants of the codec for any bytes.
//!
//! Tests apply the invariants to generated messages, and the fuzz targets of `tests/fuzz` apply them to arbitrary
//! bytes. Each function panics on a violation.

use std::fmt::Write as _;

use super::optional::{Operation, OperationCode};
use super::private_data::{self, PrivateData};
use super::properties::{Properties, PropertySet};
use super::rpc::{self, AuthSys, CallHeader, MessageType, OpaqueAuth, ReplyHeader};
use super::*;

/// The length of formatted text.
struct Length(usize);

impl std::fmt::Write for Length {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 += text.len();
        Ok(())
    }
}

/// Checks that the text of a value is not empty.
fn check_text(value: &impl std::fmt::Display) {
    let mut text = Length(0);
    write!(text, "{value}").expect("counting does not fail");
    assert!(text.0 > 0, "the text is not empty");
}

/// Checks a received message. A view encodes to an equal view, and all readers agree with it. The answer to an invalid
/// message is valid.
pub fn message(bytes: &[u8], revision: Revision) {
    compare_heads_with_view(bytes, revision);
    match View::check(bytes, revision) {
        Ok(view) => check_view(&view),
        Err(error) => check_error(bytes, &error, revision),
    }
    if let Ok(view) = View::check_continued(bytes, revision) {
        assert!(view.properties_continued().len() <= bytes.len());
    }
}

/// Checks the printable error and the answer of an invalid message.
fn check_error(bytes: &[u8], error: &WireError, revision: Revision) {
    check_text(error);
    assert_eq!(error.xid().is_some(), bytes.len() >= COMMON_LEN);
    assert!(error.xid().is_some() || error.is_too_short() && error.kind.answer((Version::V1, Version::V2)).is_none());
    if let (Some(xid), Some(version), Some(body)) =
        (error.xid(), error.version(), error.kind.answer((Version::V1, Version::V2)))
    {
        let header = Header { xid, credit: 1, received: None, flags: Flags::RESPONSE, body: Body::Error(body) };
        let mut out = [0; 64];
        let len = header.emit(&mut out, version, revision).expect("space");
        let answer = View::check(&out[..len], revision).expect("the answer is valid");
        assert_eq!((answer.xid(), answer.htype()), (xid, HeaderType::Error));
    }
}

/// The value of a view, with storage for its lists.
#[derive(Debug)]
pub(super) struct OwnedView<'a> {
    view: View<'a>,
    reads: Vec<ReadSegment>,
    counts: Vec<u32>,
    segments: Vec<Segment>,
    reply: Option<Vec<Segment>>,
}

impl<'a> OwnedView<'a> {
    pub(super) fn new(view: &View<'a>) -> Self {
        Self {
            view: *view,
            reads: view.reads().collect(),
            counts: view.writes().map(|chunk| chunk.len() as u32).collect(),
            segments: view.writes().flat_map(|chunk| chunk.segments()).collect(),
            reply: view.reply_chunk().map(|chunk| chunk.segments().collect()),
        }
    }

    pub(super) fn header(&self) -> Header<'_> {
        let view = &self.view;
        let chunks = Chunks {
            inv_handle: view.inv_handle(),
            reads: &self.reads,
            writes: WriteList { counts: &self.counts, segments: &self.segments },
            reply: self.reply.as_deref(),
        };
        let body = match view.body() {
            ViewBody::Msg(()) => Body::Msg(chunks),
            ViewBody::Nomsg(()) => Body::Nomsg(chunks),
            ViewBody::Msgp { align, thresh, .. } => Body::Msgp { align, thresh, chunks },
            ViewBody::Done => Body::Done,
            ViewBody::Error(error) => Body::Error(error),
            ViewBody::Connprop(properties) => Body::Connprop(properties),
            ViewBody::Optional { opttype, optinfo } => Body::Optional { opttype, optinfo },
        };
        let (xid, credit) = (view.xid(), view.credit());
        Header { xid, credit, received: view.received(), flags: view.flags(), body }
    }
}

/// Calls every accessor and encodes the view's values.
pub(super) fn check_view(view: &View<'_>) {
    let (version, revision) = (view.version(), view.revision());
    assert!(view.payload_offset() <= view.bytes().len());
    let writes = view.writes().next().is_some() || view.reply_chunk().is_some();
    assert_eq!(view.has_chunks(), view.reads().next().is_some() || writes);
    let _ = view.check_limits(&ChunkLimits { read_chunks: 2, write_chunks: 2, segments: 2 });
    check_text(view);
    if view.flags().contains(Flags::MORE) && view.htype() == HeaderType::Connprop {
        // A part of a set is checked only when the set is complete.
        return;
    }
    if let ViewBody::Connprop(set) = view.body() {
        check_property_set(&set, revision);
    }
    let owned = OwnedView::new(view);
    let header = owned.header();
    // An ERR_VERS in the common layout has no flags. Our encoding has flags.
    if view.payload_offset() == header.encoded_len(version, revision) {
        let mut out = vec![0; view.payload_offset()];
        header.emit(&mut out, version, revision).expect("space");
        let again = View::check(&out, revision).expect("still valid");
        assert_eq!(OwnedView::new(&again).header(), header);
    } else {
        assert_eq!((view.htype(), version, view.payload_offset()), (HeaderType::Error, Version::V2, ERR_VERS_LEN));
    }
}

/// Compares the fields that each layout reads from a message with those of the view.
pub(super) fn compare_heads_with_view(message: &[u8], revision: Revision) {
    let view = View::check(message, revision);
    for layout in [HeadLayout::V1, HeadLayout::V2, HeadLayout::V2Windowed] {
        let version = if layout == HeadLayout::V1 { Version::V1 } else { Version::V2 };
        let expected = view.as_ref().ok().filter(|view| {
            view.version() == version
                && view.htype() == HeaderType::Msg
                && !view.has_chunks()
                && view.flags().without(Flags::RESPONSE) == layout.flags()
        });
        let msg_type = expected.and_then(|view| view.payload().get(4..8)).map(|word| word == [0, 0, 0, 1]);
        let expected = expected.filter(|view| {
            let start = view.payload().get(4..8);
            version == Version::V2 || start.is_some_and(|word| word[..3] == [0; 3] && word[3] < 2)
        });
        let read = layout.read(message);
        let without_chunks = read.filter(|(_, chunks)| chunks.are_absent());
        let head = without_chunks.map(|(head, _)| head);
        if layout == HeadLayout::V2Windowed {
            let direction = Head::windowed_direction(message);
            assert_eq!(direction.map(|response| Head::from_windowed(message, response)), head);
        }
        assert_eq!(head.is_some(), expected.is_some(), "{layout:?} {message:?}");
        if let (Some(head), Some(view)) = (head, expected) {
            let response = match version {
                Version::V1 => msg_type == Some(true),
                Version::V2 => view.flags().contains(Flags::RESPONSE),
            };
            // Without chunks, a handle is meaningless.
            let expected = (view.xid(), view.credit(), view.received(), 0);
            assert_eq!((head.xid, head.credit, head.received, head.inv_handle), expected);
            assert_eq!((head.response, head.len), (response, view.payload_offset()));
        }
        compare_chunks_with_view(message, layout, view.as_ref().ok().filter(|view| view.version() == version));
    }
}

/// Compares the fields that a layout reads from a message with chunks with those of the view.
fn compare_chunks_with_view(message: &[u8], layout: HeadLayout, view: Option<&View<'_>>) {
    let response = |view: &View<'_>| match layout {
        HeadLayout::V1 => view.payload().get(4..8) == Some(&[0, 0, 0, 1]),
        _ => view.flags().contains(Flags::RESPONSE),
    };
    let expected = view.filter(|view| {
        let mut writes = view.writes();
        let is_call = match layout {
            HeadLayout::V1 => view.payload().get(4..8) == Some(&[0; 4]),
            _ => view.flags() == layout.flags(),
        };
        let is_reply = response(view) && view.flags().without(Flags::RESPONSE) == layout.flags();
        (is_call || is_reply)
            && view.htype() == HeaderType::Msg
            && view.has_chunks()
            && view.reads().count() <= 1
            && writes.next().is_none_or(|chunk| chunk.len() == 1)
            && writes.next().is_none()
            && view.reply_chunk().is_none()
    });
    let read = layout.read(message).filter(|(_, chunks)| !chunks.are_absent());
    assert_eq!(read.is_some(), expected.is_some(), "{layout:?} {message:?}");
    if let (Some((head, chunks)), Some(view)) = (read, expected) {
        let expected = (view.xid(), view.credit(), view.received(), view.inv_handle());
        assert_eq!((head.xid, head.credit, head.received, head.inv_handle), expected);
        assert_eq!((head.response, head.len), (response(view), view.payload_offset()));
        assert_eq!((chunks.has_read(), chunks.read(message)), (view.reads().next().is_some(), view.reads().next()));
        assert_eq!(chunks.write(message), view.writes().next().and_then(|chunk| chunk.segments().next()));
    }
}

/// Checks the body of a CONNPROP or of a characteristics operation. A valid body encodes to an equal body.
pub fn properties(bytes: &[u8], revision: Revision) {
    if let Ok(set) = PropertySet::parse(bytes, revision) {
        check_property_set(&set, revision);
    }
    for code in OperationCode::ALL {
        let Ok(operation) = Operation::parse(*code, bytes) else { continue };
        let mut out = vec![0; operation.encoded_len()];
        assert_eq!(operation.emit(&mut out), Ok(bytes.len()));
        assert_eq!(Operation::parse(*code, &out), Ok(operation));
        if let Operation::Initial { start: set, constant: subset } = operation {
            assert_eq!(set.iter().count(), set.len());
            assert!(subset.iter().all(|position| subset.contains(position)));
        }
    }
}

/// Checks a valid set.
fn check_property_set(set: &PropertySet<'_>, revision: Revision) {
    assert_eq!(set.iter().count(), set.len());
    assert_eq!(set.iter().next().is_none(), set.is_empty());
    let properties = Properties::from_set(set, revision).expect("the set was checked");
    let mut buffer = vec![0; 512 + properties.host_auth.map_or(0, <[u8]>::len)];
    let again = properties.emit(&mut buffer, revision).expect("space");
    assert_eq!(Properties::from_set(&again, revision), Ok(properties));
}

/// Checks an RPC message. A valid header encodes to an equal header, and all readers agree. The answer to an invalid
/// header is valid.
pub fn rpc_message(bytes: &[u8]) {
    let call = CallHeader::parse(bytes);
    let reply = ReplyHeader::parse(bytes);
    match rpc::peek(bytes) {
        Some((_, MessageType::Call)) => assert!(reply.is_err()),
        Some((_, MessageType::Reply)) => assert!(call.is_err()),
        None => assert!(call.is_err() && reply.is_err()),
    }
    assert_eq!(call.map_err(|error| error.kind), CallHeader::read(bytes));
    match call {
        Ok((header, len)) => {
            assert_eq!((len, header.encoded_len() <= bytes.len()), (header.encoded_len(), true));
            let mut out = vec![0; len];
            assert_eq!(header.emit(&mut out), Ok(len));
            assert_eq!(CallHeader::parse(&out), Ok((header, len)));
            let is_anonymous = [header.credential, header.verifier] == [OpaqueAuth::NONE; 2];
            assert_eq!(CallHeader::read_anonymous(bytes).is_some(), is_anonymous);
            auth_sys(header.credential.body);
        }
        Err(error) => {
            check_text(&error);
            assert!(CallHeader::read_anonymous(bytes).is_none());
            if let Some(body) = error.answer() {
                let answer = ReplyHeader { xid: error.xid.expect("the message is long enough to be answered"), body };
                let mut out = [0; 64];
                let len = answer.emit(&mut out).expect("space");
                assert_eq!(ReplyHeader::parse(&out[..len]), Ok((answer, len)));
            }
        }
    }
    if let Ok((header, len)) = reply {
        check_text(&header.body);
        assert_eq!((len, header.encoded_len() <= bytes.len()), (header.encoded_len(), true));
        let mut out = vec![0; len];
        assert_eq!(header.emit(&mut out), Ok(len));
        assert_eq!(ReplyHeader::parse(&out), Ok((header, len)));
    }
}

/// Checks the body of an AUTH_SYS credential.
pub fn auth_sys(body: &[u8]) {
    let Ok(sys) = AuthSys::parse(body) else { return };
    let gids: Vec<u32> = sys.gids().collect();
    let mut out = vec![0; body.len()];
    let len = sys.emit(&gids, &mut out).expect("space");
    assert_eq!((len, AuthSys::parse(&out)), (body.len(), Ok(sys)));
}

/// Checks the private data of a connect message, at any position.
pub fn connect_message(bytes: &[u8]) {
    let Some(data) = PrivateData::parse(bytes) else { return };
    assert!((private_data::MIN_INLINE_THRESHOLD..=private_data::MAX_INLINE_THRESHOLD).contains(&data.send_size));
    assert!((private_data::MIN_INLINE_THRESHOLD..=private_data::MAX_INLINE_THRESHOLD).contains(&data.receive_size));
    let mut out = [0; private_data::LEN];
    assert_eq!(data.emit(&mut out), Ok(private_data::LEN));
    assert_eq!(PrivateData::parse(&out), Some(data));
}
