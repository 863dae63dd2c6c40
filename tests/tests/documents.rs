//! Runs the commands of the documents and compares their output.
//!
//! The blocks of a document run in order, in one shell. The words after a block's fence declare its kind:
//!
//! | words | block |
//! |---|---|
//! | `sh` | commands for this host |
//! | `sh vm` | commands for the virtual machine |
//! | `sh vm server` | commands for another host in the virtual machine, a network namespace |
//! | `sh vm siw` | commands for the virtual machine, if it has the soft-iWARP driver |
//! | `sh not run: REASON` | commands that the test does not run |
//! | `text output` | output of the preceding commands |
//! | `rust PATH` | content of that file |
//!
//! Each line of `text output` must occur in the output, but numbers may differ. A `…` at a line's end matches any text,
//! and a line of only `…` is ignored. After a command that ends with `&`, which starts a server, the script waits until
//! the server listens.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rpcrdma_tests::document::{Runner, blocks};
use rpcrdma_tests::source::{read, root};
use rustix::process::{Pid, Signal, kill_process_group};

/// Start of each script. A block's output includes its servers' output. `rpcrdma doctor` may report warnings.
const PRELUDE: &str = r#"set -euo pipefail
ready() {
    local i
    for ((i = 0; i < 1500; i++)); do
        if grep -q '^listening' "$1"; then cat "$1"; return; fi
        kill -0 "$2" 2>/dev/null || break
        sleep 0.1
    done
    cat "$1"
    return 1
}
rpcrdma() { command rpcrdma "$@" || [[ $1 == doctor && $? == 1 ]]; }
"#;

/// Set-up of the virtual machine: two hosts with the documents' addresses, and the documents' variables.
///
/// The set-up first ends the `rpc.mountd` of an earlier script, to free the port of MOUNT.
const MACHINE: &str = r#"pkill -x rpc.mountd || true
ip netns add server
ip link add eth0 type veth peer name eth0 netns server
ip address add 192.0.2.2/24 dev eth0
ip -netns server address add 192.0.2.1/24 dev eth0
ip -netns server link set lo up
ip -netns server link set eth0 up
ip link set eth0 up
mkdir -p /srv/data
mount -t tmpfs data /srv/data
export DEVICE=rxe0 GID=1 SERVER=10.0.0.1
restore() {
    umount -l /mnt /srv/data 2>/dev/null || true
    rdma link delete siw0 2>/dev/null || true
    ip link delete eth0
    ip netns delete server
    echo 0 >/proc/sys/vm/nr_hugepages
}
trap restore EXIT
"#;

/// The directory `target` of the build.
fn target() -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    program.ancestors().nth(3).expect("target/PROFILE/deps").to_owned()
}

/// Creates a directory with a clone of this repository: links to its files, and its own `target`.
fn clone_repository() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let clone = directory.path().join("rpcrdma");
    fs::create_dir(&clone).expect("a directory");
    for entry in fs::read_dir(root()).expect("the repository") {
        let name = entry.expect("an entry").file_name();
        if name != "target" && name != ".git" {
            symlink(root().join(&name), clone.join(&name)).expect("a link");
        }
    }
    let own = target().join("documents");
    fs::create_dir_all(&own).expect("a directory");
    symlink(own, clone.join("target")).expect("a link");
    directory
}

/// Converts a block's commands to a script, which waits until each server in the background listens.
fn script(text: &str, logs: &Path) -> String {
    let mut script = PRELUDE.to_owned();
    for (n, line) in text.lines().enumerate() {
        match line.strip_suffix(" &") {
            Some(server) => {
                let log = logs.join(format!("server-{n}"));
                let log = log.display();
                script.push_str(&format!("{server} >{log} 2>&1 &\nready {log} $!\n"));
            }
            None => script.push_str(&format!("{line}\n")),
        }
    }
    script
}

/// Replaces each number with its unit prefix by 0, and each run of white space by one space.
fn normalize(line: &str) -> String {
    let mut normalized = String::new();
    let mut in_number = false;
    for c in line.split_whitespace().collect::<Vec<_>>().join(" ").chars() {
        let is_number = c.is_ascii_digit() || in_number && matches!(c, '.' | 'k' | 'M' | 'G');
        if is_number && !in_number {
            normalized.push('0');
        } else if !is_number {
            normalized.push(c);
        }
        in_number = is_number;
    }
    normalized
}

/// Finds the first expected line that was not printed.
fn find_missing_line<'a>(expected: &'a str, printed: &str) -> Option<&'a str> {
    let printed: Vec<String> = printed.lines().map(normalize).collect();
    expected.lines().find(|line| {
        let prefix = match line.split_once('…') {
            Some((start, _)) if start.trim().is_empty() => return false,
            Some((start, _)) => normalize(start),
            None => return !printed.contains(&normalize(line)),
        };
        !printed.iter().any(|line| line.starts_with(&prefix))
    })
}

/// Runs a document's blocks: in the virtual machine those for the machine, elsewhere those for a host.
fn run(document: &str) {
    let machine = std::env::var_os("RPCRDMA_VM").is_some();
    let runs_here = |runner| match runner {
        Runner::Host => !machine,
        Runner::Machine | Runner::Server | Runner::SoftIwarp => machine,
        Runner::NotRun => false,
    };
    let blocks = blocks(&read(document));
    if !blocks.iter().any(|block| block.runner().is_some_and(runs_here)) {
        return;
    }
    let (clone, logs) = (clone_repository(), tempfile::tempdir().expect("a directory"));
    let logs = logs.path();
    let lacks_siw =
        !Command::new("modprobe").args(["--dry-run", "siw"]).output().is_ok_and(|done| done.status.success());
    // The main script runs each block's script, and writes its output to a file. For each block of expected output,
    // `outputs` has its line, the output file of the block before it, and its text.
    let mut main = format!("{PRELUDE}{}", if machine { MACHINE } else { "" });
    let mut outputs: Vec<(usize, PathBuf, String)> = Vec::new();
    let mut last_output = None;
    for block in &blocks {
        if let Some(runner) = block.runner() {
            last_output = None;
            if runner == Runner::SoftIwarp && machine && lacks_siw {
                println!("not run: {document}:{}: there is no driver siw", block.line);
            } else if runs_here(runner) {
                let directory = logs.join(block.line.to_string());
                fs::create_dir(&directory).expect("a directory");
                let (file, output) = (directory.join("script"), directory.join("output"));
                fs::write(&file, script(&block.text, &directory)).expect("a written file");
                let shell = if runner == Runner::Server { "ip netns exec server bash" } else { "source" };
                let (file, output_name) = (file.display(), output.display());
                main.push_str(&format!("echo '{document}:{}'\n{shell} {file} >{output_name} 2>&1\n", block.line));
                last_output = Some(output);
            }
        } else if let Some(path) = block.info.strip_prefix("rust ").filter(|_| !machine) {
            let file = logs.join(format!("{}.rs", block.line));
            fs::write(&file, &block.text).expect("a written file");
            main.push_str(&format!("cp {} {path}\n", file.display()));
        } else if let Some(output) = last_output.take().filter(|_| block.info == "text output") {
            outputs.push((block.line, output, block.text.clone()));
        }
    }

    // All documents but the first expect the built programs in the path.
    let (debug, path) = (target().join("debug"), std::env::var("PATH").expect("a path"));
    let path = format!("{}:{path}", debug.display());
    let mut shell = Command::new("bash");
    shell.args(["-c", &main]).current_dir(clone.path().join("rpcrdma")).process_group(0).stdin(Stdio::null());
    // All crates, also those that a document creates, share one target directory, so that dependencies are built once.
    shell.env("PATH", path).env("CARGO_TARGET_DIR", target().join("documents")).env("CARGO_NET_OFFLINE", "true");
    for (knob, value) in [("LTO", "off"), ("CODEGEN_UNITS", "16"), ("DEBUG", "false"), ("OPT_LEVEL", "0")] {
        shell.env(format!("CARGO_PROFILE_RELEASE_{knob}"), value); // Shortens the build.
    }
    let mut shell = shell.spawn().expect("a shell");
    let deadline = Instant::now() + Duration::from_secs(840);
    let status = loop {
        match shell.try_wait().expect("the status of the shell") {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    // Ends the servers that the blocks have started.
    let _ = kill_process_group(Pid::from_child(&shell), Signal::KILL);
    let printed = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
    if !status.is_some_and(|status| status.success()) {
        for block in &blocks {
            let output = printed(&logs.join(block.line.to_string()).join("output"));
            if !output.is_empty() {
                println!("{document}:{}:\n{}\n{output}", block.line, block.text);
            }
        }
        panic!("{document}: the last command above failed: {status:?}");
    }
    for (line, output, expected) in outputs {
        let printed = printed(&output);
        if let Some(line_expected) = find_missing_line(&expected, &printed) {
            panic!("{document}:{line}: not printed: {line_expected}\n{printed}");
        }
    }
}

/// A test for each document.
macro_rules! documents {
    ($($name:ident $path:literal)*) => {
        $(#[test] fn $name() { run($path); })*
        #[test]
        fn each_document_has_a_test() {
            assert_eq!(rpcrdma_tests::document::COMMANDS, [$($path),*]);
        }
    };
}
documents! {
    readme "README.md"
    tools "tools/README.md"
    deployment "deploy/README.md"
    nfs "deploy/nfs.md"
    hardware "deploy/hardware.md"
    iwarp "deploy/iwarp.md"
    containers "deploy/containers.md"
    config "tools/config/README.md"
    host "tools/host/README.md"
    nfs3d "tools/nfs3d/README.md"
    rpcbind "tools/rpcbind/README.md"
    blockstore "tools/blockstore/README.md"
    xdrgen "tools/xdrgen/README.md"
}

#[test]
fn output_lines_are_compared_without_their_numbers() {
    let printed = "a 12.5 us\nb   1.39M calls\nc xyz\n";
    assert_eq!(find_missing_line("a 7 us\n…\nb 400k calls\nc x…\n", printed), None);
    assert_eq!(find_missing_line("c x\n", printed), Some("c x"));
    assert_eq!(find_missing_line("d…\n", printed), Some("d…"));
}
