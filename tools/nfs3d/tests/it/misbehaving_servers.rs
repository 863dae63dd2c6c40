//! `nfs3c` with servers that are busy or slow, or send invalid listings.

use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::client::pattern;
use crate::fake_server::{Busy, FakeServer, LEN, Listed};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

#[track_caller]
fn assert_fails(output: &Output, words: &str) {
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains(words), "{:?}: {errors}", output.status);
}

fn list_one_name(_: u64) -> (Vec<Listed>, bool) {
    (vec![(b"name".to_vec(), false, 1)], true)
}

/// The time limit is 10 s. The server would end after 60 s.
#[test]
fn a_mount_reply_that_arrives_slowly_does_not_extend_the_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mount = listener.local_addr().expect("an address").to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream.set_nodelay(true).expect("a socket");
        // The server sends a fragment of 64 KiB, one byte at a time.
        let bytes = [0, 1, 0, 0].into_iter().chain(std::iter::repeat(0));
        bytes.take(600).any(|byte| {
            std::thread::sleep(Duration::from_millis(100));
            stream.write_all(&[byte]).is_err()
        })
    });
    let output = Command::new(env!("CARGO_BIN_EXE_nfs3c"))
        .args(["soft:nfs3c-nobody", "/", "--mount", &mount, "ls"])
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    assert_fails(&output, "timed out");
    assert!(server.join().expect("no panic"), "the client ended before the server");
}

#[test]
fn repeated_cookies_end_with_an_error() {
    type List = fn(u64) -> (Vec<Listed>, bool);
    let itself: List = |cookie| (vec![(b"name".to_vec(), false, cookie)], false);
    let the_first: List = |_| (vec![(b"name".to_vec(), false, 7)], false);
    let a_loop: List = |cookie| (vec![(b"name".to_vec(), false, (cookie + 1) % 5)], false);
    for (list, calls) in [(itself, 1), (the_first, 2), (a_loop, 5)] {
        let fake = FakeServer::new(list, Busy::Never);
        for command in ["ls", "sum"] {
            fake.lists.store(0, Ordering::Relaxed);
            assert_fails(&fake.run(&[command]), "the server repeats cookie");
            assert_eq!(fake.lists.load(Ordering::Relaxed), calls);
        }
    }
    let nothing: List = |_| (vec![], false);
    assert_fails(
        &FakeServer::new(nothing, Busy::Never).run(&["ls"]),
        "the server lists no entries before the end of the directory",
    );
}

#[test]
fn invalid_names_in_listings_are_refused() {
    type List = fn(u64) -> (Vec<Listed>, bool);
    let lists: [(List, &str); 4] = [
        (|_| (vec![(b"../../etc/passwd".to_vec(), false, 1)], true), "the invalid name \"../../etc/passwd\""),
        (|_| (vec![(b"a\0b".to_vec(), false, 1)], true), "the invalid name \"a\\000b\""),
        (|_| (vec![(b"".to_vec(), false, 1)], true), "the invalid name \"\""),
        (|_| (vec![(b"/".to_vec(), true, 1)], true), "the invalid name \"/\""),
    ];
    for (list, words) in lists {
        for command in ["ls", "sum"] {
            assert_fails(&FakeServer::new(list, Busy::Never).run(&[command]), words);
        }
    }
    let itself: List = |_| (vec![(b"d".repeat(255), true, 1)], true);
    assert_fails(&FakeServer::new(itself, Busy::Never).run(&["sum"]), "a directory of the server contains itself");
}

#[test]
fn calls_are_retried_while_the_server_is_busy() {
    let local = tempfile::tempdir().unwrap();
    let (original, copy) = (local.path().join("original"), local.path().join("copy"));
    std::fs::write(&original, pattern(LEN)).unwrap();
    let [original, copy] = [&original, &copy].map(|path| path.to_str().expect("text"));
    let fake = FakeServer::new(list_one_name, Busy::Once);
    for (command, procedures) in [
        (&["get", "d/file", copy][..], &["LOOKUP", "GETATTR", "READ"][..]),
        (&["put", original, "d/file"], &["CREATE", "WRITE", "SETATTR", "COMMIT"]),
        (&["ls"], &["READDIRPLUS"]),
    ] {
        let output = fake.run(command);
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        for procedure in procedures {
            let start = format!("nfs3c: {procedure} of ");
            let line =
                errors.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{start}: {errors}"));
            assert!(line.contains("NFS3ERR_JUKEBOX") && line.contains("trying again"), "{line}");
        }
    }
    assert!(std::fs::read(copy).unwrap() == pattern(LEN), "read whole");
    assert!(fake.written() == pattern(LEN), "written whole");
}

#[test]
fn a_server_that_stays_busy_is_an_error() {
    let fake = FakeServer::new(list_one_name, Busy::Always);
    let output = fake.run(&["--busy-timeout", "0", "ls"]);
    let errors = text(&output.stderr);
    assert!(errors.starts_with("nfs3c: memory: ") && errors.lines().count() == 2, "{errors}");
    assert!(errors.ends_with("\nnfs3c: FSINFO: NFS3ERR_JUKEBOX\n"), "{errors}");
    let output = fake.run(&["--busy-timeout", "1", "ls"]);
    assert_fails(&output, "nfs3c: the server was busy for 1s (--busy-timeout): FSINFO: NFS3ERR_JUKEBOX");
}
