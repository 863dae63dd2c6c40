//! A peer's end of an iWARP connection. It shares only the wire formats with the engine.

use std::collections::VecDeque;

use rpcrdma::fabric::FabricAddress;
use rpcrdma::fabric::iwarp::memory::RawEndpoint;
use rpcrdma::fabric::iwarp::wire::{
    EnhancedData, MpaFrame, MpaFrameKind, PayloadPlace, QUEUE_SEND, RdmapOpcode, ReadRequest, ReaderStep,
    SegmentHeader as Ddp, SegmentReader, fpdu_len,
};
use rpcrdma::wire::{Body, Chunks, Flags, Header, ReadSegment, Revision, Segment, Version, WriteList};

use super::wire::{PeerEvent, RequestedRead};

/// Payload bytes of a segment, as on a path with Ethernet's MTU.
const SEGMENT_PAYLOAD: usize = 1400;
/// Maximum outstanding RDMA Reads in each direction.
const MAX_READS: u16 = 16;

/// A peer's end of an iWARP connection.
pub(super) struct Endpoint {
    end: RawEndpoint,
    up: bool,
    refused: bool,
    reader: SegmentReader,
    segment: Option<Ddp>,
    /// Payload of the segment being received.
    payload: Vec<u8>,
    /// Payload of the message being received.
    message: Vec<u8>,
    out: VecDeque<u8>,
    msn: u32,
}

/// Queues one FPDU without a CRC.
fn queue_fpdu(out: &mut VecDeque<u8>, segment: Ddp, payload: &[u8]) {
    let header = segment.encode(payload.len());
    out.extend(header.iter().chain(payload));
    let ulpdu = header.len() - 2 + payload.len();
    out.extend(std::iter::repeat_n(0, fpdu_len(ulpdu) - 2 - ulpdu));
}

impl Endpoint {
    pub(super) fn connect(address: &FabricAddress, host: &str) -> Self {
        let request = MpaFrame {
            kind: MpaFrameKind::Request,
            revision: 2,
            markers: false,
            crc: false,
            reject: false,
            enhanced: Some(EnhancedData {
                ird: MAX_READS,
                ord: MAX_READS,
                peer_to_peer: false,
                rtr_send: false,
                rtr_write: false,
                rtr_read: false,
            }),
            private_data: Vec::new(),
        };
        Self {
            end: RawEndpoint::connect(address, host, request).expect("the server listens"),
            up: false,
            refused: false,
            reader: SegmentReader::new(false),
            segment: None,
            payload: Vec::new(),
            message: Vec::new(),
            out: VecDeque::new(),
            msn: 1,
        }
    }

    pub(super) fn is_up(&mut self) -> bool {
        if !self.up
            && let Some(reply) = self.end.reply()
        {
            (self.up, self.refused) = (!reply.reject, reply.reject);
        }
        self.up
    }

    pub(super) fn is_over(&self) -> bool {
        self.refused || self.end.is_closed()
    }

    /// Receives at most `max` bytes, and appends their events. Returns the number of bytes.
    pub(super) fn receive(&mut self, max: usize, events: &mut Vec<PeerEvent>) -> usize {
        let bytes = self.end.receive(max);
        let mut input = &bytes[..];
        while let Some(step) = self.reader.step(&mut input).expect("correct segments of the server") {
            match step {
                ReaderStep::Segment { segment, .. } => (self.segment, self.payload) = (Some(segment), Vec::new()),
                ReaderStep::Payload(bytes) => self.payload.extend_from_slice(bytes),
                ReaderStep::End => events.extend(self.take_segment()),
            }
        }
        bytes.len()
    }

    /// Handles a complete segment.
    fn take_segment(&mut self) -> Option<PeerEvent> {
        let segment = self.segment.take().expect("a segment header before its end");
        let payload = std::mem::take(&mut self.payload);
        match (segment.opcode, segment.place) {
            (RdmapOpcode::Send { .. }, _) => {
                self.message.extend_from_slice(&payload);
                segment.last.then(|| PeerEvent::Message(std::mem::take(&mut self.message)))
            }
            // The server's keep-alive probe.
            (RdmapOpcode::Write, _) if payload.is_empty() => None,
            (RdmapOpcode::Write, PayloadPlace::Tagged { stag, offset }) => {
                Some(PeerEvent::Written { handle: stag, offset, bytes: payload })
            }
            (RdmapOpcode::ReadRequest, _) => {
                let request = ReadRequest::decode(payload[..].try_into().expect("the length of a Read Request"));
                Some(PeerEvent::ReadRequested(RequestedRead {
                    handle: request.source_stag,
                    offset: request.source_offset,
                    len: request.len,
                    sink: (request.sink_stag, request.sink_offset),
                }))
            }
            (RdmapOpcode::Terminate, _) => Some(PeerEvent::Fault),
            (opcode, place) => panic!("unexpected segment: {opcode:?} to {place:?}"),
        }
    }

    /// Queues the response to an RDMA Read.
    pub(super) fn answer(&mut self, requested: &RequestedRead, data: &[u8]) {
        for (n, part) in data.chunks(SEGMENT_PAYLOAD).enumerate() {
            let place = PayloadPlace::Tagged {
                stag: requested.sink.0,
                offset: requested.sink.1 + (n * SEGMENT_PAYLOAD) as u64,
            };
            let last = (n + 1) * SEGMENT_PAYLOAD >= data.len();
            queue_fpdu(&mut self.out, Ddp { opcode: RdmapOpcode::ReadResponse, last, place }, part);
        }
    }

    /// Queues a call.
    pub(super) fn call(&mut self, xid: u32, reads: &[ReadSegment], writes: &[Segment], rpc: &[u8]) {
        let counts: &[u32] = if writes.is_empty() { &[] } else { &[1] };
        let body = Body::Msg(Chunks { reads, writes: WriteList { counts, segments: writes }, ..Chunks::NONE });
        let header = Header { xid, credit: 32, received: None, flags: Flags::NONE, body };
        let mut message = vec![0; header.encoded_len(Version::V1, Revision::default())];
        header.emit(&mut message, Version::V1, Revision::default()).expect("space for the header");
        message.extend_from_slice(rpc);
        let parts = message.chunks(SEGMENT_PAYLOAD).count();
        for (n, part) in message.chunks(SEGMENT_PAYLOAD).enumerate() {
            let place =
                PayloadPlace::Untagged { queue: QUEUE_SEND, msn: self.msn, offset: (n * SEGMENT_PAYLOAD) as u32 };
            let opcode = RdmapOpcode::Send { invalidate: None, solicited: false };
            queue_fpdu(&mut self.out, Ddp { opcode, last: n + 1 == parts, place }, part);
        }
        self.msn += 1;
    }

    /// Queues an RDMA Write of no bytes, as a keep-alive probe.
    pub(super) fn send_empty_write(&mut self) {
        let place = PayloadPlace::Tagged { stag: 0, offset: 0 };
        queue_fpdu(&mut self.out, Ddp { opcode: RdmapOpcode::Write, last: true, place }, &[]);
    }

    /// Sends at most `max` queued bytes. Returns their number.
    pub(super) fn send(&mut self, max: usize) -> usize {
        let before = self.out.len();
        self.end.send(&mut self.out, max);
        before - self.out.len()
    }
}
