//! `rpcrdma decode` from its command line.

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

use rpcrdma_tools::capture::{self, CaptureError};
use serde_json::{Value, json};

pub(crate) const CAPTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/nfs3-linux61.pcap");
pub(crate) const IWARP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/nfs3-siw.pcap");

pub(crate) fn rpcrdma(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    // The child may end before it has read all input, so an error of the write is ignored.
    let writer = std::thread::spawn(move || _ = stdin.write_all(&input));
    let output = child.wait_with_output().expect("the binary ends");
    writer.join().expect("writer");
    output
}

/// Runs the program. Returns exit status, lines of standard output, and standard error.
pub(crate) fn run(arguments: &[&str], input: &str) -> (i32, Vec<String>, String) {
    let output = rpcrdma(arguments, input.as_bytes());
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let lines = text(output.stdout).lines().map(str::to_owned).collect();
    (output.status.code().expect("an exit status"), lines, text(output.stderr))
}

/// Reads the packets of a capture.
pub(crate) fn packets(capture: &str) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    let read = capture::read(std::fs::File::open(capture).expect("test data"), |packet| {
        packets.push(packet.bytes.to_vec());
        Ok::<_, CaptureError>(())
    });
    read.expect("a capture");
    packets
}

/// Decodes a pcap file with these Ethernet packets. Returns exit status, standard output and standard error.
fn decode_packets(packets: &[Vec<u8>]) -> (Option<i32>, String, String) {
    let mut file = [0xa1b2_c3d4, 0x0002_0004, 0, 0, 65_535, 1].map(u32::to_be_bytes).concat();
    for packet in packets {
        let length = (packet.len() as u32).to_be_bytes();
        file.extend([[0; 4], [0; 4], length, length].concat());
        file.extend(packet);
    }
    let output = rpcrdma(&["decode"], &file);
    let [lines, errors] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    (output.status.code(), lines, errors)
}

/// Checks that a capture with missing parts is reported as incomplete, with this cause.
fn assert_incomplete(packets: &[Vec<u8>], cause: &str) {
    let (status, lines, errors) = decode_packets(packets);
    assert!(!lines.is_empty() && !lines.contains("error"), "the other packets are decoded: {lines}");
    let is_reported = errors.lines().last().is_some_and(|line| line.contains("the decoded messages are incomplete"));
    assert!(status == Some(1) && errors.contains(cause) && is_reported, "{status:?}, not {cause}: {errors}");
}

pub(crate) fn objects(lines: &[String]) -> Vec<Value> {
    lines.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_version_2_call_is_decoded_to_json() {
    let input = "
        # flags RECEIVED, a handle to invalidate, all three lists, an AUTH_SYS call of NFSv2 READ
        00000007 00000002 00000020 00000000  00000004 00000009  00000826 \
        00000001 00000070 00000826 00020000 00000001 00001000 00000000 \
        00000001 00000001 0000071e 00010000 00000002 00002000 00000000 \
        00000001 00000001 0000072e 00000004 00000003 00003000 \
        00000007 00000000 00000002 000186a3 00000002 00000006 00000001 00000000 00000000 00000000\n";
    let (status, lines, errors) = run(&["decode", "--json"], input);
    assert_eq!((status, errors.as_str()), (0, ""));
    assert_eq!(
        objects(&lines),
        [json!({
            "vers": 2, "xid": 7, "credit": 32, "received": 9, "htype": "MSG", "flags": 4, "inv_handle": 0x826,
            "reads": [{"position": 112, "handle": 0x826, "length": 131072, "offset": 0x1_0000_1000_u64}],
            "writes": [[{"handle": 0x71e, "length": 65536, "offset": 0x2_0000_2000_u64}]],
            "reply": [{"handle": 0x72e, "length": 4, "offset": 0x3_0000_3000_u64}],
            "error": null, "props": [], "payload_offset": 108,
            "rpc": {"xid": 7, "type": "CALL", "program": 100003, "version": 2, "procedure": 6, "flavor": 1},
            "body": null,
        })]
    );
}

#[test]
fn the_order_of_keys_is_fixed() {
    let (_, lines, _) = run(&["decode", "--json", "-"], "00000001000000010000002000000000 00000000 0000000000000000");
    let object: serde_json::Map<String, Value> = serde_json::from_str(&lines[0]).expect("JSON");
    let keys: Vec<&str> = object.keys().map(String::as_str).collect();
    let expected =
        "vers xid credit received htype flags inv_handle reads writes reply error props payload_offset rpc body";
    assert_eq!(keys.join(" "), expected);
}

#[test]
fn errors_properties_and_operations_are_decoded_to_json() {
    let input = "\
        00000001 00000002 00000020 00000004 00000001 00000008 00000001 00002000\n\
        00000001 00000001 00000020 00000004 00000001 00000001 00000002\n\
        00000001 00000001 00000020 00000004 00000002\n\
        00000000 00000002 00000020 00000005 00000000 00000002 00000002 00000004 00002000 00000009 00000003 01020300\n\
        00000003 00000002 00000020 ffffff05 00000000 00000004 00000010 00000002 00000004 00002000 00000001\n";
    let (status, lines, _) = run(&["decode", "--json"], input);
    let objects = objects(&lines);
    assert_eq!((status, objects.len()), (0, 5));
    assert_eq!(
        objects[0]["error"],
        json!({"code": 8, "name": "ERR_WRITE_RESOURCE", "chunk_index": 1, "length_needed": 8192})
    );
    assert_eq!(objects[1]["error"], json!({"code": 1, "name": "ERR_VERS", "low": 1, "high": 2}));
    assert_eq!(objects[2]["error"], json!({"code": 2, "name": "ERR_CHUNK"}));
    assert_eq!(
        objects[3]["props"],
        json!([
            {"which": 2, "data": "00002000", "name": "RBSIZ"},
            {"which": 9, "data": "010203", "name": null},
        ])
    );
    assert_eq!(
        objects[4]["optional"],
        json!({"opttype": 4, "name": "UPDXCH", "optinfo": "00000002000000040000200000000001"})
    );
}

#[test]
fn replies_are_decoded_to_json() {
    let transport = "00000001 00000001 00000020 00000000 00000000 00000000 00000000 00000001 00000001";
    let input = format!(
        "{transport} 00000000 00000000 00000000 00000002 00000003 00000004\n\
         {transport} 00000001 00000001 00000005\n\
         {transport} 00000001 00000000 00000002 00000002\n\
         00000002 {}\n",
        &transport[9..]
    );
    let (status, lines, _) = run(&["decode", "--json"], &input);
    let rpc: Vec<Value> = objects(&lines).iter().map(|object| object["rpc"].clone()).collect();
    assert_eq!(status, 0);
    assert_eq!(
        rpc,
        [
            json!({"xid": 1, "type": "REPLY", "flavor": 0, "accept": "PROG_MISMATCH", "low": 3, "high": 4}),
            json!({"xid": 1, "type": "REPLY", "reject": "AUTH_ERROR", "auth_stat": 5, "why": "AUTH_TOOWEAK"}),
            json!({"xid": 1, "type": "REPLY", "reject": "RPC_MISMATCH", "low": 2, "high": 2}),
            Value::Null,
        ]
    );
}

#[test]
fn the_revision_selects_the_code_points() {
    let input = "00000001 00000002 00000020 00000004 00000001 00000004 00000003";
    let name = |arguments: &[&str]| {
        let (status, lines, _) = run(arguments, input);
        (status, objects(&lines)[0]["error"]["name"].clone())
    };
    assert_eq!(name(&["decode", "--json"]), (0, json!("ERR_INVAL_FLAG")));
    assert_eq!(name(&["decode", "--json", "--revision", "cel09"]), (0, json!("ERR_READ_CHUNKS")));
    assert_eq!(name(&["decode", "--json", "--revision=ietf00"]), (0, json!("ERR_INVAL_FLAG")));
}

#[test]
fn calls_and_replies_are_decoded_to_text() {
    let input = "0x00000001 0x00000001 0x00000020 0x00000000 0x0 0x0 0x0\n";
    let (status, lines, _) = run(&["decode"], input);
    assert_eq!(status, 1, "0x0 is a digit, not a word: {lines:?}");
    assert_eq!(lines, ["error bad_hex: expected an even number of hex digits, found 35"]);

    let input = "00:00:00:01 00000001 00000020 00000000 00000000 00000000 00000000 \
        00000001 00000000 00000002 000186a3 00000003 00000000 00000000 00000000 00000000 00000000\r\n\
        00000001 00000001 00000020 00000000 00000000 00000000 00000000 \
        00000001 00000001 00000000 00000000 00000000 00000000\n";
    let (status, lines, _) = run(&["decode"], input);
    assert_eq!(status, 0);
    assert_eq!(
        lines,
        [
            "v1 MSG xid=0x00000001 credit=0x20 payload=40@28 | CALL program=100003 version=3 procedure=0 AUTH_NONE | NFSPROC3_NULL",
            "v1 MSG xid=0x00000001 credit=0x20 payload=24@28 | REPLY SUCCESS | NFSPROC3_NULL",
        ]
    );
}

#[test]
fn lines_after_a_malformed_line_are_decoded() {
    let input = "\
        xyz\n\
        0000\n\
        00000001 00000003 00000020 00000000\n\
        00000001 00000002 00000020 00000003 00000000\n\
        00000001 00000002 00000020 00000000 00000008\n\
        00000001 00000001 00000020 00000000 00000002\n\
        \n\
        00000001 00000001 00000020 00000003\n";
    let (status, lines, errors) = run(&["decode", "--json"], input);
    let objects = objects(&lines);
    assert_eq!((status, errors.as_str()), (1, ""));
    let kinds: Vec<_> = objects.iter().filter_map(|object| object["error_kind"].as_str()).collect();
    let expected = ["bad_hex", "too_short", "unsupported_version", "invalid_htype", "invalid_flag", "bad_xdr"];
    assert_eq!(kinds, expected);
    assert_eq!(objects[0], json!({"error_kind": "bad_hex", "detail": "`x` is not a hex digit"}));
    assert_eq!(objects[5], json!({"error_kind": "bad_xdr", "detail": "bad rdma_reads at byte 16"}));
    assert_eq!(objects[6]["htype"], "DONE");
}

#[test]
fn a_roce_capture_is_decoded() {
    let (status, lines, errors) = run(&["decode", "--json", CAPTURE], "");
    let objects = objects(&lines);
    assert_eq!((status, objects.len()), (0, 454));
    assert_eq!(errors, "rpcrdma: 4 retransmitted packets skipped\n");
    assert!(objects.iter().all(|object| object["error_kind"].is_null()));
    assert_eq!(objects[9]["rpc"], json!({"xid": objects[9]["xid"], "type": "REPLY", "flavor": 0, "accept": "SUCCESS"}));
    let write = objects.iter().find(|object| object["frame"] == 64).expect("frame 64");
    assert_eq!(write["rpc"]["procedure"], 7);
    assert_eq!(write["reads"][1]["length"], 65536);
    let read = objects.iter().find(|object| object["frame"] == 396).expect("frame 396");
    assert_eq!((&read["invalidate"], &read["writes"][0][0]["handle"]), (&json!(0xc5d), &json!(0xc5d)));
    assert_eq!(read["source"], "10.98.0.1");

    let (_, lines, _) = run(&["decode", CAPTURE], "");
    assert_eq!(
        lines[0],
        "4 10.98.0.2 > 10.98.0.1 qp 0x11: v1 MSG xid=0xcbdc15ba credit=0x80 payload=40@28 | \
         CALL program=100003 version=3 procedure=0 AUTH_NONE | NFSPROC3_NULL"
    );
}

#[test]
fn an_iwarp_capture_is_decoded() {
    let (status, lines, errors) = run(&["decode", "--json", IWARP], "");
    let objects = objects(&lines);
    assert_eq!((status, objects.len(), errors.as_str()), (0, 126, ""));
    assert!(objects.iter().all(|object| object["error_kind"].is_null()));
    let write = objects.iter().find(|object| object["frame"] == 46).expect("frame 46");
    assert_eq!((&write["source"], &write["destination"]), (&json!("10.0.0.2"), &json!("10.0.0.1")));
    assert_eq!((&write["ports"], &write["queue_pair"]), (&json!([40514, 20049]), &Value::Null));
    assert_eq!((&write["rpc"]["procedure"], &write["reads"][0]["length"]), (&json!(7), &json!(5000)));
    let reply = objects.iter().find(|object| object["frame"] == 60).expect("frame 60");
    assert_eq!((&reply["invalidate"], &reply["ports"]), (&json!(0x6aac_f801), &json!([20049, 40514])));
    assert_eq!(reply["invalidate"], write["reads"][0]["handle"]);

    let (_, lines, _) = run(&["decode", IWARP], "");
    assert_eq!(
        lines[0],
        "8 10.0.0.2:40514 > 10.0.0.1:20049: v1 MSG xid=0xf6a39b6a credit=0x80 payload=40@28 | \
         CALL program=100003 version=3 procedure=0 AUTH_NONE | NFSPROC3_NULL"
    );
}

#[test]
fn a_missing_iwarp_packet_loses_the_rest_of_its_direction_and_is_reported() {
    let mut packets = packets(IWARP);
    packets.remove(39);
    let (status, lines, errors) = decode_packets(&packets);
    assert!(
        errors.starts_with("rpcrdma: 1 directions of iWARP connections have bytes that the capture misses"),
        "{errors}"
    );
    let (calls, replies): (Vec<_>, Vec<_>) = lines.lines().partition(|line| line.contains("CALL"));
    assert_eq!(status, Some(1), "bytes were skipped");
    assert!(calls.len() == 63 && replies.len() < 63, "{}", replies.len());
    assert!(errors.lines().last().is_some_and(|line| line.contains("the decoded messages are incomplete")), "{errors}");
}

/// The set-up frame of the server shows that the client's direction is also iWARP.
#[test]
fn a_missing_set_up_frame_is_reported() {
    let mut packets = packets(IWARP);
    let request = packets.iter().position(|packet| packet.windows(14).any(|bytes| bytes == b"MPA ID Req Fra"));
    packets.remove(request.expect("an MPA Request Frame"));
    assert_incomplete(&packets, "rpcrdma: 1 directions of iWARP connections have bytes that the capture misses");
}

/// Frame 48 ends within a segment.
#[test]
fn an_iwarp_capture_that_ends_within_a_segment_is_reported() {
    let packets = packets(IWARP);
    assert_incomplete(
        &packets[..48],
        "rpcrdma: 1 directions of iWARP connections have messages or segments without their end",
    );
}

/// Offset of the opcode in a RoCEv2 packet, after the headers of Ethernet, IPv4 and UDP.
const OPCODE: usize = 14 + 20 + 8;

/// One Send of the capture has two packets, with opcodes SEND First and SEND Last.
#[test]
fn missing_packets_of_a_send_are_reported() {
    let whole = packets(CAPTURE);
    let is_roce = |packet: &[u8]| packet[23] == 17 && packet[36..38] == 4791u16.to_be_bytes();
    for (opcode, cause) in [
        (0x00, "rpcrdma: 1 packets of Sends skipped, because the capture misses packets before them\n"),
        (0x02, "rpcrdma: 1 Sends are incomplete, because the capture misses packets\n"),
    ] {
        let mut packets = whole.clone();
        packets.retain(|packet| !is_roce(packet) || packet[OPCODE] != opcode);
        assert_eq!(packets.len(), whole.len() - 1, "{opcode}");
        assert_incomplete(&packets, cause);
    }
}

#[test]
fn roce_packets_too_short_for_their_headers_are_reported() {
    let mut packets = packets(CAPTURE);
    let mut short = packets[3].clone();
    short[38..40].copy_from_slice(&[0, 8 + 11]);
    packets.push(short);
    assert_incomplete(&packets, "rpcrdma: 1 RoCEv2 packets skipped: too short for their headers\n");
}

/// The first and the last fragment of a datagram may contain parts of a message.
#[test]
fn ip_fragments_are_reported() {
    for capture in [CAPTURE, IWARP] {
        let mut packets = packets(capture);
        for fragment in [[0x20, 0], [0, 1]] {
            let mut packet = packets[0].clone();
            assert_eq!(packet[12..14], [8, 0], "IPv4");
            packet[20..22].copy_from_slice(&fragment);
            packets.push(packet);
        }
        assert_incomplete(&packets, "rpcrdma: 2 IP fragments skipped, because datagrams are not reassembled\n");
    }
}

/// The capture states that the shortened packet is complete, but the length in its IP header is greater.
#[test]
fn packets_that_end_before_their_datagram_are_reported() {
    for capture in [CAPTURE, IWARP] {
        let mut packets = packets(capture);
        let mut packet = packets.iter().find(|packet| packet.len() > 100).expect("a long packet").clone();
        packet.truncate(90);
        packets.push(packet);
        assert_incomplete(&packets, "rpcrdma: 1 packets are cut short: capture whole packets (tcpdump -s 0)\n");
    }
}

#[test]
fn a_capture_is_read_from_standard_input() {
    let bytes = std::fs::read(CAPTURE).expect("test data");
    let output = rpcrdma(&["decode", "-"], &bytes);
    let lines = output.stdout.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!((output.status.code(), lines), (Some(0), 454));

    let output = rpcrdma(&["decode"], &bytes[..10_000]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(!output.stdout.is_empty(), "packets before the end are decoded");
    assert!(errors.contains("standard input: capture is cut off after 68 packets"), "{errors}");

    // A file header alone is an empty capture.
    let output = rpcrdma(&["decode"], &bytes[..24]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("no RoCEv2 Send and no iWARP connection with its start in 0 packets"), "{errors}");
}

#[test]
fn a_capture_that_ends_within_its_header_is_refused() {
    // The first block of pcapng, with eight bytes of options, in both byte orders.
    let section = [0x0A0D_0D0A, 36, 0x1A2B_3C4D, 1, u32::MAX, u32::MAX, 1, 0, 36];
    let pcap = std::fs::read(CAPTURE).expect("test data");
    let expected =
        "rpcrdma: standard input: the capture ends within its header: check that the capture has run and was closed\n";
    for header in [pcap[..24].to_vec(), section.map(u32::to_be_bytes).concat(), section.map(u32::to_le_bytes).concat()]
    {
        for end in 4..=header.len() {
            let output = rpcrdma(&["decode"], &header[..end]);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1));
            assert_eq!(errors == expected, end < header.len(), "{end}: {errors}");
        }
    }
}

#[test]
fn wrong_usage_and_unreadable_files_are_explained() {
    let (status, lines, errors) = run(&["decode", "/nonexistent/file.pcap"], "");
    assert_eq!((status, lines.len()), (1, 0));
    assert!(errors.starts_with("rpcrdma: /nonexistent/file.pcap: No such file or directory"), "{errors}");
    for arguments in
        [&["decode", "--bogus"][..], &["decode", "--revision", "none"], &["decode", "a", "b"], &["nonsense"], &[]]
    {
        let (status, _, errors) = run(arguments, "");
        assert_eq!(status, 2, "{arguments:?}");
        assert!(errors.contains("--help"), "{errors}");
    }
    let (status, lines, _) = run(&["decode", "--help"], "");
    assert_eq!(status, 0);
    for word in ["--json", "--revision", "ietf00, cel09", "Exit status", "Examples"] {
        assert!(lines.iter().any(|line| line.contains(word)), "{word}");
    }
    let (status, lines, errors) = run(&["decode"], "");
    assert_eq!((status, lines.len()), (1, 0));
    assert!(errors.contains("standard input: empty"), "{errors}");
    let compressed = rpcrdma(&["decode"], b"\x1f\x8b\x08\0\0\0\0\0");
    let errors = String::from_utf8_lossy(&compressed.stderr);
    assert!(compressed.status.code() == Some(1) && errors.contains("gzip -dc FILE | rpcrdma decode"), "{errors}");
    // This capture has one packet with the link type of InfiniBand.
    let header = [0xa1b2_c3d4, 0x0002_0004, 0, 0, 65_535, 247, 0, 0, 4, 4, 0].map(u32::to_be_bytes).concat();
    let foreign = rpcrdma(&["decode"], &header);
    let errors = String::from_utf8_lossy(&foreign.stderr);
    assert!(foreign.status.code() == Some(1) && errors.contains("INFINIBAND (number 247)"), "{errors}");
}

/// The lines are longer than the memory that the process may use.
#[test]
fn overlong_lines_of_hex_text_are_refused_in_bounded_memory() {
    const MESSAGE: &str = "00000001 00000001 00000020 00000000 00000000 00000000 00000000";
    let limited = concat!("ulimit -v 131072; exec ", env!("CARGO_BIN_EXE_rpcrdma"), " decode");
    let mut child = Command::new("sh");
    let child = child.args(["-c", limited]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().expect("a shell");
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || {
        let long = "0".repeat(1 << 20);
        let mut write = |text: &str| stdin.write_all(text.as_bytes());
        for start in ["# ", ""] {
            write(start)?;
            (0..128).try_for_each(|_| write(&long))?;
            write("\n")?;
        }
        write(&format!("{MESSAGE}\n"))
    });
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    let [too_long, message] = lines[..] else { panic!("{output:?}") };
    let expected = "error bad_hex: line exceeds 6291456 bytes: hex text has one message per line";
    assert_eq!((too_long, message), (expected, "v1 MSG xid=0x00000001 credit=0x20"));
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(1), &[][..]));
    writer.join().expect("writer").expect("all input is read");
}

/// A reader that exits early, as `head` does, does not cause a failure or a message.
#[test]
fn a_reader_that_exits_early_is_not_an_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
        .args(["decode", "--json", CAPTURE])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut stdout = child.stdout.take().expect("piped");
    stdout.read_exact(&mut [0; 16]).expect("some output");
    drop(stdout);
    let output = child.wait_with_output().expect("the binary ends");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}
