//! CREATE, MKDIR, MKNOD.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rpcrdma::typed::{Answer, Signature};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, fstat, makedev, mkdirat, mknodat, openat, utimensat,
};
use rustix::io::{self, Errno};

use crate::UNCHANGED;
use crate::attr;
use crate::export::{Export, changeable};
use crate::identity::Identity;
use crate::nfs::Answered;
use crate::nfs3::nfs_v3::{Create, Mkdir, Mknod};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, status};

/// A created or existing file.
pub(crate) type Made = (Arc<Node>, Stat);

/// Runs a creation in a directory, with the directory's attributes before and after, and makes it stable.
pub(crate) fn in_dir<T>(
    export: &Export,
    handle: NfsFh3<'_>,
    run: impl FnOnce(&Node) -> Outcome<T>,
) -> (Outcome<T>, WccData) {
    let dir = match export.find_dir(handle) {
        Ok(dir) => dir,
        Err(status) => return (Err(status), WccData::default()),
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
pub(crate) fn finish(export: &Export, dir: &Node, name: &[u8], who: &Identity, rest: &Sattr3) -> Outcome<Made> {
    let (node, _) = export.look_up(dir, name, who)?;
    attr::apply(&node, who, rest)?;
    if !node.is_symlink() {
        export.settle(&node)?;
    }
    let stat = node.stat()?;
    Ok((node, stat))
}

/// The requested attributes without the mode, which creation sets.
fn but_mode(new: &Sattr3) -> Sattr3 {
    Sattr3 { mode: None, ..*new }
}

/// Sends the common results.
pub(crate) fn send<P>(answer: Answer<'_, P>, (outcome, dir_wcc): (Outcome<Made>, WccData)) -> Answered
where
    P: for<'a> Signature<Results<'a> = Create3Res<'a>>,
{
    let done = outcome.as_ref().map(|(node, stat)| {
        let (obj, obj_attributes) = (Some(node.handle()), Some(attr::fattr(stat)));
        Create3Resok { obj, obj_attributes, dir_wcc }
    });
    answer.send(&done.map_err(|status| (*status, Create3Resfail { dir_wcc })).into())
}

pub(crate) fn create(export: &Export, who: &Identity, args: Create3Args<'_>, answer: Answer<'_, Create>) -> Answered {
    let made = in_dir(export, args.r#where.dir, |dir| {
        let name = changeable(args.r#where.name, Nfsstat3::ErrExist)?;
        match &args.how {
            Createhow3::Exclusive(verifier) => exclusive(export, dir, name, who, verifier),
            Createhow3::Guarded(new) => {
                make_file(dir, name, who, attr::mode(new)).map_err(status)?;
                finish(export, dir, name, who, &but_mode(new))
            }
            Createhow3::Unchecked(new) => match make_file(dir, name, who, attr::mode(new)) {
                Ok(_) => finish(export, dir, name, who, &but_mode(new)),
                Err(Errno::EXIST) => existing(export, dir, name, who, new.size),
                Err(error) => Err(status(error)),
            },
        }
    });
    send(answer, made)
}

fn make_file(dir: &Node, name: &[u8], who: &Identity, mode: Mode) -> io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    who.act(|| openat(dir.fd(), name, flags, mode))
}

/// Unchecked CREATE of an existing file: only the size applies.
fn existing(export: &Export, dir: &Node, name: &[u8], who: &Identity, size: SetSize3) -> Outcome<Made> {
    let (node, _) = export.look_up(dir, name, who)?;
    if node.check_regular().is_err() {
        return Err(Nfsstat3::ErrExist);
    }
    if size.is_some() {
        attr::apply(&node, who, &Sattr3 { size, ..UNCHANGED })?;
        export.settle(&node)?;
    }
    let stat = node.stat()?;
    Ok((node, stat))
}

/// Exclusive CREATE: a file with the client's verifier is its own. The file's times hold the verifier until the client
/// sets them.
fn exclusive(export: &Export, dir: &Node, name: &[u8], who: &Identity, verifier: &Createverf3) -> Outcome<Made> {
    let [a, b, c, d, e, f, g, h] = *verifier;
    // All file systems keep 31 bits of seconds.
    let seconds = |bytes| Timespec { tv_sec: i64::from(u32::from_be_bytes(bytes) & 0x7FFF_FFFF), tv_nsec: 0 };
    let times = Timestamps { last_access: seconds([a, b, c, d]), last_modification: seconds([e, f, g, h]) };
    match make_file(dir, name, who, Mode::empty()) {
        Ok(file) => {
            let stat = fstat(&file).map_err(status)?;
            who.act(|| utimensat(file.as_fd(), "", &times, AtFlags::EMPTY_PATH)).map_err(status)?;
            drop((file, stat));
            finish(export, dir, name, who, &UNCHANGED)
        }
        Err(Errno::EXIST) => {
            let (node, stat) = export.look_up(dir, name, who)?;
            let its = (stat.st_atime, stat.st_mtime);
            let own = its == (times.last_access.tv_sec, times.last_modification.tv_sec);
            let same = own && node.check_regular().is_ok() && stat.st_size == 0;
            if same { Ok((node, stat)) } else { Err(Nfsstat3::ErrExist) }
        }
        Err(error) => Err(status(error)),
    }
}

pub(crate) fn mkdir(export: &Export, who: &Identity, args: Mkdir3Args<'_>, answer: Answer<'_, Mkdir>) -> Answered {
    let new = &args.attributes;
    let made = in_dir(export, args.r#where.dir, |dir| {
        let name = changeable(args.r#where.name, Nfsstat3::ErrExist)?;
        who.act(|| mkdirat(dir.fd(), name, attr::mode(new))).map_err(status)?;
        // Systems treat special bits in the mode of mkdir differently.
        let mode = new.mode.filter(|mode| mode & 0o7000 != 0);
        finish(export, dir, name, who, &Sattr3 { mode, size: None, ..*new })
    });
    send(answer, made)
}

pub(crate) fn mknod(export: &Export, who: &Identity, args: Mknod3Args<'_>, answer: Answer<'_, Mknod>) -> Answered {
    let device = |data: &Devicedata3| makedev(data.spec.specdata1, data.spec.specdata2);
    let made = in_dir(export, args.r#where.dir, |dir| {
        let name = changeable(args.r#where.name, Nfsstat3::ErrExist)?;
        let (kind, new, dev) = match &args.what {
            Mknoddata3::Chr(data) => (FileType::CharacterDevice, &data.dev_attributes, device(data)),
            Mknoddata3::Blk(data) => (FileType::BlockDevice, &data.dev_attributes, device(data)),
            Mknoddata3::Sock(new) => (FileType::Socket, new, 0),
            Mknoddata3::Fifo(new) => (FileType::Fifo, new, 0),
            Mknoddata3::Default(_) => return Err(Nfsstat3::ErrBadtype),
        };
        who.act(|| mknodat(dir.fd(), name, kind, attr::mode(new), dev)).map_err(status)?;
        // Special files cannot be opened for a sync: they are stable with the directory.
        let (node, _) = export.look_up(dir, name, who)?;
        attr::apply(&node, who, &Sattr3 { mode: None, size: None, ..*new })?;
        let stat = node.stat()?;
        Ok((node, stat))
    });
    send(answer, made)
}
