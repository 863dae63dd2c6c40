//! `rpcrdma top` in a terminal, as JSON, and without a server.

mod symptoms;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use crate::loaded_server::{LoadedServer, PROGRAM, rpcrdma};
use crate::terminal::Terminal;
use crate::wait::{eventually, has};
use serde_json::Value;

#[test]
fn once_prints_one_interval_in_json() {
    let served = LoadedServer::start();
    let mut view = Value::Null;
    // During an interval the client may not have connected yet, or may not be scheduled.
    let called = eventually(|| {
        let output =
            rpcrdma().args(["top", "--once", "--json", "--interval", "0.5", "--stats"]).arg(served.stats()).output();
        let output = output.expect("it runs");
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).expect("text");
        assert_eq!(text.lines().count(), 1);
        view = serde_json::from_str(&text).expect("JSON");
        view["shards"][0]["calls"]["now"].as_f64().is_some_and(|calls| calls > 0.0)
    });
    let shard = &view["shards"][0];
    assert!(called, "{shard}");
    assert_eq!(view["pid"], std::process::id());
    assert!(shard["busy"]["now"].as_f64().is_some_and(|busy| busy > 0.0 && busy <= 1.0), "{shard}");
    assert!(shard["p99"]["now"].as_f64() >= shard["p50"]["now"].as_f64(), "{shard}");
    assert_eq!(view["procedures"][0]["program"], PROGRAM);
    assert_eq!(view["connections"][0]["stage"], "open");
}

#[test]
fn without_a_terminal_each_interval_is_printed() {
    let served = LoadedServer::start();
    let mut top = rpcrdma();
    top.args(["top", "--interval", "0.1", "--stats"]).arg(served.stats()).stdout(Stdio::piped());
    let mut top = top.spawn().expect("it runs");
    let out = BufReader::new(top.stdout.take().expect("a pipe"));
    let heads = out.lines().map_while(Result::ok).filter(|line| line.starts_with("shard  busy calls/s"));
    assert_eq!(heads.take(3).count(), 3);
    // The closed pipe is not an error.
    assert!(top.wait().expect("it ends").success());
}

/// The output is a datagram socket, which preserves the boundaries of writes. A signal ends the program between writes.
#[test]
fn each_interval_is_a_single_write() {
    for (json, signal, number) in [(true, "-INT", 2), (false, "-TERM", 15)] {
        let served = LoadedServer::start();
        let (out, top_out) = std::os::unix::net::UnixDatagram::pair().expect("sockets");
        let mut top = rpcrdma();
        top.args(["top", "--interval", "0.1", "--stats"]).arg(served.stats()).args(json.then_some("--json"));
        let mut top = top.stdout(std::os::fd::OwnedFd::from(top_out)).spawn().expect("it runs");
        for _ in 0..3 {
            let mut text = vec![0; 1 << 20];
            let len = out.recv(&mut text).expect("an interval");
            text.truncate(len);
            assert!(text.ends_with(b"\n"), "{}", text.escape_ascii());
            if json {
                serde_json::from_slice::<Value>(&text).expect("a whole object");
            } else {
                assert!(text.starts_with(b"pid ") && text.ends_with(b"\n\n"), "{}", text.escape_ascii());
            }
        }
        let kill = Command::new("kill").args([signal, &top.id().to_string()]).status().expect("kill");
        assert!(kill.success());
        assert_eq!(top.wait().expect("it ends").signal(), Some(number));
    }
}

#[test]
fn once_without_a_server_fails_with_the_cause() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("stats");
    let once = || rpcrdma().args(["top", "--once", "--stats"]).arg(&path).output().expect("it runs");
    let output = once();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && errors.contains("is the server started"), "{output:?}");
    drop(UnixListener::bind(&path).expect("a socket"));
    assert_eq!(once().status.code(), Some(1));
    std::fs::write(directory.path().join("file"), "").expect("a file");
    let output = rpcrdma().args(["top", "--stats"]).arg(directory.path().join("file")).output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && errors.contains("not a socket"), "{output:?}");
    assert_eq!(
        rpcrdma().args(["top", "--once", "--interval", "0", "--stats", "x"]).status().expect("it runs").code(),
        Some(2)
    );
}

#[test]
fn once_fails_if_the_uptime_of_the_server_does_not_advance() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("stats");
    let listener = UnixListener::bind(&path).expect("a socket");
    // The server sends more snapshots than are read.
    std::thread::spawn(move || {
        for stream in listener.incoming().take(20) {
            stream.expect("a reader").write_all(br#"{"format":2,"pid":1,"uptime":7}"#).expect("it reads");
        }
    });
    let output = rpcrdma().args(["top", "--once", "--interval", "0.1", "--stats"]).arg(&path).output();
    let output = output.expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("10 snapshots without an interval: `uptime` does not advance (it is 7 ns)"), "{errors}");
}

/// Runs `rpcrdma top` in a terminal of this size, with these environment variables.
fn open_top(served: &LoadedServer, size: (u32, u32), environment: &str) -> Terminal {
    let (program, stats) = (env!("CARGO_BIN_EXE_rpcrdma"), served.stats());
    let command = format!("{environment} exec {program} top --interval 0.2 --stats {}", stats.display());
    Terminal::open(served.directory(), size, &command)
}

/// Returns the rate of calls of the first shard, unless it is 0.
fn call_rate(screen: &str) -> Option<&str> {
    let row = screen.lines().skip_while(|line| !line.starts_with("shard  busy")).nth(1)?;
    row.split_whitespace().nth(2).filter(|calls| calls.starts_with(|c: char| c.is_ascii_digit()) && *calls != "0")
}

#[test]
fn a_terminal_shows_a_busy_server_and_reacts_to_keys() {
    if !has("tmux") {
        return;
    }
    let served = LoadedServer::start();
    let mut terminal = open_top(&served, (100, 30), "");
    let title = format!("rpcrdma top  pid {}", std::process::id());
    assert!(terminal.shows(|screen| screen.contains(&title) && call_rate(screen).is_some()));
    assert!(terminal.seen.contains("credits") && terminal.seen.contains("lowest"), "{}", terminal.seen);
    println!("{}", terminal.seen);
    terminal.key("p");
    assert!(terminal.shows(|screen| screen.contains(&format!("{PROGRAM} v1"))));
    terminal.key("c");
    assert!(terminal.shows(|screen| screen.contains(&format!("pid {} uid", std::process::id()))));
    // The screen adapts to a smaller size, and then to the original one.
    terminal.tmux(&["resize-window", "-t", "t", "-x", "40", "-y", "20"]);
    terminal.key("s");
    let narrow =
        |screen: &str| screen.contains("shard  busy calls/s    p50    p99 faults\n") && call_rate(screen).is_some();
    assert!(terminal.shows(narrow));
    terminal.tmux(&["resize-window", "-t", "t", "-x", "100", "-y", "30"]);
    assert!(terminal.shows(|screen| screen.contains("queue")));
    terminal.key("q");
    assert!(terminal.ends());
}

#[test]
fn top_waits_for_a_restarted_server() {
    if !has("tmux") {
        return;
    }
    let mut served = LoadedServer::start();
    let mut terminal = open_top(&served, (80, 24), "NO_COLOR=1");
    assert!(terminal.shows(|screen| call_rate(screen).is_some()));
    served.end();
    assert!(terminal.shows(|screen| screen.starts_with("no snapshot: ")));
    served.serve();
    assert!(terminal.shows(|screen| screen.starts_with("rpcrdma top") && call_rate(screen).is_some()));
    // Colours would be escape sequences.
    let coloured = terminal.tmux(&["capture-pane", "-p", "-e", "-t", "t"]);
    let colours = |code: &&str| code.strip_prefix(['3', '4']).is_some_and(|rest| !rest.starts_with(['9', 'm']));
    let codes: Vec<&str> = coloured.split("\u{1b}[").skip(1).collect();
    assert!(!codes.iter().any(colours) && !codes.is_empty(), "{codes:?}");
}

/// Each cell of the screen takes memory, and the program cannot verify the size that the terminal reports.
#[test]
fn memory_is_bounded_if_the_terminal_claims_a_great_size() {
    if !has("tmux") {
        return;
    }
    let served = LoadedServer::start();
    let mut terminal = open_top(&served, (100, 30), "stty rows 65535 cols 65535;");
    let title = format!("rpcrdma top  pid {}", std::process::id());
    assert!(terminal.shows(|screen| screen.contains(&title)));
    terminal.key("q");
    assert!(terminal.ends());
}

#[test]
fn a_dumb_terminal_gets_plain_text_and_closing_a_terminal_ends_top() {
    if !has("tmux") {
        return;
    }
    let served = LoadedServer::start();
    let mut terminal = open_top(&served, (200, 50), "TERM=dumb");
    assert!(terminal.shows(|screen| screen.contains("shard  busy") && !screen.contains("q: quit")));
    drop(terminal);
    // Under nohup the program gets no SIGHUP when the terminal closes.
    let pid = served.directory().join("pid").display().to_string();
    let mut terminal = open_top(&served, (80, 24), &format!("echo $$ >{pid}; trap '' HUP;"));
    assert!(terminal.shows(|screen| screen.contains("q: quit")));
    let pid = std::fs::read_to_string(&pid).expect("a process ID");
    drop(terminal);
    let running = || std::path::Path::new("/proc").join(pid.trim()).exists();
    assert!(eventually(|| !running()), "expected the end of process {pid}");
}
