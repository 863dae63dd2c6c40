//! Creating, finding, renaming and removing names.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rpcrdma::typed::Signature;
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Access, Link, Mkdir, Mknod, Readlink, Symlink};
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Fh, Nfs, Nfsd, Outcome, Results, at, is_root, put, status, with_mode, with_size};

fn symlink(nfs: &mut Nfs, dir: &Fh, name: &str, path: &[u8]) -> Outcome<Symlink> {
    let symlink_data = Nfspath3(path.into());
    let symlink = Symlinkdata3 { symlink_attributes: UNCHANGED, symlink_data };
    nfs.call::<Symlink>(&Symlink3Args { r#where: at(dir, name), symlink })
}

fn readlink(nfs: &mut Nfs, link: &Fh) -> Result<Vec<u8>, Nfsstat3> {
    let results = nfs.call::<Readlink>(&Readlink3Args { symlink: *link })?;
    assert!(results.symlink_attributes.is_some());
    Ok(results.data.0.bytes().to_vec())
}

#[test]
fn guarded_and_unchecked_create_treat_an_existing_file_as_specified() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let made = nfs.create(&root, "file", Createhow3::Guarded(with_mode(0o640))).unwrap();
    assert_eq!(made.obj_attributes.unwrap().mode, 0o640);
    let (before, after) = (made.dir_wcc.before.unwrap(), made.dir_wcc.after.unwrap());
    assert!((before.mtime.seconds, before.mtime.nseconds) <= (after.mtime.seconds, after.mtime.nseconds));
    assert_eq!(status(nfs.create(&root, "file", Createhow3::Guarded(with_mode(0o600)))), Nfsstat3::ErrExist);
    put(&nfsd.path().join("file"), b"12345");
    // An unchecked CREATE of an existing file ignores all attributes but the size.
    let same = nfs.create(&root, "file", Createhow3::Unchecked(with_mode(0o777))).unwrap();
    assert_eq!(same.obj_attributes.unwrap().mode, 0o640);
    assert_eq!(fs::read(nfsd.path().join("file")).unwrap(), b"12345");
    let cut = with_size(0);
    nfs.create(&root, "file", Createhow3::Unchecked(cut)).unwrap();
    assert_eq!(fs::read(nfsd.path().join("file")).unwrap(), b"");
    nfs.make_dir(&root, "dir");
    assert_eq!(status(nfs.create(&root, "dir", Createhow3::Unchecked(UNCHANGED))), Nfsstat3::ErrExist);
}

#[test]
fn an_exclusive_create_may_be_repeated_even_after_a_restart() {
    let mut nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let (verifier, other) = ([0xFF, 2, 3, 4, 5, 6, 7, 8], [9; 8]);
    let first = nfs.create(&root, "file", Createhow3::Exclusive(verifier)).unwrap().obj.unwrap();
    let again = nfs.create(&root, "file", Createhow3::Exclusive(verifier)).unwrap().obj.unwrap();
    assert_eq!(first, again);
    assert_eq!(status(nfs.create(&root, "file", Createhow3::Exclusive(other))), Nfsstat3::ErrExist);
    nfsd.restart();
    let mut nfs = nfsd.client();
    assert_eq!(nfs.create(&root, "file", Createhow3::Exclusive(verifier)).unwrap().obj.unwrap(), first);
    // The client now sets the attributes, including the times, so the file no longer holds the verifier.
    let attributes = Sattr3 {
        atime: SetAtime::Default(TimeHow::SetToServerTime),
        mtime: SetMtime::Default(TimeHow::SetToServerTime),
        ..with_mode(0o644)
    };
    nfs.setattr(&first, attributes, None).unwrap();
    assert_eq!(status(nfs.create(&root, "file", Createhow3::Exclusive(verifier))), Nfsstat3::ErrExist);
}

#[test]
fn lookups_do_not_leave_the_export() {
    let nfsd = Nfsd::start(&[]);
    put(&nfsd.path().parent().unwrap().join("outside"), b"not exported");
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let dir = nfs.make_dir(&root, "dir");
    assert_eq!(nfs.find(&root, "dir"), dir);
    assert_eq!(nfs.find(&dir, "."), dir);
    assert_eq!(nfs.find(&dir, ".."), root);
    assert_eq!(nfs.find(&root, ".."), root, "the parent of the root is the root");
    let found = nfs.lookup(&root, "dir").unwrap();
    assert!(found.obj_attributes.is_some() && found.dir_attributes.is_some());
    let lookup = |nfs: &mut Nfs, dir: &Fh, name: &str| status(nfs.lookup(dir, name));
    assert_eq!(lookup(&mut nfs, &root, "absent"), Nfsstat3::ErrNoent);
    for name in ["", "../outside", "dir/..", "/etc", "a\0b"] {
        assert_eq!(lookup(&mut nfs, &root, name), Nfsstat3::ErrAcces, "{name:?}");
        assert_eq!(status(nfs.create(&root, name, Createhow3::Unchecked(with_mode(0o600)))), Nfsstat3::ErrAcces);
    }
    let file = nfs.make(&dir, "file");
    assert_eq!(lookup(&mut nfs, &file, "x"), Nfsstat3::ErrNotdir);
    // The server does not follow a symbolic link, but treats it like any other file.
    symlink(&mut nfs, &root, "link", b"../outside").unwrap();
    let link = nfs.find(&root, "link");
    assert_eq!(nfs.getattr(&link).unwrap().r#type, Ftype3::Lnk);
    assert_eq!(nfs.read(&link, 0, 100).unwrap_err(), Nfsstat3::ErrInval);
    assert_eq!(lookup(&mut nfs, &link, "x"), Nfsstat3::ErrNotdir);
    // The parent of a directory that was moved out of the export is not reachable.
    fs::rename(nfsd.path().join("dir"), nfsd.path().parent().unwrap().join("dir")).unwrap();
    assert_eq!(lookup(&mut nfs, &dir, ".."), Nfsstat3::ErrAcces);
    let names: Vec<_> = fs::read_dir(nfsd.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["link"], "an invalid name created a file");
}

/// Nests `depth` directories `a` below `top`, from the inside out, because a path to the innermost one would be too
/// long.
fn nest(top: &Path, depth: usize) {
    let (a, b) = (top.join("a"), top.join("b"));
    fs::create_dir(&a).unwrap();
    for _ in 1..depth {
        fs::create_dir(&b).unwrap();
        fs::rename(&a, b.join("a")).unwrap();
        fs::rename(&b, &a).unwrap();
    }
}

/// Removes nested directories `a`.
fn unnest(top: &Path) {
    let (a, b) = (top.join("a"), top.join("b"));
    while fs::rename(a.join("a"), &b).is_ok() {
        fs::remove_dir(&a).unwrap();
        fs::rename(&b, &a).unwrap();
    }
    fs::remove_dir(&a).unwrap();
}

/// The server compares paths, which have at most 4096 bytes, instead of walking up.
#[test]
fn lookup_of_the_parent_at_any_depth_does_not_walk_to_the_root() {
    let nfsd = Nfsd::start(&[]);
    nest(&nfsd.path(), 3000);
    let mut nfs = nfsd.client();
    let (mut chain, mut failures) = (vec![nfs.root], Vec::new());
    for _ in 0..3000 {
        chain.push(nfs.find(&chain[chain.len() - 1], "a"));
    }
    for depth in [1, 2, 1000, 1800, 2200, 3000] {
        match nfs.lookup(&chain[depth], "..") {
            Ok(parent) => assert_eq!(parent.object, chain[depth - 1], "{depth}"),
            Err(status) => failures.push((depth, status)),
        }
    }
    assert_eq!(failures, [(2200, Nfsstat3::ErrNametoolong), (3000, Nfsstat3::ErrNametoolong)]);
    // In a tree that was moved out of the export, no parent is reachable.
    let outside = nfsd.path().parent().unwrap().join("a");
    fs::rename(nfsd.path().join("a"), &outside).unwrap();
    for depth in [1, 2, 1000, 1800] {
        assert_eq!(status(nfs.lookup(&chain[depth], "..")), Nfsstat3::ErrAcces, "{depth}");
    }
    unnest(outside.parent().unwrap());
}

#[test]
fn names_have_at_most_255_bytes() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let (long, longer) = ("n".repeat(255), "n".repeat(256));
    let file = nfs.make(&root, &long);
    assert_eq!(nfs.find(&root, &long), file);
    assert_eq!(status(nfs.lookup(&root, &longer)), Nfsstat3::ErrNametoolong);
    let how = Createhow3::Guarded(with_mode(0o600));
    assert_eq!(status(nfs.create(&root, &longer, how)), Nfsstat3::ErrNametoolong);
    assert_eq!(status(nfs.remove(&root, &longer)), Nfsstat3::ErrNametoolong);
    assert_eq!(status(nfs.rename(at(&root, &long), at(&root, &longer))), Nfsstat3::ErrNametoolong);
    nfs.rename(at(&root, &long), at(&root, &"m".repeat(255))).unwrap();
}

#[test]
fn symbolic_links_have_at_most_4095_bytes() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    for len in [1, 255, 1024, 4095] {
        let path = vec![b'p'; len];
        let link = symlink(&mut nfs, &root, &format!("link-{len}"), &path).unwrap().obj.unwrap();
        assert_eq!(readlink(&mut nfs, &link).unwrap(), path);
        assert_eq!(nfs.getattr(&link).unwrap().size, len as u64);
    }
    assert_eq!(status(symlink(&mut nfs, &root, "x", &[b'p'; 4096])), Nfsstat3::ErrNametoolong);
    assert_eq!(status(symlink(&mut nfs, &root, "x", b"")), Nfsstat3::ErrInval);
    assert_eq!(status(symlink(&mut nfs, &root, "link-1", b"y")), Nfsstat3::ErrExist);
    let file = nfs.make(&root, "file");
    assert_eq!(readlink(&mut nfs, &file).unwrap_err(), Nfsstat3::ErrInval);
    assert_eq!(readlink(&mut nfs, &root).unwrap_err(), Nfsstat3::ErrInval);
}

#[test]
fn mknod_creates_fifos_sockets_and_devices() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let mut mknod = |name: &str, what| nfs.call::<Mknod>(&Mknod3Args { r#where: at(&root, name), what });
    let fifo = mknod("fifo", Mknoddata3::Fifo(with_mode(0o640))).unwrap();
    assert_eq!((fifo.obj_attributes.unwrap().r#type, fifo.obj_attributes.unwrap().mode), (Ftype3::Fifo, 0o640));
    mknod("socket", Mknoddata3::Sock(with_mode(0o600))).unwrap();
    let spec = Specdata3 { specdata1: 1, specdata2: 3 };
    let device = Devicedata3 { dev_attributes: with_mode(0o600), spec };
    let made = mknod("null", Mknoddata3::Chr(device));
    if is_root() {
        let rdev = made.unwrap().obj_attributes.unwrap().rdev;
        assert_eq!((rdev.specdata1, rdev.specdata2), (1, 3));
    }
    assert!(fs::metadata(nfsd.path().join("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::metadata(nfsd.path().join("socket")).unwrap().file_type().is_socket());
    let mut args = crate::client::encode(&at(&root, "x"));
    args.extend([0, 0, 0, 1]);
    let reply = nfs.try_bytes(Mknod::NUMBER, &args, 500).unwrap();
    assert_eq!(status(crate::client::decode::<Mknod3Res<'_>>(reply.results()).split()), Nfsstat3::ErrBadtype);
}

#[test]
fn a_file_is_stale_once_its_last_name_is_removed() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.make(&root, "one");
    let dir = nfs.make_dir(&root, "dir");
    let link =
        |nfs: &mut Nfs, file: &Fh, dir: &Fh, name| nfs.call::<Link>(&Link3Args { file: *file, link: at(dir, name) });
    let linked = link(&mut nfs, &file, &dir, "two").unwrap();
    assert_eq!(linked.file_attributes.unwrap().nlink, 2);
    assert_eq!(nfs.find(&dir, "two"), file);
    assert_eq!(status(link(&mut nfs, &file, &dir, "two")), Nfsstat3::ErrExist);
    assert_eq!(status(link(&mut nfs, &dir, &root, "three")), Nfsstat3::ErrInval);
    nfs.remove(&root, "one").unwrap();
    assert_eq!(nfs.getattr(&file).unwrap().nlink, 1);
    nfs.remove(&dir, "two").unwrap();
    assert_eq!(nfs.getattr(&file).unwrap_err(), Nfsstat3::ErrStale);
    assert_eq!(nfs.read(&file, 0, 1).unwrap_err(), Nfsstat3::ErrStale);
    assert_eq!(status(nfs.write(&file, 0, b"x", StableHow::Unstable)), Nfsstat3::ErrStale);
    assert_eq!(status(nfs.remove(&dir, "two")), Nfsstat3::ErrNoent);
    // The inode number may be reused immediately, but the old handle stays stale.
    for n in 0..20 {
        let new = nfs.make(&root, &format!("new-{n}"));
        assert_ne!(new, file);
        assert_eq!(nfs.getattr(&file).unwrap_err(), Nfsstat3::ErrStale);
    }
}

#[test]
fn only_empty_directories_are_removed() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let dir = nfs.make_dir(&root, "dir");
    let file = nfs.make(&dir, "file");
    assert_eq!(status(nfs.rmdir(&root, "dir")), Nfsstat3::ErrNotempty);
    assert_eq!(status(nfs.rmdir(&dir, "file")), Nfsstat3::ErrNotdir);
    assert!(matches!(status(nfs.remove(&root, "dir")), Nfsstat3::ErrIsdir | Nfsstat3::ErrPerm));
    assert_eq!(status(nfs.rmdir(&dir, ".")), Nfsstat3::ErrInval);
    assert_eq!(status(nfs.rmdir(&dir, "..")), Nfsstat3::ErrExist);
    assert_eq!(status(nfs.remove(&dir, ".")), Nfsstat3::ErrInval);
    let args = Mkdir3Args { r#where: at(&root, "dir"), attributes: with_mode(0o755) };
    assert_eq!(status(nfs.call::<Mkdir>(&args)), Nfsstat3::ErrExist);
    nfs.remove(&dir, "file").unwrap();
    assert_eq!(nfs.getattr(&file).unwrap_err(), Nfsstat3::ErrStale);
    let removed = nfs.rmdir(&root, "dir").unwrap();
    assert!(removed.dir_wcc.before.is_some() && removed.dir_wcc.after.is_some());
    assert_eq!(nfs.getattr(&dir).unwrap_err(), Nfsstat3::ErrStale);
    assert_eq!(status(nfs.create(&dir, "x", Createhow3::Unchecked(with_mode(0o600)))), Nfsstat3::ErrStale);
    assert_eq!(status(nfs.rmdir(&root, "dir")), Nfsstat3::ErrNoent);
}

#[test]
fn renaming_keeps_handles_and_replaces_the_target() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let (a, b) = (nfs.make_dir(&root, "a"), nfs.make_dir(&root, "b"));
    let file = nfs.make(&a, "file");
    nfs.write(&file, 0, b"content", StableHow::FileSync).unwrap();
    let replaced = nfs.make(&b, "name");
    let renamed = nfs.rename(at(&a, "file"), at(&b, "name")).unwrap();
    assert!(renamed.fromdir_wcc.before.is_some() && renamed.todir_wcc.after.is_some());
    assert_eq!(nfs.find(&b, "name"), file);
    assert_eq!(nfs.read(&file, 0, 100).unwrap().2, b"content");
    assert_eq!(nfs.getattr(&replaced).unwrap_err(), Nfsstat3::ErrStale);
    assert_eq!(status(nfs.lookup(&a, "file")), Nfsstat3::ErrNoent);
    // Renames within a directory, of a file to itself, of a directory into itself, and to a directory that is not
    // empty.
    nfs.rename(at(&b, "name"), at(&b, "other")).unwrap();
    nfs.rename(at(&b, "other"), at(&b, "other")).unwrap();
    assert_eq!(nfs.find(&b, "other"), file);
    assert_eq!(status(nfs.rename(at(&root, "a"), at(&a, "a"))), Nfsstat3::ErrInval);
    assert_eq!(status(nfs.rename(at(&root, "a"), at(&root, "b"))), Nfsstat3::ErrNotempty);
    assert_eq!(status(nfs.rename(at(&b, "other"), at(&root, "a"))), Nfsstat3::ErrIsdir);
    assert_eq!(status(nfs.rename(at(&b, "absent"), at(&root, "x"))), Nfsstat3::ErrNoent);
    assert_eq!(status(nfs.rename(at(&b, "."), at(&root, "x"))), Nfsstat3::ErrInval);
    nfs.rename(at(&root, "b"), at(&a, "b")).unwrap();
    assert_eq!(nfs.find(&b, "other"), file, "found below a directory that was moved");
    assert!(Path::new(&nfsd.path().join("a/b/other")).exists());
    assert_eq!(nfs.getattr(&file).unwrap().fileid, fs::metadata(nfsd.path().join("a/b/other")).unwrap().ino());
}

#[test]
fn a_read_only_export_refuses_changes() {
    let nfsd = Nfsd::start(&["--read-only"]);
    put(&nfsd.path().join("file"), b"content");
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    assert_eq!(nfs.read(&file, 0, 100).unwrap().2, b"content");
    let rofs = Nfsstat3::ErrRofs;
    assert_eq!(status(nfs.write(&file, 0, b"x", StableHow::Unstable)), rofs);
    assert_eq!(status(nfs.setattr(&file, with_mode(0), None)), rofs);
    assert_eq!(status(nfs.create(&root, "x", Createhow3::Unchecked(with_mode(0o600)))), rofs);
    assert_eq!(status(nfs.remove(&root, "file")), rofs);
    assert_eq!(status(nfs.rename(at(&root, "file"), at(&root, "x"))), rofs);
    assert_eq!(status(symlink(&mut nfs, &root, "x", b"y")), rofs);
    let args = Access3Args { object: file, access: 63 };
    let granted = nfs.call::<Access>(&args).unwrap().access;
    assert_eq!(granted & (ACCESS3_MODIFY | ACCESS3_EXTEND), 0);
}
