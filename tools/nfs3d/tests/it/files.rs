//! Data and attributes of files.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::time::UNIX_EPOCH;

use rpcrdma::{Config, CreditMode};
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Access, Fsinfo, Fsstat, Pathconf};
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Fh, Nfs, Nfsd, is_root, pattern, put, status, with_mode, with_size};

fn check_reads_and_writes(credit_mode: CreditMode, options: &[&str]) {
    let nfsd = Nfsd::start(options);
    let mut nfs = nfsd.client_as(0, credit_mode);
    let root = nfs.root;
    for len in [0, 1, 2, 3, 4, 5, 1000, 3840, 4095, 4096, 65537, (1 << 20) - 1, 1 << 20] {
        let (name, data) = (format!("file-{len}"), pattern(len));
        let file = nfs.make(&root, &name);
        let written = match len {
            0 => nfs.write_inline(&file, 0, &data),
            _ => nfs.write(&file, 0, &data, StableHow::Unstable),
        };
        assert_eq!(written.unwrap().count as usize, len);
        nfs.commit(&file).unwrap();
        assert_eq!(fs::read(nfsd.path().join(&name)).unwrap(), data, "{len} bytes written");
        let (attributes, eof, back) = nfs.read(&file, 0, len as u32).unwrap();
        assert_eq!((attributes.size, eof), (len as u64, true), "{len} bytes");
        assert!(back == data, "{len} bytes read");
        if len <= 3840 {
            assert_eq!(nfs.read_inline(&file, 0, len as u32), (true, data));
        }
    }
}

#[test]
fn written_data_is_read_by_chunks_and_inline() {
    check_reads_and_writes(CreditMode::V2Windowed, &[]);
}

#[test]
fn written_data_is_read_by_chunks_and_inline_in_version_1() {
    check_reads_and_writes(CreditMode::V1, &[]);
}

#[test]
fn shards_read_and_write_without_worker_threads() {
    check_reads_and_writes(CreditMode::V2Windowed, &["--workers", "0"]);
}

#[test]
fn reads_within_at_and_beyond_the_end_of_a_file() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let data = pattern(100_000);
    put(&nfsd.path().join("file"), &data);
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    for (offset, count) in [(0, 99_999), (1, 99_999), (3, 5), (99_999, 1), (12_345, 54_321)] {
        let (attributes, eof, part) = nfs.read(&file, offset, count).unwrap();
        let end = offset as usize + count as usize;
        assert!(part == data[offset as usize..end], "{count} at {offset}");
        assert_eq!((attributes.size, eof), (100_000, end == 100_000));
    }
    // A READ across the end is shorter, and a READ beyond the end returns no data. Neither is an error.
    let (_, eof, part) = nfs.read(&file, 99_000, 5000).unwrap();
    assert!(eof && part == data[99_000..]);
    for offset in [100_000, 1 << 40, i64::MAX as u64 - 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
        assert!(nfs.read(&file, offset, 100).unwrap().1, "{offset}");
        assert_eq!(nfs.read(&file, offset, 100).unwrap().2, b"", "{offset}");
        assert_eq!(nfs.read_inline(&file, offset, 100), (true, vec![]));
    }
    // Without a chunk there is less room, so a READ returns less data.
    let (eof, part) = nfs.read_inline(&file, 7, 50_000);
    assert!(!eof && part.len() >= 3000 && part == data[7..7 + part.len()]);
    // Writes at unaligned offsets, across the end, and far beyond it.
    let mut expected = data;
    for (offset, len) in [(1, 3), (50_001, 4097), (99_999, 7), (150_000, 10)] {
        let part: Vec<u8> = pattern(len).iter().map(|byte| !byte).collect();
        if expected.len() < offset + len {
            expected.resize(offset + len, 0);
        }
        expected[offset..offset + len].copy_from_slice(&part);
        let written = nfs.write(&file, offset as u64, &part, StableHow::DataSync).unwrap();
        assert_eq!((written.count as usize, written.committed), (len, StableHow::DataSync));
        assert_eq!(written.file_wcc.after.unwrap().size, expected.len() as u64);
    }
    assert!(fs::read(nfsd.path().join("file")).unwrap() == expected);
    let far = 5_000_000_001;
    nfs.write(&file, far, b"far away", StableHow::FileSync).unwrap();
    assert_eq!(nfs.read(&file, far, 100).unwrap().2, b"far away");
    let mut end = [0; 8];
    fs::File::open(nfsd.path().join("file")).unwrap().read_exact_at(&mut end, far).unwrap();
    assert_eq!(&end, b"far away");
    assert_eq!(status(nfs.write(&file, i64::MAX as u64, b"ab", StableHow::Unstable)), Nfsstat3::ErrFbig);
    assert_eq!(status(nfs.write(&file, u64::MAX, b"ab", StableHow::Unstable)), Nfsstat3::ErrFbig);
}

/// A READ without a chunk returns as much data as fits one message. The client asks for the rest.
#[test]
fn a_read_without_a_chunk_is_bounded_by_the_inline_threshold() {
    let nfsd = Nfsd::start(&[]);
    let data = pattern(10_000);
    put(&nfsd.path().join("file"), &data);
    for (receive_size, max_count) in [(4096, 3940), (2048, 1892), (1024, 868)] {
        let mut shard = Config::default();
        shard.wire.credit_mode = CreditMode::V1;
        shard.wire.receive_size = receive_size;
        let mut nfs = nfsd.client_with(0, shard);
        let root = nfs.root;
        let file = nfs.find(&root, "file");
        for count in [0, 1, 100, max_count - 1, max_count, max_count + 1, 10_000] {
            let (eof, part) = nfs.read_expecting(&file, 3, count as u32, receive_size - 28 - 24);
            assert!(
                !eof && part == data[3..3 + count.min(max_count)],
                "{} of {count} within {receive_size}",
                part.len()
            );
        }
    }
}

#[test]
fn only_regular_files_can_be_read_and_written() {
    let nfsd = Nfsd::start(&[]);
    std::os::unix::fs::symlink("x", nfsd.path().join("link")).unwrap();
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let link = nfs.find(&root, "link");
    assert_eq!(nfs.read(&root, 0, 10).unwrap_err(), Nfsstat3::ErrIsdir);
    assert_eq!(nfs.read(&link, 0, 10).unwrap_err(), Nfsstat3::ErrInval);
    assert_eq!(status(nfs.write(&root, 0, b"x", StableHow::Unstable)), Nfsstat3::ErrIsdir);
    assert_eq!(status(nfs.commit(&root)), Nfsstat3::ErrIsdir);
    let size = with_size(1);
    assert_eq!(status(nfs.setattr(&root, size, None)), Nfsstat3::ErrIsdir);
}

#[test]
fn attributes_of_files_are_reported_and_can_be_set() {
    let nfsd = Nfsd::start(&[]);
    let path = nfsd.path().join("file");
    put(&path, b"twelve bytes");
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    let (seen, actual) = (nfs.getattr(&file).unwrap(), fs::metadata(&path).unwrap());
    assert_eq!((seen.r#type, seen.size, seen.nlink), (Ftype3::Reg, 12, 1));
    assert_eq!((seen.mode, seen.uid, seen.gid), (actual.mode() & 0o7777, actual.uid(), actual.gid()));
    assert_eq!((seen.fileid, seen.used), (actual.ino(), actual.blocks() * 512));
    assert_eq!((seen.mtime.seconds, seen.mtime.nseconds), (actual.mtime() as u32, actual.mtime_nsec() as u32));
    assert_eq!(nfs.getattr(&root).unwrap().r#type, Ftype3::Dir);

    let time = Nfstime3 { seconds: 1_000_000_000, nseconds: 5 };
    let new = Sattr3 {
        mode: Some(0o4751),
        size: Some(6),
        atime: SetAtime::Default(TimeHow::SetToServerTime),
        mtime: SetMtime::SetToClientTime(time),
        ..UNCHANGED
    };
    let set = nfs.setattr(&file, new, Some(seen.ctime)).unwrap();
    assert_eq!(set.obj_wcc.before.unwrap().size, 12);
    let after = set.obj_wcc.after.unwrap();
    assert_eq!((after.size, after.mode, after.mtime), (6, 0o4751, time));
    assert_eq!(fs::read(&path).unwrap(), b"twelve");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o4751);
    // The guard refuses the change, because the file has changed meanwhile.
    let late = nfs.setattr(&file, with_mode(0o600), Some(seen.ctime));
    assert_eq!(status(late), Nfsstat3::ErrNotSync);
    assert_eq!(nfs.getattr(&file).unwrap().mode, 0o4751);
    let too_large = with_size(u64::MAX);
    assert_eq!(status(nfs.setattr(&file, too_large, None)), Nfsstat3::ErrFbig);
    let invalid_user = Sattr3 { uid: Some(u32::MAX), ..UNCHANGED };
    assert_eq!(status(nfs.setattr(&file, invalid_user, None)), Nfsstat3::ErrInval);
}

#[test]
fn fsinfo_and_pathconf_report_the_file_system() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let info = nfs.call::<Fsinfo>(&Fsinfo3Args { fsroot: root });
    let info = info.unwrap();
    assert_eq!((info.rtmax, info.wtmax, info.dtpref), (1 << 20, 1 << 20, 64 << 10));
    assert!(info.maxfilesize > 1 << 40 && info.obj_attributes.is_some());
    let stat = nfs.call::<Fsstat>(&Fsstat3Args { fsroot: root });
    let (stat, actual) = (stat.unwrap(), rustix::fs::statvfs(nfsd.path()).unwrap());
    assert_eq!((stat.tbytes, stat.tfiles), (actual.f_blocks * actual.f_frsize, actual.f_files));
    let conf = nfs.call::<Pathconf>(&Pathconf3Args { object: root });
    let conf = conf.unwrap();
    assert_eq!((conf.name_max, conf.no_trunc, conf.case_preserving), (255, true, true));
}

/// Rights that ACCESS grants if all are requested.
fn rights(nfs: &mut Nfs, object: &Fh) -> u32 {
    let args = Access3Args { object: *object, access: 63 };
    nfs.call::<Access>(&args).unwrap().access
}

#[test]
fn users_have_only_the_access_that_file_permissions_allow() {
    if !is_root() {
        eprintln!("not run: only root can act as other users");
        return;
    }
    let nfsd = Nfsd::start(&[]);
    fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut root = nfsd.client();
    let (mut owner, mut other) = (nfsd.client_as(1234, CreditMode::V1), nfsd.client_as(5678, CreditMode::V2Windowed));
    let top = root.root;
    let file = owner.make(&top, "file");
    assert_eq!(fs::metadata(nfsd.path().join("file")).unwrap().uid(), 1234);
    owner.setattr(&file, with_mode(0o400), None).unwrap();
    // The owner may write although the mode forbids it, because a file may have been opened before the mode changed.
    owner.write(&file, 0, b"mine", StableHow::Unstable).unwrap();
    assert_eq!(other.read(&file, 0, 10).unwrap_err(), Nfsstat3::ErrAcces);
    assert_eq!(status(other.write(&file, 0, b"x", StableHow::Unstable)), Nfsstat3::ErrAcces);
    assert_eq!(status(other.setattr(&file, with_mode(0o777), None)), Nfsstat3::ErrPerm);
    assert_eq!(root.read(&file, 0, 10).unwrap().2, b"mine");
    assert_eq!(rights(&mut owner, &file) & ACCESS3_READ, ACCESS3_READ);
    assert_eq!(rights(&mut owner, &file) & ACCESS3_MODIFY, 0);
    assert_eq!(rights(&mut other, &file), 0);
    owner.setattr(&file, with_mode(0o646), None).unwrap();
    other.write(&file, 4, b" and yours", StableHow::Unstable).unwrap();
    assert_eq!(other.read(&file, 0, 100).unwrap().2, b"mine and yours");
    assert_eq!(rights(&mut other, &file), ACCESS3_READ | ACCESS3_MODIFY | ACCESS3_EXTEND);
    // A user with write permission may truncate the file. A request that also needs the owner truncates nothing.
    let cut = |mtime| Sattr3 { mtime, ..with_size(4) };
    let then = Nfstime3 { seconds: 1, nseconds: 0 };
    for wrong in [
        cut(SetMtime::SetToClientTime(then)),
        Sattr3 { mode: Some(0o666), ..cut(SetMtime::Default(TimeHow::DontChange)) },
        Sattr3 { uid: Some(5678), ..cut(SetMtime::Default(TimeHow::DontChange)) },
        Sattr3 { uid: Some(u32::MAX), ..cut(SetMtime::Default(TimeHow::DontChange)) },
    ] {
        let refused = status(other.setattr(&file, wrong, None));
        assert!([Nfsstat3::ErrPerm, Nfsstat3::ErrInval].contains(&refused), "{refused:?}: {wrong:?}");
        assert_eq!(other.read(&file, 0, 100).unwrap().2, b"mine and yours", "{wrong:?}");
    }
    fs::File::options().write(true).open(nfsd.path().join("file")).unwrap().set_modified(UNIX_EPOCH).unwrap();
    other.setattr(&file, cut(SetMtime::Default(TimeHow::SetToServerTime)), None).unwrap();
    assert_eq!(other.read(&file, 0, 100).unwrap().2, b"mine");
    assert!(fs::metadata(nfsd.path().join("file")).unwrap().modified().unwrap() > UNIX_EPOCH);
    // Only root may give a file away.
    let give = Sattr3 { uid: Some(5678), ..UNCHANGED };
    assert_eq!(status(owner.setattr(&file, give, None)), Nfsstat3::ErrPerm);
    root.setattr(&file, give, None).unwrap();
    let locked = owner.make_dir(&top, "locked");
    owner.setattr(&locked, with_mode(0o700), None).unwrap();
    assert_eq!(status(other.lookup(&locked, "x")), Nfsstat3::ErrAcces);
    assert_eq!(other.readdir(&locked, 0, 4096).unwrap_err(), Nfsstat3::ErrAcces);
    assert_eq!(status(other.create(&locked, "x", Createhow3::Unchecked(with_mode(0o600)))), Nfsstat3::ErrAcces);
}

#[test]
fn squashed_root_acts_as_nobody() {
    if !is_root() {
        eprintln!("not run: only root can act as other users");
        return;
    }
    let nfsd = Nfsd::start(&["--squash", "root"]);
    put(&nfsd.path().join("secret"), b"x");
    fs::set_permissions(nfsd.path().join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // The highest number is not a user, and must not be passed on as "no change".
    for uid in [0, u32::MAX] {
        let mut nfs = nfsd.client_as(uid, CreditMode::V1);
        let root = nfs.root;
        let secret = nfs.find(&root, "secret");
        assert_eq!(nfs.read(&secret, 0, 10).unwrap_err(), Nfsstat3::ErrAcces, "{uid}");
        nfs.make(&root, &format!("made-by-{uid}"));
        assert_eq!(fs::metadata(nfsd.path().join(format!("made-by-{uid}"))).unwrap().uid(), 65534);
    }
}
