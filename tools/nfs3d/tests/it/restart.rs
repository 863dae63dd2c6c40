//! Restarts of the server, file handles after them, and the key.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use rpcrdma_nfs3d::nfs3::*;
use rustix::process::geteuid;

use crate::client::{Fh, Nfsd, pattern, status};

/// Checks that handles are valid after a restart, although files were moved meanwhile.
fn check_restart(options: &[&str]) {
    let mut nfsd = Nfsd::start(options);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let dir = nfs.make_dir(&root, "dir");
    let deep = nfs.make_dir(&dir, "deep");
    let (file, gone) = (nfs.make(&deep, "file"), nfs.make(&deep, "gone"));
    let data = pattern(10_000);
    let before = nfs.write(&file, 0, &data, StableHow::Unstable).unwrap();
    assert_eq!(nfs.commit(&file).unwrap().verf, before.verf);
    nfsd.restart();
    fs::rename(nfsd.path().join("dir"), nfsd.path().join("moved")).unwrap();
    fs::rename(nfsd.path().join("moved/deep/file"), nfsd.path().join("elsewhere")).unwrap();
    fs::remove_file(nfsd.path().join("moved/deep/gone")).unwrap();
    let mut nfs = nfsd.client();
    assert_eq!(nfs.root, root);
    assert!(nfs.read(&file, 0, 20_000).unwrap().2 == data);
    assert_eq!(nfs.find(&root, "elsewhere"), file);
    assert_eq!(nfs.find(&dir, "deep"), deep);
    // Between two passes of its search, the server asks the client to try again.
    let mut error = nfs.getattr(&gone).unwrap_err();
    while error == Nfsstat3::ErrJukebox {
        std::thread::sleep(std::time::Duration::from_millis(100));
        error = nfs.getattr(&gone).unwrap_err();
    }
    assert_eq!(error, Nfsstat3::ErrStale);
    // Uncommitted data may be lost by the restart, so the verifier has changed.
    assert_ne!(nfs.commit(&file).unwrap().verf, before.verf);
    assert!(nfsd.stop().contains("drained"));
}

#[test]
fn handles_survive_a_restart() {
    check_restart(&[]);
}

#[test]
fn handles_based_on_names_survive_a_restart() {
    check_restart(&["--handles", "names"]);
}

#[test]
fn a_handle_based_on_names_is_stale_once_its_inode_number_is_reused() {
    let nfsd = Nfsd::start(&["--handles", "names"]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let removed = nfs.make(&root, "removed");
    let number = nfs.getattr(&removed).unwrap().fileid;
    nfs.remove(&root, "removed").unwrap();
    let later = (0..20).find_map(|n| {
        let later = nfs.make(&root, &format!("later-{n}"));
        (nfs.getattr(&later).unwrap().fileid == number).then_some(later)
    });
    let Some(later) = later else {
        eprintln!("not run: the file system did not reuse the inode number {number}");
        return;
    };
    assert_eq!(nfs.getattr(&removed).unwrap_err(), Nfsstat3::ErrStale);
    assert_eq!(nfs.getattr(&later).unwrap().fileid, number);
}

#[test]
fn handles_that_the_server_did_not_make_are_refused() {
    let nfsd = Nfsd::start(&[]);
    let other = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.make(&root, "file");
    assert_eq!(nfs.getattr(&other.client().root).unwrap_err(), Nfsstat3::ErrStale, "another key");
    let handle = |bytes: &[u8]| Fh { data: bytes.to_vec().leak() };
    // A change of any byte makes the handle invalid.
    for at in 0..file.data.len() {
        let mut bytes = file.data.to_vec();
        bytes[at] ^= 1;
        let error = nfs.getattr(&handle(&bytes)).unwrap_err();
        assert!(matches!(error, Nfsstat3::ErrStale | Nfsstat3::ErrBadhandle), "byte {at}: {error:?}");
    }
    for bytes in [&b""[..], b"\x01", &file.data[..27], &[0; 64], &[1; 64], &[0xFF; 64]] {
        let error = nfs.getattr(&handle(bytes)).unwrap_err();
        assert!(matches!(error, Nfsstat3::ErrStale | Nfsstat3::ErrBadhandle), "{bytes:?}: {error:?}");
        assert!(matches!(status(nfs.lookup(&handle(bytes), "x")), Nfsstat3::ErrStale | Nfsstat3::ErrBadhandle));
    }
    nfs.getattr(&file).unwrap();
}

#[test]
fn a_malformed_or_exported_key_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let export = directory.path().join("export");
    fs::create_dir(&export).unwrap();
    let key = directory.path().join("key");
    fs::write(&key, b"too short").unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let wrong_length = "expected 32 bytes, found 9";
    let exported = "the key must be outside of the exported directory";
    for (key, error) in [(key, wrong_length), (export.join("key"), exported), (export.join("../export/key"), exported)]
    {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_nfs3d"))
            .arg(&export)
            .args(["--listen", &format!("soft:nfs3d-test-bad-key-{}", std::process::id())])
            .args(["--mount-port", "0", "--key"])
            .arg(&key)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "as user {}", geteuid().as_raw());
        assert!(errors.contains(error), "{errors}");
    }
}
