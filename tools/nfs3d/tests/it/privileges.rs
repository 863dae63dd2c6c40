//! Changes by a client have the same effect as changes by a local process of the same user.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rpcrdma::CreditMode;
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::Mkdir;
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Nfs, Nfsd, at, can_switch_users, with_mode, with_size};

#[test]
fn a_change_by_another_user_clears_set_id_bits() {
    if !can_switch_users() {
        return;
    }
    let nfsd = Nfsd::start(&[]);
    fs::set_permissions(nfsd.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (mut root, mut other) = (nfsd.client(), nfsd.client_as(5678, CreditMode::V2Windowed));
    let top = root.root;
    let path = nfsd.path().join("program");
    let write = |nfs: &mut Nfs| {
        let file = nfs.find(&top, "program");
        nfs.write(&file, 0, b"changed", StableHow::FileSync).map(drop)
    };
    let write_inline = |nfs: &mut Nfs| {
        let file = nfs.find(&top, "program");
        nfs.write_inline(&file, 0, b"changed").map(drop)
    };
    let cut = |nfs: &mut Nfs| {
        let file = nfs.find(&top, "program");
        nfs.setattr(&file, with_size(3), None).map(drop)
    };
    let create = |nfs: &mut Nfs| nfs.create(&top, "program", Createhow3::Unchecked(with_size(0))).map(drop);
    type Change<'a> = &'a dyn Fn(&mut Nfs) -> Result<(), Nfsstat3>;
    let changes: [(&str, Change<'_>); 4] =
        [("WRITE", &write), ("WRITE inline", &write_inline), ("SETATTR", &cut), ("CREATE", &create)];
    for (name, change) in changes {
        for (owner, mode, cleared) in [(1234, 0o4777, 0o777), (1234, 0o2777, 0o777), (5678, 0o6755, 0o755)] {
            fs::write(&path, b"a program").unwrap();
            std::os::unix::fs::chown(&path, Some(owner), Some(owner)).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            change(&mut other).unwrap();
            let found = fs::metadata(&path).unwrap().mode() & 0o7777;
            assert_eq!(found, cleared, "{name} of a file of {owner}: {found:o}, was {mode:o}");
        }
        // A change by root keeps the bits, as for local root.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        change(&mut root).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o4755, "{name} by root");
    }
}

#[test]
fn a_server_that_cannot_run_calls_with_the_rights_of_their_users_does_not_start() {
    if !can_switch_users() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let export = directory.path().join("export");
    fs::create_dir(&export).unwrap();
    let errors = |options: [&str; 2]| {
        let output = Command::new("setpriv")
            .args(options)
            .arg(env!("CARGO_BIN_EXE_nfs3d"))
            .arg(&export)
            .args(["--listen", "iwarp:192.0.2.1:1", "--mount-port", "0", "--key"])
            .arg(directory.path().join("key"))
            .output()
            .unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let keeps = errors(["--securebits", "+no_setuid_fixup"]);
    assert!(keeps.contains("start without SECBIT_NO_SETUID_FIXUP"), "{keeps}");
    let lacks = errors(["--bounding-set", "-setgid"]);
    assert!(lacks.contains("cannot drop the supplementary groups of root (this needs CAP_SETGID): "), "{lacks}");
}

/// A mounted file system in a file, unmounted on drop.
struct Mounted(PathBuf);

impl Mounted {
    /// Creates and mounts an ext4 file system of 16 MiB. The error is the reason why that is not possible.
    fn ext4(image: &Path, at: &Path, arguments: &[&str], option: &str) -> Result<Self, String> {
        fs::File::create(image).and_then(|file| file.set_len(16 << 20)).map_err(|error| error.to_string())?;
        succeeds(Command::new("/sbin/mkfs.ext4").arg("-q").args(arguments).arg(image))?;
        succeeds(Command::new("mount").args(["-o", &format!("loop,{option}")]).arg(image).arg(at))?;
        Ok(Self(at.into()))
    }
}

/// Runs a command, which must succeed. The error is the reason of its failure.
fn succeeds(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn blocks_reserved_for_root_are_not_given_to_users() {
    if !can_switch_users() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let export = directory.path().join("export");
    fs::create_dir(&export).unwrap();
    // A fifth is reserved for root.
    let _mounted = match Mounted::ext4(&directory.path().join("image"), &export, &["-m", "20"], "rw") {
        Ok(mounted) => mounted,
        Err(reason) => {
            println!("not run: no ext4 file system in a file: {reason}");
            return;
        }
    };
    fs::set_permissions(&export, fs::Permissions::from_mode(0o777)).unwrap();
    let nfsd = Nfsd::start_in(directory, &[]);
    let mut user = nfsd.client_as(1234, CreditMode::V2Windowed);
    let top = user.root;
    let file = user.make(&top, "large");
    let data = vec![7; 256 << 10];
    // The writes add up to 16 MiB, the size of the device. A full disk shortens one WRITE, and the next one fails.
    let full = (0..64).find_map(|n| user.write(&file, n * data.len() as u64, &data, StableHow::FileSync).err());
    assert_eq!(full, Some(Nfsstat3::ErrNospc));
    let space = rustix::fs::statvfs(&export).unwrap();
    let reserved = (space.f_bfree - space.f_bavail) * space.f_frsize;
    assert!(reserved > 3 << 20, "{reserved} bytes are still reserved");
    // Root may use them.
    let mut root = nfsd.client();
    let roots_file = root.make(&top, "root's");
    for n in 0..8 {
        root.write(&roots_file, n * data.len() as u64, &data, StableHow::FileSync).unwrap();
    }
}

#[test]
fn quotas_limit_users_but_not_root() {
    const USER: u32 = 1234;
    if !can_switch_users() {
        return;
    }
    for options in [&[][..], &["--workers", "0"]] {
        let directory = tempfile::tempdir().unwrap();
        let export = directory.path().join("export");
        fs::create_dir(&export).unwrap();
        let with_quota = ["-O", "quota", "-E", "quotatype=usrquota"];
        let mounted = Mounted::ext4(&directory.path().join("image"), &export, &with_quota, "usrquota");
        // 1 MiB in blocks of 1 KiB, and three files.
        let limits = [&USER.to_string(), "0", "1024", "0", "3"];
        let limited = |_: &Mounted| succeeds(Command::new("/usr/sbin/setquota").arg("-u").args(limits).arg(&export));
        let _mounted = match mounted.and_then(|mounted| limited(&mounted).map(|()| mounted)) {
            Ok(mounted) => mounted,
            Err(reason) => {
                println!("not run: no ext4 file system with quotas in a file (apt-get install quota): {reason}");
                return;
            }
        };
        fs::set_permissions(&export, fs::Permissions::from_mode(0o777)).unwrap();
        let nfsd = Nfsd::start_in(directory, options);
        let mut user = nfsd.client_as(USER, CreditMode::V2Windowed);
        let mut root = nfsd.client();
        let top = user.root;
        let file = user.make(&top, "large");
        let data = vec![7; 256 << 10];
        let used = || fs::metadata(export.join("large")).unwrap().blocks() * 512;
        let beyond = (0..16).find_map(|n| user.write(&file, n * data.len() as u64, &data, StableHow::FileSync).err());
        assert_eq!(beyond, Some(Nfsstat3::ErrDquot), "{options:?}");
        assert!(used() <= 1 << 20, "{} bytes", used());
        // The number of files is limited as well.
        for name in ["second", "third"] {
            user.make(&top, name);
        }
        let unchanged = Createhow3::Guarded(UNCHANGED);
        assert_eq!(user.create(&top, "fourth", unchanged).err(), Some(Nfsstat3::ErrDquot), "{options:?}");
        let directory =
            user.call::<Mkdir>(&Mkdir3Args { r#where: at(&top, "directory"), attributes: with_mode(0o755) });
        assert_eq!(directory.err(), Some(Nfsstat3::ErrDquot), "{options:?}");
        // Root is not limited.
        root.make(&top, "root's");
        for n in 0..8 {
            root.write(&file, n * data.len() as u64, &data, StableHow::FileSync).unwrap();
        }
        assert!(used() > 1 << 20, "{} bytes", used());
    }
}
