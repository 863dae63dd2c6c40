//! `blockstore` as its users run it: whole transfers, bad input, and the sudden end of either side.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rpcrdma::client::{ClientCall, ClientConfig};
use rpcrdma::fabric::testing::loopback_address;
use rpcrdma::typed::{Response, Signature};
use rpcrdma::{Buf, CallError, LocalClient, Refusal};
use rustix::process::{Pid, Resource, Rlimit, Signal};
use rustix::thread::CpuSet;
use serde_json::Value;
use tempfile::TempDir;

#[path = "../../src/protocol.rs"]
mod protocol;
mod refused;

use protocol::blockstore_v1::{self, Flush, Read, Write};
use protocol::{Info, ReadData, Status, Written};

/// How a server may move blocks.
const WAYS: [&[&str]; 3] = [&["--io", "uring"], &["--io", "uring", "--buffered"], &["--io", "threads"]];

const PROGRAM: &str = env!("CARGO_BIN_EXE_blockstore");

/// An address of this test's own, on the fabric of `RPCRDMA_FABRIC`: `soft` (default) or `iwarp`.
fn address() -> String {
    let unique = loopback_address().0;
    match std::env::var("RPCRDMA_FABRIC").as_deref() {
        Ok("iwarp") => format!("iwarp:{unique}"),
        _ => format!("soft:blockstore-test-{unique}"),
    }
}

fn name(address: &str) -> &str {
    address.split_once(':').expect("a scheme").1
}

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().expect("it runs")
}

#[track_caller]
fn succeeds(arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = run(arguments);
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{arguments:?}: {status}: {stderr}");
    String::from_utf8(stdout).expect("text")
}

/// Exits with 1, and says all of `words` on standard error.
#[track_caller]
fn fails(arguments: &[&str], words: &[&str]) {
    says(&run(arguments), words);
}

#[track_caller]
fn says(output: &Output, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{word:?} is not in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// A server in a process of its own; killed when dropped.
struct Store {
    child: Child,
    says: BufReader<ChildStdout>,
    address: String,
    /// What it has said of itself once it listened.
    listens: String,
}

impl Store {
    /// Serves `file`, and waits until it listens.
    fn serve(file: &Path, arguments: &[&str]) -> Self {
        Self::serve_by(&mut Command::new(PROGRAM), file, arguments)
    }

    /// The same by a command that becomes the program which its further arguments are for.
    fn serve_by(command: &mut Command, file: &Path, arguments: &[&str]) -> Self {
        let address = address();
        let mut child = command
            .args(["serve", "--listen", &address, "--file"])
            .arg(file)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut says = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        says.read_line(&mut line).expect("text");
        assert!(line.starts_with(&format!("listening on {address}:")), "{line}");
        Self { child, says, address, listens: line }
    }

    /// Sends a signal, waits for the end, and returns what was said.
    fn stop(mut self, signal: Signal) -> String {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).expect("it runs");
        let mut rest = String::new();
        self.says.read_to_string(&mut rest).expect("text");
        let status = self.child.wait().expect("it can be waited for");
        assert!(status.success(), "{status}");
        rest
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// A file of pseudo-random bytes.
fn random_file(path: &Path, size: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; size];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    std::fs::write(path, &bytes).expect("a file is written");
    bytes
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[test]
fn the_demo_copies_and_verifies() {
    let dir = directory();
    let size = std::env::var("BLOCKSTORE_DEMO_SIZE").unwrap_or_else(|_| "64M".into());
    let said = succeeds(&["demo", "--size", &size, "--dir", text(dir.path())]);
    for word in ["copied", "flushed", "verified", "software fabric", "equal to the source's", "drained", " 0 refused"] {
        assert!(said.contains(word), "{word:?} is not in: {said}");
    }
    assert_eq!(dir.path().read_dir().expect("a directory").count(), 0, "it cleans up");
}

/// The first and the last core that this process may have, which need not be those of the machine; one twice if there
/// is one.
fn cores() -> [String; 2] {
    let all = rustix::thread::sched_getaffinity(None).expect("the cores");
    let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).collect();
    [cores.first(), cores.last()].map(|core| core.expect("a core").to_string())
}

#[test]
fn compare_has_a_row_for_each_of_both() {
    let dir = directory();
    let json = dir.path().join("rows.json");
    fails(&["compare", "--only", "depth 1,"], &["--only", "depth 1,", "4 KiB random reads, depth 1"]);
    if Command::new("fio").arg("--version").output().is_err() {
        println!("not run: there is no fio (apt-get install fio)");
        return;
    }
    let name = "1 MiB sequential writes, depth 8";
    let [first, last] = &cores();
    let options = ["compare", "--rounds", "1", "--size", "16M", "--only", name, "--dir", text(dir.path())];
    let cores = ["--server-core", first, "--client-core", last];
    let said = succeeds(&[&options[..], &cores, &["--json", text(&json)]].concat());
    let rows = std::fs::read_to_string(&json).expect("the rows");
    let rows: Vec<Value> = serde_json::from_str(&rows).expect("JSON");
    // The other one is there whatever is asked for.
    assert_eq!([&rows[0]["name"], &rows[1]["name"]], [name, "processor time of a 4 KiB read, µs"], "{rows:?}");
    assert_eq!(rows.len(), 2, "{rows:?}");
    for row in &rows {
        let [fio, blockstore, ratio] = ["fio", "blockstore", "ratio"].map(|key| row[key].as_f64().expect("a number"));
        // Numbers are read back but for their last bit.
        let is_ratio = (ratio - blockstore / fio).abs() < ratio * 1e-9;
        assert!(fio > 0.0 && blockstore > 0.0 && is_ratio, "{row}");
    }
    let words = [&format!("| {name} | "), "16777216 bytes; 1 rounds", "fio-", "processor time of one of the"];
    for word in words {
        assert!(said.contains(word), "{word:?} is not in: {said}");
    }
    drop(std::fs::remove_file(json));
    assert_eq!(dir.path().read_dir().expect("a directory").count(), 0, "it cleans up");
}

#[test]
fn printing_the_configuration_touches_no_file() {
    let dir = directory();
    let file = dir.path().join("store");
    for size in [&["--size", "1M"][..], &[]] {
        let printed = succeeds(&[&["serve", "--file", text(&file), "--print-config"], size].concat());
        assert!(printed.contains("[memory]"), "{printed}");
        assert!(!file.exists());
    }
    assert!(succeeds(&["--version"]).starts_with("blockstore "));
}

#[test]
fn only_holders_of_the_key_are_served() {
    let dir = directory();
    let [source, file, key, other, short] =
        ["source", "store", "key", "other", "short"].map(|name| dir.path().join(name));
    random_file(&source, 100_000, 1);
    random_file(&key, 32, 2);
    random_file(&other, 32, 3);
    random_file(&short, 15, 4);
    for key in [&key, &other, &short] {
        std::fs::set_permissions(key, PermissionsExt::from_mode(0o600)).expect("our file");
    }
    let store = Store::serve(&file, &["--size", "1M", "--host-key", text(&key)]);
    for with in ["copy", "verify"] {
        succeeds(&[with, text(&source), &store.address, "--host-key", text(&key)]);
    }
    fails(&["copy", text(&source), &store.address, "--host-key", text(&other)], &["error"]);
    fails(&["copy", text(&source), &store.address], &["requires a host key", "--host-key"]);
    fails(&["copy", text(&source), &store.address, "--host-key", text(&short)], &["--host-key", "15 bytes"]);
    // A server that does not prove who it is gets nothing.
    let open = Store::serve(&dir.path().join("open"), &["--size", "1M"]);
    fails(&["copy", text(&source), &open.address, "--host-key", text(&key)], &["error"]);
    store.stop(Signal::TERM);
}

#[test]
fn odd_sizes_arrive_whole_and_nothing_else_changes() {
    let dir = directory();
    let (source, file) = (dir.path().join("source"), dir.path().join("store"));
    let bytes = random_file(&source, 3_000_017, 1);
    let before = random_file(&file, 3_500_001, 2);
    let ways: &[(&str, &str, &[&str])] = &[
        ("4093", "7", &["--io", "threads", "--workers", "2"]),
        ("1M", "3", &["--io", "threads", "--workers", "0"]),
        ("1", "32", &["--io", "threads"]),
        ("4093", "7", &[]),
        ("4K", "32", &["--ring", "2"]),
        ("1M", "3", &["--idle", "event"]),
        ("10K", "9", &["--buffered", "--idle", "event"]),
        ("1", "32", &[]),
    ];
    for &(block, depth, way) in ways {
        // One byte at a time is for a short file only.
        let bytes = if block == "1" { &bytes[..5001] } else { &bytes };
        std::fs::write(&source, bytes).expect("the source");
        std::fs::write(&file, &before).expect("the store");
        let store = Store::serve(&file, way);
        succeeds(&["copy", text(&source), &store.address, "--block", block, "--depth", depth]);
        let said = succeeds(&["verify", text(&source), &store.address, "--block", "5003", "--seed", "9"]);
        assert!(said.contains("equal to the source's"), "{said}");
        let said = store.stop(Signal::TERM);
        assert!(said.contains("drained") && said.contains(" 0 refused"), "{said}");
        let after = std::fs::read(&file).expect("the store");
        assert!(after[..bytes.len()] == *bytes, "{way:?}, blocks of {block}: as the source");
        assert!(after[bytes.len()..] == before[bytes.len()..], "{way:?}, blocks of {block}: the rest as it was");
    }
}

#[test]
fn verify_names_the_block_that_differs() {
    let dir = directory();
    let (source, file) = (dir.path().join("source"), dir.path().join("store"));
    let mut bytes = random_file(&source, 1 << 20, 3);
    bytes[700_000] ^= 1;
    std::fs::write(&file, &bytes).expect("the store");
    let store = Store::serve(&file, &[]);
    // 700 000 is in the block from 10 * 65536 on.
    fails(&["verify", text(&source), &store.address], &["65536 bytes at 655360", "checksum"]);
}

/// A client that sends what a well-behaved one would not.
struct Raw(LocalClient);

type Answer<T> = Result<Result<T, Status>, CallError>;

/// The data of a block in a call.
#[derive(Clone, Copy, Debug)]
enum Sent {
    /// In a Read chunk at this byte.
    At(usize),
    Inline,
}

/// In a Read chunk behind its length.
const CHUNK: Sent = Sent::At(12);

impl Raw {
    const BLOCK_MAX: usize = 1 << 20;
    /// Most bytes that a READ returns without a Write chunk.
    const MOST_INLINE: usize = 4032;

    fn connect(store: &Store) -> Self {
        let mut config = ClientConfig::new(blockstore_v1::PROGRAM, blockstore_v1::VERSION);
        config.shard.memory.bulk_buffers = vec![(2 * Self::BLOCK_MAX, 2)];
        Self(LocalClient::connect(&store.address.parse().expect("an address"), config).expect("it connects"))
    }

    fn buffer(&mut self, len: usize) -> Buf {
        let first = self.0.first();
        self.0.alloc(first, len).expect("memory")
    }

    fn prepare(&mut self, procedure: u32, args: &[u8]) -> ClientCall {
        let mut call = self.0.prepare(procedure, args.len()).expect("a buffer");
        call.args_mut().write_all(args).expect("room");
        call.timeout(Duration::from_secs(60))
    }

    fn call<P: Signature>(&mut self, call: ClientCall) -> Result<Response<P>, CallError> {
        Ok(Response::of(self.0.call(call).map_err(|failed| failed.error)?))
    }

    fn info(&mut self) -> Answer<Info> {
        let call = self.prepare(blockstore_v1::Info::NUMBER, &[]);
        Ok(self.call::<blockstore_v1::Info>(call)?.results().expect("results").into_result())
    }

    fn flush(&mut self) -> Result<Status, CallError> {
        let call = self.prepare(Flush::NUMBER, &[]);
        Ok(self.call::<Flush>(call)?.results().expect("results"))
    }

    /// Reads `count` bytes into a Write chunk of `room` bytes, or inline: whether they end the store, and the bytes.
    fn read(&mut self, offset: u64, count: u32, room: Option<usize>) -> Answer<(bool, Vec<u8>)> {
        let mut call = self.prepare(Read::NUMBER, &words(offset, count));
        call = match room {
            Some(room) => call.write_chunk_into(self.buffer(room)),
            None => call.expect_reply(12 + Self::MOST_INLINE),
        };
        let response = self.call::<Read>(call)?;
        let result = response.results().expect("results").into_result();
        let result = result.map(|ReadData { eof, data }| (eof, data.bytes().to_vec()));
        let chunk = response.into_reply().chunk(0).map(<[u8]>::to_vec);
        let read = result.as_ref().map_or_else(|_| Vec::new(), |(_, data)| data.clone());
        assert_eq!(chunk, room.map(|_| read), "data is where there is room for it");
        Ok(result)
    }

    /// A call to write `data`; says that it is `count` bytes.
    fn write_call(&mut self, offset: u64, count: u32, data: &[u8], sent: Sent) -> ClientCall {
        let mut args = words(offset, count);
        match sent {
            Sent::Inline => {
                args.extend_from_slice(data);
                args.resize(args.len().next_multiple_of(4), 0);
                self.prepare(Write::NUMBER, &args)
            }
            Sent::At(at) => {
                let mut chunk = self.buffer(data.len());
                chunk.copy_from_slice(data);
                self.prepare(Write::NUMBER, &args).read_chunk(at, chunk)
            }
        }
    }

    fn write(&mut self, offset: u64, count: u32, data: &[u8], sent: Sent) -> Answer<Written> {
        let call = self.write_call(offset, count, data, sent);
        Ok(self.call::<Write>(call)?.results().expect("results").into_result())
    }
}

/// The answer to a READ.
fn data(eof: bool, bytes: &[u8]) -> Answer<(bool, Vec<u8>)> {
    Ok(Ok((eof, bytes.to_vec())))
}

/// The bytes of an offset and a count.
fn words(offset: u64, count: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &count.to_be_bytes()].concat()
}

#[test]
fn reads_end_where_the_store_ends() {
    for way in WAYS {
        read_to_the_end(way);
    }
}

fn read_to_the_end(way: &[&str]) {
    let dir = directory();
    let file = dir.path().join("store");
    let bytes = random_file(&file, 100_003, 4);
    let store = Store::serve(&file, way);
    let mut raw = Raw::connect(&store);
    let size = bytes.len() as u64;
    assert_eq!(raw.info(), Ok(Ok(Info { size, block_max: Raw::BLOCK_MAX as u32, writable: true })));

    assert_eq!(raw.read(1, 7, Some(7)), data(false, &bytes[1..8]), "odd offset and length");
    assert_eq!(raw.read(99_999, 4, Some(4)), data(true, &bytes[99_999..100_003]), "the last bytes");
    assert_eq!(raw.read(99_999, 5000, Some(5000)), data(true, &bytes[99_999..100_003]), "short at the end");
    assert_eq!(raw.read(size, 10, Some(10)), data(true, &bytes[0..0]), "at the end");
    assert_eq!(raw.read(0, 0, None), data(false, &bytes[0..0]), "nothing");
    assert_eq!(raw.read(0, 100, Some(10)), data(false, &bytes[0..10]), "less room than asked for");
    let most = Raw::BLOCK_MAX as u32;
    assert_eq!(raw.read(3, most, Some(2 << 20)), data(true, &bytes[3..100_003]), "more room than may be used");
    // Without a Write chunk.
    assert_eq!(raw.read(1, 7, None), data(false, &bytes[1..8]), "odd offset and length");
    assert_eq!(raw.read(99_999, 5000, None), data(true, &bytes[99_999..100_003]), "short at the end");
    assert_eq!(raw.read(size, 10, None), data(true, &bytes[0..0]), "at the end");
    assert_eq!(raw.read(4096, 2048, None), data(false, &bytes[4096..6144]), "blocks of a disk");
    let (eof, most_inline) = raw.read(8192, 65536, None).expect("an answer").expect("a result");
    assert!(!eof && (4000..=Raw::MOST_INLINE).contains(&most_inline.len()), "as much as fits a message");
    assert!(bytes[8192..].starts_with(&most_inline));

    for offset in [size + 1, 1 << 40, u64::MAX] {
        assert_eq!(raw.read(offset, 10, Some(10)), Ok(Err(Status::OutOfRange)), "{offset}");
        assert_eq!(raw.read(offset, 10, None), Ok(Err(Status::OutOfRange)), "{offset}");
    }
    assert_eq!(raw.read(0, most + 1, Some(2 << 20)), Ok(Err(Status::TooLong)));
    assert_eq!(raw.read(0, u32::MAX, Some(10)), Ok(Err(Status::TooLong)));
    assert_eq!(raw.read(0, most + 1, None), Ok(Err(Status::TooLong)));
    assert_eq!(raw.read(0, 10, Some(10)), data(false, &bytes[0..10]), "it still serves");
}

#[test]
fn results_have_the_bytes_of_the_protocol() {
    let dir = directory();
    let file = dir.path().join("store");
    random_file(&file, 7, 18);
    let store = Store::serve(&file, &[]);
    let mut raw = Raw::connect(&store);
    let mut results = |procedure, args: &[u8]| {
        let call = raw.prepare(procedure, args).expect_reply(64);
        raw.0.call(call).expect("a reply").results().to_vec()
    };
    let written = [&words(2, 3)[..], b"abc\0"].concat();
    assert_eq!(results(1, &[]), *b"\0\0\0\0\0\0\0\0\0\0\0\x07\0\x10\0\0\0\0\0\x01", "INFO");
    assert_eq!(results(3, &written), *b"\0\0\0\0\0\0\0\x03\0\0\0\0", "WRITE");
    assert_eq!(results(4, &[]), [0; 4], "FLUSH");
    assert_eq!(results(2, &words(2, 3)), *b"\0\0\0\0\0\0\0\0\0\0\0\x03abc\0", "READ");
    assert_eq!(results(2, &words(8, 3)), [0, 0, 0, 1], "READ beyond the end");
}

#[test]
fn writes_are_whole_or_refused() {
    for way in WAYS {
        write_and_refuse(way);
    }
}

fn write_and_refuse(way: &[&str]) {
    let dir = directory();
    let file = dir.path().join("store");
    let mut bytes = random_file(&file, 2_000_003, 5);
    let store = Store::serve(&file, way);
    let mut raw = Raw::connect(&store);
    let size = bytes.len() as u64;
    let data = vec![0xA5; Raw::BLOCK_MAX + 1];

    let written = |count| Ok(Ok(Written { count, stable: false }));
    assert_eq!(raw.write(5, 7, &data[..7], CHUNK), written(7), "odd offset and length");
    assert_eq!(raw.write(0, 0, &[], Sent::Inline), written(0), "nothing");
    assert_eq!(raw.write(size, 0, &[], Sent::Inline), written(0), "nothing, at the end");
    assert_eq!(raw.write(size - 3, 3, &data[..3], CHUNK), written(3), "the last bytes");
    let most = Raw::BLOCK_MAX;
    assert_eq!(raw.write(1000, most as u32, &data[..most], CHUNK), written(most as u32), "the longest block");
    // Without a Read chunk: in a message, and in a long one.
    assert_eq!(raw.write(20, 7, &data[..7], Sent::Inline), written(7), "odd offset and length");
    assert_eq!(raw.write(1_100_000, 3999, &data[..3999], Sent::Inline), written(3999), "a message");
    assert_eq!(raw.write(1_126_400, 512, &data[..512], Sent::Inline), written(512), "a block of a disk");
    assert_eq!(raw.write(1_200_000, 30_001, &data[..30_001], Sent::Inline), written(30_001), "a long message");
    for range in [20..27, 1_100_000..1_103_999, 1_126_400..1_126_912, 1_200_000..1_230_001] {
        bytes[range].fill(0xA5);
    }
    bytes[5..12].fill(0xA5);
    bytes[2_000_000..].fill(0xA5);
    bytes[1000..1000 + most].fill(0xA5);

    for offset in [size - 2, size, size + 1, u64::MAX] {
        assert_eq!(raw.write(offset, 3, &data[..3], CHUNK), Ok(Err(Status::OutOfRange)), "{offset}");
        assert_eq!(raw.write(offset, 3, &data[..3], Sent::Inline), Ok(Err(Status::OutOfRange)), "{offset}");
    }
    let garbage = Err(CallError::Refused(Refusal::GarbageArguments));
    assert_eq!(raw.write(0, 8, &data[..7], CHUNK), garbage, "less than it says");
    assert_eq!(raw.write(0, 6, &data[..7], CHUNK), garbage, "more than it says");
    assert_eq!(raw.write(0, 7, &data[..7], Sent::At(8)), garbage, "not where it belongs");
    assert_eq!(raw.write(0, 7, &[], Sent::Inline), garbage, "nothing where there should be data");
    assert_eq!(raw.write(0, 4, &data[..8], Sent::Inline), garbage, "more than it says, inline");
    let too_long = raw.write(0, data.len() as u32, &data, CHUNK);
    assert!(matches!(too_long, Err(CallError::Transport(_))), "more than is declared is not fetched: {too_long:?}");

    assert_eq!(raw.flush(), Ok(Status::Ok));
    let refused = |raw: &mut Raw, procedure, args| {
        let call = raw.prepare(procedure, args);
        raw.0.call(call).map(drop).map_err(|failed| failed.error)
    };
    let unavailable = Err(CallError::Refused(Refusal::ProcedureUnavailable));
    assert_eq!(refused(&mut raw, 99, &[]), unavailable);
    let extra = refused(&mut raw, blockstore_v1::Info::NUMBER, &words(0, 0));
    assert_eq!(extra, Err(CallError::Refused(Refusal::GarbageArguments)));
    assert!(raw.info().is_ok(), "it still serves");
    assert!(std::fs::read(&file).expect("the store") == bytes, "only what was accepted was written");
}

#[test]
fn a_sleeping_shard_wakes_for_every_block() {
    let dir = directory();
    let file = dir.path().join("store");
    random_file(&file, 2 << 20, 10);
    for way in [&["--idle", "event"][..], &["--idle", "event", "--buffered"], &["--idle", "adaptive"]] {
        let store = Store::serve(&file, way);
        let start = Instant::now();
        succeeds(&["verify", text(&file), &store.address, "--block", "4K", "--depth", "1"]);
        // One that is missed is found a second later.
        assert!(start.elapsed() < Duration::from_secs(30), "{way:?}: {:?}", start.elapsed());
    }
}

#[test]
fn blocks_that_share_a_page_are_all_there() {
    let dir = directory();
    let file = dir.path().join("store");
    let mut bytes = random_file(&file, 1 << 20, 11);
    let store = Store::serve(&file, &["--cores", &cores().join(",")]);
    let mut clients = [Raw::connect(&store), Raw::connect(&store)];
    let mut rng = fastrand::Rng::with_seed(12);
    for round in 0..200u32 {
        // Of a page, the first half goes past the page cache, the last bytes go through it.
        let page = rng.usize(..4) * 4096;
        let calls = [(0, 2048, 0), (4096 - 100, 100, 1)].map(|(at, len, client)| {
            let data = vec![rng.u8(..); len];
            bytes[page + at..page + at + len].copy_from_slice(&data);
            let sent = if round >> client & 1 == 0 { CHUNK } else { Sent::Inline };
            (client, clients[client].write_call((page + at) as u64, len as u32, &data, sent))
        });
        for (client, call) in calls {
            let Raw(raw) = &mut clients[client];
            raw.start(raw.first(), call, round.into());
            raw.flush();
        }
        for Raw(raw) in &mut clients {
            let mut ended = false;
            while !ended {
                raw.poll(|end| {
                    let response = Response::<Write>::of(end.result.expect("a reply"));
                    let written = response.results().expect("a result").into_result();
                    assert!(written.is_ok(), "{written:?}");
                    ended = true;
                });
            }
        }
    }
    drop(clients);
    store.stop(Signal::TERM);
    assert!(std::fs::read(&file).expect("the store") == bytes);
}

#[test]
fn reads_beyond_a_truncated_file_are_errors() {
    let dir = directory();
    let file = dir.path().join("store");
    let bytes = random_file(&file, 1 << 20, 13);
    for way in [&["--io", "uring"][..], &["--io", "uring", "--buffered"]] {
        std::fs::write(&file, &bytes).expect("the store");
        let store = Store::serve(&file, way);
        let mut raw = Raw::connect(&store);
        File::options().write(true).open(&file).expect("the store").set_len(10_000).expect("it is cut");
        let io_error = Ok(Err(Status::IoError));
        assert_eq!(raw.read(512 << 10, 4096, Some(4096)), io_error, "{way:?}: all of it is gone");
        assert_eq!(raw.read(8192, 4096, Some(4096)), io_error, "{way:?}: the end of it is gone");
        assert_eq!(raw.read(4096, 4096, Some(4096)), data(false, &bytes[4096..8192]), "{way:?}: it is there");
        assert_eq!(raw.write(4096, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{way:?}");
    }
}

#[test]
fn a_write_that_fails_in_the_middle_is_an_error_and_nothing_ends() {
    let dir = directory();
    let file = dir.path().join("store");
    let bytes = random_file(&file, 1 << 20, 14);
    for way in [&["--io", "uring"][..], &["--io", "uring", "--buffered"], &["--io", "threads"]] {
        let mut store = Store::serve_by(Command::new(PROGRAM).stderr(Stdio::piped()), &file, way);
        let mut raw = Raw::connect(&store);
        // No file of this process may get longer, nor be written to behind there.
        let limit = Rlimit { current: Some(512 << 10), maximum: Some(512 << 10) };
        rustix::process::prlimit(Some(Pid::from_child(&store.child)), Resource::Fsize, limit).expect("it is limited");
        let beyond = raw.write((512 << 10) - 4096, 8192, &bytes[..8192], CHUNK);
        assert_eq!(beyond, Ok(Err(Status::IoError)), "{way:?}");
        assert_eq!(raw.write(0, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{way:?}");
        assert_eq!(raw.read(700_000, 10, Some(10)), data(false, &bytes[700_000..700_010]), "{way:?}");
        drop(raw);
        let stderr = store.child.stderr.take().expect("piped");
        store.stop(Signal::TERM);
        let errors = std::io::read_to_string(stderr).expect("text");
        let limit =
            "write: File too large (os error 27) (RLIMIT_FSIZE is 524288 bytes; `ulimit -f unlimited` lifts it)";
        assert!(errors.contains(limit), "{way:?}: {errors}");
    }
}

/// What 100 bytes are answered with.
const WRITTEN: Written = Written { count: 100, stable: false };

#[test]
fn a_read_only_store_stays_as_it_is() {
    let dir = directory();
    let (source, file) = (dir.path().join("source"), dir.path().join("store"));
    random_file(&source, 5000, 6);
    let bytes = random_file(&file, 5000, 7);
    let store = Store::serve(&file, &["--read-only"]);
    let mut raw = Raw::connect(&store);
    assert!(!raw.info().expect("an answer").expect("a result").writable);
    assert_eq!(raw.write(0, 3, &[1; 3], CHUNK), Ok(Err(Status::ReadOnly)));
    fails(&["copy", text(&source), &store.address], &["read-only"]);
    succeeds(&["verify", text(&file), &store.address]);
    assert!(std::fs::read(&file).expect("the store") == bytes);
}

#[test]
fn impossible_options_are_refused_before_any_work() {
    let dir = directory();
    let (small, large, none) = (dir.path().join("small"), dir.path().join("large"), dir.path().join("none"));
    random_file(&large, 10_000, 8);
    let bytes = random_file(&small, 9_999, 9);
    let store = Store::serve(&small, &[]);
    let nobody = address();
    let (small, large, none) = (text(&small), text(&large), text(&none));

    fails(&["copy", large, &store.address], &["10000 bytes", "9999"]);
    fails(&["verify", large, &store.address], &["10000 bytes", "9999"]);
    fails(&["copy", small, &store.address, "--block", "2M"], &["2097152", "1048576"]);
    fails(&["copy", none, &store.address], &[none, "No such file"]);
    fails(&["copy", small, &nobody], &["nobody listens", name(&nobody)]);
    fails(&["serve", "--file", none, "--listen", &nobody], &[none, "No such file", "--size"]);
    fails(&["serve", "--file", text(dir.path()), "--listen", &nobody, "--read-only"], &["not a regular file"]);
    fails(&["serve", "--file", large, "--size", "9999", "--listen", &nobody], &["10000", "9999"]);
    fails(&["serve", "--file", none, "--size", "4000000T", "--listen", &nobody], &["fallocate", "4398046511104000000"]);
    // The address of the one, then the file of the other.
    fails(&["serve", "--file", large, "--listen", &store.address], &[name(&store.address), "in use"]);
    fails(&["serve", "--file", small, "--listen", &nobody], &[small, "another process has locked it"]);

    assert!(std::fs::read(small).expect("the store") == bytes);
    let said = store.stop(Signal::INT);
    assert!(said.contains("drained"), "{said}");
}

/// A copy that takes long: many small blocks, most of them of a hole.
struct LongCopy {
    dir: TempDir,
    source: PathBuf,
    file: PathBuf,
    size: &'static str,
}

impl LongCopy {
    fn new() -> Self {
        let dir = directory();
        let (source, file) = (dir.path().join("source"), dir.path().join("store"));
        let long = File::create(&source).expect("a file");
        long.write_all_at(b"begin", 0).expect("its begin");
        long.set_len(256 << 20).expect("its length");
        Self { dir, source, file, size: "256M" }
    }

    /// Starts the copy, and waits until its first block has arrived.
    fn start(&self, store: &Store) -> Child {
        let mut child = Command::new(PROGRAM)
            .args(["copy", text(&self.source), &store.address, "--block", "512", "--depth", "8"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        let file = File::open(&self.file).expect("the store");
        let mut begin = [0; 5];
        while begin != *b"begin" {
            assert_eq!(child.try_wait().expect("it was started"), None, "it has not failed");
            file.read_exact_at(&mut begin, 0).expect("the store");
            std::thread::yield_now();
        }
        child
    }
}

#[test]
fn a_copy_whose_server_is_killed_reports_it() {
    let long = LongCopy::new();
    let mut store = Store::serve(&long.file, &["--size", long.size]);
    let copy = long.start(&store);
    store.child.kill().expect("SIGKILL");
    store.child.wait().expect("it ends");
    let output = copy.wait_with_output().expect("it ends");
    says(&output, &["WRITE stopped after", "of 524288 blocks", "connection lost", "the server has ended"]);

    // The address and the file are free again.
    fails(&["copy", text(&long.source), &store.address], &["nobody listens", name(&store.address)]);
    let again = Store::serve(&long.file, &[]);
    assert_eq!(Raw::connect(&again).info().expect("an answer").expect("a result").size, 256 << 20);
    drop(long.dir);
}

#[test]
fn a_server_outlives_a_killed_client() {
    let long = LongCopy::new();
    let store = Store::serve(&long.file, &["--size", long.size]);
    let mut raw = Raw::connect(&store);
    let mut copy = long.start(&store);
    copy.kill().expect("SIGKILL");
    copy.wait().expect("it ends");
    assert_eq!(raw.read(0, 5, Some(5)), data(false, b"begin"));
    drop(raw);
    let said = store.stop(Signal::TERM);
    assert!(said.contains("drained"), "{said}");
}

#[test]
fn a_stopped_server_ends_a_copy_in_order() {
    let long = LongCopy::new();
    let store = Store::serve(&long.file, &["--size", long.size]);
    let copy = long.start(&store);
    let said = store.stop(Signal::TERM);
    assert!(said.contains("drained"), "{said}");
    let output = copy.wait_with_output().expect("it ends");
    says(&output, &["WRITE stopped after", "of 524288 blocks"]);
}
