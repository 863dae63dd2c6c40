//! A store on a system without disk space, io_uring, O_DIRECT, or memory that may be locked.
#![forbid(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, StatxFlags};
use rustix::process::Signal;

use super::protocol::{Status, Written};
use super::{
    CHUNK, PROGRAM, Placement, RawClient, StoreServer, WRITTEN, address, check_failure, data, directory, random_file,
    text,
};

/// Returns a command that runs `script` in its own user and mount namespaces, with the arguments that a caller adds.
///
/// Returns `None` if the system does not allow such namespaces.
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
fn a_full_disk_fails_writes_and_keeps_its_data() {
    let modes = [&["--io", "uring"][..], &["--io", "uring", "--buffered"], &["--io", "threads"]];
    for mode in modes {
        let dir = directory();
        let (disk, file) = (text(dir.path()), dir.path().join("store"));
        let Some(mut command) = unshared(&format!(r#"mount -t tmpfs -o size=4m tmpfs {disk} && exec "$@""#)) else {
            return;
        };
        let store = StoreServer::serve_with(command.arg(PROGRAM), &file, &[mode, &["--size", "4M"]].concat());
        // The store fills the disk. The test then punches a hole into its file, and fills the free space with another
        // file, except for half of a block.
        let disk = PathBuf::from(format!("/proc/{}/root/{disk}", store.child.id()));
        let store_file = File::options().write(true).open(disk.join("store")).expect("the store");
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&store_file, hole, 1 << 20, 3 << 20).expect("a hole");
        let half = 512 << 10;
        std::fs::write(disk.join("other"), vec![1; (3 << 20) - half]).expect("there is room");

        let mut raw = RawClient::connect(&store);
        let mut bytes = vec![0; 1 << 20];
        fastrand::Rng::with_seed(15).fill(&mut bytes);
        let written = Written { count: half as u32, stable: false };
        assert_eq!(raw.write(0, half as u32, &bytes[..half], CHUNK), Ok(Ok(written)), "{mode:?}");
        // There is room only for the first half of this block.
        assert_eq!(raw.write(1 << 20, 1 << 20, &bytes, CHUNK), Ok(Err(Status::NoSpace)), "{mode:?}");
        for placement in [CHUNK, Placement::Inline] {
            assert_eq!(
                raw.write(3 << 20, 100, &bytes[..100], placement),
                Ok(Err(Status::NoSpace)),
                "{mode:?}, {placement:?}"
            );
        }
        let mut other = RawClient::connect(&store);
        for raw in [&mut raw, &mut other] {
            assert_eq!(
                raw.write(0, 100, &bytes[..100], CHUNK),
                Ok(Ok(WRITTEN)),
                "{mode:?}: allocated blocks are written"
            );
            assert_eq!(raw.read(0, half as u32, Some(half)), data(false, &bytes[..half]), "{mode:?}");
            let hole = data(false, &[0; 4096]);
            assert_eq!(raw.read(2 << 20, 4096, Some(4096)), hole, "{mode:?}: reads of a hole allocate nothing");
            assert_eq!(raw.flush(), Ok(Status::Ok), "{mode:?}");
        }
        std::fs::remove_file(disk.join("other")).expect("removed");
        assert_eq!(raw.write(3 << 20, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)), "{mode:?}: there is room again");
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
    check_failure(&command.output().expect("a shell"), &["fallocate of 4194304 bytes", "df ", "No space left"]);
}

/// Returns a command that runs the program in its arguments with a system call denied.
fn command_without(call: libc::c_long) -> Command {
    // The filter loads the number of the call, fails this call with EPERM, and allows all others (linux/filter.h,
    // linux/seccomp.h).
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

/// Starts a server with `command`, writes and reads some blocks, and stops it. Returns its standard output and its
/// standard error without the line about memory.
fn serve_some_blocks(command: &mut Command, arguments: &[&str]) -> (String, String) {
    let dir = directory();
    let (file, errors) = (dir.path().join("store"), dir.path().join("errors"));
    let bytes = random_file(&file, 1 << 20, 15);
    command.arg(PROGRAM).stderr(File::create(&errors).expect("a file"));
    let store = StoreServer::serve_with(command, &file, arguments);
    let mut raw = RawClient::connect(&store);
    assert_eq!(raw.write(4096, 100, &bytes[..100], CHUNK), Ok(Ok(WRITTEN)));
    for room in [Some(100), None] {
        assert_eq!(raw.read(4096, 100, room), data(false, &bytes[..100]));
    }
    assert_eq!(raw.read(8192, 65536, Some(65536)), data(false, &bytes[8192..8192 + 65536]));
    drop(raw);
    let output = store.ready_line.clone() + &store.stop(Signal::TERM);
    let errors = std::fs::read_to_string(errors).expect("text");
    let is_memory = |line: &&str| line.starts_with("memory: ");
    assert_eq!(errors.lines().filter(is_memory).count(), 1, "{errors}");
    (output, errors.lines().filter(|line| !is_memory(line)).map(|line| format!("{line}\n")).collect())
}

#[test]
fn without_io_uring_the_server_reports_it_and_uses_threads() {
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_register, libc::SYS_io_uring_enter] {
        let (output, errors) = serve_some_blocks(&mut command_without(call), &["--workers", "2"]);
        assert!(output.contains("drained") && output.contains(" 0 refused"), "{call}: {output}");
        let words = "no io_uring here (Operation not permitted";
        let is_reported =
            errors.contains(words) && errors.contains("workers write them") && errors.lines().count() == 1;
        assert!(is_reported, "{call}: {errors}");

        let dir = directory();
        let file = dir.path().join("store");
        random_file(&file, 5000, 16);
        let serve = [PROGRAM, "serve", "--io", "uring", "--listen", &address(), "--file", text(&file)];
        let output = command_without(call).args(serve).output().expect("perl");
        check_failure(&output, &["io_uring: Operation not permitted", "kernel.io_uring_disabled", "seccomp"]);
    }
}

/// Whether the system reports that files in `dir` support O_DIRECT.
fn has_direct(dir: &Path) -> bool {
    let path = dir.join("direct");
    random_file(&path, 4096, 17);
    let flags = OFlags::RDONLY | OFlags::DIRECT;
    let Ok(file) = rustix::fs::open(&path, flags, Mode::empty()) else { return false };
    let stat = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    stat.is_ok_and(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && stat.stx_dio_offset_align > 0)
}

#[test]
fn the_start_line_reports_o_direct_or_its_absence() {
    let uring = &["--io", "uring"];
    let (output, errors) = serve_some_blocks(&mut Command::new("env"), uring);
    let first = output.lines().next().expect("a line");
    let reports = (first.ends_with(", io_uring, O_DIRECT"), errors.contains("no O_DIRECT here ("));
    let is_supported = has_direct(directory().path());
    assert_eq!(reports, (is_supported, !is_supported), "{output}{errors}");

    // Without statx, the server does not know the alignment for O_DIRECT.
    let (output, errors) = serve_some_blocks(&mut command_without(libc::SYS_statx), uring);
    assert!(output.lines().next().is_some_and(|first| first.ends_with(", io_uring")), "{output}");
    assert!(output.contains("drained") && output.contains(" 0 refused"), "{output}");
    let is_reported = errors.contains(": no O_DIRECT here (") && errors.contains("): using buffered I/O");
    assert!(is_reported && errors.lines().count() == 1, "{errors}");

    // A server with `--buffered` reports no error.
    let (output, errors) = serve_some_blocks(&mut Command::new("env"), &["--io", "uring", "--buffered"]);
    assert!(output.lines().next().is_some_and(|first| first.ends_with(", io_uring")) && errors.is_empty(), "{output}");
}

#[test]
fn memory_that_cannot_be_registered_is_reported_and_used() {
    // With 1024 KiB, a ring can be created, but the buffers cannot be registered. With 0, the ring may fail as well.
    // The limit includes memory that other processes of this user have locked, so 1024 KiB may also be too little for a
    // ring.
    for limit in ["1024", "0"] {
        let Some(mut command) = unshared(&format!(r#"ulimit -l {limit} && exec "$@""#)) else { return };
        let (output, errors) = serve_some_blocks(&mut command, &["--io", "auto"]);
        assert!(output.contains("drained") && output.contains(" 0 refused"), "{output}");
        let why = if errors.contains("no io_uring here") { "Cannot allocate memory" } else { "are not registered" };
        assert!(errors.contains(why) && errors.contains("ulimit -l") && errors.lines().count() == 1, "{errors}");
    }
}
