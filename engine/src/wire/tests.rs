//! Properties of the codec that hold for all inputs, and helpers for the tests beside this file.

use proptest::prelude::*;

use super::optional::{Operation, OperationCode};
use super::private_data::PrivateData;
use super::properties::{Builder, Properties, Property, PropertyId, ReverseSupport, Subset};
use super::rpc::{AuthSys, CallHeader, ReplyHeader};
use super::*;

/// Bytes of a hex dump: digits in groups, blanks ignored.
pub(super) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// The value of a view, with the storage that its lists need.
#[derive(Debug)]
pub(super) struct Owned<'a> {
    view: View<'a>,
    reads: Vec<ReadSegment>,
    counts: Vec<u32>,
    segments: Vec<Segment>,
    reply: Option<Vec<Segment>>,
}

impl<'a> Owned<'a> {
    pub(super) fn of(view: &View<'a>) -> Owned<'a> {
        Owned {
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
            ViewBody::Msg => Body::Msg(chunks),
            ViewBody::Nomsg => Body::Nomsg(chunks),
            ViewBody::Msgp { align, thresh } => Body::Msgp { align, thresh, chunks },
            ViewBody::Done => Body::Done,
            ViewBody::Error(error) => Body::Error(error),
            ViewBody::Connprop(properties) => Body::Connprop(properties),
            ViewBody::Optional { opttype, optinfo } => Body::Optional { opttype, optinfo },
        };
        let (xid, credit) = (view.xid(), view.credit());
        Header { xid, credit, received: view.received(), flags: view.flags(), body }
    }
}
