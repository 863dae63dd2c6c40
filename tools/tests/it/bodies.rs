//! Arguments and results in `rpcrdma decode`, and definitions that it shares with the services.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use xdrgen::schema::{Eligible, Run, Schema};
use xdrgen::{Source, parse};

use crate::decode::{CAPTURE, IWARP, objects, run};

/// Definition and placement of a program with every form of type.
const PROT: [(&str, &str); 2] = [
    (
        "prot.x",
        "
        enum color { RED = 1, BLUE = -2 };
        struct node { int id; node *next; };
        union choice switch (color which) { case RED: hyper big; case BLUE: void; };
        union other switch (unsigned code) { case 7: opaque pair[2]; default: bool on; };
        struct all {
            unsigned hyper wide; float real; double precise; string name<8>; opaque blob<>; color colors<>;
            node *list; choice first; other second; other third; unsigned *maybe; unsigned *never;
        };
        typedef opaque data<>;
        program PROT { version ONE {
            all ALL(all) = 1;
            data TWO(unsigned, data) = 2;
            data READ(void) = 3;
            void WRITE(data) = 4;
        } = 1; } = 0x20000001;
        ",
    ),
    (
        "prot.placement.toml",
        "eligible = [\"data\"]\nbounds = { data = 1000 }\nONE.ALL = { max_call = 64, max_reply = 64 }\n",
    ),
];

const HEADER: &str = "00000001 00000001 00000020 00000000";
const NO_CHUNKS: &str = "00000000 00000000 00000000";

fn call(procedure: u32, lists: &str, args: &str) -> String {
    let credentials = "00000000 00000000 00000000 00000000";
    let rpc = format!("00000001 00000000 00000002 20000001 00000001 {procedure:08x} {credentials}");
    format!("{HEADER} {lists} {rpc} {args}\n")
}

fn reply(lists: &str, results: &str) -> String {
    format!("{HEADER} {lists} 00000001 00000001 00000000 00000000 00000000 00000000 {results}\n")
}

/// Decodes `input`. Returns the exit status, and the body of the last message as text and as JSON.
fn decode(input: &str) -> (i32, String, Value) {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, text) in PROT {
        fs::write(directory.path().join(name), text).expect("a file");
    }
    let file = directory.path().join("prot.x");
    let file = file.to_str().expect("UTF-8");
    let (status, lines, errors) = run(&["decode", "--xdr", file], input);
    let (_, json, _) = run(&["decode", "--json", "--xdr", file], input);
    let last = lines.last().unwrap_or_else(|| panic!("{errors}"));
    let text = last.rsplit(" | ").next().expect("one part").to_owned();
    (status, text, objects(&json).pop().expect("a message")["body"].clone())
}

#[test]
fn every_form_of_type_is_decoded() {
    let args = "\
        00000001 00000000 3fc00000 c004000000000000 00000003 6122620a 00000041 \
        0101010101010101010101010101010101010101010101010101010101010101\
        0101010101010101010101010101010101010101010101010101010101010101 02000000 \
        00000006 00000001 fffffffe 00000001 00000001 00000001 00000001 \
        00000001 00000005 00000001 fffffffa 00000000 \
        00000001 ffffffffffffffff 00000007 abcd0000 00000008 00000001 00000001 00000009 00000000";
    // The string has three bytes. Its padding is not zero, which is not checked.
    let (status, text, body) = decode(&call(1, NO_CHUNKS, args));
    let ones = "01".repeat(64);
    assert_eq!(
        text,
        format!(
            "ALL wide=4294967296 real=1.5 precise=-2.5 name=\"a\\\"b\" blob={{bytes=65 first=0x{ones}}} \
             colors=[RED BLUE RED RED {{more=2}}] list=[{{id=5}} {{id=-6}}] first={{which=RED big=-1}} \
             second={{code=7 pair=0xabcd}} third={{code=8 on=true}} maybe=9 never=none"
        )
    );
    assert_eq!(status, 0);
    assert_eq!((&body["procedure"], &body["error"]), (&json!("ALL"), &Value::Null));
    assert_eq!(body["arguments"]["blob"], json!({"bytes": 65, "first": format!("0x{ones}")}));
    assert_eq!(body["arguments"]["colors"][4], json!({"more": 2}));
}

#[test]
fn several_arguments_are_an_array_and_none_an_empty_object() {
    let (status, text, body) = decode(&call(2, NO_CHUNKS, "00000005 00000001 ff000000"));
    assert_eq!((status, text.as_str()), (0, "TWO [5 0xff]"));
    assert_eq!(body["arguments"], json!([5, "0xff"]));
    let (status, text, body) = decode(&(call(4, NO_CHUNKS, "00000000") + &reply(NO_CHUNKS, "")));
    assert_eq!((status, text.as_str()), (0, "WRITE"));
    assert_eq!(body, json!({"procedure": "WRITE", "results": {}, "error": null}));
}

#[test]
fn data_in_chunks_is_shown_by_its_length() {
    // The argument has five bytes at position 48, and the chunk may include padding. Other lengths and positions are
    // errors.
    let read =
        |position: u32, len: u32| format!("00000001 {position:08x} 00000009 {len:08x} 00000000 00000000 {NO_CHUNKS}");
    let (status, text, _) = decode(&call(2, &read(48, 8), "00000005 00000005"));
    assert_eq!((status, text.as_str()), (0, "TWO [5 {bytes=5 chunk=read}]"));
    let (status, text, _) = decode(&call(2, &read(48, 9), "00000005 00000005"));
    assert_eq!(
        (status, text.as_str()),
        (1, "TWO [5] error bad_body: item of 5 bytes in a read chunk of 9 bytes at byte 44")
    );
    let (status, text, _) = decode(&call(2, &read(52, 5), "00000005 00000000"));
    assert!(text.ends_with("error bad_body: no item at position 52 of a Read chunk at byte 48"), "{text}");
    assert_eq!(status, 1);

    // The result is in a Write chunk, inline after an unused Write chunk, or in a Reply chunk with the whole reply.
    let write = |len: u32| format!("00000000 00000001 00000001 00000009 {len:08x} 00000000 00000000 00000000 00000000");
    let call_with_chunk = call(3, &write(64), "");
    let (status, text, body) = decode(&(call_with_chunk.clone() + &reply(&write(6), "00000006")));
    assert_eq!((status, text.as_str()), (0, "READ bytes=6 chunk=write"));
    assert_eq!(body["results"], json!({"bytes": 6, "chunk": "write"}));
    let (status, text, _) = decode(&(call_with_chunk.clone() + &reply(&write(0), "00000001 ee000000")));
    assert_eq!((status, text.as_str()), (0, "READ 0xee"));
    let nomsg =
        "00000001 00000001 00000020 00000001 00000000 00000000 00000001 00000001 00000009 00000070 00000000 00000000";
    let (status, text, _) = decode(&(call_with_chunk + nomsg));
    assert_eq!((status, text.as_str()), (0, "READ bytes=112 chunk=reply"));
}

#[test]
fn errors_of_malformed_bodies_name_field_and_position() {
    let bad = |args: &str| {
        let (status, text, body) = decode(&call(1, NO_CHUNKS, args));
        assert_eq!((status, body["error"].is_string()), (1, true));
        text
    };
    assert_eq!(bad("00000001"), "ALL error bad_body: wide: needs 8 bytes, 4 are left at byte 40");
    let front = "0000000000000000 00000000 0000000000000000";
    let text = bad(&format!("{front} 00000009"));
    assert_eq!(text, "ALL wide=0 real=0.0 precise=0.0 error bad_body: name: length 9 exceeds 8 at byte 60");
    let text = bad(&format!("{front} 00000000 00000000 00000002 00000001 00000000"));
    assert!(text.ends_with("blob=0x colors=[RED] error bad_body: colors: invalid color 0 at byte 76"), "{text}");
    let text = bad(&format!("{front} 00000000 00000000 00000000 00000001 00000001 00000007"));
    assert!(text.ends_with("list=[{id=1}] error bad_body: list: invalid bool 7 at byte 80"), "{text}");
    let text = bad(&format!("{front} 00000000 00000000 ffffffff 00000001"));
    assert!(text.contains("colors: needs 4 bytes, 0 are left"), "{text}");
    let (status, text, _) = decode(&call(4, NO_CHUNKS, "00000000 00000000"));
    assert_eq!((status, text.as_str()), (1, "WRITE 0x error bad_body: 4 extra bytes at byte 44"));
}

#[test]
fn bodies_that_are_elsewhere_or_unknown_are_omitted() {
    // A message of version 2 may be continued in the next one.
    let continued = call(1, "00000002 00000000 00000000 00000000 00000000", "00000000")
        .replace("00000001 00000020", "00000002 00000020");
    let (status, text, body) = decode(&continued);
    assert_eq!((status, text.as_str()), (0, "ALL continued in the next message"));
    assert_eq!(body["error"], "continued in the next message");
    let protected = call(1, NO_CHUNKS, "00000000").replace("00000001 00000001 00000000", "00000001 00000001 00000006");
    // A protected call, or one in a Read chunk, replaces an earlier call with its XID.
    let earlier = call(4, NO_CHUNKS, "00000000");
    let long = format!(
        "00000001 00000001 00000020 00000001 00000001 00000000 00000009 00000064 00000000 00000000 {NO_CHUNKS}\n"
    );
    for replacement in [&protected, &long] {
        let (status, _, body) = decode(&format!("{earlier}{replacement}{}", reply(NO_CHUNKS, "")));
        assert_eq!((status, body), (0, Value::Null), "{replacement}");
    }
    // The body is protected by RPCSEC_GSS, the call is missing, the procedure is unknown, or the call failed.
    let failed = reply(NO_CHUNKS, "").replace("00000000 \n", "00000004\n");
    for input in [protected, reply(NO_CHUNKS, ""), call(9, NO_CHUNKS, ""), call(4, NO_CHUNKS, "00000000") + &failed] {
        let (status, _, body) = decode(&input);
        assert_eq!((status, body), (0, Value::Null), "{input}");
    }
}

#[test]
fn bad_definitions_are_reported_with_their_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("bad.x");
    fs::write(&file, "struct {").expect("a file");
    let (status, _, errors) = run(&["decode", "--xdr", file.to_str().expect("UTF-8")], "");
    assert!(status == 1 && errors.contains("bad.x"), "{errors}");
    let (status, _, errors) = run(&["decode", "--xdr", "/nonexistent.x"], "");
    assert!(status == 1 && errors.contains("/nonexistent.x: No such file"), "{errors}");
}

/// The captures also have calls of program 100227, whose bodies cannot be decoded.
#[test]
fn all_bodies_of_known_programs_in_captures_are_decoded() {
    for (capture, known, bodies) in [(CAPTURE, 448, 448), (IWARP, 110, 110)] {
        let (status, lines, _) = run(&["decode", "--json", capture], "");
        let objects = objects(&lines);
        let found: Vec<&Value> = objects.iter().map(|object| &object["body"]).filter(|body| !body.is_null()).collect();
        assert_eq!((status, found.len()), (0, bodies));
        assert_eq!(found.iter().filter(|body| body["error"].is_null()).count(), known);
        for object in &objects {
            let (reads, body) = (&object["reads"], &object["body"]);
            if body["procedure"] == "NFSPROC3_WRITE" && body["arguments"].is_object() {
                let bytes: u64 =
                    reads.as_array().expect("a list").iter().filter_map(|read| read["length"].as_u64()).sum();
                let data = &body["arguments"]["data"];
                assert!(bytes == 0 || *data == json!({"bytes": bytes, "chunk": "read"}), "{object}");
            }
        }
    }
    let (_, lines, _) = run(&["decode", IWARP], "");
    let frame = |number: &str| lines.iter().find(|line| line.starts_with(number)).expect("a frame");
    assert!(
        frame("46 ").ends_with(
            "NFSPROC3_WRITE file={data=0x01000101000000009a338bd50300000000000000} offset=0 count=5000 \
             stable=FILE_SYNC data={bytes=5000 chunk=read}"
        ),
        "{}",
        frame("46 ")
    );
    assert!(frame("27 ").contains("NFSPROC3_LOOKUP status=NFS3ERR_NOENT resfail={dir_attributes="), "{}", frame("27 "));
}

/// Parses a definition of the repository, with its placement file, if any.
fn schema(file: &str) -> Schema {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let source = |path: &Path| fs::read_to_string(path).map(|text| Source { name: file.to_owned(), text });
    let placement = source(&path.with_extension("placement.toml")).ok();
    parse(&source(&path).expect("a file"), placement.as_ref()).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn rfc_8267_4_sizes_and_placement_of_nfs3() {
    let schema = schema("tools/nfs3d/nfs3.x");
    let procedures = &schema.programs[0].versions[0].procedures;
    // Inline bytes of arguments and results, added up by hand from RFC 1813 §3.3, for handles of 64 bytes, names of
    // 255 bytes and directories of 64 KiB.
    let sizes: [[u32; 2]; 22] = [
        [0, 0],
        [68, 88],
        [140, 120],
        [328, 248],
        [72, 96],
        [68, 96],
        [80, 104],
        [88, 136],
        [392, 280],
        [388, 280],
        [392, 280],
        [400, 280],
        [328, 120],
        [328, 120],
        [656, 236],
        [396, 208],
        [88, 92 + 65536],
        [92, 92 + 65536],
        [68, 144],
        [68, 140],
        [68, 116],
        [80, 128],
    ];
    assert_eq!((schema.programs[0].number, procedures.len()), (100_003, sizes.len()));
    for (procedure, sizes) in procedures.iter().zip(sizes) {
        let (number, placement) = (procedure.number, &procedure.placement);
        assert_eq!([placement.max_call, placement.max_reply], sizes, "{}", procedure.name.text);
        let eligible = |found: Option<Eligible>| found.map(|found| (found.count, found.max_len));
        let expected = match number {
            // READLINK (5) and SYMLINK (10) have the type nfspath3.
            5 => [None, Some((1, 8192))],
            6 => [None, Some((1, 1 << 20))],
            7 => [Some((1, 1 << 20)), None],
            // The server reads longer paths than it accepts, because the protocol has a status for them.
            10 => [Some((1, 8192)), None],
            _ => [None, None],
        };
        assert_eq!([placement.arguments, placement.results].map(eligible), expected, "{}", procedure.name.text);
        assert_eq!(placement.cached, matches!(number, 2 | 7..=15), "{}", procedure.name.text);
        assert_eq!(placement.max_inline_result, (number == 6).then_some(3940), "{}", procedure.name.text);
    }
    // The head consists of status, attributes with their flag, count and eof, and length.
    assert_eq!(procedures[6].placement.head, 4 + 88 + 8 + 4);
}

#[test]
fn definitions_of_all_programs_have_all_procedures() {
    let procedures = |file: &str| {
        let schema = schema(file);
        let versions = schema.programs.iter().flat_map(|program| &program.versions);
        versions.map(|version| version.procedures.len()).collect::<Vec<_>>()
    };
    assert_eq!(procedures("tools/nfs3d/mount.x"), [6]);
    assert_eq!(procedures("tools/rpcbind/rpcbind.x"), [6, 9, 13]);
    assert_eq!(procedures("tools/blockstore/blockstore.x"), [5]);
    assert_eq!(procedures("tests/src/bin/nfs41c/nfs41.x"), [2, 2]);
    assert_eq!(procedures("bench/rpcperf.x"), [9]);
    let blocks = schema("tools/blockstore/blockstore.x");
    let deferred =
        blocks.programs[0].versions[0].procedures.iter().map(|procedure| procedure.placement.run == Run::Deferred);
    assert_eq!(deferred.collect::<Vec<_>>(), [false, false, true, true, true]);
}
