//! The key file for sealing file handles, and the users that may read or replace it.

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, lchown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FileType, Mode};
use rustix::process::geteuid;

use crate::client::is_root;

/// ID of the user and group `nobody`.
const NOBODY: u32 = 65534;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
}

/// Starts a server without `--key`, and kills it. Returns its first line and its standard error.
fn start_without_key(home: &Path, export: &Path, umask: &str) -> String {
    let mut shell = Command::new("sh");
    // The shell sets the umask of the server.
    shell.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
    shell.arg(home.join("../nfs3d")).arg(export);
    shell.args(["--mount-port", "0", "--listen", &format!("soft:nfs3d-test-key-{}-{umask}", std::process::id())]);
    if is_root() {
        shell.uid(NOBODY).gid(NOBODY);
    }
    let shell = shell.env("HOME", home).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = shell.spawn().expect("it runs");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut line).expect("text");
    server.kill().expect("it runs");
    let output = server.wait_with_output().expect("it ends");
    line + &String::from_utf8_lossy(&output.stderr)
}

/// The modes do not depend on the umask, which the server clears so that clients choose the modes of files.
#[test]
fn only_the_servers_user_may_write_the_directories_and_the_key_that_it_creates() {
    for umask in ["000", "022"] {
        let directory = tempfile::tempdir().expect("a directory");
        let (home, export) = (directory.path().join("home"), directory.path().join("export"));
        set_mode(directory.path(), 0o755);
        // Other users may not be able to reach the build directory.
        fs::copy(env!("CARGO_BIN_EXE_nfs3d"), directory.path().join("nfs3d")).expect("a copy");
        for path in [&home, &export] {
            fs::create_dir(path).expect("a directory");
            set_mode(path, 0o755);
            if is_root() {
                chown(path, Some(NOBODY), Some(NOBODY)).expect("chown");
            }
        }
        let output = start_without_key(&home, &export, umask);
        assert!(output.starts_with("listening"), "{output}");
        let modes = [".local", ".local/state", ".local/state/nfs3d.key"].map(|name| mode(&home.join(name)));
        assert_eq!(modes.map(|mode| format!("{mode:o}")), ["700", "700", "600"], "umask {umask}");
        let key = home.canonicalize().expect("a path").join(".local/state/nfs3d.key");
        if is_root() {
            // A service may read a key that belongs to root, as a member of the key's group.
            chown(&key, Some(0), Some(NOBODY)).expect("chown");
            set_mode(&key, 0o640);
            let output = start_without_key(&home, &export, umask);
            assert!(output.starts_with("listening"), "{output}");
        }
        set_mode(&key, 0o644);
        let output = start_without_key(&home, &export, umask);
        let expected = format!("{} has mode 0644, so that other users could read the key: chmod 600", key.display());
        assert!(output.contains(&expected), "{output}");
        // An earlier version created the directory with this mode.
        set_mode(&home.join(".local/state"), 0o777);
        let output = start_without_key(&home, &export, umask);
        let state = home.canonicalize().expect("a path").join(".local/state");
        let expected = format!("{} has mode 0777", state.display());
        assert!(output.contains(&expected) && output.contains(&format!("chmod go-w {}", state.display())), "{output}");
    }
}

/// Opening a FIFO, for example, would block until there is a writer.
#[test]
fn a_key_that_is_not_a_regular_file_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let (export, fifo) = (directory.path().join("export"), directory.path().join("fifo"));
    fs::create_dir(&export).expect("a directory");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).expect("a FIFO");
    let mut server = Command::new(env!("CARGO_BIN_EXE_nfs3d"));
    server.arg(&export).args(["--mount-port", "0", "--key"]).arg(&fifo).stdin(Stdio::null());
    let output = server.output().expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    let output = String::from_utf8(output.stderr).expect("text");
    assert!(
        output.contains(&format!("{} is not a regular file", fifo.canonicalize().expect("a path").display())),
        "{output}"
    );
}

#[test]
fn a_key_with_a_second_name_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let (export, key) = (directory.path().join("export"), directory.path().join("key"));
    fs::create_dir(&export).expect("a directory");
    fs::write(&key, [7; 32]).expect("a key");
    set_mode(&key, 0o600);
    fs::hard_link(&key, export.join("link")).expect("a link");
    let mut server = Command::new(env!("CARGO_BIN_EXE_nfs3d"));
    // The port is in use, so a server that accepts the key ends immediately.
    let port = std::net::TcpListener::bind("[::]:0").expect("a port");
    server.arg(&export).args(["--mount-port", &port.local_addr().expect("an address").port().to_string()]);
    let output = server.arg("--key").arg(&key).stdin(Stdio::null()).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    let output = String::from_utf8(output.stderr).expect("text");
    assert!(output.contains(&format!("--key {}: the file has 2 hard links", key.display())), "{output}");
}

#[test]
fn a_key_that_others_may_read_or_replace_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let top = directory.path().canonicalize().expect("a path");
    let (export, above, parent) = (top.join("export"), top.join("above"), top.join("above/parent"));
    let (key, link) = (parent.join("key"), top.join("link"));
    fs::create_dir(&export).expect("a directory");
    fs::create_dir_all(&parent).expect("directories");
    std::os::unix::fs::symlink(&key, &link).expect("a link");
    // Returns the error of a server with this key, or nothing if the server accepts the key.
    let start_error = |name: &Path| {
        let mut server = Command::new(env!("CARGO_BIN_EXE_nfs3d"));
        // The port is in use, so a server that accepts the key ends immediately.
        let port = std::net::TcpListener::bind("[::]:0").expect("a port");
        server.arg(&export).args(["--mount-port", &port.local_addr().expect("an address").port().to_string()]);
        let output = server.arg("--key").arg(name).stdin(Stdio::null()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1));
        let output = String::from_utf8(output.stderr).expect("text");
        (!output.contains("for MOUNT (--mount-port")).then_some(output)
    };
    set_mode(&above, 0o755);
    set_mode(&parent, 0o755);
    assert_eq!(start_error(&key), None, "the key is created");
    assert_eq!(format!("{:o}", mode(&key)), "600");
    for (path, bad, good) in [
        (&key, 0o620, 0o600),
        (&key, 0o604, 0o600),
        (&key, 0o640, 0o400),
        (&parent, 0o775, 0o755),
        (&above, 0o757, 0o755),
    ] {
        set_mode(path, bad);
        for name in [&key, &link] {
            let output = start_error(name).expect("an error");
            let remedy = format!("chmod {} {}", if path == &key { "600" } else { "go-w" }, path.display());
            let problem = format!("{} has mode {bad:04o}", path.display());
            assert!(output.contains(&problem) && output.contains(&remedy), "{output}");
        }
        set_mode(path, good);
        assert_eq!(start_error(&key), None, "{}", path.display());
    }
    // In a sticky directory, other users cannot remove the file.
    set_mode(&above, 0o1777);
    assert_eq!(start_error(&key), None);
    // A directory between two symbolic links is checked, too.
    let (first, second) = (top.join("first"), above.join("second"));
    std::os::unix::fs::symlink("above/../above/second", &first).expect("a link");
    std::os::unix::fs::symlink(&link, &second).expect("a link");
    assert_eq!(start_error(&first), None);
    let between = top.join("between");
    fs::create_dir(&between).expect("a directory");
    fs::rename(&second, between.join("second")).expect("a name");
    fs::remove_file(&first).expect("a link");
    std::os::unix::fs::symlink("between/second", &first).expect("a link");
    set_mode(&between, 0o777);
    let output = start_error(&first).expect("an error");
    assert!(output.contains(&format!("{} has mode 0777", between.display())), "{output}");
    set_mode(&between, 0o755);
    assert_eq!(start_error(&first), None);
    if !geteuid().is_root() {
        return println!("not run: files of other users need root");
    }
    // The owner of a link may replace it in a sticky directory, but not where only root may write.
    let second = between.join("second");
    lchown(&second, Some(NOBODY), None).expect("chown");
    assert_eq!(start_error(&first), None);
    set_mode(&between, 0o1777);
    for name in [&first, &second] {
        let output = start_error(name).expect("an error");
        assert!(output.contains(&format!("{} belongs to user {NOBODY}", second.display())), "{output}");
    }
    lchown(&second, Some(0), None).expect("chown");
    assert_eq!(start_error(&first), None);
    for path in [&key, &parent] {
        chown(path, Some(NOBODY), None).expect("chown");
        let output = start_error(&key).expect("an error");
        assert!(output.contains(&format!("{} belongs to user {NOBODY}", path.display())), "{output}");
        chown(path, Some(0), None).expect("chown");
    }
}
