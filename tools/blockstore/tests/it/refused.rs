//! What the system refuses to the store: room on the disk, an io_uring, O_DIRECT, registered memory.
#![forbid(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, StatxFlags};
use rustix::process::Signal;

use super::protocol::{Status, Written};
use super::{CHUNK, PROGRAM, Raw, Sent, Store, WRITTEN, address, data, directory, random_file, says, text};

/// A command that runs what its further arguments say where `script` has done its part: a shell with a user and mounts
/// of its own. `None` if there is no such thing here.
fn unshared(script: &str) -> Option<Command> {
    let command = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
        command
    };
    let output = command(script).arg("true").output().ok();
    if output.as_ref().is_none_or(|output| !output.status.success()) {
        println!("not run: no user and mount namespaces here: {output:?}");
        return None;
    }
    Some(command(script))
}

#[test]
fn a_full_disk_is_an_error_and_keeps_its_data() {
    let ways = [&["--io", "uring"][..], &["--io", "uring", "--buffered"], &["--io", "threads"]];
    for way in ways {
        let dir = directory();
        let (disk, file) = (text(dir.path()), dir.path().join("store"));
        let Some(mut command) = unshared(&format!(r#"mount -t tmpfs -o size=4m tmpfs {disk} && exec "$@""#)) else {
            return;
        };
        let store = Store::serve_by(command.arg(PROGRAM), &file, &[way, &["--size", "4M"]].concat());
        // All of the disk is the store's. Now it has a hole, and others have filled the disk but for half of a block.
        let disk = PathBuf::from(format!("/proc/{}/root/{disk}", store.child.id()));
        let all = File::options().write(true).open(disk.join("store")).expect("the store");
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&all, hole, 1 << 20, 3 << 20).expect("a hole");
        let half = 512 << 10;
        std::fs::write(disk.join("other"), vec![1; (3 << 20) - half]).expect("there is room");

        let mut raw = Raw::connect(&store);
        let mut bytes = vec![0; 1 << 20];
        fastrand::Rng::with_seed(15).fill(&mut bytes);
        let written = Written { count: half as u32, stable: false };
        assert_eq!(raw.write(0, half as u32, &bytes[..half], CHUNK), Ok(Ok(written)), "{way:?}");
        // The first half of it finds room.
        assert_eq!(raw.write(1 << 20, 1 << 20, &bytes, CHUNK), Ok(Err(Status::NoSpace)), "{way:?}");
        for sent in [CHUNK, Sent::Inline] {
            assert_eq!(raw.write(3 << 20, 100, &bytes[..100], sent), Ok(Err(Status::NoSpace)), "{way:?}, {sent:?}");
        }
        let mut other = Raw::connect(&store);
        for raw in [&mut raw, &mut other] {
            assert_eq!(raw.write(0, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{way:?}: there is room for it");
            assert_eq!(raw.read(0, half as u32, Some(half)), data(false, &bytes[..half]), "{way:?}");
            let hole = data(false, &[0; 4096]);
            assert_eq!(raw.read(2 << 20, 4096, Some(4096)), hole, "{way:?}: a hole is read without room for it");
            assert_eq!(raw.flush(), Ok(Status::Ok), "{way:?}");
        }
        std::fs::remove_file(disk.join("other")).expect("it was there");
        assert_eq!(raw.write(3 << 20, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{way:?}: there is room again");
        drop((raw, other));
        assert!(store.stop(Signal::TERM).contains(" 0 refused"));
    }
}

#[test]
fn a_store_that_does_not_fit_its_disk_is_refused() {
    let dir = directory();
    let disk = text(dir.path());
    let Some(mut command) = unshared(&format!(r#"mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@""#)) else {
        return;
    };
    command.args([PROGRAM, "serve", "--size", "4M", "--listen", &address(), "--file"]).arg(dir.path().join("store"));
    says(&command.output().expect("a shell"), &["fallocate of 4194304 bytes", "df ", "No space left"]);
}

/// A command that runs what its further arguments say where this system call is not permitted.
fn without(call: libc::c_long) -> Command {
    // Of each call: its number; if it is this one, EPERM; else it is allowed (linux/filter.h, linux/seccomp.h).
    let filter = r"
        my ($prctl, $call) = (shift, shift);
        my $code = pack('SCCL' x 4, 0x20, 0, 0, 0, 0x15, 0, 1, $call, 0x06, 0, 0, 0x50001, 0x06, 0, 0, 0x7fff0000);
        my $program = pack('Sx![P]P', 4, $code);
        syscall($prctl, 38, 1, 0, 0, 0) == 0 or die qq(PR_SET_NO_NEW_PRIVS: $!);
        syscall($prctl, 22, 2, $program) == 0 or die qq(PR_SET_SECCOMP: $!);
        exec @ARGV or die qq($ARGV[0]: $!)";
    let mut command = Command::new("perl");
    command.args(["-e", filter, &libc::SYS_prctl.to_string(), &call.to_string()]);
    command
}

/// What a server says of itself, first and last, and on standard error, when it is served by a command and asked for
/// some blocks.
fn serves_by(command: &mut Command, arguments: &[&str]) -> (String, String) {
    let dir = directory();
    let (file, errors) = (dir.path().join("store"), dir.path().join("errors"));
    let bytes = random_file(&file, 1 << 20, 15);
    command.arg(PROGRAM).stderr(File::create(&errors).expect("a file"));
    let store = Store::serve_by(command, &file, arguments);
    let mut raw = Raw::connect(&store);
    assert_eq!(raw.write(4096, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)));
    for room in [Some(100), None] {
        assert_eq!(raw.read(4096, 100, room), data(false, &bytes[..100]));
    }
    assert_eq!(raw.read(8192, 65536, Some(65536)), data(false, &bytes[8192..8192 + 65536]));
    drop(raw);
    let said = store.listens.clone() + &store.stop(Signal::TERM);
    let errors = std::fs::read_to_string(errors).expect("text");
    let is_memory = |line: &&str| line.starts_with("memory: ");
    assert_eq!(errors.lines().filter(is_memory).count(), 1, "{errors}");
    (said, errors.lines().filter(|line| !is_memory(line)).map(|line| format!("{line}\n")).collect())
}

#[test]
fn without_io_uring_the_store_reports_it_and_continues() {
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_register, libc::SYS_io_uring_enter] {
        let (said, errors) = serves_by(&mut without(call), &["--workers", "2"]);
        assert!(said.contains("drained") && said.contains(" 0 refused"), "{call}: {said}");
        let words = "no io_uring here (Operation not permitted";
        let told = errors.contains(words) && errors.contains("by workers") && errors.lines().count() == 1;
        assert!(told, "{call}: {errors}");

        let dir = directory();
        let file = dir.path().join("store");
        random_file(&file, 5000, 16);
        let serve = [PROGRAM, "serve", "--io", "uring", "--listen", &address(), "--file", text(&file)];
        let output = without(call).args(serve).output().expect("perl");
        says(&output, &["io_uring: Operation not permitted", "kernel.io_uring_disabled", "seccomp"]);
    }
}

/// What the system says of I/O past the page cache of a file in `dir`: whether there is any.
fn has_direct(dir: &Path) -> bool {
    let path = dir.join("direct");
    random_file(&path, 4096, 17);
    let flags = OFlags::RDONLY | OFlags::DIRECT;
    let Ok(file) = rustix::fs::open(&path, flags, Mode::empty()) else { return false };
    let told = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    told.is_ok_and(|told| told.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && told.stx_dio_offset_align > 0)
}

#[test]
fn the_start_line_reports_o_direct_or_its_absence() {
    let uring = &["--io", "uring"];
    let (said, errors) = serves_by(&mut Command::new("env"), uring);
    let first = said.lines().next().expect("a line");
    let (told, not) = (first.ends_with(", io_uring, O_DIRECT"), errors.contains("no O_DIRECT here ("));
    let there = has_direct(directory().path());
    assert_eq!((told, not), (there, !there), "{said}{errors}");

    // The system does not say what it wants of such I/O.
    let (said, errors) = serves_by(&mut without(libc::SYS_statx), uring);
    assert!(said.lines().next().is_some_and(|first| first.ends_with(", io_uring")), "{said}");
    assert!(said.contains("drained") && said.contains(" 0 refused"), "{said}");
    let told = errors.contains(": no O_DIRECT here (") && errors.contains("): buffered I/O");
    assert!(told && errors.lines().count() == 1, "{errors}");

    // Nor is it missed by who does not want it.
    let (said, errors) = serves_by(&mut Command::new("env"), &["--io", "uring", "--buffered"]);
    assert!(said.lines().next().is_some_and(|first| first.ends_with(", io_uring")) && errors.is_empty(), "{said}");
}

#[test]
fn unregistered_memory_is_reported_and_served() {
    // With a little there is a ring, but no memory of buffers in it; with none there may be no ring either. What other
    // processes of this user have locked counts too: even a little may be none.
    for limit in ["1024", "0"] {
        let Some(mut command) = unshared(&format!(r#"ulimit -l {limit} && exec "$@""#)) else { return };
        let (said, errors) = serves_by(&mut command, &["--io", "auto"]);
        assert!(said.contains("drained") && said.contains(" 0 refused"), "{said}");
        let why = if errors.contains("no io_uring here") { "Cannot allocate memory" } else { "are not registered" };
        assert!(errors.contains(why) && errors.contains("ulimit -l") && errors.lines().count() == 1, "{errors}");
    }
}
