//! Creation with attributes that cannot be set, and in set-group-ID and removed directories.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Link, Mkdir, Mknod, Symlink};
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Fh, Nfs, Nfsd, at, is_root, put, status, with_mode};

/// Creates a name with attributes in every way. Returns the outcomes.
fn creations(nfs: &mut Nfs, dir: &Fh, name: &str, new: Sattr3) -> [Result<Create3Resok<'static>, Nfsstat3>; 5] {
    let symlink = Symlinkdata3 { symlink_attributes: new, symlink_data: Nfspath3(b"target"[..].into()) };
    let r#where = at(dir, name);
    [
        nfs.create(dir, name, Createhow3::Guarded(new)),
        nfs.create(dir, name, Createhow3::Unchecked(new)),
        nfs.call::<Mkdir>(&Mkdir3Args { r#where, attributes: new }),
        nfs.call::<Symlink>(&Symlink3Args { r#where, symlink }),
        nfs.call::<Mknod>(&Mknod3Args { r#where, what: Mknoddata3::Fifo(new) }),
    ]
}

fn names(nfsd: &Nfsd) -> Vec<String> {
    let names = fs::read_dir(nfsd.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

#[test]
fn times_with_a_billion_or_more_nanoseconds_are_refused() {
    let nfsd = Nfsd::start(&[]);
    let path = nfsd.path().join("file");
    put(&path, b"data");
    let before = fs::metadata(&path).unwrap();
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    for nseconds in [1_000_000_000, 0x3FFF_FFFE, 0x3FFF_FFFF, u32::MAX] {
        let time = SetMtime::SetToClientTime(Nfstime3 { seconds: 77, nseconds });
        for new in [Sattr3 { mtime: time, ..UNCHANGED }, Sattr3 { atime: time, ..UNCHANGED }] {
            assert_eq!(status(nfs.setattr(&file, new, None)), Nfsstat3::ErrInval, "{nseconds}");
            for created in creations(&mut nfs, &root, "x", new) {
                assert_eq!(status(created), Nfsstat3::ErrInval, "{nseconds}");
            }
        }
    }
    let after = fs::metadata(&path).unwrap();
    let stamps = |file: &fs::Metadata| (file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec());
    assert_eq!(stamps(&after), stamps(&before));
    assert_eq!(names(&nfsd), ["file"]);
}

#[test]
fn a_refused_creation_leaves_nothing_behind() {
    if !is_root() {
        return println!("not run: only root can act as other users");
    }
    let nfsd = Nfsd::start(&[]);
    fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut nfs = nfsd.client_in(1234, &[]);
    let root = nfs.root;
    for new in [Sattr3 { uid: Some(5678), ..with_mode(0o644) }, Sattr3 { gid: Some(5678), ..with_mode(0o2755) }] {
        for created in creations(&mut nfs, &root, "x", new) {
            assert_eq!(status(created), Nfsstat3::ErrPerm, "{new:?}");
        }
        assert_eq!(names(&nfsd), [""; 0], "{new:?}");
    }
    // A refused creation does not remove an existing file.
    put(&nfsd.path().join("x"), b"data");
    let new = Sattr3 { uid: Some(5678), ..with_mode(0o644) };
    assert!(creations(&mut nfs, &root, "x", new)[2..].iter().all(|made| made == &Err(Nfsstat3::ErrExist)));
    assert_eq!(fs::read(nfsd.path().join("x")).unwrap(), b"data");
}

#[test]
fn directories_inherit_the_set_group_id_bit_whatever_their_mode() {
    if !is_root() {
        return println!("not run: only root can act as other users");
    }
    let nfsd = Nfsd::start(&[]);
    chown(nfsd.path(), None, Some(77)).unwrap();
    fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o2777)).unwrap();
    for uid in [0, 1234] {
        let mut nfs = nfsd.client_in(uid, &[]);
        let root = nfs.root;
        for mode in [0o755, 0o1755] {
            let name = format!("dir-{uid}-{mode:o}");
            let args = Mkdir3Args { r#where: at(&root, &name), attributes: with_mode(mode) };
            let made = nfs.call::<Mkdir>(&args).unwrap().obj_attributes.unwrap();
            assert_eq!((made.mode, made.uid, made.gid), (mode | 0o2000, uid, 77), "{name}");
        }
    }
}

#[test]
fn every_call_in_a_removed_directory_is_stale() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let (dir, file) = (nfs.make_dir(&root, "dir"), nfs.make(&root, "file"));
    // The server has the directory open, and is not informed of its removal.
    nfs.readdir(&dir, 0, 4096).unwrap();
    fs::remove_dir(nfsd.path().join("dir")).unwrap();
    let stale = Nfsstat3::ErrStale;
    for created in creations(&mut nfs, &dir, "x", with_mode(0o755)) {
        assert_eq!(status(created), stale);
    }
    assert_eq!(status(nfs.create(&dir, "x", Createhow3::Exclusive([1; 8]))), stale);
    for name in ["x", ".", ".."] {
        assert_eq!(status(nfs.lookup(&dir, name)), stale, "{name}");
    }
    assert_eq!(status(nfs.remove(&dir, "x")), stale);
    assert_eq!(status(nfs.rmdir(&dir, "x")), stale);
    assert_eq!(status(nfs.rename(at(&dir, "x"), at(&root, "x"))), stale);
    assert_eq!(status(nfs.rename(at(&root, "file"), at(&dir, "x"))), stale);
    assert_eq!(status(nfs.call::<Link>(&Link3Args { file, link: at(&dir, "x") })), stale);
    assert_eq!(status(nfs.readdir(&dir, 0, 4096)), stale);
    assert_eq!(status(nfs.readdirplus(&dir, 0, 4096, 8192)), stale);
    assert_eq!(nfs.getattr(&dir).unwrap_err(), stale);
    assert_eq!(names(&nfsd), ["file"]);
}
