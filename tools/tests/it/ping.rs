//! Tests of the program `rpcrdma ping`, with servers in this process.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use rpcrdma::config::{Crc, IwarpConfig, MemoryConfig, WireConfig};
use rpcrdma::fabric::iwarp::wire::{MpaFrame, MpaFrameKind};
use rpcrdma::mempool::PagePolicy;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Config, CreditMode, Procedure, Server, Services};
use serde_json::Value;

const PROGRAM: u32 = 0x2000_0001;

fn ping(arguments: &[&str]) -> (i32, String, String) {
    crate::tool::rpcrdma("ping", arguments)
}

fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("soft:ping-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns a unique iWARP address. All of 127.0.0.0/8 is loopback.
fn tcp_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(20049);
    // A process ID has 22 bits.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    format!("iwarp:127.{}.{b}.{c}:{}", a | 0x40, NEXT.fetch_add(1, Ordering::Relaxed))
}

fn serve(address: &str, credit_mode: CreditMode) -> Server {
    serve_with(address, Config { wire: WireConfig { credit_mode, ..WireConfig::default() }, ..Config::default() })
}

fn serve_with(address: &str, shard: Config) -> Server {
    serve_procedure(address, 1, Procedure::new(|_| Ok(())), shard)
}

fn serve_procedure(address: &str, number: u32, procedure: Procedure, shard: Config) -> Server {
    let shard = Config {
        memory: MemoryConfig {
            receives: 512,
            bulk_buffers: vec![(64 << 10, 4)],
            pages: PagePolicy::Small,
            ..shard.memory
        },
        ..shard
    };
    let mut services = Services::new();
    services.add(PROGRAM, 3, number, procedure);
    let config = ServerConfig { shard, ..ServerConfig::default() };
    Server::start(&address.parse::<rpcrdma::Address>().expect("an address"), services, &config).expect("a server")
}

fn ping_json(arguments: &[&str]) -> (i32, Value) {
    let (status, out, errors) = ping(&[&["--json"], arguments].concat());
    (status, serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{errors}")))
}

#[test]
fn version_credits_chunk_and_times_are_reported() {
    let address = address();
    let server = serve(&address, CreditMode::V2Windowed);
    let (status, report) = ping_json(&["-c", "20", "-i", "0", &address, "0x20000001", "3"]);
    assert_eq!(status, 0, "{report}");
    for (key, expected) in [("rdma_version", 2), ("calls", 20), ("answered", 20), ("failed", 0)] {
        assert_eq!(report[key], expected, "{key}: {report}");
    }
    assert_eq!((&report["reply_chunk"], &report["connections"]), (&"inline".into(), &1.into()), "{report}");
    // The server invalidates the offered handle, which the software fabric supports.
    assert_eq!((&report["invalidated_by_server"], &report["invalidated_here"]), (&1.into(), &0.into()), "{report}");
    let us = |key: &str| report["rtt_us"][key].as_f64().expect("a number");
    assert!(us("min") <= us("p50") && us("p50") <= us("p99") && us("p99") <= us("max") && us("max") > 0.0);
    assert!(report["credits"].as_u64().is_some_and(|credits| credits >= 1), "{report}");
    let calls: u64 = server.stats().iter().map(|shard| shard.calls).sum();
    assert_eq!(calls, 21);
}

/// The kernel reports the server to another PID namespace as process 0.
#[test]
fn a_client_of_another_pid_namespace_is_served() {
    let namespace = ["--pid", "--fork", "--"];
    if !Command::new("unshare").args(namespace).arg("true").status().is_ok_and(|status| status.success()) {
        println!("not run: no PID namespace can be made here");
        return;
    }
    let address = address();
    let server = serve(&address, CreditMode::V2Windowed);
    let output = Command::new("unshare")
        .args(namespace)
        .args([env!("CARGO_BIN_EXE_rpcrdma"), "ping", "-c", "2", "-i", "0", &address, "0x20000001", "3"])
        .output()
        .expect("unshare runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(server.stats().iter().map(|shard| shard.calls).sum::<u64>(), 3);
}

#[test]
fn version_1_is_used_if_either_side_requires_it() {
    for (credit_mode, version, invalidate) in
        [(CreditMode::V1, "2", true), (CreditMode::V2Windowed, "1", true), (CreditMode::V1, "1", false)]
    {
        let address = address();
        let _server = serve(&address, credit_mode);
        let mut arguments = vec!["-c", "2", "-i", "0", "--rdma-version", version, &address, "536870913", "3"];
        arguments.extend((!invalidate).then_some("--no-invalidate"));
        let (status, report) = ping_json(&arguments);
        assert_eq!((status, &report["rdma_version"], &report["answered"]), (0, &1.into(), &2.into()), "{report}");
        // The client falls back to version 1 on the same connection.
        assert_eq!(report["connections"], 1, "{report}");
        assert_eq!(report["credits_at_start"], 1, "{report}");
        assert!(report["credits"].as_u64().is_some_and(|credits| credits > 1), "{report}");
        let revoked = (&report["invalidated_by_server"], &report["invalidated_here"]);
        assert_eq!(revoked, (&u8::from(invalidate).into(), &u8::from(!invalidate).into()), "{report}");
    }
}

#[test]
fn only_crc_always_sets_the_crc_flag_of_the_mpa_request() {
    for (options, has_crc) in
        [(&[][..], false), (&["--crc", "never"], false), (&["--crc", "if-asked"], false), (&["--crc", "always"], true)]
    {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bound");
        let address = format!("iwarp:{}", listener.local_addr().expect("an address"));
        // The server closes the connection after the request.
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("a connection");
            let mut bytes = Vec::new();
            loop {
                if let Some((request, _)) = MpaFrame::decode(MpaFrameKind::Request, &bytes).expect("a request") {
                    return request;
                }
                let mut space = [0; 1024];
                let count = socket.read(&mut space).expect("bytes");
                assert!(count > 0, "the stream ended within the request");
                bytes.extend_from_slice(&space[..count]);
            }
        });
        let (status, _, errors) = ping(&[options, &["-c", "1", &address]].concat());
        assert_eq!(status, 1, "{errors}");
        assert_eq!(server.join().expect("a request").crc, has_crc, "{options:?}");
    }
}

#[test]
fn connections_fail_only_if_one_end_requires_crcs_and_the_other_refuses_them() {
    for (crc, option, served) in [
        (Crc::Always, "always", true),
        (Crc::Always, "if-asked", true),
        (Crc::Always, "never", false),
        (Crc::IfAsked, "always", true),
        (Crc::Never, "always", false),
    ] {
        let address = tcp_address();
        let shard = Config { iwarp: IwarpConfig { crc, ..IwarpConfig::default() }, ..Config::default() };
        let _server = serve_with(&address, shard);
        for fpdu in ["auto", "segment", "longest"] {
            let options = ["-c", "2", "-i", "0", "--crc", option, "--fpdu", fpdu, &address, "0x20000001", "3"];
            let (status, out, errors) = ping(&options);
            assert_eq!(status == 0, served, "{crc:?} {options:?}: {out}{errors}");
            assert_eq!(out.contains("2 calls, 2 answered"), served, "{crc:?} {options:?}: {out}{errors}");
        }
    }
}

#[test]
fn text_output_has_a_line_per_call_and_a_summary() {
    let address = address();
    let _server = serve(&address, CreditMode::V2Windowed);
    let (status, out, _) = ping(&["-c", "2", "-i", "0.01", &address, "0x20000001", "3"]);
    assert_eq!(status, 0, "{out}");
    for words in [
        "version 3: RPC-over-RDMA version 2",
        "reply 1 in ",
        "reply 2 in ",
        "2 calls, 2 answered, 0.0% failed",
        "Reply chunk: offered, answered inline; handles invalidated by the server: 1, by this side: 0",
        "round trip, us: min ",
    ] {
        assert!(out.contains(words), "{words:?} is not in: {out}");
    }
    let (_, out, _) = ping(&["-q", "--no-chunk", "-c", "2", "-i", "0", &address, "0x20000001", "3"]);
    assert!(!out.contains("reply 1") && out.contains("Reply chunk: not offered"), "{out}");
}

#[test]
fn unserved_programs_and_wrong_usage_are_errors() {
    let address = address();
    let _server = serve(&address, CreditMode::V2Windowed);
    let (status, report) = ping_json(&["-c", "2", "-i", "0", &address]);
    assert_eq!((status, &report["answered"], &report["failed"]), (1, &0.into(), &2.into()), "{report}");
    assert_eq!((&report["reply_chunk"], &report["rtt_us"]), (&"failed".into(), &Value::Null), "{report}");
    let errors = report["errors"].to_string();
    assert!(errors.contains("program") && errors.contains(":2"), "{errors}");
    let (status, out, errors) = ping(&["-c", "1", "soft:nobody-listens-here"]);
    assert_eq!((status, out.as_str()), (1, ""));
    assert!(errors.starts_with("rpcrdma: no listener at \"nobody-listens-here\""), "{errors}");
    let (status, _, errors) = ping(&["--rpcbind", "soft:x"]);
    assert!(status == 1 && errors.contains("--rpcbind applies only to network addresses"), "{errors}");
    for arguments in [
        &[][..],
        &["soft:x", "-c", "0"],
        &["tcp:x"],
        &["soft:x", "y"],
        &["soft:x", "-i", "-1"],
        &["soft:x", "--crc", "always"],
        &["soft:x", "--fpdu", "segment"],
        &["iwarp:x", "--crc", "yes"],
    ] {
        assert_eq!(ping(arguments).0, 2, "{arguments:?}");
    }
    for (option, value, words) in [
        ("-W", "0", "'--timeout <SECONDS>': expected more than 0 seconds"),
        ("-W", "86401", "'--timeout <SECONDS>': expected at most 86400 seconds (24 h)"),
        ("-i", "1e19", "'--interval <SECONDS>': expected at most 86400 seconds (24 h)"),
    ] {
        let (status, _, errors) = ping(&[option, value, "soft:x"]);
        assert!(status == 2 && errors.contains(words), "{errors}");
    }
}

#[test]
fn ping_reconnects_to_a_restarted_server_and_runs_until_interrupted() {
    let address = address();
    let server = serve(&address, CreditMode::V2Windowed);
    let mut child = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
        .args(["ping", "-i", "0.02", "-W", "1", &address, "0x20000001", "3"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut read_until = |words: &str| {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            assert!(out.read_line(&mut line).expect("text") > 0, "it ended without {words:?}");
        }
    };
    read_until("reply 3 ");
    drop(server);
    read_until("call ");
    let _server = serve(&address, CreditMode::V2Windowed);
    read_until("reply ");
    interrupt(&child);
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert!(rest.contains("connections begun: ") && !rest.contains("connections begun: 1\n"), "{rest}");
    assert_eq!(child.wait().expect("it ends").code(), Some(1), "some calls failed");
}

#[test]
fn a_signal_ends_a_call_without_a_reply() {
    // With the first options, ping waits for the call that offers a Reply chunk, otherwise for a timed call.
    for options in [&["-i", "0"][..], &["--no-chunk"]] {
        let address = address();
        let (arrived, arrival) = mpsc::channel();
        let null = Procedure::deferred(move |call| arrived.send(call).expect("the test waits"));
        let _server = serve_procedure(&address, 0, null, Config::default());
        let child = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
            .args(["ping", "--json", "-W", "600", &address, "0x20000001", "3"])
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let _unanswered = arrival.recv().expect("a call");
        interrupt(&child);
        let output = child.wait_with_output().expect("our child");
        let report: Value = serde_json::from_slice(&output.stdout).expect("one object");
        assert_eq!((output.status.code(), &report["calls"]), (Some(1), &0.into()), "{report}");
        assert_eq!(report["reply_chunk"], "none", "{report}");
    }
}

#[test]
fn a_signal_ends_an_attempt_to_connect() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    assert_signal_ends(&listener, &[]);
}

#[test]
fn a_signal_ends_the_wait_for_rpcbind() {
    match TcpListener::bind("127.0.0.77:111") {
        Ok(listener) => assert_signal_ends(&listener, &["--rpcbind"]),
        Err(error) => println!("not run: port 111 of rpcbind: {error}"),
    }
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill").success());
}

/// Interrupts ping while it waits for a server that accepts its connection but does not answer.
fn assert_signal_ends(listener: &TcpListener, options: &[&str]) {
    use std::os::unix::process::ExitStatusExt;
    let address = format!("iwarp:{}", listener.local_addr().expect("an address"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
        .args(["ping", "-W", "600", &address])
        .args(options)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    // The server keeps the connection open, but does not answer.
    let _connection = listener.accept().expect("a client");
    interrupt(&child);
    assert_eq!(child.wait().expect("our child").signal(), Some(2));
}

#[test]
fn a_server_that_requires_a_host_key_serves_only_clients_with_the_key() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("key");
    std::fs::write(&file, [7; 32]).expect("space");
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).expect("our file");
    let key = rpcrdma::auth::PreSharedKey::new("rpcrdma", &[7; 32]).expect("a key");
    let host_auth = rpcrdma::auth::AuthPolicy::Required(std::sync::Arc::new(key));
    let address = address();
    let server =
        serve_with(&address, Config { wire: WireConfig { host_auth, ..WireConfig::default() }, ..Config::default() });
    let file = file.to_str().expect("text");
    let (status, report) = ping_json(&["-c", "2", "-i", "0", "--host-key", file, &address, "0x20000001", "3"]);
    assert_eq!((status, &report["answered"]), (0, &2.into()), "{report}");
    let (status, out, errors) = ping(&["-c", "2", "-i", "0", &address, "0x20000001", "3"]);
    assert_eq!((status, out.as_str()), (1, ""), "{errors}");
    assert!(errors.contains("requires a host key") && errors.contains("--host-key"), "{errors}");
    assert!(errors.contains("no call was executed"), "{errors}");
    let other = ["-c", "1", "--host-key", file, "--host-key-id", "other", &address, "0x20000001", "3"];
    assert!(ping(&other).2.contains("refuses the host key"));
    let calls: u64 = server.stats().iter().map(|shard| shard.calls).sum();
    assert_eq!(calls, 3, "only calls of the client with the key");
}
