//! Making, finding, moving and removing names.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nfs3_types::nfs3::*;
use nfs3_types::xdr_codec::Opaque;

use crate::client::{Nfs, Nfsd, at, is_root, put, status, with_mode};

fn symlink(nfs: &mut Nfs, dir: &nfs_fh3, name: &str, path: &[u8]) -> Nfs3Result<SYMLINK3resok, SYMLINK3resfail> {
    let symlink_data = nfspath3(Opaque::borrowed(path));
    let symlink = symlinkdata3 { symlink_attributes: sattr3::default(), symlink_data };
    nfs.call(NFS_PROGRAM::NFSPROC3_SYMLINK, &SYMLINK3args { where_: at(dir, name), symlink })
}

fn readlink(nfs: &mut Nfs, link: &nfs_fh3) -> Result<Vec<u8>, nfsstat3> {
    match nfs.call::<READLINK3res<'_>>(NFS_PROGRAM::NFSPROC3_READLINK, &READLINK3args { symlink: link.clone() }) {
        Nfs3Result::Ok(results) => {
            assert!(results.symlink_attributes.is_some());
            Ok(results.data.0.into_owned())
        }
        Nfs3Result::Err((status, _)) => Err(status),
    }
}

#[test]
fn three_ways_to_create_a_file() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let made = nfs.create(&root, "file", createhow3::GUARDED(with_mode(0o640))).unwrap();
    assert_eq!(made.obj_attributes.unwrap().mode, 0o640);
    let (before, after) = (made.dir_wcc.before.unwrap(), made.dir_wcc.after.unwrap());
    assert!((before.mtime.seconds, before.mtime.nseconds) <= (after.mtime.seconds, after.mtime.nseconds));
    assert_eq!(status(nfs.create(&root, "file", createhow3::GUARDED(with_mode(0o600)))), nfsstat3::NFS3ERR_EXIST);
    put(&nfsd.path().join("file"), b"12345");
    // Unchecked it is there already: of the attributes the size counts, if it is given.
    let same = nfs.create(&root, "file", createhow3::UNCHECKED(with_mode(0o777))).unwrap();
    assert_eq!(same.obj_attributes.unwrap().mode, 0o640);
    assert_eq!(fs::read(nfsd.path().join("file")).unwrap(), b"12345");
    let cut = sattr3 { size: Nfs3Option::Some(0), ..sattr3::default() };
    nfs.create(&root, "file", createhow3::UNCHECKED(cut)).unwrap();
    assert_eq!(fs::read(nfsd.path().join("file")).unwrap(), b"");
    nfs.make_dir(&root, "dir");
    assert_eq!(status(nfs.create(&root, "dir", createhow3::UNCHECKED(sattr3::default()))), nfsstat3::NFS3ERR_EXIST);
}

#[test]
fn an_exclusive_create_may_be_repeated_even_after_a_restart() {
    let mut nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let (mine, other) = (createverf3([0xFF, 2, 3, 4, 5, 6, 7, 8]), createverf3([9; 8]));
    let first = nfs.create(&root, "file", createhow3::EXCLUSIVE(mine)).unwrap().obj.unwrap();
    let again = nfs.create(&root, "file", createhow3::EXCLUSIVE(mine)).unwrap().obj.unwrap();
    assert_eq!(first, again);
    assert_eq!(status(nfs.create(&root, "file", createhow3::EXCLUSIVE(other))), nfsstat3::NFS3ERR_EXIST);
    nfsd.restart();
    let mut nfs = nfsd.client();
    assert_eq!(nfs.create(&root, "file", createhow3::EXCLUSIVE(mine)).unwrap().obj.unwrap(), first);
    // The client sets the attributes now, times included; from then on the file is like any other.
    let attributes =
        sattr3 { atime: set_atime::SET_TO_SERVER_TIME, mtime: set_mtime::SET_TO_SERVER_TIME, ..with_mode(0o644) };
    nfs.setattr(&first, attributes, Nfs3Option::None).unwrap();
    assert_eq!(status(nfs.create(&root, "file", createhow3::EXCLUSIVE(mine))), nfsstat3::NFS3ERR_EXIST);
}

#[test]
fn names_are_found_and_nothing_leads_out_of_the_export() {
    let nfsd = Nfsd::start(&[]);
    put(&nfsd.path().parent().unwrap().join("outside"), b"not exported");
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let dir = nfs.make_dir(&root, "dir");
    assert_eq!(nfs.find(&root, "dir"), dir);
    assert_eq!(nfs.find(&dir, "."), dir);
    assert_eq!(nfs.find(&dir, ".."), root);
    assert_eq!(nfs.find(&root, ".."), root, "above the root is the root");
    let found = nfs.lookup(&root, "dir").unwrap();
    assert!(found.obj_attributes.is_some() && found.dir_attributes.is_some());
    let lookup = |nfs: &mut Nfs, dir: &nfs_fh3, name: &str| status(nfs.lookup(dir, name));
    assert_eq!(lookup(&mut nfs, &root, "absent"), nfsstat3::NFS3ERR_NOENT);
    for name in ["", "../outside", "dir/..", "/etc", "a\0b"] {
        assert_eq!(lookup(&mut nfs, &root, name), nfsstat3::NFS3ERR_ACCES, "{name:?}");
        assert_eq!(status(nfs.create(&root, name, createhow3::UNCHECKED(with_mode(0o600)))), nfsstat3::NFS3ERR_ACCES);
    }
    let file = nfs.make(&dir, "file");
    assert_eq!(lookup(&mut nfs, &file, "x"), nfsstat3::NFS3ERR_NOTDIR);
    // A link is a file like others: only clients follow it.
    symlink(&mut nfs, &root, "link", b"../outside").unwrap();
    let link = nfs.find(&root, "link");
    assert_eq!(nfs.getattr(&link).unwrap().type_, ftype3::NF3LNK);
    assert_eq!(nfs.read(&link, 0, 100).unwrap_err(), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(lookup(&mut nfs, &link, "x"), nfsstat3::NFS3ERR_NOTDIR);
    // A directory that somebody has moved out has its way up cut.
    fs::rename(nfsd.path().join("dir"), nfsd.path().parent().unwrap().join("dir")).unwrap();
    assert_eq!(lookup(&mut nfs, &dir, ".."), nfsstat3::NFS3ERR_ACCES);
    let names: Vec<_> = fs::read_dir(nfsd.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["link"], "nothing was made by a bad name");
}

#[test]
fn names_of_255_bytes_and_no_longer() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let (long, longer) = ("n".repeat(255), "n".repeat(256));
    let file = nfs.make(&root, &long);
    assert_eq!(nfs.find(&root, &long), file);
    assert_eq!(status(nfs.lookup(&root, &longer)), nfsstat3::NFS3ERR_NAMETOOLONG);
    let how = createhow3::GUARDED(with_mode(0o600));
    assert_eq!(status(nfs.create(&root, &longer, how)), nfsstat3::NFS3ERR_NAMETOOLONG);
    assert_eq!(status(nfs.remove(&root, &longer)), nfsstat3::NFS3ERR_NAMETOOLONG);
    assert_eq!(status(nfs.rename(at(&root, &long), at(&root, &longer))), nfsstat3::NFS3ERR_NAMETOOLONG);
    nfs.rename(at(&root, &long), at(&root, &"m".repeat(255))).unwrap();
}

#[test]
fn symbolic_links_of_any_length() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    for len in [1, 255, 1024, 4095] {
        let path = vec![b'p'; len];
        let link = symlink(&mut nfs, &root, &format!("link-{len}"), &path).unwrap().obj.unwrap();
        assert_eq!(readlink(&mut nfs, &link).unwrap(), path);
        assert_eq!(nfs.getattr(&link).unwrap().size, len as u64);
    }
    assert_eq!(status(symlink(&mut nfs, &root, "x", &[b'p'; 4096])), nfsstat3::NFS3ERR_NAMETOOLONG);
    assert_eq!(status(symlink(&mut nfs, &root, "x", b"")), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(status(symlink(&mut nfs, &root, "link-1", b"y")), nfsstat3::NFS3ERR_EXIST);
    let file = nfs.make(&root, "file");
    assert_eq!(readlink(&mut nfs, &file).unwrap_err(), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(readlink(&mut nfs, &root).unwrap_err(), nfsstat3::NFS3ERR_INVAL);
}

#[test]
fn special_files() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let mut mknod = |name: &str, what| -> MKNOD3res {
        nfs.call(NFS_PROGRAM::NFSPROC3_MKNOD, &MKNOD3args { where_: at(&root, name), what })
    };
    let fifo = mknod("fifo", mknoddata3::NF3FIFO(with_mode(0o640))).unwrap();
    assert_eq!(
        (fifo.obj_attributes.clone().unwrap().type_, fifo.obj_attributes.unwrap().mode),
        (ftype3::NF3FIFO, 0o640)
    );
    mknod("socket", mknoddata3::NF3SOCK(with_mode(0o600))).unwrap();
    let spec = specdata3 { specdata1: 1, specdata2: 3 };
    let device = devicedata3 { dev_attributes: with_mode(0o600), spec };
    let made = mknod("null", mknoddata3::NF3CHR(device));
    if is_root() {
        let rdev = made.unwrap().obj_attributes.unwrap().rdev;
        assert_eq!((rdev.specdata1, rdev.specdata2), (1, 3));
    }
    assert!(fs::metadata(nfsd.path().join("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::metadata(nfsd.path().join("socket")).unwrap().file_type().is_socket());
    let mut args = crate::client::encode(&at(&root, "x"));
    args.extend([0, 0, 0, 1]);
    let reply = nfs.try_bytes(NFS_PROGRAM::NFSPROC3_MKNOD, &args, 500).unwrap();
    assert_eq!(status(crate::client::decode::<MKNOD3res>(reply.results())), nfsstat3::NFS3ERR_BADTYPE);
}

#[test]
fn files_have_several_names_and_are_gone_with_the_last() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let file = nfs.make(&root, "one");
    let dir = nfs.make_dir(&root, "dir");
    let link = |nfs: &mut Nfs, file: &nfs_fh3, dir: &nfs_fh3, name| -> LINK3res {
        nfs.call(NFS_PROGRAM::NFSPROC3_LINK, &LINK3args { file: file.clone(), link: at(dir, name) })
    };
    let linked = link(&mut nfs, &file, &dir, "two").unwrap();
    assert_eq!(linked.file_attributes.unwrap().nlink, 2);
    assert_eq!(nfs.find(&dir, "two"), file);
    assert_eq!(status(link(&mut nfs, &file, &dir, "two")), nfsstat3::NFS3ERR_EXIST);
    assert_eq!(status(link(&mut nfs, &dir, &root, "three")), nfsstat3::NFS3ERR_INVAL);
    nfs.remove(&root, "one").unwrap();
    assert_eq!(nfs.getattr(&file).unwrap().nlink, 1);
    nfs.remove(&dir, "two").unwrap();
    assert_eq!(nfs.getattr(&file).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(nfs.read(&file, 0, 1).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(status(nfs.write(&file, 0, b"x", stable_how::UNSTABLE)), nfsstat3::NFS3ERR_STALE);
    assert_eq!(status(nfs.remove(&dir, "two")), nfsstat3::NFS3ERR_NOENT);
    // Its number may be used again at once: the old handle is not the new file's.
    for n in 0..20 {
        let new = nfs.make(&root, &format!("new-{n}"));
        assert_ne!(new, file);
        assert_eq!(nfs.getattr(&file).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    }
}

#[test]
fn directories_are_made_and_removed_when_they_are_empty() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let dir = nfs.make_dir(&root, "dir");
    let file = nfs.make(&dir, "file");
    assert_eq!(status(nfs.rmdir(&root, "dir")), nfsstat3::NFS3ERR_NOTEMPTY);
    assert_eq!(status(nfs.rmdir(&dir, "file")), nfsstat3::NFS3ERR_NOTDIR);
    assert!(matches!(status(nfs.remove(&root, "dir")), nfsstat3::NFS3ERR_ISDIR | nfsstat3::NFS3ERR_PERM));
    assert_eq!(status(nfs.rmdir(&dir, ".")), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(status(nfs.rmdir(&dir, "..")), nfsstat3::NFS3ERR_EXIST);
    assert_eq!(status(nfs.remove(&dir, ".")), nfsstat3::NFS3ERR_INVAL);
    let args = MKDIR3args { where_: at(&root, "dir"), attributes: with_mode(0o755) };
    assert_eq!(status(nfs.call::<MKDIR3res>(NFS_PROGRAM::NFSPROC3_MKDIR, &args)), nfsstat3::NFS3ERR_EXIST);
    nfs.remove(&dir, "file").unwrap();
    assert_eq!(nfs.getattr(&file).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    let removed = nfs.rmdir(&root, "dir").unwrap();
    assert!(removed.dir_wcc.before.is_some() && removed.dir_wcc.after.is_some());
    assert_eq!(nfs.getattr(&dir).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(status(nfs.create(&dir, "x", createhow3::UNCHECKED(with_mode(0o600)))), nfsstat3::NFS3ERR_STALE);
    assert_eq!(status(nfs.rmdir(&root, "dir")), nfsstat3::NFS3ERR_NOENT);
}

#[test]
fn renaming_keeps_handles_and_replaces_the_target() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let (a, b) = (nfs.make_dir(&root, "a"), nfs.make_dir(&root, "b"));
    let file = nfs.make(&a, "file");
    nfs.write(&file, 0, b"content", stable_how::FILE_SYNC).unwrap();
    let replaced = nfs.make(&b, "name");
    let renamed = nfs.rename(at(&a, "file"), at(&b, "name")).unwrap();
    assert!(renamed.fromdir_wcc.before.is_some() && renamed.todir_wcc.after.is_some());
    assert_eq!(nfs.find(&b, "name"), file);
    assert_eq!(nfs.read(&file, 0, 100).unwrap().2, b"content");
    assert_eq!(nfs.getattr(&replaced).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(status(nfs.lookup(&a, "file")), nfsstat3::NFS3ERR_NOENT);
    // Within a directory; onto itself; a directory into itself; over one with something in it.
    nfs.rename(at(&b, "name"), at(&b, "other")).unwrap();
    nfs.rename(at(&b, "other"), at(&b, "other")).unwrap();
    assert_eq!(nfs.find(&b, "other"), file);
    assert_eq!(status(nfs.rename(at(&root, "a"), at(&a, "a"))), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(status(nfs.rename(at(&root, "a"), at(&root, "b"))), nfsstat3::NFS3ERR_NOTEMPTY);
    assert_eq!(status(nfs.rename(at(&b, "other"), at(&root, "a"))), nfsstat3::NFS3ERR_ISDIR);
    assert_eq!(status(nfs.rename(at(&b, "absent"), at(&root, "x"))), nfsstat3::NFS3ERR_NOENT);
    assert_eq!(status(nfs.rename(at(&b, "."), at(&root, "x"))), nfsstat3::NFS3ERR_INVAL);
    nfs.rename(at(&root, "b"), at(&a, "b")).unwrap();
    assert_eq!(nfs.find(&b, "other"), file, "below a directory that was moved");
    assert!(Path::new(&nfsd.path().join("a/b/other")).exists());
    assert_eq!(nfs.getattr(&file).unwrap().fileid, fs::metadata(nfsd.path().join("a/b/other")).unwrap().ino());
}

#[test]
fn a_read_only_export_stays_as_it_is() {
    let nfsd = Nfsd::start(&["--read-only"]);
    put(&nfsd.path().join("file"), b"content");
    let mut nfs = nfsd.client();
    let root = nfs.root.clone();
    let file = nfs.find(&root, "file");
    assert_eq!(nfs.read(&file, 0, 100).unwrap().2, b"content");
    let rofs = nfsstat3::NFS3ERR_ROFS;
    assert_eq!(status(nfs.write(&file, 0, b"x", stable_how::UNSTABLE)), rofs);
    assert_eq!(status(nfs.setattr(&file, with_mode(0), Nfs3Option::None)), rofs);
    assert_eq!(status(nfs.create(&root, "x", createhow3::UNCHECKED(with_mode(0o600)))), rofs);
    assert_eq!(status(nfs.remove(&root, "file")), rofs);
    assert_eq!(status(nfs.rename(at(&root, "file"), at(&root, "x"))), rofs);
    assert_eq!(status(symlink(&mut nfs, &root, "x", b"y")), rofs);
    let args = ACCESS3args { object: file, access: 63 };
    let granted = nfs.call::<ACCESS3res>(NFS_PROGRAM::NFSPROC3_ACCESS, &args).unwrap().access;
    assert_eq!(granted & (ACCESS3_MODIFY | ACCESS3_EXTEND), 0);
}
