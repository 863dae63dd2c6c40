//! CREATE, MKDIR, MKNOD.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nfs3_types::nfs3::{
    CREATE3res, CREATE3resfail, CREATE3resok, MKDIR3res, MKDIR3resfail, MKDIR3resok, MKNOD3res, MKNOD3resfail,
    MKNOD3resok, Nfs3Result, createhow3, createverf3, devicedata3, mknoddata3, nfsstat3, sattr3, set_size3, wcc_data,
};
use rpcrdma::Refusal;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, fstat, makedev, mkdirat, mknodat, openat, utimensat,
};
use rustix::io::{self, Errno};

use crate::attr::{self, fattr};
use crate::codec::{Args, Outcome, fh, given, optional};
use crate::export::{Export, changeable};
use crate::handles::FileHandle;
use crate::identity::Identity;
use crate::node::Node;
use crate::status::status;

/// A created or existing file.
pub(crate) type Made = (Arc<Node>, Stat);

/// Runs a creation in a directory, with the directory's attributes before and after, and makes it stable.
pub(crate) fn in_dir<T>(
    export: &Export,
    handle: &FileHandle,
    run: impl FnOnce(&Node) -> Outcome<T>,
) -> (Outcome<T>, wcc_data) {
    let dir = match export.find_dir(handle) {
        Ok(dir) => dir,
        Err(status) => return (Err(status), attr::no_wcc()),
    };
    let _alone = dir.lock();
    let before = dir.stat().ok().as_ref().map(attr::before);
    let outcome = export.check_writable().and_then(|()| {
        let done = run(&dir)?;
        export.settle(&dir)?;
        Ok(done)
    });
    (outcome, attr::wcc(before, &dir))
}

/// Opens the new file with `O_PATH`, sets its other attributes, and makes it stable.
pub(crate) fn finish(export: &Export, dir: &Node, name: &[u8], who: &Identity, rest: &sattr3) -> Outcome<Made> {
    let (node, _) = export.look_up(dir, name, who)?;
    attr::apply(&node, who, rest)?;
    if !node.is_symlink() {
        export.settle(&node)?;
    }
    let stat = node.stat()?;
    Ok((node, stat))
}

/// The requested attributes without the mode, which creation sets.
fn but_mode(new: &sattr3) -> sattr3 {
    sattr3 { mode: optional(None), ..new.clone() }
}

/// Common results.
macro_rules! results {
    ($ok:ident, $fail:ident, $outcome:expr, $dir_wcc:expr) => {{
        let (outcome, dir_wcc): ($crate::codec::Outcome<$crate::create::Made>, _) = ($outcome, $dir_wcc);
        match outcome {
            Ok((node, stat)) => Nfs3Result::Ok($ok {
                obj: optional(Some(fh(node.handle()))),
                obj_attributes: optional(Some(fattr(&stat))),
                dir_wcc,
            }),
            Err(status) => Nfs3Result::Err((status, $fail { dir_wcc })),
        }
    }};
}
pub(crate) use results;

pub(crate) fn create(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<CREATE3res, Refusal> {
    let (dir, name) = args.entry()?;
    let how: createhow3 = args.get()?;
    args.end()?;
    let (outcome, dir_wcc) = in_dir(export, &dir, |dir| {
        let name = changeable(name, nfsstat3::NFS3ERR_EXIST)?;
        match &how {
            createhow3::EXCLUSIVE(verifier) => exclusive(export, dir, name, who, verifier),
            createhow3::GUARDED(new) => {
                make_file(dir, name, who, attr::mode(new)).map_err(status)?;
                finish(export, dir, name, who, &but_mode(new))
            }
            createhow3::UNCHECKED(new) => match make_file(dir, name, who, attr::mode(new)) {
                Ok(_) => finish(export, dir, name, who, &but_mode(new)),
                Err(Errno::EXIST) => existing(export, dir, name, who, &new.size),
                Err(error) => Err(status(error)),
            },
        }
    });
    Ok(results!(CREATE3resok, CREATE3resfail, outcome, dir_wcc))
}

fn make_file(dir: &Node, name: &[u8], who: &Identity, mode: Mode) -> io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    who.act(|| openat(dir.fd(), name, flags, mode))
}

/// Unchecked CREATE of an existing file: only the size applies.
fn existing(export: &Export, dir: &Node, name: &[u8], who: &Identity, size: &set_size3) -> Outcome<Made> {
    let (node, _) = export.look_up(dir, name, who)?;
    if node.check_regular().is_err() {
        return Err(nfsstat3::NFS3ERR_EXIST);
    }
    if let Some(size) = given(size) {
        let only = sattr3 { size: optional(Some(size)), ..sattr3::default() };
        attr::apply(&node, who, &only)?;
        export.settle(&node)?;
    }
    let stat = node.stat()?;
    Ok((node, stat))
}

/// Exclusive CREATE: a file with the client's verifier is its own. The file's times hold the verifier until the client
/// sets them.
fn exclusive(export: &Export, dir: &Node, name: &[u8], who: &Identity, verifier: &createverf3) -> Outcome<Made> {
    let [a, b, c, d, e, f, g, h] = verifier.0;
    // All file systems keep 31 bits of seconds.
    let seconds = |bytes| Timespec { tv_sec: i64::from(u32::from_be_bytes(bytes) & 0x7FFF_FFFF), tv_nsec: 0 };
    let times = Timestamps { last_access: seconds([a, b, c, d]), last_modification: seconds([e, f, g, h]) };
    match make_file(dir, name, who, Mode::empty()) {
        Ok(file) => {
            let stat = fstat(&file).map_err(status)?;
            who.act(|| utimensat(file.as_fd(), "", &times, AtFlags::EMPTY_PATH)).map_err(status)?;
            drop((file, stat));
            finish(export, dir, name, who, &sattr3::default())
        }
        Err(Errno::EXIST) => {
            let (node, stat) = export.look_up(dir, name, who)?;
            let its = (stat.st_atime, stat.st_mtime);
            let own = its == (times.last_access.tv_sec, times.last_modification.tv_sec);
            let same = own && node.check_regular().is_ok() && stat.st_size == 0;
            if same { Ok((node, stat)) } else { Err(nfsstat3::NFS3ERR_EXIST) }
        }
        Err(error) => Err(status(error)),
    }
}

pub(crate) fn mkdir(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<MKDIR3res, Refusal> {
    let (dir, name) = args.entry()?;
    let new: sattr3 = args.get()?;
    args.end()?;
    let (outcome, dir_wcc) = in_dir(export, &dir, |dir| {
        let name = changeable(name, nfsstat3::NFS3ERR_EXIST)?;
        who.act(|| mkdirat(dir.fd(), name, attr::mode(&new))).map_err(status)?;
        // Systems treat special bits in the mode of mkdir differently.
        let special = given(&new.mode).is_some_and(|mode| mode & 0o7000 != 0);
        let rest = sattr3 { size: optional(None), ..if special { new.clone() } else { but_mode(&new) } };
        finish(export, dir, name, who, &rest)
    });
    Ok(results!(MKDIR3resok, MKDIR3resfail, outcome, dir_wcc))
}

pub(crate) fn mknod(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<MKNOD3res, Refusal> {
    let (dir, name) = args.entry()?;
    let what: mknoddata3 = args.get()?;
    if !matches!(what, mknoddata3::default) {
        args.end()?;
    }
    let device = |data: &devicedata3| makedev(data.spec.specdata1, data.spec.specdata2);
    let (outcome, dir_wcc) = in_dir(export, &dir, |dir| {
        let name = changeable(name, nfsstat3::NFS3ERR_EXIST)?;
        let (kind, new, dev) = match &what {
            mknoddata3::NF3CHR(data) => (FileType::CharacterDevice, &data.dev_attributes, device(data)),
            mknoddata3::NF3BLK(data) => (FileType::BlockDevice, &data.dev_attributes, device(data)),
            mknoddata3::NF3SOCK(new) => (FileType::Socket, new, 0),
            mknoddata3::NF3FIFO(new) => (FileType::Fifo, new, 0),
            mknoddata3::default => return Err(nfsstat3::NFS3ERR_BADTYPE),
        };
        who.act(|| mknodat(dir.fd(), name, kind, attr::mode(new), dev)).map_err(status)?;
        let rest = sattr3 { size: optional(None), ..but_mode(new) };
        // Special files cannot be opened for a sync: they are stable with the directory.
        let (node, _) = export.look_up(dir, name, who)?;
        attr::apply(&node, who, &rest)?;
        let stat = node.stat()?;
        Ok((node, stat))
    });
    Ok(results!(MKNOD3resok, MKNOD3resfail, outcome, dir_wcc))
}
