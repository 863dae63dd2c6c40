//! Tests of the program `blockstore`: whole transfers, bad input, and the sudden end of either side.
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
mod system_limits;

use protocol::blockstore_v1::{self, Flush, Read, Write};
use protocol::{Info, ReadData, Status, Written};

/// Options for each way in which a server reads and writes its file.
const IO_MODES: [&[&str]; 3] = [&["--io", "uring"], &["--io", "uring", "--buffered"], &["--io", "threads"]];

const PROGRAM: &str = env!("CARGO_BIN_EXE_blockstore");

/// An unused address on the fabric of `RPCRDMA_FABRIC`: `soft` (default) or `iwarp`.
fn address() -> String {
    let unique = loopback_address().0;
    match std::env::var("RPCRDMA_FABRIC").as_deref() {
        Ok("iwarp") => format!("iwarp:{unique}"),
        _ => format!("soft:blockstore-test-{unique}"),
    }
}

/// Returns the part of an address after its scheme.
fn name(address: &str) -> &str {
    address.split_once(':').expect("a scheme").1
}

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().expect("it runs")
}

#[track_caller]
fn run_successfully(arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = run(arguments);
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{arguments:?}: {status}: {stderr}");
    String::from_utf8(stdout).expect("text")
}

/// Runs the program, which must exit with 1 and print all of `words` on standard error.
#[track_caller]
fn expect_failure(arguments: &[&str], words: &[&str]) {
    check_failure(&run(arguments), words);
}

/// Checks that a program has exited with 1 and printed all of `words` on standard error.
#[track_caller]
fn check_failure(output: &Output, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{word:?} is not in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// A server in its own process, which is killed on drop.
struct StoreServer {
    child: Child,
    stdout: BufReader<ChildStdout>,
    address: String,
    /// The line that the server printed when it was ready.
    ready_line: String,
}

impl StoreServer {
    /// Starts a server of `file`, and waits until it is ready.
    fn serve(file: &Path, arguments: &[&str]) -> Self {
        Self::serve_with(&mut Command::new(PROGRAM), file, arguments)
    }

    /// Starts a server with `command`, which runs the program with the arguments that are added.
    fn serve_with(command: &mut Command, file: &Path, arguments: &[&str]) -> Self {
        let address = address();
        let mut child = command
            .args(["serve", "--listen", &address, "--file"])
            .arg(file)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("text");
        assert!(line.starts_with(&format!("listening on {address}:")), "{line}");
        Self { child, stdout, address, ready_line: line }
    }

    /// Sends a signal and waits for the end. Returns the rest of standard output.
    fn stop(mut self, signal: Signal) -> String {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).expect("it runs");
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).expect("text");
        let status = self.child.wait().expect("it can be waited for");
        assert!(status.success(), "{status}");
        rest
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// Creates a file of pseudo-random bytes.
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
    let output = run_successfully(&["demo", "--size", &size, "--dir", text(dir.path())]);
    for word in ["copied", "flushed", "verified", "software fabric", "equal to the source's", "drained", " 0 refused"] {
        assert!(output.contains(word), "{word:?} is not in: {output}");
    }
    assert_eq!(dir.path().read_dir().expect("a directory").count(), 0, "no temporary files are left");
}

/// The first and the last core that this process may use. They are the same if it may use only one.
fn cores() -> [String; 2] {
    let all = rustix::thread::sched_getaffinity(None).expect("the cores");
    let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| all.is_set(core)).collect();
    [cores.first(), cores.last()].map(|core| core.expect("a core").to_string())
}

#[test]
fn compare_prints_the_chosen_row_and_the_processor_time() {
    let dir = directory();
    let json = dir.path().join("rows.json");
    expect_failure(&["compare", "--only", "depth 1,"], &["--only", "depth 1,", "4 KiB random reads, depth 1"]);
    if Command::new("fio").arg("--version").output().is_err() {
        println!("not run: there is no fio (apt-get install fio)");
        return;
    }
    let name = "1 MiB sequential writes, depth 8";
    let [first, last] = &cores();
    let options = ["compare", "--rounds", "1", "--size", "16M", "--only", name, "--dir", text(dir.path())];
    let cores = ["--server-core", first, "--client-core", last];
    let output = run_successfully(&[&options[..], &cores, &["--json", text(&json)]].concat());
    let rows = std::fs::read_to_string(&json).expect("the rows");
    let rows: Vec<Value> = serde_json::from_str(&rows).expect("JSON");
    // The row of the processor time does not depend on `--only`.
    assert_eq!([&rows[0]["name"], &rows[1]["name"]], [name, "processor time of a 4 KiB read, µs"], "{rows:?}");
    assert_eq!(rows.len(), 2, "{rows:?}");
    for row in &rows {
        let [fio, blockstore, ratio] = ["fio", "blockstore", "ratio"].map(|key| row[key].as_f64().expect("a number"));
        // A number in JSON may lose its last bit.
        let is_ratio = (ratio - blockstore / fio).abs() < ratio * 1e-9;
        assert!(fio > 0.0 && blockstore > 0.0 && is_ratio, "{row}");
    }
    let words = [&format!("| {name} | "), "16777216 bytes; 1 rounds", "fio-", "processor time of one of the"];
    for word in words {
        assert!(output.contains(word), "{word:?} is not in: {output}");
    }
    drop(std::fs::remove_file(json));
    assert_eq!(dir.path().read_dir().expect("a directory").count(), 0, "no temporary files are left");
}

#[test]
fn printing_the_configuration_touches_no_file() {
    let dir = directory();
    let file = dir.path().join("store");
    for size in [&["--size", "1M"][..], &[]] {
        let printed = run_successfully(&[&["serve", "--file", text(&file), "--print-config"], size].concat());
        assert!(printed.contains("[memory]"), "{printed}");
        assert!(!file.exists());
    }
    assert!(run_successfully(&["--version"]).starts_with("blockstore "));
}

#[test]
fn only_clients_with_the_host_key_are_served() {
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
    let store = StoreServer::serve(&file, &["--size", "1M", "--host-key", text(&key)]);
    for command in ["copy", "verify"] {
        run_successfully(&[command, text(&source), &store.address, "--host-key", text(&key)]);
    }
    expect_failure(&["copy", text(&source), &store.address, "--host-key", text(&other)], &["error"]);
    expect_failure(&["copy", text(&source), &store.address], &["requires a host key", "--host-key"]);
    expect_failure(&["copy", text(&source), &store.address, "--host-key", text(&short)], &["--host-key", "15 bytes"]);
    // The client refuses a server that does not authenticate itself.
    let open = StoreServer::serve(&dir.path().join("open"), &["--size", "1M"]);
    expect_failure(&["copy", text(&source), &open.address, "--host-key", text(&key)], &["error"]);
    store.stop(Signal::TERM);
}

#[test]
fn copies_of_any_block_size_change_only_their_range() {
    let dir = directory();
    let (source, file) = (dir.path().join("source"), dir.path().join("store"));
    let bytes = random_file(&source, 3_000_017, 1);
    let before = random_file(&file, 3_500_001, 2);
    let modes: &[(&str, &str, &[&str])] = &[
        ("4093", "7", &["--io", "threads", "--workers", "2"]),
        ("1M", "3", &["--io", "threads", "--workers", "0"]),
        ("1", "32", &["--io", "threads"]),
        ("4093", "7", &[]),
        ("4K", "32", &["--ring", "2"]),
        ("1M", "3", &["--idle", "event"]),
        ("10K", "9", &["--buffered", "--idle", "event"]),
        ("1", "32", &[]),
    ];
    for &(block, depth, mode) in modes {
        // Only a short file is copied in blocks of one byte, because that takes long.
        let bytes = if block == "1" { &bytes[..5001] } else { &bytes };
        std::fs::write(&source, bytes).expect("the source");
        std::fs::write(&file, &before).expect("the store");
        let store = StoreServer::serve(&file, mode);
        run_successfully(&["copy", text(&source), &store.address, "--block", block, "--depth", depth]);
        let output = run_successfully(&["verify", text(&source), &store.address, "--block", "5003", "--seed", "9"]);
        assert!(output.contains("equal to the source's"), "{output}");
        let output = store.stop(Signal::TERM);
        assert!(output.contains("drained") && output.contains(" 0 refused"), "{output}");
        let after = std::fs::read(&file).expect("the store");
        assert!(after[..bytes.len()] == *bytes, "{mode:?}, blocks of {block}: the copy equals the source");
        assert!(after[bytes.len()..] == before[bytes.len()..], "{mode:?}, blocks of {block}: the rest is unchanged");
    }
}

#[test]
fn verify_names_the_block_that_differs() {
    let dir = directory();
    let (source, file) = (dir.path().join("source"), dir.path().join("store"));
    let mut bytes = random_file(&source, 1 << 20, 3);
    bytes[700_000] ^= 1;
    std::fs::write(&file, &bytes).expect("the store");
    let store = StoreServer::serve(&file, &[]);
    // Byte 700 000 is in the block at 10 * 65536.
    expect_failure(&["verify", text(&source), &store.address], &["65536 bytes at 655360", "checksum"]);
}

/// A client that can send invalid calls.
struct RawClient(LocalClient);

type Outcome<T> = Result<Result<T, Status>, CallError>;

/// Where the data of a WRITE is.
#[derive(Clone, Copy, Debug)]
enum Placement {
    /// In a Read chunk at this position.
    ChunkAt(usize),
    Inline,
}

/// A Read chunk at the position of the data, which follows its length.
const CHUNK: Placement = Placement::ChunkAt(12);

impl RawClient {
    const BLOCK_MAX: usize = 1 << 20;
    /// Longest data that a READ returns without a Write chunk, in bytes.
    const MAX_INLINE: usize = 4032;

    fn connect(store: &StoreServer) -> Self {
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
        Ok(Response::from_reply(self.0.call(call).map_err(|failed| failed.error)?))
    }

    fn info(&mut self) -> Outcome<Info> {
        let call = self.prepare(blockstore_v1::Info::NUMBER, &[]);
        Ok(self.call::<blockstore_v1::Info>(call)?.results().expect("results").into_result())
    }

    fn flush(&mut self) -> Result<Status, CallError> {
        let call = self.prepare(Flush::NUMBER, &[]);
        Ok(self.call::<Flush>(call)?.results().expect("results"))
    }

    /// Reads `count` bytes into a Write chunk of `room` bytes, or inline. Returns the end-of-store flag and the bytes.
    fn read(&mut self, offset: u64, count: u32, room: Option<usize>) -> Outcome<(bool, Vec<u8>)> {
        let mut call = self.prepare(Read::NUMBER, &words(offset, count));
        call = match room {
            Some(room) => call.write_chunk_into(self.buffer(room)),
            None => call.expect_reply(12 + Self::MAX_INLINE),
        };
        let response = self.call::<Read>(call)?;
        let result = response.results().expect("results").into_result();
        let result = result.map(|ReadData { eof, data }| (eof, data.bytes().to_vec()));
        let chunk = response.into_reply().chunk(0).map(<[u8]>::to_vec);
        let read = result.as_ref().map_or_else(|_| Vec::new(), |(_, data)| data.clone());
        assert_eq!(chunk, room.map(|_| read), "the Write chunk has the data");
        Ok(result)
    }

    /// Prepares a call that writes `data`, with `count` as the length.
    fn write_call(&mut self, offset: u64, count: u32, data: &[u8], placement: Placement) -> ClientCall {
        let mut args = words(offset, count);
        match placement {
            Placement::Inline => {
                args.extend_from_slice(data);
                args.resize(args.len().next_multiple_of(4), 0);
                self.prepare(Write::NUMBER, &args)
            }
            Placement::ChunkAt(at) => {
                let mut chunk = self.buffer(data.len());
                chunk.copy_from_slice(data);
                self.prepare(Write::NUMBER, &args).read_chunk(at, chunk)
            }
        }
    }

    fn write(&mut self, offset: u64, count: u32, data: &[u8], placement: Placement) -> Outcome<Written> {
        let call = self.write_call(offset, count, data, placement);
        Ok(self.call::<Write>(call)?.results().expect("results").into_result())
    }
}

/// Expected outcome of a READ.
fn data(eof: bool, bytes: &[u8]) -> Outcome<(bool, Vec<u8>)> {
    Ok(Ok((eof, bytes.to_vec())))
}

/// Encodes an offset and a count.
fn words(offset: u64, count: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &count.to_be_bytes()].concat()
}

#[test]
fn reads_end_at_the_end_of_the_store() {
    for mode in IO_MODES {
        check_reads(mode);
    }
}

fn check_reads(mode: &[&str]) {
    let dir = directory();
    let file = dir.path().join("store");
    let bytes = random_file(&file, 100_003, 4);
    let store = StoreServer::serve(&file, mode);
    let mut raw = RawClient::connect(&store);
    let size = bytes.len() as u64;
    assert_eq!(raw.info(), Ok(Ok(Info { size, block_max: RawClient::BLOCK_MAX as u32, writable: true })));

    assert_eq!(raw.read(1, 7, Some(7)), data(false, &bytes[1..8]), "odd offset and length");
    assert_eq!(raw.read(99_999, 4, Some(4)), data(true, &bytes[99_999..100_003]), "the last bytes");
    assert_eq!(raw.read(99_999, 5000, Some(5000)), data(true, &bytes[99_999..100_003]), "short at the end");
    assert_eq!(raw.read(size, 10, Some(10)), data(true, &bytes[0..0]), "at the end");
    assert_eq!(raw.read(0, 0, None), data(false, &bytes[0..0]), "no bytes");
    assert_eq!(raw.read(0, 100, Some(10)), data(false, &bytes[0..10]), "less room than requested");
    let max = RawClient::BLOCK_MAX as u32;
    assert_eq!(raw.read(3, max, Some(2 << 20)), data(true, &bytes[3..100_003]), "more room than the longest block");
    // READs without a Write chunk.
    assert_eq!(raw.read(1, 7, None), data(false, &bytes[1..8]), "odd offset and length");
    assert_eq!(raw.read(99_999, 5000, None), data(true, &bytes[99_999..100_003]), "short at the end");
    assert_eq!(raw.read(size, 10, None), data(true, &bytes[0..0]), "at the end");
    assert_eq!(raw.read(4096, 2048, None), data(false, &bytes[4096..6144]), "blocks of a disk");
    let (eof, inline) = raw.read(8192, 65536, None).expect("an answer").expect("a result");
    assert!(!eof && (4000..=RawClient::MAX_INLINE).contains(&inline.len()), "the data fills the message");
    assert!(bytes[8192..].starts_with(&inline));

    for offset in [size + 1, 1 << 40, u64::MAX] {
        assert_eq!(raw.read(offset, 10, Some(10)), Ok(Err(Status::OutOfRange)), "{offset}");
        assert_eq!(raw.read(offset, 10, None), Ok(Err(Status::OutOfRange)), "{offset}");
    }
    assert_eq!(raw.read(0, max + 1, Some(2 << 20)), Ok(Err(Status::TooLong)));
    assert_eq!(raw.read(0, u32::MAX, Some(10)), Ok(Err(Status::TooLong)));
    assert_eq!(raw.read(0, max + 1, None), Ok(Err(Status::TooLong)));
    assert_eq!(raw.read(0, 10, Some(10)), data(false, &bytes[0..10]), "the server continues");
}

#[test]
fn results_are_encoded_as_the_protocol_specifies() {
    let dir = directory();
    let file = dir.path().join("store");
    random_file(&file, 7, 18);
    let store = StoreServer::serve(&file, &[]);
    let mut raw = RawClient::connect(&store);
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
    for mode in IO_MODES {
        check_writes(mode);
    }
}

fn check_writes(mode: &[&str]) {
    let dir = directory();
    let file = dir.path().join("store");
    let mut bytes = random_file(&file, 2_000_003, 5);
    let store = StoreServer::serve(&file, mode);
    let mut raw = RawClient::connect(&store);
    let size = bytes.len() as u64;
    let data = vec![0xA5; RawClient::BLOCK_MAX + 1];

    let written = |count| Ok(Ok(Written { count, stable: false }));
    assert_eq!(raw.write(5, 7, &data[..7], CHUNK), written(7), "odd offset and length");
    assert_eq!(raw.write(0, 0, &[], Placement::Inline), written(0), "no bytes");
    assert_eq!(raw.write(size, 0, &[], Placement::Inline), written(0), "no bytes, at the end");
    assert_eq!(raw.write(size - 3, 3, &data[..3], CHUNK), written(3), "the last bytes");
    let max = RawClient::BLOCK_MAX;
    assert_eq!(raw.write(1000, max as u32, &data[..max], CHUNK), written(max as u32), "the longest block");
    // WRITEs without a Read chunk, as inline and long messages.
    assert_eq!(raw.write(20, 7, &data[..7], Placement::Inline), written(7), "odd offset and length");
    assert_eq!(raw.write(1_100_000, 3999, &data[..3999], Placement::Inline), written(3999), "a message");
    assert_eq!(raw.write(1_126_400, 512, &data[..512], Placement::Inline), written(512), "a block of a disk");
    assert_eq!(raw.write(1_200_000, 30_001, &data[..30_001], Placement::Inline), written(30_001), "a long message");
    for range in [20..27, 1_100_000..1_103_999, 1_126_400..1_126_912, 1_200_000..1_230_001] {
        bytes[range].fill(0xA5);
    }
    bytes[5..12].fill(0xA5);
    bytes[2_000_000..].fill(0xA5);
    bytes[1000..1000 + max].fill(0xA5);

    for offset in [size - 2, size, size + 1, u64::MAX] {
        assert_eq!(raw.write(offset, 3, &data[..3], CHUNK), Ok(Err(Status::OutOfRange)), "{offset}");
        assert_eq!(raw.write(offset, 3, &data[..3], Placement::Inline), Ok(Err(Status::OutOfRange)), "{offset}");
    }
    let garbage = Err(CallError::Refused(Refusal::GarbageArguments));
    assert_eq!(raw.write(0, 8, &data[..7], CHUNK), garbage, "less data than the length");
    assert_eq!(raw.write(0, 6, &data[..7], CHUNK), garbage, "more data than the length");
    assert_eq!(raw.write(0, 7, &data[..7], Placement::ChunkAt(8)), garbage, "a wrong position of the chunk");
    assert_eq!(raw.write(0, 7, &[], Placement::Inline), garbage, "no data");
    assert_eq!(raw.write(0, 4, &data[..8], Placement::Inline), garbage, "more data than the length, inline");
    let too_long = raw.write(0, data.len() as u32, &data, CHUNK);
    assert!(
        matches!(too_long, Err(CallError::Transport(_))),
        "a chunk beyond the declared limit is refused: {too_long:?}"
    );

    assert_eq!(raw.flush(), Ok(Status::Ok));
    let refused = |raw: &mut RawClient, procedure, args| {
        let call = raw.prepare(procedure, args);
        raw.0.call(call).map(drop).map_err(|failed| failed.error)
    };
    let unavailable = Err(CallError::Refused(Refusal::ProcedureUnavailable));
    assert_eq!(refused(&mut raw, 99, &[]), unavailable);
    let extra = refused(&mut raw, blockstore_v1::Info::NUMBER, &words(0, 0));
    assert_eq!(extra, Err(CallError::Refused(Refusal::GarbageArguments)));
    assert!(raw.info().is_ok(), "the server continues");
    assert!(std::fs::read(&file).expect("the store") == bytes, "the file has exactly the accepted data");
}

#[test]
fn a_sleeping_shard_wakes_for_every_block() {
    let dir = directory();
    let file = dir.path().join("store");
    random_file(&file, 2 << 20, 10);
    for mode in [&["--idle", "event"][..], &["--idle", "event", "--buffered"], &["--idle", "adaptive"]] {
        let store = StoreServer::serve(&file, mode);
        let start = Instant::now();
        run_successfully(&["verify", text(&file), &store.address, "--block", "4K", "--depth", "1"]);
        // A missed wake-up would delay a block by a second.
        assert!(start.elapsed() < Duration::from_secs(30), "{mode:?}: {:?}", start.elapsed());
    }
}

#[test]
fn concurrent_writes_to_one_page_are_not_lost() {
    let dir = directory();
    let file = dir.path().join("store");
    let mut bytes = random_file(&file, 1 << 20, 11);
    let store = StoreServer::serve(&file, &["--cores", &cores().join(",")]);
    let mut clients = [RawClient::connect(&store), RawClient::connect(&store)];
    let mut rng = fastrand::Rng::with_seed(12);
    for round in 0..200u32 {
        // The first write is aligned for O_DIRECT, and the second one needs the page cache.
        let page = rng.usize(..4) * 4096;
        let calls = [(0, 2048, 0), (4096 - 100, 100, 1)].map(|(at, len, client)| {
            let data = vec![rng.u8(..); len];
            bytes[page + at..page + at + len].copy_from_slice(&data);
            let placement = if round >> client & 1 == 0 { CHUNK } else { Placement::Inline };
            (client, clients[client].write_call((page + at) as u64, len as u32, &data, placement))
        });
        for (client, call) in calls {
            let RawClient(raw) = &mut clients[client];
            raw.start(raw.first(), call, round.into());
            raw.flush();
        }
        for RawClient(raw) in &mut clients {
            let mut ended = false;
            while !ended {
                raw.poll(|end| {
                    let response = Response::<Write>::from_reply(end.result.expect("a reply"));
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
    for mode in [&["--io", "uring"][..], &["--io", "uring", "--buffered"]] {
        std::fs::write(&file, &bytes).expect("the store");
        let store = StoreServer::serve(&file, mode);
        let mut raw = RawClient::connect(&store);
        File::options().write(true).open(&file).expect("the store").set_len(10_000).expect("truncated");
        let io_error = Ok(Err(Status::IoError));
        assert_eq!(raw.read(512 << 10, 4096, Some(4096)), io_error, "{mode:?}: wholly after the end");
        assert_eq!(raw.read(8192, 4096, Some(4096)), io_error, "{mode:?}: partly after the end");
        assert_eq!(raw.read(4096, 4096, Some(4096)), data(false, &bytes[4096..8192]), "{mode:?}: before the end");
        assert_eq!(raw.write(4096, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{mode:?}");
    }
}

#[test]
fn a_write_that_fails_in_the_middle_is_an_error_and_the_server_continues() {
    let dir = directory();
    let file = dir.path().join("store");
    let bytes = random_file(&file, 1 << 20, 14);
    for mode in [&["--io", "uring"][..], &["--io", "uring", "--buffered"], &["--io", "threads"]] {
        let mut store = StoreServer::serve_with(Command::new(PROGRAM).stderr(Stdio::piped()), &file, mode);
        let mut raw = RawClient::connect(&store);
        // The server may not write to a file beyond this offset.
        let limit = Rlimit { current: Some(512 << 10), maximum: Some(512 << 10) };
        rustix::process::prlimit(Some(Pid::from_child(&store.child)), Resource::Fsize, limit).expect("prlimit");
        let beyond = raw.write((512 << 10) - 4096, 8192, &bytes[..8192], CHUNK);
        assert_eq!(beyond, Ok(Err(Status::IoError)), "{mode:?}");
        assert_eq!(raw.write(0, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{mode:?}");
        assert_eq!(raw.read(700_000, 10, Some(10)), data(false, &bytes[700_000..700_010]), "{mode:?}");
        drop(raw);
        let stderr = store.child.stderr.take().expect("piped");
        store.stop(Signal::TERM);
        let errors = std::io::read_to_string(stderr).expect("text");
        let limit =
            "write: File too large (os error 27) (RLIMIT_FSIZE is 524288 bytes; `ulimit -f unlimited` lifts it)";
        assert!(errors.contains(limit), "{mode:?}: {errors}");
    }
}

/// Result of a WRITE of 100 bytes.
const WRITTEN: Written = Written { count: 100, stable: false };

#[test]
fn a_read_only_store_refuses_writes() {
    let dir = directory();
    let (source, file) = (dir.path().join("source"), dir.path().join("store"));
    random_file(&source, 5000, 6);
    let bytes = random_file(&file, 5000, 7);
    let store = StoreServer::serve(&file, &["--read-only"]);
    let mut raw = RawClient::connect(&store);
    assert!(!raw.info().expect("an answer").expect("a result").writable);
    assert_eq!(raw.write(0, 3, &[1; 3], CHUNK), Ok(Err(Status::ReadOnly)));
    expect_failure(&["copy", text(&source), &store.address], &["read-only"]);
    run_successfully(&["verify", text(&file), &store.address]);
    assert!(std::fs::read(&file).expect("the store") == bytes);
}

#[test]
fn impossible_options_are_refused_before_any_work() {
    let dir = directory();
    let (small, large, none) = (dir.path().join("small"), dir.path().join("large"), dir.path().join("none"));
    random_file(&large, 10_000, 8);
    let bytes = random_file(&small, 9_999, 9);
    let store = StoreServer::serve(&small, &[]);
    let unused = address();
    let (small, large, none) = (text(&small), text(&large), text(&none));

    expect_failure(&["copy", large, &store.address], &["10000 bytes", "9999"]);
    expect_failure(&["verify", large, &store.address], &["10000 bytes", "9999"]);
    expect_failure(&["copy", small, &store.address, "--block", "2M"], &["2097152", "1048576"]);
    expect_failure(&["copy", none, &store.address], &[none, "No such file"]);
    expect_failure(&["copy", small, &unused], &["no listener at", name(&unused)]);
    expect_failure(&["serve", "--file", none, "--listen", &unused], &[none, "No such file", "--size"]);
    expect_failure(&["serve", "--file", text(dir.path()), "--listen", &unused, "--read-only"], &["not a regular file"]);
    expect_failure(&["serve", "--file", large, "--size", "9999", "--listen", &unused], &["10000", "9999"]);
    expect_failure(
        &["serve", "--file", none, "--size", "4000000T", "--listen", &unused],
        &["fallocate", "4398046511104000000"],
    );
    // The address or the file is in use by another server.
    expect_failure(&["serve", "--file", large, "--listen", &store.address], &[name(&store.address), "in use"]);
    expect_failure(&["serve", "--file", small, "--listen", &unused], &[small, "another process has locked the file"]);

    assert!(std::fs::read(small).expect("the store") == bytes);
    let output = store.stop(Signal::INT);
    assert!(output.contains("drained"), "{output}");
}

/// A copy of many small blocks, which takes long. Most of the source file is a hole.
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
        long.write_all_at(b"begin", 0).expect("written");
        long.set_len(256 << 20).expect("a length");
        Self { dir, source, file, size: "256M" }
    }

    /// Starts the copy, and waits until its first block has arrived.
    fn start(&self, store: &StoreServer) -> Child {
        let mut child = Command::new(PROGRAM)
            .args(["copy", text(&self.source), &store.address, "--block", "512", "--depth", "8"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs");
        let file = File::open(&self.file).expect("the store");
        let mut begin = [0; 5];
        while begin != *b"begin" {
            assert_eq!(child.try_wait().expect("a child"), None, "the copy is still running");
            file.read_exact_at(&mut begin, 0).expect("the store");
            std::thread::yield_now();
        }
        child
    }
}

#[test]
fn a_copy_reports_that_its_server_was_killed() {
    let long = LongCopy::new();
    let mut store = StoreServer::serve(&long.file, &["--size", long.size]);
    let copy = long.start(&store);
    store.child.kill().expect("SIGKILL");
    store.child.wait().expect("it ends");
    let output = copy.wait_with_output().expect("it ends");
    check_failure(&output, &["WRITE stopped after", "of 524288 blocks", "connection lost", "the server has ended"]);

    // The address and the file can be used again.
    expect_failure(&["copy", text(&long.source), &store.address], &["no listener at", name(&store.address)]);
    let restarted = StoreServer::serve(&long.file, &[]);
    assert_eq!(RawClient::connect(&restarted).info().expect("an answer").expect("a result").size, 256 << 20);
    drop(long.dir);
}

#[test]
fn a_server_continues_after_its_client_was_killed() {
    let long = LongCopy::new();
    let store = StoreServer::serve(&long.file, &["--size", long.size]);
    let mut raw = RawClient::connect(&store);
    let mut copy = long.start(&store);
    copy.kill().expect("SIGKILL");
    copy.wait().expect("it ends");
    assert_eq!(raw.read(0, 5, Some(5)), data(false, b"begin"));
    drop(raw);
    let output = store.stop(Signal::TERM);
    assert!(output.contains("drained"), "{output}");
}

#[test]
fn a_copy_reports_that_its_server_was_stopped() {
    let long = LongCopy::new();
    let store = StoreServer::serve(&long.file, &["--size", long.size]);
    let copy = long.start(&store);
    let output = store.stop(Signal::TERM);
    assert!(output.contains("drained"), "{output}");
    let output = copy.wait_with_output().expect("it ends");
    check_failure(&output, &["WRITE stopped after", "of 524288 blocks"]);
}
