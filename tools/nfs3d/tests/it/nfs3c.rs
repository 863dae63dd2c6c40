//! Tests of the program `nfs3c` with `nfs3d`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::client::{Nfsd, limited, pattern, put};

/// Runs the client. Returns its exit status, standard output and standard error.
fn run(nfsd: &Nfsd, options: &[&str], command: &[&str]) -> (i32, String, String) {
    run_at(&nfsd.address, nfsd, options, command)
}

/// Runs the client with an address of the server. Returns its exit status, standard output and standard error.
pub(crate) fn run_at(address: &str, nfsd: &Nfsd, options: &[&str], command: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_nfs3c"))
        .args([address, nfsd.path().to_str().expect("text")])
        .args(["--mount", &format!("127.0.0.1:{}", nfsd.mount_port)])
        .args(if options.contains(&"--block") { &[][..] } else { &["--block", "65536"] })
        .args(options)
        .args(command)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}

/// Runs the client under a limit of the shell. Returns its exit status and standard error.
pub(crate) fn run_limited(limit: &str, nfsd: &Nfsd, arguments: &[&str]) -> (Option<i32>, String) {
    let output = limited(limit, env!("CARGO_BIN_EXE_nfs3c"))
        .args([&nfsd.address, nfsd.path().to_str().expect("text")])
        .args(["--mount", &format!("127.0.0.1:{}", nfsd.mount_port)])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    (output.status.code(), String::from_utf8(output.stderr).expect("text"))
}

#[track_caller]
fn succeeds(nfsd: &Nfsd, options: &[&str], command: &[&str]) -> (String, String) {
    let (status, out, errors) = run(nfsd, options, command);
    assert_eq!(status, 0, "{command:?}: {errors}");
    (out, errors)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// A number from the line that `--stats` prints.
#[track_caller]
fn figure(stats: &str, name: &str) -> u64 {
    let rest = stats.split(&format!("\"{name}\":")).nth(1).unwrap_or_else(|| panic!("no {name} in {stats}"));
    rest.split([',', '}']).next().and_then(|number| number.parse().ok()).expect("a number")
}

/// MOUNT refuses a directory that the caller may not reach.
#[test]
fn the_client_mounts_as_its_user() {
    use std::os::unix::fs::PermissionsExt as _;
    let nfsd = Nfsd::start(&[]);
    let private = nfsd.path().join("private");
    std::fs::create_dir_all(private.join("open")).unwrap();
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o700)).unwrap();
    put(&private.join("open/file"), b"data");
    let mut client = Command::new(env!("CARGO_BIN_EXE_nfs3c"));
    client.arg(&nfsd.address).arg(private.join("open"));
    let output = client.args(["--mount", &format!("127.0.0.1:{}", nfsd.mount_port), "ls"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("file"), "{output:?}");
}

/// The key authenticates both hosts, and each program requires that the other one has it.
#[test]
fn only_peers_with_the_same_host_key_connect() {
    use std::os::unix::fs::PermissionsExt;
    let local = tempfile::tempdir().unwrap();
    let [key, other] = ["key", "other"].map(|name| local.path().join(name));
    for (path, byte) in [(&key, 7), (&other, 8)] {
        put(path, &[byte; 32]);
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
    }
    let nfsd = Nfsd::start(&["--host-key", text(&key)]);
    put(&nfsd.path().join("file"), b"data");
    let (listed, _) = succeeds(&nfsd, &["--host-key", text(&key)], &["ls"]);
    assert!(listed.contains("file"), "{listed}");
    for (options, reason) in [
        (&[][..], "server requires a host key, and this side has none (wire.host_auth, or `--host-key FILE`)"),
        (&["--host-key", text(&other)], "peer's proof is wrong"),
    ] {
        let (status, out, errors) = run(&nfsd, options, &["ls"]);
        assert_eq!((status, out.as_str()), (1, ""), "{options:?}: {errors}");
        assert!(errors.contains(reason), "{options:?}: {errors}");
    }
    let open = Nfsd::start(&[]);
    let (status, out, errors) = run(&open, &["--host-key", text(&key)], &["ls"]);
    assert_eq!((status, out.as_str()), (1, ""), "{errors}");
    assert!(errors.contains("peer does not authenticate itself, which the policy requires"), "{errors}");
}

#[test]
fn files_of_any_length_are_copied_in_both_directions() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    let (original, copy) = (local.path().join("original"), local.path().join("copy"));
    std::fs::create_dir(nfsd.path().join("d")).unwrap();
    for len in [0, 1, 3, 4, 511, 512, 513, 4097, 65535, 65536, 65537, 65536 * 40 + 5] {
        put(&original, &pattern(len));
        succeeds(&nfsd, &[], &["put", text(&original), "d/file"]);
        assert!(std::fs::read(nfsd.path().join("d/file")).unwrap() == pattern(len), "{len} bytes to the server");
        succeeds(&nfsd, &["--depth", "3"], &["get", "/d/file", text(&copy)]);
        assert!(std::fs::read(&copy).unwrap() == pattern(len), "{len} bytes from the server");
    }
    // One `put` copies several files.
    succeeds(&nfsd, &[], &["put", text(&original), text(&copy), "d"]);
    for name in ["original", "copy"] {
        assert!(std::fs::read(nfsd.path().join("d").join(name)).unwrap() == pattern(65536 * 40 + 5), "{name}");
    }
}

#[test]
fn chunks_are_used_and_invalidated_as_configured_in_either_version() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    put(&nfsd.path().join("big"), &pattern(65536 * 40));
    std::os::unix::fs::symlink("big", nfsd.path().join("link")).unwrap();
    let copy = local.path().join("copy");
    for (version, invalidate) in [("1", true), ("1", false), ("2", true), ("2", false)] {
        let mut options = vec!["--stats", "--rdma-version", version];
        options.extend((!invalidate).then_some("--no-invalidate"));
        for (command, chunks, direction) in [
            (&["get", "big", text(&copy)][..], 40, "replies_with_chunks"),
            (&["put", text(&copy), "new"], 40, "calls_with_chunks"),
        ] {
            let (_, stats) = succeeds(&nfsd, &options, command);
            let figure = |name| figure(&stats, name);
            assert_eq!(figure("rdma_version").to_string(), version);
            assert_eq!((figure("failed"), figure("rejected"), figure("connections")), (0, 0, 1), "{stats}");
            assert!(figure(direction) >= chunks, "{stats}");
            let (by_server, here) = (figure("invalidated_by_server"), figure("invalidated_here"));
            assert_eq!((by_server >= chunks, here >= chunks), (invalidate, !invalidate), "{stats}");
        }
        assert!(std::fs::read(nfsd.path().join("new")).unwrap() == pattern(65536 * 40));
    }
}

#[test]
fn inline_data_may_make_messages_too_long_for_one_send() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    let (original, copy) = (local.path().join("original"), local.path().join("copy"));
    put(&original, &pattern(200_003));
    for version in ["1", "2"] {
        let options = ["--stats", "--rdma-version", version, "--inline", "20000", "--block", "20000", "--depth", "4"];
        let (_, stats) = succeeds(&nfsd, &options, &["put", text(&original), "file"]);
        // There are ten long calls. The eleventh call is short.
        assert_eq!((figure(&stats, "calls_in_chunks"), figure(&stats, "calls_with_chunks")), (10, 0), "{stats}");
        assert!(std::fs::read(nfsd.path().join("file")).unwrap() == pattern(200_003));
        succeeds(&nfsd, &options, &["get", "file", text(&copy)]);
        assert!(std::fs::read(&copy).unwrap() == pattern(200_003));
    }
}

#[test]
fn a_tree_is_listed_and_summed() {
    let nfsd = Nfsd::start(&[]);
    let root = nfsd.path();
    std::fs::create_dir_all(root.join("a/b")).unwrap();
    put(&root.join("a/one"), b"one\n");
    put(&root.join("a/b/two"), &pattern(200_001));
    std::os::unix::fs::symlink("../nowhere", root.join("a/link")).unwrap();
    std::os::unix::fs::symlink("x".repeat(1000), root.join("long")).unwrap();
    // More names than fit one reply.
    std::fs::create_dir(root.join("many")).unwrap();
    for n in 0..1000 {
        put(&root.join(format!("many/a-name-that-is-neither-short-nor-long-{n:04}")), b"");
    }
    let (listed, _) = succeeds(&nfsd, &[], &["ls", "a"]);
    let names: Vec<_> = listed.lines().map(|line| line.rsplit_once("  ").map_or(line, |(_, rest)| rest)).collect();
    assert_eq!(names.len(), 3, "{listed}");
    assert!(listed.lines().next().is_some_and(|line| line.starts_with('d') && line.ends_with(" b")), "{listed}");
    assert!(listed.contains(" link -> ../nowhere\n") && listed.contains(" 4 one\n"), "{listed}");
    let (listed, stats) = succeeds(&nfsd, &["--stats", "--rdma-version", "1"], &["ls", "many"]);
    assert_eq!(listed.lines().count(), 1000);
    assert!(figure(&stats, "replies_in_chunks") >= 2, "{stats}");
    let (attributes, _) = succeeds(&nfsd, &[], &["stat", "a/b/two"]);
    assert!(attributes.contains(" 200001 a/b/two"), "{attributes}");

    std::fs::remove_dir_all(root.join("many")).unwrap();
    let (sums, _) = succeeds(&nfsd, &[], &["sum"]);
    let mut sums: Vec<&str> = sums.lines().collect();
    sums.sort_unstable();
    let expected = Command::new("bash")
        .args(["-c", "(find . -type f | xargs sha256sum; find . -type l -printf '%p %l\\n') | LC_ALL=C sort"])
        .current_dir(&root)
        .output()
        .expect("bash");
    let expected = String::from_utf8(expected.stdout).expect("text");
    assert_eq!(sums, expected.lines().collect::<Vec<_>>());
    assert_eq!(sums.len(), 4);
}

/// A name is bytes. Conversion to text would make `caf\xe8` and `caf\xe9` the same name.
#[test]
fn names_of_any_bytes_are_copied_and_listed() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    std::fs::create_dir(nfsd.path().join("d")).unwrap();
    let names: [&[u8]; 7] =
        [b"caf\xe8", b"caf\xe9", b"\xff\xfe", b"new\nline", b"back\\slash", b"carriage\rreturn", b"\x1b]0;title\x07"];
    let name = |bytes| OsStr::from_bytes(bytes);
    let nfs3c = |arguments: &[&OsStr]| {
        let output = Command::new(env!("CARGO_BIN_EXE_nfs3c"))
            .args([nfsd.address.as_ref(), nfsd.path().as_os_str()])
            .args(["--mount", &format!("127.0.0.1:{}", nfsd.mount_port), "--block", "65536"])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let originals: Vec<_> = names.iter().map(|bytes| local.path().join(name(bytes))).collect();
    originals.iter().zip(names).for_each(|(path, bytes)| put(path, bytes));
    let mut arguments = vec![OsStr::new("put")];
    arguments.extend(originals.iter().map(|path| path.as_os_str()));
    arguments.push(OsStr::new("d"));
    nfs3c(&arguments);
    for bytes in names {
        assert_eq!(std::fs::read(nfsd.path().join("d").join(name(bytes))).unwrap(), bytes, "{bytes:?}");
        let (path, copy) = (Path::new("d").join(name(bytes)), local.path().join("copy"));
        nfs3c(&[OsStr::new("get"), path.as_os_str(), copy.as_os_str()]);
        assert_eq!(std::fs::read(&copy).unwrap(), bytes, "{bytes:?}");
        let shown = nfs3c(&[OsStr::new("stat"), path.as_os_str()]);
        assert!(!shown[..shown.len() - 1].iter().any(u8::is_ascii_control), "{shown:?}");
    }
    assert_eq!(std::fs::read_dir(nfsd.path().join("d")).unwrap().count(), names.len());
    let listed = String::from_utf8(nfs3c(&["ls", "d"].map(OsStr::new))).expect("text");
    let listed: Vec<_> = listed.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    let shown = [
        "\\033]0;title\\007",
        "back\\\\slash",
        "caf\\350",
        "caf\\351",
        "carriage\\rreturn",
        "new\\nline",
        "\\377\\376",
    ];
    assert_eq!(listed, shown);

    // sha256sum accepts the output, and prints the same lines for these files.
    let sums = nfs3c(&["sum"].map(OsStr::new));
    let list = local.path().join("sums");
    std::fs::write(&list, &sums).unwrap();
    let sha256sum = |arguments: &[&OsStr]| {
        Command::new("sha256sum").args(arguments).current_dir(nfsd.path()).output().expect("coreutils")
    };
    let checked = sha256sum(&[OsStr::new("--check"), OsStr::new("--strict"), list.as_os_str()]);
    assert!(checked.status.success(), "{checked:?}");
    let paths: Vec<_> = names.iter().map(|bytes| Path::new("./d").join(name(bytes))).collect();
    let written = sha256sum(&paths.iter().map(|path| path.as_os_str()).collect::<Vec<_>>()).stdout;
    let sorted = |text: &[u8]| {
        let mut lines: Vec<_> = text.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&sums), sorted(&written));
}

#[test]
fn copies_that_would_overwrite_each_other_are_refused() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    let paths = ["a/name", "b/name"].map(|path| local.path().join(path));
    for path in &paths {
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        put(path, b"");
    }
    let (status, _, errors) = run(&nfsd, &[], &["put", text(&paths[0]), text(&paths[1]), ""]);
    assert!(status == 1 && errors.contains("b/name: the copy of another file has the same name"), "{errors}");
    let (status, _, errors) = run(&nfsd, &[], &["put", text(&paths[0]), "..", ""]);
    assert!(status == 1 && errors.contains("..: the path ends without a file name"), "{errors}");
    assert_eq!(std::fs::read_dir(nfsd.path()).unwrap().count(), 0);
}

#[test]
fn local_data_of_unknown_size_is_copied_to_its_end() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    let (fifo, file) = (local.path().join("fifo"), nfsd.path().join("file"));
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("it runs").success());
    std::thread::scope(|scope| {
        scope.spawn(|| put(&fifo, &pattern(65536 * 2 + 5)));
        succeeds(&nfsd, &[], &["put", text(&fifo), "file"]);
    });
    assert!(std::fs::read(&file).unwrap() == pattern(65536 * 2 + 5));
    succeeds(&nfsd, &[], &["put", "/proc/version", "file"]);
    assert_eq!(std::fs::read(&file).unwrap(), std::fs::read("/proc/version").unwrap(), "a longer file is truncated");
    succeeds(&nfsd, &[], &["put", "/dev/null", "file"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"");
}

/// Copying a file to itself, or a copy that fails, does not truncate the target.
#[test]
fn targets_keep_their_data_unless_it_is_replaced() {
    let nfsd = Nfsd::start(&[]);
    let local = tempfile::tempdir().unwrap();
    let (file, copy) = (nfsd.path().join("file"), local.path().join("copy"));
    std::fs::create_dir(nfsd.path().join("directory")).unwrap();
    std::os::unix::fs::symlink("file", nfsd.path().join("link")).unwrap();
    for path in [&file, &copy] {
        put(path, &pattern(70_000));
    }
    for (command, failure) in [
        (&["put", text(&file), "file"][..], None),
        (&["get", "file", text(&file)], None),
        (&["put", text(local.path()), "file"], Some("Is a directory")),
        (&["get", "directory", text(&copy)], Some("directory: a directory cannot be copied")),
        (&["get", "link", text(&copy)], Some("link: a symbolic link cannot be copied")),
    ] {
        let (status, _, errors) = run(&nfsd, &[], command);
        assert!(
            status == i32::from(failure.is_some()) && errors.contains(failure.unwrap_or("")),
            "{command:?}: {errors}"
        );
        for path in [&file, &copy] {
            assert!(std::fs::read(path).unwrap() == pattern(70_000), "{command:?}: {path:?}");
        }
    }
    put(&file, b"short");
    succeeds(&nfsd, &[], &["get", "file", text(&copy)]);
    assert_eq!(std::fs::read(&copy).unwrap(), b"short", "a longer copy is truncated");
}

#[test]
fn errors_name_the_call_the_path_and_the_cause() {
    let nfsd = Nfsd::start(&[]);
    put(&nfsd.path().join("file"), b"");
    put(&nfsd.path().join("full"), b"data");
    std::fs::create_dir(nfsd.path().join("directory")).unwrap();
    let long = "n".repeat(256);
    for (command, words) in [
        (&["get", "absent", "/dev/null"][..], "LOOKUP of \"absent\" in \"absent\": NFS3ERR_NOENT: No such file"),
        (&["stat", "file/below"], "NFS3ERR_NOTDIR"),
        (&["ls", "file"], "READDIRPLUS of \"file\": NFS3ERR_NOTDIR"),
        (&["get", "directory", "/dev/null"], "directory: a directory cannot be copied, only a regular file"),
        (&["time", "directory"], "READ of \"directory\": NFS3ERR_"),
        (&["get", "full", "/dev/full"], "READ of \"full\": /dev/full: No space left"),
        (&["put", "/dev/null", &long], "NFS3ERR_NAMETOOLONG: File name too long"),
        (&["put", "/nonexistent", "x"], "/nonexistent: No such file"),
    ] {
        let (status, _, errors) = run(&nfsd, &[], command);
        assert!(status == 1 && errors.starts_with("nfs3c: ") && errors.contains(words), "{command:?}: {errors}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_nfs3c"))
        .args([&nfsd.address, "/elsewhere", "--mount", &format!("127.0.0.1:{}", nfsd.mount_port), "ls"])
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("MOUNT of \"/elsewhere\"") && errors.contains("MNT3ERR_NOENT"), "{errors}");
}

#[test]
fn programs_print_their_version() {
    for (program, name) in [(env!("CARGO_BIN_EXE_nfs3c"), "nfs3c "), (env!("CARGO_BIN_EXE_nfs3d"), "nfs3d ")] {
        let output = Command::new(program).arg("--version").output().expect("it runs");
        assert!(output.stdout.starts_with(name.as_bytes()), "{output:?}");
    }
}
