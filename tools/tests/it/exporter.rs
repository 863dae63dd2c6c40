//! `rpcrdma exporter`, scraped as by Prometheus.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::loaded_server::{LoadedServer, rpcrdma};
use crate::wait::{eventually, has};
use serde_json::Value;

/// A process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // This fails only if the program has exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts an exporter of a statistics socket. Returns its process and address.
fn start_exporter(stats: &Path) -> (Running, String) {
    start(rpcrdma().args(["exporter", "--listen", "127.0.0.1:0", "--stats"]).arg(stats))
}

/// Runs a command that starts an exporter. Returns its process and address.
fn start(exporter: &mut Command) -> (Running, String) {
    let mut exporter = Running(exporter.stdout(Stdio::piped()).spawn().expect("it runs"));
    let mut line = String::new();
    BufReader::new(exporter.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("listening on http://").and_then(|rest| rest.strip_suffix("/metrics"));
    (exporter, address.expect(&line).to_owned())
}

/// Requests a path. Returns head and body of the response.
fn get(address: &str, path: &str) -> Option<(String, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split_once("\r\n\r\n").map(|(head, body)| (head.to_owned(), body.to_owned()))
}

fn value(body: &str, series: &str) -> Option<f64> {
    body.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn a_scrape_gets_the_current_counters() {
    let mut served = LoadedServer::start();
    let (_exporter, address) = start_exporter(&served.stats());
    let calls = |body: &str| value(body, r#"rpcrdma_calls_total{shard="0"}"#);
    let mut first = None;
    assert!(eventually(|| {
        let (head, body) = get(&address, "/metrics").expect("a reply");
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("application/openmetrics-text"), "{head}");
        first = calls(&body);
        first > Some(0.0)
    }));
    assert!(eventually(|| calls(&get(&address, "/metrics").expect("a reply").1) > first));
    // Clients that send no request delay others only for a limited time.
    let _silent: Vec<_> = (0..20).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
    assert!(eventually(|| get(&address, "/metrics").is_some_and(|(_, body)| body.ends_with("# EOF\n"))));
    served.end();
    let (_, body) = get(&address, "/metrics").expect("a reply");
    assert_eq!((value(&body, "rpcrdma_up"), calls(&body)), (Some(0.0), None));
}

#[test]
fn an_exporter_without_descriptors_pauses_and_logs_it() {
    let mut exporter = Command::new("bash");
    // The limit leaves room for three connections.
    exporter.args(["-c", r#"ulimit -n 7 && exec "$@""#, "rpcrdma", env!("CARGO_BIN_EXE_rpcrdma")]);
    exporter.args(["exporter", "--listen", "127.0.0.1:0", "--stats", "/nowhere"]);
    let (mut exporter, address) = start(exporter.stderr(Stdio::piped()));
    let stderr = BufReader::new(exporter.0.stderr.take().expect("a pipe"));
    let (sender, log) = mpsc::channel();
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let silent: Vec<_> = (0..4).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
    let line = log.recv_timeout(Duration::from_secs(60)).expect("a line");
    assert!(line.contains("exporter: accept: ") && line.contains("no new connections until it succeeds"), "{line}");
    assert!(line.contains("RLIMIT_NOFILE is 7; `ulimit -n 65536` raises it"), "{line}");
    drop(silent);
    assert!(eventually(|| get(&address, "/").is_some_and(|(head, _)| head.starts_with("HTTP/1.1 200"))));
    // While the silent connections were open (at most two seconds), accept failed every 100 ms, but the log is
    // rate-limited.
    drop(exporter);
    let more = log.iter().count();
    assert!(more <= 8, "{more} further lines");
}

#[test]
fn connections_closed_at_the_limit_are_logged() {
    let mut command = rpcrdma();
    command.args(["exporter", "--listen", "127.0.0.1:0", "--stats", "/nowhere"]);
    let (mut exporter, address) = start(command.stderr(Stdio::piped()));
    let _silent: Vec<_> = (0..5).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
    let mut line = String::new();
    BufReader::new(exporter.0.stderr.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line, "WARN: 127.0.0.1: connection closed without a request: limit of 4 connections of this host\n");
}

#[test]
fn an_address_in_use_is_named_in_the_error() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let output = rpcrdma().args(["exporter", "--stats", "x", "--listen", &address]).output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && errors.contains(&address) && errors.contains("--listen"), "{output:?}");
}

/// Returns the answer of Prometheus to a query.
fn query(prometheus: &str, query: &str) -> Option<f64> {
    let escaped: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let (_, body) = get(prometheus, &format!("/api/v1/query?query={escaped}"))?;
    // The response may be chunked, with lengths on separate lines.
    let json = body.lines().find(|line| line.starts_with('{'))?;
    let answer: Value = serde_json::from_str(json).ok()?;
    answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
}

#[test]
fn prometheus_answers_queries_from_scrapes() {
    if !has("prometheus") {
        return;
    }
    let served = LoadedServer::start();
    let (_exporter, address) = start_exporter(&served.stats());
    let config = served.directory().join("prometheus.yml");
    let text = format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
         scrape_configs: [{{job_name: rpcrdma, static_configs: [{{targets: [\"{address}\"]}}]}}]\n"
    );
    std::fs::write(&config, text).expect("a file");
    // All of 127.0.0.0/8 is loopback, and a process ID has 22 bits, so the address is unique.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let listen = format!("127.{}.{b}.{c}:9090", a | 0x40);
    let log = std::fs::File::create(served.directory().join("prometheus.log")).expect("a file");
    let mut prometheus = Command::new("prometheus");
    prometheus.arg(format!("--config.file={}", config.display()));
    prometheus.arg(format!("--storage.tsdb.path={}", served.directory().join("data").display()));
    prometheus.arg(format!("--web.listen-address={listen}"));
    let _prometheus = Running(prometheus.stderr(log).stdout(Stdio::null()).spawn().expect("it runs"));
    let log = || std::fs::read_to_string(served.directory().join("prometheus.log")).unwrap_or_default();
    for expression in [
        r#"up{job="rpcrdma"}"#,
        "rpcrdma_up",
        "sum(rate(rpcrdma_calls_total[30s]))",
        "histogram_quantile(0.99, sum by (le) (rate(rpcrdma_call_latency_seconds_bucket[30s])))",
        "sum(rate(rpcrdma_procedure_latency_seconds_count[30s]))",
        "rpcrdma_connections",
    ] {
        let mut answer = None;
        let answered = eventually(|| {
            answer = query(&listen, expression);
            answer.is_some_and(|answer| answer > 0.0)
        });
        assert!(answered, "{expression}: {answer:?}; {}", log());
        println!("{expression} = {answer:?}");
    }
}
