//! Users as whom calls run, mount points, and files that the server must not open.

use std::fs;
use std::mem::MaybeUninit;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::Mknod;
use rpcrdma_nfs3d::nfs3::*;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::client::{Fh, Nfs, Nfsd, at, can_switch_users, is_root, put, status, with_mode, with_size};

const OWNER: u32 = 1234;
const OTHER: u32 = 5678;
const NOW: SetMtime = SetMtime::Default(TimeHow::SetToServerTime);

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").mode() & 0o7777
}

/// Creates a file of a user.
fn create_file(path: &Path, owner: u32, mode: u32) {
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
fn set_id_bits_are_cleared_in_files_that_are_already_open() {
    if !can_switch_users() {
        return;
    }
    for options in [&[][..], &["--workers", "0"]] {
        let nfsd = Nfsd::start(options);
        for (what, change) in CHANGES {
            for set_id in [0o4777, 0o2777, 0o6777] {
                // The bits are also cleared for the owner, and in files that a call of root or of the owner has opened
                // before.
                for (uid, expected) in [(0, set_id), (OTHER, 0o777), (OWNER, 0o777), (OTHER, 0o777)] {
                    let name = format!("{what}-{set_id:o}");
                    let path = nfsd.path().join(&name);
                    create_file(&path, OWNER, set_id);
                    let mut nfs = nfsd.client_in(uid, &[]);
                    let root = nfs.root;
                    let file = nfs.find(&root, &name);
                    change(&mut nfs, &file, &name);
                    assert_eq!(format!("{:o}", mode(&path)), format!("{expected:o}"), "{what} by {uid} of {set_id:o}");
                }
            }
        }
    }
}

#[test]
fn threads_do_not_keep_the_user_and_groups_of_a_call() {
    if !can_switch_users() {
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

/// Starts a server as a user that is not root, with options of `setpriv`.
fn start_as_owner(options: &str) -> Nfsd {
    let script = format!(
        "chown -R {OWNER}:{OWNER} $EXPORT/..; exec setpriv --reuid={OWNER} --regid={OWNER} --clear-groups {options} \
         \"$@\""
    );
    Nfsd::start_after(&script, &[])
}

/// The kernel's client creates a file with its final mode, and then writes it.
#[test]
fn the_owner_may_use_a_new_file_whose_mode_denies_it() {
    if !can_switch_users() {
        return;
    }
    for nfsd in [Nfsd::start(&[]), start_as_owner("")] {
        fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let mut nfs = nfsd.client_in(OWNER, &[]);
        let root = nfs.root;
        for mode in [0o444, 0o200, 0] {
            let new = Sattr3 { size: Some(0), ..with_mode(mode) };
            let ways = [Createhow3::Guarded(new), Createhow3::Unchecked(new), Createhow3::Exclusive([7; 8])];
            for (n, how) in ways.into_iter().enumerate() {
                let file = nfs.create(&root, &format!("{mode:o}-{n}"), how).unwrap().obj.unwrap();
                nfs.setattr(&file, with_mode(mode), None).unwrap();
                nfs.write(&file, 0, b"content", StableHow::FileSync).unwrap();
                nfs.setattr(&file, with_size(4), None).unwrap();
                assert_eq!(nfs.read(&file, 0, 100).unwrap().2, b"cont", "{mode:o}");
            }
        }
    }
}

/// The server may have opened the file before the flag was set.
#[test]
fn append_only_and_immutable_files_are_not_written() {
    if !can_switch_users() {
        return;
    }
    let nfsd = Nfsd::start(&[]);
    let path = nfsd.path().join("file");
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.make(&root, "file");
    for flag in ["a", "i"] {
        nfs.write(&file, 0, b"data", StableHow::FileSync).unwrap();
        let change = |sign| Command::new("chattr").arg(format!("{sign}{flag}")).arg(&path).output();
        match change("+") {
            Ok(output) if output.status.success() => {}
            output => return println!("not run: chattr: {output:?}"),
        }
        let written = nfs.write(&file, 0, b"more", StableHow::FileSync);
        assert!(change("-").unwrap().status.success());
        assert_eq!(status(written), Nfsstat3::ErrPerm, "chattr +{flag}");
    }
    assert_eq!(fs::read(&path).unwrap(), b"data");
}

#[test]
fn a_server_that_is_not_root_uses_no_capabilities() {
    if !can_switch_users() {
        return;
    }
    let nfsd = start_as_owner("--inh-caps=+fsetid,+dac_override --ambient-caps=+fsetid,+dac_override");
    let path = nfsd.path().join("file");
    create_file(&path, OWNER, 0o4755);
    create_file(&nfsd.path().join("others"), OTHER, 0o600);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.find(&root, "file");
    nfs.write(&file, 0, b"new", StableHow::FileSync).unwrap();
    assert_eq!(mode(&path), 0o755);
    let others = nfs.find(&root, "others");
    assert_eq!(status(nfs.write(&others, 0, b"x", StableHow::Unstable)), Nfsstat3::ErrAcces);
    // The server also creates and changes a file that it may not open.
    let made = nfs.create(&root, "closed", Createhow3::Guarded(with_mode(0))).unwrap().obj.unwrap();
    nfs.setattr(&made, with_mode(0o200), None).unwrap();
    assert_eq!(mode(&nfsd.path().join("closed")), 0o200);
}

#[test]
fn attributes_of_fifos_and_devices_are_set_without_opening_them() {
    let nfsd = Nfsd::start(&[]);
    let path = nfsd.path().join("fifo");
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let watch = inotify::init(CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &path, WatchFlags::OPEN | WatchFlags::ATTRIB).unwrap();
    if is_root() {
        let null = nfsd.path().join("device");
        mknodat(CWD, &null, FileType::CharacterDevice, Mode::from_raw_mode(0o600), rustix::fs::makedev(1, 3)).unwrap();
        inotify::add_watch(&watch, &null, WatchFlags::OPEN | WatchFlags::ATTRIB).unwrap();
    }
    let mut nfs = nfsd.client();
    let root = nfs.root;
    for name in ["fifo", "device"] {
        let Ok(found) = nfs.lookup(&root, name) else { continue };
        let time = Nfstime3 { seconds: 7, nseconds: 999_999_999 };
        let new = Sattr3 { mtime: SetMtime::SetToClientTime(time), ..with_mode(0o640) };
        let after = nfs.setattr(&found.object, new, None).unwrap().obj_wcc.after.unwrap();
        assert_eq!((after.mode, after.mtime), (0o640, time), "{name}");
        assert_eq!(status(nfs.setattr(&found.object, with_size(0), None)), Nfsstat3::ErrInval, "{name}");
    }
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    let mut seen = ReadFlags::empty();
    while let Ok(event) = events.next() {
        seen |= event.events();
    }
    assert_eq!(seen, ReadFlags::ATTRIB);
}

/// Times of a file, in seconds.
fn times(path: &Path) -> (i64, i64) {
    let file = fs::metadata(path).unwrap();
    (file.atime(), file.mtime())
}

#[test]
fn users_with_write_permission_may_set_times_to_the_present() {
    if !can_switch_users() {
        return;
    }
    let nfsd = Nfsd::start(&[]);
    let path = nfsd.path().join("file");
    let mut other = nfsd.client_in(OTHER, &[]);
    let root = other.root;
    let keep = SetMtime::Default(TimeHow::DontChange);
    let given = SetMtime::SetToClientTime(Nfstime3 { seconds: 5, nseconds: 0 });
    for (mode, refused) in [(0o666, None), (0o644, Some(Nfsstat3::ErrAcces))] {
        for (atime, mtime) in [(NOW, NOW), (keep, NOW), (NOW, keep)] {
            create_file(&path, OWNER, mode);
            let old = fs::FileTimes::new().set_accessed(UNIX_EPOCH).set_modified(UNIX_EPOCH + Duration::from_secs(1));
            fs::File::options().write(true).open(&path).unwrap().set_times(old).unwrap();
            let file = other.find(&root, "file");
            let set = other.setattr(&file, Sattr3 { atime, mtime, ..UNCHANGED }, None);
            assert_eq!(set.err(), refused, "{atime:?} {mtime:?}");
            let (accessed, modified) = times(&path);
            let expected = |new: SetMtime| new == NOW && refused.is_none();
            assert_eq!((accessed > 0, modified > 1), (expected(atime), expected(mtime)), "{atime:?} {mtime:?}");
        }
        let file = other.find(&root, "file");
        for (atime, mtime) in [(given, NOW), (keep, given), (NOW, given)] {
            let set = other.setattr(&file, Sattr3 { atime, mtime, ..UNCHANGED }, None);
            assert_eq!(status(set), Nfsstat3::ErrPerm);
        }
    }
}

#[test]
fn file_systems_mounted_in_the_export_are_not_exported() {
    if !can_switch_users() {
        return;
    }
    for handles in ["kernel", "names"] {
        let nfsd = Nfsd::start_after(
            "mkdir $EXPORT/../outside $EXPORT/bound; echo secret >$EXPORT/../outside/secret; touch $EXPORT/file; \
             mount --bind $EXPORT/../outside $EXPORT/bound; mount --bind $EXPORT/../outside/secret $EXPORT/file; \
             exec \"$@\"",
            &["--handles", handles],
        );
        let mut nfs = nfsd.client();
        let root = nfs.root;
        assert!(nfsd.server_path("bound/secret").exists());
        for name in ["bound", "file"] {
            assert_eq!(status(nfs.lookup(&root, name)), Nfsstat3::ErrAcces, "{name}");
            let how = Createhow3::Unchecked(with_size(0));
            assert!(nfs.create(&root, name, how).is_err(), "{name}");
            assert_eq!(status(nfs.rename(at(&root, name), at(&root, "x"))), Nfsstat3::ErrAcces, "{name}");
        }
        assert_eq!(status(nfs.rmdir(&root, "bound")), Nfsstat3::ErrAcces);
        assert_eq!(status(nfs.remove(&root, "file")), Nfsstat3::ErrAcces);
        let (entries, _) = nfs.readdirplus(&root, 0, 4096, 8192).unwrap();
        let mounted = entries.iter().filter(|entry| [&b"bound"[..], b"file"].contains(&entry.name.0));
        assert_eq!(mounted.clone().count(), 2);
        assert!(mounted.clone().all(|entry| entry.name_handle.is_none() && entry.name_attributes.is_none()));
        assert!(crate::mount::mount(nfsd.mount_port, &nfsd.path().join("bound")).is_err());
        assert_eq!(fs::read(nfsd.server_path("bound/secret")).unwrap(), b"secret\n");
    }
}

#[test]
fn device_numbers_that_the_system_would_truncate_are_refused() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    for (major, minor) in [(0x1000, 3), (1, 0x10_0000), (u32::MAX, u32::MAX)] {
        let spec = Specdata3 { specdata1: major, specdata2: minor };
        let what = Mknoddata3::Chr(Devicedata3 { dev_attributes: with_mode(0o600), spec });
        let made = nfs.call::<Mknod>(&Mknod3Args { r#where: at(&root, "device"), what });
        assert_eq!(status(made), Nfsstat3::ErrInval, "{major} {minor}");
    }
    assert_eq!(status(nfs.lookup(&root, "device")), Nfsstat3::ErrNoent);
}
