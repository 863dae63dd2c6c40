//! Real input: NFSv3 between two Linux kernels, message by message, against what tshark says.

use std::collections::HashSet;
use std::fs::File;
use std::io::ErrorKind;
use std::process::Command;

use rpcrdma::wire::{Body, Chunks, Header, ReadSegment, Revision, Segment, View, ViewBody, WriteList};
use rpcrdma_tools::capture::{self, CaptureError};
use rpcrdma_tools::roce::{Message, Reassembler};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data");

fn sends() -> (Vec<Message>, Reassembler) {
    let file = File::open(format!("{DATA}/nfs3-linux61.pcap")).expect("test data");
    let (mut sends, mut reassembler) = (Vec::new(), Reassembler::default());
    capture::read(file, |packet| {
        sends.extend(reassembler.packet(&packet));
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
    /// Version, credits, message type.
    words: [u32; 3],
    /// Read segments, Write chunks, Reply chunks.
    counts: [usize; 3],
    positions: Vec<u32>,
    segment_counts: Vec<usize>,
    segments: Vec<Segment>,
}

/// tshark's table without retransmissions: rows whose sender and sequence number were there before.
fn rows() -> (usize, Vec<Row>) {
    let table = std::fs::read_to_string(format!("{DATA}/nfs3-linux61.tshark.tsv")).expect("test data");
    let lines: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split('\t').collect()).collect();
    let mut seen = HashSet::new();
    let rows = lines.iter().filter(|row| seen.insert((row[1], row[2]))).map(|row| parse(row)).collect();
    (lines.len(), rows)
}

fn parse(row: &[&str]) -> Row {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    let numbers = |column: usize| -> Vec<u64> {
        let values = row[column].split(',').filter(|value| !value.is_empty());
        values.map(|value| number(value).expect("a number")).collect()
    };
    let word = |column: usize| numbers(column)[0] as u32;
    let handles = numbers(12).into_iter().zip(numbers(13)).zip(numbers(14));
    Row {
        frame: numbers(0)[0],
        xid: word(3),
        words: [word(4), word(5), word(6)],
        counts: [7, 8, 9].map(|column| word(column) as usize),
        positions: numbers(10).into_iter().map(|position| position as u32).collect(),
        segment_counts: numbers(11).into_iter().map(|count| count as usize).collect(),
        segments: handles
            .map(|((handle, length), offset)| Segment { handle: handle as u32, length: length as u32, offset })
            .collect(),
    }
}

/// The same row, as we see it.
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
fn every_header_is_what_tshark_says() {
    let (packets, rows) = rows();
    let (sends, reassembler) = sends();
    assert_eq!((packets, rows.len()), (458, 454));
    assert_eq!((reassembler.repeated(), reassembler.unfinished(), reassembler.truncated()), (4, 0, 0));
    assert_eq!(sends.len(), rows.len());
    for (send, row) in sends.iter().zip(&rows) {
        assert_eq!(decode(send), *row);
    }
    // The table has something to compare.
    let with_chunks = |of: usize| rows.iter().filter(|row| row.counts[of] > 0).count();
    assert_eq!([0, 1, 2].map(with_chunks), [2, 8, 8]);
    assert_eq!(sends.iter().filter(|send| send.invalidate.is_some()).count(), 5);
}

#[test]
fn every_header_is_written_again_as_it_was() {
    let (sends, _) = sends();
    for send in &sends {
        let view = view(send);
        let reads: Vec<ReadSegment> = view.reads().collect();
        let counts: Vec<u32> = view.writes().map(|chunk| chunk.len() as u32).collect();
        let segments: Vec<Segment> = view.writes().flat_map(|chunk| chunk.segments()).collect();
        let reply: Option<Vec<Segment>> = view.reply_chunk().map(|chunk| chunk.segments().collect());
        let writes = WriteList { counts: &counts, segments: &segments };
        let chunks = Chunks { inv_handle: 0, reads: &reads, writes, reply: reply.as_deref() };
        let body = match view.body() {
            ViewBody::Msg => Body::Msg(chunks),
            ViewBody::Nomsg => Body::Nomsg(chunks),
            other => panic!("frame {}: {other:?}", send.frame),
        };
        let header = Header { xid: view.xid(), credit: view.credit(), received: None, flags: view.flags(), body };
        let mut out = vec![0; send.bytes.len()];
        let len = header.emit(&mut out, view.version(), view.revision()).expect("space");
        assert_eq!(out[..len], send.bytes[..view.payload_offset()], "frame {}", send.frame);
        assert_eq!(len + view.payload().len(), send.bytes.len(), "frame {}", send.frame);
    }
}

/// A source that notes how much it was ever asked for.
struct Asked<'a>(&'a [u8], &'a std::sync::atomic::AtomicUsize);

impl std::io::Read for Asked<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        self.1.fetch_max(to.len(), std::sync::atomic::Ordering::Relaxed);
        self.0.read(to)
    }
}

#[test]
fn a_record_that_only_says_that_it_is_long_takes_no_memory() {
    let mut file = std::fs::read(format!("{DATA}/nfs3-linux61.pcap")).expect("test data");
    // The header of the file, a record's header, and a few bytes of 200 MiB.
    file.truncate(24 + 16 + 60);
    for place in [32, 36] {
        file[place..place + 4].copy_from_slice(&(200u32 << 20).to_le_bytes());
    }
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let read = capture::read(Asked(&file, &asked), |_| Ok::<_, CaptureError>(()));
    assert!(matches!(read, Err(CaptureError::CutOff { frames: 0 })), "{read:?}");
    assert!(asked.into_inner() <= 1 << 20, "more was set aside than for any file");
}

/// The stored table is what tshark says today, where there is a tshark.
/// Whatever the order of bytes, and whatever block it is.
#[test]
fn a_block_that_is_shorter_than_its_frame_ends_the_capture() {
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

#[test]
fn the_table_is_fresh() {
    let stored = std::fs::read_to_string(format!("{DATA}/nfs3-linux61.tshark.tsv")).expect("test data");
    match Command::new("tshark").arg("--version").output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("not run: tshark missing");
            return;
        }
        version => assert!(version.expect("tshark runs").status.success()),
    }
    let output = Command::new(format!("{DATA}/nfs3-linux61.tshark.sh")).output().expect("the script runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), stored);
}
