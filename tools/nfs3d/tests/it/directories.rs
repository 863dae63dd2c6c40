//! Listing directories.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use rpcrdma::CreditMode;
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Fh, Nfs, Nfsd, put};

/// Lists all names of a directory by repeated calls.
fn list_all(nfs: &mut Nfs, dir: &Fh, plus: bool, count: u32) -> Vec<String> {
    let (mut names, mut cookie, mut parts) = (Vec::new(), 0, 0);
    loop {
        let name = |name: &[u8]| String::from_utf8(name.to_vec()).expect("text");
        let (entries, eof): (Vec<_>, _) = if plus {
            let (entries, eof) = nfs.readdirplus(dir, cookie, count, count).unwrap();
            (entries.iter().map(|entry| (name(entry.name.0), entry.cookie)).collect(), eof)
        } else {
            let (entries, eof) = nfs.readdir(dir, cookie, count).unwrap();
            (entries.iter().map(|entry| (name(entry.name.0), entry.cookie)).collect(), eof)
        };
        cookie = entries.last().map_or(cookie, |last| last.1);
        names.extend(entries.into_iter().map(|entry| entry.0));
        parts += 1;
        assert!(parts < 10_000, "the listing does not end");
        if eof {
            return names;
        }
    }
}

fn check_listing(credit_mode: CreditMode) {
    let nfsd = Nfsd::start(&[]);
    let mut expected: BTreeSet<String> = (0..700).map(|n| format!("{n}-{}", "x".repeat(n % 200))).collect();
    expected.iter().for_each(|name| put(&nfsd.path().join(name), b""));
    expected.extend([".".into(), "..".into()]);
    let mut nfs = nfsd.client_as(0, credit_mode);
    let root = nfs.root;
    for (plus, count) in [(false, 512), (false, 4096), (false, 65_536), (true, 1024), (true, 65_536), (true, 1 << 20)] {
        let names = list_all(&mut nfs, &root, plus, count);
        let unique: BTreeSet<String> = names.iter().cloned().collect();
        assert_eq!(names.len(), unique.len(), "a name is listed twice");
        assert_eq!(unique, expected, "plus {plus}, count {count}");
    }
}

#[test]
fn every_name_is_listed_once_for_any_reply_size() {
    check_listing(CreditMode::V2Windowed);
}

#[test]
fn every_name_is_listed_once_in_reply_chunks_of_version_1() {
    check_listing(CreditMode::V1);
}

#[test]
fn readdirplus_lists_the_attributes_and_handles_of_files() {
    let nfsd = Nfsd::start(&[]);
    put(&nfsd.path().join("file"), b"content");
    fs::create_dir(nfsd.path().join("dir")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", nfsd.path().join("link")).unwrap();
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let (entries, eof) = nfs.readdirplus(&root, 0, 4096, 32_768).unwrap();
    assert!(eof);
    for entry in &entries {
        let name = std::str::from_utf8(entry.name.0).unwrap();
        let actual = fs::symlink_metadata(nfsd.path().join(name)).unwrap();
        if name == ".." {
            assert_eq!(entry.fileid, fs::metadata(nfsd.path()).unwrap().ino(), "the parent of the root is the root");
            continue;
        }
        assert_eq!(entry.fileid, actual.ino(), "{name}");
        let attributes = entry.name_attributes.unwrap();
        assert_eq!((attributes.fileid, attributes.size), (actual.ino(), actual.size()), "{name}");
        assert_eq!(attributes.r#type == Ftype3::Lnk, name == "link");
        assert_eq!(nfs.getattr(&entry.name_handle.unwrap()).unwrap().fileid, actual.ino(), "{name}");
    }
    let file = nfs.find(&root, "file");
    let listed = entries.iter().find(|entry| entry.name.0 == b"file").unwrap();
    assert_eq!(listed.name_handle, Some(file), "a file has one handle");
}

#[test]
fn invalid_requests_to_list_directories_are_refused() {
    let nfsd = Nfsd::start(&[]);
    put(&nfsd.path().join("file"), b"");
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    assert_eq!(nfs.readdir(&file, 0, 4096).unwrap_err(), Nfsstat3::ErrNotdir);
    assert_eq!(nfs.readdirplus(&file, 0, 4096, 4096).unwrap_err(), Nfsstat3::ErrNotdir);
    assert_eq!(nfs.readdir(&root, 0, 100).unwrap_err(), Nfsstat3::ErrToosmall);
    assert_eq!(nfs.readdirplus(&root, 0, 100, 100).unwrap_err(), Nfsstat3::ErrToosmall);
    assert_eq!(nfs.readdir(&root, u64::MAX, 4096).unwrap_err(), Nfsstat3::ErrBadCookie);
}
