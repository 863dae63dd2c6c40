//! `rpcrdma decode` with captures in pcapng.

use rpcrdma_tools::capture::{self, CaptureError};

use crate::decode::{CAPTURE, packets, rpcrdma};

const ETHERNET: u16 = 1;
const INFINIBAND: u16 = 247;

/// Kind of a block with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockKind {
    Enhanced,
    Simple,
    Obsolete,
}

const KINDS: [BlockKind; 3] = [BlockKind::Enhanced, BlockKind::Simple, BlockKind::Obsolete];

/// Builds a pcapng file in either byte order.
#[derive(Default)]
struct FileBuilder {
    big: bool,
    bytes: Vec<u8>,
    /// Offsets of the ends of all blocks.
    ends: Vec<usize>,
}

impl FileBuilder {
    fn words(&self, words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| if self.big { word.to_be_bytes() } else { word.to_le_bytes() }).collect()
    }

    /// Encodes two numbers of 16 bits.
    fn halves(&self, [first, second]: [u16; 2]) -> [u8; 4] {
        let [[a, b], [c, d]] =
            [first, second].map(|half| if self.big { half.to_be_bytes() } else { half.to_le_bytes() });
        [a, b, c, d]
    }

    fn block(&mut self, kind: u32, body: &[&[u8]]) {
        let body = body.concat();
        let length = (12 + body.len().next_multiple_of(4)) as u32;
        let head = self.words(&[kind, length]);
        self.bytes.extend(head);
        self.bytes.extend(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let length = self.words(&[length]);
        self.bytes.extend(length);
        self.ends.push(self.bytes.len());
    }

    fn section(&mut self, big: bool) {
        self.big = big;
        let (magic, version, length) =
            (self.words(&[0x1a2b_3c4d]), self.halves([1, 0]), self.words(&[u32::MAX, u32::MAX]));
        self.block(0x0a0d_0d0a, &[&magic, &version, &length]);
    }

    fn interface(&mut self, link: u16, snap_length: u32, name: &str) {
        let padded = name.len().next_multiple_of(4);
        let name = [name.as_bytes(), &[0; 3]].concat();
        let name_len = u16::try_from(name.len() - 3).expect("short");
        let option = if padded == 0 { Vec::new() } else { [&self.halves([2, name_len])[..], &name[..padded]].concat() };
        let (head, snap_length, end) = (self.halves([link, 0]), self.words(&[snap_length]), self.words(&[0]));
        self.block(1, &[&head, &snap_length, &option, &end]);
    }

    fn packet(&mut self, kind: BlockKind, interface: u16, captured: &[u8], length: usize) {
        let (captured_len, length) = (captured.len() as u32, length as u32);
        match kind {
            BlockKind::Enhanced => {
                let head = self.words(&[interface.into(), 0, 0, captured_len, length]);
                self.block(6, &[&head, captured]);
            }
            BlockKind::Simple => {
                let head = self.words(&[length]);
                self.block(3, &[&head, captured]);
            }
            BlockKind::Obsolete => {
                let (head, rest) = (self.halves([interface, 0xFFFF]), self.words(&[0, 0, captured_len, length]));
                self.block(2, &[&head, &rest, captured]);
            }
        }
    }

    /// Decodes the file. Returns exit status, number of messages, and standard error.
    fn decode(&self) -> (Option<i32>, usize, String) {
        let output = rpcrdma(&["decode", "--json"], &self.bytes);
        let lines = output.stdout.iter().filter(|byte| **byte == b'\n').count();
        (output.status.code(), lines, String::from_utf8(output.stderr).expect("text"))
    }
}

/// The second section has the other byte order.
#[test]
fn all_kinds_of_blocks_in_both_byte_orders_give_the_messages_of_pcap() {
    let expected = rpcrdma(&["decode", "--json", CAPTURE], b"");
    let packets = packets(CAPTURE);
    let (first, second) = packets.split_at(packets.len() / 2);
    for kind in KINDS {
        for big in [false, true] {
            let mut file = FileBuilder::default();
            for (packets, big) in [(first, big), (second, !big)] {
                file.section(big);
                file.interface(ETHERNET, 0, "eth0");
                for packet in packets {
                    file.packet(kind, 0, packet, packet.len());
                }
            }
            let output = rpcrdma(&["decode", "--json"], &file.bytes);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{kind:?} {big}: {errors}");
            assert!(output.stdout == expected.stdout, "{kind:?} {big}");
        }
    }
}

/// The reported number includes packets that would not be decoded if they were whole.
#[test]
fn packets_that_are_cut_short_are_reported() {
    let snap_length = 302;
    let whole = packets(CAPTURE);
    let long = whole.iter().filter(|packet| packet.len() > snap_length).count();
    assert!(long > 0 && long < whole.len());
    for kind in KINDS {
        for big in [false, true] {
            let mut file = FileBuilder::default();
            file.section(big);
            file.interface(ETHERNET, snap_length as u32, "");
            for packet in &whole {
                file.packet(kind, 0, &packet[..packet.len().min(snap_length)], packet.len());
            }
            let (status, messages, errors) = file.decode();
            assert_eq!(status, Some(1), "{errors}");
            assert!(messages > 0 && errors.contains(&format!("rpcrdma: {long} packets are cut short")), "{errors}");
        }
        // All packets are whole except one, which is not RPC-over-RDMA.
        let mut file = FileBuilder::default();
        file.section(false);
        file.interface(ETHERNET, 16, "");
        file.interface(ETHERNET, 0, "");
        whole.iter().for_each(|packet| file.packet(BlockKind::Enhanced, 1, packet, packet.len()));
        file.packet(kind, 0, &[0; 16], 60);
        let (status, messages, errors) = file.decode();
        assert_eq!((status, messages), (Some(1), 454), "{errors}");
        assert!(errors.contains("rpcrdma: 1 packets are cut short"), "{kind:?}: {errors}");
    }
}

#[test]
fn unsupported_link_types_are_named_by_interface() {
    let packets = packets(CAPTURE);
    let mut file = FileBuilder::default();
    file.section(false);
    file.interface(ETHERNET, 0, "eth0");
    file.interface(INFINIBAND, 0, "mlx5_0");
    packets.iter().for_each(|packet| file.packet(BlockKind::Enhanced, 0, packet, packet.len()));
    file.packet(BlockKind::Enhanced, 1, &[0; 60], 60);
    file.packet(BlockKind::Obsolete, 1, &[0; 61], 61);
    file.section(true);
    file.interface(0, 0, "");
    file.packet(BlockKind::Simple, 0, &[0; 60], 60);
    let (status, messages, errors) = file.decode();
    assert_eq!((status, messages), (Some(1), 454), "{errors}");
    for words in [
        "2 packets of interface 1 (mlx5_0) skipped: link type INFINIBAND (number 247)",
        "1 packets of interface 0 of section 2 skipped: link type NULL (number 0)",
    ] {
        assert!(errors.contains(words), "{errors}");
    }
}

#[test]
fn packets_without_an_interface_and_malformed_blocks_are_errors() {
    let packets = packets(CAPTURE);
    for kind in KINDS {
        let mut file = FileBuilder::default();
        file.section(true);
        if kind != BlockKind::Simple {
            file.interface(ETHERNET, 0, "");
            packets[..20].iter().for_each(|packet| file.packet(kind, 0, packet, packet.len()));
        }
        file.packet(kind, if kind == BlockKind::Simple { 0 } else { 7 }, &packets[0], packets[0].len());
        let (status, messages, errors) = file.decode();
        assert_eq!((status, messages > 0), (Some(1), kind != BlockKind::Simple), "{errors}");
        let interface = if kind == BlockKind::Simple { 0 } else { 7 };
        let words = format!("a packet of interface {interface}, which no earlier block describes");
        assert!(errors.contains(&words), "{kind:?}: {errors}");
    }
    let mut file = FileBuilder::default();
    file.section(false);
    file.interface(ETHERNET, 0, "");
    let body = file.words(&[0, 0, 0, 100, 100, 0]);
    file.block(2, &[&body]);
    let (status, _, errors) = file.decode();
    assert!(status == Some(1) && errors.contains("too short for its packet"), "{errors}");
}

/// A file that ends between two blocks looks complete.
#[test]
fn a_file_that_ends_within_a_block_is_an_error() {
    for big in [false, true] {
        let mut file = FileBuilder::default();
        file.section(big);
        file.interface(ETHERNET, 0, "eth0");
        for kind in KINDS {
            file.packet(kind, 0, &[0; 61], 61);
        }
        for end in 4..=file.bytes.len() {
            let read = capture::read(&file.bytes[..end], |_| Ok::<_, CaptureError>(()));
            assert_eq!(read.is_ok(), file.ends.contains(&end), "{end}: {read:?}");
        }
    }
}
