//! Captures of NFSv3 over RoCE and iWARP, compared with tshark.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::ErrorKind;
use std::process::Command;

use rpcrdma::fabric::iwarp::wire::{self, MpaFrame, MpaFrameKind, RdmapOpcode, ReadRequest, ReaderStep, SegmentReader};
use rpcrdma::wire::{Body, Chunks, Header, ReadSegment, Revision, Segment, View, ViewBody, WriteList};
use rpcrdma_tools::capture::{self, CaptureError};
use rpcrdma_tools::iwarp::{self, CaptureEvent};
use rpcrdma_tools::message::Message;
use rpcrdma_tools::roce::Reassembler;
use rpcrdma_tools::tcp::{Direction, Streams};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data");

fn sends() -> (Vec<Message>, Reassembler) {
    let file = File::open(format!("{DATA}/nfs3-linux61.pcap")).expect("test data");
    let (mut sends, mut reassembler) = (Vec::new(), Reassembler::default());
    capture::read(file, |packet| {
        sends.extend(reassembler.read_packet(&packet));
        Ok::<_, CaptureError>(())
    })
    .expect("a capture");
    (sends, reassembler)
}

fn view(send: &Message) -> View<'_> {
    View::check(&send.bytes, Revision::Ietf00).unwrap_or_else(|error| panic!("frame {}: {error}", send.frame))
}

/// One line of tshark's table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    frame: u64,
    xid: u32,
    /// Version, credits and message type.
    words: [u32; 3],
    /// Numbers of Read segments, Write chunks and Reply chunks.
    counts: [usize; 3],
    positions: Vec<u32>,
    segment_counts: Vec<usize>,
    segments: Vec<Segment>,
}

/// Reads the lines of a table of tshark, split into columns.
fn table(capture: &str) -> Vec<Vec<String>> {
    let table = std::fs::read_to_string(format!("{DATA}/{capture}.tshark.tsv")).expect("test data");
    table.lines().skip(1).map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

/// Parses the numbers in a column.
fn numbers(column: &str) -> Vec<u64> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    column.split(',').filter(|value| !value.is_empty()).map(|value| number(value).expect("a number")).collect()
}

/// Reads tshark's table of RoCE. Returns its length and its rows without retransmissions, whose sender and sequence
/// number occurred before.
fn rows() -> (usize, Vec<Row>) {
    let lines = table("nfs3-linux61");
    let mut seen = HashSet::new();
    let rows = lines.iter().filter(|row| seen.insert((&row[1], &row[2]))).map(|row| parse(row, 3)).collect();
    (lines.len(), rows)
}

/// Parses a line whose columns from `first` on describe RPC-over-RDMA.
fn parse(row: &[String], first: usize) -> Row {
    let numbers = |column: usize| numbers(&row[first + column]);
    let word = |column: usize| numbers(column)[0] as u32;
    let handles = numbers(9).into_iter().zip(numbers(10)).zip(numbers(11));
    Row {
        frame: self::numbers(&row[0])[0],
        xid: word(0),
        words: [word(1), word(2), word(3)],
        counts: [4, 5, 6].map(|column| word(column) as usize),
        positions: numbers(7).into_iter().map(|position| position as u32).collect(),
        segment_counts: numbers(8).into_iter().map(|count| count as usize).collect(),
        segments: handles
            .map(|((handle, length), offset)| Segment { handle: handle as u32, length: length as u32, offset })
            .collect(),
    }
}

/// Decodes a message with this project's decoder. Returns its row.
fn decode(send: &Message) -> Row {
    let view = view(send);
    let chunks: Vec<_> = view.writes().chain(view.reply_chunk()).collect();
    let targets = view.reads().map(|read| read.target);
    Row {
        frame: send.frame,
        xid: view.xid(),
        words: [view.version().code(), view.credit(), view.htype().code()],
        counts: [view.reads().count(), view.writes().count(), usize::from(view.reply_chunk().is_some())],
        positions: view.reads().map(|read| read.position).collect(),
        segment_counts: chunks.iter().map(|chunk| chunk.len()).collect(),
        segments: targets.chain(chunks.iter().flat_map(|chunk| chunk.segments())).collect(),
    }
}

#[test]
fn every_header_agrees_with_tshark() {
    let (packets, rows) = rows();
    let (sends, reassembler) = sends();
    assert_eq!((packets, rows.len()), (458, 454));
    assert_eq!((reassembler.retransmitted(), reassembler.unfinished(), reassembler.truncated()), (4, 0, 0));
    assert_eq!(sends.len(), rows.len());
    for (send, row) in sends.iter().zip(&rows) {
        assert_eq!(decode(send), *row);
    }
    // Numbers of rows with a Read list, with Write chunks and with a Reply chunk.
    let with_chunks = |list: usize| rows.iter().filter(|row| row.counts[list] > 0).count();
    assert_eq!([0, 1, 2].map(with_chunks), [2, 8, 8]);
    assert_eq!(sends.iter().filter(|send| send.invalidate.is_some()).count(), 5);
}

#[test]
fn encoding_a_decoded_header_gives_its_bytes() {
    for send in sends().0.iter().chain(&iwarp_sends()) {
        let view = view(send);
        let reads: Vec<ReadSegment> = view.reads().collect();
        let counts: Vec<u32> = view.writes().map(|chunk| chunk.len() as u32).collect();
        let segments: Vec<Segment> = view.writes().flat_map(|chunk| chunk.segments()).collect();
        let reply: Option<Vec<Segment>> = view.reply_chunk().map(|chunk| chunk.segments().collect());
        let writes = WriteList { counts: &counts, segments: &segments };
        let chunks = Chunks { inv_handle: 0, reads: &reads, writes, reply: reply.as_deref() };
        let body = match view.body() {
            ViewBody::Msg(()) => Body::Msg(chunks),
            ViewBody::Nomsg(()) => Body::Nomsg(chunks),
            other => panic!("frame {}: {other:?}", send.frame),
        };
        let header = Header { xid: view.xid(), credit: view.credit(), received: None, flags: view.flags(), body };
        let mut out = vec![0; send.bytes.len()];
        let len = header.emit(&mut out, view.version(), view.revision()).expect("space");
        assert_eq!(out[..len], send.bytes[..view.payload_offset()], "frame {}", send.frame);
        assert_eq!(len + view.payload().len(), send.bytes.len(), "frame {}", send.frame);
    }
}

/// A reader that records the size of the largest read.
struct RecordingReader<'a>(&'a [u8], &'a std::sync::atomic::AtomicUsize);

impl std::io::Read for RecordingReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        self.1.fetch_max(to.len(), std::sync::atomic::Ordering::Relaxed);
        self.0.read(to)
    }
}

#[test]
fn a_record_that_claims_a_great_length_allocates_no_memory() {
    let mut file = std::fs::read(format!("{DATA}/nfs3-linux61.pcap")).expect("test data");
    // The file has its header, a record's header, and a few bytes of a record that claims 200 MiB.
    file.truncate(24 + 16 + 60);
    for position in [32, 36] {
        file[position..position + 4].copy_from_slice(&(200u32 << 20).to_le_bytes());
    }
    let largest = std::sync::atomic::AtomicUsize::new(0);
    let read = capture::read(RecordingReader(&file, &largest), |_| Ok::<_, CaptureError>(()));
    assert!(matches!(read, Err(CaptureError::CutOff { frames: 0 })), "{read:?}");
    assert!(largest.into_inner() <= 1 << 20);
}

#[test]
fn a_block_that_claims_to_be_shorter_than_its_header_is_an_error_in_both_byte_orders() {
    for big in [false, true] {
        let word = |n: u32| if big { n.to_be_bytes() } else { n.to_le_bytes() };
        let section = [0x0A0D_0D0A, 28, 0x1A2B_3C4D, if big { 1 << 16 } else { 1 }, u32::MAX, u32::MAX, 28];
        for (kind, length) in [(0x8000_0001, 4), (0x8000_0001, 11), (6, 8), (77, 0)] {
            let words = section.into_iter().chain([kind, length, 0, 0, 0]);
            let file: Vec<u8> = words.flat_map(word).collect();
            let end = capture::read(&file[..], |_| Ok::<_, CaptureError>(()));
            assert!(matches!(end, Err(CaptureError::Bad { frames: 0, .. })), "{kind:#x} {length}: {end:?}");
        }
    }
}

/// Compares the stored tables with the current output of tshark, if it is installed.
#[test]
fn stored_tables_equal_the_output_of_tshark() {
    match Command::new("tshark").arg("--version").output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("not run: tshark missing");
            return;
        }
        version => assert!(version.expect("tshark runs").status.success()),
    }
    for capture in ["nfs3-linux61", "nfs3-siw"] {
        let stored = std::fs::read_to_string(format!("{DATA}/{capture}.tshark.tsv")).expect("test data");
        let output = Command::new(format!("{DATA}/{capture}.tshark.sh")).output().expect("the script runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), stored, "{capture}");
    }
}

/// Reads the messages of the iWARP capture, which contains only Sends.
fn iwarp_sends() -> Vec<Message> {
    let file = File::open(format!("{DATA}/nfs3-siw.pcap")).expect("test data");
    let (mut sends, mut reassembler) = (Vec::new(), iwarp::Reassembler::default());
    capture::read(file, |packet| {
        sends.extend(reassembler.read_packet(&packet).into_iter().map(|found| match found {
            CaptureEvent::Send(send) => send,
            other => panic!("{other:?}"),
        }));
        Ok::<_, CaptureError>(())
    })
    .expect("a capture");
    assert_eq!(reassembler.with_gaps(), 0);
    sends
}

/// First column of RPC-over-RDMA in the iWARP table.
const RPC_OVER_RDMA: usize = 17;

#[test]
fn every_iwarp_header_agrees_with_tshark() {
    let lines = table("nfs3-siw");
    let rows: Vec<Row> =
        lines.iter().filter(|row| !row[RPC_OVER_RDMA].is_empty()).map(|row| parse(row, RPC_OVER_RDMA)).collect();
    let sends = iwarp_sends();
    assert_eq!((lines.len(), rows.len(), sends.len()), (253, 126, 126));
    for (send, row) in sends.iter().zip(&rows) {
        assert_eq!(decode(send), *row);
    }
    // Numbers of rows with a Read list, with Write chunks and with a Reply chunk.
    let with_chunks = |list: usize| rows.iter().filter(|row| row.counts[list] > 0).count();
    assert_eq!([0, 1, 2].map(with_chunks), [2, 6, 18]);
    assert_eq!(sends.iter().filter(|send| send.invalidate.is_some()).count(), 5);
}

/// Frame, sender's port, length of the ULPDU, segment, and its Read request, if any.
type SegmentRow = (u64, u16, usize, wire::SegmentHeader, Option<ReadRequest>);

/// Parses a line of tshark's iWARP table.
fn segment(row: &[String]) -> SegmentRow {
    let numbers: Vec<Option<u64>> =
        row[..RPC_OVER_RDMA].iter().map(|column| numbers(column).first().copied()).collect();
    let [frame, port, ulpdu, tagged, last, opcode, rest @ ..] = &numbers[..] else { panic!("{row:?}") };
    let [stag, offset, queue, msn, mo, revoked, sink_stag, sink_offset, len, source_stag, source_offset] = *rest else {
        panic!("{row:?}")
    };
    let word = |number: Option<u64>| number.expect("a number") as u32;
    let place = match tagged {
        Some(1) => wire::PayloadPlace::Tagged { stag: word(stag), offset: offset.expect("an offset") },
        _ => wire::PayloadPlace::Untagged { queue: word(queue), msn: word(msn), offset: word(mo) },
    };
    let opcode = match opcode {
        Some(0) => RdmapOpcode::Write,
        Some(1) => RdmapOpcode::ReadRequest,
        Some(2) => RdmapOpcode::ReadResponse,
        Some(3 | 4) => RdmapOpcode::Send { invalidate: revoked.map(|stag| stag as u32), solicited: false },
        other => panic!("opcode {other:?}"),
    };
    let request = (opcode == RdmapOpcode::ReadRequest).then(|| ReadRequest {
        sink_stag: word(sink_stag),
        sink_offset: sink_offset.expect("an offset"),
        len: word(len),
        source_stag: word(source_stag),
        source_offset: source_offset.expect("an offset"),
    });
    let number = |number: Option<u64>| number.expect("a number");
    let segment = wire::SegmentHeader { opcode, last: *last == Some(1), place };
    (number(*frame), number(*port) as u16, number(*ulpdu) as usize, segment, request)
}

#[test]
fn every_iwarp_segment_agrees_with_tshark() {
    let mut streams = Streams::default();
    let mut readers: HashMap<Direction, (Vec<u8>, Option<SegmentReader>)> = HashMap::new();
    let mut open: HashMap<Direction, (usize, wire::SegmentHeader, Vec<u8>)> = HashMap::new();
    let mut seen: Vec<SegmentRow> = Vec::new();
    capture::read(File::open(format!("{DATA}/nfs3-siw.pcap")).expect("test data"), |packet| {
        let Some(piece) = streams.read_packet(&packet) else { return Ok::<_, CaptureError>(()) };
        let (start, reader) = readers.entry(piece.direction).or_default();
        start.extend(piece.bytes);
        if reader.is_none() {
            // The server has port 20049, so this direction is the client's.
            let kind =
                if piece.direction.destination.port() == 20049 { MpaFrameKind::Request } else { MpaFrameKind::Reply };
            let Some((setup, used)) = MpaFrame::decode(kind, start).expect("a set-up frame") else { return Ok(()) };
            assert!(setup.revision == 2 && setup.enhanced.is_some() && !setup.reject && !setup.crc && !setup.markers);
            start.drain(..used);
            *reader = Some(SegmentReader::new(false));
        }
        let reader = reader.as_mut().expect("a reader after the set-up frame");
        let bytes = std::mem::take(start);
        let mut rest = &bytes[..];
        while let Some(step) = reader.step(&mut rest).expect("valid segments") {
            match step {
                ReaderStep::Segment { segment, len } => {
                    let ulpdu = segment.encode(len).len() - 2 + len;
                    open.insert(piece.direction, (ulpdu, segment, Vec::new()));
                }
                ReaderStep::Payload(payload) => {
                    open.get_mut(&piece.direction).expect("a segment").2.extend_from_slice(payload);
                }
                ReaderStep::End => {
                    let (ulpdu, segment, payload) = open.remove(&piece.direction).expect("a segment");
                    let request =
                        (segment.opcode == RdmapOpcode::ReadRequest).then(|| payload.first_chunk().expect("28 bytes"));
                    let request = request.map(ReadRequest::decode);
                    seen.push((packet.frame, piece.direction.source.port(), ulpdu, segment, request));
                }
            }
        }
        Ok(())
    })
    .expect("a capture");
    assert!(
        open.is_empty()
            && readers.values().all(|(_, reader)| reader.as_ref().is_some_and(SegmentReader::is_at_fpdu_boundary))
    );
    let rows: Vec<SegmentRow> = table("nfs3-siw").iter().map(|row| segment(row)).collect();
    assert_eq!((seen.len(), rows.len()), (253, 253));
    for (seen, row) in seen.iter().zip(&rows) {
        assert_eq!(seen, row);
    }
}
