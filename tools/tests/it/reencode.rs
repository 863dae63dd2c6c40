//! Decodes bodies of captures with the generated types of NFS, and encodes them again.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;

use rpcrdma::typed::Signature;
use rpcrdma::wire::rpc::{self, AcceptStat, CallHeader, MessageType, ReplyBody, ReplyHeader};
use rpcrdma::wire::{Revision, View};
use rpcrdma::xdr::{
    Bulk, BulkLocation, BulkPlacement, Decode, Decoder, Encode, EncodeError, Encoder, ReceivedChunks, padded,
};
use rpcrdma_nfs3d::nfs3::nfs_v3::*;
use rpcrdma_tools::capture::{self, CaptureError};
use rpcrdma_tools::iwarp::{self, CaptureEvent};
use rpcrdma_tools::roce;

use crate::decode::{CAPTURE, IWARP};

/// Chunks of a message. They contain zeros, because their data is not in a Send.
#[derive(Clone, Debug, Default)]
struct Chunks {
    /// Read chunks by position in the body.
    reads: BTreeMap<usize, Vec<u8>>,
    /// Write chunks; an unused one is empty.
    writes: Vec<Vec<u8>>,
}

impl Chunks {
    fn of_call(view: &View<'_>, body: usize) -> Self {
        let mut chunks = Self::default();
        for segment in view.reads().filter(|segment| segment.position != 0) {
            let chunk = chunks.reads.entry(segment.position as usize - body).or_default();
            chunk.resize(chunk.len() + segment.target.length as usize, 0);
        }
        chunks
    }

    fn of_reply(view: &View<'_>) -> Self {
        Self { writes: view.writes().map(|chunk| vec![0; chunk.total_length() as usize]).collect(), ..Self::default() }
    }

    fn used(&self) -> usize {
        self.reads.len() + self.writes.iter().filter(|chunk| !chunk.is_empty()).count()
    }
}

impl ReceivedChunks for Chunks {
    fn item(&self, item: usize, _used: usize, position: usize, len: usize) -> Option<&[u8]> {
        let written = self.writes.get(item).filter(|chunk| !chunk.is_empty());
        let chunk = self.reads.get(&position).or(written)?;
        // A Read chunk may have room for padding.
        Some(if chunk.len() == padded(len) { &chunk[..len] } else { chunk })
    }

    fn is_complete(&self, used: usize) -> bool {
        used == self.used()
    }
}

/// Places data into chunks as the captured message did.
impl BulkPlacement for Chunks {
    fn place(&mut self, item: usize, bulk: &Bulk<'_>, position: usize) -> Result<BulkLocation, EncodeError> {
        Ok(self.item(item, 0, position, bulk.len()).map_or(BulkLocation::Inline, |_| BulkLocation::Apart))
    }
}

/// Checks that encoding the decoded value gives the same bytes.
fn assert_reencodes<'a, T: Decode<'a> + Encode>(bytes: &'a [u8], chunks: &'a Chunks, context: &str) {
    let mut from = Decoder::with_chunks(bytes, chunks);
    let value = T::decode(&mut from).unwrap_or_else(|error| panic!("{context}: {error:?}"));
    from.end().unwrap_or_else(|error| panic!("{context}: {error:?}"));
    let (mut out, mut place) = (vec![0xee; value.encoded_len()], chunks.clone());
    let mut to = Encoder::placing(&mut out, &mut place);
    value.encode(&mut to).unwrap_or_else(|error| panic!("{context}: {error:?}"));
    assert_eq!(to.into_written(), bytes, "{context}");
}

fn check_body<P: Signature>(is_call: bool, bytes: &[u8], chunks: &Chunks, frame: u64) {
    let context = format!("frame {frame}: {} {}", P::NAME, if is_call { "arguments" } else { "results" });
    if is_call {
        assert_reencodes::<P::Args<'_>>(bytes, chunks, &context)
    } else {
        assert_reencodes::<P::Results<'_>>(bytes, chunks, &context)
    }
}

/// Checks a body by the number of its procedure.
fn check_procedure(procedure: u32, is_call: bool, bytes: &[u8], chunks: &Chunks, frame: u64) {
    macro_rules! by_number {
        ($($signature:ident)*) => {
            match procedure {
                0 => assert!(bytes.is_empty(), "frame {frame}: NULL"),
                $($signature::NUMBER => check_body::<$signature>(is_call, bytes, chunks, frame),)*
                other => panic!("frame {frame}: procedure {other}"),
            }
        };
    }
    by_number! {
        Getattr Setattr Lookup Access Readlink Read Write Create Mkdir Symlink Mknod Remove Rmdir Rename Link Readdir
        Readdirplus Fsstat Fsinfo Pathconf Commit
    }
}

/// Checks all bodies of NFS in a capture. Returns the number of bodies, and of bodies with data in chunks.
///
/// Replies in a Reply chunk are omitted, because they are not in a Send.
fn check_bodies(file: &str) -> (usize, usize) {
    let (mut roce, mut iwarp) = (roce::Reassembler::default(), iwarp::Reassembler::default());
    let mut sends = Vec::new();
    capture::read(File::open(file).expect("test data"), |packet| {
        sends.extend(roce.read_packet(&packet));
        sends.extend(iwarp.read_packet(&packet).into_iter().filter_map(|found| match found {
            CaptureEvent::Send(send) => Some(send),
            _ => None,
        }));
        Ok::<_, CaptureError>(())
    })
    .expect("a capture");
    let (mut calls, mut bodies, mut with_chunks) = (HashMap::new(), 0, 0);
    for send in &sends {
        let view = View::check(&send.bytes, Revision::Ietf00).expect("a message");
        let payload = view.payload();
        let Some((xid, kind)) = rpc::peek(payload).filter(|(xid, _)| *xid == view.xid()) else { continue };
        let is_call = kind == MessageType::Call;
        let (procedure, at, chunks) = if is_call {
            let (call, at) = CallHeader::parse(payload).expect("a call");
            if call.program != Getattr::PROGRAM {
                continue;
            }
            calls.insert(xid, call.procedure);
            (call.procedure, at, Chunks::of_call(&view, at))
        } else {
            let (reply, at) = ReplyHeader::parse(payload).expect("a reply");
            let is_success = matches!(reply.body, ReplyBody::Accepted { stat: AcceptStat::Success, .. });
            let Some(procedure) = calls.remove(&xid).filter(|_| is_success) else { continue };
            (procedure, at, Chunks::of_reply(&view))
        };
        check_procedure(procedure, is_call, &payload[at..], &chunks, send.frame);
        bodies += 1;
        with_chunks += usize::from(chunks.used() > 0);
    }
    (bodies, with_chunks)
}

#[test]
fn reencoded_bodies_equal_those_of_captures() {
    let counts = [CAPTURE, IWARP].map(check_bodies);
    assert!(counts.iter().map(|(bodies, _)| bodies).sum::<usize>() > 500, "{counts:?}");
    assert!(counts.iter().all(|(_, with_chunks)| *with_chunks > 0), "{counts:?}");
}
