//! Identities of threads, of servers that are not root, and of files that are open already.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Fh, Nfs, Nfsd, is_root, put, status, with_size};

const OWNER: u32 = 1234;
const OTHER: u32 = 5678;

/// Whether the test can run; says so if not.
fn has_root() -> bool {
    if !is_root() {
        println!("not run: only root can act for users");
    }
    is_root()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").mode() & 0o7777
}

/// A file of a user.
fn file_of(path: &Path, owner: u32, mode: u32) {
    put(path, b"data");
    chown(path, Some(owner), Some(owner)).expect("root");
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("root");
}

/// A way to change a file's data.
type Change = fn(&mut Nfs, &Fh, &str);

const CHANGES: [(&str, Change); 3] = [
    ("WRITE", |nfs, file, _| _ = nfs.write(file, 0, b"evil", StableHow::Unstable).unwrap()),
    ("SETATTR", |nfs, file, _| _ = nfs.setattr(file, with_size(1), None).unwrap()),
    ("CREATE", |nfs, _, name| {
        let root = nfs.root;
        nfs.create(&root, name, Createhow3::Unchecked(with_size(0))).unwrap();
    }),
];

#[test]
fn set_id_bits_are_cleared_also_in_files_that_are_open() {
    if !has_root() {
        return;
    }
    for options in [&[][..], &["--workers", "0"]] {
        let nfsd = Nfsd::start(options);
        for (what, change) in CHANGES {
            for set_id in [0o4777, 0o2777, 0o6777] {
                // The owner is no exception, nor is a file that a call of root or of the owner has opened before.
                for (uid, left) in [(0, set_id), (OTHER, 0o777), (OWNER, 0o777), (OTHER, 0o777)] {
                    let name = format!("{what}-{set_id:o}");
                    let path = nfsd.path().join(&name);
                    file_of(&path, OWNER, set_id);
                    let mut nfs = nfsd.client_in(uid, &[]);
                    let root = nfs.root;
                    let file = nfs.find(&root, &name);
                    change(&mut nfs, &file, &name);
                    assert_eq!(format!("{:o}", mode(&path)), format!("{left:o}"), "{what} by {uid} of {set_id:o}");
                }
            }
        }
    }
}

#[test]
fn groups_and_users_of_a_thread_end_with_their_call() {
    if !has_root() {
        return;
    }
    let nfsd = Nfsd::start(&["--workers", "1"]);
    fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let path = nfsd.path().join("file");
    put(&path, b"data");
    chown(&path, Some(0), Some(77)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).unwrap();
    let mut member = nfsd.client_in(OWNER, &[5, 77]);
    let mut users = [nfsd.client_in(OWNER, &[]), nfsd.client_in(OTHER, &[5]), nfsd.client_in(OTHER, &[])];
    let mut root = nfsd.client();
    let top = root.root;
    let file = root.find(&top, "file");
    for round in 0..2 {
        member.write(&file, 0, b"mine", StableHow::Unstable).unwrap();
        for user in &mut users {
            assert_eq!(status(user.write(&file, 0, b"x", StableHow::Unstable)), Nfsstat3::ErrAcces);
        }
        root.make(&top, &format!("made-{round}"));
        let made = fs::metadata(nfsd.path().join(format!("made-{round}"))).unwrap();
        assert_eq!((made.uid(), made.gid()), (0, 0));
    }
}

#[test]
fn a_server_that_is_not_root_uses_no_capabilities() {
    if !has_root() {
        return;
    }
    let nfsd = Nfsd::start_after(
        &format!(
            "chown -R {OWNER}:{OWNER} $EXPORT/..; exec setpriv --reuid={OWNER} --regid={OWNER} --clear-groups \
             --inh-caps=+fsetid,+dac_override --ambient-caps=+fsetid,+dac_override \"$@\""
        ),
        &[],
    );
    let path = nfsd.path().join("file");
    file_of(&path, OWNER, 0o4755);
    file_of(&nfsd.path().join("others"), OTHER, 0o600);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    nfs.write(&file, 0, b"new", StableHow::FileSync).unwrap();
    assert_eq!(mode(&path), 0o755);
    let others = nfs.find(&root, "others");
    assert_eq!(status(nfs.write(&others, 0, b"x", StableHow::Unstable)), Nfsstat3::ErrAcces);
}
